"""Pictures with captions: a table, or a folder as it is published, beside the pictures.

A recipe says where the captions are::

    train: my.tsv          a table (.tsv, .csv, .jsonl or .parquet, also .gz), a row a caption, with columns
                           for picture and caption, and for the split if all splits are in one table;
                           JSON may have a list of captions
    train: flickr8k        a folder, here or under JUMOK_DATA, with captions.tsv or another such table, or as
                           Flickr8k, Flickr30k and COCO are published:
                           Flickr8k.token.txt (and Flickr_8k.trainImages.txt …), annotations/captions_*.json,
                           and the splits by Karpathy, dataset_*.json
    pictures: photos.tar   the folder or the .tar with the pictures, if it is not found beside the captions
                           as images.tar, images or what it is called where it is published

All captions of a picture come together. A picture that is not there is a *flaw*; whether one that is there
can be decoded shows when it is (see ``pictures.py``).
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jumok.data import formats, sources, tables
from jumok.data.drawn import Drawn
from jumok.data.files import data_folder, lines, opened
from jumok.data.formats import Flaw, clean
from jumok.data.pictures import Archive, Folder, PictureFile
from jumok.data.shapes import Box
from jumok.data.tables import SPLITS, Column, split_name
from jumok.errors import InputError

__all__ = ["CAPTION", "PICTURE", "Captioned", "Columns", "Drawn", "PictureFile", "find", "pictures_of"]

# Where the captions of a folder may be: of all splits, or of one.
LAYOUTS = (
    *(f"captions{ending}{zipped}" for ending in formats.TABLES for zipped in ("", ".gz")),
    "captions.txt",
    "*.token.txt",
    "*_text/*.token.txt",
    "results_*.token",
    "dataset*.json",
    "annotations/captions_{split}*.json",
)
# Where pictures may be, as seen from the captions.
PICTURES = (
    "images.tar",
    "images",
    "Images",
    "Flicker8k_Dataset",  # it is spelled like that
    "Flickr8k_Dataset",
    "flickr30k-images",
    "flickr30k_images",
)
PICTURE, CAPTION = ("image", "picture"), ("caption", "captions")  # what the columns of tables are called


@dataclass(frozen=True, slots=True)
class Captioned:
    """A picture, all its captions, and where the first of them was found: ``file:line``.

    Where it is known what the words are about, the words of the first caption have ``boxes`` (or None).
    """

    picture: PictureFile | Drawn
    captions: tuple[str, ...]
    where: str
    boxes: tuple[Box | None, ...] = ()


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold what; one for the split need not be there."""

    picture: Column = PICTURE
    caption: Column = CAPTION
    split: str | int = "split"
    header: bool | None = None  # whether the first line names the columns; None: if they are told by name


@dataclass(frozen=True, slots=True)
class _Line:
    """A caption, or a list of them, as a file has it; ``split`` is None where the file does not tell."""

    picture: str
    caption: object
    split: str | None
    where: str


Found = Iterator[_Line | Flaw]
COLUMNS = Columns()


def find(
    where: str | Sequence[str],
    *,
    split: str | None = None,
    columns: Columns = COLUMNS,
    pictures: str | None = None,
) -> Iterator[Captioned | Flaw]:
    """The pictures that a recipe means, each with its captions, and flaws in the place of what is missing.

    Of captions that come with the name of a split, those of ``split`` are taken; *val*, *valid* and *dev* are
    the same. A file without such names is taken as a whole, but a folder that has only that is an error.
    """
    for name in [where] if isinstance(where, str) else where:
        for path, must_tell in _files(name, split):
            yield from _grouped(path, split, must_tell, columns, pictures_of(path, pictures))


def _grouped(
    path: Path, split: str | None, must_tell: bool, columns: Columns, pictures: Folder | Archive
) -> Iterator[Captioned | Flaw]:
    captions: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    splits: set[str] = set()
    for line in _read(path, columns):
        if isinstance(line, Flaw):
            yield line
            continue
        if split is not None:
            if line.split is None and must_tell:
                raise InputError(
                    f"{path} does not tell which pictures are for {split}. Name a file for each; or just "
                    f"this one, and some are held out of it: data.train={path} data.valid=null data.test=null"
                )
            splits.add(line.split or "")
            if line.split is not None and split_name(line.split) != split_name(split):
                continue
        some = line.caption if isinstance(line.caption, list) else [line.caption]
        for caption in some or [None]:  # an empty list has no caption, as an empty cell has none
            text = clean(caption, "caption", line.where)
            if isinstance(text, Flaw):
                yield text
            else:
                captions.setdefault(line.picture, []).append(text)
                places.setdefault(line.picture, line.where)
    if splits and not captions:
        there = ", ".join(sorted(filter(None, splits))) or "none"
        raise InputError(f"{path} has no captions of the split {split!r}; its splits are: {there}")
    for name, some in captions.items():
        place = f"{places[name]} {name}"
        found = pictures.find(name, place)
        if isinstance(found, Flaw):
            yield found
        elif not found.size:
            yield Flaw(place, "an empty picture")
        else:
            yield Captioned(found, tuple(some), places[name])


# --------------------------------------------------------------------------------------------------- places


def _files(name: str, split: str | None) -> list[tuple[Path, bool]]:
    """The files with the captions, and whether each has to tell its splits: it was found in a folder."""
    if name.startswith("hub:"):
        raise InputError(f"{name}: pictures are not read from the hub; fetch them, and name a table")
    for path in (Path(name), data_folder() / name):
        if path.is_file():
            return [(path, False)]
        if path.is_dir() and (found := _layout(path, split)):
            return [found]
    return [(path, False) for path in sources.files(name, (*formats.TABLES, ".json"), split)]


