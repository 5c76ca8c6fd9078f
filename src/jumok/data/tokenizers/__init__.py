"""Tokenizers, sentence splitting and word segmentation."""
