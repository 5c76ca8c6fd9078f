"""The viewer as a web page with live tiles: an ASGI app, to run alone or to mount under a prefix.

>>> build_app(data)  # doctest: +SKIP
>>> Starlette(routes=[Mount("/look", build_app(data))])  # doctest: +SKIP

Routes: ``/`` is the page, ``/viewer.js`` and ``/viewer.css`` its parts, ``/manifest.json`` describes the
data, and ``/tiles?layer=0&head=3&rows=0,256&cols=0,256`` returns weights, packed as in
:mod:`jumok.look.viewer.tiles`. ``POST /resynthesize`` takes ``{"data": 0, "weights": […]}`` and returns the
manifest of the speech synthesised with these style token weights. An invalid request gets status 400 and
``{"error": …}``; a synthesis gets 503 while too many others wait. No path on disk is ever taken from a
request.
"""

from __future__ import annotations

import html
import json
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jumok.errors import InputError, MissingExtra
from jumok.look.viewer import assets
from jumok.look.viewer.tiles import TileRequest
from jumok.look.viewer.viewer_data import ViewerData, as_viewer_data_tuple
from jumok.look.viewer.viewer_session import ViewerSession

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

TILE_CACHE_BYTES = 64 << 20
MAX_BODY_BYTES = 1 << 16  # of a synthesis request
MAX_WAITING = 4  # synthesis requests at a time, including the one in progress
MISSING_EXTRA_MESSAGE = (
    'the viewer\'s page needs starlette and uvicorn, which are not installed: pip install "jumok[look]"'
)
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


def build_app(
    viewer_data: ViewerData | Sequence[ViewerData], *, cache_bytes: int | None = None, can_resynthesize: bool = False
) -> Starlette:
    """Build the app that shows one item of viewer data, or two to compare.

    Recent tiles are cached, up to ``cache_bytes``. ``can_resynthesize``: allow speech synthesis. It runs
    immediately, regardless of any request queue of the server.
    """
    try:
        from anyio import CapacityLimiter, Lock, to_thread
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route
    except ModuleNotFoundError as error:
        raise MissingExtra(MISSING_EXTRA_MESSAGE) from error

    items = as_viewer_data_tuple(viewer_data)
    session = ViewerSession(items if can_resynthesize else [replace(item, resynthesize=None) for item in items])
    manifest = _encode_json(session.build_manifest())
    tiles = _TileCache(session, cache_bytes)
    waiting: set[Request] = set()
    # Tiles have a thread of their own, and requests wait for it here: they occupy no threads of others.
    compute_lock, limiter = Lock(), CapacityLimiter(1)

    async def get_page(request: Request) -> Response:
        base = request.scope.get("root_path", "").rstrip("/")
        return Response(
            _render_page(base),
            media_type="text/html",
            headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY, **SECURITY_HEADERS},
        )

    async def get_manifest(request: Request) -> Response:
        return Response(manifest, media_type="application/json", headers=SECURITY_HEADERS)

    async def get_tile(request: Request) -> Response:
        tile_request = TileRequest.from_mapping(request.query_params)
        if (data := tiles.get_cached(tile_request)) is None:
            async with compute_lock:
                # The client may have gone while this request waited.
                if await request.is_disconnected():
                    return Response(status_code=499, headers=SECURITY_HEADERS)
                data = await to_thread.run_sync(tiles.get_or_compute, tile_request, limiter=limiter)
        return Response(data, media_type="application/octet-stream", headers=SECURITY_HEADERS)

    async def resynthesize(request: Request) -> Response:
        if len(waiting) >= MAX_WAITING:
            return build_error(503, "other requests are waiting for speech synthesis; try again in a moment")
        waiting.add(request)
        try:
            payload = await _read_json_body(request)
            new_manifest = await to_thread.run_sync(tiles.resynthesize, payload, limiter=limiter)
        finally:
            waiting.discard(request)
        return Response(_encode_json(new_manifest), media_type="application/json", headers=SECURITY_HEADERS)

    def build_error(status: int, message: str) -> Response:
        return JSONResponse({"error": message}, status_code=status, headers=SECURITY_HEADERS)

    def handle_input_error(request: Request, error: Exception) -> Response:
        return build_error(400, str(error))

    def build_file_route(path: str, text: str, media_type: str) -> Route:
        async def get_file(request: Request) -> Response:
            return Response(text, media_type=media_type, headers=SECURITY_HEADERS)

        return Route(path, get_file)

    return Starlette(
        routes=[
            Route("/", get_page),
            Route("/manifest.json", get_manifest),
            Route("/tiles", get_tile),
            Route("/resynthesize", resynthesize, methods=["POST"]),
            build_file_route("/viewer.js", assets.build_script("look/viewer/static/boot_page.js"), "text/javascript"),
            build_file_route("/viewer.css", assets.build_style_sheet(include_page=True), "text/css"),
        ],
        exception_handlers={InputError: handle_input_error},
    )


