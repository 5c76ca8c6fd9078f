"""BPE, unigram, word and character tokenizers for translation and word models.

A piece at the beginning of a word includes the space before it, written ▁, so that spaces are preserved::

    "the  dogs bark."   →   ▁the ▁ ▁dog s ▁bark .   →   "the  dogs bark."

``decode(encode(text)) == text`` for every text in Unicode normalization form NFC, including leading, trailing
and double spaces, with these exceptions: other white space and line breaks become spaces, ▁ becomes _,
``lowercase`` lower-cases letters, and unknown characters become ``<unk>``. With ``byte_fallback``, an unknown
character becomes its UTF-8 bytes instead, which are decoded to the same character. Apart from NFC, text is
not normalized: accents are kept, and a Hangul syllable is one character. No piece contains both letters and
symbols. Decoded text is always a single line.

No text is encoded as a special token: "</s>" in a sentence is four characters. Ids 0 to 3 are those of
``jumok.batches.tokens.SPECIAL_TOKENS``, followed by the 256 bytes and the pieces.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import models

from jumok.batches.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.data.tokenizers.backend import BackendTokenizer, encode_batch, read_backend
from jumok.data.tokenizers.vocabulary import BYTE_PIECES, SPACE, TokenizerConfig, train_backend
from jumok.errors import InputError

BYTE_OF_PIECE = {piece: byte for byte, piece in enumerate(BYTE_PIECES)}


@dataclass(frozen=True, eq=False)
class Tokenizer(BackendTokenizer):
    """Text to token ids and back.

    >>> tokenizer = Tokenizer.train(["the dog", "the cat"] * 2, TokenizerConfig("words", vocab_size=50))
    >>> ids = tokenizer.encode(["the dog"])[0]
    >>> tokenizer.ids_to_tokens(ids), tokenizer.decode(ids)
    (['▁the', '▁dog'], 'the dog')
    """

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> Tokenizer:
        """Train a vocabulary. The same lines give the same tokenizer, byte for byte.

        All distinct words of the lines are held in memory.
        """
        return cls(train_backend(lines, config))

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line, without special tokens."""
        return [encoding.ids for encoding in encode_batch(self.backend.encode_batch_fast, lines)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens except ``<unk>``."""
        return self.backend.decode([i for i in ids if i not in (PAD, BOS, EOS)], skip_special_tokens=False)

    def word_ids_from_text(self, text: str) -> list[int]:
        """The index in ``text.split()`` of the word of each token of ``encode([text])[0]``."""
        encoded = self.backend.encode(text, add_special_tokens=False)
        normalized = self.backend.normalizer.normalize_str(text)
        pieces = self.backend.pre_tokenizer.pre_tokenize_str(normalized)
        word_numbers = _number_words([piece.replace(SPACE, " ") for piece, _ in pieces])
        return [word_numbers[i] for i in encoded.word_ids if i is not None]

    def word_ids_from_ids(self, ids: Iterable[int]) -> list[int]:
        """The index in ``decode(ids).split()`` of the word of each id; -1 for ids that are not decoded.

        If the text is known, use ``word_ids_from_text``: ``<unk>`` does not include the space before it, so
        it counts as a separate word here.
        """
        ids = list(ids)
        numbers = iter(_number_words(self._decode_each([i for i in ids if i not in (PAD, BOS, EOS)])))
        return [-1 if i in (PAD, BOS, EOS) else next(numbers) for i in ids]

    def _decode_each(self, ids: Sequence[int]) -> list[str]:
        """The text of each id. A character of several bytes belongs to the first byte."""
        texts: list[str] = []
        for are_bytes, pieces in itertools.groupby(self.ids_to_tokens(ids), BYTE_OF_PIECE.__contains__):
            if not are_bytes:
                texts += (piece.replace(SPACE, " ") for piece in pieces)
                continue
            raw = bytes(BYTE_OF_PIECE[piece] for piece in pieces)
            try:
                for character in raw.decode():
                    texts += [character, *[""] * (len(character.encode()) - 1)]
            except UnicodeDecodeError:
                texts += "�" * len(raw)
        if isinstance(self.backend.model, models.WordLevel):
            texts = [" <unk>" if i == UNK else text for i, text in zip(ids, texts, strict=True)]
        return texts

    def save(self, path: Path) -> None:
        """Save as JSON, in the format of the ``tokenizers`` library."""
        self.write_backend(path)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load what :meth:`save` wrote."""
        backend = read_backend(path)
        for i, token in enumerate(SPECIAL_TOKENS):
            if backend.id_to_token(i) != token:
                raise InputError(f"{path}: id {i} is {backend.id_to_token(i)!r}; in jumok it is {token!r}")
        return cls(backend)


@dataclass(frozen=True, eq=False)
class TokenizerPair:
    """The tokenizers of both sides: a shared one, or two."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def train(cls, examples: Iterable[TranslationExample], config: TokenizerConfig) -> TokenizerPair:
        """Train on both sides of the first ``config.max_training_examples`` examples, in a single pass."""
        examples = itertools.islice(examples, config.max_training_examples)
        if config.shared_vocabulary:
            shared = Tokenizer.train(
                (text for example in examples for text in (example.source, example.target)), config
            )
            return cls(shared, shared)
        # While the source side is processed, the target side is buffered on disk.
        with tempfile.TemporaryFile("w+", encoding="utf-8") as target_file:

            def sources() -> Iterator[str]:
                for example in examples:
                    target_file.write(json.dumps(example.target) + "\n")
                    yield example.source

            source = Tokenizer.train(sources(), config)
            target_file.seek(0)
            return cls(source, Tokenizer.train(map(json.loads, target_file), config))

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
        """Load what :meth:`save` wrote."""
        if (folder / "tokenizer.source.json").exists():
            names = ("tokenizer.source.json", "tokenizer.target.json")
            return cls(*(Tokenizer.load(folder / name) for name in names))
        shared = Tokenizer.load(folder / "tokenizer.json")
        return cls(shared, shared)


def _number_words(texts: Sequence[str]) -> list[int]:
    """The index of the word of each part of a text. A space belongs to the next word."""
    numbers = []
    word, is_between = -1, True
    for text in texts:
        is_between = is_between or text[:1].isspace()
        if is_between and text.strip():
            word, is_between = word + 1, False
        numbers.append(word + is_between)
    return [max(0, min(number, word)) for number in numbers]
