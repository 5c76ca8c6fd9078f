"""The scenes that a viewer shows, and those of late that were said anew with other weights of style tokens.

>>> stage = Stage(scene)  # doctest: +SKIP
>>> stage.retell({"scene": 0, "weights": [0.4, 0.0]})["scenes"][0]["number"]  # doctest: +SKIP
1
>>> stage.answer(Request(scene=1, layer=0, head=0, rows=(0, 5), cols=(0, 7)))  # doctest: +SKIP

Every scene has a number of its own, which is never used twice, so that two windows do not mix up what each
of them hears, and no answer that was kept is taken for another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jumok.errors import InputError
from jumok.look.viewer.tiles import TileRequest
from jumok.look.viewer.viewer_data import ViewerData, answer_request, as_viewer_data_tuple, build_manifest

__all__ = ["ViewerSession"]

MAX_RESYNTHESES = 8  # said anew: what windows may still show


class ViewerSession:
    """One scene, or two to compare; ``resynthesize`` adds others. Not for several threads at a time."""

    def __init__(self, viewer_data: ViewerData | Sequence[ViewerData]) -> None:
        self.viewer_data = as_viewer_data_tuple(viewer_data)
        self._resynthesized: OrderedDict[int, ViewerData] = OrderedDict()
        self._next_number = len(self.viewer_data)

    def build_manifest(self) -> dict[str, Any]:
        return build_manifest(self.viewer_data)

    def answer_request(self, request: TileRequest) -> bytes:
        """The packed numbers of any scene there is."""
        if (scene := self._resynthesized.get(request.data_index)) is not None:
            return answer_request([scene], replace(request, data_index=0))
        if len(self.viewer_data) <= request.data_index < self._next_number:
            raise InputError(
                f"scene={request.data_index} came, which is not kept any more: the last {MAX_RESYNTHESES} said anew are; "
                "move a slider to have it said again"
            )
        return answer_request(self.viewer_data, request)

    def resynthesize(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest of a scene said anew, with its number; InputError for what cannot be."""
        place = payload.get("scene", 0)
        if not isinstance(place, int) or not 0 <= place < len(self.viewer_data):
            raise InputError(f"scene={str(place)[:40]} came; expected 0 to {len(self.viewer_data) - 1}")
        scene = self.viewer_data[place]
        if scene.resynthesize is None or scene.style is None:
            raise InputError("this scene has no style tokens that can be given other weights")
        weights = scene.style.check_weights(payload.get("weights"))
        anew = scene.resynthesize(weights)
        style = anew.style or replace(scene.style, weights=np.asarray([weights], np.float32))
        anew = replace(
            anew, title=scene.title, label=scene.label, style=style, resynthesize=scene.resynthesize
        )
        number, self._next_number = self._next_number, self._next_number + 1
        self._resynthesized[number] = anew
        while len(self._resynthesized) > MAX_RESYNTHESES:
            self._resynthesized.popitem(last=False)
        told = build_manifest([anew])
        told["scenes"][0]["number"] = number
        return told
