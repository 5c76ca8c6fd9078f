"""Batches: every example once, in an order that seed and epoch decide, within the budget."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jumok.batches.tokens import EOS, IGNORE, PAD, Seq2SeqBatch, Tokens
from jumok.data.batching import length_batching as module
from jumok.data.batching.length_batching import (
    BatchPlan,
    divide_batch,
    plan_batches,
    round_up_lengths,
)
from jumok.data.batching.translation import TranslationBatcher
from jumok.data.caches.token_store import TokenStore, prepare_token_store
from jumok.data.readers.parallel_corpus import ParallelCorpus
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerPair
from jumok.data.tokenizers.vocabulary import TokenizerConfig
from jumok.errors import InputError

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=80)


def sides(lengths: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(lengths, np.int32)
    return both[:, 0], both[:, 1]


def plain(found: BatchPlan) -> list[list[int]]:
    return [batch.tolist() for batch in found]


@pytest.mark.parametrize("packed", [False, True])
@given(LENGTHS, st.integers(1, 120), st.integers(0, 99), st.integers(0, 3), st.sampled_from([7, 1 << 17]))
def test_every_example_once_within_the_budget_in_an_order_of_seed_and_epoch(
    packed: bool, lengths: list[tuple[int, int]], tokens: int, seed: int, epoch: int, window: int
) -> None:
    source, target = sides(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SORT_WINDOW", window)
        found = plan_batches(source, target, max_tokens=tokens, seed=seed, epoch=epoch, packed=packed)
        again = plan_batches(source, target, max_tokens=tokens, seed=seed, epoch=epoch, packed=packed)
    assert plain(found) == plain(again)
    assert sorted(itertools.chain.from_iterable(plain(found))) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) > 0
        for side in (source[batch], target[batch]):
            size = side.sum() if packed else side.max() * len(side)
            assert size <= tokens or len(batch) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_another_epoch_or_seed_has_another_order(packed: bool) -> None:
    lengths = np.arange(1, 98, dtype=np.int32)
    orders = {
        str(plain(plan_batches(lengths, lengths, max_tokens=200, seed=seed, epoch=epoch, packed=packed)))
        for seed, epoch in ((1, 0), (1, 1), (2, 0), (0, 1))
    }
    assert len(orders) == 4


def test_the_batches_of_an_epoch_come_in_no_order_of_length() -> None:
    lengths = np.repeat(np.arange(1, 51, dtype=np.int32), 20)
    longest = [lengths[batch].max() for batch in plan_batches(lengths, lengths, max_tokens=100, seed=3, epoch=0)]
    rises = sum(a < b for a, b in itertools.pairwise(longest)) / len(longest)
    assert 0.4 < rises < 0.6


def test_batches_fill_their_budget() -> None:
    chance = np.random.default_rng(0)
    source = chance.integers(5, 30, 5000).astype(np.int32)
    target = (source + chance.integers(-3, 4, 5000)).astype(np.int32)
    for packed, fullest in ((False, 0.9), (True, 0.95)):
        found = plan_batches(source, target, max_tokens=1000, seed=1, epoch=0, packed=packed)
        used = [
            max(side[batch].sum() if packed else side[batch].max() * len(batch) for side in (source, target))
            for batch in found
        ]
        assert np.mean(used) > fullest * 1000


@pytest.mark.parametrize("tokens", [300, 3000])
def test_like_lengths_go_together(tokens: int) -> None:
    chance = np.random.default_rng(0)
    source = np.clip(chance.normal(13, 4, 20_000).round(), 4, 40).astype(np.int32)
    target = np.clip(source + chance.normal(0, 2, 20_000).round(), 4, 40).astype(np.int32)
    found = plan_batches(source, target, max_tokens=tokens, seed=1, epoch=0)
    places = sum(len(b) * (int(source[b].max()) + int(target[b].max())) for b in found)
    padding = 1 - (source.sum() + target.sum()) / places
    assert padding < 0.05  # in an order of chance it would be a half


def test_many_examples_take_little_time_and_memory() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, 300_000).astype(np.int32)
    tracemalloc.start()
    found = plan_batches(lengths, lengths, max_tokens=4096, seed=1, epoch=0)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) > 2000
    assert kept < 6 * 300_000  # 4 bytes an example, and the batches' begins
    assert peak < 60 * 300_000  # a window of 131,072 is sorted at a time


def test_an_epoch_is_a_sequence() -> None:
    lengths = np.full(11, 3, np.int32)
    found = plan_batches(lengths, lengths, max_tokens=9, seed=1, epoch=0)
    assert len(found) == 4
    assert plain(found) == [batch.tolist() for batch in found[:]]  # as for resuming: found[done:]
    assert found[-1].tolist() == found[3].tolist()
    with pytest.raises(IndexError):
        found[4]
    assert len(plan_batches(lengths[:0], lengths[:0], max_tokens=9, seed=1, epoch=0)) == 0


def test_mistakes_are_told() -> None:
    lengths = np.full(5, 3, np.int32)
    with pytest.raises(InputError, match="tokens=0: a batch needs a budget"):
        plan_batches(lengths, lengths, max_tokens=0, seed=1, epoch=0)
    with pytest.raises(InputError, match="expected the same number of both"):
        plan_batches(lengths, lengths[:3], max_tokens=9, seed=1, epoch=0)
    with pytest.raises(InputError, match="num_parts=0"):
        divide_batch(np.arange(5, dtype=np.uint32), lengths, lengths, 0)


# --------------------------------------------------------------------------------------------------- parts


@given(LENGTHS, st.integers(1, 9))
def test_parts_make_up_the_batch_and_are_of_like_work(lengths: list[tuple[int, int]], count: int) -> None:
    source, target = sides(lengths)
    index = np.random.default_rng(0).permutation(len(lengths)).astype(np.uint32)
    found = divide_batch(index, source, target, count)
    assert len(found) == count
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    sizes = [len(part) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert (min(sizes) > 0) == (len(lengths) >= count)
    work = [int((source[part] + target[part]).sum()) for part in found]
    if len(lengths) >= count:
        assert max(work) - min(work) <= max(a + b for a, b in lengths)


# ------------------------------------------------------------------------------------------------ pair data


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    letters = Tokenizer.train(["abcdefghij"], TokenizerConfig("characters", vocab_size=400))
    chance = np.random.default_rng(5)
    pairs = [("abcdefghij"[: chance.integers(1, 11)], "jihgfedcba"[: chance.integers(1, 11)]) for _ in range(101)]
    path = tmp_path_factory.mktemp("store") / "s"
    return prepare_token_store(path, ParallelCorpus.from_pairs("made", lambda: pairs), TokenizerPair(letters, letters))


@pytest.mark.parametrize("index", [[0], [7, 3, 100, 7], range(101), []])
def test_collate_makes_what_pairs_of_makes(store: TokenStore, index: list[int]) -> None:
    found = TranslationBatcher(store, max_tokens=64, seed=1).collate(index)
    rows = [[side.tolist() for side in store[i]] for i in index]
    expected = Seq2SeqBatch.from_sequences([row[0] for row in rows], [row[1] for row in rows], list(index))
    for name in ("source", "target"):
        one, other = getattr(found, name), getattr(expected, name)
        assert torch.equal(one.ids, other.ids.long())
        assert (one.lengths, one.packed) == (other.lengths, other.packed)
        assert one.ids.dtype == torch.int64
    assert torch.equal(found.labels, expected.labels.long())
    assert (found.count, found.example_indices) == (expected.count, expected.example_indices)


def sequences(tokens: Tokens) -> list[list[int]]:
    """The sequences of a batch, without those that fill it up."""
    if tokens.packed:
        assert tokens.cu_seqlens is not None
        ends = tokens.cu_seqlens.tolist()
        rows = [tokens.ids[0, a:b].tolist() for a, b in itertools.pairwise(ends)]
        return [row for row in rows if row and PAD not in row]
    return [row[:n].tolist() for row, n in zip(tokens.ids, tokens.lengths, strict=True)]


@pytest.mark.parametrize("index", [[0], [7, 3, 100, 7], range(101)])
def test_packed_rows_hold_the_same_and_fillers_of_no_account(store: TokenStore, index: list[int]) -> None:
    packed = TranslationBatcher(store, max_tokens=640, seed=1, packed=True).collate(index)
    padded = TranslationBatcher(store, max_tokens=640, seed=1).collate(index)
    assert sequences(packed.source) == sequences(padded.source)
    assert sequences(packed.target) == sequences(padded.target)
    assert packed.labels[packed.labels != IGNORE].tolist() == padded.labels[padded.labels != IGNORE].tolist()
    assert packed.count == padded.count == (packed.labels != IGNORE).sum()
    for tokens in (packed.source, packed.target):
        assert tokens.cu_seqlens is not None
        assert tokens.cu_seqlens[-1] == tokens.ids.shape[1] == sum(tokens.lengths)
        assert tokens.max_length >= max(tokens.lengths)
    # A filler on the one side meets one on the other: no query of it is without keys.
    assert [n > 0 for n in packed.source.lengths] == [n > 0 for n in packed.target.lengths]


def test_rows_that_are_alike_hold_the_same_and_fillers_of_no_account(store: TokenStore) -> None:
    data = TranslationBatcher(store, max_tokens=64, seed=1, fixed_shapes=True)
    plain = TranslationBatcher(store, max_tokens=64, seed=1)
    seen: list[int] = []
    for index in data.batches(epoch=0):
        one, other = data.collate(index), plain.collate(index)
        rows = len(index)
        assert sequences(one.source)[:rows] == sequences(other.source)
        assert sequences(one.target)[:rows] == sequences(other.target)
        assert all(row == [EOS] for row in sequences(one.source)[rows:])
        assert (one.labels[rows:] == IGNORE).all()
        assert one.count == other.count
        assert one.source.device_lengths is not None
        assert one.source.device_lengths.tolist() == list(one.source.lengths)
        assert one.target.ids.numel() <= 64
        seen += one.example_indices
    assert sorted(seen) == list(range(101))


@pytest.mark.parametrize("packed", [False, True])
def test_forms_are_few(store: TokenStore, packed: bool) -> None:
    data = TranslationBatcher(store, max_tokens=200, seed=1, packed=packed, fixed_shapes=True)
    batches = [data.collate(index) for epoch in range(9) for index in data.batches(epoch)]
    forms = {batch.graph_key for batch in batches}
    assert None not in forms
    assert len(forms) <= 9 < len(batches)


def test_lengths_are_rounded_up_by_a_quarter_at_most() -> None:
    lengths = np.arange(1, 3000)
    found = round_up_lengths(lengths)
    assert (found >= lengths).all()
    assert (found[16:] < 1.25 * lengths[16:]).all()
    assert np.array_equal(round_up_lengths(found), found)
    assert len(set(found.tolist())) == 34


def test_a_padded_batch_fits_the_budget_with_its_special_tokens(store: TokenStore) -> None:
    data = TranslationBatcher(store, max_tokens=40, seed=1)
    assert len(data) == 101
    seen: list[int] = []
    for index in data.batches(epoch=2):
        pairs = data.collate(index)
        assert pairs.source.ids.numel() <= 40
        assert pairs.target.ids.numel() <= 40
        assert pairs.count == sum(pairs.target.lengths)
        seen += pairs.example_indices
    assert sorted(seen) == list(range(101))


def test_packed_rows_fit_the_budget_and_are_full(store: TokenStore) -> None:
    data = TranslationBatcher(store, max_tokens=640, seed=1, packed=True)
    count = 0
    for index in data.batches(epoch=0):
        pairs = data.collate(index)
        assert pairs.source.ids.shape[1] <= 640
        assert (
            data.layout.num_fillers
            <= (pairs.source.ids == PAD).sum()
            < data.layout.length_multiple + data.layout.num_fillers
        )
        assert (
            data.layout.num_fillers
            <= (pairs.labels == IGNORE).sum()
            < data.layout.length_multiple + data.layout.num_fillers
        )
        count += pairs.count
    assert count == store.target.lengths.sum() + len(store)


def test_the_parts_of_a_batch_make_its_labels(store: TokenStore) -> None:
    data = TranslationBatcher(store, max_tokens=200, seed=1)
    for index in data.batches(epoch=0):
        whole = data.collate(index).count
        assert sum(data.collate(part).count for part in data.divide(index, 3)) == whole


def test_a_budget_of_nothing_is_refused(store: TokenStore) -> None:
    with pytest.raises(InputError, match="tokens=1"):
        TranslationBatcher(store, max_tokens=1, seed=1)


@pytest.mark.parametrize("packed", [False, True])
def test_an_example_beyond_the_budget_is_a_batch_of_its_own(store: TokenStore, packed: bool) -> None:
    data = TranslationBatcher(store, max_tokens=8, seed=1, packed=packed, fixed_shapes=True)
    sizes = [len(index) for index in data.batches(epoch=0)]
    assert sum(sizes) == 101
    longest = max(max(store.source.lengths), max(store.target.lengths)) + 1
    assert longest > 8
    for index in data.batches(epoch=0):
        pairs = data.collate(index)
        assert len(index) == 1 or max(map(sum, (pairs.source.lengths, pairs.target.lengths))) <= 8 + 64


def test_the_batches_of_an_epoch_are_made_once(store: TokenStore) -> None:
    data = TranslationBatcher(store, max_tokens=64, seed=1)
    assert data.batches(3) is data.batches(3)
    assert plain(data.batches(4)) != plain(data.batches(3))
    assert plain(data.batches(4)) == plain(TranslationBatcher(store, max_tokens=64, seed=1).batches(4))
