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
can be decoded shows when it is (see ``images.py``).
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jumok.data.builtin.scenes import BuiltinScene
from jumok.data.builtin.shapes import Box
from jumok.data.images import ImageArchive, ImageFile, ImageFolder
from jumok.data.readers import formats as readers_formats
from jumok.data.readers import parallel_corpus, tables
from jumok.data.readers.formats import InvalidExample, clean_text
from jumok.data.readers.tables import SPLIT_ALIASES, ColumnSpec, normalize_split_name
from jumok.data.readers.text_files import data_folder, open_decompressed, read_lines
from jumok.errors import InputError

__all__ = [
    "CAPTION_COLUMN_NAMES",
    "IMAGE_COLUMN_NAMES",
    "BuiltinScene",
    "CaptionColumns",
    "CaptionExample",
    "ImageFile",
    "find_images",
    "read_caption_examples",
]

# Where the captions of a folder may be: of all splits, or of one.
CAPTION_FILE_PATTERNS = (
    *(f"captions{ending}{zipped}" for ending in readers_formats.TABLE_READERS for zipped in ("", ".gz")),
    "captions.txt",
    "*.token.txt",
    "*_text/*.token.txt",
    "results_*.token",
    "dataset*.json",
    "annotations/captions_{split}*.json",
)
# Where pictures may be, as seen from the captions.
IMAGE_FOLDER_NAMES = (
    "images.tar",
    "images",
    "Images",
    "Flicker8k_Dataset",  # it is spelled like that
    "Flickr8k_Dataset",
    "flickr30k-images",
    "flickr30k_images",
)
IMAGE_COLUMN_NAMES, CAPTION_COLUMN_NAMES = (
    ("image", "picture"),
    ("caption", "captions"),
)  # what the columns of tables are called


@dataclass(frozen=True, slots=True)
class CaptionExample:
    """A picture, all its captions, and where the first of them was found: ``file:line``.

    Where it is known what the words are about, the words of the first caption have ``boxes`` (or None).
    """

    image: ImageFile | BuiltinScene
    captions: tuple[str, ...]
    location: str
    boxes: tuple[Box | None, ...] = ()


@dataclass(frozen=True)
class CaptionColumns:
    """Which columns of a table hold what; one for the split need not be there."""

    image: ColumnSpec = IMAGE_COLUMN_NAMES
    caption: ColumnSpec = CAPTION_COLUMN_NAMES
    split: str | int = "split"
    header: bool | None = None  # whether the first line names the columns; None: if they are told by name


@dataclass(frozen=True, slots=True)
class _CaptionLine:
    """A caption, or a list of them, as a file has it; ``split`` is None where the file does not tell."""

    image: str
    caption: object
    split: str | None
    location: str


CaptionLines = Iterator[_CaptionLine | InvalidExample]
DEFAULT_COLUMNS = CaptionColumns()


def read_caption_examples(
    dataset: str | Sequence[str],
    *,
    split: str | None = None,
    columns: CaptionColumns = DEFAULT_COLUMNS,
    images: str | None = None,
) -> Iterator[CaptionExample | InvalidExample]:
    """The pictures that a recipe means, each with its captions, and flaws in the place of what is missing.

    Of captions that come with the name of a split, those of ``split`` are taken; *val*, *valid* and *dev* are
    the same. A file without such names is taken as a whole, but a folder that has only that is an error.
    """
    for name in [dataset] if isinstance(dataset, str) else dataset:
        for path, must_tell in _find_caption_files(name, split):
            yield from _group_by_image(path, split, must_tell, columns, find_images(path, images))


