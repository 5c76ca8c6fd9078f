"""BERT (Devlin 2019): the Transformer's encoder over one or two segments of text, and its heads.

::

    words + segments + positions ─ norm ─┬─ attend to all ─ feed forward ─┬─ hidden
                                         └────────── × layers ────────────┘   │
                    the word, at masked places ── a tag for each token ───────┤
                  where the answer begins and ends, of all tokens of a text ──┤
                                                                              │ the first token's
                    follows, or not? ── which class of texts? ───────────── pooled

:class:`Bert` has no head. :class:`BertPretrainingModel`, :class:`BertClassifier`, :class:`BertTagger` and :class:`BertSpanExtractor` are a
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

from jumok.attention import masks
from jumok.attention.gpu_support import packed_unsupported_reason
from jumok.attention.masks import Mask
from jumok.attention.positions import LearnedPositions
from jumok.batches.text import (
    AnswerBatch,
    ClassificationBatch,
    PretrainingBatch,
    TaggingBatch,
    TextBatch,
    label_mask,
)
from jumok.batches.tokens import IGNORE, Loss, Tokens
from jumok.models.layers.adversarial_training import adversarial_loss
from jumok.models.layers.label_losses import label_loss
from jumok.models.layers.output_loss import linear_cross_entropy
from jumok.models.layers.residual import (
    ACTIVATIONS,
    CompiledBlock,
    ResidualStream,
    TransformerEncoderLayer,
    build_module_list,
    compile_blocks,
    get_positions,
    to_autocast_dtype,
)

__all__ = [
    "Bert",
    "BertClassificationOutput",
    "BertClassifier",
    "BertConfig",
    "BertOutput",
    "BertPretrainingModel",
    "BertPretrainingOutput",
    "BertSpanExtractor",
    "BertSpanOutput",
    "BertTagger",
]

INIT_STD = 0.02  # the standard deviation that weights begin with


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a :class:`Bert` and its dropout; as they stand, a quarter of the published base model."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    type: Literal["bert"] = "bert"
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    feed_forward_width: int = 1024
    max_positions: int = 512  # the length of the longest text
    num_segments: int = 2
    activation: Literal["gelu", "gelu_new", "relu", "swish"] = "gelu"  # gelu_new: computed by a tanh
    dropout: float = 0.1
    attention_dropout: float = 0.1  # of attention weights; slow in packed texts of over 128 tokens
    layer_norm_eps: float = 1e-12  # of the layer norms
    pooler: bool = True  # whether there is a pooled output, for the heads that need one
    pooling: Literal["first", "mean"] = "first"  # what a Classifier decides by; see there
    adversarial_epsilon: float = (
        0.0  # how far a Classifier's words are moved to make it hard (see adversarial.py)
    )
    # What the layers ask for, and BERT leaves no choice in:
    norm: ClassVar[str] = "post"
    activation_dropout: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "feed_forward", "positions", "segments"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        if self.width % self.num_heads:
            raise ValueError(f"width={self.width} does not divide into heads={self.num_heads}; change one")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")
        if self.layer_norm_eps <= 0:
            raise ValueError(f"eps={self.layer_norm_eps}: a number above 0 is expected")
        if not self.adversarial_epsilon >= 0:
            raise ValueError(f"adversarial={self.adversarial_epsilon}: 0 or more is expected")


@dataclass(frozen=True, eq=False)
class BertOutput:
    """What BERT makes of texts."""

    hidden: Tensor  # (B, L, D); at padding, of no meaning
    pooled: Tensor | None  # (B, D); None if the model has no pooler


@dataclass(frozen=True, eq=False)
class BertPretrainingOutput(BertOutput):
    """With the logits of :class:`BertPretrainingModel`."""

    word_logits: Tensor | None  # (B, L, V)
    next_sentence_logits: Tensor | None  # (B, 2): it follows, it does not


@dataclass(frozen=True, eq=False)
class BertClassificationOutput(BertOutput):
    """With the logits of a :class:`BertClassifier` or a :class:`BertTagger`."""

    logits: Tensor  # (B, C) or (B, L, C)


@dataclass(frozen=True, eq=False)
class BertSpanOutput(BertOutput):
    """With the logits of :class:`BertSpanExtractor`: how much speaks for a beginning, and for an end, at each place."""

    start_logits: Tensor  # (B, L)
    end_logits: Tensor  # (B, L)


# ------------------------------------------------------------------------------------- the encoder


class BlockCompiledModel(nn.Module):
    """A model that knows best which of its parts to compile."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``torch.compile`` all that lies between the attentions: see :func:`compile_blocks`."""
        compile_blocks(self, *args, **kwargs)


