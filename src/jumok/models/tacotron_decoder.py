"""Decoder of Tacotron: an attention RNN, attention to the text, and RNNs that generate mel frames.

::

    frame ─ pre-net ─ attention RNN ── query ─── attention ── context ─┬─ decoder RNNs ─┬─ r mel frames
                       ↑                                               │                └─ r stop logits
                       └──────────────── at the next step ─────────────┘

Only the attention RNN and attention run step by step. If the inputs of all steps are known beforehand, as in
training, everything before and after them runs over all steps at once.

The score is additive or location-sensitive::

    additive               e_n = v · tanh(W q + U h_n)
    location-sensitive     e_n = v · tanh(W q + U h_n + F f_n + b)         f: features of earlier weights

    y = softmax(e)
    context = Σ_n y_n h_n

*Forward attention* (Zhang, Ling and Dai 2018) replaces y by weights α that can only stay at a symbol or move
on to the next one::

    α_t(n)  ∝  (α_(t−1)(n) + α_(t−1)(n−1)) · y_t(n)

                 n
                 ■ ■ · · ·
             t   · ■ ■ · ·
                 · · ■ ■ ·

Shapes: ``B`` utterances, ``L`` symbols, ``S`` steps of ``r`` frames, ``M`` mels; widths: ``W`` of an RNN,
``D`` of a symbol's state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention import core
from jumok.attention.gpu_support import triton_unsupported_reason
from jumok.attention.mask_types import Mask, PaddingMask
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import Additive, LocationSensitive, Score
from jumok.models.layers.deferred_linear import DeferredLinear
from jumok.models.layers.module_list import build_module_list
from jumok.models.layers.precision import upcast
from jumok.models.layers.recurrent import HiddenState, RecurrentModule, RecurrentStepper, build_rnn, run_rnn

LOCATION_CHANNELS = 2  # inputs of location-sensitive attention: the last weights, and the sum of all
MAX_GRADIENT = 1e4  # bound of the gradients of forward attention
MIN_TOTAL = 1e-20  # minimum of the normalizer in the gradients of forward attention


# -------------------------------------------------------------------------------------- attention


@dataclass(frozen=True, eq=False)
class TacotronMemory:
    """The encoder's output, as all decoder steps attend to it."""

    states: Tensor  # (B, L, D)
    keys: PreparedKeys  # of the states
    mask: Mask | None  # of the padding; None if there is none
    location_layer: DeferredLinear | None  # from windows of earlier weights to F f; None for the additive score


@dataclass(frozen=True, eq=False)
class TacotronAlignment:
    """Attention weights of earlier steps, in float32."""

    last_weights: Tensor  # (B, L): at the last step
    cumulative_weights: Tensor  # (B, L): sum over all steps


