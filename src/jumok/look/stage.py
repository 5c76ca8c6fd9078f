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
from jumok.look.scene import Scene, answer, as_scenes, manifest
from jumok.look.tiles import Request

__all__ = ["Stage"]

KEPT = 8  # said anew: what windows may still show


class Stage:
    """One scene, or two to compare; ``retell`` adds others. Not for several threads at a time."""

    def __init__(self, scenes: Scene | Sequence[Scene]) -> None:
        self.scenes = as_scenes(scenes)
        self._anew: OrderedDict[int, Scene] = OrderedDict()
        self._next = len(self.scenes)

    def manifest(self) -> dict[str, Any]:
        return manifest(self.scenes)

    def answer(self, request: Request) -> bytes:
        """The packed numbers of any scene there is."""
        if (scene := self._anew.get(request.scene)) is not None:
            return answer([scene], replace(request, scene=0))
        if len(self.scenes) <= request.scene < self._next:
            raise InputError(
                f"scene={request.scene} came, which is not kept any more: the last {KEPT} said anew are; "
                "move a slider to have it said again"
            )
        return answer(self.scenes, request)

    def retell(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest of a scene said anew, with its number; InputError for what cannot be."""
        place = wish.get("scene", 0)
        if not isinstance(place, int) or not 0 <= place < len(self.scenes):
            raise InputError(f"scene={str(place)[:40]} came; expected 0 to {len(self.scenes) - 1}")
        scene = self.scenes[place]
        if scene.retell is None or scene.style is None:
            raise InputError("this scene has no style tokens that can be given other weights")
        weights = scene.style.read(wish.get("weights"))
        anew = scene.retell(weights)
        style = anew.style or replace(scene.style, weights=np.asarray([weights], np.float32))
        anew = replace(anew, title=scene.title, label=scene.label, style=style, retell=scene.retell)
        number, self._next = self._next, self._next + 1
        self._anew[number] = anew
        while len(self._anew) > KEPT:
            self._anew.popitem(last=False)
        told = manifest([anew])
        told["scenes"][0]["number"] = number
        return told
