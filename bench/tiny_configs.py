"""Small sizes for the configurations of transformers: of every class, and of configurations within them."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Mapping
from typing import Any

import transformers

WIDTH, NUM_HEADS, NUM_LAYERS, VOCAB_SIZE, IMAGE_SIZE, PATCH_SIZE = 32, 4, 2, 160, 32, 8
NUM_SPECIAL_TOKENS = 40  # ids at the end of the vocabulary, which texts do not use
# What is made small. The later ones keep more of the relations between the sizes of the default configuration.
LEVELS = ("all sizes", "numbers", "proportions", "depth")

# The size of a setting, by a pattern of its name. The first pattern that matches counts.
COUNTS: list[tuple[str, int]] = [
    (r"n_group$|expert_groups?$", 2),
    (r"experts_per_tok|top_k$|topk|num_activated|moe_k$", 2),
    (r"num_experts|(num|n)_(routed_|local_|total_|shared_)?experts$", 4),
    (r"layers?$|^depth$|_depth$|num_blocks", NUM_LAYERS),
    (r"^vocab|vocab_size|vocabulary_size", VOCAB_SIZE),
    (r"max_.*position|n_positions|n_ctx|max_seq_len|max_source|max_target|max_sequence|block_size$", 128),
]
HEADS: list[tuple[str, int]] = [
    (r"(key_value|kv)_heads$|n_head_kv|num_key_value", 2),
    (r"(^|_)heads?$|^nhead$", NUM_HEADS),
]
IMAGES: list[tuple[str, int]] = [
    (r"image_size$|^input_size$|img_size|image_height|image_width", IMAGE_SIZE),
    (r"patch_size$|patch_stride$", PATCH_SIZE),
]
WIDTHS: list[tuple[str, int]] = [
    (r"head_(dim|size|width)$|^d_kv$|^dim_head|^rotary_dim$", WIDTH // NUM_HEADS),
    (r"intermediate_size|ffn_dim|ff_dim|d_ff$|n_inner|dim_feedforward|inner_dim|ffn_hidden", 2 * WIDTH),
    (r"mlp_dim|hidden_features|feed_forward", 2 * WIDTH),
    (r"hidden_size|d_model|n_embd|embedding_size|_dim$|^dim$|_width$|^width$|num_features$", WIDTH),
]
SIZES = HEADS + WIDTHS[:1] + COUNTS[:-1] + WIDTHS[1:3] + COUNTS[-1:] + IMAGES + WIDTHS[3:]
# A setting that is None in a default configuration, and that models need.
MISSING = {
    "head_dim": WIDTH // NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "num_experts": 4,
    "moe_intermediate_size": 2 * WIDTH,
    "moe_topk": 2,
    "top_k_experts": 2,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
}
LIST_OF_WIDTHS = r"hidden_sizes|embed_dims?|dims|channels|sizes$|widths|features|embed_dim|hidden_size"


def is_config(value: Any) -> bool:
    """Return whether this is a configuration, as opposed to a value in one."""
    return isinstance(value, transformers.PretrainedConfig)


def shrink_config(config: Any, level: str = "all sizes", divisor: int | None = None) -> Any:
    """Return a configuration of the same class with small sizes; see :data:`LEVELS`.

    ``divisor`` divides all widths at the level "proportions".
    """
    divisor = divisor or find_divisor(config)
    tiny = copy.deepcopy(config)
    changes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if is_config(value):
            changes[name] = shrink_config(value, level, divisor)
        elif name.startswith("_"):
            continue
        elif name == "num_experts_per_tok" and value is None:
            changes[name] = 2
        elif type(value) is int:
            changes[name] = _shrink_number(name, value, level, divisor)
        elif isinstance(value, list | tuple) and value and all(type(x) is int for x in value):
            changes[name] = type(value)(_shrink_list(name, list(value), level, divisor))
        elif isinstance(value, dict) and "rope_type" in value and level in LEVELS[:2]:
            changes[name] = {**value, "mrope_section": [2, 1, 1]}  # half the width of a head
        elif isinstance(value, dict) and "mrope_section" in value and level == "proportions":
            changes[name] = {**value, "mrope_section": [max(1, x // divisor) for x in value["mrope_section"]]}
        elif value is None and name in MISSING and level == "numbers":
            changes[name] = MISSING[name]
    set_settings(tiny, changes)
    _match_backbone_layers(config, tiny)
    old_num_layers, num_layers = (getattr(x, "num_hidden_layers", None) for x in (config, tiny))
    if isinstance(num_layers, int):
        for name, value in list(vars(tiny).items()):
            if isinstance(value, list) and len(value) == old_num_layers:
                setattr(tiny, name, _select_layers(value, num_layers))
    if level in LEVELS[:2] and hasattr(tiny, "kv_lora_rank") and hasattr(tiny, "num_key_value_heads"):
        tiny.num_key_value_heads = tiny.num_attention_heads  # all heads have keys of their own
    _match_mamba_heads(tiny)
    _move_special_tokens(tiny)
    if hasattr(tiny, "use_cache"):
        tiny.use_cache = False
    return tiny


def set_settings(config: Any, values: Mapping[str, Any]) -> None:
    """Set settings of a configuration. A name may have dots; read-only properties are left alone."""
    for path, value in values.items():
        *parents, name = path.split(".")
        owner = config
        for parent in parents:
            owner = owner[parent] if isinstance(owner, dict) else getattr(owner, parent)
        if isinstance(owner, dict):
            owner[name] = value
            continue
        with contextlib.suppress(Exception):
            setattr(owner, name, value)


def find_divisor(config: Any) -> int:
    """Return the number to divide all widths by, so that the largest is about 64 to 128."""
    width = _find_largest_width(config)
    return next((divisor for divisor in (32, 16, 8, 4, 2) if width >= 64 * divisor), 1)


def _find_largest_width(config: Any) -> int:
    inner = [_find_largest_width(value) for value in vars(config).values() if is_config(value)]
    own = [value for name, value in vars(config).items() if re.fullmatch(r"hidden_size|d_model|n_embd|dim", name)]
    return max([x for x in own if type(x) is int] + inner, default=1)


def _select_layers(types: list[Any], count: int) -> list[Any]:
    """Return so many layer types: different ones first."""
    distinct = list(dict.fromkeys(types)) if all(isinstance(x, str) for x in types) else types
    return (distinct + types)[:count]


def _match_backbone_layers(config: Any, tiny: Any) -> None:
    """Give a backbone as many layers as features that are taken from it, and take those."""
    if isinstance(depths := getattr(tiny, "depths", None), list | tuple):
        set_settings(tiny, {"num_hidden_layers": len(depths)})
        return
    indices = getattr(config, "_out_indices", None) or getattr(config, "out_indices", None)
    layers = getattr(tiny, "num_hidden_layers", None)
    if not indices or not isinstance(layers, int) or not hasattr(tiny, "stage_names") or max(indices) <= layers:
        return
    count = max(layers, len(indices))
    names = ["stem", *(f"stage{n + 1}" for n in range(count))]
    set_settings(tiny, {"num_hidden_layers": count, "stage_names": names})
    tiny.set_output_features_output_indices(
        out_indices=list(range(count - len(indices) + 1, count + 1)), out_features=None
    )


def _match_mamba_heads(config: Any) -> None:
    """Give the heads of a state space model the width that together they need."""
    width, expand = getattr(config, "hidden_size", None), getattr(config, "mamba_expand", getattr(config, "expand", 2))
    for heads, head_width in (
        ("mamba_n_heads", "mamba_d_head"),
        ("n_mamba_heads", "mamba_headdim"),
        ("num_heads", "head_dim"),
    ):
        count = getattr(config, heads, None)
        is_mamba = "mamba" in heads or hasattr(config, "state_size")
        if is_mamba and type(count) is int and hasattr(config, head_width) and isinstance(width, int):
            set_settings(config, {head_width: int(expand * width) // count, "mamba_d_ssm": int(expand * width)})


def _find_size(name: str, sizes: list[tuple[str, int]]) -> int | None:
    return next((size for pattern, size in sizes if re.search(pattern, name)), None)


def _shrink_number(name: str, value: int, level: str, divisor: int) -> int:
    if name.endswith(("_id", "_token_index")) or value <= 0:
        return value
    if level in LEVELS[:2]:
        return min(value, _find_size(name, SIZES) or value)
    if (size := _find_size(name, COUNTS)) is not None:
        return min(value, size)
    if level == "proportions" and not _find_size(name, HEADS) and _find_size(name, WIDTHS):
        return max(1, value // divisor)
    return value


def _shrink_list(name: str, values: list[int], level: str, divisor: int) -> list[int]:
    if level == "numbers":
        return values
    if re.search(r"depths|num_blocks|layers$", name):
        return [min(1, value) for value in values]
    if level == "depth":
        return values
    if level == "proportions":
        is_width = re.search(LIST_OF_WIDTHS, name) and max(values) > 48
        return [max(1, value // divisor) for value in values] if is_width else values
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
