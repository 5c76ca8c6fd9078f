"""Ctrl-C and SIGTERM: the step is finished, the state saved, and only then the process ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from jumok.errors import JumokError

__all__ = ["SignalHandler", "TrainingInterrupted"]


class TrainingInterrupted(JumokError):
    """Training was asked to stop, and has saved its state. ``exit_status`` is what a command should exit with."""

    def __init__(self, signal_number: int, step: int) -> None:
        name = "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name
        super().__init__(
            f"stopped by {name} after step {step}, and saved: the same command goes on from there"
        )
        self.signal_number = signal_number
        self.exit_status = 128 + signal_number  # 130 and 143, as shells say it
        self.step = step


class ImmediateInterrupt(KeyboardInterrupt):
    """Raised by the signal itself where there is no need to wait. No ``except Exception`` stops it."""


class SignalHandler:
    """While entered, the first SIGINT or SIGTERM is only noted; a second one does what it always did.

    Signals belong to the main thread: in any other, nothing is changed and nothing noted.
    """

    def __init__(self) -> None:
        self.caught_signal = 0  # the signal's number
        self._raises_immediately = False
        self._previous_handlers: dict[int, Any] = {}

    @contextlib.contextmanager
    def raise_immediately(self) -> Iterator[None]:
        """In here a signal raises :class:`ImmediateInterrupt`: for work that can be dropped and done again."""
        self._raises_immediately = True
        try:
            if self.caught_signal:
                raise ImmediateInterrupt
            yield
        finally:
            self._raises_immediately = False

    def _handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if self.caught_signal:
            self._restore_handlers()
            signal.raise_signal(signal_number)
        self.caught_signal = signal_number
        if self._raises_immediately:
            raise ImmediateInterrupt

    def _restore_handlers(self) -> None:
        while self._previous_handlers:
            signal.signal(*self._previous_handlers.popitem())

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                # None is a handler that Python did not set, and cannot set again.
                number: signal.signal(number, self._handle_signal) or signal.SIG_DFL
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore_handlers()
