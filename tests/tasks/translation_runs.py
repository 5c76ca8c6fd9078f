"""Translation recipes with small sizes, and runs of them."""

import random
from pathlib import Path
from typing import Any

from rich.console import Console

from jumok import recipe
from jumok.data.builtin import english_korean
from jumok.run import Run
from jumok.tasks import build_task
from jumok.tasks.training import train

# Settings that make training fast.
SMALL = ["train.max_steps=3", "train.batch_tokens=256", "train.validate_every=3", "train.log_every=1"]
SMALL += ["train.warmup_steps=2", "tokenizer.vocab_size=400", "train.device=cpu", "train.average_checkpoints=0"]
SMALL += ["train.tensorboard=false"]
SIZES = {
    "seq2seq": ["model.width=8", "model.embedding_width=8"],
    "convolutional": ["model.width=8", "model.embedding_width=8", "model.encoder_layers=2", "model.decoder_layers=2"],
    "transformer": [
        "model.width=8",
        "model.num_heads=2",
        "model.feed_forward_width=16",
        "model.encoder_layers=2",
        "model.decoder_layers=2",
    ],
}


def sentences(count: int, seed: int) -> list[english_korean.SentencePair]:
    """Generate short sentences."""
    pairs = [pair for pair in english_korean.read_pairs("train", 2000) if len(pair.english.split()) <= 9]
    return random.Random(seed).sample(pairs, count)


def small_recipe(name: str, *overrides: str) -> Any:
    """A recipe with small sizes."""
    chosen = recipe.load(name)
    sizes = SIZES[chosen.model.type]
    return recipe.load(name, [*SMALL, *sizes, "data.builtin_size=60", "data.held_out_size=11", *overrides])


def train_run(folder: Path, name: str, *overrides: str) -> Run:
    """Train a small model."""
    run = Run.create_or_resume(folder, small_recipe(name, *overrides))
    train(build_task(run), Console(quiet=True))
    return run
