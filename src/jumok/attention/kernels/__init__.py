"""Triton kernels: additive attention, short packed sequences, pooled maps. They need Triton."""
