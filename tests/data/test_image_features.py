"""The cache of features: nothing computed twice, nothing lost or wrong after a kill, nothing stale."""

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
ROW = 2 * 3 * 5  # bytes


def drawn(folder: Path, greys: list[int]) -> list[CaptionExample]:
    """A plain picture of each grey."""
    found = []
    for number, grey in enumerate(greys):
        path = folder / f"{number}.png"
        with io.BytesIO() as file:
            Image.new("RGB", (7, 11), (grey,) * 3).save(file, "PNG")
            path.write_bytes(file.getvalue())
        found.append(CaptionExample(ImageFile.from_path(path), (f"grey {grey}",), f"my.tsv:{number}"))
    return found


class Encoder:
    """Features that are the picture's grey, and a note of all that it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def prepare(self, pixels: Any) -> Any:
        assert pixels.shape == (11, 7, 3)
        return pixels[:1, :1]

    def encode(self, pictures: list[Any]) -> Any:
        greys = [int(one[0, 0, 0]) for one in pictures]
        self.seen += greys
        return np.array(greys, np.float32)[:, None, None] * np.ones(SHAPE, np.float32)


def opened(folder: Path) -> ImageFeatureCache:
    return ImageFeatureCache.open(folder / "cache", encoder="my net/7", image_size=64)


def fill(cache: ImageFeatureCache, found: list[CaptionExample], encoder: Encoder | None = None) -> list[int]:
    """The greys that had to be computed."""
    encoder = encoder or Encoder()
    assert list(cache.fill(found, encoder.prepare, encoder.encode)) == found
    return encoder.seen


def greys(cache: ImageFeatureCache, found: list[CaptionExample]) -> list[int]:
    rows = cache.features[cache.row_indices(one.image for one in found)]
    assert rows.shape == (len(found), *SHAPE)
    assert (rows == rows[:, :1, :1]).all()
    return [int(one) for one in rows[:, 0, 0]]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOURCES_PER_CHUNK", 3)


def test_nothing_is_computed_twice(tmp_path: Path) -> None:
    found = drawn(tmp_path, [2, 3, 5, 7, 11, 13, 17])
    cache = opened(tmp_path)
    assert len(cache) == 0
    assert fill(cache, found[:4]) == [2, 3, 5, 7]
    assert fill(cache, found) == [11, 13, 17]
    assert fill(opened(tmp_path), found[::-1]) == []
    assert greys(opened(tmp_path), found[::-1]) == [17, 13, 11, 7, 5, 3, 2]
    assert len(cache) == 7
    assert cache.features.dtype == np.float16
    assert not cache.features.flags.writeable
    assert os.path.getsize(cache.path / "features.f16") == 7 * ROW


def test_a_picture_that_comes_twice(tmp_path: Path) -> None:
    found = drawn(tmp_path, [2, 3])
    assert fill(opened(tmp_path), [found[0], found[0], found[1], found[0]]) == [2, 3]


def test_a_picture_that_has_changed_is_computed_anew(tmp_path: Path) -> None:
    found = drawn(tmp_path, [2, 3, 5])
    fill(opened(tmp_path), found)
    time.sleep(0.01)
    changed = drawn(tmp_path, [2, 30, 5])  # all are written again, and so have another time
    os.utime(changed[0].image.path, ns=(0, found[0].image.modified_ns))
    os.utime(changed[2].image.path, ns=(0, found[2].image.modified_ns))
    again = [CaptionExample(ImageFile.from_path(one.image.path), one.captions, one.location) for one in changed]
    cache = opened(tmp_path)
    assert fill(cache, again) == [30]
    assert greys(cache, again) == [2, 30, 5]


def test_each_encoder_and_size_has_a_cache_of_its_own(tmp_path: Path) -> None:
    found = drawn(tmp_path, [2, 3])
    kinds = [("a", 64), ("a", 65), ("a@v2", 64), ("a/v2", 64)]
    for encoder, size in kinds:
        assert fill(ImageFeatureCache.open(tmp_path / "cache", encoder=encoder, image_size=size), found) == [
            2,
            3,
        ]
    assert len(list((tmp_path / "cache").iterdir())) == len(kinds)
    path = opened(tmp_path).path
    assert path.parent == tmp_path / "cache"
    assert path.name.startswith("my-net-7-64-")


def test_flaws_go_through_and_come_up(tmp_path: Path) -> None:
    found: list[CaptionExample | InvalidExample] = [*drawn(tmp_path, [2, 3, 5, 7])]
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"<html>")
    found[1] = CaptionExample(ImageFile.from_path(bad), ("x",), "my.tsv:9")
    found.insert(1, InvalidExample("my.tsv:8", "an empty caption"))
    encoder = Encoder()
    skipped = SkippedExamples()
    cache = opened(tmp_path)
    good = list(skip_invalid(cache.fill(found, encoder.prepare, encoder.encode), "skip", skipped))
    assert [one.captions for one in good] == [("grey 2",), ("grey 5",), ("grey 7",)]
    assert skipped.first_locations == {
        "an empty caption": "my.tsv:8",
        "not an image in PNG, JPEG or WebP": "my.tsv:9 bad.jpg",
    }
    assert encoder.seen == [2, 5, 7]
    other = ImageFeatureCache.open(tmp_path, encoder="b", image_size=1)
    small = list(other.fill(found, encoder.prepare, encoder.encode, ImageLimits(max_pixels=76)))
    assert [type(one) for one in small] == [InvalidExample] * 5


def test_a_stop_at_the_first_flaw_keeps_what_was_made(tmp_path: Path) -> None:
    found = drawn(tmp_path, [2, 3, 5, 7, 11, 13, 17])
    found[5].image.path.write_bytes(b"")
    encoder = Encoder()
    with pytest.raises(InputError, match=r"my.tsv:5 5.png: "):
        list(skip_invalid(opened(tmp_path).fill(found, encoder.prepare, encoder.encode), "stop", SkippedExamples()))
    assert encoder.seen == [2, 3, 5, 7, 11]
    assert len(opened(tmp_path)) == 5


# ------------------------------------------------------------------------------------------------- mishaps


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["features.f16", "pictures.key"])
@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("batch", [0, 1])
def test_a_kill_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, share: float, batch: int
) -> None:
    """Some of what a batch wants to write is on the disk, and no more comes."""
    found = drawn(tmp_path, [2, 3, 5, 7, 11, 13, 17])
    whole = module._append_bytes
    calls = 0

    def cut(path: Path, end: int, data: bytes) -> None:
        nonlocal calls
        calls += path.name == name
        if path.name == name and calls == batch + 1:
            with path.open("ab") as file:
                file.write(data[: int(share * len(data))])
            raise Killed
        whole(path, end, data)

    monkeypatch.setattr(module, "_append_bytes", cut)
    with pytest.raises(Killed):
        fill(opened(tmp_path), found)
    monkeypatch.setattr(module, "_append_bytes", whole)
    cache = opened(tmp_path)
    done = len(cache)
    assert batch * 3 <= done <= batch * 3 + 3
    assert fill(cache, found) == [2, 3, 5, 7, 11, 13, 17][done:]
    for one in (cache, opened(tmp_path)):
        assert greys(one, found) == [2, 3, 5, 7, 11, 13, 17]
    assert os.path.getsize(cache.path / "pictures.key") == 7 * 32
    assert os.path.getsize(cache.path / "features.f16") == 7 * ROW


def test_features_that_were_cut_off(tmp_path: Path) -> None:
    """Nothing of ours does it, but a full disk or a copy may."""
    found = drawn(tmp_path, [2, 3, 5, 7])
    cache = opened(tmp_path)
    fill(cache, found)
    os.truncate(cache.path / "features.f16", 2 * ROW + 7)
    again = opened(tmp_path)
    assert fill(again, found) == [5, 7]
    assert greys(again, found) == [2, 3, 5, 7]


def test_an_encoder_that_fails_leaves_the_cache_free(tmp_path: Path) -> None:
    found = drawn(tmp_path, [2, 3])

    def broken(pictures: list[Any]) -> Any:
        raise RuntimeError("out of memory")

    cache = opened(tmp_path)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(cache.fill(found, lambda pixels: pixels, broken))
    assert fill(opened(tmp_path), found) == [2, 3]


def test_many_take_turns(tmp_path: Path) -> None:
    """As the processes of one training do; here they are threads, with a cache object each."""
    pytest.importorskip("fcntl")
    found = drawn(tmp_path, list(range(23)))
    encoders = [Encoder() for _ in range(4)]
    threads = [
        threading.Thread(target=fill, args=(opened(tmp_path), found[::turn], one))
        for one, turn in zip(encoders, (1, -1, 1, -1), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(grey for one in encoders for grey in one.seen) == list(range(23))
    assert greys(opened(tmp_path), found) == list(range(23))


def test_a_reader_sees_what_another_adds_when_it_asks(tmp_path: Path) -> None:
    found = drawn(tmp_path, [2, 3, 5])
    reader, writer = opened(tmp_path), opened(tmp_path)
    fill(writer, found[:2])
    with pytest.raises(InputError, match=r"has no features of .*0\.png; fill it first"):
        reader.row_indices([found[0].image])
    assert fill(reader, found) == [5]
    assert greys(reader, found) == [2, 3, 5]
    assert fill(writer, found) == []


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (np.zeros((2, 3)), r"shape \(2, 3\) for 3 images"),
        (np.full((3, 2), np.nan), "features of .*0.png or one of the 2 sources after it"),
        (np.full((3, 2), 70000.0), "over 65504"),
    ],
)
def test_what_an_encoder_must_not_make(tmp_path: Path, made: Any, message: str) -> None:
    found = drawn(tmp_path, [2, 3, 5])
    with pytest.raises(InputError, match=message):
        list(opened(tmp_path).fill(found, lambda pixels: pixels, lambda pictures: made))
    assert len(opened(tmp_path)) == 0


def test_another_shape_than_before(tmp_path: Path) -> None:
    found = drawn(tmp_path, [2, 3, 5])
    fill(opened(tmp_path), found[:1])
    with pytest.raises(InputError, match=r"expected \(2, 3, 5\)"):
        list(opened(tmp_path).fill(found, lambda pixels: pixels, lambda pictures: np.zeros((2, 5, 3))))


def test_what_is_no_cache(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no features yet"):
        opened(tmp_path).features  # noqa: B018
    path = opened(tmp_path).path
    path.mkdir(parents=True)
    (path / "cache.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(InputError, match="is damaged"):
        opened(tmp_path)


def test_captions_are_not_held_back(tmp_path: Path) -> None:
    """Those of the first batch come before the second is read."""
    found = drawn(tmp_path, [2, 3, 5, 7])
    asked: list[int] = []

    def one_by_one() -> Iterator[CaptionExample]:
        for number, one in enumerate(found):
            asked.append(number)
            yield one

    encoder = Encoder()
    stream = opened(tmp_path).fill(one_by_one(), encoder.prepare, encoder.encode)
    assert next(iter(stream)) == found[0]
    assert asked == [0, 1, 2]
