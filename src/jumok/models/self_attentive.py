"""A text as a matrix, each of whose rows looks at other words of it (Lin 2017), and classes by that matrix.

A recurrent layer reads a text of L words into states H. Several *hops* look at them, each with a query of its
own, which is learned and the same for all texts; so a text gets one vector a hop, however long it is::

    H = BiLSTM(w_1 … w_L)                     L × D     a state for each word
    A = softmax(W_2 tanh(W_1 Hᵀ + b_1))       R × L     where each hop looks: R queries, and keys tanh(…)
    M = A H                                   R × D     the text

    P = ‖A Aᵀ − I‖²                           how far the hops are from looking each at one word of its own

Hops that look at the same words tell the same, and nothing but chance would keep them apart. So for each text
``redundancy_penalty`` · P is added to the loss. P is 0 where every hop looks at a single word and no two at the same,
R (R − 1) where all look at the same one, and about R where all look at everything. (The program that the
authors published takes the mean of the cells rather than their sum; there, coefficients are larger.)

Of two texts that belong together (does the one follow from the other?), each is read by itself, with the same
weights. Their matrices gate each other, hop by hop: all that is known of a pair is products of the two::

    F_i = (M_i U_i) ∘ (M'_i V_i)              R × G     of the hops i, with weights U_i and V_i, D × G

What is known, M or F, is connected to a layer of hidden units, and these to the classes: :class:`FullHiddenLayer`, or
with far fewer weights :class:`PrunedHiddenLayer`.

Shapes: ``B`` texts, ``L`` words of the longest; ``R`` hops, ``D`` numbers of a state (twice the width of a
direction), ``G`` of a factor; ``C`` classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention import core
from jumok.attention.masks import Mask
from jumok.attention.scores import Dot
from jumok.batches.text import ClassificationBatch, TextBatch, TextPairBatch, label_mask
from jumok.batches.tokens import PAD, LayerAttention, Loss, Tokens
from jumok.models.layers.adversarial_training import adversarial_loss
from jumok.models.layers.bigram_embedding import BigramEmbedding
from jumok.models.layers.label_losses import label_loss
from jumok.models.layers.precision import upcast
from jumok.models.layers.recurrent import build_rnn, run_rnn_on_tokens
from jumok.models.layers.word_dropout import drop_words

__all__ = ["SelfAttentiveClassifier", "SelfAttentiveConfig"]


@dataclass(frozen=True)
class SelfAttentiveConfig:
    """The sizes of a :class:`SelfAttentiveClassifier`; as they stand, about a third of the published ones.

    Published, for reviews: embedding=100, width=300, attention=350, hops=30, hidden=3000.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    type: Literal["self_attentive"] = "self_attentive"
    cell: Literal["gru", "lstm"] = "lstm"
    embedding_width: int = 128
    num_bigrams: int = 0  # so many pairs of words have vectors too (see bigrams.py)
    width: int = 128  # of each of the two directions
    num_layers: int = 1
    attention_width: int = 128  # numbers of a query, and of a key
    num_hops: int = 10
    redundancy_penalty: float = 0.1  # how much it costs that hops look at the same words
    mlp_width: int = 512  # units between text and classes, each connected to all that is known of the text; …
    row_units: int = 0  # … or instead of them pruned ones: so many for each row of the matrix,
    column_units: int = 0  # … and so many for each column
    text_pairs: bool = False  # whether texts come in pairs, with one label for both
    pair_width: int = 256  # of a pair, for each hop
    dropout: float = 0.3  # of embeddings, between layers, of matrices, and of hidden units
    word_dropout: float = 0.0  # of whole words, which are unknown then
    adversarial_epsilon: float = 0.0  # how far words are moved to make it hard (see adversarial.py)

    def __post_init__(self) -> None:
        for name in ("embedding", "width", "layers", "attention", "hops", "hidden", "factors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        for name in ("bigrams", "row_units", "column_units", "penalty", "adversarial"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: 0 or more is expected")
        for name in ("dropout", "word_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")
        if bool(self.row_units) != bool(self.column_units):
            raise ValueError(
                f"row_units={self.row_units} with column_units={self.column_units}: pruned units are for "
                "rows and for columns, so both are 1 or more; or both are 0, and each unit sees all"
            )


# ------------------------------------------------------------------------------------------ the parts


