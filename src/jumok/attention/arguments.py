"""The checked arguments of an attention call, with the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import cast

import torch
from torch import Tensor

from jumok.attention.additive import is_autocast_enabled
from jumok.attention.caching import is_tracing
from jumok.attention.mask_types import AttentionShape, DenseMask, Mask, check_broadcast
from jumok.attention.prepared_keys import KeyLike, PreparedKeys
from jumok.attention.scores import DotScore, ScaledDot, Score, are_dtypes_compatible
from jumok.errors import InputError

DEFAULT_SCORE = ScaledDot()


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of ``attend`` or ``weights`` after checking.

    ``leading_shape`` is the broadcast shape of the leading dimensions of query, key and value. With grouped
    queries (four dimensions, Hq a multiple of Hk) it contains Hq, and ``group_size`` is Hq / Hk, else 1.
    """

    query: Tensor  # (…, Q, Dq)
    key: KeyLike  # (…, K, Dk), or prepared
    value: Tensor | None  # (…, K, Dv)
    score: Score
    mask: Mask | None
    bias: Tensor | None
    scale: float | None
    softcap: float | None
    dropout: float
    leading_shape: torch.Size
    group_size: int
    shape: AttentionShape
    effective_mask: Mask | None  # the mask, without the pairs that the bias blocks with -inf

    @property
    def dot_score(self) -> DotScore | None:
        """The score if it is a plain dot product, which SDPA and FlexAttention can compute, else None."""
        return self.score if isinstance(self.score, DotScore) and self.score.uses_standard_formula else None

    def zero_hidden_keys(self, x: Tensor) -> Tensor:
        """Replace the keys or values ``x`` ``(…, K, D)`` that no query sees by zeros.

        They get no weight, but 0 · NaN is NaN, in the forward pass and in the gradients.
        """
        visible = None if self.effective_mask is None else self.effective_mask.find_visible_keys(self.shape)
        if visible is None or is_known_finite(x):
            return x
        if self.group_size > 1 and visible.shape[1] > 1:  # visible if any query head of the group sees it
            visible = visible.unflatten(1, (-1, self.group_size)).any(2)
        return x.where(visible[..., None], 0)

    def prepare_keys(self) -> Tensor:
        """Return the keys as the score compares them, ``(…, K, width)``, with zeros for hidden keys."""
        if isinstance(self.key, PreparedKeys):
            return self._zero_hidden_keys_once("key", self.score.resolve_keys(self.key))
        return self.score.resolve_keys(self.zero_hidden_keys(self.key))

    def prepare_value(self) -> Tensor:
        """Return the values with zeros for hidden keys."""
        return self._zero_hidden_keys_once("value", cast(Tensor, self.value))

    def _zero_hidden_keys_once(self, name: str, x: Tensor) -> Tensor:
        """Return ``zero_hidden_keys(x)``. Steps over the same prepared keys with the same mask share it.

        Only without gradients: a tensor with a gradient belongs to the graph of one step.
        """
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        if self.bias is not None or needs_grad or x.is_inference() or not isinstance(self.key, PreparedKeys):
            return self.zero_hidden_keys(x)
        return self.key.get_or_compute((name, self.shape, self.mask), (x,), lambda: self.zero_hidden_keys(x))

    def repeat_kv(self, x: Tensor) -> Tensor:
        """Repeat the heads of keys or values, so that there is one for every query head."""
        return x.repeat_interleave(self.group_size, dim=1) if self.group_size > 1 else x

    def slice_bias(self, rows: slice) -> Tensor | None:
        """Return the bias of some rows. A bias that is equal for all rows is returned as it is."""
        if self.bias is None or self.bias.dim() < 2 or self.bias.shape[-2] == 1:
            return self.bias
        return self.bias[..., rows, :]

    def dot_scale(self) -> float:
        """Return the factor on the dot products."""
        assert self.dot_score is not None
        return self.dot_score.default_scale(self.query.shape[-1]) if self.scale is None else self.scale


def build_attention_call(
    query: Tensor,
    key: KeyLike,
    value: Tensor | None,
    score: Score | None,
    mask: Mask | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
) -> AttentionCall:
    """Check the arguments of an attention call by their shapes and types. Never waits for a GPU."""
    keys = key.keys if isinstance(key, PreparedKeys) else key
    tensors = {"query": query, "key": keys} | ({} if value is None else {"value": value})
    _check_tensors(tensors)
    if (dtype := get_autocast_dtype(query.device)) is not None:
        # The dtypes may differ. They are converted as PyTorch's own functions do.
        query, value = _convert(query, dtype), None if value is None else _convert(value, dtype)
        key = replace(key, keys=_convert(keys, dtype)) if isinstance(key, PreparedKeys) else _convert(key, dtype)
    if value is not None and value.shape[-2] != keys.shape[-2]:
        raise InputError(f"there are {keys.shape[-2]} keys but {value.shape[-2]} values; each key needs its value")
    if score is None:
        if isinstance(key, PreparedKeys):
            raise InputError(f"these keys were prepared by {key.score_name}; pass that score as score=")
        score = DEFAULT_SCORE
    if not isinstance(score, Score):
        raise InputError(f"score must be one of jumok.scores (an object, such as Dot()), not {score!r}")
    score.check_inputs(query, key)
    if not (_is_number(dropout) and 0 <= dropout < 1):
        raise InputError(f"dropout={dropout!r}: expected a probability in [0, 1); 0 drops nothing")
    if softcap is not None and not (_is_number(softcap) and softcap > 0):
        raise InputError(f"softcap={softcap!r}: expected a positive number, or None for no cap")
    if scale is not None and not _is_number(scale):
        raise InputError(f"scale={scale!r}: expected a number, or None for the score's own scale")

    leading_shape, group_size = _broadcast_leading_dims(tensors)
    shape = AttentionShape(len(leading_shape), query.shape[-2], keys.shape[-2], query.device)
    if mask is not None:
        _check_mask(mask)
        mask.check_shape(leading_shape, shape)
    if bias is not None:
        if not isinstance(bias, Tensor):
            raise InputError(f"bias must be a tensor, not {type(bias).__name__}")
        if not bias.is_floating_point():
            raise InputError(
                f"bias is added to the scores and must be floating-point, not {bias.dtype}; "
                "a boolean mask goes through mask=jumok.masks.tensor(t)"
            )
        if bias.device != query.device:
            raise InputError(f"bias is on {bias.device}, the query on {query.device}; move it with .to()")
        check_broadcast("bias", bias.shape, (*leading_shape, shape.num_queries, shape.num_keys))
    return AttentionCall(
        query,
        key,
        value,
        score,
        mask,
        bias,
        scale,
        softcap,
        dropout,
        leading_shape,
        group_size,
        shape,
        effective_mask=_combine_mask_and_bias(mask, bias),
    )


