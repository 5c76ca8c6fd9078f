"""A server that listens, and a service that does what a test wants."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn

import jumok
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.serve.server import build_uvicorn_config
from jumok.tasks import api as tasks_api


def until(said: Any, seconds: float = 10.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


class RunningServer:
    """A server that listens on a free port of this machine."""

    def __init__(self, services: Mapping[str, Any], limits: ServerLimits, **more: Any) -> None:
        self.app = build_app(services, limits, **more)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(build_uvicorn_config(self.app, limits))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.socket.close()
        assert not self.thread.is_alive()

    @contextlib.contextmanager
    def connected(self, sent: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as one:
            one.sendall(sent)
            yield one


class Echo:
    """A service that says a text's letters one by one, as fast as it is let; a token is a letter."""

    class Asked(tasks_api.TaskRequest):
        text: tasks_api.RequestText

    class Said(tasks_api.TaskResponse):
        text: str

    endpoint, summary, supports_streaming = "echo", "Repeat a text.", True
    request_type, response_type = Asked, Said

    def __init__(self) -> None:
        self.open = threading.Event()  # closed: work stops at the first letter
        self.open.set()
        self.batches: list[list[str]] = []
        self.finished: list[str] = []
        self.letters = 0
        self.stubborn = False  # goes on for those who have left
        self.working = threading.Event()

    def describe(self) -> dict[str, Any]:
        return {}

    def estimate_tokens(self, asked: Asked) -> int:
        return len(asked.text)

    def get_batch_key(self, asked: Asked) -> Any:
        return asked.text[0].isupper()

    def predict(self, asked: Sequence[Asked], listener: Any) -> list[Said]:
        texts = [one.text for one in asked]
        self.batches.append(texts)
        if any("broken" in text for text in texts):
            raise RuntimeError("this one is broken")
        if any("unreadable" in text for text in texts):
            raise jumok.InputError("line 1 has words that nobody can read")
        self.working.set()
        for end in range(1, max(map(len, texts)) + 1):
            while not self.open.wait(0.005):
                if not self.stubborn and all(listener.is_cancelled(n) for n in range(len(texts))):
                    return [self.Said(text="")] * len(texts)
            self.letters += 1
            for n, text in enumerate(texts):
                if listener.is_streaming(n) and end <= len(text):
                    listener.on_partial(n, text[:end])
        self.finished += texts
        return [self.Said(text=text) for text in texts]

    def build_viewer_data(self, asked: Asked, answer: Said) -> list[Any]:
        raise jumok.InputError("line 1: there is nothing to look at")
