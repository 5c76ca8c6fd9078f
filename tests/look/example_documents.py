"""Documents with weights that can be checked by hand, for the tests of the document view."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jumok.look.viewer.attended_document import AttendedDocument

REVIEW = (
    "We saw it on a rainy Sunday.",
    " The plot is thin,\nand the middle drags!",
    "\n\nBut the keeper of the lighthouse is wonderful.",
)
KOREAN = ("비 오는 일요일에 영화를 보았다.", " 등대지기의 연기가 정말 훌륭하다!", "\n내일 다시 볼 것이다.")
WORDS = [
    *("the", "a", "of", "and", "to", "it", "was", "that", "film", "scene", "story", "music", "light", "slow"),
    *("house", "river", "voice", "crowd", "ending"),
]


def split_words(sentences: Sequence[str]) -> dict[str, Any]:
    """Return the words, the separators before them, and the offsets of sentences."""
    words, separators, offsets = [], [], [0]
    for sentence in sentences:
        for match in re.finditer(r"(\s*)(\w+|[^\w\s])", sentence):
            separators.append(match[1])
            words.append(match[2])
        offsets.append(len(words))
    return {"words": tuple(words), "separators": tuple(separators), "sentence_offsets": tuple(offsets)}


def build_hierarchical_document() -> AttendedDocument:
    """Sentences have weights 0.2, 0.3 and 0.5; in each, one word has half of it, and the others share the rest."""
    parts = split_words(REVIEW)
    strong = [parts["words"].index(word) for word in ("rainy", "drags", "wonderful")]
    sentence_weights = np.array([0.2, 0.3, 0.5], np.float32)
    weights = np.zeros(len(parts["words"]))
    for s, (first, last) in enumerate(pairwise(parts["sentence_offsets"])):
        weights[first:last] = sentence_weights[s] * 0.5 / (last - first - 1)
        weights[strong[s]] = sentence_weights[s] * 0.5
    probabilities = (("positive", 0.875), ("negative", 0.125))
    return AttendedDocument(
        **parts,
        weights=weights[None],
        sentence_weights=sentence_weights,
        class_probabilities=probabilities,
        label="positive",
    )


def build_multi_hop_document() -> AttendedDocument:
    """Korean with three hops: each has one word with weight 0.7. The predicted class is wrong."""
    parts = split_words(KOREAN)
    strong = [parts["words"].index(word) for word in ("일요일에", "훌륭하다", "다시")]
    weights = np.full((3, len(parts["words"])), 0.3 / (len(parts["words"]) - 1), np.float32)
    weights[np.arange(3), strong] = 0.7
    return AttendedDocument(**parts, weights=weights, class_probabilities=(("부정", 0.6), ("긍정", 0.4)), label="긍정")


def build_long_document(num_sentences: int = 100, num_words: int = 20, num_hops: int = 1) -> AttendedDocument:
    """Each sentence has one word "peak", with a higher weight in later sentences; all other weights are equal."""
    peaks = np.arange(num_sentences) * num_words + np.arange(num_sentences) % num_words
    words = np.array([WORDS[n % len(WORDS)] for n in range(num_sentences * num_words)], object)
    words[peaks] = "peak"
    separators = np.full(len(words), " ", object)
    separators[0] = ""
    weights = np.full((num_hops, len(words)), 1e-3, np.float32)
    weights[:, peaks] = (np.arange(num_sentences) + 1) / num_sentences
    weights /= weights.sum(1, keepdims=True)
    return AttendedDocument(tuple(words), tuple(separators), tuple(range(0, len(words) + 1, num_words)), weights)
