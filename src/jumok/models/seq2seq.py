"""Recurrent encoder-decoders: with a fixed context, with Bahdanau's attention, with Luong's.

An encoder reads the source x_1 … x_S into annotations h̄_1 … h̄_S, one per word. A decoder generates the
target y_1 … y_T step by step. The three families differ in what a step sees of the source::

    fixed context           s_0 = the encoder's last state
    (Sutskever, Cho 2014)   s_t = cell(y_(t−1), s_(t−1))
                            p(y_t) = softmax(W s_t)

    Bahdanau (2014)         c_t = attend(s_(t−1), h̄)                 the query is the previous state;
                            s_t = cell([y_(t−1); c_t], s_(t−1))      the context is an input of the cell
                            t_t = maxout(s_t, c_t, y_(t−1))
                            p(y_t) = softmax(W t_t)

    Luong (2015)            h_t = cell([y_(t−1); h̃_(t−1)], h_(t−1))
                            c_t = attend(h_t, h̄)                     the query is the current state;
                            h̃_t = tanh(W_c [h_t; c_t])               the context bypasses the cell,
                            p(y_t) = softmax(W h̃_t)                  and h̃ is fed to the next step

The query (``attention_query``), the score (``attention_score``), the scope (``attention``) and whether the
context is fed to the cell (``input_feeding``) are independent choices here. The scopes are those of Luong::

    global     a_j = softmax(score(q, h̄_j))                        over all words j of the source
    local-m    a_j = softmax(score(q, h̄_j))                        over the words |j − p| ≤ D
    local-p    a_j = softmax(score(q, h̄_j)) exp(−(j − p)² / 2σ²)   over the words |j − p| ≤ D,  σ = D/2

    local-m    p = t, the number of the step (monotonic alignment)
    local-p    p = S · sigmoid(v · tanh(W q)) (predictive alignment), learned through the Gaussian around p

    c = Σ_j a_j h̄_j

The Gaussian only reduces weights: those of local-p sum to less than one, as in the paper. Steps and positions
count from 0. For a target longer than its source, p stays at the last word.

Without input feeding, all steps run in parallel. With it, there is a loop over the target that contains only
what depends on the previous step: attention, recurrent products and gates. Embeddings and their products are
computed before it; readout, generator and all weight gradients after it. In training, the loop of Bahdanau's
model is one autograd function (:mod:`jumok.models.layers.bahdanau_loop`), with the same results.

Shapes: ``B`` sentences (``N`` rows while decoding), ``S`` source and ``T`` target words, ``Q`` queries, ``V``
words of the vocabulary; widths: ``E`` of an embedding, ``W`` of a state, ``M`` of an annotation (W, or 2 W if
bidirectional), ``R`` of the generator's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from jumok.attention import core, masks
from jumok.attention.compiled_block import has_hooks
from jumok.attention.mask_types import move_to_device
from jumok.attention.masks import Mask
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import Additive, Concat, Dot, General, ScaledDot, Score
from jumok.batches.tokens import LayerAttention, Loss, Seq2SeqBatch, Tokens
from jumok.config import Config
from jumok.models.layers.bahdanau_loop import can_run_bahdanau_loop, run_bahdanau_loop
from jumok.models.layers.deferred_linear import DeferredLinear
from jumok.models.layers.output_loss import linear_cross_entropy, select_labelled
from jumok.models.layers.precision import upcast
from jumok.models.layers.recurrent import (
    HiddenState,
    RecurrentStepper,
    build_rnn,
    reverse_sequences,
    run_rnn,
    run_rnn_on_tokens,
)
from jumok.models.layers.source_sharing import reorder_sources

AttentionScope = Literal["global", "local-m", "local-p"]
ScoreName = Literal["dot", "scaled-dot", "general", "additive", "concat"]


@dataclass(frozen=True)
class Seq2SeqConfig(Config):
    """Configuration of a :class:`Seq2Seq`. The defaults are Bahdanau's model. The others are::

        Sutskever  cell="lstm", num_layers=4, bidirectional=False, reverse_source=True,
                   attention=None, input_feeding=False, readout="plain"
        Cho        bidirectional=False, attention=None
        Luong      cell="lstm", num_layers=4, bidirectional=False, reverse_source=True,
                   attention_score="general", attention_query="current", readout="tanh"

    ``input_feeding``: the cell gets information about the source at every step. Without attention it is the
    encoder's last state (Cho); with attention_query="previous" the context c_t (Bahdanau); with
    attention_query="current" the readout h̃ of the previous step (Luong).

    ``readout``: the input of the generator. "plain" is the state; "tanh" is Luong's tanh(W_c [h_t; c_t]);
    "maxout" is that of Cho and Bahdanau: the maximum of each pair of units in U s_t + C c_t + V y_(t−1) + b.
    """

    type: Literal["seq2seq"] = "seq2seq"
    cell: Literal["gru", "lstm"] = "gru"
    width: int = 256  # of a state, in each direction of the encoder
    embedding_width: int = 256
    num_layers: int = 1  # of the encoder, and of the decoder
    bidirectional: bool = True  # the encoder
    reverse_source: bool = False  # the encoder reads from the last word to the first
    attention: AttentionScope | None = "global"
    attention_score: ScoreName = "additive"
    attention_query: Literal["previous", "current"] = "previous"
    attention_window: int = 10  # D: words to either side that local attention sees
    input_feeding: bool = True
    readout: Literal["plain", "tanh", "maxout"] = "maxout"
    tie_embeddings: Literal["none", "target"] = "none"  # "target": one weight for target embedding and generator
    dropout: float = 0.2  # of embeddings, between layers, and before the generator
    label_smoothing: float = 0.0  # in training only

    def __post_init__(self) -> None:
        self.check_ranges(
            positive=("width", "embedding_width", "num_layers", "attention_window"),
            fraction=("dropout", "label_smoothing"),
        )
        if self.reverse_source and self.bidirectional:
            raise ValueError(
                "reverse_source=true: a bidirectional encoder reads in both directions already; leave one of "
                "the two out"
            )
        if self.attention and self.attention_score == "dot" and self.bidirectional:
            raise ValueError(
                "attention_score='dot' needs annotations as wide as states, and those of a bidirectional "
                "encoder are twice as wide: use attention_score='general', or bidirectional=false"
            )
        feeds_context = self.input_feeding and self.attention_query == "previous"
        if self.attention and self.readout == "plain" and not feeds_context:
            raise ValueError(
                "readout='plain' passes only the state to the generator, and the context is lost: use "
                "readout='tanh', or attention_query='previous' with input_feeding=true"
            )
        if self.tie_embeddings == "target" and self.readout == "plain" and self.width != self.embedding_width:
            raise ValueError(
                f"tie_embeddings='target' with readout='plain' needs states as wide as embeddings, but "
                f"width={self.width} and embedding_width={self.embedding_width}: make them equal, or use "
                "another readout"
            )

    @property
    def annotation_width(self) -> int:
        """Width of the encoder's output for a word."""
        return 2 * self.width if self.bidirectional else self.width


