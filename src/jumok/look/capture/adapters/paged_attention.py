"""Packed sequences and continuous batching (``generate_batch``) of Hugging Face models.

A forward of continuous batching has the new tokens of several requests in one row, and their keys in pages of a
cache. Each request becomes one batch entry. The forwards run in a thread of their own, which is observed, too.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.look.capture.call_site import CallSite, UnsupportedCallError, set_variable, suppress_reports
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.observer import OBSERVERS, ObservedCall
from jumok.look.capture.packing import PackedSequences, SequenceMask, to_lengths
from jumok.look.capture.patching import AttributePatch, Function

MODULE = "transformers.generation.continuous_batching"
PACKED_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")  # for several sequences in one row


class _CacheUpdate(NamedTuple):
    """What a paged cache returned to an attention."""

    key: Tensor  # (1, G, tokens, D), those of one request after another
    value: Tensor
    cu_seqlens: Tensor  # (requests + 1,)


_CACHE_UPDATES: ContextVar[list[_CacheUpdate] | None] = ContextVar("jumok.look.cache_updates", default=None)


def list_patches(model: nn.Module) -> Iterator[AttributePatch]:
    """List the patches of the paged cache, and of the start of the thread that generates."""
    cache = getattr(sys.modules.get(f"{MODULE}.cache"), "PagedAttentionCache", None)
    if cache is not None:
        yield AttributePatch(cache, "update", _wrap_cache_update)
    manager = getattr(sys.modules.get(f"{MODULE}.continuous_api"), "ContinuousBatchingManager", None)
    if manager is not None:
        yield AttributePatch(manager, "start", _wrap_start)


def _wrap_start(start: Function) -> Function:
    def watched_start(self: Any) -> Any:
        if not any(id(self.model) in observer.module_stack.names for observer in OBSERVERS.get()):
            return start(self)
        # The thread begins without observers, which are variables of a context.
        self._run_generation_loop = functools.partial(contextvars.copy_context().run, self._run_generation_loop)
        try:
            return start(self)
        finally:
            del self._run_generation_loop

    return watched_start


def _wrap_cache_update(update: Function) -> Function:
    def watched_update(self: Any, *args: Any, **options: Any) -> Any:
        key, value = update(self, *args, **options)
        updates = _CACHE_UPDATES.get()
        if updates is not None:
            arguments = options["kwargs"] if "kwargs" in options else args[-1]  # which it has updated
            updates.append(_CacheUpdate(key, value, arguments["cu_seq_lens_k"]))
        return key, value

    return watched_update


def is_packed(query: Tensor, mask: Any, options: dict[str, Any]) -> bool:
    """Return whether the arguments of an implementation of attention have several sequences in one row."""
    if options.get("cache") is not None or any(options.get(name) is not None for name in PACKED_ARGUMENTS):
        return True
    positions = options.get("position_ids")
    if mask is not None or not isinstance(positions, Tensor) or positions.dim() != 2 or len(query) != 1:
        return False
    return bool((positions.diff() != 1).any())  # as transformers decides, for FlashAttention


def run_paged(site: CallSite, query: Tensor, mask: Any, scale: float, options: dict[str, Any], run: Function) -> Any:
    """Run an implementation that takes a mask of queries ``(1, H, tokens, D)`` and of keys in a paged cache."""
    updates: list[_CacheUpdate] = []
    with set_variable(_CACHE_UPDATES, updates), suppress_reports(entirely=True):
        result = run()

    def read_call() -> ObservedCall:
        if len(updates) != 1:
            raise UnsupportedCallError(f"its paged cache was updated {len(updates)} times in one attention")
        cu_queries, cu_keys = to_lengths(options["cu_seq_lens_q"]), to_lengths(updates[0].cu_seqlens)
        is_request = cu_queries.diff() > 0  # the others pad the batch
        packing, keys = (PackedSequences(cu[:-1][is_request], cu.diff()[is_request]) for cu in (cu_queries, cu_keys))
        request_query, key, value = (
            sequences.unpack(x[0].transpose(0, 1)).transpose(1, 2)
            for sequences, x in ((packing, query), (keys, updates[0].key), (keys, updates[0].value))
        )
        if mask is None:
            attention = SequenceMask(packing.lengths, keys.lengths, right=0).apply_to(request_query, key, scale)
        else:
            attention = CapturedAttention(request_query, key, scale, mask=_unpack_mask(mask, packing, keys))
        return ObservedCall(attention, value, "self", sink=getattr(site.owner, "sinks", None), packing=packing)

    call = site.read_call(read_call)
    if call is None:
        return result
    result = site.modify_result(call, result)
    site.report(call)
    return result


def _unpack_mask(mask: Tensor, queries: PackedSequences, keys: PackedSequences) -> Tensor:
    """Return the blocks of a mask ``(1, 1, tokens, keys)`` as ``(N, 1, Q, K)``; padding is blocked."""
    blocked = False if mask.dtype == torch.bool else -torch.inf
    spans = zip(*(x.tolist() for x in (queries.starts, queries.lengths, keys.starts, keys.lengths)), strict=True)
    blocks = [
        F.pad(
            mask[0, :, row : row + num_rows, column : column + num_columns],
            (0, keys.max_length - num_columns, 0, queries.max_length - num_rows),
            value=blocked,
        )
        for row, num_rows, column, num_columns in spans
    ]
    return torch.stack(blocks)
