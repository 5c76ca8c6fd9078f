"""Misclassified texts with their attention: as an HTML page, and for a terminal.

The page is one file that fetches nothing and runs nothing: words are text, shades are CSS classes. A shade
shows the weight of a word relative to the highest weight in the same text; if no word stands out, none is
dark.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from jumok.look.figures.plots import SHADES
from jumok.look.viewer.assets import build_source_hash, render_page
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.tiles import FloatArray

NUM_SHADES = len(SHADES) - 1  # without the lightest
# Maximum number of words to show; of a longer text, those around the highest weights are shown.
MAX_PAGE_WORDS, MAX_TERMINAL_WORDS = 1500, 60
NUM_CONTEXT_WORDS = 5  # words on either side
NUM_TOP_WORDS = 5  # words that are listed
FULL_SHADE_RATIO = 4  # multiple of the uniform weight below which no word has the darkest shade
# Readable on light and on dark terminals: the higher the weight, the stronger the colour.
TERMINAL_STYLES = (
    (0.75, "bold white on #d9480f"),
    (0.5, "white on #a6541f"),
    (0.25, "white on #74614f"),
    (0.1, "underline"),
)
CONTROL_PATTERN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # control characters


@dataclass(frozen=True, eq=False)
class MisclassifiedText:
    """A text with its predicted label, the probability of the prediction, and its true label."""

    text: str
    text_pair: str | None
    prediction: str
    label: str
    probability: float
    document: AttendedDocument | None = None  # the attention, if the model has any


def find_top_words(document: AttendedDocument, num_words: int = NUM_TOP_WORDS) -> list[tuple[str, float]]:
    """Return the words with the highest weights, highest first."""
    weights = document.get_word_weights()
    return [(document.words[i], float(weights[i])) for i in np.argsort(-weights, kind="stable")[:num_words]]


def format_for_terminal(example: MisclassifiedText, *, use_colours: bool) -> Text:
    """Format the prediction, the text and the words with the highest weights; shaded if ``use_colours``."""
    output = Text()
    prediction, label = _replace_controls(example.prediction), _replace_controls(example.label)
    header = f"predicted {prediction} ({example.probability:.3f}), label {label}\n"
    output.append(header, "bold" * use_colours)
    if example.document is None:
        text = example.text if example.text_pair is None else f"{example.text} | {example.text_pair}"
        words = _replace_controls(text).split()
        output.append(" ".join(words[:MAX_TERMINAL_WORDS]) + " …" * (len(words) > MAX_TERMINAL_WORDS))
        return output
    for word, separator, strength in _iterate_words(example, MAX_TERMINAL_WORDS):
        output.append(separator)
        style = (
            next((style for threshold, style in TERMINAL_STYLES if strength >= threshold), "") if use_colours else ""
        )
        output.append(_replace_controls(word), style)
    top_words = ", ".join(
        f"{_replace_controls(word)} {weight:.3f}" for word, weight in find_top_words(example.document)
    )
    output.append(f"\nhighest weights: {top_words}", "dim" * use_colours)
    return output


def render_error_page(examples: Sequence[MisclassifiedText], *, title: str, subtitle: str) -> str:
    """Render a page with these texts, in this order, as HTML. ``subtitle`` is shown below the title."""
    has_weights = any(example.document is not None for example in examples)
    shades = "".join(f'<i class="w{n}"></i>' for n in range(1, NUM_SHADES + 1))
    legend = f'<p class="key">low {shades} high weight</p>' if has_weights else ""
    items = "\n".join(f"<li>{_render_item(example)}</li>" for example in examples)
    style = _build_style_sheet()
    policy = f"default-src 'none'; style-src '{build_source_hash(style)}'"
    head = f"""<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>{style}</style>"""
    body = f"""<main>
