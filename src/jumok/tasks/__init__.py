"""Tasks that jumok can train models for: one package per task, and the registry of all tasks.

The package of a task has the modules

- ``config``: the sections of its recipes, and ``RECIPE_TYPES``, the recipe class of each ``model.type``;
- ``task``: ``build_task(run)``, which returns a :class:`jumok.tasks.base.Task`;
- ``predictor``: its :class:`jumok.tasks.base.Predictor`;
- ``data`` and ``metrics``: how examples are read and how predictions are scored;
- ``api``: the schema of its HTTP requests and responses, and ``SERVICE``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jumok.errors import InputError

if TYPE_CHECKING:
    from jumok.run import Run
    from jumok.tasks.api import TaskService
    from jumok.tasks.base import Predictor, Task

TASK_NAMES = ("translate", "pretrain", "classify", "tag", "answer", "caption", "speak")


def get_recipe_types(name: str) -> Mapping[str, type]:
    """The recipe classes of a task by ``model.type``. The first one is the default."""
    recipe_types: Mapping[str, type] = importlib.import_module(f"jumok.tasks.{name}.config").RECIPE_TYPES
    return recipe_types


def build_task(run: Run) -> Task[Any]:
    """Build the task of a run."""
    task: Task[Any] = importlib.import_module(f"jumok.tasks.{run.recipe.task}.task").build_task(run)
    return task


def load_predictor(run: Run, device: str = "auto") -> Predictor[Any, Any]:
    """Load the trained model of a run."""
    from jumok.devices import move_to_device
    from jumok.training import load_weights

    task = build_task(run)
    model, tokenizer = task.build_model()
    load_weights(model, run.weights_path)
    predictor: Predictor[Any, Any] = task.build_predictor(move_to_device(model, device), tokenizer)
    return predictor


def get_service_type(name: str) -> type[TaskService[Any, Any]]:
    """The class that serves the models of a task over HTTP. It is built from a predictor and limits."""
    module_name = f"jumok.tasks.{name}.api"
    if importlib.util.find_spec(module_name) is None:
        raise InputError(f"runs of the task {name} cannot be served yet")
    service_type: type[TaskService[Any, Any]] = importlib.import_module(module_name).SERVICE
    return service_type
