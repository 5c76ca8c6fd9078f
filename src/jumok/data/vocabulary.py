"""Learning the vocabulary of a tokenizer: the ``tokenizers`` library's trainers, put right in three ways.

- The same lines give the same vocabulary, to the byte. The trainers go through hash tables in an order of
  chance, which shows in the last digits of a unigram model, and in which of equally rare characters are kept.
- A unigram vocabulary has whole words.
- Special tokens and bytes have ids of their own that no text leads to.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from jumok.batch import SPECIAL, UNK
from jumok.data.segmentation import SCRIPTS, word_pattern
from jumok.errors import InputError

__all__ = ["BYTES", "SPACE", "TextConfig", "learned"]

SPACE = "▁"
END = "\ufdd0"  # of a word, while a unigram model is trained; Unicode bars this character from text
# White space of any kind, line ends among it, as ``str.split`` takes it: a translation is a line.
WHITE = "[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
# The space, and the characters that special tokens and bytes are written with, are always in the vocabulary:
# so their names in a text are always spelled out.
SPELLING = sorted({SPACE, *"".join(SPECIAL + BYTES)})
# A word (see :mod:`jumok.data.segmentation`) or an escaped sign of Moses' (&apos;s), each with the space
# before it. In Oniguruma \w is a letter, a mark or a decimal digit, and outside of [ ] also ² or ½.
_LETTER = rf"\p{{Nd}}¹²³¼½¾[\w&&[^{SCRIPTS}]]"
_WORD = word_pattern(_LETTER, no_sign=rf"\w{SPACE}")
WORD = rf"{SPACE}?(?:&\w+;\w*|{_WORD}|\w)|{SPACE}"
# What a piece may not reach beyond: letters and digits, an escaped sign, other signs.
PART = rf"{SPACE}?(?:&\w+;|\w+|[^\w{SPACE}{END}]+)|{SPACE}|{END}"


@dataclass(frozen=True)
class TextConfig:
    """How text becomes tokens."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    kind: Literal["bpe", "unigram", "words", "characters"] = "bpe"
    size: int = 8000  # of the vocabulary, special tokens and bytes included; it may come out smaller
    joint: bool = True  # one vocabulary for both languages
    lower: bool = False
    bytes: bool = True  # spell what is not in the vocabulary in bytes (never in words)
    least: int = 2  # times that a word, or a pair of pieces, was seen; what is rarer is no piece
    pairs: int = 1_000_000  # that the vocabulary is learned from, the first ones

    def __post_init__(self) -> None:
        least = len(SPECIAL) + len(SPELLING) + (len(BYTES) if self.has_bytes else 0) + 1
        if self.size < least:
            raise InputError(f"size {self.size} is too small a vocabulary: {self.kind} needs {least} or more")
        if self.least < 1:
            raise InputError(f"least {self.least}: a piece is seen once or more")
        if self.pairs < 1:
            raise InputError(f"pairs {self.pairs}: a vocabulary is learned from one pair or more")

    @property
    def has_bytes(self) -> bool:
        """Words are whole or unknown: only pieces can be bytes."""
        return self.bytes and self.kind != "words"


