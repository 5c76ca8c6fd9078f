"""Where what is said is written: a file, a folder of them, or beside whoever asked.

::

    --out speech.wav     one line, in this file (.wav, .flac or .ogg); what was there before is replaced
    --out speech         a folder, with 0001.wav, 0002.wav, … for the lines; none that is there is replaced,
                         unless it is to be done --overwrite
    (nothing)            speech.wav here, or speech-2.wav, … whichever is not there yet
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from jumok.data import audio
from jumok.errors import InputError
from jumok.tasks.speak.prediction import SpeechPrediction

__all__ = ["WavWriter"]

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg")
DEFAULT_STEM = "speech"


class WavWriter:
    """Writes what was said.

    >>> writer = WavWriter(Path("speech.wav"))  # doctest: +SKIP
    >>> writer(voice.speak("forty two")).file  # doctest: +SKIP
    PosixPath('speech.wav')
    """

    def __init__(self, output_path: Path | None, *, overwrite: bool = False) -> None:
        self.output_path, self.overwrite = output_path, overwrite
        self.is_file = output_path is not None and output_path.suffix.lower() in AUDIO_SUFFIXES
        self._written_index: int | None = None  # of the line that is in the one file
        if output_path is None:
            return
        if self.is_file and output_path.is_dir():
            raise InputError(
                f"--out {output_path} is a folder; name a file in it, or a folder without an ending"
            )
        if not self.is_file and output_path.exists() and not output_path.is_dir():
            raise InputError(
                f"--out {output_path} is a file, and no recording: name a file that ends in {', '.join(AUDIO_SUFFIXES)}, or "
                "a folder, which gets a file for every line"
            )
        if not self.is_file and output_path.suffix and not output_path.exists():
            raise InputError(
                f"--out {output_path}: sound is written as {', '.join(AUDIO_SUFFIXES)}; or name a folder, which gets a "
                "file for every line"
            )
        if not self.is_file:
            self._check_free(self._build_numbered_path(0))  # told now, not when a voice was loaded

    def __call__(self, prediction: SpeechPrediction) -> SpeechPrediction:
        """The same, with the file that it is in now."""
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
                    f"--out {self.output_path} is one file, and there are more lines: it has line "
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
                f"{path} is there already, and is left as it is; give another folder with --out, or --overwrite "
                "to replace it"
            )
        return path
