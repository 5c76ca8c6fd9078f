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
from jumok.look.document import Document
from jumok.look.document import told as told_document
from jumok.look.picture import Picture, is_over_one, told_picture, why_over_none
from jumok.look.speech import Speech, Style, told_speech, told_style
from jumok.look.tiles import Numbers, Request, pack

__all__ = [
    "Arrays",
    "Layer",
    "Picture",
    "Scene",
    "Source",
    "Speech",
    "Style",
    "answer",
    "as_scenes",
    "manifest",
]

FORMAT = 1
Weights: TypeAlias = Tensor | NDArray[Any]


class Source(Protocol):
    """The numbers of one layer, for one sequence of a batch. What is big is never computed as a whole."""

    def map(self, head: int, rows: slice, cols: slice, size: int) -> Weights:
        """Pooled to at most size cells a side: the mean over a cell's queries of the weight on its keys."""
        ...

    def weights(self, head: int, rows: slice, cols: slice) -> Weights:
        """Every weight of a rectangle ``(rows, cols)``."""
        ...

    def received(self, head: int, rows: slice) -> Weights:
        """The summed weight that each key gets from these queries ``(K,)``."""
        ...


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer: ``shape`` is (queries, keys); texts may be None, then tokens have numbers only."""

    name: str
    kind: str  # "self", "cross" or "channel", as one says it
    shape: tuple[int, int]
    heads: tuple[int, ...]
    source: Source
    rows: Sequence[str] | None = None
    cols: Sequence[str] | None = None


@dataclass(frozen=True, eq=False)
class Scene:
    """All that is shown of one run of a model."""

    layers: tuple[Layer, ...]
    title: str = ""
    label: str = ""  # where two are compared: "before", "after"
    picture: Picture | None = None
    speech: Speech | None = None
    document: Document | None = None  # where there is one, the viewer opens with it
    style: Style | None = None  # of the speech
    # The same said anew, with these weights of the style tokens; viewers that have Python behind them ask it.
    retell: Callable[[list[float]], Scene] | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError(
                "a scene without layers came; expected at least one attention to look at "
                "(Scene.of_document makes one of a document's weights)"
            )
        for layer in self.layers:
            _check(layer)
        if self.picture is not None and not is_over_one(self.picture, self.layers):
            raise InputError(why_over_none(self.picture, self.layers))
        if self.speech is not None and not _speak(self.layers, self.speech):
            sizes = ", ".join(f"{layer.name} {layer.shape[0]}" for layer in self.layers[:8])
            raise InputError(
                f"a spectrogram of {self.speech.frames} frames, {self.speech.step} a step, came with these "
                f"queries: {sizes}; expected a layer with {self.speech.steps}, one for each step"
            )
        if self.style is not None and self.speech is None:
            raise InputError("a style came without speech; expected the speech that was said with it")
        if self.retell is not None and self.style is None:
            raise InputError("retell came without a style; expected the tokens whose weights it takes")

    def with_layers(self, layers: Sequence[Layer]) -> Scene:
        """The same with other layers; without the picture, or the speech, that no layer is over any more."""
        gone: dict[str, Any] = {}
        if self.picture is not None and not is_over_one(self.picture, layers):
            gone |= {"picture": None}
        if self.speech is not None and not _speak(layers, self.speech):
            gone |= {"speech": None, "style": None, "retell": None}
        return replace(self, layers=tuple(layers), **gone)

    @classmethod
    def of(
        cls,
        seen: Iterable[Any],
        *,
        batch: int = 0,
        rows: Sequence[str] | None = None,
        cols: Sequence[str] | None = None,
        title: str = "",
        label: str = "",
        picture: Picture | None = None,
        speech: Speech | None = None,
    ) -> Scene:
        """What :func:`jumok.watch` saw of one sequence of the batch; texts given here go before its own."""
        layers = []
        for entry in seen:
            size, heads, queries, keys = entry.shape
            if not 0 <= batch < size:
                raise InputError(f"batch={batch} came; {entry.name} saw {size} sequences: 0 to {size - 1}")
            down, along = _texts(entry, "rows", batch, rows), _texts(entry, "cols", batch, cols)
            if entry.kind == "channel":  # no tokens stand along its axes
                down = along = None
            layers.append(
                Layer(
                    name=entry.name,
                    kind=f"causal {entry.kind}" if getattr(entry, "causal", False) else str(entry.kind),
                    shape=(_trimmed(queries, down), _trimmed(keys, along)),
                    heads=tuple(range(heads)),
                    source=_Entry(entry, batch),
                    rows=down,
                    cols=along,
                )
            )
        return cls(tuple(layers), title, label, picture, speech)

    @classmethod
    def of_weights(
        cls,
        weights: Mapping[str, Weights],
        *,
        rows: Sequence[str] | None = None,
        cols: Sequence[str] | None = None,
        kind: str = "cross",
        title: str = "",
        label: str = "",
        picture: Picture | None = None,
        speech: Speech | None = None,
        style: Style | None = None,
        retell: Callable[[list[float]], Scene] | None = None,
    ) -> Scene:
        """From plain weights ``(Q, K)`` or ``(H, Q, K)`` by the name of the layer.

        Weights beyond the texts are padding, and are left out.
        """
        layers = []
        for name, given in weights.items():
            source = Arrays(given)
            heads, queries, keys = source.cells.shape
            shape = (_trimmed(queries, rows), _trimmed(keys, cols))
            layers.append(Layer(name, kind, shape, tuple(range(heads)), source, rows, cols))
        return cls(tuple(layers), title, label, picture, speech, style=style, retell=retell)

    @classmethod
    def of_document(cls, document: Document, *, title: str = "", label: str = "") -> Scene:
        """A text with what was looked at in it. Its weights are a layer too: hops down, words across."""
        shape = (document.hops, len(document.words))
        rows = [f"hop {n}" for n in range(document.hops)]
        layer = Layer("attention", "pooling", shape, (0,), Arrays(document.weights), rows, document.words)
        return cls((layer,), title, label, document=document)


class Arrays:
    """Weights ``(H, Q, K)`` or ``(Q, K)`` that are there as a whole."""

    def __init__(self, weights: Weights) -> None:
        cells = numbers(weights)
        if cells.ndim == 2:
            cells = cells[None]
        if cells.ndim != 3 or not cells.size:
            raise InputError(f"weights of shape {tuple(weights.shape)} came; expected (Q, K) or (H, Q, K)")
        if not np.isfinite(cells).all():
            raise InputError("the weights hold NaN or infinity; a map cannot be drawn of these")
        self.cells = cells

    def map(self, head: int, rows: slice, cols: slice, size: int) -> Numbers:
        part = self.cells[head, rows, cols]
        tall, wide = (_edges(length, size) for length in part.shape)
        summed = np.add.reduceat(np.add.reduceat(part, tall[:-1], axis=0), wide[:-1], axis=1)
        return np.asarray(summed / np.diff(tall)[:, None], np.float32)

    def weights(self, head: int, rows: slice, cols: slice) -> Numbers:
        return self.cells[head, rows, cols]

    def received(self, head: int, rows: slice) -> Numbers:
        return np.asarray(self.cells[head, rows].sum(0), np.float32)


class _Entry:
    """One entry of what was seen, for one sequence of its batch."""

    def __init__(self, entry: Any, batch: int) -> None:
        self.entry, self.batch = entry, batch
        self._received: Numbers | None = None  # of all heads: they cost one pass together

    def map(self, head: int, rows: slice, cols: slice, size: int) -> Weights:
        found: Weights = self.entry.map(batch=self.batch, head=head, rows=rows, cols=cols, size=size)
        return found

    def weights(self, head: int, rows: slice, cols: slice) -> Weights:
        found: Weights = self.entry.weights(batch=self.batch, head=head, rows=rows, cols=cols)
        return found.reshape(found.shape[-2:])

    def received(self, head: int, rows: slice) -> Numbers:
        if rows.stop < self.entry.shape[2]:  # what follows is padding; such batches are of short sequences
            keys = slice(0, self.entry.shape[3])
            parts = (slice(n, min(n + 64, rows.stop)) for n in range(rows.start, rows.stop, 64))
            sums = [numbers(self.weights(head, part, keys)).sum(0) for part in parts]
            return np.asarray(np.sum(sums, axis=0), np.float32)
        if self._received is None:
            self._received = numbers(self.entry.received(batch=self.batch))
        return np.asarray(self._received[head])


def as_scenes(scenes: Scene | Sequence[Scene]) -> tuple[Scene, ...]:
    """One scene, or two that are compared, as a tuple."""
    both = (scenes,) if isinstance(scenes, Scene) else tuple(scenes)
    if not 1 <= len(both) <= 2:
        raise InputError(f"{len(both)} scenes came; expected one, or two to compare")
    return both


def manifest(scenes: Sequence[Scene]) -> dict[str, Any]:
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
            "label": scene.label or (("Before", "After")[n] if len(scenes) == 2 else ""),
            "layers": [
                {
                    "name": layer.name,
                    "kind": layer.kind,
                    "shape": list(layer.shape),
                    "heads": list(layer.heads),
                    "mean": len(layer.heads) > 1,
                    "rows": place(layer.rows and layer.rows[: layer.shape[0]]),
                    "cols": place(layer.cols and layer.cols[: layer.shape[1]]),
                    "finest": 0,  # the first zoom there is; more than 0 only in a saved file of a long map
                }
                for layer in scene.layers
            ],
            "picture": scene.picture and told_picture(scene.picture),
            "speech": scene.speech and told_speech(scene.speech),
            "style": scene.style and told_style(scene.style, live=scene.retell is not None),
            "document": scene.document and told_document(scene.document),
        }
        for n, scene in enumerate(scenes)
    ]
    return {"format": FORMAT, "title": scenes[0].title, "texts": texts, "scenes": told}


def answer(scenes: Sequence[Scene], request: Request) -> bytes:
    """The packed numbers that a request asks for; InputError if there are none such."""
    scene = _among(scenes, request.scene, "scene")
    layer = _among(scene.layers, request.layer, "layer")
    request.check(layer.shape)
    if request.head is not None and request.head not in layer.heads:
        raise InputError(
            f"head={request.head} came; {layer.name} has {len(layer.heads)} heads: "
            f"{', '.join(map(str, layer.heads[:64]))}"
        )
    heads = layer.heads if request.head is None else (request.head,)
    cells = numbers(_of_head(layer, heads[0], request))
    for head in heads[1:]:
        cells = cells + numbers(_of_head(layer, head, request))
    return pack(cells / np.float32(len(heads)) if len(heads) > 1 else cells, exact=request.what == "weights")


def numbers(weights: Weights) -> Numbers:
    """As float32 on the host, wherever it was."""
    if isinstance(weights, Tensor):
        return weights.detach().to("cpu", torch.float32).numpy()
    return np.asarray(weights, np.float32)


def _of_head(layer: Layer, head: int, request: Request) -> Weights:
    rows, cols = slice(*request.rows), slice(*request.cols)
    if request.what == "map":
        return layer.source.map(head, rows, cols, request.size)
    if request.what == "weights":
        return layer.source.weights(head, rows, cols)
    queries = layer.shape[0]
    return numbers(layer.source.received(head, slice(0, queries)))[None, cols] / np.float32(queries)


def _among(things: Sequence[Any], number: int, name: str) -> Any:
    if not 0 <= number < len(things):
        raise InputError(f"{name}={number} came; there are {len(things)}: 0 to {len(things) - 1}")
    return things[number]


def _edges(length: int, size: int) -> NDArray[np.int64]:
    """Where cells begin and the last one ends: as even as whole numbers allow."""
    cells = min(length, size)
    return np.arange(cells + 1) * length // cells


def _trimmed(length: int, texts: Sequence[str] | None) -> int:
    return length if texts is None else min(length, len(texts))


def _texts(entry: Any, name: str, batch: int, given: Sequence[str] | None) -> Sequence[str] | None:
    """The texts along an axis: those given, or those the entry has, for all sequences or for each one."""
    found = given if given is not None else getattr(entry, name, None)
    if found is not None and len(found) and not isinstance(found[0], str):
        found = found[batch]
    return found


def _speak(layers: Sequence[Layer], speech: Speech) -> bool:
    """Whether the queries of a layer are the steps of the speech. The viewer (about.js) has the same rule."""
    return any(layer.shape[0] == speech.steps and layer.kind != "channel" for layer in layers)


def _check(layer: Layer) -> None:
    if min(layer.shape) < 1 or not layer.heads:
        raise InputError(
            f"{layer.name} has {layer.shape[0]} queries, {layer.shape[1]} keys and {len(layer.heads)} heads; "
            "expected at least one of each"
        )
    for side, texts, length in (("rows", layer.rows, layer.shape[0]), ("cols", layer.cols, layer.shape[1])):
        if texts is not None and len(texts) != length:
            raise InputError(
                f"{layer.name}: {len(texts)} {side} texts came for {length} tokens; expected one each"
            )
