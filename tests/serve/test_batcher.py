"""The queue and its thread, without a server: batching, limits, cancellation, failures and closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from running_server import run_async

from jumok.serve.batcher import Batcher, BatchJob
from jumok.serve.errors import OverloadedError, RequestTimeoutError, ServerClosingError


class Doubler:
    """A batch function that doubles numbers, as soon as a test allows."""

    def __init__(self) -> None:
        self.may_work = threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, jobs: Sequence[BatchJob]) -> list[int]:
        self.batches.append([job.payload for job in jobs])
        assert self.may_work.wait(10)
        if any(job.payload == 13 for job in jobs):
            raise ValueError("13 cannot be doubled")
        return [2 * job.payload for job in jobs]


@pytest.fixture
def double() -> Doubler:
    return Doubler()


@pytest.fixture
def start_batcher(double: Doubler) -> Iterator[Callable[..., Batcher]]:
    batchers: list[Batcher] = []

    def start(**options: Any) -> Batcher:
        batchers.append(Batcher(**{"max_batch_tokens": 10, "max_queue_tokens": 100, "max_delay": 0.0, **options}))
        batchers[-1].start()
        return batchers[-1]

    yield start
    double.may_work.set()
    for batcher in batchers:
        assert batcher.close(10)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("sizes", "keys", "expected_batches"),
    [
        # Three requests of 3 tokens fit into a batch of 10.
        ([3] * 7, [0] * 7, [[1, 2, 3], [4, 5, 6], [7]]),
        # A request larger than a batch is alone.
        ([50, 1, 1], [0] * 3, [[1], [2, 3]]),
        # A long request lets shorter ones pass until it is the oldest. All are padded to the longest.
        ([2, 4, 2, 2, 3], [0] * 5, [[1, 2], [3, 4, 5]]),
        # A batch has one batch key, and starts with the oldest request.
        ([1] * 5, [1, 0, 1, 0, 1], [[1, 3, 5], [2, 4]]),
    ],
)
def test_batches(
    start_batcher: Any, double: Doubler, sizes: list[int], keys: list[int], expected_batches: list[list[int]]
) -> None:
    async def test() -> None:
        batcher = start_batcher()
        jobs = [batcher.submit(double, 0, 1)]
        await wait_until(lambda: double.batches == [[0]])
        for n, (size, key) in enumerate(zip(sizes, keys, strict=True), 1):
            jobs.append(batcher.submit(double, n, size, batch_key=key))
        assert (batcher.pending_tokens, batcher.num_queued) == (1 + sum(sizes), len(sizes))
        double.may_work.set()
        assert await asyncio.gather(*map(batcher.wait_for_result, jobs)) == [2 * n for n in range(len(jobs))]
        assert double.batches == [[0], *expected_batches]
        await wait_until(lambda: batcher.pending_tokens == 0)

    run_async(test())


def test_a_batch_waits_at_most_max_delay(start_batcher: Any, double: Doubler) -> None:
    async def test() -> None:
        double.may_work.set()
        batcher = start_batcher(max_delay=0.5)
        start_time = time.monotonic()
        first = batcher.submit(double, 1, 1)
        await asyncio.sleep(0.05)
        second = batcher.submit(double, 2, 1)
        await asyncio.gather(batcher.wait_for_result(first), batcher.wait_for_result(second))
        assert 0.49 < time.monotonic() - start_time < 5
        assert double.batches == [[1, 2]]
        start_time = time.monotonic()
        full_batch = [batcher.submit(double, n, 5) for n in (3, 4)]
        await asyncio.gather(*map(batcher.wait_for_result, full_batch))
        assert time.monotonic() - start_time < 0.45  # a full batch does not wait

    run_async(test())


def test_a_full_queue_rejects_immediately(start_batcher: Any, double: Doubler) -> None:
    async def test() -> None:
        batcher = start_batcher(max_queue_tokens=10)
        jobs = [batcher.submit(double, 1, 4), batcher.submit(double, 2, 6)]
        with pytest.raises(OverloadedError) as rejected:
            batcher.submit(double, 3, 1)
        assert rejected.value.headers == {"Retry-After": "1"}
        assert batcher.pending_tokens == 10
        double.may_work.set()
        assert await asyncio.gather(*map(batcher.wait_for_result, jobs)) == [2, 4]
        await wait_until(lambda: batcher.pending_tokens == 0)
        assert await batcher.wait_for_result(batcher.submit(double, 4, 10)) == 8
        assert all(3 not in batch for batch in double.batches)

    run_async(test())


def test_retry_after_is_the_time_of_the_pending_work(start_batcher: Any) -> None:
    batcher = start_batcher(max_queue_tokens=100)
    assert batcher.estimate_retry_after() == 1
    batcher._recent_tokens, batcher._recent_seconds, batcher._pending_tokens = 20.0, 2.0, 95
    assert batcher.estimate_retry_after() == 10
    batcher._recent_tokens = 0.2
    assert batcher.estimate_retry_after() == 60
    batcher._pending_tokens = 0


def test_a_queued_job_can_be_cancelled(start_batcher: Any, double: Doubler) -> None:
    async def test() -> None:
        batcher = start_batcher()
        first = batcher.submit(double, 0, 1)
        await wait_until(lambda: double.batches == [[0]])
        jobs = [batcher.submit(double, n, 2) for n in (1, 2, 3)]
        tasks = [asyncio.create_task(batcher.wait_for_result(job)) for job in jobs]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert (batcher.pending_tokens, batcher.num_queued) == (5, 2)
        double.may_work.set()
        assert await batcher.wait_for_result(first) == 0
        assert [await tasks[0], await tasks[2]] == [2, 6]
        assert double.batches == [[0], [1, 3]]

    run_async(test())


def test_a_running_job_can_be_cancelled(start_batcher: Any, double: Doubler) -> None:
    async def test() -> None:
        batcher = start_batcher()
        job = batcher.submit(double, 0, 7)
        task = asyncio.create_task(batcher.wait_for_result(job))
        await wait_until(lambda: job.has_started)
        task.cancel()
        await asyncio.wait([task])
        assert job.is_cancelled
        assert batcher.pending_tokens == 7  # until the batch function returns
        double.may_work.set()
        await wait_until(lambda: batcher.pending_tokens == 0)

    run_async(test())


def test_timeout(start_batcher: Any, double: Doubler) -> None:
    async def test() -> None:
        batcher = start_batcher()
        running = batcher.submit(double, 0, 1)
        await wait_until(lambda: double.batches == [[0]])
        queued = batcher.submit(double, 1, 1)
        for job, status, state in ((running, 504, "being computed"), (queued, 503, "in the queue")):
            with pytest.raises(RequestTimeoutError, match=state) as error:
                await batcher.wait_for_result(job, 0.01)
            assert error.value.status_code == status
        assert batcher.num_queued == 0
        double.may_work.set()
        await wait_until(lambda: batcher.pending_tokens == 0)
        assert double.batches == [[0]]

    run_async(test())


def test_a_failing_request_does_not_fail_its_batch(start_batcher: Any, double: Doubler) -> None:
    async def test() -> None:
        batcher = start_batcher()
        first = batcher.submit(double, 0, 1)
        await wait_until(lambda: double.batches == [[0]])
        jobs = [batcher.submit(double, n, 1) for n in (11, 12, 13, 14, 15)]
        double.may_work.set()
        results = await asyncio.gather(*map(batcher.wait_for_result, [first, *jobs]), return_exceptions=True)
        assert [*results[:3], *results[4:]] == [0, 22, 24, 28, 30]
        assert isinstance(results[3], ValueError)
        assert batcher.is_alive
        await wait_until(lambda: batcher.pending_tokens == 0)

    run_async(test())


def test_close_finishes_pending_requests(start_batcher: Any, double: Doubler) -> None:
    async def test() -> None:
        batcher = start_batcher(max_delay=5.0)
        jobs = [batcher.submit(double, n, 4) for n in range(5)]
        closing = asyncio.create_task(asyncio.to_thread(batcher.close, 10))
        await wait_until(lambda: len(double.batches) == 1)
        with pytest.raises(ServerClosingError):
            batcher.submit(double, 9, 1)
        double.may_work.set()
        assert await asyncio.gather(*map(batcher.wait_for_result, jobs)) == [0, 2, 4, 6, 8]
        assert await closing
        assert not batcher.is_alive

    run_async(test())
