"""Documents with known decisive words: one sentence decides, and nothing else tells the class."""

from collections import Counter

import pytest

from jumok import InputError
from jumok.data.builtin.decisive_words import LANGUAGES, find_decisive_words, generate_documents
from jumok.data.tokenizers.word_tokenizer import segment_text

MANY = 3000


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_marked_judgement_is_the_class(name: str) -> None:
    language = LANGUAGES[name]
    kinds = {word: kind for kind, some in language.judgements.items() for one in some for word in one.split()}
    for made in generate_documents(3, 200, name):
        text = segment_text(made.text)
        numbers = find_decisive_words(text.words)
        found = [text.words[n].lower() for n in numbers]
        assert sum(word in language.markers for word in found) == 1
        assert {kinds[word] for word in found if word in kinds} == {made.label}
        sentence = {next(s for s, end in enumerate(text.sentence_bounds[1:]) if n < end) for n in numbers}
        assert len(sentence) == 1


@pytest.mark.parametrize("name", LANGUAGES)
def test_counting_judgements_does_not_tell_the_class(name: str) -> None:
    """Whoever takes the kind of judgement that comes most often is right in little more than half."""
    language, right = LANGUAGES[name], 0
    for made in generate_documents(5, MANY, name):
        low = made.text.lower()
        counts = {kind: sum(low.count(word) for word in some) for kind, some in language.judgements.items()}
        right += max(counts, key=lambda kind: counts[kind]) == made.label
    assert 0.4 < right / MANY < 0.7


def test_classes_are_equally_many_and_the_deciding_sentence_is_anywhere() -> None:
    made = list(generate_documents(7, MANY))
    assert all(0.3 < count / MANY < 0.37 for count in Counter(one.label for one in made).values())
    places: Counter[int] = Counter()
    for one in made:
        text = segment_text(one.text)
        if len(text.sentence_bounds) == 7:  # six sentences
            at = find_decisive_words(text.words)[0]
            places[next(s for s, end in enumerate(text.sentence_bounds[1:]) if at < end)] += 1
    assert len(places) == 6
    assert max(places.values()) < 2 * min(places.values())


def test_the_same_seed_makes_the_same_documents() -> None:
    assert list(generate_documents(1, 5)) == list(generate_documents(1, 5)) != list(generate_documents(2, 5))
    assert list(generate_documents(1, 9))[:5] == list(generate_documents(1, 5))
    assert find_decisive_words(["nothing", "here", "."]) == ()


def test_what_is_not_there() -> None:
    with pytest.raises(InputError, match="decisive-words-en, decisive-words-ko"):
        next(generate_documents(1, 5, "decisive-words-fr"))
    with pytest.raises(InputError, match="count=0"):
        next(generate_documents(1, 0))
