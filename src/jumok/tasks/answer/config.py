"""Recipes of question answering."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jumok.config import Config
from jumok.metrics.question_answering import AnswerConvention
from jumok.tasks.config import BertDataConfig, BertRecipe


@dataclass(frozen=True)
class AnswerDataConfig(BertDataConfig):
    """The ``data:`` section. Whole articles are held out."""

    has_unanswerable: bool = False  # some questions have no answer, as in SQuAD 2.0


@dataclass(frozen=True)
class AnswerDecodeConfig(Config):
    """The ``decode:`` section."""

    max_answer_tokens: int = 30

    def __post_init__(self) -> None:
        self.check_ranges(positive=("max_answer_tokens",))


@dataclass(frozen=True)
class AnswerEvaluationConfig(Config):
    """The ``evaluation:`` section."""

    answer_convention: AnswerConvention = "squad"  # official script whose answer normalization is used
    select_by: Literal["f1", "exact_match"] = "f1"  # validation metric that selects the best checkpoint


@dataclass(frozen=True)
class AnswerRecipe(BertRecipe):
    """A recipe of question answering."""

    task: Literal["answer"]
    data: AnswerDataConfig
    decode: AnswerDecodeConfig = field(default_factory=AnswerDecodeConfig)
    evaluation: AnswerEvaluationConfig = field(default_factory=AnswerEvaluationConfig)


RECIPE_TYPES: dict[str, type] = {"bert": AnswerRecipe}
