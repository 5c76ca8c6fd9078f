"""Frames per second of the viewer in Chromium, and size, writing time, opening time and error of saved files.

    python bench/look_browser.py [--section frames|files|all] [--length 65536] [--seconds 5] [--model FOLDER]

Frames are counted while a map of 65,536 × 65,536 weights is panned and zoomed.

The page is that of `jumok look`, with a synthetic map whose tiles cost about 10 ms, as real ones on a GPU. A frame
counts when the viewer has drawn it; there is at most one for each refresh of the screen. "Late" is the 99th percentile
of the time between frames. Without a GPU, Chromium's results are a lower bound.

Files: BERT base with random weights (flat maps, and peaked ones with larger weights) at 512 tokens with all 144 heads,
a trained encoder (``--model``, a local folder) at 512 tokens, and a synthetic map of 16 heads at 100,000 tokens.
"Opening" is the time until the first map is drawn, the least of three. "Error" is the relative error that 99 % of the
weights of at least the mean do not exceed, of one head as the browser computes it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import report as r
import torch
import uvicorn
from huge_map import HugeMap
from playwright.sync_api import sync_playwright

import jumok
from jumok.look.viewer.html_file import save_html
from jumok.look.viewer.page import build_app
from jumok.look.viewer.score_factors import compute_relative_errors
from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer

FLAGS = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
# Moves the view before every frame, and returns the times between drawn frames.
MOVE = """([seconds, kind]) => new Promise((done) => {
    const map = document.querySelector("#viewer").jumok.maps[0], times = [], before = map.frames;
    const began = performance.now();
    let last = began, drawn = map.frames;
    const step = (now) => {
        if (map.frames > drawn) { times.push(now - last); last = now; drawn = map.frames; }
        const ms = now - began;
        if (ms > seconds * 1000) return done({ times, frames: map.frames - before, ms });
        const turn = ms / 700;
        if (kind === "pan") map.pan(-9 * Math.cos(turn / 3), -7);
        else map.zoom(1 + 0.02 * Math.sin(turn), { x: 400, y: 300 });
        requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
})"""


# Whether the first map is drawn.
IS_DRAWN = """() => { const v = document.querySelector("#viewer")?.jumok;
    return v && v.maps[0].frames > 0 && !v.store.inFlight.size && !v.store.pending.size && !v.maps[0].waiting; }"""
READ_WEIGHTS = """([layer, head, rows, cols]) => document.querySelector("#viewer").jumok.store.host(
    { data: 0, layer, head, rows: [0, rows], cols: [0, cols], size: 256, quantity: "weights" })
    .then((buffer) => [...new Float32Array(buffer, 16)])"""
NUM_TOKENS, LONG_LENGTH = 512, 100_000
PEAKED_FACTOR = 3.0  # of the weights of queries and keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", choices=["frames", "files", "all"], default="all")
    parser.add_argument("--length", type=int, default=65_536)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--model", type=Path, help="a trained encoder: a folder written by save_pretrained")
    parser.add_argument("--chromium", default=os.environ.get("JUMOK_CHROMIUM") or shutil.which("chromium"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.chromium is None:
        raise SystemExit("Chromium was not found; install it (apt-get install chromium) or use --chromium PATH")
    report = r.Report("look_browser", torch.device("cpu"), seconds=600.0, repeats=1)
    report.out = options.out
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=FLAGS)
        report.head["chromium"] = browser.version
        if options.section != "frames":
            report_files(report, browser, options.model)
        if options.section != "files":
            report_frames(report, browser, options)
        browser.close()


def report_frames(report: r.Report, browser: Any, options: argparse.Namespace) -> None:
    url, stop = serve(options.length)
    for width, height in ((1280, 800), (1920, 1080)):
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(url)
        page.wait_for_selector(".jumok")
        for kind, scale in (("pan", 0.05), ("pan", 1.0), ("pan", 20.0), ("zoom", 0.2)):
            row = report.row("browser", f"{width} × {height}", f"{kind} at {scale:g} pixels per token")
            report.note(row, **measure_frames(page, kind, scale, options))
            fps, late = row["frames_per_second"], row["late_ms"]
            report.log(f"{row['case']}  {row['pass']}: {fps:.0f} frames per second, late {late:.0f} ms")
        page.close()
    stop()


def report_files(report: r.Report, browser: Any, model_folder: Path | None) -> None:
    cases = {
        "BERT base, random, flat": lambda: capture_bert(1.0),
        "BERT base, random, peaked": lambda: capture_bert(PEAKED_FACTOR),
        "16 heads at 100,000 tokens": build_long_data,
    }
    if model_folder is not None:
        cases["trained encoder"] = lambda: capture_encoder(model_folder)
    for case, build in cases.items():
        row = report.row("files", case)
        report.note(row, **measure_file(browser, build()))
        error = f", error {100 * row['error']:.2g} %" if "error" in row else ""
        report.log(
            f"{case}: {row['mib']:.1f} MiB, written in {row['write_s']:.1f} s, opened in {row['open_s']:.2f} s{error}"
        )


def measure_file(browser: Any, data: ViewerData) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map.html"
        start = time.perf_counter()
        save_html(data, path)
        result = {"write_s": time.perf_counter() - start, "mib": path.stat().st_size / 2**20}
        times = []
        for _ in range(3):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            start = time.perf_counter()
            page.goto(path.as_uri())
            page.wait_for_function(IS_DRAWN, polling=10)
            times.append(time.perf_counter() - start)
            if len(times) == 3:
                result |= measure_error(page, data)
            page.close()
    return {**result, "open_s": min(times)}


def measure_error(page: Any, data: ViewerData) -> dict[str, float]:
    """Compare a head in the middle of the model with its exact weights."""
    number = len(data.layers) // 2
    layer = data.layers[number]
    if max(layer.shape) > 1024:
        return {}
    start = time.perf_counter()
    decoded = page.evaluate(READ_WEIGHTS, [number, layer.heads[0], *layer.shape])
    seconds = time.perf_counter() - start
    errors = compute_relative_errors(
        layer.compute_weights(layer.heads[0]), np.reshape(np.asarray(decoded, np.float32), layer.shape)
    )
    return {"error": float(np.quantile(errors, 0.99)), "head_s": seconds}


def capture_bert(factor: float) -> ViewerData:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig()).eval()
    with torch.no_grad():
        for layer in model.encoder.layer:
            for linear in (layer.attention.self.query, layer.attention.self.key):
                linear.weight.mul_(factor)
    return capture(model, lambda ids: [f"t{number}" for number in ids], torch.randint(0, 30_000, (1, NUM_TOKENS)))


def capture_encoder(folder: Path) -> ViewerData:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    text = (Path(__file__).parents[1] / "docs" / "look.md").read_text(encoding="utf-8")
    max_length = min(NUM_TOKENS, model.config.max_position_embeddings)
    ids = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")["input_ids"]
    return capture(model, tokenizer, ids)


def capture(model: Any, tokenizer: Any, ids: torch.Tensor) -> ViewerData:
    with jumok.watch(model, tokenizer) as captures, torch.inference_mode():
        model(ids)
    return ViewerData.from_captures(captures)


def build_long_data() -> ViewerData:
    tokens = [f"t{n}" for n in range(LONG_LENGTH)]
    source, shape = HugeMap(LONG_LENGTH, 4), (LONG_LENGTH, LONG_LENGTH)
    return ViewerData(
        tuple(ViewerLayer(f"layers.{n}", "causal self", shape, (0, 1, 2, 3), source, tokens, tokens) for n in range(4))
    )


def measure_frames(page: Any, kind: str, scale: float, options: argparse.Namespace) -> dict[str, float]:
    """Measure frames from the middle of the diagonal, at ``scale`` pixels per token."""
    page.evaluate(
        """([scale, at]) => { const map = document.querySelector("#viewer").jumok.maps[0];
            Object.assign(map.view, { sx: scale, sy: scale, x: at, y: at }); map.moved(); }""",
        [scale, options.length / 3],
    )
    page.wait_for_timeout(300)
    result = page.evaluate(MOVE, [options.seconds, kind])
    times = sorted(result["times"])
    return {
        "frames_per_second": 1000 * result["frames"] / result["ms"],
        "median_ms": statistics.median(times),
        "late_ms": times[int(0.99 * (len(times) - 1))],
    }


def serve(length: int) -> tuple[str, Any]:
    tokens = [f"t{n}" for n in range(length)]
    data = ViewerData((ViewerLayer("layer", "self", (length, length), (0,), HugeMap(length, 1), tokens, tokens),))
    server = uvicorn.Server(uvicorn.Config(build_app(data), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)

    def stop() -> None:
        server.should_exit = True
        thread.join(10)

    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/", stop


if __name__ == "__main__":
    main()
