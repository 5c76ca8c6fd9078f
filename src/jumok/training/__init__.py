"""Training: one loop for all models, which can be killed at any moment and goes on to the same numbers."""

from jumok.training.distributed import Ranks, joined
from jumok.training.divergence import Diverged
from jumok.training.health import alarms, attention_health
from jumok.training.loop import Validate, train
from jumok.training.prefetch import Data
from jumok.training.report import Best, Report, Summary
from jumok.training.settings import Settings
from jumok.training.signals import Interrupted
from jumok.training.weights import load_weights, save_weights

__all__ = [
    "Best",
    "Data",
    "Diverged",
    "Interrupted",
    "Ranks",
    "Report",
    "Settings",
    "Summary",
    "Validate",
    "alarms",
    "attention_health",
    "joined",
    "load_weights",
    "save_weights",
    "train",
]
