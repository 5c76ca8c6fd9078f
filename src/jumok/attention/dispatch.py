"""Which fast path serves an attention call, and the reason when none does.

A path is a name, a test that says why it cannot serve a call, and a function that computes it. The
paths stand in the order of speed; the first that can serve a call is taken. ``attend`` runs what
:func:`choose_path` chose and ``explain`` prints it, so that the two never disagree. A path that is for other
calls altogether says so with ``NOT_APPLICABLE``, which nobody needs to be told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention import chunking
from jumok.attention.arguments import AttentionCall
from jumok.attention.gpu_support import get_gpu_properties, supports_compile, triton_unsupported_reason
from jumok.attention.mask_types import AdditiveMask, DenseMask, Mask, WindowMask
from jumok.attention.paths import flex, varlen
from jumok.attention.paths.varlen import MAX_FLASH_WIDTH, NOT_APPLICABLE
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import TanhScore

WIDE_QUERY_REASON = f"for one query of more than {MAX_FLASH_WIDTH} numbers two products are faster"


@dataclass(frozen=True)
class AttentionPath:
    """One way to compute attention."""

    name: str
    describe: Callable[[AttentionCall], str]
    unsupported_reason: Callable[[AttentionCall], str | None]
    run: Callable[[AttentionCall], Tensor]


@dataclass(frozen=True)
class PathExplanation:
    """The path that a call takes, and why each faster one could not serve it."""

    path: AttentionPath | None
    name: str
    description: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.description}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected]
        return "\n".join(lines)


def choose_path(call: AttentionCall) -> PathExplanation:
    """The fastest path that serves the call; ``path`` is None for the reference."""
    refused: list[tuple[str, str]] = []
    for path in PATHS:
        reason = path.unsupported_reason(call)
        if reason is None:
            return PathExplanation(path, path.name, path.describe(call), tuple(refused))
        if reason != NOT_APPLICABLE:
            refused.append((path.name, reason))
    return PathExplanation(None, "reference", _describe_reference(call), tuple(refused))


def _describe_reference(call: AttentionCall) -> str:
    if isinstance(call.score, TanhScore) and triton_unsupported_reason(call.query) is None:
        return "scores by our fused Triton kernel, then softmax and mix in PyTorch"
    return "plain PyTorch, some queries at a time"


# ------------------------------------------------------------------- additive attention, one query


def _additive_step_unsupported_reason(call: AttentionCall) -> str | None:
    if not isinstance(call.score, TanhScore):
        return NOT_APPLICABLE
    if not call.score.uses_standard_formula:
        return "it serves Additive and Concat as they are"
    reason = triton_unsupported_reason(call.query)
    if reason is not None:
        return reason
    if call.shape.num_queries != 1:
        return f"it serves one query a row, and there are {call.shape.num_queries}"
    if call.shape.num_keys == 0 or 0 in call.leading_shape:
        return "there is nothing to attend to"
    for name in ("bias", "scale", "softcap"):
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.dropout:
        return "it has no dropout"
    from jumok.attention.kernels.additive_step import MAX_WIDTH

    key = call.key.keys if isinstance(call.key, PreparedKeys) else call.key
    value = cast(Tensor, call.value)
    if max(call.score.v.shape[0], value.shape[-1]) > MAX_WIDTH:
        return f"it holds widths of {MAX_WIDTH} at most"
    if not call.leading_shape == key.shape[:-2] == value.shape[:-2] == call.query.shape[:-2]:
        return "query, key and value must have equal leading dimensions"
    return None


def _run_additive_step(call: AttentionCall) -> Tensor:
    """Score, softmax and mix in one kernel. A loop over prepared keys gathers gradients once, at its end.

    See :mod:`jumok.attention.kernels.step`.
    """
    from jumok.attention.kernels.additive_step import AdditiveStepLoop

    score, value = cast(TanhScore, call.score), cast(Tensor, call.value)
    batch, keys = call.leading_shape.numel(), call.shape.num_keys

    def shared(prepared: Tensor) -> Any:
        # Under autocast the weight is still float32: converted once for the loop, not at every step.
        weight = score.query_weight.to(prepared.dtype)
        return AdditiveStepLoop(
            weight, prepared.reshape(batch, keys, -1), score.v, value.reshape(batch, keys, -1)
        )

    loop = None
    if isinstance(call.key, PreparedKeys) and not _is_activation_checkpointed():
        prepared = call.key
        what = ("loop", _get_current_stream(call.shape.device))  # its scratch memory is for one stream
        of = (*_parameters(score), prepared.keys, value)
        loop = prepared.get_or_compute(what, of, lambda: shared(prepared.keys))
        if loop.spent:  # a backward pass is through with it: this step begins another loop
            prepared.clear_cache()
            loop = prepared.get_or_compute(what, of, lambda: shared(prepared.keys))
    if loop is None:
        loop = shared(call.prepare_keys())
    allowed = None
    if call.mask is not None:
        block = call.mask.to_dense_rows
        allowed = call.mask.get_or_compute(
            ("step", call.shape, call.leading_shape),
            lambda: (
                block(call.shape, slice(0, 1))
                .expand(*call.leading_shape, 1, keys)
                .reshape(batch, keys)
                .contiguous()
            ),
        )
    context = loop.context(call.query.reshape(batch, -1), allowed)
    return cast(Tensor, context).reshape(*call.leading_shape, 1, -1)


def _parameters(score: TanhScore) -> list[Tensor]:
    """``score.parameters()`` of a plain score, in less time than the launch of a kernel takes."""
    layers = (score, *score._modules.values())
    return [x for layer in layers if layer is not None for x in layer._parameters.values() if x is not None]


def _get_current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _is_activation_checkpointed() -> bool:
    """Inside a checkpoint each step must record the same in both of its runs, so that it shares nothing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# -------------------------------------------------------------------------------- PyTorch's SDPA


