"""The viewer in a notebook: Jupyter, VS Code, Colab, marimo. The kernel computes the visible tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jumok.errors import InputError, MissingExtra
from jumok.look.viewer import assets
from jumok.look.viewer.tiles import TileRequest
from jumok.look.viewer.viewer_data import ViewerData
from jumok.look.viewer.viewer_session import ViewerSession

try:
    import anywidget
    import traitlets
except ModuleNotFoundError as error:
    raise MissingExtra(
        'the viewer in a notebook needs anywidget, which is not installed: pip install "jumok[look]"'
    ) from error


class ViewerWidget(anywidget.AnyWidget):
    """One item of viewer data, or two to compare, as the output of a notebook cell.

    >>> ViewerWidget(ViewerData.from_captures(captures))  # doctest: +SKIP
    """

    _esm = assets.build_script()
    _css = assets.build_style_sheet()
    manifest = traitlets.Dict().tag(sync=True)

    def __init__(self, viewer_data: ViewerData | Sequence[ViewerData]) -> None:
        self._session = ViewerSession(viewer_data)
        super().__init__(manifest=self._session.build_manifest())
        self.on_msg(self._handle_message)

    def _handle_message(self, _: Any, message: Any, buffers: Any) -> None:
        """Answer a request of the viewer with tiles, a manifest, or an error message."""
        if not isinstance(message, dict):
            return
        reply: dict[str, Any] = {"id": message.get("id")}
        request, payload = message.get("request"), message.get("resynthesize")
        try:
            if isinstance(request, dict):
                self.send(reply, [self._session.answer_request(TileRequest.from_mapping(request))])
            elif isinstance(payload, dict):
                self.send({**reply, "manifest": self._session.resynthesize(payload)})
        except Exception as error:
            self.send({**reply, "error": str(error) or type(error).__name__})
            if not isinstance(error, InputError):  # the viewer stops waiting, and the traceback is shown
                raise
