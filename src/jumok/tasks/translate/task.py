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

from jumok.data.batching.translation import TranslationBatcher
from jumok.data.caches.token_store import TokenStore, prepare_token_store
from jumok.data.readers import word_vectors
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig, TokenizerPair
from jumok.errors import InputError
from jumok.metrics.translation import BleuTokenization
from jumok.models.convolutional import ConvolutionalConfig, ConvolutionalSeq2Seq
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jumok.models.transformer import Transformer, TransformerConfig
from jumok.run import Run
from jumok.tasks import common
from jumok.tasks.translate.data import TranslationData, TranslationDataConfig, TranslationSplit
from jumok.tasks.translate.metrics import build_bleu, compare, compute_perplexity, evaluate
from jumok.tasks.translate.predictor import TranslationDecodeConfig, TranslationOptions, TranslationPredictor
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
    "TranslationOptions",
    "TranslationPredictor",
    "TranslationRecipe",
    "build_model",
    "compare",
    "evaluate",
    "load",
    "train",
]

MODEL_TYPES: dict[str, Any] = {
    "seq2seq": Seq2Seq,
    "convolutional": ConvolutionalSeq2Seq,
    "transformer": Transformer,
}
TranslationModelConfig = Seq2SeqConfig | ConvolutionalConfig | TransformerConfig
NUM_SAMPLES = 3  # sample translations a validation
CHANCE_BLEU = 1.0  # BLEU that a model gets for any word it happens to say; perplexity tells more then
NUM_HEALTH_EXAMPLES = 32  # sentences whose attention is measured at a validation


@dataclass(frozen=True)
class WordVectorsConfig:
    """The ``word_vectors:`` section: files of word vectors (.vec, word2vec) that the embeddings begin from."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    source: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class TranslationEvaluationConfig:
    """The ``evaluation:`` section: how BLEU finds the words of a translation."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    bleu_tokenizer: BleuTokenization | Literal["auto"] = (
        "auto"  # auto: by the language, if ``data.target`` names one
    )


