"""Layers without a map of queries and keys are named for what they are; attention beside them is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.capture.watch import watch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.long

COMMON = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
COMMON |= {"intermediate_size": 24, "num_hidden_layers": 3, "pad_token_id": 0, "attn_implementation": "eager"}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4}
STATE_SPACE = "state space model (Mamba): a recurrence over positions; it has no map of queries and keys"
HYBRIDS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {  # options, names of attention, of Mamba
    "Jamba": (
        {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4}
        | {"use_mamba_kernels": False},
        ["layers.1.self_attn"],
        ["layers.0.mamba", "layers.2.mamba"],
    ),
    "Bamba": ({"attn_layer_indices": [1]} | MAMBA, ["layers.1.self_attn"], ["layers.0.mamba", "layers.2.mamba"]),
    "FalconH1": (
        {"head_dim": 8, "mamba_d_ssm": 32, "num_hidden_layers": 1} | MAMBA,
        ["layers.0.self_attn"],  # both in one layer
        ["layers.0.mamba"],
    ),
    "GraniteMoeHybrid": (
        {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2, "shared_intermediate_size": 24}
        | MAMBA,
        ["layers.1.self_attn"],
        ["layers.0.mamba", "layers.2.mamba"],
    ),
    "Zamba2": (
        {"layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 4, "mamba_d_state": 4}
        | {"use_mem_rope": True, "adapter_rank": 4},
        ["layers.1.shared_transformer.self_attn"],
        ["layers.0.mamba", "layers.1.mamba_decoder.mamba", "layers.2.mamba"],
    ),
    "NemotronH": (
        {"layers_block_type": ["mamba", "attention", "mamba"], "mamba_num_heads": 4, "mamba_head_dim": 8}
        | {"n_groups": 1, "ssm_state_size": 4, "head_dim": 8},
        ["layers.1.mixer"],
        ["layers.0.mixer", "layers.2.mixer"],
    ),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrid_models(family: str) -> None:
    options, attention_names, mamba_names = HYBRIDS[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(COMMON | options))
    model = getattr(transformers, f"{family}Model")(config).eval()
    ids = torch.randint(5, 50, (2, 7))
    with torch.no_grad():
        expected = model(ids, output_attentions=True)
        with watch(model) as captures:  # without a warning: nothing was missed that could have been seen
            actual = model(ids)
    assert torch.equal(actual.last_hidden_state, expected.last_hidden_state)
    assert captures.names == attention_names
    assert captures.missed_layers == dict.fromkeys(mamba_names, STATE_SPACE)
    (attention,) = (x for x in expected.attentions if x is not None)
    torch.testing.assert_close(captures[0].weights(), attention, atol=1e-6, rtol=1e-5)


def test_model_of_recurrences_only() -> None:
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = transformers.MambaModel(config).eval()
    with pytest.raises(InputError, match=r"captured no attention\. layers\.0\.mixer: state space model"), watch(model):
        model(torch.randint(5, 50, (2, 7)))


class LinearAttention(nn.Module):
    """A linear attention, or one with a softmax that only has the name."""

    def __init__(self, has_softmax: bool) -> None:
        super().__init__()
        self.has_softmax, self.project = has_softmax, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        if self.has_softmax:
            return (query @ key.mT).softmax(-1) @ value
        return nn.functional.elu(query).add(1) @ (nn.functional.elu(key).add(1).mT @ value)


def test_the_name_counts_only_if_nothing_was_captured() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LinearAttention(False), LinearAttention(True))
    with watch(model) as captures:
        model(torch.randn(2, 7, 8))
    assert captures.names == ["1"]
    assert list(captures.missed_layers) == ["0"]
    assert captures.missed_layers["0"].startswith("linear attention: ")


def test_cross_attention_that_is_skipped_is_not_missed() -> None:
    class CrossAttention(nn.Module):
        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            return x if memory is None else (x @ memory.mT).softmax(-1) @ memory

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = CrossAttention(), CrossAttention()

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.second(self.first(x), memory)

    model = Decoder()
    with watch(model) as captures:
        model(torch.randn(2, 5, 8), torch.randn(2, 7, 8))
    assert captures.names == ["second"]
    assert not captures.missed_layers


def test_softmax_over_one_score() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return torch.tanh(x[:, None] + memory).sum(-1, keepdim=True).softmax(1).mT @ memory

    model = nn.Sequential(Attention())
    with pytest.raises(InputError, match="its softmax is over a single score"), watch(model[0]):
        model[0](torch.randn(2, 8), torch.randn(2, 1, 8))
    x, memory = torch.randn(2, 8), torch.randn(2, 11, 8)
    with watch(model[0]) as captures:
        model[0](x, memory)
    expected = torch.tanh(x[:, None] + memory).sum(-1).softmax(-1)
    torch.testing.assert_close(captures[0].weights(head=0)[:, 0], expected)
