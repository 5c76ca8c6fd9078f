"""The viewer in one self-contained HTML file, which fetches nothing.

A file cannot compute, so it contains a fixed pyramid of tiles: of the selected heads, from the whole map down
to ``detail`` cells a side, or as many in all. Up to this size it contains every weight (rounded to three
digits); for longer inputs it contains pooled cells.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jumok.errors import InputError
from jumok.files import atomic_write
from jumok.look.viewer import assets
from jumok.look.viewer.tiles import TILE_SIZE, TileRequest, find_coarsest_zoom, find_finest_zoom, iterate_tiles
from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer, answer_request, as_viewer_data_tuple, build_manifest

THUMBNAIL_SIZE, ALIGNMENT_SIZE = 64, 512  # cells of a small map and of a speech alignment, as in tiles.js
MAX_BYTES = 96 << 20  # before compression; larger files are slow in browsers

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
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def render_html(
    viewer_data: ViewerData | Sequence[ViewerData], *, heads: HeadSelection | None = None, detail: int = 1024
) -> str:
    """Return the HTML as text."""
    if detail < TILE_SIZE:
        raise InputError(f"detail={detail} came; expected at least {TILE_SIZE} cells a side")
    # A file cannot synthesise speech.
    selected = [replace(_select_heads(item, heads), resynthesize=None) for item in as_viewer_data_tuple(viewer_data)]
    manifest = build_manifest(selected)
    for item, entry in zip(selected, manifest["data"], strict=True):
        for layer, layer_entry in zip(item.layers, entry["layers"], strict=True):
            layer_entry["finest_zoom"] = _find_finest_zoom(layer, detail)
    requests = list(_iterate_requests(selected, detail))
    _check_size(requests)
    index: dict[str, tuple[int, int]] = {}
    data = bytearray()
    for request in requests:
        packed = zlib.compress(answer_request(selected, request), 9)
        index[request.key] = (len(data), len(packed))
        data += packed
    return _render_page(manifest, index, bytes(data))


def _iterate_requests(viewer_data: Sequence[ViewerData], detail: int) -> Iterator[TileRequest]:
    """Iterate over all requests that the viewer can make to a file."""
    for data_index, item in enumerate(viewer_data):
        for layer_index, layer in enumerate(item.layers):
            num_queries, num_keys = layer.shape
            whole: dict[str, Any] = {"rows": (0, num_queries), "cols": (0, num_keys)}
            last_zoom = max(map(find_coarsest_zoom, layer.shape))
            for head in (*layer.heads, *((None,) if len(layer.heads) > 1 else ())):
                at: dict[str, Any] = {"data_index": data_index, "layer": layer_index, "head": head}
                for zoom in range(_find_finest_zoom(layer, detail), last_zoom + 1):
                    for rows, cols in iterate_tiles(layer.shape, zoom):
                        yield TileRequest(**at, rows=rows, cols=cols)
                yield TileRequest(**at, **whole, quantity="received_weight")
                if head is not None:
                    yield TileRequest(**at, **whole, size=THUMBNAIL_SIZE)
                if item.speech is not None:
                    yield TileRequest(**at, **whole, size=ALIGNMENT_SIZE)


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


def _check_size(requests: Sequence[TileRequest]) -> None:
    size = sum(
        2 * min(r.size, r.rows[1] - r.rows[0]) * min(r.size, r.cols[1] - r.cols[0])
        for r in requests
        if r.quantity == "pooled_map"
    )
    if size > MAX_BYTES:
        raise InputError(
            f"the file would contain {size / 2**20:,.0f} MiB of weights, more than {MAX_BYTES >> 20}; select "
            'some heads, as in heads={"layer name": [0, 3]}, or a smaller detail (1024 by default)'
        )


def _render_page(manifest: Mapping[str, Any], index: Mapping[str, tuple[int, int]], data: bytes) -> str:
    script, style = assets.build_script("boot_file"), assets.build_style_sheet(include_page=True)
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
<script type="text/plain" id="tiles">{base64.b64encode(data).decode()}</script>
<script type="module">{script}</script>"""
    return assets.render_page(f"{manifest['title'] or 'jumok'} · jumok", head, body)


def _encode_json(value: object) -> str:
    """Encode JSON that cannot end its HTML element, whatever a token contains."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
