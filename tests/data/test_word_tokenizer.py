"""Text as sentences of words: no text is lost, and the ids of a word do not depend on its neighbours."""

import re
import time
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.batches.tokens import UNK
from jumok.data.tokenizers.word_tokenizer import SegmentedText, WordTokenizer, WordTokenizerConfig, segment_text

TEXTS = [["the", "film", "was", "dull"], ["the", "end", "was", "good"]]


def join(segmented: SegmentedText) -> str:
    return "".join(space + word for space, word in zip(segmented.spaces, segmented.words, strict=True))


def test_words_and_sentences() -> None:
    segmented = segment_text("It's well-made (3.5 stars). \"Dull,\" he said...  Dr. No wasn't!")
    assert segmented.sentences == [
        ("It's", "well-made", "(", "3.5", "stars", ")", "."),
        ('"', "Dull", ",", '"', "he", "said", ".", ".", "."),
        ("Dr", ".", "No", "wasn't", "!"),
    ]
    assert join(segmented) == "It's well-made (3.5 stars). \"Dull,\" he said... Dr. No wasn't!"


def test_korean_with_and_without_spaces() -> None:
    assert segment_text("재미있다.배우도 좋아요.또 볼까요? ㅋㅋㅋ").sentences == [
        ("재미있다", "."),
        ("배우도", "좋아요", "."),
        ("또", "볼까요", "?"),
        ("ㅋㅋㅋ",),
    ]


def test_markup_ends_sentences_with_strip_markup() -> None:
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
    segmented = segment_text(text)
    assert re.sub(r"\s", "", join(segmented)) == re.sub(r"\s", "", unicodedata.normalize("NFC", text))
    assert len(segmented.words) == len(segmented.spaces) == segmented.sentence_bounds[-1]
    assert all(begin < end for begin, end in pairwise(segmented.sentence_bounds))


def test_segmentation_takes_linear_time() -> None:
    def measure_seconds(num_sentences: int) -> float:
        text, start = "The film was dull. " * num_sentences, time.process_time()
        assert len(segment_text(text).sentence_bounds) == num_sentences + 1
        return time.process_time() - start

    measure_seconds(10)
    assert measure_seconds(8000) < 30 * max(measure_seconds(800), 1e-3)


@pytest.mark.parametrize("type_", ["words", "bpe", "unigram", "characters"])
def test_ids_of_a_word_do_not_depend_on_its_neighbours(type_: str) -> None:
    tokenizer = WordTokenizer.train([TEXTS] * 3, WordTokenizerConfig(type_, vocab_size=400))  # type: ignore[arg-type]
    [[ids]] = tokenizer.encode([[["The", "film", "was", "dull"]]])
    word_ids = tokenizer.word_ids_from_words(["The", "film", "was", "dull"])
    assert len(word_ids) == len(ids)
    assert sorted(set(word_ids)) == [0, 1, 2, 3]
    assert word_ids == sorted(word_ids)
    if type_ != "characters":
        for number, word in enumerate(["The", "film", "was", "dull"]):
            [[word_only]] = tokenizer.encode([[[word]]])
            assert word_only == [i for i, word_id in zip(ids, word_ids, strict=True) if word_id == number]


def test_unknown_words_empty_sentences_and_saving(tmp_path: Path) -> None:
    tokenizer = WordTokenizer.train([TEXTS], WordTokenizerConfig(vocab_size=100, min_count=2))
    [[first], empty] = tokenizer.encode([[["the", "film"], []], [[], []]])
    assert first[1] == UNK  # occurs once
    assert empty == []
    tokenizer.save(tmp_path)
    assert WordTokenizer.load(tmp_path).encode([TEXTS]) == tokenizer.encode([TEXTS])
    assert (
        WordTokenizer.train([TEXTS], WordTokenizerConfig(vocab_size=100, min_count=1)).vocab_size > tokenizer.vocab_size
    )


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 3), ("min_count", 0), ("max_training_examples", 0)])
def test_invalid_config_is_an_error(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        WordTokenizerConfig(**{name: value})  # type: ignore[arg-type]


def test_reference_to_no_character_is_replaced() -> None:
    for reference in ("&#" + "1" * 5000, "&#x" + "1" * 5000, "&#99999999;"):
        assert segment_text(reference, strip_markup=True).words == ("\ufffd",)
    assert segment_text("&#" + "0" * 5000 + "65;", strip_markup=True).words == ("A",)
    assert segment_text("&#" + "0" * 5000 + ";", strip_markup=True).words == ("\ufffd",)
