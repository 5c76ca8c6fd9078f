"""One attention call, with everything about it checked and worked out once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import cast

import torch
from torch import Tensor

from jumok.attention.caching import is_tracing
from jumok.attention.mask_types import AttentionShape, DenseMask, Mask, check_broadcast
from jumok.attention.prepared_keys import KeyLike, PreparedKeys
from jumok.attention.scores import DotScore, ScaledDot, Score, are_dtypes_compatible
from jumok.errors import InputError

DEFAULT_SCORE = ScaledDot()


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of ``attend`` or ``weights`` after checking.

    ``leading_shape`` is what the leading dimensions of query, key and value broadcast to. With grouped queries
    (four dimensions, Hq a multiple of Hk) it holds Hq, and ``group_size`` is Hq / Hk, else 1.
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
    effective_mask: Mask | None  # the mask, and what the bias blocks with -inf

    @property
    def dot_score(self) -> DotScore | None:
        """The score when it is a dot product, which SDPA and FlexAttention can compute."""
        return self.score if isinstance(self.score, DotScore) and self.score.uses_standard_formula else None

    def zero_hidden_keys(self, x: Tensor) -> Tensor:
        """``x``, ``(…, K, D)``, with zeros where no query may attend, so that nothing held there spreads.

        Needed even though such keys get no weight: 0 · NaN is NaN, forward and in the gradients.
        """
        alive = None if self.effective_mask is None else self.effective_mask.find_visible_keys(self.shape)
        if alive is None or is_known_finite(x):
            return x
        if self.group_size > 1 and alive.shape[1] > 1:  # a key lives if any query head of its group sees it
            alive = alive.unflatten(1, (-1, self.group_size)).any(2)
        return x.where(alive[..., None], 0)

    def prepare_keys(self) -> Tensor:
        """The clean keys as the score compares them, ``(…, K, width)``."""
        if isinstance(self.key, PreparedKeys):
            return self._zero_hidden_keys_once("key", self.score.resolve_keys(self.key))
        return self.score.resolve_keys(self.zero_hidden_keys(self.key))

    def prepare_value(self) -> Tensor:
        return self._zero_hidden_keys_once("value", cast(Tensor, self.value))

    def _zero_hidden_keys_once(self, name: str, x: Tensor) -> Tensor:
        """``zero_hidden_keys(x)``; with prepared keys, once for all steps that have the same mask.

        Only while decoding: what has a gradient belongs to the graph of one step.
        """
        learning = torch.is_grad_enabled() and x.requires_grad
        if self.bias is not None or learning or x.is_inference() or not isinstance(self.key, PreparedKeys):
            return self.zero_hidden_keys(x)
        return self.key.get_or_compute((name, self.shape, self.mask), (x,), lambda: self.zero_hidden_keys(x))

    def repeat_kv(self, x: Tensor) -> Tensor:
        """Keys or values with one head for every query head."""
        return x.repeat_interleave(self.group_size, dim=1) if self.group_size > 1 else x

    def dot_scale(self) -> float:
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
    """Check the arguments of an attention call. Only shapes and types are looked at: no GPU has to wait."""
    keys = key.keys if isinstance(key, PreparedKeys) else key
    named = {"query": query, "key": keys} | ({} if value is None else {"value": value})
    _check_tensors(named)
    kind = query.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # Then mixed types may come, and meet as they do in PyTorch's own functions.
        query, value = _to_autocast_dtype(query), None if value is None else _to_autocast_dtype(value)
        key = (
            replace(key, keys=_to_autocast_dtype(keys))
            if isinstance(key, PreparedKeys)
            else _to_autocast_dtype(key)
        )
    if value is not None and value.shape[-2] != keys.shape[-2]:
        raise InputError(
            f"there are {keys.shape[-2]} keys but {value.shape[-2]} values; each key needs its value"
        )
    if score is None:
        if isinstance(key, PreparedKeys):
            raise InputError(f"these keys were prepared by {key.score_name}; pass that score as score=")
        score = DEFAULT_SCORE
    if not isinstance(score, Score):
        raise InputError(f"score must be one of jumok.scores (an object, such as Dot()), not {score!r}")
    score.check_inputs(query, key)
    if not (_is_number(dropout) and 0 <= dropout < 1):
        raise InputError(f"dropout={dropout!r}: a probability in [0, 1) is expected; 0 drops nothing")
    if softcap is not None and not (_is_number(softcap) and softcap > 0):
        raise InputError(f"softcap={softcap!r}: a positive number is expected, or None for none")
    if scale is not None and not _is_number(scale):
        raise InputError(f"scale={scale!r}: a number is expected, or None for the score's own")

    leading, group = _broadcast_leading_dims(named)
    at = AttentionShape(len(leading), query.shape[-2], keys.shape[-2], query.device)
    if mask is not None:
        _check_mask(mask)
        mask.check_shape(leading, at)
    if bias is not None:
        if not isinstance(bias, Tensor):
            raise InputError(f"bias must be a tensor, {type(bias).__name__} came")
        if not bias.is_floating_point():
            raise InputError(f"bias is added to the scores and must be floating-point, {bias.dtype} came; "
                             "a boolean mask goes through mask=jumok.masks.tensor(t)")  # fmt: skip
        if bias.device != query.device:
            raise InputError(f"bias is on {bias.device}, the query on {query.device}; move it with .to()")
        check_broadcast("bias", bias.shape, (*leading, at.num_queries, at.num_keys))
    visible = _combine_mask_and_bias(mask, bias)
    return AttentionCall(
        query, key, value, score, mask, bias, scale, softcap, dropout, leading, group, at, visible
    )


def _to_autocast_dtype(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _check_mask(mask: object) -> None:
    if isinstance(mask, Mask):
        return
    mend = "wrap a boolean tensor (True = may attend) with jumok.masks.tensor(t)"
    if callable(mask):
        mend = f"call it: {getattr(mask, '__name__', 'mask')}(…)"
    raise InputError(f"mask must be one of jumok.masks, not {type(mask).__name__}; {mend}")


def is_known_finite(x: Tensor) -> bool:
    """Whether all of ``x`` is finite, where a look at it costs little: on the CPU, outside of any tracing."""
    if x.device.type != "cpu" or is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    # By the sum of the squares: numbers so large that a product with them overflows do not count as finite.
    return bool(torch.linalg.vector_norm(x.detach()).isfinite())


def _combine_mask_and_bias(mask: Mask | None, bias: Tensor | None) -> Mask | None:
    if bias is None:
        return mask
    unblocked = DenseMask(torch.atleast_2d(bias.detach() != -torch.inf))
    return unblocked if mask is None else mask & unblocked


def check_mix_arguments(weights: Tensor, value: Tensor) -> int:
    """Check the arguments of ``mix``; the number of heads of weights that share a head of values."""
    named = {"weights": weights, "value": value}
    _check_tensors(named)
    if weights.shape[-1] != value.shape[-2]:
        raise InputError(
            f"the weights are for {weights.shape[-1]} keys, but there are {value.shape[-2]} values; "
            "each key needs its value"
        )
    return _broadcast_leading_dims(named)[1]


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    """Raise unless these are floating-point ``(…, length, width)`` of one dtype and on one device."""
    first, like = next(iter(tensors.items()))
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor, {type(x).__name__} came")
        if x.dim() < 2:
            raise InputError(
                f"{name} has shape {tuple(x.shape)}; at least (length, width) is expected: "
                f"add a dimension with {name}[None] for a single vector"
            )
        if x.is_complex():
            raise InputError(f"{name} is {x.dtype}; complex numbers are not supported")
        if not x.is_floating_point():
            raise InputError(f"{name} is {x.dtype}; floating-point is expected: convert with .float()")
        if x.device != like.device:
            raise InputError(
                f"{name} is on {x.device}, the {first} on {like.device}; move them to one device with .to()"
            )
        if not are_dtypes_compatible(x, like):
            raise InputError(f"{name} is {x.dtype}, the {first} {like.dtype}; convert one with .to()")


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _broadcast_leading_dims(tensors: dict[str, Tensor]) -> tuple[torch.Size, int]:
    """What the leading dimensions broadcast to, and how many heads of the first share one of the others."""
    shapes = {name: x.shape[:-2] for name, x in tensors.items()}
    first, *others = shapes
    query, key = shapes[first], shapes[others[0]]
    if len(query) < max(len(shapes[name]) for name in others):
        # It would broadcast, each row asked the queries of all: a decoder's state without its [:, None].
        raise InputError(
            f"{first} has shape {tuple(tensors[first].shape)}, {others[0]} {tuple(tensors[others[0]].shape)}: "
            f"{first} has too few dimensions. One query a row is {first}[:, None]; the same for all rows "
            f"is {first}[None]"
        )
    if all(shape == query for shape in shapes.values()):  # nearly always; the rest takes longer than a launch
        return query, 1
    group = 1
    if len(query) == 2 == len(key) and 1 < key[1] < query[1] and query[1] % key[1] == 0:
        group = query[1] // key[1]
        value = shapes.get("value", key)
        if len(value) != 2 or value[1] != key[1]:
            raise InputError(
                f"grouped queries: the query has {query[1]} heads and the key {key[1]}, so the value must be "
                f"(batch, {key[1]}, keys, width) too; {tuple(tensors['value'].shape)} came"
            )
        shapes |= {name: torch.Size([shapes[name][0], query[1]]) for name in others}
    try:
        return torch.broadcast_shapes(*shapes.values()), group
    except RuntimeError:
        listed = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise InputError(
            f"the leading dimensions do not fit: {listed}. They must be equal or broadcast; "
            f"with (batch, heads, ·, ·), {first} heads may also be a multiple of {others[0]} heads"
        ) from None
