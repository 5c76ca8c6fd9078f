"""The steps of a generation are merged into one attention per layer, for every cache and search."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captures import CapturedLayer, Captures
from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out

transformers = pytest.importorskip("transformers", minversion="5")
from tiny_models import attend_with_sinks, build_inputs, build_model, random_ids  # noqa: E402

pytestmark = pytest.mark.long


NUM_NEW = 6  # tokens that are generated


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


def generate(model: Any, **options: Any) -> tuple[Tensor, Captures]:
    """Return the sequences, which are the same as without ``watch``, and the captures."""
    torch.manual_seed(1)
    plain = model.generate(max_new_tokens=NUM_NEW, **options)
    torch.manual_seed(1)
    with watch(model, tokenizer=lambda row: [f"w{i}" for i in row]) as captures:
        watched = model.generate(max_new_tokens=NUM_NEW, **options)
    assert torch.equal(plain, watched)
    assert "generate" not in vars(model)
    return watched, captures


def assert_weights_equal(weights: Tensor, expected: Tensor) -> None:
    """Compare the rows that have an allowed key."""
    has_keys = weights.sum(-1) > 0
    expected = expected[:, :, : weights.shape[2], : weights.shape[3]]
    torch.testing.assert_close(weights[has_keys], expected[has_keys], atol=1e-5, rtol=0)
    assert has_keys.float().mean() > 0.5


def run_with_attentions(model: Any, sequences: Tensor | None = None, **options: Any) -> Any:
    """Return the output with attentions of one forward. The last token of a generation is never an input."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(
            **({} if sequences is None else {"input_ids": sequences[:, :-1]}), output_attentions=True, **options
        )


def get_layer_index(layer: CapturedLayer) -> int:
    return int(next(part for part in layer.name.split(".") if part.isdigit()))


