"""Files of a data set, in a folder or in a .tar archive, such as images and recordings.

They are found by name and read when they are needed. An archive is not unpacked.
"""

from __future__ import annotations

import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, Generic, Self, TypeVar

from jumok.data.readers.invalid_examples import InvalidExample
from jumok.errors import InputError


@dataclass(frozen=True, slots=True)
class DataFile:
    """An existing file, by itself or inside a .tar archive, that is read on demand."""

    description: ClassVar[str] = "file"  # for messages

    path: Path  # of the file, or of the archive
    name: str  # in the folder or the archive
    offset: int  # position of its first byte in ``path``
    num_bytes: int
    modified_ns: int  # modification time of ``path``, in nanoseconds

    @classmethod
    def from_path(cls, path: Path) -> Self:
        """A file by itself."""
        file = FileFolder(path.parent, cls).find(path.name, str(path))
        if isinstance(file, InvalidExample):
            raise InputError(str(file))
        return file

    @property
    def location(self) -> str:
        return f"{self.path}:{self.name}" if self.offset else str(self.path)

    @property
    def identity(self) -> list[object]:
        """Values that differ between files, and change when the file changes."""
        return [os.path.abspath(self.path), self.name, self.offset, self.num_bytes, self.modified_ns]

    def read(self) -> bytes:
        """Read the bytes."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read(self.num_bytes)
        except OSError as error:
            raise InputError(f"{self.location} cannot be read: {error.strerror or error}") from None


M = TypeVar("M", bound=DataFile)


class FileFolder(Generic[M]):
    """Files in a folder, by their relative path."""

    def __init__(self, path: Path, file_type: type[M]) -> None:
        self.path, self.file_type = path, file_type

    def find(self, name: str, location: str) -> M | InvalidExample:
        """The file of this name.

        ``location``, where the name was found, is part of an :class:`InvalidExample`.
        """
        path = self.path / name
        try:
            status = path.stat()
        except (OSError, ValueError):
            return _missing_file(self.file_type, name, location, self.path)
        if not stat.S_ISREG(status.st_mode):
            return _missing_file(self.file_type, name, location, self.path)
        return self.file_type(path, name, 0, status.st_size, status.st_mtime_ns)


class TarArchive(Generic[M]):
    """Files in a .tar archive, whose table of contents is read once.

    A file is found by its full name (``images/dog.jpg``), or by its base name if that is unique.
    """

    def __init__(self, path: Path, file_type: type[M]) -> None:
        self.path, self.file_type = path, file_type
        self._by_name: dict[str, M] = {}
        self._by_basename: dict[str, M | None] = {}  # None: not unique
        try:
            modified_ns = path.stat().st_mtime_ns
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps all members in memory
                    if not member.isreg() or member.issparse():
                        continue
                    name = member.name.removeprefix("./")
                    self._by_name[name] = file_type(path, name, member.offset_data, member.size, modified_ns)
        except tarfile.TarError as error:
            raise InputError(
                f"{path} cannot be read: {error}; expected a complete, uncompressed .tar "
                f"(gunzip {path.name}, or unpack it into a folder)"
            ) from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
        for name, file in self._by_name.items():
            basename = PurePosixPath(name).name
            self._by_basename[basename] = None if basename in self._by_basename else file

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str, location: str) -> M | InvalidExample:
        """The file of this name.

        ``location``, where the name was found, is part of an :class:`InvalidExample`.
        """
        name = name.removeprefix("./")
        file = self._by_name.get(name) or self._by_basename.get(name)
        return file or _missing_file(self.file_type, name, location, self.path)


def _missing_file(file_type: type[DataFile], name: str, location: str, folder: Path) -> InvalidExample:
    return InvalidExample(location, f"a missing {file_type.description}", f"{name} is not in {folder}")
