"""Sequences of unlike length: nothing is lost on the way through steps and shelves, and little is padded."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from jumok.batches.tokens import Tokens
from jumok.models.layers import ragged_layout
from jumok.models.layers.ragged_layout import RaggedLayout
from jumok.models.layers.recurrent import build_rnn, run_packed_rnn, run_rnn_on_tokens

LENGTHS = st.lists(st.integers(0, 13), min_size=1, max_size=11)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Sequences of 1, 2, 3, … in all."""
    ends = list(itertools.accumulate(lengths))
    return [list(range(end - length + 1, end + 1)) for end, length in zip(ends, lengths, strict=True)]


@settings(deadline=None, max_examples=50)
@given(lengths=LENGTHS, packed=st.booleans(), worth=st.sampled_from([1, 5, 10_000]))
def test_words_are_laid_out_and_restored(lengths: list[int], packed: bool, worth: int) -> None:
    rows = numbered(lengths)
    tokens = Tokens.pack(rows) if packed else Tokens.pad(rows, min_length=max(lengths) + 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_layout, "MIN_SAVED_POSITIONS", worth)
        laid = RaggedLayout.from_tokens(tokens)
    # The words of each step are those at that place in the sequences that have one, longest first.
    words = tokens.ids.flatten()[laid.token_indices.long()]
    longest_first = sorted(rows, key=len, reverse=True)
    for step, of_step in enumerate(words.split(laid.packed_steps.batch_sizes.tolist())):
        assert of_step.tolist() == [row[step] for row in longest_first if len(row) > step]
    # Sequences lie on the shelves as they are, and what fills a row up is its last word.
    x = words.double()[:, None].requires_grad_()
    shelved = laid.to_buckets(x)
    on_shelves = [row for shelf in shelved for row in shelf[..., 0].tolist()]
    for row, found in zip((row for row in longest_first if row), on_shelves, strict=True):
        assert found == [*row, *[row[-1]] * (len(found) - len(row))]
    # Back in order: of each sequence its first word, and zero of the empty ones.
    if shelved:
        first = laid.from_buckets([shelf[:, 0] for shelf in shelved])
        assert first[:, 0].tolist() == [row[0] if row else 0 for row in rows]
        # Masks bar what fills up, and gradients find the way.
        real = [
            torch.ones(shelf.num_rows, shelf.length, dtype=torch.bool)
            if shelf.mask is None
            else torch.stack([m[0] for m in shelf.mask.to_dense(1, shelf.length)])
            for shelf in laid.buckets
        ]
        assert [int(row.sum()) for mask in real for row in mask] == [len(row) for row in longest_first if row]
        sum((2 * shelf[mask]).sum() for shelf, mask in zip(shelved, real, strict=True)).backward()
        assert x.grad is not None
        assert (x.grad == 2).all()


def test_one_long_sequence_does_not_pad_the_others() -> None:
    chance = np.random.default_rng(7)
    lengths = [*np.clip(chance.geometric(1 / 20, 5000), 1, 100).tolist(), 3001]
    laid = RaggedLayout.from_tokens(Tokens.from_packed_ids(torch.zeros(sum(lengths), dtype=torch.long), lengths))
    places = sum(shelf.num_rows * shelf.length for shelf in laid.buckets)
    assert len(laid.token_indices) == sum(lengths)
    assert places < 1.3 * sum(lengths)
    assert len(laid.buckets) < 12


def test_lengths_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_layout, "is_capturing_cuda_graph", lambda: True)
    with pytest.raises(RuntimeError, match="with_static_shapes"):
        RaggedLayout.from_tokens(Tokens.pack([[1, 2], [3]]))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
def test_packed_and_padded_sentences_are_equal(cell: str, both: bool) -> None:
    torch.manual_seed(0)
    lengths = [3, 7, 1, 7, 5]
    rnn: nn.Module = build_rnn(cell, 2, 3, num_layers=2, bidirectional=both).double()  # type: ignore[arg-type]
    tokens = Tokens.pad(numbered(lengths))
    laid = RaggedLayout.from_tokens(tokens)
    x = torch.randn(23, 2, dtype=torch.double, requires_grad=True)
    padded = pad_sequence(list(x.split(lengths)), batch_first=True)
    expected, _ = run_rnn_on_tokens(rnn, padded, tokens)  # type: ignore[arg-type]
    expected = torch.cat([row[:length] for row, length in zip(expected, lengths, strict=True)])
    order = tokens.ids.flatten()[laid.token_indices.long()] - 1
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [x, *rnn.parameters()])

    states = run_packed_rnn(rnn, x[order], laid.packed_steps)  # type: ignore[arg-type]
    torch.testing.assert_close(states, expected[order])
    got = torch.autograd.grad((states * weights[order]).sum(), [x, *rnn.parameters()])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(run_packed_rnn(rnn, x[order], laid.packed_steps), expected[order])  # type: ignore[arg-type]