def check_weights(captures: Captures, expected: Any) -> None:
    for layer, weights in zip(captures, expected.attentions, strict=True):
        assert_weights_equal(layer.weights(), weights)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "search",
    [
        {},
        {"do_sample": True, "num_return_sequences": 3},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_beams": 4, "num_return_sequences": 4, "use_cache": False},
    ],
    ids=["greedy", "sample", "static", "no cache", "beams", "beams returned", "beams without cache"],
)
def test_decoder(search: dict[str, Any], padded: bool) -> None:
    model, prompt = build_model("llama"), random_ids(2, 5)
    mask = torch.ones_like(prompt)
    if padded:
        mask[1, :2] = 0
    sequences, captures = generate(model, input_ids=prompt, attention_mask=mask, **search)
    assert captures.names == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert len(captures) == 2
    assert len(captures.calls) == 2 * NUM_NEW
    rows = len(sequences)
    whole = torch.cat([mask, torch.ones(2, NUM_NEW - 1, dtype=torch.long)], 1).repeat_interleave(rows // 2, 0)
    expected = run_with_attentions(model, sequences, attention_mask=whole).attentions
    for layer, weights in zip(captures, expected, strict=True):
        assert layer.shape == (rows, 6, 5 + NUM_NEW - 1, 5 + NUM_NEW - 1)
        assert layer.is_causal
        assert_weights_equal(layer.weights(), weights)
        assert layer.query_ids is not None
        assert torch.equal(layer.query_ids, sequences[:, :-1])
        assert layer.query_tokens == layer.key_tokens
    assert captures[0].query_tokens is not None
    assert captures[0].query_tokens[0] == [f"w{i}" for i in sequences[0, :-1].tolist()]


@pytest.mark.parametrize(
    "search",
    [{}, {"num_beams": 4, "num_return_sequences": 2}, {"use_cache": False}],
    ids=["greedy", "beams", "no cache"],
)
def test_a_sink_for_each_query(search: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend_with_sinks)
    model, prompt = build_model("llama"), random_ids(2, 5)
    model.set_attn_implementation("eager")
    sequences, captures = generate(model, input_ids=prompt, attention_mask=torch.ones_like(prompt), **search)
    check_weights(captures, run_with_attentions(model, sequences))
    assert captures[0].weights().sum(-1).min() < 0.9
    assert all(call.weights().sum(-1).min() < 0.9 for call in captures.calls)


@pytest.mark.parametrize(
    "search",
    [{}, {"num_beams": 4, "num_return_sequences": 4}, {"use_cache": False}],
    ids=["greedy", "beams", "no cache"],
)
def test_weights_that_are_modified_after_the_softmax(search: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bloom import modeling_bloom

    class ModifiedFunctional:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.nn.functional, name)

        def softmax(self, scores: Tensor, **options: Any) -> Tensor:
            return scores.softmax(**options) * 0.5

    monkeypatch.setattr(modeling_bloom, "F", ModifiedFunctional())
    model, prompt = build_model("bloom_lm"), random_ids(2, 5)
    options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": None}
    sequences, captures = generate(model, input_ids=prompt, **options, **search)
    check_weights(captures, run_with_attentions(model, sequences))
    for layer in (*captures, *captures.calls):
        torch.testing.assert_close(layer.weights().sum(-1), torch.full(layer.shape[:3], 0.5))


def test_no_mask_without_padding() -> None:
    _, captures = generate(build_model("llama"), input_ids=random_ids(2, 5))
    assert captures[0].attention.mask is None
    assert captures[0].attention.diagonal == 0
    assert captures[0].attention.key.shape[1] == 2  # of grouped queries


def test_calls_are_stored_as_computed() -> None:
    model, prompt = build_model("llama"), random_ids(2, 5)
    sequences, captures = generate(model, input_ids=prompt, num_beams=3)
    first, last = captures.calls[0], captures.calls[-1]
    assert first.shape == (6, 6, 5, 5)  # three beams for each of two prompts
    assert last.shape == (6, 6, 1, 5 + NUM_NEW - 1)
    previous = captures.calls[-3]  # of the same layer
    assert (last.name, previous.name) == ("model.layers.1.self_attn",) * 2
    torch.testing.assert_close(last.weights().sum(-1), torch.ones(6, 6, 1))
    assert last.query_ids is not None
    assert last.query_ids.shape == (6, 1)
    # A row of the last step is the last row of each returned sequence.
    whole = captures["model.layers.1.self_attn"].weights()[:, :, -1:]
    for row in range(2):
        distances = (last.weights() - whole[row]).flatten(1).abs().amax(1)
        assert distances.min() < 1e-5
    assert len(sequences) == 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["mistral", "mistral with a static cache", "gpt2"])
def test_sliding_windows_and_gpt2(name: str, implementation: str) -> None:
    model = build_model(name.split()[0], eos_token_id=None)
    model.set_attn_implementation(implementation)
    options = {"cache_implementation": "static"} if "static" in name else {}
    sequences, captures = generate(model, input_ids=random_ids(2, 5), **options)
    check_weights(captures, run_with_attentions(model, sequences))


def test_autocast() -> None:
    model = build_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        _, captures = generate(model, input_ids=random_ids(2, 5), attention_mask=torch.ones(2, 5, dtype=torch.long))
    for layer in captures:
        assert layer.shape == (2, 6, 5 + NUM_NEW - 1, 5 + NUM_NEW - 1)
        assert layer.is_causal
        torch.testing.assert_close(layer.weights().sum(-1), torch.ones(layer.shape[:3]))


