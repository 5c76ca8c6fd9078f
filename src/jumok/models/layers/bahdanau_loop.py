"""All steps of Bahdanau's decoder, a GRU with additive attention, as one autograd function.

On a GPU the steps are so small that Python, dispatch and autograd take longer than the kernels. Here neither
pass records a graph: the forward pass runs the operations of a step and keeps what its gradient needs, and
the backward pass runs the steps in reverse. ::

    forward, for t = 1 … T                  backward, for t = T … 1
    q   = s_(t−1) W_qᵀ                      dg, du, ds_(t−1) = gradients of the cell at ds_t
    c_t = attend(q, h̄)                      dc_t += dg C
    g   = y_t + c_t Cᵀ                      dq = gradient of attention at dc_t
    u   = s_(t−1) Uᵀ + b                    ds_(t−1) += du U + dq W_q
    s_t = cell(g, u, s_(t−1))

where y_t is the contribution of word t − 1 to the gates, known for all steps before the loop.

Gradients of weights are one product over all steps, as in :mod:`jumok.models.layers.deferred_linear`. The
forward pass runs the same operations as :class:`~jumok.models.layers.recurrent.RecurrentStepper` with
:func:`jumok.attend`, so the results are equal to the bit.

Shapes: ``B`` sentences, ``T`` steps, ``S`` source words; widths: ``W`` of a state, ``M`` of an annotation,
``H`` of a key.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention.additive_steps import AdditiveSteps, choose_additive_steps
from jumok.attention.scores import Additive, Score
from jumok.models.layers.deferred_linear import disable_compile, forbid_double_backward
from jumok.models.layers.precision import to_autocast_dtype
from jumok.models.layers.recurrent import RecurrentModule, get_layer_weights, gru_step, gru_step_backward


def can_run_bahdanau_loop(rnn: RecurrentModule, score: Score, keys: Tensor, annotations: Tensor) -> bool:
    """Return whether :func:`run_bahdanau_loop` serves a decoder with these layers, keys and annotations."""
    return (
        isinstance(rnn, nn.GRU)
        and rnn.num_layers == 1
        and isinstance(score, Additive)
        and score.uses_standard_formula
        and choose_additive_steps(keys, annotations) is not None
    )


@disable_compile
def run_bahdanau_loop(
    rnn: RecurrentModule,
    score: Additive,
    embeddings: Tensor,
    state: Tensor,
    keys: Tensor,
    annotations: Tensor,
    allowed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the states ``(B, T, W)`` and contexts ``(B, T, M)`` of all steps. Differentiable once.

    Args:
        rnn: a GRU of one layer, whose inputs are ``[embedding; context]``.
        score: projected the keys.
        embeddings: ``(B, T, E)``, of the words before each step.
        state: ``(B, W)``, before the first step.
        keys: ``(B, S, H)``.
        annotations: ``(B, S, M)``.
        allowed: ``(B, S)``, False at padding. None if there is no padding.
    """
    input_weight, recurrent_weight, input_bias, recurrent_bias = get_layer_weights(rnn)
    word_weight, context_weight = input_weight.split([embeddings.shape[-1], annotations.shape[-1]], dim=1)
    known_gates = F.linear(embeddings, word_weight, input_bias)
    weights = score.query_weight, context_weight, recurrent_weight, recurrent_bias
    with torch.cuda.device_of(keys):
        outputs = _BahdanauLoopFunction.apply(  # type: ignore[no-untyped-call]
            keys,
            score.v,
            annotations,
            allowed,
            known_gates,
            state.to(known_gates.dtype),
            *map(to_autocast_dtype, weights),
        )
    return cast(tuple[Tensor, Tensor], outputs)


