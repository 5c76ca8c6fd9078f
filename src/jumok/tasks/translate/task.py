"""Translation::

this is an example sentence    →    이것은 예문이다
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from torch import nn

from jumok.data.batching.translation import TranslationBatcher
from jumok.data.caches.token_store import TokenStore, prepare_token_store
from jumok.data.readers.invalid_examples import SkippedExamples
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerPair
from jumok.errors import InputError
from jumok.metrics.translation import LengthBin
from jumok.models.convolutional import ConvolutionalSeq2Seq
from jumok.models.seq2seq import Seq2Seq
from jumok.models.transformer import Transformer, TransformerConfig
from jumok.run import Run
from jumok.tasks.base import Evaluation, FingerprintedDataset, SplitName, Task, format_model_size, format_skipped
from jumok.tasks.batch_layout import resolve_batch_layout, resolve_packing
from jumok.tasks.pretrained import init_embedding
from jumok.tasks.translate.config import TranslationRecipe
from jumok.tasks.translate.data import TranslationData
from jumok.tasks.translate.predictor import TranslationOptions, TranslationPredictor
from jumok.training import DistributedRanks

MODEL_TYPES: dict[str, Any] = {"seq2seq": Seq2Seq, "convolutional": ConvolutionalSeq2Seq, "transformer": Transformer}


class TranslationTask(Task[TranslationPredictor]):
    """Translation from one language to another."""

    description = "translate a text"
    options_type = TranslationOptions
    checked_splits: ClassVar[tuple[SplitName, ...]] = ("valid",)
    recipe: TranslationRecipe

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.data = TranslationData(self.recipe.data, run.folder)

    def prepare(self, console: Console) -> list[str]:
        """Learn the vocabulary and tokenize the training data, unless that is done already."""
        folder = self.run.folder
        with console.status("reading the training data"):
            corpus = self.data.train_corpus()
        if not any(folder.glob("tokenizer*.json")):
            with console.status("learning the vocabulary"):
                TokenizerPair.train(corpus, self.recipe.tokenizer).save(folder)
        with console.status("tokenizing the training data"):
            store = prepare_token_store(
                folder / "data" / "train",
                corpus,
                TokenizerPair.load(folder),
                max_tokens=self.recipe.data.max_tokens,
                replace=not self.run.has_checkpoint,
            )
        return format_skipped("training", store.skipped)

    def build_model(self) -> tuple[nn.Module, TokenizerPair]:
        tokenizers = TokenizerPair.load(self.run.folder)
        config = self.recipe.model
        try:
            model: nn.Module = MODEL_TYPES[config.type](
                config, tokenizers.source.vocab_size, tokenizers.target.vocab_size
            )
        except ValueError as error:
            raise InputError(f"model: {error}") from None
        return model, tokenizers

    def build_predictor(self, model: nn.Module, tokenizer: TokenizerPair) -> TranslationPredictor:
        return TranslationPredictor(self.run, tokenizer, self.data, lambda: model)

    def build_dataset(
        self, predictor: TranslationPredictor, ranks: DistributedRanks
    ) -> tuple[TranslationBatcher, SkippedExamples]:
        store = TokenStore.open(self.run.folder / "data" / "train")
        layout = resolve_batch_layout(self.run, ranks, packed=self._use_packing(ranks.device))
        config = self.recipe.train
        batcher = TranslationBatcher(
            store,
            max_tokens=config.batch_tokens,
            seed=config.seed,
            packed=layout.packed,
            fixed_shapes=layout.fixed_shapes,
        )
        return batcher, SkippedExamples()  # ``prepare`` reports those that the store left out

    def _use_packing(self, device: torch.device) -> bool:
        model, setting = self.recipe.model, self.recipe.data.packing
        if not isinstance(model, TransformerConfig):
            if setting is True:
                raise InputError(f"data.packing: true, but a {model.type} model needs padded sentences: use auto")
            return False
        max_tokens = self.recipe.data.max_tokens + 1  # with BOS or EOS
        return resolve_packing(setting, model, max_tokens, self.recipe.train, device)

    def init_weights(self, model: Any, tokenizer: TokenizerPair) -> list[str]:
        """Initialize the embeddings from word vectors, if the recipe names some."""
        messages = []
        for side in ("source", "target"):
            path: str | None = getattr(self.recipe.word_vectors, side)
            if path is not None:
                own: Tokenizer = getattr(tokenizer, side)
                words = own.ids_to_tokens(range(own.vocab_size))
                messages.append(init_embedding(path, getattr(model, f"{side}_embedding"), words, f"{side} words"))
        return messages

    def describe_model(self, model: nn.Module, tokenizer: TokenizerPair, dataset: FingerprintedDataset) -> str:
        sizes = f"{tokenizer.source.vocab_size:,}"
        if not tokenizer.is_shared:
            sizes += f" and {tokenizer.target.vocab_size:,}"
        size = format_model_size(model)
        return f"{self.recipe.model.type}: {size}, vocabulary of {sizes}, {len(dataset):,} pairs"

    def draw_comparison(self, evaluations: Mapping[str, Evaluation], path: Path) -> Path:
        from jumok.look.figures.plots import draw_scores_by_length

        bins = {
            name: [
                LengthBin(row["min_words"], row["max_words"], row["count"], row["score"])
                for row in evaluation.metrics["bleu_by_length"]
            ]
            for name, evaluation in evaluations.items()
        }
        return draw_scores_by_length(bins, path)


def build_task(run: Run) -> TranslationTask:
    """Build the task of a run."""
    return TranslationTask(run)
