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
from jumok.training.checkpoint import TrainState

__all__ = ["MetricsLog", "read_validations"]


class MetricsLog:
    """Goes on where ``state`` was saved: what was written after that is cut off."""

    def __init__(self, folder: Path, state: TrainState, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        _truncate(self._path, state.metrics_bytes)
        self._file = self._path.open("a", encoding="utf-8")
        self._tensorboard: Any = None
        self.notice = ""  # one line for the reader, if something is left out
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self.notice = 'No TensorBoard files: pip install "jumok[train]" brings it.'
            else:
                self._tensorboard = SummaryWriter(folder / "tensorboard", purge_step=state.step + 1)

    def log_metrics(self, event: str, state: TrainState, metrics: Mapping[str, float | bool]) -> None:
        """One line. A figure that is not finite becomes null: JSON knows no NaN."""
        line = {
            "event": event,
            "step": state.step,
            "epoch": state.current_epoch,
            "seconds": state.seconds,
        }
        line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._write_line(line)
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(f"{event}/{name}", value, state.step)

    def log_alarm(self, text: str, state: TrainState) -> None:
        """Something that should be looked into."""
        place = {"step": state.step, "epoch": state.current_epoch, "seconds": state.seconds}
        self._write_line({"event": "alarm", **place, "alarm": text})
        if self._tensorboard is not None:
            self._tensorboard.add_text("alarms", text, state.step)

    def _write_line(self, record: Mapping[str, Any]) -> None:
        with add_filename_to_errors(self._path):
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()

    def log_samples(self, samples: Sequence[str], state: TrainState) -> None:
        """Lines to read, for TensorBoard only."""
        if self._tensorboard is not None and samples:
            text = "\n".join(f"    {line}" for line in samples)  # indented: as it stands, not as Markdown
            self._tensorboard.add_text("samples", text, state.step)

    def sync(self) -> int:
        """Wait until all of it is on the disk; the length of ``metrics.jsonl``, to cut it to one day."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._tensorboard is not None:
            self._tensorboard.flush()
        return self._path.stat().st_size

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_validations(folder: Path) -> list[dict[str, float]]:
    """The figures of all validations of a run so far; NaN where there was no number."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    told = (json.loads(line) for line in lines if '"event": "validation"' in line)
    return [
        {name: math.nan if value is None else value for name, value in one.items() if name != "event"}
        for one in told
    ]


def _truncate(path: Path, num_bytes: int) -> None:
    """To the first ``num_bytes`` bytes, and whole lines. Cutting is one call, which is done or not done."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        kept = file.read(num_bytes)
        file.truncate(kept.rfind(b"\n") + 1)
