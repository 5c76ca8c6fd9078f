"""What a server lets in: who, how much, how slowly. All of it before a request is understood.

- **Who**: with a token, only those who send it, but for what needs none.
- **How much**: a body whose announced length is too large is refused before it is read, any other as soon as
  it is too large.
- **How slowly**: a body that comes slower than a minimum rate is refused with 408. (A connection that does
  not even send the head of a request, or does not take its answer, is closed: see jumok.serve.protocol.)
- **How many**: where there is no room for a request, it is refused before its body is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jumok.serve import page
from jumok.serve.admission import Admission
from jumok.serve.batcher import Closed, Overloaded
from jumok.serve.responses import overload, problem
from jumok.tasks.served import Bounds

__all__ = ["Guard", "Limits"]

KEEPERS = ("/health", "/ready")  # for whoever keeps the server running: always answered
LOOK = "/look/"
SMALL_BODY = 1 << 16  # bytes of a request to a path that is no task's
DISCARDED = 64 << 20  # bytes of a refused body that are read and discarded at most
OPEN = (*KEEPERS, *page.FILES)  # without a token: our own files hold nothing


@dataclass(frozen=True)
class Limits:
    """All limits of a server."""

    body: int | None = None  # bytes of a request; None: as many as the largest of its task has
    bodies: int = 128 << 20  # bytes of all requests at the same time
    body_seconds: float = 10.0  # until all of it is there, and longer by
    body_rate: int = 1 << 16  # a second for so many bytes that came
    bounds: Bounds = field(default_factory=Bounds)  # what one request may ask for
    queue: int = 1 << 16  # tokens that each model holds: those that wait, and those in work
    batch: int = 1 << 12  # tokens of a batch
    wait: float = 0.004  # seconds that a request waits for others to go with
    seconds: float = 60.0  # until an answer
    look: int = 2048  # tokens of what is looked at
    looks: int = 8  # that are kept
    look_seconds: float = 900.0  # so long
    requests: int = 1024  # that are answered at the same time
    look_requests: int = 128  # for tiles of maps, which are not counted among those
    connections: int = 4096  # less where the system allows fewer open files
    grace: float = 30.0  # seconds to finish what was taken, when the server goes down


class Guard:
    """Stands before an app; ``token`` None lets everybody in."""

    def __init__(self, app: ASGIApp, limits: Limits, admission: Admission, token: str | None = None) -> None:
        self.app, self.limits, self.admission = app, limits, admission
        self._token = None if token is None else _digest(token.strip().encode())
        self._looking = 0  # requests for maps that are being answered
        self._bytes = 0  # of all bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        if not self._may_enter(path, headers):
            answer = problem(
                401, "a token is needed: Authorization: Bearer …", **{"WWW-Authenticate": "Bearer"}
            )
            await answer(scope, receive, send)
            return
        route = self.admission.routes.get(path)
        body = _Body(SMALL_BODY if route is None else route.max_bytes)
        announced = headers.get("content-length", "0")
        length = int(announced) if announced.isdecimal() and len(announced) <= 18 else 1 << 60
        if length > body.most:
            # The body is read and discarded, so that the client gets this answer; unless it is far too large.
            closing = {} if length <= DISCARDED else {"Connection": "close"}
            await problem(413, body.too_large, **closing)(scope, receive, send)
            return
        look = path.startswith(LOOK)
        try:
            self._check_room(path, look=look)
        except (Overloaded, Closed) as error:
            await overload(error)(scope, receive, send)  # the rest of the body is read and discarded
            return
        self._count(1, look=look)
        try:
            await self.app(scope, self._bounded(receive, body), send)
        finally:
            self._count(-1, look=look)
            self._bytes -= body.size

    def _check_room(self, path: str, *, look: bool) -> None:
        if look and self._looking >= self.limits.look_requests:
            raise Overloaded(1)
        if not look and path not in KEEPERS:
            self.admission.check(path)

    def _count(self, number: int, *, look: bool) -> None:
        if look:
            self._looking += number
        else:
            self.admission.running += number

    def _may_enter(self, path: str, headers: Headers) -> bool:
        if self._token is None or path in OPEN or path.startswith(LOOK):  # whose names cannot be guessed
            return True
        kind, _, token = headers.get("authorization", "").partition(" ")
        # Of digests, which are of one length: the time that it takes tells nothing.
        same = hmac.compare_digest(_digest(token.strip().encode("latin-1")), self._token)  # as it was sent
        return same and kind.lower() == "bearer"

    def _bounded(self, receive: Receive, body: _Body) -> Receive:
        """The same body, as long as it is small enough and comes fast enough."""
        limits, clock = self.limits, asyncio.get_running_loop()
        begun = clock.time()
        whole = False

        async def received() -> Message:
            nonlocal whole
            if whole:  # what comes now is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(begun + limits.body_seconds + body.size / limits.body_rate):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, _too_slow(body, limits), {"Connection": "close"}) from None
            if message["type"] == "http.request":
                came = len(message.get("body", b""))
                whole = not message.get("more_body", False)
                body.size += came
                self._bytes += came
                if body.size > body.most:
                    raise HTTPException(413, body.too_large, {"Connection": "close"})
                if self._bytes > max(limits.bodies, body.most):
                    told = "too much was sent at once; try again in 1 s"
                    raise HTTPException(503, told, {"Retry-After": "1", "Connection": "close"})
            return message

        return received


@dataclass
class _Body:
    """The largest that a body may be, and what has come of it."""

    most: int
    size: int = 0

    @property
    def too_large(self) -> str:
        return f"the request is too large; {self.most:,} bytes are taken at most"


def _too_slow(body: _Body, limits: Limits) -> str:
    return (
        f"the request was not there after {limits.body_seconds:g} s; it may take longer only at "
        f"{limits.body_rate:,} bytes a second or more, and {body.size:,} bytes came"
    )


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
