"""Masks: who may attend to whom.

A mask says what is *allowed*: ``True`` means "may attend", as in ``F.scaled_dot_product_attention``.
Masks combine with ``&``, ``|`` and ``~``. They stay structured (lengths, offsets, document numbers)
until a path needs a tensor; ``dense(Q, K)`` shows one. Lengths, offsets and document numbers have the
leading dimensions of the query, from the left; a tensor broadcasts to the scores from the right.
Make masks outside of functions that ``torch.compile`` compiles: their numbers are looked at.

In the pictures a row is a query, a column is a key, ``■`` is allowed and ``·`` is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from jumok.attention.mask_types import DenseMask, KeyMask, Mask, PaddingMask, WindowMask
from jumok.attention.packed_masks import DocumentMask, PackedMask
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
MASKED_THRESHOLD = (
    -1e4
)  # what additive masks have instead of -inf: -1e4, -1e9, the lowest number of some dtype
MaskFactory = TypeVar("MaskFactory", bound=Callable[..., Mask])


def _outside_inference_mode(factory: MaskFactory) -> MaskFactory:
    """A mask that is made in inference mode may be used in training."""
    return torch.inference_mode(False)(factory)


@_outside_inference_mode
def padding(lengths: IntTensorLike, bounds: tuple[int, int] | None = None) -> Mask:
    """Keys from ``lengths`` on are padding: nobody attends to them, whatever they hold.

    ``padding([2, 4])``, 4 keys (the rows of each picture are all alike)::

        ■ ■ · ·     ■ ■ ■ ■
        ■ ■ · ·     ■ ■ ■ ■

    ``lengths`` has the leading dimensions of the attention, from the left: ``(B,)`` serves a query
    ``(B, Q, D)`` and a query ``(B, H, Q, D)``; ``(B, H)`` gives each head its own.

    Lengths are looked at on the host. Those that lie on a GPU can stay there, and nothing waits for them, if
    ``bounds`` says between which numbers they are: that is trusted.
    """
    if bounds is not None:
        there = torch.as_tensor(lengths)
        return PaddingMask(torch.zeros_like(there), there - 1, *bounds, max_first=0)
    given = _read_integers("padding(lengths)", lengths)
    lowest, highest = _read_min_max(given)
    if lowest < 0:
        raise InputError(f"padding(lengths) holds {lowest}; a length is 0 or more")
    return PaddingMask(torch.zeros_like(given), given - 1, min_length=lowest, max_end=highest, max_first=0)


@_outside_inference_mode
def causal(offset: IntTensorLike | None = None) -> Mask:
    """A query may attend to itself and to what came before it.

    The last query sees the last key (bottom-right, as in FlashAttention), so that it is right with a
    cache of past keys. ``causal()`` with 3 queries and 5 keys, and with 3 and 3::

        ■ ■ ■ · ·     ■ · ·
        ■ ■ ■ ■ ·     ■ ■ ·
        ■ ■ ■ ■ ■     ■ ■ ■

    ``offset`` says how many keys lie before the first query, one number or one for each row
    (ragged caches): query ``i`` sees the keys ``0 … i + offset``. Without it, ``offset`` is K − Q.
    The ``is_causal=True`` of ``F.scaled_dot_product_attention`` is ``causal(0)``; the two agree where Q = K.
    """
    return WindowMask(None, 0, _read_offset("causal(offset)", offset))


@_outside_inference_mode
def window(left: int | None, right: int | None, offset: IntTensorLike | None = None) -> Mask:
    """A query may attend to ``left`` keys before it, itself, and ``right`` after it; None: all on that side.

    ``window(1, 0)`` with 4 queries and 4 keys, and ``window(1, 1)``::

        ■ · · ·     ■ ■ · ·
        ■ ■ · ·     ■ ■ ■ ·
        · ■ ■ ·     · ■ ■ ■
        · · ■ ■     · · ■ ■

    Aligned as :func:`causal`: bottom-right, or by ``offset``.
    """
    for side, reach in (("left", left), ("right", right)):
        if reach is not None and (isinstance(reach, bool) or not isinstance(reach, int) or reach < 0):
            raise InputError(
                f"window({side}={reach!r}): give a whole number of keys, or None for all of them"
            )
    return WindowMask(left, right, _read_offset("window(offset)", offset))


@_outside_inference_mode
def documents(ids: IntTensorLike, query_ids: IntTensorLike | None = None) -> Mask:
    """Packed sequences: a query may attend only within its own document.

    ``documents([7, 7, 8, 8, 8])``, and ``documents([7, 7, 8, 8, 8], queries=[7, 8, 8])``::

        ■ ■ · · ·     ■ ■ · · ·
        ■ ■ · · ·     · · ■ ■ ■
        · · ■ ■ ■     · · ■ ■ ■
        · · ■ ■ ■
        · · ■ ■ ■

    One id for every key, ``(N,)`` or ``(*leading, N)``; with fewer queries than keys the queries are
    the last ones. ``queries`` are the ids of other queries, with the same leading dimensions: attention
    from packed translations to packed sources. A negative id is padding: it attends to nothing and nothing
    attends to it.
    """
    keys = _read_document_ids("documents(ids)", ids)
    if query_ids is None:
        return DocumentMask(keys, contiguous=_is_contiguous(keys), has_padding=bool((keys < 0).any()))
    asked = _read_document_ids("documents(ids, queries)", query_ids)
    if asked.shape[:-1] != keys.shape[:-1]:
        raise InputError(
            f"documents(ids, queries): ids of shape {tuple(keys.shape)} came with queries of shape "
            f"{tuple(asked.shape)}; all dimensions but the last are the same"
        )
    rows = zip(keys.reshape(-1, keys.shape[-1]), asked.reshape(-1, asked.shape[-1]), strict=True)
    return DocumentMask(
        keys,
        contiguous=_is_contiguous(keys),
        has_padding=bool((keys < 0).any()) or bool((asked < 0).any()),
        query_ids=asked,
        queries_match_keys=all(torch.equal(one.unique(), other.unique()) for one, other in rows),
    )


@_outside_inference_mode
def packed(
    cu_seqlens: IntTensorLike,
    max_seqlen: int | None = None,
    *,
    cu_seqlens_q: IntTensorLike | None = None,
    max_seqlen_q: int | None = None,
) -> Mask:
    """Packed sequences, as :func:`documents`, told by where each begins and the last one ends.

    ``packed([0, 2, 5])``, and with ``queries=[0, 1, 3]``::

        ■ ■ · · ·     ■ ■ · · ·
        ■ ■ · · ·     · · ■ ■ ■
        · · ■ ■ ■     · · ■ ■ ■
        · · ■ ■ ■
        · · ■ ■ ■

    These are the ``cu_seqlens`` of FlashAttention, ``(N + 1,)``; as there, ``max_seqlen`` is the length of the
    longest sequence, or more. Numbers that lie on a GPU stay there and are trusted, and ``max_seqlen`` must be
    told; those on the host are checked. ``queries`` are the edges of other queries, in as many sequences.
    """
    keys = _read_cu_seqlens("packed(edges)", cu_seqlens)
    max_seqlen, lengths = _measure_sequences("packed(edges)", keys, max_seqlen)
    if cu_seqlens_q is None:
        return PackedMask(keys, max_seqlen, queries_match_keys=None if lengths is None else True)
    asked = _read_cu_seqlens("packed(queries)", cu_seqlens_q)
    max_seqlen_q, asking = _measure_sequences("packed(queries)", asked, max_seqlen_q)
    if asked.shape != keys.shape:
        raise InputError(
            f"packed(edges, queries): {keys.numel() - 1} sequences of keys came with "
            f"{asked.numel() - 1} of queries; there is one for each"
        )
    matched = None if lengths is None or asking is None else torch.equal(lengths > 0, asking > 0)
    return PackedMask(keys, max_seqlen, asked, max_seqlen_q, matched)


def _read_cu_seqlens(name: str, values: IntTensorLike) -> Tensor:
    """Where sequences begin, and the last one ends. A tensor stays the one that it is, and where it is."""
    edges = values if isinstance(values, Tensor) else _read_integers(name, values)
    is_whole = not (edges.is_floating_point() or edges.is_complex() or edges.dtype == torch.bool)
    if not is_whole or edges.dim() != 1 or len(edges) < 1:
        raise InputError(
            f"{name}: whole numbers of shape (sequences + 1,) are expected; {_describe_argument(edges)} came"
        )
    return edges


def _measure_sequences(name: str, cu_seqlens: Tensor, max_seqlen: int | None) -> tuple[int, Tensor | None]:
    """The longest sequence, and the lengths of all where the host knows them."""
    if cu_seqlens.device.type != "cpu":
        if max_seqlen is None:
            raise InputError(f"{name} lie on {cu_seqlens.device}: say how long the longest sequence is")
        return max_seqlen, None
    lengths = cu_seqlens.diff()
    if cu_seqlens[0] != 0 or (lengths < 0).any():
        raise InputError(f"{name} begin at 0 and never fall; {cu_seqlens.tolist()[:8]} … came")
    most = int(lengths.max()) if len(lengths) else 0
    if max_seqlen is not None and max_seqlen < most:
        raise InputError(f"{name}: a sequence has {most} tokens, more than longest={max_seqlen}")
    return (most if max_seqlen is None else max_seqlen), lengths


def tensor(allowed: Tensor) -> Mask:
    """Any mask at all: a boolean tensor that broadcasts to ``(…, Q, K)`` from the right; True = may attend.

    The tensor is not copied: make a new mask rather than write into it afterwards.
    """
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
        raise InputError(
            f"masks.tensor() takes a boolean tensor with True = may attend; {_describe_argument(allowed)} came. "
            "Additive masks (0 and -inf) go through masks.from_additive, 0/1 masks of shape (batch, keys) "
            "through masks.from_zero_one, and masks with True = drop through masks.from_drop"
        )
    return DenseMask(torch.atleast_2d(allowed))


def from_blocked(blocked: Tensor) -> Mask:
    """From a mask in which True means *drop* (``nn.MultiheadAttention``'s ``attn_mask``), ``(…, Q, K)``.

    Its ``key_padding_mask`` ``(B, K)`` is ``from_zero_one(~key_padding_mask)``.
    """
    if not isinstance(blocked, Tensor) or blocked.dtype != torch.bool:
        raise InputError(
            "masks.from_drop() takes a boolean tensor in which True means: do not attend; "
            f"{_describe_argument(blocked)} came. Additive masks (0 and -inf) go through masks.from_additive"
        )
    return tensor(~blocked)


def from_additive(additive_mask: Tensor) -> Mask:
    """From a mask that is added to the scores: 0 where allowed, -inf (or -10,000 and less) where not.

    Any other number would change the weights rather than mask: give such a tensor as ``bias``.
    """
    if not isinstance(additive_mask, Tensor) or not additive_mask.is_floating_point():
        raise InputError(
            f"masks.from_additive() takes a floating-point tensor of 0 and -inf; {_describe_argument(additive_mask)} came. "
            "A boolean mask goes through masks.tensor (True = may attend) or masks.from_drop (True = may not)"
        )
    dropped = additive_mask <= MASKED_THRESHOLD
    if not bool((dropped | (additive_mask == 0)).all()):
        raise InputError(
            "masks.from_additive() found numbers other than 0 and -inf, which shift the scores rather than "
            "mask them; give this tensor as bias= (there, -inf counts as masked)"
        )
    return tensor(~dropped)


@_outside_inference_mode
def from_zero_one(attention_mask: Tensor) -> Mask:
    """From Hugging Face's ``attention_mask``: ``(B, K)`` with 1 (or True) for real keys and 0 for padding.

    The padding may be on either side. The leading dimensions align from the left, as in :func:`padding`.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() < 1:
        raise InputError(
            f"masks.from_zero_one() takes a tensor of 0 and 1 with shape (batch, keys); {_describe_argument(attention_mask)} came"
        )
    host = attention_mask.cpu()
    other = host[(host != 0) & (host != 1)]
    if other.numel():
        raise InputError(
            f"masks.from_zero_one() takes 0 and 1, and found {other[0].item()}; an additive mask goes "
            "through masks.from_additive, document numbers through masks.documents"
        )
    host = host.to(torch.bool, copy=True)
    count = host.sum(-1)
    first = torch.where(count > 0, (host.cumsum(-1) == 0).sum(-1), 0)
    place = torch.arange(host.shape[-1])
    one_run = host == ((place >= first[..., None]) & (place < (first + count)[..., None]))
    if bool(one_run.all()):
        ends = first + count
        shortest, longest = _read_min_max(count)[0], _read_min_max(ends)[1]
        return PaddingMask(
            first, ends - 1, shortest, longest, _read_min_max(first)[1], num_keys=host.shape[-1]
        )
    return KeyMask(host)


# ------------------------------------------------------------------------- reading the arguments


def _read_document_ids(name: str, values: IntTensorLike) -> Tensor:
    """Document numbers, on the host."""
    ids = _read_integers(name, values)
    if ids.dim() == 0:
        what = "query" if "queries" in name else "key"
        raise InputError(f"{name} needs one id for every {what}, shape (N,) or (*leading, N)")
    return ids.cpu()


def _is_contiguous(ids: Tensor) -> bool:
    """Whether every document's tokens stand together: as many runs as there are different ids."""
    if ids.shape[-1] == 0:
        return True
    runs = (ids[..., 1:] != ids[..., :-1]).sum(-1)
    ordered = ids.sort(-1).values
    return bool((runs == (ordered[..., 1:] != ordered[..., :-1]).sum(-1)).all())


def _read_integers(name: str, values: IntTensorLike) -> Tensor:
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name}: whole numbers are expected, {type(values).__name__} came ({error})"
        ) from None
    if numbers.numel() == 0:
        return numbers.long()
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise InputError(f"{name}: whole numbers are expected, {numbers.dtype} came; a 0/1 mask goes through "
                         "masks.from_zero_one")  # fmt: skip
    return numbers.detach().to(torch.long, copy=True)  # the caller may go on writing into theirs


def _read_offset(name: str, offset: IntTensorLike | None) -> Tensor | None:
    return None if offset is None else _read_integers(name, offset)


def _read_min_max(values: Tensor) -> tuple[int, int]:
    """The lowest and the highest, on the host: this is where a mask made from GPU numbers waits, once."""
    if values.numel() == 0:
        return 0, 0
    lowest, highest = torch.stack(torch.aminmax(values)).tolist()
    return int(lowest), int(highest)


def _describe_argument(x: object) -> str:
    """What came, for a message."""
    return f"a tensor of {x.dtype} and shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