def _sdpa_unsupported_reason(call: AttentionCall) -> str | None:
    if call.dot_score is None:
        return "the score is no dot product"
    if call.softcap is not None:
        return "it has no softcap"
    if call.shape.num_queries == 0 or call.shape.num_keys == 0:
        return "there is nothing to attend to"
    if call.shape.device.type == "cpu":
        return "with dropout it computes all weights at once on the CPU" if call.dropout else None
    if call.query.dtype == torch.float64:
        return "it has no float64 kernel on this device"
    if _is_one_wide_query(call):
        return WIDE_QUERY_REASON
    if call.mask is None or _get_causal_kwargs(call) is not None:
        return None
    if _is_query_independent(call) or _contains_tensor_mask(call.mask) or _is_mask_small(call):
        return None
    return "the mask as a Q×K tensor would be larger than the query"


def _is_one_wide_query(call: AttentionCall) -> bool:
    """A step of a recurrent decoder. Beyond FlashAttention's widths, SDPA's gradient takes some 0.4 ms."""
    return (
        call.shape.num_queries == 1
        and max(call.query.shape[-1], cast(Tensor, call.value).shape[-1]) > MAX_FLASH_WIDTH
    )


def is_wide_decoder_step(call: AttentionCall) -> bool:
    """Whether :func:`attend` is called with one wide query on a GPU, as recurrent decoders do at each step.

    There the scores stay in the query's type: converting all keys at each step would take longer than the
    rest of the step.
    """
    return (
        call.value is not None
        and get_gpu_properties(call.shape.device) is not None
        and _is_one_wide_query(call)
    )


def _describe_sdpa(call: AttentionCall) -> str:
    name = "PyTorch's scaled_dot_product_attention"
    if call.mask is None and call.bias is None:
        return name
    if _get_causal_kwargs(call) is not None:
        return f"{name}, causal by flag"
    if _is_query_independent(call) and call.bias is None:
        return f"{name} with a mask of one row"
    if call.shape.device.type == "cpu" and call.bias is None:
        return f"{name}, the mask made for some queries at a time"
    return f"{name} with the mask as a tensor"


def _get_causal_kwargs(call: AttentionCall) -> dict[str, Any] | None:
    """How SDPA can be told of the mask without any tensor; None when it cannot."""
    if call.mask is None or call.bias is not None:
        return None
    causal = all(isinstance(part, WindowMask) and part.is_causal for part in call.mask.conjuncts())
    if not causal:
        return None
    if call.shape.num_queries == 1:
        return {}  # the only query sees everything
    return {"is_causal": True} if call.shape.num_queries == call.shape.num_keys else None


