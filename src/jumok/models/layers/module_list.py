"""Typed lists of modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def build_module_list(modules: Iterable[nn.Module]) -> Any:
    """Build an ``nn.ModuleList`` that can be annotated with the type of its modules."""
    return nn.ModuleList(modules)
