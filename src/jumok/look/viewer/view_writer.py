"""Show a scene: as a page that is served, as an HTML file, or as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jumok.errors import InputError
from jumok.look.capture.captures import matches_pattern, suggest_name
from jumok.look.figures.caption_figure import draw_caption
from jumok.look.figures.document_figure import draw_document
from jumok.look.figures.plots import IMAGE_SUFFIXES, draw_heat_map
from jumok.look.figures.speech_figure import draw_speech
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.tiles import FloatArray
from jumok.look.viewer.viewer_data import (
    AttendedImage,
    ViewerData,
    ViewerLayer,
    as_viewer_data_tuple,
    to_float32_array,
)

__all__ = ["save_view"]

MAX_FIGURE_TOKENS = 400  # tokens a side of a picture; a viewer shows more


def save_view(
    viewer_data: ViewerData | Sequence[ViewerData],
    path: str | Path,
    layer: str | None = None,
    head: int | None = None,
) -> Path:
    """Write a scene, or two to compare, to ``path``: an HTML file with the viewer, or a picture of a map.

    Of a scene with a document a picture shows that, unless a layer is asked for; ``head`` is then one of its
    hops, and without it their mean is shown. Of a picture's caption it shows where the model looked for each
    word; of speech the spectrogram, the alignment under it, and the style tokens.

    ``layer`` is a name, in which * stands for anything. Without it an HTML file has all layers, and a picture
    shows the last one between two texts, or else the last of all; without ``head``, their heads' mean.
    """
    path = Path(path)
    scene, *second = as_viewer_data_tuple(viewer_data)
    if scene.document is not None and layer is None:
        return _save_document([scene, *second], scene.document, path, head)
    layers = [one for one in scene.layers if layer is None or matches_pattern(one.name, layer)]
    if not layers:
        names = [one.name for one in scene.layers]
        raise InputError(f"there is no layer {layer!r}{suggest_name(str(layer), names, 'the layers')}")
    for one in layers:
        if head is not None and head not in one.heads:
            raise InputError(f"{one.name} has {len(one.heads)} heads, and head {head} was asked for")
    if path.suffix == ".html":
        from jumok.look.viewer import html_file

        chosen = {one.name: one.heads if head is None else [head] for one in layers}
        return html_file.save_html(
            [scene, *second], path, heads=None if layer is None and head is None else chosen
        )
    _check_output_path(path, bool(second))
    crossing = [one for one in layers if one.kind == "cross"]
    spoken = [one for one in layers if scene.speech is not None and one.shape[0] == scene.speech.num_steps]
    best = (spoken or crossing or layers)[-1]
    if (picture := scene.image) is not None and _is_caption(best, picture):
        words = list(best.row_labels or map(str, range(best.shape[0])))[: best.shape[0]]
        return draw_caption(picture, words, _compute_mean_weights(best, head), path, title=scene.title)
    if (speech := scene.speech) is not None and best.shape[0] == speech.num_steps:
        symbols = list(best.col_labels or map(str, range(best.shape[1])))[: best.shape[1]]
        return draw_speech(
            speech, symbols, _compute_mean_weights(best, head), path, scene.style, title=scene.title
        )
    return _save_heat_map(best, head, path)


def _save_document(
    viewer_data: Sequence[ViewerData], document: AttendedDocument, path: Path, hop: int | None
) -> Path:
    document.get_word_weights(hop)  # says so if there is no such hop
    if path.suffix == ".html":
        from jumok.look.viewer import html_file

        return html_file.save_html(viewer_data, path)
    _check_output_path(path, len(viewer_data) > 1)
    return draw_document(document, path, hops=[hop], title=viewer_data[0].title)


def _check_output_path(path: Path, is_comparison: bool) -> None:
    if path.suffix not in IMAGE_SUFFIXES:
        raise InputError(
            f"--out {path}: an .html file or a picture ({', '.join(IMAGE_SUFFIXES)}) is expected"
        )
    if is_comparison:
        raise InputError(f"--out {path}: a picture shows one map, and there are two; give an .html file")


def _is_caption(layer: ViewerLayer, image: AttendedImage) -> bool:
    """Whether words look at places, and not places at each other."""
    queries, keys = layer.shape
    return keys == image.num_keys and queries != keys and "causal" not in layer.kind


def _compute_mean_weights(layer: ViewerLayer, head: int | None) -> FloatArray:
    """Of a head, or the mean of all ``(Q, K)``."""
    rows, cols = layer.shape
    heads = layer.heads if head is None else (head,)
    every = [to_float32_array(layer.source.weights(one, slice(0, rows), slice(0, cols))) for one in heads]
    return np.asarray(np.mean(every, axis=0), np.float32)


def _save_heat_map(layer: ViewerLayer, head: int | None, path: Path) -> Path:
    rows, cols = layer.shape
    if max(rows, cols) > MAX_FIGURE_TOKENS:
        raise InputError(
            f"a map of {rows} × {cols} tokens is too large for a picture: give an .html file, or see the page"
        )
    heads = layer.heads if head is None else (head,)
    down = [str(n) for n in range(rows)] if layer.row_labels is None else list(layer.row_labels)[:rows]
    across = [str(n) for n in range(cols)] if layer.col_labels is None else list(layer.col_labels)[:cols]
    title = f"{layer.name}, {'mean of the heads' if head is None and len(heads) > 1 else f'head {heads[0]}'}"
    return draw_heat_map(_compute_mean_weights(layer, head), down, across, path, title=title)
