"""The tasks of jumok: the registry, and how to add a task.

A task says what is read, which model learns it, and how predictions are written. Everything else is written once,
for all tasks: the commands ``train``, ``run``, ``eval``, ``compare``, ``look`` and ``serve``, recipes, checkpoints,
held-out data, batch inference and the HTTP server.

To add a task NAME, append NAME to ``TASK_NAMES``, and write the package ``jumok/tasks/NAME`` with the modules below.
Subclass the classes in parentheses; their abstract methods are what a task has to implement. ``tag`` is the shortest
example.

``config.py``
    The recipe: frozen dataclasses (``Config`` of :mod:`jumok.config`, ``DataConfig`` of :mod:`jumok.tasks.config`).
    The class has ``task: Literal["NAME"]``, ``data``, ``train: TrainConfig``, and a ``model`` whose dataclass has a
    ``type``. ``RECIPE_TYPES`` maps each ``model.type`` to its recipe class; the first one is the default.

``task.py``
    The task (:class:`jumok.tasks.base.Task`), and ``build_task(run)``, which returns it. For labelled examples,
    subclass :class:`jumok.tasks.supervised.SupervisedTask`, which also splits and stores examples: dataclasses with a
    field ``location``, which a reader of :mod:`jumok.data.readers` yields. For a fine-tuned BERT, subclass
    :class:`jumok.tasks.fine_tuning.BertTask`. The model, in :mod:`jumok.models`, is a module with ``loss(batch)``,
    which returns a :class:`jumok.batches.tokens.Loss`. The batches come from :mod:`jumok.data.batching`.

``predictor.py``
    The prediction (:class:`jumok.tasks.base.Prediction`): a frozen dataclass with ``to_dict``, its JSON fields, and
    ``format_lines``, its lines of text. The predictor (:class:`jumok.tasks.base.Predictor`): a loaded model with its
    tokenizer. The base classes in :mod:`jumok.tasks.predictors` do more: ``ChunkedPredictor`` predicts lines in chunks,
    ``SupervisedPredictor`` loads and scores labelled data, and ``FineTunedPredictor`` is both, for BERT. A
    model without attention sets ``has_attention = False``, and raises an ``InputError`` where attention is drawn.

``api.py`` (optional)
    The requests and responses of the server (``TaskRequest``, ``TaskResponse``), and the service (``TaskService`` of
    :mod:`jumok.tasks.api`) as ``SERVICE``. A response has the fields of ``Prediction.to_dict``. For a form on the web
    page of the server, add the endpoint to ``jumok/serve/static/tasks.js``.

``data.py``, ``metrics.py`` (optional)
    How examples are encoded; how predictions are scored, as an :class:`jumok.tasks.base.Evaluation`.

Then add a recipe, ``jumok/recipes/MODEL/NAME.yaml``, whose header says in one line what it trains.
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
