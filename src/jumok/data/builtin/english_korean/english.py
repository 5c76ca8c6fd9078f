"""Rules of English word forms. Irregular forms are in the lexicon.

>>> add_s("story"), add_s("watch"), add_ed("study"), add_ing("bake")
('stories', 'watches', 'studied', 'baking')
"""

from __future__ import annotations

import enum

from jumok.data.builtin.english_korean.korean import Tense

PLAIN_S_WORDS = ("piano", "photo", "zoo")  # end in -o, but take -s


class SubjectAgreement(enum.Enum):
    """The person and number of a subject that the verb agrees with."""

    FIRST = "i"
    SINGULAR = "he, she, it"
    PLURAL = "you, we, they"


def conjugate_be(agreement: SubjectAgreement, tense: Tense) -> str:
    """am, is, are, was, were."""
    if tense is Tense.PAST:
        return "were" if agreement is SubjectAgreement.PLURAL else "was"
    return {SubjectAgreement.FIRST: "am", SubjectAgreement.SINGULAR: "is", SubjectAgreement.PLURAL: "are"}[agreement]


def conjugate_do(agreement: SubjectAgreement, tense: Tense) -> str:
    """do, does, did: the auxiliary verb of *not*."""
    return "did" if tense is Tense.PAST else "does" if agreement is SubjectAgreement.SINGULAR else "do"


def choose_article(word: str) -> str:
    """a or an, before this word."""
    return "an" if word[0] in "aeiou" or word == "honest" else "a"


def add_s(word: str) -> str:
    """The plural of a noun, or the third person singular of a verb."""
    if word.endswith(("s", "x", "ch", "sh", "o")) and word not in PLAIN_S_WORDS:
        return word + "es"
    return word[:-1] + "ies" if _ends_in_consonant_y(word) else word + "s"


def add_ed(word: str) -> str:
    """The past of a regular verb."""
    if _ends_in_consonant_y(word):
        return word[:-1] + "ied"
    return word + ("d" if word.endswith("e") else "ed")


def add_ing(word: str) -> str:
    """The present participle. Forms with a doubled consonant (running) are in the lexicon."""
    return (word[:-1] if word.endswith("e") and not word.endswith("ee") else word) + "ing"


def _ends_in_consonant_y(word: str) -> bool:
    return word.endswith("y") and word[-2] not in "aeou"
