"""Settings of training: the ``train:`` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from jumok.config import Config


@dataclass(frozen=True)
class TrainConfig(Config):
    """When to stop, what one step does, and what happens between steps.

    Training ends at whichever of ``max_steps``, ``max_epochs``, ``max_minutes`` and ``patience`` comes first.

    >>> TrainConfig(max_steps=1000, schedule="cosine", warmup_steps=100).learning_rate
    0.001
    """

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
        counts = ("patience", "warmup_steps", "validate_every", "save_every", "average_checkpoints", "prefetch_batches")
        self.check_ranges(
            positive=("max_steps", "max_epochs", "batch_tokens", "accumulation_steps", "log_every"),
            non_negative=(*counts, "weight_decay", "max_grad_norm", "seed"),
            above_zero=("max_minutes", "learning_rate", "eps"),
            fraction=("momentum",),
        )
        if self.divergence_factor != 0 and not self.divergence_factor > 1:
            raise ValueError(f"divergence_factor={self.divergence_factor}: 0, or more than 1 is expected")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: two numbers from 0 to below 1 are expected")
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
