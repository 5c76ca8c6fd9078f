"""The statistics kernel against full attention weights in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from triton_testing import DEVICE, ON_GPU, compile_for_hopper, compiles_kernels, runs_kernels

from jumok.attention.kernels import statistics
from jumok.attention.kernels.common import launch_options
from jumok.attention.kernels.lse import compute_row_lse
from jumok.attention.kernels.statistics import StatisticsBlockSizes, compute_attention_statistics

pytestmark = pytest.mark.long

# Small tiles, so that small inputs have several. Tensor cores of a GPU need at least 64 rows.
QUERIES, KEYS = (128, 64) if ON_GPU else (32, 16)
BLOCKS = StatisticsBlockSizes(queries=QUERIES, keys=KEYS)
CLOSE = 3e-5 if ON_GPU else 3e-6  # a GPU splits float32 into three products of tensor cores


def compute_weights(
    q: Tensor, k: Tensor, scale: float, diagonal: int | None, window: int | None, key_mask: Tensor | None
) -> Tensor:
    """The weights by the formula ``(H, Q, K)``, in float64."""
    scores = scale * q.double() @ k.double().repeat_interleave(len(q) // len(k), 0).mT
    i, j = (torch.arange(n, device=DEVICE) for n in scores.shape[1:])
    blocked = torch.zeros(scores.shape[1:], dtype=torch.bool, device=DEVICE)
    if diagonal is not None:
        blocked |= j > i[:, None] + diagonal
    if window is not None:
        blocked |= j <= i[:, None] + diagonal - window
    if key_mask is not None:
        blocked = blocked | ~key_mask
    return scores.masked_fill(blocked, -torch.inf).softmax(-1).nan_to_num(0)


def sum_distances(weights: Tensor, offset: int) -> Tensor:
    """The sum of the weights at each distance, by the definition."""
    rows, cols = (torch.arange(n, device=DEVICE) for n in weights.shape[1:])
    distances = (rows[:, None] + offset - cols).abs()
    size = max(abs(len(rows) - 1 + offset), abs(len(cols) - 1 - offset), abs(offset)) + 1
    return torch.stack([weights.masked_fill(distances != d, 0).sum((-1, -2)) for d in range(size)], -1)


# H, G, Q, K, D, diagonal, window, whether some keys are masked
CASES = [
    (2, 1, 32, 64, 16, None, None, False),  # whole tiles, grouped queries
    (4, 2, 19, 53, 7, None, None, False),  # no size is a multiple of the tiles
    (2, 1, 41, 59, 8, 13, None, False),
    (2, 2, 70, 70, 8, 0, None, False),  # causal: most tiles need no mask
    (1, 1, 32, 96, 16, 50, 45, False),  # a window: skips tiles on both sides
    (1, 1, 64, 64, 16, -7, None, False),  # the first rows have no key
    (2, 1, 35, 90, 8, 20, 65, True),
    (1, 1, 31, 64, 16, None, None, True),
    (1, 1, 1, 37, 8, None, None, False),  # one row
    (3, 1, 37, 1, 8, None, None, False),  # one column
    (1, 1, 13, 64, 16, -50, None, False),  # every pair is masked
]


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_statistics_are_those_of_the_weights(case: tuple[Any, ...]) -> None:
    H, G, Q, K, D, diagonal, window, masked = case
    q, k = torch.randn(H, Q, D, device=DEVICE), torch.randn(G, K, D, device=DEVICE)
    key_mask = (torch.arange(K, device=DEVICE) % 3 > 0) if masked else None
    if masked:
        k[:, ~key_mask] = torch.nan  # hidden keys may hold anything
    mask = {"diagonal": diagonal, "window": window, "key_mask": key_mask}
    weights = compute_weights(q, k.nan_to_num(0), 0.7, **mask)
    lse = compute_row_lse(q, k, scale=0.7, **mask)
    lse = lse.where(lse.isfinite(), 0.0)
    top, positions = weights.topk(min(3, K))
    fields = compute_attention_statistics(q, k, lse, scale=0.7, num_top=3, blocks=BLOCKS, **mask)
    expected = {
        "received_weight": weights.sum(1),
        "entropy": torch.special.entr(weights).sum(-1),
        "distance_profile": sum_distances(weights, diagonal or 0),
        "top_weights": top,
    }
    for name, exact in expected.items():
        torch.testing.assert_close(fields[name].double(), exact, rtol=CLOSE, atol=CLOSE)
    assert torch.equal(fields["top_keys"], positions.where(top > 0, -1))


@runs_kernels
def test_heads_in_parts_and_splits_of_a_diagonal_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are integers: the order in which programs add to them does not matter, to the bit."""
    q, k = torch.randn(4, 3 * QUERIES, 16, device=DEVICE), torch.randn(2, 3 * QUERIES, 16, device=DEVICE)
    lse = compute_row_lse(q, k, scale=0.3, diagonal=0)
    options = {"scale": 0.3, "diagonal": 0, "num_top": 2, "blocks": BLOCKS}
    monkeypatch.setattr(statistics, "TARGET_PROGRAMS", 1)
    whole = compute_attention_statistics(q, k, lse, **options)
    monkeypatch.setattr(statistics, "TARGET_PROGRAMS", 60)
    monkeypatch.setattr(statistics, "MAX_BLOCK_MAXIMA", 1)
    parts = compute_attention_statistics(q, k, lse, **options)
    for name in ("received_weight", "entropy", "top_weights", "top_keys"):
        assert torch.equal(whole[name], parts[name])
    # A split rounds the sum of its tiles.
    torch.testing.assert_close(whole["distance_profile"], parts["distance_profile"], rtol=1e-6, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [40, 64, 128])
