"""What BERT's uses have in common: what they begin from, and how long texts are read.

A use (:mod:`.classify`, :mod:`.tag`, :mod:`.answer`) says which head learns its examples, and what a model
reads of them. The rest is here, and what other models have too in :mod:`.supervised`. ::

    from      a run of ours, or a Hugging Face folder    ►  sizes, vocabulary, weights of the encoder
              package:NAME, such a folder in a package   ►  the same
              null                                       ►  sizes of ``model:``, a vocabulary learned here

In the run's folder lie ``tokenizer.json`` and ``model.json`` (the sizes).
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import pydantic
import torch
from torch import nn

from jumok.batches.text import TextBatch
from jumok.data.batching.texts import EncodedText, TextBatcher
from jumok.data.readers.formats import InvalidExample
from jumok.data.tokenizers.wordpiece import WordPieceConfig, WordPieceTokenizer
from jumok.errors import InputError
from jumok.files import read_json
from jumok.models.bert import BertConfig
from jumok.tasks import common, supervised
from jumok.tasks.pretrained import PretrainedSource, load_pretrained_encoder
from jumok.tasks.supervised import (
    DatasetSplit,
    DataSource,
    NBestOptions,
    SupervisedTask,
    load_trained_model,
    train,
)
from jumok.training import DistributedRanks

__all__ = [
    "TOO_LONG_HINT",
    "BertDataConfig",
    "BertTask",
    "DataSource",
    "DatasetSplit",
    "NBestOptions",
    "PretrainedSource",
    "load_trained_model",
    "train",
]

TOO_LONG_HINT = "shorten it, or train with data.on_overflow=window, which reads it in windows"  # a text is
OVERRIDABLE_FIELDS = (
    "dropout",
    "attention_dropout",
    "pooling",
    "adversarial_epsilon",
)  # of ``model:``, where a model is taken over
E = TypeVar("E")  # an example


@dataclass(frozen=True)
class BertDataConfig(supervised.SupervisedDataConfig):
    """What the ``data:`` sections of BERT's uses have: a model reads so many tokens, and no more."""

    max_tokens: int | None = None  # tokens of a text; None: as many as the model has positions
    on_overflow: Literal["window", "refuse"] = "window"  # what becomes of a longer one
    window_stride: int = 128  # tokens from the beginning of one window to that of the next
    packing: Literal["auto"] | bool = "auto"  # texts end to end; auto: where a GPU is faster with it

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window_stride", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: 1 or more is expected")


