"""What was worked out once and holds for an object's whole life, kept with the object."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class BoundedCache:
    """Results by key; the oldest goes first. Copies and pickles empty, for all of it can be made again."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._entries: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def contains(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable) -> Any:
        """The stored result, or None."""
        return self._entries.get(key)

    def replace(self, key: Hashable, result: Any) -> None:
        """Store another result under a key that may be known."""
        with self._lock:
            self._entries.pop(key, None)
        self.get_or_compute(key, lambda: result)

    def get_or_compute(self, key: Hashable, compute: Callable[[], T], *, store: bool = True) -> T:
        """What ``compute`` gives, from the first time on; what is made now is kept if ``store``."""
        found = self._entries.get(key, self)
        if found is not self:
            return found  # type: ignore[no-any-return]
        made = compute()
        if store:
            with self._lock:
                while len(self._entries) >= self.max_entries:
                    del self._entries[next(iter(self._entries))]
                self._entries[key] = made
        return made

    def clear(self) -> None:
        self._entries.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundedCache, (self.max_entries,)


def is_tracing() -> bool:
    """Whether what is made now is a part of some other program, or fake: then it is of no use later."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_cuda_graph_scope: object | None = None


@contextlib.contextmanager
def cuda_graph_scope() -> Iterator[None]:
    """Around the capture of one CUDA graph: what is remembered within it serves the rest of that graph."""
    global _cuda_graph_scope
    before, _cuda_graph_scope = _cuda_graph_scope, object()
    try:
        yield
    finally:
        _cuda_graph_scope = before


def get_cuda_graph_scope() -> object | None:
    """The recording that is going on; None: there is none, or one that nobody told us of."""
    return _cuda_graph_scope


def is_capturing_cuda_graph() -> bool:
    """Whether a CUDA graph is being captured: what is made now holds nothing until the graph runs."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
