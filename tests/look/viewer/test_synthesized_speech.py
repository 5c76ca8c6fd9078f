"""Tests of synthesised speech: its data, and synthesis with other style token weights."""

from __future__ import annotations

import base64
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from jumok.errors import InputError
from jumok.look.viewer import html_file, page, view_writer
from jumok.look.viewer.synthesized_speech import StyleTokenWeights, SynthesizedSpeech
from jumok.look.viewer.tiles import unpack
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer, build_manifest
from jumok.look.viewer.word_merging import merge_into_words

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_speech import (
    FRAME_SECONDS,
    HOP_LENGTH,
    KOREAN,
    TOKENS,
    build_diagonal,
    build_speech_data,
    encode_wav,
    generate_sweep,
)

PAYLOAD = {"data": 0, "weights": [0.0, 0.5, 0.0, 0.0, -0.25]}


def build_entry(data: ViewerData) -> dict[str, Any]:
    entry: dict[str, Any] = build_manifest([data])["data"][0]
    return entry


# ---------------------------------------------------------------- data


def test_frames_steps_and_duration() -> None:
    speech = SynthesizedSpeech(torch.zeros(7, 3), frame_seconds=0.5, frames_per_step=2)  # type: ignore[arg-type]
    assert (speech.num_frames, speech.num_steps, speech.duration) == (7, 4, 3.5)
    assert speech.mel.dtype == np.float32


def test_spectrogram_is_scaled_to_its_range() -> None:
    speech = SynthesizedSpeech(np.array([[-4.0, 0.0], [1.0, 6.0]]))
    entry = build_entry(ViewerData.from_weights({"a": build_diagonal(2, 3)}, speech=speech))["speech"]
    assert list(base64.b64decode(entry["mel"])) == [0, 128, 102, 255]  # by band, the lowest first
    assert (entry["shape"], entry["frames_per_step"], entry["wav"]) == ([2, 2], 1, None)


def test_manifest_contains_audio_and_style() -> None:
    entry = build_entry(build_speech_data(KOREAN))
    assert base64.b64decode(entry["speech"]["wav"])[:4] == b"RIFF"
    assert entry["style"]["names"] == list(TOKENS)
    assert entry["style"]["weights"] == [[0.1, 0.2, 0.065, 0.5, 0.135], [0.3, 0.1, 0.3, 0.2, 0.1]]
    assert (entry["style"]["slider_limit"], entry["style"]["can_resynthesize"]) == (1.0, True)
    assert build_entry(build_speech_data(can_resynthesize=False))["style"]["can_resynthesize"] is False


def test_slider_limit_includes_large_weights() -> None:
    assert build_entry(build_speech_data(weights=[1.5, 0, 0, 0, 0]))["style"]["slider_limit"] == 1.5
    style = StyleTokenWeights(("a", "b"), np.array([0.25, 0.75]), slider_range=2)
    assert style.weights.shape == (1, 2)
    assert style.mean_weights.tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SynthesizedSpeech(np.zeros(80)), "frames, bands"),
        (lambda: SynthesizedSpeech(np.zeros((0, 80))), "frames, bands"),
        (lambda: SynthesizedSpeech(np.zeros((4, 80)), frames_per_step=0), "step=0"),
        (lambda: SynthesizedSpeech(np.zeros((4, 80)), frame_seconds=float("nan")), "seconds=nan"),
        (lambda: SynthesizedSpeech(np.full((4, 80), np.nan)), "NaN"),
        (lambda: SynthesizedSpeech(np.zeros((4, 80)), wav_bytes=b"OggS"), "not a WAV file"),
        (lambda: SynthesizedSpeech(np.zeros((4, 80)), wav_bytes=encode_wav(generate_sweep(4))[:30]), "not a WAV file"),
        (
            lambda: SynthesizedSpeech(np.zeros((4, 80)), FRAME_SECONDS, encode_wav(generate_sweep(40))),
            r"0\.50 s given with frames of 0\.05 s",
        ),
        (lambda: StyleTokenWeights((), np.zeros((1, 0))), "at least one"),
        (lambda: StyleTokenWeights(("a", "b"), np.zeros((2, 3))), r"expected \(heads, 2\)"),
        (lambda: StyleTokenWeights(("a", "b"), np.zeros((1, 2, 2))), r"expected \(heads, 2\)"),
        (lambda: StyleTokenWeights(("a",), np.array([np.inf])), "infinity"),
        (lambda: StyleTokenWeights(("a",), np.array([1.0]), slider_range=0), "slider_range=0"),
        (
            lambda: ViewerData.from_weights(
                {"a": build_diagonal(5, 3)}, speech=SynthesizedSpeech(np.ones((8, 2)), frames_per_step=2)
            ),
            "with 4",
        ),
        (
            lambda: ViewerData.from_weights({"a": build_diagonal(5, 3)}, style=StyleTokenWeights(("a",), np.ones(1))),
            "without speech",
        ),
        (
            lambda: ViewerData.from_weights(
                {"a": build_diagonal(5, 3)},
                speech=SynthesizedSpeech(np.ones((5, 2))),
                resynthesize=lambda _: build_speech_data(),
            ),
            "without a style",
        ),
    ],
)
def test_invalid_speech_is_rejected(build: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


# ---------------------------------------------------------------- synthesis


# ---------------------------------------------------------------- page


def test_page_resynthesizes_and_serves_tiles() -> None:
    with TestClient(page.build_app(build_speech_data(), can_resynthesize=True)) as client:
        assert "media-src blob:" in client.get("/").headers["content-security-policy"]
        response = client.post("/resynthesize", json=PAYLOAD)
        assert response.status_code == 200
        data = response.json()["data"][0]
        assert data["layers"][0]["shape"] == [80, 19]
        tile = {"data": data["number"], "layer": 0, "head": 0, "rows": "0,80", "cols": "0,19"}
        cells = unpack(client.get("/tiles", params=tile).content)
        assert np.allclose(cells, build_diagonal(80, 19), atol=1e-3)
        assert client.get("/resynthesize").status_code == 405
    with TestClient(page.build_app(build_speech_data())) as client:  # not allowed by default
        assert client.get("/manifest.json").json()["data"][0]["style"]["can_resynthesize"] is False
        assert client.post("/resynthesize", json=PAYLOAD).status_code == 400


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (json.dumps(PAYLOAD), "text/plain", "application/json"),  # any page may send this without a preflight request
        ("{", "application/json", "not JSON"),
        ("[" * 50_000, "application/json", "not JSON"),
        ("[1]", "application/json", "expected an object"),
        ("[" + "1," * 40_000, "application/json", "65536 bytes"),
        ('{"weights": [1, 2]}', "application/json", "list of 5"),
    ],
)
def test_page_rejects_invalid_bodies(body: str, kind: str, message: str) -> None:
    with TestClient(page.build_app(build_speech_data(), can_resynthesize=True)) as client:
        response = client.post("/resynthesize", content=body, headers={"content-type": kind})
        assert response.status_code == 400
        assert message in response.json()["error"]


