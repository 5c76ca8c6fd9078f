"""Overload: requests beyond the limits are rejected before they are read, and a long request delays no other."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from running_server import EchoService, RunningServer, build_head, build_request, run_async, wait_until

from jumok.serve import server as server_module
from jumok.serve.admission import AdmissionControl, TaskRoute
from jumok.serve.batcher import TIME_SLICE_SECONDS, Batcher, BatchJob
from jumok.serve.errors import OverloadedError
from jumok.serve.limits import ServerLimits
from jumok.tasks.api import RequestLimits, RequestTooLarge
from jumok.tasks.translate.api import TranslationRequest

pytestmark = pytest.mark.long


BODY = b'{"text": "more"}'
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def full_server(start_server: Any, echo: EchoService) -> RunningServer:
    """A server whose queue is full."""
    server: RunningServer = start_server({"echo": echo}, ServerLimits(max_queue_tokens=50))
    echo.may_work.clear()
    server.send_in_background(["x" * 10] * 5)
    wait_until(lambda: server.count_pending_tokens() == 50)
    return server


def read_response(connection: Any) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Read the next response on a connection: its status line, headers and JSON."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return status_line, headers, json.loads(body)


def test_a_full_queue_rejects_before_the_body_arrives(full_server: RunningServer, echo: EchoService) -> None:
    with full_server.connect(build_head(100)) as connection:
        status_line, headers, body = read_response(connection)
        assert status_line.startswith("HTTP/1.1 503")
        assert int(headers["retry-after"]) >= 1
        assert "the queue is full" in body["error"]
        connection.sendall(b"x" * 100)  # is discarded, and the connection stays open
        connection.sendall(build_head(len(BODY)) + BODY)
        assert read_response(connection)[0].startswith("HTTP/1.1 503")
        connection.sendall(GET_HEALTH)
        assert read_response(connection)[2] == {"status": "ok"}
    assert sum(map(len, echo.batches)) <= 5


@pytest.mark.parametrize("header", ["", "Connection: close\r\n", "X-Other: 1\r\n", "Expect: 100-continue\r\n"])
def test_a_rejection_does_not_depend_on_packets(full_server: RunningServer, header: str) -> None:
    start, end = build_head(len(BODY), headers=header)[:-1], b"\n" + BODY  # the end of the head, and the body
    with full_server.connect(start + end) as at_once, full_server.connect() as byte_by_byte:
        for byte in start:  # after the head, the response may come and the connection be closed
            byte_by_byte.sendall(bytes([byte]))
        byte_by_byte.sendall(end)
        responses = []
        for connection in (at_once, byte_by_byte):
            status_line, headers, body = read_response(connection)
            status = status_line.removesuffix(" Service Unavailable").strip()
            responses.append((status, {*headers} - {"connection"}, headers["content-type"], body))
    assert responses[0] == responses[1]
    assert responses[0][0] == "HTTP/1.1 503"
    assert {"x-content-type-options", "cache-control", "retry-after", "date"} <= responses[0][1]


def test_rejections_are_counted_and_other_paths_work(full_server: RunningServer) -> None:
    for _ in range(3):
        assert full_server.post("/echo", {"text": "more"}).status_code == 503
    assert full_server.read_metric('jumok_http_requests_total{path="/echo",status="503"}') == 3
    assert full_server.post("/nowhere", {}).status_code == 404
    assert full_server.get("/models").status_code == 200
    assert full_server.get("/ready").status_code == 503


@pytest.mark.parametrize(
    ("header", "statuses"),
    [
        (f"Content-Length: {len(BODY) + 9}\r\n", ("HTTP/1.1 400", "HTTP/1.1 503")),
        ("Transfer-Encoding: chunked\r\n", ("HTTP/1.1 400", "HTTP/1.1 503")),
        (f"Content-Length:\t{len(BODY) + 9}\r\n", ("HTTP/1.1 400",)),
    ],
)
def test_ambiguous_lengths_are_rejected(full_server: RunningServer, header: str, statuses: tuple[str, ...]) -> None:
    with full_server.connect(build_head(len(BODY), headers=header) + BODY) as connection:
        assert read_response(connection)[0].startswith(statuses)


def test_a_bare_newline_ends_a_header_as_in_h11(full_server: RunningServer) -> None:
    chunked = build_head(50, headers="X-Other: 1\nTransfer-Encoding: chunked\r\n") + b"3\r\nabc\r\n0\r\n\r\n"
    with full_server.connect(chunked) as connection:
        assert read_response(connection)[0].startswith("HTTP/1.1 503")
        connection.sendall(GET_HEALTH)
        assert read_response(connection)[2] == {"status": "ok"}


def build_batcher(**options: Any) -> Batcher:
    return Batcher(**{"max_batch_tokens": 10, "max_queue_tokens": 100, **options})


def test_admission_control() -> None:
    first, second = build_batcher(), build_batcher()
    is_estimator_full, counted_paths = [False], []
    routes = {"/a": TaskRoute(1, [first, second]), "/b": TaskRoute(1, [second])}
    limits = ServerLimits(max_requests=10, max_attention_requests=2)
    admission = AdmissionControl(routes, limits, lambda: is_estimator_full[0], counted_paths.append)
    for path in ("/a", "/b", "/models"):
        admission.check_capacity(path)
    second._pending_tokens = 100
    admission.check_capacity("/a")  # the other model has room
    with pytest.raises(OverloadedError):
        admission.check_capacity("/b")
    first._pending_tokens, first._recent_tokens, first._recent_seconds = 100, 40.0, 2.0  # 20 tokens per second
    second._recent_tokens, second._recent_seconds = 100.0, 10.0
    with pytest.raises(OverloadedError) as rejected:
        admission.check_capacity("/b")
    assert rejected.value.headers == {"Retry-After": "10"}  # 100 tokens, 10 per second
    first._pending_tokens = second._pending_tokens = 0
    is_estimator_full[0] = True
    with pytest.raises(OverloadedError):
        admission.check_capacity("/a")
    admission.check_capacity("/models")
    is_estimator_full[0], admission.num_running, first._pending_tokens = False, 10, 100
    with pytest.raises(OverloadedError):
        admission.check_capacity("/a")
    for path in ("/health", "/look/x/"):  # these have limits of their own
        admission.check_capacity(path)
    with admission.track_request("/look/x/"), admission.track_request("/look/x/"), pytest.raises(OverloadedError):
        admission.check_capacity("/look/x/")
    admission.check_capacity("/look/x/")
    admission.count_refusal("/a")
    admission.count_refusal("/../x")
    assert counted_paths == ["/a", "other"]


def test_a_queue_without_room_for_an_average_request_is_full() -> None:
    async def test() -> None:
        batcher = build_batcher()
        for _ in range(9):
            batcher.submit(lambda jobs: [0] * len(jobs), 0, 11)
        assert batcher.pending_tokens == 99
        with pytest.raises(OverloadedError):
            batcher.check_capacity()
        batcher.check_capacity(1)

    run_async(test())


def test_capacity_is_reserved_for_requests_of_unknown_size() -> None:
    batcher = build_batcher()
    batcher._mean_request_tokens = 40.0
    with batcher.reserve_capacity():
        batcher.check_capacity()  # 80 of 100
        with batcher.reserve_capacity(), pytest.raises(OverloadedError):
            batcher.check_capacity()
        batcher.check_capacity()
        batcher.check_capacity(100)  # a known size is compared with the pending tokens


@pytest.mark.parametrize(("num_chars", "thread"), [(20, "event loop"), (5000, "size estimator_0")])
def test_small_requests_are_tokenized_on_the_event_loop(
    start_server: Any, echo: EchoService, monkeypatch: Any, num_chars: int, thread: str
) -> None:
    threads = []
    monkeypatch.setattr(echo, "estimate_tokens", lambda request: threads.append(threading.current_thread()) or 1)
    server = start_server({"echo": echo})
    assert server.post("/echo", {"text": "x" * num_chars}).status_code == 200
    assert ["event loop" if used is server.thread else used.name for used in threads] == [thread]


def test_a_full_garbage_collection_does_not_traverse_the_models(monkeypatch: Any, echo: EchoService) -> None:
    freeze_counts: list[int] = []
    interval = sys.getswitchinterval()
    monkeypatch.setattr(server_module, "load_services", lambda *_: {"echo": echo})
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: freeze_counts.append(gc.get_freeze_count()))
    try:
        with warnings.catch_warnings():
            server_module.serve(["runs/any"], port=0)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
    assert freeze_counts[0] > 100_000  # torch alone has more objects


# ------------------------------------------------------------------------------------------ long requests


def test_a_translation_has_a_limit_on_decoder_tokens(services: Any) -> None:
    service = type(services["translate"])(services["translate"].predictor, RequestLimits(max_decode_tokens=400))
    text = "we walk " * 30
    tokens = service.predictor.count_tokens(text)
    assert 134 <= tokens <= 200
    assert service.estimate_tokens(TranslationRequest(text=text, beam_size=2)) == 2 * tokens
    message = rf"{tokens * 3} decoder tokens \({tokens} source tokens .*; the limit is 400"
    with pytest.raises(RequestTooLarge, match=message):
        service.estimate_tokens(TranslationRequest(text=text, beam_size=3))
    with pytest.raises(RequestTooLarge, match=r"decoder tokens"):
        type(service)(service.predictor, RequestLimits()).estimate_tokens(
            TranslationRequest(text="a " * 9_990, beam_size=1)
        )


class StepFunction:
    """A batch function of as many steps as its first payload. Shorter requests may run between its steps."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.results: list[int] = []
        self.has_started = threading.Event()

    def __call__(self, jobs: Sequence[BatchJob]) -> list[int]:
        for _ in range(jobs[0].payload):
            self.has_started.set()
            time.sleep(0.002)
            self.batcher.run_shorter_jobs()
        self.results += [job.payload for job in jobs]
        return [job.payload for job in jobs]


