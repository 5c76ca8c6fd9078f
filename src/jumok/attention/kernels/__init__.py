"""Triton kernels: additive attention, short packed sequences, pooled maps. Only where Triton is installed."""

from .additive import additive_scores
from .step import Shared

__all__ = ["Shared", "additive_scores"]
