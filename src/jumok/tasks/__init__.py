"""What jumok can be trained to do: one task, one module, and this list the only place that names them all.

A task's module has

- ``Recipe``: the sections of its recipes, or such by the kind of the model, where they differ by it;
- ``train(run, console)``: make or resume a run;
- ``load(run, device)``: a predictor, with ``predict``, ``draw`` and ``export``;
- ``Search``: what may be asked of ``predict``;
- ``evaluate(predictor, split, …)`` and ``compare(runs, …)``;
- if it reads something else than text: ``inputs``, with what ``lines.py`` has: ``windows`` and ``whole``;
- if the objects of a JSONL file have more than a ``text``: ``objects_of``, as in ``objects.py``;
- if what it makes are files: ``Kept(out)``, which writes the file of a prediction.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["TASK_NAMES", "get_task_module"]

TASK_NAMES = ("translate", "pretrain", "classify", "tag", "answer", "caption", "speak")


def get_task_module(name: str) -> Any:
    """The module of a task."""
    return importlib.import_module(f"jumok.tasks.{name}.task")
