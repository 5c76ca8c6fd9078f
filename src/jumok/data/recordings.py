"""Recordings with what is said in them: a table, or a folder as it is published, beside the sounds.

A recipe says where they are::

    train: LJSpeech-1.1    a folder, here or under JUMOK_DATA, as LJSpeech is published: metadata.csv, with
                           lines of name|text|text read out, and the sounds in wavs/
    train: my.tsv          a table (.tsv, .csv, .jsonl or .parquet, also .gz), a row a recording, with columns
                           for file and text, and if there are any for speaker, emotion and split
    train: speech/fsdd     a folder, or a .tar that is not unpacked, with such a table (metadata.tsv) in it
    recordings: takes.tar  the folder or the .tar with the sounds, if they are not found beside the table
    train: voices          built-in: numbers in words, spoken on the spot in a handful of styles

A recording that is not there is a *flaw*; whether one that is there can be decoded shows when it is.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import ClassVar

from jumok.data import formats, sources, tables
from jumok.data.files import data_folder, lines
from jumok.data.formats import Flaw, clean
from jumok.data.kept import code
from jumok.data.members import Archive, Folder, Member
from jumok.data.sound import LIMITS, Limits, Sound, Wave, too_large
from jumok.data.tables import Record, split_name
from jumok.data.voices import Utterance, told, voice
from jumok.errors import InputError

__all__ = ["Columns", "Recording", "RecordingFile", "Said", "built_in", "find"]

# What the table of a folder, or of a .tar, may be called.
TABLES = tuple(
    f"{name}{ending}{zipped}"
    for name in ("metadata", "transcripts")
    for ending in formats.TABLES
    for zipped in ("", ".gz")
)
FOLDERS = ("", "wavs/", "wav/", "audio/", "clips/")  # where sounds may be, as seen from the table
ENDINGS = ("", ".wav", ".flac", ".ogg")  # that a name may have been given without
BAR = "|"


@dataclass(frozen=True, slots=True)
class RecordingFile(Member):
    """A recording that is there, in a file or inside a .tar, and has not been read yet."""

    what: ClassVar[str] = "recording"

    def decode(self, sound: Sound, where: str | None = None, limits: Limits = LIMITS) -> Wave | Flaw:
        """Its waveform by a config, or why there is none."""
        where = where or self.where
        if self.size > limits.size:
            return too_large(where, self.size, limits)
        try:
            data = self.read()
        except InputError as error:
            return Flaw(where, "a recording that cannot be read", str(error))
        return sound.waveform(data, where, limits)


@functools.cache
def _voices() -> str:
    return code("jumok.data.voices", "jumok.data.formants")


@dataclass(frozen=True, slots=True)
class Said:
    """A built-in utterance, which is in no file: told by two numbers, and spoken when it is listened to."""

    seed: int
    number: int
    rate: int = 16000

    @property
    def name(self) -> str:
        return f"utterance {self.number}"

    @property
    def where(self) -> str:
        return f"voices:{self.number}"

    @property
    def identity(self) -> list[object]:
        """Other values for every other utterance, and for every other way to speak it."""
        return ["voices", _voices(), self.seed, self.number, self.rate]

    @property
    def utterance(self) -> Utterance:
        return voice(self.seed, self.number, self.rate)

    def decode(self, sound: Sound, where: str | None = None, limits: Limits = LIMITS) -> Wave | Flaw:
        """Its waveform, at the rate of the config; its loudness is the style's and stays."""
        loud = sound if sound.config.loudness is None else Sound(replace(sound.config, loudness=None))
        return loud.prepared(self.utterance.wave, self.rate)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording, what is said in it, by whom and how, and where that was found: ``file:line``."""

    sound: RecordingFile | Said
    text: str
    where: str
    speaker: str = ""
    emotion: str = ""


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold what; of several names, the first that is there.

    Columns for speaker, emotion and split need not be there.
    """

    file: str | int | Sequence[str] = ("file", "audio", "path", "wav", "recording", "audio_filepath")
    text: str | int | Sequence[str] = ("text", "sentence", "transcript", "transcription")
    speaker: str | int | Sequence[str] = ("speaker", "speaker_id", "client_id")
    emotion: str | int | Sequence[str] = ("emotion", "style")
    split: str | int | Sequence[str] = "split"
    header: bool | None = None  # whether the first line names the columns; None: if they are told by name


COLUMNS = Columns()
Sounds = Folder[RecordingFile] | Archive[RecordingFile]
Found = Iterator[tuple[Record, str | None] | Flaw]  # with the split, where the table tells it


def built_in(seed: int, count: int, rate: int = 16000, first: int = 0) -> Iterator[Recording]:
    """So many built-in utterances, from the one of this number on; their styles stand for emotions."""
    for number in range(first, first + count):
        said = Said(seed, number, rate)
        text, style = told(seed, number)
        yield Recording(said, text, said.where, emotion=style)


def find(
    where: str | Sequence[str],
    *,
    split: str | None = None,
    columns: Columns = COLUMNS,
    recordings: str | None = None,
) -> Iterator[Recording | Flaw]:
    """The recordings that a recipe means, and flaws in the place of what is missing.

    Of those that come with the name of a split, those of ``split`` are taken; *val*, *valid* and *dev* are
    the same. A table without such names is taken as a whole.
    """
    for name in [where] if isinstance(where, str) else where:
        with contextlib.ExitStack() as stack:
            table, sounds, shown = _place(name, split, stack)
            if recordings is not None:
                sounds = _named(recordings)
            try:
                yield from _recordings(table, shown, sounds, split, columns)
            except InputError as error:  # what was taken out of a .tar is not known by that name
                raise InputError(str(error).replace(str(table), shown)) from None


