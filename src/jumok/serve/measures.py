"""What is counted and timed, for Prometheus. Each app has a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Counted", "Measures"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LEFT = 499  # the client closed the connection before it had its answer


class Measures:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "jumok_requests", "Requests answered.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "jumok_request_seconds",
            "From the head of a request to the end of its answer.",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.batch = Histogram(
            "jumok_batch_requests",
            "Requests answered together; its count is that of batches.",
            ["model"],
            buckets=REQUESTS,
            registry=self.registry,
        )
        self.batch_seconds = Histogram(
            "jumok_batch_seconds", "Work on a batch.", ["model"], buckets=SECONDS, registry=self.registry
        )
        self.tokens = Counter("jumok_tokens", "Tokens computed.", ["model"], registry=self.registry)
        self._held = Gauge("jumok_queue_tokens", "Tokens held.", ["model"], registry=self.registry)
        self._waiting = Gauge(
            "jumok_queue_requests", "Requests in the queue.", ["model"], registry=self.registry
        )

    def computed(self, model: str) -> Callable[[int, int, float], None]:
        """What a model's batcher calls after every batch."""

        def computed(requests: int, tokens: int, seconds: float) -> None:
            self.batch.labels(model).observe(requests)
            self.batch_seconds.labels(model).observe(seconds)
            self.tokens.labels(model).inc(tokens)

        return computed

    def count_refusal(self, path: str) -> None:
        """Count a request that was refused before it was routed, because the server is overloaded."""
        self.requests.labels(path, "503").inc()

    def watch(self, model: str, held: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Tell what a model's queue holds whenever it is asked for."""
        self._held.labels(model).set_function(held)
        self._waiting.labels(model).set_function(waiting)


class Counted:
    """Counts and times every request by its route, those to other paths than ``paths`` together."""

    def __init__(self, app: ASGIApp, measures: Measures, paths: Collection[str]) -> None:
        self.app, self.measures, self.paths = app, measures, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 500

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, sent)
        finally:
            path = _path(scope, self.paths)
            self.measures.requests.labels(path, str(status)).inc()
            self.measures.seconds.labels(path).observe(time.perf_counter() - begun)


def _path(scope: Scope, paths: Collection[str]) -> str:
    """Of few: what comes from requests alone would be a series each."""
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    if scope["path"] in paths:  # refused before it was routed
        return str(scope["path"])
    return "/look" if scope["path"].startswith("/look/") else "none"
