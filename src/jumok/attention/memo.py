"""What was worked out once and holds for an object's whole life, kept with the object."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Memo:
    """Results by key; the oldest goes first. Copies and pickles empty, for all of it can be made again."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._held: dict[Hashable, Any] = {}

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gives, from the first time on."""
        found = self._held.get(key, self)
        if found is not self:
            return found  # type: ignore[no-any-return]
        made = make()
        while len(self._held) >= self.keep:
            self._held.pop(next(iter(self._held), None), None)
        self._held[key] = made
        return made

    def clear(self) -> None:
        self._held.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, (self.keep,)


def may_keep() -> bool:
    """Whether a tensor made now is one that can be used later: not traced, not fake, not of a CUDA graph."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
