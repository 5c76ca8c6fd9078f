"""The conformance cases of ONNX's Attention operator, all of them, through ``jumok.attend``."""

import contextlib
import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import jumok
from jumok import masks

pytest.importorskip("onnx")

from onnx import helper
from onnx.backend.test.case.node import collect_testcases

# Float32 is held to the tolerance that the case itself gives. The half-precision cases give the same 1e-3,
# which no two ways of computing agree to: rounding the weights and the result once each is good for two
# units in the last place (of 11 bits for float16, of 8 for bfloat16) of numbers below 1.
TOLERANCE = {torch.float16: 2 * 2**-10, torch.bfloat16: 2 * 2**-7}


def collected() -> dict[str, Any]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        cases = collect_testcases("Attention")
    return {case.name: case for case in cases if "expanded" not in case.name}


CASES = collected()


def as_tensor(array: Any) -> Tensor:
    """NumPy has no bfloat16 of its own, and torch does not know the one that ONNX borrows."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(array.copy())


def split(x: Tensor, heads: int | None) -> Tensor:
    """``(B, length, heads · D)`` to ``(B, heads, length, D)``; four dimensions stay as they are."""
    return x if x.dim() == 4 else x.unflatten(-1, (heads, -1)).transpose(1, 2)


def position_mask(inputs: dict[str, Tensor], attributes: dict[str, Any], queries: int) -> masks.Mask | None:
    """``is_causal``, the window and ``nonpad_kv_seqlen`` as one mask.

    The diagonal starts after the keys that precede the queries: the past, or what of an outside cache is
    neither padding nor these queries' own; without either at key 0 (top-left).
    """
    lengths = inputs.get("nonpad_kv_seqlen")
    if "past_key" in inputs:
        offset: Any = inputs["past_key"].shape[-2]
    else:
        offset = 0 if lengths is None else lengths - queries
    parts = []
    if attributes.get("is_causal"):
        parts.append(masks.causal(offset))
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if left >= 0 or right >= 0:
        parts.append(masks.window(None if left < 0 else left, None if right < 0 else right, offset))
    if lengths is not None:
        parts.append(masks.padding(lengths))
    return both(*parts)


def both(*parts: masks.Mask | None) -> masks.Mask | None:
    """The ``&`` of those that are there."""
    there = [part for part in parts if part is not None]
    mask = there[0] if there else None
    for part in there[1:]:
        mask = mask & part
    return mask


def onnx_attention(inputs: dict[str, Tensor], attributes: dict[str, Any]) -> Tensor:
    """ONNX's operator, its first output. ``softmax_precision`` asks for no more than we do anyway."""
    query = split(inputs["Q"], attributes.get("q_num_heads"))
    key, value = (split(inputs[name], attributes.get("kv_num_heads")) for name in "KV")
    if "past_key" in inputs:
        key = torch.cat([inputs["past_key"], key], dim=2)
        value = torch.cat([inputs["past_value"], value], dim=2)
    mask, bias = position_mask(inputs, attributes, query.shape[-2]), inputs.get("attn_mask")
    if bias is not None:
        missing = key.shape[-2] - bias.shape[-1]  # a mask shorter than the keys allows none of the rest
        blocked = False if bias.dtype == torch.bool else -torch.inf
        bias = torch.nn.functional.pad(bias, (0, missing), value=blocked)
        if bias.dtype == torch.bool:
            mask, bias = both(mask, masks.tensor(bias)), None
    out = jumok.attend(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=attributes.get("scale"),
        softcap=attributes.get("softcap") or None,
    )
    return out if inputs["Q"].dim() == 4 else out.transpose(1, 2).flatten(2)


def test_there_are_93_cases() -> None:
    assert len(CASES) == 93


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = CASES[name]
    node = case.model.graph.node[0]
    attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    arrays, expected = case.data_sets[0]
    inputs = dict(zip(filter(None, node.input), map(as_tensor, arrays), strict=True))

    out, expected = onnx_attention(inputs, attributes), as_tensor(expected[0])

    assert out.dtype == expected.dtype
    tolerance = TOLERANCE.get(out.dtype)
    rtol, atol = (case.rtol, case.atol) if tolerance is None else (0, tolerance)
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
