"""The task of pretraining: BERT learns words that are hidden, and whether one segment follows another."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rich.console import Console
from torch import nn

from jumok.batches.text import PretrainingBatch
from jumok.data.batching.pretraining import MaskingConfig, PretrainingBatcher
from jumok.data.caches.document_store import DocumentStore, prepare_document_store
from jumok.data.readers.documents import FirstParagraphs
from jumok.data.tokenizers.wordpiece import WordPieceConfig, WordPieceTokenizer
from jumok.errors import InputError
from jumok.files import atomic_write, read_json
from jumok.models.bert import Bert, BertConfig, BertPretrainingModel
from jumok.run import Run
from jumok.tasks import common
from jumok.tasks.jsonl_input import make_pair_reader as make_jsonl_reader
from jumok.tasks.pretrain.data import PretrainingData, PretrainingDataConfig
from jumok.tasks.pretrain.metrics import build_held_out_dataset, compare, evaluate, score_model
from jumok.tasks.pretrain.predictor import FillMaskOptions, FillMaskPredictor, compute_attention_maps
from jumok.tasks.pretrained import PretrainedSource, load_pretrained_encoder, load_pretrained_model
from jumok.training import (
    TrainConfig,
    TrainingSummary,
    ValidationReport,
    compute_attention_health,
    init_distributed,
    load_weights,
)
from jumok.training import train as train_model

__all__ = [
    "FillMaskOptions",
    "FillMaskPredictor",
    "PretrainingRecipe",
    "build_model",
    "compare",
    "evaluate",
    "load",
    "make_jsonl_reader",
    "train",
]

NUM_SAMPLES = 3  # sequences that are shown with their hidden words at a validation
NUM_HEALTH_EXAMPLES = 32  # sequences whose attention is measured


@dataclass(frozen=True)
class PretrainingRecipe:
    """Everything that a pretraining run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["pretrain"]
    # A run or a Hugging Face folder of the same sizes to go on from, with other text; null: new weights.
    pretrained: PretrainedSource = None
    model: BertConfig = field(default_factory=BertConfig)
    data: PretrainingDataConfig = field(default_factory=PretrainingDataConfig)
    tokenizer: WordPieceConfig = field(default_factory=WordPieceConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.masking.sequence_length > self.model.max_positions:
            raise ValueError(
                f"masking.sequence_length={self.masking.sequence_length} is more than model.max_positions={self.model.max_positions}"
            )
        if self.model.num_segments < 2 or not self.model.pooler:
            raise ValueError("model: to learn which segment is next takes num_segments=2 or more, and a pooler")
        if self.train.batch_tokens < 2 * self.masking.sequence_length:
            raise ValueError(
                f"train.batch_tokens={self.train.batch_tokens}: a batch has two sequences of masking.sequence_length="
                f"{self.masking.sequence_length} or more"
            )


def train(run: Run, console: Console) -> TrainingSummary:
    """Train the model of a run, or go on with it, and say what comes next."""
    recipe: PretrainingRecipe = run.recipe
    with init_distributed(recipe.train.device) as ranks:
        if ranks.is_main:
            _prepare_data(run, console)
        ranks.barrier()
        pieces = WordPieceTokenizer.load(run.folder)
        store = DocumentStore.open(run.folder / "data" / "train")
        layout = common.resolve_batch_layout(run, ranks, _use_packing(recipe, ranks.device))
        data = PretrainingBatcher(
            store,
            pieces,
            recipe.masking,
            max_tokens=recipe.train.batch_tokens,
            seed=recipe.train.seed,
            **layout,
        )
        torch.manual_seed(recipe.train.seed)
        model = build_model(run, pieces)
        if recipe.pretrained is not None and not run.has_checkpoint:
            _init_from_pretrained(model, recipe.pretrained)
        if ranks.is_main:
            weights = sum(weight.numel() for weight in model.parameters())
            told = (
                f"bert: {weights / 1e6:.1f} M weights, vocabulary of {pieces.vocab_size:,}; {store.summary}"
            )
            console.print(told, markup=False, soft_wrap=True)
        summary = train_model(
            model,
            data,
            recipe.train,
            run.folder,
            validate=_PretrainingValidation(run, pieces),
            console=console,
            ranks=ranks,
        )
    if ranks.is_main:
        told = common.format_next_commands(run, "say the hidden word of a text", "… [MASK] …")
        console.print(told, markup=False, soft_wrap=True)
    return summary


def load(run: Run, device: str = "auto") -> FillMaskPredictor:
    """The trained model of a run, ready to say hidden words."""
    pieces = WordPieceTokenizer.load(run.folder)
    model = build_model(run, pieces)
    load_weights(model, run.weights_path)
    return FillMaskPredictor(run, common.move_to_device(model, device), pieces)


def build_model(run: Run, tokenizer: WordPieceTokenizer) -> BertPretrainingModel:
    """The model of a run, with new weights. What it began from may have more words than pieces."""
    path = run.folder / "model.json"
    told = read_json(path, dict) if path.is_file() else {}
    vocabulary = told.get("vocab_size", tokenizer.vocab_size)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise InputError(f"{path} is damaged: expected a number of words as vocab_size")
    return BertPretrainingModel(run.recipe.model, vocabulary)


# -------------------------------------------------------------------------------------- before training


def _prepare_data(run: Run, console: Console) -> None:
    """Vocabulary and tokenised documents, unless they are there already."""
    recipe: PretrainingRecipe = run.recipe
    with console.status("reading the documents"):
        documents = PretrainingData(recipe.data, run.folder).train_documents()
    if not (run.folder / "tokenizer.json").is_file():
        with console.status("learning the vocabulary"):
            _build_tokenizer(recipe, FirstParagraphs(documents, recipe.tokenizer.max_training_examples)).save(
                run.folder
            )
    pieces = WordPieceTokenizer.load(run.folder)
    if not run.has_checkpoint:
        words = (
            pieces.vocab_size
            if recipe.pretrained is None
            else load_pretrained_encoder(recipe.pretrained)[0].word_embedding.num_embeddings
        )
        with atomic_write(run.folder / "model.json") as part:
            part.write_text(json.dumps({"vocab_size": words}) + "\n", encoding="utf-8")
    with console.status("tokenising the documents"):
        store = prepare_document_store(
            run.folder / "data" / "train", documents, pieces, replace=not run.has_checkpoint
        )
    if store.skipped.total:
        console.print(f"Of the training data, {store.skipped}", markup=False, soft_wrap=True)


def _build_tokenizer(recipe: PretrainingRecipe, texts: FirstParagraphs) -> WordPieceTokenizer:
    config = recipe.tokenizer
    if recipe.pretrained is not None:
        return load_pretrained_model(recipe.pretrained)[1]
    if config.pretrained is not None:
        return WordPieceTokenizer.load(Path(config.pretrained))
    return WordPieceTokenizer.train(
        texts,
        config.vocab_size,
        lowercase=config.lowercase,
        strip_accents=config.strip_accents,
        initial_alphabet=config.initial_alphabet,
    )


def _init_from_pretrained(model: BertPretrainingModel, source: str) -> None:
    """Take over the weights of what was pretrained before; a head that it does not have stays new."""
    found = load_pretrained_model(source)[0]
    try:
        model.bert.copy_weights_from(found if isinstance(found, Bert) else found.bert)
    except ValueError as error:
        raise InputError(f"pretrained: {source}: {error}; give model: its sizes") from None
    if isinstance(found, BertPretrainingModel):
        for own, given in ((model.mlm_head, found.mlm_head), (model.nsp_head, found.nsp_head)):
            if own is not None and given is not None:
                own.load_state_dict(given.state_dict())


def _use_packing(recipe: PretrainingRecipe, device: torch.device) -> bool:
    if recipe.data.packing == "auto":
        return common.is_packing_fast(recipe.model, recipe.masking.sequence_length, recipe.train, device)
    return recipe.data.packing


# ------------------------------------------------------------------------------------------------- validation


class _PretrainingValidation:
    """Judges a model on held-out documents: both accuracies, perplexity, attention's health."""

    def __init__(self, run: Run, tokenizer: WordPieceTokenizer) -> None:
        self.run, self.tokenizer = run, tokenizer
        self.dataset: PretrainingBatcher | None = None  # read when first asked, by the process that validates

    def __call__(self, model: nn.Module) -> ValidationReport:
        if not isinstance(model, BertPretrainingModel):
            raise InputError(f"a model for pretraining is judged here; {type(model).__name__} came")
        if self.dataset is None:
            self.dataset = build_held_out_dataset(self.run, self.tokenizer, "valid")
        figures = score_model(model, self.dataset).metrics
        some = self.dataset.collate(self.dataset.batches(0)[0][:NUM_HEALTH_EXAMPLES]).to(
            next(model.parameters()).device
        )
        figures |= compute_attention_health(compute_attention_maps(model.bert, some), some.tokens.lengths)
        return ValidationReport(
            figures, select_by="loss", higher_is_better=False, samples=self._format_samples(model, some)
        )

    def _format_samples(self, model: BertPretrainingModel, batch: PretrainingBatch) -> list[str]:
        """What a few sequences look like to the model, and what it says for their hidden words."""
        words, _ = model.logits(batch)
        assert words is not None
        width = batch.tokens.ids.shape[1]
        best = words[:, : self.tokenizer.vocab_size].argmax(-1)
        places, said, wanted = (x.tolist() for x in (batch.masked_indices, best, batch.labels))
        lines = []
        for row, length in enumerate(batch.tokens.lengths[:NUM_SAMPLES]):
            mine = [n for n, place in enumerate(places) if place // width == row]
            tokens = self.tokenizer.ids_to_tokens(batch.tokens.ids[row, 1 : length - 1].tolist())
            pairs = zip(
                *(self.tokenizer.ids_to_tokens(ids[n] for n in mine) for ids in (said, wanted)), strict=True
            )
            told = (one if one == other else f"{one} ({other})" for one, other in pairs)
            lines += [f"  read          {' '.join(tokens)}", f"  said (wanted) {', '.join(told)}"]
        return lines


Recipe = PretrainingRecipe
Options = FillMaskOptions
