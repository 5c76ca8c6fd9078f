"""jumok (주목, Korean for *attention*): train, run, serve and show attention models."""

from jumok.attention import masks, scores
from jumok.attention.core import attend, explain, mix, weights
from jumok.errors import InputError, JumokError, MissingExtra

__all__ = [
    "InputError",
    "JumokError",
    "MissingExtra",
    "attend",
    "explain",
    "masks",
    "mix",
    "scores",
    "weights",
]
