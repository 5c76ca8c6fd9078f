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

from jumok.data.audio import AUDIO_LIMITS, AudioLimits, AudioProcessor, Waveform, file_too_large
from jumok.data.builtin.spoken_numbers import SyntheticUtterance, choose_text_and_style, synthesize_utterance
from jumok.data.caches.feature_cache import digest_sources
from jumok.data.readers import formats as readers_formats
from jumok.data.readers import parallel_corpus, tables
from jumok.data.readers.archive import DataFile, FileFolder, TarArchive
from jumok.data.readers.formats import InvalidExample, clean_text
from jumok.data.readers.tables import TableRecord, normalize_split_name
from jumok.data.readers.text_files import data_folder, read_lines
from jumok.errors import InputError

__all__ = [
    "AudioFile",
    "BuiltinUtterance",
    "SpeechColumns",
    "SpeechExample",
    "make_builtin_examples",
    "read_speech_examples",
]

# What the table of a folder, or of a .tar, may be called.
TABLE_NAMES = tuple(
    f"{name}{ending}{zipped}"
    for name in ("metadata", "transcripts")
    for ending in readers_formats.TABLE_READERS
    for zipped in ("", ".gz")
)
AUDIO_FOLDER_NAMES = ("", "wavs/", "wav/", "audio/", "clips/")  # where sounds may be, as seen from the table
AUDIO_SUFFIXES = ("", ".wav", ".flac", ".ogg")  # that a name may have been given without
LJSPEECH_SEPARATOR = "|"


@dataclass(frozen=True, slots=True)
class AudioFile(DataFile):
    """A recording that is there, in a file or inside a .tar, and has not been read yet."""

    description: ClassVar[str] = "recording"

    def decode(
        self, processor: AudioProcessor, location: str | None = None, limits: AudioLimits = AUDIO_LIMITS
    ) -> Waveform | InvalidExample:
        """Its waveform by a config, or why there is none."""
        location = location or self.location
        if self.num_bytes > limits.max_bytes:
            return file_too_large(location, self.num_bytes, limits)
        try:
            data = self.read()
        except InputError as error:
            return InvalidExample(location, "a recording that cannot be read", str(error))
        return processor.decode_waveform(data, location, limits)


@functools.cache
def _synthesizer_digest() -> str:
    return digest_sources("jumok.data.builtin.spoken_numbers", "jumok.data.builtin.formant_synthesizer")


@dataclass(frozen=True, slots=True)
class BuiltinUtterance:
    """A built-in utterance, which is in no file: told by two numbers, and spoken when it is listened to."""

    seed: int
    index: int
    sample_rate: int = 16000

    @property
    def name(self) -> str:
        return f"utterance {self.index}"

    @property
    def location(self) -> str:
        return f"voices:{self.index}"

    @property
    def identity(self) -> list[object]:
        """Other values for every other utterance, and for every other way to speak it."""
        return ["voices", _synthesizer_digest(), self.seed, self.index, self.sample_rate]

    @property
    def utterance(self) -> SyntheticUtterance:
        return synthesize_utterance(self.seed, self.index, self.sample_rate)

    def decode(
        self, processor: AudioProcessor, location: str | None = None, limits: AudioLimits = AUDIO_LIMITS
    ) -> Waveform | InvalidExample:
        """Its waveform, at the rate of the config; its loudness is the style's and stays."""
        loud = (
            processor
            if processor.config.target_level_db is None
            else AudioProcessor(replace(processor.config, target_level_db=None))
        )
        return loud.preprocess(self.utterance.waveform, self.sample_rate)


@dataclass(frozen=True, slots=True)
class SpeechExample:
    """A recording, what is said in it, by whom and how, and where that was found: ``file:line``."""

    audio: AudioFile | BuiltinUtterance
    text: str
    location: str
    speaker: str = ""
    emotion: str = ""


@dataclass(frozen=True)
class SpeechColumns:
    """Which columns of a table hold what; of several names, the first that is there.

    Columns for speaker, emotion and split need not be there.
    """

    file: str | int | Sequence[str] = ("file", "audio", "path", "wav", "recording", "audio_filepath")
    text: str | int | Sequence[str] = ("text", "sentence", "transcript", "transcription")
    speaker: str | int | Sequence[str] = ("speaker", "speaker_id", "client_id")
    emotion: str | int | Sequence[str] = ("emotion", "style")
    split: str | int | Sequence[str] = "split"
    header: bool | None = None  # whether the first line names the columns; None: if they are told by name


