"""Adversarial training of text classifiers (Miyato 2017).

Word embeddings x of a batch are perturbed in the direction of the gradient of the loss::

    r = ε √N · g / ‖g‖,   g = ∂loss / ∂x           N texts: the perturbation of each is about ε

and the training loss is the mean of the losses at x and at x + r. With few texts and many weights, this
reduces overfitting more than dropout alone. A training step takes three times as long: first the gradient at
x, then the gradient of both losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from jumok.batches.text import label_mask
from jumok.batches.tokens import Loss
from jumok.models.layers.precision import upcast

VectorMap = Callable[[Tensor], Tensor]


def adversarial_loss(embedding: nn.Embedding, compute_loss: Callable[[], Loss], epsilon: float, labels: Tensor) -> Loss:
    """Mean of ``compute_loss()`` with the vectors of ``embedding``, and with perturbed ones.

    The parts are those of the first loss, and "adversarial", the total of the second. ``compute_loss`` is
    called twice and must look words up in the same order each time; dropout masks differ. N is the number of
    ``labels`` that count.

    >>> embedding, labels = nn.Embedding(5, 2), torch.tensor([3.0])
    >>> compute_loss = lambda: Loss(embedding(torch.tensor([2])).sum(), 1)  # the gradient is (1, 1)
    >>> clean, mean = compute_loss(), adversarial_loss(embedding, compute_loss, 0.5, labels)
    >>> (mean.parts["adversarial"] - clean.total).item()  # (1, 1) · 0.5 (1, 1) / √2
    0.7071068286895752
    """
    embedded: list[Tensor] = []

    def record(vectors: Tensor) -> Tensor:
        vectors = vectors if vectors.requires_grad else vectors.detach().requires_grad_()
        embedded.append(vectors)
        return vectors

    with _perturb_embedding(embedding, record):
        clean = compute_loss()
    gradients = torch.autograd.grad(clean.total, embedded, retain_graph=True)
    norm = torch.stack([upcast(gradient).square().sum() for gradient in gradients]).sum().sqrt()
    # Counted on the device, because a replayed CUDA graph must count the labels of every batch.
    num_texts = label_mask(labels).sum().clamp(min=1).to(norm.dtype)
    step = epsilon * num_texts.sqrt() / norm.clamp(min=1e-12)
    perturbations = iter([(step * gradient).to(gradient.dtype) for gradient in gradients])
    with _perturb_embedding(embedding, lambda vectors: vectors + next(perturbations)):
        adversarial = compute_loss()
    parts = {**clean.parts, "adversarial": adversarial.total.detach()}
    return Loss((clean.total + adversarial.total) / 2, clean.count, parts)


@contextlib.contextmanager
def _perturb_embedding(embedding: nn.Embedding, perturb: VectorMap) -> Iterator[None]:
    """Apply ``perturb`` to the outputs of the embedding within the context."""
    hook = embedding.register_forward_hook(lambda _, __, vectors: perturb(vectors))
    try:
        yield
    finally:
        hook.remove()
