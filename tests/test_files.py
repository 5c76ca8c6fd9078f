"""Atomic writing of folders."""

import os
from pathlib import Path
from typing import Any

import pytest

from jumok.files import atomic_write_folder


def never_current() -> bool:
    return False


def test_a_folder_replaces_an_earlier_one(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with atomic_write_folder(tmp_path / "out", never_current) as folder:
            (folder / "file").write_text(content)
    assert (tmp_path / "out" / "file").read_text() == "second"
    assert os.listdir(tmp_path) == ["out"]


def test_the_earlier_folder_is_restored_if_the_new_one_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("first")

    def fail(source: Any, target: Any) -> None:
        raise OSError("no space left on device")

    def write() -> None:
        with atomic_write_folder(tmp_path / "out", never_current) as folder:
            (folder / "file").write_text("second")
            monkeypatch.setattr("jumok.files._publish", fail)

    with pytest.raises(OSError, match="no space"):
        write()
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["out"]
