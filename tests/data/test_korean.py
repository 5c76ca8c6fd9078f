"""Korean word forms, against what a grammar book says."""

from __future__ import annotations

import doctest

import pytest

from jumok.data.builtin.english_korean import english as english_module
from jumok.data.builtin.english_korean import korean as module
from jumok.data.builtin.english_korean.english import (
    SubjectAgreement,
    add_ed,
    add_ing,
    add_s,
    choose_article,
    conjugate_be,
    conjugate_do,
)
from jumok.data.builtin.english_korean.korean import (
    AND,
    AT,
    BY,
    IN,
    OBJECT,
    OF,
    OR,
    SUBJECT,
    TO,
    TOPIC,
    Ending,
    PredicateGroup,
    Stem,
    Tense,
    append_particle,
    conjugate,
    final_consonant,
    make_infinitive,
    make_negative_stem,
)

PAST, PRESENT, FUTURE = Tense.PAST, Tense.PRESENT, Tense.FUTURE


@pytest.mark.parametrize("one", [module, english_module])
def test_the_examples_in_the_docstrings(one: object) -> None:
    assert doctest.testmod(one).failed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "last"), [("가", ""), ("각", "ㄱ"), ("사과", ""), ("않", "ㄶ"), ("힣", "ㅎ"), ("꿀", "ㄹ")]
)
def test_the_final_consonant(word: str, last: str) -> None:
    assert final_consonant(word) == last


@pytest.mark.parametrize(
    ("noun", "forms"),
    [
        # 은/는, 이/가, 을/를, 과/와, 이나/나, 으로/로
        ("책", "책은 책이 책을 책과 책이나 책으로"),
        ("사과", "사과는 사과가 사과를 사과와 사과나 사과로"),
        ("서울", "서울은 서울이 서울을 서울과 서울이나 서울로"),
        ("연필", "연필은 연필이 연필을 연필과 연필이나 연필로"),
        ("꽃", "꽃은 꽃이 꽃을 꽃과 꽃이나 꽃으로"),
        ("우리", "우리는 우리가 우리를 우리와 우리나 우리로"),
        ("나", "나는 내가 나를 나와 나나 나로"),
        ("너", "너는 네가 너를 너와 너나 너로"),
        ("바나나", "바나나는 바나나가 바나나를 바나나와 바나나나 바나나로"),
        ("그녀", "그녀는 그녀가 그녀를 그녀와 그녀나 그녀로"),
    ],
)
def test_particles_follow_the_final_consonant(noun: str, forms: str) -> None:
    assert [append_particle(noun, one) for one in (TOPIC, SUBJECT, OBJECT, AND, OR, BY)] == forms.split()
    assert [append_particle(noun, one) for one in (AT, IN, TO, OF)] == [
        noun + one for one in ("에", "에서", "에게", "의")
    ]


