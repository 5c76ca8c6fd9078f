"""More requests than there is room for are refused before they are read; a long one holds up nobody."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from running_server import Echo, RunningServer, until
from test_batcher import run
from test_http_protocol import HEAD, figure, waiting

from jumok.serve import server
from jumok.serve.admission import AdmissionControl, TaskRoute
from jumok.serve.batcher import TIME_SLICE_SECONDS, Batcher, BatchJob
from jumok.serve.errors import OverloadedError
from jumok.serve.limits import ServerLimits
from jumok.tasks.api import RequestLimits, RequestTooLarge
from jumok.tasks.translate.api import TranslationRequest

http = httpx2.Client(verify=False, timeout=20)
BODY = b'{"text": "more"}'


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    http.close()


def head(length: int, path: str = "/echo", more: str = "") -> bytes:
    return HEAD.replace(b"\r\n\r\n", f"\r\n{more}\r\n".encode()) % (path.encode(), length)


@pytest.fixture
def full(serving: Any, echo: Echo) -> RunningServer:
    """A server whose queue is full."""
    running: RunningServer = serving({"echo": echo}, ServerLimits(max_queue_tokens=50))
    echo.open.clear()
    threads = ThreadPoolExecutor(5)
    for _ in range(5):
        threads.submit(http.post, f"{running.url}/echo", json={"text": "x" * 10})
    until(lambda: waiting(running) == 50)
    return running


def answer(connection: Any) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The next response on a connection."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += connection.recv(65536)
    first, *lines = said.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = said.partition(b"\r\n\r\n")[2]
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return first, headers, json.loads(body)


def test_a_full_queue_refuses_before_the_body_comes(full: RunningServer, echo: Echo) -> None:
    with full.connected(head(100)) as no_body:
        first, headers, said = answer(no_body)
        assert first.startswith("HTTP/1.1 503")
        assert int(headers["retry-after"]) >= 1
        assert "the queue is full" in said["error"]
        no_body.sendall(b"x" * 100)  # is thrown away, and the connection goes on
        no_body.sendall(head(len(BODY)) + BODY)
        assert answer(no_body)[0].startswith("HTTP/1.1 503")
        no_body.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(no_body)[2] == {"status": "ok"}
    assert sum(map(len, echo.batches)) <= 5


@pytest.mark.parametrize("more", ["", "Connection: close\r\n", "X-Other: 1\r\n", "Expect: 100-continue\r\n"])
def test_a_refusal_is_the_same_in_one_piece_and_in_many(full: RunningServer, more: str) -> None:
    first_part, last = head(len(BODY), more=more)[:-1], b"\n" + BODY  # the head's end and the body together:
    with full.connected(first_part + last) as at_once, full.connected() as slowly:
        for byte in first_part:  # once the head is there, the answer may come and the connection be closed
            slowly.sendall(bytes([byte]))
        slowly.sendall(last)
        answers = []
        for one in (at_once, slowly):
            first, headers, said = answer(one)
            first = first.removesuffix(" Service Unavailable").strip()
            answers.append((first, {*headers} - {"connection"}, headers["content-type"], said))
    assert answers[0] == answers[1]
    assert answers[0][0] == "HTTP/1.1 503"
    assert {"x-content-type-options", "cache-control", "retry-after", "date"} <= answers[0][1]


def test_refusals_are_counted_and_other_paths_answered(full: RunningServer) -> None:
    for _ in range(3):
        assert http.post(f"{full.url}/echo", json={"text": "more"}).status_code == 503
    assert figure(full, 'jumok_http_requests_total{path="/echo",status="503"}') == 3
    assert http.post(f"{full.url}/nowhere", json={}).status_code == 404
    assert http.get(f"{full.url}/models").status_code == 200
    assert http.get(f"{full.url}/ready").status_code == 503


def test_a_request_with_two_lengths_is_not_taken_for_one(full: RunningServer) -> None:
    strange = head(len(BODY), more=f"Content-Length: {len(BODY) + 9}\r\n") + BODY
    chunked = head(len(BODY), more="Transfer-Encoding: chunked\r\n") + BODY
    for sent in (strange, chunked):
        with full.connected(sent) as one:
            assert answer(one)[0].startswith(("HTTP/1.1 400", "HTTP/1.1 503"))
    tab = head(len(BODY), more=f"Content-Length:\t{len(BODY) + 9}\r\n") + BODY
    with full.connected(tab) as one:
        assert answer(one)[0].startswith("HTTP/1.1 400")


def test_a_bare_newline_ends_a_header_as_in_h11(full: RunningServer) -> None:
    chunked = head(50, more="X-Other: 1\nTransfer-Encoding: chunked\r\n") + b"3\r\nabc\r\n0\r\n\r\n"
    with full.connected(chunked) as one:
        assert answer(one)[0].startswith("HTTP/1.1 503")
        one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(one)[2] == {"status": "ok"}


def queue(**more: Any) -> Batcher:
    return Batcher(**{"max_batch_tokens": 10, "max_queue_tokens": 100, **more})


def test_who_is_admitted() -> None:
    first, second = queue(), queue()
    reading, counted = [False], []
    routes = {"/a": TaskRoute(1, [first, second]), "/b": TaskRoute(1, [second])}
    admission = AdmissionControl(routes, ServerLimits(max_requests=10), lambda: reading[0], counted.append)
    for path in ("/a", "/b", "/models"):
        admission.check_capacity(path)
    second._pending_tokens = 100
    admission.check_capacity("/a")  # the other model has room
    with pytest.raises(OverloadedError):
        admission.check_capacity("/b")
    first._pending_tokens, first._recent_tokens, first._recent_seconds = 100, 40.0, 2.0  # 20 a second
    second._recent_tokens, second._recent_seconds = 100.0, 10.0
    with pytest.raises(OverloadedError) as refused:
        admission.check_capacity("/b")
    assert refused.value.headers == {"Retry-After": "10"}  # 100 tokens, 10 a second
    first._pending_tokens = second._pending_tokens = 0
    reading[0] = True
    with pytest.raises(OverloadedError):
        admission.check_capacity("/a")
    admission.check_capacity("/models")
    reading[0], admission.num_running, first._pending_tokens = False, 10, 100
    with pytest.raises(OverloadedError) as refused:
        admission.check_capacity("/a")
    admission.count_refusal("/a")
    admission.count_refusal("/../x")
    assert counted == ["/a", "other"]


def test_a_queue_with_room_for_less_than_the_usual_request_is_full() -> None:
    async def test() -> None:
        one = queue()
        for _ in range(9):
            one.submit(lambda jobs: [0] * len(jobs), 0, 11)
        assert one.pending_tokens == 99
        with pytest.raises(OverloadedError):
            one.check_capacity()  # most of 11 tokens
        one.check_capacity(1)

    run(test())


def test_room_is_kept_for_requests_whose_size_is_not_known_yet() -> None:
    batcher = queue()
    batcher._mean_request_tokens = 40.0
    with batcher.reserve_capacity():
        batcher.check_capacity()  # 80 of 100
        with batcher.reserve_capacity(), pytest.raises(OverloadedError):
            batcher.check_capacity()
        batcher.check_capacity()
        batcher.check_capacity(100)  # a known size is compared with what is held


@pytest.mark.parametrize(("characters", "thread"), [(20, "event loop"), (5000, "size estimator_0")])
def test_small_requests_are_tokenized_on_the_event_loop(
    serving: Any, echo: Echo, monkeypatch: Any, characters: int, thread: str
) -> None:
    threads = []
    monkeypatch.setattr(echo, "estimate_tokens", lambda asked: threads.append(threading.current_thread()) or 1)
    running = serving({"echo": echo})
    assert http.post(f"{running.url}/echo", json={"text": "x" * characters}).status_code == 200
    assert ["event loop" if one is running.thread else one.name for one in threads] == [thread]


def test_a_full_garbage_collection_does_not_traverse_the_models(monkeypatch: Any, echo: Echo) -> None:
    frozen: list[int] = []
    interval = sys.getswitchinterval()
    monkeypatch.setattr(server, "load_services", lambda *_: {"echo": echo})
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: frozen.append(gc.get_freeze_count()))
    try:
        with warnings.catch_warnings():
            server.serve(["runs/any"], port=0)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
    assert frozen[0] > 100_000  # torch alone has more objects


# ------------------------------------------------------------------------------------------ long requests


def test_a_translation_has_a_limit_of_work(services: Any) -> None:
    service = type(services["translate"])(services["translate"].predictor, RequestLimits(max_decode_tokens=400))
    text = "we walk " * 30
    tokens = service.predictor.count_tokens(text)
    assert 134 <= tokens <= 200
    assert service.estimate_tokens(TranslationRequest(text=text, beam_size=2)) == 2 * tokens
    with pytest.raises(
        RequestTooLarge, match=rf"{tokens * 3} decoder tokens \({tokens} source tokens .*; the limit is 400"
    ):
        service.estimate_tokens(TranslationRequest(text=text, beam_size=3))
    words = TranslationRequest(text="a " * 9_990, beam_size=1)
    with pytest.raises(RequestTooLarge, match=r"decoder tokens"):
        type(service)(service.predictor, RequestLimits()).estimate_tokens(words)


class Steps:
    """Work in steps: as many as the first job says, each of which lets shorter requests pass."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.done: list[int] = []
        self.taken = threading.Event()

    def __call__(self, jobs: Sequence[BatchJob]) -> list[int]:
        for _ in range(jobs[0].payload):
            self.taken.set()
            time.sleep(0.002)
            self.batcher.run_shorter_jobs()
        self.done += [job.payload for job in jobs]
        return [job.payload for job in jobs]


