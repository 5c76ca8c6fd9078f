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

from jumok.look.figures.plots import SHADES
from jumok.look.viewer.attended_document import AttendedDocument

__all__ = ["MisclassifiedText", "find_top_words", "format_for_terminal", "render_error_page"]

NUM_SHADES = len(SHADES) - 1  # shades above none
MAX_PAGE_WORDS, MAX_TERMINAL_WORDS = (
    1500,
    60,
)  # words of a text that are shown; of a longer one, those around what was looked at
NUM_CONTEXT_WORDS = 5  # words on either side
NUM_TOP_WORDS = 5  # words that are named
FULL_SHADE_RATIO = 4  # times the weight that it would have were all the same: no word with less is fully dark
# Seen on a light and on a dark terminal alike: the more weight, the more colour.
TERMINAL_STYLES = (
    (0.75, "bold white on #d9480f"),
    (0.5, "white on #a6541f"),
    (0.25, "white on #74614f"),
    (0.1, "underline"),
)
CONTROL_PATTERN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # control characters


@dataclass(frozen=True, eq=False)
class MisclassifiedText:
    """A text with the label it was given, how sure the model was of it, and the one it should have had."""

    text: str
    text_pair: str | None
    prediction: str
    label: str
    probability: float
    document: AttendedDocument | None = None  # where it looked, if it can tell


def compute_word_weights(document: AttendedDocument) -> NDArray[np.float64]:
    """How much each word counts, ``(n,)``: the mean over the hops."""
    found: NDArray[np.float64] = np.atleast_2d(np.asarray(document.weights, np.float64)).mean(0)
    return found


def find_top_words(document: AttendedDocument, num_words: int = NUM_TOP_WORDS) -> list[tuple[str, float]]:
    """The words that were looked at most, the first one most."""
    each = compute_word_weights(document)
    return [(document.words[at], float(each[at])) for at in np.argsort(-each, kind="stable")[:num_words]]


def format_for_terminal(example: MisclassifiedText, *, use_colours: bool) -> Text:
    """A line on what was said, the text, and the words it looked at most; shaded where there are colours."""
    found = Text()
    head = f"said {_replace_controls(example.prediction)} {example.probability:.3f}, is {_replace_controls(example.label)}\n"
    found.append(head, "bold" * use_colours)
    if example.document is None:
        both = example.text if example.text_pair is None else f"{example.text} | {example.text_pair}"
        words = _replace_controls(both).split()
        found.append(" ".join(words[:MAX_TERMINAL_WORDS]) + " …" * (len(words) > MAX_TERMINAL_WORDS))
        return found
    for word, before, strength in _iterate_words(example, MAX_TERMINAL_WORDS):
        found.append(before)
        style = (
            next((style for least, style in TERMINAL_STYLES if strength >= least), "") if use_colours else ""
        )
        found.append(_replace_controls(word), style)
    named = ", ".join(
        f"{_replace_controls(word)} {weight:.3f}" for word, weight in find_top_words(example.document)
    )
    found.append(f"\nlooked at: {named}", "dim" * use_colours)
    return found


def render_error_page(examples: Sequence[MisclassifiedText], *, title: str, subtitle: str) -> str:
    """A page with these texts, in this order, as HTML. ``subtitle`` stands below the title."""
    shaded = any(one.document is not None for one in examples)
    key = "".join(f'<i class="w{n}"></i>' for n in range(1, NUM_SHADES + 1))
    legend = f'<p class="key">least looked at {key} most</p>' if shaded else ""
    items = "\n".join(f"<li>{_render_item(one)}</li>" for one in examples)
    style = _build_style_sheet()
    allowed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{allowed}'">
<title>{_escape_text(title)} · jumok</title>
<style>{style}</style>
<body>
<main>
<h1>{_escape_text(title)}</h1>
<p class="about">{_escape_text(subtitle)}</p>
{legend}
<ol>
{items}
</ol>
</main>
</body>
</html>
"""


def _render_item(example: MisclassifiedText) -> str:
    head = (
        f'<h2>said <b class="said"><bdi>{_escape_text(example.prediction)}</bdi></b> '
        f'<span class="number">{example.probability:.3f}</span>, '
        f'is <b class="is"><bdi>{_escape_text(example.label)}</bdi></b></h2>'
    )
    if example.document is None:
        texts = [example.text] if example.text_pair is None else [example.text, example.text_pair]
        return head + "".join(f'<p dir="auto">{_escape_text(text)}</p>' for text in texts)
    parts = []
    for word, before, strength in _iterate_words(example, MAX_PAGE_WORDS):
        level = int(NUM_SHADES * strength + 0.5)
        shown = _escape_text(word)
        parts.append(_escape_text(before) + (f'<mark class="w{level}">{shown}</mark>' if level else shown))
    named = " · ".join(
        f"<bdi>{_escape_text(word)}</bdi> {weight:.3f}" for word, weight in find_top_words(example.document)
    )
    return f'{head}<p dir="auto">{"".join(parts)}</p><p class="top">looked at {named}</p>'


def _iterate_words(example: MisclassifiedText, max_words: int) -> Iterator[tuple[str, str, float]]:
    """Words with what stands before them and how dark they are, 0 to 1; some left out of a long text.

    Of a pair, whose two texts are the sentences of its document, the second stands on a line of its own.
    """
    document = example.document
    assert document is not None
    each = compute_word_weights(document)
    full = max(float(each.max()), min(1.0, FULL_SHADE_RATIO / len(each)))
    strengths = np.clip(each / full, 0, 1)
    shown = _select_words(strengths, max_words)
    second = document.sentence_offsets[1] if example.text_pair is not None else None
    gap = False
    for at, (word, before) in enumerate(zip(document.words, document.separators, strict=True)):
        if shown[at]:
            between = " … " if gap else before
            yield word, "\n" if at == second else between, float(strengths[at])
        gap = not shown[at]
    if gap:
        yield "…", " ", 0.0


def _select_words(strengths: NDArray[np.float64], max_words: int) -> NDArray[np.bool_]:
    """Which words of a text to show: those around the most attended ones, as long as there is room."""
    if len(strengths) <= max_words:
        return np.ones(len(strengths), np.bool_)
    found = np.zeros(len(strengths), np.bool_)
    for at in np.argsort(-strengths, kind="stable"):
        more = found.copy()
        more[max(0, at - NUM_CONTEXT_WORDS) : at + NUM_CONTEXT_WORDS + 1] = True
        if more.sum() > max_words:
            break
        found = more
    return found


def _replace_controls(text: str) -> str:
    """Without what a terminal would obey."""
    return CONTROL_PATTERN.sub("\N{REPLACEMENT CHARACTER}", text)


def _escape_text(text: str) -> str:
    return html.escape(_replace_controls(text))


def _build_style_sheet() -> str:
    """Dark words are the attended ones on a light page, light words on a dark one."""
    levels = range(1, NUM_SHADES + 1)
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
