"""Dynamic batching: one model, owned by one thread, answers the requests of many clients in batches.

::

    submit ─►  queue  ─►  batch: the oldest request and others with its batch key  ─►  results
               │          at most ``max_batch_tokens`` tokens, including padding
               └─ at most ``max_queue_tokens`` pending tokens, running batches included; when the queue is
                  full, ``submit`` raises OverloadedError immediately

A batch starts when it is full, or when its oldest request has waited ``max_delay`` seconds. A cancelled
request is removed from the queue. If it is already being computed, the computation checks for cancellation
between its steps. Between its steps, a long batch also lets much shorter requests run first, so that they
need not wait for a long text. If a batch fails, its requests are computed in smaller batches, so that only
the request that caused the failure fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jumok.serve.errors import OverloadedError, RequestTimeoutError, ServerClosingError

MAX_RETRY_SECONDS = 60  # maximum of Retry-After
EMA_WEIGHT = 0.2  # weight of the latest batch in the measured speed, and of the latest request in the mean size
TIME_SLICE_SECONDS = 0.25  # time that a long batch computes before shorter requests may interrupt it
MAX_RESULTS_PER_CALLBACK = 8  # results set before the event loop reads from its connections again
INTERRUPTION_RATIO = 4  # a request may interrupt a batch whose longest request is this many times longer


@dataclass(eq=False)
class BatchJob:
    """One request in the queue or in a batch. The event loop creates it, and the worker thread reads it."""

    payload: Any
    num_tokens: int
    batch_function: BatchFunction
    batch_key: Hashable
    future: asyncio.Future[Any]
    on_partial: Callable[[Any], None] | None = None  # called on the event loop with partial results
    arrival_time: float = field(default_factory=time.monotonic)
    has_started: bool = False
    is_cancelled: bool = False

    def resolve(self, set_outcome: Callable[[Any], None], outcome: Any) -> None:
        """Set the result or the exception from the worker thread, unless the job is already done."""

        def resolve_if_pending() -> None:
            if not self.future.done():
                set_outcome(outcome)

        self.call_on_event_loop(resolve_if_pending)

    def call_on_event_loop(self, callback: Callable[[], None]) -> None:
        """Schedule a callback on the event loop, if the loop is still running."""
        with contextlib.suppress(RuntimeError):
            self.future.get_loop().call_soon_threadsafe(callback)


@dataclass
class _Interruption:
    """Which requests may interrupt a running batch, and when."""

    max_tokens: int  # of one request
    not_before: float  # time.monotonic()
    elapsed_seconds: float = 0.0  # total time of the interruptions


# Computes one result for each job of a batch.
BatchFunction: TypeAlias = Callable[[Sequence[BatchJob]], Sequence[Any]]


class Batcher:
    """A queue and a worker thread.

    ``on_batch(num_requests, num_tokens, seconds)`` is called after each batch.

    >>> batcher = Batcher(max_batch_tokens=8192, max_queue_tokens=65536)  # doctest: +SKIP
    >>> job = batcher.submit(batch_function, "a text", num_tokens=2)  # doctest: +SKIP
    >>> await batcher.wait_for_result(job, timeout=30)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        max_batch_tokens: int,
        max_queue_tokens: int,
        max_delay: float = 0.004,
        on_batch: Callable[[int, int, float], None] | None = None,
        name: str = "batcher",
    ) -> None:
        self.max_batch_tokens, self.max_queue_tokens = max_batch_tokens, max_queue_tokens
        self.max_delay = max_delay
        self._on_batch = on_batch
        self._condition = threading.Condition()
        self._queue: deque[BatchJob] = deque()
        self._pending_tokens = 0  # tokens in the queue and in running batches
        self._recent_tokens, self._recent_seconds = 0.0, 0.0  # exponentially weighted sums over batches
        self._num_reserved = 0  # admitted requests whose size is not known yet
        self._mean_request_tokens = 1.0  # exponential moving average
        self._interruption: _Interruption | None = None  # set while a batch is computed
        self._is_closing = False
        self._thread = threading.Thread(target=self._run_worker, name=name, daemon=True)

    def start(self) -> None:
        """Start the worker thread."""
        self._thread.start()

    def close(self, timeout: float | None = None) -> bool:
        """Reject new requests, finish the pending ones, and stop. Return False if that timed out."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def pending_tokens(self) -> int:
        """Number of tokens in the queue and in running batches."""
        return self._pending_tokens

    @property
    def num_queued(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    # ---------------------------------------------------------------- called on the event loop

    def check_capacity(self, num_tokens: int | None = None) -> None:
        """Raise an error if a request of this size does not fit. None means a request of average size."""
        if self._is_closing:
            raise ServerClosingError
        expected = self._mean_request_tokens * (self._num_reserved + 1) if num_tokens is None else num_tokens
        if self._pending_tokens + expected > self.max_queue_tokens:
            raise OverloadedError(self.estimate_retry_after())

    @contextlib.contextmanager
    def reserve_capacity(self) -> Iterator[None]:
        """Reserve room for a request of average size while its own size is being computed."""
        self._num_reserved += 1
        try:
            yield
        finally:
            self._num_reserved -= 1

    def estimate_retry_after(self) -> int:
        """Estimate in how many seconds the pending requests will be done, from the measured speed."""
        speed = self._recent_tokens / self._recent_seconds if self._recent_seconds else None
        seconds = self._pending_tokens / speed if speed else 1.0
        return min(max(math.ceil(seconds), 1), MAX_RETRY_SECONDS)

    def submit(
        self,
        batch_function: BatchFunction,
        payload: Any,
        num_tokens: int,
        *,
        batch_key: Hashable = None,
        on_partial: Callable[[Any], None] | None = None,
    ) -> BatchJob:
        """Add a request to the queue, or raise OverloadedError or ServerClosingError immediately."""
        job = BatchJob(
            payload, num_tokens, batch_function, batch_key, asyncio.get_running_loop().create_future(), on_partial
        )
        with self._condition:
            self.check_capacity(num_tokens)
            self._mean_request_tokens += EMA_WEIGHT * (num_tokens - self._mean_request_tokens)
            self._queue.append(job)
            self._pending_tokens += num_tokens
            self._condition.notify()
        return job

    async def wait_for_result(self, job: BatchJob, timeout: float | None = None) -> Any:
        """Wait for the result, at most ``timeout`` seconds. The job is cancelled if the wait ends early."""
        try:
            async with asyncio.timeout(timeout):
                return await job.future
        except TimeoutError:
            raise RequestTimeoutError(timeout or 0, self.estimate_retry_after(), has_started=job.has_started) from None
        finally:
            self.cancel(job)

    def cancel(self, job: BatchJob) -> None:
        """Remove a job from the queue. If it is being computed, mark it as cancelled."""
        with self._condition:
            job.is_cancelled = True
            if not job.has_started:
                with contextlib.suppress(ValueError):
                    self._queue.remove(job)
                    self._pending_tokens -= job.num_tokens

    # ---------------------------------------------------------------- called in the worker thread

    def _run_worker(self) -> None:
        while jobs := self._wait_for_batch():
            self._process_batch(jobs)

    def _process_batch(self, jobs: Sequence[BatchJob]) -> None:
        """Compute a batch and measure it. Its time excludes the batches that interrupted it."""
        start_time, num_tokens = time.monotonic(), sum(job.num_tokens for job in jobs)
        outer_interruption = self._interruption
        self._interruption = _Interruption(
            max(job.num_tokens for job in jobs) // INTERRUPTION_RATIO, start_time + TIME_SLICE_SECONDS
        )
        try:
            self._compute_batch(jobs)
        finally:
            seconds = time.monotonic() - start_time - self._interruption.elapsed_seconds
            self._interruption = outer_interruption
            with self._condition:
                self._pending_tokens -= num_tokens
                self._recent_tokens += num_tokens - EMA_WEIGHT * self._recent_tokens
                self._recent_seconds += max(seconds, 1e-6) - EMA_WEIGHT * self._recent_seconds
        if self._on_batch is not None:
            self._on_batch(len(jobs), num_tokens, seconds)

    def run_shorter_jobs(self) -> None:
        """Interrupt a long batch to compute a batch of much shorter requests, if any are queued.

        A batch function that can be interrupted calls this between its steps. The long batch gets as much
        time as the batches that interrupt it.
        """
        interruption = self._interruption
        if interruption is None or not self._queue or time.monotonic() < interruption.not_before:
            return
        with self._condition:
            shorter_jobs = deque(job for job in self._queue if job.num_tokens <= interruption.max_tokens)
            jobs = self._remove_from_queue(self._select_batch(shorter_jobs)[0]) if shorter_jobs else []
        if jobs:
            start_time = time.monotonic()
            self._process_batch(jobs)
            now = time.monotonic()
            interruption.elapsed_seconds += now - start_time
            interruption.not_before = now + max(TIME_SLICE_SECONDS, now - start_time)

    def _wait_for_batch(self) -> list[BatchJob]:
        """Wait for the next batch. An empty list means that the batcher is closed and the queue is empty."""
        with self._condition:
            while True:
                if self._queue:
                    jobs, is_full = self._select_batch(self._queue)
                    remaining = self._queue[0].arrival_time + self.max_delay - time.monotonic()
                    if is_full or remaining <= 0 or self._is_closing:
                        return self._remove_from_queue(jobs)
                    self._condition.wait(remaining)
                elif self._is_closing:
                    return []
                else:
                    self._condition.wait()

    def _remove_from_queue(self, jobs: list[BatchJob]) -> list[BatchJob]:
        """Remove these jobs from the queue, mark them as started, and return them."""
        selected = set(jobs)
        self._queue = deque(job for job in self._queue if job not in selected)
        for job in jobs:
            job.has_started = True
        return jobs

    def _select_batch(self, queue: deque[BatchJob]) -> tuple[list[BatchJob], bool]:
        """Select the oldest request and others with its batch key, in order; and whether the batch is full.

        Each request counts as many tokens as the longest one, because all are padded to that length. A
        request that does not fit lets shorter ones pass until it is the oldest.
        """
        first, longest, is_full = queue[0], 0, False
        jobs: list[BatchJob] = []
        for job in queue:
            if job.batch_key == first.batch_key and job.batch_function == first.batch_function:
                if jobs and (len(jobs) + 1) * max(longest, job.num_tokens) > self.max_batch_tokens:
                    is_full = True
                    continue
                jobs.append(job)
                longest = max(longest, job.num_tokens)
        return jobs, is_full or (len(jobs) + 1) * longest > self.max_batch_tokens

    def _compute_batch(self, jobs: Sequence[BatchJob]) -> None:
        """Compute a batch. If that fails, compute its halves, until the failing request is alone."""
        jobs = [job for job in jobs if not job.is_cancelled]
        if not jobs:
            return
        try:
            results = jobs[0].batch_function(jobs)
            assert len(results) == len(jobs)
        except Exception as error:
            if len(jobs) > 1:
                half = len(jobs) // 2
                self._compute_batch(jobs[:half])
                self._compute_batch(jobs[half:])
            else:
                jobs[0].resolve(jobs[0].future.set_exception, error)
        else:
            _resolve_jobs(jobs, results)


def _resolve_jobs(jobs: Sequence[BatchJob], results: Sequence[Any]) -> None:
    """Set the results of a batch on the event loop, a few at a time.

    The loop writes the responses of all resolved jobs before it reads from its connections again. After a
    large batch, a request that must be rejected would have to wait for all of them.
    """
    pairs = iter(list(zip(jobs, results, strict=True)))
    loop = jobs[0].future.get_loop()

    def resolve_some() -> None:
        chunk = list(itertools.islice(pairs, MAX_RESULTS_PER_CALLBACK))
        for job, result in chunk:
            if not job.future.done():
                job.future.set_result(result)
        if chunk:
            loop.call_soon(resolve_some)

    jobs[0].call_on_event_loop(resolve_some)
