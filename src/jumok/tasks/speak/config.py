"""Recipes of speech synthesis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jumok.config import Config
from jumok.data.audio import AudioConfig
from jumok.data.readers.speech import SpeechColumns
from jumok.data.tokenizers.speech_symbols import NumberLanguage
from jumok.metrics.cepstral_distortion import NUM_COEFFICIENTS
from jumok.models.tacotron import TacotronConfig
from jumok.tasks.config import DataConfig, DataSource
from jumok.training import TrainConfig

BUILTIN_DATASET = "voices"
SpeechColumnName = str | int


@dataclass(frozen=True)
class SpeechDataConfig(DataConfig):
    """The ``data:`` section. :mod:`jumok.data.readers.speech` describes how recordings and texts are named."""

    train: DataSource = BUILTIN_DATASET
    recordings: str | None = None  # folder or .tar with the recordings; None: found next to the table
    # Columns, in tables. A table may have all splits; then a column has the split of each row.
    audio_column: SpeechColumnName | None = None  # None: file, audio, path, …
    text_column: SpeechColumnName | None = None  # None: text, sentence, transcript, …
    speaker_column: SpeechColumnName | None = None
    emotion_column: SpeechColumnName | None = None
    split_column: SpeechColumnName = "split"
    has_header: bool | None = None  # whether the first row has column names; None: if columns are named
    # The recording whose style an utterance is trained with: its own, as in the paper, or another one with the
    # same speaker, emotion, or both, so that the style cannot contain the text.
    style_reference: tuple[Literal["speaker", "emotion"], ...] = ()
    max_seconds: float = 15.0  # longer recordings are invalid
    builtin_size: int = 2000  # number of built-in utterances, including those that are held out
    cache_folder: str | None = None  # of the spectrograms; None: the folder JUMOK_CACHE, or ~/.cache/jumok

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ranges(positive=("builtin_size",), above_zero=("max_seconds",))

    @property
    def columns(self) -> SpeechColumns:
        columns = {
            "file": self.audio_column,
            "text": self.text_column,
            "speaker": self.speaker_column,
            "emotion": self.emotion_column,
        }
        named = {name: column for name, column in columns.items() if column is not None}
        return SpeechColumns(**named, split=self.split_column, header=self.has_header)


@dataclass(frozen=True)
class SpeechTextConfig(Config):
    """The ``text:`` section."""

    number_language: NumberLanguage | None = "en"  # in which digits are spelled out; None: keep digits


@dataclass(frozen=True)
class SpeechDecodeConfig(Config):
    """The ``decode:`` section: synthesis."""

    # Maximum number of symbols synthesized at once; longer texts are split. None: that of the training texts.
    max_symbols: int | None = None
    pause_seconds: float = 0.25  # pause between the segments of a text
    griffin_lim_iterations: int = 60
    magnitude_power: float = 1.2  # exponent of predicted magnitudes before Griffin-Lim

    def __post_init__(self) -> None:
        self.check_ranges(
            positive=("max_symbols", "griffin_lim_iterations"),
            non_negative=("pause_seconds",),
            above_zero=("magnitude_power",),
        )


@dataclass(frozen=True)
class SpeechEvaluationConfig(Config):
    """The ``evaluation:`` section."""

    # Validation metric that selects the best checkpoint. The loss, and its part "mel", are computed with teacher
    # forcing; the others are of free synthesis. When the stop token overfits, the loss is lowest too early.
    select_by: Literal["loss", "mel", "diagonality", "complete"] = "loss"
    num_judges: int = 3  # classifiers trained on the recordings to judge synthesized speech; 0: none

    def __post_init__(self) -> None:
        self.check_ranges(non_negative=("num_judges",))


@dataclass(frozen=True)
class SpeechRecipe(Config):
    """A recipe of speech synthesis."""

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
                f"audio.n_mels={self.audio.n_mels}: more than {NUM_COEFFICIENTS} is expected, the number of "
                "cepstral coefficients that speech is compared by"
            )
        linear_bins = self.audio.num_bins if self.audio.linear_spectrogram else 0
        if (self.model.n_mels, self.model.linear_bins) != (self.audio.n_mels, linear_bins):
            raise ValueError(
                f"model.n_mels={self.model.n_mels} and model.linear_bins={self.model.linear_bins}, but audio has "
                f"{self.audio.n_mels} mels and {linear_bins} frequencies (audio.linear_spectrogram: "
                f"{self.audio.linear_spectrogram}): both must be equal"
            )


RECIPE_TYPES: dict[str, type] = {"tacotron": SpeechRecipe}
