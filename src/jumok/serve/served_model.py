"""A served model: its service, its batcher, and the estimate of how much work a request is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from jumok.serve.batcher import Batcher, BatchJob
from jumok.serve.limits import ServerLimits
from jumok.serve.metrics import ServerMetrics
from jumok.tasks.api import RequestTooLarge, TaskRequest, TaskResponse, TaskService

MAX_WAITING_REQUESTS = 64  # large requests that wait to be tokenized
MAX_INLINE_TOKENIZATION_BYTES = 2048  # larger bodies are not tokenized on the event loop


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A service and the batcher whose thread runs it."""

    name: str
    service: TaskService[Any, Any]
    batcher: Batcher

    @classmethod
    def from_service(
        cls, name: str, service: TaskService[Any, Any], limits: ServerLimits, metrics: ServerMetrics
    ) -> ServedModel:
        """Create the batcher of a service, and record its metrics."""
        batcher = Batcher(
            max_batch_tokens=limits.max_batch_tokens,
            max_queue_tokens=limits.max_queue_tokens,
            max_delay=limits.max_batch_delay,
            on_batch=metrics.build_batch_callback(name),
            name=f"model {name}",
        )
        metrics.track_queue(name, lambda: batcher.pending_tokens, lambda: batcher.num_queued)
        return cls(name, service, batcher)

    def predict(self, jobs: Sequence[BatchJob]) -> Sequence[Any]:
        """Compute the responses of a batch. The batcher calls this."""
        return self.service.predict([job.payload for job in jobs], _BatchListener(jobs, self.batcher))

    def predict_with_attention(self, jobs: Sequence[BatchJob]) -> Sequence[Any]:
        """Compute pairs of a response and its viewer data. The batcher calls this."""
        responses = self.predict(jobs)
        return [
            (response, self.service.build_viewer_data(job.payload, response))
            for job, response in zip(jobs, responses, strict=True)
        ]


class _BatchListener:
    """Connects a service to the jobs of a batch: cancellation, partial results and interruption."""

    def __init__(self, jobs: Sequence[BatchJob], batcher: Batcher) -> None:
        self.jobs, self.yield_to_shorter_jobs = jobs, batcher.run_shorter_jobs

    def is_cancelled(self, index: int) -> bool:
        return self.jobs[index].is_cancelled

    def is_streaming(self, index: int) -> bool:
        return self.jobs[index].on_partial is not None and not self.jobs[index].is_cancelled

    def on_partial(self, index: int, partial: str | TaskResponse) -> None:
        job = self.jobs[index]
        if (callback := job.on_partial) is not None:
            job.call_on_event_loop(lambda: callback(partial))


class SizeEstimator:
    """Computes how many tokens of work each request is.

    Small requests are tokenized on the event loop: a switch to another thread would take longer, because that
    thread would compete for the GIL with the busy models. Larger requests are tokenized in a separate thread.
    """

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, "size estimator")
        self._num_waiting = 0

    @property
    def is_full(self) -> bool:
        """Whether no more requests should be admitted. Waiting requests are not in any queue yet."""
        return self._num_waiting >= MAX_WAITING_REQUESTS

    async def estimate_tokens(self, model: ServedModel, request: Request, payload: TaskRequest, max_tokens: int) -> int:
        """Estimate the number of tokens. Raise an error if it exceeds ``max_tokens`` or the queue is full."""
        model.batcher.check_capacity()  # before any work for the request
        if len(await request.body()) <= MAX_INLINE_TOKENIZATION_BYTES:
            num_tokens = model.service.estimate_tokens(payload)
        else:
            num_tokens = await self._estimate_in_thread(model, payload)
        if num_tokens > max_tokens:
            raise RequestTooLarge(
                f"the request needs {num_tokens:,} tokens of work; the maximum is {max_tokens:,}: shorten it"
            )
        return num_tokens

    async def _estimate_in_thread(self, model: ServedModel, payload: TaskRequest) -> int:
        self._num_waiting += 1
        try:
            with model.batcher.reserve_capacity():
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self.executor, model.service.estimate_tokens, payload)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self.executor.shutdown(wait=False)
