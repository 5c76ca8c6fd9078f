"""jumok (주목, Korean for *attention*): attention for PyTorch that you can read, trust and look at."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jumok.attention import masks, positions, scores
from jumok.attention.cache import Cache
from jumok.attention.core import attend, explain, mix, weights
from jumok.attention.heads import MultiHead
from jumok.errors import InputError, JumokError, MissingExtra

try:
    __version__ = version("jumok")
except PackageNotFoundError:  # used from a source tree
    __version__ = "0+source"


def load(folder: str | Path, device: str = "auto") -> Any:
    """The trained model of a run, ready to use: it has ``.model`` and ``.tokenizer``.

    >>> translator = jumok.load("runs/bahdanau")  # doctest: +SKIP
    >>> translator.translate("this is an example sentence").text  # doctest: +SKIP
    '이것은 예문이다'
    """
    from jumok.run import Run
    from jumok.tasks import of

    run = Run.open(folder)
    return of(run.recipe.task).load(run, device)


__all__ = [
    "Cache",
    "InputError",
    "JumokError",
    "MissingExtra",
    "MultiHead",
    "attend",
    "explain",
    "load",
    "masks",
    "mix",
    "positions",
    "scores",
    "weights",
]
