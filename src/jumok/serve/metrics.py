"""What is counted and timed, for Prometheus. Each app has a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["MetricsMiddleware", "ServerMetrics"]

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CLIENT_CLOSED_REQUEST = 499  # the client closed the connection before it had its answer


class ServerMetrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "jumok_requests", "Requests answered.", ["path", "status"], registry=self.registry
        )
        self.request_duration = Histogram(
            "jumok_request_seconds",
            "From the head of a request to the end of its answer.",
            ["path"],
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self.batch_size = Histogram(
            "jumok_batch_requests",
            "Requests answered together; its count is that of batches.",
            ["model"],
            buckets=BATCH_SIZE_BUCKETS,
            registry=self.registry,
        )
        self.batch_duration = Histogram(
            "jumok_batch_seconds",
            "Work on a batch.",
            ["model"],
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self.processed_tokens = Counter("jumok_tokens", "Tokens computed.", ["model"], registry=self.registry)
        self._pending_tokens = Gauge("jumok_queue_tokens", "Tokens held.", ["model"], registry=self.registry)
        self._queued_requests = Gauge(
            "jumok_queue_requests", "Requests in the queue.", ["model"], registry=self.registry
        )

    def build_batch_callback(self, model: str) -> Callable[[int, int, float], None]:
        """What a model's batcher calls after every batch."""

        def computed(requests: int, tokens: int, seconds: float) -> None:
            self.batch_size.labels(model).observe(requests)
            self.batch_duration.labels(model).observe(seconds)
            self.processed_tokens.labels(model).inc(tokens)

        return computed

    def count_refusal(self, path: str) -> None:
        """Count a request that was refused before it was routed, because the server is overloaded."""
        self.http_requests.labels(path, "503").inc()

    def track_queue(
        self, model: str, pending_tokens: Callable[[], float], num_queued: Callable[[], float]
    ) -> None:
        """Tell what a model's queue holds whenever it is asked for."""
        self._pending_tokens.labels(model).set_function(pending_tokens)
        self._queued_requests.labels(model).set_function(num_queued)


class MetricsMiddleware:
    """Counts and times every request by its route, those to other paths than ``known_paths`` together."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, known_paths: Collection[str]) -> None:
        self.app, self.metrics, self.known_paths = app, metrics, known_paths

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
            path = _find_route_label(scope, self.known_paths)
            self.metrics.http_requests.labels(path, str(status)).inc()
            self.metrics.request_duration.labels(path).observe(time.perf_counter() - begun)


def _find_route_label(scope: Scope, known_paths: Collection[str]) -> str:
    """Of few: what comes from requests alone would be a series each."""
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    if scope["path"] in known_paths:  # refused before it was routed
        return str(scope["path"])
    return "/look" if scope["path"].startswith("/look/") else "none"
