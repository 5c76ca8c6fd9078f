"""Speech in a scene: its sizes and sound, its style, and how it is said anew by a page and in a notebook."""

from __future__ import annotations

import base64
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from jumok.errors import InputError
from jumok.look.viewer import html_file, page, view_writer
from jumok.look.viewer.comparison import compare_with_ablation
from jumok.look.viewer.synthesized_speech import StyleTokenWeights, SynthesizedSpeech
from jumok.look.viewer.tiles import TileRequest, unpack
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer, build_manifest
from jumok.look.viewer.viewer_session import MAX_RESYNTHESES, ViewerSession
from jumok.look.viewer.word_merging import merge_into_words

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_speech import HOP, KOREAN, SECONDS, TOKENS, diagonal, said, sweep, wav

WISH = {"data": 0, "weights": [0.0, 0.5, 0.0, 0.0, -0.25]}


def told(scene: ViewerData) -> dict[str, Any]:
    found: dict[str, Any] = build_manifest([scene])["data"][0]
    return found


# ----------------------------------------------------------------------------------------- what there is


def test_frames_steps_and_seconds() -> None:
    speech = SynthesizedSpeech(torch.zeros(7, 3), frame_seconds=0.5, frames_per_step=2)  # type: ignore[arg-type]
    assert (speech.num_frames, speech.num_steps, speech.duration) == (7, 4, 3.5)
    assert speech.mel.dtype == np.float32


def test_a_spectrogram_goes_from_its_least_to_its_most() -> None:
    speech = SynthesizedSpeech(np.array([[-4.0, 0.0], [1.0, 6.0]]))
    about = told(ViewerData.from_weights({"a": diagonal(2, 3)}, speech=speech))["speech"]
    assert list(base64.b64decode(about["mel"])) == [0, 128, 102, 255]  # band by band, the lower first
    assert (about["shape"], about["frames_per_step"], about["wav"]) == ([2, 2], 1, None)


def test_the_sound_and_the_style_are_told() -> None:
    about = told(said(KOREAN))
    assert base64.b64decode(about["speech"]["wav"])[:4] == b"RIFF"
    assert about["style"]["names"] == list(TOKENS)
    assert about["style"]["weights"] == [[0.1, 0.2, 0.065, 0.5, 0.135], [0.3, 0.1, 0.3, 0.2, 0.1]]
    assert (about["style"]["slider_limit"], about["style"]["can_resynthesize"]) == (1.0, True)
    assert told(said(live=False))["style"]["can_resynthesize"] is False


