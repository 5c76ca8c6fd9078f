"""What the optimiser remembers, taken away and brought back."""

import pytest
import torch
from torch import nn

from jumok import InputError
from jumok.training.optimizer import make_optimizer, moments, restore_moments
from jumok.training.settings import Settings


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.linspace(-1, 1, 2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    for _ in range(steps):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_step_after_it_was_brought_back_is_the_same(layout: torch.memory_format) -> None:
    """However the parameters lie in memory: a file knows nothing of that."""
    torch.manual_seed(1)
    model = nn.Conv2d(3, 11, 3).to(memory_format=layout)
    optimizer = make_optimizer(model, Settings(learning_rate=0.01))
    stepped(model, optimizer, 3)
    saved = {
        name: value.clone(memory_format=torch.contiguous_format)
        for name, value in moments(optimizer, model).items()
    }
    other = nn.Conv2d(3, 11, 3).to(memory_format=layout)
    other.load_state_dict(model.state_dict())
    resumed = make_optimizer(other, Settings(learning_rate=0.01))
    restore_moments(resumed, other, saved)
    stepped(model, optimizer, 2)
    stepped(other, resumed, 2)
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(InputError, match="another model: this one has no bias, weight"):
        restore_moments(resumed, nn.Tanh(), saved)
