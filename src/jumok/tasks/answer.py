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

from jumok.annotated import Spanned
from jumok.data import questions
from jumok.data.examples import Row
from jumok.data.formats import Flaw
from jumok.data.questions import Answer, Question, pieces_of, text_of
from jumok.data.segmentation import grapheme_boundaries
from jumok.data.windows import Window, windows
from jumok.data.wordpiece import Pieces, WordPieceConfig, WordPieces
from jumok.errors import InputError
from jumok.metrics.answers import Convention, answer_score, gold_answers, is_exact, overlap
from jumok.models.bert import BertConfig, Spans
from jumok.run import Run
from jumok.tasks import fine_tuning, verdicts
from jumok.tasks.fine_tuning import TOO_LONG, BertUse, From, LabelledData, Named, Search
from jumok.tasks.objects import of_questions as objects_of
from jumok.tasks.reader import BertReader, Prediction
from jumok.tasks.verdicts import Judgement
from jumok.training import Settings, Summary

__all__ = ["Recipe", "Search", "compare", "evaluate", "load", "objects_of", "train"]

AT_ONCE = 256  # questions that are tokenised together
CANDIDATES = 20  # of beginnings, and of ends, in each window, where several answers are asked for
SHOWN = 3  # sample answers a validation


@dataclass(frozen=True)
class DataConfig(LabelledData):
    """The ``data:`` section. What is held out is whole articles."""

    unanswerable: bool = False  # some questions have no answer, as in SQuAD 2.0


@dataclass(frozen=True)
class DecodeConfig:
    """The ``decode:`` section."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    longest: int = 30  # pieces of an answer

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError(f"longest={self.longest}: 1 or more is expected")


@dataclass(frozen=True)
class ScoreConfig:
    """The ``score:`` section: whose script's way of counting, and which figure decides."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    answers: Convention = "squad"
    best: Literal["f1", "exact"] = "f1"


