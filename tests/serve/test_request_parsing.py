"""Requests that are cheap to send and would be costly to read: each is refused within its bounds."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError
from running_server import Echo, RunningServer
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


def connect(running: RunningServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", running.port, timeout=100)


class Counting(SpeechRequest):
    """Counts how often something is validated."""

    validated: ClassVar[int] = 0

    @classmethod
    def model_validate(cls, *given: Any, **more: Any) -> Any:
        Counting.validated += 1
        return super().model_validate(*given, **more)


@pytest.mark.parametrize("body", [MANY_KEYS, MANY_ITEMS, MANY_LISTS], ids=["keys", "items", "lists"])
def test_items_are_counted_before_anything_is_parsed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(RequestTooLarge, match=r"commas and brackets; the maximum is 41,024"):
        request_parsing.parse_request(body, Counting, RequestLimits())


def test_keys_are_counted_before_validation() -> None:
    body = json.dumps({"text": "a"} | {f"key{n}": n for n in range(30_000)}).encode()
    with pytest.raises(HTTPException) as refused:
        request_parsing.parse_request(body, Counting, RequestLimits())
    assert refused.value.status_code == 422
    assert refused.value.detail == (
        "the request has 30,001 keys; the known keys are: model, text, style_weights, style_audio"
    )
    assert Counting.validated == 0


def test_a_list_has_one_error_however_many_items_are_wrong() -> None:
    for weights in ([""] * 1000, [0.1] * 1025, [True] * 30_000):
        with pytest.raises(ValidationError) as refused:
            SpeechRequest.model_validate({"text": "a", "style_weights": weights})
        assert refused.value.error_count() == 1
    assert SpeechRequest.model_validate({"text": "a", "style_weights": [0.1] * 1024}).style_weights == [0.1] * 1024


def test_the_largest_requests_within_the_bounds_are_read() -> None:
    bounds = RequestLimits()
    commas = json.dumps({"text": "a" + "," * (bounds.max_text_chars - 1)}).encode()
    assert len(request_parsing.parse_request(commas, SpeechRequest, bounds).text) == bounds.max_text_chars
    escaped = json.dumps({"text": "\U0001f600" * bounds.max_text_chars}).encode()  # 12 bytes each
    assert len(escaped) < TaskRequest.max_bytes(bounds)
    larger = RequestLimits(max_text_chars=1_000_000)
    assert TaskRequest.max_bytes(larger) > len(json.dumps({"text": "\U0001f600" * larger.max_text_chars}))


def test_the_body_limit_is_that_of_the_task(echo: Echo) -> None:
    class Pictures(Echo):
        endpoint, request_type, supports_streaming = "caption", CaptionRequest, False

    with TestClient(build_app({"echo": echo, "caption": Pictures()})) as client:
        for path, most in (("/echo", "1,048,576"), ("/caption", "16,842,752"), ("/models", "65,536")):
            for attend in ("", "/attend") if path != "/models" else ("",):
                got = client.post(f"{attend}{path}", content=b"x" * (17 * MIB))
                assert got.status_code == 413
                assert f"{most} bytes" in got.json()["error"]
    with TestClient(build_app({"echo": echo}, ServerLimits(max_body_bytes=100))) as client:
        assert "100 bytes" in client.post("/echo", content=b"x" * 101).json()["error"]


def test_a_refusal_of_a_large_body_can_be_read(serving: Any, echo: Echo) -> None:
    running: RunningServer = serving({"echo": echo})
    for size in (2 * MIB, 11 * MIB):
        connection = connect(running)
        connection.request("POST", "/echo", b"x" * size, {"Content-Type": "application/json"})
        assert connection.getresponse().status == 413
        connection.close()


@pytest.mark.slow
def test_no_bomb_holds_up_the_others(serving: Any, speak_service: Any, services: Any) -> None:
    """Each takes half a minute where validation is unbounded. The bound here is loose: a tenth of that."""
    running: RunningServer = serving({"voice": speak_service, "translate": services["translate"]})
    ended, longest = threading.Event(), 0.0

    def watch() -> None:
        nonlocal longest
        connection = connect(running)
        while not ended.is_set():
            begun = time.monotonic()
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.01)
        connection.close()

    def send(path: str, body: bytes) -> int:
        connection = connect(running)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        status = connection.getresponse().status
        connection.close()
        return status

    with ThreadPoolExecutor(4) as threads:
        watching = threads.submit(watch)
        bombs = [(path, body) for body in (MANY_KEYS, MANY_ITEMS, MANY_LISTS) for path in ("/speak", "/translate")]
        statuses = list(threads.map(lambda one: send(*one), bombs))
        ended.set()
        watching.result()
    assert statuses == [413] * 6
    assert longest < 3
