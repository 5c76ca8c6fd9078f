"""Captions over HTTP: equal to those of the predictor, and images from untrusted clients are rejected safely."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from running_server import run_async
from starlette.testclient import TestClient

from jumok.data.builtin.scenes import draw_scene
from jumok.look.viewer.tiles import unpack
from jumok.serve.app import build_app
from jumok.serve.limits import ServerLimits
from jumok.tasks import get_service_type
from jumok.tasks.api import RequestLimits
from jumok.tasks.caption.predictor import CaptionOptions

pytestmark = pytest.mark.long


Image = pytest.importorskip("PIL.Image")
PNG = {"Content-Type": "image/png"}


def encode_image(pixels: Any, format_name: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format_name)
    return file.getvalue()


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


SCENE = draw_scene(2, 4).pixels
GOOD = encode_image(SCENE)


def build_png_of_size(width: int, height: int) -> bytes:
    """Build a PNG of a few hundred bytes whose header has this size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(100_000))), (b"IEND", b""))
    chunks = (struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
              for name, data in parts)  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.fixture(scope="module")
def client(caption_service: Any) -> Iterator[TestClient]:
    with TestClient(build_app({"see": caption_service}), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("media_type", ["PNG", "JPEG", "WEBP"])
def test_an_image_in_json_or_as_body(client: TestClient, captioner: Any, media_type: str) -> None:
    data = encode_image(SCENE, media_type)
    expected = captioner.caption(data)
    response = client.post("/caption", json={"image": encode_base64(data), "alignments": True})
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["caption"], body["words"]) == (expected.caption, list(expected.words))
    assert (body["score"], body["finished"]) == (pytest.approx(expected.score), expected.finished)
    assert tuple(body["grid_size"]) == captioner.grid_size
    strongest = expected.attention.flatten(1).argmax(1).tolist()
    assert [row * body["grid_size"][1] + column for row, column in body["attention_peaks"]] == strongest
    as_file = client.post("/caption", content=data, headers={"Content-Type": f"image/{media_type.lower()}"})
    assert as_file.json() == body | {"attention_peaks": None, "score": pytest.approx(body["score"])}


def test_n_best(client: TestClient, captioner: Any) -> None:
    response = client.post("/caption", json={"image": encode_base64(GOOD), "beam_size": 4, "n_best": 3}).json()
    expected = captioner.caption(GOOD, CaptionOptions(beam_size=4, n_best=3))
    captions = [response["caption"], *(other["caption"] for other in response["alternatives"])]
    assert captions == [expected.caption, *(other.caption for other in expected.alternatives)]
    assert len(captions) == 3


def test_attention_page(client: TestClient, captioner: Any) -> None:
    for arguments in ({"json": {"image": encode_base64(GOOD)}}, {"content": GOOD, "headers": PNG}):
        body = client.post("/attend/caption", **arguments).json()
        manifest = client.get(f"{body['attention_url']}manifest.json").json()
        assert manifest["title"] == body["prediction"]["caption"]
        [data] = manifest["data"]
        layer = data["layers"][0]
        [grid] = data["image_layers"][layer["image_layer"]]["grids"]
        assert grid["shape"] == list(captioner.grid_size)
        rows, cols = layer["shape"]
        assert cols == captioner.grid_size[0] * captioner.grid_size[1]
        tile = {"layer": 0, "head": 0, "rows": f"0,{rows}", "cols": f"0,{cols}", "quantity": "weights"}
        weights = unpack(client.get(f"{body['attention_url']}tiles", params=tile).content)
        assert np.allclose(weights.sum(1), 1, atol=1e-4)


