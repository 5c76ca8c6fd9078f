"""The data of a viewer: layers, heads, token texts and weights, from any source.

>>> from jumok.look.viewer.tiles import unpack
>>> data = ViewerData.from_weights(
...     {"decoder": torch.eye(2)}, row_labels=["이것은", "예문이다"], col_labels=["an", "example"]
... )
>>> unpack(answer_request([data], TileRequest(layer=0, head=0, rows=(0, 2), cols=(0, 1))))
array([[1.],
       [0.]], dtype=float32)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.errors import InputError
from jumok.look.viewer.attended_audio import AttendedAudio
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.attended_image import AttendedImage as AttendedImage  # re-exported
from jumok.look.viewer.attended_image import ImageLayerTable, ImageMedium
from jumok.look.viewer.medium import Medium
from jumok.look.viewer.sink_filter import SinkFreeWeights
from jumok.look.viewer.synthesized_speech import StyleTokenWeights, SynthesizedSpeech
from jumok.look.viewer.tiles import TILE_SIZE, FloatArray, TileRequest, WeightArray, pack, to_float32_array
from jumok.look.viewer.token_marks import LabelledSpan, find_sinks
from jumok.look.views import sampling
from jumok.look.views.pooling import build_pooling_axes

if TYPE_CHECKING:
    from jumok.look.capture.captures import CapturedLayer

MANIFEST_FORMAT = 4
MAX_CPU_PAIRS = 1 << 27  # of queries and keys that one request computes on a CPU
MEDIA = ("document", "image", "speech", "audio")  # fields of ViewerData, and entries of an item of the manifest


class WeightSource(Protocol):
    """The weights of one layer, for one sequence of a batch. Large maps are never computed as a whole."""

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> WeightArray:
        """Return at most ``size`` cells a side: the mean over a cell's queries of the weight on its keys."""
        ...

    def weights(self, head: int, rows: slice | NDArray[np.int64], cols: slice) -> WeightArray:
        """Return all weights of a rectangle ``(rows, cols)``; of a source with ``max_rows`` also of any rows."""
        ...

    def received_weight(self, head: int, rows: slice) -> WeightArray:
        """Return the total weight that each key receives from these queries ``(K,)``."""
        ...


