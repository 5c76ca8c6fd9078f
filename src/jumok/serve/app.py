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
from jumok.inference.engines import RunChangedError
from jumok.serve import request_parsing, web_page
from jumok.serve.admission import AdmissionControl, TaskRoute
from jumok.serve.attention_pages import AttentionPages
from jumok.serve.batcher import OverloadedError, RequestTimeoutError, ServerClosingError
from jumok.serve.limits import RequestGuard, ServerLimits
from jumok.serve.metrics import CLIENT_CLOSED_REQUEST, MetricsMiddleware, ServerMetrics
from jumok.serve.request_handler import (
    INTERNAL_ERROR_MESSAGE,
    ClientDisconnectedError,
    RequestHandler,
    ServedModel,
    SizeEstimator,
)
from jumok.serve.responses import ResponseMiddleware, build_error_response, build_overload_response
from jumok.tasks.api import RequestTooLarge, TaskService, format_request_error

__all__ = ["SHUTDOWN_MARGIN_SECONDS", "build_app"]

JSON_MEDIA_TYPE = "application/json"
BINARY_SCHEMA = {"type": "string", "format": "binary"}
SHUTDOWN_MARGIN_SECONDS = 0.3  # seconds at the end of a shutdown, for refusals and for threads to end


class ErrorResponse(BaseModel):
    """What was wrong, in words."""

    error: str


class ModelInfo(BaseModel):
    """A model that is served."""

    name: str
    task: str
    metadata: dict[str, Any]


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "No JSON."},
    401: {"model": ErrorResponse, "description": "The token is missing or wrong."},
    404: {"model": ErrorResponse, "description": "There is no model of this name."},
    408: {"model": ErrorResponse, "description": "The request did not come in time."},
    413: {"model": ErrorResponse, "description": "The request asks for more than this server gives."},
    415: {"model": ErrorResponse, "description": "The body is of another kind than is read here."},
    422: {"model": ErrorResponse, "description": "A field is wrong, or the text cannot be read."},
    503: {"model": ErrorResponse, "description": "Too much to do; Retry-After says when to try again."},
    504: {"model": ErrorResponse, "description": "The answer took too long."},
}


def build_app(
    services: Mapping[str, TaskService[Any, Any]],
    limits: ServerLimits | None = None,
    *,
    auth_token: str | None = None,
    allowed_hosts: Sequence[str] | None = None,
) -> FastAPI:
    """Services by the names of their models. Only requests to these ``allowed_hosts`` are answered; None: to any."""
    limits, measures = limits or ServerLimits(), ServerMetrics()
    models = [ServedModel.from_service(name, service, limits, measures) for name, service in services.items()]
    estimator = SizeEstimator()
    looks = AttentionPages(limits.max_attention_pages, limits.attention_page_lifetime)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for model in models:
            model.batcher.start()
        yield
        # Every job has a request that waits for it, and the server has waited for all requests: whatever is
        # computed now, nobody gets.
        await asyncio.gather(
            *(asyncio.to_thread(model.batcher.close, SHUTDOWN_MARGIN_SECONDS / 2) for model in models)
        )
        estimator.close()

    made = FastAPI(
        title="jumok",
        version=jumok.__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    _add_status_endpoints(made, models, measures)
    tasks = dict.fromkeys(model.service.endpoint for model in models)
    routes: dict[str, TaskRoute] = {}
    for task in tasks:
        some = {model.name: model for model in models if model.service.endpoint == task}
        desk = RequestHandler(some, limits, estimator)
        routes |= dict.fromkeys(_add_task_endpoints(made, desk, looks), _build_task_route(desk))
    made.mount("/look", looks)
    web_page.add_page_routes(made)
    _add_exception_handlers(made)
    admission = AdmissionControl(
        routes, limits.max_requests, lambda: estimator.is_full, measures.count_refusal
    )
    made.state.admission = admission  # the protocol asks it before it parses a request
    made.add_middleware(RequestGuard, limits=limits, admission=admission, auth_token=auth_token)
    if allowed_hosts is not None:
        made.add_middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts), www_redirect=False)
    made.add_middleware(MetricsMiddleware, metrics=measures, known_paths=routes.keys())
    made.add_middleware(ResponseMiddleware)
    return made


def _build_task_route(handler: RequestHandler) -> TaskRoute:
    limits = handler.limits
    most = (
        handler.service.request_type.most_bytes(limits.request_limits)
        if limits.max_body_bytes is None
        else limits.max_body_bytes
    )
    return TaskRoute(most, [model.batcher for model in handler.models.values()])


# ---------------------------------------------------------------------------------------------- endpoints


