"""Speech in a real browser: seen, pointed at, heard, said anew."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.errors import InputError
from jumok.look.viewer import assets
from jumok.look.viewer.synthesized_speech import SynthesizedSpeech
from jumok.look.viewer.viewer_data import ViewerData

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_speech import KOREAN, SECONDS, STEP, TOKENS, said

Show = Callable[..., Any]
WHOLE = 53 * STEP * SECONDS  # seconds of all steps
AT = "(v.views.speech.plot.getBoundingClientRect())"


def opened(shown: Any) -> Any:
    shown.page.wait_for_function("() => document.querySelector('#viewer').jumok.views.speech.box")
    return shown


def place(shown: Any, across: float, up: float) -> tuple[float, float]:
    """A place on the page: across the plots, and up in the alignment (above 1: in the spectrogram)."""
    script = f"""((b, o) => [b.left + o.x + given[0] * o.w, given[1] > 1
        ? b.top + o.mel.y + o.mel.h / 2 : b.top + o.y + o.h - given[1] * o.h])({AT}, v.views.speech.box)"""
    x, y = shown.ask(script, across, up)
    return x, y


def colours(shown: Any, x: list[float], y: list[float]) -> np.ndarray:
    """Of the alignment (0 to 1 each way) ``(y, x, 3)``."""
    script = """(() => { const { box: b, canvas } = v.views.speech, d = devicePixelRatio, [xs, ys] = given;
        const g = canvas.getContext("2d");
        return ys.map((y) => xs.map((x) => [...g.getImageData(
            Math.round((b.x + x * b.w) * d), Math.round((b.y + b.h - y * b.h) * d), 1, 1).data].slice(0, 3)));
        })()"""
    return np.array(shown.ask(script, x, y))


def test_it_opens_with_the_spectrogram_and_the_alignment_under_it(served: Show) -> None:
    # Twelve steps of two frames each speak four letters, three steps a letter.
    weights = np.repeat(np.eye(4, dtype=np.float32), 3, axis=0)
    sound = np.zeros((24, 8))
    sound[:12, 0], sound[12:, 7] = 1, 1  # low, then high
    scene = ViewerData.from_weights(
        {"decoder": weights}, col_labels=list("abcd"), speech=SynthesizedSpeech(sound, frames_per_step=2)
    )
    shown = opened(served(scene))
    assert shown.text(".jm-tabs [role=tab]") == ["Speech", "Map", "Arcs", "Text", "Heads"]
    assert shown.text(".jm-subtitle .jm-number") == ["cross attention", "4 symbols", "12 steps in 0.30 s"]
    middles = [0.125, 0.375, 0.625, 0.875]
    cells = 765 - colours(shown, middles, middles).sum(2)
    assert (cells.argmax(0) == np.arange(4)).all()  # the text goes upwards
    box = shown.ask("v.views.speech.box")
    assert box["mel"]["y"] + box["mel"]["h"] < box["y"]
    low = (box["mel"]["y"] + 0.95 * box["mel"]["h"] - box["y"] - box["h"]) / -box["h"]
    high = (box["mel"]["y"] + 0.05 * box["mel"]["h"] - box["y"] - box["h"]) / -box["h"]
    bright = colours(shown, [0.25, 0.75], [low, high]).sum(2)
    assert bright[0, 0] > 2 * bright[0, 1]
    assert bright[1, 1] > 2 * bright[1, 0]
    assert not shown.page.is_visible(".jm-player button")  # there is no sound
    assert not shown.page.is_visible(".jm-style")
    assert not shown.page.is_visible(".jm-speech-note")
    label = shown.page.get_attribute(".jm-plot canvas[role=img]", "aria-label")
    assert label == "Spectrogram of 0.30 seconds, and the alignment of its 12 steps to 4 symbols"


def test_a_time_tells_its_symbols_and_a_symbol_its_frames(served: Show) -> None:
    shown = opened(served(said(KOREAN)))
    assert "".join(shown.text(".jm-caption .jm-token")) == "ㅇㅏㄴㄴㅕㅇㅎㅏㅅㅔㅇㅛ"
    assert shown.page.inner_text(".jm-speech-note") == "diagonality 1.00, 0 skipped"
    shown.page.mouse.move(*place(shown, 0.62, 0.5))
    tip = shown.page.inner_text(".jm-tooltip").split()
    assert tip[:5] == ["0.80", "s,", "step", "32", "ㅏ"]  # the eighth of twelve
    tints = "[...document.querySelectorAll('.jm-caption .jm-token')].map((e) => e.style.backgroundColor)"
    shaded = [bool(tint) for tint in shown.page.evaluate(tints)]
    assert shaded[7]
    assert sum(shaded) < 5
    shown.page.mouse.move(*place(shown, 0.62, 2))  # the same time, in the spectrogram
    assert shown.page.inner_text(".jm-tooltip").split()[4] == "ㅏ"

    def brightness(across: float) -> int:
        """Of what lies over the spectrogram: how much of it is covered."""
        script = """(() => { const { box: b, overlay } = v.views.speech, d = devicePixelRatio;
            return overlay.getContext("2d").getImageData(Math.round((b.x + given[0] * b.w) * d),
                Math.round((b.mel.y + 9) * d), 1, 1).data[3]; })()"""
        return int(shown.ask(script, across))

    shown.page.hover(".jm-caption .jm-token >> nth=2")
    assert brightness(2.5 / 12) < 20
    assert brightness(0.8) > 180
    lead = shown.page.inner_text(".jm-current").split()
    assert lead[0] == "ㄴ"
    assert float(lead[4]) == pytest.approx(WHOLE * 2 / 12, abs=0.03)
    assert float(lead[6]) == pytest.approx(WHOLE * 3 / 12, abs=0.03)
    x, y = place(shown, 0, 11.5 / 12)  # the label of the last symbol, beside the plot
    shown.page.mouse.move(x - 10, y)
    assert shown.page.inner_text(".jm-current").startswith("ㅛ")
    shown.page.mouse.click(x - 10, y)
    shown.page.mouse.move(5, 5)
    assert shown.page.inner_text(".jm-current .jm-pinned") == "ㅛ"
    assert shown.page.is_hidden(".jm-tooltip")


def test_it_is_heard_and_a_line_moves(served: Show) -> None:
    shown = opened(served(said(steps=211)))  # 5.3 seconds
    button = shown.page.get_by_role("button", name="Play (space)")
    button.click()
    shown.page.get_by_role("button", name="Pause (space)").wait_for()
    shown.until(lambda: shown.ask("v.views.speech.player.time") > 0.1)
    assert shown.page.inner_text(".jm-clock").endswith("/ 5.26 s")
    line = """(() => { const s = v.views.speech, { box: b, overlay } = s, d = devicePixelRatio;
        const y = Math.round((b.y + 5) * d);
        const row = overlay.getContext("2d").getImageData(0, y, overlay.width, 1).data;
        const seen = Array.from({ length: overlay.width }, (_, n) => n).filter((n) => row[4 * n + 3] > 200);
        const x = seen.reduce((sum, n) => sum + n, 0) / seen.length / d;
        return [(x - b.x) / b.w * s.length, s.player.time]; })()"""
    drawn, heard = shown.ask(line)
    assert drawn == pytest.approx(heard, abs=0.2)
    shown.page.mouse.click(*place(shown, 0.75, 2))  # from there
    shown.until(lambda: shown.ask("v.views.speech.player.time") > 0.74 * 5.26)
    shown.page.mouse.move(5, 5)
    shown.until(lambda: shown.ask(line)[0] > 0.74 * 5.26)
    shown.page.click(".jm-clock")  # nothing: then the keys are the viewer's
    shown.press("Space")
    shown.until(lambda: not shown.ask("v.views.speech.player.playing"))
    stopped = shown.ask("v.views.speech.player.time")
    shown.press("Space")
    shown.until(lambda: shown.ask("v.views.speech.player.playing"))
    assert shown.ask("v.views.speech.player.time") >= stopped
    shown.press("2")  # another view: it falls silent
    assert not shown.ask("v.views.speech.player.playing")


def test_keys_go_through_time_and_text(served: Show) -> None:
    shown = opened(served(said()))
    spoken = "document.querySelector('.jm-visually-hidden').textContent"
    shown.press("ArrowRight")
    assert shown.page.evaluate(spoken).startswith("0.00 seconds: t ")
    shown.press("End", "ArrowLeft")
    assert shown.ask("v.views.speech.pointedStep") == 51
    shown.press("Enter")  # from there
    shown.until(lambda: shown.ask("v.views.speech.player.time") > 51 / 53 * WHOLE - 0.01)
    shown.press("Escape", "Shift+ArrowRight", "ArrowRight")
    assert shown.page.evaluate("document.activeElement.textContent") == "h"
    assert shown.page.evaluate(spoken) == "h highest weight from 0.08 to 0.15 s"
    shown.press("Escape")
    assert shown.ask("v.views.speech.selected") is None
    assert shown.page.evaluate("document.activeElement === document.querySelector('.jumok')")
    shown.press("?")
    assert "play from there" in shown.page.inner_text(".jm-help")


def test_tokens_have_bars_by_head_and_sliders(served: Show) -> None:
    shown = opened(served(said()))
    assert shown.text(".jm-style-token bdi") == list(TOKENS)
    assert shown.page.get_by_role("img", name="token 3: 0.35; by head 0.5, 0.2").count() == 1
    widths = "[...document.querySelectorAll('.jm-token-bar')].map((e) => e.getBoundingClientRect().width)"
    found = np.array(shown.page.evaluate(widths)).reshape(5, 2)
    assert found / found.max() * 0.5 == pytest.approx(
        np.array([[0.1, 0.2, 0.065, 0.5, 0.135], [0.3, 0.1, 0.3, 0.2, 0.1]]).T, abs=0.01
    )
    slider = shown.page.get_by_role("slider", name="Weight of token 3")
    assert [slider.get_attribute(name) for name in ("min", "max")] == ["-1", "1"]
    assert shown.text(".jm-style-token output") == ["0.20", "0.15", "0.18", "0.35", "0.12"]


def test_sliders_say_it_anew(served: Show) -> None:
    shown = opened(served(said()))
    shown.page.get_by_role("slider", name="Weight of token 1").fill("0.6")
    shown.page.get_by_text("85 steps in 2.11 s").wait_for()  # 53 * 1.6
    assert shown.page.evaluate("document.querySelector('.jm-tabs .jm-on').textContent") == "Speech"
    shown.until(lambda: shown.ask("v.views.speech.player.playing"))  # and is heard at once
    assert shown.text(".jm-style-token output") == ["0.20", "0.60", "0.18", "0.35", "0.12"]
    # What did not move was asked for as it was, not in a slider's steps.
    assert shown.ask("v.views.speech.data.style.weights[0][4]") == 0.1175
    shown.press("Space")  # on a slider too
    assert not shown.ask("v.views.speech.player.playing")
    shown.page.get_by_role("tab", name="Map").click()
    shown.rest()
    assert shown.ask("[v.maps[0].content.data, v.maps[0].content.shape]") == [1, [85, 19]]
    shown.page.get_by_role("tab", name="Speech").click()
    shown.page.get_by_role("button", name="Only token 2").click()
    shown.page.get_by_text("53 steps in 1.31 s").wait_for()
    shown.until(lambda: shown.text(".jm-style-token output") == ["0.00", "0.00", "1.00", "0.00", "0.00"])
    assert shown.ask("v.manifest.texts.length") == 1  # the text is the same, and there once
    shown.page.get_by_role("button", name="Reset").click()
    shown.until(lambda: shown.text(".jm-style-token output")[3] == "0.35")
    assert shown.ask("v.content().data") == 0
    assert shown.page.get_by_role("button", name="Reset").count() == 0


def test_of_many_wishes_the_last_is_said_and_one_at_a_time(served: Show) -> None:
    asked: list[list[float]] = []
    busy = False

    def slowly(weights: list[float]) -> ViewerData:
        nonlocal busy
        assert not busy
        busy = True
        asked.append(weights)
        time.sleep(0.3)
        busy = False
        return said(weights=weights)

    shown = opened(served(replace(said(), resynthesize=slowly)))
    slider = shown.page.get_by_role("slider", name="Weight of token 0")
    for value in ("0.1", "0.3", "0.5", "0.9"):
        slider.fill(value)
    assert shown.page.inner_text(".jm-style [role=status]") == "Synthesising …"
    shown.until(lambda: len(asked) == 2 and not shown.page.is_visible(".jm-style [role=status]"))
    assert [weights[0] for weights in asked] == [0.1, 0.9]
    assert shown.ask("v.views.speech.data.style.weights[0][0]") == 0.9


def test_what_cannot_be_said_is_told(served: Show) -> None:
    def broken(weights: list[float]) -> ViewerData:
        raise InputError("it would not stop")

    shown = opened(served(replace(said(), resynthesize=broken)))
    shown.page.get_by_role("slider", name="Weight of token 0").fill("0.9")
    shown.page.get_by_text("Synthesis failed: it would not stop").wait_for()
    assert shown.text(".jm-style-token output")[0] == "0.20"  # as it is heard
    shown.complaints.clear()  # the browser's own word on the status 400


def test_a_saved_file_plays_and_its_sliders_stay(saved: Show) -> None:
    shown = opened(saved(said(KOREAN)))
    slider = shown.page.get_by_role("slider", name="Weight of token 3")
    assert slider.is_disabled()
    assert slider.input_value() == "0.35"
    assert "Weights of the recorded synthesis" in shown.page.inner_text(".jm-style")
    assert not shown.page.is_visible("text=Play after synthesis")
    shown.page.get_by_role("button", name="Play (space)").click()
    shown.until(lambda: shown.ask("v.views.speech.player.time") > 0.05)


def test_before_and_after_each_have_their_sound(served: Show) -> None:
    after = replace(said(KOREAN, steps=31, live=False), label="After")
    shown = opened(served([replace(said(KOREAN), label="Before"), after]))
    assert "/ 1.31 s" in shown.page.inner_text(".jm-clock")
    shown.press("c")
    shown.until(lambda: "/ 0.76 s" in shown.page.inner_text(".jm-clock"))
    assert shown.page.get_by_role("slider", name="Weight of token 0").is_disabled()
    shown.press("c")
    assert not shown.page.get_by_role("slider", name="Weight of token 0").is_disabled()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_of_it_is_there_on_a_phone(served: Show, theme: str) -> None:
    small = {"width": 360, "height": 740}
    shown = opened(served(said(KOREAN), viewport=small, color_scheme=theme, has_touch=True, is_mobile=True))
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 360
    plot = shown.page.locator(".jm-plot").bounding_box()
    style = shown.page.locator(".jm-style").bounding_box()
    assert plot["height"] >= 300
    assert style["y"] >= plot["y"] + plot["height"]
    shown.page.locator(".jm-plot").scroll_into_view_if_needed()
    shown.page.touchscreen.tap(*place(shown, 0.5, 0.5))
    shown.until(lambda: shown.ask("v.views.speech.player.time") > 0.45 * WHOLE)
    assert shown.page.is_hidden(".jm-tooltip")
    edge = colours(shown, [0.99], [0.01]).sum()
    assert edge < 150 if theme == "dark" else edge > 600


def test_a_notebook_says_it_anew(new_page: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget", reason='the notebook needs anywidget: pip install "jumok[look]"')
    from jumok.look.viewer.widget import ViewerWidget

    sent: list[tuple[Any, Any]] = []
    monkeypatch.setattr(ViewerWidget, "send", lambda self, content, buffers=None: sent.append((content, buffers)))
    widget = ViewerWidget(said(KOREAN))

    def to_kernel(_: Any, content: Any) -> Any:
        widget._handle_custom_msg(content, [])
        answer, buffers = sent.pop()
        return [answer, [base64.b64encode(data).decode() for data in buffers or ()]]

    shown = new_page()
    shown.page.expose_binding("toKernel", to_kernel)
    shown.page.set_content('<body><div id="viewer" style="width: 860px"></div></body>')
    shown.page.add_style_tag(content=assets.build_style_sheet())
    shown.page.evaluate(
        """async ([source, manifest]) => {
            const heard = [];
            const model = {
                get: (name) => ({ manifest })[name],
                on: (name, f) => name === "msg:custom" && heard.push(f),
                off: () => {},
                send: async (content) => {
                    const [answer, parts] = await window.toKernel(content);
                    const bytes = parts.map((text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)));
                    heard.forEach((f) => f(answer, bytes.map(({ buffer }) => new DataView(buffer))));
                },
            };
            const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
            window.cleanup = module.default.render({ model, el: document.querySelector("#viewer") });
        }""",
        [assets.build_script(), widget.manifest],
    )
    opened(shown.ready())
    shown.page.get_by_label("Play after synthesis").uncheck()
    shown.page.get_by_role("slider", name="Weight of token 1").fill("1")
    shown.page.get_by_text("106 steps in 2.64 s").wait_for()
    shown.until(lambda: shown.text(".jm-style-token output")[1] == "1.00")
    assert shown.ask("v.views.speech.map.steps") == 106
    assert not shown.ask("v.views.speech.player.playing")
    shown.page.evaluate("window.cleanup()")
    assert shown.page.locator("#viewer *").count() == 0