@pytest.mark.parametrize(
    ("name", "search"),
    [
        ("bloom_lm", {}),
        ("bloom_lm", {"cache_implementation": "static"}),
        ("bloom_lm", {"num_beams": 3}),
        ("bloom_lm", {"num_beams": 4, "num_return_sequences": 4}),
        ("bloom_lm", {"num_beams": 3, "use_cache": False}),
        ("mpt", {"num_beams": 4, "num_return_sequences": 4}),  # it has no cache
    ],
    ids=["greedy", "static", "beams", "beams returned", "no cache", "mpt"],
)
def test_models_with_handwritten_attention(name: str, search: dict[str, Any]) -> None:
    model, prompt = build_model(name), random_ids(2, 5)
    options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": None}
    sequences, captures = generate(model, input_ids=prompt, **options, **search)
    expected = run_with_attentions(model, sequences).attentions
    assert len(captures) == len(expected) == 2
    for layer, weights in zip(captures, expected, strict=True):
        assert layer.shape == (len(sequences), 3, 5 + NUM_NEW - 1, 5 + NUM_NEW - 1)
        assert_weights_equal(layer.weights(), weights)
        torch.testing.assert_close(layer.weights().sum(-1), torch.ones(layer.shape[:3]))
    for layer in captures.calls:
        torch.testing.assert_close(layer.weights().sum(-1), torch.ones(layer.shape[:3]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    from transformers.integrations.flex_attention import WrappedFlexAttention

    monkeypatch.setattr(WrappedFlexAttention, "_instance", None)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    model = build_model("llama")
    model.set_attn_implementation("flex_attention")
    sequences, captures = generate(model, input_ids=random_ids(2, 5))
    check_weights(captures, run_with_attentions(model, sequences))


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 3}])
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_encoder_decoder_models(name: str, search: dict[str, Any]) -> None:
    model, inputs = build_model(name), build_inputs(name, for_generation=True)
    sequences, captures = generate(model, **inputs, **search)
    num_per_prompt = len(sequences) // 2
    repeated = {key: x.repeat_interleave(num_per_prompt, 0) for key, x in inputs.items()}
    out = run_with_attentions(model, **repeated, decoder_input_ids=sequences[:, :-1])
    assert len(captures) == 6
    for layer in captures:
        index = get_layer_index(layer)
        if "decoder" not in layer.name:
            assert_weights_equal(layer.weights(), out.encoder_attentions[index][::num_per_prompt])
            assert torch.equal(_require(layer.query_ids), inputs["input_ids"])
            continue
        assert_weights_equal(
            layer.weights(),
            (out.cross_attentions if layer.kind == "cross" else out.decoder_attentions)[index],
        )
        assert torch.equal(_require(layer.query_ids), sequences[:, : layer.shape[2]])
        if layer.kind == "cross":
            assert torch.equal(_require(layer.key_ids), repeated["input_ids"])


