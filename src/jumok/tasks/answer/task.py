"""Question answering: the span of a text that answers a question.

::

    Where is Seoul?  ⇥  Seoul is the capital of Korea.     →   Korea   24-29   0.97

A text that is longer than the model's input is read in windows. In each window, the model predicts the probability
that the answer starts and ends at each position, or, at [CLS], that the window does not contain it. The answer is the
span of all windows with the highest product of both probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from jumok.batches.text import AnswerBatch
from jumok.data.readers import squad
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.squad import AnswerExample
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.models.bert import BertConfig, BertSpanExtractor
from jumok.run import Run
from jumok.tasks import jsonl_input
from jumok.tasks.answer.config import AnswerRecipe
from jumok.tasks.answer.predictor import AnswerPredictor
from jumok.tasks.config import DataSource
from jumok.tasks.fine_tuning import BertTask


class AnswerTask(BertTask[AnswerExample, AnswerPredictor]):
    """Extractive question answering by BERT."""

    description = "answer a question about a text"
    example_type = AnswerExample
    batch_type = AnswerBatch
    make_jsonl_reader = staticmethod(jsonl_input.make_question_reader)
    recipe: AnswerRecipe

    @property
    def input_example(self) -> str:
        return "question ||| text"

    def read_examples(self, data_source: DataSource, split_name: str) -> Iterator[AnswerExample | InvalidExample]:
        return squad.read_answer_examples(
            data_source, allow_unanswerable=self.recipe.data.has_unanswerable, split=split_name
        )

    def get_split_key(self, example: AnswerExample) -> str:
        return example.article

    def get_texts(self, example: AnswerExample) -> Iterable[str]:
        return [example.question, example.context]

    def build_bert_model(self, config: BertConfig, vocab_size: int) -> nn.Module:
        return BertSpanExtractor(config, vocab_size)

    def build_predictor(self, model: nn.Module, tokenizer: WordPieceTokenizer) -> AnswerPredictor:
        return AnswerPredictor(self, model, tokenizer)


def build_task(run: Run) -> AnswerTask:
    """Build the task of a run."""
    return AnswerTask(run)
