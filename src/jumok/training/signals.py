"""Ctrl-C and SIGTERM: the step is finished, the state saved, and only then the process ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from jumok.errors import JumokError

__all__ = ["Interrupted", "Signals"]


class Interrupted(JumokError):
    """Training was asked to stop, and has saved its state. ``status`` is what a command should exit with."""

    def __init__(self, number: int, step: int) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(
            f"stopped by {name} after step {step}, and saved: the same command goes on from there"
        )
        self.signal = number
        self.status = 128 + number  # 130 and 143, as shells say it
        self.step = step


class Now(KeyboardInterrupt):
    """Raised by the signal itself where there is no need to wait. No ``except Exception`` stops it."""


class Signals:
    """While entered, the first SIGINT or SIGTERM is only noted; a second one does what it always did.

    Signals belong to the main thread: in any other, nothing is changed and nothing noted.
    """

    def __init__(self) -> None:
        self.caught = 0  # the signal's number
        self._at_once = False
        self._before: dict[int, Any] = {}

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """In here a signal raises :class:`Now`: for work that can be dropped and done again."""
        self._at_once = True
        try:
            if self.caught:
                raise Now
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            self._restore()
            signal.raise_signal(number)
        self.caught = number
        if self._at_once:
            raise Now

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                # None is a handler that Python did not set, and cannot set again.
                number: signal.signal(number, self._note) or signal.SIG_DFL
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
