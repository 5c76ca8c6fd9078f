"""Batches: token sequences, labelled texts, images with captions, and speech."""
