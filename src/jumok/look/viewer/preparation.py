"""What is added to viewer data before it is shown: means over layers, and the choice of what is shown first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jumok.look.viewer.derived_layers import average_layers
from jumok.look.viewer.opening import choose_opening
from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer


def prepare_for_display(data: ViewerData) -> ViewerData:
    """Add the means over layers and the opening."""
    return add_opening(add_layer_means(data))


def add_layer_means(data: ViewerData) -> ViewerData:
    """Add the means over layers, unless they are there. Those of layers on a recording or images are on them, too."""
    names = {layer.name for layer in data.layers if layer.mean_of}
    groups = [(name, group) for name, group in _group_layers(data) if name not in names]
    if not groups:
        return data
    means = [average_layers([(x, x.heads) for x in group], name, equal_layers=True) for name, group in groups]
    models = {name: group[0].name for name, group in groups}
    media: dict[str, Any] = {name: medium.add_layers(models) for name, medium in data.media.items()}
    return replace(data, layers=(*data.layers, *means), **media)


def add_opening(data: ViewerData) -> ViewerData:
    """Choose the opening, unless it is there, or an image, speech or a document opens."""
    if data.opening is not None or data.media:
        return data
    return replace(data, opening=choose_opening(data))


def _group_layers(data: ViewerData) -> list[tuple[str, list[ViewerLayer]]]:
    """Return groups of two or more layers between the same tokens, and the names of their means."""
    layers = [layer for layer in data.layers if not layer.mean_of]
    groups: dict[tuple[object, ...], list[ViewerLayer]] = {}
    for layer in layers:
        if layer.kind not in ("channel", "pooling"):
            labels = tuple(None if x is None else tuple(x) for x in (layer.row_labels, layer.col_labels))
            positions = tuple(medium.get_positions(layer) for medium in data.media.values())
            groups.setdefault((layer.kind, layer.shape, labels, positions), []).append(layer)
    means = [group for group in groups.values() if len(group) > 1]
    is_whole = len(means) == 1 and len(means[0]) == len(layers)
    return [
        (f"mean of all {len(group)} layers" if is_whole else f"mean of {describe_names(group)}", group)
        for group in means
    ]


def describe_names(layers: Sequence[ViewerLayer]) -> str:
    """Return what the names of layers share, with * for the rest.

    >>> from types import SimpleNamespace as Layer
    >>> describe_names([Layer(name="decoder.0.attention"), Layer(name="decoder.11.attention")])
    'decoder.*.attention'
    """
    parts = [layer.name.split(".") for layer in layers]
    front = _count_shared(parts)
    back = _count_shared([part[front:][::-1] for part in parts])
    middle = ["*"] if any(len(part) > front + back for part in parts) else []
    return ".".join([*parts[0][:front], *middle, *parts[0][len(parts[0]) - back :]])


def _count_shared(names: Sequence[Sequence[str]]) -> int:
    """Return the number of first parts that all names share."""
    return sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False)))
