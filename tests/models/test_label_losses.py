"""How far a model is from its labels: numbers to be checked by hand."""

import math

import pytest
import torch

from jumok.batches.tokens import IGNORE
from jumok.models.layers.label_losses import label_loss


def test_class_losses() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [9.0, 1.0], [math.log(4), 0.0]])
    name, total = label_loss(logits, torch.tensor([1, IGNORE, 1]))  # 3/4 and 1/5
    assert (name, total.item()) == ("nll", pytest.approx(-math.log(0.75) - math.log(0.2)))


def test_regression_losses() -> None:
    said = torch.tensor([[1.0], [2.0], [4.0]], requires_grad=True)
    name, total = label_loss(said, torch.tensor([3.0, math.nan, 1.0]))
    total.backward()
    assert (name, total.item()) == ("error", 13)
    assert said.grad is not None
    assert said.grad.tolist() == [[-4.0], [0.0], [6.0]]


def test_low_precision_losses_are_summed_in_float32() -> None:
    assert label_loss(torch.zeros(3, 2, dtype=torch.bfloat16), torch.tensor([0, 1, 0]))[1].dtype == torch.float32
