"""BERT (Devlin 2019): the Transformer's encoder over one or two segments of text, and its heads.

::

    words + segments + positions ─ norm ─┬─ self-attention ─ feed-forward ─┬─ hidden
                                         └─────────── × layers ────────────┘   │
                     masked language model ── tag of each token ───────────────┤
                                start and end of the answer ───────────────────┤
                                                                               │ first token
                       next sentence? ── class of the text ───────────────── pooled

:class:`Bert` has no head. :class:`BertPretrainingModel`, :class:`BertClassifier`, :class:`BertTagger` and
:class:`BertSpanExtractor` have one, and are trained on their own batches (:mod:`jumok.batches.text`).

Weights are initialized as in the original: a normal distribution with standard deviation 0.02, truncated at
twice that, and zero biases.

Shapes: ``B`` texts (1 row if packed), ``L`` tokens, ``D`` width, ``V`` words, ``C`` classes; ``N`` texts and
``M`` masked positions of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention import masks
from jumok.attention.compiled_block import CompiledBlock, compile_blocks
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
from jumok.config import Config
from jumok.models.layers.adversarial_training import adversarial_loss
from jumok.models.layers.label_losses import label_loss
from jumok.models.layers.module_list import build_module_list
from jumok.models.layers.output_loss import linear_cross_entropy
from jumok.models.layers.precision import to_autocast_dtype
from jumok.models.transformer import (
    ACTIVATIONS,
    ResidualStream,
    TransformerEncoderLayer,
    get_positions,
)

INIT_STD = 0.02  # standard deviation of initial weights


@dataclass(frozen=True)
class BertConfig(Config):
    """Configuration of a :class:`Bert`. The defaults are about a quarter of the published base model."""

    type: Literal["bert"] = "bert"
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    feed_forward_width: int = 1024
    max_positions: int = 512  # maximum length of a text
    num_segments: int = 2
    activation: Literal["gelu", "gelu_new", "relu", "swish"] = "gelu"  # gelu_new: tanh approximation
    dropout: float = 0.1
    attention_dropout: float = 0.1  # of attention weights; slow for packed texts of over 128 tokens
    layer_norm_eps: float = 1e-12
    pooler: bool = True  # whether there is a pooled output, for the heads that need one
    pooling: Literal["first", "mean"] = "first"  # input of a BertClassifier's head; see there
    adversarial_epsilon: float = 0.0  # of a BertClassifier (see layers/adversarial_training.py)
    # Fields that the layers read and that BERT fixes:
    norm: ClassVar[str] = "post"
    activation_dropout: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        sizes = ("width", "num_layers", "num_heads", "feed_forward_width", "max_positions", "num_segments")
        self.check_ranges(
            positive=sizes,
            fraction=("dropout", "attention_dropout"),
            non_negative=("adversarial_epsilon",),
            above_zero=("layer_norm_eps",),
        )
        self.check_divisible("width", "num_heads")


@dataclass(frozen=True, eq=False)
class BertOutput:
    """Output of a :class:`Bert`."""

    hidden: Tensor  # (B, L, D); undefined at padding
    pooled: Tensor | None  # (B, D); None if the model has no pooler


@dataclass(frozen=True, eq=False)
class BertPretrainingOutput(BertOutput):
    """Output of a :class:`BertPretrainingModel`."""

    word_logits: Tensor | None  # (B, L, V)
    next_sentence_logits: Tensor | None  # (B, 2): next sentence, random sentence


@dataclass(frozen=True, eq=False)
class BertClassificationOutput(BertOutput):
    """Output of a :class:`BertClassifier` or a :class:`BertTagger`."""

    logits: Tensor  # (B, C) or (B, L, C)


@dataclass(frozen=True, eq=False)
class BertSpanOutput(BertOutput):
    """Output of a :class:`BertSpanExtractor`."""

    start_logits: Tensor  # (B, L)
    end_logits: Tensor  # (B, L)


# ------------------------------------------------------------------------------------- the encoder


class BlockCompiledModel(nn.Module):
    """A model whose ``compile`` compiles all that lies between the attentions."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Apply ``torch.compile`` to all that lies between the attentions: see :func:`compile_blocks`."""
        compile_blocks(self, *args, **kwargs)


