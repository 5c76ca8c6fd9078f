"""The state of a run on the disk: all that the next process needs to go on as if nothing had happened.

::

    state/00001200/state.json              where the run stands (Standing)
                   model.safetensors       the weights
                   optimizer.safetensors   what the optimiser remembers, by the names of the parameters
    state/validated/00001000.safetensors   weights at the last validations, to be averaged at the end

A state is written under another name, synced and renamed; the one before is removed after that. So whenever
the process is killed, the newest folder with a proper name is whole. Random numbers are not in it, since each
step has a seed of its own (``learner.reseed``). Nothing here is a pickle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from jumok.errors import InputError
from jumok.files import atomic_write, remove_atomically, remove_partial_files
from jumok.training import weights
from jumok.training.divergence import LossTrend
from jumok.training.report import BestValidation

__all__ = ["CheckpointManager", "TrainState"]

FORMAT_VERSION = 1


@dataclass
class TrainState:
    """Where a run stands after ``step`` steps."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0  # how many batches of this epoch are done
    seconds: float = 0.0
    num_labels: int = 0  # trained on so far
    unlogged_seconds: float = 0.0  # seconds of steps not logged yet, without validation and saving
    last_validation_step: int = 0  # the step of the last validation
    num_bad_validations: int = 0  # validations since the best one
    best: BestValidation | None = None
    snapshot_steps: list[int] = field(default_factory=list)  # the steps whose weights are to be averaged
    loss_part_names: list[str] = field(default_factory=list)  # the names of the further sums in a row
    unlogged_rows: list[list[float]] = field(default_factory=list)  # one for each step not logged yet
    loss_trend: LossTrend = field(default_factory=LossTrend)
    metrics_bytes: int = 0  # bytes of metrics.jsonl
    stop_reason: str | None = None  # why training ended, when it did

    @property
    def current_epoch(self) -> int:
        """The epoch of the last step, the first being 1."""
        return self.epoch + 1 if self.epoch_step or not self.step else self.epoch

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TrainState:
        best = saved["best"] and BestValidation(**saved["best"])
        return cls(**{**saved, "best": best, "trend": LossTrend(**saved["trend"])})


class CheckpointManager:
    """The ``state_folder`` folder of a run."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / "state"
        self.last_saved_step: int | None = None  # the step of the newest state

    def find_newest(self) -> Path | None:
        """The newest state that is whole; None: there is none yet."""
        states = [path for path in self.folder.glob("*") if re.fullmatch(r"\d{8,}", path.name)]
        faults = []
        for path in sorted(states, key=lambda path: int(path.name), reverse=True):
            fault = _find_damage(path)
            if fault is None:
                return path
            faults.append(fault)
        if faults:
            raise InputError(
                f"the saved state of this run is damaged: {'; '.join(faults)}. "
                f"To begin anew, remove {self.folder}"
            )
        return None

    def load(self) -> tuple[TrainState, dict[str, Tensor], dict[str, Tensor]] | None:
        """Where the run stands, its weights, and what the optimiser remembers; None: nothing is saved."""
        path = self.find_newest()
        if path is None:
            return None
        saved = json.loads((path / "state.json").read_text())
        if saved["format"] != FORMAT_VERSION:
            raise InputError(
                f"{path} has format {saved['format']}; this version of jumok reads {FORMAT_VERSION}"
            )
        self.last_saved_step = saved["standing"]["step"]
        model, optimizer = (
            weights.read_safetensors(path / f"{name}.safetensors") for name in ("model", "optimizer")
        )
        return TrainState.from_dict(saved["standing"]), model, optimizer

    def save(self, state: TrainState, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Write a state; then remove those before it."""
        path = self._state_path(state.step)
        if (
            self.last_saved_step == state.step
        ):  # no step since the last one: weights and optimiser are the same
            self._write_json(state, path)
        else:
            with atomic_write(path) as part:
                part.mkdir()
                weights.write_safetensors(model, part / "model.safetensors")
                weights.write_safetensors(optimizer, part / "optimizer.safetensors")
                self._write_json(state, part)
            self.last_saved_step = state.step
        self.remove_stale(state)

    def snapshot_path(self, step: int) -> Path:
        """Where the weights of a validated step are."""
        return self.folder / "validated" / f"{step:08}.safetensors"

    def find_snapshots(self, state: TrainState) -> tuple[list[Path], list[str]]:
        """The weights to be averaged: the files that are whole, and the names of those that are lost."""
        files = [self.snapshot_path(step) for step in state.snapshot_steps]
        whole = [path for path in files if weights.is_complete(path)]
        return whole, [str(path) for path in files if path not in whole]

    def remove_stale(self, state: TrainState) -> None:
        """Remove what the newest state no longer needs. What an older one needs is removed only now."""
        (self.folder / "validated").mkdir(parents=True, exist_ok=True)
        keep = {self._state_path(state.step), *map(self.snapshot_path, state.snapshot_steps)}
        for path in [*self.folder.glob("[0-9]*"), *self.folder.glob("validated/[0-9]*")]:
            if path not in keep:
                remove_atomically(path)
        for folder in (self.folder, self.folder / "validated", self._state_path(state.step)):
            remove_partial_files(folder)

    def _state_path(self, step: int) -> Path:
        return self.folder / f"{step:08}"

    def _write_json(self, state: TrainState, folder: Path) -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
        saved = {"format": FORMAT_VERSION, "standing": asdict(state), "files": sizes}
        with atomic_write(folder / "state.json") as part:
            part.write_text(json.dumps(saved, indent=1))


def _find_damage(state_folder: Path) -> str | None:
    """What is wrong with the files of a state; None: nothing."""
    try:
        files = json.loads((state_folder / "state.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{state_folder / 'state.json'} cannot be read ({error})"
    for name in ("model.safetensors", "optimizer.safetensors"):
        path = state_folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != files.get(name):
            return f"{path} has {size} bytes, {files.get(name)} were written"
    return None
