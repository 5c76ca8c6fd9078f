"""Where image tokens lie in their image, compared with the model itself.

A part of the picture is changed, and the token whose embedding changes most must be placed on this part.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from jumok.data.images import Pixels
from jumok.look.huggingface.image_capture import capture_image_model
from jumok.look.huggingface.image_processor import load_processor
from jumok.look.huggingface.loading import load_config
from jumok.look.viewer.image_placement import ImageGrid, ImagePlacement

sys.path.insert(0, str(Path(__file__).parents[1]))
from image_models import ENCODERS, VISION_LANGUAGE_MODELS, save_model

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*layers are left out")]
SIZES = ((94, 166), (60, 40))  # height and width of two images


def draw_image(number: int) -> Pixels:
    return np.random.default_rng(number).integers(60, 190, (*SIZES[number], 3)).astype(np.uint8)


def save_images(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"{n}.png" for n in range(count)]
    for n, path in enumerate(paths):
        Image.fromarray(draw_image(n)).save(path)
    return paths


def locate_centre(grid: ImageGrid, row: int, column: int) -> tuple[float, float]:
    """Return the centre of a patch, as fractions of the height and the width of the image."""
    left, top, right, bottom = grid.region
    rows, columns = grid.shape
    return top + (row + 0.5) / rows * (bottom - top), left + (column + 0.5) / columns * (right - left)


def find_middle(grid: ImageGrid, row: int, column: int) -> tuple[float, float, float, float]:
    """Return the middle of a patch: left, top, right and bottom, as fractions of the image."""
    left, top, right, bottom = grid.region
    y, x = locate_centre(grid, row, column)
    down, across = 0.3 * (bottom - top) / grid.shape[0], 0.3 * (right - left) / grid.shape[1]
    return x - across, y - down, x + across, y + down


def paint_patch(pixels: Pixels, grid: ImageGrid, row: int, column: int) -> Pixels:
    """Return the image with another colour in the middle of a patch."""
    height, width, _ = pixels.shape
    left, top, right, bottom = find_middle(grid, row, column)
    painted = pixels.copy()
    painted[round(top * height) : round(bottom * height) + 1, round(left * width) : round(right * width) + 1] = (
        255, 0, 255,
    )  # fmt: skip
    return painted


def list_keys_at(placement: ImagePlacement, image: int, box: tuple[float, float, float, float]) -> set[int]:
    """Return the keys of the patches, of all grids of an image, that a box overlaps."""
    keys: set[int] = set()
    for grid in placement.grids:
        left, top, right, bottom = grid.region
        rows, columns = grid.shape
        first_column, last_column = ((x - left) / (right - left) * columns for x in (box[0], box[2]))
        first_row, last_row = ((y - top) / (bottom - top) * rows for y in (box[1], box[3]))
        if grid.image == image:
            part = grid.keys[
                max(0, int(first_row)) : int(last_row) + 1, max(0, int(first_column)) : int(last_column) + 1
            ]
            keys |= set(part.ravel().tolist())
    return keys


class Embeddings:
    """The inputs of attention in a model, by the name of the module whose inputs they are."""

    def __init__(self, folder: Path, prompt_text: str | None, num_images: int) -> None:
        import transformers

        config = load_config(folder)
        self.processor = load_processor(folder, config)
        self.prompt = self.processor.build_prompt(prompt_text, num_images, chat=False, add_reply=False)
        auto = transformers.AutoModelForImageTextToText
        known = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        self.model = (auto if known else transformers.AutoModel).from_pretrained(folder).eval()

    def compute(self, images: list[Pixels], module_name: str, argument: str | None) -> torch.Tensor:
        """Return what a module gets ``(L, D)``: its first argument, or a named one."""
        inputs: list[torch.Tensor] = []

        def keep(module: Any, args: Any, kwargs: Any) -> None:
            value = kwargs[argument] if argument in kwargs else args[0] if args else kwargs["hidden_states"]
            inputs.append(value.reshape(-1, value.shape[-1]))

        found = next(module for name, module in self.model.named_modules() if name.endswith(module_name))
        handle = found.register_forward_pre_hook(keep, with_kwargs=True)
        encoded = dict(self.processor.process(images, self.prompt))
        model = self.model.vision_model if hasattr(self.model, "vision_model") and not self.prompt else self.model
        if self.model.config.is_encoder_decoder:
            encoded["decoder_input_ids"] = torch.tensor([[2]])
        with torch.inference_mode():
            model(**encoded)
        handle.remove()
        return inputs[0]


# The module before which patches have their final order, and the argument with them, for the keys of its attention.
INPUTS = {
    "mllama": ("layers.1.cross_attn", "cross_attention_states"),
    "blip": ("layer.0.crossattention", "encoder_hidden_states"),
    "captioner": ("h.0.crossattention", "encoder_hidden_states"),
    "florence2": ("encoder.layers.0", None),
    "idefics3": ("text_model.layers.0", None),
}
ONE_IMAGE = ("blip", "captioner", "florence2")


def find_placement(data: Any, name: str) -> ImagePlacement:
    """Return where words look in the last layer."""
    layer = next(layer for layer in reversed(data.layers) if data.image.matches(layer))
    placement = data.image.find_placement(layer)
    assert placement is not None
    return placement


@pytest.mark.parametrize("name", VISION_LANGUAGE_MODELS)
def test_changed_patch_changes_its_token(name: str, tmp_path: Path) -> None:
    folder = save_model(VISION_LANGUAGE_MODELS[name], tmp_path / "model")
    count = 1 if name in ONE_IMAGE else 2
    text = None if name == "captioner" else "w1 w2"
    options = {} if name in ("blip", "florence2", "captioner") else {"text": text}
    if name in ("blip", "florence2"):
        options = {"text": text, "generate": 2}
    (data,) = capture_image_model(folder, save_images(tmp_path, count), device="cpu", **options)  # type: ignore[arg-type]
    placement = find_placement(data, name)
    assert {grid.image for grid in placement.grids} == set(range(count))
    embeddings = Embeddings(folder, text, count)
    module, argument = INPUTS.get(name, ("language_model.layers.0", None))
    images = [draw_image(n) for n in range(count)]
    before = embeddings.compute(images, module, argument)
    rng = np.random.default_rng(0)
    num_checked = 0
    for grid in placement.grids:
        for _ in range(8):
            row, column = (int(rng.integers(length)) for length in grid.shape)
            y, x = locate_centre(grid, row, column)
            if not (0.05 < y < 0.95 and 0.05 < x < 0.95):
                continue
            changed = list(images)
            changed[grid.image] = paint_patch(images[grid.image], grid, row, column)
            change = (embeddings.compute(changed, module, argument) - before).norm(dim=-1)
            allowed = list_keys_at(placement, grid.image, find_middle(grid, row, column))
            assert int(grid.keys[row, column]) in allowed
            assert int(change.argmax()) in allowed, (grid.name, row, column, change.topk(3), allowed)
            # Among the patches of this grid, it is the one that changes most.
            own = change[torch.from_numpy(grid.keys)]
            assert np.unravel_index(int(own.argmax()), grid.shape) == (row, column)
            num_checked += 1
    assert num_checked >= 4


def test_one_changed_patch_changes_its_token_in_encoders(tmp_path: Path) -> None:
    for name, build in ENCODERS.items():
        folder = save_model(build, tmp_path / name)
        (data,) = capture_image_model(folder, save_images(tmp_path, 1), device="cpu")
        layer = data.layers[0]
        placement = data.image.find_placement(layer)  # type: ignore[union-attr]
        assert placement is not None, name
        (grid,) = placement.grids
        embeddings = Embeddings(folder, None, 1)
        images = [draw_image(0)]
        module = layer.name.rsplit(".", 1)[0]
        before = embeddings.compute(images, module, None)
        for row, column in ((0, 1), (2, 3), (grid.shape[0] - 1, 0)):
            change = (embeddings.compute([paint_patch(images[0], grid, row, column)], module, None) - before).norm(
                dim=-1
            )
            assert int(change.argmax()) == int(grid.keys[row, column]), name


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("qwen2_vl", "visual.blocks.1"),
        ("qwen2_5_vl", "visual.blocks.1"),  # sorted by windows
        ("mllama", "vision_model.transformer.layers.0"),  # tiles with a class token and padding
        ("idefics3", "vision_model.encoder.layers.0"),
    ],
)
def test_changed_patch_changes_its_token_in_the_image_encoder(name: str, block: str, tmp_path: Path) -> None:
    folder = save_model(VISION_LANGUAGE_MODELS[name], tmp_path / "model")
    (data,) = capture_image_model(folder, save_images(tmp_path, 1), "w1", device="cpu")
    layer = next(layer for layer in data.layers if layer.name.startswith(block))
    assert data.image is not None
    placement = data.image.find_placement(layer)
    assert placement is not None
    (grid,) = placement.grids
    embeddings = Embeddings(folder, "w1", 1)
    image = draw_image(0)
    before = embeddings.compute([image], block, None)
    num_checked = 0
    for row, column in ((0, 1), (1, 0), (1, 3), (3, 2), (grid.shape[0] - 2, grid.shape[1] - 2)):
        y, x = locate_centre(grid, row, column)
        if 0 < y < 0.95 and 0 < x < 0.95:
            change = embeddings.compute([paint_patch(image, grid, row, column)], block, None) - before
            # Of several tiles, the layer shows the first.
            assert int(change.norm(dim=-1)[: placement.num_keys].argmax()) == int(grid.keys[row, column])
            num_checked += 1
    assert num_checked >= 3
