"""A server that listens: many clients at once, those who leave, those who are slow, too many, and the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from running_server import Echo, RunningServer, until
from typer.testing import CliRunner

from jumok.cli import app as cli_app
from jumok.errors import InputError, MissingExtra
from jumok.look.viewer import page
from jumok.serve import server
from jumok.serve.limits import ServerLimits
from jumok.tasks.api import RequestLimits

http = httpx2.Client(verify=False, timeout=20)  # one for all: to make one takes long
SENTENCES = ["we walk", "the king sleeps", "it snows in busan", "the king sleeps because it snows in busan"]


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    http.close()


def figures(running: RunningServer) -> dict[str, float]:
    lines = http.get(f"{running.url}/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (one.rpartition(" ") for one in lines if one[0] != "#")}


def in_the_background(running: RunningServer, texts: list[str]) -> list[Any]:
    """Futures of requests, each in a thread of its own."""
    threads = ThreadPoolExecutor(len(texts))
    return [threads.submit(http.post, f"{running.url}/echo", json={"text": text}) for text in texts]


def head(length: int, path: str = "/echo", more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{more}\r\n"
    ).encode()


# ------------------------------------------------------------------------------------------- many at once


def test_many_requests_are_answered_in_few_batches_as_one_by_one(serving: Any, services: Any) -> None:
    running = serving({"translate": services["translate"], "tag": services["tag"]}, ServerLimits(max_batch_delay=0.05))
    texts = [SENTENCES[n % 4] for n in range(32)]

    def ask(text: str) -> tuple[str, list[str]]:
        said = http.post(f"{running.url}/translate", json={"text": text, "beam_size": 2}).json()["translation"]
        return said, http.post(f"{running.url}/tag", json={"text": text}).json()["tags"]

    def count(model: str, kind: str) -> float:
        return figures(running)[f'jumok_batch_size_{kind}{{model="{model}"}}']

    alone = {text: ask(text) for text in set(texts)}
    for model in ("translate", "tag"):
        until(lambda model=model: count(model, "sum") == 4)  # a batch is counted after its answers are sent
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(ask, texts))
    assert together == [alone[text] for text in texts]
    for model in ("translate", "tag"):
        until(lambda model=model: count(model, "sum") == 4 + 32)
        after = figures(running)
        assert count(model, "count") <= 4 + 20
        assert after[f'jumok_pending_tokens{{model="{model}"}}'] == 0


def test_too_many_are_refused_at_once_and_the_queue_stays_within_its_bound(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(max_queue_tokens=50))
    echo.open.clear()
    taken = in_the_background(running, ["x" * 10] * 5)
    until(lambda: figures(running)['jumok_pending_tokens{model="echo"}'] == 50)
    for _ in range(20):
        begun = time.monotonic()
        got = http.post(f"{running.url}/echo", json={"text": "more"})
        assert time.monotonic() - begun < 5  # an answer may take 60
        assert got.status_code == 503
        assert 1 <= int(got.headers["retry-after"]) <= 60
        assert "queue is full" in got.json()["error"]
    assert http.get(f"{running.url}/ready").status_code == 503
    assert http.get(f"{running.url}/health").status_code == 200
    assert figures(running)['jumok_pending_tokens{model="echo"}'] == 50
    echo.open.set()
    assert [one.result().status_code for one in taken] == [200] * 5
    assert http.get(f"{running.url}/ready").status_code == 200
    assert http.post(f"{running.url}/echo", json={"text": "more"}).json() == {"text": "more"}
    assert sum(map(len, echo.batches)) == 6  # what was refused was not computed
    too_much = http.post(f"{running.url}/echo", json={"text": "x" * 51})
    assert (too_much.status_code, "retry-after" in too_much.headers) == (413, False)


def test_too_many_at_the_same_time(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(max_requests=2))
    echo.open.clear()
    taken = in_the_background(running, ["first", "second"])

    until(lambda: http.get(f"{running.url}/models").status_code == 503)
    assert http.get(f"{running.url}/models").headers["retry-after"] == "1"
    assert http.get(f"{running.url}/health").status_code == 200  # who would restart it for being busy?
    echo.open.set()
    assert [one.result().status_code for one in taken] == [200, 200]
    assert http.get(f"{running.url}/models").status_code == 200


def test_no_answer_in_time(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(request_timeout=0.3))
    echo.open.clear()
    echo.stubborn = True
    [begun] = in_the_background(running, ["first"])
    assert echo.working.wait(5)
    queued = http.post(f"{running.url}/echo", json={"text": "Second"})
    assert queued.status_code == 503
    assert "in the queue" in queued.json()["error"]
    assert "retry-after" in queued.headers
    assert begun.result().status_code == 504
    assert "being computed" in begun.result().json()["error"]
    echo.open.set()
    assert http.post(f"{running.url}/echo", json={"text": "third"}).status_code == 200
    assert echo.batches == [["first"], ["third"]]


# ------------------------------------------------------------------------------------------- who leaves


def test_a_client_that_leaves_is_not_computed(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(max_batch_delay=0))
    echo.open.clear()
    [first] = in_the_background(running, ["first"])
    assert echo.working.wait(5)
    body = json.dumps({"text": "Left"}).encode()
    with running.connected(head(len(body)) + body):
        until(lambda: figures(running)['jumok_queued_requests{model="echo"}'] == 1)
    until(lambda: figures(running)['jumok_queued_requests{model="echo"}'] == 0)
    assert figures(running)['jumok_pending_tokens{model="echo"}'] == len("first")
    echo.open.set()
    assert first.result().status_code == 200
    assert echo.batches == [["first"]]
    until(lambda: figures(running).get('jumok_http_requests_total{path="/echo",status="499"}') == 1)


@pytest.mark.parametrize("path", ["/echo", "/echo/stream"])
def test_work_for_a_client_that_has_left_is_put_down(serving: Any, echo: Echo, path: str) -> None:
    running = serving({"echo": echo})
    echo.open.clear()
    body = json.dumps({"text": "x" * 999}).encode()
    with running.connected(head(len(body), path) + body):
        assert echo.working.wait(5)
    until(lambda: figures(running)['jumok_pending_tokens{model="echo"}'] == 0)
    assert (echo.letters, echo.finished) == (0, [])
    echo.open.set()
    assert http.post(f"{running.url}/echo", json={"text": "next"}).json() == {"text": "next"}


def test_a_translation_stops_between_two_words(serving: Any, services: Any, monkeypatch: Any) -> None:
    service = services["translate"]
    steps, slowly = [0], type(service.predictor.model).step

    def step(self: Any, state: Any, ids: Any) -> Any:
        steps[0] += 1
        time.sleep(0.02)
        return slowly(self, state, ids)

    monkeypatch.setattr(type(service.predictor.model), "step", step)
    running = serving({"translate": service})
    body = json.dumps({"text": "the king sleeps " * 30, "beam_size": 1}).encode()
    with running.connected(head(len(body), "/translate") + body):
        until(lambda: steps[0] > 2)
    until(lambda: figures(running)['jumok_pending_tokens{model="translate"}'] == 0)
    assert steps[0] < 40  # of more than two hundred


def test_events_come_while_the_work_goes_on(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo})
    echo.open.clear()
    letting = threading.Timer(0.1, echo.open.set)
    with http.stream("POST", f"{running.url}/echo/stream", json={"text": "abc"}) as got:
        assert got.status_code == 200
        letting.start()
        lines = [line for line in got.iter_lines() if line]
    assert lines[-2:] == ["event: done", 'data: {"text":"abc"}']
    assert set(lines[:-2:2]) <= {"event: text"}


# ------------------------------------------------------------------------------------------ who is slow


def answer_of(one: socket.socket) -> str:
    """All that comes until the server closes the connection."""
    parts = []
    while part := one.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()


def test_slow_and_half_sent_requests_end(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(body_timeout=0.3, max_body_bytes=1000))
    begun = time.monotonic()
    with (
        running.connected() as silent,
        running.connected(b"POST /echo HTTP/1.1\r\nHos") as half_a_head,
        running.connected(head(100) + b'{"text": ') as half_a_body,
        running.connected(head(100)) as no_body,
    ):
        assert answer_of(silent) == answer_of(half_a_head) == ""
        for one in (half_a_body, no_body):
            said = answer_of(one)
            assert said.startswith("HTTP/1.1 408")
            assert "not complete after 0.3 s" in said
    assert time.monotonic() - begun < 3
    with running.connected(head(1001)) as announced:  # not a byte of it is waited for
        assert answer_of(announced).startswith("HTTP/1.1 413")
    with running.connected(
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    ) as unannounced:
        for _ in range(11):
            unannounced.sendall(b"64\r\n" + b"x" * 100 + b"\r\n")
        assert answer_of(unannounced).startswith("HTTP/1.1 413")
    with running.connected(b"\x16\x03\x01 nonsense\r\n\r\n") as nonsense:
        assert answer_of(nonsense).startswith("HTTP/1.1 400")
    with running.connected(head(50) + b"x"):
        pass  # gone in the middle
    with httpx2.Client(verify=False) as kept:  # a connection may rest between requests as long as uvicorn lets it
        for _ in range(2):
            assert kept.post(f"{running.url}/echo", json={"text": "fine"}).json() == {"text": "fine"}
            time.sleep(0.2)
    assert echo.batches == [["fine"]] * 2


def test_who_does_not_take_an_answer_is_left_alone(serving: Any) -> None:
    class Long(Echo):
        def predict(self, asked: Any, listener: Any) -> list[Any]:
            return [self.Said(text="x" * 30_000_000)]

    running = serving({"echo": Long()}, ServerLimits(body_timeout=0.3))
    body = json.dumps({"text": "a"}).encode()
    with running.connected(head(len(body)) + body):
        until(lambda: len(running.server.server_state.connections) == 1)
        until(lambda: not running.server.server_state.connections)
    assert http.get(f"{running.url}/health").status_code == 200


def test_a_slow_body_may_take_longer_as_long_as_it_comes(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(body_timeout=0.5, min_body_rate=400))
    body = json.dumps({"text": "x" * 800}).encode()
    with running.connected(head(len(body), more="Connection: close\r\n")) as slowly:
        for begin in range(0, len(body), 100):  # a second in all
            time.sleep(0.12)
            slowly.sendall(body[begin : begin + 100])
        assert answer_of(slowly).startswith("HTTP/1.1 200")
    with running.connected(head(len(body)) + body[:200]) as too_slowly:
        said = answer_of(too_slowly)
        assert said.startswith("HTTP/1.1 408")
        assert "400 bytes per second or faster, and 200 bytes were received" in said


# -------------------------------------------------------------------------------------------- connections


def test_the_parts_of_an_answer_do_not_wait_for_each_other(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo})
    with running.connected():
        until(lambda: running.server.server_state.connections)
        [one] = running.server.server_state.connections
        assert one.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_idle_connections_make_room(serving: Any, echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    running = serving({"echo": echo}, ServerLimits(max_connections=10, body_timeout=60))
    with contextlib.ExitStack() as some:
        idle = [some.enter_context(running.connected()) for _ in range(50)]
        for one in idle[:40]:
            assert one.recv(1) == b""  # the oldest are closed
        assert http.post(f"{running.url}/echo", json={"text": "fine"}).json() == {"text": "fine"}
        until(lambda: len(running.server.server_state.connections) <= 10)
    assert caplog.records == []


def test_where_all_connections_are_busy_more_are_refused(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(max_connections=2))
    echo.open.clear()
    taken = in_the_background(running, ["first", "second"])
    until(lambda: len(running.server.server_state.connections) == 2 and echo.working.is_set())
    until(lambda: all(one.cycle is not None for one in running.server.server_state.connections))
    with running.connected() as third:
        said = answer_of(third)
        assert said.startswith("HTTP/1.1 503")
        assert said.endswith('{"error":"too many connections; try again in 1 s"}')
    echo.open.set()
    assert [one.result().status_code for one in taken] == [200, 200]


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [(1024, 1024, 1024, 384), (1024, 1 << 20, 4736, 4096), (1 << 16, 1 << 20, 1 << 16, 4096), (64, 64, 64, 1)],
)
def test_open_files_limit_connections(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int, connections: int
) -> None:
    import resource

    known = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(known))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: known.__setitem__(slice(2), both))
    assert server._fit_open_file_limit(ServerLimits()).max_connections == connections
    assert known == [raised, hard]


def test_maps_take_no_threads_from_others(serving: Any, services: Any, monkeypatch: Any) -> None:
    running = serving({"tag": services["tag"]})
    look = http.post(f"{running.url}/attend/tag", json={"text": "Anna"}).json()["attention_url"]
    opened, computing = threading.Event(), page._TileCache.get_or_compute
    monkeypatch.setattr(page._TileCache, "get_or_compute", lambda *given: opened.wait(20) and computing(*given))
    ask = f"GET {look}tiles?layer=0&head=0&rows=0,1&cols=0,%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as some:
        tiles = [some.enter_context(running.connected((ask % n).encode())) for n in range(1, 160)]
        until(lambda: len(select.select(tiles, [], [], 0)[0]) == 159 - 128)  # so many are answered at a time
        refused = select.select(tiles, [], [], 0)[0]
        assert all(one.recv(65536).startswith(b"HTTP/1.1 503") for one in refused)
        assert http.post(f"{running.url}/tag", json={"text": "Anna"}).status_code == 200
        opened.set()
        assert tiles[0].recv(65536).startswith(b"HTTP/1.1 200")


# ----------------------------------------------------------------------------------------------- the end


def test_what_was_taken_is_finished_before_the_end(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(max_batch_delay=0))
    echo.open.clear()
    taken = in_the_background(running, ["first", "Second", "third"])
    until(lambda: figures(running)['jumok_pending_tokens{model="echo"}'] == 16)
    running.server.should_exit = True
    time.sleep(0.3)
    with pytest.raises(httpx2.ConnectError):
        http.post(f"{running.url}/echo", json={"text": "late"})
    echo.open.set()
    assert sorted(one.result().json()["text"] for one in taken) == ["Second", "first", "third"]
    running.thread.join(10)
    assert not running.thread.is_alive()


def test_what_does_not_end_in_time_is_given_up(serving: Any, echo: Echo) -> None:
    """The end comes after the grace period, not after twice that; who is cut off is told so."""
    running = serving({"echo": echo}, ServerLimits(shutdown_timeout=2))
    echo.open.clear()
    echo.stubborn = True
    [stuck] = in_the_background(running, ["stuck"])
    assert echo.working.wait(5)
    body = json.dumps({"text": "streamed"}).encode()
    with running.connected(head(len(body), "/echo/stream") + body) as streamed:
        assert streamed.recv(4096).startswith(b"HTTP/1.1 200")
        begun = time.monotonic()
        running.stop()
        assert time.monotonic() - begun < 3.5
        assert 'event: error\ndata: {"error": "the server is shutting down"}' in answer_of(streamed)
    assert stuck.result().status_code == 503
    assert stuck.result().json() == {"error": "the server is shutting down"}
    assert stuck.result().headers["connection"] == "close"


def test_the_command(runs: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jumok", "serve", f"ours={runs['translate']}", str(runs["tag"])]
    environment = {**os.environ, "JUMOK_AUTH_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [*command, "--port", "0", "--device", "cpu"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            found = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/translate   ours\n", lines[0])
            assert found, (lines, (tmp_path / "errors").read_text())
            assert lines[1] == f"{found[1]}/tag   tag\n"
            with httpx2.Client(base_url=found[1], headers={"Authorization": "Bearer secret"}, verify=False) as client:
                until(lambda: _answers(client), 20)
                assert client.post("/translate", json={"text": "we walk"}).status_code == 200
                assert client.post("/tag", json={"text": "Anna", "model": "ours"}).status_code == 404
                wrong = client.get("/models", headers={"Authorization": "Bearer secreu"})
                assert wrong.status_code == 401
            process.send_signal(signal.SIGTERM)
            process.wait(20)
            assert (tmp_path / "errors").read_text() == ""
        finally:
            process.kill()
            process.communicate()


def _answers(client: httpx2.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx2.TransportError:
        return False


def test_what_is_not_installed_is_named(runs: dict[str, Path], monkeypatch: Any) -> None:
    for name in [name for name in sys.modules if name.startswith("jumok.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    got = CliRunner().invoke(cli_app.app, ["serve", str(runs["tag"])])
    assert isinstance(got.exception, MissingExtra)
    assert str(got.exception) == 'serving needs fastapi, which is not installed: pip install "jumok[serve]"'


def test_what_cannot_be_served(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"two runs have the name tag; give one of them another"):
        server.load_services([str(runs["tag"]), str(runs["tag"])], RequestLimits(), "cpu")
    with pytest.raises(InputError, match="nowhere"):
        server.load_services([str(tmp_path / "nowhere")], RequestLimits(), "cpu")
    both = server.load_services([str(runs["tag"]), f"other={runs['tag']}"], RequestLimits(), "cpu")
    assert list(both) == ["tag", "other"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        got = CliRunner().invoke(cli_app.app, ["serve", str(runs["tag"]), "--port", port, "--device", "cpu"])
        assert isinstance(got.exception, InputError)
        assert "try another port" in str(got.exception)
    got = CliRunner().invoke(cli_app.app, ["serve", str(runs["tag"]), "--auth-token", " "])
    assert "--auth-token or JUMOK_AUTH_TOKEN is empty" in str(got.exception)
    got = CliRunner().invoke(cli_app.app, ["serve", str(runs["tag"])], env={"JUMOK_AUTH_TOKEN": ""})
    assert "JUMOK_AUTH_TOKEN is empty" in str(got.exception)
