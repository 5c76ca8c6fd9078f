"""Fine-tuning of BERT: pretrained weights and vocabulary. A subclass builds the model with its head. ::

    pretrained    a run or a Hugging Face folder            ►  sizes, vocabulary, weights of the encoder
                  package:NAME, such a folder in a package  ►  the same
                  null                                      ►  sizes of ``model:``, a vocabulary learned here

The folder of a run has ``tokenizer.json`` and ``model.json``, the sizes.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pydantic
from torch import nn

from jumok.batches.text import TextBatch
from jumok.data.batching.texts import EncodedText, TextBatcher
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError
from jumok.files import read_json, write_json
from jumok.models.bert import BertConfig
from jumok.tasks.base import DatasetSplit, FingerprintedDataset, format_model_size
from jumok.tasks.batch_layout import resolve_batch_layout, resolve_packing
from jumok.tasks.config import BertRecipe
from jumok.tasks.options import NBestOptions
from jumok.tasks.pretrained import build_wordpiece_tokenizer, load_pretrained_encoder
from jumok.tasks.supervised import SupervisedPredictorT, SupervisedTask
from jumok.training import DistributedRanks

TOO_LONG_HINT = "shorten it, or train with data.on_overflow=window, which reads long texts in windows"
# Keys of ``model:`` that hold for pretrained models, too.
OVERRIDABLE_FIELDS = ("dropout", "attention_dropout", "pooling", "adversarial_epsilon")
E = TypeVar("E")  # an example


class BertTask(SupervisedTask[E, SupervisedPredictorT]):
    """A task with a fine-tuned BERT."""

    batch_type: ClassVar[type[TextBatch]]
    options_type = NBestOptions
    recipe: BertRecipe

    @abstractmethod
    def get_texts(self, example: E) -> Iterable[str]:
        """The texts of an example, to learn a vocabulary from."""

    @abstractmethod
    def build_bert_model(self, config: BertConfig, vocab_size: int) -> nn.Module:
        """Build the model with random weights."""

    def resolve_max_tokens(self, config: BertConfig) -> int:
        """The maximum length of a row, including [CLS] and [SEP]."""
        max_tokens = self.recipe.data.max_tokens
        if max_tokens is not None and max_tokens > config.max_positions:
            raise InputError(
                f"data.max_tokens is {max_tokens}, and the model has {config.max_positions} positions; "
                "data.max_tokens=null uses all of them"
            )
        return max_tokens or config.max_positions

    def write_artifacts(self, train_split: DatasetSplit[E]) -> None:
        recipe, folder = self.recipe, self.run.folder
        if recipe.pretrained is None:
            if recipe.random_init:
                raise InputError(
                    "random_init: true uses the sizes and the vocabulary of pretrained:, which is null; the "
                    "weights are random anyway: remove random_init, or set pretrained"
                )
            config = recipe.model
            examples = train_split.examples[: recipe.tokenizer.max_training_examples]
            texts = [text for example in examples for text in self.get_texts(example)]
            tokenizer = build_wordpiece_tokenizer(recipe.tokenizer, texts)
            vocab_size = tokenizer.vocab_size
        else:
            bert, tokenizer = load_pretrained_encoder(recipe.pretrained)
            overrides = {name: getattr(recipe.model, name) for name in OVERRIDABLE_FIELDS}
            config = replace(bert.config, pooler=True, **overrides)
            vocab_size = bert.word_embedding.num_embeddings
        self.resolve_max_tokens(config)  # an error is raised before anything is written
        tokenizer.save(folder)
        write_json(folder / "model.json", {"vocab_size": vocab_size, **asdict(config)})

    def build_model(self) -> tuple[nn.Module, WordPieceTokenizer]:
        config, vocab_size, tokenizer = _load_model_spec(self.run.folder)
        return self.build_bert_model(config, vocab_size), tokenizer

    def init_weights(self, model: Any, tokenizer: WordPieceTokenizer) -> list[str]:
        source = self.recipe.pretrained
        if source is None or self.recipe.random_init:
            return []
        bert, _ = load_pretrained_encoder(source)
        new: list[str] = model.bert.copy_weights_from(bert)
        return [f"Initialized randomly, because {source} does not have them: {', '.join(new)}"] if new else []

    def build_batcher(self, encoded: Sequence[list[EncodedText]], model: Any, ranks: DistributedRanks) -> TextBatcher:
        config: BertConfig = model.bert.config
        rows = [row for windows in encoded for row in windows]
        max_length = max((len(row.ids) for row in rows), default=0)
        train_config = self.recipe.train
        packed = resolve_packing(self.recipe.data.packing, config, max_length, train_config, ranks.device)
        layout = resolve_batch_layout(self.run, ranks, packed=packed)
        return TextBatcher(
            self.batch_type,
            rows,
            max_tokens=train_config.batch_tokens,
            seed=train_config.seed,
            max_length=self.resolve_max_tokens(config),
            packed=layout.packed,
            fixed_shapes=layout.fixed_shapes,
        )

    def describe_model(self, model: nn.Module, tokenizer: WordPieceTokenizer, dataset: FingerprintedDataset) -> str:
        uses_pretrained = self.recipe.pretrained and not self.recipe.random_init
        origin = self.recipe.pretrained if uses_pretrained else "random initialization"
        vocab_size = _load_model_spec(self.run.folder)[1]
        return f"bert: {format_model_size(model)} ({origin}), vocabulary of {vocab_size:,}, {len(dataset):,} texts"


def _load_model_spec(folder: Path) -> tuple[BertConfig, int, WordPieceTokenizer]:
    """Read the sizes, the size of the vocabulary and the tokenizer that ``write_artifacts`` wrote."""
    path = folder / "model.json"
    if not path.is_file():
        raise InputError(f"{folder} has no model.json yet: its training has hardly begun")
    spec: dict[str, Any] = read_json(path, dict)
    try:
        vocab_size = operator.index(spec.pop("vocab_size"))
        config = pydantic.TypeAdapter(BertConfig).validate_python(spec)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} does not describe a BERT: {error}") from None
    return config, vocab_size, WordPieceTokenizer.load(folder)
