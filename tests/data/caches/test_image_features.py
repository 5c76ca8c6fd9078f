"""The cache of image features: reuse, changed images, kills and concurrent processes."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.data.caches import feature_cache as module
from jumok.data.caches.image_features import ImageFeatureCache
from jumok.data.images import ImageFile, ImageLimits
from jumok.data.readers.captions import CaptionExample
from jumok.data.readers.invalid_examples import InvalidExample, SkippedExamples, skip_invalid
from jumok.errors import InputError

Image = pytest.importorskip("PIL.Image")

SHAPE = (3, 5)
ROW_BYTES = 2 * 3 * 5  # bytes


def write_images(folder: Path, read_greys: list[int]) -> list[CaptionExample]:
    """A plain picture of each grey."""
    examples = []
    for number, grey in enumerate(read_greys):
        path = folder / f"{number}.png"
        with io.BytesIO() as file:
            Image.new("RGB", (7, 11), (grey,) * 3).save(file, "PNG")
            path.write_bytes(file.getvalue())
        examples.append(CaptionExample(ImageFile.from_path(path), (f"grey {grey}",), f"my.tsv:{number}"))
    return examples


class Encoder:
    """Features that are the picture's grey, and a note of all that it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def prepare(self, pixels: Any) -> Any:
        assert pixels.shape == (11, 7, 3)
        return pixels[:1, :1]

    def encode(self, pictures: list[Any]) -> Any:
        read_greys = [int(example[0, 0, 0]) for example in pictures]
        self.seen += read_greys
        return np.array(read_greys, np.float32)[:, None, None] * np.ones(SHAPE, np.float32)


def open_cache(folder: Path) -> ImageFeatureCache:
    return ImageFeatureCache.open(folder / "cache", encoder="my net/7", image_size=64)


def fill(cache: ImageFeatureCache, examples: list[CaptionExample], encoder: Encoder | None = None) -> list[int]:
    """The greys that had to be computed."""
    encoder = encoder or Encoder()
    assert list(cache.fill(examples, encoder.prepare, encoder.encode)) == examples
    return encoder.seen


def read_greys(cache: ImageFeatureCache, examples: list[CaptionExample]) -> list[int]:
    rows = cache.features[cache.row_indices(example.image for example in examples)]
    assert rows.shape == (len(examples), *SHAPE)
    assert (rows == rows[:, :1, :1]).all()
    return [int(example) for example in rows[:, 0, 0]]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOURCES_PER_CHUNK", 3)


def test_features_are_computed_once(tmp_path: Path) -> None:
    examples = write_images(tmp_path, [2, 3, 5, 7, 11, 13, 17])
    cache = open_cache(tmp_path)
    assert len(cache) == 0
    assert fill(cache, examples[:4]) == [2, 3, 5, 7]
    assert fill(cache, examples) == [11, 13, 17]
    assert fill(open_cache(tmp_path), examples[::-1]) == []
    assert read_greys(open_cache(tmp_path), examples[::-1]) == [17, 13, 11, 7, 5, 3, 2]
    assert len(cache) == 7
    assert cache.features.dtype == np.float16
    assert not cache.features.flags.writeable
    assert os.path.getsize(cache.path / "features.f16") == 7 * ROW_BYTES


def test_repeated_image_is_computed_once(tmp_path: Path) -> None:
    examples = write_images(tmp_path, [2, 3])
    assert fill(open_cache(tmp_path), [examples[0], examples[0], examples[1], examples[0]]) == [2, 3]


def test_changed_image_is_recomputed(tmp_path: Path) -> None:
    examples = write_images(tmp_path, [2, 3, 5])
    fill(open_cache(tmp_path), examples)
    time.sleep(0.01)
    changed = write_images(tmp_path, [2, 30, 5])  # all are written again, and so have another time
    os.utime(changed[0].image.path, ns=(0, examples[0].image.modified_ns))
    os.utime(changed[2].image.path, ns=(0, examples[2].image.modified_ns))
    reopened = [
        CaptionExample(ImageFile.from_path(example.image.path), example.captions, example.location)
        for example in changed
    ]
    cache = open_cache(tmp_path)
    assert fill(cache, reopened) == [30]
    assert read_greys(cache, reopened) == [2, 30, 5]


