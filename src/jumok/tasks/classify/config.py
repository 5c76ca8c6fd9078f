"""Recipes of classification. ``model.type`` selects the recipe class: bert (the default), or a model of words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jumok.config import Config
from jumok.data.tokenizers.word_tokenizer import WordTokenizerConfig
from jumok.models.hierarchical import HierarchicalConfig
from jumok.models.self_attentive import SelfAttentiveConfig
from jumok.tasks.config import BertDataConfig, BertRecipe, ColumnName, DataConfig, DataSource
from jumok.training import TrainConfig

BUILTIN_DATASET = "decisive-words-en"


@dataclass(frozen=True)
class ClassificationDataConfig(DataConfig):
    """Keys that the ``data:`` sections of all classifiers have."""

    text_column: ColumnName = "text"
    pair_column: ColumnName | None = None  # column of the second text, for a model of text pairs
    label_column: ColumnName = "label"
    has_header: bool | None = None  # whether the first row has column names; None: if columns are named
    label_names: list[str] | dict[str, str] | None = None  # labels in the data, and their names; None: as is
    regression: bool = False  # labels are numbers
    unescape_treebank: bool = False  # read -lrb- as (, and so on, in data from a treebank
    builtin_size: int = 4000  # number of built-in documents, see jumok.data.builtin.decisive_words

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.regression and self.label_names is not None:
            raise ValueError("regression has no classes: remove label_names")
        self.check_ranges(positive=("builtin_size",))


@dataclass(frozen=True)
class ClassificationEvaluationConfig(Config):
    """The ``evaluation:`` section."""

    # Validation metric that selects the best checkpoint.
    select_by: Literal["auto", "accuracy", "f1", "macro_f1", "spearman", "pearson"] = "auto"
    positive_label: str | None = None  # class whose F1 is reported; None: the second of two classes


@dataclass(frozen=True)
class BertClassificationDataConfig(ClassificationDataConfig, BertDataConfig):
    """The ``data:`` section."""

    on_overflow: Literal["window", "error"] = "error"
    symmetric_pairs: bool = False  # train on pairs in both orders, and average both predictions

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.symmetric_pairs and self.pair_column is None:
            raise ValueError("symmetric_pairs is for text pairs: set pair_column to the column of second texts")


@dataclass(frozen=True)
class BertClassificationRecipe(BertRecipe):
    """A recipe of classification by BERT."""

    task: Literal["classify"]
    data: BertClassificationDataConfig
    evaluation: ClassificationEvaluationConfig = field(default_factory=ClassificationEvaluationConfig)


@dataclass(frozen=True)
class WordAttentionDataConfig(ClassificationDataConfig):
    """The ``data:`` section."""

    train: DataSource = BUILTIN_DATASET


@dataclass(frozen=True)
class WordAttentionRecipe(Config):
    """Sections that the recipes of both models of words have."""

    task: Literal["classify"]
    data: WordAttentionDataConfig = field(default_factory=WordAttentionDataConfig)
    tokenizer: WordTokenizerConfig = field(default_factory=WordTokenizerConfig)
    word_vectors: str | None = None  # file of word vectors (.vec, word2vec) to initialize the embedding from
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: ClassificationEvaluationConfig = field(default_factory=ClassificationEvaluationConfig)


@dataclass(frozen=True)
class SelfAttentiveRecipe(WordAttentionRecipe):
    """A recipe of a self-attentive classifier."""

    model: SelfAttentiveConfig = field(default_factory=SelfAttentiveConfig)


@dataclass(frozen=True)
class HierarchicalRecipe(WordAttentionRecipe):
    """A recipe of a hierarchical attention network."""

    model: HierarchicalConfig = field(default_factory=HierarchicalConfig)


ClassificationRecipe = BertClassificationRecipe | SelfAttentiveRecipe | HierarchicalRecipe
RECIPE_TYPES: dict[str, type] = {
    "bert": BertClassificationRecipe,
    SelfAttentiveConfig.type: SelfAttentiveRecipe,
    HierarchicalConfig.type: HierarchicalRecipe,
}
