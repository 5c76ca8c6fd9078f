"""Write viewer data to a file: an HTML file with the viewer, or a figure."""

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
from jumok.look.viewer.attended_image import AttendedImage
from jumok.look.viewer.tiles import FloatArray
from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer, as_viewer_data_tuple, to_float32_array

MAX_FIGURE_TOKENS = 400  # along each axis of a figure; the viewer shows more


def save_view(
    viewer_data: ViewerData | Sequence[ViewerData],
    path: str | Path,
    layer: str | None = None,
    head: int | None = None,
) -> Path:
    """Write one item of viewer data, or two to compare, to ``path``: an HTML file or a figure.

    A figure shows the document, if there is one, unless a layer is requested; ``head`` is then one of its
    hops, and None their mean. For an image caption it shows the attention of each word over the image; for
    speech the spectrogram, the alignment below it, and the style tokens.

    ``layer`` is a name, in which * matches anything. Without it, an HTML file has all layers, and a figure
    shows the last layer between two texts, or else the last of all; without ``head``, the mean of its heads.
    """
    path = Path(path)
    data, *second = as_viewer_data_tuple(viewer_data)
    if data.document is not None and layer is None:
        return _save_document([data, *second], data.document, path, head)
    layers = [item for item in data.layers if layer is None or matches_pattern(item.name, layer)]
    if not layers:
        names = [item.name for item in data.layers]
        raise InputError(f"there is no layer {layer!r}{suggest_name(str(layer), names, 'the layers')}")
    for item in layers:
        if head is not None and head not in item.heads:
            raise InputError(f"{item.name} has {len(item.heads)} heads, and head {head} was requested")
    if path.suffix == ".html":
        from jumok.look.viewer import html_file

        selected = {item.name: item.heads if head is None else [head] for item in layers}
        return html_file.save_html([data, *second], path, heads=None if layer is None and head is None else selected)
    _check_output_path(path, bool(second))
    cross_layers = [item for item in layers if item.kind == "cross"]
    speech_layers = [item for item in layers if data.speech is not None and item.shape[0] == data.speech.num_steps]
    shown_layer = (speech_layers or cross_layers or layers)[-1]
    if (image := data.image) is not None and _is_caption(shown_layer, image):
        words = list(shown_layer.row_labels or map(str, range(shown_layer.shape[0])))[: shown_layer.shape[0]]
        return draw_caption(image, words, _compute_mean_weights(shown_layer, head), path, title=data.title)
    if (speech := data.speech) is not None and shown_layer.shape[0] == speech.num_steps:
        symbols = list(shown_layer.col_labels or map(str, range(shown_layer.shape[1])))[: shown_layer.shape[1]]
        return draw_speech(
            speech, symbols, _compute_mean_weights(shown_layer, head), path, data.style, title=data.title
        )
    return _save_heat_map(shown_layer, head, path)


def _save_document(viewer_data: Sequence[ViewerData], document: AttendedDocument, path: Path, hop: int | None) -> Path:
    document.get_word_weights(hop)  # raises an error if there is no such hop
    if path.suffix == ".html":
        from jumok.look.viewer import html_file

        return html_file.save_html(viewer_data, path)
    _check_output_path(path, len(viewer_data) > 1)
    return draw_document(document, path, hops=[hop], title=viewer_data[0].title)


def _check_output_path(path: Path, is_comparison: bool) -> None:
    if path.suffix not in IMAGE_SUFFIXES:
        raise InputError(f"--out {path}: an .html file or a figure ({', '.join(IMAGE_SUFFIXES)}) is expected")
    if is_comparison:
        raise InputError(f"--out {path}: a figure shows one map, and there are two; use an .html file")


def _is_caption(layer: ViewerLayer, image: AttendedImage) -> bool:
    """Return whether words attend to patches, as opposed to patches to each other."""
    num_queries, num_keys = layer.shape
    return num_keys == image.num_keys and num_queries != num_keys and "causal" not in layer.kind


def _compute_mean_weights(layer: ViewerLayer, head: int | None) -> FloatArray:
    """Return the weights of a head, or the mean of all ``(Q, K)``."""
    rows, cols = layer.shape
    heads = layer.heads if head is None else (head,)
    all_weights = [
        to_float32_array(layer.source.weights(head_index, slice(0, rows), slice(0, cols))) for head_index in heads
    ]
    return np.asarray(np.mean(all_weights, axis=0), np.float32)


def _save_heat_map(layer: ViewerLayer, head: int | None, path: Path) -> Path:
    rows, cols = layer.shape
    if max(rows, cols) > MAX_FIGURE_TOKENS:
        raise InputError(f"a map of {rows} × {cols} tokens is too large for a figure: use an .html file or the viewer")
    heads = layer.heads if head is None else (head,)
    row_labels = [str(n) for n in range(rows)] if layer.row_labels is None else list(layer.row_labels)[:rows]
    col_labels = [str(n) for n in range(cols)] if layer.col_labels is None else list(layer.col_labels)[:cols]
    title = f"{layer.name}, {'mean of the heads' if head is None and len(heads) > 1 else f'head {heads[0]}'}"
    return draw_heat_map(_compute_mean_weights(layer, head), row_labels, col_labels, path, title=title)