@dataclass(frozen=True, eq=False)
class ViewerLayer:
    """One attention layer: ``shape`` is (queries, keys); without labels, tokens are numbered."""

    name: str
    kind: str  # "self", "cross" or "channel", as it is displayed
    shape: tuple[int, int]
    heads: tuple[int, ...]
    source: WeightSource
    row_labels: Sequence[str] | None = None
    col_labels: Sequence[str] | None = None
    first_generated: tuple[int | None, int | None] = (None, None)  # query and key from which on tokens are generated
    row_outputs: Sequence[str] | None = None  # of a decoder: the token that each query produced, or that came next
    spans: tuple[tuple[LabelledSpan, ...], tuple[LabelledSpan, ...]] = ((), ())  # of the queries and of the keys
    mean_of: int = 0  # number of layers whose mean it is; 0: it is one layer

    def __post_init__(self) -> None:
        num_queries, num_keys = self.shape
        if min(self.shape) < 1 or not self.heads:
            raise InputError(
                f"{self.name} has {num_queries} queries, {num_keys} keys and {len(self.heads)} heads; "
                "expected at least one of each"
            )
        for axis, labels, length in (("rows", self.row_labels, num_queries), ("cols", self.col_labels, num_keys)):
            if labels is not None and len(labels) != length:
                raise InputError(
                    f"{self.name}: {len(labels)} {axis} texts given for {length} tokens; expected one each"
                )
        if self.row_outputs is not None and len(self.row_outputs) != num_queries:
            raise InputError(
                f"{self.name}: {len(self.row_outputs)} row_outputs given for {num_queries} queries; expected one each"
            )
        for spans, length in zip(self.spans, self.shape, strict=True):
            for span in spans:
                if not 0 <= span.start < span.stop <= length:
                    raise InputError(f"{self.name}: {span} lies outside of its {length} tokens")

    @classmethod
    def from_captured(
        cls,
        layer: CapturedLayer,
        batch: int = 0,
        *,
        row_labels: Sequence[str] | None = None,
        col_labels: Sequence[str] | None = None,
    ) -> ViewerLayer:
        """Build it from a captured layer, of one sequence of its batch; labels override the captured tokens."""
        size, num_heads, num_queries, num_keys = layer.shape
        if not 0 <= batch < size:
            raise InputError(f"batch={batch} is invalid; {layer.name} has {size} sequences: 0 to {size - 1}")
        rows = cols = None
        if layer.kind != "channel":  # the axes of a channel map are not tokens
            rows = _get_labels(layer.query_tokens, batch) if row_labels is None else row_labels
            cols = _get_labels(layer.key_tokens, batch) if col_labels is None else col_labels
        return cls(
            name=layer.name,
            kind=f"causal {layer.kind}" if layer.is_causal else layer.kind,
            shape=(_trim_length(num_queries, rows), _trim_length(num_keys, cols)),
            heads=tuple(range(num_heads)),
            source=CapturedWeightSource(layer, batch),
            row_labels=rows,
            col_labels=cols,
        )

    @property
    def row_texts(self) -> list[str]:
        """The labels of the queries, or their numbers."""
        return list(map(str, range(self.shape[0])) if self.row_labels is None else self.row_labels)

    @property
    def col_texts(self) -> list[str]:
        """The labels of the keys, or their numbers."""
        return list(map(str, range(self.shape[1])) if self.col_labels is None else self.col_labels)

    @property
    def is_self(self) -> bool:
        """Whether a query is the token of the key with its number."""
        return self.kind in ("self", "causal self") and self.shape[0] == self.shape[1]

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """The keys that usually are attention sinks: special tokens and, for causal attention, the first one."""
        return find_sinks(self.col_labels, self.shape[1], is_causal=self.kind == "causal self")

    @cached_property
    def sink_free_weights(self) -> SinkFreeWeights:
        """The weights without the sinks."""
        return SinkFreeWeights(self)

    def compute_weights(self, head: int) -> FloatArray:
        """Return all weights of a head ``(Q, K)``."""
        num_queries, num_keys = self.shape
        return to_float32_array(self.source.weights(head, slice(0, num_queries), slice(0, num_keys)))


@dataclass(frozen=True)
class Opening:
    """What is shown first: a layer, by its index, and a head; None is the mean of its heads."""

    layer: int
    head: int | None
    reason: str = ""  # why, in a few words


