"""The viewer in one file: open it anywhere, send it to anyone. It holds all it needs and fetches nothing.

A file cannot compute, so it carries a fixed pyramid of tiles: of the heads that are chosen, from the whole
map down to ``detail`` cells a side, or as many in all. Up to there every weight is in it (rounded to three
digits); of a longer input it has pooled cells.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jumok.errors import InputError
from jumok.files import written
from jumok.look import assets
from jumok.look.scene import Layer, Scene, answer, as_scenes, manifest
from jumok.look.tiles import TILE, Request, coarsest, finest_within, tiles

__all__ = ["render", "save"]

THUMB, STRIP = 64, 512  # the cells of a small map and of an alignment of speech, as in static/tiles.js
MOST_BYTES = 96 << 20  # before compression; browsers take long over larger files

Heads = Mapping[str, Collection[int]]


def save(
    scenes: Scene | Sequence[Scene], path: str | Path, *, heads: Heads | None = None, detail: int = 1024
) -> Path:
    """Write one scene, or two to compare, to an HTML file, and give its path back.

    ``heads`` maps names of layers to the heads that are kept; without it, all of all layers are.

    >>> save(scene, "map.html", heads={"encoder.layer.3": [0, 5]})  # doctest: +SKIP
    """
    text = render(scenes, heads=heads, detail=detail)
    with written(Path(path)) as part:
        part.write_text(text, encoding="utf-8")
    return Path(path)


def render(scenes: Scene | Sequence[Scene], *, heads: Heads | None = None, detail: int = 1024) -> str:
    """The same as a text."""
    if detail < TILE:
        raise InputError(f"detail={detail} came; expected at least {TILE} cells a side")
    # A file cannot say anything anew.
    chosen = [replace(_chosen(scene, heads), retell=None) for scene in as_scenes(scenes)]
    told = manifest(chosen)
    for scene, about in zip(chosen, told["scenes"], strict=True):
        for layer, lines in zip(scene.layers, about["layers"], strict=True):
            lines["finest"] = _finest(layer, detail)
    requests = list(_requests(chosen, detail))
    _check_size(requests)
    index: dict[str, tuple[int, int]] = {}
    data = bytearray()
    for request in requests:
        packed = zlib.compress(answer(chosen, request), 9)
        index[request.key] = (len(data), len(packed))
        data += packed
    return _page(told, index, bytes(data))


def _requests(scenes: Sequence[Scene], detail: int) -> Iterator[Request]:
    """All that the viewer may ask of a file."""
    for number, scene in enumerate(scenes):
        for place, layer in enumerate(scene.layers):
            queries, keys = layer.shape
            whole: dict[str, Any] = {"rows": (0, queries), "cols": (0, keys)}
            last = max(map(coarsest, layer.shape))
            for head in (*layer.heads, *((None,) if len(layer.heads) > 1 else ())):
                at: dict[str, Any] = {"scene": number, "layer": place, "head": head}
                for zoom in range(_finest(layer, detail), last + 1):
                    for rows, cols in tiles(layer.shape, zoom):
                        yield Request(**at, rows=rows, cols=cols)
                yield Request(**at, **whole, what="received")
                if head is not None:
                    yield Request(**at, **whole, size=THUMB)
                if scene.speech is not None:
                    yield Request(**at, **whole, size=STRIP)


def _finest(layer: Layer, detail: int) -> int:
    if layer.shape[0] * layer.shape[1] <= detail * detail:  # few words of a long text, or of many places
        return 0
    return max(finest_within(length, detail) for length in layer.shape)


def _chosen(scene: Scene, heads: Heads | None) -> Scene:
    """The scene with only the chosen heads."""
    if heads is None:
        return scene
    known = {layer.name: layer for layer in scene.layers}
    for name, numbers in heads.items():
        if name not in known:
            raise InputError(f"no layer is called {name!r}; there are: {', '.join(known)}")
        unknown = sorted(set(numbers) - set(known[name].heads))
        if unknown or not numbers:
            raise InputError(
                f"heads {unknown or list(numbers)} of {name} were asked for; "
                f"it has {known[name].heads[0]} to {known[name].heads[-1]}"
            )
    layers = tuple(
        replace(layer, heads=tuple(sorted(set(heads[layer.name]))))
        for layer in scene.layers
        if layer.name in heads
    )
    return scene.with_layers(layers)


def _check_size(requests: Sequence[Request]) -> None:
    size = sum(
        2 * min(r.size, r.rows[1] - r.rows[0]) * min(r.size, r.cols[1] - r.cols[0])
        for r in requests
        if r.what == "map"
    )
    if size > MOST_BYTES:
        raise InputError(
            f"the file would hold {size / 2**20:,.0f} MiB of numbers, more than {MOST_BYTES >> 20}; choose "
            'some heads, as in heads={"layer name": [0, 3]}, or a smaller detail (1024 by default)'
        )


def _page(told: Mapping[str, Any], index: Mapping[str, tuple[int, int]], data: bytes) -> str:
    script, style = assets.script("boot_file"), assets.style(page=True)
    if "</script" in script.lower() or "</style" in style.lower():
        raise AssertionError("the viewer's own files would end their element")
    # Nothing may be loaded, and of scripts and styles only these two run.
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src 'sha256-{_hash(style)}'; "
        "img-src data: blob:; media-src blob:; base-uri 'none'; form-action 'none'"
    )
    title = html.escape(str(told["title"]) or "jumok")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title} · jumok</title>
<style>{style}</style>
<body>
<main id="viewer"></main>
<noscript>This map is drawn by a script in this file; please allow it to run.</noscript>
<script type="application/json" id="manifest">{_json(told)}</script>
<script type="application/json" id="index">{_json(index)}</script>
<script type="text/plain" id="numbers">{base64.b64encode(data).decode()}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _json(value: object) -> str:
    """JSON that cannot end the element it stands in, whatever a token holds."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
