"""Look at a model twice: as it is, and without some heads or edges, to see whether they matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from jumok.errors import InputError
from jumok.look.viewer.viewer_data import ViewerData
from jumok.look.views.ablation import AttentionEdge, knock_out

__all__ = ["compare_with_ablation", "parse_ablations"]

Ablations = Mapping[str, list[int | AttentionEdge]]  # what is knocked out, by layer
ABLATION_PATTERN = re.compile(
    r"(?P<layer>.+?):(?:(?P<only>\d{1,9})|(?:(?P<head>\d{1,9}):)?(?P<query>\d{1,9})-(?P<key>\d{1,9}))"
)


def parse_ablations(texts: Sequence[str]) -> dict[str, list[int | AttentionEdge]]:
    """What :func:`jumok.knock_out` takes, from text: a head, an edge in all heads, an edge in one.

    >>> read(["encoder.0:1", "encoder.0:8-2", "encoder.1:3:8-2"])
    {'encoder.0': [1, (8, 2)], 'encoder.1': [(3, 8, 2)]}
    """
    found: dict[str, list[int | AttentionEdge]] = {}
    for one in texts:
        match = ABLATION_PATTERN.fullmatch(one)
        if match is None:
            raise InputError(
                f"--without {one}: a layer with a head, LAYER:1, with an edge from token 8 to token 2, "
                "LAYER:8-2, or with an edge in one head, LAYER:1:8-2, is expected"
            )
        layer, only, *edge = match.groups()
        numbers = tuple(int(number) for number in edge if number is not None)
        found.setdefault(layer, []).append(numbers if only is None else int(only))  # type: ignore[arg-type]
    return found


def compare_with_ablation(
    model: nn.Module, ablations: Ablations | None, build_viewer_data: Callable[[], ViewerData]
) -> list[ViewerData]:
    """What ``build_viewer_data()`` sees of the model; and if something is to be taken out, a second time without it."""
    first = build_viewer_data()
    if not ablations:
        return [replace(first, label="")]
    with knock_out(model, ablations):
        second = build_viewer_data()
    if (retell := second.resynthesize) is not None:

        def retold(weights: list[float]) -> ViewerData:
            with knock_out(model, ablations):
                return retell(weights)

        second = replace(second, resynthesize=retold)
    names = ("before", "after")
    return [
        replace(scene, label=", ".join(filter(None, (name, scene.label))))
        for name, scene in zip(names, (first, second), strict=True)
    ]
