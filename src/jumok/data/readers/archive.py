"""Files as data sets bring them, in a folder or inside a .tar: found by name, and read when they are needed.

Pictures and recordings are such files; what their bytes mean is told where they are decoded.
"""

from __future__ import annotations

import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, Generic, Self, TypeVar

from jumok.data.readers.formats import InvalidExample
from jumok.errors import InputError

__all__ = ["DataFile", "FileFolder", "TarArchive"]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that is there, on its own or inside a .tar, and has not been read yet."""

    description: ClassVar[str] = "file"  # as flaws call it

    path: Path  # of the file, or of the .tar
    name: str  # in the .tar or the folder
    offset: int  # its first byte in that file
    num_bytes: int  # bytes
    modified_ns: int  # when the file or the .tar was changed, in nanoseconds

    @classmethod
    def from_path(cls, path: Path) -> Self:
        """A file of its own."""
        found = FileFolder(path.parent, cls).find(path.name, str(path))
        if isinstance(found, InvalidExample):
            raise InputError(str(found))
        return found

    @property
    def location(self) -> str:
        return f"{self.path}:{self.name}" if self.offset else str(self.path)

    @property
    def identity(self) -> list[object]:
        """Other values for every other file, and for this one once it has changed."""
        return [os.path.abspath(self.path), self.name, self.offset, self.num_bytes, self.modified_ns]

    def read(self) -> bytes:
        """Its bytes."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read(self.num_bytes)
        except OSError as error:
            raise InputError(f"{self.location} cannot be read: {error.strerror or error}") from None


M = TypeVar("M", bound=DataFile)


class FileFolder(Generic[M]):
    """Files in a folder, by their path in it."""

    def __init__(self, path: Path, file_type: type[M]) -> None:
        self.path, self.file_type = path, file_type

    def find(self, name: str, location: str) -> M | InvalidExample:
        """The file of this name; ``location`` someone speaks of it, is told of a flaw."""
        path = self.path / name
        try:
            facts = path.stat()
        except (OSError, ValueError):
            return _missing_file(self.file_type, name, location, self.path)
        if not stat.S_ISREG(facts.st_mode):
            return _missing_file(self.file_type, name, location, self.path)
        return self.file_type(path, name, 0, facts.st_size, facts.st_mtime_ns)


class TarArchive(Generic[M]):
    """Files in a .tar, which is not unpacked: where each one begins is found out once.

    A file is found by its whole name (``images/dog.jpg``), or by its last part, if that is one of a kind.
    """

    def __init__(self, path: Path, file_type: type[M]) -> None:
        self.path, self.file_type = path, file_type
        self._by_name: dict[str, M] = {}
        self._by_basename: dict[str, M | None] = {}  # None: there are several
        try:
            time = path.stat().st_mtime_ns
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                    if not member.isreg() or member.issparse():
                        continue
                    name = member.name.removeprefix("./")
                    self._by_name[name] = file_type(path, name, member.offset_data, member.size, time)
        except tarfile.TarError as error:
            raise InputError(
                f"{path} cannot be read: {error}; expected a .tar that is not compressed and not cut off "
                f"(gunzip {path.name}, or unpack it into a folder)"
            ) from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
        for name, file in self._by_name.items():
            short = PurePosixPath(name).name
            self._by_basename[short] = None if short in self._by_basename else file

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str, location: str) -> M | InvalidExample:
        """The file of this name; ``location`` someone speaks of it, is told of a flaw."""
        name = name.removeprefix("./")
        found = self._by_name.get(name) or self._by_basename.get(name)
        return found or _missing_file(self.file_type, name, location, self.path)


def _missing_file(file_type: type[DataFile], name: str, location: str, folder: Path) -> InvalidExample:
    return InvalidExample(location, f"a missing {file_type.description}", f"{name} is not in {folder}")
