"""Tests of the page at the root of a server in a real browser: forms, responses, attention, errors."""

from __future__ import annotations

import base64
import io
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from running_server import EchoService, RunningServer
from starlette.testclient import TestClient

from jumok.data.builtin.scenes import draw_scene
from jumok.look.viewer import assets
from jumok.serve import web_page
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.tasks import get_service_type
from jumok.tasks.api import RequestLimits

OpenPage = Callable[..., Any]
StartServer = Callable[..., RunningServer]
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:the voice does not know")]
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
STATUS_MESSAGE = "Failed to load resource"  # the browser's message about an error status, which the page shows


def png(pixels: Any) -> dict[str, Any]:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"name": "a photo.png", "mimeType": "image/png", "buffer": file.getvalue()}


@pytest.fixture(scope="module")
def server(services: dict[str, Any], caption_service: Any) -> Iterator[RunningServer]:
    """A server with all models."""
    server = RunningServer({**services, "see": caption_service}, ServerLimits())
    yield server
    server.stop()


@pytest.fixture
def open_page(browser: Any, server: RunningServer) -> Iterator[OpenPage]:
    """Open the page at a link. At the end of the test, it must have reported no errors."""
    windows: list[Any] = []
    errors: list[str] = []

    def handle_message(text: str) -> None:
        if STATUS_MESSAGE not in text and "willReadFrequently" not in text:
            errors.append(text)

    def open_link(link: str = "", at: RunningServer | None = None, before: Any = None, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
        context.set_default_timeout(15_000)
        windows.append(context)
        page = context.new_page()
        page.on("console", lambda message: handle_message(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: (errors.append("a dialog"), dialog.dismiss()))
        if before:
            before(page)
        page.goto(f"{(at or server).url}/{link}")
        page.wait_for_selector(".pg-model, .pg-token:not([hidden])")
        return page

    yield open_link
    for context in windows:
        context.close()
    assert errors == []


def submit(page: Any, button: str, **texts: str) -> None:
    for label, text in texts.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(text)
    page.get_by_role("button", name=button, exact=True).click()


def get_response(page: Any) -> str:
    """Wait for the response. Returns the text of its first element."""
    page.wait_for_selector(".pg-output[aria-busy=false] .pg-response > *")
    return str(page.inner_text(".pg-response > :first-child"))


def get_manifest(page: Any) -> dict[str, Any]:
    """Return the manifest of the viewer below the response."""
    page.wait_for_selector(".jumok .jm-title")
    assert page.locator(".jumok").count() == 1
    return dict(page.evaluate("document.querySelector('#viewer').jumok.manifest"))


def mock_response(path: str, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    """Return a function that replaces the response of the server."""

    def before(page: Any) -> None:
        page.route(f"**/{path}", lambda route: route.fulfill(status=status, json=answer, headers=headers or {}))
        page.route("**/attend/*", lambda route: route.fulfill(status=422, json={"error": "nothing to see"}))

    return before


# ---------------------------------------------------------------- forms of the tasks


def test_translate(open_page: OpenPage, predictors: dict[str, Any]) -> None:
    page = open_page()
    assert page.locator(".pg-model").count() == 8
    with page.expect_request("**/translate/stream"):
        submit(page, "Translate", Text="we walk in busan")
    expected = predictors["translate"].translate("we walk in busan")
    assert get_response(page) == expected.translation
    assert page.inner_text("[role=status][aria-live]") == expected.translation
    assert get_manifest(page)["title"].startswith("we walk in busan")
    # A second request with alternatives: there is one viewer, for this response.
    page.get_by_text("Options").click()
    submit(page, "Translate", Text="the king sleeps", Beam_size="3", Number_of_predictions="3")
    page.wait_for_selector(".pg-list")
    assert page.locator(".pg-list li").count() == 3
    page.wait_for_function("() => document.querySelector('.jm-title')?.textContent.startsWith('the king')")
    get_manifest(page)


def test_partial_text_is_shown(open_page: OpenPage, start_server: StartServer) -> None:
    """Partial text is shown until the response is complete, and the request can be stopped."""
    echo = EchoService()
    echo.endpoint = "translate"  # type: ignore[misc]
    echo.describe = lambda: {"beam_size": 1, "has_attention_maps": False}  # type: ignore[method-assign]
    slow = start_server({"slow": echo})
    page = open_page("", at=slow)
    page.evaluate("""() => { globalThis.partialTexts = []; new MutationObserver(() => { const half =
        document.querySelector('.pg-partial'); if (half) partialTexts.push(half.textContent); }).observe(
        document.body, { childList: true, subtree: true }); }""")
    echo.may_work.clear()
    submit(page, "Translate", Text="abc")
    page.get_by_role("button", name="Stop").click()
    assert not page.locator(".pg-output[aria-busy=true]").count()
    echo.may_work.set()
    assert "attention" in page.inner_text(".pg-check")
    # Slowly enough to be urls.
    echo.predict = predict_slowly  # type: ignore[method-assign,assignment]
    submit(page, "Translate", Text="def")
    page.wait_for_selector(".pg-response")
    page.wait_for_function("() => partialTexts.includes('d')")
    page.wait_for_function("() => partialTexts.includes('de')")
    echo.may_work.set()


def predict_slowly(requests: Any, listener: Any) -> list[Any]:
    import time

    for end in range(1, 4):
        listener.on_partial(0, requests[0].text[:end])
        time.sleep(0.15)
    return [EchoService.response_type(text=requests[0].text)]


def test_classify(open_page: OpenPage, predictors: dict[str, Any]) -> None:
    page = open_page("#model=classify")
    submit(page, "Classify", Text="the film was nice")
    expected = predictors["classify"].classify("the film was nice")
    assert get_response(page) == expected.label
    rows = page.locator(".pg-bars li").all_inner_texts()
    assert [row.split()[0] for row in rows] == [label for label, _ in expected.classes]
    assert rows[0].split()[1] == f"{100 * expected.classes[0][1]:.1f}"
    get_manifest(page)


def test_classify_a_pair_and_a_document(open_page: OpenPage, predictors: dict[str, Any]) -> None:
    page = open_page("#model=pairs")
    submit(page, "Classify", First_text="the sad story", Second_text="a happy film")
    assert get_response(page) == predictors["pairs"].classify("the sad story", "a happy film").label
    page.locator(".pg-model[data-name=words]").click()
    page.get_by_role("group", name="Examples").get_by_role("button").first.click()
    assert get_response(page) in ("praise", "blame", "neither")
    assert "document" in get_manifest(page)["data"][0]
    assert page.locator(".jm-document").is_visible()


def test_tag(open_page: OpenPage, predictors: dict[str, Any]) -> None:
    text = "Carla was in New York with Anna"
    page = open_page("#model=tag")
    submit(page, "Find entities", Text=text)
    get_response(page)
    expected = [item["text"] for item in predictors["tag"].tag(text).to_entity_dicts()]
    assert page.locator(".pg-response mark bdi").all_inner_texts() == expected
    assert "No entities" in page.inner_text(".pg-response") or expected
    get_manifest(page)


def test_answer(open_page: OpenPage, predictors: dict[str, Any]) -> None:
    context = "Anna lives in Seoul with a cat"
    page = open_page("#model=answer")
    submit(page, "Answer", Text_that_contains_the_answer=context, Question="who?")
    expected = predictors["answer"].answer("who?", context).answers[0][0].text
    assert get_response(page) == (expected or "The text has no answer.")
    assert page.locator(".pg-response mark").all_inner_texts() == ([expected] if expected else [])
    get_manifest(page)


def test_fill_mask(open_page: OpenPage, predictors: dict[str, Any]) -> None:
    page = open_page("#model=fill-mask")
    submit(page, "Fill masks", Text="one [MASK] three")
    expected = predictors["fill-mask"].fill("one [MASK] three")
    get_response(page)
    assert page.locator(".pg-response mark").all_inner_texts() == [expected.mask_predictions[0][0][0]]
    names = page.locator(".pg-bar-name").all_inner_texts()
    assert names == [word for word, _ in expected.mask_predictions[0][:5]]
    get_manifest(page)


def test_caption(open_page: OpenPage, captioner: Any) -> None:
    pixels = draw_scene(2, 4).pixels
    page = open_page("#model=see")
    page.get_by_label("Image", exact=True).set_input_files(png(pixels))
    assert get_response(page) == captioner.caption(pixels).caption  # immediately, because there is no other field
    assert "a photo.png, 96 × 96 pixels" in page.inner_text(".pg-form")
    manifest = get_manifest(page)
    assert manifest["data"][0]["image_layers"][0]["grids"][0]["shape"] == list(captioner.grid_size)
    assert page.locator(".jm-photo").is_visible()
    assert page.evaluate("document.querySelector('.pg-image').naturalWidth") == 96


class NoListener:
    """A listener without partial results."""

    def is_cancelled(self, index: int) -> bool:
        return False

    def is_streaming(self, index: int) -> bool:
        return False


def test_speak(open_page: OpenPage, speak_service: Any, start_server: StartServer) -> None:
    speaking = start_server({"voice": speak_service})
    page = open_page("#model=voice&text=Forty+two.+Six.", at=speaking)
    page.wait_for_selector(".pg-output[aria-busy=false] > .pg-response > audio")
    assert page.locator(".pg-segments li").all_inner_texts() == ["forty two", "six"]
    spoken = speak_service.predict([speak_service.request_type(text="six")], NoListener())[0].audio
    seconds = page.evaluate("""async () => { const audio = document.querySelector(".pg-response > audio");
        while (!audio.duration) await new Promise((next) => setTimeout(next, 20));
        return audio.duration; }""")
    expected = speak_service.predictor.speak("Forty two. Six.").duration_seconds
    assert seconds == pytest.approx(expected, abs=0.01)
    assert get_manifest(page)["data"][0]["speech"]
    assert "first of 2 segments" in page.inner_text(".pg-attention")
    # Another style, which is part of the link.
    page.get_by_text("Options").click()
    page.get_by_label("Token 3", exact=True).first.fill("0.9")
    with page.expect_request("**/speak/stream") as sent:
        submit(page, "Speak", Text="six")
    tokens = sent.value.post_data_json["style_weights"]
    assert (len(tokens), tokens[2]) == (8, 0.9)
    page.wait_for_selector(".pg-output[aria-busy=false] > .pg-response > audio")
    assert page.locator(".pg-segments").count() == 0  # there is a single segment
    assert "style_weights=" in page.evaluate("location.hash")
    with page.expect_request("**/speak/stream") as sent:
        page.reload()
    assert sent.value.post_data_json["style_weights"] == tokens
    # The style of a recording, which is not part of the link.
    page.get_by_text("Options").click()
    page.get_by_role("button", name="Reset").click()
    with page.expect_request("**/speak/stream") as sent:
        data = {"name": "a.wav", "mimeType": "audio/wav", "buffer": spoken}
        page.get_by_label("or the style of a recording").set_input_files(data)
        page.wait_for_function("() => document.querySelector('[name=style_audio]').files.length")
        submit(page, "Speak", Text="six")
    assert base64.b64decode(sent.value.post_data_json["style_audio"]) == spoken
    assert "style_weights" not in sent.value.post_data_json
    page.get_by_role("button", name="Copy link").click()
    page.wait_for_selector("text=does not contain the recording")


DROP = """([data, type, name]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0)), given = new DataTransfer();
  given.items.add(new File([bytes], "x.png", { type }));
  const init = { dataTransfer: given, clipboardData: given, bubbles: true, cancelable: true };
  const event = name === "paste" ? new ClipboardEvent(name, init) : new DragEvent(name, init);
  document.querySelector(".pg-drop").dispatchEvent(event);
}"""


def test_image_is_dropped_or_pasted(open_page: OpenPage, captioner: Any) -> None:
    page = open_page("#model=see")
    page.wait_for_selector(".pg-drop")
    for name, number in (("drop", 4), ("paste", 5)):
        pixels = draw_scene(2, number).pixels
        data = base64.b64encode(png(pixels)["buffer"]).decode()
        with page.expect_request("**/caption") as sent:
            page.evaluate(DROP, [data, "image/png", name])
        assert sent.value.post_data_json == {"model": "see", "image": data}
        assert get_response(page) == captioner.caption(pixels).caption
        get_manifest(page)
    page.evaluate(DROP, [data, "text/plain", "drop"])
    assert "not an image" in page.inner_text(".pg-form")


def test_large_and_damaged_images(open_page: OpenPage, captioner: Any, start_server: StartServer) -> None:
    """A large image is resized, and the page says so. The error of a damaged image is shown."""
    small = get_service_type("caption")(captioner, RequestLimits(max_image_pixels=2_200 * 1_200))
    strict = start_server({"see": small}, ServerLimits(request_limits=small.request_limits))
    page = open_page("", at=strict)
    box = page.get_by_label("Image", exact=True)
    with page.expect_response("**/caption") as response:
        box.set_input_files(png(np.full((1500, 2500, 3), 90, np.uint8)))
    assert response.value.status == 200
    assert "sent as a JPEG of 2048 × 1229 pixels" in page.inner_text(".pg-form")
    broken = png(draw_scene(2, 4).pixels)
    box.set_input_files({**broken, "buffer": broken["buffer"][:-1200]})
    page.wait_for_selector(".pg-output .pg-error:not([hidden])")
    assert "a damaged image" in page.inner_text(".pg-output .pg-error")


# ---------------------------------------------------------------- responses

SPECIAL_TEXT = '<img src=x onerror=alert(1)>😀 "Anna" & 한국'


def test_texts_are_never_parsed_as_html(open_page: OpenPage) -> None:
    entities = [
        {"type": "PER", "text": "Anna", "start": 31, "end": 35, "probability": 0.9},
        {"type": "<b>", "text": "한국", "start": 39, "end": 41, "probability": 1.0},
    ]
    assert [SPECIAL_TEXT[item["start"] : item["end"]] for item in entities] == ["Anna", "한국"]  # type: ignore[misc]
    page = open_page(
        f"#model=tag&text={quote(SPECIAL_TEXT)}",
        before=mock_response("tag", {"entities": entities, "words": [], "tags": []}),
    )
    get_response(page)
    assert page.locator(".pg-response mark bdi").all_inner_texts() == ["Anna", "한국"]
    text = page.inner_text(".pg-text")
    assert text == SPECIAL_TEXT.replace("Anna", "AnnaPER").replace("한국", "한국<b>")
    assert page.locator(".pg-response img, .pg-response b").count() == 0
    page.wait_for_selector(".pg-attention .pg-error")
    assert "nothing to see" in page.inner_text(".pg-attention")


def test_selected_answer_is_marked(open_page: OpenPage) -> None:
    spans = [(0, 4, 0.7), (14, 19, 0.2), (0, 0, 0.1)]
    context = "Anna lives in Seoul"
    first, *others = (
        {"answer": context[begin:end], "start": begin, "end": end, "probability": share} for begin, end, share in spans
    )
    page = open_page(
        f"#model=answer&context={quote(context)}&question=who&n_best=3",
        before=mock_response("answer", {**first, "alternatives": others}),
    )
    assert get_response(page) == "Anna"
    buttons = page.locator("button.pg-bar")
    assert buttons.all_inner_texts()[2].split("\n")[0] == "(no answer)"
    assert page.inner_text(".pg-text mark") == "Anna"
    buttons.nth(1).click()
    assert page.inner_text(".pg-text mark") == "Seoul"
    assert [item.get_attribute("aria-pressed") for item in buttons.all()] == ["false", "true", "false"]
    buttons.nth(2).click()
    assert page.locator(".pg-text mark").count() == 0


# ---------------------------------------------------------------- links


def test_link_contains_model_and_input_but_is_not_sent(open_page: OpenPage, server: RunningServer) -> None:
    urls: list[str] = []
    text = "we walk & talk? 100 % #한국\nagain"
    page = open_page(before=lambda page: page.on("request", lambda request: urls.append(request.url)))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    page.locator(".pg-model[data-name=classify]").click()
    assert page.evaluate("location.hash") == "#model=classify"
    submit(page, "Classify", Text=text)
    label = get_response(page)
    page.get_by_role("button", name="Copy link").click()
    page.wait_for_selector("text=Link copied.")
    link = page.evaluate("navigator.clipboard.readText()")
    other = open_page(link.removeprefix(f"{server.url}/"))  # it fills the form and runs
    assert get_response(other) == label
    assert other.get_by_label("Text", exact=True).input_value() == text
    assert all("#" not in url and "walk" not in url for url in urls)
    assert all(url.startswith(server.url) or re.match("data:|blob:", url) for url in urls)
    # The back button restores the previous request.
    submit(other, "Classify", Text="another")
    get_response(other)
    other.go_back()
    other.wait_for_function("() => document.querySelector('textarea').value.startsWith('we walk')")


def test_incomplete_and_invalid_links(open_page: OpenPage) -> None:
    page = open_page("#model=nobody&text=x")
    page.wait_for_selector("text=There is no model nobody on this server.")
    assert page.locator(".pg-model[aria-current=true]").inner_text().startswith("translate")
    page = open_page("#model=translate&beam_size=-7&n_best=x&nothing=1")
    page.wait_for_selector("textarea")
    assert page.evaluate("[...document.querySelectorAll('input[type=number]')].map((field) => field.value)") == [
        *("5", "1")
    ]
    assert page.locator(".pg-response > *").count() == 0


def test_link_does_not_contain_images(open_page: OpenPage) -> None:
    page = open_page("#model=see")
    page.get_by_role("button", name="Example 1").click()
    get_response(page)
    page.get_by_role("button", name="Copy link").click()
    page.wait_for_selector("text=It does not contain the image, which is too large for a link.")
    assert page.evaluate("location.hash") == "#model=see"


# ---------------------------------------------------------------- errors


def test_server_error_is_shown(open_page: OpenPage) -> None:
    page = open_page("#model=fill-mask")
    submit(page, "Fill masks", Text="no word is hidden")
    page.wait_for_selector(".pg-output .pg-error:not([hidden])")
    assert "the text has no mask: write [MASK]" in page.inner_text(".pg-output [role=alert]")
    assert not page.get_by_role("button", name="Try again").is_visible()
    submit(page, "Fill masks", Text="one [MASK]")
    get_response(page)
    assert not page.locator(".pg-output .pg-error").is_visible()


def test_retry_button_counts_down(open_page: OpenPage) -> None:
    full = {"error": "the queue is full; try again in 2 s"}
    page = open_page("#model=tag", before=mock_response("tag", full, 503, {"Retry-After": "2"}))
    page.clock.install()
    submit(page, "Find entities", Text="Anna")
    button = page.locator(".pg-output .pg-error button")
    button.wait_for()
    assert "the queue is full; try again in 2 s (503)" in page.inner_text(".pg-output")
    assert button.inner_text() == "Try again in 2 s"
    assert button.is_disabled()
    page.clock.fast_forward(1000)
    page.wait_for_selector("text=Try again in 1 s")
    page.unroute("**/tag")
    page.clock.fast_forward(1000)
    page.wait_for_selector(".pg-output .pg-error button:not([disabled])")
    button.click()
    get_response(page)


def test_unreachable_server(open_page: OpenPage, services: dict[str, Any], start_server: StartServer) -> None:
    gone = start_server({"tag": services["tag"]})
    page = open_page("", at=gone)
    page.wait_for_selector("textarea")
    gone.stop()
    submit(page, "Find entities", Text="Anna")
    page.wait_for_selector("text=The server cannot be reached")
    assert page.locator(".pg-output").get_by_role("button", name="Try again").is_enabled()


def test_token_is_requested_and_stored_in_the_tab(
    open_page: OpenPage, services: dict[str, Any], start_server: StartServer
) -> None:
    secret = start_server({"tag": services["tag"]}, auth_token="a b§한")
    page = open_page("#model=tag&text=Anna", at=secret)
    box = page.get_by_label("This server requires a token")
    box.fill("wrong")
    box.press("Enter")
    page.wait_for_selector("text=The token is wrong.")
    box.fill("a b§한")
    box.press("Enter")
    get_response(page)
    get_manifest(page)
    assert not box.is_visible()
    assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
    page.reload()
    get_response(page)


# ---------------------------------------------------------------- devices and accessibility


@pytest.mark.parametrize("name", ["translate", "answer", "see"])
def test_page_on_a_phone(open_page: OpenPage, name: str) -> None:
    inputs = {"translate": "&text=we+walk", "answer": "&question=who&context=Anna+" + "lives+in+Seoul+" * 9}
    page = open_page(f"#model={name}{inputs.get(name, '')}", **PHONE)
    if name == "see":
        assert page.get_by_text("Take a photo").is_visible()
        assert page.locator("input[capture=environment]").count() == 1
        page.get_by_role("button", name="Example 2").click()
    get_response(page)
    get_manifest(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for button in page.locator(".pg-button:visible").all():
        assert button.bounding_box()["height"] >= 44
    form, answer = (page.locator(selector).bounding_box() for selector in (".pg-form", ".pg-output"))
    assert answer["y"] > form["y"] + form["height"] - 1  # the response is below the form


def test_keyboard_and_accessible_names(open_page: OpenPage) -> None:
    page = open_page("#model=answer")
    page.wait_for_selector("textarea")
    fields = page.locator("input:visible, textarea:visible")
    names = "(field) => field.labels?.[0]?.textContent || field.getAttribute('aria-label')"
    assert all(item.evaluate(names) for item in fields.all())
    page.get_by_label("Text that contains the answer").focus()
    page.keyboard.type("Anna lives in Seoul")
    page.keyboard.press("Tab")
    page.keyboard.type("who?")
    page.keyboard.press("Enter")
    get_response(page)
    page.get_by_label("Text that contains the answer").focus()
    with page.expect_response("**/answer"):
        page.keyboard.press("Control+Enter")
    submit(page, "Answer", Question="")
    assert page.evaluate("document.activeElement.name") == "question"  # the field without a value
    assert page.locator("main, nav, form, section, h1").count() >= 5


def test_dark_theme(open_page: OpenPage) -> None:
    light, dark = (open_page("#model=tag&text=Anna", color_scheme=scheme) for scheme in ("light", "dark"))
    for page, below in ((light, False), (dark, True)):
        get_manifest(page)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", ground))) < 60) is below
        assert page.get_attribute(".jumok", "data-theme") == ("dark" if below else "light")


# ---------------------------------------------------------------- static files


def test_static_files_and_content_security_policy(echo: EchoService) -> None:
    with TestClient(build_app({"echo": echo}, auth_token="x")) as client:  # the page needs no token
        response = client.get("/")
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert 'src="/page.js"' in response.text
        for path, kind in (("/page.js", "text/javascript"), ("/page.css", "text/css")):
            response = client.get(path)
            assert response.headers["content-type"].startswith(kind)
            assert client.get(path, headers={"If-None-Match": response.headers["etag"]}).status_code == 304
            plain = client.get(path, headers={"Accept-Encoding": "identity"})
            assert plain.text == response.text
            assert int(response.headers["content-length"]) < len(plain.content) / 2
        assert 'path="/page.js"' in client.get("/metrics", headers={"Authorization": "Bearer x"}).text
        assert client.get("/page.py").status_code == 401
        assert client.post("/", content=b"x").status_code == 405
    with TestClient(build_app({"echo": echo}), root_path='/a"b') as client:
        assert 'src="/a&quot;b/page.js"' in client.get("/").text


def test_model_without_a_form(open_page: OpenPage, echo: EchoService, start_server: StartServer) -> None:
    other = start_server({"again": echo})
    open_page("", at=other).wait_for_selector("text=There is no form for the task echo")


ENTRIES = (web_page.PAGE_SCRIPT, "look/viewer/static/boot_page.js", "look/viewer/static/boot_file.js")


def test_files_fetch_evaluate_and_parse_nothing() -> None:
    scripts = [assets.build_script(entry) for entry in ENTRIES]
    styles = [web_page.build_style_sheet(), assets.build_style_sheet(include_page=True)]
    everything = "".join([*scripts, *styles, web_page.PAGE_TEMPLATE])
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "@import",
        "url(",
    ):
        assert word not in everything
    assert set(re.findall(r"https?://[\w./]+", everything)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_scripts_are_modules_that_can_be_joined(entry: str) -> None:
    names = re.compile(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)
    owners: dict[str, str] = {}
    for path in assets.find_scripts(entry):
        source = assets.read_asset(path)
        for definition in names.findall(source):
            assert definition not in owners, f"{definition} is in {path} and {owners[definition]}"
            owners[definition] = path
        body = assets.IMPORT_PATTERN.sub("", source)
        for words, other in re.findall(r'^import \{([^}]*)\} from "([^"]*)";$', source, re.MULTILINE):
            exporter = posixpath.normpath(f"{posixpath.dirname(path)}/{other}")
            for word in filter(None, re.split(r"[\s,]+", words)):
                assert owners[word] == exporter, f"{path} imports {word} from {other}"
                assert re.search(rf"\b{word}\b", body), f"{path} imports {word} and does not use it"


def test_all_scripts_are_used() -> None:
    package = Path(assets.__file__).parents[2]
    used = {path for entry in ENTRIES for path in assets.find_scripts(entry)}
    assert used == {path.relative_to(package).as_posix() for path in package.rglob("*.js")}
