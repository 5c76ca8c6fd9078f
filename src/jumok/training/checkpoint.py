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
from jumok.files import remove, remove_leftovers, written
from jumok.training import weights
from jumok.training.divergence import Trend
from jumok.training.report import Best

__all__ = ["Checkpoints", "Standing"]

FORMAT = 1


@dataclass
class Standing:
    """Where a run stands after ``step`` steps."""

    step: int = 0
    epoch: int = 0
    position: int = 0  # how many batches of this epoch are done
    seconds: float = 0.0
    labels: int = 0  # trained on so far
    training: float = 0.0  # seconds of steps not logged yet, without validation and saving
    validated: int = 0  # the step of the last validation
    worse: int = 0  # validations since the best one
    best: Best | None = None
    snapshots: list[int] = field(default_factory=list)  # the steps whose weights are to be averaged
    parts: list[str] = field(default_factory=list)  # the names of the further sums in a row
    rows: list[list[float]] = field(default_factory=list)  # one for each step not logged yet
    trend: Trend = field(default_factory=Trend)
    metrics: int = 0  # bytes of metrics.jsonl
    finished: str | None = None  # why training ended, when it did

    @property
    def current_epoch(self) -> int:
        """The epoch of the last step, the first being 1."""
        return self.epoch + 1 if self.position or not self.step else self.epoch

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Standing:
        best = saved["best"] and Best(**saved["best"])
        return cls(**{**saved, "best": best, "trend": Trend(**saved["trend"])})


class Checkpoints:
    """The ``state`` folder of a run."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "state"
        self.saved: int | None = None  # the step of the newest state

    def newest(self) -> Path | None:
        """The newest state that is whole; None: there is none yet."""
        states = [path for path in self.folder.glob("*") if re.fullmatch(r"\d{8,}", path.name)]
        faults = []
        for path in sorted(states, key=lambda path: int(path.name), reverse=True):
            fault = _fault(path)
            if fault is None:
                return path
            faults.append(fault)
        if faults:
            raise InputError(
                f"the saved state of this run is damaged: {'; '.join(faults)}. "
                f"To begin anew, remove {self.folder}"
            )
        return None

    def load(self) -> tuple[Standing, dict[str, Tensor], dict[str, Tensor]] | None:
        """Where the run stands, its weights, and what the optimiser remembers; None: nothing is saved."""
        path = self.newest()
        if path is None:
            return None
        saved = json.loads((path / "state.json").read_text())
        if saved["format"] != FORMAT:
            raise InputError(f"{path} has format {saved['format']}; this version of jumok reads {FORMAT}")
        self.saved = saved["standing"]["step"]
        model, optimizer = (weights.read(path / f"{name}.safetensors") for name in ("model", "optimizer"))
        return Standing.of(saved["standing"]), model, optimizer

    def save(self, standing: Standing, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Write a state; then remove those before it."""
        path = self._path(standing.step)
        if self.saved == standing.step:  # no step since the last one: weights and optimiser are the same
            self._write_json(standing, path)
        else:
            with written(path) as part:
                part.mkdir()
                weights.write(model, part / "model.safetensors")
                weights.write(optimizer, part / "optimizer.safetensors")
                self._write_json(standing, part)
            self.saved = standing.step
        self.tidy(standing)

    def snapshot(self, step: int) -> Path:
        """Where the weights of a validated step are."""
        return self.folder / "validated" / f"{step:08}.safetensors"

    def snapshots(self, standing: Standing) -> tuple[list[Path], list[str]]:
        """The weights to be averaged: the files that are whole, and the names of those that are lost."""
        files = [self.snapshot(step) for step in standing.snapshots]
        whole = [path for path in files if weights.is_whole(path)]
        return whole, [str(path) for path in files if path not in whole]

    def tidy(self, standing: Standing) -> None:
        """Remove what the newest state no longer needs. What an older one needs is removed only now."""
        (self.folder / "validated").mkdir(parents=True, exist_ok=True)
        keep = {self._path(standing.step), *map(self.snapshot, standing.snapshots)}
        for path in [*self.folder.glob("[0-9]*"), *self.folder.glob("validated/[0-9]*")]:
            if path not in keep:
                remove(path)
        for folder in (self.folder, self.folder / "validated", self._path(standing.step)):
            remove_leftovers(folder)

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:08}"

    def _write_json(self, standing: Standing, folder: Path) -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
        saved = {"format": FORMAT, "standing": asdict(standing), "files": sizes}
        with written(folder / "state.json") as part:
            part.write_text(json.dumps(saved, indent=1))


def _fault(state: Path) -> str | None:
    """What is wrong with the files of a state; None: nothing."""
    try:
        files = json.loads((state / "state.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{state / 'state.json'} cannot be read ({error})"
    for name in ("model.safetensors", "optimizer.safetensors"):
        path = state / name
        size = path.stat().st_size if path.exists() else 0
        if size != files.get(name):
            return f"{path} has {size} bytes, {files.get(name)} were written"
    return None