@dataclass(frozen=True)
class TranslationRecipe:
    """Everything that a translation run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["translate"]
    model: Annotated[TranslationModelConfig, pydantic.Field(discriminator="type")]
    data: TranslationDataConfig = field(default_factory=TranslationDataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    word_vectors: WordVectorsConfig = field(default_factory=WordVectorsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: TranslationDecodeConfig = field(default_factory=TranslationDecodeConfig)
    evaluation: TranslationEvaluationConfig = field(default_factory=TranslationEvaluationConfig)


def train(run: Run, console: Console) -> TrainingSummary:
    """Train the model of a run, or go on with it, and say what comes next."""
    recipe: TranslationRecipe = run.recipe
    texts = TranslationData(recipe.data, run.folder)
    with init_distributed(recipe.train.device) as ranks:
        if ranks.is_main:
            _prepare_data(run, texts, console)
        ranks.barrier()
        tokenizers = TokenizerPair.load(run.folder)
        store = TokenStore.open(run.folder / "data" / "train")
        layout = common.resolve_batch_layout(run, ranks, _use_packing(recipe, ranks.device))
        data = TranslationBatcher(
            store, max_tokens=recipe.train.batch_tokens, seed=recipe.train.seed, **layout
        )
        torch.manual_seed(recipe.train.seed)
        model = build_model(recipe, tokenizers)
        if ranks.is_main:
            console.print(_describe_model(recipe, model, tokenizers, len(store)))
        if not run.has_checkpoint:
            _init_from_vectors(recipe, model, tokenizers, console if ranks.is_main else None)
        summary = train_model(
            model,
            data,
            recipe.train,
            run.folder,
            validate=_TranslationValidation(run, tokenizers, texts),
            console=console,
            ranks=ranks,
        )
    if ranks.is_main:
        console.print(common.format_next_commands(run, "translate a text"), markup=False, soft_wrap=True)
    return summary


def load(run: Run, device: str = "auto") -> TranslationPredictor:
    """The trained model of a run, ready to translate."""
    tokenizers = TokenizerPair.load(run.folder)
    model = build_model(run.recipe, tokenizers)
    load_weights(model, run.weights_path)
    return TranslationPredictor(
        run, common.move_to_device(model, device), tokenizers, TranslationData(run.recipe.data, run.folder)
    )


def build_model(recipe: TranslationRecipe, tokenizers: TokenizerPair) -> nn.Module:
    """The model of a recipe, with new weights."""
    try:
        made = MODEL_TYPES[recipe.model.type](
            recipe.model, tokenizers.source.vocab_size, tokenizers.target.vocab_size
        )
    except ValueError as error:
        raise InputError(f"model: {error}") from None
    assert isinstance(made, nn.Module)
    return made


# -------------------------------------------------------------------------------------- before training


def _prepare_data(run: Run, data: TranslationData, console: Console) -> None:
    """Tokenizer and tokenised training data, unless they are there already."""
    recipe: TranslationRecipe = run.recipe
    with console.status("reading the training data"):
        corpus = data.train_corpus()
    if not any(run.folder.glob("tokenizer*.json")):
        with console.status("learning the vocabulary"):
            TokenizerPair.train(corpus, recipe.tokenizer).save(run.folder)
    tokenizers = TokenizerPair.load(run.folder)
    with console.status("tokenising the training data"):
        store = prepare_token_store(
            run.folder / "data" / "train",
            corpus,
            tokenizers,
            max_tokens=recipe.data.max_tokens,
            replace=not run.has_checkpoint,
        )
    if store.skipped.total:
        console.print(f"Of the training data, {store.skipped}", markup=False, soft_wrap=True)


def _init_from_vectors(
    recipe: TranslationRecipe, model: Any, tokenizers: TokenizerPair, console: Console | None
) -> None:
    for side in ("source", "target"):
        path = getattr(recipe.word_vectors, side)
        if path is not None:
            tokenizer: Tokenizer = getattr(tokenizers, side)
            words = tokenizer.ids_to_tokens(range(tokenizer.vocab_size))
            found = word_vectors.fill_embedding(
                getattr(model, f"{side}_embedding"), words, word_vectors.read_word_vectors(Path(path), words)
            )
            if console is not None:
                console.print(f"{found:,} of {len(words):,} {side} words begin from {path}")


def _use_packing(recipe: TranslationRecipe, device: torch.device) -> bool:
    model, asked = recipe.model, recipe.data.packing
    if not isinstance(model, TransformerConfig):
        if asked is True:
            raise InputError(f"data.packing: true, but a {model.type} model takes padded sentences: use auto")
        return False
    if asked == "auto":
        longest = recipe.data.max_tokens + 1  # with the token that begins or ends a sentence
        return common.is_packing_fast(model, longest, recipe.train, device)
    return asked


def _describe_model(
    recipe: TranslationRecipe, model: nn.Module, tokenizers: TokenizerPair, num_pairs: int
) -> str:
    weights = sum(weight.numel() for weight in model.parameters())
    words = f"{tokenizers.source.vocab_size:,}"
    if not tokenizers.is_shared:
        words += f" and {tokenizers.target.vocab_size:,}"
    return f"{recipe.model.type}: {weights / 1e6:.1f} M weights, vocabulary of {words}, {num_pairs:,} pairs"


# ------------------------------------------------------------------------------------------------- validation


class _TranslationValidation:
    """Judges a model on the validation data: BLEU of greedy translations, perplexity, attention's health."""

    def __init__(self, run: Run, tokenizers: TokenizerPair, data: TranslationData) -> None:
        self.run, self.tokenizers, self.data = run, tokenizers, data
        self.split: TranslationSplit | None = None  # read when first asked, by the process that validates
        self.predictor: TranslationPredictor | None = (
            None  # kept while the model is the same: so are its CUDA graphs
        )

    def __call__(self, model: nn.Module) -> ValidationReport:
        if self.split is None:
            self.split = self.data.valid_split()
        if self.predictor is None or self.predictor.model is not model:
            self.predictor = TranslationPredictor(self.run, model, self.tokenizers, self.data)
        translator, pairs = self.predictor, self.split.examples
        said = list(translator.predict([pair.source for pair in pairs], TranslationOptions(beam_size=1)))
        bleu = build_bleu(self.run).score([one.translation for one in said], [pair.target for pair in pairs])
        figures = {"bleu": bleu.value, "perplexity": compute_perplexity(translator, pairs)}
        maps, batch = translator.compute_attention_maps(pairs[:NUM_HEALTH_EXAMPLES])
        weights = [one.weights for one in maps]
        figures |= compute_attention_health(weights, batch.target.lengths, batch.source.lengths)
        samples = [
            line
            for pair, one in itertools.islice(zip(pairs, said, strict=True), NUM_SAMPLES)
            for line in (
                f"  source  {pair.source}",
                f"  said    {one.translation}",
                f"  wanted  {pair.target}",
            )
        ]
        return ValidationReport(
            figures, select_by="bleu", tie_breaker="perplexity", chance_level=CHANCE_BLEU, samples=samples
        )


Recipe = TranslationRecipe
Options = TranslationOptions
