"""The task of answering: where in a text the answer to a question stands.

::

    Where is Seoul?  ⇥  Seoul is the capital of Korea.     →   Korea   24-29   0.97

A text longer than the model reads goes through it in windows. In each, the model says how likely an answer
is to begin and to end at each place, or, at [CLS], that it is not there. The answer is the span, of all
windows, for which beginning and end together are likeliest.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from jumok.batches.text import AnswerBatch
from jumok.data.batching.texts import EncodedText
from jumok.data.readers import squad
from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.squad import AnswerExample, ContextSpan, extract_answer, find_piece_span
from jumok.data.tokenizers.segmentation import find_grapheme_boundaries
from jumok.data.tokenizers.windows import TokenWindow, make_windows
from jumok.data.tokenizers.wordpiece import WordPieceConfig, WordPieceEncoding, WordPieceTokenizer
from jumok.errors import InputError
from jumok.metrics.question_answering import (
    AnswerConvention,
    answer_f1,
    is_exact_match,
    score_answers,
    select_gold_answers,
)
from jumok.models.bert import BertConfig, BertSpanExtractor
from jumok.run import Run
from jumok.tasks import base as tasks_base
from jumok.tasks import fine_tuning
from jumok.tasks.base import Evaluation
from jumok.tasks.fine_tuning import (
    TOO_LONG_HINT,
    BertDataConfig,
    BertTask,
    DataSource,
    NBestOptions,
    PretrainedSource,
)
from jumok.tasks.jsonl_input import make_question_reader as make_jsonl_reader
from jumok.tasks.predictors import BertPredictor, Prediction
from jumok.training import TrainConfig, TrainingSummary

__all__ = ["AnswerRecipe", "NBestOptions", "compare", "evaluate", "load", "make_jsonl_reader", "train"]

QUESTIONS_PER_CHUNK = 256  # questions that are tokenised together
MAX_CANDIDATES = 20  # of beginnings, and of ends, in each window, where several answers are asked for
NUM_SAMPLES = 3  # sample answers a validation


@dataclass(frozen=True)
class AnswerDataConfig(BertDataConfig):
    """The ``data:`` section. What is held out is whole articles."""

    has_unanswerable: bool = False  # some questions have no answer, as in SQuAD 2.0


@dataclass(frozen=True)
class AnswerDecodeConfig:
    """The ``decode:`` section."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    max_answer_tokens: int = 30  # pieces of an answer

    def __post_init__(self) -> None:
        if self.max_answer_tokens < 1:
            raise ValueError(f"max_answer_tokens={self.max_answer_tokens}: 1 or more is expected")


