"""The cache: what is appended is there, at its place, and nothing that was there changes."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from jumok.attention.kv_cache import KVCache
from jumok.attention.mask_types import AttentionShape
from jumok.errors import InputError

HEADS, WIDTH, VALUE_WIDTH = 2, 3, 5
gradients = pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])


def tokens(batch: int, new: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values that are all different."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(batch, HEADS, new, WIDTH, generator=generator)
    return key, torch.randn(batch, HEADS, new, VALUE_WIDTH, generator=generator)


class Rows:
    """The oracle: a Python list of tokens for every row, appended to one by one."""

    def __init__(self, rows: list[list[tuple[Tensor, Tensor]]]) -> None:
        self.rows = rows

    def append(self, key: Tensor, value: Tensor, lengths: list[int]) -> Rows:
        new = [[(key[b, :, t], value[b, :, t]) for t in range(n)] for b, n in enumerate(lengths)]
        return Rows([old + more for old, more in zip(self.rows, new, strict=True)])

    def reorder(self, index: list[int]) -> Rows:
        return Rows([self.rows[b] for b in index])

    def is_held_by(self, cache: KVCache) -> bool:
        longest = max(map(len, self.rows))
        return (
            cache.lengths == tuple(map(len, self.rows))
            and cache.key.shape == (len(self.rows), HEADS, longest, WIDTH)
            and cache.value.shape == (len(self.rows), HEADS, longest, VALUE_WIDTH)
            and all(
                torch.equal(cache.key[b, :, t], key) and torch.equal(cache.value[b, :, t], value)
                for b, row in enumerate(self.rows)
                for t, (key, value) in enumerate(row)
            )
        )


@gradients
def test_equal_rows_by_hand(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        one, two, three = (torch.full((1, 1, n, 1), float(n)) for n in (1, 2, 3))
        cache = KVCache().append(one, -one).append(two, -two).append(three, -three)
    assert cache.key.flatten().tolist() == [1, 2, 2, 3, 3, 3]
    assert cache.value.flatten().tolist() == [-1, -2, -2, -3, -3, -3]
    assert cache.lengths == (6,)
    assert cache.offset == 6


@gradients
def test_ragged_rows_by_hand(grad: bool) -> None:
    def row_numbers(*rows: list[float]) -> Tensor:
        return torch.tensor(rows)[:, None, :, None]

    with torch.set_grad_enabled(grad):
        first = row_numbers([1, 2, 9], [3, 9, 9], [4, 5, 6])
        cache = KVCache().append(first, first, lengths=[2, 1, 3])
        second = row_numbers([7, 8], [10, 11], [12, 9])
        cache = cache.append(second, second, lengths=torch.tensor([2, 2, 1]))
    assert cache.lengths == (4, 3, 4)
    assert cache.offset == (4, 3, 4)
    held = [cache.key[b, 0, :n, 0].tolist() for b, n in enumerate(cache.lengths)]
    assert held == [[1, 2, 7, 8], [3, 10, 11], [4, 5, 6, 12]]


@gradients
@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_done_every_cache_ever_made_stays_right(seed: int, grad: bool) -> None:
    """Append to any cache made so far, not only to the last, or reorder it: a tree of continuations."""
    chance = Random(seed)
    made = [(KVCache(), Rows([[]] * chance.randint(1, 3)))]
    with torch.set_grad_enabled(grad):
        for step in range(8):
            cache, rows = chance.choice(made)
            batch, new = len(rows.rows), chance.randint(0, 3)
            if cache.lengths and chance.random() < 0.2:
                index = [chance.randrange(batch) for _ in range(chance.randint(1, 4))]
                made.append((cache.reorder(index), rows.reorder(index)))
                continue
            key, value = tokens(batch, new, step)
            real = [chance.randint(0, new) if chance.random() < 0.5 else new for _ in range(batch)]
            lengths = None if min(real) == new else real
            made.append((cache.append(key, value, lengths), rows.append(key, value, real)))
        assert all(rows.is_held_by(cache) for cache, rows in made[1:])


@torch.no_grad()
def test_two_continuations_of_one_cache_do_not_disturb_each_other() -> None:
    trunk = KVCache().append(*tokens(1, 5, 0)).append(*tokens(1, 1, 1))  # the second append makes free places
    assert trunk.buffer is not None
    assert trunk.buffer.key.shape[2] > 7
    left = trunk.append(*tokens(1, 1, 2))
    right = trunk.append(*tokens(1, 1, 3))
    left_on = left.append(*tokens(1, 1, 4))
    assert left.buffer is trunk.buffer is left_on.buffer  # the newest writes in place, …
    assert right.buffer is not trunk.buffer  # … and who comes later has a copy
    assert torch.equal(left.key[:, :, 6:], tokens(1, 1, 2)[0])
    assert torch.equal(right.key[:, :, 6:], tokens(1, 1, 3)[0])
    assert torch.equal(left_on.key[:, :, 6:], torch.cat([tokens(1, 1, 2)[0], tokens(1, 1, 4)[0]], 2))
    assert torch.equal(trunk.key, right.key[:, :, :6])


@torch.no_grad()
def test_the_tensors_that_were_given_are_never_written_to() -> None:
    key, value = tokens(2, 5, 0)
    before = key.clone(), value.clone()
    cache = KVCache().append(key, value, lengths=[1, 2])  # leaves places free in the caller's own tensors
    cache.append(*tokens(2, 1, 1))
    assert torch.equal(key, before[0])
    assert torch.equal(value, before[1])


@torch.no_grad()
def test_many_steps_copy_the_past_only_a_few_times() -> None:
    cache, rooms = KVCache(), set()
    for step in range(1000):
        cache = cache.append(*tokens(1, 1, step % 7))
        assert cache.buffer is not None
        rooms.add(cache.buffer.key.data_ptr())
    assert cache.lengths == (1000,)
    assert len(rooms) <= 12


@pytest.mark.parametrize("lengths", [[5, 5], [2, 5]])
def test_gradients_reach_everything_that_was_appended(lengths: list[int]) -> None:
    parts = [tuple(x.double().requires_grad_() for x in tokens(2, new, new)) for new in (5, 1, 3)]
    cache = KVCache().append(*parts[0], lengths)
    for key, value in parts[1:]:
        cache = cache.append(key, value)
    sevens = torch.zeros_like(cache.key)
    for b, n in enumerate(cache.lengths):
        sevens[b, :, :n] = 7
    (cache.key * sevens).sum().backward()
    first = parts[0][0].grad
    assert first is not None
    assert [row.unique().tolist() for b, n in enumerate(lengths) for row in first[b, :, :n]] == [[7.0]] * 4
    assert all((first[b, :, n:] == 0).all() for b, n in enumerate(lengths))
    assert all((key.grad == 7).all() for key, _ in parts[1:])


def test_steps_without_gradients_leave_earlier_ones_with_gradients_alone() -> None:
    key, value = (x.requires_grad_() for x in tokens(2, 4, 0))
    with_grad = KVCache().append(key, value, [1, 2]).append(*tokens(2, 3, 1), [1, 1])  # places are left free
    reordered = with_grad.reorder([1, 0])
    loss = (with_grad.key**2 + reordered.key**2).sum()  # keeps the keys for its backward pass
    with torch.no_grad():
        with_grad.append(*tokens(2, 1, 2)).append(*tokens(2, 1, 3))
        reordered.append(*tokens(2, 1, 2))
    loss.backward()
    assert key.grad is not None


def test_a_cache_from_inference_mode_goes_on_outside_of_it() -> None:
    with torch.inference_mode():
        cache = KVCache().append(*tokens(2, 2, 0)).append(*tokens(2, 1, 1))
    with torch.no_grad():
        outside = cache.append(*tokens(2, 1, 2))
    grad = cache.append(*tokens(2, 1, 2))
    assert torch.equal(outside.key, grad.key)
    assert torch.equal(outside.key[:, :, 3:], tokens(2, 1, 2)[0])


def test_reorder_takes_the_lengths_along() -> None:
    cache = KVCache().append(*tokens(3, 5, 0), lengths=[1, 4, 2])
    beams = cache.reorder(torch.tensor([2, 2, 0, 1]))
    assert beams.lengths == (2, 2, 1, 4)
    assert torch.equal(beams.key, cache.key[[2, 2, 0, 1]])
    assert torch.equal(beams.value, cache.value[[2, 2, 0, 1]])
    assert beams.reorder([0, 1]).key.shape[2] == 2  # no longer than the longest that is left


def test_cleaned_once_nothing_is_behind_the_end_of_a_row() -> None:
    nan = (x.index_fill(2, torch.tensor([2, 3, 4]), torch.nan) for x in tokens(3, 5, 1))
    cache = KVCache().append(*nan, lengths=[1, 2, 0])
    clean = cache.zero_padding()
    at = AttentionShape(1, 1, 4, torch.device("cpu"))
    for now, chosen in ((clean, [0, 1, 2]), (clean.reorder([2, 2, 0]), [2, 2, 0])):
        for new, old in ((now.key, cache.key), (now.value, cache.value)):
            assert new.shape[2] == max(now.lengths)
            for row, origin in enumerate(chosen):
                length = cache.lengths[origin]
                assert torch.equal(new[row, :, :length], old[origin, :, :length])
                assert not new[row, :, length:].any()
        assert now.padding_mask is not None
        assert now.padding_mask.has_no_hidden_keys(at)  # no step has to look for them
    assert cache.padding_mask is not None
    assert not cache.padding_mask.has_no_hidden_keys(at)
    assert clean.zero_padding() is clean
    again = clean.append(*tokens(3, 2, 2), lengths=[1, 2, 0])
    assert again.padding_mask is not None
    assert not again.padding_mask.has_no_hidden_keys(at)  # what was appended may be anything
    even = KVCache().append(*tokens(2, 3, 0))
    assert even.zero_padding() is even


def test_the_causal_mask_by_hand() -> None:
    cache = KVCache().append(*tokens(2, 3, 0), lengths=[1, 3])
    mask = cache.build_causal_mask(2, lengths=[2, 1])
    assert mask.to_dense(2, 4).int().tolist() == [
        [[1, 1, 0, 0], [1, 1, 1, 0]],
        [[1, 1, 1, 1], [1, 1, 1, 1]],
    ]


@pytest.mark.parametrize("seed", range(60))
def test_the_causal_mask_lets_each_token_see_its_past_and_itself(seed: int) -> None:
    """Query t of a row stands behind its ``before`` keys, and sees the real ones up to itself."""
    chance = Random(seed)
    new, old = chance.randint(1, 3), chance.randint(0, 3)
    before = [chance.randint(0, old) for _ in range(2)]
    added = None if chance.random() < 0.3 else [chance.randint(0, new) for _ in range(2)]
    past = KVCache().append(*tokens(2, old, 0), before)
    now = past.append(*tokens(2, new, 1), added)
    allowed = past.build_causal_mask(new, added).to_dense(new, now.max_length).expand(2, new, now.max_length)
    for row in range(2):
        for query in range(new):
            expected = [key <= before[row] + query and key < now.lengths[row] for key in range(now.max_length)]
            assert allowed[row, query].tolist() == expected


def test_the_causal_mask_is_the_plain_one_where_all_rows_are_alike() -> None:
    """… because the fast paths know that one."""
    assert repr(KVCache().build_causal_mask(5)) == "causal()"
    assert repr(KVCache().build_causal_mask(5, lengths=[5, 5])) == "causal()"
    assert repr(KVCache().append(*tokens(2, 3, 0)).build_causal_mask(2)) == "causal()"
    # Not here: of five queries only three have a key, so the last query does not belong to the last key.
    assert repr(KVCache().build_causal_mask(5, lengths=[3, 3])) == "causal(offset=[0, 0]) & padding([3, 3])"


def test_the_padding_mask() -> None:
    assert KVCache().append(*tokens(2, 3, 0)).padding_mask is None
    assert KVCache().append(*tokens(2, 3, 0), lengths=[2, 2]).padding_mask is None  # only two keys are left to see
    ragged = KVCache().append(*tokens(2, 3, 0), lengths=[1, 3])
    assert repr(ragged.padding_mask) == "padding([1, 3])"
    assert ragged.padding_mask is ragged.padding_mask


def test_a_cache_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        KVCache().lengths = (1,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: KVCache().key, r"empty; append\(key, value\)"),
        (lambda: KVCache().reorder([0]), "empty"),
        (lambda: KVCache().append(torch.zeros(2, 3, 5), torch.zeros(2, 3, 5)), r"key has shape \(2, 3, 5\)"),
        (
            lambda: KVCache().append(torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 4, 7)),
            "same batch, heads and tokens",
        ),
        (
            lambda: KVCache().append(*tokens(2, 3, 0)).append(*tokens(3, 1, 0)),
            r"has a batch of 2.*KVCache\(\)",
        ),
        (
            lambda: KVCache().append(*tokens(2, 3, 0)).append(*(x.half() for x in tokens(2, 1, 0))),
            r"float16.*\.to\(\)",
        ),
        (lambda: KVCache().append(*tokens(2, 3, 0), lengths=[1]), r"lengths \[1\].*2 rows.*from 0 to 3"),
        (lambda: KVCache().append(*tokens(2, 3, 0), lengths=[1, 4]), "from 0 to 3"),
        (lambda: KVCache().append(*tokens(2, 3, 0), lengths=[1, -1]), "from 0 to 3"),
        (lambda: KVCache().append(*tokens(2, 3, 0), lengths=torch.tensor([1.0, 2.0])), "integer"),
        (lambda: KVCache().append(*tokens(2, 3, 0)).build_causal_mask(1, lengths=[1, 2]), "from 0 to 1"),
        (lambda: KVCache().append(*tokens(2, 3, 0)).reorder([0, 2]), "row 2 of a batch of 2"),
        (lambda: KVCache().append(*tokens(2, 3, 0)).reorder([-1]), "row -1"),
        (lambda: KVCache().append(*tokens(2, 3, 0)).reorder(torch.tensor([[0]])), r"shape \(1, 1\)"),
        (lambda: KVCache().append(*tokens(2, 3, 0)).reorder(torch.tensor([0.0])), "float32"),
    ],
)
def test_errors_say_what_came_and_what_was_expected(wrong, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        wrong()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@torch.no_grad()
def test_the_gpu_is_never_waited_for() -> None:
    first, more = ([x.cuda() for x in tokens(3, new, new)] for new in (5, 1))
    index = torch.tensor([2, 0, 1]).cuda()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for lengths in (None, [2, 5, 3]):
            cache = KVCache().append(*first, lengths).append(*more)
            cache = cache.reorder([1, 0, 2] if lengths else index).append(*more)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(cache.key[2, :, 4].cpu(), tokens(3, 1, 1)[0][2, :, 0])