def test_short_requests_interrupt_a_long_one() -> None:
    async def test() -> None:
        batches: list[tuple[int, int]] = []
        batcher = build_batcher(
            max_batch_tokens=100,
            max_queue_tokens=1000,
            max_delay=0,
            on_batch=lambda num_requests, num_tokens, _: batches.append((num_requests, num_tokens)),
        )
        batcher.start()
        function = StepFunction(batcher)
        long_job = batcher.submit(function, 500, 400)  # at least one second
        await asyncio.to_thread(function.has_started.wait)
        short_jobs = [batcher.submit(function, n, 10) for n in (1, 2, 3)]
        other_job = batcher.submit(function, 4, 101)  # more than a quarter of the long one
        assert await asyncio.gather(*map(batcher.wait_for_result, short_jobs)) == [1, 2, 3]
        assert not long_job.future.done()
        assert await asyncio.gather(*map(batcher.wait_for_result, (long_job, other_job))) == [500, 4]
        assert function.results == [1, 2, 3, 500, 4]
        assert await asyncio.to_thread(batcher.close, 10)
        assert batcher.pending_tokens == 0
        assert batches == [(3, 30), (1, 400), (1, 101)]

    run_async(test())


def test_a_long_request_gets_its_share_of_the_time() -> None:
    async def test() -> None:
        batcher = build_batcher(max_queue_tokens=10_000, max_delay=0)
        batcher.start()
        function = StepFunction(batcher)
        long_job = batcher.submit(function, 300, 400)
        await asyncio.to_thread(function.has_started.wait)
        short_jobs = [batcher.submit(function, 50, 10) for _ in range(40)]  # 4 s of work, each in its own batch
        assert await batcher.wait_for_result(long_job) == 300
        assert sum(not job.future.done() for job in short_jobs) > 20  # it did not wait for all of them
        for job in short_jobs:
            batcher.cancel(job)
        assert await asyncio.to_thread(batcher.close, 10)

    assert TIME_SLICE_SECONDS < 0.5
    run_async(test())


