"""Memory of a captured forward pass, estimated before it starts.

A capture stores the queries and keys of every layer until the viewer is closed, which is linear in the length of
the text. A forward pass needs the activations of one layer beside that.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jumok.errors import InputError
from jumok.look.capture.captures import matches_pattern
from jumok.look.capture.module_stack import looks_like_attention

MIN_STATED_TOKENS = 16_384  # of a text whose memory is stated
MAX_SHARE = 0.9  # of the free memory
NUM_HIDDEN_TENSORS = 6  # of the size of the hidden states, which exist at the same time in a layer


@dataclass(frozen=True)
class CaptureMemory:
    """An estimate in bytes for a text of ``num_tokens``."""

    num_tokens: int
    num_layers: int  # captured ones
    layer_bytes: int  # queries and keys of one layer
    activation_bytes: int  # of the forward pass, in the layer that needs most
    free_bytes: int
    device: str

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.layer_bytes + self.activation_bytes

    def describe(self) -> str:
        return (
            f"{self.num_tokens:,} tokens: capturing {self.num_layers} "
            f"{'layer' if self.num_layers == 1 else 'layers'} takes about {_format_bytes(self.total_bytes)} "
            f"(queries and keys {_format_bytes(self.num_layers * self.layer_bytes)}, activations "
            f"{_format_bytes(self.activation_bytes)}); {_format_bytes(self.free_bytes)} are free on {self.device}"
        )

    def check(self) -> None:
        """Raise an error that says what would fit, if this does not."""
        budget = MAX_SHARE * self.free_bytes
        if self.total_bytes <= budget:
            return
        advice = []
        num_layers = math.floor((budget - self.activation_bytes) / max(1, self.layer_bytes))
        if num_layers >= 1:
            advice.append(f"capture at most {num_layers} of these layers (--layers)")
        fraction = budget / self.total_bytes
        advice.append(f"shorten the text to about {math.floor(fraction * self.num_tokens):,} tokens")
        if not self.device.startswith("cpu"):
            advice.append("use the memory of the host (--device cpu)")
        raise InputError(f"{self.describe()}. {', '.join(advice).capitalize()}")


def check_memory(model: Any, num_tokens: int, layers: str | None) -> None:
    """Check that a captured forward pass fits into memory, and state the estimate for a long text."""
    estimate = estimate_memory(model, num_tokens, layers)
    if num_tokens >= MIN_STATED_TOKENS:
        print(estimate.describe(), file=sys.stderr)
    estimate.check()


def estimate_memory(model: Any, num_tokens: int, layers: str | None = None) -> CaptureMemory:
    """Estimate the memory of capturing some layers of a Hugging Face model, whose weights are loaded already."""
    config, bytes_per_number = model.config.get_text_config(), model.dtype.itemsize
    num_heads = int(getattr(config, "num_attention_heads", 1))
    num_groups = int(getattr(config, "num_key_value_heads", None) or num_heads)
    width = int(config.hidden_size)
    head_width = int(getattr(config, "head_dim", None) or width // num_heads)
    inner_width = int(getattr(config, "intermediate_size", None) or 4 * width)
    numbers = NUM_HIDDEN_TENSORS * width + 2 * inner_width
    activations = num_tokens * numbers * bytes_per_number
    if getattr(config, "_attn_implementation", None) == "eager":  # it computes all weights of a layer
        activations += 2 * num_heads * num_tokens**2 * max(4, bytes_per_number)
    return CaptureMemory(
        num_tokens=num_tokens,
        num_layers=_count_layers(model, int(getattr(config, "num_hidden_layers", 1)), layers),
        layer_bytes=num_tokens * (num_heads + num_groups) * head_width * bytes_per_number,
        activation_bytes=activations,
        free_bytes=get_free_memory(model.device),
        device=str(model.device),
    )


def _count_layers(model: Any, num_layers: int, layers: str | None) -> int:
    """Return how many layers a pattern selects; None: all."""
    if layers is None:
        return num_layers
    names: Sequence[str] = [name for name, module in model.named_modules() if looks_like_attention(module)]
    selected = sum(matches_pattern(name, layers) for name in names)
    return max(1, math.ceil(num_layers * selected / max(1, len(names))))


def get_free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        pass
    try:
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return sys.maxsize  # Windows: unknown


def _format_bytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
