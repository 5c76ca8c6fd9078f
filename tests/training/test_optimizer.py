"""What the optimiser remembers, taken away and brought back."""

import pytest
import torch
from torch import nn

from jumok import InputError
from jumok.training.config import TrainConfig
from jumok.training.optimizer import build_optimizer, get_optimizer_state, load_optimizer_state


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.linspace(-1, 1, 2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    for _ in range(steps):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_restored_state_gives_the_same_steps(layout: torch.memory_format) -> None:
    """However the parameters lie in memory: a file knows nothing of that."""
    torch.manual_seed(1)
    model = nn.Conv2d(3, 11, 3).to(memory_format=layout)
    optimizer = build_optimizer(model, TrainConfig(learning_rate=0.01))
    stepped(model, optimizer, 3)
    saved = {
        name: value.clone(memory_format=torch.contiguous_format)
        for name, value in get_optimizer_state(optimizer, model).items()
    }
    other = nn.Conv2d(3, 11, 3).to(memory_format=layout)
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(other, TrainConfig(learning_rate=0.01))
    load_optimizer_state(resumed, other, saved)
    stepped(model, optimizer, 2)
    stepped(other, resumed, 2)
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(InputError, match="belongs to another model: this one has no bias, weight"):
        load_optimizer_state(resumed, nn.Tanh(), saved)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_pytorch(momentum: float) -> None:
    torch.manual_seed(1)
    ours, theirs = nn.Conv2d(3, 11, 3), nn.Conv2d(3, 11, 3)
    theirs.load_state_dict(ours.state_dict())
    settings = TrainConfig(optimizer="sgd", learning_rate=0.001, momentum=momentum, weight_decay=0.1)
    groups = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias]}]
    stepped(ours, build_optimizer(ours, settings), 3)
    stepped(theirs, torch.optim.SGD(groups, 0.001, momentum=momentum, fused=True), 3)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_a_skipped_first_step_leaves_no_momentum() -> None:
    """PyTorch's own would leave what the memory happened to hold."""
    model = nn.Conv2d(3, 11, 3)
    optimizer = build_optimizer(model, TrainConfig(optimizer="sgd", momentum=0.9))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    before = model.weight.clone()
    stepped(model, optimizer, 1)
    assert torch.equal(model.weight, before)
    assert not any(moment.any() for moment in get_optimizer_state(optimizer, model).values())
