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

from jumok.data.builtin import english_korean
from jumok.data.readers import parallel_corpus, word_alignments
from jumok.data.readers.parallel_corpus import (
    CorpusPart,
    InvalidExample,
    ParallelCorpus,
    SkippedExamples,
    TranslationExample,
)
from jumok.data.readers.word_alignments import GoldAlignment
from jumok.data.tokenizers import moses, spelling
from jumok.errors import InputError
from jumok.files import atomic_write
from jumok.tasks.common import resolve_held_out_fraction

__all__ = ["BUILTIN_CORPUS", "TranslationData", "TranslationDataConfig", "TranslationSplit"]

BUILTIN_CORPUS = "english-korean"
GRAMMAR_VERSION = 1  # another number for other sentences: tokenised ones are then made anew
HELD_OUT_SPLITS = ("valid", "test")
MAX_HELD_OUT_FRACTION = 0.1  # of the training data, for each of validation and test
HASH_RANGE = 1 << 64
DataSource = str | list[str]


@dataclass(frozen=True)
class TranslationDataConfig:
    """The ``data:`` section. How text is named is told in :mod:`jumok.data.parallel_corpus`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    train: DataSource = BUILTIN_CORPUS
    valid: DataSource | None = None  # None: held out of train
    test: DataSource | None = None
    gold_alignments: str | None = None  # pairs with hand-made word links, for the alignment error rate
    gold_target_first: bool = False  # the links are written target first
    source: str | int = 1  # a file's ending, or a column by name or number
    target: str | int = 2
    # What papers on Multi30k do to the text; what makes raw text like that of hand-made word links.
    preprocessing: Literal["none", "moses-lower", "spelled-out"] = "none"
    on_error: Literal["stop", "skip"] = "stop"
    max_tokens: int = 256  # tokens; pairs with a longer side are left out of training, and counted
    held_out_size: int = 1000  # pairs for validation, and as many for test, where none are named
    builtin_size: int = 100_000  # of the built-in data, for training
    max_concatenated_pairs: int = (
        1  # pairs come also as one with their neighbours, up to so many: sentences become longer
    )
    packing: Literal["auto"] | bool = "auto"  # sentences end to end; auto: where the model and a GPU can

    def __post_init__(self) -> None:
        for name in ("max_tokens", "held_out_size", "builtin_size", "max_concatenated_pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        if self.preprocessing != "none" and not (
            isinstance(self.source, str) and isinstance(self.target, str)
        ):
            raise ValueError(
                f"preprocessing={self.preprocessing!r} needs the languages: source and target name them, as in source: en"
            )


@dataclass(frozen=True)
class TranslationSplit:
    """Pairs to validate or test with. ``gold_alignments`` are the gold ones of each, where there are any."""

    name: str
    examples: list[TranslationExample]
    gold_alignments: list[GoldAlignment] | None = None
    skipped: SkippedExamples = field(default_factory=SkippedExamples)  # what could not be used


@dataclass(frozen=True)
class TranslationData:
    """The text of a run. ``folder`` is the run's, where what was held out is kept."""

    config: TranslationDataConfig
    folder: Path

    def train_corpus(self) -> ParallelCorpus:
        """The training data, without what is held out; texts as the tokenizer gets them."""
        config = self.config
        if config.train == BUILTIN_CORPUS:
            return _join_pairs(self._open_builtin_corpus(), config.max_concatenated_pairs)
        whole = self._open_corpus(config.train, "train")
        if config.valid is None or config.test is None:
            share = self._resolve_held_out_fraction(whole)
            if not all(path.is_file() for path in self._held_out_paths.values()):
                self._write_held_out(whole, share)
            kept = [name not in self._held_out_paths for name in HELD_OUT_SPLITS]
            whole = _filter_corpus(
                whole,
                f"without {share} for {list(self._held_out_paths)}",
                lambda pair: _is_training_pair(pair, share, kept),
            )
        return _join_pairs(self._preprocess_corpus(whole), config.max_concatenated_pairs)

    def valid_split(self) -> TranslationSplit:
        """What training is watched with."""
        return self._load_split("valid", self.config.valid)

    def test_split(self) -> TranslationSplit:
        """What results are given on."""
        return self._load_split("test", self.config.test)

    def gold_split(self) -> TranslationSplit | None:
        """Pairs with word links, if the recipe names some."""
        config = self.config
        if config.gold_alignments is None:
            return None
        # Links are counted by line: none may be left out.
        examples = list(replace(self._open_corpus(config.gold_alignments, "gold"), on_error="stop"))
        found = word_alignments.read_alignments(
            word_alignments.find_alignment_file(config.gold_alignments), num_pairs=len(examples)
        )
        return TranslationSplit(
            "gold", examples, [one.swap_sides() if config.gold_target_first else one for one in found]
        )

    def preprocess(self, text: str, side: Literal["source", "target"]) -> str:
        """A text of a user's as the tokenizer gets it."""
        language = str(getattr(self.config, side))
        if self.config.preprocessing == "moses-lower":
            return moses.tokenize(text, language)
        return (
            spelling.normalize_spelling(text, language)
            if self.config.preprocessing == "spelled-out"
            else text
        )

    def postprocess(self, text: str) -> str:
        """A translation as a reader wants it: what ``preprocess`` did to a text, undone as far as it can be."""
        is_moses = self.config.preprocessing == "moses-lower"
        return moses.detokenize(text, str(self.config.target)) if is_moses else text

    # ------------------------------------------------------------------------------------------------

    @property
    def _held_out_paths(self) -> dict[str, Path]:
        """The splits that are held out of the training data, and where they are kept."""
        names = [name for name in HELD_OUT_SPLITS if getattr(self.config, name) is None]
        return {name: self.folder / "data" / f"{name}.jsonl" for name in names}

    def _open_corpus(self, data_source: DataSource, split: str) -> ParallelCorpus:
        config = self.config
        return parallel_corpus.find_corpus(
            data_source, source=config.source, target=config.target, split=split, on_error=config.on_error
        )

    def _preprocess_corpus(self, corpus: ParallelCorpus) -> ParallelCorpus:
        if self.config.preprocessing == "none":
            return corpus
        return corpus.map_texts(
            self.config.preprocessing,
            lambda text: self.preprocess(text, "source"),
            lambda text: self.preprocess(text, "target"),
        )

    def _load_split(self, name: Literal["valid", "test"], data_source: DataSource | None) -> TranslationSplit:
        if data_source is not None:
            return self._read_split(name, self._open_corpus(data_source, name))
        if self.config.train == BUILTIN_CORPUS:
            pairs = list(getattr(self._builtin_splits, name))
            examples = [
                TranslationExample(pair.english, pair.korean, f"{BUILTIN_CORPUS}:{n}")
                for n, pair in enumerate(pairs, 1)
            ]
            return TranslationSplit(
                name,
                examples,
                [GoldAlignment(frozenset(pair.links), frozenset(pair.possible)) for pair in pairs],
            )
        kept = self._held_out_paths[name]
        if not kept.is_file():
            raise InputError(
                f"{kept} is missing: the data that training held out; train again, or name data.{name}"
            )
        return self._read_split(
            name, parallel_corpus.find_corpus(str(kept), source="source", target="target")
        )

    def _read_split(self, name: str, corpus: ParallelCorpus) -> TranslationSplit:
        if (
            self.config.preprocessing == "spelled-out"
        ):  # nothing undoes it: references are like the translations
            corpus = self._preprocess_corpus(corpus)
        skipped = SkippedExamples()
        return TranslationSplit(name, list(corpus.read(skipped)), skipped=skipped)

    @property
    def _builtin_splits(self) -> english_korean.SentenceSplits:
        """The built-in data."""
        held = self.config.held_out_size
        return english_korean.make_splits(train=self.config.builtin_size, valid=held, test=held)

    def _open_builtin_corpus(self) -> ParallelCorpus:
        drawn = self._builtin_splits.train
        return ParallelCorpus.from_pairs(
            f"{drawn!r}, grammar {GRAMMAR_VERSION}", lambda: ((pair.english, pair.korean) for pair in drawn)
        )

    def _resolve_held_out_fraction(self, corpus: ParallelCorpus) -> float:
        """Which share of the data is held out for one split."""
        return resolve_held_out_fraction(
            self.folder,
            "pairs",
            lambda: sum(1 for _ in corpus),
            self.config.held_out_size,
            MAX_HELD_OUT_FRACTION,
        )

    def _write_held_out(self, corpus: ParallelCorpus, fraction: float) -> None:
        """Write what is held out to files of its own, where anybody can read it."""
        kept: dict[str, list[TranslationExample]] = {name: [] for name in HELD_OUT_SPLITS}
        for pair in corpus:
            place = int(_hash_fraction(pair) / fraction)
            if place < len(HELD_OUT_SPLITS):
                kept[HELD_OUT_SPLITS[place]].append(pair)
        for name, path in self._held_out_paths.items():
            pairs = kept[name]
            if not pairs:
                raise InputError(
                    f"of so little training data nothing can be held out; name data.{path.stem}, "
                    "or use some more pairs of sentences"
                )
            lines = (json.dumps({"source": p.source, "target": p.target}, ensure_ascii=False) for p in pairs)
            with atomic_write(path) as part:
                part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _filter_corpus(
    corpus: ParallelCorpus, name: str, is_kept: Callable[[TranslationExample], bool]
) -> ParallelCorpus:
    """The same without some examples; ``name`` says which."""

    def of(part: CorpusPart) -> CorpusPart:
        def read() -> Iterator[TranslationExample | InvalidExample]:
            return (one for one in part.read() if isinstance(one, InvalidExample) or is_kept(one))

        return replace(part, name=f"{part.name}, {name}", read=read)

    return replace(corpus, parts=tuple(map(of, corpus.parts)))


