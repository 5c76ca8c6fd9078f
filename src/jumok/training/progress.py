"""What one sees: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from jumok.training.checkpoint import Standing
from jumok.training.report import Report, Summary
from jumok.training.settings import Settings

__all__ = ["Display", "clock"]

DEEPER = 8  # than the margin: where a sample goes on that is longer than the terminal is wide


class Display:
    """Shows a run on a console; on None, nothing."""

    def __init__(
        self,
        console: Console | None,
        settings: Settings,
        last: int | None,
        begun: Standing,
        unit: str = "tokens",
    ) -> None:
        self.console, self.settings, self.last, self.unit = console, settings, last, unit
        self._begun = begun.step, begun.seconds
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            bounded = last is not None or settings.minutes is not None
            place, figures = (TextColumn(f"{{task.fields[{name}]}}") for name in ("place", "figures"))
            self._bar = Progress(
                place, BarColumn(None), figures, console=console, expand=True, transient=True
            )
            self._task = self._bar.add_task("", total=1.0 if bounded else None, place="", figures="")

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """A line of its own."""
        if self.console is not None and text:
            self.console.print(Text(text))

    def alarm(self, text: str) -> None:
        """Something that should be looked into."""
        if self.console is not None:
            self.console.print(Text(f"ALARM: {text}", "red"), soft_wrap=True)

    def doing(self, text: str) -> None:
        """What else than a step takes the time now."""
        if self._bar is not None:
            self._bar.update(self._task, figures=text)

    def advance(self, standing: Standing) -> None:
        """One step further."""
        if self._bar is not None:
            done = self.share(standing)
            self._bar.update(self._task, completed=done, place=self._place(standing))

    def train(self, standing: Standing, figures: Mapping[str, float]) -> None:
        """The figures of the steps since the last time."""
        if self.console is None:
            return
        parts = [f"loss {figures['loss']:.4g}", f"{figures['tokens/s']:,.0f} {self.unit}/s"]
        if self._bar is None or self.console.width >= 100:
            parts.insert(1, f"lr {figures['learning_rate']:.2g}")
        left = self._left(standing)
        if left is not None:
            parts.append(f"{clock(left)} left")
        if self._bar is not None:
            self._bar.update(self._task, figures=" · ".join(parts))
        else:
            self.note(" · ".join([self._place(standing), *parts]))

    def validation(self, report: Report, of: str, better: bool) -> None:
        """The figures of a validation of something, and its samples below."""
        if self.console is None:
            return
        width = max(map(len, report.figures))
        text = Text(f"Validation of {of}", "bold")
        for name, value in report.figures.items():
            watched = name == report.best
            text.append(f"\n  {name:<{width}}  {value:>10,.4g}", "bold" if watched else "not bold")
            if watched and better:
                text.append("  ← best so far", "green not bold")
        for line in report.samples:  # never as markup: they are data
            text.append(f"\n{self._fitted(f'  {line}')}", "not bold")
        self.console.print(text, soft_wrap=True)

    def done(self, summary: Summary) -> None:
        """The end of a run."""
        lines, best = [f"Finished: {summary.reason}."], summary.best
        if best is not None:
            which = f"the mean of {best.averaged} weights up to" if best.averaged else "the weights of"
            lines.append(f"Best: {best.name} {best.value:,.4g}, by {which} step {best.step:,}.")
        lines.append(
            f"{summary.steps:,} steps, {summary.epochs:,} whole epochs, {summary.labels:,} {self.unit} "
            f"in {clock(summary.seconds)}."
        )
        lines.append(f"The run is in {summary.folder}")
        self.note("\n".join(lines))
        for alarm in summary.alarms:
            self.alarm(alarm)

    def _fitted(self, line: str) -> str:
        """Broken to fit a terminal, and never at its margin, where labels are looked for; else as it is."""
        if self.console is None or not self.console.is_terminal:
            return line
        parts = Text(line).wrap(self.console, max(self.console.width - DEEPER, DEEPER))
        return f"\n{' ' * DEEPER}".join(part.plain for part in parts)

    def _place(self, standing: Standing) -> str:
        of = f"/{self.last:,}" if self.last is not None else ""
        return f"epoch {standing.current_epoch:,} · step {standing.step:,}{of}"

    def share(self, standing: Standing) -> float:
        """How much of the way is behind, by the bound that comes first."""
        shares = [standing.step / self.last] if self.last else []
        if self.settings.minutes:
            shares.append(standing.seconds / (60 * self.settings.minutes))
        return min(max(shares, default=0.0), 1.0)

    def _left(self, standing: Standing) -> float | None:
        """Seconds to go, by the bound that comes first; None: there is none that can be foreseen."""
        bounds = []
        steps, seconds = standing.step - self._begun[0], standing.seconds - self._begun[1]
        if self.last is not None and steps:
            bounds.append((self.last - standing.step) * seconds / steps)
        if self.settings.minutes:
            bounds.append(60 * self.settings.minutes - standing.seconds)
        return max(min(bounds), 0.0) if bounds else None


def clock(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> clock(3 * 3600 + 4 * 60 + 5.6), clock(65)
    ('3:04:06', '1:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
