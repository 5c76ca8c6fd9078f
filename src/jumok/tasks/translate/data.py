"""Data of a translation run: training, validation and test pairs.

A recipe names data for all three. Where it names no validation or test data, pairs are held out of the training
data, chosen by their source sentence alone: a sentence that occurs twice is never on both sides.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jumok.data.builtin import english_korean
from jumok.data.readers import parallel_corpus, word_alignments
from jumok.data.readers.invalid_examples import InvalidExample, SkippedExamples
from jumok.data.readers.parallel_corpus import CorpusPart, ParallelCorpus, TranslationExample
from jumok.data.readers.word_alignments import GoldAlignment
from jumok.data.splits import HashedHoldOut
from jumok.data.tokenizers import moses, spelling
from jumok.errors import InputError
from jumok.files import write_text
from jumok.tasks.base import DatasetSplit
from jumok.tasks.config import DataSource
from jumok.tasks.translate.config import BUILTIN_CORPUS, TranslationDataConfig

BUILTIN_VERSION = 1  # of the built-in corpus; a new number means that tokenized data is rebuilt


@dataclass(frozen=True)
class TranslationSplit(DatasetSplit[TranslationExample]):
    """Pairs for validation or test, with gold word alignments if there are any."""

    gold_alignments: list[GoldAlignment] | None = None

    @property
    def description(self) -> str:
        return f"{self.num_examples:,} sentences"

    def comparison_key(self) -> Mapping[str, Any]:
        return {"sentences": [(pair.source, pair.target) for pair in self.examples]}


@dataclass(frozen=True)
class TranslationData:
    """The data of a run. ``folder`` is that of the run, where the held-out pairs are stored."""

    config: TranslationDataConfig
    folder: Path

    def train_corpus(self) -> ParallelCorpus:
        """The training pairs as the tokenizer gets them, without those that are held out."""
        config = self.config
        if config.train == BUILTIN_CORPUS:
            return _concatenate_pairs(self._open_builtin_corpus(), config.max_concatenated_pairs)
        corpus = self._open_corpus(config.train, "train")
        if config.valid is None or config.test is None:
            hold_out = self._hold_out
            fraction = hold_out.resolve_fraction(corpus)
            if not hold_out.is_written:
                self._write_held_out(corpus, fraction)
            corpus = _filter_corpus(
                corpus,
                f"without {fraction} for {list(hold_out.paths)}",
                lambda pair: hold_out.is_training_example(pair, fraction),
            )
        return _concatenate_pairs(self._preprocess_corpus(corpus), config.max_concatenated_pairs)

    def valid_split(self) -> TranslationSplit:
        """The validation pairs."""
        return self.load_split("valid")

    def test_split(self) -> TranslationSplit:
        """The test pairs."""
        return self.load_split("test")

    def gold_split(self) -> TranslationSplit | None:
        """Pairs with gold word alignments, if the recipe names some."""
        config = self.config
        if config.gold_alignments is None:
            return None
        # Alignments are matched by line number, so no pair may be skipped.
        examples = list(replace(self._open_corpus(config.gold_alignments, "gold"), on_error="stop"))
        alignments = word_alignments.read_alignments(
            word_alignments.find_alignment_file(config.gold_alignments), num_pairs=len(examples)
        )
        if config.gold_target_first:
            alignments = [alignment.swap_sides() for alignment in alignments]
        return TranslationSplit("gold", examples, gold_alignments=alignments)

    def preprocess(self, text: str, side: Literal["source", "target"]) -> str:
        """Preprocess a text for the tokenizer."""
        language = str(getattr(self.config, side))
        if self.config.preprocessing == "moses-lowercase":
            return moses.tokenize(text, language)
        if self.config.preprocessing == "expand-contractions":
            return spelling.normalize_spelling(text, language)
        return text

    def postprocess(self, text: str) -> str:
        """Undo ``preprocess`` in a translation, as far as possible."""
        is_moses = self.config.preprocessing == "moses-lowercase"
        return moses.detokenize(text, str(self.config.target)) if is_moses else text

    def load_split(self, name: Literal["valid", "test"]) -> TranslationSplit:
        """The validation or test pairs."""
        data_source: DataSource | None = getattr(self.config, name)
        if data_source is not None:
            return self._read_split(name, self._open_corpus(data_source, name))
        if self.config.train == BUILTIN_CORPUS:
            return self._load_builtin_split(name)
        path = self._hold_out.paths[name]
        if not path.is_file():
            raise InputError(f"{path} is missing: the data that training held out; train again, or set data.{name}")
        return self._read_split(name, parallel_corpus.find_corpus(str(path), source="source", target="target"))

    # ----------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _hold_out(self) -> HashedHoldOut[TranslationExample]:
        return HashedHoldOut(self.folder / "data", self.config, ".jsonl", lambda pair: pair.source, "pairs")

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

    def _read_split(self, name: str, corpus: ParallelCorpus) -> TranslationSplit:
        if self.config.preprocessing == "expand-contractions":
            corpus = self._preprocess_corpus(corpus)  # translations stay like this, so references must, too
        skipped = SkippedExamples()
        return TranslationSplit(name, list(corpus.read(skipped)), skipped)

    def _load_builtin_split(self, name: Literal["valid", "test"]) -> TranslationSplit:
        pairs = list(english_korean.read_pairs(name, self.config.held_out_size))
        examples = [
            TranslationExample(pair.english, pair.korean, f"{BUILTIN_CORPUS}:{number}")
            for number, pair in enumerate(pairs, 1)
        ]
        alignments = [GoldAlignment(frozenset(pair.sure_links), frozenset(pair.possible_links)) for pair in pairs]
        return TranslationSplit(name, examples, gold_alignments=alignments)

    def _open_builtin_corpus(self) -> ParallelCorpus:
        size = self.config.builtin_size
        return ParallelCorpus.from_pairs(
            f"{BUILTIN_CORPUS} {BUILTIN_VERSION}, {size} pairs",
            lambda: ((pair.english, pair.korean) for pair in english_korean.read_pairs("train", size)),
        )

    def _write_held_out(self, corpus: ParallelCorpus, fraction: float) -> None:
        """Write the held-out pairs to files that anybody can read."""
        splits = self._hold_out.collect(corpus, fraction)
        for name, path in self._hold_out.paths.items():
            if not splits[name]:
                raise InputError(
                    f"there is too little training data to hold some out; set data.{name}, or use more pairs of "
                    "sentences"
                )
            lines = (
                json.dumps({"source": pair.source, "target": pair.target}, ensure_ascii=False) for pair in splits[name]
            )
            write_text(path, "".join(f"{line}\n" for line in lines))


def _filter_corpus(
    corpus: ParallelCorpus, filter_name: str, predicate: Callable[[TranslationExample], bool]
) -> ParallelCorpus:
    """The corpus without the pairs that ``predicate`` rejects."""

    def filter_part(part: CorpusPart) -> CorpusPart:
        def read() -> Iterator[TranslationExample | InvalidExample]:
            return (pair for pair in part.read() if isinstance(pair, InvalidExample) or predicate(pair))

        return replace(part, name=f"{part.name}, {filter_name}", read=read)

    return replace(corpus, parts=tuple(map(filter_part, corpus.parts)))


def _concatenate_pairs(corpus: ParallelCorpus, max_pairs: int) -> ParallelCorpus:
    """The corpus with, after every second pair, the last two as one, after every third the last three, …"""
    if max_pairs == 1:
        return corpus

    def concatenate_part(part: CorpusPart) -> CorpusPart:
        def read() -> Iterator[TranslationExample | InvalidExample]:
            buffers: dict[int, list[TranslationExample]] = {size: [] for size in range(2, max_pairs + 1)}
            for pair in part.read():
                yield pair
                if isinstance(pair, InvalidExample):
                    continue
                for size, buffer in buffers.items():
                    buffer.append(pair)
                    if len(buffer) == size:
                        source = " ".join(x.source for x in buffer)
                        target = " ".join(x.target for x in buffer)
                        yield TranslationExample(source, target, buffer[0].location)
                        buffer.clear()

        return replace(part, name=f"{part.name}, up to {max_pairs} joined", read=read)

    return replace(corpus, parts=tuple(map(concatenate_part, corpus.parts)))
