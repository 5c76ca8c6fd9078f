"""The viewer in one self-contained HTML file, which fetches nothing.

The file contains every weight of the selected heads, if a map has at most ``detail`` × ``detail`` weights. The
browser pools them, as :class:`.viewer_data.ArrayWeightSource` does. For a longer input the file contains a
pyramid of pooled tiles with up to ``detail`` cells a side. The browser averages the heads of a layer.

Weights are rounded as finely as TARGET_BYTES permit: to three digits, or on a square-root scale (see
:func:`.tiles.pack_roots`), whose step is the same share of the root of the mean weight in all maps. The manifest
states this share as ``rounding``.
"""

from __future__ import annotations

import bisect
import functools
import json
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jumok.errors import InputError
from jumok.files import atomic_write
from jumok.look.viewer import assets
from jumok.look.viewer.ascii_coding import BLOCK_BYTES, BLOCK_CHARACTERS, encode_text
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
    ViewerData,
    ViewerLayer,
    as_viewer_data_tuple,
    build_manifest,
    compute_cells,
)

THUMBNAIL_SIZE, ALIGNMENT_SIZE = 64, 512  # cells of a small map and of a speech alignment, as in tiles.js
MAX_CELLS = 40 << 20  # of one file: weights and pooled cells
TARGET_BYTES = 19 << 19  # 9.5 MiB of compressed weights; their text is 1.22 times as long
# Steps of square roots, as shares of the root of the mean weight. 0 stands for three digits.
STEPS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6)
SAMPLE_CELLS = 1 << 14  # of each map, to estimate the size of a file

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
    for item, entry in zip(selected, manifest["data"], strict=True):
        for layer, layer_entry in zip(item.layers, entry["layers"], strict=True):
            layer_entry["finest_zoom"] = _find_finest_zoom(layer, detail)
    _check_size(selected, detail)
    maps = [stored for number, item in enumerate(selected) for stored in _compute_maps(item, number, detail)]
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        manifest["rounding"] = step = _choose_step(maps, executor)
        blocks = list(executor.map(functools.partial(_compress, step=step), maps))
    index: dict[str, tuple[int, int]] = {}
    data = bytearray()
    for stored, block in zip(maps, blocks, strict=True):
        index[stored.key] = (len(data) // BLOCK_BYTES * BLOCK_CHARACTERS, len(block))
        data += block + bytes(-len(block) % BLOCK_BYTES)  # each block begins at a character of its own
    return _render_page(manifest, index, encode_text(bytes(data)))


@dataclass(frozen=True, eq=False)
class _StoredMap:
    """Cells of one head that a file contains. Uniform attention has the weight ``mean`` in each."""

    key: str
    cells: FloatArray
    mean: float


def _compute_maps(item: ViewerData, data_index: int, detail: int) -> Iterator[_StoredMap]:
    """Iterate over all maps that a file contains. The browser derives the others from them."""
    for layer_index, layer in enumerate(item.layers):
        num_queries, num_keys = layer.shape
        for head in layer.heads:
            request = TileRequest(
                layer_index, head, (0, num_queries), (0, num_keys), THUMBNAIL_SIZE, data_index=data_index
            )
            requests = [replace(request, size=ALIGNMENT_SIZE)] if item.speech is not None else []
            if _find_finest_zoom(layer, detail) == 0:
                weights = compute_cells(layer, replace(request, quantity="weights"))
                yield _StoredMap(replace(request, quantity="weights").key, weights, float(weights.mean()))
                whole = slice(0, num_queries), slice(0, num_keys)
                thumbnail = ArrayWeightSource(weights).pooled_map(0, *whole, THUMBNAIL_SIZE)
                requests = []
            else:
                requests += [
                    replace(request, rows=rows, cols=cols, size=TILE_SIZE)
                    for zoom in range(_find_finest_zoom(layer, detail), max(map(find_coarsest_zoom, layer.shape)) + 1)
                    for rows, cols in iterate_tiles(layer.shape, zoom)
                ]
                total = replace(request, quantity="received_weight", size=TILE_SIZE)
                received = compute_cells(layer, total)
                yield _StoredMap(total.key, received, float(received.mean()))
                thumbnail = compute_cells(layer, request)
            row_sum = float(thumbnail.sum(1).mean())  # usually 1
            yield _StoredMap(request.key, thumbnail, row_sum / thumbnail.shape[1])
            for part in requests:
                cells = compute_cells(layer, part)
                yield _StoredMap(part.key, cells, row_sum * (part.cols[1] - part.cols[0]) / num_keys / cells.shape[1])


def _choose_step(maps: Sequence[_StoredMap], executor: ThreadPoolExecutor) -> float:
    """Return the finest step with which all maps fit into TARGET_BYTES, or the coarsest one."""

    def fits(step: float) -> bool:
        return sum(executor.map(functools.partial(_estimate_size, step=step), maps)) <= TARGET_BYTES

    return STEPS[min(bisect.bisect_left(STEPS, True, key=fits), len(STEPS) - 1)]


def _estimate_size(stored: _StoredMap, step: float) -> float:
    """Return about how many bytes a map takes, from some of its rows."""
    stride = max(1, stored.cells.size // SAMPLE_CELLS)
    sample = stored.cells[::stride]
    return len(_compress(replace(stored, cells=sample), step)) * stored.cells.size / sample.size


def _compress(stored: _StoredMap, step: float) -> bytes:
    if step == 0:
        return zlib.compress(pack(stored.cells))
    # The codes of weights hardly repeat, except for zeros: searching for matches takes long and finds few.
    compressor = zlib.compressobj(strategy=zlib.Z_RLE)
    return compressor.compress(pack_roots(stored.cells, step * stored.mean**0.5)) + compressor.flush()


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


def _check_size(viewer_data: Sequence[ViewerData], detail: int) -> None:
    """Raise an error before any computation if the file would be too large."""
    layers = [layer for item in viewer_data for layer in item.layers]
    num_cells = sum(len(layer.heads) * _count_cells(layer, detail) for layer in layers)
    if num_cells <= MAX_CELLS:
        return
    num_heads = sum(len(layer.heads) for layer in layers)
    largest = max(_count_cells(layer, detail) for layer in layers)
    smaller = sum(len(layer.heads) * _count_cells(layer, TILE_SIZE) for layer in layers)
    alternative = f", or detail={TILE_SIZE}, with which all of them fit" if smaller <= MAX_CELLS else ""
    raise InputError(
        f"the file would contain {num_cells:,} weights of {num_heads} heads, more than {MAX_CELLS:,}. "
        f"{MAX_CELLS // largest} of these heads fit: select some heads, as in "
        f'heads={{"{layers[-1].name}": [0, 3]}} (jumok look: --layer and --head){alternative}'
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
