"""Tests of speech as a figure."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jumok.errors import InputError
from jumok.look.figures.speech_figure import SpeechFigure
from jumok.look.viewer import view_writer
from jumok.look.viewer.synthesized_speech import StyleTokenWeights, SynthesizedSpeech
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_speech import KOREAN, TOKENS, build_diagonal, build_speech_data, split_symbols

pytestmark = pytest.mark.filterwarnings("ignore:no installed font has")  # where no Korean font is installed


def build_figure(data: ViewerData) -> Figure:
    layer = data.layers[0]
    assert data.speech is not None
    weights = layer.compute_weights(0)
    return SpeechFigure(data.speech, layer.col_texts, weights, data.style, title=data.title).build()


def test_spectrogram_and_alignment_share_the_time_axis() -> None:
    below, above, *_ = build_figure(build_speech_data(KOREAN)).axes
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0, 53 * 2 * 0.0125))
    assert above.images[0].get_extent()[1] == pytest.approx(105 * 0.0125)  # the last step has a frame less
    assert above.get_position().y0 > below.get_position().y1
    mel = np.asarray(above.images[0].get_array())
    assert mel.shape == (40, 105)
    assert mel[:, 10].argmax() < mel[:, 60].argmax()  # the tone rises
    cells = np.asarray(below.images[0].get_array())
    assert (np.diff(cells.argmax(0)) >= 0).all()
    assert below.images[0].origin == "lower"  # the text goes upwards too
    assert below.get_xlabel() == "seconds\ndiagonality 1.00, 0 skipped"


def test_jamo_and_blanks_are_readable() -> None:
    below = build_figure(build_speech_data(KOREAN)).axes[0]
    assert "".join(label.get_text() for label in below.get_yticklabels()) == "ㅇㅏㄴㄴㅕㅇㅎㅏㅅㅔㅇㅛ"
    below = build_figure(build_speech_data("삶 a\u115f", has_audio=False)).axes[0]
    assert [label.get_text() for label in below.get_yticklabels()] == ["ㅅ", "ㅏ", "ㄻ", "␣", "a", "\u115f"]


def test_style_tokens_are_bars_by_head() -> None:
    *_, tokens = build_figure(build_speech_data()).axes
    assert [label.get_text() for label in tokens.get_yticklabels()] == list(TOKENS)
    assert [bar.get_width() for bar in tokens.patches] == pytest.approx(
        [0.1, 0.2, 0.065, 0.5, 0.135, 0.3, 0.1, 0.3, 0.2, 0.1]
    )
    low, high = tokens.get_ylim()
    assert low > high
    assert tokens.get_title(loc="left") == "Style tokens, 2 heads"


def test_symbols_of_a_long_text_do_not_overlap() -> None:
    symbols = list("abcdefghij" * 20)
    speech = SynthesizedSpeech(np.random.default_rng(0).random((500, 8)))
    figure = SpeechFigure(speech, symbols, build_diagonal(500, 200)).build()
    figure.draw_without_rendering()
    labels = figure.axes[0].get_yticklabels()
    assert 40 < len(labels) < 100
    boxes = [label.get_window_extent() for label in labels]
    middles = [box.y0 + box.height / 2 for box in boxes]
    assert np.diff(middles).min() > 0.9 * labels[0].get_fontsize() * figure.dpi / 72


@pytest.mark.parametrize("kind", [".png", ".svg", ".pdf"])
def test_speech_is_saved_in_every_format(tmp_path: Path, kind: str) -> None:
    path = view_writer.save_view(build_speech_data(KOREAN), tmp_path / f"speech{kind}")
    data = path.read_bytes()
    assert data.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[kind])
    if kind == ".png":
        pixels = imread(path)
        assert pixels.shape[1] > 1000
        assert pixels[..., :3].std() > 0.1


def test_speech_layer_is_drawn_by_default(tmp_path: Path) -> None:
    data = build_speech_data("ab")
    inner = ViewerLayer(
        "encoder", "self", (2, 2), (0,), ArrayWeightSource(np.eye(2)), split_symbols("ab"), split_symbols("ab")
    )
    both = ViewerData((*data.layers, inner), speech=data.speech, style=data.style)
    default = view_writer.save_view(both, tmp_path / "default.png")
    selected = view_writer.save_view(both, tmp_path / "other.png", "encoder")
    assert imread(default).shape != imread(selected).shape
    single = view_writer.save_view(data, tmp_path / "single.png")
    assert abs(imread(default).shape[1] - imread(single).shape[1]) < 10


def test_mismatched_sizes_are_rejected() -> None:
    speech = SynthesizedSpeech(np.ones((9, 3)), frames_per_step=2)
    with pytest.raises(InputError, match=r"\(4, 5\) given with 9 frames, 2 a step, and 5.*expected \(5, 5\)"):
        SpeechFigure(speech, list("abcde"), np.ones((4, 5)))
    with pytest.raises(InputError, match=r"expected \(5, 4\)"):
        SpeechFigure(speech, list("abcd"), np.ones((5, 5)))
    with pytest.raises(InputError, match="NaN"):
        SpeechFigure(speech, list("ab"), np.full((5, 2), np.nan))


def test_negative_style_weights_are_build_figure() -> None:
    style = StyleTokenWeights(("slow", "high"), np.array([[-0.5, 1.0]]))
    figure = SpeechFigure(SynthesizedSpeech(np.ones((4, 3))), ["a"], np.ones((4, 1)), style).build()
    slow, high = figure.axes[-1].patches
    assert (slow.get_width(), high.get_width()) == (-0.5, 1.0)
    assert figure.axes[-1].get_title(loc="left") == "Style tokens"