def _group_by_image(
    path: Path,
    split: str | None,
    needs_splits: bool,
    columns: CaptionColumns,
    images: ImageFolder | ImageArchive,
) -> Iterator[CaptionExample | InvalidExample]:
    captions: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    splits: set[str] = set()
    for line in _read_caption_file(path, columns):
        if isinstance(line, InvalidExample):
            yield line
            continue
        if split is not None:
            if line.split is None and needs_splits:
                raise InputError(
                    f"{path} does not tell which pictures are for {split}. Name a file for each; or just "
                    f"this one, and some are held out of it: data.train={path} data.valid=null data.test=null"
                )
            splits.add(line.split or "")
            if line.split is not None and normalize_split_name(line.split) != normalize_split_name(split):
                continue
        some = line.caption if isinstance(line.caption, list) else [line.caption]
        for caption in some or [None]:  # an empty list has no caption, as an empty cell has none
            text = clean_text(caption, "caption", line.location)
            if isinstance(text, InvalidExample):
                yield text
            else:
                captions.setdefault(line.image, []).append(text)
                places.setdefault(line.image, line.location)
    if splits and not captions:
        there = ", ".join(sorted(filter(None, splits))) or "none"
        raise InputError(f"{path} has no captions of the split {split!r}; its splits are: {there}")
    for name, some in captions.items():
        place = f"{places[name]} {name}"
        found = images.find(name, place)
        if isinstance(found, InvalidExample):
            yield found
        elif not found.num_bytes:
            yield InvalidExample(place, "an empty picture")
        else:
            yield CaptionExample(found, tuple(some), places[name])


# --------------------------------------------------------------------------------------------------- places


def _find_caption_files(name: str, split: str | None) -> list[tuple[Path, bool]]:
    """The files with the captions, and whether each has to tell its splits: it was found in a folder."""
    if name.startswith("hub:"):
        raise InputError(f"{name}: pictures are not read from the hub; fetch them, and name a table")
    for path in (Path(name), data_folder() / name):
        if path.is_file():
            return [(path, False)]
        if path.is_dir() and (found := _find_caption_file(path, split)):
            return [found]
    return [
        (path, False)
        for path in parallel_corpus.find_files(name, (*readers_formats.TABLE_READERS, ".json"), split)
    ]


def _find_caption_file(folder: Path, split: str | None) -> tuple[Path, bool] | None:
    """The file with the captions of a folder, and whether it has to tell its splits."""
    names = SPLIT_ALIASES.get(normalize_split_name(split), (split,)) if split else ("",)
    for pattern in CAPTION_FILE_PATTERNS:
        of_one_split = "{split}" in pattern
        for name in names if of_one_split else ("",):
            found = sorted(folder.glob(pattern.replace("{split}", glob.escape(name))))
            if len(found) > 1:
                shown = ", ".join(str(path.relative_to(folder)) for path in found[:5])
                raise InputError(f"{folder} has captions in several files: {shown}; name one of them")
            if found:
                return found[0], not of_one_split
    return None


def find_images(caption_path: Path, image_path: str | None = None) -> ImageFolder | ImageArchive:
    """Where the pictures are that a file speaks of: as it is said, or as it is usual."""
    if image_path is not None:
        for path in (Path(image_path), data_folder() / image_path):
            if path.exists():
                return ImageFolder(path) if path.is_dir() else ImageArchive(path)
        raise InputError(f"there is no folder or .tar {image_path!r} with pictures; data.pictures names it")
    own = caption_path.name.partition(".")[0].removeprefix("captions_")  # train2014, say
    nested = caption_path.parent.name == "annotations" or caption_path.parent.name.endswith("_text")
    for folder in (caption_path.parent, *([caption_path.parent.parent] if nested else [])):
        for name in (own, f"{own}.tar", f"images/{own}", *IMAGE_FOLDER_NAMES):
            path = folder / name
            if path.is_dir():
                return ImageFolder(path, table_folder=caption_path.parent)
            if path.suffix == ".tar" and path.is_file():
                return ImageArchive(path)
    return ImageFolder(caption_path.parent)


# --------------------------------------------------------------------------------------------------- formats


