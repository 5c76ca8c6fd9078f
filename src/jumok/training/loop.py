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
from jumok.training.checkpoint import Checkpoints, Standing
from jumok.training.distributed import Ranks
from jumok.training.divergence import Diverged, told
from jumok.training.health import alarms
from jumok.training.journal import Journal, validations
from jumok.training.learner import Learner, reseed
from jumok.training.prefetch import Data, Work
from jumok.training.progress import Display
from jumok.training.report import Best, Report, Summary
from jumok.training.schedule import fitted, last_step
from jumok.training.settings import Settings
from jumok.training.signals import Interrupted, Now, Signals

__all__ = ["Validate", "train"]

Validate = Callable[[nn.Module], Report]
VALIDATION = 1 << 31  # no process has this number: the random numbers of a validation


def train(
    model: nn.Module,
    data: Data,
    settings: Settings,
    folder: Path,
    *,
    validate: Validate | None = None,
    console: Console | None = None,
    ranks: Ranks | None = None,
) -> Summary:
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
    if validate is None and not (settings.steps or settings.epochs or settings.minutes):
        raise InputError("nothing ends this training, for patience needs a validation: set steps or epochs")
    with contextlib.ExitStack() as stack:
        ranks = ranks or stack.enter_context(distributed.joined(settings.device))
        signals = stack.enter_context(Signals())
        if ranks.device.type == "cuda":
            stack.enter_context(_fast_products())
        console = console if ranks.main else None
        return _Loop(model, data, settings, folder, validate, console, ranks, signals).run()


