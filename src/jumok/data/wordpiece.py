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
from jumok.files import read_json, written

__all__ = ["SPECIAL", "Pieces", "WordPieceConfig", "WordPieces"]

# Their usual names. In a vocabulary of ours they have the ids 0 to 4; elsewhere, any.
SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
INSIDE = "##"  # before a piece that does not begin a word
COVERED = 0.9999  # of the characters of words are in the vocabulary, and of all others, if there is room
ROOM = 6  # at most a sixth of a vocabulary is single characters; each may be in it twice, inside words too
LEAST_FREQUENT = 2  # a pair of pieces that was seen once only is no piece


@dataclass(frozen=True)
class WordPieceConfig:
    """The ``text:`` section of BERT's recipes: which vocabulary."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    size: int = 8000  # of the vocabulary that is learned, special tokens included; it may come out smaller
    lower: bool = True
    strip_accents: bool = False  # é becomes e; never for Korean, whose syllables would fall apart
    documents: int = 1_000_000  # that the vocabulary is learned from, the first ones
    characters: str = ""  # that are in the vocabulary, seldom as they may be in this text: ㅋㅠ
    folder: str | None = None  # a run or a Hugging Face folder whose vocabulary is taken, and none learned

    def __post_init__(self) -> None:
        if self.size < 100:
            raise ValueError(f"size={self.size}: 100 or more is expected")
        if self.documents < 1:
            raise ValueError(f"documents={self.documents}: 1 or more is expected")


@dataclass(frozen=True)
class Pieces:
    """The pieces of one text: ids, the characters each one spans, and the number of the word it is in.

    A word is what lies between spaces and signs; of a text that came as words, it is one of these, and the
    characters are counted from its beginning.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    words: list[int | None]  # None: a special token


