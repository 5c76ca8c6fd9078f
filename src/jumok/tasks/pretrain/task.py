"""Pretraining of BERT: masked language modelling and next sentence prediction::

the capital of France is [MASK] .    →    paris
"""

from __future__ import annotations

from typing import Any, ClassVar

from rich.console import Console
from torch import nn

from jumok.data.batching.pretraining import PretrainingBatcher
from jumok.data.caches.document_store import DocumentStore, prepare_document_store
from jumok.data.readers.documents import FirstParagraphs
from jumok.data.readers.invalid_examples import SkippedExamples
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError
from jumok.files import read_json, write_json
from jumok.models.bert import Bert, BertPretrainingModel
from jumok.run import Run
from jumok.tasks import jsonl_input
from jumok.tasks.base import FingerprintedDataset, SplitName, Task, format_model_size, format_skipped
from jumok.tasks.batch_layout import resolve_batch_layout, resolve_packing
from jumok.tasks.pretrain.config import PretrainingRecipe
from jumok.tasks.pretrain.data import PretrainingData
from jumok.tasks.pretrain.predictor import FillMaskOptions, FillMaskPredictor
from jumok.tasks.pretrained import build_wordpiece_tokenizer, load_pretrained_encoder, load_pretrained_model
from jumok.training import DistributedRanks


class PretrainingTask(Task[FillMaskPredictor]):
    """Pretraining of BERT on documents."""

    description = "predict the masked words of a text"
    options_type = FillMaskOptions
    checked_splits: ClassVar[tuple[SplitName, ...]] = ("valid",)
    make_jsonl_reader = staticmethod(jsonl_input.make_pair_reader)
    recipe: PretrainingRecipe

    @property
    def input_example(self) -> str:
        return "… [MASK] …"

    def prepare(self, console: Console) -> list[str]:
        """Learn the vocabulary and tokenize the documents, unless that is done already."""
        run, recipe = self.run, self.recipe
        with console.status("reading the documents"):
            documents = PretrainingData(recipe.data, run.folder).train_documents()
        if not (run.folder / "tokenizer.json").is_file():
            with console.status("learning the vocabulary"):
                texts = FirstParagraphs(documents, recipe.tokenizer.max_training_examples)
                self._build_tokenizer(texts).save(run.folder)
        tokenizer = WordPieceTokenizer.load(run.folder)
        if not run.has_checkpoint:
            vocab_size = (
                tokenizer.vocab_size
                if recipe.pretrained is None
                else load_pretrained_encoder(recipe.pretrained)[0].word_embedding.num_embeddings
            )
            write_json(run.folder / "model.json", {"vocab_size": vocab_size})
        with console.status("tokenizing the documents"):
            store = prepare_document_store(
                run.folder / "data" / "train", documents, tokenizer, replace=not run.has_checkpoint
            )
        return format_skipped("training", store.skipped)

    def _build_tokenizer(self, texts: FirstParagraphs) -> WordPieceTokenizer:
        if self.recipe.pretrained is not None:
            return load_pretrained_model(self.recipe.pretrained)[1]
        return build_wordpiece_tokenizer(self.recipe.tokenizer, texts)

    def build_model(self) -> tuple[BertPretrainingModel, WordPieceTokenizer]:
        """Build the model. A pretrained embedding may have more rows than the tokenizer has tokens."""
        tokenizer = WordPieceTokenizer.load(self.run.folder)
        path = self.run.folder / "model.json"
        spec = read_json(path, dict) if path.is_file() else {}
        vocab_size = spec.get("vocab_size", tokenizer.vocab_size)
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise InputError(f"{path} is damaged: expected a positive number as vocab_size")
        return BertPretrainingModel(self.recipe.model, vocab_size), tokenizer

    def build_predictor(self, model: BertPretrainingModel, tokenizer: WordPieceTokenizer) -> FillMaskPredictor:
        return FillMaskPredictor(self.run, model, tokenizer)

    def build_dataset(
        self, predictor: FillMaskPredictor, ranks: DistributedRanks
    ) -> tuple[PretrainingBatcher, SkippedExamples]:
        recipe, config = self.recipe, self.recipe.train
        length = recipe.masking.sequence_length
        packed = resolve_packing(recipe.data.packing, recipe.model, length, config, ranks.device)
        layout = resolve_batch_layout(self.run, ranks, packed=packed)
        batcher = PretrainingBatcher(
            DocumentStore.open(self.run.folder / "data" / "train"),
            predictor.tokenizer,
            recipe.masking,
            max_tokens=config.batch_tokens,
            seed=config.seed,
            packed=layout.packed,
            fixed_shapes=layout.fixed_shapes,
        )
        return batcher, SkippedExamples()  # ``prepare`` reports those that the store left out

    def init_weights(self, model: BertPretrainingModel, tokenizer: Any) -> list[str]:
        """Copy the weights of a pretrained model. A head that it does not have stays random."""
        source = self.recipe.pretrained
        if source is None:
            return []
        pretrained = load_pretrained_model(source)[0]
        try:
            model.bert.copy_weights_from(pretrained if isinstance(pretrained, Bert) else pretrained.bert)
        except ValueError as error:
            raise InputError(f"pretrained: {source}: {error}; give model: its sizes") from None
        if isinstance(pretrained, BertPretrainingModel):
            heads = ((model.mlm_head, pretrained.mlm_head), (model.nsp_head, pretrained.nsp_head))
            for head, pretrained_head in heads:
                if head is not None and pretrained_head is not None:
                    head.load_state_dict(pretrained_head.state_dict())
        return []

    def describe_model(self, model: nn.Module, tokenizer: WordPieceTokenizer, dataset: FingerprintedDataset) -> str:
        assert isinstance(dataset, PretrainingBatcher)
        size = format_model_size(model)
        return f"bert: {size}, vocabulary of {tokenizer.vocab_size:,}; {dataset.store.summary}"


def build_task(run: Run) -> PretrainingTask:
    """Build the task of a run."""
    return PretrainingTask(run)
