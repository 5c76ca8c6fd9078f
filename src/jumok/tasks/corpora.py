"""Which text a translation recipe means: what to train on, what to validate with, what to test on.

A recipe may name all three. Where it names no validation or test data, so much is held out of the training
data, chosen by the source sentence alone: a sentence that comes twice is never on both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from jumok.data import english_korean, links, moses, sources, spelled
from jumok.data.links import Gold
from jumok.data.sources import Corpus, Example, Flaw, Part, Skipped
from jumok.errors import InputError
from jumok.files import written
from jumok.tasks.common import held_out_share

__all__ = ["BUILT_IN", "DataConfig", "Split", "Texts"]

BUILT_IN = "english-korean"
GRAMMAR = 1  # another number for other sentences: tokenised ones are then made anew
HELD_OUT = ("valid", "test")
MOST_HELD_OUT = 0.1  # of the training data, for each of validation and test
SCALE = 1 << 64
Named = str | list[str]


@dataclass(frozen=True)
class DataConfig:
    """The ``data:`` section. How text is named is told in :mod:`jumok.data.sources`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    train: Named = BUILT_IN
    valid: Named | None = None  # None: held out of train
    test: Named | None = None
    gold: str | None = None  # pairs with hand-made word links, for the alignment error rate
    gold_flipped: bool = False  # the links are written target first
    source: str | int = 1  # a file's ending, or a column by name or number
    target: str | int = 2
    # What papers on Multi30k do to the text; what makes raw text like that of hand-made word links.
    prepare: Literal["none", "moses-lower", "spelled-out"] = "none"
    on_error: Literal["stop", "skip"] = "stop"
    longest: int = 256  # tokens; pairs with a longer side are left out of training, and counted
    held_out: int = 1000  # pairs for validation, and as many for test, where none are named
    pairs: int = 100_000  # of the built-in data, for training
    joined: int = 1  # pairs come also as one with their neighbours, up to so many: sentences become longer
    packed: Literal["auto"] | bool = "auto"  # sentences end to end; auto: where the model and a GPU can

    def __post_init__(self) -> None:
        for name in ("longest", "held_out", "pairs", "joined"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        if self.prepare != "none" and not (isinstance(self.source, str) and isinstance(self.target, str)):
            raise ValueError(
                f"prepare={self.prepare!r} needs the languages: source and target name them, as in source: en"
            )


@dataclass(frozen=True)
class Split:
    """Pairs to validate or test with. ``links`` are the gold ones of each, where there are any."""

    name: str
    examples: list[Example]
    links: list[Gold] | None = None
    skipped: Skipped = field(default_factory=Skipped)  # what could not be used


@dataclass(frozen=True)
class Texts:
    """The text of a run. ``folder`` is the run's, where what was held out is kept."""

    config: DataConfig
    folder: Path

    def train(self) -> Corpus:
        """The training data, without what is held out; texts as the tokenizer gets them."""
        config = self.config
        if config.train == BUILT_IN:
            return _joined(self._built_in_train(), config.joined)
        whole = self._corpus(config.train, "train")
        if config.valid is None or config.test is None:
            share = self._share(whole)
            if not all(path.is_file() for path in self._held_out.values()):
                self._hold_out(whole, share)
            kept = [name not in self._held_out for name in HELD_OUT]
            whole = _filtered(
                whole, f"without {share} for {list(self._held_out)}", lambda pair: _is_kept(pair, share, kept)
            )
        return _joined(self._prepared(whole), config.joined)

    def valid(self) -> Split:
        """What training is watched with."""
        return self._split("valid", self.config.valid)

    def test(self) -> Split:
        """What results are given on."""
        return self._split("test", self.config.test)

    def gold(self) -> Split | None:
        """Pairs with word links, if the recipe names some."""
        config = self.config
        if config.gold is None:
            return None
        # Links are counted by line: none may be left out.
        examples = list(replace(self._corpus(config.gold, "gold"), on_error="stop"))
        found = links.read(links.find(config.gold), pairs=len(examples))
        return Split("gold", examples, [one.flipped() if config.gold_flipped else one for one in found])

    def prepared(self, text: str, side: Literal["source", "target"]) -> str:
        """A text of a user's as the tokenizer gets it."""
        language = str(getattr(self.config, side))
        if self.config.prepare == "moses-lower":
            return moses.prepare(text, language)
        return spelled.prepare(text, language) if self.config.prepare == "spelled-out" else text

    def shown(self, text: str) -> str:
        """A translation as a reader wants it: what ``prepared`` did to a text, undone as far as it can be."""
        is_moses = self.config.prepare == "moses-lower"
        return moses.detokenise(text, str(self.config.target)) if is_moses else text

    # ------------------------------------------------------------------------------------------------

    @property
    def _held_out(self) -> dict[str, Path]:
        """The splits that are held out of the training data, and where they are kept."""
        names = [name for name in HELD_OUT if getattr(self.config, name) is None]
        return {name: self.folder / "data" / f"{name}.jsonl" for name in names}

    def _corpus(self, named: Named, split: str) -> Corpus:
        config = self.config
        return sources.find(
            named, source=config.source, target=config.target, split=split, on_error=config.on_error
        )

    def _prepared(self, corpus: Corpus) -> Corpus:
        if self.config.prepare == "none":
            return corpus
        return corpus.prepared(
            self.config.prepare,
            lambda text: self.prepared(text, "source"),
            lambda text: self.prepared(text, "target"),
        )

    def _split(self, name: Literal["valid", "test"], named: Named | None) -> Split:
        if named is not None:
            return self._read(name, self._corpus(named, name))
        if self.config.train == BUILT_IN:
            pairs = list(getattr(self._sentences, name))
            examples = [
                Example(pair.english, pair.korean, f"{BUILT_IN}:{n}") for n, pair in enumerate(pairs, 1)
            ]
            return Split(
                name, examples, [Gold(frozenset(pair.links), frozenset(pair.possible)) for pair in pairs]
            )
        kept = self._held_out[name]
        if not kept.is_file():
            raise InputError(
                f"{kept} is missing: the data that training held out; train again, or name data.{name}"
            )
        return self._read(name, sources.find(str(kept), source="source", target="target"))

    def _read(self, name: str, corpus: Corpus) -> Split:
        if self.config.prepare == "spelled-out":  # nothing undoes it: references are like the translations
            corpus = self._prepared(corpus)
        skipped = Skipped()
        return Split(name, list(corpus.read(skipped)), skipped=skipped)

    @property
    def _sentences(self) -> english_korean.Splits:
        """The built-in data."""
        held = self.config.held_out
        return english_korean.splits(train=self.config.pairs, valid=held, test=held)

    def _built_in_train(self) -> Corpus:
        drawn = self._sentences.train
        return Corpus.made(
            f"{drawn!r}, grammar {GRAMMAR}", lambda: ((pair.english, pair.korean) for pair in drawn)
        )

    def _share(self, whole: Corpus) -> float:
        """Which share of the data is held out for one split."""
        return held_out_share(
            self.folder, "pairs", lambda: sum(1 for _ in whole), self.config.held_out, MOST_HELD_OUT
        )

    def _hold_out(self, whole: Corpus, share: float) -> None:
        """Write what is held out to files of its own, where anybody can read it."""
        kept: dict[str, list[Example]] = {name: [] for name in HELD_OUT}
        for pair in whole:
            place = int(_draw(pair) / share)
            if place < len(HELD_OUT):
                kept[HELD_OUT[place]].append(pair)
        for name, path in self._held_out.items():
            pairs = kept[name]
            if not pairs:
                raise InputError(
                    f"of so little training data nothing can be held out; name data.{path.stem}, "
                    "or use some more pairs of sentences"
                )
            lines = (json.dumps({"source": p.source, "target": p.target}, ensure_ascii=False) for p in pairs)
            with written(path) as part:
                part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _filtered(corpus: Corpus, name: str, keep: Callable[[Example], bool]) -> Corpus:
    """The same without some examples; ``name`` says which."""

    def of(part: Part) -> Part:
        def read() -> Iterator[Example | Flaw]:
            return (one for one in part.read() if isinstance(one, Flaw) or keep(one))

        return replace(part, name=f"{part.name}, {name}", read=read)

    return replace(corpus, parts=tuple(map(of, corpus.parts)))


def _joined(corpus: Corpus, most: int) -> Corpus:
    """The same, and behind every second pair the last two as one, behind every third the last three, …"""
    if most == 1:
        return corpus

    def of(part: Part) -> Part:
        def read() -> Iterator[Example | Flaw]:
            waiting: dict[int, list[Example]] = {size: [] for size in range(2, most + 1)}
            for one in part.read():
                yield one
                if isinstance(one, Flaw):
                    continue
                for size, some in waiting.items():
                    some.append(one)
                    if len(some) == size:
                        source, target = " ".join(x.source for x in some), " ".join(x.target for x in some)
                        yield Example(source, target, some[0].where)
                        some.clear()

        return replace(part, name=f"{part.name}, up to {most} joined", read=read)

    return replace(corpus, parts=tuple(map(of, corpus.parts)))


def _is_kept(pair: Example, share: float, kept: list[bool]) -> bool:
    """Whether a pair is trained on. Each split has its own part of the line from 0 to 1, used or not."""
    place = int(_draw(pair) / share)
    return place >= len(kept) or kept[place]


def _draw(pair: Example) -> float:
    """A number from 0 to 1 that the source sentence alone decides."""
    digest = hashlib.blake2b(pair.source.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / SCALE
