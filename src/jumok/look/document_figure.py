"""A document as a picture: sentences with a bar for their weight, words shaded, lines wrapped."""

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
from jumok.look.document import Document
from jumok.look.figures import COLOURS, DOTS_PER_INCH, GOLD, GREY, INK, SHADES, saved
from jumok.look.tiles import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_document"]

# All in points.
ROOM, GUTTER, BAR, GAP = 500.0, 78.0, 40.0, 10.0  # of the text, what stands before it, the longest bar
SIZE, LINE = 10.5, 17.5
BELOW = {"title": 24.0, "said": 26.0, "hop": 20.0, "sentence": 3.0, "paragraph": 11.0, "block": 20.0}
A_PART = 100  # letters that are measured together
PALE = 0.62  # behind a text: never so dark, as in the viewer
MOST_WORDS, MOST_PIXELS = 20_000, 65_000  # the second is matplotlib's

Hop = int | None
Measure = Callable[[str], float]
Corners = NDArray[np.float64]
Codes = NDArray[np.uint8]
Box = tuple[float, float, float]  # left, middle, width


@dataclass(frozen=True)
class Piece:
    """A word, or a part of one that is wider than the page, where it stands."""

    place: int  # of the word
    text: str
    line: int
    x: float
    width: float


def draw_document(
    document: Document,
    path: str | Path,
    *,
    hops: Sequence[Hop] = (None,),
    in_sentences: bool = False,
    title: str = "",
) -> Path:
    """The text once for each of the ``hops`` (None is the mean of all); the path is given back.

    Words are shaded relative to the strongest one of the hop, or, ``in_sentences``, of their sentence.

    >>> draw_document(document, "hops.png", hops=[0, 3, None])  # doctest: +SKIP
    """
    if not hops:
        raise InputError("no hops were chosen; expected some, as in hops=[0, 3], or [None] for their mean")
    if len(document.words) * len(hops) > MOST_WORDS:
        raise _too_long(document, hops)
    chosen = [(hop, document.of(hop), document.by_sentence(hop)) for hop in hops]

    def draw(figure: Figure) -> None:
        page = Page(figure, document, in_sentences)
        page.head(title)
        for hop, weights, sentences in chosen:
            if document.hops > 1:
                page.hop("mean of all hops" if hop is None else f"hop {hop}")
            page.text(weights, sentences)
        if page.y * DOTS_PER_INCH / 72 > MOST_PIXELS:
            raise _too_long(document, hops)
        page.done()

    labels = [label for label, _ in document.said]
    return saved(draw, path, [document.text, title, *labels, document.truth or ""])


def _too_long(document: Document, hops: Sequence[Hop]) -> InputError:
    times = "" if len(hops) == 1 else f", {len(hops)} times,"
    return InputError(
        f"{len(document.words):,} words{times} are too many for a picture: "
        "give an .html file, or look at the page"
    )


class Type:
    """Letters as outlines, those of each word made once: thousands of words are then one thing to draw."""

    def __init__(self) -> None:
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import text_to_path

        self._font, self._outlines = FontProperties(size=SIZE), text_to_path
        self._widths: dict[str, float] = {}
        self._known: dict[str, tuple[Corners, Codes]] = {}

    def width(self, text: str) -> float:
        """In points."""
        if text not in self._widths:
            self._widths[text] = float(
                self._outlines.get_text_width_height_descent(text, self._font, False)[0]
            )
        return self._widths[text]

    def outline(self, text: str) -> tuple[Corners, Codes]:
        """The corners (x, y), y upwards, and how each is reached."""
        if text not in self._known:
            corners, codes = self._outlines.get_text_path(self._font, text)
            scaled = np.asarray(corners, float).reshape(-1, 2) * (SIZE / self._outlines.FONT_SCALE)
            self._known[text] = scaled, np.asarray(codes, np.uint8)
        return self._known[text]


