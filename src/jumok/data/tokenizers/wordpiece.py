"""WordPiece, BERT's way from text to token ids: words, cut into the longest pieces that the vocabulary has.

::

    "Unbelievable, 친구와!"   →   un ##believ ##able , 친구 ##와 !

Text is cleaned of control characters, Chinese characters and signs become words of their own, and letters are
made small if asked. Accents stay unless asked: to take them away splits a Hangul syllable into its letters.

A vocabulary is learned from text, or read from a Hugging Face folder, and then gives the ids and places that
``transformers`` gives. No text makes a special token, unless one asks for it: "[SEP]" in a sentence is three
pieces.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jumok.errors import InputError
from jumok.files import atomic_write, read_json

__all__ = ["SPECIAL_TOKENS", "WordPieceConfig", "WordPieceEncoding", "WordPieceTokenizer"]

# Their usual names. In a vocabulary of ours they have the ids 0 to 4; elsewhere, any.
SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
CONTINUATION_PREFIX = "##"  # before a piece that does not begin a word
CHARACTER_COVERAGE = (
    0.9999  # of the characters of words are in the vocabulary, and of all others, if there is room
)
MAX_ALPHABET_FRACTION = (
    6  # at most a sixth of a vocabulary is single characters; each may be in it twice, inside words too
)
MIN_PAIR_COUNT = 2  # a pair of pieces that was seen once only is no piece


@dataclass(frozen=True)
class WordPieceConfig:
    """The ``text:`` section of BERT's recipes: which vocabulary."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    vocab_size: int = (
        8000  # of the vocabulary that is learned, special tokens included; it may come out smaller
    )
    lowercase: bool = True
    strip_accents: bool = False  # é becomes e; never for Korean, whose syllables would fall apart
    max_training_examples: int = 1_000_000  # that the vocabulary is learned from, the first ones
    initial_alphabet: str = ""  # that are in the vocabulary, seldom as they may be in this text: ㅋㅠ
    pretrained: str | None = (
        None  # a run or a Hugging Face folder whose vocabulary is taken, and none learned
    )

    def __post_init__(self) -> None:
        if self.vocab_size < 100:
            raise ValueError(f"size={self.vocab_size}: 100 or more is expected")
        if self.max_training_examples < 1:
            raise ValueError(f"documents={self.max_training_examples}: 1 or more is expected")