def _read_caption_file(path: Path, columns: CaptionColumns) -> CaptionLines:
    """The captions of a file; its name, or what it begins with, tells the format."""
    ending = readers_formats.file_suffix(path)
    if ending in readers_formats.TABLE_READERS:
        return _read_caption_table(path, columns)
    if ending == ".json":
        return _read_json_captions(path)
    first = next(read_lines(path), "") or ""
    if "#" in first.partition("\t")[0] and "\t" in first:
        return _read_flickr_tokens(path)
    if first.replace(" ", "").lower() == "image,caption":
        return _read_kaggle_csv(path)
    raise InputError(
        f"{path} has captions in no known form; its first line is {first[:60]!r}. Expected a table "
        f"({', '.join(readers_formats.TABLE_READERS)}), lines of picture.jpg#0, a tab and a caption, or COCO's .json"
    )


def _read_caption_table(path: Path, columns: CaptionColumns) -> CaptionLines:
    tells = isinstance(columns.split, int) or columns.split in tables.read_column_names(path)
    wanted = [columns.image, columns.caption, *([columns.split] if tells else [])]
    for record in tables.read_table(path, wanted, columns.header):
        if isinstance(record, InvalidExample):
            yield record
            continue
        name, caption, *split = record.values
        yield _make_line(name, caption, str(split[0] or "") if split else None, record.location)


def _read_flickr_tokens(path: Path) -> CaptionLines:
    """Flickr8k's and Flickr30k's own: ``image.jpg#0``, a tab, a caption; splits are lists beside it."""
    split_of: dict[str, str] = {}
    listed = sorted(path.parent.glob("*[._]*Images.txt"))
    for one in listed:
        split = one.name.removesuffix("Images.txt").rpartition(".")[2]
        split_of |= {name.strip(): split for name in read_lines(one) if name}
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}:{number}"
        if line is None:
            yield readers_formats.line_too_long(path, number)
        elif line.strip():
            name, tab, caption = line.partition("\t")
            picture, sign, _ = name.rpartition("#")
            if not tab or not sign:
                yield InvalidExample(
                    where, "no picture.jpg#0 and caption between tabs", f"it is {line[:60]!r}"
                )
            else:
                yield _make_line(picture, caption, split_of.get(picture, "") if listed else None, where)


def _read_kaggle_csv(path: Path) -> CaptionLines:
    """Flickr8k as it is found at Kaggle: a CSV named .txt, not all of whose commas are quoted."""
    for number, cells in readers_formats.iter_csv_rows(path):
        where = f"{path}:{number}"
        if isinstance(cells, InvalidExample):
            yield cells
        elif number > 1 and any(cells):
            yield _make_line(cells[0], ",".join(cells[1:]), None, where)


def _read_json_captions(path: Path) -> CaptionLines:
    """COCO's: pictures and captions apart. Or Karpathy's: pictures with a split and their sentences."""
    try:
        with open_decompressed(path) as file:
            told = json.load(file)
        pictures = told["images"]
        if "annotations" in told:
            names = {picture["id"]: picture["file_name"] for picture in pictures}
            for number, one in enumerate(told["annotations"]):
                where = f"{path}:annotations[{number}]"
                name = names.get(one["image_id"])
                if name is None:
                    yield InvalidExample(
                        where, "a picture that is not listed", f"image_id {one['image_id']!r}"
                    )
                else:
                    yield _make_line(name, one.get("caption"), None, where)
        else:
            for number, picture in enumerate(pictures):
                name = "/".join(filter(None, (picture.get("filepath"), picture["filename"])))
                said = [sentence["raw"] for sentence in picture["sentences"]]
                yield _make_line(name, said, picture["split"], f"{path}:images[{number}]")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not as COCO's captions (images with id and file_name, annotations with image_id and "
            f"caption) nor as Karpathy's splits (images with filename, split and sentences): {error!r}"
        ) from None


def _make_line(
    image: object, caption: object, split: str | None, location: str
) -> _CaptionLine | InvalidExample:
    name = clean_text(image, "picture", location)
    return name if isinstance(name, InvalidExample) else _CaptionLine(name, caption, split, location)
