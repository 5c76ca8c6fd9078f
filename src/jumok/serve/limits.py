"""The limits of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from jumok.tasks.api import RequestLimits


@dataclass(frozen=True)
class ServerLimits:
    """All limits of a server. Times are in seconds."""

    max_body_bytes: int | None = None  # of a request; None: what the largest request of its task needs
    max_total_body_bytes: int = 128 << 20  # of all requests that are being received
    body_timeout: float = 10.0  # to receive a body, plus the time that it takes at min_body_rate
    min_body_rate: int = 1 << 16  # bytes per second
    request_limits: RequestLimits = field(default_factory=RequestLimits)
    max_queue_tokens: int = 1 << 16  # pending tokens of each model, queued and running
    max_batch_tokens: int = 1 << 12  # including padding
    max_batch_delay: float = 0.004  # that a request waits for a batch to fill
    request_timeout: float = 60.0
    max_attention_tokens: int = 2048  # of a request to /attend/…
    max_attention_pages: int = 8
    attention_page_lifetime: float = 900.0
    max_requests: int = 1024  # running at the same time, without those to attention pages
    max_attention_requests: int = 128  # to attention pages, running at the same time
    max_connections: int = 4096  # lowered if the system allows fewer open files
    shutdown_timeout: float = 30.0  # to finish running requests at shutdown
