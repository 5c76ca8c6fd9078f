"""Tokenizer of word models: text is split into sentences of words, which are encoded to token ids.

::

    "A dull start. I laughed!"   →   [A dull start .] [I laughed !]   →   [a dull start .] [i laughed !]
     text                             sentences of words                   tokens, or pieces of words

A word consists of letters and digits with symbols inside, or it is a single symbol (for the rules of all
scripts see :mod:`jumok.data.tokenizers.segmentation`). Each word is encoded as if a space preceded it. The
ids therefore depend only on the words, and removing a word does not affect its neighbours.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from jumok.batches.tokens import UNK
from jumok.config import Config
from jumok.data.tokenizers.segmentation import WORD_REGEX
from jumok.data.tokenizers.sentence_splitter import split_sentences
from jumok.data.tokenizers.tokenizer import Tokenizer
from jumok.data.tokenizers.vocabulary import TokenizerConfig
from jumok.errors import InputError

WordSentences = Sequence[Sequence[str]]
MARKUP_TAG = re.compile(r"</?[A-Za-z][^<>]{0,200}>")  # <br />, </b>
NUMERIC_REFERENCE = re.compile(r"(?:&| )#(\d{2,4});")  # &#39; and, where a program lost the &, #39;
LONG_REFERENCE = re.compile(r"(?<=&#)[0-9]{8,}")  # more digits than any code point has, unless most are zeros


@dataclass(frozen=True)
class WordTokenizerConfig(Config):
    """The ``tokenizer:`` section of recipes of word models."""

    type: Literal["words", "bpe", "unigram", "characters"] = "words"
    vocab_size: int = 30_000  # maximum
    lowercase: bool = True
    min_count: int = 2  # minimum count for a word to enter the vocabulary
    strip_markup: bool = False  # remove tags (<br />), which end sentences, and decode &amp; to &
    max_training_examples: int = 1_000_000  # train on the first so many texts

    def __post_init__(self) -> None:
        self.check_ranges(positive=("max_training_examples",))
        try:
            self.tokenizer_config  # noqa: B018  validates the values
        except InputError as error:
            raise ValueError(str(error)) from None

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        """The config of the underlying tokenizer."""
        return TokenizerConfig(
            self.type, vocab_size=self.vocab_size, lowercase=self.lowercase, min_count=self.min_count
        )


@dataclass(frozen=True)
class SegmentedText:
    """The words of a text, the space before each ("" or " "), and the boundaries of sentences."""

    words: tuple[str, ...]
    spaces: tuple[str, ...]
    sentence_bounds: tuple[int, ...]  # the first word of each sentence, then the end of the last

    @property
    def sentences(self) -> list[tuple[str, ...]]:
        return [
            self.words[start:end] for start, end in zip(self.sentence_bounds, self.sentence_bounds[1:], strict=False)
        ]


def segment_text(text: str, *, strip_markup: bool = False) -> SegmentedText:
    """Split a text into sentences and words. Only white space is lost, and markup with ``strip_markup``.

    >>> segmented = segment_text("A dull start. I laughed!")
    >>> segmented.sentences, segmented.spaces
    ([('A', 'dull', 'start', '.'), ('I', 'laughed', '!')], ('', ' ', ' ', '', ' ', ' ', ''))
    """
    words: list[str] = []
    spaces: list[str] = []
    bounds = [0]
    for sentence in _iter_sentences(text, strip_markup):
        end = 0
        for match in WORD_REGEX.finditer(sentence):
            words.append(match[0])
            spaces.append(" " if len(words) > 1 and (not end or match.start() > end) else "")
            end = match.end()
        if len(words) > bounds[-1]:
            bounds.append(len(words))
    return SegmentedText(tuple(words), tuple(spaces), tuple(bounds))


def _iter_sentences(text: str, strip_markup: bool) -> Iterator[str]:
    text = unicodedata.normalize("NFC", text)
    if strip_markup:
        # Python converts at most 4,300 digits. Eight digits without leading zeros are already beyond Unicode,
        # and ``html.unescape`` replaces them by U+FFFD.
        text = NUMERIC_REFERENCE.sub(_decode_reference, text)
        text = LONG_REFERENCE.sub(lambda match: match[0].lstrip("0")[:8] or "0", text)
        text = html.unescape(text)
        text = MARKUP_TAG.sub("\n", text)
    for line in text.split("\n"):
        yield from split_sentences(line)


def _decode_reference(match: re.Match[str]) -> str:
    return chr(int(match[1])) if int(match[1]) >= 32 else " "


@dataclass(frozen=True, eq=False)
class WordTokenizer:
    """Sentences of words to token ids.

    >>> texts = [[["a", "dull", "start"], ["a", "dull", "end"]]]
    >>> tokenizer = WordTokenizer.train(texts, WordTokenizerConfig(vocab_size=100))
    >>> tokenizer.encode([[["A", "dull", "day"], []]]), tokenizer.ids_to_tokens([4, 5])
    ([[[5, 6, 1]]], ['▁', '▁a'])
    """

    tokenizer: Tokenizer

    @classmethod
    def train(cls, texts: Iterable[WordSentences], config: WordTokenizerConfig) -> WordTokenizer:
        """Train a vocabulary on the first ``config.max_training_examples`` texts."""
        lines = (" ".join(words) for text in islice(texts, config.max_training_examples) for words in text)
        return cls(Tokenizer.train(lines, config.tokenizer_config))

    def encode(self, texts: Sequence[WordSentences]) -> list[list[list[int]]]:
        """The ids of the sentences of each text. Empty sentences are left out."""
        nonempty = [[words for words in text if len(words)] for text in texts]
        encoded = iter(self.tokenizer.encode([" ".join(words) for text in nonempty for words in text]))
        return [[next(encoded) or [UNK] for _ in text] for text in nonempty]

    def word_ids_from_words(self, words: Sequence[str]) -> list[int]:
        """The index of the word of each id that ``encode`` returns for a sentence."""
        return self.tokenizer.word_ids_from_text(" ".join(words))

    def ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """The entry of each id in the vocabulary, with ▁ for the space before a word."""
        return self.tokenizer.ids_to_tokens(ids)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder / "tokenizer.json")

    @classmethod
    def load(cls, folder: Path) -> WordTokenizer:
        return cls(Tokenizer.load(folder / "tokenizer.json"))
