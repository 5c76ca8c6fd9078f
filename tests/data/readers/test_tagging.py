"""CoNLL files, entities, and labels of pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.batches.tokens import IGNORE
from jumok.data.readers.invalid_examples import InvalidExample, SkippedExamples, skip_invalid
from jumok.data.readers.tagging import (
    Entity,
    TaggingExample,
    convert_to_iob2,
    extract_entities,
    label_first_pieces,
    read_tagging_examples,
)
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError

FILE = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter\tNNP\tI-NP\tI-PER
Blackburn NNP  I-NP  I-PER
Ann NNP B-NP B-PER
-DOCSTART- -X- -X- O
no\u3000break NN I-NP O
"""


def sentences(path: Path, **options: Any) -> list[TaggingExample]:
    return list(skip_invalid(read_tagging_examples(str(path), **options), "stop", SkippedExamples()))


def test_read_conll_file(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(FILE.replace("\n", "\r\n").encode())
    first, second = sentences(path, scheme="iob1")
    assert first == TaggingExample(("EU", "rejects"), ("B-ORG", "O"), f"{path}:3")
    assert second.words == ("Peter", "Blackburn", "Ann", "no\u3000break")
    assert second.tags == ("B-PER", "I-PER", "B-PER", "O")
    assert sentences(path) == [first, second]
    assert sentences(path, word_column=2, tag_column=3)[0].words == ("NNP", "VBZ")


@pytest.mark.parametrize(
    ("line", "scheme", "reason", "detail"),
    [
        ("word", "any", "too few columns", "'word' has 1; expected a word and its tag"),
        (
            "word NN PER",
            "any",
            "a tag that is neither O nor B-TYPE nor I-TYPE",
            "'PER' of the word 'word', after 'I-LOC'",
        ),
        (
            "word NN B-",
            "any",
            "a tag that is neither O nor B-TYPE nor I-TYPE",
            "'B-' of the word 'word', after 'I-LOC'",
        ),
        (
            "word NN B-PER",
            "iob1",
            "a tag that violates IOB1, where B- only follows an entity of the same type",
            "'B-PER' of the word 'word', after 'I-LOC'",
        ),
        (
            "word NN O",
            "iob2",
            "a tag that violates IOB2, where every entity begins with B-",
            "'I-LOC' of the word 'Seoul', after 'O'",
        ),
        ("a\0b NN O", "any", "a NUL character", "after 'a' in the word"),
    ],
)
def test_invalid_lines(tmp_path: Path, line: str, scheme: Any, reason: str, detail: str) -> None:
    path = tmp_path / "train.txt"
    path.write_text(f"in IN O\nSeoul NNP I-LOC\n{line}\n\nfine NN O\n")
    number = 2 if scheme == "iob2" else 3
    first, second = read_tagging_examples(str(path), scheme=scheme)
    assert first == InvalidExample(f"{path}:{number}", reason, detail)
    assert isinstance(second, TaggingExample)  # the rest of the file can be used
    with pytest.raises(InputError, match=f"train.txt:{number}: {reason[:20]}"):
        sentences(path, scheme=scheme)


def test_column_zero_raises() -> None:
    with pytest.raises(InputError, match="columns start at 1"):
        list(read_tagging_examples("x", word_column=0))


def test_extract_entities() -> None:
    tags = ["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG", "B-ORG"]
    expected = [("PER", 0, 2), ("PER", 2, 3), ("LOC", 4, 5), ("ORG", 5, 6), ("ORG", 6, 7)]
    assert extract_entities(tags) == [Entity(*entity) for entity in expected]
    assert extract_entities([]) == []


@given(st.lists(st.sampled_from(["O", "B-A", "I-A", "B-B", "I-B"])))
def test_convert_to_iob2_preserves_entities(tags: list[str]) -> None:
    converted = convert_to_iob2(tags)
    assert extract_entities(converted) == extract_entities(tags)
    assert convert_to_iob2(converted) == converted
    for before, tag in zip(["O", *converted], converted, strict=False):
        assert not tag.startswith("I-") or before[2:] == tag[2:]


WORDS = ["unbelievable", "친구와", "a", "b", "don't", "\u200b", "...", "believable"]


@given(st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 4)), min_size=1, max_size=9))
def test_first_piece_of_each_word_has_its_label(tagged_words: list[tuple[str, int]]) -> None:
    words, labels = [word for word, _ in tagged_words], [label for _, label in tagged_words]
    pieces = PIECES.encode_with_offsets([words])[0]
    piece_labels = label_first_pieces(pieces.word_ids, labels)
    assert len(piece_labels) == len(pieces.ids)
    counted = [label for label in piece_labels if label != IGNORE]
    # All words but those of which no piece is left: a control character, here.
    assert counted == [label for word, label in tagged_words if word != "\u200b"]


PIECES = WordPieceTokenizer.train([" ".join(WORDS), "unbelievable believable 친구와 친구"] * 3, vocab_size=120)
