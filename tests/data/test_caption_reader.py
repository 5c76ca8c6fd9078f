"""Pictures with captions as they are published, and every way in which a picture can be no picture."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.data.images import ImageArchive, ImageFile, ImageFolder, ImageLimits, decode_image
from jumok.data.readers.captions import CaptionColumns, CaptionExample, read_caption_examples
from jumok.data.readers.invalid_examples import InvalidExample, SkippedExamples, skip_invalid
from jumok.errors import InputError, MissingExtra

Image = pytest.importorskip("PIL.Image")

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
ROWS = [
    ("b.png", "train", "a red dog"),
    ("a.png", "dev", "two , cats"),
    ("b.png", "train", 'a "good" dog'),
    ("c.png", "", "of no split"),
    ("a.png", "dev", "고양이 두 마리"),
]


def encoded(image: Any, form: str = "PNG", **more: Any) -> bytes:
    with io.BytesIO() as file:
        image.save(file, form, **more)
        return file.getvalue()


def picture(colour: tuple[int, ...] = RED, size: tuple[int, int] = (5, 3), mode: str = "RGB") -> Any:
    return Image.new(mode, size, colour)


def pictures(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(encoded(picture()))
    return folder


def packed(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            facts = tarfile.TarInfo(name)
            facts.size = len(data)
            tar.addfile(facts, io.BytesIO(data))
    return path


def table(path: Path, rows: list[tuple[str, str, str]] = ROWS, split: bool = True) -> Path:
    """The rows with a column for the split, or without."""
    chosen = [("image", "split", "caption"), *rows]
    cells = [row if split else (row[0], row[2]) for row in chosen]
    if ".tsv" in path.name:
        text = "".join("\t".join(row) + "\n" for row in cells)
    elif ".csv" in path.name:
        text = "".join(",".join('"' + one.replace('"', '""') + '"' for one in row) + "\n" for row in cells)
    else:
        text = "".join(json.dumps(dict(zip(cells[0], row, strict=True))) + "\n" for row in cells[1:])
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(where: Path | str, **more: Any) -> dict[str, tuple[str, ...]]:
    found = skip_invalid(read_caption_examples(str(where), **more), "stop", SkippedExamples())
    return {one.image.name: one.captions for one in found}


def flaws(where: Path | str, **more: Any) -> list[InvalidExample]:
    return [one for one in read_caption_examples(str(where), **more) if isinstance(one, InvalidExample)]


# ---------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("name", ["captions.tsv", "captions.tsv.gz", "captions.csv", "captions.jsonl"])
def test_captions_are_grouped_by_picture(tmp_path: Path, name: str) -> None:
    pictures(tmp_path / "images", "a.png", "b.png", "c.png")
    path = table(tmp_path / name)
    everything = {
        "b.png": ("a red dog", 'a "good" dog'),
        "a.png": ("two , cats", "고양이 두 마리"),
        "c.png": ("of no split",),
    }
    assert read(path) == everything
    assert list(read(path)) == ["b.png", "a.png", "c.png"]  # as they come
    assert read(path, split="train") == {"b.png": everything["b.png"]}
    for dev in ("dev", "valid", "val", "Validation"):
        assert read(tmp_path, split=dev) == {"a.png": everything["a.png"]}
    first = next(iter(read_caption_examples(str(path))))
    assert isinstance(first, CaptionExample)
    assert first.location == f"{path}:{1 if 'jsonl' in name else 2}"
    assert first.image.path == tmp_path / "images" / "b.png"


def test_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pictures(tmp_path, "a.png", "b.png", "c.png")
    names, splits, said = zip(*ROWS, strict=True)
    parquet.write_table(arrow.table({"picture": names, "split": splits, "caption": said}), tmp_path / "my.parquet")
    assert read(tmp_path / "my.parquet", split="train") == {"b.png": ("a red dog", 'a "good" dog')}


def test_a_table_without_splits_is_taken_as_a_whole(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png", "c.png")
    path = table(tmp_path / "captions.csv", split=False)
    assert len(read(path, split="train")) == 3
    with pytest.raises(InputError, match="has no splits, so the images of train are unknown"):
        read(tmp_path, split="train")  # or one would train on the test set


def test_splits_in_files_of_their_own(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png")
    table(tmp_path / "train.tsv", ROWS[:1], split=False)
    table(tmp_path / "valid.tsv", ROWS[1:2], split=False)
    assert list(read(tmp_path, split="train")) == list(read(tmp_path / "train")) == ["b.png"]
    assert list(read(tmp_path, split="valid")) == ["a.png"]


def test_columns_by_name_and_number(tmp_path: Path) -> None:
    pictures(tmp_path / "deep", "a.png")
    (tmp_path / "my.tsv").write_text("x\tphoto\ttext\n1\tdeep/a.png\ta cat\n")
    assert read(tmp_path / "my.tsv", columns=CaptionColumns("photo", "text")) == {"deep/a.png": ("a cat",)}
    (tmp_path / "bare.tsv").write_text("deep/a.png\ta cat\n")
    assert read(tmp_path / "bare.tsv", columns=CaptionColumns(1, 2), split="test") == {"deep/a.png": ("a cat",)}
    with pytest.raises(InputError, match="has no column 'image' or 'picture'"):
        read(tmp_path / "my.tsv")


def test_a_list_of_captions(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    row = {"picture": "a.png", "captions": ["one", "two", " "]}
    (tmp_path / "my.jsonl").write_text(json.dumps(row) + "\n")
    first, second = read_caption_examples(str(tmp_path / "my.jsonl"))
    assert first == InvalidExample(f"{tmp_path}/my.jsonl:1", "an empty caption")
    assert isinstance(second, CaptionExample)
    assert second.captions == ("one", "two")


def test_an_empty_list_of_captions_is_told(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    (tmp_path / "my.jsonl").write_text('{"picture": "a.png", "captions": []}\n')
    assert list(read_caption_examples(str(tmp_path / "my.jsonl"))) == [
        InvalidExample(f"{tmp_path}/my.jsonl:1", "an empty caption")
    ]


def test_pictures_named_as_seen_from_the_table(tmp_path: Path) -> None:
    pictures(tmp_path / "images", "a.png", "b.png")
    pictures(tmp_path / "images" / "images", "b.png")
    (tmp_path / "my.csv").write_text("image,caption\nimages/a.png,one\na.png,two\nimages/b.png,three\nc.png,no\n")
    *found, missing = read_caption_examples(str(tmp_path / "my.csv"))
    where = [one.image.path for one in found if isinstance(one, CaptionExample)]
    among = tmp_path / "images"  # what it has of that name comes first
    assert where == [among / "a.png", among / "a.png", among / "images" / "b.png"]
    told = f"c.png is not in {among}"
    assert missing == InvalidExample(f"{tmp_path}/my.csv:5 c.png", "a missing image", told)


# --------------------------------------------------------------------------------------------------- layouts


def test_flickr8k_beside_a_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "flickr8k"
    folder.mkdir()
    files = {"images/a.png": encoded(picture(BLUE)), "images/b.png": encoded(picture(GREEN))}
    packed(folder / "images.tar", files)
    table(folder / "captions.tsv.gz")
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path))
    (one,) = skip_invalid(read_caption_examples("flickr8k", split="train"), "stop", SkippedExamples())
    assert one.image.location == f"{folder}/images.tar:images/b.png"
    assert one.image.read() == files["images/b.png"]
    assert (one.image.load_pixels() == GREEN).all()
    assert one.image.load_pixels().shape == (3, 5, 3)
    skipped = SkippedExamples()
    assert len(list(skip_invalid(read_caption_examples("flickr8k"), "skip", skipped))) == 2
    assert str(skipped) == f"1 skipped: 1 × a missing image (first: {folder}/captions.tsv.gz:5 c.png)"
    with pytest.raises(InputError, match=r"captions.tsv.gz:5 c.png: a missing image \(c.png is not in"):
        read("flickr8k")
    with pytest.raises(InputError, match="no captions of the split 'test'; its splits are: dev, train"):
        read("flickr8k", split="test")


@pytest.mark.parametrize("nested", [True, False])
def test_flickr8k_as_it_was_published(tmp_path: Path, nested: bool) -> None:
    pictures(tmp_path / "Flicker8k_Dataset", "a.png", "b.png")
    text = tmp_path / "Flickr8k_text" if nested else tmp_path
    text.mkdir(exist_ok=True)
    said = "a.png#0\tone , #1 cat\na.png#1\ttwo cats\nb.png#0\ta dog\nc.png.1#0\tgone\n"
    (text / "Flickr8k.token.txt").write_text(said)
    (text / "Flickr_8k.trainImages.txt").write_text("a.png\n")
    (text / "Flickr_8k.devImages.txt").write_text("b.png\n")
    assert read(tmp_path, split="train") == {"a.png": ("one , #1 cat", "two cats")}
    assert read(tmp_path, split="valid") == {"b.png": ("a dog",)}
    (lost,) = flaws(text / "Flickr8k.token.txt")
    assert lost.location.endswith("Flickr8k.token.txt:4 c.png.1")
    (text / "Flickr8k.token.txt").write_text(said + "no caption\n")
    assert flaws(tmp_path, split="train")[0].reason == "not image.jpg#0, a tab and a caption"


def test_flickr8k_at_kaggle(tmp_path: Path) -> None:
    pictures(tmp_path / "Images", "a.png")
    (tmp_path / "captions.txt").write_text('image,caption\na.png,"A cat , asleep"\na.png,a cat, a mat\n')
    assert read(tmp_path) == {"a.png": ("A cat , asleep", "a cat, a mat")}


def test_coco(tmp_path: Path) -> None:
    notes = tmp_path / "annotations"
    notes.mkdir()
    for year, name in (("train2017", "a.png"), ("val2017", "b.png")):
        pictures(tmp_path / year, name)
        told = {
            "images": [{"id": 7, "file_name": name}],
            "annotations": [
                {"image_id": 7, "caption": "a cat\n"},
                {"image_id": 8, "caption": "whose?"},
                {"image_id": 7, "caption": "the cat"},
            ],
        }
        (notes / f"captions_{year}.json").write_text(json.dumps(told))
    assert read_despite_flaws(notes / "captions_train2017.json") == {"a.png": ("a cat", "the cat")}
    (lost,) = flaws(notes / "captions_train2017.json")
    assert str(lost).endswith("annotations[1]: an image that is not listed (image_id 8)")


def read_despite_flaws(where: Path, **more: Any) -> dict[str, tuple[str, ...]]:
    found = skip_invalid(read_caption_examples(str(where), **more), "skip", SkippedExamples())
    return {one.image.name: one.captions for one in found}


def test_the_split_chooses_the_file_of_coco(tmp_path: Path) -> None:
    notes = tmp_path / "annotations"
    notes.mkdir()
    told = {"images": [{"id": 7, "file_name": "a.png"}], "annotations": [{"image_id": 7, "caption": "a"}]}
    for year in ("train2014", "val2014"):
        pictures(tmp_path / "images" / year, "a.png")
        (notes / f"captions_{year}.json").write_text(json.dumps(told))
    (one,) = read_caption_examples(str(tmp_path), split="valid")
    assert isinstance(one, CaptionExample)
    assert one.image.path == tmp_path / "images" / "val2014" / "a.png"
    (notes / "captions_val2017.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match=r"several files: annotations/captions_val2014.json, .*name one"):
        read(tmp_path, split="valid")


def test_the_splits_by_karpathy(tmp_path: Path) -> None:
    pictures(tmp_path / "images" / "val2014", "a.png")
    pictures(tmp_path / "images", "b.png")
    told = [
        {"filepath": "val2014", "filename": "a.png", "split": "restval", "sentences": [{"raw": "a cat"}]},
        {"filename": "b.png", "split": "test", "sentences": [{"raw": "b"}, {"raw": "c"}]},
    ]
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": told}))
    assert read(tmp_path, split="train") == {"val2014/a.png": ("a cat",)}
    assert read(tmp_path, split="test") == {"b.png": ("b", "c")}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("my.json", "{", "is not JSON"),
        ("my.json", "[]", "is neither in the format of COCO"),
        ("my.json", '{"images": [{}], "annotations": []}', "is neither in the format of COCO.*'id'"),
        ("my.json", '{"images": [{"filename": "a"}]}', "is neither in the format of COCO.*'sentences'"),
        ("my.txt", "some words\n", "in an unknown format; its first line is 'some words'"),
    ],
)
def test_what_is_no_file_of_captions(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


def test_names_that_are_not_there(tmp_path: Path) -> None:
    table(tmp_path / "captions.tsv")
    with pytest.raises(InputError, match=r"there is no folder or \.tar 'nowhere'"):
        read(tmp_path, images="nowhere")
    with pytest.raises(InputError, match="there is no"):
        read(tmp_path / "nothing.tsv")
    with pytest.raises(InputError, match="cannot be read from the hub"):
        read("hub:some/pictures")
    pictures(tmp_path / "photos", "a.png", "b.png", "c.png")
    assert len(read(tmp_path, images=str(tmp_path / "photos"))) == 3


# -------------------------------------------------------------------------------------------------- pictures


def test_formats_that_are_read() -> None:
    left_right = Image.new("RGB", (8, 5), RED)
    left_right.paste(BLUE, (4, 0, 8, 5))
    good = {"PNG": {}, "JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}
    for form, more in good.items():
        found = decode_image(encoded(left_right, form, **more), "here")
        assert isinstance(found, np.ndarray)
        assert found.shape == (5, 8, 3)
        assert found.dtype == np.uint8
        assert np.abs(found[:, :4].astype(int) - RED).max() <= 5
        assert np.abs(found[:, 4:].astype(int) - BLUE).max() <= 5
    found = decode_image(encoded(left_right, "GIF"), "here.gif")
    assert isinstance(found, InvalidExample)
    assert found.reason == "not an image in PNG, JPEG or WebP"


def test_the_camera_was_held_upright() -> None:
    image = Image.new("RGB", (8, 5), RED)
    image.paste(BLUE, (4, 0, 8, 5))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° to the right: what is left comes up
    found = decode_image(encoded(image, "PNG", exif=exif), "here")
    assert isinstance(found, np.ndarray)
    assert found.shape == (8, 5, 3)
    assert (found[:4] == RED).all()
    assert (found[4:] == BLUE).all()


def test_every_mode_becomes_rgb() -> None:
    def one(image: Any) -> list[int]:
        found = decode_image(encoded(image), "here")
        assert isinstance(found, np.ndarray)
        assert found.shape == (3, 5, 3)
        return found[1, 2].tolist()  # type: ignore[no-any-return]

    assert one(picture((7,), mode="L")) == [7, 7, 7]
    assert one(picture((255, 0, 0, 0), mode="RGBA")) == [255, 255, 255]  # nothing to be seen: white
    assert one(picture((0, 0, 0, 51), mode="RGBA")) == [204, 204, 204]
    assert one(picture((0, 0), mode="LA")) == [255, 255, 255]
    assert one(picture((1,), mode="1")) == [255, 255, 255]
    assert one(picture(BLUE).convert("P")) == [0, 0, 255]
    assert one(Image.fromarray(np.full((3, 5), 128 * 257, np.uint16))) == [128, 128, 128]
    cyan = decode_image(encoded(picture((255, 0, 0, 0), mode="CMYK"), "JPEG"), "here")
    assert np.abs(np.asarray(cyan, int) - (0, 255, 255)).max() < 20


def bomb(width: int, height: int) -> bytes:
    """A small PNG that says that it is huge."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "an empty image"),
        (b"<html>not found</html>", "not an image in PNG, JPEG or WebP"),
        (encoded(picture(size=(97, 89)), "JPEG")[:-30], "a damaged image"),
        (encoded(picture(size=(97, 89)), "JPEG")[:100], "a damaged image"),
        (encoded(picture(size=(97, 89)), "WEBP")[:40], "a damaged image"),
        (encoded(picture(size=(97, 89)))[:60], "a damaged image"),
        (bomb(7, 5)[:-30], "a damaged image"),
        (bomb(8_000, 8_000), "an image of too many pixels"),  # ours
        (bomb(12_000, 12_000), "an image of too many pixels"),  # Pillow warns
        (bomb(60_000, 60_000), "an image of too many pixels"),  # Pillow refuses
    ],
)
def test_what_is_no_picture(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "x.jpg").write_bytes(data)
    file = ImageFolder(tmp_path).find("x.jpg", "my.tsv:3")
    assert isinstance(file, ImageFile)
    found = file.decode("my.tsv:3 x.jpg")
    assert isinstance(found, InvalidExample)
    assert (found.location, found.reason) == ("my.tsv:3 x.jpg", reason)
    with pytest.raises(InputError, match=f"x.jpg: {reason}"):
        ImageFile.from_path(tmp_path / "x.jpg").load_pixels()


