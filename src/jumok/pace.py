"""How much of a long command is done, how fast it goes, how long it still takes."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from jumok.training.progress import clock

__all__ = ["Pace"]

TOLD_AFTER, TOLD_EVERY = 10.0, 30.0  # seconds; where there is no terminal


class Pace:
    """A bar on a terminal; elsewhere a plain line now and then, and none of what takes no time."""

    def __init__(self, what: str = "lines", *, shown: bool = True) -> None:
        self.what, self.shown = what, shown
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._begun: tuple[float, int, float] | None = None  # when, how many were done, what share of all
        self._next = 0.0
        self._told = False
        if shown and self._console.is_terminal:
            columns = (BarColumn(None), TextColumn("{task.fields[figures]}"))
            self._bar = Progress(*columns, console=self._console, expand=True, transient=True)
            self._task = self._bar.add_task("", total=None, figures="")

    def __enter__(self) -> Pace:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, done: int, share: float | None) -> None:
        """So many are done, which is this share of all; None: who knows. The first time, work begins."""
        now = time.monotonic()
        if self._begun is None:
            self._begun, self._next = (now, done, share or 0.0), now + TOLD_AFTER
            if done and self.shown:
                self._told = True
                self.tell(f"going on after {done:,} {self.what}")
        elif self._bar is not None:
            self._bar.update(self._task, total=share and 1.0, completed=share or 0.0)
            self._bar.update(self._task, figures=self._figures(done, share))
        elif self.shown and now >= self._next:
            self._next, self._told = now + TOLD_EVERY, True
            self.tell(self._figures(done, share))

    def end(self, done: int) -> None:
        """All are done."""
        if self._begun is not None and (self._told or self._bar is not None):
            began, before, _ = self._begun
            some = f", {done - before:,} of them" if before else ""
            self.tell(f"{done:,} {self.what}{some} in {clock(time.monotonic() - began)}")

    def tell(self, text: str) -> None:
        """A line of its own, as it is."""
        if self._bar is not None:
            self._console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=sys.stderr)

    def _figures(self, done: int, share: float | None) -> str:
        assert self._begun is not None
        began, before, part = self._begun
        seconds = max(time.monotonic() - began, 1e-6)
        speed = (done - before) / seconds
        told = [f"{done:,} {self.what}", f"{speed:,.0f} a second" if speed >= 10 else f"{speed:.2g} a second"]
        if share is not None and share > part:
            told += [f"{min(share, 1):.0%}", f"{clock(max(seconds * (1 - share) / (share - part), 0))} left"]
        return " · ".join(told)
