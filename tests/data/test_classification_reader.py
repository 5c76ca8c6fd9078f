"""Labelled texts from tables as they are found: every format, every way to name columns, every flaw."""

from __future__ import annotations

import doctest
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.data import splits
from jumok.data.readers import classification
from jumok.data.readers.classification import (
    ClassificationColumns,
    ClassificationExample,
    LabelSet,
    read_classification_examples,
)
from jumok.data.readers.dataset_files import find_files
from jumok.data.readers.invalid_examples import InvalidExample, SkippedExamples, skip_invalid
from jumok.data.splits import split_held_out
from jumok.errors import InputError

ROWS = [("good film", "1"), ('a "bad" one', "0"), ("so\u0085so", "1")]  # a quote, a line end that is none


def samples(path: Path | str, columns: ClassificationColumns, **more: Any) -> list[ClassificationExample]:
    return list(skip_invalid(read_classification_examples(str(path), columns, **more), "stop", SkippedExamples()))


def flaws(path: Path | str, columns: ClassificationColumns, **more: Any) -> list[InvalidExample]:
    return [one for one in read_classification_examples(str(path), columns, **more) if isinstance(one, InvalidExample)]


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(classification) == (0, 3)
    assert doctest.testmod(splits) == (0, 2)


# ------------------------------------------------------------------------------------------------- formats


def written(folder: Path, name: str) -> Path:
    """The three rows, with columns ``id``, ``text`` and ``label``."""
    path = folder / name
    if ".tsv" in name:
        lines = ["id\ttext\tlabel", *(f"{n}\t{text}\t{label}" for n, (text, label) in enumerate(ROWS))]
        data = b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n"
    elif ".csv" in name:
        quoted = (f'{n},"{text.replace(chr(34), chr(34) * 2)}",{label}' for n, (text, label) in enumerate(ROWS))
        data = "\n".join(["id,text,label", *quoted, ""]).encode()
    elif ".jsonl" in name:
        rows = ({"id": n, "text": text, "label": int(label)} for n, (text, label) in enumerate(ROWS))
        data = "".join(json.dumps(row) + "\n\n" for row in rows).encode()
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        texts, labels = zip(*ROWS, strict=True)
        table = arrow.table({"id": [0, 1, 2], "text": texts, "label": [int(one) for one in labels]})
        parquet.write_table(table, folder / "plain.parquet")
        data = (folder / "plain.parquet").read_bytes()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("ending", ["tsv", "tsv.gz", "csv", "csv.gz", "jsonl", "jsonl.gz", "parquet", "parquet.gz"])
def test_every_format(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path, f"data.{ending}")
    found = samples(path, ClassificationColumns("text", "label"))
    assert [(one.text, one.label) for one in found] == ROWS
    assert found[0].pair is None
    first = {"tsv": 2, "csv": 2}.get(ending.removesuffix(".gz"), 1)
    assert found[0].location == f"{path}:{first}"


def test_columns_by_number_with_a_header_and_without(tmp_path: Path) -> None:
    path = tmp_path / "data.tsv"
    path.write_text("x\tgood film\t1\nx\tbad\t0\n")
    assert [one.label for one in samples(path, ClassificationColumns(2, 3))] == ["1", "0"]
    assert [one.label for one in samples(path, ClassificationColumns(2, 3, header=True))] == ["0"]
    with pytest.raises(InputError, match="has no header, so columns need numbers"):
        samples(path, ClassificationColumns("text", 3, header=False))


def test_one_of_several_columns_or_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('"3","a text"\n')
    (tmp_path / "test.csv").write_text('"3","a title ","a text"\n"4","","a text"\n')
    columns = ClassificationColumns([2, 3], 1)
    assert [one.text for one in samples(tmp_path / "train.csv", columns)] == ["a text"]
    assert [one.text for one in samples(tmp_path / "test.csv", columns)] == ["a title . a text", "a text"]
    (tmp_path / "dev.tsv").write_text("label\tcontent\n0\tbad\n")
    assert samples(tmp_path / "dev.tsv", ClassificationColumns(["sentence", "content"], "label"))[0].text == "bad"
    (tmp_path / "dev.jsonl").write_text('{"content": "bad", "label": true}\n')
    [one] = samples(tmp_path / "dev.jsonl", ClassificationColumns(["sentence", "content"], "label"))
    assert (one.text, one.label) == ("bad", "True")


