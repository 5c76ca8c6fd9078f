"""Packed sequences and continuous batching of transformers: each sequence has the weights of a forward of its own."""

from collections.abc import Iterator
from typing import Any

import flash_functions
import pytest
import torch
from torch import Tensor

from jumok.look.capture.captures import Captures
from jumok.look.capture.watch import watch

transformers = pytest.importorskip("transformers", minversion="5")
from tiny_models import build_model  # noqa: E402

pytestmark = pytest.mark.long
PROMPTS = [[3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small Llama, for which the functions of FlashAttention are those written in PyTorch."""
    from transformers import modeling_flash_attention_utils as utils

    functions = [getattr(flash_functions, name) for name in utils_functions()]
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        monkeypatch.setattr(utils, name, None)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: (*functions, utils._pad_input, utils._unpad_input))
    utils.lazy_import_flash_attention("flash_attention_2")
    return build_model("llama")


def utils_functions() -> tuple[str, str, str]:
    return "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"


def compute_weights(model: Any, ids: list[int]) -> Tensor:
    """Return the weights ``(layers, H, L, L)`` of a forward of one sequence, as the model itself computes them."""
    implementation, model.config._attn_implementation = model.config._attn_implementation, "eager"
    with torch.no_grad():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    model.config._attn_implementation = implementation
    return torch.cat(attentions)


def watch_twice(run: Any, model: Any) -> tuple[Any, Captures]:
    expected = run()
    with watch(model) as captures:
        result = run()
    assert result == expected
    return result, captures


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flash_attention_2"])
def test_continuous_batching(model: Any, implementation: str) -> None:
    model.config._attn_implementation = implementation
    generation = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(
        page_size=4, num_blocks=16, max_batch_tokens=32, auto_switch_to_flash=False
    )

    def run() -> list[list[int]]:
        results = model.generate_batch(PROMPTS, generation_config=generation, continuous_batching_config=batching)
        model.config._attn_implementation = implementation
        return [results[f"req_{n}"].generated_tokens for n in range(3)]

    generated, captures = watch_twice(run, model)
    assert [layer.shape for layer in captures][::2] == [(3, 6, 5, 5), (3, 6, 1, 6), (3, 6, 1, 7)]
    assert captures[0].query_ids is not None
    order = [[token for token in ids if token != -1] for ids in captures[0].query_ids.tolist()]  # of the scheduler
    assert sorted(order) == PROMPTS
    for prompt, tokens in zip(PROMPTS, generated, strict=True):
        n = order.index(prompt)
        expected = compute_weights(model, [*prompt, *tokens[:-1]])
        for layer in range(2):
            length = len(prompt)
            first = captures[layer].weights(batch=n)
            torch.testing.assert_close(first[:, :length, :length], expected[layer, :, :length, :length])
            assert not first[:, length:].any()
            for step in (1, 2):
                weights = captures[layer + 2 * step].weights(batch=n)[:, 0, : length + step]
                torch.testing.assert_close(weights, expected[layer, :, length + step - 1, : length + step])


def test_packed_sequences_of_flash_attention(model: Any) -> None:
    model.config._attn_implementation = "flash_attention_2"
    ids = torch.tensor([[token for prompt in PROMPTS for token in prompt]])
    positions = torch.tensor([[i for prompt in PROMPTS for i in range(len(prompt))]])

    def run() -> list[Any]:
        with torch.no_grad():
            return model(ids, position_ids=positions, use_cache=False).logits.tolist()  # type: ignore[no-any-return]

    _, captures = watch_twice(run, model)
    assert [layer.shape for layer in captures] == [(3, 6, 5, 5)] * 2
    for n, prompt in enumerate(PROMPTS):
        expected = compute_weights(model, prompt)
        for layer in range(2):
            weights = captures[layer].weights(batch=n)[:, : len(prompt), : len(prompt)]
            torch.testing.assert_close(weights, expected[layer])


def test_padded_sequences_of_flash_attention(model: Any) -> None:
    model.config._attn_implementation = "flash_attention_2"
    length = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in PROMPTS])

    def run() -> list[Any]:
        with torch.no_grad():
            return model(ids, attention_mask=(ids != 0).long()).logits.tolist()  # type: ignore[no-any-return]

    _, captures = watch_twice(run, model)
    for n, prompt in enumerate(PROMPTS):
        expected = compute_weights(model, prompt)
        weights = captures[0].weights(batch=n)[:, -len(prompt) :, -len(prompt) :]
        torch.testing.assert_close(weights, expected[0])


def test_kernel_of_the_hub(model: Any) -> None:
    """A kernel whose name does not say what it is: transformers calls it by its FlashAttention function."""
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = "someone/fast-kernel"
    transformers.AttentionInterface.register(name, flash_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    model.config._attn_implementation = name
    try:
        with watch(model) as captures, torch.no_grad():
            model(torch.tensor(PROMPTS[:1]))
    finally:
        transformers.AttentionInterface._global_mapping.pop(name)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name)
    torch.testing.assert_close(captures[1].weights(batch=0), compute_weights(model, PROMPTS[0])[1])
