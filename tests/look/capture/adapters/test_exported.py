"""Models that torch.export has exported: their layers have the names of the original."""

import pytest
import torch
from attention_models import causal_mask, reference_weights, run_watched
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")]  # of torch.export
X = torch.randn(2, 5, 6)


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FusedAttention(), FusedAttention()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("form", ["module", "unflattened", "fx"])
def test_exported_model(form: str) -> None:
    model = Model().eval()
    if form == "fx":
        exported: nn.Module = torch.fx.symbolic_trace(model)
    else:
        program = torch.export.export(model, (X,))
        exported = program.module() if form == "module" else torch.export.unflatten(program)
    _, captures = run_watched(exported, X)
    assert [layer.name for layer in captures] == ["layers.0", "layers.1"]
    x = X
    for n, layer in enumerate(model.layers):
        query, key, _ = layer.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)  # type: ignore[union-attr, operator]
        torch.testing.assert_close(captures[n].weights(), reference_weights(query, key, causal_mask(5, 5)))
        x = x + layer(x)


def test_each_forward_of_an_exported_model() -> None:
    exported = torch.export.export(Model().eval(), (X,)).module()
    _, captures = run_watched(exported, X, call=lambda x: exported(exported(x)))
    assert [layer.name for layer in captures] == ["layers.0", "layers.1"] * 2
