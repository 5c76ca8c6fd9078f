"""Request bodies: checked for their size, parsed, and validated by the schema of their task.

The cost of each step is bounded before it starts. Parsing creates one object for each item and validation may
create one error for each, so the items are first counted in the raw bytes, which takes microseconds. Small
bodies are parsed on the event loop, larger ones in a thread.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Executor
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from jumok.serve.errors import ClientDisconnectedError
from jumok.serve.responses import JSON_MEDIA_TYPE
from jumok.tasks.api import RequestLimits, RequestTooLarge, TaskRequest

MAX_ERRORS_SHOWN = 5  # per request
MAX_INLINE_PARSE_BYTES = 1 << 14  # larger bodies are not parsed on the event loop

RequestT = TypeVar("RequestT", bound=TaskRequest)


async def read_request(request: Request, schema: type[RequestT], limits: RequestLimits, executor: Executor) -> RequestT:
    """Read and parse the body of a request."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = media_type == JSON_MEDIA_TYPE or (media_type.startswith("application/") and media_type.endswith("+json"))
    if not is_json and media_type not in schema.body_media_types:
        expected = " or ".join((JSON_MEDIA_TYPE, *schema.body_media_types))
        raise HTTPException(415, f"Content-Type is {media_type[:80] or 'missing'}; expected {expected}")
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    if not body:
        raise HTTPException(422, "the request body is empty")
    if not is_json:
        return _validate_payload(body, schema)
    if len(body) <= MAX_INLINE_PARSE_BYTES:
        return parse_request(body, schema, limits)
    return await asyncio.get_running_loop().run_in_executor(executor, parse_request, body, schema, limits)


def parse_request(body: bytes, schema: type[RequestT], limits: RequestLimits) -> RequestT:
    """Parse a JSON body. Raises HTTPException or RequestTooLarge if it is not valid."""
    num_items, max_items = sum(map(body.count, (b",", b"[", b"{"))), schema.max_items(limits)
    if num_items > max_items:
        raise RequestTooLarge(f"the request has {num_items:,} commas and brackets; the maximum is {max_items:,}")
    try:
        payload = json.loads(body)
    except json.JSONDecodeError as error:
        raise HTTPException(400, f"the request is not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # bytes that are not UTF-8, huge numbers, deep nesting
        raise HTTPException(400, "the request is not JSON that this server can read") from None
    num_keys = len(payload) if isinstance(payload, dict) else 0
    if num_keys > len(schema.model_fields) + MAX_ERRORS_SHOWN:  # validation would report each of them
        names = ", ".join(schema.model_fields)
        raise HTTPException(422, f"the request has {num_keys:,} keys; the known keys are: {names}")
    return _validate_payload(payload, schema)


def _validate_payload(payload: object, schema: type[RequestT]) -> RequestT:
    try:
        return schema.model_validate(payload)
    except ValidationError as error:
        shown = error.errors(include_url=False, include_context=False, include_input=False)[:MAX_ERRORS_SHOWN]
        raise HTTPException(422, "; ".join(map(_format_validation_error, shown))) from None


def _format_validation_error(error: Any) -> str:
    """Format one validation error without the input, which could be large."""
    field = ".".join(str(part)[:80] for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message
