"""What one sees: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from jumok.training.checkpoint import TrainState
from jumok.training.config import TrainConfig
from jumok.training.report import TrainingSummary, ValidationReport

__all__ = ["TrainingDisplay", "format_duration"]

SAMPLE_INDENT = 8  # than the margin: where a sample goes on that is longer than the terminal is wide


class TrainingDisplay:
    """Shows a run on a console; on None, nothing."""

    def __init__(
        self,
        console: Console | None,
        config: TrainConfig,
        last_step: int | None,
        initial_state: TrainState,
        unit: str = "tokens",
    ) -> None:
        self.console, self.config, self.last_step, self.unit = console, config, last_step, unit
        self._start = initial_state.step, initial_state.seconds
        self._progress_bar: Progress | None = None
        if console is not None and console.is_terminal:
            bounded = last_step is not None or config.max_minutes is not None
            place, figures = (TextColumn(f"{{task.fields[{name}]}}") for name in ("place", "figures"))
            self._progress_bar = Progress(
                place, BarColumn(None), figures, console=console, expand=True, transient=True
            )
            self._task = self._progress_bar.add_task("", total=1.0 if bounded else None, place="", figures="")

    def __enter__(self) -> TrainingDisplay:
        if self._progress_bar is not None:
            self._progress_bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress_bar is not None:
            self._progress_bar.stop()

    def print_line(self, text: str) -> None:
        """A line of its own."""
        if self.console is not None and text:
            self.console.print(Text(text))

    def print_alarm(self, text: str) -> None:
        """Something that should be looked into."""
        if self.console is not None:
            self.console.print(Text(f"ALARM: {text}", "red"), soft_wrap=True)

    def show_activity(self, text: str) -> None:
        """What else than a step takes the time now."""
        if self._progress_bar is not None:
            self._progress_bar.update(self._task, figures=text)

    def advance(self, state: TrainState) -> None:
        """One step further."""
        if self._progress_bar is not None:
            done = self.compute_progress(state)
            self._progress_bar.update(self._task, completed=done, place=self._format_position(state))

    def show_train_metrics(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """The figures of the steps since the last time."""
        if self.console is None:
            return
        parts = [f"loss {metrics['loss']:.4g}", f"{metrics['tokens/s']:,.0f} {self.unit}/s"]
        if self._progress_bar is None or self.console.width >= 100:
            parts.insert(1, f"lr {metrics['learning_rate']:.2g}")
        left = self._estimate_seconds_left(state)
        if left is not None:
            parts.append(f"{format_duration(left)} left")
        if self._progress_bar is not None:
            self._progress_bar.update(self._task, figures=" · ".join(parts))
        else:
            self.print_line(" · ".join([self._format_position(state), *parts]))

    def show_validation(self, report: ValidationReport, subject: str, is_best: bool) -> None:
        """The figures of a validation of something, and its samples below."""
        if self.console is None:
            return
        width = max(map(len, report.metrics))
        text = Text(f"Validation of {subject}", "bold")
        for name, value in report.metrics.items():
            watched = name == report.select_by
            text.append(f"\n  {name:<{width}}  {value:>10,.4g}", "bold" if watched else "not bold")
            if watched and is_best:
                text.append("  ← best so far", "green not bold")
        for line in report.samples:  # never as markup: they are data
            text.append(f"\n{self._wrap_line(f'  {line}')}", "not bold")
        self.console.print(text, soft_wrap=True)

    def show_summary(self, summary: TrainingSummary) -> None:
        """The end of a run."""
        lines, best = [f"Finished: {summary.stop_reason}."], summary.best
        if best is not None:
            which = (
                f"the mean of {best.num_averaged} weights up to" if best.num_averaged else "the weights of"
            )
            lines.append(f"Best: {best.metric} {best.value:,.4g}, by {which} step {best.step:,}.")
        lines.append(
            f"{summary.num_steps:,} steps, {summary.num_epochs:,} whole epochs, {summary.num_labels:,} {self.unit} "
            f"in {format_duration(summary.seconds)}."
        )
        lines.append(f"The run is in {summary.folder}")
        self.print_line("\n".join(lines))
        for alarm in summary.alarms:
            self.print_alarm(alarm)

    def _wrap_line(self, line: str) -> str:
        """Broken to fit a terminal, and never at its margin, where labels are looked for; else as it is."""
        if self.console is None or not self.console.is_terminal:
            return line
        parts = Text(line).wrap(self.console, max(self.console.width - SAMPLE_INDENT, SAMPLE_INDENT))
        return f"\n{' ' * SAMPLE_INDENT}".join(part.plain for part in parts)

    def _format_position(self, state: TrainState) -> str:
        of = f"/{self.last_step:,}" if self.last_step is not None else ""
        return f"epoch {state.current_epoch:,} · step {state.step:,}{of}"

    def compute_progress(self, state: TrainState) -> float:
        """How much of the way is behind, by the bound that comes first."""
        shares = [state.step / self.last_step] if self.last_step else []
        if self.config.max_minutes:
            shares.append(state.seconds / (60 * self.config.max_minutes))
        return min(max(shares, default=0.0), 1.0)

    def _estimate_seconds_left(self, state: TrainState) -> float | None:
        """Seconds to go, by the bound that comes first; None: there is none that can be foreseen."""
        bounds = []
        steps, seconds = state.step - self._start[0], state.seconds - self._start[1]
        if self.last_step is not None and steps:
            bounds.append((self.last_step - state.step) * seconds / steps)
        if self.config.max_minutes:
            bounds.append(60 * self.config.max_minutes - state.seconds)
        return max(min(bounds), 0.0) if bounds else None


def format_duration(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> clock(3 * 3600 + 4 * 60 + 5.6), clock(65)
    ('3:04:06', '1:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
