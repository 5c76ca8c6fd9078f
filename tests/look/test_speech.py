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
from jumok.look import html, page, show
from jumok.look.scene import Arrays, Layer, Scene, Speech, Style, manifest
from jumok.look.stage import KEPT, Stage
from jumok.look.tiles import Request, unpack
from jumok.look.without import before_and_after
from jumok.look.words import in_words

sys.path.insert(0, str(Path(__file__).parent))
from speech_scenes import HOP, KOREAN, SECONDS, TOKENS, diagonal, said, sweep, wav

WISH = {"scene": 0, "weights": [0.0, 0.5, 0.0, 0.0, -0.25]}


def told(scene: Scene) -> dict[str, Any]:
    found: dict[str, Any] = manifest([scene])["scenes"][0]
    return found


# ----------------------------------------------------------------------------------------- what there is


def test_frames_steps_and_seconds() -> None:
    speech = Speech(torch.zeros(7, 3), seconds=0.5, step=2)  # type: ignore[arg-type]
    assert (speech.frames, speech.steps, speech.duration) == (7, 4, 3.5)
    assert speech.mel.dtype == np.float32


def test_a_spectrogram_goes_from_its_least_to_its_most() -> None:
    speech = Speech(np.array([[-4.0, 0.0], [1.0, 6.0]]))
    about = told(Scene.of_weights({"a": diagonal(2, 3)}, speech=speech))["speech"]
    assert list(base64.b64decode(about["mel"])) == [0, 128, 102, 255]  # band by band, the lower first
    assert (about["shape"], about["step"], about["wave"]) == ([2, 2], 1, None)


def test_the_sound_and_the_style_are_told() -> None:
    about = told(said(KOREAN))
    assert base64.b64decode(about["speech"]["wave"])[:4] == b"RIFF"
    assert about["style"]["names"] == list(TOKENS)
    assert about["style"]["weights"] == [[0.1, 0.2, 0.065, 0.5, 0.135], [0.3, 0.1, 0.3, 0.2, 0.1]]
    assert (about["style"]["scale"], about["style"]["live"]) == (1.0, True)
    assert told(said(live=False))["style"]["live"] is False


