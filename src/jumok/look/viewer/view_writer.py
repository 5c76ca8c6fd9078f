"""Write viewer data to a file: an HTML file with the viewer, or a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jumok.errors import InputError
from jumok.look.capture.axis_tokens import SPACE_MARK
from jumok.look.capture.captures import matches_pattern, suggest_name
from jumok.look.figures.audio_figure import AudioFigure
from jumok.look.figures.caption_figure import CaptionFigure
from jumok.look.figures.document_figure import draw_document
from jumok.look.figures.plots import IMAGE_SUFFIXES, draw_heat_map
from jumok.look.figures.speech_figure import SpeechFigure
from jumok.look.viewer import html_file
from jumok.look.viewer.medium import Medium
from jumok.look.viewer.opening import choose_opening
from jumok.look.viewer.preparation import add_layer_means
from jumok.look.viewer.tiles import FloatArray, TileRequest
from jumok.look.viewer.viewer_data import Opening, ViewerData, ViewerLayer, as_viewer_data_tuple, compute_cells

MEAN_LAYER = "mean"  # as the name of a layer: the mean over all layers and heads
SINK_FREE_NOTE = "without sinks (special tokens, and the first token if causal), rows renormalised"
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

    ``layer`` is a name, in which * matches anything, or "mean" for the mean over all layers and heads. Without
    it, an HTML file has all layers, and a figure shows what the viewer opens with (see :mod:`.opening`);
    without ``head``, the mean of the heads.
    """
    path = Path(path)
    items = tuple(map(add_layer_means, as_viewer_data_tuple(viewer_data)))
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
    if (image := data.image) is not None:
        pictured = [item for item in layers if image.list_figure_rows(item)]
        cross = [item for item in pictured if item.kind == "cross"]  # words, as opposed to patches, attend to patches
        if (captioned := _choose_layer(data, cross or pictured, image)) is not None:
            rows = image.list_figure_rows(captioned)
            names = [captioned.row_texts[row].removeprefix(SPACE_MARK) for row in rows]
            weights = _compute_mean_weights(
                captioned, head, slice(rows[0], rows[-1] + 1), without_sinks=data.hides_sinks
            )[[row - rows[0] for row in rows]]
            placement = image.find_placement(captioned)
            return CaptionFigure(image, names, weights, placement=placement, title=data.title).save(path)
    if (speech := data.speech) is not None and (aligned := _choose_layer(data, layers, speech)) is not None:
        weights = _compute_mean_weights(aligned, head, without_sinks=data.hides_sinks)
        return SpeechFigure(speech, aligned.col_texts, weights, data.style, title=data.title).save(path)
    if (audio := data.audio) is not None and (heard := _choose_layer(data, layers, audio)) is not None:
        words = None if heard.name in audio.query_frames else heard.row_texts
        weights = _compute_mean_weights(heard, head, without_sinks=data.hides_sinks)
        return AudioFigure(audio, audio.key_frames[heard.name], words, weights, title=data.title).save(path)
    return _save_heat_map(data.with_layers(layers), head, path)


def _choose_layer(data: ViewerData, layers: Sequence[ViewerLayer], medium: Medium) -> ViewerLayer | None:
    """Return the layer that a figure of a medium shows, as the viewer does: the opening, or the last one."""
    matches = [layer for layer in layers if medium.matches(layer)]
    if data.opening is not None and data.layers[data.opening.layer] in matches:
        return data.layers[data.opening.layer]
    singles = [layer for layer in matches if not layer.mean_of]
    return next(reversed(singles or matches), None)


def _select_layers(layers: Sequence[ViewerLayer], pattern: str | None, head: int | None) -> list[ViewerLayer]:
    is_mean = pattern == MEAN_LAYER
    selected = [
        layer
        for layer in layers
        if (bool(layer.mean_of) if is_mean else pattern is None or matches_pattern(layer.name, pattern))
    ]
    if is_mean and not selected:
        raise InputError("--layer mean: no two layers have the same queries and keys; name one: " + layers[0].name)
    if head is not None and not is_mean:  # a mean over layers has no heads
        selected = [layer for layer in selected if not layer.mean_of]
    if not selected:
        suggestion = suggest_name(str(pattern), [layer.name for layer in layers], "the layers")
        raise InputError(f"there is no layer {pattern!r}{suggestion}")
    for layer in selected:
        if head is not None and layer.mean_of:
            raise InputError(f"--layer mean is the mean over all heads, and head {head} was requested; name a layer")
        if head is not None and head not in layer.heads:
            raise InputError(f"{layer.name} has {len(layer.heads)} heads, and head {head} was requested")
    return selected


def _check_figure_path(path: Path, is_comparison: bool) -> None:
    if path.suffix not in IMAGE_SUFFIXES:
        raise InputError(f"--out {path}: an .html file or a figure ({', '.join(IMAGE_SUFFIXES)}) is expected")
    if is_comparison:
        raise InputError(f"--out {path}: a figure shows one map, and there are two; use an .html file")


def _compute_mean_weights(
    layer: ViewerLayer, head: int | None, rows: slice | None = None, *, without_sinks: bool
) -> FloatArray:
    """Return the weights of a head, or the mean of all ``(Q, K)``; ``rows`` selects queries."""
    num_queries, num_keys = layer.shape
    span = (0, num_queries) if rows is None else (rows.start, rows.stop)
    without_sinks = without_sinks and bool(layer.sinks)
    return compute_cells(
        layer, TileRequest(0, head, span, (0, num_keys), quantity="weights", without_sinks=without_sinks)
    )


def _save_heat_map(data: ViewerData, head: int | None, path: Path) -> Path:
    """Save the map that the viewer opens with, or this head of it."""
    opening = Opening(0, head) if len(data.layers) == 1 else choose_opening(data)
    layer = data.layers[opening.layer]
    rows, cols = layer.shape
    if max(rows, cols) > MAX_FIGURE_TOKENS:
        raise InputError(f"a map of {rows} × {cols} tokens is too large for a figure: use an .html file or the viewer")
    without_sinks = data.hides_sinks and bool(layer.sinks)
    parts = [describe_head(layer, head), f"{layer.kind}-attention", opening.reason if head is None else ""]
    if without_sinks:
        parts.append(SINK_FREE_NOTE)
    return draw_heat_map(
        _compute_mean_weights(layer, head, without_sinks=without_sinks),
        list_row_labels(layer),
        layer.col_texts,
        path,
        title=data.title,
        subtitle=list(filter(None, parts)),
        first_generated=layer.first_generated,
        spans=layer.spans,
        hidden_columns=layer.sinks if without_sinks else (),
    )


def describe_head(layer: ViewerLayer, head: int | None) -> str:
    """Return what is shown of a layer, in words."""
    if layer.mean_of:
        return f"{layer.name}, all heads"
    if head is None and len(layer.heads) > 1:
        return f"{layer.name}, mean of {len(layer.heads)} heads"
    return f"{layer.name}, head {layer.heads[0] if head is None else head}"


def list_row_labels(layer: ViewerLayer) -> list[str]:
    """Return the labels of the queries; in cross-attention with the token that each produced."""
    if layer.kind != "cross" or layer.row_outputs is None:
        return layer.row_texts
    return [f"{read} → {output}" for read, output in zip(layer.row_texts, layer.row_outputs, strict=True)]
