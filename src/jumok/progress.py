"""Progress of a long command: how much is done, how fast, and how long the rest takes."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

FIRST_REPORT_SECONDS, REPORT_INTERVAL_SECONDS = 10.0, 30.0  # where there is no terminal


class ProgressDisplay:
    """A context in which a progress bar is displayed, if there is one."""

    _progress_bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._progress_bar is not None:
            self._progress_bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress_bar is not None:
            self._progress_bar.stop()


class ProgressMeter(ProgressDisplay):
    """Shows a bar on a terminal, and elsewhere a plain line every 30 seconds, on standard error."""

    def __init__(self, *, is_visible: bool = True) -> None:
        self.is_visible = is_visible
        self._console = Console(stderr=True, highlight=False)
        self._start: tuple[float, int, float] | None = None  # time, number of items done, fraction of all
        self._next_report_time = 0.0
        self._has_reported = False
        if is_visible and self._console.is_terminal:
            columns = (BarColumn(None), TextColumn("{task.fields[status]}"))
            self._progress_bar = Progress(*columns, console=self._console, expand=True, transient=True)
            self._task = self._progress_bar.add_task("", total=None, status="")

    def update(self, num_done: int, fraction: float | None) -> None:
        """Show how many items are done, and their fraction of all. The first call starts the clock."""
        now = time.monotonic()
        if self._start is None:
            self._start, self._next_report_time = (now, num_done, fraction or 0.0), now + FIRST_REPORT_SECONDS
            if num_done and self.is_visible:
                self._has_reported = True
                self.print_line(f"resuming after {num_done:,} lines")
        elif self._progress_bar is not None:
            self._progress_bar.update(self._task, total=fraction and 1.0, completed=fraction or 0.0)
            self._progress_bar.update(self._task, status=self._format_status(num_done, fraction))
        elif self.is_visible and now >= self._next_report_time:
            self._next_report_time, self._has_reported = now + REPORT_INTERVAL_SECONDS, True
            self.print_line(self._format_status(num_done, fraction))

    def finish(self, num_done: int) -> None:
        """Show the total number of items and the time."""
        if self._start is not None and (self._has_reported or self._progress_bar is not None):
            start_time, start_count, _ = self._start
            new = f", {num_done - start_count:,} of them" if start_count else ""
            duration = format_duration(time.monotonic() - start_time)
            self.print_line(f"{num_done:,} lines{new} in {duration}")

    def print_line(self, text: str) -> None:
        """Print one line without markup."""
        if self._progress_bar is not None:
            self._console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=sys.stderr)

    def _format_status(self, num_done: int, fraction: float | None) -> str:
        assert self._start is not None
        start_time, start_count, start_fraction = self._start
        seconds = max(time.monotonic() - start_time, 1e-6)
        speed = (num_done - start_count) / seconds
        parts = [f"{num_done:,} lines", f"{speed:,.0f} a second" if speed >= 10 else f"{speed:.2g} a second"]
        if fraction is not None and fraction > start_fraction:
            seconds_left = max(seconds * (1 - fraction) / (fraction - start_fraction), 0)
            parts += [f"{min(fraction, 1):.0%}", f"{format_duration(seconds_left)} left"]
        return " · ".join(parts)


def format_duration(seconds: float) -> str:
    """Format seconds as a clock does.

    >>> format_duration(3 * 3600 + 4 * 60 + 5.6), format_duration(65)
    ('3:04:06', '1:05')
    """
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"
