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
from jumok.look.viewer.tiles import FloatArray, pack

__all__ = ["AttendedDocument", "document_to_json", "to_float32_array"]


@dataclass(frozen=True, eq=False)
class AttendedDocument:
    """Words as one reads them, ``n`` of them in ``S`` sentences, with the weights of one or more hops.

    The text is ``separators[0] + num_words[0] + separators[1] + …``, so that it is shown as it was written. Sentence s is
    ``num_words[sentence_offsets[s] : sentence_offsets[s + 1]]``. A hop's weights add up to 1 over the whole document; of a
    hierarchical model, which has one hop, a word's is that of its sentence times its own in the sentence.
    """

    words: tuple[str, ...]
    separators: tuple[str, ...]
    sentence_offsets: tuple[int, ...]  # S + 1 edges, from 0 to n
    weights: NDArray[np.float32]  # (hops, n)
    sentence_weights: NDArray[np.float32] | None = (
        None  # (S,): of each sentence; None: the sum over its words
    )
    class_probabilities: tuple[
        tuple[str, float], ...
    ] = ()  # classes with their probabilities, the likeliest first
    label: str | None = None

    def __post_init__(self) -> None:
        for name in ("words", "before", "sentences", "said"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "weights", to_float32_array(self.weights))
        _check_texts(self.words, self.separators)
        _check_sentence_offsets(self.sentence_offsets, len(self.words))
        _check_weights("weights", self.weights, 2, len(self.words), "(hops, words)")
        if self.sentence_weights is not None:
            object.__setattr__(self, "within", to_float32_array(self.sentence_weights))
            _check_weights("within", self.sentence_weights, 1, len(self.sentence_offsets) - 1, "(sentences,)")
            if self.num_hops > 1:
                raise InputError(
                    f"within came with {self.num_hops} hops; expected None: a sentence's weight is the sum "
                    "over its words, in each hop"
                )
        _check_probabilities(self.class_probabilities)

    @property
    def text(self) -> str:
        """All of it, as it was written."""
        return "".join(gap + word for gap, word in zip(self.separators, self.words, strict=True))

    @property
    def num_hops(self) -> int:
        return len(self.weights)

    def get_word_weights(self, hop: int | None = None) -> FloatArray:
        """The weights ``(n,)`` of a hop; None: the mean of all."""
        if hop is None:
            return np.asarray(self.weights.mean(0), np.float32)
        if not 0 <= hop < self.num_hops:
            raise InputError(f"hop {hop} was asked for; there are {self.num_hops}: 0 to {self.num_hops - 1}")
        return np.asarray(self.weights[hop])

    def get_sentence_weights(self, hop: int | None = None) -> FloatArray:
        """How much each sentence counts ``(S,)``."""
        summed = np.add.reduceat(self.get_word_weights(hop), self.sentence_offsets[:-1])
        return summed if self.sentence_weights is None else self.sentence_weights

    def normalize_within_sentences(self, hop: int | None = None) -> FloatArray:
        """How much each word counts ``(n,)`` within its sentence, whose weights add up to 1 (or are 0)."""
        weights = self.get_word_weights(hop)
        sums = np.repeat(np.add.reduceat(weights, self.sentence_offsets[:-1]), np.diff(self.sentence_offsets))
        return np.asarray(weights / np.where(sums > 0, sums, 1), np.float32)


def document_to_json(document: AttendedDocument) -> dict[str, Any]:
    """For the viewer, as plain JSON; numbers packed as :mod:`jumok.look.tiles` says, exact."""
    return {
        "words": list(document.words),
        "before": list(document.separators),
        "sentences": [int(edge) for edge in document.sentence_offsets],
        "hops": document.num_hops,
        "weights": _pack_base64(document.weights),
        "within": None
        if document.sentence_weights is None
        else _pack_base64(document.sentence_weights[None]),
        "said": [[label, float(chance)] for label, chance in document.class_probabilities],
        "truth": document.label,
    }


def _pack_base64(cells: FloatArray) -> str:
    return base64.b64encode(pack(cells, exact=True)).decode()


def to_float32_array(weights: Any) -> FloatArray:
    """As float32 on the host, whatever it was."""
    if isinstance(weights, Tensor):
        weights = weights.detach().cpu().float()
    try:
        return np.asarray(weights, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"the weights are no array of numbers ({error})") from error


def _check_texts(words: Sequence[str], separators: Sequence[str]) -> None:
    if not words:
        raise InputError("a document without words came; expected at least one")
    if len(separators) != len(words):
        raise InputError(
            f"{len(words)} words and {len(separators)} texts before them came; expected one before each, "
            'as in words=("so", "good", "!"), before=("", " ", "")'
        )
    for name, texts in (("words", words), ("before", separators)):
        for n, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(f"{name}[{n}] is {text!r}; expected a text")


def _check_sentence_offsets(offsets: Sequence[int], num_words: int) -> None:
    whole = all(isinstance(edge, int | np.integer) for edge in offsets)
    if not whole or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != num_words:
        shown = ", ".join(map(str, offsets[:4])) + (", …" if len(offsets) > 4 else "")
        raise InputError(
            f"sentences=({shown}) came; expected whole numbers from 0 to {num_words}, where sentences begin and "
            f"the last one ends: (0, {num_words}) is one sentence"
        )
    for n, (first, last) in enumerate(pairwise(offsets)):
        if first >= last:
            raise InputError(
                f"sentence {n} goes from word {first} to {last}; expected edges that increase: leave out "
                "sentences without words"
            )


def _check_weights(name: str, weights: FloatArray, num_axes: int, length: int, expected: str) -> None:
    if weights.ndim != num_axes or weights.shape[-1] != length or not weights.size:
        raise InputError(
            f"{name} of shape {weights.shape} came; expected {expected}, the last of them {length}"
        )
    bad = ~np.isfinite(weights) | (weights < 0)
    if bad.any():
        at = tuple(int(n) for n in np.argwhere(bad)[0])
        place = at[0] if num_axes == 1 else at
        raise InputError(f"{name}[{place}] is {weights[at]}; expected finite numbers from 0 on")


def _check_probabilities(probabilities: Sequence[tuple[str, float]]) -> None:
    for n, (label, chance) in enumerate(probabilities):
        if not 0 <= chance <= 1 + 1e-6:  # false for NaN too
            raise InputError(f"said[{n}], {label!r}, has the probability {chance}; expected 0 to 1")
        if n and chance > probabilities[n - 1][1] + 1e-6:
            raise InputError(f"said[{n}], {label!r}, is likelier than the one before; the likeliest is first")
