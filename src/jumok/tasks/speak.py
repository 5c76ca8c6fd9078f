"""The task of speaking: from a text to a sound of it, in a style that one can choose.

::

    data       recordings with what is said in them (see ``jumok.data.recordings``), or built-in voices
    sound      how a recording becomes spectra, and spectra a recording again
    text       the symbols that are spoken: characters, Hangul as its letters
    model      ``tacotron``, with style tokens or without

What spectra are made of recordings is kept on the disk, for all runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from rich.console import Console
from torch import nn

from jumok.data import recordings
from jumok.data.formats import Flaw
from jumok.data.frames import Frames
from jumok.data.recordings import Columns, Recording, RecordingFile, Said
from jumok.data.sound import Sound, SoundConfig
from jumok.data.spoken import Numbers, Symbols
from jumok.data.utterances import Utterances
from jumok.errors import InputError
from jumok.files import written
from jumok.metrics.distortion import COEFFICIENTS
from jumok.models.tacotron import Tacotron, TacotronConfig
from jumok.run import Run
from jumok.tasks import common, placing, supervised, verdicts
from jumok.tasks.speaker import Encoded, Search, Speaker
from jumok.tasks.spoken_files import Kept
from jumok.tasks.supervised import LabelledData, Named, Split, Use
from jumok.tasks.verdicts import Judgement
from jumok.training import Ranks, Settings, Summary

__all__ = ["Kept", "Recipe", "Search", "compare", "evaluate", "load", "train"]

BUILT_IN, SEED = "voices", 1
FEW = 50  # texts: of fewer each is read many times, and some of its recordings can be held out
Column = str | int


# ------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class DataConfig(LabelledData):
    """The ``data:`` section. How recordings and texts are named is told in :mod:`jumok.data.recordings`."""

    train: Named = BUILT_IN
    recordings: str | None = None  # the folder or .tar with the sounds; null: found beside the table
    # Of tables: the columns. All splits may be in one table, which then names the split of each row.
    file: Column | None = None  # null: file, audio, path, …
    text: Column | None = None  # null: text, sentence, transcript, …
    speaker: Column | None = None
    emotion: Column | None = None
    split: Column = "split"
    header: bool | None = None  # whether the first line of a table names its columns; null: if they are named
    # Whose sound an utterance has its style from in training: its own, as in the paper, or that of another
    # with the same speaker, emotion, or both, so that nothing of what is said gets into a style.
    reference: tuple[Literal["speaker", "emotion"], ...] = ()
    longest: float = 15.0  # seconds of a recording; a longer one cannot be used
    voices: int = 2000  # utterances of the built-in data, those that are held out included
    cache: str | None = None  # where spectra are kept; null: the folder JUMOK_CACHE, or ~/.cache/jumok

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.voices < 1 or not self.longest > 0:
            raise ValueError(f"voices={self.voices}, longest={self.longest}: more than 0 is expected")

    @property
    def columns(self) -> Columns:
        named = {name: getattr(self, name) for name in ("file", "text", "speaker", "emotion")}
        chosen = {name: column for name, column in named.items() if column is not None}
        return Columns(**chosen, split=self.split, header=self.header)


@dataclass(frozen=True)
class TextConfig:
    """The ``text:`` section."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    numbers: Numbers | None = "en"  # the language that digits are read out in; null: they stay digits


@dataclass(frozen=True)
class DecodeConfig:
    """The ``decode:`` section: how a text is said."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    symbols: int | None = None  # that are said in one go; null: as many as the longest text it learned from
    pause: float = 0.25  # seconds between what is said in one go
    turns: int = 60  # of Griffin and Lim: the more, the better phases fit
    sharpen: float = 1.2  # the power that magnitudes are raised to, for what a model says is blurred

    def __post_init__(self) -> None:
        if (self.symbols is not None and self.symbols < 1) or self.turns < 1:
            raise ValueError(f"symbols={self.symbols}, turns={self.turns}: 1 or more is expected")
        if not self.pause >= 0 or not self.sharpen > 0:
            raise ValueError(f"pause={self.pause}, sharpen={self.sharpen}: 0 or more, and more than 0")


@dataclass(frozen=True)
class ScoreConfig:
    """The ``score:`` section: the figure that decides which weights are best, and how speech is judged."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    # The loss, and its part "mel", are of a voice that is told what was said so far; all others are of what
    # it says by itself. When to stop is soon learned by heart, and then the loss is lowest too early.
    best: Literal["loss", "mel", "diagonality", "whole"] = "loss"
    judges: int = 3  # that are trained on the recordings to tell who says what; 0: none

    def __post_init__(self) -> None:
        if self.judges < 0:
            raise ValueError(f"judges={self.judges}: 0 or more is expected")


