"""Documents for the tests of the document view: our own, with weights that one can check by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    "the",
    "a",
    "of",
    "and",
    "to",
    "it",
    "was",
    "that",
    "film",
    "scene",
    "story",
    "music",
    "light",
    "slow",
    "house",
    "river",
    "voice",
    "crowd",
    "ending",
]


def parted(sentences: Sequence[str]) -> dict[str, Any]:
    """Words, what stood before them, and the edges of sentences."""
    words, before, edges = [], [], [0]
    for sentence in sentences:
        for found in re.finditer(r"(\s*)(\w+|[^\w\s])", sentence):
            before.append(found[1])
            words.append(found[2])
        edges.append(len(words))
    return {"words": tuple(words), "separators": tuple(before), "sentence_offsets": tuple(edges)}


def hierarchical() -> AttendedDocument:
    """Sentences count 0.2, 0.3 and 0.5; in each a word of its own has half of that, the rest is even."""
    parts = parted(REVIEW)
    strong = [parts["words"].index(word) for word in ("rainy", "drags", "wonderful")]
    within = np.array([0.2, 0.3, 0.5], np.float32)
    weights = np.zeros(len(parts["words"]))
    for s, (first, last) in enumerate(zip(parts["sentence_offsets"], parts["sentence_offsets"][1:], strict=False)):
        weights[first:last] = within[s] * 0.5 / (last - first - 1)
        weights[strong[s]] = within[s] * 0.5
    said = (("positive", 0.875), ("negative", 0.125))
    return AttendedDocument(
        **parts, weights=weights[None], sentence_weights=within, class_probabilities=said, label="positive"
    )


def several_hops() -> AttendedDocument:
    """Korean, three hops: each gives 0.7 to a word of its own; wrong about its class."""
    parts = parted(KOREAN)
    strong = [parts["words"].index(word) for word in ("일요일에", "훌륭하다", "다시")]
    weights = np.full((3, len(parts["words"])), 0.3 / (len(parts["words"]) - 1), np.float32)
    weights[np.arange(3), strong] = 0.7
    return AttendedDocument(**parts, weights=weights, class_probabilities=(("부정", 0.6), ("긍정", 0.4)), label="긍정")


def long(sentences: int = 100, words: int = 20, hops: int = 1) -> AttendedDocument:
    """Each sentence has one word "peak" that counts much, the more the later; all others count alike."""
    peaks = np.arange(sentences) * words + np.arange(sentences) % words
    names = np.array([WORDS[n % len(WORDS)] for n in range(sentences * words)], object)
    names[peaks] = "peak"
    before = np.full(len(names), " ", object)
    before[0] = ""
    weights = np.full((hops, len(names)), 1e-3, np.float32)
    weights[:, peaks] = (np.arange(sentences) + 1) / sentences
    weights /= weights.sum(1, keepdims=True)
    edges = range(0, len(names) + 1, words)
    return AttendedDocument(tuple(names), tuple(before), tuple(edges), weights)
