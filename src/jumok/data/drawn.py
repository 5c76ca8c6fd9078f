"""The built-in scenes as pictures among others: told by two numbers, and drawn when they are looked at.

>>> drawn(5, 2).caption
'a purple circle left of a small purple moon'
>>> Drawn.named("scenes:7").decode().shape
(96, 96, 3)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from jumok.data.kept import code
from jumok.data.pictures import LIMITS, Limits, Pixels
from jumok.data.scenes import Language, Scene, scene
from jumok.errors import InputError

__all__ = ["LANGUAGES", "SEED", "Drawn", "drawn"]

LANGUAGES: dict[str, Language] = {"scenes": "en", "scenes-en": "en", "scenes-ko": "ko"}  # by the data's name
SEED, UNSEEN = 1, 2  # of scenes to learn from, hold out and test with; of those that one asks about
KEPT = 1 << 13  # scenes of 27 KiB: those that were drawn for their captions are looked at soon


@functools.lru_cache(KEPT)
def drawn(seed: int, number: int) -> Scene:
    """A scene with its English caption."""
    return scene(seed, number)


@functools.cache
def _scenes() -> str:
    return code("jumok.data.scenes", "jumok.data.shapes")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A scene that is not in a file."""

    seed: int
    number: int

    @classmethod
    def named(cls, name: str) -> Drawn | None:
        """What ``scenes:7`` means, a scene that no model has learned from; None for another name."""
        kind, colon, number = name.partition(":")
        if kind not in LANGUAGES or not colon:
            return None
        if not number.isdecimal() or len(number) > 18:
            raise InputError(f"{name}: a scene is told by its number, as in {kind}:7")
        return cls(UNSEEN, int(number))

    @property
    def name(self) -> str:
        return f"scene {self.number}"

    @property
    def where(self) -> str:
        return f"scenes:{self.number}"

    @property
    def identity(self) -> list[object]:
        """Other values for every other picture, and for every other way to draw it."""
        return ["scenes", _scenes(), self.seed, self.number]

    def decode(self, where: str | None = None, limits: Limits = LIMITS) -> Pixels:
        """Its colours ``(height, width, 3)``."""
        return drawn(self.seed, self.number).pixels
