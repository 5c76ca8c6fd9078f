"""The first check of every request, before it is parsed: authorization, size, speed and number.

- **Authorization**: if a token is set, every request must send it, except those to public paths.
- **Size**: a body whose Content-Length is too large is rejected before it is read, any other body as soon as
  it is too large.
- **Speed**: a body that arrives below a minimum rate is rejected with 408. (Connections that do not send a
  request head in time, or do not read their response, are closed: see :mod:`.http_protocol`.)
- **Number**: if the server is overloaded, a request is rejected before its body is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jumok.serve import web_page
from jumok.serve.admission import ATTENTION_PAGE_PREFIX, PROBE_PATHS, AdmissionControl
from jumok.serve.limits import ServerLimits
from jumok.serve.responses import build_error_response

MAX_OTHER_BODY_BYTES = 1 << 16  # of a request to a path that belongs to no task
MAX_DISCARDED_BYTES = 64 << 20  # of a rejected body that the server still reads
PUBLIC_PATHS = (*PROBE_PATHS, *web_page.PAGE_PATHS)  # need no token, because they contain no data


class RequestGuard:
    """ASGI middleware that rejects requests. ``auth_token`` None disables authorization."""

    def __init__(
        self, app: ASGIApp, limits: ServerLimits, admission: AdmissionControl, auth_token: str | None = None
    ) -> None:
        self.app, self.limits, self.admission = app, limits, admission
        self._token_digest = None if auth_token is None else _hash_token(auth_token.strip().encode())
        self.total_body_bytes = 0  # received, of all running requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        route = self.admission.routes.get(path)
        body = _LimitedBody(receive, self, MAX_OTHER_BODY_BYTES if route is None else route.max_body_bytes)
        try:
            self._check_authorization(path, headers)
            body.check_content_length(headers.get("content-length", "0"))
            self.admission.check_capacity(path)
        except HTTPException as error:
            await build_error_response(error)(scope, receive, send)
            return
        with self.admission.track_request(path):
            try:
                await self.app(scope, body.receive, send)
            finally:
                self.total_body_bytes -= body.num_received

    def _check_authorization(self, path: str, headers: Headers) -> None:
        if self._token_digest is None or path in PUBLIC_PATHS:
            return
        if path.startswith(ATTENTION_PAGE_PREFIX):  # the names of attention pages cannot be guessed
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Digests have equal lengths, so the time of the comparison reveals nothing about the token.
        digest = _hash_token(token.strip().encode("latin-1"))  # the bytes that were sent
        if not (hmac.compare_digest(digest, self._token_digest) and scheme.lower() == "bearer"):
            message = "a bearer token is required: Authorization: Bearer …"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})


class _LimitedBody:
    """The body of a request, with limits on its size and speed."""

    def __init__(self, receive: Receive, guard: RequestGuard, max_bytes: int) -> None:
        self._receive, self._guard, self._limits, self.max_bytes = receive, guard, guard.limits, max_bytes
        self._start_time = asyncio.get_running_loop().time()
        self._is_complete = False
        self.num_received = 0

    def check_content_length(self, content_length: str) -> None:
        """Reject a body that is too large before it is read."""
        length = int(content_length) if content_length.isdecimal() and len(content_length) <= 18 else 1 << 60
        if length > self.max_bytes:
            # uvicorn reads and discards the body, so that the client receives this response. If the body is
            # far too large, the connection is closed instead.
            raise self._build_size_error({} if length <= MAX_DISCARDED_BYTES else {"Connection": "close"})

    async def receive(self) -> Message:
        """Receive the next part of the body."""
        if self._is_complete:  # the only further message is that the client disconnects
            return await self._receive()
        limits = self._limits
        deadline = self._start_time + limits.body_timeout + self.num_received / limits.min_body_rate
        try:
            async with asyncio.timeout_at(deadline):
                message = await self._receive()
        except TimeoutError:
            reason = (
                f"the request body was not complete after {limits.body_timeout:g} s; a longer body must arrive at "
                f"{limits.min_body_rate:,} bytes per second or faster, and {self.num_received:,} bytes were received"
            )
            raise HTTPException(408, reason, {"Connection": "close"}) from None
        if message["type"] == "http.request":
            num_bytes = len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
            self.num_received += num_bytes
            self._guard.total_body_bytes += num_bytes
            if self.num_received > self.max_bytes:
                raise self._build_size_error({"Connection": "close"})
            if self._guard.total_body_bytes > max(limits.max_total_body_bytes, self.max_bytes):
                reason = "too many bytes are being sent at the same time; try again in 1 s"
                raise HTTPException(503, reason, {"Retry-After": "1", "Connection": "close"})
        return message

    def _build_size_error(self, headers: dict[str, str]) -> HTTPException:
        return HTTPException(413, f"the request is too large; the maximum is {self.max_bytes:,} bytes", headers)


def _hash_token(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