@pytest.mark.parametrize(
    ("stem", "irregular", "forms"),
    [
        # present, past, before a noun: present, past, future, then -고, -면, -아/어야
        ("먹", "", "먹는다 먹었다 먹는 먹은 먹을 먹고 먹으면 먹어야"),
        ("가", "", "간다 갔다 가는 간 갈 가고 가면 가야"),
        ("오", "", "온다 왔다 오는 온 올 오고 오면 와야"),
        ("보", "", "본다 보았다 보는 본 볼 보고 보면 보아야"),
        ("주", "", "준다 주었다 주는 준 줄 주고 주면 주어야"),
        ("배우", "", "배운다 배웠다 배우는 배운 배울 배우고 배우면 배워야"),
        ("마시", "", "마신다 마셨다 마시는 마신 마실 마시고 마시면 마셔야"),
        ("보내", "", "보낸다 보냈다 보내는 보낸 보낼 보내고 보내면 보내야"),
        ("쉬", "", "쉰다 쉬었다 쉬는 쉰 쉴 쉬고 쉬면 쉬어야"),
        ("되", "", "된다 되었다 되는 된 될 되고 되면 되어야"),
        ("하", "", "한다 했다 하는 한 할 하고 하면 해야"),
        ("쓰", "", "쓴다 썼다 쓰는 쓴 쓸 쓰고 쓰면 써야"),
        ("모으", "", "모은다 모았다 모으는 모은 모을 모으고 모으면 모아야"),
        ("살", "", "산다 살았다 사는 산 살 살고 살면 살아야"),
        ("만들", "", "만든다 만들었다 만드는 만든 만들 만들고 만들면 만들어야"),
        ("앉", "", "앉는다 앉았다 앉는 앉은 앉을 앉고 앉으면 앉아야"),
        ("씻", "", "씻는다 씻었다 씻는 씻은 씻을 씻고 씻으면 씻어야"),
        ("닫", "", "닫는다 닫았다 닫는 닫은 닫을 닫고 닫으면 닫아야"),
        ("듣", "ㄷ", "듣는다 들었다 듣는 들은 들을 듣고 들으면 들어야"),
        ("돕", "ㅂ", "돕는다 도왔다 돕는 도운 도울 돕고 도우면 도와야"),
        ("굽", "ㅂ", "굽는다 구웠다 굽는 구운 구울 굽고 구우면 구워야"),
        ("짓", "ㅅ", "짓는다 지었다 짓는 지은 지을 짓고 지으면 지어야"),
        ("부르", "르", "부른다 불렀다 부르는 부른 부를 부르고 부르면 불러야"),
        ("고르", "르", "고른다 골랐다 고르는 고른 고를 고르고 고르면 골라야"),
        ("않", "", "않는다 않았다 않는 않은 않을 않고 않으면 않아야"),
    ],
)
def test_verbs(stem: str, irregular: str, forms: str) -> None:
    verb = Stem(stem, PredicateGroup.ACTION, irregular)
    said = [conjugate(verb, tense, Ending.PLAIN) for tense in (PRESENT, PAST)]
    said += [conjugate(verb, tense, Ending.NOUN) for tense in (PRESENT, PAST, FUTURE)]
    said += [conjugate(verb, PRESENT, ending) for ending in (Ending.AND, Ending.IF)]
    assert [*said, make_infinitive(verb) + "야"] == forms.split()


@pytest.mark.parametrize(
    ("stem", "group", "irregular", "forms"),
    [
        # present, past, before a noun: present, past, future, then -지만, -면
        ("크", PredicateGroup.STATE, "", "크다 컸다 큰 컸던 클 크지만 크면"),
        ("작", PredicateGroup.STATE, "", "작다 작았다 작은 작았던 작을 작지만 작으면"),
        ("바쁘", PredicateGroup.STATE, "", "바쁘다 바빴다 바쁜 바빴던 바쁠 바쁘지만 바쁘면"),
        ("슬프", PredicateGroup.STATE, "", "슬프다 슬펐다 슬픈 슬펐던 슬플 슬프지만 슬프면"),
        ("길", PredicateGroup.STATE, "", "길다 길었다 긴 길었던 길 길지만 길면"),
        ("좁", PredicateGroup.STATE, "", "좁다 좁았다 좁은 좁았던 좁을 좁지만 좁으면"),
        (
            "아름답",
            PredicateGroup.STATE,
            "ㅂ",
            "아름답다 아름다웠다 아름다운 아름다웠던 아름다울 아름답지만 아름다우면",
        ),
        ("빨갛", PredicateGroup.STATE, "ㅎ", "빨갛다 빨갰다 빨간 빨갰던 빨갈 빨갛지만 빨가면"),
        ("하얗", PredicateGroup.STATE, "ㅎ", "하얗다 하얬다 하얀 하얬던 하얄 하얗지만 하야면"),
        ("빠르", PredicateGroup.STATE, "르", "빠르다 빨랐다 빠른 빨랐던 빠를 빠르지만 빠르면"),
        ("맛있", PredicateGroup.EXISTENCE, "", "맛있다 맛있었다 맛있는 맛있던 맛있을 맛있지만 맛있으면"),
        (
            "학생이",
            PredicateGroup.COPULA,
            "",
            "학생이다 학생이었다 학생인 학생이었던 학생일 학생이지만 학생이면",
        ),
        ("의사이", PredicateGroup.COPULA, "", "의사이다 의사였다 의사인 의사였던 의사일 의사이지만 의사이면"),
        ("아니", PredicateGroup.COPULA, "", "아니다 아니었다 아닌 아니었던 아닐 아니지만 아니면"),
        ("것이", PredicateGroup.COPULA, "", "것이다 것이었다 것인 것이었던 것일 것이지만 것이면"),
        ("알", PredicateGroup.FEELING, "", "안다 알았다 아는 알았던 알 알지만 알면"),
    ],
)
def test_adjectives_and_states(stem: str, group: PredicateGroup, irregular: str, forms: str) -> None:
    one = Stem(stem, group, irregular)
    said = [conjugate(one, tense, Ending.PLAIN) for tense in (PRESENT, PAST)]
    said += [conjugate(one, tense, Ending.NOUN) for tense in (PRESENT, PAST, FUTURE)]
    assert [*said, *(conjugate(one, PRESENT, ending) for ending in (Ending.BUT, Ending.IF))] == forms.split()


