"""The task of translation: its recipes, its training, and what the commands after training need of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import torch
from rich.console import Console
from torch import nn

from jumok.data import vectors
from jumok.data.batches import PairData
from jumok.data.store import Store, prepare
from jumok.data.text import TextConfig, Tokenizer, Tokenizers
from jumok.errors import InputError
from jumok.metrics.translation import Tokenization
from jumok.models.convolutional import Convolutional, ConvolutionalConfig
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jumok.models.transformer import Transformer, TransformerConfig
from jumok.run import Run
from jumok.tasks import common
from jumok.tasks.corpora import DataConfig, Split, Texts
from jumok.tasks.evaluation import bleu_of, compare, evaluate, perplexity
from jumok.tasks.translator import DecodeConfig, Search, Translator
from jumok.training import Report, Settings, Summary, attention_health, joined, load_weights
from jumok.training import train as train_model

__all__ = ["Recipe", "Search", "Translator", "compare", "evaluate", "load", "make_model", "train"]

MODELS: dict[str, Any] = {"seq2seq": Seq2Seq, "convolutional": Convolutional, "transformer": Transformer}
Config = Seq2SeqConfig | ConvolutionalConfig | TransformerConfig
SHOWN = 3  # sample translations a validation
CHANCE = 1.0  # BLEU that a model gets for any word it happens to say; perplexity tells more then
LOOKED_AT = 32  # sentences whose attention is measured at a validation


@dataclass(frozen=True)
class VectorsConfig:
    """The ``vectors:`` section: files of word vectors (.vec, word2vec) that the embeddings begin from."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    source: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class ScoreConfig:
    """The ``score:`` section: how BLEU finds the words of a translation."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    bleu: Tokenization | Literal["auto"] = "auto"  # auto: by the language, if ``data.target`` names one


@dataclass(frozen=True)
class Recipe:
    """Everything that a translation run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["translate"]
    model: Annotated[Config, pydantic.Field(discriminator="kind")]
    data: DataConfig = field(default_factory=DataConfig)
    text: TextConfig = field(default_factory=TextConfig)
    vectors: VectorsConfig = field(default_factory=VectorsConfig)
    train: Settings = field(default_factory=Settings)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)


def train(run: Run, console: Console) -> Summary:
    """Train the model of a run, or go on with it, and say what comes next."""
    recipe: Recipe = run.recipe
    texts = Texts(recipe.data, run.folder)
    with joined(recipe.train.device) as ranks:
        if ranks.main:
            _prepare(run, texts, console)
        ranks.wait()
        tokenizers = Tokenizers.load(run.folder)
        store = Store.open(run.folder / "data" / "train")
        layout = common.layout(run, ranks, _is_packed(recipe, ranks.device))
        data = PairData(store, tokens=recipe.train.tokens, seed=recipe.train.seed, **layout)
        torch.manual_seed(recipe.train.seed)
        model = make_model(recipe, tokenizers)
        if ranks.main:
            console.print(_told(recipe, model, tokenizers, len(store)))
        if not run.has_begun:
            _begin_from_vectors(recipe, model, tokenizers, console if ranks.main else None)
        summary = train_model(
            model,
            data,
            recipe.train,
            run.folder,
            validate=_Validation(run, tokenizers, texts),
            console=console,
            ranks=ranks,
        )
    if ranks.main:
        console.print(common.next_commands(run, "translate a text"), markup=False, soft_wrap=True)
    return summary


def load(run: Run, device: str = "auto") -> Translator:
    """The trained model of a run, ready to translate."""
    tokenizers = Tokenizers.load(run.folder)
    model = make_model(run.recipe, tokenizers)
    load_weights(model, run.weights)
    return Translator(run, common.placed(model, device), tokenizers, Texts(run.recipe.data, run.folder))


def make_model(recipe: Recipe, tokenizers: Tokenizers) -> nn.Module:
    """The model of a recipe, with new weights."""
    try:
        made = MODELS[recipe.model.kind](recipe.model, tokenizers.source.size, tokenizers.target.size)
    except ValueError as error:
        raise InputError(f"model: {error}") from None
    assert isinstance(made, nn.Module)
    return made