# -------------------------------------------------------------------------------------- attention


@dataclass(frozen=True, eq=False)
class Seq2SeqMemory:
    """The encoder's output, as all decoder steps attend to it."""

    annotations: Tensor  # (N, S, M)
    keys: PreparedKeys  # of the annotations
    mask: Mask | None  # of the padding; mask and lengths are None if there is none
    lengths: Tensor | None  # (N,) on the device

    def reorder(self, index: Tensor) -> Seq2SeqMemory:
        """Return the rows ``index``, in that order. Rows may be repeated or left out."""
        annotations, keys = self.annotations.index_select(0, index), self.keys.reorder(index)
        if self.lengths is None:
            return Seq2SeqMemory(annotations, keys, None, None)
        reordered = Seq2SeqMemory(annotations, keys, None, self.lengths.index_select(0, index))
        return replace(reordered, mask=masks.tensor(cast(Tensor, reordered.build_valid_mask())[:, None]))

    def build_valid_mask(self) -> Tensor | None:
        """``(N, S)``, False at padding. None if there is none."""
        if self.lengths is None:
            return None
        return torch.arange(self.annotations.shape[1], device=self.lengths.device) < self.lengths[:, None]


class DecoderAttention(nn.Module):
    """Attention of a recurrent decoder to its source, with any scope and score.

    "scaled-dot" compares learned projections, ``(W_q q) · (W_k h̄) / √W``, and "general" is ``q · W h̄ /
    √W``. The other scores are those of :mod:`jumok.attention.scores`.

    >>> attention = DecoderAttention("local-m", "general", query_width=3, annotation_width=5, window=1)
    >>> memory = attention.prepare(torch.zeros(2, 7, 5))
    >>> attention(torch.ones(2, 4, 3), memory).shape
    torch.Size([2, 4, 5])
    >>> attention.weights(torch.ones(2, 1, 3), memory, step=3)[0].detach()
    tensor([[0.0000, 0.0000, 0.3333, 0.3333, 0.3333, 0.0000, 0.0000]])
    """

    def __init__(
        self,
        scope: AttentionScope,
        score_name: ScoreName,
        query_width: int,
        annotation_width: int,
        window: int,
    ) -> None:
        super().__init__()
        self.scope, self.window = scope, window
        self.score = _build_score(score_name, query_width, annotation_width)
        # The factor is not part of W: Adam changes each element of W by about the learning rate, whatever its
        # size. Large scores would then grow quickly until only one word gets any weight.
        self.scale = query_width**-0.5 if score_name == "general" else None
        self.has_projections = score_name == "scaled-dot"
        if self.has_projections:
            self.query_projection = nn.Linear(query_width, query_width, bias=False)
            self.key_projection = nn.Linear(annotation_width, query_width, bias=False)
        if scope == "local-p":
            self.position_predictor = nn.Sequential(  # v · tanh(W q)
                nn.Linear(query_width, query_width, bias=False),
                nn.Tanh(),
                nn.Linear(query_width, 1, bias=False),
            )

    def prepare(self, annotations: Tensor, mask: Mask | None = None, lengths: Tensor | None = None) -> Seq2SeqMemory:
        """Compute once what all steps share, from annotations ``(N, S, M)`` that are zero at padding."""
        keys = annotations
        if self.has_projections:
            # (W_q q) · (W_k h̄) = q · (W_qᵀ W_k h̄): both projections are applied once, none at the steps.
            keys = self.key_projection(annotations) @ self.query_projection.weight
        prepared = self.score.prepare(keys)
        # Under autocast the keys have its dtype. The annotations are converted here, not at every step.
        return Seq2SeqMemory(annotations.to(prepared.keys.dtype), prepared, mask, lengths)

    def forward(self, query: Tensor, memory: Seq2SeqMemory, step: int = 0) -> Tensor:
        """Contexts ``(N, Q, M)`` of queries ``(N, Q, W)`` at Q steps, the first with number ``step``."""
        if self.scope == "local-p":
            return core.mix(self.weights(query, memory, step), memory.annotations)
        mask = self._build_mask(memory, self._compute_center(query, memory, step))
        return core.attend(query, memory.keys, memory.annotations, score=self.score, mask=mask, scale=self.scale)

    def weights(self, query: Tensor, memory: Seq2SeqMemory, step: int = 0) -> Tensor:
        """Attention weights ``(N, Q, S)``. The arguments are those of :meth:`forward`."""
        center = self._compute_center(query, memory, step)
        mask = self._build_mask(memory, center)
        weights = core.weights(query, memory.keys, score=self.score, mask=mask, scale=self.scale)
        if self.scope != "local-p" or center is None:
            return weights
        sigma = self.window / 2
        gaussian = torch.exp(-(_compute_distances(memory, center) ** 2) / (2 * sigma**2))
        return weights * gaussian.to(weights.dtype)

    def _compute_center(self, query: Tensor, memory: Seq2SeqMemory, step: int) -> Tensor | None:
        """p for each query, ``(N, Q)`` or ``(1, Q)``. None if the scope is global."""
        if self.scope == "global":
            return None
        source_length = memory.annotations.shape[1]
        if self.scope == "local-m":
            steps = step + torch.arange(query.shape[1], device=query.device)[None]
            steps = steps.clamp(max=source_length - 1)
            return steps if memory.lengths is None else torch.minimum(steps, memory.lengths[:, None] - 1)
        position: Tensor = self.position_predictor(query).squeeze(-1)
        # In float32: near position 50, neighbouring numbers of bfloat16 are a quarter of a word apart.
        position = torch.sigmoid(upcast(position))
        return position * (source_length if memory.lengths is None else memory.lengths[:, None])

    def _build_mask(self, memory: Seq2SeqMemory, center: Tensor | None) -> Mask | None:
        if center is None:
            return memory.mask
        in_window = masks.tensor(_compute_distances(memory, center).abs() <= self.window)
        return in_window if memory.mask is None else in_window & memory.mask


