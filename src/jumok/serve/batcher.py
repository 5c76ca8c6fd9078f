"""Requests of many clients, answered together by one model, which one thread owns.

::

    submit ─►  queue  ─►  batch: the oldest, and those like it, up to so many tokens  ─►  answers
               at most ``most`` tokens, those in work included; beyond that: Overloaded, at once

A batch goes off when it is full, or when its oldest request has waited ``max_delay`` seconds; after a busy time
that is at once. Who leaves is taken out of the queue, or, once in work, is *gone*: whatever is computed in
steps asks for that between them. Then a long batch also lets much shorter requests pass, so that nobody waits
for a long text to end. A request that fails takes nobody along: the others are tried without it.
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

__all__ = [
    "BatchFunction",
    "BatchJob",
    "Batcher",
    "OverloadedError",
    "RequestTimeoutError",
    "ServerClosingError",
]

MAX_RETRY_SECONDS = 60  # seconds that a client is told to stay away at most
EMA_WEIGHT = 0.2  # of the last batch in what is known of the speed, and of the last request in the usual size
TIME_SLICE_SECONDS = 0.25  # seconds that a long batch computes before shorter requests may interrupt it
MAX_RESULTS_PER_CALLBACK = 8  # that the event loop hands out before it reads from its connections again
INTERRUPTION_RATIO = 4  # requests so many times shorter than those of a batch may interrupt it


class OverloadedError(Exception):
    """The queue is full; ``retry`` says after how many seconds there may be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class RequestTimeoutError(Exception):
    """There was no answer in time: the work had ``has_started``, or the request still stood in the queue."""

    def __init__(self, timeout: float, retry_after: int, *, has_started: bool) -> None:
        where = "it was being computed" if has_started else "it was still in the queue"
        super().__init__(f"no answer after {timeout:g} s: {where}")
        self.has_started, self.retry_after = has_started, retry_after


class ServerClosingError(Exception):
    """The server is going down, and takes nothing more."""


@dataclass(eq=False)
class BatchJob:
    """One request on its way. The event loop makes it; the worker reads it."""

    payload: Any
    num_tokens: int  # tokens
    batch_function: BatchFunction
    batch_key: Hashable
    future: asyncio.Future[Any]
    on_partial: Callable[[Any], None] | None = (
        None  # is told what there is while it is made, on the event loop
    )
    arrival_time: float = field(default_factory=time.monotonic)
    has_started: bool = False
    is_cancelled: bool = False

    def resolve(self, set_outcome: Callable[[Any], None], outcome: Any) -> None:
        """Answer it, from the worker's thread; if nobody waits any more, nothing happens."""

        def settled() -> None:
            if not self.future.done():
                set_outcome(outcome)

        self.call_on_event_loop(settled)

    def call_on_event_loop(self, callback: Callable[[], None]) -> None:
        """Have something done on the event loop, if that still runs."""
        with contextlib.suppress(RuntimeError):
            self.future.get_loop().call_soon_threadsafe(callback)


@dataclass
class _Interruption:
    """What may interrupt a batch, and when."""

    max_tokens: int  # tokens of a request
    not_before: float  # not before this time
    elapsed_seconds: float = 0.0  # that interruptions took


# What answers some jobs that are alike: a list of answers.
BatchFunction: TypeAlias = Callable[[Sequence[BatchJob]], Sequence[Any]]


