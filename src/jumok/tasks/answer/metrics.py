"""Scores of question answering: exact match and F1."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from jumok.data.readers.squad import AnswerExample, ContextSpan
from jumok.metrics.question_answering import answer_f1, is_exact_match, score_answers, select_gold_answers
from jumok.tasks.answer.config import AnswerEvaluationConfig
from jumok.tasks.answer.data import EncodedQuestion
from jumok.tasks.base import Evaluation

NUM_SAMPLES = 3  # sample answers per validation


def score_question_answering(
    examples: Sequence[AnswerExample],
    predictions: Sequence[tuple[ContextSpan, float]],
    encoded: Sequence[EncodedQuestion],
    config: AnswerEvaluationConfig,
) -> Evaluation:
    """Score the best answer to each question, given with its probability."""
    convention = config.answer_convention
    texts = [answer.text for answer, _ in predictions]
    gold = [[answer.text for answer in example.answers] for example in examples]
    scores = score_answers(texts, gold, convention)
    measure = is_exact_match if config.select_by == "exact_match" else answer_f1
    by_question = np.array(
        [
            max(float(measure(text, answer, convention)) for answer in select_gold_answers(answers, convention))
            for text, answers in zip(texts, gold, strict=True)
        ]
    )
    upper_bound = score_answers([_find_reachable_answer(question) for question in encoded], gold, convention)
    return Evaluation(
        {
            "exact_match": scores.exact_match,
            "f1": scores.f1,
            "exact_match_upper_bound": upper_bound.exact_match,
            "f1_upper_bound": upper_bound.f1,
            "answer_convention": convention,
        },
        config.select_by,
        statistic=lambda indices: float(by_question[indices].mean()),
        outputs=[
            json.dumps(
                {
                    "id": example.id,
                    "prediction": answer.text,
                    "start": answer.start,
                    "probability": probability,
                    "target": answers,
                },
                ensure_ascii=False,
            )
            for example, (answer, probability), answers in zip(examples, predictions, gold, strict=True)
        ],
        samples=[
            line
            for example, text, answers in zip(examples[:NUM_SAMPLES], texts, gold, strict=False)
            for line in (
                f"  question    {example.question}",
                f"  prediction  {text}",
                f"  target      {' | '.join(answers)}",
            )
        ],
    )


def _find_reachable_answer(question: EncodedQuestion) -> str:
    """The best answer that the model can predict. Its pieces may contain more than the gold answer.

    For example, a Korean word with its particle, 서울에서, may be one piece, where the answer is 서울. An answer
    that no window contains as a whole is out of reach.
    """
    span = question.answer_span
    is_in_window = span is not None and any(start <= span[0] and span[1] < end for start, end in question.windows)
    return question.build_answer(*span).text if span is not None and is_in_window else ""
