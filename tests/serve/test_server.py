"""A server that listens on a port: concurrent, disconnecting and slow clients, connection limits, and shutdown."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from running_server import EchoService, RunningServer, build_head, build_request, http, read_until_closed, wait_until
from typer.testing import CliRunner

from jumok.cli import app as cli_app
from jumok.errors import InputError, MissingExtra
from jumok.look.viewer import page
from jumok.serve import server as server_module
from jumok.serve.limits import ServerLimits
from jumok.tasks.api import RequestLimits

pytestmark = pytest.mark.long


SENTENCES = ["we walk", "the king sleeps", "it snows in busan", "the king sleeps because it snows in busan"]


# ------------------------------------------------------------------------------------------- concurrency


def test_concurrent_requests_are_batched_with_equal_results(start_server: Any, services: Any) -> None:
    names = ("translate", "tag")
    server: RunningServer = start_server({name: services[name] for name in names}, ServerLimits(max_batch_delay=0.05))
    texts = [SENTENCES[n % 4] for n in range(32)]

    def send(text: str) -> tuple[str, list[str]]:
        translation = server.post("/translate", {"text": text, "beam_size": 2}).json()["translation"]
        return translation, server.post("/tag", {"text": text}).json()["tags"]

    def wait_for_requests(number: int) -> None:  # a batch is counted after its responses are sent
        for name in names:
            metric = f'jumok_batch_size_sum{{model="{name}"}}'
            wait_until(functools.partial(lambda name: server.read_metric(name) == number, metric))

    expected = {text: send(text) for text in set(texts)}
    wait_for_requests(4)
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(send, texts)) == [expected[text] for text in texts]
    wait_for_requests(4 + 32)
    for name in names:
        assert server.read_metric(f'jumok_batch_size_count{{model="{name}"}}') <= 4 + 20
    assert server.count_pending_tokens() == 0


def test_a_full_queue_rejects_immediately(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo}, ServerLimits(max_queue_tokens=50))
    echo.may_work.clear()
    accepted = server.send_in_background(["x" * 10] * 5)
    wait_until(lambda: server.count_pending_tokens() == 50)
    for _ in range(20):
        start_time = time.monotonic()
        response = server.post("/echo", {"text": "more"})
        assert time.monotonic() - start_time < 5  # the request timeout is 60 s
        assert response.status_code == 503
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert "queue is full" in response.json()["error"]
    assert server.get("/ready").status_code == 503
    assert server.get("/health").status_code == 200
    assert server.count_pending_tokens() == 50
    echo.may_work.set()
    assert [future.result().status_code for future in accepted] == [200] * 5
    assert server.get("/ready").status_code == 200
    assert server.post("/echo", {"text": "more"}).json() == {"text": "more"}
    assert sum(map(len, echo.batches)) == 6  # the rejected requests were not computed
    too_large = server.post("/echo", {"text": "x" * 51})
    assert (too_large.status_code, "retry-after" in too_large.headers) == (413, False)


def test_too_many_concurrent_requests_are_rejected(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo}, ServerLimits(max_requests=2))
    echo.may_work.clear()
    accepted = server.send_in_background(["first", "second"])
    wait_until(lambda: server.get("/models").status_code == 503)
    assert server.get("/models").headers["retry-after"] == "1"
    assert server.get("/health").status_code == 200  # a busy server must not be restarted
    echo.may_work.set()
    assert [future.result().status_code for future in accepted] == [200, 200]
    assert server.get("/models").status_code == 200


def test_request_timeout(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo}, ServerLimits(request_timeout=0.3))
    echo.may_work.clear()
    echo.ignores_cancellation = True
    [running] = server.send_in_background(["first"])
    assert echo.has_started.wait(5)
    queued = server.post("/echo", {"text": "Second"})
    assert queued.status_code == 503
    assert "in the queue" in queued.json()["error"]
    assert "retry-after" in queued.headers
    assert running.result().status_code == 504
    assert "being computed" in running.result().json()["error"]
    echo.may_work.set()
    assert server.post("/echo", {"text": "third"}).status_code == 200
    assert echo.batches == [["first"], ["third"]]


# ------------------------------------------------------------------------------------------- disconnection


def test_a_queued_request_is_cancelled_on_disconnect(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo}, ServerLimits(max_batch_delay=0))
    echo.may_work.clear()
    [first] = server.send_in_background(["first"])
    assert echo.has_started.wait(5)
    with server.connect(build_request({"text": "Cancelled"})):
        wait_until(lambda: server.read_metric("jumok_queued_requests{") == 1)
    wait_until(lambda: server.read_metric("jumok_queued_requests{") == 0)
    assert server.count_pending_tokens() == len("first")
    echo.may_work.set()
    assert first.result().status_code == 200
    assert echo.batches == [["first"]]
    wait_until(lambda: server.read_metric('jumok_http_requests_total{path="/echo",status="499"}') == 1)


@pytest.mark.parametrize("path", ["/echo", "/echo/stream"])
def test_a_running_request_is_cancelled_on_disconnect(start_server: Any, echo: EchoService, path: str) -> None:
    server: RunningServer = start_server({"echo": echo})
    echo.may_work.clear()
    with server.connect(build_request({"text": "x" * 999}, path)):
        assert echo.has_started.wait(5)
    wait_until(lambda: server.count_pending_tokens() == 0)
    assert (echo.num_letters, echo.finished_texts) == (0, [])
    echo.may_work.set()
    assert server.post("/echo", {"text": "next"}).json() == {"text": "next"}


def test_a_translation_is_cancelled_between_two_steps(start_server: Any, services: Any, monkeypatch: Any) -> None:
    service = services["translate"]
    num_steps, original_step = [0], type(service.predictor.model).step

    def slow_step(self: Any, state: Any, ids: Any) -> Any:
        num_steps[0] += 1
        time.sleep(0.02)
        return original_step(self, state, ids)

    monkeypatch.setattr(type(service.predictor.model), "step", slow_step)
    server: RunningServer = start_server({"translate": service})
    with server.connect(build_request({"text": "the king sleeps " * 30, "beam_size": 1}, "/translate")):
        wait_until(lambda: num_steps[0] > 2)
    wait_until(lambda: server.count_pending_tokens() == 0)
    assert num_steps[0] < 40  # the whole translation has more than 200


def test_events_are_sent_during_the_computation(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo})
    echo.may_work.clear()
    timer = threading.Timer(0.1, echo.may_work.set)
    with http.stream("POST", f"{server.url}/echo/stream", json={"text": "abc"}) as response:
        assert response.status_code == 200
        timer.start()
        lines = [line for line in response.iter_lines() if line]
    assert lines[-2:] == ["event: done", 'data: {"text":"abc"}']
    assert set(lines[:-2:2]) <= {"event: text"}


# ------------------------------------------------------------------------------------------- slow clients


def test_slow_and_incomplete_requests_time_out(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo}, ServerLimits(body_timeout=0.3, max_body_bytes=1000))
    start_time = time.monotonic()
    with (
        server.connect() as silent,
        server.connect(b"POST /echo HTTP/1.1\r\nHos") as half_head,
        server.connect(build_head(100) + b'{"text": ') as half_body,
        server.connect(build_head(100)) as no_body,
    ):
        assert read_until_closed(silent) == read_until_closed(half_head) == ""
        for connection in (half_body, no_body):
            response = read_until_closed(connection)
            assert response.startswith("HTTP/1.1 408")
            assert "not complete after 0.3 s" in response
    assert time.monotonic() - start_time < 3
    with server.connect(build_head(1001)) as announced:  # rejected before any byte of the body
        assert read_until_closed(announced).startswith("HTTP/1.1 413")
    with server.connect(
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    ) as unannounced:
        for _ in range(11):
            unannounced.sendall(b"64\r\n" + b"x" * 100 + b"\r\n")
        assert read_until_closed(unannounced).startswith("HTTP/1.1 413")
    with server.connect(b"\x16\x03\x01 nonsense\r\n\r\n") as nonsense:
        assert read_until_closed(nonsense).startswith("HTTP/1.1 400")
    with server.connect(build_head(50) + b"x"):
        pass  # disconnects in the middle
    with httpx2.Client(verify=False) as client:  # a connection may be idle between requests for longer
        for _ in range(2):
            assert client.post(f"{server.url}/echo", json={"text": "valid"}).json() == {"text": "valid"}
            time.sleep(0.2)
    assert echo.batches == [["valid"]] * 2


def test_a_client_that_does_not_read_is_disconnected(start_server: Any) -> None:
    class LongResponse(EchoService):
        def predict(self, requests: Any, listener: Any) -> list[Any]:
            return [self.EchoResponse(text="x" * 30_000_000)]

    server: RunningServer = start_server({"echo": LongResponse()}, ServerLimits(body_timeout=0.3))
    with server.connect(build_request({"text": "a"})):
        wait_until(lambda: len(server.connections) == 1)
        wait_until(lambda: not server.connections)
    assert server.get("/health").status_code == 200


def test_a_long_body_may_take_longer_at_the_minimum_rate(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo}, ServerLimits(body_timeout=0.5, min_body_rate=400))
    request = build_request({"text": "x" * 800}, headers="Connection: close\r\n")
    body_start = request.index(b"{")
    with server.connect(request[:body_start]) as connection:
        for start in range(body_start, len(request), 100):  # one second in total
            time.sleep(0.12)
            connection.sendall(request[start : start + 100])
        assert read_until_closed(connection).startswith("HTTP/1.1 200")
    with server.connect(request[: body_start + 200]) as connection:
        response = read_until_closed(connection)
        assert response.startswith("HTTP/1.1 408")
        assert "400 bytes per second or faster, and 200 bytes were received" in response


# -------------------------------------------------------------------------------------------- connections


def test_connections_have_tcp_nodelay(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo})
    with server.connect():
        wait_until(lambda: server.connections)
        [connection] = server.connections
        assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_idle_connections_are_closed_first(
    start_server: Any, echo: EchoService, caplog: pytest.LogCaptureFixture
) -> None:
    server: RunningServer = start_server({"echo": echo}, ServerLimits(max_connections=10, body_timeout=60))
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(50)]
        for connection in idle[:40]:  # the oldest ones are closed
            assert connection.recv(1) == b""
        assert server.post("/echo", {"text": "valid"}).json() == {"text": "valid"}
        wait_until(lambda: len(server.connections) <= 10)
    assert caplog.records == []


def test_new_connections_are_rejected_if_all_are_busy(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo}, ServerLimits(max_connections=2))
    echo.may_work.clear()
    accepted = server.send_in_background(["first", "second"])
    wait_until(lambda: len(server.connections) == 2 and echo.has_started.is_set())
    wait_until(lambda: all(connection.cycle is not None for connection in server.connections))
    with server.connect() as third:
        response = read_until_closed(third)
        assert response.startswith("HTTP/1.1 503")
        assert response.endswith('{"error":"too many connections; try again in 1 s"}')
    echo.may_work.set()
    assert [future.result().status_code for future in accepted] == [200, 200]


@pytest.mark.parametrize(
    ("soft", "hard", "new_soft", "connections"),
    [(1024, 1024, 1024, 384), (1024, 1 << 20, 4736, 4096), (1 << 16, 1 << 20, 1 << 16, 4096), (64, 64, 64, 1)],
)
def test_connections_fit_the_open_file_limit(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, new_soft: int, connections: int
) -> None:
    import resource

    limits = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new_limits: limits.__setitem__(slice(2), new_limits))
    assert server_module._fit_open_file_limit(ServerLimits()).max_connections == connections
    assert limits == [new_soft, hard]


def test_attention_pages_do_not_block_other_requests(start_server: Any, services: Any, monkeypatch: Any) -> None:
    server: RunningServer = start_server({"tag": services["tag"]})
    page_url = server.post("/attend/tag", {"text": "Anna"}).json()["attention_url"]
    may_compute, compute = threading.Event(), page._TileCache.get_or_compute
    monkeypatch.setattr(page._TileCache, "get_or_compute", lambda *args: may_compute.wait(20) and compute(*args))
    request = f"GET {page_url}tiles?layer=0&head=0&rows=0,1&cols=0,%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        tiles = [stack.enter_context(server.connect((request % n).encode())) for n in range(1, 160)]
        wait_until(lambda: len(select.select(tiles, [], [], 0)[0]) == 159 - ServerLimits.max_attention_requests)
        rejected = select.select(tiles, [], [], 0)[0]
        assert all(connection.recv(65536).startswith(b"HTTP/1.1 503") for connection in rejected)
        assert server.post("/tag", {"text": "Anna"}).status_code == 200
        may_compute.set()
        assert tiles[0].recv(65536).startswith(b"HTTP/1.1 200")


# ----------------------------------------------------------------------------------------------- shutdown


def test_shutdown_finishes_running_requests(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo}, ServerLimits(max_batch_delay=0))
    echo.may_work.clear()
    accepted = server.send_in_background(["first", "Second", "third"])
    wait_until(lambda: server.count_pending_tokens() == 16)
    server.server.should_exit = True
    time.sleep(0.3)
    with pytest.raises(httpx2.ConnectError):
        server.post("/echo", {"text": "late"})
    echo.may_work.set()
    assert sorted(future.result().json()["text"] for future in accepted) == ["Second", "first", "third"]
    server.thread.join(10)
    assert not server.thread.is_alive()


def test_shutdown_cancels_requests_after_the_timeout(start_server: Any, echo: EchoService) -> None:
    server: RunningServer = start_server({"echo": echo}, ServerLimits(shutdown_timeout=2))
    echo.may_work.clear()
    echo.ignores_cancellation = True
    [stuck] = server.send_in_background(["stuck"])
    assert echo.has_started.wait(5)
    with server.connect(build_request({"text": "streamed"}, "/echo/stream")) as streamed:
        assert streamed.recv(4096).startswith(b"HTTP/1.1 200")
        start_time = time.monotonic()
        server.stop()
        assert time.monotonic() - start_time < 3.5  # not twice the timeout
        assert 'event: error\ndata: {"error": "the server is shutting down"}' in read_until_closed(streamed)
    assert stuck.result().status_code == 503
    assert stuck.result().json() == {"error": "the server is shutting down"}
    assert stuck.result().headers["connection"] == "close"


# ----------------------------------------------------------------------------------------------- command


def test_serve_command(runs: dict[str, Path], tmp_path: Path) -> None:
    def is_ready(client: httpx2.Client) -> bool:
        try:
            return client.get("/ready").status_code == 200
        except httpx2.TransportError:
            return False

    command = [sys.executable, "-m", "jumok", "serve", f"ours={runs['translate']}", str(runs["tag"])]
    environment = {**os.environ, "JUMOK_AUTH_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    error_path = tmp_path / "errors"
    with error_path.open("w+") as errors:
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
            match = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/translate   ours\n", lines[0])
            assert match, (lines, error_path.read_text())
            assert lines[1] == f"{match[1]}/tag   tag\n"
            with httpx2.Client(base_url=match[1], headers={"Authorization": "Bearer secret"}, verify=False) as client:
                wait_until(lambda: is_ready(client), 20)
                assert client.post("/translate", json={"text": "we walk"}).status_code == 200
                assert client.post("/tag", json={"text": "Anna", "model": "ours"}).status_code == 404
                assert client.get("/models", headers={"Authorization": "Bearer secreu"}).status_code == 401
            process.send_signal(signal.SIGTERM)
            process.wait(20)
            assert error_path.read_text() == ""
        finally:
            process.kill()
            process.communicate()


def test_a_missing_package_is_named(runs: dict[str, Path], monkeypatch: Any) -> None:
    for name in [name for name in sys.modules if name.startswith("jumok.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = CliRunner().invoke(cli_app.app, ["serve", str(runs["tag"])])
    assert isinstance(result.exception, MissingExtra)
    assert str(result.exception) == 'serving needs fastapi, which is not installed: pip install "jumok[serve]"'


def test_invalid_runs_ports_and_tokens(runs: dict[str, Path], tmp_path: Path) -> None:
    run = str(runs["tag"])
    with pytest.raises(InputError, match=r"two runs have the name tag; give one of them another"):
        server_module.load_services([run, run], RequestLimits(), "cpu")
    with pytest.raises(InputError, match="nowhere"):
        server_module.load_services([str(tmp_path / "nowhere")], RequestLimits(), "cpu")
    assert list(server_module.load_services([run, f"other={run}"], RequestLimits(), "cpu")) == ["tag", "other"]
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        result = CliRunner().invoke(cli_app.app, ["serve", run, "--port", port, "--device", "cpu"])
        assert isinstance(result.exception, InputError)
        assert "try another port" in str(result.exception)
    result = CliRunner().invoke(cli_app.app, ["serve", run, "--auth-token", " "])
    assert "--auth-token or JUMOK_AUTH_TOKEN is empty" in str(result.exception)
    result = CliRunner().invoke(cli_app.app, ["serve", run], env={"JUMOK_AUTH_TOKEN": ""})
    assert "JUMOK_AUTH_TOKEN is empty" in str(result.exception)
