"""The built-in English→Korean data: sentences checked by hand, and what holds for all of them."""

from __future__ import annotations

import collections
import contextlib
import doctest
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import pytest

import jumok.data.builtin.english_korean as module
from jumok.data.builtin.english_korean import (
    SentencePair,
    SentenceSplit,
    assign_split,
    clauses,
    generate_pairs,
    grammar,
    korean,
    lexicon,
    make_splits,
    nominals,
    phrases,
    portable_random,
    predicates,
)  # fmt: skip
from jumok.data.builtin.english_korean.grammar import draw_sentence
from jumok.data.builtin.english_korean.lexicon import Adjective, MotionVerb, Noun, PlacePhrase, Pronoun, Verb
from jumok.data.builtin.english_korean.phrases import (
    Link,
    Phrase,
    add_particle,
    align_words,
    append_english,
    arrange,
    make_unaligned,
    prepend_english,
)
from jumok.data.builtin.english_korean.portable_random import PortableRandom
from jumok.errors import InputError

T = TypeVar("T")

# English, Korean, and below them the links: i-j is a sure one, ipj a possible one.
BY_HAND = """
this is an example sentence | 이것은 예문이다
    0-0 1p1 3-1 4-1
these are my books | 이것들은 나의 책이다
    0-0 1p2 2-1 3-2
that was not an apple | 저것은 사과가 아니었다
    0-0 1p2 2-2 4-1
it is bread | 그것은 빵이다
    0-0 1p1 2-1
minsu is a doctor | 민수는 의사이다
    0-0 1p1 3-1
they were teachers | 그들은 선생님이었다
    0-0 1p1 2-1
jiyoung was my friend | 지영은 나의 친구였다
    0-0 1p2 2-1 3-2
i am not a singer | 나는 가수가 아니다
    0-0 1p2 2-2 4-1
he became a lawyer | 그는 변호사가 되었다
    0-0 1-2 3-1
the house is very big | 집은 매우 크다
    1-0 2p2 3-1 4-2
the apples were not sweet | 사과는 달지 않았다
    1-0 2p2 3-2 4-1
the soup will be hot | 국은 뜨거울 것이다
    1-0 2-2 3p1 4-1
i read a book | 나는 책을 읽었다
    0-0 1-2 3-1
minsu reads the newspaper | 민수는 신문을 읽는다
    0-0 1-2 3-1
a student ate two apples | 학생이 사과 두 개를 먹었다
    1-0 2-4 3-2 3-3 4-1
i picked up one coin | 나는 동전 한 개를 주웠다
    0-0 1-4 2p4 3-2 3-3 4-1
she did not eat the banana | 그녀는 바나나를 먹지 않았다
    0-0 1p3 2-3 3-2 5-1
she does not love him | 그녀는 그를 사랑하지 않는다
    0-0 1p3 2-3 3-2 4-1
the teacher will not write the letter | 선생님은 편지를 쓰지 않을 것이다
    1-0 2-4 3-3 4-2 6-1
jihun will drink water | 지훈은 물을 마실 것이다
    0-0 1-3 2-2 3-1
my mother is making a cake | 나의 어머니는 케이크를 만들고 있다
    0-0 1-1 2-4 3-3 5-2
we were not sleeping | 우리는 자고 있지 않았다
    0-0 1-2 2-3 3-1
i can swim | 나는 수영할 수 있다
    0-0 1-2 1-3 2-1
yuna cannot play the piano | 유나는 피아노를 연주할 수 없다
    0-0 1-3 1-4 2-2 4-1
he could not find the key | 그는 열쇠를 찾을 수 없었다
    0-0 1-3 2-4 3-2 5-1
you must clean the room | 너는 방을 청소해야 한다
    0-0 1-3 2-2 4-1
the child had to help me | 아이는 나를 도와야 했다
    1-0 2-3 3p3 4-2 5-1
you must not open the window | 너는 창문을 열면 안 된다
    0-0 1-4 2-3 3-2 5-1
she does not know us | 그녀는 우리를 모른다
    0-0 1p2 2-2 3-2 4-1
he did not find the key | 그는 열쇠를 찾지 못했다
    0-0 1p3 2-3 3-2 5-1
i have a red hat | 나는 빨간 모자를 가지고 있다
    0-0 1-3 1-4 3-1 4-2
minsu and jiyoung play soccer | 민수와 지영은 축구를 한다
    0-0 1p0 2-1 3-3 4-2
he drinks milk or coffee | 그는 우유나 커피를 마신다
    0-0 1-3 2-1 3p1 4-2
she bought bread and cheese | 그녀는 빵과 치즈를 샀다
    0-0 1-3 2-1 3p1 4-2
i will sell honey and cheese and meat | 나는 꿀과 치즈와 고기를 팔 것이다
    0-0 1-5 2-4 3-1 4p1 5-2 6p2 7-3
junho waited for the bus at the station | 준호는 역에서 버스를 기다렸다
    0-0 1-3 2p3 4-2 5p1 7-1
we went to seoul by train yesterday | 우리는 어제 기차로 서울에 갔다
    0-0 1-4 2p3 3-3 4p2 5-2 6-1
sujin will return to busan next week | 수진은 다음 주에 부산으로 돌아갈 것이다
    0-0 1-5 2-4 3p3 4-3 5-1 6-2
they moved to seoul | 그들은 서울로 이사했다
    0-0 1-2 2p1 3-1
eunji lives in jeju | 은지는 제주에 산다
    0-0 1-2 2p1 3-1
the painter draws flowers with a pencil | 화가는 연필로 꽃을 그린다
    1-0 2-3 3-2 4p1 6-1
she wrote a letter with a pen | 그녀는 펜으로 편지를 썼다
    0-0 1-3 3-2 4p1 6-1
he studies korean hard with minji | 그는 민지와 함께 한국어를 열심히 공부한다
    0-0 1-5 2-3 3-4 4-2 5-1
the singer gave a flower to her | 가수는 그녀에게 꽃을 주었다
    1-0 2-3 4-2 5p1 6-1
they often listen to music | 그들은 자주 음악을 듣는다
    0-0 1-1 2-3 3p3 4-2
on sunday we baked bread | 일요일에 우리는 빵을 구웠다
    0p0 1-0 2-1 3-3 4-2
last year i visited the museum | 작년에 나는 박물관을 방문했다
    0-0 1-0 2-1 3-3 5-2
the man who wore the hat laughed loudly | 모자를 쓴 남자는 크게 웃었다
    1-2 2p1 3-1 5-0 6-4 7-3
i like the song that you sing | 나는 네가 부르는 노래를 좋아한다
    0-0 1-4 3-3 4p2 5-1 6-2
this is the house that my father will build | 이것은 나의 아버지가 지을 집이다
    0-0 1p4 3-4 4p3 5-1 6-2 7p3 8-3
haeun called the children who did not break the plate | 하은은 접시를 깨뜨리지 않은 아이들을 불렀다
    0-0 1-5 3-4 4p3 5p3 6-3 7-2 9-1
minsu ate rice and slept | 민수는 밥을 먹고 잤다
    0-0 1-2 2-1 3p2 4-3
she will read the book and write a letter | 그녀는 책을 읽고 편지를 쓸 것이다
    0-0 1-5 2-2 4-1 5p2 6-4 8-3
he opened the door but did not close the window | 그는 문을 열었지만 창문을 닫지 않았다
    0-0 1-2 3-1 4p2 5p5 6-5 7-4 9-3
minsu worked and she rested | 민수는 일했고 그녀는 쉬었다
    0-0 1-1 2p1 3-2 4-3
honey is sweet but i like bread | 꿀은 달지만 나는 빵을 좋아한다
    0-0 1p1 2-1 3p1 4-2 5-4 6-3
i went home because it rained | 비가 왔기 때문에 나는 집에 갔다
    0-3 1-5 2-4 3-2 5-0 5-1
i slept because i was tired | 나는 피곤했기 때문에 잤다
    0-0 1-3 2-2 4p1 5-1
the children laughed when minsu danced | 민수가 춤추었을 때 아이들은 웃었다
    1-3 2-4 3-2 4-0 5-1
we will be at home if it snows | 눈이 오면 우리는 집에 있을 것이다
    0-2 1-5 2-4 3p3 4-3 5p1 7-0 7-1
the cup is on the table | 컵은 탁자 위에 있다
    1-0 2-3 3-2 5-1
my key was not under the bed | 나의 열쇠는 침대 아래에 없었다
    0-0 1-1 2p4 3-4 4-3 6-2
there are three cats in front of the door | 문 앞에 고양이 세 마리가 있다
    0p5 1-5 2-3 2-4 3-2 4p1 5-1 6p1 8-0
the brave soldier is not at the hospital | 용감한 군인은 병원에 없다
    1-0 2-1 3p3 4-3 5p2 7-2
those dogs drink the milk | 저 개들은 우유를 마신다
    0-0 1-1 2-3 4-2
the teacher's son lost his wallet | 선생님의 아들은 그의 지갑을 잃어버렸다
    1-0 2-1 3-4 4-2 5-3
it will rain tomorrow | 내일 비가 올 것이다
    1-3 2-1 2-2 3-0
"""