@dataclass(frozen=True)
class Recipe:
    """Everything that an answering run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["answer"]
    data: DataConfig
    # A run or a Hugging Face folder; null: new weights, and a vocabulary learned from the data.
    from_: From = None
    scratch: bool = False  # take over sizes and vocabulary only: new weights, to compare with
    model: BertConfig = field(default_factory=BertConfig)  # with ``from``, only its dropouts count
    text: WordPieceConfig = field(default_factory=WordPieceConfig)
    train: Settings = field(default_factory=Settings)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)


def train(run: Run, console: Console) -> Summary:
    """Train the model of a run, or go on with it."""
    return fine_tuning.train(AnswerUse(run), console)


def load(run: Run, device: str = "auto") -> AnswerReader:
    """The trained model of a run, ready to answer."""
    use = AnswerUse(run)
    return AnswerReader(use, *fine_tuning.load_model(use, device))


def evaluate(predictor: AnswerReader, split: str, search: Search, console: Console) -> Judgement:
    """Score a run, and keep what it said."""
    return verdicts.evaluate(predictor, split, console)


def compare(
    runs: Sequence[Run], split: str, search: Search, out: Path, device: str, console: Console
) -> None:
    """Runs on the same data."""
    verdicts.compare(runs, load, split, out, device, console)


# ------------------------------------------------------------------------------------------------- the use


@dataclass(frozen=True)
class Asked:
    """A question and its text as a model reads them, in windows of the text."""

    question: Question
    ids: list[int]  # of the question
    text: Pieces
    parts: list[Window]

    @property
    def before(self) -> int:
        """How many tokens there are before the text: [CLS], the question, [SEP]."""
        return len(self.ids) + 2

    @functools.cached_property
    def span(self) -> tuple[int, int] | None:
        """The first and the last piece of the first answer, if there is one in the text."""
        if not self.question.answers:
            return None
        answer = self.question.answers[0]
        return pieces_of((answer.start, answer.end), self.text.spans)

    @functools.cached_property
    def boundaries(self) -> Sequence[int]:
        """Of the graphemes of the text."""
        return grapheme_boundaries(self.question.context)

    def answer(self, first: int, last: int) -> Answer:
        """From one piece of the text to another, both included."""
        return text_of(self.question.context, self.text.spans, first, last, self.boundaries)


class AnswerUse(BertUse[Question]):
    """Answers in texts, for one run."""

    does = "answer a question about a text"
    kind = Question
    batch = Spanned

    @property
    def example(self) -> str:
        return "question ||| text"

    def read(self, named: Named, split: str) -> Iterator[Question | Flaw]:
        return questions.read(named, unanswerable=self.recipe.data.unanswerable, split=split)

    def key(self, example: Question) -> str:
        return example.article

    def texts(self, example: Question) -> Iterable[str]:
        return [example.question, example.context]

    def settle(self, examples: Sequence[Question]) -> list[str]:
        return []

    def head(self, config: BertConfig, vocabulary: int) -> nn.Module:
        return Spans(config, vocabulary)

    def rows(
        self, examples: Iterable[Question], pieces: WordPieces, longest: int
    ) -> Iterator[list[Row] | Flaw]:
        for one in self.asked(examples, pieces, longest):
            yield one if isinstance(one, Flaw) else [_row(one, part, pieces) for part in one.parts]

    def asked(self, examples: Iterable[Question], pieces: WordPieces, longest: int) -> Iterator[Asked | Flaw]:
        """Questions with the windows of their texts."""
        examples = iter(examples)
        while some := list(itertools.islice(examples, AT_ONCE)):
            ids = pieces.encode([one.question for one in some])
            contexts = list(dict.fromkeys(one.context for one in some))  # several ask about the same one
            texts = dict(zip(contexts, pieces.located_all(contexts), strict=True))
            for one, question in zip(some, ids, strict=True):
                yield self._windows(one, question, texts[one.context], longest)

    def _windows(self, one: Question, question: list[int], text: Pieces, longest: int) -> Asked | Flaw:
        room = longest - 3 - len(question)
        if room < min(len(text.ids), longest // 4):
            told = f"{len(question)} tokens, and {longest} are read at once, with the text"
            return Flaw(one.where, "a question that is too long", told)
        if len(text.ids) > room and self.recipe.data.long == "refuse":
            told = f"{len(text.ids)} tokens, and {room} are read at once; {TOO_LONG}"
            return Flaw(one.where, "a text that is too long", told)
        return Asked(one, question, text, windows(len(text.ids), max(room, 1), self.recipe.data.stride))

    def predictor(self, model: nn.Module, pieces: WordPieces) -> AnswerReader:
        return AnswerReader(self, model, pieces)


def _row(asked: Asked, part: Window, pieces: WordPieces) -> Row:
    """One window; the answer is the first that was given, or [CLS] if not all of it is there."""
    ids, segments = pieces.joined(asked.ids, asked.text.ids[part.begin : part.end])
    allowed = [True, *[False] * (asked.before - 1), *[True] * (part.end - part.begin), False]
    start = end = 0
    if asked.span is not None and part.begin <= asked.span[0] and asked.span[1] < part.end:
        start, end = (asked.before + place - part.begin for place in asked.span)
    return Row(ids, segments, {"allowed": allowed, "starts": start, "ends": end})


# ------------------------------------------------------------------------------------------------- at work


@dataclass(frozen=True)
class Answered(Prediction):
    """The likeliest answers to a question with their probabilities, the best first; "": there is none."""

    question: str = ""
    context: str = ""
    answers: tuple[tuple[Answer, float], ...] = ()

    @property
    def answer(self) -> Answer:
        return self.answers[0][0]

    def written(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        if as_json:
            told = [
                {"text": one.text, "begin": one.start, "end": one.end, "probability": share}
                for one, share in self.answers
            ]
            known = {"line": self.number, "question": self.question, **told[0]}
            yield json.dumps(known | ({"others": told[1:]} if n_best else {}), ensure_ascii=False)
            return
        for one, share in self.answers if n_best else self.answers[:1]:
            number = f"{self.number} ||| " if n_best else ""
            between = " ||| " if n_best else "\t"
            text = " ".join(one.text.split()) or "(no answer)"  # a line stays a line
            yield number + between.join([text, f"{one.start}-{one.end}", f"{share:.4f}"])


class AnswerReader(BertReader):
    """A model that answers questions about texts.

    >>> reader = jumok.load("runs/bert-xquad-en")  # doctest: +SKIP
    >>> reader.answer("Where is Seoul?", "Seoul is the capital of Korea.").answer  # doctest: +SKIP
    Answer(text='Korea', start=24)
    """

    def answer(self, question: str, context: str, n_best: int = 1) -> Answered:
        """One question; many of them by :meth:`predict`."""
        return next(self.answers([(question, context)], n_best))

    def answers(self, asked: Sequence[tuple[str, str]], n_best: int = 1) -> Iterator[Answered]:
        """The same for many questions, each with its text, in their order."""
        questions = [_question(*both) for both in asked]
        for number, ((question, context), found) in enumerate(
            zip(asked, self._answers(questions, 0, n_best), strict=True)
        ):
            yield Answered(number, f"{question}\t{context}", question, context, found)

    def length(self, question: str, context: str) -> int:
        """How many tokens the model reads of both; what is too long is an error."""
        [rows] = self.encoded(self.encode([_question(question, context)]))
        return sum(len(row.ids) for row in rows)

    def predict(
        self, lines: Iterable[str], search: Search, *, align: bool = False, first: int = 0
    ) -> Iterator[Answered]:
        """An answer for every line: ``question<TAB>text``, or a JSON object with question and context."""
        numbered = enumerate(lines, first)
        while window := list(itertools.islice(numbered, AT_ONCE)):
            asked = [_of_line(line, number) for number, line in window]
            found = self._answers(asked, window[0][0], search.n_best)
            for (number, line), one, answers in zip(window, asked, found, strict=True):
                yield Answered(number, line, one.question, one.context, answers)

    def windows(self, text: str) -> list[Row]:
        rows: list[Row]
        [rows] = self.encoded(self.use.rows([_of_line(text, 0)], self.tokenizer, self.longest))
        return rows

    def judge(self, examples: Sequence[Question]) -> Judgement:
        convention: Convention = self.use.recipe.score.answers
        said = [found[0] for found in self._answers(examples, None, 1)]
        texts = [answer.text for answer, _ in said]
        gold = [[answer.text for answer in one.answers] for one in examples]
        score = answer_score(texts, gold, convention)
        best = self.use.recipe.score.best
        measure = is_exact if best == "exact" else overlap
        each = np.array(
            [
                max(float(measure(text, one, convention)) for one in gold_answers(right, convention))
                for text, right in zip(texts, gold, strict=True)
            ]
        )
        outputs = [
            json.dumps(
                {
                    "id": one.id,
                    "said": answer.text,
                    "begin": answer.start,
                    "probability": share,
                    "wanted": right,
                },
                ensure_ascii=False,
            )
            for one, (answer, share), right in zip(examples, said, gold, strict=True)
        ]
        samples = [
            line
            for one, text, right in zip(examples[:SHOWN], texts, gold, strict=False)
            for line in (f"  asked   {one.question}", f"  said    {text}", f"  wanted  {' | '.join(right)}")
        ]
        figures = {"exact": score.exact, "f1": score.f1, **self._reachable(examples, gold)}
        return Judgement(
            {**figures, "convention": convention},
            best,
            lambda some: float(each[some].mean()),
            outputs,
            samples,
        )

    def _reachable(self, examples: Sequence[Question], gold: Sequence[Sequence[str]]) -> dict[str, float]:
        """What a model would score that always found the right pieces: they may hold more than the answer.

        A Korean word with its particle, 서울에서, may be one piece, where the answer is 서울. An answer that
        is whole in no window is out of reach.
        """
        best = []
        for one in self.encoded(self.use.asked(examples, self.tokenizer, self.longest), None):
            span = one.span
            if span and not any(begin <= span[0] and span[1] < end for begin, end in one.parts):
                span = None
            best.append(one.answer(*span).text if span else "")
        score = answer_score(best, gold, self.use.recipe.score.answers)
        return {"exact_reachable": score.exact, "f1_reachable": score.f1}

    def _answers(
        self, asked: Sequence[Question], first: int | None, n_best: int
    ) -> Iterator[tuple[tuple[Answer, float], ...]]:
        """The best answers to each question; ``first`` is the number of the first line."""
        encoded: list[Asked] = self.encoded(self.use.asked(asked, self.tokenizer, self.longest), first)
        rows = [_row(one, part, self.tokenizer) for one in encoded for part in one.parts]
        said = iter(self.outputs(rows, self.model.logits))
        numbered = iter(rows)
        for one in encoded:
            found: dict[Answer, float] = {}
            absent = []  # how likely it is that the answer is not in each window
            for part in one.parts:
                starts, ends = (x.double().numpy() for x in next(said))
                allowed = np.array(next(numbered).marks["allowed"])
                begin, end = (_shares(x[: len(allowed)], allowed) for x in (starts, ends))
                absent.append(float(begin[0] * end[0]))
                inside = slice(one.before, one.before + part.end - part.begin)
                for share, start, stop in self._spans(begin[inside], end[inside], n_best):
                    answer = one.answer(part.begin + start, part.begin + stop)
                    found[answer] = max(found.get(answer, 0.0), share)
            if not found or self.use.recipe.data.unanswerable:
                found[Answer("", 0)] = min(absent)  # it must be in none of the windows
            order = sorted(found.items(), key=lambda pair: -pair[1])
            yield tuple(order[:n_best])

    def _spans(
        self, begin: NDArray[np.float64], end: NDArray[np.float64], n_best: int
    ) -> list[tuple[float, int, int]]:
        """The likeliest spans of one window: how likely, the first piece, the last one."""
        longest = self.use.recipe.decode.longest
        if not len(begin):
            return []
        if n_best > 1:
            starts, stops = (np.argsort(-x, kind="stable")[:CANDIDATES].tolist() for x in (begin, end))
            spans = [(float(begin[i] * end[j]), i, j) for i in starts for j in stops if i <= j < i + longest]
            if spans:
                return spans
        together = np.triu(begin[:, None] * end)  # (first, last)
        together[np.tri(len(begin), len(begin), -1, dtype=bool)] = -1
        if len(begin) > longest:
            together[~np.tri(len(begin), len(begin), longest - 1, dtype=bool)] = -1
        first, last = np.unravel_index(int(together.argmax()), together.shape)
        return [(float(together[first, last]), int(first), int(last))]


def _shares(logits: NDArray[np.float64], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Probabilities over the allowed places."""
    raised = np.where(allowed, np.exp(logits - logits[allowed].max()), 0.0)
    shares: NDArray[np.float64] = raised / raised.sum()
    return shares


def _of_line(line: str, number: int) -> Question:
    """A question and its text."""
    if line.lstrip().startswith("{"):
        try:
            told = json.loads(line)
        except ValueError as error:
            raise InputError(f"line {number + 1} begins as JSON and is none: {error}") from None
        question, context = told.get("question"), told.get("context")
        if not isinstance(question, str) or not isinstance(context, str):
            raise InputError(f'line {number + 1} lacks "question" and "context", two texts')
    else:
        question, tab, context = line.partition("\t")
        if not tab:
            question, bars, context = line.partition("|||")
            context = context.strip()
            if not bars:
                raise InputError(
                    f"line {number + 1} has no tab; expected is question<TAB>text, question ||| text, or "
                    "JSON: question and context"
                )
    return _question(question, context)


def _question(question: str, context: str) -> Question:
    return Question(question.strip(), context, (), "", "", "")
