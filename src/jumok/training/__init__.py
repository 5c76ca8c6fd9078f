"""Training: one loop for all models. It resumes after any interruption with identical results."""

from jumok.training.attention_health import compute_attention_health, find_alarms
from jumok.training.config import TrainConfig
from jumok.training.distributed import DistributedRanks, init_distributed
from jumok.training.divergence import DivergenceError
from jumok.training.loop import ValidateFn, train
from jumok.training.prefetch import TrainingDataset
from jumok.training.report import BestValidation, TrainingSummary, ValidationReport
from jumok.training.signals import TrainingInterrupted
from jumok.training.weights import load_weights, save_weights

__all__ = [
    "BestValidation",
    "DistributedRanks",
    "DivergenceError",
    "TrainConfig",
    "TrainingDataset",
    "TrainingInterrupted",
    "TrainingSummary",
    "ValidateFn",
    "ValidationReport",
    "compute_attention_health",
    "find_alarms",
    "init_distributed",
    "load_weights",
    "save_weights",
    "train",
]
