"""Reasons why a request is not answered. :mod:`.app` turns each into an HTTP status."""

from __future__ import annotations

SHUTDOWN_MESSAGE = "the server is shutting down"


class OverloadedError(Exception):
    """The queue is full. ``retry_after`` is the number of seconds after which there may be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class ServerClosingError(Exception):
    """The server is shutting down and accepts no more requests."""

    def __init__(self) -> None:
        super().__init__(SHUTDOWN_MESSAGE)


class RequestTimeoutError(Exception):
    """A request timed out, either in the queue or after its computation ``has_started``."""

    def __init__(self, timeout: float, retry_after: int, *, has_started: bool) -> None:
        state = "being computed" if has_started else "in the queue"
        super().__init__(f"timed out after {timeout:g} s while the request was {state}")
        self.has_started, self.retry_after = has_started, retry_after


class ClientDisconnectedError(Exception):
    """The client closed the connection."""
