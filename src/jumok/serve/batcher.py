"""Requests of many clients, answered together by one model, which one thread owns.

::

    submit ─►  queue  ─►  batch: the oldest, and those like it, up to so many tokens  ─►  answers
               at most ``most`` tokens, those in work included; beyond that: Overloaded, at once

A batch goes off when it is full, or when its oldest request has waited ``wait`` seconds; after a busy time
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

__all__ = ["Batcher", "Closed", "Job", "Late", "Overloaded", "Work"]

LONGEST_RETRY = 60  # seconds that a client is told to stay away at most
WEIGHT = 0.2  # of the last batch in what is known of the speed, and of the last request in the usual size
SLICE = 0.25  # seconds that a long batch computes before shorter requests may interrupt it
ANSWERS_AT_ONCE = 8  # that the event loop hands out before it reads from its connections again
SHORTER = 4  # requests so many times shorter than those of a batch may interrupt it


class Overloaded(Exception):
    """The queue is full; ``retry`` says after how many seconds there may be room."""

    def __init__(self, retry: int) -> None:
        super().__init__(f"the queue is full; try again in {retry} s")
        self.retry = retry


class Late(Exception):
    """There was no answer in time: the work had ``begun``, or the request still stood in the queue."""

    def __init__(self, seconds: float, retry: int, *, begun: bool) -> None:
        where = "it was being computed" if begun else "it was still in the queue"
        super().__init__(f"no answer after {seconds:g} s: {where}")
        self.begun, self.retry = begun, retry


class Closed(Exception):
    """The server is going down, and takes nothing more."""


@dataclass(eq=False)
class Job:
    """One request on its way. The event loop makes it; the worker reads it."""

    asked: Any
    size: int  # tokens
    work: Work
    alike: Hashable
    answer: asyncio.Future[Any]
    heard: Callable[[Any], None] | None = None  # is told what there is while it is made, on the event loop
    arrived: float = field(default_factory=time.monotonic)
    begun: bool = False
    gone: bool = False

    def settle(self, set_it: Callable[[Any], None], value: Any) -> None:
        """Answer it, from the worker's thread; if nobody waits any more, nothing happens."""

        def settled() -> None:
            if not self.answer.done():
                set_it(value)

        self.tell(settled)

    def tell(self, told: Callable[[], None]) -> None:
        """Have something done on the event loop, if that still runs."""
        with contextlib.suppress(RuntimeError):
            self.answer.get_loop().call_soon_threadsafe(told)


@dataclass
class _Interruption:
    """What may interrupt a batch, and when."""

    most: int  # tokens of a request
    due: float  # not before this time
    seconds: float = 0.0  # that interruptions took


# What answers some jobs that are alike: a list of answers.
Work: TypeAlias = Callable[[Sequence[Job]], Sequence[Any]]


