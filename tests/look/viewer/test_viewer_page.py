"""The page behind the viewer: what it answers, and what it refuses."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from jumok.errors import MissingExtra
from jumok.look.viewer import page
from jumok.look.viewer.tiles import unpack
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer

CELLS = np.random.default_rng(0).random((3, 5, 7), np.float32)
GOOD = {"layer": "0", "head": "1", "rows": "0,5", "cols": "0,7"}


@pytest.fixture
def client() -> Any:
    scene = ViewerData.from_weights({"decoder": CELLS}, row_labels=list("abcde"), title="t")
    with TestClient(page.build_app(scene)) as client:
        yield client


def test_the_page_and_its_parts_are_there(client: Any) -> None:
    start = client.get("/")
    assert start.status_code == 200
    assert start.headers["content-type"] == "text/html; charset=utf-8"
    policy = start.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in start.text.replace('http-equiv="', "")
    assert client.get("/viewer.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/viewer.css").headers["content-type"] == "text/css; charset=utf-8"
    assert client.get("/manifest.json").json()["data"][0]["layers"][0]["shape"] == [5, 7]


def test_tiles_are_the_weights(client: Any) -> None:
    got = client.get("/tiles", params=GOOD)
    assert got.headers["content-type"] == "application/octet-stream"
    assert np.allclose(unpack(got.content), CELLS[1], rtol=1e-3)
    mean = client.get("/tiles", params={**GOOD, "head": "mean", "quantity": "weights"})
    assert np.allclose(unpack(mean.content), CELLS.mean(0), atol=1e-6)
    assert client.get("/tiles", params=GOOD).content == got.content  # now from the shelf


@pytest.mark.parametrize(
    "change",
    [
        {"layer": "1"},
        {"layer": "-1"},
        {"layer": "../../etc/passwd"},
        {"layer": ""},
        {"head": "3"},
        {"head": "x"},
        {"rows": "-1,3"},
        {"rows": "3,3"},
        {"rows": "0,6"},
        {"rows": "0,1e9"},
        {"rows": "0"},
        {"cols": "0,99999999999999999999"},
        {"size": "0"},
        {"size": "1000000"},
        {"size": "-5"},
        {"quantity": "file"},
        {"data": "2"},
    ],
    ids=str,
)
def test_a_bad_request_is_answered_with_its_fault(client: Any, change: dict[str, str]) -> None:
    got = client.get("/tiles", params={**GOOD, **change})
    assert got.status_code == 400
    (name,) = change
    assert name in got.json()["error"]


def test_no_path_leads_out(client: Any) -> None:
    for path in (
        "/../pyproject.toml",
        "/viewer.py",
        "/static/viewer.js",
        "/%2e%2e/errors.py",
        "/tiles/../../x",
    ):
        assert client.get(path).status_code == 404
    assert client.post("/tiles", params=GOOD).status_code == 405


def test_it_can_be_mounted_under_a_prefix() -> None:
    scene = ViewerData.from_weights({"decoder": CELLS})
    client = TestClient(Starlette(routes=[Mount("/models/look", page.build_app(scene))]))
    start = client.get("/models/look/")
    assert 'src="/models/look/viewer.js"' in start.text
    assert 'data-base="/models/look"' in start.text
    assert client.get("/models/look/tiles", params=GOOD).status_code == 200


def test_tiles_are_computed_one_at_a_time_and_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(ArrayWeightSource):
        now = most = calls = 0

        def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> Any:
            Counted.now += 1
            Counted.calls += 1
            Counted.most = max(Counted.most, Counted.now)
            found = super().pooled_map(head, rows, cols, size)
            Counted.now -= 1
            return found

    monkeypatch.setattr(page, "TILE_CACHE_BYTES", 500)
    scene = ViewerData((ViewerLayer("a", "self", (5, 7), (0, 1, 2), Counted(CELLS)),))
    with TestClient(page.build_app(scene)) as client:
        threads = [
            threading.Thread(target=client.get, args=("/tiles",), kwargs={"params": {**GOOD, "rows": f"{n},5"}})
            for n in range(5)
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert Counted.most == 1
        before = Counted.calls
        client.get("/tiles", params={**GOOD, "rows": "4,5"})
        client.get("/tiles", params={**GOOD, "rows": "4,5"})
        assert Counted.calls <= before + 1


def test_alone_it_answers_only_to_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    started: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: started.update(app=app, **options))
    page.serve(ViewerData.from_weights({"decoder": CELLS}), port=8123, open_browser=False)
    assert (started["host"], started["port"]) == ("127.0.0.1", 8123)
    assert TestClient(started["app"], base_url="http://localhost:8123").get("/").status_code == 200
    assert TestClient(started["app"], base_url="http://127.0.0.1:8123").get("/").status_code == 200
    assert TestClient(started["app"], base_url="http://evil.example").get("/manifest.json").status_code == 400


@pytest.mark.parametrize("missing", ["starlette.applications", "uvicorn"])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtra, match=r"pip install \"jumok\[look\]\""):
        page.serve(ViewerData.from_weights({"decoder": CELLS}), open_browser=False)
