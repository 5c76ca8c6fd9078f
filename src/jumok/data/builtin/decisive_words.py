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

NAME_PREFIX = "decisive-words-"  # of the data set names


@dataclass(frozen=True)
class DecisiveDocument:
    """A document, and its class: praise, blame or neither."""

    text: str
    label: str


@dataclass(frozen=True)
class _DecisiveLanguage:
    judgements: dict[str, tuple[str, ...]]
    markers: tuple[str, ...]  # the judgement in the sentence of a marker counts
    distractors: tuple[str, ...]  # adverbs in the position of a marker
    topics: tuple[str, ...]
    judgement_templates: tuple[str, ...]  # {0}: a marker or a distractor, {1}: a topic, {2}: a judgement
    neutral_templates: tuple[str, ...]  # {1}: a topic


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
    """Generate ``count`` documents of 2 to 10 sentences, which depend only on the seed and the name."""
    if name not in LANGUAGES:
        raise InputError(f"there is no built-in data set {name!r}; expected one of {', '.join(LANGUAGES)}")
    if count < 1:
        raise InputError(f"count={count}: expected 1 or more documents")
    language = LANGUAGES[name]
    # A digest makes neighbouring seeds independent.
    rng = random.Random(hashlib.sha256(f"{name} {seed}".encode()).digest())
    classes = tuple(language.judgements)
    distractors = (*language.distractors, *[""] * (len(language.distractors) // 2))
    for _ in range(count):
        label = rng.choice(classes)
        sentences = [_make_judgement(language, rng, label, language.markers)]
        for _ in range(rng.randint(1, 4)):
            sentences.append(_make_judgement(language, rng, rng.choice(classes), distractors))
        for _ in range(rng.randint(0, 5)):
            sentences.append(rng.choice(language.neutral_templates).format("", rng.choice(language.topics)))
        rng.shuffle(sentences)
        yield DecisiveDocument(" ".join(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in sentences), label)


def _make_judgement(language: _DecisiveLanguage, rng: random.Random, label: str, adverbs: Sequence[str]) -> str:
    judgement = rng.choice(language.judgements[label])
    template, topic = rng.choice(language.judgement_templates), rng.choice(language.topics)
    return " ".join(template.format(rng.choice(adverbs), topic, judgement).split())


def find_decisive_words(words: Sequence[str]) -> tuple[int, ...]:
    """The indices of the decisive words: the marker, and the judgement in its sentence."""
    lowercase = [word.lower() for word in words]
    for language in LANGUAGES.values():
        judgement_words = {
            word for phrases in language.judgements.values() for phrase in phrases for word in phrase.split()
        }
        for marker, word in enumerate(lowercase):
            if word in language.markers:
                ends = [index for index, token in enumerate(lowercase) if token == "."]
                start = max((index + 1 for index in ends if index < marker), default=0)
                end = min((index for index in ends if index > marker), default=len(lowercase))
                return tuple(
                    index for index in range(start, end) if index == marker or lowercase[index] in judgement_words
                )
    return ()
