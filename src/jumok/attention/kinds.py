"""The kinds of mask, and what each can tell of itself. They are made by :mod:`jumok.attention.masks`.

Those of packed sequences are in :mod:`jumok.attention.packings`.

Most masks are *bands*: query ``i`` may attend to the keys ``first[i] … last[i]``. Padding, causal,
window and packed documents are bands, and so is every ``&`` of them. A band is two whole numbers a
row, so that no path has to build a Q×K tensor for it; and what the paths want to know (rows with
nothing allowed, keys that nobody sees, blocks that are full or empty) follows from those numbers.
``|``, ``~`` and ``tensor`` give masks that need not be bands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from jumok.attention.memo import Memo, capturing, recorded, tracing
from jumok.errors import InputError

T = TypeVar("T")

LOOK_AT_ONCE = 1 << 24  # mask elements held at one time when a mask that is no band is looked through
REMEMBERED = 16  # things that a mask keeps, such as its band for one size; the oldest goes first


class At(NamedTuple):
    """The attention that a mask is used in: ``leading`` dimensions in front of Q queries and K keys."""

    leading: int
    queries: int
    keys: int
    device: torch.device


class Band(NamedTuple):
    """Query ``i`` may attend to the keys ``first[…, i] … last[…, i]``, both included.

    Shapes ``(*leading, Q)``; a dimension in which all is alike may be 1.
    """

    first: Tensor
    last: Tensor


# -------------------------------------------------------------------- what every mask can tell


class Mask:
    """What each query may attend to. Combine with ``&``, ``|`` and ``~``; a mask never changes once made.

    >>> import jumok
    >>> (jumok.masks.causal() & jumok.masks.padding([2, 3])).dense(3, 3).int()
    tensor([[[1, 0, 0],
             [1, 1, 0],
             [1, 1, 0]],
    <BLANKLINE>
            [[1, 0, 0],
             [1, 1, 0],
             [1, 1, 1]]], dtype=torch.int32)
    """

    @property
    def rank(self) -> int:
        """How many leading dimensions the mask has itself."""
        raise NotImplementedError

    def band(self, at: At) -> Band | None:
        """The mask as a band, or None when it is none."""
        return None

    def block(self, at: At, rows: slice) -> Tensor:
        """Some rows, ``(*leading, rows, K)``, boolean; a dimension in which all is alike may be 1."""
        raise NotImplementedError

    def check(self, leading: Sequence[int], at: At) -> None:
        """Raise when the mask does not fit an attention of these sizes. Never waits for the GPU."""

    def parts(self) -> tuple[Mask, ...]:
        """The masks of which this one is the ``&``."""
        return (self,)

    def leaves(self) -> tuple[Mask, ...]:
        """The masks of which this one is combined in any way."""
        return (self,)

    def same_for_all_queries(self) -> bool:
        """Whether every query of a row of the batch sees the same keys."""
        return False

    def no_row_is_empty(self, at: At) -> bool:
        """True when it is known, without looking at numbers on a device, that every query has a key."""
        return False

    def no_key_is_dead(self, at: At) -> bool:
        """True when it is known likewise that every key has a query, or that the others hold zeros."""
        return False

    def sees_itself(self) -> bool:
        """Whether, if it lets query i see anything, it lets it see the key of its own place."""
        return False

    def sees_key_0(self) -> bool:
        """The same of the first key."""
        return False

    def __and__(self, other: Mask) -> Mask:
        return All(self, _checked(other))

    __rand__ = __and__  # what is no mask and stands on the left is refused with the same words

    def __or__(self, other: Mask) -> Mask:
        return Either(self, _checked(other))

    __ror__ = __or__

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise InputError(
            "masks combine with &, | and ~ (not with and, or and not); test for a mask with `is None`"
        )

    def dense(
        self, queries: int, keys: int, device: torch.device | str = "cpu", leading: int | None = None
    ) -> Tensor:
        """The whole mask as a boolean tensor ``(*leading, Q, K)``.

        ``leading``: how many leading dimensions the attention has, where that is more than the mask's own.
        What ``attend`` refuses of queries and keys of these lengths, is refused here as well.

        >>> import jumok
        >>> jumok.masks.causal().dense(2, 3)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        """
        for name, length in (("queries", queries), ("keys", keys)):
            if not isinstance(length, int) or length < 0:
                raise InputError(f"dense({name}={length!r}): a whole number, 0 or more, is expected")
        at = At(max(self.rank, leading or 0), queries, keys, torch.device(device))
        own = [leaf.block(at, slice(0, 0)).shape[:-2] for leaf in self.leaves()]
        try:
            whole = torch.broadcast_shapes(*own)
        except RuntimeError:
            shown = ", ".join(str(tuple(shape)) for shape in own)
            raise InputError(f"the mask's parts have leading dimensions that do not fit: {shown}") from None
        for leaf in self.leaves():
            # A tensor that lies elsewhere comes along.
            leaf.check(whole, at._replace(device=leaf.allowed.device) if isinstance(leaf, Dense) else at)
        part = self.block(at, slice(0, queries))
        return part.expand(*part.shape[:-2], queries, keys)

    def rows_alive(self, at: At) -> Tensor | None:
        """Which queries may attend to anything, ``(*leading, Q)`` up to broadcasting; None: all of them."""
        if self.no_row_is_empty(at):
            return None

        def look() -> Tensor:
            band = self.band(at)
            if band is not None:
                return band.last.clamp(max=at.keys - 1) >= band.first.clamp(min=0)
            return torch.cat([part.any(-1) for part in self._row_by_row(at)], dim=-1)

        return self.remember(("rows", at), look)

    def keys_alive(self, at: At) -> Tensor | None:
        """Which keys some query may attend to, ``(*leading, K)`` up to broadcasting; None: all of them."""
        if self.no_key_is_dead(at):
            return None

        def look() -> Tensor:
            band = self.band(at)
            if band is not None:
                return _covered(band, at.keys)
            return functools.reduce(torch.logical_or, (part.any(-2) for part in self._row_by_row(at)))

        return self.remember(("keys", at), look)

    def _row_by_row(self, at: At) -> Iterator[Tensor]:
        """The whole mask, some rows at a time, so that looking through it never takes Q×K elements."""
        sample = self.block(at, slice(0, 2))
        if sample.shape[-2] < 2:  # all rows are alike, or there is only one
            yield sample
            return
        step = max(1, 2 * LOOK_AT_ONCE // max(1, sample.numel()))
        for start in range(0, at.queries, step):
            yield self.block(at, slice(start, min(start + step, at.queries)))

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was worked out once for a size and a device holds for the mask's whole life."""
        if tracing():
            return make()
        memo: Memo = self.__dict__.setdefault("_memo", Memo(REMEMBERED))
        keep = True
        if capturing() and not memo.known(key):  # what is made now holds numbers only when its graph runs
            recording = recorded()
            key, keep = (recording, key), recording is not None
        with torch.inference_mode(False):  # what is worked out in inference may be needed in training
            return memo.remember(key, make, keep=keep)


