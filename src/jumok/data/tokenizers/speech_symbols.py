"""Text as it is spoken: the symbols that a voice is given, one a character, and numbers read out.

>>> symbols = SpeechSymbols.from_texts(["친구와 42", "one"], number_language="ko")
>>> symbols.normalize("친구와 42")
'친구와 사십이'
>>> symbols.decode(symbols.encode("친구와 42"))
'친구와 사십이'

Texts are in small letters, with single spaces. A Hangul syllable comes as the two or three letters
(conjoining jamo) that it is written with, so that 11,172 syllables need 67 symbols, and each is a sound.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from jumok.batches.tokens import EOS, SPECIAL_TOKENS, UNK
from jumok.errors import InputError
from jumok.files import atomic_write, read_json

__all__ = ["NumberLanguage", "SpeechSymbols", "compose_hangul", "decompose_hangul", "expand_numbers"]

NumberLanguage = Literal["en", "ko"]  # the language that numbers are read out in

FORMAT_VERSION = 1
SYMBOLS_FILE = "symbols.json"
HANGUL_SYLLABLES = re.compile("[가-힣]+")
# Typographic signs that are spoken like a plain one.
PLAIN_PUNCTUATION = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "."})
NUMBER_REGEX = re.compile(r"(?<![\w.])\d+(?:,\d{3})+(?:\.\d+)?(?![\d])|\d+(?:\.\d+)?")
ORDINAL_REGEX = re.compile(r"\b(\d+)(?:st|nd|rd|th)\b")
MAX_DIGITS = 15  # digits of a number; a longer one is read digit by digit

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
THOUSANDS = ("", "thousand", "million", "billion", "trillion")
ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
DIGITS_KO = "영일이삼사오육칠팔구"
SMALL_KO, LARGE_KO = ("", "십", "백", "천"), ("", "만", "억", "조")


class SpeechSymbols:
    """The characters that texts are spoken from, numbered; ``</s>`` ends every text."""

    def __init__(self, characters: Sequence[str], number_language: NumberLanguage | None = None) -> None:
        if number_language not in (None, *get_args(NumberLanguage)):
            raise InputError(
                f"numbers={number_language!r}: they are read out in {' or '.join(get_args(NumberLanguage))}"
            )
        if len(set(characters)) < len(characters) or any(len(one) != 1 for one in characters):
            raise InputError("symbols are single characters, each of them once")
        self.characters, self.number_language = tuple(characters), number_language
        self._ids = {one: number for number, one in enumerate(self.characters, len(SPECIAL_TOKENS))}

    @classmethod
    def from_texts(cls, texts: Iterable[str], number_language: NumberLanguage | None = None) -> SpeechSymbols:
        """All characters of these texts, in the order of Unicode."""
        normal = cls((), number_language)
        seen: set[str] = set()
        for text in texts:
            seen.update(decompose_hangul(normal.normalize(text)))
        if not seen:
            raise InputError("there is no text to learn symbols from")
        return cls(sorted(seen), number_language)

    @property
    def vocab_size(self) -> int:
        """Special symbols included."""
        return len(SPECIAL_TOKENS) + len(self.characters)

    def normalize(self, text: str) -> str:
        """A text as it will be spoken."""
        text = unicodedata.normalize("NFC", text).translate(PLAIN_PUNCTUATION).lower()
        if self.number_language:
            text = expand_numbers(text, self.number_language)
        return " ".join(text.split())

    def spell(self, text: str) -> str:
        """The characters that ``encode`` gives numbers to, ``</s>`` not among them."""
        return decompose_hangul(self.normalize(text))

    def encode(self, text: str) -> list[int]:
        """The numbers of its characters, and of ``</s>``; what is not known is ``<unk>``."""
        return [*(self._ids.get(one, UNK) for one in self.spell(text)), EOS]

    def unknown_characters(self, text: str) -> list[str]:
        """The characters of a text that are not known, each once."""
        return list(dict.fromkeys(one for one in self.spell(text) if one not in self._ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these numbers up to ``</s>``; � where a symbol was not known."""
        found = []
        for one in map(int, ids):
            if one == EOS:
                break
            if not 0 <= one < self.vocab_size:
                raise InputError(
                    f"there is no symbol {one}; they are numbered from 0 to {self.vocab_size - 1}"
                )
            if one >= len(SPECIAL_TOKENS):
                found.append(self.characters[one - len(SPECIAL_TOKENS)])
            elif one == UNK:
                found.append("�")
        return compose_hangul("".join(found))

    def save(self, folder: Path) -> None:
        told = {
            "format": FORMAT_VERSION,
            "characters": "".join(self.characters),
            "numbers": self.number_language,
        }
        with atomic_write(folder / SYMBOLS_FILE) as part:
            part.write_text(json.dumps(told, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> SpeechSymbols:
        path = folder / SYMBOLS_FILE
        told = read_json(path, dict)
        try:
            return cls(tuple(told["characters"]), told["numbers"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged: {error!r}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SpeechSymbols):
            return NotImplemented
        return (self.characters, self.number_language) == (other.characters, other.number_language)

    def __hash__(self) -> int:
        return hash((self.characters, self.number_language))


def decompose_hangul(text: str) -> str:
    """Hangul syllables taken apart, and nothing else.

    >>> [unicodedata.name(one).rpartition(" ")[2] for one in decompose_hangul("친")]
    ['CHIEUCH', 'I', 'NIEUN']
    """
    return HANGUL_SYLLABLES.sub(lambda found: unicodedata.normalize("NFD", found[0]), text)


def compose_hangul(text: str) -> str:
    """Jamo put together again."""
    return unicodedata.normalize("NFC", text)


# -------------------------------------------------------------------------------------------------- numbers


def expand_numbers(text: str, language: NumberLanguage) -> str:
    """Numbers in digits as words.

    >>> expand_numbers("1,042 cats, 3.14 and the 22nd", "en")
    'one thousand forty two cats, three point one four and the twenty second'
    >>> expand_numbers("2024년 3.5", "ko")
    '이천이십사년 삼점오'
    """
    if language == "en":
        text = ORDINAL_REGEX.sub(lambda found: _spell_ordinal(found[1]), text)
    return NUMBER_REGEX.sub(
        lambda found: _expand_with_spaces(found, text) if language == "en" else _spell_digits(found[0], "ko"),
        text,
    )


def _expand_with_spaces(match: re.Match[str], text: str) -> str:
    """In English, where letters may stand right beside a number, with spaces between."""
    before, after = text[max(0, match.start() - 1) : match.start()], text[match.end() : match.end() + 1]
    return " " * before.isalpha() + _spell_digits(match[0], "en") + " " * after.isalpha()


def _spell_digits(digits: str, language: NumberLanguage) -> str:
    whole, point, rest = digits.replace(",", "").partition(".")
    one_by_one = len(whole) > MAX_DIGITS or (whole.startswith("0") and len(whole) > 1)
    if language == "ko":
        said = _spell_each_digit_ko(whole) if one_by_one else _spell_korean(int(whole))
        return said + ("점" + _spell_each_digit_ko(rest) if point else "")
    said = _spell_each_digit_en(whole) if one_by_one else _spell_english(int(whole))
    return said + (" point " + _spell_each_digit_en(rest) if point else "")


def _spell_each_digit_en(digits: str) -> str:
    return " ".join(ONES[int(digit)] for digit in digits)


def _spell_each_digit_ko(digits: str) -> str:
    return "".join(DIGITS_KO[int(digit)] for digit in digits)


def _spell_english(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    if number < 1000:
        return f"{ONES[number // 100]} hundred" + (f" {_spell_english(number % 100)}" if number % 100 else "")
    groups = []
    for name in THOUSANDS:
        number, group = divmod(number, 1000)
        if group:
            groups.append(f"{_spell_english(group)} {name}".strip())
    return " ".join(reversed(groups))


def _spell_ordinal(digits: str) -> str:
    *before, last = _spell_digits(digits, "en").split()
    regular = (last[:-1] + "ie" if last.endswith("y") else last) + "th"
    return " ".join([*before, ORDINALS.get(last, regular)])


def _spell_korean(number: int) -> str:
    """As numbers are read in Chinese words: 일, 이, 삼; ten is 십, not 일십, and so are 백, 천 and 만."""
    if not number:
        return DIGITS_KO[0]
    said = ""
    for large in LARGE_KO:
        number, group = divmod(number, 10_000)
        if not group:
            continue
        part = ""
        for small in SMALL_KO:
            group, digit = divmod(group, 10)
            if digit:
                part = ("" if digit == 1 and small else DIGITS_KO[digit]) + small + part
        if large == "만" and part == "일" and not number:
            part = ""
        said = part + large + said
    return said
