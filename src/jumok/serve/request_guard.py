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
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jumok.serve import web_page
from jumok.serve.admission import AdmissionControl
from jumok.serve.errors import OverloadedError, ServerClosingError
from jumok.serve.limits import ServerLimits
from jumok.serve.responses import build_error_response, build_overload_response

PROBE_PATHS = ("/health", "/ready")  # for monitoring; always answered
ATTENTION_PAGE_PREFIX = "/look/"
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
        self._num_attention_requests = 0
        self._total_body_bytes = 0  # of all running requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        if not self._is_authorized(path, headers):
            response = build_error_response(
                401, "a bearer token is required: Authorization: Bearer …", **{"WWW-Authenticate": "Bearer"}
            )
            await response(scope, receive, send)
            return
        route = self.admission.routes.get(path)
        body = _BodyProgress(MAX_OTHER_BODY_BYTES if route is None else route.max_body_bytes)
        content_length = headers.get("content-length", "0")
        length = int(content_length) if content_length.isdecimal() and len(content_length) <= 18 else 1 << 60
        if length > body.max_bytes:
            # uvicorn reads and discards the body, so that the client receives this response. If the body is
            # far too large, the connection is closed instead.
            closing = {} if length <= MAX_DISCARDED_BYTES else {"Connection": "close"}
            await build_error_response(413, body.too_large_message, **closing)(scope, receive, send)
            return
        is_attention_page = path.startswith(ATTENTION_PAGE_PREFIX)
        try:
            self._check_capacity(path, is_attention_page=is_attention_page)
        except (OverloadedError, ServerClosingError) as error:
            await build_overload_response(error)(scope, receive, send)
            return
        self._add_to_count(1, is_attention_page=is_attention_page)
        try:
            await self.app(scope, self._limit_body(receive, body), send)
        finally:
            self._add_to_count(-1, is_attention_page=is_attention_page)
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
        if self._token_digest is None or path in PUBLIC_PATHS:
            return True
        if path.startswith(ATTENTION_PAGE_PREFIX):  # the names of attention pages cannot be guessed
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Digests have equal lengths, so the time of the comparison reveals nothing about the token.
        digest = _hash_token(token.strip().encode("latin-1"))  # the bytes that were sent
        return hmac.compare_digest(digest, self._token_digest) and scheme.lower() == "bearer"

    def _limit_body(self, receive: Receive, body: _BodyProgress) -> Receive:
        """Wrap ``receive`` with the limits on the size and the speed of a body."""
        limits, clock = self.limits, asyncio.get_running_loop()
        start_time = clock.time()
        is_complete = False

        async def receive_limited() -> Message:
            nonlocal is_complete
            if is_complete:  # the only further message is that the client disconnects
                return await receive()
            deadline = start_time + limits.body_timeout + body.num_received / limits.min_body_rate
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, _format_slow_body_message(body, limits), {"Connection": "close"}) from None
            if message["type"] == "http.request":
                num_bytes = len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                body.num_received += num_bytes
                self._total_body_bytes += num_bytes
                if body.num_received > body.max_bytes:
                    raise HTTPException(413, body.too_large_message, {"Connection": "close"})
                if self._total_body_bytes > max(limits.max_total_body_bytes, body.max_bytes):
                    reason = "too many bytes are being sent at the same time; try again in 1 s"
                    raise HTTPException(503, reason, {"Retry-After": "1", "Connection": "close"})
            return message

        return receive_limited


@dataclass
class _BodyProgress:
    """The maximum size of a body, and how much of it has been received."""

    max_bytes: int
    num_received: int = 0

    @property
    def too_large_message(self) -> str:
        return f"the request is too large; the maximum is {self.max_bytes:,} bytes"


def _format_slow_body_message(body: _BodyProgress, limits: ServerLimits) -> str:
    return (
        f"the request body was not complete after {limits.body_timeout:g} s; a longer body must arrive at "
        f"{limits.min_body_rate:,} bytes per second or faster, and {body.num_received:,} bytes were received"
    )


def _hash_token(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
