"""All that reads a user's text takes linear time: no run of characters stalls it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from jumok.data import moses, spelled, worded
from jumok.data.segmentation import grapheme_boundaries
from jumok.data.sentences import sentences
from jumok.data.spoken import Symbols
from jumok.data.text import TextConfig, Tokenizer
from jumok.data.windows import central, windows
from jumok.metrics import captions
from jumok.tasks import filler, tag

SECONDS = 120  # each case takes 6 at most at 1,000,000 characters, where a quadratic one takes hours


def unit(text: str) -> Callable[[int], str]:
    return lambda count: text * (count // len(text))


def between(first: str, text: str, last: str) -> Callable[[int], str]:
    return lambda count: first + text * (count // len(text)) + last


def words(text: str) -> object:
    tokenizer = Tokenizer.train(["the dog & cat"] * 3, TextConfig("words", size=100))
    return tokenizer.encode([text])


def tagging_windows(text: str) -> object:
    parts = windows(len(text), room=100, stride=50)
    return [central(piece, parts) for piece in range(0, len(text), 10)]


CASES: list[tuple[str, Callable[[str], object], Callable[[int], str]]] = [
    ("points", sentences, unit(".")),
    ("points and brackets", sentences, between(".", ")", "x")),
    ("an open quote", sentences, between("「", "あ。", "")),
    ("Japanese without spaces", sentences, unit("あ。")),
    ("Korean without spaces", sentences, unit("다.가")),
    ("tabs for spaces", sentences, unit("X.\t")),
    ("initials", sentences, between("", "A.", " X")),
    ("spaces after a mark", sentences, between("a.", " ", "")),
    ("commas after a first word", sentences, between("A. The", ",", "x")),
    ("words", worded.written, unit("a-")),
    ("marks", worded.written, unit("\u0301")),
    ("joined emoji", worded.written, unit("👩\u200d")),
    ("open tags", lambda text: worded.written(text, markup=True), unit("<a ")),
    ("a long reference", lambda text: worded.written(text, markup=True), between("&#", "1", "")),
    ("words to tag", tag.WORD.findall, between("a", ".", "")),
    ("initials to tag", tag.WORD.findall, between("", "A.", "A")),
    ("two texts", filler._texts, between("a", " ", "b")),
    ("spelled out", lambda text: spelled.prepare(text, "fr"), unit("no. ")),
    ("digits", Symbols(["a"], "en").encode, unit("1")),
    ("captions", captions.words, unit("-")),
    ("Moses, points", lambda text: moses.prepare(text, "de"), unit(".")),
    ("Moses, abbreviations", lambda text: moses.prepare(text, "en"), unit("a.a ")),
    ("an escaped sign without an end", words, between("&", "a", "")),
    ("windows", tagging_windows, unit("a")),
    ("graphemes", grapheme_boundaries, unit("e\u0301")),
    ("flags", grapheme_boundaries, unit("\U0001f1f0\U0001f1f7")),
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
    pattern, replacement = re.compile(moses.POINTS), r'"\g<1>\g<2>'
    for text in ('a." b', '..."x', '."..."x', 'a.."', '."<', '." <b', "...", '.".".x'):
        assert moses.LINEAR_POINTS.sub(moses._quote_first, text) == pattern.sub(replacement, text)
    patterns = [pattern for pattern, _ in moses._tools("de").normalizer.substitutions]
    assert moses.LINEAR_POINTS in patterns  # sacremoses still has the rule that is replaced
