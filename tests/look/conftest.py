"""Pages with a viewer in a real browser, for the tests of the viewer."""

from __future__ import annotations

import base64
import importlib.util
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules that several tests share

from model_folders import bert, llama, run, t5  # noqa: F401  fixtures

# The huge map is that of the benchmark. Nothing else of that folder becomes importable.
_SPEC = importlib.util.spec_from_file_location("huge_map", Path(__file__).parents[2] / "bench" / "huge_map.py")
assert _SPEC is not None and _SPEC.loader is not None  # noqa: PT018
sys.modules["huge_map"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules["huge_map"])

# A model like that of anywidget. Buffers are views into larger buffers, as in a notebook.
WIDGET_SCRIPT = """async ([source, manifest]) => {
    const listeners = {}, values = { manifest };
    const decode = (text) => new DataView(Uint8Array.from("xyz" + atob(text), (c) => c.charCodeAt(0)).buffer, 3);
    const model = {
        get: (name) => values[name],
        on: (name, listener) => (listeners[name] = listener),
        off: () => {},
        send: async (content) => {
            const [reply, buffers] = await window.sendToKernel(content);
            listeners["msg:custom"](reply, buffers.map(decode));
        },
    };
    window.changeManifest = (next) => { values.manifest = next; listeners["change:manifest"](); };
    const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    window.cleanup = module.default.render({ model, el: document.querySelector("#viewer") });
}"""


class ViewerPage:
    """A page with a viewer in the browser, and all errors that the browser reports."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("console", lambda message: self._handle_message(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))

    def _handle_message(self, text: str) -> None:
        if "willReadFrequently" not in text:  # the tests read pixels back
            self.errors.append(text)

    def open_widget(
        self,
        manifest: Any,
        answer: Callable[[Any], tuple[Any, list[bytes]]],
        script: str | None = None,
        style: str | None = None,
    ) -> ViewerPage:
        """Open the viewer as a notebook does; ``answer`` is the kernel: it returns a reply and buffers."""
        from jumok.look.viewer import assets

        def send_to_kernel(_: Any, content: Any) -> Any:
            reply, buffers = answer(content)
            return [reply, [base64.b64encode(data).decode() for data in buffers]]

        self.page.expose_binding("sendToKernel", send_to_kernel)
        self.page.set_content('<body data-jp-theme-light="true"><div id="viewer" style="width: 900px"></div></body>')
        self.page.add_style_tag(content=style or assets.build_style_sheet())
        self.page.evaluate(WIDGET_SCRIPT, [script or assets.build_script(), manifest])
        return self.wait_until_ready()

    def wait_until_ready(self) -> ViewerPage:
        self.page.wait_for_selector(".jumok")
        self.wait_until_idle()
        return self

    def wait_until_idle(self) -> None:
        """Wait until no request is pending and everything is painted."""
        self.page.wait_for_function(
            """() => { const { store, maps } = document.querySelector("#viewer").jumok;
                return !store.inFlight.size && !store.pending.size && maps.every((m) => !m.waiting); }"""
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition: painting takes a frame or two, more on a busy machine."""
        for _ in range(200):
            if condition():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("the condition was not met within 10 seconds")

    def evaluate(self, script: str, *args: Any) -> Any:
        """Evaluate an expression in the page: `v` is the viewer, `map` its first map."""
        constants = 'const v = document.querySelector("#viewer").jumok, map = v.maps[0];'
        return self.page.evaluate(f"(args) => {{ {constants} return ({script}); }}", list(args))

    def locate_cell(self, row: int, col: int, map_index: int = 0) -> tuple[float, float]:
        """Return the centre of a cell on the page."""
        script = """(() => { const m = v.maps[args[2]], p = m.plot(), b = m.canvas.getBoundingClientRect();
            return [b.left + p.x + (args[1] + 0.5 - m.view.x) * m.view.sx,
                    b.top + p.y + (args[0] + 0.5 - m.view.y) * m.view.sy]; })()"""
        x, y = self.evaluate(script, row, col, map_index)
        return x, y

    def hover_cell(self, row: int, col: int) -> str:
        """Hover a cell. Returns the tooltip."""
        self.page.mouse.move(*self.locate_cell(row, col))
        self.page.wait_for_selector(".jm-tooltip:not([hidden])")
        return str(self.page.inner_text(".jm-tooltip"))

    def click_cell(self, row: int, col: int) -> None:
        self.page.mouse.click(*self.locate_cell(row, col))

    def get_cell_colour(self, row: int, col: int, map_index: int = 0) -> list[int]:
        """Return the colour of a cell near its upper left corner, where no text is."""
        self.wait_until_idle()
        script = """(() => { const m = v.maps[args[2]], p = m.plot(), d = devicePixelRatio;
            const x = Math.round((p.x + (args[1] + 0.25 - m.view.x) * m.view.sx) * d);
            const y = Math.round((p.y + (args[0] + 0.25 - m.view.y) * m.view.sy) * d);
            return [...m.canvas.getContext("2d").getImageData(x, y, 1, 1).data]; })()"""
        return list(self.evaluate(script, row, col, map_index))[:3]

    def get_darkness(self, selector: str) -> int:
        """Return how dark the background of an element is; 0 if it is transparent."""
        colour = self.page.locator(selector).evaluate("e => getComputedStyle(e).backgroundColor")
        red, green, blue, *alpha = (float(part) for part in colour[colour.index("(") + 1 : -1].split(","))
        return 0 if alpha == [0.0] else round(765 - red - green - blue)

    def get_texts(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_text_contents())

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def find_unnamed_controls(self) -> list[str]:
        """Return the visible controls without an accessible name."""
        script = """[...document.querySelectorAll("button, select, input, img, [role=img], [tabindex='0']")]
            .filter((e) => e.checkVisibility() && !e.closest(".jm-sentence"))
            .filter((e) => !(e.getAttribute("aria-label") || e.alt || e.textContent.trim() || e.closest("label")))
            .map((e) => e.outerHTML)"""
        return list(self.page.evaluate(script))


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., ViewerPage]]:
    """Open a new window. At the end of the test, it must have reported no errors."""
    opened: list[tuple[Any, ViewerPage]] = []

    def open_window(**options: Any) -> ViewerPage:
        context = browser.new_context(**{"viewport": {"width": 1000, "height": 700}, **options})
        context.set_default_timeout(15_000)
        viewer = ViewerPage(context.new_page())
        opened.append((context, viewer))
        return viewer

    yield open_window
    for context, viewer in opened:
        context.close()
        assert viewer.errors == []


