"""A trained question answering model: the spans of a context that answer a question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.batching.texts import EncodedText
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.squad import AnswerExample, ContextSpan
from jumok.models.bert import BertSpanExtractor
from jumok.tasks.answer import metrics as answer_metrics
from jumok.tasks.answer.data import (
    QUESTIONS_PER_CHUNK,
    EncodedQuestion,
    build_question,
    build_row,
    encode_questions,
    parse_line,
)
from jumok.tasks.base import Evaluation, Prediction
from jumok.tasks.options import NBestOptions
from jumok.tasks.predictors import FineTunedPredictor

if TYPE_CHECKING:
    from jumok.tasks.answer.task import AnswerTask

MAX_CANDIDATES = 20  # starts, and ends, per window, for n-best lists


@dataclass(frozen=True)
class AnswerPrediction(Prediction):
    """The likeliest answers to a question with their probabilities; an empty text means no answer."""

    question: str = ""
    context: str = ""
    answers: tuple[tuple[ContextSpan, float], ...] = ()

    @property
    def answer(self) -> ContextSpan:
        """The likeliest answer."""
        return self.answers[0][0]

    @property
    def input_fields(self) -> dict[str, Any]:
        return {"question": self.question}

    def to_dict(self, *, n_best: bool = False) -> dict[str, Any]:
        best, *others = (
            {"answer": answer.text, "start": answer.start, "end": answer.end, "probability": probability}
            for answer, probability in self.answers
        )
        return {**best, "alternatives": others} if n_best else best

    def format_lines(self, *, n_best: bool) -> Iterator[str]:
        """The answer, its span and its probability."""
        for answer, probability in self.answers if n_best else self.answers[:1]:
            text = " ".join(answer.text.split()) or "(no answer)"  # one line
            fields = [text, f"{answer.start}-{answer.end}", f"{probability:.4f}"]
            yield " ||| ".join([str(self.index), *fields]) if n_best else "\t".join(fields)


class AnswerPredictor(FineTunedPredictor[AnswerPrediction]):
    """A model that answers questions about texts.

    >>> model = jumok.load("runs/bert-xquad-en")  # doctest: +SKIP
    >>> model.answer("Where is Seoul?", "Seoul is the capital of Korea.").answer  # doctest: +SKIP
    ContextSpan(text='Korea', start=24)
    """

    task: AnswerTask
    model: BertSpanExtractor

    chunk_size = QUESTIONS_PER_CHUNK

    def answer(self, question: str, context: str, n_best: int = 1) -> AnswerPrediction:
        """Answer one question. For many questions use :meth:`answer_questions` or :meth:`predict`."""
        return next(self.answer_questions([(question, context)], n_best))

    def answer_questions(
        self, questions_with_contexts: Sequence[tuple[str, str]], n_best: int = 1
    ) -> Iterator[AnswerPrediction]:
        """Answer questions, each given with its context, in their order."""
        questions = [build_question(*pair) for pair in questions_with_contexts]
        lines = [f"{question}\t{context}" for question, context in questions_with_contexts]
        return self._build_predictions(lines, questions, n_best)

    def predict_chunk(
        self, lines: Sequence[str], options: NBestOptions, first_index: int
    ) -> Iterator[AnswerPrediction]:
        questions = [self.parse_line(line, index) for index, line in enumerate(lines, first_index)]
        return self._build_predictions(lines, questions, options.n_best, first_index)

    def parse_line(self, line: str, index: int = 0) -> AnswerExample:
        return parse_line(line, index)

    def encode(self, examples: Iterable[AnswerExample]) -> Iterator[list[EncodedText] | InvalidExample]:
        for question in encode_questions(examples, self.tokenizer, self.max_tokens, self.task.recipe.data):
            if isinstance(question, InvalidExample):
                yield question
            else:
                yield [build_row(question, window, self.tokenizer) for window in question.windows]

    def count_tokens(self, question: str, context: str) -> int:
        """The number of tokens of a question and its context. Raise if they are too long."""
        return sum(len(row.ids) for row in self.encode_windows(build_question(question, context)))

    def score_examples(
        self, examples: Sequence[AnswerExample], options: NBestOptions | None = None, *, detailed: bool = False
    ) -> Evaluation:
        encoded = self._encode_questions(examples, None)
        predictions = [answers[0] for answers in self._predict_encoded(encoded, 1)]
        config = self.task.recipe.evaluation
        return answer_metrics.score_question_answering(examples, predictions, encoded, config)

    def _encode_questions(self, questions: Sequence[AnswerExample], first_index: int | None) -> list[EncodedQuestion]:
        config = self.task.recipe.data
        return self.check_encoded(encode_questions(questions, self.tokenizer, self.max_tokens, config), first_index)

    def _build_predictions(
        self, lines: Sequence[str], questions: Sequence[AnswerExample], n_best: int, first_index: int = 0
    ) -> Iterator[AnswerPrediction]:
        outputs = self._predict_encoded(self._encode_questions(questions, first_index), n_best)
        rows = zip(lines, questions, outputs, strict=True)
        for index, (line, question, answers) in enumerate(rows, first_index):
            yield AnswerPrediction(index, line, question.question, question.context, answers)

    def _predict_encoded(
        self, questions: Sequence[EncodedQuestion], n_best: int
    ) -> Iterator[tuple[tuple[ContextSpan, float], ...]]:
        rows = [build_row(question, window, self.tokenizer) for question in questions for window in question.windows]
        outputs = iter(zip(rows, self.compute_outputs(rows, self.model.logits), strict=True))
        for question in questions:
            answers: dict[ContextSpan, float] = {}
            no_answer = []  # the probability that a window does not contain the answer
            offset = question.context_offset
            for first, end in question.windows:
                row, logits = next(outputs)
                allowed = np.array(row.annotations["answer_mask"])
                starts, ends = (_masked_softmax(x.double().numpy()[: len(allowed)], allowed) for x in logits)
                no_answer.append(float(starts[0] * ends[0]))
                context = slice(offset, offset + end - first)
                for probability, i, j in self._find_best_spans(starts[context], ends[context], n_best):
                    answer = question.build_answer(first + i, first + j)
                    answers[answer] = max(answers.get(answer, 0.0), probability)
            if not answers or self.task.recipe.data.has_unanswerable:
                answers[ContextSpan("", 0)] = min(no_answer)  # no window may contain it
            yield tuple(sorted(answers.items(), key=lambda pair: -pair[1])[:n_best])

    def _find_best_spans(
        self, start_probabilities: NDArray[np.float64], end_probabilities: NDArray[np.float64], n_best: int
    ) -> list[tuple[float, int, int]]:
        """The likeliest spans of one window: ``argmax p_start(i) p_end(j)`` over ``i ≤ j < i + L``.

        Returns probability, first piece and last piece. ``L`` is ``decode.max_answer_tokens``.
        """
        max_length, num_pieces = self.task.recipe.decode.max_answer_tokens, len(start_probabilities)
        if not num_pieces:
            return []
        if n_best > 1:
            starts, ends = (
                np.argsort(-x, kind="stable")[:MAX_CANDIDATES].tolist()
                for x in (start_probabilities, end_probabilities)
            )
            spans = [
                (float(start_probabilities[i] * end_probabilities[j]), i, j)
                for i in starts
                for j in ends
                if i <= j < i + max_length
            ]
            if spans:
                return spans
        products = np.triu(start_probabilities[:, None] * end_probabilities)  # (first piece, last piece)
        products[np.tri(num_pieces, num_pieces, -1, dtype=bool)] = -1
        if num_pieces > max_length:
            products[~np.tri(num_pieces, num_pieces, max_length - 1, dtype=bool)] = -1
        first, last = np.unravel_index(int(products.argmax()), products.shape)
        return [(float(products[first, last]), int(first), int(last))]


def _masked_softmax(logits: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Probabilities over the positions that the mask allows."""
    exponentials = np.where(mask, np.exp(logits - logits[mask].max()), 0.0)
    probabilities: NDArray[np.float64] = exponentials / exponentials.sum()
    return probabilities
