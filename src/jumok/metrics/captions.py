"""Metrics of image captions with several references per image: BLEU, ROUGE-L and CIDEr-D.

All are computed like the evaluation code of COCO captions (coco-caption), whose scores papers report::

    BLEU-1…4   clipped n-gram precisions of the whole test set. The brevity penalty uses the reference closest
               in length. Papers before COCO, such as Show, Attend and Tell, report BLEU without penalty
    ROUGE-L    longest common subsequence: F (β = 1.2) of the best precision and the best recall over the
               references, which may be two different ones; the mean over images
    CIDEr-D    cosine of clipped tf-idf vectors of n-grams (n = 1…4), reduced for different lengths (σ = 6),
               times 10; document frequencies are those of the references of the scored images

A caption is a list of lower-cased words. :func:`tokenize_caption` makes one, similarly to coco-caption.

>>> captions = [tokenize_caption(text) for text in ("A red circle above a star.", "a moon")]
>>> references = [["a red circle above a star", "the circle, over a yellow star"], ["a moon"]]
>>> print(score_captions(captions, [list(map(tokenize_caption, texts)) for texts in references]))
BLEU-1 100.0, BLEU-2 100.0, BLEU-3 100.0, BLEU-4 100.0; ROUGE-L 100.0; CIDEr-D 5.280 (2 images)
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

MAX_NGRAM = 4  # words
BETA = 1.2  # weight of recall in ROUGE-L
SIGMA = 6.0  # of the length penalty of CIDEr-D

CaptionWords = Sequence[str]
Ngram = tuple[str, ...]

# Punctuation that coco-caption drops after tokenization by the rules of the Penn Treebank.
DROPPED_PUNCTUATION = re.compile(r"""(?<!\d)[.,:]|[.,:](?!\d)|--+|[;?!"`“”()\[\]{}…]""")
# These endings are separate tokens. Any other apostrophe at the edge of a word is a quotation mark.
CONTRACTION_ENDINGS = ("'s", "'m", "'d", "'re", "'ve", "'ll", "n't")
CONTRACTION_REGEX = re.compile(rf"(?<=\w)({'|'.join(CONTRACTION_ENDINGS)})(?!\w)")


@dataclass(frozen=True)
class CaptionBleu:
    """BLEU-1…4 of a test set, from 0 to 100; ``value`` includes the brevity penalty."""

    unpenalized: tuple[float, ...]
    brevity_penalty: float  # a factor: 1 if captions are as long as their references

    @property
    def value(self) -> tuple[float, ...]:
        return tuple(score * self.brevity_penalty for score in self.unpenalized)


@dataclass(frozen=True)
class CaptionScores:
    """Scores of a test set. BLEU and ROUGE-L range from 0 to 100, CIDEr-D from 0 to 10 as in coco-caption.

    Many papers report CIDEr-D times 100: their 60 is 0.6 here.
    """

    bleu: CaptionBleu
    rouge_l: float
    cider_d: float
    cider_d_per_image: NDArray[np.float64]  # (images,)

    def __str__(self) -> str:
        bleu_scores = ", ".join(f"BLEU-{n} {value:.1f}" for n, value in enumerate(self.bleu.value, 1))
        images = f"{len(self.cider_d_per_image)} image{'s' * (len(self.cider_d_per_image) != 1)}"
        return f"{bleu_scores}; ROUGE-L {self.rouge_l:.1f}; CIDEr-D {self.cider_d:.3f} ({images})"


def score_captions(captions: Sequence[CaptionWords], references: Sequence[Sequence[CaptionWords]]) -> CaptionScores:
    """Score captions, one per image, against one or more references per image."""
    per_image = cider_d(captions, references)
    return CaptionScores(
        bleu=bleu(captions, references),
        rouge_l=float(rouge_l(captions, references).mean()),
        cider_d=float(per_image.mean()),
        cider_d_per_image=per_image,
    )


def tokenize_caption(text: str) -> list[str]:
    """Split a caption into lower-cased words without punctuation.

    Hyphenated words stay whole, and contractions are split as in the Penn Treebank.

    >>> tokenize_caption("A dog's ball, in mid-air: it doesn't fall!")
    ['a', 'dog', "'s", 'ball', 'in', 'mid-air', 'it', 'does', "n't", 'fall']
    """
    text = DROPPED_PUNCTUATION.sub(" ", text.lower().replace("’", "'"))
    tokens = CONTRACTION_REGEX.sub(r" \1", text).split()
    words = (token if token in CONTRACTION_ENDINGS else token.strip("'‘-") for token in tokens)
    return [word for word in words if word]


def bleu(captions: Sequence[CaptionWords], references: Sequence[Sequence[CaptionWords]]) -> CaptionBleu:
    """Corpus BLEU (Papineni et al. 2002) without smoothing: 0 if no n-gram matches."""
    _check_captions(captions, references)
    num_matches, num_ngrams = np.zeros(MAX_NGRAM), np.zeros(MAX_NGRAM)
    caption_length = reference_length = 0
    for caption, image_references in zip(captions, references, strict=True):
        max_counts: Counter[Ngram] = Counter()  # the largest count of an n-gram in one reference
        for reference in image_references:
            max_counts |= _count_ngrams(reference)
        for ngram, count in _count_ngrams(caption).items():
            num_ngrams[len(ngram) - 1] += count
            num_matches[len(ngram) - 1] += min(count, max_counts[ngram])
        caption_length += len(caption)
        # The closest length; the shorter one of two equally close lengths.
        lengths = map(len, image_references)
        reference_length += min((abs(length - len(caption)), length) for length in lengths)[1]
    with np.errstate(divide="ignore"):
        log_precisions = np.log(num_matches / np.maximum(num_ngrams, 1))
    unpenalized = 100 * np.exp(np.cumsum(log_precisions) / np.arange(1, MAX_NGRAM + 1))
    penalty = min(1.0, math.exp(1 - reference_length / caption_length)) if caption_length else 0.0
    return CaptionBleu(tuple(unpenalized.tolist()), penalty)