def _compute_distances(memory: Seq2SeqMemory, center: Tensor) -> Tensor:
    """j − p, ``(N, Q, S)`` or ``(1, Q, S)``."""
    return torch.arange(memory.annotations.shape[1], device=center.device) - center[..., None]


def _build_score(name: ScoreName, query_width: int, key_width: int) -> Score:
    match name:
        case "dot":
            return Dot()
        case "scaled-dot":
            return ScaledDot()
        case "general":
            return General(query_width, key_width)
        case "additive":
            return Additive(query_width, key_width, hidden=query_width)
        case "concat":
            return Concat(query_width, key_width, hidden=query_width)


# ---------------------------------------------------------------------------------------- decoder


@dataclass(frozen=True, eq=False)
class Seq2SeqState:
    """Decoding state of N rows that are all at the same step."""

    hidden: HiddenState  # of the cells; each (layers, N, W)
    memory: Seq2SeqMemory | None = None  # None without attention
    input_feed: Tensor | None = None  # (N, ·): fed to the next step's cell, if it is known before the step
    num_steps: int = 0  # steps so far
    rows_per_source: int = 1  # neighbouring rows that continue the same sentence, with equal memories

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> Seq2SeqState:
        """See :class:`~jumok.decoding.protocol.DecoderState`.

        The memory is copied unless all sentences remain with as many rows as before.
        """
        keeps_memory, rows_per_source = False, 1
        if sources is not None:
            source_rows, rows_per_source = reorder_sources(index, sources, self.rows_per_source)
            num_sources = self.hidden[0].shape[1] // rows_per_source
            keeps_memory = rows_per_source == self.rows_per_source and source_rows == list(range(num_sources))
        if keeps_memory and rows_per_source == 1:
            return self  # no row moves
        index = move_to_device(index, self.hidden[0].device)
        return Seq2SeqState(
            tuple(part.index_select(1, index) for part in self.hidden),
            self.memory if keeps_memory or self.memory is None else self.memory.reorder(index),
            None if self.input_feed is None else self.input_feed.index_select(0, index),
            self.num_steps,
            rows_per_source,
        )