class BertInputLayer(CompiledBlock):
    """``dropout(norm(words + segments + positions))``."""

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
    """Encodes texts.

    >>> bert = Bert(BertConfig(width=8, num_heads=2, feed_forward_width=16), vocab_size=11).eval()
    >>> ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    >>> output = bert(ids, attention_mask=mask)
    >>> output.hidden.shape, output.pooled.shape
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
        """Encode padded texts. The arguments have the names and meanings of ``transformers``.

        Args:
            input_ids: ``(B, L)``.
            token_type_ids: ``(B, L)``, the segment of each token. Defaults to the first segment.
            attention_mask: ``(B, L)``, 1 for tokens and 0 for padding, which may be anywhere. Defaults to 1.
        """
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        self._check_input(input_ids, segments, attention_mask)
        rows, length = input_ids.shape
        tokens = Tokens(input_ids, (length,) * rows)
        if attention_mask is None or bool((valid_mask := attention_mask == 1).all()):
            hidden = self.encode(tokens, segments)
            return BertOutput(hidden, self.pool(hidden[:, 0]))
        if self._should_drop_padding(valid_mask):
            return self._encode_packed(tokens, segments, valid_mask)
        hidden = self._encode(tokens, segments, masks.from_zero_one(attention_mask))
        return BertOutput(hidden, self.pool(hidden[:, 0]))

    def encode(self, tokens: Tokens, segments: Tensor) -> Tensor:
        """Hidden states ``(B, L, D)``, or packed ``(1, T, D)``. ``segments`` has the shape of the ids."""
        return self._encode(tokens, segments, tokens.mask)

    def pool(self, first_hidden: Tensor) -> Tensor | None:
        """Pooled output ``(N, D)`` from the hidden states of the first tokens ``(N, D)``."""
        return None if self.pooler is None else torch.tanh(self.pooler(first_hidden))

    def copy_weights_from(self, other: Bert) -> list[str]:
        """Copy another model's weights. Return the names of weights that it lacks, as of the pooler."""
        if _describe_sizes(self) != _describe_sizes(other):
            raise ValueError(f"a BERT with {_describe_sizes(self)} cannot start from one with {_describe_sizes(other)}")
        own_weights, other_weights = self.state_dict(), other.state_dict()
        self.load_state_dict({name: other_weights.get(name, x) for name, x in own_weights.items()})
        return [name for name in own_weights if name not in other_weights]

    def _encode(self, tokens: Tokens, segments: Tensor, mask: Mask | None) -> Tensor:
        # Positions of padding may be out of range. They are clamped, and the outputs there are never read.
        self.position.check_range(0, max(tokens.lengths, default=1) - 1)
        positions = get_positions(tokens).clamp(max=self.config.max_positions - 1)
        x, normed = self.input_layer(
            self.word_embedding(tokens.ids), self.segment_embedding(segments), self.position.embed(positions)
        )
        for layer in self.layers:
            x, normed = layer(x, normed, mask)
        return x  # type: ignore[no-any-return]

    def _should_drop_padding(self, valid_mask: Tensor) -> bool:
        """Whether to pack the valid tokens instead of encoding padding too.

        On a GPU packed texts have a fast path in half precision only, if at all. If a row begins with
        padding, the padding is pooled (as in ``transformers``), so it must be encoded.
        """
        device_type, dtype = valid_mask.device.type, self.word_embedding.weight.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        is_half = dtype in (torch.float16, torch.bfloat16)
        is_fast = device_type == "cpu" or (is_half and packed_unsupported_reason(valid_mask.device) is None)
        return is_fast and bool(valid_mask[:, 0].all())

    def _check_input(self, ids: Tensor, segments: Tensor, mask: Tensor | None) -> None:
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(
                f"input_ids are {ids.dtype} of shape {tuple(ids.shape)}; expected integers of shape (texts, "
                "length): pass a single text as input_ids[None]"
            )
        for name, x, limit in (
            ("input_ids", ids, self.word_embedding.num_embeddings),
            ("token_type_ids", segments, self.config.num_segments),
            ("attention_mask", mask, 2),
        ):
            if x is None:
                continue
            if x.shape != ids.shape:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}, but input_ids have shape {tuple(ids.shape)}; "
                    "expected one number for each token"
                )
            # Tensors on a GPU are not checked, because that would wait for it.
            if x.device.type == "cpu" and x.numel() and not bool(((x >= 0) & (x < limit)).all()):
                value_range = f"{x.min().item()} to {x.max().item()}"
                raise ValueError(f"{name} holds numbers from {value_range}; expected 0 to {limit - 1}")

    def _encode_packed(self, tokens: Tokens, segments: Tensor, valid_mask: Tensor) -> BertOutput:
        rows, length = valid_mask.shape
        token_indices = valid_mask.flatten().nonzero()[:, 0]
        packed = Tokens.from_packed_ids(tokens.ids.flatten()[token_indices], valid_mask.sum(1).tolist()).to(
            valid_mask.device
        )
        # Tokens after padding keep their positions.
        packed = replace(packed, positions=(token_indices % length)[None])
        self.position.check_range(0, length - 1)
        hidden = self.encode(packed, segments.flatten()[token_indices][None])[0]  # (T, D)
        padded = hidden.new_zeros(rows * length, hidden.shape[-1]).index_copy(0, token_indices, hidden)
        assert packed.cu_seqlens is not None
        return BertOutput(padded.view(rows, length, -1), self.pool(hidden[packed.cu_seqlens[:-1].long()]))


