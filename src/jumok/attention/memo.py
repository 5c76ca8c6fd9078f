"""What was worked out once and holds for an object's whole life, kept with the object."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Memo:
    """Results by key; the oldest goes first. Copies and pickles empty, for all of it can be made again."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def known(self, key: Hashable) -> bool:
        return key in self._held

    def remember(self, key: Hashable, make: Callable[[], T], *, keep: bool = True) -> T:
        """What ``make`` gives, from the first time on; what is made now is kept if ``keep``."""
        found = self._held.get(key, self)
        if found is not self:
            return found  # type: ignore[no-any-return]
        made = make()
        if keep:
            with self._lock:
                while len(self._held) >= self.most:
                    del self._held[next(iter(self._held))]
                self._held[key] = made
        return made

    def clear(self) -> None:
        self._held.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, (self.most,)


def tracing() -> bool:
    """Whether what is made now is a part of some other program, or fake: then it is of no use later."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_recording: object | None = None


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Around the capture of one CUDA graph: what is remembered within it serves the rest of that graph."""
    global _recording
    before, _recording = _recording, object()
    try:
        yield
    finally:
        _recording = before


def recorded() -> object | None:
    """The recording that is going on; None: there is none, or one that nobody told us of."""
    return _recording


def capturing() -> bool:
    """Whether a CUDA graph is being captured: what is made now holds nothing until the graph runs."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
