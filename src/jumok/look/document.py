"""A text with what a model looked at in it: words, sentences, and how much each counts.

>>> document = Document(
...     words=("dull", ".", "i", "laughed"), before=("", "", " ", " "), sentences=(0, 2, 4),
...     weights=np.array([[0.5, 0.125, 0.125, 0.25]]), said=(("negative", 0.9), ("positive", 0.1)),
... )
>>> document.text, document.by_sentence()
('dull. i laughed', array([0.625, 0.375], dtype=float32))
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from jumok.errors import InputError
from jumok.look.tiles import Numbers, pack

__all__ = ["Document", "plain", "told"]


@dataclass(frozen=True, eq=False)
class Document:
    """Words as one reads them, ``n`` of them in ``S`` sentences, with the weights of one or more hops.

    The text is ``before[0] + words[0] + before[1] + …``, so that it is shown as it was written. Sentence s is
    ``words[sentences[s] : sentences[s + 1]]``. A hop's weights add up to 1 over the whole document; of a
    hierarchical model, which has one hop, a word's is that of its sentence times its own in the sentence.
    """

    words: tuple[str, ...]
    before: tuple[str, ...]
    sentences: tuple[int, ...]  # S + 1 edges, from 0 to n
    weights: NDArray[np.float32]  # (hops, n)
    within: NDArray[np.float32] | None = None  # (S,): of each sentence; None: the sum over its words
    said: tuple[tuple[str, float], ...] = ()  # classes with their probabilities, the likeliest first
    truth: str | None = None

    def __post_init__(self) -> None:
        for name in ("words", "before", "sentences", "said"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "weights", plain(self.weights))
        _check_texts(self.words, self.before)
        _check_edges(self.sentences, len(self.words))
        _check_weights("weights", self.weights, 2, len(self.words), "(hops, words)")
        if self.within is not None:
            object.__setattr__(self, "within", plain(self.within))
            _check_weights("within", self.within, 1, len(self.sentences) - 1, "(sentences,)")
            if self.hops > 1:
                raise InputError(
                    f"within came with {self.hops} hops; expected None: a sentence's weight is the sum "
                    "over its words, in each hop"
                )
        _check_said(self.said)

    @property
    def text(self) -> str:
        """All of it, as it was written."""
        return "".join(gap + word for gap, word in zip(self.before, self.words, strict=True))

    @property
    def hops(self) -> int:
        return len(self.weights)

    def of(self, hop: int | None = None) -> Numbers:
        """The weights ``(n,)`` of a hop; None: the mean of all."""
        if hop is None:
            return np.asarray(self.weights.mean(0), np.float32)
        if not 0 <= hop < self.hops:
            raise InputError(f"hop {hop} was asked for; there are {self.hops}: 0 to {self.hops - 1}")
        return np.asarray(self.weights[hop])

    def by_sentence(self, hop: int | None = None) -> Numbers:
        """How much each sentence counts ``(S,)``."""
        summed = np.add.reduceat(self.of(hop), self.sentences[:-1])
        return summed if self.within is None else self.within

    def in_sentences(self, hop: int | None = None) -> Numbers:
        """How much each word counts ``(n,)`` within its sentence, whose weights add up to 1 (or are 0)."""
        weights = self.of(hop)
        sums = np.repeat(np.add.reduceat(weights, self.sentences[:-1]), np.diff(self.sentences))
        return np.asarray(weights / np.where(sums > 0, sums, 1), np.float32)


def told(document: Document) -> dict[str, Any]:
    """For the viewer, as plain JSON; numbers packed as :mod:`jumok.look.tiles` says, exact."""
    return {
        "words": list(document.words),
        "before": list(document.before),
        "sentences": [int(edge) for edge in document.sentences],
        "hops": document.hops,
        "weights": _packed(document.weights),
        "within": None if document.within is None else _packed(document.within[None]),
        "said": [[label, float(chance)] for label, chance in document.said],
        "truth": document.truth,
    }


def _packed(cells: Numbers) -> str:
    return base64.b64encode(pack(cells, exact=True)).decode()


def plain(weights: Any) -> Numbers:
    """As float32 on the host, whatever it was."""
    if isinstance(weights, Tensor):
        weights = weights.detach().cpu().float()
    try:
        return np.asarray(weights, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"the weights are no array of numbers ({error})") from error


def _check_texts(words: Sequence[str], before: Sequence[str]) -> None:
    if not words:
        raise InputError("a document without words came; expected at least one")
    if len(before) != len(words):
        raise InputError(
            f"{len(words)} words and {len(before)} texts before them came; expected one before each, "
            'as in words=("so", "good", "!"), before=("", " ", "")'
        )
    for name, texts in (("words", words), ("before", before)):
        for n, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(f"{name}[{n}] is {text!r}; expected a text")


def _check_edges(edges: Sequence[int], words: int) -> None:
    whole = all(isinstance(edge, int | np.integer) for edge in edges)
    if not whole or len(edges) < 2 or edges[0] != 0 or edges[-1] != words:
        shown = ", ".join(map(str, edges[:4])) + (", …" if len(edges) > 4 else "")
        raise InputError(
            f"sentences=({shown}) came; expected whole numbers from 0 to {words}, where sentences begin and "
            f"the last one ends: (0, {words}) is one sentence"
        )
    for n, (first, last) in enumerate(pairwise(edges)):
        if first >= last:
            raise InputError(
                f"sentence {n} goes from word {first} to {last}; expected edges that increase: leave out "
                "sentences without words"
            )


def _check_weights(name: str, weights: Numbers, axes: int, length: int, expected: str) -> None:
    if weights.ndim != axes or weights.shape[-1] != length or not weights.size:
        raise InputError(
            f"{name} of shape {weights.shape} came; expected {expected}, the last of them {length}"
        )
    bad = ~np.isfinite(weights) | (weights < 0)
    if bad.any():
        at = tuple(int(n) for n in np.argwhere(bad)[0])
        place = at[0] if axes == 1 else at
        raise InputError(f"{name}[{place}] is {weights[at]}; expected finite numbers from 0 on")


def _check_said(said: Sequence[tuple[str, float]]) -> None:
    for n, (label, chance) in enumerate(said):
        if not 0 <= chance <= 1 + 1e-6:  # false for NaN too
            raise InputError(f"said[{n}], {label!r}, has the probability {chance}; expected 0 to 1")
        if n and chance > said[n - 1][1] + 1e-6:
            raise InputError(f"said[{n}], {label!r}, is likelier than the one before; the likeliest is first")
