"""watch: the steps of a generation are one attention a layer, whatever the cache and the search."""

import sys
from collections.abc import Iterator
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
sys.path.insert(0, str(Path(__file__).parents[1]))

from watch_models import ids, inputs, tiny  # noqa: E402

NEW = 6  # tokens that are generated


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def generated(model: Any, **options: Any) -> tuple[Tensor, Captures]:
    """The sequences, which are the same as without watch, and what was seen."""
    torch.manual_seed(1)
    before = model.generate(max_new_tokens=NEW, **options)
    torch.manual_seed(1)
    with watch(model, tokenizer=lambda row: [f"w{i}" for i in row]) as seen:
        watched = model.generate(max_new_tokens=NEW, **options)
    assert torch.equal(before, watched)
    assert "generate" not in vars(model)
    return watched, seen


def equal(weights: Tensor, expected: Tensor) -> None:
    """In all rows that have an allowed key."""
    alive = weights.sum(-1) > 0
    expected = expected[:, :, : weights.shape[2], : weights.shape[3]]
    torch.testing.assert_close(weights[alive], expected[alive], atol=1e-5, rtol=0)
    assert alive.float().mean() > 0.5


def told(model: Any, sequences: Tensor, **options: Any) -> Any:
    """What the model attends to when it reads all but the last token at once: that one is never fed to it."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(sequences[:, :-1], output_attentions=True, **options)


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
    ],
    ids=["greedy", "sample", "static", "no cache", "beams", "beams returned"],
)
def test_decoders(search: dict[str, Any], padded: bool) -> None:
    model, prompt = tiny("llama"), ids(2, 5)
    mask = torch.ones_like(prompt)
    if padded:
        mask[1, :2] = 0
    sequences, seen = generated(model, input_ids=prompt, attention_mask=mask, **search)
    assert seen.names == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert len(seen) == 2
    assert len(seen.calls) == 2 * NEW
    rows = len(sequences)
    whole = torch.cat([mask, torch.ones(2, NEW - 1, dtype=torch.long)], 1).repeat_interleave(rows // 2, 0)
    expected = told(model, sequences, attention_mask=whole).attentions
    for entry, weights in zip(seen, expected, strict=True):
        assert entry.shape == (rows, 6, 5 + NEW - 1, 5 + NEW - 1)
        assert entry.is_causal
        equal(entry.weights(), weights)
        assert entry.query_ids is not None
        assert torch.equal(entry.query_ids, sequences[:, :-1])
        assert entry.query_tokens == entry.key_tokens
    assert seen[0].query_tokens is not None
    assert seen[0].query_tokens[0] == [f"w{i}" for i in sequences[0, :-1].tolist()]


def test_without_padding_there_is_no_mask() -> None:
    _, seen = generated(tiny("llama"), input_ids=ids(2, 5))
    assert seen[0].attention.mask is None
    assert seen[0].attention.diagonal == 0
    assert seen[0].attention.key.shape[1] == 2  # of grouped queries


def test_every_call_is_there_as_it_was() -> None:
    model, prompt = tiny("llama"), ids(2, 5)
    sequences, seen = generated(model, input_ids=prompt, num_beams=3)
    first, last = seen.calls[0], seen.calls[-1]
    assert first.shape == (6, 6, 5, 5)  # three beams for each of two prompts
    assert last.shape == (6, 6, 1, 5 + NEW - 1)
    ancestors = seen.calls[-3]  # another step of the same layer: its rows are the beams of that step
    assert (last.name, ancestors.name) == ("model.layers.1.self_attn",) * 2
    torch.testing.assert_close(last.weights().sum(-1), torch.ones(6, 6, 1))
    assert last.query_ids is not None
    assert last.query_ids.shape == (6, 1)
    # The row of the returned sequence at the last step says the same as the whole.
    whole = seen["model.layers.1.self_attn"].weights()[:, :, -1:]
    for one in range(2):
        distances = (last.weights() - whole[one]).flatten(1).abs().amax(1)
        assert distances.min() < 1e-5
    assert len(sequences) == 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_sliding_windows(cache: str, implementation: str) -> None:
    model = tiny("mistral")
    model.set_attn_implementation(implementation)
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    sequences, seen = generated(model, input_ids=ids(2, 5), **options)
    for entry, weights in zip(seen, told(model, sequences).attentions, strict=True):
        equal(entry.weights(), weights)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gpt2(implementation: str) -> None:
    model = tiny("gpt2", eos_token_id=None)
    model.set_attn_implementation(implementation)
    sequences, seen = generated(model, input_ids=ids(2, 5))
    for entry, weights in zip(seen, told(model, sequences).attentions, strict=True):
        equal(entry.weights(), weights)


@pytest.mark.parametrize(
    ("name", "search"),
    [
        ("bloom_that_writes", {}),
        ("bloom_that_writes", {"cache_implementation": "static"}),
        ("bloom_that_writes", {"num_beams": 3}),
        ("bloom_that_writes", {"num_beams": 4, "num_return_sequences": 4}),
        ("bloom_that_writes", {"num_beams": 3, "use_cache": False}),
        ("mpt", {"num_beams": 4, "num_return_sequences": 4}),  # it has no cache
    ],
    ids=["greedy", "static", "beams", "beams returned", "no cache", "mpt"],
)
def test_models_that_write_their_attention_out(name: str, search: dict[str, Any]) -> None:
    model, prompt = tiny(name), ids(2, 5)
    options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": None}
    sequences, seen = generated(model, input_ids=prompt, **options, **search)
    expected = told(model, sequences).attentions
    assert len(seen) == len(expected) == 2
    for entry, weights in zip(seen, expected, strict=True):
        assert entry.shape == (len(sequences), 3, 5 + NEW - 1, 5 + NEW - 1)
        equal(entry.weights(), weights)
        torch.testing.assert_close(entry.weights().sum(-1), torch.ones(entry.shape[:3]))
    for entry in seen.calls:
        torch.testing.assert_close(entry.weights().sum(-1), torch.ones(entry.shape[:3]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    from transformers.integrations.flex_attention import WrappedFlexAttention

    monkeypatch.setattr(WrappedFlexAttention, "_instance", None)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    model = tiny("llama")
    model.set_attn_implementation("flex_attention")
    sequences, seen = generated(model, input_ids=ids(2, 5))
    for entry, weights in zip(seen, told(model, sequences).attentions, strict=True):
        equal(entry.weights(), weights)


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 3}])
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_both_sides_of_a_translation(name: str, search: dict[str, Any]) -> None:
    model, given = tiny(name), inputs(name)
    del given["decoder_input_ids"]
    sequences, seen = generated(model, **given, **search)
    several = len(sequences) // 2
    repeated = {key: x.repeat_interleave(several, 0) for key, x in given.items()}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**repeated, decoder_input_ids=sequences[:, :-1], output_attentions=True)
    assert len(seen) == 6
    for entry in seen:
        layer = int(next(part for part in entry.name.split(".") if part.isdigit()))
        if "decoder" not in entry.name:
            equal(entry.weights(), out.encoder_attentions[layer][::several])
            assert torch.equal(_given(entry.query_ids), given["input_ids"])
            continue
        equal(
            entry.weights(),
            (out.cross_attentions if entry.kind == "cross" else out.decoder_attentions)[layer],
        )
        assert torch.equal(_given(entry.query_ids), sequences[:, : entry.shape[2]])
        if entry.kind == "cross":
            assert torch.equal(_given(entry.key_ids), repeated["input_ids"])


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def test_beams_that_end_early() -> None:
    model, prompt = tiny("gpt2", initializer_range=0.5), ids(2, 3)
    with torch.no_grad():
        model.lm_head.weight[2] *= 3  # so that the end is likely
    torch.manual_seed(1)
    sequences, seen = generated(model, input_ids=prompt, num_beams=4, num_return_sequences=4)
    lengths = (sequences == 2).int().argmax(1).tolist()
    assert len({length for length in lengths if length}) > 1  # of different lengths indeed
    expected = told(model, sequences).attentions
    for entry, weights in zip(seen, expected, strict=True):
        equal(entry.weights(), weights)
        for row, length in enumerate(lengths):
            if length:  # the token of the end is not fed, and what follows it is padding
                assert entry.weights(batch=row)[:, length:].sum() == 0
                assert (entry.weights(batch=row)[:, length - 1].sum(-1) - 1).abs().max() < 1e-5


def test_an_assistant_whose_guesses_are_rejected() -> None:
    model, assistant = tiny("llama"), tiny("llama")
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    sequences, seen = generated(model, input_ids=ids(1, 5), assistant_model=assistant)
    assert max(entry.shape[2] for entry in seen.calls[2:]) > 1
    for entry, weights in zip(seen, told(model, sequences).attentions, strict=True):
        assert entry.shape[2:] == (5 + NEW - 1,) * 2
        equal(entry.weights(), weights)


def test_a_model_that_hears() -> None:
    model, given = tiny("whisper"), inputs("whisper")
    _, seen = generated(model, input_features=given["input_features"], attention_mask=torch.ones(2, 22))
    assert seen["model.encoder.layers.0.self_attn"].shape == (2, 3, 11, 11)
    cross = seen["model.decoder.layers.1.encoder_attn"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(
            input_features=given["input_features"],
            decoder_input_ids=cross.query_ids,  # what is returned leaves the first one out
            output_attentions=True,
        )
    equal(cross.weights(), out.cross_attentions[1])


def test_beams_of_a_model_that_leaves_the_beginning_out() -> None:
    model, given = tiny("whisper", init_std=0.5), inputs("whisper")
    options = {"input_features": given["input_features"], "attention_mask": torch.ones(2, 22)}
    sequences, seen = generated(model, num_beams=3, **options)
    assert not seen.missed_layers
    cross, inner = (seen[f"model.decoder.layers.1.{kind}_attn"] for kind in ("encoder", "self"))
    assert cross.query_ids is not None
    assert torch.equal(cross.query_ids[:, 0], torch.ones(2, dtype=torch.long))
    assert torch.equal(cross.query_ids[:, 1:], sequences[:, : cross.shape[2] - 1])
    model.set_attn_implementation("eager")
    features = given["input_features"]
    with torch.no_grad():
        out = model(input_features=features, decoder_input_ids=cross.query_ids, output_attentions=True)
    equal(cross.weights(), out.cross_attentions[1])
    equal(inner.weights(), out.decoder_attentions[1])


def test_all_beams_without_a_cache_come_in_the_order_of_the_sequences() -> None:
    model, prompt = tiny("llama"), ids(2, 5)
    options = {"num_beams": 4, "num_return_sequences": 4, "use_cache": False}
    sequences, seen = generated(model, input_ids=prompt, **options)
    for entry, weights in zip(seen, told(model, sequences).attentions, strict=True):
        equal(entry.weights(), weights)


def test_beams_over_embeddings_are_refused_with_the_reason() -> None:
    model = tiny("llama")
    embedded = torch.randn(1, 5, 24)
    reason = rf"captures\.calls has all {2 * NEW} calls.*its {NEW} steps.*beam search over embeddings"
    with pytest.raises(InputError, match=reason), watch(model) as seen:
        model.generate(inputs_embeds=embedded, num_beams=3, max_new_tokens=NEW)
    assert len(seen.calls) == 2 * NEW  # but they are there


def test_greedy_over_embeddings_has_no_tokens_but_weights() -> None:
    model, prompt = tiny("llama"), ids(1, 5)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(prompt)
    with watch(model) as seen:
        new = model.generate(inputs_embeds=embedded, max_new_tokens=NEW)
    sequences = torch.cat([prompt, new], 1)
    for entry, weights in zip(seen, told(model, sequences).attentions, strict=True):
        equal(entry.weights(), weights)


def test_a_generation_and_a_forward_are_two_entries() -> None:
    model, prompt = tiny("llama"), ids(1, 5)
    with watch(model, layers="*.0.*") as seen:
        model.generate(prompt, max_new_tokens=NEW)
        model(prompt)
        model.generate(prompt, max_new_tokens=2)
    assert [entry.shape[2] for entry in seen] == [5 + NEW - 1, 5, 6]


def test_a_generation_that_fails_leaves_its_calls() -> None:
    class Enough(Exception):
        pass

    def stop(scores: Any, *args: Any) -> Any:
        if scores.shape[1] == 8:
            raise Enough
        return torch.zeros(len(scores), dtype=torch.bool)

    model = tiny("llama")
    with pytest.raises(Enough), watch(model) as seen:
        model.generate(ids(1, 5), max_new_tokens=NEW, stopping_criteria=[stop])
    assert len(seen) == 0
    assert len(seen.calls) == 6
    assert "generate" not in vars(model)
    assert seen.calls[-1].weights().shape == (1, 6, 1, 7)


def test_a_model_that_generate_would_compile_is_refused_with_the_remedy() -> None:
    model = tiny("llama")
    config = transformers.CompileConfig()
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config, "max_new_tokens": NEW}
    with pytest.raises(InputError, match="disable_compile=True"), watch(model):
        model.generate(ids(1, 5), **options)
    with watch(model) as seen:
        model.generate(ids(1, 5), disable_compile=True, **options)
    assert len(seen) == 2


def test_a_long_generation_keeps_each_key_once() -> None:
    model = tiny("llama")
    with watch(model) as seen:
        model.generate(ids(1, 5), max_new_tokens=40)
    held = {entry._source._step.new_keys.untyped_storage().data_ptr() for entry in seen.calls}  # type: ignore[attr-defined]
    assert len(held) == 2 * 40
    total = sum(entry._source._step.new_keys.numel() for entry in seen.calls)  # type: ignore[attr-defined]
    assert total == 2 * (5 + 39) * 2 * 4  # layers · tokens · heads · width


def test_edges_are_knocked_out_by_their_places_in_what_is_generated() -> None:
    model, prompt, layer = tiny("llama"), ids(1, 5), "model.layers.0.self_attn"
    edges = [(2, 1), (7, 3)]  # one in the prompt, one in what follows it
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        model.set_attn_implementation("sdpa")
        with knock_out(model, {layer: edges}), watch(model) as seen:
            sequences = model.generate(prompt, max_new_tokens=NEW, **options)
        weights = seen[layer].weights()
        assert weights[:, :, 2, 1].abs().max() == 0
        assert weights[:, :, 7, 3].abs().max() == 0
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 6, 5 + NEW - 1))
        model.set_attn_implementation("eager")
        with torch.no_grad(), knock_out(model, {layer: edges}):
            out = model(sequences[:, :-1], output_attentions=True)
        equal(weights, out.attentions[0])
        equal(seen[1].weights(), out.attentions[1])  # the layer after it, whose input it changed


def test_edges_are_knocked_out_of_all_beams() -> None:
    model, layer = tiny("llama"), "model.layers.0.self_attn"
    with knock_out(model, {layer: [1, (2, 1), (7, 3)]}), watch(model) as seen:
        sequences = model.generate(ids(2, 5), max_new_tokens=NEW, num_beams=3, num_return_sequences=2)
    weights = seen[layer].weights()
    assert weights[:, 1].sum() == weights[:, :, 2, 1].sum() == weights[:, :, 7, 3].sum() == 0
    model.set_attn_implementation("eager")
    with torch.no_grad(), knock_out(model, {layer: [1, (2, 1), (7, 3)]}):
        out = model(sequences[:, :-1], output_attentions=True)
    equal(weights, out.attentions[0])
    equal(seen[1].weights(), out.attentions[1])


def test_a_translation_without_a_cache() -> None:
    model, given = tiny("t5"), inputs("t5")
    del given["decoder_input_ids"]
    sequences, seen = generated(model, **given, use_cache=False)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**given, decoder_input_ids=sequences[:, :-1], output_attentions=True)
    equal(seen["decoder.block.1.layer.0.SelfAttention"].weights(), out.decoder_attentions[1])
    equal(seen["decoder.block.1.layer.1.EncDecAttention"].weights(), out.cross_attentions[1])


def test_a_generation_that_goes_on_from_an_earlier_cache() -> None:
    model, prompt = tiny("llama"), ids(1, 5)
    first = model.generate(prompt, max_new_tokens=3, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, ids(1, 2)], 1)  # 10 tokens, of which 7 are in the cache
    with watch(model) as seen:
        sequences = model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=NEW)
    for entry, weights in zip(seen, told(model, sequences).attentions, strict=True):
        assert entry.shape == (1, 6, 3 + NEW - 1, 10 + NEW - 1)  # from the first new token on
        torch.testing.assert_close(entry.weights(), weights[:, :, 7:], atol=1e-5, rtol=0)


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


FAMILIES = {
    "whisper": ({"init_std": 0.5}, 1, 1.0),
    "marian": ({}, 0, 1.0),
    "t5": ({"initializer_factor": 3.0}, 0, 1.0),
    "gpt2": ({"initializer_range": 0.5}, 5, 3.0),
}


@pytest.mark.parametrize(
    ("beams", "returned", "penalty", "use_cache"),
    [(2, 1, -2.0, True), (3, 3, 3.0, True), (3, 1, 1.0, False)],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_beams_whose_first_token_is_the_start_token(
    name: str, beams: int, returned: int, penalty: float, use_cache: bool
) -> None:
    options, start, margin = FAMILIES[name]
    model = tiny(name, **options)
    if name == "gpt2":
        given = {"input_ids": torch.full((2, 1), start), "attention_mask": torch.ones(2, 1, dtype=torch.long)}
    else:
        given = inputs(name)
        del given["decoder_input_ids"]
        if name == "whisper":
            given["attention_mask"] = torch.ones(2, 22)
    search = {"num_beams": beams, "num_return_sequences": returned, "length_penalty": penalty}
    processors = [FavouredStart(start, margin)]
    sequences, seen = generated(model, **given, **search, use_cache=use_cache, logits_processor=processors)
    if name == "whisper":  # it returns what it generated without the start token
        sequences = torch.cat([torch.full_like(sequences[:, :1], start), sequences], 1)
    assert (sequences[:, 1] == start).any()
    repeated = {key: x.repeat_interleave(returned, 0) for key, x in given.items()}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        if name == "gpt2":
            out = {"self": model(sequences[:, :-1], output_attentions=True).attentions}
        else:
            both = model(**repeated, decoder_input_ids=sequences[:, :-1], output_attentions=True)
            out = {"self": both.decoder_attentions, "cross": both.cross_attentions}
    assert not seen.missed_layers
    entries = [entry for entry in seen if name == "gpt2" or "decoder" in entry.name]
    assert len(entries) == 2 * len(out)
    for entry in entries:
        layer = int(next(part for part in entry.name.split(".") if part.isdigit()))
        for row, tokens in enumerate(sequences.tolist()):
            fed = tokens.index(2, 1) if 2 in tokens[1:] else len(tokens) - 1  # all tokens but the last
            weights, expected = entry.weights(batch=row), out[entry.kind][layer][row]
            keys = fed if entry.kind == "self" else expected.shape[-1]
            torch.testing.assert_close(weights[:, :fed, :keys], expected[:, :fed, :keys], atol=1e-5, rtol=0)
            assert weights[:, fed:].sum() == 0
            assert _given(entry.query_ids)[row, :fed].tolist() == tokens[:fed]


def test_beams_of_a_generate_that_cuts_off_the_prompt() -> None:
    class Stripped(transformers.GPT2LMHeadModel):  # type: ignore[misc]
        def generate(self, prompt: Tensor, **options: Any) -> Tensor:
            best = super().generate(prompt, **options)
            return best[:, prompt.shape[1] :]

    # Its own ``generate`` leaves the prompt out. The search that it calls tells all tokens.
    model = tiny("gpt2", initializer_range=0.5, eos_token_id=None)
    prompt = torch.full((2, 1), 5)
    search = {"num_beams": 3, "logits_processor": [FavouredStart(5, 1.0)], "max_new_tokens": NEW}
    whole = model.generate(prompt, **search)
    model.__class__ = Stripped
    with watch(model) as seen:
        model.generate(prompt, **search)
    assert torch.equal(_given(seen[0].query_ids), whole[:, : seen[0].shape[2]])
    for entry, weights in zip(seen, told(model, whole).attentions, strict=True):
        equal(entry.weights(), weights)


def test_every_call_is_there_where_the_steps_cannot_be_joined() -> None:
    cache = transformers.DynamicCache()

    class Disturbance(transformers.LogitsProcessor):  # type: ignore[misc]
        """Changes the keys in the cache of the first layer after every step, as a quantized cache may."""

        def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
            cache.layers[0].keys = cache.layers[0].keys * 1.5
            return scores

    model = tiny("llama")
    options = {"past_key_values": cache, "logits_processor": [Disturbance()], "max_new_tokens": 10}
    with pytest.warns(UserWarning, match="its 10 steps cannot be merged"), watch(model) as seen:
        model.generate(ids(1, 5), **options)
    first, second = "model.layers.0.self_attn", "model.layers.1.self_attn"
    assert seen.names == [second]
    assert "its keys do not continue those of the previous step" in seen.missed_layers[first]
    assert len(seen.calls) == 20
    for name in (first, second):
        calls = [entry for entry in seen.calls if entry.name == name]
        assert [entry.shape for entry in calls] == [(1, 6, 5, 5)] + [(1, 6, 1, 5 + n) for n in range(1, 10)]
        for entry in calls:
            torch.testing.assert_close(entry.weights().sum(-1), torch.ones(entry.shape[:3]))


def test_calls_that_cannot_be_joined_keep_the_keys_of_a_static_cache() -> None:
    model = tiny("llama")

    class Disturbance(transformers.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
            cache.layers[0].keys.mul_(1.5)
            return scores

    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    expected: list[Tensor] = []
    with pytest.warns(UserWarning, match="cannot be merged"), watch(model) as seen:
        model.generate(
            ids(1, 5),
            past_key_values=cache,
            logits_processor=[Disturbance(), lambda t, s: expected.append(cache.layers[0].keys.clone()) or s],
            max_new_tokens=4,
        )
    calls = [entry for entry in seen.calls if entry.name == "model.layers.0.self_attn"]
    assert len(calls) == 4
    for entry, after in zip(calls[1:], expected[1:], strict=True):
        known = 5 + 1
        torch.testing.assert_close(entry.attention.key[:, :, :known] * 1.5, after[:, :, :known])


def test_each_segment_of_long_audio_has_its_entries() -> None:
    model = tiny("whisper", init_std=0.5)
    model.generation_config.no_timestamps_token_id = 30
    torch.manual_seed(0)
    audio = {
        "input_features": torch.randn(1, 7, 60),
        "attention_mask": torch.ones(1, 60),
    }  # 22 frames are one
    with watch(model) as seen:
        model.generate(**audio, return_timestamps=True, num_beams=2, max_new_tokens=5)
    segments = seen.find_layers("model.decoder.layers.1.encoder_attn")
    assert len(segments) == len(seen.find_layers("model.encoder.layers.0.self_attn")) > 1
    assert not seen.missed_layers
    assert sum(entry.shape[2] for entry in segments) == len(
        [entry for entry in seen.calls if entry.name == "model.decoder.layers.1.encoder_attn"]
    )
