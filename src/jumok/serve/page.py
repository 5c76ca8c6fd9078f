"""The page at the root of a server: every model with a form, its answer, and the viewer below it.

Plain ES modules and a style sheet of ours, joined with those of the viewer: nothing is built or comes from
elsewhere. What is typed goes to this server only; what a link holds stands behind its #, and is sent nowhere.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import html
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from jumok.look import assets

__all__ = ["FILES", "add"]

FILES = ("/", "/page.js", "/page.css")
# Each imports only what stands before it, as with the viewer's own.
MODULES = ("server", "fields", "photo", "results", "link", "tasks", "trouble", "desk", "boot_serve")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "media-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}


def read(name: str) -> str:
    """One of our files."""
    return (files("jumok.serve") / "static" / name).read_text(encoding="utf-8")


@functools.cache
def script() -> str:
    """All of the page, and the viewer, as one ES module."""
    return assets.joined([*assets.modules(), *(read(f"{name}.js") for name in MODULES)])


@functools.cache
def style() -> str:
    """The style sheets."""
    return read("page.css") + assets.style()


def add(app: FastAPI) -> None:
    """Put the page into an app."""
    for path, given in zip(FILES, (_page, _script, _style), strict=True):
        app.add_api_route(path, given, methods=["GET", "HEAD"], include_in_schema=False)


async def _script(request: Request) -> Response:
    return _file(request, script(), "text/javascript")


async def _style(request: Request) -> Response:
    return _file(request, style(), "text/css")


async def _page(request: Request) -> Response:
    base = html.escape(request.scope.get("root_path", "").rstrip("/"), quote=True)
    headers = {"Content-Security-Policy": POLICY, **SAFE}
    return Response(PAGE.replace("{base}", base), media_type="text/html", headers=headers)


def _file(request: Request, text: str, media: str) -> Response:
    """A browser that has it asks each time whether it is still the same: then it gets it only once."""
    mark = f'"{hashlib.sha256(text.encode()).hexdigest()[:16]}"'
    headers = {"ETag": mark, "Vary": "Accept-Encoding", **SAFE}
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(_packed(text), media_type=media, headers={"Content-Encoding": "gzip", **headers})
    return Response(text, media_type=media, headers=headers)


@functools.cache
def _packed(text: str) -> bytes:
    return gzip.compress(text.encode())


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>jumok</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{base}/page.css">
<body data-base="{base}">
<header class="pg-head">
<h1>jumok <span class="pg-soft" lang="ko">주목</span></h1>
<a href="{base}/openapi.json">API</a>
</header>
<main id="page"></main>
<noscript>This page is made by a script; allow it to run. The API needs none: see openapi.json.</noscript>
<script type="module" src="{base}/page.js"></script>
</body>
</html>
"""
