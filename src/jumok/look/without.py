"""Look at a model twice: as it is, and without some heads or edges, to see whether they matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from jumok.errors import InputError
from jumok.look.knock import Edge, knock_out
from jumok.look.scene import Scene

__all__ = ["before_and_after", "read"]

Out = Mapping[str, list[int | Edge]]  # what is knocked out, by layer
ONE = re.compile(
    r"(?P<layer>.+?):(?:(?P<only>\d{1,9})|(?:(?P<head>\d{1,9}):)?(?P<query>\d{1,9})-(?P<key>\d{1,9}))"
)


def read(given: Sequence[str]) -> dict[str, list[int | Edge]]:
    """What :func:`jumok.knock_out` takes, from text: a head, an edge in all heads, an edge in one.

    >>> read(["encoder.0:1", "encoder.0:8-2", "encoder.1:3:8-2"])
    {'encoder.0': [1, (8, 2)], 'encoder.1': [(3, 8, 2)]}
    """
    found: dict[str, list[int | Edge]] = {}
    for one in given:
        match = ONE.fullmatch(one)
        if match is None:
            raise InputError(
                f"--without {one}: a layer with a head, LAYER:1, with an edge from token 8 to token 2, "
                "LAYER:8-2, or with an edge in one head, LAYER:1:8-2, is expected"
            )
        layer, only, *edge = match.groups()
        numbers = tuple(int(number) for number in edge if number is not None)
        found.setdefault(layer, []).append(numbers if only is None else int(only))  # type: ignore[arg-type]
    return found


def before_and_after(model: nn.Module, without: Out | None, look: Callable[[], Scene]) -> list[Scene]:
    """What ``look()`` sees of the model; and if something is to be taken out, a second time without it."""
    first = look()
    if not without:
        return [replace(first, label="")]
    with knock_out(model, without):
        second = look()
    if (retell := second.retell) is not None:

        def retold(weights: list[float]) -> Scene:
            with knock_out(model, without):
                return retell(weights)

        second = replace(second, retell=retold)
    names = ("before", "after")
    return [
        replace(scene, label=", ".join(filter(None, (name, scene.label))))
        for name, scene in zip(names, (first, second), strict=True)
    ]
