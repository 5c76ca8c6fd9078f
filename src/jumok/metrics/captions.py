"""How good captions are, against several references a picture: BLEU, ROUGE-L and CIDEr-D.

They are counted as the evaluation code of the COCO captions (coco-caption) does, which is what papers give::

    BLEU-1…4   clipped n-gram precisions of the whole test set; the reference nearest in length counts for
               brevity. Papers before COCO, Show, Attend and Tell among them, give it without that penalty
    ROUGE-L    longest common subsequence: F (β = 1.2) of the best precision and the best recall over the
               references, which may be those of two of them; the mean over pictures
    CIDEr-D    cosines of clipped tf-idf vectors of n-grams (n = 1…4), less for another length (σ = 6), ×10;
               how rare an n-gram is, is counted over the references of the pictures that are scored

A caption is a list of words, lower-cased and split already; :func:`tokenize_caption` does both, much as coco-caption.

>>> captions = [tokenize_caption(text) for text in ("A red circle above a star.", "a moon")]
>>> references = [["a red circle above a star", "the circle, over a yellow star"], ["a moon"]]
>>> print(score_captions(captions, [list(map(tokenize_caption, texts)) for texts in references]))
BLEU-1 100.0, BLEU-2 100.0, BLEU-3 100.0, BLEU-4 100.0; ROUGE-L 100.0; CIDEr-D 5.280 (2 pictures)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError

__all__ = ["CaptionBleu", "CaptionScores", "bleu", "cider_d", "rouge_l", "score_captions", "tokenize_caption"]

MAX_NGRAM = 4  # words of an n-gram
BETA = 1.2
SIGMA = 6.0

CaptionWords = Sequence[str]
Ngram = tuple[str, ...]

# Punctuation that coco-caption throws away, once the Penn Treebank's rules have made tokens of it.
DROPPED_PUNCTUATION = re.compile(r"""(?<!\d)[.,:]|[.,:](?!\d)|--+|[;?!"`“”()\[\]{}…]""")
# Tokens of their own there; any other apostrophe at the edge of a word is a quotation mark.
CONTRACTION_ENDINGS = ("'s", "'m", "'d", "'re", "'ve", "'ll", "n't")
CONTRACTION_REGEX = re.compile(rf"(?<=\w)({'|'.join(CONTRACTION_ENDINGS)})(?!\w)")


@dataclass(frozen=True)
class CaptionBleu:
    """BLEU-1…4 of a test set, from 0 to 100: ``unpenalized`` without, ``value`` with the brevity penalty."""

    unpenalized: tuple[float, ...]
    brevity_penalty: (
        float  # what the penalty multiplies with: 1 where captions are as long as their references
    )

    @property
    def value(self) -> tuple[float, ...]:
        return tuple(one * self.brevity_penalty for one in self.unpenalized)


@dataclass(frozen=True)
class CaptionScores:
    """Of a test set. BLEU and ROUGE-L are from 0 to 100, CIDEr-D from 0 to 10 as coco-caption prints it.

    (Many tables print CIDEr-D times 100: their 60 is 0.6 here.) ``cider_d_per_image`` picture has a CIDEr-D of its own.
    """

    bleu: CaptionBleu
    rouge_l: float
    cider_d: float
    cider_d_per_image: NDArray[np.float64]

    def __str__(self) -> str:
        told = ", ".join(f"BLEU-{n} {value:.1f}" for n, value in enumerate(self.bleu.value, 1))
        pictures = f"{len(self.cider_d_per_image)} picture{'s' * (len(self.cider_d_per_image) != 1)}"
        return f"{told}; ROUGE-L {self.rouge_l:.1f}; CIDEr-D {self.cider_d:.3f} ({pictures})"


def score_captions(
    captions: Sequence[CaptionWords], references: Sequence[Sequence[CaptionWords]]
) -> CaptionScores:
    """All scores of captions, one a picture, against the references of each, one or more."""
    each = cider_d(captions, references)
    return CaptionScores(
        bleu=bleu(captions, references),
        rouge_l=float(rouge_l(captions, references).mean()),
        cider_d=float(each.mean()),
        cider_d_per_image=each,
    )


def tokenize_caption(text: str) -> list[str]:
    """The words of a caption, lower-cased and without punctuation.

    Hyphens stay inside a word, and contractions are split as the Penn Treebank does.

    >>> tokenize_caption("A dog's ball, in mid-air: it doesn't fall!")
    ['a', 'dog', "'s", 'ball', 'in', 'mid-air', 'it', 'does', "n't", 'fall']
    """
    text = DROPPED_PUNCTUATION.sub(" ", text.lower().replace("’", "'"))
    tokens = CONTRACTION_REGEX.sub(r" \1", text).split()
    return [
        word for word in (one if one in CONTRACTION_ENDINGS else one.strip("'‘-") for one in tokens) if word
    ]


