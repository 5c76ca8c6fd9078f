"""`jumok align` on files: input, output, and messages about invalid lines."""

import gzip
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from planted_attention import gold_links, make_pairs, plant_attention

from jumok import InputError
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.look.views.alignment_selection import AlignmentView
from jumok.run import Run
from jumok.tasks import load_predictor
from jumok.tasks.translate.config import TranslationDataConfig
from jumok.tasks.translate.corpus_alignment import AlignmentJob, parse_view_filter, read_pairs
from jumok.tasks.translate.word_alignment import AlignmentViewFilter, WordAligner

pytestmark = pytest.mark.long


@dataclass
class Output:
    """The lines that a job writes and logs."""

    lines: list[str]
    log: list[str]


def run_job(aligner: WordAligner, inputs: Sequence[object], output: Output | None = None, **options: Any) -> Output:
    output = output or Output([], [])
    view_filter = options.pop("view_filter", AlignmentViewFilter())
    AlignmentJob([*map(str, inputs)], view_filter, **options).run(aligner, output.lines.append, output.log.append)
    return output


def write_pairs(path: Path, pairs: Sequence[TranslationExample], separator: str = "\t") -> Path:
    path.write_text("".join(f"{pair.source}{separator}{pair.target}\n" for pair in pairs), encoding="utf-8")
    return path


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def format_gold(pair: TranslationExample, *, target_first: bool = False) -> str:
    return " ".join(f"{j}-{i}" if target_first else f"{i}-{j}" for i, j in sorted(gold_links(pair)))


@pytest.mark.parametrize("form", ["table", "bars", "two files", "standard input"])
def test_pairs_are_read_from_every_kind_of_input(
    form: str, aligner: WordAligner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = make_pairs(5, seed=9)
    table = write_pairs(tmp_path / "p.tsv", pairs)
    inputs: dict[str, list[object]] = {
        "table": [table],
        "bars": [write_pairs(tmp_path / "p.txt", pairs, " ||| ")],
        "two files": [
            write_lines(tmp_path / "a.low", [pair.source for pair in pairs]),
            write_lines(tmp_path / "a.high", [pair.target for pair in pairs]),
        ],
        "standard input": ["-"],
    }
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(table.read_bytes())))
    output = run_job(aligner, inputs[form])
    assert output.lines == [format_gold(pair) for pair in pairs]
    views = "alignment view layer 1, head 2, shifted; reverse: layer 0, head 1, plain; chosen by"
    assert output.log[0].startswith(views)


def test_an_invalid_line_is_an_error_or_has_an_empty_line(aligner: WordAligner, tmp_path: Path) -> None:
    pairs = make_pairs(3)
    first, second, third = (f"{pair.source}\t{pair.target}" for pair in pairs)
    path = write_lines(tmp_path / "p.tsv", [first, "ba\t", second, "a\tb\tc", third])
    with pytest.raises(InputError, match=r"p\.tsv:2: an empty target\. Correct it, or .* --on-error skip"):
        run_job(aligner, [path])
    output = run_job(aligner, [path], on_error="skip")
    assert output.lines == [format_gold(pairs[0]), "", format_gold(pairs[1]), "", format_gold(pairs[2])]
    assert any("p.tsv:2: an empty target" in line for line in output.log)
    assert any("p.tsv:4: wrong number of columns" in line for line in output.log)


def test_a_pair_too_long_for_the_model_is_invalid(word_runs: dict[str, Run], tmp_path: Path) -> None:
    aligner = WordAligner(load_predictor(word_runs["short"], "cpu"))
    path = write_lines(tmp_path / "p.tsv", ["ba\tBA", "ba " * 12 + "\tBA", "da\tDA"])
    with pytest.raises(InputError, match=r"p\.tsv:2: too long \(12 tokens"):
        run_job(aligner, [path])
    assert run_job(aligner, [path], on_error="skip").lines == ["0-0", "", "0-0"]


@pytest.mark.parametrize("name", ["p.tsv", "p.txt", "p.tsv.gz", "p.txt.gz"])
def test_empty_lines_do_not_shift_the_output(name: str, aligner: WordAligner, tmp_path: Path) -> None:
    text = b"ba\tBA\n\nda\tDA\n\t\nfa\tFA\n"
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    output = run_job(aligner, [tmp_path / name], on_error="skip")
    assert output.lines == ["0-0", "", "0-0", "", "0-0"]
    assert [line.partition(f"{name}:")[2].partition(" ")[0] for line in output.log[1:]] == ["2:", "4:"]
    with pytest.raises(InputError, match=f"{name}:2: an empty line"):
        run_job(aligner, [tmp_path / name])


def test_many_invalid_lines_are_counted(aligner: WordAligner, tmp_path: Path) -> None:
    output = run_job(aligner, [write_lines(tmp_path / "p.tsv", ["ba\tBA"] + ["ba\t"] * 30)], on_error="skip")
    assert output.lines == ["0-0"] + [""] * 30
    assert len(output.log) == 1 + 20 + 1
    assert output.log[-1].startswith("30 pairs could not be aligned")


