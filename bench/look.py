"""Cost of attention maps: the forward pass, the forward pass with pooled maps of all heads, and tiles to zoom into.

    python bench/look.py [--section layer|model|tune] [--tokens 131072] [--heads 12] [--width 64] [--size 1024]

Section `layer` is one attention layer:

forward   PyTorch's own attention: the default kernel, and cuDNN's kernel without and with the row sums
maps      pooled maps of all heads: together with the forward pass, alone, and with unknown row sums
statistics  of all heads: one statistic, and all in one pass with the top 8 keys
tile      a map of 512 × 512 cells of one head, for random rectangles: everything, odd sizes, small sizes

Compare the ratios: forward and maps together, relative to the plain forward pass, measured in turns. On CUDA
everything is bfloat16. Section `model` is a whole language model (see look_model.py). Section `tune` measures the
kernels of maps and statistics with several block sizes.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import look_model
import report as r
import torch
from report import Report, Row, Run, ratio
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.views import statistics
from jumok.look.views.pooling import PoolingAxis

TILE = 512


@dataclass(frozen=True, eq=False)
class Layer:
    """Inputs of one attention layer."""

    query: Tensor  # (1, H, n, D)
    key: Tensor
    value: Tensor
    causal: bool

    @property
    def on_gpu(self) -> bool:
        return self.query.is_cuda

    def forward(self) -> Tensor:
        return F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=self.causal)

    def run_cudnn(self, with_sums: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output, and log Σ exp(score) of each row."""
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(
            self.query, self.key, self.value, None, with_sums, 0.0, self.causal
        )
        return results[0], results[1].reshape(self.query.shape[:3]) if with_sums else None

    def capture(self, sums: Tensor | None) -> CapturedAttention:
        scale, diagonal = self.query.shape[-1] ** -0.5, 0 if self.causal else None
        return CapturedAttention(self.query, self.key, scale=scale, diagonal=diagonal, lse=sums)

    def forward_with_maps(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the output and the maps of all heads."""
        if not self.on_gpu:
            return self.forward(), statistics.compute_pooled_map(self.capture(None), head=None, size=size)
        out, sums = self.run_cudnn(with_sums=True)
        return out, statistics.compute_pooled_map(self.capture(sums), head=None, size=size)


def build_layer(options: argparse.Namespace, causal: bool) -> Layer:
    device = torch.device(options.device)
    shape = (3, 1, options.heads, options.tokens, options.width)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Layer(*torch.randn(shape, device=device).to(dtype).unbind(), causal=causal)


# -------------------------------------------------------------------------------------------------- costs


def measure_costs(report: Report, options: argparse.Namespace) -> None:
    for causal in (False, True):
        layer = build_layer(options, causal)
        case = f"{options.tokens:,} tokens, {options.heads} heads of {options.width}{', causal' if causal else ''}"
        measure_forward(report, report.row("forward", case), layer)
        measure_maps(report, report.row("maps", case, f"size {options.size}"), layer, options.size)
        measure_statistics(report, report.row("statistics", case), layer)
        for rows, cols in draw_rectangles(options.tokens):
            row = report.row("tile", case, f"{rows[1] - rows[0]:,} × {cols[1] - cols[0]:,}")
            measure_tile(report, row, layer, rows, cols)


def measure_forward(report: Report, row: Row, layer: Layer) -> None:
    report.measure(row, "chosen", layer.forward)
    if layer.on_gpu:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            report.measure(row, "cudnn", layer.forward)
        report.measure(row, "with sums", functools.partial(layer.run_cudnn, with_sums=True))


def measure_maps(report: Report, row: Row, layer: Layer, size: int) -> None:
    report.measure_in_turns(
        row, {"forward": layer.forward, "forward + maps": functools.partial(layer.forward_with_maps, size)}
    )
    sums = layer.run_cudnn(with_sums=True)[1] if layer.on_gpu else None
    captured = layer.capture(sums)
    if sums is None:
        statistics.compute_pooled_map(captured, head=None, size=8)  # computes the sums
    report.measure(row, "maps", functools.partial(statistics.compute_pooled_map, captured, head=None, size=size))
    report.measure(
        row, "sums unknown", lambda: statistics.compute_pooled_map(layer.capture(None), head=None, size=size)
    )
    report.note(row, **compute_errors(layer, captured, size))
    r.free_memory(report.device)


def measure_statistics(report: Report, row: Row, layer: Layer) -> None:
    captured = layer.capture(layer.run_cudnn(with_sums=True)[1] if layer.on_gpu else None)
    statistics.compute_received_weight(captured)  # computes the sums, if they are unknown
    report.measure(row, "forward", layer.forward)
    report.measure(row, "one", lambda: statistics.compute_received_weight(captured))
    report.measure(row, "all, top 8", lambda: statistics.compute_statistics(captured))


def compute_errors(layer: Layer, captured: CapturedAttention, size: int) -> dict[str, float]:
    """Return errors against float64: the first, middle and last row of cells of the first and last head."""
    maps = statistics.compute_pooled_map(captured, head=None, size=size).double()
    length, cells = layer.query.shape[2], maps.shape[1]
    key_axis = PoolingAxis(length, maps.shape[2], maps.device)
    worst_cell, worst_sum = 0.0, 0.0
    for head in (0, maps.shape[0] - 1):
        for cell in (0, cells // 2, cells - 1):
            rows = slice(cell * length // cells, (cell + 1) * length // cells)
            query, key = layer.query[0, head, rows].double(), layer.key[0, head].double()
            scores = query @ key.mT * captured.scale
            if layer.causal:
                last = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
                scores.masked_fill_(torch.arange(length, device=scores.device) > last, -torch.inf)
            exact = key_axis.pool(scores.softmax(-1), 1, slice(0, length)).mean(0)
            nonzero = exact > 1e-12
            error = ((maps[head, cell] - exact).abs() / exact)[nonzero].max().item()
            worst_cell = max(worst_cell, error)
            if captured.lse is not None:
                worst_sum = max(worst_sum, (captured.lse[0, head, rows] - scores.logsumexp(-1)).abs().max().item())
    return {"worst_cell": worst_cell, "worst_sum": worst_sum}


def draw_rectangles(tokens: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return rows and columns: everything, and random rectangles of several sizes."""
    rng = random.Random(1)
    rectangles = [((0, tokens), (0, tokens))]
    for share in (0.9, 0.5, 0.1, 0.01):
        sides = [max(1, int(share * tokens * rng.uniform(0.7, 1))) for _ in range(2)]
        starts = [rng.randint(0, tokens - side) for side in sides]
        rows, cols = ((start, start + side) for start, side in zip(starts, sides, strict=True))
        rectangles.append((rows, cols))
    return rectangles


def measure_tile(report: Report, row: Row, layer: Layer, rows: tuple[int, int], cols: tuple[int, int]) -> None:
    captured = layer.capture(layer.run_cudnn(with_sums=True)[1] if layer.on_gpu else None)
    report.measure(row, "tile", lambda: statistics.compute_pooled_map(captured, rows=rows, cols=cols, size=TILE))


def print_tables(rows: Sequence[Row]) -> None:
    lines = []
    plain = {
        row["case"]: r.fastest(row["implementations"], ["chosen", "cudnn"])[1]
        for row in rows
        if row["section"] == "forward"
    }
    for row in rows:
        results = row["implementations"]
        best = r.get(results, "forward") if row["section"] in ("maps", "statistics") else plain.get(row["case"])
        row["ratios"] = {name: ratio(r.get(results, name), best) for name in results}
        for name in results:
            label = row["section"] if name == row["section"] else f"{row['section']}: {name}"
            values = [r.get(results, name), row["ratios"][name], r.get(results, name, "mib"), row.get("worst_cell")]
            lines.append([row["case"], label, row["pass"], *values])
    head = ["case", "implementation", "size", "ms", "/forward", "MiB", "error"]
    r.table("Attention maps: ms, ratio to the plain forward pass, extra MiB, largest error of a cell", head, lines)


# ------------------------------------------------------------------------------------------------- tuning


def tune(report: Report, options: argparse.Namespace) -> None:
    """Measure the pooling kernel with several block sizes; all must give the same results."""
    from jumok.attention.kernels.lse import PoolingBlockSizes, compute_row_lse
    from jumok.attention.kernels.pooled_maps import compute_pooled_maps

    large = PoolingBlockSizes(queries=128, keys=128, num_warps=4, unroll=1, max_registers=168)
    by_warp = large._replace(sum_per_warp=True)
    candidates = [
        PoolingBlockSizes(),
        large,
        by_warp,
        by_warp._replace(num_stages=2),
        by_warp._replace(num_stages=4),
        by_warp._replace(target_programs=32768),
        by_warp._replace(target_programs=65536),
        by_warp._replace(target_programs=131072),
        by_warp._replace(num_polynomials=0),
        by_warp._replace(num_polynomials=2),
    ]
    layer = build_layer(options, options.causal)
    mask = {"diagonal": 0 if layer.causal else None, "scale": options.width**-0.5}
    query, key = layer.query[0], layer.key[0]
    row = report.row("tune", f"{options.tokens:,} tokens, {options.heads} heads", f"size {options.size}")
    report.measure(row, "row sums", lambda: compute_row_lse(query, key, **mask))
    sums = compute_row_lse(query, key, **mask)
    output_size = (min(options.size, options.tokens),) * 2
    expected: Tensor | None = None
    for blocks in candidates:
        name = f"{blocks.queries}×{blocks.keys}, {blocks.num_warps} warps, {blocks.num_stages} stages"
        name += f", unroll {blocks.unroll}, {blocks.max_registers} registers"
        name += f", {blocks.num_polynomials}/4 polynomials"
        name += f", {blocks.target_programs} programs{', sums per warp' * blocks.sum_per_warp}"
        run: Run = functools.partial(
            compute_pooled_maps, query, key, sums, output_size=output_size, blocks=blocks, **mask
        )
        measurement = report.measure(row, name, run)
        if "error" not in measurement:
            result = run()
            expected = result if expected is None else expected
            measurement["differs"] = ((result - expected).abs() / expected.clamp(min=1e-12)).max().item()
    results = row["implementations"]
    lines = [
        [name, r.get(results, name), r.get(results, name, "differs"), r.get(results, name, "mib")] for name in results
    ]
    lines.sort(key=lambda line: (line[1] is None, line[1]))
    r.table(
        "The pooling kernel, fastest first: ms, largest difference, MiB",
        ["block sizes", "ms", "differs", "MiB"],
        lines,
    )


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = r.build_parser(__doc__, ("layer", "model", "tune"), seconds=280)
    parser.add_argument("--tokens", type=int, help="default: 131072; 2048 on a CPU")
    parser.add_argument("--heads", type=int, help="default: 12; 2 on a CPU")
    parser.add_argument("--width", type=int, default=64, help="width of a head")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the maps, in cells")
    parser.add_argument("--causal", action="store_true", help="tune with a causal mask")
    parser.add_argument("--shapes", nargs="+", choices=look_model.SHAPES, help="models of section model")
    parser.add_argument("--lengths", nargs="+", type=int, help="numbers of tokens of section model")
    parser.set_defaults(section="layer")
    options = parser.parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    tokens = (16384 if on_gpu else 256) if options.quick else (131072 if on_gpu else 2048)
    options.tokens, options.heads = options.tokens or tokens, options.heads or (12 if on_gpu else 2)

    torch.manual_seed(0)
    report = Report("look", torch.device(options.device), seconds=options.seconds, repeats=3 if options.quick else 10)
    report.begin(options.out, quick=options.quick, section=options.section)
    measure = {"layer": measure_costs, "model": look_model.measure_models, "tune": tune}
    for name in r.list_sections(options, measure):
        try:
            measure[name](report, options)
        except Exception as error:  # keep what was measured
            report.failed(report.row(name, "remaining cases"), "all", r.short(error))
    measured = [row for row in report.rows if "all" not in row["implementations"]]
    for print_section, is_model in ((print_tables, False), (look_model.print_tables, True)):
        if rows := [row for row in measured if row["section"] != "tune" and (row["section"] == "model") == is_model]:
            print_section(rows)
    r.print_failures(report.rows)
    report.end()


if __name__ == "__main__":
    main()