def test_short_requests_pass_a_long_one() -> None:
    async def test() -> None:
        batches: list[tuple[int, int]] = []
        one = Batcher(
            max_batch_tokens=100,
            max_queue_tokens=1000,
            max_delay=0,
            on_batch=lambda requests, tokens, _: batches.append((requests, tokens)),
        )
        one.start()
        steps = Steps(one)
        long = one.submit(steps, 500, 400)  # a second at least
        await asyncio.to_thread(steps.taken.wait)
        short = [one.submit(steps, n, 10) for n in (1, 2, 3)]
        other = one.submit(steps, 4, 101)  # more than a quarter of the long one
        assert await asyncio.gather(*map(one.wait_for_result, short)) == [1, 2, 3]
        assert not long.future.done()
        assert await asyncio.gather(one.wait_for_result(long), one.wait_for_result(other)) == [500, 4]
        assert steps.done == [1, 2, 3, 500, 4]
        assert await asyncio.to_thread(one.close, 10)
        assert one.pending_tokens == 0
        assert batches == [(3, 30), (1, 400), (1, 101)]

    run(test())


def test_a_long_one_gets_its_share_of_the_time() -> None:
    async def test() -> None:
        one = Batcher(max_batch_tokens=10, max_queue_tokens=10_000, max_delay=0)
        one.start()
        steps = Steps(one)
        long = one.submit(steps, 300, 400)
        await asyncio.to_thread(steps.taken.wait)
        short = [one.submit(steps, 50, 10) for _ in range(40)]  # 4 s of work, each in a batch of its own
        assert await one.wait_for_result(long) == 300
        assert sum(not job.future.done() for job in short) > 20  # it did not wait for all of them
        for job in short:
            one.cancel(job)
        assert await asyncio.to_thread(one.close, 10)

    assert TIME_SLICE_SECONDS < 0.5
    run(test())


