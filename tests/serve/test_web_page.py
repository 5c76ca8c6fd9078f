"""The page at the root of a server, in a real browser: forms, answers, where the model looked, refusals."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from running_server import Echo, RunningServer
from starlette.testclient import TestClient

from jumok.data.builtin.scenes import draw_scene
from jumok.look.viewer import assets
from jumok.serve import web_page
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.tasks import get_service_type
from jumok.tasks.api import RequestLimits

Open = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:the voice does not know")
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
EXPECTED = "Failed to load resource"  # the browser's own word for a refusal, which the page shows


def png(pixels: Any) -> dict[str, Any]:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"name": "a photo.png", "mimeType": "image/png", "buffer": file.getvalue()}


@pytest.fixture(scope="module")
def running(services: dict[str, Any], caption_service: Any) -> Iterator[RunningServer]:
    one = RunningServer({**services, "see": caption_service}, ServerLimits())
    yield one
    one.stop()


@pytest.fixture
def opened(browser: Any, running: RunningServer) -> Iterator[Open]:
    """Opens the page at a link; at the end it must have nothing to complain of."""
    windows: list[Any] = []
    complaints: list[str] = []

    def heard(text: str) -> None:
        if EXPECTED not in text and "willReadFrequently" not in text:
            complaints.append(text)

    def go(link: str = "", at: RunningServer | None = None, before: Any = None, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
        context.set_default_timeout(15_000)
        windows.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: heard(message.text))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on("dialog", lambda dialog: (complaints.append("a dialog"), dialog.dismiss()))
        if before:
            before(shown)
        shown.goto(f"{(at or running).url}/{link}")
        shown.wait_for_selector(".pg-model, .pg-token:not([hidden])")
        return shown

    yield go
    for one in windows:
        one.close()
    assert complaints == []


def ask(shown: Any, verb: str, **texts: str) -> None:
    for label, text in texts.items():
        shown.get_by_label(label.replace("_", " "), exact=True).fill(text)
    shown.get_by_role("button", name=verb, exact=True).click()


def said(shown: Any) -> str:
    shown.wait_for_selector(".pg-output[aria-busy=false] .pg-response > *")
    return str(shown.inner_text(".pg-response > :first-child"))


def looked(shown: Any) -> dict[str, Any]:
    """What the viewer below the answer shows."""
    shown.wait_for_selector(".jumok .jm-title")
    assert shown.locator(".jumok").count() == 1
    return dict(shown.evaluate("document.querySelector('#viewer').jumok.manifest"))


def answers(path: str, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    """Have the page believe that the server says this."""

    def before(shown: Any) -> None:
        shown.route(f"**/{path}", lambda route: route.fulfill(status=status, json=answer, headers=headers or {}))
        shown.route("**/attend/*", lambda route: route.fulfill(status=422, json={"error": "nothing to see"}))

    return before


# ---------------------------------------------------------------------------------------- each task's form


def test_translate(opened: Open, predictors: dict[str, Any]) -> None:
    shown = opened()
    assert shown.locator(".pg-model").count() == 8
    with shown.expect_request("**/translate/stream"):
        ask(shown, "Translate", Text="we walk in busan")
    wanted = predictors["translate"].translate("we walk in busan")
    assert said(shown) == wanted.translation
    assert shown.inner_text("[role=status][aria-live]") == wanted.translation
    assert looked(shown)["title"].startswith("we walk in busan")
    # Again, with a list of some: one viewer, of this answer.
    shown.get_by_text("Options").click()
    ask(shown, "Translate", Text="the king sleeps", Beam_size="3", Number_of_predictions="3")
    shown.wait_for_selector(".pg-list")
    assert shown.locator(".pg-list li").count() == 3
    shown.wait_for_function("() => document.querySelector('.jm-title')?.textContent.startsWith('the king')")
    looked(shown)


def test_text_is_shown_while_it_is_made(opened: Open) -> None:
    """Half of an answer stands there, in grey, until it is whole; and it can be stopped."""
    echo = Echo()
    echo.endpoint = "translate"  # type: ignore[misc]
    echo.describe = lambda: {"beam_size": 1, "has_attention_maps": False}  # type: ignore[method-assign]
    slow = RunningServer({"slow": echo}, ServerLimits())
    try:
        shown = opened("", at=slow)
        shown.evaluate("""() => { globalThis.heard = []; new MutationObserver(() => { const half =
            document.querySelector('.pg-partial'); if (half) heard.push(half.textContent); }).observe(
            document.body, { childList: true, subtree: true }); }""")
        echo.open.clear()
        ask(shown, "Translate", Text="abc")
        shown.get_by_role("button", name="Stop").click()
        assert not shown.locator(".pg-output[aria-busy=true]").count()
        echo.open.set()
        assert "attention" in shown.inner_text(".pg-check")
        # Slowly enough to be seen.
        echo.predict = _letters  # type: ignore[method-assign,assignment]
        ask(shown, "Translate", Text="def")
        shown.wait_for_selector(".pg-response")
        shown.wait_for_function("() => heard.includes('d')")
        shown.wait_for_function("() => heard.includes('de')")
    finally:
        echo.open.set()
        slow.stop()


def _letters(asked: Any, listener: Any) -> list[Any]:
    import time

    for end in range(1, 4):
        listener.on_partial(0, asked[0].text[:end])
        time.sleep(0.15)
    return [Echo.Said(text=asked[0].text)]


def test_classify(opened: Open, predictors: dict[str, Any]) -> None:
    shown = opened("#model=classify")
    ask(shown, "Classify", Text="the film was nice")
    wanted = predictors["classify"].classify("the film was nice")
    assert said(shown) == wanted.label
    rows = shown.locator(".pg-bars li").all_inner_texts()
    assert [row.split()[0] for row in rows] == [label for label, _ in wanted.classes]
    assert rows[0].split()[1] == f"{100 * wanted.classes[0][1]:.1f}"
    looked(shown)


def test_classify_a_pair_and_a_document(opened: Open, predictors: dict[str, Any]) -> None:
    shown = opened("#model=pairs")
    ask(shown, "Classify", First_text="the sad story", Second_text="a happy film")
    assert said(shown) == predictors["pairs"].classify("the sad story", "a happy film").label
    shown.locator(".pg-model[data-name=words]").click()
    shown.get_by_role("group", name="Examples").get_by_role("button").first.click()
    assert said(shown) in ("praise", "blame", "neither")
    assert "document" in looked(shown)["data"][0]
    assert shown.locator(".jm-document").is_visible()


def test_tag(opened: Open, predictors: dict[str, Any]) -> None:
    text = "Carla was in New York with Anna"
    shown = opened("#model=tag")
    ask(shown, "Find entities", Text=text)
    said(shown)
    wanted = [one["text"] for one in predictors["tag"].tag(text).to_entity_dicts()]
    assert shown.locator(".pg-response mark bdi").all_inner_texts() == wanted
    assert "No entities" in shown.inner_text(".pg-response") or wanted
    looked(shown)


def test_answer(opened: Open, predictors: dict[str, Any]) -> None:
    context = "Anna lives in Seoul with a cat"
    shown = opened("#model=answer")
    ask(shown, "Answer", Text_that_contains_the_answer=context, Question="who?")
    wanted = predictors["answer"].answer("who?", context).answers[0][0].text
    assert said(shown) == (wanted or "The text has no answer.")
    assert shown.locator(".pg-response mark").all_inner_texts() == ([wanted] if wanted else [])
    looked(shown)


def test_fill(opened: Open, predictors: dict[str, Any]) -> None:
    shown = opened("#model=fill-mask")
    ask(shown, "Fill masks", Text="one [MASK] three")
    wanted = predictors["fill-mask"].fill("one [MASK] three")
    said(shown)
    assert shown.locator(".pg-response mark").all_inner_texts() == [wanted.mask_predictions[0][0][0]]
    names = shown.locator(".pg-bar-name").all_inner_texts()
    assert names == [word for word, _ in wanted.mask_predictions[0][:5]]
    looked(shown)


def test_caption(opened: Open, captioner: Any) -> None:
    pixels = draw_scene(2, 4).pixels
    shown = opened("#model=see")
    shown.get_by_label("Image", exact=True).set_input_files(png(pixels))
    assert said(shown) == captioner.caption(pixels).caption  # at once: there is nothing else to fill in
    assert "a photo.png, 96 × 96 pixels" in shown.inner_text(".pg-form")
    manifest = looked(shown)
    assert manifest["data"][0]["image"]["grid"] == list(captioner.grid_size)
    assert shown.locator(".jm-photo").is_visible()
    assert shown.evaluate("document.querySelector('.pg-image').naturalWidth") == 96


class Nobody:
    """Who waits for an answer, and hears nothing before."""

    def is_cancelled(self, index: int) -> bool:
        return False

    def is_streaming(self, index: int) -> bool:
        return False


def test_speak(opened: Open, speak_service: Any) -> None:
    speaking = RunningServer({"voice": speak_service}, ServerLimits())
    try:
        shown = opened("#model=voice&text=Forty+two.+Six.", at=speaking)
        shown.wait_for_selector(".pg-output[aria-busy=false] > .pg-response > audio")
        assert shown.locator(".pg-segments li").all_inner_texts() == ["forty two", "six"]
        spoken = speak_service.predict([speak_service.request_type(text="six")], Nobody())[0].audio
        seconds = shown.evaluate("""async () => { const one = document.querySelector(".pg-response > audio");
            while (!one.duration) await new Promise((next) => setTimeout(next, 20));
            return one.duration; }""")
        wanted = speak_service.predictor.speak("Forty two. Six.").duration_seconds
        assert seconds == pytest.approx(wanted, abs=0.01)
        assert looked(shown)["data"][0]["speech"]
        assert "first of 2 segments" in shown.inner_text(".pg-attention")
        # In another style; it is in the link.
        shown.get_by_text("Options").click()
        shown.get_by_label("Token 3", exact=True).first.fill("0.9")
        with shown.expect_request("**/speak/stream") as sent:
            ask(shown, "Speak", Text="six")
        tokens = sent.value.post_data_json["style_weights"]
        assert (len(tokens), tokens[2]) == (8, 0.9)
        shown.wait_for_selector(".pg-output[aria-busy=false] > .pg-response > audio")
        assert shown.locator(".pg-segments").count() == 0  # it was said in one go
        assert "style_weights=" in shown.evaluate("location.hash")
        with shown.expect_request("**/speak/stream") as sent:
            shown.reload()
        assert sent.value.post_data_json["style_weights"] == tokens
        # In that of a recording, which cannot be in a link.
        shown.get_by_text("Options").click()
        shown.get_by_role("button", name="Reset").click()
        with shown.expect_request("**/speak/stream") as sent:
            data = {"name": "a.wav", "mimeType": "audio/wav", "buffer": spoken}
            shown.get_by_label("or the style of a recording").set_input_files(data)
            shown.wait_for_function("() => document.querySelector('[name=style_audio]').files.length")
            ask(shown, "Speak", Text="six")
        assert base64.b64decode(sent.value.post_data_json["style_audio"]) == spoken
        assert "style_weights" not in sent.value.post_data_json
        shown.get_by_role("button", name="Copy link").click()
        shown.wait_for_selector("text=does not contain the recording")
    finally:
        speaking.stop()


DROP = """([data, type, name]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0)), given = new DataTransfer();
  given.items.add(new File([bytes], "x.png", { type }));
  const init = { dataTransfer: given, clipboardData: given, bubbles: true, cancelable: true };
  const event = name === "paste" ? new ClipboardEvent(name, init) : new DragEvent(name, init);
  document.querySelector(".pg-drop").dispatchEvent(event);
}"""


def test_a_picture_is_dropped_or_pasted(opened: Open, captioner: Any) -> None:
    shown = opened("#model=see")
    shown.wait_for_selector(".pg-drop")
    for name, number in (("drop", 4), ("paste", 5)):
        pixels = draw_scene(2, number).pixels
        data = base64.b64encode(png(pixels)["buffer"]).decode()
        with shown.expect_request("**/caption") as sent:
            shown.evaluate(DROP, [data, "image/png", name])
        assert sent.value.post_data_json == {"model": "see", "image": data}
        assert said(shown) == captioner.caption(pixels).caption
        looked(shown)
    shown.evaluate(DROP, [data, "text/plain", "drop"])
    assert "not an image" in shown.inner_text(".pg-form")


def test_pictures_that_the_server_does_not_take(opened: Open, captioner: Any) -> None:
    """One that is too large is made smaller, which is told; of a broken one, why it is refused."""
    small = get_service_type("caption")(captioner, RequestLimits(max_image_pixels=2_200 * 1_200))
    strict = RunningServer({"see": small}, ServerLimits(request_limits=small.request_limits))
    try:
        shown = opened("", at=strict)
        box = shown.get_by_label("Image", exact=True)
        with shown.expect_response("**/caption") as got:
            box.set_input_files(png(np.full((1500, 2500, 3), 90, np.uint8)))
        assert got.value.status == 200
        assert "sent as a JPEG of 2048 × 1229 pixels" in shown.inner_text(".pg-form")
        broken = png(draw_scene(2, 4).pixels)
        box.set_input_files({**broken, "buffer": broken["buffer"][:-1200]})
        shown.wait_for_selector(".pg-output .pg-error:not([hidden])")
        assert "a damaged image" in shown.inner_text(".pg-output .pg-error")
    finally:
        strict.stop()


# ------------------------------------------------------------------------------------------------- answers

MEAN = '<img src=x onerror=alert(1)>😀 "Anna" & 한국'


def test_whatever_a_text_holds_it_is_shown_as_text(opened: Open) -> None:
    entities = [
        {"type": "PER", "text": "Anna", "start": 31, "end": 35, "probability": 0.9},
        {"type": "<b>", "text": "한국", "start": 39, "end": 41, "probability": 1.0},
    ]
    assert [MEAN[one["start"] : one["end"]] for one in entities] == ["Anna", "한국"]  # type: ignore[misc]
    shown = opened(
        f"#model=tag&text={quote(MEAN)}",
        before=answers("tag", {"entities": entities, "words": [], "tags": []}),
    )
    said(shown)
    assert shown.locator(".pg-response mark bdi").all_inner_texts() == ["Anna", "한국"]
    text = shown.inner_text(".pg-text")
    assert text == MEAN.replace("Anna", "AnnaPER").replace("한국", "한국<b>")
    assert shown.locator(".pg-response img, .pg-response b").count() == 0
    shown.wait_for_selector(".pg-attention .pg-error")
    assert "nothing to see" in shown.inner_text(".pg-attention")


def test_other_answers_are_marked_when_they_are_chosen(opened: Open) -> None:
    spans = [(0, 4, 0.7), (14, 19, 0.2), (0, 0, 0.1)]
    context = "Anna lives in Seoul"
    first, *others = (
        {"answer": context[begin:end], "start": begin, "end": end, "probability": share} for begin, end, share in spans
    )
    shown = opened(
        f"#model=answer&context={quote(context)}&question=who&n_best=3",
        before=answers("answer", {**first, "alternatives": others}),
    )
    assert said(shown) == "Anna"
    buttons = shown.locator("button.pg-bar")
    assert buttons.all_inner_texts()[2].split("\n")[0] == "(no answer)"
    assert shown.inner_text(".pg-text mark") == "Anna"
    buttons.nth(1).click()
    assert shown.inner_text(".pg-text mark") == "Seoul"
    assert [one.get_attribute("aria-pressed") for one in buttons.all()] == ["false", "true", "false"]
    buttons.nth(2).click()
    assert shown.locator(".pg-text mark").count() == 0


# -------------------------------------------------------------------------------------------------- links


def test_a_link_holds_model_and_input_and_no_server_sees_it(opened: Open, running: RunningServer) -> None:
    seen: list[str] = []
    text = "we walk & talk? 100 % #한국\nagain"
    shown = opened(before=lambda page: page.on("request", lambda request: seen.append(request.url)))
    shown.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=running.url)
    shown.locator(".pg-model[data-name=classify]").click()
    assert shown.evaluate("location.hash") == "#model=classify"
    ask(shown, "Classify", Text=text)
    label = said(shown)
    shown.get_by_role("button", name="Copy link").click()
    shown.wait_for_selector("text=Link copied.")
    link = shown.evaluate("navigator.clipboard.readText()")
    other = opened(link.removeprefix(f"{running.url}/"))  # it fills the form, and runs
    assert said(other) == label
    assert other.get_by_label("Text", exact=True).input_value() == text
    assert all("#" not in url and "walk" not in url for url in seen)
    assert all(url.startswith(running.url) or re.match("data:|blob:", url) for url in seen)
    # Back to what was asked before.
    ask(other, "Classify", Text="another")
    said(other)
    other.go_back()
    other.wait_for_function("() => document.querySelector('textarea').value.startsWith('we walk')")


def test_links_that_say_little_or_too_much(opened: Open) -> None:
    shown = opened("#model=nobody&text=x")
    shown.wait_for_selector("text=There is no model nobody on this server.")
    assert shown.locator(".pg-model[aria-current=true]").inner_text().startswith("translate")
    shown = opened("#model=translate&beam_size=-7&n_best=x&nothing=1")
    shown.wait_for_selector("textarea")
    assert shown.evaluate("[...document.querySelectorAll('input[type=number]')].map((one) => one.value)") == [
        *("5", "1")
    ]
    assert shown.locator(".pg-response > *").count() == 0


def test_a_picture_cannot_be_in_a_link(opened: Open) -> None:
    shown = opened("#model=see")
    shown.get_by_role("button", name="Example 1").click()
    said(shown)
    shown.get_by_role("button", name="Copy link").click()
    shown.wait_for_selector("text=It does not contain the image, which is too large for a link.")
    assert shown.evaluate("location.hash") == "#model=see"


# ------------------------------------------------------------------------------------------------ refusals


def test_a_refusal_is_told_as_the_server_told_it(opened: Open) -> None:
    shown = opened("#model=fill-mask")
    ask(shown, "Fill masks", Text="no word is hidden")
    shown.wait_for_selector(".pg-output .pg-error:not([hidden])")
    assert "the text has no mask: write [MASK]" in shown.inner_text(".pg-output [role=alert]")
    assert not shown.get_by_role("button", name="Try again").is_visible()
    ask(shown, "Fill masks", Text="one [MASK]")
    said(shown)
    assert not shown.locator(".pg-output .pg-error").is_visible()


def test_when_there_is_too_much_to_do_it_counts_down(opened: Open) -> None:
    full = {"error": "the queue is full; try again in 2 s"}
    shown = opened("#model=tag", before=answers("tag", full, 503, {"Retry-After": "2"}))
    ask(shown, "Find entities", Text="Anna")
    button = shown.locator(".pg-output .pg-error button")
    button.wait_for()
    assert "the queue is full; try again in 2 s (503)" in shown.inner_text(".pg-output")
    assert button.inner_text() == "Try again in 2 s"
    assert button.is_disabled()
    shown.wait_for_selector("text=Try again in 1 s")
    shown.unroute("**/tag")
    shown.wait_for_selector(".pg-output .pg-error button:not([disabled])")
    button.click()
    said(shown)


def test_a_server_that_is_gone(opened: Open, services: dict[str, Any]) -> None:
    gone = RunningServer({"tag": services["tag"]}, ServerLimits())
    shown = opened("", at=gone)
    shown.wait_for_selector("textarea")
    gone.stop()
    ask(shown, "Find entities", Text="Anna")
    shown.wait_for_selector("text=The server cannot be reached")
    assert shown.locator(".pg-output").get_by_role("button", name="Try again").is_enabled()


def test_the_token_is_asked_for_and_kept_in_the_tab(opened: Open, services: dict[str, Any]) -> None:
    secret = RunningServer({"tag": services["tag"]}, ServerLimits(), auth_token="a b§한")
    try:
        shown = opened("#model=tag&text=Anna", at=secret)
        box = shown.get_by_label("This server requires a token")
        box.fill("wrong")
        box.press("Enter")
        shown.wait_for_selector("text=The token is wrong.")
        box.fill("a b§한")
        box.press("Enter")
        said(shown)
        looked(shown)
        assert not box.is_visible()
        assert shown.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
        shown.reload()
        said(shown)
    finally:
        secret.stop()


# --------------------------------------------------------------------------------------- on every device


@pytest.mark.parametrize("name", ["translate", "answer", "see"])
def test_on_a_phone(opened: Open, name: str) -> None:
    inputs = {"translate": "&text=we+walk", "answer": "&question=who&context=Anna+" + "lives+in+Seoul+" * 9}
    shown = opened(f"#model={name}{inputs.get(name, '')}", **PHONE)
    if name == "see":
        assert shown.get_by_text("Take a photo").is_visible()
        assert shown.locator("input[capture=environment]").count() == 1
        shown.get_by_role("button", name="Example 2").click()
    said(shown)
    looked(shown)
    assert shown.evaluate("document.documentElement.scrollWidth") == 360
    for button in shown.locator(".pg-button:visible").all():
        assert button.bounding_box()["height"] >= 44
    form, answer = (shown.locator(one).bounding_box() for one in (".pg-form", ".pg-output"))
    assert answer["y"] > form["y"] + form["height"] - 1  # below it


def test_by_keys_alone_and_for_those_who_listen(opened: Open) -> None:
    shown = opened("#model=answer")
    shown.wait_for_selector("textarea")
    fields = shown.locator("input:visible, textarea:visible")
    names = "(one) => one.labels?.[0]?.textContent || one.getAttribute('aria-label')"
    assert all(one.evaluate(names) for one in fields.all())
    shown.get_by_label("Text that contains the answer").focus()
    shown.keyboard.type("Anna lives in Seoul")
    shown.keyboard.press("Tab")
    shown.keyboard.type("who?")
    shown.keyboard.press("Enter")
    said(shown)
    shown.get_by_label("Text that contains the answer").focus()
    with shown.expect_response("**/answer"):
        shown.keyboard.press("Control+Enter")
    ask(shown, "Answer", Question="")
    assert shown.evaluate("document.activeElement.name") == "question"  # what is missing
    assert shown.locator("main, nav, form, section, h1").count() >= 5


def test_in_the_dark(opened: Open) -> None:
    light, dark = (opened("#model=tag&text=Anna", color_scheme=one) for one in ("light", "dark"))
    for shown, below in ((light, False), (dark, True)):
        looked(shown)
        ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", ground))) < 60) is below
        assert shown.get_attribute(".jumok", "data-theme") == ("dark" if below else "light")


# --------------------------------------------------------------------------------------------- the files


def test_the_files_and_what_they_may_do(echo: Echo) -> None:
    with TestClient(build_app({"echo": echo}, auth_token="x")) as client:  # no token is needed to see the page
        got = client.get("/")
        policy = got.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert 'src="/page.js"' in got.text
        for path, kind in (("/page.js", "text/javascript"), ("/page.css", "text/css")):
            got = client.get(path)
            assert got.headers["content-type"].startswith(kind)
            assert client.get(path, headers={"If-None-Match": got.headers["etag"]}).status_code == 304
            plain = client.get(path, headers={"Accept-Encoding": "identity"})
            assert plain.text == got.text
            assert int(got.headers["content-length"]) < len(plain.content) / 2
        assert 'path="/page.js"' in client.get("/metrics", headers={"Authorization": "Bearer x"}).text
        assert client.get("/page.py").status_code == 401
        assert client.post("/", content=b"x").status_code == 405
    with TestClient(build_app({"echo": echo}), root_path='/a"b') as client:
        assert 'src="/a&quot;b/page.js"' in client.get("/").text


def test_a_model_without_a_form(opened: Open, echo: Echo) -> None:
    other = RunningServer({"again": echo}, ServerLimits())
    try:
        opened("", at=other).wait_for_selector("text=There is no form for the task echo")
    finally:
        other.stop()


def test_no_file_fetches_from_elsewhere_or_parses_html() -> None:
    everything = web_page.build_script() + web_page.build_style_sheet() + web_page.PAGE_TEMPLATE
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "@import",
        "url(",
    ):
        assert word not in everything
    assert set(re.findall(r"https?://[\w./]+", everything)) == {"http://www.w3.org/2000/svg"}


def test_the_files_are_real_modules_and_can_be_joined() -> None:
    names = re.compile(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)
    texts = {name: assets.read_asset(f"{name}.js") for name in assets.SCRIPT_NAMES}
    texts |= {name: web_page.read_static_file(f"{name}.js") for name in web_page.SCRIPT_MODULES}
    assert len(texts) == len(assets.SCRIPT_NAMES) + len(web_page.SCRIPT_MODULES)
    seen: dict[str, str] = {}
    before: list[str] = []
    for name, source in texts.items():
        for found in names.findall(source):
            assert found not in seen, f"{found} is in {name} and {seen[found]}"
            seen[found] = name
        body = re.sub(r"^import [^;]*;\n", "", source, flags=re.MULTILINE)
        imports = r'^import \{([^}]*)\} from "(\./|\.\./\.\./look/viewer/static/)(\w+)\.js";$'
        for wanted, folder, other in re.findall(imports, source, re.MULTILINE):
            assert other in before, f"{name} imports {other}, which stands after it"
            assert (other in web_page.SCRIPT_MODULES) == (name in web_page.SCRIPT_MODULES and folder == "./")
            for word in filter(None, re.split(r"[\s,]+", wanted)):
                assert re.search(rf"^export .*\b{word}\b", texts[other], re.MULTILINE), word
                assert re.search(rf"\b{word}\b", body), f"{name} imports {word} and does not use it"
        before.append(name)