DEFAULT_COLUMNS = SpeechColumns()
AudioFiles = FileFolder[AudioFile] | TarArchive[AudioFile]
SpeechRows = Iterator[
    tuple[TableRecord, str | None] | InvalidExample
]  # with the split, where the table tells it


def make_builtin_examples(
    seed: int, count: int, sample_rate: int = 16000, first_index: int = 0
) -> Iterator[SpeechExample]:
    """So many built-in utterances, from the one of this number on; their styles stand for emotions."""
    for number in range(first_index, first_index + count):
        said = BuiltinUtterance(seed, number, sample_rate)
        text, style = choose_text_and_style(seed, number)
        yield SpeechExample(said, text, said.location, emotion=style)


def read_speech_examples(
    dataset: str | Sequence[str],
    *,
    split: str | None = None,
    columns: SpeechColumns = DEFAULT_COLUMNS,
    audio_path: str | None = None,
) -> Iterator[SpeechExample | InvalidExample]:
    """The recordings that a recipe means, and flaws in the place of what is missing.

    Of those that come with the name of a split, those of ``split`` are taken; *val*, *valid* and *dev* are
    the same. A table without such names is taken as a whole.
    """
    for name in [dataset] if isinstance(dataset, str) else dataset:
        with contextlib.ExitStack() as stack:
            table, sounds, shown = _find_table(name, split, stack)
            if audio_path is not None:
                sounds = _open_audio_files(audio_path)
            try:
                yield from _read_examples(table, shown, sounds, split, columns)
            except InputError as error:  # what was taken out of a .tar is not known by that name
                raise InputError(str(error).replace(str(table), shown)) from None


def _read_examples(
    table: Path, table_name: str, audio_files: AudioFiles, split: str | None, columns: SpeechColumns
) -> Iterator[SpeechExample | InvalidExample]:
    splits: set[str] = set()
    taken = False
    for one in _read_rows(table, columns):
        if isinstance(one, InvalidExample):
            yield replace(one, location=one.location.replace(str(table), table_name))
            continue
        record, its_split = one
        if split is not None and its_split is not None:
            splits.add(its_split)
            if normalize_split_name(its_split) != normalize_split_name(split):
                continue
        taken = True
        yield _make_example(record, record.location.replace(str(table), table_name), audio_files)
    if splits and not taken:
        raise InputError(
            f"{table_name} has no recordings of the split {split!r}; its splits are: {_join_names(splits)}"
        )


def _join_names(names: set[str]) -> str:
    return ", ".join(sorted(filter(None, names))) or "none"


def _make_example(
    record: TableRecord, location: str, audio_files: AudioFiles
) -> SpeechExample | InvalidExample:
    name, text, speaker, emotion = record.values
    file, said = clean_text(name, "file", location), clean_text(text, "text", location)
    if isinstance(file, InvalidExample):
        return file
    if isinstance(said, InvalidExample):
        return said
    found = _find_audio(audio_files, file, f"{location} {file}")
    if isinstance(found, InvalidExample):
        return found
    if not found.num_bytes:
        return InvalidExample(f"{location} {file}", "an empty recording")
    return SpeechExample(found, said, location, *(str(one).strip() for one in (speaker, emotion)))


def _find_audio(audio_files: AudioFiles, name: str, location: str) -> AudioFile | InvalidExample:
    """As it is called, or where and as it is usual."""
    for ending in AUDIO_SUFFIXES:
        for folder in AUDIO_FOLDER_NAMES:
            found = audio_files.find(f"{folder}{name}{ending}", location)
            if not isinstance(found, InvalidExample):
                return found
    return audio_files.find(name, location)


# --------------------------------------------------------------------------------------------------- places


