"""What two processes do, started by torchrun: each case trains in a folder of its own under FOLDER.

    torchrun --nproc-per-node 2 training_ranks.py FOLDER

The last case fails in the second process only, so the whole command must fail, and not hang.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from training_toy import PointData, Points, Toy, quick, validate_toy

from jumok.errors import InputError
from jumok.training import (
    DistributedRanks,
    DivergenceError,
    TrainConfig,
    TrainingInterrupted,
    ValidationReport,
    init_distributed,
    train,
)

DATA = {"length": 29, "size": 7, "dtype": torch.float64}  # batches of 7, 7, 7, 7 and 1
CASES: dict[str, TrainConfig] = {
    "ddp": quick(),
    "ddp in turns": quick(accumulation_steps=2),
    "ddp with sgd": quick(optimizer="sgd", momentum=0.9, max_grad_norm=0.0),
    "fsdp": quick(parallel="fsdp"),
    "fsdp with sgd": quick(parallel="fsdp", optimizer="sgd", momentum=0.9, weight_decay=0.01),
    "fsdp with plain sgd": quick(parallel="fsdp", optimizer="sgd"),
    # Products stay float64 here, but the loss is scaled.
    "ddp in float16": quick(precision="fp16"),
    "fsdp in float16": quick(parallel="fsdp", precision="fp16", optimizer="sgd"),
    "fsdp in turns": quick(parallel="fsdp", accumulation_steps=2, weight_decay=0.01, optimizer="adamw"),
}


def cases(folder: Path, ranks: DistributedRanks) -> None:
    def validate(model: nn.Module) -> ValidationReport:
        assert ranks.is_main
        assert type(model) is Toy  # a plain model, that one process can use alone
        return validate_toy(model, PointData(**DATA))

    def run(name: str, settings: TrainConfig, data: PointData | None = None) -> Toy:
        model = Toy(seed=3 + ranks.rank).double()  # all begin with the first one's weights
        train(model, data or PointData(**DATA), settings, folder / name, validate=validate, ranks=ranks)
        return model

    for name, settings in CASES.items():
        run(name, settings)
    for kind in ("ddp", "fsdp"):  # stopped and gone on
        run(f"{kind} again", quick(max_steps=4, parallel=kind))
        model = run(f"{kind} again", quick(parallel=kind))
        alike(model, ranks)
    run("half", quick(max_steps=6))  # to be finished by one process

    try:
        run("signal", quick(max_steps=50, log_every=4), Signalled(ranks))
    except TrainingInterrupted as stop:
        (folder / f"interrupted {ranks.rank}").write_text(f"{stop.exit_status} {stop.step}")
    try:
        run("diverged", quick(), Poisoned(ranks))
    except DivergenceError as found:
        (folder / f"diverged {ranks.rank}").write_text(f"{found.step} {sorted(found.examples)}")
    run("broken", quick(), Broken(ranks))


def alike(model: nn.Module, ranks: DistributedRanks) -> None:
    """All processes hold the same weights in the end."""
    total = sum(whole(p).abs().sum() for p in model.parameters()).item()
    highest, lowest = ranks.all_reduce_max(total, -total)
    assert highest == -lowest


def whole(p: Tensor) -> Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p


class Signalled(PointData):
    """Only the second process gets the signal; both stop, at the same step."""

    def __init__(self, ranks: DistributedRanks) -> None:
        super().__init__(**DATA)
        self.ranks, self.made = ranks, 0

    def collate(self, index: np.ndarray) -> Points:
        self.made += 1
        if self.made == 11 and self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().collate(index)


class Poisoned(PointData):
    """One example that the second process gets is not a number; both must find out."""

    def __init__(self, ranks: DistributedRanks) -> None:
        super().__init__(**DATA)
        self.ranks, self.made = ranks, 0

    def collate(self, index: np.ndarray) -> Points:
        self.made += 1
        points = super().collate(index)
        if self.made == 3 and self.ranks.rank == 1:
            points.y.fill_(float("nan"))
        return points


class Broken(PointData):
    def __init__(self, ranks: DistributedRanks) -> None:
        super().__init__(**DATA)
        self.ranks = ranks

    def collate(self, index: np.ndarray) -> Points:
        if self.ranks.rank == 1:
            raise InputError("an example of the second process is not well")
        return super().collate(index)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with init_distributed("cpu") as among:
        cases(Path(sys.argv[1]), among)
