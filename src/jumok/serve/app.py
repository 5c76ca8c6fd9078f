"""Models behind an HTTP API: a FastAPI app, whose requests and responses are the tasks' own schemas.

::

    GET  /                                               a page to use it by hand (see jumok.serve.page)
    POST /translate  /classify  /tag  /answer  /fill     a JSON object in, one out; many clients share batches
    POST /caption                                        the same with a picture in it; or the picture alone
    POST /speak  /speak/stream                           a text in, a recording of it out
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
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, create_model
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

import jumok
from jumok.errors import InputError
from jumok.serve import page
from jumok.serve.batcher import Closed, Late, Overloaded
from jumok.serve.desk import BROKEN, Desk, Left, Model, Reading
from jumok.serve.limits import Guard, Limits, problem
from jumok.serve.looks import Looks
from jumok.serve.measures import LEFT, Counted, Measures
from jumok.tasks.served import Service, TooMuch, told

__all__ = ["app"]

JSON = "application/json"
BINARY = {"type": "string", "format": "binary"}
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
    415: {"model": Problem, "description": "The body is of another kind than is read here."},
    422: {"model": Problem, "description": "A field is wrong, or the text cannot be read."},
    503: {"model": Problem, "description": "Too much to do; Retry-After says when to try again."},
    504: {"model": Problem, "description": "The answer took too long."},
}


def app(
    services: Mapping[str, Service[Any, Any]],
    limits: Limits | None = None,
    *,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
) -> FastAPI:
    """Services by the names of their models. Only requests to these ``hosts`` are answered; None: to any."""
    limits, measures = _fitting(limits or Limits(), services.values()), Measures()
    models = [Model.of(name, service, limits, measures) for name, service in services.items()]
    reading = Reading()
    looks = Looks(limits.looks, limits.look_seconds)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for model in models:
            model.batcher.start()
        yield
        await asyncio.gather(*(asyncio.to_thread(model.batcher.close, limits.grace) for model in models))
        reading.close()

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
    page.add(made)
    _add_refusals(made)
    made.add_middleware(Guard, limits=limits, token=token)
    if hosts is not None:
        made.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    made.add_middleware(Counted, measures=measures)
    return made


def _fitting(limits: Limits, services: Iterable[Service[Any, Any]]) -> Limits:
    """With a limit on bodies that lets the largest request in: a picture, where pictures are described."""
    if limits.body is not None:
        return limits
    return replace(limits, body=max(service.Request.most_bytes(limits.bounds) for service in services))


# ---------------------------------------------------------------------------------------------- endpoints


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
        found = await desk.answer(request, asked)
        if response.media is not None and response.media in request.headers.get("accept", ""):
            return Response(found.body, media_type=response.media)
        return found

    async def attend(request: Request, asked: schema) -> Any:  # type: ignore[valid-type]
        prediction, scenes = await desk.attend(request, asked)
        root = request.scope.get("root_path", "")
        look = f"{root}/look/{looks.add(scenes)}/"
        return {"prediction": prediction, "look": look, "seconds": looks.seconds}

    async def stream(asked: schema) -> Response:  # type: ignore[valid-type]
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(await desk.stream(asked), media_type="text/event-stream", headers=headers)

    # The thing itself as the body: FastAPI hands on the bytes of what is not called JSON, and the schema
    # takes them. Nothing else is let through, so that a page from elsewhere cannot send what a browser sends
    # without asking first (a form, plain text).
    kinds = {kind: {"schema": BINARY} for kind in schema.bodies}

    def known(request: Request) -> None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (JSON, *schema.bodies) and not kind.endswith("+json"):
            expected = " or ".join((JSON, *schema.bodies))
            raise HTTPException(415, f"Content-Type: {kind[:80] or 'none'} came; expected {expected}")

    def add(path: str, does: Any, says: str, **more: Any) -> None:
        name = path.strip("/").replace("/", "_")
        app.add_api_route(
            path,
            does,
            methods=["POST"],
            summary=says,
            operation_id=name,
            responses=REFUSALS | more.pop("responses", {}),
            dependencies=[Depends(known)],
            openapi_extra={"requestBody": {"content": kinds}} if kinds else None,
            **more,
        )

    other = {} if response.media is None else {200: {"content": {response.media: {"schema": BINARY}}}}
    add(f"/{task}", answer, service.says, response_model=response, responses=other)
    add(f"/attend/{task}", attend, f"{service.says} With a page of its maps.", response_model=attended)
    if service.streams:
        says = f"{service.says} Events: text, so far, or part; at the end done, the answer, or error."
        events: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
        add(f"/{task}/stream", stream, says, response_class=StreamingResponse, responses=events)


def _add_state(app: FastAPI, models: Sequence[Model], measures: Measures) -> None:
    """How the server is."""

    @app.get("/models", summary="What is served.", operation_id="models")
    async def listed() -> list[About]:
        return [
            About(name=model.name, task=model.service.task, about=model.service.about()) for model in models
        ]

    busy: dict[int | str, dict[str, Any]] = {503: REFUSALS[503]}

    @app.get("/health", summary="Whether the server works.", operation_id="health", responses=busy)
    async def health() -> Response:
        dead = [model.name for model in models if not model.batcher.alive]
        if dead:
            return problem(503, f"the worker of {', '.join(dead)} has ended; restart the server")
        return JSONResponse({"status": "ok"})

    @app.get("/ready", summary="Whether there is room for a request.", operation_id="ready", responses=busy)
    async def ready() -> Response:
        for model in models:
            model.batcher.check()
        return JSONResponse({"status": "ready"})

    @app.get(
        "/metrics",
        summary="Figures for Prometheus.",
        operation_id="metrics",
        response_class=PlainTextResponse,
    )
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
        return problem(500, BROKEN)


def _fault(fault: dict[str, Any]) -> str:
    """One fault of a request, without what came: that may be anything."""
    if fault["type"] == "json_invalid":
        return f"the request is no JSON: {fault.get('ctx', {}).get('error', 'it ends too early')}"
    where = ".".join(str(part)[:80] for part in fault["loc"][1:])
    if fault["type"] == "missing" and not where:
        return "the request is empty; its body is required"
    said = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
