"""Write viewer data to a file: an HTML file with the viewer, or a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jumok.errors import InputError
from jumok.look.capture.axis_tokens import SPACE_MARK
from jumok.look.capture.captures import matches_pattern, suggest_name
from jumok.look.figures.audio_figure import AudioFigure
from jumok.look.figures.caption_figure import CaptionFigure
from jumok.look.figures.document_figure import draw_document
from jumok.look.figures.plots import IMAGE_SUFFIXES, draw_heat_map
from jumok.look.figures.speech_figure import SpeechFigure
from jumok.look.viewer import html_file
from jumok.look.viewer.tiles import FloatArray, to_float32_array
from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer, as_viewer_data_tuple

MAX_FIGURE_TOKENS = 400  # along each axis of a figure; the viewer shows more


def save_view(
    viewer_data: ViewerData | Sequence[ViewerData], path: str | Path, layer: str | None = None, head: int | None = None
) -> Path:
    """Write one item of viewer data, or two to compare, to ``path``: an HTML file or a figure.

    A figure shows the document, if there is one, unless a layer is requested; ``head`` is then one of its
    hops, and None their mean. For words that attend to images it shows the attention of each of them over the
    images: of those that the model generated, if there are any. For speech it shows the spectrogram, the
    alignment below it, and the style tokens. For a recording it shows the spectrogram, and below it the attention
    of each word over time.

    ``layer`` is a name, in which * matches anything. Without it, an HTML file has all layers, and a figure
    shows the last layer between two texts, or else the last of all; without ``head``, the mean of its heads.
    """
    path = Path(path)
    items = as_viewer_data_tuple(viewer_data)
    data = items[0]
    if (document := data.document) is not None and layer is None:
        document.get_word_weights(head)  # raises an error if there is no such hop
        if path.suffix == ".html":
            return html_file.save_html(items, path)
        _check_figure_path(path, len(items) > 1)
        return draw_document(document, path, hops=[head], title=data.title)
    layers = _select_layers(data.layers, layer, head)
    if path.suffix == ".html":
        heads = {item.name: item.heads if head is None else [head] for item in layers}
        return html_file.save_html(items, path, heads=None if layer is None and head is None else heads)
    _check_figure_path(path, len(items) > 1)
    cross_layers = [item for item in layers if item.kind == "cross"]
    speech_layers = [item for item in layers if data.speech is not None and data.speech.matches(item)]
    selected = (speech_layers or cross_layers or layers)[-1]
    if (image := data.image) is not None and (rows := image.list_figure_rows(selected)):
        names = [selected.row_texts[row].removeprefix(SPACE_MARK) for row in rows]
        weights = _compute_mean_weights(selected, head, slice(rows[0], rows[-1] + 1))[[row - rows[0] for row in rows]]
        placement = image.find_placement(selected)
        return CaptionFigure(image, names, weights, placement=placement, title=data.title).save(path)
    if (speech := data.speech) is not None and speech.matches(selected):
        weights = _compute_mean_weights(selected, head)
        return SpeechFigure(speech, selected.col_texts, weights, data.style, title=data.title).save(path)
    if (audio := data.audio) is not None and audio.matches(selected):
        words = None if selected.name in audio.query_frames else selected.row_texts
        weights = _compute_mean_weights(selected, head)
        return AudioFigure(audio, audio.key_frames[selected.name], words, weights, title=data.title).save(path)
    return _save_heat_map(selected, head, path)


def _select_layers(layers: Sequence[ViewerLayer], pattern: str | None, head: int | None) -> list[ViewerLayer]:
    selected = [layer for layer in layers if pattern is None or matches_pattern(layer.name, pattern)]
    if not selected:
        suggestion = suggest_name(str(pattern), [layer.name for layer in layers], "the layers")
        raise InputError(f"there is no layer {pattern!r}{suggestion}")
    for layer in selected:
        if head is not None and head not in layer.heads:
            raise InputError(f"{layer.name} has {len(layer.heads)} heads, and head {head} was requested")
    return selected


def _check_figure_path(path: Path, is_comparison: bool) -> None:
    if path.suffix not in IMAGE_SUFFIXES:
        raise InputError(f"--out {path}: an .html file or a figure ({', '.join(IMAGE_SUFFIXES)}) is expected")
    if is_comparison:
        raise InputError(f"--out {path}: a figure shows one map, and there are two; use an .html file")


def _compute_mean_weights(layer: ViewerLayer, head: int | None, rows: slice | None = None) -> FloatArray:
    """Return the weights of a head, or the mean of all ``(Q, K)``; ``rows`` selects queries."""
    heads = layer.heads if head is None else (head,)
    num_queries, num_keys = layer.shape
    selection = slice(0, num_queries) if rows is None else rows
    total = sum(to_float32_array(layer.source.weights(n, selection, slice(0, num_keys))) for n in heads)
    return np.asarray(total / len(heads), np.float32)


def _save_heat_map(layer: ViewerLayer, head: int | None, path: Path) -> Path:
    rows, cols = layer.shape
    if max(rows, cols) > MAX_FIGURE_TOKENS:
        raise InputError(f"a map of {rows} × {cols} tokens is too large for a figure: use an .html file or the viewer")
    is_mean = head is None and len(layer.heads) > 1
    title = f"{layer.name}, {'mean of the heads' if is_mean else f'head {layer.heads[0] if head is None else head}'}"
    return draw_heat_map(
        _compute_mean_weights(layer, head),
        layer.row_texts,
        layer.col_texts,
        path,
        title=title,
        first_generated=layer.first_generated,
    )
