"""The document view in a real browser: what it shows, says and does, at any length."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.look.viewer import assets
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.viewer_data import ViewerData, build_manifest

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_documents import KOREAN, REVIEW, hierarchical, long, several_hops

Show = Callable[..., Any]
MIXED = ("<script>alert(1)</script>", "שלום", "👩‍👩‍👧‍👦", "<b>bold</b>", "日本語", "a\u202eb")


def scene(document: AttendedDocument, title: str = "") -> ViewerData:
    return ViewerData.from_document(document, title=title)


def at(document: AttendedDocument, word: str) -> str:
    return f'.jm-document-word[data-word="{document.words.index(word)}"]'


def tint(shown: Any, selector: str) -> int:
    """How dark it is behind a word."""
    colour = shown.page.locator(selector).evaluate("e => getComputedStyle(e).backgroundColor")
    red, green, blue, *alpha = (float(part) for part in colour[colour.index("(") + 1 : -1].split(","))
    return 0 if alpha == [0.0] else round(765 - red - green - blue)


def tip(shown: Any, selector: str) -> list[str]:
    shown.page.hover(selector)
    shown.page.wait_for_selector(".jm-tooltip:not([hidden])")
    return str(shown.page.inner_text(".jm-tooltip")).split("\n")


def in_sight(shown: Any, sentence: int) -> bool:
    script = """(() => { const box = v.views.document.textBox.getBoundingClientRect();
        const b = document.querySelector(`.jm-sentence[data-sentence="${given[0]}"]`).getBoundingClientRect();
        return b.top >= box.top - 1 && b.top < box.bottom - 20; })()"""
    return bool(shown.ask(script, sentence))


# ----------------------------------------------------------------------------------------- what is seen


def test_it_opens_with_the_text_as_it_was_written(served: Show) -> None:
    document = hierarchical()
    shown = served(scene(document, "A rainy Sunday"))
    assert shown.text(".jm-tabs [role=tab]") == ["Document", "Map", "Arcs", "Text", "Heads"]
    assert shown.page.locator('[role=tab][aria-selected="true"]').inner_text() == "Document"
    assert shown.text(".jm-line") == [sentence.strip() for sentence in REVIEW]
    assert shown.page.locator(".jm-gap").count() == 1  # the empty line before the third
    two = shown.page.locator(".jm-line >> nth=1").bounding_box()["height"]
    assert two > 1.8 * shown.page.locator(".jm-line >> nth=0").bounding_box()["height"]  # its own line break
    assert shown.page.inner_text(".jm-subtitle").split("·")[0].strip() == f"{len(document.words)} words"
    assert not shown.page.is_visible(".jm-head-step")  # one hop: nothing to choose


def test_the_strongest_word_is_the_darkest_and_the_legend_says_so(served: Show) -> None:
    document = hierarchical()
    shown = served(scene(document))
    strong = [tint(shown, at(document, word)) for word in ("wonderful", "drags", "rainy", "lighthouse")]
    assert strong == sorted(strong, reverse=True)
    assert strong[0] > 250
    assert strong[3] < 80
    assert "relative to the highest weight, “wonderful”" in shown.page.inner_text(".jm-legend")
    label = shown.page.get_attribute(".jm-legend-bar", "aria-label")
    assert label.endswith("from 0 to 0.25")


def test_bars_are_as_long_as_sentences_count_and_say_it(served: Show) -> None:
    shown = served(scene(hierarchical()))
    bars = [bar.bounding_box()["width"] for bar in shown.page.locator(".jm-level > span").all()]
    assert bars[2] == pytest.approx(52 - 1.5, abs=2)
    assert [bar / bars[2] for bar in bars] == pytest.approx([0.4, 0.6, 1], abs=0.02)
    labels = [gauge.get_attribute("aria-label") for gauge in shown.page.locator(".jm-sentence-weight").all()]
    assert labels == [
        "Sentence 1: weight 0.2, rank 3 of 3",
        "Sentence 2: weight 0.3, rank 2 of 3",
        "Sentence 3: weight 0.5, rank 1 of 3",
    ]
    assert tip(shown, ".jm-sentence-weight >> nth=1") == [
        "Sentence 2",
        "0.3",
        "rank 2 of 3 sentences",
        "10 words",
    ]


def test_what_was_said_and_whether_it_is_right(served: Show) -> None:
    def verdict(document: AttendedDocument) -> str:
        shown = served(scene(document))
        return " ".join(shown.page.locator(".jm-prediction-row").inner_text().split())

    document = hierarchical()
    assert verdict(document) == "positive 87.5 % negative 12.5 % ✓ correct"
    assert verdict(several_hops()) == "부정 60.0 % 긍정 40.0 % ✗ wrong, label: 긍정 (40.0 %)"
    sure = (("yes", 0.99999), ("no", 0.00001))
    assert verdict(replace(document, class_probabilities=sure, label=None)) == "yes > 99.9 % no < 0.1 %"
    assert verdict(replace(document, class_probabilities=(), label="<i>it</i>")) == "Label: <i>it</i>"
    many = tuple((f"{n} stars", 0.125) for n in range(8))
    assert "and 4 more" in verdict(replace(document, class_probabilities=many, label=None))


def test_within_its_sentence_each_has_a_darkest_word(served: Show) -> None:
    document = hierarchical()
    shown = served(scene(document))
    shown.page.click('[data-scope="sentence"]')
    strong = {tint(shown, at(document, word)) for word in ("wonderful", "drags", "rainy")}
    assert len(strong) == 1
    assert min(strong) > 250
    assert "highest weight in the sentence" in shown.page.inner_text(".jm-legend")
    assert tip(shown, at(document, "drags"))[:3] == ["drags", "0.5", "of its sentence, 0.15 of the document"]
    shown.press("s")
    assert tint(shown, at(document, "rainy")) < min(strong) - 50
    assert shown.page.get_attribute('[data-scope="document"]', "aria-pressed") == "true"


def test_curves_and_colours_can_be_chosen(served: Show) -> None:
    document = hierarchical()
    shown = served(scene(document))
    pale = tint(shown, at(document, "lighthouse"))
    shown.page.select_option('[aria-label="Curve of the scale"]', "root")
    assert tint(shown, at(document, "lighthouse")) > pale + 30
    shown.page.select_option('[aria-label="Curve of the scale"]', "log")
    assert tint(shown, at(document, "lighthouse")) > pale + 80
    shown.page.select_option('[aria-label="Colours"]', "grey")
    colour = shown.page.locator(at(document, "wonderful")).evaluate("e => getComputedStyle(e).backgroundColor")
    assert len(set(colour[4:-1].split(", "))) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_in_light_and_dark(served: Show, scheme: str) -> None:
    document = hierarchical()
    shown = served(scene(document), color_scheme=scheme)
    assert shown.ask("v.layout.root.dataset.theme") == scheme
    script = """[...document.querySelectorAll(".jm-document-word")].map((e) => {
        const plain = getComputedStyle(document.querySelector(".jumok")).backgroundColor;
        const own = getComputedStyle(e), parts = (c) => c.match(/[\\d.]+/g).map(Number);
        const back = parts(own.backgroundColor);
        return [parts(own.color), back.length === 4 && back[3] === 0 ? parts(plain) : back]; })"""
    for ink, ground in shown.ask(script):
        assert contrast(ink[:3], ground[:3]) > 4
    shown.press("t")
    assert shown.ask("v.layout.root.dataset.theme") != scheme


def contrast(one: list[float], two: list[float]) -> float:
    """WCAG's, of two sRGB colours."""

    def light(colour: list[float]) -> float:
        x = np.array(colour) / 255
        linear = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05

    low, high = sorted((light(one), light(two)))
    return high / low