class AppServer:
    """One server for all tests. Every app has its own host name, because browsers resolve all names in .localhost."""

    def __init__(self) -> None:
        import uvicorn

        self.apps: dict[str, Any] = {}
        config = uvicorn.Config(self.call_app, port=0, log_level="error", lifespan="off", ws="none", interface="asgi3")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    async def call_app(self, scope: Any, receive: Any, send: Any) -> None:
        await self.apps[dict(scope["headers"])[b"host"].decode()](scope, receive, send)

    def add(self, app: Any) -> str:
        """Returns the address of the app."""
        host = f"app{len(self.apps)}.localhost:{self.port}"
        self.apps[host] = app
        return f"http://{host}/"


@pytest.fixture(scope="session")
def app_server() -> Iterator[AppServer]:
    running = AppServer()
    yield running
    running.server.should_exit = True
    running.thread.join(10)


def set_opening(data: Any, opening: tuple[int, int | None] | None) -> Any:
    """Open a layer and a head, rather than those that the viewer chooses (None), so that tests know what they see."""
    from jumok.look.viewer.viewer_data import Opening, ViewerData

    if isinstance(data, ViewerData):
        return data if opening is None or data.opening else replace(data, opening=Opening(*opening))
    return [set_opening(item, opening) for item in data]


@pytest.fixture
def open_served(new_page: Callable[..., ViewerPage], app_server: AppServer) -> Callable[..., ViewerPage]:
    """Open viewer data on a page with a server."""
    from jumok.look.viewer.page import build_app

    app_server.apps.clear()  # the pages of the last test are closed

    def open_page(
        data: Any, *, before: Callable[[Any], None] | None = None, opening: Any = (0, 0), **options: Any
    ) -> ViewerPage:
        data = set_opening(data, opening)
        viewer = new_page(**options)
        if before is not None:
            before(viewer.page)
        viewer.page.goto(app_server.add(build_app(data, can_resynthesize=True)))
        return viewer.wait_until_ready()

    return open_page


@pytest.fixture
def open_saved(new_page: Callable[..., ViewerPage], tmp_path: Path) -> Callable[..., ViewerPage]:
    """Open viewer data from a saved file, without any network."""
    from jumok.look.viewer.html_file import save_html

    def open_page(
        data: Any, *, heads: Any = None, detail: int = 1024, opening: Any = (0, 0), **options: Any
    ) -> ViewerPage:
        data = set_opening(data, opening) if heads is None else data
        path = save_html(data, tmp_path / "map.html", heads=heads, detail=detail)
        viewer = new_page(offline=True, **options)
        outside = re.compile(r"^(?!file:|data:|blob:)")
        viewer.page.route(outside, lambda route: (viewer.errors.append(route.request.url), route.abort()))
        viewer.page.goto(path.as_uri())
        return viewer.wait_until_ready()

    return open_page
