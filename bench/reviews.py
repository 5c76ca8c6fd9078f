"""Documents for benchmarks: IMDB reviews if they are found, else random documents of similar lengths.

The number of sentences of a document and of words of a sentence have log-normal distributions, with the mean and
deviation of IMDB's training data. Words follow Zipf's law.
"""

from __future__ import annotations

import collections
import gzip
import json
import re
from dataclasses import dataclass

import numpy as np

from jumok.batches.tokens import SPECIAL_TOKENS, UNK
from jumok.data.readers.text_files import data_folder
from jumok.data.tokenizers.sentence_splitter import split_sentences

WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
BREAK = re.compile(r"<br\s*/?>")
MIN_COUNT = 5  # rarer words are unknown, as in the paper
# Mean and deviation of the logarithm.
SENTENCES_PER_DOCUMENT = 2.27, 0.70
WORDS_PER_SENTENCE = 2.87, 0.72
MAX_LENGTHS = 282, 686  # sentences of a document, words of a sentence


@dataclass(frozen=True)
class Reviews:
    """Documents as sentences of word ids."""

    origin: str
    documents: list[list[list[int]]]
    labels: list[int]  # 0 or 1
    vocab_size: int

    @property
    def num_words(self) -> list[int]:
        """Number of words of each document."""
        return [sum(map(len, document)) for document in self.documents]

    def select(self, indices: list[int]) -> Reviews:
        documents, labels = ([values[n] for n in indices] for values in (self.documents, self.labels))
        return Reviews(self.origin, documents, labels, self.vocab_size)


def load_reviews(split: str, count: int | None = None) -> Reviews:
    """Return the reviews of a split in file order, or random ones if there is no file; or ``count`` small ones."""
    path = data_folder() / "imdb" / f"{split}.jsonl.gz"
    if count is not None:
        return draw_random_reviews(count, 97, max_lengths=(9, 31))
    if not path.is_file():
        return draw_random_reviews(25_000, 30_000)
    texts, labels = [], []
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            fields = json.loads(line)
            sentences = split_sentences(BREAK.sub("\n", fields["text"]))
            words = [WORD.findall(sentence.lower()) for sentence in sentences]
            texts.append([sentence for sentence in words if sentence] or [["?"]])
            labels.append(int(fields["label"]))
    counts = collections.Counter(word for document in texts for words in document for word in words)
    vocabulary = [word for word, count in counts.most_common() if count >= MIN_COUNT]
    ids = {word: number for number, word in enumerate(vocabulary, len(SPECIAL_TOKENS))}
    documents = [[[ids.get(word, UNK) for word in words] for words in document] for document in texts]
    return Reviews(f"IMDB {split}", documents, labels, len(SPECIAL_TOKENS) + len(vocabulary))


def draw_random_reviews(count: int, vocab_size: int, max_lengths: tuple[int, int] = MAX_LENGTHS) -> Reviews:
    rng = np.random.default_rng(0)

    def draw_lengths(mean: float, deviation: float, longest: int, count: int) -> np.ndarray:
        return np.clip(np.rint(rng.lognormal(mean, deviation, count)), 1, longest).astype(np.int64)

    document_lengths = draw_lengths(*SENTENCES_PER_DOCUMENT, max_lengths[0], count)
    sentence_lengths = draw_lengths(*WORDS_PER_SENTENCE, max_lengths[1], int(document_lengths.sum()))
    frequencies = 1 / (np.arange(vocab_size - len(SPECIAL_TOKENS)) + 2.7)
    words = rng.choice(len(frequencies), int(sentence_lengths.sum()), p=frequencies / frequencies.sum())
    words += len(SPECIAL_TOKENS)
    sentences = [ids.tolist() for ids in np.split(words, np.cumsum(sentence_lengths)[:-1])]
    ends = np.cumsum(document_lengths).tolist()
    documents = [sentences[end - n : end] for end, n in zip(ends, document_lengths.tolist(), strict=True)]
    return Reviews("random", documents, rng.integers(0, 2, count).tolist(), vocab_size)
