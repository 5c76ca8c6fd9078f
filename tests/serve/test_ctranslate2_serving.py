"""Serving with CTranslate2."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import number_translation
import pytest
import translation_runs
from number_translation import sentences
from running_server import RunningServer, http
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

pytestmark = pytest.mark.long


pytest.importorskip("ctranslate2")


@pytest.fixture(scope="module")
def predictor() -> CTranslate2TranslationPredictor:
    return ctranslate2_engine.load(number_translation.train_run(), "cpu", "float32")


@pytest.fixture
def local_server(predictor: CTranslate2TranslationPredictor, start_server: Any) -> RunningServer:
    return start_server({"numbers": TranslationService(predictor, RequestLimits())}, ServerLimits(max_batch_delay=0.05))  # type: ignore[no-any-return]


def test_concurrent_requests_are_batched_with_equal_results(
    local_server: RunningServer, predictor: CTranslate2TranslationPredictor
) -> None:
    texts = [english for english, _ in sentences(24, seed=7)]
    expected = [prediction.translation for prediction in predictor.predict(texts, build_options(2))]

    def translate(text: str) -> str:
        translation: str = local_server.post("/translate", {"text": text, "beam_size": 2}).json()["translation"]
        return translation

    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(translate, texts)) == expected
    metrics = local_server.get("/metrics").text
    [batches] = re.findall(r'jumok_batch_size_count\{model="numbers"\} ([\d.]+)', metrics)
    assert float(batches) <= 12


def _get_text(data: dict[str, Any]) -> str:
    """Return the text of an event: of a partial or of the final translation."""
    text: str = data["translation"] if "translation" in data else data["text"]
    return text


def build_options(beam: int) -> Any:
    return ctranslate2_engine.TranslationOptions(beam_size=beam)


def test_a_greedy_translation_is_streamed(local_server: RunningServer) -> None:
    request = {"text": "one two three four", "beam_size": 1}
    with http.stream("POST", f"{local_server.url}/translate/stream", json=request) as events:
        texts = [_get_text(json.loads(line[6:])) for line in events.iter_lines() if line.startswith("data: ")]
    assert texts[-1] == "eins zwei drei vier"
    assert len(texts) >= 2
    assert all(texts[-1].startswith(text) for text in texts)


def test_beam_search_is_not_streamed(local_server: RunningServer) -> None:
    request = {"text": "one two three four", "beam_size": 3}
    with http.stream("POST", f"{local_server.url}/translate/stream", json=request) as events:
        texts = [_get_text(json.loads(line[6:])) for line in events.iter_lines() if line.startswith("data: ")]
    assert texts == ["eins zwei drei vier"]


def test_alignments_and_attention_pages(local_server: RunningServer) -> None:
    request = {"text": "one two three", "alignments": True, "n_best": 2, "beam_size": 3}
    response = local_server.post("/translate", request).json()
    assert response["translation"] == "eins zwei drei"
    assert {target for _, target in response["alignment"]} == {0, 1, 2}
    assert len(response["alternatives"]) == 1
    attention_response = local_server.post("/attend/translate", {"text": "one two three"}).json()
    assert attention_response["prediction"]["translation"] == "eins zwei drei"
    assert http.get(f"{local_server.url}{attention_response['attention_url']}").status_code == 200


def test_a_too_long_text_is_a_client_error(local_server: RunningServer) -> None:
    response = local_server.post("/translate", {"text": "a " * 4096})
    assert response.status_code == 422
    assert "4095 at most" in response.text


def test_unsupported_runs_and_engines_are_rejected_at_startup(tmp_path: Path) -> None:
    run = Run.create_or_resume(tmp_path / "run", translation_runs.small_recipe("bahdanau"))
    with pytest.raises(InputError, match=r"CTranslate2 supports Transformers for translation"):
        server.load_services([str(run.folder)], RequestLimits(), "cpu", "ctranslate2")
    with pytest.raises(InputError, match=r"--engine fast: it is one of torch"):
        server.load_services([str(run.folder)], RequestLimits(), "cpu", "fast")


def test_engine_option(monkeypatch: pytest.MonkeyPatch) -> None:
    run = number_translation.train_run()

    def fail_to_serve(*_: Any) -> Any:
        raise InputError("stop here")

    loaded: list[Any] = []
    load = server.load_services
    monkeypatch.setattr(server, "load_services", lambda *args: loaded.append(load(*args)) or loaded[0])
    monkeypatch.setattr(server, "build_uvicorn_config", fail_to_serve)
    command = ["serve", str(run.folder), "--port", "0", "--engine", "ctranslate2", "--device", "cpu"]
    CliRunner().invoke(cli_app.app, command)
    [service] = loaded[0].values()
    assert isinstance(service.predictor, CTranslate2TranslationPredictor)
