"""Everything that parses text of users takes linear time, for any run of characters."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from jumok.data.tokenizers import moses, spelling, word_tokenizer
from jumok.data.tokenizers.segmentation import find_grapheme_boundaries
from jumok.data.tokenizers.sentence_splitter import split_sentences
from jumok.data.tokenizers.speech_symbols import SpeechSymbols
from jumok.data.tokenizers.tokenizer import Tokenizer
from jumok.data.tokenizers.vocabulary import TokenizerConfig
from jumok.data.tokenizers.windows import find_central_window, make_windows
from jumok.metrics import captions
from jumok.tasks.jsonl_input import split_pair
from jumok.tasks.tag.data import WORD_PATTERN

SECONDS = 120  # each case takes 6 at most at 1,000,000 characters, quadratic time would take hours


def repeat(text: str) -> Callable[[int], str]:
    return lambda count: text * (count // len(text))


def repeat_between(first: str, text: str, last: str) -> Callable[[int], str]:
    return lambda count: first + text * (count // len(text)) + last


def encode_words(text: str) -> object:
    tokenizer = Tokenizer.train(["the dog & cat"] * 3, TokenizerConfig("words", vocab_size=100))
    return tokenizer.encode([text])


def find_windows(text: str) -> object:
    windows = make_windows(len(text), max_length=100, stride=50)
    return [find_central_window(piece, windows) for piece in range(0, len(text), 10)]


CASES: list[tuple[str, Callable[[str], object], Callable[[int], str]]] = [
    ("periods", split_sentences, repeat(".")),
    ("periods and brackets", split_sentences, repeat_between(".", ")", "x")),
    ("an open quote", split_sentences, repeat_between("「", "あ。", "")),
    ("Japanese without spaces", split_sentences, repeat("あ。")),
    ("Korean without spaces", split_sentences, repeat("다.가")),
    ("tabs", split_sentences, repeat("X.\t")),
    ("initials", split_sentences, repeat_between("", "A.", " X")),
    ("spaces after a mark", split_sentences, repeat_between("a.", " ", "")),
    ("commas after a first word", split_sentences, repeat_between("A. The", ",", "x")),
    ("words", word_tokenizer.segment_text, repeat("a-")),
    ("marks", word_tokenizer.segment_text, repeat("\u0301")),
    ("emoji sequences", word_tokenizer.segment_text, repeat("👩\u200d")),
    ("unclosed tags", lambda text: word_tokenizer.segment_text(text, strip_markup=True), repeat("<a ")),
    (
        "a long reference",
        lambda text: word_tokenizer.segment_text(text, strip_markup=True),
        repeat_between("&#", "1", ""),
    ),
    ("words of tagging", WORD_PATTERN.findall, repeat_between("a", ".", "")),
    ("initials of tagging", WORD_PATTERN.findall, repeat_between("", "A.", "A")),
    ("two texts", split_pair, repeat_between("a", " ", "b")),
    ("spelling", lambda text: spelling.normalize_spelling(text, "fr"), repeat("no. ")),
    ("digits", SpeechSymbols(("a",), "en").encode, repeat("1")),
    ("captions", captions.tokenize_caption, repeat("-")),
    ("Moses, periods", lambda text: moses.tokenize(text, "de"), repeat(".")),
    ("Moses, abbreviations", lambda text: moses.tokenize(text, "en"), repeat("a.a ")),
    ("an escape without an end", encode_words, repeat_between("&", "a", "")),
    ("windows", find_windows, repeat("a")),
    ("graphemes", find_grapheme_boundaries, repeat("e\u0301")),
    ("flags", find_grapheme_boundaries, repeat("\U0001f1f0\U0001f1f7")),
]


@contextmanager
def limit_seconds(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("parse", "make_text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_hundred_thousand_characters(parse: Callable[[str], object], make_text: Callable[[int], str]) -> None:
    with limit_seconds(SECONDS // 10):
        parse(make_text(100_000))


@pytest.mark.slow
@pytest.mark.parametrize(("parse", "make_text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_million_characters(parse: Callable[[str], object], make_text: Callable[[int], str]) -> None:
    with limit_seconds(SECONDS):
        parse(make_text(1_000_000))


def test_moses_moves_quotes_as_the_replaced_pattern() -> None:
    pattern, replacement = re.compile(moses.QUADRATIC_POINTS), r'"\g<1>\g<2>'
    for text in ('a." b', '..."x', '."..."x', 'a.."', '."<', '." <b', "...", '.".".x'):
        assert moses.LINEAR_POINTS.sub(moses._move_quote_first, text) == pattern.sub(replacement, text)
    patterns = [pattern for pattern, _ in moses._get_tools("de").normalizer.substitutions]
    assert moses.LINEAR_POINTS in patterns  # the pattern to replace was found
