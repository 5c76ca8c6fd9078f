"""Small generated data for the tasks of a fine-tuned BERT, which can be learned in seconds, and runs on it."""

import gzip
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
    "validate_every": 10**6,  # at the end only, so that the last weights are stored
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


def random_words(rng: random.Random, most: int) -> list[str]:
    return [rng.choice(OTHER) for _ in range(rng.randint(1, most))]


def make_review(rng: random.Random, most: int = 6) -> tuple[str, str]:
    """A text and its label: whether it has a good or a bad word."""
    label = rng.randint(0, 1)
    word = rng.choice(GOOD if label else BAD)
    return " ".join([*random_words(rng, most), word, *random_words(rng, most)]), str(label)


def make_pair(rng: random.Random) -> tuple[str, str, str]:
    """Two texts, and whether the first or the second one has a good word."""
    label = rng.randint(0, 1)
    words = [rng.choice(BAD), rng.choice(GOOD)]
    first, second = (" ".join([*random_words(rng, 3), word]) for word in (words if label else words[::-1]))
    return first, second, str(label)


def make_number(rng: random.Random) -> tuple[str, str]:
    """A text, and the number of its good words."""
    count = rng.randint(0, 4)
    words = [*(rng.choice(GOOD) for _ in range(count)), *random_words(rng, 4)]
    rng.shuffle(words)
    return " ".join(words), str(count)


def make_sentence(rng: random.Random, most: int = 4) -> list[tuple[str, str]]:
    """Words with tags in IOB1."""
    words: list[tuple[str, str]] = []
    for _ in range(rng.randint(1, 3)):
        words += [(word, "O") for word in random_words(rng, most)]
        kind, names = rng.choice([("PER", PEOPLE), ("LOC", PLACES)])
        words += [(word, f"I-{kind}") for word in rng.choice(names).split()]
    return [*words, (".", "O")]


def make_question(rng: random.Random, most: int = 4) -> dict[str, Any]:
    """A paragraph in the SQuAD format, with the questions who and where."""
    who, where = rng.choice(PEOPLE), rng.choice(PLACES)
    context = " ".join([*random_words(rng, most), who, "lives in", where, *random_words(rng, most)])
    questions = [
        {"id": f"{kind}{rng.random()}", "question": f"{kind}?",
         "answers": [{"text": answer, "answer_start": context.index(answer)}]}
        for kind, answer in (("who", who), ("where", where))
    ]  # fmt: skip
    return {"context": context, "qas": questions}


def write_table(path: Path, header: str, rows: list[tuple[str, ...]]) -> str:
    path.write_text("\n".join([header, *("\t".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return str(path)


def write_tagged(path: Path, sentences: list[list[tuple[str, str]]]) -> str:
    blocks = ("".join(f"{word} NN {tag}\n" for word, tag in sentence) for sentence in sentences)
    path.write_text("\n".join(blocks), encoding="utf-8")
    return str(path)


def write_squad(path: Path, articles: list[list[dict[str, Any]]]) -> str:
    data = [{"title": f"article {n}", "paragraphs": paragraphs} for n, paragraphs in enumerate(articles)]
    path.write_text(json.dumps({"data": data}), encoding="utf-8")
    return str(path)


def train_run(folder: Path, task: str, data: dict[str, Any], **sections: Any) -> Run:
    """Train a small model."""
    settings = TRAIN | sections.pop("train", {})
    model = MODEL | sections.pop("model", {})
    tree = {"task": task, "data": data, "model": model, "tokenizer": {"vocab_size": 200}, "train": settings, **sections}
    run = Run.create_or_resume(folder, recipe.parse(tree))
    train(build_task(run), Console(quiet=True))
    return run


def write_gzip(path: Path, text: str) -> None:
    """Write PATH.gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(text.encode()))
