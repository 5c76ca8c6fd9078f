"""The log of a run: ``metrics.jsonl`` with one JSON object per line, and the same metrics for TensorBoard.

::

    {"event": "train", "step": 50, "epoch": 1, "seconds": 3.1, "loss": 6.02, "nll": 5.8, …}
    {"event": "validation", "step": 50, "epoch": 1, "seconds": 4.0, "bleu": 12.3, "is_best": true, …}
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


class MetricsLog:
    """Writes the log of a run. Lines that were written after ``state`` was saved are removed."""

    def __init__(self, folder: Path, state: TrainState, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        _truncate(self._path, state.metrics_bytes)
        self._file = self._path.open("a", encoding="utf-8")
        self._tensorboard: Any = None
        self.notice = ""  # a line for the user if TensorBoard is missing
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self.notice = 'TensorBoard is not installed: pip install "jumok[train]" to write its files.'
            else:
                self._tensorboard = SummaryWriter(folder / "tensorboard", purge_step=state.step + 1)

    def log_metrics(self, event: str, state: TrainState, metrics: Mapping[str, float | bool]) -> None:
        """Write one line. Values that are not finite become null, because JSON has no NaN."""
        record = {
            "event": event,
            "step": state.step,
            "epoch": state.current_epoch,
            "seconds": state.seconds,
        }
        record |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._write_line(record)
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(f"{event}/{name}", value, state.step)

    def log_alarm(self, text: str, state: TrainState) -> None:
        """Write a line about a problem that needs attention."""
        position = {"step": state.step, "epoch": state.current_epoch, "seconds": state.seconds}
        self._write_line({"event": "alarm", **position, "alarm": text})
        if self._tensorboard is not None:
            self._tensorboard.add_text("alarms", text, state.step)

    def _write_line(self, record: Mapping[str, Any]) -> None:
        with add_filename_to_errors(self._path):
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()

    def log_samples(self, samples: Sequence[str], state: TrainState) -> None:
        """Write sample outputs, for TensorBoard only."""
        if self._tensorboard is not None and samples:
            text = "\n".join(f"    {line}" for line in samples)  # indented, so that Markdown leaves it unchanged
            self._tensorboard.add_text("samples", text, state.step)

    def sync(self) -> int:
        """Flush everything to disk. Returns the size of ``metrics.jsonl``, to truncate it when resuming."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._tensorboard is not None:
            self._tensorboard.flush()
        return self._path.stat().st_size

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_validations(folder: Path) -> list[dict[str, float]]:
    """Read the metrics of all validations of a run so far. null becomes NaN."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    records = (json.loads(line) for line in lines if '"event": "validation"' in line)
    return [
        {name: math.nan if value is None else value for name, value in record.items() if name != "event"}
        for record in records
    ]


def _truncate(path: Path, num_bytes: int) -> None:
    """Truncate a file to the complete lines of its first ``num_bytes`` bytes, in one atomic call."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read(num_bytes)
        file.truncate(content.rfind(b"\n") + 1)