def test_sliders_reach_what_is_already_farther_out() -> None:
    assert told(said(weights=[1.5, 0, 0, 0, 0]))["style"]["slider_limit"] == 1.5
    one = StyleTokenWeights(("a", "b"), np.array([0.25, 0.75]), slider_range=2)
    assert one.weights.shape == (1, 2)
    assert one.mean_weights.tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SynthesizedSpeech(np.zeros(80)), "frames, bands"),
        (lambda: SynthesizedSpeech(np.zeros((0, 80))), "frames, bands"),
        (lambda: SynthesizedSpeech(np.zeros((4, 80)), frames_per_step=0), "step=0"),
        (lambda: SynthesizedSpeech(np.zeros((4, 80)), frame_seconds=float("nan")), "seconds=nan"),
        (lambda: SynthesizedSpeech(np.full((4, 80), np.nan)), "NaN"),
        (lambda: SynthesizedSpeech(np.zeros((4, 80)), wav_bytes=b"OggS"), "not a WAV file"),
        (lambda: SynthesizedSpeech(np.zeros((4, 80)), wav_bytes=wav(sweep(4))[:30]), "not a WAV file"),
        (
            lambda: SynthesizedSpeech(np.zeros((4, 80)), SECONDS, wav(sweep(40))),
            r"0\.50 s came with frames of 0\.05 s",
        ),
        (lambda: StyleTokenWeights((), np.zeros((1, 0))), "at least one"),
        (lambda: StyleTokenWeights(("a", "b"), np.zeros((2, 3))), r"expected \(heads, 2\)"),
        (lambda: StyleTokenWeights(("a", "b"), np.zeros((1, 2, 2))), r"expected \(heads, 2\)"),
        (lambda: StyleTokenWeights(("a",), np.array([np.inf])), "infinity"),
        (lambda: StyleTokenWeights(("a",), np.array([1.0]), slider_range=0), "slider_range=0"),
        (
            lambda: ViewerData.from_weights(
                {"a": diagonal(5, 3)}, speech=SynthesizedSpeech(np.ones((8, 2)), frames_per_step=2)
            ),
            "with 4",
        ),
        (
            lambda: ViewerData.from_weights({"a": diagonal(5, 3)}, style=StyleTokenWeights(("a",), np.ones(1))),
            "without speech",
        ),
        (
            lambda: ViewerData.from_weights(
                {"a": diagonal(5, 3)},
                speech=SynthesizedSpeech(np.ones((5, 2))),
                resynthesize=lambda _: said(),
            ),
            "without a style",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


# ----------------------------------------------------------------------------------------- said anew


def test_each_that_is_said_anew_has_a_number_of_its_own() -> None:
    stage = ViewerSession(said())
    whole = {"layer": 0, "head": 0, "rows": (0, 3), "cols": (0, 4)}
    before = stage.answer_request(TileRequest(**whole))
    first, second = (stage.resynthesize(WISH)["data"][0] for _ in range(2))
    assert (first["number"], second["number"]) == (1, 2)
    assert first["layers"][0]["shape"] == [80, 19]  # half as long again: 53 * 1.5
    assert first["style"]["weights"] == [WISH["weights"]] * 2
    assert first["style"]["can_resynthesize"]
    assert stage.answer_request(TileRequest(**whole)) == before
    assert unpack(stage.answer_request(TileRequest(**whole, data_index=2))).shape == (3, 4)
    assert stage.build_manifest()["data"][0]["layers"][0]["shape"] == [53, 19]


def test_only_the_last_are_kept() -> None:
    stage = ViewerSession(said())
    numbers = [stage.resynthesize(WISH)["data"][0]["number"] for _ in range(MAX_RESYNTHESES + 1)]
    whole = {"layer": 0, "head": 0, "rows": (0, 3), "cols": (0, 4)}
    with pytest.raises(InputError, match="move a slider"):
        stage.answer_request(TileRequest(**whole, data_index=numbers[0]))
    assert stage.answer_request(TileRequest(**whole, data_index=numbers[-1]))
    with pytest.raises(InputError, match="there are 1"):
        stage.answer_request(TileRequest(**whole, data_index=numbers[-1] + 1))


def test_a_scene_without_a_style_was_said_as_asked() -> None:
    plain = replace(said(), style=None, resynthesize=None)
    scene = replace(said(), resynthesize=lambda weights: plain)
    anew = ViewerSession([said(), scene]).resynthesize({**WISH, "data": 1})["data"][0]
    assert anew["style"]["weights"] == [WISH["weights"]]
    assert anew["number"] == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": 1}, "expected 0 to 0"),
        ({"data": "0"}, "expected 0 to 0"),
        ({"weights": None}, "list of 5"),
        ({"weights": "01234"}, "list of 5"),
        ({"weights": [0.1] * 4}, "list of 5"),
        ({"weights": [0, 0, 0, 0, 1.5]}, "token 4; expected a number from -1 to 1"),
        ({"weights": [0, 0, 0, 0, float("nan")]}, "nan came for token 4"),
        ({"weights": [0, "1", 0, 0, 0]}, "1 came for token 1"),
        ({"weights": [True, 0, 0, 0, 0]}, "True came for token 0"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(change: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        ViewerSession(said()).resynthesize({**WISH, **change})
    with pytest.raises(InputError, match="no style tokens whose"):
        ViewerSession(said(live=False)).resynthesize({**WISH, **change, "data": 0})


def test_without_a_head_it_is_said_anew_without_it() -> None:
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 5, 4)

    def look(weights: list[float] | None = None) -> ViewerData:
        heard = model(x, x, x)[0][0].detach()
        return ViewerData.from_weights(
            {"a": diagonal(5, 3)},
            speech=SynthesizedSpeech(heard.numpy()),
            style=StyleTokenWeights(("t",), np.ones(1)),
            resynthesize=look,
        )

    stage = ViewerSession(compare_with_ablation(model, {"MultiheadAttention": [0]}, look))
    assert stage.viewer_data[1].resynthesize is not None
    before, after = (stage.resynthesize({"data": n, "weights": [0.5]})["data"][0] for n in range(2))
    first, second = (told(scene) for scene in stage.viewer_data)
    assert before["speech"]["mel"] == first["speech"]["mel"] != second["speech"]["mel"]
    assert after["speech"]["mel"] == second["speech"]["mel"]


# ----------------------------------------------------------------------------------------- on a page


def test_a_page_says_it_anew_and_serves_its_tiles() -> None:
    with TestClient(page.build_app(said(), can_resynthesize=True)) as client:
        assert "media-src blob:" in client.get("/").headers["content-security-policy"]
        got = client.post("/resynthesize", json=WISH)
        assert got.status_code == 200
        scene = got.json()["data"][0]
        assert scene["layers"][0]["shape"] == [80, 19]
        tile = {"data": scene["number"], "layer": 0, "head": 0, "rows": "0,80", "cols": "0,19"}
        cells = unpack(client.get("/tiles", params=tile).content)
        assert np.allclose(cells, diagonal(80, 19), atol=1e-3)
        assert client.get("/resynthesize").status_code == 405
    with TestClient(page.build_app(said())) as client:  # unless whoever serves it wants that
        assert client.get("/manifest.json").json()["data"][0]["style"]["can_resynthesize"] is False
        assert client.post("/resynthesize", json=WISH).status_code == 400


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (json.dumps(WISH), "text/plain", "application/json"),  # which any page may send without being asked
        ("{", "application/json", "not JSON"),
        ("[" * 50_000, "application/json", "not JSON"),
        ("[1]", "application/json", "expected an object"),
        ("[" + "1," * 40_000, "application/json", "65536 bytes"),
        ('{"weights": [1, 2]}', "application/json", "list of 5"),
    ],
)
def test_a_page_refuses_what_is_no_wish(body: str, kind: str, says: str) -> None:
    with TestClient(page.build_app(said(), can_resynthesize=True)) as client:
        got = client.post("/resynthesize", content=body, headers={"content-type": kind})
        assert got.status_code == 400
        assert says in got.json()["error"]


