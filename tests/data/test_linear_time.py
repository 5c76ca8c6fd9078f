"""All that reads a user's text takes linear time: no run of characters stalls it."""

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

SECONDS = 120  # each case takes 6 at most at 1,000,000 characters, where a quadratic one takes hours


def unit(text: str) -> Callable[[int], str]:
    return lambda count: text * (count // len(text))


def between(first: str, text: str, last: str) -> Callable[[int], str]:
    return lambda count: first + text * (count // len(text)) + last


def words(text: str) -> object:
    tokenizer = Tokenizer.train(["the dog & cat"] * 3, TokenizerConfig("words", vocab_size=100))
    return tokenizer.encode([text])


def tagging_windows(text: str) -> object:
    parts = make_windows(len(text), max_length=100, stride=50)
    return [find_central_window(piece, parts) for piece in range(0, len(text), 10)]


CASES: list[tuple[str, Callable[[str], object], Callable[[int], str]]] = [
    ("points", split_sentences, unit(".")),
    ("points and brackets", split_sentences, between(".", ")", "x")),
    ("an open quote", split_sentences, between("「", "あ。", "")),
    ("Japanese without spaces", split_sentences, unit("あ。")),
    ("Korean without spaces", split_sentences, unit("다.가")),
    ("tabs for spaces", split_sentences, unit("X.\t")),
    ("initials", split_sentences, between("", "A.", " X")),
    ("spaces after a mark", split_sentences, between("a.", " ", "")),
    ("commas after a first word", split_sentences, between("A. The", ",", "x")),
    ("words", word_tokenizer.segment_text, unit("a-")),
    ("marks", word_tokenizer.segment_text, unit("\u0301")),
    ("joined emoji", word_tokenizer.segment_text, unit("👩\u200d")),
    ("open tags", lambda text: word_tokenizer.segment_text(text, strip_markup=True), unit("<a ")),
    ("a long reference", lambda text: word_tokenizer.segment_text(text, strip_markup=True), between("&#", "1", "")),
    ("words to tag", WORD_PATTERN.findall, between("a", ".", "")),
    ("initials to tag", WORD_PATTERN.findall, between("", "A.", "A")),
    ("two texts", split_pair, between("a", " ", "b")),
    ("spelled out", lambda text: spelling.normalize_spelling(text, "fr"), unit("no. ")),
    ("digits", SpeechSymbols(["a"], "en").encode, unit("1")),
    ("captions", captions.tokenize_caption, unit("-")),
    ("Moses, points", lambda text: moses.tokenize(text, "de"), unit(".")),
    ("Moses, abbreviations", lambda text: moses.tokenize(text, "en"), unit("a.a ")),
    ("an escaped sign without an end", words, between("&", "a", "")),
    ("windows", tagging_windows, unit("a")),
    ("graphemes", find_grapheme_boundaries, unit("e\u0301")),
    ("flags", find_grapheme_boundaries, unit("\U0001f1f0\U0001f1f7")),
]


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("read", "made"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_hundred_thousand_characters(read: Callable[[str], object], made: Callable[[int], str]) -> None:
    with limit(SECONDS // 10):
        read(made(100_000))


@pytest.mark.slow
@pytest.mark.parametrize(("read", "made"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_million_characters(read: Callable[[str], object], made: Callable[[int], str]) -> None:
    with limit(SECONDS):
        read(made(1_000_000))


def test_moses_swaps_points_and_quotes_as_before() -> None:
    pattern, replacement = re.compile(moses.QUADRATIC_POINTS), r'"\g<1>\g<2>'
    for text in ('a." b', '..."x', '."..."x', 'a.."', '."<', '." <b', "...", '.".".x'):
        assert moses.LINEAR_POINTS.sub(moses._move_quote_first, text) == pattern.sub(replacement, text)
    patterns = [pattern for pattern, _ in moses._get_tools("de").normalizer.substitutions]
    assert moses.LINEAR_POINTS in patterns  # sacremoses still has the rule that is replaced
