"""Speech over HTTP: equal to that of the predictor, streamed by segments, in styles of tokens or recordings."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from jumok.data.builtin.spoken_numbers import synthesize_utterance
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.tasks import get_service_type
from jumok.tasks.api import RequestLimits

soundfile = pytest.importorskip("soundfile")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:the voice does not know")]
TEXT = "Forty two. Six."


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def build_recording(format_name: str = "WAV", seconds: float | None = None) -> bytes:
    wave = synthesize_utterance(5, 3, 8000).waveform
    if seconds is not None:
        wave = np.resize(wave, round(seconds * 8000))
    file = io.BytesIO()
    soundfile.write(file, wave, 8000, format=format_name)
    return file.getvalue()


def decode_audio(audio: str | bytes) -> np.ndarray:
    data = base64.b64decode(audio) if isinstance(audio, str) else audio
    return np.asarray(soundfile.read(io.BytesIO(data), dtype="float32")[0])


@pytest.fixture(scope="module")
def client(speak_service: Any) -> Iterator[TestClient]:
    with TestClient(build_app({"voice": speak_service}), raise_server_exceptions=False) as client:
        yield client


def test_speech_in_json_or_as_a_file(client: TestClient, voice: Any) -> None:
    response = client.post("/speak", json={"text": TEXT})
    assert response.status_code == 200, response.text
    body, expected = response.json(), voice.speak(TEXT)
    assert body["sample_rate"] == expected.sample_rate
    assert body["duration_seconds"] == pytest.approx(expected.duration_seconds)
    assert body["segments"] == ["forty two", "six"]
    assert body["finished"] == expected.finished
    assert body["style_weights"] == pytest.approx(expected.style_weights)
    assert len(decode_audio(body["audio"])) == len(expected.waveform)
    wav = client.post("/speak", json={"text": TEXT}, headers={"Accept": "audio/wav"})
    assert wav.headers["content-type"] == "audio/wav"
    assert wav.content[:4] == b"RIFF"
    assert len(decode_audio(wav.content)) == len(expected.waveform)


def test_unknown_characters_are_reported(client: TestClient) -> None:
    body = client.post("/speak", json={"text": "$ forty, two."}).json()
    assert (body["segments"], body["unknown_characters"]) == (["forty two"], ["$"])


def test_streaming(client: TestClient) -> None:
    with client.stream("POST", "/speak/stream", json={"text": f"{TEXT} Two."}) as response:
        blocks = "".join(response.iter_text()).strip().split("\n\n")
    events = [block.split("\n") for block in blocks]
    assert [name for name, _ in events] == ["event: segment"] * 3 + ["event: done"]
    *parts, done = (json.loads(data.removeprefix("data: ")) for _, data in events)
    assert [part["text"] for part in parts] == done["segments"] == ["forty two", "six", "two"]
    lengths = [len(decode_audio(part["audio"])) for part in parts]
    assert [part["duration_seconds"] * done["sample_rate"] for part in parts] == pytest.approx(lengths)
    pauses = 2 * round(0.25 * done["sample_rate"])
    assert len(decode_audio(done["audio"])) == sum(lengths) + pauses
    assert np.allclose(decode_audio(done["audio"])[: lengths[0]], decode_audio(parts[0]["audio"]), atol=1e-4)


def test_styles(client: TestClient, voice: Any) -> None:
    count = voice.model.style_tokens.config.num_tokens
    weights = [0.0] * (count - 1) + [1]
    body = client.post("/speak", json={"text": "six", "style_weights": weights}).json()
    assert body["style_weights"] == weights
    for format_name in ("WAV", "FLAC", "OGG"):
        data = build_recording(format_name)
        body = client.post("/speak", json={"text": "six", "style_audio": encode_base64(data)}).json()
        wave = voice.audio.decode_waveform(data, "x")
        expected = voice.extract_style_weights(voice.audio.mel_spectrogram(wave))[0].mean(0).tolist()
        assert body["style_weights"] == pytest.approx(expected, abs=1e-5)


def test_requests_of_several_styles_share_a_batch(voice: Any, speak_service: Any) -> None:
    count = voice.model.style_tokens.config.num_tokens
    request_type = speak_service.request_type
    requests = [
        request_type(text=TEXT),
        request_type(text="six", style_weights=[1.0] + [0.0] * (count - 1)),
        request_type(text="six", style_audio=build_recording()),
    ]

    class SilentListener:
        def is_cancelled(self, index: int) -> bool:
            return index == 1

        def is_streaming(self, index: int) -> bool:
            return False

    first, cancelled, last = speak_service.predict(requests, SilentListener())
    assert cancelled.audio == b""  # nothing is computed for a cancelled request
    assert len(speak_service.build_viewer_data(requests[1], cancelled)) == 1  # an error would fail the batch
    for request, response in ((requests[0], first), (requests[2], last)):
        [alone] = speak_service.predict([request], SilentListener())
        assert response.duration_seconds == alone.duration_seconds
        assert np.allclose(decode_audio(response.audio), decode_audio(alone.audio), atol=2e-3)
    assert speak_service.estimate_tokens(requests[0]) == len("forty two") + 1 + len("six") + 1


def test_attention_page(client: TestClient) -> None:
    body = client.post("/attend/speak", json={"text": TEXT}).json()
    manifest = client.get(f"{body['attention_url']}manifest.json").json()
    assert manifest["title"] == "forty two"
    assert manifest["data"][0]["speech"]
    assert body["prediction"]["segments"] == ["forty two", "six"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 422, "text: Field required"),
        ({"text": " "}, 422, "text: it is empty"),
        ({"text": "..."}, 422, "has nothing to speak"),
        ({"text": "한국"}, 422, "the voice does not know"),
        ({"text": "six " * 501}, 413, "2,004 characters; this server accepts at most 2,000"),
        ({"text": "six", "style_weights": [1.0]}, 422, "style_weights: 1 weights given; this voice has 8"),
        ({"text": "six", "style_weights": ["1"] * 8}, 422, "style_weights"),
        ({"text": "six", "style_weights": [1e9] * 8}, 422, "style_weights"),
        (
            {"text": "six", "style_weights": [0.0] * 8, "style_audio": build_recording()},
            422,
            "exclude each other",
        ),
        ({"text": "six", "style_audio": "voice.wav"}, 422, "style_audio: it is not base64"),
        ({"text": "six", "style_audio": "/etc/passwd"}, 422, "style_audio"),
        ({"text": "six", "style_audio": "https://example.com/a.wav"}, 422, "style_audio: it is not base64"),
        ({"text": "six", "style_audio": ""}, 422, "an empty recording"),
        ({"text": "six", "style_audio": b"no sound at all"}, 422, "not a recording in WAV, FLAC or OGG"),
        ({"text": "six", "style_audio": build_recording()[:2000]}, 422, "a damaged recording"),
        ({"text": "six", "style_audio": build_recording("FLAC")[:900]}, 422, "a damaged recording"),
        (
            {"text": "six", "style_audio": build_recording("FLAC", 31)},
            413,
            "31 seconds; the limit is 30",
        ),
        ({"text": "six", "style_audio": bytes((8 << 20) + 1)}, 413, "a recording of too many bytes"),
        ({"text": "six", "style_audio": bytes(16 << 20)}, 413, "the request is too large"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_invalid_speech_requests(client: TestClient, body: Any, status: int, message: str) -> None:
    body = {name: encode_base64(value) if isinstance(value, bytes) else value for name, value in body.items()}
    for path in ("/speak", "/attend/speak"):
        response = client.post(path, json=body)
        assert response.status_code == status, response.text
        assert message in response.json()["error"]
        assert len(response.content) < 500
    assert client.post("/speak", json={"text": "six"}).status_code == 200


@pytest.mark.parametrize("format_name", ["WAV", "FLAC", "OGG"])
def test_randomly_changed_recordings(client: TestClient, format_name: str) -> None:
    rng, original = np.random.default_rng(3), build_recording(format_name, 0.3)
    for _ in range(25):
        data = bytearray(original)
        for position in rng.integers(0, min(len(data), 400), rng.integers(1, 9)):
            data[position] = rng.integers(256)
        end = len(data) if rng.random() < 0.7 else int(rng.integers(1, len(data)))
        response = client.post("/speak", json={"text": "six", "style_audio": encode_base64(bytes(data[:end]))})
        assert response.status_code in (200, 413, 422), response.text
    assert client.post("/speak", json={"text": "six"}).status_code == 200


def test_a_small_file_of_many_samples_is_not_decoded(voice: Any) -> None:
    """Silence of eight channels is a small FLAC file and needs much memory."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros((29 * 44_100, 8), np.int16), 44_100, format="FLAC")
    service = get_service_type("speak")(voice, RequestLimits(max_audio_samples=10_000_000))
    with TestClient(build_app({"voice": service}, ServerLimits(request_limits=service.request_limits))) as client:
        response = client.post("/speak", json={"text": "six", "style_audio": encode_base64(file.getvalue())})
    assert response.status_code == 413
    assert "10231200 samples; the limit is 10000000" in response.json()["error"]


def test_metadata_and_openapi(client: TestClient, voice: Any) -> None:
    [body] = client.get("/models").json()
    assert body["task"] == "speak"
    assert len(body["metadata"]["default_style_weights"]) == voice.model.style_tokens.config.num_tokens
    for example in body["metadata"]["examples"]:
        assert client.post("/speak", json=example).status_code == 200
    content = client.get("/openapi.json").json()["paths"]["/speak"]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "audio/wav"}
