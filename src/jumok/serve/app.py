"""The HTTP API: a FastAPI app whose requests and responses have the schemas of the tasks.

::

    GET  /                                                   web page (see jumok.serve.web_page)
    POST /translate  /classify  /tag  /answer  /fill-mask    JSON request and response; computed in batches
    POST /caption                                            the same; the body may also be an image file
    POST /speak  /speak/stream                               the response contains audio, or is a WAV file
    POST /translate/stream                                   server-sent events while the response is computed
    POST /attend/translate  …                                the response, and the URL of its attention page
    GET  /look/NAME/                                         attention page (see jumok.look.viewer.page)
    GET  /models  /openapi.json  /health  /ready  /metrics

Errors are ``{"error": …}`` with a status: 4xx if the request is wrong; 503 with Retry-After, immediately, if
the server is overloaded; 504 if the request timed out. The server never reads a path, code or pickle from a
request.
"""

# Without `from __future__ import annotations`: FastAPI reads the schemas of requests from the annotations.
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
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
from jumok.serve.limits import ServerLimits
from jumok.serve.metrics import MetricsMiddleware, ServerMetrics
from jumok.serve.request_guard import RequestGuard
from jumok.serve.request_handler import INTERNAL_ERROR_MESSAGE, RequestHandler
from jumok.serve.responses import JSON_MEDIA_TYPE, ResponseMiddleware, build_error_response
from jumok.serve.served_model import ServedModel, SizeEstimator
from jumok.tasks.api import RequestTooLarge, TaskResponse, TaskService, format_request_error

BINARY_SCHEMA = {"type": "string", "format": "binary"}
ResponseT = TypeVar("ResponseT", bound=TaskResponse)
SHUTDOWN_MARGIN_SECONDS = 0.3  # of shutdown_timeout, to reject requests and to stop the threads


class ErrorResponse(BaseModel):
    """An error message."""

    error: str


class ResponseWithAttention(BaseModel, Generic[ResponseT]):
    """The response, and the URL of its attention page."""

    prediction: ResponseT
    attention_url: str
    expires_in_seconds: float


class ModelInfo(BaseModel):
    """A served model. The keys of ``metadata`` depend on the task."""

    name: str
    task: str
    metadata: dict[str, Any]


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The body is not valid JSON."},
    401: {"model": ErrorResponse, "description": "The bearer token is missing or wrong."},
    404: {"model": ErrorResponse, "description": "There is no model with this name."},
    408: {"model": ErrorResponse, "description": "The request body arrived too slowly."},
    413: {"model": ErrorResponse, "description": "The request exceeds a limit of this server."},
    415: {"model": ErrorResponse, "description": "Unsupported media type."},
    422: {"model": ErrorResponse, "description": "A field is invalid, or the input cannot be read."},
    503: {"model": ErrorResponse, "description": "The server is overloaded; Retry-After gives the time to wait."},
    504: {"model": ErrorResponse, "description": "The request timed out."},
}


def build_app(
    services: Mapping[str, TaskService[Any, Any]],
    limits: ServerLimits | None = None,
    *,
    auth_token: str | None = None,
    allowed_hosts: Sequence[str] | None = None,
) -> FastAPI:
    """Build the app that serves these services, by model name.

    ``allowed_hosts`` are the accepted values of the Host header; None accepts all.
    """
    limits, metrics = limits or ServerLimits(), ServerMetrics()
    models = [ServedModel.from_service(name, service, limits, metrics) for name, service in services.items()]
    estimator = SizeEstimator()
    attention_pages = AttentionPages(limits.max_attention_pages, limits.attention_page_lifetime)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for model in models:
            model.batcher.start()
        yield
        # The server has already waited for all requests, and each job belongs to a request. So nobody waits
        # for the jobs that are still running.
        await asyncio.gather(*(asyncio.to_thread(model.batcher.close, SHUTDOWN_MARGIN_SECONDS / 2) for model in models))
        estimator.close()

    app = FastAPI(
        title="jumok",
        version=jumok.__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
    )
    _add_status_endpoints(app, models, metrics)
    routes: dict[str, TaskRoute] = {}
    for endpoint in dict.fromkeys(model.service.endpoint for model in models):
        task_models = {model.name: model for model in models if model.service.endpoint == endpoint}
        handler = RequestHandler(task_models, limits, estimator)
        paths = _add_task_endpoints(app, handler, attention_pages)
        routes |= dict.fromkeys(paths, _build_task_route(handler))
    app.mount("/look", attention_pages)
    web_page.add_page_routes(app)
    _add_exception_handlers(app)
    admission = AdmissionControl(routes, limits, lambda: estimator.is_full, metrics.count_refusal)
    app.state.admission = admission  # LimitedHttpProtocol uses it before it parses a request
    app.add_middleware(RequestGuard, limits=limits, admission=admission, auth_token=auth_token)
    if allowed_hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts), www_redirect=False)
    app.add_middleware(MetricsMiddleware, metrics=metrics, known_paths=routes.keys())
    app.add_middleware(ResponseMiddleware)
    return app


def _build_task_route(handler: RequestHandler) -> TaskRoute:
    limits = handler.limits
    max_body_bytes = limits.max_body_bytes
    if max_body_bytes is None:
        max_body_bytes = handler.service.request_type.max_bytes(limits.request_limits)
    return TaskRoute(max_body_bytes, [model.batcher for model in handler.models.values()])


