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

from jumok.attention.packed import is_fast
from jumok.errors import InputError
from jumok.files import read_json, written
from jumok.run import Run
from jumok.training import Ranks, Settings, graphs
from jumok.training.precision import autocast_dtype

__all__ = [
    "Asked",
    "AskedOfWriter",
    "cache_folder",
    "held_out_share",
    "layout",
    "next_commands",
    "packs_fast",
    "placed",
]

M = TypeVar("M", bound=nn.Module)


class Sizes(Protocol):
    """What of a model's configuration decides how fast its attention is."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def attention_dropout(self) -> float: ...


@dataclass(frozen=True)
class Asked:
    """The options of ``jumok run``. A task's ``Search`` refuses those that mean nothing to it."""

    beam: int | None = None  # None: what the recipe says
    n_best: int = 1
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    style_from: str | None = None  # of a voice: the recording that it is to sound like
    token: str | None = None  # or how much of which style tokens

    has_style: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.has_style and (self.style_from is not None or self.token is not None):
            raise InputError("--style-from and --token are for voices; this run does not speak")


@dataclass(frozen=True)
class AskedOfWriter(Asked):
    """The same, of a model that writes text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.top_p <= 1 or self.temperature <= 0:
            raise InputError("--top-p is a share above 0 and at most 1, --temperature a number above 0")
        if self.sample and (self.beam is not None or self.n_best > 1):
            raise InputError("--sample draws one text; it goes with neither --beam nor --n-best")
        if self.beam is not None and self.n_best > self.beam:
            raise InputError(f"--n-best {self.n_best} needs a beam of as many; --beam {self.beam} came")


def held_out_share(folder: Path, what: str, count: Callable[[], int], wanted: int, most: float) -> float:
    """Which share of the data is held out for one split. It is written down, so that resuming agrees."""
    path = folder / "data" / "held_out.json"
    if path.is_file():
        share = read_json(path, dict).get("share")
        if not isinstance(share, int | float):
            raise InputError(f"{path} is damaged: expected a number as share")
        return float(share)
    many = count()
    share = min(most, wanted / many)
    with written(path) as part:
        part.write_text(json.dumps({what: many, "share": share}), encoding="utf-8")
    return share


def cache_folder() -> Path:
    """Where what is known of files is kept for all runs: the folder JUMOK_CACHE, or one of the user's."""
    return Path(os.environ.get("JUMOK_CACHE") or Path.home() / ".cache" / "jumok")


def placed(model: M, device: str = "auto") -> M:
    """The model on a device, ready to be used; auto: a GPU if there is one."""
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        return model.to(place).eval()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {error}") from None


def packs_fast(model: Sizes, longest: int, settings: Settings, device: torch.device) -> bool:
    """Whether texts of up to so many tokens are learned from fastest when they lie end to end."""
    half = autocast_dtype(settings, device) is not None
    return half and is_fast(device, longest, model.width // model.heads, model.attention_dropout)


def layout(run: Run, ranks: Ranks, packed: bool) -> dict[str, bool]:
    """How batches are laid out. The machine decides when a run begins; elsewhere it goes on with the same."""
    path = run.folder / "data" / "layout.json"
    if run.has_begun and path.is_file():
        kept: dict[str, bool] = read_json(path, dict)
        return kept
    found = {"packed": packed, "alike": graphs.wanted(run.recipe.train, ranks.device, ranks.world)}
    if ranks.main and not run.has_begun:
        with written(path) as part:
            part.write_text(json.dumps(found), encoding="utf-8")
    return found


def next_commands(run: Run, does: str, example: str = "…") -> str:
    """What a trained run is good for; ``does``, as in "translate a text"."""
    folder = shlex.quote(str(run.folder))
    return "\n".join(
        [
            "Next:",
            f'  jumok run {folder} "{example}"    {does}, a file or standard input',
            f"  jumok eval {folder}       score it on the test data",
        ]
    )
