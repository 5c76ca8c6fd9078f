"""Small runs of every task, and servers that are stopped after a test.

The fixtures import the tasks themselves, so that tests with an echo service need none of them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tasks")]

from running_server import EchoService, RunningServer, http

import jumok
from jumok import recipe
from jumok.run import Run
from jumok.serve.limits import ServerLimits
from jumok.tasks import build_task, get_service_type
from jumok.tasks.api import RequestLimits
from jumok.tasks.training import train

COUNTING = "one two three four five six . seven eight nine ten eleven twelve ."
BERT_OVERRIDES = [
    "model.width=16", "model.num_layers=2", "model.num_heads=2", "model.feed_forward_width=32",
    "model.max_positions=64", "masking.sequence_length=32", "tokenizer.vocab_size=120", "data.held_out_size=19",
    "train.batch_tokens=512", "train.device=cpu", "train.max_epochs=null", "train.max_minutes=null",
    "train.max_steps=3", "train.warmup_steps=2", "train.log_every=1", "train.validate_every=3",
    "train.tensorboard=false",
]  # fmt: skip
HIERARCHICAL_OVERRIDES = [
    "model.embedding_width=8", "model.width=8", "model.attention_width=8", "data.builtin_size=90",
    "data.held_out_size=9", "train.device=cpu", "train.batch_tokens=1024", "train.max_epochs=1",
    "train.tensorboard=false", "train.validate_every=1000",
]  # fmt: skip


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders of all tasks by the names of their endpoints. The models have learned next to nothing."""
    import labelled_runs
    import translation_runs

    root, rng = tmp_path_factory.mktemp("runs"), random.Random(1)
    runs = {"translate": translation_runs.train_run(root / "translate", "transformer")}
    reviews = [labelled_runs.make_review(rng) for _ in range(60)]
    review_path = labelled_runs.write_table(root / "reviews.tsv", "text\tlabel", reviews)
    pairs = [labelled_runs.make_pair(rng) for _ in range(60)]
    pair_path = labelled_runs.write_table(root / "pairs.tsv", "text\tother\tlabel", pairs)
    tag_path = labelled_runs.write_tagged(root / "tags.txt", [labelled_runs.make_sentence(rng) for _ in range(60)])
    articles = [[labelled_runs.make_question(rng, size) for size in (3, 40)] for _ in range(20)]
    squad_path = labelled_runs.write_squad(root / "squad.json", articles)
    data: dict[str, tuple[str, dict[str, Any]]] = {
        "classify": ("classify", {"train": review_path}),
        "pairs": ("classify", {"train": pair_path, "pair_column": "other"}),
        "tag": ("tag", {"train": tag_path, "tag_scheme": "iob1"}),
        "answer": ("answer", {"train": squad_path, "window_stride": 16}),
    }
    for name, (task, config) in data.items():
        runs[name] = labelled_runs.train_run(
            root / name, task, {"held_out_size": 9, **config}, train={"max_epochs": 1, "batch_tokens": 1024}
        )
    lines = [" ".join(rng.sample(COUNTING.split(), 9)) for _ in range(300)]
    text = "\n\n".join("\n".join(lines[n : n + 5]) for n in range(0, 300, 5))
    (root / "text.txt").write_text(text, encoding="utf-8")
    recipes = {
        "words": recipe.load("hierarchical/default", HIERARCHICAL_OVERRIDES),
        "fill-mask": recipe.load("bert", [*BERT_OVERRIDES, f"data.train={root / 'text.txt'}"]),
    }
    for name, loaded_recipe in recipes.items():
        runs[name] = Run.create_or_resume(root / name, loaded_recipe)
        train(build_task(runs[name]), Console(quiet=True))
    return {name: run.folder for name, run in runs.items()}


@pytest.fixture(scope="session")
def predictors(runs: dict[str, Path]) -> dict[str, Any]:
    """The predictors of all runs."""
    return {name: jumok.load(folder, "cpu") for name, folder in runs.items()}


def build_service(predictor: Any) -> Any:
    return get_service_type(predictor.run.recipe.task)(predictor, RequestLimits())


@pytest.fixture(scope="session")
def services(predictors: dict[str, Any]) -> dict[str, Any]:
    """The services of all predictors."""
    return {name: build_service(predictor) for name, predictor in predictors.items()}


@pytest.fixture(scope="session")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The predictor of an image captioner that has learned next to nothing."""
    pytest.importorskip("PIL")
    import caption_runs

    root = tmp_path_factory.mktemp("captioner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUMOK_CACHE", str(root / "cache"))
        run = caption_runs.train_run(root / "run", caption_runs.small_recipe("captioner", "data.builtin_size=20"))
    return jumok.load(run.folder, "cpu")


@pytest.fixture(scope="session")
def caption_service(captioner: Any) -> Any:
    return build_service(captioner)


@pytest.fixture(scope="session")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The predictor of a Tacotron that has learned next to nothing."""
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
    return build_service(voice)


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Start servers, and stop them after the test."""
    servers: list[RunningServer] = []

    def start(services: Mapping[str, Any], limits: ServerLimits | None = None, **options: Any) -> RunningServer:
        servers.append(RunningServer(services, limits or ServerLimits(), **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def echo() -> Iterator[EchoService]:
    service = EchoService()
    yield service
    service.may_work.set()


@pytest.fixture(scope="session", autouse=True)
def close_client() -> Iterator[None]:
    """Close the HTTP client of all tests."""
    yield
    http.close()
