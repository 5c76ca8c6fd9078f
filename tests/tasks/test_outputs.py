"""Outputs of commands: they never overwrite inputs, and errors about a full disk name the file."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from translation_runs import SIZES, SMALL

from jumok.cli import app as cli_app
from jumok.data.audio import save_audio
from jumok.data.readers.text_files import MAX_LINE_BYTES
from jumok.inference.line_io import read_chunks
from jumok.run import Run

pytestmark = pytest.mark.long


resource = pytest.importorskip("resource")

TINY = [*SMALL, *SIZES["seq2seq"], "data.builtin_size=60", "data.held_out_size=11"]
TEXT = "this is an example\nthe sun is red\n"


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def jumok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Returns a function that runs a command in this process, in a temporary folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object, stdin: Path | None = None) -> Result:
        monkeypatch.setattr(sys, "argv", ["jumok", *map(str, words)])
        capsys.readouterr()
        with io.StringIO() if stdin is None else stdin.open(encoding="utf-8") as file:
            monkeypatch.setattr(sys, "stdin", file)
            with pytest.raises(SystemExit) as ended:
                cli_app.main()
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    return run


# ----------------------------------------------------------------------------- inputs are not overwritten


@pytest.mark.parametrize("alias", ["same", "symlink", "hard link", "other spelling", "part"])
@pytest.mark.parametrize("again", [[], ["--overwrite"]])
def test_an_input_is_not_overwritten(
    jumok: Callable[..., Result], bahdanau: Run, tmp_path: Path, alias: str, again: list[str]
) -> None:
    source, out = tmp_path / "x.txt", tmp_path / "y.txt"
    if alias == "symlink":
        out.symlink_to(source)
    elif alias == "part":
        source = tmp_path / "y.txt.part"
    source.write_text(TEXT, encoding="utf-8")
    if alias == "hard link":
        os.link(source, out)
    elif alias == "same":
        out = source
    elif alias == "other spelling":
        out = tmp_path / "." / ".." / tmp_path.name / "x.txt"
    result = jumok("run", bahdanau.folder, source, "--out", out, *again)
    assert result.status == 1
    assert "would be overwritten" in result.err
    assert source.read_text(encoding="utf-8") == TEXT


def test_standard_input_and_files_of_the_run_are_not_overwritten(
    jumok: Callable[..., Result], bahdanau: Run, tmp_path: Path
) -> None:
    source = tmp_path / "x.txt"
    source.write_text(TEXT, encoding="utf-8")
    result = jumok("run", bahdanau.folder, "--out", source, stdin=source)
    assert result.status == 1
    assert "standard input" in result.err
    folder = shutil.copytree(bahdanau.folder, tmp_path / "run")
    before = {path: path.read_bytes() for path in Run.open(folder).model_files}
    for path in before:
        for option in ("--out", "--attention-map"):
            result = jumok("run", folder, source, option, path)
            assert result.status == 1
            assert "jumok: " in result.err
    assert {path: path.read_bytes() for path in Run.open(folder).model_files} == before
    assert source.read_text(encoding="utf-8") == TEXT


def test_other_commands_do_not_overwrite_their_inputs(
    jumok: Callable[..., Result], bahdanau: Run, tmp_path: Path
) -> None:
    pairs, text = tmp_path / "pairs.tsv", tmp_path / "text.html"
    pairs.write_text("this is an example\t이것은 예문이다\n", encoding="utf-8")
    text.write_text("this is an example", encoding="utf-8")
    old = tmp_path / "old"
    old.mkdir()
    (old / "jumok.json").write_text("{}", encoding="utf-8")  # as an earlier export has
    torch.save({"x": torch.ones(2)}, old / "pytorch_model.bin")
    for words in (
        ["align", bahdanau.folder, pairs, "--out", pairs],
        ["look", bahdanau.folder, text, "--out", text],
        ["convert", old, "--out", old],
        ["export", bahdanau.folder, bahdanau.folder],
    ):
        result = jumok(*words)
        assert result.status == 1
        assert "would be overwritten" in result.err
    assert (old / "pytorch_model.bin").is_file()


# ---------------------------------------------------------------------------------------- invalid lines


def test_invalid_utf_8_is_skipped(jumok: Callable[..., Result], bahdanau: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "x.txt", tmp_path / "y.txt"
    source.write_bytes(b"the sun is red\n\xff\xfe bad\nthe sun is red\n\x80\n")
    result = jumok("run", bahdanau.folder, source, "--out", out, "--on-error", "skip")
    assert result.status == 0, result.err
    lines = out.read_text(encoding="utf-8").split("\n")
    assert [bool(line) for line in lines] == [True, False, True, False, False]
    assert lines[0] == lines[2]
    assert "line 2: this is not UTF-8" in result.err
    assert "line 4: this is not UTF-8" in result.err
    result = jumok("run", bahdanau.folder, source)
    assert result.status == 1
    assert f"{source}:2: this is not UTF-8" in result.err


def test_damaged_gzip_files_are_an_error(jumok: Callable[..., Result], bahdanau: Run, tmp_path: Path) -> None:
    source = tmp_path / "x.txt.gz"
    source.write_bytes(gzip.compress(os.urandom(9000))[:5000])
    result = jumok("run", bahdanau.folder, source, "--on-error", "skip")
    assert result.status == 1
    assert "x.txt.gz is damaged" in result.err
    source.write_bytes(gzip.compress(bytes(2 * MAX_LINE_BYTES)))  # 32 KB
    result = jumok("run", bahdanau.folder, source)
    assert result.status == 1
    assert "x.txt.gz:1: this line has over" in result.err


def test_a_line_may_arrive_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.RawIOBase):
        pieces = iter([b"a"] * 1000 + [b"\nb\n"])

        def read(self, size: int = -1) -> bytes:
            return next(self.pieces, b"")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe()))
    with read_chunks(None) as some:
        assert [line for lines in some for line in lines] == ["a" * 1000, "b"]


# ------------------------------------------------------------------------------- full disks and memory


@contextlib.contextmanager
def small_files(size: int) -> Iterator[None]:
    """Limit the size of files, which has the effect of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("words", "size", "name"),
    [
        (["run", "{run}", "{text}", "--out", "out.txt"], 100, "out.txt"),
        (["run", "{run}", "{text}", "--out", "out.txt"], 800, "out.txt"),
        (["run", "{run}", "the sun is red", "--attention-map", "map.png"], 4000, "map.png"),
        (["look", "{run}", "the sun is red", "--out", "map.html"], 4000, "map.html"),
        (["export", "{transformer}", "hf"], 2000, "model.safetensors"),
        (["convert", "{old}", "--out", "new"], 400, "model.safetensors"),
        (["train", "bahdanau", *TINY, "--out", "new"], 1000, "recipe.yaml"),
        (["train", "bahdanau", *TINY, "--out", "new"], 50_000, ".safetensors"),
    ],
)  # fmt: skip
def test_a_full_disk_is_reported_with_the_file(
    jumok: Callable[..., Result],
    bahdanau: Run,
    transformer: Run,
    tmp_path: Path,
    words: list[str],
    size: int,
    name: str,
) -> None:
    old, text = tmp_path / "old", tmp_path / "text.txt"
    old.mkdir()
    torch.save({"x": torch.ones(999)}, old / "pytorch_model.bin")
    text.write_text("the sun is red\n" * 50, encoding="utf-8")
    (tmp_path / "out.txt").write_text("before", encoding="utf-8")
    places = {"run": bahdanau.folder, "transformer": transformer.folder, "old": old, "text": text}
    with small_files(size):
        result = jumok(*(word.format(**places) for word in words))
    assert result.status == 1
    last = result.err.splitlines()[-1]
    assert last.startswith("jumok: File too large: ")
    assert name in last
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "before"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_device_is_reported(jumok: Callable[..., Result], bahdanau: Run) -> None:
    result = jumok("run", bahdanau.folder, "the sun is red", "--out", "/dev/full")
    assert result.status == 1
    assert result.err.splitlines()[-1] == "jumok: No space left on device: /dev/full"


def test_a_recording_on_a_full_disk_is_reported(tmp_path: Path) -> None:
    for ending in (".wav", ".flac", ".ogg"):
        with small_files(1000), pytest.raises(OSError, match="File too large") as error:
            save_audio(tmp_path / f"speech{ending}", np.random.default_rng(0).uniform(-1, 1, 9000), 8000)
        assert error.value.filename.endswith(f"speech{ending}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["model.width", "model.embedding_width", "tokenizer.vocab_size"])
def test_an_impossible_size_is_reported_with_its_key(jumok: Callable[..., Result], key: str) -> None:
    result = jumok("train", "bahdanau", f"{key}={10**12}", "--out", "run")
    assert result.status == 1
    assert f"{key}: 1000000000000 is too large" in result.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_running_out_of_memory_is_reported_in_one_line(
    jumok: Callable[..., Result], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("jumok.tasks.training.train", fail)
    result = jumok("train", "bahdanau", "--out", "run")
    assert result.status == 1
    assert result.err.startswith("jumok: out of memory: use smaller batches")
