"""Attention of a Hugging Face model: find its folder, load it, encode its inputs, capture a forward pass."""
