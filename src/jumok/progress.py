"""How much of a long command is done, how fast it goes, how long it still takes."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from jumok.training.display import format_duration

__all__ = ["ProgressMeter"]

FIRST_REPORT_SECONDS, REPORT_INTERVAL_SECONDS = 10.0, 30.0  # seconds; where there is no terminal


class ProgressMeter:
    """A bar on a terminal; elsewhere a plain line now and then, and none of what takes no time."""

    def __init__(self, unit: str = "lines", *, is_visible: bool = True) -> None:
        self.unit, self.is_visible = unit, is_visible
        self._console = Console(stderr=True, highlight=False)
        self._progress_bar: Progress | None = None
        self._start: tuple[float, int, float] | None = None  # when, how many were done, what share of all
        self._next_report_time = 0.0
        self._has_reported = False
        if is_visible and self._console.is_terminal:
            columns = (BarColumn(None), TextColumn("{task.fields[figures]}"))
            self._progress_bar = Progress(*columns, console=self._console, expand=True, transient=True)
            self._task = self._progress_bar.add_task("", total=None, figures="")

    def __enter__(self) -> ProgressMeter:
        if self._progress_bar is not None:
            self._progress_bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress_bar is not None:
            self._progress_bar.stop()

    def update(self, num_done: int, fraction: float | None) -> None:
        """So many are done, which is this share of all; None: who knows. The first time, work begins."""
        now = time.monotonic()
        if self._start is None:
            self._start, self._next_report_time = (now, num_done, fraction or 0.0), now + FIRST_REPORT_SECONDS
            if num_done and self.is_visible:
                self._has_reported = True
                self.print_line(f"going on after {num_done:,} {self.unit}")
        elif self._progress_bar is not None:
            self._progress_bar.update(self._task, total=fraction and 1.0, completed=fraction or 0.0)
            self._progress_bar.update(self._task, figures=self._format_status(num_done, fraction))
        elif self.is_visible and now >= self._next_report_time:
            self._next_report_time, self._has_reported = now + REPORT_INTERVAL_SECONDS, True
            self.print_line(self._format_status(num_done, fraction))

    def finish(self, num_done: int) -> None:
        """All are done."""
        if self._start is not None and (self._has_reported or self._progress_bar is not None):
            began, before, _ = self._start
            some = f", {num_done - before:,} of them" if before else ""
            self.print_line(f"{num_done:,} {self.unit}{some} in {format_duration(time.monotonic() - began)}")

    def print_line(self, text: str) -> None:
        """A line of its own, as it is."""
        if self._progress_bar is not None:
            self._console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=sys.stderr)

    def _format_status(self, num_done: int, fraction: float | None) -> str:
        assert self._start is not None
        began, before, part = self._start
        seconds = max(time.monotonic() - began, 1e-6)
        speed = (num_done - before) / seconds
        told = [
            f"{num_done:,} {self.unit}",
            f"{speed:,.0f} a second" if speed >= 10 else f"{speed:.2g} a second",
        ]
        if fraction is not None and fraction > part:
            told += [
                f"{min(fraction, 1):.0%}",
                f"{format_duration(max(seconds * (1 - fraction) / (fraction - part), 0))} left",
            ]
        return " · ".join(told)
