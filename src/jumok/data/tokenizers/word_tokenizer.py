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

from jumok.batches.tokens import UNK
from jumok.data.tokenizers.segmentation import WORD_REGEX
from jumok.data.tokenizers.sentence_splitter import split_sentences
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig
from jumok.errors import InputError

__all__ = ["SegmentedText", "WordTokenizer", "WordTokenizerConfig", "segment_text"]

WordSentences = Sequence[Sequence[str]]
MARKUP_TAG = re.compile(r"</?[A-Za-z][^<>]{0,200}>")  # <br />, </b>
NUMERIC_REFERENCE = re.compile(r"(?:&| )#(\d{2,4});")  # &#39; and, where a program lost the &, #39;
LONG_REFERENCE = re.compile(r"(?<=&#)[0-9]{8,}")  # more digits than any character has, unless most are zeros


@dataclass(frozen=True)
class WordTokenizerConfig:
    """The ``text:`` section of models that read words."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    type: Literal["words", "bpe", "unigram", "characters"] = "words"
    vocab_size: int = 30_000  # of the vocabulary; it may come out smaller
    lowercase: bool = True
    min_count: int = 2  # times that a word was seen; rarer ones are unknown
    strip_markup: bool = False  # tags (<br />) end sentences and are left out, &amp; is read as &
    max_training_examples: int = 1_000_000  # that the vocabulary is learned from, the first ones

    def __post_init__(self) -> None:
        if self.max_training_examples < 1:
            raise ValueError(f"texts={self.max_training_examples}: 1 or more is expected")
        try:
            self.tokenizer_config  # noqa: B018  says at once what does not fit
        except InputError as error:
            raise ValueError(str(error)) from None

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        """The same, for the tokenizer of each word."""
        return TokenizerConfig(
            self.type, vocab_size=self.vocab_size, lowercase=self.lowercase, min_count=self.min_count
        )


@dataclass(frozen=True)
class SegmentedText:
    """A text as words: what stood before each ("" or " "), and the words at which sentences begin and end."""

    words: tuple[str, ...]
    spaces: tuple[str, ...]
    sentence_bounds: tuple[int, ...]

    @property
    def sentences(self) -> list[tuple[str, ...]]:
        return [
            self.words[begin:end]
            for begin, end in zip(self.sentence_bounds, self.sentence_bounds[1:], strict=False)
        ]


def segment_text(text: str, *, strip_markup: bool = False) -> SegmentedText:
    """A text divided into sentences and words. Nothing but white space is lost, and ``strip_markup`` if asked.

    >>> one = segment_text("A dull start. I laughed!")
    >>> one.sentences, one.spaces
    ([('A', 'dull', 'start', '.'), ('I', 'laughed', '!')], ('', ' ', ' ', '', ' ', ' ', ''))
    """
    words: list[str] = []
    before: list[str] = []
    edges = [0]
    for sentence in _iter_sentences(text, strip_markup):
        end = 0
        for found in WORD_REGEX.finditer(sentence):
            words.append(found[0])
            before.append(" " if len(words) > 1 and (not end or found.start() > end) else "")
            end = found.end()
        if len(words) > edges[-1]:
            edges.append(len(words))
    return SegmentedText(tuple(words), tuple(before), tuple(edges))


def _iter_sentences(text: str, strip_markup: bool) -> Iterator[str]:
    text = unicodedata.normalize("NFC", text)
    if strip_markup:
        # Python converts at most 4,300 digits. Eight without leading zeros already are beyond Unicode, and
        # ``html.unescape`` replaces those by U+FFFD.
        text = LONG_REFERENCE.sub(
            lambda found: found[0].lstrip("0")[:8] or "0", NUMERIC_REFERENCE.sub(_decode_reference, text)
        )
        text = html.unescape(text)
        text = MARKUP_TAG.sub("\n", text)
    for line in text.split("\n"):
        yield from split_sentences(line)


def _decode_reference(match: re.Match[str]) -> str:
    return chr(int(match[1])) if int(match[1]) >= 32 else " "


@dataclass(frozen=True, eq=False)
class WordTokenizer:
    """From sentences of words to token ids.

    >>> words = WordTokenizer.train([[["a", "dull", "start"], ["a", "dull", "end"]]], WordTokenizerConfig(vocab_size=100))
    >>> words.encode([[["A", "dull", "day"], []]]), words.ids_to_tokens([4, 5])
    ([[[5, 6, 1]]], ['▁', '▁a'])
    """

    tokenizer: Tokenizer

    @classmethod
    def train(cls, texts: Iterable[WordSentences], config: WordTokenizerConfig) -> WordTokenizer:
        """Learn a vocabulary from the first ``config.max_training_examples`` texts."""
        lines = (" ".join(words) for one in islice(texts, config.max_training_examples) for words in one)
        return cls(Tokenizer.train(lines, config.tokenizer_config))

    def encode(self, texts: Sequence[WordSentences]) -> list[list[list[int]]]:
        """The ids of the sentences of each text; sentences without words are left out."""
        kept = [[words for words in one if len(words)] for one in texts]
        found = iter(self.tokenizer.encode([" ".join(words) for one in kept for words in one]))
        return [[next(found) or [UNK] for _ in one] for one in kept]

    def word_ids_from_words(self, words: Sequence[str]) -> list[int]:
        """For each id that ``encode`` gives for a sentence, the number of its word."""
        return self.tokenizer.word_ids_from_text(" ".join(words))

    def ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as it stands in the vocabulary, ▁ for the space before a word."""
        return self.tokenizer.ids_to_tokens(ids)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder / "tokenizer.json")

    @classmethod
    def load(cls, folder: Path) -> WordTokenizer:
        return cls(Tokenizer.load(folder / "tokenizer.json"))
