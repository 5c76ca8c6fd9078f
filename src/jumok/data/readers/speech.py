"""Reader of recordings with transcripts: a table, or a folder in the layout of LJSpeech.

A recipe names the data::

    train: LJSpeech-1.1    a folder, here or under JUMOK_DATA, in the layout of LJSpeech: metadata.csv, with
                           lines of name|text|normalized text, and the recordings in wavs/
    train: my.tsv          a table (.tsv, .csv, .jsonl or .parquet, optionally .gz), one recording per row,
                           with columns for file and text, and optionally for speaker, emotion and split
    train: speech/fsdd     a folder, or a .tar that is not unpacked, with such a table (metadata.tsv) in it
    recordings: takes.tar  the folder or the .tar with the recordings, if they are not beside the table
    train: voices          built-in: synthesized number words in several styles

A missing recording is an :class:`InvalidExample`. Whether an existing one can be decoded is known when it is
decoded.
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
from jumok.data.readers.archive import DataFile, FileFolder, TarArchive
from jumok.data.readers.dataset_files import find_files, search_paths
from jumok.data.readers.invalid_examples import InvalidExample, clean_text
from jumok.data.readers.tables import (
    TABLE_SUFFIXES,
    RowIterator,
    TableRow,
    iter_delimited_rows,
    open_table,
    select_split,
)
from jumok.data.readers.text_files import file_suffix, read_lines
from jumok.errors import InputError

# Names of the table in a folder or a .tar.
TABLE_NAMES = tuple(
    f"{name}{suffix}{gz}" for name in ("metadata", "transcripts") for suffix in TABLE_SUFFIXES for gz in ("", ".gz")
)
AUDIO_FOLDER_NAMES = ("", "wavs/", "wav/", "audio/", "clips/")  # relative to the table
AUDIO_SUFFIXES = ("", ".wav", ".flac", ".ogg")  # names may omit the suffix
LJSPEECH_SEPARATOR = "|"


@dataclass(frozen=True, slots=True)
class AudioFile(DataFile):
    """A recording, in a file or inside a .tar archive, that is read on demand."""

    description: ClassVar[str] = "recording"

    def decode(
        self, processor: AudioProcessor, location: str | None = None, limits: AudioLimits = AUDIO_LIMITS
    ) -> Waveform | InvalidExample:
        """The preprocessed waveform, or why there is none."""
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
    """A built-in utterance. It is synthesized when it is decoded."""

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
        """Values that differ between utterances, and between versions of the synthesizer."""
        return ["voices", _synthesizer_digest(), self.seed, self.index, self.sample_rate]

    @property
    def utterance(self) -> SyntheticUtterance:
        return synthesize_utterance(self.seed, self.index, self.sample_rate)

    def decode(
        self, processor: AudioProcessor, location: str | None = None, limits: AudioLimits = AUDIO_LIMITS
    ) -> Waveform | InvalidExample:
        """The waveform, at the sample rate of the config. Its loudness is part of the style and is kept."""
        unnormalized = (
            processor
            if processor.config.target_level_db is None
            else AudioProcessor(replace(processor.config, target_level_db=None))
        )
        return unnormalized.preprocess(self.utterance.waveform, self.sample_rate)


@dataclass(frozen=True, slots=True)
class SpeechExample:
    """A recording, its text, speaker and emotion, and their location, ``file:line``."""

    audio: AudioFile | BuiltinUtterance
    text: str
    location: str
    speaker: str = ""
    emotion: str = ""


@dataclass(frozen=True)
class SpeechColumns:
    """The columns of a table; of several names, the first that exists.

    The columns of speaker, emotion and split are optional.
    """

    file: str | int | Sequence[str] = ("file", "audio", "path", "wav", "recording", "audio_filepath")
    text: str | int | Sequence[str] = ("text", "sentence", "transcript", "transcription")
    speaker: str | int | Sequence[str] = ("speaker", "speaker_id", "client_id")
    emotion: str | int | Sequence[str] = ("emotion", "style")
    split: str | int | Sequence[str] = "split"
    header: bool | None = None  # whether the first line is a header; None: if columns are given by name


DEFAULT_COLUMNS = SpeechColumns()
AudioFiles = FileFolder[AudioFile] | TarArchive[AudioFile]


def make_builtin_examples(
    seed: int, count: int, sample_rate: int = 16000, first_index: int = 0
) -> Iterator[SpeechExample]:
    """``count`` built-in utterances, starting at ``first_index``. Their emotion is the style."""
    for index in range(first_index, first_index + count):
        audio = BuiltinUtterance(seed, index, sample_rate)
        text, style = choose_text_and_style(seed, index)
        yield SpeechExample(audio, text, audio.location, emotion=style)


def read_speech_examples(
    dataset: str | Sequence[str],
    *,
    split: str | None = None,
    columns: SpeechColumns = DEFAULT_COLUMNS,
    audio_path: str | None = None,
) -> Iterator[SpeechExample | InvalidExample]:
    """Read the recordings that a recipe names, and an :class:`InvalidExample` for each missing one.

    If recordings have splits, only those of ``split`` are read; *val*, *valid* and *dev* are the same. A
    table without splits is read completely.
    """
    for name in [dataset] if isinstance(dataset, str) else dataset:
        with contextlib.ExitStack() as stack:
            table, audio_files, table_name = _find_table(name, split, stack)
            if audio_path is not None:
                audio_files = _open_audio_files(audio_path)
            try:
                yield from _read_examples(table, table_name, audio_files, split, columns)
            except InputError as error:  # a table from a .tar has a temporary name
                raise InputError(str(error).replace(str(table), table_name)) from None


def _read_examples(
    table: Path, table_name: str, audio_files: AudioFiles, split: str | None, columns: SpeechColumns
) -> Iterator[SpeechExample | InvalidExample]:
    for row in select_split(_read_rows(table, columns), split, table_name, "recordings"):
        location = row.location.replace(str(table), table_name)
        yield (
            replace(row, location=location)
            if isinstance(row, InvalidExample)
            else _make_example(row, location, audio_files)
        )


def _make_example(row: TableRow, location: str, audio_files: AudioFiles) -> SpeechExample | InvalidExample:
    file, text = (clean_text(row.values[name], name, location) for name in ("file", "text"))
    if isinstance(file, InvalidExample):
        return file
    if isinstance(text, InvalidExample):
        return text
    audio = _find_audio(audio_files, file, f"{location} {file}")
    if isinstance(audio, InvalidExample):
        return audio
    if not audio.num_bytes:
        return InvalidExample(f"{location} {file}", "an empty recording")
    speaker, emotion = (str(row.values.get(name) or "").strip() for name in ("speaker", "emotion"))
    return SpeechExample(audio, text, location, speaker, emotion)


def _find_audio(audio_files: AudioFiles, name: str, location: str) -> AudioFile | InvalidExample:
    """A recording by its name, with the usual folders and suffixes."""
    for suffix in AUDIO_SUFFIXES:
        for folder in AUDIO_FOLDER_NAMES:
            file = audio_files.find(f"{folder}{name}{suffix}", location)
            if not isinstance(file, InvalidExample):
                return file
    return audio_files.find(name, location)


# -------------------------------------------------------------------------------------------- finding files


def _find_table(name: str, split: str | None, stack: contextlib.ExitStack) -> tuple[Path, AudioFiles, str]:
    """The table, its recordings, and the name of the table in messages."""
    if name.startswith("hub:"):
        raise InputError(f"{name}: recordings cannot be read from the hub; download them and name a table")
    for path in search_paths(name):
        if path.is_dir():
            for table in TABLE_NAMES:
                if (path / table).is_file():
                    return path / table, FileFolder(path, AudioFile), str(path / table)
        for archive in (path, path.with_name(f"{path.name}.tar")):
            if archive.suffix == ".tar" and archive.is_file():
                return _extract_table(archive, stack)
        if path.is_file():
            return path, FileFolder(path.parent, AudioFile), str(path)
    matches = find_files(name, TABLE_SUFFIXES, split)
    if len(matches) > 1:
        raise InputError(f"{name} matches several tables; name each of them: {', '.join(map(str, matches[:5]))}")
    return matches[0], FileFolder(matches[0].parent, AudioFile), str(matches[0])


def _extract_table(archive: Path, stack: contextlib.ExitStack) -> tuple[Path, AudioFiles, str]:
    """Extract the table of a .tar to a temporary file."""
    audio_files = TarArchive(archive, AudioFile)
    for name in TABLE_NAMES:
        file = audio_files.find(name, name)
        if not isinstance(file, InvalidExample):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            table = folder / PurePosixPath(file.name).name
            table.write_bytes(file.read())
            return table, audio_files, f"{archive}:{file.name}"
    raise InputError(f"{archive} contains no table of its recordings; expected {', '.join(TABLE_NAMES[:8:2])}")


def _open_audio_files(audio_path: str) -> AudioFiles:
    for path in search_paths(audio_path):
        if path.exists():
            return FileFolder(path, AudioFile) if path.is_dir() else TarArchive(path, AudioFile)
    raise InputError(f"there is no folder or .tar {audio_path!r}; set data.recordings to that of the recordings")


# -------------------------------------------------------------------------------------------------- tables


def _read_rows(path: Path, columns: SpeechColumns) -> RowIterator:
    """Rows of file and text, and of speaker, emotion and split if there are such columns."""
    first_line = next((line for line in read_lines(path) if line), "") if file_suffix(path) == ".csv" else ""
    if LJSPEECH_SEPARATOR in first_line and "," not in first_line.partition(LJSPEECH_SEPARATOR)[0]:
        return _read_ljspeech(path)
    table = open_table(path)
    requested: dict[str, str | int | Sequence[str]] = {}
    for name in ("file", "text", "speaker", "emotion", "split"):
        column: str | int | Sequence[str] = getattr(columns, name)
        if table.has_column(column):
            candidates = [column] if isinstance(column, str | int) else column
            requested[name] = next(candidate for candidate in candidates if table.has_column(candidate))
        elif name in ("file", "text"):
            requested[name] = column  # reading raises an error that names it
    return table.read(requested, columns.header)


def _read_ljspeech(path: Path) -> RowIterator:
    """The format of LJSpeech: name|text|normalized text, without a header. Quotes have no special meaning."""
    for location, cells in iter_delimited_rows(path, LJSPEECH_SEPARATOR):
        if isinstance(cells, InvalidExample):
            yield cells
        elif len(cells) < 2:
            yield InvalidExample(location, "not name|text", f"it is {cells[0][:60]!r}")
        else:
            text = cells[2] if len(cells) > 2 and cells[2].strip() else cells[1]
            yield TableRow({"file": cells[0], "text": text}, location)