def learned(lines: Iterable[str], config: TextConfig) -> tokenizers.Tokenizer:
    """A tokenizer with a vocabulary of these lines."""
    room = config.size - len(SPECIAL) - (len(BYTES) if config.has_bytes else 0)
    # Rare characters can be bytes, and leave room for longer pieces.
    characters = max(len(SPELLING) + 1, room // 2) if config.kind == "bpe" and config.has_bytes else room
    trainee, shape = (_shaped(tokenizers.Tokenizer(_empty(config)), config) for _ in range(2))
    lines = _some(lines)
    if config.kind == "unigram":
        lines = _with_ends(lines, shape)
        trainee.pre_tokenizer = pre_tokenizers.Split(Regex(f"(?:{PART}){END}?|{END}"), "isolated")
    elif config.kind != "words":
        lines = _with_clear_counts(lines, shape, characters)
    try:
        with _one_thread():  # sums of floats depend on their order
            trainee.train_from_iterator(lines, _trainer(config, room, characters))
    except Exception as error:
        if "not large enough" not in str(error):
            raise
        raise InputError(
            f"a unigram vocabulary of {config.size} cannot hold all characters of the text; "
            "give it a larger size, or use bpe, which spells rare characters in bytes"
        ) from None
    return _shaped(tokenizers.Tokenizer(_model(json.loads(trainee.to_str())["model"], config)), config)


def _with_ends(lines: Iterator[str], shape: tokenizers.Tokenizer) -> Iterator[str]:
    """The lines, and then every distinct word once more with the mark END behind it.

    The unigram trainer takes for possible pieces what occurs before different characters in its list of
    distinct words. A whole word occurs there once: it would never be a piece, and sentences would come out a
    seventh longer. Before END it occurs a second time.
    """
    words: set[str] = set()
    for line in lines:
        normal = shape.normalizer.normalize_str(line)
        words.update(word for word, _ in shape.pre_tokenizer.pre_tokenize_str(normal))
        yield line
    for word in sorted(words):
        yield END + word.replace(SPACE, " ") + END


def _with_clear_counts(lines: Iterator[str], shape: tokenizers.Tokenizer, characters: int) -> Iterator[str]:
    """The lines, and then some characters once more, so that it is clear which are the most frequent ones.

    The BPE trainer keeps so many ``characters``; where several are equally frequent, and not all can be kept,
    it takes any. Of these, those with the lowest code points come here once more, between ENDs.
    """
    counts = np.zeros(0x110000, np.int64)
    while some := list(itertools.islice(lines, 1000)):
        normal = shape.normalizer.normalize_str(" ".join(some))
        counts += np.bincount(np.frombuffer(normal.encode("utf-32-le"), np.uint32), minlength=len(counts))
        yield from some
    counts[list(map(ord, SPELLING))] = 0  # these are kept anyway
    seen = np.flatnonzero(counts)
    kept = seen[np.lexsort((seen, -counts[seen]))][: characters - len(SPELLING)]
    if len(kept) < len(seen):
        for code in kept[counts[kept] == counts[kept[-1]]]:
            yield END + chr(code) + END


def _shaped(tokenizer: tokenizers.Tokenizer, config: TextConfig) -> tokenizers.Tokenizer:
    """With all around the model: how text is made uniform, cut before the model, and put together again."""
    is_characters = config.kind == "characters"
    steps: list[Any] = [normalizers.NFC(), normalizers.Replace(SPACE, "_")]
    if config.lower:
        steps += [normalizers.Lowercase(), normalizers.NFC()]
    if not is_characters:
        steps.append(normalizers.Prepend(SPACE))  # every word begins alike
    steps.append(normalizers.Replace(Regex(WHITE), SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    cut = {"words": WORD, "characters": r"[\s\S]"}.get(config.kind, PART)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(cut), "isolated")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps.append(decoders.Replace(Regex(WHITE), " "))  # a model may say any bytes
    if config.kind == "words":
        steps.insert(0, decoders.Replace(SPECIAL[UNK], SPACE + SPECIAL[UNK]))
    if not is_characters:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _empty(config: TextConfig) -> models.Model:
    if config.kind == "words":
        return models.WordLevel(unk_token=SPECIAL[UNK])
    return models.Unigram() if config.kind == "unigram" else models.BPE(unk_token=SPECIAL[UNK])


def _trainer(config: TextConfig, room: int, characters: int) -> trainers.Trainer:
    special = list(SPECIAL)
    size = len(special) + room + 1  # and END, which goes again
    if config.kind == "words":
        return trainers.WordLevelTrainer(
            vocab_size=size - 2,  # a single space comes in any case
            min_frequency=config.least,
            special_tokens=special,
            show_progress=False,
        )
    if config.kind == "unigram":
        return trainers.UnigramTrainer(
            vocab_size=size,
            special_tokens=special,
            unk_token=SPECIAL[UNK],
            initial_alphabet=SPELLING,
            show_progress=False,
        )
    return trainers.BpeTrainer(
        vocab_size=0 if config.kind == "characters" else size,  # 0: characters are all, none are joined
        min_frequency=config.least,
        special_tokens=special,
        limit_alphabet=characters + 1,
        initial_alphabet=[*SPELLING, END],
        show_progress=False,
    )


def _model(trained: dict[str, Any], config: TextConfig) -> models.Model:
    """The trained model with the bytes behind the special tokens, and none of these to be found in a text."""
    more = BYTES if config.has_bytes else ()
    first = [*SPECIAL, *more]
    if config.kind == "unigram":
        own = {*SPECIAL, END}
        scores = _settled([(piece, score) for piece, score in trained["vocab"] if piece not in own])
        # Far below what spelling these names takes, and so never chosen.
        never = min(score for _, score in scores) - 1000.0
        return models.Unigram([*((piece, never) for piece in first), *scores], UNK, bool(more))
    by_id = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    if END in by_id:
        by_id.remove(END)
    if config.kind == "words":
        first.append(SPACE)  # the second of two spaces is a word
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*first, *by_id]))}
    if config.kind == "words":
        return models.WordLevel(vocabulary, SPECIAL[UNK])
    merges = [tuple(merge) for merge in trained["merges"]]
    return models.BPE(vocabulary, merges, unk_token=SPECIAL[UNK], byte_fallback=bool(more))


def _settled(scores: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The scores of a unigram model without what differs from one training to the next.

    The trainer goes through hash tables in an order of chance. That shows in the last digits of its sums, and
    in the scores of the rarest characters, which it makes distinct by steps of 0.0001 above the lowest.
    """
    lowest = min(score for _, score in scores)
    spread = 0.0001 * (sum(len(piece) == 1 for piece, _ in scores) + 1)
    settled = [
        (piece, round(lowest if len(piece) == 1 and score < lowest + spread else score, 4))
        for piece, score in scores
    ]
    return sorted(settled, key=lambda one: (-one[1], one[0]))


def _some(lines: Iterable[str]) -> Iterator[str]:
    """The lines, of which there must be one."""
    empty = True
    for line in lines:
        empty = False
        yield line
    if empty:
        raise InputError("there is no text to learn a vocabulary from")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
