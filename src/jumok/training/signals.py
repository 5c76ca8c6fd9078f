"""Ctrl-C and SIGTERM: training finishes the step, saves a checkpoint and then stops."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from jumok.errors import JumokError


class TrainingInterrupted(JumokError):
    """Training was interrupted and has saved a checkpoint. ``exit_status`` is for the command."""

    def __init__(self, signal_number: int, step: int) -> None:
        name = "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name
        super().__init__(f"stopped by {name} after step {step}; a checkpoint is saved, and the same command resumes")
        self.signal_number = signal_number
        self.exit_status = 128 + signal_number  # 130 and 143, the convention of shells
        self.step = step


class ImmediateInterrupt(KeyboardInterrupt):
    """Raised by the signal handler in ``raise_immediately``. ``except Exception`` does not catch it."""


class SignalHandler:
    """A context in which the first SIGINT or SIGTERM is only recorded. A second one has its usual effect.

    Python handles signals in the main thread. In any other thread this context does nothing.
    """

    def __init__(self) -> None:
        self.caught_signal = 0  # its number; 0: none
        self._raises_immediately = False
        self._previous_handlers: dict[int, Any] = {}

    @contextlib.contextmanager
    def raise_immediately(self) -> Iterator[None]:
        """A context in which a signal raises :class:`ImmediateInterrupt`, for work that can be repeated."""
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
                # None means a handler that Python did not install and cannot restore.
                number: signal.signal(number, self._handle_signal) or signal.SIG_DFL
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore_handlers()
