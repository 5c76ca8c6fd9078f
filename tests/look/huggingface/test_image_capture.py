"""Tests of `jumok look --image`: generation, chats, several images, and invalid inputs."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from jumok.cli.app import app
from jumok.errors import InputError
from jumok.look.huggingface.image_capture import capture_image_model
from jumok.look.huggingface.image_processor import load_processor
from jumok.look.huggingface.pixel_trace import trace_pixels

sys.path.insert(0, str(Path(__file__).parents[1]))
from image_models import ENCODERS, VISION_LANGUAGE_MODELS, build_idefics2, build_swin, save_model

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 255, (60, 90, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(VISION_LANGUAGE_MODELS["llava"], tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(ENCODERS["vit"], tmp_path_factory.mktemp("vit"))


@pytest.mark.parametrize("name", ["llava", "gemma3", "paligemma", "mllama", "qwen2_vl"])
def test_captured_pass_sees_what_generation_saw(name: str, photo: Path, tmp_path: Path) -> None:
    """Compare with the weights that eager attention returns for each step of a generation."""
    folder = save_model(VISION_LANGUAGE_MODELS[name], tmp_path)
    (data,) = capture_image_model(folder, [photo], "w1 w2 w3", generate=3, device="cpu")
    config = transformers.AutoConfig.from_pretrained(folder)
    processor = load_processor(folder, config)
    prompt = processor.build_prompt("w1 w2 w3", 1, chat=False, add_reply=True)
    encoded = processor.process([np.asarray(Image.open(photo))], prompt)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    encoded = {key: value for key, value in encoded.items() if key != "labels"}
    output = model.generate(
        **encoded, do_sample=False, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True
    )
    layers = [layer for layer in data.layers if layer.name.startswith("language_model")]
    length = encoded["input_ids"].shape[1]
    for number, layer in enumerate(layers):
        assert layer.first_generated[0] == length
        for step, attentions in enumerate(output.attentions):
            expected = attentions[number][0, 0]  # (queries, keys)
            rows = slice(0, length) if step == 0 else slice(length + step - 1, length + step)
            weights = layer.compute_weights(0)[rows, : expected.shape[1]]
            if name == "mllama" and layer.kind == "cross":  # rows without an image attend to nothing that counts
                weights, expected = weights[-1:], expected[-1:]
            np.testing.assert_allclose(weights, expected.numpy(), atol=1e-4)


def test_image_tokens_are_labelled(llava: Path, photo: Path) -> None:
    (data,) = capture_image_model(llava, [photo, photo], "w1 <image> w2 <image> w3", device="cpu")
    layer = data.layers[-1]
    assert layer.row_texts == ["w1", *["[image 1]"] * 25, "w2", *["[image 2]"] * 25, "w3"]
    assert data.image is not None
    assert data.image.list_word_rows(layer) == [(26, 27), (52, 53)]
    assert len(data.image.files) == 2


def test_layers_are_selected(llava: Path, photo: Path) -> None:
    (data,) = capture_image_model(llava, [photo], "w1", layers="language_model.layers.1*", device="cpu")
    assert [layer.name for layer in data.layers] == ["language_model.layers.1.self_attn"]


def test_chat_template_places_images(llava: Path, photo: Path) -> None:
    (data,) = capture_image_model(llava, [photo], "w1", chat=True, generate=2, device="cpu")
    texts = data.layers[-1].row_texts
    assert texts[:2] == ["<|user|>", "[image 1]"]
    assert texts[26:29] == ["w1", "<|assistant|>", texts[28]]
    assert data.layers[-1].first_generated == (28, 28)


def test_encoder_shows_prefix_tokens(tmp_path: Path, photo: Path) -> None:
    folder = save_model(ENCODERS["dinov2_registers"], tmp_path)
    (data,) = capture_image_model(folder, [photo], device="cpu")
    assert data.layers[0].row_texts[:7] == ["[CLS]", "[REG1]", "[REG2]", "[REG3]", "[REG4]", "1,1", "1,2"]
    assert data.title == "photo.png"


def test_clip_with_and_without_text(tmp_path: Path, photo: Path) -> None:
    folder = save_model(ENCODERS["clip"], tmp_path)
    (data,) = capture_image_model(folder, [photo], device="cpu")
    assert {layer.name.split(".")[0] for layer in data.layers} == {"vision_model"}
    (data,) = capture_image_model(folder, [photo], "w1 w2", device="cpu")
    assert {layer.name.split(".")[0] for layer in data.layers} == {"text_model", "vision_model"}
    assert next(layer for layer in data.layers if layer.name.startswith("text")).row_texts == ["w1", "w2"]


def test_ablation_keeps_the_generated_text(llava: Path, photo: Path) -> None:
    before, after = capture_image_model(
        llava, [photo], "w1", generate=2, ablations={"language_model.layers.0.self_attn": [0]}, device="cpu"
    )
    assert before.layers[-1].row_texts == after.layers[-1].row_texts
    assert after.label == "after"


def test_command_writes_page_and_figure(llava: Path, photo: Path, tmp_path: Path) -> None:
    for name in ("map.html", "map.png"):
        arguments = ["look", str(llava), "w1", "--image", str(photo), "--generate", "2", "--out", str(tmp_path / name)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert "data:image/png;base64" in (tmp_path / "map.html").read_text()
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, ["look", str(llava), "--image", str(photo), "--out", str(photo)])
    assert isinstance(result.exception, InputError)


def check_error(folder: Path, message: str, *arguments: str) -> None:
    result = CliRunner().invoke(app, ["look", str(folder), *arguments, "--out", str(folder / "map.html")])
    assert isinstance(result.exception, InputError), result.output
    text = " ".join(str(result.exception).split())
    assert re.search(message, text), text
    assert len(text) < 700


def test_invalid_images_are_rejected(vit: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("text")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(30))
    Image.new("RGB", (4, 4)).save(tmp_path / "c.gif")
    (tmp_path / "empty.png").write_bytes(b"")
    for name, message in (
        ("none.png", "none.png: does not exist"), (".", "is a folder"), ("a.png", "not an image in PNG, JPEG or WebP"),
        ("b.png", "damaged"), ("c.gif", "not an image in PNG, JPEG or WebP"), ("empty.png", "empty image"),
    ):  # fmt: skip
        check_error(vit, message, "--image", str(tmp_path / name))


def test_images_of_too_many_pixels_are_rejected_before_decoding(vit: Path, tmp_path: Path) -> None:
    Image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    check_error(vit, "too many pixels.*9000 × 9000", "--image", str(tmp_path / "bomb.png"))


def test_folders_without_a_processor_are_rejected(llava: Path, photo: Path, tmp_path: Path) -> None:
    shutil.copytree(llava, tmp_path / "copy")
    (tmp_path / "copy" / "processor_config.json").unlink()
    check_error(tmp_path / "copy", "neither a preprocessor_config.json nor a processor_config", "--image", str(photo))


def test_wrong_combinations_are_rejected(llava: Path, vit: Path, photo: Path, tmp_path: Path, bert: Path) -> None:
    image = ["--image", str(photo)]
    check_error(llava, "no input was given.*--image")
    check_error(llava, "has <image>.* 1 times, and --image was given 2 times", "w1 <image>", *image, *image)
    check_error(llava, "--target needs one", "w1", "--target", "w2", *image)
    check_error(llava, "the text is empty", " ", *image)
    check_error(vit, "reads images and no text; leave the text out", "w1", *image)
    check_error(vit, r"2 images were given.*\(vit\) takes one", *image, *image)
    check_error(vit, r"\(vit\) that writes no text: leave --generate out", "--generate", "3", *image)
    check_error(bert, r"\(bert\) that reads text and no images; leave --image out", "a cat", *image)


def test_models_without_places_are_rejected(photo: Path, tmp_path: Path) -> None:
    swin = save_model(build_swin, tmp_path / "swin")
    check_error(swin, r"\(swin\) cannot be placed.*within windows.*jumok\.watch", "--image", str(photo))
    idefics2 = save_model(build_idefics2, tmp_path / "idefics2")
    (data,) = capture_image_model(idefics2, [photo], "w1", device="cpu")  # its encoder has places
    layer = data.layers[-1]
    assert layer.name.startswith("text_model")
    assert not data.media["image"].matches(layer)
    assert "[image 1]" in layer.row_texts


def test_trace_finds_crops_padding_and_mirrors() -> None:
    def pad_and_crop(pictures: Any) -> Any:
        (picture,) = pictures
        padded = np.zeros((80, 100, 3))
        padded[10:70] = picture.astype(float)
        return torch.from_numpy(padded[:, 20:60].transpose(2, 0, 1)[None] / 127.5 - 1).numpy()

    from jumok.look.huggingface.image_layout import find_crops

    (crop,) = find_crops(trace_pixels(pad_and_crop, [(60, 100)]))
    assert crop.region == pytest.approx((0.2, -1 / 6, 0.6, 70 / 60), abs=0.005)

    def transpose(pictures: Any) -> Any:
        return pictures[0].astype(float).transpose(2, 1, 0)[None]

    with pytest.raises(InputError, match="turns or warps"):
        find_crops(trace_pixels(transpose, [(60, 100)]))


@pytest.mark.parametrize(
    ("size", "top", "bottom"),
    [((150, 1500), -1.0, 19 / 9), ((1500, 150), -11 / 6, 17 / 6)],  # 9 of 28 rows between 9 and 10; 6 of 28 columns
)
def test_trace_places_tiles_of_a_panorama(size: tuple[int, int], top: float, bottom: float) -> None:
    """Its tiles are mostly padding, and only the overview, of another scale, is not."""
    from jumok.look.huggingface.image_layout import find_crops

    pinpoints = [[28, 56], [56, 28], [56, 56], [28, 84]]
    processor = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )

    def process(pictures: Any) -> Any:
        return processor([Image.fromarray(picture) for picture in pictures], return_tensors="np")["pixel_values"]

    overview, *tiles = find_crops(trace_pixels(process, [size]))
    assert overview.region == pytest.approx((0, 0, 1, 1), abs=0.01)
    across = 0 if size[0] > size[1] else 1
    for number, tile in enumerate(tiles):
        assert (tile.region[across], tile.region[across + 2]) == pytest.approx((top, bottom), abs=0.05)
        assert tile.region[1 - across] == pytest.approx(number / len(tiles), abs=0.02)


def test_images_with_different_numbers_of_tiles(tmp_path: Path, photo: Path) -> None:
    """The encoder leaves out the tiles that only pad the shorter list; each of the others is placed."""
    folder = save_model(VISION_LANGUAGE_MODELS["llava_next"], tmp_path / "model")
    wide = tmp_path / "wide.png"
    Image.fromarray(np.full((30, 300, 3), 90, np.uint8)).save(wide)
    names = {}
    for images in ([wide], [photo], [wide, photo]):
        (data,) = capture_image_model(folder, images, "w1", device="cpu")
        names[len(images), images[0]] = [layer for layer in data.layers if layer.name.startswith("vision_tower")]
    both = names[2, wide]
    assert len(both) == len(names[1, wide]) + len(names[1, photo])
    alone = names[1, wide][0].compute_weights(0), names[1, photo][0].compute_weights(0)
    first = [next(layer for layer in both if f"[image {n}, crop 1]" in layer.name) for n in (1, 2)]
    for layer, expected in zip(first, alone, strict=True):
        np.testing.assert_allclose(layer.compute_weights(0), expected, atol=1e-5)


def test_captioner_without_a_processor_shows_its_words(tmp_path: Path, photo: Path) -> None:
    """Its folder has an image processor and a tokenizer, as that of ViT with GPT-2."""
    folder = save_model(VISION_LANGUAGE_MODELS["captioner"], tmp_path)
    (data,) = capture_image_model(folder, [photo], target="w1 w2 w3", device="cpu")
    layer = next(layer for layer in data.layers if layer.kind == "cross")
    assert layer.row_texts == ["<s>", "w1", "w2"]


def test_vision_language_model_continues_a_text_alone(llava: Path) -> None:
    from jumok.look.huggingface.capture import capture_huggingface_model

    (data,) = capture_huggingface_model(llava, "w1 w2", generate=3, device="cpu")
    assert data.layers[0].shape == (5, 5)
    assert data.layers[0].first_generated == (2, 2)


def test_rotated_photo_is_shown_as_the_model_sees_it(vit: Path, tmp_path: Path) -> None:
    """EXIF orientation 6: the left edge of the stored pixels is the top."""
    stored = np.zeros((40, 80, 3), np.uint8)
    stored[:, :40] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(stored).save(tmp_path / "rotated.jpg", exif=exif, quality=95)
    upright = np.zeros((80, 40, 3), np.uint8)
    upright[:40] = 255
    Image.fromarray(upright).save(tmp_path / "upright.png")
    (rotated,), (expected,) = (
        capture_image_model(vit, [tmp_path / name], device="cpu") for name in ("rotated.jpg", "upright.png")
    )
    assert rotated.image is not None
    (file,) = rotated.image.files
    shown = np.asarray(Image.open(io.BytesIO(file)).convert("L"))
    assert shown.shape == (80, 40)
    assert shown[:38].min() > 240
    assert shown[42:].max() < 15
    for layer, other in zip(rotated.layers, expected.layers, strict=True):
        np.testing.assert_allclose(layer.compute_weights(0), other.compute_weights(0), atol=0.01)


def test_tiny_images_are_rejected(vit: Path, tmp_path: Path) -> None:
    Image.new("RGB", (1, 300)).save(tmp_path / "line.png")
    check_error(vit, "1 × 300 pixels, too few .* at least 8 × 8", "--image", str(tmp_path / "line.png"))
    Image.new("RGB", (8, 300)).save(tmp_path / "line.png")
    check_error(vit, "reads no text; leave --chat out", "--image", str(tmp_path / "line.png"), "--chat")
