"""Models behind an HTTP API: a FastAPI app, whose requests and responses are the tasks' own schemas.

::

    POST /translate  /classify  /tag  /answer  /fill     a JSON object in, one out; many clients share batches
    POST /translate/stream                               the same as server-sent events, while it is made
    POST /attend/translate  …                            the answer, and the address of a page of its maps
    GET  /look/NAME/                                     that page, with its tiles (see jumok.look.page)
    GET  /models  /openapi.json  /health  /ready  /metrics

Whatever is refused is answered with ``{"error": …}``: 4xx what was wrong with the request; 503 with
Retry-After, at once, when there is too much to do; 504 when an answer took too long. No path, code or pickle
is ever taken from a request.
"""

# Annotations are evaluated here: FastAPI reads the schemas of requests from them.
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, create_model
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

import jumok
from jumok.errors import InputError
from jumok.serve.batcher import Batcher, Closed, Job, Late, Overloaded
from jumok.serve.limits import Guard, Limits, problem
from jumok.serve.looks import Looks
from jumok.serve.measures import LEFT, Counted, Measures
from jumok.tasks.served import Asked, Service, TooMuch, told

__all__ = ["app"]

SHOWN = 5  # faults of one request that are told


class Problem(BaseModel):
    """What was wrong, in words."""

    error: str


class About(BaseModel):
    """A model that is served."""

    name: str
    task: str
    about: dict[str, Any]


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "No JSON."},
    401: {"model": Problem, "description": "The token is missing or wrong."},
    404: {"model": Problem, "description": "There is no model of this name."},
    408: {"model": Problem, "description": "The request did not come in time."},
    413: {"model": Problem, "description": "The request asks for more than this server gives."},
    422: {"model": Problem, "description": "A field is wrong, or the text cannot be read."},
    503: {"model": Problem, "description": "Too much to do; Retry-After says when to try again."},
    504: {"model": Problem, "description": "The answer took too long."},
}


class Left(Exception):
    """The client closed the connection."""


