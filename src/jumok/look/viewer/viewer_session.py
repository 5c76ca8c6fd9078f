"""The data that a viewer shows, and recent speech syntheses with other style token weights.

>>> session = ViewerSession(data)  # doctest: +SKIP
>>> session.resynthesize({"data": 0, "weights": [0.4, 0.0]})["data"][0]["number"]  # doctest: +SKIP
1
>>> session.answer_request(TileRequest(data_index=1, layer=0, …))  # doctest: +SKIP

Each item has its own number, which is never reused, so that two windows do not confuse their syntheses, and
cached tiles stay valid.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jumok.errors import InputError
from jumok.look.viewer.preparation import prepare_for_display
from jumok.look.viewer.tiles import TileRequest
from jumok.look.viewer.viewer_data import ViewerData, answer_request, as_viewer_data_tuple, build_manifest

MAX_RESYNTHESES = 8  # recent ones, which windows may still show


class ViewerSession:
    """One item of viewer data, or two to compare; ``resynthesize`` adds others. Not thread-safe."""

    def __init__(self, viewer_data: ViewerData | Sequence[ViewerData]) -> None:
        self.viewer_data = tuple(map(prepare_for_display, as_viewer_data_tuple(viewer_data)))
        self._resynthesized: OrderedDict[int, ViewerData] = OrderedDict()
        self._next_number = len(self.viewer_data)

    def build_manifest(self) -> dict[str, Any]:
        return build_manifest(self.viewer_data)

    def answer_request(self, request: TileRequest) -> bytes:
        """Return the packed weights of any item."""
        if (resynthesized := self._resynthesized.get(request.data_index)) is not None:
            return answer_request([resynthesized], replace(request, data_index=0))
        if len(self.viewer_data) <= request.data_index < self._next_number:
            raise InputError(
                f"data={request.data_index} is no longer stored: the last {MAX_RESYNTHESES} "
                "syntheses are; move a slider to synthesise it again"
            )
        return answer_request(self.viewer_data, request)

    def resynthesize(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Synthesise speech again. Returns its manifest, with its number; InputError for invalid payloads."""
        index = payload.get("data", 0)
        if not isinstance(index, int) or not 0 <= index < len(self.viewer_data):
            raise InputError(f"data={str(index)[:40]} is invalid; expected 0 to {len(self.viewer_data) - 1}")
        item = self.viewer_data[index]
        if item.resynthesize is None or item.style is None:
            raise InputError("this data has no style tokens whose weights can be changed")
        weights = item.style.check_weights(payload.get("weights"))
        resynthesized = prepare_for_display(item.resynthesize(weights))
        style = resynthesized.style or replace(item.style, weights=np.asarray([weights], np.float32))
        resynthesized = replace(
            resynthesized, title=item.title, label=item.label, style=style, resynthesize=item.resynthesize
        )
        number, self._next_number = self._next_number, self._next_number + 1
        self._resynthesized[number] = resynthesized
        while len(self._resynthesized) > MAX_RESYNTHESES:
            self._resynthesized.popitem(last=False)
        manifest = build_manifest([resynthesized])
        manifest["data"][0]["number"] = number
        return manifest
