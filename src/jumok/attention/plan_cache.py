"""Plan cache: the checks and the choice of a path are made once for a kind of call and then reused.

A *key* (:func:`make_plan_key`) is everything that the checks and the choice depend on: shapes, dtypes, devices
and options. The first two calls with a key take the full path, with every check; the second stores a *plan*
(:mod:`jumok.attention.plans`), which later calls run directly. Plans of calls with a mask are stored on the
mask, which is immutable. All caches are bounded.

Without plans, the checks and the choice take several times as long as attention over short sequences itself
(``bench/attention.py --section overhead``).

A plan may decline a call by returning None, for example when the padding holds NaN. The call then takes the
full path, so results and errors are always those of the full path.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor, nn

from jumok.attention import dispatch
from jumok.attention.arguments import AttentionCall, get_autocast_dtype
from jumok.attention.caching import BoundedCache
from jumok.attention.mask_types import AndMask, KeyMask, Mask, NotMask, OrMask, PaddingMask, WindowMask
from jumok.attention.packed_masks import DocumentMask, PackedMask
from jumok.attention.plans import AttentionPlan, ComputeAttention, build_plan
from jumok.attention.prepared_keys import KeyLike, PreparedKeys
from jumok.attention.scores import Additive, Concat, Dot, General, ScaledDot, Score

MAX_PLANS = 1024  # plans of calls without a mask
MAX_PLANS_PER_MASK = 8

# Types without behavior of their own. Calls with others, such as tensor subclasses, take the full path.
PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})
PLAIN_SCORES = frozenset({type(None), ScaledDot, Dot, General, Additive, Concat})
PLAIN_MASKS = frozenset(
    {type(None), PaddingMask, KeyMask, WindowMask, AndMask, OrMask, NotMask, DocumentMask, PackedMask}
)
PLAIN_NUMBERS = frozenset({type(None), float, int})  # not bool: True == 1, but True is an error

_unmasked_plans = BoundedCache(MAX_PLANS)

# Looked up once, because they are called at every attention call.
_PATHS = dispatch.PATHS
_in_transform = torch._C._are_functorch_transforms_active
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_in_function_mode = torch._C._is_torch_function_mode_enabled
_in_autocast = torch._C._is_any_autocast_enabled
_get_jit_trace = torch._C._get_tracing_state
_get_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def needs_full_path() -> bool:
    """Return whether something must see each check and operation of a call, such as a trace."""
    return (
        torch.compiler.is_compiling()
        or dispatch.PATHS is not _PATHS  # a test or a benchmark restricts the choice
        or _in_transform()
        or _num_dispatch_modes() > 0
        or _in_function_mode()
        or _get_jit_trace() is not None
        or _get_saved_tensor_hooks(False) is not None  # a checkpoint needs the same operations in both runs
    )


def make_plan_key(
    query: Tensor,
    key: KeyLike,
    value: Tensor,
    score: Score | None,
    mask: Mask | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
) -> Hashable | None:
    """Return everything that the checks and the choice of a path depend on, except the mask.

    None if the call must take the full path. Not called if :func:`needs_full_path`.
    """
    if bias is not None or softcap is not None:
        return None
    is_prepared = type(key) is PreparedKeys
    keys: Any = key.keys if is_prepared else key  # type: ignore[union-attr]
    if not (
        type(query) in PLAIN_TENSORS
        and type(keys) in PLAIN_TENSORS
        and type(value) in PLAIN_TENSORS
        and type(score) in PLAIN_SCORES
        and type(mask) in PLAIN_MASKS
        and type(scale) in PLAIN_NUMBERS
        and type(dropout) in PLAIN_NUMBERS
    ):
        return None
    autocast_dtype = None
    if _in_autocast():
        autocast_dtype = get_autocast_dtype(query.device)
        if autocast_dtype is not None and not {query.dtype, keys.dtype, value.dtype} <= {autocast_dtype, torch.float64}:
            return None  # the full path converts these inputs
    return (
        query.shape,
        keys.shape,
        value.shape,
        query.dtype,
        keys.dtype,
        value.dtype,
        query.device,
        keys.device,
        value.device,
        type(score),
        is_prepared,
        scale,
        dropout,
        autocast_dtype,
    )


def find_plan(key: Hashable, mask: Mask | None) -> AttentionPlan | None:
    """Return the stored plan for calls with this key and this mask, or None."""
    plans = _unmasked_plans if mask is None else mask.__dict__.get("_plans")
    return None if plans is None else cast(AttentionPlan | None, plans.get(key))


def store_plan(
    key: Hashable, call: AttentionCall, choose_function: Callable[[AttentionCall], ComputeAttention]
) -> None:
    """Note the first call with this key. At the second, store a plan for all later ones.

    ``choose_function`` returns the function that computes the call. No plan is built at the first call,
    because many masks and lengths serve one call only.
    """
    plans = _unmasked_plans
    if call.mask is not None:
        plans = call.mask.__dict__.setdefault("_plans", BoundedCache(MAX_PLANS_PER_MASK))
    plans.replace(key, build_plan(call, choose_function(call)) if key in plans else None)
