"""Texts in token ids with what is to be learned of them, as batches: what fine-tuning learns from.

All of it is held in memory, 8 bytes a token and a field: data that people have labelled is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.annotated import Texts
from jumok.batch import IGNORE, PAD, Tokens
from jumok.data.batches import (
    LEAST,
    Batches,
    Lengths,
    Numbers,
    batches,
    divide,
    filled,
    fingerprint,
    in_a_row,
    in_rows,
    stepped,
)
from jumok.errors import InputError

__all__ = ["Examples", "Row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One text as a model reads it, with [CLS] and [SEP]; and marks by name, of each token or of the text.

    >>> Row([2, 7, 8, 3], [0, 0, 0, 0], {"labels": 1})
    Row(ids=[2, 7, 8, 3], segments=[0, 0, 0, 0], marks={'labels': 1})
    """

    ids: list[int]
    segments: list[int]
    marks: Mapping[str, list[int] | list[bool] | int | float] = field(default_factory=dict)


class Examples:
    """Rows as batches of ``make``, a type of :mod:`jumok.annotated`: what the training loop asks for.

    Batches are *packed* or padded, and may be *alike*, as in :class:`~jumok.data.batches.PairData`. Texts
    that fill up have no label that counts.
    """

    def __init__(
        self,
        make: type[Texts],
        rows: Sequence[Row],
        *,
        tokens: int,
        seed: int,
        packed: bool = False,
        alike: bool = False,
        longest: int = LEAST,
    ) -> None:
        """``longest`` is the most tokens that a model reads: no sequence that fills up is longer."""
        if not rows:
            raise InputError("there is nothing to learn from: no example is left")
        self.make, self.tokens, self.seed, self.packed, self.alike = make, tokens, seed, packed, alike
        self.unit = make.unit
        self.lengths: Lengths = np.array([len(row.ids) for row in rows], np.int32)
        self.begins = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.ids = _flat([row.ids for row in rows])
        self.segments = _flat([row.segments for row in rows])
        self.of_tokens: dict[str, NDArray[Any]] = {}
        self.of_texts: dict[str, NDArray[Any]] = {}
        for name, first in rows[0].marks.items():
            marks: list[Any] = [row.marks[name] for row in rows]
            if isinstance(first, list):
                self.of_tokens[name] = _flat(marks)
            else:
                self.of_texts[name] = np.array(marks, np.float32 if isinstance(first, float) else np.int64)
        self.multiple = max(LEAST, tokens // 32)
        self.fillers = self.multiple // min(LEAST, longest) + 2
        self._latest: tuple[int, Batches] | None = None  # asked for again, the same need not be made again

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Another one for other texts, or for other marks."""
        marks = [*self.of_tokens.values(), *self.of_texts.values()]
        return fingerprint(self.lengths, self.ids, self.segments, *marks)

    def batches(self, epoch: int) -> Batches:
        """The batches of an epoch, in order."""
        latest = self._latest
        if latest is None or latest[0] != epoch:
            budget = max(1, self.tokens - self.fillers) if self.packed else self.tokens
            lengths = stepped(self.lengths) if self.alike and not self.packed else self.lengths
            made = batches(lengths, lengths, tokens=budget, seed=self.seed, epoch=epoch, packed=self.packed)
            latest = self._latest = (epoch, made)
        return latest[1]

    def divide(self, index: Numbers, parts: int) -> list[Numbers]:
        """A batch in parts of like work."""
        return divide(index, self.lengths, self.lengths, parts)

    def collate(self, index: Sequence[int] | Numbers) -> Texts:
        """The examples of these numbers as a model takes them."""
        numbers = np.asarray(index, np.int64)
        lengths = self.lengths[numbers].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(self.begins[numbers] - before, lengths)
        tokens = self._laid(self.ids[places], lengths)
        marks = {
            name: self._like(tokens, x[places], lengths, _fill(name)) for name, x in self.of_tokens.items()
        }
        for name, x in self.of_texts.items():
            texts = np.full(len(tokens.lengths), np.nan if x.dtype == np.float32 else _fill(name), x.dtype)
            texts[: len(numbers)] = x[numbers]
            marks[name] = torch.from_numpy(texts)
        labels = self.of_tokens.get("labels")
        count = len(numbers) if labels is None else int((labels[places] != IGNORE).sum())
        segments = self._like(tokens, self.segments[places], lengths, 0)
        if "allowed" in marks:
            marks["allowed"] = marks["allowed"].bool()
        return self.make(
            tokens=tokens, segments=segments, count=count, index=tuple(numbers.tolist()), **marks
        )

    def _laid(self, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tokens:
        if self.packed:
            return in_a_row(ids, lengths, self.multiple, self.fillers)
        rows, width = len(lengths), int(lengths.max())
        if self.alike:
            width = int(stepped(np.array(width)))
            rows = max(rows, self.tokens // width)
        tokens = in_rows(ids, lengths, (rows, width), PAD, PAD)
        return tokens.alike() if self.alike else tokens

    def _like(self, tokens: Tokens, x: NDArray[np.int64], lengths: NDArray[np.int64], fill: int) -> Tensor:
        """Numbers for each token, laid as the tokens are."""
        height, width = tokens.ids.shape
        if self.packed:
            return torch.from_numpy(filled(x, width, fill))[None]
        return in_rows(x, lengths, (height, width), fill, fill).ids


def _flat(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(row, np.int64) for row in rows])


def _fill(name: str) -> int:
    """Of a mark where there is no text: no answer may lie there, and no label counts."""
    return 0 if name == "allowed" else IGNORE
