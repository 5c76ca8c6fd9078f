"""The training loop of all models. It only requires ``model.loss(batch)``.

::

    each step                      batch ► one part per process ► loss ► sum of gradients ► weights
    every log_every steps          write metrics.jsonl, update the progress bar, check that the loss is finite
    validate_every, or an epoch    validate(model), write the best weights so far to model.safetensors
    save_every, and to validate    write a checkpoint to state/

Training resumes after any interruption with identical results, bit for bit on a CPU: the order of the batches
depends only on the epoch, random numbers depend only on the step, and everything else is in the checkpoint
(:mod:`jumok.training.checkpoint`).
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

ValidateFn = Callable[[nn.Module], ValidationReport]
VALIDATION_RANK = 1 << 31  # seeds the random numbers of a validation; no process has this rank


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
    """Train a model, or resume the run in ``folder``. Afterwards the model holds the best weights.

    Args:
        model: has ``loss(batch) -> Loss``, a sum over ``batch.count`` labels.
        data: provides the batches.
        config: config of training.
        folder: the folder of the run. Its ``model.safetensors`` always holds the best weights so far.
        validate: evaluates the model, in eval mode and without autograd, in the first process only.
            None: the newest weights count as the best.
        console: shows progress. None: no output.
        ranks: the processes that train together. None: those that torchrun started.

    >>> summary = train(model, data, TrainConfig(max_steps=1000), Path("runs/first"))  # doctest: +SKIP
    >>> summary.stop_reason, summary.num_steps  # doctest: +SKIP
    ('all 1,000 steps are done', 1000)

    Raises:
        TrainingInterrupted: after Ctrl-C or SIGTERM. The checkpoint is saved.
        DivergenceError: the loss is not finite or exploded. Earlier checkpoints are kept.
    """
    if validate is None and not (config.max_steps or config.max_epochs or config.max_minutes):
        raise InputError("nothing ends this training, because patience needs a validation: set max_steps or max_epochs")
    with contextlib.ExitStack() as stack:
        ranks = ranks or stack.enter_context(distributed.init_distributed(config.device))
        signals = stack.enter_context(SignalHandler())
        if ranks.device.type == "cuda":
            stack.enter_context(_enable_tf32())
        console = console if ranks.is_main else None
        return _TrainingLoop(model, data, config, folder, validate, console, ranks, signals).run()


class _TrainingLoop:
    """Training in this process. All processes call the same methods at the same steps."""

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
        self.pending_rows: list[Tensor] = []  # metrics of the last steps, still on the device
        self.pending_positions: list[tuple[int, int]] = []  # epoch and batch of each
        self.has_reported_capture_error = False
        self.reported_alarms: set[str] = set()
        self.is_compiling = self.learner.is_compiled  # until the first step is done
        unit: str = getattr(data, "unit", "tokens")  # what the labels of a batch are
        self.display = TrainingDisplay(console, config, self.last_step, self.state, unit)
        self.metrics_log: MetricsLog | None = None  # in the first process only

    def run(self) -> TrainingSummary:
        """Train from the current state to the end."""
        config, state = self.config, self.state
        if state.stop_reason and self._find_stop_reason():
            self.display.print_line(f"This run is already finished: {state.stop_reason}.")
            return self._build_summary(state.stop_reason)
        state.stop_reason = None
        step_batches = prefetch.iter_step_batches(
            self.data, self.ranks, config.accumulation_steps, state.epoch, state.epoch_step
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.display)
            if state.step:
                self.display.print_line(f"Resuming after step {state.step:,}.")
            if self.ranks.is_main:
                self.checkpoints.remove_stale(state)
                self.metrics_log = MetricsLog(self.folder, state, config.tensorboard)
                stack.callback(self.metrics_log.close)
                self.display.print_line(self.metrics_log.notice)
                self.display.print_line(self._format_warmup_notice())
            prefetched = stack.enter_context(
                contextlib.closing(prefetch.prefetch_items(step_batches, config.prefetch_batches))
            )
            return self._run_steps(prefetched)

    def _run_steps(self, step_batches: Iterator[StepBatches]) -> TrainingSummary:
        # The state alone decides what is due. So a resumed process first does what the killed one had not
        # finished at this step.
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
        state, start_time = self.state, time.monotonic()
        step_batch = next(step_batches)
        row = self.learner.step(step_batch, state.step + 1, self.time_fraction)
        self.pending_rows.append(row)
        self.pending_positions.append((step_batch.epoch, step_batch.epoch_step))
        state.step += 1
        state.epoch, state.epoch_step = step_batch.next_position
        state.loss_part_names = self.learner.loss_part_names
        state.unlogged_seconds += time.monotonic() - start_time
        if self.learner.capture_error and not self.has_reported_capture_error:
            self.has_reported_capture_error = True
            self.display.print_line(
                f"Training without CUDA graphs, because the capture failed ({self.learner.capture_error})."
            )
        if self.is_compiling:
            self._collect_rows()  # wait for the step
            self.display.print_line(
                f"The first step took {time.monotonic() - start_time:.1f} s, most of it for compiling."
            )
            self.is_compiling = False

    def _collect_rows(self) -> None:
        """Wait for the device, fetch the rows of the last steps and check their losses."""
        if not self.pending_rows:
            return
        state, start_time = self.state, time.monotonic()
        rows: list[list[float]] = torch.stack(self.pending_rows).tolist()
        positions, self.pending_positions, self.pending_rows = self.pending_positions, [], []
        state.unlogged_seconds += time.monotonic() - start_time
        first_step = state.step - len(rows) + 1
        for step, (position, row) in enumerate(zip(positions, rows, strict=True), first_step):
            total, num_labels, norm, *_ = row
            problem = state.loss_trend.update(total / num_labels, norm, self.config.divergence_factor)
            if problem:
                raise self._build_divergence_error(problem, step, *position)
            state.num_labels += round(num_labels)
            state.unlogged_rows.append(row)

    def _build_divergence_error(self, problem: str, step: int, epoch: int, epoch_step: int) -> DivergenceError:
        examples = [int(index) for index in self.data.batches(epoch)[epoch_step]]
        checkpoint = (
            f"The checkpoint of step {self.checkpoints.last_saved_step:,} is in {self.checkpoints.folder}; "
            "the best weights so far are in model.safetensors."
        )
        message = format_divergence(problem, step, self.state.loss_trend, examples, self.config, checkpoint)
        return DivergenceError(message, step, examples)

    def _log_train_metrics(self) -> None:
        self._collect_rows()
        state = self.state
        total, num_labels, norm, *parts = (math.fsum(column) for column in zip(*state.unlogged_rows, strict=True))
        metrics = {
            "loss": total / num_labels,
            **{name: part / num_labels for name, part in zip(state.loss_part_names, parts, strict=True)},
            "learning_rate": self.learner.compute_learning_rate(state.step, self.time_fraction),
            "gradient_norm": norm / len(state.unlogged_rows),
            "num_labels": state.num_labels,
            "labels_per_second": num_labels / max(state.unlogged_seconds, 1e-9),
        }
        if self.ranks.device.type == "cuda":
            metrics["gpu_memory_gib"] = torch.cuda.max_memory_allocated(self.ranks.device) / 2**30
        state.unlogged_rows, state.unlogged_seconds = [], 0.0
        state.seconds = time.monotonic() - self.start_time
        self._log_metrics("train", metrics)
        self.display.show_train_metrics(state, metrics)

    def _synchronize(self) -> None:
        """Check for signals and the time limit. Processes communicate, since all must stop at the same step.

        This makes them wait for their GPUs, so several processes do it only every ``log_every`` steps.
        """
        if self.ranks.world_size > 1 and self.state.step % self.config.log_every:
            return
        caught_signal, self.state.seconds = self.ranks.all_reduce_max(
            self.signals.caught_signal, time.monotonic() - self.start_time
        )
        self.time_fraction = self._compute_time_fraction()
        if caught_signal:
            self._save_and_stop(int(caught_signal))

    def _save_and_stop(self, signal_number: int) -> None:
        self._save()
        raise TrainingInterrupted(signal_number, self.state.step)

    # ------------------------------------------------------------------------ between steps

    def _validation_is_due(self) -> bool:
        state, interval = self.state, self.config.validate_every
        if self.validate is None or state.step in (0, state.last_validation_step):
            return False
        return state.step % interval == 0 if interval else state.epoch_step == 0

    def _validate(self) -> None:
        self._save()  # the validation may take long, or fail
        state, model_weights = self.state, self.learner.gather_weights()
        is_best = self._validate_weights(model_weights)
        if self.ranks.is_main:
            if is_best:
                weights.write_safetensors(model_weights, self.folder / "model.safetensors")
            if self.config.average_checkpoints > 1:
                weights.write_safetensors(model_weights, self.checkpoints.snapshot_path(state.step))
        state.num_bad_validations = 0 if is_best else state.num_bad_validations + 1
        state.last_validation_step = state.step
        if self.config.average_checkpoints > 1:
            state.snapshot_steps = [*state.snapshot_steps, state.step][-self.config.average_checkpoints :]
        self._save()

    def _validate_weights(self, model_weights: Mapping[str, Tensor], num_averaged: int = 0) -> bool:
        """Validate these weights in the first process. Returns in all processes whether they are the best."""
        signal_number, is_best = 0.0, 0.0
        if self.ranks.is_main:
            try:
                is_best = self._validate_on_main(model_weights, num_averaged)
            except ImmediateInterrupt:  # the state has not changed, so a resumed process validates again
                signal_number = self.signals.caught_signal
        signal_number, is_best = self.ranks.broadcast_from_main(signal_number, is_best)
        if signal_number:
            self._save_and_stop(int(signal_number))
        return bool(is_best)

    def _validate_on_main(self, model_weights: Mapping[str, Tensor], num_averaged: int) -> bool:
        state = self.state
        assert self.validate is not None
        self.display.show_activity("validating …")
        reseed(self.ranks.device, self.config.seed, state.step, VALIDATION_RANK)
        with self.signals.raise_immediately(), self.learner.use_eval_model(model_weights) as model:
            report = self.validate(model)
        is_best = report.is_better_than(state.best.metrics if state.best else None)
        if is_best:
            state.best = BestValidation(state.step, report.select_by, report.value, dict(report.metrics), num_averaged)
        state.seconds = time.monotonic() - self.start_time
        event = "averaged_weights" if num_averaged else "validation"
        self._log_metrics(event, {**report.metrics, "is_best": is_best})
        if self.metrics_log is not None:
            self.metrics_log.log_samples(report.samples, state)
        subject = f"the mean of {num_averaged} checkpoints" if num_averaged else f"step {state.step:,}"
        self.display.show_validation(report, subject, is_best)
        self._report_alarms()
        return is_best

    def _report_alarms(self) -> None:
        """Report problems of the attention. A problem that persists is displayed only once."""
        alarms = {alarm.partition(":")[0]: alarm for alarm in self._find_alarms()}
        for title, alarm in alarms.items():
            if title not in self.reported_alarms:
                self.display.print_alarm(alarm)
            if self.metrics_log is not None:
                self.metrics_log.log_alarm(alarm, self.state)
        self.reported_alarms = set(alarms)

    def _find_alarms(self) -> list[str]:
        """Find problems in the validations so far. If the end is unknown, ten validations are a training."""
        validations = read_validations(self.folder)
        is_bounded = self.last_step is not None or self.config.max_minutes is not None
        progress = self.display.compute_progress(self.state) if is_bounded else min(1.0, len(validations) / 10)
        return find_alarms(validations, 1.0 if self.state.stop_reason else progress)

    def _save_is_due(self) -> bool:
        step, interval, last_saved = (
            self.state.step,
            self.config.save_every,
            self.checkpoints.last_saved_step,
        )
        return last_saved is None or (last_saved != step and interval > 0 and step % interval == 0)

    def _save(self) -> None:
        self._collect_rows()
        state = self.state
        model_weights: dict[str, Tensor] = {}
        optimizer_state: dict[str, Tensor] = {}
        if self.checkpoints.last_saved_step != state.step:
            model_weights = self.learner.gather_weights()
            optimizer_state = self.learner.gather_optimizer_state()
            # Before the first validation, the newest weights are the best; untrained ones are not written.
            if self.ranks.is_main and state.best is None and state.step:
                weights.write_safetensors(model_weights, self.folder / "model.safetensors")
        if self.metrics_log is not None:
            state.seconds = time.monotonic() - self.start_time
            state.metrics_bytes = self.metrics_log.sync()
            self.checkpoints.save(state, model_weights, optimizer_state)
        self.checkpoints.last_saved_step = state.step

    def _log_metrics(self, event: str, metrics: Mapping[str, float]) -> None:
        if self.metrics_log is not None:
            self.metrics_log.log_metrics(event, self.state, metrics)

    # ------------------------------------------------------------------------- start and end

    def _restore_state(self) -> TrainState:
        checkpoint = self.checkpoints.load()
        state = checkpoint[0] if checkpoint else TrainState()
        highest, lowest = self.ranks.all_reduce_max(state.step, -state.step)
        if highest != -lowest:
            raise InputError(
                f"process {self.ranks.rank} found the checkpoint of step {state.step} in "
                f"{self.checkpoints.folder}, and another process that of step {highest:.0f}; "
                "all processes must see the same folder"
            )
        if checkpoint:
            _, model_weights, optimizer_state = checkpoint
            source = f"the weights in {self.checkpoints.folder}"
            self.learner.restore(model_weights, optimizer_state, source)
        return state

    def _compute_time_fraction(self) -> float:
        """Return the elapsed fraction of ``max_minutes``. It is equal in all processes."""
        minutes = self.config.max_minutes
        return 0.0 if minutes is None else self.state.seconds / (60 * minutes)

    def _find_stop_reason(self) -> str | None:
        """Return the reason why training ends now. None: it does not."""
        config, state = self.config, self.state
        if config.max_steps and state.step >= config.max_steps:
            return f"all {config.max_steps:,} steps are done"
        if config.max_epochs and state.epoch >= config.max_epochs:
            return f"all {config.max_epochs:,} epochs are done"
        if self.time_fraction >= 1:
            return f"{config.max_minutes:g} minutes are over"
        if config.patience and state.num_bad_validations >= config.patience:
            return f"{config.patience} validations in a row were no better"
        return None

    def _finish(self, reason: str) -> TrainingSummary:
        state = self.state
        self._collect_rows()
        if state.unlogged_rows:
            self._log_train_metrics()
        if self.validate is not None and state.last_validation_step != state.step:
            self._validate()
        self._save()  # before the model gets the averaged weights
        if len(state.snapshot_steps) > 1:
            self._validate_average()
        state.stop_reason = reason
        self._save()
        summary = self._build_summary(reason)
        self.display.show_summary(summary)
        return summary

    def _validate_average(self) -> None:
        """Validate the mean of the last checkpoints, and keep it if it is better than the best weights."""
        files, lost = self.checkpoints.find_snapshots(self.state) if self.ranks.is_main else ([], [])
        if lost:
            rest = f"averaging {len(files)}" if len(files) > 1 else "nothing is averaged"
            self.display.print_line(f"These checkpoints are missing or damaged: {', '.join(lost)}; {rest}.")
        (num_files,) = self.ranks.broadcast_from_main(len(files))
        if num_files < 2:
            return
        mean = weights.average_weights(files) if self.ranks.is_main else {}
        if self._validate_weights(mean, num_averaged=len(files)) and self.ranks.is_main:
            weights.write_safetensors(mean, self.folder / "model.safetensors")

    def _format_warmup_notice(self) -> str:
        """Return a line if the training is shorter than the warm-up of the recipe."""
        configured, actual, last_step = self.configured_warmup, self.config.warmup_steps, self.last_step
        if not configured or last_step is None or last_step > configured:
            return ""
        notice = f"The training has {last_step:,} steps, and train.warmup_steps is {configured:,}: "
        if actual != configured:
            return notice + f"the warm-up is shortened to {actual:,} steps, a tenth."
        return notice + ("the learning rate never reaches its peak; lower train.warmup_steps, or train longer.")

    def _build_summary(self, reason: str) -> TrainingSummary:
        self.ranks.barrier()  # until the first process has written the weights
        weights.load_weights(self.learner.model, self.folder / "model.safetensors")
        self.learner.model.eval()
        state = self.state
        return TrainingSummary(
            folder=self.folder,
            num_steps=state.step,
            num_epochs=state.epoch,
            seconds=state.seconds,
            num_labels=state.num_labels,
            stop_reason=reason,
            best=state.best,
            alarms=tuple(self._find_alarms()) if self.ranks.is_main else (),
        )


@contextlib.contextmanager
def _enable_tf32() -> Iterator[None]:
    """Multiply float32 matrices on the tensor cores of a GPU (TF32)."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
