"""Bound decoding steps are equal to ``Transformer.decode`` to the bit, and replace it only where this is safe."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jumok
from jumok.batches.tokens import BOS, EOS, Tokens
from jumok.models.transformer import Transformer, TransformerConfig, TransformerState
from jumok.models.transformer_step import MIN_CAPACITY, MIN_POSITIONS, TransformerStep

pytestmark = pytest.mark.long


WORDS = 29
RAGGED = [[5, 6, 7, EOS], [8, EOS], [9, 10, 11, 12, 13, 14, 15, EOS]]
EQUAL_LENGTHS = [[5, 6, EOS], [7, 8, EOS], [9, 10, EOS]]
CONFIG = TransformerConfig(width=14, num_heads=2, feed_forward_width=19, encoder_layers=1, decoder_layers=3)


def build_model(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(dataclasses.replace(CONFIG, **changes), WORDS, WORDS).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which begin at 0 and 1
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@contextmanager
def reference_steps() -> Iterator[None]:
    """All steps by ``Transformer.decode``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerStep, "bind", lambda *_: None)
        yield


def run_search(model: Transformer, sources: list[list[int]], beams: int, steps: int) -> list[Tensor]:
    """The logits of each step. After the second, beams are exchanged and a source is dropped."""
    generator = torch.Generator().manual_seed(1)
    state = model.start(Tokens.pad(sources))
    remaining = list(range(len(sources)))
    state = state.reorder(torch.arange(len(sources)).repeat_interleave(beams), remaining)
    results = []
    ids = torch.full((len(sources) * beams,), BOS)
    for step in range(steps):
        logits, state = model.step(state, ids)
        results.append(logits)
        index = torch.arange(len(ids)).view(-1, beams).flip(1)
        remaining = list(range(len(index)))
        if step == 1:
            index, remaining = index[1:], remaining[1:]
        state = state.reorder(index.flatten(), remaining)
        ids = torch.randint(4, WORDS, (index.numel(),), generator=generator)
    return results


@pytest.mark.parametrize("sources", [RAGGED, EQUAL_LENGTHS], ids=["ragged", "equal lengths"])
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre"},
        {"tie_embeddings": "none", "activation": "gelu"},
        {"norm": "pre", "autocast": True},
        {"autocast": True},
    ],
    ids=str,
)
def test_equal_to_decode_to_the_bit(changes: dict[str, Any], sources: list[list[int]], beams: int) -> None:
    changes = dict(changes)
    autocast = torch.autocast("cpu", torch.bfloat16) if changes.pop("autocast", False) else nullcontext()
    model = build_model(**changes)
    with torch.inference_mode(), autocast:
        bound = run_search(model, sources, beams, steps=MIN_CAPACITY + 3)  # the buffer grows
        with reference_steps():
            expected = run_search(model, sources, beams, steps=MIN_CAPACITY + 3)
    for logits, reference in zip(bound, expected, strict=True):
        assert torch.equal(logits, reference)


def test_positions_beyond_the_first_table() -> None:
    model = build_model(decoder_layers=1)
    with torch.no_grad():
        bound = run_search(model, EQUAL_LENGTHS, 1, MIN_POSITIONS + 2)
        with reference_steps():
            assert torch.equal(bound[-1], run_search(model, EQUAL_LENGTHS, 1, MIN_POSITIONS + 2)[-1])


def take_steps(model: Transformer, steps: int = 2, state: TransformerState | None = None) -> TransformerState:
    state = model.start(Tokens.pad(RAGGED)) if state is None else state
    for _ in range(steps):
        _, state = model.step(state, torch.full((3,), BOS))
    return state


class OtherNorm(nn.LayerNorm):
    pass


def replace_norm(model: Transformer) -> None:
    model.decoder[1].feed_forward.residual.norm = OtherNorm(CONFIG.width)


CHANGES: dict[str, Callable[[Transformer], Any]] = {
    "hook": lambda model: model.decoder[1].cross_attention.register_forward_hook(lambda *_: None),
    "pre-hook of a linear layer": lambda model: model.decoder[0].feed_forward.widen.register_forward_pre_hook(print),
    "forward of an instance": lambda model: setattr(model.output, "forward", print),
    "another layer": replace_norm,
    "weight norm": lambda model: nn.utils.parametrizations.weight_norm(model.decoder[0].self_attention.merge),
    "training mode": lambda model: model.train(),
    "no change": lambda model: None,
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_changed_modules_are_called(name: str) -> None:
    model = build_model()
    CHANGES[name](model)
    assert (take_steps(model).bound_step is not None) == (name == "no change")


@torch.no_grad()
def test_an_overridden_decode_is_called() -> None:
    class Other(Transformer):
        def decode(self, *arguments: Any, **options: Any) -> Any:
            hidden, caches = super().decode(*arguments, **options)
            return 0 * hidden, caches

    logits, _ = Other.step(
        model := Other(CONFIG, WORDS, WORDS).eval(), model.start(Tokens.pad(RAGGED)), torch.tensor([2] * 3)
    )
    assert not logits.any()


def test_a_search_may_change_between_bound_steps_and_decode() -> None:
    """Gradients or an observer may begin at any step. The result is that of the same way all along."""
    model = build_model().double()
    with torch.no_grad():
        state = take_steps(model, 3)
        expected, _ = model.step(take_steps(model, 2, state), torch.tensor([4, 5, 6]))
        with jumok.watch(model) as captures:
            watched = take_steps(model, 1, state)
        assert watched.bound_step is None
        assert captures.calls
        logits, _ = model.step(take_steps(model, 1, watched), torch.tensor([4, 5, 6]))
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    logits, _ = model.step(take_steps(model, 2, state), torch.tensor([4, 5, 6]))
    assert logits.requires_grad
    torch.testing.assert_close(logits.detach(), expected, rtol=1e-12, atol=1e-12)


def test_a_state_of_inference_mode_can_be_continued_outside() -> None:
    model = build_model()
    with torch.inference_mode():
        state = take_steps(model)
        expected, _ = model.step(state, torch.tensor([4, 5, 6]))
    with torch.no_grad():
        assert torch.equal(model.step(state, torch.tensor([4, 5, 6]))[0], expected)


def test_weights_may_change_between_searches() -> None:
    model = build_model()
    with torch.no_grad():
        before, _ = model.step(model.start(Tokens.pad(RAGGED)), torch.full((3,), BOS))
        other = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        other.load_state_dict(model.state_dict())
        after, _ = model.step(model.start(Tokens.pad(RAGGED)), torch.full((3,), BOS))
        expected, _ = other.step(other.start(Tokens.pad(RAGGED)), torch.full((3,), BOS))
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)


@torch.no_grad()
def test_a_compiled_model_decodes_by_bound_steps() -> None:
    model = build_model()
    model.compile(backend="eager")
    assert take_steps(model).bound_step is not None