def app(
    services: Mapping[str, Service[Any, Any]],
    limits: Limits | None = None,
    *,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
) -> FastAPI:
    """Services by the names of their models. Only requests to these ``hosts`` are answered; None: to any."""
    limits, measures = limits or Limits(), Measures()
    models = [_model(name, service, limits, measures) for name, service in services.items()]
    reading = ThreadPoolExecutor(1, "reading")  # tokenizers; apart from the models, which are busy
    looks = Looks(limits.looks, limits.look_seconds)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for model in models:
            model.batcher.start()
        yield
        await asyncio.gather(*(asyncio.to_thread(model.batcher.close, limits.grace) for model in models))
        reading.shutdown(wait=False)

    made = FastAPI(
        title="jumok",
        version=jumok.__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    _add_state(made, models, measures)
    tasks = dict.fromkeys(model.service.task for model in models)
    for task in tasks:
        some = {model.name: model for model in models if model.service.task == task}
        _add_task(made, Desk(some, limits, reading), looks)
    made.mount("/look", looks)
    _add_refusals(made)
    made.add_middleware(Guard, limits=limits, token=token)
    if hosts is not None:
        made.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    made.add_middleware(Counted, measures=measures)
    return made


# ------------------------------------------------------------------------------------------------- a model


@dataclass(frozen=True, eq=False)
class Model:
    """A service, and the thread that does its work."""

    name: str
    service: Service[Any, Any]
    batcher: Batcher

    def predict(self, jobs: Sequence[Job]) -> Sequence[Any]:
        """Work for the batcher: the answers."""
        return self.service.predict([job.asked for job in jobs], _Audience(jobs))

    def attend(self, jobs: Sequence[Job]) -> Sequence[Any]:
        """Work for the batcher: answers, each with what was looked at."""
        return [(self.predict([job])[0], self.service.look(job.asked)) for job in jobs]


def _model(name: str, service: Service[Any, Any], limits: Limits, measures: Measures) -> Model:
    batcher = Batcher(
        tokens=limits.batch,
        most=limits.queue,
        wait=limits.wait,
        computed=measures.computed(name),
        name=f"model {name}",
    )
    measures.watch(name, lambda: batcher.held, lambda: batcher.waiting)
    return Model(name, service, batcher)


class _Audience:
    """Those who wait for some jobs."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs

    def gone(self, number: int) -> bool:
        return self.jobs[number].gone

    def hears(self, number: int) -> bool:
        return self.jobs[number].heard is not None and not self.jobs[number].gone

    def heard(self, number: int, text: str) -> None:
        job = self.jobs[number]
        if (heard := job.heard) is not None:
            job.tell(lambda: heard(text))


# -------------------------------------------------------------------------------------------------- a task


@dataclass(frozen=True)
class Desk:
    """The models of one task, and the way of a request to one of them."""

    models: Mapping[str, Model]
    limits: Limits
    reading: ThreadPoolExecutor

    @property
    def service(self) -> Service[Any, Any]:
        """The first, to know their schemas by."""
        return next(iter(self.models.values())).service

    def model(self, asked: Asked) -> Model:
        if asked.model is None:
            return next(iter(self.models.values()))
        if asked.model not in self.models:
            known = ", ".join(self.models)
            raise HTTPException(
                404, f"there is no model {asked.model[:80]!r} of this task; there are: {known}"
            )
        return self.models[asked.model]

    async def answer(self, request: Request, asked: Asked) -> Any:
        """The answer, unless the client leaves before."""
        model = self.model(asked)
        size = await self._size(model, asked, self.limits.queue)
        job = model.batcher.submit(model.predict, asked, size, alike=model.service.alike(asked))
        return await _unless_gone(request, model.batcher.answer(job, self.limits.seconds))

    async def attend(self, request: Request, asked: Asked) -> Any:
        """The answer, and what was looked at."""
        model = self.model(asked)
        size = await self._size(model, asked, min(self.limits.look, self.limits.queue))
        job = model.batcher.submit(model.attend, asked, size, alike=object())  # each alone
        return await _unless_gone(request, model.batcher.answer(job, self.limits.seconds))

    async def stream(self, asked: Asked) -> AsyncIterator[str]:
        """Events; what is refused is refused before the first one."""
        model = self.model(asked)
        size = await self._size(model, asked, self.limits.queue)
        latest, changed = "", asyncio.Event()

        def heard(text: str) -> None:
            nonlocal latest
            latest = text  # a slow reader gets the last of several
            changed.set()

        job = model.batcher.submit(model.predict, asked, size, alike=model.service.alike(asked), heard=heard)

        async def events() -> AsyncIterator[str]:
            answer = asyncio.create_task(model.batcher.answer(job, self.limits.seconds))
            answer.add_done_callback(lambda _: changed.set())
            try:
                said = ""
                while not answer.done():
                    await changed.wait()
                    changed.clear()
                    if latest != said and not answer.done():
                        said = latest
                        yield _event("text", json.dumps({"text": said}, ensure_ascii=False))
                try:
                    whole = await answer
                except (Late, InputError) as error:
                    yield _event("error", json.dumps({"error": str(error)}, ensure_ascii=False))
                else:
                    yield _event("done", whole.model_dump_json())
            finally:
                answer.cancel()

        return events()

    async def _size(self, model: Model, asked: Asked, most: int) -> int:
        model.batcher.check()  # before anything is done for it
        size = await asyncio.get_running_loop().run_in_executor(self.reading, model.service.size, asked)
        if size > most:
            raise TooMuch(f"this would be {size:,} tokens of work; {most:,} are taken at most: shorten it")
        return size


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


def _add_task(app: FastAPI, desk: Desk, looks: Looks) -> None:
    """The endpoints of one task."""
    service = desk.service
    schema, response, task = service.Request, service.Response, service.task
    attended = create_model(
        f"Attended{response.__name__}",
        __base__=BaseModel,
        prediction=(response, ...),
        look=(str, ...),
        seconds=(float, ...),
    )
    attended.__doc__ = "The answer; the address of a page of its maps, and how long that is kept."

    async def answer(request: Request, asked: schema) -> Any:  # type: ignore[valid-type]
        return await desk.answer(request, asked)

    async def attend(request: Request, asked: schema) -> Any:  # type: ignore[valid-type]
        prediction, scenes = await desk.attend(request, asked)
        root = request.scope.get("root_path", "")
        look = f"{root}/look/{looks.add(scenes)}/"
        return {"prediction": prediction, "look": look, "seconds": looks.seconds}

    async def stream(asked: schema) -> Response:  # type: ignore[valid-type]
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(await desk.stream(asked), media_type="text/event-stream", headers=headers)

    def add(path: str, does: Any, says: str, **more: Any) -> None:
        name = path.strip("/").replace("/", "_")
        responses = REFUSALS | more.pop("responses", {})
        app.add_api_route(
            path, does, methods=["POST"], summary=says, operation_id=name, responses=responses, **more
        )

    add(f"/{task}", answer, service.says, response_model=response)
    add(f"/attend/{task}", attend, f"{service.says} With a page of its maps.", response_model=attended)
    if service.streams:
        says = f"{service.says} Events: text, so far; at the end done, the answer, or error."
        events = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
        add(f"/{task}/stream", stream, says, response_class=StreamingResponse, responses=events)


def _add_state(app: FastAPI, models: Sequence[Model], measures: Measures) -> None:
    """How the server is."""

    @app.get("/models", summary="What is served.", operation_id="models")
    async def listed() -> list[About]:
        return [
            About(name=model.name, task=model.service.task, about=model.service.about()) for model in models
        ]

    @app.get("/health", summary="Whether the server works.", operation_id="health")
    async def health() -> Response:
        dead = [model.name for model in models if not model.batcher.alive]
        if dead:
            return problem(503, f"the worker of {', '.join(dead)} has ended; restart the server")
        return JSONResponse({"status": "ok"})

    @app.get("/ready", summary="Whether there is room for a request.", operation_id="ready")
    async def ready() -> Response:
        for model in models:
            model.batcher.check()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", summary="Figures for Prometheus.", operation_id="metrics")
    async def metrics() -> Response:
        return Response(generate_latest(measures.registry), media_type=CONTENT_TYPE_LATEST)


# ------------------------------------------------------------------------------------------------ refusals


def _add_refusals(app: FastAPI) -> None:
    """Every error as a status and a few words."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        faults = error.errors()
        no_json = any(fault["type"] == "json_invalid" for fault in faults)
        return problem(400 if no_json else 422, "; ".join(map(_fault, faults[:SHOWN])))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), **(error.headers or {}))

    @app.exception_handler(TooMuch)
    async def too_much(request: Request, error: TooMuch) -> Response:
        return problem(413, str(error))

    @app.exception_handler(InputError)
    async def unreadable(request: Request, error: InputError) -> Response:
        return problem(422, told(error))

    @app.exception_handler(Overloaded)
    async def overloaded(request: Request, error: Overloaded) -> Response:
        return problem(503, str(error), **{"Retry-After": str(error.retry)})

    @app.exception_handler(Closed)
    async def closed(request: Request, error: Closed) -> Response:
        return problem(503, str(error), **{"Retry-After": "1", "Connection": "close"})

    @app.exception_handler(Late)
    async def late(request: Request, error: Late) -> Response:
        if error.begun:
            return problem(504, str(error))
        return problem(503, str(error), **{"Retry-After": str(error.retry)})

    @app.exception_handler(Left)
    async def left(request: Request, error: Left) -> Response:
        return Response(status_code=LEFT)  # nobody reads it; it is counted

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return problem(500, "something is broken here; the server's log says what")


def _fault(fault: dict[str, Any]) -> str:
    """One fault of a request, without what came: that may be anything."""
    if fault["type"] == "json_invalid":
        return f"the request is no JSON: {fault.get('ctx', {}).get('error', 'it ends too early')}"
    said = fault["msg"].removeprefix("Value error, ")
    where = ".".join(str(part)[:80] for part in fault["loc"][1:])
    return f"{where}: {said}" if where else said