def _layout(folder: Path, split: str | None) -> tuple[Path, bool] | None:
    """The file with the captions of a folder, and whether it has to tell its splits."""
    names = SPLITS.get(split_name(split), (split,)) if split else ("",)
    for pattern in LAYOUTS:
        of_one_split = "{split}" in pattern
        for name in names if of_one_split else ("",):
            found = sorted(folder.glob(pattern.replace("{split}", glob.escape(name))))
            if len(found) > 1:
                shown = ", ".join(str(path.relative_to(folder)) for path in found[:5])
                raise InputError(f"{folder} has captions in several files: {shown}; name one of them")
            if found:
                return found[0], not of_one_split
    return None


def pictures_of(captions: Path, named: str | None = None) -> Folder | Archive:
    """Where the pictures are that a file speaks of: as it is said, or as it is usual."""
    if named is not None:
        for path in (Path(named), data_folder() / named):
            if path.exists():
                return Folder(path) if path.is_dir() else Archive(path)
        raise InputError(f"there is no folder or .tar {named!r} with pictures; data.pictures names it")
    own = captions.name.partition(".")[0].removeprefix("captions_")  # train2014, say
    nested = captions.parent.name == "annotations" or captions.parent.name.endswith("_text")
    for folder in (captions.parent, *([captions.parent.parent] if nested else [])):
        for name in (own, f"{own}.tar", f"images/{own}", *PICTURES):
            path = folder / name
            if path.is_dir():
                return Folder(path, beside=captions.parent)
            if path.suffix == ".tar" and path.is_file():
                return Archive(path)
    return Folder(captions.parent)


# --------------------------------------------------------------------------------------------------- formats


def _read(path: Path, columns: Columns) -> Found:
    """The captions of a file; its name, or what it begins with, tells the format."""
    ending = formats.ending(path)
    if ending in formats.TABLES:
        return _table(path, columns)
    if ending == ".json":
        return _json(path)
    first = next(lines(path), "") or ""
    if "#" in first.partition("\t")[0] and "\t" in first:
        return _tokens(path)
    if first.replace(" ", "").lower() == "image,caption":
        return _commas(path)
    raise InputError(
        f"{path} has captions in no known form; its first line is {first[:60]!r}. Expected a table "
        f"({', '.join(formats.TABLES)}), lines of picture.jpg#0, a tab and a caption, or COCO's .json"
    )


def _table(path: Path, columns: Columns) -> Found:
    tells = isinstance(columns.split, int) or columns.split in tables.names(path)
    wanted = [columns.picture, columns.caption, *([columns.split] if tells else [])]
    for record in tables.read(path, wanted, columns.header):
        if isinstance(record, Flaw):
            yield record
            continue
        name, caption, *split = record.values
        yield _line(name, caption, str(split[0] or "") if split else None, record.where)


def _tokens(path: Path) -> Found:
    """Flickr8k's and Flickr30k's own: ``picture.jpg#0``, a tab, a caption; splits are lists beside it."""
    split_of: dict[str, str] = {}
    listed = sorted(path.parent.glob("*[._]*Images.txt"))
    for one in listed:
        split = one.name.removesuffix("Images.txt").rpartition(".")[2]
        split_of |= {name.strip(): split for name in lines(one) if name}
    for number, line in enumerate(lines(path), 1):
        where = f"{path}:{number}"
        if line is None:
            yield formats.too_long(path, number)
        elif line.strip():
            name, tab, caption = line.partition("\t")
            picture, sign, _ = name.rpartition("#")
            if not tab or not sign:
                yield Flaw(where, "no picture.jpg#0 and caption between tabs", f"it is {line[:60]!r}")
            else:
                yield _line(picture, caption, split_of.get(picture, "") if listed else None, where)


def _commas(path: Path) -> Found:
    """Flickr8k as it is found at Kaggle: a CSV named .txt, not all of whose commas are quoted."""
    for number, cells in formats.csv_rows(path):
        where = f"{path}:{number}"
        if isinstance(cells, Flaw):
            yield cells
        elif number > 1 and any(cells):
            yield _line(cells[0], ",".join(cells[1:]), None, where)


def _json(path: Path) -> Found:
    """COCO's: pictures and captions apart. Or Karpathy's: pictures with a split and their sentences."""
    try:
        with opened(path) as file:
            told = json.load(file)
        pictures = told["images"]
        if "annotations" in told:
            names = {picture["id"]: picture["file_name"] for picture in pictures}
            for number, one in enumerate(told["annotations"]):
                where = f"{path}:annotations[{number}]"
                name = names.get(one["image_id"])
                if name is None:
                    yield Flaw(where, "a picture that is not listed", f"image_id {one['image_id']!r}")
                else:
                    yield _line(name, one.get("caption"), None, where)
        else:
            for number, picture in enumerate(pictures):
                name = "/".join(filter(None, (picture.get("filepath"), picture["filename"])))
                said = [sentence["raw"] for sentence in picture["sentences"]]
                yield _line(name, said, picture["split"], f"{path}:images[{number}]")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not as COCO's captions (images with id and file_name, annotations with image_id and "
            f"caption) nor as Karpathy's splits (images with filename, split and sentences): {error!r}"
        ) from None


def _line(picture: object, caption: object, split: str | None, where: str) -> _Line | Flaw:
    name = clean(picture, "picture", where)
    return name if isinstance(name, Flaw) else _Line(name, caption, split, where)
