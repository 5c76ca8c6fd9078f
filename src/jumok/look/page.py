"""The viewer as a web page with live tiles: an ASGI app, to run alone or to mount under a prefix.

>>> app(scene)  # doctest: +SKIP
>>> Starlette(routes=[Mount("/look", app(scene))])  # doctest: +SKIP

Answers: ``/`` the page, ``/viewer.js`` and ``/viewer.css`` its parts, ``/manifest.json`` what there is,
``/tiles?layer=0&head=3&rows=0,256&cols=0,256`` numbers, packed as :mod:`jumok.look.tiles` says. A request for
what is not there gets status 400 and ``{"error": …}``. No path on disk is ever taken from a request.
"""

from __future__ import annotations

import html
import json
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jumok.errors import InputError, MissingExtra
from jumok.look import assets
from jumok.look.scene import Scene, answer, as_scenes, manifest
from jumok.look.tiles import Request as Wanted

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

__all__ = ["app", "serve"]

KEPT_BYTES = 64 << 20
NEEDS = 'the viewer\'s page needs starlette and uvicorn, which are not installed: pip install "jumok[look]"'
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


def app(scenes: Scene | Sequence[Scene], *, keep: int | None = None) -> Starlette:
    """The page of one scene, or of two to compare. Tiles of late are kept, so many bytes of them."""
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route
    except ModuleNotFoundError as error:
        raise MissingExtra(NEEDS) from error

    shown = as_scenes(scenes)
    told = json.dumps(manifest(shown), ensure_ascii=False, separators=(",", ":")).encode()
    tiles = _Tiles(shown, keep)

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
            # The reader may have moved on while this one waited for its turn.
            if (known := tiles.known(wanted)) is None and await request.is_disconnected():
                return Response(status_code=499, headers=SAFE)
            data = known or await run_in_threadpool(tiles.get, wanted)
        except InputError as error:
            return JSONResponse({"error": str(error)}, status_code=400, headers=SAFE)
        return Response(data, media_type="application/octet-stream", headers=SAFE)

    def file(path: str, text: str, media: str) -> Route:
        async def given(request: Request) -> Response:
            return Response(text, media_type=media, headers=SAFE)

        return Route(path, given)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/manifest.json", about),
            Route("/tiles", numbers),
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
    shown = app(scenes)
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

    def __init__(self, scenes: Sequence[Scene], keep: int | None = None) -> None:
        self.scenes = scenes
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
                data = answer(self.scenes, wanted)
                self._keep(wanted, data)
        return data

    def _keep(self, wanted: Wanted, data: bytes) -> None:
        with self._guard:
            self._kept[wanted] = data
            self._size += len(data)
            while self._size > self.keep and len(self._kept) > 1:
                self._size -= len(self._kept.popitem(last=False)[1])


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
