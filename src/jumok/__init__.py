"""jumok (주목, Korean for *attention*): attention for PyTorch that you can read, trust and look at."""

from importlib.metadata import PackageNotFoundError, version

from jumok.attention import masks, positions, scores
from jumok.attention.cache import Cache
from jumok.attention.core import attend, explain, mix, weights
from jumok.attention.heads import MultiHead
from jumok.errors import InputError, JumokError, MissingExtra

try:
    __version__ = version("jumok")
except PackageNotFoundError:  # used from a source tree
    __version__ = "0+source"

__all__ = [
    "Cache",
    "InputError",
    "JumokError",
    "MissingExtra",
    "MultiHead",
    "attend",
    "explain",
    "masks",
    "mix",
    "positions",
    "scores",
    "weights",
]
