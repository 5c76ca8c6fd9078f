"""A document: what it holds and refuses, what the viewer is told of it, and its picture."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
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
from jumok.look.viewer import html_file, view_writer
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.tiles import TileRequest, unpack
from jumok.look.viewer.viewer_data import ViewerData, answer_request, build_manifest

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_documents import REVIEW, hierarchical, long, several_hops

pytestmark = pytest.mark.filterwarnings("ignore:no installed font has")  # where no Korean font is installed


def test_the_text_is_as_it_was_written() -> None:
    assert hierarchical().text == "".join(REVIEW)


def test_weights_of_words_and_sentences() -> None:
    document = hierarchical()
    assert document.get_sentence_weights() == pytest.approx([0.2, 0.3, 0.5])
    in_it = document.normalize_within_sentences()
    assert np.add.reduceat(in_it, document.sentence_offsets[:-1]) == pytest.approx([1, 1, 1])
    assert in_it[document.words.index("drags")] == pytest.approx(0.5)

    hops = several_hops()
    assert hops.num_hops == 3
    sunday = hops.words.index("일요일에")
    rest = 0.3 / (len(hops.words) - 1)
    assert hops.get_word_weights(0)[sunday] == pytest.approx(0.7)
    assert hops.get_word_weights()[sunday] == pytest.approx((0.7 + 2 * rest) / 3)
    assert hops.get_sentence_weights(0).sum() == pytest.approx(1)
    assert hops.get_sentence_weights(0).argmax() == 0
    with pytest.raises(InputError, match="hop 3 was requested; there are 3: 0 to 2"):
        hops.get_word_weights(3)


def test_a_sentence_without_weight_is_no_reason_to_divide_by_zero() -> None:
    document = AttendedDocument(("a", "b"), ("", " "), (0, 1, 2), np.array([[0.0, 1.0]]))
    assert document.normalize_within_sentences().tolist() == [0, 1]


def test_tensors_and_lists_are_taken_too() -> None:
    weights = torch.tensor([[0.25, 0.75]], dtype=torch.bfloat16, requires_grad=True)
    document = AttendedDocument(["a", "b"], ["", " "], [0, 2], weights)  # type: ignore[arg-type]
    assert document.weights.dtype == np.float32
    assert document.weights.tolist() == [[0.25, 0.75]]
    assert document.words == ("a", "b")


GOOD: dict[str, Any] = {
    "words": ("a", "b", "c"),
    "separators": ("", " ", " "),
    "sentence_offsets": (0, 1, 3),
    "weights": np.ones((2, 3)),
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"words": (), "separators": ()}, "without words"),
        ({"separators": ("", " ")}, "3 words and 2 separators"),
        ({"words": ("a", 5, "c")}, r"words\[1\] is 5; expected a text"),
        ({"separators": ("", None, "")}, r"separators\[1\] is None"),
        ({"sentence_offsets": ()}, "from 0 to 3"),
        ({"sentence_offsets": (0,)}, "from 0 to 3"),
        ({"sentence_offsets": (1, 3)}, r"sentence_offsets=\(1, 3\)"),
        ({"sentence_offsets": (0, 2)}, r"\(0, 3\) is one sentence"),
        ({"sentence_offsets": (0, 4)}, "from 0 to 3"),
        ({"sentence_offsets": (0, 1.5, 3)}, "integers"),
        ({"sentence_offsets": (0, 1, 1, 3)}, "sentence 1 goes from word 1 to 1"),
        ({"sentence_offsets": (0, 2, 1, 3)}, "increasing offsets"),
        ({"weights": np.ones(3)}, r"weights of shape \(3,\)"),
        ({"weights": np.ones((2, 4))}, "the last of them 3"),
        ({"weights": np.ones((0, 3))}, "shape"),
        ({"weights": [["x", "y", "z"]]}, "not an array of numbers"),
        ({"weights": np.array([[0.5, np.nan, 0.5]])}, r"weights\[\(0, 1\)\] is nan"),
        ({"weights": np.array([[0.5, np.inf, 0.5]])}, "finite"),
        ({"weights": np.array([[0.5, 1.0, -0.5]])}, "from 0 on"),
        ({"sentence_weights": np.array([0.5, 0.5])}, "sentence_weights came with 2 hops"),
        ({"weights": np.ones((1, 3)), "sentence_weights": np.ones(3)}, r"sentence_weights of shape \(3,\)"),
        (
            {"weights": np.ones((1, 3)), "sentence_weights": np.array([1.0, -1.0])},
            r"sentence_weights\[1\] is -1",
        ),
        ({"class_probabilities": (("a", 1.5),)}, "expected 0 to 1"),
        ({"class_probabilities": (("a", float("nan")),)}, "expected 0 to 1"),
        ({"class_probabilities": (("a", 0.2), ("b", 0.8))}, "descending order"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    AttendedDocument(**GOOD)
    with pytest.raises(InputError, match=says):
        AttendedDocument(**GOOD | change)


def test_the_viewer_is_told_exact_weights_and_no_digits() -> None:
    document = long(hops=7)
    scene = ViewerData.from_document(document, title="t")
    about = build_manifest([scene])["data"][0]["document"]
    assert np.array_equal(unpack(base64.b64decode(about["weights"])), document.weights)
    assert (about["num_hops"], about["sentence_weights"], about["label"]) == (7, None, None)
    assert "".join(map("".join, zip(about["separators"], about["words"], strict=True))) == document.text
    numbers = 2000 * 7
    assert len(json.dumps(about)) < 5.4 * numbers + 16 * 2000
    whole = hierarchical().to_json()
    assert unpack(base64.b64decode(whole["sentence_weights"])).tolist() == [pytest.approx([0.2, 0.3, 0.5])]
    assert whole["class_probabilities"] == [["positive", 0.875], ["negative", 0.125]]


def test_edges_may_be_numpys() -> None:
    document = AttendedDocument(**GOOD | {"sentence_offsets": tuple(np.array([0, 1, 3]))})
    assert json.loads(json.dumps(document.to_json()))["sentence_offsets"] == [0, 1, 3]


def test_its_weights_are_a_layer_of_the_scene() -> None:
    document = several_hops()
    scene = ViewerData.from_document(document)
    (layer,) = scene.layers
    assert layer.row_labels == ["hop 0", "hop 1", "hop 2"]
    wanted = TileRequest(0, 0, (1, 2), (0, len(document.words)), quantity="weights")
    assert np.array_equal(unpack(answer_request([scene], wanted))[0], document.weights[1])


def test_it_is_in_the_file_whatever_heads_are_chosen(tmp_path: Path) -> None:
    scene = ViewerData.from_document(replace(hierarchical(), words=("</script>", *hierarchical().words[1:])))
    text = html_file.render_html(scene, heads={"attention": [0]})
    assert text.count("</script>") == 4  # manifest, index, numbers, the viewer itself
    assert "\\u003c/script>" in text


# ----------------------------------------------------------------------------------------- pictures


def dark(image: np.ndarray, shade: float) -> np.ndarray:
    """Where a picture has a shade of the scale."""
    shades = matplotlib.colors.LinearSegmentedColormap.from_list("", plots.SHADES)
    return (np.abs(image[..., :3] - shades(shade)[:3]) < 0.02).all(-1)


@pytest.mark.parametrize("name", ["look.html", "look.png", "look.svg", "look.pdf"])
def test_a_scene_with_a_document_is_saved(tmp_path: Path, name: str) -> None:
    for document in (hierarchical(), several_hops()):
        path = view_writer.save_view(ViewerData.from_document(document, title="등대 $x_1$"), str(tmp_path / name))
        assert path == tmp_path / name
        assert path.stat().st_size > 5000


def test_a_hop_can_be_chosen_and_a_layer_is_still_a_map(tmp_path: Path) -> None:
    scene = ViewerData.from_document(several_hops())
    mean = view_writer.save_view(scene, tmp_path / "mean.png").read_bytes()
    hop = view_writer.save_view(scene, tmp_path / "hop.png", head=1).read_bytes()
    assert mean != hop
    with pytest.raises(InputError, match="hop 3 was requested"):
        view_writer.save_view(scene, tmp_path / "hop.png", head=3)
    with pytest.raises(InputError, match="two; use an"):
        view_writer.save_view([scene, scene], tmp_path / "both.png")
    with pytest.raises(InputError, match=r"\.html file or a figure"):
        view_writer.save_view(scene, tmp_path / "map.gif")
    assert view_writer.save_view([scene, scene], tmp_path / "both.html").stat().st_size > 5000
    wide = imread(view_writer.save_view(scene, tmp_path / "map.png", layer="attention")).shape
    assert wide[0] < wide[1]


def test_the_strongest_word_is_the_darkest_and_bars_are_long(tmp_path: Path) -> None:
    image = imread(draw_document(hierarchical(), tmp_path / "a.png"))
    strongest = np.argwhere(dark(image, 0.62))
    # "wonderful", in the third sentence; the scale below it has the shade too, in a thin strip.
    wide = np.ptp(strongest[strongest[:, 0] < 0.75 * image.shape[0]], axis=0)
    assert wide[1] > 100
    bars = (np.abs(image[..., :3] - matplotlib.colors.to_rgb(plots.COLOURS[0])) < 0.01).all(-1)
    lengths = bars[:, : image.shape[1] // 6].sum(1)
    runs = sorted(set(lengths[lengths > 5].tolist()))
    longest = 40 / 72 * plots.DOTS_PER_INCH
    assert max(runs) == pytest.approx(longest, abs=3)
    for part in (0.2 / 0.5, 0.3 / 0.5):
        assert min(abs(run - part * longest) for run in runs) < 4
    assert (image[:, -1, :3] > 0.99).all()  # nothing is cut off


def test_within_sentences_each_has_a_darkest_word(tmp_path: Path) -> None:
    whole = dark(imread(draw_document(hierarchical(), tmp_path / "a.png")), 0.62).sum()
    each = dark(imread(draw_document(hierarchical(), tmp_path / "b.png", is_per_sentence=True)), 0.62).sum()
    assert each > 1.5 * whole


def test_a_title_may_be_the_whole_text(tmp_path: Path) -> None:
    said = (("x" * 500, 0.5), ("y\nz", 0.5))
    usual = imread(draw_document(hierarchical(), tmp_path / "a.png", title="t")).shape
    document = replace(hierarchical(), class_probabilities=said)
    shape = imread(draw_document(document, tmp_path / "b.png", title="a long\ntitle " * 40)).shape
    assert shape[:2] == pytest.approx(usual[:2], abs=6)


def test_several_hops_stand_one_below_the_other(tmp_path: Path) -> None:
    document = several_hops()
    one = imread(draw_document(document, tmp_path / "a.png", hops=[1])).shape
    three = imread(draw_document(document, tmp_path / "b.png", hops=[0, 2, None])).shape
    assert three[1] == pytest.approx(one[1], abs=3)
    assert 2.2 * one[0] < three[0] < 3.2 * one[0]


@pytest.mark.parametrize(
    "texts",
    [
        ["a"],
        ["\u202e"],
        ["x" * 3000],
        ["👩‍👩‍👧‍👦", "שלום", "عالم", "abc"],
        ["$x$", "\\frac{", "a\tb\nc"],
        [" "],
    ],
)
def test_any_word_is_drawn(tmp_path: Path, texts: list[str]) -> None:
    count = len(texts)
    document = AttendedDocument(tuple(texts), (" ",) * count, (0, count), np.ones((1, count)))
    height, width = imread(draw_document(document, tmp_path / "a.png")).shape[:2]
    assert 20 < height < 2500
    assert width < 1800


def test_pictures_have_an_end(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="100,000 words are too many for a figure: use an"):
        view_writer.save_view(ViewerData.from_document(long(5000)), tmp_path / "a.png")
    with pytest.raises(InputError, match="2,000 words, 11 times, are too many"):
        draw_document(long(), tmp_path / "a.png", hops=[0] * 11)
    with pytest.raises(InputError, match="no hops came"):
        draw_document(long(), tmp_path / "a.png", hops=[])
    assert not list(tmp_path.iterdir())


def lines(words: list[str], gaps: list[str], room: float) -> list[list[str]]:
    """Wrapped, where each letter is one wide."""
    found: dict[int, list[str]] = {}
    for piece in wrap_words(words, gaps, lambda text: float(len(text)), room):
        assert piece.x + piece.width <= room
        found.setdefault(piece.line, []).append(piece.text)
    return [found.get(line, []) for line in range(max(found) + 1)]


def test_lines_are_broken_at_gaps_and_kept_where_they_were() -> None:
    words = ["ab", "cd", ",", "efgh", "i"]
    assert lines(words, ["", " ", "", " ", "\n"], 6) == [["ab", "cd", ","], ["efgh"], ["i"]]
    assert lines(words, ["", " ", "", " ", "\n"], 5) == [["ab"], ["cd", ","], ["efgh"], ["i"]]
    assert lines(words, ["", " ", "", " ", " \n\n\n"], 99) == [["ab", "cd", ",", "efgh"], [], ["i"]]
    assert lines(["abcdefg", "h"], ["", ""], 3) == [["abc"], ["def"], ["g", "h"]]


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=9), st.sampled_from(["", " ", "\n"])), min_size=1))
def test_no_letter_is_lost_and_no_two_are_in_one_place(pairs: list[tuple[str, str]]) -> None:
    words, gaps = [word for word, _ in pairs], [gap for _, gap in pairs]
    pieces = list(wrap_words(words, gaps, lambda text: float(len(text)), 7))
    assert "".join(piece.text for piece in pieces) == "".join(words)
    for one, two in pairwise(pieces):
        assert (one.line, one.x + one.width) <= (two.line, two.x) or one.line < two.line


def test_what_is_read_from_right_to_left_is_laid_so() -> None:
    def order(words: list[str]) -> str:
        pieces, x = [], 0.0
        for n, word in enumerate(words):
            pieces.append(PlacedWord(n, word, 0, x, float(len(word))))
            x += len(word) + 1
        placed = sorted(reorder_bidirectional(pieces, 40.0), key=lambda piece: piece.x)
        for one, two in pairwise(placed):
            assert two.x - one.x - one.width == pytest.approx(1)
        return " ".join(piece.text for piece in placed)

    assert order(["one", "two"]) == "one two"
    assert order(["שלום", "עולם"]) == "עולם שלום"
    assert order(["שלום", "New", "York", "עולם"]) == "עולם New York שלום"
    assert order(["say", "שלום", ",", "עולם", "!", "now"]) == "say עולם , שלום ! now"


def test_shade_does_not_cover_the_end_of_the_previous_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boxes: list[tuple[float, float, float]] = []
    monkeypatch.setattr(DocumentCanvas, "_draw_shades", lambda self, new, *_: boxes.extend(new))
    document = AttendedDocument(("full", ".", "next"), ("", "", " "), (0, 3), np.ones((1, 3)))
    draw_document(document, tmp_path / "a.png")
    widths = [GlyphCache().measure_width(word) for word in document.words]
    (word, _, _), (dot, _, _), (after, _, _), *_legend = boxes
    assert dot == pytest.approx(word + 1 + widths[0])
    assert after > dot + widths[1] + 1
