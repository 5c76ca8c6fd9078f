"""Documents with known decisive words: one sentence determines the class, and nothing else does."""

from collections import Counter

import pytest

from jumok import InputError
from jumok.data.builtin.decisive_words import LANGUAGES, find_decisive_words, generate_documents
from jumok.data.tokenizers.word_tokenizer import SegmentedText, segment_text

NUM_DOCUMENTS = 3000


def find_sentence(text: SegmentedText, word: int) -> int:
    """The index of the sentence of a word."""
    return next(sentence for sentence, end in enumerate(text.sentence_bounds[1:]) if word < end)


@pytest.mark.parametrize("name", LANGUAGES)
def test_marked_judgement_is_the_class(name: str) -> None:
    language = LANGUAGES[name]
    labels = {
        word: label for label, phrases in language.judgements.items() for phrase in phrases for word in phrase.split()
    }
    for document in generate_documents(3, 200, name):
        text = segment_text(document.text)
        indices = find_decisive_words(text.words)
        words = [text.words[index].lower() for index in indices]
        assert sum(word in language.markers for word in words) == 1
        assert {labels[word] for word in words if word in labels} == {document.label}
        assert len({find_sentence(text, index) for index in indices}) == 1


@pytest.mark.parametrize("name", LANGUAGES)
def test_most_frequent_judgement_is_a_poor_classifier(name: str) -> None:
    language, num_correct = LANGUAGES[name], 0
    for document in generate_documents(5, NUM_DOCUMENTS, name):
        text = document.text.lower()
        counts = {label: sum(map(text.count, phrases)) for label, phrases in language.judgements.items()}
        num_correct += max(counts, key=counts.__getitem__) == document.label
    assert 0.4 < num_correct / NUM_DOCUMENTS < 0.7


def test_classes_and_positions_of_the_decisive_sentence_are_balanced() -> None:
    documents = list(generate_documents(7, NUM_DOCUMENTS))
    label_counts = Counter(document.label for document in documents)
    assert all(0.3 < count / NUM_DOCUMENTS < 0.37 for count in label_counts.values())
    texts = [segment_text(document.text) for document in documents]
    positions = Counter(
        find_sentence(text, find_decisive_words(text.words)[0]) for text in texts if len(text.sentences) == 6
    )
    assert len(positions) == 6
    assert max(positions.values()) < 2 * min(positions.values())


def test_the_same_seed_gives_the_same_documents() -> None:
    assert list(generate_documents(1, 5)) == list(generate_documents(1, 5)) != list(generate_documents(2, 5))
    assert list(generate_documents(1, 9))[:5] == list(generate_documents(1, 5))
    assert find_decisive_words(["nothing", "here", "."]) == ()


def test_invalid_arguments_are_errors() -> None:
    with pytest.raises(InputError, match="decisive-words-en, decisive-words-ko"):
        next(generate_documents(1, 5, "decisive-words-fr"))
    with pytest.raises(InputError, match="count=0"):
        next(generate_documents(1, 0))