def serve(
    viewer_data: ViewerData | Sequence[ViewerData],
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    open_browser: bool = True,
) -> None:
    """Serve the page until Ctrl+C. Only requests to this host are answered."""
    try:
        import uvicorn
        from starlette.middleware.trustedhost import TrustedHostMiddleware
    except ModuleNotFoundError as error:
        raise MissingExtra(MISSING_EXTRA_MESSAGE) from error
    app = build_app(viewer_data, can_resynthesize=True)
    if host in ("127.0.0.1", "localhost", "::1"):
        # Otherwise a foreign page could point its own host name here and read what is shown.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    address = f"http://{'localhost' if host in ('127.0.0.1', '::1') else host}:{port}/"
    print(f"Viewer: {address} (press Ctrl+C to stop)", flush=True)
    if open_browser:
        threading.Timer(0.6, webbrowser.open, (address,)).start()
    uvicorn.run(app, host=host, port=port, log_level="warning")


class _TileCache:
    """Cache of recent tiles, which are computed one at a time, as they share one device."""

    def __init__(self, session: ViewerSession, max_bytes: int | None = None) -> None:
        self.session = session
        self.max_bytes = TILE_CACHE_BYTES if max_bytes is None else max_bytes
        self._tiles: OrderedDict[TileRequest, bytes] = OrderedDict()
        self._size = 0
        self._compute_lock = threading.Lock()  # one tile is computed at a time
        self._cache_lock = threading.Lock()  # guards the cache

    def get_cached(self, request: TileRequest) -> bytes | None:
        with self._cache_lock:
            if request in self._tiles:
                self._tiles.move_to_end(request)
            return self._tiles.get(request)

    def get_or_compute(self, request: TileRequest) -> bytes:
        with self._compute_lock:
            if (data := self.get_cached(request)) is None:
                data = self.session.answer_request(request)
                self._store(request, data)
        return data

    def resynthesize(self, payload: dict[str, Any]) -> dict[str, Any]:
        with self._compute_lock:
            return self.session.resynthesize(payload)

    def _store(self, request: TileRequest, data: bytes) -> None:
        with self._cache_lock:
            self._tiles[request] = data
            self._size += len(data)
            while self._size > self.max_bytes and len(self._tiles) > 1:
                self._size -= len(self._tiles.popitem(last=False)[1])


async def _read_json_body(request: Request) -> dict[str, Any]:
    """Read a JSON body. A foreign page cannot send one, because browsers send a preflight request first."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise InputError("expected a body of Content-Type: application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise InputError(f"a body of more than {MAX_BODY_BYTES} bytes is invalid; expected some weights")
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not JSON ({error})") from error
    if not isinstance(payload, dict):
        raise InputError('expected an object, as in {"data": 0, "weights": [0.4, 0]}')
    return payload


def _encode_json(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, ensure_ascii=False, separators=(",", ":")).encode()


def _render_page(base_path: str) -> str:
    base = html.escape(base_path, quote=True)
    head = f"""<link rel="icon" href="data:,">
<link rel="stylesheet" href="{base}/viewer.css">"""
    body = f"""<main id="viewer" data-base="{base}"></main>
<noscript>JavaScript is required to show these maps.</noscript>
<script type="module" src="{base}/viewer.js"></script>"""
    return assets.render_page("jumok", head, body)
