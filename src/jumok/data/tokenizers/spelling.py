"""Spelling normalizer for gold word alignments: lower case, no accents, spaces between all words and symbols.

The gold links of the Hansards are between such words: French contractions are written in full (du: de le, l':
le), and so are English ones (don't: do not). Normalized text does not change, so that raw training text and
gold text have the same form.
"""

from __future__ import annotations

import re
import unicodedata

import regex

from jumok.data.tokenizers.segmentation import COMBINING_MARKS

# Equivalent symbols, and ligatures. Accents are removed separately.
CHARACTER_REPLACEMENTS = str.maketrans(
    {
        **dict.fromkeys("’‘`´", "'"),
        **dict.fromkeys("“”„«»", '"'),
        **dict.fromkeys("–—", "-"),
        "œ": "oe",
        "æ": "ae",
        "ß": "ss",
        "…": "...",
    }
)
# A number, an abbreviation with its period, a word, a repeated symbol, or a single symbol.
TOKEN_REGEX = regex.compile(
    r"\.?\d+(?:[.,]\d+)*[\p{L}\p{N}_]*"
    r"|(?:mr|mrs|ms|dr|hon|st|mme|mgr)\.|nos?\.(?=[\s\x1c-\x1f]*+\d)|(?:\b[a-z]\.)+"
    rf"|'s\b|\baujourd'|[\p{{L}}\p{{N}}_][\p{{L}}\p{{N}}_{COMBINING_MARKS}]*+|-{{2,}}|\.{{2,}}|[^\s\x1c-\x1f]"
)
CONTRACTIONS = {
    "en": {
        r"\bcan't\b": "cannot",
        r"\bwon't\b": "will not",
        r"n't\b": " not",
        r"\blet's\b": "let us",
        r"'m\b": " am",
        r"'re\b": " are",
        r"'ve\b": " have",
        r"'ll\b": " will",
        r"'d\b": " would",
    },
    "fr": {
        r"\b([cdjlmnst]|(?:jus|lors|puis|quel|quoi)?qu)'": r"\1e ",
        r"-t-(?=(?:ils?|elles?|on)\b)": " ",
        r"\bdu\b": "de le",
        r"\bdes\b": "de les",
        r"\bau\b(?! ?-)": "à le",  # au-dessus stays
        r"\baux\b(?! ?-)": "à les",
    },
}
CONTRACTION_PATTERNS = {
    language: [(re.compile(pattern), expansion) for pattern, expansion in contractions.items()]
    for language, contractions in CONTRACTIONS.items()
}


def normalize_spelling(line: str, language: str) -> str:
    """Normalize a line. Words are separated by spaces. Contractions are expanded in English and French.

    >>> normalize_spelling("L'usage n'est pas répandu: du jamais-vu!", "fr")
    'le usage ne est pas repandu : de le jamais - vu !'
    >>> normalize_spelling("Mr. Brown didn't pay $98,355.", "en")
    'mr. brown did not pay $ 98,355 .'
    """
    text = unicodedata.normalize("NFC", line).lower().translate(CHARACTER_REPLACEMENTS).replace("''", '"')
    for pattern, expansion in CONTRACTION_PATTERNS.get(language, []):
        text = pattern.sub(expansion, text)
    decomposed = unicodedata.normalize("NFKD", text)  # after contractions: dû is not du
    unaccented = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return " ".join(TOKEN_REGEX.findall(unicodedata.normalize("NFC", unaccented)))
