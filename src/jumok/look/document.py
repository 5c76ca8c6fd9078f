"""A text with what a model looked at in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Document"]


@dataclass(frozen=True, eq=False)
class Document:
    """A text of n words in S sentences, and how much each word counted.

    ``words`` are as they are read aloud, with pieces merged, and ``before`` has what stood before each, "" or
    " ", so that the text is shown as it was written. Sentence s is ``words[sentences[s]:sentences[s + 1]]``.
    ``weights`` is ``(hops, n)``; a hop adds up to 1 over the whole document. ``within`` has those of the
    sentences, ``(S,)``, where a model has any. ``said`` are classes with probabilities, likeliest first.
    """

    words: tuple[str, ...]
    before: tuple[str, ...]
    sentences: tuple[int, ...]
    weights: NDArray[np.float32]
    within: NDArray[np.float32] | None = None
    said: tuple[tuple[str, float], ...] = ()
    truth: str | None = None
