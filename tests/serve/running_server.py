"""A server that listens on a port, and a service whose work a test controls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import uvicorn

import jumok
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.serve.server import build_uvicorn_config
from jumok.tasks import api as tasks_api

http = httpx2.Client(verify=False, timeout=20)  # shared, because creating a client takes long


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for a condition to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def run_async(test: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a new thread, because a browser test leaves a running event loop in this one."""

    async def run_with_timeout() -> Any:
        async with asyncio.timeout(60):
            return await test

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run_with_timeout()).result()


def build_head(length: int, path: str = "/echo", headers: str = "") -> bytes:
    """Build the head of a JSON request with this Content-Length."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{headers}\r\n"
    ).encode()


def build_request(payload: Any, path: str = "/echo", headers: str = "") -> bytes:
    """Build a JSON request."""
    body = json.dumps(payload).encode()
    return build_head(len(body), path, headers) + body


def read_until_closed(connection: socket.socket) -> str:
    """Read until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()


class PromptServer(uvicorn.Server):
    """Notices within a few milliseconds that it should exit. uvicorn looks ten times a second."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)


class RunningServer:
    """A server that listens on a free port of this machine."""

    def __init__(self, services: Mapping[str, Any], limits: ServerLimits, **options: Any) -> None:
        self.app = build_app(services, limits, **options)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = PromptServer(build_uvicorn_config(self.app, limits))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)

    @property
    def connections(self) -> set[Any]:
        """The open connections."""
        return self.server.server_state.connections

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.socket.close()
        assert not self.thread.is_alive()

    @contextlib.contextmanager
    def connect(self, data: bytes = b"") -> Iterator[socket.socket]:
        """Open a connection and send some bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(data)
            yield connection

    def post(self, path: str, payload: Any) -> httpx2.Response:
        """Send a JSON request."""
        return http.post(f"{self.url}{path}", json=payload)

    def get(self, path: str) -> httpx2.Response:
        return http.get(f"{self.url}{path}")

    def send_in_background(self, texts: Sequence[str]) -> list[Future[httpx2.Response]]:
        """Send texts to the echo service, each in its own thread."""
        threads = ThreadPoolExecutor(len(texts))
        return [threads.submit(self.post, "/echo", {"text": text}) for text in texts]

    def read_metric(self, name: str) -> float:
        """Read a metric: the sum over all labels that are not given."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def count_pending_tokens(self) -> float:
        return self.read_metric("jumok_pending_tokens{")


class EchoService:
    """A service that repeats texts letter by letter, as fast as a test allows. A token is a letter."""

    class EchoRequest(tasks_api.TaskRequest):
        text: tasks_api.RequestText

    class EchoResponse(tasks_api.TaskResponse):
        text: str

    endpoint, summary, supports_streaming = "echo", "Repeat a text.", True
    request_type, response_type = EchoRequest, EchoResponse

    def __init__(self) -> None:
        self.may_work = threading.Event()  # if cleared, the work pauses at the first letter
        self.may_work.set()
        self.batches: list[list[str]] = []
        self.finished_texts: list[str] = []
        self.num_letters = 0
        self.ignores_cancellation = False
        self.has_started = threading.Event()

    def describe(self) -> dict[str, Any]:
        return {}

    def estimate_tokens(self, request: EchoRequest) -> int:
        return len(request.text)

    def get_batch_key(self, request: EchoRequest) -> Any:
        return request.text[0].isupper()

    def predict(self, requests: Sequence[EchoRequest], listener: Any) -> list[EchoResponse]:
        texts = [request.text for request in requests]
        self.batches.append(texts)
        if any("broken" in text for text in texts):
            raise RuntimeError("this text is broken")
        if any("unreadable" in text for text in texts):
            raise jumok.InputError("line 1 has words that nobody can read")
        self.has_started.set()
        for end in range(1, max(map(len, texts)) + 1):
            while not self.may_work.wait(0.005):
                if not self.ignores_cancellation and all(listener.is_cancelled(n) for n in range(len(texts))):
                    return [self.EchoResponse(text="")] * len(texts)
            self.num_letters += 1
            for n, text in enumerate(texts):
                if listener.is_streaming(n) and end <= len(text):
                    listener.on_partial(n, text[:end])
        self.finished_texts += texts
        return [self.EchoResponse(text=text) for text in texts]

    def build_viewer_data(self, request: EchoRequest, response: EchoResponse) -> list[Any]:
        raise jumok.InputError("line 1: there is no attention")
