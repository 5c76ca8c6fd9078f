"""Which keys of the layers of a model are which patches of its images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jumok.look.capture.axis_tokens import decode_ids
from jumok.look.capture.captures import CapturedLayer
from jumok.look.huggingface.image_layout import (
    RESAMPLED,
    Crop,
    find_crops,
    get_vision_config,
    place_cross_keys,
    place_encoder_keys,
    place_image_tokens,
    place_joint_tiles,
    place_packed_encoder_keys,
)
from jumok.look.huggingface.loading import accepts_argument
from jumok.look.huggingface.pixel_trace import PixelTrace
from jumok.look.viewer.image_placement import ImageGrid, ImagePlacement, find_spans
from jumok.look.viewer.viewer_data import ViewerLayer

# Names of the modules that encode images, within a model that reads text, too.
VISION_MODULES = frozenset(
    {"vision_model", "vision_tower", "vision_encoder", "image_encoder", "visual", "vision_embed_tokens"}
)


@dataclass(frozen=True, eq=False)
class ImageSession:
    """A model with the inputs of the captured pass. ``runner`` is the model, or the part of it that is run."""

    folder: Path
    model: Any
    runner: Any
    inputs: dict[str, Any]
    tokenizer: Any
    title: str
    first_generated: int | None

    @property
    def input_ids(self) -> list[int]:
        """The token ids of the text; empty without a text."""
        ids = self.inputs.get("input_ids")
        return [] if ids is None else ids[0].tolist()

    @property
    def image_positions(self) -> list[int]:
        """The positions of the image tokens in the text."""
        image_id = get_image_token_id(self.model.config)
        return [n for n, token in enumerate(self.input_ids) if token == image_id]


def get_image_token_id(config: Any) -> int | None:
    """Return the id of the token that stands for a patch, or a part of one, in the text."""
    for name in ("image_token_id", "image_token_index"):
        token_id = getattr(config, name, None)
        if isinstance(token_id, int):
            return token_id
    return None


class LayerPlacer:
    """Finds which keys of a captured layer are which patches."""

    def __init__(self, session: ImageSession, trace: PixelTrace, num_images: int) -> None:
        self.session, self.trace, self.num_images = session, trace, num_images
        self.model = session.model
        self.packed_calls: list[str] = []  # names of layers of an encoder of packed patches
        self.left_out: list[str] = []  # names of layers of an image encoder without a place
        self.crops: list[Crop] = find_crops(trace) if trace.x.ndim >= 4 else []
        self.num_crops = int(np.prod(trace.x.shape[:-3])) if trace.x.ndim >= 4 else 0
        self.text_labels, self.text_placement = self._place_text()

    def _place_text(self) -> tuple[list[str] | None, ImagePlacement | None]:
        """Return the texts of the tokens that the text model reads, and the patches among them."""
        session = self.session
        ids = session.input_ids
        if not ids:
            return None, None
        labels = decode_ids(session.tokenizer, ids)
        positions = np.array(session.image_positions, np.int64)
        if not len(positions):
            return labels, None
        grids = place_image_tokens(self.model, session.inputs, self.trace, len(positions))
        image_of_key = np.full(len(ids), -1)
        if not grids:
            self._number_images(image_of_key, positions)
        for grid in grids:
            image_of_key[positions[grid.keys[grid.keys >= 0]]] = grid.image
        # Tokens without a place, such as those that end a row, belong to the image before them.
        for before, position in itertools.pairwise(positions.tolist()):
            if image_of_key[position] < 0:
                image_of_key[position] = image_of_key[before]
        if image_of_key[positions[0]] < 0:
            image_of_key[positions[0]] = 0
        for position in positions:
            labels[position] = f"[image {image_of_key[position] + 1}]"
        if not grids:
            return labels, None
        placed = tuple(replace(grid, keys=positions[grid.keys]) for grid in grids)
        return labels, ImagePlacement(placed, find_spans(image_of_key.tolist()), len(ids), has_text=True)

    def _number_images(self, image_of_key: Any, positions: Any) -> None:
        """Number the runs of image tokens: without places, each run is an image."""
        runs = np.cumsum(np.diff(positions, prepend=positions[0]) > 1)
        image_of_key[positions] = np.minimum(runs, self.num_images - 1)

    def place(self, captured: CapturedLayer) -> list[tuple[ViewerLayer, ImagePlacement | None]]:
        """Return the layers for the viewer that a captured layer becomes: one for each image or tile of an encoder."""
        _, _, num_queries, num_keys = captured.shape
        num_tokens = len(self.session.input_ids)
        if self._is_vision(captured.name):
            return self._place_encoder(captured)
        if num_tokens and num_keys == num_tokens:
            rows = self.text_labels if num_queries == num_tokens and captured.kind != "cross" else None
            layer = ViewerLayer.from_captured(captured, row_labels=rows, col_labels=self.text_labels)
            return [(layer, self.text_placement)]
        if captured.kind == "cross":
            grids = place_cross_keys(self.crops, self.num_crops, num_keys) if self.crops else []
            rows = self.text_labels if num_queries == num_tokens else None
            layer = ViewerLayer.from_captured(
                captured,
                row_labels=rows,
                col_labels=_label_patches(grids, num_keys, self.num_images) if grids else None,
            )
            return [(layer, _build_placement(grids, num_keys))] if grids else [(layer, None)]
        return [(ViewerLayer.from_captured(captured), None)]

    def _is_vision(self, name: str) -> bool:
        session = self.session
        if session.runner is not session.model or not (
            accepts_argument(type(session.model), "input_ids") or session.model.config.is_encoder_decoder
        ):
            return True  # the model, or what is run of it, only reads images
        parts = name.split(".")
        is_encoder = session.model.config.model_type == "vision-encoder-decoder" and parts[0] == "encoder"
        return is_encoder or not VISION_MODULES.isdisjoint(parts)

    def _place_encoder(self, captured: CapturedLayer) -> list[tuple[ViewerLayer, ImagePlacement | None]]:
        batch, _, num_queries, num_keys = captured.shape
        if not self.crops and batch == 1:
            return self._place_packed_encoder(captured)
        if self.model.config.model_type == "mllama":
            return self._place_joint_encoder(captured)
        # Of several images, those with fewer tiles are padded; LLaVA-NeXT does not encode what is only padding.
        without_padding = batch == len(self.crops) != self.num_crops
        if (batch != self.num_crops and not without_padding) or num_queries not in (1, num_keys):
            attends = f"from {num_queries} to {num_keys} patches" if batch == self.num_crops else "within windows"
            self.left_out.append(f"{captured.name} attends {attends}")
            return []
        placed: list[tuple[ViewerLayer, ImagePlacement | None]] = []
        for number, crop in enumerate(self.crops):
            encoder_keys = place_encoder_keys(self.model, crop, num_keys)
            if encoder_keys is None:
                self.left_out.append(f"{captured.name} has {num_keys} patches of each image")
                return []
            grid, num_prefix = encoder_keys
            labels = _label_patches([grid], num_keys, 1, self._name_prefix(num_prefix))
            rows = labels if num_queries == num_keys else ["pooling"]
            layer = ViewerLayer.from_captured(
                captured, number if without_padding else crop.index, row_labels=rows, col_labels=labels
            )
            name = f"{captured.name}{self._describe_crop(crop)}"
            placed.append((replace(layer, name=name), _build_placement([grid], num_keys)))
        return placed

    def _place_joint_encoder(self, captured: CapturedLayer) -> list[tuple[ViewerLayer, ImagePlacement | None]]:
        """Place a layer over all tiles of an image, each padded to the same number of keys (Mllama)."""
        num_images, _, _, num_keys = captured.shape
        tiles_per_image, rest = divmod(self.num_crops, num_images)
        placed: list[tuple[ViewerLayer, ImagePlacement | None]] = []
        for image in range(num_images):
            tiles = [crop for crop in self.crops if crop.index // tiles_per_image == image]
            grids = place_joint_tiles(self.model, tiles, tiles_per_image, num_keys) if not rest else []
            if not grids:
                self.left_out.append(f"{captured.name} attends to {num_keys} patches of several tiles")
                return []
            labels = _label_patches(grids, num_keys, 1)
            layer = ViewerLayer.from_captured(captured, image, row_labels=labels, col_labels=labels)
            suffix = f" [image {image + 1}]" if num_images > 1 else ""
            placed.append((replace(layer, name=f"{captured.name}{suffix}"), _build_placement(grids, num_keys)))
        return placed

    def _place_packed_encoder(self, captured: CapturedLayer) -> list[tuple[ViewerLayer, ImagePlacement | None]]:
        """Place a layer over the patches of one of several images: it is called once for each."""
        image = sum(name == captured.name for name in self.packed_calls)
        self.packed_calls.append(captured.name)
        num_keys = captured.shape[3]
        grid = place_packed_encoder_keys(self.model, self.session.inputs, self.trace, image, num_keys)
        if grid is None or captured.shape[2] != num_keys:
            self.left_out.append(f"{captured.name} attends within windows of an image")
            return []
        labels = _label_patches([grid], num_keys, 1)
        layer = ViewerLayer.from_captured(captured, row_labels=labels, col_labels=labels)
        suffix = f" [image {image + 1}]" if self.num_images > 1 else ""
        return [(replace(layer, name=f"{captured.name}{suffix}"), _build_placement([grid], num_keys))]

    def _name_prefix(self, count: int) -> list[str]:
        config = get_vision_config(self.model.config)
        names = ["[CLS]"] * (count > 0)
        if config.model_type == "deit" and count > 1:
            names.append("[DIST]")
        return names + [f"[REG{n + 1}]" for n in range(count - len(names))]

    def _describe_crop(self, crop: Crop) -> str:
        """Return what tells the crop apart from others, for the name of a layer."""
        if len(self.crops) == 1:
            return ""
        own = [other for other in self.crops if other.image == crop.image]
        image = f"image {crop.image + 1}" if self.num_images > 1 else ""
        tile = f"crop {own.index(crop) + 1}" if len(own) > 1 else ""
        return f" [{', '.join(filter(None, (image, tile)))}]"

    def explain_missing(self) -> str:
        """Return why no layer could be placed on an image."""
        model_type = self.model.config.model_type
        advice = "use jumok.watch in Python to capture its layers without the image"
        if model_type in RESAMPLED:
            return (
                f"this model ({model_type}) mixes all patches of an image in each of its image tokens, so that they "
                f"have no place in the image; {advice}"
            )
        reason = f": {self.left_out[0]}" if self.left_out else ""
        return f"the attention of this model ({model_type}) cannot be placed on the image{reason}; {advice}"


def _build_placement(grids: Sequence[ImageGrid], num_keys: int) -> ImagePlacement:
    image_of_key = np.full(num_keys, -1)
    for grid in grids:
        image_of_key[grid.keys[grid.keys >= 0]] = grid.image
    return ImagePlacement(tuple(grids), find_spans(image_of_key.tolist()), num_keys)


def _label_patches(
    grids: Sequence[ImageGrid], num_keys: int, num_images: int, prefix: Sequence[str] = ("[CLS]",)
) -> list[str]:
    """Return a label for each key: row and column of its patch, as "3,5"."""
    first = min(int(grid.keys.min()) for grid in grids)
    labels = [*prefix[:first], *([""] * (num_keys - len(prefix[:first])))]
    for grid in grids:
        before = (f"image {grid.image + 1} " if num_images > 1 else "") + (f"{grid.name} " if grid.name else "")
        for (row, column), key in np.ndenumerate(grid.keys):
            if key >= 0:
                labels[key] = f"{before}{row + 1},{column + 1}"
    return labels
