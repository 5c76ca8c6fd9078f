"""Documents whose class depends on one sentence, generated from a seed: the decisive words are known.

::

    The tram has a blue roof. The soup was awful. The museum was splendid overall. Once the film was usual.
                          misleading          the one that counts: praise

Every document contains several judgements: praise, blame or neither. Only the judgement in the sentence with
a *marker* (overall, finally, …) counts. The other judgements are random, and so are the number and the order
of the sentences. The class therefore depends neither on a position nor on word counts: a model must find the
sentence with the marker and read the judgement in it.

>>> document = next(generate_documents(seed=2, count=1))
>>> words = document.text.replace(".", " .").split()
>>> document.label, [words[index] for index in find_decisive_words(words)]
('praise', ['Altogether', 'brilliant'])
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jumok.errors import InputError

__all__ = ["LANGUAGES", "DecisiveDocument", "find_decisive_words", "generate_documents"]

NAME_PREFIX = "decisive-words-"  # of what a recipe calls them


@dataclass(frozen=True)
class DecisiveDocument:
    """A document and its class: praise, blame or neither."""

    text: str
    label: str


@dataclass(frozen=True)
class _DecisiveLanguage:
    judgements: dict[str, tuple[str, ...]]
    markers: tuple[str, ...]  # the judgement in their sentence counts
    distractors: tuple[str, ...]  # stand where markers do, or nothing does
    topics: tuple[str, ...]
    judgement_templates: tuple[str, ...]  # {0}: a marker or another, {1}: a thing, {2}: a judgement
    neutral_templates: tuple[str, ...]  # {1}: a thing


ENGLISH = _DecisiveLanguage(
    {
        "praise": ("splendid", "delightful", "superb", "charming", "brilliant", "wonderful"),
        "blame": ("awful", "dreary", "tedious", "shabby", "dismal", "terrible"),
        "neither": ("ordinary", "average", "passable", "middling", "standard", "usual"),
    },
    ("overall", "altogether", "finally", "ultimately"),
    ("yesterday", "reportedly", "elsewhere", "formerly", "allegedly", "once", "sometimes", "upstairs"),
    ("museum", "soup", "hotel", "concert", "garden", "bridge", "bakery", "harbour", "film", "market",
     "library", "tram", "castle", "festival", "beach", "kitchen"),
    ("{0} the {1} was {2}", "the {1} was {2} {0}", "we {0} found the {1} rather {2}",
     "they called the {1} {2} {0}", "{0} my uncle thought the {1} {2}", "the {1} seemed {0} quite {2} to us"),
    ("the {1} opens at nine", "we walked to the {1} in the rain", "there is a map of the {1} at the door",
     "my sister waited near the {1}", "a bus goes to the {1} every hour", "the {1} has a blue roof",
     "nobody told us where the {1} is", "tickets for the {1} are sold at the station"),
)  # fmt: skip
KOREAN = _DecisiveLanguage(
    {
        "praise": ("훌륭했다", "멋졌다", "근사했다", "완벽했다", "눈부셨다", "탁월했다"),
        "blame": ("형편없었다", "지루했다", "초라했다", "끔찍했다", "엉망이었다", "불쾌했다"),
        "neither": ("평범했다", "무난했다", "그저 그랬다", "보통이었다", "비슷했다", "여전했다"),
    },
    ("결국", "종합하면", "결론적으로", "마침내"),
    ("어제는", "예전에는", "듣기로는", "가끔", "멀리서", "처음에", "남들에게는", "밤에는"),
    ("박물관은", "국물은", "호텔은", "공연은", "정원은", "다리는", "빵집은", "항구는", "영화는", "시장은",
     "도서관은", "전차는", "성은", "축제는", "바닷가는", "부엌은"),
    ("{0} {1} {2}", "{1} {0} {2}", "{0} 그 {1} 꽤 {2}", "그 {1} {0} 상당히 {2}", "우리가 간 {1} {0} {2}",
     "{0} 삼촌이 본 {1} 아주 {2}"),
    ("{1} 아홉 시에 연다", "{1} 역에서 가깝다", "{1} 지붕이 파랗다", "{1} 문 앞에 지도가 있다",
     "{1} 매시간 버스가 다닌다", "{1} 어디인지 아무도 몰랐다", "{1} 표를 역에서 판다", "{1} 월요일에 쉰다"),
)  # fmt: skip
LANGUAGES = {f"{NAME_PREFIX}en": ENGLISH, f"{NAME_PREFIX}ko": KOREAN}


def generate_documents(seed: int, count: int, name: str = f"{NAME_PREFIX}en") -> Iterator[DecisiveDocument]:
    """``count`` documents of 2 to 10 sentences, always the same ones for a seed."""
    if name not in LANGUAGES:
        raise InputError(f"there is no built-in data {name!r}; there is: {', '.join(LANGUAGES)}")
    if count < 1:
        raise InputError(f"{count} documents came; 1 or more is expected")
    language = LANGUAGES[name]
    # A digest, so that neighbouring seeds have nothing in common.
    chance = random.Random(hashlib.sha256(f"{name} {seed}".encode()).digest())
    classes = tuple(language.judgements)
    others = (*language.distractors, *[""] * (len(language.distractors) // 2))
    for _ in range(count):
        label = chance.choice(classes)
        found = [_make_judgement(language, chance, label, language.markers)]
        for _ in range(chance.randint(1, 4)):
            found.append(_make_judgement(language, chance, chance.choice(classes), others))
        for _ in range(chance.randint(0, 5)):
            found.append(chance.choice(language.neutral_templates).format("", chance.choice(language.topics)))
        chance.shuffle(found)
        yield DecisiveDocument(" ".join(f"{one[:1].upper()}{one[1:]}." for one in found), label)


def _make_judgement(
    language: _DecisiveLanguage, rng: random.Random, label: str, adverbs: Sequence[str]
) -> str:
    judged = rng.choice(language.judgements[label])
    frame, thing = rng.choice(language.judgement_templates), rng.choice(language.topics)
    return " ".join(frame.format(rng.choice(adverbs), thing, judged).split())


def find_decisive_words(words: Sequence[str]) -> tuple[int, ...]:
    """Which words of a document decide: the marker, and the judgement in its sentence; signs are words."""
    low = [word.lower() for word in words]
    for language in LANGUAGES.values():
        judging = {word for some in language.judgements.values() for one in some for word in one.split()}
        for at, word in enumerate(low):
            if word in language.markers:
                ends = [place for place, sign in enumerate(low) if sign == "."]
                begin = max((place + 1 for place in ends if place < at), default=0)
                end = min((place for place in ends if place > at), default=len(low))
                return tuple(place for place in range(begin, end) if place == at or low[place] in judging)
    return ()
