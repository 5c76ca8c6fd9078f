"""Caches on disk: token ids, image features and spectrograms."""
