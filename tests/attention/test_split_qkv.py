"""Parts of one product, as PyTorch splits it; the gradient is the same, in one piece or put together."""

import pytest
import torch
from torch import Tensor

from jumok.attention.split_qkv import split_qkv

B, T, D, HEADS = 2, 5, 3, [2, 7, 7]


def whole(**rest: torch.dtype) -> Tensor:
    return torch.randn(B, T, sum(HEADS), D, **rest).transpose(1, 2).requires_grad_()


def test_parts_are_those_of_split() -> None:
    x = whole()
    for one, other in zip(split_qkv(x, HEADS), x.split(HEADS, dim=1), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() == other.data_ptr()
    assert not any(part.requires_grad for part in split_qkv(x.detach(), HEADS))


@pytest.mark.parametrize("batch", [1, B])
def test_a_gradient_in_one_piece_is_not_copied(batch: int) -> None:
    x = torch.randn(batch, sum(HEADS), T, D, requires_grad=True)
    ready = torch.randn(batch, T, sum(HEADS), D).transpose(1, 2)
    (gradient,) = torch.autograd.grad(split_qkv(x, HEADS), x, ready.split(HEADS, dim=1))
    assert gradient.data_ptr() == ready.data_ptr()
    assert torch.equal(gradient, ready)


APART = {
    "dense": lambda g: [x.contiguous() for x in g],
    "another order": lambda g: [g[0], g[2], g[1]],
    "the same one": lambda g: [g[0], g[1], g[1]],
    "strided": lambda g: [x.contiguous().transpose(0, 1).contiguous().transpose(0, 1) for x in g],
    "expanded": lambda g: [x[:, :1].expand_as(x) for x in g],
    "of a wider tensor": lambda g: torch.cat([*g, g[0]], 1).split([*HEADS, HEADS[0]], dim=1)[:-1],
}


@pytest.mark.parametrize("name", APART)
def test_a_gradient_in_pieces_is_put_together(name: str) -> None:
    x = whole()
    gradients = APART[name](torch.randn(B, sum(HEADS), T, D).split(HEADS, dim=1))
    (ours,) = torch.autograd.grad(split_qkv(x, HEADS), x, gradients)
    assert torch.equal(ours, torch.cat(list(gradients), dim=1))


def test_only_some_parts_and_twice() -> None:
    x = whole(dtype=torch.float64)
    (one,) = torch.autograd.grad(split_qkv(x, HEADS)[1].sin().sum(), x)
    (other,) = torch.autograd.grad(x.split(HEADS, dim=1)[1].sin().sum(), x)
    assert torch.equal(one, other)

    def run(x: Tensor) -> Tensor:
        query, key, value = split_qkv(x, HEADS)
        return query.sum() * (key * value).sin()

    assert torch.autograd.gradgradcheck(run, x)
    torch.testing.assert_close(torch.func.grad(lambda x: run(x).sum())(x), torch.autograd.grad(run(x).sum(), x)[0])
