"""Word alignment of files, for ``jumok align``: reads sentence pairs, and writes a line of links for each."""

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
from jumok.data.readers.word_alignments import GoldAlignment
from jumok.errors import InputError
from jumok.inference.line_io import iterate_chunks
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

MAX_ERRORS_SHOWN = 20  # further invalid pairs are only counted
EMPTY_ALIGNMENT = WordAlignment(frozenset(), frozenset(), frozenset())
LineWriter = Callable[[str], None]
OnError = Literal["stop", "skip"]
PairOrError = TranslationExample | InvalidExample


@dataclass(frozen=True)
class AlignmentJob:
    """The inputs and options of ``jumok align``."""

    inputs: Sequence[str]  # a table, two text files, or a split of a data set; - is standard input
    view_filter: AlignmentViewFilter
    symmetrization: str | None = None  # how two directions are combined; None: product
    gold_alignments: str | None = None  # file of manual alignments to score against
    gold_target_first: bool = False
    on_error: OnError = "stop"  # skip: write an empty line for a pair that cannot be aligned

    def run(self, aligner: WordAligner, write: LineWriter, log: LineWriter) -> None:
        """Write a line of links for each pair, in their order. Log the selected views and the scores."""
        symmetrize = self._get_symmetrization(aligner)
        gold = self._read_gold_alignments(aligner)
        pairs = self._check_pairs(read_pairs(self.inputs, aligner.forward.run.recipe.data), aligner)
        first = list(itertools.islice(pairs, MAX_SELECTION_PAIRS))
        if not first:
            raise InputError(f"there are no pairs of sentences in {' '.join(self.inputs)}")
        if len(first) < MAX_SELECTION_PAIRS:  # these are all pairs
            gold = self._read_gold_alignments(aligner, num_pairs=len(first))
        first = list(self._check_gold_links(first, gold))
        views = aligner.select_views([pair for pair in first if isinstance(pair, TranslationExample)], self.view_filter)
        log(f"alignment view {views}")
        alignments: list[WordAlignment] = []
        num_invalid = 0
        pairs = itertools.chain(first, self._check_gold_links(pairs, gold, len(first)))
        for alignment in _align_in_order(pairs, aligner, views, symmetrize):
            if isinstance(alignment, InvalidExample):
                num_invalid += 1
                if num_invalid <= MAX_ERRORS_SHOWN:
                    log(f"{alignment}: an empty line is written")
                alignment = EMPTY_ALIGNMENT
            write(format_links(alignment.links))
            if gold is not None:
                alignments.append(alignment)
        if num_invalid > MAX_ERRORS_SHOWN:
            log(f"{num_invalid:,} pairs could not be aligned; an empty line is written for each")
        if gold is not None:
            self._log_scores(alignments, aligner, log)

    def _get_symmetrization(self, aligner: WordAligner) -> Symmetrization:
        name = self.symmetrization or "product"
        if name not in SYMMETRIZATIONS:
            raise InputError(f"symmetrization {name!r} is unknown; expected one of {', '.join(SYMMETRIZATIONS)}")
        if self.symmetrization not in (None, "none") and aligner.backward is None:
            raise InputError(
                f"--symmetrization {name} combines two directions; give the run of the other one: --reverse-run RUN"
            )
        return SYMMETRIZATIONS[name]

    def _check_pairs(self, pairs: Iterable[PairOrError], aligner: WordAligner) -> Iterator[PairOrError]:
        """Replace pairs that cannot be aligned by an ``InvalidExample``, or raise."""
        for pair in pairs:
            error = pair if isinstance(pair, InvalidExample) else aligner.find_length_problem(pair)
            if error is not None and self.on_error == "stop":
                raise InputError(f"{error}. Correct it, or let an empty line be written for it: --on-error skip")
            yield error or pair

    def _read_gold_alignments(self, aligner: WordAligner, num_pairs: int | None = None) -> list[GoldAlignment] | None:
        """The manual alignments, source first; None: there are none."""
        if self.gold_alignments is None:
            return None
        path = word_alignments.find_alignment_file(self.gold_alignments)
        alignments, data = word_alignments.read_alignments(path, num_pairs=num_pairs), aligner.forward.run.recipe.data
        is_of_recipe = self.gold_alignments == data.gold_alignments
        target_first = self.gold_target_first or (is_of_recipe and data.gold_target_first)
        return [alignment.swap_sides() for alignment in alignments] if target_first else alignments

    def _check_gold_links(
        self, pairs: Iterable[PairOrError], gold: Sequence[GoldAlignment] | None, first_index: int = 0
    ) -> Iterator[PairOrError]:
        """Raise for a manual link to a word that does not exist: the alignments may belong to other pairs."""
        for index, pair in enumerate(pairs, first_index):
            if gold is not None and index < len(gold) and isinstance(pair, TranslationExample):
                sizes = len(pair.source.split()), len(pair.target.split())
                for source, target in sorted(gold[index].possible):
                    if source >= sizes[0] or target >= sizes[1]:
                        raise InputError(
                            f"{self.gold_alignments}: pair {index + 1} has a link from word {source} to word {target}, "
                            f"counted from 0, and its sentences have {sizes[0]} and {sizes[1]} words; if links are "
                            "written target first, give --gold-target-first; otherwise they belong to other pairs"
                        )
            yield pair

    def _log_scores(self, alignments: Sequence[WordAlignment], aligner: WordAligner, log: LineWriter) -> None:
        gold = self._read_gold_alignments(aligner, num_pairs=len(alignments)) or []
        links = {"links": [alignment.links for alignment in alignments]}
        if aligner.backward is not None:
            links["forward only"] = [alignment.forward_links for alignment in alignments]
            links["reverse only"] = [alignment.backward_links or frozenset() for alignment in alignments]
        for name, predicted in links.items():
            score = score_alignment(predicted, gold)
            log(
                f"{name}: alignment error rate {score.error_rate:.4f}, precision {score.precision:.3f}, "
                f"recall {score.recall:.3f}"
            )


