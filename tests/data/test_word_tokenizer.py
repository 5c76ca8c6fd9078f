"""Text as sentences of words: nothing lost, words as one reads them, ids of each word by itself."""

import doctest
import re
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jumok.data.tokenizers.word_tokenizer as module
from jumok.batches.tokens import UNK
from jumok.data.tokenizers.word_tokenizer import SegmentedText, WordTokenizer, WordTokenizerConfig, segment_text

TEXTS = [["the", "film", "was", "dull"], ["the", "end", "was", "good"]]


def shown(one: SegmentedText) -> str:
    return "".join(gap + word for gap, word in zip(one.spaces, one.words, strict=True))


def test_words_and_sentences() -> None:
    one = segment_text("It's well-made (3.5 stars). \"Dull,\" he said...  Dr. No wasn't!")
    assert one.sentences == [
        ("It's", "well-made", "(", "3.5", "stars", ")", "."),
        ('"', "Dull", ",", '"', "he", "said", ".", ".", "."),
        ("Dr", ".", "No", "wasn't", "!"),
    ]
    assert shown(one) == "It's well-made (3.5 stars). \"Dull,\" he said... Dr. No wasn't!"


def test_korean_with_and_without_spaces() -> None:
    assert segment_text("재미있다.배우도 좋아요.또 볼까요? ㅋㅋㅋ").sentences == [
        ("재미있다", "."),
        ("배우도", "좋아요", "."),
        ("또", "볼까요", "?"),
        ("ㅋㅋㅋ",),
    ]


def test_markup_ends_sentences_if_asked() -> None:
    text = "dull<br /><br />It #39;s A&amp;B <i>loud</i> 1 < 2"
    assert segment_text(text, strip_markup=True).sentences == [
        ("dull",),
        ("It's", "A", "&", "B"),
        ("loud",),
        ("1", "<", "2"),
    ]
    assert "br" in segment_text(text).words


@given(st.text(max_size=60))
def test_no_text_is_lost(text: str) -> None:
    one = segment_text(text)
    assert re.sub(r"\s", "", shown(one)) == re.sub(r"\s", "", unicodedata.normalize("NFC", text))
    assert len(one.words) == len(one.spaces) == one.sentence_bounds[-1]
    assert all(begin < end for begin, end in zip(one.sentence_bounds, one.sentence_bounds[1:], strict=False))


def test_a_long_text_takes_time_by_its_length() -> None:
    def seconds(times: int) -> float:
        text, begun = "The film was dull. " * times, time.process_time()
        assert len(segment_text(text).sentence_bounds) == times + 1
        return time.process_time() - begun

    seconds(10)
    assert seconds(8000) < 30 * max(seconds(800), 1e-3)


@pytest.mark.parametrize("kind", ["words", "bpe", "unigram", "characters"])
def test_what_is_read_depends_on_the_words_alone(kind: str) -> None:
    words = WordTokenizer.train([TEXTS] * 3, WordTokenizerConfig(type=kind, vocab_size=400))  # type: ignore[arg-type]
    [[ids]] = words.encode([[["The", "film", "was", "dull"]]])
    places = words.word_ids_from_words(["The", "film", "was", "dull"])
    assert len(places) == len(ids)
    assert sorted(set(places)) == [0, 1, 2, 3]
    assert places == sorted(places)
    if kind != "characters":
        for number, word in enumerate(["The", "film", "was", "dull"]):
            [[alone]] = words.encode([[[word]]])
            assert alone == [i for i, place in zip(ids, places, strict=True) if place == number]


def test_unknown_words_empty_sentences_and_saving(tmp_path) -> None:  # type: ignore[no-untyped-def]
    words = WordTokenizer.train([TEXTS], WordTokenizerConfig(vocab_size=100, min_count=2))
    [[first], nothing] = words.encode([[["the", "film"], []], [[], []]])
    assert first[1] == UNK  # seen once
    assert nothing == []
    words.save(tmp_path)
    assert WordTokenizer.load(tmp_path).encode([TEXTS]) == words.encode([TEXTS])
    assert WordTokenizer.train([TEXTS], WordTokenizerConfig(vocab_size=100, min_count=1)).vocab_size > words.vocab_size


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="vocab_size=3"):
        WordTokenizerConfig(vocab_size=3)
    with pytest.raises(ValueError, match="min_count=0"):
        WordTokenizerConfig(min_count=0)
    with pytest.raises(ValueError, match="max_training_examples=0"):
        WordTokenizerConfig(max_training_examples=0)


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module).failed == 0


def test_a_reference_that_no_character_has_is_replaced() -> None:
    for reference in ("&#" + "1" * 5000, "&#x" + "1" * 5000, "&#99999999;"):
        assert segment_text(reference, strip_markup=True).words == ("\ufffd",)
    assert segment_text("&#" + "0" * 5000 + "65;", strip_markup=True).words == ("A",)
    assert segment_text("&#" + "0" * 5000 + ";", strip_markup=True).words == ("\ufffd",)
