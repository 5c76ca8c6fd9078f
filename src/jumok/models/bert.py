"""BERT (Devlin 2019): the Transformer's encoder over one or two segments of text, and its heads.

::

    words + segments + positions ─ norm ─┬─ attend to all ─ feed forward ─┬─ hidden
                                         └────────── × layers ────────────┘   │
                    the word, at masked places ── a tag for each token ───────┤
                  where the answer begins and ends, of all tokens of a text ──┤
                                                                              │ the first token's
                    follows, or not? ── which class of texts? ───────────── pooled

:class:`Bert` has no head. :class:`Pretraining`, :class:`Classifier`, :class:`Tagger` and :class:`Spans` are a
``Bert`` with one; each learns from its own batches (:mod:`jumok.annotated`).

Weights begin as in the original: normal with standard deviation 0.02, cut off at twice that; biases at 0.

Shapes: ``B`` texts (1 row if packed), ``L`` tokens, ``D`` width, ``V`` words, ``C`` classes; ``N`` texts and
``M`` masked places of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.annotated import Labelled, Masked, Spanned, TaggedWords, Texts, counts
from jumok.attention import masks
from jumok.attention.capability import why_no_packed
from jumok.attention.masks import Mask
from jumok.attention.positions import Learned
from jumok.batch import IGNORE, Loss, Tokens
from jumok.models.adversarial import with_moved_words
from jumok.models.labels import label_loss
from jumok.models.layers import (
    ACTIVATIONS,
    EncoderLayer,
    Region,
    Stream,
    compile_regions,
    layers,
    lowered,
    places_of,
)
from jumok.models.output import smoothed_loss

__all__ = [
    "Bert",
    "BertConfig",
    "Classifier",
    "Decided",
    "Encoded",
    "Guessed",
    "Located",
    "Pretraining",
    "Spans",
    "Tagger",
]

SPREAD = 0.02  # the standard deviation that weights begin with


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a :class:`Bert` and its dropout; as they stand, a quarter of the published base model."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["bert"] = "bert"
    width: int = 256
    layers: int = 4
    heads: int = 4
    feed_forward: int = 1024
    positions: int = 512  # the length of the longest text
    segments: int = 2
    activation: Literal["gelu", "gelu_new", "relu", "swish"] = "gelu"  # gelu_new: computed by a tanh
    dropout: float = 0.1
    attention_dropout: float = 0.1  # of attention weights; slow in packed texts of over 128 tokens
    eps: float = 1e-12  # of the layer norms
    pooler: bool = True  # whether there is a pooled output, for the heads that need one
    pooling: Literal["first", "mean"] = "first"  # what a Classifier decides by; see there
    adversarial: float = 0.0  # how far a Classifier's words are moved to make it hard (see adversarial.py)
    # What the layers ask for, and BERT leaves no choice in:
    norm: ClassVar[str] = "post"
    activation_dropout: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "feed_forward", "positions", "segments"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} does not divide into heads={self.heads}; change one")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")
        if self.eps <= 0:
            raise ValueError(f"eps={self.eps}: a number above 0 is expected")
        if not self.adversarial >= 0:
            raise ValueError(f"adversarial={self.adversarial}: 0 or more is expected")


@dataclass(frozen=True, eq=False)
class Encoded:
    """What BERT makes of texts."""

    hidden: Tensor  # (B, L, D); at padding, of no meaning
    pooled: Tensor | None  # (B, D); None if the model has no pooler


@dataclass(frozen=True, eq=False)
class Guessed(Encoded):
    """With the logits of :class:`Pretraining`."""

    words: Tensor | None  # (B, L, V)
    next: Tensor | None  # (B, 2): it follows, it does not


@dataclass(frozen=True, eq=False)
class Decided(Encoded):
    """With the logits of a :class:`Classifier` or a :class:`Tagger`."""

    logits: Tensor  # (B, C) or (B, L, C)


@dataclass(frozen=True, eq=False)
class Located(Encoded):
    """With the logits of :class:`Spans`: how much speaks for a beginning, and for an end, at each place."""

    starts: Tensor  # (B, L)
    ends: Tensor  # (B, L)


# ------------------------------------------------------------------------------------- the encoder


class Compiled(nn.Module):
    """A model that knows best which of its parts to compile."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``torch.compile`` all that lies between the attentions: see :func:`compile_regions`."""
        compile_regions(self, *args, **kwargs)


