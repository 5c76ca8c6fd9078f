"""What all responses have in common: refusals are JSON, and no browser guesses types or stores answers."""

from __future__ import annotations

import asyncio
import json

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jumok.serve.batcher import OverloadedError, ServerClosingError

__all__ = ["SECURITY_HEADERS", "ResponseMiddleware", "build_error_response", "build_overload_response"]

SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
SHUTDOWN_MESSAGE = "the server is shutting down"


def build_error_response(status: int, message: str, **headers: str) -> JSONResponse:
    """What every refusal looks like: ``{"message": …}``."""
    return JSONResponse(
        {"error": message.encode(errors="replace").decode()}, status, {**SECURITY_HEADERS, **headers}
    )


def build_overload_response(error: OverloadedError | ServerClosingError) -> JSONResponse:
    """The refusal of a request that there is no room for."""
    if isinstance(error, OverloadedError):
        return build_error_response(503, str(error), **{"Retry-After": str(error.retry_after)})
    return build_error_response(503, str(error), **{"Retry-After": "1", "Connection": "close"})


class ResponseMiddleware:
    """Stands before an app and everything else that may answer for it.

    - HEAD is answered as GET is. The server leaves the body out.
    - Headers that keep browsers from guessing types and storing answers are added where they are missing.
    - Refusals in plain text, as the framework writes them, become JSON.
    - Requests that the server cancels at the end of its shutdown get 503, or an event that says so.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        started: Message | None = None
        plain: Message | None = None  # the start of a refusal in plain text, until its body comes

        async def send_uniform(message: Message) -> None:
            nonlocal started, plain
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if message["status"] >= 400 and headers.get("content-type", "").startswith("text/plain"):
                    plain = message
                    return
                started = message
            elif plain is not None:
                message, begin = _convert_to_json(message, plain)
                started, plain = begin, None
                await send(begin)
            await send(message)

        try:
            await self.app(scope, receive, send_uniform)
        except asyncio.CancelledError:
            if started is None:
                refusal = build_error_response(
                    503, SHUTDOWN_MESSAGE, **{"Retry-After": "1", "Connection": "close"}
                )
                await refusal(scope, receive, send)
            elif MutableHeaders(scope=started).get("content-type", "").startswith("text/event-stream"):
                event = f"event: error\ndata: {json.dumps({'error': SHUTDOWN_MESSAGE})}\n\n"
                await send({"type": "http.response.body", "body": event.encode()})
            else:
                raise


def _convert_to_json(body: Message, start: Message) -> tuple[Message, Message]:
    """A refusal in plain text as JSON: its body and its start."""
    response = build_error_response(start["status"], body.get("body", b"").decode(errors="replace"))
    headers = MutableHeaders(scope=start)
    for name in ("content-type", "content-length"):
        headers[name] = response.headers[name]
    return {**body, "body": response.body}, start