def test_statistics_at_real_sizes(width: int, dtype: torch.dtype) -> None:
    """The kernel and the row chunks agree, through the function that a user calls."""
    from jumok.look.capture.captured_attention import CapturedAttention
    from jumok.look.views.statistics import compute_statistics

    q, k = (torch.randn(1, n, 3000, width, device=DEVICE).to(dtype) for n in (4, 2))
    fast = compute_statistics(CapturedAttention(q, k, scale=width**-0.5, diagonal=0))
    slow = compute_statistics(CapturedAttention(q.cpu(), k.cpu(), scale=width**-0.5, diagonal=0))
    close = 2e-3 if dtype == torch.bfloat16 else 1e-4
    for name in ("received_weight", "entropy", "distance_profile", "sink_share", "top_weights"):
        torch.testing.assert_close(getattr(fast, name).cpu(), getattr(slow, name), rtol=close, atol=1e-5)
    assert (fast.top_keys.cpu() == slow.top_keys).float().mean() > 0.999  # nearly equal weights may swap


@compiles_kernels
@pytest.mark.parametrize("width", [64, 128])
def test_the_kernel_compiles_for_hopper(width: int) -> None:
    blocks = StatisticsBlockSizes()
    constants = {
        "D": width,
        "BD": width,
        "BQ": blocks.queries,
        "BK": blocks.keys,
        "SCALE": 2.0**40,
        "CAUSAL": True,
        "WINDOWED": False,
    }
    constants |= {"CAUSAL": True, "WINDOWED": False, "HAS_KEY_MASK": False, "HAS_MAXIMA": True}
    types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "key_mask_ptr": "*i1", "factor": "fp32"}
    types |= dict.fromkeys(("received_ptr", "entropy_ptr", "distance_ptr"), "*i64")
    compiled = compile_for_hopper(
        statistics._statistics_kernel,
        constants,
        types,
        launch_options(blocks.num_warps, blocks.num_stages),
        aligned=[name for name in statistics._statistics_kernel.arg_names if "stride" in name],
    )
    assert "wgmma.mma_async" in compiled.asm["ptx"]