def _require(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def test_beams_that_end_early() -> None:
    model, prompt = build_model("gpt2", initializer_range=0.5), random_ids(2, 3)
    with torch.no_grad():
        model.lm_head.weight[2] *= 3  # sequences end early
    torch.manual_seed(1)
    sequences, captures = generate(model, input_ids=prompt, num_beams=4, num_return_sequences=4)
    lengths = (sequences == 2).int().argmax(1).tolist()
    assert len({length for length in lengths if length}) > 1  # of different lengths
    expected = run_with_attentions(model, sequences).attentions
    for layer, weights in zip(captures, expected, strict=True):
        assert_weights_equal(layer.weights(), weights)
        for row, length in enumerate(lengths):
            if length:  # the end token is not an input, and what follows it is padding
                assert layer.weights(batch=row)[:, length:].sum() == 0
                assert (layer.weights(batch=row)[:, length - 1].sum(-1) - 1).abs().max() < 1e-5


def test_assisted_generation_with_rejected_tokens() -> None:
    model, assistant = build_model("llama"), build_model("llama")
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    sequences, captures = generate(model, input_ids=random_ids(1, 5), assistant_model=assistant)
    assert max(layer.shape[2] for layer in captures.calls[2:]) > 1
    check_weights(captures, run_with_attentions(model, sequences))
    assert all(layer.shape[2:] == (5 + NUM_NEW - 1,) * 2 for layer in captures)


def test_whisper() -> None:
    model, inputs = build_model("whisper"), build_inputs("whisper")
    _, captures = generate(model, input_features=inputs["input_features"], attention_mask=torch.ones(2, 22))
    assert captures["model.encoder.layers.0.self_attn"].shape == (2, 3, 11, 11)
    cross = captures["model.decoder.layers.1.encoder_attn"]
    # The returned sequences omit the first token.
    out = run_with_attentions(model, input_features=inputs["input_features"], decoder_input_ids=cross.query_ids)
    assert_weights_equal(cross.weights(), out.cross_attentions[1])


def test_whisper_beams() -> None:
    model, inputs = build_model("whisper", init_std=0.5), build_inputs("whisper")
    options = {"input_features": inputs["input_features"], "attention_mask": torch.ones(2, 22)}
    sequences, captures = generate(model, num_beams=3, **options)
    assert not captures.missed_layers
    cross, inner = (captures[f"model.decoder.layers.1.{kind}_attn"] for kind in ("encoder", "self"))
    assert cross.query_ids is not None
    assert torch.equal(cross.query_ids[:, 0], torch.ones(2, dtype=torch.long))
    assert torch.equal(cross.query_ids[:, 1:], sequences[:, : cross.shape[2] - 1])
    out = run_with_attentions(model, input_features=inputs["input_features"], decoder_input_ids=cross.query_ids)
    assert_weights_equal(cross.weights(), out.cross_attentions[1])
    assert_weights_equal(inner.weights(), out.decoder_attentions[1])


def test_beams_over_embeddings_are_reported() -> None:
    model = build_model("llama")
    embedded = torch.randn(1, 5, 24)
    reason = rf"captures\.calls has all {2 * NUM_NEW} calls.*its {NUM_NEW} steps.*beam search over embeddings"
    with pytest.raises(InputError, match=reason), watch(model) as captures:
        model.generate(inputs_embeds=embedded, num_beams=3, max_new_tokens=NUM_NEW)
    assert len(captures.calls) == 2 * NUM_NEW


def test_greedy_search_over_embeddings() -> None:
    model, prompt = build_model("llama"), random_ids(1, 5)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(prompt)
    with watch(model) as captures:
        new = model.generate(inputs_embeds=embedded, max_new_tokens=NUM_NEW)
    sequences = torch.cat([prompt, new], 1)
    check_weights(captures, run_with_attentions(model, sequences))


def test_generations_and_forwards_are_separate_layers() -> None:
    model, prompt = build_model("llama"), random_ids(1, 5)
    with watch(model, layers="*.0.*") as captures:
        model.generate(prompt, max_new_tokens=NUM_NEW)
        model(prompt)
        model.generate(prompt, max_new_tokens=2)
    assert [layer.shape[2] for layer in captures] == [5 + NUM_NEW - 1, 5, 6]


def test_calls_of_a_generation_that_raises() -> None:
    class StopError(Exception):
        pass

    def stop(scores: Any, *args: Any) -> Any:
        if scores.shape[1] == 8:
            raise StopError
        return torch.zeros(len(scores), dtype=torch.bool)

    model = build_model("llama")
    with pytest.raises(StopError), watch(model) as captures:
        model.generate(random_ids(1, 5), max_new_tokens=NUM_NEW, stopping_criteria=[stop])
    assert len(captures) == 0
    assert len(captures.calls) == 6
    assert "generate" not in vars(model)
    assert captures.calls[-1].weights().shape == (1, 6, 1, 7)


def test_compiled_generation_is_refused_with_the_remedy() -> None:
    model = build_model("llama")
    config = transformers.CompileConfig()
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config, "max_new_tokens": NUM_NEW}
    with pytest.raises(InputError, match="disable_compile=True"), watch(model):
        model.generate(random_ids(1, 5), **options)
    with watch(model) as captures:
        model.generate(random_ids(1, 5), disable_compile=True, **options)
    assert len(captures) == 2


