"""Errors as a page and for a terminal: nothing runs, nothing is fetched, nothing is lost."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.error_page import (
    MisclassifiedText,
    find_top_words,
    format_for_terminal,
    render_error_page,
)

EVIL = "<script>alert(1)</script>"


def document(words: list[str], weights: Any) -> AttendedDocument:
    before = ("", *[" "] * (len(words) - 1))
    return AttendedDocument(tuple(words), before, (0, len(words)), np.atleast_2d(np.asarray(weights, np.float32)))


def mistake(words: list[str], weights: Any, **more: Any) -> MisclassifiedText:
    told: dict[str, Any] = {"said": "good", "wanted": "bad", "probability": 0.98765} | more
    return MisclassifiedText(
        " ".join(words), None, told["said"], told["wanted"], told["probability"], document(words, weights)
    )


def marked(text: str) -> dict[str, int]:
    return {word: int(level) for level, word in re.findall(r'<mark class="w(\d)">(.*?)</mark>', text)}


def test_shades_follow_the_weights() -> None:
    words = ["a", "sad", "long", "film", "b", "c", "d", "e"]
    shares = [0.02, 0.5, 0.25, 0.19, 0.01, 0.01, 0.01, 0.01]
    text = render_error_page([mistake(words, shares)], title="Errors", subtitle="of 7")
    assert marked(text) == {"sad": 8, "long": 4, "film": 3}
    assert "predicted <b" in text
    assert "0.988" in text
    assert "sad</bdi> 0.500 · <bdi>long</bdi> 0.250" in text


def test_of_hops_the_mean_is_shown() -> None:
    one = document(["a", "b", "c"], [[1, 0, 0], [0, 0.5, 0.5]])
    assert find_top_words(one, 2) == [("a", 0.5), ("b", 0.25)]
    text = render_error_page([mistake(["a", "b", "c"], [[1, 0, 0], [0, 0.5, 0.5]])], title="", subtitle="")
    assert marked(text) == {"a": 4, "b": 2, "c": 2}


def test_where_no_word_stands_out_none_is_dark() -> None:
    text = render_error_page([mistake([f"w{n}" for n in range(20)], [0.05] * 20)], title="", subtitle="")
    assert set(marked(text).values()) == {2}


def test_whatever_a_text_holds_is_text() -> None:
    names = {"said": EVIL, "wanted": '"><b>'}
    odd = [EVIL, "a&b", "\x00\x1b[31m", "</mark>", '"']
    found = render_error_page(
        [mistake(odd, [0.2] * 5, **names), MisclassifiedText(EVIL, EVIL, "x", "y", 0.5)],
        title=EVIL,
        subtitle=EVIL,
    )
    assert "<script" not in found
    assert "\x00" not in found
    assert "\x1b" not in found

    class Text(HTMLParser):
        seen = ""

        def handle_data(self, data: str) -> None:
            self.seen += data

    parser = Text()
    parser.feed(found)
    # The title twice, what it is about, what was said, a word in its text and below it, two texts.
    assert parser.seen.count(EVIL) == 8
    shown = format_for_terminal(mistake(["[bold]x[/bold]", "b"], [0.5, 0.5]), use_colours=True).plain
    assert "[bold]x[/bold] b" in shown
    for one in (
        mistake(odd, [0.2] * 5, said="\x1b]0;x"),
        MisclassifiedText("\x1b[2J", None, "\x1b", "b", 0.5),
    ):
        assert "\x1b" not in format_for_terminal(one, use_colours=True).plain


def test_a_long_text_is_shown_where_it_was_looked_at() -> None:
    words = [f"w{n}" for n in range(5000)]
    weights = np.full(5000, 1e-5)
    weights[[700, 4000]] = 0.4
    plain = format_for_terminal(mistake(words, weights), use_colours=False).plain
    shown = plain.split("\n")[1]
    assert "w699 w700 w701" in shown
    assert "w3999 w4000 w4001" in shown
    assert " … " in shown
    assert shown.endswith(" …")
    assert len(shown.split()) < 70
    text = render_error_page([mistake(words, weights)], title="", subtitle="")
    assert marked(text) == {"w700": 8, "w4000": 8}
    assert len(text) < 30_000
    without = MisclassifiedText(" ".join(words), None, "a", "b", 0.5)
    assert len(format_for_terminal(without, use_colours=False).plain.split()) < 70


@pytest.mark.parametrize("weights", [[0.0], [1.0], [[0.3], [0.5]]])
def test_one_word(weights: Any) -> None:
    assert "film" in format_for_terminal(mistake(["film"], weights), use_colours=True).plain
    assert "film" in render_error_page([mistake(["film"], weights)], title="", subtitle="")


def test_colours_are_for_terminals() -> None:
    one = mistake(["a", "sad", "film"], [0.02, 0.76, 0.25])
    styled = format_for_terminal(one, use_colours=True)
    plain = format_for_terminal(one, use_colours=False)
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


def test_in_a_browser(browser: Any, tmp_path: Path) -> None:
    words = ["the", "sad", EVIL, "film", "영화는"]
    shown = render_error_page([mistake(words, [0.02, 0.96, 0.01, 0.005, 0.005])], title="Errors", subtitle="1 of 2")
    (tmp_path / "errors.html").write_text(shown, encoding="utf-8")
    backgrounds = {}
    for scheme in ("light", "dark"):
        opened = browser.new_page(color_scheme=scheme, viewport={"width": 360, "height": 700})
        heard: list[str] = []
        opened.on("console", lambda message, heard=heard: heard.append(message.text))
        opened.on("request", lambda request, heard=heard: heard.append(request.url))
        opened.goto(f"file://{tmp_path / 'errors.html'}")
        assert heard == [f"file://{tmp_path / 'errors.html'}"]  # and nothing else
        assert opened.evaluate("document.documentElement.scrollWidth") <= 360
        assert EVIL in opened.inner_text("li p")
        colour = "e => getComputedStyle(e).backgroundColor"
        backgrounds[scheme] = (
            opened.eval_on_selector("body", colour),
            opened.eval_on_selector("mark.w8", colour),
        )
        opened.close()
    assert backgrounds["light"] == ("rgb(255, 255, 255)", "rgb(21, 34, 79)")
    assert backgrounds["dark"] == ("rgb(21, 24, 29)", "rgb(190, 225, 250)")
