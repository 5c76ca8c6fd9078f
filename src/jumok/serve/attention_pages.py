"""Attention pages: viewers of the latest requests to ``/attend/…``.

Each page has a random name that cannot be guessed, so that its URL is enough to open it.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from jumok.look.viewer import page
from jumok.look.viewer.viewer_data import ViewerData

TILE_CACHE_BYTES = 8 << 20  # per page


class AttentionPages:
    """An ASGI app to mount. ``NAME/`` is a viewer page with all its files."""

    def __init__(self, max_pages: int, lifetime: float) -> None:
        self.max_pages, self.lifetime = max_pages, lifetime
        self._pages: OrderedDict[str, tuple[float, ASGIApp]] = OrderedDict()  # name -> (expiry, app)

    def add(self, viewer_data: Sequence[ViewerData]) -> str:
        """Add a page and return its name. The page expires after ``lifetime`` seconds."""
        name = secrets.token_urlsafe(16)
        app = page.build_app(viewer_data, cache_bytes=TILE_CACHE_BYTES)
        self._pages[name] = time.monotonic() + self.lifetime, app
        self._remove_expired()
        return name

    def _remove_expired(self) -> None:
        now = time.monotonic()
        while self._pages and (len(self._pages) > self.max_pages or next(iter(self._pages.values()))[0] < now):
            self._pages.popitem(last=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._remove_expired()
        root = scope.get("root_path", "")
        name = scope["path"].removeprefix(root).strip("/").partition("/")[0]
        if name not in self._pages:
            raise HTTPException(
                404,
                f"this page does not exist or has expired; the server keeps the last {self.max_pages} pages for "
                f"{self.lifetime:g} s",
            )
        await self._pages[name][1]({**scope, "root_path": f"{root}/{name}"}, receive, send)
