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
from jumok.data.readers import formats as readers_formats
from jumok.data.readers import parallel_corpus, tables
from jumok.data.readers.archive import DataFile, FileFolder, TarArchive
from jumok.data.readers.formats import InvalidExample, clean_text
from jumok.data.readers.tables import TableRecord, normalize_split_name
from jumok.data.readers.text_files import data_folder, read_lines
from jumok.errors import InputError

# Names of the table in a folder or a .tar.
TABLE_NAMES = tuple(
    f"{name}{suffix}{gz}"
    for name in ("metadata", "transcripts")
    for suffix in readers_formats.TABLE_READERS
    for gz in ("", ".gz")
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
SpeechRows = Iterator[tuple[TableRecord, str | None] | InvalidExample]  # with the split, if the table has one


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
    splits: set[str] = set()
    has_examples = False
    for row in _read_rows(table, columns):
        if isinstance(row, InvalidExample):
            yield replace(row, location=row.location.replace(str(table), table_name))
            continue
        record, row_split = row
        if split is not None and row_split is not None:
            splits.add(row_split)
            if normalize_split_name(row_split) != normalize_split_name(split):
                continue
        has_examples = True
        yield _make_example(record, record.location.replace(str(table), table_name), audio_files)
    if splits and not has_examples:
        raise InputError(
            f"{table_name} has no recordings of the split {split!r}; its splits are: {_join_names(splits)}"
        )


def _join_names(names: set[str]) -> str:
    return ", ".join(sorted(filter(None, names))) or "none"


def _make_example(record: TableRecord, location: str, audio_files: AudioFiles) -> SpeechExample | InvalidExample:
    name, text, speaker, emotion = record.values
    file, cleaned_text = clean_text(name, "file", location), clean_text(text, "text", location)
    if isinstance(file, InvalidExample):
        return file
    if isinstance(cleaned_text, InvalidExample):
        return cleaned_text
    audio = _find_audio(audio_files, file, f"{location} {file}")
    if isinstance(audio, InvalidExample):
        return audio
    if not audio.num_bytes:
        return InvalidExample(f"{location} {file}", "an empty recording")
    return SpeechExample(audio, cleaned_text, location, *(str(value).strip() for value in (speaker, emotion)))


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
    matches = parallel_corpus.find_files(name, tuple(readers_formats.TABLE_READERS), split)
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
    for path in (Path(audio_path), data_folder() / audio_path):
        if path.exists():
            return FileFolder(path, AudioFile) if path.is_dir() else TarArchive(path, AudioFile)
    raise InputError(f"there is no folder or .tar {audio_path!r}; set data.recordings to that of the recordings")


# -------------------------------------------------------------------------------------------------- tables


def _read_rows(table: Path, columns: SpeechColumns) -> SpeechRows:
    """Rows of file, text, speaker and emotion; the last two are "" if there is no such column."""
    first_line = (
        next((line for line in read_lines(table) if line), "") if readers_formats.file_suffix(table) == ".csv" else ""
    )
    if LJSPEECH_SEPARATOR in first_line and "," not in first_line.partition(LJSPEECH_SEPARATOR)[0]:
        yield from _read_ljspeech(table)
        return
    names = tables.read_column_names(table)
    # read_table raises an error if a required column is missing.
    required = [_choose_column(column, names) or column for column in (columns.file, columns.text)]
    optional = [_choose_column(column, names) for column in (columns.speaker, columns.emotion, columns.split)]
    available = [*required, *(column for column in optional if column is not None)]
    for record in tables.read_table(table, available, columns.header):
        if isinstance(record, InvalidExample):
            yield record
            continue
        values = iter(record.values)
        file, text = next(values), next(values)
        speaker, emotion, split = (None if column is None else str(next(values) or "") for column in optional)
        yield TableRecord((file, text, speaker or "", emotion or ""), record.location), split


def _choose_column(candidates: str | int | Sequence[str], names: Sequence[str]) -> str | int | None:
    """The first of the candidates that exists; a number is returned as it is."""
    if isinstance(candidates, int):
        return candidates
    return next(
        (name for name in ([candidates] if isinstance(candidates, str) else candidates) if name in names),
        None,
    )


def _read_ljspeech(table: Path) -> SpeechRows:
    """The format of LJSpeech: name|text|normalized text, without a header. Quotes have no special meaning."""
    for line_number, cells in readers_formats.iter_separated_rows(table, LJSPEECH_SEPARATOR):
        location = f"{table}:{line_number}"
        if isinstance(cells, InvalidExample):
            yield cells
        elif not any(cells):
            yield InvalidExample(location, readers_formats.BLANK_LINE)
        elif len(cells) < 2:
            yield InvalidExample(location, "not name|text", f"it is {cells[0][:60]!r}")
        else:
            text = cells[2] if len(cells) > 2 and cells[2].strip() else cells[1]
            yield TableRecord((cells[0], text, "", ""), location), None
