"""The tokens that papers on Multi30k give their scores in: lower-cased, normalised, cut by Moses' rules.

Through sacremoses, which is Moses' own scripts in Python. Source, target and reference are prepared alike; a
translation of prepared text is made of such tokens, and ``detokenize`` makes plain (lower-case) text of it.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from jumok.data.readers.text_files import import_optional

__all__ = ["detokenize", "tokenize"]

# Points before a quote, in German, Spanish and French. sacremoses tries a run of points from each of its
# characters, which takes quadratic time; here a run is consumed whether a quote follows or not.
QUADRATIC_POINTS = r'(\.+)"(\s*[^<])'
LINEAR_POINTS = re.compile(r'(\.++)(?:"(\s*[^<]))?')


class MosesTools(NamedTuple):
    """Moses' scripts for one language."""

    normalizer: Any
    tokenizer: Any
    detokenizer: Any


def tokenize(line: str, language: str) -> str:
    """A line as tokens with a space between them.

    >>> tokenize("Two dogs' owner said: “Sit!”", "en")
    'two dogs &apos; owner said : &quot; sit ! &quot;'
    """
    tools = _get_tools(language)
    normal = tools.normalizer.normalize(line.lower().strip())
    return str(tools.tokenizer.tokenize(normal, escape=True, return_str=True))


def detokenize(line: str, language: str) -> str:
    r"""Plain text from the tokens of ``tokenize``, signs back at their words.

    >>> detokenize("two dogs &apos; owner said : &quot; sit ! &quot;", "en")
    'two dogs\' owner said: "sit!"'
    """
    return str(_get_tools(language).detokenizer.detokenize(line.split()))


@functools.lru_cache(maxsize=16)  # making them takes longer than a hundred lines do
def _get_tools(language: str) -> MosesTools:
    moses = import_optional("sacremoses", "train")
    normalizer, tokenizer = moses.MosesPunctNormalizer(language), moses.MosesTokenizer(language)
    normalizer.substitutions = [
        (LINEAR_POINTS, _move_quote_first) if pattern == QUADRATIC_POINTS else (pattern, replacement)
        for pattern, replacement in normalizer.substitutions
    ]
    # sacremoses builds these sets, of up to 130,000 characters, anew for every token that ends with a point.
    letters, small = frozenset(tokenizer.IsAlpha), frozenset(tokenizer.IsLower)
    tokenizer.isanyalpha = lambda text: not letters.isdisjoint(text)
    tokenizer.islower = small.issuperset
    return MosesTools(normalizer, tokenizer, moses.MosesDetokenizer(language))


def _move_quote_first(match: re.Match[str]) -> str:
    return match[0] if match[2] is None else f'"{match[1]}{match[2]}'
