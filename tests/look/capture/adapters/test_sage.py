"""SageAttention, replaced by functions with the same signatures that quantise queries and keys to 8 bits."""

import sys
import types
from typing import Any

import pytest
import torch
from attention_models import FunctionAttention, causal_mask, reference_weights, run_watched
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.watch import watch


def quantise(x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    smooth_k: bool = True,
    **kwargs: Any,
) -> Any:
    if tensor_layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = causal_mask(q.shape[2], k.shape[2]) if is_causal else kwargs.get("attn_mask")
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    out = reference_weights(quantise(q), quantise(k), mask, scale=sm_scale) @ v
    return out.transpose(1, 2) if tensor_layout == "NHD" else out


def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> Tensor:
    rows, cols = (x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    parts = zip(q.split(rows), k.split(cols), v.split(cols), strict=True)
    options: Any = {"tensor_layout": "NHD", "is_causal": is_causal, "sm_scale": sm_scale}
    return torch.cat([sageattn(*(x[None] for x in part), **options)[0] for part in parts])


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("sageattention")
    vars(package).update(sageattn=sageattn, sageattn_varlen=sageattn_varlen)
    monkeypatch.setitem(sys.modules, "sageattention", package)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, None),
        ({"is_causal": True, "smooth_k": False}, causal_mask(5, 7)),
        ({"sm_scale": 0.3, "attn_mask": causal_mask(5, 7, 1)}, causal_mask(5, 7, 1)),
    ],
)
def test_weights_are_those_of_unquantised_scores(layout: str, options: dict[str, Any], allowed: Any) -> None:
    query, key, value = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    inputs = [x.transpose(1, 2) if layout == "NHD" else x for x in (query, key, value)]
    _, captures = run_watched(FunctionAttention(sageattn, tensor_layout=layout, **options), *inputs)
    expected = reference_weights(query, key, allowed, scale=options.get("sm_scale"))
    torch.testing.assert_close(captures[0].weights(), expected)


def test_packed_sequences() -> None:
    query, key, value = torch.randn(8, 6, 4), torch.randn(9, 3, 4), torch.randn(9, 3, 4)
    lengths = {"cu_seqlens_q": torch.tensor([0, 5, 8]), "cu_seqlens_k": torch.tensor([0, 5, 9])}
    model = FunctionAttention(sageattn_varlen, max_seqlen_q=5, max_seqlen_k=5, is_causal=True, **lengths)
    _, captures = run_watched(model, query, key, value)
    query, key = query.transpose(0, 1), key.transpose(0, 1)
    expected = reference_weights(query[:, 5:], key[:, 5:], causal_mask(3, 4))
    torch.testing.assert_close(captures[0].weights(batch=1)[:, :3, :4], expected)
    expected = reference_weights(query[:, :5], key[:, :5], causal_mask(5, 5))
    torch.testing.assert_close(captures[0].weights(batch=0), expected)


def test_unsupported_arguments_are_named() -> None:
    model = FunctionAttention(sageattn, window=3)
    with pytest.raises(InputError, match=r"sageattention.sageattn with window is not supported"), watch(model):
        model(*torch.randn(3, 2, 3, 5, 4))
