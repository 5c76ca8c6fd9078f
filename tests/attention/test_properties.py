"""What holds for any mask and any numbers: random masks of every kind, combined by & | and ~."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from jumok import attend, masks, mix, weights
from jumok.attention import chunking, mask_types
from jumok.attention.mask_types import AttentionShape
from jumok.attention.paths import flex

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.long


CPU = torch.device("cpu")
B, H, K, D, V = 2, 3, 7, 11, 13
Drawn = tuple[masks.Mask, Tensor]  # a mask, and (B, H, Q, K) as its definition says, element by element
some = settings(max_examples=200)

# ----------------------------------------------------------------------- masks of every kind


def numbers(shape: tuple[int, ...], low: int, high: int) -> st.SearchStrategy[Tensor]:
    """Whole numbers from low to high, of one of the shapes that align from the left: (), (B,) or (B, H)."""
    count = torch.Size(shape).numel()
    flat = st.lists(st.integers(low, high), min_size=count, max_size=count)
    return flat.map(lambda x: torch.tensor(x).reshape(shape))


leading = st.sampled_from([(), (B,), (B, 1), (B, H)])


def rows(x: Tensor, extra: int) -> Tensor:
    """Leading numbers, from the left, in front of queries and keys: ``(B, H, 1, 1)`` up to broadcasting."""
    return x.reshape(*x.shape[: x.dim() - extra], *[1] * (2 + extra - x.dim()), *x.shape[x.dim() - extra :])


@st.composite
def paddings(draw: Any, queries: int) -> Drawn:
    lengths = draw(leading.flatmap(lambda shape: numbers(shape, 0, K)))
    return masks.padding(lengths), torch.arange(K) < rows(lengths, 0)[..., None, None]


@st.composite
def windows(draw: Any, queries: int) -> Drawn:
    reach = st.none() | st.integers(0, 3)
    left, right = draw(st.tuples(reach, reach) | st.just((None, 0)))
    offset = draw(st.none() | leading.flatmap(lambda shape: numbers(shape, -3, K)))
    mask = masks.causal(offset) if (left, right) == (None, 0) else masks.window(left, right, offset)
    start = torch.tensor(K - queries) if offset is None else offset
    away = torch.arange(K) - torch.arange(queries)[:, None] - rows(start, 0)[..., None, None]
    return mask, (away >= (-99 if left is None else -left)) & (away <= (99 if right is None else right))


@st.composite
def packed(draw: Any, queries: int) -> Drawn:
    ids = draw(st.sampled_from([(K,), (B, K), (B, H, K)]).flatmap(lambda shape: numbers(shape, -1, 2)))
    if draw(st.booleans()):
        ids = ids.sort(-1).values  # every document in one piece
    theirs = rows(ids, 1)
    asked = None
    mine = theirs[..., K - queries :, None]
    if draw(st.booleans()):  # other queries
        asked = draw(numbers((*ids.shape[:-1], queries), -1, 3))
        mine = rows(asked, 1)[..., None]
    return masks.documents(ids, asked), (mine == theirs[..., None, :]) & (mine >= 0)


@st.composite
def zero_ones(draw: Any, queries: int) -> Drawn:
    kept = draw(numbers((B, K), 0, 1))
    if draw(st.booleans()):
        kept = kept.sort(-1).values  # padding on the left
    return masks.from_zero_one(kept), kept.bool()[:, None, None]


@st.composite
def tensors(draw: Any, queries: int) -> Drawn:
    shapes = [(K,), (1, K), (queries, 1), (queries, K), (H, 1, K), (B, 1, queries, K), (B, H, queries, K)]
    allowed = draw(st.sampled_from(shapes).flatmap(lambda shape: numbers(shape, 0, 1))).bool()
    return masks.tensor(allowed), allowed


def combined(parts: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    two = st.tuples(parts, parts)
    return (
        two.map(lambda ab: (ab[0][0] & ab[1][0], ab[0][1] & ab[1][1]))
        | two.map(lambda ab: (ab[0][0] | ab[1][0], ab[0][1] | ab[1][1]))
        | parts.map(lambda a: (~a[0], ~a[1]))
    )


@functools.cache
def any_mask(queries: int, *, structured: bool = False, depth: int = 3) -> st.SearchStrategy[Drawn]:
    kinds = [paddings(queries), windows(queries), packed(queries)]
    leaves = st.one_of(kinds if structured else [*kinds, zero_ones(queries), tensors(queries)])
    level = leaves
    for _ in range(depth):
        level = leaves | combined(level)
    return level.map(lambda drawn: (drawn[0], drawn[1].expand(B, H, queries, K)))


sizes = st.sampled_from([5, 1, 2, K])  # queries; never more than keys, which documents need


@st.composite
def masked(draw: Any, **kinds: Any) -> tuple[masks.Mask, Tensor, AttentionShape]:
    queries = draw(sizes)
    mask, allowed = draw(any_mask(queries, **kinds))
    return mask, allowed, AttentionShape(2, queries, K, CPU)


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def inputs(queries: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(queries)
    shapes = (queries, D), (K, D), (K, V)
    query, key, value = (torch.randn(B, H, *s, dtype=torch.float64, requires_grad=True) for s in shapes)
    return query, key, value


# ------------------------------------------------------------------------------ what a mask says


@some
@given(masked())
def test_a_mask_is_its_definition(drawn: tuple[masks.Mask, Tensor, AttentionShape]) -> None:
    mask, allowed, at = drawn
    assert torch.equal(mask.to_dense_rows(at, slice(0, at.num_queries)).expand_as(allowed), allowed)
    mask.check_shape((B, H), at)


@some
@given(masked(), st.integers(0, K), st.integers(0, K))
def test_some_rows_of_a_mask_are_those_rows(
    drawn: tuple[masks.Mask, Tensor, AttentionShape], start: int, count: int
) -> None:
    mask, allowed, at = drawn
    part = slice(min(start, at.num_queries), min(start + count, at.num_queries))
    assert torch.equal(mask.to_dense_rows(at, part).expand_as(allowed[..., part, :]), allowed[..., part, :])


@some
@given(masked(structured=True))
def test_a_band_is_the_mask(drawn: tuple[masks.Mask, Tensor, AttentionShape]) -> None:
    mask, allowed, at = drawn
    band = mask.to_band(at)
    if band is not None:
        place = torch.arange(K)
        inside = (place >= band.first[..., None]) & (place <= band.last[..., None])
        assert torch.equal(inside.expand_as(allowed), allowed)


@some
@given(masked(), st.sampled_from([1, 40, 1 << 24]))
def test_rows_and_keys_alive_are_those_with_something_allowed(
    drawn: tuple[masks.Mask, Tensor, AttentionShape], at_once: int
) -> None:
    mask, allowed, at = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_types, "MAX_SCAN_ELEMENTS", at_once)
        alive_rows, alive_keys = mask.find_nonempty_rows(at), mask.find_visible_keys(at)
    every = torch.tensor(True)  # None: all of them
    seen = allowed.any(-1), allowed.any(-2)
    for alive, expected in zip((alive_rows, alive_keys), seen, strict=True):
        assert torch.equal((every if alive is None else alive).expand_as(expected), expected)


@some
@given(masked(structured=True), st.sampled_from([2, 3, 4]))
def test_tiles_miss_no_block_and_call_none_full_that_is_not(
    drawn: tuple[masks.Mask, Tensor, AttentionShape], size: int
) -> None:
    mask, allowed, at = drawn
    if not flex.is_structured(mask):
        return
    said = flex.compute_block_coverage(mask, at, size)
    padded = torch.nn.functional.pad(allowed, (0, -K % size, 0, -at.num_queries % size))
    cut = padded.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (B, H, Qb, size, Kb, size)
    assert not (cut.any(-1).any(-2) & ~said.any_allowed).any()
    assert not (said.all_allowed & ~cut.all(-1).all(-2)).any()


# --------------------------------------------------------------------- what attention does with it


@some
@given(masked(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.booleans())
def test_attend_is_mix_of_weights(
    drawn: tuple[masks.Mask, Tensor, AttentionShape], dtype: torch.dtype, with_bias: bool
) -> None:
    mask, allowed, at = drawn
    query, key, value = (x.detach().to(dtype) for x in inputs(at.num_queries))
    bias = torch.randn(H, 1, K).where(torch.rand(H, 1, K) < 0.8, -torch.inf) if with_bias else None
    if bias is not None:
        allowed = allowed & (bias != -torch.inf)

    shown = weights(query, key, mask=mask, bias=bias)

    close = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        attend(query, key, value, mask=mask, bias=bias), mix(shown, value), rtol=close, atol=close
    )
    assert not shown[~allowed].any()
    torch.testing.assert_close(shown.sum(-1), allowed.any(-1).to(dtype), rtol=0, atol=close)


@some
@given(masked(), st.sampled_from([1, 30, 100]), st.booleans())
def test_some_queries_at_a_time_give_the_same_result_and_gradients(
    drawn: tuple[masks.Mask, Tensor, AttentionShape], at_once: int, reference: bool
) -> None:
    mask, _, at = drawn
    leaves = inputs(at.num_queries)

    def run() -> list[Tensor]:
        out = attend(*leaves, mask=mask, softcap=5.0 if reference else None)
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    at_a_time = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "MAX_CHUNK_ELEMENTS", at_once)
        for one, other in zip(run(), at_a_time, strict=True):
            same(one, other)


@some
@given(masked(), st.permutations(range(K)))
def test_the_order_of_the_keys_does_not_matter(
    drawn: tuple[masks.Mask, Tensor, AttentionShape], order: list[int]
) -> None:
    mask, allowed, at = drawn
    query, key, value = inputs(at.num_queries)
    shuffled = attend(query, key[..., order, :], value[..., order, :], mask=masks.tensor(allowed[..., order]))
    same(shuffled, attend(query, key, value, mask=mask))


@some
@given(st.integers(0, K - 1), sizes)
def test_under_causal_a_query_does_not_depend_on_later_keys(changed: int, queries: int) -> None:
    query, key, value = (x.detach() for x in inputs(queries))
    before = attend(query, key, value, mask=masks.causal())
    key[..., changed, :], value[..., changed, :] = 3.0, 5.0
    differs = (attend(query, key, value, mask=masks.causal()) != before).any(-1)  # (B, H, Q)
    sees = torch.arange(queries) + K - queries >= changed
    assert torch.equal(differs, sees.expand_as(differs))
