"""What ``jumok align`` does with files: pairs of sentences in, a line of links for each out, their score."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jumok.data import formats, links, sources
from jumok.data.files import lines
from jumok.data.sources import Example, Flaw
from jumok.errors import InputError
from jumok.metrics.alignment import alignment_score, write_links
from jumok.metrics.symmetry import SYMMETRIES, Symmetry
from jumok.run import Run
from jumok.tasks.aligning import AT_ONCE, SAMPLE, Aligned, Aligner, Asked, Chosen
from jumok.tasks.corpora import DataConfig
from jumok.tasks.translate import load

__all__ = ["Job", "aligner_of", "asked", "on_error", "pairs_in"]

TOLD = 20  # lines that could not be used are named one by one, up to so many
Line = Callable[[str], None]
OnError = Literal["stop", "skip"]


@dataclass(frozen=True)
class Job:
    """What is to be aligned, and how."""

    pairs: Sequence[str]  # a table, two files of text, a split of a data set; - is standard input
    asked: Asked
    symmetry: str | None = None  # how two directions are made one; None: together, if there are two
    gold: str | None = None
    gold_flipped: bool = False
    on_error: OnError = "stop"  # skip: an empty line for what cannot be aligned

    def run(self, aligner: Aligner, write: Line, tell: Line) -> None:
        """Write a line for each pair, in their order, and tell what was chosen and how good it is."""
        symmetry = self._symmetry(aligner)
        gold = None if self.gold is None else links.find(self.gold)
        right = None if gold is None else self._right(gold, aligner)
        coming = self._checked(pairs_in(self.pairs, aligner.forth.run.recipe.data), aligner)
        first = list(itertools.islice(coming, SAMPLE))
        if not first:
            raise InputError(f"there are no pairs of sentences in {' '.join(self.pairs)}")
        if gold is not None and len(first) < SAMPLE:  # then these are all
            right = self._right(gold, aligner, pairs=len(first))
        for number, one in enumerate(first):
            self._check_gold(number, one, gold, right)
        chosen = aligner.choose([one for one in first if isinstance(one, Example)], self.asked)
        tell(f"links by {chosen}")
        kept: list[Aligned] = []
        left_out = 0
        later = itertools.chain(first, self._checked_gold(coming, len(first), gold, right))
        for found in _in_place(later, aligner, chosen, symmetry):
            if isinstance(found, Flaw):
                left_out += 1
                if left_out <= TOLD:
                    tell(f"{found}: its line stays empty")
                found = Aligned(frozenset(), frozenset(), frozenset())
            write(write_links(found.links))
            if gold is not None:
                kept.append(found)
        if left_out > TOLD:
            tell(f"{left_out:,} pairs in all could not be aligned, and have empty lines")
        if gold is not None:
            self._score(gold, kept, aligner, tell)

    def _symmetry(self, aligner: Aligner) -> Symmetry:
        name = self.symmetry or "together"
        if name not in SYMMETRIES:
            raise InputError(f"symmetry {name!r} came; it is one of {', '.join(SYMMETRIES)}")
        if self.symmetry not in (None, "none") and aligner.back is None:
            raise InputError(f"--symmetry {name} makes one of two directions; name the other: --reverse RUN")
        return SYMMETRIES[name]

    def _checked(self, pairs: Iterable[Example | Flaw], aligner: Aligner) -> Iterator[Example | Flaw]:
        """The pairs, with a flaw for what cannot be aligned, if that is to be skipped."""
        for one in pairs:
            flaw = one if isinstance(one, Flaw) else aligner.unfit(one)
            if flaw is not None and self.on_error == "stop":
                raise InputError(f"{flaw}. Mend it, or have an empty line in its place: --on-error skip")
            yield flaw or one

    def _right(self, gold: Path, aligner: Aligner, pairs: int | None = None) -> list[links.Gold]:
        """The links by people, source first."""
        right, data = links.read(gold, pairs=pairs), aligner.forth.run.recipe.data
        turned = self.gold_flipped or (self.gold == data.gold and data.gold_flipped)
        return [one.flipped() for one in right] if turned else right

    def _checked_gold(
        self,
        pairs: Iterable[Example | Flaw],
        first: int,
        gold: Path | None,
        right: Sequence[links.Gold] | None,
    ) -> Iterator[Example | Flaw]:
        for number, one in enumerate(pairs, first):
            self._check_gold(number, one, gold, right)
            yield one

    def _check_gold(
        self, number: int, one: Example | Flaw, gold: Path | None, right: Sequence[links.Gold] | None
    ) -> None:
        """Links by people that lead out of their sentences are those of others, or the other way round."""
        if right is None or number >= len(right) or not isinstance(one, Example):
            return
        sizes = len(one.source.split()), len(one.target.split())
        for link in sorted(right[number].possible):
            if link[0] >= sizes[0] or link[1] >= sizes[1]:
                raise InputError(
                    f"{gold}: pair {number + 1} has a link from word {link[0]} to word {link[1]}, counted "
                    f"from 0, and its sentences have {sizes[0]} and {sizes[1]} words; if links are written "
                    "target first, say --gold-flipped; otherwise they are those of other pairs"
                )

    def _score(self, gold: Path, kept: Sequence[Aligned], aligner: Aligner, tell: Line) -> None:
        right = self._right(gold, aligner, pairs=len(kept))
        told = {"links": [one.links for one in kept]}
        if aligner.back is not None:
            told["forth alone"] = [one.forth for one in kept]
            told["back alone"] = [one.back or frozenset() for one in kept]
        for name, found in told.items():
            score = alignment_score(found, right)
            tell(
                f"{name}: alignment error rate {score.error_rate:.4f}, precision {score.precision:.3f}, "
                f"recall {score.recall:.3f}"
            )


def _in_place(
    pairs: Iterable[Example | Flaw], aligner: Aligner, chosen: Chosen, symmetry: Symmetry
) -> Iterator[Aligned | Flaw]:
    """The pairs aligned, and each flaw where it stood."""
    pairs = iter(pairs)
    while window := list(itertools.islice(pairs, AT_ONCE)):
        aligned = aligner.align((one for one in window if isinstance(one, Example)), chosen, symmetry)
        yield from (one if isinstance(one, Flaw) else next(aligned) for one in window)


def asked(layer: str, head: str, shift: bool | None) -> Asked:
    """From words of the command line."""
    heads: int | Literal["auto", "mean"]
    heads = "auto" if head == "auto" else "mean" if head == "mean" else _number("head", head, "auto or mean")
    return Asked(None if layer == "auto" else _number("layer", layer, "auto"), heads, shift)


def _number(name: str, text: str, words: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise InputError(f"--{name} {text}: it is {words}, or a number, counted from 0")
    return int(text)


def on_error(text: str) -> OnError:
    """From the command line, too."""
    if text not in ("stop", "skip"):
        raise InputError(f"--on-error {text}: it is stop or skip")
    return "skip" if text == "skip" else "stop"


def aligner_of(run: Path, reverse: Path | None, device: str) -> Aligner:
    """The models of runs."""
    opened = [Run.open(one) for one in (run, reverse) if one is not None]
    for one in opened:
        if one.recipe.task != "translate":
            raise InputError(f"{one.folder} is a run of the task {one.recipe.task}; translate has word links")
    return Aligner(*(load(one, device) for one in opened))


def pairs_in(names: Sequence[str], data: DataConfig) -> Iterator[Example | Flaw]:
    """Pairs of sentences from files, as a recipe names them, or lines of ``source ||| target``."""
    if len(names) > 2 or (len(names) == 2 and "-" in names):
        raise InputError(
            f"{' '.join(names)} came; name one file with both sides, or one for each, or - for standard input"
        )
    path = Path(names[0])
    if names[0] == "-":
        typed = (raw.decode("utf-8", "surrogateescape").rstrip("\r\n") for raw in sys.stdin.buffer)
        return _lines(typed, "standard input")
    if len(names) == 1 and path.exists() and not path.is_dir() and formats.ending(path) not in formats.TABLES:
        return _lines(lines(path), names[0])
    where = names[0] if len(names) == 1 else list(names)
    corpus = sources.find(where, source=data.source, target=data.target)
    return itertools.chain.from_iterable(part.read() for part in corpus.parts)


def _lines(lines: Iterable[str | None], name: str) -> Iterator[Example | Flaw]:
    for number, line in enumerate(lines, 1):
        if line is None:
            yield formats.too_long(name, number)
            continue
        cells = line.split("\t" if "\t" in line else "|||")
        if len(cells) == 2:
            yield formats.example(cells[0], cells[1], f"{name}:{number}")
        elif not line.strip():
            yield Flaw(f"{name}:{number}", formats.BLANK)
        else:
            told = f"{len(cells)} columns; it is two texts with a tab or ||| between them"
            yield Flaw(f"{name}:{number}", "no pair", told)