class BertInputLayer(CompiledBlock):
    """The sum of words, positions and segments, normed: the residual stream, and what is given of it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, word_embeddings: Tensor, segment_embeddings: Tensor, position_embeddings: Tensor
    ) -> ResidualStream:
        x = self.dropout(self.norm(word_embeddings + segment_embeddings + position_embeddings))
        return x, to_autocast_dtype(x)


class Bert(BlockCompiledModel):
    """Encodes texts, each token in the light of all others.

    >>> bert = Bert(BertConfig(width=8, heads=2, feed_forward=16), vocabulary=11).eval()
    >>> said = bert(torch.tensor([[5, 6, 7], [8, 9, 0]]), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
    >>> said.hidden.shape, said.pooled.shape
    (torch.Size([2, 3, 8]), torch.Size([2, 8]))
    """

    layers: Sequence[TransformerEncoderLayer]

    def __init__(self, config: BertConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word_embedding = nn.Embedding(vocab_size, config.width)
        self.segment_embedding = nn.Embedding(config.num_segments, config.width)
        self.position = LearnedPositions(config.max_positions, config.width)
        self.input_layer = BertInputLayer(config)
        self.layers = build_module_list(TransformerEncoderLayer(config) for _ in range(config.num_layers))
        self.pooler = nn.Linear(config.width, config.width) if config.pooler else None
        init_weights(self)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> BertOutput:
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
            return BertOutput(hidden, self.pool(hidden[:, 0]))
        if self._should_drop_padding(real):
            return self._encode_packed(tokens, segments, real)
        hidden = self._encode(tokens, segments, masks.from_zero_one(attention_mask))
        return BertOutput(hidden, self.pool(hidden[:, 0]))

    def encode(self, tokens: Tokens, segments: Tensor) -> Tensor:
        """``(B, L, D)``, or packed ``(1, T, D)``; ``segments`` is like the ids."""
        return self._encode(tokens, segments, tokens.mask)

    def pool(self, first_hidden: Tensor) -> Tensor | None:
        """From the hidden states of the texts' first tokens, ``(N, D)``, one vector for each text."""
        return None if self.pooler is None else torch.tanh(self.pooler(first_hidden))

    def copy_weights_from(self, other: Bert) -> list[str]:
        """Take over another's weights. What it does not have, a pooler, stays new: the names of that."""
        if _describe_sizes(self) != _describe_sizes(other):
            raise ValueError(
                f"a BERT of {_describe_sizes(self)} cannot begin from one of {_describe_sizes(other)}"
            )
        own, given = self.state_dict(), other.state_dict()
        self.load_state_dict({name: given.get(name, x) for name, x in own.items()})
        return [name for name in own if name not in given]

    def _encode(self, tokens: Tokens, segments: Tensor, mask: Mask | None) -> Tensor:
        # A packed row has sequences of its own lengths; of padding, which may lie further out, nobody reads.
        self.position.check_range(0, max(tokens.lengths, default=1) - 1)
        places = get_positions(tokens).clamp(max=self.config.max_positions - 1)
        x, given = self.input_layer(
            self.word_embedding(tokens.ids), self.segment_embedding(segments), self.position.embed(places)
        )
        for layer in self.layers:
            x, given = layer(x, given, mask)
        return x  # type: ignore[no-any-return]

    def _should_drop_padding(self, valid_mask: Tensor) -> bool:
        """Whether to encode the real tokens alone, packed, rather than padding along with them.

        On a GPU there is a fast path for packed texts in half precision only, if at all. And where a row
        begins with padding, that padding is what is pooled (as in ``transformers``), so that it must be
        encoded.
        """
        kind, dtype = valid_mask.device.type, self.word_embedding.weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        half = dtype in (torch.float16, torch.bfloat16)
        fast = kind == "cpu" or (half and packed_unsupported_reason(valid_mask.device) is None)
        return fast and bool(valid_mask[:, 0].all())

    def _check_input(self, ids: Tensor, segments: Tensor, mask: Tensor | None) -> None:
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(
                f"input_ids of {ids.dtype} and shape {tuple(ids.shape)} came; whole numbers of shape (texts, "
                "length) are expected: a single text goes in as input_ids[None]"
            )
        for name, x, most in (
            ("input_ids", ids, self.word_embedding.num_embeddings),
            ("token_type_ids", segments, self.config.num_segments),
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

    def _encode_packed(self, tokens: Tokens, segments: Tensor, valid_mask: Tensor) -> BertOutput:
        rows, length = valid_mask.shape
        at = valid_mask.flatten().nonzero()[:, 0]
        packed = Tokens.from_packed_ids(tokens.ids.flatten()[at], valid_mask.sum(1).tolist()).to(
            valid_mask.device
        )
        # Where there is padding inside a row, or before it, the tokens behind it keep their places.
        packed = replace(packed, positions=(at % length)[None])
        self.position.check_range(0, length - 1)
        hidden = self.encode(packed, segments.flatten()[at][None])[0]  # (T, D)
        square = hidden.new_zeros(rows * length, hidden.shape[-1]).index_copy(0, at, hidden)
        assert packed.cu_seqlens is not None
        return BertOutput(square.view(rows, length, -1), self.pool(hidden[packed.cu_seqlens[:-1].long()]))


def _describe_sizes(bert: Bert) -> str:
    named = ("width", "layers", "heads", "feed_forward", "positions", "segments", "activation", "eps")
    told = [f"{name} {getattr(bert.config, name)}" for name in named]
    return ", ".join([*told, f"{bert.word_embedding.num_embeddings} words"])


def init_weights(module: nn.Module) -> None:
    """Draw new weights, as the original does."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(part.weight, std=INIT_STD, a=-2 * INIT_STD, b=2 * INIT_STD)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)


# --------------------------------------------------------------------------------------- the heads


class MaskedLMHead(CompiledBlock):
    """Which word was hidden: one more layer, and the word embedding once more as the output layer."""

    def __init__(self, config: BertConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        init_weights(self)
        self.weight = embedding.weight  # (V, D)
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def logits(self, hidden: Tensor) -> Tensor:
        """``(…, D)`` to ``(…, V)``"""
        return F.linear(self._transform_hidden(hidden), self.weight, self.bias)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The loss of labels ``(M,)`` summed; the logits of all places are never held at one time."""
        return linear_cross_entropy(self._transform_hidden(hidden), self.weight, labels, bias=self.bias)[0]

    def _transform_hidden(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.transform(hidden)))  # type: ignore[no-any-return]


class BertPretrainingModel(BlockCompiledModel):
    """Says hidden words, and whether the second segment follows the first.

    Either head may be left out; only with both can it be trained from the beginning as published.

    >>> model = Pretraining(BertConfig(width=8, heads=2, feed_forward=16), vocabulary=11)
    >>> batch = Masked.of([[2, 4, 3, 9, 3]], [[0, 0, 0, 1, 1]], places=[1], labels=[8], next=[0])
    >>> sorted(model.loss(batch).parts)
    ['masked', 'next']
    """

    def __init__(
        self, config: BertConfig, vocab_size: int, *, with_mlm_head: bool = True, with_nsp_head: bool = True
    ) -> None:
        super().__init__()
        self.bert = Bert(config, vocab_size)
        self.mlm_head = MaskedLMHead(config, self.bert.word_embedding) if with_mlm_head else None
        self.nsp_head = _build_linear(config.width, 2) if with_nsp_head and config.pooler else None

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> BertPretrainingOutput:
        """The logits of texts in rows, at all places; the arguments are those of :class:`Bert`."""
        said = self.bert(input_ids, token_type_ids, attention_mask)
        words = None if self.mlm_head is None else self.mlm_head.logits(said.hidden)
        return BertPretrainingOutput(
            said.hidden, said.pooled, words, None if self.nsp_head is None else self.nsp_head(said.pooled)
        )

    def logits(self, batch: PretrainingBatch) -> tuple[Tensor | None, Tensor | None]:
        """The logits of the words at the masked places only, ``(M, V)``, and of "next?", ``(N, 2)``."""
        hidden, firsts = self._encode_batch(batch)
        return (
            None if self.mlm_head is None else self.mlm_head.logits(hidden),
            None if self.nsp_head is None else self.nsp_head(self.bert.pool(firsts)),
        )

    def loss(self, batch: PretrainingBatch) -> Loss:
        """The mean loss of the hidden words and that of "next?", added up: so as published.

        A loss here is a sum over ``count`` places, by which the training loop divides it. These are the
        hidden words; so the mean loss of "next?" is taken times their number::

            total / count  =  (masked + next · words / texts) / words  =  masked / words + next / texts

        Processes that share a batch weigh each by its number of words, which is about the same.
        """
        if self.mlm_head is None:
            raise ValueError("this model has no head for hidden words, and cannot learn them; make one anew")
        hidden, firsts = self._encode_batch(batch)
        masked: Tensor = self.mlm_head(hidden, batch.labels)
        parts = {"masked": masked.detach()}
        total = masked
        if self.nsp_head is not None:
            said = self.nsp_head(self.bert.pool(firsts))
            missed = F.cross_entropy(
                said.float(), batch.next_sentence_labels, ignore_index=IGNORE, reduction="sum"
            )
            # Counted where the labels are: a recorded step must count those of every batch.
            words, texts = (label_mask(labels).sum() for labels in (batch.labels, batch.next_sentence_labels))
            missed = missed * (words / texts.clamp(min=1))
            parts["next"] = missed.detach()
            total = masked + missed
        return Loss(total, batch.count, parts)

    def _encode_batch(self, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        """Hidden states at the masked places and at the first tokens: ``(M, D)`` and ``(N, D)``."""
        hidden = self.bert.encode(batch.tokens, batch.segments).flatten(0, 1)
        firsts = batch.first_token_indices(len(batch.next_sentence_labels))
        return hidden.index_select(0, batch.masked_indices), hidden.index_select(0, firsts)


class BertClassifier(BlockCompiledModel):
    """One of C classes for each text; with a single class, a number.

    It is read off the pooled output, as published; or with ``pooling="mean"`` off the mean of a text's hidden
    states, and then there is no pooler.

    >>> model = Classifier(BertConfig(width=8, heads=2, feed_forward=16), vocabulary=11, classes=3)
    >>> model.logits(Texts.of([[2, 4, 3], [2, 3]])).shape
    torch.Size([2, 3])
    """

    def __init__(
        self, config: BertConfig, vocab_size: int, num_classes: int, *, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.uses_mean_pooling = config.pooling == "mean"
        if not (config.pooler or self.uses_mean_pooling):
            raise ValueError(
                "pooler=False: a Classifier decides by the pooled output, so that there must be one; or by "
                "pooling=mean"
            )
        self.bert = Bert(replace(config, pooler=not self.uses_mean_pooling), vocab_size)
        self.dropout = nn.Dropout(config.dropout if dropout is None else dropout)
        self.output = _build_linear(config.width, num_classes)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> BertClassificationOutput:
        """The logits of texts in rows; the arguments are those of :class:`Bert`."""
        said = self.bert(input_ids, token_type_ids, attention_mask)
        pooled = said.pooled
        if self.uses_mean_pooling:
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            pooled = _mean_pool(said.hidden, (real == 1)[:, None])
        return BertClassificationOutput(said.hidden, pooled, self._compute_logits(pooled))

    def logits(self, batch: TextBatch, num_texts: int | None = None) -> Tensor:
        """``(N, C)``, of the first so many texts; None: of all."""
        hidden = self.bert.encode(batch.tokens, batch.segments)
        num_texts = len(batch.tokens.lengths) if num_texts is None else num_texts
        if self.uses_mean_pooling:
            return self._compute_logits(_mean_pool(hidden, _build_membership(batch.tokens))[:num_texts])
        return self._compute_logits(
            self.bert.pool(hidden.flatten(0, 1).index_select(0, batch.first_token_indices(num_texts)))
        )

    def loss(self, batch: ClassificationBatch) -> Loss:
        """Cross-entropy, or with one class the squared error, summed over the texts."""

        def loss() -> Loss:
            return Loss(label_loss(self.logits(batch, len(batch.labels)), batch.labels)[1], batch.count)

        size = self.bert.config.adversarial_epsilon
        if self.training and size:
            return adversarial_loss(self.bert.word_embedding, loss, size, batch.labels)
        return loss()

    def _compute_logits(self, pooled: Tensor | None) -> Tensor:
        return self.output(self.dropout(pooled))  # type: ignore[no-any-return]


class BertTagger(BlockCompiledModel):
    """One of C tags for each token.

    >>> model = Tagger(BertConfig(width=8, heads=2, feed_forward=16), vocabulary=11, classes=3)
    >>> model.logits(Texts.of([[2, 4, 3], [2, 3]])).shape
    torch.Size([2, 3, 3])
    """

    def __init__(
        self, config: BertConfig, vocab_size: int, num_classes: int, *, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.bert = Bert(replace(config, pooler=False), vocab_size)
        self.dropout = nn.Dropout(config.dropout if dropout is None else dropout)
        self.output = _build_linear(config.width, num_classes)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> BertClassificationOutput:
        """The logits of texts in rows; the arguments are those of :class:`Bert`."""
        said = self.bert(input_ids, token_type_ids, attention_mask)
        return BertClassificationOutput(said.hidden, said.pooled, self._compute_logits(said.hidden))

    def logits(self, batch: TextBatch) -> Tensor:
        """``(B, L, C)``, or if packed ``(1, T, C)``."""
        return self._compute_logits(self.bert.encode(batch.tokens, batch.segments))

    def loss(self, batch: TaggingBatch) -> Loss:
        """Cross-entropy, summed over the labels that count."""
        said = self.logits(batch).flatten(0, 1).float()
        return Loss(_sum_cross_entropy(said, batch.labels.flatten()), batch.count)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        return self.output(self.dropout(hidden))  # type: ignore[no-any-return]


class BertSpanExtractor(BlockCompiledModel):
    """Where in each text the answer begins and ends.

    >>> model = Spans(BertConfig(width=8, heads=2, feed_forward=16), vocabulary=11)
    >>> starts, ends = model.logits(Texts.of([[2, 4, 3, 7, 8, 3], [2, 3]]))
    >>> starts.shape
    torch.Size([2, 6])
    """

    def __init__(self, config: BertConfig, vocab_size: int) -> None:
        super().__init__()
        self.bert = Bert(replace(config, pooler=False), vocab_size)
        self.output = _build_linear(config.width, 2)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> BertSpanOutput:
        """The logits of texts in rows; the arguments are those of :class:`Bert`."""
        said = self.bert(input_ids, token_type_ids, attention_mask)
        return BertSpanOutput(said.hidden, said.pooled, *self.output(said.hidden).unbind(-1))

    def logits(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """The logits of a beginning and of an end at each place: both like the ids."""
        said: Tensor = self.output(self.bert.encode(batch.tokens, batch.segments))
        return said[..., 0], said[..., 1]

    def loss(self, batch: AnswerBatch) -> Loss:
        """The mean of two cross-entropies, over the allowed places of each text; summed over the texts."""
        total = torch.zeros((), device=batch.segments.device)
        for said, wanted in zip(self.logits(batch), (batch.starts, batch.ends), strict=True):
            # The lowest number, not −∞, of which there would be no softmax where a row has nothing else.
            barred = said.float().masked_fill(~batch.answer_mask, torch.finfo(torch.float32).min)
            total = total + _sum_cross_entropy(_unpack_rows(barred, batch.tokens, len(wanted)), wanted) / 2
        return Loss(total, batch.count)


def _build_linear(width: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(width, num_outputs)
    init_weights(layer)
    return layer


def _sum_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def _build_membership(tokens: Tokens) -> Tensor:
    """Which tokens of a row belong to which of its texts: ``(B, 1, L)``, or packed ``(1, N, T)``."""
    if tokens.cu_seqlens is None:
        return tokens.valid_mask[:, None]
    places, edges = torch.arange(tokens.ids.shape[1], device=tokens.ids.device), tokens.cu_seqlens[:, None]
    return ((places >= edges[:-1]) & (places < edges[1:]))[None]


def _mean_pool(hidden: Tensor, membership: Tensor) -> Tensor:
    """The mean of the hidden states of each text, ``(N, D)``; the members are as above."""
    sums = membership.to(hidden.dtype) @ hidden
    return (sums / membership.sum(-1, keepdim=True).clamp(min=1)).flatten(0, 1)


def _unpack_rows(x: Tensor, tokens: Tokens, num_texts: int) -> Tensor:
    """Numbers like the ids as a row for each of the first texts, ``(N, L)``; behind a text, the lowest."""
    if tokens.cu_seqlens is None:
        return x[:num_texts]
    edges = tokens.cu_seqlens.long()
    at = edges[:num_texts, None] + torch.arange(tokens.max_length, device=x.device)
    behind = at >= edges[1 : num_texts + 1, None]
    return x[0][at.clamp(max=x.shape[1] - 1)].masked_fill(behind, torch.finfo(x.dtype).min)
