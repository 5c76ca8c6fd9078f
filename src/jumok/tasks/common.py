"""What tasks share: what is asked of them, where a model goes, how its batches are laid out, what is next."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import nn

from jumok.attention.paths.varlen import has_fast_varlen_path
from jumok.errors import InputError
from jumok.files import atomic_write, read_json
from jumok.run import Run
from jumok.training import DistributedRanks, TrainConfig, cuda_graphs
from jumok.training.precision import select_autocast_dtype

__all__ = [
    "GenerationOptions",
    "PredictOptions",
    "format_next_commands",
    "get_cache_folder",
    "is_packing_fast",
    "move_to_device",
    "resolve_batch_layout",
    "resolve_held_out_fraction",
]

M = TypeVar("M", bound=nn.Module)


class AttentionSizes(Protocol):
    """What of a model's configuration decides how fast its attention is."""

    @property
    def width(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def attention_dropout(self) -> float: ...


@dataclass(frozen=True)
class PredictOptions:
    """The options of ``jumok run``. A task's ``Search`` refuses those that mean nothing to it."""

    beam_size: int | None = None  # None: what the recipe says
    n_best: int = 1
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    style_audio: str | None = None  # of a voice: the recording that it is to sound like
    style_weights: str | None = None  # or how much of which style tokens

    accepts_style: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.accepts_style and (self.style_audio is not None or self.style_weights is not None):
            raise InputError("--style-from and --token are for voices; this run does not speak")


@dataclass(frozen=True)
class GenerationOptions(PredictOptions):
    """The same, of a model that writes text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.top_p <= 1 or self.temperature <= 0:
            raise InputError("--top-p is a share above 0 and at most 1, --temperature a number above 0")
        if self.sample and (self.beam_size is not None or self.n_best > 1):
            raise InputError("--sample draws one text; it goes with neither --beam nor --n-best")
        if self.beam_size is not None and self.n_best > self.beam_size:
            raise InputError(f"--n-best {self.n_best} needs a beam of as many; --beam {self.beam_size} came")


def resolve_held_out_fraction(
    folder: Path, unit: str, count_examples: Callable[[], int], num_wanted: int, max_fraction: float
) -> float:
    """Which share of the data is held out for one split. It is written down, so that resuming agrees."""
    path = folder / "data" / "held_out.json"
    if path.is_file():
        share = read_json(path, dict).get("fraction")
        if not isinstance(share, int | float):
            raise InputError(f"{path} is damaged: expected a number as fraction")
        return float(share)
    many = count_examples()
    share = min(max_fraction, num_wanted / many)
    with atomic_write(path) as part:
        part.write_text(json.dumps({unit: many, "fraction": share}), encoding="utf-8")
    return share


def get_cache_folder() -> Path:
    """Where what is known of files is kept for all runs: the folder JUMOK_CACHE, or one of the user's."""
    return Path(os.environ.get("JUMOK_CACHE") or Path.home() / ".cache" / "jumok")


def move_to_device(model: M, device: str = "auto") -> M:
    """The model on a device, ready to be used; auto: a GPU if there is one."""
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        return model.to(place).eval()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {error}") from None


def is_packing_fast(
    config: AttentionSizes, max_tokens: int, settings: TrainConfig, device: torch.device
) -> bool:
    """Whether texts of up to so many tokens are learned from fastest when they lie end to end."""
    half = select_autocast_dtype(settings, device) is not None
    return half and has_fast_varlen_path(
        device, max_tokens, config.width // config.num_heads, config.attention_dropout
    )


def resolve_batch_layout(run: Run, ranks: DistributedRanks, packed: bool) -> dict[str, bool]:
    """How batches are laid out. The machine decides when a run begins; elsewhere it goes on with the same."""
    path = run.folder / "data" / "layout.json"
    if run.has_checkpoint and path.is_file():
        kept: dict[str, bool] = read_json(path, dict)
        return kept
    found = {
        "packed": packed,
        "fixed_shapes": cuda_graphs.should_use_cuda_graphs(run.recipe.train, ranks.device, ranks.world_size),
    }
    if ranks.is_main and not run.has_checkpoint:
        with atomic_write(path) as part:
            part.write_text(json.dumps(found), encoding="utf-8")
    return found


def format_next_commands(run: Run, description: str, input_example: str = "…") -> str:
    """What a trained run is good for; ``description``, as in "translate a text"."""
    folder = shlex.quote(str(run.folder))
    return "\n".join(
        [
            "Next:",
            f'  jumok run {folder} "{input_example}"    {description}, a file or standard input',
            f"  jumok eval {folder}       score it on the test data",
        ]
    )
