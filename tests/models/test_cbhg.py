"""CBHG and its norms: beside PyTorch's own layers, and what padding must not do."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.batches.tokens import Tokens
from jumok.models.layers.cbhg import CBHG, MaskedBatchNorm

EXACT = {"rtol": 1e-9, "atol": 1e-9}
LENGTHS = (7, 2, 5)


@pytest.mark.parametrize("further", [(), (3,)])
def test_batch_norm_ignores_padding(further: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 7, *further).double()
    real = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    ours, theirs = MaskedBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    with torch.no_grad():
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.copy_(torch.randn(4))
            its.copy_(mine)
    padded = x.masked_fill(~real.view(3, 1, 7, *[1] * len(further)), math.nan)
    for training in (True, False):
        ours.train(training)
        theirs.train(training)
        made = ours(padded, real).movedim(1, -1)
        expected = theirs(x.movedim(1, -1)[real].reshape(-1, 4))
        torch.testing.assert_close(made[real].reshape(-1, 4), expected, **EXACT)
        assert (made[~real] == 0).all()
        theirs_variance = 0.9 + 0.1 * x.movedim(1, -1)[real].reshape(-1, 4).var(0, correction=0)
        torch.testing.assert_close(ours.running_mean, theirs.running_mean, **EXACT)
        torch.testing.assert_close(ours.running_var, theirs_variance, **EXACT)  # PyTorch divides by n − 1
        theirs.running_var.copy_(theirs_variance)  # type: ignore[union-attr]


def naive(model: CBHG, x: Tensor) -> Tensor:
    """Of one sequence ``(T, inputs)``, at rest."""

    def normed(norm: MaskedBatchNorm, x: Tensor) -> Tensor:
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)

    made = x.t()[None]
    banks = [F.conv1d(made, bank.weight, padding="same") for bank in model.bank]
    made = normed(model.bank_norm, torch.cat(banks, 1)).relu()
    made = torch.stack([made[..., t : t + 2].amax(-1) for t in range(len(x))], -1)
    made = F.conv1d(made, model.first_convolution.convolution.weight, padding=1)
    made = F.conv1d(
        normed(model.first_convolution.norm, made).relu(),
        model.second_convolution.convolution.weight,
        padding=1,
    )
    made = model.input_projection(x + normed(model.second_convolution.norm, made)[0].t())
    for highway in model.highways:
        h, t = highway.projection(made).chunk(2, -1)
        made = torch.sigmoid(t) * torch.relu(h) + (1 - torch.sigmoid(t)) * made
    states, _ = model.rnn(made)
    return states  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # of even widths it pads one more at the right
@pytest.mark.parametrize("inputs", [3, 5])
@pytest.mark.parametrize("alike", [False, True])
def test_batches_equal_single_sequences(inputs: int, alike: bool) -> None:
    torch.manual_seed(0)
    model = CBHG(inputs, 3, num_banks=4, num_highways=2).double().eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(0.3 * torch.rand_like(tensor))
    tokens = Tokens(torch.zeros(3, 7, dtype=torch.long), LENGTHS)
    x = torch.randn(3, 7, inputs).double()
    padded = x.masked_fill(~tokens.valid_mask[..., None], math.nan)
    together = model(padded, tokens.with_static_shapes() if alike else tokens)
    assert together.shape == (3, 7, 6)
    for row, length in enumerate(LENGTHS):
        expected = naive(model, x[row, :length])
        torch.testing.assert_close(together[row, :length], expected, **EXACT)
        assert (together[row, length:] == 0).all()
