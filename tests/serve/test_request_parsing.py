"""Requests that are cheap to send and would be expensive to parse: each is rejected at a bounded cost."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError
from running_server import EchoService, RunningServer
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from jumok.serve import request_parsing
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.tasks.api import RequestLimits, RequestTooLarge, TaskRequest
from jumok.tasks.caption.api import CaptionRequest
from jumok.tasks.speak.api import SpeechRequest

MIB = 1 << 20
MANY_KEYS = b'{"text": "a"' + b"".join(b', "k%07d": 1' % n for n in range(MIB * 11 // 16)) + b"}"
MANY_ITEMS = b'{"text": "a", "style_weights": [' + b'"",' * (MIB * 11 // 3) + b'""]}'
MANY_LISTS = b'{"text": "a", "model": [' + b"[]," * (MIB * 11 // 3) + b"[]]}"


def connect(server: RunningServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=100)


class CountingRequest(SpeechRequest):
    """Counts its validations."""

    num_validated: ClassVar[int] = 0

    @classmethod
    def model_validate(cls, *args: Any, **options: Any) -> Any:
        CountingRequest.num_validated += 1
        return super().model_validate(*args, **options)


@pytest.mark.parametrize("body", [MANY_KEYS, MANY_ITEMS, MANY_LISTS], ids=["keys", "items", "lists"])
def test_items_are_counted_before_parsing(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("the body was parsed"))
    with pytest.raises(RequestTooLarge, match=r"commas and brackets; the maximum is 41,024"):
        request_parsing.parse_request(body, CountingRequest, RequestLimits())


def test_keys_are_counted_before_validation() -> None:
    body = json.dumps({"text": "a"} | {f"key{n}": n for n in range(30_000)}).encode()
    with pytest.raises(HTTPException) as raised:
        request_parsing.parse_request(body, CountingRequest, RequestLimits())
    assert raised.value.status_code == 422
    assert raised.value.detail == (
        "the request has 30,001 keys; the known keys are: model, text, style_weights, style_audio"
    )
    assert CountingRequest.num_validated == 0


def test_an_invalid_list_has_one_error() -> None:
    for weights in ([""] * 1000, [0.1] * 1025, [True] * 30_000):
        with pytest.raises(ValidationError) as raised:
            SpeechRequest.model_validate({"text": "a", "style_weights": weights})
        assert raised.value.error_count() == 1
    assert SpeechRequest.model_validate({"text": "a", "style_weights": [0.1] * 1024}).style_weights == [0.1] * 1024


def test_the_largest_valid_requests_are_accepted() -> None:
    limits = RequestLimits()
    commas = json.dumps({"text": "a" + "," * (limits.max_text_chars - 1)}).encode()
    assert len(request_parsing.parse_request(commas, SpeechRequest, limits).text) == limits.max_text_chars
    escaped = json.dumps({"text": "\U0001f600" * limits.max_text_chars}).encode()  # 12 bytes each
    assert len(escaped) < TaskRequest.max_bytes(limits)
    larger = RequestLimits(max_text_chars=1_000_000)
    assert TaskRequest.max_bytes(larger) > len(json.dumps({"text": "\U0001f600" * larger.max_text_chars}))


def test_the_body_limit_depends_on_the_task(echo: EchoService) -> None:
    class CaptionEcho(EchoService):
        endpoint, request_type, supports_streaming = "caption", CaptionRequest, False

    with TestClient(build_app({"echo": echo, "caption": CaptionEcho()})) as client:
        for path, max_bytes in (("/echo", "1,048,576"), ("/caption", "16,842,752"), ("/models", "65,536")):
            for attend in ("", "/attend") if path != "/models" else ("",):
                response = client.post(f"{attend}{path}", content=b"x" * (17 * MIB))
                assert response.status_code == 413
                assert f"{max_bytes} bytes" in response.json()["error"]
    with TestClient(build_app({"echo": echo}, ServerLimits(max_body_bytes=100))) as client:
        assert "100 bytes" in client.post("/echo", content=b"x" * 101).json()["error"]


def test_the_rejection_of_a_large_body_can_be_read(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo})
    for size in (2 * MIB, 11 * MIB):
        connection = connect(server)
        connection.request("POST", "/echo", b"x" * size, {"Content-Type": "application/json"})
        assert connection.getresponse().status == 413
        connection.close()


@pytest.mark.slow
def test_no_bomb_delays_other_requests(start_server: Any, speak_service: Any, services: Any) -> None:
    """Without limits, each request takes half a minute to validate. The test allows a tenth of that."""
    server: RunningServer = start_server({"voice": speak_service, "translate": services["translate"]})
    stop, longest = threading.Event(), 0.0

    def monitor_health() -> None:
        nonlocal longest
        connection = connect(server)
        while not stop.is_set():
            start_time = time.monotonic()
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            longest = max(longest, time.monotonic() - start_time)
            time.sleep(0.01)
        connection.close()

    def send(path: str, body: bytes) -> int:
        connection = connect(server)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        status = connection.getresponse().status
        connection.close()
        return status

    with ThreadPoolExecutor(4) as threads:
        monitor = threads.submit(monitor_health)
        bombs = [(path, body) for body in (MANY_KEYS, MANY_ITEMS, MANY_LISTS) for path in ("/speak", "/translate")]
        statuses = list(threads.map(send, *zip(*bombs, strict=True)))
        stop.set()
        monitor.result()
    assert statuses == [413] * 6
    assert longest < 3
