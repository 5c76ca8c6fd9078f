"""Capture of attention while a model runs."""