def _is_query_independent(call: AttentionCall) -> bool:
    return call.mask is not None and call.mask.is_query_independent()


def _is_mask_small(call: AttentionCall) -> bool:
    """Whether the mask's Q×K tensor takes less memory than the query.

    Then memory stays O(length), and SDPA with it is several times faster than FlexAttention, whose launch
    alone takes longer than attention over a batch of sentences (bench/attention.py).
    """
    mask = cast(Mask, call.mask)
    band = mask.to_band(call.shape)
    rows = call.leading_shape.numel() if band is None else band.first.shape[:-1].numel()
    return rows * call.shape.num_queries * call.shape.num_keys <= call.query.numel()


def _contains_tensor_mask(mask: Mask) -> bool:
    return any(isinstance(leaf, DenseMask | AdditiveMask) for leaf in _get_mask_leaves(mask))


def _get_mask_leaves(mask: Mask) -> list[Mask]:
    inner = [getattr(mask, name) for name in ("a", "b") if isinstance(getattr(mask, name, None), Mask)]
    return [leaf for part in inner for leaf in _get_mask_leaves(part)] if inner else [mask]


def _run_sdpa(call: AttentionCall) -> Tensor:
    heads = _make_4d_reshape(call)
    query, key, value = heads(call.query), heads(call.prepare_keys()), heads(call.prepare_value())

    def rows(part: slice, **mask: Any) -> Tensor:
        out = F.scaled_dot_product_attention(
            query[..., part, :],
            key,
            value,
            dropout_p=call.dropout,
            scale=call.dot_scale(),
            enable_gqa=key.shape[1] != query.shape[1],
            **mask,
        )
        return out if call.shape.num_leading_dims == 2 else out.reshape(*call.leading_shape, *out.shape[-2:])

    everything = slice(0, call.shape.num_queries)
    if call.mask is None and call.bias is None:
        return rows(everything)
    flag = _get_causal_kwargs(call)
    if flag is not None:
        return rows(everything, **flag)
    if call.group_size > 1 and call.shape.device.type == "cuda":
        # PyTorch's kernels that know grouped queries take no mask tensor, but for one that keeps all weights:
        # so each query head gets its keys.
        key, value = call.repeat_kv(key), call.repeat_kv(value)

    def masked(part: slice) -> Tensor:
        if isinstance(call.mask, AdditiveMask) and call.bias is None:
            return rows(part, attn_mask=heads(call.mask.to_additive_rows(call.shape, part)))
        allowed, alive, bias = _build_allowed_rows(call, part)
        # A row with nothing allowed may look everywhere here, so that all stays finite; it is zeroed after.
        tensor = allowed if alive is None else allowed | ~alive
        if bias is not None:
            bias = _cast_bias(bias if alive is None else bias.where(alive, 0), call.query.dtype)
            tensor = torch.where(tensor, bias, -torch.inf)
        out = rows(part, attn_mask=heads(tensor))
        return out if alive is None else out.where(alive, 0)

    if call.shape.device.type != "cpu" or (_is_query_independent(call) and call.bias is None):
        return masked(everything)
    each = call.leading_shape.numel() * call.shape.num_keys
    uses = tuple(x for x in (query, key, value, call.bias) if x is not None)
    return chunking.map_row_chunks(masked, call.shape.num_queries, each, uses)


def _cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias in the query's type; what is out of its range becomes its largest number, not infinity."""
    most = torch.finfo(dtype).max
    return (bias.clamp(-most, most) if torch.finfo(bias.dtype).max > most else bias).to(dtype)