# ----------------------------------------------------------------------------------------- hands


def test_hovering_tells_weight_rank_and_sentence(served: Show) -> None:
    document = hierarchical()
    shown = served(scene(document))
    words = len(document.words)
    assert tip(shown, at(document, "drags")) == [
        "drags", "0.15", f"rank 2 of {words} words", "sentence 2: 0.3, rank 2 of 3",
    ]  # fmt: skip
    assert tip(shown, at(document, "lighthouse"))[2] == f"rank 4 of {words} words"  # as all of its sentence
    shown.page.mouse.move(2, 2)
    shown.page.wait_for_selector(".jm-tooltip", state="hidden")


def test_clicking_pins_a_word_and_shows_what_else_counts(served: Show) -> None:
    document = hierarchical()
    shown = served(scene(document))
    shown.page.click(at(document, "thin"))
    assert shown.text(".jm-panel-title")[0].split() == ["thin", str(document.words.index("thin"))]
    assert shown.text(".jm-rank .jm-key")[0] == "drags"
    assert len(shown.text(".jm-rank li")) == 10  # its sentence
    assert "Sentence 2: 0.3, rank 2 of 3" in shown.page.inner_text(".jm-panel")
    assert shown.page.locator(".jm-document-word.jm-is-pinned").all_text_contents() == ["thin"]
    shown.page.click(at(document, "wonderful"))
    assert shown.page.locator(".jm-document-word.jm-is-pinned").all_text_contents() == ["wonderful"]
    shown.press("Escape")
    assert not shown.page.is_visible(".jm-panel")
    shown.page.click(at(document, "thin"))
    shown.page.click(at(document, "thin"))  # once more: unpinned
    assert not shown.page.is_visible(".jm-panel")
    shown.page.click(at(document, "thin"))
    shown.page.click('[aria-label="Unpin (Esc)"]')
    assert shown.page.locator(".jm-document-word.jm-is-pinned").count() == 0


