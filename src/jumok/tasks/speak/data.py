"""Data of a speech run: recordings with their texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jumok.data.readers import speech
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.speech import AudioFile, SpeechExample
from jumok.errors import InputError
from jumok.tasks.config import DataSource
from jumok.tasks.speak.config import BUILTIN_DATASET, SpeechRecipe

BUILTIN_SEED = 1
BUILTIN_SAMPLE_RATES = (8000, 16000)


def read_examples(
    recipe: SpeechRecipe, data_source: DataSource, split_name: str
) -> Iterator[SpeechExample | InvalidExample]:
    """Read recordings with their texts."""
    data = recipe.data
    if data_source == BUILTIN_DATASET:
        sample_rate = recipe.audio.sample_rate
        if sample_rate not in BUILTIN_SAMPLE_RATES:
            sample_rate = BUILTIN_SAMPLE_RATES[-1]
        yield from speech.make_builtin_examples(BUILTIN_SEED, data.builtin_size, sample_rate)
        return
    examples = speech.read_speech_examples(
        data_source, split=split_name, columns=data.columns, audio_path=data.recordings
    )
    yield from map(_make_path_absolute, examples)


def check_style_labels(recipe: SpeechRecipe, examples: Sequence[SpeechExample]) -> None:
    """Raise if a recording lacks a label that ``data.style_reference`` needs."""
    for name in recipe.data.style_reference:
        for example in examples:
            if not getattr(example, name):
                raise InputError(
                    f"data.style_reference: {example.location} has no {name}; set data.{name}_column, or leave "
                    "it out, and each recording is trained with its own style"
                )


def _make_path_absolute(example: SpeechExample | InvalidExample) -> SpeechExample | InvalidExample:
    """The path is made absolute, because the run may be evaluated in another folder."""
    if isinstance(example, InvalidExample) or not isinstance(example.audio, AudioFile):
        return example
    return replace(example, audio=replace(example.audio, path=example.audio.path.absolute()))
