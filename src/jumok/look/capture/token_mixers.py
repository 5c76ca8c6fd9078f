"""Layers that mix positions, or are named after attention, but have no weights of queries on keys."""

from __future__ import annotations

import functools
import re

from torch import nn

from jumok.look.capture.module_stack import get_class_name

NO_MAP = "it has no map of queries and keys"

_DELTA = "gated delta rule: a linear attention, whose state sums keys and values"
_LINEAR = "linear attention: its state sums keys and values, without a softmax"
# What a class is, by a pattern of its whole name. The first pattern that matches counts.
_DESCRIPTIONS: tuple[tuple[str, str], ...] = (
    (r"\w*(GatedDeltaNet|DeltaNet|DeltaAttention)", _DELTA),
    (r"\w*EfficientAdditiveAttention", "additive attention: it sums all queries to one vector"),
    (r"(?!KimiLinearAttention)\w*(Linear|Lightning)Attention", _LINEAR),
    (r"\w*(RWKV|Rwkv)\w*(Attention|TimeMix\w*)", "RWKV: a recurrence over positions"),
    (r"\w*Retention", "retention: a recurrence over positions, without a softmax"),
    (
        r"(\w*Mamba\d?|Bamba|FalconH1)Mixer|GraniteMoeHybridMambaLayer|Mamba\d?",
        "state space model (Mamba): a recurrence over positions",
    ),
    (r"mLSTMLayer|sLSTMLayer|xLSTMLayer", "xLSTM: a recurrence over positions"),
    (r"RecurrentGemmaRecurrentBlock", "gated linear recurrent unit: a recurrence over positions"),
    (r"YosoSelfAttention", "YOSO: it estimates the weighted sum by hashing, without a softmax"),
    (
        r"MraSelfAttention",
        "MRA: its kernel approximates the weights at several resolutions; without it, the output is 0",
    ),
    (r"PatchTSMixerGatedAttention", "gate: its softmax is over the features of one position"),
)


def describe_token_mixer(module: nn.Module) -> str | None:
    """Return why a module has no map, given its class; None if it may have one."""
    return _describe_class(get_class_name(module))


@functools.lru_cache(maxsize=4096)
def _describe_class(name: str) -> str | None:
    description = next((text for pattern, text in _DESCRIPTIONS if re.fullmatch(pattern, name)), None)
    return None if description is None else f"{description}; {NO_MAP}"
