"""The training loop: one for all models. It knows nothing of what is learned, only ``model.loss(batch)``.

::

    each step                      batch ► a part for each process ► loss ► gradients of all ► weights
    every log_every steps          metrics.jsonl, the bar; is the loss still finite?
    validate_every, or an epoch    validate(model); the best weights so far to model.safetensors
    save_every, and to validate    all that is needed to go on, to state/

A run can be killed at any moment and goes on to the same numbers, bit by bit on a CPU. Three things see to
that: the order of batches is a function of the epoch, random numbers are a function of the step, and all else
is in the state on the disk (:mod:`jumok.training.checkpoint`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from jumok.errors import InputError
from jumok.training import distributed, prefetch, weights
from jumok.training.attention_health import find_alarms
from jumok.training.checkpoint import CheckpointManager, TrainState
from jumok.training.config import TrainConfig
from jumok.training.display import TrainingDisplay
from jumok.training.distributed import DistributedRanks
from jumok.training.divergence import DivergenceError, format_divergence
from jumok.training.learner import Learner, reseed
from jumok.training.metrics_log import MetricsLog, read_validations
from jumok.training.prefetch import StepBatches, TrainingDataset
from jumok.training.report import BestValidation, TrainingSummary, ValidationReport
from jumok.training.schedule import compute_last_step, shorten_warmup
from jumok.training.signals import ImmediateInterrupt, SignalHandler, TrainingInterrupted

__all__ = ["ValidateFn", "train"]

ValidateFn = Callable[[nn.Module], ValidationReport]
VALIDATION_RANK = 1 << 31  # no process has this number: the random numbers of a validation


def train(
    model: nn.Module,
    data: TrainingDataset,
    config: TrainConfig,
    folder: Path,
    *,
    validate: ValidateFn | None = None,
    console: Console | None = None,
    ranks: DistributedRanks | None = None,
) -> TrainingSummary:
    """Train a model, or go on with the run in ``folder``; afterwards the model holds the best weights.

    Args:
        model: has ``loss(batch) -> Loss``, summed over ``batch.count`` places.
        data: where batches come from.
        settings: how to train.
        folder: of the run. The best weights so far are in its ``model.safetensors`` at any time.
        validate: judges the model, which it is given in eval mode and without autograd, in the first process
            only. None: the newest weights are the best.
        console: where to show progress; None: nowhere.
        ranks: the processes that train together; None: those that torchrun started, if it did.

    >>> summary = train(model, data, Settings(steps=1000), Path("runs/first"))  # doctest: +SKIP
    >>> summary.reason, summary.steps  # doctest: +SKIP
    ('all 1,000 steps are done', 1000)

    Raises:
        Interrupted: after Ctrl-C or SIGTERM, with everything saved.
        Diverged: the loss is not finite or exploded; what was saved before is still there.
    """
    if validate is None and not (config.max_steps or config.max_epochs or config.max_minutes):
        raise InputError("nothing ends this training, for patience needs a validation: set steps or epochs")
    with contextlib.ExitStack() as stack:
        ranks = ranks or stack.enter_context(distributed.init_distributed(config.device))
        signals = stack.enter_context(SignalHandler())
        if ranks.device.type == "cuda":
            stack.enter_context(_enable_tf32())
        console = console if ranks.is_main else None
        return _TrainingLoop(model, data, config, folder, validate, console, ranks, signals).run()


class _TrainingLoop:
    """One run, in this process. All processes go through the same methods at the same steps."""

    def __init__(
        self,
        model: nn.Module,
        data: TrainingDataset,
        config: TrainConfig,
        folder: Path,
        validate: ValidateFn | None,
        console: Console | None,
        ranks: DistributedRanks,
        signals: SignalHandler,
    ) -> None:
        self.last_step = compute_last_step(config, lambda epoch: len(data.batches(epoch)))
        self.configured_warmup = config.warmup_steps
        config = shorten_warmup(config, self.last_step)
        self.data, self.config, self.folder, self.validate = data, config, folder, validate
        self.ranks, self.signals = ranks, signals
        self.learner = Learner(model, config, ranks, self.last_step)
        self.checkpoints = CheckpointManager(folder)
        self.state = self._restore_state()
        self.start_time = time.monotonic() - self.state.seconds
        self.time_fraction = self._compute_time_fraction()
        self.pending_rows: list[Tensor] = []  # rows of the last steps, still on the device
        self.pending_positions: list[tuple[int, int]] = []  # their epochs and positions
        self.has_reported_capture_error = False
        self.reported_alarms: set[str] = set()  # what is wrong, and was said
        self.is_compiling = self.learner.is_compiled  # until the first step is through
        unit: str = getattr(data, "unit", "tokens")  # what its batches count
        self.display = TrainingDisplay(console, config, self.last_step, self.state, unit)
        self.metrics_log: MetricsLog | None = None  # of the first process

    def run(self) -> TrainingSummary:
        """From where the run stands to its end."""
        settings, standing = self.config, self.state
        if standing.stop_reason and self._find_stop_reason():
            self.display.print_line(f"This run is finished already: {standing.stop_reason}.")
            return self._build_summary(standing.stop_reason)
        standing.stop_reason = None
        begin = standing.epoch, standing.epoch_step
        works = prefetch.iter_step_batches(self.data, self.ranks, settings.accumulation_steps, *begin)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.display)
            if standing.step:
                self.display.print_line(f"Going on after step {standing.step:,}.")
            if self.ranks.is_main:
                self.checkpoints.remove_stale(standing)
                self.metrics_log = MetricsLog(self.folder, standing, settings.tensorboard)
                stack.callback(self.metrics_log.close)
                self.display.print_line(self.metrics_log.notice)
                self.display.print_line(self._format_warmup_notice())
            ahead = stack.enter_context(
                contextlib.closing(prefetch.prefetch_items(works, settings.prefetch_batches))
            )
            return self._run_steps(ahead)

    def _run_steps(self, step_batches: Iterator[StepBatches]) -> TrainingSummary:
        # What is due is decided by where the run stands, not by what was done just now: so what a killed
        # process had left undone at this very step is done first by the one that goes on.
        while True:
            if self._validation_is_due():
                self._validate()
            if self._save_is_due():
                self._save()
            reason = self._find_stop_reason()
            if reason:
                return self._finish(reason)
            self._train_step(step_batches)
            if self.state.step % self.config.log_every == 0:
                self._log_train_metrics()
            self.display.advance(self.state)
            self._synchronize()

    # -------------------------------------------------------------------------------- one step

    def _train_step(self, step_batches: Iterator[StepBatches]) -> None:
        standing, begun = self.state, time.monotonic()
        work = next(step_batches)
        row = self.learner.step(work, standing.step + 1, self.time_fraction)
        self.pending_rows.append(row)
        self.pending_positions.append((work.epoch, work.epoch_step))
        standing.step += 1
        standing.epoch, standing.epoch_step = work.next_position
        standing.loss_part_names = self.learner.loss_part_names
        standing.unlogged_seconds += time.monotonic() - begun
        if self.learner.capture_error and not self.has_reported_capture_error:
            self.has_reported_capture_error = True
            self.display.print_line(
                f"Steps are launched kernel by kernel: recording failed ({self.learner.capture_error})."
            )
        if self.is_compiling:
            self._collect_rows()  # waits for the step
            self.display.print_line(
                f"The first step took {time.monotonic() - begun:.1f} s, most of it compiling."
            )
            self.is_compiling = False

    def _collect_rows(self) -> None:
        """Wait for the device, and see what the steps since the last look came to."""
        if not self.pending_rows:
            return
        standing, begun = self.state, time.monotonic()
        rows: list[list[float]] = torch.stack(self.pending_rows).tolist()
        places, self.pending_positions, self.pending_rows = self.pending_positions, [], []
        standing.unlogged_seconds += time.monotonic() - begun
        for number, (place, row) in enumerate(zip(places, rows, strict=True), standing.step - len(rows) + 1):
            total, count, norm, *_ = row
            fault = standing.loss_trend.update(total / count, norm, self.config.divergence_factor)
            if fault:
                raise self._build_divergence_error(fault, number, *place)
            standing.num_labels += round(count)
            standing.unlogged_rows.append(row)

    def _build_divergence_error(
        self, problem: str, step: int, epoch: int, epoch_step: int
    ) -> DivergenceError:
        examples = [int(number) for number in self.data.batches(epoch)[epoch_step]]
        kept = (
            f"Kept are the state of step {self.checkpoints.last_saved_step:,} in {self.checkpoints.folder} "
            "and the best weights so far in model.safetensors."
        )
        message = format_divergence(problem, step, self.state.loss_trend, examples, self.config, kept)
        return DivergenceError(message, step, examples)

    def _log_train_metrics(self) -> None:
        self._collect_rows()
        standing = self.state
        total, count, norm, *parts = (
            math.fsum(column) for column in zip(*standing.unlogged_rows, strict=True)
        )
        figures = {
            "loss": total / count,
            **{name: part / count for name, part in zip(standing.loss_part_names, parts, strict=True)},
            "learning_rate": self.learner.compute_learning_rate(standing.step, self.time_fraction),
            "gradient_norm": norm / len(standing.unlogged_rows),
            "tokens": standing.num_labels,
            "tokens/s": count / max(standing.unlogged_seconds, 1e-9),
        }
        if self.ranks.device.type == "cuda":
            figures["gpu_gib"] = torch.cuda.max_memory_allocated(self.ranks.device) / 2**30
        standing.unlogged_rows, standing.unlogged_seconds, standing.seconds = (
            [],
            0.0,
            time.monotonic() - self.start_time,
        )
        self._log_metrics("train", figures)
        self.display.show_train_metrics(standing, figures)

    def _synchronize(self) -> None:
        """Heed signals and the clock. Several processes must stop at the same step, so they ask each other.

        That makes them wait for their GPUs, so it is done only now and then.
        """
        if self.ranks.world_size > 1 and self.state.step % self.config.log_every:
            return
        caught, self.state.seconds = self.ranks.all_reduce_max(
            self.signals.caught_signal, time.monotonic() - self.start_time
        )
        self.time_fraction = self._compute_time_fraction()
        if caught:
            self._save_and_stop(int(caught))

    def _save_and_stop(self, signal_number: int) -> None:
        self._save()
        raise TrainingInterrupted(signal_number, self.state.step)

    # ------------------------------------------------------------------------ between the steps

    def _validation_is_due(self) -> bool:
        standing, every = self.state, self.config.validate_every
        if self.validate is None or standing.step in (0, standing.last_validation_step):
            return False
        return standing.step % every == 0 if every else standing.epoch_step == 0

    def _validate(self) -> None:
        self._save()  # it may take long, or fail
        standing, saved = self.state, self.learner.gather_weights()
        better = self._validate_weights(saved)
        if self.ranks.is_main:
            if better:
                weights.write_safetensors(saved, self.folder / "model.safetensors")
            if self.config.average_checkpoints > 1:
                weights.write_safetensors(saved, self.checkpoints.snapshot_path(standing.step))
        standing.num_bad_validations = 0 if better else standing.num_bad_validations + 1
        standing.last_validation_step = standing.step
        if self.config.average_checkpoints > 1:
            standing.snapshot_steps = [*standing.snapshot_steps, standing.step][
                -self.config.average_checkpoints :
            ]
        self._save()

    def _validate_weights(self, model_weights: Mapping[str, Tensor], num_averaged: int = 0) -> bool:
        """Validate these weights, in the first process. Whether they are the best so far, for all of them."""
        stopped, better = 0, False
        if self.ranks.is_main:
            try:
                better = self._validate_on_main(model_weights, num_averaged)
            except ImmediateInterrupt:  # nothing has changed yet: the next process validates again
                stopped = self.signals.caught_signal
        signal, good = self.ranks.broadcast_from_main(stopped, better)
        if signal:
            self._save_and_stop(int(signal))
        return bool(good)

    def _validate_on_main(self, model_weights: Mapping[str, Tensor], num_averaged: int) -> bool:
        standing = self.state
        assert self.validate is not None
        self.display.show_activity("validating …")
        reseed(self.ranks.device, self.config.seed, standing.step, VALIDATION_RANK)
        with self.signals.raise_immediately(), self.learner.use_eval_model(model_weights) as model:
            report = self.validate(model)
        better = report.is_better_than(standing.best.metrics if standing.best else None)
        if better:
            standing.best = BestValidation(
                standing.step, report.select_by, report.value, dict(report.metrics), num_averaged
            )
        standing.seconds = time.monotonic() - self.start_time
        self._log_metrics("average" if num_averaged else "validation", {**report.metrics, "best": better})
        if self.metrics_log is not None:
            self.metrics_log.log_samples(report.samples, standing)
        of = f"the mean of {num_averaged} weights" if num_averaged else f"step {standing.step:,}"
        self.display.show_validation(report, of, better)
        self._report_alarms()
        return better

    def _report_alarms(self) -> None:
        """Say what is wrong with the attention, each thing once while it lasts."""
        found = {alarm.partition(":")[0]: alarm for alarm in self._find_alarms()}
        for kind, alarm in found.items():
            if kind not in self.reported_alarms:
                self.display.print_alarm(alarm)
            if self.metrics_log is not None:
                self.metrics_log.log_alarm(alarm, self.state)
        self.reported_alarms = set(found)

    def _find_alarms(self) -> list[str]:
        """By the validations so far; where no end is in sight, ten of them count as a training."""
        figures = read_validations(self.folder)
        bounded = self.last_step is not None or self.config.max_minutes is not None
        done = self.display.compute_progress(self.state) if bounded else min(1.0, len(figures) / 10)
        return find_alarms(figures, 1.0 if self.state.stop_reason else done)

    def _save_is_due(self) -> bool:
        step, every, saved = self.state.step, self.config.save_every, self.checkpoints.last_saved_step
        return saved is None or (saved != step and every > 0 and step % every == 0)

    def _save(self) -> None:
        self._collect_rows()
        standing = self.state
        saved: dict[str, Tensor] = {}
        remembered: dict[str, Tensor] = {}
        if self.checkpoints.last_saved_step != standing.step:
            saved, remembered = self.learner.gather_weights(), self.learner.gather_optimizer_state()
            # The newest, as long as none was found best; but none that has learned nothing.
            if self.ranks.is_main and standing.best is None and standing.step:
                weights.write_safetensors(saved, self.folder / "model.safetensors")
        if self.metrics_log is not None:
            standing.seconds, standing.metrics_bytes = (
                time.monotonic() - self.start_time,
                self.metrics_log.sync(),
            )
            self.checkpoints.save(standing, saved, remembered)
        self.checkpoints.last_saved_step = standing.step

    def _log_metrics(self, event: str, metrics: Mapping[str, float]) -> None:
        if self.metrics_log is not None:
            self.metrics_log.log_metrics(event, self.state, metrics)

    # --------------------------------------------------------------------- beginning and end

    def _restore_state(self) -> TrainState:
        found = self.checkpoints.load()
        standing = found[0] if found else TrainState()
        highest, lowest = self.ranks.all_reduce_max(standing.step, -standing.step)
        if highest != -lowest:
            raise InputError(
                f"process {self.ranks.rank} finds the state of step {standing.step} in "
                f"{self.checkpoints.folder}, another that of step {highest:.0f}: all must see the same folder"
            )
        if found:
            self.learner.restore(found[1], found[2], f"the weights in {self.checkpoints.folder}")
        return standing

    def _compute_time_fraction(self) -> float:
        """The share of the minutes that is over. All processes agree on it: the learning rate needs it."""
        minutes = self.config.max_minutes
        return 0.0 if minutes is None else self.state.seconds / (60 * minutes)

    def _find_stop_reason(self) -> str | None:
        """Why training is over; None: it is not."""
        settings, standing = self.config, self.state
        if settings.max_steps and standing.step >= settings.max_steps:
            return f"all {settings.max_steps:,} steps are done"
        if settings.max_epochs and standing.epoch >= settings.max_epochs:
            return f"all {settings.max_epochs:,} epochs are done"
        if self.time_fraction >= 1:
            return f"{settings.max_minutes:g} minutes are over"
        if settings.patience and standing.num_bad_validations >= settings.patience:
            return f"{settings.patience} validations in a row were no better"
        return None

    def _finish(self, reason: str) -> TrainingSummary:
        standing = self.state
        self._collect_rows()
        if standing.unlogged_rows:
            self._log_train_metrics()
        if self.validate is not None and standing.last_validation_step != standing.step:
            self._validate()
        self._save()  # before the mean is tried on the model
        if len(standing.snapshot_steps) > 1:
            self._validate_average()
        standing.stop_reason = reason
        self._save()
        summary = self._build_summary(reason)
        self.display.show_summary(summary)
        return summary

    def _validate_average(self) -> None:
        """The mean of the last validated weights replaces the best ones, if it does better."""
        files, lost = self.checkpoints.find_snapshots(self.state) if self.ranks.is_main else ([], [])
        if lost:
            left = f"the mean is that of {len(files)}" if len(files) > 1 else "there is no mean to try"
            self.display.print_line(
                f"Of the weights to be averaged, these are lost: {', '.join(lost)}; {left}."
            )
        (count,) = self.ranks.broadcast_from_main(len(files))
        if count < 2:
            return
        mean = weights.average_weights(files) if self.ranks.is_main else {}
        if self._validate_weights(mean, num_averaged=len(files)) and self.ranks.is_main:
            weights.write_safetensors(mean, self.folder / "model.safetensors")

    def _format_warmup_notice(self) -> str:
        """A line where the training is shorter than its warm-up was to be."""
        asked, warmup, last = self.configured_warmup, self.config.warmup_steps, self.last_step
        if not asked or last is None or last > asked:
            return ""
        told = f"The training has {last:,} steps, and train.warmup is {asked:,}: "
        if warmup != asked:
            return told + f"the warm-up is shortened to {warmup:,}, a tenth."
        return told + "the learning rate never comes to its highest; lower train.warmup, or train longer."

    def _build_summary(self, reason: str) -> TrainingSummary:
        self.ranks.barrier()  # for what the first process wrote
        weights.load_weights(self.learner.model, self.folder / "model.safetensors")
        self.learner.model.eval()
        standing = self.state
        return TrainingSummary(
            folder=self.folder,
            num_steps=standing.step,
            num_epochs=standing.epoch,
            seconds=standing.seconds,
            num_labels=standing.num_labels,
            stop_reason=reason,
            best=standing.best,
            alarms=tuple(self._find_alarms()) if self.ranks.is_main else (),
        )


@contextlib.contextmanager
def _enable_tf32() -> Iterator[None]:
    """Products of float32 matrices on the tensor cores of a GPU (TF32)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