class BertTask(SupervisedTask[E]):
    """One way to use BERT, for one run."""

    batch_type: ClassVar[type[TextBatch]]

    @abstractmethod
    def get_texts(self, example: E) -> Iterable[str]:
        """What a vocabulary is learned from."""

    @abstractmethod
    def build_bert_model(self, config: BertConfig, vocab_size: int) -> nn.Module:
        """A new model."""

    @abstractmethod
    def encode_rows(
        self, examples: Sequence[E], tokenizer: WordPieceTokenizer, max_tokens: int
    ) -> Iterator[list[EncodedText] | InvalidExample]:
        """What a model reads of each example: one row, or several windows."""

    def resolve_max_tokens(self, config: BertConfig) -> int:
        """The most tokens that are read at once, [CLS] and [SEP] included."""
        asked: int | None = self.recipe.data.max_tokens
        if asked is not None and asked > config.max_positions:
            raise InputError(
                f"data.max_tokens is {asked}, and the model has {config.max_positions} positions; "
                "data.max_tokens=null takes as many"
            )
        return asked or config.max_positions

    def prepare(self, train: DatasetSplit[E]) -> None:
        recipe, folder = self.recipe, self.run.folder
        if recipe.pretrained is None:
            if recipe.random_init:
                raise InputError(
                    "random_init: true takes over sizes and vocabulary, but pretrained: is null, which begins with new "
                    "weights anyway; leave random_init out, or name what to take them from"
                )
            config = recipe.model
            pieces = self._build_tokenizer(train.examples)
            vocabulary = pieces.vocab_size
        else:
            bert, pieces = load_pretrained_encoder(recipe.pretrained)
            chosen = {name: getattr(recipe.model, name) for name in OVERRIDABLE_FIELDS}
            config = replace(bert.config, pooler=True, **chosen)
            vocabulary = bert.word_embedding.num_embeddings
        self.resolve_max_tokens(config)  # told before anything is written
        pieces.save(folder)
        supervised.write_json(folder / "model.json", {"vocab_size": vocabulary, **asdict(config)})

    def _build_tokenizer(self, examples: Sequence[E]) -> WordPieceTokenizer:
        text: WordPieceConfig = self.recipe.tokenizer
        if text.pretrained is not None:
            return WordPieceTokenizer.load(Path(text.pretrained))
        texts = [one for example in examples[: text.max_training_examples] for one in self.get_texts(example)]
        return WordPieceTokenizer.train(
            texts,
            text.vocab_size,
            lowercase=text.lowercase,
            strip_accents=text.strip_accents,
            initial_alphabet=text.initial_alphabet,
        )

    def build_model(self) -> tuple[nn.Module, WordPieceTokenizer]:
        config, vocabulary, pieces = _load_model_spec(self.run.folder)
        return self.build_bert_model(config, vocabulary), pieces

    def init_weights(self, model: Any, tokenizer: WordPieceTokenizer) -> str | None:
        if self.recipe.pretrained is None or self.recipe.random_init:
            return None
        bert, _ = load_pretrained_encoder(self.recipe.pretrained)
        new: list[str] = model.bert.copy_weights_from(bert)
        return f"New, as {self.recipe.pretrained} has none: {', '.join(new)}" if new else None

    def build_dataset(
        self, encoded: Sequence[list[EncodedText]], model: Any, ranks: DistributedRanks
    ) -> TextBatcher:
        config: BertConfig = model.bert.config
        rows = [row for some in encoded for row in some]
        layout = common.resolve_batch_layout(
            self.run, ranks, _use_packing(self.recipe, config, rows, ranks.device)
        )
        train = self.recipe.train
        return TextBatcher(
            self.batch_type,
            rows,
            max_tokens=train.batch_tokens,
            seed=train.seed,
            max_length=self.resolve_max_tokens(config),
            **layout,
        )

    def describe_model(self, model: nn.Module, tokenizer: WordPieceTokenizer, num_examples: int) -> str:
        weights = sum(weight.numel() for weight in model.parameters())
        origin = self.recipe.pretrained if self.recipe.pretrained and not self.recipe.random_init else "new weights"
        vocabulary = _load_model_spec(self.run.folder)[1]
        return f"bert: {weights / 1e6:.1f} M weights ({origin}), vocabulary of {vocabulary:,}, {num_examples:,} texts"


def _load_model_spec(folder: Path) -> tuple[BertConfig, int, WordPieceTokenizer]:
    """What ``prepare`` wrote."""
    path = folder / "model.json"
    if not path.is_file():
        raise InputError(f"{folder} has no model.json yet: its training has hardly begun")
    told: dict[str, Any] = read_json(path, dict)
    try:
        vocabulary = operator.index(told.pop("vocab_size"))
        config = pydantic.TypeAdapter(BertConfig).validate_python(told)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} does not describe a BERT: {error}") from None
    return config, vocabulary, WordPieceTokenizer.load(folder)


def _use_packing(recipe: Any, config: BertConfig, rows: Sequence[EncodedText], device: torch.device) -> bool:
    asked: Literal["auto"] | bool = recipe.data.packing
    if asked == "auto":
        longest = max((len(row.ids) for row in rows), default=0)
        return common.is_packing_fast(config, longest, recipe.train, device)
    return asked
