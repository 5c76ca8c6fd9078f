"""The statistics of a monitored generation are those of the captured maps, with bounded memory."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import jumok
from jumok.errors import InputError
from jumok.look.capture import monitor as monitor_module
from jumok.look.capture.captures import Captures
from jumok.look.capture.monitor import GenerationStatistics

transformers = pytest.importorskip("transformers", minversion="5")
from tiny_models import attend_with_sinks, build_model, random_ids  # noqa: E402

NUM_NEW, NUM_TOP = 9, 3


def run(model: Any, **options: Any) -> tuple[GenerationStatistics, Captures]:
    """Return the statistics of a generation, and what ``watch`` captures of it."""
    options = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False, **options}
    with jumok.watch(model) as captures:
        expected = model.generate(**options)
    with jumok.monitor(model, num_top=NUM_TOP) as monitor:
        sequences = model.generate(**options)
    assert torch.equal(sequences, expected)
    (generation,) = monitor.take()
    assert monitor.take() == []
    assert torch.equal(generation.sequences, sequences)  # type: ignore[arg-type]
    return generation, captures


def check(generation: GenerationStatistics, captures: Captures, num_prompt: int) -> None:
    """Compare with the complete weights of the generated tokens."""
    assert not generation.missed_layers
    for name, statistics in generation.layers.items():
        weights = captures[name].weights()[:, :, num_prompt:]  # (B, H, T, K)
        assert statistics.top_keys.shape == (*weights.shape[:3], NUM_TOP)
        received = weights.sum(2)
        torch.testing.assert_close(statistics.received_weight, received, atol=1e-5, rtol=0)
        torch.testing.assert_close(statistics.top_weights, weights.topk(NUM_TOP).values, atol=1e-5, rtol=0)
        found = weights.gather(-1, statistics.top_keys.clamp_min(0)).where(statistics.top_keys >= 0, 0)
        torch.testing.assert_close(found, statistics.top_weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps_per_pass", [1, 3, 64])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_decoder(steps_per_pass: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "STEPS_PER_PASS", steps_per_pass)
    model, mask = build_model("llama"), torch.ones(2, 5, dtype=torch.long)
    mask[1, :2] = 0  # padding
    generation, captures = run(model, input_ids=random_ids(2, 5), attention_mask=mask, **options)
    assert list(generation.layers) == captures.names
    check(generation, captures, num_prompt=5)


def test_sliding_window() -> None:
    model = build_model("mistral", sliding_window=6)
    generation, captures = run(model, input_ids=random_ids(1, 5))
    check(generation, captures, num_prompt=5)
    statistics = generation.layers["model.layers.0.self_attn"]
    assert statistics.top_keys[0, 0, -1].min() >= 5 + NUM_NEW - 2 - 5  # the last token sees six keys


def test_encoder_decoder() -> None:
    model = build_model("t5", eos_token_id=None)
    generation, captures = run(model, input_ids=random_ids(1, 7))
    assert {statistics.kind for statistics in generation.layers.values()} == {"self", "cross"}
    check(generation, captures, num_prompt=1)


def test_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend_with_sinks)
    model = build_model("llama")
    model.set_attn_implementation("eager")
    generation, captures = run(model, input_ids=random_ids(1, 5))
    check(generation, captures, num_prompt=5)


def test_beam_search_is_reported() -> None:
    model = build_model("llama")
    with jumok.monitor(model) as monitor:
        model.generate(random_ids(1, 5), num_beams=3, max_new_tokens=NUM_NEW)
    (generation,) = monitor.take()
    assert not generation.layers
    assert set(generation.missed_layers.values()) == {"beam search moves the rows of the cache"}


def test_memory_is_bounded() -> None:
    model, max_generations, num_generations = build_model("llama"), 2, 5
    keys: list[weakref.ref[Tensor]] = []

    def generate() -> None:
        cache = transformers.DynamicCache(config=model.config)

        def note_keys(tokens: Tensor, scores: Tensor) -> Tensor:
            keys.append(weakref.ref(cache.layers[0].keys))
            return scores

        model.generate(random_ids(1, 5), past_key_values=cache, max_new_tokens=4, logits_processor=[note_keys])

    with jumok.monitor(model, max_generations=max_generations) as monitor:
        for _ in range(num_generations):
            generate()
        assert len(keys) == 4 * num_generations
        assert all(ref() is None for ref in keys)
        assert monitor.num_dropped == num_generations - max_generations
        assert len(monitor.take()) == max_generations


def test_invalid_arguments() -> None:
    model = build_model("llama")
    with pytest.raises(InputError, match="num_top=0"), jumok.monitor(model, num_top=0):
        pass
    with jumok.monitor(model) as monitor:
        model(random_ids(1, 5))  # not a generation
    assert monitor.take() == []
