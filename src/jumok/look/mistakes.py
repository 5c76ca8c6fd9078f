"""Texts that were given a wrong label, with the words that were looked at: as a page, and for a terminal.

The page is one file that fetches nothing and runs nothing: words are text, shades are classes of its style.
A shade tells a word's weight beside that of the most attended word of the same text; where none stands out,
none is dark.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from jumok.look.document import Document
from jumok.look.figures import SHADES

__all__ = ["Mistake", "in_terminal", "page", "top_words"]

LEVELS = len(SHADES) - 1  # shades above none
ON_PAGE, IN_TERMINAL = (
    1500,
    60,
)  # words of a text that are shown; of a longer one, those around what was looked at
AROUND = 5  # words on either side
TOP = 5  # words that are named
STANDS_OUT = 4  # times the weight that it would have were all the same: no word with less is fully dark
# Seen on a light and on a dark terminal alike: the more weight, the more colour.
HEAT = (
    (0.75, "bold white on #d9480f"),
    (0.5, "white on #a6541f"),
    (0.25, "white on #74614f"),
    (0.1, "underline"),
)
UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # control characters


@dataclass(frozen=True, eq=False)
class Mistake:
    """A text with the label it was given, how sure the model was of it, and the one it should have had."""

    text: str
    pair: str | None
    said: str
    wanted: str
    probability: float
    document: Document | None = None  # where it looked, if it can tell


def weights(document: Document) -> NDArray[np.float64]:
    """How much each word counts, ``(n,)``: the mean over the hops."""
    found: NDArray[np.float64] = np.atleast_2d(np.asarray(document.weights, np.float64)).mean(0)
    return found


def top_words(document: Document, most: int = TOP) -> list[tuple[str, float]]:
    """The words that were looked at most, the first one most."""
    each = weights(document)
    return [(document.words[at], float(each[at])) for at in np.argsort(-each, kind="stable")[:most]]


def in_terminal(mistake: Mistake, *, colours: bool) -> Text:
    """A line on what was said, the text, and the words it looked at most; shaded where there are colours."""
    found = Text()
    head = f"said {_seen(mistake.said)} {mistake.probability:.3f}, is {_seen(mistake.wanted)}\n"
    found.append(head, "bold" * colours)
    if mistake.document is None:
        both = mistake.text if mistake.pair is None else f"{mistake.text} | {mistake.pair}"
        words = _seen(both).split()
        found.append(" ".join(words[:IN_TERMINAL]) + " …" * (len(words) > IN_TERMINAL))
        return found
    for word, before, strength in _parts(mistake, IN_TERMINAL):
        found.append(before)
        style = next((style for least, style in HEAT if strength >= least), "") if colours else ""
        found.append(_seen(word), style)
    named = ", ".join(f"{_seen(word)} {weight:.3f}" for word, weight in top_words(mistake.document))
    found.append(f"\nlooked at: {named}", "dim" * colours)
    return found


def page(mistakes: Sequence[Mistake], *, title: str, about: str) -> str:
    """A page with these texts, in this order, as HTML. ``about`` stands below the title."""
    shaded = any(one.document is not None for one in mistakes)
    key = "".join(f'<i class="w{n}"></i>' for n in range(1, LEVELS + 1))
    legend = f'<p class="key">least looked at {key} most</p>' if shaded else ""
    items = "\n".join(f"<li>{_item(one)}</li>" for one in mistakes)
    style = _style()
    allowed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{allowed}'">
<title>{_text(title)} · jumok</title>
<style>{style}</style>
<body>
<main>
<h1>{_text(title)}</h1>
<p class="about">{_text(about)}</p>
{legend}
<ol>
{items}
</ol>
</main>
</body>
</html>
"""


