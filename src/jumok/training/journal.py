"""What is written down: ``metrics.jsonl``, one JSON object a line, and the same for TensorBoard.

::

    {"event": "train", "step": 50, "epoch": 1, "seconds": 3.1, "loss": 6.02, "nll": 5.8, …}
    {"event": "validation", "step": 50, "epoch": 1, "seconds": 4.0, "bleu": 12.3, "best": true, …}
    {"event": "alarm", "step": 50, "epoch": 1, "seconds": 4.0, "alarm": "attention never became …"}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jumok.files import add_filename_to_errors
from jumok.training.checkpoint import Standing

__all__ = ["Journal", "validations"]


class Journal:
    """Goes on where ``standing`` was saved: what was written after that is cut off."""

    def __init__(self, folder: Path, standing: Standing, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        _cut(self._path, standing.metrics)
        self._file = self._path.open("a", encoding="utf-8")
        self._board: Any = None
        self.notice = ""  # one line for the reader, if something is left out
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self.notice = 'No TensorBoard files: pip install "jumok[train]" brings it.'
            else:
                self._board = SummaryWriter(folder / "tensorboard", purge_step=standing.step + 1)

    def write(self, event: str, standing: Standing, figures: Mapping[str, float | bool]) -> None:
        """One line. A figure that is not finite becomes null: JSON knows no NaN."""
        line = {
            "event": event,
            "step": standing.step,
            "epoch": standing.current_epoch,
            "seconds": standing.seconds,
        }
        line |= {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self._append(line)
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(f"{event}/{name}", value, standing.step)

    def alarm(self, text: str, standing: Standing) -> None:
        """Something that should be looked into."""
        place = {"step": standing.step, "epoch": standing.current_epoch, "seconds": standing.seconds}
        self._append({"event": "alarm", **place, "alarm": text})
        if self._board is not None:
            self._board.add_text("alarms", text, standing.step)

    def _append(self, line: Mapping[str, Any]) -> None:
        with add_filename_to_errors(self._path):
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()

    def show(self, samples: Sequence[str], standing: Standing) -> None:
        """Lines to read, for TensorBoard only."""
        if self._board is not None and samples:
            text = "\n".join(f"    {line}" for line in samples)  # indented: as it stands, not as Markdown
            self._board.add_text("samples", text, standing.step)

    def sync(self) -> int:
        """Wait until all of it is on the disk; the length of ``metrics.jsonl``, to cut it to one day."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()
        return self._path.stat().st_size

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def validations(folder: Path) -> list[dict[str, float]]:
    """The figures of all validations of a run so far; NaN where there was no number."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    told = (json.loads(line) for line in lines if '"event": "validation"' in line)
    return [
        {name: math.nan if value is None else value for name, value in one.items() if name != "event"}
        for one in told
    ]


def _cut(path: Path, size: int) -> None:
    """To the first ``size`` bytes, and whole lines. Cutting is one call, which is done or not done."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        kept = file.read(size)
        file.truncate(kept.rfind(b"\n") + 1)
