"""The task of speaking: from a text to a sound of it, in a style that one can choose.

::

    data       recordings with what is said in them (see ``jumok.data.speech``), or built-in voices
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

from jumok.data.audio import AudioConfig, AudioProcessor
from jumok.data.batching.speech import SpeechBatcher
from jumok.data.caches.spectrograms import SpectrogramCache
from jumok.data.readers import speech
from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.speech import AudioFile, BuiltinUtterance, SpeechColumns, SpeechExample
from jumok.data.tokenizers.speech_symbols import NumberLanguage, SpeechSymbols
from jumok.errors import InputError
from jumok.files import atomic_write
from jumok.metrics.cepstral_distortion import NUM_COEFFICIENTS
from jumok.models.tacotron import Tacotron, TacotronConfig
from jumok.run import Run
from jumok.tasks import base as tasks_base
from jumok.tasks import common, supervised
from jumok.tasks.base import Evaluation
from jumok.tasks.speak import forced_alignment
from jumok.tasks.speak.predictor import EncodedUtterance, SpeechOptions, SpeechPredictor
from jumok.tasks.speak.wav_writer import WavWriter
from jumok.tasks.supervised import DatasetSplit, DataSource, SupervisedDataConfig, SupervisedTask
from jumok.training import DistributedRanks, TrainConfig, TrainingSummary

__all__ = ["SpeechOptions", "SpeechRecipe", "WavWriter", "compare", "evaluate", "load", "train"]

BUILTIN_DATASET, BUILTIN_SEED = "voices", 1
MAX_REPEATED_TEXTS = 50  # texts: of fewer each is read many times, and some of its recordings can be held out
ColumnName = str | int


# ------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class SpeechDataConfig(SupervisedDataConfig):
    """The ``data:`` section. How recordings and texts are named is told in :mod:`jumok.data.speech`."""

    train: DataSource = BUILTIN_DATASET
    recordings: str | None = None  # the folder or .tar with the sounds; null: found beside the table
    # Of tables: the columns. All splits may be in one table, which then names the split of each row.
    audio_column: ColumnName | None = None  # null: file, audio, path, …
    text_column: ColumnName | None = None  # null: text, sentence, transcript, …
    speaker_column: ColumnName | None = None
    emotion_column: ColumnName | None = None
    split_column: ColumnName = "split"
    has_header: bool | None = (
        None  # whether the first line of a table names its columns; null: if they are named
    )
    # Whose sound an utterance has its style from in training: its own, as in the paper, or that of another
    # with the same speaker, emotion, or both, so that nothing of what is said gets into a style.
    style_reference: tuple[Literal["speaker", "emotion"], ...] = ()
    max_seconds: float = 15.0  # seconds of a recording; a longer one cannot be used
    builtin_size: int = 2000  # utterances of the built-in data, those that are held out included
    cache_folder: str | None = None  # where spectra are kept; null: the folder JUMOK_CACHE, or ~/.cache/jumok

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.builtin_size < 1 or not self.max_seconds > 0:
            raise ValueError(
                f"builtin_size={self.builtin_size}, max_seconds={self.max_seconds}: more than 0 is expected"
            )

    @property
    def columns(self) -> SpeechColumns:
        named = {
            "file": self.audio_column,
            "text": self.text_column,
            "speaker": self.speaker_column,
            "emotion": self.emotion_column,
        }
        chosen = {name: column for name, column in named.items() if column is not None}
        return SpeechColumns(**chosen, split=self.split_column, header=self.has_header)


@dataclass(frozen=True)
class SpeechTextConfig:
    """The ``text:`` section."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    number_language: NumberLanguage | None = (
        "en"  # the language that digits are read out in; null: they stay digits
    )


@dataclass(frozen=True)
class SpeechDecodeConfig:
    """The ``decode:`` section: how a text is said."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    max_symbols: int | None = (
        None  # that are said in one go; null: as many as the longest text it learned from
    )
    pause_seconds: float = 0.25  # seconds between what is said in one go
    griffin_lim_iterations: int = 60  # of Griffin and Lim: the more, the better phases fit
    magnitude_power: float = 1.2  # the power that magnitudes are raised to, for what a model says is blurred

    def __post_init__(self) -> None:
        if (self.max_symbols is not None and self.max_symbols < 1) or self.griffin_lim_iterations < 1:
            raise ValueError(
                f"max_symbols={self.max_symbols}, griffin_lim_iterations={self.griffin_lim_iterations}: 1 or more is expected"
            )
        if not self.pause_seconds >= 0 or not self.magnitude_power > 0:
            raise ValueError(
                f"pause_seconds={self.pause_seconds}, magnitude_power={self.magnitude_power}: 0 or more, and more than 0"
            )


@dataclass(frozen=True)
class SpeechEvaluationConfig:
    """The ``evaluation:`` section: the figure that decides which weights are best, and how speech is judged."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    # The loss, and its part "mel", are of a voice that is told what was said so far; all others are of what
    # it says by itself. When to stop is soon learned by heart, and then the loss is lowest too early.
    select_by: Literal["loss", "mel", "diagonality", "complete"] = "loss"
    num_judges: int = 3  # that are trained on the recordings to tell who says what; 0: none

    def __post_init__(self) -> None:
        if self.num_judges < 0:
            raise ValueError(f"num_judges={self.num_judges}: 0 or more is expected")


