"""The path of a parsed request: to a model, through its queue, and back to the client."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from jumok.errors import InputError
from jumok.serve.batcher import BatchJob
from jumok.serve.errors import ClientDisconnectedError, RequestTimeoutError
from jumok.serve.limits import ServerLimits
from jumok.serve.responses import format_error_event, format_event
from jumok.serve.served_model import ServedModel, SizeEstimator
from jumok.tasks.api import TaskRequest, TaskResponse, TaskService, format_request_error

logger = logging.getLogger("jumok.serve")
INTERNAL_ERROR_MESSAGE = "internal error; see the server log"


@dataclass(frozen=True)
class RequestHandler:
    """Handles the requests of one task. ``models`` are the models of the task by name."""

    models: Mapping[str, ServedModel]
    limits: ServerLimits
    estimator: SizeEstimator

    @property
    def service(self) -> TaskService[Any, Any]:
        """The service of the first model. All services of a task have the same schemas."""
        return next(iter(self.models.values())).service

    async def respond(self, request: Request, payload: TaskRequest, *, with_attention: bool = False) -> Any:
        """Compute the response, or a pair of it and its viewer data, unless the client disconnects."""
        model, job = await self._submit(request, payload, with_attention=with_attention)
        return await _cancel_on_disconnect(request, model.batcher.wait_for_result(job, self.limits.request_timeout))

    async def stream_events(self, request: Request, payload: TaskRequest) -> AsyncIterator[str]:
        """Compute the response as server-sent events. Refusals are raised before the first event."""
        unsent: list[str | TaskResponse] = []
        has_news = asyncio.Event()

        def on_partial(partial: str | TaskResponse) -> None:
            if isinstance(partial, str):
                unsent.clear()  # a slow client receives only the latest text
            unsent.append(partial)
            has_news.set()

        model, job = await self._submit(request, payload, on_partial=on_partial)

        async def events() -> AsyncIterator[str]:
            result = asyncio.create_task(model.batcher.wait_for_result(job, self.limits.request_timeout))
            result.add_done_callback(lambda _: has_news.set())
            try:
                last_text = ""
                while unsent or not result.done():
                    await has_news.wait()
                    while unsent:
                        partial = unsent.pop(0)
                        if not isinstance(partial, str):
                            yield format_event("segment", partial.model_dump_json())
                        elif partial != last_text and not result.done():
                            last_text = partial
                            yield format_event("text", json.dumps({"text": partial}, ensure_ascii=False))
                    has_news.clear()
                yield _format_final_event(result)
            finally:
                result.cancel()

        return events()

    async def _submit(
        self,
        request: Request,
        payload: TaskRequest,
        *,
        with_attention: bool = False,
        on_partial: Callable[[str | TaskResponse], None] | None = None,
    ) -> tuple[ServedModel, BatchJob]:
        """Add a request to the queue of its model, or raise an error immediately."""
        model, max_tokens = self._select_model(payload), self.limits.max_queue_tokens
        if with_attention:
            max_tokens = min(max_tokens, self.limits.max_attention_tokens)
        num_tokens = await self.estimator.estimate_tokens(model, request, payload, max_tokens)
        if with_attention:  # its batch key is unique: each of these requests is a batch of its own
            return model, model.batcher.submit(model.predict_with_attention, payload, num_tokens, batch_key=object())
        key = model.service.get_batch_key(payload)
        return model, model.batcher.submit(model.predict, payload, num_tokens, batch_key=key, on_partial=on_partial)

    def _select_model(self, payload: TaskRequest) -> ServedModel:
        if payload.model is None:
            return next(iter(self.models.values()))
        if payload.model not in self.models:
            names = ", ".join(self.models)
            raise HTTPException(404, f"there is no model {payload.model[:80]!r} for this task; the models are: {names}")
        return self.models[payload.model]


def _format_final_event(result: asyncio.Task[Any]) -> str:
    """Format the last event: ``done`` or ``error``."""
    try:
        return format_event("done", result.result().model_dump_json())
    except InputError as error:
        return format_error_event(format_request_error(error))
    except RequestTimeoutError as error:
        return format_error_event(error.detail)
    except Exception:
        logger.exception("a streamed request failed")
        return format_error_event(INTERNAL_ERROR_MESSAGE)


async def _cancel_on_disconnect(request: Request, result: Coroutine[Any, Any, Any]) -> Any:
    """Wait for a result, and cancel it if the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result_task = asyncio.create_task(result)
    tasks = result_task, asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not result_task.done():
            raise ClientDisconnectedError
        return result_task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
