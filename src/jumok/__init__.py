"""jumok (주목, Korean for *attention*): attention models for PyTorch that you can read, trust and inspect."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jumok.errors import InputError, JumokError, MissingExtra

if TYPE_CHECKING:
    from jumok.attention import masks, positions, scores
    from jumok.attention.core import attend, explain, mix, weights
    from jumok.attention.heads import MultiHead
    from jumok.attention.kv_cache import KVCache
    from jumok.look.capture.monitor import monitor
    from jumok.look.capture.watch import watch
    from jumok.look.views.ablation import knock_out

try:
    __version__ = version("jumok")
except PackageNotFoundError:  # not installed: imported from a source tree
    __version__ = "0+source"

# Imported on first access, so that `jumok --help` does not wait for torch.
_LAZY_MODULES = {
    "KVCache": "jumok.attention.kv_cache",
    "MultiHead": "jumok.attention.heads",
    "attend": "jumok.attention.core",
    "knock_out": "jumok.look.views.ablation",
    "monitor": "jumok.look.capture.monitor",
    "watch": "jumok.look.capture.watch",
    "explain": "jumok.attention.core",
    "mix": "jumok.attention.core",
    "weights": "jumok.attention.core",
    "masks": "jumok.attention",
    "positions": "jumok.attention",
    "scores": "jumok.attention",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'jumok' has no attribute {name!r}")
    module = importlib.import_module(_LAZY_MODULES[name])
    value = getattr(module, name, None) or importlib.import_module(f"{_LAZY_MODULES[name]}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_MODULES})


def load(folder: str | Path, device: str = "auto") -> Any:
    """Load the trained model of a run or the BERT of a Hugging Face folder, as ``.model`` and ``.tokenizer``.

    >>> translator = jumok.load("runs/bahdanau")  # doctest: +SKIP
    >>> translator.translate("this is an example sentence").translation  # doctest: +SKIP
    '이것은 예문이다'
    >>> bert = jumok.load("all-MiniLM-L6-v2")  # doctest: +SKIP
    >>> ids, segments = bert.tokenizer.join_segments(*bert.tokenizer.encode(["one text"]))  # doctest: +SKIP
    >>> bert.model(torch.tensor([ids])).hidden.shape  # doctest: +SKIP
    torch.Size([1, 4, 384])
    """
    from jumok.run import Run
    from jumok.tasks import load_predictor

    folder = Path(folder)
    if (folder / "config.json").is_file() and not (folder / "recipe.yaml").is_file():
        from jumok.export.bert import load_bert

        return load_bert(folder, device)
    run = Run.open(folder)
    return load_predictor(run, device)


__all__ = [
    "InputError",
    "JumokError",
    "KVCache",
    "MissingExtra",
    "MultiHead",
    "attend",
    "explain",
    "knock_out",
    "load",
    "masks",
    "mix",
    "monitor",
    "positions",
    "scores",
    "watch",
    "weights",
]