def test_each_key_is_stored_once() -> None:
    model = build_model("llama")
    with watch(model) as captures:
        model.generate(random_ids(1, 5), max_new_tokens=40)
    storages = {layer._source._step.new_keys.untyped_storage().data_ptr() for layer in captures.calls}  # type: ignore[attr-defined]
    assert len(storages) == 2 * 40
    total = sum(layer._source._step.new_keys.numel() for layer in captures.calls)  # type: ignore[attr-defined]
    assert total == 2 * (5 + 39) * 2 * 4  # layers · tokens · heads · width


def test_knock_out_edges_by_their_positions_in_the_sequence() -> None:
    model, prompt, layer = build_model("llama"), random_ids(1, 5), "model.layers.0.self_attn"
    edges = [(2, 1), (7, 3)]  # one in the prompt, one after it
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        model.set_attn_implementation("sdpa")
        with knock_out(model, {layer: edges}), watch(model) as captures:
            sequences = model.generate(prompt, max_new_tokens=NUM_NEW, **options)
        weights = captures[layer].weights()
        assert weights[:, :, 2, 1].abs().max() == 0
        assert weights[:, :, 7, 3].abs().max() == 0
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 6, 5 + NUM_NEW - 1))
        with knock_out(model, {layer: edges}):
            out = run_with_attentions(model, sequences)
        assert_weights_equal(weights, out.attentions[0])
        assert_weights_equal(captures[1].weights(), out.attentions[1])  # the next layer has another input


def test_knock_out_in_all_beams() -> None:
    model, layer = build_model("llama"), "model.layers.0.self_attn"
    with knock_out(model, {layer: [1, (2, 1), (7, 3)]}), watch(model) as captures:
        sequences = model.generate(random_ids(2, 5), max_new_tokens=NUM_NEW, num_beams=3, num_return_sequences=2)
    weights = captures[layer].weights()
    assert weights[:, 1].sum() == weights[:, :, 2, 1].sum() == weights[:, :, 7, 3].sum() == 0
    with knock_out(model, {layer: [1, (2, 1), (7, 3)]}):
        out = run_with_attentions(model, sequences)
    assert_weights_equal(weights, out.attentions[0])
    assert_weights_equal(captures[1].weights(), out.attentions[1])


def test_encoder_decoder_model_without_a_cache() -> None:
    model, inputs = build_model("t5"), build_inputs("t5", for_generation=True)
    sequences, captures = generate(model, **inputs, use_cache=False)
    out = run_with_attentions(model, **inputs, decoder_input_ids=sequences[:, :-1])
    assert_weights_equal(captures["decoder.block.1.layer.0.SelfAttention"].weights(), out.decoder_attentions[1])
    assert_weights_equal(captures["decoder.block.1.layer.1.EncDecAttention"].weights(), out.cross_attentions[1])


def test_generation_that_continues_a_cache() -> None:
    model, prompt = build_model("llama"), random_ids(1, 5)
    first = model.generate(prompt, max_new_tokens=3, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, random_ids(1, 2)], 1)  # 10 tokens, of which 7 are in the cache
    with watch(model) as captures:
        sequences = model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=NUM_NEW)
    for layer, weights in zip(captures, run_with_attentions(model, sequences).attentions, strict=True):
        assert layer.shape == (1, 6, 3 + NUM_NEW - 1, 10 + NUM_NEW - 1)  # from the first new token on
        torch.testing.assert_close(layer.weights(), weights[:, :, 7:], atol=1e-5, rtol=0)


class FavouredStart(transformers.LogitsProcessor):  # type: ignore[misc]
    """Makes the start token likely as the first two tokens, and the end likely from the fourth on."""

    def __init__(self, start: int, margin: float) -> None:
        self.start, self.margin = start, margin

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        if tokens.shape[1] <= 2:
            scores[:, self.start] = scores.amax(1) + self.margin
        if tokens.shape[1] > 3:
            scores[:, 2] += 1.5
        return scores


