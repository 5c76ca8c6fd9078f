"""Additive attention of one query per row in one Triton kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from jumok.attention.arguments import AttentionCall
from jumok.attention.paths.additive import plain_additive_unsupported_reason
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import TanhScore

if TYPE_CHECKING:
    from jumok.attention.kernels.additive_step import AdditiveStepLoop


def additive_step_unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the kernel of one additive step does not serve the call, or None if it does."""
    reason = plain_additive_unsupported_reason(call)
    if reason is not None:
        return reason
    if call.shape.num_queries != 1:
        return f"it serves one query per row, and there are {call.shape.num_queries}"
    from jumok.attention.kernels.additive_step import MAX_WIDTH

    if max(cast(TanhScore, call.score).v.shape[0], cast(Tensor, call.value).shape[-1]) > MAX_WIDTH:
        return f"it supports widths of at most {MAX_WIDTH}"
    return None


def run_additive_step(call: AttentionCall) -> Tensor:
    """Compute score, softmax and mix in one kernel.

    The steps of a loop over prepared keys share one :class:`AdditiveStepLoop`, which computes the gradients
    of what the steps share once, after the last step.
    """
    batch_size, num_keys = call.leading_shape.numel(), call.shape.num_keys
    loop = _get_loop(call)
    allowed = None
    if call.mask is not None:
        mask = call.mask

        def expand_mask() -> Tensor:
            row = mask.to_dense_rows(call.shape, slice(0, 1))
            return row.expand(*call.leading_shape, 1, num_keys).reshape(batch_size, num_keys).contiguous()

        allowed = mask.get_or_compute(("additive step", call.shape, call.leading_shape), expand_mask)
    context = loop.compute_context(call.query.reshape(batch_size, -1), allowed)
    return context.reshape(*call.leading_shape, 1, -1)


def _get_loop(call: AttentionCall) -> AdditiveStepLoop:
    """Return the loop that the steps over these prepared keys share, or a new one for this call only."""
    from jumok.attention.kernels.additive_step import AdditiveStepLoop

    score, value = cast(TanhScore, call.score), cast(Tensor, call.value)
    batch_size, num_keys = call.leading_shape.numel(), call.shape.num_keys

    def build_loop(keys: Tensor) -> AdditiveStepLoop:
        # Under autocast the weight is still float32. It is converted once per loop, not at every step.
        weight = score.query_weight.to(keys.dtype)
        return AdditiveStepLoop(
            weight, keys.reshape(batch_size, num_keys, -1), score.v, value.reshape(batch_size, num_keys, -1)
        )

    if not isinstance(call.key, PreparedKeys) or _is_activation_checkpointed():  # the steps share nothing
        return build_loop(call.prepare_keys())
    prepared = call.key
    name = ("loop", _get_current_stream(call.shape.device))  # the scratch memory of a loop is for one stream
    inputs = (*_get_parameters(score), prepared.keys, value)
    loop = prepared.get_or_compute(name, inputs, lambda: build_loop(prepared.keys))
    if loop.is_consumed:  # a backward pass has used it up: this step starts another loop
        prepared.clear_cache()
        loop = prepared.get_or_compute(name, inputs, lambda: build_loop(prepared.keys))
    return loop


def _get_parameters(score: TanhScore) -> list[Tensor]:
    """Return ``score.parameters()`` as a list, in less time than a kernel launch takes."""
    modules = (score, *score._modules.values())
    return [x for module in modules if module is not None for x in module._parameters.values() if x is not None]


def _get_current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _is_activation_checkpointed() -> bool:
    """Return whether a checkpoint is active. Its two runs must record the same operations."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