class Page:
    """The picture, filled from the top to the bottom."""

    def __init__(self, figure: Figure, document: Document, in_sentences: bool) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        self.figure, self.document, self.in_sentences = figure, document, in_sentences
        self.type = Type()
        self.left = GUTTER if len(document.sentences) > 2 else 0.0
        self.axes: Axes = figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.y = 0.0
        self.shades = LinearSegmentedColormap.from_list("jumok", SHADES)
        self.blocks = [self._placed(s) for s in range(len(document.sentences) - 1)]  # the same for all hops
        self.letters: dict[str, list[tuple[Corners, Codes]]] = {}  # by their colour

    def head(self, title: str) -> None:
        if title:
            self._write(0, self._cut(title, (self.left + ROOM) / 1.2), INK, 1.2)
            self.y += BELOW["title"]
        if parts := _verdict(self.document):
            x = 0.0
            for n, (text, colour) in enumerate(parts):
                x += self._write(x, self._cut(text, ROOM / 4), colour, 1.0 if n else 1.15) + 16
            self.y += BELOW["said"]

    def hop(self, name: str) -> None:
        self._write(self.left, name, GREY, 0.9)
        self.y += BELOW["hop"]

    def text(self, weights: Numbers, sentences: Numbers) -> None:
        """All sentences, shaded."""
        document, edges = self.document, self.document.sentences
        tops = np.maximum.reduceat(weights, edges[:-1]) if self.in_sentences else np.full(1, weights.max())
        most = float(sentences.max()) or 1.0
        boxes: list[Box] = []
        colours: list[float] = []
        for s, pieces in enumerate(self.blocks):
            if s and document.before[edges[s]].count("\n") > 1:
                self.y += BELOW["paragraph"]
            if self.left:
                self._bar(float(sentences[s]), float(sentences[s]) / most)
            top = float(tops[s if self.in_sentences else 0]) or 1.0
            for piece in pieces:
                shade = PALE * float(weights[piece.place]) / top
                x, y = self.left + piece.x, self.y + LINE * piece.line
                self._write(x, piece.text, "white" if shade > 0.45 else INK, y=y)
                if shade > 0.01:
                    boxes.append((x - 1, y, piece.width + 2))
                    colours.append(shade)
            self.y += LINE * (pieces[-1].line + 1) + BELOW["sentence"]
        self._shade(boxes, colours, LINE / 2 - 1.2)
        self._legend(float(weights.max()), document.words[int(weights.argmax())])
        self.y += BELOW["block"]

    def done(self) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        for colour, parts in self.letters.items():
            corners, codes = (np.concatenate(part) for part in zip(*parts, strict=True))
            if len(corners):
                # As an artist: a patch would have the limits of each of its curves worked out.
                self.axes.add_artist(PathPatch(Outline(corners, codes), color=colour, lw=0))
        width, height = self.left + ROOM, max(self.y - BELOW["block"], LINE)
        self.axes.set(xlim=(-4, width), ylim=(height, -LINE / 2))
        self.figure.set_size_inches((width + 4) / 72, (height + LINE / 2) / 72)

    def _placed(self, s: int) -> list[Piece]:
        document = self.document
        first, last = document.sentences[s : s + 2]
        gaps = ["", *document.before[first + 1 : last]]
        words = [_drawable(word) for word in document.words[first:last]]
        pieces = wrapped(words, gaps, self.type.width, ROOM)
        return [replace(piece, place=first + piece.place) for piece in in_order(pieces, ROOM)]

    def _cut(self, text: str, room: float) -> str:
        """On one line, and no wider than that."""
        text = _drawable(" ".join(text.split()))[:200]
        if self.type.width(text) <= room:
            return text
        while text and self.type.width(f"{text}…") > room:
            text = text[:-1]
        return f"{text}…"

    def _write(self, x: float, text: str, colour: str, size: float = 1.0, y: float | None = None) -> float:
        """With the middle of small letters at y, the line's own if none is given. The width is given back."""
        corners, codes = self.type.outline(text)
        at = np.array([x, (self.y if y is None else y) + 0.37 * SIZE * size], np.float32)
        self.letters.setdefault(colour, []).append(
            (at + corners * np.array([size, -size], np.float32), codes)
        )
        return self.type.width(text) * size

    def _bar(self, weight: float, part: float) -> None:
        from matplotlib.patches import Rectangle

        right, told = self.left - GAP, f"{weight:.2g}" if weight >= 5e-4 else "0"  # there is little room
        self._write(right - BAR - 5 - 0.7 * self.type.width(told), told, GREY, 0.7)
        bar = Rectangle((right - BAR * part, self.y - 3.5), BAR * part, 7, color=COLOURS[0], lw=0)
        self.axes.add_artist(bar)
        self.axes.add_artist(Rectangle((right, self.y - 5), 0.8, 10, color="#c9ced6", lw=0))

    def _shade(self, boxes: Sequence[Box], colours: Sequence[float], tall: float) -> None:
        from matplotlib.collections import PolyCollection

        corners = [
            [(x, y - tall), (x + wide, y - tall), (x + wide, y + tall), (x, y + tall)] for x, y, wide in boxes
        ]
        self.axes.add_collection(PolyCollection(corners, facecolors=self.shades(colours), lw=0, zorder=0.5))

    def _legend(self, most: float, strongest: str) -> None:
        self.y += LINE * 0.55
        steps = np.linspace(0, 1, 60)
        self._shade([(self.left + 60 * n, self.y, 1.1) for n in steps.tolist()], (PALE * steps).tolist(), 3)
        told = (
            "from none to as much as the strongest word of its sentence"
            if self.in_sentences
            else f"from 0 to {most:.2g}, the weight of the strongest word, “{_drawable(strongest)[:24]}”"
        )
        self._write(self.left + 68, told, GREY, 0.75)
        self.y += LINE * 0.8