def test_pairs_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "data.tsv"
    path.write_text("score\ta\tb\n4.75\tone\ttwo\n0\tthree\tfour\n")
    found = samples(path, ClassificationColumns("a", "score", "b"), regression=True)
    assert [(one.text, one.pair, one.label) for one in found] == [
        ("one", "two", 4.75),
        ("three", "four", 0.0),
    ]


def test_the_rows_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*place: Any, **more: Any) -> list[dict[str, object]]:
        asked.append((*place, more["split"]))
        return [{"sentence": "good", "label": 1}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    [one] = samples("hub:nyu/glue:sst2", ClassificationColumns("sentence", "label"), split="test")
    assert one == ClassificationExample("good", None, "1", "hub:nyu/glue:sst2:test:1")
    assert asked == [("nyu/glue", "sst2", "test")]


# --------------------------------------------------------------------------------------------------- flaws


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        ("good\t1\textra", "another number of columns", "3, and the first line has 2"),
        ("\t1", "an empty text", ""),
        ("good\t ", "an empty label", ""),
        ("a\0b\t1", "a NUL character", "after 'a' in the text"),
        ("a\udcffb\t1", "invalid UTF-8", "the byte 0xff after 'a' in the text"),
    ],
)
def test_a_line_that_cannot_be_used(tmp_path: Path, line: str, reason: str, detail: str) -> None:
    path = tmp_path / "data.tsv"
    path.write_bytes(f"text\tlabel\nfine\t0\n{line}\n".encode("utf-8", "surrogateescape"))
    assert flaws(path, ClassificationColumns("text", "label")) == [InvalidExample(f"{path}:3", reason, detail)]
    with pytest.raises(InputError, match=f"data.tsv:3: {reason}.*data.on_error=skip"):
        samples(path, ClassificationColumns("text", "label"))
    skipped = SkippedExamples()
    kept = list(
        skip_invalid(read_classification_examples(str(path), ClassificationColumns("text", "label")), "skip", skipped)
    )
    assert [one.text for one in kept] == ["fine"]
    assert str(skipped) == f"1 skipped: 1 × {reason} (first: {path}:3)"


