"""WordPiece, the tokenizer of BERT: words are split into the longest pieces of the vocabulary.

::

    "Unbelievable, 친구와!"   →   un ##believ ##able , 친구 ##와 !

Control characters are removed, Chinese characters and symbols become separate words, and letters are
lower-cased if ``lowercase`` is set. Accents are kept unless ``strip_accents`` is set, which would split
Hangul syllables.

A vocabulary is trained on text, or loaded from a Hugging Face folder, with the same ids and offsets as
``transformers``. No text is encoded as a special token unless ``allow_special`` is set: "[SEP]" in a sentence
is three pieces.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jumok.config import Config
from jumok.data.tokenizers.backend import BackendTokenizer, encode_batch, read_backend
from jumok.errors import InputError
from jumok.files import read_json

# The usual names. In a vocabulary that was trained here, they have the ids 0 to 4.
SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
CONTINUATION_PREFIX = "##"  # of a piece that does not begin a word
CHARACTER_COVERAGE = 0.9999  # share of the characters of words, and of symbols, that are in the vocabulary
MAX_ALPHABET_FRACTION = 6  # at most 1/6 of the vocabulary are characters; each may occur with and without ##
MIN_PAIR_COUNT = 2  # minimum count of a pair of pieces to be merged


@dataclass(frozen=True)
class WordPieceConfig(Config):
    """The ``tokenizer:`` section of BERT recipes."""

    vocab_size: int = 8000  # maximum, including special tokens
    lowercase: bool = True
    strip_accents: bool = False  # é becomes e; not for Korean, because it splits syllables
    max_training_examples: int = 1_000_000  # train on the first so many documents
    initial_alphabet: str = ""  # characters that are always in the vocabulary, such as ㅋㅠ
    pretrained: str | None = None  # a run or a Hugging Face folder whose vocabulary is used instead of training one

    def __post_init__(self) -> None:
        if self.vocab_size < 100:
            raise ValueError(f"vocab_size={self.vocab_size}: expected 100 or more")
        self.check_ranges(positive=("max_training_examples",))


@dataclass(frozen=True)
class WordPieceEncoding:
    """The pieces of a text: their ids, their character offsets, and the indices of their words.

    Words are separated by spaces and symbols. If the input is a list of words, these count, and offsets start
    at the beginning of a word.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    word_ids: list[int | None]  # None: a special token


