"""Texts that are said: as by say(), whole or part by part; in styles of tokens or of recordings."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from jumok.data.builtin.spoken_numbers import synthesize_utterance as built_in
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.tasks import get_service_type
from jumok.tasks.api import RequestLimits

soundfile = pytest.importorskip("soundfile")
pytestmark = pytest.mark.filterwarnings("ignore:the voice does not know")
TEXT = "Forty two. Six."


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def recording(kind: str = "WAV", seconds: float | None = None, rate: int = 8000, channels: int = 1) -> bytes:
    wave = built_in(5, 3, 8000).waveform
    if seconds is not None:
        wave = np.resize(wave, round(seconds * rate))
    file = io.BytesIO()
    soundfile.write(file, np.stack([wave] * channels, 1), rate, format=kind)
    return file.getvalue()


def samples(audio: str | bytes) -> np.ndarray:
    data = base64.b64decode(audio) if isinstance(audio, str) else audio
    return np.asarray(soundfile.read(io.BytesIO(data), dtype="float32")[0])


@pytest.fixture(scope="module")
def client(speak_service: Any) -> Iterator[TestClient]:
    with TestClient(build_app({"voice": speak_service}), raise_server_exceptions=False) as client:
        yield client


def test_a_text_is_said_as_json_or_as_a_recording(client: TestClient, voice: Any) -> None:
    got = client.post("/speak", json={"text": TEXT})
    assert got.status_code == 200, got.text
    told, wanted = got.json(), voice.speak(TEXT)
    assert told["sample_rate"] == wanted.sample_rate
    assert told["duration_seconds"] == pytest.approx(wanted.duration_seconds)
    assert told["segments"] == ["forty two", "six"]
    assert told["finished"] == wanted.finished
    assert told["style_weights"] == pytest.approx(wanted.style_weights)
    assert len(samples(told["audio"])) == len(wanted.waveform)
    alone = client.post("/speak", json={"text": TEXT}, headers={"Accept": "audio/wav"})
    assert alone.headers["content-type"] == "audio/wav"
    assert alone.content[:4] == b"RIFF"
    assert len(samples(alone.content)) == len(wanted.waveform)


def test_what_a_voice_cannot_say_is_told(client: TestClient) -> None:
    told = client.post("/speak", json={"text": "$ forty, two."}).json()
    assert (told["segments"], told["unknown_characters"]) == (["forty two"], ["$"])


def test_part_by_part(client: TestClient) -> None:
    with client.stream("POST", "/speak/stream", json={"text": f"{TEXT} Two."}) as got:
        blocks = "".join(got.iter_text()).strip().split("\n\n")
    events = [block.split("\n") for block in blocks]
    assert [name for name, _ in events] == ["event: segment"] * 3 + ["event: done"]
    *parts, done = (json.loads(data.removeprefix("data: ")) for _, data in events)
    assert [one["text"] for one in parts] == done["segments"] == ["forty two", "six", "two"]
    lengths = [len(samples(one["audio"])) for one in parts]
    assert [one["duration_seconds"] * done["sample_rate"] for one in parts] == pytest.approx(lengths)
    pauses = 2 * round(0.25 * done["sample_rate"])
    assert len(samples(done["audio"])) == sum(lengths) + pauses
    assert np.allclose(samples(done["audio"])[: lengths[0]], samples(parts[0]["audio"]), atol=1e-4)


def test_styles(client: TestClient, voice: Any) -> None:
    count = voice.model.style_tokens.config.num_tokens
    weights = [0.0] * (count - 1) + [1]
    told = client.post("/speak", json={"text": "six", "style_weights": weights}).json()
    assert told["style_weights"] == weights
    for kind in ("WAV", "FLAC", "OGG"):
        data = recording(kind)
        told = client.post("/speak", json={"text": "six", "style_audio": coded(data)}).json()
        wave = voice.audio.decode_waveform(data, "x")
        wanted = voice.extract_style_weights(voice.audio.mel_spectrogram(wave))[0].mean(0).tolist()
        assert told["style_weights"] == pytest.approx(wanted, abs=1e-5)


def test_requests_of_several_styles_are_said_together(voice: Any, speak_service: Any) -> None:
    count = voice.model.style_tokens.config.num_tokens
    ask = speak_service.request_type
    some = [
        ask(text=TEXT),
        ask(text="six", style_weights=[1.0] + [0.0] * (count - 1)),
        ask(text="six", style_audio=recording()),
    ]

    class Nobody:
        def is_cancelled(self, index: int) -> bool:
            return index == 1

        def is_streaming(self, index: int) -> bool:
            return False

    first, left, last = speak_service.predict(some, Nobody())
    assert left.audio == b""  # who has left gets nothing made
    for one, said in ((some[0], first), (some[2], last)):
        [alone] = speak_service.predict([one], Nobody())
        assert said.duration_seconds == alone.duration_seconds
        assert np.allclose(samples(said.audio), samples(alone.audio), atol=2e-3)
    assert speak_service.estimate_tokens(some[0]) == len("forty two") + 1 + len("six") + 1


def test_where_it_looked(client: TestClient) -> None:
    told = client.post("/attend/speak", json={"text": TEXT}).json()
    manifest = client.get(f"{told['attention_url']}manifest.json").json()
    assert manifest["title"] == "forty two"
    assert manifest["data"][0]["speech"]
    assert told["prediction"]["segments"] == ["forty two", "six"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 422, "text: Field required"),
        ({"text": " "}, 422, "text: it is empty"),
        ({"text": "..."}, 422, "has nothing to speak"),
        ({"text": "한국"}, 422, "the voice does not know"),
        ({"text": "six " * 501}, 413, "2,004 characters; this server accepts at most 2,000"),
        ({"text": "six", "style_weights": [1.0]}, 422, "style_weights: 1 weights came; this voice has 8"),
        ({"text": "six", "style_weights": ["1"] * 8}, 422, "style_weights"),
        ({"text": "six", "style_weights": [1e9] * 8}, 422, "style_weights"),
        ({"text": "six", "style_weights": [0.0] * 8, "style_audio": coded(recording())}, 422, "exclude each other"),
        ({"text": "six", "style_audio": "voice.wav"}, 422, "style_audio: it is not base64"),
        ({"text": "six", "style_audio": "/etc/passwd"}, 422, "style_audio"),
        ({"text": "six", "style_audio": "https://example.com/a.wav"}, 422, "style_audio: it is not base64"),
        ({"text": "six", "style_audio": ""}, 422, "an empty recording"),
        ({"text": "six", "style_audio": coded(b"no sound at all")}, 422, "not a recording in WAV, FLAC or OGG"),
        ({"text": "six", "style_audio": coded(recording()[:2000])}, 422, "a damaged recording"),
        ({"text": "six", "style_audio": coded(recording("FLAC")[:900])}, 422, "a damaged recording"),
        ({"text": "six", "style_audio": coded(recording("FLAC", 31))}, 413, "31 seconds; the limit is 30"),
        ({"text": "six", "style_audio": coded(bytes((8 << 20) + 1))}, 413, "a recording of too many bytes"),
        ({"text": "six", "style_audio": coded(bytes(16 << 20))}, 413, "the request is too large"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_requests_are_refused_with_words(client: TestClient, body: Any, status: int, said: str) -> None:
    for path in ("/speak", "/attend/speak"):
        got = client.post(path, json=body)
        assert got.status_code == status, got.text
        assert said in got.json()["error"]
        assert len(got.content) < 500
    assert client.post("/speak", json={"text": "six"}).status_code == 200


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_whatever_is_changed_in_a_recording(client: TestClient, kind: str) -> None:
    chance, whole = np.random.default_rng(3), recording(kind, 0.3)
    for _ in range(25):
        data = bytearray(whole)
        for at in chance.integers(0, min(len(data), 400), chance.integers(1, 9)):
            data[at] = chance.integers(256)
        end = len(data) if chance.random() < 0.7 else int(chance.integers(1, len(data)))
        got = client.post("/speak", json={"text": "six", "style_audio": coded(bytes(data[:end]))})
        assert got.status_code in (200, 413, 422), got.text
    assert client.post("/speak", json={"text": "six"}).status_code == 200


def test_a_small_file_of_many_samples_is_not_unpacked(voice: Any) -> None:
    """Silence of eight channels is next to nothing in FLAC, and much in memory."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros((29 * 44_100, 8), np.int16), 44_100, format="FLAC")
    service = get_service_type("speak")(voice, RequestLimits(max_audio_samples=10_000_000))
    with TestClient(build_app({"voice": service}, ServerLimits(request_limits=service.request_limits))) as client:
        got = client.post("/speak", json={"text": "six", "style_audio": coded(file.getvalue())})
    assert got.status_code == 413
    assert "10231200 samples; the limit is 10000000" in got.json()["error"]


def test_what_is_told_of_it(client: TestClient, voice: Any) -> None:
    [told] = client.get("/models").json()
    assert told["task"] == "speak"
    assert len(told["metadata"]["default_style_weights"]) == voice.model.style_tokens.config.num_tokens
    for example in told["metadata"]["examples"]:
        assert client.post("/speak", json=example).status_code == 200
    described = client.get("/openapi.json").json()["paths"]["/speak"]["post"]["responses"]["200"]["content"]
    assert set(described) == {"application/json", "audio/wav"}
