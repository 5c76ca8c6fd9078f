"""Tests of the viewer in a notebook: messages, a real kernel, a real browser."""

from __future__ import annotations

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

pytestmark = pytest.mark.long


WEIGHTS = np.random.default_rng(0).random((2, 3, 5), np.float32)
REQUEST = {"layer": 0, "head": 1, "rows": [0, 3], "cols": [0, 5], "size": 256, "quantity": "pooled_map", "data": 0}


def build_widget(monkeypatch: pytest.MonkeyPatch) -> tuple[ViewerWidget, list[tuple[Any, Any]]]:
    messages: list[tuple[Any, Any]] = []
    monkeypatch.setattr(ViewerWidget, "send", lambda self, content, buffers=None: messages.append((content, buffers)))
    return ViewerWidget(
        ViewerData.from_weights({"decoder": WEIGHTS}, row_labels=list("abc"), col_labels=list("vwxyz"))
    ), messages


def test_message_is_answered_with_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    widget, messages = build_widget(monkeypatch)
    widget._handle_custom_msg({"id": "7.5", "request": REQUEST}, [])
    ((content, buffers),) = messages
    assert content == {"id": "7.5"}
    assert np.allclose(unpack(buffers[0]), WEIGHTS[1], rtol=1e-3)


def test_invalid_messages_get_an_error_or_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    widget, messages = build_widget(monkeypatch)
    widget._handle_custom_msg({"id": "1", "request": {**REQUEST, "layer": 4}}, [])
    assert messages == [({"id": "1", "error": "layer=4 is invalid; there are 1: 0 to 0"}, None)]
    for message in ("text", {"id": "2"}, {"id": "3", "request": 5}, None):
        widget._handle_custom_msg(message, [])
    assert len(messages) == 1


def test_script_is_one_module_that_exports_render() -> None:
    script = assets.build_script()
    assert script.count("export ") == 1
    assert script.rstrip().endswith("export default { render };")
    assert "import {" not in script


# ---------------------------------------------------------------- kernel


class Kernel:
    """A Jupyter kernel with the comm of a widget."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.comm = ""
        self.state: dict[str, Any] = {}

    def run_cell(self, code: str) -> list[dict[str, Any]]:
        """Run a cell. Returns its outputs."""
        number = self.client.execute(code)
        outputs = []
        for message in self._until_idle(number):
            assert message["msg_type"] != "error", "\n".join(message["content"].get("traceback", []))
            if message["msg_type"] == "comm_open" and "_esm" in message["content"]["data"].get("state", {}):
                self.comm = message["content"]["comm_id"]
                self.state = message["content"]["data"]["state"]
            if message["msg_type"] in ("display_data", "execute_result"):
                outputs.append(message["content"]["data"])
        return outputs

    def send_message(self, content: Any) -> tuple[Any, list[bytes]]:
        """Send a custom message to the widget. Returns its reply and buffers."""
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


CODE = """
import numpy as np
from jumok.look.viewer.viewer_data import ViewerData
from jumok.look.viewer.widget import ViewerWidget
weights = np.full((2, 3, 5), 0.05, np.float32)
weights[:, [0, 1, 2], [0, 3, 4]] = 0.8
rows, cols = ["이것은", "예문이다", "."], ["this", "is", "an", "example", "."]
ViewerWidget(ViewerData.from_weights({"decoder": weights}, row_labels=rows, col_labels=cols))
"""


def test_widget_in_a_kernel_and_a_browser(kernel: Kernel, new_page: Callable[..., Any]) -> None:
    (output,) = kernel.run_cell(CODE)
    assert "application/vnd.jupyter.widget-view+json" in output
    assert kernel.state["manifest"]["data"][0]["layers"][0]["shape"] == [3, 5]
    answer, buffers = kernel.send_message({"id": "1", "request": REQUEST})
    assert answer == {"id": "1"}
    assert unpack(buffers[0])[1].argmax() == 3

    # The script and the style that the kernel messages, with a model like that of anywidget.
    state = kernel.state
    viewer = new_page().open_widget(state["manifest"], kernel.send_message, state["_esm"], state["_css"])
    page = viewer.page
    assert viewer.hover_cell(1, 3).split() == ["예문이다", "→", "example", "0.8"]
    viewer.click_cell(1, 3)
    page.wait_for_selector(".jm-rank li")
    assert viewer.get_texts(".jm-rank .jm-key")[0] == "example"
    assert viewer.evaluate("v.layout.root.dataset.theme") == "light"
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")  # the theme of the notebook changes
    page.wait_for_selector(".jumok[data-theme=dark]")
    page.evaluate("window.cleanup()")
    assert page.locator("#viewer *").count() == 0
