"""Tests of the memory that is estimated before a forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import build_model

import jumok
from jumok import InputError
from jumok.look.huggingface import memory
from jumok.look.huggingface.capture import capture_huggingface_model
from jumok.look.huggingface.memory import CaptureMemory, estimate_memory


def test_estimate_matches_what_is_captured() -> None:
    model = build_model("llama").base_model  # six heads and two of keys, of width 4
    with jumok.watch(model) as captures, torch.no_grad():
        model(torch.ones(1, 53, dtype=torch.long), use_cache=False)
    stored = sum(
        x.numel() * x.element_size() for layer in captures for x in (layer.attention.query, layer.attention.key)
    )
    estimate = estimate_memory(model, 53)
    assert estimate.num_layers == len(captures) == 2
    assert estimate.num_layers * estimate.layer_bytes == stored == 2 * 53 * (6 + 2) * 4 * 4
    assert estimate_memory(model, 53, "layers.1.*").num_layers == 1
    assert estimate.free_bytes > 2**20


def test_error_says_what_would_fit() -> None:
    estimate = CaptureMemory(100_000, 32, 2**30, 5 * 2**30, 20 * 2**30, "cuda:0")
    with pytest.raises(InputError) as error:
        estimate.check()
    assert str(error.value) == (
        "100,000 tokens: capturing 32 layers takes about 37.0 GiB (queries and keys 32.0 GiB, activations 5.0 GiB); "
        "20.0 GiB are free on cuda:0. Capture at most 13 of these layers (--layers), shorten the text to about 48,648 "
        "tokens, use the memory of the host (--device cpu)"
    )
    replace(estimate, num_layers=13).check()
    with pytest.raises(InputError, match=r"on cpu\. Shorten the text to about 3,59. tokens$"):
        replace(estimate, activation_bytes=500 * 2**30, num_layers=0, device="cpu").check()


def test_text_that_does_not_fit_is_rejected_before_the_model_runs(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "get_free_memory", lambda device: 50_000)
    monkeypatch.setattr(memory, "MIN_STATED_TOKENS", 50)
    with pytest.raises(InputError, match=r"60 tokens: capturing 2 layers takes about .* MiB are free on cpu"):
        capture_huggingface_model(llama, "w1 " * 60, device="cpu")
    monkeypatch.setattr(memory, "get_free_memory", lambda device: 10**9)
    (data,) = capture_huggingface_model(llama, "w1 " * 60, device="cpu", layers="*.1.*")
    assert [layer.name for layer in data.layers] == ["layers.1.self_attn"]
    assert "60 tokens: capturing 1 layer takes about 0 MiB" in capsys.readouterr().err