# ---------------------------------------------------------------------------------------------- endpoints


def _add_task_endpoints(app: FastAPI, handler: RequestHandler, attention_pages: AttentionPages) -> list[str]:
    """Add the endpoints of one task, and return their paths."""
    service = handler.service
    request_type, response_type = service.request_type, service.response_type
    attention_response_type = ResponseWithAttention[response_type]  # type: ignore[valid-type]

    async def predict(request: Request, payload: request_type) -> Response:  # type: ignore[valid-type]
        response = await handler.respond(request, payload)
        media_type = response_type.media_type
        if media_type is not None and media_type in request.headers.get("accept", ""):
            return Response(response.body, media_type=media_type)
        return _build_json_response(response)

    async def attend(request: Request, payload: request_type) -> Response:  # type: ignore[valid-type]
        prediction, viewer_data = await handler.respond(request, payload, with_attention=True)
        root = request.scope.get("root_path", "")
        return _build_json_response(
            attention_response_type(
                prediction=prediction,
                attention_url=f"{root}/look/{attention_pages.add(viewer_data)}/",
                expires_in_seconds=attention_pages.lifetime,
            )
        )

    async def stream(request: Request, payload: request_type) -> Response:  # type: ignore[valid-type]
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        events = await handler.stream_events(request, payload)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    class RequestParsingRoute(APIRoute):
        """Reads requests with ``request_parsing``. FastAPI only describes the endpoint by its signature."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            async def handle(request: Request) -> Response:
                payload = await request_parsing.read_request(
                    request, request_type, handler.limits.request_limits, handler.estimator.executor
                )
                response: Response = await self.endpoint(request, payload)
                return response

            return handle

    # Media types of bodies that are a file, such as an image. Other types are rejected, so that a foreign web
    # page cannot send a request without a CORS preflight (a form, or plain text).
    file_content = {media_type: {"schema": BINARY_SCHEMA} for media_type in request_type.body_media_types}
    paths: list[str] = []

    def add_route(path: str, endpoint: Any, summary: str, **options: Any) -> None:
        paths.append(path)
        app.router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            summary=summary,
            operation_id=path.strip("/").replace("/", "_").replace("-", "_"),
            responses=ERROR_RESPONSES | options.pop("responses", {}),
            openapi_extra={"requestBody": {"content": file_content}} if file_content else None,
            route_class_override=RequestParsingRoute,
            **options,
        )

    path, summary = f"/{service.endpoint}", service.summary
    file_response: dict[int | str, dict[str, Any]] = {}
    if response_type.media_type is not None:
        file_response = {200: {"content": {response_type.media_type: {"schema": BINARY_SCHEMA}}}}
    add_route(path, predict, summary, response_model=response_type, responses=file_response)
    attention_summary = f"{summary} With the URL of an attention page."
    add_route(f"/attend{path}", attend, attention_summary, response_model=attention_response_type)
    if service.supports_streaming:
        stream_summary = f"{summary} Events: text (all text so far) or segment, then done (the response) or error."
        events: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
        add_route(f"{path}/stream", stream, stream_summary, response_class=StreamingResponse, responses=events)
    return paths


def _build_json_response(response: BaseModel) -> Response:
    return Response(response.model_dump_json(), media_type=JSON_MEDIA_TYPE)


def _add_status_endpoints(app: FastAPI, models: Sequence[ServedModel], metrics: ServerMetrics) -> None:
    """Add the endpoints that describe the models and the state of the server."""

    @app.get("/models", summary="List the models.", operation_id="models")
    async def list_models() -> list[ModelInfo]:
        return [
            ModelInfo(name=model.name, task=model.service.endpoint, metadata=model.service.describe())
            for model in models
        ]

    unavailable: dict[int | str, dict[str, Any]] = {503: ERROR_RESPONSES[503]}

    @app.get("/health", summary="Whether the server works.", operation_id="health", responses=unavailable)
    async def check_health() -> Response:
        dead_models = [model.name for model in models if not model.batcher.is_alive]
        if dead_models:
            raise HTTPException(503, f"the worker of {', '.join(dead_models)} has stopped; restart the server")
        return JSONResponse({"status": "ok"})

    @app.get("/ready", summary="Whether there is room for a request.", operation_id="ready", responses=unavailable)
    async def check_ready() -> Response:
        for model in models:
            model.batcher.check_capacity()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", summary="Prometheus metrics.", operation_id="metrics", response_class=PlainTextResponse)
    async def collect_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


# -------------------------------------------------------------------------------------------------- errors


def _add_exception_handlers(app: FastAPI) -> None:
    """Map each exception to a status and a message."""

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        return build_error_response(error)

    @app.exception_handler(InputError)
    async def handle_input_error(request: Request, error: InputError) -> Response:
        status = 413 if isinstance(error, RequestTooLarge) else 500 if isinstance(error, RunChangedError) else 422
        return build_error_response(HTTPException(status, format_request_error(error)))

    @app.exception_handler(Exception)
    async def handle_internal_error(request: Request, error: Exception) -> Response:
        return build_error_response(HTTPException(500, INTERNAL_ERROR_MESSAGE))
