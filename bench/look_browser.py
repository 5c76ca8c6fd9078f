"""Frames per second of the viewer while a map of 65,536 × 65,536 weights is panned and zoomed in Chromium.

    python bench/look_browser.py [--length 65536] [--seconds 5]

The page is that of `jumok look`, with a synthetic map whose tiles cost about 10 ms, as real ones on a GPU. A frame
counts when the viewer has drawn it; there is at most one for each refresh of the screen. "Late" is the 99th percentile
of the time between frames. Without a GPU, Chromium's results are a lower bound.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import report as r
import torch
import uvicorn
from huge_map import HugeMap
from playwright.sync_api import sync_playwright

from jumok.look.viewer.page import build_app
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=65_536)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--chromium", default=os.environ.get("JUMOK_CHROMIUM") or shutil.which("chromium"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.chromium is None:
        raise SystemExit("Chromium was not found; install it (apt-get install chromium) or use --chromium PATH")
    report = r.Report("look_browser", torch.device("cpu"), seconds=600.0, repeats=1)
    report.out = options.out
    url, stop = serve(options.length)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=FLAGS)
        report.head["chromium"] = browser.version
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
        browser.close()
    stop()


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
