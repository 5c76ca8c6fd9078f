"""The viewer in a notebook: asked by messages, in a real kernel, and shown by a real browser."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("anywidget", reason='the notebook needs anywidget: pip install "jumok[look]"')

from jumok.look.viewer import assets
from jumok.look.viewer.tiles import unpack
from jumok.look.viewer.viewer_data import ViewerData
from jumok.look.viewer.widget import ViewerWidget

CELLS = np.random.default_rng(0).random((2, 3, 5), np.float32)
ASK = {
    "layer": 0,
    "head": 1,
    "rows": [0, 3],
    "cols": [0, 5],
    "size": 256,
    "quantity": "pooled_map",
    "data": 0,
}


def viewer(monkeypatch: pytest.MonkeyPatch) -> tuple[ViewerWidget, list[tuple[Any, Any]]]:
    sent: list[tuple[Any, Any]] = []
    monkeypatch.setattr(ViewerWidget, "send", lambda self, content, buffers=None: sent.append((content, buffers)))
    return ViewerWidget(
        ViewerData.from_weights({"decoder": CELLS}, row_labels=list("abc"), col_labels=list("vwxyz"))
    ), sent


def test_a_message_is_answered_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    widget, sent = viewer(monkeypatch)
    widget._handle_custom_msg({"id": "7.5", "request": ASK}, [])
    ((content, buffers),) = sent
    assert content == {"id": "7.5"}
    assert np.allclose(unpack(buffers[0]), CELLS[1], rtol=1e-3)


def test_a_bad_message_is_answered_with_its_fault_and_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widget, sent = viewer(monkeypatch)
    widget._handle_custom_msg({"id": "1", "request": {**ASK, "layer": 4}}, [])
    assert sent == [({"id": "1", "error": "layer=4 came; there are 1: 0 to 0"}, None)]
    for message in ("text", {"id": "2"}, {"id": "3", "request": 5}, None):
        widget._handle_custom_msg(message, [])
    assert len(sent) == 1


def test_it_is_one_module_that_exports_render() -> None:
    script = assets.build_script()
    assert script.count("export ") == 1
    assert script.rstrip().endswith("export default { render };")
    assert "import {" not in script


# ------------------------------------------------------------------------------- a real kernel


class Kernel:
    """A Jupyter kernel, and the front end's end of a widget's comm."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.comm = ""
        self.state: dict[str, Any] = {}

    def run(self, code: str) -> list[dict[str, Any]]:
        """What a cell shows."""
        number = self.client.execute(code)
        shown = []
        for message in self._until_idle(number):
            assert message["msg_type"] != "error", "\n".join(message["content"].get("traceback", []))
            if message["msg_type"] == "comm_open" and "_esm" in message["content"]["data"].get("state", {}):
                self.comm = message["content"]["comm_id"]
                self.state = message["content"]["data"]["state"]
            if message["msg_type"] in ("display_data", "execute_result"):
                shown.append(message["content"]["data"])
        return shown

    def ask(self, content: Any) -> tuple[Any, list[bytes]]:
        """A custom message to the widget, and its answer."""
        data = {"comm_id": self.comm, "data": {"method": "custom", "content": content}}
        message = self.client.session.msg("comm_msg", data)
        self.client.shell_channel.send(message)
        answers = [m for m in self._until_idle(message["header"]["msg_id"]) if m["msg_type"] == "comm_msg"]
        assert len(answers) == 1
        return answers[0]["content"]["data"]["content"], [bytes(b) for b in answers[0]["buffers"]]

    def _until_idle(self, number: str) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != number:
                continue
            yield message
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Kernel]:
    manager = pytest.importorskip("jupyter_client.manager", reason="a kernel needs: pip install ipykernel nbclient")
    pytest.importorskip("ipykernel", reason="a kernel needs: pip install ipykernel nbclient")
    source = str(Path(assets.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", source)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    running = manager.KernelManager()
    running.start_kernel()
    client = running.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        yield Kernel(client)
    finally:
        client.stop_channels()
        running.shutdown_kernel(now=True)
        running.cleanup_resources()
        running.context.destroy(linger=0)


CELL = """
import numpy as np
from jumok.look.viewer.viewer_data import ViewerData
from jumok.look.viewer.widget import ViewerWidget
weights = np.full((2, 3, 5), 0.05, np.float32)
weights[:, [0, 1, 2], [0, 3, 4]] = 0.8
rows, cols = ["이것은", "예문이다", "."], ["this", "is", "an", "example", "."]
ViewerWidget(ViewerData.from_weights({"decoder": weights}, row_labels=rows, col_labels=cols))
"""


def test_it_runs_in_a_real_kernel_and_a_real_browser_shows_it(kernel: Kernel, new_page: Callable[..., Any]) -> None:
    (shown,) = kernel.run(CELL)
    assert "application/vnd.jupyter.widget-view+json" in shown
    assert kernel.state["manifest"]["data"][0]["layers"][0]["shape"] == [3, 5]
    answer, buffers = kernel.ask({"id": "1", "request": ASK})
    assert answer == {"id": "1"}
    assert unpack(buffers[0])[1].argmax() == 3

    # The module and the style that the kernel sent, with a model like anywidget's, over the kernel's comm.
    window = new_page()
    page = window.page

    def to_kernel(_: Any, content: Any) -> Any:
        answer, buffers = kernel.ask(content)
        return [answer, [base64.b64encode(data).decode() for data in buffers]]

    page.expose_binding("toKernel", to_kernel)
    page.set_content('<body data-jp-theme-light="true"><div id="viewer" style="width: 900px"></div></body>')
    page.add_style_tag(content=kernel.state["_css"])
    page.evaluate(
        """async ([source, manifest]) => {
            const heard = [];
            const model = {
                get: (name) => ({ manifest })[name],
                on: (name, f) => name === "msg:custom" && heard.push(f),
                off: () => {},
                send: async (content) => {
                    const [answer, parts] = await window.toKernel(content);
                    const views = parts.map((text) => {  // as in a notebook: views into a larger buffer
                        const bytes = Uint8Array.from("xyz" + atob(text), (c) => c.charCodeAt(0));
                        return new DataView(bytes.buffer, 3);
                    });
                    heard.forEach((f) => f(answer, views));
                },
            };
            const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
            window.cleanup = module.default.render({ model, el: document.querySelector("#viewer") });
        }""",
        [kernel.state["_esm"], kernel.state["manifest"]],
    )
    window.ready()
    assert window.hover(1, 3).split() == ["예문이다", "→", "example", "0.8"]
    window.click(1, 3)
    page.wait_for_selector(".jm-rank li")
    assert window.text(".jm-rank .jm-key")[0] == "example"
    assert window.ask("v.layout.root.dataset.theme") == "light"
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")  # the notebook turns dark
    page.wait_for_selector(".jumok[data-theme=dark]")
    page.evaluate("window.cleanup()")
    assert page.locator("#viewer *").count() == 0