class _Loop:
    """One run, in this process. All processes go through the same methods at the same steps."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        settings: Settings,
        folder: Path,
        validate: Validate | None,
        console: Console | None,
        ranks: Ranks,
        signals: Signals,
    ) -> None:
        self.last = last_step(settings, lambda epoch: len(data.batches(epoch)))
        self.asked_warmup = settings.warmup
        settings = fitted(settings, self.last)
        self.data, self.settings, self.folder, self.validate = data, settings, folder, validate
        self.ranks, self.signals = ranks, signals
        self.learner = Learner(model, settings, ranks, self.last)
        self.checkpoints = Checkpoints(folder)
        self.standing = self._restored()
        self.began = time.monotonic() - self.standing.seconds
        self.spent = self._spent()
        self.pending: list[Tensor] = []  # rows of the last steps, still on the device
        self.places: list[tuple[int, int]] = []  # their epochs and positions
        self.told_trouble = False
        self.alarmed: set[str] = set()  # what is wrong, and was said
        self.compiling = self.learner.compiled  # until the first step is through
        unit: str = getattr(data, "unit", "tokens")  # what its batches count
        self.display = Display(console, settings, self.last, self.standing, unit)
        self.journal: Journal | None = None  # of the first process

    def run(self) -> Summary:
        """From where the run stands to its end."""
        settings, standing = self.settings, self.standing
        if standing.finished and self._reason():
            self.display.note(f"This run is finished already: {standing.finished}.")
            return self._summary(standing.finished)
        standing.finished = None
        begin = standing.epoch, standing.position
        works = prefetch.works(self.data, self.ranks, settings.accumulate, *begin)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.display)
            if standing.step:
                self.display.note(f"Going on after step {standing.step:,}.")
            if self.ranks.main:
                self.checkpoints.tidy(standing)
                self.journal = Journal(self.folder, standing, settings.tensorboard)
                stack.callback(self.journal.close)
                self.display.note(self.journal.notice)
                self.display.note(self._short_warmup())
            ahead = stack.enter_context(contextlib.closing(prefetch.ahead(works, settings.prefetch)))
            return self._steps(ahead)

    def _steps(self, works: Iterator[Work]) -> Summary:
        # What is due is decided by where the run stands, not by what was done just now: so what a killed
        # process had left undone at this very step is done first by the one that goes on.
        while True:
            if self._validation_is_due():
                self._validate()
            if self._save_is_due():
                self._save()
            reason = self._reason()
            if reason:
                return self._finish(reason)
            self._step(works)
            if self.standing.step % self.settings.log_every == 0:
                self._log()
            self.display.advance(self.standing)
            self._agree()

    # -------------------------------------------------------------------------------- one step

    def _step(self, works: Iterator[Work]) -> None:
        standing, begun = self.standing, time.monotonic()
        work = next(works)
        row = self.learner.step(work, standing.step + 1, self.spent)
        self.pending.append(row)
        self.places.append((work.epoch, work.position))
        standing.step += 1
        standing.epoch, standing.position = work.next
        standing.parts = self.learner.parts
        standing.training += time.monotonic() - begun
        if self.learner.trouble and not self.told_trouble:
            self.told_trouble = True
            self.display.note(
                f"Steps are launched kernel by kernel: recording failed ({self.learner.trouble})."
            )
        if self.compiling:
            self._look()  # waits for the step
            self.display.note(f"The first step took {time.monotonic() - begun:.1f} s, most of it compiling.")
            self.compiling = False

    def _look(self) -> None:
        """Wait for the device, and see what the steps since the last look came to."""
        if not self.pending:
            return
        standing, begun = self.standing, time.monotonic()
        rows: list[list[float]] = torch.stack(self.pending).tolist()
        places, self.places, self.pending = self.places, [], []
        standing.training += time.monotonic() - begun
        for number, (place, row) in enumerate(zip(places, rows, strict=True), standing.step - len(rows) + 1):
            total, count, norm, *_ = row
            fault = standing.trend.add(total / count, norm, self.settings.explode)
            if fault:
                raise self._diverged(fault, number, *place)
            standing.labels += round(count)
            standing.rows.append(row)

    def _diverged(self, fault: str, step: int, epoch: int, position: int) -> Diverged:
        examples = [int(number) for number in self.data.batches(epoch)[position]]
        kept = (
            f"Kept are the state of step {self.checkpoints.saved:,} in {self.checkpoints.folder} "
            "and the best weights so far in model.safetensors."
        )
        message = told(fault, step, self.standing.trend, examples, self.settings, kept)
        return Diverged(message, step, examples)

    def _log(self) -> None:
        self._look()
        standing = self.standing
        total, count, norm, *parts = (math.fsum(column) for column in zip(*standing.rows, strict=True))
        figures = {
            "loss": total / count,
            **{name: part / count for name, part in zip(standing.parts, parts, strict=True)},
            "learning_rate": self.learner.rate(standing.step, self.spent),
            "gradient_norm": norm / len(standing.rows),
            "tokens": standing.labels,
            "tokens/s": count / max(standing.training, 1e-9),
        }
        if self.ranks.device.type == "cuda":
            figures["gpu_gib"] = torch.cuda.max_memory_allocated(self.ranks.device) / 2**30
        standing.rows, standing.training, standing.seconds = [], 0.0, time.monotonic() - self.began
        self._write("train", figures)
        self.display.train(standing, figures)

    def _agree(self) -> None:
        """Heed signals and the clock. Several processes must stop at the same step, so they ask each other.

        That makes them wait for their GPUs, so it is done only now and then.
        """
        if self.ranks.world > 1 and self.standing.step % self.settings.log_every:
            return
        caught, self.standing.seconds = self.ranks.highest(self.signals.caught, time.monotonic() - self.began)
        self.spent = self._spent()
        if caught:
            self._stop(int(caught))

    def _stop(self, caught: int) -> None:
        self._save()
        raise Interrupted(caught, self.standing.step)

    # ------------------------------------------------------------------------ between the steps

    def _validation_is_due(self) -> bool:
        standing, every = self.standing, self.settings.validate_every
        if self.validate is None or standing.step in (0, standing.validated):
            return False
        return standing.step % every == 0 if every else standing.position == 0

    def _validate(self) -> None:
        self._save()  # it may take long, or fail
        standing, saved = self.standing, self.learner.weights()
        better = self._judge(saved)
        if self.ranks.main:
            if better:
                weights.write(saved, self.folder / "model.safetensors")
            if self.settings.average > 1:
                weights.write(saved, self.checkpoints.snapshot(standing.step))
        standing.worse = 0 if better else standing.worse + 1
        standing.validated = standing.step
        if self.settings.average > 1:
            standing.snapshots = [*standing.snapshots, standing.step][-self.settings.average :]
        self._save()

    def _judge(self, saved: Mapping[str, Tensor], averaged: int = 0) -> bool:
        """Validate these weights, in the first process. Whether they are the best so far, for all of them."""
        stopped, better = 0, False
        if self.ranks.main:
            try:
                better = self._judge_here(saved, averaged)
            except Now:  # nothing has changed yet: the next process validates again
                stopped = self.signals.caught
        signal, good = self.ranks.from_main(stopped, better)
        if signal:
            self._stop(int(signal))
        return bool(good)

    def _judge_here(self, saved: Mapping[str, Tensor], averaged: int) -> bool:
        standing = self.standing
        assert self.validate is not None
        self.display.doing("validating …")
        reseed(self.ranks.device, self.settings.seed, standing.step, VALIDATION)
        with self.signals.at_once(), self.learner.judged(saved) as model:
            report = self.validate(model)
        better = report.beats(standing.best.figures if standing.best else None)
        if better:
            standing.best = Best(standing.step, report.best, report.value, dict(report.figures), averaged)
        standing.seconds = time.monotonic() - self.began
        self._write("average" if averaged else "validation", {**report.figures, "best": better})
        if self.journal is not None:
            self.journal.show(report.samples, standing)
        of = f"the mean of {averaged} weights" if averaged else f"step {standing.step:,}"
        self.display.validation(report, of, better)
        self._sound_alarms()
        return better

    def _sound_alarms(self) -> None:
        """Say what is wrong with the attention, each thing once while it lasts."""
        found = {alarm.partition(":")[0]: alarm for alarm in self._alarms()}
        for kind, alarm in found.items():
            if kind not in self.alarmed:
                self.display.alarm(alarm)
            if self.journal is not None:
                self.journal.alarm(alarm, self.standing)
        self.alarmed = set(found)

    def _alarms(self) -> list[str]:
        """By the validations so far; where no end is in sight, ten of them count as a training."""
        figures = validations(self.folder)
        bounded = self.last is not None or self.settings.minutes is not None
        done = self.display.share(self.standing) if bounded else min(1.0, len(figures) / 10)
        return alarms(figures, 1.0 if self.standing.finished else done)

    def _save_is_due(self) -> bool:
        step, every, saved = self.standing.step, self.settings.save_every, self.checkpoints.saved
        return saved is None or (saved != step and every > 0 and step % every == 0)

    def _save(self) -> None:
        self._look()
        standing = self.standing
        saved: dict[str, Tensor] = {}
        remembered: dict[str, Tensor] = {}
        if self.checkpoints.saved != standing.step:
            saved, remembered = self.learner.weights(), self.learner.moments()
            # The newest, as long as none was found best; but none that has learned nothing.
            if self.ranks.main and standing.best is None and standing.step:
                weights.write(saved, self.folder / "model.safetensors")
        if self.journal is not None:
            standing.seconds, standing.metrics = time.monotonic() - self.began, self.journal.sync()
            self.checkpoints.save(standing, saved, remembered)
        self.checkpoints.saved = standing.step

    def _write(self, event: str, figures: Mapping[str, float]) -> None:
        if self.journal is not None:
            self.journal.write(event, self.standing, figures)

    # --------------------------------------------------------------------- beginning and end

    def _restored(self) -> Standing:
        found = self.checkpoints.load()
        standing = found[0] if found else Standing()
        highest, lowest = self.ranks.highest(standing.step, -standing.step)
        if highest != -lowest:
            raise InputError(
                f"process {self.ranks.rank} finds the state of step {standing.step} in "
                f"{self.checkpoints.folder}, another that of step {highest:.0f}: all must see the same folder"
            )
        if found:
            self.learner.restore(found[1], found[2], f"the weights in {self.checkpoints.folder}")
        return standing

    def _spent(self) -> float:
        """The share of the minutes that is over. All processes agree on it: the learning rate needs it."""
        minutes = self.settings.minutes
        return 0.0 if minutes is None else self.standing.seconds / (60 * minutes)

    def _reason(self) -> str | None:
        """Why training is over; None: it is not."""
        settings, standing = self.settings, self.standing
        if settings.steps and standing.step >= settings.steps:
            return f"all {settings.steps:,} steps are done"
        if settings.epochs and standing.epoch >= settings.epochs:
            return f"all {settings.epochs:,} epochs are done"
        if self.spent >= 1:
            return f"{settings.minutes:g} minutes are over"
        if settings.patience and standing.worse >= settings.patience:
            return f"{settings.patience} validations in a row were no better"
        return None

    def _finish(self, reason: str) -> Summary:
        standing = self.standing
        self._look()
        if standing.rows:
            self._log()
        if self.validate is not None and standing.validated != standing.step:
            self._validate()
        self._save()  # before the mean is tried on the model
        if len(standing.snapshots) > 1:
            self._validate_average()
        standing.finished = reason
        self._save()
        summary = self._summary(reason)
        self.display.done(summary)
        return summary

    def _validate_average(self) -> None:
        """The mean of the last validated weights replaces the best ones, if it does better."""
        files, lost = self.checkpoints.snapshots(self.standing) if self.ranks.main else ([], [])
        if lost:
            left = f"the mean is that of {len(files)}" if len(files) > 1 else "there is no mean to try"
            self.display.note(f"Of the weights to be averaged, these are lost: {', '.join(lost)}; {left}.")
        (count,) = self.ranks.from_main(len(files))
        if count < 2:
            return
        mean = weights.average(files) if self.ranks.main else {}
        if self._judge(mean, averaged=len(files)) and self.ranks.main:
            weights.write(mean, self.folder / "model.safetensors")

    def _short_warmup(self) -> str:
        """A line where the training is shorter than its warm-up was to be."""
        asked, warmup, last = self.asked_warmup, self.settings.warmup, self.last
        if not asked or last is None or last > asked:
            return ""
        told = f"The training has {last:,} steps, and train.warmup is {asked:,}: "
        if warmup != asked:
            return told + f"the warm-up is shortened to {warmup:,}, a tenth."
        return told + "the learning rate never comes to its highest; lower train.warmup, or train longer."

    def _summary(self, reason: str) -> Summary:
        self.ranks.wait()  # for what the first process wrote
        weights.load_weights(self.learner.model, self.folder / "model.safetensors")
        self.learner.model.eval()
        standing = self.standing
        return Summary(
            folder=self.folder,
            steps=standing.step,
            epochs=standing.epoch,
            seconds=standing.seconds,
            labels=standing.labels,
            reason=reason,
            best=standing.best,
            alarms=tuple(self._alarms()) if self.ranks.main else (),
        )


@contextlib.contextmanager
def _fast_products() -> Iterator[None]:
    """Products of float32 matrices on the tensor cores of a GPU (TF32)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
