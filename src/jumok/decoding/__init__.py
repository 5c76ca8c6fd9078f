"""Decoding: greedy search, beam search and sampling for models with ``start``, ``step`` and ``reorder``."""

from jumok.decoding.beam import CoverageScorer, beam_search, coverage_penalty
from jumok.decoding.constraints import LengthLimit, default_max_length
from jumok.decoding.greedy import greedy_search
from jumok.decoding.protocol import DecoderState, Hypothesis, IncrementalDecoder
from jumok.decoding.sampling import sample
from jumok.decoding.streaming import StreamingDecoder, StreamListener

__all__ = [
    "CoverageScorer",
    "DecoderState",
    "Hypothesis",
    "IncrementalDecoder",
    "LengthLimit",
    "StreamListener",
    "StreamingDecoder",
    "beam_search",
    "coverage_penalty",
    "default_max_length",
    "greedy_search",
    "sample",
]
