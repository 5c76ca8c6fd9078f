"""Triton kernels: additive attention, and pooled maps for looking. Only where Triton is installed."""

from .additive import additive_scores
from .step import Shared

__all__ = ["Shared", "additive_scores"]
