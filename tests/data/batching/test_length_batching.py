"""Batches of similar length: order, budget, layout and division."""

import hashlib
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


def split_sides(lengths: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(lengths, np.int32)
    return both[:, 0], both[:, 1]


def to_lists(plan: BatchPlan) -> list[list[int]]:
    return [batch.tolist() for batch in plan]


@pytest.mark.parametrize("packed", [False, True])
@given(LENGTHS, st.integers(1, 120), st.integers(0, 99), st.integers(0, 3), st.sampled_from([7, 1 << 17]))
def test_every_example_occurs_once_within_the_budget(
    packed: bool, lengths: list[tuple[int, int]], max_tokens: int, seed: int, epoch: int, window: int
) -> None:
    source, target = split_sides(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SORT_WINDOW", window)
        plan = plan_batches(source, target, max_tokens=max_tokens, seed=seed, epoch=epoch, packed=packed)
        repeated_plan = plan_batches(source, target, max_tokens=max_tokens, seed=seed, epoch=epoch, packed=packed)
    assert to_lists(plan) == to_lists(repeated_plan)
    assert sorted(itertools.chain.from_iterable(to_lists(plan))) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) > 0
        for side in (source[batch], target[batch]):
            size = side.sum() if packed else side.max() * len(side)
            assert size <= max_tokens or len(batch) == 1


@pytest.mark.parametrize(
    ("packed", "digest"),
    [(False, "a1e164812e581c37"), (True, "f2e8f7f6285997bd")],
)
def test_order_never_changes(packed: bool, digest: str) -> None:
    """Interrupted runs resume by counting batches, so the order must stay the same in later versions."""
    source = (np.arange(1, 1000) * 37 % 61 + 1).astype(np.int32)
    target = (np.arange(1, 1000) * 53 % 59 + 1).astype(np.int32)
    plans = [
        to_lists(plan_batches(source, target, max_tokens=500, seed=7, epoch=epoch, packed=packed)) for epoch in (0, 3)
    ]
    assert hashlib.sha256(str(plans).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("packed", [False, True])
def test_order_depends_on_seed_and_epoch(packed: bool) -> None:
    lengths = np.arange(1, 98, dtype=np.int32)
    orders = {
        str(to_lists(plan_batches(lengths, lengths, max_tokens=200, seed=seed, epoch=epoch, packed=packed)))
        for seed, epoch in ((1, 0), (1, 1), (2, 0), (0, 1))
    }
    assert len(orders) == 4


def test_batches_are_not_sorted_by_length() -> None:
    lengths = np.repeat(np.arange(1, 51, dtype=np.int32), 20)
    longest = [lengths[batch].max() for batch in plan_batches(lengths, lengths, max_tokens=100, seed=3, epoch=0)]
    rises = sum(a < b for a, b in itertools.pairwise(longest)) / len(longest)
    assert 0.4 < rises < 0.6


def test_batches_fill_their_budget() -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(5, 30, 5000).astype(np.int32)
    target = (source + rng.integers(-3, 4, 5000)).astype(np.int32)
    for packed, min_share in ((False, 0.9), (True, 0.95)):
        plan = plan_batches(source, target, max_tokens=1000, seed=1, epoch=0, packed=packed)
        used = [
            max(side[batch].sum() if packed else side[batch].max() * len(batch) for side in (source, target))
            for batch in plan
        ]
        assert np.mean(used) > min_share * 1000


@pytest.mark.parametrize("max_tokens", [300, 3000])
def test_batches_have_similar_lengths(max_tokens: int) -> None:
    rng = np.random.default_rng(0)
    source = np.clip(rng.normal(13, 4, 20_000).round(), 4, 40).astype(np.int32)
    target = np.clip(source + rng.normal(0, 2, 20_000).round(), 4, 40).astype(np.int32)
    plan = plan_batches(source, target, max_tokens=max_tokens, seed=1, epoch=0)
    num_positions = sum(len(b) * (int(source[b].max()) + int(target[b].max())) for b in plan)
    padding = 1 - (source.sum() + target.sum()) / num_positions
    assert padding < 0.05  # in an order of chance it would be a half


def test_planning_uses_little_memory() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, 300_000).astype(np.int32)
    tracemalloc.start()
    plan = plan_batches(lengths, lengths, max_tokens=4096, seed=1, epoch=0)
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plan) > 2000
    assert current < 6 * 300_000  # 4 bytes an example, and the batches' begins
    assert peak < 60 * 300_000  # a window of 131,072 is sorted at a time