class TacotronAttention(nn.Module):
    """Attention of the decoder to the text, one query at a time.

    Args:
        width: Width of a query.
        memory_width: Width of a symbol's state.
        hidden_width: Width of the hidden layer of the score.
        location_filters: Number and kernel size of the filters over earlier weights. None for the additive
            score.
        use_forward_attention: Whether weights can only stay at a symbol or move on to the next one.

    >>> attention = TacotronAttention(width=3, memory_width=5, hidden_width=7, location_filters=(2, 3))
    >>> memory = attention.prepare(torch.ones(2, 4, 5), None)
    >>> context, alignment = attention(torch.ones(2, 3), memory, attention.initial_alignment(memory))
    >>> context.shape, alignment.last_weights.shape
    (torch.Size([2, 5]), torch.Size([2, 4]))
    """

    def __init__(
        self,
        width: int,
        memory_width: int,
        hidden_width: int,
        *,
        location_filters: tuple[int, int] | None = None,
        use_forward_attention: bool = False,
    ) -> None:
        super().__init__()
        self.uses_forward_attention = use_forward_attention
        self.score: Additive | LocationSensitive
        if location_filters is None:
            self.score = Additive(width, memory_width, hidden_width)
        else:
            num_filters, kernel_size = location_filters
            self.score = LocationSensitive(
                width,
                memory_width,
                hidden_width,
                num_filters=num_filters,
                kernel_size=kernel_size,
                num_channels=LOCATION_CHANNELS,
            )

    def prepare(self, states: Tensor, mask: Mask | None) -> TacotronMemory:
        """Compute once what all steps share, from the states ``(B, L, D)`` of symbols."""
        keys = self.score.prepare(states)
        # Under autocast the keys have its dtype. The states are converted here, not at every step. Padding is
        # cleared here too, so that no step has to keep NaNs from spreading.
        states = states.to(keys.keys.dtype)
        if isinstance(mask, PaddingMask):
            valid_mask = mask.to_dense(1, states.shape[1], states.device).transpose(1, 2)  # (B, L, 1)
            states, keys = states.where(valid_mask, 0.0), replace(keys, keys=keys.keys.where(valid_mask, 0.0))
            mask = replace(mask, padding_is_zero=True)
        location_layer = None
        if isinstance(self.score, LocationSensitive):
            weight = self.score.fused_location_weight.unflatten(1, (LOCATION_CHANNELS, -1))
            # A tap of zero makes their number even. GPUs are slow with odd sizes.
            location_layer = DeferredLinear(F.pad(weight, (0, 1)).flatten(1))
        return TacotronMemory(states, keys, mask, location_layer)

    def initial_alignment(self, memory: TacotronMemory) -> TacotronAlignment | None:
        """The alignment before the first step. None if attention does not depend on earlier weights."""
        if isinstance(self.score, Additive) and not self.uses_forward_attention:
            return None
        zeros = upcast(memory.states.new_zeros(memory.states.shape[:2]))
        if not self.uses_forward_attention:
            return TacotronAlignment(zeros, zeros)
        first_symbol = (torch.arange(zeros.shape[1], device=zeros.device) == 0).to(zeros.dtype)
        return TacotronAlignment(first_symbol.expand_as(zeros), zeros)

    def forward(
        self, query: Tensor, memory: TacotronMemory, alignment: TacotronAlignment | None
    ) -> tuple[Tensor, TacotronAlignment | None]:
        """Return the context ``(B, D)`` of a query ``(B, W)``, and the alignment after the step."""
        queries = query[:, None]
        if alignment is None:
            context = core.attend(queries, memory.keys, memory.states, score=self.score, mask=memory.mask)
            return context.squeeze(1), None
        dtype, score = memory.states.dtype, cast(Score, self.score)
        if isinstance(score, LocationSensitive):
            previous = torch.stack([alignment.last_weights, alignment.cumulative_weights], 1).to(dtype)
            score = score.with_previous(previous, location_term=_compute_location_term(previous, memory))
        weights = core.weights(queries, memory.keys, score=score, mask=memory.mask).squeeze(1)
        weights = forward_attention(weights, alignment.last_weights) if self.uses_forward_attention else upcast(weights)
        context = core.mix(weights[:, None].to(dtype), memory.states, assume_finite=True).squeeze(1)
        return context, TacotronAlignment(weights, alignment.cumulative_weights + weights)

    def weights(self, queries: Tensor, memory: TacotronMemory) -> Tensor:
        """Weights ``(B, S, L)`` of queries ``(B, S, W)``, if attention does not depend on earlier weights."""
        return core.weights(queries, memory.keys, score=self.score, mask=memory.mask)