def test_a_short_text_is_translated_during_a_long_one(start_server: Any, services: Any, monkeypatch: Any) -> None:
    service = services["translate"]
    num_steps, original_step = [0], type(service.predictor.model).step

    def slow_step(self: Any, state: Any, ids: Any) -> Any:
        num_steps[0] += 1
        time.sleep(0.005)
        return original_step(self, state, ids)

    expected = service.predictor.translate("we walk").translation
    monkeypatch.setattr(type(service.predictor.model), "step", slow_step)
    server = start_server({"translate": service}, ServerLimits(max_batch_delay=0))
    with server.connect(build_request({"text": "the king sleeps " * 200, "beam_size": 1}, "/translate")):
        wait_until(lambda: num_steps[0] > 2)
        assert server.post("/translate", {"text": "we walk"}).json()["translation"] == expected
        assert server.count_pending_tokens() > 400  # the long request is still running


# ----------------------------------------------------------------------------------------------- overload


class SlowService(EchoService):
    """Takes 50 ms for a batch of five: a hundred requests per second, on any machine."""

    def predict(self, requests: Any, listener: Any) -> list[Any]:
        time.sleep(0.05)
        return [self.EchoResponse(text=request.text) for request in requests]


async def send_at_rate(port: int, rate: float, seconds: float) -> list[tuple[int, float, int]]:
    """Send requests at a steady rate. Returns their status, duration and Retry-After."""
    idle_connections: list[Any] = []

    async def send() -> tuple[int, float, int]:
        start_time = time.monotonic()
        reader, writer = (
            idle_connections.pop() if idle_connections else await asyncio.open_connection("127.0.0.1", port)
        )
        writer.write(build_head(len(BODY)) + BODY)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(re.search(r"content-length: (\d+)", head)[1]))  # type: ignore[index]
        idle_connections.append((reader, writer))
        retry = re.search(r"retry-after: (\d+)", head)
        return int(head.split()[1]), time.monotonic() - start_time, int(retry[1]) if retry else 0

    tasks, start_time = [], time.monotonic()
    while (elapsed := time.monotonic() - start_time) < seconds:
        while len(tasks) < elapsed * rate:
            tasks.append(asyncio.create_task(send()))
        await asyncio.sleep(0.005)
    responses = await asyncio.gather(*tasks)
    for _, writer in idle_connections:
        writer.close()
    return responses


