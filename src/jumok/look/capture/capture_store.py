"""Storage of captured calls: one attention call, or several that are parts of one attention."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention, ScoreMod
from jumok.look.capture.merge import AttentionPart, merge_parts
from jumok.look.capture.observer import ObservedCall
from jumok.look.views.row_chunks import iterate_row_chunks

MAX_SHARED_MASKS = 8  # that a model uses at the same time
FINGERPRINT_SIZE = 1 << 14  # number of sampled elements by which a tensor is recognised
INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CaptureStore:
    """Stores tensors without the autograd graph, on the requested device."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}  # the last ones, and their stored versions

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
        """Store a mask; one that several layers share is moved once."""
        if id(mask) not in self._masks:
            recent = list(self._masks.items())[-MAX_SHARED_MASKS:]
            self._masks = dict(recent) | {id(mask): (mask, self.detach_tensor(mask))}
        return self._masks[id(mask)][1]

    def move_score_mod(self, attention: CapturedAttention) -> ScoreMod | None:
        """Return the score mod, whose own tensors stay where they are, for indices on the storage device."""
        score_mod, device = attention.score_mod, attention.query.device
        if score_mod is None or self.device is None or self.device == device:
            return score_mod
        original = score_mod

        def modify_scores(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return original(scores.to(device), b.to(device), h.to(device), q.to(device), k.to(device)).to(scores.device)

        return modify_scores


def _copy_if_overwritten(x: Tensor) -> Tensor:
    """Return ``x``, copied if it is a buffer that the model writes to (a static cache)."""
    return x.detach().clone() if not x.is_inference() and x._version > 0 else x


class MergedCalls:
    """A call, or the calls by which a layer attends to the same keys repeatedly in one run."""

    def __init__(self, attention: CapturedAttention, call: ObservedCall, query_ids: Tensor | None = None) -> None:
        self.first_call, self.sink, self.query_ids = attention, call.sink, query_ids
        self.calls = [attention]
        tensors = (attention.query, attention.key, attention.mask, *call.score_tensors)
        # References to tensors that the model may overwrite.
        self._fingerprints = [(x, _compute_fingerprint(x)) for x in tensors if x is not None]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, _, keys = self.first_call.shape
        return batch, heads, sum(call.shape[2] for call in self.calls), keys

    def append(self, other: MergedCalls) -> None:
        self.calls.append(other.first_call)
        if self.sink is not None and other.sink is not None and self.sink.dim() == 3:
            self.sink = torch.cat([self.sink, other.sink], dim=2)
        self._fingerprints += other._fingerprints
        self.__dict__.pop("_merged_attention", None)

    @property
    def attention(self) -> CapturedAttention:
        for tensor, fingerprint in self._fingerprints:
            if not _fingerprints_match(fingerprint, _compute_fingerprint(tensor)):
                raise InputError(
                    "the model has overwritten tensors that this attention was computed from since it was "
                    "captured (an optimizer step, a reused buffer): read the results before that"
                )
        return self._merged_attention

    @functools.cached_property
    def _merged_attention(self) -> CapturedAttention:
        merged = self.first_call
        if len(self.calls) > 1:
            parts = [AttentionPart.from_attention(call) for call in self.calls]
            merged = merge_parts(parts, self.first_call.key, self.first_call.scale, self.first_call.softcap)
            lses = [call.lse for call in self.calls if call.lse is not None and call.has_only_scores]
            if len(lses) == len(self.calls):
                merged = replace(merged, lse=torch.cat(lses, dim=-1))
        return merged if self.sink is None else add_sink(merged, self.sink)


def is_continuation(previous: CapturedAttention, current: CapturedAttention) -> bool:
    """Return whether ``current`` is more of the same attention: the next step of a loop, or the next chunk.

    The keys are the same tensor, not one with equal numbers; the queries are the next single one, or those
    that follow the previous ones in memory. Other queries are a second attention to these keys.
    """
    if previous.has_only_scores and current.has_only_scores:
        # There are no keys to compare, but steps of a loop look like this.
        return (
            previous.shape == current.shape
            and previous.shape[2] == 1
            and (previous.lse is None) == (current.lse is None)
        )
    has_keys = previous.key.numel() > 0 and previous.key.stride()[2] != 0
    axes = (0, 1, 3)
    has_equal_sizes = [previous.query.shape[axis] for axis in axes] == [current.query.shape[axis] for axis in axes]
    has_equal_scaling = (previous.scale, previous.softcap) == (current.scale, current.softcap)
    if not (has_keys and has_equal_sizes and has_equal_scaling and is_same_tensor(previous.key, current.key)):
        return False
    first, second = previous.query, current.query
    behind = first.data_ptr() + first.shape[2] * first.stride(2) * first.element_size()
    is_next_chunk = second.data_ptr() == behind and first.stride() == second.stride()
    is_single = first.shape[2] == second.shape[2] == 1
    return is_next_chunk or (is_single and not is_same_tensor(first, second))


def is_same_tensor(first: Tensor, second: Tensor) -> bool:
    """Return whether both are the same elements in memory."""
    return (first.data_ptr(), first.shape, first.stride()) == (
        second.data_ptr(),
        second.shape,
        second.stride(),
    )


def add_sink(attention: CapturedAttention, sink: Tensor) -> CapturedAttention:
    """Add one more score, ``(H,)`` or ``(B, H, Q)``, to the softmax of each row. Its weight goes to no key."""
    batch, heads, queries, _ = attention.shape
    lse = attention.new_zeros(batch, heads, queries)
    for batch_index in range(batch):
        # Iterating computes and caches the sum of each row.
        for _ in iterate_row_chunks(attention, batch_index, slice(0, heads), include_masked=True):
            pass
        row_lse = attention.get_lse(batch_index, slice(0, heads), slice(0, queries))
        assert row_lse is not None
        lse[batch_index] = row_lse
    sink = sink.detach().to(lse)
    lse_with_sink = torch.logaddexp(lse, sink if sink.dim() == 3 else sink.reshape(1, -1, 1))
    return replace(attention, lse=lse_with_sink)


def _compute_fingerprint(x: Tensor) -> int | Tensor:
    """Return a value that changes when ``x`` is written to: its version or, without a counter, a sample."""
    if not x.is_inference():
        return x._version
    sample = x.detach()[_sample_positions(x.shape, x.device)] if x.numel() > FINGERPRINT_SIZE else x.detach().clone()
    return sample.view(INTEGER_TYPES[sample.element_size()])  # so that NaN equals itself


def _fingerprints_match(before: int | Tensor, after: int | Tensor) -> bool:
    """Return whether two fingerprints of a tensor are equal."""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return torch.equal(before, after)
    return bool(before == after)


@functools.lru_cache(maxsize=64)
def _sample_positions(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Return positions that are spread over a tensor."""
    positions = (
        torch.arange(FINGERPRINT_SIZE, device=device) * (shape.numel() // FINGERPRINT_SIZE * 2 + 1) % shape.numel()
    )
    return torch.unravel_index(positions, shape)
