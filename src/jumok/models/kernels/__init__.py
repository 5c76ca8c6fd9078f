"""Triton kernels: cross-entropy, forward attention, GRUs. Imported only if Triton is installed."""