@dataclass(frozen=True, eq=False)
class ViewerData:
    """The data that is shown of one run of a model."""

    layers: tuple[ViewerLayer, ...]
    title: str = ""
    label: str = ""  # in a comparison: "before", "after"
    image: ImageMedium | None = None
    speech: SynthesizedSpeech | None = None
    document: AttendedDocument | None = None  # if there is one, the viewer opens with it
    style: StyleTokenWeights | None = None  # of the speech
    # Synthesises the speech again, with these style token weights. Called by viewers with a Python process.
    resynthesize: Callable[[list[float]], ViewerData] | None = None
    audio: AttendedAudio | None = None
    opening: Opening | None = None  # see preparation.py
    hides_sinks: bool = False  # whether it is first shown without attention sinks

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError(
                "viewer data without layers; expected at least one attention layer "
                "(ViewerData.from_document builds one from the weights of a document)"
            )
        for medium in self.media.values():
            if not any(map(medium.matches, self.layers)):
                raise InputError(medium.describe_mismatch(self.layers))
        if self.style is not None and self.speech is None:
            raise InputError("a style given without speech; expected the speech that has this style")
        if self.resynthesize is not None and self.style is None:
            raise InputError("resynthesize given without a style; expected the tokens whose weights it takes")

    @property
    def media(self) -> dict[str, Medium]:
        """The media that there are, by name."""
        return {name: medium for name in MEDIA if (medium := getattr(self, name)) is not None}

    def with_layers(self, layers: Sequence[ViewerLayer]) -> ViewerData:
        """Return the data with other layers; without the media that match none of them, and without an opening."""
        dropped: dict[str, Any] = {
            name: None for name, medium in self.media.items() if not any(map(medium.matches, layers))
        }
        if "speech" in dropped:
            dropped |= {"style": None, "resynthesize": None}
        return replace(self, layers=tuple(layers), opening=None, **dropped)

    @classmethod
    def from_captures(
        cls,
        captures: Iterable[CapturedLayer],
        *,
        batch: int = 0,
        row_labels: Sequence[str] | None = None,
        col_labels: Sequence[str] | None = None,
        title: str = "",
        label: str = "",
        image: ImageMedium | None = None,
        speech: SynthesizedSpeech | None = None,
    ) -> ViewerData:
        """Build it from :func:`jumok.watch` captures of one sequence; labels override the captured tokens."""
        layers = tuple(
            ViewerLayer.from_captured(layer, batch, row_labels=row_labels, col_labels=col_labels) for layer in captures
        )
        return cls(layers, title, label, image, speech)

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
        image: ImageMedium | None = None,
        speech: SynthesizedSpeech | None = None,
        style: StyleTokenWeights | None = None,
        resynthesize: Callable[[list[float]], ViewerData] | None = None,
        audio: AttendedAudio | None = None,
    ) -> ViewerData:
        """Build it from weights ``(Q, K)`` or ``(H, Q, K)`` by the name of the layer.

        Weights beyond the labels are padding and are left out.
        """
        layers = []
        for name, layer_weights in weights.items():
            source = ArrayWeightSource(layer_weights)
            num_heads, num_queries, num_keys = source.array.shape
            shape = (_trim_length(num_queries, row_labels), _trim_length(num_keys, col_labels))
            layers.append(ViewerLayer(name, kind, shape, tuple(range(num_heads)), source, row_labels, col_labels))
        return cls(tuple(layers), title, label, image, speech, style=style, resynthesize=resynthesize, audio=audio)

    @classmethod
    def from_document(cls, document: AttendedDocument, *, title: str = "", label: str = "") -> ViewerData:
        """Build it from a text with its weights, which are a layer too: rows are hops, columns are words."""
        shape = (document.num_hops, len(document.words))
        rows = [f"hop {n}" for n in range(document.num_hops)]
        source = ArrayWeightSource(document.weights)
        layer = ViewerLayer("attention", "pooling", shape, (0,), source, rows, document.words)
        return cls((layer,), title, label, document=document)


class ArrayWeightSource:
    """Weights ``(H, Q, K)`` or ``(Q, K)`` in memory."""

    def __init__(self, weights: WeightArray) -> None:
        array = to_float32_array(weights)
        if array.ndim == 2:
            array = array[None]
        if array.ndim != 3 or not array.size:
            raise InputError(f"weights of shape {tuple(weights.shape)} are invalid; expected (Q, K) or (H, Q, K)")
        if not np.isfinite(array).all():
            raise InputError("the weights contain NaN or infinity, which a map cannot show")
        self.array = array

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> FloatArray:
        region = self.array[head, rows, cols]
        row_axis, col_axis = build_pooling_axes(size, len(region), region.shape[1], torch.device("cpu"))
        summed = np.add.reduceat(region, row_axis.starts[:-1].numpy(), axis=0)
        summed = np.add.reduceat(summed, col_axis.starts[:-1].numpy(), axis=1)
        return np.asarray(summed / row_axis.sizes.numpy()[:, None], np.float32)

    def weights(self, head: int, rows: slice | NDArray[np.int64], cols: slice) -> FloatArray:
        return self.array[head, rows, cols]

    def received_weight(self, head: int, rows: slice) -> FloatArray:
        return np.asarray(self.array[head, rows].sum(0), np.float32)