def _describe_sizes(bert: Bert) -> str:
    names = ("width", "num_layers", "num_heads", "feed_forward_width", "max_positions", "num_segments")
    sizes = [f"{name}={getattr(bert.config, name)}" for name in (*names, "activation", "layer_norm_eps")]
    return ", ".join([*sizes, f"vocab_size={bert.word_embedding.num_embeddings}"])


def init_weights(module: nn.Module) -> None:
    """Initialize linear layers and embeddings as the original does."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(layer.weight, std=INIT_STD, a=-2 * INIT_STD, b=2 * INIT_STD)
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)


# --------------------------------------------------------------------------------------- the heads


class BertModelWithHead(BlockCompiledModel):
    """Base class of the models below: a :class:`Bert`, and a head that is applied to its output."""

    bert: Bert

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> BertOutput:
        """Encode padded texts, and return the logits of the head. The arguments are those of :meth:`Bert.forward`."""
        return self.apply_head(self.bert(input_ids, token_type_ids, attention_mask), attention_mask)

    def apply_head(self, encoded: BertOutput, attention_mask: Tensor | None) -> BertOutput:
        """Logits of encoded texts. Those of tokens are computed at all positions."""
        raise NotImplementedError


class MaskedLMHead(CompiledBlock):
    """Predicts masked words: a linear layer with activation and norm, then the tied word embedding."""

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
        """Cross-entropy of the labels ``(M,)``, summed, without holding all logits at once."""
        return linear_cross_entropy(self._transform_hidden(hidden), self.weight, labels, bias=self.bias)[0]

    def _transform_hidden(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.transform(hidden)))  # type: ignore[no-any-return]


class BertPretrainingModel(BertModelWithHead):
    """Predicts masked words, and whether the second segment follows the first.

    Either head may be left out. Pretraining as published needs both.

    >>> config = BertConfig(width=8, num_heads=2, feed_forward_width=16)
    >>> model = BertPretrainingModel(config, vocab_size=11)
    >>> batch = PretrainingBatch.from_sequences(
    ...     [[2, 4, 3, 9, 3]], [[0, 0, 0, 1, 1]], masked_indices=[1], labels=[8], next_sentence_labels=[0]
    ... )
    >>> sorted(model.loss(batch).parts)
    ['masked_lm', 'next_sentence']
    """

    def __init__(
        self, config: BertConfig, vocab_size: int, *, with_mlm_head: bool = True, with_nsp_head: bool = True
    ) -> None:
        super().__init__()
        self.bert = Bert(config, vocab_size)
        self.mlm_head = MaskedLMHead(config, self.bert.word_embedding) if with_mlm_head else None
        self.nsp_head = _build_linear(config.width, 2) if with_nsp_head and config.pooler else None

    def apply_head(self, encoded: BertOutput, attention_mask: Tensor | None) -> BertPretrainingOutput:
        word_logits = None if self.mlm_head is None else self.mlm_head.logits(encoded.hidden)
        next_sentence_logits = None if self.nsp_head is None else self.nsp_head(encoded.pooled)
        return BertPretrainingOutput(encoded.hidden, encoded.pooled, word_logits, next_sentence_logits)

    def logits(self, batch: PretrainingBatch) -> tuple[Tensor | None, Tensor | None]:
        """Logits of the masked words only, ``(M, V)``, and of next-sentence prediction, ``(N, 2)``."""
        hidden, first_hidden = self._encode_batch(batch)
        return (
            None if self.mlm_head is None else self.mlm_head.logits(hidden),
            None if self.nsp_head is None else self.nsp_head(self.bert.pool(first_hidden)),
        )

    def loss(self, batch: PretrainingBatch) -> Loss:
        """Mean loss of the masked words plus mean loss of next-sentence prediction, as published.

        A :class:`Loss` is a sum over ``count`` labels, by which the training loop divides it. Here these are
        the masked words, so the mean loss of next-sentence prediction is multiplied by their number::

            total / count  =  (mlm + nsp · words / texts) / words  =  mlm / words + nsp / texts

        Processes that share a batch weight it by their number of words, which is about the same for each.
        """
        if self.mlm_head is None:
            raise ValueError(
                "this model has no masked-LM head and cannot be pretrained; build it with with_mlm_head=True"
            )
        hidden, first_hidden = self._encode_batch(batch)
        mlm_loss: Tensor = self.mlm_head(hidden, batch.labels)
        parts = {"masked_lm": mlm_loss.detach()}
        total = mlm_loss
        if self.nsp_head is not None:
            nsp_logits = self.nsp_head(self.bert.pool(first_hidden))
            nsp_loss = _sum_cross_entropy(nsp_logits.float(), batch.next_sentence_labels)
            # Counted on the device, because a replayed CUDA graph must count the labels of every batch.
            words, texts = (label_mask(labels).sum() for labels in (batch.labels, batch.next_sentence_labels))
            nsp_loss = nsp_loss * (words / texts.clamp(min=1))
            parts["next_sentence"] = nsp_loss.detach()
            total = mlm_loss + nsp_loss
        return Loss(total, batch.count, parts)

    def _encode_batch(self, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        """Hidden states at the masked positions ``(M, D)`` and at the first tokens ``(N, D)``."""
        hidden = self.bert.encode(batch.tokens, batch.segments).flatten(0, 1)
        first_tokens = batch.first_token_indices(len(batch.next_sentence_labels))
        return hidden.index_select(0, batch.masked_indices), hidden.index_select(0, first_tokens)


class BertClassifier(BertModelWithHead):
    """Classifies texts, or with a single class, predicts a number for each.

    The input of the output layer is the pooled output, as published, or with ``pooling="mean"`` the mean of a
    text's hidden states. The latter has no pooler.

    >>> config = BertConfig(width=8, num_heads=2, feed_forward_width=16)
    >>> model = BertClassifier(config, vocab_size=11, num_classes=3)
    >>> model.logits(TextBatch.from_sequences([[2, 4, 3], [2, 3]])).shape
    torch.Size([2, 3])
    """

    def __init__(self, config: BertConfig, vocab_size: int, num_classes: int, *, dropout: float | None = None) -> None:
        super().__init__()
        self.uses_mean_pooling = config.pooling == "mean"
        if not (config.pooler or self.uses_mean_pooling):
            raise ValueError(
                "pooler=False: a BertClassifier needs the pooled output; use pooler=True, or pooling='mean'"
            )
        self.bert = Bert(replace(config, pooler=not self.uses_mean_pooling), vocab_size)
        self.dropout = nn.Dropout(config.dropout if dropout is None else dropout)
        self.output = _build_linear(config.width, num_classes)

    def apply_head(self, encoded: BertOutput, attention_mask: Tensor | None) -> BertClassificationOutput:
        pooled = encoded.pooled
        if self.uses_mean_pooling:
            hidden = encoded.hidden
            mask = hidden.new_ones(hidden.shape[:2]) if attention_mask is None else attention_mask
            pooled = _mean_pool(hidden, (mask == 1)[:, None])
        return BertClassificationOutput(encoded.hidden, pooled, self._compute_logits(pooled))

    def logits(self, batch: TextBatch, num_texts: int | None = None) -> Tensor:
        """Logits ``(N, C)`` of the first ``num_texts`` texts. Defaults to all texts."""
        hidden = self.bert.encode(batch.tokens, batch.segments)
        num_texts = len(batch.tokens.lengths) if num_texts is None else num_texts
        if self.uses_mean_pooling:
            return self._compute_logits(_mean_pool(hidden, _build_membership(batch.tokens))[:num_texts])
        first_hidden = hidden.flatten(0, 1).index_select(0, batch.first_token_indices(num_texts))
        return self._compute_logits(self.bert.pool(first_hidden))

    def loss(self, batch: ClassificationBatch) -> Loss:
        """Cross-entropy, or with one class the squared error, summed over the texts."""

        def compute_loss() -> Loss:
            return Loss(label_loss(self.logits(batch, len(batch.labels)), batch.labels)[1], batch.count)

        epsilon = self.bert.config.adversarial_epsilon
        if self.training and epsilon:
            return adversarial_loss(self.bert.word_embedding, compute_loss, epsilon, batch.labels)
        return compute_loss()

    def _compute_logits(self, pooled: Tensor | None) -> Tensor:
        return self.output(self.dropout(pooled))  # type: ignore[no-any-return]


class BertTagger(BertModelWithHead):
    """Predicts a tag for each token.

    >>> config = BertConfig(width=8, num_heads=2, feed_forward_width=16)
    >>> model = BertTagger(config, vocab_size=11, num_classes=3)
    >>> model.logits(TextBatch.from_sequences([[2, 4, 3], [2, 3]])).shape
    torch.Size([2, 3, 3])
    """

    def __init__(self, config: BertConfig, vocab_size: int, num_classes: int, *, dropout: float | None = None) -> None:
        super().__init__()
        self.bert = Bert(replace(config, pooler=False), vocab_size)
        self.dropout = nn.Dropout(config.dropout if dropout is None else dropout)
        self.output = _build_linear(config.width, num_classes)

    def apply_head(self, encoded: BertOutput, attention_mask: Tensor | None) -> BertClassificationOutput:
        return BertClassificationOutput(encoded.hidden, encoded.pooled, self._compute_logits(encoded.hidden))

    def logits(self, batch: TextBatch) -> Tensor:
        """Logits ``(B, L, C)``, or if packed ``(1, T, C)``."""
        return self._compute_logits(self.bert.encode(batch.tokens, batch.segments))

    def loss(self, batch: TaggingBatch) -> Loss:
        """Cross-entropy, summed over the labels that count."""
        logits = self.logits(batch).flatten(0, 1).float()
        return Loss(_sum_cross_entropy(logits, batch.labels.flatten()), batch.count)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        return self.output(self.dropout(hidden))  # type: ignore[no-any-return]


class BertSpanExtractor(BertModelWithHead):
    """Predicts the start and the end of an answer in each text.

    >>> model = BertSpanExtractor(BertConfig(width=8, num_heads=2, feed_forward_width=16), vocab_size=11)
    >>> start_logits, end_logits = model.logits(TextBatch.from_sequences([[2, 4, 3, 7, 8, 3], [2, 3]]))
    >>> start_logits.shape
    torch.Size([2, 6])
    """

    def __init__(self, config: BertConfig, vocab_size: int) -> None:
        super().__init__()
        self.bert = Bert(replace(config, pooler=False), vocab_size)
        self.output = _build_linear(config.width, 2)

    def apply_head(self, encoded: BertOutput, attention_mask: Tensor | None) -> BertSpanOutput:
        return BertSpanOutput(encoded.hidden, encoded.pooled, *self.output(encoded.hidden).unbind(-1))

    def logits(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """Logits of the start and of the end at each position, both in the shape of the ids."""
        logits: Tensor = self.output(self.bert.encode(batch.tokens, batch.segments))
        return logits[..., 0], logits[..., 1]

    def loss(self, batch: AnswerBatch) -> Loss:
        """Mean of the cross-entropies of start and end within the answer mask, summed over the texts."""
        total = torch.zeros((), device=batch.segments.device)
        for logits, labels in zip(self.logits(batch), (batch.starts, batch.ends), strict=True):
            # The smallest number instead of −∞, because a row of −∞ has no softmax.
            masked = logits.float().masked_fill(~batch.answer_mask, torch.finfo(torch.float32).min)
            total = total + _sum_cross_entropy(_unpack_rows(masked, batch.tokens, len(labels)), labels) / 2
        return Loss(total, batch.count)


def _build_linear(width: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(width, num_outputs)
    init_weights(layer)
    return layer


def _sum_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def _build_membership(tokens: Tokens) -> Tensor:
    """Mask of the tokens of a row that belong to each text: ``(B, 1, L)``, or packed ``(1, N, T)``."""
    if tokens.cu_seqlens is None:
        return tokens.valid_mask[:, None]
    index, edges = torch.arange(tokens.ids.shape[1], device=tokens.ids.device), tokens.cu_seqlens[:, None]
    return ((index >= edges[:-1]) & (index < edges[1:]))[None]


def _mean_pool(hidden: Tensor, membership: Tensor) -> Tensor:
    """Mean of the hidden states of each text, ``(N, D)``. See :func:`_build_membership`."""
    sums = membership.to(hidden.dtype) @ hidden
    return (sums / membership.sum(-1, keepdim=True).clamp(min=1)).flatten(0, 1)


def _unpack_rows(x: Tensor, tokens: Tokens, num_texts: int) -> Tensor:
    """Values in the shape of the ids as one row ``(N, L)`` per text, filled with the smallest number."""
    if tokens.cu_seqlens is None:
        return x[:num_texts]
    edges = tokens.cu_seqlens.long()
    index = edges[:num_texts, None] + torch.arange(tokens.max_length, device=x.device)
    is_padding = index >= edges[1 : num_texts + 1, None]
    return x[0][index.clamp(max=x.shape[1] - 1)].masked_fill(is_padding, torch.finfo(x.dtype).min)
