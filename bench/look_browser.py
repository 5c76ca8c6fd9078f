"""Frames a second while a map of 65,536 × 65,536 weights is panned and zoomed in Chromium.

    python bench/look_browser.py [--length 65536] [--seconds 5]

The page is served as `jumok look` does it, over a made-up map whose tiles cost what a GPU needs for real
ones (some 10 ms). A frame counts when the viewer has drawn it: at most one for each time the screen is
refreshed. "Late" is the slowest frame of a hundred. Without a GPU for
Chromium it is the lower end of what a reader has.
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
# Moves the view a little before every frame, and tells how long after one another the frames were drawn.
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
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--length", type=int, default=65_536)
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--chromium", default=os.environ.get("JUMOK_CHROMIUM") or shutil.which("chromium"))
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    if chosen.chromium is None:
        raise SystemExit("no Chromium was found: apt-get install chromium, or --chromium PATH")
    report = r.Report("look_browser", torch.device("cpu"), seconds=600.0, repeats=1)
    report.out = chosen.out
    url, stop = serve(chosen.length)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chosen.chromium, args=FLAGS)
        report.head["chromium"] = browser.version
        for width, height in ((1280, 800), (1920, 1080)):
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(url)
            page.wait_for_selector(".jumok")
            for kind, scale in (("pan", 0.05), ("pan", 1.0), ("pan", 20.0), ("zoom", 0.2)):
                row = report.row("browser", f"{width} × {height}", f"{kind} at {scale:g} pixels a token")
                report.note(row, **frames(page, kind, scale, chosen))
                fps, late = row["frames_per_second"], row["late_ms"]
                report.say(f"{row['case']}  {row['pass']}: {fps:.0f} frames a second, late {late:.0f} ms")
            page.close()
        browser.close()
    stop()


def frames(page: Any, kind: str, scale: float, chosen: argparse.Namespace) -> dict[str, float]:
    """From the middle of the diagonal on, at so many pixels a token."""
    page.evaluate(
        """([scale, at]) => { const map = document.querySelector("#viewer").jumok.maps[0];
            Object.assign(map.view, { sx: scale, sy: scale, x: at, y: at }); map.moved(); }""",
        [scale, chosen.length / 3],
    )
    page.wait_for_timeout(300)
    found = page.evaluate(MOVE, [chosen.seconds, kind])
    times = sorted(found["times"])
    return {
        "frames_per_second": 1000 * found["frames"] / found["ms"],
        "median_ms": statistics.median(times),
        "late_ms": times[int(0.99 * (len(times) - 1))],
    }


def serve(length: int) -> tuple[str, Any]:
    words = [f"t{n}" for n in range(length)]
    data = ViewerData((ViewerLayer("layer", "self", (length, length), (0,), HugeMap(length, 1), words, words),))
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
