"""The built-in English–Korean sentences: some checked by hand, and properties of all of them."""

from __future__ import annotations

import collections
import hashlib
import itertools
import re
from typing import Literal

import pytest

from jumok.data.builtin.english_korean import SPLITS, SentencePair, read_pairs
from jumok.errors import InputError

pytestmark = pytest.mark.long


# Split and line; English; Korean; links: i-j is a sure one, ipj a possible one.
CHECKED_PAIRS = """
test 1166 | this is an example sentence | 이것은 예문이다 | 0-0 1p1 3-1 4-1
train 58937 | that was not an apple | 저것은 사과가 아니었다 | 0-0 1p2 2-2 4-1
train 4899 | i can swim | 나는 수영할 수 있다 | 0-0 1-2 1-3 2-1
train 23505 | they moved to seoul | 그들은 서울로 이사했다 | 0-0 1-2 2p1 3-1
test 1403 | it will rain tomorrow | 내일 비가 올 것이다 | 1-3 2-1 2-2 3-0
"""
WORDS = "not will can cannot could must because when if but or who which that these with by there became every"


@pytest.fixture(scope="module")
def pairs() -> list[SentencePair]:
    return [pair for split in SPLITS for pair in read_pairs(split, len(SPLITS[split]))]


RIEUL = 8  # ㄹ: 연필로, 서울로


def final_consonant(syllable: str) -> int:
    """The number of the final consonant of a syllable; 0: it ends in a vowel."""
    return (ord(syllable) - ord("가")) % 28


def format_links(pair: SentencePair) -> str:
    links = [(*link, "-") for link in pair.sure_links] + [(*link, "p") for link in pair.possible_links]
    return " ".join(f"{i}{kind}{j}" for i, j, kind in sorted(links))


@pytest.mark.parametrize("line", CHECKED_PAIRS.strip().splitlines())
def test_pairs_checked_by_hand(line: str, pairs: list[SentencePair]) -> None:
    place, english, korean, links = line.split(" | ")
    split, number = place.split()
    pair = pairs[SPLITS[split][int(number)]]
    assert (pair.english, pair.korean, format_links(pair)) == (english, korean, links)


def test_corpus_is_unchanged(pairs: list[SentencePair]) -> None:
    # Scores are compared on these sentences. If they change, write it in the changelog.
    text = "\n".join(f"{pair.english}|{pair.korean}|{format_links(pair)}" for pair in pairs)
    assert len(pairs) == 104_000
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "8ced1032986f44b2"


def test_no_sentence_is_in_two_splits(pairs: list[SentencePair]) -> None:
    train, valid, test = ([pairs[line].english for line in SPLITS[name]] for name in ("train", "valid", "test"))
    assert len(valid) == len(set(valid)) == len(test) == len(set(test)) == 2000
    assert not set(train) & set(valid)
    assert not set(train) & set(test)
    assert not set(valid) & set(test)
    assert len(set(train)) > 0.95 * len(train)


def test_smaller_split_is_the_beginning_of_a_larger_one(pairs: list[SentencePair]) -> None:
    for split in SPLITS:
        start = SPLITS[split].start
        assert list(read_pairs(split, 7)) == pairs[start : start + 7]
        assert list(read_pairs(split, 0)) == []


def test_a_sentence_has_one_translation(pairs: list[SentencePair]) -> None:
    translations: dict[str, SentencePair] = {}
    for pair in pairs:
        assert translations.setdefault(pair.english, pair) == pair


def test_every_korean_word_has_a_sure_link(pairs: list[SentencePair]) -> None:
    num_words = num_links = 0
    for pair in pairs:
        english, korean = pair.english.split(), pair.korean.split()
        links = (*pair.sure_links, *pair.possible_links)
        assert len(set(links)) == len(links)
        assert {i for i, _ in links} <= set(range(len(english)))
        assert {j for _, j in pair.sure_links} == set(range(len(korean))) >= {j for _, j in pair.possible_links}
        num_words, num_links = num_words + len(korean), num_links + len(pair.sure_links)
    assert num_links < 1.02 * num_words