class DeadEnd(Exception):
    """What the grammar is about to say is no part of the sentence that is looked for."""


class Leading(PortableRandom):
    """Dice that fall only on words of one sentence, and never twice in the same way.

    ``dead`` holds the ways that have been gone: the options taken, throw by throw.
    """

    def __init__(self, english: str, seed: int, dead: set[tuple[int, ...]]) -> None:
        super().__init__(seed)
        self.text = f" {english} "
        self.dead = dead
        self.way: tuple[int, ...] = ()

    def bernoulli(self, probability: float) -> bool:
        return self._take({True: probability, False: 1 - probability})

    def choice(self, options: Sequence[T]) -> T:
        fitting = [one for one in options if self._may_say(forms(one))]
        return fitting[self._take(dict.fromkeys(range(len(fitting)), 1.0))]

    def weighted_choice(self, options: Mapping[T, float]) -> T:
        return self._take({one: share for one, share in options.items() if self._may_be(one)})

    def _may_be(self, option: object) -> bool:
        """False of a kind of sentence that would need other words: seen here, this need not be tried."""
        needed = {
            grammar._draw_chain: ["and"],
            grammar._draw_contrast: ["but"],
            grammar._draw_subordinate: ["because", "when", "if"],
        }
        if isinstance(option, int):
            return option <= 1 + sum(self.text.count(f" {word} ") for word in ("and", "but"))
        return option not in needed or self._may_say(tuple(needed[option]))

    def _may_say(self, ways: tuple[str, ...]) -> bool:
        return not ways or any(f" {way} " in self.text for way in ways)

    def _take(self, options: Mapping[T, float]) -> T:
        alive = {
            number: share
            for number, share in enumerate(options.values())
            if share > 0 and (*self.way, number) not in self.dead
        }
        if not alive or len(self.way) > 150:
            raise DeadEnd
        number = super().weighted_choice(alive)
        self.way = (*self.way, number)
        return list(options)[number]


