"""A text with attention weights: words, sentences, and the weight of each.

>>> document = AttendedDocument(
...     words=("dull", ".", "i", "laughed"), separators=("", "", " ", " "), sentence_offsets=(0, 2, 4),
...     weights=np.array([[0.5, 0.125, 0.125, 0.25]]),
...     class_probabilities=(("negative", 0.9), ("positive", 0.1)),
... )
>>> document.text, document.get_sentence_weights()
('dull. i laughed', array([0.625, 0.375], dtype=float32))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.look.viewer.medium import Medium
from jumok.look.viewer.tiles import FloatArray, pack_base64, to_float32_array


@dataclass(frozen=True, eq=False)
class AttendedDocument(Medium):
    """``n`` words in ``S`` sentences, with the weights of one or more hops.

    The text is ``separators[0] + words[0] + separators[1] + …``, so that it is shown as it was written.
    Sentence s is ``words[sentence_offsets[s] : sentence_offsets[s + 1]]``. The weights of a hop sum to 1 over
    the whole document; in a hierarchical model, which has one hop, the weight of a word is that of its
    sentence times its weight within the sentence.
    """

    words: tuple[str, ...]
    separators: tuple[str, ...]
    sentence_offsets: tuple[int, ...]  # S + 1 offsets, from 0 to n
    weights: NDArray[np.float32]  # (hops, n)
    sentence_weights: NDArray[np.float32] | None = None  # (S,); None: the sums over the words of a sentence
    class_probabilities: tuple[tuple[str, float], ...] = ()  # by class, in descending order
    label: str | None = None

    def __post_init__(self) -> None:
        for name in ("words", "separators", "sentence_offsets", "class_probabilities"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "weights", to_float32_array(self.weights))
        _check_texts(self.words, self.separators)
        _check_sentence_offsets(self.sentence_offsets, len(self.words))
        _check_weights("weights", self.weights, 2, len(self.words), "(hops, words)")
        if self.sentence_weights is not None:
            object.__setattr__(self, "sentence_weights", to_float32_array(self.sentence_weights))
            num_sentences = len(self.sentence_offsets) - 1
            _check_weights("sentence_weights", self.sentence_weights, 1, num_sentences, "(sentences,)")
            if self.num_hops > 1:
                raise InputError(
                    f"sentence_weights given with {self.num_hops} hops; expected None: a sentence's weight "
                    "is the sum over its words, in each hop"
                )
        _check_probabilities(self.class_probabilities)

    @property
    def text(self) -> str:
        """The whole text, as it was written."""
        return "".join(separator + word for separator, word in zip(self.separators, self.words, strict=True))

    @property
    def num_hops(self) -> int:
        return len(self.weights)

    def get_word_weights(self, hop: int | None = None) -> FloatArray:
        """Return the weights ``(n,)`` of a hop; None: the mean of all."""
        if hop is None:
            return np.asarray(self.weights.mean(0, dtype=np.float64), np.float32)
        if not 0 <= hop < self.num_hops:
            raise InputError(f"hop {hop} was requested; there are {self.num_hops}: 0 to {self.num_hops - 1}")
        return np.asarray(self.weights[hop])

    def get_sentence_weights(self, hop: int | None = None) -> FloatArray:
        """Return the weight of each sentence ``(S,)``."""
        summed = np.add.reduceat(self.get_word_weights(hop), self.sentence_offsets[:-1])
        return summed if self.sentence_weights is None else self.sentence_weights

    def normalize_within_sentences(self, hop: int | None = None) -> FloatArray:
        """Return the weights ``(n,)`` of words within their sentences, each of which sums to 1 (or 0)."""
        weights = self.get_word_weights(hop)
        sums = np.repeat(np.add.reduceat(weights, self.sentence_offsets[:-1]), np.diff(self.sentence_offsets))
        return np.asarray(weights / np.where(sums > 0, sums, 1), np.float32)

    def to_json(self) -> dict[str, Any]:
        """Return the document as JSON for the viewer; weights are packed exactly as in :mod:`.tiles`."""
        sentence_weights = self.sentence_weights
        return {
            "words": list(self.words),
            "separators": list(self.separators),
            "sentence_offsets": [int(offset) for offset in self.sentence_offsets],
            "num_hops": self.num_hops,
            "weights": pack_base64(self.weights),
            "sentence_weights": None if sentence_weights is None else pack_base64(sentence_weights[None]),
            "class_probabilities": [[label, float(probability)] for label, probability in self.class_probabilities],
            "label": self.label,
        }


def _check_texts(words: Sequence[str], separators: Sequence[str]) -> None:
    if not words:
        raise InputError("a document without words; expected at least one")
    if len(separators) != len(words):
        raise InputError(
            f"{len(words)} words and {len(separators)} separators are invalid; expected one before each word, "
            'as in words=("so", "good", "!"), separators=("", " ", "")'
        )
    for name, texts in (("words", words), ("separators", separators)):
        for n, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(f"{name}[{n}] is {text!r}; expected a text")


def _check_sentence_offsets(offsets: Sequence[int], num_words: int) -> None:
    is_integer = all(isinstance(offset, int | np.integer) for offset in offsets)
    if not is_integer or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != num_words:
        listed = ", ".join(map(str, offsets[:4])) + (", …" if len(offsets) > 4 else "")
        raise InputError(
            f"sentence_offsets=({listed}) is invalid; expected integers from 0 to {num_words}, where sentences "
            f"begin and the last one ends: (0, {num_words}) is one sentence"
        )
    for n, (first, last) in enumerate(pairwise(offsets)):
        if first >= last:
            raise InputError(
                f"sentence {n} goes from word {first} to {last}; expected increasing offsets: leave out "
                "sentences without words"
            )


def _check_weights(name: str, weights: FloatArray, num_axes: int, length: int, expected: str) -> None:
    if weights.ndim != num_axes or weights.shape[-1] != length or not weights.size:
        raise InputError(f"{name} of shape {weights.shape} is invalid; expected {expected}, the last of them {length}")
    invalid = ~np.isfinite(weights) | (weights < 0)
    if invalid.any():
        index = tuple(int(n) for n in np.argwhere(invalid)[0])
        position = index[0] if num_axes == 1 else index
        raise InputError(f"{name}[{position}] is {weights[index]}; expected finite numbers from 0 on")


def _check_probabilities(probabilities: Sequence[tuple[str, float]]) -> None:
    for n, (label, probability) in enumerate(probabilities):
        if not 0 <= probability <= 1 + 1e-6:  # also false for NaN
            raise InputError(f"class_probabilities[{n}], {label!r}, has the probability {probability}; expected 0 to 1")
        if n and probability > probabilities[n - 1][1] + 1e-6:
            raise InputError(
                f"class_probabilities[{n}], {label!r}, is larger than the one before; expected descending order"
            )
