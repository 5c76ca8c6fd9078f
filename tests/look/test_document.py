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
from jumok.look import figures, html, show
from jumok.look.document import Document, told
from jumok.look.document_figure import Piece, draw_document, in_order, wrapped
from jumok.look.scene import Scene, answer, manifest
from jumok.look.tiles import Request, unpack

sys.path.insert(0, str(Path(__file__).parent))
from document_texts import REVIEW, hierarchical, long, several_hops

pytestmark = pytest.mark.filterwarnings("ignore:no font here draws")  # where no Korean font is installed


def test_the_text_is_as_it_was_written() -> None:
    assert hierarchical().text == "".join(REVIEW)


def test_weights_of_words_and_sentences() -> None:
    document = hierarchical()
    assert document.by_sentence() == pytest.approx([0.2, 0.3, 0.5])
    in_it = document.in_sentences()
    assert np.add.reduceat(in_it, document.sentences[:-1]) == pytest.approx([1, 1, 1])
    assert in_it[document.words.index("drags")] == pytest.approx(0.5)

    hops = several_hops()
    assert hops.hops == 3
    sunday = hops.words.index("일요일에")
    rest = 0.3 / (len(hops.words) - 1)
    assert hops.of(0)[sunday] == pytest.approx(0.7)
    assert hops.of()[sunday] == pytest.approx((0.7 + 2 * rest) / 3)
    assert hops.by_sentence(0).sum() == pytest.approx(1)
    assert hops.by_sentence(0).argmax() == 0
    with pytest.raises(InputError, match="hop 3 was asked for; there are 3: 0 to 2"):
        hops.of(3)


def test_a_sentence_without_weight_is_no_reason_to_divide_by_zero() -> None:
    document = Document(("a", "b"), ("", " "), (0, 1, 2), np.array([[0.0, 1.0]]))
    assert document.in_sentences().tolist() == [0, 1]


def test_tensors_and_lists_are_taken_too() -> None:
    weights = torch.tensor([[0.25, 0.75]], dtype=torch.bfloat16, requires_grad=True)
    document = Document(["a", "b"], ["", " "], [0, 2], weights)  # type: ignore[arg-type]
    assert document.weights.dtype == np.float32
    assert document.weights.tolist() == [[0.25, 0.75]]
    assert document.words == ("a", "b")