# ---------------------------------------------------------------------------- the kinds of mask


class Banded(Mask):
    """A mask that is always a band."""

    def block(self, at: At, rows: slice) -> Tensor:
        band = self.band(at)
        assert band is not None

        def look() -> Tensor:
            first, last = (_rows(x, rows, -1)[..., None] for x in band)
            place = torch.arange(at.keys, device=at.device)
            return (place >= first) & (place <= last)

        return self.remember(("row", at), look) if band.first.shape[-1] == 1 else look()


@dataclass(frozen=True, eq=False)
class Span(Banded):
    """The same keys ``first … last`` for every query of a row of the batch: padding."""

    first: Tensor  # (*leading)
    last: Tensor
    shortest: int  # known on the host: the fewest keys of a row, …
    longest: int  # … one more than the last key of any, …
    latest_first: int  # … and the latest first key
    keys: int | None = None  # how many keys a 0/1 mask was for
    clean: bool = False  # known: the keys that no query sees hold zeros

    @property
    def rank(self) -> int:
        return self.first.dim()

    def same_for_all_queries(self) -> bool:
        return True

    def band(self, at: At) -> Band:
        def make() -> Band:
            ends = (moved(x, at.device)[..., None] for x in (self.first, self.last))
            return Band(*(aligned(x, self.rank, at.leading) for x in ends))

        return self.remember(("band", at), make)

    def check(self, leading: Sequence[int], at: At) -> None:
        if self.keys is not None:
            return _check_zero_one((*self.first.shape, self.keys), leading, at)
        if self.longest > at.keys:
            raise InputError(
                f"the padding mask has a length of {self.longest}, but there are only {at.keys} keys; "
                "give the number of real keys of each row"
            )
        return check_leading("the padding mask's lengths", self.first.shape, leading)

    def no_row_is_empty(self, at: At) -> bool:
        return self.shortest > 0

    def no_key_is_dead(self, at: At) -> bool:
        return self.clean or (self.shortest >= at.keys and at.queries > 0)

    def sees_key_0(self) -> bool:
        return self.latest_first == 0

    def __repr__(self) -> str:
        if self.keys is None:
            return f"padding({(self.last + 1).tolist()})"
        return f"from_zero_one({(*self.first.shape, self.keys)})"


