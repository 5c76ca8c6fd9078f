"""Triton kernels: the loss of an output layer. Only where Triton is installed."""