def _add_task_endpoints(app: FastAPI, handler: RequestHandler, attention_pages: AttentionPages) -> list[str]:
    """Add the endpoints of one task; gives their paths."""
    service = handler.service
    schema, response, task = service.request_type, service.response_type, service.endpoint
    attended = create_model(
        f"Attended{response.__name__}",
        __base__=BaseModel,
        prediction=(response, ...),
        look=(str, ...),
        seconds=(float, ...),
    )
    attended.__doc__ = "The answer; the address of a page of its maps, and how long that is kept."

    async def answer(request: Request, asked: schema) -> Response:  # type: ignore[valid-type]
        found = await handler.respond(request, asked)
        if response.media is not None and response.media in request.headers.get("accept", ""):
            return Response(found.body, media_type=response.media)
        return _build_json_response(found)

    async def attend(request: Request, asked: schema) -> Response:  # type: ignore[valid-type]
        prediction, scenes = await handler.respond_with_attention(request, asked)
        root = request.scope.get("root_path", "")
        look = f"{root}/look/{attention_pages.add(scenes)}/"
        return _build_json_response(
            attended(prediction=prediction, look=look, seconds=attention_pages.lifetime)
        )

    async def stream(request: Request, asked: schema) -> Response:  # type: ignore[valid-type]
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            await handler.stream_events(request, asked), media_type="text/event-stream", headers=headers
        )

    class ReadingRoute(APIRoute):
        """FastAPI describes the route by the signature of its endpoint; the request is read by us."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            async def handle(request: Request) -> Response:
                asked = await request_parsing.read_request(
                    request, schema, handler.limits.request_limits, handler.estimator.executor
                )
                found: Response = await self.endpoint(request, asked)
                return found

            return handle

    # The thing itself as the body, such as a picture. No other media types are let through, so that a page
    # from elsewhere cannot send what a browser sends without asking first (a form, plain text).
    kinds = {kind: {"schema": BINARY_SCHEMA} for kind in schema.bodies}
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
            responses=ERROR_RESPONSES | more.pop("responses", {}),
            openapi_extra={"requestBody": {"content": kinds}} if kinds else None,
            route_class_override=ReadingRoute,
            **more,
        )

    other = {} if response.media is None else {200: {"content": {response.media: {"schema": BINARY_SCHEMA}}}}
    add(f"/{task}", answer, service.summary, response_model=response, responses=other)
    add(f"/attend/{task}", attend, f"{service.summary} With a page of its maps.", response_model=attended)
    if service.supports_streaming:
        says = f"{service.summary} Events: text, so far, or part; at the end done, the answer, or error."
        events: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
        add(f"/{task}/stream", stream, says, response_class=StreamingResponse, responses=events)
    return paths


def _build_json_response(response: BaseModel) -> Response:
    return Response(response.model_dump_json(), media_type=JSON_MEDIA_TYPE)


def _add_status_endpoints(app: FastAPI, models: Sequence[ServedModel], server_metrics: ServerMetrics) -> None:
    """How the server is."""

    @app.get("/models", summary="What is served.", operation_id="models")
    async def listed() -> list[ModelInfo]:
        return [
            ModelInfo(name=model.name, task=model.service.endpoint, metadata=model.service.describe())
            for model in models
        ]

    busy: dict[int | str, dict[str, Any]] = {503: ERROR_RESPONSES[503]}

    @app.get("/health", summary="Whether the server works.", operation_id="health", responses=busy)
    async def health() -> Response:
        dead = [model.name for model in models if not model.batcher.is_alive]
        if dead:
            return build_error_response(503, f"the worker of {', '.join(dead)} has ended; restart the server")
        return JSONResponse({"status": "ok"})

    @app.get("/ready", summary="Whether there is room for a request.", operation_id="ready", responses=busy)
    async def ready() -> Response:
        for model in models:
            model.batcher.check_capacity()
        return JSONResponse({"status": "ready"})

    @app.get(
        "/metrics",
        summary="Figures for Prometheus.",
        operation_id="metrics",
        response_class=PlainTextResponse,
    )
    async def metrics() -> Response:
        return Response(generate_latest(server_metrics.registry), media_type=CONTENT_TYPE_LATEST)


# ------------------------------------------------------------------------------------------------ refusals


def _add_exception_handlers(app: FastAPI) -> None:
    """Every error as a status and a few words."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return build_error_response(error.status_code, str(error.detail), **(error.headers or {}))

    @app.exception_handler(RequestTooLarge)
    async def too_much(request: Request, error: RequestTooLarge) -> Response:
        return build_error_response(413, format_request_error(error))

    @app.exception_handler(InputError)
    async def unreadable(request: Request, error: InputError) -> Response:
        return build_error_response(422, format_request_error(error))

    @app.exception_handler(RunChangedError)
    async def changed(request: Request, error: RunChangedError) -> Response:
        return build_error_response(500, str(error))

    @app.exception_handler(ServerClosingError)
    @app.exception_handler(OverloadedError)
    async def overloaded(request: Request, error: OverloadedError | ServerClosingError) -> Response:
        return build_overload_response(error)

    @app.exception_handler(RequestTimeoutError)
    async def late(request: Request, error: RequestTimeoutError) -> Response:
        if error.has_started:
            return build_error_response(504, str(error))
        return build_error_response(503, str(error), **{"Retry-After": str(error.retry_after)})

    @app.exception_handler(ClientDisconnectedError)
    async def left(request: Request, error: ClientDisconnectedError) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it; it is counted

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return build_error_response(500, INTERNAL_ERROR_MESSAGE)
