"""What all responses share: errors are JSON, and browsers neither guess media types nor store responses."""

from __future__ import annotations

import asyncio
import json

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jumok.serve.errors import ServerClosingError

JSON_MEDIA_TYPE = "application/json"
SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def build_error_response(error: HTTPException) -> JSONResponse:
    """Build the JSON response of an error: ``{"error": message}``."""
    message = error.detail.encode(errors="replace").decode()
    return JSONResponse({"error": message}, error.status_code, {**SECURITY_HEADERS, **(error.headers or {})})


def format_event(name: str, data: str) -> str:
    """Format a server-sent event."""
    return f"event: {name}\ndata: {data}\n\n"


def format_error_event(message: str) -> str:
    """Format the event that ends a stream with an error."""
    return format_event("error", json.dumps({"error": message}, ensure_ascii=False))


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
        sent_headers: MutableHeaders | None = None
        plain_error: HTTPException | None = None  # whose message is the body, which is not sent yet

        async def send_uniform(message: Message) -> None:
            nonlocal sent_headers, plain_error
            if plain_error is not None:
                error, plain_error = plain_error, None
                error.detail = message.get("body", b"").decode(errors="replace")
                await build_error_response(error)(scope, receive, send_uniform)
                return
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if message["status"] >= 400 and headers.get("content-type", "").startswith("text/plain"):
                    del headers["content-type"], headers["content-length"]
                    plain_error = HTTPException(message["status"], headers=headers)
                    return
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                sent_headers = headers
            await send(message)

        try:
            await self.app(scope, receive, send_uniform)
        except asyncio.CancelledError:
            error = ServerClosingError()
            if sent_headers is None:
                await build_error_response(error)(scope, receive, send)
            elif sent_headers.get("content-type", "").startswith("text/event-stream"):
                await send({"type": "http.response.body", "body": format_error_event(error.detail).encode()})
            else:
                raise
