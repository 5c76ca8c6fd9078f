"""Tiny models of every type of transformers, with random weights."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import tiny_exceptions
import torch
import transformers
from tiny_configs import LEVELS, is_config, set_settings, shrink_config
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

MAX_PARAMETERS = {"all sizes": 30_000_000, "numbers": 30_000_000, "proportions": 60_000_000, "depth": 120_000_000}
MAX_CLASSES = 4  # that are tried, if a model of the first class accepts no inputs


def list_model_types() -> list[str]:
    """Return all model types of the installed transformers."""
    return list(configuration_auto.CONFIG_MAPPING_NAMES)


def build_models(model_type: str) -> Iterator[nn.Module]:
    """Build tiny models of this type: one for each level that works, then of other classes.

    Raises:
        RuntimeError: None could be built.
    """
    config_class = _find_class(configuration_auto.CONFIG_MAPPING_NAMES[model_type], model_type)
    classes = _list_model_classes(model_type, config_class)
    errors: list[str] = []
    built: set[type] = set()
    for level in LEVELS:
        try:
            config = build_config(model_type, config_class, level)
            model = _build_first_model(config, classes, level)
        except Exception as error:
            errors.append(str(error))
        else:
            built.add(type(model))
            yield model
    for model_class in [x for x in classes if x not in built][: MAX_CLASSES - len(built)] if built else []:
        with contextlib.suppress(Exception):
            yield _build_first_model(build_config(model_type, config_class, LEVELS[0]), [model_class], LEVELS[0])
    if not built:
        raise RuntimeError(errors[0])


def build_config(model_type: str, config_class: Any, level: str) -> Any:
    """Return a small configuration, with the exceptions for this type."""
    default = tiny_exceptions.build_default_config(model_type, config_class)
    config = shrink_config(default, level)
    for part in (config, *_list_inner_configs(config)):
        set_settings(part, tiny_exceptions.SETTINGS.get(part.model_type, {}))
    return config


def _build_first_model(config: Any, classes: list[Any], level: str) -> nn.Module:
    errors = []
    for model_class in classes:
        try:
            try:  # it may be too large to be built
                with torch.device("meta"):
                    draft = model_class(copy.deepcopy(config))
            except Exception:
                if level != LEVELS[0]:
                    raise
            else:
                _check_size(draft, level)
            torch.manual_seed(0)
            model: nn.Module = model_class(copy.deepcopy(config)).eval()
            _check_size(model, level)
            return tiny_exceptions.prepare_model(model)
        except Exception as error:
            errors.append(f"{model_class.__name__}: {type(error).__name__}: {str(error).strip()[:150]}")
    raise RuntimeError(" | ".join(errors) or "no class of transformers takes this configuration")


def _check_size(model: nn.Module, level: str) -> None:
    num_parameters, limit = sum(parameter.numel() for parameter in model.parameters()), MAX_PARAMETERS[level]
    if num_parameters > limit:
        raise RuntimeError(f"it has {num_parameters:,} parameters, more than {limit:,}")


def list_parents(model_type: str) -> list[str]:
    """Return the model types whose models have a part of this type."""
    name = configuration_auto.CONFIG_MAPPING_NAMES[model_type]
    package = configuration_auto.model_type_to_module_name(model_type)
    parents = []
    for other, other_name in configuration_auto.CONFIG_MAPPING_NAMES.items():
        if other == model_type or configuration_auto.model_type_to_module_name(other) != package:
            continue
        with contextlib.suppress(Exception):
            config = tiny_exceptions.build_default_config(other, _find_class(other_name, other))
            if name in {type(x).__name__ for x in _list_inner_configs(config)}:
                parents.append(other)
    return parents


def _list_inner_configs(config: Any) -> Iterator[Any]:
    for value in vars(config).values():
        if is_config(value):
            yield value
            yield from _list_inner_configs(value)


def find_part(model: nn.Module, model_type: str) -> nn.Module | None:
    """Return the outermost module of a model that has a configuration of this type, or is built from one."""
    modules = [module for name, module in model.named_modules() if name]
    for module in modules:
        if is_config(config := getattr(module, "config", None)) and config.model_type == model_type:
            return module
    name = configuration_auto.CONFIG_MAPPING_NAMES[model_type]
    return next((module for module in modules if name in _list_annotations(type(module))), None)


def _list_annotations(module_class: type) -> set[str]:
    """Return the names of the types of the arguments that a class is built from."""
    annotations = [x.annotation for x in inspect.signature(module_class.__init__).parameters.values()]
    return {x if isinstance(x, str) else getattr(x, "__name__", "") for x in annotations}


def _list_model_classes(model_type: str, config_class: type) -> list[Any]:
    """Return the classes for a model type: those of the auto classes, then others of its module."""
    mapping_names = sorted(x for x in dir(modeling_auto) if x.startswith("MODEL_FOR") and x.endswith("MAPPING_NAMES"))
    names: dict[str, None] = {}
    for mapping_name in ("MODEL_MAPPING_NAMES", *mapping_names):
        entry = getattr(modeling_auto, mapping_name).get(model_type, ())
        names.update(dict.fromkeys((entry,) if isinstance(entry, str) else entry))
    classes = []
    for name in names:
        with contextlib.suppress(Exception):
            classes.append(_find_class(name, model_type))
    with contextlib.suppress(ImportError):
        classes += [x for x in _list_module_classes(config_class) if x not in classes]
    runnable = [x for x in classes if x.forward is not nn.Module.forward]
    return runnable or classes


def _list_module_classes(config_class: type) -> list[Any]:
    """Return the model classes that have this configuration, of the module beside that of the configuration."""
    module = inspect.getmodule(config_class)
    assert module is not None
    modeling = importlib.import_module(module.__name__.replace(".configuration_", ".modeling_"))
    return [
        x
        for name, x in vars(modeling).items()
        if inspect.isclass(x)
        and issubclass(x, transformers.PreTrainedModel)
        and x.config_class is config_class
        and not name.endswith("PreTrainedModel")
    ]


def _find_class(name: str, model_type: str) -> Any:
    if hasattr(transformers, name):
        return getattr(transformers, name)
    module = configuration_auto.model_type_to_module_name(model_type)
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)
