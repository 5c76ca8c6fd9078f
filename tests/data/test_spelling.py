"""Raw text and text that is spelled out already come out alike."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.data.tokenizers import spelling
from jumok.data.tokenizers.spelling import normalize_spelling


@pytest.mark.parametrize(
    ("language", "raw", "out"),
    [
        ("fr", "L'usage n'est pas répandu: du jamais-vu!", "le usage ne est pas repandu : de le jamais - vu !"),
        ("fr", "Qu'il aille aux bois, au-dessus des eaux", "que il aille a les bois , au - dessus de les eaux"),
        ("fr", "Y a-t-il du bœuf aujourd'hui?", "y a il de le boeuf aujourd' hui ?"),
        ("fr", "Lorsqu'on l'a dû, jusqu'ici", "lorsque on le a du , jusque ici"),
        ("fr", "M. Brun « L’ÉTÉ »", 'm. brun " le ete "'),
        ("en", "Mr. Brown didn't pay $98,355.", "mr. brown did not pay $ 98,355 ."),
        ("en", "I can't, she won't; let's say they've left.", "i cannot , she will not ; let us say they have left ."),
        ("en", "The members' ``home'' is Canada's", "the members ' \" home \" is canada 's"),
        ("en", "At 2 p.m. on No. 5: no.", "at 2 p.m. on no. 5 : no ."),
        ("en", "so -- the 1960s... at .5%", "so -- the 1960s ... at .5 %"),
        ("ko", "우리는 걷는다.", "우리는 걷는다 ."),
        ("de", "Straße über alles", "strasse uber alles"),
        ("en", "", ""),
        ("en", "  \t ", ""),
    ],
)
def test_words_and_signs_come_apart_and_contractions_in_full(language: str, raw: str, out: str) -> None:
    assert normalize_spelling(raw, language) == out
    assert normalize_spelling(out, language) in (out, out.replace(" du ", " de le "))  # without its accent, dû is lost


def test_text_that_is_spelled_out_stays_as_it_is() -> None:
    for language, text in (
        ("en", "mr. speaker , the hon. member 's bill c - 19 cannot pass ."),
        ("fr", "le eau de le lac ne est pas a le niveau - la aujourd' hui ..."),
    ):
        assert normalize_spelling(text, language) == text
        assert normalize_spelling(text.title().replace("'S", "'s"), language) == text


def test_the_examples_in_the_docstrings() -> None:
    done = doctest.testmod(spelling)
    assert done.failed == 0 < done.attempted


@given(st.text(), st.sampled_from(["en", "fr", "ko"]))
def test_any_text_becomes_words_between_single_spaces(text: str, language: str) -> None:
    words = normalize_spelling(text, language).split(" ")
    assert all(word and not any(c.isspace() for c in word) for word in words) or words == [""]
