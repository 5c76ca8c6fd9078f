"""The viewer in one self-contained HTML file, which fetches nothing.

The browser shows every weight of the selected heads, if a map has at most ``detail`` × ``detail`` weights. It
pools them, as :class:`.viewer_data.ArrayWeightSource` does. For a longer input the file contains a pyramid of
pooled tiles with up to ``detail`` cells a side. The browser averages the heads of a layer, and of several layers.

If all weights fit into TARGET_BYTES, they are in the file, rounded to three digits. Otherwise the file contains
rounded queries and keys of each layer whose weights are the softmax of their product (see
:mod:`.score_factors`), and the browser computes the weights. The weights of other layers are rounded on a
square-root scale (see :func:`.tiles.pack_roots`), whose step is the same share of the root of the mean weight in
all maps. Both are rounded as finely as TARGET_BYTES permit. The manifest states the step as ``rounding``, and the
measured error of computed weights as ``score_error``.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.files import atomic_write
from jumok.look.viewer import assets
from jumok.look.viewer.ascii_coding import BLOCK_BYTES, BLOCK_CHARACTERS, encode_text
from jumok.look.viewer.derived_layers import MeanWeightSource
from jumok.look.viewer.opening import choose_opening, score_heads
from jumok.look.viewer.preparation import add_layer_means, add_opening
from jumok.look.viewer.saved_blocks import Block, StoredBytes, StoredMap, StoredSide, choose_step, get_score_error
from jumok.look.viewer.score_factors import (
    BalancedSide,
    ScoreFactors,
    compress_mask,
    compute_relative_errors,
    factor_scores,
)
from jumok.look.viewer.tiles import (
    TILE_SIZE,
    FloatArray,
    TileRequest,
    find_coarsest_zoom,
    find_finest_zoom,
    iterate_tiles,
    pack,
)
from jumok.look.viewer.viewer_data import (
    ArrayWeightSource,
    CapturedWeightSource,
    ViewerData,
    ViewerLayer,
    as_viewer_data_tuple,
    build_manifest,
    compute_cells,
)

THUMBNAIL_SIZE, ALIGNMENT_SIZE = 64, 512  # cells of a small map and of a speech alignment, as in tiles.js
MAX_DETAILED_CELLS = 16 << 20  # of a file that does not show all heads in detail: they are rounded less
MAX_CELLS = 40 << 20  # of one file: weights and pooled cells; a number of a query or key counts as two
TARGET_BYTES = 79 << 17  # 9.9 MiB of compressed weights; their text is 1.17 times as long
THUMBNAIL_STEP = 0.1  # of a small map, if the browser can compute its weights
MAX_AVERAGED_WEIGHTS = 1 << 25  # of a mean over layers that the browser computes from whole maps, in a few seconds
SAMPLE_ROWS, SAMPLE_HEADS = 16, 5  # rows of every fifth head, to measure the error of its weights

HeadSelection = Mapping[str, Collection[int]]
_LayerKey: TypeAlias = tuple[int, int]  # an item of data, and a layer of it
_HeadKey: TypeAlias = tuple[int, int, int]
_HeadsByLayer: TypeAlias = dict[_LayerKey, tuple[int, ...]]
AveragedEntry: TypeAlias = tuple[int, int, float]  # a layer, a head of it, and its share of a mean


def save_html(
    viewer_data: ViewerData | Sequence[ViewerData],
    path: str | Path,
    *,
    heads: HeadSelection | None = None,
    detail: int = 1024,
) -> Path:
    """Write one item of viewer data, or two to compare, to an HTML file. Returns its path.

    ``heads`` maps names of layers to the heads to include; None: all heads of all layers. If these are too many, the
    file has an overview of all heads, and the most telling ones in detail (see :mod:`.opening`).

    >>> save_html(data, "map.html", heads={"encoder.layer.3": [0, 5]})  # doctest: +SKIP
    """
    text = render_html(viewer_data, heads=heads, detail=detail)
    with atomic_write(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
    return Path(path)


def render_html(
    viewer_data: ViewerData | Sequence[ViewerData], *, heads: HeadSelection | None = None, detail: int = 1024
) -> str:
    """Return the HTML as text."""
    if detail < TILE_SIZE:
        raise InputError(f"detail={detail} is invalid; expected at least {TILE_SIZE} cells a side")
    # A file cannot synthesise speech.
    selected = [
        replace(_select_heads(add_layer_means(item), heads), resynthesize=None)
        for item in as_viewer_data_tuple(viewer_data)
    ]
    averaged = _find_averaged_heads(selected, detail)
    detailed: _HeadsByLayer = {
        (n, k): () if (n, k) in averaged else layer.heads
        for n, item in enumerate(selected)
        for k, layer in enumerate(item.layers)
    }
    is_partial = _count_stored(selected, detail, detailed, averaged) > MAX_CELLS
    if is_partial:
        if heads is not None:
            raise _build_size_error(selected, detail)
        averaged = _find_averaged_heads(selected, detail, is_partial=True)
        selected, detailed = _choose_detailed_heads(selected, detail, averaged)
    selected = [add_opening(item) for item in selected]
    manifest = build_manifest(selected)
    factors = _factor_scores(selected, detail, detailed)
    for n, (item, entry) in enumerate(zip(selected, manifest["data"], strict=True)):
        for k, (layer, layer_entry) in enumerate(zip(item.layers, entry["layers"], strict=True)):
            layer_entry["finest_zoom"] = _find_finest_zoom(layer, detail)
            layer_entry["detailed_heads"] = list(detailed[n, k]) if is_partial else None
            layer_entry["averaged"] = averaged.get((n, k))
            layer_entry["scores"] = _describe_factors(factors[n, k]) if (n, k) in factors else None
    writer = _BlockBuilder(factors, detail, detailed, averaged)
    blocks = [block for number, item in enumerate(selected) for block in writer.iterate_blocks(item, number)]
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        audio_bytes = sum(item.audio.compute_file_size() for item in selected if item.audio is not None)
        manifest["rounding"] = step = choose_step(blocks, TARGET_BYTES - audio_bytes, executor)
        compressed = list(executor.map(lambda block: block.compress(step), blocks))
    manifest["score_error"] = writer.measure_error(step)
    index: dict[str, tuple[int, int]] = {}
    data = bytearray()
    for block, block_bytes in zip(blocks, compressed, strict=True):
        index[block.key] = (len(data) // BLOCK_BYTES * BLOCK_CHARACTERS, len(block_bytes))
        data += block_bytes + bytes(-len(block_bytes) % BLOCK_BYTES)  # each block begins at a character of its own
    return _render_page(manifest, index, encode_text(bytes(data)))


class _BlockBuilder:
    """Computes the blocks of a file. The browser derives all other maps from them."""

    def __init__(
        self,
        factors: Mapping[_LayerKey, ScoreFactors],
        detail: int,
        detailed: Mapping[_LayerKey, Collection[int]],
        averaged: Collection[_LayerKey],
    ) -> None:
        self.factors, self.detail, self.detailed, self.averaged = factors, detail, detailed, averaged
        self._sampled_rows: dict[_HeadKey, FloatArray] = {}  # by item, layer and head
        self._mask_keys = {_get_mask_key(layer_factors): layer_factors.visible for layer_factors in factors.values()}

    def iterate_blocks(self, item: ViewerData, data_index: int) -> Iterator[Block]:
        if data_index == 0:
            for key, visible in self._mask_keys.items():
                if key is not None and visible is not None:
                    yield StoredBytes(key, compress_mask(visible))
        for layer_index, layer in enumerate(item.layers):
            if (data_index, layer_index) in self.averaged:
                continue
            factors = self.factors.get((data_index, layer_index))
            if factors is not None:
                for group, side in factors.keys.items():
                    yield StoredSide(f"keys/{data_index}/{layer_index}/{group}", side)
            for head in layer.heads:
                whole = TileRequest(
                    layer_index, head, (0, layer.shape[0]), (0, layer.shape[1]), THUMBNAIL_SIZE, data_index=data_index
                )
                if head not in self.detailed[data_index, layer_index]:
                    yield _store_thumbnail(whole, compute_cells(layer, whole))
                elif factors is not None:
                    yield from self._iterate_factored(layer, whole, factors.queries[head])
                elif _find_finest_zoom(layer, self.detail) == 0:
                    yield from _iterate_weights(layer, whole)
                else:
                    yield from _iterate_word_rows(item, layer, whole)
                    yield from _iterate_pyramid(layer, whole, self.detail, with_alignment=_has_plot(item, layer))

    def _iterate_factored(self, layer: ViewerLayer, whole: TileRequest, queries: BalancedSide) -> Iterator[Block]:
        weights = compute_cells(layer, replace(whole, quantity="weights"))
        head_key = (whole.data_index, whole.layer, int(whole.head or 0))
        self._sampled_rows[head_key] = weights[_sample_rows(len(weights))]
        path = "/".join(map(str, head_key))
        yield StoredSide(f"queries/{path}", queries)
        row_sums = weights.sum(1)
        if ((row_sums > 0) & (np.abs(row_sums - 1) > 1e-3)).any():  # some weight is on no key, or on padding
            yield StoredBytes(f"row_sums/{path}", zlib.compress(pack(row_sums[None])))
        yield _build_thumbnail(weights, whole, THUMBNAIL_STEP)

    def measure_error(self, step: float) -> float | None:
        """Return the relative error that 99 % of the computed weights of at least the mean do not exceed."""
        errors = []
        for (data_index, layer, head), exact in list(self._sampled_rows.items())[::SAMPLE_HEADS]:
            factors = self.factors[data_index, layer]
            rows = torch.from_numpy(_sample_rows(len(factors.queries[head].values)))
            rounded = factors.compute_weights(head, rows, get_score_error(step)).numpy()
            errors.append(compute_relative_errors(exact, rounded * exact.sum(1, keepdims=True)))
        return float(np.quantile(np.concatenate(errors), 0.99)) if errors else None


def _factor_scores(
    viewer_data: Sequence[ViewerData], detail: int, detailed: Mapping[_LayerKey, Sequence[int]]
) -> dict[_LayerKey, ScoreFactors]:
    """Return the factors of layers, by item and layer, if the file cannot contain all weights to three digits."""
    layers = [
        (n, k, layer)
        for n, item in enumerate(viewer_data)
        for k, layer in enumerate(item.layers)
        if _find_finest_zoom(layer, detail) == 0 and detailed[n, k]
    ]
    if 2 * sum(len(detailed[n, k]) * layer.shape[0] * layer.shape[1] for n, k, layer in layers) <= TARGET_BYTES:
        return {}
    factors_by_layer = {}
    for n, k, layer in layers:
        source = layer.source
        if isinstance(source, CapturedWeightSource):
            factors = factor_scores(source.layer.attention, source.batch, detailed[n, k], layer.shape)
            if factors is not None:
                factors_by_layer[n, k] = factors
    return factors_by_layer


def _describe_factors(factors: ScoreFactors) -> dict[str, Any]:
    return {"group_size": factors.group_size, "softcap": factors.softcap, "visible": _get_mask_key(factors)}


def _get_mask_key(factors: ScoreFactors) -> str | None:
    """Return the name of a mask, which layers may share."""
    if factors.visible is None:
        return None
    rows, cols = factors.visible.shape
    return f"visible/{rows}-{cols}/{zlib.crc32(np.packbits(factors.visible).tobytes()):08x}"


def _sample_rows(num_rows: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, num_rows - 1, SAMPLE_ROWS).astype(np.int64))


def _iterate_weights(layer: ViewerLayer, whole: TileRequest) -> Iterator[StoredMap]:
    request = replace(whole, quantity="weights")
    weights = compute_cells(layer, request)
    yield StoredMap(request.key, weights, float(weights.mean()))
    yield _build_thumbnail(weights, whole)


def _build_thumbnail(weights: FloatArray, whole: TileRequest, min_step: float = 0.0) -> StoredMap:
    cells = ArrayWeightSource(weights).pooled_map(0, slice(*whole.rows), slice(*whole.cols), THUMBNAIL_SIZE)
    return _store_thumbnail(whole, cells, min_step)


def _store_thumbnail(whole: TileRequest, cells: FloatArray, min_step: float = 0.0) -> StoredMap:
    return StoredMap(whole.key, cells, float(cells.sum(1).mean()) / cells.shape[1], min_step)


def _has_plot(item: ViewerData, layer: ViewerLayer) -> bool:
    """Return whether a layer is drawn over the time of speech or of a recording."""
    return item.speech is not None or (item.audio is not None and item.audio.matches(layer))


def _iterate_pyramid(
    layer: ViewerLayer, whole: TileRequest, detail: int, *, with_alignment: bool
) -> Iterator[StoredMap]:
    """Iterate over the pooled tiles of a head, its thumbnail, and the weight that each column receives."""
    total = replace(whole, quantity="received_weight", size=TILE_SIZE)
    received = compute_cells(layer, total)
    yield StoredMap(total.key, received, float(received.mean()))
    thumbnail = compute_cells(layer, whole)
    row_sum = float(thumbnail.sum(1).mean())  # usually 1
    yield _store_thumbnail(whole, thumbnail)
    requests = [replace(whole, size=ALIGNMENT_SIZE)] if with_alignment else []
    requests += [
        replace(whole, rows=rows, cols=cols, size=TILE_SIZE)
        for zoom in range(_find_finest_zoom(layer, detail), max(map(find_coarsest_zoom, layer.shape)) + 1)
        for rows, cols in iterate_tiles(layer.shape, zoom)
    ]
    for part in requests:
        cells = compute_cells(layer, part)
        share = (part.cols[1] - part.cols[0]) / layer.shape[1]
        yield StoredMap(part.key, cells, row_sum * share / cells.shape[1])


def _iterate_word_rows(item: ViewerData, layer: ViewerLayer, whole: TileRequest) -> Iterator[StoredMap]:
    """Iterate over all weights of the words of a long text that are shown on an image."""
    for rows in _list_word_rows(item, layer):
        part = replace(whole, rows=rows, quantity="weights", size=TILE_SIZE)
        cells = compute_cells(layer, part)
        yield StoredMap(part.key, cells, float(cells.mean()))


def _list_word_rows(item: ViewerData, layer: ViewerLayer) -> list[tuple[int, int]]:
    """Return the spans of queries whose weights are shown on an image."""
    return [] if item.image is None else item.image.list_word_rows(layer)


def _find_finest_zoom(layer: ViewerLayer, detail: int) -> int:
    if layer.shape[0] * layer.shape[1] <= detail * detail:  # few words of a long text, or many patches
        return 0
    return max(find_finest_zoom(length, detail) for length in layer.shape)


def _select_heads(viewer_data: ViewerData, heads: HeadSelection | None) -> ViewerData:
    """Return the data with only the selected heads."""
    if heads is None:
        return viewer_data
    layers_by_name = {layer.name: layer for layer in viewer_data.layers}
    for name, numbers in heads.items():
        if name not in layers_by_name:
            raise InputError(f"no layer is called {name!r}; there are: {', '.join(layers_by_name)}")
        unknown = sorted(set(numbers) - set(layers_by_name[name].heads))
        if unknown or not numbers:
            raise InputError(
                f"heads {unknown or list(numbers)} of {name} were requested; "
                f"it has {layers_by_name[name].heads[0]} to {layers_by_name[name].heads[-1]}"
            )
    layers = tuple(
        replace(layer, heads=tuple(sorted(set(heads[layer.name]))))
        for layer in viewer_data.layers
        if layer.name in heads
    )
    is_complete = all(layer.heads == layers_by_name[layer.name].heads for layer in layers)
    return add_layer_means(viewer_data.with_layers(layers)) if is_complete else viewer_data.with_layers(layers)


def _find_averaged_heads(
    viewer_data: Sequence[ViewerData], detail: int, *, is_partial: bool = False
) -> dict[_LayerKey, list[AveragedEntry]]:
    """Return the heads from which the browser computes means over layers, by item and layer.

    A mean of heads that are not in the file is stored instead, and one of so many weights that it would take long;
    in a file with an overview of most heads, it takes the browser no time.
    """
    found: dict[_LayerKey, list[AveragedEntry]] = {}
    for n, item in enumerate(viewer_data):
        indices = {layer.name: k for k, layer in enumerate(item.layers) if not layer.mean_of}
        for k, layer in enumerate(item.layers):
            if not isinstance(layer.source, MeanWeightSource):
                continue
            parts = [(indices.get(part.name), head, share) for part, head, share in layer.source.heads]
            entries = [(index, head, share) for index, head, share in parts if index is not None]
            is_there = len(entries) == len(parts) and all(
                head in item.layers[index].heads and item.layers[index].shape == layer.shape
                for index, head, _ in entries
            )
            num_weights = len(parts) * layer.shape[0] * layer.shape[1]
            is_quick = is_partial or num_weights <= MAX_AVERAGED_WEIGHTS or _find_finest_zoom(layer, detail) > 0
            if is_there and is_quick:
                found[n, k] = entries
    return found


def _choose_detailed_heads(
    viewer_data: Sequence[ViewerData], detail: int, averaged: Mapping[_LayerKey, Sequence[AveragedEntry]]
) -> tuple[list[ViewerData], _HeadsByLayer]:
    """Choose the heads that a file shows in detail: those of the opening and the most telling ones, until it is full.

    Two items that are compared have the same heads in detail. If the heads of the opening do not fit, the file opens
    with a single one.
    """

    def extend(chosen: _HeadsByLayer, layer: int, heads: Iterable[int]) -> _HeadsByLayer:
        extended = dict(chosen)
        for n, item in enumerate(viewer_data):
            if layer < len(item.layers) and (n, layer) not in averaged:
                available = set(heads) & set(item.layers[layer].heads)
                extended[n, layer] = tuple(sorted({*chosen[n, layer], *available}))
        return extended

    def fits(chosen: _HeadsByLayer) -> bool:
        return _count_stored(viewer_data, detail, chosen, averaged) <= MAX_DETAILED_CELLS

    chosen: _HeadsByLayer = {(n, k): () for n, item in enumerate(viewer_data) for k in range(len(item.layers))}
    selected: list[ViewerData] = []
    for item in map(add_opening, viewer_data):
        opening = item.opening
        if opening is not None:
            layer = item.layers[opening.layer]
            extended = extend(chosen, opening.layer, layer.heads if opening.head is None else [opening.head])
            for part, head, _ in averaged.get((len(selected), opening.layer), ()):
                extended = extend(extended, part, [head])
            if not fits(extended):
                opening = choose_opening(item, by_head=True)
                extended = extend(chosen, opening.layer, [int(opening.head or 0)])
            chosen = extended
        selected.append(replace(item, opening=opening))
    scores = {
        (n, k, head): score
        for n, item in enumerate(viewer_data)
        for (k, head), score in score_heads(item.layers).items()
        if (n, k) not in averaged
    }
    for _, k, head in sorted(scores, key=lambda key: scores[key], reverse=True):
        extended = extend(chosen, k, [head])
        if not fits(extended):
            break
        chosen = extended
    return selected, chosen


def _count_stored(
    viewer_data: Sequence[ViewerData],
    detail: int,
    detailed: Mapping[_LayerKey, Collection[int]],
    averaged: Collection[_LayerKey],
) -> int:
    """Return about how many numbers a file contains, if it shows these heads in detail and thumbnails of all."""
    return sum(
        len(layer.heads) * THUMBNAIL_SIZE**2
        + len(detailed[n, k]) * (_count_cells(layer, detail) + _count_word_cells(item, layer, detail))
        for n, item in enumerate(viewer_data)
        for k, layer in enumerate(item.layers)
        if (n, k) not in averaged
    )


def _build_size_error(viewer_data: Sequence[ViewerData], detail: int) -> InputError:
    layers = [layer for item in viewer_data for layer in item.layers if not layer.mean_of]
    num_heads = sum(len(layer.heads) for layer in layers)
    num_cells = sum(len(layer.heads) * _count_cells(layer, detail) for layer in layers)
    largest = max(_count_cells(layer, detail) for layer in layers)
    smaller = sum(len(layer.heads) * _count_cells(layer, TILE_SIZE) for layer in layers)
    alternative = f", or detail={TILE_SIZE}, with which all of them fit" if smaller <= MAX_CELLS else ""
    return InputError(
        f"the file would contain {num_cells:,} weights of {num_heads} heads, more than {MAX_CELLS:,}. "
        f"{MAX_CELLS // largest} of these heads fit: select some heads, as in "
        f'heads={{"{layers[-1].name}": [0, 3]}} (jumok look: --layer and --head){alternative}; without a selection, '
        "the file has an overview of all heads, and the most telling ones in detail"
    )


def _count_word_cells(item: ViewerData, layer: ViewerLayer, detail: int) -> int:
    """Return the number of weights of a head that the image view needs beside the pooled maps."""
    if _find_finest_zoom(layer, detail) == 0:
        return 0
    return layer.shape[1] * sum(stop - start for start, stop in _list_word_rows(item, layer))


def _count_cells(layer: ViewerLayer, detail: int) -> int:
    """Return the number of cells of a head in a file, or that of its queries and keys, twice."""
    finest = _find_finest_zoom(layer, detail)
    if finest == 0:
        num_weights = layer.shape[0] * layer.shape[1]
        if not isinstance(layer.source, CapturedWeightSource):
            return num_weights
        width = layer.source.query_width
        return min(num_weights, 2 * width * sum(layer.shape)) if width else num_weights
    return sum(
        min(TILE_SIZE, rows[1] - rows[0]) * min(TILE_SIZE, cols[1] - cols[0])
        for zoom in range(finest, max(map(find_coarsest_zoom, layer.shape)) + 1)
        for rows, cols in iterate_tiles(layer.shape, zoom)
    )


def _render_page(manifest: Mapping[str, Any], index: Mapping[str, tuple[int, int]], weights: str) -> str:
    script = assets.build_script("look/viewer/static/boot_file.js")
    style = assets.build_style_sheet(include_page=True)
    if "</script" in script.lower() or "</style" in style.lower():
        raise AssertionError("the viewer's own files would end their HTML element")
    # Nothing may be loaded, and only this script and this style may run.
    policy = (
        f"default-src 'none'; script-src '{assets.build_source_hash(script)}'; "
        f"style-src '{assets.build_source_hash(style)}'; img-src data: blob:; media-src blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f"""<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>{style}</style>"""
    body = f"""<main id="viewer"></main>
<noscript>JavaScript is required to show this map.</noscript>
<script type="application/json" id="manifest">{_encode_json(manifest)}</script>
<script type="application/json" id="index">{_encode_json(index)}</script>
<script type="text/plain" id="weights">{weights}</script>
<script type="module">{script}</script>"""
    return assets.render_page(f"{manifest['title'] or 'jumok'} · jumok", head, body)


def _encode_json(value: object) -> str:
    """Encode JSON that cannot end its HTML element, whatever a token contains."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
