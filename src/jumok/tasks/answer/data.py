"""Encoding of questions with their contexts, in windows of the context."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jumok.data.batching.texts import EncodedText
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.squad import AnswerExample, ContextSpan, extract_answer, find_piece_span
from jumok.data.tokenizers.segmentation import find_grapheme_boundaries
from jumok.data.tokenizers.windows import TokenWindow, make_windows
from jumok.data.tokenizers.wordpiece import WordPieceEncoding, WordPieceTokenizer
from jumok.errors import InputError
from jumok.inference.line_io import iterate_chunks
from jumok.tasks.answer.config import AnswerDataConfig
from jumok.tasks.fine_tuning import TOO_LONG_HINT

QUESTIONS_PER_CHUNK = 256  # questions that are tokenized together


@dataclass(frozen=True)
class EncodedQuestion:
    """A question and its context as the model reads them, in windows of the context."""

    question: AnswerExample
    question_ids: list[int]
    context_pieces: WordPieceEncoding
    windows: list[TokenWindow]

    @property
    def context_offset(self) -> int:
        """The number of tokens before the context: [CLS], the question, [SEP]."""
        return len(self.question_ids) + 2

    @functools.cached_property
    def answer_span(self) -> tuple[int, int] | None:
        """The first and the last piece of the first answer, if the context contains it."""
        if not self.question.answers:
            return None
        answer = self.question.answers[0]
        return find_piece_span((answer.start, answer.end), self.context_pieces.offsets)

    @functools.cached_property
    def _grapheme_boundaries(self) -> Sequence[int]:
        return find_grapheme_boundaries(self.question.context)

    def build_answer(self, first_piece: int, last_piece: int) -> ContextSpan:
        """The text from one piece of the context to another, inclusive."""
        return extract_answer(
            self.question.context, self.context_pieces.offsets, first_piece, last_piece, self._grapheme_boundaries
        )


def encode_questions(
    examples: Iterable[AnswerExample], tokenizer: WordPieceTokenizer, max_tokens: int, config: AnswerDataConfig
) -> Iterator[EncodedQuestion | InvalidExample]:
    """Encode questions with the windows of their contexts."""
    for chunk in iterate_chunks(examples, QUESTIONS_PER_CHUNK):
        ids = tokenizer.encode([example.question for example in chunk])
        contexts = list(dict.fromkeys(example.context for example in chunk))  # several may share one
        pieces = dict(zip(contexts, tokenizer.encode_with_offsets(contexts), strict=True))
        for example, question_ids in zip(chunk, ids, strict=True):
            yield _encode_question(example, question_ids, pieces[example.context], max_tokens, config)


def _encode_question(
    example: AnswerExample,
    question_ids: list[int],
    context_pieces: WordPieceEncoding,
    max_tokens: int,
    config: AnswerDataConfig,
) -> EncodedQuestion | InvalidExample:
    num_pieces = len(context_pieces.ids)
    window_size = max_tokens - 3 - len(question_ids)
    if window_size < min(num_pieces, max_tokens // 4):
        message = f"{len(question_ids)} tokens, and the model reads {max_tokens} at once, with the context"
        return InvalidExample(example.location, "a question that is too long", message)
    if num_pieces > window_size and config.on_overflow == "error":
        message = f"{num_pieces} tokens, and the model reads {window_size} at once; {TOO_LONG_HINT}"
        return InvalidExample(example.location, "a text that is too long", message)
    windows = make_windows(num_pieces, max(window_size, 1), config.window_stride)
    return EncodedQuestion(example, question_ids, context_pieces, windows)


def build_row(question: EncodedQuestion, window: TokenWindow, tokenizer: WordPieceTokenizer) -> EncodedText:
    """Encode one window. The target is the first answer, or [CLS] if the window does not contain all of it."""
    first, end = window
    offset = question.context_offset
    ids, segments = tokenizer.join_segments(question.question_ids, question.context_pieces.ids[first:end])
    allowed = [True, *[False] * (offset - 1), *[True] * (end - first), False]
    start_target = end_target = 0
    span = question.answer_span
    if span is not None and first <= span[0] and span[1] < end:
        start_target, end_target = (offset + piece - first for piece in span)
    return EncodedText(ids, segments, {"answer_mask": allowed, "starts": start_target, "ends": end_target})


def parse_line(line: str, index: int) -> AnswerExample:
    """Parse an input line: ``question<TAB>context``, ``question ||| context``, or JSON."""
    if line.lstrip().startswith("{"):
        try:
            content = json.loads(line)
        except ValueError as error:
            raise InputError(f"line {index + 1} starts like JSON, but is not JSON: {error}") from None
        question, context = content.get("question"), content.get("context")
        if not isinstance(question, str) or not isinstance(context, str):
            raise InputError(f'line {index + 1} needs the texts "question" and "context"')
        return build_question(question, context)
    question, tab, context = line.partition("\t")
    if not tab:
        question, separator, context = line.partition("|||")
        context = context.strip()
        if not separator:
            raise InputError(
                f"line {index + 1} has no tab; expected is question<TAB>text, question ||| text, or JSON with "
                "question and context"
            )
    return build_question(question, context)


def build_question(question: str, context: str) -> AnswerExample:
    """A question without gold answers."""
    return AnswerExample(question.strip(), context, (), "", "", "")
