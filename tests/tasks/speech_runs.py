"""Recordings in files, and speech recipes with small sizes."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jumok import recipe
from jumok.data.audio import save_audio
from jumok.data.builtin.spoken_numbers import synthesize_utterance
from jumok.run import Run
from jumok.tasks import build_task
from jumok.tasks.training import train

QUIET = Console(quiet=True)
SMALL = ["train.device=cpu", "train.average_checkpoints=0", "train.tensorboard=false", "train.max_epochs=null"]
SMALL += ["train.max_minutes=null", "train.max_steps=3", "train.warmup_steps=1", "train.validate_every=3"]
SMALL += ["train.log_every=1", "train.batch_tokens=400", "train.precision=float32", "train.patience=0"]
SMALL += ["data.builtin_size=30", "decode.griffin_lim_iterations=2", "evaluation.num_judges=1"]
SMALL += [f"model.{name}_width=8" for name in ("embedding", "encoder", "decoder", "attention", "postnet")]
SMALL += ["model.prenet_widths=[8, 8]", "model.conv_bank_size=3", "model.location_filters=2"]
SMALL += ["model.location_kernel_size=3"]
STYLE = ["model.style.conv_channels=[2,3,4]", "model.style.width=8", "model.style.num_heads=2"]


def small_recipe(name: str, *overrides: str, style: tuple[str, ...] | list[str] = STYLE) -> Any:
    """A recipe with small sizes."""
    return recipe.load(name, [*SMALL, *style, *overrides])


def train_run(folder: Path, settings: Any) -> Run:
    run = Run.create_or_resume(folder, settings)
    train(build_task(run), QUIET)
    return run


def write_recordings(folder: Path, count: int, damaged: tuple[int, ...] = ()) -> Path:
    """Write a folder of recordings, and ``metadata.tsv``: three speakers, two emotions, two texts."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["file\ttext\tspeaker\temotion\tsplit"]
    for number in range(count):
        utterance = synthesize_utterance(5, number, 8000)
        path = folder / f"{number}.wav"
        save_audio(path, utterance.waveform, utterance.sample_rate)
        if number in damaged:
            path.write_bytes(b"RIFF this is no recording")
        split = "test" if number % 5 == 4 else "train"
        text, emotion = (("one", "sad"), ("two", "merry"))[number % 2]
        rows.append(f"{path.name}\t{text}\tspeaker {number % 3}\t{emotion}\t{split}")
    (folder / "metadata.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return folder


def read_waveform(path: Path) -> tuple[np.ndarray, int]:
    import soundfile

    waveform, sample_rate = soundfile.read(io.BytesIO(path.read_bytes()), dtype="float32")
    return waveform, sample_rate


def read_events(run: Run, name: str) -> list[dict[str, Any]]:
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]
