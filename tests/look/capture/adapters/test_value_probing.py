"""Attention in chunks, blocks, buckets and samples, of models of transformers with random weights.

The oracle is the derivative of the output with respect to the values, by autograd, one query at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.capture.captures import Captures
from jumok.look.capture.value_trace import ValueTrace
from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.long
TINY = {"vocab_size": 70, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24}
SIZES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 50}


@contextmanager
def record_calls(model: nn.Module, class_name: str) -> Iterator[dict[str, tuple[nn.Module, Any, Any]]]:
    """Record the modules of a class that run, with their arguments, by name."""
    calls: dict[str, tuple[nn.Module, Any, Any]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: calls.setdefault(name, (module, args, kwargs)) and None,
            with_kwargs=True,
        )
        for name, module in model.named_modules()
        if type(module).__name__ == class_name
    ]
    yield calls
    for handle in handles:
        handle.remove()


def differentiate(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    num_heads: int = 2,
    values: str = "value",
    output: str = "",
    dim: int = 1,
    is_reversed: bool = False,
) -> Tensor:
    """Return ∂ output / ∂ values ``(B, H, Q, K)`` of the first feature of each head."""
    leaves: list[Tensor] = []
    outputs: list[Tensor] = []

    def replace_values(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        leaves.append(out.detach().clone().requires_grad_())
        return leaves[-1] + 0

    with ExitStack() as stack, torch.enable_grad():
        for name in values.split():
            stack.callback(module.get_submodule(name).register_forward_hook(replace_values).remove)
        if output:
            hook = module.get_submodule(output).register_forward_pre_hook(lambda m, args: outputs.append(args[0]))
            stack.callback(hook.remove)
        torch.manual_seed(0)
        result = module(*args, **kwargs)
        out = outputs[:: -1 if is_reversed else 1] or [result if isinstance(result, Tensor) else result[0]]
        width = leaves[0].shape[-1]
        rows = torch.cat([(x.flatten(-2) if x.shape[-1] != width else x).flatten(1, -2) for x in out], 1)
        step = width // num_heads
        grads = []
        for query in range(rows.shape[1]):
            picked = rows[:, query, ::step].sum()
            parts = torch.autograd.grad(picked, leaves, retain_graph=True, allow_unused=True)
            parts = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, parts, strict=True)]
            grads.append([(part.transpose(0, 1) if dim == 0 else part)[:, :, ::step] for part in parts])
    sources = [torch.stack(parts, dim=1) for parts in zip(*grads, strict=True)]  # (B, Q, K, H)
    whole = sum(sources) if dim == 0 else torch.cat(sources, dim=2)
    assert isinstance(whole, Tensor)
    return whole.permute(0, 3, 1, 2)


def check_model(model: nn.Module, class_name: str, inputs: dict[str, Any], **flow: Any) -> Captures:
    """Compare the maps of all modules of a class with the derivatives; the output must be equal to the bit."""
    model.eval()
    torch.manual_seed(0)
    with torch.no_grad(), record_calls(model, class_name) as calls:
        expected = model(**inputs)[0]
    torch.manual_seed(0)
    with torch.no_grad(), watch(model) as captures:
        actual = model(**inputs)[0]
    assert torch.equal(actual, expected)
    assert not captures.missed_layers
    assert calls
    for name, (module, args, kwargs) in calls.items():
        expected_weights = differentiate(module, args, kwargs, **flow)
        weights = captures[name].weights()
        assert weights.shape == expected_weights.shape
        torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    return captures


def draw_tokens(length: int, num_padded: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length - num_padded :] = 0
    return {"input_ids": torch.randint(5, 50, (2, length)), "attention_mask": mask}


# ------------------------------------------------------------------------------------------ local windows


def build_longformer() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LongformerConfig(**TINY, attention_window=4, max_position_embeddings=64)
    return transformers.LongformerModel(config)


def test_longformer_map_is_the_band_of_its_own_attentions() -> None:
    model = build_longformer()
    inputs = draw_tokens(24, num_padded=3)
    captures = check_model(model, "LongformerSelfAttention", inputs, values="value value_global", dim=0)
    with torch.no_grad():
        bands = model(**inputs, output_attentions=True).attentions[1]  # (B, H, L, 2 · 2 + 1)
    whole = torch.zeros(2, 2, 24, 24)
    for query in range(24):
        for column in range(5):
            if 0 <= query + column - 2 < 24:
                whole[:, :, query, query + column - 2] = bands[:, :, query, column]
    torch.testing.assert_close(captures["encoder.layer.1.attention.self"].weights(), whole, atol=1e-6, rtol=1e-5)


def test_longformer_with_global_tokens() -> None:
    inputs = draw_tokens(24, num_padded=3)
    inputs["global_attention_mask"] = torch.zeros(2, 24, dtype=torch.long)
    inputs["global_attention_mask"][0, [0, 9]] = inputs["global_attention_mask"][1, 0] = 1
    captures = check_model(build_longformer(), "LongformerSelfAttention", inputs, values="value value_global", dim=0)
    weights = captures["encoder.layer.0.attention.self"].weights()
    assert (weights[0, :, 9] > 0).all()  # a global token attends to all, and all attend to it
    assert (weights[0, :, :, 9] > 0).all()
    assert not weights[0, :, 12, 16:].any()  # others attend to two on each side
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 24))


def test_led() -> None:
    torch.manual_seed(0)
    config = transformers.LEDConfig(**SIZES, attention_window=4, max_encoder_position_embeddings=64)
    inputs = draw_tokens(16, num_padded=2) | {"decoder_input_ids": torch.arange(5, 17).view(2, 6)}
    captures = check_model(
        transformers.LEDModel(config), "LEDEncoderSelfAttention", inputs, values="value value_global", dim=0
    )
    assert captures["decoder.layers.0.encoder_attn"].shape == (2, 2, 6, 16)


def test_big_bird() -> None:
    torch.manual_seed(0)
    config = transformers.BigBirdConfig(
        **TINY, attention_type="block_sparse", block_size=4, num_random_blocks=1, max_position_embeddings=64
    )
    model = transformers.BigBirdModel(config, add_pooling_layer=False)
    inputs = draw_tokens(48, num_padded=5)
    captures = check_model(model, "BigBirdBlockSparseAttention", inputs)
    weights = captures["encoder.layer.0.attention.self"].weights()
    sums = inputs["attention_mask"][:, None].expand(2, 2, 48).float()  # the outputs of padding are set to zero
    torch.testing.assert_close(weights.sum(-1), sums)
    assert weights[0, :, :4].all()  # the first block attends to all others
    assert not weights[0, :, 20, 28:44].any()


def test_big_bird_pegasus() -> None:
    torch.manual_seed(0)
    config = transformers.BigBirdPegasusConfig(
        **SIZES, attention_type="block_sparse", block_size=4, num_random_blocks=1, max_position_embeddings=64
    )
    model = transformers.BigBirdPegasusModel(config)
    inputs = draw_tokens(48) | {"decoder_input_ids": torch.arange(5, 17).view(2, 6)}
    check_model(model, "BigBirdPegasusBlockSparseAttention", inputs)


@pytest.mark.parametrize("kind", ["local", "transient-global"])
def test_long_t5(kind: str) -> None:
    torch.manual_seed(0)
    config = transformers.LongT5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        local_radius=3,
        global_block_size=4,
        encoder_attention_type=kind,
    )
    class_name = "LongT5LocalAttention" if kind == "local" else "LongT5TransientGlobalAttention"
    model = transformers.LongT5EncoderModel(config)
    captures = check_model(model, class_name, draw_tokens(18, num_padded=3), values="v", output="o")
    assert captures[0].shape[3] == (18 if kind == "local" else 18 + 4)  # and four blocks
    assert not captures[0].weights()[0, :, 4, 8:18].any()


def test_pegasus_x_has_tokens_then_global_tokens() -> None:
    torch.manual_seed(0)
    config = transformers.PegasusXConfig(**SIZES, num_global_tokens=3, block_size=4, max_position_embeddings=64)
    model = transformers.PegasusXModel(config)
    inputs = draw_tokens(12, num_padded=3) | {"decoder_input_ids": torch.arange(5, 17).view(2, 6)}
    flow = {"values": "v_proj", "output": "out_proj", "is_reversed": True}
    captures = check_model(model, "PegasusXGlobalLocalAttention", inputs, **flow)
    weights = captures["encoder.layers.0.self_attn"].weights()
    assert weights.shape == (2, 2, 15, 15)
    assert not weights[0, :, 1, 4:12].any()  # a token attends to its block and the global tokens
    assert weights[0, :, 12:].all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 15))


@pytest.mark.parametrize("sizes", [{"num_hashes": 1}, {"num_hashes": 3}], ids=["one hash", "three hashes"])
def test_reformer(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    config = transformers.ReformerConfig(
        vocab_size=50,
        hidden_size=16,
        attention_head_size=8,
        num_attention_heads=2,
        attn_layers=["lsh", "local"],
        feed_forward_size=24,
        axial_pos_embds=False,
        max_position_embeddings=64,
        lsh_attn_chunk_length=4,
        local_attn_chunk_length=4,
        num_buckets=4,
        hash_seed=7,
        is_decoder=False,
        use_cache=False,
        **sizes,
    )
    model = transformers.ReformerModel(config)
    inputs = draw_tokens(24, num_padded=3)
    captures = check_model(model, "LocalSelfAttention", inputs)
    check_model(model, "LSHSelfAttention", inputs)
    sums = captures["encoder.layers.0.attention.self_attention"].weights().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


# ------------------------------------------------------------------------------------- several softmaxes


def test_prophetnet_has_the_main_stream_then_the_predicted_ones() -> None:
    torch.manual_seed(0)
    config = transformers.ProphetNetConfig(
        vocab_size=50,
        hidden_size=16,
        num_encoder_layers=1,
        num_decoder_layers=2,
        num_encoder_attention_heads=2,
        num_decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        ngram=2,
        use_cache=False,
    )
    model = transformers.ProphetNetModel(config)
    inputs = draw_tokens(7) | {"decoder_input_ids": torch.arange(5, 15).view(2, 5)}
    captures = check_model(model, "ProphetNetNgramSelfAttention", inputs, values="value_proj", output="out_proj")
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
    weights = captures["decoder.layers.1.self_attn"].weights()
    assert weights.shape == (2, 2, 15, 15)
    torch.testing.assert_close(weights[:, :, :5, :5], result.decoder_attentions[1], atol=1e-6, rtol=1e-5)
    streams = result.decoder_ngram_attentions[1]  # (B, 2, H, 5, 5 + 5): over the main stream, and its own
    torch.testing.assert_close(weights[:, :, 5:10, 5:10], streams[:, 0, :, :, 5:], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights[:, :, 10:, :5], streams[:, 1, :, :, :5], atol=1e-6, rtol=1e-5)


def test_fusion_in_both_directions() -> None:
    from transformers.models.grounding_dino import modeling_grounding_dino as grounding_dino

    torch.manual_seed(0)
    config = transformers.GroundingDinoConfig(d_model=16, encoder_ffn_dim=32, encoder_attention_heads=4)
    module = grounding_dino.GroundingDinoBiMultiHeadAttention(config).eval()
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    inputs = {"vision_features": torch.randn(2, 7, 16), "text_features": torch.randn(2, 5, 16)}
    inputs["text_attention_mask"] = padding
    with torch.no_grad(), watch(module) as captures:
        (_, over_text), (_, over_image) = module(**inputs)
    assert [call.shape for call in captures.calls] == [(2, 2, 7, 5), (2, 2, 5, 7)]
    assert {call.kind for call in captures.calls} == {"cross"}
    for call, expected in zip(captures.calls, (over_text, over_image), strict=True):
        torch.testing.assert_close(call.weights(), expected.view(call.shape), atol=1e-6, rtol=1e-5)


def test_hard_assignment() -> None:
    from transformers.models.groupvit.modeling_groupvit import GroupViTAssignAttention

    torch.manual_seed(0)
    module = GroupViTAssignAttention(transformers.GroupViTVisionConfig(hidden_size=16)).eval()
    query, key = torch.randn(2, 3, 16), torch.randn(2, 11, 16)
    with torch.no_grad(), watch(module) as captures:
        module(query, key)
        scores = module.q_proj(query) @ module.k_proj(key).mT
    one_hot = nn.functional.one_hot(scores.argmax(1), 3).mT.float()  # each key belongs to one group
    torch.testing.assert_close(captures[0].weights()[:, 0], one_hot / (one_hot.sum(-1, keepdim=True) + 1.0))


# ---------------------------------------------------------------------------------------- audio and images


def test_chunks_of_audio() -> None:
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioAttention

    torch.manual_seed(0)
    config = transformers.Gemma3nAudioConfig(
        hidden_size=16, conf_num_attention_heads=2, conf_attention_chunk_size=4, conf_attention_context_left=5
    )
    module = Gemma3nAudioAttention(config).eval()
    args = torch.randn(2, 11, 16), torch.zeros(2, 11, dtype=torch.bool)
    with torch.no_grad(), watch(module) as captures:
        module(*args)
    weights = captures[0].weights()
    torch.testing.assert_close(weights, differentiate(module, args, {}, values="v_proj"), atol=1e-6, rtol=1e-5)
    assert captures[0].is_causal
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 11))


def test_chunks_of_audio_within_a_model() -> None:
    torch.manual_seed(0)
    sizes = {"attention_chunk_size": 4, "attention_context_left": 5}
    config = transformers.Gemma4AudioConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, **sizes)
    mask = torch.ones(2, 48, dtype=torch.bool)
    mask[1, 40:] = False
    inputs = {"input_features": torch.randn(2, 48, 128), "attention_mask": mask}
    model = transformers.Gemma4AudioModel(config)
    captures = check_model(model, "Gemma4AudioAttention", inputs, values="v_proj", output="post")
    assert captures[0].shape == (2, 2, 12, 12)


@pytest.mark.parametrize("num_coordinates", [2, 4])
def test_deformable_attention_is_a_map_over_the_positions_of_all_levels(num_coordinates: int) -> None:
    from transformers.models.deformable_detr import modeling_deformable_detr as deformable_detr

    torch.manual_seed(0)
    config = transformers.DeformableDetrConfig(d_model=16, num_feature_levels=2)
    module = deformable_detr.DeformableDetrMultiscaleDeformableAttention(config, num_heads=2, n_points=3).eval()
    with torch.no_grad():
        module.sampling_offsets.bias.normal_()
        module.attention_weights.weight.normal_()
    levels = [(3, 5), (2, 3)]
    inputs = {
        "hidden_states": torch.randn(2, 7, 16),
        "encoder_hidden_states": torch.randn(2, 21, 16),
        "reference_points": torch.rand(2, 7, 2, num_coordinates),
        "spatial_shapes": torch.tensor(levels),
        "spatial_shapes_list": levels,
        "level_start_index": torch.tensor([0, 15]),
    }
    with torch.no_grad(), watch(module) as captures:
        module(**inputs)
    expected = differentiate(module, (), inputs, values="value_proj", output="output_proj")
    torch.testing.assert_close(captures[0].weights(), expected, atol=1e-6, rtol=1e-5)
    assert not captures.missed_layers  # the kernel that it calls is a part of it


@pytest.mark.parametrize("method", ["default", "discrete"])
def test_deformable_attention_of_rt_detr(method: str) -> None:
    from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as rt_detr

    torch.manual_seed(0)
    config = transformers.RTDetrV2Config(
        d_model=16, decoder_attention_heads=2, decoder_n_points=3, decoder_n_levels=2, decoder_method=method
    )
    module = rt_detr.RTDetrV2MultiscaleDeformableAttention(config).eval()
    levels = [(3, 5), (2, 3)]
    inputs = {
        "hidden_states": torch.randn(2, 7, 16),
        "encoder_hidden_states": torch.randn(2, 21, 16),
        "reference_points": torch.rand(2, 7, 1, 4),
        "spatial_shapes": torch.tensor(levels),
        "spatial_shapes_list": levels,
    }
    with torch.no_grad(), watch(module) as captures:
        module(**inputs)
    expected = differentiate(module, (), inputs, values="value_proj", output="output_proj")
    torch.testing.assert_close(captures[0].weights(), expected, atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------------------------------------- limits


def test_half_precision_inference_mode_and_autocast() -> None:
    inputs = draw_tokens(24)
    model = build_longformer().eval()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = model(**inputs)[0]
        with watch(model) as captures:
            assert torch.equal(model(**inputs)[0], expected)
    sums = captures[0].weights().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=2e-2, rtol=0)
    model = model.bfloat16()
    with torch.inference_mode():
        expected = model(**inputs)[0]
        with watch(model) as captures:
            assert torch.equal(model(**inputs)[0], expected)
    assert captures[0].shape == (2, 2, 24, 24)


def test_active_dropout_is_a_reason_to_miss() -> None:
    model = build_longformer().train()
    with pytest.raises(InputError, match="its dropout is active"), watch(model):
        model(**draw_tokens(24))


class TalkingHeads(nn.Module):
    """A sum of values with weights that differ between features, under the name of a probed class."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.value, self.mix = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        weights = (x @ x.mT).softmax(-1)
        return (self.mix(weights @ self.value(x)),)


