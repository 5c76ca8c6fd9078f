"""Small data of our own for BERT's uses, that can be learned in seconds, and runs of it."""

import json
import random
from pathlib import Path
from typing import Any

from rich.console import Console

from jumok import recipe
from jumok.run import Run
from jumok.tasks import build_task
from jumok.tasks.training import train

GOOD, BAD = ["nice", "lovely", "great", "happy"], ["awful", "sad", "boring", "poor"]
OTHER = ["the", "film", "was", "a", "very", "long", "story", "and"]
PEOPLE, PLACES = ["Anna", "Bruno", "Carla Maria", "Dieter"], ["Seoul", "New York", "Paris", "Busan"]
MODEL = {
    "width": 32,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_width": 64,
    "max_positions": 40,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
TRAIN = {
    "max_epochs": 12,
    "validate_every": 10**6,  # at the end only: the last weights are kept, not the first ones that are right
    "batch_tokens": 512,
    "learning_rate": 3e-3,
    "schedule": "linear",
    "warmup_steps": 10,
    "average_checkpoints": 0,
    "patience": 0,
    "device": "cpu",
    "tensorboard": False,
    "log_every": 50,
}


def filler(chance: random.Random, most: int) -> list[str]:
    return [chance.choice(OTHER) for _ in range(chance.randint(1, most))]


def review(chance: random.Random, most: int = 6) -> tuple[str, str]:
    """A text, and its label: which kind of word is in it."""
    label = chance.randint(0, 1)
    word = chance.choice(GOOD if label else BAD)
    return " ".join([*filler(chance, most), word, *filler(chance, most)]), str(label)


def pair(chance: random.Random) -> tuple[str, str, str]:
    """Two texts, one with a good word and one with a bad one: which is the good one?"""
    label = chance.randint(0, 1)
    words = [chance.choice(BAD), chance.choice(GOOD)]
    one, other = (" ".join([*filler(chance, 3), word]) for word in (words if label else words[::-1]))
    return one, other, str(label)


def number(chance: random.Random) -> tuple[str, str]:
    """A text, and how many good words it has."""
    count = chance.randint(0, 4)
    words = [*(chance.choice(GOOD) for _ in range(count)), *filler(chance, 4)]
    chance.shuffle(words)
    return " ".join(words), str(count)


def sentence(chance: random.Random, most: int = 4) -> list[tuple[str, str]]:
    """Words with tags in IOB1."""
    words: list[tuple[str, str]] = []
    for _ in range(chance.randint(1, 3)):
        words += [(word, "O") for word in filler(chance, most)]
        kind, names = chance.choice([("PER", PEOPLE), ("LOC", PLACES)])
        words += [(word, f"I-{kind}") for word in chance.choice(names).split()]
    return [*words, (".", "O")]


def question(chance: random.Random, most: int = 4) -> dict[str, Any]:
    """A paragraph of SQuAD's: who, and where?"""
    who, where = chance.choice(PEOPLE), chance.choice(PLACES)
    context = " ".join([*filler(chance, most), who, "lives in", where, *filler(chance, most)])
    asked = [
        {"id": f"{kind}{chance.random()}", "question": f"{kind}?",
         "answers": [{"text": answer, "answer_start": context.index(answer)}]}
        for kind, answer in (("who", who), ("where", where))
    ]  # fmt: skip
    return {"context": context, "qas": asked}


def table(path: Path, header: str, rows: list[tuple[str, ...]]) -> str:
    path.write_text("\n".join([header, *("\t".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return str(path)


def tagged(path: Path, sentences: list[list[tuple[str, str]]]) -> str:
    blocks = ("".join(f"{word} NN {tag}\n" for word, tag in one) for one in sentences)
    path.write_text("\n".join(blocks), encoding="utf-8")
    return str(path)


def squad(path: Path, articles: list[list[dict[str, Any]]]) -> str:
    data = [{"title": f"article {n}", "paragraphs": some} for n, some in enumerate(articles)]
    path.write_text(json.dumps({"data": data}), encoding="utf-8")
    return str(path)


def train_run(folder: Path, task: str, data: dict[str, Any], **more: Any) -> Run:
    """A small run, to its end."""
    settings = TRAIN | more.pop("train", {})
    model = MODEL | more.pop("model", {})
    tree = {"task": task, "data": data, "model": model, "tokenizer": {"vocab_size": 200}, "train": settings, **more}
    run = Run.create_or_resume(folder, recipe.parse(tree))
    train(build_task(run), Console(quiet=True))
    return run
