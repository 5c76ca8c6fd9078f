"""A document as a figure: sentences with a bar for their weight, shaded words, wrapped lines."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.look.figures.plots import (
    COLOURS,
    DOTS_PER_INCH,
    GOLD,
    GREY,
    INK,
    SHADES,
    create_colormap,
    replace_unprintable,
    save_figure,
    to_single_line,
)
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.tiles import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All in points.
TEXT_WIDTH, GUTTER_WIDTH, BAR_WIDTH, BAR_GAP = 500.0, 78.0, 40.0, 10.0
FONT_SIZE, LINE_HEIGHT = 10.5, 17.5
SPACING = {"title": 24.0, "prediction": 26.0, "hop": 20.0, "sentence": 3.0, "paragraph": 11.0, "block": 20.0}
MAX_MEASURED_LENGTH = 100  # characters that are measured together
MAX_SHADE = 0.62  # behind text, as in the viewer
MAX_WORDS, MAX_PIXELS = 20_000, 65_000  # the second is a limit of matplotlib

Hop = int | None
MeasureText = Callable[[str], float]
Vertices = NDArray[np.float64]
PathCodes = NDArray[np.uint8]
Box = tuple[float, float, float]  # left, middle, width


@dataclass(frozen=True)
class PlacedWord:
    """A word, or a part of one that is wider than the page, with its position."""

    word_index: int
    text: str
    line: int
    x: float
    width: float


def draw_document(
    document: AttendedDocument,
    path: str | Path,
    *,
    hops: Sequence[Hop] = (None,),
    is_per_sentence: bool = False,
    title: str = "",
) -> Path:
    """Draw the text once for each of the ``hops`` (None is the mean of all). Returns the path.

    Words are shaded relative to the highest weight of the hop or, if ``is_per_sentence``, of their sentence.

    >>> draw_document(document, "hops.png", hops=[0, 3, None])  # doctest: +SKIP
    """
    if not hops:
        raise InputError("no hops given; expected some, as in hops=[0, 3], or [None] for their mean")
    if len(document.words) * len(hops) > MAX_WORDS:
        raise _build_length_error(document, hops)
    hop_weights = [(hop, document.get_word_weights(hop), document.get_sentence_weights(hop)) for hop in hops]

    def draw(figure: Figure) -> None:
        canvas = DocumentCanvas(figure, document, is_per_sentence)
        canvas.draw_header(title)
        for hop, weights, sentence_weights in hop_weights:
            if document.num_hops > 1:
                canvas.draw_hop_title("mean of all hops" if hop is None else f"hop {hop}")
            canvas.draw_sentences(weights, sentence_weights)
        if canvas.y * DOTS_PER_INCH / 72 > MAX_PIXELS:
            raise _build_length_error(document, hops)
        canvas.finish()

    labels = [label for label, _ in document.class_probabilities]
    return save_figure(draw, path, [document.text, title, *labels, document.label or ""])


def _build_length_error(document: AttendedDocument, hops: Sequence[Hop]) -> InputError:
    times = "" if len(hops) == 1 else f", {len(hops)} times,"
    return InputError(
        f"{len(document.words):,} words{times} are too many for a figure: use an .html file or the viewer"
    )


class GlyphCache:
    """Cache of word outlines, which are then drawn as one path."""

    def __init__(self) -> None:
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import text_to_path

        self._font, self._text_to_path = FontProperties(size=FONT_SIZE), text_to_path
        self._widths: dict[str, float] = {}
        self._paths: dict[str, tuple[Vertices, PathCodes]] = {}

    def measure_width(self, text: str) -> float:
        """Return the width in points."""
        if text not in self._widths:
            self._widths[text] = float(self._text_to_path.get_text_width_height_descent(text, self._font, False)[0])
        return self._widths[text]

    def get_outline(self, text: str) -> tuple[Vertices, PathCodes]:
        """Return the vertices (x, y), y upwards, and the path codes."""
        if text not in self._paths:
            vertices, codes = self._text_to_path.get_text_path(self._font, text)
            scaled = np.asarray(vertices, float).reshape(-1, 2) * (FONT_SIZE / self._text_to_path.FONT_SCALE)
            self._paths[text] = scaled, np.asarray(codes, np.uint8)
        return self._paths[text]


class DocumentCanvas:
    """The figure, filled from the top to the bottom."""

    def __init__(self, figure: Figure, document: AttendedDocument, is_per_sentence: bool) -> None:
        self.figure, self.document, self.is_per_sentence = figure, document, is_per_sentence
        self.glyphs = GlyphCache()
        self.text_left = GUTTER_WIDTH if len(document.sentence_offsets) > 2 else 0.0
        self.axes: Axes = figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.y = 0.0
        self.colormap = create_colormap(SHADES)
        # The same for all hops.
        self.placed_sentences = [self._place_words(s) for s in range(len(document.sentence_offsets) - 1)]
        self.outlines: dict[str, list[tuple[Vertices, PathCodes]]] = {}  # by colour

    def draw_header(self, title: str) -> None:
        if title:
            self._write_text(0, self._truncate(title, (self.text_left + TEXT_WIDTH) / 1.2), INK, 1.2)
            self.y += SPACING["title"]
        if parts := _format_prediction(self.document):
            x = 0.0
            for n, (text, colour) in enumerate(parts):
                x += self._write_text(x, self._truncate(text, TEXT_WIDTH / 4), colour, 1.0 if n else 1.15) + 16
            self.y += SPACING["prediction"]

    def draw_hop_title(self, name: str) -> None:
        self._write_text(self.text_left, name, GREY, 0.9)
        self.y += SPACING["hop"]

    def draw_sentences(self, weights: FloatArray, sentence_weights: FloatArray) -> None:
        """Draw all sentences, shaded."""
        document, offsets = self.document, self.document.sentence_offsets
        max_weights = np.maximum.reduceat(weights, offsets[:-1]) if self.is_per_sentence else np.full(1, weights.max())
        max_sentence_weight = float(sentence_weights.max()) or 1.0
        boxes: list[Box] = []
        shades: list[float] = []
        for s, placed_words in enumerate(self.placed_sentences):
            if s and document.separators[offsets[s]].count("\n") > 1:
                self.y += SPACING["paragraph"]
            if self.text_left:
                self._draw_bar(float(sentence_weights[s]), float(sentence_weights[s]) / max_sentence_weight)
            max_weight = float(max_weights[s if self.is_per_sentence else 0]) or 1.0
            previous: PlacedWord | None = None
            for word in placed_words:
                shade = MAX_SHADE * float(weights[word.word_index]) / max_weight
                x, y = self.text_left + word.x, self.y + LINE_HEIGHT * word.line
                self._write_text(x, word.text, "white" if shade > 0.45 else INK, y=y)
                if shade > 0.01:
                    # Without a gap before it, the box must not cover the end of the previous word.
                    padding = 0.0 if previous is not None and _touches(previous, word) else 1.0
                    boxes.append((x - padding, y, padding + word.width + 1))
                    shades.append(shade)
                previous = word
            self.y += LINE_HEIGHT * (placed_words[-1].line + 1) + SPACING["sentence"]
        self._draw_shades(boxes, shades, LINE_HEIGHT / 2 - 1.2)
        self._draw_legend(float(weights.max()), document.words[int(weights.argmax())])
        self.y += SPACING["block"]

    def finish(self) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        for colour, outlines in self.outlines.items():
            vertices, codes = (np.concatenate(arrays) for arrays in zip(*outlines, strict=True))
            if len(vertices):
                # As an artist: for a patch, matplotlib would compute the extents of each curve.
                self.axes.add_artist(PathPatch(Outline(vertices, codes), color=colour, lw=0))
        width, height = self.text_left + TEXT_WIDTH, max(self.y - SPACING["block"], LINE_HEIGHT)
        self.axes.set(xlim=(-4, width), ylim=(height, -LINE_HEIGHT / 2))
        self.figure.set_size_inches((width + 4) / 72, (height + LINE_HEIGHT / 2) / 72)

    def _place_words(self, sentence: int) -> list[PlacedWord]:
        document = self.document
        first, last = document.sentence_offsets[sentence : sentence + 2]
        separators = ["", *document.separators[first + 1 : last]]
        words = [replace_unprintable(word) for word in document.words[first:last]]
        placed = wrap_words(words, separators, self.glyphs.measure_width, TEXT_WIDTH)
        return [replace(word, word_index=first + word.word_index) for word in reorder_bidirectional(placed, TEXT_WIDTH)]

    def _truncate(self, text: str, max_width: float) -> str:
        """Return the text on one line, truncated to a width."""
        text = to_single_line(text)[:200]
        if self.glyphs.measure_width(text) <= max_width:
            return text
        while text and self.glyphs.measure_width(f"{text}…") > max_width:
            text = text[:-1]
        return f"{text}…"

    def _write_text(self, x: float, text: str, colour: str, size: float = 1.0, y: float | None = None) -> float:
        """Write text centred at the height ``y`` (default: the current line). Returns its width."""
        vertices, codes = self.glyphs.get_outline(text)
        offset = np.array([x, (self.y if y is None else y) + 0.37 * FONT_SIZE * size], np.float32)
        self.outlines.setdefault(colour, []).append((offset + vertices * np.array([size, -size], np.float32), codes))
        return self.glyphs.measure_width(text) * size

    def _draw_bar(self, weight: float, share: float) -> None:
        from matplotlib.patches import Rectangle

        right, label = self.text_left - BAR_GAP, f"{weight:.2g}" if weight >= 5e-4 else "0"  # short
        self._write_text(right - BAR_WIDTH - 5 - 0.7 * self.glyphs.measure_width(label), label, GREY, 0.7)
        bar = Rectangle((right - BAR_WIDTH * share, self.y - 3.5), BAR_WIDTH * share, 7, color=COLOURS[0], lw=0)
        self.axes.add_artist(bar)
        self.axes.add_artist(Rectangle((right, self.y - 5), 0.8, 10, color="#c9ced6", lw=0))

    def _draw_shades(self, boxes: Sequence[Box], shades: Sequence[float], half_height: float) -> None:
        from matplotlib.collections import PolyCollection

        corners = ((0, -1), (1, -1), (1, 1), (0, 1))
        polygons = [[(x + right * width, y + down * half_height) for right, down in corners] for x, y, width in boxes]
        self.axes.add_collection(PolyCollection(polygons, facecolors=self.colormap(shades), lw=0, zorder=0.5))

    def _draw_legend(self, max_weight: float, strongest_word: str) -> None:
        self.y += LINE_HEIGHT * 0.55
        steps = np.linspace(0, 1, 60)
        self._draw_shades(
            [(self.text_left + 60 * n, self.y, 1.1) for n in steps.tolist()], (MAX_SHADE * steps).tolist(), 3
        )
        if self.is_per_sentence:
            note = "from 0 to the highest weight in the sentence"
        else:
            word = replace_unprintable(strongest_word)[:24]
            note = f"from 0 to {max_weight:.2g}, the highest weight, “{word}”"
        self._write_text(self.text_left + 68, note, GREY, 0.75)
        self.y += LINE_HEIGHT * 0.8


def _touches(previous: PlacedWord, word: PlacedWord) -> bool:
    """Return whether a word follows the previous one on the same line without a gap."""
    return previous.line == word.line and abs(previous.x + previous.width - word.x) < 0.5


def wrap_words(
    words: Sequence[str], separators: Sequence[str], measure: MeasureText, max_width: float
) -> Iterator[PlacedWord]:
    """Arrange words in lines: broken at a separator, or anywhere if necessary; line breaks are kept."""
    line, x = 0, 0.0
    space_width = measure("n n") - measure("nn")
    for first, last in _find_runs(separators):
        breaks = separators[first].count("\n")
        run_width = sum(measure(word[:MAX_MEASURED_LENGTH]) for word in words[first:last])
        if first and breaks:
            line, x = line + min(breaks, 2), 0.0
        elif x > 0:
            x += space_width * min(len(separators[first]), 4)
            if x + run_width > max_width:
                line, x = line + 1, 0.0
        for n in range(first, last):
            for text in _split_word(words[n], measure, max_width):
                width = measure(text)
                if x > 0 and x + width > max_width:
                    line, x = line + 1, 0.0
                yield PlacedWord(n, text, line, x, width)
                x += width


def reorder_bidirectional(words: Iterable[PlacedWord], max_width: float) -> Iterator[PlacedWord]:
    """Reorder lines for display: right to left if the first letter is, with runs of the other direction."""
    placed = list(words)
    directions = [_get_direction(word.text) for word in placed]
    is_right_to_left = next((direction for direction in directions if direction), 1) < 0
    for _, line in groupby(zip(placed, directions, strict=True), key=lambda entry: entry[0].line):
        row = list(line)
        yield from (
            _reorder_line(row, is_right_to_left, max_width)
            if any(direction < 0 for _, direction in row)
            else (word for word, _ in row)
        )


def _reorder_line(
    row: Sequence[tuple[PlacedWord, int]], is_right_to_left: bool, max_width: float
) -> Iterator[PlacedWord]:
    """Reorder one line by the rules of bidirectional text, with words in place of characters."""
    base = -1 if is_right_to_left else 1
    own_directions = [direction for _, direction in row]
    # A neutral word, like a comma, takes the direction of its neighbours if they agree, else of the line.
    before = list(accumulate(own_directions, lambda previous, direction: direction or previous, initial=base))[1:]
    after = list(accumulate(own_directions[::-1], lambda later, direction: direction or later, initial=base))[:0:-1]
    directions = [a if a == b else base for a, b in zip(before, after, strict=True)]
    runs = [list(run) for _, run in groupby(range(len(row)), key=lambda n: directions[n])]
    display_order = [n for run in runs[::base] for n in (run if directions[run[0]] > 0 else run[::-1])]
    ends = [word.x + word.width for word, _ in row]
    starts = [run[0] for run in runs for _ in run]
    gaps = [0.0, *(word.x - end for (word, _), end in zip(row[1:], ends, strict=False))]
    x = max_width - ends[-1] if is_right_to_left else 0.0
    for previous, n in zip([None, *display_order], display_order, strict=False):
        if previous is not None:  # the gap before a word, or before a run of them, moves with it
            x += gaps[max(previous, n) if starts[previous] == starts[n] else max(starts[previous], starts[n])]
        yield replace(row[n][0], x=x)
        x += row[n][0].width


def _find_runs(separators: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Iterate over runs between gaps: a word and what follows without a gap, like a comma."""
    starts = [n for n, separator in enumerate(separators) if separator or not n]
    return zip(starts, [*starts[1:], len(separators)], strict=True)