@pytest.mark.slow
def test_goodput_under_four_times_the_load(start_server: Any) -> None:
    """At most 200 requests of four tokens are pending. Retry-After predicts how long they take."""
    limits = ServerLimits(max_queue_tokens=800, max_batch_tokens=20, max_batch_delay=0)
    server = start_server({"echo": SlowService()}, limits)
    goodput = {}
    for load in (1, 4):
        start_time = time.monotonic()
        responses = asyncio.run(send_at_rate(server.port, 100 * load, 5))
        accepted = [seconds for status, seconds, _ in responses if status == 200]
        goodput[load] = len(accepted) / (time.monotonic() - start_time)
        retries = [retry for status, _, retry in responses if status == 503]
        assert len(accepted) + len(retries) == len(responses)
    assert len(retries) > len(accepted)
    assert goodput[4] >= 0.9 * goodput[1]
    assert min(retries) / 2 <= max(accepted) <= 2 * max(retries)


@pytest.mark.slow
def test_an_overload_leaves_nothing_behind(start_server: Any, echo: EchoService) -> None:
    server = start_server({"echo": echo}, ServerLimits(max_queue_tokens=40, max_batch_delay=0))
    threads = threading.active_count()
    asyncio.run(send_at_rate(server.port, 300, 3))
    wait_until(lambda: not server.connections)
    assert server.app.state.admission.num_running == 0
    assert server.count_pending_tokens() == 0
    wait_until(lambda: threading.active_count() <= threads + 1)
    assert len(list(Path("/proc/self/fd").iterdir())) < 200
