"""Which fast path serves an attention call, and the reason when none does.

A path is a name, a test that says why it cannot serve a call, and a function that computes it. The
paths stand in the order of speed; the first that can serve a call is taken. ``attend`` runs what
:func:`choose` chose and ``explain`` prints it, so that the two never disagree. A path that is for other
calls altogether says so with ``NOT_MEANT``, which nobody needs to be told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention import blocks, chunks, packed
from jumok.attention.call import Call
from jumok.attention.capability import compiles, gpu_of, why_no_kernel
from jumok.attention.kinds import Dense, Mask, Ready, Window
from jumok.attention.packed import FLASH_WIDTH, NOT_MEANT
from jumok.attention.prepared import Prepared
from jumok.attention.scores import TanhScore

ONE_WIDE_QUERY = f"for one query of more than {FLASH_WIDTH} numbers two products are faster"


@dataclass(frozen=True)
class Path:
    """One way to compute attention."""

    name: str
    what: Callable[[Call], str]
    why_not: Callable[[Call], str | None]
    run: Callable[[Call], Tensor]


@dataclass(frozen=True)
class Explanation:
    """The path that a call takes, and why each faster one could not serve it."""

    path: Path | None
    name: str
    what: str
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.what}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)


def choose(call: Call) -> Explanation:
    """The fastest path that serves the call; ``path`` is None for the reference."""
    refused: list[tuple[str, str]] = []
    for path in PATHS:
        reason = path.why_not(call)
        if reason is None:
            return Explanation(path, path.name, path.what(call), tuple(refused))
        if reason != NOT_MEANT:
            refused.append((path.name, reason))
    return Explanation(None, "reference", _reference_what(call), tuple(refused))


def _reference_what(call: Call) -> str:
    if isinstance(call.score, TanhScore) and why_no_kernel(call.query) is None:
        return "scores by our fused Triton kernel, then softmax and mix in PyTorch"
    return "plain PyTorch, some queries at a time"


# ------------------------------------------------------------------- additive attention, one query


def _step_why_not(call: Call) -> str | None:
    if not isinstance(call.score, TanhScore):
        return NOT_MEANT
    if not call.score.is_plain:
        return "it serves Additive and Concat as they are"
    reason = why_no_kernel(call.query)
    if reason is not None:
        return reason
    if call.at.queries != 1:
        return f"it serves one query a row, and there are {call.at.queries}"
    if call.at.keys == 0 or 0 in call.leading:
        return "there is nothing to attend to"
    for name in ("bias", "scale", "softcap"):
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.dropout:
        return "it has no dropout"
    from jumok.attention.kernels.step import WIDEST

    key = call.key.keys if isinstance(call.key, Prepared) else call.key
    value = cast(Tensor, call.value)
    if max(call.score.v.shape[0], value.shape[-1]) > WIDEST:
        return f"it holds widths of {WIDEST} at most"
    if not call.leading == key.shape[:-2] == value.shape[:-2] == call.query.shape[:-2]:
        return "query, key and value must have equal leading dimensions"
    return None


def _step(call: Call) -> Tensor:
    """Score, softmax and mix in one kernel. A loop over prepared keys gathers gradients once, at its end.

    See :mod:`jumok.attention.kernels.step`.
    """
    from jumok.attention.kernels.step import Shared

    score, value = cast(TanhScore, call.score), cast(Tensor, call.value)
    batch, keys = call.leading.numel(), call.at.keys

    def shared(prepared: Tensor) -> Any:
        # Under autocast the weight is still float32: converted once for the loop, not at every step.
        weight = score.query_weight.to(prepared.dtype)
        return Shared(weight, prepared.reshape(batch, keys, -1), score.v, value.reshape(batch, keys, -1))

    loop = None
    if isinstance(call.key, Prepared) and not _recomputing():
        prepared = call.key
        what = ("loop", _stream(call.at.device))  # its scratch memory is for one stream
        of = (*score.parameters(), prepared.keys, value)
        loop = prepared.remember(what, of, lambda: shared(prepared.keys))
        if loop.spent:  # a backward pass is through with it: this step begins another loop
            prepared.forget()
            loop = prepared.remember(what, of, lambda: shared(prepared.keys))
    if loop is None:
        loop = shared(call.prepared_keys())
    allowed = None
    if call.mask is not None:
        block = call.mask.block
        allowed = call.mask.remember(
            ("step", call.at, call.leading),
            lambda: (
                block(call.at, slice(0, 1)).expand(*call.leading, 1, keys).reshape(batch, keys).contiguous()
            ),
        )
    context = loop.context(call.query.reshape(batch, -1), allowed)
    return cast(Tensor, context).reshape(*call.leading, 1, -1)


def _stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _recomputing() -> bool:
    """Inside a checkpoint each step must record the same in both of its runs, so that it shares nothing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# -------------------------------------------------------------------------------- PyTorch's SDPA


