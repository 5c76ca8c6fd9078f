"""Readers: one module per kind of data set."""
