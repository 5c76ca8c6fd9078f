"""Triton kernels: additive attention, short packed sequences, and pooled maps for looking. They need Triton."""

from .additive import additive_scores
from .step import Shared

__all__ = ["Shared", "additive_scores"]
