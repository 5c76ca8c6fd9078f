"""Parallel text from every format, tidy and untidy, by every way of naming it."""

import csv
import doctest
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.data.readers import header_detection, text_files
from jumok.data.readers.invalid_examples import SkippedExamples
from jumok.data.readers.parallel_corpus import ParallelCorpus, Sides, TranslationExample, find_corpus
from jumok.errors import InputError, MissingExtra

PAIRS = [("a dog", "ein Hund"), ('say "hi"', "sag „hallo“"), ("x\u0085y\u2028z", "é 한글")]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
LINE = TEXT.map(lambda text: text.replace("\n", "").replace("\t", "").strip()).filter(bool)


def pairs(corpus: ParallelCorpus) -> list[tuple[str, str]]:
    return [(one.source, one.target) for one in corpus]


def put(path: Path, content: bytes | str) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def as_tsv(rows: list[tuple[str, str]]) -> str:
    return "".join(f"{one}\t{other}\n" for one, other in rows)


def as_csv(rows: list[tuple[str, str]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue()


def as_jsonl(rows: list[tuple[str, str]]) -> str:
    return "".join(json.dumps({"en": one, "de": other}) + "\n" for one, other in rows)


def as_parquet(rows: list[tuple[str, str]]) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    columns = {"id": list(range(len(rows))), "en": [one for one, _ in rows], "de": [two for _, two in rows]}
    parquet.write_table(arrow.table(columns), out, row_group_size=2)
    return out.getvalue()


WRITERS: dict[str, Callable[[list[tuple[str, str]]], bytes | str]] = {
    ".tsv": as_tsv,
    ".csv": as_csv,
    ".jsonl": as_jsonl,
    ".parquet": as_parquet,
}


@pytest.mark.parametrize("zipped", ["", ".gz"])
@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_gives_back_what_was_written(tmp_path: Path, ending: str, zipped: str) -> None:
    path = put(tmp_path / f"my{ending}{zipped}", WRITERS[ending](PAIRS))
    corpus = find_corpus(str(path), source="en", target="de")
    assert pairs(corpus) == PAIRS
    assert pairs(corpus) == PAIRS  # from the beginning again
    assert [one.location for one in corpus] == [f"{path}:{n}" for n in (1, 2, 3)]


@given(st.lists(st.tuples(LINE, LINE), min_size=1, max_size=7))
@pytest.mark.parametrize("ending", [".tsv", ".csv", ".jsonl"])
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, ending: str, rows) -> None:  # type: ignore[no-untyped-def]
    if ending != ".jsonl":  # a carriage return at a line's end is part of the line's end
        rows = [(one.replace("\r", ""), two.replace("\r", "")) for one, two in rows]
        rows = [(one.strip(), two.strip()) for one, two in rows]
        rows = [(one or "-", two or "-") for one, two in rows]
    rows = [("first", "line"), *rows]  # so that no first line looks like a header
    path = put(tmp_path_factory.mktemp("any") / f"my{ending}", WRITERS[ending](rows))
    assert pairs(find_corpus(str(path), source="en", target="de")) == rows


def test_two_files_line_by_line(tmp_path: Path) -> None:
    put(tmp_path / "c.en", "a\nb\u2028b\nc")
    put(tmp_path / "c.de.gz", "\ufeffA\r\nB\r\nC\r\n")
    corpus = find_corpus([str(tmp_path / "c.en"), str(tmp_path / "c.de.gz")], source="en", target="de")
    assert pairs(corpus) == [("a", "A"), ("b\u2028b", "B"), ("c", "C")]
    assert [one.location for one in corpus][2] == f"{tmp_path / 'c.en'}:3"


@pytest.mark.parametrize(("one", "other"), [(7, 5), (5, 7), (0, 3)])
def test_files_of_different_length_are_an_error_with_both_counts(tmp_path: Path, one: int, other: int) -> None:
    put(tmp_path / "c.en", "x\n" * one)
    put(tmp_path / "c.de", "y\n" * other)
    corpus = find_corpus(str(tmp_path / "c"), source="en", target="de", on_error="skip")
    with pytest.raises(InputError, match=rf"c\.en has {one} lines and .*c\.de has {other}"):
        list(corpus)


# ------------------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("first", "sides"),
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
def test_a_header_is_known_by_the_names_asked_for(tmp_path: Path, first: str, sides: Sides) -> None:
    names = first.strip("\ufeff").split("\t")
    row = ["?", "?", "?"]
    for name, text in (("en", "dog"), ("source", "dog"), ("de", "Hund"), ("target", "Hund"), ("y", "Hund")):
        for place, given_name in enumerate(names):
            if given_name.strip() == name:
                row[place] = text
    path = put(tmp_path / "my.tsv", first + "\n" + "\t".join(row) + "\n")
    assert pairs(find_corpus(str(path), source=sides[0], target=sides[1])) == [("dog", "Hund")]


def test_without_a_header_two_columns_need_no_names_and_more_need_numbers(tmp_path: Path) -> None:
    two = put(tmp_path / "two.tsv", "dog\tHund\ncat\tKatze\n")
    assert pairs(find_corpus(str(two), source="en", target="de")) == [("dog", "Hund"), ("cat", "Katze")]
    assert pairs(find_corpus(str(two), source=2, target=1))[0] == ("Hund", "dog")
    three = put(tmp_path / "three.tsv", "1\tdog\tHund\n")
    assert pairs(find_corpus(str(three), source=2, target=3)) == [("dog", "Hund")]
    with pytest.raises(InputError, match=r"no column 'en'; its first line has 3: .*starting at 1"):
        list(find_corpus(str(three), source="en", target="de"))
    with pytest.raises(InputError, match="no column 4; its first line has 3: "):
        list(find_corpus(str(three), source=2, target=4))


def test_a_misspelled_column_is_told_with_the_nearest_first(tmp_path: Path) -> None:
    path = put(tmp_path / "my.tsv", "id\tgerman\tenglish\n1\tHund\tdog\n")
    with pytest.raises(InputError, match=r"no column 'englsh'.*: 'english', 'german'"):
        list(find_corpus(str(path), source="englsh", target="german"))


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(header_detection).failed == 0


SENTENCES = "".join(f"a dog {n}\tein Hund {n}\n" for n in range(11))


@pytest.mark.parametrize(
    ("first", "below"),
    [
        ("en\tde", "dog\tHund\n"),
        ("English\tDeutsch", "dog\tHund\n"),
        ("en-US\ttext_de", "dog\tHund\n"),
        ("ours\ttheirs", SENTENCES),  # one word each, and no line below is like that
        ("\n\nours\ttheirs", SENTENCES),
    ],
)
def test_a_header_taken_as_a_pair_is_told(tmp_path: Path, first: str, below: str) -> None:
    path = put(tmp_path / "my.tsv", f"{first}\n{below}")
    one, other = first.strip().split("\t")
    told = f"the first line, '{one}' and '{other}', is used as a pair; .*source={one} data.target={other}"
    with pytest.warns(UserWarning, match=told):
        assert pairs(find_corpus(str(path), source=1, target=2))[0] == (one, other)
    if below == SENTENCES:  # it might be a pair, and the names those of languages
        with pytest.warns(UserWarning, match=told):
            list(find_corpus(str(path), source="en", target="de"))
    assert pairs(find_corpus(str(path), source=one, target=other))[0] != (
        one,
        other,
    )  # as advised: nothing is told


@pytest.mark.parametrize(
    ("first", "below"),
    [
        ("dog\tHund", "cat\tKatze\n" + SENTENCES),  # words are translated below as well
        ("dog\tHund", "a cat\teine Katze\n"),  # too few lines to tell
        ("Go!\tGeh!", SENTENCES),
        ("a dog\tein Hund", SENTENCES),
        ("Berlin\tBerlin", SENTENCES),
    ],
)
@pytest.mark.parametrize("sides", [(1, 2), ("en", "de"), ("english", "german")])
def test_a_pair_is_taken_as_one_in_silence(tmp_path: Path, first: str, below: str, sides: Sides) -> None:
    path = put(tmp_path / "my.tsv", f"{first}\n{below}")
    assert pairs(find_corpus(str(path), source=sides[0], target=sides[1]))[0] == tuple(first.split("\t"))


@pytest.mark.parametrize(
    ("first", "below", "sides"),
    [
        ("english,german", "dog,Hund\n", ("englsh", "germn")),
        ("en,de", "dog,Hund\n", ("english", "german")),
        ("hund,katze", "dog,Hund\n", ("hunde", "katzen")),
    ],
)
def test_two_names_that_a_table_does_not_have_are_told(
    tmp_path: Path, first: str, below: str, sides: tuple[str, str]
) -> None:
    path = put(tmp_path / "my.csv", f"{first}\n{below}")
    one, other = first.split(",")
    told = rf"no columns '{sides[0]}' and '{sides[1]}'; its first line is '{one}', '{other}'.*data.source={one} "
    with pytest.raises(InputError, match=told):
        list(find_corpus(str(path), source=sides[0], target=sides[1]))


def test_the_keys_of_json_are_named(tmp_path: Path) -> None:
    for row, told in (
        ('{"en": "dog", "ko": "개"}', "The keys are: en, ko. Name the keys: data.source=en data.target=ko$"),
        (
            '{"translation": {"en": "a", "ko": "b"}}',
            "The keys are: en, ko. .* data.source=en data.target=ko$",
        ),
        ('{"id": 1, "en": "a", "ko": "b"}', "The keys are: id, en, ko. .* data.source=… data.target=…$"),
    ):
        path = put(tmp_path / "my.jsonl", f"\n{row}\n")
        for on_error in ("stop", "skip"):
            with pytest.raises(InputError, match=rf"my\.jsonl: .*{told}"):
                list(find_corpus(str(path), source=1, target=2, on_error=on_error))  # type: ignore[arg-type]
    rows = '{"source": "dog", "target": "개"}\n{"source": "cat"}\n'
    corpus = find_corpus(str(put(tmp_path / "my.jsonl", rows)), source=1, target=2)
    with pytest.raises(InputError, match=r"my\.jsonl:2: no 'target' \(it has: source\)\. .*on_error=skip"):
        list(corpus)


def test_rows_of_json_may_be_nested_and_say_what_they_lack(tmp_path: Path) -> None:
    rows = [
        '{"translation": {"en": "dog", "de": "Hund"}}',
        '{"en": "cat"}',
        '{"en": 3, "de": "x"}',
        "[1]",
        "{",
    ]
    path = put(tmp_path / "my.jsonl", "\n".join(rows))
    skipped = SkippedExamples()
    found = list(find_corpus(str(path), source="en", target="de", on_error="skip").read(skipped))
    assert [(one.source, one.target) for one in found] == [("dog", "Hund")]
    assert set(skipped.counts) == {"no 'de'", "a source that is no text", "no JSON object", "not JSON"}
    assert skipped.first_locations["not JSON"] == f"{path}:5"


def test_parquet_may_be_nested_and_names_its_columns(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "my.parquet"
    rows = [{"en": "dog", "de": "Hund"}, {"en": "cat", "de": None}, {"en": "cow", "de": "Kuh"}]
    parquet.write_table(arrow.table({"translation": rows}), path)
    corpus = find_corpus(str(path), source="en", target="de", on_error="skip")
    assert pairs(corpus) == [("dog", "Hund"), ("cow", "Kuh")]
    with pytest.raises(InputError, match="no column 'fr'; it has 3: "):
        list(find_corpus(str(path), source="en", target="fr"))
    put(path, b"PAR1 and nothing more")
    with pytest.raises(InputError, match=r"my\.parquet cannot be read as Parquet"):
        list(corpus)


def test_a_csv_row_of_several_lines_keeps_its_line_number(tmp_path: Path) -> None:
    path = put(tmp_path / "my.csv", 'en,de\n"two\nlines","zwei\n\nZeilen"\n\na,\nb,B,C\nc,C\n"open,C\n')
    skipped = SkippedExamples()
    found = list(find_corpus(str(path), source="en", target="de", on_error="skip").read(skipped))
    assert found[0] == TranslationExample("two\nlines", "zwei\n\nZeilen", f"{path}:2")
    assert found[1] == TranslationExample("c", "C", f"{path}:9")
    assert skipped.first_locations == {
        "an empty target": f"{path}:7",
        "another number of columns": f"{path}:8",
        "not CSV": f"{path}:10",
    }


# --------------------------------------------------------------------------------------------------- flaws


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"dog\t", "an empty target"),
        (b" \xc2\x85\tHund", "an empty source"),
        (b"dog", "another number of columns .1, and the first line has 2"),
        (b"dog\tHund\tx", "another number of columns .3"),
        (b"d\0g\tHund", "a NUL character .after 'd' in the source"),
        (b"dog\tH\xfcnd", "invalid UTF-8 .the byte 0xfc after 'H' in the target"),
    ],
)
def test_a_flaw_stops_with_file_line_and_reason_or_is_skipped_and_counted(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = put(tmp_path / "my.tsv", b"one\teins\n\n" + line + b"\nfour\tvier\n")
    with pytest.raises(InputError, match=rf"my\.tsv:3: {reason}.*data\.on_error=skip"):
        list(find_corpus(str(path), source="en", target="de"))
    skipped = SkippedExamples()
    found = list(find_corpus(str(path), source="en", target="de", on_error="skip").read(skipped))
    assert [one.location for one in found] == [f"{path}:1", f"{path}:4"]
    assert skipped.total == 1
    assert f"1 skipped: 1 × {reason.split(' .')[0]} (first: {path}:3)" == str(skipped)


def test_half_a_surrogate_pair_in_json_is_a_flaw(tmp_path: Path) -> None:
    path = put(tmp_path / "my.jsonl", r'{"source": "\ud83d", "target": "x"}')
    with pytest.raises(InputError, match=r"invalid UTF-8 .half a surrogate pair"):
        list(find_corpus(str(path), source="en", target="de"))


def test_a_file_where_everything_is_skipped_is_an_error(tmp_path: Path) -> None:
    path = put(tmp_path / "my.tsv", "a\t\nb\t\n")
    with pytest.raises(InputError, match="no examples; 2 skipped: 2 × an empty target"):
        list(find_corpus(str(path), source="en", target="de", on_error="skip"))
    put(path, "")
    with pytest.raises(InputError, match="no examples"):
        list(find_corpus(str(path), source="en", target="de"))


def test_files_that_are_not_what_they_seem(tmp_path: Path) -> None:
    named = tmp_path / "a.tsv.gz"
    named.write_bytes(b"a\tA\n")
    with pytest.raises(InputError, match=r"has the suffix .gz but is not gzipped"):
        list(find_corpus(str(named), source="en", target="de"))
    unnamed = tmp_path / "b.tsv"
    unnamed.write_bytes(gzip.compress(b"a\tA\n"))
    assert pairs(find_corpus(str(unnamed), source="en", target="de")) == [("a", "A")]
    cut = tmp_path / "c.tsv.gz"
    cut.write_bytes(gzip.compress(b"a\tA\n" * 9999)[:-20])
    with pytest.raises(InputError, match="is damaged after line"):
        list(find_corpus(str(cut), source="en", target="de"))
    wide = put(tmp_path / "d.tsv", "a\tA\n".encode("utf-16"))
    with pytest.raises(InputError, match="is UTF-16; convert it: iconv"):
        list(find_corpus(str(wide), source="en", target="de"))


@pytest.mark.parametrize("ending", [".tsv", ".csv", ".jsonl"])
def test_a_line_without_end_does_not_fill_the_memory(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 1 << 18)
    path = tmp_path / f"my{ending}"
    with path.open("wb") as file:
        file.write(str(WRITERS[ending]([("a", "A")])).encode())
        for _ in range(40):
            file.write(b"x" * (1 << 18))
        file.write(b"\n" + str(WRITERS[ending]([("b", "B")])).encode())
    skipped = SkippedExamples()
    tracemalloc.start()
    found = list(find_corpus(str(path), source="en", target="de", on_error="skip").read(skipped))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [one.source for one in found] == ["a", "b"]
    assert skipped.total == 1
    assert peak < 5 << 20  # of 10 MiB


def test_reading_holds_one_line_at_a_time(tmp_path: Path) -> None:
    path = put(tmp_path / "my.tsv.gz", as_tsv([("some words " * 9, "einige Worte " * 9)] * 20_000))
    corpus = find_corpus(str(path), source="en", target="de")
    tracemalloc.start()
    assert sum(1 for _ in corpus) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20  # the text has 4.6 MiB


# -------------------------------------------------------------------------------------- what a recipe names


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data sets that JUMOK_DATA names, seen from an empty folder."""
    root = tmp_path / "shelf"
    (root / "captions").mkdir(parents=True)
    for split, count in (("train", 5), ("test2016", 3)):
        for side in ("en", "de", "fr"):
            put(root / "captions" / f"{split}.{side}.gz", "".join(f"{side} {n}\n" for n in range(count)))
    (root / "mixed").mkdir()
    put(root / "mixed" / "train.tsv.gz", "english\tkorean\tfrom\ndog\t개\tx\n")
    put(root / "mixed" / "gold.en-fr.txt", "a b ||| c d\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("JUMOK_DATA", str(root))
    return root


def test_a_data_set_is_found_by_name_and_split(shelf: Path) -> None:
    assert len(list(find_corpus("captions/train", source="en", target="de"))) == 5
    assert pairs(find_corpus("captions", source="fr", target="en", split="test2016"))[2] == ("fr 2", "en 2")
    assert pairs(find_corpus("mixed/train", source="english", target="korean")) == [("dog", "개")]
    assert pairs(find_corpus("mixed/gold", source="en", target="fr")) == [("a b", "c d")]
    assert pairs(find_corpus("mixed/gold", source="fr", target="en")) == [("c d", "a b")]
    both = ["captions/train.en.gz", "captions/train.fr.gz"]
    assert pairs(find_corpus(both, source="x", target="y"))[0] == ("en 0", "fr 0")


def test_without_jumok_data_the_folder_data_is_looked_into(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUMOK_DATA")
    shelf.rename("data")
    assert len(list(find_corpus("captions/train", source="en", target="de"))) == 5


def test_lists_and_patterns_are_read_one_after_the_other(shelf: Path) -> None:
    for n in (2, 1):
        put(Path(f"part{n}.tsv"), f"dog {n}\tHund {n}\n")
    assert pairs(find_corpus("part*.tsv", source="en", target="de")) == [
        ("dog 1", "Hund 1"),
        ("dog 2", "Hund 2"),
    ]
    mixed = find_corpus(["part2.tsv", "captions/test2016"], source="en", target="de")
    assert [one for one, _ in pairs(mixed)] == ["dog 2", "en 0", "en 1", "en 2"]


def test_what_is_not_there_is_told_with_what_is_the_nearest_first(shelf: Path) -> None:
    put(Path("train.tsv"), "a\tA\n")
    for name in ("README.md", "LICENSE", "readme.txt", ".hidden", "fetch.sh"):
        for folder in (shelf, shelf / "captions"):
            put(folder / name, "for people to read")
    for name, told in (
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
        with pytest.raises(InputError, match=told):
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


def test_a_corpus_may_be_made_and_prepared(tmp_path: Path) -> None:
    corpus = ParallelCorpus.from_pairs("squares", lambda: ((f"{n} TIMES {n}", str(n * n)) for n in range(3)))
    small = corpus.map_texts("small", str.lower, lambda text: text * 2)
    assert pairs(small) == [("0 times 0", "00"), ("1 times 1", "11"), ("2 times 2", "44")]
    assert len({corpus.fingerprint, small.fingerprint, ParallelCorpus.from_pairs("cubes", list).fingerprint}) == 3
    gone = corpus.map_texts("gone", lambda text: "", str)
    with pytest.raises(InputError, match="squares:1: an empty source"):
        list(gone)


def test_the_fingerprint_changes_with_the_file_and_with_how_it_is_read(tmp_path: Path) -> None:
    path = put(tmp_path / "my.tsv", "a\tA\n")
    first = find_corpus(str(path), source=1, target=2).fingerprint
    assert find_corpus(str(path), source=1, target=2).fingerprint == first
    assert find_corpus(str(path), source=2, target=1).fingerprint != first
    assert find_corpus(str(path), source=1, target=2, on_error="skip").fingerprint != first
    put(path, "a\tA\nb\tB\n")
    assert find_corpus(str(path), source=1, target=2).fingerprint != first


def test_a_data_set_of_the_hub_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = {}

    def load(name: str, configuration: str | None, **settings: object) -> object:
        asked.update(settings, name=name, configuration=configuration)
        if name == "no/such":
            raise FileNotFoundError("Dataset 'no/such' doesn't exist on the Hub\nor cannot be accessed")
        rows = [{"translation": {"en": "dog", "de": "Hund"}}, {"translation": {"en": "", "de": "x"}}]
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    corpus = find_corpus("hub:some/one@v2:de-en", source="en", target="de", split="validation", on_error="skip")
    assert list(corpus) == [TranslationExample("dog", "Hund", "hub:some/one@v2:de-en:validation:1")]
    assert asked == {
        "name": "some/one",
        "configuration": "de-en",
        "split": "validation",
        "revision": "v2",
        "streaming": True,
    }
    assert next(iter(find_corpus("hub:some/one", source="en", target="de"))).source == "dog"
    assert (asked["split"], asked["configuration"], asked["revision"]) == ("train", None, None)
    with pytest.raises(InputError, match="hub:no/such cannot be read: Dataset 'no/such' doesn't exist"):
        list(find_corpus("hub:no/such", source="en", target="de"))


@pytest.mark.parametrize(("name", "package"), [("hub:some/one", "datasets"), ("my.parquet", "pyarrow")])
def test_a_missing_package_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    def missing(module: str) -> object:
        raise ImportError(f"No module named {module!r}")

    monkeypatch.chdir(tmp_path)
    put(tmp_path / "my.parquet", b"PAR1")
    monkeypatch.setattr(text_files.importlib, "import_module", missing)
    with pytest.raises(MissingExtra, match=rf'{package} is needed for this: pip install "jumok\[hub\]"'):
        list(find_corpus(name, source="en", target="de"))
