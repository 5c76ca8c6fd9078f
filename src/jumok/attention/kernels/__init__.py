"""Triton kernels of additive attention. Import this package only where Triton is installed."""

from .additive import additive_scores
from .step import Shared

__all__ = ["Shared", "additive_scores"]
