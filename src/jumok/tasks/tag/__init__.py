"""Sequence tagging: a label for each word."""
