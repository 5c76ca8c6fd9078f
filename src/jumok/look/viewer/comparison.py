"""Comparison of a model with and without some heads or edges, to see whether they matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from jumok.errors import InputError
from jumok.look.viewer.viewer_data import ViewerData
from jumok.look.views.ablation import AttentionEdge, knock_out

Ablations = Mapping[str, list[int | AttentionEdge]]  # heads and edges to knock out, by layer
ABLATION_PATTERN = re.compile(
    r"(?P<layer>.+?):(?:(?P<only>\d{1,9})|(?:(?P<head>\d{1,9}):)?(?P<query>\d{1,9})-(?P<key>\d{1,9}))"
)


def parse_ablations(texts: Sequence[str]) -> dict[str, list[int | AttentionEdge]]:
    """Parse the targets of :func:`jumok.knock_out`: a head, an edge in all heads, an edge in one head.

    >>> parse_ablations(["encoder.0:1", "encoder.0:8-2", "encoder.1:3:8-2"])
    {'encoder.0': [1, (8, 2)], 'encoder.1': [(3, 8, 2)]}
    """
    ablations: dict[str, list[int | AttentionEdge]] = {}
    for text in texts:
        match = ABLATION_PATTERN.fullmatch(text)
        if match is None:
            raise InputError(
                f"--knock-out {text}: expected a layer with a head, LAYER:1, with an edge from token 8 to "
                "token 2, LAYER:8-2, or with an edge in one head, LAYER:1:8-2"
            )
        layer, only, *edge = match.groups()
        numbers = tuple(int(number) for number in edge if number is not None)
        ablations.setdefault(layer, []).append(numbers if only is None else int(only))  # type: ignore[arg-type]
    return ablations


def compare_with_ablation(
    model: nn.Module, ablations: Ablations | None, build_viewer_data: Callable[[], ViewerData]
) -> list[ViewerData]:
    """Return the data of ``build_viewer_data()``; with ablations, also the data of a second run with them."""
    first = build_viewer_data()
    if not ablations:
        return [replace(first, label="")]
    with knock_out(model, ablations):
        second = build_viewer_data()
    if (resynthesize := second.resynthesize) is not None:

        def resynthesize_ablated(weights: list[float]) -> ViewerData:
            with knock_out(model, ablations):
                return resynthesize(weights)

        second = replace(second, resynthesize=resynthesize_ablated)
    names = ("before", "after")
    return [
        replace(item, label=", ".join(filter(None, (name, item.label))))
        for name, item in zip(names, (first, second), strict=True)
    ]