MODEL_OPTIONS = {
    "whisper": ({"init_std": 0.5}, 1, 1.0),
    "marian": ({}, 0, 1.0),
    "t5": ({"initializer_factor": 3.0}, 0, 1.0),
    "gpt2": ({"initializer_range": 0.5}, 5, 3.0),
}


@pytest.mark.parametrize(
    ("beams", "returned", "penalty", "use_cache"),
    [(2, 1, -2.0, True), (3, 3, 3.0, True), (3, 1, 1.0, False)],
)
@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_beams_whose_first_token_is_the_start_token(
    name: str, beams: int, returned: int, penalty: float, use_cache: bool
) -> None:
    options, start, margin = MODEL_OPTIONS[name]
    model = build_model(name, **options)
    if name == "gpt2":
        inputs = {"input_ids": torch.full((2, 1), start), "attention_mask": torch.ones(2, 1, dtype=torch.long)}
    else:
        inputs = build_inputs(name, for_generation=True)
    search = {"num_beams": beams, "num_return_sequences": returned, "length_penalty": penalty}
    processors = [FavouredStart(start, margin)]
    sequences, captures = generate(model, **inputs, **search, use_cache=use_cache, logits_processor=processors)
    if name == "whisper":  # it returns the sequences without the start token
        sequences = torch.cat([torch.full_like(sequences[:, :1], start), sequences], 1)
    assert (sequences[:, 1] == start).any()
    repeated = {key: x.repeat_interleave(returned, 0) for key, x in inputs.items()}
    if name == "gpt2":
        attentions = {"self": run_with_attentions(model, sequences).attentions}
    else:
        out = run_with_attentions(model, **repeated, decoder_input_ids=sequences[:, :-1])
        attentions = {"self": out.decoder_attentions, "cross": out.cross_attentions}
    assert not captures.missed_layers
    layers = [layer for layer in captures if name == "gpt2" or "decoder" in layer.name]
    assert len(layers) == 2 * len(attentions)
    for layer in layers:
        index = get_layer_index(layer)
        for row, tokens in enumerate(sequences.tolist()):
            num_inputs = tokens.index(2, 1) if 2 in tokens[1:] else len(tokens) - 1  # all tokens but the last
            weights, expected = layer.weights(batch=row), attentions[layer.kind][index][row]
            keys = num_inputs if layer.kind == "self" else expected.shape[-1]
            torch.testing.assert_close(
                weights[:, :num_inputs, :keys], expected[:, :num_inputs, :keys], atol=1e-5, rtol=0
            )
            assert weights[:, num_inputs:].sum() == 0
            assert _require(layer.query_ids)[row, :num_inputs].tolist() == tokens[:num_inputs]


def test_generate_method_that_removes_the_prompt() -> None:
    class PromptRemovingModel(transformers.GPT2LMHeadModel):  # type: ignore[misc]
        def generate(self, prompt: Tensor, **options: Any) -> Tensor:
            best = super().generate(prompt, **options)
            return best[:, prompt.shape[1] :]

    # The search inside returns all tokens.
    model = build_model("gpt2", initializer_range=0.5, eos_token_id=None)
    prompt = torch.full((2, 1), 5)
    search = {"num_beams": 3, "logits_processor": [FavouredStart(5, 1.0)], "max_new_tokens": NUM_NEW}
    whole = model.generate(prompt, **search)
    model.__class__ = PromptRemovingModel
    with watch(model) as captures:
        model.generate(prompt, **search)
    assert torch.equal(_require(captures[0].query_ids), whole[:, : captures[0].shape[2]])
    check_weights(captures, run_with_attentions(model, whole))