@functools.cache
def forms(option: object) -> tuple[str, ...]:
    """The ways in which something of the lexicon may be said in English."""
    match option:
        case Noun():
            return (option.english, option.plural or option.english, f"{option.english}'s")
        case Verb():
            return (option.base, option.past, option.third_person, option.present_participle)
        case Pronoun():
            return (option.subject, option.object, option.possessive)
        case Adjective():
            return (option.english,)
        case Phrase():
            return (" ".join(option.english),)
        case (str() as name, _):
            return (name, f"{name}'s")
        case (Phrase() | Verb() as first, *_):
            return forms(first)
        case MotionVerb():
            return forms(option.verb)
        case PlacePhrase():
            return forms(option.noun)
    return ()  # which of some clauses, nouns of which kind: that is no word


@pytest.fixture
def derivations(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Iterator[Phrase]]:
    """The ways in which the grammar says a sentence; whatever it puts together must be a part of it."""

    def search(english: str) -> Iterator[Phrase]:
        def within(function: Callable[..., Phrase]) -> Callable[..., Phrase]:
            def checked(*arguments: object) -> Phrase:
                phrase = function(*arguments)
                if f" {' '.join(phrase.english)} " not in f" {english} ":
                    raise DeadEnd
                return phrase

            return checked

        for name in ("align_words", "make_unaligned", "arrange"):
            checked = within(getattr(phrases, name))
            for place in (phrases, predicates, nominals, clauses, grammar):
                if hasattr(place, name):
                    monkeypatch.setattr(place, name, checked)
        dead: set[tuple[int, ...]] = set()
        for seed in range(20_000):
            dice = Leading(english, seed, dead)
            with contextlib.suppress(DeadEnd):
                phrase = draw_sentence(dice)
                if " ".join(phrase.english) == english:
                    yield phrase
            dead.add(dice.way)
            if () in dead:
                return

    return search


