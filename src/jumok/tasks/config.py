"""Sections of recipes that several tasks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jumok.config import Config
from jumok.data.readers.invalid_examples import OnError
from jumok.data.tokenizers.wordpiece import WordPieceConfig
from jumok.models.bert import BertConfig
from jumok.training import TrainConfig

DataSource = str | list[str]  # files, folders or names of data sets: see jumok.data.readers.dataset_files
ColumnName = str | int | list[str | int]  # a column by name or number; of a list, the first that exists
AutoBool = Literal["auto"] | bool


@dataclass(frozen=True)
class BeamSearchConfig(Config):
    """Keys that the ``decode:`` sections of tasks that generate text have."""

    beam_size: int = 5  # 1 means greedy search
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        self.check_ranges(positive=("beam_size",), non_negative=("length_penalty",))


@dataclass(frozen=True)
class DataConfig(Config):
    """Keys that most ``data:`` sections have."""

    train: DataSource
    valid: DataSource | None = None  # None: held out of train
    test: DataSource | None = None  # None: held out of train
    held_out_size: int = 1000  # number of examples in each split that is held out
    on_error: OnError = "stop"  # skip: leave invalid examples out and count them

    def __post_init__(self) -> None:
        self.check_ranges(positive=("held_out_size",))


@dataclass(frozen=True)
class BertDataConfig(DataConfig):
    """Keys that the ``data:`` sections of tasks with a fine-tuned BERT have."""

    max_tokens: int | None = None  # maximum length of an input; None: the number of positions of the model
    on_overflow: Literal["window", "error"] = "window"  # longer texts: read in windows, or an error
    window_stride: int = 128  # distance of the starts of two windows, in tokens
    packing: AutoBool = "auto"  # concatenate texts instead of padding; auto: where that is faster

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ranges(positive=("window_stride", "max_tokens"))


@dataclass(frozen=True)
class BertRecipe(Config):
    """Sections that the recipes of a fine-tuned BERT have."""

    task: str
    data: BertDataConfig
    # Run or Hugging Face folder whose weights, sizes and vocabulary are used. None: random initialization, and
    # a vocabulary learned from the data.
    pretrained: str | None = None
    random_init: bool = False  # use only the sizes and the vocabulary of ``pretrained`` (a baseline)
    # With ``pretrained``, only the dropouts, ``pooling`` and ``adversarial_epsilon`` are used.
    model: BertConfig = field(default_factory=BertConfig)
    tokenizer: WordPieceConfig = field(default_factory=WordPieceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
