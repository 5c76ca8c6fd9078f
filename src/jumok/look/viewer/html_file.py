"""The viewer in one self-contained HTML file, which fetches nothing.

The browser shows every weight of the selected heads, if a map has at most ``detail`` × ``detail`` weights. It
pools them, as :class:`.viewer_data.ArrayWeightSource` does. For a longer input the file contains a pyramid of
pooled tiles with up to ``detail`` cells a side. The browser averages the heads of a layer.

If all weights fit into TARGET_BYTES, they are in the file, rounded to three digits. Otherwise the file contains
rounded queries and keys of each layer whose weights are the softmax of their product (see
:mod:`.score_factors`), and the browser computes the weights. The weights of other layers are rounded on a
square-root scale (see :func:`.tiles.pack_roots`), whose step is the same share of the root of the mean weight in
all maps. Both are rounded as finely as TARGET_BYTES permit. The manifest states the step as ``rounding``, and the
measured error of computed weights as ``score_error``.
"""

from __future__ import annotations

import bisect
import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.files import atomic_write
from jumok.look.viewer import assets
from jumok.look.viewer.ascii_coding import BLOCK_BYTES, BLOCK_CHARACTERS, encode_text
from jumok.look.viewer.score_factors import (
    MIN_ERROR,
    BalancedSide,
    ScoreFactors,
    compress_mask,
    compress_side,
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
    pack_roots,
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
MAX_CELLS = 40 << 20  # of one file: weights and pooled cells; a number of a query or key counts as two
TARGET_BYTES = 79 << 17  # 9.9 MiB of compressed weights; their text is 1.17 times as long
# Steps of square roots, as shares of the root of the mean weight. 0 stands for three digits.
STEPS = (0.0, *(0.6 / 1.12**n for n in reversed(range(66))))
THUMBNAIL_STEP = 0.1  # of a small map, if the browser can compute its weights
SAMPLE_CELLS = 1 << 14  # of each map, to estimate the size of a file
SAMPLE_ROWS, SAMPLE_HEADS = 16, 5  # rows of every fifth head, to measure the error of its weights

HeadSelection = Mapping[str, Collection[int]]


def save_html(
    viewer_data: ViewerData | Sequence[ViewerData],
    path: str | Path,
    *,
    heads: HeadSelection | None = None,
    detail: int = 1024,
) -> Path:
    """Write one item of viewer data, or two to compare, to an HTML file. Returns its path.

    ``heads`` maps names of layers to the heads to include; None: all heads of all layers.

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
    selected = [replace(_select_heads(item, heads), resynthesize=None) for item in as_viewer_data_tuple(viewer_data)]
    manifest = build_manifest(selected)
    factors = _factor_scores(selected, detail)
    _check_size(selected, detail, factors)
    for n, (item, entry) in enumerate(zip(selected, manifest["data"], strict=True)):
        for k, (layer, layer_entry) in enumerate(zip(item.layers, entry["layers"], strict=True)):
            layer_entry["finest_zoom"] = _find_finest_zoom(layer, detail)
            layer_entry["scores"] = _describe_factors(factors[n, k]) if (n, k) in factors else None
    writer = _BlockBuilder(factors, detail)
    blocks = [block for number, item in enumerate(selected) for block in writer.iterate_blocks(item, number)]
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        manifest["rounding"] = step = _choose_step(blocks, executor)
        compressed = list(executor.map(lambda block: block.compress(step), blocks))
    manifest["score_error"] = writer.measure_error(step)
    index: dict[str, tuple[int, int]] = {}
    data = bytearray()
    for block, block_bytes in zip(blocks, compressed, strict=True):
        index[block.key] = (len(data) // BLOCK_BYTES * BLOCK_CHARACTERS, len(block_bytes))
        data += block_bytes + bytes(-len(block_bytes) % BLOCK_BYTES)  # each block begins at a character of its own
    return _render_page(manifest, index, encode_text(bytes(data)))


class _Block(Protocol):
    """A part of a file, which the browser decodes when it is needed. ``step`` is that of square roots of weights."""

    @property
    def key(self) -> str: ...
    def compress(self, step: float) -> bytes: ...
    def estimate_size(self, step: float) -> float: ...


@dataclass(frozen=True, eq=False)
class _StoredMap:
    """Cells of one head that a file contains. Uniform attention has the weight ``mean`` in each."""

    key: str
    cells: FloatArray
    mean: float
    min_step: float = 0.0

    def compress(self, step: float) -> bytes:
        step = max(step, self.min_step)
        if step == 0:
            return zlib.compress(pack(self.cells))
        # The codes of weights hardly repeat, except for zeros: searching for matches takes long and finds few.
        compressor = zlib.compressobj(strategy=zlib.Z_RLE)
        return compressor.compress(pack_roots(self.cells, step * self.mean**0.5)) + compressor.flush()

    def estimate_size(self, step: float) -> float:
        """Return about how many bytes the map takes, from some of its rows."""
        stride = max(1, self.cells.size // SAMPLE_CELLS)
        sample = replace(self, cells=self.cells[::stride])
        return len(sample.compress(step)) * self.cells.size / sample.cells.size


@dataclass(frozen=True, eq=False)
class _StoredSide:
    """The queries of a head, or the keys of a group of heads."""

    key: str
    side: BalancedSide

    def compress(self, step: float) -> bytes:
        return compress_side(self.side, _get_score_error(step))

    def estimate_size(self, step: float) -> float:
        values = self.side.values
        sample = values[:: max(1, 2 * values.numel() // SAMPLE_CELLS)]
        size = len(compress_side(replace(self.side, values=sample), _get_score_error(step)))
        return size * len(values) / len(sample)


@dataclass(frozen=True, eq=False)
class _StoredBytes:
    """Bytes that are not rounded."""

    key: str
    data: bytes  # compressed

    def compress(self, step: float) -> bytes:
        return self.data

    def estimate_size(self, step: float) -> float:
        return len(self.data)


class _BlockBuilder:
    """Computes the blocks of a file. The browser derives all other maps from them."""

    def __init__(self, factors: Mapping[tuple[int, int], ScoreFactors], detail: int) -> None:
        self.factors, self.detail = factors, detail
        self._sampled_rows: dict[tuple[int, int, int], FloatArray] = {}  # by item, layer and head
        self._mask_keys = {_get_mask_key(found): found.visible for found in factors.values()}

    def iterate_blocks(self, item: ViewerData, data_index: int) -> Iterator[_Block]:
        if data_index == 0:
            for key, visible in self._mask_keys.items():
                if key is not None and visible is not None:
                    yield _StoredBytes(key, compress_mask(visible))
        for layer_index, layer in enumerate(item.layers):
            factors = self.factors.get((data_index, layer_index))
            if factors is not None:
                for group, side in factors.keys.items():
                    yield _StoredSide(f"keys/{data_index}/{layer_index}/{group}", side)
            for head in layer.heads:
                whole = TileRequest(
                    layer_index, head, (0, layer.shape[0]), (0, layer.shape[1]), THUMBNAIL_SIZE, data_index=data_index
                )
                if factors is not None:
                    yield from self._iterate_factored(layer, whole, factors.queries[head])
                elif _find_finest_zoom(layer, self.detail) == 0:
                    yield from _iterate_weights(layer, whole)
                else:
                    yield from _iterate_pyramid(layer, whole, self.detail, with_alignment=item.speech is not None)

    def _iterate_factored(self, layer: ViewerLayer, whole: TileRequest, queries: BalancedSide) -> Iterator[_Block]:
        weights = compute_cells(layer, replace(whole, quantity="weights"))
        head_key = (whole.data_index, whole.layer, int(whole.head or 0))
        self._sampled_rows[head_key] = weights[_sample_rows(len(weights))]
        path = "/".join(map(str, head_key))
        yield _StoredSide(f"queries/{path}", queries)
        row_sums = weights.sum(1)
        if ((row_sums > 0) & (np.abs(row_sums - 1) > 1e-3)).any():  # some weight is on no key, or on padding
            yield _StoredBytes(f"row_sums/{path}", zlib.compress(pack(row_sums[None])))
        yield replace(_build_thumbnail(weights, whole), min_step=THUMBNAIL_STEP)

    def measure_error(self, step: float) -> float | None:
        """Return the relative error that 99 % of the computed weights of at least the mean do not exceed."""
        errors = []
        for (data_index, layer, head), exact in list(self._sampled_rows.items())[::SAMPLE_HEADS]:
            factors = self.factors[data_index, layer]
            rows = torch.from_numpy(_sample_rows(len(factors.queries[head].values)))
            rounded = factors.compute_weights(head, rows, _get_score_error(step)).numpy()
            errors.append(compute_relative_errors(exact, rounded * exact.sum(1, keepdims=True)))
        return float(np.quantile(np.concatenate(errors), 0.99)) if errors else None


def _factor_scores(viewer_data: Sequence[ViewerData], detail: int) -> dict[tuple[int, int], ScoreFactors]:
    """Return the factors of layers, by item and layer, if the file cannot contain all weights to three digits."""
    layers = [
        (n, k, layer)
        for n, item in enumerate(viewer_data)
        for k, layer in enumerate(item.layers)
        if _find_finest_zoom(layer, detail) == 0
    ]
    if 2 * sum(len(layer.heads) * layer.shape[0] * layer.shape[1] for _, _, layer in layers) <= TARGET_BYTES:
        return {}
    found = {}
    for n, k, layer in layers:
        source = layer.source
        if isinstance(source, CapturedWeightSource):
            factors = factor_scores(source.layer.attention, source.batch, layer.heads, layer.shape)
            if factors is not None:
                found[n, k] = factors
    return found


def _describe_factors(factors: ScoreFactors) -> dict[str, Any]:
    return {"group_size": factors.group_size, "softcap": factors.softcap, "visible": _get_mask_key(factors)}


def _get_mask_key(factors: ScoreFactors) -> str | None:
    """Return the name of a mask, which layers may share."""
    if factors.visible is None:
        return None
    rows, cols = factors.visible.shape
    return f"visible/{rows}-{cols}/{zlib.crc32(np.packbits(factors.visible).tobytes()):08x}"


def _get_score_error(step: float) -> float:
    """Return the error of scores that is as harmful as a step of square roots, for a weight equal to the mean."""
    return max(step / 3**0.5, MIN_ERROR)


def _sample_rows(num_rows: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, num_rows - 1, SAMPLE_ROWS).astype(np.int64))


def _iterate_weights(layer: ViewerLayer, whole: TileRequest) -> Iterator[_StoredMap]:
    request = replace(whole, quantity="weights")
    weights = compute_cells(layer, request)
    yield _StoredMap(request.key, weights, float(weights.mean()))
    yield _build_thumbnail(weights, whole)


def _build_thumbnail(weights: FloatArray, whole: TileRequest) -> _StoredMap:
    cells = ArrayWeightSource(weights).pooled_map(0, slice(*whole.rows), slice(*whole.cols), THUMBNAIL_SIZE)
    return _StoredMap(whole.key, cells, float(cells.sum(1).mean()) / cells.shape[1])


def _iterate_pyramid(
    layer: ViewerLayer, whole: TileRequest, detail: int, *, with_alignment: bool
) -> Iterator[_StoredMap]:
    """Iterate over the pooled tiles of a head, its thumbnail, and the weight that each column receives."""
    total = replace(whole, quantity="received_weight", size=TILE_SIZE)
    received = compute_cells(layer, total)
    yield _StoredMap(total.key, received, float(received.mean()))
    thumbnail = compute_cells(layer, whole)
    row_sum = float(thumbnail.sum(1).mean())  # usually 1
    yield _StoredMap(whole.key, thumbnail, row_sum / thumbnail.shape[1])
    requests = [replace(whole, size=ALIGNMENT_SIZE)] if with_alignment else []
    requests += [
        replace(whole, rows=rows, cols=cols, size=TILE_SIZE)
        for zoom in range(_find_finest_zoom(layer, detail), max(map(find_coarsest_zoom, layer.shape)) + 1)
        for rows, cols in iterate_tiles(layer.shape, zoom)
    ]
    for part in requests:
        cells = compute_cells(layer, part)
        share = (part.cols[1] - part.cols[0]) / layer.shape[1]
        yield _StoredMap(part.key, cells, row_sum * share / cells.shape[1])


def _choose_step(blocks: Sequence[_Block], executor: ThreadPoolExecutor) -> float:
    """Return the finest step with which all blocks fit into TARGET_BYTES, or the coarsest one."""

    def fits(step: float) -> bool:
        sizes: Iterable[float] = executor.map(lambda block: block.estimate_size(step), blocks)
        return sum(sizes) <= TARGET_BYTES

    return STEPS[min(bisect.bisect_left(STEPS, True, key=fits), len(STEPS) - 1)]


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
    return viewer_data.with_layers(layers)


def _check_size(
    viewer_data: Sequence[ViewerData], detail: int, factors: Mapping[tuple[int, int], ScoreFactors]
) -> None:
    """Raise an error before any weight is computed if the file would be too large."""
    layers = [(layer, factors.get((n, k))) for n, item in enumerate(viewer_data) for k, layer in enumerate(item.layers)]
    counts = [
        2 * found.num_codes if found else len(layer.heads) * _count_cells(layer, detail) for layer, found in layers
    ]
    if sum(counts) <= MAX_CELLS:
        return
    num_heads = sum(len(layer.heads) for layer, _ in layers)
    largest = max(count // len(layer.heads) for count, (layer, _) in zip(counts, layers, strict=True))
    smaller = sum(len(layer.heads) * _count_cells(layer, TILE_SIZE) for layer, _ in layers)
    alternative = f", or detail={TILE_SIZE}, with which all of them fit" if smaller <= MAX_CELLS else ""
    raise InputError(
        f"the file would contain {sum(counts):,} weights of {num_heads} heads, more than {MAX_CELLS:,}. "
        f"{MAX_CELLS // largest} of these heads fit: select some heads, as in "
        f'heads={{"{layers[-1][0].name}": [0, 3]}} (jumok look: --layer and --head){alternative}'
    )


def _count_cells(layer: ViewerLayer, detail: int) -> int:
    """Return the number of cells of a head in a file."""
    finest = _find_finest_zoom(layer, detail)
    if finest == 0:
        return layer.shape[0] * layer.shape[1]
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