def test_one_is_said_at_a_time_and_few_wait() -> None:
    go, inside, most = threading.Event(), 0, 0
    begun = threading.Semaphore(0)

    def slowly(weights: list[float]) -> ViewerData:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        begun.release()
        assert go.wait(20)
        inside -= 1
        return anew

    anew = said()
    codes: list[int] = []
    with TestClient(page.build_app(replace(said(), resynthesize=slowly), can_resynthesize=True)) as client:
        asking = [
            threading.Thread(target=lambda: codes.append(client.post("/resynthesize", json=WISH).status_code))
            for _ in range(page.MAX_WAITING)
        ]
        for thread in asking:
            thread.start()
        assert begun.acquire(timeout=20)
        for _ in range(200):  # until all of them wait
            late = client.post("/resynthesize", content="", headers={"content-type": "application/json"})
            if late.status_code == 503:
                break
            threading.Event().wait(0.02)
        assert late.status_code == 503
        assert "again in a moment" in late.json()["error"]
        go.set()
        for thread in asking:
            thread.join(20)
        assert codes == [200] * page.MAX_WAITING
        assert most == 1
        assert client.post("/resynthesize", json=WISH).status_code == 200


# ----------------------------------------------------------------------------------------- elsewhere


def test_a_saved_file_says_nothing_anew_but_can_be_played() -> None:
    text = html_file.render_html(said(KOREAN))
    assert "media-src blob:" in text
    start = text.index('id="manifest">') + len('id="manifest">')
    scene = json.loads(text[start : text.index("</script>", start)])["data"][0]
    assert scene["style"]["can_resynthesize"] is False
    assert base64.b64decode(scene["speech"]["wav"])[:4] == b"RIFF"


def test_a_layer_that_does_not_speak_is_shown_without_the_speech(tmp_path: Path) -> None:
    scene = said("ab")
    inner = ViewerLayer("encoder", "self", (2, 2), (0,), ArrayWeightSource(np.eye(2)), ["a", "b"], ["a", "b"])
    both = replace(scene, layers=(*scene.layers, inner))
    text = view_writer.save_view(both, tmp_path / "a.html", layer="encoder").read_text(encoding="utf-8")
    assert '"speech":null' in text
    text = view_writer.save_view(both, tmp_path / "a.html", layer="decoder*").read_text(encoding="utf-8")
    assert '"speech":{' in text
    assert merge_into_words(both).speech is not None


def test_a_notebook_says_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget", reason='the notebook needs anywidget: pip install "jumok[look]"')
    from jumok.look.viewer.widget import ViewerWidget

    sent: list[tuple[Any, Any]] = []
    monkeypatch.setattr(ViewerWidget, "send", lambda self, content, buffers=None: sent.append((content, buffers)))
    widget = ViewerWidget(said())
    widget._handle_custom_msg({"id": "1", "resynthesize": WISH}, [])
    assert sent[0][0]["id"] == "1"
    assert sent[0][0]["manifest"]["data"][0]["number"] == 1
    ask = {"data": 1, "layer": 0, "head": 0, "rows": [0, 80], "cols": [0, 19]}
    widget._handle_custom_msg({"id": "2", "request": ask}, [])
    assert unpack(sent[1][1][0]).shape == (80, 19)
    widget._handle_custom_msg({"id": "3", "resynthesize": {"weights": []}}, [])
    assert "list of 5" in sent[2][0]["error"]

    def broken(weights: list[float]) -> ViewerData:
        raise RuntimeError("out of memory")

    widget = ViewerWidget(replace(said(), resynthesize=broken))
    with pytest.raises(RuntimeError):  # told in full where faults are, and the viewer need not wait
        widget._handle_message(None, {"id": "4", "resynthesize": WISH}, [])
    assert sent[3][0] == {"id": "4", "error": "out of memory"}


def test_the_sound_is_as_long_as_its_frames() -> None:
    speech = said().speech
    assert speech is not None
    assert speech.num_frames * HOP == len(sweep(speech.num_frames))