def wrapped(words: Sequence[str], gaps: Sequence[str], measure: Measure, room: float) -> Iterator[Piece]:
    """Words in lines: broken where there is a gap, or wherever it must be; line breaks in gaps are kept."""
    line, x = 0, 0.0
    blank = measure("n n") - measure("nn")
    for first, last in _runs(gaps):
        breaks = gaps[first].count("\n")
        run = sum(measure(word[:A_PART]) for word in words[first:last])
        if first and breaks:
            line, x = line + min(breaks, 2), 0.0
        elif x > 0:
            x += blank * min(len(gaps[first]), 4)
            if x + run > room:
                line, x = line + 1, 0.0
        for n in range(first, last):
            for text in _parts(words[n], measure, room):
                width = measure(text)
                if x > 0 and x + width > room:
                    line, x = line + 1, 0.0
                yield Piece(n, text, line, x, width)
                x += width


def in_order(pieces: Iterable[Piece], room: float) -> Iterator[Piece]:
    """Lines as they are read: from right to left if the first letter is, with runs of the other kind."""
    every = list(pieces)
    sides = [_side(piece.text) for piece in every]
    backwards = next((side for side in sides if side), 1) < 0
    for _, line in groupby(zip(every, sides, strict=True), key=lambda one: one[0].line):
        row = list(line)
        yield from _turned(row, backwards, room) if any(side < 0 for _, side in row) else (p for p, _ in row)


def _turned(row: Sequence[tuple[Piece, int]], backwards: bool, room: float) -> Iterator[Piece]:
    """One line by the rules of bidirectional text, with words for letters."""
    base = -1 if backwards else 1
    strong = [side for _, side in row]
    # What has no side, like a comma, is of its neighbours' if they agree, or else of the line's.
    before = list(accumulate(strong, lambda last, side: side or last, initial=base))[1:]
    after = list(accumulate(reversed(strong), lambda last, side: side or last, initial=base))[:0:-1]
    sides = [a if a == b else base for a, b in zip(before, after, strict=True)]
    runs = [list(run) for _, run in groupby(range(len(row)), key=lambda n: sides[n])]
    shown = [n for run in runs[::base] for n in (run if sides[run[0]] > 0 else run[::-1])]
    ends = [piece.x + piece.width for piece, _ in row]
    starts = [run[0] for run in runs for _ in run]
    gaps = [0.0, *(piece.x - end for (piece, _), end in zip(row[1:], ends, strict=False))]
    x = room - ends[-1] if backwards else 0.0
    for last, n in zip([None, *shown], shown, strict=False):
        if last is not None:  # what stands before a word, or before a run of them, goes with it
            x += gaps[max(last, n) if starts[last] == starts[n] else max(starts[last], starts[n])]
        yield replace(row[n][0], x=x)
        x += row[n][0].width


def _runs(gaps: Sequence[str]) -> Iterator[tuple[int, int]]:
    """From gap to gap: a word and what follows without one, like a comma."""
    starts = [n for n, gap in enumerate(gaps) if gap or not n]
    return zip(starts, [*starts[1:], len(gaps)], strict=True)


def _parts(word: str, measure: Measure, room: float) -> Iterator[str]:
    """The word, or, where it is wider than the page, parts that are not."""
    if len(word) > A_PART:  # a word may be a whole book
        for n in range(0, len(word), A_PART):
            yield from _parts(word[n : n + A_PART], measure, room)
        return
    while len(word) > 1 and measure(word) > room:
        keep = max(1, int(len(word) * room / measure(word)))
        while keep > 1 and measure(word[:keep]) > room:
            keep -= 1
        yield word[:keep]
        word = word[keep:]
    yield word


def _drawable(word: str) -> str:
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in word)


def _side(text: str) -> int:
    """1 for what is read from left to right, -1 from right to left, 0 for neither."""
    kinds = (unicodedata.bidirectional(c) for c in text)
    return next(({"L": 1, "R": -1, "AL": -1}[kind] for kind in kinds if kind in ("L", "R", "AL")), 0)


def _verdict(document: Document) -> list[tuple[str, str]]:
    """What was said, and whether that is right, with colours."""
    parts = [
        (f"{label} {chance:.1%}", GREY if n else INK) for n, (label, chance) in enumerate(document.said[:4])
    ]
    if document.truth is None:
        return parts
    if not document.said:
        return [(f"it is {document.truth}", INK)]
    right = document.said[0][0] == document.truth
    return [*parts, ("✓ right", COLOURS[0]) if right else (f"✗ wrong: it is {document.truth}", GOLD)]
