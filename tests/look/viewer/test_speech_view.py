"""Tests of the speech view in a real browser."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.errors import InputError
from jumok.look.viewer.synthesized_speech import SynthesizedSpeech
from jumok.look.viewer.viewer_data import ViewerData

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_speech import FRAME_SECONDS, FRAMES_PER_STEP, KOREAN, TOKENS, build_speech_data

pytestmark = pytest.mark.long


OpenPage = Callable[..., Any]
DURATION = 53 * FRAMES_PER_STEP * FRAME_SECONDS  # seconds of all steps
PLOT_BOX = "(v.views.speech.plot.getBoundingClientRect())"


def wait_for_plot(viewer: Any) -> Any:
    viewer.page.wait_for_function("() => document.querySelector('#viewer').jumok.views.speech.box")
    return viewer


def locate_point(viewer: Any, across: float, up: float) -> tuple[float, float]:
    """A place on the page: across the plots, and up in the alignment (above 1: in the spectrogram)."""
    script = f"""((b, o) => [b.left + o.x + args[0] * o.w, args[1] > 1
        ? b.top + o.mel.y + o.mel.h / 2 : b.top + o.y + o.h - args[1] * o.h])({PLOT_BOX}, v.views.speech.box)"""
    x, y = viewer.evaluate(script, across, up)
    return x, y


def get_colours(viewer: Any, x: list[float], y: list[float]) -> np.ndarray:
    """Of the alignment (0 to 1 each way) ``(y, x, 3)``."""
    script = """(() => { const { box: b, canvas } = v.views.speech, d = devicePixelRatio, [xs, ys] = args;
        const g = canvas.getContext("2d");
        return ys.map((y) => xs.map((x) => [...g.getImageData(
            Math.round((b.x + x * b.w) * d), Math.round((b.y + b.h - y * b.h) * d), 1, 1).data].slice(0, 3)));
        })()"""
    return np.array(viewer.evaluate(script, x, y))


def test_opens_with_spectrogram_above_alignment(open_served: OpenPage) -> None:
    # Twelve steps of two frames each speak four split_symbols, three steps a letter.
    weights = np.repeat(np.eye(4, dtype=np.float32), 3, axis=0)
    sound = np.zeros((24, 8))
    sound[:12, 0], sound[12:, 7] = 1, 1  # low, then high
    data = ViewerData.from_weights(
        {"decoder": weights}, col_labels=list("abcd"), speech=SynthesizedSpeech(sound, frames_per_step=2)
    )
    viewer = wait_for_plot(open_served(data))
    assert viewer.get_texts(".jm-tabs [role=tab]") == ["Speech", "Map", "Arcs", "Text", "Heads"]
    assert viewer.get_texts(".jm-subtitle .jm-number") == ["cross attention", "4 symbols", "12 steps in 0.30 s"]
    middles = [0.125, 0.375, 0.625, 0.875]
    cells = 765 - get_colours(viewer, middles, middles).sum(2)
    assert (cells.argmax(0) == np.arange(4)).all()  # the text goes upwards
    box = viewer.evaluate("v.views.speech.box")
    assert box["mel"]["y"] + box["mel"]["h"] < box["y"]
    low = (box["mel"]["y"] + 0.95 * box["mel"]["h"] - box["y"] - box["h"]) / -box["h"]
    high = (box["mel"]["y"] + 0.05 * box["mel"]["h"] - box["y"] - box["h"]) / -box["h"]
    bright = get_colours(viewer, [0.25, 0.75], [low, high]).sum(2)
    assert bright[0, 0] > 2 * bright[0, 1]
    assert bright[1, 1] > 2 * bright[1, 0]
    assert not viewer.page.is_visible(".jm-player button")  # there is no audio
    assert not viewer.page.is_visible(".jm-style")
    assert not viewer.page.is_visible(".jm-speech-note")
    label = viewer.page.get_attribute(".jm-plot canvas[role=img]", "aria-label")
    assert label == "Spectrogram of 0.30 seconds, and the alignment of its 12 steps to 4 symbols"


def test_hover_shows_symbols_of_a_time_and_frames_of_a_symbol(open_served: OpenPage) -> None:
    viewer = wait_for_plot(open_served(build_speech_data(KOREAN)))
    assert "".join(viewer.get_texts(".jm-caption .jm-token")) == "ㅇㅏㄴㄴㅕㅇㅎㅏㅅㅔㅇㅛ"
    assert viewer.page.inner_text(".jm-speech-note") == "diagonality 1.00, 0 skipped"
    viewer.page.mouse.move(*locate_point(viewer, 0.62, 0.5))
    tooltip = viewer.page.inner_text(".jm-tooltip").split()
    assert tooltip[:5] == ["0.80", "s,", "step", "32", "ㅏ"]  # the eighth of twelve
    tints = "[...document.querySelectorAll('.jm-caption .jm-token')].map((e) => e.style.backgroundColor)"
    shaded = [bool(tint) for tint in viewer.page.evaluate(tints)]
    assert shaded[7]
    assert sum(shaded) < 5
    viewer.page.mouse.move(*locate_point(viewer, 0.62, 2))  # the same time, in the spectrogram
    assert viewer.page.inner_text(".jm-tooltip").split()[4] == "ㅏ"

    def get_opacity(across: float) -> int:
        """Of what lies over the spectrogram: how much of it is covered."""
        script = """(() => { const { box: b, overlay } = v.views.speech, d = devicePixelRatio;
            return overlay.getContext("2d").getImageData(Math.round((b.x + args[0] * b.w) * d),
                Math.round((b.mel.y + 9) * d), 1, 1).data[3]; })()"""
        return int(viewer.evaluate(script, across))

    viewer.page.hover(".jm-caption .jm-token >> nth=2")
    assert get_opacity(2.5 / 12) < 20
    assert get_opacity(0.8) > 180
    lead = viewer.page.inner_text(".jm-current").split()
    assert lead[0] == "ㄴ"
    assert float(lead[4]) == pytest.approx(DURATION * 2 / 12, abs=0.03)
    assert float(lead[6]) == pytest.approx(DURATION * 3 / 12, abs=0.03)
    x, y = locate_point(viewer, 0, 11.5 / 12)  # the label of the last symbol, beside the plot
    viewer.page.mouse.move(x - 10, y)
    assert viewer.page.inner_text(".jm-current").startswith("ㅛ")
    viewer.page.mouse.click(x - 10, y)
    viewer.page.mouse.move(5, 5)
    assert viewer.page.inner_text(".jm-current .jm-pinned") == "ㅛ"
    assert viewer.page.is_hidden(".jm-tooltip")


def test_playback_moves_a_line(open_served: OpenPage) -> None:
    viewer = wait_for_plot(open_served(build_speech_data(num_steps=211)))  # 5.3 seconds
    button = viewer.page.get_by_role("button", name="Play (space)")
    button.click()
    viewer.page.get_by_role("button", name="Pause (space)").wait_for()
    viewer.wait_until(lambda: viewer.evaluate("v.views.speech.player.time") > 0.1)
    assert viewer.page.inner_text(".jm-clock").endswith("/ 5.26 s")
    line = """(() => { const s = v.views.speech, { box: b, overlay } = s, d = devicePixelRatio;
        const y = Math.round((b.y + 5) * d);
        const row = overlay.getContext("2d").getImageData(0, y, overlay.width, 1).data;
        const columns = Array.from({ length: overlay.width }, (_, n) => n).filter((n) => row[4 * n + 3] > 200);
        const x = columns.reduce((sum, n) => sum + n, 0) / columns.length / d;
        return [(x - b.x) / b.w * s.timeline.length, s.player.time]; })()"""
    line_time, audio_time = viewer.evaluate(line)
    assert line_time == pytest.approx(audio_time, abs=0.2)
    viewer.page.mouse.click(*locate_point(viewer, 0.75, 2))  # plays from there
    viewer.wait_until(lambda: viewer.evaluate("v.views.speech.player.time") > 0.74 * 5.26)
    viewer.page.mouse.move(5, 5)
    viewer.wait_until(lambda: viewer.evaluate(line)[0] > 0.74 * 5.26)
    viewer.page.click(".jm-clock")  # not a control, so the viewer gets the keys
    viewer.press("Space")
    viewer.wait_until(lambda: not viewer.evaluate("v.views.speech.player.playing"))
    stopped = viewer.evaluate("v.views.speech.player.time")
    viewer.press("Space")
    viewer.wait_until(lambda: viewer.evaluate("v.views.speech.player.playing"))
    assert viewer.evaluate("v.views.speech.player.time") >= stopped
    viewer.press("2")  # another view stops playback
    assert not viewer.evaluate("v.views.speech.player.playing")


def test_keys_move_through_time_and_text(open_served: OpenPage) -> None:
    viewer = wait_for_plot(open_served(build_speech_data()))
    announcement = "document.querySelector('.jm-visually-hidden').textContent"
    viewer.press("ArrowRight")
    assert viewer.page.evaluate(announcement).startswith("0.00 seconds: t ")
    viewer.press("End", "ArrowLeft")
    assert viewer.evaluate("v.views.speech.pointedStep") == 51
    viewer.press("Enter")  # plays from there
    viewer.wait_until(lambda: viewer.evaluate("v.views.speech.player.time") > 51 / 53 * DURATION - 0.01)
    viewer.press("Escape", "Shift+ArrowRight", "ArrowRight")
    assert viewer.page.evaluate("document.activeElement.textContent") == "h"
    assert viewer.page.evaluate(announcement) == "h highest weight from 0.08 to 0.15 s"
    viewer.press("Escape")
    assert viewer.evaluate("v.views.speech.selected") is None
    assert viewer.page.evaluate("document.activeElement === document.querySelector('.jumok')")
    viewer.press("?")
    assert "play from there" in viewer.page.inner_text(".jm-help")


def test_style_tokens_have_bars_by_head_and_sliders(open_served: OpenPage) -> None:
    viewer = wait_for_plot(open_served(build_speech_data()))
    assert viewer.get_texts(".jm-style-token bdi") == list(TOKENS)
    assert viewer.page.get_by_role("img", name="token 3: 0.35; by head 0.5, 0.2").count() == 1
    widths = "[...document.querySelectorAll('.jm-token-bar')].map((e) => e.getBoundingClientRect().width)"
    bars = np.array(viewer.page.evaluate(widths)).reshape(5, 2)
    assert bars / bars.max() * 0.5 == pytest.approx(
        np.array([[0.1, 0.2, 0.065, 0.5, 0.135], [0.3, 0.1, 0.3, 0.2, 0.1]]).T, abs=0.01
    )
    slider = viewer.page.get_by_role("slider", name="Weight of token 3")
    assert [slider.get_attribute(name) for name in ("min", "max")] == ["-1", "1"]
    assert viewer.get_texts(".jm-style-token output") == ["0.20", "0.15", "0.18", "0.35", "0.12"]


def test_sliders_resynthesize(open_served: OpenPage) -> None:
    viewer = wait_for_plot(open_served(build_speech_data()))
    viewer.page.get_by_role("slider", name="Weight of token 1").fill("0.6")
    viewer.page.get_by_text("85 steps in 2.11 s").wait_for()  # 53 * 1.6
    assert viewer.page.evaluate("document.querySelector('.jm-tabs .jm-on').textContent") == "Speech"
    viewer.wait_until(lambda: viewer.evaluate("v.views.speech.player.playing"))  # the new audio is played
    assert viewer.get_texts(".jm-style-token output") == ["0.20", "0.60", "0.18", "0.35", "0.12"]
    # Weights of other sliders are exact, not rounded to their steps.
    assert viewer.evaluate("v.views.speech.data.style.weights[0][4]") == 0.1175
    viewer.press("Space")  # also when a slider is focused
    assert not viewer.evaluate("v.views.speech.player.playing")
    viewer.page.get_by_role("tab", name="Map").click()
    viewer.wait_until_idle()
    assert viewer.evaluate("[v.maps[0].content.data, v.maps[0].content.shape]") == [1, [85, 19]]
    viewer.page.get_by_role("tab", name="Speech").click()
    viewer.page.get_by_role("button", name="Only token 2").click()
    viewer.page.get_by_text("53 steps in 1.31 s").wait_for()
    viewer.wait_until(lambda: viewer.get_texts(".jm-style-token output") == ["0.00", "0.00", "1.00", "0.00", "0.00"])
    assert viewer.evaluate("v.manifest.texts.length") == 1  # equal texts are stored once
    viewer.page.get_by_role("button", name="Reset").click()
    viewer.wait_until(lambda: viewer.get_texts(".jm-style-token output")[3] == "0.35")
    assert viewer.evaluate("v.content().data") == 0
    assert viewer.page.get_by_role("button", name="Reset").count() == 0


def test_only_the_last_of_many_requests_is_synthesized(open_served: OpenPage) -> None:
    requested: list[list[float]] = []
    is_busy = False

    def synthesize_slowly(weights: list[float]) -> ViewerData:
        nonlocal is_busy
        assert not is_busy
        is_busy = True
        requested.append(weights)
        time.sleep(0.3)
        is_busy = False
        return build_speech_data(weights=weights)

    viewer = wait_for_plot(open_served(replace(build_speech_data(), resynthesize=synthesize_slowly)))
    slider = viewer.page.get_by_role("slider", name="Weight of token 0")
    for value in ("0.1", "0.3", "0.5", "0.9"):
        slider.fill(value)
    assert viewer.page.inner_text(".jm-style [role=status]") == "Synthesising …"
    viewer.wait_until(lambda: len(requested) == 2 and not viewer.page.is_visible(".jm-style [role=status]"))
    assert [weights[0] for weights in requested] == [0.1, 0.9]
    assert viewer.evaluate("v.views.speech.data.style.weights[0][0]") == 0.9


def test_failed_synthesis_is_reported(open_served: OpenPage) -> None:
    def fail(weights: list[float]) -> ViewerData:
        raise InputError("it would not stop")

    viewer = wait_for_plot(open_served(replace(build_speech_data(), resynthesize=fail)))
    viewer.page.get_by_role("slider", name="Weight of token 0").fill("0.9")
    viewer.page.get_by_text("Synthesis failed: it would not stop").wait_for()
    assert viewer.get_texts(".jm-style-token output")[0] == "0.20"  # that of the current audio
    viewer.errors.clear()  # the message of the browser about status 400


def test_saved_file_plays_and_disables_sliders(open_saved: OpenPage) -> None:
    viewer = wait_for_plot(open_saved(build_speech_data(KOREAN)))
    slider = viewer.page.get_by_role("slider", name="Weight of token 3")
    assert slider.is_disabled()
    assert slider.input_value() == "0.35"
    assert "Weights of the recorded synthesis" in viewer.page.inner_text(".jm-style")
    assert not viewer.page.is_visible("text=Play after synthesis")
    viewer.page.get_by_role("button", name="Play (space)").click()
    viewer.wait_until(lambda: viewer.evaluate("v.views.speech.player.time") > 0.05)


def test_compared_runs_have_their_own_audio(open_served: OpenPage) -> None:
    after = replace(build_speech_data(KOREAN, num_steps=31, can_resynthesize=False), label="After")
    viewer = wait_for_plot(open_served([replace(build_speech_data(KOREAN), label="Before"), after]))
    assert "/ 1.31 s" in viewer.page.inner_text(".jm-clock")
    viewer.press("c")
    viewer.wait_until(lambda: "/ 0.76 s" in viewer.page.inner_text(".jm-clock"))
    assert viewer.page.get_by_role("slider", name="Weight of token 0").is_disabled()
    viewer.press("c")
    assert not viewer.page.get_by_role("slider", name="Weight of token 0").is_disabled()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_fits_a_phone(open_served: OpenPage, theme: str) -> None:
    small = {"width": 360, "height": 740}
    viewer = wait_for_plot(
        open_served(build_speech_data(KOREAN), viewport=small, color_scheme=theme, has_touch=True, is_mobile=True)
    )
    assert viewer.page.evaluate("document.documentElement.scrollWidth") <= 360
    plot = viewer.page.locator(".jm-plot").bounding_box()
    style = viewer.page.locator(".jm-style").bounding_box()
    assert plot["height"] >= 300
    assert style["y"] >= plot["y"] + plot["height"]
    viewer.page.locator(".jm-plot").scroll_into_view_if_needed()
    viewer.page.touchscreen.tap(*locate_point(viewer, 0.5, 0.5))
    viewer.wait_until(lambda: viewer.evaluate("v.views.speech.player.time") > 0.45 * DURATION)
    assert viewer.page.is_hidden(".jm-tooltip")
    edge = get_colours(viewer, [0.99], [0.01]).sum()
    assert edge < 150 if theme == "dark" else edge > 600


def test_notebook_resynthesizes(new_page: OpenPage, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget", reason='the notebook needs anywidget: pip install "jumok[look]"')
    from jumok.look.viewer.widget import ViewerWidget

    messages: list[tuple[Any, Any]] = []
    monkeypatch.setattr(ViewerWidget, "send", lambda self, content, buffers=None: messages.append((content, buffers)))
    widget = ViewerWidget(build_speech_data(KOREAN))

    def answer(content: Any) -> tuple[Any, list[bytes]]:
        widget._handle_custom_msg(content, [])
        reply, buffers = messages.pop()
        return reply, buffers or []

    viewer = wait_for_plot(new_page().open_widget(widget.manifest, answer))
    viewer.page.get_by_label("Play after synthesis").uncheck()
    viewer.page.get_by_role("slider", name="Weight of token 1").fill("1")
    viewer.page.get_by_text("106 steps in 2.64 s").wait_for()
    viewer.wait_until(lambda: viewer.get_texts(".jm-style-token output")[1] == "1.00")
    assert viewer.evaluate("v.views.speech.map.steps") == 106
    assert not viewer.evaluate("v.views.speech.player.playing")
    viewer.page.evaluate("window.cleanup()")
    assert viewer.page.locator("#viewer *").count() == 0