def test_a_sum_with_other_weights_is_missed_not_wrong() -> None:
    torch.manual_seed(0)
    cls = type("BigBirdBlockSparseAttention", (TalkingHeads,), {})
    with pytest.raises(InputError, match="not a sum of its values with one weight"), watch(module := cls()):
        module(torch.randn(1, 5, 8))


def test_excluded_layers_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_longformer().eval()
    replays = count_replays(monkeypatch)
    with torch.no_grad(), watch(model, layers="encoder.layer.1.*") as captures:
        model(**draw_tokens(24))
    assert captures.names == ["encoder.layer.1.attention.self"]
    assert not captures.missed_layers
    assert len(replays) == 3 + 24 // 8  # three to check one layer, and one for each eight features of a head
    with pytest.raises(InputError, match="none of the layers that ran"), watch(model, layers="decoder.*"):
        model(**draw_tokens(24))


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    replays: list[None] = []
    replay = ValueTrace.replay
    monkeypatch.setattr(ValueTrace, "replay", lambda *args: replays.append(None) or replay(*args))
    return replays


def test_knock_out_is_rejected() -> None:
    model = build_longformer().eval()
    with (
        pytest.raises(InputError, match="computes its weights in parts"),
        knock_out(model, {"encoder.layer.0.attention.self": 1}),
    ):
        model(**draw_tokens(24))


def test_many_keys_are_stored_sparsely() -> None:
    model = build_longformer().eval()
    with torch.no_grad(), watch(model) as captures:
        model(**draw_tokens(60))
    assert captures[0].attention.query.shape == (2, 2, 60, 1)  # numbers of rows
    assert captures[0].weights(rows=slice(30, 32), cols=slice(28, 34)).shape == (2, 2, 2, 6)
