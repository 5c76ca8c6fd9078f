"""Documents from files, and their token ids on disk."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from jumok import InputError
from jumok.data.caches import document_store
from jumok.data.caches.document_store import DocumentStore
from jumok.data.readers import documents
from jumok.data.readers.documents import DocumentCorpus, FirstParagraphs
from jumok.data.readers.invalid_examples import SkippedExamples
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer

TEXT = "Title\r\nOne is here. Two is here.\r\n\r\n\r\n \nAlone\n\nLast one. Next\u0085line.\nEnd of it."


def paragraphs(corpus: DocumentCorpus) -> list[tuple[str, ...]]:
    return [document.paragraphs for document in corpus]


def test_empty_lines_separate_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"\n\nmore\n\n"))
    corpus = documents.find_documents(str(tmp_path / "*.txt*"))
    assert paragraphs(corpus) == [
        ("Title", "One is here. Two is here."),
        ("Alone",),
        ("Last one. Next\u0085line.", "End of it."),
        ("more",),
    ]
    assert [document.location.rpartition("/")[2] for document in corpus] == [
        "a.txt:1",
        "a.txt:6",
        "a.txt:8",
        "b.txt.gz:3",
    ]
    assert list(FirstParagraphs(corpus, 2)) == ["Title", "One is here. Two is here.", "Alone"]


def test_jsonl_and_squad_formats(tmp_path: Path) -> None:
    rows = [{"text": "One.\nTwo."}, {"text": "Three."}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    squad = {"data": [{"title": "T", "paragraphs": [{"context": "A。B。", "qas": []}, {"context": "C\nD"}]}]}
    (tmp_path / "b.json").write_text(json.dumps(squad))
    corpus = documents.find_documents([str(tmp_path / "a.jsonl"), str(tmp_path / "b.json")])
    assert paragraphs(corpus) == [("One.", "Two."), ("Three.",), ("A。B。", "C", "D")]


def test_documents_from_table_rows(tmp_path: Path) -> None:
    table = tmp_path / "train.tsv"
    table.write_text("id\treview\n1\tgood\n2\tbad\n3\t \n4\tso so\n5\tno\tmore\n6\tlast\n")
    rows = documents.DocumentRows("review", rows_per_document=2)
    corpus = documents.find_documents(str(table), on_error="skip", rows=rows)
    skipped = SkippedExamples()
    assert [document.paragraphs for document in corpus.read(skipped)] == [("good", "bad"), ("so so", "last")]
    assert [document.location.rpartition("/")[2] for document in corpus] == ["train.tsv:2", "train.tsv:5"]
    assert skipped.total == 2  # an empty one, and one with a cell too many
    assert corpus.fingerprint != documents.find_documents(str(table), rows=documents.DocumentRows("review")).fingerprint
    assert paragraphs(documents.find_documents(str(table), on_error="skip", rows=documents.DocumentRows(1, 4)))[0] == (
        "id",
        "1",
        "2",
        "3",
    )
    with pytest.raises(InputError, match=r"has no column 'text'.*review"):
        list(documents.find_documents(str(table), rows=documents.DocumentRows("text")))
    with pytest.raises(InputError, match=r"set data\.text_column"):
        documents.find_documents(str(table))


def test_find_documents_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path))
    (tmp_path / "wiki").mkdir()
    (tmp_path / "wiki" / "text.txt.gz").write_bytes(gzip.compress(b"one"))
    assert paragraphs(documents.find_documents("wiki/text")) == [("one",)]


def test_invalid_lines_stop_or_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\nbad \xff byte\nfine\n\nother\n")
    with pytest.raises(InputError, match=r"a\.txt:2: invalid UTF-8"):
        list(documents.find_documents(str(path)))
    skipped = SkippedExamples()
    corpus = documents.find_documents(str(path), on_error="skip")
    assert [document.paragraphs for document in corpus.read(skipped)] == [("good", "fine"), ("other",)]
    assert skipped.counts == {"invalid UTF-8": 1}
    (tmp_path / "b.jsonl").write_text('{"body": 1}\n')
    with pytest.raises(InputError, match=r"b\.jsonl:1: no 'text'"):
        list(documents.find_documents(str(tmp_path / "b.jsonl")))
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(InputError, match="not in SQuAD format"):
        list(documents.find_documents(str(tmp_path / "c.json")))
    (tmp_path / "d.doc").write_text("x")
    with pytest.raises(InputError, match=r"expected \.txt"):
        documents.find_documents(str(tmp_path / "d.doc"))
    (tmp_path / "e.txt").write_text("\n \n")
    with pytest.raises(InputError, match="no documents"):
        list(documents.find_documents(str(tmp_path / "e.txt")))


def test_long_document_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT_LINES", 3)
    (tmp_path / "a.txt").write_text("".join(f"{n}\n" for n in range(7)))
    assert paragraphs(documents.find_documents(str(tmp_path / "a.txt"))) == [
        ("0", "1", "2"),
        ("3", "4", "5"),
        ("6",),
    ]


# ------------------------------------------------------------------------------------------------- on disk


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A cat sat. A dog ran.\nThe end.\n\nAlone\n\n\x07\nOne cat. Two dogs.\n")
    return path


def test_store_round_trip(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_store, "DOCUMENTS_PER_CHUNK", 2)
    corpus = documents.find_documents(str(text))
    tokenizer = WordPieceTokenizer.train([document.text for document in corpus], 200)
    store = document_store.prepare_document_store(tmp_path / "store", corpus, tokenizer)
    assert [[tokenizer.decode(ids.tolist()) for ids in store[n]] for n in range(len(store))] == [
        ["a cat sat.", "a dog ran.", "the end."],
        ["one cat.", "two dogs."],
    ]
    assert store.documents.tolist() == [0, 3, 5]
    assert store.skipped.counts == {"a document of a single sentence": 1}
    assert store.sentences.ids.dtype == np.uint16
    assert "2 documents, 5 sentences" in store.summary


def test_store_is_reused_and_protected(text: Path, tmp_path: Path) -> None:
    corpus = documents.find_documents(str(text))
    tokenizer = WordPieceTokenizer.train([document.text for document in corpus], 200)
    path = tmp_path / "store"
    document_store.prepare_document_store(path, corpus, tokenizer)
    modified = (path / "store.json").stat().st_mtime_ns
    document_store.prepare_document_store(path, corpus, tokenizer, replace=False)
    assert (path / "store.json").stat().st_mtime_ns == modified
    filtered = corpus.filter("the first", lambda document: document.location.endswith(":1"))
    with pytest.raises(InputError, match="has changed"):
        document_store.prepare_document_store(path, filtered, tokenizer, replace=False)
    assert len(document_store.prepare_document_store(path, filtered, tokenizer)) == 1
    with pytest.raises(InputError, match="no document has 2 sentences"):
        document_store.prepare_document_store(path, corpus.filter("none", lambda _: False), tokenizer)
    with pytest.raises(InputError, match="no tokenized documents"):
        DocumentStore.open(tmp_path / "nowhere")
