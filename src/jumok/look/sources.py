"""Where an entry's numbers come from: one call of attention, or several that are one."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.adapters.site import Found
from jumok.look.adapters.softmax import as_given
from jumok.look.kept import Change, Kept
from jumok.look.stitch import Part, stitched
from jumok.look.strips import strips

MASKS = 8  # that a model uses at a time
SAMPLE = 1 << 14  # numbers of a tensor by which it is known again
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Keeper:
    """How tensors are kept: without autograd's graph, and on the device that they are wanted on."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}  # the last ones, and what became of them

    def kept(self, kept: Kept) -> Kept:
        return replace(
            kept,
            query=self.tensor(_unwritten(kept.query)),
            key=self.tensor(_unwritten(kept.key)),
            mask=None if kept.mask is None else self.mask(kept.mask),
            lse=None if kept.lse is None else self.tensor(kept.lse),
            change=self.change(kept),
        )

    def tensor(self, x: Tensor) -> Tensor:
        return x.detach() if self.device is None else x.detach().to(self.device)

    def mask(self, mask: Tensor) -> Tensor:
        """A mask that several layers share is moved once."""
        if id(mask) not in self._masks:
            recent = list(self._masks.items())[-MASKS:]
            self._masks = dict(recent) | {id(mask): (mask, self.tensor(mask))}
        return self._masks[id(mask)][1]

    def change(self, kept: Kept) -> Change | None:
        """The rule, whose own tensors stay where they are, for places wherever they will be."""
        change, home = kept.change, kept.query.device
        if change is None or self.device is None or self.device == home:
            return change
        rule = change

        def elsewhere(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return rule(scores.to(home), b.to(home), h.to(home), q.to(home), k.to(home)).to(scores.device)

        return elsewhere


def _unwritten(x: Tensor) -> Tensor:
    """``x``, copied if it is a buffer that the model has written into, and may again (a static cache)."""
    return x.detach().clone() if not x.is_inference() and x._version > 0 else x


class Pieces:
    """A call, or the calls by which a layer attends to the same keys again and again in one run."""

    row_ids: Tensor | None = None

    def __init__(self, first: Kept, found: Found) -> None:
        self.first, self.sink = first, found.sink
        self.all = [first]
        held = (first.query, first.key, first.mask, *found.uses)
        self._used = [(x, _mark(x)) for x in held if x is not None]  # kept by reference; as they were

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, _, keys = self.first.shape
        return batch, heads, sum(kept.shape[2] for kept in self.all), keys

    def append(self, other: Pieces) -> None:
        self.all.append(other.first)
        self._used += other._used
        self.__dict__.pop("_joined", None)

    @property
    def kept(self) -> Kept:
        for tensor, mark in self._used:
            if not _is(mark, _mark(tensor)):
                raise InputError(
                    "the model has written into tensors that this attention was computed from, since it was "
                    "seen (an optimizer's step, a reused buffer): ask before that happens"
                )
        return self._joined

    @functools.cached_property
    def _joined(self) -> Kept:
        joined = self.first
        if len(self.all) > 1:
            parts = [Part.of(kept) for kept in self.all]
            joined = stitched(parts, self.first.key, self.first.scale, self.first.softcap)
            sums = [kept.lse for kept in self.all if kept.lse is not None and kept.score is as_given]
            if len(sums) == len(self.all):
                joined = replace(joined, lse=torch.cat(sums, dim=-1))
        return joined if self.sink is None else with_sink(joined, self.sink)


def goes_on(one: Kept, other: Kept) -> bool:
    """Whether the other one is more of the same attention: the next step of a loop, the next of some chunks.

    The keys are the same tensor, not one with equal numbers; the queries are the next single one, or those
    behind the first ones in memory. Others are a second attention to these keys.
    """
    if one.score is as_given and other.score is as_given:
        # There are no keys to tell by, but steps of a loop look like this.
        return one.shape == other.shape and one.shape[2] == 1 and (one.lse is None) == (other.lse is None)
    is_real = one.key.numel() > 0 and one.key.stride()[2] != 0
    sizes = (0, 1, 3)
    alike = [one.query.shape[axis] for axis in sizes] == [other.query.shape[axis] for axis in sizes]
    same_rule = (one.scale, one.softcap) == (other.scale, other.softcap)
    if not (is_real and alike and same_rule and same_tensor(one.key, other.key)):
        return False
    first, then = one.query, other.query
    behind = first.data_ptr() + first.shape[2] * first.stride(2) * first.element_size()
    next_chunk = then.data_ptr() == behind and first.stride() == then.stride()
    single = first.shape[2] == then.shape[2] == 1
    return next_chunk or (single and not same_tensor(first, then))


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same numbers in memory."""
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def with_sink(kept: Kept, sink: Tensor) -> Kept:
    """The attention with one more score in each row's softmax, ``(H,)``, whose weight goes nowhere."""
    batch, heads, queries, _ = kept.shape
    lse = kept.zeros(batch, heads, queries)
    for entry in range(batch):
        for _ in strips(kept, entry, slice(0, heads), wide=True):  # which learns what each row sums up to
            pass
        known = kept.lse_of(entry, slice(0, heads), slice(0, queries))
        assert known is not None
        lse[entry] = known
    total = torch.logaddexp(lse, sink.detach().to(lse).reshape(1, -1, 1))
    return replace(kept, lse=total)


def _mark(x: Tensor) -> int | Tensor:
    """What changes when ``x`` is written to: how often it was; of a tensor that does not count, a sample."""
    if not x.is_inference():
        return x._version
    sample = x.detach()[_sampled(x.shape, x.device)] if x.numel() > SAMPLE else x.detach().clone()
    return sample.view(BITS[sample.element_size()])  # a NaN equals itself then


def _is(one: int | Tensor, other: int | Tensor) -> bool:
    """Whether two marks of a tensor are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


@functools.lru_cache(maxsize=64)
def _sampled(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Places all over a tensor."""
    places = torch.arange(SAMPLE, device=device) * (shape.numel() // SAMPLE * 2 + 1) % shape.numel()
    return torch.unravel_index(places, shape)
