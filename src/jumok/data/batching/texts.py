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

from jumok.batches.text import TextBatch
from jumok.batches.tokens import IGNORE, PAD, Tokens
from jumok.data.batching.length_batching import (
    KERNEL_BLOCK,
    BatchPlan,
    IndexArray,
    LengthArray,
    divide_batch,
    fingerprint_arrays,
    pack_sequences,
    pad_array,
    pad_sequences,
    plan_batches,
    round_up_lengths,
)
from jumok.errors import InputError

__all__ = ["EncodedText", "TextBatcher"]


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One text as a model reads it, with [CLS] and [SEP]; and marks by name, of each token or of the text.

    >>> EncodedText([2, 7, 8, 3], [0, 0, 0, 0], {"labels": 1})
    EncodedText(ids=[2, 7, 8, 3], segments=[0, 0, 0, 0], annotations={'labels': 1})
    """

    ids: list[int]
    segments: list[int]
    annotations: Mapping[str, list[int] | list[bool] | int | float] = field(default_factory=dict)


class TextBatcher:
    """Rows as batches of ``batch_type``, a type of :mod:`jumok.annotated`: what the training loop asks for.

    Batches are *packed* or padded, and may be *alike*, as in :class:`~jumok.data.plan_batches.PairData`. Texts
    that fill up have no label that counts.
    """

    def __init__(
        self,
        batch_type: type[TextBatch],
        texts: Sequence[EncodedText],
        *,
        max_tokens: int,
        seed: int,
        packed: bool = False,
        fixed_shapes: bool = False,
        max_length: int = KERNEL_BLOCK,
    ) -> None:
        """``max_length`` is the most tokens that a model reads: no sequence that fills up is longer."""
        if not texts:
            raise InputError("there is nothing to learn from: no example is left")
        self.batch_type, self.max_tokens, self.seed, self.packed, self.fixed_shapes = (
            batch_type,
            max_tokens,
            seed,
            packed,
            fixed_shapes,
        )
        self.unit = batch_type.unit
        self.lengths: LengthArray = np.array([len(row.ids) for row in texts], np.int32)
        self.offsets = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.ids = _concatenate([row.ids for row in texts])
        self.segments = _concatenate([row.segments for row in texts])
        self.token_annotations: dict[str, NDArray[Any]] = {}
        self.text_annotations: dict[str, NDArray[Any]] = {}
        for name, first in texts[0].annotations.items():
            marks: list[Any] = [row.annotations[name] for row in texts]
            if isinstance(first, list):
                self.token_annotations[name] = _concatenate(marks)
            else:
                self.text_annotations[name] = np.array(
                    marks, np.float32 if isinstance(first, float) else np.int64
                )
        self.length_multiple = max(KERNEL_BLOCK, max_tokens // 32)
        self.num_fillers = self.length_multiple // min(KERNEL_BLOCK, max_length) + 2
        self._latest_epoch: tuple[int, BatchPlan] | None = (
            None  # asked for again, the same need not be made again
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Another one for other texts, or for other marks."""
        marks = [*self.token_annotations.values(), *self.text_annotations.values()]
        return fingerprint_arrays(self.lengths, self.ids, self.segments, *marks)

    def batches(self, epoch: int) -> BatchPlan:
        """The batches of an epoch, in order."""
        latest = self._latest_epoch
        if latest is None or latest[0] != epoch:
            budget = max(1, self.max_tokens - self.num_fillers) if self.packed else self.max_tokens
            lengths = (
                round_up_lengths(self.lengths) if self.fixed_shapes and not self.packed else self.lengths
            )
            made = plan_batches(
                lengths, lengths, max_tokens=budget, seed=self.seed, epoch=epoch, packed=self.packed
            )
            latest = self._latest_epoch = (epoch, made)
        return latest[1]

    def divide(self, index: IndexArray, num_parts: int) -> list[IndexArray]:
        """A batch in parts of like work."""
        return divide_batch(index, self.lengths, self.lengths, num_parts)

    def collate(self, index: Sequence[int] | IndexArray) -> TextBatch:
        """The examples of these numbers as a model takes them."""
        numbers = np.asarray(index, np.int64)
        lengths = self.lengths[numbers].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(self.offsets[numbers] - before, lengths)
        tokens = self._build_tokens(self.ids[places], lengths)
        marks = {
            name: self._lay_out_like(tokens, x[places], lengths, _pad_value(name))
            for name, x in self.token_annotations.items()
        }
        for name, x in self.text_annotations.items():
            texts = np.full(
                len(tokens.lengths), np.nan if x.dtype == np.float32 else _pad_value(name), x.dtype
            )
            texts[: len(numbers)] = x[numbers]
            marks[name] = torch.from_numpy(texts)
        labels = self.token_annotations.get("labels")
        count = len(numbers) if labels is None else int((labels[places] != IGNORE).sum())
        segments = self._lay_out_like(tokens, self.segments[places], lengths, 0)
        if "answer_mask" in marks:
            marks["answer_mask"] = marks["answer_mask"].bool()
        return self.batch_type(
            tokens=tokens, segments=segments, count=count, example_indices=tuple(numbers.tolist()), **marks
        )

    def _build_tokens(self, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tokens:
        if self.packed:
            return pack_sequences(ids, lengths, self.length_multiple, self.num_fillers)
        rows, width = len(lengths), int(lengths.max())
        if self.fixed_shapes:
            width = int(round_up_lengths(np.array(width)))
            rows = max(rows, self.max_tokens // width)
        tokens = pad_sequences(ids, lengths, (rows, width), PAD, PAD)
        return tokens.with_static_shapes() if self.fixed_shapes else tokens

    def _lay_out_like(
        self, tokens: Tokens, values: NDArray[np.int64], lengths: NDArray[np.int64], pad_value: int
    ) -> Tensor:
        """Numbers for each token, laid as the tokens are."""
        height, width = tokens.ids.shape
        if self.packed:
            return torch.from_numpy(pad_array(values, width, pad_value))[None]
        return pad_sequences(values, lengths, (height, width), pad_value, pad_value).ids


def _concatenate(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(row, np.int64) for row in rows])


def _pad_value(name: str) -> int:
    """Of a mark where there is no text: no answer may lie there, and no label counts."""
    return 0 if name == "answer_mask" else IGNORE
