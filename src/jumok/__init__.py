"""jumok (주목, Korean for *attention*): train, run, serve and show attention models."""

from jumok.attention import masks, positions, scores
from jumok.attention.cache import Cache
from jumok.attention.core import attend, explain, mix, weights
from jumok.attention.heads import MultiHead
from jumok.errors import InputError, JumokError, MissingExtra

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
