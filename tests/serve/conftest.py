"""Small runs of every task, a service that does what a test wants, and servers that listen."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from rich.console import Console

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tasks")]

import tasks_labelled
import tasks_small

import jumok
from jumok import recipe
from jumok.run import Run
from jumok.serve.app import app
from jumok.serve.limits import Limits
from jumok.serve.server import config
from jumok.tasks import classify, pretrain, served
from jumok.tasks.served import Bounds

COUNTING = "one two three four five six . seven eight nine ten eleven twelve ."
BERT = ["model.width=16", "model.layers=2", "model.heads=2", "model.feed_forward=32", "model.positions=64"]
BERT += ["masking.length=32", "text.size=120", "data.held_out=19", "train.tokens=512", "train.device=cpu"]
BERT += ["train.epochs=null", "train.minutes=null", "train.steps=3", "train.warmup=2", "train.log_every=1"]
BERT += ["train.validate_every=3", "train.tensorboard=false"]

WORDS = ["model.embedding=8", "model.width=8", "model.attention=8", "data.held_out=9", "train.device=cpu"]
WORDS += ["train.tokens=1024", "train.epochs=1", "train.tensorboard=false", "train.validate_every=1000"]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each task by the name of its endpoint. They have learned next to nothing."""
    root, chance = tmp_path_factory.mktemp("runs"), random.Random(1)
    made = {"translate": tasks_small.trained(root / "translate", "transformer")}
    reviews = [tasks_labelled.review(chance) for _ in range(60)]
    table = tasks_labelled.table(root / "reviews.tsv", "text\tlabel", reviews)
    pairs = tasks_labelled.table(
        root / "pairs.tsv", "text\tother\tlabel", [tasks_labelled.pair(chance) for _ in range(60)]
    )
    tags = tasks_labelled.tagged(root / "tags.txt", [tasks_labelled.sentence(chance) for _ in range(60)])
    articles = [[tasks_labelled.question(chance, most) for most in (3, 40)] for _ in range(20)]
    data: dict[str, tuple[str, dict[str, Any]]] = {
        "classify": ("classify", {"train": table}),
        "pairs": ("classify", {"train": pairs, "pair": "other"}),
        "tag": ("tag", {"train": tags, "scheme": "iob1"}),
        "answer": ("answer", {"train": tasks_labelled.squad(root / "squad.json", articles), "stride": 16}),
    }
    for name, (task, named) in data.items():
        made[name] = tasks_labelled.trained(
            root / name, task, {"held_out": 9, **named}, train={"epochs": 1, "tokens": 1024}
        )
    lines = [" ".join(chance.sample(COUNTING.split(), 9)) for _ in range(300)]
    text = "\n\n".join("\n".join(lines[n : n + 5]) for n in range(0, 300, 5))
    (root / "text.txt").write_text(text, encoding="utf-8")
    words = recipe.load("hierarchical/default", [*WORDS, "data.documents=90"])
    made["words"] = Run.start(root / "words", words)
    classify.train(made["words"], Console(quiet=True))
    run = Run.start(root / "fill", recipe.load("bert", [*BERT, f"data.train={root / 'text.txt'}"]))
    pretrain.train(run, Console(quiet=True))
    made["fill"] = run
    return {name: run.folder for name, run in made.items()}


@pytest.fixture(scope="session")
def predictors(runs: dict[str, Path]) -> dict[str, Any]:
    """What jumok.load gives."""
    return {name: jumok.load(folder, "cpu") for name, folder in runs.items()}


@pytest.fixture(scope="session")
def services(predictors: dict[str, Any]) -> dict[str, Any]:
    """The same, to be served."""
    tasks = {name: name for name in predictors} | {
        "fill": "pretrain",
        "pairs": "classify",
        "words": "classify",
    }
    return {name: served.of(tasks[name]).Service(one, Bounds()) for name, one in predictors.items()}


class Running:
    """A server that listens on a free port of this machine."""

    def __init__(self, services: Mapping[str, Any], limits: Limits, **more: Any) -> None:
        self.app = app(services, limits, **more)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(config(self.app, limits))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.socket.close()
        assert not self.thread.is_alive()

    @contextlib.contextmanager
    def connected(self, sent: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as one:
            one.sendall(sent)
            yield one


@pytest.fixture
def serving() -> Iterator[Any]:
    """Starts servers, and stops them after the test."""
    some: list[Running] = []

    def start(services: Mapping[str, Any], limits: Limits | None = None, **more: Any) -> Running:
        some.append(Running(services, limits or Limits(), **more))
        return some[-1]

    yield start
    for one in some:
        one.stop()


def until(said: Any, seconds: float = 10.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


class Echo:
    """A service that says a text's letters one by one, as fast as it is let; a token is a letter."""

    class Asked(served.Asked):
        text: served.Text

    class Said(served.Answer):
        text: str

    task, says, streams, Request, Response = "echo", "Say it again.", True, Asked, Said

    def __init__(self) -> None:
        self.open = threading.Event()  # closed: work stops at the first letter
        self.open.set()
        self.batches: list[list[str]] = []
        self.finished: list[str] = []
        self.letters = 0
        self.stubborn = False  # goes on for those who have left
        self.working = threading.Event()

    def about(self) -> dict[str, Any]:
        return {}

    def size(self, asked: Asked) -> int:
        return len(asked.text)

    def alike(self, asked: Asked) -> Any:
        return asked.text[0].isupper()

    def predict(self, asked: Sequence[Asked], audience: Any) -> list[Said]:
        texts = [one.text for one in asked]
        self.batches.append(texts)
        if any("broken" in text for text in texts):
            raise RuntimeError("this one is broken")
        if any("unreadable" in text for text in texts):
            raise jumok.InputError("line 1 has words that nobody can read")
        self.working.set()
        for end in range(1, max(map(len, texts)) + 1):
            while not self.open.wait(0.005):
                if not self.stubborn and all(audience.gone(n) for n in range(len(texts))):
                    return [self.Said(text="")] * len(texts)
            self.letters += 1
            for n, text in enumerate(texts):
                if audience.hears(n) and end <= len(text):
                    audience.heard(n, text[:end])
        self.finished += texts
        return [self.Said(text=text) for text in texts]

    def look(self, asked: Asked, answer: Said) -> list[Any]:
        raise jumok.InputError("line 1: there is nothing to look at")


@pytest.fixture
def echo() -> Iterator[Echo]:
    one = Echo()
    yield one
    one.open.set()
