"""The task of tagging: the entities in a text, told by a tag for each of its words.

::

    the U.N. sent Ekeus to Baghdad    →    the [U.N.](ORG) sent [Ekeus](PER) to [Baghdad](LOC)

The tag of a word is read off its first piece. A sentence longer than the model reads goes through it in
windows, and each word is tagged in the window that shows most on both sides of it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import regex
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from jumok.batches.text import TaggingBatch
from jumok.batches.tokens import IGNORE
from jumok.data.batching.texts import EncodedText
from jumok.data.readers import tagging
from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.tagging import (
    Entity,
    TaggingExample,
    TagScheme,
    convert_to_iob2,
    extract_entities,
    label_first_pieces,
    make_iob2_labels,
)
from jumok.data.tokenizers.segmentation import (
    COMBINING_MARKS,
    LETTERS,
    NOT_SYMBOL,
    SPACELESS_SYLLABLE,
    SYMBOL,
)
from jumok.data.tokenizers.windows import TokenWindow, find_central_window, make_windows
from jumok.data.tokenizers.wordpiece import WordPieceConfig, WordPieceEncoding, WordPieceTokenizer
from jumok.errors import InputError
from jumok.metrics.tagging import EntityScore, score_tags
from jumok.models.bert import BertConfig, BertTagger
from jumok.run import Run
from jumok.tasks import base as tasks_base
from jumok.tasks import fine_tuning
from jumok.tasks.base import Evaluation
from jumok.tasks.fine_tuning import (
    TOO_LONG_HINT,
    BertDataConfig,
    BertTask,
    DataSource,
    NBestOptions,
    PretrainedSource,
)
from jumok.tasks.predictors import BertPredictor, Prediction
from jumok.training import TrainConfig, TrainingSummary

__all__ = ["NBestOptions", "TaggingRecipe", "compare", "evaluate", "load", "train"]

SENTENCES_PER_CHUNK = 1024  # sentences that are tokenised together
NUM_SAMPLES = 3  # sample sentences a validation
# A word of a text that nobody has divided: letters and digits, with signs inside them; or a sign alone. The
# last point of U.N. is part of it, that of a sentence is not.
WORD_PATTERN = regex.compile(
    rf"(?V1)(?:[\p{{L}}\p{{Nl}}\p{{No}}]\.){{2,}}+(?![\p{{L}}\p{{N}}_-])"
    rf"|[{LETTERS}](?:[{LETTERS}{COMBINING_MARKS}.'’&/-]*[{LETTERS}{COMBINING_MARKS}])?"
    rf"|{SPACELESS_SYLLABLE}|{SYMBOL}|[^{NOT_SYMBOL}][{COMBINING_MARKS}]*+"
)


@dataclass(frozen=True)
class TaggingDataConfig(BertDataConfig):
    """The ``data:`` section. Files are read as :mod:`jumok.data.tagging` says."""

    word_column: int = 1  # the column of the words, counted from 1, or from the end: -1 is the last
    tag_column: int = -1
    tag_scheme: TagScheme = "any"  # how tags mark entities; any: read IOB1 and IOB2 as they come


@dataclass(frozen=True)
class TaggingRecipe:
    """Everything that a tagging run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["tag"]
    data: TaggingDataConfig
    # A run or a Hugging Face folder; null: new weights, and a vocabulary learned from the data.
    pretrained: PretrainedSource = None
    random_init: bool = False  # take over sizes and vocabulary only: new weights, to compare with
    model: BertConfig = field(default_factory=BertConfig)  # with ``from``, only its dropouts count
    tokenizer: WordPieceConfig = field(default_factory=WordPieceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def train(run: Run, console: Console) -> TrainingSummary:
    """Train the model of a run, or go on with it."""
    return fine_tuning.train(TaggingTask(run), console)


def load(run: Run, device: str = "auto") -> TaggingPredictor:
    """The trained model of a run, ready to find entities."""
    use = TaggingTask(run)
    return TaggingPredictor(use, *fine_tuning.load_trained_model(use, device))


def evaluate(
    predictor: TaggingPredictor, split_name: str, options: NBestOptions, console: Console
) -> Evaluation:
    """Score a run, and keep what it said."""
    return tasks_base.evaluate(predictor, split_name, console)


def compare(
    runs: Sequence[Run],
    split_name: str,
    options: NBestOptions,
    output_folder: Path,
    device: str,
    console: Console,
) -> None:
    """Runs on the same data."""
    tasks_base.compare(runs, load, split_name, output_folder, device, console)


# ------------------------------------------------------------------------------------------------- the use


class TaggingTask(BertTask[TaggingExample]):
    """Tags of words, for one run."""

    description = "find the entities of a text"
    example_type = TaggingExample
    batch_type = TaggingBatch

    def read_examples(
        self, data_source: DataSource, split_name: str
    ) -> Iterator[TaggingExample | InvalidExample]:
        data: TaggingDataConfig = self.recipe.data
        found = tagging.read_tagging_examples(
            data_source,
            word_column=data.word_column,
            tag_column=data.tag_column,
            scheme=data.tag_scheme,
            split=split_name,
        )
        return found if split_name == "train" and not self.run.has_checkpoint else self._check_tags(found)

    def _check_tags(
        self, sentences: Iterator[TaggingExample | InvalidExample]
    ) -> Iterator[TaggingExample | InvalidExample]:
        """The same sentences, with a flaw for each that has a tag that was never learned."""
        known = set(self.labels)
        for one in sentences:
            if isinstance(one, TaggingExample):
                at = next((n for n, tag in enumerate(one.tags) if tag not in known), None)
                if at is not None:
                    path, _, line = one.location.rpartition(":")
                    told = (
                        f"{one.tags[at]!r} of the word {one.words[at]!r}; known are: {', '.join(self.labels)}"
                    )
                    yield InvalidExample(f"{path}:{int(line) + at}", "an unknown tag", told)
                    continue
            yield one

    def get_split_key(self, example: TaggingExample) -> str:
        return " ".join(example.words)

    def get_texts(self, example: TaggingExample) -> Iterable[str]:
        return [" ".join(example.words)]

    def collect_labels(self, examples: Sequence[TaggingExample]) -> list[str]:
        kinds = dict.fromkeys(tag[2:] for one in examples for tag in one.tags if tag != "O")
        return make_iob2_labels(list(kinds))

    def build_bert_model(self, config: BertConfig, vocab_size: int) -> nn.Module:
        return BertTagger(config, vocab_size, len(self.labels))

    def encode_rows(
        self, examples: Iterable[TaggingExample], tokenizer: WordPieceTokenizer, max_tokens: int
    ) -> Iterator[list[EncodedText] | InvalidExample]:
        numbers = {tag: number for number, tag in enumerate(self.labels)}
        for one, found in self.locate_pieces(examples, tokenizer):
            parts = self.split_windows(found, max_tokens, one.location)
            if isinstance(parts, InvalidExample):
                yield parts
                continue
            labels = label_first_pieces(found.word_ids, [numbers[tag] for tag in one.tags])
            yield [
                _build_row(found, part, tokenizer, _mask_labels(labels, part, number, parts))
                for number, part in enumerate(parts)
            ]

    def locate_pieces(
        self, examples: Iterable[TaggingExample], tokenizer: WordPieceTokenizer
    ) -> Iterator[tuple[TaggingExample, WordPieceEncoding]]:
        """Sentences with the pieces of their words."""
        examples = iter(examples)
        while some := list(itertools.islice(examples, SENTENCES_PER_CHUNK)):
            yield from zip(
                some, tokenizer.encode_batch_with_offsets([one.words for one in some]), strict=True
            )

    def split_windows(
        self, pieces: WordPieceEncoding, max_tokens: int, location: str
    ) -> list[TokenWindow] | InvalidExample:
        """What of a sentence is read at once."""
        room = max_tokens - 2
        if len(pieces.ids) > room and self.recipe.data.on_overflow == "refuse":
            told = f"{len(pieces.ids) + 2} tokens, and {max_tokens} are read at once; {TOO_LONG_HINT}"
            return InvalidExample(location, "a sentence that is too long", told)
        return make_windows(len(pieces.ids), room, self.recipe.data.window_stride)

    def build_predictor(self, model: nn.Module, tokenizer: WordPieceTokenizer) -> TaggingPredictor:
        return TaggingPredictor(self, model, tokenizer)


def _build_row(
    pieces: WordPieceEncoding, window: TokenWindow, tokenizer: WordPieceTokenizer, labels: list[int]
) -> EncodedText:
    ids, segments = tokenizer.join_segments(pieces.ids[window.begin : window.end])
    return EncodedText(ids, segments, {"labels": [IGNORE, *labels, IGNORE]})


def _mask_labels(
    labels: list[int], window: TokenWindow, window_index: int, all_windows: list[TokenWindow]
) -> list[int]:
    """The labels of a window. Each word counts in one window only, the one that is asked for it later."""
    return [
        IGNORE if labels[at] == IGNORE or find_central_window(at, all_windows) != window_index else labels[at]
        for at in range(window.begin, window.end)
    ]


# ------------------------------------------------------------------------------------------------- at work


@dataclass(frozen=True)
class TaggingPrediction(Prediction):
    """The words of a line, where each begins and ends, their tags in IOB2, and how likely each tag is."""

    words: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    tags: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()

    @property
    def entities(self) -> list[Entity]:
        """Runs of words, with their kinds."""
        return extract_entities(self.tags)

    def to_entity_dicts(self) -> Iterator[dict[str, Any]]:
        """The entities with their texts, where in the line they stand, and how likely they are."""
        for kind, first, last in self.entities:
            begin, end = self.spans[first][0], self.spans[last - 1][1]
            share = float(np.prod(self.probabilities[first:last]))
            yield {
                "type": kind,
                "text": self.input[begin:end],
                "start": begin,
                "end": end,
                "probability": share,
            }

    def format_lines(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        if as_json:
            known = {"line": self.index, "text": self.input, "entities": list(self.to_entity_dicts())}
            yield json.dumps({**known, "words": self.words, "tags": self.tags}, ensure_ascii=False)
            return
        said, done = "", 0
        for kind, begin, end in self.entities:
            first, last = self.spans[begin][0], self.spans[end - 1][1]
            said += f"{self.input[done:first]}[{self.input[first:last]}]({kind})"
            done = last
        yield said + self.input[done:]


class TaggingPredictor(BertPredictor):
    """A model that finds entities.

    >>> reader = jumok.load("runs/bert-conll2003")  # doctest: +SKIP
    >>> reader.tag("Ekeus heads for Baghdad .").entities[1]  # doctest: +SKIP
    Entity(type='LOC', start=3, end=4)
    """

    @property
    def labels(self) -> Sequence[str]:
        found: list[str] = self.task.labels
        return found

    def tag(self, text: str) -> TaggingPrediction:
        """One text; many of them by :meth:`predict`."""
        return next(self.predict([text], NBestOptions()))

    def predict(
        self,
        lines: Iterable[str],
        options: NBestOptions,
        *,
        with_attention: bool = False,
        first_index: int = 0,
    ) -> Iterator[TaggingPrediction]:
        """The entities of every line, in their order."""
        if options.n_best > 1:
            raise InputError("--n-best: each word has one tag here, the likeliest; --json tells how likely")
        numbered = enumerate(lines, first_index)
        while window := list(itertools.islice(numbered, SENTENCES_PER_CHUNK)):
            found = [list(WORD_PATTERN.finditer(line)) for _, line in window]
            sentences = [
                TaggingExample(tuple(one.group() for one in words), ("O",) * len(words), "")
                for words in found
            ]
            said = self._predict_tags(sentences, window[0][0])
            for (number, line), words, (tags, shares) in zip(window, found, said, strict=True):
                spans = tuple(word.span() for word in words)
                texts = tuple(word.group() for word in words)
                yield TaggingPrediction(number, line, texts, spans, tuple(convert_to_iob2(tags)), shares)

    def count_tokens(self, text: str) -> int:
        """How many tokens the model reads of a text; one that is too long is an error."""
        return sum(len(row.ids) for row in self.encode_windows(text))

    def encode_windows(self, text: str) -> list[EncodedText]:
        words = tuple(WORD_PATTERN.findall(text))
        rows: list[EncodedText]
        [rows] = self.check_encoded(
            self.task.encode_rows([TaggingExample(words, ("O",) * len(words), "")], self.tokenizer, self.max_tokens)
        )
        return rows

    def score_examples(self, examples: Sequence[TaggingExample]) -> Evaluation:
        said = [tags for tags, _ in self._predict_tags(examples, None)]
        score = score_tags([one.tags for one in examples], said)
        figures: dict[str, Any] = {
            "f1": score.overall.f1,
            "precision": score.overall.precision,
            "recall": score.overall.recall,
            "accuracy": score.accuracy,
        }
        figures["types"] = [
            {
                "type": kind,
                "precision": one.precision,
                "recall": one.recall,
                "f1": one.f1,
                "count": one.num_gold,
            }
            for kind, one in score.by_type.items()
        ]
        each = np.array([_count_entities(one.tags, tags) for one, tags in zip(examples, said, strict=True)])

        def of(some: NDArray[np.int64]) -> float:
            return EntityScore(*each[some].sum(0).tolist()).f1

        outputs = [
            json.dumps({"words": one.words, "prediction": tags, "target": one.tags}, ensure_ascii=False)
            for one, tags in zip(examples, said, strict=True)
        ]
        samples = [
            line
            for one, tags in zip(examples[:NUM_SAMPLES], said, strict=False)
            for line in (
                f"  said    {_mark_entities(one.words, tags)}",
                f"  wanted  {_mark_entities(one.words, one.tags)}",
            )
        ]
        return Evaluation(figures, "f1", of, outputs, samples)

    def _predict_tags(
        self, sentences: Sequence[TaggingExample], first_index: int | None
    ) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
        """The likeliest tag of each word, and how likely it is; ``first_index`` is the number of the first line."""
        located = [found for _, found in self.task.locate_pieces(sentences, self.tokenizer)]
        rows = self.check_encoded(self.task.encode_rows(sentences, self.tokenizer, self.max_tokens), first_index)
        said = iter(
            self.compute_outputs(
                [row for some in rows for row in some], lambda batch: [self.model.logits(batch)]
            )
        )
        for sentence, pieces, some in zip(sentences, located, rows, strict=True):
            parts = self.task.split_windows(pieces, self.max_tokens, "")
            logits = [next(said)[0].double().softmax(-1).numpy() for _ in some]
            # A word of which no piece is left, as a control character has none, is no entity.
            tags, shares = ["O"] * len(sentence.words), [1.0] * len(sentence.words)
            labels = label_first_pieces(pieces.word_ids, range(len(sentence.words)))
            for at, word in enumerate(labels):
                if word != IGNORE:
                    window = find_central_window(at, parts)
                    share = logits[window][1 + at - parts[window].begin]
                    best = int(share.argmax())
                    tags[word], shares[word] = self.task.labels[best], float(share[best])
            yield tuple(tags), tuple(shares)


def _count_entities(target_tags: Sequence[str], predicted_tags: Sequence[str]) -> tuple[int, int, int]:
    found = score_tags([target_tags], [predicted_tags]).overall
    return found.num_correct, found.num_predicted, found.num_gold


def _mark_entities(words: Sequence[str], tags: Sequence[str]) -> str:
    """A sentence with its entities in brackets."""
    shown = list(words)
    for kind, begin, end in extract_entities(tags):
        shown[begin] = f"[{shown[begin]}"
        shown[end - 1] = f"{shown[end - 1]}]({kind})"
    return " ".join(shown)


Recipe = TaggingRecipe
Options = NBestOptions
