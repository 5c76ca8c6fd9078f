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

from jumok.serve import web_page
from jumok.serve.admission import AdmissionControl
from jumok.serve.batcher import OverloadedError, ServerClosingError
from jumok.serve.responses import build_error_response, build_overload_response
from jumok.tasks.api import RequestLimits

__all__ = ["RequestGuard", "ServerLimits"]

PROBE_PATHS = ("/health", "/ready")  # for whoever keeps the server running: always answered
ATTENTION_PAGE_PREFIX = "/look/"
MAX_OTHER_BODY_BYTES = 1 << 16  # bytes of a request to a path that is no task's
MAX_DISCARDED_BYTES = 64 << 20  # bytes of a refused body that are read and discarded at most
PUBLIC_PATHS = (*PROBE_PATHS, *web_page.PAGE_PATHS)  # without a token: our own files hold nothing


@dataclass(frozen=True)
class ServerLimits:
    """All limits of a server."""

    max_body_bytes: int | None = None  # bytes of a request; None: as many as the largest of its task has
    max_total_body_bytes: int = 128 << 20  # bytes of all requests at the same time
    body_timeout: float = 10.0  # until all of it is there, and longer by
    min_body_rate: int = 1 << 16  # a second for so many bytes that came
    request_limits: RequestLimits = field(default_factory=RequestLimits)  # what one request may ask for
    max_queue_tokens: int = 1 << 16  # tokens that each model holds: those that wait, and those in work
    max_batch_tokens: int = 1 << 12  # tokens of a batch
    max_batch_delay: float = 0.004  # seconds that a request waits for others to go with
    request_timeout: float = 60.0  # until an answer
    max_attention_tokens: int = 2048  # tokens of what is looked at
    max_attention_pages: int = 8  # that are kept
    attention_page_lifetime: float = 900.0  # so long
    max_requests: int = 1024  # that are answered at the same time
    max_attention_requests: int = 128  # for tiles of maps, which are not counted among those
    max_connections: int = 4096  # less where the system allows fewer open files
    shutdown_timeout: float = 30.0  # seconds to finish what was taken, when the server goes down


class RequestGuard:
    """Stands before an app; ``auth_token`` None lets everybody in."""

    def __init__(
        self, app: ASGIApp, limits: ServerLimits, admission: AdmissionControl, auth_token: str | None = None
    ) -> None:
        self.app, self.limits, self.admission = app, limits, admission
        self._token_digest = None if auth_token is None else _hash_token(auth_token.strip().encode())
        self._num_attention_requests = 0  # requests for maps that are being answered
        self._total_body_bytes = 0  # of all bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        if not self._is_authorized(path, headers):
            answer = build_error_response(
                401, "a token is needed: Authorization: Bearer …", **{"WWW-Authenticate": "Bearer"}
            )
            await answer(scope, receive, send)
            return
        route = self.admission.routes.get(path)
        body = _BodyProgress(MAX_OTHER_BODY_BYTES if route is None else route.max_body_bytes)
        announced = headers.get("content-length", "0")
        length = int(announced) if announced.isdecimal() and len(announced) <= 18 else 1 << 60
        if length > body.max_bytes:
            # The body is read and discarded, so that the client gets this answer; unless it is far too large.
            closing = {} if length <= MAX_DISCARDED_BYTES else {"Connection": "close"}
            await build_error_response(413, body.too_large_message, **closing)(scope, receive, send)
            return
        look = path.startswith(ATTENTION_PAGE_PREFIX)
        try:
            self._check_capacity(path, is_attention_page=look)
        except (OverloadedError, ServerClosingError) as error:
            await build_overload_response(error)(
                scope, receive, send
            )  # the rest of the body is read and discarded
            return
        self._add_to_count(1, is_attention_page=look)
        try:
            await self.app(scope, self._limit_body(receive, body), send)
        finally:
            self._add_to_count(-1, is_attention_page=look)
            self._total_body_bytes -= body.num_received

    def _check_capacity(self, path: str, *, is_attention_page: bool) -> None:
        if is_attention_page and self._num_attention_requests >= self.limits.max_attention_requests:
            raise OverloadedError(1)
        if not is_attention_page and path not in PROBE_PATHS:
            self.admission.check_capacity(path)

    def _add_to_count(self, change: int, *, is_attention_page: bool) -> None:
        if is_attention_page:
            self._num_attention_requests += change
        else:
            self.admission.num_running += change

    def _is_authorized(self, path: str, headers: Headers) -> bool:
        if (
            self._token_digest is None or path in PUBLIC_PATHS or path.startswith(ATTENTION_PAGE_PREFIX)
        ):  # whose names cannot be guessed
            return True
        kind, _, token = headers.get("authorization", "").partition(" ")
        # Of digests, which are of one length: the time that it takes tells nothing.
        same = hmac.compare_digest(
            _hash_token(token.strip().encode("latin-1")), self._token_digest
        )  # as it was sent
        return same and kind.lower() == "bearer"

    def _limit_body(self, receive: Receive, body: _BodyProgress) -> Receive:
        """The same body, as long as it is small enough and comes fast enough."""
        limits, clock = self.limits, asyncio.get_running_loop()
        begun = clock.time()
        whole = False

        async def received() -> Message:
            nonlocal whole
            if whole:  # what comes now is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(
                    begun + limits.body_timeout + body.num_received / limits.min_body_rate
                ):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, _format_slow_body_message(body, limits), {"Connection": "close"}
                ) from None
            if message["type"] == "http.request":
                came = len(message.get("body", b""))
                whole = not message.get("more_body", False)
                body.num_received += came
                self._total_body_bytes += came
                if body.num_received > body.max_bytes:
                    raise HTTPException(413, body.too_large_message, {"Connection": "close"})
                if self._total_body_bytes > max(limits.max_total_body_bytes, body.max_bytes):
                    told = "too much was sent at once; try again in 1 s"
                    raise HTTPException(503, told, {"Retry-After": "1", "Connection": "close"})
            return message

        return received


@dataclass
class _BodyProgress:
    """The largest that a body may be, and what has come of it."""

    max_bytes: int
    num_received: int = 0

    @property
    def too_large_message(self) -> str:
        return f"the request is too large; {self.max_bytes:,} bytes are taken at most"


def _format_slow_body_message(body: _BodyProgress, limits: ServerLimits) -> str:
    return (
        f"the request was not there after {limits.body_timeout:g} s; it may take longer only at "
        f"{limits.min_body_rate:,} bytes a second or more, and {body.num_received:,} bytes came"
    )


def _hash_token(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
