"""Input symbols of a speech model: one per character, with numbers written as words.

>>> symbols = SpeechSymbols.from_texts(["친구와 42", "one"], number_language="ko")
>>> symbols.normalize("친구와 42")
'친구와 사십이'
>>> symbols.decode(symbols.encode("친구와 42"))
'친구와 사십이'

Texts are lower-cased, with single spaces. A Hangul syllable is decomposed into its two or three letters
(conjoining jamo), so that 11,172 syllables need 67 symbols, each of which is a sound.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from jumok.batches.tokens import EOS, SPECIAL_TOKENS, UNK
from jumok.errors import InputError
from jumok.files import atomic_write, read_json

NumberLanguage = Literal["en", "ko"]  # language of number words

FORMAT_VERSION = 1
SYMBOLS_FILE = "symbols.json"
HANGUL_SYLLABLES = re.compile("[가-힣]+")
# Typographic punctuation that is spoken like plain punctuation.
PLAIN_PUNCTUATION = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "."})
NUMBER_REGEX = re.compile(r"(?<![\w.])\d+(?:,\d{3})+(?:\.\d+)?(?![\d])|\d+(?:\.\d+)?")
ORDINAL_REGEX = re.compile(r"\b(\d+)(?:st|nd|rd|th)\b")
MAX_DIGITS = 15  # a longer number is read digit by digit

ONES_WORDS = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
"""
ONES = ONES_WORDS.split()
TENS = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
THOUSANDS = ("", "thousand", "million", "billion", "trillion")
ORDINALS = {"one": "first", "two": "second", "three": "third"}
ORDINALS |= {"five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth"}
DIGITS_KO = "영일이삼사오육칠팔구"
SMALL_KO, LARGE_KO = ("", "십", "백", "천"), ("", "만", "억", "조")


@dataclass(frozen=True)
class SpeechSymbols:
    """The vocabulary of characters of a speech model. Every text ends with ``</s>``."""

    characters: tuple[str, ...]
    number_language: NumberLanguage | None = None

    def __post_init__(self) -> None:
        languages = get_args(NumberLanguage)
        if self.number_language not in (None, *languages):
            raise InputError(f"number_language={self.number_language!r}: expected {' or '.join(languages)}")
        if len(set(self.characters)) < len(self.characters) or any(len(text) != 1 for text in self.characters):
            raise InputError("characters: expected distinct single characters")

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.characters, len(SPECIAL_TOKENS))}

    @classmethod
    def from_texts(cls, texts: Iterable[str], number_language: NumberLanguage | None = None) -> SpeechSymbols:
        """All characters of these texts, in Unicode order."""
        normalizer = cls((), number_language)
        characters: set[str] = set()
        for text in texts:
            characters.update(decompose_hangul(normalizer.normalize(text)))
        if not characters:
            raise InputError("there is no text to collect symbols from")
        return cls(tuple(sorted(characters)), number_language)

    @property
    def vocab_size(self) -> int:
        """The number of symbols, including special ones."""
        return len(SPECIAL_TOKENS) + len(self.characters)

    def normalize(self, text: str) -> str:
        """Normalize a text: NFC, plain punctuation, lower case, number words, single spaces."""
        text = unicodedata.normalize("NFC", text).translate(PLAIN_PUNCTUATION).lower()
        if self.number_language:
            text = expand_numbers(text, self.number_language)
        return " ".join(text.split())

    def spell(self, text: str) -> str:
        """The characters that :meth:`encode` maps to ids, without ``</s>``."""
        return decompose_hangul(self.normalize(text))

    def encode(self, text: str) -> list[int]:
        """The ids of the characters of a text, and of ``</s>``. Unknown characters are ``<unk>``."""
        return [*(self._ids.get(character, UNK) for character in self.spell(text)), EOS]

    def unknown_characters(self, text: str) -> list[str]:
        """The distinct unknown characters of a text."""
        return list(dict.fromkeys(character for character in self.spell(text) if character not in self._ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids up to ``</s>``, with � for unknown characters."""
        characters = []
        for symbol_id in map(int, ids):
            if symbol_id == EOS:
                break
            if not 0 <= symbol_id < self.vocab_size:
                raise InputError(f"a symbol id is {symbol_id}; expected 0 to {self.vocab_size - 1}")
            if symbol_id >= len(SPECIAL_TOKENS):
                characters.append(self.characters[symbol_id - len(SPECIAL_TOKENS)])
            elif symbol_id == UNK:
                characters.append("�")
        return compose_hangul("".join(characters))

    def save(self, folder: Path) -> None:
        content = {"format": FORMAT_VERSION, "characters": "".join(self.characters), "numbers": self.number_language}
        with atomic_write(folder / SYMBOLS_FILE) as part:
            part.write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> SpeechSymbols:
        path = folder / SYMBOLS_FILE
        content = read_json(path, dict)
        try:
            return cls(tuple(content["characters"]), content["numbers"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged: {error!r}") from None


def decompose_hangul(text: str) -> str:
    """Decompose Hangul syllables into jamo. Other characters do not change.

    >>> [unicodedata.name(jamo).rpartition(" ")[2] for jamo in decompose_hangul("친")]
    ['CHIEUCH', 'I', 'NIEUN']
    """
    return HANGUL_SYLLABLES.sub(lambda match: unicodedata.normalize("NFD", match[0]), text)


def compose_hangul(text: str) -> str:
    """Compose jamo to Hangul syllables."""
    return unicodedata.normalize("NFC", text)


# -------------------------------------------------------------------------------------------------- numbers


def expand_numbers(text: str, language: NumberLanguage) -> str:
    """Replace numbers in digits by words.

    >>> expand_numbers("1,042 cats, 3.14 and the 22nd", "en")
    'one thousand forty two cats, three point one four and the twenty second'
    >>> expand_numbers("2024년 3.5", "ko")
    '이천이십사년 삼점오'
    """
    if language == "en":
        text = ORDINAL_REGEX.sub(lambda match: _spell_ordinal(match[1]), text)
    return NUMBER_REGEX.sub(
        lambda match: _expand_with_spaces(match, text) if language == "en" else _spell_digits(match[0], "ko"), text
    )


def _expand_with_spaces(match: re.Match[str], text: str) -> str:
    """English number words, separated by spaces from adjacent letters."""
    before, after = text[max(0, match.start() - 1) : match.start()], text[match.end() : match.end() + 1]
    return " " * before.isalpha() + _spell_digits(match[0], "en") + " " * after.isalpha()


def _spell_digits(digits: str, language: NumberLanguage) -> str:
    integer_part, point, fraction = digits.replace(",", "").partition(".")
    is_digit_by_digit = len(integer_part) > MAX_DIGITS or (integer_part.startswith("0") and len(integer_part) > 1)
    words = _spell_each_digit(integer_part, language) if is_digit_by_digit else SPELLERS[language](int(integer_part))
    if point:
        words += {"en": " point ", "ko": "점"}[language] + _spell_each_digit(fraction, language)
    return words


def _spell_each_digit(digits: str, language: NumberLanguage) -> str:
    separator, names = ("", DIGITS_KO) if language == "ko" else (" ", ONES)
    return separator.join(names[int(digit)] for digit in digits)


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
    """Sino-Korean number words: 일, 이, 삼; 10 is 십, not 일십, and likewise 백, 천 and 만."""
    if not number:
        return DIGITS_KO[0]
    words = ""
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
        words = part + large + words
    return words


SPELLERS = {"en": _spell_english, "ko": _spell_korean}
