"""A scene: the layers, heads, token texts and numbers that the viewer shows, wherever they come from.

>>> scene = Scene.of_weights({"decoder": torch.eye(2)}, rows=["이것은", "예문이다"], cols=["an", "example"])
>>> unpack(answer([scene], Request(layer=0, head=0, rows=(0, 2), cols=(0, 1))))
array([[1.],
       [0.]], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.errors import InputError
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.attended_document import document_to_json as told_document
from jumok.look.viewer.attended_image import AttendedImage, explain_no_match, image_to_json, matches_any_layer
from jumok.look.viewer.synthesized_speech import (
    StyleTokenWeights,
    SynthesizedSpeech,
    speech_to_json,
    style_to_json,
)
from jumok.look.viewer.tiles import FloatArray, TileRequest, pack

__all__ = [
    "ArrayWeightSource",
    "AttendedImage",
    "StyleTokenWeights",
    "SynthesizedSpeech",
    "ViewerData",
    "ViewerLayer",
    "WeightSource",
    "answer_request",
    "as_viewer_data_tuple",
    "build_manifest",
]

MANIFEST_FORMAT = 1
WeightArray: TypeAlias = Tensor | NDArray[Any]


class WeightSource(Protocol):
    """The numbers of one layer, for one sequence of a batch. What is big is never computed as a whole."""

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> WeightArray:
        """Pooled to at most size cells a side: the mean over a cell's queries of the weight on its keys."""
        ...

    def weights(self, head: int, rows: slice, cols: slice) -> WeightArray:
        """Every weight of a rectangle ``(row_labels, col_labels)``."""
        ...

    def received_weight(self, head: int, rows: slice) -> WeightArray:
        """The summed weight that each key gets from these queries ``(K,)``."""
        ...


@dataclass(frozen=True, eq=False)
class ViewerLayer:
    """One attention layer: ``shape`` is (queries, keys); texts may be None, then tokens have numbers only."""

    name: str
    kind: str  # "self", "cross" or "channel", as one says it
    shape: tuple[int, int]
    heads: tuple[int, ...]
    source: WeightSource
    row_labels: Sequence[str] | None = None
    col_labels: Sequence[str] | None = None


@dataclass(frozen=True, eq=False)
class ViewerData:
    """All that is shown of one run of a model."""

    layers: tuple[ViewerLayer, ...]
    title: str = ""
    label: str = ""  # where two are compared: "before", "after"
    image: AttendedImage | None = None
    speech: SynthesizedSpeech | None = None
    document: AttendedDocument | None = None  # where there is one, the viewer opens with it
    style: StyleTokenWeights | None = None  # of the speech
    # The same said anew, with these weights of the style tokens; viewers that have Python behind them ask it.
    resynthesize: Callable[[list[float]], ViewerData] | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError(
                "a scene without layers came; expected at least one attention to look at "
                "(Scene.of_document makes one of a document's weights)"
            )
        for layer in self.layers:
            _check_layer(layer)
        if self.image is not None and not matches_any_layer(self.image, self.layers):
            raise InputError(explain_no_match(self.image, self.layers))
        if self.speech is not None and not _has_speech_layer(self.layers, self.speech):
            sizes = ", ".join(f"{layer.name} {layer.shape[0]}" for layer in self.layers[:8])
            raise InputError(
                f"a spectrogram of {self.speech.num_frames} frames, {self.speech.frames_per_step} a step, came with these "
                f"queries: {sizes}; expected a layer with {self.speech.num_steps}, one for each step"
            )
        if self.style is not None and self.speech is None:
            raise InputError("a style came without speech; expected the speech that was said with it")
        if self.resynthesize is not None and self.style is None:
            raise InputError("retell came without a style; expected the tokens whose weights it takes")

    def with_layers(self, layers: Sequence[ViewerLayer]) -> ViewerData:
        """The same with other layers; without the picture, or the speech, that no layer is over any more."""
        gone: dict[str, Any] = {}
        if self.image is not None and not matches_any_layer(self.image, layers):
            gone |= {"picture": None}
        if self.speech is not None and not _has_speech_layer(layers, self.speech):
            gone |= {"speech": None, "style": None, "retell": None}
        return replace(self, layers=tuple(layers), **gone)

    @classmethod
    def from_captures(
        cls,
        captures: Iterable[Any],
        *,
        batch: int = 0,
        row_labels: Sequence[str] | None = None,
        col_labels: Sequence[str] | None = None,
        title: str = "",
        label: str = "",
        image: AttendedImage | None = None,
        speech: SynthesizedSpeech | None = None,
    ) -> ViewerData:
        """What :func:`jumok.watch` saw of one sequence of the batch; texts given here go before its own."""
        layers = []
        for entry in captures:
            size, heads, queries, keys = entry.shape
            if not 0 <= batch < size:
                raise InputError(f"batch={batch} came; {entry.name} saw {size} sequences: 0 to {size - 1}")
            down, along = (
                _get_labels(entry, "rows", batch, row_labels),
                _get_labels(entry, "cols", batch, col_labels),
            )
            if entry.kind == "channel":  # no tokens stand along its axes
                down = along = None
            layers.append(
                ViewerLayer(
                    name=entry.name,
                    kind=f"causal {entry.kind}" if getattr(entry, "causal", False) else str(entry.kind),
                    shape=(_trim_length(queries, down), _trim_length(keys, along)),
                    heads=tuple(range(heads)),
                    source=_CapturedWeightSource(entry, batch),
                    row_labels=down,
                    col_labels=along,
                )
            )
        return cls(tuple(layers), title, label, image, speech)

    @classmethod
    def from_weights(
        cls,
        weights: Mapping[str, WeightArray],
        *,
        row_labels: Sequence[str] | None = None,
        col_labels: Sequence[str] | None = None,
        kind: str = "cross",
        title: str = "",
        label: str = "",
        image: AttendedImage | None = None,
        speech: SynthesizedSpeech | None = None,
        style: StyleTokenWeights | None = None,
        resynthesize: Callable[[list[float]], ViewerData] | None = None,
    ) -> ViewerData:
        """From plain weights ``(Q, K)`` or ``(H, Q, K)`` by the name of the layer.

        Weights beyond the texts are padding, and are left out.
        """
        layers = []
        for name, given in weights.items():
            source = ArrayWeightSource(given)
            heads, queries, keys = source.array.shape
            shape = (_trim_length(queries, row_labels), _trim_length(keys, col_labels))
            layers.append(ViewerLayer(name, kind, shape, tuple(range(heads)), source, row_labels, col_labels))
        return cls(tuple(layers), title, label, image, speech, style=style, resynthesize=resynthesize)

    @classmethod
    def from_document(cls, document: AttendedDocument, *, title: str = "", label: str = "") -> ViewerData:
        """A text with what was looked at in it. Its weights are a layer too: hops down, words across."""
        shape = (document.num_hops, len(document.words))
        rows = [f"hop {n}" for n in range(document.num_hops)]
        layer = ViewerLayer(
            "attention", "pooling", shape, (0,), ArrayWeightSource(document.weights), rows, document.words
        )
        return cls((layer,), title, label, document=document)