@dataclass(frozen=True)
class SpeechRecipe:
    """Everything that a run that speaks depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["speak"]
    model: TacotronConfig
    audio: AudioConfig = field(default_factory=AudioConfig)
    data: SpeechDataConfig = field(default_factory=SpeechDataConfig)
    text: SpeechTextConfig = field(default_factory=SpeechTextConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: SpeechDecodeConfig = field(default_factory=SpeechDecodeConfig)
    evaluation: SpeechEvaluationConfig = field(default_factory=SpeechEvaluationConfig)

    def __post_init__(self) -> None:
        if self.audio.n_mels <= NUM_COEFFICIENTS:
            raise ValueError(
                f"audio.n_mels={self.audio.n_mels}: more than {NUM_COEFFICIENTS} are expected, for speech is "
                "compared by as many cepstra"
            )
        linear = self.audio.num_bins if self.audio.linear_spectrogram else 0
        if (self.model.n_mels, self.model.linear_bins) != (self.audio.n_mels, linear):
            raise ValueError(
                f"model.n_mels={self.model.n_mels} and model.linear_bins={self.model.linear_bins}, but audio has "
                f"{self.audio.n_mels} mels and {linear} frequencies (audio.linear_spectrogram: {self.audio.linear_spectrogram}): "
                "give both the same"
            )


# ----------------------------------------------------------------------------------------------- commands


def train(run: Run, console: Console) -> TrainingSummary:
    """Train the model of a run, or go on with it."""
    return supervised.train(SpeechTask(run), console)


def load(run: Run, device: str = "auto") -> SpeechPredictor:
    """The trained model of a run, ready to speak."""
    use = SpeechTask(run)
    return use.build_predictor(*supervised.load_trained_model(use, device))


def evaluate(
    predictor: SpeechPredictor, split_name: str, options: SpeechOptions, console: Console
) -> Evaluation:
    """Score a run, and keep what was found, with some of what it said."""
    found = tasks_base.evaluate(
        predictor.with_options(options).with_detailed_evaluation(), split_name, console
    )
    console.print("\n".join(found.samples), markup=False, soft_wrap=True)
    return found


def compare(
    runs: Sequence[Run],
    split_name: str,
    options: SpeechOptions,
    output_folder: Path,
    device: str,
    console: Console,
) -> None:
    """Runs on the same texts, by how far they are from the recordings: the lower, the better."""
    tasks_base.compare(
        runs,
        lambda run, place: load(run, place).with_options(options),
        split_name,
        output_folder,
        device,
        console,
    )


# ------------------------------------------------------------------------------------------------ the use


class SpeechTask(SupervisedTask[SpeechExample]):
    """Speech, for one run."""

    description = "say a text"
    example_type = SpeechExample

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.audio = AudioProcessor(self.recipe.audio)
        self._feature_cache: SpectrogramCache | None = None
        finds = " and finding where their symbols are spoken" if self.recipe.model.alignment_loss else ""
        self.dataset_message = f"listening to the recordings{finds}"

    @property
    def input_example(self) -> str:
        return "forty two" if self.recipe.data.train == BUILTIN_DATASET else "…"

    # What is read.

    def read_examples(
        self, data_source: DataSource, split_name: str
    ) -> Iterator[SpeechExample | InvalidExample]:
        data: SpeechDataConfig = self.recipe.data
        if data_source == BUILTIN_DATASET:
            rate = self.recipe.audio.sample_rate
            return iter(
                speech.make_builtin_examples(
                    BUILTIN_SEED, data.builtin_size, rate if rate in (8000, 16000) else 16000
                )
            )
        found = speech.read_speech_examples(
            data_source, split=split_name, columns=data.columns, audio_path=data.recordings
        )
        return self.log_skipped(_make_path_absolute(one) for one in found)

    def get_split_key(self, example: SpeechExample) -> str:
        """Of many texts, some are held out; of a few, some of their recordings. A built-in one is held out in
        one style, for it is learned in the others.
        """
        if isinstance(example.audio, BuiltinUtterance):
            return f"{example.text} {example.emotion}"
        return example.text if self.has_many_texts else example.audio.name

    @property
    def has_many_texts(self) -> bool:
        return len({one.text for one in self.all_examples}) > MAX_REPEATED_TEXTS

    def collect_labels(self, examples: Sequence[SpeechExample]) -> list[str]:
        for name in self.recipe.data.style_reference:
            for one in examples:
                if not getattr(one, name):
                    raise InputError(
                        f"data.style_reference: {one.location} names no {name}; name the column with data.{name}, or "
                        "leave it out, and each recording has its style from itself"
                    )
        return []

    # What reads it.

    def prepare(self, train: DatasetSplit[SpeechExample]) -> None:
        symbols = SpeechSymbols.from_texts((one.text for one in train.examples), self.recipe.text.number_language)
        symbols.save(self.run.folder)

    def build_model(self) -> tuple[Tacotron, SpeechSymbols]:
        symbols = SpeechSymbols.load(self.run.folder)
        try:
            return Tacotron(self.recipe.model, symbols.vocab_size), symbols
        except ValueError as error:
            raise InputError(f"model: {error}") from None

    def init_weights(self, model: Any, tokenizer: SpeechSymbols) -> str | None:
        return None

    @property
    def feature_cache(self) -> SpectrogramCache:
        """Where the spectra of recordings are kept."""
        if self._feature_cache is None:
            self._feature_cache = SpectrogramCache.open(
                Path(self.recipe.data.cache_folder or common.get_cache_folder()) / "sounds", self.audio
            )
        return self._feature_cache

    def build_predictor(self, model: Any, tokenizer: SpeechSymbols) -> SpeechPredictor:
        return SpeechPredictor(self, model, tokenizer)

    def build_dataset(
        self, encoded: Sequence[EncodedUtterance], model: Any, ranks: DistributedRanks
    ) -> SpeechBatcher:
        if ranks.is_main and not self.run.has_checkpoint:
            self._write_size_limits(encoded)
        alike = common.resolve_batch_layout(self.run, ranks, packed=False)["fixed_shapes"]
        manners = [one.style_group for one in encoded] if self.recipe.data.style_reference else None
        places = self._load_forced_alignments(encoded, ranks) if self.recipe.model.alignment_loss else None
        settings = self.recipe.train
        return self.build_utterances(
            encoded,
            settings.batch_tokens,
            settings.seed,
            static_shapes=alike,
            style_groups=manners,
            frame_symbols=places,
        )

    def _load_forced_alignments(
        self, encoded: Sequence[EncodedUtterance], ranks: DistributedRanks
    ) -> list[forced_alignment.FrameSymbols]:
        """Where in its text each frame is: found by one process when a run begins, and kept."""
        path, mels = self.run.folder / "data" / "forced_alignments.npy", self.recipe.audio.n_mels
        if ranks.is_main and not (self.run.has_checkpoint and path.is_file()):
            sounds = [self.feature_cache[one.recording][:, :mels] for one in encoded]
            found = forced_alignment.align_recordings(
                [one.symbol_ids for one in encoded], sounds, seed=self.recipe.train.seed, device=ranks.device
            )
            with atomic_write(path) as part, part.open("wb") as file:
                np.save(file, np.concatenate(found).astype(np.int32))
        ranks.barrier()
        ends = np.cumsum([self.feature_cache.num_frames(one.recording) for one in encoded])
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

    def get_style_group(self, example: SpeechExample) -> str:
        """What recordings share that have their styles from each other."""
        return "\n".join(getattr(example, name) for name in self.recipe.data.style_reference)

    def build_utterances(
        self,
        encoded: Sequence[EncodedUtterance],
        batch_frames: int,
        seed: int,
        *,
        static_shapes: bool,
        style_groups: Sequence[str] | None = None,
        frame_symbols: Sequence[forced_alignment.FrameSymbols] | None = None,
    ) -> SpeechBatcher:
        """As batches of so many frames."""
        return SpeechBatcher(
            [one.symbol_ids for one in encoded],
            [self.feature_cache[one.recording] for one in encoded],
            max_frames=batch_frames,
            seed=seed,
            n_mels=self.recipe.audio.n_mels,
            fixed_shapes=static_shapes,
            audio_names=[one.recording.location for one in encoded],
            style_groups=style_groups,
            frame_symbols=frame_symbols,
        )

    def _write_size_limits(self, encoded: Sequence[EncodedUtterance]) -> None:
        """How long texts and sounds were, which says when something that is said is far too long."""
        symbols = np.array([len(one.symbol_ids) for one in encoded])
        frames = np.array([self.feature_cache.num_frames(one.recording) for one in encoded])
        supervised.write_json(
            self.run.folder / "sizes.json",
            {
                "max_symbols": int(symbols.max()),
                "max_frames": int(frames.max()),
                "max_frames_per_symbol": float((frames / symbols).max()),
            },
        )

    def describe_model(self, model: nn.Module, tokenizer: SpeechSymbols, num_examples: int) -> str:
        weights = sum(weight.numel() for weight in model.parameters()) / 1e6
        style = self.recipe.model.style
        tokens = "no style tokens" if style is None else f"{style.num_tokens} style tokens"
        return (
            f"{self.recipe.model.type}: {weights:.1f} M weights, {tokens}, {tokenizer.vocab_size} symbols, "
            f"{num_examples:,} recordings"
        )


def _make_path_absolute(recording: SpeechExample | InvalidExample) -> SpeechExample | InvalidExample:
    """Whoever evaluates the run may stand in another folder."""
    if isinstance(recording, InvalidExample) or not isinstance(recording.audio, AudioFile):
        return recording
    return replace(recording, audio=replace(recording.audio, path=recording.audio.path.absolute()))


Recipe = SpeechRecipe
Options = SpeechOptions