class CapturedWeightSource:
    """One captured layer, for one sequence of its batch.

    On a CPU, long maps are computed from a sample of queries, evenly spaced: of ``max_rows`` for each request, so
    that a request takes about a second at any length. Fewer queries, single weights, and all maps on a GPU are exact.
    """

    def __init__(self, layer: CapturedLayer, batch: int, max_pairs: int | None = None) -> None:
        self.layer, self.batch = layer, batch
        self.max_pairs = MAX_CPU_PAIRS if max_pairs is None else max_pairs  # that a request computes

    def limit_pairs(self, num_heads: int) -> CapturedWeightSource:
        """Return a source for requests that compute so many heads, each from fewer queries."""
        return CapturedWeightSource(self.layer, self.batch, self.max_pairs // num_heads)

    @functools.cached_property
    def max_rows(self) -> int | None:
        """The number of queries that a request is computed from; None: all of them."""
        _, _, num_queries, num_keys = self.layer.shape
        if num_queries * num_keys <= self.max_pairs or self.layer.attention.query.device.type != "cpu":
            return None
        return max(TILE_SIZE, self.max_pairs // num_keys)

    @property
    def query_width(self) -> int | None:
        """The width of queries and keys, if the scores are their product."""
        attention = self.layer.attention
        return None if attention.score_function or attention.score_mod else int(attention.query.shape[3])

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> Tensor:
        num_rows = rows.stop - rows.start
        if self.max_rows is not None and num_rows > max(self.max_rows, size):
            rows_per_cell = max(1, self.max_rows // min(size, num_rows))
            return sampling.compute_sampled_map(self.layer.attention, self.batch, head, rows, cols, size, rows_per_cell)
        return self.layer.pooled_map(batch=self.batch, head=head, rows=rows, cols=cols, size=size)

    def weights(self, head: int, rows: slice | NDArray[np.int64], cols: slice) -> Tensor:
        selected = rows if isinstance(rows, slice) else rows.tolist()
        return self.layer.weights(batch=self.batch, head=head, rows=selected, cols=cols)

    def received_weight(self, head: int, rows: slice) -> Tensor:
        if self.max_rows is not None:
            return sampling.compute_sampled_received_weight(self.layer.attention, self.batch, head, rows, self.max_rows)
        if rows.stop < self.layer.shape[2]:  # the rest is padding; sequences of such batches are short
            return self.layer.weights(batch=self.batch, head=head, rows=rows).sum(0)
        return self.layer.received_weight(batch=self.batch, head=head)


def as_viewer_data_tuple(viewer_data: ViewerData | Sequence[ViewerData]) -> tuple[ViewerData, ...]:
    """Return one item, or two that are compared, as a tuple."""
    items = (viewer_data,) if isinstance(viewer_data, ViewerData) else tuple(viewer_data)
    if not 1 <= len(items) <= 2:
        raise InputError(f"{len(items)} items of viewer data are invalid; expected one, or two to compare")
    return items


def build_manifest(viewer_data: Sequence[ViewerData]) -> dict[str, Any]:
    """Return everything but the weights, as JSON. Texts that layers share are stored once."""
    texts: list[list[str]] = []
    indices: dict[tuple[str, ...], int] = {}

    def store_texts(words: Sequence[str] | None) -> int | None:
        if words is None:
            return None
        index = indices.setdefault(tuple(words), len(texts))
        if index == len(texts):
            texts.append(list(words))
        return index

    items = []
    for n, item in enumerate(viewer_data):
        image_layers = ImageLayerTable(item.image)
        items.append(
            {
                "label": item.label or (("Before", "After")[n] if len(viewer_data) == 2 else ""),
                "layers": [
                    {
                        "name": layer.name,
                        "kind": layer.kind,
                        "shape": list(layer.shape),
                        "heads": list(layer.heads),
                        "has_mean": len(layer.heads) > 1,
                        "row_labels": store_texts(layer.row_labels),
                        "col_labels": store_texts(layer.col_labels),
                        "first_generated": list(layer.first_generated),
                        "row_outputs": store_texts(layer.row_outputs),
                        "spans": [list(map(list, spans)) for spans in layer.spans],
                        "sinks": list(layer.sinks),
                        "mean_of": layer.mean_of,
                        "media": [name for name, medium in item.media.items() if medium.matches(layer)],
                        "image_layer": image_layers.store(layer),
                        # Queries that a long map of a head, or of the mean of the heads, is computed from.
                        "max_rows": sampling.get_max_rows(layer.source),
                        "max_mean_rows": sampling.get_max_rows(sampling.limit_pairs(layer.source, len(layer.heads))),
                        "averaged": None,  # of a mean in a saved file: the heads that the browser averages
                        "detailed_heads": None,  # all, unless a saved file has only an overview of the others
                        "finest_zoom": 0,  # more than 0 only in a saved file of a long map
                    }
                    for layer in item.layers
                ],
                **dict.fromkeys(MEDIA),
                **{name: medium.to_json() for name, medium in item.media.items()},
                "image_layers": image_layers.entries,
                "opening": item.opening and asdict(item.opening),
                "hides_sinks": item.hides_sinks,
                "style": item.style and item.style.to_json(can_resynthesize=item.resynthesize is not None),
            }
        )
    # "rounding" is None if weights are rounded to three digits; see html_file.
    return {
        "format": MANIFEST_FORMAT,
        "title": viewer_data[0].title,
        "rounding": None,
        "texts": texts,
        "data": items,
    }


def answer_request(viewer_data: Sequence[ViewerData], request: TileRequest) -> bytes:
    """Return the packed weights of a request; InputError if they do not exist."""
    data = _get_item(viewer_data, request.data_index, "data")
    layer = _get_item(data.layers, request.layer, "layer")
    request.check(layer.shape)
    if request.head is not None and request.head not in layer.heads:
        raise InputError(
            f"head={request.head} is invalid; {layer.name} has {len(layer.heads)} heads: "
            f"{', '.join(map(str, layer.heads[:64]))}"
        )
    return pack(compute_cells(layer, request), exact=request.quantity == "weights")


def compute_cells(layer: ViewerLayer, request: TileRequest) -> FloatArray:
    """Return the cells of a checked request."""
    if request.without_sinks and layer.sinks:
        return _compute_head_cells(layer.sink_free_weights, request.head, layer.shape[0], request)
    heads = layer.heads if request.head is None else (request.head,)
    source = sampling.limit_pairs(layer.source, len(heads))
    cells = _compute_head_cells(source, heads[0], layer.shape[0], request)
    for head in heads[1:]:
        cells = cells + _compute_head_cells(source, head, layer.shape[0], request)
    return cells / np.float32(len(heads)) if len(heads) > 1 else cells


def _compute_head_cells(source: Any, head: int | None, num_queries: int, request: TileRequest) -> FloatArray:
    rows, cols = slice(*request.rows), slice(*request.cols)
    if request.quantity == "pooled_map":
        return to_float32_array(source.pooled_map(head, rows, cols, request.size))
    if request.quantity == "weights":
        return to_float32_array(source.weights(head, rows, cols))
    received = to_float32_array(source.received_weight(head, slice(0, num_queries)))
    return received[None, cols] / np.float32(num_queries)


def _get_item(items: Sequence[Any], index: int, name: str) -> Any:
    if not 0 <= index < len(items):
        raise InputError(f"{name}={index} is invalid; there are {len(items)}: 0 to {len(items) - 1}")
    return items[index]


def _trim_length(length: int, labels: Sequence[str] | None) -> int:
    return length if labels is None else min(length, len(labels))


def _get_labels(tokens: list[list[str]] | None, batch: int) -> list[str] | None:
    return None if tokens is None else tokens[batch]