def _recordings(
    table: Path, shown: str, sounds: Sounds, split: str | None, columns: Columns
) -> Iterator[Recording | Flaw]:
    splits: set[str] = set()
    taken = False
    for one in _read(table, columns):
        if isinstance(one, Flaw):
            yield replace(one, where=one.where.replace(str(table), shown))
            continue
        record, its_split = one
        if split is not None and its_split is not None:
            splits.add(its_split)
            if split_name(its_split) != split_name(split):
                continue
        taken = True
        yield _recording(record, record.where.replace(str(table), shown), sounds)
    if splits and not taken:
        raise InputError(f"{shown} has no recordings of the split {split!r}; its splits are: {_list(splits)}")


def _list(names: set[str]) -> str:
    return ", ".join(sorted(filter(None, names))) or "none"


def _recording(record: Record, where: str, sounds: Sounds) -> Recording | Flaw:
    name, text, speaker, emotion = record.values
    file, said = clean(name, "file", where), clean(text, "text", where)
    if isinstance(file, Flaw):
        return file
    if isinstance(said, Flaw):
        return said
    found = _sound(sounds, file, f"{where} {file}")
    if isinstance(found, Flaw):
        return found
    if not found.size:
        return Flaw(f"{where} {file}", "an empty recording")
    return Recording(found, said, where, *(str(one).strip() for one in (speaker, emotion)))


def _sound(sounds: Sounds, name: str, where: str) -> RecordingFile | Flaw:
    """As it is called, or where and as it is usual."""
    for ending in ENDINGS:
        for folder in FOLDERS:
            found = sounds.find(f"{folder}{name}{ending}", where)
            if not isinstance(found, Flaw):
                return found
    return sounds.find(name, where)


# --------------------------------------------------------------------------------------------------- places


def _place(name: str, split: str | None, stack: contextlib.ExitStack) -> tuple[Path, Sounds, str]:
    """The table, where its sounds are, and what the table is called in messages."""
    if name.startswith("hub:"):
        raise InputError(f"{name}: recordings are not read from the hub; fetch them, and name a table")
    for path in (Path(name), data_folder() / name):
        if path.is_dir():
            for table in TABLES:
                if (path / table).is_file():
                    return path / table, Folder(path, RecordingFile), str(path / table)
        for archive in (path, path.with_name(f"{path.name}.tar")):
            if archive.suffix == ".tar" and archive.is_file():
                return _unpacked(archive, stack)
        if path.is_file():
            return path, Folder(path.parent, RecordingFile), str(path)
    found = sources.files(name, tuple(formats.TABLES), split)
    if len(found) > 1:
        raise InputError(
            f"{name} means several tables; name them one by one: {', '.join(map(str, found[:5]))}"
        )
    return found[0], Folder(found[0].parent, RecordingFile), str(found[0])


def _unpacked(archive: Path, stack: contextlib.ExitStack) -> tuple[Path, Sounds, str]:
    """The table of a .tar, as a file for the time being."""
    sounds = Archive(archive, RecordingFile)
    for name in TABLES:
        found = sounds.find(name, name)
        if not isinstance(found, Flaw):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            table = folder / PurePosixPath(found.name).name
            table.write_bytes(found.read())
            return table, sounds, f"{archive}:{found.name}"
    raise InputError(f"{archive} has no table of its recordings in it; expected {', '.join(TABLES[:8:2])}")


def _named(recordings: str) -> Sounds:
    for path in (Path(recordings), data_folder() / recordings):
        if path.exists():
            return Folder(path, RecordingFile) if path.is_dir() else Archive(path, RecordingFile)
    raise InputError(f"there is no folder or .tar {recordings!r} with sounds; data.recordings names it")


# -------------------------------------------------------------------------------------------------- tables


def _read(table: Path, columns: Columns) -> Found:
    """Rows of file, text, speaker and emotion; the last two are "" where they are not told."""
    first = next((line for line in lines(table) if line), "") if formats.ending(table) == ".csv" else ""
    if BAR in first and "," not in first.partition(BAR)[0]:
        yield from _bars(table)
        return
    names = tables.names(table)
    # Of what must be there and is not, the reader of tables complains.
    required = [_column(one, names) or one for one in (columns.file, columns.text)]
    optional = [_column(one, names) for one in (columns.speaker, columns.emotion, columns.split)]
    there = [*required, *(one for one in optional if one is not None)]
    for record in tables.read(table, there, columns.header):
        if isinstance(record, Flaw):
            yield record
            continue
        values = iter(record.values)
        file, text = next(values), next(values)
        speaker, emotion, split = (None if one is None else str(next(values) or "") for one in optional)
        yield Record((file, text, speaker or "", emotion or ""), record.where), split


def _column(given: str | int | Sequence[str], names: Sequence[str]) -> str | int | None:
    """Of the names that a column may have, the first that is there; a number is taken as it is."""
    if isinstance(given, int):
        return given
    return next((name for name in ([given] if isinstance(given, str) else given) if name in names), None)


def _bars(table: Path) -> Found:
    """LJSpeech's own: name|text|text read out, without a header, and a quote is a character."""
    for number, cells in formats.split_rows(table, BAR):
        where = f"{table}:{number}"
        if isinstance(cells, Flaw):
            yield cells
        elif not any(cells):
            yield Flaw(where, formats.BLANK)
        elif len(cells) < 2:
            yield Flaw(where, "no name|text", f"it is {cells[0][:60]!r}")
        else:
            text = cells[2] if len(cells) > 2 and cells[2].strip() else cells[1]
            yield Record((cells[0], text, "", ""), where), None