def _join_pairs(corpus: ParallelCorpus, max_pairs: int) -> ParallelCorpus:
    """The same, and behind every second pair the last two as one, behind every third the last three, …"""
    if max_pairs == 1:
        return corpus

    def of(part: CorpusPart) -> CorpusPart:
        def read() -> Iterator[TranslationExample | InvalidExample]:
            waiting: dict[int, list[TranslationExample]] = {size: [] for size in range(2, max_pairs + 1)}
            for one in part.read():
                yield one
                if isinstance(one, InvalidExample):
                    continue
                for size, some in waiting.items():
                    some.append(one)
                    if len(some) == size:
                        source, target = " ".join(x.source for x in some), " ".join(x.target for x in some)
                        yield TranslationExample(source, target, some[0].location)
                        some.clear()

        return replace(part, name=f"{part.name}, up to {max_pairs} joined", read=read)

    return replace(corpus, parts=tuple(map(of, corpus.parts)))


def _is_training_pair(pair: TranslationExample, fraction: float, is_split_kept: list[bool]) -> bool:
    """Whether a pair is trained on. Each split has its own part of the line from 0 to 1, used or not."""
    place = int(_hash_fraction(pair) / fraction)
    return place >= len(is_split_kept) or is_split_kept[place]


def _hash_fraction(pair: TranslationExample) -> float:
    """A number from 0 to 1 that the source sentence alone decides."""
    digest = hashlib.blake2b(pair.source.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / HASH_RANGE