@dataclass(frozen=True, eq=False)
class Keys(Mask):
    """The same keys for every query of a row of the batch, in more than one piece."""

    allowed: Tensor  # (*leading, K), on the host

    @property
    def rank(self) -> int:
        return self.allowed.dim() - 1

    def same_for_all_queries(self) -> bool:
        return True

    def block(self, at: At, rows: slice) -> Tensor:
        on_device = self.remember(at.device, lambda: moved(self.allowed, at.device))
        return aligned(on_device[..., None, :], self.rank, at.leading)

    def check(self, leading: Sequence[int], at: At) -> None:
        _check_zero_one(self.allowed.shape, leading, at)

    def __repr__(self) -> str:
        return f"from_zero_one({tuple(self.allowed.shape)})"


@dataclass(frozen=True, eq=False)
class Window(Banded):
    """Keys near the diagonal. Causal is the window that is open to the left and ends at the diagonal."""

    left: int | None
    right: int | None
    offset: Tensor | None  # where the diagonal starts; None: K − Q

    @property
    def rank(self) -> int:
        return 0 if self.offset is None else self.offset.dim()

    def band(self, at: At) -> Band:
        def make() -> Band:
            here = torch.arange(at.queries, device=at.device)
            if self.offset is None:
                here = here + (at.keys - at.queries)
            else:
                here = here + moved(self.offset, at.device)[..., None]
            here = aligned(here, self.rank, at.leading)
            far = at.queries + at.keys  # no window needs to reach further, and larger numbers would overflow
            first = torch.zeros_like(here) if self.left is None else here - min(self.left, far)
            last = torch.full_like(here, at.keys - 1) if self.right is None else here + min(self.right, far)
            return Band(first, last)

        return self.remember(("band", at), make)

    def check(self, leading: Sequence[int], at: At) -> None:
        if self.offset is not None:
            check_leading("the mask's offset", self.offset.shape, leading)

    @property
    def is_causal(self) -> bool:
        """Plain causal, aligned bottom-right."""
        return self.left is None and self.right == 0 and self.offset is None

    def no_row_is_empty(self, at: At) -> bool:
        return self.offset is None and at.queries <= at.keys

    def no_key_is_dead(self, at: At) -> bool:
        sees_all_before = self.left is None and at.queries > 0
        return self.offset is None and (sees_all_before or at.queries >= at.keys)

    def sees_itself(self) -> bool:
        return True

    def sees_key_0(self) -> bool:
        return self.left is None

    def __repr__(self) -> str:
        offset = "" if self.offset is None else f"offset={self.offset.tolist()}"
        if self.left is None and self.right == 0:
            return f"causal({offset})"
        return f"window({self.left}, {self.right}{', ' + offset if offset else ''})"


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean tensor, aligned from the right as tensors broadcast."""

    allowed: Tensor  # (…, Q, K)

    @property
    def rank(self) -> int:
        return self.allowed.dim() - 2

    def block(self, at: At, rows: slice) -> Tensor:
        part = _rows(self.allowed, rows, -2).to(at.device)
        return part.reshape(*[1] * (at.leading - self.rank), *part.shape)

    def check(self, leading: Sequence[int], at: At) -> None:
        if self.allowed.device != at.device:
            raise InputError(
                f"the mask tensor is on {self.allowed.device}, the query on {at.device}; "
                "move the mask with .to()"
            )
        check_broadcast("the mask tensor", self.allowed.shape, (*leading, at.queries, at.keys))

    def __repr__(self) -> str:
        return f"tensor({tuple(self.allowed.shape)})"


@dataclass(frozen=True, eq=False)
class Ready(Mask):
    """A tensor as SDPA adds it to scores, 0 or −inf, whose maker knows all that would have to be looked for.

    Every query has a key, and the keys that none sees hold zeros. So a call takes it as it is, and computes
    nothing. Aligned from the right.
    """

    added: Tensor  # (…, Q, K), in the type of the query

    @property
    def rank(self) -> int:
        return self.added.dim() - 2

    def block(self, at: At, rows: slice) -> Tensor:
        return self.numbers(at, rows) == 0

    def numbers(self, at: At, rows: slice) -> Tensor:
        """As ``block``, 0 for True and −inf for False."""
        part = _rows(self.added, rows, -2)
        return part.reshape(*[1] * (at.leading - self.rank), *part.shape)

    def check(self, leading: Sequence[int], at: At) -> None:
        check_broadcast("the mask tensor", self.added.shape, (*leading, at.queries, at.keys))

    def no_row_is_empty(self, at: At) -> bool:
        return True

    def no_key_is_dead(self, at: At) -> bool:
        return True

    def __repr__(self) -> str:
        return f"ready({tuple(self.added.shape)})"


@dataclass(frozen=True, eq=False)
class _Pair(Mask):
    a: Mask
    b: Mask

    @property
    def rank(self) -> int:
        return max(self.a.rank, self.b.rank)

    def leaves(self) -> tuple[Mask, ...]:
        return (*self.a.leaves(), *self.b.leaves())

    def same_for_all_queries(self) -> bool:
        return self.a.same_for_all_queries() and self.b.same_for_all_queries()

    def check(self, leading: Sequence[int], at: At) -> None:
        self.a.check(leading, at)
        self.b.check(leading, at)


class All(_Pair):
    """``a & b``. Two bands meet in a band."""

    def parts(self) -> tuple[Mask, ...]:
        return (*self.a.parts(), *self.b.parts())

    def band(self, at: At) -> Band | None:
        def make() -> Band | None:
            a, b = self.a.band(at), self.b.band(at)
            if a is None or b is None:
                return None
            return Band(torch.maximum(a.first, b.first), torch.minimum(a.last, b.last))

        return self.remember(("band", at), make)

    def block(self, at: At, rows: slice) -> Tensor:
        return self.a.block(at, rows) & self.b.block(at, rows)

    def no_row_is_empty(self, at: At) -> bool:
        # Known when every part lets query i see the key of its own place (all bottom-right aligned), or
        # when every part lets it see key 0.
        parts = self.parts()
        each = all(part.no_row_is_empty(at) for part in parts)
        diagonal = all(part.sees_itself() for part in parts)
        return each and (diagonal or all(part.sees_key_0() for part in parts))

    def no_key_is_dead(self, at: At) -> bool:
        parts = self.parts()
        diagonal = all(part.sees_itself() for part in parts)
        return diagonal and at.queries == at.keys and all(part.no_key_is_dead(at) for part in parts)

    def __repr__(self) -> str:
        return f"{self.a!r} & {self.b!r}"


class Either(_Pair):
    """``a | b``."""

    def block(self, at: At, rows: slice) -> Tensor:
        return self.a.block(at, rows) | self.b.block(at, rows)

    def no_row_is_empty(self, at: At) -> bool:
        return self.a.no_row_is_empty(at) or self.b.no_row_is_empty(at)

    def no_key_is_dead(self, at: At) -> bool:
        return self.a.no_key_is_dead(at) or self.b.no_key_is_dead(at)

    def __repr__(self) -> str:
        return f"({self.a!r} | {self.b!r})"


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """``~a``."""

    a: Mask

    @property
    def rank(self) -> int:
        return self.a.rank

    def leaves(self) -> tuple[Mask, ...]:
        return self.a.leaves()

    def same_for_all_queries(self) -> bool:
        return self.a.same_for_all_queries()

    def check(self, leading: Sequence[int], at: At) -> None:
        self.a.check(leading, at)

    def block(self, at: At, rows: slice) -> Tensor:
        return ~self.a.block(at, rows)

    def __repr__(self) -> str:
        return f"~({self.a!r})"


# ------------------------------------------------------------------------------------ small tools


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device. CUDA has read them when the call returns, so there is no wait."""
    return x.to(device, non_blocking=device.type == "cuda")


