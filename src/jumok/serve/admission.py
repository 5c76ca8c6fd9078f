"""Admission control: decides from the path alone whether the server has room for a request.

An overloaded server must spend almost no time on the requests that it rejects, because the event loop and the
models share one interpreter. A full queue is therefore detected here, before the body is read, parsed and
tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jumok.serve.batcher import Batcher
from jumok.serve.errors import OverloadedError, ServerClosingError

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
        max_requests: int,
        is_estimator_full: Callable[[], bool],
        count_refusal: Callable[[str], None],
    ) -> None:
        self.routes, self.max_requests = routes, max_requests
        self.num_running = 0
        self._is_estimator_full = is_estimator_full  # whether too many requests wait to be tokenized
        self._count_refusal = count_refusal
        self._batchers = [batcher for route in routes.values() for batcher in route.batchers]

    def check_capacity(self, path: str) -> None:
        """Raise OverloadedError or ServerClosingError if a request to this path cannot be accepted now."""
        route = self.routes.get(path)
        batchers = self._batchers if route is None else route.batchers
        if self.num_running >= self.max_requests:
            raise OverloadedError(min(batcher.estimate_retry_after() for batcher in batchers))
        if route is None:
            return
        if self._is_estimator_full():
            raise OverloadedError(min(batcher.estimate_retry_after() for batcher in batchers))
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

    def count_refusal(self, path: str) -> None:
        """Count a request that was rejected before it was routed."""
        self._count_refusal(path if path in self.routes else OTHER_PATHS_LABEL)
