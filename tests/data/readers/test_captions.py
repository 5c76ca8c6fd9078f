"""Published layouts of image captions, and images that cannot be used."""

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


def encode(image: Any, image_format: str = "PNG", **options: Any) -> bytes:
    with io.BytesIO() as file:
        image.save(file, image_format, **options)
        return file.getvalue()


def make_image(colour: tuple[int, ...] = RED, size: tuple[int, int] = (5, 3), mode: str = "RGB") -> Any:
    return Image.new(mode, size, colour)


def write_images(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(encode(make_image()))
    return folder


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_table(path: Path, rows: list[tuple[str, str, str]] = ROWS, split: bool = True) -> Path:
    """The rows with a column for the split, or without."""
    chosen = [("image", "split", "caption"), *rows]
    cells = [row if split else (row[0], row[2]) for row in chosen]
    if ".tsv" in path.name:
        text = "".join("\t".join(row) + "\n" for row in cells)
    elif ".csv" in path.name:
        text = "".join(",".join('"' + example.replace('"', '""') + '"' for example in row) + "\n" for row in cells)
    else:
        text = "".join(json.dumps(dict(zip(cells[0], row, strict=True))) + "\n" for row in cells[1:])
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path: Path | str, **options: Any) -> dict[str, tuple[str, ...]]:
    examples = skip_invalid(read_caption_examples(str(path), **options), "stop", SkippedExamples())
    return {example.image.name: example.captions for example in examples}


def invalid_examples(path: Path | str, **options: Any) -> list[InvalidExample]:
    return [example for example in read_caption_examples(str(path), **options) if isinstance(example, InvalidExample)]


# ---------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("name", ["captions.tsv", "captions.tsv.gz", "captions.csv", "captions.jsonl"])
def test_captions_are_grouped_by_image(tmp_path: Path, name: str) -> None:
    write_images(tmp_path / "images", "a.png", "b.png", "c.png")
    path = write_table(tmp_path / name)
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


def test_parquet_table(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_images(tmp_path, "a.png", "b.png", "c.png")
    names, splits, captions = zip(*ROWS, strict=True)
    parquet.write_table(arrow.table({"picture": names, "split": splits, "caption": captions}), tmp_path / "my.parquet")
    assert read(tmp_path / "my.parquet", split="train") == {"b.png": ("a red dog", 'a "good" dog')}


def test_table_without_splits(tmp_path: Path) -> None:
    write_images(tmp_path, "a.png", "b.png", "c.png")
    path = write_table(tmp_path / "captions.csv", split=False)
    assert len(read(path, split="train")) == 3
    with pytest.raises(InputError, match="has no splits, so the images of train are unknown"):
        read(tmp_path, split="train")  # or one would train on the test set


def test_splits_in_separate_files(tmp_path: Path) -> None:
    write_images(tmp_path, "a.png", "b.png")
    write_table(tmp_path / "train.tsv", ROWS[:1], split=False)
    write_table(tmp_path / "valid.tsv", ROWS[1:2], split=False)
    assert list(read(tmp_path, split="train")) == list(read(tmp_path / "train")) == ["b.png"]
    assert list(read(tmp_path, split="valid")) == ["a.png"]


def test_columns_by_name_and_number(tmp_path: Path) -> None:
    write_images(tmp_path / "deep", "a.png")
    (tmp_path / "my.tsv").write_text("x\tphoto\ttext\n1\tdeep/a.png\ta cat\n")
    assert read(tmp_path / "my.tsv", columns=CaptionColumns("photo", "text")) == {"deep/a.png": ("a cat",)}
    (tmp_path / "bare.tsv").write_text("deep/a.png\ta cat\n")
    assert read(tmp_path / "bare.tsv", columns=CaptionColumns(1, 2), split="test") == {"deep/a.png": ("a cat",)}
    with pytest.raises(InputError, match="has no column 'image' or 'picture'"):
        read(tmp_path / "my.tsv")


def test_list_of_captions(tmp_path: Path) -> None:
    write_images(tmp_path, "a.png")
    row = {"picture": "a.png", "captions": ["one", "two", " "]}
    (tmp_path / "my.jsonl").write_text(json.dumps(row) + "\n")
    first, second = read_caption_examples(str(tmp_path / "my.jsonl"))
    assert first == InvalidExample(f"{tmp_path}/my.jsonl:1", "an empty caption")
    assert isinstance(second, CaptionExample)
    assert second.captions == ("one", "two")


def test_empty_list_of_captions_is_invalid(tmp_path: Path) -> None:
    write_images(tmp_path, "a.png")
    (tmp_path / "my.jsonl").write_text('{"picture": "a.png", "captions": []}\n')
    assert list(read_caption_examples(str(tmp_path / "my.jsonl"))) == [
        InvalidExample(f"{tmp_path}/my.jsonl:1", "an empty caption")
    ]


def test_image_paths_relative_to_the_table(tmp_path: Path) -> None:
    write_images(tmp_path / "images", "a.png", "b.png")
    write_images(tmp_path / "images" / "images", "b.png")
    (tmp_path / "my.csv").write_text("image,caption\nimages/a.png,one\na.png,two\nimages/b.png,three\nc.png,no\n")
    *examples, missing = read_caption_examples(str(tmp_path / "my.csv"))
    path = [example.image.path for example in examples if isinstance(example, CaptionExample)]
    among = tmp_path / "images"  # what it has of that name comes first
    assert path == [among / "a.png", among / "a.png", among / "images" / "b.png"]
    annotation = f"c.png is not in {among}"
    assert missing == InvalidExample(f"{tmp_path}/my.csv:5 c.png", "a missing image", annotation)


# --------------------------------------------------------------------------------------------------- layouts


def test_flickr8k_with_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "flickr8k"
    folder.mkdir()
    files = {"images/a.png": encode(make_image(BLUE)), "images/b.png": encode(make_image(GREEN))}
    write_tar(folder / "images.tar", files)
    write_table(folder / "captions.tsv.gz")
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path))
    (example,) = skip_invalid(read_caption_examples("flickr8k", split="train"), "stop", SkippedExamples())
    assert example.image.location == f"{folder}/images.tar:images/b.png"
    assert example.image.read() == files["images/b.png"]
    pixels = example.image.decode()
    assert (pixels == GREEN).all()
    assert pixels.shape == (3, 5, 3)
    skipped = SkippedExamples()
    assert len(list(skip_invalid(read_caption_examples("flickr8k"), "skip", skipped))) == 2
    assert str(skipped) == f"1 skipped: 1 × a missing image (first: {folder}/captions.tsv.gz:5 c.png)"
    with pytest.raises(InputError, match=r"captions.tsv.gz:5 c.png: a missing image \(c.png is not in"):
        read("flickr8k")
    with pytest.raises(InputError, match="no captions of the split 'test'; its splits are: dev, train"):
        read("flickr8k", split="test")