def test_each_encoder_and_size_has_its_own_cache(tmp_path: Path) -> None:
    examples = write_images(tmp_path, [2, 3])
    settings = [("a", 64), ("a", 65), ("a@v2", 64), ("a/v2", 64)]
    for encoder, size in settings:
        assert fill(ImageFeatureCache.open(tmp_path / "cache", encoder=encoder, image_size=size), examples) == [
            2,
            3,
        ]
    assert len(list((tmp_path / "cache").iterdir())) == len(settings)
    path = open_cache(tmp_path).path
    assert path.parent == tmp_path / "cache"
    assert path.name.startswith("my-net-7-64-")


def test_invalid_examples_are_yielded(tmp_path: Path) -> None:
    examples: list[CaptionExample | InvalidExample] = [*write_images(tmp_path, [2, 3, 5, 7])]
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"<html>")
    examples[1] = CaptionExample(ImageFile.from_path(bad), ("x",), "my.tsv:9")
    examples.insert(1, InvalidExample("my.tsv:8", "an empty caption"))
    encoder = Encoder()
    skipped = SkippedExamples()
    cache = open_cache(tmp_path)
    valid = list(skip_invalid(cache.fill(examples, encoder.prepare, encoder.encode), "skip", skipped))
    assert [example.captions for example in valid] == [("grey 2",), ("grey 5",), ("grey 7",)]
    assert skipped.first_locations == {
        "an empty caption": "my.tsv:8",
        "not an image in PNG, JPEG or WebP": "my.tsv:9 bad.jpg",
    }
    assert encoder.seen == [2, 5, 7]
    other_cache = ImageFeatureCache.open(tmp_path, encoder="b", image_size=1)
    too_large = list(other_cache.fill(examples, encoder.prepare, encoder.encode, ImageLimits(max_pixels=76)))
    assert [type(example) for example in too_large] == [InvalidExample] * 5


def test_error_preserves_earlier_features(tmp_path: Path) -> None:
    examples = write_images(tmp_path, [2, 3, 5, 7, 11, 13, 17])
    examples[5].image.path.write_bytes(b"")
    encoder = Encoder()
    with pytest.raises(InputError, match=r"my.tsv:5 5.png: "):
        list(
            skip_invalid(
                open_cache(tmp_path).fill(examples, encoder.prepare, encoder.encode), "stop", SkippedExamples()
            )
        )
    assert encoder.seen == [2, 3, 5, 7, 11]
    assert len(open_cache(tmp_path)) == 5


# ------------------------------------------------------------------------------------------------- mishaps


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["features.f16", "pictures.key"])
@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("batch", [0, 1])
def test_kill_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, share: float, batch: int
) -> None:
    """Some of what a batch wants to write is on the disk, and no more comes."""
    examples = write_images(tmp_path, [2, 3, 5, 7, 11, 13, 17])
    complete = module._append_bytes
    calls = 0

    def cut(path: Path, end: int, data: bytes) -> None:
        nonlocal calls
        calls += path.name == name
        if path.name == name and calls == batch + 1:
            with path.open("ab") as file:
                file.write(data[: int(share * len(data))])
            raise Killed
        complete(path, end, data)

    monkeypatch.setattr(module, "_append_bytes", cut)
    with pytest.raises(Killed):
        fill(open_cache(tmp_path), examples)
    monkeypatch.setattr(module, "_append_bytes", complete)
    cache = open_cache(tmp_path)
    num_cached = len(cache)
    assert batch * 3 <= num_cached <= batch * 3 + 3
    assert fill(cache, examples) == [2, 3, 5, 7, 11, 13, 17][num_cached:]
    for example in (cache, open_cache(tmp_path)):
        assert read_greys(example, examples) == [2, 3, 5, 7, 11, 13, 17]
    assert os.path.getsize(cache.path / "pictures.key") == 7 * 32
    assert os.path.getsize(cache.path / "features.f16") == 7 * ROW_BYTES