def test_rotated_transparent_and_large_images(client: TestClient, captioner: Any) -> None:
    rotated = Image.fromarray(np.rot90(SCENE).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate clockwise, as phones write it
    file = io.BytesIO()
    rotated.save(file, "PNG", exif=exif)
    wide = np.full((300, 1200, 4), 128, np.uint8)
    large = np.full((2000, 3000, 3), 77, np.uint8)
    for data in (file.getvalue(), *map(encode_image, (wide, large, SCENE[:1, :1], SCENE[..., 0]))):
        response = client.post("/caption", content=data, headers=PNG)
        assert response.json()["caption"] == captioner.caption(data).caption
    assert client.post("/caption", content=file.getvalue(), headers=PNG).json()["caption"] == (
        captioner.caption(SCENE).caption
    )


def test_estimated_tokens_are_cells_times_hypotheses(captioner: Any, caption_service: Any) -> None:
    request_type = caption_service.request_type
    num_cells = captioner.grid_size[0] * captioner.grid_size[1]
    assert caption_service.estimate_tokens(request_type(image=GOOD, beam_size=2)) == 2 * num_cells
    beam_size = captioner.run.recipe.decode.beam_size
    assert caption_service.estimate_tokens(request_type(image=GOOD)) == beam_size * num_cells
    assert caption_service.estimate_tokens(request_type(image=GOOD, n_best=7)) == 7 * num_cells


def test_a_damaged_image_does_not_fail_its_batch(caption_service: Any) -> None:
    app = build_app({"see": caption_service}, ServerLimits(max_batch_delay=0.2))
    bad = [encode_image(SCENE, "JPEG")[:1500], GOOD[:-900]]

    async def send_together() -> list[int]:
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as client,
        ):
            bodies = [GOOD, bad[0], GOOD, bad[1], GOOD]
            requests = [client.post("/caption", content=body, headers=PNG) for body in bodies]
            return [response.status_code for response in await asyncio.gather(*requests)]

    assert run_async(send_together()) == [200, 422, 200, 422, 200]


# ------------------------------------------------------------------------------------------- rejections


@pytest.mark.parametrize(
    ("data", "status", "message"),
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
        (encode_image(SCENE, "JPEG")[:1500], 422, "a damaged image"),
        (encode_image(SCENE, "WEBP")[:300], 422, "a damaged image"),
        (encode_image(SCENE, "GIF"), 422, "not an image in PNG, JPEG or WebP"),
        (encode_image(SCENE, "TIFF"), 422, "not an image in PNG, JPEG or WebP"),
        (build_png_of_size(7000, 6000), 413, "7000 × 6000; the limit is 24000000 pixels"),
        (build_png_of_size(65_000, 65_000), 413, "an image of too many pixels"),
        (build_png_of_size(2**31 - 1, 2**31 - 1), 413, "an image of too many pixels"),
        (build_png_of_size(0, 5), 422, "a damaged image"),
        (build_png_of_size(4800, 4800), 422, "a damaged image"),  # it has too few bytes for its size
        (GOOD + bytes(12 << 20), 413, "an image of too many bytes"),
        (GOOD + bytes(20 << 20), 413, "the request is too large"),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else "",
)
def test_invalid_images_are_rejected_with_a_message(client: TestClient, data: bytes, status: int, message: str) -> None:
    for path in ("/caption", "/attend/caption"):
        response = client.post(path, content=data, headers=PNG)
        assert response.status_code == status, response.text
        assert message in response.json()["error"]
        assert len(response.content) < 500
        assert " at 0x" not in response.text  # no memory address
        if data:
            response = client.post(path, json={"image": encode_base64(data)})
            assert response.status_code == status, response.text
    assert client.post("/caption", content=GOOD, headers=PNG).status_code == 200


