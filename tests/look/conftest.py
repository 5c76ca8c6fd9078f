"""Pages that show a scene in a real browser, for the tests of the viewer."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The huge map is the bench's. Nothing else of that folder becomes importable.
_SPEC = importlib.util.spec_from_file_location("huge_map", Path(__file__).parents[2] / "bench" / "huge_map.py")
assert _SPEC is not None and _SPEC.loader is not None  # noqa: PT018
sys.modules["huge_map"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules["huge_map"])


class Shown:
    """A page of the viewer in the browser, and all that it complained of."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda message: self._heard(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))

    def _heard(self, text: str) -> None:
        if "willReadFrequently" not in text:  # it is the tests that read pixels back
            self.complaints.append(text)

    def ready(self) -> Shown:
        self.page.wait_for_selector(".jumok")
        self.rest()
        return self

    def rest(self) -> None:
        """Wait until nothing is asked for and all is drawn."""
        self.page.wait_for_function(
            """() => { const { store, maps } = document.querySelector("#viewer").jumok;
                return !store.inFlight.size && !store.pending.size && maps.every((m) => !m.waiting); }"""
        )

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for it: what is drawn comes a frame or two after it is known, later on a busy machine."""
        for _ in range(200):
            if holds():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("it did not come to hold within 10 seconds")

    def ask(self, script: str, *given: Any) -> Any:
        """Of the viewer: `v` is the viewer, `map` its first map."""
        start = 'const v = document.querySelector("#viewer").jumok, map = v.maps[0];'
        return self.page.evaluate(f"(given) => {{ {start} return ({script}); }}", list(given))

    def cell(self, row: int, col: int, number: int = 0) -> tuple[float, float]:
        """Where the middle of a cell is on the page."""
        script = """(() => { const m = v.maps[given[2]], p = m.plot(), b = m.canvas.getBoundingClientRect();
            return [b.left + p.x + (given[1] + 0.5 - m.view.x) * m.view.sx,
                    b.top + p.y + (given[0] + 0.5 - m.view.y) * m.view.sy]; })()"""
        x, y = self.ask(script, row, col, number)
        return x, y

    def hover(self, row: int, col: int) -> str:
        self.page.mouse.move(*self.cell(row, col))
        self.page.wait_for_selector(".jm-tooltip:not([hidden])")
        return str(self.page.inner_text(".jm-tooltip"))

    def click(self, row: int, col: int) -> None:
        self.page.mouse.click(*self.cell(row, col))

    def colour(self, row: int, col: int, number: int = 0) -> list[int]:
        """Of a cell, near its upper left corner, where nothing is written."""
        self.rest()
        script = """(() => { const m = v.maps[given[2]], p = m.plot(), d = devicePixelRatio;
            const x = Math.round((p.x + (given[1] + 0.25 - m.view.x) * m.view.sx) * d);
            const y = Math.round((p.y + (given[0] + 0.25 - m.view.y) * m.view.sy) * d);
            return [...m.canvas.getContext("2d").getImageData(x, y, 1, 1).data]; })()"""
        return list(self.ask(script, row, col, number))[:3]

    def text(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_text_contents())

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., Shown]]:
    """A new window; at the end it must have nothing to complain of."""
    opened: list[tuple[Any, Shown]] = []

    def open_one(**options: Any) -> Shown:
        context = browser.new_context(**{"viewport": {"width": 1000, "height": 700}, **options})
        context.set_default_timeout(15_000)
        shown = Shown(context.new_page())
        opened.append((context, shown))
        return shown

    yield open_one
    for context, shown in opened:
        context.close()
        assert shown.complaints == []


@pytest.fixture
def served(new_page: Callable[..., Shown]) -> Iterator[Callable[..., Shown]]:
    """A scene on a page with a server behind it."""
    import uvicorn

    from jumok.look.viewer.page import build_app

    running: list[tuple[uvicorn.Server, threading.Thread, Any]] = []

    def show(scenes: Any, *, before: Callable[[Any], None] | None = None, **options: Any) -> Shown:
        config = uvicorn.Config(
            build_app(scenes, can_resynthesize=True), port=0, log_level="error", lifespan="off", ws="none"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        shown = new_page(**options)
        running.append((server, thread, shown.page))
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        if before is not None:
            before(shown.page)
        shown.page.goto(f"http://127.0.0.1:{port}/")
        return shown.ready()

    yield show
    for server, thread, page in running:
        page.close()  # first, or it would miss its server
        server.should_exit = True
        server.force_exit = True
        thread.join(10)


@pytest.fixture
def saved(new_page: Callable[..., Shown], tmp_path: Path) -> Callable[..., Shown]:
    """A scene in a file, opened with no network at all."""
    from jumok.look.viewer.html_file import save_html

    def show(scenes: Any, *, heads: Any = None, detail: int = 1024, **options: Any) -> Shown:
        path = save_html(scenes, tmp_path / "map.html", heads=heads, detail=detail)
        shown = new_page(offline=True, **options)
        outside = re.compile(r"^(?!file:|data:|blob:)")
        shown.page.route(outside, lambda route: (shown.complaints.append(route.request.url), route.abort()))
        shown.page.goto(path.as_uri())
        return shown.ready()

    return show