class MultiHopAttention(nn.Module):
    """What each hop sees, M ``(B, R, D)``, and where it looks, A ``(B, R, L)``, in states ``(B, L, D)``.

    >>> seen, looked = Hops(3, inputs=4, width=5)(torch.zeros(2, 7, 4), masks.padding([2, 7]))
    >>> seen.shape, looked[0, 0].detach()
    (torch.Size([2, 3, 4]), tensor([0.5000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000]))
    """

    def __init__(self, num_hops: int, input_width: int, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(input_width, width)  # W_1
        self.queries = nn.Parameter(torch.empty(num_hops, width))  # W_2
        self.score = Dot()
        nn.init.xavier_uniform_(self.key.weight)
        nn.init.zeros_(self.key.bias)
        nn.init.normal_(self.queries, std=width**-0.5)  # scores begin below 1: looking at all, a bit apart

    def forward(self, states: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        keys = torch.tanh(self.key(states))
        looked = core.weights(self.queries[None].to(keys.dtype), keys, score=self.score, mask=mask)
        return core.mix(looked, states.to(looked.dtype)), looked


class PairFactors(nn.Module):
    """What two matrices ``(B, R, D)`` have to do with each other: F ``(B, R, G)`` as above."""

    def __init__(self, num_hops: int, width: int, num_factors: int) -> None:
        super().__init__()
        self.first_weight, self.second_weight = (
            _build_row_weights(num_hops, width, num_factors) for _ in range(2)
        )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return _multiply_rows(first, self.first_weight) * _multiply_rows(second, self.second_weight)


class FullHiddenLayer(nn.Sequential):
    """Hidden units that are each connected to all of a matrix ``(B, R, D)``: R · D · units weights.

    With the published sizes, 54 million of them, nine tenths of all that the model learns beside words.
    """

    def __init__(self, rows: int, columns: int, num_units: int) -> None:
        super().__init__(nn.Flatten(), _build_linear(rows * columns, num_units), nn.ReLU())
        self.num_units = num_units


class PrunedHiddenLayer(nn.Module):
    """Hidden units that are each connected to one row of a matrix ``(B, R, D)``, or to one column.

    Each row is what one hop saw; p units are for it alone. Each column is what all hops saw of one number of
    the states; q units are for it alone::

        ■ ■ ■ ■    1st row's p units        ■ · · ·    1st column's q units
        · · · ·                             ■ · · ·
        · · · ·                             ■ · · ·

    That makes R · p + D · q units with R · D · (p + q) weights. As many units that see all would have
    R · D · (R · p + D · q).

    >>> pruned = Pruned(rows=3, columns=4, row_units=5, column_units=2)
    >>> pruned(torch.ones(7, 3, 4)).shape, pruned.units
    (torch.Size([7, 23]), 23)
    >>> pruned.of_rows.numel() + pruned.of_columns.numel()  # 3 · 4 · (5 + 2)
    84
    """

    def __init__(self, rows: int, columns: int, row_units: int, column_units: int) -> None:
        super().__init__()
        self.num_units = rows * row_units + columns * column_units
        self.row_weight = _build_row_weights(rows, columns, row_units)
        self.column_weight = _build_row_weights(columns, rows, column_units)
        self.bias = nn.Parameter(torch.zeros(self.num_units))

    def forward(self, matrix: Tensor) -> Tensor:
        of_rows = _multiply_rows(matrix, self.row_weight)  # (B, R, p)
        of_columns = _multiply_rows(matrix.transpose(1, 2), self.column_weight)  # (B, D, q)
        return F.relu(torch.cat([of_rows.flatten(1), of_columns.flatten(1)], -1) + self.bias)


# ------------------------------------------------------------------------------------------ the model


class SelfAttentiveClassifier(nn.Module):
    """One of C classes for each text, or each pair of texts; with a single class, a number.

    Batches are padded. A text without words is read as if it were one of padding.

    >>> model = SelfAttentive(SelfAttentiveConfig(embedding=8, width=8, hops=3), vocabulary=11, classes=5)
    >>> batch = Labelled.of([[7, 8, 9], [5]], labels=[4, 0])
    >>> model.logits(batch).shape, model.maps(batch)[0].weights.shape
    (torch.Size([2, 5]), torch.Size([2, 3, 1, 3]))
    >>> sorted(model.loss(batch).parts)
    ['nll', 'penalty']
    """

    supports_compile = False  # recurrent layers are one call each, and there is little between them

    def __init__(self, config: SelfAttentiveConfig, vocab_size: int, num_classes: int) -> None:
        super().__init__()
        self.config = config
        states = 2 * config.width
        self.embedding = nn.Embedding(vocab_size, config.embedding_width)
        nn.init.normal_(self.embedding.weight, std=config.embedding_width**-0.5)
        self.bigrams = (
            BigramEmbedding(config.num_bigrams, vocab_size, config.embedding_width)
            if config.num_bigrams
            else None
        )
        self.encoder = build_rnn(
            config.cell,
            config.embedding_width,
            config.width,
            config.num_layers,
            bidirectional=True,
            dropout=config.dropout,
        )
        self.attention = MultiHopAttention(config.num_hops, states, config.attention_width)
        self.factors = PairFactors(config.num_hops, states, config.pair_width) if config.text_pairs else None
        known = config.pair_width if config.text_pairs else states
        self.hidden = (
            PrunedHiddenLayer(config.num_hops, known, config.row_units, config.column_units)
            if config.row_units
            else FullHiddenLayer(config.num_hops, known, config.mlp_width)
        )
        self.output = _build_linear(self.hidden.num_units, num_classes)
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The matrices M ``(B, R, D)`` of texts, and where the hops looked in them, A ``(B, R, L)``."""
        tokens = _require_readable(tokens)
        share = self.config.word_dropout if self.training else 0.0
        words = self.embedding(drop_words(tokens.ids, share))
        if self.bigrams is not None:
            _, pairs = self.bigrams.split_ids(self.bigrams.combine_ids(tokens).ids)
            words = words + self.bigrams(pairs, share)
        if tokens.mask is not None:
            words = words.masked_fill(~tokens.valid_mask[..., None], 0.0)  # whatever padding holds
        states, _ = run_rnn_on_tokens(self.encoder, self.dropout(words), tokens)
        matrices, looked = self.attention(states, tokens.mask)
        return matrices, looked

    def logits(self, batch: TextBatch) -> Tensor:
        """``(B, C)``"""
        return self._compute_logits(batch)[0]

    def loss(self, batch: ClassificationBatch) -> Loss:
        """Cross-entropy, or with one class the squared error, and the penalty, summed over the labels.

        They are the parts "nll", or "error", and "penalty"; with a further one in adversarial training.
        """
        size = self.config.adversarial_epsilon
        if self.training and size:
            return adversarial_loss(self.embedding, lambda: self._compute_loss(batch), size, batch.labels)
        return self._compute_loss(batch)

    def _compute_loss(self, batch: ClassificationBatch) -> Loss:
        logits, looked = self._compute_logits(batch)
        texts = len(batch.labels)
        name, error = label_loss(logits[:texts], batch.labels)
        overlap = sum(_compute_overlap(weights[:texts]) for weights in looked)  # (N,)
        penalty = self.config.redundancy_penalty * torch.where(label_mask(batch.labels), overlap, 0.0).sum()
        return Loss(error + penalty, batch.count, {name: error.detach(), "penalty": penalty.detach()})

    @torch.no_grad()
    def compute_attention_maps(self, batch: TextBatch) -> list[LayerAttention]:
        """Where the hops looked, ``(B, R, 1, L)``; of pairs, in the first texts and in the second ones."""
        return [
            LayerAttention("attention", self.embed(tokens)[1][:, :, None])
            for tokens in self._get_texts(batch)
        ]

    def _compute_logits(self, batch: TextBatch) -> tuple[Tensor, list[Tensor]]:
        """The logits, and where the hops looked in each of the texts that belong together."""
        matrices, looked = zip(*(self.embed(tokens) for tokens in self._get_texts(batch)), strict=True)
        known = matrices[0] if self.factors is None else self.factors(*matrices)
        return self.output(self.dropout(self.hidden(self.dropout(known)))), list(looked)

    def _get_texts(self, batch: TextBatch) -> list[Tokens]:
        if isinstance(batch, TextPairBatch) != self.config.text_pairs:
            came = "single texts" if self.config.text_pairs else "pairs of texts"
            raise ValueError(
                f"{came} came to a model with pairs={self.config.text_pairs}; make it with "
                f"pairs={not self.config.text_pairs} for them"
            )
        return [batch.tokens, batch.second_tokens] if isinstance(batch, TextPairBatch) else [batch.tokens]


def _require_readable(tokens: Tokens) -> Tokens:
    """The same texts, each of at least one token."""
    if tokens.packed:
        raise ValueError(
            "the texts are packed, several in one row; recurrent layers read a text a row: make the batch "
            "with packed=False"
        )
    if not tokens.lengths:
        raise ValueError("there is no text in this batch; at least one is expected")
    if min(tokens.lengths) > 0:
        return tokens
    ids = tokens.ids if tokens.ids.shape[1] else F.pad(tokens.ids, (0, 1), value=PAD)
    lengths = tuple(max(1, length) for length in tokens.lengths)
    return replace(
        tokens,
        ids=ids,
        lengths=lengths,
        device_lengths=None if tokens.device_lengths is None else tokens.device_lengths.clamp(min=1),
    )


# ------------------------------------------------------------------------------------------ the numbers


def _compute_overlap(weights: Tensor) -> Tensor:
    """``‖A Aᵀ − I‖²`` of each text, ``(B,)``, for ``A`` ``(B, R, L)``; summed in at least float32."""
    cells = upcast(weights @ weights.transpose(1, 2))  # (B, R, R)
    wanted = torch.eye(cells.shape[-1], dtype=cells.dtype, device=cells.device)
    return (cells - wanted).square().sum((1, 2))


def _multiply_rows(matrix: Tensor, weights: Tensor) -> Tensor:
    """Row i of each matrix ``(B, R, D)`` times matrix i of the weights ``(R, D, U)``: ``(B, R, U)``."""
    return torch.einsum("brd,rdu->bru", matrix, weights)


def _build_row_weights(rows: int, in_features: int, out_features: int) -> nn.Parameter:
    """As many matrices as rows, each begun by itself."""
    weights = torch.empty(rows, in_features, out_features)
    for one in weights:
        nn.init.xavier_uniform_(one)
    return nn.Parameter(weights)


def _build_linear(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