@pytest.mark.parametrize("nested", [True, False])
def test_flickr8k_layout(tmp_path: Path, nested: bool) -> None:
    write_images(tmp_path / "Flicker8k_Dataset", "a.png", "b.png")
    text = tmp_path / "Flickr8k_text" if nested else tmp_path
    text.mkdir(exist_ok=True)
    captions = "a.png#0\tone , #1 cat\na.png#1\ttwo cats\nb.png#0\ta dog\nc.png.1#0\tgone\n"
    (text / "Flickr8k.token.txt").write_text(captions)
    (text / "Flickr_8k.trainImages.txt").write_text("a.png\n")
    (text / "Flickr_8k.devImages.txt").write_text("b.png\n")
    assert read(tmp_path, split="train") == {"a.png": ("one , #1 cat", "two cats")}
    assert read(tmp_path, split="valid") == {"b.png": ("a dog",)}
    (missing,) = invalid_examples(text / "Flickr8k.token.txt")
    assert missing.location.endswith("Flickr8k.token.txt:4 c.png.1")
    (text / "Flickr8k.token.txt").write_text(captions + "no caption\n")
    assert invalid_examples(tmp_path, split="train")[0].reason == "not image.jpg#0, a tab and a caption"


def test_flickr8k_from_kaggle(tmp_path: Path) -> None:
    write_images(tmp_path / "Images", "a.png")
    (tmp_path / "captions.txt").write_text('image,caption\na.png,"A cat , asleep"\na.png,a cat, a mat\n')
    assert read(tmp_path) == {"a.png": ("A cat , asleep", "a cat, a mat")}


def test_coco(tmp_path: Path) -> None:
    annotation_folder = tmp_path / "annotations"
    annotation_folder.mkdir()
    for year, name in (("train2017", "a.png"), ("val2017", "b.png")):
        write_images(tmp_path / year, name)
        annotation = {
            "images": [{"id": 7, "file_name": name}],
            "annotations": [
                {"image_id": 7, "caption": "a cat\n"},
                {"image_id": 8, "caption": "whose?"},
                {"image_id": 7, "caption": "the cat"},
            ],
        }
        (annotation_folder / f"captions_{year}.json").write_text(json.dumps(annotation))
    assert read_despite_flaws(annotation_folder / "captions_train2017.json") == {"a.png": ("a cat", "the cat")}
    (missing,) = invalid_examples(annotation_folder / "captions_train2017.json")
    assert str(missing).endswith("annotations[1]: an image that is not listed (image_id 8)")