class Entry(Region):
    """The sum of words, positions and segments, normed: the residual stream, and what is given of it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, words: Tensor, segments: Tensor, positions: Tensor) -> Stream:
        x = self.dropout(self.norm(words + segments + positions))
        return x, lowered(x)


class Bert(Compiled):
    """Encodes texts, each token in the light of all others.

    >>> bert = Bert(BertConfig(width=8, heads=2, feed_forward=16), vocabulary=11).eval()
    >>> said = bert(torch.tensor([[5, 6, 7], [8, 9, 0]]), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
    >>> said.hidden.shape, said.pooled.shape
    (torch.Size([2, 3, 8]), torch.Size([2, 8]))
    """

    layers: Sequence[EncoderLayer]

    def __init__(self, config: BertConfig, vocabulary: int) -> None:
        super().__init__()
        self.config = config
        self.word_embedding = nn.Embedding(vocabulary, config.width)
        self.segment_embedding = nn.Embedding(config.segments, config.width)
        self.position = Learned(config.positions, config.width)
        self.entry = Entry(config)
        self.layers = layers(EncoderLayer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.width, config.width) if config.pooler else None
        begin(self)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Encoded:
        """Encode texts in rows, with arguments that are named and mean the same as in ``transformers``.

        Args:
            input_ids: ``(B, L)``.
            token_type_ids: ``(B, L)``, the segment of each token; None: all are in the first.
            attention_mask: ``(B, L)``, 1 for real tokens and 0 for padding, wherever it is; None: all real.
        """
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        self._check_input(input_ids, segments, attention_mask)
        rows, length = input_ids.shape
        tokens = Tokens(input_ids, (length,) * rows)
        if attention_mask is None or bool((real := attention_mask == 1).all()):
            hidden = self.encode(tokens, segments)
            return Encoded(hidden, self.pool(hidden[:, 0]))
        if self._drops_padding(real):
            return self._encode_real(tokens, segments, real)
        hidden = self._encode(tokens, segments, masks.from_zero_one(attention_mask))
        return Encoded(hidden, self.pool(hidden[:, 0]))

    def encode(self, tokens: Tokens, segments: Tensor) -> Tensor:
        """``(B, L, D)``, or packed ``(1, T, D)``; ``segments`` is like the ids."""
        return self._encode(tokens, segments, tokens.mask)

    def pool(self, firsts: Tensor) -> Tensor | None:
        """From the hidden states of the texts' first tokens, ``(N, D)``, one vector for each text."""
        return None if self.pooler is None else torch.tanh(self.pooler(firsts))

    def begin_from(self, other: Bert) -> list[str]:
        """Take over another's weights. What it does not have, a pooler, stays new: the names of that."""
        if _sizes(self) != _sizes(other):
            raise ValueError(f"a BERT of {_sizes(self)} cannot begin from one of {_sizes(other)}")
        own, given = self.state_dict(), other.state_dict()
        self.load_state_dict({name: given.get(name, x) for name, x in own.items()})
        return [name for name in own if name not in given]

    def _encode(self, tokens: Tokens, segments: Tensor, mask: Mask | None) -> Tensor:
        # A packed row has sequences of its own lengths; of padding, which may lie further out, nobody reads.
        self.position.check(0, max(tokens.lengths, default=1) - 1)
        places = places_of(tokens).clamp(max=self.config.positions - 1)
        x, given = self.entry(
            self.word_embedding(tokens.ids), self.segment_embedding(segments), self.position.vectors(places)
        )
        for layer in self.layers:
            x, given = layer(x, given, mask)
        return x  # type: ignore[no-any-return]

    def _drops_padding(self, real: Tensor) -> bool:
        """Whether to encode the real tokens alone, packed, rather than padding along with them.

        On a GPU there is a fast path for packed texts in half precision only, if at all. And where a row
        begins with padding, that padding is what is pooled (as in ``transformers``), so that it must be
        encoded.
        """
        kind, dtype = real.device.type, self.word_embedding.weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        half = dtype in (torch.float16, torch.bfloat16)
        fast = kind == "cpu" or (half and why_no_packed(real.device) is None)
        return fast and bool(real[:, 0].all())

    def _check_input(self, ids: Tensor, segments: Tensor, mask: Tensor | None) -> None:
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(
                f"input_ids of {ids.dtype} and shape {tuple(ids.shape)} came; whole numbers of shape (texts, "
                "length) are expected: a single text goes in as input_ids[None]"
            )
        for name, x, most in (
            ("input_ids", ids, self.word_embedding.num_embeddings),
            ("token_type_ids", segments, self.config.segments),
            ("attention_mask", mask, 2),
        ):
            if x is None:
                continue
            if x.shape != ids.shape:
                raise ValueError(
                    f"{name} of shape {tuple(x.shape)} came with input_ids of shape {tuple(ids.shape)}; "
                    "they have one number for each token"
                )
            # Numbers on a GPU are not waited for.
            if x.device.type == "cpu" and x.numel() and not bool(((x >= 0) & (x < most)).all()):
                found = f"{x.min().item()} to {x.max().item()}"
                raise ValueError(f"{name} holds numbers from {found}; this model takes 0 to {most - 1}")

    def _encode_real(self, tokens: Tokens, segments: Tensor, real: Tensor) -> Encoded:
        rows, length = real.shape
        at = real.flatten().nonzero()[:, 0]
        packed = Tokens.row(tokens.ids.flatten()[at], real.sum(1).tolist()).to(real.device)
        # Where there is padding inside a row, or before it, the tokens behind it keep their places.
        packed = replace(packed, positions=(at % length)[None])
        self.position.check(0, length - 1)
        hidden = self.encode(packed, segments.flatten()[at][None])[0]  # (T, D)
        square = hidden.new_zeros(rows * length, hidden.shape[-1]).index_copy(0, at, hidden)
        assert packed.edges is not None
        return Encoded(square.view(rows, length, -1), self.pool(hidden[packed.edges[:-1].long()]))


def _sizes(bert: Bert) -> str:
    named = ("width", "layers", "heads", "feed_forward", "positions", "segments", "activation", "eps")
    told = [f"{name} {getattr(bert.config, name)}" for name in named]
    return ", ".join([*told, f"{bert.word_embedding.num_embeddings} words"])


def begin(module: nn.Module) -> None:
    """Draw new weights, as the original does."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(part.weight, std=SPREAD, a=-2 * SPREAD, b=2 * SPREAD)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)


# --------------------------------------------------------------------------------------- the heads


class WordHead(Region):
    """Which word was hidden: one more layer, and the word embedding once more as the output layer."""

    def __init__(self, config: BertConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        begin(self)
        self.weight = embedding.weight  # (V, D)
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def logits(self, hidden: Tensor) -> Tensor:
        """``(…, D)`` to ``(…, V)``"""
        return F.linear(self._transformed(hidden), self.weight, self.bias)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The loss of labels ``(M,)`` summed; the logits of all places are never held at one time."""
        return smoothed_loss(self._transformed(hidden), self.weight, labels, bias=self.bias)[0]

    def _transformed(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.transform(hidden)))  # type: ignore[no-any-return]


