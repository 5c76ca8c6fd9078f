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
SMALL = [
    "train.device=cpu",
    "train.average_checkpoints=0",
    "train.tensorboard=false",
    "train.max_epochs=null",
]
SMALL += ["train.max_minutes=null", "train.max_steps=3", "train.warmup_steps=1", "train.validate_every=3"]
SMALL += ["train.log_every=1", "train.batch_tokens=400", "train.precision=float32", "train.patience=0"]
SMALL += ["data.builtin_size=30", "decode.griffin_lim_iterations=2", "evaluation.num_judges=1"]
SIZES = [
    "model.embedding_width=8",
    "model.encoder_width=8",
    "model.conv_bank_size=3",
    "model.prenet_widths=[8, 8]",
    "model.decoder_width=8",
]
SIZES += [
    "model.attention_width=8",
    "model.postnet_width=8",
    "model.location_filters=2",
    "model.location_kernel_size=3",
]
SIZES += ["model.style.conv_channels=[2, 3, 4]", "model.style.width=8", "model.style.num_heads=2"]


def small_recipe(name: str, *more: str) -> Any:
    """A recipe with small sizes."""
    return recipe.load(name, [*SMALL, *SIZES, *more])


def train_run(folder: Path, chosen: Any, console: Console = QUIET) -> Run:
    run = Run.create_or_resume(folder, chosen)
    train(build_task(run), console)
    return run


def folder_of(path: Path, count: int, broken: tuple[int, ...] = ()) -> Path:
    """Write a folder of recordings, and ``metadata.tsv``: three speakers, two emotions, two texts."""
    path.mkdir(parents=True, exist_ok=True)
    rows = ["file\ttext\tspeaker\temotion\tsplit"]
    for number in range(count):
        said = synthesize_utterance(5, number, 8000)
        save_audio(path / f"{number}.wav", said.waveform, said.sample_rate)
        if number in broken:
            (path / f"{number}.wav").write_bytes(b"RIFF this is no recording")
        split = "test" if number % 5 == 4 else "train"
        mood = ("sad", "merry")[number % 2]
        rows.append(f"{number}.wav\t{('one', 'two')[number % 2]}\tspeaker {number % 3}\t{mood}\t{split}")
    (path / "metadata.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def samples(path: Path) -> tuple[np.ndarray, int]:
    import soundfile

    found: tuple[np.ndarray, int] = soundfile.read(io.BytesIO(path.read_bytes()), dtype="float32")
    return found


def events(run: Run, name: str) -> list[dict[str, Any]]:
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]
