"""Words that are moved where it hurts: against the formula, and in the models that can."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from jumok.annotated import Labelled, LabelledDocuments, LabelledPairs
from jumok.batch import IGNORE, Loss
from jumok.models.adversarial import with_moved_words
from jumok.models.bert import BertConfig, Classifier
from jumok.models.hierarchical import Hierarchical, HierarchicalConfig
from jumok.models.selfattentive import SelfAttentive, SelfAttentiveConfig


def table() -> nn.Embedding:
    embedding = nn.Embedding(7, 3, dtype=torch.float64)
    nn.init.normal_(embedding.weight)
    return embedding


def test_it_is_the_mean_of_the_loss_at_the_words_and_beside_them() -> None:
    torch.manual_seed(1)
    embedding, ids, more = table(), torch.tensor([[1, 2, 1], [5, 0, 6]]), torch.tensor([3, 3])

    def of(x: Tensor, y: Tensor) -> Tensor:
        return x.sin().sum() + (y**3).sum() * x.mean()

    labels = torch.tensor([1, IGNORE, 0])  # of two texts, and of none
    found = with_moved_words(embedding, lambda: Loss(of(embedding(ids), embedding(more)), 2), 0.7, labels)
    x, y = (embedding.weight.detach()[at].requires_grad_() for at in (ids, more))
    plain = of(x, y)
    dx, dy = torch.autograd.grad(plain, (x, y))
    scale = 0.7 * math.sqrt(2) / math.hypot(dx.norm(), dy.norm())
    moved = of(x + scale * dx, y + scale * dy)
    assert found.total.item() == pytest.approx((plain.item() + moved.item()) / 2, rel=1e-9)
    assert found.parts["moved"].item() == pytest.approx(moved.item(), rel=1e-9)
    assert moved > plain
    # The words are moved by a constant: of that, no gradient.
    found.total.backward()
    whole = torch.zeros_like(embedding.weight).requires_grad_()
    table_ = embedding.weight.detach() + whole
    both = of(table_[ids], table_[more]) + of(table_[ids] + scale * dx, table_[more] + scale * dy)
    (wanted,) = torch.autograd.grad(both / 2, whole)
    torch.testing.assert_close(embedding.weight.grad, wanted)


def test_nothing_is_left_on_the_embedding() -> None:
    embedding = table()
    ids = torch.tensor([1])

    def broken() -> Loss:
        embedding(ids)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        with_moved_words(embedding, broken, 1.0, torch.tensor([1]))
    assert torch.equal(embedding(ids), embedding.weight[ids])
    embedding.weight.requires_grad_(False)  # vectors that are not learned are moved all the same
    found = with_moved_words(embedding, lambda: Loss(embedding(ids).sum(), 1), 0.3, torch.tensor([1]))
    assert found.parts["moved"].item() == pytest.approx(embedding(ids).sum().item() + 0.3 * math.sqrt(3))


BATCH = {
    "bert": Labelled.of([[4, 5, 6], [7]], labels=[1, 0]),
    "bert, packed": Labelled.of([[4, 5, 6], [7]], labels=[1, 0], packed=True),
    "selfattentive": Labelled.of([[4, 5, 6], [7]], labels=[1, 0]),
    "pairs": LabelledPairs.of([[4, 5, 6], [7]], seconds=[[5], [6, 4]], labels=[1, 0]),
    "hierarchical": LabelledDocuments.of([[4, 5, 6], [7], [8, 4]], sentences=[[0, 1], [2]], labels=[1, 0]),
}


@pytest.mark.parametrize("kind", BATCH)
def test_models_learn_so_and_are_judged_without(kind: str) -> None:
    sizes = {"embedding": 5, "attention": 7, "width": 3, "dropout": 0.0}

    def made(adversarial: float) -> Classifier | Hierarchical | SelfAttentive:
        torch.manual_seed(3)
        if kind.startswith("bert"):
            small = BertConfig(width=6, heads=2, layers=2, feed_forward=7, dropout=0.0, attention_dropout=0.0)
            return Classifier(replace(small, adversarial=adversarial), 11, 2)
        if kind == "hierarchical":
            return Hierarchical(HierarchicalConfig(**sizes, adversarial=adversarial), 11, 2)
        pairs = kind == "pairs"
        config = SelfAttentiveConfig(**sizes, hops=2, hidden=5, pairs=pairs, adversarial=adversarial)
        return SelfAttentive(config, 11, 2)

    plain, hard, batch = made(0.0), made(0.5), BATCH[kind]
    usual, both = plain.loss(batch), hard.loss(batch)
    assert both.total > usual.total
    assert both.total.item() == pytest.approx((usual.total + both.parts["moved"]).item() / 2)
    assert {**both.parts, "moved": None}.keys() == {*usual.parts, "moved"}
    both.total.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in hard.parameters())
    hard.eval()
    assert torch.equal(hard.loss(batch).total, plain.eval().loss(batch).total)
    with pytest.raises(ValueError, match="adversarial=-1"):
        made(-1.0)