class Pretraining(Compiled):
    """Says hidden words, and whether the second segment follows the first.

    Either head may be left out; only with both can it be trained from the beginning as published.

    >>> model = Pretraining(BertConfig(width=8, heads=2, feed_forward=16), vocabulary=11)
    >>> batch = Masked.of([[2, 4, 3, 9, 3]], [[0, 0, 0, 1, 1]], places=[1], labels=[8], next=[0])
    >>> sorted(model.loss(batch).parts)
    ['masked', 'next']
    """

    def __init__(self, config: BertConfig, vocabulary: int, *, words: bool = True, next: bool = True) -> None:
        super().__init__()
        self.bert = Bert(config, vocabulary)
        self.words = WordHead(config, self.bert.word_embedding) if words else None
        self.next = _linear(config.width, 2) if next and config.pooler else None

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Guessed:
        """The logits of texts in rows, at all places; the arguments are those of :class:`Bert`."""
        said = self.bert(input_ids, token_type_ids, attention_mask)
        words = None if self.words is None else self.words.logits(said.hidden)
        return Guessed(said.hidden, said.pooled, words, None if self.next is None else self.next(said.pooled))

    def logits(self, batch: Masked) -> tuple[Tensor | None, Tensor | None]:
        """The logits of the words at the masked places only, ``(M, V)``, and of "next?", ``(N, 2)``."""
        hidden, firsts = self._encoded(batch)
        return (
            None if self.words is None else self.words.logits(hidden),
            None if self.next is None else self.next(self.bert.pool(firsts)),
        )

    def loss(self, batch: Masked) -> Loss:
        """The mean loss of the hidden words and that of "next?", added up: so as published.

        A loss here is a sum over ``count`` places, by which the training loop divides it. These are the
        hidden words; so the mean loss of "next?" is taken times their number::

            total / count  =  (masked + next · words / texts) / words  =  masked / words + next / texts

        Processes that share a batch weigh each by its number of words, which is about the same.
        """
        if self.words is None:
            raise ValueError("this model has no head for hidden words, and cannot learn them; make one anew")
        hidden, firsts = self._encoded(batch)
        masked: Tensor = self.words(hidden, batch.labels)
        parts = {"masked": masked.detach()}
        total = masked
        if self.next is not None:
            said = self.next(self.bert.pool(firsts))
            missed = F.cross_entropy(said.float(), batch.next, ignore_index=IGNORE, reduction="sum")
            # Counted where the labels are: a recorded step must count those of every batch.
            words, texts = (counts(labels).sum() for labels in (batch.labels, batch.next))
            missed = missed * (words / texts.clamp(min=1))
            parts["next"] = missed.detach()
            total = masked + missed
        return Loss(total, batch.count, parts)

    def _encoded(self, batch: Masked) -> tuple[Tensor, Tensor]:
        """Hidden states at the masked places and at the first tokens: ``(M, D)`` and ``(N, D)``."""
        hidden = self.bert.encode(batch.tokens, batch.segments).flatten(0, 1)
        firsts = batch.firsts(len(batch.next))
        return hidden.index_select(0, batch.places), hidden.index_select(0, firsts)


