"""The pooling kernel against full attention weights in float64, pooled cell by cell."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from triton_testing import DEVICE, INTERPRETED, ON_GPU, compile_for_hopper, compiles_kernels, runs_kernels

from jumok.attention.kernels import lse, pooled_maps
from jumok.attention.kernels.common import launch_options
from jumok.attention.kernels.lse import (
    MAX_SHARED_MEMORY_BYTES,
    PoolingBlockSizes,
    choose_lse_blocks,
    compute_row_lse,
)
from jumok.attention.kernels.pooled_maps import compute_pooled_maps

pytestmark = pytest.mark.long


# Small tiles, so that small inputs have several. Tensor cores of a GPU need at least 64 rows.
SMALL = (
    PoolingBlockSizes(queries=64, keys=32, num_warps=4)
    if ON_GPU
    else PoolingBlockSizes(queries=16, keys=32, num_warps=4)
)
PER_WARP = (
    SMALL._replace(sum_per_warp=True)
    if ON_GPU
    else PoolingBlockSizes(queries=32, keys=32, num_warps=2, sum_per_warp=True)
)
LARGE = PoolingBlockSizes(queries=128, num_warps=4, max_registers=168, sum_per_warp=True)  # as chosen on a GPU
BLOCKS = [
    SMALL._replace(num_polynomials=0),
    SMALL._replace(num_polynomials=2, unroll=1, target_programs=9),
    PER_WARP._replace(num_polynomials=0),
    PER_WARP._replace(num_polynomials=1, unroll=1, target_programs=40),
]

CLOSE = 3e-5 if ON_GPU else 3e-6  # a GPU splits float32 into three products of tensor cores


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return scale * q.double() @ k.double().repeat_interleave(len(q) // len(k), 0).mT


def blocked(rows: int, cols: int, diagonal: int | None, window: int | None, key_mask: Tensor | None) -> Tensor:
    i, j = torch.arange(rows, device=DEVICE)[:, None], torch.arange(cols, device=DEVICE)
    out = torch.zeros(rows, cols, dtype=torch.bool, device=DEVICE)
    if diagonal is not None:
        out |= j > i + diagonal
    if window is not None:
        out |= j <= i + diagonal - window
    return out if key_mask is None else out | ~key_mask


def pooled(weights: Tensor, cells: tuple[int, int]) -> Tensor:
    """Sum over the keys and mean over the queries of each cell, as the docstring defines it."""
    rows, cols = weights.shape[1:]
    out = []
    for i in range(cells[0]):
        row_weights = weights[:, i * rows // cells[0] : (i + 1) * rows // cells[0]]
        for j in range(cells[1]):
            cell = row_weights[..., j * cols // cells[1] : (j + 1) * cols // cells[1]]
            out.append(cell.sum(-1).mean(-1))
    return torch.stack(out, -1).reshape(len(weights), *cells)


# H, G, Q, K, D, cells, diagonal, window, whether some keys are masked
CASES = [
    (2, 1, 32, 64, 16, (2, 2), None, None, False),  # even, one cell a tile
    (1, 1, 64, 128, 16, (1, 2), None, None, False),  # several tiles a cell, down and across
    (2, 1, 64, 96, 16, (2, 3), None, None, False),  # and one key tile a cell, blocks that share their keys
    (1, 1, 16, 192, 16, (16, 1), None, None, False),  # six tiles a cell: three iterations of two
    (1, 1, 32, 64, 16, (8, 4), None, None, False),  # several cells a tile
    (2, 1, 32, 192, 16, (1, 2), None, None, False),  # grouped queries, three tiles a cell
    (2, 1, 64, 192, 16, (2, 2), 70, None, False),  # the same with a causal mask
    (1, 1, 16, 32, 16, (16, 32), None, None, False),  # a cell for each pair
    (1, 1, 48, 64, 16, (3, 16), 11, None, False),  # narrow cells, causal
    (4, 2, 19, 53, 7, (5, 7), None, None, False),  # no size is a multiple of the blocks
    (1, 1, 41, 59, 8, (3, 2), 13, None, False),
    (1, 1, 64, 128, 16, (4, 4), 64, None, False),  # causal: most tiles need no check
    (1, 1, 64, 192, 16, (2, 6), 100, 90, False),  # a window: skips tiles on both sides
    (1, 1, 64, 64, 16, (4, 2), -7, None, False),  # the first rows have no key
    (2, 1, 35, 150, 8, (1, 1), 20, 65, True),
    (1, 1, 31, 64, 16, (2, 2), None, None, True),
    (1, 1, 1, 37, 8, (1, 3), None, None, False),  # one row
    (3, 1, 37, 1, 8, (5, 1), None, None, False),  # one column
    (1, 1, 13, 64, 16, (3, 4), -50, None, False),  # every pair is masked
]


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_maps_are_pooled_weights(case: tuple[Any, ...]) -> None:
    H, G, Q, K, D, cells, diagonal, window, masked = case
    q, k = torch.randn(H, Q, D, device=DEVICE), torch.randn(G, K, D, device=DEVICE)
    key_mask = (torch.arange(K, device=DEVICE) % 3 > 0) if masked else None
    mask = {"diagonal": diagonal, "window": window, "key_mask": key_mask}
    s = scores(q, k, 0.7).masked_fill(blocked(Q, K, diagonal, window, key_mask), -torch.inf)
    lse = compute_row_lse(q, k, scale=0.7, **mask)
    torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=CLOSE, atol=CLOSE)
    exact = pooled(s.softmax(-1).nan_to_num(0), cells)
    for blocks in BLOCKS:
        maps = compute_pooled_maps(q, k, lse, scale=0.7, output_size=cells, blocks=blocks, **mask)
        rtol = 7e-4 if blocks.num_polynomials else CLOSE
        torch.testing.assert_close(maps.double(), exact, rtol=rtol, atol=1e-9)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.05, 3.0])  # nearly uniform attention; one key has nearly all weight
def test_low_precision_is_accurate_to_a_thousandth(dtype: torch.dtype, scale: float) -> None:
    q, k = (torch.randn(1, n, 16, device=DEVICE).to(dtype) for n in (48, 128))
    s = scores(q, k, scale)
    maps = compute_pooled_maps(q, k, s.logsumexp(-1).float(), scale=scale, output_size=(48, 8), blocks=SMALL)
    exact = pooled(s.softmax(-1), (48, 8))
    positive = exact > 1e-30
    assert positive.float().mean() > 0.9
    assert ((maps.double() - exact).abs() / exact)[positive].max() < 1e-3
    torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]), rtol=1e-3, atol=0)


@runs_kernels
@pytest.mark.parametrize("scale", [0.7, -0.7])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_scores_below_the_float32_exponent_range(blocks: PoolingBlockSizes, scale: float) -> None:
    """Some weights of the first head are below 2^-127, where the polynomials need a special case."""
    q, k = torch.randn(2, 64, 16, device=DEVICE), torch.randn(2, 128, 16, device=DEVICE)
    k[0, ::5] *= 60
    s = scores(q, k, scale)
    assert s[0].min() < -400 < -50 < s[1].min()
    maps = compute_pooled_maps(q, k, s.logsumexp(-1).float(), scale=scale, output_size=(2, 4), blocks=blocks)
    rtol = 7e-4 if blocks.num_polynomials else 1e-4
    torch.testing.assert_close(maps.double(), pooled(s.softmax(-1), (2, 4)), rtol=rtol, atol=1e-6)


@runs_kernels
def test_a_slice_of_the_keys_and_strided_inputs() -> None:
    q = torch.randn(16, 2, 100, device=DEVICE).permute(1, 2, 0)[:, 20:77]  # the width is not contiguous
    k = torch.randn(300, 2, 16, device=DEVICE).transpose(0, 1)
    s = scores(q, k, 0.25)
    lse = compute_row_lse(q, k, scale=0.25)
    maps = compute_pooled_maps(q, k[:, 64:192], lse, scale=0.25, output_size=(3, 4), blocks=SMALL)
    torch.testing.assert_close(maps.double(), pooled(s.softmax(-1)[..., 64:192], (3, 4)), rtol=1e-3, atol=0)


@runs_kernels
def test_masked_keys_may_be_nan() -> None:
    q, k = torch.randn(1, 20, 16, device=DEVICE), torch.randn(1, 64, 16, device=DEVICE)
    key_mask = torch.arange(64, device=DEVICE) < 50
    lse = compute_row_lse(q, k, scale=1.0, key_mask=key_mask)
    clean = compute_pooled_maps(q, k, lse, scale=1.0, output_size=(5, 4), key_mask=key_mask)
    k[:, 50:] = torch.nan
    dirty = compute_pooled_maps(
        q, k, compute_row_lse(q, k, scale=1.0, key_mask=key_mask), scale=1.0, output_size=(5, 4), key_mask=key_mask
    )
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)


@runs_kernels
@pytest.mark.parametrize("head", [0, 5, slice(1, 4), [3, 0], None])
def test_the_kernel_and_the_row_chunks_agree(head: int | slice | list[int] | None) -> None:
    """A rectangle of a captured call: grouped heads, causal, masked keys, unknown row sums."""
    from jumok.look.capture.captured_attention import CapturedAttention
    from jumok.look.views import statistics
    from jumok.look.views.gpu_kernels import pool_map_on_gpu
    from jumok.look.views.row_chunks import resolve_choice

    query, key = torch.randn(2, 6, 50, 16, device=DEVICE), torch.randn(2, 3, 70, 16, device=DEVICE)
    mask = torch.rand(2, 1, 1, 70, device=DEVICE) < 0.8
    options = {"scale": 0.3, "diagonal": 20, "mask": mask}
    expected = statistics.compute_pooled_map(
        CapturedAttention(query, key, **options), batch=1, head=head, rows=(7, 40), cols=(5, 61), size=(3, 7)
    )
    captured, (heads, single) = CapturedAttention(query, key, **options), resolve_choice(head, 6, "head")
    for _ in range(2):  # the second time from its cache
        maps = pool_map_on_gpu(captured, 1, heads, slice(7, 40), slice(5, 61), (3, 7))
        torch.testing.assert_close(maps[0] if single else maps, expected, rtol=1e-4, atol=1e-7)


@runs_kernels
def test_maps_without_queries_or_keys() -> None:
    q, k = torch.randn(2, 5, 16, device=DEVICE), torch.randn(2, 0, 16, device=DEVICE)
    assert compute_row_lse(q, k, scale=1.0).eq(-torch.inf).all()
    assert compute_pooled_maps(q, k, compute_row_lse(q, k, scale=1.0), scale=1.0, output_size=(3, 0)).shape == (2, 3, 0)
    assert compute_pooled_maps(k, q, k.new_zeros(2, 0), scale=1.0, output_size=(0, 3)).shape == (2, 0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [40, 64, 128, 256])
def test_maps_at_real_sizes(width: int, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and width > 128:
        pytest.skip("needs more than the shared memory of a program")
    q, k = (torch.randn(n, 2048, width, device=DEVICE).to(dtype) for n in (4, 2))
    for diagonal, cells in ((None, (32, 16)), (0, (16, 32)), (0, (100, 77))):
        s = scores(q, k, width**-0.5).masked_fill(blocked(2048, 2048, diagonal, None, None), -torch.inf)
        lse = compute_row_lse(q, k, scale=width**-0.5, diagonal=diagonal)
        torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=1e-4, atol=1e-4)
        exact = pooled(s.softmax(-1), cells)
        for blocks in (None, LARGE) if width <= 64 and dtype == torch.bfloat16 else (None,):
            maps = compute_pooled_maps(
                q, k, lse, scale=width**-0.5, output_size=cells, diagonal=diagonal, blocks=blocks
            )
            error = (maps.double() - exact).abs()
            assert (error <= 1e-2 * exact).all()
            assert error.norm() <= (1e-3 if dtype == torch.bfloat16 else 1e-5) * exact.norm()


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU it is run by hand")
def test_all_block_sizes_of_the_benchmark_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    look, out = importlib.import_module("look"), tmp_path / "tune.json"
    sizes = ["--tokens", "128", "--heads", "1", "--width", "16", "--size", "1"]
    with torch.no_grad():
        look.main(["--section", "tune", "--quick", "--device", "cpu", "--out", str(out), *sizes])
    _, *results = json.loads(out.read_text(encoding="utf-8"))["rows"][0]["implementations"].values()
    assert len(results) >= 10
    assert all(result["differs"] < 1e-3 for result in results)


# --- without a GPU ------------------------------------------------------------------------------------------


class QueryShape:
    """The attributes of a tensor of queries from which the block sizes are chosen."""

    def __init__(self, width: int, dtype: str) -> None:
        self.shape, self.dtype = (1, 1 << 17, width), torch.float32 if dtype == "fp32" else torch.bfloat16

    def element_size(self) -> int:
        return self.dtype.itemsize


CAUSAL = {"CAUSAL": True}
NARROW = {"EVEN": False, "WIDTH": 4, "HEIGHT": 1, "UNROLL": 1, "ONE_TURN": True}
UNEVEN = {
    "EVEN": False,
    "HAS_KEY_MASK": True,
    "CAUSAL": True,
    "WINDOWED": True,
    "UNROLL": 1,
    "ONE_TURN": False,
}


@compiles_kernels
@pytest.mark.parametrize(
    ("width", "dtype", "options"),
    [
        (64, "bf16", CAUSAL),
        (64, "fp32", UNEVEN),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (64, "bf16", {}),
                (64, "bf16", CAUSAL | {"WINDOWED": True}),
                (64, "bf16", NARROW),
                (64, "bf16", UNEVEN),
                (128, "bf16", CAUSAL),
                (256, "bf16", CAUSAL),
                (64, "fp32", CAUSAL),
                (128, "fp32", CAUSAL),
                (64, "bf16", {"blocks": LARGE}),
                (64, "bf16", CAUSAL | {"blocks": LARGE._replace(unroll=1)}),
            ]
        ),
    ],
)
@pytest.mark.parametrize("kernel", [pooled_maps._pooled_kernel, lse._lse_kernel])
def test_the_kernels_compile_for_hopper_and_fit(kernel: Any, width: int, dtype: str, options: dict[str, Any]) -> None:
    options = dict(options)
    blocks = options.pop("blocks", choose_lse_blocks(QueryShape(width, dtype), 1 << 17))  # type: ignore[arg-type]
    tiles = 128 // blocks.keys
    constants = {"D": width, "BD": width, "BQ": blocks.queries, "BK": blocks.keys, "WIDTH": blocks.keys}
    constants |= {"HEIGHT": min(128, blocks.queries), "UNROLL": min(tiles, blocks.unroll), "EVEN": True}
    constants |= {"ONE_TURN": tiles <= blocks.unroll, "POLYNOMIALS": blocks.num_polynomials}
    constants |= {"PARTS": blocks.num_warps if blocks.sum_per_warp else 1}
    constants |= {"CAUSAL": False, "WINDOWED": False, "HAS_KEY_MASK": False} | options
    if kernel is pooled_maps._pooled_kernel:
        constants["k_stride_r"] = width
    types = {"q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "key_mask_ptr": "*i1", "factor": "fp32"}
    types |= {"row_starts_ptr": "*i32", "col_starts_ptr": "*i32"}
    compiled = compile_for_hopper(
        kernel,
        constants,
        types,
        launch_options(blocks.num_warps, blocks.num_stages, blocks.max_registers),
        aligned=[name for name in kernel.arg_names if "stride" in name],
    )
    assert compiled.metadata.shared <= MAX_SHARED_MEMORY_BYTES
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async" in compiled.asm["ptx"]  # the next keys are loaded while these are used
