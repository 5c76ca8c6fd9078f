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
from jumok.look import assets
from jumok.look.scene import Scene, as_scenes
from jumok.look.stage import Stage
from jumok.look.tiles import Request as Wanted

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

__all__ = ["app", "serve"]

KEPT_BYTES = 64 << 20
MOST_ASKED = 1 << 16  # bytes of a wish for other weights
MOST_WAITING = 4  # of these at a time, with the one that is being said
NEEDS = 'the viewer\'s page needs starlette and uvicorn, which are not installed: pip install "jumok[look]"'
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


def app(scenes: Scene | Sequence[Scene], *, keep: int | None = None, live: bool = False) -> Starlette:
    """The page of one scene, or of two to compare. Tiles of late are kept, so many bytes of them.

    ``live``: speech may be said anew. It is computed at once, beside any queue that a server has for what it
    is asked.
    """
    try:
        from anyio import CapacityLimiter, Lock, to_thread
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route
    except ModuleNotFoundError as error:
        raise MissingExtra(NEEDS) from error

    shown = as_scenes(scenes)
    stage = Stage(shown if live else [replace(scene, retell=None) for scene in shown])
    told = _json(stage.manifest())
    tiles = _Tiles(stage, keep)
    waiting: set[Request] = set()
    # Tiles have one thread of their own, and requests wait for it here: they occupy no threads of others.
    turn, thread = Lock(), CapacityLimiter(1)

    async def page(request: Request) -> Response:
        base = request.scope.get("root_path", "").rstrip("/")
        return Response(
            _page(base), media_type="text/html", headers={"Content-Security-Policy": POLICY, **SAFE}
        )

    async def about(request: Request) -> Response:
        return Response(told, media_type="application/json", headers=SAFE)

    async def numbers(request: Request) -> Response:
        try:
            wanted = Wanted.read(request.query_params)
            if (data := tiles.known(wanted)) is None:
                async with turn:
                    # The reader may have moved on while this one waited for its turn.
                    if await request.is_disconnected():
                        return Response(status_code=499, headers=SAFE)
                    data = await to_thread.run_sync(tiles.get, wanted, limiter=thread)
        except InputError as error:
            return JSONResponse({"error": str(error)}, status_code=400, headers=SAFE)
        return Response(data, media_type="application/octet-stream", headers=SAFE)

    async def retold(request: Request) -> Response:
        if len(waiting) >= MOST_WAITING:
            busy = "others wait for the voice already; try again in a moment"
            return JSONResponse({"error": busy}, status_code=503, headers=SAFE)
        waiting.add(request)
        try:
            wish = await _wish(request)
            anew = await to_thread.run_sync(tiles.retell, wish, limiter=thread)
        except InputError as error:
            return JSONResponse({"error": str(error)}, status_code=400, headers=SAFE)
        finally:
            waiting.discard(request)
        return Response(_json(anew), media_type="application/json", headers=SAFE)

    def file(path: str, text: str, media: str) -> Route:
        async def given(request: Request) -> Response:
            return Response(text, media_type=media, headers=SAFE)

        return Route(path, given)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/manifest.json", about),
            Route("/tiles", numbers),
            Route("/retold", retold, methods=["POST"]),
            file("/viewer.js", assets.script("boot_page"), "text/javascript"),
            file("/viewer.css", assets.style(page=True), "text/css"),
        ]
    )


def serve(
    scenes: Scene | Sequence[Scene], *, host: str = "127.0.0.1", port: int = 8765, open_browser: bool = True
) -> None:
    """Show the page until Ctrl+C. Only requests to this host are answered."""
    try:
        import uvicorn
        from starlette.middleware.trustedhost import TrustedHostMiddleware
    except ModuleNotFoundError as error:
        raise MissingExtra(NEEDS) from error
    shown = app(scenes, live=True)
    if host in ("127.0.0.1", "localhost", "::1"):
        # Else a page from elsewhere could have its own name point here, and read what we show.
        shown.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    address = f"http://{'localhost' if host in ('127.0.0.1', '::1') else host}:{port}/"
    print(f"looking at {address}   (Ctrl+C ends it)", flush=True)
    if open_browser:
        threading.Timer(0.6, webbrowser.open, (address,)).start()
    uvicorn.run(shown, host=host, port=port, log_level="warning")


class _Tiles:
    """Answers, those of late kept; computed one at a time, for they share one device."""

    def __init__(self, stage: Stage, keep: int | None = None) -> None:
        self.stage = stage
        self.keep = KEPT_BYTES if keep is None else keep
        self._kept: OrderedDict[Wanted, bytes] = OrderedDict()
        self._size = 0
        self._turn = threading.Lock()  # one computes
        self._guard = threading.Lock()  # the shelf is in order

    def known(self, wanted: Wanted) -> bytes | None:
        with self._guard:
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
            return self._kept.get(wanted)

    def get(self, wanted: Wanted) -> bytes:
        with self._turn:
            if (data := self.known(wanted)) is None:
                data = self.stage.answer(wanted)
                self._keep(wanted, data)
        return data

    def retell(self, wish: dict[str, Any]) -> dict[str, Any]:
        with self._turn:
            return self.stage.retell(wish)

    def _keep(self, wanted: Wanted, data: bytes) -> None:
        with self._guard:
            self._kept[wanted] = data
            self._size += len(data)
            while self._size > self.keep and len(self._kept) > 1:
                self._size -= len(self._kept.popitem(last=False)[1])


async def _wish(request: Request) -> dict[str, Any]:
    """The body, of which a page from elsewhere could not send one: browsers ask first before such JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise InputError("expected a body of Content-Type: application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_ASKED:
            raise InputError(f"a body of more than {MOST_ASKED} bytes came; expected some weights")
    try:
        wish = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not JSON ({error})") from error
    if not isinstance(wish, dict):
        raise InputError('expected an object, as in {"scene": 0, "weights": [0.4, 0]}')
    return wish


def _json(told: dict[str, Any]) -> bytes:
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()


def _page(base: str) -> str:
    at = html.escape(base, quote=True)
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
