"""A server in a process of its own, and clients that ask it: what a benchmark of serving needs.

The clients are coroutines on plain sockets, with connections that are kept, so that they cost little: they
run on the same cores as the server.
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
class Answer:
    """What became of a request; status 0: the connection broke."""

    status: int
    seconds: float
    retry: str | None = None  # the header Retry-After
    body: bytes = b""


@dataclass
class Server:
    """A server that listens."""

    port: int
    pid: int

    @property
    def mib(self) -> float:
        """The memory that it holds."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB


@contextlib.contextmanager
def serving(run: Path, engine: str, *options: str) -> Iterator[Server]:
    """`jumok serve`, until it is no longer needed."""
    words = [sys.executable, "-m", "jumok", "serve", str(run), "--port", "0", "--engine", engine, *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)/", process.stdout.readline())
            if found is None:
                raise RuntimeError("the server did not start")
            yield Server(int(found[1]), process.pid)
        finally:
            process.terminate()


def encode_body(text: str, beam_size: int) -> bytes:
    return json.dumps({"text": text, "beam_size": beam_size}).encode()


@dataclass
class Client:
    """Connections to a server that are kept; each request takes one that is free."""

    port: int
    _free: collections.deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(
        default_factory=collections.deque
    )

    async def ask(self, body: bytes, path: str = "/translate") -> Answer:
        """One request."""
        began = time.perf_counter()
        try:
            status, headers, said = await self._asked(b"POST", path.encode(), body)
        except (OSError, asyncio.IncompleteReadError):
            return Answer(0, time.perf_counter() - began)
        return Answer(status, time.perf_counter() - began, headers.get("retry-after"), said)

    async def metrics(self) -> dict[str, float]:
        """What the server counted."""
        _, _, body = await self._asked(b"GET", b"/metrics", b"")
        lines = (line for line in body.decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def _asked(self, method: bytes, path: bytes, body: bytes) -> tuple[int, dict[str, str], bytes]:
        both = self._free.popleft() if self._free else await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = both
        try:
            kind = b"Content-Type: application/json\r\n" if body else b""
            writer.write(
                b"%s %s HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n%s"
                % (method, path, kind, len(body), body)
            )
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            pairs = (line.split(":", 1) for line in lines if line)
            headers = {name.lower(): value.strip() for name, value in pairs}
            said = await reader.readexactly(int(headers["content-length"]))
        except BaseException:
            writer.close()
            raise
        if headers.get("connection") == "close":
            writer.close()
        else:
            self._free.append(both)
        return int(first.split()[1]), headers, said

    def close(self) -> None:
        while self._free:
            self._free.pop()[1].close()


async def closed_loop(client: Client, bodies: Sequence[bytes], clients: int) -> tuple[list[Answer], float]:
    """So many clients, each of whom asks again when it was answered; all answers, and the seconds taken."""
    left = iter(bodies)
    found: list[Answer] = []

    async def one() -> None:
        for body in left:
            found.append(await client.ask(body))

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    return found, time.perf_counter() - began


async def open_loop(
    client: Client, server: Server, bodies: Sequence[bytes], each_second: float, seconds: float
) -> tuple[list[Answer], list[float]]:
    """Requests at a steady rate, whatever is answered; all answers, and the server's MiB second by second."""
    asked: list[asyncio.Task[Answer]] = []
    mib = [server.mib]
    began = time.perf_counter()
    while (now := time.perf_counter() - began) < seconds:
        while len(asked) < now * each_second:
            asked.append(asyncio.create_task(client.ask(bodies[len(asked) % len(bodies)])))
        if now >= len(mib):
            mib.append(server.mib)
        await asyncio.sleep(min(0.01, 1 / each_second))
    found = list(await asyncio.gather(*asked))
    mib.append(server.mib)
    return found, mib
