"""Search: from a model's scores to sentences. Knows no model, only ``start``, ``step`` and ``reorder``."""

from jumok.decoding.beam import Coverage, beam, coverage_term
from jumok.decoding.followed import Followed, Listener
from jumok.decoding.greedy import greedy
from jumok.decoding.protocol import Hypothesis, Model, State
from jumok.decoding.rules import Limit, twice_plus_20
from jumok.decoding.sampling import sample

__all__ = [
    "Coverage",
    "Followed",
    "Hypothesis",
    "Limit",
    "Listener",
    "Model",
    "State",
    "beam",
    "coverage_term",
    "greedy",
    "sample",
    "twice_plus_20",
]