@dataclass(frozen=True)
class AnswerEvaluationConfig:
    """The ``evaluation:`` section: whose script's way of counting, and which figure decides."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    answer_convention: AnswerConvention = "squad"
    select_by: Literal["f1", "exact"] = "f1"


@dataclass(frozen=True)
class AnswerRecipe:
    """Everything that an answering run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["answer"]
    data: AnswerDataConfig
    # A run or a Hugging Face folder; null: new weights, and a vocabulary learned from the data.
    pretrained: PretrainedSource = None
    random_init: bool = False  # take over sizes and vocabulary only: new weights, to compare with
    model: BertConfig = field(default_factory=BertConfig)  # with ``from``, only its dropouts count
    tokenizer: WordPieceConfig = field(default_factory=WordPieceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: AnswerDecodeConfig = field(default_factory=AnswerDecodeConfig)
    evaluation: AnswerEvaluationConfig = field(default_factory=AnswerEvaluationConfig)


def train(run: Run, console: Console) -> TrainingSummary:
    """Train the model of a run, or go on with it."""
    return fine_tuning.train(AnswerTask(run), console)


def load(run: Run, device: str = "auto") -> AnswerPredictor:
    """The trained model of a run, ready to answer."""
    use = AnswerTask(run)
    return AnswerPredictor(use, *fine_tuning.load_trained_model(use, device))


def evaluate(
    predictor: AnswerPredictor, split_name: str, options: NBestOptions, console: Console
) -> Evaluation:
    """Score a run, and keep what it said."""
    return tasks_base.evaluate(predictor, split_name, console)


def compare(
    runs: Sequence[Run],
    split_name: str,
    options: NBestOptions,
    output_folder: Path,
    device: str,
    console: Console,
) -> None:
    """Runs on the same data."""
    tasks_base.compare(runs, load, split_name, output_folder, device, console)


# ------------------------------------------------------------------------------------------------- the use


@dataclass(frozen=True)
class EncodedQuestion:
    """A question and its text as a model reads them, in windows of the text."""

    question: AnswerExample
    question_ids: list[int]  # of the question
    context_pieces: WordPieceEncoding
    windows: list[TokenWindow]

    @property
    def context_offset(self) -> int:
        """How many tokens there are before the text: [CLS], the question, [SEP]."""
        return len(self.question_ids) + 2

    @functools.cached_property
    def answer_span(self) -> tuple[int, int] | None:
        """The first and the last piece of the first answer, if there is one in the text."""
        if not self.question.answers:
            return None
        answer = self.question.answers[0]
        return find_piece_span((answer.start, answer.end), self.context_pieces.offsets)

    @functools.cached_property
    def context_boundaries(self) -> Sequence[int]:
        """Of the graphemes of the text."""
        return find_grapheme_boundaries(self.question.context)

    def build_answer(self, first_piece: int, last_piece: int) -> ContextSpan:
        """From one piece of the text to another, both included."""
        return extract_answer(
            self.question.context,
            self.context_pieces.offsets,
            first_piece,
            last_piece,
            self.context_boundaries,
        )


class AnswerTask(BertTask[AnswerExample]):
    """Answers in texts, for one run."""

    description = "answer a question about a text"
    example_type = AnswerExample
    batch_type = AnswerBatch

    @property
    def input_example(self) -> str:
        return "question ||| text"

    def read_examples(
        self, data_source: DataSource, split_name: str
    ) -> Iterator[AnswerExample | InvalidExample]:
        return squad.read_answer_examples(
            data_source, allow_unanswerable=self.recipe.data.has_unanswerable, split=split_name
        )

    def get_split_key(self, example: AnswerExample) -> str:
        return example.article

    def get_texts(self, example: AnswerExample) -> Iterable[str]:
        return [example.question, example.context]

    def collect_labels(self, examples: Sequence[AnswerExample]) -> list[str]:
        return []

    def build_bert_model(self, config: BertConfig, vocab_size: int) -> nn.Module:
        return BertSpanExtractor(config, vocab_size)

    def encode_rows(
        self, examples: Iterable[AnswerExample], tokenizer: WordPieceTokenizer, max_tokens: int
    ) -> Iterator[list[EncodedText] | InvalidExample]:
        for one in self.encode_questions(examples, tokenizer, max_tokens):
            yield (
                one
                if isinstance(one, InvalidExample)
                else [_build_row(one, part, tokenizer) for part in one.windows]
            )

    def encode_questions(
        self, examples: Iterable[AnswerExample], tokenizer: WordPieceTokenizer, max_tokens: int
    ) -> Iterator[EncodedQuestion | InvalidExample]:
        """Questions with the windows of their texts."""
        examples = iter(examples)
        while some := list(itertools.islice(examples, QUESTIONS_PER_CHUNK)):
            ids = tokenizer.encode([one.question for one in some])
            contexts = list(dict.fromkeys(one.context for one in some))  # several ask about the same one
            texts = dict(zip(contexts, tokenizer.encode_batch_with_offsets(contexts), strict=True))
            for one, question in zip(some, ids, strict=True):
                yield self._encode_question(one, question, texts[one.context], max_tokens)

    def _encode_question(
        self,
        example: AnswerExample,
        question_ids: list[int],
        context_pieces: WordPieceEncoding,
        max_tokens: int,
    ) -> EncodedQuestion | InvalidExample:
        room = max_tokens - 3 - len(question_ids)
        if room < min(len(context_pieces.ids), max_tokens // 4):
            told = f"{len(question_ids)} tokens, and {max_tokens} are read at once, with the text"
            return InvalidExample(example.location, "a question that is too long", told)
        if len(context_pieces.ids) > room and self.recipe.data.on_overflow == "refuse":
            told = f"{len(context_pieces.ids)} tokens, and {room} are read at once; {TOO_LONG_HINT}"
            return InvalidExample(example.location, "a text that is too long", told)
        return EncodedQuestion(
            example,
            question_ids,
            context_pieces,
            make_windows(len(context_pieces.ids), max(room, 1), self.recipe.data.window_stride),
        )

    def build_predictor(self, model: nn.Module, tokenizer: WordPieceTokenizer) -> AnswerPredictor:
        return AnswerPredictor(self, model, tokenizer)


def _build_row(question: EncodedQuestion, window: TokenWindow, tokenizer: WordPieceTokenizer) -> EncodedText:
    """One window; the answer is the first that was given, or [CLS] if not all of it is there."""
    ids, segments = tokenizer.join_segments(
        question.question_ids, question.context_pieces.ids[window.begin : window.end]
    )
    allowed = [True, *[False] * (question.context_offset - 1), *[True] * (window.end - window.begin), False]
    start = end = 0
    if (
        question.answer_span is not None
        and window.begin <= question.answer_span[0]
        and question.answer_span[1] < window.end
    ):
        start, end = (question.context_offset + place - window.begin for place in question.answer_span)
    return EncodedText(ids, segments, {"answer_mask": allowed, "starts": start, "ends": end})


# ------------------------------------------------------------------------------------------------- at work


@dataclass(frozen=True)
class AnswerPrediction(Prediction):
    """The likeliest answers to a question with their probabilities, the best first; "": there is none."""

    question: str = ""
    context: str = ""
    answers: tuple[tuple[ContextSpan, float], ...] = ()

    @property
    def answer(self) -> ContextSpan:
        return self.answers[0][0]

    def format_lines(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        if as_json:
            told = [
                {"answer": one.text, "start": one.start, "end": one.end, "probability": share}
                for one, share in self.answers
            ]
            known = {"line": self.index, "question": self.question, **told[0]}
            yield json.dumps(known | ({"alternatives": told[1:]} if n_best else {}), ensure_ascii=False)
            return
        for one, share in self.answers if n_best else self.answers[:1]:
            number = f"{self.index} ||| " if n_best else ""
            between = " ||| " if n_best else "\t"
            text = " ".join(one.text.split()) or "(no answer)"  # a line stays a line
            yield number + between.join([text, f"{one.start}-{one.end}", f"{share:.4f}"])


class AnswerPredictor(BertPredictor):
    """A model that answers questions about texts.

    >>> reader = jumok.load("runs/bert-xquad-en")  # doctest: +SKIP
    >>> reader.answer("Where is Seoul?", "Seoul is the capital of Korea.").answer  # doctest: +SKIP
    Answer(text='Korea', start=24)
    """

    def answer(self, question: str, context: str, n_best: int = 1) -> AnswerPrediction:
        """One question; many of them by :meth:`predict`."""
        return next(self.answer_questions([(question, context)], n_best))

    def answer_questions(
        self, questions_with_contexts: Sequence[tuple[str, str]], n_best: int = 1
    ) -> Iterator[AnswerPrediction]:
        """The same for many questions, each with its text, in their order."""
        questions = [_build_question(*both) for both in questions_with_contexts]
        for number, ((question, context), found) in enumerate(
            zip(questions_with_contexts, self._predict_answers(questions, 0, n_best), strict=True)
        ):
            yield AnswerPrediction(number, f"{question}\t{context}", question, context, found)

    def count_tokens(self, question: str, context: str) -> int:
        """How many tokens the model reads of both; what is too long is an error."""
        [rows] = self.check_encoded(self.encode([_build_question(question, context)]))
        return sum(len(row.ids) for row in rows)

    def predict(
        self,
        lines: Iterable[str],
        options: NBestOptions,
        *,
        with_attention: bool = False,
        first_index: int = 0,
    ) -> Iterator[AnswerPrediction]:
        """An answer for every line: ``question_ids<TAB>text``, or a JSON object with question and context."""
        numbered = enumerate(lines, first_index)
        while window := list(itertools.islice(numbered, QUESTIONS_PER_CHUNK)):
            asked = [_parse_line(line, number) for number, line in window]
            found = self._predict_answers(asked, window[0][0], options.n_best)
            for (number, line), one, answers in zip(window, asked, found, strict=True):
                yield AnswerPrediction(number, line, one.question, one.context, answers)

    def encode_windows(self, text: str) -> list[EncodedText]:
        rows: list[EncodedText]
        [rows] = self.check_encoded(self.task.encode_rows([_parse_line(text, 0)], self.tokenizer, self.max_tokens))
        return rows

    def score_examples(self, examples: Sequence[AnswerExample]) -> Evaluation:
        convention: AnswerConvention = self.task.recipe.evaluation.answer_convention
        said = [found[0] for found in self._predict_answers(examples, None, 1)]
        texts = [answer.text for answer, _ in said]
        gold = [[answer.text for answer in one.answers] for one in examples]
        score = score_answers(texts, gold, convention)
        best = self.task.recipe.evaluation.select_by
        measure = is_exact_match if best == "exact" else answer_f1
        each = np.array(
            [
                max(float(measure(text, one, convention)) for one in select_gold_answers(right, convention))
                for text, right in zip(texts, gold, strict=True)
            ]
        )
        outputs = [
            json.dumps(
                {
                    "id": one.id,
                    "prediction": answer.text,
                    "start": answer.start,
                    "probability": share,
                    "target": right,
                },
                ensure_ascii=False,
            )
            for one, (answer, share), right in zip(examples, said, gold, strict=True)
        ]
        samples = [
            line
            for one, text, right in zip(examples[:NUM_SAMPLES], texts, gold, strict=False)
            for line in (f"  asked   {one.question}", f"  said    {text}", f"  wanted  {' | '.join(right)}")
        ]
        figures = {"exact": score.exact_match, "f1": score.f1, **self._score_upper_bound(examples, gold)}
        return Evaluation(
            {**figures, "convention": convention},
            best,
            lambda some: float(each[some].mean()),
            outputs,
            samples,
        )

    def _score_upper_bound(
        self, examples: Sequence[AnswerExample], gold: Sequence[Sequence[str]]
    ) -> dict[str, float]:
        """What a model would score that always found the right pieces: they may hold more than the answer.

        A Korean word with its particle, 서울에서, may be one piece, where the answer is 서울. An answer that
        is whole in no window is out of reach.
        """
        best = []
        for one in self.check_encoded(self.task.encode_questions(examples, self.tokenizer, self.max_tokens), None):
            span = one.answer_span
            if span and not any(begin <= span[0] and span[1] < end for begin, end in one.windows):
                span = None
            best.append(one.build_answer(*span).text if span else "")
        score = score_answers(best, gold, self.task.recipe.evaluation.answer_convention)
        return {"exact_reachable": score.exact_match, "f1_reachable": score.f1}

    def _predict_answers(
        self, questions: Sequence[AnswerExample], first_index: int | None, n_best: int
    ) -> Iterator[tuple[tuple[ContextSpan, float], ...]]:
        """The best answers to each question; ``first`` is the number of the first line."""
        encoded: list[EncodedQuestion] = self.check_encoded(
            self.task.encode_questions(questions, self.tokenizer, self.max_tokens), first_index
        )
        rows = [_build_row(one, part, self.tokenizer) for one in encoded for part in one.windows]
        said = iter(self.compute_outputs(rows, self.model.logits))
        numbered = iter(rows)
        for one in encoded:
            found: dict[ContextSpan, float] = {}
            absent = []  # how likely it is that the answer is not in each window
            for part in one.windows:
                starts, ends = (x.double().numpy() for x in next(said))
                allowed = np.array(next(numbered).annotations["answer_mask"])
                begin, end = (_masked_softmax(x[: len(allowed)], allowed) for x in (starts, ends))
                absent.append(float(begin[0] * end[0]))
                inside = slice(one.context_offset, one.context_offset + part.end - part.begin)
                for share, start, stop in self._find_best_spans(begin[inside], end[inside], n_best):
                    answer = one.build_answer(part.begin + start, part.begin + stop)
                    found[answer] = max(found.get(answer, 0.0), share)
            if not found or self.task.recipe.data.has_unanswerable:
                found[ContextSpan("", 0)] = min(absent)  # it must be in none of the windows
            order = sorted(found.items(), key=lambda pair: -pair[1])
            yield tuple(order[:n_best])

    def _find_best_spans(
        self, start_probabilities: NDArray[np.float64], end_probabilities: NDArray[np.float64], n_best: int
    ) -> list[tuple[float, int, int]]:
        """The likeliest spans of one window: how likely, the first piece, the last one."""
        longest = self.task.recipe.decode.max_answer_tokens
        if not len(start_probabilities):
            return []
        if n_best > 1:
            starts, stops = (
                np.argsort(-x, kind="stable")[:MAX_CANDIDATES].tolist()
                for x in (start_probabilities, end_probabilities)
            )
            spans = [
                (float(start_probabilities[i] * end_probabilities[j]), i, j)
                for i in starts
                for j in stops
                if i <= j < i + longest
            ]
            if spans:
                return spans
        together = np.triu(start_probabilities[:, None] * end_probabilities)  # (first, last)
        together[np.tri(len(start_probabilities), len(start_probabilities), -1, dtype=bool)] = -1
        if len(start_probabilities) > longest:
            together[
                ~np.tri(len(start_probabilities), len(start_probabilities), longest - 1, dtype=bool)
            ] = -1
        first, last = np.unravel_index(int(together.argmax()), together.shape)
        return [(float(together[first, last]), int(first), int(last))]


def _masked_softmax(logits: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Probabilities over the allowed places."""
    raised = np.where(mask, np.exp(logits - logits[mask].max()), 0.0)
    shares: NDArray[np.float64] = raised / raised.sum()
    return shares


def _parse_line(line: str, index: int) -> AnswerExample:
    """A question and its text."""
    if line.lstrip().startswith("{"):
        try:
            told = json.loads(line)
        except ValueError as error:
            raise InputError(f"line {index + 1} begins as JSON and is none: {error}") from None
        question, context = told.get("question"), told.get("context")
        if not isinstance(question, str) or not isinstance(context, str):
            raise InputError(f'line {index + 1} lacks "question" and "context", two texts')
    else:
        question, tab, context = line.partition("\t")
        if not tab:
            question, bars, context = line.partition("|||")
            context = context.strip()
            if not bars:
                raise InputError(
                    f"line {index + 1} has no tab; expected is question<TAB>text, question ||| text, or "
                    "JSON: question and context"
                )
    return _build_question(question, context)


def _build_question(question: str, context: str) -> AnswerExample:
    return AnswerExample(question.strip(), context, (), "", "", "")


Recipe = AnswerRecipe
Options = NBestOptions
