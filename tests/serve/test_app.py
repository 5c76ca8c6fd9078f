"""Every endpoint answers as the object of jumok.load does; what is wrong is refused with words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from running_server import Echo
from starlette.testclient import TestClient

from jumok.inference.engines import RunChangedError
from jumok.look.viewer.tiles import unpack
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.tasks.translate.predictor import TranslationOptions

TEXT = "the king sleeps because it snows in busan"


@pytest.fixture(scope="module")
def client(services: dict[str, Any]) -> Iterator[TestClient]:
    with TestClient(build_app(services), raise_server_exceptions=False) as client:
        yield client


# ------------------------------------------------------------------------------------------- the answers


def test_translate(client: TestClient, predictors: dict[str, Any]) -> None:
    got = client.post("/translate", json={"text": TEXT, "alignments": True})
    assert got.status_code == 200
    wanted = predictors["translate"].translate(TEXT)
    told = got.json()
    assert told["translation"] == wanted.translation
    assert told["target_words"] == wanted.target_words
    assert told["source_words"] == TEXT.split()
    assert told["score"] == pytest.approx(wanted.score)
    assert told["finished"] == wanted.finished
    assert told["alignment"] == [list(link) for link in wanted.alignment]
    assert told["alternatives"] == []
    plain = client.post("/translate", json={"text": TEXT}).json()
    assert plain == told | {"alignment": None, "score": pytest.approx(told["score"])}


def test_translate_with_a_beam_and_a_list(client: TestClient, predictors: dict[str, Any]) -> None:
    got = client.post("/translate", json={"text": TEXT, "beam_size": 3, "n_best": 2}).json()
    wanted = predictors["translate"].translate(TEXT, TranslationOptions(beam_size=3, n_best=2))
    assert [got["translation"], *(one["translation"] for one in got["alternatives"])] == [
        wanted.translation,
        wanted.alternatives[0].translation,
    ]
    greedy = client.post("/translate", json={"text": TEXT, "beam_size": 1}).json()
    assert greedy["translation"] == (
        predictors["translate"].translate(TEXT, TranslationOptions(beam_size=1)).translation
    )


@pytest.mark.parametrize("beam", [1, 3])
def test_a_translation_is_told_while_it_is_made(client: TestClient, predictors: dict[str, Any], beam: int) -> None:
    with client.stream("POST", "/translate/stream", json={"text": TEXT, "beam_size": beam}) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(got.iter_text()).strip().split("\n\n")
    events = [(block.split("\n")[0], json.loads(block.split("\n")[1].removeprefix("data: "))) for block in blocks]
    assert [name for name, _ in events] == ["event: text"] * (len(events) - 1) + ["event: done"]
    wanted = predictors["translate"].translate(TEXT, TranslationOptions(beam_size=beam))
    assert events[-1][1]["translation"] == wanted.translation
    if beam == 1:
        assert all(wanted.translation.startswith(told["text"].strip()) for _, told in events[:-1])


def test_classify(client: TestClient, predictors: dict[str, Any]) -> None:
    got = client.post("/classify", json={"text": "the film ||| was nice"}).json()  # one text, whatever is in it
    wanted = predictors["classify"].classify("the film ||| was nice")
    assert got["label"] == wanted.label
    assert [(one["label"], pytest.approx(one["probability"])) for one in got["classes"]] == list(wanted.classes)
    assert got["value"] is None


def test_classify_a_pair_with_the_model_of_that_name(client: TestClient, predictors: dict[str, Any]) -> None:
    asked = {"text": "the sad\tstory", "text_pair": "a happy ||| film", "model": "pairs"}
    got = client.post("/classify", json=asked).json()
    wanted = predictors["pairs"].classify(asked["text"], asked["text_pair"])
    assert (got["label"], got["probability"]) == (wanted.label, pytest.approx(wanted.classes[0][1]))
    alone = client.post("/classify", json={"text": "x", "model": "pairs"})
    assert (alone.status_code, alone.json()["error"]) == (422, "this model reads two texts, but one came")
    both = client.post("/classify", json={"text": "x", "text_pair": "y"})
    assert (both.status_code, both.json()["error"]) == (422, "this model reads one text, but two came")


def test_tag(client: TestClient, predictors: dict[str, Any]) -> None:
    text = "the story: Carla Maria was a New York. 😀 Anna"
    got = client.post("/tag", json={"text": text}).json()
    wanted = predictors["tag"].tag(text)
    assert (got["words"], got["tags"]) == (list(wanted.words), list(wanted.tags))
    assert [one["type"] for one in got["entities"]] == [one.type for one in wanted.entities]
    assert all(text[one["start"] : one["end"]] == one["text"] for one in got["entities"])


def test_answer(client: TestClient, predictors: dict[str, Any]) -> None:
    question, context = "who?", 'the {"film"} was\tAnna lives in Seoul ||| ' + "a very long story " * 20
    got = client.post("/answer", json={"question": question, "context": context, "n_best": 3}).json()
    wanted = predictors["answer"].answer(question, context, 3)
    spans = [got, *got["alternatives"]]
    assert [(one["answer"], one["start"]) for one in spans] == [(one.text, one.start) for one, _ in wanted.answers]
    assert [one["probability"] for one in spans] == pytest.approx([share for _, share in wanted.answers])
    assert all(context[one["start"] : one["end"]] == one["answer"] for one in spans)


def test_fill(client: TestClient, predictors: dict[str, Any]) -> None:
    got = client.post("/fill-mask", json={"text": "one [MASK] three\nfour [MASK]", "n_best": 2}).json()
    wanted = predictors["fill-mask"].fill("one [MASK] three four [MASK]", 2)
    assert got["filled_text"] == wanted.filled_text
    assert [[one["word"] for one in some] for some in got["mask_predictions"]] == [
        [word for word, _ in some] for some in wanted.mask_predictions
    ]
    assert got["next_sentence_probability"] is None
    pair = client.post("/fill-mask", json={"text": "one two", "text_pair": "three four"}).json()
    assert pair["next_sentence_probability"] == pytest.approx(
        predictors["fill-mask"].fill("one two ||| three four").next_sentence_probability
    )
    single = client.post("/fill-mask", json={"text": "one [MASK]", "n_best": 1}).json()
    assert [len(some) for some in single["mask_predictions"]] == [1]
    hidden = client.post("/fill-mask", json={"text": "one two"})
    assert hidden.status_code == 422
    assert hidden.json()["error"].startswith("the text has no mask: write [MASK]")


def test_classify_by_a_model_of_words(client: TestClient, predictors: dict[str, Any]) -> None:
    text = "The soup was awful. Overall the museum was splendid."
    got = client.post("/classify", json={"text": text, "model": "words"}).json()
    wanted = predictors["words"].classify(text)
    assert (got["label"], got["probability"]) == (wanted.label, pytest.approx(wanted.classes[0][1]))


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
def test_attend_gives_the_answer_and_a_page_of_its_maps(client: TestClient, name: str) -> None:
    task = "classify" if name in ("pairs", "words") else name
    got = client.post(f"/attend/{task}", json=BODIES[name])
    assert got.status_code == 200, got.text
    told = got.json()
    plain = client.post(f"/{task}", json=BODIES[name]).json()
    assert set(told["prediction"]) == set(plain)
    assert told["prediction"].get("translation") == plain.get("translation")
    page = client.get(told["attention_url"])
    assert page.headers["content-type"].startswith("text/html")
    if name == "translate":  # the maps are of what was said
        assert told["prediction"]["translation"] in client.get(f"{told['attention_url']}manifest.json").json()["title"]
    assert f"{told['attention_url']}viewer.js" in page.text
    manifest = client.get(f"{told['attention_url']}manifest.json").json()
    rows, cols = manifest["data"][0]["layers"][0]["shape"]
    asked = {"layer": 0, "head": 0, "rows": f"0,{rows}", "cols": f"0,{cols}"}
    weights = unpack(client.get(f"{told['attention_url']}tiles", params={**asked, "quantity": "weights"}).content)
    assert weights.shape == (rows, cols)
    assert np.allclose(weights.sum(1), 1, atol=1e-4)
    assert client.get(f"{told['attention_url']}tiles", params={**asked, "layer": 99}).status_code == 400


def test_only_the_last_pages_are_kept(services: dict[str, Any]) -> None:
    with TestClient(build_app({"tag": services["tag"]}, ServerLimits(max_attention_pages=2))) as client:
        pages = [client.post("/attend/tag", json={"text": "Anna"}).json()["attention_url"] for _ in range(3)]
        assert len(set(pages)) == 3
        assert [client.get(page).status_code for page in pages] == [404, 200, 200]
        assert client.get("/look/../../etc/passwd").status_code == 404
        assert "error" in client.get("/look/").json()
    with TestClient(build_app({"tag": services["tag"]}, ServerLimits(attention_page_lifetime=-1))) as client:
        page = client.post("/attend/tag", json={"text": "Anna"}).json()["attention_url"]
        assert client.get(page).status_code == 404


def test_too_long_to_look_at(services: dict[str, Any]) -> None:
    with TestClient(build_app({"tag": services["tag"]}, ServerLimits(max_attention_tokens=20))) as client:
        assert client.post("/attend/tag", json={"text": "Anna " * 5}).status_code == 200
        got = client.post("/attend/tag", json={"text": "Anna " * 50})
        assert got.status_code == 413
        assert "the maximum is 20" in got.json()["error"]


# ------------------------------------------------------------------------------------------ how it is


def test_what_is_served(client: TestClient) -> None:
    told = {one["name"]: one for one in client.get("/models").json()}
    tasks = {name: one["task"] for name, one in told.items()}
    same = {name: name for name in ("translate", "classify", "tag", "answer", "fill-mask")}
    assert tasks == same | {"pairs": "classify", "words": "classify"}
    assert told["classify"]["metadata"] == {"labels": ["0", "1"], "text_pairs": False, "examples": []}
    for name in ("words", "translate"):  # of built-in data
        task, examples = told[name]["task"], told[name]["metadata"]["examples"]
        assert len(examples) == 3
        assert client.post(f"/{task}", json={**examples[0], "model": name}).status_code == 200
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}


def test_the_description_has_every_schema(client: TestClient) -> None:
    told = client.get("/openapi.json").json()
    for task in ("translate", "classify", "tag", "answer", "fill-mask"):
        for path in (f"/{task}", f"/attend/{task}"):
            asked = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            schema = told["components"]["schemas"][asked["$ref"].rpartition("/")[2]]
            assert schema["additionalProperties"] is False
            assert {"422", "503", "504"} <= set(told["paths"][path]["post"]["responses"])
    names = [one["operationId"] for path in told["paths"].values() for one in path.values()]
    assert len(names) == len(set(names))
    assert client.get("/docs").status_code == 404  # it would load scripts from elsewhere


def test_figures_count(services: dict[str, Any]) -> None:
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


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "status", "said"),
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
def test_a_bad_request_is_answered_with_its_fault(client: TestClient, body: bytes, status: int, said: str) -> None:
    for path in ("/translate", "/attend/translate", "/translate/stream"):
        got = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert got.status_code == status, got.text
        assert said in got.json()["error"]
        assert len(got.content) < 1000
    assert client.post("/translate", json={"text": "we walk"}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"])
def test_what_is_not_called_json(client: TestClient, kind: str) -> None:
    got = client.post("/translate", content=b'{"text": "a"}', headers={"Content-Type": kind})
    assert 400 <= got.status_code < 500
    assert got.json()["error"]


def test_other_methods_and_places(client: TestClient) -> None:
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
def test_whatever_is_a_character_is_answered(client: TestClient, text: str) -> None:
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
            if path != "/attend/translate":  # it makes a translation of its own, with the recipe's beam
                got = client.post(path, json=body)
                assert got.status_code in (200, 422), (path, body, got.text)


def test_faults_of_a_model_are_not_the_client_s(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    with TestClient(build_app({"echo": echo}), raise_server_exceptions=False) as client:
        got = client.post("/echo", json={"text": "broken"})
        assert got.status_code == 500
        assert "internal error" in got.json()["error"]
        got = client.post("/echo/stream", json={"text": "broken"})
        assert got.text.startswith("event: error\ndata: ")
        assert "this one is broken" in caplog.text
        got = client.post("/echo/stream", json={"text": "unreadable"})
        assert 'data: {"error": "the text has words that nobody can read"}' in got.text
        got = client.post("/echo", json={"text": "unreadable"})
        assert (got.status_code, got.json()) == (422, {"error": "the text has words that nobody can read"})
        got = client.post("/attend/echo", json={"text": "a"})
        assert (got.status_code, got.json()) == (422, {"error": "there is nothing to look at"})
        assert client.post("/echo", json={"text": "fine"}).json() == {"text": "fine"}


def test_head_is_answered_as_get_is(client: TestClient) -> None:
    for path in ("/health", "/ready", "/models", "/metrics", "/openapi.json", "/"):
        assert client.head(path).status_code == 200
        assert client.head(path).headers["content-type"] == client.get(path).headers["content-type"]
    assert client.head("/translate").status_code == 405


def test_no_answer_is_stored_or_guessed_at(client: TestClient) -> None:
    look = client.post("/attend/tag", json={"text": "Anna"}).json()["attention_url"]
    answers = [client.get(path) for path in ("/health", "/models", "/openapi.json", "/metrics", "/nowhere")]
    answers += [client.post("/tag", json={"text": text}) for text in ("Anna", 1, "x" * 30_000)]
    answers += [client.post("/translate/stream", json={"text": "we walk"}), client.put("/tag")]
    answers += [client.get(f"{look}nowhere"), client.put(f"{look}tiles"), client.get(f"{look}tiles")]
    for got in answers:
        assert got.headers["x-content-type-options"] == "nosniff"
        assert got.headers["cache-control"] == "no-store"
        if got.status_code >= 400:
            assert set(got.json()) == {"error"}
    assert {got.status_code for got in answers} == {200, 400, 404, 405, 413, 422}


def test_weights_that_were_replaced_are_not_shown(echo: Echo) -> None:
    class Changed(Echo):
        def predict(self, asked: Any, audience: Any) -> list[Any]:
            raise RunChangedError("the files of this run were changed")

    with TestClient(build_app({"echo": Changed()}), raise_server_exceptions=False) as client:
        got = client.post("/echo", json={"text": "a"})
        assert (got.status_code, got.json()) == (500, {"error": "the files of this run were changed"})


# ---------------------------------------------------------------------------------------------- the token


def test_who_has_no_token_is_not_let_in(echo: Echo) -> None:
    with TestClient(build_app({"echo": echo}, auth_token="a b§c")) as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic a b§c".encode()},
            {"Authorization": "Bearer"},
            {"Authorization": b"Bearer \xff\xfe"},
        ):
            for path in ("/echo", "/models", "/metrics", "/openapi.json", "/nowhere"):
                got = client.post(path, json={"text": "a"}, headers=headers)
                assert got.status_code == 401
                assert got.headers["www-authenticate"] == "Bearer"
        assert echo.batches == []
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        got = client.post("/echo", json={"text": "a"}, headers={"Authorization": "bearer a b§c".encode()})
        assert got.json() == {"text": "a"}


def test_only_requests_to_these_hosts_are_answered(echo: Echo) -> None:
    with TestClient(build_app({"echo": echo}, allowed_hosts=["localhost"])) as client:
        assert client.post("/echo", json={"text": "a"}, headers={"Host": "localhost:8000"}).status_code == 200
        got = client.post("/echo", json={"text": "a"}, headers={"Host": "evil.example"})
        assert (got.status_code, got.json()) == (400, {"error": "Invalid host header"})
