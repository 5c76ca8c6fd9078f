"""Recipes of pretraining."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jumok.config import Config
from jumok.data.batching.pretraining import MaskingConfig
from jumok.data.readers.invalid_examples import OnError
from jumok.data.tokenizers.wordpiece import WordPieceConfig
from jumok.models.bert import BertConfig
from jumok.tasks.config import AutoBool, ColumnName, DataSource
from jumok.training import TrainConfig


@dataclass(frozen=True)
class PretrainingDataConfig(Config):
    """The ``data:`` section. :mod:`jumok.data.readers.documents` describes the format of documents."""

    train: DataSource | None = None
    valid: DataSource | None = None  # None: held out of train
    test: DataSource | None = None  # None: held out of train
    text_column: ColumnName | None = None  # column of the text, in tables
    rows_per_document: int = 1  # number of rows of a table that make a document
    held_out_size: int = 300  # number of documents in each split that is held out
    on_error: OnError = "stop"  # skip: leave invalid documents out and count them
    packing: AutoBool = "auto"  # concatenate sequences instead of padding; auto: where that is faster

    def __post_init__(self) -> None:
        self.check_ranges(positive=("held_out_size", "rows_per_document"))
        if self.rows_per_document > 1 and self.text_column is None:
            raise ValueError(
                "rows_per_document counts rows of a table: set the column to read, as in text_column: review"
            )


@dataclass(frozen=True)
class PretrainingRecipe(Config):
    """A recipe of pretraining."""

    task: Literal["pretrain"]
    # Run or Hugging Face folder of the same sizes to continue pretraining from. None: random initialization.
    pretrained: str | None = None
    model: BertConfig = field(default_factory=BertConfig)
    data: PretrainingDataConfig = field(default_factory=PretrainingDataConfig)
    tokenizer: WordPieceConfig = field(default_factory=WordPieceConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        length = self.masking.sequence_length
        if length > self.model.max_positions:
            raise ValueError(
                f"masking.sequence_length={length} is more than model.max_positions={self.model.max_positions}"
            )
        if self.model.num_segments < 2 or not self.model.pooler:
            raise ValueError("model: next sentence prediction needs num_segments=2 or more, and a pooler")
        if self.train.batch_tokens < 2 * length:
            raise ValueError(
                f"train.batch_tokens={self.train.batch_tokens}: a batch has at least two sequences of "
                f"masking.sequence_length={length}"
            )


RECIPE_TYPES: dict[str, type] = {"bert": PretrainingRecipe}
