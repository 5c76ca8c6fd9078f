"""Reader of image captions: a table, or a folder in the layout of a published data set.

A recipe names the captions::

    train: my.tsv          a table (.tsv, .csv, .jsonl or .parquet, optionally .gz), one caption per row, with
                           columns for image and caption, and for the split if all splits are in one table;
                           JSON may have a list of captions
    train: flickr8k        a folder, here or under JUMOK_DATA, with captions.tsv or another such table, or in
                           the layout of Flickr8k, Flickr30k and COCO:
                           Flickr8k.token.txt (and Flickr_8k.trainImages.txt …), annotations/captions_*.json,
                           and the splits by Karpathy, dataset_*.json
    images: photos.tar     the folder or the .tar with the images, if they are not beside the captions as
                           images.tar, images or in the folder of the published data set

All captions of an image come together. A missing image is an :class:`InvalidExample`. Whether an existing
image can be decoded is known when it is decoded (see ``images.py``).
"""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jumok.data.builtin.scenes import BuiltinScene
from jumok.data.builtin.shapes import Box
from jumok.data.images import ImageArchive, ImageFile, ImageFolder
from jumok.data.readers.dataset_files import find_files, search_paths
from jumok.data.readers.invalid_examples import InvalidExample, clean_text, line_too_long
from jumok.data.readers.tables import (
    SPLIT_ALIASES,
    TABLE_SUFFIXES,
    ColumnSpec,
    RowIterator,
    TableRow,
    iter_csv_rows,
    normalize_split_name,
    open_table,
    select_split,
)
from jumok.data.readers.text_files import file_suffix, open_decompressed, read_lines
from jumok.errors import InputError

# Files with the captions of a folder: of all splits, or of one.
CAPTION_FILE_PATTERNS = (
    *(f"captions{suffix}{gz}" for suffix in TABLE_SUFFIXES for gz in ("", ".gz")),
    "captions.txt",
    "*.token.txt",
    "*_text/*.token.txt",
    "results_*.token",
    "dataset*.json",
    "annotations/captions_{split}*.json",
)
# Folders and archives with the images, relative to the captions.
IMAGE_FOLDER_NAMES = (
    "images.tar",
    "images",
    "Images",
    "Flicker8k_Dataset",  # sic
    "Flickr8k_Dataset",
    "flickr30k-images",
    "flickr30k_images",
)
# Common column names.
IMAGE_COLUMN_NAMES, CAPTION_COLUMN_NAMES = ("image", "picture"), ("caption", "captions")


@dataclass(frozen=True, slots=True)
class CaptionExample:
    """An image, all its captions, and the location of the first, ``file:line``.

    ``boxes`` gives a box or None for each word of the first caption, if the boxes are known.
    """

    image: ImageFile | BuiltinScene
    captions: tuple[str, ...]
    location: str
    boxes: tuple[Box | None, ...] = ()


@dataclass(frozen=True)
class CaptionColumns:
    """The columns of a table. The column of the split is optional."""

    image: ColumnSpec = IMAGE_COLUMN_NAMES
    caption: ColumnSpec = CAPTION_COLUMN_NAMES
    split: str | int = "split"
    header: bool | None = None  # whether the first line is a header; None: if columns are given by name


DEFAULT_COLUMNS = CaptionColumns()


def read_caption_examples(
    dataset: str | Sequence[str],
    *,
    split: str | None = None,
    columns: CaptionColumns = DEFAULT_COLUMNS,
    images: str | None = None,
) -> Iterator[CaptionExample | InvalidExample]:
    """Read the images that a recipe names and their captions. A missing image is an :class:`InvalidExample`.

    If captions have splits, only those of ``split`` are read; *val*, *valid* and *dev* are the same. A file
    without splits is read completely, but a folder that has only such a file is an error.
    """
    for name in [dataset] if isinstance(dataset, str) else dataset:
        for path, needs_splits in _find_caption_files(name, split):
            yield from _group_by_image(path, split, needs_splits, columns, find_images(path, images))


