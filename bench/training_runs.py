"""Training steps as benchmarks measure them: rounds of several steps, without waiting in between.

A step copies a batch from the host to the device and computes loss, gradients and Adam (fused).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import report as r
import torch
from report import Measurement, Report, Row, Run, Settings
from torch import Tensor, nn

from jumok.training.config import TrainConfig
from jumok.training.cuda_graphs import CudaGraphGradients
from jumok.training.distributed import DistributedRanks
from jumok.training.learner import Learner
from jumok.training.prefetch import StepBatches, pin_memory

# An implementation is skipped if fewer seconds are left than it may take on a GPU, compiled or not.
COMPILE_SECONDS, LAUNCH_SECONDS = 60, 15
Objective = Callable[[Any], Tensor]  # from a batch on the device to the loss per label


@dataclass(frozen=True)
class TrainingRun:
    """A round of training steps."""

    run: Run  # returns the loss of each step
    # A number that must be equal for all implementations, to about a percent; default: the loss of the first step.
    start: Callable[[], float] | None = None
    capture_error: Callable[[], str | None] = lambda: None  # why steps are not CUDA graphs


@dataclass(frozen=True)
class Implementation:
    """One implementation of a row."""

    name: str
    build: Callable[[], TrainingRun]
    compiles: bool = False


def measure_implementation(
    report: Report, row: Row, implementation: Implementation, count: str, rate: str
) -> tuple[Measurement, list[Any]]:
    """Build one implementation and measure it; ``rate`` is the number ``row[count]`` per second.

    Returns the measurement and the losses of the first and of the last round, if there were any.
    """
    on_gpu = report.device.type == "cuda"
    seconds = COMPILE_SECONDS if implementation.compiles else LAUNCH_SECONDS
    if on_gpu and report.seconds_left < seconds:
        report.failed(
            row, implementation.name, f"skipped, it may take {seconds} s and {report.seconds_left:.0f} are left"
        )
        return row["implementations"][implementation.name], []
    rounds: list[Any] = []
    try:
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        training_run = implementation.build()
        start = training_run.start() if training_run.start else None
        peaks: list[float] = []  # all memory: weights, optimizer state, activations or graphs

        def run() -> None:
            losses = training_run.run()
            rounds[:] = [rounds[0] if rounds else [x.clone() for x in losses or ()], losses]
            if on_gpu and not peaks:  # the first round allocates everything
                peaks.append((torch.cuda.max_memory_allocated() - before) / r.MIB)

        result = report.measure(row, implementation.name, run, hide_launches=False)
        if start is not None or rounds:
            result["start"] = float(rounds[0][0]) if start is None else start
        if "ms" in result:
            result[rate] = row[count] / result["ms"] * 1e3
            if peaks:
                result["peak_mib"] = peaks[0]
            result["capture_error"] = training_run.capture_error()
    except Exception as error:
        report.failed(row, implementation.name, r.short(error))
    torch._dynamo.reset()  # code compiled for one implementation must not make the shapes of the next one dynamic
    r.free_memory(report.device)
    report.save()
    return row["implementations"][implementation.name], rounds


def build_round(
    settings: Settings,
    model: nn.Module,
    objective: Objective,
    batches: Sequence[Any],
    *,
    start: Callable[[], float] | None = None,
    graph: bool = False,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
) -> TrainingRun:
    """A round of training steps; as a ``graph``, loss and gradients are one CUDA graph."""

    def run(batch: Any, scale: Tensor | None = None) -> Tensor:
        with settings.autocast():
            value = objective(batch)
        (value if scale is None else value * scale).backward()
        return value.detach()

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=1e-4, betas=betas, eps=eps, fused=True)
    gradients: CudaGraphGradients[Any] = CudaGraphGradients(run, trainable, settings.device)

    def step(batch: Any) -> Tensor:
        value = gradients(batch, 1.0) if graph else run(batch.to(settings.device))
        optimizer.step()
        optimizer.zero_grad()
        return value

    return TrainingRun(lambda: [step(batch) for batch in batches], start, lambda: gradients.capture_error)


def build_start(settings: Settings, model: nn.Module, objective: Objective, batch: Any) -> Callable[[], float]:
    """The loss before training, without dropout."""

    @torch.no_grad()
    def start() -> float:
        model.eval()
        with settings.autocast():
            value = float(objective(batch.to(settings.device)))
        model.train()
        return value

    return start


def build_learner_round(
    settings: Settings, model: nn.Module, config: TrainConfig, batches: Sequence[Any]
) -> TrainingRun:
    """A round of the steps of `jumok train`. It fails if steps should be CUDA graphs and cannot be captured."""
    learner = Learner(model, config, DistributedRanks(device=settings.device), None)
    step_batches = [StepBatches(0, n, (0, n + 1), [(pin_batch(settings, batch), 1)]) for n, batch in enumerate(batches)]
    step = 0

    def run() -> list[Tensor]:
        nonlocal step
        losses = []
        for batch in step_batches:
            step += 1
            totals = learner.step(batch, step)
            losses.append(totals[0] / totals[1])
        if learner.capture_error:
            raise RuntimeError(f"CUDA graphs of steps could not be captured: {learner.capture_error}")
        return losses

    return TrainingRun(run)


def pin_batch(settings: Settings, batch: Any) -> Any:
    """Return a batch on the host, as the threads of a training loop do."""
    return pin_memory(batch) if settings.on_gpu else batch


def count_weights(model: nn.Module) -> int:
    """Number of trained weights. Marian's table of positions is a parameter, but gets no gradient."""
    named = model.named_parameters()
    return sum(parameter.numel() for name, parameter in named if "embed_positions" not in name)