def rouge_l(captions: Sequence[CaptionWords], references: Sequence[Sequence[CaptionWords]]) -> NDArray[np.float64]:
    """ROUGE-L of each caption, from 0 to 100 ``(images,)``."""
    _check_captions(captions, references)
    pairs = zip(captions, references, strict=True)
    return np.array([_caption_rouge_l(caption, texts) for caption, texts in pairs], np.float64)


def cider_d(captions: Sequence[CaptionWords], references: Sequence[Sequence[CaptionWords]]) -> NDArray[np.float64]:
    """CIDEr-D (Vedantam et al. 2015) of each caption, from 0 to 10 ``(images,)``.

    It rewards words that distinguish images. An n-gram in the references of every image has weight 0, so the
    score of a single image is 0, and scores are only comparable on the same images.
    """
    _check_captions(captions, references)
    reference_counts = [[_count_ngrams(reference) for reference in texts] for texts in references]
    document_frequency = Counter(ngram for counts in reference_counts for ngram in set().union(*counts))
    log_images = math.log(len(captions))

    def tf_idf(counts: Counter[Ngram]) -> dict[Ngram, float]:
        return {
            ngram: count * (log_images - math.log(document_frequency[ngram] or 1)) for ngram, count in counts.items()
        }

    scores = np.zeros(len(captions))
    for image, (caption, image_counts) in enumerate(zip(captions, reference_counts, strict=True)):
        weights = tf_idf(_count_ngrams(caption))
        caption_norms = _ngram_norms(weights)
        for counts, reference in zip(image_counts, references[image], strict=True):
            reference_weights = tf_idf(counts)
            dots = np.zeros(MAX_NGRAM)
            # Iterate in the order of the dict: the order of a set would change the last bit.
            for ngram in filter(reference_weights.__contains__, weights):
                weight = reference_weights[ngram]
                dots[len(ngram) - 1] += min(weights[ngram], weight) * weight
            norms = caption_norms * _ngram_norms(reference_weights)
            cosines = np.divide(dots, norms, out=np.zeros(MAX_NGRAM), where=norms > 0)
            # coco-caption takes the number of bigrams as the length: it is 0 for no word and for one word.
            difference = max(len(caption), 1) - max(len(reference), 1)
            scores[image] += cosines.mean() * math.exp(-(difference**2) / (2 * SIGMA**2))
        scores[image] *= 10 / len(image_counts)
    return scores


def _count_ngrams(caption: CaptionWords) -> Counter[Ngram]:
    """The counts of all n-grams of 1 to 4 words."""
    shifted = [caption[start:] for start in range(MAX_NGRAM)]
    counts: Counter[Ngram] = Counter()
    for n in range(1, MAX_NGRAM + 1):
        counts.update(zip(*shifted[:n], strict=False))
    return counts


def _ngram_norms(weights: dict[Ngram, float]) -> NDArray[np.float64]:
    """The norm of the n-gram vector for each n ``(4,)``."""
    squares = [0.0] * MAX_NGRAM
    for ngram, weight in weights.items():
        squares[len(ngram) - 1] += weight * weight
    return np.sqrt(squares)


def _caption_rouge_l(caption: CaptionWords, references: Sequence[CaptionWords]) -> float:
    lengths = [_longest_common_subsequence(caption, reference) for reference in references]
    if not max(lengths):
        return 0.0
    precision = max(lengths) / len(caption)
    pairs = zip(lengths, references, strict=True)
    recall = max(length / len(reference) for length, reference in pairs if reference)
    return 100 * (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def _longest_common_subsequence(first: CaptionWords, second: CaptionWords) -> int:
    """The length of the longest common subsequence, with a row of the usual table as the bits of an integer.

    A bit of ``row`` is 0 where the table grows from one column to the next (Hyyrö 2004).
    """
    position_bits: dict[str, int] = {}
    for position, word in enumerate(first):
        position_bits[word] = position_bits.get(word, 0) | 1 << position
    all_bits = row = (1 << len(first)) - 1
    for word in second:
        matches = row & position_bits.get(word, 0)
        row = ((row + matches) | (row - matches)) & all_bits
    return len(first) - row.bit_count()


def _check_captions(captions: Sequence[CaptionWords], references: Sequence[Sequence[CaptionWords]]) -> None:
    if len(captions) != len(references) or not captions:
        raise InputError(
            f"there are {len(captions)} captions, and references of {len(references)} images; expected one "
            "caption for each image, and at least one"
        )
    for image, (caption, texts) in enumerate(zip(captions, references, strict=True)):
        if not texts:
            raise InputError(f"image {image} has no references; expected one or more")
        if isinstance(texts, str) or any(isinstance(text, str) for text in (caption, *texts)):
            raise InputError(
                f"image {image}: a caption is a string; expected a list of words. Use tokenize_caption(text)"
            )
        _check_words(image, (caption, *texts))


def _check_words(image_index: int, captions: Iterable[CaptionWords]) -> None:
    for caption in captions:
        for word in caption:
            if not isinstance(word, str):
                raise InputError(f"image {image_index}: a word is {word!r}; expected a string")
