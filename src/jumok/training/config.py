"""How to train: the ``train:`` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

__all__ = ["TrainConfig"]


@dataclass(frozen=True)
class TrainConfig:
    """When to stop, what one step does, and what happens between the steps.

    Training ends at whichever of ``max_steps``, ``max_epochs``, ``max_minutes`` and ``patience`` comes first.

    >>> Settings(steps=1000, schedule="cosine", warmup=100).learning_rate
    0.001
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    # When to stop.
    max_steps: int | None = None
    max_epochs: int | None = None
    max_minutes: float | None = None  # of all sessions of the run together
    patience: int = 10  # validations in a row without a better score; 0: any number

    # One step: one batch over all processes, one update of the weights.
    batch_tokens: int = 4096  # the size of that batch
    accumulation_steps: int = (
        1  # parts that a process works on one after the other, where all at once would not fit
    )
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    learning_rate: float = 1e-3  # the highest, reached after the warm-up
    schedule: Literal["constant", "inverse_sqrt", "linear", "cosine"] = "inverse_sqrt"
    warmup_steps: int = 1000  # steps
    betas: tuple[float, float] = (0.9, 0.98)  # of adam and adamw
    eps: float = 1e-9
    momentum: float = 0.0  # of sgd
    weight_decay: float = 0.0  # of matrices; biases and norms have none
    max_grad_norm: float = 1.0  # the longest gradient; 0: any
    divergence_factor: float = 5.0  # a loss of so many times the usual, for long, is divergence; 0: no matter
    seed: int = 1

    # Between the steps: every so many of them.
    validate_every: int = 0  # 0: at the end of each epoch
    save_every: int = 1000  # besides validations; 0: only for them
    log_every: int = 50
    average_checkpoints: int = 5  # the last so many validated weights are averaged at the end; 0: none
    tensorboard: bool = True

    # Where and how.
    device: str = "auto"  # a GPU if there is one; or what torch calls it
    precision: Literal["auto", "float32", "bf16", "fp16"] = "auto"  # auto: bf16 on GPUs that have it
    compile: Literal["auto"] | bool = "auto"  # auto: on a GPU, unless the model has compiles = False
    cuda_graphs: Literal["auto"] | bool = (
        "auto"  # steps as CUDA graphs; auto: on one GPU, unless it accumulates
    )
    parallel: Literal["ddp", "fsdp"] = "ddp"  # with torchrun: weights whole on each process, or in shards
    prefetch_batches: int = 4  # batches made ready while the one before is worked on

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "minutes"):
            self._require(name, getattr(self, name) is None or getattr(self, name) > 0, "more than 0")
        for name in ("tokens", "accumulate", "learning_rate", "eps", "log_every"):
            self._require(name, getattr(self, name) > 0, "more than 0")
        for name in ("patience", "warmup", "weight_decay", "clip", "seed"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("validate_every", "save_every", "average", "prefetch"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        self._require(
            "explode", self.divergence_factor == 0 or self.divergence_factor > 1, "0, or more than 1"
        )
        self._require("momentum", 0 <= self.momentum < 1, "from 0 to below 1")
        self._require("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1")
        self._check_stop_conditions()
        try:
            torch.device("cpu" if self.device == "auto" else self.device)
        except RuntimeError:
            raise ValueError(f"device={self.device!r}: auto, cpu, cuda or cuda:1 is expected") from None

    def _check_stop_conditions(self) -> None:
        if not (self.max_steps or self.max_epochs or self.max_minutes or self.patience):
            raise ValueError("nothing ends the training: set steps, epochs, minutes or patience")
        if self.schedule in ("linear", "cosine"):
            if not (self.max_steps or self.max_epochs or self.max_minutes):
                raise ValueError(
                    f"schedule={self.schedule} reaches 0 at the end: set steps, epochs or minutes"
                )
            if self.max_steps and self.warmup_steps >= self.max_steps:
                raise ValueError(f"warmup={self.warmup_steps} must end before steps={self.max_steps}, where the "
                                 f"{self.schedule} schedule does")  # fmt: skip

    def _require(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise ValueError(f"{name}={getattr(self, name)}: {expected} is expected")
