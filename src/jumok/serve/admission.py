"""Admission control: decides from the path alone whether the server has room for a request.

An overloaded server must spend almost no time on the requests that it rejects, because the event loop and the
models share one interpreter. A full queue is therefore detected here, before the body is read, parsed and
tokenized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jumok.serve.batcher import Batcher
from jumok.serve.errors import OverloadedError, ServerClosingError
from jumok.serve.limits import ServerLimits

PROBE_PATHS = ("/health", "/ready")  # for monitoring; always answered
ATTENTION_PAGE_PREFIX = "/look/"
OTHER_PATHS_LABEL = "other"  # label of all unknown paths in the metrics


@dataclass(frozen=True)
class TaskRoute:
    """A path of a task: the maximum size of a request body, and the batchers of the models of the task."""

    max_body_bytes: int
    batchers: Sequence[Batcher]


class AdmissionControl:
    """Counts the running requests and rejects those beyond the limits."""

    def __init__(
        self,
        routes: Mapping[str, TaskRoute],
        limits: ServerLimits,
        is_estimator_full: Callable[[], bool],
        count_refusal: Callable[[str], None],
    ) -> None:
        self.routes, self.limits = routes, limits
        self.num_running, self.num_attention_requests = 0, 0  # requests to attention pages have their own limit
        self._is_estimator_full = is_estimator_full  # whether too many requests wait to be tokenized
        self._count_refusal = count_refusal
        self._batchers = [batcher for route in routes.values() for batcher in route.batchers]

    def check_capacity(self, path: str) -> None:
        """Raise OverloadedError or ServerClosingError if a request to this path cannot be accepted now."""
        if path in PROBE_PATHS:
            return
        if path.startswith(ATTENTION_PAGE_PREFIX):
            if self.num_attention_requests >= self.limits.max_attention_requests:
                raise OverloadedError(1)
            return
        route = self.routes.get(path)
        batchers = self._batchers if route is None else route.batchers
        if self.num_running >= self.limits.max_requests or (route is not None and self._is_estimator_full()):
            raise OverloadedError(min(batcher.estimate_retry_after() for batcher in batchers))
        if route is None:
            return
        refusal: OverloadedError | ServerClosingError | None = None
        for batcher in batchers:  # the body, which is not read yet, selects the model
            try:
                batcher.check_capacity()
            except (OverloadedError, ServerClosingError) as error:
                refusal = error
            else:
                return
        if refusal is not None:
            raise refusal

    @contextlib.contextmanager
    def track_request(self, path: str) -> Iterator[None]:
        """Count a request as running."""
        is_attention_page = path.startswith(ATTENTION_PAGE_PREFIX)
        self.num_running += not is_attention_page
        self.num_attention_requests += is_attention_page
        try:
            yield
        finally:
            self.num_running -= not is_attention_page
            self.num_attention_requests -= is_attention_page

    def count_refusal(self, path: str) -> None:
        """Count a request that was rejected before it was routed."""
        self._count_refusal(path if path in self.routes else OTHER_PATHS_LABEL)