def test_sliders_reach_what_is_already_farther_out() -> None:
    assert told(said(weights=[1.5, 0, 0, 0, 0]))["style"]["scale"] == 1.5
    one = Style(("a", "b"), np.array([0.25, 0.75]), scale=2)
    assert one.weights.shape == (1, 2)
    assert one.mean.tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Speech(np.zeros(80)), "frames, bands"),
        (lambda: Speech(np.zeros((0, 80))), "frames, bands"),
        (lambda: Speech(np.zeros((4, 80)), step=0), "step=0"),
        (lambda: Speech(np.zeros((4, 80)), seconds=float("nan")), "seconds=nan"),
        (lambda: Speech(np.full((4, 80), np.nan)), "NaN"),
        (lambda: Speech(np.zeros((4, 80)), wave=b"OggS"), "no WAV file"),
        (lambda: Speech(np.zeros((4, 80)), wave=wav(sweep(4))[:30]), "no WAV file"),
        (lambda: Speech(np.zeros((4, 80)), SECONDS, wav(sweep(40))), r"0\.50 s came with frames of 0\.05 s"),
        (lambda: Style((), np.zeros((1, 0))), "at least one"),
        (lambda: Style(("a", "b"), np.zeros((2, 3))), r"expected \(heads, 2\)"),
        (lambda: Style(("a", "b"), np.zeros((1, 2, 2))), r"expected \(heads, 2\)"),
        (lambda: Style(("a",), np.array([np.inf])), "infinity"),
        (lambda: Style(("a",), np.array([1.0]), scale=0), "scale=0"),
        (lambda: Scene.of_weights({"a": diagonal(5, 3)}, speech=Speech(np.ones((8, 2)), step=2)), "with 4"),
        (lambda: Scene.of_weights({"a": diagonal(5, 3)}, style=Style(("a",), np.ones(1))), "without speech"),
        (
            lambda: Scene.of_weights(
                {"a": diagonal(5, 3)}, speech=Speech(np.ones((5, 2))), retell=lambda _: said()
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
    stage = Stage(said())
    whole = {"layer": 0, "head": 0, "rows": (0, 3), "cols": (0, 4)}
    before = stage.answer(Request(**whole))
    first, second = (stage.retell(WISH)["scenes"][0] for _ in range(2))
    assert (first["number"], second["number"]) == (1, 2)
    assert first["layers"][0]["shape"] == [80, 19]  # half as long again: 53 * 1.5
    assert first["style"]["weights"] == [WISH["weights"]] * 2
    assert first["style"]["live"]
    assert stage.answer(Request(**whole)) == before
    assert unpack(stage.answer(Request(**whole, scene=2))).shape == (3, 4)
    assert stage.manifest()["scenes"][0]["layers"][0]["shape"] == [53, 19]


def test_only_the_last_are_kept() -> None:
    stage = Stage(said())
    numbers = [stage.retell(WISH)["scenes"][0]["number"] for _ in range(KEPT + 1)]
    whole = {"layer": 0, "head": 0, "rows": (0, 3), "cols": (0, 4)}
    with pytest.raises(InputError, match="move a slider"):
        stage.answer(Request(**whole, scene=numbers[0]))
    assert stage.answer(Request(**whole, scene=numbers[-1]))
    with pytest.raises(InputError, match="there are 1"):
        stage.answer(Request(**whole, scene=numbers[-1] + 1))


def test_a_scene_without_a_style_was_said_as_asked() -> None:
    plain = replace(said(), style=None, retell=None)
    scene = replace(said(), retell=lambda weights: plain)
    anew = Stage([said(), scene]).retell({**WISH, "scene": 1})["scenes"][0]
    assert anew["style"]["weights"] == [WISH["weights"]]
    assert anew["number"] == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scene": 1}, "expected 0 to 0"),
        ({"scene": "0"}, "expected 0 to 0"),
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
        Stage(said()).retell({**WISH, **change})
    with pytest.raises(InputError, match="no style tokens that can be given"):
        Stage(said(live=False)).retell({**WISH, **change, "scene": 0})


def test_without_a_head_it_is_said_anew_without_it() -> None:
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 5, 4)

    def look(weights: list[float] | None = None) -> Scene:
        heard = model(x, x, x)[0][0].detach()
        return Scene.of_weights(
            {"a": diagonal(5, 3)}, speech=Speech(heard.numpy()), style=Style(("t",), np.ones(1)), retell=look
        )

    stage = Stage(before_and_after(model, {"MultiheadAttention": [0]}, look))
    assert stage.scenes[1].retell is not None
    before, after = (stage.retell({"scene": n, "weights": [0.5]})["scenes"][0] for n in range(2))
    first, second = (told(scene) for scene in stage.scenes)
    assert before["speech"]["mel"] == first["speech"]["mel"] != second["speech"]["mel"]
    assert after["speech"]["mel"] == second["speech"]["mel"]


# ----------------------------------------------------------------------------------------- on a page


def test_a_page_says_it_anew_and_serves_its_tiles() -> None:
    with TestClient(page.app(said(), live=True)) as client:
        assert "media-src blob:" in client.get("/").headers["content-security-policy"]
        got = client.post("/retold", json=WISH)
        assert got.status_code == 200
        scene = got.json()["scenes"][0]
        assert scene["layers"][0]["shape"] == [80, 19]
        tile = {"scene": scene["number"], "layer": 0, "head": 0, "rows": "0,80", "cols": "0,19"}
        cells = unpack(client.get("/tiles", params=tile).content)
        assert np.allclose(cells, diagonal(80, 19), atol=1e-3)
        assert client.get("/retold").status_code == 405
    with TestClient(page.app(said())) as client:  # unless whoever serves it wants that
        assert client.get("/manifest.json").json()["scenes"][0]["style"]["live"] is False
        assert client.post("/retold", json=WISH).status_code == 400


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
    with TestClient(page.app(said(), live=True)) as client:
        got = client.post("/retold", content=body, headers={"content-type": kind})
        assert got.status_code == 400
        assert says in got.json()["error"]


def test_one_is_said_at_a_time_and_few_wait() -> None:
    go, inside, most = threading.Event(), 0, 0
    begun = threading.Semaphore(0)

    def slowly(weights: list[float]) -> Scene:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        begun.release()
        assert go.wait(20)
        inside -= 1
        return anew

    anew = said()
    codes: list[int] = []
    with TestClient(page.app(replace(said(), retell=slowly), live=True)) as client:
        asking = [
            threading.Thread(target=lambda: codes.append(client.post("/retold", json=WISH).status_code))
            for _ in range(page.MOST_WAITING)
        ]
        for thread in asking:
            thread.start()
        assert begun.acquire(timeout=20)
        for _ in range(200):  # until all of them wait
            late = client.post("/retold", content="", headers={"content-type": "application/json"})
            if late.status_code == 503:
                break
            threading.Event().wait(0.02)
        assert late.status_code == 503
        assert "again in a moment" in late.json()["error"]
        go.set()
        for thread in asking:
            thread.join(20)
        assert codes == [200] * page.MOST_WAITING
        assert most == 1
        assert client.post("/retold", json=WISH).status_code == 200


# ----------------------------------------------------------------------------------------- elsewhere


def test_a_saved_file_says_nothing_anew_but_can_be_played() -> None:
    text = html.render(said(KOREAN))
    assert "media-src blob:" in text
    start = text.index('id="manifest">') + len('id="manifest">')
    scene = json.loads(text[start : text.index("</script>", start)])["scenes"][0]
    assert scene["style"]["live"] is False
    assert base64.b64decode(scene["speech"]["wave"])[:4] == b"RIFF"


def test_a_layer_that_does_not_speak_is_shown_without_the_speech(tmp_path: Path) -> None:
    scene = said("ab")
    inner = Layer("encoder", "self", (2, 2), (0,), Arrays(np.eye(2)), ["a", "b"], ["a", "b"])
    both = replace(scene, layers=(*scene.layers, inner))
    text = show.save(both, tmp_path / "a.html", layer="encoder").read_text(encoding="utf-8")
    assert '"speech":null' in text
    text = show.save(both, tmp_path / "a.html", layer="decoder*").read_text(encoding="utf-8")
    assert '"speech":{' in text
    assert in_words(both).speech is not None


def test_a_notebook_says_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget", reason='the notebook needs anywidget: pip install "jumok[look]"')
    from jumok.look.widget import Viewer

    sent: list[tuple[Any, Any]] = []
    monkeypatch.setattr(Viewer, "send", lambda self, content, buffers=None: sent.append((content, buffers)))
    widget = Viewer(said())
    widget._handle_custom_msg({"id": "1", "retell": WISH}, [])
    assert sent[0][0]["id"] == "1"
    assert sent[0][0]["manifest"]["scenes"][0]["number"] == 1
    ask = {"scene": 1, "layer": 0, "head": 0, "rows": [0, 80], "cols": [0, 19]}
    widget._handle_custom_msg({"id": "2", "request": ask}, [])
    assert unpack(sent[1][1][0]).shape == (80, 19)
    widget._handle_custom_msg({"id": "3", "retell": {"weights": []}}, [])
    assert "list of 5" in sent[2][0]["error"]

    def broken(weights: list[float]) -> Scene:
        raise RuntimeError("out of memory")

    widget = Viewer(replace(said(), retell=broken))
    with pytest.raises(RuntimeError):  # told in full where faults are, and the viewer need not wait
        widget._asked(None, {"id": "4", "retell": WISH}, [])
    assert sent[3][0] == {"id": "4", "error": "out of memory"}


def test_the_sound_is_as_long_as_its_frames() -> None:
    speech = said().speech
    assert speech is not None
    assert speech.frames * HOP == len(sweep(speech.frames))