def test_batch_plan_is_a_sequence() -> None:
    lengths = np.full(11, 3, np.int32)
    plan = plan_batches(lengths, lengths, max_tokens=9, seed=1, epoch=0)
    assert len(plan) == 4
    assert to_lists(plan) == [batch.tolist() for batch in plan[:]]  # as for resuming: found[done:]
    assert plan[-1].tolist() == plan[3].tolist()
    with pytest.raises(IndexError):
        plan[4]
    assert len(plan_batches(lengths[:0], lengths[:0], max_tokens=9, seed=1, epoch=0)) == 0


def test_invalid_arguments() -> None:
    lengths = np.full(5, 3, np.int32)
    with pytest.raises(InputError, match="tokens=0: a batch needs a budget"):
        plan_batches(lengths, lengths, max_tokens=0, seed=1, epoch=0)
    with pytest.raises(InputError, match="expected the same number of both"):
        plan_batches(lengths, lengths[:3], max_tokens=9, seed=1, epoch=0)
    with pytest.raises(InputError, match="num_parts=0"):
        divide_batch(np.arange(5, dtype=np.uint32), lengths, lengths, 0)


# --------------------------------------------------------------------------------------------------- parts


@given(LENGTHS, st.integers(1, 9))
def test_divide_batch_balances_the_cost(lengths: list[tuple[int, int]], count: int) -> None:
    source, target = split_sides(lengths)
    index = np.random.default_rng(0).permutation(len(lengths)).astype(np.uint32)
    plan = divide_batch(index, source, target, count)
    assert len(plan) == count
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(lengths)))
    sizes = [len(part) for part in plan]
    assert max(sizes) - min(sizes) <= 1
    assert (min(sizes) > 0) == (len(lengths) >= count)
    costs = [int((source[part] + target[part]).sum()) for part in plan]
    if len(lengths) >= count:
        assert max(costs) - min(costs) <= max(a + b for a, b in lengths)


# ------------------------------------------------------------------------------------------------ pair data


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    letters = Tokenizer.train(["abcdefghij"], TokenizerConfig("characters", vocab_size=400))
    rng = np.random.default_rng(5)
    pairs = [("abcdefghij"[: rng.integers(1, 11)], "jihgfedcba"[: rng.integers(1, 11)]) for _ in range(101)]
    path = tmp_path_factory.mktemp("store") / "s"
    return prepare_token_store(path, ParallelCorpus.from_pairs("made", lambda: pairs), TokenizerPair(letters, letters))


@pytest.mark.parametrize("index", [[0], [7, 3, 100, 7], range(101), []])
def test_collate_equals_from_sequences(store: TokenStore, index: list[int]) -> None:
    plan = TranslationBatcher(store, max_tokens=64, seed=1).collate(index)
    rows = [[side.tolist() for side in store[i]] for i in index]
    expected = Seq2SeqBatch.from_sequences([row[0] for row in rows], [row[1] for row in rows], list(index))
    for name in ("source", "target"):
        batch, reference = getattr(plan, name), getattr(expected, name)
        assert torch.equal(batch.ids, reference.ids.long())
        assert (batch.lengths, batch.packed) == (reference.lengths, reference.packed)
        assert batch.ids.dtype == torch.int64
    assert torch.equal(plan.labels, expected.labels.long())
    assert (plan.count, plan.example_indices) == (expected.count, expected.example_indices)


def sequences(max_tokens: Tokens) -> list[list[int]]:
    """The sequences of a batch, without those that fill it up."""
    if max_tokens.packed:
        assert max_tokens.cu_seqlens is not None
        ends = max_tokens.cu_seqlens.tolist()
        rows = [max_tokens.ids[0, a:b].tolist() for a, b in itertools.pairwise(ends)]
        return [row for row in rows if row and PAD not in row]
    return [row[:n].tolist() for row, n in zip(max_tokens.ids, max_tokens.lengths, strict=True)]


@pytest.mark.parametrize("index", [[0], [7, 3, 100, 7], range(101)])
def test_packed_batches_equal_padded_batches(store: TokenStore, index: list[int]) -> None:
    packed = TranslationBatcher(store, max_tokens=640, seed=1, packed=True).collate(index)
    padded = TranslationBatcher(store, max_tokens=640, seed=1).collate(index)
    assert sequences(packed.source) == sequences(padded.source)
    assert sequences(packed.target) == sequences(padded.target)
    assert packed.labels[packed.labels != IGNORE].tolist() == padded.labels[padded.labels != IGNORE].tolist()
    assert packed.count == padded.count == (packed.labels != IGNORE).sum()
    for max_tokens in (packed.source, packed.target):
        assert max_tokens.cu_seqlens is not None
        assert max_tokens.cu_seqlens[-1] == max_tokens.ids.shape[1] == sum(max_tokens.lengths)
        assert max_tokens.max_length >= max(max_tokens.lengths)
    # A filler on the one side meets one on the other: no query of it is without keys.
    assert [n > 0 for n in packed.source.lengths] == [n > 0 for n in packed.target.lengths]