def test_truncated_features_are_recomputed(tmp_path: Path) -> None:
    """Nothing of ours does it, but a full disk or a copy may."""
    examples = write_images(tmp_path, [2, 3, 5, 7])
    cache = open_cache(tmp_path)
    fill(cache, examples)
    os.truncate(cache.path / "features.f16", 2 * ROW_BYTES + 7)
    reopened = open_cache(tmp_path)
    assert fill(reopened, examples) == [5, 7]
    assert read_greys(reopened, examples) == [2, 3, 5, 7]


def test_failed_encoder_releases_the_lock(tmp_path: Path) -> None:
    examples = write_images(tmp_path, [2, 3])

    def broken(pictures: list[Any]) -> Any:
        raise RuntimeError("out of memory")

    cache = open_cache(tmp_path)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(cache.fill(examples, lambda pixels: pixels, broken))
    assert fill(open_cache(tmp_path), examples) == [2, 3]


def test_concurrent_writers(tmp_path: Path) -> None:
    """As the processes of one training do; here they are threads, with a cache object each."""
    pytest.importorskip("fcntl")
    examples = write_images(tmp_path, list(range(23)))
    encoders = [Encoder() for _ in range(4)]
    threads = [
        threading.Thread(target=fill, args=(open_cache(tmp_path), examples[::step], example))
        for example, step in zip(encoders, (1, -1, 1, -1), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(grey for example in encoders for grey in example.seen) == list(range(23))
    assert read_greys(open_cache(tmp_path), examples) == list(range(23))


def test_fill_sees_features_of_another_process(tmp_path: Path) -> None:
    examples = write_images(tmp_path, [2, 3, 5])
    reader, writer = open_cache(tmp_path), open_cache(tmp_path)
    fill(writer, examples[:2])
    with pytest.raises(InputError, match=r"has no features of .*0\.png; fill it first"):
        reader.row_indices([examples[0].image])
    assert fill(reader, examples) == [5]
    assert read_greys(reader, examples) == [2, 3, 5]
    assert fill(writer, examples) == []


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (np.zeros((2, 3)), r"shape \(2, 3\) for 3 images"),
        (np.full((3, 2), np.nan), "features of .*0.png or one of the 2 sources after it"),
        (np.full((3, 2), 70000.0), "over 65504"),
    ],
)
def test_invalid_encoder_output(tmp_path: Path, output: Any, message: str) -> None:
    examples = write_images(tmp_path, [2, 3, 5])
    with pytest.raises(InputError, match=message):
        list(open_cache(tmp_path).fill(examples, lambda pixels: pixels, lambda pictures: output))
    assert len(open_cache(tmp_path)) == 0


def test_changed_feature_shape_raises(tmp_path: Path) -> None:
    examples = write_images(tmp_path, [2, 3, 5])
    fill(open_cache(tmp_path), examples[:1])
    with pytest.raises(InputError, match=r"expected \(2, 3, 5\)"):
        list(open_cache(tmp_path).fill(examples, lambda pixels: pixels, lambda pictures: np.zeros((2, 5, 3))))


def test_empty_or_damaged_cache_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no features yet"):
        open_cache(tmp_path).features  # noqa: B018
    path = open_cache(tmp_path).path
    path.mkdir(parents=True)
    (path / "cache.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(InputError, match="is damaged"):
        open_cache(tmp_path)


def test_examples_are_yielded_chunk_by_chunk(tmp_path: Path) -> None:
    """Those of the first batch come before the second is read."""
    examples = write_images(tmp_path, [2, 3, 5, 7])
    requested: list[int] = []

    def generate() -> Iterator[CaptionExample]:
        for number, example in enumerate(examples):
            requested.append(number)
            yield example

    encoder = Encoder()
    stream = open_cache(tmp_path).fill(generate(), encoder.prepare, encoder.encode)
    assert next(iter(stream)) == examples[0]
    assert requested == [0, 1, 2]
