"""Labelled texts from tables: formats, columns and invalid rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def read_valid(path: Path | str, columns: ClassificationColumns, **options: Any) -> list[ClassificationExample]:
    return list(skip_invalid(read_classification_examples(str(path), columns, **options), "stop", SkippedExamples()))


def read_invalid(path: Path | str, columns: ClassificationColumns, **options: Any) -> list[InvalidExample]:
    return [
        example
        for example in read_classification_examples(str(path), columns, **options)
        if isinstance(example, InvalidExample)
    ]


# ------------------------------------------------------------------------------------------------- formats


def write_table(folder: Path, name: str) -> Path:
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
        table = arrow.table({"id": [0, 1, 2], "text": texts, "label": [int(example) for example in labels]})
        parquet.write_table(table, folder / "plain.parquet")
        data = (folder / "plain.parquet").read_bytes()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("suffix", ["tsv", "tsv.gz", "csv", "csv.gz", "jsonl", "jsonl.gz", "parquet", "parquet.gz"])
def test_table_formats(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path, f"data.{suffix}")
    examples = read_valid(path, ClassificationColumns("text", "label"))
    assert [(example.text, example.label) for example in examples] == ROWS
    assert examples[0].pair is None
    first = {"tsv": 2, "csv": 2}.get(suffix.removesuffix(".gz"), 1)
    assert examples[0].location == f"{path}:{first}"


def test_numbered_columns_with_and_without_header(tmp_path: Path) -> None:
    path = tmp_path / "data.tsv"
    path.write_text("x\tgood film\t1\nx\tbad\t0\n")
    assert [example.label for example in read_valid(path, ClassificationColumns(2, 3))] == ["1", "0"]
    assert [example.label for example in read_valid(path, ClassificationColumns(2, 3, header=True))] == ["0"]
    with pytest.raises(InputError, match="has no header, so columns need numbers"):
        read_valid(path, ClassificationColumns("text", 3, header=False))


def test_alternative_and_joined_columns(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('"3","a text"\n')
    (tmp_path / "test.csv").write_text('"3","a title ","a text"\n"4","","a text"\n')
    columns = ClassificationColumns([2, 3], 1)
    assert [example.text for example in read_valid(tmp_path / "train.csv", columns)] == ["a text"]
    assert [example.text for example in read_valid(tmp_path / "test.csv", columns)] == ["a title . a text", "a text"]
    (tmp_path / "dev.tsv").write_text("label\tcontent\n0\tbad\n")
    assert read_valid(tmp_path / "dev.tsv", ClassificationColumns(["sentence", "content"], "label"))[0].text == "bad"
    (tmp_path / "dev.jsonl").write_text('{"content": "bad", "label": true}\n')
    [example] = read_valid(tmp_path / "dev.jsonl", ClassificationColumns(["sentence", "content"], "label"))
    assert (example.text, example.label) == ("bad", "True")


def test_text_pairs_with_regression_labels(tmp_path: Path) -> None:
    path = tmp_path / "data.tsv"
    path.write_text("score\ta\tb\n4.75\tone\ttwo\n0\tthree\tfour\n")
    examples = read_valid(path, ClassificationColumns("a", "score", "b"), regression=True)
    assert [(example.text, example.pair, example.label) for example in examples] == [
        ("one", "two", 4.75),
        ("three", "four", 0.0),
    ]


def test_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    requests = []

    def load(*place: Any, **options: Any) -> list[dict[str, object]]:
        requests.append((*place, options["split"]))
        return [{"sentence": "good", "label": 1}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    [example] = read_valid("hub:nyu/glue:sst2", ClassificationColumns("sentence", "label"), split="test")
    assert example == ClassificationExample("good", None, "1", "hub:nyu/glue:sst2:test:1")
    assert requests == [("nyu/glue", "sst2", "test")]


# --------------------------------------------------------------------------------------------------- flaws


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        ("good\t1\textra", "wrong number of columns", "3, and the first line has 2"),
        ("\t1", "an empty text", ""),
        ("good\t ", "an empty label", ""),
        ("a\0b\t1", "a NUL character", "after 'a' in the text"),
        ("a\udcffb\t1", "invalid UTF-8", "the byte 0xff after 'a' in the text"),
    ],
)
def test_invalid_tsv_lines(tmp_path: Path, line: str, reason: str, detail: str) -> None:
    path = tmp_path / "data.tsv"
    path.write_bytes(f"text\tlabel\nfine\t0\n{line}\n".encode("utf-8", "surrogateescape"))
    assert read_invalid(path, ClassificationColumns("text", "label")) == [InvalidExample(f"{path}:3", reason, detail)]
    with pytest.raises(InputError, match=f"data.tsv:3: {reason}.*data.on_error=skip"):
        read_valid(path, ClassificationColumns("text", "label"))
    skipped = SkippedExamples()
    valid = list(
        skip_invalid(read_classification_examples(str(path), ClassificationColumns("text", "label")), "skip", skipped)
    )
    assert [example.text for example in valid] == ["fine"]
    assert str(skipped) == f"1 skipped: 1 × {reason} (first: {path}:3)"


def test_invalid_text_pairs_and_regression_labels(tmp_path: Path) -> None:
    path = tmp_path / "data.tsv"
    path.write_text("a\tb\tscore\nx\t\t1\nx\ty\tmany\nx\ty\tnan\nx\ty\t2\n")
    examples = read_invalid(path, ClassificationColumns("a", "score", "b"), regression=True)
    assert [(example.location[-2:], example.reason) for example in examples] == [
        (":2", "an empty second text"),
        (":3", "a label that is no number"),
        (":4", "a label that is no number"),
    ]
    assert examples[1].detail == "it is 'many'"


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
def test_invalid_json_lines(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n")
    assert [
        (example.location, example.reason) for example in read_invalid(path, ClassificationColumns("text", "label"))
    ] == [(f"{path}:1", reason)]


@pytest.mark.parametrize("suffix", ["tsv", "csv", "parquet"])
def test_missing_column(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path, f"data.{suffix}")
    with pytest.raises(InputError, match=r"no column 'txt'; (its first line|it) has 3: 'text'"):
        read_valid(path, ClassificationColumns("txt", "label"))
    with pytest.raises(InputError, match="no column 4"):
        read_valid(path, ClassificationColumns("text", 4))


def test_unknown_table_format(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(InputError, match=r"data.txt is not a table.*\.tsv"):
        read_valid(tmp_path / "data.txt", ClassificationColumns("text", "label"))


# -------------------------------------------------------------------------------------------------- labels


def test_label_order(tmp_path: Path) -> None:
    examples = read_valid(write_table(tmp_path, "data.tsv"), ClassificationColumns("text", "label"))
    assert LabelSet.from_examples(examples).names == ("1", "0")
    labels = LabelSet.from_config({"0": "negative", "1": "positive"})
    assert [labels.names[labels.index(example.label)] for example in examples] == ["positive", "negative", "positive"]
    assert len(labels) == 2


def test_unknown_label_error_lists_known_labels(tmp_path: Path) -> None:
    path = write_table(tmp_path, "data.tsv")
    checked = LabelSet.from_config(["1", "2"]).check_examples(
        read_classification_examples(str(path), ClassificationColumns("text", "label"))
    )
    with pytest.raises(InputError, match=r"data.tsv:3: an unknown label \('0'; the labels are: 1, 2\)"):
        list(skip_invalid(checked, "stop", SkippedExamples()))


def test_equal_numbers_are_the_same_class(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    labels = ["1", "1.0", "2.5", "-3.0", '"1.0"']  # what is in quotes is no number
    path.write_text("".join(f'{{"text": "x", "label": {example}}}\n' for example in labels))
    assert [example.label for example in read_valid(path, ClassificationColumns("text", "label"))] == [
        "1",
        "1",
        "2.5",
        "-3",
        "1.0",
    ]


def test_invalid_label_sets() -> None:
    with pytest.raises(InputError, match="x:1000: more than 1000 different labels"):
        LabelSet.from_examples(ClassificationExample("t", None, str(n), f"x:{n}") for n in range(5000))
    with pytest.raises(InputError, match="the same label, '1'"):
        LabelSet.from_examples([ClassificationExample("t", None, "1", "x:1")])
    with pytest.raises(InputError, match="occurs twice"):
        LabelSet.from_config({"0": "bad", "1": "bad"})


# -------------------------------------------------------------------------------------- names of data sets


def test_find_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path))
    folder = tmp_path / "films"
    folder.mkdir()
    for name in ("train.tsv", "test.tsv.gz", "dev.csv"):
        write_table(folder, name)

    def names(*requests: Any, split: str | None = None) -> list[str]:
        return [example.name for example in find_files(*requests, (".tsv", ".csv"), split)]

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
def test_split_held_out(keys: list[int], num_held_out: int) -> None:
    if len(set(keys)) < 15:
        return
    numbered = list(enumerate(keys))
    parts = split_held_out(numbered, lambda example: str(example[1]), num_held_out)
    assert sorted(example for part in parts.values() for example in part) == numbered
    groups = [{key for _, key in part} for part in parts.values()]
    assert not groups[0] & groups[1] | groups[1] & groups[2] | groups[0] & groups[2]
    assert all(len(parts[name]) >= min(num_held_out, len(keys) // 5) for name in ("valid", "test"))
    # What is held out depends on the keys alone, not on the order of the examples.
    repeated = split_held_out(numbered[::-1], lambda example: str(example[1]), num_held_out)
    assert {name: sorted(part) for name, part in parts.items()} == {n: sorted(p) for n, p in repeated.items()}


def test_too_few_examples_to_hold_out() -> None:
    with pytest.raises(InputError, match=r"of 9 examples with 1 different keys"):
        split_held_out(range(9), lambda _: "the one article", 1)