def test_lines_that_are_not_pairs_are_described(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"a ||| b\nalone\n\xff\tb\na\tb ||| c\n\n")
    pairs = list(read_pairs([str(tmp_path / "p.txt")], TranslationDataConfig()))
    assert [isinstance(pair, InvalidExample) for pair in pairs] == [False, True, True, False, True]
    assert "p.txt:2: no pair (1 columns; expected two texts with a tab or ||| between them)" in str(pairs[1])
    assert "p.txt:3: invalid UTF-8" in str(pairs[2])
    assert str(pairs[4]).endswith("p.txt:5: an empty line")
    for names in (["a", "b", "c"], ["-", "a"], ["a", "-"]):
        with pytest.raises(InputError, match=f"{' '.join(names)} is invalid; name one file with both sides"):
            read_pairs(names, TranslationDataConfig())
    with pytest.raises(InputError, match="no file or data set"):
        read_pairs(["missing.tsv"], TranslationDataConfig())


# ---------------------------------------------------------------------------------------------- gold alignments


def test_gold_alignments_score_both_directions(aligner: WordAligner, tmp_path: Path) -> None:
    pairs = make_pairs(20, seed=2)
    path = write_pairs(tmp_path / "p.tsv", pairs)
    gold = str(write_lines(tmp_path / "gold", [format_gold(pair) for pair in pairs]))
    output = run_job(aligner, [path], gold_alignments=gold)
    assert [line.partition(":")[0] for line in output.log[1:]] == ["links", "forward only", "reverse only"]
    assert all("error rate 0.0000, precision 1.000, recall 1.000" in line for line in output.log[1:])
    swapped = str(write_lines(tmp_path / "swapped", [format_gold(pair, target_first=True) for pair in pairs]))
    assert run_job(aligner, [path], gold_alignments=swapped, gold_target_first=True).log == output.log
    with pytest.raises(InputError, match="there are 1 pairs"):
        run_job(aligner, [write_lines(tmp_path / "short.tsv", ["ba\tBA"])], gold_alignments=gold)


def test_the_recipe_says_whether_its_gold_alignments_are_target_first(aligner: WordAligner, tmp_path: Path) -> None:
    pairs = make_pairs(9, seed=3)
    gold = str(write_lines(tmp_path / "gold", [format_gold(pair, target_first=True) for pair in pairs]))
    run = aligner.forward.run
    data = replace(run.recipe.data, gold_alignments=gold, gold_target_first=True)
    aligner.forward.run = replace(run, recipe=replace(run.recipe, data=data))
    output = run_job(aligner, [write_pairs(tmp_path / "p.tsv", pairs)], gold_alignments=gold)
    assert "links: alignment error rate 0.0000" in output.log[1]


def test_errors_are_found_before_anything_is_written(aligner: WordAligner, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "p.tsv", make_pairs(3, seed=2))
    gold = str(write_lines(tmp_path / "gold", ["0-0", "0-99", "0-0"]))
    output = Output([], [])
    with pytest.raises(InputError, match=r"pair 2 has a link from word 0 to word 99.*--gold-target-first"):
        run_job(aligner, [path], output, gold_alignments=gold)
    with pytest.raises(InputError, match=r"^head 99 is invalid; this model"):
        run_job(aligner, [path], output, view_filter=AlignmentViewFilter(head=99))
    assert not output.lines


# ----------------------------------------------------------------------------------------------------- options


def test_a_symmetrization_needs_two_directions(aligner: WordAligner, word_runs: dict[str, Run]) -> None:
    forward_only = WordAligner(plant_attention(word_runs["forward"], AlignmentView(0, 0)))
    with pytest.raises(InputError, match="--reverse-run"):
        run_job(forward_only, ["-"], symmetrization="union")
    with pytest.raises(InputError, match=r"'grow'.* product, grow-diag, "):
        run_job(aligner, ["-"], symmetrization="grow")


@pytest.mark.parametrize(
    ("values", "view_filter"),
    [
        (("auto", "auto", None), AlignmentViewFilter()),
        (("3", "mean", True), AlignmentViewFilter(3, "mean", True)),
        (("0", "7", False), AlignmentViewFilter(0, 7, False)),
    ],
)
def test_options_of_the_view(values: tuple[str, str, bool | None], view_filter: AlignmentViewFilter) -> None:
    assert parse_view_filter(*values) == view_filter


@pytest.mark.parametrize(
    ("layer", "head", "message"),
    [
        ("last", "auto", "--alignment-layer last: it is auto, or a number"),
        ("-1", "auto", "--alignment-layer -1"),
        ("auto", "all", "--alignment-head all: it is auto or mean, or a number"),
    ],
)
def test_invalid_options_of_the_view(layer: str, head: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_view_filter(layer, head, None)