GOOD: dict[str, Any] = {
    "words": ("a", "b", "c"), "before": ("", " ", " "), "sentences": (0, 1, 3), "weights": np.ones((2, 3)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"words": (), "before": ()}, "without words"),
        ({"before": ("", " ")}, "3 words and 2 texts before them"),
        ({"words": ("a", 5, "c")}, r"words\[1\] is 5; expected a text"),
        ({"before": ("", None, "")}, r"before\[1\] is None"),
        ({"sentences": ()}, "from 0 to 3"),
        ({"sentences": (0,)}, "from 0 to 3"),
        ({"sentences": (1, 3)}, r"sentences=\(1, 3\)"),
        ({"sentences": (0, 2)}, r"\(0, 3\) is one sentence"),
        ({"sentences": (0, 4)}, "from 0 to 3"),
        ({"sentences": (0, 1.5, 3)}, "whole numbers"),
        ({"sentences": (0, 1, 1, 3)}, "sentence 1 goes from word 1 to 1"),
        ({"sentences": (0, 2, 1, 3)}, "edges that increase"),
        ({"weights": np.ones(3)}, r"weights of shape \(3,\)"),
        ({"weights": np.ones((2, 4))}, "the last of them 3"),
        ({"weights": np.ones((0, 3))}, "shape"),
        ({"weights": [["x", "y", "z"]]}, "no array of numbers"),
        ({"weights": np.array([[0.5, np.nan, 0.5]])}, r"weights\[\(0, 1\)\] is nan"),
        ({"weights": np.array([[0.5, np.inf, 0.5]])}, "finite"),
        ({"weights": np.array([[0.5, 1.0, -0.5]])}, "from 0 on"),
        ({"within": np.array([0.5, 0.5])}, "within came with 2 hops"),
        ({"weights": np.ones((1, 3)), "within": np.ones(3)}, r"within of shape \(3,\)"),
        ({"weights": np.ones((1, 3)), "within": np.array([1.0, -1.0])}, r"within\[1\] is -1"),
        ({"said": (("a", 1.5),)}, "expected 0 to 1"),
        ({"said": (("a", float("nan")),)}, "expected 0 to 1"),
        ({"said": (("a", 0.2), ("b", 0.8))}, "the likeliest is first"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    Document(**GOOD)
    with pytest.raises(InputError, match=says):
        Document(**GOOD | change)


def test_the_viewer_is_told_exact_weights_and_no_digits() -> None:
    document = long(hops=7)
    scene = Scene.of_document(document, title="t")
    about = manifest([scene])["scenes"][0]["document"]
    assert np.array_equal(unpack(base64.b64decode(about["weights"])), document.weights)
    assert (about["hops"], about["within"], about["truth"]) == (7, None, None)
    assert "".join(map("".join, zip(about["before"], about["words"], strict=True))) == document.text
    numbers = 2000 * 7
    assert len(json.dumps(about)) < 5.4 * numbers + 16 * 2000
    whole = told(hierarchical())
    assert unpack(base64.b64decode(whole["within"])).tolist() == [pytest.approx([0.2, 0.3, 0.5])]
    assert whole["said"] == [["positive", 0.875], ["negative", 0.125]]


def test_edges_may_be_numpys() -> None:
    document = Document(**GOOD | {"sentences": tuple(np.array([0, 1, 3]))})
    assert json.loads(json.dumps(told(document)))["sentences"] == [0, 1, 3]


def test_its_weights_are_a_layer_of_the_scene() -> None:
    document = several_hops()
    scene = Scene.of_document(document)
    (layer,) = scene.layers
    assert layer.rows == ["hop 0", "hop 1", "hop 2"]
    wanted = Request(0, 0, (1, 2), (0, len(document.words)), what="weights")
    assert np.array_equal(unpack(answer([scene], wanted))[0], document.weights[1])


def test_it_is_in_the_file_whatever_heads_are_chosen(tmp_path: Path) -> None:
    scene = Scene.of_document(replace(hierarchical(), words=("</script>", *hierarchical().words[1:])))
    text = html.render(scene, heads={"attention": [0]})
    assert text.count("</script>") == 4  # manifest, index, numbers, the viewer itself
    assert "\\u003c/script>" in text


# ----------------------------------------------------------------------------------------- pictures


def dark(image: np.ndarray, shade: float) -> np.ndarray:
    """Where a picture has a shade of the scale."""
    shades = matplotlib.colors.LinearSegmentedColormap.from_list("", figures.SHADES)
    return (np.abs(image[..., :3] - shades(shade)[:3]) < 0.02).all(-1)


@pytest.mark.parametrize("name", ["look.html", "look.png", "look.svg", "look.pdf"])
def test_a_scene_with_a_document_is_saved(tmp_path: Path, name: str) -> None:
    for document in (hierarchical(), several_hops()):
        path = show.save(Scene.of_document(document, title="등대 $x_1$"), str(tmp_path / name))
        assert path == tmp_path / name
        assert path.stat().st_size > 5000


def test_a_hop_can_be_chosen_and_a_layer_is_still_a_map(tmp_path: Path) -> None:
    scene = Scene.of_document(several_hops())
    mean = show.save(scene, tmp_path / "mean.png").read_bytes()
    hop = show.save(scene, tmp_path / "hop.png", head=1).read_bytes()
    assert mean != hop
    with pytest.raises(InputError, match="hop 3 was asked for"):
        show.save(scene, tmp_path / "hop.png", head=3)
    with pytest.raises(InputError, match="two; give an"):
        show.save([scene, scene], tmp_path / "both.png")
    with pytest.raises(InputError, match=r"\.html file or a picture"):
        show.save(scene, tmp_path / "map.gif")
    assert show.save([scene, scene], tmp_path / "both.html").stat().st_size > 5000
    wide = imread(show.save(scene, tmp_path / "map.png", layer="attention")).shape
    assert wide[0] < wide[1]


def test_the_strongest_word_is_the_darkest_and_bars_are_long(tmp_path: Path) -> None:
    image = imread(draw_document(hierarchical(), tmp_path / "a.png"))
    strongest = np.argwhere(dark(image, 0.62))
    # "wonderful", in the third sentence; the scale below it has the shade too, in a thin strip.
    wide = np.ptp(strongest[strongest[:, 0] < 0.75 * image.shape[0]], axis=0)
    assert wide[1] > 100
    bars = (np.abs(image[..., :3] - matplotlib.colors.to_rgb(figures.COLOURS[0])) < 0.01).all(-1)
    lengths = bars[:, : image.shape[1] // 6].sum(1)
    runs = sorted(set(lengths[lengths > 5].tolist()))
    longest = 40 / 72 * figures.DOTS_PER_INCH
    assert max(runs) == pytest.approx(longest, abs=3)
    for part in (0.2 / 0.5, 0.3 / 0.5):
        assert min(abs(run - part * longest) for run in runs) < 4
    assert (image[:, -1, :3] > 0.99).all()  # nothing is cut off


def test_within_sentences_each_has_a_darkest_word(tmp_path: Path) -> None:
    whole = dark(imread(draw_document(hierarchical(), tmp_path / "a.png")), 0.62).sum()
    each = dark(imread(draw_document(hierarchical(), tmp_path / "b.png", in_sentences=True)), 0.62).sum()
    assert each > 1.5 * whole


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
    document = Document(tuple(texts), (" ",) * count, (0, count), np.ones((1, count)))
    height, width = imread(draw_document(document, tmp_path / "a.png")).shape[:2]
    assert 20 < height < 2500
    assert width < 1800


def test_pictures_have_an_end(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="100,000 words are too many for a picture: give an"):
        show.save(Scene.of_document(long(5000)), tmp_path / "a.png")
    with pytest.raises(InputError, match="2,000 words, 11 times, are too many"):
        draw_document(long(), tmp_path / "a.png", hops=[0] * 11)
    with pytest.raises(InputError, match="no hops were chosen"):
        draw_document(long(), tmp_path / "a.png", hops=[])
    assert not list(tmp_path.iterdir())


def lines(words: list[str], gaps: list[str], room: float) -> list[list[str]]:
    """Wrapped, where each letter is one wide."""
    found: dict[int, list[str]] = {}
    for piece in wrapped(words, gaps, lambda text: float(len(text)), room):
        assert piece.x + piece.width <= room
        found.setdefault(piece.line, []).append(piece.text)
    return [found.get(line, []) for line in range(max(found) + 1)]


def test_lines_are_broken_at_gaps_and_kept_where_they_were() -> None:
    words = ["ab", "cd", ",", "efgh", "i"]
    assert lines(words, ["", " ", "", " ", "\n"], 6) == [["ab", "cd", ","], ["efgh"], ["i"]]
    assert lines(words, ["", " ", "", " ", "\n"], 5) == [["ab"], ["cd", ","], ["efgh"], ["i"]]
    assert lines(words, ["", " ", "", " ", " \n\n\n"], 99) == [["ab", "cd", ",", "efgh"], [], ["i"]]
    assert lines(["abcdefg", "h"], ["", ""], 3) == [["abc"], ["def"], ["g", "h"]]


@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=9), st.sampled_from(["", " ", "\n"])), min_size=1)
)
def test_no_letter_is_lost_and_no_two_are_in_one_place(pairs: list[tuple[str, str]]) -> None:
    words, gaps = [word for word, _ in pairs], [gap for _, gap in pairs]
    pieces = list(wrapped(words, gaps, lambda text: float(len(text)), 7))
    assert "".join(piece.text for piece in pieces) == "".join(words)
    for one, two in pairwise(pieces):
        assert (one.line, one.x + one.width) <= (two.line, two.x) or one.line < two.line


def test_what_is_read_from_right_to_left_is_laid_so() -> None:
    def order(words: list[str]) -> str:
        pieces, x = [], 0.0
        for n, word in enumerate(words):
            pieces.append(Piece(n, word, 0, x, float(len(word))))
            x += len(word) + 1
        placed = sorted(in_order(pieces, 40.0), key=lambda piece: piece.x)
        for one, two in pairwise(placed):
            assert two.x - one.x - one.width == pytest.approx(1)
        return " ".join(piece.text for piece in placed)

    assert order(["one", "two"]) == "one two"
    assert order(["שלום", "עולם"]) == "עולם שלום"
    assert order(["שלום", "New", "York", "עולם"]) == "עולם New York שלום"
    assert order(["say", "שלום", ",", "עולם", "!", "now"]) == "say עולם , שלום ! now"
