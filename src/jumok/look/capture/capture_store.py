"""Where an entry's numbers come from: one call of attention, or several that are one."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.adapters.call_site import ObservedCall
from jumok.look.capture.adapters.softmax import return_scores
from jumok.look.capture.captured_attention import CapturedAttention, ScoreMod
from jumok.look.capture.merge import AttentionPart, merge_parts
from jumok.look.views.row_chunks import iterate_row_chunks

MAX_SHARED_MASKS = 8  # that a model uses at a time
FINGERPRINT_SIZE = 1 << 14  # numbers of a tensor by which it is known again
INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CaptureStore:
    """How tensors are kept: without autograd's graph, and on the device that they are wanted on."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}  # the last ones, and what became of them

    def detach_attention(self, attention: CapturedAttention) -> CapturedAttention:
        return replace(
            attention,
            query=self.detach_tensor(_copy_if_overwritten(attention.query)),
            key=self.detach_tensor(_copy_if_overwritten(attention.key)),
            mask=None if attention.mask is None else self.detach_mask(attention.mask),
            lse=None if attention.lse is None else self.detach_tensor(attention.lse),
            score_mod=self.move_score_mod(attention),
        )

    def detach_tensor(self, x: Tensor) -> Tensor:
        return x.detach() if self.device is None else x.detach().to(self.device)

    def detach_mask(self, mask: Tensor) -> Tensor:
        """A mask that several layers share is moved once."""
        if id(mask) not in self._masks:
            recent = list(self._masks.items())[-MAX_SHARED_MASKS:]
            self._masks = dict(recent) | {id(mask): (mask, self.detach_tensor(mask))}
        return self._masks[id(mask)][1]

    def move_score_mod(self, attention: CapturedAttention) -> ScoreMod | None:
        """The rule, whose own tensors stay where they are, for places wherever they will be."""
        change, home = attention.score_mod, attention.query.device
        if change is None or self.device is None or self.device == home:
            return change
        rule = change

        def elsewhere(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return rule(scores.to(home), b.to(home), h.to(home), q.to(home), k.to(home)).to(scores.device)

        return elsewhere


def _copy_if_overwritten(x: Tensor) -> Tensor:
    """``x``, copied if it is a buffer that the model has written into, and may again (a static cache)."""
    return x.detach().clone() if not x.is_inference() and x._version > 0 else x


class MergedCalls:
    """A call, or the calls by which a layer attends to the same keys again and again in one run."""

    query_ids: Tensor | None = None

    def __init__(self, attention: CapturedAttention, call: ObservedCall) -> None:
        self.first_call, self.sink = attention, call.sink
        self.calls = [attention]
        held = (attention.query, attention.key, attention.mask, *call.score_tensors)
        self._fingerprints = [
            (x, _compute_fingerprint(x)) for x in held if x is not None
        ]  # kept by reference; as they were

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, _, keys = self.first_call.shape
        return batch, heads, sum(kept.shape[2] for kept in self.calls), keys

    def append(self, other: MergedCalls) -> None:
        self.calls.append(other.first_call)
        self._fingerprints += other._fingerprints
        self.__dict__.pop("_joined", None)

    @property
    def attention(self) -> CapturedAttention:
        for tensor, mark in self._fingerprints:
            if not _fingerprints_match(mark, _compute_fingerprint(tensor)):
                raise InputError(
                    "the model has written into tensors that this attention was computed from, since it was "
                    "seen (an optimizer's step, a reused buffer): ask before that happens"
                )
        return self._merged_attention

    @functools.cached_property
    def _merged_attention(self) -> CapturedAttention:
        joined = self.first_call
        if len(self.calls) > 1:
            parts = [AttentionPart.from_attention(kept) for kept in self.calls]
            joined = merge_parts(parts, self.first_call.key, self.first_call.scale, self.first_call.softcap)
            sums = [
                kept.lse
                for kept in self.calls
                if kept.lse is not None and kept.score_function is return_scores
            ]
            if len(sums) == len(self.calls):
                joined = replace(joined, lse=torch.cat(sums, dim=-1))
        return joined if self.sink is None else add_sink(joined, self.sink)


def is_continuation(previous: CapturedAttention, current: CapturedAttention) -> bool:
    """Whether the other one is more of the same attention: the next step of a loop, the next of some chunks.

    The keys are the same tensor, not one with equal numbers; the queries are the next single one, or those
    behind the first ones in memory. Others are a second attention to these keys.
    """
    if previous.score_function is return_scores and current.score_function is return_scores:
        # There are no keys to tell by, but steps of a loop look like this.
        return (
            previous.shape == current.shape
            and previous.shape[2] == 1
            and (previous.lse is None) == (current.lse is None)
        )
    is_real = previous.key.numel() > 0 and previous.key.stride()[2] != 0
    sizes = (0, 1, 3)
    alike = [previous.query.shape[axis] for axis in sizes] == [current.query.shape[axis] for axis in sizes]
    same_rule = (previous.scale, previous.softcap) == (current.scale, current.softcap)
    if not (is_real and alike and same_rule and is_same_tensor(previous.key, current.key)):
        return False
    first, then = previous.query, current.query
    behind = first.data_ptr() + first.shape[2] * first.stride(2) * first.element_size()
    next_chunk = then.data_ptr() == behind and first.stride() == then.stride()
    single = first.shape[2] == then.shape[2] == 1
    return next_chunk or (single and not is_same_tensor(first, then))


def is_same_tensor(first: Tensor, second: Tensor) -> bool:
    """Whether both are the same numbers in memory."""
    return (first.data_ptr(), first.shape, first.stride()) == (
        second.data_ptr(),
        second.shape,
        second.stride(),
    )


def add_sink(attention: CapturedAttention, sink: Tensor) -> CapturedAttention:
    """The attention with one more score in each row's softmax, ``(H,)``, whose weight goes nowhere."""
    batch, heads, queries, _ = attention.shape
    lse = attention.new_zeros(batch, heads, queries)
    for entry in range(batch):
        for _ in iterate_row_chunks(
            attention, entry, slice(0, heads), include_masked=True
        ):  # which learns what each row sums up to
            pass
        known = attention.get_lse(entry, slice(0, heads), slice(0, queries))
        assert known is not None
        lse[entry] = known
    total = torch.logaddexp(lse, sink.detach().to(lse).reshape(1, -1, 1))
    return replace(attention, lse=total)


def _compute_fingerprint(x: Tensor) -> int | Tensor:
    """What changes when ``x`` is written to: how often it was; of a tensor that does not count, a sample."""
    if not x.is_inference():
        return x._version
    sample = (
        x.detach()[_sample_positions(x.shape, x.device)]
        if x.numel() > FINGERPRINT_SIZE
        else x.detach().clone()
    )
    return sample.view(INTEGER_TYPES[sample.element_size()])  # a NaN equals itself then


def _fingerprints_match(before: int | Tensor, after: int | Tensor) -> bool:
    """Whether two marks of a tensor are the same."""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return torch.equal(before, after)
    return bool(before == after)


@functools.lru_cache(maxsize=64)
def _sample_positions(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Places all over a tensor."""
    places = (
        torch.arange(FINGERPRINT_SIZE, device=device)
        * (shape.numel() // FINGERPRINT_SIZE * 2 + 1)
        % shape.numel()
    )
    return torch.unravel_index(places, shape)
