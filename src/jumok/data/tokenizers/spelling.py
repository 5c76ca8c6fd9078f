"""Text spelled out, as hand-made word links count words: lower case, no accents, every word and sign apart.

The gold links of the Hansards are between such words: French contractions are written in full (du: de le,
l': le), and so are English ones (don't: do not). Text that is spelled out already stays as it is, word for
word, so that raw text to learn from and gold text come out alike.
"""

from __future__ import annotations

import re
import unicodedata

import regex

from jumok.data.tokenizers.segmentation import COMBINING_MARKS

__all__ = ["normalize_spelling"]

# Signs that stand for others, and letters for two; accents fall off by themselves.
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
# A number, an abbreviation with its point, a word, several of the same sign, or a single one.
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
    language: [(re.compile(form), full) for form, full in forms.items()]
    for language, forms in CONTRACTIONS.items()
}


def normalize_spelling(line: str, language: str) -> str:
    """A line as words with a space between them; contractions are known of English and French.

    >>> normalize_spelling("L'usage n'est pas répandu: du jamais-vu!", "fr")
    'le usage ne est pas repandu : de le jamais - vu !'
    >>> normalize_spelling("Mr. Brown didn't pay $98,355.", "en")
    'mr. brown did not pay $ 98,355 .'
    """
    text = unicodedata.normalize("NFC", line).lower().translate(CHARACTER_REPLACEMENTS).replace("''", '"')
    for form, full in CONTRACTION_PATTERNS.get(language, []):
        text = form.sub(full, text)
    letters = unicodedata.normalize("NFKD", text)  # only now: dû is not du
    bare = "".join(letter for letter in letters if not unicodedata.combining(letter))
    return " ".join(TOKEN_REGEX.findall(unicodedata.normalize("NFC", bare)))
