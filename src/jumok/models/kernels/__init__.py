"""Triton kernels: the loss of an output layer, forward attention, GRUs. Only where Triton is installed."""
