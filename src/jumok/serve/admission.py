"""Admission control: whether there is room for a request, decided by its path alone, before its body is read.

An overloaded server must spend almost no time on the requests that it refuses, because the event loop and the
models share one interpreter. So a full queue is detected here, and not after parsing and tokenizing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jumok.serve.batcher import Batcher, OverloadedError, ServerClosingError

__all__ = ["AdmissionControl", "TaskRoute"]


@dataclass(frozen=True)
class TaskRoute:
    """What is known of a task's path: the largest body, and the queues of the models that may answer."""

    max_body_bytes: int
    batchers: Sequence[Batcher]


class AdmissionControl:
    """Counts the requests in progress, and refuses those beyond the limits."""

    def __init__(
        self,
        routes: Mapping[str, TaskRoute],
        max_requests: int,
        is_estimator_full: Callable[[], bool],
        count_refusal: Callable[[str], None],
    ) -> None:
        self.routes, self.max_requests = routes, max_requests
        self.num_running = 0
        self._is_estimator_full = is_estimator_full  # whether too many requests wait to be measured
        self._count_refusal = count_refusal
        self._batchers = [queue for route in routes.values() for queue in route.batchers]

    def check_capacity(self, path: str) -> None:
        """Raise Overloaded or Closed if a request to this path cannot be taken now."""
        route = self.routes.get(path)
        queues = self._batchers if route is None else route.batchers
        if self.num_running >= self.max_requests:
            raise OverloadedError(min(queue.estimate_retry_after() for queue in queues))
        if route is None:
            return
        if self._is_estimator_full():
            raise OverloadedError(min(queue.estimate_retry_after() for queue in queues))
        refusal: OverloadedError | ServerClosingError | None = None
        for queue in queues:  # the body names the model
            try:
                queue.check_capacity()
            except (OverloadedError, ServerClosingError) as error:
                refusal = error
            else:
                return
        if refusal is not None:
            raise refusal

    def count_refusal(self, path: str) -> None:
        """For the metrics: a request was refused without having been routed."""
        self._count_refusal(path if path in self.routes else "none")
