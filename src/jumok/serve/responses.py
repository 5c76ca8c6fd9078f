"""What all responses share: errors are JSON, and browsers neither guess media types nor store responses."""

from __future__ import annotations

import asyncio
import json

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jumok.serve.errors import SHUTDOWN_MESSAGE, OverloadedError, RequestTimeoutError, ServerClosingError

JSON_MEDIA_TYPE = "application/json"
SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
SHUTDOWN_HEADERS = {"Retry-After": "1", "Connection": "close"}


def build_error_response(status: int, message: str, **headers: str) -> JSONResponse:
    """Build the JSON response of an error: ``{"error": message}``."""
    return JSONResponse({"error": message.encode(errors="replace").decode()}, status, {**SECURITY_HEADERS, **headers})


def build_overload_response(error: OverloadedError | RequestTimeoutError | ServerClosingError) -> JSONResponse:
    """Build the 503 response to a request that the server has no room for now."""
    if isinstance(error, ServerClosingError):
        return build_error_response(503, str(error), **SHUTDOWN_HEADERS)
    return build_error_response(503, str(error), **{"Retry-After": str(error.retry_after)})


class ResponseMiddleware:
    """The outermost ASGI middleware, which makes all responses uniform.

    - A HEAD request is handled as a GET request. The server omits the body.
    - Headers that keep browsers from guessing media types and storing responses are added if missing.
    - Plain text errors of the framework become JSON.
    - Requests that the server cancels at the end of its shutdown get status 503, or an ``error`` event.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        sent_start: Message | None = None
        plain_start: Message | None = None  # of a plain text error, until its body is sent

        async def send_uniform(message: Message) -> None:
            nonlocal sent_start, plain_start
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if message["status"] >= 400 and headers.get("content-type", "").startswith("text/plain"):
                    plain_start = message
                    return
                sent_start = message
            elif plain_start is not None:
                message, start = _convert_to_json(message, plain_start)
                sent_start, plain_start = start, None
                await send(start)
            await send(message)

        try:
            await self.app(scope, receive, send_uniform)
        except asyncio.CancelledError:
            if sent_start is None:
                response = build_error_response(503, SHUTDOWN_MESSAGE, **SHUTDOWN_HEADERS)
                await response(scope, receive, send)
            elif MutableHeaders(scope=sent_start).get("content-type", "").startswith("text/event-stream"):
                event = f"event: error\ndata: {json.dumps({'error': SHUTDOWN_MESSAGE})}\n\n"
                await send({"type": "http.response.body", "body": event.encode()})
            else:
                raise


def _convert_to_json(body: Message, start: Message) -> tuple[Message, Message]:
    """Convert the body and the start of a plain text error to JSON."""
    response = build_error_response(start["status"], body.get("body", b"").decode(errors="replace"))
    headers = MutableHeaders(scope=start)
    for name in ("content-type", "content-length"):
        headers[name] = response.headers[name]
    return {**body, "body": response.body}, start