def test_a_short_text_is_translated_within_a_long_one(serving: Any, services: Any, monkeypatch: Any) -> None:
    service = services["translate"]
    steps, usual = [0], type(service.predictor.model).step

    def step(self: Any, state: Any, ids: Any) -> Any:
        steps[0] += 1
        time.sleep(0.005)
        return usual(self, state, ids)

    alone = service.predictor.translate("we walk").translation
    monkeypatch.setattr(type(service.predictor.model), "step", step)
    running = serving({"translate": service}, ServerLimits(max_batch_delay=0))
    body = json.dumps({"text": "the king sleeps " * 200, "beam_size": 1}).encode()
    with running.connected(head(len(body), "/translate") + body):
        until(lambda: steps[0] > 2)
        got = http.post(f"{running.url}/translate", json={"text": "we walk"}).json()
        assert got["translation"] == alone
        assert waiting(running) > 400  # the long one still goes on


# ----------------------------------------------------------------------------------------------- overload


class Timed(Echo):
    """Takes 50 ms for a batch of five: a hundred requests a second, whatever else the machine does."""

    def predict(self, asked: Any, listener: Any) -> list[Any]:
        time.sleep(0.05)
        return [self.Said(text=one.text) for one in asked]


async def offered(port: int, each_second: float, seconds: float) -> list[tuple[int, float, int]]:
    """Status, seconds and Retry-After of requests at a steady rate."""
    free: list[Any] = []

    async def ask() -> tuple[int, float, int]:
        begun = time.monotonic()
        reader, writer = free.pop() if free else await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(len(BODY)) + BODY)
        said = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(re.search(r"content-length: (\d+)", said)[1]))  # type: ignore[index]
        free.append((reader, writer))
        retry = re.search(r"retry-after: (\d+)", said)
        return int(said.split()[1]), time.monotonic() - begun, int(retry[1]) if retry else 0

    tasks, begun = [], time.monotonic()
    while (now := time.monotonic() - begun) < seconds:
        while len(tasks) < now * each_second:
            tasks.append(asyncio.create_task(ask()))
        await asyncio.sleep(0.005)
    answers = await asyncio.gather(*tasks)
    for _, writer in free:
        writer.close()
    return answers


@pytest.mark.slow
def test_goodput_holds_under_four_times_the_load(serving: Any) -> None:
    """At most 200 requests are held: so many seconds of work as Retry-After says."""
    running = serving(
        {"echo": Timed()}, ServerLimits(max_queue_tokens=800, max_batch_tokens=20, max_batch_delay=0)
    )  # of four tokens each
    answered = {}
    for times in (1, 4):
        begun = time.monotonic()
        answers = asyncio.run(offered(running.port, 100 * times, 5))
        taken = [one for one in answers if one[0] == 200]
        answered[times] = len(taken) / (time.monotonic() - begun)
        refused = [one for one in answers if one[0] == 503]
        assert len(taken) + len(refused) == len(answers)
    assert len(refused) > len(taken)
    assert answered[4] >= 0.9 * answered[1]
    longest = max(seconds for _, seconds, _ in taken)
    retries = [retry for _, _, retry in refused]
    assert min(retries) / 2 <= longest <= 2 * max(retries)


@pytest.mark.slow
def test_nothing_is_left_of_an_overload(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(max_queue_tokens=40, max_batch_delay=0))
    threads = threading.active_count()
    asyncio.run(offered(running.port, 300, 3))
    until(lambda: not running.server.server_state.connections)
    assert running.app.state.admission.num_running == 0
    assert waiting(running) == 0
    until(lambda: threading.active_count() <= threads + 1)
    assert len(list(Path("/proc/self/fd").iterdir())) < 200
