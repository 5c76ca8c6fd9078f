"""Tests of documents as figures."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from jumok.errors import InputError
from jumok.look.figures import plots
from jumok.look.figures.document_figure import (
    DocumentCanvas,
    GlyphCache,
    PlacedWord,
    draw_document,
    reorder_bidirectional,
    wrap_words,
)
from jumok.look.viewer import view_writer
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.viewer_data import ViewerData

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_documents import build_hierarchical_document, build_long_document, build_multi_hop_document

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:no installed font has"),
]  # where no Korean font is installed


def find_shade(image: np.ndarray, shade: float) -> np.ndarray:
    """Return where an image has a shade of the scale."""
    shades = matplotlib.colors.LinearSegmentedColormap.from_list("", plots.SHADES)
    return (np.abs(image[..., :3] - shades(shade)[:3]) < 0.02).all(-1)


@pytest.mark.parametrize("name", ["look.html", "look.png", "look.svg", "look.pdf"])
def test_documents_are_saved_in_every_format(tmp_path: Path, name: str) -> None:
    for document in (build_hierarchical_document(), build_multi_hop_document()):
        path = view_writer.save_view(ViewerData.from_document(document, title="등대 $x_1$"), str(tmp_path / name))
        assert path == tmp_path / name
        assert path.stat().st_size > 5000


def test_save_view_selects_hop_or_layer(tmp_path: Path) -> None:
    data = ViewerData.from_document(build_multi_hop_document())
    mean = view_writer.save_view(data, tmp_path / "mean.png").read_bytes()
    hop = view_writer.save_view(data, tmp_path / "hop.png", head=1).read_bytes()
    assert mean != hop
    with pytest.raises(InputError, match="hop 3 was requested"):
        view_writer.save_view(data, tmp_path / "hop.png", head=3)
    with pytest.raises(InputError, match="two; use an"):
        view_writer.save_view([data, data], tmp_path / "both.png")
    with pytest.raises(InputError, match=r"\.html file or a figure"):
        view_writer.save_view(data, tmp_path / "map.gif")
    assert view_writer.save_view([data, data], tmp_path / "both.html").stat().st_size > 5000
    shape = imread(view_writer.save_view(data, tmp_path / "map.png", layer="attention")).shape
    assert shape[0] < shape[1]


def test_highest_weight_has_darkest_shade_and_bars_are_proportional(tmp_path: Path) -> None:
    image = imread(draw_document(build_hierarchical_document(), tmp_path / "a.png"))
    strongest = np.argwhere(find_shade(image, 0.62))
    # The word "wonderful" in the third sentence; the thin scale below it has the shade too.
    extent = np.ptp(strongest[strongest[:, 0] < 0.75 * image.shape[0]], axis=0)
    assert extent[1] > 100
    bars = (np.abs(image[..., :3] - matplotlib.colors.to_rgb(plots.COLOURS[0])) < 0.01).all(-1)
    lengths = bars[:, : image.shape[1] // 6].sum(1)
    runs = sorted(set(lengths[lengths > 5].tolist()))
    longest = 40 / 72 * plots.DOTS_PER_INCH
    assert max(runs) == pytest.approx(longest, abs=3)
    for share in (0.2 / 0.5, 0.3 / 0.5):
        assert min(abs(run - share * longest) for run in runs) < 4
    assert (image[:, -1, :3] > 0.99).all()  # nothing is clipped


def test_per_sentence_scale_shades_each_sentence_fully(tmp_path: Path) -> None:
    whole = find_shade(imread(draw_document(build_hierarchical_document(), tmp_path / "a.png")), 0.62).sum()
    path = draw_document(build_hierarchical_document(), tmp_path / "b.png", is_per_sentence=True)
    each = find_shade(imread(path), 0.62).sum()
    assert each > 1.5 * whole


def test_long_titles_do_not_widen_the_figure(tmp_path: Path) -> None:
    probabilities = (("x" * 500, 0.5), ("y\nz", 0.5))
    expected = imread(draw_document(build_hierarchical_document(), tmp_path / "a.png", title="t")).shape
    document = replace(build_hierarchical_document(), class_probabilities=probabilities)
    shape = imread(draw_document(document, tmp_path / "b.png", title="a long\ntitle " * 40)).shape
    assert shape[:2] == pytest.approx(expected[:2], abs=6)


def test_hops_are_drawn_below_each_other(tmp_path: Path) -> None:
    document = build_multi_hop_document()
    single = imread(draw_document(document, tmp_path / "a.png", hops=[1])).shape
    several = imread(draw_document(document, tmp_path / "b.png", hops=[0, 2, None])).shape
    assert several[1] == pytest.approx(single[1], abs=3)
    assert 2.2 * single[0] < several[0] < 3.2 * single[0]


@pytest.mark.parametrize(
    "texts",
    [["a"], ["\u202e"], ["x" * 3000], ["👩‍👩‍👧‍👦", "שלום", "عالم", "abc"], ["$x$", "\\frac{", "a\tb\nc"], [" "]],
)
def test_unusual_words_are_drawn(tmp_path: Path, texts: list[str]) -> None:
    count = len(texts)
    document = AttendedDocument(tuple(texts), (" ",) * count, (0, count), np.ones((1, count)))
    height, width = imread(draw_document(document, tmp_path / "a.png")).shape[:2]
    assert 20 < height < 2500
    assert width < 1800


def test_long_documents_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="100,000 words are too many for a figure: use an"):
        view_writer.save_view(ViewerData.from_document(build_long_document(5000)), tmp_path / "a.png")
    with pytest.raises(InputError, match="2,000 words, 11 times, are too many"):
        draw_document(build_long_document(), tmp_path / "a.png", hops=[0] * 11)
    with pytest.raises(InputError, match="no hops given"):
        draw_document(build_long_document(), tmp_path / "a.png", hops=[])
    assert not list(tmp_path.iterdir())


def wrap_lines(words: list[str], separators: list[str], max_width: float) -> list[list[str]]:
    """Wrap words in which each letter has the width 1."""
    lines: dict[int, list[str]] = {}
    for piece in wrap_words(words, separators, lambda text: float(len(text)), max_width):
        assert piece.x + piece.width <= max_width
        lines.setdefault(piece.line, []).append(piece.text)
    return [lines.get(line, []) for line in range(max(lines) + 1)]


def test_lines_break_at_separators_and_line_breaks_are_kept() -> None:
    words = ["ab", "cd", ",", "efgh", "i"]
    assert wrap_lines(words, ["", " ", "", " ", "\n"], 6) == [["ab", "cd", ","], ["efgh"], ["i"]]
    assert wrap_lines(words, ["", " ", "", " ", "\n"], 5) == [["ab"], ["cd", ","], ["efgh"], ["i"]]
    assert wrap_lines(words, ["", " ", "", " ", " \n\n\n"], 99) == [["ab", "cd", ",", "efgh"], [], ["i"]]
    assert wrap_lines(["abcdefg", "h"], ["", ""], 3) == [["abc"], ["def"], ["g", "h"]]


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=9), st.sampled_from(["", " ", "\n"])), min_size=1))
def test_wrapping_keeps_all_letters_without_overlap(pairs: list[tuple[str, str]]) -> None:
    words, separators = (list(texts) for texts in zip(*pairs, strict=True))
    pieces = list(wrap_words(words, separators, lambda text: float(len(text)), 7))
    assert "".join(piece.text for piece in pieces) == "".join(words)
    for left, right in pairwise(pieces):
        assert (left.line, left.x + left.width) <= (right.line, right.x) or left.line < right.line


def test_right_to_left_words_are_reordered() -> None:
    def reorder(words: list[str]) -> str:
        pieces, x = [], 0.0
        for n, word in enumerate(words):
            pieces.append(PlacedWord(n, word, 0, x, float(len(word))))
            x += len(word) + 1
        placed = sorted(reorder_bidirectional(pieces, 40.0), key=lambda piece: piece.x)
        for left, right in pairwise(placed):
            assert right.x - left.x - left.width == pytest.approx(1)
        return " ".join(piece.text for piece in placed)

    assert reorder(["one", "two"]) == "one two"
    assert reorder(["שלום", "עולם"]) == "עולם שלום"
    assert reorder(["שלום", "New", "York", "עולם"]) == "עולם New York שלום"
    assert reorder(["say", "שלום", ",", "עולם", "!", "now"]) == "say עולם , שלום ! now"


def test_shade_does_not_cover_the_end_of_the_previous_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boxes: list[tuple[float, float, float]] = []
    monkeypatch.setattr(DocumentCanvas, "_draw_shades", lambda self, new, *_: boxes.extend(new))
    document = AttendedDocument(("full", ".", "next"), ("", "", " "), (0, 3), np.ones((1, 3)))
    draw_document(document, tmp_path / "a.png")
    widths = [GlyphCache().measure_width(word) for word in document.words]
    (word, _, _), (dot, _, _), (after, _, _), *_legend = boxes
    assert dot == pytest.approx(word + 1 + widths[0])
    assert after > dot + widths[1] + 1
