"""Triton kernels: additive attention, short packed sequences, pooled maps. Only where Triton is installed."""

from jumok.attention.kernels.additive import fused_additive_scores
from jumok.attention.kernels.additive_step import AdditiveStepLoop

__all__ = ["AdditiveStepLoop", "fused_additive_scores"]