class Classifier(Compiled):
    """One of C classes for each text; with a single class, a number.

    It is read off the pooled output, as published; or with ``pooling="mean"`` off the mean of a text's hidden
    states, and then there is no pooler.

    >>> model = Classifier(BertConfig(width=8, heads=2, feed_forward=16), vocabulary=11, classes=3)
    >>> model.logits(Texts.of([[2, 4, 3], [2, 3]])).shape
    torch.Size([2, 3])
    """

    def __init__(
        self, config: BertConfig, vocabulary: int, classes: int, *, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.averages = config.pooling == "mean"
        if not (config.pooler or self.averages):
            raise ValueError(
                "pooler=False: a Classifier decides by the pooled output, so that there must be one; or by "
                "pooling=mean"
            )
        self.bert = Bert(replace(config, pooler=not self.averages), vocabulary)
        self.dropout = nn.Dropout(config.dropout if dropout is None else dropout)
        self.output = _linear(config.width, classes)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Decided:
        """The logits of texts in rows; the arguments are those of :class:`Bert`."""
        said = self.bert(input_ids, token_type_ids, attention_mask)
        pooled = said.pooled
        if self.averages:
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            pooled = _means(said.hidden, (real == 1)[:, None])
        return Decided(said.hidden, pooled, self._decided(pooled))

    def logits(self, batch: Texts, texts: int | None = None) -> Tensor:
        """``(N, C)``, of the first so many texts; None: of all."""
        hidden = self.bert.encode(batch.tokens, batch.segments)
        texts = len(batch.tokens.lengths) if texts is None else texts
        if self.averages:
            return self._decided(_means(hidden, _members(batch.tokens))[:texts])
        return self._decided(self.bert.pool(hidden.flatten(0, 1).index_select(0, batch.firsts(texts))))

    def loss(self, batch: Labelled) -> Loss:
        """Cross-entropy, or with one class the squared error, summed over the texts."""

        def loss() -> Loss:
            return Loss(label_loss(self.logits(batch, len(batch.labels)), batch.labels)[1], batch.count)

        size = self.bert.config.adversarial
        if self.training and size:
            return with_moved_words(self.bert.word_embedding, loss, size, batch.labels)
        return loss()

    def _decided(self, pooled: Tensor | None) -> Tensor:
        return self.output(self.dropout(pooled))  # type: ignore[no-any-return]


class Tagger(Compiled):
    """One of C tags for each token.

    >>> model = Tagger(BertConfig(width=8, heads=2, feed_forward=16), vocabulary=11, classes=3)
    >>> model.logits(Texts.of([[2, 4, 3], [2, 3]])).shape
    torch.Size([2, 3, 3])
    """

    def __init__(
        self, config: BertConfig, vocabulary: int, classes: int, *, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.bert = Bert(replace(config, pooler=False), vocabulary)
        self.dropout = nn.Dropout(config.dropout if dropout is None else dropout)
        self.output = _linear(config.width, classes)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Decided:
        """The logits of texts in rows; the arguments are those of :class:`Bert`."""
        said = self.bert(input_ids, token_type_ids, attention_mask)
        return Decided(said.hidden, said.pooled, self._decided(said.hidden))

    def logits(self, batch: Texts) -> Tensor:
        """``(B, L, C)``, or if packed ``(1, T, C)``."""
        return self._decided(self.bert.encode(batch.tokens, batch.segments))

    def loss(self, batch: TaggedWords) -> Loss:
        """Cross-entropy, summed over the labels that count."""
        said = self.logits(batch).flatten(0, 1).float()
        return Loss(_cross_entropy(said, batch.labels.flatten()), batch.count)

    def _decided(self, hidden: Tensor) -> Tensor:
        return self.output(self.dropout(hidden))  # type: ignore[no-any-return]


class Spans(Compiled):
    """Where in each text the answer begins and ends.

    >>> model = Spans(BertConfig(width=8, heads=2, feed_forward=16), vocabulary=11)
    >>> starts, ends = model.logits(Texts.of([[2, 4, 3, 7, 8, 3], [2, 3]]))
    >>> starts.shape
    torch.Size([2, 6])
    """

    def __init__(self, config: BertConfig, vocabulary: int) -> None:
        super().__init__()
        self.bert = Bert(replace(config, pooler=False), vocabulary)
        self.output = _linear(config.width, 2)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Located:
        """The logits of texts in rows; the arguments are those of :class:`Bert`."""
        said = self.bert(input_ids, token_type_ids, attention_mask)
        return Located(said.hidden, said.pooled, *self.output(said.hidden).unbind(-1))

    def logits(self, batch: Texts) -> tuple[Tensor, Tensor]:
        """The logits of a beginning and of an end at each place: both like the ids."""
        said: Tensor = self.output(self.bert.encode(batch.tokens, batch.segments))
        return said[..., 0], said[..., 1]

    def loss(self, batch: Spanned) -> Loss:
        """The mean of two cross-entropies, over the allowed places of each text; summed over the texts."""
        total = torch.zeros((), device=batch.segments.device)
        for said, wanted in zip(self.logits(batch), (batch.starts, batch.ends), strict=True):
            # The lowest number, not −∞, of which there would be no softmax where a row has nothing else.
            barred = said.float().masked_fill(~batch.allowed, torch.finfo(torch.float32).min)
            total = total + _cross_entropy(_a_row_each(barred, batch.tokens, len(wanted)), wanted) / 2
        return Loss(total, batch.count)


def _linear(width: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(width, outputs)
    begin(layer)
    return layer


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def _members(tokens: Tokens) -> Tensor:
    """Which tokens of a row belong to which of its texts: ``(B, 1, L)``, or packed ``(1, N, T)``."""
    if tokens.edges is None:
        return tokens.real[:, None]
    places, edges = torch.arange(tokens.ids.shape[1], device=tokens.ids.device), tokens.edges[:, None]
    return ((places >= edges[:-1]) & (places < edges[1:]))[None]


def _means(hidden: Tensor, members: Tensor) -> Tensor:
    """The mean of the hidden states of each text, ``(N, D)``; the members are as above."""
    sums = members.to(hidden.dtype) @ hidden
    return (sums / members.sum(-1, keepdim=True).clamp(min=1)).flatten(0, 1)


def _a_row_each(x: Tensor, tokens: Tokens, texts: int) -> Tensor:
    """Numbers like the ids as a row for each of the first texts, ``(N, L)``; behind a text, the lowest."""
    if tokens.edges is None:
        return x[:texts]
    edges = tokens.edges.long()
    at = edges[:texts, None] + torch.arange(tokens.longest, device=x.device)
    behind = at >= edges[1 : texts + 1, None]
    return x[0][at.clamp(max=x.shape[1] - 1)].masked_fill(behind, torch.finfo(x.dtype).min)
