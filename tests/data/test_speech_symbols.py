"""Symbols of speech models: jamo, number words, saving."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.batches.tokens import EOS, SPECIAL_TOKENS, UNK
from jumok.data.tokenizers.speech_symbols import SpeechSymbols, compose_hangul, decompose_hangul, expand_numbers
from jumok.errors import InputError


def test_hangul_is_decomposed_and_composed() -> None:
    assert [unicodedata.name(jamo).removeprefix("HANGUL ") for jamo in decompose_hangul("친구와")] == [
        *("CHOSEONG CHIEUCH", "JUNGSEONG I", "JONGSEONG NIEUN"),
        *("CHOSEONG KIYEOK", "JUNGSEONG U"),
        *("CHOSEONG IEUNG", "JUNGSEONG WA"),
    ]
    assert compose_hangul(decompose_hangul("친구와")) == "친구와"
    symbols = SpeechSymbols.from_texts(["친구와"])
    assert len(symbols.encode("친구와")) == 7 + 1
    assert symbols.decode(symbols.encode("친구와")) == "친구와"
    # Initial and final consonants are different symbols, which also form other syllables.
    assert symbols.decode(symbols.encode("친와")) == "친와"
    assert symbols.unknown_characters("나") == [*decompose_hangul("나")]


def test_normalize_and_encode() -> None:
    symbols = SpeechSymbols.from_texts(["it's a café."])
    assert symbols.normalize("  It’s a\n CAFE\u0301. ") == "it's a café."
    assert symbols.encode("It’s") == symbols.encode("it's")
    assert symbols.encode("it's")[-1] == EOS
    assert symbols.vocab_size == len(SPECIAL_TOKENS) + len(set("it's a café."))
    assert symbols.encode("xi")[0] == UNK
    assert symbols.decode(symbols.encode("xi")) == "�i"
    assert symbols.decode([*symbols.encode("it"), *symbols.encode("café")]) == "it"  # up to </s>


@pytest.mark.parametrize(
    ("text", "english", "korean"),
    [
        ("0", "zero", "영"),
        ("7", "seven", "칠"),
        ("10", "ten", "십"),
        ("19", "nineteen", "십구"),
        ("42", "forty two", "사십이"),
        ("100", "one hundred", "백"),
        ("115", "one hundred fifteen", "백십오"),
        ("2,026", "two thousand twenty six", "이천이십육"),
        ("10000", "ten thousand", "만"),
        ("10001", "ten thousand one", "만일"),
        ("110000", "one hundred ten thousand", "십일만"),
        (
            "123456789",
            "one hundred twenty three million four hundred fifty six thousand seven hundred eighty nine",
            "일억이천삼백사십오만육천칠백팔십구",
        ),
        ("100010000", "one hundred million ten thousand", "일억일만"),
        ("3.14", "three point one four", "삼점일사"),
        ("007", "zero zero seven", "영영칠"),
        ("1" * 16, " ".join(["one"] * 16), "일" * 16),
        ("no number", "no number", "no number"),
    ],
)
def test_expand_numbers(text: str, english: str, korean: str) -> None:
    assert expand_numbers(text, "en") == english
    assert expand_numbers(text, "ko") == korean


def test_numbers_in_sentences() -> None:
    assert expand_numbers("the 1st, 22nd, 30th and 112th", "en") == (
        "the first, twenty second, thirtieth and one hundred twelfth"
    )
    assert expand_numbers("a4 and mp3s", "en") == "a four and mp three s"
    assert expand_numbers("3월 15일에", "ko") == "삼월 십오일에"
    assert SpeechSymbols.from_texts(["x"]).normalize("room 42") == "room 42"
    assert SpeechSymbols.from_texts(["x"], number_language="en").normalize("room 42") == "room forty two"


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs", "Co")), max_size=40))
def test_known_characters_are_restored(text: str) -> None:
    symbols = SpeechSymbols.from_texts(["a", text])
    assert UNK not in symbols.encode(text)
    normalized = unicodedata.normalize("NFC", symbols.normalize(text))
    assert symbols.decode(symbols.encode(text)) == normalized


def test_save_and_load(tmp_path: Path) -> None:
    symbols = SpeechSymbols.from_texts(['친구 "a" 7'], number_language="ko")
    symbols.save(tmp_path)
    assert SpeechSymbols.load(tmp_path) == symbols
    (tmp_path / "symbols.json").write_text("{}")
    with pytest.raises(InputError, match=r"symbols.json is damaged"):
        SpeechSymbols.load(tmp_path)
    with pytest.raises(InputError, match=r"symbols.json cannot be read"):
        SpeechSymbols.load(tmp_path / "none")


def test_invalid_arguments_are_errors() -> None:
    with pytest.raises(InputError, match="no text"):
        SpeechSymbols.from_texts([" ", ""])
    with pytest.raises(InputError, match="en or ko"):
        SpeechSymbols.from_texts(["a"], number_language="fr")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a symbol id is 99"):
        SpeechSymbols.from_texts(["a"]).decode([99])
