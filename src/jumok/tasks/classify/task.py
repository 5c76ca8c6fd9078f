"""The task of classification: a label, or a number, for a text or for a pair of texts.

::

    a film that makes you happy          →   positive  0.98         single sentence (SST-2, NSMC)
    He is old.   ⇥   He is young.        →   different  0.91        pair (MRPC, RTE)
    A man eats.  ⇥   Somebody eats.      →   3.8                    pair, ``regression`` (STS)

Which model reads the texts, ``model.kind`` says: bert (if none is said), self_attentive or hierarchical. Their
recipes differ in what a text is to them. To BERT, pieces: a text longer than the model reads is refused, or
read in windows whose probabilities are averaged; each window is then learned from as a text of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from jumok.batches.text import ClassificationBatch
from jumok.data.batching.texts import EncodedText
from jumok.data.readers.classification import ClassificationExample
from jumok.data.readers.formats import InvalidExample
from jumok.data.tokenizers.windows import make_windows
from jumok.data.tokenizers.wordpiece import WordPieceConfig, WordPieceTokenizer
from jumok.errors import InputError
from jumok.models.bert import BertClassifier, BertConfig
from jumok.run import Run
from jumok.tasks import base as tasks_base
from jumok.tasks import supervised
from jumok.tasks.base import Evaluation
from jumok.tasks.classify import word_attention
from jumok.tasks.classify.predictor import (
    TEXTS_PER_CHUNK,
    ClassificationDataConfig,
    ClassificationEvaluationConfig,
    ClassificationPredictor,
    ClassificationTask,
)
from jumok.tasks.classify.word_attention import WordAttentionTask
from jumok.tasks.fine_tuning import TOO_LONG_HINT, BertDataConfig, BertTask, NBestOptions, PretrainedSource
from jumok.tasks.jsonl_input import make_pair_reader as make_jsonl_reader
from jumok.tasks.predictors import BertPredictor
from jumok.training import TrainConfig, TrainingSummary

__all__ = [
    "RECIPE_TYPES",
    "BertClassificationRecipe",
    "NBestOptions",
    "compare",
    "evaluate",
    "load",
    "make_jsonl_reader",
    "train",
]


@dataclass(frozen=True)
class BertClassificationDataConfig(ClassificationDataConfig, BertDataConfig):
    """The ``data:`` section."""

    on_overflow: Literal["window", "refuse"] = "refuse"
    symmetric_pairs: bool = (
        False  # a pair is read both ways round: learned from twice, and labelled by the mean
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.symmetric_pairs and self.pair_column is None:
            raise ValueError("symmetric_pairs: only pairs can be read so; name the second text with pair_column")


@dataclass(frozen=True)
class BertClassificationRecipe:
    """Everything that a classification run of BERT's depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["classify"]
    data: BertClassificationDataConfig
    # A run or a Hugging Face folder; null: new weights, and a vocabulary learned from the data.
    pretrained: PretrainedSource = None
    random_init: bool = False  # take over sizes and vocabulary only: new weights, to compare with
    model: BertConfig = field(
        default_factory=BertConfig
    )  # with ``from``, only dropouts, pooling and adversarial count
    tokenizer: WordPieceConfig = field(default_factory=WordPieceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: ClassificationEvaluationConfig = field(default_factory=ClassificationEvaluationConfig)


# By the kind of the model; the first is meant where none is said.
RECIPE_TYPES: dict[str, type] = {
    "bert": BertClassificationRecipe,
    **word_attention.WORD_ATTENTION_RECIPE_TYPES,
}


def train(run: Run, console: Console) -> TrainingSummary:
    """Train the model of a run, or go on with it."""
    return supervised.train(_build_task(run), console)


def load(run: Run, device: str = "auto") -> ClassificationPredictor:
    """The trained model of a run, ready to label texts."""
    use = _build_task(run)
    return use.build_predictor(*supervised.load_trained_model(use, device))


def evaluate(
    predictor: ClassificationPredictor, split_name: str, options: NBestOptions, console: Console
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


def _build_task(run: Run) -> BertClassificationTask | WordAttentionTask:
    return (
        BertClassificationTask(run)
        if isinstance(run.recipe, BertClassificationRecipe)
        else WordAttentionTask(run)
    )


# ---------------------------------------------------------------------------------------------- BERT's way


class BertClassificationTask(ClassificationTask, BertTask[ClassificationExample]):
    """BERT's labels of texts, for one run."""

    batch_type = ClassificationBatch

    def build_bert_model(self, config: BertConfig, vocab_size: int) -> nn.Module:
        try:
            return BertClassifier(config, vocab_size, self.num_outputs)
        except ValueError as error:
            raise InputError(f"model: {error}") from None

    def encode_rows(
        self, examples: Iterable[ClassificationExample], tokenizer: WordPieceTokenizer, max_tokens: int
    ) -> Iterator[list[EncodedText] | InvalidExample]:
        examples = iter(examples)
        while some := list(itertools.islice(examples, TEXTS_PER_CHUNK)):
            encoded = iter(tokenizer.encode([text for one in some for text in self.get_texts(one)]))
            for one in some:
                given = [next(encoded) for _ in self.get_texts(one)]
                found = self._split_windows(given, max_tokens, one.location)
                if isinstance(found, InvalidExample):
                    yield found
                    continue
                label = self.get_target(one)
                if self.recipe.data.symmetric_pairs:
                    found = [*found, *([second, first] for first, second in found)]
                yield [EncodedText(*tokenizer.join_segments(*each), {"labels": label}) for each in found]

    def _split_windows(
        self, token_ids: list[list[int]], max_tokens: int, location: str
    ) -> list[list[list[int]]] | InvalidExample:
        """One or two texts as they fit into the model, in several windows if need be."""
        room = max_tokens - 1 - len(token_ids)
        length = sum(map(len, token_ids))
        if length <= room:
            return [token_ids]
        data: BertClassificationDataConfig = self.recipe.data
        over = f"{length + max_tokens - room} tokens, and {max_tokens} are read at once"
        if data.on_overflow == "refuse":
            return InvalidExample(location, "a text that is too long", f"{over}; {TOO_LONG_HINT}")
        longer = max(range(len(token_ids)), key=lambda n: len(token_ids[n]))
        left = room - (length - len(token_ids[longer]))
        if left < min(len(token_ids[longer]), room // 4):
            return InvalidExample(
                location, "two texts that are too long", f"{over}, windows of the longer one included"
            )
        parts = make_windows(len(token_ids[longer]), left, data.window_stride)
        return [
            [text[begin:end] if n == longer else text for n, text in enumerate(token_ids)]
            for begin, end in parts
        ]

    def build_predictor(self, model: nn.Module, tokenizer: WordPieceTokenizer) -> BertClassificationPredictor:
        return BertClassificationPredictor(self, model, tokenizer)


class BertClassificationPredictor(ClassificationPredictor, BertPredictor):
    """A BERT that labels texts."""

    def encode_windows(self, text: str) -> list[EncodedText]:
        rows: list[EncodedText]
        [rows] = self.check_encoded(self.encode([self.parse_line(text)]))
        return rows

    def count_tokens(self, text: str, text_pair: str | None = None) -> int:
        [rows] = self.check_encoded(self.encode([self._build_sample(text, text_pair)]))
        return sum(len(row.ids) for row in rows)

    def predict_outputs(
        self, samples: Sequence[ClassificationExample], first_index: int | None
    ) -> NDArray[np.float64]:
        """Of a text in several windows, or read both ways, the mean over these."""
        rows = self.check_encoded(self.encode(samples), first_index)
        said = iter(
            self.compute_outputs(
                [row for some in rows for row in some], lambda batch: [self.model.logits(batch)]
            )
        )
        found = []
        for some in rows:
            logits = np.array([next(said)[0].double().numpy() for _ in some])
            if not self.task.recipe.data.regression:
                logits = np.exp(logits - logits.max(1, keepdims=True))
                logits /= logits.sum(1, keepdims=True)
            found.append(logits.mean(0))
        return np.array(found)


Recipe = RECIPE_TYPES
Options = NBestOptions
