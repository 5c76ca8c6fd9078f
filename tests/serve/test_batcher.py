"""The queue and its thread, without a server: what goes together, what is refused, who is given up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jumok.serve.batcher import Batcher, BatchJob
from jumok.serve.errors import OverloadedError, RequestTimeoutError, ServerClosingError


class Worker:
    """Doubles numbers, when it is let."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, jobs: Sequence[BatchJob]) -> list[int]:
        self.batches.append([job.payload for job in jobs])
        assert self.open.wait(10)
        if any(job.payload == 13 for job in jobs):
            raise ValueError("unlucky")
        return [2 * job.payload for job in jobs]


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def batcher(worker: Worker) -> Iterator[Callable[..., Batcher]]:
    made: list[Batcher] = []

    def make(**more: Any) -> Batcher:
        made.append(Batcher(**{"max_batch_tokens": 10, "max_queue_tokens": 100, "max_delay": 0.0, **more}))
        made[-1].start()
        return made[-1]

    yield make
    worker.open.set()
    for one in made:
        assert one.close(10)


async def until(said: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not said():
            await asyncio.sleep(0.001)


def run(test: Awaitable[Any]) -> Any:
    async def whole() -> Any:
        async with asyncio.timeout(20):
            return await test

    # In a thread of its own: one that drove a browser before has an event loop that still runs.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, whole()).result()


def test_what_waits_goes_together_up_to_the_budget(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        one = batcher()
        jobs = [one.submit(worker, 0, 3)]
        await until(lambda: worker.batches == [[0]])
        jobs += [one.submit(worker, n, 3) for n in range(1, 8)]
        assert (one.pending_tokens, one.num_queued) == (24, 7)
        worker.open.set()
        assert await asyncio.gather(*map(one.wait_for_result, jobs)) == [2 * n for n in range(8)]
        assert worker.batches == [[0], [1, 2, 3], [4, 5, 6], [7]]  # three of 3 tokens fit into 10
        await until(lambda: one.pending_tokens == 0)

    run(test())


def test_one_that_is_larger_than_a_batch_goes_alone(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        one = batcher()
        jobs = [one.submit(worker, 0, 1)]
        await until(lambda: worker.batches == [[0]])
        jobs += [one.submit(worker, n, size) for n, size in ((1, 50), (2, 1), (3, 1))]
        worker.open.set()
        await asyncio.gather(*map(one.wait_for_result, jobs))
        assert worker.batches == [[0], [1], [2, 3]]

    run(test())


def test_a_long_one_lets_short_ones_pass_until_it_is_the_oldest(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        one = batcher()
        jobs = [one.submit(worker, 0, 1)]
        await until(lambda: worker.batches == [[0]])
        jobs += [one.submit(worker, n, size) for n, size in ((1, 2), (2, 4), (3, 2), (4, 2), (5, 3))]
        worker.open.set()
        await asyncio.gather(*map(one.wait_for_result, jobs))
        assert worker.batches == [[0], [1, 2], [3, 4, 5]]  # three are padded to 4, or 3, tokens: 12 and 9

    run(test())


def test_only_what_is_alike_goes_together_and_the_oldest_first(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        one = batcher()
        jobs = [one.submit(worker, 0, 1)]
        await until(lambda: worker.batches == [[0]])
        jobs += [one.submit(worker, n, 1, batch_key=n % 2) for n in range(1, 6)]
        worker.open.set()
        await asyncio.gather(*map(one.wait_for_result, jobs))
        assert worker.batches == [[0], [1, 3, 5], [2, 4]]

    run(test())


def test_a_batch_waits_for_more_only_so_long(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        worker.open.set()
        one = batcher(max_delay=0.5)
        begun = time.monotonic()
        first = one.submit(worker, 1, 1)
        await asyncio.sleep(0.05)
        second = one.submit(worker, 2, 1)
        await asyncio.gather(one.wait_for_result(first), one.wait_for_result(second))
        assert 0.49 < time.monotonic() - begun < 5
        assert worker.batches == [[1, 2]]
        begun = time.monotonic()
        full = [one.submit(worker, n, 5) for n in (3, 4)]
        await asyncio.gather(*map(one.wait_for_result, full))
        assert time.monotonic() - begun < 0.45  # there is nothing to wait for

    run(test())


def test_beyond_the_bound_everything_is_refused_at_once(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        one = batcher(max_queue_tokens=10)
        jobs = [one.submit(worker, 1, 4), one.submit(worker, 2, 6)]
        with pytest.raises(OverloadedError) as refused:
            one.submit(worker, 3, 1)
        assert refused.value.headers is not None
        assert int(refused.value.headers["Retry-After"]) >= 1
        assert one.pending_tokens == 10
        worker.open.set()
        assert await asyncio.gather(*map(one.wait_for_result, jobs)) == [2, 4]
        await until(lambda: one.pending_tokens == 0)
        assert await one.wait_for_result(one.submit(worker, 4, 10)) == 8
        assert all(3 not in some for some in worker.batches)

    run(test())


def test_the_time_to_stay_away_is_that_of_the_work(batcher: Any, worker: Worker) -> None:
    one = batcher(max_queue_tokens=100)
    assert one.estimate_retry_after() == 1
    one._recent_tokens, one._recent_seconds, one._pending_tokens = 20.0, 2.0, 95
    assert one.estimate_retry_after() == 10
    one._recent_tokens = 0.2
    assert one.estimate_retry_after() == 60
    one._pending_tokens = 0


def test_who_leaves_the_queue_is_not_computed(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        one = batcher()
        first = one.submit(worker, 0, 1)
        await until(lambda: worker.batches == [[0]])
        jobs = [one.submit(worker, n, 2) for n in (1, 2, 3)]
        waiting = [asyncio.create_task(one.wait_for_result(job)) for job in jobs]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
        assert (one.pending_tokens, one.num_queued) == (5, 2)
        worker.open.set()
        assert await one.wait_for_result(first) == 0
        assert [await waiting[0], await waiting[2]] == [2, 6]
        assert worker.batches == [[0], [1, 3]]

    run(test())


def test_who_leaves_while_it_is_computed_is_gone(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        one = batcher()
        job = one.submit(worker, 0, 7)
        waiting = asyncio.create_task(one.wait_for_result(job))
        await until(lambda: job.has_started)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert job.is_cancelled
        assert one.pending_tokens == 7  # until the work is put down
        worker.open.set()
        await until(lambda: one.pending_tokens == 0)

    run(test())


def test_no_answer_in_time(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        one = batcher()
        begun, queued = one.submit(worker, 0, 1), None
        await until(lambda: worker.batches == [[0]])
        queued = one.submit(worker, 1, 1)
        with pytest.raises(RequestTimeoutError, match="being computed") as late:
            await one.wait_for_result(begun, 0.01)
        assert late.value.status_code == 504
        with pytest.raises(RequestTimeoutError, match="in the queue") as late:
            await one.wait_for_result(queued, 0.01)
        assert late.value.status_code == 503
        assert one.num_queued == 0
        worker.open.set()
        await until(lambda: one.pending_tokens == 0)
        assert worker.batches == [[0]]

    run(test())


def test_one_that_fails_takes_nobody_along(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        one = batcher()
        first = one.submit(worker, 0, 1)
        await until(lambda: worker.batches == [[0]])
        jobs = [one.submit(worker, n, 1) for n in (11, 12, 13, 14, 15)]
        worker.open.set()
        found = await asyncio.gather(*map(one.wait_for_result, [first, *jobs]), return_exceptions=True)
        assert [*found[:3], *found[4:]] == [0, 22, 24, 28, 30]
        assert isinstance(found[3], ValueError)
        assert one.is_alive
        await until(lambda: one.pending_tokens == 0)

    run(test())


def test_closing_finishes_what_was_taken(batcher: Any, worker: Worker) -> None:
    async def test() -> None:
        one = batcher(max_delay=5.0)
        jobs = [one.submit(worker, n, 4) for n in range(5)]
        closing = asyncio.create_task(asyncio.to_thread(one.close, 10))
        await until(lambda: len(worker.batches) == 1)
        with pytest.raises(ServerClosingError):
            one.submit(worker, 9, 1)
        worker.open.set()
        assert await asyncio.gather(*map(one.wait_for_result, jobs)) == [0, 2, 4, 6, 8]
        assert await closing
        assert not one.is_alive

    run(test())