@pytest.mark.parametrize(
    ("ending", "forms"),
    [
        (Ending.AND, "먹었고 컸고 의사였고"),
        (Ending.BUT, "먹었지만 컸지만 의사였지만"),
        (Ending.BECAUSE, "먹었기 컸기 의사였기"),
        (Ending.WHEN, "먹었을 컸을 의사였을"),
        (Ending.IF, "먹었으면 컸으면 의사였으면"),
    ],
)
def test_the_past_goes_on(ending: Ending, forms: str) -> None:
    stems = Stem("먹"), Stem("크", PredicateGroup.STATE), Stem("의사이", PredicateGroup.COPULA)
    assert [conjugate(stem, PAST, ending) for stem in stems] == forms.split()


def test_a_negated_verb_acts_and_a_negated_adjective_is() -> None:
    assert conjugate(make_negative_stem(Stem("먹")), PRESENT, Ending.PLAIN) == "않는다"
    assert conjugate(make_negative_stem(Stem("크", PredicateGroup.STATE)), PRESENT, Ending.PLAIN) == "않다"
    assert conjugate(make_negative_stem(Stem("있", PredicateGroup.EXISTENCE)), PRESENT, Ending.NOUN) == "않은"


def test_only_before_a_noun_has_the_future_a_form() -> None:
    with pytest.raises(ValueError, match="것이다"):
        conjugate(Stem("먹"), FUTURE, Ending.PLAIN)


def test_english_forms() -> None:
    assert [add_s(word) for word in ("dog", "box", "bus", "peach", "toy", "story", "potato", "photo")] == [
        "dogs", "boxes", "buses", "peaches", "toys", "stories", "potatoes", "photos",
    ]  # fmt: skip
    assert [add_ed(word) for word in ("cook", "like", "carry", "play")] == [
        "cooked",
        "liked",
        "carried",
        "played",
    ]
    assert [add_ing(word) for word in ("read", "make", "see", "carry")] == [
        "reading",
        "making",
        "seeing",
        "carrying",
    ]
    assert [choose_article(word) for word in ("apple", "book", "umbrella", "honest", "hat")] == [
        "an",
        "a",
        "an",
        "an",
        "a",
    ]
    persons = (SubjectAgreement.FIRST, SubjectAgreement.SINGULAR, SubjectAgreement.PLURAL)
    assert [conjugate_be(one, tense) for tense in (PRESENT, PAST) for one in persons] == [
        "am",
        "is",
        "are",
        "was",
        "was",
        "were",
    ]
    assert [conjugate_do(one, tense) for tense in (PRESENT, PAST) for one in persons] == [
        "do",
        "does",
        "do",
        "did",
        "did",
        "did",
    ]
