"""Checkpoints: everything that a process needs to resume a run with identical results.

::

    state/00001200/state.json              the training state (TrainState)
                   model.safetensors       the weights
                   optimizer.safetensors   the state of the optimizer, by parameter name
    state/snapshots/00001000.safetensors   weights at the last validations, averaged at the end

A checkpoint is written under a temporary name, synced and renamed; then the previous one is removed. So the
newest folder is complete whenever the process is killed. The state of random number generators is not saved,
because each step has its own seed (``learner.reseed``). There are no pickles.
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

FORMAT_VERSION = 2
SNAPSHOTS = "snapshots"


@dataclass
class TrainState:
    """State of a run after ``step`` steps."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0  # number of batches of this epoch that are done
    seconds: float = 0.0
    num_labels: int = 0  # number of labels trained on so far
    unlogged_seconds: float = 0.0  # time of the steps that are not logged yet, without validation and saving
    last_validation_step: int = 0
    num_bad_validations: int = 0  # validations since the best one
    best: BestValidation | None = None
    snapshot_steps: list[int] = field(default_factory=list)  # steps whose weights are averaged at the end
    loss_part_names: list[str] = field(default_factory=list)  # names of the loss components in a row
    unlogged_rows: list[list[float]] = field(default_factory=list)  # one row per step that is not logged yet
    loss_trend: LossTrend = field(default_factory=LossTrend)
    metrics_bytes: int = 0  # size of metrics.jsonl
    stop_reason: str | None = None  # None: training has not ended

    @property
    def current_epoch(self) -> int:
        """The epoch of the last step, counted from 1."""
        return self.epoch + 1 if self.epoch_step or not self.step else self.epoch

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TrainState:
        """Build the state from what ``dataclasses.asdict`` returned."""
        best = saved["best"] and BestValidation(**saved["best"])
        return cls(**{**saved, "best": best, "loss_trend": LossTrend(**saved["loss_trend"])})


class CheckpointManager:
    """Reads and writes the checkpoints in the ``state`` folder of a run."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / "state"
        self.last_saved_step: int | None = None  # step of the newest checkpoint

    def find_newest(self) -> Path | None:
        """Return the newest complete checkpoint. None: there is none."""
        states = [path for path in self.folder.glob("*") if re.fullmatch(r"\d{8,}", path.name)]
        problems = []
        for path in sorted(states, key=lambda path: int(path.name), reverse=True):
            problem = _find_damage(path)
            if problem is None:
                return path
            problems.append(problem)
        if problems:
            raise InputError(
                f"the checkpoint of this run is damaged: {'; '.join(problems)}. Remove {self.folder} to start again"
            )
        return None

    def load(self) -> tuple[TrainState, dict[str, Tensor], dict[str, Tensor]] | None:
        """Load the training state, the weights and the optimizer state. None: there is no checkpoint."""
        path = self.find_newest()
        if path is None:
            return None
        saved = json.loads((path / "state.json").read_text())
        if saved["format"] != FORMAT_VERSION:
            raise InputError(
                f"{path} has format {saved['format']}, and this version of jumok reads format "
                f"{FORMAT_VERSION}; train again with this version, or resume with the version that wrote it"
            )
        self.last_saved_step = saved["state"]["step"]
        model, optimizer = (weights.read_safetensors(path / f"{name}.safetensors") for name in ("model", "optimizer"))
        return TrainState.from_dict(saved["state"]), model, optimizer

    def save(self, state: TrainState, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Write a checkpoint and remove the previous ones."""
        path = self._state_path(state.step)
        if self.last_saved_step == state.step:  # the weights and the optimizer have not changed
            self._write_json(state, path)
        else:
            with atomic_write(path) as temporary:
                temporary.mkdir()
                weights.write_safetensors(model, temporary / "model.safetensors")
                weights.write_safetensors(optimizer, temporary / "optimizer.safetensors")
                self._write_json(state, temporary)
            self.last_saved_step = state.step
        self.remove_stale(state)

    def snapshot_path(self, step: int) -> Path:
        """Return the path of the weights of a validated step."""
        return self.folder / SNAPSHOTS / f"{step:08}.safetensors"

    def find_snapshots(self, state: TrainState) -> tuple[list[Path], list[str]]:
        """Return the weight files to average that are complete, and the names of the damaged ones."""
        files = [self.snapshot_path(step) for step in state.snapshot_steps]
        complete = [path for path in files if weights.is_complete(path)]
        return complete, [str(path) for path in files if path not in complete]

    def remove_stale(self, state: TrainState) -> None:
        """Remove the files that the newest checkpoint does not need. Call this after it is written."""
        (self.folder / SNAPSHOTS).mkdir(parents=True, exist_ok=True)
        keep = {self._state_path(state.step), *map(self.snapshot_path, state.snapshot_steps)}
        for path in [*self.folder.glob("[0-9]*"), *self.folder.glob(f"{SNAPSHOTS}/[0-9]*")]:
            if path not in keep:
                remove_atomically(path)
        for folder in (self.folder, self.folder / SNAPSHOTS, self._state_path(state.step)):
            remove_partial_files(folder)

    def _state_path(self, step: int) -> Path:
        return self.folder / f"{step:08}"

    def _write_json(self, state: TrainState, folder: Path) -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
        saved = {"format": FORMAT_VERSION, "state": asdict(state), "files": sizes}
        with atomic_write(folder / "state.json") as temporary:
            temporary.write_text(json.dumps(saved, indent=1))


def _find_damage(state_folder: Path) -> str | None:
    """Describe what is wrong with the files of a checkpoint. None: nothing."""
    try:
        files = json.loads((state_folder / "state.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{state_folder / 'state.json'} cannot be read ({error})"
    for name in ("model.safetensors", "optimizer.safetensors"):
        path = state_folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != files.get(name):
            return f"{path} has {size} bytes instead of {files.get(name)}"
    return None