def bleu(captions: Sequence[CaptionWords], references: Sequence[Sequence[CaptionWords]]) -> CaptionBleu:
    """Corpus BLEU (Papineni et al. 2002), nothing smoothed: 0 where no n-gram is right."""
    _check_captions(captions, references)
    right, said = np.zeros(MAX_NGRAM), np.zeros(MAX_NGRAM)
    length = wanted = 0
    for caption, some in zip(captions, references, strict=True):
        most: Counter[Ngram] = Counter()  # how often one reference has an n-gram
        for reference in some:
            most |= _count_ngrams(reference)
        for gram, count in _count_ngrams(caption).items():
            said[len(gram) - 1] += count
            right[len(gram) - 1] += min(count, most[gram])
        length += len(caption)
        # Of two that are as near, the shorter one.
        wanted += min((abs(len(one) - len(caption)), len(one)) for one in some)[1]
    with np.errstate(divide="ignore"):
        logs = np.log(right / np.maximum(said, 1))
    plain = 100 * np.exp(np.cumsum(logs) / np.arange(1, MAX_NGRAM + 1))
    brevity = min(1.0, math.exp(1 - wanted / length)) if length else 0.0
    return CaptionBleu(tuple(plain.tolist()), brevity)


def rouge_l(
    captions: Sequence[CaptionWords], references: Sequence[Sequence[CaptionWords]]
) -> NDArray[np.float64]:
    """ROUGE-L of each caption, from 0 to 100 ``(pictures,)``."""
    _check_captions(captions, references)
    return np.array(
        [_caption_rouge_l(caption, some) for caption, some in zip(captions, references, strict=True)],
        np.float64,
    )


def cider_d(
    captions: Sequence[CaptionWords], references: Sequence[Sequence[CaptionWords]]
) -> NDArray[np.float64]:
    """CIDEr-D (Vedantam et al. 2015) of each caption, from 0 to 10 ``(pictures,)``.

    It lives off words that tell pictures apart: n-grams that every picture's references have weigh nothing,
    so a single picture scores 0, and a score can be compared on the same pictures only.
    """
    _check_captions(captions, references)
    counted = [[_count_ngrams(one) for one in some] for some in references]
    seen = Counter(gram for some in counted for gram in set().union(*some))  # in how many pictures
    most = math.log(len(captions))

    def weighed(grams: Counter[Ngram]) -> dict[Ngram, float]:
        return {gram: count * (most - math.log(seen[gram] or 1)) for gram, count in grams.items()}

    found = np.zeros(len(captions))
    for number, (caption, some) in enumerate(zip(captions, counted, strict=True)):
        mine = weighed(_count_ngrams(caption))
        my_norm = _ngram_norms(mine)
        for grams, reference in zip(some, references[number], strict=True):
            its = weighed(grams)
            dots = np.zeros(MAX_NGRAM)
            for gram in filter(its.__contains__, mine):  # in their order: a set's order changes the last bit
                dots[len(gram) - 1] += min(mine[gram], its[gram]) * its[gram]
            norms = my_norm * _ngram_norms(its)
            cosines = np.divide(dots, norms, out=np.zeros(MAX_NGRAM), where=norms > 0)
            # coco-caption counts pairs of words, of which no word and one word have none alike.
            longer = max(len(caption), 1) - max(len(reference), 1)
            found[number] += cosines.mean() * math.exp(-(longer**2) / (2 * SIGMA**2))
        found[number] *= 10 / len(some)
    return found


def _count_ngrams(caption: CaptionWords) -> Counter[Ngram]:
    """How often it has each n-gram, of 1 to 4 words."""
    shifted = [caption[start:] for start in range(MAX_NGRAM)]
    grams: Counter[Ngram] = Counter()
    for n in range(1, MAX_NGRAM + 1):
        grams.update(zip(*shifted[:n], strict=False))
    return grams


def _ngram_norms(weights: dict[Ngram, float]) -> NDArray[np.float64]:
    """The length of the vector of the n-grams of each n ``(4,)``."""
    squares = [0.0] * MAX_NGRAM
    for gram, weight in weights.items():
        squares[len(gram) - 1] += weight * weight
    return np.sqrt(squares)


def _caption_rouge_l(caption: CaptionWords, references: Sequence[CaptionWords]) -> float:
    common = [_longest_common_subsequence(caption, one) for one in references]
    if not max(common):
        return 0.0
    precision = max(common) / len(caption)
    recall = max(count / len(one) for count, one in zip(common, references, strict=True) if one)
    return 100 * (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def _longest_common_subsequence(first: CaptionWords, second: CaptionWords) -> int:
    """The length of the longest common subsequence, a row of the usual table in the bits of one number.

    A bit of ``row`` is 0 where the table grows from one column to the next (Hyyrö 2004).
    """
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    whole = row = (1 << len(first)) - 1
    for word in second:
        here = row & places.get(word, 0)
        row = ((row + here) | (row - here)) & whole
    return len(first) - row.bit_count()


def _check_captions(captions: Sequence[CaptionWords], references: Sequence[Sequence[CaptionWords]]) -> None:
    if len(captions) != len(references) or not captions:
        raise InputError(
            f"{len(captions)} captions and references of {len(references)} pictures came; expected one "
            "caption for each picture, and at least one"
        )
    for number, (caption, some) in enumerate(zip(captions, references, strict=True)):
        if not some:
            raise InputError(f"picture {number} has no references; expected one or more")
        if isinstance(some, str) or any(isinstance(one, str) for one in (caption, *some)):
            raise InputError(
                f"picture {number}: a text came where words are expected; split it: captions.words(text)"
            )
        _check_words(number, (caption, *some))


def _check_words(image_index: int, captions: Iterable[CaptionWords]) -> None:
    for caption in captions:
        for word in caption:
            if not isinstance(word, str):
                raise InputError(f"picture {image_index}: a word is {word!r}; expected text")
