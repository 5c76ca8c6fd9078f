"""Which documents a pretraining recipe means: what to train on, what to validate with, what to test on.

A recipe may name all three. Where it names no validation or test data, so many documents are held out of the
training data, chosen by their text alone: one that comes twice is never on both sides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from jumok.data.readers import documents
from jumok.data.readers.documents import DocumentCorpus, DocumentRows, TextDocument
from jumok.errors import InputError
from jumok.files import atomic_write
from jumok.tasks.common import resolve_held_out_fraction

__all__ = ["PretrainingData", "PretrainingDataConfig"]

HELD_OUT_SPLITS = ("valid", "test")
MAX_HELD_OUT_FRACTION = 0.1  # of the training data, for each of validation and test
HASH_RANGE = 1 << 64
DataSource = str | list[str]


@dataclass(frozen=True)
class PretrainingDataConfig:
    """The ``data:`` section. How documents are written is told in :mod:`jumok.data.documents`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    train: DataSource | None = None
    valid: DataSource | None = None  # None: held out of train
    test: DataSource | None = None
    text_column: str | int | list[str | int] | None = None  # of tables: the column to read
    rows_per_document: int = 1  # so many rows of a table make a document
    held_out_size: int = 300  # documents for validation, and as many for test, where none are named
    on_error: Literal["stop", "skip"] = "stop"
    packing: Literal["auto"] | bool = "auto"  # sequences end to end; auto: where a GPU can

    def __post_init__(self) -> None:
        for name in ("held_out_size", "rows_per_document"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        if self.rows_per_document > 1 and self.text_column is None:
            raise ValueError("rows_per_document counts rows of a table: name the column to read, as in text_column: review")


@dataclass(frozen=True)
class PretrainingData:
    """The documents of a run. ``folder`` is the run's, where what was held out is kept."""

    config: PretrainingDataConfig
    folder: Path

    def train_documents(self) -> DocumentCorpus:
        """The training data, without what is held out."""
        if self.config.train is None:
            raise InputError(
                "there is no text to train on: name some, as in data.train=my.txt, with an empty line "
                "between documents; texts/*.txt.gz or the name of a data set (wiki_en/text) will do, too"
            )
        whole = self._open_documents(self.config.train, "train")
        if not self._held_out_paths:
            return whole
        share = self._resolve_held_out_fraction(whole)
        if not all(path.is_file() for path in self._held_out_paths.values()):
            self._write_held_out(whole, share)
        kept = [name not in self._held_out_paths for name in HELD_OUT_SPLITS]

        def is_kept(document: TextDocument) -> bool:
            place = int(_hash_fraction(document) / share)
            return place >= len(kept) or kept[place]

        return whole.filter(f"without {share} for {list(self._held_out_paths)}", is_kept)

    def held_out_documents(self, split_name: str) -> DocumentCorpus:
        """What training is watched with (valid), or what results are given on (test)."""
        if split_name not in HELD_OUT_SPLITS:
            raise InputError(f"--split {split_name}: it is test or valid")
        named = getattr(self.config, split_name)
        if named is not None:
            return self._open_documents(named, split_name)
        kept = self._held_out_paths[split_name]
        if not kept.is_file():
            raise InputError(
                f"{kept} is missing: the data that training held out; train again, or name data.{split_name}"
            )
        return documents.find_documents(str(kept))

    def _open_documents(self, data_source: DataSource, split: str) -> DocumentCorpus:
        config = self.config
        rows = (
            None if config.text_column is None else DocumentRows(config.text_column, config.rows_per_document)
        )
        return documents.find_documents(data_source, split=split, on_error=config.on_error, rows=rows)

    @property
    def _held_out_paths(self) -> dict[str, Path]:
        """The splits that are held out of the training data, and where they are kept."""
        names = [name for name in HELD_OUT_SPLITS if getattr(self.config, name) is None]
        return {name: self.folder / "data" / f"{name}.txt" for name in names}

    def _resolve_held_out_fraction(self, all_documents: DocumentCorpus) -> float:
        """Which share of the data is held out for one split."""
        return resolve_held_out_fraction(
            self.folder,
            "documents",
            lambda: sum(1 for _ in all_documents),
            self.config.held_out_size,
            MAX_HELD_OUT_FRACTION,
        )

    def _write_held_out(self, all_documents: DocumentCorpus, fraction: float) -> None:
        """Write what is held out to files of its own, where anybody can read it."""
        kept: dict[str, list[TextDocument]] = {name: [] for name in HELD_OUT_SPLITS}
        for document in all_documents:
            place = int(_hash_fraction(document) / fraction)
            if place < len(HELD_OUT_SPLITS):
                kept[HELD_OUT_SPLITS[place]].append(document)
        for name, path in self._held_out_paths.items():
            if len(kept[name]) < 2:
                raise InputError(
                    f"of so few documents none can be held out; name data.{name}, or use more text. "
                    "An empty line separates documents"
                )
            with atomic_write(path) as part:
                texts = "\n\n".join(document.text for document in kept[name])
                part.write_text(f"{texts}\n", encoding="utf-8")


def _hash_fraction(document: TextDocument) -> float:
    """A number from 0 to 1 that the text alone decides."""
    digest = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / HASH_RANGE