class Batcher:
    """A queue and a thread. ``on_batch(requests, max_batch_tokens, seconds)`` is called after every batch.

    >>> batcher = Batcher(tokens=8192, most=65536)  # doctest: +SKIP
    >>> job = batcher.submit(work, "a text", size=2)  # doctest: +SKIP
    >>> await batcher.answer(job, seconds=30)  # doctest: +SKIP
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
        self.max_batch_tokens, self.max_queue_tokens, self.max_delay = (
            max_batch_tokens,
            max_queue_tokens,
            max_delay,
        )
        self._on_batch = on_batch
        self._condition = threading.Condition()
        self._queue: deque[BatchJob] = deque()
        self._pending_tokens = 0  # tokens of the queue and of what is in work
        self._recent_tokens, self._recent_seconds = 0.0, 0.0  # of the last batches, older ones count less
        self._num_reserved = 0  # requests that have been admitted, and whose size is not known yet
        self._mean_request_tokens = 1.0  # tokens of a request, as the last ones were
        self._interruption: _Interruption | None = None  # while a batch is computed
        self._is_closing = False
        self._thread = threading.Thread(target=self._run_worker, name=name, daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self, timeout: float | None = None) -> bool:
        """Take nothing more, finish what was taken, and end; False if that was not done in time."""
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
        """Tokens that are taken and not answered."""
        return self._pending_tokens

    @property
    def num_queued(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    # ----------------------------------------------------------------------------- on the event loop

    def check_capacity(self, num_tokens: int | None = None) -> None:
        """Raise at once if so much more cannot be taken; None: a request of the usual size."""
        if self._is_closing:
            raise ServerClosingError("the server is shutting down")
        expected = self._mean_request_tokens * (self._num_reserved + 1) if num_tokens is None else num_tokens
        if self._pending_tokens + expected > self.max_queue_tokens:
            raise OverloadedError(self.estimate_retry_after())

    @contextlib.contextmanager
    def reserve_capacity(self) -> Iterator[None]:
        """Keep room for a request of the usual size, until its own is known."""
        self._num_reserved += 1
        try:
            yield
        finally:
            self._num_reserved -= 1

    def estimate_retry_after(self) -> int:
        """After how many seconds what is held now will be done, going by the speed so far."""
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
        """Put a request into the queue, or raise at once: Overloaded, Closed."""
        job = BatchJob(
            payload,
            num_tokens,
            batch_function,
            batch_key,
            asyncio.get_running_loop().create_future(),
            on_partial,
        )
        with self._condition:
            self.check_capacity(num_tokens)
            self._mean_request_tokens += EMA_WEIGHT * (num_tokens - self._mean_request_tokens)
            self._queue.append(job)
            self._pending_tokens += num_tokens
            self._condition.notify()
        return job

    async def wait_for_result(self, job: BatchJob, timeout: float | None = None) -> Any:
        """Wait for the answer; Late if it does not come in time. Who stops waiting gives the job up."""
        try:
            async with asyncio.timeout(timeout):
                return await job.future
        except TimeoutError:
            raise RequestTimeoutError(
                timeout or 0, self.estimate_retry_after(), has_started=job.has_started
            ) from None
        finally:
            self.cancel(job)

    def cancel(self, job: BatchJob) -> None:
        """Nobody waits for it any more: out of the queue, or out of the work at its next step."""
        with self._condition:
            job.is_cancelled = True
            if not job.has_started:
                with contextlib.suppress(ValueError):
                    self._queue.remove(job)
                    self._pending_tokens -= job.num_tokens

    # ----------------------------------------------------------------------------- in the worker's thread

    def _run_worker(self) -> None:
        while jobs := self._wait_for_batch():
            self._process_batch(jobs)

    def _process_batch(self, jobs: Sequence[BatchJob]) -> None:
        """Compute a batch and count it; the time of batches that interrupted it is not its own."""
        begun, tokens, interrupted = time.monotonic(), sum(job.num_tokens for job in jobs), self._interruption
        self._interruption = _Interruption(
            max(job.num_tokens for job in jobs) // INTERRUPTION_RATIO, begun + TIME_SLICE_SECONDS
        )
        try:
            self._compute_batch(jobs)
        finally:
            seconds = time.monotonic() - begun - self._interruption.elapsed_seconds
            self._interruption = interrupted
            with self._condition:
                self._pending_tokens -= tokens
                self._recent_tokens += tokens - EMA_WEIGHT * self._recent_tokens
                self._recent_seconds += max(seconds, 1e-6) - EMA_WEIGHT * self._recent_seconds
        if self._on_batch is not None:
            self._on_batch(len(jobs), tokens, seconds)

    def run_shorter_jobs(self) -> None:
        """Compute a batch of much shorter requests, if some wait, in the middle of a long one.

        Work that goes in steps and can be interrupted calls this between them. The long batch gets as much
        time as those that interrupt it.
        """
        long = self._interruption
        if long is None or not self._queue or time.monotonic() < long.not_before:
            return
        with self._condition:
            shorter = deque(job for job in self._queue if job.num_tokens <= long.max_tokens)
            jobs = self._remove_from_queue(self._select_batch(shorter)[0]) if shorter else []
        if jobs:
            begun = time.monotonic()
            self._process_batch(jobs)
            now = time.monotonic()
            long.elapsed_seconds += now - begun
            long.not_before = now + max(TIME_SLICE_SECONDS, now - begun)

    def _wait_for_batch(self) -> list[BatchJob]:
        """Wait for a batch; none comes any more once all is done and the server goes down."""
        with self._condition:
            while True:
                if self._queue:
                    jobs, full = self._select_batch(self._queue)
                    left = self._queue[0].arrival_time + self.max_delay - time.monotonic()
                    if full or left <= 0 or self._is_closing:
                        return self._remove_from_queue(jobs)
                    self._condition.wait(left)
                elif self._is_closing:
                    return []
                else:
                    self._condition.wait()

    def _remove_from_queue(self, jobs: list[BatchJob]) -> list[BatchJob]:
        """The same, no longer in the queue."""
        chosen = set(jobs)
        self._queue = deque(job for job in self._queue if job not in chosen)
        for job in jobs:
            job.has_started = True
        return jobs

    def _select_batch(self, queue: deque[BatchJob]) -> tuple[list[BatchJob], bool]:
        """The oldest request and those like it, in their order; and whether some are left for want of room.

        All are reckoned to be as long as the longest: they are padded to that. One that does not fit lets
        shorter ones pass, until it is the oldest.
        """
        first, longest, full = queue[0], 0, False
        jobs: list[BatchJob] = []
        for job in queue:
            if job.batch_key == first.batch_key and job.batch_function == first.batch_function:
                if jobs and (len(jobs) + 1) * max(longest, job.num_tokens) > self.max_batch_tokens:
                    full = True
                    continue
                jobs.append(job)
                longest = max(longest, job.num_tokens)
        return jobs, full or (len(jobs) + 1) * longest > self.max_batch_tokens

    def _compute_batch(self, jobs: Sequence[BatchJob]) -> None:
        """Answer these; if they cannot be answered together, in halves, so that one that is bad is alone."""
        jobs = [job for job in jobs if not job.is_cancelled]
        if not jobs:
            return
        try:
            answers = jobs[0].batch_function(jobs)
            assert len(answers) == len(jobs)
        except Exception as error:
            if len(jobs) > 1:
                half = len(jobs) // 2
                self._compute_batch(jobs[:half])
                self._compute_batch(jobs[half:])
            else:
                jobs[0].resolve(jobs[0].future.set_exception, error)
        else:
            _resolve_jobs(jobs, answers)


def _resolve_jobs(jobs: Sequence[BatchJob], results: Sequence[Any]) -> None:
    """Settle the jobs of a batch on the event loop, a few at a time.

    The loop writes the responses of all settled jobs before it reads from its connections again. After a
    large batch, a request that is to be refused would wait for all of them.
    """
    pairs = iter(list(zip(jobs, results, strict=True)))
    loop = jobs[0].future.get_loop()

    def hand_out_some() -> None:
        some = list(itertools.islice(pairs, MAX_RESULTS_PER_CALLBACK))
        for job, answer in some:
            if not job.future.done():
                job.future.set_result(answer)
        if some:
            loop.call_soon(hand_out_some)

    jobs[0].call_on_event_loop(hand_out_some)
