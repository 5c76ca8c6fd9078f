"""The task of pretraining: BERT learns words that are hidden, and whether one segment follows another."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rich.console import Console
from torch import nn

from jumok.annotated import Masked
from jumok.data.documents import Paragraphs
from jumok.data.masking import MaskedData, MaskingConfig
from jumok.data.tokenised import Tokenised, prepare
from jumok.data.wordpiece import WordPieceConfig, WordPieces
from jumok.errors import InputError
from jumok.files import read_json, written
from jumok.models.bert import Bert, BertConfig, Pretraining
from jumok.run import Run
from jumok.tasks import common
from jumok.tasks.cloze import compare, evaluate, held_out, judge
from jumok.tasks.filler import Filler, Search, attention_maps
from jumok.tasks.library import DataConfig, Library
from jumok.tasks.objects import of_pairs as objects_of
from jumok.tasks.origin import From, opened, taken
from jumok.training import Report, Settings, Summary, attention_health, joined, load_weights
from jumok.training import train as train_model

__all__ = ["Filler", "Recipe", "Search", "compare", "evaluate", "load", "make_model", "objects_of", "train"]

SHOWN = 3  # sequences that are shown with their hidden words at a validation
LOOKED_AT = 32  # sequences whose attention is measured


@dataclass(frozen=True)
class Recipe:
    """Everything that a pretraining run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["pretrain"]
    # A run or a Hugging Face folder of the same sizes to go on from, with other text; null: new weights.
    from_: From = None
    model: BertConfig = field(default_factory=BertConfig)
    data: DataConfig = field(default_factory=DataConfig)
    text: WordPieceConfig = field(default_factory=WordPieceConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    train: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.masking.length > self.model.positions:
            raise ValueError(
                f"masking.length={self.masking.length} is more than model.positions={self.model.positions}"
            )
        if self.model.segments < 2 or not self.model.pooler:
            raise ValueError("model: to learn which segment is next takes segments=2 or more, and a pooler")
        if self.train.tokens < 2 * self.masking.length:
            raise ValueError(
                f"train.tokens={self.train.tokens}: a batch has two sequences of masking.length="
                f"{self.masking.length} or more"
            )


def train(run: Run, console: Console) -> Summary:
    """Train the model of a run, or go on with it, and say what comes next."""
    recipe: Recipe = run.recipe
    with joined(recipe.train.device) as ranks:
        if ranks.main:
            _prepare(run, console)
        ranks.wait()
        pieces = WordPieces.load(run.folder)
        store = Tokenised.open(run.folder / "data" / "train")
        layout = common.layout(run, ranks, _is_packed(recipe, ranks.device))
        data = MaskedData(
            store, pieces, recipe.masking, tokens=recipe.train.tokens, seed=recipe.train.seed, **layout
        )
        torch.manual_seed(recipe.train.seed)
        model = make_model(run, pieces)
        if recipe.from_ is not None and not run.has_begun:
            _begin(model, recipe.from_)
        if ranks.main:
            weights = sum(weight.numel() for weight in model.parameters())
            told = f"bert: {weights / 1e6:.1f} M weights, vocabulary of {pieces.size:,}; {store.told}"
            console.print(told, markup=False, soft_wrap=True)
        summary = train_model(
            model,
            data,
            recipe.train,
            run.folder,
            validate=_Validation(run, pieces),
            console=console,
            ranks=ranks,
        )
    if ranks.main:
        told = common.next_commands(run, "say the hidden word of a text", "… [MASK] …")
        console.print(told, markup=False, soft_wrap=True)
    return summary


def load(run: Run, device: str = "auto") -> Filler:
    """The trained model of a run, ready to say hidden words."""
    pieces = WordPieces.load(run.folder)
    model = make_model(run, pieces)
    load_weights(model, run.weights)
    return Filler(run, common.placed(model, device), pieces)


def make_model(run: Run, pieces: WordPieces) -> Pretraining:
    """The model of a run, with new weights. What it began from may have more words than pieces."""
    path = run.folder / "model.json"
    told = read_json(path, dict) if path.is_file() else {}
    vocabulary = told.get("vocabulary", pieces.size)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise InputError(f"{path} is damaged: expected a number of words as vocabulary")
    return Pretraining(run.recipe.model, vocabulary)


# -------------------------------------------------------------------------------------- before training


def _prepare(run: Run, console: Console) -> None:
    """Vocabulary and tokenised documents, unless they are there already."""
    recipe: Recipe = run.recipe
    with console.status("reading the documents"):
        documents = Library(recipe.data, run.folder).train()
    if not (run.folder / "tokenizer.json").is_file():
        with console.status("learning the vocabulary"):
            _vocabulary(recipe, Paragraphs(documents, recipe.text.documents)).save(run.folder)
    pieces = WordPieces.load(run.folder)
    if not run.has_begun:
        words = pieces.size if recipe.from_ is None else taken(recipe.from_)[0].word_embedding.num_embeddings
        with written(run.folder / "model.json") as part:
            part.write_text(json.dumps({"vocabulary": words}) + "\n", encoding="utf-8")
    with console.status("tokenising the documents"):
        store = prepare(run.folder / "data" / "train", documents, pieces, replace=not run.has_begun)
    if store.skipped.total:
        console.print(f"Of the training data, {store.skipped}", markup=False, soft_wrap=True)


def _vocabulary(recipe: Recipe, texts: Paragraphs) -> WordPieces:
    config = recipe.text
    if recipe.from_ is not None:
        return opened(recipe.from_)[1]
    if config.folder is not None:
        return WordPieces.load(Path(config.folder))
    return WordPieces.train(
        texts,
        config.size,
        lower=config.lower,
        strip_accents=config.strip_accents,
        characters=config.characters,
    )


def _begin(model: Pretraining, name: str) -> None:
    """Take over the weights of what was pretrained before; a head that it does not have stays new."""
    found = opened(name)[0]
    try:
        model.bert.begin_from(found if isinstance(found, Bert) else found.bert)
    except ValueError as error:
        raise InputError(f"from: {name}: {error}; give model: its sizes") from None
    if isinstance(found, Pretraining):
        for own, given in ((model.words, found.words), (model.next, found.next)):
            if own is not None and given is not None:
                own.load_state_dict(given.state_dict())


def _is_packed(recipe: Recipe, device: torch.device) -> bool:
    if recipe.data.packed == "auto":
        return common.packs_fast(recipe.model, recipe.masking.length, recipe.train, device)
    return recipe.data.packed


# ------------------------------------------------------------------------------------------------- validation


class _Validation:
    """Judges a model on held-out documents: both accuracies, perplexity, attention's health."""

    def __init__(self, run: Run, pieces: WordPieces) -> None:
        self.run, self.pieces = run, pieces
        self.data: MaskedData | None = None  # read when first asked, by the process that validates

    def __call__(self, model: nn.Module) -> Report:
        if not isinstance(model, Pretraining):
            raise InputError(f"a model for pretraining is judged here; {type(model).__name__} came")
        if self.data is None:
            self.data = held_out(self.run, self.pieces, "valid")
        figures = judge(model, self.data).figures
        some = self.data.collate(self.data.batches(0)[0][:LOOKED_AT]).to(next(model.parameters()).device)
        figures |= attention_health(attention_maps(model.bert, some), some.tokens.lengths)
        return Report(figures, best="loss", higher_is_better=False, samples=self._samples(model, some))

    def _samples(self, model: Pretraining, batch: Masked) -> list[str]:
        """What a few sequences look like to the model, and what it says for their hidden words."""
        words, _ = model.logits(batch)
        assert words is not None
        width = batch.tokens.ids.shape[1]
        best = words[:, : self.pieces.size].argmax(-1)
        places, said, wanted = (x.tolist() for x in (batch.places, best, batch.labels))
        lines = []
        for row, length in enumerate(batch.tokens.lengths[:SHOWN]):
            mine = [n for n, place in enumerate(places) if place // width == row]
            tokens = self.pieces.tokens(batch.tokens.ids[row, 1 : length - 1].tolist())
            pairs = zip(*(self.pieces.tokens(ids[n] for n in mine) for ids in (said, wanted)), strict=True)
            told = (one if one == other else f"{one} ({other})" for one, other in pairs)
            lines += [f"  read          {' '.join(tokens)}", f"  said (wanted) {', '.join(told)}"]
        return lines
