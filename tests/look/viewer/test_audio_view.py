"""Tests of the view of a recording in a real browser."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_audio import DURATION, build_audio_data

pytestmark = pytest.mark.long

OpenPage = Callable[..., Any]


def wait_for_plot(viewer: Any) -> Any:
    viewer.page.wait_for_function("() => document.querySelector('#viewer').jumok.views.audio.box")
    return viewer


def locate_point(viewer: Any, across: float, down: float) -> tuple[float, float]:
    """A place on the page: across the plots, and down in the map (below 0: in the spectrogram)."""
    script = """((b, o) => [b.left + o.x + args[0] * o.w, args[1] < 0
        ? b.top + o.mel.y + o.mel.h / 2 : b.top + o.y + args[1] * o.h])(
        v.views.audio.plot.getBoundingClientRect(), v.views.audio.box)"""
    x, y = viewer.evaluate(script, across, down)
    return x, y


def get_opacity(viewer: Any, across: float) -> int:
    """Return how much of the spectrogram is covered at a place."""
    script = """(() => { const { box: b, overlay } = v.views.audio, d = devicePixelRatio;
        return overlay.getContext("2d").getImageData(Math.round((b.x + args[0] * b.w) * d),
            Math.round((b.mel.y + 9) * d), 1, 1).data[3]; })()"""
    return int(viewer.evaluate(script, across))


def test_words_and_times(open_served: OpenPage) -> None:
    viewer = wait_for_plot(open_served(build_audio_data()))
    assert viewer.get_texts(".jm-tabs [role=tab]") == ["Recording", "Map", "Arcs", "Text", "Heads"]
    assert viewer.get_texts(".jm-subtitle .jm-number") == [
        "decoder.0",
        "cross attention",
        "4 words",
        "60 frames in 2.40 s",
    ]
    label = viewer.page.get_attribute(".jm-plot canvas[role=img]", "aria-label")
    assert label == "Spectrogram of 2.40 seconds, and the attention of 4 words to 60 frames"
    assert viewer.find_unnamed_controls() == []
    viewer.page.hover(".jm-caption .jm-token >> nth=2")  # a word leaves its quarter of the spectrogram bright
    assert get_opacity(viewer, 0.625) < 20
    assert get_opacity(viewer, 0.25) > 180
    lead = viewer.page.inner_text(".jm-current")
    assert "half of it from 1.20 to 1.52 s" in lead  # 7.5 of 15 frames
    assert "80 % of its weight is on the recording" in lead
    viewer.page.mouse.move(*locate_point(viewer, 0.3, -1))  # a time shades its word
    assert viewer.page.inner_text(".jm-tooltip").split()[:5] == ["0.74", "s,", "frame", "18", "·quick"]
    tints = "[...document.querySelectorAll('.jm-caption .jm-token')].map((e) => e.style.backgroundColor)"
    assert [bool(tint) for tint in viewer.page.evaluate(tints)] == [False, True, False, False]
    viewer.page.mouse.move(*locate_point(viewer, 0.3, 0.9))  # in the map, the word beside the pointer is selected
    assert viewer.page.inner_text(".jm-current").startswith("·fox")
    assert viewer.page.inner_text(".jm-tooltip").split()[4:] == [
        "·quick",
        "0.0533",
        "·the",
        "0",
        "·brown",
        "0",
        "·fox",
        "0",
    ]
    viewer.page.mouse.click(*locate_point(viewer, -0.02, 0.1))  # beside the map, a click pins a word
    viewer.page.mouse.move(5, 5)
    assert viewer.page.inner_text(".jm-current .jm-pinned") == "·the"
    viewer.press("Escape")
    assert viewer.page.inner_text(".jm-current").startswith("Hover a word")


def test_playback_and_keys(open_saved: OpenPage) -> None:
    viewer = wait_for_plot(open_saved(build_audio_data()))  # the file carries the sound
    viewer.page.get_by_role("button", name="Play (space)").click()
    viewer.wait_until(lambda: viewer.evaluate("v.views.audio.player.time") > 0.1)
    viewer.wait_until(lambda: viewer.page.inner_text(".jm-current").split()[2] == "·the")  # the word that is heard
    viewer.press("Space")
    viewer.wait_until(lambda: not viewer.evaluate("v.views.audio.player.playing"))
    viewer.page.mouse.click(*locate_point(viewer, 0.8, -1))  # plays from there
    viewer.wait_until(lambda: viewer.evaluate("v.views.audio.player.time") > 0.8 * DURATION - 0.01)
    viewer.page.click(".jm-clock")
    viewer.press("Space", "ArrowRight", "ArrowRight")
    assert viewer.page.inner_text(".jm-current").startswith("·quick")
    viewer.press("Enter")  # plays from where the word listened
    viewer.wait_until(lambda: 0.59 < viewer.evaluate("v.views.audio.player.time") < 1.2)
    viewer.press("Escape", "2")  # another view stops playback
    assert not viewer.evaluate("v.views.audio.player.playing")


def test_times_attend_to_times(open_saved: OpenPage) -> None:
    viewer = wait_for_plot(open_saved(build_audio_data(is_self=True)))
    assert viewer.get_texts(".jm-subtitle .jm-number") == ["encoder.0", "self attention", "60 frames in 2.40 s"]
    viewer.page.mouse.move(*locate_point(viewer, 20.5 / 60, -1))  # frame 20 attends to frame 30
    assert viewer.page.inner_text(".jm-current").split()[:6] == ["0.82", "s", "half", "of", "it", "from"]
    assert "peak at 1.22 s" in viewer.page.inner_text(".jm-current")
    assert get_opacity(viewer, 30.5 / 60) < 20
    assert get_opacity(viewer, 25.5 / 60) > 180
    viewer.page.mouse.click(*locate_point(viewer, 20.5 / 60, -1))  # pins it, and does not play
    viewer.page.mouse.move(5, 5)
    assert viewer.page.inner_text(".jm-current .jm-pinned") == "0.82 s"
    assert not viewer.evaluate("v.views.audio.player.playing")
    assert viewer.evaluate("v.views.audio.player.time") == pytest.approx(20.5 * 0.04, abs=0.03)
    viewer.page.mouse.move(*locate_point(viewer, 0.5, 40.5 / 60))  # in the map, the query is beside the pointer
    assert "peak at 2.02 s" in viewer.page.inner_text(".jm-current")
    viewer.page.mouse.move(5, 5)
    viewer.page.click(".jm-clock")
    viewer.press("Escape", "End")
    assert viewer.page.inner_text(".jm-current").startswith("2.38 s")


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_everything_fits_a_phone(open_saved: OpenPage, color_scheme: str) -> None:
    viewer = wait_for_plot(
        open_saved(build_audio_data(), viewport={"width": 360, "height": 700}, color_scheme=color_scheme)
    )
    assert viewer.page.evaluate("document.documentElement.scrollWidth") <= 360