def _rows(x: Tensor, rows: slice, dim: int) -> Tensor:
    """Some rows of ``x``, or its only one where all rows are alike."""
    if x.shape[dim] == 1:
        return x
    return x[..., rows] if dim == -1 else x[..., rows, :]


def aligned(x: Tensor, rank: int, leading: int) -> Tensor:
    """Put dimensions of 1 behind the mask's own leading dimensions, so that those stand leftmost."""
    return x.reshape(*x.shape[:rank], *[1] * (leading - rank), *x.shape[rank:])


def _covered(band: Band, keys: int) -> Tensor:
    """Which keys lie in some row's band: +1 where a band begins, −1 behind its end, summed along the keys."""
    first, last = torch.broadcast_tensors(band.first.clamp(min=0), band.last.clamp(max=keys - 1))
    some = (first <= last).int()
    edges = torch.zeros(*first.shape[:-1], keys + 1, dtype=torch.int32, device=first.device)
    edges.scatter_add_(-1, first.clamp(max=keys), some)
    edges.scatter_add_(-1, (last + 1).clamp(min=0), -some)
    return edges.cumsum(-1)[..., :keys] > 0


def _checked(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    raise InputError(
        f"a mask combines with another mask, not with {type(other).__name__}; "
        "wrap a boolean tensor (True = may attend) with masks.tensor(t)"
    )


def _fits(have: Sequence[int], want: Sequence[int]) -> bool:
    """Whether the dimensions that are there broadcast to those that are wanted, from the left."""
    return len(have) <= len(want) and all(h in (1, w) for h, w in zip(have, want, strict=False))


def check_leading(name: str, have: Sequence[int], leading: Sequence[int]) -> None:
    """Raise unless a mask's own leading dimensions fit those of the query."""
    if not _fits(have, leading):
        raise InputError(
            f"{name}: shape {tuple(have)} does not fit the leading dimensions {tuple(leading)} of the query; "
            "they align from the left, so one number a batch row has shape (batch,)"
        )


def _check_zero_one(have: Sequence[int], leading: Sequence[int], at: At) -> None:
    if have[-1] != at.keys:
        raise InputError(
            f"the 0/1 mask has shape {tuple(have)}, but there are {at.keys} keys; its last dimension is one "
            "number for every key, those of a cache included"
        )
    if not _fits(have[:-1], leading):
        raise InputError(
            f"the 0/1 mask has shape {tuple(have)}, but the leading dimensions are {tuple(leading)}; "
            "give it as (batch, keys), without dimensions of 1 for heads or queries"
        )


def check_broadcast(name: str, have: Sequence[int], want: Sequence[int]) -> None:
    """Raise unless a tensor of shape ``have`` broadcasts to the scores' shape ``want``."""
    if not _fits(have[::-1], want[::-1]):
        raise InputError(
            f"{name} has shape {tuple(have)}, but the scores have {tuple(want)}, to which it must broadcast "
            "from the right: (batch, keys) is t[:, None, None] for scores (batch, heads, queries, keys); a "
            "0/1 mask of shape (batch, keys) goes through masks.from_zero_one"
        )
