"""Prometheus metrics of a server. Each app has its own registry."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jumok.serve.admission import ATTENTION_PAGE_PREFIX, OTHER_PATHS_LABEL

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.http_requests = counter("jumok_http_requests", "Number of HTTP requests.", ["path", "status"])
        self.request_duration = histogram(
            "jumok_http_request_duration_seconds",
            "Time from the request head to the end of the response.",
            ["path"],
            buckets=DURATION_BUCKETS,
        )
        self.batch_size = histogram(
            "jumok_batch_size", "Number of requests per batch.", ["model"], buckets=BATCH_SIZE_BUCKETS
        )
        self.batch_duration = histogram(
            "jumok_batch_duration_seconds", "Time to compute a batch.", ["model"], buckets=DURATION_BUCKETS
        )
        self.processed_tokens = counter("jumok_processed_tokens", "Number of tokens processed.", ["model"])
        self._pending_tokens = gauge(
            "jumok_pending_tokens", "Number of tokens in the queue and in progress.", ["model"]
        )
        self._queued_requests = gauge("jumok_queued_requests", "Number of requests in the queue.", ["model"])

    def build_batch_callback(self, model: str) -> Callable[[int, int, float], None]:
        """Build the function that the batcher of a model calls after every batch."""

        def record_batch(num_requests: int, num_tokens: int, seconds: float) -> None:
            self.batch_size.labels(model).observe(num_requests)
            self.batch_duration.labels(model).observe(seconds)
            self.processed_tokens.labels(model).inc(num_tokens)

        return record_batch

    def count_refusal(self, path: str) -> None:
        """Count a request that was rejected before it was routed, because the server is overloaded."""
        self.http_requests.labels(path, "503").inc()

    def track_queue(self, model: str, pending_tokens: Callable[[], float], num_queued: Callable[[], float]) -> None:
        """Read the state of a model's queue whenever the metrics are collected."""
        self._pending_tokens.labels(model).set_function(pending_tokens)
        self._queued_requests.labels(model).set_function(num_queued)


class MetricsMiddleware:
    """Counts and times all requests by route. Paths other than routes and ``known_paths`` share a label."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, known_paths: Collection[str]) -> None:
        self.app, self.metrics, self.known_paths = app, metrics, known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start_time, status = time.perf_counter(), 500

        async def send_and_record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_record_status)
        finally:
            path = _find_route_label(scope, self.known_paths)
            self.metrics.http_requests.labels(path, str(status)).inc()
            self.metrics.request_duration.labels(path).observe(time.perf_counter() - start_time)


def _find_route_label(scope: Scope, known_paths: Collection[str]) -> str:
    """Find the label of a request. The set of labels is finite: clients cannot create new time series."""
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    if scope["path"] in known_paths:  # rejected before it was routed
        return str(scope["path"])
    is_attention_page = scope["path"].startswith(ATTENTION_PAGE_PREFIX)
    return ATTENTION_PAGE_PREFIX.rstrip("/") if is_attention_page else OTHER_PATHS_LABEL