def _find_table(name: str, split: str | None, stack: contextlib.ExitStack) -> tuple[Path, AudioFiles, str]:
    """The table, where its sounds are, and what the table is called in messages."""
    if name.startswith("hub:"):
        raise InputError(f"{name}: recordings are not read from the hub; fetch them, and name a table")
    for path in (Path(name), data_folder() / name):
        if path.is_dir():
            for table in TABLE_NAMES:
                if (path / table).is_file():
                    return path / table, FileFolder(path, AudioFile), str(path / table)
        for archive in (path, path.with_name(f"{path.name}.tar")):
            if archive.suffix == ".tar" and archive.is_file():
                return _extract_table(archive, stack)
        if path.is_file():
            return path, FileFolder(path.parent, AudioFile), str(path)
    found = parallel_corpus.find_files(name, tuple(readers_formats.TABLE_READERS), split)
    if len(found) > 1:
        raise InputError(
            f"{name} means several tables; name them one by one: {', '.join(map(str, found[:5]))}"
        )
    return found[0], FileFolder(found[0].parent, AudioFile), str(found[0])


def _extract_table(archive: Path, stack: contextlib.ExitStack) -> tuple[Path, AudioFiles, str]:
    """The table of a .tar, as a file for the time being."""
    sounds = TarArchive(archive, AudioFile)
    for name in TABLE_NAMES:
        found = sounds.find(name, name)
        if not isinstance(found, InvalidExample):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            table = folder / PurePosixPath(found.name).name
            table.write_bytes(found.read())
            return table, sounds, f"{archive}:{found.name}"
    raise InputError(
        f"{archive} has no table of its recordings in it; expected {', '.join(TABLE_NAMES[:8:2])}"
    )


def _open_audio_files(audio_path: str) -> AudioFiles:
    for path in (Path(audio_path), data_folder() / audio_path):
        if path.exists():
            return FileFolder(path, AudioFile) if path.is_dir() else TarArchive(path, AudioFile)
    raise InputError(f"there is no folder or .tar {audio_path!r} with sounds; data.recordings names it")


# -------------------------------------------------------------------------------------------------- tables


def _read_rows(table: Path, columns: SpeechColumns) -> SpeechRows:
    """Rows of file, text, speaker and emotion; the last two are "" where they are not told."""
    first = (
        next((line for line in read_lines(table) if line), "")
        if readers_formats.file_suffix(table) == ".csv"
        else ""
    )
    if LJSPEECH_SEPARATOR in first and "," not in first.partition(LJSPEECH_SEPARATOR)[0]:
        yield from _read_ljspeech(table)
        return
    names = tables.read_column_names(table)
    # Of what must be there and is not, the reader of tables complains.
    required = [_choose_column(one, names) or one for one in (columns.file, columns.text)]
    optional = [_choose_column(one, names) for one in (columns.speaker, columns.emotion, columns.split)]
    there = [*required, *(one for one in optional if one is not None)]
    for record in tables.read_table(table, there, columns.header):
        if isinstance(record, InvalidExample):
            yield record
            continue
        values = iter(record.values)
        file, text = next(values), next(values)
        speaker, emotion, split = (None if one is None else str(next(values) or "") for one in optional)
        yield TableRecord((file, text, speaker or "", emotion or ""), record.location), split


def _choose_column(candidates: str | int | Sequence[str], names: Sequence[str]) -> str | int | None:
    """Of the names that a column may have, the first that is there; a number is taken as it is."""
    if isinstance(candidates, int):
        return candidates
    return next(
        (name for name in ([candidates] if isinstance(candidates, str) else candidates) if name in names),
        None,
    )


def _read_ljspeech(table: Path) -> SpeechRows:
    """LJSpeech's own: name|text|text read out, without a header, and a quote is a character."""
    for number, cells in readers_formats.iter_separated_rows(table, LJSPEECH_SEPARATOR):
        where = f"{table}:{number}"
        if isinstance(cells, InvalidExample):
            yield cells
        elif not any(cells):
            yield InvalidExample(where, readers_formats.BLANK_LINE)
        elif len(cells) < 2:
            yield InvalidExample(where, "no name|text", f"it is {cells[0][:60]!r}")
        else:
            text = cells[2] if len(cells) > 2 and cells[2].strip() else cells[1]
            yield TableRecord((cells[0], text, "", ""), where), None