class Seq2SeqReadout(nn.Module):
    """The generator's input at a step. :class:`Seq2SeqConfig` describes the choices of ``readout``."""

    def __init__(self, config: Seq2SeqConfig, context_width: int) -> None:
        super().__init__()
        self.readout_type = config.readout
        default_width = max(1, config.width // 2) if self.readout_type == "maxout" else config.width
        self.width = default_width if config.tie_embeddings == "none" else config.embedding_width
        if self.readout_type != "plain":
            units = 2 * self.width if self.readout_type == "maxout" else self.width
            # W_c; or U and C, with V and b:
            self.state_projection = nn.Linear(config.width + context_width, units, bias=False)
        if self.readout_type == "maxout":
            self.word_projection = nn.Linear(config.embedding_width, units)

    def project_words(self, embeddings: Tensor) -> Tensor | None:
        """V y + b for words ``(N, T, E)``. It is computed before a loop over the steps."""
        return self.word_projection(embeddings) if self.readout_type == "maxout" else None

    def forward(
        self,
        state: Tensor,
        context: Tensor | None,
        word_term: Tensor | None,
        state_linear: DeferredLinear | None = None,
    ) -> Tensor:
        """``(…, R)``. ``state_linear`` wraps ``state_projection.weight`` if the steps of a loop share it."""
        if self.readout_type == "plain":
            return state
        state_linear = state_linear or DeferredLinear(self.state_projection.weight)
        total = state_linear(state if context is None else torch.cat([state, context], -1), addend=word_term)
        return total.tanh() if self.readout_type == "tanh" else torch.maximum(*total.chunk(2, -1))


class Seq2SeqDecoder(nn.Module):
    """From embedded target words to the generator's inputs, for any number of steps."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        sees_source = config.attention is not None or config.input_feeding
        self.readout = Seq2SeqReadout(config, context_width=config.annotation_width if sees_source else 0)
        self.attention: DecoderAttention | None = None
        feed_width = config.annotation_width
        if config.attention is not None:
            self.attention = DecoderAttention(
                config.attention,
                config.attention_score,
                config.width,
                config.annotation_width,
                config.attention_window,
            )
            feed_width = self.readout.width if config.attention_query == "current" else feed_width
        input_width = config.embedding_width + (feed_width if config.input_feeding else 0)
        self.rnn = build_rnn(config.cell, input_width, config.width, config.num_layers, dropout=config.dropout)

    def forward(self, embeddings: Tensor, state: Seq2SeqState) -> tuple[Tensor, Tensor, Seq2SeqState]:
        """Return states ``(N, T, W)``, readouts ``(N, T, R)`` and the final state for words ``(N, T, E)``."""
        if self.attention is None or not self.config.input_feeding:
            return self._decode_parallel(embeddings, state)
        if self.config.attention_query == "previous":
            return self._decode_bahdanau(self.attention, embeddings, state)
        return self._decode_luong(self.attention, embeddings, state)

    def _decode_parallel(self, embeddings: Tensor, state: Seq2SeqState) -> tuple[Tensor, Tensor, Seq2SeqState]:
        """Run all recurrent steps, then attention of all steps. No context is fed to a cell."""
        steps = embeddings.shape[1]
        # Without attention, Cho's model feeds the encoder's last state.
        context = None if state.input_feed is None else state.input_feed[:, None].expand(-1, steps, -1)
        inputs = embeddings if context is None else torch.cat([embeddings, context], -1)
        states, hidden = run_rnn(self.rnn, inputs, state.hidden)
        if self.attention is not None:
            context = self.attention(self.compute_queries(states, state), state.memory, state.num_steps)
        readouts = self.readout(states, context, self.readout.project_words(embeddings))
        return states, readouts, replace(state, hidden=hidden, num_steps=state.num_steps + steps)

    def _decode_bahdanau(
        self, attention: DecoderAttention, embeddings: Tensor, state: Seq2SeqState
    ) -> tuple[Tensor, Tensor, Seq2SeqState]:
        """Attend with the previous state, and feed the context to the cell at the same step."""
        memory = cast(Seq2SeqMemory, state.memory)
        hidden = _split_layers(state.hidden)
        if self._can_fuse_steps(attention, memory):
            score, allowed = cast(Additive, attention.score), memory.build_valid_mask()
            all_states, all_contexts = run_bahdanau_loop(
                self.rnn, score, embeddings, hidden[0][0], memory.keys.keys, memory.annotations, allowed
            )
            hidden = [(all_states[:, -1],)]
        else:
            cells = RecurrentStepper(self.rnn, known_width=self.config.embedding_width)
            states: list[Tensor] = []
            contexts: list[Tensor] = []
            for step, gates in enumerate(cells.prepare(embeddings).unbind(1)):
                # c_t = attend(s_(t−1), h̄)
                context = attention(hidden[-1][0][:, None], memory, state.num_steps + step).squeeze(1)
                hidden = cells(gates, context, hidden)  # s_t = cell([y_(t−1); c_t], s_(t−1))
                states.append(hidden[-1][0])
                contexts.append(context)
            all_states, all_contexts = torch.stack(states, 1), torch.stack(contexts, 1)
        readouts = self.readout(all_states, all_contexts, self.readout.project_words(embeddings))
        return all_states, readouts, _advance(state, hidden, embeddings.shape[1], input_feed=None)

    def _can_fuse_steps(self, attention: DecoderAttention, memory: Seq2SeqMemory) -> bool:
        """Return whether one autograd function computes all steps of Bahdanau's decoder in training."""
        return (
            torch.is_grad_enabled()
            and attention.scope == "global"
            and can_run_bahdanau_loop(self.rnn, attention.score, memory.keys.keys, memory.annotations)
            and not (core.is_observed() or has_hooks(attention) or has_hooks(attention.score))
        )

    def _decode_luong(
        self, attention: DecoderAttention, embeddings: Tensor, state: Seq2SeqState
    ) -> tuple[Tensor, Tensor, Seq2SeqState]:
        """Attend with the current state, and feed the readout to the cell at the next step."""
        cells = RecurrentStepper(self.rnn, known_width=self.config.embedding_width)
        state_linear = DeferredLinear(self.readout.state_projection.weight)
        word_terms = self.readout.project_words(embeddings)
        step_terms = [None] * embeddings.shape[1] if word_terms is None else word_terms.unbind(1)
        hidden = _split_layers(state.hidden)
        readout = cast(Tensor, state.input_feed)
        states: list[Tensor] = []
        readouts: list[Tensor] = []
        for step, (gates, term) in enumerate(zip(cells.prepare(embeddings).unbind(1), step_terms, strict=True)):
            hidden = cells(gates, readout, hidden)  # h_t = cell([y_(t−1); h̃_(t−1)], h_(t−1))
            top = hidden[-1][0]
            # c_t = attend(h_t, h̄)
            context = attention(top[:, None], state.memory, state.num_steps + step).squeeze(1)
            readout = self.readout(top, context, term, state_linear)  # h̃_t = tanh(W_c [h_t; c_t])
            states.append(top)
            readouts.append(readout)
        final_state = _advance(state, hidden, len(states), input_feed=readout)
        return torch.stack(states, 1), torch.stack(readouts, 1), final_state

    def compute_queries(self, states: Tensor, initial_state: Seq2SeqState) -> Tensor:
        """Queries ``(N, T, W)`` of the steps that lead from ``initial_state`` to ``states``."""
        if self.config.attention_query == "current":
            return states
        return torch.cat([initial_state.hidden[0][-1][:, None].to(states.dtype), states[:, :-1]], dim=1)


def _split_layers(hidden: HiddenState) -> list[tuple[Tensor, ...]]:
    """Hidden states ``(layers, N, W)`` as one tuple of ``(N, W)`` per layer."""
    return list(zip(*(part.unbind(0) for part in hidden), strict=True))


def _advance(
    state: Seq2SeqState, hidden: list[tuple[Tensor, ...]], steps: int, input_feed: Tensor | None
) -> Seq2SeqState:
    return replace(
        state,
        hidden=tuple(torch.stack(part) for part in zip(*hidden, strict=True)),
        input_feed=input_feed,
        num_steps=state.num_steps + steps,
    )


# -------------------------------------------------------------------------------------- the model


class Seq2Seq(nn.Module):
    """Translates with a recurrent encoder and decoder. Batches must be padded.

    >>> model = Seq2Seq(Seq2SeqConfig(width=8, embedding_width=8), 11, 13).eval()
    >>> batch = Seq2SeqBatch.from_sequences([[5, 6], [7]], [[8], [9, 10, 11]])
    >>> model.loss(batch).count
    6
    >>> state = model.start(batch.source)
    >>> logits, state = model.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    supports_compile = False  # torch.compile would unroll the loop over the target

    def __init__(self, config: Seq2SeqConfig, source_vocab_size: int, target_vocab_size: int) -> None:
        super().__init__()
        self.config = config
        width, layers = config.width, config.num_layers
        self.source_embedding = nn.Embedding(source_vocab_size, config.embedding_width)
        self.target_embedding = nn.Embedding(target_vocab_size, config.embedding_width)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = build_rnn(
            config.cell,
            config.embedding_width,
            width,
            layers,
            bidirectional=config.bidirectional,
            dropout=config.dropout,
        )
        # A unidirectional encoder passes its last state on. That of a bidirectional one is twice as wide.
        parts = 2 if config.cell == "lstm" else 1
        self.bridge = nn.Linear(2 * width, parts * layers * width) if config.bidirectional else None
        self.decoder = Seq2SeqDecoder(config)
        self.generator = nn.Linear(self.decoder.readout.width, target_vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                # With unit variance, cells memorize words and learn less attention. (On the built-in
                # sentences: BLEU 89 instead of 96, alignment error rate 0.15 instead of 0.08.)
                nn.init.normal_(module.weight, std=config.embedding_width**-0.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if config.tie_embeddings == "target":
            self.generator.weight = self.target_embedding.weight

    def loss(self, batch: Seq2SeqBatch) -> Loss:
        """Cross-entropy summed over the labels, smoothed in training. "nll" is the one without smoothing."""
        _, _, readouts = self._run_teacher_forced(batch)
        hidden, labels = select_labelled(self.dropout(readouts), batch)
        smoothing = self.config.label_smoothing if self.training else 0.0
        weight, bias = self.generator.weight, self.generator.bias
        total, nll = linear_cross_entropy(hidden, weight, labels, smoothing, bias)
        return Loss(total, batch.count, {"nll": nll})

    def start(self, source: Tokens) -> Seq2SeqState:
        """Encode the source ``(B, S)``, and prepare what all decoder steps share."""
        _check_padded("source", source)
        lengths = None if source.mask is None else source.lengths_tensor
        embeddings = self.dropout(self.source_embedding(source.ids))
        if self.config.reverse_source:
            embeddings = reverse_sequences(embeddings, lengths)
        annotations, hidden = run_rnn_on_tokens(self.encoder, embeddings, source)  # (B, S, M)
        last = hidden[0][-1]
        if self.bridge is not None:  # s_0 = tanh(W_s [→h_S; ←h_1])
            last = torch.cat([hidden[0][-2], last], -1)
            first = self.bridge(last).tanh().unflatten(-1, (-1, self.config.num_layers, self.config.width))
            hidden = tuple(first.permute(1, 2, 0, 3).contiguous())
        attention = self.decoder.attention
        if attention is None:
            return Seq2SeqState(hidden, input_feed=last if self.config.input_feeding else None)
        if self.config.reverse_source:  # back to the order of the words
            annotations = reverse_sequences(annotations, lengths)
        input_feed = None
        if self.config.input_feeding and self.config.attention_query == "current":
            input_feed = last.new_zeros(last.shape[0], self.decoder.readout.width)
        return Seq2SeqState(hidden, attention.prepare(annotations, source.mask, lengths), input_feed)

    def step(self, state: Seq2SeqState, ids: Tensor) -> tuple[Tensor, Seq2SeqState]:
        """Return the logits ``(N, V)`` of the next words after ``ids`` ``(N,)``, which are BOS at first."""
        embeddings = self.dropout(self.target_embedding(ids[:, None]))
        _, readouts, state = self.decoder(embeddings, state)
        return self.generator(self.dropout(readouts.squeeze(1))), state

    @torch.no_grad()
    def compute_attention_maps(self, batch: Seq2SeqBatch) -> list[LayerAttention]:
        """Attention weights ``(B, 1, T, S)`` of the decoder. Empty for a model without attention."""
        attention = self.decoder.attention
        if attention is None:
            return []
        initial_state, states, _ = self._run_teacher_forced(batch)
        queries = self.decoder.compute_queries(states, initial_state)
        memory = cast(Seq2SeqMemory, initial_state.memory)
        weights = attention.weights(queries, memory, initial_state.num_steps)
        return [LayerAttention("decoder.attention", (weights * batch.target.valid_mask[..., None])[:, None])]

    def _run_teacher_forced(self, batch: Seq2SeqBatch) -> tuple[Seq2SeqState, Tensor, Tensor]:
        """Return the initial state, and the decoder's states and readouts for the given target."""
        _check_padded("target", batch.target)
        initial_state = self.start(batch.source)
        embeddings = self.dropout(self.target_embedding(batch.target.ids))
        states, readouts, _ = self.decoder(embeddings, initial_state)
        return initial_state, states, readouts


def _check_padded(side: str, tokens: Tokens) -> None:
    if tokens.packed:
        raise ValueError(
            f"the {side} is packed, but recurrent layers need one sentence per row: build the batch with packed=False"
        )
    if min(tokens.lengths, default=0) < 1:
        raise ValueError(
            f"the {side} has lengths {list(tokens.lengths)}; expected at least one sentence, and in each at "
            "least one token, such as </s>"
        )
