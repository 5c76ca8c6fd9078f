"""Batches of token ids with annotations, for classification, tagging and question answering.

All examples are held in memory, at 8 bytes per token and field: labelled data is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.batches.text import TextBatch
from jumok.batches.tokens import IGNORE
from jumok.data.batching.length_batching import (
    KERNEL_BLOCK,
    ConcatenatedSequences,
    IndexArray,
    LengthBatcher,
    SequenceLayout,
    convert_labels,
    fingerprint_arrays,
    pad_labels,
)
from jumok.errors import InputError


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The token ids of a text, with [CLS] and [SEP], and named annotations of each token or of the text.

    >>> EncodedText([2, 7, 8, 3], [0, 0, 0, 0], {"labels": 1})
    EncodedText(ids=[2, 7, 8, 3], segments=[0, 0, 0, 0], annotations={'labels': 1})
    """

    ids: list[int]
    segments: list[int]
    annotations: Mapping[str, list[int] | list[bool] | int | float] = field(default_factory=dict)


class TextBatcher(LengthBatcher[TextBatch]):
    """Texts in batches of ``batch_type``, a class of :mod:`jumok.batches.text`, padded or packed.

    See :class:`~jumok.data.batching.length_batching.SequenceLayout` for ``packed`` and ``fixed_shapes``. The
    labels of fillers do not count.
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
        """``max_length`` is the length that the model supports: no filler is longer."""
        if not texts:
            raise InputError("there are no examples to train on")
        filler_length = min(KERNEL_BLOCK, max_length)
        self.texts = ConcatenatedSequences([text.ids for text in texts], np.int64)
        layout = SequenceLayout(max_tokens, packed, fixed_shapes, filler_length)
        super().__init__(layout, self.texts.lengths, seed=seed)
        self.batch_type, self.unit = batch_type, batch_type.unit
        self.segments = _concatenate([text.segments for text in texts])
        self.token_annotations: dict[str, NDArray[Any]] = {}
        self.text_annotations: dict[str, NDArray[Any]] = {}
        for name, first in texts[0].annotations.items():
            values: list[Any] = [text.annotations[name] for text in texts]
            if isinstance(first, list):
                self.token_annotations[name] = _concatenate(values)
            else:
                self.text_annotations[name] = convert_labels(values)

    @property
    def fingerprint(self) -> str:
        """Identifies the texts and their annotations."""
        annotations = [*self.token_annotations.values(), *self.text_annotations.values()]
        return fingerprint_arrays(self.texts.lengths, self.texts.ids, self.segments, *annotations)

    def collate(self, index: Sequence[int] | IndexArray) -> TextBatch:
        indices = np.asarray(index, np.int64)
        positions = self.texts.positions(indices)
        ids, lengths = self.texts.take(indices)
        tokens = self.layout.arrange(ids, lengths)
        fields = {
            name: self.layout.arrange_like(tokens, values[positions], lengths, _pad_value(name))
            for name, values in self.token_annotations.items()
        }
        for name, values in self.text_annotations.items():
            fields[name] = pad_labels(values[indices], len(tokens.lengths))
        if "answer_mask" in fields:
            fields["answer_mask"] = fields["answer_mask"].bool()
        labels = self.token_annotations.get("labels")
        return self.batch_type(
            tokens=tokens,
            segments=self.layout.arrange_like(tokens, self.segments[positions], lengths, 0),
            count=len(indices) if labels is None else int((labels[positions] != IGNORE).sum()),
            example_indices=tuple(indices.tolist()),
            **fields,
        )


def _concatenate(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(row, np.int64) for row in rows])


def _pad_value(name: str) -> int:
    """The value of an annotation at padding and fillers: no answer lies there, and no label counts."""
    return 0 if name == "answer_mask" else IGNORE
