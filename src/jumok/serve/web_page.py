"""The web page at the root of a server: a form for each model, its response, and the attention viewer below.

The page consists of plain ES modules and a style sheet, joined with those of the viewer. There is no build
step, and nothing is loaded from other servers. Inputs are sent only to this server. Links keep the input in
the URL fragment (after #), which browsers do not send.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import html

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from jumok.look.viewer import assets

PAGE_SCRIPT = "serve/static/main.js"
PAGE_PATHS = ("/", "/page.js", "/page.css")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "media-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}


@functools.cache
def build_style_sheet() -> str:
    """Join the style sheets of the page and of the viewer."""
    return assets.read_asset("serve/static/page.css") + assets.build_style_sheet()


def add_page_routes(app: FastAPI) -> None:
    """Add the routes of the page to an app."""
    for path, endpoint in zip(PAGE_PATHS, (_serve_page, _serve_script, _serve_style_sheet), strict=True):
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)


async def _serve_script(request: Request) -> Response:
    return _build_file_response(request, assets.build_script(PAGE_SCRIPT), "text/javascript")


async def _serve_style_sheet(request: Request) -> Response:
    return _build_file_response(request, build_style_sheet(), "text/css")


async def _serve_page(request: Request) -> Response:
    base = html.escape(request.scope.get("root_path", "").rstrip("/"), quote=True)
    headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, **PAGE_HEADERS}
    return Response(PAGE_TEMPLATE.replace("{base}", base), media_type="text/html", headers=headers)


def _build_file_response(request: Request, text: str, media_type: str) -> Response:
    """Build a response with an ETag: a browser revalidates its copy, and gets 304 if it is current."""
    etag = f'"{hashlib.sha256(text.encode()).hexdigest()[:16]}"'
    headers = {"ETag": etag, "Vary": "Accept-Encoding", **PAGE_HEADERS}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(_compress_gzip(text), media_type=media_type, headers={"Content-Encoding": "gzip", **headers})
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
<h1>jumok <span class="pg-muted" lang="ko">주목</span></h1>
<a href="{base}/openapi.json">API</a>
</header>
<main id="page"></main>
<noscript>This page needs JavaScript. The API does not: see openapi.json.</noscript>
<script type="module" src="{base}/page.js"></script>
</body>
</html>
"""
