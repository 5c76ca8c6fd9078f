"""Adversarial training (Miyato 2017): a model must also be right about words that are moved a little.

They are moved where it hurts most, along the gradient of the loss at the vectors x of a batch's words::

    r = ε √N · g / ‖g‖,   g = ∂loss / ∂x           N texts: each is moved by about ε

and what is made smaller is the mean of the loss at x and the loss at x + r. With few texts and many weights,
this keeps a model from learning texts by heart, better than dropout alone does. A step takes three times as
long: the gradient at x is computed, and then the usual one of both losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from jumok.batches.text import label_mask
from jumok.batches.tokens import Loss
from jumok.models.layers.precision import upcast

__all__ = ["adversarial_loss"]

VectorMap = Callable[[Tensor], Tensor]


def adversarial_loss(
    embedding: nn.Embedding, compute_loss: Callable[[], Loss], epsilon: float, labels: Tensor
) -> Loss:
    """The mean of ``compute_loss()`` and of the same with the vectors that ``embedding`` gives moved by ``epsilon``.

    The parts are those of the first, and "moved", the second as a whole. In each of its calls the loss looks
    words up in the same order; dropout is drawn anew. Of the ``labels``, those that count are the N texts.

    >>> embedding, labels = nn.Embedding(5, 2), torch.tensor([3.0])
    >>> loss = lambda: Loss(embedding(torch.tensor([2])).sum(), 1)  # the gradient is (1, 1)
    >>> plain, both = loss(), with_moved_words(embedding, loss, 0.5, labels)
    >>> (both.parts["moved"] - plain.total).item()  # (1, 1) · 0.5 (1, 1) / √2
    0.7071068286895752
    """
    found: list[Tensor] = []

    def kept(vectors: Tensor) -> Tensor:
        vectors = vectors if vectors.requires_grad else vectors.detach().requires_grad_()
        found.append(vectors)
        return vectors

    with _perturb_embedding(embedding, kept):
        plain = compute_loss()
    gradients = torch.autograd.grad(plain.total, found, retain_graph=True)
    norm = torch.stack([upcast(one).square().sum() for one in gradients]).sum().sqrt()
    # Counted where the labels are: a step that is recorded in a graph counts anew at every replay.
    texts = label_mask(labels).sum().clamp(min=1).to(norm.dtype)
    step = epsilon * texts.sqrt() / norm.clamp(min=1e-12)
    shifts = iter([(step * one).to(one.dtype) for one in gradients])
    with _perturb_embedding(embedding, lambda vectors: vectors + next(shifts)):
        moved = compute_loss()
    parts = {**plain.parts, "moved": moved.total.detach()}
    return Loss((plain.total + moved.total) / 2, plain.count, parts)


@contextlib.contextmanager
def _perturb_embedding(embedding: nn.Embedding, perturb: VectorMap) -> Iterator[None]:
    """Within, what the embedding gives is changed."""
    hook = embedding.register_forward_hook(lambda _, __, vectors: perturb(vectors))
    try:
        yield
    finally:
        hook.remove()
