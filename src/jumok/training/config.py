"""Settings of training: the ``train:`` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch


@dataclass(frozen=True)
class TrainConfig:
    """When to stop, what one step does, and what happens between steps.

    Training ends at whichever of ``max_steps``, ``max_epochs``, ``max_minutes`` and ``patience`` comes first.

    >>> TrainConfig(max_steps=1000, schedule="cosine", warmup_steps=100).learning_rate
    0.001
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    # When to stop.
    max_steps: int | None = None
    max_epochs: int | None = None
    max_minutes: float | None = None  # total over all sessions of the run
    patience: int = 10  # consecutive validations without improvement; 0: no limit

    # One step: one batch over all processes and one update of the weights.
    batch_tokens: int = 4096  # size of that batch
    accumulation_steps: int = 1  # micro-batches per process, if a whole batch does not fit into memory
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    learning_rate: float = 1e-3  # peak, reached after the warm-up
    schedule: Literal["constant", "inverse_sqrt", "linear", "cosine"] = "inverse_sqrt"
    warmup_steps: int = 1000
    betas: tuple[float, float] = (0.9, 0.98)  # adam and adamw
    eps: float = 1e-9
    momentum: float = 0.0  # sgd
    weight_decay: float = 0.0  # applied to matrices, not to biases and norms
    max_grad_norm: float = 1.0  # gradient clipping; 0: none
    divergence_factor: float = 5.0  # stop if the loss stays above this multiple of its mean; 0: never
    seed: int = 1

    # Intervals, in steps.
    validate_every: int = 0  # 0: at the end of each epoch
    save_every: int = 1000  # in addition to validations; 0: only at validations
    log_every: int = 50
    average_checkpoints: int = 5  # average the weights of this many validations at the end; 0: none
    tensorboard: bool = True

    # Hardware.
    device: str = "auto"  # auto: a GPU if there is one; or a torch device
    precision: Literal["auto", "float32", "bf16", "fp16"] = "auto"  # auto: bf16 on GPUs that support it
    compile: Literal["auto"] | bool = "auto"  # auto: with CUDA graphs, if the model supports it
    cuda_graphs: Literal["auto"] | bool = "auto"  # auto: on one GPU, without gradient accumulation
    parallel: Literal["ddp", "fsdp"] = "ddp"  # with torchrun: replicate or shard the weights
    prefetch_batches: int = 4  # batches prepared in the background

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_epochs", "max_minutes"):
            self._require(name, getattr(self, name) is None or getattr(self, name) > 0, "more than 0")
        for name in ("batch_tokens", "accumulation_steps", "learning_rate", "eps", "log_every"):
            self._require(name, getattr(self, name) > 0, "more than 0")
        for name in ("patience", "warmup_steps", "weight_decay", "max_grad_norm", "seed"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("validate_every", "save_every", "average_checkpoints", "prefetch_batches"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        factor = self.divergence_factor
        self._require("divergence_factor", factor == 0 or factor > 1, "0, or more than 1")
        self._require("momentum", 0 <= self.momentum < 1, "from 0 to below 1")
        self._require("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1")
        self._check_stop_conditions()
        try:
            torch.device("cpu" if self.device == "auto" else self.device)
        except RuntimeError:
            raise ValueError(f"device={self.device!r}: auto, cpu, cuda or cuda:1 is expected") from None

    def _check_stop_conditions(self) -> None:
        if not (self.max_steps or self.max_epochs or self.max_minutes or self.patience):
            raise ValueError("nothing ends the training: set max_steps, max_epochs, max_minutes or patience")
        if self.schedule in ("linear", "cosine"):
            if not (self.max_steps or self.max_epochs or self.max_minutes):
                raise ValueError(
                    f"schedule={self.schedule} reaches 0 at the end: set max_steps, max_epochs or max_minutes"
                )
            if self.max_steps and self.warmup_steps >= self.max_steps:
                raise ValueError(
                    f"warmup_steps={self.warmup_steps} must be less than max_steps={self.max_steps}, "
                    f"where the {self.schedule} schedule ends"
                )

    def _require(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise ValueError(f"{name}={getattr(self, name)}: {expected} is expected")
