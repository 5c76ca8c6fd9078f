"""Small runs of every task, and servers that are stopped after a test.

The fixtures import the tasks themselves, so that tests with an echo service need none of them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tasks")]

from running_server import Echo, RunningServer

import jumok
from jumok import recipe
from jumok.run import Run
from jumok.serve.limits import ServerLimits
from jumok.tasks import build_task, get_service_type
from jumok.tasks.api import RequestLimits

COUNTING = "one two three four five six . seven eight nine ten eleven twelve ."
BERT = [
    "model.width=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.feed_forward_width=32",
    "model.max_positions=64",
]
BERT += [
    "masking.sequence_length=32",
    "tokenizer.vocab_size=120",
    "data.held_out_size=19",
    "train.batch_tokens=512",
    "train.device=cpu",
]
BERT += [
    "train.max_epochs=null",
    "train.max_minutes=null",
    "train.max_steps=3",
    "train.warmup_steps=2",
    "train.log_every=1",
]
BERT += ["train.validate_every=3", "train.tensorboard=false"]

WORDS = [
    "model.embedding_width=8",
    "model.width=8",
    "model.attention_width=8",
    "data.held_out_size=9",
    "train.device=cpu",
]
WORDS += ["train.batch_tokens=1024", "train.max_epochs=1", "train.tensorboard=false", "train.validate_every=1000"]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each task by the name of its endpoint. They have learned next to nothing."""
    import labelled_runs
    import translation_runs

    from jumok.tasks.training import train

    root, chance = tmp_path_factory.mktemp("runs"), random.Random(1)
    made = {"translate": translation_runs.train_run(root / "translate", "transformer")}
    reviews = [labelled_runs.review(chance) for _ in range(60)]
    table = labelled_runs.table(root / "reviews.tsv", "text\tlabel", reviews)
    pairs = labelled_runs.table(
        root / "pairs.tsv", "text\tother\tlabel", [labelled_runs.pair(chance) for _ in range(60)]
    )
    tags = labelled_runs.tagged(root / "tags.txt", [labelled_runs.sentence(chance) for _ in range(60)])
    articles = [[labelled_runs.question(chance, most) for most in (3, 40)] for _ in range(20)]
    data: dict[str, tuple[str, dict[str, Any]]] = {
        "classify": ("classify", {"train": table}),
        "pairs": ("classify", {"train": pairs, "pair_column": "other"}),
        "tag": ("tag", {"train": tags, "tag_scheme": "iob1"}),
        "answer": ("answer", {"train": labelled_runs.squad(root / "squad.json", articles), "window_stride": 16}),
    }
    for name, (task, named) in data.items():
        made[name] = labelled_runs.train_run(
            root / name, task, {"held_out_size": 9, **named}, train={"max_epochs": 1, "batch_tokens": 1024}
        )
    lines = [" ".join(chance.sample(COUNTING.split(), 9)) for _ in range(300)]
    text = "\n\n".join("\n".join(lines[n : n + 5]) for n in range(0, 300, 5))
    (root / "text.txt").write_text(text, encoding="utf-8")
    words = recipe.load("hierarchical/default", [*WORDS, "data.builtin_size=90"])
    made["words"] = Run.create_or_resume(root / "words", words)
    train(build_task(made["words"]), Console(quiet=True))
    run = Run.create_or_resume(root / "fill", recipe.load("bert", [*BERT, f"data.train={root / 'text.txt'}"]))
    train(build_task(run), Console(quiet=True))
    made["fill-mask"] = run
    return {name: run.folder for name, run in made.items()}


@pytest.fixture(scope="session")
def predictors(runs: dict[str, Path]) -> dict[str, Any]:
    """What jumok.load gives."""
    return {name: jumok.load(folder, "cpu") for name, folder in runs.items()}


@pytest.fixture(scope="session")
def services(predictors: dict[str, Any]) -> dict[str, Any]:
    """The same, to be served."""
    tasks = {name: name for name in predictors} | {"fill-mask": "pretrain", "pairs": "classify", "words": "classify"}
    return {name: get_service_type(tasks[name])(one, RequestLimits()) for name, one in predictors.items()}


@pytest.fixture(scope="session")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What jumok.load gives of a run that describes pictures. It has learned next to nothing."""
    pytest.importorskip("PIL")
    import caption_runs

    root = tmp_path_factory.mktemp("captioner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUMOK_CACHE", str(root / "cache"))
        run = caption_runs.train_run(root / "run", caption_runs.small_recipe("captioner", "data.builtin_size=20"))
    return jumok.load(run.folder, "cpu")


@pytest.fixture(scope="session")
def caption_service(captioner: Any) -> Any:
    """The same, to be served."""
    return get_service_type("caption")(captioner, RequestLimits())


@pytest.fixture(scope="session")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What jumok.load gives of a run that speaks. It has learned next to nothing, and mumbles."""
    pytest.importorskip("librosa")
    pytest.importorskip("soundfile")
    import speech_runs

    root = tmp_path_factory.mktemp("voice")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUMOK_CACHE", str(root / "cache"))
        run = speech_runs.train_run(root / "run", speech_runs.small_recipe("tacotron", "data.held_out_size=5"))
    return jumok.load(run.folder, "cpu")


@pytest.fixture(scope="session")
def speak_service(voice: Any) -> Any:
    """The same, to be served."""
    return get_service_type("speak")(voice, RequestLimits())


@pytest.fixture
def serving() -> Iterator[Any]:
    """Starts servers, and stops them after the test."""
    some: list[RunningServer] = []

    def start(services: Mapping[str, Any], limits: ServerLimits | None = None, **more: Any) -> RunningServer:
        some.append(RunningServer(services, limits or ServerLimits(), **more))
        return some[-1]

    yield start
    for one in some:
        one.stop()


@pytest.fixture
def echo() -> Iterator[Echo]:
    one = Echo()
    yield one
    one.open.set()