class ArrayWeightSource:
    """Weights ``(H, Q, K)`` or ``(Q, K)`` that are there as a whole."""

    def __init__(self, weights: WeightArray) -> None:
        cells = to_float32_array(weights)
        if cells.ndim == 2:
            cells = cells[None]
        if cells.ndim != 3 or not cells.size:
            raise InputError(f"weights of shape {tuple(weights.shape)} came; expected (Q, K) or (H, Q, K)")
        if not np.isfinite(cells).all():
            raise InputError("the weights hold NaN or infinity; a map cannot be drawn of these")
        self.array = cells

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> FloatArray:
        part = self.array[head, rows, cols]
        tall, wide = (_compute_cell_edges(length, size) for length in part.shape)
        summed = np.add.reduceat(np.add.reduceat(part, tall[:-1], axis=0), wide[:-1], axis=1)
        return np.asarray(summed / np.diff(tall)[:, None], np.float32)

    def weights(self, head: int, rows: slice, cols: slice) -> FloatArray:
        return self.array[head, rows, cols]

    def received_weight(self, head: int, rows: slice) -> FloatArray:
        return np.asarray(self.array[head, rows].sum(0), np.float32)


class _CapturedWeightSource:
    """One entry of what was seen, for one sequence of its batch."""

    def __init__(self, layer: Any, batch_index: int) -> None:
        self.layer, self.batch_index = layer, batch_index
        self._received_weight: FloatArray | None = None  # of all heads: they cost one pass together

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> WeightArray:
        found: WeightArray = self.layer.map(
            batch=self.batch_index, head=head, rows=rows, cols=cols, size=size
        )
        return found

    def weights(self, head: int, rows: slice, cols: slice) -> WeightArray:
        found: WeightArray = self.layer.weights(batch=self.batch_index, head=head, rows=rows, cols=cols)
        return found.reshape(found.shape[-2:])

    def received_weight(self, head: int, rows: slice) -> FloatArray:
        if rows.stop < self.layer.shape[2]:  # what follows is padding; such batches are of short sequences
            keys = slice(0, self.layer.shape[3])
            parts = (slice(n, min(n + 64, rows.stop)) for n in range(rows.start, rows.stop, 64))
            sums = [to_float32_array(self.weights(head, part, keys)).sum(0) for part in parts]
            return np.asarray(np.sum(sums, axis=0), np.float32)
        if self._received_weight is None:
            self._received_weight = to_float32_array(self.layer.received(batch=self.batch_index))
        return np.asarray(self._received_weight[head])


def as_viewer_data_tuple(viewer_data: ViewerData | Sequence[ViewerData]) -> tuple[ViewerData, ...]:
    """One scene, or two that are compared, as a tuple."""
    both = (viewer_data,) if isinstance(viewer_data, ViewerData) else tuple(viewer_data)
    if not 1 <= len(both) <= 2:
        raise InputError(f"{len(both)} scenes came; expected one, or two to compare")
    return both