def read_despite_flaws(path: Path, **options: Any) -> dict[str, tuple[str, ...]]:
    examples = skip_invalid(read_caption_examples(str(path), **options), "skip", SkippedExamples())
    return {example.image.name: example.captions for example in examples}


def test_split_selects_the_coco_file(tmp_path: Path) -> None:
    annotation_folder = tmp_path / "annotations"
    annotation_folder.mkdir()
    annotation = {"images": [{"id": 7, "file_name": "a.png"}], "annotations": [{"image_id": 7, "caption": "a"}]}
    for year in ("train2014", "val2014"):
        write_images(tmp_path / "images" / year, "a.png")
        (annotation_folder / f"captions_{year}.json").write_text(json.dumps(annotation))
    (example,) = read_caption_examples(str(tmp_path), split="valid")
    assert isinstance(example, CaptionExample)
    assert example.image.path == tmp_path / "images" / "val2014" / "a.png"
    (annotation_folder / "captions_val2017.json").write_text(json.dumps(annotation))
    with pytest.raises(InputError, match=r"several files: annotations/captions_val2014.json, .*name one"):
        read(tmp_path, split="valid")


def test_karpathy_splits(tmp_path: Path) -> None:
    write_images(tmp_path / "images" / "val2014", "a.png")
    write_images(tmp_path / "images", "b.png")
    annotation = [
        {"filepath": "val2014", "filename": "a.png", "split": "restval", "sentences": [{"raw": "a cat"}]},
        {"filename": "b.png", "split": "test", "sentences": [{"raw": "b"}, {"raw": "c"}]},
    ]
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": annotation}))
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
def test_invalid_caption_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    write_table(tmp_path / "captions.tsv")
    with pytest.raises(InputError, match=r"there is no folder or \.tar 'nowhere'"):
        read(tmp_path, images="nowhere")
    with pytest.raises(InputError, match="there is no"):
        read(tmp_path / "nothing.tsv")
    with pytest.raises(InputError, match="cannot be read from the hub"):
        read("hub:some/pictures")
    write_images(tmp_path / "photos", "a.png", "b.png", "c.png")
    assert len(read(tmp_path, images=str(tmp_path / "photos"))) == 3


# -------------------------------------------------------------------------------------------------- pictures