def _compute_location_term(previous_weights: Tensor, memory: TacotronMemory) -> Tensor:
    """F f + b of earlier weights ``(B, 2, L)``: ``(B, L, hidden_width)``.

    It is one product with windows of the weights instead of a convolution and a product: a step has fewer
    kernels, and the gradients of both weights are computed once after all steps.
    """
    assert memory.location_layer is not None
    taps = memory.location_layer.weight.shape[1] // LOCATION_CHANNELS
    windows = F.pad(previous_weights, (taps // 2 - 1, taps // 2)).unfold(2, taps, 1)  # (B, 2, L, taps)
    return memory.location_layer(windows.transpose(1, 2).flatten(2))


def forward_attention(weights: Tensor, previous_weights: Tensor) -> Tensor:
    """Weights α_t ``(B, N)`` of forward attention, from y_t ``(B, N)`` and α_(t−1) ``(B, N)``.

    Before the first step, all weight is on the first symbol. The result has the dtype of
    ``previous_weights``, at least float32.

    If almost none of the weight y is on the symbols within reach, gradients would explode after a few steps.
    They are bounded by ``MAX_GRADIENT``.

    >>> forward_attention(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([[0.6667, 0.3333, 0.0000]])
    """
    if triton_unsupported_reason(weights) is None and previous_weights.dtype == torch.float32 and weights.numel():
        from jumok.models.kernels import forward_attention_step

        if weights.shape[1] <= forward_attention_step.MAX_SYMBOLS:
            return forward_attention_step.fused_forward_attention(weights, previous_weights)
    reached = (previous_weights + F.pad(previous_weights, (1, -1))) * upcast(weights)
    # If no symbol within reach has any weight, attention stays where it is.
    total = reached.sum(-1, keepdim=True)
    is_zero = total < torch.finfo(reached.dtype).tiny
    normalized = (reached / total.masked_fill(is_zero, 1.0)).detach()
    if reached.requires_grad:
        reached.register_hook(lambda gradient: gradient.clamp(-MAX_GRADIENT, MAX_GRADIENT))
        total = reached.sum(-1, keepdim=True)
        # The added term is zero, but has the gradient.
        normalized = normalized + (reached - normalized * total) / total.detach().clamp(min=MIN_TOTAL)
    return torch.where(is_zero, previous_weights, normalized)


# ---------------------------------------------------------------------------------------- decoder


@dataclass(frozen=True, eq=False)
class TacotronDecoderState:
    """State of the decoder between steps."""

    memory: TacotronMemory
    attention_hidden: HiddenState  # of the attention RNN
    context: Tensor  # (B, D): of the last step
    alignment: TacotronAlignment | None
    decoder_hidden: tuple[HiddenState, ...]  # of each decoder RNN


@dataclass(frozen=True, eq=False)
class TacotronDecoderOutput:
    """Output of S decoder steps."""

    mels: Tensor  # (B, S r, M)
    stop_logits: Tensor  # (B, S r): logits that a frame is the last
    weights: Tensor | None  # (B, S, L); None if they follow from the queries alone
    queries: Tensor  # (B, S, W)


class PreNet(nn.Module):
    """Two layers with strong dropout, so that the decoder has to attend to the text."""

    def __init__(
        self, input_width: int, widths: tuple[int, int], dropout: float, *, dropout_at_inference: bool
    ) -> None:
        super().__init__()
        self.width = widths[1]
        self.layers = build_module_list(nn.Linear(*sizes) for sizes in ((input_width, widths[0]), widths))
        self.dropout, self.dropout_at_inference = dropout, dropout_at_inference

    def forward(self, x: Tensor) -> Tensor:
        uses_dropout = self.training or self.dropout_at_inference
        for layer in self.layers:
            x = F.dropout(layer(x).relu(), self.dropout, training=uses_dropout)
        return x


class TacotronDecoder(nn.Module):
    """Generates r mel frames per step.

    Args:
        prenet: Pre-net of the input frames.
        attention: Attention to the text.
        width: Width of the RNNs.
        memory_width: Width of a symbol's state.
        num_layers: Number of decoder RNNs.
        output_shape: r, and the number of mels of a frame.

    >>> prenet = PreNet(5, (4, 3), dropout=0.5, dropout_at_inference=False)
    >>> attention = TacotronAttention(8, 6, 7)
    >>> decoder = TacotronDecoder(
    ...     prenet, attention, width=8, memory_width=6, num_layers=1, output_shape=(2, 5)
    ... )
    >>> state = decoder.initial_state(attention.prepare(torch.ones(1, 4, 6), None))
    >>> output, state = decoder(torch.ones(1, 3, 5), state)
    >>> output.mels.shape, output.stop_logits.shape
    (torch.Size([1, 6, 5]), torch.Size([1, 6]))
    """

    def __init__(
        self,
        prenet: PreNet,
        attention: TacotronAttention,
        *,
        width: int,
        memory_width: int,
        num_layers: int,
        output_shape: tuple[int, int],
    ) -> None:
        super().__init__()
        self.prenet, self.attention = prenet, attention
        self.reduction_factor, n_mels = output_shape
        self.attention_rnn = build_rnn("gru", prenet.width + memory_width, width)
        self.rnn_projection = nn.Linear(width + memory_width, width)
        self.decoder_rnns: list[RecurrentModule] = build_module_list(
            build_rnn("gru", width, width) for _ in range(num_layers)
        )
        self.mel_projection = nn.Linear(width + memory_width, self.reduction_factor * n_mels)
        self.stop_projection = nn.Linear(width + memory_width, self.reduction_factor)

    def initial_state(self, memory: TacotronMemory) -> TacotronDecoderState:
        """The state before the first step."""
        zeros = memory.states.new_zeros(len(memory.states), self.attention_rnn.hidden_size)
        context = memory.states.new_zeros(len(memory.states), memory.states.shape[2])
        alignment = self.attention.initial_alignment(memory)
        decoder_hidden = tuple((zeros[None],) for _ in self.decoder_rnns)
        return TacotronDecoderState(memory, (zeros,), context, alignment, decoder_hidden)

    def forward(
        self, frames: Tensor, state: TacotronDecoderState
    ) -> tuple[TacotronDecoderOutput, TacotronDecoderState]:
        """Run S steps with the input frames ``(B, S, M)``, each the last frame before its step."""
        cell = RecurrentStepper(self.attention_rnn, known_width=self.prenet.width)
        hidden, context, alignment = state.attention_hidden, state.context, state.alignment
        queries: list[Tensor] = []
        contexts: list[Tensor] = []
        weights: list[Tensor] = []
        for gates in cell.prepare(self.prenet(frames)).unbind(1):
            (hidden,) = cell(gates, context, [hidden])
            query = hidden[0]
            context, alignment = self.attention(query, state.memory, alignment)
            queries.append(query)
            contexts.append(context)
            if alignment is not None:
                weights.append(alignment.last_weights)
        all_queries, all_contexts = torch.stack(queries, 1), torch.stack(contexts, 1)

        x = self.rnn_projection(torch.cat([all_queries, all_contexts], -1))
        decoder_hidden: list[HiddenState] = []
        for rnn, initial_hidden in zip(self.decoder_rnns, state.decoder_hidden, strict=True):
            outputs, final_hidden = run_rnn(rnn, x, tuple(part.to(x.dtype) for part in initial_hidden))
            x = x + outputs
            decoder_hidden.append(final_hidden)
        x = torch.cat([x, all_contexts], -1)
        output = TacotronDecoderOutput(
            mels=upcast(self.mel_projection(x)).unflatten(-1, (self.reduction_factor, -1)).flatten(1, 2),
            stop_logits=upcast(self.stop_projection(x)).flatten(1),
            weights=torch.stack(weights, 1) if weights else None,
            queries=all_queries,
        )
        return output, TacotronDecoderState(state.memory, hidden, context, alignment, tuple(decoder_hidden))

    def weights(self, output: TacotronDecoderOutput, memory: TacotronMemory) -> Tensor:
        """Attention weights ``(B, S, L)`` of all steps."""
        return self.attention.weights(output.queries, memory) if output.weights is None else output.weights
