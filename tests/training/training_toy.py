"""A model and data so small that a run takes milliseconds.

They have dropout, tied weights, examples of different sizes, layers in a list and a buffer.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jumok.batches.tokens import Loss
from jumok.training import TrainConfig, ValidationReport
from jumok.training.weights import read_safetensors

TIMES = {"seconds", "labels_per_second"}  # metrics that differ between runs


@dataclass(frozen=True, eq=False)
class Points:
    x: Tensor  # (B, 3)
    y: Tensor  # (B, 2)
    sizes: Tensor  # (B,), weight of each example
    count: int
    index: tuple[int, ...]

    @property
    def graph_key(self) -> Hashable:
        return self.x.shape, self.count

    def to(self, device: torch.device) -> Points:
        x, y, sizes = (t.to(device, non_blocking=True) for t in (self.x, self.y, self.sizes))
        return replace(self, x=x, y=y, sizes=sizes)


class PointData:
    """``length`` examples in batches of ``size``, in another order each epoch."""

    def __init__(self, length: int = 29, size: int = 7, dtype: torch.dtype = torch.float32) -> None:
        numbers = torch.Generator().manual_seed(5)
        self.x = torch.randn(length, 3, generator=numbers, dtype=dtype)
        self.y = self.x @ torch.randn(3, 2, generator=numbers, dtype=dtype)
        self.size = size

    def batches(self, epoch: int) -> list[np.ndarray]:
        order = np.random.default_rng((11, epoch)).permutation(len(self.x))
        return np.split(order, range(self.size, len(order), self.size))

    def divide(self, index: np.ndarray, parts: int) -> Sequence[np.ndarray]:
        return np.array_split(index, parts)

    def collate(self, index: np.ndarray) -> Points:
        rows = torch.as_tensor(index)
        sizes = 1 + rows % 3
        return Points(self.x[rows], self.y[rows], sizes, int(sizes.sum()), tuple(index.tolist()))


class Toy(nn.Module):
    def __init__(self, dropout: float = 0.0, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 5)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)])
        self.norm = nn.LayerNorm(5)
        self.outer = nn.Linear(5, 3, bias=False)
        self.outer.weight = nn.Parameter(self.inner.weight.detach().T.contiguous())
        self.again = nn.Linear(5, 3, bias=False)
        self.again.weight = self.outer.weight  # tied
        self.read = nn.Linear(3, 2)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        x = self.norm(x)
        return self.read(self.outer(x) + self.again(x)) * self.scale

    def loss(self, batch: Points) -> Loss:
        errors = ((self(batch.x) - batch.y) ** 2).sum(1)  # (B,)
        total = (errors * batch.sizes).sum()
        return Loss(total, batch.count, {"nll": errors.detach().sum()})


def validate_toy(model: nn.Module, data: PointData | None = None) -> ValidationReport:
    """Validate by the mean error over all examples; lower is better."""
    data = data or PointData()
    loss = model.loss(data.collate(np.arange(len(data.x))))
    return ValidationReport({"error": loss.total.item() / loss.count}, "error", higher_is_better=False)


def quick(**changes: Any) -> TrainConfig:
    """Settings of a short training that logs each step."""
    usual: dict[str, Any] = {"max_steps": 11, "warmup_steps": 0, "learning_rate": 0.01, "log_every": 1}
    return TrainConfig(**{**usual, "tensorboard": False, "device": "cpu", **changes})


def read_metrics(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in every
        if event in (None, line["event"])
    ]


def read_state(folder: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint, and the best weights."""
    (newest,) = (folder / "state").glob("[0-9]*")
    files = {name: newest / f"{name}.safetensors" for name in ("model", "optimizer")}
    files["best"] = folder / "model.safetensors"
    return {f"{kind}: {name}": x for kind, file in files.items() for name, x in read_safetensors(file).items()}


def tensors_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether all tensors are exactly equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