def test_image_formats() -> None:
    left_right = Image.new("RGB", (8, 5), RED)
    left_right.paste(BLUE, (4, 0, 8, 5))
    formats = {"PNG": {}, "JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}
    for image_format, options in formats.items():
        examples = decode_image(encode(left_right, image_format, **options), "here")
        assert isinstance(examples, np.ndarray)
        assert examples.shape == (5, 8, 3)
        assert examples.dtype == np.uint8
        assert np.abs(examples[:, :4].astype(int) - RED).max() <= 5
        assert np.abs(examples[:, 4:].astype(int) - BLUE).max() <= 5
    examples = decode_image(encode(left_right, "GIF"), "here.gif")
    assert isinstance(examples, InvalidExample)
    assert examples.reason == "not an image in PNG, JPEG or WebP"


def test_exif_rotation() -> None:
    image = Image.new("RGB", (8, 5), RED)
    image.paste(BLUE, (4, 0, 8, 5))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° to the right: what is left comes up
    examples = decode_image(encode(image, "PNG", exif=exif), "here")
    assert isinstance(examples, np.ndarray)
    assert examples.shape == (8, 5, 3)
    assert (examples[:4] == RED).all()
    assert (examples[4:] == BLUE).all()


def test_image_modes_are_converted_to_rgb() -> None:
    def example(image: Any) -> list[int]:
        examples = decode_image(encode(image), "here")
        assert isinstance(examples, np.ndarray)
        assert examples.shape == (3, 5, 3)
        return examples[1, 2].tolist()  # type: ignore[no-any-return]

    assert example(make_image((7,), mode="L")) == [7, 7, 7]
    assert example(make_image((255, 0, 0, 0), mode="RGBA")) == [255, 255, 255]  # nothing to be seen: white
    assert example(make_image((0, 0, 0, 51), mode="RGBA")) == [204, 204, 204]
    assert example(make_image((0, 0), mode="LA")) == [255, 255, 255]
    assert example(make_image((1,), mode="1")) == [255, 255, 255]
    assert example(make_image(BLUE).convert("P")) == [0, 0, 255]
    assert example(Image.fromarray(np.full((3, 5), 128 * 257, np.uint16))) == [128, 128, 128]
    cyan = decode_image(encode(make_image((255, 0, 0, 0), mode="CMYK"), "JPEG"), "here")
    assert np.abs(np.asarray(cyan, int) - (0, 255, 255)).max() < 20


def make_bomb(width: int, height: int) -> bytes:
    """A small PNG that says that it is huge."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
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
        (encode(make_image(size=(97, 89)), "JPEG")[:-30], "a damaged image"),
        (encode(make_image(size=(97, 89)), "JPEG")[:100], "a damaged image"),
        (encode(make_image(size=(97, 89)), "WEBP")[:40], "a damaged image"),
        (encode(make_image(size=(97, 89)))[:60], "a damaged image"),
        (make_bomb(7, 5)[:-30], "a damaged image"),
        (make_bomb(8_000, 8_000), "an image of too many pixels"),  # ours
        (make_bomb(12_000, 12_000), "an image of too many pixels"),  # Pillow warns
        (make_bomb(60_000, 60_000), "an image of too many pixels"),  # Pillow refuses
    ],
)
def test_invalid_images(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "x.jpg").write_bytes(data)
    file = ImageFolder(tmp_path).find("x.jpg", "my.tsv:3")
    assert isinstance(file, ImageFile)
    examples = file.decode("my.tsv:3 x.jpg")
    assert isinstance(examples, InvalidExample)
    assert (examples.location, examples.reason) == ("my.tsv:3 x.jpg", reason)


def test_pillow_warning_as_error() -> None:
    examples = decode_image(make_bomb(12_000, 12_000), "here")  # as tests turn warnings into errors
    assert isinstance(examples, InvalidExample)
    assert examples.reason == "an image of too many pixels"


@pytest.mark.parametrize("side", [12_000, 60_000])  # Pillow warns, and refuses
def test_pixel_limit_in_error_message(side: int) -> None:
    examples = decode_image(make_bomb(side, side), "here", ImageLimits(max_pixels=77))
    assert str(examples).endswith("the limit is 77 pixels)")


def test_image_limits() -> None:
    data = encode(make_image(size=(7, 11)))
    assert isinstance(decode_image(data, "here", ImageLimits(max_pixels=77)), np.ndarray)
    too_many_pixels = decode_image(data, "here", ImageLimits(max_pixels=76))
    assert str(too_many_pixels) == "here: an image of too many pixels (7 × 11; the limit is 76 pixels)"
    too_many_bytes = decode_image(data, "here", ImageLimits(max_bytes=len(data) - 1))
    assert isinstance(too_many_bytes, InvalidExample)
    assert too_many_bytes.reason == "an image of too many bytes"
    oversized = ImageFile(Path("nowhere.png"), "nowhere.png", 0, 10**9, 0).decode()
    assert isinstance(oversized, InvalidExample)
    assert oversized.reason == "an image of too many bytes"  # which nobody tried to read


def test_deleted_file(tmp_path: Path) -> None:
    example = ImageFile.from_path(write_images(tmp_path, "a.png") / "a.png")
    (tmp_path / "a.png").unlink()
    examples = example.decode()
    assert isinstance(examples, InvalidExample)
    assert examples.reason == "an image that cannot be read"
    with pytest.raises(InputError, match="a missing image"):
        ImageFile.from_path(tmp_path / "a.png")
    assert isinstance(ImageFolder(tmp_path).find(".", "here"), InvalidExample)
    assert isinstance(ImageFolder(tmp_path).find("a\0b", "here"), InvalidExample)


def test_archive_names(tmp_path: Path) -> None:
    files = {"./x/a.png": b"1", "y/a.png": b"22", "y/b.png": b"333", "y/b.png ": b""}
    archive = ImageArchive(write_tar(tmp_path / "my.tar", files))
    assert len(archive) == 4

    def size(name: str) -> int | None:
        examples = archive.find(name, "here")
        return None if isinstance(examples, InvalidExample) else examples.num_bytes

    assert [size(name) for name in ("x/a.png", "./y/a.png", "b.png")] == [1, 2, 3]
    assert size("a.png") is None  # which of the two?
    assert size("z.png") is None


def test_invalid_archives(tmp_path: Path) -> None:
    (tmp_path / "images.tar").write_bytes(gzip.compress(write_tar(tmp_path / "t", {"a": b"1"}).read_bytes()))
    with pytest.raises(InputError, match=r"uncompressed \.tar"):
        ImageArchive(tmp_path / "images.tar")
    with pytest.raises(InputError, match="No such file"):
        ImageArchive(tmp_path / "other.tar")


def test_truncated_archive(tmp_path: Path) -> None:
    files = {name: encode(make_image(size=(31, 37)), "JPEG") for name in ("a.jpg", "b.jpg")}
    path = write_tar(tmp_path / "images.tar", files)
    complete = path.read_bytes()
    start = complete.index(files["b.jpg"], 1024)
    path.write_bytes(complete[: start + 100])  # in the midst of the second picture
    with pytest.raises(InputError, match=r"unexpected end of data.*expected a complete"):
        ImageArchive(path)


def test_missing_pillow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[images\]"'):
        decode_image(b"\x89PNG", "here")
