"""A server whose translations come from CTranslate2."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import number_translation
import pytest
import translation_runs
from number_translation import sentences
from running_server import RunningServer
from typer.testing import CliRunner

from jumok.cli import app as cli_app
from jumok.errors import InputError
from jumok.inference import ctranslate2_engine
from jumok.inference.ctranslate2_engine import CTranslate2TranslationPredictor
from jumok.run import Run
from jumok.serve import server
from jumok.serve.limits import ServerLimits
from jumok.tasks.api import RequestLimits
from jumok.tasks.translate.api import TranslationService

pytest.importorskip("ctranslate2")

http = httpx2.Client(verify=False, timeout=20)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    http.close()


@pytest.fixture(scope="module")
def quick() -> CTranslate2TranslationPredictor:
    return ctranslate2_engine.load(number_translation.train_run(), "cpu", "float32")


@pytest.fixture
def running(quick: CTranslate2TranslationPredictor, serving: Any) -> RunningServer:
    return serving({"numbers": TranslationService(quick, RequestLimits())}, ServerLimits(max_batch_delay=0.05))  # type: ignore[no-any-return]


def test_many_are_answered_together_as_one_by_one(
    running: RunningServer, quick: CTranslate2TranslationPredictor
) -> None:
    texts = [english for english, _ in sentences(24, seed=7)]
    expected = [one.translation for one in quick.predict(texts, quick_search(2))]

    def ask(text: str) -> str:
        said: str = http.post(f"{running.url}/translate", json={"text": text, "beam_size": 2}).json()["translation"]
        return said

    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(ask, texts)) == expected
    figures = http.get(f"{running.url}/metrics").text
    [batches] = re.findall(r'jumok_batch_size_count\{model="numbers"\} ([\d.]+)', figures)
    assert float(batches) <= 12


def _text(data: dict[str, Any]) -> str:
    """The text of an event: so far, or at the end."""
    text: str = data["translation"] if "translation" in data else data["text"]
    return text


def quick_search(beam: int) -> Any:
    return ctranslate2_engine.TranslationOptions(beam_size=beam)


def test_a_greedy_translation_is_streamed(running: RunningServer) -> None:
    asked = {"text": "one two three four", "beam_size": 1}
    with http.stream("POST", f"{running.url}/translate/stream", json=asked) as events:
        said = [_text(json.loads(line[6:])) for line in events.iter_lines() if line.startswith("data: ")]
    assert said[-1] == "eins zwei drei vier"
    assert len(said) >= 2
    assert all(said[-1].startswith(text) for text in said)


def test_a_beam_is_told_when_it_is_done(running: RunningServer) -> None:
    asked = {"text": "one two three four", "beam_size": 3}
    with http.stream("POST", f"{running.url}/translate/stream", json=asked) as events:
        said = [_text(json.loads(line[6:])) for line in events.iter_lines() if line.startswith("data: ")]
    assert said == ["eins zwei drei vier"]


def test_links_and_maps_are_there_too(running: RunningServer) -> None:
    asked = {"text": "one two three", "alignments": True, "n_best": 2, "beam_size": 3}
    found = http.post(f"{running.url}/translate", json=asked).json()
    assert found["translation"] == "eins zwei drei"
    assert {target for _, target in found["alignment"]} == {0, 1, 2}
    assert len(found["alternatives"]) == 1
    seen = http.post(f"{running.url}/attend/translate", json={"text": "one two three"}).json()
    assert seen["prediction"]["translation"] == "eins zwei drei"
    assert http.get(f"{running.url}{seen['attention_url']}").status_code == 200


def test_a_text_that_is_too_long_for_it_is_an_error_of_the_client(running: RunningServer) -> None:
    answer = http.post(f"{running.url}/translate", json={"text": "a " * 4096})
    assert answer.status_code == 422
    assert "4095 at most" in answer.text


def test_what_an_engine_does_not_take_is_told_at_the_start(tmp_path: Path) -> None:
    run = Run.create_or_resume(tmp_path / "run", translation_runs.small_recipe("bahdanau"))
    with pytest.raises(InputError, match=r"CTranslate2 supports Transformers for translation"):
        server.load_services([str(run.folder)], RequestLimits(), "cpu", "ctranslate2")
    with pytest.raises(InputError, match=r"--engine fast: it is one of torch"):
        server.load_services([str(run.folder)], RequestLimits(), "cpu", "fast")


def test_the_command_takes_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    run = number_translation.train_run()

    def served(*_: Any) -> Any:
        raise InputError("it would listen now")

    loaded: list[Any] = []
    load = server.load_services
    monkeypatch.setattr(server, "load_services", lambda *given: loaded.append(load(*given)) or loaded[0])
    monkeypatch.setattr(server, "build_uvicorn_config", served)
    words = ["serve", str(run.folder), "--port", "0", "--engine", "ctranslate2", "--device", "cpu"]
    CliRunner().invoke(cli_app.app, words)
    [service] = loaded[0].values()
    assert isinstance(service.predictor, CTranslate2TranslationPredictor)
