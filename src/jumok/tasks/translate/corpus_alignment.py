"""What ``jumok align`` does with files: pairs of sentences in, a line of links for each out, their score."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from jumok.data.readers import parallel_corpus, word_alignments
from jumok.data.readers.invalid_examples import BLANK_LINE, InvalidExample, line_too_long
from jumok.data.readers.parallel_corpus import TranslationExample, make_example
from jumok.data.readers.tables import TABLE_SUFFIXES
from jumok.data.readers.text_files import file_suffix, read_lines
from jumok.errors import InputError
from jumok.metrics.symmetrization import SYMMETRIZATIONS, Symmetrization
from jumok.metrics.word_alignment import format_links, score_alignment
from jumok.run import Run
from jumok.tasks import load_predictor
from jumok.tasks.translate.config import TranslationDataConfig
from jumok.tasks.translate.predictor import TranslationPredictor
from jumok.tasks.translate.word_alignment import (
    MAX_SELECTION_PAIRS,
    PAIRS_PER_CHUNK,
    AlignmentViewFilter,
    SelectedAlignmentViews,
    WordAligner,
    WordAlignment,
)

MAX_ERRORS_SHOWN = 20  # lines that could not be used are named one by one, up to so many
LineWriter = Callable[[str], None]
OnError = Literal["stop", "skip"]


@dataclass(frozen=True)
class AlignmentJob:
    """What is to be aligned, and how."""

    inputs: Sequence[str]  # a table, two files of text, a split of a data set; - is standard input
    view_filter: AlignmentViewFilter
    symmetrization: str | None = None  # how two directions are made one; None: together, if there are two
    gold_alignments: str | None = None
    gold_target_first: bool = False
    on_error: OnError = "stop"  # skip: an empty line for what cannot be aligned

    def run(self, aligner: WordAligner, write: LineWriter, log: LineWriter) -> None:
        """Write a line for each pair, in their order, and tell what was chosen and how good it is."""
        symmetry = self._get_symmetrization(aligner)
        gold = None if self.gold_alignments is None else word_alignments.find_alignment_file(self.gold_alignments)
        right = None if gold is None else self._read_gold_alignments(gold, aligner)
        coming = self._check_pairs(read_pairs(self.inputs, aligner.forward.run.recipe.data), aligner)
        first = list(itertools.islice(coming, MAX_SELECTION_PAIRS))
        if not first:
            raise InputError(f"there are no pairs of sentences in {' '.join(self.inputs)}")
        if gold is not None and len(first) < MAX_SELECTION_PAIRS:  # then these are all
            right = self._read_gold_alignments(gold, aligner, num_pairs=len(first))
        for number, one in enumerate(first):
            self._check_gold_pair(number, one, gold, right)
        chosen = aligner.select_views([one for one in first if isinstance(one, TranslationExample)], self.view_filter)
        log(f"links by {chosen}")
        kept: list[WordAlignment] = []
        left_out = 0
        later = itertools.chain(first, self._check_gold_pairs(coming, len(first), gold, right))
        for found in _align_in_order(later, aligner, chosen, symmetry):
            if isinstance(found, InvalidExample):
                left_out += 1
                if left_out <= MAX_ERRORS_SHOWN:
                    log(f"{found}: its line stays empty")
                found = WordAlignment(frozenset(), frozenset(), frozenset())
            write(format_links(found.links))
            if gold is not None:
                kept.append(found)
        if left_out > MAX_ERRORS_SHOWN:
            log(f"{left_out:,} pairs in all could not be aligned, and have empty lines")
        if gold is not None:
            self._report_score(gold, kept, aligner, log)

    def _get_symmetrization(self, aligner: WordAligner) -> Symmetrization:
        name = self.symmetrization or "product"
        if name not in SYMMETRIZATIONS:
            raise InputError(f"symmetrization {name!r} came; it is one of {', '.join(SYMMETRIZATIONS)}")
        if self.symmetrization not in (None, "none") and aligner.backward is None:
            raise InputError(f"--symmetrization {name} makes one of two directions; name the other: --reverse-run RUN")
        return SYMMETRIZATIONS[name]

    def _check_pairs(
        self, pairs: Iterable[TranslationExample | InvalidExample], aligner: WordAligner
    ) -> Iterator[TranslationExample | InvalidExample]:
        """The pairs, with a flaw for what cannot be aligned, if that is to be skipped."""
        for one in pairs:
            flaw = one if isinstance(one, InvalidExample) else aligner.find_length_problem(one)
            if flaw is not None and self.on_error == "stop":
                raise InputError(f"{flaw}. Mend it, or have an empty line in its place: --on-error skip")
            yield flaw or one

    def _read_gold_alignments(
        self, path: Path, aligner: WordAligner, num_pairs: int | None = None
    ) -> list[word_alignments.GoldAlignment]:
        """The links by people, source first."""
        right, data = (
            word_alignments.read_alignments(path, num_pairs=num_pairs),
            aligner.forward.run.recipe.data,
        )
        turned = self.gold_target_first or (self.gold_alignments == data.gold_alignments and data.gold_target_first)
        return [one.swap_sides() for one in right] if turned else right

    def _check_gold_pairs(
        self,
        pairs: Iterable[TranslationExample | InvalidExample],
        first_index: int,
        path: Path | None,
        gold_alignments: Sequence[word_alignments.GoldAlignment] | None,
    ) -> Iterator[TranslationExample | InvalidExample]:
        for number, one in enumerate(pairs, first_index):
            self._check_gold_pair(number, one, path, gold_alignments)
            yield one

    def _check_gold_pair(
        self,
        index: int,
        pair: TranslationExample | InvalidExample,
        path: Path | None,
        gold_alignments: Sequence[word_alignments.GoldAlignment] | None,
    ) -> None:
        """Links by people that lead out of their sentences are those of others, or the other way round."""
        if gold_alignments is None or index >= len(gold_alignments) or not isinstance(pair, TranslationExample):
            return
        sizes = len(pair.source.split()), len(pair.target.split())
        for link in sorted(gold_alignments[index].possible):
            if link[0] >= sizes[0] or link[1] >= sizes[1]:
                raise InputError(
                    f"{path}: pair {index + 1} has a link from word {link[0]} to word {link[1]}, counted "
                    f"from 0, and its sentences have {sizes[0]} and {sizes[1]} words; if links are written "
                    "target first, give --gold-target-first; otherwise they are those of other pairs"
                )

    def _report_score(
        self, path: Path, alignments: Sequence[WordAlignment], aligner: WordAligner, log: LineWriter
    ) -> None:
        right = self._read_gold_alignments(path, aligner, num_pairs=len(alignments))
        told = {"links": [one.links for one in alignments]}
        if aligner.backward is not None:
            told["forth alone"] = [one.forward_links for one in alignments]
            told["back alone"] = [one.backward_links or frozenset() for one in alignments]
        for name, found in told.items():
            score = score_alignment(found, right)
            log(
                f"{name}: alignment error rate {score.error_rate:.4f}, precision {score.precision:.3f}, "
                f"recall {score.recall:.3f}"
            )


def _align_in_order(
    pairs: Iterable[TranslationExample | InvalidExample],
    aligner: WordAligner,
    views: SelectedAlignmentViews,
    symmetrize: Symmetrization,
) -> Iterator[WordAlignment | InvalidExample]:
    """The pairs aligned, and each flaw where it stood."""
    pairs = iter(pairs)
    while window := list(itertools.islice(pairs, PAIRS_PER_CHUNK)):
        aligned = aligner.align((one for one in window if isinstance(one, TranslationExample)), views, symmetrize)
        yield from (one if isinstance(one, InvalidExample) else next(aligned) for one in window)


def parse_view_filter(layer: str, head: str, shift: bool | None) -> AlignmentViewFilter:
    """From words of the command line."""
    heads: int | Literal["auto", "mean"]
    heads = (
        "auto" if head == "auto" else "mean" if head == "mean" else _parse_index("alignment-head", head, "auto or mean")
    )
    return AlignmentViewFilter(
        None if layer == "auto" else _parse_index("alignment-layer", layer, "auto"), heads, shift
    )


def _parse_index(name: str, text: str, alternatives: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise InputError(f"--{name} {text}: it is {alternatives}, or a number, counted from 0")
    return int(text)


def parse_on_error(text: str) -> OnError:
    """From the command line, too."""
    if text not in ("stop", "skip"):
        raise InputError(f"--on-error {text}: it is stop or skip")
    return "skip" if text == "skip" else "stop"


def load_aligner(run: Path, reverse_run: Path | None, device: str) -> WordAligner:
    """The models of runs."""
    opened = [Run.open(one) for one in (run, reverse_run) if one is not None]
    for one in opened:
        if one.recipe.task != "translate":
            raise InputError(f"{one.folder} is a run of the task {one.recipe.task}; translate has word links")
    predictors = [load_predictor(one, device) for one in opened]
    assert all(isinstance(predictor, TranslationPredictor) for predictor in predictors)
    return WordAligner(*cast(list[TranslationPredictor], predictors))


def read_pairs(
    inputs: Sequence[str], data_config: TranslationDataConfig
) -> Iterator[TranslationExample | InvalidExample]:
    """Pairs of sentences from files, as a recipe names them, or lines of ``source ||| target``."""
    if len(inputs) > 2 or (len(inputs) == 2 and "-" in inputs):
        raise InputError(
            f"{' '.join(inputs)} came; name one file with both sides, or one for each, or - for standard input"
        )
    path = Path(inputs[0])
    if inputs[0] == "-":
        typed = (raw.decode("utf-8", "surrogateescape").rstrip("\r\n") for raw in sys.stdin.buffer)
        return _parse_lines(typed, "standard input")
    if len(inputs) == 1 and path.exists() and not path.is_dir() and file_suffix(path) not in TABLE_SUFFIXES:
        return _parse_lines(read_lines(path), inputs[0])
    where = inputs[0] if len(inputs) == 1 else list(inputs)
    corpus = parallel_corpus.find_corpus(where, source=data_config.source, target=data_config.target)
    return itertools.chain.from_iterable(part.read() for part in corpus.parts)


def _parse_lines(lines: Iterable[str | None], name: str) -> Iterator[TranslationExample | InvalidExample]:
    for number, line in enumerate(lines, 1):
        if line is None:
            yield line_too_long(name, number)
            continue
        cells = line.split("\t" if "\t" in line else "|||")
        if len(cells) == 2:
            yield make_example(cells[0], cells[1], f"{name}:{number}")
        elif not line.strip():
            yield InvalidExample(f"{name}:{number}", BLANK_LINE)
        else:
            told = f"{len(cells)} columns; it is two texts with a tab or ||| between them"
            yield InvalidExample(f"{name}:{number}", "no pair", told)
