"""Display of a training: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from jumok.progress import ProgressDisplay, format_duration
from jumok.training.checkpoint import TrainState
from jumok.training.config import TrainConfig
from jumok.training.report import TrainingSummary, ValidationReport

SAMPLE_INDENT = 8  # of the continuation lines of a sample that is wider than the terminal


class TrainingDisplay(ProgressDisplay):
    """Shows the progress of a run on a console. With None, it shows nothing."""

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
        if console is not None and console.is_terminal:
            position, status = (TextColumn(f"{{task.fields[{name}]}}") for name in ("position", "status"))
            self._progress_bar = Progress(
                position, BarColumn(None), status, console=console, expand=True, transient=True
            )
            is_bounded = last_step is not None or config.max_minutes is not None
            total = 1.0 if is_bounded else None
            self._task = self._progress_bar.add_task("", total=total, position="", status="")

    def print_line(self, text: str) -> None:
        """Print one line."""
        if self.console is not None and text:
            self.console.print(Text(text))

    def print_alarm(self, text: str) -> None:
        """Print a message about a problem that needs attention."""
        if self.console is not None:
            self.console.print(Text(f"ALARM: {text}", "red"), soft_wrap=True)

    def show_activity(self, text: str) -> None:
        """Show what is running other than a training step."""
        if self._progress_bar is not None:
            self._progress_bar.update(self._task, status=text)

    def advance(self, state: TrainState) -> None:
        """Update the progress bar after a step."""
        if self._progress_bar is not None:
            progress = self.compute_progress(state)
            self._progress_bar.update(self._task, completed=progress, position=self._format_position(state))

    def show_train_metrics(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Show the metrics of the steps since the last call."""
        if self.console is None:
            return
        parts = [f"loss {metrics['loss']:.4g}", f"{metrics['labels_per_second']:,.0f} {self.unit}/s"]
        if self._progress_bar is None or self.console.width >= 100:
            parts.insert(1, f"lr {metrics['learning_rate']:.2g}")
        seconds_left = self._estimate_seconds_left(state)
        if seconds_left is not None:
            parts.append(f"{format_duration(seconds_left)} left")
        if self._progress_bar is not None:
            self._progress_bar.update(self._task, status=" · ".join(parts))
        else:
            self.print_line(" · ".join([self._format_position(state), *parts]))

    def show_validation(self, report: ValidationReport, subject: str, is_best: bool) -> None:
        """Show the metrics and samples of a validation of ``subject``."""
        if self.console is None:
            return
        width = max(map(len, report.metrics))
        text = Text(f"Validation of {subject}", "bold")
        for name, value in report.metrics.items():
            is_selecting = name == report.select_by
            text.append(f"\n  {name:<{width}}  {value:>10,.4g}", "bold" if is_selecting else "not bold")
            if is_selecting and is_best:
                text.append("  ← best so far", "green not bold")
        for line in report.samples:  # never parsed as markup, because they are data
            text.append(f"\n{self._wrap_line(f'  {line}')}", "not bold")
        self.console.print(text, soft_wrap=True)

    def show_summary(self, summary: TrainingSummary) -> None:
        """Show the result of a run."""
        lines, best = [f"Finished: {summary.stop_reason}."], summary.best
        if best is not None:
            subject = f"the mean of {best.num_averaged} checkpoints up to " if best.num_averaged else ""
            lines.append(f"Best: {best.metric} {best.value:,.4g} at {subject}step {best.step:,}.")
        lines.append(
            f"{summary.num_steps:,} steps, {summary.num_epochs:,} complete epochs, {summary.num_labels:,} "
            f"{self.unit} in {format_duration(summary.seconds)}."
        )
        lines.append(f"The run is in {summary.folder}")
        self.print_line("\n".join(lines))
        for alarm in summary.alarms:
            self.print_alarm(alarm)

    def _wrap_line(self, line: str) -> str:
        """Wrap a line to the width of the terminal, with an indent that sets it off from the labels."""
        if self.console is None or not self.console.is_terminal:
            return line
        parts = Text(line).wrap(self.console, max(self.console.width - SAMPLE_INDENT, SAMPLE_INDENT))
        return f"\n{' ' * SAMPLE_INDENT}".join(part.plain for part in parts)

    def _format_position(self, state: TrainState) -> str:
        total = f"/{self.last_step:,}" if self.last_step is not None else ""
        return f"epoch {state.current_epoch:,} · step {state.step:,}{total}"

    def compute_progress(self, state: TrainState) -> float:
        """Return the fraction of the training that is done, by the limit that comes first."""
        fractions = [state.step / self.last_step] if self.last_step else []
        if self.config.max_minutes:
            fractions.append(state.seconds / (60 * self.config.max_minutes))
        return min(max(fractions, default=0.0), 1.0)

    def _estimate_seconds_left(self, state: TrainState) -> float | None:
        """Return the remaining seconds, by the limit that comes first. None: they cannot be estimated."""
        estimates = []
        steps, seconds = state.step - self._start[0], state.seconds - self._start[1]
        if self.last_step is not None and steps:
            estimates.append((self.last_step - state.step) * seconds / steps)
        if self.config.max_minutes:
            estimates.append(60 * self.config.max_minutes - state.seconds)
        return max(min(estimates), 0.0) if estimates else None