def _group_by_image(
    path: Path,
    split: str | None,
    needs_splits: bool,
    columns: CaptionColumns,
    images: ImageFolder | ImageArchive,
) -> Iterator[CaptionExample | InvalidExample]:
    captions: dict[str, list[str]] = {}
    locations: dict[str, str] = {}
    for row in select_split(_read_caption_file(path, columns), split, str(path), "captions"):
        if isinstance(row, InvalidExample):
            yield row
            continue
        if needs_splits and split is not None and "split" not in row.values:
            raise InputError(
                f"{path} has no splits, so the images of {split} are unknown. Name a file for each split; or just "
                f"this one, to hold out some images: data.train={path} data.valid=null data.test=null"
            )
        name = clean_text(row.values["image"], "image", row.location)
        if isinstance(name, InvalidExample):
            yield name
            continue
        caption = row.values["caption"]
        texts = caption if isinstance(caption, list) else [caption]
        for text in texts or [None]:  # an empty list counts as an empty caption
            cleaned = clean_text(text, "caption", row.location)
            if isinstance(cleaned, InvalidExample):
                yield cleaned
            else:
                captions.setdefault(name, []).append(cleaned)
                locations.setdefault(name, row.location)
    for name, texts in captions.items():
        location = f"{locations[name]} {name}"
        file = images.find(name, location)
        if isinstance(file, InvalidExample):
            yield file
        elif not file.num_bytes:
            yield InvalidExample(location, "an empty image")
        else:
            yield CaptionExample(file, tuple(texts), locations[name])


# -------------------------------------------------------------------------------------------- finding files


def _find_caption_files(name: str, split: str | None) -> list[tuple[Path, bool]]:
    """The files with the captions, and whether each must have splits, because it was found in a folder."""
    if name.startswith("hub:"):
        raise InputError(f"{name}: images cannot be read from the hub; download them and name a table")
    for path in search_paths(name):
        if path.is_file():
            return [(path, False)]
        if path.is_dir() and (match := _find_caption_file(path, split)):
            return [match]
    return [(path, False) for path in find_files(name, (*TABLE_SUFFIXES, ".json"), split)]


def _find_caption_file(folder: Path, split: str | None) -> tuple[Path, bool] | None:
    """The file with the captions of a folder, and whether it must have splits."""
    names = SPLIT_ALIASES.get(normalize_split_name(split), (split,)) if split else ("",)
    for pattern in CAPTION_FILE_PATTERNS:
        has_split_name = "{split}" in pattern
        for name in names if has_split_name else ("",):
            matches = sorted(folder.glob(pattern.replace("{split}", glob.escape(name))))
            if len(matches) > 1:
                shown = ", ".join(str(path.relative_to(folder)) for path in matches[:5])
                raise InputError(f"{folder} has captions in several files: {shown}; name one of them")
            if matches:
                return matches[0], not has_split_name
    return None


def find_images(caption_path: Path, image_path: str | None = None) -> ImageFolder | ImageArchive:
    """The images of a file of captions: at ``image_path``, or in a usual place."""
    if image_path is not None:
        for path in search_paths(image_path):
            if path.exists():
                return ImageFolder(path) if path.is_dir() else ImageArchive(path)
        raise InputError(f"there is no folder or .tar {image_path!r}; set data.images to that of the images")
    stem = caption_path.name.partition(".")[0].removeprefix("captions_")  # such as train2014
    is_nested = caption_path.parent.name == "annotations" or caption_path.parent.name.endswith("_text")
    for folder in (caption_path.parent, *([caption_path.parent.parent] if is_nested else [])):
        for name in (stem, f"{stem}.tar", f"images/{stem}", *IMAGE_FOLDER_NAMES):
            path = folder / name
            if path.is_dir():
                return ImageFolder(path, table_folder=caption_path.parent)
            if path.suffix == ".tar" and path.is_file():
                return ImageArchive(path)
    return ImageFolder(caption_path.parent)


