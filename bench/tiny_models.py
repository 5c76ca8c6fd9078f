"""Tiny models of every type of transformers, with random weights, and inputs that they accept."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

WIDTH, NUM_HEADS, NUM_LAYERS, VOCAB_SIZE, IMAGE_SIZE, PATCH_SIZE = 32, 4, 2, 160, 32, 8
LENGTH, TARGET_LENGTH = 7, 5  # of texts
NUM_SPECIAL_TOKENS = 40  # ids at the end of the vocabulary, which texts do not use
MAX_PARAMETERS = 30_000_000
# What is made small. Some models need the lists of their default configuration.
LEVELS = ("all sizes", "numbers")

# The size of a setting, by a pattern of its name. The first pattern that matches counts.
SIZES: list[tuple[str, int]] = [
    (r"(key_value|kv)_heads$|n_head_kv|num_key_value", 2),
    (r"(^|_)heads?$|^nhead$", NUM_HEADS),
    (r"head_(dim|size|width)$|^d_kv$|^dim_head|^rotary_dim$", WIDTH // NUM_HEADS),
    (r"n_group$|expert_groups?$", 2),
    (r"experts_per_tok|top_k$|topk|num_activated|moe_k$", 2),
    (r"num_experts|(num|n)_(routed_|local_|total_|shared_)?experts$", 4),
    (r"layers?$|^depth$|_depth$|num_blocks", NUM_LAYERS),
    (r"^vocab|vocab_size|vocabulary_size", VOCAB_SIZE),
    (r"intermediate_size|ffn_dim|ff_dim|d_ff$|n_inner|dim_feedforward|inner_dim|ffn_hidden", 2 * WIDTH),
    (r"mlp_dim|hidden_features|feed_forward", 2 * WIDTH),
    (r"max_.*position|n_positions|n_ctx|max_seq_len|max_source|max_target|max_sequence|block_size$", 128),
    (r"image_size$|^input_size$|img_size|image_height|image_width", IMAGE_SIZE),
    (r"patch_size$|patch_stride$", PATCH_SIZE),
    (r"hidden_size|d_model|n_embd|embedding_size|_dim$|^dim$|_width$|^width$|num_features$", WIDTH),
]


# ------------------------------------------------------------------------------------------- configurations


def list_model_types() -> list[str]:
    """Return all model types of the installed transformers."""
    return list(configuration_auto.CONFIG_MAPPING_NAMES)


def shrink_config(config: Any, level: str = "all sizes") -> Any:
    """Return a configuration of the same class with small sizes; see :data:`LEVELS`."""
    tiny = copy.deepcopy(config)
    changes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if is_config(value):
            changes[name] = shrink_config(value, level)
        elif name.startswith("_"):
            continue
        elif name == "num_experts_per_tok" and value is None:
            changes[name] = 2
        elif type(value) is int:
            changes[name] = _shrink_number(name, value)
        elif isinstance(value, list | tuple) and value and all(type(x) is int for x in value):
            if level == "all sizes":
                changes[name] = type(value)(_shrink_list(name, list(value)))
        elif isinstance(value, dict) and "rope_type" in value:
            changes[name] = {**value, "mrope_section": [2, 1, 1]}  # half the width of a head
    for name, value in changes.items():
        with contextlib.suppress(Exception):  # read-only properties
            setattr(tiny, name, value)
    old_num_layers, num_layers = (getattr(x, "num_hidden_layers", None) for x in (config, tiny))
    if isinstance(num_layers, int):
        for name, value in list(vars(tiny).items()):
            if isinstance(value, list) and len(value) == old_num_layers:
                setattr(tiny, name, _select_layers(value, num_layers))
    if hasattr(tiny, "kv_lora_rank") and hasattr(tiny, "num_key_value_heads"):  # all heads have keys of their own
        tiny.num_key_value_heads = tiny.num_attention_heads
    _move_special_tokens(tiny)
    if hasattr(tiny, "use_cache"):
        tiny.use_cache = False
    return tiny


def is_config(value: Any) -> bool:
    """Return whether this is a configuration, as opposed to a value in one."""
    return isinstance(value, transformers.PretrainedConfig)


def _select_layers(types: list[Any], count: int) -> list[Any]:
    """Return so many layer types: different ones first."""
    distinct = list(dict.fromkeys(types)) if all(isinstance(x, str) for x in types) else types
    return (distinct + types)[:count]


def _shrink_number(name: str, value: int) -> int:
    if name.endswith(("_id", "_token_index")) or value <= 0:
        return value
    return next((min(value, size) for pattern, size in SIZES if re.search(pattern, name)), value)


def _shrink_list(name: str, values: list[int]) -> list[int]:
    if re.search(r"depths|num_blocks|layers$", name):
        return [1] * len(values)
    if "heads" in name:
        return [min(value, 2) for value in values]
    if re.search(r"hidden_sizes|embed_dims|dims|channels|sizes$|widths|features", name) and max(values) > 48:
        return [16 * (1 + min(i, 3)) for i in range(len(values))]
    return values


def _move_special_tokens(config: Any) -> None:
    """Give special tokens beyond the small vocabulary an id at its end."""
    next_id = (getattr(config, "vocab_size", None) or VOCAB_SIZE) - 2
    first_special = next_id + 2 - NUM_SPECIAL_TOKENS
    for name, value in list(vars(config).items()):
        if re.search(r"_token_id$|_token_index$|_token$", name) and type(value) is int and value >= first_special:
            with contextlib.suppress(Exception):
                setattr(config, name, next_id)
                next_id -= 1


# --------------------------------------------------------------------------------------------------- models


def build_models(model_type: str) -> Iterator[nn.Module]:
    """Build tiny models of this type, one for each level that works, by the first class that works.

    Raises:
        RuntimeError: None could be built.
    """
    config_class = _find_class(configuration_auto.CONFIG_MAPPING_NAMES[model_type], model_type)
    errors: list[str] = []
    has_model = False
    for level in LEVELS:
        try:
            model = _build_model(model_type, config_class, level)
        except Exception as error:
            errors.append(str(error))
        else:
            has_model = True
            yield model
    if not has_model:
        raise RuntimeError(errors[0])


def _build_model(model_type: str, config_class: Any, level: str) -> nn.Module:
    config = shrink_config(config_class(), level)
    errors = []
    for model_class in _list_model_classes(model_type, config_class):
        try:
            if level != LEVELS[0]:  # it may be too large to be built
                with torch.device("meta"):
                    _check_size(model_class(copy.deepcopy(config)))
            torch.manual_seed(0)
            model: nn.Module = model_class(copy.deepcopy(config)).eval()
            _check_size(model)
            return model
        except Exception as error:
            errors.append(f"{model_class.__name__}: {type(error).__name__}: {str(error).strip()[:150]}")
    raise RuntimeError(" | ".join(errors) or "no class of transformers takes this configuration")


def _check_size(model: nn.Module) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise RuntimeError(f"it has {num_parameters:,} parameters, more than {MAX_PARAMETERS:,}")


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
    if classes:
        return classes
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


# --------------------------------------------------------------------------------------------------- inputs


class InputBuilder:
    """Inputs that a model may accept, guessed from its signature and its configuration."""

    def __init__(self, model: nn.Module) -> None:
        self.config: Any = model.config
        self.parameters = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(1)
        self.vocab_size = min(self.find_setting("vocab_size") or 100, VOCAB_SIZE)
        self.image_size = self.find_setting("image_size", "img_size", "input_size") or IMAGE_SIZE
        self.num_channels = self.find_setting("num_channels", "in_channels", "in_chans") or 3

    def list_inputs(self) -> Iterator[dict[str, Any]]:
        """List keyword arguments, the most complete ones first."""
        text, target = self._build_text(), self._select(decoder_input_ids=self.draw_ids(TARGET_LENGTH))
        yield from self._list_images(text, target)
        yield from self._list_audio(text, target)
        if text:
            yield text
            yield {name: value for name, value in text.items() if name != "attention_mask"}
        if "inputs_embeds" in self.parameters:
            yield {"inputs_embeds": self.draw(2, LENGTH, self.find_setting("hidden_size", "d_model") or WIDTH)}
        if "past_values" in self.parameters:
            length = getattr(self.config, "context_length", 16) or 16
            yield {"past_values": self.draw(2, length, getattr(self.config, "num_input_channels", 1) or 1)}
            yield {"past_values": self.draw(2, length)}
        if "inputs" in self.parameters:
            yield {"inputs": self.draw_ids(LENGTH)}
        first = next(iter(self.parameters))
        yield {first: self.draw(2, LENGTH, WIDTH)}
        yield {first: self.draw(2, self.num_channels, self.image_size, self.image_size)}
        yield {first: self.draw(2, LENGTH, WIDTH), **self._select(attention_mask=None)}

    def find_setting(self, *names: str, config: Any = None, depth: int = 0) -> int | None:
        """Return a number of the configuration, or of one within it."""
        config = self.config if config is None else config
        for name in names:
            value = getattr(config, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if type(value) is int:
                return value
        inner = [x for x in vars(config).values() if is_config(x)] if depth < 3 else []
        values = (self.find_setting(*names, config=x, depth=depth + 1) for x in inner)
        return next((value for value in values if value is not None), None)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def draw_ids(self, length: int) -> Tensor:
        return torch.randint(5, max(6, self.vocab_size - 60), (2, length), generator=self.generator)

    def _select(self, **values: Any) -> dict[str, Any]:
        """Return the values that the model has parameters for."""
        return {name: value for name, value in values.items() if name in self.parameters}

    def _build_text(self) -> dict[str, Any]:
        if "input_ids" not in self.parameters:
            return {}
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[1, LENGTH - 2 :] = 0
        boxes = torch.randint(0, 90, (2, LENGTH, 4), generator=self.generator).sort(-1).values
        return self._select(
            input_ids=self.draw_ids(LENGTH),
            attention_mask=mask,
            bbox=boxes,
            decoder_input_ids=self.draw_ids(TARGET_LENGTH),
        )

    def _list_images(self, text: dict[str, Any], target: dict[str, Any]) -> Iterator[dict[str, Any]]:
        num_frames = self.find_setting("num_frames", "frames_per_clip") or 2
        yield from self._list_patches(text)
        for size in (self.image_size, 64, 224):
            image = self.draw(2, self.num_channels, size, size)
            video = self.draw(2, num_frames, self.num_channels, size, size)
            if "pixel_values" in self.parameters:
                if text:
                    yield {**text, "pixel_values": image}
                yield {"pixel_values": image, **target}
                yield {"pixel_values": video, **target}
            if "pixel_values_videos" in self.parameters:
                yield {"pixel_values_videos": video, **text}
                yield {"pixel_values_videos": video}

    def _list_patches(self, text: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """List inputs of encoders that take flattened patches of an image, and their grid."""
        first = next(iter(self.parameters))
        if "grid_thw" not in self.parameters:
            return
        patch = self.find_setting("patch_size") or PATCH_SIZE
        channels = self.find_setting("in_channels", "in_chans", "num_channels") or 3
        frames = self.find_setting("temporal_patch_size") or 1
        grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
        num_patches = int(grid.prod(-1).sum())
        yield {first: self.draw(num_patches, channels * frames * patch * patch), "grid_thw": grid}
        yield {first: self.draw(num_patches, channels, patch, patch), "grid_thw": grid}
        yield {first: self.draw(num_patches, channels, frames, patch, patch), "grid_thw": grid}

    def _list_audio(self, text: dict[str, Any], target: dict[str, Any]) -> Iterator[dict[str, Any]]:
        mel = self.find_setting("num_mel_bins", "feature_size", "input_feat_per_channel", "num_mels") or 80
        max_source = self.find_setting("max_source_positions") or 50
        if "input_features" in self.parameters:
            shapes = ((2, mel, 2 * max_source), (2, 64, mel), (2, 1, 64, mel), (2, mel, 64), (2, 3000, mel))
            for shape in (*shapes, (2, mel, 3000)):
                features = self.draw(*shape)
                yield {"input_features": features, **target}
                if text:
                    yield {"input_features": features, **text}
        if "input_values" in self.parameters:
            shapes = ((2, 3200), (2, 16000), (2, 1, 3200), (2, 1024, 128), (2, 128, 128), (2, 80, 64), (2, 64, 80))
            for shape in shapes:
                yield {"input_values": self.draw(*shape), **target}
