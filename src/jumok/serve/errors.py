"""Reasons why a request is rejected, as HTTP errors with a status, a message and headers."""

from __future__ import annotations

from starlette.exceptions import HTTPException

CLIENT_CLOSED_REQUEST = 499  # status of a request whose client disconnected before the response


class OverloadedError(HTTPException):
    """The queue is full. ``retry_after`` is the number of seconds after which there may be room."""

    def __init__(self, retry_after: int) -> None:
        message = f"the queue is full; try again in {retry_after} s"
        super().__init__(503, message, {"Retry-After": str(retry_after)})


class ServerClosingError(HTTPException):
    """The server is shutting down and accepts no more requests."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down", {"Retry-After": "1", "Connection": "close"})


class RequestTimeoutError(HTTPException):
    """A request timed out, either in the queue (503) or after its computation ``has_started`` (504)."""

    def __init__(self, timeout: float, retry_after: int, *, has_started: bool) -> None:
        state = "being computed" if has_started else "in the queue"
        message = f"timed out after {timeout:g} s while the request was {state}"
        if has_started:
            super().__init__(504, message)
        else:
            super().__init__(503, message, {"Retry-After": str(retry_after)})


class ClientDisconnectedError(HTTPException):
    """The client closed the connection. Nobody receives the response; its status is for the metrics."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED_REQUEST, "the client closed the connection")