# --------------------------------------------------------------------------------------------------- formats


def _read_caption_file(path: Path, columns: CaptionColumns) -> RowIterator:
    """The captions of a file. Its suffix or its first line determines the format."""
    suffix = file_suffix(path)
    if suffix in TABLE_SUFFIXES:
        return _read_caption_table(path, columns)
    if suffix == ".json":
        return _read_json_captions(path)
    first_line = next(read_lines(path), "") or ""
    if "#" in first_line.partition("\t")[0] and "\t" in first_line:
        return _read_flickr_tokens(path)
    if first_line.replace(" ", "").lower() == "image,caption":
        return _read_kaggle_csv(path)
    raise InputError(
        f"{path} has captions in an unknown format; its first line is {first_line[:60]!r}. Expected a table "
        f"({', '.join(TABLE_SUFFIXES)}), lines of image.jpg#0, a tab and a caption, or .json "
        "of COCO"
    )


def _read_caption_table(path: Path, columns: CaptionColumns) -> RowIterator:
    table = open_table(path)
    requested = {"image": columns.image, "caption": columns.caption}
    if table.has_column(columns.split):
        requested["split"] = columns.split
    return table.read(requested, columns.header)


def _read_flickr_tokens(path: Path) -> RowIterator:
    """The format of Flickr8k and Flickr30k: ``image.jpg#0``, a tab, a caption. Splits are lists of images."""
    splits: dict[str, str] = {}
    split_files = sorted(path.parent.glob("*[._]*Images.txt"))
    for split_file in split_files:
        split = split_file.name.removesuffix("Images.txt").rpartition(".")[2]
        splits |= {name.strip(): split for name in read_lines(split_file) if name}
    for line_number, line in enumerate(read_lines(path), 1):
        location = f"{path}:{line_number}"
        if line is None:
            yield line_too_long(path, line_number)
        elif line.strip():
            name, tab, caption = line.partition("\t")
            image, hash_sign, _ = name.rpartition("#")
            split_value = {"split": splits.get(image, "")} if split_files else {}
            if tab and hash_sign:
                yield TableRow({"image": image, "caption": caption, **split_value}, location)
            else:
                yield InvalidExample(location, "not image.jpg#0, a tab and a caption", f"it is {line[:60]!r}")


def _read_kaggle_csv(path: Path) -> RowIterator:
    """Flickr8k from Kaggle: a CSV file with the suffix .txt and some unquoted commas."""
    for location, cells in itertools.islice(iter_csv_rows(path), 1, None):  # without the header
        if isinstance(cells, InvalidExample):
            yield cells
        else:
            yield TableRow({"image": cells[0], "caption": ",".join(cells[1:])}, location)


def _read_json_captions(path: Path) -> RowIterator:
    """COCO (separate images and annotations), or Karpathy's splits (images with a split and sentences)."""
    try:
        with open_decompressed(path) as file:
            content = json.load(file)
        images = content["images"]
        if "annotations" in content:
            names = {image["id"]: image["file_name"] for image in images}
            for number, annotation in enumerate(content["annotations"]):
                location = f"{path}:annotations[{number}]"
                name = names.get(annotation["image_id"])
                if name is None:
                    detail = f"image_id {annotation['image_id']!r}"
                    yield InvalidExample(location, "an image that is not listed", detail)
                else:
                    yield TableRow({"image": name, "caption": annotation.get("caption")}, location)
        else:
            for number, image in enumerate(images):
                name = "/".join(filter(None, (image.get("filepath"), image["filename"])))
                captions = [sentence["raw"] for sentence in image["sentences"]]
                values = {"image": name, "caption": captions, "split": image["split"]}
                yield TableRow(values, f"{path}:images[{number}]")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is neither in the format of COCO (images with id and file_name, annotations with "
            "image_id and caption) nor of Karpathy's splits (images with filename, split and sentences): "
            f"{error!r}"
        ) from None
