"""Words in all scripts: marks stay with their letters. English and Korean are split as by simpler patterns."""

from __future__ import annotations

import re
from unicodedata import normalize

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from jumok.data.tokenizers import spelling
from jumok.data.tokenizers.segmentation import WORD_REGEX, find_grapheme_boundaries
from jumok.data.tokenizers.vocabulary import SPACE
from jumok.data.tokenizers.vocabulary import WORD_PATTERN as VOCABULARY_WORD
from jumok.data.tokenizers.word_tokenizer import WordTokenizer, WordTokenizerConfig, segment_text
from jumok.tasks.tag.data import WORD_PATTERN

# Each case is written with | between its words.
CASES = {
    "English": "It's| |well-made|:| |3.5| |km|.",
    "Korean": "나는| |영화를| |봤다|.| |ㅋㅋㅋ",
    "Hindi": "हिन्दी| |भाषा|,",
    "Arabic with vowels": "اَلْعَرَبِيَّةُ| |لُغَةٌ",
    "Persian, with a joiner": "می\u200cخواهم",
    "decomposed": "cafe\u0301| |na\u0308ive-e\u0301| |" + normalize("NFD", "나는"),
    "emoji": "👩\u200d👩\u200d👧| |👍🏽| |🇰🇷|🇫🇷| |❤️\u200d🔥|!| |1️⃣",
    "a flag of tags": "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f|a",
    "Chinese": "我|爱|北|京|。",
    "Japanese": "東|京|タワー|へ|行|っ|た| |らー|め|ん",
    "Thai": "ส|วั|ส|ดี| |น้ำ",
    "Khmer, with a stacked consonant": "ខ្មែ|រ",
    "Myanmar": "မြ|န်|မာ",
    "Lao": "ລ|າ|ວ",
    "a mark alone": "\u0301| |a",
}
# Simpler patterns, for text without marks and joiners.
SIMPLE_WORD = re.compile(r"\w+(?:[-'’]\w+|[.,]\d+)*|[^\w\s]")
SIMPLE_TAG_WORD = re.compile(r"(?:[^\W\d_]\.){2,}(?![\w-])|\w(?:[\w.'’&/-]*\w)?|[^\w\s]")
SIMPLE_VOCABULARY_WORD = rf"{SPACE}?(?:&\w+;\w*|\w+(?:[-'’]\w+|[.,]\d+)*|[^\w{SPACE}])|{SPACE}"
SIMPLE_TOKEN = re.compile(
    r"\.?\d+(?:[.,]\d+)*\w*"
    r"|(?:mr|mrs|ms|dr|hon|st|mme|mgr)\.|nos?\.(?=\s*\d)|(?:\b[a-z]\.)+"
    r"|'s\b|\baujourd'|\w+|-{2,}|\.{2,}|\S"
)
SIMPLE_TEXT = st.text(st.sampled_from("aZéß나ㅋᄀ09²½_-'’.,!?&;<>/€☺©\x1c \t\xa0\u3000タж"), max_size=25)


@pytest.mark.parametrize("name", CASES)
def test_words(name: str) -> None:
    words = [word for word in CASES[name].split("|") if word.strip()]
    text = CASES[name].replace("|", "")
    assert WORD_REGEX.findall(text) == words
    if "-" not in text:
        assert WORD_PATTERN.findall(text) == words


def pre_tokenize(pattern: str, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)]


@pytest.mark.parametrize("name", [name for name in CASES if name != "a mark alone"])
def test_vocabulary_pattern_matches_the_same_words(name: str) -> None:
    text = SPACE + CASES[name].replace("|", "").replace(" ", SPACE)
    pieces = pre_tokenize(VOCABULARY_WORD, text)
    assert "".join(pieces) == text
    assert [piece.removeprefix(SPACE) for piece in pieces] == [w for w in CASES[name].split("|") if w.strip()]


def test_word_tokenizer_has_one_token_per_word() -> None:
    text = "हिन्दी 👩\u200d👩\u200d👧 สวัสดี 東京 e\u0301"
    sentences = segment_text(text).sentences
    tokenizer = WordTokenizer.train([sentences] * 2, WordTokenizerConfig(vocab_size=100))
    [[ids]] = tokenizer.encode([sentences])
    assert [piece.removeprefix(SPACE) for piece in tokenizer.ids_to_tokens(ids)] == list(sentences[0])
    assert tokenizer.word_ids_from_words(sentences[0]) == list(range(len(sentences[0])))


@given(SIMPLE_TEXT)
def test_simple_text_is_split_as_by_simple_patterns(text: str) -> None:
    assert WORD_REGEX.findall(text) == SIMPLE_WORD.findall(text)
    assert WORD_PATTERN.findall(text) == SIMPLE_TAG_WORD.findall(text)
    line = text.replace(" ", SPACE)
    assert pre_tokenize(VOCABULARY_WORD, line) == pre_tokenize(SIMPLE_VOCABULARY_WORD, line)


@given(st.lists(st.sampled_from([*"ab0.,'-_ é漢나!\x1f", "mr.", "no.", "aujourd'", "'s"]), max_size=12))
def test_spelling_of_simple_text_is_split_as_by_a_simple_pattern(parts: list[str]) -> None:
    assert spelling.TOKEN_REGEX.findall("".join(parts)) == SIMPLE_TOKEN.findall("".join(parts))


def test_spelling_keeps_vowel_signs() -> None:
    assert len(spelling.normalize_spelling("भाषा और", "hi").split()) == 2


def test_grapheme_boundaries() -> None:
    assert find_grapheme_boundaries("서울 ab") == range(6)
    assert list(find_grapheme_boundaries(normalize("NFD", "나는") + "e\u0301👩\u200d👧x")) == [0, 2, 5, 7, 10, 11]


@given(st.text(alphabet="🇰🇷ax\u0301\u200d\u0903\u0600👩", max_size=12))
def test_grapheme_boundaries_equal_unicode_clusters(text: str) -> None:
    expected = [0, *(match.end() for match in regex.finditer(r"\X", text))]
    assert list(find_grapheme_boundaries(text)) == expected
