"""What a server lets in: who, how much, how slowly. All of it before a request is understood.

- **Who**: with a token, only those who send it, but for what needs none.
- **How much**: a body whose announced length is too large is refused before it is read, any other as soon as
  it is too large.
- **How slowly**: a body that is not there in time is refused with 408; a connection that does not even send
  the head of a request, or does not take its answer, is closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jumok.serve import page
from jumok.tasks.served import Bounds

__all__ = ["Guard", "Limits", "Prompt", "problem"]

KEEPERS = ("/health", "/ready")  # for whoever keeps the server running: always answered
OPEN = (*KEEPERS, *page.FILES)  # without a token: our own files hold nothing


@dataclass(frozen=True)
class Limits:
    """All limits of a server."""

    body: int | None = None  # bytes of a request; None: as many as the largest within the bounds has
    bodies: int = 128 << 20  # bytes of all requests at the same time
    body_seconds: float = 10.0  # until all of it is there
    bounds: Bounds = field(default_factory=Bounds)  # what one request may ask for
    queue: int = 1 << 16  # tokens that each model holds: those that wait, and those in work
    batch: int = 1 << 12  # tokens of a batch
    wait: float = 0.004  # seconds that a request waits for others to go with
    seconds: float = 60.0  # until an answer
    look: int = 2048  # tokens of what is looked at
    looks: int = 8  # that are kept
    look_seconds: float = 900.0  # so long
    requests: int = 1024  # that are answered at the same time
    connections: int = 4096
    grace: float = 30.0  # seconds to finish what was taken, when the server goes down


def problem(status: int, error: str, **headers: str) -> JSONResponse:
    """What every refusal looks like: ``{"error": …}``."""
    return JSONResponse({"error": error.encode(errors="replace").decode()}, status, headers)


class Guard:
    """Stands before an app; ``token`` None lets everybody in."""

    def __init__(self, app: ASGIApp, limits: Limits, token: str | None = None) -> None:
        assert limits.body is not None
        self.app, self.limits, self.most = app, limits, limits.body
        self._token = None if token is None else _digest(token.strip().encode())
        self._busy = 0  # requests that are being answered
        self._bytes = 0  # of their bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self._may_enter(scope["path"], headers):
            answer = problem(
                401, "a token is needed: Authorization: Bearer …", **{"WWW-Authenticate": "Bearer"}
            )
            await answer(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > self.most:
            # What it still sends is not read: the connection ends here.
            await problem(413, self._too_large, Connection="close")(scope, receive, send)
            return
        if self._busy >= self.limits.requests and scope["path"] not in KEEPERS:
            told = "too many requests at once; try again in 1 s"
            await problem(503, told, **{"Retry-After": "1", "Connection": "close"})(scope, receive, send)
            return
        self._busy += 1
        taken = _Taken()
        try:
            await self.app(scope, self._bounded(receive, taken), send)
        finally:
            self._busy -= 1
            self._bytes -= taken.size

    def _may_enter(self, path: str, headers: Headers) -> bool:
        if self._token is None or path in OPEN or path.startswith("/look/"):  # whose names cannot be guessed
            return True
        kind, _, token = headers.get("authorization", "").partition(" ")
        # Of digests, which are of one length: the time that it takes tells nothing.
        same = hmac.compare_digest(_digest(token.strip().encode("latin-1")), self._token)  # as it was sent
        return same and kind.lower() == "bearer"

    @property
    def _too_large(self) -> str:
        return f"the request is too large; {self.most:,} bytes are taken at most"

    def _bounded(self, receive: Receive, taken: _Taken) -> Receive:
        """The same body, as long as it is small enough and comes in time."""
        limits, clock = self.limits, asyncio.get_running_loop()
        deadline = clock.time() + limits.body_seconds
        whole = False

        async def received() -> Message:
            nonlocal whole
            if whole:  # what comes now is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                told = f"the request was not there after {limits.body_seconds:g} s"
                raise HTTPException(408, told, {"Connection": "close"}) from None
            if message["type"] == "http.request":
                came = len(message.get("body", b""))
                whole = not message.get("more_body", False)
                taken.size += came
                self._bytes += came
                if taken.size > self.most:
                    raise HTTPException(413, self._too_large, {"Connection": "close"})
                if self._bytes > max(limits.bodies, self.most):
                    told = "too much was sent at once; try again in 1 s"
                    raise HTTPException(503, told, {"Retry-After": "1", "Connection": "close"})
            return message

        return received


@dataclass
class _Taken:
    """What has come of a body."""

    size: int = 0


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


class Prompt(H11Protocol):
    """Connections on which no request's head arrives in time are closed, or no answer is taken."""

    seconds = 10.0
    _hurry: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._hurry, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None
        elif not busy and self._hurry is None:
            self._hurry = self.loop.call_later(self.seconds, self._late)

    def _late(self) -> None:
        self._hurry = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
