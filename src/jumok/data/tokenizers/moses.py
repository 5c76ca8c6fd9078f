"""Moses tokenization of lower-cased and normalized text, in which papers on Multi30k report their scores.

It uses sacremoses, a Python port of the scripts of Moses. Sources, targets and references are tokenized in
the same way. A translation then consists of such tokens, and ``detokenize`` turns it into plain lower-case
text.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from jumok.data.readers.text_files import import_optional

# Periods before a quote, in German, Spanish and French. The pattern of sacremoses tries a run of periods from
# each of its characters, which takes quadratic time. This one consumes a run whether or not a quote follows.
QUADRATIC_POINTS = r'(\.+)"(\s*[^<])'
LINEAR_POINTS = re.compile(r'(\.++)(?:"(\s*[^<]))?')


class MosesTools(NamedTuple):
    """The tools of Moses for one language."""

    normalizer: Any
    tokenizer: Any
    detokenizer: Any


def tokenize(line: str, language: str) -> str:
    """Tokenize a line. Tokens are separated by spaces.

    >>> tokenize("Two dogs' owner said: “Sit!”", "en")
    'two dogs &apos; owner said : &quot; sit ! &quot;'
    """
    tools = _get_tools(language)
    normalized = tools.normalizer.normalize(line.lower().strip())
    return str(tools.tokenizer.tokenize(normalized, escape=True, return_str=True))


def detokenize(line: str, language: str) -> str:
    r"""Plain text from the tokens of :func:`tokenize`.

    >>> detokenize("two dogs &apos; owner said : &quot; sit ! &quot;", "en")
    'two dogs\' owner said: "sit!"'
    """
    return str(_get_tools(language).detokenizer.detokenize(line.split()))


@functools.lru_cache(maxsize=16)  # creating them takes longer than tokenizing a hundred lines
def _get_tools(language: str) -> MosesTools:
    moses = import_optional("sacremoses", "train")
    normalizer, tokenizer = moses.MosesPunctNormalizer(language), moses.MosesTokenizer(language)
    normalizer.substitutions = [
        (LINEAR_POINTS, _move_quote_first) if pattern == QUADRATIC_POINTS else (pattern, replacement)
        for pattern, replacement in normalizer.substitutions
    ]
    # sacremoses builds these sets of up to 130,000 characters again for every token that ends with a period.
    letters, lowercase_letters = frozenset(tokenizer.IsAlpha), frozenset(tokenizer.IsLower)
    tokenizer.isanyalpha = lambda text: not letters.isdisjoint(text)
    tokenizer.islower = lowercase_letters.issuperset
    return MosesTools(normalizer, tokenizer, moses.MosesDetokenizer(language))


def _move_quote_first(match: re.Match[str]) -> str:
    return match[0] if match[2] is None else f'"{match[1]}{match[2]}'
