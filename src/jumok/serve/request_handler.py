"""The way of a request, once it is understood: to a model, into its queue, and back with the answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from jumok.errors import InputError
from jumok.serve.batcher import Batcher, BatchJob, RequestTimeoutError
from jumok.serve.limits import ServerLimits
from jumok.serve.metrics import ServerMetrics
from jumok.tasks.api import RequestTooLarge, TaskRequest, TaskResponse, TaskService, format_request_error

__all__ = [
    "INTERNAL_ERROR_MESSAGE",
    "ClientDisconnectedError",
    "RequestHandler",
    "ServedModel",
    "SizeEstimator",
]

logger = logging.getLogger("jumok.serve")
INTERNAL_ERROR_MESSAGE = "something is broken here; the server's log says what"
MAX_WAITING_REQUESTS = 64  # large requests that wait to be tokenized
MAX_INLINE_TOKENIZATION_BYTES = 2048  # bytes of a request that is tokenized on the event loop


class ClientDisconnectedError(Exception):
    """The client closed the connection."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A service, and the thread that does its work."""

    name: str
    service: TaskService[Any, Any]
    batcher: Batcher

    @classmethod
    def from_service(
        cls, name: str, service: TaskService[Any, Any], limits: ServerLimits, metrics: ServerMetrics
    ) -> ServedModel:
        """With a queue of its own, which is measured."""
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
        """Work for the batcher: the answers."""
        return self.service.predict([job.payload for job in jobs], _BatchListener(jobs, self.batcher))

    def predict_with_attention(self, jobs: Sequence[BatchJob]) -> Sequence[Any]:
        """Work for the batcher: answers, each with what was looked at."""
        answers = self.predict(jobs)
        return [
            (one, self.service.build_viewer_data(job.payload, one))
            for job, one in zip(jobs, answers, strict=True)
        ]


class _BatchListener:
    """Those who wait for some jobs."""

    def __init__(self, jobs: Sequence[BatchJob], batcher: Batcher) -> None:
        self.jobs, self.yield_to_shorter_jobs = jobs, batcher.run_shorter_jobs

    def is_cancelled(self, index: int) -> bool:
        return self.jobs[index].is_cancelled

    def is_streaming(self, index: int) -> bool:
        return self.jobs[index].on_partial is not None and not self.jobs[index].is_cancelled

    def on_partial(self, index: int, partial: str | TaskResponse) -> None:
        job = self.jobs[index]
        if (heard := job.on_partial) is not None:
            job.call_on_event_loop(lambda: heard(partial))


class SizeEstimator:
    """Computes how much work each request is.

    Small requests are tokenized on the event loop: a switch to another thread would take longer, as that
    thread would compete for the GIL with the busy models. Larger ones are tokenized in a thread of their own.
    """

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, "size estimator")
        self._num_waiting = 0

    @property
    def is_full(self) -> bool:
        """Whether no more requests should be admitted: those here have yet to enter their queues."""
        return self._num_waiting >= MAX_WAITING_REQUESTS

    async def estimate_tokens(
        self, model: ServedModel, request: Request, payload: TaskRequest, max_tokens: int
    ) -> int:
        """The size in tokens. Raises an error if it exceeds ``max_tokens``, or if the queue is full."""
        model.batcher.check_capacity()  # before anything is done for it
        if len(await request.body()) <= MAX_INLINE_TOKENIZATION_BYTES:
            size = model.service.estimate_tokens(payload)
        else:
            size = await self._estimate_in_thread(model, payload)
        if size > max_tokens:
            raise RequestTooLarge(
                f"this would be {size:,} tokens of work; {max_tokens:,} are taken at most: shorten it"
            )
        return size

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


@dataclass(frozen=True)
class RequestHandler:
    """Where the requests of one task arrive; ``models`` are those that do it, by their names."""

    models: Mapping[str, ServedModel]
    limits: ServerLimits
    estimator: SizeEstimator

    @property
    def service(self) -> TaskService[Any, Any]:
        """The first, to know the schemas by."""
        return next(iter(self.models.values())).service

    async def respond(self, request: Request, payload: TaskRequest) -> Any:
        """The answer, unless the client leaves before."""
        model = self._select_model(payload)
        size = await self.estimator.estimate_tokens(model, request, payload, self.limits.max_queue_tokens)
        job = model.batcher.submit(
            model.predict, payload, size, batch_key=model.service.get_batch_key(payload)
        )
        return await _cancel_on_disconnect(
            request, model.batcher.wait_for_result(job, self.limits.request_timeout)
        )

    async def respond_with_attention(self, request: Request, payload: TaskRequest) -> Any:
        """The answer, and what was looked at."""
        model = self._select_model(payload)
        size = await self.estimator.estimate_tokens(
            model, request, payload, min(self.limits.max_attention_tokens, self.limits.max_queue_tokens)
        )
        job = model.batcher.submit(
            model.predict_with_attention, payload, size, batch_key=object()
        )  # each alone
        return await _cancel_on_disconnect(
            request, model.batcher.wait_for_result(job, self.limits.request_timeout)
        )

    async def stream_events(self, request: Request, payload: TaskRequest) -> AsyncIterator[str]:
        """The answer as events, while it is made; what is refused is refused before the first."""
        model = self._select_model(payload)
        size = await self.estimator.estimate_tokens(model, request, payload, self.limits.max_queue_tokens)
        unsent: list[str | TaskResponse] = []
        changed = asyncio.Event()

        def heard(said: str | TaskResponse) -> None:
            if isinstance(said, str):
                unsent.clear()  # a slow reader gets the last of several texts
            unsent.append(said)
            changed.set()

        job = model.batcher.submit(
            model.predict, payload, size, batch_key=model.service.get_batch_key(payload), on_partial=heard
        )

        async def events() -> AsyncIterator[str]:
            answer = asyncio.create_task(model.batcher.wait_for_result(job, self.limits.request_timeout))
            answer.add_done_callback(lambda _: changed.set())
            try:
                said = ""
                while unsent or not answer.done():
                    await changed.wait()
                    while unsent:
                        one = unsent.pop(0)
                        if not isinstance(one, str):
                            yield _format_event("part", one.model_dump_json())
                        elif one != said and not answer.done():
                            said = one
                            yield _format_event("text", json.dumps({"text": said}, ensure_ascii=False))
                    changed.clear()
                yield _format_final_event(answer)
            finally:
                answer.cancel()

        return events()

    def _select_model(self, payload: TaskRequest) -> ServedModel:
        if payload.model is None:
            return next(iter(self.models.values()))
        if payload.model not in self.models:
            known = ", ".join(self.models)
            raise HTTPException(
                404, f"there is no model {payload.model[:80]!r} of this task; there are: {known}"
            )
        return self.models[payload.model]


def _format_final_event(result: asyncio.Task[Any]) -> str:
    """The event that ends all others."""
    try:
        return _format_event("done", result.result().model_dump_json())
    except InputError as error:
        said = format_request_error(error)
    except RequestTimeoutError as error:
        said = str(error)
    except Exception:
        logger.exception("an answer could not be given")
        said = INTERNAL_ERROR_MESSAGE
    return _format_event("error", json.dumps({"error": said}, ensure_ascii=False))


def _format_event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


async def _cancel_on_disconnect(request: Request, result: Coroutine[Any, Any, Any]) -> Any:
    """Wait for an answer as long as the client does."""

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    both = asyncio.create_task(result), asyncio.create_task(leaving())
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not both[0].done():
            raise ClientDisconnectedError
        return both[0].result()
    finally:
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)
