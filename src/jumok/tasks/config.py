"""Sections of recipes that several tasks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jumok.data.readers.invalid_examples import OnError
from jumok.data.tokenizers.wordpiece import WordPieceConfig
from jumok.models.bert import BertConfig
from jumok.training import TrainConfig

DataSource = str | list[str]  # files, folders or names of data sets: see jumok.data.readers.dataset_files
ColumnName = str | int | list[str | int]  # a column by name or number; of a list, the first that exists
AutoBool = Literal["auto"] | bool


class RecipeSection:
    """A section of a recipe, or a recipe. Unknown keys are errors."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def check_positive(self, *names: str) -> None:
        """Raise ``ValueError`` if one of these fields is below 1."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: 1 or more is expected")


@dataclass(frozen=True)
class DataConfig(RecipeSection):
    """Keys that most ``data:`` sections have."""

    train: DataSource
    valid: DataSource | None = None  # None: held out of train
    test: DataSource | None = None  # None: held out of train
    held_out_size: int = 1000  # number of examples in each split that is held out
    on_error: OnError = "stop"  # skip: leave invalid examples out and count them

    def __post_init__(self) -> None:
        self.check_positive("held_out_size")


@dataclass(frozen=True)
class BertDataConfig(DataConfig):
    """Keys that the ``data:`` sections of tasks with a fine-tuned BERT have."""

    max_tokens: int | None = None  # maximum length of an input; None: the number of positions of the model
    on_overflow: Literal["window", "error"] = "window"  # longer texts: read in windows, or an error
    window_stride: int = 128  # distance of the starts of two windows, in tokens
    packing: AutoBool = "auto"  # concatenate texts instead of padding; auto: where that is faster

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("window_stride", "max_tokens")


@dataclass(frozen=True)
class BertRecipe(RecipeSection):
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
