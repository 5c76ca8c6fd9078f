"""Pictures that are sent: described as by describe(), or refused with words; none of them is trusted."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from jumok.data.builtin.scenes import draw_scene
from jumok.look.viewer.tiles import unpack
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.tasks import get_service_type
from jumok.tasks.api import RequestLimits
from jumok.tasks.caption.predictor import CaptionOptions

Image = pytest.importorskip("PIL.Image")
PNG = {"Content-Type": "image/png"}


def file_of(pixels: Any, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **more)
    return file.getvalue()


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


SCENE = draw_scene(2, 4).pixels
GOOD = file_of(SCENE)


def of_size(width: int, height: int) -> bytes:
    """A PNG that says that it is so large, in a few hundred bytes."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(100_000))), (b"IEND", b""))
    chunks = (struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
              for name, data in parts)  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.fixture(scope="module")
def client(caption_service: Any) -> Iterator[TestClient]:
    with TestClient(build_app({"see": caption_service}), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_in_json_or_alone(client: TestClient, captioner: Any, kind: str) -> None:
    data = file_of(SCENE, kind)
    wanted = captioner.caption(data)
    got = client.post("/caption", json={"image": coded(data), "alignments": True})
    assert got.status_code == 200, got.text
    told = got.json()
    assert (told["caption"], told["words"]) == (wanted.caption, list(wanted.words))
    assert (told["score"], told["finished"]) == (pytest.approx(wanted.score), wanted.finished)
    assert tuple(told["grid_size"]) == captioner.grid_size
    strongest = wanted.attention.flatten(1).argmax(1).tolist()
    assert [row * told["grid_size"][1] + column for row, column in told["attention_peaks"]] == strongest
    alone = client.post("/caption", content=data, headers={"Content-Type": f"image/{kind.lower()}"})
    assert alone.json() == told | {"attention_peaks": None, "score": pytest.approx(told["score"])}


def test_several_captions(client: TestClient, captioner: Any) -> None:
    got = client.post("/caption", json={"image": coded(GOOD), "beam_size": 4, "n_best": 3}).json()
    wanted = captioner.caption(GOOD, CaptionOptions(beam_size=4, n_best=3))
    said = [got["caption"], *(one["caption"] for one in got["alternatives"])]
    assert said == [wanted.caption, *(one.caption for one in wanted.alternatives)]
    assert len(said) == 3


def test_where_it_looked(client: TestClient, captioner: Any) -> None:
    for more in ({"json": {"image": coded(GOOD)}}, {"content": GOOD, "headers": PNG}):
        told = client.post("/attend/caption", **more).json()
        manifest = client.get(f"{told['attention_url']}manifest.json").json()
        assert manifest["title"] == told["prediction"]["caption"]
        [one] = manifest["data"]
        assert one["image"]["grid"] == list(captioner.grid_size)
        rows, cols = one["layers"][0]["shape"]
        assert cols == captioner.grid_size[0] * captioner.grid_size[1]
        asked = {"layer": 0, "head": 0, "rows": f"0,{rows}", "cols": f"0,{cols}", "quantity": "weights"}
        weights = unpack(client.get(f"{told['attention_url']}tiles", params=asked).content)
        assert np.allclose(weights.sum(1), 1, atol=1e-4)


def test_turned_and_see_through_pictures_and_large_ones(client: TestClient, captioner: Any) -> None:
    turned = Image.fromarray(np.rot90(SCENE).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise, as phones say it
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    wide = np.full((300, 1200, 4), 128, np.uint8)
    large = np.full((2000, 3000, 3), 77, np.uint8)
    for data in (file.getvalue(), file_of(wide), file_of(large), file_of(SCENE[:1, :1]), file_of(SCENE[..., 0])):
        got = client.post("/caption", content=data, headers=PNG)
        assert got.json()["caption"] == captioner.caption(data).caption
    assert client.post("/caption", content=file.getvalue(), headers=PNG).json()["caption"] == (
        captioner.caption(SCENE).caption
    )


def test_the_work_is_places_times_hypotheses(captioner: Any, caption_service: Any) -> None:
    asked = caption_service.request_type
    places = captioner.grid_size[0] * captioner.grid_size[1]
    assert caption_service.estimate_tokens(asked(image=GOOD, beam_size=2)) == 2 * places
    assert caption_service.estimate_tokens(asked(image=GOOD)) == captioner.run.recipe.decode.beam_size * places
    assert caption_service.estimate_tokens(asked(image=GOOD, n_best=7)) == 7 * places


def test_one_that_is_broken_takes_nobody_along(caption_service: Any) -> None:
    import asyncio

    import httpx2

    made = build_app({"see": caption_service}, ServerLimits(max_batch_delay=0.2))
    bad = [file_of(SCENE, "JPEG")[:1500], GOOD[:-900]]

    async def all_at_once() -> list[int]:
        async with (
            made.router.lifespan_context(made),
            httpx2.AsyncClient(transport=httpx2.ASGITransport(made), base_url="http://test") as client,
        ):
            bodies = [GOOD, bad[0], GOOD, bad[1], GOOD]
            sent = [client.post("/caption", content=one, headers=PNG) for one in bodies]
            return [got.status_code for got in await asyncio.gather(*sent)]

    assert in_a_thread(all_at_once) == [200, 422, 200, 422, 200]


def in_a_thread(made: Any) -> Any:
    """Where no browser's event loop runs."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(made())).result(60)


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (b"", 422, "the request body is empty"),
        (b"GIF89a" + bytes(40), 422, "not an image in PNG, JPEG or WebP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 422, "not an image in PNG, JPEG or WebP"),
        (b"%PDF-1.7", 422, "not an image"),
        (b"/etc/passwd", 422, "not an image"),
        (b"http://localhost:8000/health", 422, "not an image"),
        (b"\x89PNG\r\n\x1a\n", 422, "a damaged image"),
        (b"\xff\xd8\xff\xe0" + bytes(99), 422, "a damaged image"),
        (b"RIFF\x10\x00\x00\x00WEBPVP8 ", 422, "a damaged image"),
        (GOOD[:-1200], 422, "a damaged image"),
        (file_of(SCENE, "JPEG")[:1500], 422, "a damaged image"),
        (file_of(SCENE, "WEBP")[:300], 422, "a damaged image"),
        (file_of(SCENE, "GIF"), 422, "not an image in PNG, JPEG or WebP"),
        (file_of(SCENE, "TIFF"), 422, "not an image in PNG, JPEG or WebP"),
        (of_size(7000, 6000), 413, "7000 × 6000; the limit is 24000000 pixels"),
        (of_size(65_000, 65_000), 413, "an image of too many pixels"),
        (of_size(2**31 - 1, 2**31 - 1), 413, "an image of too many pixels"),
        (of_size(0, 5), 422, "a damaged image"),
        (of_size(4800, 4800), 422, "a damaged image"),  # and its few bytes do not fill it
        (GOOD + bytes(12 << 20), 413, "an image of too many bytes"),
        (GOOD + bytes(20 << 20), 413, "the request is too large"),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else "",
)
def test_bad_pictures_are_refused_with_words(client: TestClient, data: bytes, status: int, said: str) -> None:
    for path in ("/caption", "/attend/caption"):
        got = client.post(path, content=data, headers=PNG)
        assert got.status_code == status, got.text
        assert said in got.json()["error"]
        assert len(got.content) < 500
        assert " at 0x" not in got.text  # where something lies in our memory
        if data:
            got = client.post(path, json={"image": coded(data)})
            assert got.status_code == status, got.text
    assert client.post("/caption", content=GOOD, headers=PNG).status_code == 200


@pytest.mark.filterwarnings("ignore")  # Pillow's, of what it finds in such files
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_whatever_is_changed_in_a_file(client: TestClient, kind: str) -> None:
    chance, whole = np.random.default_rng(3), file_of(SCENE[:40, :40], kind)
    for _ in range(40):
        data = bytearray(whole)
        for at in chance.integers(0, len(data), chance.integers(1, 9)):
            data[at] = chance.integers(256)
        end = len(data) if chance.random() < 0.7 else int(chance.integers(1, len(data)))
        got = client.post("/caption", content=bytes(data[:end]), headers=PNG)
        assert got.status_code in (200, 413, 422), got.text
    assert client.post("/caption", content=GOOD, headers=PNG).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 422, "image: Field required"),
        ({"image": None}, 422, "image"),
        ({"image": 7}, 422, "image"),
        ({"image": [1, 2]}, 422, "image"),
        ({"image": ""}, 422, "an empty image"),
        ({"image": "photo.jpg"}, 422, "image: it is not base64"),
        ({"image": "/etc/passwd"}, 422, "image"),
        ({"image": "https://example.com/photo.jpg"}, 422, "image: it is not base64"),
        ({"image": f"data:image/png;base64,{coded(GOOD)}"}, 422, "image: it is not base64"),
        ({"image": "é" * 8}, 422, "image: it is not base64"),
        ({"image": coded(GOOD)[:-2]}, 422, "image: it is not base64"),
        ({"image": "\ud800"}, 422, "image: it is not base64"),
        ({"image": coded(GOOD), "path": "/etc/passwd"}, 422, "path"),
        ({"image": coded(GOOD), "model": "../see"}, 404, "the models are: see"),
        ({"image": coded(GOOD), "beam_size": 11}, 413, "beam_size is 11; this server accepts at most 10"),
        ({"image": coded(GOOD), "beam_size": 0}, 422, "beam"),
        ({"image": coded(GOOD), "beam_size": 1, "n_best": 2}, 422, "n_best 2 needs a beam of at least 2"),
        ({"image": coded(GOOD), "n_best": 10**30}, 413, "n_best"),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, dict) else "",
)
def test_bad_requests_are_refused_with_words(client: TestClient, body: Any, status: int, said: str) -> None:
    import json

    got = client.post("/caption", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert got.status_code == status, got.text
    assert said in got.json()["error"]


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "image/gif"]
)
def test_what_a_page_from_elsewhere_could_send_is_not_read(client: TestClient, kind: str) -> None:
    got = client.post("/caption", content=GOOD, headers={"Content-Type": kind})
    assert got.status_code == 415
    assert "expected application/json or image/png or image/jpeg" in got.json()["error"]


def test_limits_are_those_of_the_server(captioner: Any) -> None:
    service = get_service_type("caption")(captioner, RequestLimits(max_image_bytes=len(GOOD), max_image_pixels=96 * 96))
    limits = ServerLimits(request_limits=service.request_limits)
    with TestClient(build_app({"see": service}, limits), raise_server_exceptions=False) as client:
        assert client.post("/caption", content=GOOD, headers=PNG).status_code == 200
        assert client.post("/caption", content=GOOD + b"\0", headers=PNG).status_code == 413
        small = file_of(np.zeros((97, 96, 3), np.uint8))
        assert client.post("/caption", content=small, headers=PNG).status_code == 413
    with TestClient(build_app({"see": service}, ServerLimits(max_body_bytes=1000))) as client:
        assert "1,000 bytes" in client.post("/caption", content=GOOD, headers=PNG).json()["error"]


def test_much_at_once_is_not_kept(caption_service: Any) -> None:
    """A server holds so many bytes of bodies; who comes then is told to come again."""
    import asyncio

    made = build_app({"see": caption_service}, ServerLimits(max_body_bytes=1 << 20, max_total_body_bytes=1 << 20))
    part = bytes(600_000)

    async def two() -> list[int]:
        statuses: list[int] = []
        there = asyncio.Event()

        async def ask(waits: bool) -> None:
            parts = [part, b""]

            async def receive() -> dict[str, Any]:
                if waits and len(parts) == 1:
                    await there.wait()
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

            async def send(message: dict[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            headers = [(b"content-type", b"image/png"), (b"host", b"x")]
            scope = {"type": "http", "method": "POST", "path": "/caption", "raw_path": b"/caption"}
            scope |= {"query_string": b"", "headers": headers, "scheme": "http", "server": ("x", 80)}
            await made({**scope, "asgi": {"version": "3.0"}, "http_version": "1.1"}, receive, send)

        async with made.router.lifespan_context(made):
            first = asyncio.create_task(ask(waits=True))
            await asyncio.sleep(0.05)
            await ask(waits=False)
            there.set()
            await first
            await ask(waits=False)
        return statuses

    assert in_a_thread(two) == [503, 422, 422]


# ------------------------------------------------------------------------------------------ how it is


def test_what_is_told_of_it(client: TestClient, captioner: Any, tmp_path: Path) -> None:
    [told] = client.get("/models").json()
    assert (told["task"], told["metadata"]["grid_size"]) == ("caption", list(captioner.grid_size))
    assert told["metadata"]["max_image_pixels"] == 24_000_000
    for example in told["metadata"]["examples"]:
        assert client.post("/caption", json=example).status_code == 200
    described = client.get("/openapi.json").json()["paths"]["/caption"]["post"]["requestBody"]["content"]
    assert set(described) == {"application/json", "image/png", "image/jpeg", "image/webp"}
    assert described["image/png"]["schema"]["format"] == "binary"
