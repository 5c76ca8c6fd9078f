"""Clients that disconnect at any point, and invalid HTTP: the server keeps nothing, and answers the next request."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from typing import Any

import pytest
from running_server import EchoService, RunningServer, build_request, read_until_closed, wait_until

from jumok.serve.limits import ServerLimits

pytestmark = pytest.mark.long


PAYLOAD = {"text": "a text of some words"}


def count_resources() -> tuple[int, int]:
    """Count threads and open files, of which each connection is one."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def send_and_disconnect(server: RunningServer, data: bytes, *, reset: bool) -> None:
    """Send some bytes and close or reset the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(data)


@pytest.mark.parametrize("path", ["/echo", "/echo/stream"])
def test_disconnect_after_every_byte(start_server: Any, echo: EchoService, path: str) -> None:
    server = start_server({"echo": echo}, ServerLimits(max_batch_delay=0))
    request = build_request(PAYLOAD, path)
    send_and_disconnect(server, request, reset=False)
    wait_until(lambda: not server.connections)
    threads, files = count_resources()
    for end in range(len(request) + 1):
        send_and_disconnect(server, request[:end], reset=bool(end % 2))
    wait_until(lambda: not server.connections)
    wait_until(lambda: count_resources()[0] <= threads and count_resources()[1] <= files)
    wait_until(lambda: server.count_pending_tokens() == 0)
    assert server.post("/echo", {"text": "valid"}).json() == {"text": "valid"}


def test_disconnect_during_the_computation(start_server: Any, echo: EchoService) -> None:
    server = start_server({"echo": echo}, ServerLimits(max_batch_delay=0))
    echo.may_work.clear()
    for path in ("/echo", "/echo/stream") * 20:
        send_and_disconnect(server, build_request(PAYLOAD, path), reset=False)
    wait_until(lambda: server.read_metric('jumok_http_requests_total{path="/echo') == 40)  # all came and left
    wait_until(lambda: server.count_pending_tokens() == 0)  # removed from the queue, though nothing was computed
    wait_until(lambda: len(server.connections) <= 1)  # that of our client
    assert echo.finished_texts == []
    echo.may_work.set()
    assert server.post("/echo", {"text": "valid"}).json() == {"text": "valid"}
    assert echo.finished_texts == ["valid"]


def test_a_request_may_arrive_byte_by_byte(start_server: Any, echo: EchoService) -> None:
    server = start_server({"echo": echo}, ServerLimits(max_batch_delay=0))
    with server.connect() as connection:
        for byte in build_request(PAYLOAD):
            connection.sendall(bytes([byte]))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", "400"),
        (b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "400"),
        (b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "400"),
        (
            b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n",
            "400",
        ),
        (b"GET /%00%ff%zz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", "404"),
        (b"GET /look/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", "404"),
    ],
)
def test_invalid_http(
    start_server: Any, echo: EchoService, data: bytes, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server({"echo": echo}, ServerLimits(body_timeout=0.5))
    with server.connect(data) as connection:
        head, _, body = read_until_closed(connection).partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status}")
    assert set(json.loads(body)) == {"error"}
    assert "nosniff" in head
    assert [record.exc_info for record in caplog.records] in ([], [None])  # a line without a traceback
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("start", [b"GET /", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_an_endless_head_is_rejected(start_server: Any, echo: EchoService, start: bytes) -> None:
    server = start_server({"echo": echo}, ServerLimits(body_timeout=5))
    with server.connect(start) as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
        connection.sendall(b"a" * 100_000_000)
    assert server.get("/health").status_code == 200