def by_hand() -> list[tuple[str, str, str]]:
    lines = BY_HAND.strip().splitlines()
    pairs = [line.split(" | ") for line in lines[::2]]
    return [(english, korean, links.strip()) for (english, korean), links in zip(pairs, lines[1::2], strict=True)]


def written(sure: Sequence[Link], possible: Sequence[Link]) -> str:
    links = [(i, j, "-") for i, j in sure] + [(i, j, "p") for i, j in possible]
    return " ".join(f"{i}{kind}{j}" for i, j, kind in sorted(links))


@pytest.mark.parametrize(("english", "korean", "links"), by_hand(), ids=[english for english, _, _ in by_hand()])
def test_a_sentence_by_hand(
    english: str, korean: str, links: str, derivations: Callable[[str], Iterator[Phrase]]
) -> None:
    phrase = next(derivations(english), None)
    assert phrase is not None, "the grammar does not say this"
    assert " ".join(phrase.korean) == korean
    assert written(phrase.sure_links, phrase.possible_links) == links


@pytest.mark.parametrize("one", [module, portable_random, grammar, phrases, predicates])
def test_the_examples_in_the_docstrings(one: object) -> None:
    assert doctest.testmod(one).failed == 0  # type: ignore[arg-type]


# What holds for all sentences


COUNT = 50_000


@pytest.fixture(scope="module")
def pairs() -> list[SentencePair]:
    return list(generate_pairs(seed=7, count=COUNT))


def test_one_english_sentence_has_one_translation(pairs: list[SentencePair]) -> None:
    translations: dict[str, tuple[object, ...]] = {}
    for pair in pairs:
        said = (pair.korean, pair.sure_links, pair.possible_links)
        assert translations.setdefault(pair.english, said) == said
    # Too many to be learnt by heart: but for the short ones, hardly one is drawn twice.
    long = [pair.english for pair in pairs if len(pair.english.split()) > 6]
    assert len(set(long)) > 0.998 * len(long)
    assert len(translations) > 0.95 * COUNT


def test_every_korean_word_has_a_sure_link_and_nearly_always_one(pairs: list[SentencePair]) -> None:
    words = links = 0
    for pair in pairs:
        english, korean = pair.english.split(), pair.korean.split()
        for i, j in (*pair.sure_links, *pair.possible_links):
            assert 0 <= i < len(english)
            assert 0 <= j < len(korean)
        assert len({*pair.sure_links, *pair.possible_links}) == len(pair.sure_links) + len(pair.possible_links)
        assert {j for _, j in pair.sure_links} == set(range(len(korean)))
        words, links = words + len(korean), links + len(pair.sure_links)
    assert links < 1.02 * words


def test_only_articles_and_subjects_that_go_without_saying_have_no_link(pairs: list[SentencePair]) -> None:
    alone: collections.Counter[str] = collections.Counter()
    total = 0
    for pair in pairs:
        linked = {i for i, _ in (*pair.sure_links, *pair.possible_links)}
        english = pair.english.split()
        alone.update(word for i, word in enumerate(english) if i not in linked)
        total += len(english)
    articles, subjects = {"the", "a", "an"}, {"it", "i", "you", "he", "she", "we", "they"}
    assert set(alone) == articles | subjects
    assert sum(alone[word] for word in articles) < 0.15 * total
    assert sum(alone[word] for word in subjects) < 0.02 * total