def _sdpa_why_not(call: Call) -> str | None:
    if call.dot is None:
        return "the score is no dot product"
    if call.softcap is not None:
        return "it has no softcap"
    if call.at.queries == 0 or call.at.keys == 0:
        return "there is nothing to attend to"
    if call.at.device.type == "cpu":
        return "with dropout it computes all weights at once on the CPU" if call.dropout else None
    if call.query.dtype == torch.float64:
        return "it has no float64 kernel on this device"
    if _is_one_wide_query(call):
        return ONE_WIDE_QUERY
    if call.mask is None or _flag(call) is not None:
        return None
    if _same_for_all_queries(call) or _is_tensor(call.mask) or _mask_is_small(call):
        return None
    return "the mask as a Q×K tensor would be larger than the query"


def _is_one_wide_query(call: Call) -> bool:
    """A step of a recurrent decoder. Beyond FlashAttention's widths, SDPA's gradient takes some 0.4 ms."""
    return (
        call.at.queries == 1 and max(call.query.shape[-1], cast(Tensor, call.value).shape[-1]) > FLASH_WIDTH
    )


def is_decoder_step(call: Call) -> bool:
    """Whether :func:`attend` is called with one wide query on a GPU, as recurrent decoders do at each step.

    There the scores stay in the query's type: converting all keys at each step would take longer than the
    rest of the step.
    """
    return call.value is not None and gpu_of(call.at.device) is not None and _is_one_wide_query(call)


def _sdpa_what(call: Call) -> str:
    name = "PyTorch's scaled_dot_product_attention"
    if call.mask is None and call.bias is None:
        return name
    if _flag(call) is not None:
        return f"{name}, causal by flag"
    if _same_for_all_queries(call) and call.bias is None:
        return f"{name} with a mask of one row"
    if call.at.device.type == "cpu" and call.bias is None:
        return f"{name}, the mask made for some queries at a time"
    return f"{name} with the mask as a tensor"


def _flag(call: Call) -> dict[str, Any] | None:
    """How SDPA can be told of the mask without any tensor; None when it cannot."""
    if call.mask is None or call.bias is not None:
        return None
    causal = all(isinstance(part, Window) and part.is_causal for part in call.mask.parts())
    if not causal:
        return None
    if call.at.queries == 1:
        return {}  # the only query sees everything
    return {"is_causal": True} if call.at.queries == call.at.keys else None


def _same_for_all_queries(call: Call) -> bool:
    return call.mask is not None and call.mask.same_for_all_queries()


def _mask_is_small(call: Call) -> bool:
    """Whether the mask's Q×K tensor takes less memory than the query.

    Then memory stays O(length), and SDPA with it is several times faster than FlexAttention, whose launch
    alone takes longer than attention over a batch of sentences (bench/attention.py).
    """
    mask = cast(Mask, call.mask)
    band = mask.band(call.at)
    rows = call.leading.numel() if band is None else band.first.shape[:-1].numel()
    return rows * call.at.queries * call.at.keys <= call.query.numel()


def _is_tensor(mask: Mask) -> bool:
    return any(isinstance(leaf, Dense | Ready) for leaf in _leaves(mask))


def _leaves(mask: Mask) -> list[Mask]:
    inner = [getattr(mask, name) for name in ("a", "b") if isinstance(getattr(mask, name, None), Mask)]
    return [leaf for part in inner for leaf in _leaves(part)] if inner else [mask]


def _sdpa(call: Call) -> Tensor:
    heads = _as_heads(call)
    query, key, value = heads(call.query), heads(call.prepared_keys()), heads(call.clean_value())

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
        return out if call.at.leading == 2 else out.reshape(*call.leading, *out.shape[-2:])

    everything = slice(0, call.at.queries)
    if call.mask is None and call.bias is None:
        return rows(everything)
    flag = _flag(call)
    if flag is not None:
        return rows(everything, **flag)
    if call.group > 1 and call.at.device.type == "cuda":
        # PyTorch's kernels that know grouped queries take no mask tensor, but for one that keeps all weights:
        # so each query head gets its keys.
        key, value = call.per_head(key), call.per_head(value)

    def masked(part: slice) -> Tensor:
        if isinstance(call.mask, Ready) and call.bias is None:
            return rows(part, attn_mask=heads(call.mask.numbers(call.at, part)))
        allowed, alive, bias = _allowed(call, part)
        # A row with nothing allowed may look everywhere here, so that all stays finite; it is zeroed after.
        tensor = allowed if alive is None else allowed | ~alive
        if bias is not None:
            bias = _narrowed(bias if alive is None else bias.where(alive, 0), call.query.dtype)
            tensor = torch.where(tensor, bias, -torch.inf)
        out = rows(part, attn_mask=heads(tensor))
        return out if alive is None else out.where(alive, 0)

    if call.at.device.type != "cpu" or (_same_for_all_queries(call) and call.bias is None):
        return masked(everything)
    each = call.leading.numel() * call.at.keys
    uses = tuple(x for x in (query, key, value, call.bias) if x is not None)
    return chunks.by_rows(masked, call.at.queries, each, uses)


