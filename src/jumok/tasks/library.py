"""Which documents a pretraining recipe means: what to train on, what to validate with, what to test on.

A recipe may name all three. Where it names no validation or test data, so many documents are held out of the
training data, chosen by their text alone: one that comes twice is never on both sides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from jumok.data import documents
from jumok.data.documents import Document, Documents, Rows
from jumok.errors import InputError
from jumok.files import written
from jumok.tasks.common import held_out_share

__all__ = ["DataConfig", "Library"]

HELD_OUT = ("valid", "test")
MOST_HELD_OUT = 0.1  # of the training data, for each of validation and test
SCALE = 1 << 64
Named = str | list[str]


@dataclass(frozen=True)
class DataConfig:
    """The ``data:`` section. How documents are written is told in :mod:`jumok.data.documents`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    train: Named | None = None
    valid: Named | None = None  # None: held out of train
    test: Named | None = None
    text: str | int | list[str | int] | None = None  # of tables: the column to read
    together: int = 1  # so many rows of a table make a document
    held_out: int = 300  # documents for validation, and as many for test, where none are named
    on_error: Literal["stop", "skip"] = "stop"
    packed: Literal["auto"] | bool = "auto"  # sequences end to end; auto: where a GPU can

    def __post_init__(self) -> None:
        for name in ("held_out", "together"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        if self.together > 1 and self.text is None:
            raise ValueError("together counts rows of a table: name the column to read, as in text: review")


@dataclass(frozen=True)
class Library:
    """The documents of a run. ``folder`` is the run's, where what was held out is kept."""

    config: DataConfig
    folder: Path

    def train(self) -> Documents:
        """The training data, without what is held out."""
        if self.config.train is None:
            raise InputError(
                "there is no text to train on: name some, as in data.train=my.txt, with an empty line "
                "between documents; texts/*.txt.gz or the name of a data set (wiki_en/text) will do, too"
            )
        whole = self._find(self.config.train, "train")
        if not self._held_out:
            return whole
        share = self._share(whole)
        if not all(path.is_file() for path in self._held_out.values()):
            self._hold_out(whole, share)
        kept = [name not in self._held_out for name in HELD_OUT]

        def is_kept(document: Document) -> bool:
            place = int(_draw(document) / share)
            return place >= len(kept) or kept[place]

        return whole.only(f"without {share} for {list(self._held_out)}", is_kept)

    def held_out(self, name: str) -> Documents:
        """What training is watched with (valid), or what results are given on (test)."""
        if name not in HELD_OUT:
            raise InputError(f"--split {name}: it is test or valid")
        named = getattr(self.config, name)
        if named is not None:
            return self._find(named, name)
        kept = self._held_out[name]
        if not kept.is_file():
            raise InputError(
                f"{kept} is missing: the data that training held out; train again, or name data.{name}"
            )
        return documents.find(str(kept))

    def _find(self, named: Named, split: str) -> Documents:
        config = self.config
        rows = None if config.text is None else Rows(config.text, config.together)
        return documents.find(named, split=split, on_error=config.on_error, rows=rows)

    @property
    def _held_out(self) -> dict[str, Path]:
        """The splits that are held out of the training data, and where they are kept."""
        names = [name for name in HELD_OUT if getattr(self.config, name) is None]
        return {name: self.folder / "data" / f"{name}.txt" for name in names}

    def _share(self, whole: Documents) -> float:
        """Which share of the data is held out for one split."""
        return held_out_share(
            self.folder, "documents", lambda: sum(1 for _ in whole), self.config.held_out, MOST_HELD_OUT
        )

    def _hold_out(self, whole: Documents, share: float) -> None:
        """Write what is held out to files of its own, where anybody can read it."""
        kept: dict[str, list[Document]] = {name: [] for name in HELD_OUT}
        for document in whole:
            place = int(_draw(document) / share)
            if place < len(HELD_OUT):
                kept[HELD_OUT[place]].append(document)
        for name, path in self._held_out.items():
            if len(kept[name]) < 2:
                raise InputError(
                    f"of so few documents none can be held out; name data.{name}, or use more text. "
                    "An empty line separates documents"
                )
            with written(path) as part:
                texts = "\n\n".join(document.text for document in kept[name])
                part.write_text(f"{texts}\n", encoding="utf-8")


def _draw(document: Document) -> float:
    """A number from 0 to 1 that the text alone decides."""
    digest = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / SCALE
