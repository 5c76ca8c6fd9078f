"""Masks: which keys each query may attend to.

A mask says what is *allowed*: ``True`` means "may attend", as in ``F.scaled_dot_product_attention``. Masks
combine with ``&``, ``|`` and ``~``. They stay structured (lengths, offsets, document ids) until a path needs
a tensor; ``to_dense(Q, K)`` returns one. Lengths, offsets and document ids align with the leading dimensions
of the query from the left. A tensor broadcasts to the scores from the right. Create masks outside of
functions that ``torch.compile`` compiles, because their values are read.

In the diagrams, a row is a query, a column is a key, ``■`` is allowed and ``·`` is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from jumok.attention.mask_types import DenseMask, KeyMask, Mask, PaddingMask, WindowMask
from jumok.attention.packed_masks import DocumentMask, PackedMask, are_documents_contiguous
from jumok.errors import InputError

__all__ = [
    "Mask",
    "causal",
    "documents",
    "from_additive",
    "from_blocked",
    "from_zero_one",
    "packed",
    "padding",
    "tensor",
    "window",
]

IntTensorLike = int | Sequence[Any] | Tensor
MASKED_THRESHOLD = -1e4  # additive masks use -1e4, -1e9 or the lowest number of a dtype in place of -inf
MaskFactory = TypeVar("MaskFactory", bound=Callable[..., Mask])


def _outside_inference_mode(factory: MaskFactory) -> MaskFactory:
    """Create the mask outside of inference mode, so that it can be used in training."""
    return torch.inference_mode(False)(factory)


@_outside_inference_mode
def padding(lengths: IntTensorLike, bounds: tuple[int, int] | None = None) -> Mask:
    """Hide the keys from ``lengths`` on. They are padding and never affect the result, even if they are NaN.

    ``padding([2, 4])`` with 4 keys (all rows of each diagram are equal)::

        ■ ■ · ·     ■ ■ ■ ■
        ■ ■ · ·     ■ ■ ■ ■

    Args:
        lengths: the number of real keys. They align with the leading dimensions of the query from the left:
            ``(B,)`` fits a query ``(B, Q, D)`` and a query ``(B, H, Q, D)``; ``(B, H)`` sets each head.
        bounds: the smallest and the largest of the lengths, which are trusted. Lengths on a GPU then stay
            there. Without bounds, the host waits for them once.
    """
    if bounds is not None:
        lengths = torch.as_tensor(lengths)
        return PaddingMask(torch.zeros_like(lengths), lengths - 1, *bounds, max_first=0)
    lengths = _read_integers("padding(lengths)", lengths)
    shortest, longest = _read_min_max(lengths)
    if shortest < 0:
        raise InputError(f"padding(lengths) contains {shortest}; a length is 0 or more")
    return PaddingMask(torch.zeros_like(lengths), lengths - 1, min_length=shortest, max_end=longest, max_first=0)


@_outside_inference_mode
def causal(offset: IntTensorLike | None = None) -> Mask:
    """Let a query attend to its own position and to previous positions.

    The last query sees the last key (bottom-right alignment, as in FlashAttention), which is correct with a
    cache of past keys. ``causal()`` with 3 queries and 5 keys, and with 3 queries and 3 keys::

        ■ ■ ■ · ·     ■ · ·
        ■ ■ ■ ■ ·     ■ ■ ·
        ■ ■ ■ ■ ■     ■ ■ ■

    ``is_causal=True`` of ``F.scaled_dot_product_attention`` is ``causal(0)``. They are equal if Q = K.

    Args:
        offset: the number of keys before the first query, one number or one for each row (ragged caches).
            Query ``i`` sees the keys ``0 … i + offset``. Default: K − Q.
    """
    return WindowMask(None, 0, _read_offset("causal(offset)", offset))


@_outside_inference_mode
def window(left: int | None, right: int | None, offset: IntTensorLike | None = None) -> Mask:
    """Let a query attend to ``left`` keys before its position, its position, and ``right`` keys after it.

    ``window(1, 0)`` with 4 queries and 4 keys, and ``window(1, 1)``::

        ■ · · ·     ■ ■ · ·
        ■ ■ · ·     ■ ■ ■ ·
        · ■ ■ ·     · ■ ■ ■
        · · ■ ■     · · ■ ■

    Args:
        left: the number of keys before the position; None means all.
        right: the number of keys after the position; None means all.
        offset: as in :func:`causal`.
    """
    for side, reach in (("left", left), ("right", right)):
        if reach is not None and (isinstance(reach, bool) or not isinstance(reach, int) or reach < 0):
            raise InputError(f"window({side}={reach!r}): give an integer number of keys, or None for all keys")
    return WindowMask(left, right, _read_offset("window(offset)", offset))


@_outside_inference_mode
def documents(ids: IntTensorLike, query_ids: IntTensorLike | None = None) -> Mask:
    """Let a query attend only to its own document (packed sequences).

    ``documents([7, 7, 8, 8, 8])``, and ``documents([7, 7, 8, 8, 8], query_ids=[7, 8, 8])``::

        ■ ■ · · ·     ■ ■ · · ·
        ■ ■ · · ·     · · ■ ■ ■
        · · ■ ■ ■     · · ■ ■ ■
        · · ■ ■ ■
        · · ■ ■ ■

    A negative id marks padding, which attends to nothing and which nothing attends to.

    Args:
        ids: one id for every key, ``(N,)`` or ``(*leading, N)``.
        query_ids: one id for every query, with the same leading dimensions, for example for attention from
            packed translations to packed sources. Default: the queries are the last of the keys.
    """
    key_ids = _read_document_ids("documents(ids)", ids, "key")
    contiguous = are_documents_contiguous(key_ids)
    has_padding = bool((key_ids < 0).any())
    if query_ids is None:
        return DocumentMask(key_ids, contiguous, has_padding)
    query_ids = _read_document_ids("documents(ids, query_ids)", query_ids, "query")
    if query_ids.shape[:-1] != key_ids.shape[:-1]:
        raise InputError(
            f"documents(ids, query_ids): got ids of shape {tuple(key_ids.shape)} and query_ids of shape "
            f"{tuple(query_ids.shape)}; all dimensions but the last must be equal"
        )
    rows = zip(key_ids.reshape(-1, key_ids.shape[-1]), query_ids.reshape(-1, query_ids.shape[-1]), strict=True)
    return DocumentMask(
        key_ids,
        contiguous,
        has_padding or bool((query_ids < 0).any()),
        query_ids,
        queries_match_keys=all(torch.equal(keys.unique(), queries.unique()) for keys, queries in rows),
    )


@_outside_inference_mode
def packed(
    cu_seqlens: IntTensorLike,
    max_seqlen: int | None = None,
    *,
    cu_seqlens_q: IntTensorLike | None = None,
    max_seqlen_q: int | None = None,
) -> Mask:
    """Let a query attend only to its own sequence, as :func:`documents`, defined by sequence boundaries.

    ``packed([0, 2, 5])``, and ``packed([0, 2, 5], cu_seqlens_q=[0, 1, 3])``::

        ■ ■ · · ·     ■ ■ · · ·
        ■ ■ · · ·     · · ■ ■ ■
        · · ■ ■ ■     · · ■ ■ ■
        · · ■ ■ ■
        · · ■ ■ ■

    The arguments have the names and the meaning that they have in FlashAttention. Values on a GPU stay there
    and are trusted. Values on the host are checked.

    Args:
        cu_seqlens: where each sequence of keys starts, and the end of the last, ``(N + 1,)``.
        max_seqlen: an upper bound of the sequence lengths. Required if ``cu_seqlens`` is on a GPU.
        cu_seqlens_q: the same for the queries, in as many sequences. Default: the queries are the keys.
        max_seqlen_q: the same for the queries.
    """
    cu_seqlens = _read_cu_seqlens("packed(cu_seqlens)", cu_seqlens)
    max_seqlen, key_lengths = _measure_sequences("packed(cu_seqlens)", cu_seqlens, "max_seqlen", max_seqlen)
    if cu_seqlens_q is None:
        return PackedMask(cu_seqlens, max_seqlen, queries_match_keys=None if key_lengths is None else True)
    name = "packed(cu_seqlens_q)"
    cu_seqlens_q = _read_cu_seqlens(name, cu_seqlens_q)
    max_seqlen_q, query_lengths = _measure_sequences(name, cu_seqlens_q, "max_seqlen_q", max_seqlen_q)
    if cu_seqlens_q.shape != cu_seqlens.shape:
        raise InputError(
            f"packed(cu_seqlens, cu_seqlens_q): there are {cu_seqlens.numel() - 1} sequences of keys but "
            f"{cu_seqlens_q.numel() - 1} of queries; each needs the other"
        )
    queries_match_keys = None
    if key_lengths is not None and query_lengths is not None:
        queries_match_keys = torch.equal(key_lengths > 0, query_lengths > 0)
    return PackedMask(cu_seqlens, max_seqlen, cu_seqlens_q, max_seqlen_q, queries_match_keys)


def _read_cu_seqlens(name: str, values: IntTensorLike) -> Tensor:
    """Return sequence boundaries as a tensor. A tensor is returned as it is, on its device."""
    cu_seqlens = values if isinstance(values, Tensor) else _read_integers(name, values)
    if not _is_integer_tensor(cu_seqlens) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        raise InputError(f"{name}: expected integers of shape (sequences + 1,), got {_describe_argument(cu_seqlens)}")
    return cu_seqlens


def _measure_sequences(
    name: str, cu_seqlens: Tensor, max_name: str, max_seqlen: int | None
) -> tuple[int, Tensor | None]:
    """Return the maximum length, and the lengths of all sequences if they are on the host."""
    if cu_seqlens.device.type != "cpu":
        if max_seqlen is None:
            raise InputError(f"{name} is on {cu_seqlens.device}: give the length of the longest as {max_name}=")
        return max_seqlen, None
    lengths = cu_seqlens.diff()
    if cu_seqlens[0] != 0 or (lengths < 0).any():
        raise InputError(f"{name} must start at 0 and never decrease; got {cu_seqlens.tolist()[:8]} …")
    longest = int(lengths.max()) if len(lengths) else 0
    if max_seqlen is not None and max_seqlen < longest:
        raise InputError(f"{name}: a sequence has {longest} tokens, more than {max_name}={max_seqlen}")
    return (longest if max_seqlen is None else max_seqlen), lengths


def tensor(allowed: Tensor) -> Mask:
    """Use a boolean tensor that broadcasts to ``(…, Q, K)`` from the right, where True means "may attend".

    The tensor is not copied. Do not modify it afterwards; create a new mask instead.
    """
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
        raise InputError(
            "masks.tensor() takes a boolean tensor with True = may attend, not "
            f"{_describe_argument(allowed)}. Additive masks (0 and -inf) go through masks.from_additive, 0/1 "
            "masks of shape (batch, keys) through masks.from_zero_one, and masks with True = blocked through "
            "masks.from_blocked"
        )
    return DenseMask(torch.atleast_2d(allowed))


def from_blocked(blocked: Tensor) -> Mask:
    """Convert a mask ``(…, Q, K)`` in which True means *blocked* (``nn.MultiheadAttention``'s ``attn_mask``).

    Its ``key_padding_mask`` ``(B, K)`` is ``from_zero_one(~key_padding_mask)``.
    """
    if not isinstance(blocked, Tensor) or blocked.dtype != torch.bool:
        raise InputError(
            "masks.from_blocked() takes a boolean tensor in which True means: do not attend; not "
            f"{_describe_argument(blocked)}. Additive masks (0 and -inf) go through masks.from_additive"
        )
    return tensor(~blocked)


def from_additive(additive_mask: Tensor) -> Mask:
    """Convert a mask that is added to the scores: 0 where allowed, -inf (or -10,000 and less) where not.

    Any other number changes the weights instead of masking: pass such a tensor as ``bias``.
    """
    if not isinstance(additive_mask, Tensor) or not additive_mask.is_floating_point():
        raise InputError(
            "masks.from_additive() takes a floating-point tensor of 0 and -inf, not "
            f"{_describe_argument(additive_mask)}. A boolean mask goes through masks.tensor "
            "(True = may attend) or masks.from_blocked (True = may not)"
        )
    blocked = additive_mask <= MASKED_THRESHOLD
    if not bool((blocked | (additive_mask == 0)).all()):
        raise InputError(
            "masks.from_additive() found numbers other than 0 and -inf, which shift the scores instead of "
            "masking them; pass this tensor as bias= (there, -inf counts as masked)"
        )
    return tensor(~blocked)


@_outside_inference_mode
def from_zero_one(attention_mask: Tensor) -> Mask:
    """Convert Hugging Face's ``attention_mask`` ``(B, K)``: 1 (or True) for real keys and 0 for padding.

    The padding may be on either side. The leading dimensions align from the left, as in :func:`padding`.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() < 1:
        raise InputError(
            "masks.from_zero_one() takes a tensor of 0 and 1 with shape (batch, keys), not "
            f"{_describe_argument(attention_mask)}"
        )
    allowed = attention_mask.cpu()
    other_values = allowed[(allowed != 0) & (allowed != 1)]
    if other_values.numel():
        raise InputError(
            f"masks.from_zero_one() takes 0 and 1, and found {other_values[0].item()}; an additive mask goes "
            "through masks.from_additive, document ids through masks.documents"
        )
    allowed = allowed.to(torch.bool, copy=True)
    count = allowed.sum(-1)
    first = torch.where(count > 0, (allowed.cumsum(-1) == 0).sum(-1), 0)
    end = first + count
    positions = torch.arange(allowed.shape[-1])
    if not torch.equal(allowed, (positions >= first[..., None]) & (positions < end[..., None])):
        return KeyMask(allowed)
    return PaddingMask(
        first,
        end - 1,
        min_length=_read_min_max(count)[0],
        max_end=_read_min_max(end)[1],
        max_first=_read_min_max(first)[1],
        num_keys=allowed.shape[-1],
    )


# -------------------------------------------------------------------------- conversion of arguments


def _read_document_ids(name: str, values: IntTensorLike, token_name: str) -> Tensor:
    """Return document ids on the host."""
    ids = _read_integers(name, values)
    if ids.dim() == 0:
        raise InputError(f"{name} needs one id for every {token_name}, shape (N,) or (*leading, N)")
    return ids.cpu()


def _read_integers(name: str, values: IntTensorLike) -> Tensor:
    try:
        integers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: expected integers, got {type(values).__name__} ({error})") from None
    if integers.numel() == 0:
        return integers.long()
    if not _is_integer_tensor(integers):
        raise InputError(
            f"{name}: expected integers, got {integers.dtype}; a 0/1 mask goes through masks.from_zero_one"
        )
    return integers.detach().to(torch.long, copy=True)  # the caller may modify their tensor afterwards


def _is_integer_tensor(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _read_offset(name: str, offset: IntTensorLike | None) -> Tensor | None:
    return None if offset is None else _read_integers(name, offset)


def _read_min_max(values: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest value on the host. Waits for values on a GPU."""
    if values.numel() == 0:
        return 0, 0
    smallest, largest = torch.stack(torch.aminmax(values)).tolist()
    return int(smallest), int(largest)


def _describe_argument(x: object) -> str:
    """Describe an argument for an error message."""
    return f"a tensor of {x.dtype} and shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