def build_manifest(viewer_data: Sequence[ViewerData]) -> dict[str, Any]:
    """All but the numbers, as plain JSON. Texts that layers share are there once."""
    texts: list[list[str]] = []
    places: dict[tuple[str, ...], int] = {}

    def place(words: Sequence[str] | None) -> int | None:
        if words is None:
            return None
        key = tuple(words)
        if key not in places:
            places[key] = len(texts)
            texts.append(list(key))
        return places[key]

    told = [
        {
            "label": scene.label or (("Before", "After")[n] if len(viewer_data) == 2 else ""),
            "layers": [
                {
                    "name": layer.name,
                    "kind": layer.kind,
                    "shape": list(layer.shape),
                    "heads": list(layer.heads),
                    "mean": len(layer.heads) > 1,
                    "rows": place(layer.row_labels and layer.row_labels[: layer.shape[0]]),
                    "cols": place(layer.col_labels and layer.col_labels[: layer.shape[1]]),
                    "finest": 0,  # the first zoom there is; more than 0 only in a saved file of a long map
                }
                for layer in scene.layers
            ],
            "picture": scene.image and image_to_json(scene.image),
            "speech": scene.speech and speech_to_json(scene.speech),
            "style": scene.style
            and style_to_json(scene.style, can_resynthesize=scene.resynthesize is not None),
            "document": scene.document and told_document(scene.document),
        }
        for n, scene in enumerate(viewer_data)
    ]
    return {"format": MANIFEST_FORMAT, "title": viewer_data[0].title, "texts": texts, "scenes": told}


def answer_request(viewer_data: Sequence[ViewerData], request: TileRequest) -> bytes:
    """The packed numbers that a request asks for; InputError if there are none such."""
    scene = _get_item(viewer_data, request.data_index, "scene")
    layer = _get_item(scene.layers, request.layer, "layer")
    request.check(layer.shape)
    if request.head is not None and request.head not in layer.heads:
        raise InputError(
            f"head={request.head} came; {layer.name} has {len(layer.heads)} heads: "
            f"{', '.join(map(str, layer.heads[:64]))}"
        )
    heads = layer.heads if request.head is None else (request.head,)
    cells = to_float32_array(_compute_head(layer, heads[0], request))
    for head in heads[1:]:
        cells = cells + to_float32_array(_compute_head(layer, head, request))
    return pack(
        cells / np.float32(len(heads)) if len(heads) > 1 else cells, exact=request.quantity == "weights"
    )


def to_float32_array(weights: WeightArray) -> FloatArray:
    """As float32 on the host, wherever it was."""
    if isinstance(weights, Tensor):
        return weights.detach().to("cpu", torch.float32).numpy()
    return np.asarray(weights, np.float32)


def _compute_head(layer: ViewerLayer, head: int, request: TileRequest) -> WeightArray:
    rows, cols = slice(*request.rows), slice(*request.cols)
    if request.quantity == "map":
        return layer.source.pooled_map(head, rows, cols, request.size)
    if request.quantity == "weights":
        return layer.source.weights(head, rows, cols)
    queries = layer.shape[0]
    return to_float32_array(layer.source.received_weight(head, slice(0, queries)))[None, cols] / np.float32(
        queries
    )


def _get_item(items: Sequence[Any], index: int, name: str) -> Any:
    if not 0 <= index < len(items):
        raise InputError(f"{name}={index} came; there are {len(items)}: 0 to {len(items) - 1}")
    return items[index]


def _compute_cell_edges(length: int, size: int) -> NDArray[np.int64]:
    """Where cells begin and the last one ends: as even as whole numbers allow."""
    cells = min(length, size)
    return np.arange(cells + 1) * length // cells


def _trim_length(length: int, labels: Sequence[str] | None) -> int:
    return length if labels is None else min(length, len(labels))


def _get_labels(layer: Any, name: str, batch: int, labels: Sequence[str] | None) -> Sequence[str] | None:
    """The texts along an axis: those given, or those the entry has, for all sequences or for each one."""
    found = labels if labels is not None else getattr(layer, name, None)
    if found is not None and len(found) and not isinstance(found[0], str):
        found = found[batch]
    return found


def _has_speech_layer(layers: Sequence[ViewerLayer], speech: SynthesizedSpeech) -> bool:
    """Whether the queries of a layer are the steps of the speech. The viewer (about.js) has the same rule."""
    return any(layer.shape[0] == speech.num_steps and layer.kind != "channel" for layer in layers)


def _check_layer(layer: ViewerLayer) -> None:
    if min(layer.shape) < 1 or not layer.heads:
        raise InputError(
            f"{layer.name} has {layer.shape[0]} queries, {layer.shape[1]} keys and {len(layer.heads)} heads; "
            "expected at least one of each"
        )
    for side, texts, length in (
        ("rows", layer.row_labels, layer.shape[0]),
        ("cols", layer.col_labels, layer.shape[1]),
    ):
        if texts is not None and len(texts) != length:
            raise InputError(
                f"{layer.name}: {len(texts)} {side} texts came for {length} tokens; expected one each"
            )
