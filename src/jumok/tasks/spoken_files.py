"""Where what is said is written: a file, a folder of them, or beside whoever asked.

::

    --out speech.wav     one line, in this file (.wav, .flac or .ogg); what was there before is replaced
    --out speech         a folder, with 0001.wav, 0002.wav, … for the lines; none that is there is replaced,
                         unless it is to be done --again
    (nothing)            speech.wav here, or speech-2.wav, … whichever is not there yet
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from jumok.data import sound
from jumok.errors import InputError
from jumok.tasks.spoken import Spoken

__all__ = ["Kept"]

ENDINGS = (".wav", ".flac", ".ogg")
USUAL = "speech"


class Kept:
    """Writes what was said.

    >>> kept = Kept(Path("speech.wav"))  # doctest: +SKIP
    >>> kept(voice.say("forty two")).file  # doctest: +SKIP
    PosixPath('speech.wav')
    """

    def __init__(self, out: Path | None, *, again: bool = False) -> None:
        self.out, self.again = out, again
        self.is_file = out is not None and out.suffix.lower() in ENDINGS
        self._number: int | None = None  # of the line that is in the one file
        if out is None:
            return
        if self.is_file and out.is_dir():
            raise InputError(f"--out {out} is a folder; name a file in it, or a folder without an ending")
        if not self.is_file and out.exists() and not out.is_dir():
            raise InputError(
                f"--out {out} is a file, and no recording: name a file that ends in {', '.join(ENDINGS)}, or "
                "a folder, which gets a file for every line"
            )
        if not self.is_file and out.suffix and not out.exists():
            raise InputError(
                f"--out {out}: sound is written as {', '.join(ENDINGS)}; or name a folder, which gets a "
                "file for every line"
            )
        if not self.is_file:
            self._free(self._numbered(0))  # told now, not when a voice was loaded

    def __call__(self, said: Spoken) -> Spoken:
        """The same, with the file that it is in now."""
        path = self._place(said.number)
        sound.saved(path, said.wave, said.rate)
        return replace(said, file=path)

    def _place(self, number: int) -> Path:
        if self.out is None:
            names = (f"{USUAL}{'' if n == 1 else f'-{n}'}.wav" for n in itertools.count(1))
            return next(path for path in map(Path, names) if not path.exists())
        if self.is_file:
            if self._number not in (None, number):
                raise InputError(
                    f"--out {self.out} is one file, and there are more lines: it has line "
                    f"{(self._number or 0) + 1}; name a folder, which gets a file for every line"
                )
            self._number = number
            return self.out
        return self._free(self._numbered(number))

    def _numbered(self, number: int) -> Path:
        assert self.out is not None
        return self.out / f"{number + 1:04}.wav"

    def _free(self, path: Path) -> Path:
        if path.exists() and not self.again:
            raise InputError(
                f"{path} is there already, and is left as it is; give another folder with --out, or --again "
                "to replace it"
            )
        return path
