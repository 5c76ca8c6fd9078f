"""What does it cost to see attention? A forward, the same with maps of all heads, and tiles to zoom into.

    python bench/look.py [--tokens 131072] [--heads 12] [--size 1024] [--tune] [--quick] [--out file.json]

forward   PyTorch's own attention: what it chooses, and cuDNN's kernel, without and with the sums of its rows
maps      the pooled maps of all heads: on top of the forward, by themselves, and with the sums unknown
tile      a map of 512 × 512 cells of one head, of rectangles at random: all of it, odd ones, small ones

Read the ratios: forward and maps together over the plain forward, measured in turns. On CUDA everything is
bfloat16. With --tune the pooling kernel is measured in several cuts, and nothing else.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """One attention layer: what goes in, and how it is run."""

    query: Tensor  # (1, H, n, D)
    key: Tensor
    value: Tensor
    causal: bool

    @property
    def on_gpu(self) -> bool:
        return self.query.is_cuda

    def forward(self) -> Tensor:
        return F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=self.causal)

    def by_cudnn(self, with_sums: bool) -> tuple[Tensor, Tensor | None]:
        """The output, and log Σ exp(score) of each row."""
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            self.query, self.key, self.value, None, with_sums, 0.0, self.causal
        )
        return found[0], found[1].reshape(self.query.shape[:3]) if with_sums else None

    def capture(self, sums: Tensor | None) -> CapturedAttention:
        scale, diagonal = self.query.shape[-1] ** -0.5, 0 if self.causal else None
        return CapturedAttention(self.query, self.key, scale=scale, diagonal=diagonal, lse=sums)

    def watched(self, size: int) -> tuple[Tensor, Tensor]:
        """The forward, and the maps of all heads."""
        if not self.on_gpu:
            return self.forward(), statistics.compute_pooled_map(self.capture(None), head=None, size=size)
        out, sums = self.by_cudnn(with_sums=True)
        return out, statistics.compute_pooled_map(self.capture(sums), head=None, size=size)


def build_layer(chosen: argparse.Namespace, causal: bool) -> Layer:
    device = torch.device(chosen.device)
    shape = (3, 1, chosen.heads, chosen.tokens, chosen.width)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Layer(*torch.randn(shape, device=device).to(dtype).unbind(), causal=causal)


# ------------------------------------------------------------------------------------------ what it costs


def costs(report: Report, chosen: argparse.Namespace) -> None:
    for causal in (False, True):
        layer = build_layer(chosen, causal)
        case = f"{chosen.tokens:,} tokens, {chosen.heads} heads of {chosen.width}{', causal' if causal else ''}"
        forward(report, report.row("forward", case), layer)
        maps(report, report.row("maps", case, f"size {chosen.size}"), layer, chosen.size)
        for rows, cols in rectangles(chosen.tokens):
            row = report.row("tile", case, f"{rows[1] - rows[0]:,} × {cols[1] - cols[0]:,}")
            tile(report, row, layer, rows, cols)


def forward(report: Report, row: Row, layer: Layer) -> None:
    report.measure(row, "chosen", layer.forward)
    if layer.on_gpu:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            report.measure(row, "cudnn", layer.forward)
        report.measure(row, "with sums", functools.partial(layer.by_cudnn, with_sums=True))


def maps(report: Report, row: Row, layer: Layer, size: int) -> None:
    report.measure_in_turns(row, {"forward": layer.forward, "forward + maps": functools.partial(layer.watched, size)})
    sums = layer.by_cudnn(with_sums=True)[1] if layer.on_gpu else None
    captured = layer.capture(sums)
    if sums is None:
        statistics.compute_pooled_map(captured, head=None, size=8)  # and the sums are known
    report.measure(row, "maps", functools.partial(statistics.compute_pooled_map, captured, head=None, size=size))
    report.measure(
        row, "sums unknown", lambda: statistics.compute_pooled_map(layer.capture(None), head=None, size=size)
    )
    report.note(row, **errors(layer, captured, size))
    r.tidy(report.device)


def errors(layer: Layer, captured: CapturedAttention, size: int) -> dict[str, float]:
    """Against float64, in the first, the middle and the last row of cells of the first and the last head."""
    maps = statistics.compute_pooled_map(captured, head=None, size=size).double()
    length, cells = layer.query.shape[2], maps.shape[1]
    across = PoolingAxis(length, maps.shape[2], maps.device)
    worst, off = 0.0, 0.0
    for head in (0, maps.shape[0] - 1):
        for cell in (0, cells // 2, cells - 1):
            rows = slice(cell * length // cells, (cell + 1) * length // cells)
            query, key = layer.query[0, head, rows].double(), layer.key[0, head].double()
            scores = query @ key.mT * captured.scale
            if layer.causal:
                last = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
                scores.masked_fill_(torch.arange(length, device=scores.device) > last, -torch.inf)
            exact = across.pool(scores.softmax(-1), 1, slice(0, length)).mean(0)
            there = exact > 1e-12
            worst = max(worst, ((maps[head, cell] - exact).abs() / exact)[there].max().item())
            if captured.lse is not None:
                off = max(off, (captured.lse[0, head, rows] - scores.logsumexp(-1)).abs().max().item())
    return {"worst_cell": worst, "worst_sum": off}


def rectangles(tokens: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Rows and columns: all, and some at random of several sizes."""
    dice = random.Random(1)
    found = [((0, tokens), (0, tokens))]
    for share in (0.9, 0.5, 0.1, 0.01):
        sides = [max(1, int(share * tokens * dice.uniform(0.7, 1))) for _ in range(2)]
        starts = [dice.randint(0, tokens - side) for side in sides]
        rows, cols = ((start, start + side) for start, side in zip(starts, sides, strict=True))
        found.append((rows, cols))
    return found


