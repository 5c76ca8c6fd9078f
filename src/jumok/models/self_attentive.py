"""Structured self-attentive sentence embedding (Lin 2017): a text as a matrix, and a classifier of it.

A recurrent layer encodes a text of L words as states H. Several *hops* attend to them, each with its own
query, which is learned and the same for all texts. So a text of any length has one vector per hop::

    H = BiLSTM(w_1 … w_L)                     L × D     states
    A = softmax(W_2 tanh(W_1 Hᵀ + b_1))       R × L     attention weights: R queries W_2, keys tanh(…)
    M = A H                                   R × D     the text

    P = ‖A Aᵀ − I‖²                           redundancy of the hops

Hops that attend to the same words are redundant, so ``redundancy_penalty`` · P is added to the loss for each
text. P is 0 if every hop attends to a single word and no two to the same, R (R − 1) if all attend to the same
word, and about R if all attend to all words uniformly. (The authors' published program takes the mean of the
elements instead of the sum, so its coefficients are larger.)

The texts of a pair (does one entail the other?) are encoded separately with the same weights. Their matrices
gate each other, hop by hop::

    F_i = (M_i U_i) ∘ (M'_i V_i)              R × G     for hops i, with weights U_i and V_i, D × G

A hidden layer connects M or F to the classes: :class:`FullHiddenLayer`, or with far fewer weights
:class:`PrunedHiddenLayer`.

Shapes: ``B`` texts, ``L`` words of the longest; ``R`` hops, ``D`` width of a state (both directions), ``G``
of a factor; ``C`` classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention import core
from jumok.attention.masks import Mask
from jumok.attention.scores import Dot
from jumok.batches.text import ClassificationBatch, TextBatch, TextPairBatch, label_mask
from jumok.batches.tokens import PAD, LayerAttention, Loss, Tokens
from jumok.config import Config
from jumok.models.layers.adversarial_training import adversarial_loss
from jumok.models.layers.label_losses import label_loss
from jumok.models.layers.precision import upcast
from jumok.models.layers.recurrent import build_rnn, run_rnn_on_tokens
from jumok.models.layers.word_embedding import BigramEmbedding, drop_words


@dataclass(frozen=True)
class SelfAttentiveConfig(Config):
    """Configuration of a :class:`SelfAttentiveClassifier`, by default a third of the published sizes.

    Published, for reviews: embedding_width=100, width=300, attention_width=350, num_hops=30, mlp_width=3000.
    """

    type: Literal["self_attentive"] = "self_attentive"
    cell: Literal["gru", "lstm"] = "lstm"
    embedding_width: int = 128
    num_bigrams: int = 0  # number of frequent bigrams with embeddings (see layers/word_embedding.py)
    width: int = 128  # of each direction
    num_layers: int = 1
    attention_width: int = 128  # of queries and keys
    num_hops: int = 10
    redundancy_penalty: float = 0.1
    mlp_width: int = 512  # units of a full hidden layer …
    row_units: int = 0  # … or of a pruned one: units for each row of the matrix,
    column_units: int = 0  # … and for each column
    text_pairs: bool = False  # whether examples are pairs of texts with one label
    pair_width: int = 256  # of the factors of a pair, for each hop
    dropout: float = 0.3  # of embeddings, between layers, of matrices, and of hidden units
    word_dropout: float = 0.0  # fraction of words that become unknown
    adversarial_epsilon: float = 0.0  # size of perturbations (see layers/adversarial_training.py)

    def __post_init__(self) -> None:
        sizes = ("embedding_width", "width", "num_layers", "attention_width", "num_hops", "mlp_width")
        self.check_ranges(
            positive=(*sizes, "pair_width"),
            non_negative=(
                "num_bigrams",
                "row_units",
                "column_units",
                "redundancy_penalty",
                "adversarial_epsilon",
            ),
            fraction=("dropout", "word_dropout"),
        )
        if bool(self.row_units) != bool(self.column_units):
            raise ValueError(
                f"row_units={self.row_units} with column_units={self.column_units}: a pruned hidden layer "
                "needs both to be 1 or more; set both to 0 for a full hidden layer"
            )


# ----------------------------------------------------------------------------------------- layers


class MultiHopAttention(nn.Module):
    """Matrices M ``(B, R, D)`` and attention weights A ``(B, R, L)`` of states H ``(B, L, D)``.

    >>> attention = MultiHopAttention(num_hops=3, input_width=4, width=5)
    >>> matrices, weights = attention(torch.zeros(2, 7, 4), masks.padding([2, 7]))
    >>> matrices.shape, weights[0, 0].detach()
    (torch.Size([2, 3, 4]), tensor([0.5000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000]))
    """

    def __init__(self, num_hops: int, input_width: int, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(input_width, width)  # W_1
        self.queries = nn.Parameter(torch.empty(num_hops, width))  # W_2
        self.score = Dot()
        nn.init.xavier_uniform_(self.key.weight)
        nn.init.zeros_(self.key.bias)
        nn.init.normal_(self.queries, std=width**-0.5)  # small scores: almost uniform weights at first

    def forward(self, states: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        keys = torch.tanh(self.key(states))
        weights = core.weights(self.queries[None].to(keys.dtype), keys, score=self.score, mask=mask)  # A
        return core.mix(weights, states.to(weights.dtype)), weights  # M = A H


class PairFactors(nn.Module):
    """Factors F ``(B, R, G)`` of the matrices ``(B, R, D)`` of two texts."""

    def __init__(self, num_hops: int, width: int, num_factors: int) -> None:
        super().__init__()
        self.first_weight = _build_row_weights(num_hops, width, num_factors)  # U
        self.second_weight = _build_row_weights(num_hops, width, num_factors)  # V

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return _multiply_rows(first, self.first_weight) * _multiply_rows(second, self.second_weight)


class FullHiddenLayer(nn.Sequential):
    """Hidden units that are each connected to the whole matrix ``(B, R, D)``, with R · D · units weights.

    With the published sizes these are 54 million weights, nine tenths of the model without its word
    embedding.
    """

    def __init__(self, rows: int, columns: int, num_units: int) -> None:
        super().__init__(nn.Flatten(), _build_linear(rows * columns, num_units), nn.ReLU())
        self.num_units = num_units


class PrunedHiddenLayer(nn.Module):
    """Hidden units that are each connected to one row of a matrix ``(B, R, D)``, or to one column.

    p units see each row, the output of one hop. q units see each column, one component of the outputs of all
    hops::

        ■ ■ ■ ■    1st row's p units        ■ · · ·    1st column's q units
        · · · ·                             ■ · · ·
        · · · ·                             ■ · · ·

    These are R · p + D · q units with R · D · (p + q) weights. In a full hidden layer, as many units would
    have R · D · (R · p + D · q) weights.

    >>> hidden = PrunedHiddenLayer(rows=3, columns=4, row_units=5, column_units=2)
    >>> hidden(torch.ones(7, 3, 4)).shape, hidden.num_units
    (torch.Size([7, 23]), 23)
    >>> hidden.row_weight.numel() + hidden.column_weight.numel()  # 3 · 4 · (5 + 2)
    84
    """

    def __init__(self, rows: int, columns: int, row_units: int, column_units: int) -> None:
        super().__init__()
        self.num_units = rows * row_units + columns * column_units
        self.row_weight = _build_row_weights(rows, columns, row_units)
        self.column_weight = _build_row_weights(columns, rows, column_units)
        self.bias = nn.Parameter(torch.zeros(self.num_units))

    def forward(self, matrix: Tensor) -> Tensor:
        row_units = _multiply_rows(matrix, self.row_weight)  # (B, R, p)
        column_units = _multiply_rows(matrix.transpose(1, 2), self.column_weight)  # (B, D, q)
        return F.relu(torch.cat([row_units.flatten(1), column_units.flatten(1)], -1) + self.bias)


# ------------------------------------------------------------------------------------------ the model


class SelfAttentiveClassifier(nn.Module):
    """Classifies texts or pairs of texts, or with a single class, predicts a number for each.

    Batches must be padded. An empty text is treated as a single padding token.

    >>> config = SelfAttentiveConfig(embedding_width=8, width=8, num_hops=3)
    >>> model = SelfAttentiveClassifier(config, vocab_size=11, num_classes=5)
    >>> batch = ClassificationBatch.from_sequences([[7, 8, 9], [5]], labels=[4, 0])
    >>> model.logits(batch).shape, model.compute_attention_maps(batch)[0].weights.shape
    (torch.Size([2, 5]), torch.Size([2, 3, 1, 3]))
    >>> sorted(model.loss(batch).parts)
    ['nll', 'redundancy']
    """

    supports_compile = False  # recurrent layers are single calls, and there is little else to compile

    def __init__(self, config: SelfAttentiveConfig, vocab_size: int, num_classes: int) -> None:
        super().__init__()
        self.config = config
        state_width = 2 * config.width
        self.embedding = nn.Embedding(vocab_size, config.embedding_width)
        nn.init.normal_(self.embedding.weight, std=config.embedding_width**-0.5)
        self.bigrams = (
            BigramEmbedding(config.num_bigrams, vocab_size, config.embedding_width) if config.num_bigrams else None
        )
        self.encoder = build_rnn(
            config.cell,
            config.embedding_width,
            config.width,
            config.num_layers,
            bidirectional=True,
            dropout=config.dropout,
        )
        self.attention = MultiHopAttention(config.num_hops, state_width, config.attention_width)
        self.factors = PairFactors(config.num_hops, state_width, config.pair_width) if config.text_pairs else None
        columns = config.pair_width if config.text_pairs else state_width
        self.hidden = (
            PrunedHiddenLayer(config.num_hops, columns, config.row_units, config.column_units)
            if config.row_units
            else FullHiddenLayer(config.num_hops, columns, config.mlp_width)
        )
        self.output = _build_linear(self.hidden.num_units, num_classes)
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Matrices M ``(B, R, D)`` of texts, and their attention weights A ``(B, R, L)``."""
        tokens = _require_readable(tokens)
        word_dropout = self.config.word_dropout if self.training else 0.0
        embeddings = self.embedding(drop_words(tokens.ids, word_dropout))
        if self.bigrams is not None:
            _, bigram_ids = self.bigrams.split_ids(self.bigrams.combine_ids(tokens).ids)
            embeddings = embeddings + self.bigrams(bigram_ids, word_dropout)
        if tokens.mask is not None:  # padding may hold any ids
            embeddings = embeddings.masked_fill(~tokens.valid_mask[..., None], 0.0)
        states, _ = run_rnn_on_tokens(self.encoder, self.dropout(embeddings), tokens)  # H
        matrices, weights = self.attention(states, tokens.mask)
        return matrices, weights

    def logits(self, batch: TextBatch) -> Tensor:
        """Logits ``(B, C)``."""
        return self._compute_logits(batch)[0]

    def loss(self, batch: ClassificationBatch) -> Loss:
        """Cross-entropy, or with one class the squared error, plus the penalty, summed over the labels.

        The parts are "nll" or "error", "redundancy", and in adversarial training "adversarial".
        """
        epsilon = self.config.adversarial_epsilon
        if self.training and epsilon:
            return adversarial_loss(self.embedding, lambda: self._compute_loss(batch), epsilon, batch.labels)
        return self._compute_loss(batch)

    def _compute_loss(self, batch: ClassificationBatch) -> Loss:
        logits, all_weights = self._compute_logits(batch)
        num_texts = len(batch.labels)
        name, error = label_loss(logits[:num_texts], batch.labels)
        overlap = sum(_compute_overlap(weights[:num_texts]) for weights in all_weights)  # P, (N,)
        penalty = self.config.redundancy_penalty * torch.where(label_mask(batch.labels), overlap, 0.0).sum()
        return Loss(error + penalty, batch.count, {name: error.detach(), "redundancy": penalty.detach()})

    @torch.no_grad()
    def compute_attention_maps(self, batch: TextBatch) -> list[LayerAttention]:
        """Attention weights ``(B, R, 1, L)`` of the hops, for the first and the second texts of pairs."""
        return [LayerAttention("attention", self.embed(tokens)[1][:, :, None]) for tokens in self._get_texts(batch)]

    def _compute_logits(self, batch: TextBatch) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and the attention weights of each text of an example."""
        matrices, weights = zip(*(self.embed(tokens) for tokens in self._get_texts(batch)), strict=True)
        features = matrices[0] if self.factors is None else self.factors(*matrices)
        return self.output(self.dropout(self.hidden(self.dropout(features)))), list(weights)

    def _get_texts(self, batch: TextBatch) -> list[Tokens]:
        if isinstance(batch, TextPairBatch) != self.config.text_pairs:
            examples = "single texts" if self.config.text_pairs else "pairs of texts"
            raise ValueError(
                f"the batch has {examples}, but the model has text_pairs={self.config.text_pairs}; build it "
                f"with text_pairs={not self.config.text_pairs}"
            )
        return [batch.tokens, batch.second_tokens] if isinstance(batch, TextPairBatch) else [batch.tokens]


def _require_readable(tokens: Tokens) -> Tokens:
    """Check that texts are padded, and give empty ones a padding token."""
    if tokens.packed:
        raise ValueError(
            "the texts are packed, but recurrent layers need one text per row: build the batch with packed=False"
        )
    if not tokens.lengths:
        raise ValueError("the batch is empty; expected at least one text")
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


def _compute_overlap(weights: Tensor) -> Tensor:
    """``‖A Aᵀ − I‖²`` of each text, ``(B,)``, for weights A ``(B, R, L)``, summed in float32."""
    products = upcast(weights @ weights.transpose(1, 2))  # (B, R, R)
    identity = torch.eye(products.shape[-1], dtype=products.dtype, device=products.device)
    return (products - identity).square().sum((1, 2))


def _multiply_rows(matrix: Tensor, weights: Tensor) -> Tensor:
    """Row i of each matrix ``(B, R, D)`` times matrix i of the weights ``(R, D, U)``: ``(B, R, U)``."""
    return torch.einsum("brd,rdu->bru", matrix, weights)


def _build_row_weights(rows: int, in_features: int, out_features: int) -> nn.Parameter:
    """One weight matrix per row, initialized separately."""
    weights = torch.empty(rows, in_features, out_features)
    for weight in weights:
        nn.init.xavier_uniform_(weight)
    return nn.Parameter(weights)


def _build_linear(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
