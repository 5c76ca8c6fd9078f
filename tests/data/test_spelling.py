"""Spelling normalizer: raw text and normalized text give the same result."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.data.tokenizers.spelling import normalize_spelling


@pytest.mark.parametrize(
    ("language", "raw", "expected"),
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
def test_normalize_spelling(language: str, raw: str, expected: str) -> None:
    assert normalize_spelling(raw, language) == expected
    # Without its accent, dû becomes du.
    assert normalize_spelling(expected, language) in (expected, expected.replace(" du ", " de le "))


def test_normalized_text_does_not_change() -> None:
    for language, text in (
        ("en", "mr. speaker , the hon. member 's bill c - 19 cannot pass ."),
        ("fr", "le eau de le lac ne est pas a le niveau - la aujourd' hui ..."),
    ):
        assert normalize_spelling(text, language) == text
        assert normalize_spelling(text.title().replace("'S", "'s"), language) == text


@given(st.text(), st.sampled_from(["en", "fr", "ko"]))
def test_words_are_separated_by_single_spaces(text: str, language: str) -> None:
    words = normalize_spelling(text, language).split(" ")
    assert all(word and not any(c.isspace() for c in word) for word in words) or words == [""]
