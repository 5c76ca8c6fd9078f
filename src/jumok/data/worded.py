"""Text as sentences of words, for models that read words: how it is divided, and the token ids of it.

::

    "A dull start. I laughed!"   →   [A dull start .] [I laughed !]   →   [a dull start .] [i laughed !]
     as it is written                 sentences of words                   tokens, or pieces of words

A word is letters and digits with signs inside them, or a single sign (:mod:`jumok.data.segmentation` has the
rules for all scripts), and a model reads each as if a space stood before it: so what it reads depends on the
words alone, and one that is taken away leaves no trace.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from jumok.batch import UNK
from jumok.data.segmentation import WORD
from jumok.data.sentences import sentences
from jumok.data.text import TextConfig, Tokenizer
from jumok.errors import InputError

__all__ = ["Words", "WordsConfig", "Written", "written"]

Sentences = Sequence[Sequence[str]]
TAG = re.compile(r"</?[A-Za-z][^<>]{0,200}>")  # <br />, </b>
NUMBERED = re.compile(r"(?:&| )#(\d{2,4});")  # &#39; and, where a program lost the &, #39;
LONG_REFERENCE = re.compile(r"(?<=&#)[0-9]{8,}")  # more digits than any character has, unless most are zeros


@dataclass(frozen=True)
class WordsConfig:
    """The ``text:`` section of models that read words."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    kind: Literal["words", "bpe", "unigram", "characters"] = "words"
    size: int = 30_000  # of the vocabulary; it may come out smaller
    lower: bool = True
    least: int = 2  # times that a word was seen; rarer ones are unknown
    markup: bool = False  # tags (<br />) end sentences and are left out, &amp; is read as &
    texts: int = 1_000_000  # that the vocabulary is learned from, the first ones

    def __post_init__(self) -> None:
        if self.texts < 1:
            raise ValueError(f"texts={self.texts}: 1 or more is expected")
        try:
            self.vocabulary  # noqa: B018  says at once what does not fit
        except InputError as error:
            raise ValueError(str(error)) from None

    @property
    def vocabulary(self) -> TextConfig:
        """The same, for the tokenizer of each word."""
        return TextConfig(self.kind, size=self.size, lower=self.lower, least=self.least)


@dataclass(frozen=True)
class Written:
    """A text as words: what stood before each ("" or " "), and the words at which sentences begin and end."""

    words: tuple[str, ...]
    before: tuple[str, ...]
    edges: tuple[int, ...]

    @property
    def sentences(self) -> list[tuple[str, ...]]:
        return [self.words[begin:end] for begin, end in zip(self.edges, self.edges[1:], strict=False)]


def written(text: str, *, markup: bool = False) -> Written:
    """A text divided into sentences and words. Nothing but white space is lost, and ``markup`` if asked.

    >>> one = written("A dull start. I laughed!")
    >>> one.sentences, one.before
    ([('A', 'dull', 'start', '.'), ('I', 'laughed', '!')], ('', ' ', ' ', '', ' ', ' ', ''))
    """
    words: list[str] = []
    before: list[str] = []
    edges = [0]
    for sentence in _sentences(text, markup):
        end = 0
        for found in WORD.finditer(sentence):
            words.append(found[0])
            before.append(" " if len(words) > 1 and (not end or found.start() > end) else "")
            end = found.end()
        if len(words) > edges[-1]:
            edges.append(len(words))
    return Written(tuple(words), tuple(before), tuple(edges))


def _sentences(text: str, markup: bool) -> Iterator[str]:
    text = unicodedata.normalize("NFC", text)
    if markup:
        # Python converts at most 4,300 digits. Eight without leading zeros already are beyond Unicode, and
        # ``html.unescape`` replaces those by U+FFFD.
        text = LONG_REFERENCE.sub(lambda found: found[0].lstrip("0")[:8] or "0", NUMBERED.sub(_sign, text))
        text = html.unescape(text)
        text = TAG.sub("\n", text)
    for line in text.split("\n"):
        yield from sentences(line)


def _sign(found: re.Match[str]) -> str:
    return chr(int(found[1])) if int(found[1]) >= 32 else " "


@dataclass(frozen=True, eq=False)
class Words:
    """From sentences of words to token ids.

    >>> words = Words.train([[["a", "dull", "start"], ["a", "dull", "end"]]], WordsConfig(size=100))
    >>> words.encode([[["A", "dull", "day"], []]]), words.pieces([4, 5])
    ([[[5, 6, 1]]], ['▁', '▁a'])
    """

    tokenizer: Tokenizer

    @classmethod
    def train(cls, texts: Iterable[Sentences], config: WordsConfig) -> Words:
        """Learn a vocabulary from the first ``config.texts`` texts."""
        lines = (" ".join(words) for one in islice(texts, config.texts) for words in one)
        return cls(Tokenizer.train(lines, config.vocabulary))

    def encode(self, texts: Sequence[Sentences]) -> list[list[list[int]]]:
        """The ids of the sentences of each text; sentences without words are left out."""
        kept = [[words for words in one if len(words)] for one in texts]
        found = iter(self.tokenizer.encode([" ".join(words) for one in kept for words in one]))
        return [[next(found) or [UNK] for _ in one] for one in kept]

    def places(self, words: Sequence[str]) -> list[int]:
        """For each id that ``encode`` gives for a sentence, the number of its word."""
        return self.tokenizer.words(" ".join(words))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each id as it stands in the vocabulary, ▁ for the space before a word."""
        return self.tokenizer.pieces(ids)

    @property
    def size(self) -> int:
        return self.tokenizer.size

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder / "tokenizer.json")

    @classmethod
    def load(cls, folder: Path) -> Words:
        return cls(Tokenizer.load(folder / "tokenizer.json"))
