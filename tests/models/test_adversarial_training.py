"""Words that are moved where it hurts: against the formula, and in the models that can."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from jumok.batches.text import ClassificationBatch, DocumentBatch, TextPairBatch
from jumok.batches.tokens import IGNORE, Loss
from jumok.models.bert import BertClassifier, BertConfig
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig
from jumok.models.layers.adversarial_training import adversarial_loss
from jumok.models.self_attentive import SelfAttentiveClassifier, SelfAttentiveConfig


def table() -> nn.Embedding:
    embedding = nn.Embedding(7, 3, dtype=torch.float64)
    nn.init.normal_(embedding.weight)
    return embedding


def test_loss_is_the_mean_of_clean_and_perturbed_losses() -> None:
    torch.manual_seed(1)
    embedding, ids, more = table(), torch.tensor([[1, 2, 1], [5, 0, 6]]), torch.tensor([3, 3])

    def of(x: Tensor, y: Tensor) -> Tensor:
        return x.sin().sum() + (y**3).sum() * x.mean()

    labels = torch.tensor([1, IGNORE, 0])  # of two texts, and of none
    found = adversarial_loss(embedding, lambda: Loss(of(embedding(ids), embedding(more)), 2), 0.7, labels)
    x, y = (embedding.weight.detach()[at].requires_grad_() for at in (ids, more))
    plain = of(x, y)
    dx, dy = torch.autograd.grad(plain, (x, y))
    scale = 0.7 * math.sqrt(2) / math.hypot(dx.norm(), dy.norm())
    moved = of(x + scale * dx, y + scale * dy)
    assert found.total.item() == pytest.approx((plain.item() + moved.item()) / 2, rel=1e-9)
    assert found.parts["adversarial"].item() == pytest.approx(moved.item(), rel=1e-9)
    assert moved > plain
    # The words are moved by a constant: of that, no gradient.
    found.total.backward()
    whole = torch.zeros_like(embedding.weight).requires_grad_()
    table_ = embedding.weight.detach() + whole
    both = of(table_[ids], table_[more]) + of(table_[ids] + scale * dx, table_[more] + scale * dy)
    (wanted,) = torch.autograd.grad(both / 2, whole)
    torch.testing.assert_close(embedding.weight.grad, wanted)


def test_the_embedding_is_restored() -> None:
    embedding = table()
    ids = torch.tensor([1])

    def broken() -> Loss:
        embedding(ids)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        adversarial_loss(embedding, broken, 1.0, torch.tensor([1]))
    assert torch.equal(embedding(ids), embedding.weight[ids])
    embedding.weight.requires_grad_(False)  # vectors that are not learned are moved all the same
    found = adversarial_loss(embedding, lambda: Loss(embedding(ids).sum(), 1), 0.3, torch.tensor([1]))
    assert found.parts["adversarial"].item() == pytest.approx(embedding(ids).sum().item() + 0.3 * math.sqrt(3))


BATCH = {
    "bert": ClassificationBatch.from_sequences([[4, 5, 6], [7]], labels=[1, 0]),
    "bert, packed": ClassificationBatch.from_sequences([[4, 5, 6], [7]], labels=[1, 0], packed=True),
    "self_attentive": ClassificationBatch.from_sequences([[4, 5, 6], [7]], labels=[1, 0]),
    "pairs": TextPairBatch.from_sequences([[4, 5, 6], [7]], second_tokens=[[5], [6, 4]], labels=[1, 0]),
    "hierarchical": DocumentBatch.from_sequences(
        [[4, 5, 6], [7], [8, 4]], sentence_indices=[[0, 1], [2]], labels=[1, 0]
    ),
}


@pytest.mark.parametrize("kind", BATCH)
def test_models_use_it_in_training_only(kind: str) -> None:
    sizes = {"embedding_width": 5, "attention_width": 7, "width": 3, "dropout": 0.0}

    def made(adversarial: float) -> BertClassifier | HierarchicalAttentionNetwork | SelfAttentiveClassifier:
        torch.manual_seed(3)
        if kind.startswith("bert"):
            small = BertConfig(
                width=6, num_heads=2, num_layers=2, feed_forward_width=7, dropout=0.0, attention_dropout=0.0
            )
            return BertClassifier(replace(small, adversarial_epsilon=adversarial), 11, 2)
        if kind == "hierarchical":
            return HierarchicalAttentionNetwork(HierarchicalConfig(**sizes, adversarial_epsilon=adversarial), 11, 2)
        pairs = kind == "pairs"
        config = SelfAttentiveConfig(
            **sizes, num_hops=2, mlp_width=5, text_pairs=pairs, adversarial_epsilon=adversarial
        )
        return SelfAttentiveClassifier(config, 11, 2)

    plain, hard, batch = made(0.0), made(0.5), BATCH[kind]
    usual, both = plain.loss(batch), hard.loss(batch)
    assert both.total > usual.total
    assert both.total.item() == pytest.approx((usual.total + both.parts["adversarial"]).item() / 2)
    assert {**both.parts, "adversarial": None}.keys() == {*usual.parts, "adversarial"}
    both.total.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in hard.parameters())
    hard.eval()
    assert torch.equal(hard.loss(batch).total, plain.eval().loss(batch).total)
    with pytest.raises(ValueError, match="adversarial_epsilon=-1"):
        made(-1.0)