def test_only_articles_and_omitted_subjects_have_no_link(pairs: list[SentencePair]) -> None:
    unlinked: collections.Counter[str] = collections.Counter()
    for pair in pairs:
        linked = {i for i, _ in (*pair.sure_links, *pair.possible_links)}
        unlinked.update(word for i, word in enumerate(pair.english.split()) if i not in linked)
    assert set(unlinked) == {"the", "a", "an", "it", "i", "you", "he", "she", "we", "they"}


def test_sentences_are_plain_words(pairs: list[SentencePair]) -> None:
    counts = collections.Counter(itertools.chain.from_iterable(set(pair.english.split()) for pair in pairs))
    assert all(re.fullmatch(r"[a-z]+('s)?( [a-z]+('s)?)*", pair.english) for pair in pairs)
    assert all(re.fullmatch(r"[가-힣]+( [가-힣]+)*다", pair.korean) for pair in pairs)
    assert [word for word in WORDS.split() if counts[word] < 100] == []


def test_sentences_have_3_to_50_words_and_mostly_5_to_20(pairs: list[SentencePair]) -> None:
    lengths = [len(pair.english.split()) for pair in pairs]
    assert (min(lengths), max(lengths)) == (3, 50)
    assert sum(5 <= length <= 20 for length in lengths) > 0.7 * len(pairs)
    assert sum(length > 40 for length in lengths) > 0.005 * len(pairs)


@pytest.mark.parametrize(
    "mistake",
    [
        r"\ba [aeiou]",
        r"\ban (?!honest)[^aeiou]",
        r"\bi (is|are|were|has|does)\b",
        r"\b(it|she) (am|are|were|have|do)\b",
        r"^(you|we|they) (is|am|was|has|does)\b",
        r"\b(did|does|do) not \w+(ed|s)\b",
        r"\b(will|cannot|must|could) \w+(ed|ting)\b",
        r"\b(?!잘)(\w+) \1\b",
        r"\bthe (soccer|korean|music|minsu|seoul)\b",
        r"\b(these|those) (book|student|dog)\b",
        r"\b(a|an|one|this) (books|students|dogs|men|children)\b",
        r"알지 (않|못)",
        r"(읽|먹|마시|사|만나|배우)지 않다",  # verbs: 먹지 않는다
        r"(크|작|좋|예쁘|바쁘|비싸)지 않는",  # adjectives: 크지 않다
    ],
)
def test_no_grammatical_mistakes(pairs: list[SentencePair], mistake: str) -> None:
    pattern = re.compile(mistake)
    assert [pair for pair in pairs if pattern.search(pair.english) or pattern.search(pair.korean)] == []


@pytest.mark.parametrize(("particle", "follows_consonant"), [("을", True), ("를", False), ("은", True), ("와", False)])
def test_particles_fit_the_sound_before_them(pairs: list[SentencePair], particle: str, follows_consonant: bool) -> None:
    for word in set(itertools.chain.from_iterable(pair.korean.split() for pair in pairs)):
        if word.endswith(particle) and word not in ("마을", "지을", "지은"):  # without a particle
            assert (final_consonant(word[-2]) > 0) == follows_consonant, word
        if word.endswith("으로"):
            assert final_consonant(word[-3]) not in (0, RIEUL), word


@pytest.mark.parametrize(("split", "count"), [("train", 100_001), ("test", 2001), ("valid", -1)])
def test_invalid_count_is_an_error(split: Literal["train", "valid", "test"], count: int) -> None:
    option = "builtin_size" if split == "train" else "held_out_size"
    with pytest.raises(
        InputError, match=rf"{count:,} {split} pairs .* corpus has {len(SPLITS[split]):,}; set data.{option}"
    ):
        read_pairs(split, count)
