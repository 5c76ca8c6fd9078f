"""The built-in scenes as pictures among others: told by two numbers, and drawn when they are looked at.

>>> drawn(5, 2).caption
'a purple circle left of a small purple moon'
>>> Drawn.named("scenes:7").decode().shape
(96, 96, 3)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from jumok.data.builtin.scenes import Language, ShapeScene, draw_scene
from jumok.data.caches.feature_cache import digest_sources
from jumok.data.images import IMAGE_LIMITS, ImageLimits, Pixels
from jumok.errors import InputError

__all__ = ["DATA_SEED", "LANGUAGES", "BuiltinScene", "draw_cached_scene"]

LANGUAGES: dict[str, Language] = {"scenes": "en", "scenes-en": "en", "scenes-ko": "ko"}  # by the data's name
DATA_SEED, UNSEEN_SEED = 1, 2  # of scenes to learn from, hold out and test with; of those that one asks about
CACHED_SCENES = 1 << 13  # scenes of 27 KiB: those that were drawn for their captions are looked at soon


@functools.lru_cache(CACHED_SCENES)
def draw_cached_scene(seed: int, index: int) -> ShapeScene:
    """A scene with its English caption."""
    return draw_scene(seed, index)


@functools.cache
def _renderer_digest() -> str:
    return digest_sources("jumok.data.builtin.scenes", "jumok.data.builtin.shapes")


@dataclass(frozen=True, slots=True)
class BuiltinScene:
    """A scene that is not in a file."""

    seed: int
    index: int

    @classmethod
    def from_name(cls, name: str) -> BuiltinScene | None:
        """What ``scenes:7`` means, a scene that no model has learned from; None for another name."""
        kind, colon, number = name.partition(":")
        if kind not in LANGUAGES or not colon:
            return None
        if not number.isdecimal() or len(number) > 18:
            raise InputError(f"{name}: a scene is told by its number, as in {kind}:7")
        return cls(UNSEEN_SEED, int(number))

    @property
    def name(self) -> str:
        return f"scene {self.index}"

    @property
    def location(self) -> str:
        return f"scenes:{self.index}"

    @property
    def identity(self) -> list[object]:
        """Other values for every other picture, and for every other way to draw it."""
        return ["scenes", _renderer_digest(), self.seed, self.index]

    def decode(self, location: str | None = None, limits: ImageLimits = IMAGE_LIMITS) -> Pixels:
        """Its colours ``(height, width, 3)``."""
        return draw_cached_scene(self.seed, self.index).pixels
