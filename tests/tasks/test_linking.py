"""`jumok align` on files: what it reads, what it writes, and what it says of lines that are no pairs."""

import gzip
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tasks_planted import opposite, pairs, planted

from jumok import InputError
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.look.views.alignment_selection import AlignmentView
from jumok.run import Run
from jumok.tasks import load_predictor
from jumok.tasks.translate import corpus_alignment
from jumok.tasks.translate.config import TranslationDataConfig
from jumok.tasks.translate.corpus_alignment import AlignmentJob, read_pairs
from jumok.tasks.translate.word_alignment import AlignmentViewFilter, WordAligner


class Heard:
    """What a job wrote and told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.told: list[str] = []

    def of(self, job: AlignmentJob, aligner: WordAligner) -> "Heard":
        job.run(aligner, self.lines.append, self.told.append)
        return self


def write(path: Path, some: Sequence[TranslationExample], between: str = "\t") -> str:
    path.write_text("".join(f"{one.source}{between}{one.target}\n" for one in some), encoding="utf-8")
    return str(path)


def pharaoh(pair: TranslationExample) -> str:
    return " ".join(f"{i}-{j}" for i, j in sorted(opposite(pair)))


@pytest.mark.parametrize("form", ["tsv", "bars", "two", "stdin"])
def test_pairs_come_from_a_table_bars_two_files_or_standard_input(
    form: str, both: WordAligner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = pairs(5, seed=9)
    names = {
        "tsv": lambda: [write(tmp_path / "p.tsv", some)],
        "bars": lambda: [write(tmp_path / "p.txt", some, " ||| ")],
        "two": lambda: [two(tmp_path / "a.low", some, 0), two(tmp_path / "a.high", some, 1)],
        "stdin": lambda: ["-"],
    }[form]()
    text = Path(write(tmp_path / "typed", some)).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    heard = Heard().of(AlignmentJob(names, AlignmentViewFilter()), both)
    assert heard.lines == [pharaoh(one) for one in some]
    assert heard.told[0].startswith("links by layer 1, head 2, shifted; back: layer 0, head 1, plain; chosen by")


def two(path: Path, some: Sequence[TranslationExample], side: int) -> str:
    path.write_text("".join(f"{(one.source, one.target)[side]}\n" for one in some), encoding="utf-8")
    return str(path)


def test_a_bad_line_stops_it_by_name_or_has_an_empty_line(both: WordAligner, tmp_path: Path) -> None:
    good = pairs(3)
    lines = [f"{one.source}\t{one.target}" for one in good]
    (tmp_path / "p.tsv").write_text("\n".join([lines[0], "ba\t", lines[1], "a\tb\tc", lines[2]]) + "\n")
    job = AlignmentJob([str(tmp_path / "p.tsv")], AlignmentViewFilter())
    with pytest.raises(InputError, match=r"p\.tsv:2: an empty target\. Mend it, or .* --on-error skip"):
        Heard().of(job, both)
    heard = Heard().of(AlignmentJob([str(tmp_path / "p.tsv")], AlignmentViewFilter(), on_error="skip"), both)
    assert heard.lines == [pharaoh(good[0]), "", pharaoh(good[1]), "", pharaoh(good[2])]
    assert any("p.tsv:2: an empty target" in one for one in heard.told)
    assert any("p.tsv:4: another number of columns" in one for one in heard.told)


def test_a_pair_too_long_for_the_model_is_a_bad_line(word_runs: dict[str, Run], tmp_path: Path) -> None:
    aligner = WordAligner(load_predictor(word_runs["short"], "cpu"))
    (tmp_path / "p.tsv").write_text("ba\tBA\n" + "ba " * 12 + "\tBA\nda\tDA\n")
    with pytest.raises(InputError, match=r"p\.tsv:2: too long \(12 tokens"):
        Heard().of(AlignmentJob([str(tmp_path / "p.tsv")], AlignmentViewFilter()), aligner)
    heard = Heard().of(AlignmentJob([str(tmp_path / "p.tsv")], AlignmentViewFilter(), on_error="skip"), aligner)
    assert heard.lines == ["0-0", "", "0-0"]


def test_the_gold_links_of_the_recipe_are_turned_as_it_says(both: WordAligner, tmp_path: Path) -> None:
    some = pairs(9, seed=3)
    turned = (" ".join(f"{j}-{i}" for i, j in sorted(opposite(one))) for one in some)
    (tmp_path / "gold").write_text("".join(f"{line}\n" for line in turned))
    run = both.forward.run
    data = replace(run.recipe.data, gold_alignments=str(tmp_path / "gold"), gold_target_first=True)
    both.forward.run = replace(run, recipe=replace(run.recipe, data=data))
    heard = Heard().of(
        AlignmentJob([write(tmp_path / "p.tsv", some)], AlignmentViewFilter(), gold_alignments=str(tmp_path / "gold")),
        both,
    )
    assert "links: alignment error rate 0.0000" in heard.told[1]


@pytest.mark.parametrize("name", ["p.tsv", "p.txt", "p.tsv.gz", "p.txt.gz"])
def test_line_n_belongs_to_pair_n_whatever_is_empty(name: str, both: WordAligner, tmp_path: Path) -> None:
    text = b"ba\tBA\n\nda\tDA\n\t\nfa\tFA\n"
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    heard = Heard().of(AlignmentJob([str(tmp_path / name)], AlignmentViewFilter(), on_error="skip"), both)
    assert heard.lines == ["0-0", "", "0-0", "", "0-0"]
    assert [one.partition(f"{name}:")[2].partition(" ")[0] for one in heard.told[1:]] == ["2:", "4:"]
    with pytest.raises(InputError, match=f"{name}:2: an empty line"):
        Heard().of(AlignmentJob([str(tmp_path / name)], AlignmentViewFilter()), both)


def test_too_many_bad_lines_are_counted(both: WordAligner, tmp_path: Path) -> None:
    (tmp_path / "p.tsv").write_text("ba\tBA\n" + "ba\t\n" * 30)
    heard = Heard().of(AlignmentJob([str(tmp_path / "p.tsv")], AlignmentViewFilter(), on_error="skip"), both)
    assert heard.lines == ["0-0"] + [""] * 30
    assert len(heard.told) == 1 + 20 + 1
    assert heard.told[-1].startswith("30 pairs in all")


def test_lines_that_are_no_pairs_are_told(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"a ||| b\nalone\n\xff\tb\na\tb ||| c\n\n")
    found = list(read_pairs([str(tmp_path / "p.txt")], TranslationDataConfig()))
    assert [type(one) for one in found] == [
        TranslationExample,
        InvalidExample,
        InvalidExample,
        TranslationExample,
        InvalidExample,
    ]
    assert "p.txt:2: no pair (1 columns; it is two texts with a tab or ||| between them)" in str(found[1])
    assert "p.txt:3: invalid UTF-8" in str(found[2])
    assert str(found[4]).endswith("p.txt:5: an empty line")
    for names in (["a", "b", "c"], ["-", "a"], ["a", "-"]):
        with pytest.raises(InputError, match=f"{' '.join(names)} came; name one file with both sides"):
            read_pairs(names, TranslationDataConfig())
    with pytest.raises(InputError, match="no file or data set"):
        read_pairs(["missing.tsv"], TranslationDataConfig())


def test_gold_links_tell_the_error_rate_of_each_direction(both: WordAligner, tmp_path: Path) -> None:
    some = pairs(20, seed=2)
    name = write(tmp_path / "p.tsv", some)
    (tmp_path / "gold").write_text("".join(f"{pharaoh(one)}\n" for one in some))
    (tmp_path / "turned").write_text(
        "".join(" ".join(f"{j}-{i}" for i, j in sorted(opposite(one))) + "\n" for one in some)
    )
    heard = Heard().of(AlignmentJob([name], AlignmentViewFilter(), gold_alignments=str(tmp_path / "gold")), both)
    assert [one.partition(":")[0] for one in heard.told[1:]] == ["links", "forth alone", "back alone"]
    assert all("error rate 0.0000, precision 1.000, recall 1.000" in one for one in heard.told[1:])
    turned = Heard().of(
        AlignmentJob([name], AlignmentViewFilter(), gold_alignments=str(tmp_path / "turned"), gold_target_first=True),
        both,
    )
    assert turned.told == heard.told
    (tmp_path / "short.tsv").write_text("ba\tBA\n")
    with pytest.raises(InputError, match="there are 1 pairs"):
        Heard().of(
            AlignmentJob([str(tmp_path / "short.tsv")], AlignmentViewFilter(), gold_alignments=str(tmp_path / "gold")),
            both,
        )


def test_gold_links_that_lead_out_of_a_sentence_are_told_before_anything_is_written(
    both: WordAligner, tmp_path: Path
) -> None:
    name = write(tmp_path / "p.tsv", pairs(3, seed=2))
    (tmp_path / "gold").write_text("0-0\n0-99\n0-0\n")
    heard = Heard()
    with pytest.raises(InputError, match=r"pair 2 has a link from word 0 to word 99.*--gold-target-first"):
        heard.of(AlignmentJob([name], AlignmentViewFilter(), gold_alignments=str(tmp_path / "gold")), both)
    assert not heard.lines
    with pytest.raises(InputError, match=r"^head 99 came; this model"):
        heard.of(AlignmentJob([name], AlignmentViewFilter(head=99)), both)


def test_symmetry_needs_two_directions_and_a_name_that_is_known(both: WordAligner, word_runs: dict[str, Run]) -> None:
    alone = WordAligner(planted(word_runs["forth"], AlignmentView(0, 0)))
    with pytest.raises(InputError, match="--reverse"):
        Heard().of(AlignmentJob(["-"], AlignmentViewFilter(), symmetrization="union"), alone)
    with pytest.raises(InputError, match=r"'grow'.* product, grow-diag, "):
        Heard().of(AlignmentJob(["-"], AlignmentViewFilter(), symmetrization="grow"), both)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("auto", "auto", None), AlignmentViewFilter()),
        (("3", "mean", True), AlignmentViewFilter(3, "mean", True)),
        (("0", "7", False), AlignmentViewFilter(0, 7, False)),
    ],
)
def test_what_the_command_line_asks_for(words: tuple[str, str, bool | None], asked: AlignmentViewFilter) -> None:
    assert corpus_alignment.parse_view_filter(*words) == asked


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            lambda: corpus_alignment.parse_view_filter("last", "auto", None),
            "--alignment-layer last: it is auto, or a number",
        ),
        (lambda: corpus_alignment.parse_view_filter("-1", "auto", None), "--alignment-layer -1"),
        (
            lambda: corpus_alignment.parse_view_filter("auto", "all", None),
            "--alignment-head all: it is auto or mean, or a number",
        ),
        (lambda: corpus_alignment.parse_on_error("go"), "--on-error go: it is stop or skip"),
    ],
)
def test_what_it_cannot_ask_for(wrong: Callable[[], object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        wrong()
