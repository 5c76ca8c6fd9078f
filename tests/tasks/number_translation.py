"""A trained translation run: English numbers to German numbers."""

import functools
import random
import tempfile
from pathlib import Path

from rich.console import Console

from jumok import recipe
from jumok.run import Run
from jumok.tasks import build_task
from jumok.tasks.training import train

ENGLISH = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
GERMAN = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
SMALL = ["tokenizer.type=words", "tokenizer.vocab_size=40", "tokenizer.shared_vocabulary=true"]
SMALL += ["tokenizer.byte_fallback=false", "data.held_out_size=30", "model.width=32", "model.num_heads=2"]
SMALL += ["model.feed_forward_width=64", "model.encoder_layers=1", "model.decoder_layers=2", "model.dropout=0"]
SMALL += ["train.device=cpu", "train.average_checkpoints=0"]
# Smoothing would give a share to words that are never said: much of it, where there are few others.
SMALL += ["model.label_smoothing=0"]
SMALL += [
    "train.max_steps=200",
    "train.max_epochs=null",
    "train.max_minutes=null",
    "train.batch_tokens=512",
    "train.warmup_steps=30",
]
SMALL += ["train.learning_rate=5e-3", "train.validate_every=200", "train.tensorboard=false"]


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Generate sentences of one to six numbers, in both languages."""
    rng, pairs = random.Random(seed), []
    for _ in range(count):
        numbers = [rng.randrange(9) for _ in range(rng.randrange(1, 7))]
        pairs.append((" ".join(ENGLISH[n] for n in numbers), " ".join(GERMAN[n] for n in numbers)))
    return pairs


@functools.cache
def train_run() -> Run:
    """Train the run, once per process. Tests must not change it."""
    home = Path(_HOME.name)
    lines = [f"{english}\t{german}\n" for english, german in sentences(600, seed=1)]
    (home / "numbers.tsv").write_text("".join(lines), encoding="utf-8")
    run = Run.create_or_resume(
        home / "numbers", recipe.load("transformer", [*SMALL, f"data.train={home / 'numbers.tsv'}"])
    )
    train(build_task(run), Console(quiet=True))
    return run


_HOME = tempfile.TemporaryDirectory(prefix="jumok-numbers-", ignore_cleanup_errors=True)
