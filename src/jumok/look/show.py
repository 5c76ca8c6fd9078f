"""Show a scene: as a page that is served, as an HTML file, or as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jumok.errors import InputError
from jumok.look.document import Document
from jumok.look.document_figure import draw_document
from jumok.look.figures import PICTURES, heat_map
from jumok.look.picture_figure import draw_strip
from jumok.look.scene import Layer, Picture, Scene, as_scenes, numbers
from jumok.look.seen import matches, nearest
from jumok.look.speech_figure import draw_speech
from jumok.look.tiles import Numbers

__all__ = ["save"]

DRAWN = 400  # tokens a side of a picture; a viewer shows more


def save(
    scenes: Scene | Sequence[Scene], path: str | Path, layer: str | None = None, head: int | None = None
) -> Path:
    """Write a scene, or two to compare, to ``path``: an HTML file with the viewer, or a picture of a map.

    Of a scene with a document a picture shows that, unless a layer is asked for; ``head`` is then one of its
    hops, and without it their mean is shown. Of a picture's caption it shows where the model looked for each
    word; of speech the spectrogram, the alignment under it, and the style tokens.

    ``layer`` is a name, in which * stands for anything. Without it an HTML file has all layers, and a picture
    shows the last one between two texts, or else the last of all; without ``head``, their heads' mean.
    """
    path = Path(path)
    scene, *second = as_scenes(scenes)
    if scene.document is not None and layer is None:
        return _document([scene, *second], scene.document, path, head)
    layers = [one for one in scene.layers if layer is None or matches(one.name, layer)]
    if not layers:
        names = [one.name for one in scene.layers]
        raise InputError(f"there is no layer {layer!r}{nearest(str(layer), names, 'the layers')}")
    for one in layers:
        if head is not None and head not in one.heads:
            raise InputError(f"{one.name} has {len(one.heads)} heads, and head {head} was asked for")
    if path.suffix == ".html":
        from jumok.look import html

        chosen = {one.name: one.heads if head is None else [head] for one in layers}
        return html.save([scene, *second], path, heads=None if layer is None and head is None else chosen)
    _check_picture(path, bool(second))
    crossing = [one for one in layers if one.kind == "cross"]
    spoken = [one for one in layers if scene.speech is not None and one.shape[0] == scene.speech.steps]
    best = (spoken or crossing or layers)[-1]
    if (picture := scene.picture) is not None and _is_caption(best, picture):
        words = list(best.rows or map(str, range(best.shape[0])))[: best.shape[0]]
        return draw_strip(picture, words, _weights(best, head), path, title=scene.title)
    if (speech := scene.speech) is not None and best.shape[0] == speech.steps:
        symbols = list(best.cols or map(str, range(best.shape[1])))[: best.shape[1]]
        return draw_speech(speech, symbols, _weights(best, head), path, scene.style, title=scene.title)
    return _drawn(best, head, path)


def _document(scenes: Sequence[Scene], document: Document, path: Path, hop: int | None) -> Path:
    document.of(hop)  # says so if there is no such hop
    if path.suffix == ".html":
        from jumok.look import html

        return html.save(scenes, path)
    _check_picture(path, len(scenes) > 1)
    return draw_document(document, path, hops=[hop], title=scenes[0].title)


def _check_picture(path: Path, compared: bool) -> None:
    if path.suffix not in PICTURES:
        raise InputError(f"--out {path}: an .html file or a picture ({', '.join(PICTURES)}) is expected")
    if compared:
        raise InputError(f"--out {path}: a picture shows one map, and there are two; give an .html file")


def _is_caption(layer: Layer, picture: Picture) -> bool:
    """Whether words look at places, and not places at each other."""
    queries, keys = layer.shape
    return keys == picture.keys and queries != keys and "causal" not in layer.kind


def _weights(layer: Layer, head: int | None) -> Numbers:
    """Of a head, or the mean of all ``(Q, K)``."""
    rows, cols = layer.shape
    heads = layer.heads if head is None else (head,)
    every = [numbers(layer.source.weights(one, slice(0, rows), slice(0, cols))) for one in heads]
    return np.asarray(np.mean(every, axis=0), np.float32)


def _drawn(layer: Layer, head: int | None, path: Path) -> Path:
    rows, cols = layer.shape
    if max(rows, cols) > DRAWN:
        raise InputError(
            f"a map of {rows} × {cols} tokens is too large for a picture: give an .html file, or see the page"
        )
    heads = layer.heads if head is None else (head,)
    down = [str(n) for n in range(rows)] if layer.rows is None else list(layer.rows)[:rows]
    across = [str(n) for n in range(cols)] if layer.cols is None else list(layer.cols)[:cols]
    title = f"{layer.name}, {'mean of the heads' if head is None and len(heads) > 1 else f'head {heads[0]}'}"
    return heat_map(_weights(layer, head), down, across, path, title=title)
