"""Which patch of which image each token of a model is, by the family of the model.

The places of the pixels are traced through the processor (``pixel_trace.py``). What a model does with its patches
afterwards is one of a few layouts:

- crops: whole images or tiles, each with the same number of tokens, row by row (LLaVA, PaliGemma, Gemma 3, Idefics 3,
  SmolVLM, InternVL, Florence-2);
- patches of images of any size, merged in blocks (Qwen2-VL and its successors);
- images of any size in one padded tensor (Pixtral, Mistral 3);
- an overview and tiles, from which padding is cut off (LLaVA-NeXT, LLaVA-OneVision). Their own code is run on places
  instead of features.

Resamplers, as of Idefics 2 and BLIP-2, mix all patches in each token, so that a token has no place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.look.huggingface.pixel_trace import Floats, PixelTrace, average_known, fit_region, measure_known, trim_region
from jumok.look.viewer.image_placement import ImageGrid, ImageRegion

# Models whose image tokens are the outputs of a resampler.
RESAMPLED = frozenset({"blip-2", "idefics", "idefics2", "instructblip", "instructblipvideo", "kosmos-2", "aria"})
OVERVIEW, TILES = "overview", "tiles"
MIN_KNOWN = 0.5  # share of the rows and columns of a tile that are not padding, to fit it alone
MAX_PREFIX_KEYS = 32  # class and register tokens


@dataclass(frozen=True)
class Crop:
    """A whole image or a tile that a model reads: its index in the batch, and the region of its image.

    ``size`` is its height and width in pixels.
    """

    index: int
    image: int
    region: ImageRegion
    size: tuple[int, int]

    def build_grid(self, keys: NDArray[np.int64], patch_size: int | None = None, name: str = "") -> ImageGrid:
        """Return the grid of patches of this crop; pixels beyond the last whole patch are not covered."""
        region = self.region
        if patch_size is not None:
            region = trim_region(region, self.size, (keys.shape[0] * patch_size, keys.shape[1] * patch_size))
        return ImageGrid(keys, region, self.image, name)


def find_crops(trace: PixelTrace) -> list[Crop]:
    """Return the crops of pixel values ``(…, channels, height, width)`` that are not padding."""
    height, width = trace.x.shape[-2:]
    planes = [
        average_known(values.reshape(-1, *values.shape[-3:]), axis=1) for values in (trace.x, trace.y, trace.image)
    ]
    crops, shares = [], {}
    for index, (x, y, image) in enumerate(zip(*planes, strict=True)):
        region = fit_region(x, y)
        if region is not None:
            crops.append(Crop(index, round(float(np.nanmedian(image))), region, (height, width)))
            shares[index] = measure_known(x)
    return [
        crop if min(shares[crop.index]) > MIN_KNOWN else _refit(crop, crops, shares, planes[0], planes[1])
        for crop in crops
    ]


def _refit(crop: Crop, crops: Sequence[Crop], shares: dict[int, tuple[float, float]], x: Floats, y: Floats) -> Crop:
    """Fit a tile that is mostly padding with the width and height of the tiles that have the least padding.

    Its own fit remains if their scale is not its own: of a panorama, only the overview has little padding.
    """
    size = []
    for axis in (0, 1):
        others = [other for other in crops if other.image == crop.image and shares[other.index][axis] > MIN_KNOWN]
        lengths = {other.index: other.region[axis + 2] - other.region[axis] for other in others}
        own = crop.region[axis + 2] - crop.region[axis]
        is_better = lengths and shares[crop.index][axis] <= MIN_KNOWN
        nearest = min(lengths.values(), key=lambda length: abs(length - own)) if is_better else own
        size.append(nearest)
    try:
        region = fit_region(x[crop.index], y[crop.index], (size[0], size[1]))
    except InputError:  # another scale
        return crop
    assert region is not None
    return replace(crop, region=region)


def place_image_tokens(model: Any, inputs: Any, trace: PixelTrace, num_tokens: int) -> list[ImageGrid]:
    """Return the grids of the image tokens of a text: ``keys`` are counted among the image tokens alone."""
    model_type = model.config.model_type
    if model_type in RESAMPLED:
        return []
    if trace.x.ndim in (2, 3):
        return _place_patch_rows(inputs, trace, num_tokens)
    crops = find_crops(trace)
    if hasattr(model, "pack_image_features"):
        return _place_packed(model, inputs, crops, trace, num_tokens)
    if getattr(get_vision_config(model.config), "model_type", "") == "pixtral":
        return _place_padded(model, inputs, crops, num_tokens)
    if model_type == "florence2":
        crops = [_shift_convolutions(crop, model.config.vision_config.patch_stride) for crop in crops]
    return _place_equal_crops(crops, num_tokens)


def place_cross_keys(crops: Sequence[Crop], num_crops: int, num_keys: int) -> list[ImageGrid]:
    """Return the grids of the keys of an attention from words to the outputs of an image encoder.

    ``num_crops`` counts those that are padding, too: they have keys.
    """
    per_crop, rest = divmod(num_keys, num_crops)
    if rest:
        return []
    grids = []
    for crop in crops:
        tokens = _build_crop_tokens(crop.size, per_crop)
        if tokens is None:
            return []
        grids.append(crop.build_grid(tokens + crop.index * per_crop))
    return join_tiles(grids)


def place_encoder_keys(model: Any, crop: Crop, num_keys: int) -> tuple[ImageGrid, int] | None:
    """Return the grid of the patches in an image encoder, and the number of keys before them; None if it is unknown.

    Those keys are class and register tokens. Encoders that reduce the number of patches by powers of 2 have none.
    """
    patch_size = get_patch_size(model.config)
    if patch_size is None:
        return None
    rows, columns = (length // patch_size for length in crop.size)
    num_prefix = num_keys - rows * columns
    if 0 <= num_prefix <= MAX_PREFIX_KEYS:
        keys = np.arange(num_prefix, num_keys).reshape(rows, columns)
        return crop.build_grid(keys, patch_size), num_prefix
    for factor in (2, 4, 8, 16):
        if rows // factor * (columns // factor) == num_keys and rows >= factor <= columns:
            keys = np.arange(num_keys).reshape(rows // factor, columns // factor)
            return crop.build_grid(keys, patch_size * factor), 0
    return None


def place_joint_tiles(model: Any, tiles: Sequence[Crop], num_tiles: int, num_keys: int) -> list[ImageGrid]:
    """Return the grids of tiles that are read together, each of them after a class token and before padding."""
    patch_size = get_patch_size(model.config)
    per_tile, rest = divmod(num_keys, num_tiles)
    if patch_size is None or rest:
        return []
    grids = []
    for tile in tiles:
        rows, columns = (length // patch_size for length in tile.size)
        first = (tile.index % num_tiles) * per_tile + 1
        if rows * columns >= per_tile:
            return []
        keys = np.arange(first, first + rows * columns).reshape(rows, columns)
        grids.append(tile.build_grid(keys, patch_size))
    return join_tiles(grids)


def place_packed_encoder_keys(
    model: Any, inputs: Any, trace: PixelTrace, image: int, num_keys: int
) -> ImageGrid | None:
    """Return the grid of the patches of one image, whose encoder reads them in blocks; None if it is unknown."""
    shapes = inputs.get("image_grid_thw")
    if shapes is None or image >= len(shapes):
        return None
    counts = shapes.prod(-1).tolist()
    num_frames, rows, columns = shapes[image].tolist()
    if num_frames != 1 or counts[image] != num_keys:
        return None
    order = _order_encoder_patches(model, shapes)
    if order is None:
        return None
    first = sum(counts[:image])
    order = order[first : first + num_keys]
    x, y = (average_known(values.reshape(-1, values.shape[-1]), axis=1)[order] for values in (trace.x, trace.y))
    row, column = np.floor(y * rows).astype(int), np.floor(x * columns).astype(int)
    keys = np.full((rows, columns), -1)
    keys[np.clip(row, 0, rows - 1), np.clip(column, 0, columns - 1)] = np.arange(num_keys)
    return ImageGrid(keys, image=image) if (keys >= 0).all() else None


def _order_encoder_patches(model: Any, shapes: torch.Tensor) -> NDArray[np.int64] | None:
    """Return the order in which an encoder reads the patches: Qwen2.5-VL sorts blocks by windows; None if unknown."""
    encoder, config = getattr(model, "visual", None), get_vision_config(model.config)
    order = np.arange(int(shapes.prod(-1).sum()))
    if not hasattr(config, "fullatt_block_indexes"):
        return order
    if encoder is not None and hasattr(encoder, "get_window_index"):
        windows, _ = encoder.get_window_index(shapes)
    else:
        try:
            from transformers.vision_utils import get_vision_window_index
        except ImportError:  # another version of transformers
            return None
        windows, _ = get_vision_window_index(
            shapes,
            spatial_merge_size=config.spatial_merge_size,
            window_size=config.window_size,
            patch_size=config.patch_size,
        )
    blocks = order.reshape(len(windows), -1)
    return np.asarray(blocks[np.asarray(windows.cpu())].ravel())


def join_tiles(grids: Sequence[ImageGrid]) -> list[ImageGrid]:
    """Join tiles of the same size that cover a region of an image without gaps; others stay as they are.

    If an image is read both as a whole and in tiles, the grids are named.
    """
    joined = []
    for image in sorted({grid.image for grid in grids}):
        parts = [grid for grid in grids if grid.image == image]
        tiles = [grid for grid in parts if not _covers_all(grid, parts)]
        overviews = [grid for grid in parts if _covers_all(grid, parts)]
        lattice = _join_lattice(tiles)
        if len(parts) == 1 or not tiles:
            joined += parts
            continue
        joined += [ImageGrid(grid.keys, grid.region, image, OVERVIEW) for grid in overviews]
        joined += [ImageGrid(grid.keys, grid.region, image, TILES if overviews else "") for grid in lattice]
    return joined


def get_vision_config(config: Any) -> Any:
    """Return the configuration of the image encoder: a part, or the whole if the model only reads images."""
    for name in ("vision_config", "encoder", "backbone_config"):
        part = getattr(config, name, None)
        if part is not None:
            return part
    return config


def get_patch_size(config: Any) -> int | None:
    """Return the number of pixels along a side of a patch."""
    size = getattr(get_vision_config(config), "patch_size", None)
    if isinstance(size, (list, tuple)):
        size = size[0] if len(set(size)) == 1 else None
    return size if isinstance(size, int) else None


def _place_equal_crops(crops: Sequence[Crop], num_tokens: int) -> list[ImageGrid]:
    per_crop, rest = divmod(num_tokens, len(crops))
    if rest:
        return []
    grids = []
    for n, crop in enumerate(crops):
        tokens = _build_crop_tokens(crop.size, per_crop)
        if tokens is None:
            return []
        grids.append(crop.build_grid(tokens + n * per_crop))
    return join_tiles(grids)


def _shift_convolutions(crop: Crop, strides: Sequence[int]) -> Crop:
    """Return the region whose patches are centred where convolutions with padding on both sides are.

    The output i of such a convolution of stride s is centred at the pixel s · i, not in the middle of s pixels.
    """
    left, top, right, bottom = crop.region
    shift = (math.prod(strides) - 1) / 2
    across, down = (right - left) * shift / crop.size[1], (bottom - top) * shift / crop.size[0]
    return replace(crop, region=(left - across, top - down, right - across, bottom - down))


def _build_crop_tokens(
    size: tuple[int, int], num_tokens: int, patch_size: int | None = None
) -> NDArray[np.int64] | None:
    """Return the tokens ``(rows, columns)`` of a crop, perhaps after a class token; None if they form no grid."""
    for num_prefix in (0, 1):
        num_patches = num_tokens - num_prefix
        rows = round(math.sqrt(num_patches * size[0] / size[1]))
        if rows and rows * round(num_patches / rows) == num_patches:
            columns = num_patches // rows
            if abs(columns / rows - size[1] / size[0]) < 0.5 / rows:
                return np.arange(num_prefix, num_tokens).reshape(rows, columns)
    return None


def _place_patch_rows(inputs: Any, trace: PixelTrace, num_tokens: int) -> list[ImageGrid]:
    """Place tokens that are blocks of patches: each row of the pixel values is one patch."""
    shapes = inputs.get("image_grid_thw")
    if shapes is None:
        return []
    x, y = (average_known(values.reshape(-1, values.shape[-1]), axis=1) for values in (trace.x, trace.y))
    merged = len(x) // num_tokens  # patches in a token
    if merged * num_tokens != len(x):
        return []
    side = math.isqrt(merged)
    grids, first = [], 0
    for image, (num_frames, rows, columns) in enumerate(shapes.tolist()):
        count = rows * columns
        if num_frames != 1 or rows % side or columns % side:
            return []
        # Patches of a block follow each other: block row, block column, row, column.
        order = (rows // side, columns // side, side, side)
        block_x, block_y = (
            values[first : first + count].reshape(order).transpose(0, 2, 1, 3).reshape(rows, columns)
            for values in (x, y)
        )
        region = fit_region(block_x, block_y)
        assert region is not None
        tokens = np.arange(first // merged, (first + count) // merged).reshape(rows // side, columns // side)
        grids.append(ImageGrid(tokens, region, image))
        first += count
    return grids


def _place_padded(model: Any, inputs: Any, crops: Sequence[Crop], num_tokens: int) -> list[ImageGrid]:
    """Place tokens of images of different sizes, which are padded to the largest."""
    sizes = inputs["image_sizes"].tolist()
    patch_size = get_patch_size(model.config)
    assert patch_size is not None
    total = sum((height // patch_size) * (width // patch_size) for height, width in sizes)
    side = math.isqrt(total // num_tokens)
    cell, grids, first = patch_size * side, [], 0
    for crop, (height, width) in zip(crops, sizes, strict=True):
        rows, columns = height // cell, width // cell
        tokens = np.arange(first, first + rows * columns).reshape(rows, columns)
        grids.append(crop.build_grid(tokens, cell))
        first += rows * columns
    return grids if first == num_tokens else []


def _place_packed(
    model: Any, inputs: Any, crops: Sequence[Crop], trace: PixelTrace, num_tokens: int
) -> list[ImageGrid]:
    """Place the tokens of an overview and tiles: the model's own packing is run on the places of patches."""
    patch_size = get_patch_size(model.config)
    assert patch_size is not None
    images = range(max(crop.image for crop in crops) + 1)
    features = [
        torch.stack([_compute_places(crop, patch_size) for crop in crops if crop.image == image]) for image in images
    ]
    options = {
        "image_features": features,
        "image_sizes": inputs["image_sizes"],
        "image_newline": torch.full((2,), float("nan")) if hasattr(model, "image_newline") else None,
        "vision_feature_select_strategy": getattr(model.config, "vision_feature_select_strategy", "default"),
        "vision_aspect_ratio": getattr(model.config, "vision_aspect_ratio", "anyres_max_9"),
    }
    accepted = inspect.signature(model.pack_image_features).parameters
    packed, _ = model.pack_image_features(**{name: value for name, value in options.items() if name in accepted})
    if sum(len(places) for places in packed) != num_tokens:
        return []
    grids, first = [], 0
    for image, places in zip(images, packed, strict=True):
        overview = next(crop for crop in crops if crop.image == image)
        base = _compute_places(overview, patch_size)
        rows, columns = (length // patch_size for length in overview.size)
        has_tiles = len(features[image]) > 1
        tokens = np.arange(first, first + len(base)).reshape(rows, columns)
        grids.append(overview.build_grid(tokens, patch_size, OVERVIEW if has_tiles else ""))
        if has_tiles:
            grids.append(_read_rows(places[len(base) :].numpy(), first + len(base), image))
        first += len(places)
    return grids


def _read_rows(places: NDArray[np.float32], first: int, image: int) -> ImageGrid:
    """Return the grid of tokens with places ``(N, 2)``: a row ends where a place is NaN, or x decreases."""
    x = places[:, 0].astype(np.float64)
    is_patch = np.isfinite(x)
    tokens = np.arange(first, first + len(x))[is_patch]
    num_rows = int((~is_patch).sum()) or 1 + int((np.diff(x[is_patch]) < 0).sum())
    if len(tokens) % num_rows:
        raise InputError("the rows of patches of this model differ in length, so that they cannot be placed")
    shape = (num_rows, len(tokens) // num_rows)
    x, y = (places[is_patch, axis].astype(np.float64).reshape(shape) for axis in (0, 1))
    region = fit_region(x, y)
    assert region is not None
    return ImageGrid(tokens.reshape(shape), region, image, TILES)


def _compute_places(crop: Crop, patch_size: int) -> torch.Tensor:
    """Return the centres ``(N, 2)``, x and y, of the patches of a crop, row by row."""
    rows, columns = (length // patch_size for length in crop.size)
    left, top, right, bottom = trim_region(crop.region, crop.size, (rows * patch_size, columns * patch_size))
    x = left + (torch.arange(columns) + 0.5) / columns * (right - left)
    y = top + (torch.arange(rows) + 0.5) / rows * (bottom - top)
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).reshape(-1, 2)


def _covers_all(grid: ImageGrid, others: Sequence[ImageGrid]) -> bool:
    """Return whether a grid covers all that the others cover, to within half of one of its patches."""
    edges = np.array([other.region for other in others])
    tolerance = 0.5 * math.sqrt(grid.cell_area)
    left, top, right, bottom = grid.region
    return bool(
        left <= edges[:, 0].min() + tolerance
        and top <= edges[:, 1].min() + tolerance
        and right >= edges[:, 2].max() - tolerance
        and bottom >= edges[:, 3].max() - tolerance
    )


def _join_lattice(tiles: Sequence[ImageGrid]) -> list[ImageGrid]:
    """Return one grid if tiles of the same shape fill a rectangle, else the tiles."""
    if len(tiles) < 2 or len({tile.shape for tile in tiles}) > 1:
        return list(tiles)
    width = float(np.mean([tile.region[2] - tile.region[0] for tile in tiles]))
    height = float(np.mean([tile.region[3] - tile.region[1] for tile in tiles]))
    left, top = (min(tile.region[axis] for tile in tiles) for axis in (0, 1))
    places = {(round((tile.region[1] - top) / height), round((tile.region[0] - left) / width)): tile for tile in tiles}
    rows, columns = (1 + max(place[axis] for place in places) for axis in (0, 1))
    is_regular = all(
        abs(tile.region[0] - left - column * width) < 0.1 * width
        and abs(tile.region[1] - top - row * height) < 0.1 * height
        for (row, column), tile in places.items()
    )
    if len(places) != len(tiles) or rows * columns != len(tiles) or not is_regular:
        return list(tiles)
    keys = np.block([[places[row, column].keys for column in range(columns)] for row in range(rows)])
    right, bottom = (max(tile.region[axis] for tile in tiles) for axis in (2, 3))
    region = (left, top, right, bottom)
    return [ImageGrid(keys, region, tiles[0].image)]
