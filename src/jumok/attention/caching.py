"""Caches of values that are derived from immutable objects."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class BoundedCache:
    """A thread-safe cache that evicts its oldest entry when it is full.

    A copy or a pickle of a cache is empty: every entry can be computed again.
    """

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._entries: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable) -> Any:
        """Return the stored result, or None."""
        return self._entries.get(key)

    def replace(self, key: Hashable, result: Any) -> None:
        """Store a result, whether or not there is one under this key."""
        with self._lock:
            self._entries.pop(key, None)
            while len(self._entries) >= self.max_entries:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = result

    def get_or_compute(self, key: Hashable, compute: Callable[[], T], *, store: bool = True) -> T:
        """Return the stored result, or else call ``compute`` and, if ``store``, keep its result."""
        result = self._entries.get(key, self)
        if result is not self:
            return result  # type: ignore[no-any-return]
        result = compute()
        if store:
            self.replace(key, result)
        return result

    def clear(self) -> None:
        self._entries.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundedCache, (self.max_entries,)


def get_tensor_version(x: Tensor) -> int:
    """Return how often ``x`` has been written to, or -1 where PyTorch does not count."""
    return -1 if torch.compiler.is_compiling() or x.is_inference() else x._version


def is_tracing() -> bool:
    """Return whether tensors computed now are traced or fake, and so must not be cached."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_cuda_graph_scope: object | None = None


@contextlib.contextmanager
def cuda_graph_scope() -> Iterator[None]:
    """Mark the capture of one CUDA graph. Values cached inside it are reused within that graph only."""
    global _cuda_graph_scope
    previous, _cuda_graph_scope = _cuda_graph_scope, object()
    try:
        yield
    finally:
        _cuda_graph_scope = previous


def get_cuda_graph_scope() -> object | None:
    """Return the identity of the current :func:`cuda_graph_scope`, or None outside of any."""
    return _cuda_graph_scope


def is_capturing_cuda_graph() -> bool:
    """Return whether a CUDA graph is being captured. Tensors made now hold nothing until the graph runs."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
