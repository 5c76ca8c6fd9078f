"""Tests of `jumok look --image`: generation, chats, several images, and invalid inputs."""

from __future__ import annotations

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
    assert data.title == "Image"


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
    check_error(llava, r"1 times <image>.*2 images", "w1 <image>", *image, *image)
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
