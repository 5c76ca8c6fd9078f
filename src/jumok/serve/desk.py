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
from jumok.serve.batcher import Batcher, Job, Late
from jumok.serve.limits import Limits
from jumok.serve.measures import Measures
from jumok.tasks.served import Answer, Asked, Service, TooMuch, told

__all__ = ["BROKEN", "Desk", "Left", "Model", "SizeEstimator"]

log = logging.getLogger("jumok.serve")
BROKEN = "something is broken here; the server's log says what"
READ_AT_ONCE = 64  # large requests that wait to be tokenized
SMALL_BODY = 2048  # bytes of a request that is tokenized on the event loop


class Left(Exception):
    """The client closed the connection."""


@dataclass(frozen=True, eq=False)
class Model:
    """A service, and the thread that does its work."""

    name: str
    service: Service[Any, Any]
    batcher: Batcher

    @classmethod
    def of(cls, name: str, service: Service[Any, Any], limits: Limits, measures: Measures) -> Model:
        """With a queue of its own, which is measured."""
        batcher = Batcher(
            tokens=limits.batch,
            most=limits.queue,
            wait=limits.wait,
            computed=measures.computed(name),
            name=f"model {name}",
        )
        measures.watch(name, lambda: batcher.held, lambda: batcher.waiting)
        return cls(name, service, batcher)

    def predict(self, jobs: Sequence[Job]) -> Sequence[Any]:
        """Work for the batcher: the answers."""
        return self.service.predict([job.asked for job in jobs], _Audience(jobs, self.batcher))

    def attend(self, jobs: Sequence[Job]) -> Sequence[Any]:
        """Work for the batcher: answers, each with what was looked at."""
        answers = self.predict(jobs)
        return [(one, self.service.look(job.asked, one)) for job, one in zip(jobs, answers, strict=True)]


class _Audience:
    """Those who wait for some jobs."""

    def __init__(self, jobs: Sequence[Job], batcher: Batcher) -> None:
        self.jobs, self.pause = jobs, batcher.let_shorter_pass

    def gone(self, number: int) -> bool:
        return self.jobs[number].gone

    def hears(self, number: int) -> bool:
        return self.jobs[number].heard is not None and not self.jobs[number].gone

    def heard(self, number: int, said: str | Answer) -> None:
        job = self.jobs[number]
        if (heard := job.heard) is not None:
            job.tell(lambda: heard(said))


class SizeEstimator:
    """Computes how much work each request is.

    Small requests are tokenized on the event loop: a switch to another thread would take longer, as that
    thread would compete for the GIL with the busy models. Larger ones are tokenized in a thread of their own.
    """

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "size estimator")
        self._waiting = 0

    @property
    def is_full(self) -> bool:
        """Whether no more requests should be admitted: those here have yet to enter their queues."""
        return self._waiting >= READ_AT_ONCE

    async def size(self, model: Model, request: Request, asked: Asked, most: int) -> int:
        """The size in tokens. Raises an error if it exceeds ``most``, or if the queue is full."""
        model.batcher.check()  # before anything is done for it
        if len(await request.body()) <= SMALL_BODY:
            size = model.service.size(asked)
        else:
            size = await self._size_in_thread(model, asked)
        if size > most:
            raise TooMuch(f"this would be {size:,} tokens of work; {most:,} are taken at most: shorten it")
        return size

    async def _size_in_thread(self, model: Model, asked: Asked) -> int:
        self._waiting += 1
        try:
            with model.batcher.expecting():
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self.thread, model.service.size, asked)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self.thread.shutdown(wait=False)


@dataclass(frozen=True)
class Desk:
    """Where the requests of one task arrive; ``models`` are those that do it, by their names."""

    models: Mapping[str, Model]
    limits: Limits
    estimator: SizeEstimator

    @property
    def service(self) -> Service[Any, Any]:
        """The first, to know the schemas by."""
        return next(iter(self.models.values())).service

    async def answer(self, request: Request, asked: Asked) -> Any:
        """The answer, unless the client leaves before."""
        model = self._model(asked)
        size = await self.estimator.size(model, request, asked, self.limits.queue)
        job = model.batcher.submit(model.predict, asked, size, alike=model.service.alike(asked))
        return await _unless_gone(request, model.batcher.answer(job, self.limits.seconds))

    async def attend(self, request: Request, asked: Asked) -> Any:
        """The answer, and what was looked at."""
        model = self._model(asked)
        size = await self.estimator.size(model, request, asked, min(self.limits.look, self.limits.queue))
        job = model.batcher.submit(model.attend, asked, size, alike=object())  # each alone
        return await _unless_gone(request, model.batcher.answer(job, self.limits.seconds))

    async def stream(self, request: Request, asked: Asked) -> AsyncIterator[str]:
        """The answer as events, while it is made; what is refused is refused before the first."""
        model = self._model(asked)
        size = await self.estimator.size(model, request, asked, self.limits.queue)
        unsent: list[str | Answer] = []
        changed = asyncio.Event()

        def heard(said: str | Answer) -> None:
            if isinstance(said, str):
                unsent.clear()  # a slow reader gets the last of several texts
            unsent.append(said)
            changed.set()

        job = model.batcher.submit(model.predict, asked, size, alike=model.service.alike(asked), heard=heard)

        async def events() -> AsyncIterator[str]:
            answer = asyncio.create_task(model.batcher.answer(job, self.limits.seconds))
            answer.add_done_callback(lambda _: changed.set())
            try:
                said = ""
                while unsent or not answer.done():
                    await changed.wait()
                    while unsent:
                        one = unsent.pop(0)
                        if not isinstance(one, str):
                            yield _event("part", one.model_dump_json())
                        elif one != said and not answer.done():
                            said = one
                            yield _event("text", json.dumps({"text": said}, ensure_ascii=False))
                    changed.clear()
                yield _last(answer)
            finally:
                answer.cancel()

        return events()

    def _model(self, asked: Asked) -> Model:
        if asked.model is None:
            return next(iter(self.models.values()))
        if asked.model not in self.models:
            known = ", ".join(self.models)
            raise HTTPException(
                404, f"there is no model {asked.model[:80]!r} of this task; there are: {known}"
            )
        return self.models[asked.model]


def _last(answer: asyncio.Task[Any]) -> str:
    """The event that ends all others."""
    try:
        return _event("done", answer.result().model_dump_json())
    except InputError as error:
        said = told(error)
    except Late as error:
        said = str(error)
    except Exception:
        log.exception("an answer could not be given")
        said = BROKEN
    return _event("error", json.dumps({"error": said}, ensure_ascii=False))


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Any]) -> Any:
    """Wait for an answer as long as the client does."""

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    both = asyncio.create_task(answer), asyncio.create_task(leaving())
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not both[0].done():
            raise Left
        return both[0].result()
    finally:
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)
