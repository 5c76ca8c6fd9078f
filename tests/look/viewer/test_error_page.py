"""Tests of misclassified texts as a page and for a terminal."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.error_page import MisclassifiedText, find_top_words, format_for_terminal, render_error_page

SCRIPT = "<script>alert(1)</script>"


def build_document(words: list[str], weights: Any) -> AttendedDocument:
    separators = ("", *[" "] * (len(words) - 1))
    return AttendedDocument(tuple(words), separators, (0, len(words)), np.atleast_2d(np.asarray(weights, np.float32)))


def build_example(words: list[str], weights: Any, prediction: str = "good", label: str = "bad") -> MisclassifiedText:
    document = build_document(words, weights)
    return MisclassifiedText(" ".join(words), None, prediction, label, 0.98765, document)


def find_shades(text: str) -> dict[str, int]:
    return {word: int(level) for level, word in re.findall(r'<mark class="w(\d)">(.*?)</mark>', text)}


def test_shades_are_proportional_to_weights() -> None:
    words = ["a", "sad", "long", "film", "b", "c", "d", "e"]
    shares = [0.02, 0.5, 0.25, 0.19, 0.01, 0.01, 0.01, 0.01]
    text = render_error_page([build_example(words, shares)], title="Errors", subtitle="of 7")
    assert find_shades(text) == {"sad": 8, "long": 4, "film": 3}
    assert "predicted <b" in text
    assert "0.988" in text
    assert "sad</bdi> 0.500 · <bdi>long</bdi> 0.250" in text


def test_mean_of_hops_is_shown() -> None:
    document = build_document(["a", "b", "c"], [[1, 0, 0], [0, 0.5, 0.5]])
    assert find_top_words(document, 2) == [("a", 0.5), ("b", 0.25)]
    text = render_error_page([build_example(["a", "b", "c"], [[1, 0, 0], [0, 0.5, 0.5]])], title="", subtitle="")
    assert find_shades(text) == {"a": 4, "b": 2, "c": 2}


def test_uniform_weights_are_pale() -> None:
    text = render_error_page([build_example([f"w{n}" for n in range(20)], [0.05] * 20)], title="", subtitle="")
    assert set(find_shades(text).values()) == {2}


def test_texts_are_escaped() -> None:
    words = [SCRIPT, "a&b", "\x00\x1b[31m", "</mark>", '"']
    page = render_error_page(
        [
            build_example(words, [0.2] * 5, prediction=SCRIPT, label='"><b>'),
            MisclassifiedText(SCRIPT, SCRIPT, "x", "y", 0.5),
        ],
        title=SCRIPT,
        subtitle=SCRIPT,
    )
    assert "<script" not in page
    assert "\x00" not in page
    assert "\x1b" not in page

    class TextParser(HTMLParser):
        text = ""

        def handle_data(self, data: str) -> None:
            self.text += data

    parser = TextParser()
    parser.feed(page)
    # The title twice, the subtitle, the prediction, a word in the text and below it, and two texts.
    assert parser.text.count(SCRIPT) == 8
    output = format_for_terminal(build_example(["[bold]x[/bold]", "b"], [0.5, 0.5]), use_colours=True).plain
    assert "[bold]x[/bold] b" in output
    for example in (
        build_example(words, [0.2] * 5, prediction="\x1b]0;x"),
        MisclassifiedText("\x1b[2J", None, "\x1b", "b", 0.5),
    ):
        assert "\x1b" not in format_for_terminal(example, use_colours=True).plain


def test_long_text_is_shortened_around_high_weights() -> None:
    words = [f"w{n}" for n in range(5000)]
    weights = np.full(5000, 1e-5)
    weights[[700, 4000]] = 0.4
    plain = format_for_terminal(build_example(words, weights), use_colours=False).plain
    text = plain.split("\n")[1]
    assert "w699 w700 w701" in text
    assert "w3999 w4000 w4001" in text
    assert " … " in text
    assert text.endswith(" …")
    assert len(text.split()) < 70
    page = render_error_page([build_example(words, weights)], title="", subtitle="")
    assert find_shades(page) == {"w700": 8, "w4000": 8}
    assert len(page) < 30_000
    example = MisclassifiedText(" ".join(words), None, "a", "b", 0.5)
    assert len(format_for_terminal(example, use_colours=False).plain.split()) < 70


@pytest.mark.parametrize("weights", [[0.0], [1.0], [[0.3], [0.5]]])
def test_single_word(weights: Any) -> None:
    assert "film" in format_for_terminal(build_example(["film"], weights), use_colours=True).plain
    assert "film" in render_error_page([build_example(["film"], weights)], title="", subtitle="")


def test_terminal_colours_are_optional() -> None:
    example = build_example(["a", "sad", "film"], [0.02, 0.76, 0.25])
    styled = format_for_terminal(example, use_colours=True)
    plain = format_for_terminal(example, use_colours=False)
    assert styled.plain == plain.plain
    assert plain.plain.split("\n") == [
        "predicted good (0.988), label bad",
        "a sad film",
        "highest weights: sad 0.760, film 0.250, a 0.020",
    ]
    styles = {styled.plain[span.start : span.end]: str(span.style) for span in styled.spans if span.style}
    assert styles["sad"] == "bold white on #d9480f"
    assert styles["film"] == "white on #74614f"
    assert "a" not in styles
    assert not any(str(span.style) for span in plain.spans)


def test_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    words = ["the", "sad", SCRIPT, "film", "영화는"]
    html = render_error_page(
        [build_example(words, [0.02, 0.96, 0.01, 0.005, 0.005])], title="Errors", subtitle="1 of 2"
    )
    (tmp_path / "errors.html").write_text(html, encoding="utf-8")
    backgrounds = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme, viewport={"width": 360, "height": 700})
        messages: list[str] = []
        page.on("console", lambda message, messages=messages: messages.append(message.text))
        page.on("request", lambda request, messages=messages: messages.append(request.url))
        page.goto(f"file://{tmp_path / 'errors.html'}")
        assert messages == [f"file://{tmp_path / 'errors.html'}"]  # no other request and no error
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert SCRIPT in page.inner_text("li p")
        colour = "e => getComputedStyle(e).backgroundColor"
        backgrounds[scheme] = (page.eval_on_selector("body", colour), page.eval_on_selector("mark.w8", colour))
        page.close()
    assert backgrounds["light"] == ("rgb(255, 255, 255)", "rgb(21, 34, 79)")
    assert backgrounds["dark"] == ("rgb(21, 24, 29)", "rgb(190, 225, 250)")
