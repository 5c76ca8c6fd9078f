"""Kernels of other packages, replaced by functions that compute the same."""

import sys
import types
from typing import Any

import pytest
import torch
from attention_models import FunctionAttention, random_qkv, run_watched
from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.capture.watch import watch

UNPATCHED_SDPA = nn.functional.scaled_dot_product_attention
computed_weights: list[Tensor] = []


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **options: Any) -> Any:
    """``(B, length, heads, width)``; causal masks and windows are aligned at the end."""
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    distance = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None] - (key.shape[2] - query.shape[2])
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    allowed = (distance >= (-left if left >= 0 else -99)) & (distance <= (right if right >= 0 else 99))
    scores = query @ key.mT * (options.get("softmax_scale") or query.shape[-1] ** -0.5)
    if options.get("softcap"):
        scores = options["softcap"] * (scores / options["softcap"]).tanh()
    computed_weights[:] = [torch.special.softmax(scores.masked_fill(~allowed, -torch.inf), -1)]
    return (computed_weights[0] @ value).transpose(1, 2)


def memory_efficient_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return UNPATCHED_SDPA(query, key, value)


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (("flash_attn", flash_attn_func), ("xformers.ops", memory_efficient_attention)):
        package = types.ModuleType(name)
        setattr(package, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, package)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (2, 1)}, {"causal": True, "window_size": (2, 0), "softcap": 1.5}],
)
def test_flash_attention_called_directly(options: dict[str, Any]) -> None:
    qkv = torch.randn(2, 5, 6, 4), torch.randn(2, 7, 2, 4), torch.randn(2, 7, 2, 4)
    _, captures = run_watched(FunctionAttention(flash_attn_func, **options), *qkv)
    torch.testing.assert_close(captures[0].weights(), computed_weights[0])


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (memory_efficient_attention, {}, "Block: it calls xformers.ops.memory_efficient_attention, which is not"),
        (flash_attn_func, {"alibi_slopes": torch.ones(3)}, "Block: FlashAttention with alibi_slopes"),
        (flash_attn_func, {"new_option": 1}, "Block: it is called in an unusual form .*new_option"),
    ],
)
def test_unsupported_calls_are_reported(function: Any, options: dict[str, Any], reason: str) -> None:
    class Block(FunctionAttention):  # a name that does not suggest attention
        pass

    model, qkv = Block(function, **options), random_qkv(2, 3, queries=7)
    with pytest.raises(InputError, match=reason), watch(model):
        model(*qkv)