def test_page_synthesizes_one_at_a_time_and_limits_waiting() -> None:
    release, num_active, max_active = threading.Event(), 0, 0
    started = threading.Semaphore(0)

    def synthesize_slowly(weights: list[float]) -> ViewerData:
        nonlocal num_active, max_active
        num_active += 1
        max_active = max(max_active, num_active)
        started.release()
        assert release.wait(20)
        num_active -= 1
        return resynthesized

    resynthesized = build_speech_data()
    codes: list[int] = []
    data = replace(resynthesized, resynthesize=synthesize_slowly)
    with TestClient(page.build_app(data, can_resynthesize=True)) as client:
        threads = [
            threading.Thread(target=lambda: codes.append(client.post("/resynthesize", json=PAYLOAD).status_code))
            for _ in range(page.MAX_WAITING)
        ]
        for thread in threads:
            thread.start()
        assert started.acquire(timeout=20)
        for _ in range(200):  # until all of them wait
            late = client.post("/resynthesize", content="", headers={"content-type": "application/json"})
            if late.status_code == 503:
                break
            threading.Event().wait(0.02)
        assert late.status_code == 503
        assert "again in a moment" in late.json()["error"]
        release.set()
        for thread in threads:
            thread.join(20)
        assert codes == [200] * page.MAX_WAITING
        assert max_active == 1
        assert client.post("/resynthesize", json=PAYLOAD).status_code == 200


# ---------------------------------------------------------------- files and notebooks


def test_saved_file_contains_audio_but_cannot_resynthesize() -> None:
    text = html_file.render_html(build_speech_data(KOREAN))
    assert "media-src blob:" in text
    start = text.index('id="manifest">') + len('id="manifest">')
    data = json.loads(text[start : text.index("</script>", start)])["data"][0]
    assert data["style"]["can_resynthesize"] is False
    assert base64.b64decode(data["speech"]["wav"])[:4] == b"RIFF"


def test_other_layers_are_saved_without_speech(tmp_path: Path) -> None:
    data = build_speech_data("ab")
    inner = ViewerLayer("encoder", "self", (2, 2), (0,), ArrayWeightSource(np.eye(2)), ["a", "b"], ["a", "b"])
    both = replace(data, layers=(*data.layers, inner))
    text = view_writer.save_view(both, tmp_path / "a.html", layer="encoder").read_text(encoding="utf-8")
    assert '"speech":null' in text
    text = view_writer.save_view(both, tmp_path / "a.html", layer="decoder*").read_text(encoding="utf-8")
    assert '"speech":{' in text
    assert merge_into_words(both).speech is not None


def test_widget_resynthesizes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget", reason='the notebook needs anywidget: pip install "jumok[look]"')
    from jumok.look.viewer.widget import ViewerWidget

    messages: list[tuple[Any, Any]] = []
    monkeypatch.setattr(ViewerWidget, "send", lambda self, content, buffers=None: messages.append((content, buffers)))
    widget = ViewerWidget(build_speech_data())
    widget._handle_custom_msg({"id": "1", "resynthesize": PAYLOAD}, [])
    assert messages[0][0]["id"] == "1"
    assert messages[0][0]["manifest"]["data"][0]["number"] == 1
    request = {"data": 1, "layer": 0, "head": 0, "rows": [0, 80], "cols": [0, 19]}
    widget._handle_custom_msg({"id": "2", "request": request}, [])
    assert unpack(messages[1][1][0]).shape == (80, 19)
    widget._handle_custom_msg({"id": "3", "resynthesize": {"weights": []}}, [])
    assert "list of 5" in messages[2][0]["error"]

    def fail(weights: list[float]) -> ViewerData:
        raise RuntimeError("out of memory")

    widget = ViewerWidget(replace(build_speech_data(), resynthesize=fail))
    with pytest.raises(RuntimeError):  # the kernel shows the traceback, and the viewer gets a message
        widget._handle_message(None, {"id": "4", "resynthesize": PAYLOAD}, [])
    assert messages[3][0] == {"id": "4", "error": "out of memory"}


def test_audio_is_as_long_as_the_frames() -> None:
    speech = build_speech_data().speech
    assert speech is not None
    assert speech.num_frames * HOP_LENGTH == len(generate_sweep(speech.num_frames))