def tile(report: Report, row: Row, layer: Layer, rows: tuple[int, int], cols: tuple[int, int]) -> None:
    captured = layer.capture(layer.by_cudnn(with_sums=True)[1] if layer.on_gpu else None)
    report.measure(row, "tile", lambda: statistics.compute_pooled_map(captured, rows=rows, cols=cols, size=TILE))


def tables(rows: Sequence[Row]) -> None:
    lines = []
    plain = {row["case"]: r.fastest(row["ways"], ["chosen", "cudnn"])[1] for row in rows if row["section"] == "forward"}
    for row in rows:
        ways = row["ways"]
        best = r.get(ways, "forward") if row["section"] == "maps" else plain.get(row["case"])
        row["ratios"] = {way: ratio(r.get(ways, way), best) for way in ways}
        for way in ways:
            name = row["section"] if way == row["section"] else f"{row['section']}: {way}"
            found = [r.get(ways, way), row["ratios"][way], r.get(ways, way, "mib"), row.get("worst_cell")]
            lines.append([row["case"], name, row["pass"], *found])
    head = ["case", "what", "of", "ms", "/forward", "MiB", "error"]
    r.table("Seeing attention: ms, over the plain forward, extra MiB, worst cell", head, lines)


# ------------------------------------------------------------------------------------------------- tuning


def tune(report: Report, chosen: argparse.Namespace) -> None:
    """The pooling kernel in several cuts; each must give what the first one gives."""
    from jumok.attention.kernels.lse import PoolingBlockSizes, compute_row_lse
    from jumok.attention.kernels.pooled_maps import compute_pooled_maps

    large = PoolingBlockSizes(queries=128, keys=128, num_warps=4, unroll=1, max_registers=168)
    by_warp = large._replace(sum_per_warp=True)
    cuts = [
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
    layer = build_layer(chosen, chosen.causal)
    mask = {"diagonal": 0 if layer.causal else None, "scale": chosen.width**-0.5}
    query, key = layer.query[0], layer.key[0]
    row = report.row("tune", f"{chosen.tokens:,} tokens, {chosen.heads} heads", f"size {chosen.size}")
    report.measure(row, "sums of rows", lambda: compute_row_lse(query, key, **mask))
    sums = compute_row_lse(query, key, **mask)
    output_size = (min(chosen.size, chosen.tokens),) * 2
    right: Tensor | None = None
    for blocks in cuts:
        name = f"{blocks.queries}×{blocks.keys}, {blocks.num_warps} warps, {blocks.num_stages} stages"
        name += f", unroll {blocks.unroll}, {blocks.max_registers} registers"
        name += f", {blocks.num_polynomials}/4 polynomials"
        name += f", {blocks.target_programs} programs{', by warp' * blocks.sum_per_warp}"
        run: Run = functools.partial(
            compute_pooled_maps, query, key, sums, output_size=output_size, blocks=blocks, **mask
        )
        way = report.measure(row, name, run)
        if "error" not in way:
            came = run()
            right = came if right is None else right
            way["differs"] = ((came - right).abs() / right.clamp(min=1e-12)).max().item()
    ways = row["ways"]
    lines = [[name, r.get(ways, name), r.get(ways, name, "differs"), r.get(ways, name, "mib")] for name in ways]
    lines.sort(key=lambda line: (line[1] is None, line[1]))
    r.table(
        "The pooling kernel, fastest first: ms, largest difference, MiB",
        ["cut", "ms", "differs", "MiB"],
        lines,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, help="131072; 2048 on a CPU")
    parser.add_argument("--heads", type=int, help="12; 2 on a CPU")
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--size", type=int, default=1024, help="cells a side of the maps")
    parser.add_argument("--tune", action="store_true", help="only the pooling kernel, in several cuts")
    parser.add_argument("--causal", action="store_true", help="tune with a causal mask")
    parser.add_argument("--quick", action="store_true", help="a look only: smaller, less often")
    parser.add_argument("--out", type=Path, help="the JSON file; runs/bench/… unless --quick")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=280, help="what does not fit into them is left out")
    chosen = parser.parse_args(arguments)
    on_gpu = torch.device(chosen.device).type == "cuda"
    small = (16384 if on_gpu else 256) if chosen.quick else (131072 if on_gpu else 2048)
    chosen.tokens, chosen.heads = chosen.tokens or small, chosen.heads or (12 if on_gpu else 2)

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    report = Report("look", torch.device(chosen.device), seconds=chosen.seconds, repeats=3 if chosen.quick else 10)
    report.begin(chosen.out, quick=chosen.quick, section="tune" if chosen.tune else "all")
    try:
        (tune if chosen.tune else costs)(report, chosen)
    except Exception as error:  # what was measured before is told nevertheless
        report.failed(report.row("look", "the rest of it"), "all", r.short(error))
    if not chosen.tune:
        tables([row for row in report.rows if "all" not in row["ways"]])
    r.failures(report.rows)
    report.end()


if __name__ == "__main__":
    main()