def test_words_are_plain(pairs: list[SentencePair]) -> None:
    for pair in pairs:
        assert re.fullmatch(r"[a-z]+('s)?( [a-z]+('s)?)*", pair.english)
        assert re.fullmatch(r"[가-힣]+( [가-힣]+)*다", pair.korean)


def test_lengths_are_3_to_50_words_and_mostly_5_to_20(pairs: list[SentencePair]) -> None:
    lengths = [len(pair.english.split()) for pair in pairs]
    shares = {low: sum(low <= n < low + 10 for n in lengths) / COUNT for low in (1, 11, 21, 31, 41)}
    assert min(lengths) == 3
    assert max(lengths) == 50
    assert sum(5 <= n <= 20 for n in lengths) > 0.7 * COUNT
    assert shares[11] > shares[21] > shares[31] > shares[41] > 0.005


# After a consonant, after a vowel.
PARTICLES = {"은": "는", "이": "가", "을": "를", "과": "와", "이나": "나", "으로": "로"}


def has_final(word: str) -> bool:
    return (ord(word[-1]) - ord("가")) % 28 > 0


def ends_in_rieul(word: str) -> bool:
    return (ord(word[-1]) - ord("가")) % 28 == 8


def test_every_particle_fits_what_it_follows(pairs: list[SentencePair]) -> None:
    names = {written for _, written in lexicon.NAMES} | {one.korean for one in lexicon.PRONOUNS}
    places = {place.noun.korean[0] for place in lexicon.PROPER_PLACES if isinstance(place.noun, Phrase)}
    stems = {noun.korean for noun in lexicon.NOUNS.values()} | names | places | {"이것", "저것", "그것"}
    stems |= {noun.counter for noun in lexicon.NOUNS.values() if noun.counter}
    stems |= {stem + "들" for stem in stems}
    seen: collections.Counter[tuple[str, bool, bool]] = collections.Counter()
    for word in itertools.chain.from_iterable(pair.korean.split() for pair in pairs):
        # The longest noun that the word begins with; what is left is a particle, or the word is no noun.
        stem = next((word[:n] for n in range(len(word) - 1, 0, -1) if word[:n] in stems), None)
        if stem is None:
            continue
        rest = word[len(stem) :]
        closed = has_final(stem)
        if rest in PARTICLES:
            assert closed, word
            assert not (rest == "으로" and ends_in_rieul(stem)), word
        elif rest in PARTICLES.values():
            assert not closed or (rest == "로" and ends_in_rieul(stem)), word
        else:
            continue
        seen[rest, closed, ends_in_rieul(stem)] += 1
    # Each of them was there, after each sound that it may follow.
    for consonant, vowel in PARTICLES.items():
        assert seen[vowel, False, False] > 0
        assert seen[consonant, True, False] > 0
        assert seen["로" if consonant == "으로" else consonant, True, True] > 0


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
        # A verb does not do so: 먹지 않는다. An adjective is not so: 크지 않다.
        rf"\b({'|'.join(verb.stem.text for verb in lexicon.TRANSITIVES if verb.base != 'have')})지 않다",
        rf"\b({'|'.join(one.stem.text for one in lexicon.ADJECTIVES)})지 않는",
    ],
)
def test_mistakes_that_are_not_made(pairs: list[SentencePair], mistake: str) -> None:
    pattern = re.compile(mistake)
    found = [pair for pair in pairs if pattern.search(pair.english) or pattern.search(pair.korean)]
    assert found == []


WORDS = "not will can cannot could must because when if but or who which that these with by there became every"


@pytest.mark.parametrize("word", WORDS.split())
def test_every_construction_is_there(pairs: list[SentencePair], word: str) -> None:
    assert sum(word in pair.english.split() for pair in pairs) >= 50


# Seeds and splits


def digest(pairs: Sequence[SentencePair]) -> str:
    rows = [repr((pair.english, pair.korean, pair.sure_links, pair.possible_links)) for pair in pairs]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def test_a_seed_gives_the_same_sentences_everywhere() -> None:
    # Figures are compared on this data: if this changes, say so in the changelog.
    assert digest(list(generate_pairs(seed=0, count=500))) == "0796d9ec5f5f23d5"
    assert digest(list(generate_pairs(seed=1, count=500))) != digest(list(generate_pairs(seed=-1, count=500)))


