"""Whatever JSON comes: an answer or a refusal, never a fault of the server; and then it still answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from jumok.serve.app import app
from jumok.serve.limits import Limits

# Lone surrogates, control characters and all: JSON can write them.
texts = st.one_of(
    st.text(max_size=30),
    st.text(st.characters(exclude_categories=()), max_size=12),
    st.sampled_from(
        ["[MASK]", "one [MASK] two", "a ||| b", "Anna\tlives", "{", '{"question": 1}', "we walk"]
    ),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-2, 12), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=5,
)
FIELDS = ["text", "pair", "question", "context", "model", "beam", "n_best", "alignments"]
fields = st.one_of(st.sampled_from(FIELDS), texts)
# Some of what is asked is meant well.
good = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "pair": texts,
        "question": texts,
        "context": texts,
        "n_best": st.integers(1, 12),
        "beam": st.integers(1, 3),
        "model": st.sampled_from([None, "pairs", "tag"]),
    },
)
bodies = st.one_of(good, st.dictionaries(fields, values, max_size=4), values)
paths = st.sampled_from(["translate", "translate/stream", "classify", "tag", "answer", "fill", "attend/tag"])
GOOD = {"/tag": {"text": "Anna"}, "/fill": {"text": "one [MASK]"}}


@pytest.fixture(scope="module")
def client(services: dict[str, Any]) -> Iterator[TestClient]:
    with TestClient(app(services, Limits(wait=0)), raise_server_exceptions=False) as client:
        yield client


@settings(max_examples=150)
@given(path=paths, body=bodies)
def test_whatever_comes_is_answered_or_refused(client: TestClient, path: str, body: Any) -> None:
    sent = json.dumps(body).encode()
    got = client.post(f"/{path}", content=sent, headers={"Content-Type": "application/json"})
    assert got.status_code in (200, 400, 404, 413, 422), (path, sent, got.text)
    if got.status_code != 200:
        assert got.json()["error"]
    elif path.endswith("stream"):
        assert "event: done" in got.text


def test_and_then_it_still_answers(client: TestClient) -> None:
    for path, body in GOOD.items():
        assert client.post(path, json=body).status_code == 200
