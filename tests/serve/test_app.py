"""Endpoints: equal to the predictors of jumok.load, clear errors for invalid requests, headers and authorization."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from running_server import EchoService
from starlette.testclient import TestClient

from jumok.inference.engines import RunChangedError
from jumok.look.viewer.tiles import unpack
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.tasks.translate.predictor import TranslationOptions

pytestmark = pytest.mark.long


TEXT = "the king sleeps because it snows in busan"


@pytest.fixture(scope="module")
def client(services: dict[str, Any]) -> Iterator[TestClient]:
    with TestClient(build_app(services), raise_server_exceptions=False) as client:
        yield client


# ------------------------------------------------------------------------------------------- predictions


def test_translate(client: TestClient, predictors: dict[str, Any]) -> None:
    response = client.post("/translate", json={"text": TEXT, "alignments": True})
    assert response.status_code == 200
    expected = predictors["translate"].translate(TEXT)
    body = response.json()
    assert body["translation"] == expected.translation
    assert body["target_words"] == expected.target_words
    assert body["source_words"] == TEXT.split()
    assert body["score"] == pytest.approx(expected.score)
    assert body["finished"] == expected.finished
    assert body["alignment"] == [list(link) for link in expected.alignment]
    assert body["alternatives"] == []
    plain = client.post("/translate", json={"text": TEXT}).json()
    assert plain == body | {"alignment": None, "score": pytest.approx(body["score"])}


def test_translate_with_beam_size_and_n_best(client: TestClient, predictors: dict[str, Any]) -> None:
    response = client.post("/translate", json={"text": TEXT, "beam_size": 3, "n_best": 2}).json()
    expected = predictors["translate"].translate(TEXT, TranslationOptions(beam_size=3, n_best=2))
    assert [response["translation"], *(other["translation"] for other in response["alternatives"])] == [
        expected.translation,
        expected.alternatives[0].translation,
    ]
    greedy = client.post("/translate", json={"text": TEXT, "beam_size": 1}).json()
    assert greedy["translation"] == (
        predictors["translate"].translate(TEXT, TranslationOptions(beam_size=1)).translation
    )


@pytest.mark.parametrize("beam", [1, 3])
def test_translation_is_streamed(client: TestClient, predictors: dict[str, Any], beam: int) -> None:
    with client.stream("POST", "/translate/stream", json={"text": TEXT, "beam_size": beam}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(response.iter_text()).strip().split("\n\n")
    events = [(block.split("\n")[0], json.loads(block.split("\n")[1].removeprefix("data: "))) for block in blocks]
    assert [name for name, _ in events] == ["event: text"] * (len(events) - 1) + ["event: done"]
    expected = predictors["translate"].translate(TEXT, TranslationOptions(beam_size=beam))
    assert events[-1][1]["translation"] == expected.translation
    if beam == 1:
        assert all(expected.translation.startswith(body["text"].strip()) for _, body in events[:-1])


def test_classify(client: TestClient, predictors: dict[str, Any]) -> None:
    response = client.post("/classify", json={"text": "the film ||| was nice"}).json()  # one text, not a pair
    expected = predictors["classify"].classify("the film ||| was nice")
    assert response["label"] == expected.label
    assert [(item["label"], pytest.approx(item["probability"])) for item in response["classes"]] == list(
        expected.classes
    )
    assert response["value"] is None


def test_classify_a_pair_with_a_named_model(client: TestClient, predictors: dict[str, Any]) -> None:
    request = {"text": "the sad\tstory", "text_pair": "a happy ||| film", "model": "pairs"}
    response = client.post("/classify", json=request).json()
    expected = predictors["pairs"].classify(request["text"], request["text_pair"])
    assert (response["label"], response["probability"]) == (expected.label, pytest.approx(expected.classes[0][1]))
    alone = client.post("/classify", json={"text": "x", "model": "pairs"})
    assert (alone.status_code, alone.json()["error"]) == (422, "this model reads two texts, but got one")
    both = client.post("/classify", json={"text": "x", "text_pair": "y"})
    assert (both.status_code, both.json()["error"]) == (422, "this model reads one text, but got two")


def test_tag(client: TestClient, predictors: dict[str, Any]) -> None:
    text = "the story: Carla Maria was a New York. 😀 Anna"
    response = client.post("/tag", json={"text": text}).json()
    expected = predictors["tag"].tag(text)
    assert (response["words"], response["tags"]) == (list(expected.words), list(expected.tags))
    assert [entity["type"] for entity in response["entities"]] == [entity.type for entity in expected.entities]
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in response["entities"])


def test_answer(client: TestClient, predictors: dict[str, Any]) -> None:
    question, context = "who?", 'the {"film"} was\tAnna lives in Seoul ||| ' + "a very long story " * 20
    response = client.post("/answer", json={"question": question, "context": context, "n_best": 3}).json()
    expected = predictors["answer"].answer(question, context, 3)
    spans = [response, *response["alternatives"]]
    assert [(span["answer"], span["start"]) for span in spans] == [
        (span.text, span.start) for span, _ in expected.answers
    ]
    assert [span["probability"] for span in spans] == pytest.approx(
        [probability for _, probability in expected.answers]
    )
    assert all(context[span["start"] : span["end"]] == span["answer"] for span in spans)


def test_fill_mask(client: TestClient, predictors: dict[str, Any]) -> None:
    response = client.post("/fill-mask", json={"text": "one [MASK] three\nfour [MASK]", "n_best": 2}).json()
    expected = predictors["fill-mask"].fill("one [MASK] three four [MASK]", 2)
    assert response["filled_text"] == expected.filled_text
    assert [[item["word"] for item in items] for items in response["mask_predictions"]] == [
        [word for word, _ in items] for items in expected.mask_predictions
    ]
    assert response["next_sentence_probability"] is None
    pair = client.post("/fill-mask", json={"text": "one two", "text_pair": "three four"}).json()
    assert pair["next_sentence_probability"] == pytest.approx(
        predictors["fill-mask"].fill("one two ||| three four").next_sentence_probability
    )
    single = client.post("/fill-mask", json={"text": "one [MASK]", "n_best": 1}).json()
    assert [len(items) for items in single["mask_predictions"]] == [1]
    hidden = client.post("/fill-mask", json={"text": "one two"})
    assert hidden.status_code == 422
    assert hidden.json()["error"].startswith("the text has no mask: write [MASK]")


def test_classify_by_a_hierarchical_model(client: TestClient, predictors: dict[str, Any]) -> None:
    text = "The soup was awful. Overall the museum was splendid."
    response = client.post("/classify", json={"text": text, "model": "words"}).json()
    expected = predictors["words"].classify(text)
    assert (response["label"], response["probability"]) == (expected.label, pytest.approx(expected.classes[0][1]))


BODIES = {
    "translate": {"text": TEXT, "beam_size": 1},
    "classify": {"text": "the film was nice"},
    "pairs": {"text": "the film", "text_pair": "was nice", "model": "pairs"},
    "words": {"text": "The soup was awful.", "model": "words"},
    "tag": {"text": "Anna was in Paris"},
    "answer": {"question": "who?", "context": "Anna lives in Seoul"},
    "fill-mask": {"text": "one [MASK] three"},
}


@pytest.mark.parametrize("name", BODIES)
def test_attend_returns_the_response_and_an_attention_page(client: TestClient, name: str) -> None:
    task = "classify" if name in ("pairs", "words") else name
    response = client.post(f"/attend/{task}", json=BODIES[name])
    assert response.status_code == 200, response.text
    body = response.json()
    plain = client.post(f"/{task}", json=BODIES[name]).json()
    assert set(body["prediction"]) == set(plain)
    assert body["prediction"].get("translation") == plain.get("translation")
    page = client.get(body["attention_url"])
    assert page.headers["content-type"].startswith("text/html")
    if name == "translate":  # the page shows the translation of the response
        assert body["prediction"]["translation"] in client.get(f"{body['attention_url']}manifest.json").json()["title"]
    assert f"{body['attention_url']}viewer.js" in page.text
    manifest = client.get(f"{body['attention_url']}manifest.json").json()
    rows, cols = manifest["data"][0]["layers"][0]["shape"]
    tile = {"layer": 0, "head": 0, "rows": f"0,{rows}", "cols": f"0,{cols}"}
    weights = unpack(client.get(f"{body['attention_url']}tiles", params={**tile, "quantity": "weights"}).content)
    assert weights.shape == (rows, cols)
    assert np.allclose(weights.sum(1), 1, atol=1e-4)
    assert client.get(f"{body['attention_url']}tiles", params={**tile, "layer": 99}).status_code == 400


def test_only_the_latest_attention_pages_are_kept(services: dict[str, Any]) -> None:
    with TestClient(build_app({"tag": services["tag"]}, ServerLimits(max_attention_pages=2))) as client:
        pages = [client.post("/attend/tag", json={"text": "Anna"}).json()["attention_url"] for _ in range(3)]
        assert len(set(pages)) == 3
        assert [client.get(page).status_code for page in pages] == [404, 200, 200]
        assert client.get("/look/../../etc/passwd").status_code == 404
        assert "error" in client.get("/look/").json()
    with TestClient(build_app({"tag": services["tag"]}, ServerLimits(attention_page_lifetime=-1))) as client:
        page = client.post("/attend/tag", json={"text": "Anna"}).json()["attention_url"]
        assert client.get(page).status_code == 404


def test_attention_has_a_token_limit(services: dict[str, Any]) -> None:
    with TestClient(build_app({"tag": services["tag"]}, ServerLimits(max_attention_tokens=20))) as client:
        assert client.post("/attend/tag", json={"text": "Anna " * 5}).status_code == 200
        response = client.post("/attend/tag", json={"text": "Anna " * 50})
        assert response.status_code == 413
        assert "the maximum is 20" in response.json()["error"]


# ------------------------------------------------------------------------------------------ status endpoints


def test_models_and_health(client: TestClient) -> None:
    models = {model["name"]: model for model in client.get("/models").json()}
    tasks = {name: model["task"] for name, model in models.items()}
    same = {name: name for name in ("translate", "classify", "tag", "answer", "fill-mask")}
    assert tasks == same | {"pairs": "classify", "words": "classify"}
    assert models["classify"]["metadata"] == {"labels": ["0", "1"], "text_pairs": False, "examples": []}
    for name in ("words", "translate"):  # trained on built-in data
        task, examples = models[name]["task"], models[name]["metadata"]["examples"]
        assert len(examples) == 3
        assert client.post(f"/{task}", json={**examples[0], "model": name}).status_code == 200
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}


def test_openapi_has_every_schema(client: TestClient) -> None:
    spec = client.get("/openapi.json").json()
    for task in ("translate", "classify", "tag", "answer", "fill-mask"):
        for path in (f"/{task}", f"/attend/{task}"):
            reference = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            schema = spec["components"]["schemas"][reference.rpartition("/")[2]]
            assert schema["additionalProperties"] is False
            assert {"422", "503", "504"} <= set(spec["paths"][path]["post"]["responses"])
    names = [operation["operationId"] for path in spec["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))
    assert client.get("/docs").status_code == 404  # it would load scripts from other servers


def test_metrics(services: dict[str, Any]) -> None:
    with TestClient(build_app({"tag": services["tag"]}), raise_server_exceptions=False) as client:
        client.get("/look/x/")
        for _ in range(3):
            client.post("/tag", json={"text": "Anna"})
        client.post("/tag", json={"text": 1})
        client.get("/nowhere")
        lines = client.get("/metrics").text.splitlines()
    assert 'jumok_http_requests_total{path="/tag",status="200"} 3.0' in lines
    assert 'jumok_http_requests_total{path="/tag",status="422"} 1.0' in lines
    assert 'jumok_http_requests_total{path="other",status="404"} 1.0' in lines
    assert 'jumok_http_requests_total{path="/look",status="404"} 1.0' in lines
    assert 'jumok_batch_size_count{model="tag"} 3.0' in lines
    assert 'jumok_batch_size_sum{model="tag"} 3.0' in lines
    assert 'jumok_pending_tokens{model="tag"} 0.0' in lines
    assert 'jumok_processed_tokens_total{model="tag"} 9.0' in lines  # [CLS] Anna [SEP]


# ------------------------------------------------------------------------------------------- rejections


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 422, "the request body is empty"),
        (b"{", 400, "not valid JSON"),
        (b'{"text": "a"', 400, "not valid JSON"),
        (b"\xff\xfe\xfa", 400, ""),
        (b'{"text": "\xff"}', 400, ""),
        (b"[" * 40_000, 400, ""),
        (b"[" * 100_000, 413, "100,000 commas and brackets"),
        (b'{"text": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", 400, ""),
        (b'{"beam_size": ' + b"9" * 5000 + b', "text": "a"}', 400, ""),
        (b"null", 422, ""),
        (b"[]", 422, ""),
        (b'"text"', 422, ""),
        (b"{}", 422, "text: Field required"),
        (b'{"text": null}', 422, "text"),
        (b'{"text": 7}', 422, "text"),
        (b'{"text": ["a"]}', 422, "text"),
        (b'{"text": ""}', 422, "text: it is empty"),
        (b'{"text": " \\n\\t "}', 422, "text: it is empty"),
        (b'{"text": "a\\u0000b"}', 422, "text: it has the control character U+0000 at position 1"),
        (b'{"text": "a\\u001b[31m"}', 422, "U+001B"),
        (b'{"text": "\\u009f"}', 422, "U+009F"),
        (b'{"text": "\\ud800"}', 422, "surrogate"),
        (b'{"text": "a", "\\udfff": 1}', 422, "string"),
        (b'{"text": "a", "model": "\\ud800"}', 404, "the models are: translate"),
        (b'{"text": "a", "model": "../../etc/passwd"}', 404, "the models are: translate"),
        (b'{"text": "a", "model": 7}', 422, "model"),
        (b'{"text": "a", "path": "/etc/passwd"}', 422, "path"),
        (b'{"text": "a", "beam_size": 0}', 422, "beam"),
        (b'{"text": "a", "beam_size": -1}', 422, "beam"),
        (b'{"text": "a", "beam_size": "4"}', 422, "beam"),
        (b'{"text": "a", "beam_size": 2.0}', 422, "beam"),
        (b'{"text": "a", "beam_size": true}', 422, "beam"),
        (b'{"text": "a", "beam_size": NaN}', 422, "beam"),
        (b'{"text": "a", "beam_size": 1e400}', 422, "beam"),
        (b'{"text": "a", "beam_size": 11}', 413, "beam_size is 11; this server accepts at most 10"),
        (b'{"text": "a", "beam_size": 99999999999999999999}', 413, "beam"),
        (b'{"text": "a", "beam_size": 2, "n_best": 3}', 422, "n_best 3 needs a beam of at least 3"),
        (b'{"text": "a", "n_best": 5000}', 413, "n_best"),
        (b'{"text": "a", "alignments": 1}', 422, "alignments"),
        (b'{"text": "' + b"a " * 15_000 + b'"}', 413, "30,000 characters; this server accepts at most 20,000"),
        (b'{"text": "' + b"a" * 2_000_000 + b'"}', 413, "1,048,576 bytes"),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
def test_an_invalid_request_gets_an_explanation(client: TestClient, body: bytes, status: int, message: str) -> None:
    for path in ("/translate", "/attend/translate", "/translate/stream"):
        response = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == status, response.text
        assert message in response.json()["error"]
        assert len(response.content) < 1000
    assert client.post("/translate", json={"text": "we walk"}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"])
def test_other_media_types_are_rejected(client: TestClient, kind: str) -> None:
    response = client.post("/translate", content=b'{"text": "a"}', headers={"Content-Type": kind})
    assert 400 <= response.status_code < 500
    assert response.json()["error"]


def test_other_methods_and_paths(client: TestClient) -> None:
    assert client.get("/translate").status_code == 405
    assert "error" in client.delete("/tag").json()
    assert client.post("/caption", json={}).status_code == 404
    assert client.post("/attend", json={}).status_code == 404


@pytest.mark.filterwarnings("ignore:the text has . windows")  # the first one is shown
@pytest.mark.parametrize(
    "text",
    ["\u200b", "\ufeff", "\u202e", "\U0010ffff", "e" + "\u0301" * 40, "😀" * 40, "ﷺ", "||| |||", "a\r\nb"],
    ids=lambda text: ascii(text)[:20],
)
def test_unusual_characters_are_accepted(client: TestClient, text: str) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("translate", {"text": text, "beam_size": 1}),
        ("classify", {"text": text}),
        ("classify", {"text": text, "pair": text, "model": "pairs"}),
        ("tag", {"text": text}),
        ("answer", {"question": text, "context": text}),
        ("answer", {"question": "who?", "context": text}),
        ("fill-mask", {"text": f"[MASK] {text}"}),
    ]
    for task, body in bodies:
        for path in (f"/{task}", f"/attend/{task}"):
            if path != "/attend/translate":  # slow: the attention page needs a translation with the recipe's beam size
                response = client.post(path, json=body)
                assert response.status_code in (200, 422), (path, body, response.text)


def test_errors_of_a_model(echo: EchoService, caplog: pytest.LogCaptureFixture) -> None:
    with TestClient(build_app({"echo": echo}), raise_server_exceptions=False) as client:
        response = client.post("/echo", json={"text": "broken"})
        assert response.status_code == 500
        assert "internal error" in response.json()["error"]
        response = client.post("/echo/stream", json={"text": "broken"})
        assert response.text.startswith("event: error\ndata: ")
        assert "this text is broken" in caplog.text
        response = client.post("/echo/stream", json={"text": "unreadable"})
        assert 'data: {"error": "the text has words that nobody can read"}' in response.text
        response = client.post("/echo", json={"text": "unreadable"})
        assert (response.status_code, response.json()) == (422, {"error": "the text has words that nobody can read"})
        response = client.post("/attend/echo", json={"text": "a"})
        assert (response.status_code, response.json()) == (422, {"error": "there is no attention"})
        assert client.post("/echo", json={"text": "fine"}).json() == {"text": "fine"}


def test_head_is_handled_as_get(client: TestClient) -> None:
    for path in ("/health", "/ready", "/models", "/metrics", "/openapi.json", "/"):
        assert client.head(path).status_code == 200
        assert client.head(path).headers["content-type"] == client.get(path).headers["content-type"]
    assert client.head("/translate").status_code == 405


def test_all_responses_have_security_headers(client: TestClient) -> None:
    page_url = client.post("/attend/tag", json={"text": "Anna"}).json()["attention_url"]
    answers = [client.get(path) for path in ("/health", "/models", "/openapi.json", "/metrics", "/nowhere")]
    answers += [client.post("/tag", json={"text": text}) for text in ("Anna", 1, "x" * 30_000)]
    answers += [client.post("/translate/stream", json={"text": "we walk"}), client.put("/tag")]
    answers += [client.get(f"{page_url}nowhere"), client.put(f"{page_url}tiles"), client.get(f"{page_url}tiles")]
    for response in answers:
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"
        if response.status_code >= 400:
            assert set(response.json()) == {"error"}
    assert {response.status_code for response in answers} == {200, 400, 404, 405, 413, 422}


def test_a_changed_run_is_an_internal_error(echo: EchoService) -> None:
    class ChangedRun(EchoService):
        def predict(self, requests: Any, listener: Any) -> list[Any]:
            raise RunChangedError("the files of this run were changed")

    with TestClient(build_app({"echo": ChangedRun()}), raise_server_exceptions=False) as client:
        response = client.post("/echo", json={"text": "a"})
        assert (response.status_code, response.json()) == (500, {"error": "the files of this run were changed"})


# ---------------------------------------------------------------------------------------------- the token


def test_requests_without_the_token_are_rejected(echo: EchoService) -> None:
    with TestClient(build_app({"echo": echo}, auth_token="a b§c")) as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic a b§c".encode()},
            {"Authorization": "Bearer"},
            {"Authorization": b"Bearer \xff\xfe"},
        ):
            for path in ("/echo", "/models", "/metrics", "/openapi.json", "/nowhere"):
                response = client.post(path, json={"text": "a"}, headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
        assert echo.batches == []
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        response = client.post("/echo", json={"text": "a"}, headers={"Authorization": "bearer a b§c".encode()})
        assert response.json() == {"text": "a"}


def test_other_hosts_are_rejected(echo: EchoService) -> None:
    with TestClient(build_app({"echo": echo}, allowed_hosts=["localhost"])) as client:
        assert client.post("/echo", json={"text": "a"}, headers={"Host": "localhost:8000"}).status_code == 200
        response = client.post("/echo", json={"text": "a"}, headers={"Host": "evil.example"})
        assert (response.status_code, response.json()) == (400, {"error": "Invalid host header"})