class _BahdanauLoopFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        keys: Tensor,
        v: Tensor,
        annotations: Tensor,
        allowed: Tensor | None,
        known_gates: Tensor,
        state: Tensor,
        query_weight: Tensor,
        context_weight: Tensor,
        recurrent_weight: Tensor,
        recurrent_bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        attention = _build_steps(keys, v, annotations, allowed)
        query_columns, context_columns, recurrent_columns = (
            weight.t() for weight in (query_weight, context_weight, recurrent_weight)
        )
        first_state, states, contexts = state, [], []
        saved: list[tuple[Tensor, ...]] = []  # of each step
        for known in known_gates.unbind(1):
            context, attention_saved = attention.forward(torch.mm(state, query_columns))
            gates = torch.addmm(known, context, context_columns)
            state_gates = torch.addmm(recurrent_bias, state, recurrent_columns)
            state, cell_saved = gru_step(gates, state_gates, state)
            states.append(state)
            contexts.append(context)
            saved.append((*cell_saved, *attention_saved))
        all_states, all_contexts = torch.stack(states, 1), torch.stack(contexts, 1)
        ctx.num_saved, ctx.num_cell_saved = len(saved[0]), len(cell_saved)
        shared = keys, v, annotations, allowed, first_state, all_states, all_contexts
        weights = query_weight, context_weight, recurrent_weight
        ctx.save_for_backward(*shared, *weights, *itertools.chain.from_iterable(saved))
        return all_states, all_contexts

    @staticmethod
    def backward(ctx: Any, d_states: Tensor, d_contexts: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward("the loop of Bahdanau's decoder")
        tensors = iter(ctx.saved_tensors)
        keys, v, annotations, allowed, first_state, states, contexts = itertools.islice(tensors, 7)
        query_weight, context_weight, recurrent_weight = itertools.islice(tensors, 3)
        attention = _build_steps(keys, v, annotations, allowed)
        d_gates: list[Tensor] = []  # of all steps, the last step first
        d_state_gates: list[Tensor] = []
        d_queries: list[Tensor] = []
        d_state = torch.zeros_like(first_state)
        saved_by_step = zip(*[tensors] * ctx.num_saved, strict=True)
        steps = zip(d_states.unbind(1), d_contexts.unbind(1), saved_by_step, strict=True)
        for d_output, d_context, step_saved in reversed(list(steps)):
            cell_saved, attention_saved = step_saved[: ctx.num_cell_saved], step_saved[ctx.num_cell_saved :]
            d_gate, d_state_gate, d_state = gru_step_backward(d_state + d_output, cell_saved)
            d_query = attention.backward(torch.addmm(d_context, d_gate, context_weight), attention_saved)
            d_state = torch.addmm(d_state, d_state_gate, recurrent_weight).addmm_(d_query, query_weight)
            d_gates.append(d_gate)
            d_state_gates.append(d_state_gate)
            d_queries.append(d_query)

        d_keys, dv, d_annotations = attention.compute_shared_gradients()
        d_known_gates, d_all_state_gates, d_all_queries = (
            torch.stack(gradients[::-1], 1) for gradients in (d_gates, d_state_gates, d_queries)
        )
        previous_states = torch.cat([first_state.unsqueeze(1), states[:, :-1]], 1)
        return (
            d_keys,
            dv,
            d_annotations,
            None,  # of allowed
            d_known_gates,
            d_state,
            _sum_outer_products(d_all_queries, previous_states),
            _sum_outer_products(d_known_gates, contexts),
            _sum_outer_products(d_all_state_gates, previous_states),
            d_all_state_gates.sum((0, 1)),
        )


def _build_steps(keys: Tensor, v: Tensor, annotations: Tensor, allowed: Tensor | None) -> AdditiveSteps:
    steps_class = choose_additive_steps(keys, annotations)
    assert steps_class is not None
    return steps_class(keys, v, annotations, allowed)


def _sum_outer_products(gradients: Tensor, inputs: Tensor) -> Tensor:
    """Gradient ``(out, in)`` of a weight, from ``(B, T, out)`` and ``(B, T, in)``."""
    return gradients.flatten(0, 1).t() @ inputs.flatten(0, 1)