def test_sentences_come_one_by_one() -> None:
    endless = generate_pairs(seed=3, count=10**12)
    assert list(itertools.islice(endless, 5)) == list(generate_pairs(seed=3, count=5))
    assert list(generate_pairs(seed=3, count=0)) == []


@pytest.mark.parametrize("longest", [3, 4, 7, 50])
def test_the_longest_sentence_may_be_given(longest: int) -> None:
    found = list(generate_pairs(seed=5, count=50, max_words=longest))
    assert len(found) == 50
    assert max(len(pair.english.split()) for pair in found) <= longest


def test_no_sentence_is_in_two_splits() -> None:
    small, large = make_splits(seed=1, train=2_000, valid=150, test=150), make_splits(seed=2, train=3_000)
    train = {pair.english for data in (small, large) for pair in data.train}
    valid, test = ([pair.english for pair in part] for part in (small.valid, small.test))
    assert len(valid) == len(set(valid)) == len(test) == len(set(test)) == 150
    assert not train & set(valid)
    assert not train & set(test)
    assert not set(valid) & set(test)
    assert [assign_split(english) for english in train] == [SentenceSplit.TRAIN] * len(train)


def test_a_split_is_the_same_at_every_walk_and_begins_alike_at_every_size() -> None:
    few, many = (
        make_splits(seed=4, train=20, valid=7, test=7),
        make_splits(seed=4, train=50, valid=20, test=20),
    )
    for part in ("train", "valid", "test"):
        one, other = getattr(few, part), getattr(many, part)
        assert list(one) == list(one) == list(other)[: len(one)]
        assert len(list(one)) == len(one)
    assert list(few.train) != list(make_splits(seed=5, train=20).train)


def test_about_one_in_sixteen_is_for_testing(pairs: list[SentencePair]) -> None:
    counts = collections.Counter(assign_split(english) for english in {pair.english for pair in pairs})
    total = sum(counts.values())
    assert abs(counts[SentenceSplit.TEST] / total - 1 / 16) < 0.005
    assert abs(counts[SentenceSplit.VALID] / total - 1 / 16) < 0.005


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="count=-1"):
        generate_pairs(seed=0, count=-1)
    with pytest.raises(InputError, match="max_words=2"):
        generate_pairs(seed=0, count=1, max_words=2)
    with pytest.raises(InputError, match="count=-5"):
        make_splits(test=-5)


def test_more_than_there_are_is_refused_and_not_looked_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MISSED_DRAWS", 20)
    with pytest.raises(InputError, match="different sentences of up to 3 words"):
        list(make_splits(test=100_000, max_words=3).test)


# Phrases


def test_links_follow_the_words_wherever_they_go() -> None:
    did_not = prepend_english("did", align_words("not", "않았다"))
    eat = align_words("eat", "먹지")
    apple = add_particle(align_words("apple", "사과"), korean.OBJECT)
    phrase = arrange([did_not, eat, make_unaligned("an"), apple], [apple, eat, did_not])
    assert phrase == Phrase(
        ("did", "not", "eat", "an", "apple"),
        ("사과를", "먹지", "않았다"),
        ((1, 2), (2, 1), (4, 0)),
        ((0, 2),),
    )


def test_words_without_a_word_of_their_own_lean_on_the_last_one() -> None:
    assert append_english(align_words("wait", "기다린다"), "for") == Phrase(
        ("wait", "for"), ("기다린다",), ((0, 0),), ((1, 0),)
    )
    assert prepend_english("in", align_words("the house", "큰 집에")).possible_links == ((0, 1),)


def test_an_idiom_goes_word_by_word_if_it_has_as_many_in_both() -> None:
    assert align_words("next week", "다음 주에").sure_links == ((0, 0), (1, 1))
    assert align_words("example sentence", "예문").sure_links == ((0, 0), (1, 0))
    assert align_words("can", "수 있다").sure_links == ((0, 0), (0, 1))
