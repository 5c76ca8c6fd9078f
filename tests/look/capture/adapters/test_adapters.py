"""The example in the documentation of the adapters is an adapter that works."""

import sys
import types
from typing import Any

import pytest
import torch
from attention_models import FunctionAttention, causal_mask, random_qkv, reference_weights, run_watched
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture import adapters, call_site, captured_attention, observer, patching
from jumok.look.capture.watch import watch


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, sinks: Any = None) -> Tensor:
    allowed = causal_mask(q.shape[2], k.shape[2], k.shape[2] - q.shape[2]) if causal else None
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    return scores.exp() / scores.exp().sum(-1, keepdim=True) @ v


@pytest.fixture(autouse=True)
def _example_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapters.__doc__ is not None
    example = adapters.__doc__.split("::\n")[1].split("\nTest that")[0]
    namespace: dict[str, Any] = {"sys": sys, "Any": Any, "Tensor": Tensor}
    for module in (call_site, captured_attention, observer, patching):
        namespace |= vars(module)
    exec("from __future__ import annotations\n" + example.replace("\n    ", "\n"), namespace)
    adapter = types.SimpleNamespace(list_patches=namespace["list_patches"])
    monkeypatch.setattr(adapters, "ADAPTERS", (*adapters.ADAPTERS, adapter))
    monkeypatch.setitem(sys.modules, "fast_kernels", types.SimpleNamespace(attend=attend))  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
def test_calls_of_the_kernel_are_captured(causal: bool) -> None:
    query, key, value = random_qkv(2, 3)
    _, captures = run_watched(FunctionAttention(attend, causal=causal), query, key, value)
    expected = reference_weights(query, key, causal_mask(5, 7, 2) if causal else None)
    torch.testing.assert_close(captures[0].weights(), expected)


def test_unsupported_arguments_are_reported() -> None:
    model, qkv = FunctionAttention(attend, sinks=torch.ones(3)), random_qkv(2, 3)
    with pytest.raises(InputError, match=r"FunctionAttention: fast_kernels.attend with sinks; give None"), watch(model):
        model(*qkv)
