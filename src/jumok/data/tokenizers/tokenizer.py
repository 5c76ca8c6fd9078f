"""Text to token ids and back: BPE, unigram, words or characters, through the ``tokenizers`` library.

A piece that begins a word carries the space before it, written ▁, so that nothing about spaces is lost::

    "the  dogs bark."   →   ▁the ▁ ▁dog s ▁bark .   →   "the  dogs bark."

``decode(encode(text)) == text`` for every text in Unicode's form NFC, leading, trailing and double spaces
included, with these exceptions: other white space and line ends of any kind become spaces, ▁ itself becomes
_, ``lower`` makes letters small, and what is not in the vocabulary is ``<unk>``. With ``bytes`` there is no
such thing: a character that is not in the vocabulary becomes its UTF-8 bytes, and these become the character
again. Text is brought into NFC and otherwise left alone: accents stay, and a Hangul syllable is one
character. No piece joins letters and signs. What is decoded is one line, whatever the ids.

No text makes a special token: "</s>" in a sentence is four characters. Ids 0 to 3 are those of
``jumok.batch.SPECIAL_TOKENS``, then come the 256 bytes, then the pieces.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import models

from jumok.batches.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from jumok.data.readers.formats import TranslationExample
from jumok.data.tokenizers.vocabulary import BYTE_PIECES, SPACE, TokenizerConfig, train_backend
from jumok.errors import InputError
from jumok.files import atomic_write

__all__ = ["Tokenizer", "TokenizerConfig", "TokenizerPair"]

BYTE_OF_PIECE = {piece: byte for byte, piece in enumerate(BYTE_PIECES)}


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back.

    >>> tokenizer = Tokenizer.train(["the dog", "the cat"] * 2, TextConfig("words", size=50))
    >>> ids = tokenizer.encode(["the dog"])[0]
    >>> tokenizer.ids_to_tokens(ids), tokenizer.decode(ids)
    (['▁the', '▁dog'], 'the dog')
    """

    backend: tokenizers.Tokenizer

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> Tokenizer:
        """Learn a vocabulary. The same lines give the same tokenizer, to the byte of its file.

        All distinct words (between spaces) of the lines are held in memory, and counted.
        """
        return cls(train_backend(lines, config))

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return self.backend.get_vocab_size()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line, without special tokens."""
        try:
            encoded = self.backend.encode_batch_fast(list(lines), add_special_tokens=False)
        except TypeError:
            told = next((line for line in lines if not _is_valid_text(line)), None)
            raise InputError(f"{told!r} is no text that can be written in UTF-8") from None
        return [one.ids for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; of the special ones only ``<unk>`` shows."""
        return self.backend.decode([i for i in ids if i not in (PAD, BOS, EOS)], skip_special_tokens=False)

    def ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as it stands in the vocabulary, ▁ for a space."""
        found = []
        for i in ids:
            piece = self.backend.id_to_token(i) if i >= 0 else None
            if piece is None:
                raise InputError(f"token id {i} came; this vocabulary has 0 to {self.vocab_size - 1}")
            found.append(piece)
        return found

    def word_ids_from_text(self, text: str) -> list[int]:
        """For each token of ``encode([text])[0]`` the number of its word in ``text.split()``."""
        encoded = self.backend.encode(text, add_special_tokens=False)
        normal = self.backend.normalizer.normalize_str(text)
        before = self.backend.pre_tokenizer.pre_tokenize_str(normal)
        numbers = _number_words([piece.replace(SPACE, " ") for piece, _ in before])
        return [numbers[i] for i in encoded.word_ids if i is not None]

    def word_ids_from_ids(self, ids: Iterable[int]) -> list[int]:
        """For each id the number of its word in ``decode(ids).split()``; -1 for what does not show.

        Of a text that is known, ask ``word_ids_from_text``: ``<unk>`` does not tell whether a space stood before it, and
        counts as a word of its own here.
        """
        ids = list(ids)
        numbers = iter(_number_words(self._decode_each([i for i in ids if i not in (PAD, BOS, EOS)])))
        return [-1 if i in (PAD, BOS, EOS) else next(numbers) for i in ids]

    def _decode_each(self, ids: Sequence[int]) -> list[str]:
        """What each id adds to the text; a character of several bytes comes with the first of them."""
        shown: list[str] = []
        for are_bytes, pieces in itertools.groupby(self.ids_to_tokens(ids), BYTE_OF_PIECE.__contains__):
            if not are_bytes:
                shown += (piece.replace(SPACE, " ") for piece in pieces)
                continue
            raw = bytes(BYTE_OF_PIECE[piece] for piece in pieces)
            try:
                for character in raw.decode():
                    shown += [character, *[""] * (len(character.encode()) - 1)]
            except UnicodeDecodeError:
                shown += "�" * len(raw)
        if isinstance(self.backend.model, models.WordLevel):
            shown = [" <unk>" if i == UNK else text for i, text in zip(ids, shown, strict=True)]
        return shown

    @property
    def fingerprint(self) -> str:
        """Another one for every other tokenizer."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def save(self, path: Path) -> None:
        """As JSON, which the ``tokenizers`` library reads too."""
        with atomic_write(path) as part:
            part.write_text(self.backend.to_str(pretty=True), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From what ``save`` wrote."""
        try:
            inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"there is no {path}") from None
        except Exception as error:  # the library raises nothing narrower
            raise InputError(f"{path} is not a tokenizer: {error}") from None
        for i, token in enumerate(SPECIAL_TOKENS):
            if inner.id_to_token(i) != token:
                raise InputError(f"{path}: id {i} is {inner.id_to_token(i)!r}; in jumok it is {token!r}")
        return cls(inner)


@dataclass(frozen=True, eq=False)
class TokenizerPair:
    """Those of both sides: one and the same, or two."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def train(cls, examples: Iterable[TranslationExample], config: TokenizerConfig) -> TokenizerPair:
        """From both sides of the first ``config.pairs`` examples, which are gone through once."""
        examples = itertools.islice(examples, config.max_training_examples)
        if config.shared_vocabulary:
            both = Tokenizer.train((text for one in examples for text in (one.source, one.target)), config)
            return cls(both, both)
        # While the one side is learned from, the other waits on disk.
        with tempfile.TemporaryFile("w+", encoding="utf-8") as waiting:

            def sources() -> Iterator[str]:
                for one in examples:
                    waiting.write(json.dumps(one.target) + "\n")
                    yield one.source

            source = Tokenizer.train(sources(), config)
            waiting.seek(0)
            return cls(source, Tokenizer.train(map(json.loads, waiting), config))

    @property
    def is_shared(self) -> bool:
        return self.source is self.target

    def save(self, folder: Path) -> None:
        """``tokenizer.json``, or ``tokenizer.source.json`` and ``tokenizer.target.json``."""
        if self.is_shared:
            self.source.save(folder / "tokenizer.json")
        else:
            self.source.save(folder / "tokenizer.source.json")
            self.target.save(folder / "tokenizer.target.json")

    @classmethod
    def load(cls, folder: Path) -> TokenizerPair:
        """From what ``save`` wrote."""
        if (folder / "tokenizer.source.json").exists():
            names = ("tokenizer.source.json", "tokenizer.target.json")
            return cls(*(Tokenizer.load(folder / name) for name in names))
        both = Tokenizer.load(folder / "tokenizer.json")
        return cls(both, both)


def _number_words(texts: Sequence[str]) -> list[int]:
    """The number of the word that each part of a text belongs to; a space is part of the next word."""
    numbers = []
    word, is_between = -1, True
    for text in texts:
        is_between = is_between or text[:1].isspace()
        if is_between and text.strip():
            word, is_between = word + 1, False
        numbers.append(word + is_between)
    return [max(0, min(number, word)) for number in numbers]


def _is_valid_text(line: object) -> bool:
    try:
        return isinstance(line, str) and bool(line.encode() or True)
    except UnicodeEncodeError:
        return False
