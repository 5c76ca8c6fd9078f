"""Tests of the viewer as a web page."""

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

WEIGHTS = np.random.default_rng(0).random((3, 5, 7), np.float32)
PARAMETERS = {"layer": "0", "head": "1", "rows": "0,5", "cols": "0,7"}


@pytest.fixture
def client() -> Any:
    data = ViewerData.from_weights({"decoder": WEIGHTS}, row_labels=list("abcde"), title="t")
    with TestClient(page.build_app(data)) as client:
        yield client


def test_page_and_its_files_are_served(client: Any) -> None:
    page_response = client.get("/")
    assert page_response.status_code == 200
    assert page_response.headers["content-type"] == "text/html; charset=utf-8"
    policy = page_response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in page_response.text.replace('http-equiv="', "")
    assert client.get("/viewer.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/viewer.css").headers["content-type"] == "text/css; charset=utf-8"
    assert client.get("/manifest.json").json()["data"][0]["layers"][0]["shape"] == [5, 7]


def test_tiles_equal_the_weights(client: Any) -> None:
    response = client.get("/tiles", params=PARAMETERS)
    assert response.headers["content-type"] == "application/octet-stream"
    assert np.allclose(unpack(response.content), WEIGHTS[1], rtol=1e-3)
    mean = client.get("/tiles", params={**PARAMETERS, "head": "mean", "quantity": "weights"})
    assert np.allclose(unpack(mean.content), WEIGHTS.mean(0), atol=1e-6)
    assert client.get("/tiles", params=PARAMETERS).content == response.content  # from the cache


@pytest.mark.parametrize(
    ("name", "value"),
    [("layer", "../../etc/passwd"), ("layer", "1"), ("head", "x"), ("rows", "0,1e9"), ("rows", "0,6"),
     ("cols", "0,99999999999999999999"), ("size", "1000000"), ("quantity", "file"), ("data", "2")],
)  # fmt: skip
def test_invalid_tile_request_gets_status_400(client: Any, name: str, value: str) -> None:
    response = client.get("/tiles", params={**PARAMETERS, name: value})
    assert response.status_code == 400
    assert name in response.json()["error"]


def test_other_paths_are_not_served(client: Any) -> None:
    for path in ("/../pyproject.toml", "/viewer.py", "/static/viewer.js", "/%2e%2e/errors.py", "/tiles/../../x"):
        assert client.get(path).status_code == 404
    assert client.post("/tiles", params=PARAMETERS).status_code == 405


def test_app_can_be_mounted_under_a_prefix() -> None:
    data = ViewerData.from_weights({"decoder": WEIGHTS})
    client = TestClient(Starlette(routes=[Mount("/models/look", page.build_app(data))]))
    page_response = client.get("/models/look/")
    assert 'src="/models/look/viewer.js"' in page_response.text
    assert 'data-base="/models/look"' in page_response.text
    assert client.get("/models/look/tiles", params=PARAMETERS).status_code == 200


def test_tiles_are_computed_one_at_a_time_and_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    class CountingSource(ArrayWeightSource):
        now = most = calls = 0

        def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> Any:
            CountingSource.now += 1
            CountingSource.calls += 1
            CountingSource.most = max(CountingSource.most, CountingSource.now)
            pooled = super().pooled_map(head, rows, cols, size)
            CountingSource.now -= 1
            return pooled

    monkeypatch.setattr(page, "TILE_CACHE_BYTES", 500)
    data = ViewerData((ViewerLayer("a", "self", (5, 7), (0, 1, 2), CountingSource(WEIGHTS)),))
    with TestClient(page.build_app(data)) as client:
        threads = [
            threading.Thread(target=client.get, args=("/tiles",), kwargs={"params": {**PARAMETERS, "rows": f"{n},5"}})
            for n in range(5)
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert CountingSource.most == 1
        before = CountingSource.calls
        client.get("/tiles", params={**PARAMETERS, "rows": "4,5"})
        client.get("/tiles", params={**PARAMETERS, "rows": "4,5"})
        assert CountingSource.calls <= before + 1


def test_serve_answers_only_local_host_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    options_used: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: options_used.update(app=app, **options))
    page.serve(ViewerData.from_weights({"decoder": WEIGHTS}), port=8123, open_browser=False)
    assert (options_used["host"], options_used["port"]) == ("127.0.0.1", 8123)
    assert TestClient(options_used["app"], base_url="http://localhost:8123").get("/").status_code == 200
    assert TestClient(options_used["app"], base_url="http://127.0.0.1:8123").get("/").status_code == 200
    assert TestClient(options_used["app"], base_url="http://evil.example").get("/manifest.json").status_code == 400


@pytest.mark.parametrize("missing", ["starlette.applications", "uvicorn"])
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtra, match=r"pip install \"jumok\[look\]\""):
        page.serve(ViewerData.from_weights({"decoder": WEIGHTS}), open_browser=False)
