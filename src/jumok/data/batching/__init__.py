"""Batchers: one module per kind of example."""