def test_hops_are_chosen_by_mouse_and_keyboard(served: Show) -> None:
    document = several_hops()
    shown = served(scene(document))
    assert shown.text(".jm-chips [role=radio]") == ["0", "1", "2", "mean"]
    assert shown.ask("v.state.hop") is None
    assert "mean of 3 hops" in shown.page.inner_text(".jm-subtitle")
    strong = {hop: at(document, word) for hop, word in enumerate(("일요일에", "훌륭하다", "다시"))}
    assert len({tint(shown, selector) for selector in strong.values()}) == 1  # a third of each
    shown.page.click('[data-hop="1"]')
    assert [tint(shown, strong[hop]) > 250 for hop in range(3)] == [False, True, False]
    assert "“훌륭하다”" in shown.page.inner_text(".jm-legend")
    shown.press("ArrowRight")
    assert [tint(shown, strong[hop]) > 250 for hop in range(3)] == [False, False, True]
    assert shown.page.inner_text("[aria-live]") == "Hop 2"
    assert shown.page.locator('[role=radio][aria-checked="true"]').inner_text() == "2"
    shown.press("ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert shown.ask("v.state.hop") == 0
    shown.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight")
    assert shown.ask("v.state.hop") is None
    shown.page.click(strong[1])
    assert shown.text(".jm-rank .jm-link") == ["hop 1", "hop 0", "hop 2"]
    assert shown.text(".jm-rank .jm-values")[0] == "0.7"
    shown.page.click(".jm-rank .jm-link >> nth=1")
    assert shown.ask("[v.state.hop, v.state.pinnedWord]") == [0, document.words.index("훌륭하다")]
    # Other views have heads, as ever.
    shown.press("2")
    shown.rest()
    assert "3 × 16 tokens" in shown.page.inner_text(".jm-subtitle")
    shown.press("1")
    assert shown.ask("[v.state.view, v.state.hop]") == ["document", 0]


def test_keys_go_from_word_to_word_and_pin(served: Show) -> None:
    document = hierarchical()
    shown = served(scene(document))
    shown.press("Shift+ArrowRight", "Shift+ArrowRight", "Shift+ArrowRight", "Shift+ArrowLeft")
    assert shown.page.locator(".jm-cursor").all_text_contents() == ["saw"]
    assert shown.page.inner_text("[aria-live]").startswith("saw: 0.0143, rank ")
    assert shown.page.inner_text(".jm-tooltip").startswith("saw")
    shown.press("Enter")
    assert shown.text(".jm-panel-title")[0].split() == ["saw", "1"]
    shown.press("ArrowDown", "ArrowDown")
    assert shown.page.get_attribute(".jm-current-sentence", "data-sentence") == "1"
    assert shown.page.inner_text("[aria-live]").startswith("Sentence 2, weight 0.3: The plot is thin")
    shown.press("n")
    assert shown.page.get_attribute(".jm-current-sentence", "data-sentence") == "2"
    shown.press("n", "n")
    assert shown.page.get_attribute(".jm-current-sentence", "data-sentence") == "0"
    shown.press("p")
    assert shown.page.get_attribute(".jm-current-sentence", "data-sentence") == "1"
    assert "2 of 3 by weight" in shown.page.inner_text(".jm-pager")
    shown.press("?")
    assert "sentence by weight" in shown.page.inner_text("dialog.jm-help")
    shown.press("Escape")


# ----------------------------------------------------------------------------------------- long texts


def test_two_thousand_words_are_drawn_fast_and_jumped_through(served: Show) -> None:
    document = long(hops=30)
    shown = served(scene(document))
    assert "2,000 words" in shown.page.inner_text(".jm-subtitle")
    took = shown.page.evaluate(
        """async () => {
            const view = document.querySelector("#viewer").jumok.views.document, { data } = view;
            const begin = performance.now();
            view.data = null;
            view.show(data, { hop: null, pinnedWord: null, weightScope: "document" });
            view.textBox.offsetHeight;
            const drawn = performance.now() - begin;
            view.show(data, { hop: 3, pinnedWord: null, weightScope: "document" });
            view.textBox.offsetHeight;
            return [drawn, performance.now() - begin - drawn]; }"""
    )
    assert max(took) < 1000  # some 50 ms, on a machine with nothing else to do
    assert not in_sight(shown, 99)
    shown.press("n")
    shown.until(lambda: in_sight(shown, 99))
    shown.page.click('[aria-label="Next sentence by weight (n)"]')
    shown.until(lambda: in_sight(shown, 98))
    shown.press("Home")
    shown.until(lambda: in_sight(shown, 0))
    shown.press("PageDown")
    shown.until(lambda: not in_sight(shown, 0))
    shown.press("End")
    shown.until(lambda: in_sight(shown, 99))
    last = shown.page.locator('.jm-sentence[data-sentence="99"] .jm-document-word', has_text="peak")
    shown.until(lambda: last.count() == 1)
    assert tip(shown, '.jm-sentence[data-sentence="99"] .jm-document-word:text("peak")')[2] == "rank 1 of 2,000 words"


def test_the_strip_beside_it_goes_anywhere_and_shows_the_weight(served: Show) -> None:
    shown = served(scene(long()))
    box = shown.page.locator(".jm-minimap").bounding_box()
    shown.page.mouse.click(box["x"] + 6, box["y"] + 0.505 * box["height"])
    shown.until(lambda: in_sight(shown, 50))
    script = """(() => { const c = document.querySelector(".jm-minimap"), g = c.getContext("2d");
        const dark = (part) => { let most = 0; for (let y = 0; y < 12; y += 1) {
            const d = g.getImageData(c.width / 2, Math.floor(part * c.height) - 6 + y, 1, 1).data;
            most = Math.max(most, 765 - d[0] - d[1] - d[2]); } return most; };
        return [dark(0.1), dark(0.3), dark(0.97)]; })()"""
    first, second, third = shown.ask(script)
    assert first < second < third  # later peaks count more


def test_nothing_is_lost_of_five_thousand_sentences(saved: Show) -> None:
    document = long(5000)
    shown = saved(scene(document))
    assert shown.page.locator(".jm-sentence").count() == 5000
    assert shown.ask("v.views.document.textBox.textContent.match(/peak/g).length") == 5000
    shown.press("n")
    shown.until(lambda: in_sight(shown, 4999))
    shown.until(lambda: shown.page.locator('.jm-sentence[data-sentence="4999"] .jm-document-word').count() == 20)
    assert shown.page.locator(".jm-document-word").count() < 4000  # what is far away is plain text
    for part, sentence in ((0.25, 1250), (0.8, 4000)):
        box = shown.page.locator(".jm-minimap").bounding_box()
        shown.page.mouse.click(box["x"] + 6, box["y"] + part * box["height"] + 0.5)
        shown.until(lambda sentence=sentence: any(in_sight(shown, sentence + n) for n in range(-16, 17)))


def test_one_sentence_has_no_bar_and_may_be_a_book(served: Show) -> None:
    document = long(1, 4001)
    shown = served(scene(document))
    assert not shown.page.is_visible(".jm-sentence-weight")
    assert not shown.page.is_visible(".jm-pager")
    assert not shown.page.is_visible('[data-scope="sentence"]')
    assert shown.page.locator(".jm-sentence").count() == 3  # cut into pieces of 2,000
    assert " ".join(shown.text(".jm-line")) == document.text
    shown.press("End")
    shown.until(lambda: shown.page.locator('.jm-document-word[data-word="4000"]').count() == 1)


# ----------------------------------------------------------------------------------------- hosts and texts


def test_words_are_text_whatever_they_hold(saved: Show) -> None:
    count = len(MIXED)
    document = AttendedDocument(
        MIXED, ("", *(" ",) * (count - 1)), (0, 2, count), np.full((2, count), 1 / count),
        class_probabilities=(("<img src=x onerror=alert(2)>", 0.5), ("b", 0.5)), label="<b>c</b>",
    )  # fmt: skip
    shown = saved(scene(document, "<script>alert(3)</script>"))
    assert shown.text(".jm-document-word") == [*MIXED[:-1], "a�b"]
    assert "<img src=x onerror=alert(2)>" in shown.page.inner_text(".jm-prediction-row")
    assert tip(shown, ".jm-document-word >> nth=0")[0] == MIXED[0]
    shown.page.click(".jm-document-word >> nth=3")
    assert shown.text(".jm-panel-title")[0].split()[0] == "<b>bold</b>"
    assert shown.page.locator(".jumok :is(b, i, img, script)").count() == 0


def test_what_is_read_from_right_to_left_begins_at_the_right(served: Show) -> None:
    document = AttendedDocument(("שלום", "עולם", "one", "two"), ("", " ", " ", " "), (0, 2, 4), np.full((1, 4), 0.25))
    shown = served(scene(document))
    left = [shown.page.locator(f'.jm-document-word[data-word="{n}"]').bounding_box()["x"] for n in range(4)]
    assert left[0] > left[1]
    assert left[2] < left[3]


def test_it_is_whole_in_a_file_without_a_network(saved: Show) -> None:
    shown = saved(scene(several_hops(), "영화평"))
    assert shown.text(".jm-line") == [sentence.strip() for sentence in KOREAN]
    shown.press("ArrowLeft")
    assert tip(shown, at(several_hops(), "다시"))[:2] == ["다시", "0.7"]
    for key in "2345":
        shown.press(key)
        shown.rest()


def test_before_and_after(served: Show) -> None:
    after = replace(hierarchical(), class_probabilities=(("negative", 0.75), ("positive", 0.25)))
    shown = served([scene(hierarchical()), scene(after)])
    assert shown.text(".jm-comparisons button") == ["Before", "After"]
    assert "✓ correct" in shown.page.inner_text(".jm-prediction-row")
    shown.press("c")
    assert "✗ wrong, label: positive (25.0 %)" in shown.page.inner_text(".jm-prediction-row")


@pytest.mark.parametrize("width", [360, 390, 768, 1400])
def test_it_fits_the_screen(served: Show, width: int) -> None:
    shown = served(scene(long(hops=12)), viewport={"width": width, "height": 760})
    assert shown.ask("document.documentElement.scrollWidth") <= width
    assert shown.page.locator(".jm-line >> nth=0").bounding_box()["width"] > min(500, 0.7 * width)
    shown.page.click(".jm-document-word >> nth=3")
    assert shown.ask("document.documentElement.scrollWidth") <= width
    assert shown.page.locator(".jm-line >> nth=0").bounding_box()["width"] > 250


def test_everything_one_can_press_has_a_name(served: Show) -> None:
    shown = served(scene(long(hops=2)))
    shown.page.click(".jm-document-word >> nth=3")
    nameless = """[...document.querySelectorAll("button, select, input, [role=img], [tabindex='0']")]
        .filter((e) => e.checkVisibility() && !e.closest(".jm-sentence"))
        .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.closest("label")))
        .map((e) => e.outerHTML)"""
    assert shown.page.evaluate(nameless) == []


def test_a_notebook_shows_it_and_takes_another(new_page: Show) -> None:
    """The module as anywidget loads it; its model's manifest changes."""
    shown = new_page()
    page = shown.page
    page.set_content('<body data-jp-theme-light="true"><div id="viewer" style="width: 900px"></div></body>')
    page.add_style_tag(content=assets.build_style_sheet())
    first, second = (build_manifest([scene(document)]) for document in (hierarchical(), several_hops()))
    page.evaluate(
        """async ([source, first]) => {
            const heard = {}, held = { manifest: first };
            const model = { get: (name) => held[name], on: (name, f) => (heard[name] = f), off: () => {},
                            send: () => {} };
            window.change = (next) => { held.manifest = next; heard["change:manifest"](); };
            const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
            window.cleanup = module.default.render({ model, el: document.querySelector("#viewer") });
        }""",
        [assets.build_script(), json.loads(json.dumps(first))],
    )
    page.wait_for_selector(".jm-document-word")
    assert shown.text(".jm-line")[0] == REVIEW[0]
    page.click(at(hierarchical(), "wonderful"))
    page.evaluate("(next) => window.change(next)", second)
    assert shown.text(".jm-line")[0] == KOREAN[0]
    assert not page.is_visible(".jm-panel")
    page.evaluate("window.cleanup()")
    assert page.locator("#viewer *").count() == 0