@dataclass(frozen=True)
class Recipe:
    """Everything that a run that speaks depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["speak"]
    model: TacotronConfig
    sound: SoundConfig = field(default_factory=SoundConfig)
    data: DataConfig = field(default_factory=DataConfig)
    text: TextConfig = field(default_factory=TextConfig)
    train: Settings = field(default_factory=Settings)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)

    def __post_init__(self) -> None:
        if self.sound.mels <= COEFFICIENTS:
            raise ValueError(
                f"sound.mels={self.sound.mels}: more than {COEFFICIENTS} are expected, for speech is "
                "compared by as many cepstra"
            )
        linear = self.sound.bins if self.sound.linear else 0
        if (self.model.mels, self.model.linear) != (self.sound.mels, linear):
            raise ValueError(
                f"model.mels={self.model.mels} and model.linear={self.model.linear}, but sound has "
                f"{self.sound.mels} mels and {linear} frequencies (sound.linear: {self.sound.linear}): "
                "give both the same"
            )


# ----------------------------------------------------------------------------------------------- commands


def train(run: Run, console: Console) -> Summary:
    """Train the model of a run, or go on with it."""
    return supervised.train(Speaking(run), console)


def load(run: Run, device: str = "auto") -> Speaker:
    """The trained model of a run, ready to speak."""
    use = Speaking(run)
    return use.predictor(*supervised.load_model(use, device))


def evaluate(predictor: Speaker, split: str, search: Search, console: Console) -> Judgement:
    """Score a run, and keep what was found, with some of what it said."""
    found = verdicts.evaluate(predictor.searching(search).judged_wholly(), split, console)
    console.print("\n".join(found.samples), markup=False, soft_wrap=True)
    return found


def compare(
    runs: Sequence[Run], split: str, search: Search, out: Path, device: str, console: Console
) -> None:
    """Runs on the same texts, by how far they are from the recordings: the lower, the better."""
    verdicts.compare(runs, lambda run, place: load(run, place).searching(search), split, out, device, console)


# ------------------------------------------------------------------------------------------------ the use


class Speaking(Use[Recording]):
    """Speech, for one run."""

    does = "say a text"
    kind = Recording

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.sound = Sound(self.recipe.sound)
        self._cache: Frames | None = None
        finds = " and finding where their symbols are spoken" if self.recipe.model.placed else ""
        self.readies = f"listening to the recordings{finds}"

    @property
    def example(self) -> str:
        return "forty two" if self.recipe.data.train == BUILT_IN else "…"

    # What is read.

    def read(self, named: Named, split: str) -> Iterator[Recording | Flaw]:
        data: DataConfig = self.recipe.data
        if named == BUILT_IN:
            rate = self.recipe.sound.rate
            return iter(recordings.built_in(SEED, data.voices, rate if rate in (8000, 16000) else 16000))
        found = recordings.find(named, split=split, columns=data.columns, recordings=data.recordings)
        return self.noted(_from_anywhere(one) for one in found)

    def key(self, example: Recording) -> str:
        """Of many texts, some are held out; of a few, some of their recordings. A built-in one is held out in
        one style, for it is learned in the others.
        """
        if isinstance(example.sound, Said):
            return f"{example.text} {example.emotion}"
        return example.text if self.has_many_texts else example.sound.name

    @property
    def has_many_texts(self) -> bool:
        return len({one.text for one in self.whole}) > FEW

    def settle(self, examples: Sequence[Recording]) -> list[str]:
        for name in self.recipe.data.reference:
            for one in examples:
                if not getattr(one, name):
                    raise InputError(
                        f"data.reference: {one.where} names no {name}; name the column with data.{name}, or "
                        "leave it out, and each recording has its style from itself"
                    )
        return []

    # What reads it.

    def prepare(self, train: Split[Recording]) -> None:
        symbols = Symbols.learned((one.text for one in train.examples), self.recipe.text.numbers)
        symbols.save(self.run.folder)

    def made(self) -> tuple[Tacotron, Symbols]:
        symbols = Symbols.load(self.run.folder)
        try:
            return Tacotron(self.recipe.model, symbols.size), symbols
        except ValueError as error:
            raise InputError(f"model: {error}") from None

    def begin(self, model: Any, tokenizer: Symbols) -> str | None:
        return None

    @property
    def cache(self) -> Frames:
        """Where the spectra of recordings are kept."""
        if self._cache is None:
            self._cache = Frames.open(
                Path(self.recipe.data.cache or common.cache_folder()) / "sounds", self.sound
            )
        return self._cache

    def predictor(self, model: Any, tokenizer: Symbols) -> Speaker:
        return Speaker(self, model, tokenizer)

    def learnable(self, encoded: Sequence[Encoded], model: Any, ranks: Ranks) -> Utterances:
        if ranks.main and not self.run.has_begun:
            self._keep_sizes(encoded)
        alike = common.layout(self.run, ranks, packed=False)["alike"]
        manners = [one.manner for one in encoded] if self.recipe.data.reference else None
        places = self._places(encoded, ranks) if self.recipe.model.placed else None
        settings = self.recipe.train
        return self.utterances(
            encoded, settings.tokens, settings.seed, alike=alike, manners=manners, places=places
        )

    def _places(self, encoded: Sequence[Encoded], ranks: Ranks) -> list[placing.Places]:
        """Where in its text each frame is: found by one process when a run begins, and kept."""
        path, mels = self.run.folder / "data" / "places.npy", self.recipe.sound.mels
        if ranks.main and not (self.run.has_begun and path.is_file()):
            sounds = [self.cache[one.sound][:, :mels] for one in encoded]
            found = placing.places(
                [one.ids for one in encoded], sounds, seed=self.recipe.train.seed, device=ranks.device
            )
            with written(path) as part, part.open("wb") as file:
                np.save(file, np.concatenate(found).astype(np.int32))
        ranks.wait()
        ends = np.cumsum([self.cache.frames(one.sound) for one in encoded])
        try:
            kept = np.load(path).astype(np.int64)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path}, which a training begins with, cannot be read: {error}") from None
        if len(kept) != ends[-1]:
            raise InputError(
                f"the data has changed since {self.run.folder} began with it: it had {len(kept):,} frames, "
                f"and has {ends[-1]:,}; bring it back, or begin anew in another folder"
            )
        return np.split(kept, ends[:-1])

    def manner(self, example: Recording) -> str:
        """What recordings share that have their styles from each other."""
        return "\n".join(getattr(example, name) for name in self.recipe.data.reference)

    def utterances(
        self,
        encoded: Sequence[Encoded],
        frames: int,
        seed: int,
        *,
        alike: bool,
        manners: Sequence[str] | None = None,
        places: Sequence[placing.Places] | None = None,
    ) -> Utterances:
        """As batches of so many frames."""
        return Utterances(
            [one.ids for one in encoded],
            [self.cache[one.sound] for one in encoded],
            frames=frames,
            seed=seed,
            mels=self.recipe.sound.mels,
            alike=alike,
            names=[one.sound.where for one in encoded],
            manners=manners,
            places=places,
        )

    def _keep_sizes(self, encoded: Sequence[Encoded]) -> None:
        """How long texts and sounds were, which says when something that is said is far too long."""
        symbols = np.array([len(one.ids) for one in encoded])
        frames = np.array([self.cache.frames(one.sound) for one in encoded])
        supervised.write(
            self.run.folder / "sizes.json",
            {
                "symbols": int(symbols.max()),
                "frames": int(frames.max()),
                "frames a symbol": float((frames / symbols).max()),
            },
        )

    def told(self, model: nn.Module, tokenizer: Symbols, texts: int) -> str:
        weights = sum(weight.numel() for weight in model.parameters()) / 1e6
        style = self.recipe.model.style
        tokens = "no style tokens" if style is None else f"{style.tokens} style tokens"
        return (
            f"{self.recipe.model.kind}: {weights:.1f} M weights, {tokens}, {tokenizer.size} symbols, "
            f"{texts:,} recordings"
        )


def _from_anywhere(one: Recording | Flaw) -> Recording | Flaw:
    """Whoever evaluates the run may stand in another folder."""
    if isinstance(one, Flaw) or not isinstance(one.sound, RecordingFile):
        return one
    return replace(one, sound=replace(one.sound, path=one.sound.path.absolute()))