def test_an_empty_second_text_and_labels_that_are_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "data.tsv"
    path.write_text("a\tb\tscore\nx\t\t1\nx\ty\tmany\nx\ty\tnan\nx\ty\t2\n")
    found = flaws(path, ClassificationColumns("a", "score", "b"), regression=True)
    assert [(one.location[-2:], one.reason) for one in found] == [
        (":2", "an empty second text"),
        (":3", "a label that is no number"),
        (":4", "a label that is no number"),
    ]
    assert found[1].detail == "it is 'many'"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "x"}', "no 'label'"),
        ('{"text": 7, "label": 1}', "a text that is no text"),
        ('{"text": null, "label": 1}', "an empty text"),
        ('{"text": "x", "label": [1]}', "a label that is no text"),
        ("[1]", "no JSON object"),
        ("{", "not JSON"),
    ],
)
def test_json_that_cannot_be_used(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n")
    assert [(one.location, one.reason) for one in flaws(path, ClassificationColumns("text", "label"))] == [
        (f"{path}:1", reason)
    ]


@pytest.mark.parametrize("ending", ["tsv", "csv", "parquet"])
def test_a_column_that_is_not_there(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path, f"data.{ending}")
    with pytest.raises(InputError, match=r"no column 'txt'; (its first line|it) has 3: 'text'"):
        samples(path, ClassificationColumns("txt", "label"))
    with pytest.raises(InputError, match="no column 4"):
        samples(path, ClassificationColumns("text", 4))


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(InputError, match=r"data.txt is not a table.*\.tsv"):
        samples(tmp_path / "data.txt", ClassificationColumns("text", "label"))


# -------------------------------------------------------------------------------------------------- labels


def test_labels_are_numbered_by_first_sight_or_as_said(tmp_path: Path) -> None:
    found = samples(written(tmp_path, "data.tsv"), ClassificationColumns("text", "label"))
    assert LabelSet.from_examples(found).names == ("1", "0")
    said = LabelSet.from_config({"0": "negative", "1": "positive"})
    assert [said.names[said.index(one.label)] for one in found] == ["positive", "negative", "positive"]
    assert len(said) == 2


def test_an_unknown_label_names_its_line_and_the_known_ones(tmp_path: Path) -> None:
    path = written(tmp_path, "data.tsv")
    checked = LabelSet.from_config(["1", "2"]).check_examples(
        read_classification_examples(str(path), ClassificationColumns("text", "label"))
    )
    with pytest.raises(InputError, match=r"data.tsv:3: an unknown label \('0'; the labels are: 1, 2\)"):
        list(skip_invalid(checked, "stop", SkippedExamples()))


def test_the_same_number_is_the_same_class(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    labels = ["1", "1.0", "2.5", "-3.0", '"1.0"']  # what is in quotes is no number
    path.write_text("".join(f'{{"text": "x", "label": {one}}}\n' for one in labels))
    assert [one.label for one in samples(path, ClassificationColumns("text", "label"))] == [
        "1",
        "1",
        "2.5",
        "-3",
        "1.0",
    ]


def test_labels_that_are_none() -> None:
    with pytest.raises(InputError, match="x:1000: more than 1000 different labels"):
        LabelSet.from_examples(ClassificationExample("t", None, str(n), f"x:{n}") for n in range(5000))
    with pytest.raises(InputError, match="the same label, '1'"):
        LabelSet.from_examples([ClassificationExample("t", None, "1", "x:1")])
    with pytest.raises(InputError, match="occurs twice"):
        LabelSet.from_config({"0": "bad", "1": "bad"})


# -------------------------------------------------------------------------------------- names of data sets


def test_splits_patterns_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path))
    folder = tmp_path / "films"
    folder.mkdir()
    for name in ("train.tsv", "test.tsv.gz", "dev.csv"):
        written(folder, name)

    def names(*asked: Any, split: str | None = None) -> list[str]:
        return [one.name for one in find_files(*asked, (".tsv", ".csv"), split)]

    assert names("films/train") == ["train.tsv"]
    assert names("films/dev") == ["dev.csv"]
    assert names("films", split="test") == ["test.tsv.gz"]
    assert names("films/t*") == ["test.tsv.gz", "train.tsv"]
    assert names(["films/train", "films/dev.csv"]) == ["train.tsv", "dev.csv"]
    assert names(str(folder / "train.tsv")) == ["train.tsv"]
    with pytest.raises(InputError, match=r"a folder with no valid\.tsv; it contains: .*films/\*"):
        names("films", split="valid")
    with pytest.raises(InputError, match=r"there is no films/trian; .* contains: train\.tsv"):
        names("films/trian")
    with pytest.raises(InputError, match=r"no file or data set 'songs'.*films"):
        names("songs")
    with pytest.raises(InputError, match="no file to read"):
        names([])


# ------------------------------------------------------------------------------------------------ held out


@given(st.lists(st.integers(0, 40), min_size=60, max_size=200), st.integers(1, 12))
def test_what_is_held_out(keys: list[int], wanted: int) -> None:
    if len(set(keys)) < 15:
        return
    numbered = list(enumerate(keys))
    parts = split_held_out(numbered, lambda one: str(one[1]), wanted)
    assert sorted(one for part in parts.values() for one in part) == numbered
    groups = [{key for _, key in part} for part in parts.values()]
    assert not groups[0] & groups[1] | groups[1] & groups[2] | groups[0] & groups[2]
    assert all(len(parts[name]) >= min(wanted, len(keys) // 5) for name in ("valid", "test"))
    # What is held out depends on the keys alone, not on the order of the examples.
    again = split_held_out(numbered[::-1], lambda one: str(one[1]), wanted)
    assert {name: sorted(part) for name, part in parts.items()} == {n: sorted(p) for n, p in again.items()}


def test_too_little_to_hold_anything_out() -> None:
    with pytest.raises(InputError, match=r"of 9 examples with 1 different keys"):
        split_held_out(range(9), lambda _: "the one article", 1)
