"""Text as it is spoken: the symbols that a voice is given, one a character, and numbers read out.

>>> symbols = Symbols.learned(["친구와 42", "one"], numbers="ko")
>>> symbols.normal("친구와 42")
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

from jumok.batch import EOS, SPECIAL, UNK
from jumok.errors import InputError
from jumok.files import read_json, written

__all__ = ["Numbers", "Symbols", "jamo", "read_out", "syllables"]

Numbers = Literal["en", "ko"]  # the language that numbers are read out in

FORMAT = 1
FILE = "symbols.json"
SYLLABLE = re.compile("[가-힣]+")
# Typographic signs that are spoken like a plain one.
PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "."})
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})+(?:\.\d+)?(?![\d])|\d+(?:\.\d+)?")
ORDINAL = re.compile(r"\b(\d+)(?:st|nd|rd|th)\b")
MOST = 15  # digits of a number; a longer one is read digit by digit

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


class Symbols:
    """The characters that texts are spoken from, numbered; ``</s>`` ends every text."""

    def __init__(self, characters: Sequence[str], numbers: Numbers | None = None) -> None:
        if numbers not in (None, *get_args(Numbers)):
            raise InputError(f"numbers={numbers!r}: they are read out in {' or '.join(get_args(Numbers))}")
        if len(set(characters)) < len(characters) or any(len(one) != 1 for one in characters):
            raise InputError("symbols are single characters, each of them once")
        self.characters, self.numbers = tuple(characters), numbers
        self._number = {one: number for number, one in enumerate(self.characters, len(SPECIAL))}

    @classmethod
    def learned(cls, texts: Iterable[str], numbers: Numbers | None = None) -> Symbols:
        """All characters of these texts, in the order of Unicode."""
        normal = cls((), numbers)
        seen: set[str] = set()
        for text in texts:
            seen.update(jamo(normal.normal(text)))
        if not seen:
            raise InputError("there is no text to learn symbols from")
        return cls(sorted(seen), numbers)

    @property
    def size(self) -> int:
        """Special symbols included."""
        return len(SPECIAL) + len(self.characters)

    def normal(self, text: str) -> str:
        """A text as it will be spoken."""
        text = unicodedata.normalize("NFC", text).translate(PLAIN).lower()
        if self.numbers:
            text = read_out(text, self.numbers)
        return " ".join(text.split())

    def spelled(self, text: str) -> str:
        """The characters that ``encode`` gives numbers to, ``</s>`` not among them."""
        return jamo(self.normal(text))

    def encode(self, text: str) -> list[int]:
        """The numbers of its characters, and of ``</s>``; what is not known is ``<unk>``."""
        return [*(self._number.get(one, UNK) for one in self.spelled(text)), EOS]

    def unknown(self, text: str) -> list[str]:
        """The characters of a text that are not known, each once."""
        return list(dict.fromkeys(one for one in self.spelled(text) if one not in self._number))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these numbers up to ``</s>``; � where a symbol was not known."""
        found = []
        for one in map(int, ids):
            if one == EOS:
                break
            if not 0 <= one < self.size:
                raise InputError(f"there is no symbol {one}; they are numbered from 0 to {self.size - 1}")
            if one >= len(SPECIAL):
                found.append(self.characters[one - len(SPECIAL)])
            elif one == UNK:
                found.append("�")
        return syllables("".join(found))

    def save(self, folder: Path) -> None:
        told = {"format": FORMAT, "characters": "".join(self.characters), "numbers": self.numbers}
        with written(folder / FILE) as part:
            part.write_text(json.dumps(told, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Symbols:
        path = folder / FILE
        told = read_json(path, dict)
        try:
            return cls(tuple(told["characters"]), told["numbers"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged: {error!r}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Symbols):
            return NotImplemented
        return (self.characters, self.numbers) == (other.characters, other.numbers)

    def __hash__(self) -> int:
        return hash((self.characters, self.numbers))


def jamo(text: str) -> str:
    """Hangul syllables taken apart, and nothing else.

    >>> [unicodedata.name(one).rpartition(" ")[2] for one in jamo("친")]
    ['CHIEUCH', 'I', 'NIEUN']
    """
    return SYLLABLE.sub(lambda found: unicodedata.normalize("NFD", found[0]), text)


def syllables(text: str) -> str:
    """Jamo put together again."""
    return unicodedata.normalize("NFC", text)


# -------------------------------------------------------------------------------------------------- numbers


def read_out(text: str, language: Numbers) -> str:
    """Numbers in digits as words.

    >>> read_out("1,042 cats, 3.14 and the 22nd", "en")
    'one thousand forty two cats, three point one four and the twenty second'
    >>> read_out("2024년 3.5", "ko")
    '이천이십사년 삼점오'
    """
    if language == "en":
        text = ORDINAL.sub(lambda found: _ordinal(found[1]), text)
    return NUMBER.sub(lambda found: _apart(found, text) if language == "en" else _said(found[0], "ko"), text)


def _apart(found: re.Match[str], text: str) -> str:
    """In English, where letters may stand right beside a number, with spaces between."""
    before, after = text[max(0, found.start() - 1) : found.start()], text[found.end() : found.end() + 1]
    return " " * before.isalpha() + _said(found[0], "en") + " " * after.isalpha()


def _said(digits: str, language: Numbers) -> str:
    whole, point, rest = digits.replace(",", "").partition(".")
    one_by_one = len(whole) > MOST or (whole.startswith("0") and len(whole) > 1)
    if language == "ko":
        said = _digits_ko(whole) if one_by_one else _korean(int(whole))
        return said + ("점" + _digits_ko(rest) if point else "")
    said = _digits_en(whole) if one_by_one else _english(int(whole))
    return said + (" point " + _digits_en(rest) if point else "")


def _digits_en(digits: str) -> str:
    return " ".join(ONES[int(digit)] for digit in digits)


def _digits_ko(digits: str) -> str:
    return "".join(DIGITS_KO[int(digit)] for digit in digits)


def _english(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    if number < 1000:
        return f"{ONES[number // 100]} hundred" + (f" {_english(number % 100)}" if number % 100 else "")
    groups = []
    for name in THOUSANDS:
        number, group = divmod(number, 1000)
        if group:
            groups.append(f"{_english(group)} {name}".strip())
    return " ".join(reversed(groups))


def _ordinal(digits: str) -> str:
    *before, last = _said(digits, "en").split()
    regular = (last[:-1] + "ie" if last.endswith("y") else last) + "th"
    return " ".join([*before, ORDINALS.get(last, regular)])


def _korean(number: int) -> str:
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