<h1>{_escape_text(title)}</h1>
<p class="about">{_escape_text(subtitle)}</p>
{legend}
<ol>
{items}
</ol>
</main>"""
    return render_page(f"{_replace_controls(title)} · jumok", head, body)


def _render_item(example: MisclassifiedText) -> str:
    header = (
        f'<h2>predicted <b class="prediction"><bdi>{_escape_text(example.prediction)}</bdi></b> '
        f'(<span class="number">{example.probability:.3f}</span>), '
        f'label <b class="label"><bdi>{_escape_text(example.label)}</bdi></b></h2>'
    )
    if example.document is None:
        texts = [example.text] if example.text_pair is None else [example.text, example.text_pair]
        return header + "".join(f'<p dir="auto">{_escape_text(text)}</p>' for text in texts)
    parts = []
    for word, separator, strength in _iterate_words(example, MAX_PAGE_WORDS):
        level = int(NUM_SHADES * strength + 0.5)
        escaped = _escape_text(word)
        parts.append(_escape_text(separator) + (f'<mark class="w{level}">{escaped}</mark>' if level else escaped))
    top_words = " · ".join(
        f"<bdi>{_escape_text(word)}</bdi> {weight:.3f}" for word, weight in find_top_words(example.document)
    )
    return f'{header}<p dir="auto">{"".join(parts)}</p><p class="top">highest weights: {top_words}</p>'


def _iterate_words(example: MisclassifiedText, max_words: int) -> Iterator[tuple[str, str, float]]:
    """Iterate over words with their separators and shades, 0 to 1; words of a long text are left out.

    The second text of a pair, which is the second sentence of its document, starts on a new line.
    """
    document = example.document
    assert document is not None
    weights = document.get_word_weights()
    full_weight = max(float(weights.max()), min(1.0, FULL_SHADE_RATIO / len(weights)))
    strengths = np.clip(weights / full_weight, 0, 1)
    is_shown = _select_words(strengths, max_words)
    second_start = document.sentence_offsets[1] if example.text_pair is not None else None
    has_gap = False
    for i, (word, separator) in enumerate(zip(document.words, document.separators, strict=True)):
        if is_shown[i]:
            text_before = " … " if has_gap else separator
            yield word, "\n" if i == second_start else text_before, float(strengths[i])
        has_gap = not is_shown[i]
    if has_gap:
        yield "…", " ", 0.0


def _select_words(strengths: FloatArray, max_words: int) -> NDArray[np.bool_]:
    """Return which words of a text to show: those around the highest weights, up to ``max_words``."""
    if len(strengths) <= max_words:
        return np.ones(len(strengths), np.bool_)
    selected = np.zeros(len(strengths), np.bool_)
    for i in np.argsort(-strengths, kind="stable"):
        extended = selected.copy()
        extended[max(0, i - NUM_CONTEXT_WORDS) : i + NUM_CONTEXT_WORDS + 1] = True
        if extended.sum() > max_words:
            break
        selected = extended
    return selected


def _replace_controls(text: str) -> str:
    """Replace control characters, which a terminal would interpret."""
    return CONTROL_PATTERN.sub("\N{REPLACEMENT CHARACTER}", text)


def _escape_text(text: str) -> str:
    return html.escape(_replace_controls(text))


def _build_style_sheet() -> str:
    """Return the style sheet. On a light page high weights are dark, on a dark page they are light."""
    levels = range(1, NUM_SHADES + 1)
    light = "\n".join(f".w{n} {{ background: {SHADES[n]}; color: {'#fff' if n > 4 else '#1c2027'}; }}" for n in levels)
    dark = "\n".join(
        f"  .w{n} {{ background: {SHADES[-n]}; color: {'#fff' if n <= 4 else '#10141a'}; }}" for n in levels
    )
    return f"""
:root {{ --page: #ffffff; --ink: #1c2027; --muted: #667080; --line: #e2e5ea; --prediction: #b93a0a;
  --label: #0b61b8; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.6 system-ui, -apple-system,
  "Segoe UI", "Noto Sans", "Noto Sans KR", "Noto Sans CJK KR", "Apple SD Gothic Neo", "Malgun Gothic",
  NanumGothic, sans-serif; }}
main {{ max-width: 46rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }}
h1 {{ font-size: 1.4rem; line-height: 1.3; margin: 0; }}
.about, .key, .top {{ color: var(--muted); font-size: 0.875rem; margin: 0.4rem 0 0; }}
.key i {{ display: inline-block; width: 1.4em; height: 0.9em; vertical-align: -0.1em; }}
ol {{ list-style: none; margin: 1.5rem 0 0; padding: 0; }}
li {{ border-top: 1px solid var(--line); padding: 1.1rem 0; }}
h2 {{ font-size: 0.95rem; font-weight: 400; margin: 0 0 0.4rem; }}
.prediction {{ color: var(--prediction); }} .label {{ color: var(--label); }}
.number {{ font-variant-numeric: tabular-nums; }}
li p {{ margin: 0.3rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }}
mark {{ border-radius: 3px; padding: 0.1em 0; box-decoration-break: clone;
  -webkit-box-decoration-break: clone; }}
{light}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #15181d; --ink: #e9ebef; --muted: #98a2b1; --line: #2a303a; --prediction: #ff9a4d;
    --label: #74b5ff; }}
{dark}
}}
@media print {{ mark, .key i {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }} }}
"""