def get_autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast, or None if it is off."""
    return torch.get_autocast_dtype(device.type) if is_autocast_enabled(device) else None


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert an input of attention as autocast does."""
    return x if x.dtype == torch.float64 else x.to(dtype)


def _check_mask(mask: object) -> None:
    if isinstance(mask, Mask):
        return
    advice = "wrap a boolean tensor (True = may attend) with jumok.masks.tensor(t)"
    if callable(mask):
        advice = f"call it: {getattr(mask, '__name__', 'mask')}(…)"
    raise InputError(f"mask must be one of jumok.masks, not {type(mask).__name__}; {advice}")


def is_known_finite(x: Tensor) -> bool:
    """Return whether all of ``x`` is finite. Checked only where it is cheap: on the CPU, without tracing."""
    if x.device.type != "cpu" or is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    # By the sum of squares: numbers so large that a product with them overflows do not count as finite.
    return bool(torch.linalg.vector_norm(x.detach()).isfinite())


def _combine_mask_and_bias(mask: Mask | None, bias: Tensor | None) -> Mask | None:
    if bias is None:
        return mask
    unblocked = DenseMask(torch.atleast_2d(bias.detach() != -torch.inf))
    return unblocked if mask is None else mask & unblocked


def check_mix_arguments(weights: Tensor, value: Tensor) -> int:
    """Check the arguments of ``mix``. Return the number of weight heads that share a value head."""
    tensors = {"weights": weights, "value": value}
    _check_tensors(tensors)
    if weights.shape[-1] != value.shape[-2]:
        raise InputError(
            f"the weights are for {weights.shape[-1]} keys, but there are {value.shape[-2]} values; "
            "each key needs its value"
        )
    return _broadcast_leading_dims(tensors)[1]


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    """Raise unless these are floating-point ``(…, length, width)`` of one dtype and on one device."""
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.dim() < 2:
            raise InputError(
                f"{name} has shape {tuple(x.shape)}; expected at least (length, width): "
                f"add a dimension with {name}[None] for a single vector"
            )
        if x.is_complex():
            raise InputError(f"{name} is {x.dtype}; complex numbers are not supported")
        if not x.is_floating_point():
            raise InputError(f"{name} is {x.dtype}; expected floating-point: convert with .float()")
        if x.device != first.device:
            raise InputError(
                f"{name} is on {x.device}, the {first_name} on {first.device}; move them to one device with .to()"
            )
        if not are_dtypes_compatible(x, first):
            raise InputError(f"{name} is {x.dtype}, the {first_name} {first.dtype}; convert one with .to()")


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _broadcast_leading_dims(tensors: dict[str, Tensor]) -> tuple[torch.Size, int]:
    """Return the broadcast leading shape, and how many heads of the first tensor share one of the others."""
    shapes = {name: x.shape[:-2] for name, x in tensors.items()}
    first, *others = shapes
    query, key = shapes[first], shapes[others[0]]
    if len(query) < max(len(shapes[name]) for name in others):
        # It would broadcast, and every row would get the queries of all rows.
        raise InputError(
            f"{first} has shape {tuple(tensors[first].shape)}, {others[0]} "
            f"{tuple(tensors[others[0]].shape)}: {first} has too few dimensions. One query per row is "
            f"{first}[:, None]; the same queries for all rows are {first}[None]"
        )
    if all(shape == query for shape in shapes.values()):  # the usual case; the rest takes longer than a launch
        return query, 1
    group_size = 1
    if len(query) == 2 == len(key) and 1 < key[1] < query[1] and query[1] % key[1] == 0:
        group_size = query[1] // key[1]
        value = shapes.get("value", key)
        if len(value) != 2 or value[1] != key[1]:
            raise InputError(
                f"grouped queries: the query has {query[1]} heads and the key {key[1]}, so the value must be "
                f"(batch, {key[1]}, keys, width) too, not {tuple(tensors['value'].shape)}"
            )
        shapes |= {name: torch.Size([shapes[name][0], query[1]]) for name in others}
    try:
        return torch.broadcast_shapes(*shapes.values()), group_size
    except RuntimeError:
        listed = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise InputError(
            f"the leading dimensions do not fit: {listed}. They must be equal or broadcast; "
            f"with (batch, heads, ·, ·), {first} heads may also be a multiple of {others[0]} heads"
        ) from None
