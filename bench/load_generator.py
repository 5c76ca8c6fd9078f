"""A load generator: a server in its own process, and clients that send requests.

Clients are coroutines on plain sockets with persistent connections. They cost little, because they run on the same
cores as the server.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Response:
    """The response to a request; status 0 means that the connection broke."""

    status: int
    seconds: float
    retry_after: str | None = None  # header
    body: bytes = b""


@dataclass
class Server:
    """A running server."""

    port: int
    pid: int

    @property
    def mib(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB


@contextlib.contextmanager
def run_server(run: Path, engine: str, *options: str) -> Iterator[Server]:
    """Run `jumok serve` in the context."""
    command = [sys.executable, "-m", "jumok", "serve", str(run), "--port", "0", "--engine", engine, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            match = re.search(r":(\d+)/", process.stdout.readline())
            if match is None:
                raise RuntimeError("the server did not print its address")
            yield Server(int(match[1]), process.pid)
        finally:
            process.terminate()


def encode_body(text: str, beam_size: int) -> bytes:
    return json.dumps({"text": text, "beam_size": beam_size}).encode()


@dataclass
class Client:
    """Persistent connections to a server; each request uses a free one."""

    port: int
    _free: collections.deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(
        default_factory=collections.deque
    )

    async def post(self, body: bytes, path: str = "/translate") -> Response:
        """Send a request and wait for its response."""
        start = time.perf_counter()
        try:
            status, headers, response_body = await self._request(b"POST", path.encode(), body)
        except (OSError, asyncio.IncompleteReadError):
            return Response(0, time.perf_counter() - start)
        return Response(status, time.perf_counter() - start, headers.get("retry-after"), response_body)

    async def metrics(self) -> dict[str, float]:
        """Return the server's metrics."""
        _, _, body = await self._request(b"GET", b"/metrics", b"")
        lines = (line for line in body.decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def _request(self, method: bytes, path: bytes, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = self._free.popleft() if self._free else await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = connection
        try:
            content_type = b"Content-Type: application/json\r\n" if body else b""
            writer.write(
                b"%s %s HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n%s"
                % (method, path, content_type, len(body), body)
            )
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            pairs = (line.split(":", 1) for line in lines if line)
            headers = {name.lower(): value.strip() for name, value in pairs}
            response_body = await reader.readexactly(int(headers["content-length"]))
        except BaseException:
            writer.close()
            raise
        if headers.get("connection") == "close":
            writer.close()
        else:
            self._free.append(connection)
        return int(first.split()[1]), headers, response_body

    def close(self) -> None:
        while self._free:
            self._free.pop()[1].close()


async def closed_loop(client: Client, bodies: Sequence[bytes], clients: int) -> tuple[list[Response], float]:
    """Run clients that each send the next request after a response; return all responses and the total seconds."""
    queue = iter(bodies)
    responses: list[Response] = []

    async def send_requests() -> None:
        for body in queue:
            responses.append(await client.post(body))

    start = time.perf_counter()
    await asyncio.gather(*(send_requests() for _ in range(clients)))
    return responses, time.perf_counter() - start


async def open_loop(
    client: Client, server: Server, bodies: Sequence[bytes], requests_s: float, seconds: float
) -> tuple[list[Response], list[float]]:
    """Send requests at a constant rate; return all responses, and the server's MiB in each second."""
    requests: list[asyncio.Task[Response]] = []
    mib = [server.mib]
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        while len(requests) < elapsed * requests_s:
            requests.append(asyncio.create_task(client.post(bodies[len(requests) % len(bodies)])))
        if elapsed >= len(mib):
            mib.append(server.mib)
        await asyncio.sleep(min(0.01, 1 / requests_s))
    responses = list(await asyncio.gather(*requests))
    mib.append(server.mib)
    return responses, mib
