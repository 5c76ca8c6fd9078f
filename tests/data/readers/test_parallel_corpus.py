"""Parallel text in every format, valid and invalid, and all ways to name it."""

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.data.readers import text_files
from jumok.data.readers.invalid_examples import SkippedExamples
from jumok.data.readers.parallel_corpus import ParallelCorpus, Sides, TranslationExample, find_corpus
from jumok.errors import InputError, MissingExtra

pytestmark = pytest.mark.long


PAIRS = [("a dog", "ein Hund"), ('say "hi"', "sag „hallo“"), ("x\u0085y\u2028z", "é 한글")]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
LINE = TEXT.map(lambda text: text.replace("\n", "").replace("\t", "").strip()).filter(bool)


def pairs(corpus: ParallelCorpus) -> list[tuple[str, str]]:
    return [(first_text.source, first_text.target) for first_text in corpus]


def write_file(path: Path, content: bytes | str) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def as_tsv(rows: list[tuple[str, str]]) -> str:
    return "".join(f"{first_text}\t{second_text}\n" for first_text, second_text in rows)


def as_csv(rows: list[tuple[str, str]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue()


def as_jsonl(rows: list[tuple[str, str]]) -> str:
    return "".join(json.dumps({"en": first_text, "de": second_text}) + "\n" for first_text, second_text in rows)


def as_parquet(rows: list[tuple[str, str]]) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    columns = {
        "id": list(range(len(rows))),
        "en": [first_text for first_text, _ in rows],
        "de": [second_text for _, second_text in rows],
    }
    parquet.write_table(arrow.table(columns), out, row_group_size=2)
    return out.getvalue()


WRITERS: dict[str, Callable[[list[tuple[str, str]]], bytes | str]] = {
    ".tsv": as_tsv,
    ".csv": as_csv,
    ".jsonl": as_jsonl,
    ".parquet": as_parquet,
}


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("suffix", WRITERS)
def test_formats_round_trip(tmp_path: Path, suffix: str, gz: str) -> None:
    path = write_file(tmp_path / f"my{suffix}{gz}", WRITERS[suffix](PAIRS))
    corpus = find_corpus(str(path), source="en", target="de")
    assert pairs(corpus) == PAIRS
    assert pairs(corpus) == PAIRS  # from the beginning again
    assert [first_text.location for first_text in corpus] == [f"{path}:{n}" for n in (1, 2, 3)]


@given(st.lists(st.tuples(LINE, LINE), min_size=1, max_size=7))
@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
def test_any_text_round_trips(tmp_path_factory: pytest.TempPathFactory, suffix: str, rows) -> None:  # type: ignore[no-untyped-def]
    if suffix != ".jsonl":  # a carriage return at a line's end is part of the line's end
        rows = [(first_text.replace("\r", ""), second_text.replace("\r", "")) for first_text, second_text in rows]
        rows = [(first_text.strip(), second_text.strip()) for first_text, second_text in rows]
        rows = [(first_text or "-", second_text or "-") for first_text, second_text in rows]
    rows = [("first", "line"), *rows]  # so that no first line looks like a header
    path = write_file(tmp_path_factory.mktemp("any") / f"my{suffix}", WRITERS[suffix](rows))
    assert pairs(find_corpus(str(path), source="en", target="de")) == rows


def test_parallel_files(tmp_path: Path) -> None:
    write_file(tmp_path / "c.en", "a\nb\u2028b\nc")
    write_file(tmp_path / "c.de.gz", "\ufeffA\r\nB\r\nC\r\n")
    corpus = find_corpus([str(tmp_path / "c.en"), str(tmp_path / "c.de.gz")], source="en", target="de")
    assert pairs(corpus) == [("a", "A"), ("b\u2028b", "B"), ("c", "C")]
    assert [first_text.location for first_text in corpus][2] == f"{tmp_path / 'c.en'}:3"


@pytest.mark.parametrize(("first_text", "second_text"), [(7, 5), (5, 7), (0, 3)])
def test_parallel_files_of_different_length_raise(tmp_path: Path, first_text: int, second_text: int) -> None:
    write_file(tmp_path / "c.en", "x\n" * first_text)
    write_file(tmp_path / "c.de", "y\n" * second_text)
    corpus = find_corpus(str(tmp_path / "c"), source="en", target="de", on_error="skip")
    with pytest.raises(InputError, match=rf"c\.en has {first_text} lines and .*c\.de has {second_text}"):
        list(corpus)


# ------------------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("first_line", "sides"),
    [
        ("en\tde\tnote", ("en", "de")),
        ("note\tde\ten", ("en", "de")),
        ("x\ttarget\tsource", ("en", "de")),  # what columns are often called
        ("\ufeffen\tde\tnote", ("en", "de")),
        (" en \tde\tnote", ("en", "de")),
        ("x\ty\ten", ("en", 2)),
        ("source\ttarget\tnote", (1, 2)),
    ],
)
def test_header_is_recognized_by_requested_names(tmp_path: Path, first_line: str, sides: Sides) -> None:
    names = first_line.strip("\ufeff").split("\t")
    row = ["?", "?", "?"]
    for name, text in (("en", "dog"), ("source", "dog"), ("de", "Hund"), ("target", "Hund"), ("y", "Hund")):
        for position, column in enumerate(names):
            if column.strip() == name:
                row[position] = text
    path = write_file(tmp_path / "my.tsv", first_line + "\n" + "\t".join(row) + "\n")
    assert pairs(find_corpus(str(path), source=sides[0], target=sides[1])) == [("dog", "Hund")]


def test_tables_without_header(tmp_path: Path) -> None:
    second_text = write_file(tmp_path / "two.tsv", "dog\tHund\ncat\tKatze\n")
    assert pairs(find_corpus(str(second_text), source="en", target="de")) == [("dog", "Hund"), ("cat", "Katze")]
    assert pairs(find_corpus(str(second_text), source=2, target=1))[0] == ("Hund", "dog")
    three = write_file(tmp_path / "three.tsv", "1\tdog\tHund\n")
    assert pairs(find_corpus(str(three), source=2, target=3)) == [("dog", "Hund")]
    with pytest.raises(InputError, match=r"no column 'en'; its first line has 3: .*starting at 1"):
        list(find_corpus(str(three), source="en", target="de"))
    with pytest.raises(InputError, match="no column 4; its first line has 3: "):
        list(find_corpus(str(three), source=2, target=4))


def test_misspelled_column_suggests_similar_names(tmp_path: Path) -> None:
    path = write_file(tmp_path / "my.tsv", "id\tgerman\tenglish\n1\tHund\tdog\n")
    with pytest.raises(InputError, match=r"no column 'englsh'.*: 'english', 'german'"):
        list(find_corpus(str(path), source="englsh", target="german"))


SENTENCES = "".join(f"a dog {n}\tein Hund {n}\n" for n in range(11))


@pytest.mark.parametrize(
    ("first_line", "other_lines"),
    [
        ("en\tde", "dog\tHund\n"),
        ("English\tDeutsch", "dog\tHund\n"),
        ("en-US\ttext_de", "dog\tHund\n"),
        ("ours\ttheirs", SENTENCES),  # one word each, and no line below is like that
        ("\n\nours\ttheirs", SENTENCES),
    ],
)
def test_header_used_as_a_pair_warns(tmp_path: Path, first_line: str, other_lines: str) -> None:
    path = write_file(tmp_path / "my.tsv", f"{first_line}\n{other_lines}")
    first_text, second_text = first_line.strip().split("\t")
    advice = f".*source={first_text} data.target={second_text}"
    message = f"the first line, '{first_text}' and '{second_text}', is used as a pair; {advice}"
    with pytest.warns(UserWarning, match=message):
        assert pairs(find_corpus(str(path), source=1, target=2))[0] == (first_text, second_text)
    if other_lines == SENTENCES:  # it might be a pair, and the names those of languages
        with pytest.warns(UserWarning, match=message):
            list(find_corpus(str(path), source="en", target="de"))
    assert pairs(find_corpus(str(path), source=first_text, target=second_text))[0] != (
        first_text,
        second_text,
    )  # as advised: nothing is told


@pytest.mark.parametrize(
    ("first_line", "other_lines"),
    [
        ("dog\tHund", "cat\tKatze\n" + SENTENCES),  # words are translated below as well
        ("dog\tHund", "a cat\teine Katze\n"),  # too few lines to tell
        ("Go!\tGeh!", SENTENCES),
        ("a dog\tein Hund", SENTENCES),
        ("Berlin\tBerlin", SENTENCES),
    ],
)
@pytest.mark.parametrize("sides", [(1, 2), ("en", "de"), ("english", "german")])
def test_first_pair_does_not_warn(tmp_path: Path, first_line: str, other_lines: str, sides: Sides) -> None:
    path = write_file(tmp_path / "my.tsv", f"{first_line}\n{other_lines}")
    assert pairs(find_corpus(str(path), source=sides[0], target=sides[1]))[0] == tuple(first_line.split("\t"))


@pytest.mark.parametrize(
    ("first_line", "other_lines", "sides"),
    [
        ("english,german", "dog,Hund\n", ("englsh", "germn")),
        ("en,de", "dog,Hund\n", ("english", "german")),
        ("hund,katze", "dog,Hund\n", ("hunde", "katzen")),
    ],
)
def test_unknown_column_names_raise(tmp_path: Path, first_line: str, other_lines: str, sides: tuple[str, str]) -> None:
    path = write_file(tmp_path / "my.csv", f"{first_line}\n{other_lines}")
    first_text, second_text = first_line.split(",")
    first_line_message = f"its first line is '{first_text}', '{second_text}'.*data.source={first_text} "
    message = f"no columns '{sides[0]}' and '{sides[1]}'; {first_line_message}"
    with pytest.raises(InputError, match=message):
        list(find_corpus(str(path), source=sides[0], target=sides[1]))


def test_json_without_column_names_lists_keys(tmp_path: Path) -> None:
    for row, message in (
        ('{"en": "dog", "ko": "개"}', "The keys are: en, ko. Name the keys: data.source=en data.target=ko$"),
        (
            '{"translation": {"en": "a", "ko": "b"}}',
            "The keys are: en, ko. .* data.source=en data.target=ko$",
        ),
        ('{"id": 1, "en": "a", "ko": "b"}', "The keys are: id, en, ko. .* data.source=… data.target=…$"),
    ):
        path = write_file(tmp_path / "my.jsonl", f"\n{row}\n")
        for on_error in ("stop", "skip"):
            with pytest.raises(InputError, match=rf"my\.jsonl: .*{message}"):
                list(find_corpus(str(path), source=1, target=2, on_error=on_error))  # type: ignore[arg-type]
    rows = '{"source": "dog", "target": "개"}\n{"source": "cat"}\n'
    corpus = find_corpus(str(write_file(tmp_path / "my.jsonl", rows)), source=1, target=2)
    with pytest.raises(InputError, match=r"my\.jsonl:2: no 'target' \(it has: source\)\. .*on_error=skip"):
        list(corpus)


def test_invalid_json_rows(tmp_path: Path) -> None:
    rows = [
        '{"translation": {"en": "dog", "de": "Hund"}}',
        '{"en": "cat"}',
        '{"en": 3, "de": "x"}',
        "[1]",
        "{",
    ]
    path = write_file(tmp_path / "my.jsonl", "\n".join(rows))
    skipped = SkippedExamples()
    examples = list(find_corpus(str(path), source="en", target="de", on_error="skip").read(skipped))
    assert [(first_text.source, first_text.target) for first_text in examples] == [("dog", "Hund")]
    assert set(skipped.counts) == {"no 'de'", "a source that is no text", "no JSON object", "not JSON"}
    assert skipped.first_locations["not JSON"] == f"{path}:5"


def test_nested_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "my.parquet"
    rows = [{"en": "dog", "de": "Hund"}, {"en": "cat", "de": None}, {"en": "cow", "de": "Kuh"}]
    parquet.write_table(arrow.table({"translation": rows}), path)
    corpus = find_corpus(str(path), source="en", target="de", on_error="skip")
    assert pairs(corpus) == [("dog", "Hund"), ("cow", "Kuh")]
    with pytest.raises(InputError, match="no column 'fr'; it has 3: "):
        list(find_corpus(str(path), source="en", target="fr"))
    write_file(path, b"PAR1 and nothing more")
    with pytest.raises(InputError, match=r"my\.parquet cannot be read as Parquet"):
        list(corpus)


def test_csv_row_of_several_lines_has_the_number_of_its_first(tmp_path: Path) -> None:
    path = write_file(tmp_path / "my.csv", 'en,de\n"two\nlines","zwei\n\nZeilen"\n\na,\nb,B,C\nc,C\n"open,C\n')
    skipped = SkippedExamples()
    examples = list(find_corpus(str(path), source="en", target="de", on_error="skip").read(skipped))
    assert examples[0] == TranslationExample("two\nlines", "zwei\n\nZeilen", f"{path}:2")
    assert examples[1] == TranslationExample("c", "C", f"{path}:9")
    assert skipped.first_locations == {
        "an empty target": f"{path}:7",
        "wrong number of columns": f"{path}:8",
        "not CSV": f"{path}:10",
    }


# --------------------------------------------------------------------------------------------------- flaws


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"dog\t", "an empty target"),
        (b" \xc2\x85\tHund", "an empty source"),
        (b"dog", "wrong number of columns .1, and the first line has 2"),
        (b"dog\tHund\tx", "wrong number of columns .3"),
        (b"d\0g\tHund", "a NUL character .after 'd' in the source"),
        (b"dog\tH\xfcnd", "invalid UTF-8 .the byte 0xfc after 'H' in the target"),
    ],
)
def test_invalid_line_stops_or_is_skipped(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write_file(tmp_path / "my.tsv", b"one\teins\n\n" + line + b"\nfour\tvier\n")
    with pytest.raises(InputError, match=rf"my\.tsv:3: {reason}.*data\.on_error=skip"):
        list(find_corpus(str(path), source="en", target="de"))
    skipped = SkippedExamples()
    examples = list(find_corpus(str(path), source="en", target="de", on_error="skip").read(skipped))
    assert [first_text.location for first_text in examples] == [f"{path}:1", f"{path}:4"]
    assert skipped.total == 1
    assert f"1 skipped: 1 × {reason.split(' .')[0]} (first: {path}:3)" == str(skipped)


def test_half_a_surrogate_pair_in_json_is_invalid(tmp_path: Path) -> None:
    path = write_file(tmp_path / "my.jsonl", r'{"source": "\ud83d", "target": "x"}')
    with pytest.raises(InputError, match=r"invalid UTF-8 .half a surrogate pair"):
        list(find_corpus(str(path), source="en", target="de"))


def test_file_without_valid_examples_raises(tmp_path: Path) -> None:
    path = write_file(tmp_path / "my.tsv", "a\t\nb\t\n")
    with pytest.raises(InputError, match="no examples; 2 skipped: 2 × an empty target"):
        list(find_corpus(str(path), source="en", target="de", on_error="skip"))
    write_file(path, "")
    with pytest.raises(InputError, match="no examples"):
        list(find_corpus(str(path), source="en", target="de"))


def test_compression_and_encoding_of_files(tmp_path: Path) -> None:
    misnamed = tmp_path / "a.tsv.gz"
    misnamed.write_bytes(b"a\tA\n")
    with pytest.raises(InputError, match=r"has the suffix .gz but is not gzipped"):
        list(find_corpus(str(misnamed), source="en", target="de"))
    without_suffix = tmp_path / "b.tsv"
    without_suffix.write_bytes(gzip.compress(b"a\tA\n"))
    assert pairs(find_corpus(str(without_suffix), source="en", target="de")) == [("a", "A")]
    truncated = tmp_path / "c.tsv.gz"
    truncated.write_bytes(gzip.compress(b"a\tA\n" * 9999)[:-20])
    with pytest.raises(InputError, match="is damaged after line"):
        list(find_corpus(str(truncated), source="en", target="de"))
    utf16_file = write_file(tmp_path / "d.tsv", "a\tA\n".encode("utf-16"))
    with pytest.raises(InputError, match="is UTF-16; convert it: iconv"):
        list(find_corpus(str(utf16_file), source="en", target="de"))


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
def test_extremely_long_line_does_not_fill_memory(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 1 << 18)
    path = tmp_path / f"my{suffix}"
    with path.open("wb") as file:
        file.write(str(WRITERS[suffix]([("a", "A")])).encode())
        for _ in range(40):
            file.write(b"x" * (1 << 18))
        file.write(b"\n" + str(WRITERS[suffix]([("b", "B")])).encode())
    skipped = SkippedExamples()
    tracemalloc.start()
    examples = list(find_corpus(str(path), source="en", target="de", on_error="skip").read(skipped))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [first_text.source for first_text in examples] == ["a", "b"]
    assert skipped.total == 1
    assert peak < 5 << 20  # of 10 MiB


def test_reading_uses_little_memory(tmp_path: Path) -> None:
    path = write_file(tmp_path / "my.tsv.gz", as_tsv([("some words " * 9, "einige Worte " * 9)] * 20_000))
    corpus = find_corpus(str(path), source="en", target="de")
    tracemalloc.start()
    assert sum(1 for _ in corpus) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20  # the text has 4.6 MiB


# -------------------------------------------------------------------------------------- what a recipe names


@pytest.fixture
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data sets that JUMOK_DATA names, seen from an empty folder."""
    root = tmp_path / "shelf"
    (root / "captions").mkdir(parents=True)
    for split, count in (("train", 5), ("test2016", 3)):
        for side in ("en", "de", "fr"):
            write_file(root / "captions" / f"{split}.{side}.gz", "".join(f"{side} {n}\n" for n in range(count)))
    (root / "mixed").mkdir()
    write_file(root / "mixed" / "train.tsv.gz", "english\tkorean\tfrom\ndog\t개\tx\n")
    write_file(root / "mixed" / "gold.en-fr.txt", "a b ||| c d\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("JUMOK_DATA", str(root))
    return root


def test_find_corpus_by_name_and_split(data_root: Path) -> None:
    assert len(list(find_corpus("captions/train", source="en", target="de"))) == 5
    assert pairs(find_corpus("captions", source="fr", target="en", split="test2016"))[2] == ("fr 2", "en 2")
    assert pairs(find_corpus("mixed/train", source="english", target="korean")) == [("dog", "개")]
    assert pairs(find_corpus("mixed/gold", source="en", target="fr")) == [("a b", "c d")]
    assert pairs(find_corpus("mixed/gold", source="fr", target="en")) == [("c d", "a b")]
    both = ["captions/train.en.gz", "captions/train.fr.gz"]
    assert pairs(find_corpus(both, source="x", target="y"))[0] == ("en 0", "fr 0")


def test_default_data_folder(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUMOK_DATA")
    data_root.rename("data")
    assert len(list(find_corpus("captions/train", source="en", target="de"))) == 5


def test_lists_and_patterns(data_root: Path) -> None:
    for n in (2, 1):
        write_file(Path(f"part{n}.tsv"), f"dog {n}\tHund {n}\n")
    assert pairs(find_corpus("part*.tsv", source="en", target="de")) == [
        ("dog 1", "Hund 1"),
        ("dog 2", "Hund 2"),
    ]
    mixed = find_corpus(["part2.tsv", "captions/test2016"], source="en", target="de")
    assert [first_text for first_text, _ in pairs(mixed)] == ["dog 2", "en 0", "en 1", "en 2"]


def test_missing_data_suggests_similar_names(data_root: Path) -> None:
    write_file(Path("train.tsv"), "a\tA\n")
    for name in ("README.md", "LICENSE", "readme.txt", ".hidden", "fetch.sh"):
        for folder in (data_root, data_root / "captions"):
            write_file(folder / name, "for people to read")
    for name, message in (
        (
            "captons",
            "no file or data set 'captons'.*shelf are: captions, mixed. For a data set .*hub:captons",
        ),
        ("captions/tain", "no captions/tain; .*captions contains: train.de.gz, train.en.gz, train.fr.gz"),
        ("trian.tsv", "'trian.tsv'; similar names here: train.tsv"),
        (
            "captions",
            "captions is a folder and does not contain a split; it contains: .*as in captions/train",
        ),
        ("nothing*.tsv", "no file or data set"),
    ):
        with pytest.raises(InputError, match=message):
            find_corpus(name, source="en", target="de")
    with pytest.raises(InputError, match=r"does not contain train.en and train.ko; it contains: train\."):
        find_corpus("captions/train", source="en", target="ko")
    with pytest.raises(InputError, match="as source and target the suffixes or columns"):
        find_corpus("captions/train", source=1, target=2)
    with pytest.raises(InputError, match="one side of parallel text; name both files"):
        find_corpus("captions/train.en.gz", source="en", target="de")
    with pytest.raises(InputError, match=r"no captions/train.dee; .*captions contains: train\.de\.gz"):
        find_corpus(["captions/train.en.gz", "captions/train.dee"], source="en", target="de")
    Path("captions").mkdir()  # a folder of the same name here does not hide the data set
    assert len(list(find_corpus("captions/train", source="en", target="de"))) == 5
    assert len(list(find_corpus("captions", source="en", target="de", split="train"))) == 5
    with pytest.raises(InputError, match="no file to read"):
        find_corpus([], source="en", target="de")


# ----------------------------------------------------------------------------------------- corpora, the hub


def test_from_pairs_and_map_texts(tmp_path: Path) -> None:
    corpus = ParallelCorpus.from_pairs("squares", lambda: ((f"{n} TIMES {n}", str(n * n)) for n in range(3)))
    small = corpus.map_texts("small", str.lower, lambda text: text * 2)
    assert pairs(small) == [("0 times 0", "00"), ("1 times 1", "11"), ("2 times 2", "44")]
    assert len({corpus.fingerprint, small.fingerprint, ParallelCorpus.from_pairs("cubes", list).fingerprint}) == 3
    emptied = corpus.map_texts("gone", lambda text: "", str)
    with pytest.raises(InputError, match="squares:1: an empty source"):
        list(emptied)


def test_fingerprint_depends_on_file_and_settings(tmp_path: Path) -> None:
    path = write_file(tmp_path / "my.tsv", "a\tA\n")
    first_line = find_corpus(str(path), source=1, target=2).fingerprint
    assert find_corpus(str(path), source=1, target=2).fingerprint == first_line
    assert find_corpus(str(path), source=2, target=1).fingerprint != first_line
    assert find_corpus(str(path), source=1, target=2, on_error="skip").fingerprint != first_line
    write_file(path, "a\tA\nb\tB\n")
    assert find_corpus(str(path), source=1, target=2).fingerprint != first_line


def test_hub_dataset_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    request = {}

    def load(name: str, configuration: str | None, **settings: object) -> object:
        request.update(settings, name=name, configuration=configuration)
        if name == "no/such":
            raise FileNotFoundError("Dataset 'no/such' doesn't exist on the Hub\nor cannot be accessed")
        rows = [{"translation": {"en": "dog", "de": "Hund"}}, {"translation": {"en": "", "de": "x"}}]
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    corpus = find_corpus("hub:some/one@v2:de-en", source="en", target="de", split="validation", on_error="skip")
    assert list(corpus) == [TranslationExample("dog", "Hund", "hub:some/one@v2:de-en:validation:1")]
    assert request == {
        "name": "some/one",
        "configuration": "de-en",
        "split": "validation",
        "revision": "v2",
        "streaming": True,
    }
    assert next(iter(find_corpus("hub:some/one", source="en", target="de"))).source == "dog"
    assert (request["split"], request["configuration"], request["revision"]) == ("train", None, None)
    with pytest.raises(InputError, match="hub:no/such cannot be read: Dataset 'no/such' doesn't exist"):
        list(find_corpus("hub:no/such", source="en", target="de"))


@pytest.mark.parametrize(("name", "package"), [("hub:some/one", "datasets"), ("my.parquet", "pyarrow")])
def test_missing_package_error_gives_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    def missing(module: str) -> object:
        raise ImportError(f"No module named {module!r}")

    monkeypatch.chdir(tmp_path)
    write_file(tmp_path / "my.parquet", b"PAR1")
    monkeypatch.setattr(text_files.importlib, "import_module", missing)
    with pytest.raises(MissingExtra, match=rf'{package} is needed for this: pip install "jumok\[hub\]"'):
        list(find_corpus(name, source="en", target="de"))
