"""Clients that break off, anywhere and in any way: the server keeps nothing of them, and answers the next."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from typing import Any

import httpx2
import pytest
from running_server import Echo, RunningServer, until

from jumok.serve.limits import ServerLimits

BODY = json.dumps({"text": "a text of some words"}).encode()
HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def figure(running: RunningServer, name: str) -> float:
    """The sum of a figure of /metrics, whatever its labels."""
    told = httpx2.get(f"{running.url}/metrics", verify=False).text.splitlines()
    return sum(float(one.rpartition(" ")[2]) for one in told if one.startswith(name))


def waiting(running: RunningServer) -> float:
    """Tokens in the queue."""
    return figure(running, "jumok_pending_tokens{")


def held() -> tuple[int, int]:
    """Threads and open files, of which each connection is one."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def cut(running: RunningServer, sent: bytes, *, reset: bool) -> None:
    """Send something and be gone: by a close, or by a reset, which tells the server nothing more."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as one:
        if reset:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.sendall(sent)


@pytest.mark.parametrize("path", [b"/echo", b"/echo/stream"])
def test_broken_off_at_every_byte(serving: Any, echo: Echo, path: bytes) -> None:
    running = serving({"echo": echo}, ServerLimits(max_batch_delay=0))
    whole = HEAD % (path, len(BODY)) + BODY
    assert httpx2.post(f"{running.url}/echo", json={"text": "first"}, verify=False).status_code == 200
    until(lambda: not running.server.server_state.connections)
    threads, files = held()
    for end in range(len(whole) + 1):
        cut(running, whole[:end], reset=bool(end % 2))
    until(lambda: not running.server.server_state.connections)
    until(lambda: held()[0] <= threads and held()[1] <= files)
    until(lambda: waiting(running) == 0)
    assert httpx2.post(f"{running.url}/echo", json={"text": "fine"}, verify=False).json() == {"text": "fine"}


def test_broken_off_while_the_work_goes_on(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(max_batch_delay=0))
    echo.open.clear()
    for path in (b"/echo", b"/echo/stream") * 20:
        cut(running, HEAD % (path, len(BODY)) + BODY, reset=False)
    until(lambda: figure(running, 'jumok_http_requests_total{path="/echo') == 40)  # all were there, and have left
    until(lambda: waiting(running) == 0)  # out of the queue, though nothing was computed
    until(lambda: not running.server.server_state.connections)
    assert echo.finished == []
    echo.open.set()
    assert httpx2.post(f"{running.url}/echo", json={"text": "fine"}, verify=False).json() == {"text": "fine"}
    assert echo.finished == ["fine"]


def test_bytes_that_come_one_by_one_make_a_request(serving: Any, echo: Echo) -> None:
    running = serving({"echo": echo}, ServerLimits(max_batch_delay=0))
    with running.connected() as slow:
        for byte in HEAD % (b"/echo", len(BODY)) + BODY:
            slow.sendall(bytes([byte]))
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (
            b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n",
            b"400",
        ),
        (b"GET /%00%ff%zz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
        (b"GET /look/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
    ],
)
def test_no_http_and_strange_http(
    serving: Any, echo: Echo, sent: bytes, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    running = serving({"echo": echo}, ServerLimits(body_timeout=0.5))
    with running.connected(sent) as one:
        said = b""
        while part := one.recv(65536):
            said += part
    first, body = said.split(b"\r\n", 1)[0], said.partition(b"\r\n\r\n")[2]
    assert first.startswith(b"HTTP/1.1 " + status)
    assert set(json.loads(body)) == {"error"}
    assert b"nosniff" in said
    assert [record.exc_info for record in caplog.records] in ([], [None])  # a line, and no traceback
    assert httpx2.get(f"{running.url}/health", verify=False).status_code == 200


@pytest.mark.parametrize("begin", [b"GET /", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_head_without_end_is_not_read_to_its_end(serving: Any, echo: Echo, begin: bytes) -> None:
    running = serving({"echo": echo}, ServerLimits(body_timeout=5))
    with running.connected(begin) as one, pytest.raises((ConnectionResetError, BrokenPipeError)):
        one.sendall(b"a" * 100_000_000)
    assert httpx2.get(f"{running.url}/health", verify=False).status_code == 200
