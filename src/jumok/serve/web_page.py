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

from jumok.look.viewer import assets

__all__ = ["PAGE_PATHS", "add_page_routes"]

PAGE_PATHS = ("/", "/page.js", "/page.css")
# Each imports only what stands before it, as with the viewer's own.
SCRIPT_MODULES = ("server", "fields", "photo", "results", "link", "tasks", "trouble", "desk", "boot_serve")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "media-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def read_static_file(name: str) -> str:
    """One of our files."""
    return (files("jumok.serve") / "static" / name).read_text(encoding="utf-8")


@functools.cache
def build_script() -> str:
    """All of the page, and the viewer, as one ES module."""
    return assets.join_scripts(
        [*assets.read_scripts(), *(read_static_file(f"{name}.js") for name in SCRIPT_MODULES)]
    )


@functools.cache
def build_style_sheet() -> str:
    """The style sheets."""
    return read_static_file("page.css") + assets.build_style_sheet()


def add_page_routes(app: FastAPI) -> None:
    """Put the page into an app."""
    for path, given in zip(PAGE_PATHS, (_serve_page, _serve_script, _serve_style_sheet), strict=True):
        app.add_api_route(path, given, methods=["GET", "HEAD"], include_in_schema=False)


async def _serve_script(request: Request) -> Response:
    return _build_file_response(request, build_script(), "text/javascript")


async def _serve_style_sheet(request: Request) -> Response:
    return _build_file_response(request, build_style_sheet(), "text/css")


async def _serve_page(request: Request) -> Response:
    base = html.escape(request.scope.get("root_path", "").rstrip("/"), quote=True)
    headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, **PAGE_HEADERS}
    return Response(PAGE_TEMPLATE.replace("{base}", base), media_type="text/html", headers=headers)


def _build_file_response(request: Request, text: str, media_type: str) -> Response:
    """A browser that has it asks each time whether it is still the same: then it gets it only once."""
    mark = f'"{hashlib.sha256(text.encode()).hexdigest()[:16]}"'
    headers = {"ETag": mark, "Vary": "Accept-Encoding", **PAGE_HEADERS}
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            _compress_gzip(text), media_type=media_type, headers={"Content-Encoding": "gzip", **headers}
        )
    return Response(text, media_type=media_type, headers=headers)


@functools.cache
def _compress_gzip(text: str) -> bytes:
    return gzip.compress(text.encode())


PAGE_TEMPLATE = """<!doctype html>
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