@dataclass(frozen=True)
class WordPieceEncoding:
    """The pieces of one text: ids, the characters each one spans, and the number of the word it is in.

    A word is what lies between spaces and signs; of a text that came as words, it is one of these, and the
    characters are counted from its beginning.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    word_ids: list[int | None]  # None: a special token


@dataclass(frozen=True, eq=False)
class WordPieceTokenizer:
    """Text to token ids and back.

    >>> pieces = WordPieceTokenizer.train(["the cat sat", "the cats sat"], vocab_size=100)
    >>> ids = pieces.encode(["The cat"])[0]
    >>> pieces.ids_to_tokens(ids), pieces.decode(ids)
    (['the', 'cat'], 'the cat')
    >>> pieces.encode_with_offsets("a cat").offsets
    [(0, 1), (2, 5)]
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]  # of the special tokens, by what they are for: pad, unk, cls, sep, mask

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
        """Learn a vocabulary, with these ``initial_alphabet``. The same texts give the same one, to the byte.

        ``texts`` are gone through twice, so that a list will do and an iterator will not. All distinct words
        are held in memory.
        """
        if iter(texts) is texts:
            raise InputError("a vocabulary is learned from texts that can be gone through twice: give a list")
        shape = _configure_backend(
            models.WordPiece({}, unk_token=SPECIAL_TOKENS["unk"]), lowercase, strip_accents
        )
        alphabet = _choose_alphabet(texts, shape, vocab_size, initial_alphabet)
        # The trainer numbers the characters inside words in an order of chance, and decides between equally
        # frequent pairs by these numbers. Named as special tokens, they come in an order of ours.
        inside = [
            CONTINUATION_PREFIX + character for character in alphabet if _can_continue_word(character, shape)
        ]
        trainer = trainers.WordPieceTrainer(
            vocab_size=max(vocab_size, len(SPECIAL_TOKENS) + len(inside) + len(alphabet)),
            min_frequency=MIN_PAIR_COUNT,
            special_tokens=[*SPECIAL_TOKENS.values(), *inside],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
            continuing_subword_prefix=CONTINUATION_PREFIX,
        )
        shape.train_from_iterator(texts, trainer)
        learned = json.loads(shape.to_str())["model"]["vocab"]
        order = sorted(learned, key=learned.__getitem__)
        vocabulary = {piece: number for number, piece in enumerate(order)}
        model = models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS["unk"])
        return cls._from_backend(
            _configure_backend(model, lowercase, strip_accents), SPECIAL_TOKENS, "the vocabulary"
        )

    @classmethod
    def load(cls, folder: Path) -> WordPieceTokenizer:
        """From a run, or a Hugging Face folder: ``tokenizer.json``, or ``vocab.txt`` with its settings."""
        folder = Path(folder)
        config = _read_optional_json(folder / "tokenizer_config.json")
        names = {
            what: _get_token_name(config.get(f"{what}_token")) or usual
            for what, usual in SPECIAL_TOKENS.items()
        }
        path = folder / "tokenizer.json"
        if path.is_file():
            try:
                inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
            except Exception as error:  # the library raises nothing narrower
                raise InputError(f"{path} is not a tokenizer: {error}") from None
            return cls._from_backend(inner, names, str(path))
        path = folder / "vocab.txt"
        if not path.is_file():
            raise InputError(f"{folder} has no vocabulary: neither tokenizer.json nor vocab.txt is there")
        # Only a newline ends a token: other white space may be one.
        lines = path.read_bytes().decode().removesuffix("\n").split("\n")
        vocabulary = {line.removesuffix("\r"): number for number, line in enumerate(lines)}
        inner = _configure_backend(
            models.WordPiece(vocabulary, unk_token=names["unk"]),
            lowercase=bool(config.get("do_lower_case", True)),
            strip_accents=config.get("strip_accents"),
            split_chinese=bool(config.get("tokenize_chinese_chars", True)),
            compose_accents=False,
        )
        return cls._from_backend(inner, names, str(path))

    @classmethod
    def _from_backend(
        cls, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], source: str
    ) -> WordPieceTokenizer:
        """With the special tokens known as such, and nothing cut or filled up."""
        missing = [name for name in special_tokens.values() if backend.token_to_id(name) is None]
        if missing:
            raise InputError(f"{source} lacks {', '.join(missing)}; a vocabulary of BERT has all of these: "
                             f"{', '.join(special_tokens.values())}")  # fmt: skip
        backend.no_padding()
        backend.no_truncation()
        backend.add_special_tokens(list(special_tokens.values()))
        cls_, sep = (
            (special_tokens[what], backend.token_to_id(special_tokens[what])) for what in ("cls", "sep")
        )
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls_[0]}:0 $A:0 {sep[0]}:0",
            pair=f"{cls_[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1",
            special_tokens=[cls_, sep],
        )
        return cls(backend, dict(special_tokens))

    def save(self, folder: Path) -> None:
        """As ``tokenizer.json``, which ``tokenizers`` and ``transformers`` read too."""
        with atomic_write(folder / "tokenizer.json") as part:
            part.write_text(self.backend.to_str(pretty=True), encoding="utf-8")

    # ------------------------------------------------------------------------------------ special tokens

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return self.backend.get_vocab_size()

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
        """The ids of all five."""
        return [self._special_id(what) for what in self.special_tokens]

    def _special_id(self, role: str) -> int:
        found = self.backend.token_to_id(self.special_tokens[role])
        assert found is not None  # checked when it was made
        return found

    # ------------------------------------------------------------------------------------ there and back

    def encode(self, texts: Sequence[str], *, allow_special: bool = False) -> list[list[int]]:
        """The ids of each text, without [CLS] and [SEP]. With ``special``, "[MASK]" in a text is a mask."""
        encoded = self._encode_batch(
            texts, allow_special=allow_special, is_pretokenized=False, with_offsets=False
        )
        return [one.ids for one in encoded]

    def encode_with_offsets(
        self, text: str | Sequence[str], *, allow_special: bool = False
    ) -> WordPieceEncoding:
        """The pieces of a text, or of the words it is already divided into, and where they are in it."""
        return self.encode_batch_with_offsets([text], allow_special=allow_special)[0]

    def encode_batch_with_offsets(
        self, texts: Sequence[str | Sequence[str]], *, allow_special: bool = False
    ) -> list[WordPieceEncoding]:
        """The same of many texts, all of the one kind or the other."""
        words = bool(texts) and not isinstance(texts[0], str)
        given = [text if isinstance(text, str) else list(text) for text in texts]
        encoded = self._encode_batch(
            given, allow_special=allow_special, is_pretokenized=words, with_offsets=True
        )
        return [WordPieceEncoding(one.ids, one.offsets, one.word_ids) for one in encoded]

    def join_segments(
        self, first: Sequence[int], second: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """One or two sequences of ids as BERT reads them, and the segment of each.

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
        """The text of some ids; of the special tokens only those show that stand for a word."""
        hidden = {self.pad_id, self.cls_id, self.sep_id}
        return self.backend.decode([i for i in ids if i not in hidden], skip_special_tokens=False)

    def ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as it stands in the vocabulary."""
        found = []
        for i in ids:
            token = self.backend.id_to_token(i) if i >= 0 else None
            if token is None:
                raise InputError(f"token id {i} came; this vocabulary has 0 to {self.vocab_size - 1}")
            found.append(token)
        return found

    pieces = ids_to_tokens  # as the viewer asks

    @functools.cached_property
    def is_continuation(self) -> NDArray[np.bool_]:
        """For each id whether it goes on with the word of the piece before it."""
        return np.array(
            [token.startswith(CONTINUATION_PREFIX) for token in self.ids_to_tokens(range(self.vocab_size))]
        )

    @property
    def fingerprint(self) -> str:
        """Another one for every other tokenizer."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same, only that the names of special tokens are text like any other."""
        copied = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copied.encode_special_tokens = True
        return copied

    def _encode_batch(
        self, texts: Sequence[Any], *, allow_special: bool, is_pretokenized: bool, with_offsets: bool
    ) -> list[Any]:
        inner = self.backend if allow_special else self._plain_backend
        encode = inner.encode_batch if with_offsets else inner.encode_batch_fast
        try:
            found: list[Any] = encode(list(texts), is_pretokenized=is_pretokenized, add_special_tokens=False)
        except TypeError:
            told = next((text for text in texts if not _is_valid_text(text)), None)
            raise InputError(f"{told!r} is no text that can be written in UTF-8") from None
        return found


def _configure_backend(
    model: models.Model,
    lowercase: bool,
    strip_accents: bool | None,
    *,
    split_chinese: bool = True,
    compose_accents: bool = True,
) -> tokenizers.Tokenizer:
    """The model with all around it. ``compose_accents``: a letter and its accent become one."""
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
    """The most frequent characters, of equally frequent ones those with the lowest numbers.

    First those of words: without one of them, the whole word is unknown; without a sign, that sign.
    """
    counts = np.zeros(0x110000, np.int64)
    for text in texts:
        normal = pipeline.normalizer.normalize_str(text)
        codes, times = np.unique(np.frombuffer(normal.encode("utf-32-le"), np.uint32), return_counts=True)
        counts[codes] += times
    spaces = [code for code in np.flatnonzero(counts) if chr(code).isspace()]
    counts[spaces] = 0
    if not counts.any():
        raise InputError("there is no text to learn a vocabulary from")
    seen = np.flatnonzero(counts)
    seen = seen[np.lexsort((seen, -counts[seen]))]
    inside = np.array([_can_continue_word(chr(code), pipeline) for code in seen])
    chosen = [
        code
        for kind in (seen[inside], seen[~inside])
        for code in kind[
            : int(np.searchsorted(np.cumsum(counts[kind]), CHARACTER_COVERAGE * counts[kind].sum())) + 1
        ]
    ]
    found = set(map(chr, chosen[: max(1, vocab_size // MAX_ALPHABET_FRACTION)]))
    return sorted(found.union(pipeline.normalizer.normalize_str(initial_alphabet)) - {" "})


def _can_continue_word(character: str, pipeline: tokenizers.Tokenizer) -> bool:
    """Whether a character can stand inside a word, unlike a sign or a Chinese character."""
    normal = pipeline.normalizer.normalize_str(f"a{character}")
    return len(pipeline.pre_tokenizer.pre_tokenize_str(normal)) == 1


def _read_optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found: dict[str, Any] = read_json(path, dict)
    return found


def _get_token_name(value: object) -> str | None:
    """The name of a token, which some files wrap in an object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _is_valid_text(text: object) -> bool:
    try:
        texts = [text] if isinstance(text, str) else list(text)  # type: ignore[call-overload]
        return all(isinstance(one, str) and bool(one.encode() or True) for one in texts)
    except (TypeError, UnicodeEncodeError):
        return False