class Batcher:
    """A queue and a thread. ``computed(requests, tokens, seconds)`` is called after every batch.

    >>> batcher = Batcher(tokens=8192, most=65536)  # doctest: +SKIP
    >>> job = batcher.submit(work, "a text", size=2)  # doctest: +SKIP
    >>> await batcher.answer(job, seconds=30)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        tokens: int,
        most: int,
        wait: float = 0.004,
        computed: Callable[[int, int, float], None] | None = None,
        name: str = "batcher",
    ) -> None:
        self.tokens, self.most, self.wait = tokens, most, wait
        self._computed = computed
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._held = 0  # tokens of the queue and of what is in work
        self._recent_tokens, self._recent_seconds = 0.0, 0.0  # of the last batches, older ones count less
        self._expected = 0  # requests that have been admitted, and whose size is not known yet
        self._usual_size = 1.0  # tokens of a request, as the last ones were
        self._interruption: _Interruption | None = None  # while a batch is computed
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self, seconds: float | None = None) -> bool:
        """Take nothing more, finish what was taken, and end; False if that was not done in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def held(self) -> int:
        """Tokens that are taken and not answered."""
        return self._held

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    # ----------------------------------------------------------------------------- on the event loop

    def check(self, size: int | None = None) -> None:
        """Raise at once if so much more cannot be taken; None: a request of the usual size."""
        if self._closing:
            raise Closed("the server is shutting down")
        expected = self._usual_size * (self._expected + 1) if size is None else size
        if self._held + expected > self.most:
            raise Overloaded(self.retry())

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Keep room for a request of the usual size, until its own is known."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1

    def retry(self) -> int:
        """After how many seconds what is held now will be done, going by the speed so far."""
        speed = self._recent_tokens / self._recent_seconds if self._recent_seconds else None
        seconds = self._held / speed if speed else 1.0
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY)

    def submit(
        self,
        work: Work,
        asked: Any,
        size: int,
        *,
        alike: Hashable = None,
        heard: Callable[[Any], None] | None = None,
    ) -> Job:
        """Put a request into the queue, or raise at once: Overloaded, Closed."""
        job = Job(asked, size, work, alike, asyncio.get_running_loop().create_future(), heard)
        with self._changed:
            self.check(size)
            self._usual_size += WEIGHT * (size - self._usual_size)
            self._queue.append(job)
            self._held += size
            self._changed.notify()
        return job

    async def answer(self, job: Job, seconds: float | None = None) -> Any:
        """Wait for the answer; Late if it does not come in time. Who stops waiting gives the job up."""
        try:
            async with asyncio.timeout(seconds):
                return await job.answer
        except TimeoutError:
            raise Late(seconds or 0, self.retry(), begun=job.begun) from None
        finally:
            self.drop(job)

    def drop(self, job: Job) -> None:
        """Nobody waits for it any more: out of the queue, or out of the work at its next step."""
        with self._changed:
            job.gone = True
            if not job.begun:
                with contextlib.suppress(ValueError):
                    self._queue.remove(job)
                    self._held -= job.size

    # ----------------------------------------------------------------------------- in the worker's thread

    def _run(self) -> None:
        while jobs := self._next():
            self._work_on(jobs)

    def _work_on(self, jobs: Sequence[Job]) -> None:
        """Compute a batch and count it; the time of batches that interrupted it is not its own."""
        begun, tokens, interrupted = time.monotonic(), sum(job.size for job in jobs), self._interruption
        self._interruption = _Interruption(max(job.size for job in jobs) // SHORTER, begun + SLICE)
        try:
            self._compute(jobs)
        finally:
            seconds = time.monotonic() - begun - self._interruption.seconds
            self._interruption = interrupted
            with self._changed:
                self._held -= tokens
                self._recent_tokens += tokens - WEIGHT * self._recent_tokens
                self._recent_seconds += max(seconds, 1e-6) - WEIGHT * self._recent_seconds
        if self._computed is not None:
            self._computed(len(jobs), tokens, seconds)

    def let_shorter_pass(self) -> None:
        """Compute a batch of much shorter requests, if some wait, in the middle of a long one.

        Work that goes in steps and can be interrupted calls this between them. The long batch gets as much
        time as those that interrupt it.
        """
        long = self._interruption
        if long is None or not self._queue or time.monotonic() < long.due:
            return
        with self._changed:
            shorter = deque(job for job in self._queue if job.size <= long.most)
            jobs = self._taken(self._together(shorter)[0]) if shorter else []
        if jobs:
            begun = time.monotonic()
            self._work_on(jobs)
            now = time.monotonic()
            long.seconds += now - begun
            long.due = now + max(SLICE, now - begun)

    def _next(self) -> list[Job]:
        """Wait for a batch; none comes any more once all is done and the server goes down."""
        with self._changed:
            while True:
                if self._queue:
                    jobs, full = self._together(self._queue)
                    left = self._queue[0].arrived + self.wait - time.monotonic()
                    if full or left <= 0 or self._closing:
                        return self._taken(jobs)
                    self._changed.wait(left)
                elif self._closing:
                    return []
                else:
                    self._changed.wait()

    def _taken(self, jobs: list[Job]) -> list[Job]:
        """The same, no longer in the queue."""
        chosen = set(jobs)
        self._queue = deque(job for job in self._queue if job not in chosen)
        for job in jobs:
            job.begun = True
        return jobs

    def _together(self, queue: deque[Job]) -> tuple[list[Job], bool]:
        """The oldest request and those like it, in their order; and whether some are left for want of room.

        All are reckoned to be as long as the longest: they are padded to that. One that does not fit lets
        shorter ones pass, until it is the oldest.
        """
        first, longest, full = queue[0], 0, False
        jobs: list[Job] = []
        for job in queue:
            if job.alike == first.alike and job.work == first.work:
                if jobs and (len(jobs) + 1) * max(longest, job.size) > self.tokens:
                    full = True
                    continue
                jobs.append(job)
                longest = max(longest, job.size)
        return jobs, full or (len(jobs) + 1) * longest > self.tokens

    def _compute(self, jobs: Sequence[Job]) -> None:
        """Answer these; if they cannot be answered together, in halves, so that one that is bad is alone."""
        jobs = [job for job in jobs if not job.gone]
        if not jobs:
            return
        try:
            answers = jobs[0].work(jobs)
            assert len(answers) == len(jobs)
        except Exception as error:
            if len(jobs) > 1:
                half = len(jobs) // 2
                self._compute(jobs[:half])
                self._compute(jobs[half:])
            else:
                jobs[0].settle(jobs[0].answer.set_exception, error)
        else:
            _hand_out(jobs, answers)


def _hand_out(jobs: Sequence[Job], answers: Sequence[Any]) -> None:
    """Settle the jobs of a batch on the event loop, a few at a time.

    The loop writes the responses of all settled jobs before it reads from its connections again. After a
    large batch, a request that is to be refused would wait for all of them.
    """
    pairs = iter(list(zip(jobs, answers, strict=True)))
    loop = jobs[0].answer.get_loop()

    def hand_out_some() -> None:
        some = list(itertools.islice(pairs, ANSWERS_AT_ONCE))
        for job, answer in some:
            if not job.answer.done():
                job.answer.set_result(answer)
        if some:
            loop.call_soon(hand_out_some)

    jobs[0].tell(hand_out_some)
