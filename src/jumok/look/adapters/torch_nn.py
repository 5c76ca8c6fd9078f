"""``nn.MultiheadAttention`` and the layers made of it, on each of their paths.

Where no weights are asked for, the plain path ends in ``F.scaled_dot_product_attention`` and is seen there.
Where they are, it multiplies queries and keys itself: that product is looked at. The fast paths are single
fused operations from a layer's input to its output: beside them, queries and keys are projected once more.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.errors import InputError
from jumok.look import views
from jumok.look.adapters import products, softmax
from jumok.look.adapters.nested import padded, real
from jumok.look.adapters.patches import Function, attribute
from jumok.look.adapters.site import LISTENERS, Fused, here, known
from jumok.look.kept import Kept


@contextmanager
def watched() -> Iterator[None]:
    """While it lasts, the attention of ``torch.nn`` is told of."""
    with ExitStack() as stack:
        for owner, name, make in (
            (F, "multi_head_attention_forward", _plain),
            (torch, "bmm", _bmm),
            (torch, "baddbmm", _baddbmm),
            (torch, "_native_multi_head_attention", _attention),
            (torch, "_transformer_encoder_layer_fwd", _encoder_layer),
        ):
            stack.enter_context(attribute(owner, name, make))
        yield


# ------------------------------------------------------------------- the plain path, with weights

_HEADS: ContextVar[int] = ContextVar("jumok.look.heads", default=0)  # of the call whose product is waited for


def _plain(forward: Function) -> Function:
    names = list(inspect.signature(forward).parameters)

    def multi_head_attention_forward(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not LISTENERS.get():
            return forward(*args, **options)
        given = dict(zip(names, args, strict=False)) | options
        token = _HEADS.set(given["num_heads"] if given.get("need_weights", True) else 0)
        try:
            with known(kind="self" if given["query"] is given["key"] else "cross"), softmax.caught():
                return forward(*args, **options)
        finally:
            _HEADS.reset(token)

    return multi_head_attention_forward


def _bmm(bmm: Function) -> Function:
    def watched_bmm(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and _HEADS.get():
            _product(args[0], args[1], None)
        out = bmm(*args, **options)
        products.note(out, *args[:2])
        return out

    return watched_bmm


def _baddbmm(baddbmm: Function) -> Function:
    def watched_baddbmm(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and _HEADS.get():
            _product(args[1], args[2], args[0])
        out = baddbmm(*args, **options)
        products.note(out, *args[1:3])
        return out

    return watched_baddbmm


def _product(query: Tensor, keys: Tensor, added: Tensor | None) -> None:
    """The first product of a call: queries ``(B · H, Q, D)``, scaled, and keys ``(B · H, D, K)``."""
    heads = _HEADS.get()
    _HEADS.set(0)  # what comes next is the product of weights and values
    site = here()
    if site is None:
        return
    if added is not None:  # a mask (B · H, Q, K), or one for all (1, Q, K)
        added = added[None] if len(added) == 1 else added.unflatten(0, (-1, heads))
    site.saw(Kept(query.unflatten(0, (-1, heads)), keys.mT.unflatten(0, (-1, heads)), mask=added))


# --------------------------------------------------------------------------------- the fast paths


class _Layer(NamedTuple):
    """What the two fused operations have in common."""

    x: Tensor  # (B, L, E), may be nested
    heads: int
    weight: Tensor  # (3 E, E) and (3 E,): queries, keys and values in one projection
    bias: Tensor
    merge: Tensor  # (E, E): the weight of the output projection
    mask: Tensor | None  # not zero: blocked
    mask_type: int | None  # 0: (L, L), 1: (B, L), 2: (B, H, L, L)
    norm: tuple[Tensor, Tensor, float] | None = None  # weight, bias and ε of the norm before the projection


def _attention(native: Function) -> Function:
    def _native_multi_head_attention(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or options or len(args) != 13:  # none of torch's own code
            return native(*args, **options)
        layer = _Layer(args[0], args[4], args[5], args[6], args[7], args[9], args[12])
        merge, mask, mask_type, left = _seen(layer)
        out, weights = native(*args[:7], merge, args[8], mask, *args[10:12], mask_type)
        if left is not None and weights is not None:
            weights = views.weights(left).to(out.dtype)
            weights = weights.mean(1) if args[11] else weights
        return out, weights

    return _native_multi_head_attention


def _encoder_layer(native: Function) -> Function:
    def _transformer_encoder_layer_fwd(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or options or len(args) != 20:
            return native(*args, **options)
        norm = (args[10], args[11], args[9]) if args[8] else None
        layer = _Layer(args[0], args[2], args[3], args[4], args[5], args[18], args[19], norm)
        merge, mask, mask_type, _ = _seen(layer)
        return native(*args[:5], merge, *args[6:18], mask, mask_type)

    return _transformer_encoder_layer_fwd


def _seen(layer: _Layer) -> tuple[Tensor, Tensor | None, int | None, Kept | None]:
    """Tell of the attention inside. What is to be passed on: output projection, mask and its type.

    With it, if something was changed, the attention that is left.
    """
    site = here()
    if site is None:
        return layer.merge, layer.mask, layer.mask_type, None
    site = here(_owner(site.module, layer.weight)) or site
    blocked = _blocked(layer)
    kept = _kept(layer, blocked)
    site.saw(kept, kind="self")
    changed = site.fused(Fused(blocked, layer.merge), kept)
    mask, mask_type = layer.mask, layer.mask_type
    if changed.blocked is not None and changed.blocked is not blocked:
        if layer.x.is_nested:
            raise InputError(
                "knock_out: an edge cannot be taken out of nested sequences; switch off PyTorch's fast path "
                "with torch.backends.mha.set_fastpath_enabled(False)"
            )
        mask, mask_type = changed.blocked.expand(kept.shape).contiguous(), 2
    is_changed = changed.merge is not layer.merge or mask is not layer.mask
    return changed.merge, mask, mask_type, site.left(kept) if is_changed else None


def _owner(module: nn.Module, weight: Tensor) -> nn.Module:
    """The attention inside of ``module`` that this projection is of."""
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is weight:
            return part
    return module


def _blocked(layer: _Layer) -> Tensor | None:
    if layer.mask is None:
        return None
    blocked = layer.mask.bool()
    return blocked[:, None, None] if layer.mask_type == 1 else blocked


@torch.no_grad()
def _kept(layer: _Layer, blocked: Tensor | None) -> Kept:
    x, mask = layer.x, None if blocked is None else ~blocked
    if x.is_nested:
        x, lengths = padded(x)
        mask = real(lengths, x.shape[1])[:, None, None]
    width = x.shape[-1]
    if layer.norm is not None:
        x = F.layer_norm(x, (width,), *layer.norm)
    both = F.linear(x, layer.weight[: 2 * width], layer.bias[: 2 * width])
    query, key = both.unflatten(-1, (2, layer.heads, -1)).permute(2, 0, 3, 1, 4)
    return Kept(query, key, scale=query.shape[-1] ** -0.5, mask=mask)
