"""Training of vocabularies with the trainers of the ``tokenizers`` library, corrected in three respects.

- The same lines give the same vocabulary, byte for byte. The trainers iterate over hash tables in random
  order, which affects the last digits of a unigram model, and the choice between equally rare characters.
- A unigram vocabulary contains whole words.
- Special tokens and bytes have ids that no text is encoded to.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from jumok.batches.tokens import SPECIAL_TOKENS, UNK
from jumok.config import Config
from jumok.data.tokenizers.segmentation import SPACELESS_SCRIPTS, build_word_pattern
from jumok.errors import InputError

SPACE = "▁"
WORD_END = "\ufdd0"  # marks the end of a word during unigram training; Unicode reserves it as a noncharacter
# The white space of ``str.split``, including line breaks.
WHITESPACE = "[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
# The space, and the characters in the names of special tokens and bytes, are always in the vocabulary, so
# that such a name in a text can be spelled.
REQUIRED_CHARACTERS = sorted({SPACE, *"".join(SPECIAL_TOKENS + BYTE_PIECES)})
# A word (see :mod:`jumok.data.tokenizers.segmentation`) or an escaped symbol of Moses (&apos;s), each with
# the space before it. In Oniguruma \w is a letter, a mark or a decimal digit, and outside of [ ] also ² or ½.
_WORD_LETTER = rf"\p{{Nd}}¹²³¼½¾[\w&&[^{SPACELESS_SCRIPTS}]]"
_UNPREFIXED_WORD = build_word_pattern(_WORD_LETTER, not_symbol=rf"\w{SPACE}")
WORD_PATTERN = rf"{SPACE}?(?:&\w+;\w*|{_UNPREFIXED_WORD}|\w)|{SPACE}"
# Boundaries of pieces: letters and digits, an escaped symbol, other symbols.
PIECE_PATTERN = rf"{SPACE}?(?:&\w+;|\w+|[^\w{SPACE}{WORD_END}]+)|{SPACE}|{WORD_END}"


@dataclass(frozen=True)
class TokenizerConfig(Config):
    """Config of a :class:`~jumok.data.tokenizers.tokenizer.Tokenizer`."""

    type: Literal["bpe", "unigram", "words", "characters"] = "bpe"
    vocab_size: int = 8000  # maximum, including special tokens and bytes
    shared_vocabulary: bool = True  # one vocabulary for both languages
    lowercase: bool = False
    byte_fallback: bool = True  # encode unknown characters as bytes (not for type "words")
    min_count: int = 2  # minimum count of a word, or of a pair of pieces, to enter the vocabulary
    max_training_examples: int = 1_000_000  # train on the first so many examples

    def __post_init__(self) -> None:
        min_size = (
            len(SPECIAL_TOKENS) + len(REQUIRED_CHARACTERS) + (len(BYTE_PIECES) if self.uses_byte_fallback else 0) + 1
        )
        if self.vocab_size < min_size:
            raise InputError(f"vocab_size={self.vocab_size}: expected {min_size} or more for type {self.type}")
        if self.min_count < 1:
            raise InputError(f"min_count={self.min_count}: expected 1 or more")
        if self.max_training_examples < 1:
            raise InputError(f"max_training_examples={self.max_training_examples}: expected 1 or more")

    @property
    def uses_byte_fallback(self) -> bool:
        """Whether unknown characters are encoded as bytes. With type "words", unknown words are ``<unk>``."""
        return self.byte_fallback and self.type != "words"


def train_backend(lines: Iterable[str], config: TokenizerConfig) -> tokenizers.Tokenizer:
    """Train a tokenizer on these lines."""
    num_pieces = config.vocab_size - len(SPECIAL_TOKENS) - (len(BYTE_PIECES) if config.uses_byte_fallback else 0)
    # Rare characters are encoded as bytes, which leaves room for longer pieces.
    max_characters = (
        max(len(REQUIRED_CHARACTERS) + 1, num_pieces // 2)
        if config.type == "bpe" and config.uses_byte_fallback
        else num_pieces
    )
    trainee, pipeline = (
        _configure_pipeline(tokenizers.Tokenizer(_make_untrained_model(config)), config) for _ in range(2)
    )
    lines = _require_lines(lines)
    if config.type == "unigram":
        lines = _add_word_ends(lines, pipeline)
        trainee.pre_tokenizer = pre_tokenizers.Split(Regex(f"(?:{PIECE_PATTERN}){WORD_END}?|{WORD_END}"), "isolated")
    elif config.type != "words":
        lines = _break_count_ties(lines, pipeline, max_characters)
    try:
        with _use_single_thread():  # floating-point sums depend on their order
            trainee.train_from_iterator(lines, _make_trainer(config, num_pieces, max_characters))
    except Exception as error:
        if "not large enough" not in str(error):
            raise
        raise InputError(
            f"vocab_size={config.vocab_size}: a unigram vocabulary must contain all characters of the text; "
            "increase it, or use type bpe, which encodes rare characters as bytes"
        ) from None
    return _configure_pipeline(tokenizers.Tokenizer(_make_model(json.loads(trainee.to_str())["model"], config)), config)


def _add_word_ends(lines: Iterator[str], pipeline: tokenizers.Tokenizer) -> Iterator[str]:
    """The lines, followed by every distinct word with WORD_END.

    The candidate pieces of the unigram trainer are strings that occur before different characters in its list
    of distinct words. A whole word occurs there once, so it would never become a piece, and sentences would
    be one seventh longer. Followed by WORD_END, it occurs twice.
    """
    words: set[str] = set()
    for line in lines:
        normalized = pipeline.normalizer.normalize_str(line)
        words.update(word for word, _ in pipeline.pre_tokenizer.pre_tokenize_str(normalized))
        yield line
    for word in sorted(words):
        yield WORD_END + word.replace(SPACE, " ") + WORD_END


def _break_count_ties(lines: Iterator[str], pipeline: tokenizers.Tokenizer, max_characters: int) -> Iterator[str]:
    """The lines, followed by some characters again, so that it is clear which are the most frequent ones.

    The BPE trainer keeps the ``max_characters`` most frequent characters. If several are equally frequent and
    not all can be kept, it chooses arbitrarily. The ones with the lowest code points are therefore repeated
    here, between WORD_ENDs.
    """
    counts = np.zeros(0x110000, np.int64)
    while chunk := list(itertools.islice(lines, 1000)):
        normalized = pipeline.normalizer.normalize_str(" ".join(chunk))
        counts += np.bincount(np.frombuffer(normalized.encode("utf-32-le"), np.uint32), minlength=len(counts))
        yield from chunk
    counts[list(map(ord, REQUIRED_CHARACTERS))] = 0  # always kept
    codes = np.flatnonzero(counts)
    frequent_codes = codes[np.lexsort((codes, -counts[codes]))][: max_characters - len(REQUIRED_CHARACTERS)]
    if len(frequent_codes) < len(codes):
        for code in frequent_codes[counts[frequent_codes] == counts[frequent_codes[-1]]]:
            yield WORD_END + chr(code) + WORD_END


def _configure_pipeline(tokenizer: tokenizers.Tokenizer, config: TokenizerConfig) -> tokenizers.Tokenizer:
    """Set the normalizer, the pre-tokenizer and the decoder."""
    is_characters = config.type == "characters"
    steps: list[Any] = [normalizers.NFC(), normalizers.Replace(SPACE, "_")]
    if config.lowercase:
        steps += [normalizers.Lowercase(), normalizers.NFC()]
    if not is_characters:
        steps.append(normalizers.Prepend(SPACE))  # the first word begins like all others
    steps.append(normalizers.Replace(Regex(WHITESPACE), SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    pattern = {"words": WORD_PATTERN, "characters": r"[\s\S]"}.get(config.type, PIECE_PATTERN)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps.append(decoders.Replace(Regex(WHITESPACE), " "))  # a model may generate any bytes
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
    size = len(special) + num_pieces + 1  # and WORD_END, which is removed afterwards
    if config.type == "words":
        return trainers.WordLevelTrainer(
            vocab_size=size - 2,  # a single space is always added
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
        vocab_size=0 if config.type == "characters" else size,  # 0: no merges
        min_frequency=config.min_count,
        special_tokens=special,
        limit_alphabet=max_characters + 1,
        initial_alphabet=[*REQUIRED_CHARACTERS, WORD_END],
        show_progress=False,
    )


def _make_model(trained_model: dict[str, Any], config: TokenizerConfig) -> models.Model:
    """The trained model with bytes after the special tokens, none of which any text is encoded to."""
    byte_pieces = BYTE_PIECES if config.uses_byte_fallback else ()
    reserved = [*SPECIAL_TOKENS, *byte_pieces]
    if config.type == "unigram":
        excluded = {*SPECIAL_TOKENS, WORD_END}
        scores = _stabilize_scores([(piece, score) for piece, score in trained_model["vocab"] if piece not in excluded])
        # Far below the score of spelling these names, so they are never chosen.
        unreachable_score = min(score for _, score in scores) - 1000.0
        return models.Unigram([*((piece, unreachable_score) for piece in reserved), *scores], UNK, bool(byte_pieces))
    by_id = sorted(trained_model["vocab"], key=trained_model["vocab"].__getitem__)
    if WORD_END in by_id:
        by_id.remove(WORD_END)
    if config.type == "words":
        reserved.append(SPACE)  # the second of two spaces is a word
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*reserved, *by_id]))}
    if config.type == "words":
        return models.WordLevel(vocabulary, SPECIAL_TOKENS[UNK])
    merges = [tuple(merge) for merge in trained_model["merges"]]
    return models.BPE(vocabulary, merges, unk_token=SPECIAL_TOKENS[UNK], byte_fallback=bool(byte_pieces))


def _stabilize_scores(scores: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The scores of a unigram model, without the differences between repeated trainings.

    The trainer iterates over hash tables in random order. That affects the last digits of its sums, and the
    scores of the rarest characters, which it makes distinct by steps of 0.0001 above the lowest score.
    """
    lowest = min(score for _, score in scores)
    spread = 0.0001 * (sum(len(piece) == 1 for piece, _ in scores) + 1)
    stable = [
        (piece, round(lowest if len(piece) == 1 and score < lowest + spread else score, 4)) for piece, score in scores
    ]
    return sorted(stable, key=lambda item: (-item[1], item[0]))


def _require_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines. Raises if there are none."""
    is_empty = True
    for line in lines:
        is_empty = False
        yield line
    if is_empty:
        raise InputError("there is no text to train a vocabulary on")


@contextlib.contextmanager
def _use_single_thread() -> Iterator[None]:
    name = "TOKENIZERS_PARALLELISM"
    previous = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous
