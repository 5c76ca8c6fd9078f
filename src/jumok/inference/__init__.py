"""Inference over many inputs: batches of lines, resumable outputs, engines other than PyTorch."""
