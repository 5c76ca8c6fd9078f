"""Scores of a pretrained BERT: masked language modelling and next sentence prediction on held-out documents."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from jumok.batches.text import PretrainingBatch
from jumok.data.batching.pretraining import PretrainingBatcher
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.models.bert import BertPretrainingModel
from jumok.run import Run
from jumok.tasks.base import Evaluation

NUM_SAMPLES = 3  # sequences that a validation prints
ACCURACY_CURVES = {"mlm_accuracy": "masked tokens", "nsp_accuracy": "next sentence"}


@dataclass(frozen=True)
class PretrainingScores:
    """The scores of a model on held-out documents."""

    loss: float  # the training loss, the sum of both losses
    mlm_accuracy: float
    nsp_accuracy: float
    perplexity: float  # of masked tokens
    num_masked_tokens: int
    num_pairs: int

    @property
    def validation_metrics(self) -> dict[str, float]:
        """The metrics of a validation."""
        return {
            "loss": self.loss,
            "mlm_accuracy": self.mlm_accuracy,
            "nsp_accuracy": self.nsp_accuracy,
            "perplexity": self.perplexity,
        }


@torch.no_grad()
def score_model(model: BertPretrainingModel, dataset: PretrainingBatcher) -> PretrainingScores:
    """Score a model on all pairs of the first epoch."""
    device = next(iter(model.parameters())).device
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # both losses, both numbers of correct answers
    num_masked_tokens = num_pairs = 0
    for index in dataset.batches(0):
        batch = dataset.collate(index).to(device)
        outputs = zip(model.logits(batch), (batch.labels, batch.next_sentence_labels), strict=True)
        for n, (logits, targets) in enumerate(outputs):
            assert logits is not None
            sums[n] += F.cross_entropy(logits.float(), targets, reduction="sum")
            sums[n + 2] += (logits.argmax(-1) == targets).sum()
        num_masked_tokens, num_pairs = num_masked_tokens + batch.count, num_pairs + len(index)
    mlm_loss, nsp_loss, num_correct_tokens, num_correct_pairs = sums.tolist()
    return PretrainingScores(
        loss=mlm_loss / num_masked_tokens + nsp_loss / num_pairs,
        mlm_accuracy=num_correct_tokens / num_masked_tokens,
        nsp_accuracy=num_correct_pairs / num_pairs,
        perplexity=math.exp(min(mlm_loss / num_masked_tokens, 700.0)),
        num_masked_tokens=num_masked_tokens,
        num_pairs=num_pairs,
    )


def build_evaluation(run: Run, scores: PretrainingScores, *, detailed: bool = False) -> Evaluation:
    """The scores with their table and, if ``detailed``, the accuracies of all validations as a figure."""
    figures: dict[str, Callable[[Path], Path]] = {}
    if detailed and (curves := _read_accuracy_curves(run)):
        figures["accuracy"] = lambda path: _draw_accuracy_curves(curves, path.with_name("accuracy.png"))
    return Evaluation(
        asdict(scores),
        select_by="mlm_accuracy",
        rows=[
            ("accuracy, masked tokens", f"{scores.mlm_accuracy:.4f}", f"of {scores.num_masked_tokens:,}"),
            ("accuracy, next sentence", f"{scores.nsp_accuracy:.4f}", f"of {scores.num_pairs:,}"),
            ("perplexity", f"{scores.perplexity:.3f}", "per masked token"),
            ("loss", f"{scores.loss:.4f}", ""),
        ],
        figures=figures,
        comparison_columns={"next sentence": f"{scores.nsp_accuracy:.4f}", "perplexity": f"{scores.perplexity:.3f}"},
    )


def format_samples(model: BertPretrainingModel, tokenizer: WordPieceTokenizer, batch: PretrainingBatch) -> list[str]:
    """A few sequences as the model reads them, and its predictions for their masked tokens."""
    logits, _ = model.logits(batch)
    assert logits is not None
    width = batch.tokens.ids.shape[1]
    best = logits[:, : tokenizer.vocab_size].argmax(-1)
    positions, predictions, targets = (x.tolist() for x in (batch.masked_indices, best, batch.labels))
    lines = []
    for row, length in enumerate(batch.tokens.lengths[:NUM_SAMPLES]):
        indices = [n for n, position in enumerate(positions) if position // width == row]
        tokens = tokenizer.ids_to_tokens(batch.tokens.ids[row, 1 : length - 1].tolist())
        pairs = zip(*(tokenizer.ids_to_tokens(ids[n] for n in indices) for ids in (predictions, targets)), strict=True)
        words = (prediction if prediction == target else f"{prediction} ({target})" for prediction, target in pairs)
        lines += [f"  input                {' '.join(tokens)}", f"  prediction (target)  {', '.join(words)}"]
    return lines


def _read_accuracy_curves(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Both accuracies of all validations; empty if there was none."""
    try:
        lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    events: list[dict[str, Any]] = [event for event in map(json.loads, lines) if event["event"] == "validation"]
    if not events:
        return {}
    return {label: [(event["step"], event[key]) for event in events] for key, label in ACCURACY_CURVES.items()}


def _draw_accuracy_curves(curves: dict[str, list[tuple[int, float]]], path: Path) -> Path:
    from jumok.look.figures.plots import draw_training_curves

    return draw_training_curves(curves, path, title="accuracy on held-out documents")
