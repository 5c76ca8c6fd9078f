"""Recipes of tagging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jumok.data.readers.tagging import TagScheme
from jumok.tasks.config import BertDataConfig, BertRecipe


@dataclass(frozen=True)
class TaggingDataConfig(BertDataConfig):
    """The ``data:`` section. :mod:`jumok.data.readers.tagging` describes the format of files."""

    word_column: int = 1  # column of the words, from 1; -1 is the last
    tag_column: int = -1
    tag_scheme: TagScheme = "any"  # how tags mark entities; any: both IOB1 and IOB2


@dataclass(frozen=True)
class TaggingRecipe(BertRecipe):
    """A recipe of tagging."""

    task: Literal["tag"]
    data: TaggingDataConfig


RECIPE_TYPES: dict[str, type] = {"bert": TaggingRecipe}