def _build_allowed_rows(call: AttentionCall, rows: slice) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The mask of some rows, which rows are alive (None: all, known), and the bias of those rows."""
    if call.bias is None:
        mask = cast(Mask, call.mask)
        alive = mask.find_nonempty_rows(call.shape)
        if alive is not None:
            alive = (alive[..., rows] if alive.shape[-1] > 1 else alive)[..., None]
        return mask.to_dense_rows(call.shape, rows), alive, None
    bias = call.bias[..., rows, :] if call.bias.dim() > 1 and call.bias.shape[-2] > 1 else call.bias
    allowed = bias != -torch.inf
    if call.mask is not None:
        allowed = allowed & call.mask.to_dense_rows(call.shape, rows)
    allowed = allowed.reshape(*[1] * (call.shape.num_leading_dims + 2 - allowed.dim()), *allowed.shape)
    return allowed, allowed.any(-1, keepdim=True), bias


def _make_4d_reshape(call: AttentionCall) -> Callable[[Tensor], Tensor]:
    """How to bring ``(*leading, rows, D)`` to the four dimensions ``(batch, heads, rows, D)`` of SDPA."""
    leading = call.leading_shape

    def four(x: Tensor) -> Tensor:
        if x.dim() == 4 and x.shape[:-2] == leading:
            return x
        x = x.reshape(*[1] * (len(leading) + 2 - x.dim()), *x.shape)
        if x.dtype != torch.bool:  # a mask broadcasts by itself; keys and values need not
            x = x.expand(*leading, -1, -1) if call.group_size == 1 else x.expand(leading[0], -1, -1, -1)
        if len(leading) <= 2:
            return x.reshape(*[1] * (2 - len(leading)), *x.shape)
        return x.expand(*leading[:-1], *x.shape[-3:]).flatten(0, len(leading) - 2)

    return four


# --------------------------------------------------------------------------------- FlexAttention


def _flex_unsupported_reason(call: AttentionCall) -> str | None:
    if call.dot_score is None:
        return NOT_APPLICABLE
    if get_gpu_properties(call.shape.device) is None:
        return f"it runs on CUDA, and the tensors are on {call.shape.device.type}"
    if not supports_compile(call.shape.device):
        return "it needs torch.compile, which has no compiler for this GPU here (is Triton installed?)"
    if call.query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes bfloat16, float16 and float32, not {call.query.dtype}"
    if call.shape.num_leading_dims > 2:
        return f"it takes batch and heads in front, and there are {call.shape.num_leading_dims} leading dimensions"
    if call.mask is not None and _contains_tensor_mask(call.mask):
        return "the mask is a tensor already"
    if call.mask is not None and not flex.is_structured(call.mask):
        return "the mask has no structure that it could use"
    if call.bias is not None or call.dropout:
        return "it has no bias and no dropout here"
    if min(call.query.shape[-1], cast(Tensor, call.value).shape[-1]) < 16:
        return "its kernels need widths of 16 and more"
    if min(call.shape.num_queries, call.shape.num_keys) == 0:
        return "there is nothing to attend to"
    return WIDE_QUERY_REASON if _is_one_wide_query(call) else None


def _run_flex(call: AttentionCall) -> Tensor:
    heads = _make_4d_reshape(call)
    query, key, value = (heads(x) for x in (call.query, call.prepare_keys(), call.prepare_value()))
    out = flex.run_flex_attention(
        query,
        key,
        value,
        call.mask,
        call.shape,
        softcap=call.softcap,
        scale=call.dot_scale(),
        enable_gqa=call.group_size > 1,
    )
    return out.reshape(*call.leading_shape, *out.shape[-2:])


PATHS = (
    AttentionPath(
        "additive-step",
        lambda call: "score, softmax and mix in our one Triton kernel",
        _additive_step_unsupported_reason,
        _run_additive_step,
    ),
    AttentionPath(
        "packed-short",
        lambda call: "our Triton kernel, a program for each packed document",
        varlen.short_unsupported_reason,
        varlen.run_short,
    ),
    AttentionPath(
        "varlen",
        lambda call: "FlashAttention over packed documents",
        varlen.varlen_unsupported_reason,
        varlen.run_varlen,
    ),
    AttentionPath(
        "sequences",
        lambda call: "PyTorch's SDPA, one document after the other",
        varlen.per_sequence_unsupported_reason,
        varlen.run_per_sequence,
    ),
    AttentionPath("sdpa", _describe_sdpa, _sdpa_unsupported_reason, _run_sdpa),
    AttentionPath(
        "flex",
        lambda call: "FlexAttention, the block mask made from the mask's structure",
        _flex_unsupported_reason,
        _run_flex,
    ),
)