def _narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias in the query's type; what is out of its range becomes its largest number, not infinity."""
    most = torch.finfo(dtype).max
    return (bias.clamp(-most, most) if torch.finfo(bias.dtype).max > most else bias).to(dtype)


def _allowed(call: Call, rows: slice) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The mask of some rows, which rows are alive (None: all, known), and the bias of those rows."""
    if call.bias is None:
        mask = cast(Mask, call.mask)
        alive = mask.rows_alive(call.at)
        if alive is not None:
            alive = (alive[..., rows] if alive.shape[-1] > 1 else alive)[..., None]
        return mask.block(call.at, rows), alive, None
    bias = call.bias[..., rows, :] if call.bias.dim() > 1 and call.bias.shape[-2] > 1 else call.bias
    allowed = bias != -torch.inf
    if call.mask is not None:
        allowed = allowed & call.mask.block(call.at, rows)
    allowed = allowed.reshape(*[1] * (call.at.leading + 2 - allowed.dim()), *allowed.shape)
    return allowed, allowed.any(-1, keepdim=True), bias


def _as_heads(call: Call) -> Callable[[Tensor], Tensor]:
    """How to bring ``(*leading, rows, D)`` to the four dimensions ``(batch, heads, rows, D)`` of SDPA."""
    leading = call.leading

    def four(x: Tensor) -> Tensor:
        if x.dim() == 4 and x.shape[:-2] == leading:
            return x
        x = x.reshape(*[1] * (len(leading) + 2 - x.dim()), *x.shape)
        if x.dtype != torch.bool:  # a mask broadcasts by itself; keys and values need not
            x = x.expand(*leading, -1, -1) if call.group == 1 else x.expand(leading[0], -1, -1, -1)
        if len(leading) <= 2:
            return x.reshape(*[1] * (2 - len(leading)), *x.shape)
        return x.expand(*leading[:-1], *x.shape[-3:]).flatten(0, len(leading) - 2)

    return four


# --------------------------------------------------------------------------------- FlexAttention


def _flex_why_not(call: Call) -> str | None:
    if call.dot is None:
        return NOT_MEANT
    if gpu_of(call.at.device) is None:
        return f"it runs on CUDA, and the tensors are on {call.at.device.type}"
    if not compiles(call.at.device):
        return "it needs torch.compile, which has no compiler for this GPU here (is Triton installed?)"
    if call.query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes bfloat16, float16 and float32, not {call.query.dtype}"
    if call.at.leading > 2:
        return f"it takes batch and heads in front, and there are {call.at.leading} leading dimensions"
    if call.mask is not None and _is_tensor(call.mask):
        return "the mask is a tensor already"
    if call.mask is not None and not blocks.is_structured(call.mask):
        return "the mask has no structure that it could use"
    if call.bias is not None or call.dropout:
        return "it has no bias and no dropout here"
    if min(call.query.shape[-1], cast(Tensor, call.value).shape[-1]) < 16:
        return "its kernels need widths of 16 and more"
    if min(call.at.queries, call.at.keys) == 0:
        return "there is nothing to attend to"
    return ONE_WIDE_QUERY if _is_one_wide_query(call) else None


def _flex(call: Call) -> Tensor:
    heads = _as_heads(call)
    query, key, value = (heads(x) for x in (call.query, call.prepared_keys(), call.clean_value()))
    out = blocks.flex_attention(
        query,
        key,
        value,
        call.mask,
        call.at,
        softcap=call.softcap,
        scale=call.dot_scale(),
        grouped=call.group > 1,
    )
    return out.reshape(*call.leading, *out.shape[-2:])


PATHS = (
    Path(
        "additive-step", lambda call: "score, softmax and mix in our one Triton kernel", _step_why_not, _step
    ),
    Path(
        "packed-short",
        lambda call: "our Triton kernel, a program for each packed document",
        packed.short_why_not,
        packed.short,
    ),
    Path("varlen", lambda call: "FlashAttention over packed documents", packed.varlen_why_not, packed.varlen),
    Path(
        "sequences",
        lambda call: "PyTorch's SDPA, one document after the other",
        packed.each_why_not,
        packed.each,
    ),
    Path("sdpa", _sdpa_what, _sdpa_why_not, _sdpa),
    Path(
        "flex",
        lambda call: "FlexAttention, the block mask made from the mask's structure",
        _flex_why_not,
        _flex,
    ),
)
