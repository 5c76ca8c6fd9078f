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
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, create_model
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

import jumok
from jumok.errors import InputError
from jumok.serve import page, reading
from jumok.serve.admission import Admission, TaskRoute
from jumok.serve.batcher import Closed, Late, Overloaded
from jumok.serve.desk import BROKEN, Desk, Left, Model, SizeEstimator
from jumok.serve.limits import Guard, Limits
from jumok.serve.looks import Looks
from jumok.serve.measures import LEFT, Counted, Measures
from jumok.serve.responses import UniformResponses, overload, problem
from jumok.tasks.engines import ChangedRun
from jumok.tasks.served import Service, TooMuch, told

__all__ = ["SETTLE", "app"]

JSON = "application/json"
BINARY = {"type": "string", "format": "binary"}
SETTLE = 0.3  # seconds at the end of a shutdown, for refusals and for threads to end


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
    limits, measures = limits or Limits(), Measures()
    models = [Model.of(name, service, limits, measures) for name, service in services.items()]
    estimator = SizeEstimator()
    looks = Looks(limits.looks, limits.look_seconds)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for model in models:
            model.batcher.start()
        yield
        # Every job has a request that waits for it, and the server has waited for all requests: whatever is
        # computed now, nobody gets.
        await asyncio.gather(*(asyncio.to_thread(model.batcher.close, SETTLE / 2) for model in models))
        estimator.close()

    made = FastAPI(
        title="jumok",
        version=jumok.__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    _add_state(made, models, measures)
    tasks = dict.fromkeys(model.service.task for model in models)
    routes: dict[str, TaskRoute] = {}
    for task in tasks:
        some = {model.name: model for model in models if model.service.task == task}
        desk = Desk(some, limits, estimator)
        routes |= dict.fromkeys(_add_task(made, desk, looks), _task_route(desk))
    made.mount("/look", looks)
    page.add(made)
    _add_refusals(made)
    admission = Admission(routes, limits.requests, lambda: estimator.is_full, measures.count_refusal)
    made.state.admission = admission  # the protocol asks it before it parses a request
    made.add_middleware(Guard, limits=limits, admission=admission, token=token)
    if hosts is not None:
        made.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    made.add_middleware(Counted, measures=measures, paths=routes.keys())
    made.add_middleware(UniformResponses)
    return made


def _task_route(desk: Desk) -> TaskRoute:
    limits = desk.limits
    most = desk.service.Request.most_bytes(limits.bounds) if limits.body is None else limits.body
    return TaskRoute(most, [model.batcher for model in desk.models.values()])


# ---------------------------------------------------------------------------------------------- endpoints


def _add_task(app: FastAPI, desk: Desk, looks: Looks) -> list[str]:
    """Add the endpoints of one task; gives their paths."""
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

    async def answer(request: Request, asked: schema) -> Response:  # type: ignore[valid-type]
        found = await desk.answer(request, asked)
        if response.media is not None and response.media in request.headers.get("accept", ""):
            return Response(found.body, media_type=response.media)
        return _json(found)

    async def attend(request: Request, asked: schema) -> Response:  # type: ignore[valid-type]
        prediction, scenes = await desk.attend(request, asked)
        root = request.scope.get("root_path", "")
        look = f"{root}/look/{looks.add(scenes)}/"
        return _json(attended(prediction=prediction, look=look, seconds=looks.seconds))

    async def stream(request: Request, asked: schema) -> Response:  # type: ignore[valid-type]
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            await desk.stream(request, asked), media_type="text/event-stream", headers=headers
        )

    class ReadingRoute(APIRoute):
        """FastAPI describes the route by the signature of its endpoint; the request is read by us."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            async def handle(request: Request) -> Response:
                asked = await reading.read(request, schema, desk.limits.bounds, desk.estimator.thread)
                found: Response = await self.endpoint(request, asked)
                return found

            return handle

    # The thing itself as the body, such as a picture. No other media types are let through, so that a page
    # from elsewhere cannot send what a browser sends without asking first (a form, plain text).
    kinds = {kind: {"schema": BINARY} for kind in schema.bodies}
    paths: list[str] = []

    def add(path: str, does: Any, says: str, **more: Any) -> None:
        name = path.strip("/").replace("/", "_")
        paths.append(path)
        app.router.add_api_route(
            path,
            does,
            methods=["POST"],
            summary=says,
            operation_id=name,
            responses=REFUSALS | more.pop("responses", {}),
            openapi_extra={"requestBody": {"content": kinds}} if kinds else None,
            route_class_override=ReadingRoute,
            **more,
        )

    other = {} if response.media is None else {200: {"content": {response.media: {"schema": BINARY}}}}
    add(f"/{task}", answer, service.says, response_model=response, responses=other)
    add(f"/attend/{task}", attend, f"{service.says} With a page of its maps.", response_model=attended)
    if service.streams:
        says = f"{service.says} Events: text, so far, or part; at the end done, the answer, or error."
        events: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
        add(f"/{task}/stream", stream, says, response_class=StreamingResponse, responses=events)
    return paths


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type=JSON)


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

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), **(error.headers or {}))

    @app.exception_handler(TooMuch)
    async def too_much(request: Request, error: TooMuch) -> Response:
        return problem(413, told(error))

    @app.exception_handler(InputError)
    async def unreadable(request: Request, error: InputError) -> Response:
        return problem(422, told(error))

    @app.exception_handler(ChangedRun)
    async def changed(request: Request, error: ChangedRun) -> Response:
        return problem(500, str(error))

    @app.exception_handler(Closed)
    @app.exception_handler(Overloaded)
    async def overloaded(request: Request, error: Overloaded | Closed) -> Response:
        return overload(error)

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
