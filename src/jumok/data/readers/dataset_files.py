"""Files of a data set, found by the name that a recipe gives.

A name is a file, a pattern (``jaquad/train/*``), or a split of a folder (``sst2/train``), here or under JUMOK_DATA.
"""

from __future__ import annotations

import difflib
import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from jumok.data.readers.text_files import data_folder
from jumok.errors import InputError

NON_DATA_SUFFIXES = [".md", ".rst", ".html", ".pdf", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".log", ".zip"]
T = TypeVar("T")


def find_files(dataset: str | Sequence[str], suffixes: Sequence[str], split: str | None = None) -> list[Path]:
    """The files of a data set whose examples are each in a single file.

    ``dataset`` is a name or a list of names. If it is just a folder, ``split`` is used. A split is a file with one
    of the suffixes, gzipped or not.
    """
    files: list[Path] = []
    for name in as_names(dataset):
        matches = find_existing(name) or find_split(name, split, lambda path: find_with_suffix(path, suffixes)[:1])
        if not matches:
            problem = f"no {split}{suffixes[0]}" if split else "several splits"
            raise dataset_not_found(name, split, f"is a folder with {problem}", f"or all its files: {name}/*")
        files += matches
    return files


def as_names(dataset: str | Sequence[str]) -> list[str]:
    """The names of a data set, at least one."""
    names = [dataset] if isinstance(dataset, str) else list(dataset)
    if not names:
        raise InputError("there is no file to read; name at least one")
    return names


def find_existing(name: str) -> list[Path]:
    """The file of this name, or the files of this pattern."""
    for path in search_paths(name):
        if path.is_file():
            return [path]
        if files := [match for match in map(Path, sorted(glob.glob(str(path)))) if match.is_file()]:
            return files
    return []


def find_split(name: str, split: str | None, find: Callable[[Path], T]) -> T | None:
    """What ``find`` returns for ``split`` in the folder of this name, or for the name itself as a split.

    ``find`` gets the path of the split without its suffix, and returns something empty if there is no such file.
    """
    for path in search_paths(name):
        stem = path / split if path.is_dir() and split else path
        if stem.name and (split or not path.is_dir()) and (match := find(stem)):
            return match
    return None


def find_with_suffix(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files of this name that have one of the suffixes, gzipped or not."""
    names = (f"{path.name}{suffix}{gz}" for suffix in suffixes for gz in ("", ".gz"))
    return [candidate for candidate in map(path.with_name, names) if candidate.is_file()]


def search_paths(name: str) -> tuple[Path, Path]:
    """Where a name is looked up: here, and under JUMOK_DATA."""
    return Path(name), data_folder() / name


def dataset_not_found(name: str, split: str | None, problem: str, hint: str) -> InputError:
    """The error for a missing data set; it lists existing files and folders, the most similar first.

    ``problem`` and ``hint`` are for the case that the name is a folder.
    """
    for path in search_paths(name):
        if path.is_dir():
            return InputError(
                f"{path} {problem}; it contains: {_list_similar(split or '', path)}. Name one of its splits, as in "
                f"{path.name}/train, {hint}"
            )
    for path in search_paths(name):
        if Path(name).parent != Path() and path.parent.is_dir():
            return InputError(f"there is no {name}; {path.parent} contains: {_list_similar(path.name, path.parent)}")
    message, root = f"there is no file or data set {name!r}", data_folder()
    if similar := difflib.get_close_matches(name, _list_data_names(Path()), n=3):
        message += f"; similar names here: {', '.join(similar)}"
    if root.is_dir():
        message += f"; the data sets in {root} are: {_list_similar(name, root)}"
    else:
        message += f"; there is no folder {root} of data sets either (set JUMOK_DATA to use another one)"
    return InputError(f"{message}. For a data set of the Hugging Face hub, write hub:{name}")


def rank_by_similarity(name: str, names: Sequence[str]) -> list[str]:
    """Sort names by their similarity to ``name``, the most similar first."""
    return sorted(names, key=lambda candidate: -difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio())


def _list_similar(name: str, folder: Path) -> str:
    names = rank_by_similarity(name, _list_data_names(folder))
    shown = ", ".join(names[:10])
    return f"{shown}, and {len(names) - 10} more" if len(names) > 10 else shown or "nothing"


def _list_data_names(folder: Path) -> list[str]:
    """The folders and the files in a folder that may contain examples, unlike documentation and programs."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if not path.name.lower().startswith((".", "readme", "licence", "license"))
        and (path.is_dir() or (path.suffix and path.suffix.lower() not in NON_DATA_SUFFIXES))
    )