@pytest.mark.filterwarnings("ignore")  # those of Pillow
@pytest.mark.parametrize("media_type", ["PNG", "JPEG", "WEBP"])
def test_randomly_changed_files(client: TestClient, media_type: str) -> None:
    rng, original = np.random.default_rng(3), encode_image(SCENE[:40, :40], media_type)
    for _ in range(40):
        data = bytearray(original)
        for position in rng.integers(0, len(data), rng.integers(1, 9)):
            data[position] = rng.integers(256)
        end = len(data) if rng.random() < 0.7 else int(rng.integers(1, len(data)))
        response = client.post("/caption", content=bytes(data[:end]), headers=PNG)
        assert response.status_code in (200, 413, 422), response.text
    assert client.post("/caption", content=GOOD, headers=PNG).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 422, "image: Field required"),
        ({"image": None}, 422, "image"),
        ({"image": 7}, 422, "image"),
        ({"image": [1, 2]}, 422, "image"),
        ({"image": ""}, 422, "an empty image"),
        ({"image": "photo.jpg"}, 422, "image: it is not base64"),
        ({"image": "/etc/passwd"}, 422, "image"),
        ({"image": "https://example.com/photo.jpg"}, 422, "image: it is not base64"),
        ({"image": f"data:image/png;base64,{encode_base64(GOOD)}"}, 422, "image: it is not base64"),
        ({"image": "é" * 8}, 422, "image: it is not base64"),
        ({"image": encode_base64(GOOD)[:-2]}, 422, "image: it is not base64"),
        ({"image": "\ud800"}, 422, "image: it is not base64"),
        ({"image": encode_base64(GOOD), "path": "/etc/passwd"}, 422, "path"),
        ({"image": encode_base64(GOOD), "model": "../see"}, 404, "the models are: see"),
        ({"image": encode_base64(GOOD), "beam_size": 11}, 413, "beam_size is 11; this server accepts at most 10"),
        ({"image": encode_base64(GOOD), "beam_size": 0}, 422, "beam"),
        ({"image": encode_base64(GOOD), "beam_size": 1, "n_best": 2}, 422, "n_best 2 needs a beam of at least 2"),
        ({"image": encode_base64(GOOD), "n_best": 10**30}, 413, "n_best"),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, dict) else "",
)
def test_invalid_caption_requests(client: TestClient, body: Any, status: int, message: str) -> None:
    response = client.post("/caption", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    "media_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "image/gif"],
)
def test_media_types_without_cors_preflight_are_rejected(client: TestClient, media_type: str) -> None:
    response = client.post("/caption", content=GOOD, headers={"Content-Type": media_type})
    assert response.status_code == 415
    assert "expected application/json or image/png or image/jpeg" in response.json()["error"]


def test_limits_are_configurable(captioner: Any) -> None:
    service = get_service_type("caption")(captioner, RequestLimits(max_image_bytes=len(GOOD), max_image_pixels=96 * 96))
    limits = ServerLimits(request_limits=service.request_limits)
    with TestClient(build_app({"see": service}, limits), raise_server_exceptions=False) as client:
        assert client.post("/caption", content=GOOD, headers=PNG).status_code == 200
        assert client.post("/caption", content=GOOD + b"\0", headers=PNG).status_code == 413
        small = encode_image(np.zeros((97, 96, 3), np.uint8))
        assert client.post("/caption", content=small, headers=PNG).status_code == 413
    with TestClient(build_app({"see": service}, ServerLimits(max_body_bytes=1000))) as client:
        assert "1,000 bytes" in client.post("/caption", content=GOOD, headers=PNG).json()["error"]


def test_the_total_size_of_bodies_is_limited(caption_service: Any) -> None:
    """The bodies that are being received have a total limit; a request beyond it gets 503."""
    app = build_app({"see": caption_service}, ServerLimits(max_body_bytes=1 << 20, max_total_body_bytes=1 << 20))
    part = bytes(600_000)

    async def send_requests() -> list[int]:
        statuses: list[int] = []
        may_finish = asyncio.Event()

        async def ask(must_wait: bool) -> None:
            parts = [part, b""]

            async def receive() -> dict[str, Any]:
                if must_wait and len(parts) == 1:
                    await may_finish.wait()
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

            async def send(message: dict[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            headers = [(b"content-type", b"image/png"), (b"host", b"x")]
            scope = {"type": "http", "method": "POST", "path": "/caption", "raw_path": b"/caption"}
            scope |= {"query_string": b"", "headers": headers, "scheme": "http", "server": ("x", 80)}
            await app({**scope, "asgi": {"version": "3.0"}, "http_version": "1.1"}, receive, send)

        async with app.router.lifespan_context(app):
            first = asyncio.create_task(ask(must_wait=True))
            await asyncio.sleep(0.05)
            await ask(must_wait=False)
            may_finish.set()
            await first
            await ask(must_wait=False)
        return statuses

    assert run_async(send_requests()) == [503, 422, 422]


# ------------------------------------------------------------------------------------------ description


def test_metadata_and_openapi(client: TestClient, captioner: Any, tmp_path: Path) -> None:
    [body] = client.get("/models").json()
    assert (body["task"], body["metadata"]["grid_size"]) == ("caption", list(captioner.grid_size))
    assert body["metadata"]["max_image_pixels"] == 24_000_000
    for example in body["metadata"]["examples"]:
        assert client.post("/caption", json=example).status_code == 200
    content = client.get("/openapi.json").json()["paths"]["/caption"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "image/png", "image/jpeg", "image/webp"}
    assert content["image/png"]["schema"]["format"] == "binary"