@dataclass(frozen=True, eq=False)
class WordPieceTokenizer(BackendTokenizer):
    """Text to token ids and back.

    >>> tokenizer = WordPieceTokenizer.train(["the cat sat", "the cats sat"], vocab_size=100)
    >>> ids = tokenizer.encode(["The cat"])[0]
    >>> tokenizer.ids_to_tokens(ids), tokenizer.decode(ids)
    (['the', 'cat'], 'the cat')
    >>> tokenizer.encode_with_offsets(["a cat"])[0].offsets
    [(0, 1), (2, 5)]
    """

    special_tokens: Mapping[str, str]  # by role: pad, unk, cls, sep, mask

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int = 8000,
        *,
        lowercase: bool = True,
        strip_accents: bool = False,
        initial_alphabet: str = "",
    ) -> WordPieceTokenizer:
        """Train a vocabulary with ``initial_alphabet``. The same texts give the same one, byte for byte.

        ``texts`` are iterated twice, so they must not be an iterator. All distinct words are held in memory.
        """
        if iter(texts) is texts:
            raise InputError("texts is an iterator, but they are iterated twice; pass a list")
        pipeline = _configure_backend(models.WordPiece({}, unk_token=SPECIAL_TOKENS["unk"]), lowercase, strip_accents)
        alphabet = _choose_alphabet(texts, pipeline, vocab_size, initial_alphabet)
        # The trainer numbers the characters inside words in random order, and resolves ties between equally
        # frequent pairs by these numbers. As special tokens, they have a fixed order.
        continuations = [
            CONTINUATION_PREFIX + character for character in alphabet if _can_continue_word(character, pipeline)
        ]
        trainer = trainers.WordPieceTrainer(
            vocab_size=max(vocab_size, len(SPECIAL_TOKENS) + len(continuations) + len(alphabet)),
            min_frequency=MIN_PAIR_COUNT,
            special_tokens=[*SPECIAL_TOKENS.values(), *continuations],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
            continuing_subword_prefix=CONTINUATION_PREFIX,
        )
        pipeline.train_from_iterator(texts, trainer)
        trained_vocabulary = json.loads(pipeline.to_str())["model"]["vocab"]
        pieces = sorted(trained_vocabulary, key=trained_vocabulary.__getitem__)
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        model = models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS["unk"])
        return cls._from_backend(_configure_backend(model, lowercase, strip_accents), SPECIAL_TOKENS, "the vocabulary")

    @classmethod
    def load(cls, folder: Path) -> WordPieceTokenizer:
        """Load from a run or a Hugging Face folder: ``tokenizer.json``, or ``vocab.txt`` with its config."""
        folder = Path(folder)
        config_path = folder / "tokenizer_config.json"
        config: dict[str, Any] = read_json(config_path, dict) if config_path.is_file() else {}
        names = {
            role: _get_token_name(config.get(f"{role}_token")) or default for role, default in SPECIAL_TOKENS.items()
        }
        path = folder / "tokenizer.json"
        if path.is_file():
            return cls._from_backend(read_backend(path), names, str(path))
        path = folder / "vocab.txt"
        if not path.is_file():
            raise InputError(f"{folder} has no vocabulary: it contains neither tokenizer.json nor vocab.txt")
        # Only a newline ends a token: other white space may be a token.
        lines = path.read_bytes().decode().removesuffix("\n").split("\n")
        vocabulary = {line.removesuffix("\r"): number for number, line in enumerate(lines)}
        backend = _configure_backend(
            models.WordPiece(vocabulary, unk_token=names["unk"]),
            lowercase=bool(config.get("do_lower_case", True)),
            strip_accents=config.get("strip_accents"),
            split_chinese=bool(config.get("tokenize_chinese_chars", True)),
            compose_accents=False,
        )
        return cls._from_backend(backend, names, str(path))

    @classmethod
    def _from_backend(
        cls, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], source: str
    ) -> WordPieceTokenizer:
        """Register the special tokens, and disable truncation and padding."""
        missing = [name for name in special_tokens.values() if backend.token_to_id(name) is None]
        if missing:
            expected = ", ".join(special_tokens.values())
            raise InputError(f"{source} lacks {', '.join(missing)}; a vocabulary of BERT has all of: {expected}")
        backend.no_padding()
        backend.no_truncation()
        backend.add_special_tokens(list(special_tokens.values()))
        cls_, sep = ((special_tokens[role], backend.token_to_id(special_tokens[role])) for role in ("cls", "sep"))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls_[0]}:0 $A:0 {sep[0]}:0",
            pair=f"{cls_[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1",
            special_tokens=[cls_, sep],
        )
        return cls(backend, dict(special_tokens))

    def save(self, folder: Path) -> None:
        """Save as ``tokenizer.json``, in the format of ``tokenizers`` and ``transformers``."""
        self.write_backend(folder / "tokenizer.json")

    # ------------------------------------------------------------------------------------ special tokens

    @functools.cached_property
    def pad_id(self) -> int:
        return self._special_id("pad")

    @functools.cached_property
    def unk_id(self) -> int:
        return self._special_id("unk")

    @functools.cached_property
    def cls_id(self) -> int:
        return self._special_id("cls")

    @functools.cached_property
    def sep_id(self) -> int:
        return self._special_id("sep")

    @functools.cached_property
    def mask_id(self) -> int:
        return self._special_id("mask")

    @property
    def special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        return [self._special_id(role) for role in self.special_tokens]

    def _special_id(self, role: str) -> int:
        token_id = self.backend.token_to_id(self.special_tokens[role])
        assert token_id is not None  # checked in _from_backend
        return token_id

    # ------------------------------------------------------------------------------------ encode and decode

    def encode(self, texts: Sequence[str], *, allow_special: bool = False) -> list[list[int]]:
        """The ids of each text, without [CLS] and [SEP].

        With ``allow_special``, "[MASK]" in a text is a mask.
        """
        encode = self._choose_backend(allow_special).encode_batch_fast
        return [encoding.ids for encoding in encode_batch(encode, texts)]

    def encode_with_offsets(
        self, texts: Sequence[str | Sequence[str]], *, allow_special: bool = False
    ) -> list[WordPieceEncoding]:
        """The pieces of texts, or of lists of words, with their offsets."""
        is_pretokenized = bool(texts) and not isinstance(texts[0], str)
        inputs = [text if isinstance(text, str) else list(text) for text in texts]
        encode = self._choose_backend(allow_special).encode_batch
        return [
            WordPieceEncoding(encoding.ids, encoding.offsets, encoding.word_ids)
            for encoding in encode_batch(encode, inputs, is_pretokenized=is_pretokenized)
        ]

    def join_segments(self, first: Sequence[int], second: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Add [CLS] and [SEP] to one or two sequences of ids. Returns the ids and their segments.

        >>> WordPieceTokenizer.train(["a b"], vocab_size=100).join_segments([7], [8, 9])
        ([2, 7, 3, 8, 9, 3], [0, 0, 0, 1, 1, 1])
        """
        ids = [self.cls_id, *first, self.sep_id]
        segments = [0] * len(ids)
        if second is not None:
            ids += [*second, self.sep_id]
            segments += [1] * (len(second) + 1)
        return ids, segments

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens except those that stand for a word."""
        hidden = {self.pad_id, self.cls_id, self.sep_id}
        return self.backend.decode([i for i in ids if i not in hidden], skip_special_tokens=False)

    @functools.cached_property
    def is_continuation(self) -> NDArray[np.bool_]:
        """Whether each id continues the word of the previous piece."""
        return np.array([token.startswith(CONTINUATION_PREFIX) for token in self.ids_to_tokens(range(self.vocab_size))])

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but the names of special tokens are ordinary text."""
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def _choose_backend(self, allow_special: bool) -> tokenizers.Tokenizer:
        return self.backend if allow_special else self._plain_backend


def _configure_backend(
    model: models.Model,
    lowercase: bool,
    strip_accents: bool | None,
    *,
    split_chinese: bool = True,
    compose_accents: bool = True,
) -> tokenizers.Tokenizer:
    """A tokenizer with this model. ``compose_accents``: a letter and its accent become one (NFC)."""
    tokenizer = tokenizers.Tokenizer(model)
    normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=split_chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    steps = [normalizers.NFC(), normalizer]
    tokenizer.normalizer = normalizers.Sequence(steps) if compose_accents else normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    return tokenizer


def _choose_alphabet(
    texts: Iterable[str], pipeline: tokenizers.Tokenizer, vocab_size: int, initial_alphabet: str
) -> list[str]:
    """The most frequent characters; of equally frequent ones, those with the lowest code points.

    Letters come first: without a letter, whole words are unknown; without a symbol, only that symbol.
    """
    counts = np.zeros(0x110000, np.int64)
    for text in texts:
        normalized = pipeline.normalizer.normalize_str(text)
        codes, code_counts = np.unique(np.frombuffer(normalized.encode("utf-32-le"), np.uint32), return_counts=True)
        counts[codes] += code_counts
    spaces = [code for code in np.flatnonzero(counts) if chr(code).isspace()]
    counts[spaces] = 0
    if not counts.any():
        raise InputError("there is no text to train a vocabulary on")
    by_frequency = np.flatnonzero(counts)
    by_frequency = by_frequency[np.lexsort((by_frequency, -counts[by_frequency]))]
    is_letter = np.array([_can_continue_word(chr(code), pipeline) for code in by_frequency])
    chosen = [
        code
        for group in (by_frequency[is_letter], by_frequency[~is_letter])
        for code in group[
            : int(np.searchsorted(np.cumsum(counts[group]), CHARACTER_COVERAGE * counts[group].sum())) + 1
        ]
    ]
    alphabet = set(map(chr, chosen[: max(1, vocab_size // MAX_ALPHABET_FRACTION)]))
    return sorted(alphabet.union(pipeline.normalizer.normalize_str(initial_alphabet)) - {" "})


def _can_continue_word(character: str, pipeline: tokenizers.Tokenizer) -> bool:
    """Whether a character can occur inside a word, unlike a symbol or a Chinese character."""
    normalized = pipeline.normalizer.normalize_str(f"a{character}")
    return len(pipeline.pre_tokenizer.pre_tokenize_str(normalized)) == 1


def _get_token_name(value: object) -> str | None:
    """The name of a token, which some files wrap in an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
