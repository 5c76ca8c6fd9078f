"""Encoding of tagged sentences: the tag of a word is the label of its first piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import regex

from jumok.batches.tokens import IGNORE
from jumok.data.batching.texts import EncodedText
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.tagging import TaggingExample, label_first_pieces
from jumok.data.tokenizers.segmentation import COMBINING_MARKS, LETTERS, NOT_SYMBOL, SPACELESS_SYLLABLE, SYMBOL
from jumok.data.tokenizers.windows import TokenWindow, find_central_window, make_windows
from jumok.data.tokenizers.wordpiece import WordPieceEncoding, WordPieceTokenizer
from jumok.inference.line_io import iterate_chunks
from jumok.tasks.fine_tuning import TOO_LONG_HINT
from jumok.tasks.tag.config import TaggingDataConfig

SENTENCES_PER_CHUNK = 1024  # sentences that are tokenized together
# A word of raw text: letters and digits with symbols inside, or a single symbol. The last point of U.N. is part of
# the word, that of a sentence is not.
WORD_PATTERN = regex.compile(
    rf"(?V1)(?:[\p{{L}}\p{{Nl}}\p{{No}}]\.){{2,}}+(?![\p{{L}}\p{{N}}_-])"
    rf"|[{LETTERS}](?:[{LETTERS}{COMBINING_MARKS}.'’&/-]*[{LETTERS}{COMBINING_MARKS}])?"
    rf"|{SPACELESS_SYLLABLE}|{SYMBOL}|[^{NOT_SYMBOL}][{COMBINING_MARKS}]*+"
)


def encode_sentences(
    sentences: Iterable[TaggingExample],
    labels: Sequence[str],
    tokenizer: WordPieceTokenizer,
    max_tokens: int,
    config: TaggingDataConfig,
) -> Iterator[list[EncodedText] | InvalidExample]:
    """Encode each sentence as one row, or as several windows."""
    label_ids = {tag: index for index, tag in enumerate(labels)}
    for sentence, pieces in locate_pieces(sentences, tokenizer):
        windows = split_windows(pieces, max_tokens, config, sentence.location)
        if isinstance(windows, InvalidExample):
            yield windows
            continue
        piece_labels = label_first_pieces(pieces.word_ids, [label_ids[tag] for tag in sentence.tags])
        yield [
            _build_row(pieces, window, tokenizer, _mask_labels(piece_labels, window, index, windows))
            for index, window in enumerate(windows)
        ]


def locate_pieces(
    sentences: Iterable[TaggingExample], tokenizer: WordPieceTokenizer
) -> Iterator[tuple[TaggingExample, WordPieceEncoding]]:
    """Tokenize the words of sentences."""
    for chunk in iterate_chunks(sentences, SENTENCES_PER_CHUNK):
        words = [sentence.words for sentence in chunk]
        yield from zip(chunk, tokenizer.encode_with_offsets(words), strict=True)


def split_windows(
    pieces: WordPieceEncoding, max_tokens: int, config: TaggingDataConfig, location: str
) -> list[TokenWindow] | InvalidExample:
    """Split a sentence into windows of at most ``max_tokens``, including [CLS] and [SEP]."""
    window_size = max_tokens - 2
    if len(pieces.ids) > window_size and config.on_overflow == "error":
        message = f"{len(pieces.ids) + 2} tokens, and the model reads {max_tokens} at once; {TOO_LONG_HINT}"
        return InvalidExample(location, "a sentence that is too long", message)
    return make_windows(len(pieces.ids), window_size, config.window_stride)


def _build_row(
    pieces: WordPieceEncoding, window: TokenWindow, tokenizer: WordPieceTokenizer, labels: list[int]
) -> EncodedText:
    ids, segments = tokenizer.join_segments(pieces.ids[slice(*window)])
    return EncodedText(ids, segments, {"labels": [IGNORE, *labels, IGNORE]})


def _mask_labels(labels: list[int], window: TokenWindow, window_index: int, windows: list[TokenWindow]) -> list[int]:
    """The labels of a window. Each word counts in one window only, the one that predicts its tag."""
    return [
        labels[index] if find_central_window(index, windows) == window_index else IGNORE for index in range(*window)
    ]
