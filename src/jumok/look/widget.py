"""The viewer in a notebook: Jupyter, VS Code, Colab, marimo. The kernel computes the tiles one looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jumok.errors import InputError, MissingExtra
from jumok.look import assets
from jumok.look.scene import Scene, answer, as_scenes, manifest
from jumok.look.tiles import Request

try:
    import anywidget
    import traitlets
except ModuleNotFoundError as error:
    raise MissingExtra(
        'the viewer in a notebook needs anywidget, which is not installed: pip install "jumok[look]"'
    ) from error

__all__ = ["Viewer"]


class Viewer(anywidget.AnyWidget):
    """One scene, or two to compare, as the output of a cell.

    >>> Viewer(Scene.of(seen))  # doctest: +SKIP
    """

    _esm = assets.script()
    _css = assets.style()
    manifest = traitlets.Dict().tag(sync=True)

    def __init__(self, scenes: Scene | Sequence[Scene]) -> None:
        self._scenes = as_scenes(scenes)
        super().__init__(manifest=manifest(self._scenes))
        self.on_msg(self._asked)

    def _asked(self, _: Any, message: Any, buffers: Any) -> None:
        """Answer a request of the viewer: the numbers, or the reason why there are none."""
        if not isinstance(message, dict) or not isinstance(message.get("request"), dict):
            return
        reply: dict[str, Any] = {"id": message.get("id")}
        try:
            data = answer(self._scenes, Request.read(message["request"]))
        except InputError as error:
            self.send({**reply, "error": str(error)})
        else:
            self.send(reply, [data])
