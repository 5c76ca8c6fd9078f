"""Writes speech to audio files.

::

    --out speech.wav     one line, to this file (.wav, .flac or .ogg); an existing file is overwritten
    --out speech         a folder, with 0001.wav, 0002.wav, … for the lines; existing files are never
                         overwritten, except with --overwrite
    (nothing)            speech.wav in the current folder, or speech-2.wav, …, the first that does not exist
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from jumok.data import audio
from jumok.errors import InputError
from jumok.tasks.speak.prediction import SpeechPrediction

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg")
DEFAULT_STEM = "speech"


class WavWriter:
    """Writes the audio files of predictions.

    >>> writer = WavWriter(Path("speech.wav"))  # doctest: +SKIP
    >>> writer(voice.speak("forty two")).file  # doctest: +SKIP
    PosixPath('speech.wav')
    """

    def __init__(self, output_path: Path | None, *, overwrite: bool = False) -> None:
        self.output_path, self.overwrite = output_path, overwrite
        suffixes = ", ".join(AUDIO_SUFFIXES)
        self.is_file = output_path is not None and output_path.suffix.lower() in AUDIO_SUFFIXES
        self._written_index: int | None = None  # of the line in the single file
        if output_path is None:
            return
        if self.is_file and output_path.is_dir():
            raise InputError(f"--out {output_path} is a folder; name a file in it, or a folder without a suffix")
        if not self.is_file and output_path.exists() and not output_path.is_dir():
            raise InputError(
                f"--out {output_path} is a file, but no audio file: name a file that ends in {suffixes}, or a "
                "folder, which gets a file for every line"
            )
        if not self.is_file and output_path.suffix and not output_path.exists():
            raise InputError(
                f"--out {output_path}: speech is written as {suffixes}; or name a folder, which gets a file for "
                "every line"
            )
        if not self.is_file:
            self._check_free(self._build_numbered_path(0))  # before the model is loaded

    def __call__(self, prediction: SpeechPrediction) -> SpeechPrediction:
        """Write the file of a prediction, and return the prediction with its path."""
        path = self._choose_path(prediction.index)
        audio.save_audio(path, prediction.waveform, prediction.sample_rate)
        return replace(prediction, file=path)

    def _choose_path(self, index: int) -> Path:
        if self.output_path is None:
            names = (f"{DEFAULT_STEM}{'' if n == 1 else f'-{n}'}.wav" for n in itertools.count(1))
            return next(path for path in map(Path, names) if not path.exists())
        if self.is_file:
            if self._written_index not in (None, index):
                raise InputError(
                    f"--out {self.output_path} is one file, but there are more lines: it has line "
                    f"{(self._written_index or 0) + 1}; name a folder, which gets a file for every line"
                )
            self._written_index = index
            return self.output_path
        return self._check_free(self._build_numbered_path(index))

    def _build_numbered_path(self, index: int) -> Path:
        assert self.output_path is not None
        return self.output_path / f"{index + 1:04}.wav"

    def _check_free(self, path: Path) -> Path:
        if path.exists() and not self.overwrite:
            raise InputError(
                f"{path} already exists, and is not overwritten; give another folder with --out, or --overwrite"
            )
        return path