def test_fixed_shapes_equal_padded_batches(store: TokenStore) -> None:
    batcher = TranslationBatcher(store, max_tokens=64, seed=1, fixed_shapes=True)
    to_lists = TranslationBatcher(store, max_tokens=64, seed=1)
    indices: list[int] = []
    for index in batcher.batches(epoch=0):
        batch, reference = batcher.collate(index), to_lists.collate(index)
        rows = len(index)
        assert sequences(batch.source)[:rows] == sequences(reference.source)
        assert sequences(batch.target)[:rows] == sequences(reference.target)
        assert all(row == [EOS] for row in sequences(batch.source)[rows:])
        assert (batch.labels[rows:] == IGNORE).all()
        assert batch.count == reference.count
        assert batch.source.device_lengths is not None
        assert batch.source.device_lengths.tolist() == list(batch.source.lengths)
        assert batch.target.ids.numel() <= 64
        indices += batch.example_indices
    assert sorted(indices) == list(range(101))


@pytest.mark.parametrize("packed", [False, True])
def test_graph_keys_recur(store: TokenStore, packed: bool) -> None:
    batcher = TranslationBatcher(store, max_tokens=200, seed=1, packed=packed, fixed_shapes=True)
    batches = [batcher.collate(index) for epoch in range(9) for index in batcher.batches(epoch)]
    graph_keys = {batch.graph_key for batch in batches}
    assert None not in graph_keys
    assert len(graph_keys) <= 9 < len(batches)


def test_round_up_lengths() -> None:
    lengths = np.arange(1, 3000)
    plan = round_up_lengths(lengths)
    assert (plan >= lengths).all()
    assert (plan[16:] < 1.25 * lengths[16:]).all()
    assert np.array_equal(round_up_lengths(plan), plan)
    assert len(set(plan.tolist())) == 34


def test_padded_batches_fit_the_budget(store: TokenStore) -> None:
    batcher = TranslationBatcher(store, max_tokens=40, seed=1)
    assert len(batcher) == 101
    indices: list[int] = []
    for index in batcher.batches(epoch=2):
        pairs = batcher.collate(index)
        assert pairs.source.ids.numel() <= 40
        assert pairs.target.ids.numel() <= 40
        assert pairs.count == sum(pairs.target.lengths)
        indices += pairs.example_indices
    assert sorted(indices) == list(range(101))


def test_packed_rows_fill_the_budget(store: TokenStore) -> None:
    batcher = TranslationBatcher(store, max_tokens=640, seed=1, packed=True)
    count = 0
    for index in batcher.batches(epoch=0):
        pairs = batcher.collate(index)
        assert pairs.source.ids.shape[1] <= 640
        assert (
            batcher.layout.num_fillers
            <= (pairs.source.ids == PAD).sum()
            < batcher.layout.length_multiple + batcher.layout.num_fillers
        )
        assert (
            batcher.layout.num_fillers
            <= (pairs.labels == IGNORE).sum()
            < batcher.layout.length_multiple + batcher.layout.num_fillers
        )
        count += pairs.count
    assert count == store.target.lengths.sum() + len(store)


def test_divided_batch_has_the_same_number_of_labels(store: TokenStore) -> None:
    batcher = TranslationBatcher(store, max_tokens=200, seed=1)
    for index in batcher.batches(epoch=0):
        complete = batcher.collate(index).count
        assert sum(batcher.collate(part).count for part in batcher.divide(index, 3)) == complete


def test_budget_of_one_token_raises(store: TokenStore) -> None:
    with pytest.raises(InputError, match="tokens=1"):
        TranslationBatcher(store, max_tokens=1, seed=1)


@pytest.mark.parametrize("packed", [False, True])
def test_example_over_the_budget_has_its_own_batch(store: TokenStore, packed: bool) -> None:
    batcher = TranslationBatcher(store, max_tokens=8, seed=1, packed=packed, fixed_shapes=True)
    sizes = [len(index) for index in batcher.batches(epoch=0)]
    assert sum(sizes) == 101
    longest = max(max(store.source.lengths), max(store.target.lengths)) + 1
    assert longest > 8
    for index in batcher.batches(epoch=0):
        pairs = batcher.collate(index)
        assert len(index) == 1 or max(map(sum, (pairs.source.lengths, pairs.target.lengths))) <= 8 + 64


def test_plan_of_the_latest_epoch_is_cached(store: TokenStore) -> None:
    batcher = TranslationBatcher(store, max_tokens=64, seed=1)
    assert batcher.batches(3) is batcher.batches(3)
    assert to_lists(batcher.batches(4)) != to_lists(batcher.batches(3))
    assert to_lists(batcher.batches(4)) == to_lists(TranslationBatcher(store, max_tokens=64, seed=1).batches(4))