def _split_word(word: str, measure: MeasureText, max_width: float) -> Iterator[str]:
    """Split a word that is wider than the page into parts that are not."""
    if len(word) > MAX_MEASURED_LENGTH:  # a word may be very long
        for n in range(0, len(word), MAX_MEASURED_LENGTH):
            yield from _split_word(word[n : n + MAX_MEASURED_LENGTH], measure, max_width)
        return
    while len(word) > 1 and measure(word) > max_width:
        length = max(1, int(len(word) * max_width / measure(word)))
        while length > 1 and measure(word[:length]) > max_width:
            length -= 1
        yield word[:length]
        word = word[length:]
    yield word


def _get_direction(text: str) -> int:
    """Return 1 for left to right, -1 for right to left, 0 for neutral."""
    categories = (unicodedata.bidirectional(c) for c in text)
    return next(({"L": 1, "R": -1, "AL": -1}[category] for category in categories if category in ("L", "R", "AL")), 0)


def _format_prediction(document: AttendedDocument) -> list[tuple[str, str]]:
    """Return the prediction, and whether it is correct, with colours."""
    parts = [
        (f"{label} {probability:.1%}", GREY if n else INK)
        for n, (label, probability) in enumerate(document.class_probabilities[:4])
    ]
    if document.label is None:
        return parts
    if not document.class_probabilities:
        return [(f"label: {document.label}", INK)]
    is_correct = document.class_probabilities[0][0] == document.label
    return [*parts, ("✓ correct", COLOURS[0]) if is_correct else (f"✗ wrong, label: {document.label}", GOLD)]
