"""The document view in a real browser: what it shows, message and does, at any length."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.viewer_data import ViewerData, build_manifest

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_documents import KOREAN, REVIEW, build_hierarchical_document, build_long_document, build_multi_hop_document

pytestmark = pytest.mark.long


OpenPage = Callable[..., Any]
MIXED = ("<script>alert(1)</script>", "שלום", "👩‍👩‍👧‍👦", "<b>bold</b>", "日本語", "a\u202eb")


def locate_word(document: AttendedDocument, word: str) -> str:
    return f'.jm-document-word[data-word="{document.words.index(word)}"]'


def hover(viewer: Any, selector: str) -> list[str]:
    viewer.page.hover(selector)
    viewer.page.wait_for_selector(".jm-tooltip:not([hidden])")
    return str(viewer.page.inner_text(".jm-tooltip")).split("\n")


def is_visible(viewer: Any, sentence: int) -> bool:
    script = """(() => { const box = v.views.document.textBox.getBoundingClientRect();
        const b = document.querySelector(`.jm-sentence[data-sentence="${args[0]}"]`).getBoundingClientRect();
        return b.top >= box.top - 1 && b.top < box.bottom - 20; })()"""
    return bool(viewer.evaluate(script, sentence))


# ---------------------------------------------------------------- appearance


def test_opens_with_the_original_text(open_served: OpenPage) -> None:
    document = build_hierarchical_document()
    viewer = open_served(ViewerData.from_document(document, title="A rainy Sunday"))
    assert viewer.get_texts(".jm-tabs [role=tab]") == ["Document", "Map", "Arcs", "Text", "Heads"]
    assert viewer.page.locator('[role=tab][aria-selected="true"]').inner_text() == "Document"
    assert viewer.get_texts(".jm-line") == [sentence.strip() for sentence in REVIEW]
    assert viewer.page.locator(".jm-gap").count() == 1  # the third sentence follows an empty line
    two = viewer.page.locator(".jm-line >> nth=1").bounding_box()["height"]
    assert two > 1.8 * viewer.page.locator(".jm-line >> nth=0").bounding_box()["height"]  # it contains a line break
    assert viewer.page.inner_text(".jm-subtitle").split("·")[0].strip() == f"{len(document.words)} words"
    assert not viewer.page.is_visible(".jm-head-step")  # there is only one hop


def test_highest_weight_has_darkest_shade_and_is_in_the_legend(open_served: OpenPage) -> None:
    document = build_hierarchical_document()
    viewer = open_served(ViewerData.from_document(document))
    strong = [
        viewer.get_darkness(locate_word(document, word)) for word in ("wonderful", "drags", "rainy", "lighthouse")
    ]
    assert strong == sorted(strong, reverse=True)
    assert strong[0] > 250
    assert strong[3] < 80
    assert "relative to the highest weight, “wonderful”" in viewer.page.inner_text(".jm-legend")
    label = viewer.page.get_attribute(".jm-legend-bar", "aria-label")
    assert label.endswith("from 0 to 0.25")


def test_sentence_bars_are_proportional_and_labelled(open_served: OpenPage) -> None:
    viewer = open_served(ViewerData.from_document(build_hierarchical_document()))
    bars = [bar.bounding_box()["width"] for bar in viewer.page.locator(".jm-level > span").all()]
    assert bars[2] == pytest.approx(52 - 1.5, abs=2)
    assert [bar / bars[2] for bar in bars] == pytest.approx([0.4, 0.6, 1], abs=0.02)
    labels = [gauge.get_attribute("aria-label") for gauge in viewer.page.locator(".jm-sentence-weight").all()]
    assert labels == [
        "Sentence 1: weight 0.2, rank 3 of 3",
        "Sentence 2: weight 0.3, rank 2 of 3",
        "Sentence 3: weight 0.5, rank 1 of 3",
    ]
    assert hover(viewer, ".jm-sentence-weight >> nth=1") == ["Sentence 2", "0.3", "rank 2 of 3 sentences", "10 words"]


def test_prediction_and_label(open_served: OpenPage) -> None:
    def get_prediction(document: AttendedDocument) -> str:
        viewer = open_served(ViewerData.from_document(document))
        return " ".join(viewer.page.locator(".jm-prediction-row").inner_text().split())

    document = build_hierarchical_document()
    assert get_prediction(document) == "positive 87.5 % negative 12.5 % ✓ correct"
    assert get_prediction(build_multi_hop_document()) == "부정 60.0 % 긍정 40.0 % ✗ wrong, label: 긍정 (40.0 %)"
    probabilities = (("yes", 0.99999), ("no", 0.00001))
    assert get_prediction(replace(document, class_probabilities=probabilities, label=None)) == "yes > 99.9 % no < 0.1 %"
    assert get_prediction(replace(document, class_probabilities=(), label="<i>it</i>")) == "Label: <i>it</i>"
    classes = tuple((f"{n} stars", 0.125) for n in range(8))
    assert "and 4 more" in get_prediction(replace(document, class_probabilities=classes, label=None))


def test_sentence_scope_shades_each_sentence_fully(open_served: OpenPage) -> None:
    document = build_hierarchical_document()
    viewer = open_served(ViewerData.from_document(document))
    viewer.page.click('[data-scope="sentence"]')
    strong = {viewer.get_darkness(locate_word(document, word)) for word in ("wonderful", "drags", "rainy")}
    assert len(strong) == 1
    assert min(strong) > 250
    assert "highest weight in the sentence" in viewer.page.inner_text(".jm-legend")
    assert hover(viewer, locate_word(document, "drags"))[:3] == [
        "drags",
        "0.5",
        "of its sentence, 0.15 of the document",
    ]
    viewer.press("s")
    assert viewer.get_darkness(locate_word(document, "rainy")) < min(strong) - 50
    assert viewer.page.get_attribute('[data-scope="document"]', "aria-pressed") == "true"


def test_curve_and_colours_can_be_selected(open_served: OpenPage) -> None:
    document = build_hierarchical_document()
    viewer = open_served(ViewerData.from_document(document))
    pale = viewer.get_darkness(locate_word(document, "lighthouse"))
    viewer.page.select_option('[aria-label="Curve of the scale"]', "root")
    assert viewer.get_darkness(locate_word(document, "lighthouse")) > pale + 30
    viewer.page.select_option('[aria-label="Curve of the scale"]', "log")
    assert viewer.get_darkness(locate_word(document, "lighthouse")) > pale + 80
    viewer.page.select_option('[aria-label="Colours"]', "grey")
    colour = viewer.page.locator(locate_word(document, "wonderful")).evaluate(
        "e => getComputedStyle(e).backgroundColor"
    )
    assert len(set(colour[4:-1].split(", "))) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_shaded_words_have_contrast(open_served: OpenPage, scheme: str) -> None:
    document = build_hierarchical_document()
    viewer = open_served(ViewerData.from_document(document), color_scheme=scheme)
    assert viewer.evaluate("v.layout.root.dataset.theme") == scheme
    script = """[...document.querySelectorAll(".jm-document-word")].map((e) => {
        const plain = getComputedStyle(document.querySelector(".jumok")).backgroundColor;
        const own = getComputedStyle(e), parts = (c) => c.match(/[\\d.]+/g).map(Number);
        const back = parts(own.backgroundColor);
        return [parts(own.color), back.length === 4 && back[3] === 0 ? parts(plain) : back]; })"""
    for ink, ground in viewer.evaluate(script):
        assert compute_contrast(ink[:3], ground[:3]) > 4
    viewer.press("t")
    assert viewer.evaluate("v.layout.root.dataset.theme") != scheme


def compute_contrast(first: list[float], second: list[float]) -> float:
    """Return the WCAG contrast of two sRGB colours."""

    def compute_luminance(colour: list[float]) -> float:
        x = np.array(colour) / 255
        linear = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05

    low, high = sorted(map(compute_luminance, (first, second)))
    return high / low


# ---------------------------------------------------------------- pointer and keys


def test_hover_shows_weight_rank_and_sentence(open_served: OpenPage) -> None:
    document = build_hierarchical_document()
    viewer = open_served(ViewerData.from_document(document))
    words = len(document.words)
    assert hover(viewer, locate_word(document, "drags")) == [
        "drags", "0.15", f"rank 2 of {words} words", "sentence 2: 0.3, rank 2 of 3",
    ]  # fmt: skip
    assert (
        hover(viewer, locate_word(document, "lighthouse"))[2] == f"rank 4 of {words} words"
    )  # equal to the others of its sentence
    viewer.page.mouse.move(2, 2)
    viewer.page.wait_for_selector(".jm-tooltip", state="hidden")


def test_click_pins_a_word_and_lists_its_sentence(open_served: OpenPage) -> None:
    document = build_hierarchical_document()
    viewer = open_served(ViewerData.from_document(document))
    viewer.page.click(locate_word(document, "thin"))
    assert viewer.get_texts(".jm-panel-title")[0].split() == ["thin", str(document.words.index("thin"))]
    assert viewer.get_texts(".jm-rank .jm-key")[0] == "drags"
    assert len(viewer.get_texts(".jm-rank li")) == 10  # its sentence
    assert "Sentence 2: 0.3, rank 2 of 3" in viewer.page.inner_text(".jm-panel")
    assert viewer.page.locator(".jm-document-word.jm-is-pinned").all_text_contents() == ["thin"]
    viewer.page.click(locate_word(document, "wonderful"))
    assert viewer.page.locator(".jm-document-word.jm-is-pinned").all_text_contents() == ["wonderful"]
    viewer.press("Escape")
    assert not viewer.page.is_visible(".jm-panel")
    viewer.page.click(locate_word(document, "thin"))
    viewer.page.click(locate_word(document, "thin"))  # the second click unpins
    assert not viewer.page.is_visible(".jm-panel")
    viewer.page.click(locate_word(document, "thin"))
    viewer.page.click('[aria-label="Unpin (Esc)"]')
    assert viewer.page.locator(".jm-document-word.jm-is-pinned").count() == 0


def test_hops_are_selected_by_mouse_and_keyboard(open_served: OpenPage) -> None:
    document = build_multi_hop_document()
    viewer = open_served(ViewerData.from_document(document))
    assert viewer.get_texts(".jm-chips [role=radio]") == ["0", "1", "2", "mean"]
    assert viewer.evaluate("v.state.hop") is None
    assert "mean of 3 hops" in viewer.page.inner_text(".jm-subtitle")
    strong = {hop: locate_word(document, word) for hop, word in enumerate(("일요일에", "훌륭하다", "다시"))}
    assert len({viewer.get_darkness(selector) for selector in strong.values()}) == 1  # the mean has a third of each
    viewer.page.click('[data-hop="1"]')
    assert [viewer.get_darkness(strong[hop]) > 250 for hop in range(3)] == [False, True, False]
    assert "“훌륭하다”" in viewer.page.inner_text(".jm-legend")
    viewer.press("ArrowRight")
    assert [viewer.get_darkness(strong[hop]) > 250 for hop in range(3)] == [False, False, True]
    assert viewer.page.inner_text("[aria-live]") == "Hop 2"
    assert viewer.page.locator('[role=radio][aria-checked="true"]').inner_text() == "2"
    viewer.press("ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert viewer.evaluate("v.state.hop") == 0
    viewer.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight")
    assert viewer.evaluate("v.state.hop") is None
    viewer.page.click(strong[1])
    assert viewer.get_texts(".jm-rank .jm-link") == ["hop 1", "hop 0", "hop 2"]
    assert viewer.get_texts(".jm-rank .jm-values")[0] == "0.7"
    viewer.page.click(".jm-rank .jm-link >> nth=1")
    assert viewer.evaluate("[v.state.hop, v.state.pinnedWord]") == [0, document.words.index("훌륭하다")]
    # Other views have heads instead of hops.
    viewer.press("2")
    viewer.wait_until_idle()
    assert "3 × 16 tokens" in viewer.page.inner_text(".jm-subtitle")
    viewer.press("1")
    assert viewer.evaluate("[v.state.view, v.state.hop]") == ["document", 0]


def test_keys_move_between_words_and_pin(open_served: OpenPage) -> None:
    document = build_hierarchical_document()
    viewer = open_served(ViewerData.from_document(document))
    viewer.press("Shift+ArrowRight", "Shift+ArrowRight", "Shift+ArrowRight", "Shift+ArrowLeft")
    assert viewer.page.locator(".jm-cursor").all_text_contents() == ["saw"]
    assert viewer.page.inner_text("[aria-live]").startswith("saw: 0.0143, rank ")
    assert viewer.page.inner_text(".jm-tooltip").startswith("saw")
    viewer.press("Enter")
    assert viewer.get_texts(".jm-panel-title")[0].split() == ["saw", "1"]
    viewer.press("ArrowDown", "ArrowDown")
    assert viewer.page.get_attribute(".jm-current-sentence", "data-sentence") == "1"
    assert viewer.page.inner_text("[aria-live]").startswith("Sentence 2, weight 0.3: The plot is thin")
    viewer.press("n")
    assert viewer.page.get_attribute(".jm-current-sentence", "data-sentence") == "2"
    viewer.press("n", "n")
    assert viewer.page.get_attribute(".jm-current-sentence", "data-sentence") == "0"
    viewer.press("p")
    assert viewer.page.get_attribute(".jm-current-sentence", "data-sentence") == "1"
    assert "2 of 3 by weight" in viewer.page.inner_text(".jm-pager")
    viewer.press("?")
    assert "sentence by weight" in viewer.page.inner_text("dialog.jm-help")
    viewer.press("Escape")


# ---------------------------------------------------------------- long texts


def test_long_document_is_drawn_fast_and_navigated(open_served: OpenPage) -> None:
    document = build_long_document(num_hops=30)
    viewer = open_served(ViewerData.from_document(document))
    assert "2,000 words" in viewer.page.inner_text(".jm-subtitle")
    durations = viewer.page.evaluate(
        """async () => {
            const view = document.querySelector("#viewer").jumok.views.document, { data } = view;
            const begin = performance.now();
            view.data = null;
            const show = (hop) => view.show({
                item: { document: data }, state: { hop, pinnedWord: null, weightScope: "document" } });
            show(null);
            view.textBox.offsetHeight;
            const drawn = performance.now() - begin;
            show(3);
            view.textBox.offsetHeight;
            return [drawn, performance.now() - begin - drawn]; }"""
    )
    assert max(durations) < 1000  # milliseconds; about 50 on an idle machine
    assert not is_visible(viewer, 99)
    viewer.press("n")
    viewer.wait_until(lambda: is_visible(viewer, 99))
    viewer.page.click('[aria-label="Next sentence by weight (n)"]')
    viewer.wait_until(lambda: is_visible(viewer, 98))
    viewer.press("Home")
    viewer.wait_until(lambda: is_visible(viewer, 0))
    viewer.press("PageDown")
    viewer.wait_until(lambda: not is_visible(viewer, 0))
    viewer.press("End")
    viewer.wait_until(lambda: is_visible(viewer, 99))
    last = viewer.page.locator('.jm-sentence[data-sentence="99"] .jm-document-word', has_text="peak")
    viewer.wait_until(lambda: last.count() == 1)
    assert (
        hover(viewer, '.jm-sentence[data-sentence="99"] .jm-document-word:text("peak")')[2] == "rank 1 of 2,000 words"
    )


def test_minimap_scrolls_and_shows_weights(open_served: OpenPage) -> None:
    viewer = open_served(ViewerData.from_document(build_long_document()))
    box = viewer.page.locator(".jm-minimap").bounding_box()
    viewer.page.mouse.click(box["x"] + 6, box["y"] + 0.505 * box["height"])
    viewer.wait_until(lambda: is_visible(viewer, 50))
    script = """(() => { const c = document.querySelector(".jm-minimap"), g = c.getContext("2d");
        const dark = (part) => { let most = 0; for (let y = 0; y < 12; y += 1) {
            const d = g.getImageData(c.width / 2, Math.floor(part * c.height) - 6 + y, 1, 1).data;
            most = Math.max(most, 765 - d[0] - d[1] - d[2]); } return most; };
        return [dark(0.1), dark(0.3), dark(0.97)]; })()"""
    first, second, third = viewer.evaluate(script)
    assert first < second < third  # later peaks have higher weights


def test_very_long_document_is_complete(open_saved: OpenPage) -> None:
    document = build_long_document(5000)
    viewer = open_saved(ViewerData.from_document(document))
    assert viewer.page.locator(".jm-sentence").count() == 5000
    assert viewer.evaluate("v.views.document.textBox.textContent.match(/peak/g).length") == 5000
    viewer.press("n")
    viewer.wait_until(lambda: is_visible(viewer, 4999))
    viewer.wait_until(lambda: viewer.page.locator('.jm-sentence[data-sentence="4999"] .jm-document-word').count() == 20)
    assert viewer.page.locator(".jm-document-word").count() < 4000  # distant sentences are plain text
    for part, sentence in ((0.25, 1250), (0.8, 4000)):
        box = viewer.page.locator(".jm-minimap").bounding_box()
        viewer.page.mouse.click(box["x"] + 6, box["y"] + part * box["height"] + 0.5)
        viewer.wait_until(lambda sentence=sentence: any(is_visible(viewer, sentence + n) for n in range(-16, 17)))


def test_single_long_sentence_has_no_bar(open_served: OpenPage) -> None:
    document = build_long_document(1, 4001)
    viewer = open_served(ViewerData.from_document(document))
    assert not viewer.page.is_visible(".jm-sentence-weight")
    assert not viewer.page.is_visible(".jm-pager")
    assert not viewer.page.is_visible('[data-scope="sentence"]')
    assert viewer.page.locator(".jm-sentence").count() == 3  # split into blocks of 2,000 words
    assert " ".join(viewer.get_texts(".jm-line")) == document.text
    viewer.press("End")
    viewer.wait_until(lambda: viewer.page.locator('.jm-document-word[data-word="4000"]').count() == 1)


# ---------------------------------------------------------------- hosts and texts


def test_words_are_never_parsed_as_html(open_saved: OpenPage) -> None:
    count = len(MIXED)
    document = AttendedDocument(
        MIXED, ("", *(" ",) * (count - 1)), (0, 2, count), np.full((2, count), 1 / count),
        class_probabilities=(("<img src=x onerror=alert(2)>", 0.5), ("b", 0.5)), label="<b>c</b>",
    )  # fmt: skip
    viewer = open_saved(ViewerData.from_document(document, title="<script>alert(3)</script>"))
    assert viewer.get_texts(".jm-document-word") == [*MIXED[:-1], "a�b"]
    assert "<img src=x onerror=alert(2)>" in viewer.page.inner_text(".jm-prediction-row")
    assert hover(viewer, ".jm-document-word >> nth=0")[0] == MIXED[0]
    viewer.page.click(".jm-document-word >> nth=3")
    assert viewer.get_texts(".jm-panel-title")[0].split()[0] == "<b>bold</b>"
    assert viewer.page.locator(".jumok :is(b, i, img, script)").count() == 0


def test_right_to_left_sentences_start_at_the_right(open_served: OpenPage) -> None:
    document = AttendedDocument(("שלום", "עולם", "one", "two"), ("", " ", " ", " "), (0, 2, 4), np.full((1, 4), 0.25))
    viewer = open_served(ViewerData.from_document(document))
    left = [viewer.page.locator(f'.jm-document-word[data-word="{n}"]').bounding_box()["x"] for n in range(4)]
    assert left[0] > left[1]
    assert left[2] < left[3]


def test_document_opens_from_a_file_offline(open_saved: OpenPage) -> None:
    viewer = open_saved(ViewerData.from_document(build_multi_hop_document(), title="영화평"))
    assert viewer.get_texts(".jm-line") == [sentence.strip() for sentence in KOREAN]
    viewer.press("ArrowLeft")
    assert hover(viewer, locate_word(build_multi_hop_document(), "다시"))[:2] == ["다시", "0.7"]
    for key in "2345":
        viewer.press(key)
        viewer.wait_until_idle()


def test_two_documents_are_compared(open_served: OpenPage) -> None:
    after = replace(build_hierarchical_document(), class_probabilities=(("negative", 0.75), ("positive", 0.25)))
    viewer = open_served([ViewerData.from_document(build_hierarchical_document()), ViewerData.from_document(after)])
    assert viewer.get_texts(".jm-comparisons button") == ["Before", "After"]
    assert "✓ correct" in viewer.page.inner_text(".jm-prediction-row")
    viewer.press("c")
    assert "✗ wrong, label: positive (25.0 %)" in viewer.page.inner_text(".jm-prediction-row")


@pytest.mark.parametrize("width", [360, 390, 768, 1400])
def test_page_fits_the_screen(open_served: OpenPage, width: int) -> None:
    viewer = open_served(
        ViewerData.from_document(build_long_document(num_hops=12)), viewport={"width": width, "height": 760}
    )
    assert viewer.evaluate("document.documentElement.scrollWidth") <= width
    assert viewer.page.locator(".jm-line >> nth=0").bounding_box()["width"] > min(500, 0.7 * width)
    viewer.page.click(".jm-document-word >> nth=3")
    assert viewer.evaluate("document.documentElement.scrollWidth") <= width
    assert viewer.page.locator(".jm-line >> nth=0").bounding_box()["width"] > 250


def test_controls_have_accessible_names(open_served: OpenPage) -> None:
    viewer = open_served(ViewerData.from_document(build_long_document(num_hops=2)))
    viewer.page.click(".jm-document-word >> nth=3")
    assert viewer.find_unnamed_controls() == []


def test_notebook_replaces_the_manifest(new_page: OpenPage) -> None:
    documents = build_hierarchical_document(), build_multi_hop_document()
    first, second = (build_manifest([ViewerData.from_document(document)]) for document in documents)
    viewer = new_page().open_widget(first, lambda content: ({"id": content["id"], "error": "not needed"}, []))
    assert viewer.get_texts(".jm-line")[0] == REVIEW[0]
    viewer.page.click(locate_word(documents[0], "wonderful"))
    viewer.page.evaluate("(next) => window.changeManifest(next)", second)
    assert viewer.get_texts(".jm-line")[0] == KOREAN[0]
    assert not viewer.page.is_visible(".jm-panel")
