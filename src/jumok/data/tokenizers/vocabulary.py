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

from jumok.batches.tokens import SPECIAL_TOKENS, UNK
from jumok.data.tokenizers.segmentation import SPACELESS_SCRIPTS, build_word_pattern
from jumok.errors import InputError

__all__ = ["BYTE_PIECES", "SPACE", "TokenizerConfig", "train_backend"]

SPACE = "▁"
WORD_END = "\ufdd0"  # of a word, while a unigram model is trained; Unicode bars this character from text
# White space of any kind, line ends among it, as ``str.split`` takes it: a translation is a line.
WHITESPACE = "[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
# The space, and the characters that special tokens and bytes are written with, are always in the vocabulary:
# so their names in a text are always spelled out.
REQUIRED_CHARACTERS = sorted({SPACE, *"".join(SPECIAL_TOKENS + BYTE_PIECES)})
# A word (see :mod:`jumok.data.segmentation`) or an escaped sign of Moses' (&apos;s), each with the space
# before it. In Oniguruma \w is a letter, a mark or a decimal digit, and outside of [ ] also ² or ½.
_WORD_LETTER = rf"\p{{Nd}}¹²³¼½¾[\w&&[^{SPACELESS_SCRIPTS}]]"
_UNPREFIXED_WORD = build_word_pattern(_WORD_LETTER, not_symbol=rf"\w{SPACE}")
WORD_PATTERN = rf"{SPACE}?(?:&\w+;\w*|{_UNPREFIXED_WORD}|\w)|{SPACE}"
# What a piece may not reach beyond: letters and digits, an escaped sign, other signs.
PIECE_PATTERN = rf"{SPACE}?(?:&\w+;|\w+|[^\w{SPACE}{WORD_END}]+)|{SPACE}|{WORD_END}"


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    type: Literal["bpe", "unigram", "words", "characters"] = "bpe"
    vocab_size: int = 8000  # of the vocabulary, special tokens and bytes included; it may come out smaller
    shared_vocabulary: bool = True  # one vocabulary for both languages
    lowercase: bool = False
    byte_fallback: bool = True  # spell what is not in the vocabulary in bytes (never in words)
    min_count: int = 2  # times that a word, or a pair of pieces, was seen; what is rarer is no piece
    max_training_examples: int = 1_000_000  # that the vocabulary is learned from, the first ones

    def __post_init__(self) -> None:
        least = (
            len(SPECIAL_TOKENS)
            + len(REQUIRED_CHARACTERS)
            + (len(BYTE_PIECES) if self.uses_byte_fallback else 0)
            + 1
        )
        if self.vocab_size < least:
            raise InputError(
                f"size {self.vocab_size} is too small a vocabulary: {self.type} needs {least} or more"
            )
        if self.min_count < 1:
            raise InputError(f"least {self.min_count}: a piece is seen once or more")
        if self.max_training_examples < 1:
            raise InputError(
                f"pairs {self.max_training_examples}: a vocabulary is learned from one pair or more"
            )

    @property
    def uses_byte_fallback(self) -> bool:
        """Words are whole or unknown: only pieces can be bytes."""
        return self.byte_fallback and self.type != "words"