def _align_in_order(
    pairs: Iterable[PairOrError], aligner: WordAligner, views: SelectedAlignmentViews, symmetrize: Symmetrization
) -> Iterator[WordAlignment | InvalidExample]:
    """Align the pairs, and pass each ``InvalidExample`` on in its place."""
    for chunk in iterate_chunks(pairs, PAIRS_PER_CHUNK):
        valid = (pair for pair in chunk if isinstance(pair, TranslationExample))
        alignments = aligner.align(valid, views, symmetrize)
        yield from (pair if isinstance(pair, InvalidExample) else next(alignments) for pair in chunk)


def parse_view_filter(layer: str, head: str, shift: bool | None) -> AlignmentViewFilter:
    """Parse the values of ``--alignment-layer`` and ``--alignment-head``."""
    heads: dict[str, Literal["auto", "mean"]] = {"auto": "auto", "mean": "mean"}
    return AlignmentViewFilter(
        None if layer == "auto" else _parse_index("alignment-layer", layer, "auto"),
        heads[head] if head in heads else _parse_index("alignment-head", head, "auto or mean"),
        shift,
    )


def _parse_index(name: str, text: str, alternatives: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise InputError(f"--{name} {text}: it is {alternatives}, or a number, counted from 0")
    return int(text)


def load_aligner(run: Path, reverse_run: Path | None, device: str) -> WordAligner:
    """Load the models of one or two runs."""
    runs = [Run.open(folder) for folder in (run, reverse_run) if folder is not None]
    for opened in runs:
        if opened.recipe.task != "translate":
            raise InputError(
                f"{opened.folder} is a run of the task {opened.recipe.task}; translate has word alignments"
            )
    return WordAligner(*(cast(TranslationPredictor, load_predictor(opened, device)) for opened in runs))


def read_pairs(inputs: Sequence[str], data_config: TranslationDataConfig) -> Iterator[PairOrError]:
    """Read sentence pairs from the files that a recipe could name, or from lines of ``source ||| target``."""
    if len(inputs) > 2 or (len(inputs) == 2 and "-" in inputs):
        raise InputError(
            f"{' '.join(inputs)} is invalid; name one file with both sides, or one for each, or - for standard input"
        )
    path = Path(inputs[0])
    if inputs[0] == "-":
        lines = (line.decode("utf-8", "surrogateescape").rstrip("\r\n") for line in sys.stdin.buffer)
        return _parse_lines(lines, "standard input")
    if len(inputs) == 1 and path.exists() and not path.is_dir() and file_suffix(path) not in TABLE_SUFFIXES:
        return _parse_lines(read_lines(path), inputs[0])
    data_source = inputs[0] if len(inputs) == 1 else list(inputs)
    corpus = parallel_corpus.find_corpus(data_source, source=data_config.source, target=data_config.target)
    return itertools.chain.from_iterable(part.read() for part in corpus.parts)


def _parse_lines(lines: Iterable[str | None], name: str) -> Iterator[PairOrError]:
    for number, line in enumerate(lines, 1):
        location = f"{name}:{number}"
        if line is None:
            yield line_too_long(name, number)
            continue
        cells = line.split("\t" if "\t" in line else "|||")
        if len(cells) == 2:
            yield make_example(cells[0], cells[1], location)
        elif not line.strip():
            yield InvalidExample(location, BLANK_LINE)
        else:
            message = f"{len(cells)} columns; expected two texts with a tab or ||| between them"
            yield InvalidExample(location, "no pair", message)
