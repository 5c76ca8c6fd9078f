"""The viewer as a web page with live tiles: an ASGI app, to run alone or to mount under a prefix.

>>> app(scene)  # doctest: +SKIP
>>> Starlette(routes=[Mount("/look", app(scene))])  # doctest: +SKIP

Answers: ``/`` the page, ``/viewer.js`` and ``/viewer.css`` its parts, ``/manifest.json`` what there is,
``/tiles?layer=0&head=3&rows=0,256&cols=0,256`` numbers, packed as :mod:`jumok.look.tiles` says; to
``{"scene": 0, "weights": […]}`` sent to ``/retold`` the manifest of the speech said anew, with these weights
of its style tokens. A request for what is not there gets status 400 and ``{"error": …}``; one to be said anew
gets 503 while too many wait for that. No path on disk is ever taken from a request.
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
from jumok.look.viewer.tiles import TileRequest as Wanted
from jumok.look.viewer.viewer_data import ViewerData, as_viewer_data_tuple
from jumok.look.viewer.viewer_session import ViewerSession

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

__all__ = ["build_app", "serve"]

TILE_CACHE_BYTES = 64 << 20
MAX_BODY_BYTES = 1 << 16  # bytes of a wish for other weights
MAX_WAITING = 4  # of these at a time, with the one that is being said
MISSING_EXTRA_MESSAGE = (
    'the viewer\'s page needs starlette and uvicorn, which are not installed: pip install "jumok[look]"'
)
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def build_app(
    viewer_data: ViewerData | Sequence[ViewerData],
    *,
    cache_bytes: int | None = None,
    can_resynthesize: bool = False,
) -> Starlette:
    """The page of one scene, or of two to compare. Tiles of late are kept, so many bytes of them.

    ``can_resynthesize``: speech may be said anew. It is computed at once, beside any queue that a server has for what it
    is asked.
    """
    try:
        from anyio import CapacityLimiter, Lock, to_thread
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route
    except ModuleNotFoundError as error:
        raise MissingExtra(MISSING_EXTRA_MESSAGE) from error

    shown = as_viewer_data_tuple(viewer_data)
    stage = ViewerSession(
        shown if can_resynthesize else [replace(scene, resynthesize=None) for scene in shown]
    )
    told = _encode_json(stage.build_manifest())
    tiles = _TileCache(stage, cache_bytes)
    waiting: set[Request] = set()
    # Tiles have one thread of their own, and requests wait for it here: they occupy no threads of others.
    turn, thread = Lock(), CapacityLimiter(1)

    async def page(request: Request) -> Response:
        base = request.scope.get("root_path", "").rstrip("/")
        return Response(
            _render_page(base),
            media_type="text/html",
            headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY, **SECURITY_HEADERS},
        )

    async def about(request: Request) -> Response:
        return Response(told, media_type="application/json", headers=SECURITY_HEADERS)

    async def numbers(request: Request) -> Response:
        try:
            wanted = Wanted.from_mapping(request.query_params)
            if (data := tiles.get_cached(wanted)) is None:
                async with turn:
                    # The reader may have moved on while this one waited for its turn.
                    if await request.is_disconnected():
                        return Response(status_code=499, headers=SECURITY_HEADERS)
                    data = await to_thread.run_sync(tiles.get_or_compute, wanted, limiter=thread)
        except InputError as error:
            return JSONResponse({"error": str(error)}, status_code=400, headers=SECURITY_HEADERS)
        return Response(data, media_type="application/octet-stream", headers=SECURITY_HEADERS)

    async def retold(request: Request) -> Response:
        if len(waiting) >= MAX_WAITING:
            busy = "others wait for the voice already; try again in a moment"
            return JSONResponse({"error": busy}, status_code=503, headers=SECURITY_HEADERS)
        waiting.add(request)
        try:
            wish = await _read_json_body(request)
            anew = await to_thread.run_sync(tiles.resynthesize, wish, limiter=thread)
        except InputError as error:
            return JSONResponse({"error": str(error)}, status_code=400, headers=SECURITY_HEADERS)
        finally:
            waiting.discard(request)
        return Response(_encode_json(anew), media_type="application/json", headers=SECURITY_HEADERS)

    def file(path: str, text: str, media: str) -> Route:
        async def given(request: Request) -> Response:
            return Response(text, media_type=media, headers=SECURITY_HEADERS)

        return Route(path, given)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/manifest.json", about),
            Route("/tiles", numbers),
            Route("/retold", retold, methods=["POST"]),
            file("/viewer.js", assets.build_script("boot_page"), "text/javascript"),
            file("/viewer.css", assets.build_style_sheet(include_page=True), "text/css"),
        ]
    )


def serve(
    viewer_data: ViewerData | Sequence[ViewerData],
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    open_browser: bool = True,
) -> None:
    """Show the page until Ctrl+C. Only requests to this host are answered."""
    try:
        import uvicorn
        from starlette.middleware.trustedhost import TrustedHostMiddleware
    except ModuleNotFoundError as error:
        raise MissingExtra(MISSING_EXTRA_MESSAGE) from error
    shown = build_app(viewer_data, can_resynthesize=True)
    if host in ("127.0.0.1", "localhost", "::1"):
        # Else a page from elsewhere could have its own name point here, and read what we show.
        shown.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    address = f"http://{'localhost' if host in ('127.0.0.1', '::1') else host}:{port}/"
    print(f"looking at {address}   (Ctrl+C ends it)", flush=True)
    if open_browser:
        threading.Timer(0.6, webbrowser.open, (address,)).start()
    uvicorn.run(shown, host=host, port=port, log_level="warning")


class _TileCache:
    """Answers, those of late kept; computed one at a time, for they share one device."""

    def __init__(self, session: ViewerSession, max_bytes: int | None = None) -> None:
        self.session = session
        self.max_bytes = TILE_CACHE_BYTES if max_bytes is None else max_bytes
        self._tiles: OrderedDict[Wanted, bytes] = OrderedDict()
        self._size = 0
        self._compute_lock = threading.Lock()  # one computes
        self._cache_lock = threading.Lock()  # the shelf is in order

    def get_cached(self, request: Wanted) -> bytes | None:
        with self._cache_lock:
            if request in self._tiles:
                self._tiles.move_to_end(request)
            return self._tiles.get(request)

    def get_or_compute(self, request: Wanted) -> bytes:
        with self._compute_lock:
            if (data := self.get_cached(request)) is None:
                data = self.session.answer_request(request)
                self._store(request, data)
        return data

    def resynthesize(self, payload: dict[str, Any]) -> dict[str, Any]:
        with self._compute_lock:
            return self.session.resynthesize(payload)

    def _store(self, request: Wanted, data: bytes) -> None:
        with self._cache_lock:
            self._tiles[request] = data
            self._size += len(data)
            while self._size > self.max_bytes and len(self._tiles) > 1:
                self._size -= len(self._tiles.popitem(last=False)[1])


async def _read_json_body(request: Request) -> dict[str, Any]:
    """The body, of which a page from elsewhere could not send one: browsers ask first before such JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise InputError("expected a body of Content-Type: application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise InputError(f"a body of more than {MAX_BODY_BYTES} bytes came; expected some weights")
    try:
        wish = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not JSON ({error})") from error
    if not isinstance(wish, dict):
        raise InputError('expected an object, as in {"scene": 0, "weights": [0.4, 0]}')
    return wish


def _encode_json(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, ensure_ascii=False, separators=(",", ":")).encode()


def _render_page(base_path: str) -> str:
    at = html.escape(base_path, quote=True)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>jumok</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{at}/viewer.css">
<body>
<main id="viewer" data-base="{at}"></main>
<noscript>These maps are drawn by a script; please allow it to run.</noscript>
<script type="module" src="{at}/viewer.js"></script>
</body>
</html>
"""