@dataclass(frozen=True, eq=False)
class WordPieces:
    """Text to token ids and back.

    >>> pieces = WordPieces.train(["the cat sat", "the cats sat"], size=100)
    >>> ids = pieces.encode(["The cat"])[0]
    >>> pieces.tokens(ids), pieces.decode(ids)
    (['the', 'cat'], 'the cat')
    >>> pieces.located("a cat").spans
    [(0, 1), (2, 5)]
    """

    inner: tokenizers.Tokenizer
    names: Mapping[str, str]  # of the special tokens, by what they are for: pad, unk, cls, sep, mask

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        size: int = 8000,
        *,
        lower: bool = True,
        strip_accents: bool = False,
        characters: str = "",
    ) -> WordPieces:
        """Learn a vocabulary, with these ``characters``. The same texts give the same one, to the byte.

        ``texts`` are gone through twice, so that a list will do and an iterator will not. All distinct words
        are held in memory.
        """
        if iter(texts) is texts:
            raise InputError("a vocabulary is learned from texts that can be gone through twice: give a list")
        shape = _shaped(models.WordPiece({}, unk_token=SPECIAL["unk"]), lower, strip_accents)
        alphabet = _alphabet(texts, shape, size, characters)
        # The trainer numbers the characters inside words in an order of chance, and decides between equally
        # frequent pairs by these numbers. Named as special tokens, they come in an order of ours.
        inside = [INSIDE + character for character in alphabet if _joins(character, shape)]
        trainer = trainers.WordPieceTrainer(
            vocab_size=max(size, len(SPECIAL) + len(inside) + len(alphabet)),
            min_frequency=LEAST_FREQUENT,
            special_tokens=[*SPECIAL.values(), *inside],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
            continuing_subword_prefix=INSIDE,
        )
        shape.train_from_iterator(texts, trainer)
        learned = json.loads(shape.to_str())["model"]["vocab"]
        order = sorted(learned, key=learned.__getitem__)
        vocabulary = {piece: number for number, piece in enumerate(order)}
        model = models.WordPiece(vocabulary, unk_token=SPECIAL["unk"])
        return cls._complete(_shaped(model, lower, strip_accents), SPECIAL, "the vocabulary")

    @classmethod
    def load(cls, folder: Path) -> WordPieces:
        """From a run, or a Hugging Face folder: ``tokenizer.json``, or ``vocab.txt`` with its settings."""
        folder = Path(folder)
        config = _json(folder / "tokenizer_config.json")
        names = {what: _name(config.get(f"{what}_token")) or usual for what, usual in SPECIAL.items()}
        path = folder / "tokenizer.json"
        if path.is_file():
            try:
                inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
            except Exception as error:  # the library raises nothing narrower
                raise InputError(f"{path} is not a tokenizer: {error}") from None
            return cls._complete(inner, names, str(path))
        path = folder / "vocab.txt"
        if not path.is_file():
            raise InputError(f"{folder} has no vocabulary: neither tokenizer.json nor vocab.txt is there")
        # Only a newline ends a token: other white space may be one.
        lines = path.read_bytes().decode().removesuffix("\n").split("\n")
        vocabulary = {line.removesuffix("\r"): number for number, line in enumerate(lines)}
        inner = _shaped(
            models.WordPiece(vocabulary, unk_token=names["unk"]),
            lower=bool(config.get("do_lower_case", True)),
            strip_accents=config.get("strip_accents"),
            chinese=bool(config.get("tokenize_chinese_chars", True)),
            compose=False,
        )
        return cls._complete(inner, names, str(path))

    @classmethod
    def _complete(cls, inner: tokenizers.Tokenizer, names: Mapping[str, str], source: str) -> WordPieces:
        """With the special tokens known as such, and nothing cut or filled up."""
        missing = [name for name in names.values() if inner.token_to_id(name) is None]
        if missing:
            raise InputError(f"{source} lacks {', '.join(missing)}; a vocabulary of BERT has all of these: "
                             f"{', '.join(names.values())}")  # fmt: skip
        inner.no_padding()
        inner.no_truncation()
        inner.add_special_tokens(list(names.values()))
        cls_, sep = ((names[what], inner.token_to_id(names[what])) for what in ("cls", "sep"))
        inner.post_processor = processors.TemplateProcessing(
            single=f"{cls_[0]}:0 $A:0 {sep[0]}:0",
            pair=f"{cls_[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1",
            special_tokens=[cls_, sep],
        )
        return cls(inner, dict(names))

    def save(self, folder: Path) -> None:
        """As ``tokenizer.json``, which ``tokenizers`` and ``transformers`` read too."""
        with written(folder / "tokenizer.json") as part:
            part.write_text(self.inner.to_str(pretty=True), encoding="utf-8")

    # ------------------------------------------------------------------------------------ special tokens

    @property
    def size(self) -> int:
        """The number of ids."""
        return self.inner.get_vocab_size()

    @functools.cached_property
    def pad(self) -> int:
        return self._id("pad")

    @functools.cached_property
    def unk(self) -> int:
        return self._id("unk")

    @functools.cached_property
    def cls(self) -> int:
        return self._id("cls")

    @functools.cached_property
    def sep(self) -> int:
        return self._id("sep")

    @functools.cached_property
    def mask(self) -> int:
        return self._id("mask")

    @property
    def special(self) -> list[int]:
        """The ids of all five."""
        return [self._id(what) for what in self.names]

    def _id(self, what: str) -> int:
        found = self.inner.token_to_id(self.names[what])
        assert found is not None  # checked when it was made
        return found

    # ------------------------------------------------------------------------------------ there and back

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """The ids of each text, without [CLS] and [SEP]. With ``special``, "[MASK]" in a text is a mask."""
        encoded = self._encoded(texts, special=special, words=False, places=False)
        return [one.ids for one in encoded]

    def located(self, text: str | Sequence[str], *, special: bool = False) -> Pieces:
        """The pieces of a text, or of the words it is already divided into, and where they are in it."""
        return self.located_all([text], special=special)[0]

    def located_all(self, texts: Sequence[str | Sequence[str]], *, special: bool = False) -> list[Pieces]:
        """The same of many texts, all of the one kind or the other."""
        words = bool(texts) and not isinstance(texts[0], str)
        given = [text if isinstance(text, str) else list(text) for text in texts]
        encoded = self._encoded(given, special=special, words=words, places=True)
        return [Pieces(one.ids, one.offsets, one.word_ids) for one in encoded]

    def joined(
        self, first: Sequence[int], second: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """One or two sequences of ids as BERT reads them, and the segment of each.

        >>> WordPieces.train(["a b"], size=100).joined([7], [8, 9])
        ([2, 7, 3, 8, 9, 3], [0, 0, 0, 1, 1, 1])
        """
        ids = [self.cls, *first, self.sep]
        segments = [0] * len(ids)
        if second is not None:
            ids += [*second, self.sep]
            segments += [1] * (len(second) + 1)
        return ids, segments

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; of the special tokens only those show that stand for a word."""
        hidden = {self.pad, self.cls, self.sep}
        return self.inner.decode([i for i in ids if i not in hidden], skip_special_tokens=False)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as it stands in the vocabulary."""
        found = []
        for i in ids:
            token = self.inner.id_to_token(i) if i >= 0 else None
            if token is None:
                raise InputError(f"token id {i} came; this vocabulary has 0 to {self.size - 1}")
            found.append(token)
        return found

    pieces = tokens  # as the viewer asks

    @functools.cached_property
    def inside(self) -> NDArray[np.bool_]:
        """For each id whether it goes on with the word of the piece before it."""
        return np.array([token.startswith(INSIDE) for token in self.tokens(range(self.size))])

    @property
    def fingerprint(self) -> str:
        """Another one for every other tokenizer."""
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same, only that the names of special tokens are text like any other."""
        copied = tokenizers.Tokenizer.from_str(self.inner.to_str())
        copied.encode_special_tokens = True
        return copied

    def _encoded(self, texts: Sequence[Any], *, special: bool, words: bool, places: bool) -> list[Any]:
        inner = self.inner if special else self._plain
        encode = inner.encode_batch if places else inner.encode_batch_fast
        try:
            found: list[Any] = encode(list(texts), is_pretokenized=words, add_special_tokens=False)
        except TypeError:
            told = next((text for text in texts if not _is_text(text)), None)
            raise InputError(f"{told!r} is no text that can be written in UTF-8") from None
        return found


def _shaped(
    model: models.Model,
    lower: bool,
    strip_accents: bool | None,
    *,
    chinese: bool = True,
    compose: bool = True,
) -> tokenizers.Tokenizer:
    """The model with all around it. ``compose``: a letter and its accent become one."""
    tokenizer = tokenizers.Tokenizer(model)
    normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lower
    )
    steps = [normalizers.NFC(), normalizer]
    tokenizer.normalizer = normalizers.Sequence(steps) if compose else normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=INSIDE)
    return tokenizer


def _alphabet(texts: Iterable[str], shape: tokenizers.Tokenizer, size: int, always: str) -> list[str]:
    """The most frequent characters, of equally frequent ones those with the lowest numbers.

    First those of words: without one of them, the whole word is unknown; without a sign, that sign.
    """
    counts = np.zeros(0x110000, np.int64)
    for text in texts:
        normal = shape.normalizer.normalize_str(text)
        codes, times = np.unique(np.frombuffer(normal.encode("utf-32-le"), np.uint32), return_counts=True)
        counts[codes] += times
    spaces = [code for code in np.flatnonzero(counts) if chr(code).isspace()]
    counts[spaces] = 0
    if not counts.any():
        raise InputError("there is no text to learn a vocabulary from")
    seen = np.flatnonzero(counts)
    seen = seen[np.lexsort((seen, -counts[seen]))]
    inside = np.array([_joins(chr(code), shape) for code in seen])
    chosen = [
        code
        for kind in (seen[inside], seen[~inside])
        for code in kind[: int(np.searchsorted(np.cumsum(counts[kind]), COVERED * counts[kind].sum())) + 1]
    ]
    found = set(map(chr, chosen[: max(1, size // ROOM)]))
    return sorted(found.union(shape.normalizer.normalize_str(always)) - {" "})


def _joins(character: str, shape: tokenizers.Tokenizer) -> bool:
    """Whether a character can stand inside a word, unlike a sign or a Chinese character."""
    normal = shape.normalizer.normalize_str(f"a{character}")
    return len(shape.pre_tokenizer.pre_tokenize_str(normal)) == 1


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found: dict[str, Any] = read_json(path, dict)
    return found


def _name(told: object) -> str | None:
    """The name of a token, which some files wrap in an object."""
    if isinstance(told, Mapping):
        told = told.get("content")
    return told if isinstance(told, str) else None


def _is_text(text: object) -> bool:
    try:
        texts = [text] if isinstance(text, str) else list(text)  # type: ignore[call-overload]
        return all(isinstance(one, str) and bool(one.encode() or True) for one in texts)
    except (TypeError, UnicodeEncodeError):
        return False