def train_backend(lines: Iterable[str], config: TokenizerConfig) -> tokenizers.Tokenizer:
    """A tokenizer with a vocabulary of these lines."""
    room = config.vocab_size - len(SPECIAL_TOKENS) - (len(BYTE_PIECES) if config.uses_byte_fallback else 0)
    # Rare characters can be bytes, and leave room for longer pieces.
    characters = (
        max(len(REQUIRED_CHARACTERS) + 1, room // 2)
        if config.type == "bpe" and config.uses_byte_fallback
        else room
    )
    trainee, shape = (
        _configure_pipeline(tokenizers.Tokenizer(_make_untrained_model(config)), config) for _ in range(2)
    )
    lines = _require_lines(lines)
    if config.type == "unigram":
        lines = _add_word_ends(lines, shape)
        trainee.pre_tokenizer = pre_tokenizers.Split(
            Regex(f"(?:{PIECE_PATTERN}){WORD_END}?|{WORD_END}"), "isolated"
        )
    elif config.type != "words":
        lines = _break_count_ties(lines, shape, characters)
    try:
        with _use_single_thread():  # sums of floats depend on their order
            trainee.train_from_iterator(lines, _make_trainer(config, room, characters))
    except Exception as error:
        if "not large enough" not in str(error):
            raise
        raise InputError(
            f"a unigram vocabulary of {config.vocab_size} cannot hold all characters of the text; "
            "give it a larger size, or use bpe, which spells rare characters in bytes"
        ) from None
    return _configure_pipeline(
        tokenizers.Tokenizer(_make_model(json.loads(trainee.to_str())["model"], config)), config
    )


def _add_word_ends(lines: Iterator[str], pipeline: tokenizers.Tokenizer) -> Iterator[str]:
    """The lines, and then every distinct word once more with the mark END behind it.

    The unigram trainer takes for possible pieces what occurs before different characters in its list of
    distinct words. A whole word occurs there once: it would never be a piece, and sentences would come out a
    seventh longer. Before END it occurs a second time.
    """
    words: set[str] = set()
    for line in lines:
        normal = pipeline.normalizer.normalize_str(line)
        words.update(word for word, _ in pipeline.pre_tokenizer.pre_tokenize_str(normal))
        yield line
    for word in sorted(words):
        yield WORD_END + word.replace(SPACE, " ") + WORD_END


def _break_count_ties(
    lines: Iterator[str], pipeline: tokenizers.Tokenizer, max_characters: int
) -> Iterator[str]:
    """The lines, and then some characters once more, so that it is clear which are the most frequent ones.

    The BPE trainer keeps so many ``max_characters``; where several are equally frequent, and not all can be kept,
    it takes any. Of these, those with the lowest code points come here once more, between ENDs.
    """
    counts = np.zeros(0x110000, np.int64)
    while some := list(itertools.islice(lines, 1000)):
        normal = pipeline.normalizer.normalize_str(" ".join(some))
        counts += np.bincount(np.frombuffer(normal.encode("utf-32-le"), np.uint32), minlength=len(counts))
        yield from some
    counts[list(map(ord, REQUIRED_CHARACTERS))] = 0  # these are kept anyway
    seen = np.flatnonzero(counts)
    kept = seen[np.lexsort((seen, -counts[seen]))][: max_characters - len(REQUIRED_CHARACTERS)]
    if len(kept) < len(seen):
        for code in kept[counts[kept] == counts[kept[-1]]]:
            yield WORD_END + chr(code) + WORD_END


def _configure_pipeline(tokenizer: tokenizers.Tokenizer, config: TokenizerConfig) -> tokenizers.Tokenizer:
    """With all around the model: how text is made uniform, cut before the model, and put together again."""
    is_characters = config.type == "characters"
    steps: list[Any] = [normalizers.NFC(), normalizers.Replace(SPACE, "_")]
    if config.lowercase:
        steps += [normalizers.Lowercase(), normalizers.NFC()]
    if not is_characters:
        steps.append(normalizers.Prepend(SPACE))  # every word begins alike
    steps.append(normalizers.Replace(Regex(WHITESPACE), SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    cut = {"words": WORD_PATTERN, "characters": r"[\s\S]"}.get(config.type, PIECE_PATTERN)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(cut), "isolated")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps.append(decoders.Replace(Regex(WHITESPACE), " "))  # a model may say any bytes
    if config.type == "words":
        steps.insert(0, decoders.Replace(SPECIAL_TOKENS[UNK], SPACE + SPECIAL_TOKENS[UNK]))
    if not is_characters:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _make_untrained_model(config: TokenizerConfig) -> models.Model:
    if config.type == "words":
        return models.WordLevel(unk_token=SPECIAL_TOKENS[UNK])
    return models.Unigram() if config.type == "unigram" else models.BPE(unk_token=SPECIAL_TOKENS[UNK])


def _make_trainer(config: TokenizerConfig, num_pieces: int, max_characters: int) -> trainers.Trainer:
    special = list(SPECIAL_TOKENS)
    size = len(special) + num_pieces + 1  # and END, which goes again
    if config.type == "words":
        return trainers.WordLevelTrainer(
            vocab_size=size - 2,  # a single space comes in any case
            min_frequency=config.min_count,
            special_tokens=special,
            show_progress=False,
        )
    if config.type == "unigram":
        return trainers.UnigramTrainer(
            vocab_size=size,
            special_tokens=special,
            unk_token=SPECIAL_TOKENS[UNK],
            initial_alphabet=REQUIRED_CHARACTERS,
            show_progress=False,
        )
    return trainers.BpeTrainer(
        vocab_size=0 if config.type == "characters" else size,  # 0: characters are all, none are joined
        min_frequency=config.min_count,
        special_tokens=special,
        limit_alphabet=max_characters + 1,
        initial_alphabet=[*REQUIRED_CHARACTERS, WORD_END],
        show_progress=False,
    )


def _make_model(trained_model: dict[str, Any], config: TokenizerConfig) -> models.Model:
    """The trained model with the bytes behind the special tokens, and none of these to be found in a text."""
    more = BYTE_PIECES if config.uses_byte_fallback else ()
    first = [*SPECIAL_TOKENS, *more]
    if config.type == "unigram":
        own = {*SPECIAL_TOKENS, WORD_END}
        scores = _stabilize_scores(
            [(piece, score) for piece, score in trained_model["vocab"] if piece not in own]
        )
        # Far below what spelling these names takes, and so never chosen.
        never = min(score for _, score in scores) - 1000.0
        return models.Unigram([*((piece, never) for piece in first), *scores], UNK, bool(more))
    by_id = sorted(trained_model["vocab"], key=trained_model["vocab"].__getitem__)
    if WORD_END in by_id:
        by_id.remove(WORD_END)
    if config.type == "words":
        first.append(SPACE)  # the second of two spaces is a word
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*first, *by_id]))}
    if config.type == "words":
        return models.WordLevel(vocabulary, SPECIAL_TOKENS[UNK])
    merges = [tuple(merge) for merge in trained_model["merges"]]
    return models.BPE(vocabulary, merges, unk_token=SPECIAL_TOKENS[UNK], byte_fallback=bool(more))


def _stabilize_scores(scores: list[tuple[str, float]]) -> list[tuple[str, float]]:
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


def _require_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines, of which there must be one."""
    empty = True
    for line in lines:
        empty = False
        yield line
    if empty:
        raise InputError("there is no text to learn a vocabulary from")


@contextlib.contextmanager
def _use_single_thread() -> Iterator[None]:
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