# -------------------------------------------------------------------------------------- before training


def _prepare(run: Run, texts: Texts, console: Console) -> None:
    """Tokenizer and tokenised training data, unless they are there already."""
    recipe: Recipe = run.recipe
    with console.status("reading the training data"):
        corpus = texts.train()
    if not any(run.folder.glob("tokenizer*.json")):
        with console.status("learning the vocabulary"):
            Tokenizers.train(corpus, recipe.text).save(run.folder)
    tokenizers = Tokenizers.load(run.folder)
    with console.status("tokenising the training data"):
        store = prepare(
            run.folder / "data" / "train",
            corpus,
            tokenizers,
            longest=recipe.data.longest,
            replace=not run.has_begun,
        )
    if store.skipped.total:
        console.print(f"Of the training data, {store.skipped}", markup=False, soft_wrap=True)


def _begin_from_vectors(recipe: Recipe, model: Any, tokenizers: Tokenizers, console: Console | None) -> None:
    for side in ("source", "target"):
        path = getattr(recipe.vectors, side)
        if path is not None:
            tokenizer: Tokenizer = getattr(tokenizers, side)
            words = tokenizer.pieces(range(tokenizer.size))
            found = vectors.fill(getattr(model, f"{side}_embedding"), words, vectors.read(Path(path), words))
            if console is not None:
                console.print(f"{found:,} of {len(words):,} {side} words begin from {path}")


def _is_packed(recipe: Recipe, device: torch.device) -> bool:
    model, asked = recipe.model, recipe.data.packed
    if not isinstance(model, TransformerConfig):
        if asked is True:
            raise InputError(f"data.packed: true, but a {model.kind} model takes padded sentences: use auto")
        return False
    if asked == "auto":
        longest = recipe.data.longest + 1  # with the token that begins or ends a sentence
        return common.packs_fast(model, longest, recipe.train, device)
    return asked


def _told(recipe: Recipe, model: nn.Module, tokenizers: Tokenizers, pairs: int) -> str:
    weights = sum(weight.numel() for weight in model.parameters())
    words = f"{tokenizers.source.size:,}"
    if not tokenizers.joint:
        words += f" and {tokenizers.target.size:,}"
    return f"{recipe.model.kind}: {weights / 1e6:.1f} M weights, vocabulary of {words}, {pairs:,} pairs"


# ------------------------------------------------------------------------------------------------- validation


class _Validation:
    """Judges a model on the validation data: BLEU of greedy translations, perplexity, attention's health."""

    def __init__(self, run: Run, tokenizers: Tokenizers, texts: Texts) -> None:
        self.run, self.tokenizers, self.texts = run, tokenizers, texts
        self.split: Split | None = None  # read when first asked, by the process that validates
        self.translator: Translator | None = None  # kept while the model is the same: so are its CUDA graphs

    def __call__(self, model: nn.Module) -> Report:
        if self.split is None:
            self.split = self.texts.valid()
        if self.translator is None or self.translator.model is not model:
            self.translator = Translator(self.run, model, self.tokenizers, self.texts)
        translator, pairs = self.translator, self.split.examples
        said = list(translator.predict([pair.source for pair in pairs], Search(beam=1)))
        bleu = bleu_of(self.run).score([one.text for one in said], [pair.target for pair in pairs])
        figures = {"bleu": bleu.value, "perplexity": perplexity(translator, pairs)}
        maps, batch = translator.maps(pairs[:LOOKED_AT])
        weights = [one.weights for one in maps]
        figures |= attention_health(weights, batch.target.lengths, batch.source.lengths)
        samples = [
            line
            for pair, one in itertools.islice(zip(pairs, said, strict=True), SHOWN)
            for line in (f"  source  {pair.source}", f"  said    {one.text}", f"  wanted  {pair.target}")
        ]
        return Report(figures, best="bleu", tie="perplexity", chance=CHANCE, samples=samples)