def test_calls_of_steps_that_cannot_be_merged() -> None:
    cache = transformers.DynamicCache()

    class CacheModifier(transformers.LogitsProcessor):  # type: ignore[misc]
        """Changes the keys in the cache of the first layer after every step, as a quantized cache may.

        The keys that a step saw are then known to nobody.
        """

        def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
            cache.layers[0].keys = cache.layers[0].keys * 1.5
            return scores

    model = build_model("llama")
    options = {"past_key_values": cache, "logits_processor": [CacheModifier()], "max_new_tokens": 10}
    with pytest.warns(UserWarning, match="its 10 steps cannot be merged"), watch(model) as captures:
        model.generate(random_ids(1, 5), **options)
    first, second = "model.layers.0.self_attn", "model.layers.1.self_attn"
    assert captures.names == [second]
    assert "its cache changes the keys of earlier steps" in captures.missed_layers[first]
    assert {layer.name for layer in captures.calls} == {second}
    assert [layer.shape for layer in captures.calls] == [(1, 6, 5, 5)] + [(1, 6, 1, 5 + n) for n in range(1, 10)]
    for layer in captures.calls:
        torch.testing.assert_close(layer.weights().sum(-1), torch.ones(layer.shape[:3]))


def test_later_steps_track_few_modules() -> None:
    model, counts = build_model("llama"), []
    hooks = torch.nn.modules.module._global_forward_hooks

    def count_hooks(tokens: Tensor, scores: Tensor) -> Tensor:
        counts.append(len(hooks))
        return scores

    generate(model, input_ids=random_ids(1, 5), logits_processor=[count_hooks])
    assert counts[NUM_NEW:] == [0] * NUM_NEW  # after the first forward; the first counts are those without watch
    assert not hooks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_later_steps_that_attend_in_another_way_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama")
    module, num_steps = model.get_submodule("model.layers.1.self_attn"), 0
    forward = module.forward

    def attend(hidden_states: Tensor, **options: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps < 4:
            return forward(hidden_states, **options)
        x = hidden_states[:, None]  # not through the interface of transformers, which names the module
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)[:, 0], None

    monkeypatch.setattr(module, "forward", attend)
    with pytest.warns(UserWarning, match="attends in another way than the first"), watch(model) as captures:
        model.generate(random_ids(1, 5), max_new_tokens=NUM_NEW)
    assert captures["model.layers.0.self_attn"].shape == (1, 6, 5 + NUM_NEW - 1, 5 + NUM_NEW - 1)


def test_calls_that_cannot_be_merged_copy_the_keys_of_a_static_cache() -> None:
    model = build_model("llama")

    class CacheModifier(transformers.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
            cache.layers[0].keys.mul_(1.5)
            return scores

    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    expected: list[Tensor] = []
    with pytest.warns(UserWarning, match="cannot be merged"), watch(model) as captures:
        model.generate(
            random_ids(1, 5),
            past_key_values=cache,
            logits_processor=[CacheModifier(), lambda t, s: expected.append(cache.layers[0].keys.clone()) or s],
            max_new_tokens=4,
        )
    calls = [layer for layer in captures.calls if layer.name == "model.layers.0.self_attn"]
    assert len(calls) == 4
    for layer, after in zip(calls[1:], expected[1:], strict=True):
        known = 5 + 1
        torch.testing.assert_close(layer.attention.key[:, :, :known] * 1.5, after[:, :, :known])


def test_each_segment_of_long_audio_has_its_own_layers() -> None:
    model = build_model("whisper", init_std=0.5)
    model.generation_config.no_timestamps_token_id = 30
    torch.manual_seed(0)
    audio = {
        "input_features": torch.randn(1, 7, 60),
        "attention_mask": torch.ones(1, 60),
    }  # 22 frames are one
    with watch(model) as captures:
        model.generate(**audio, return_timestamps=True, num_beams=2, max_new_tokens=5)
    segments = captures.find_layers("model.decoder.layers.1.encoder_attn")
    assert len(segments) == len(captures.find_layers("model.encoder.layers.0.self_attn")) > 1
    assert not captures.missed_layers
    assert sum(layer.shape[2] for layer in segments) == len(
        [layer for layer in captures.calls if layer.name == "model.decoder.layers.1.encoder_attn"]
    )