def _item(mistake: Mistake) -> str:
    head = (
        f'<h2>said <b class="said"><bdi>{_text(mistake.said)}</bdi></b> '
        f'<span class="number">{mistake.probability:.3f}</span>, '
        f'is <b class="is"><bdi>{_text(mistake.wanted)}</bdi></b></h2>'
    )
    if mistake.document is None:
        texts = [mistake.text] if mistake.pair is None else [mistake.text, mistake.pair]
        return head + "".join(f'<p dir="auto">{_text(text)}</p>' for text in texts)
    parts = []
    for word, before, strength in _parts(mistake, ON_PAGE):
        level = int(LEVELS * strength + 0.5)
        shown = _text(word)
        parts.append(_text(before) + (f'<mark class="w{level}">{shown}</mark>' if level else shown))
    named = " · ".join(
        f"<bdi>{_text(word)}</bdi> {weight:.3f}" for word, weight in top_words(mistake.document)
    )
    return f'{head}<p dir="auto">{"".join(parts)}</p><p class="top">looked at {named}</p>'


def _parts(mistake: Mistake, most: int) -> Iterator[tuple[str, str, float]]:
    """Words with what stands before them and how dark they are, 0 to 1; some left out of a long text.

    Of a pair, whose two texts are the sentences of its document, the second stands on a line of its own.
    """
    document = mistake.document
    assert document is not None
    each = weights(document)
    full = max(float(each.max()), min(1.0, STANDS_OUT / len(each)))
    strengths = np.clip(each / full, 0, 1)
    shown = _shown(strengths, most)
    second = document.sentences[1] if mistake.pair is not None else None
    gap = False
    for at, (word, before) in enumerate(zip(document.words, document.before, strict=True)):
        if shown[at]:
            between = " … " if gap else before
            yield word, "\n" if at == second else between, float(strengths[at])
        gap = not shown[at]
    if gap:
        yield "…", " ", 0.0


def _shown(strengths: NDArray[np.float64], most: int) -> NDArray[np.bool_]:
    """Which words of a text to show: those around the most attended ones, as long as there is room."""
    if len(strengths) <= most:
        return np.ones(len(strengths), np.bool_)
    found = np.zeros(len(strengths), np.bool_)
    for at in np.argsort(-strengths, kind="stable"):
        more = found.copy()
        more[max(0, at - AROUND) : at + AROUND + 1] = True
        if more.sum() > most:
            break
        found = more
    return found


def _seen(text: str) -> str:
    """Without what a terminal would obey."""
    return UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)


def _text(text: str) -> str:
    return html.escape(_seen(text))


def _style() -> str:
    """Dark words are the attended ones on a light page, light words on a dark one."""
    levels = range(1, LEVELS + 1)
    light = "\n".join(
        f".w{n} {{ background: {SHADES[n]}; color: {'#fff' if n > 4 else '#1c2027'}; }}" for n in levels
    )
    dark = "\n".join(
        f"  .w{n} {{ background: {SHADES[-n]}; color: {'#fff' if n <= 4 else '#10141a'}; }}" for n in levels
    )
    return f"""
:root {{ --page: #ffffff; --ink: #1c2027; --soft: #667080; --line: #e2e5ea; --said: #b93a0a; --is: #0b61b8; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.6 system-ui, -apple-system,
  "Segoe UI", "Noto Sans", "Noto Sans KR", "Noto Sans CJK KR", "Apple SD Gothic Neo", "Malgun Gothic",
  NanumGothic, sans-serif; }}
main {{ max-width: 46rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }}
h1 {{ font-size: 1.4rem; line-height: 1.3; margin: 0; }}
.about, .key, .top {{ color: var(--soft); font-size: 0.875rem; margin: 0.4rem 0 0; }}
.key i {{ display: inline-block; width: 1.4em; height: 0.9em; vertical-align: -0.1em; }}
ol {{ list-style: none; margin: 1.5rem 0 0; padding: 0; }}
li {{ border-top: 1px solid var(--line); padding: 1.1rem 0; }}
h2 {{ font-size: 0.95rem; font-weight: 400; margin: 0 0 0.4rem; }}
.said {{ color: var(--said); }} .is {{ color: var(--is); }} .number {{ font-variant-numeric: tabular-nums; }}
li p {{ margin: 0.3rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }}
mark {{ border-radius: 3px; padding: 0.1em 0; box-decoration-break: clone;
  -webkit-box-decoration-break: clone; }}
{light}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #15181d; --ink: #e9ebef; --soft: #98a2b1; --line: #2a303a; --said: #ff9a4d;
    --is: #74b5ff; }}
{dark}
}}
@media print {{ mark, .key i {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }} }}
"""
