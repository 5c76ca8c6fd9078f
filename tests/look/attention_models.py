"""Small attention modules, their inputs, and runs with and without ``watch``, for the tests of capture."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from jumok.look.capture.captures import Captures
from jumok.look.capture.watch import watch


class FunctionAttention(nn.Module):
    """Calls a function with the queries, keys and values that it gets."""

    def __init__(self, attend: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.attend, self.options = attend, options

    def forward(self, *qkv: Tensor) -> Any:
        return self.attend(*qkv, **self.options)


def random_qkv(
    *leading: int, key_heads: int | None = None, queries: int = 5, keys: int = 7, width: int = 4
) -> list[Tensor]:
    """Queries ``(*leading, 5, 4)``, keys and values ``(*leading, 7, 4)``."""
    key_leading = leading if key_heads is None else (*leading[:-1], key_heads)
    shapes = ((*leading, queries, width), (*key_leading, keys, width), (*key_leading, keys, width))
    return [torch.randn(shape) for shape in shapes]


def reference_weights(
    query: Tensor, key: Tensor, allowed: Tensor | None = None, *, scale: float | None = None, bias: Tensor | float = 0.0
) -> Tensor:
    """``softmax(scale · query keyᵀ + bias)``, where allowed. Heads of queries may share heads of keys."""
    if query.dim() > 2:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale) + bias
    return (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1)


def causal_mask(queries: int, keys: int, diagonal: int = 0) -> Tensor:
    """True where a query may attend: to keys up to its own position, or up to ``diagonal`` further."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)


def run_watched(model: nn.Module, *args: Any, call: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return the output of ``call``, by default of the model, and the captures.

    The output is equal to the bit without ``watch``, within it, and after it.
    """
    outputs, captures = [], Captures()
    for is_watched in (False, True, False):
        torch.manual_seed(1)
        with watch(model) if is_watched else contextlib.nullcontext() as context:
            outputs.append((call or model)(*args, **options))
        captures = context or captures
    plain, watched, after = ([x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)] for output in outputs)
    assert len(plain) == len(watched) == len(after) > 0
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(plain, watched, after, strict=True))
    return outputs[1], captures


class SelfAttention(nn.Module):
    """Causal self-attention with two heads, written by hand. ``normalize`` maps scores to weights."""

    def __init__(self, normalize: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.n_head, self.normalize = 2, normalize or nn.Softmax(dim=-1)
        self.project, self.attn_dropout = nn.Linear(6, 18), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        scores = (query @ key.mT / key.shape[-1] ** 0.5).masked_fill(~causal_mask(x.shape[1], x.shape[1]), -1e9)
        return (self.attn_dropout(self.normalize(scores)) @ value).transpose(1, 2).flatten(2)


def normalize_by_hand(scores: Tensor) -> Tensor:
    """A softmax without a softmax function: ``watch`` cannot capture it."""
    return scores.exp() / scores.exp().sum(-1, keepdim=True)