def test_a_warning_of_pillow_that_is_an_error() -> None:
    found = decode_image(bomb(12_000, 12_000), "here")  # as tests turn warnings into errors
    assert isinstance(found, InvalidExample)
    assert found.reason == "an image of too many pixels"


@pytest.mark.parametrize("side", [12_000, 60_000])  # Pillow warns, and refuses
def test_the_limit_that_is_told_is_ours(side: int) -> None:
    found = decode_image(bomb(side, side), "here", ImageLimits(max_pixels=77))
    assert str(found).endswith("the limit is 77 pixels)")


def test_limits() -> None:
    data = encoded(picture(size=(7, 11)))
    assert isinstance(decode_image(data, "here", ImageLimits(max_pixels=77)), np.ndarray)
    few = decode_image(data, "here", ImageLimits(max_pixels=76))
    assert str(few) == "here: an image of too many pixels (7 × 11; the limit is 76 pixels)"
    small = decode_image(data, "here", ImageLimits(max_bytes=len(data) - 1))
    assert isinstance(small, InvalidExample)
    assert small.reason == "an image of too many bytes"
    held = ImageFile(Path("nowhere.png"), "nowhere.png", 0, 10**9, 0).decode()
    assert isinstance(held, InvalidExample)
    assert held.reason == "an image of too many bytes"  # which nobody tried to read


