"""Batches of texts with labels: the input of all models that read text but do not generate it.

A text is one sequence of tokens with one or two segments::

    ids         [CLS] how old are you [SEP] I am ten [SEP]
    segments      0    0   0   0   0    0   1  1  1    1

All batches have ``tokens`` (padded or packed, see :mod:`jumok.batches.tokens`) and ``segments``. They differ
in their labels:

- :class:`PretrainingBatch`: the original words at masked positions
- :class:`ClassificationBatch`: one label per text
- :class:`TaggingBatch`: one label per token
- :class:`AnswerBatch`: one span per text
- :class:`TextPairBatch`: one label for two texts that are encoded separately
- :class:`DocumentBatch`: one label for a document that consists of several sentences

Fields with one value per text have shape ``(N,)`` and describe the first N texts. More texts may follow that
fill up a packed row. A label ``IGNORE`` does not count, so batches with the same ``graph_key`` may differ in
the number of labels that count.

Shapes: ``N`` labelled texts, ``M`` masked positions; "like the ids" is ``(B, L)``, or ``(1, T)`` if packed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from jumok.batches.tokens import IGNORE, PAD, TensorGroup, Tokens

TokenRows = Sequence[Sequence[int]]  # one number per token, one row per text
T = TypeVar("T")


@dataclass(frozen=True, eq=False, kw_only=True)
class TextBatch(TensorGroup):
    """Tokens with their segments: the input of BERT, and the base class of all batches here.

    >>> texts = TextBatch.from_sequences([[7, 8, 9], [5]], [[0, 0, 1], [0]], packed=True)
    >>> texts.segments, texts.first_token_indices(2)
    (tensor([[0, 0, 1, 0]]), tensor([0, 3]))
    """

    tokens: Tokens
    segments: Tensor  # like the ids: 0 or 1
    count: int = 0  # number of labels that are not IGNORE
    example_indices: tuple[int, ...] = ()  # indices of the examples in their data set

    _token_fields: ClassVar[dict[str, int]] = {"segments": 0}  # fields like the ids, with their fill value
    _extra_token_fields: ClassVar[tuple[str, ...]] = ()  # fields of type Tokens besides ``tokens``
    _label_field: ClassVar[str] = ""  # the field that ``count`` refers to
    unit: ClassVar[str] = "texts"  # what ``count`` counts

    @classmethod
    def from_sequences(
        cls, ids: TokenRows, segments: TokenRows | None = None, *, packed: bool = False, **field_values: Any
    ) -> Self:
        """Build a batch from Python lists.

        Args:
            ids: One row of token ids per text.
            segments: Like ``ids``. Defaults to the first segment for all tokens.
            packed: Pack all sequences into one row instead of padding them.
            **field_values: The other fields of the class. Fields like the ids have one row per text.

        This is convenient rather than fast: data loaders build their batches from arrays.
        """

        def lay_out(rows: TokenRows, fill: int = PAD) -> Tokens:
            return Tokens.pack(rows, fill=fill) if packed else Tokens.pad(rows, fill=fill)

        values = {
            "segments": [[0] * len(row) for row in ids] if segments is None else segments,
            **field_values,
        }
        for name, fill in cls._token_fields.items():
            values[name] = lay_out(values[name], fill).ids.to(torch.tensor(fill).dtype)
        extra_tokens: dict[str, Any] = {
            name: lay_out(values.pop(name)) for name in cls._extra_token_fields if name in values
        }
        others: dict[str, Any] = {
            name: x if name == "example_indices" else torch.as_tensor(x) for name, x in values.items()
        }
        others["count"] = int(label_mask(others[cls._label_field]).sum()) if cls._label_field in others else 0
        return cls(tokens=lay_out(ids), **extra_tokens, **others)

    @property
    def graph_key(self) -> Hashable | None:
        """See :attr:`jumok.batches.tokens.Tokens.graph_key`: those of all tokens, and the other shapes."""
        keys = [tokens.graph_key for tokens in self._select_fields(Tokens).values()]
        shapes = [x.shape for x in self._select_fields(Tensor).values()]
        return None if None in keys else (*keys, *shapes)

    def first_token_indices(self, num_texts: int) -> Tensor:
        """Indices ``(N,)`` of the first token of each of the first N texts in the flattened ids."""
        rows, length = self.tokens.ids.shape
        if self.tokens.cu_seqlens is None:
            return torch.arange(num_texts, device=self.tokens.ids.device) * length
        # Empty texts at the end of the row begin one past the last token.
        return self.tokens.cu_seqlens[:num_texts].long().clamp(max=rows * length - 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class PretrainingBatch(TextBatch):
    """Texts with masked words, whose second segment may or may not follow the first.

    >>> batch = PretrainingBatch.from_sequences(
    ...     [[2, 4, 3, 9, 3]], [[0, 0, 0, 1, 1]], masked_indices=[1], labels=[8], next_sentence_labels=[0]
    ... )
    >>> batch.count
    1
    """

    masked_indices: Tensor  # (M,): masked positions in the flattened ids; arbitrary where the label is IGNORE
    labels: Tensor  # (M,): the original words at these positions
    next_sentence_labels: Tensor  # (N,): 0 if the second segment follows the first, 1 if it is a random one

    _label_field = "labels"
    unit = "masked words"


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassificationBatch(TextBatch):
    """Texts with one label each: a class index, or for regression a float, where NaN does not count."""

    labels: Tensor  # (N,), int64 or float32

    _label_field = "labels"


@dataclass(frozen=True, eq=False, kw_only=True)
class TextPairBatch(ClassificationBatch):
    """Pairs of texts with one label each. Pair n is sequence n of ``tokens`` and of ``second_tokens``.

    >>> pairs = TextPairBatch.from_sequences([[7, 8, 9], [5]], second_tokens=[[4], [6, 7]], labels=[2, 0])
    >>> pairs.tokens.lengths, pairs.second_tokens.lengths, pairs.count
    ((3, 1), (1, 2), 2)
    """

    second_tokens: Tokens

    _extra_token_fields: ClassVar[tuple[str, ...]] = ("second_tokens",)
    unit = "pairs"


@dataclass(frozen=True, eq=False, kw_only=True)
class DocumentBatch(ClassificationBatch):
    """Documents, split into sentences, with one label each.

    ``tokens`` holds the sentences of all documents, each with at least one word. ``sentence_indices`` has one
    sequence per document: the indices of its sentences in ``tokens``, at least one. Each level has its own
    layout. Here the first document has two sentences, and the second has one::

        tokens      7 8 9    sentence_indices    0 1    labels    2
                    5 · ·                        2 ·              0
                    4 6 ·

    >>> batch = DocumentBatch.from_sequences(
    ...     [[7, 8, 9], [5], [4, 6]], sentence_indices=[[0, 1], [2]], labels=[2, 0]
    ... )
    >>> batch.tokens.ids.shape, batch.sentence_indices.ids
    (torch.Size([3, 3]), tensor([[0, 1],
            [2, 0]]))
    """

    sentence_indices: Tokens

    _extra_token_fields: ClassVar[tuple[str, ...]] = ("sentence_indices",)
    unit = "documents"


@dataclass(frozen=True, eq=False, kw_only=True)
class TaggingBatch(TextBatch):
    """Texts with one label per word, at the word's first token.

    >>> labels = [[-100, 1, -100, -100], [-100, 0, -100]]
    >>> TaggingBatch.from_sequences([[2, 7, 8, 3], [2, 9, 3]], labels=labels).count
    2
    """

    labels: Tensor  # like the ids; IGNORE at all other tokens

    _token_fields: ClassVar[dict[str, int]] = {"segments": 0, "labels": IGNORE}
    _label_field = "labels"
    unit = "words"


@dataclass(frozen=True, eq=False, kw_only=True)
class AnswerBatch(TextBatch):
    """Texts with the span of an answer, from its first to its last token.

    If a text has no answer, both are 0, the position of ``[CLS]``; ``answer_mask`` must be True there.
    """

    answer_mask: Tensor  # like the ids, bool: where an answer may start or end
    starts: Tensor  # (N,): position in the text, counted from its first token
    ends: Tensor  # (N,)

    _token_fields: ClassVar[dict[str, int]] = {"segments": 0, "answer_mask": False}
    _label_field = "starts"


def label_mask(labels: Tensor) -> Tensor:
    """Mask of the labels that count: those that are not IGNORE, or for regression not NaN."""
    return ~labels.isnan() if labels.is_floating_point() else labels != IGNORE
