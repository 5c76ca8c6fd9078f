"""Texts with what is to be learned of them: the batches that all models take that read, but do not write.

A text is one sequence of tokens, of one segment or of two::

    ids         [CLS] how old are you [SEP] I am ten [SEP]
    segments      0    0   0   0   0    0   1  1  1    1

All batches have ``tokens`` (padded or packed, see :mod:`jumok.batch`) and ``segments``, and differ in the
rest: :class:`PretrainingBatch` words, one label a text (:class:`ClassificationBatch`), one label a token (:class:`TaggingBatch`), a
span of each text (:class:`AnswerBatch`). What belongs together can also be several sequences with one label: two
texts that are read apart (:class:`TextPairBatch`), or the sentences of a document
(:class:`DocumentBatch`).

What has one number a text is ``(N,)``, for the first N texts. There may be more texts behind them, that fill
a packed row up; and ``IGNORE`` is a label that does not count, so that batches of one form need not have the
same number of labels.

Shapes: ``N`` texts that count, ``M`` masked places; "like the ids" is ``(B, L)``, or ``(1, T)`` if packed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from jumok.batches.tokens import IGNORE, PAD, Tokens

__all__ = [
    "AnswerBatch",
    "ClassificationBatch",
    "DocumentBatch",
    "PretrainingBatch",
    "TaggingBatch",
    "TextBatch",
    "TextPairBatch",
    "label_mask",
]

TokenRows = Sequence[Sequence[int]]  # a number for each token of each text
T = TypeVar("T")


@dataclass(frozen=True, eq=False, kw_only=True)
class TextBatch:
    """Tokens and the segment that each is in: what BERT reads, and all batches here have.

    >>> texts = Texts.of([[7, 8, 9], [5]], [[0, 0, 1], [0]], packed=True)
    >>> texts.segments, texts.firsts(2)
    (tensor([[0, 0, 1, 0]]), tensor([0, 3]))
    """

    tokens: Tokens
    segments: Tensor  # like the ids: 0 or 1
    count: int = 0  # how many labels count
    example_indices: tuple[int, ...] = ()  # the numbers of the examples in their data set

    # What is like the ids, with what stands at padding there; further tokens; the labels of which some count.
    _token_fields: ClassVar[dict[str, int]] = {"segments": 0}
    _extra_token_fields: ClassVar[tuple[str, ...]] = ()
    _label_field: ClassVar[str] = ""
    unit: ClassVar[str] = "texts"  # what ``count`` counts

    @classmethod
    def from_sequences(
        cls, ids: TokenRows, segments: TokenRows | None = None, *, packed: bool = False, **field_values: Any
    ) -> Self:
        """From plain numbers; ``field_values`` are the other fields, what is like the ids as a row a text.

        Further tokens are laid as the first are, ``packed`` or not.

        It takes its time: where batches are made by the thousand, they are made from arrays.
        """

        def laid(rows: TokenRows, fill: int = PAD) -> Tokens:
            return Tokens.pack(rows, fill=fill) if packed else Tokens.pad(rows, fill=fill)

        given = {
            "segments": [[0] * len(row) for row in ids] if segments is None else segments,
            **field_values,
        }
        for name, fill in cls._token_fields.items():
            given[name] = laid(given[name], fill).ids.to(torch.tensor(fill).dtype)
        further: dict[str, Any] = {
            name: laid(given.pop(name)) for name in cls._extra_token_fields if name in given
        }
        made: dict[str, Any] = {
            name: x if name == "index" else torch.as_tensor(x) for name, x in given.items()
        }
        made["count"] = int(label_mask(made[cls._label_field]).sum()) if cls._label_field in made else 0
        return cls(tokens=laid(ids), **further, **made)

    @property
    def graph_key(self) -> Hashable | None:
        """As that of :class:`~jumok.batch.Tokens`, together with the shapes of all else."""
        forms = [tokens.graph_key for tokens in self._select_fields(Tokens).values()]
        shapes = [x.shape for x in self._tensor_fields().values()]
        return None if None in forms else (*forms, *shapes)

    def with_static_shapes(self) -> Self:
        """The same batch with a :attr:`graph_key`."""
        alike: dict[str, Any] = {
            name: tokens.with_static_shapes() for name, tokens in self._select_fields(Tokens).items()
        }
        return replace(self, **alike)

    def to(self, device: torch.device | str) -> Self:
        on_gpu = torch.device(device).type == "cuda"
        there: dict[str, Any] = {
            name: x.to(device, non_blocking=on_gpu) for name, x in self._tensor_fields().items()
        }
        there |= {name: tokens.to(device) for name, tokens in self._select_fields(Tokens).items()}
        return replace(self, **there)

    def first_token_indices(self, num_texts: int) -> Tensor:
        """``(N,)``: where the first token of each of the first N texts is among all ``B · L`` or ``T``."""
        height, length = self.tokens.ids.shape
        if self.tokens.cu_seqlens is None:
            return torch.arange(num_texts, device=self.tokens.ids.device) * length
        return (
            self.tokens.cu_seqlens[:num_texts].long().clamp(max=height * length - 1)
        )  # empty ones begin at the end

    def _tensor_fields(self) -> dict[str, Tensor]:
        return self._select_fields(Tensor)

    def _select_fields(self, field_type: type[T]) -> dict[str, T]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in named.items() if isinstance(x, field_type)}


@dataclass(frozen=True, eq=False, kw_only=True)
class PretrainingBatch(TextBatch):
    """Texts of which some words are hidden, and whose two segments may or may not belong together.

    >>> batch = Masked.of([[2, 4, 3, 9, 3]], [[0, 0, 0, 1, 1]], places=[1], labels=[8], next=[0])
    >>> batch.count
    1
    """

    masked_indices: (
        Tensor  # (M,): where masked tokens are in the flattened ids; any, where the label is IGNORE
    )
    labels: Tensor  # (M,): which words stood there
    next_sentence_labels: Tensor  # (N,): 0 if the second segment follows the first, 1 if it is from elsewhere

    _label_field = "labels"
    unit = "hidden words"


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassificationBatch(TextBatch):
    """Texts with one label each: the number of a class, or for regression, a number (NaN does not count)."""

    labels: Tensor  # (N,), int64 or float32

    _label_field = "labels"


@dataclass(frozen=True, eq=False, kw_only=True)
class TextPairBatch(ClassificationBatch):
    """Two texts with one label, each read by itself: the one of number n among ``tokens``, and ``second_tokens``.

    >>> pairs = LabelledPairs.of([[7, 8, 9], [5]], seconds=[[4], [6, 7]], labels=[2, 0])
    >>> pairs.tokens.lengths, pairs.seconds.lengths, pairs.count
    ((3, 1), (1, 2), 2)
    """

    second_tokens: Tokens

    _extra_token_fields: ClassVar[tuple[str, ...]] = ("seconds",)
    unit = "pairs"


@dataclass(frozen=True, eq=False, kw_only=True)
class DocumentBatch(ClassificationBatch):
    """Documents with one label each, made of sentences.

    ``tokens`` are the sentences of all documents, each of at least one word; ``sentence_indices`` has a document a
    sequence: the numbers of its sentences among them, at least one. So either level is laid by itself. Here
    the first document has two sentences, the second one::

        tokens      7 8 9    sentences    0 1    labels    2
                    5 · ·                 2 ·              0
                    4 6 ·

    >>> batch = LabelledDocuments.of([[7, 8, 9], [5], [4, 6]], sentences=[[0, 1], [2]], labels=[2, 0])
    >>> batch.tokens.ids.shape, batch.sentences.ids
    (torch.Size([3, 3]), tensor([[0, 1],
            [2, 0]]))
    """

    sentence_indices: Tokens

    _extra_token_fields: ClassVar[tuple[str, ...]] = ("sentences",)
    unit = "documents"


@dataclass(frozen=True, eq=False, kw_only=True)
class TaggingBatch(TextBatch):
    """Texts with a label for some of their tokens: the first ones of words.

    >>> TaggedWords.of([[2, 7, 8, 3], [2, 9, 3]], labels=[[-100, 1, -100, -100], [-100, 0, -100]]).count
    2
    """

    labels: Tensor  # like the ids; IGNORE at all other tokens

    _token_fields: ClassVar[dict[str, int]] = {"segments": 0, "labels": IGNORE}
    _label_field = "labels"
    unit = "words"


@dataclass(frozen=True, eq=False, kw_only=True)
class AnswerBatch(TextBatch):
    """Texts in which an answer lies, from one token to another, both included.

    Where there is none, both are 0, the place of ``[CLS]``, which must be allowed then.
    """

    answer_mask: Tensor  # like the ids, bool: where an answer may begin or end
    starts: Tensor  # (N,): counted from the text's first token
    ends: Tensor  # (N,)

    _token_fields: ClassVar[dict[str, int]] = {"segments": 0, "allowed": False}
    _label_field = "starts"


def label_mask(labels: Tensor) -> Tensor:
    """Which labels count: not IGNORE, and for regression, not NaN."""
    return ~labels.isnan() if labels.is_floating_point() else labels != IGNORE