def test_a_file_that_has_gone_since(tmp_path: Path) -> None:
    one = ImageFile.from_path(pictures(tmp_path, "a.png") / "a.png")
    (tmp_path / "a.png").unlink()
    found = one.decode()
    assert isinstance(found, InvalidExample)
    assert found.reason == "an image that cannot be read"
    with pytest.raises(InputError, match="a missing image"):
        ImageFile.from_path(tmp_path / "a.png")
    assert isinstance(ImageFolder(tmp_path).find(".", "here"), InvalidExample)
    assert isinstance(ImageFolder(tmp_path).find("a\0b", "here"), InvalidExample)


def test_names_in_an_archive(tmp_path: Path) -> None:
    files = {"./x/a.png": b"1", "y/a.png": b"22", "y/b.png": b"333", "y/b.png ": b""}
    archive = ImageArchive(packed(tmp_path / "my.tar", files))
    assert len(archive) == 4

    def size(name: str) -> int | None:
        found = archive.find(name, "here")
        return None if isinstance(found, InvalidExample) else found.num_bytes

    assert [size(name) for name in ("x/a.png", "./y/a.png", "b.png")] == [1, 2, 3]
    assert size("a.png") is None  # which of the two?
    assert size("z.png") is None


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "images.tar").write_bytes(gzip.compress(packed(tmp_path / "t", {"a": b"1"}).read_bytes()))
    with pytest.raises(InputError, match=r"uncompressed \.tar"):
        ImageArchive(tmp_path / "images.tar")
    with pytest.raises(InputError, match="No such file"):
        ImageArchive(tmp_path / "other.tar")


def test_an_archive_that_is_cut_off(tmp_path: Path) -> None:
    files = {name: encoded(picture(size=(31, 37)), "JPEG") for name in ("a.jpg", "b.jpg")}
    path = packed(tmp_path / "images.tar", files)
    whole = path.read_bytes()
    begin = whole.index(files["b.jpg"], 1024)
    path.write_bytes(whole[: begin + 100])  # in the midst of the second picture
    with pytest.raises(InputError, match=r"unexpected end of data.*expected a complete"):
        ImageArchive(path)


def test_pillow_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[images\]"'):
        decode_image(b"\x89PNG", "here")
