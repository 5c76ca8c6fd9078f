"""Documents to measure with: IMDB's reviews where they are found, else random ones of similar lengths.

The numbers of sentences in a document and of words in a sentence are drawn from log-normal distributions,
whose parameters are those of the logarithms of the real numbers in IMDB's training data. Words are drawn by
Zipf's law.
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
RARE = 5  # a word that comes less often is unknown, as in the paper
# Mean and deviation of the logarithm.
SENTENCES = 2.27, 0.70
WORDS = 2.87, 0.72
MOST = 282, 686  # sentences of a document, words of a sentence


@dataclass(frozen=True)
class Reviews:
    """Documents as sentences of word ids."""

    origin: str
    documents: list[list[list[int]]]
    labels: list[int]  # 0 or 1
    vocabulary: int

    @property
    def words(self) -> list[int]:
        """How many each document has."""
        return [sum(map(len, document)) for document in self.documents]

    def some(self, numbers: list[int]) -> Reviews:
        """The documents of these numbers."""
        documents, labels = ([of[n] for n in numbers] for of in (self.documents, self.labels))
        return Reviews(self.origin, documents, labels, self.vocabulary)


def reviews(split: str, many: int | None = None) -> Reviews:
    """The reviews of a split in file order, or random ones if there is no file; or ``many`` small ones."""
    path = data_folder() / "imdb" / f"{split}.jsonl.gz"
    if many is not None:
        return random_reviews(many, 97, most=(9, 31))
    if not path.is_file():
        return random_reviews(25_000, 30_000)
    texts, labels = [], []
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            read = json.loads(line)
            found = [WORD.findall(one.lower()) for one in split_sentences(BREAK.sub("\n", read["text"]))]
            texts.append([words for words in found if words] or [["?"]])
            labels.append(int(read["label"]))
    often = collections.Counter(word for document in texts for words in document for word in words)
    known = [word for word, count in often.most_common() if count >= RARE]
    ids = {word: number for number, word in enumerate(known, len(SPECIAL_TOKENS))}
    documents = [[[ids.get(word, UNK) for word in words] for words in document] for document in texts]
    return Reviews(f"IMDB {split}", documents, labels, len(SPECIAL_TOKENS) + len(known))


def random_reviews(many: int, vocabulary: int, most: tuple[int, int] = MOST) -> Reviews:
    chance = np.random.default_rng(0)

    def numbers(mean: float, deviation: float, most: int, count: int) -> np.ndarray:
        return np.clip(np.rint(chance.lognormal(mean, deviation, count)), 1, most).astype(np.int64)

    of_documents = numbers(*SENTENCES, most[0], many)
    of_sentences = numbers(*WORDS, most[1], int(of_documents.sum()))
    rarity = 1 / (np.arange(vocabulary - len(SPECIAL_TOKENS)) + 2.7)
    said = chance.choice(len(rarity), int(of_sentences.sum()), p=rarity / rarity.sum()) + len(SPECIAL_TOKENS)
    every = [words.tolist() for words in np.split(said, np.cumsum(of_sentences)[:-1])]
    ends = np.cumsum(of_documents).tolist()
    documents = [every[end - count : end] for end, count in zip(ends, of_documents.tolist(), strict=True)]
    return Reviews("random", documents, chance.integers(0, 2, many).tolist(), vocabulary)
