"""Masks: the pictures of their docstrings, converters from other conventions, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jumok
from jumok import attend, masks
from jumok.attention.mask_types import MASK_CACHE_SIZE, AttentionShape

B, H, Q, K, D = 2, 3, 5, 7, 11


def picture(mask: masks.Mask, queries: int, keys: int) -> list[str]:
    """Rows of ■ and ·, as in the docstrings; those of several pictures one after the other."""
    rows = mask.to_dense(queries, keys).flatten(0, -2).tolist()
    return ["".join("■" if allowed else "·" for allowed in row) for row in rows]


PICTURES: dict[str, tuple[masks.Mask, int, int, str]] = {
    "padding": (masks.padding([2, 4]), 2, 4, "■■·· ■■·· ■■■■ ■■■■"),
    "one length": (masks.padding(1), 2, 3, "■·· ■··"),
    "no length": (masks.padding([0, 1]), 1, 2, "·· ■·"),
    "causal 3 × 5": (masks.causal(), 3, 5, "■■■·· ■■■■· ■■■■■"),
    "causal 3 × 3": (masks.causal(), 3, 3, "■·· ■■· ■■■"),
    "causal 5 × 3": (masks.causal(), 5, 3, "··· ··· ■·· ■■· ■■■"),
    "causal at 1": (masks.causal(1), 3, 5, "■■··· ■■■·· ■■■■·"),
    "causal at -1": (masks.causal(-1), 3, 3, "··· ■·· ■■·"),
    "causal ragged": (masks.causal([0, 2]), 2, 4, "■··· ■■·· ■■■· ■■■■"),
    "window 1 0": (masks.window(1, 0), 4, 4, "■··· ■■·· ·■■· ··■■"),
    "window 1 1": (masks.window(1, 1), 4, 4, "■■·· ■■■· ·■■■ ··■■"),
    "window all 1": (masks.window(None, 1), 3, 4, "■■■· ■■■■ ■■■■"),
    "window 0 all": (masks.window(0, None), 3, 4, "·■■■ ··■■ ···■"),
    "window at 1": (masks.window(0, 0, offset=1), 2, 4, "·■·· ··■·"),
    "window ragged": (masks.window(1, 0, offset=[0, 2]), 1, 3, "■·· ·■■"),
    "documents": (masks.documents([7, 7, 8, 8, 8]), 5, 5, "■■··· ■■··· ··■■■ ··■■■ ··■■■"),
    "last of documents": (masks.documents([7, 7, 8, 8, 8]), 2, 5, "··■■■ ··■■■"),
    "packed": (masks.packed(torch.tensor([0, 2, 2, 5])), 5, 5, "■■··· ■■··· ··■■■ ··■■■ ··■■■"),
    "last of packed": (masks.packed(torch.tensor([0, 2, 5])), 2, 5, "··■■■ ··■■■"),
    "packed, asked by others": (
        masks.packed(torch.tensor([0, 2, 5]), cu_seqlens_q=torch.tensor([0, 1, 3])),
        3,
        5,
        "■■··· ··■■■ ··■■■",
    ),
    "nothing to see": (
        masks.packed(torch.tensor([0, 2, 2]), cu_seqlens_q=torch.tensor([0, 1, 2])),
        2,
        2,
        "■■ ··",
    ),
    "padded documents": (masks.documents([-1, 0, 0, -1]), 4, 4, "···· ·■■· ·■■· ····"),
    "documents in pieces": (masks.documents([0, 1, 0]), 3, 3, "■·■ ·■· ■·■"),
    "padding in pieces": (masks.documents([-1, 0, -1]), 3, 3, "··· ·■· ···"),
    "from other documents": (
        masks.documents([7, 7, 8, 8, 8], query_ids=[7, 8, 8]),
        3,
        5,
        "■■··· ··■■■ ··■■■",
    ),
    "in another order": (masks.documents([7, 9, 9], query_ids=[9, 9, 8, 7, -1]), 5, 3, "·■■ ·■■ ··· ■·· ···"),
    "to pieces": (masks.documents([7, 8, 7], query_ids=[8, 7]), 2, 3, "·■· ■·■"),
    "tensor": (masks.tensor(torch.tensor([[True, False], [False, True]])), 2, 2, "■· ·■"),
    "one row": (masks.tensor(torch.tensor([True, False])), 2, 2, "■· ■·"),
    "one column": (masks.tensor(torch.tensor([[True], [False]])), 2, 2, "■■ ··"),
    "and": (masks.causal() & masks.padding([1, 3]), 2, 3, "■·· ■·· ■■· ■■■"),
    "or": (masks.window(0, 0) | masks.padding(1), 3, 3, "■·· ■■· ■·■"),
    "not": (~masks.causal(), 3, 3, "·■■ ··■ ···"),
    "prefix and causal": (masks.causal() | masks.padding(2), 4, 4, "■■·· ■■·· ■■■· ■■■■"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture(name: str) -> None:
    mask, queries, keys, expected = PICTURES[name]
    assert picture(mask, queries, keys) == expected.split()


def test_lengths_align_from_the_left_and_tensors_from_the_right() -> None:
    at = AttentionShape(2, Q, K, torch.device("cpu"))
    everything = slice(0, Q)
    assert masks.padding([4, 7]).to_dense_rows(at, everything).shape == (B, 1, 1, K)
    assert masks.padding([[1, 2, 3], [4, 5, 6]]).to_dense_rows(at, everything).shape == (B, H, 1, K)
    assert masks.causal([0, 2]).to_dense_rows(at, everything).shape == (B, 1, Q, K)
    assert masks.documents([[0] * K, [1] * K]).to_dense_rows(at, everything).shape == (B, 1, Q, K)
    assert masks.from_zero_one(torch.ones(B, K)).to_dense_rows(at, everything).shape == (B, 1, 1, K)
    assert masks.tensor(torch.ones(H, Q, K).bool()).to_dense_rows(at, everything).shape == (1, H, Q, K)


def test_lengths_of_every_head_are_their_own() -> None:
    lengths = torch.tensor([[1, 2, 3], [4, 5, 6]])
    shown = jumok.weights(torch.zeros(B, H, Q, D), torch.zeros(B, H, K, D), mask=masks.padding(lengths))
    assert torch.equal((shown > 0).sum(-1), lengths[:, :, None].expand(B, H, Q))


# ------------------------------------------------------------------------------- converters


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(B, H, n, D, dtype=torch.float64) for n in (Q, K, K))
    return query, key, value


def identity_heads() -> nn.MultiheadAttention:
    """``nn.MultiheadAttention`` with one head and no projection: attention alone."""
    module = nn.MultiheadAttention(D, 1, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(D).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(D))
    return module


def test_from_drop_is_multihead_attentions_mask() -> None:
    query, key, value = (x[:, 0] for x in inputs())
    dropped = torch.rand(Q, K) < 0.4
    dropped[:, 3] = False
    theirs = identity_heads()(query, key, value, attn_mask=dropped, need_weights=False)[0]
    torch.testing.assert_close(attend(query, key, value, mask=masks.from_blocked(dropped)), theirs)


def test_from_zero_one_is_multihead_attentions_padding_mask_turned_round() -> None:
    query, key, value = (x[:, 0] for x in inputs())
    padded = torch.tensor([[False] * 4 + [True] * 3, [True] * 2 + [False] * 5])
    theirs = identity_heads()(query, key, value, key_padding_mask=padded, need_weights=False)[0]
    torch.testing.assert_close(attend(query, key, value, mask=masks.from_zero_one(~padded)), theirs)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float64).min, -1e9, -1e4])
def test_from_additive_is_a_mask_that_is_added(lowest: float) -> None:
    query, key, value = inputs()
    added = torch.zeros(B, 1, Q, K, dtype=torch.float64)
    added[torch.rand_like(added) < 0.4] = lowest
    added[..., 2] = 0
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=added)
    torch.testing.assert_close(attend(query, key, value, mask=masks.from_additive(added)), theirs)


ZERO_ONE = {
    "right": [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]],
    "both sides": [[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]],
    "in pieces": [[1, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1]],
    "one row empty": [[0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0]],
    "all empty": [[0] * 7, [0] * 7],
}


@pytest.mark.parametrize("name", ZERO_ONE)
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32], ids=str)
def test_from_zero_one_is_hugging_faces_mask(plain: Callable[..., Tensor], name: str, dtype: torch.dtype) -> None:
    kept = torch.tensor(ZERO_ONE[name]).to(dtype)
    mask = masks.from_zero_one(kept)
    assert torch.equal(mask.to_dense(Q, K), kept.bool()[:, None].expand(B, Q, K))

    query, key, value = inputs()
    for extra in (masks.window(None, None), masks.causal()):  # transformers' mask: these columns, and causal
        allowed = kept.bool()[:, None, None, :] & extra.to_dense(Q, K)
        torch.testing.assert_close(attend(query, key, value, mask=mask & extra), plain(query, key, value, allowed))


def test_padding_on_one_side_needs_no_tensor_and_in_pieces_does() -> None:
    at = AttentionShape(2, Q, K, torch.device("cpu"))
    for name in ("right", "left", "both sides", "one row empty", "all empty"):
        assert masks.from_zero_one(torch.tensor(ZERO_ONE[name])).to_band(at) is not None
    assert masks.from_zero_one(torch.tensor(ZERO_ONE["in pieces"])).to_band(at) is None


# ------------------------------------------------------------------- what is known beforehand


def of_every_kind(queries: int) -> list[masks.Mask]:
    """Masks with and without empty rows and unseen keys; documents where there are enough keys for them."""
    left = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * K])
    made = [masks.padding([7, 7]), masks.padding([4, 7]), masks.padding([0, 7]), masks.padding(3)]
    made += [masks.from_zero_one(left), masks.from_zero_one(left.flip(0, 1)), masks.from_zero_one(left * 0)]
    made += [masks.from_zero_one(torch.tensor([[1, 0, 1, 1, 0, 1, 0]] * B))]
    made += [masks.causal(), masks.causal(0), masks.causal([-2, 9]), masks.window(1, 0), masks.window(0, 2)]
    made += [masks.window(None, 1), masks.window(2, None), masks.window(1, 1, offset=[-3, 8])]
    made += [masks.tensor(torch.arange(queries * K).reshape(queries, K) % 3 > 0)]
    made += [masks.tensor(torch.arange(K) != 2), masks.tensor((torch.arange(queries) != 1)[:, None])]
    asked = [(torch.arange(queries) % n - int(n == 5)).tolist() for n in (1, 2, 3, 5)]
    made += [masks.documents([0, 0, 1, 1, 1, 2, 2], query_ids=ids) for ids in asked]
    asking = torch.tensor([0, queries // 3, queries // 2, queries])
    made += [masks.packed(torch.tensor(edges), cu_seqlens_q=asking) for edges in ([0, 2, 6, 7], [0, 0, 6, 7])]
    if queries <= K:
        packed = [[7, 7, 8, 8, 8, 9, 9], [-1, 7, 7, 8, 8, 8, -1], [1, 2, 1, 2, 2, 3, 1]]
        made += [masks.documents(ids) for ids in packed]
        made += [masks.packed(torch.tensor([0, 2, 2, 3, 7]))]
    return made


@pytest.mark.parametrize("queries", [1, Q, K, 11])
def test_rows_and_keys_alive_of_every_pair_of_masks(queries: int) -> None:
    at = AttentionShape(2, queries, K, torch.device("cpu"))
    every = torch.tensor(True)  # None: all of them

    def check(mask: masks.Mask) -> None:
        allowed = mask.to_dense_rows(at, slice(0, queries)).expand(B, H, queries, K)
        for alive, seen in (
            (mask.find_nonempty_rows(at), allowed.any(-1)),
            (mask.find_visible_keys(at), allowed.any(-2)),
        ):
            assert torch.equal((every if alive is None else alive).expand_as(seen), seen), mask

    kinds = of_every_kind(queries)
    for one in kinds:
        check(one)
        check(~one)
        for other in kinds:
            check(one & other)
            check(one | other)


def test_nothing_is_looked_at_where_it_is_known() -> None:
    """The masks of training: no kernel runs only to find that there is no empty row."""
    square = AttentionShape(2, K, K, torch.device("cpu"))
    for mask in (
        masks.causal(),
        masks.causal() & masks.window(3, 0),
        masks.causal() & masks.documents([0] * K),
    ):
        assert mask.find_nonempty_rows(square) is None
        assert mask.find_visible_keys(square) is None
    assert (masks.causal() & masks.padding([3, 7])).find_nonempty_rows(square) is None
    assert masks.padding([7, 7]).find_visible_keys(square) is None


# ----------------------------------------------------------------------- a mask never changes


def test_a_mask_does_not_follow_the_numbers_it_was_made_of() -> None:
    lengths, offset = torch.tensor([2, 3]), torch.tensor([0, 1])
    ids, kept = torch.tensor([0, 0, 1]), torch.tensor([[True, False, True], [True, True, True]])
    made = [
        masks.padding(lengths),
        masks.causal(offset),
        masks.window(1, 0, offset),
        masks.documents(ids),
        masks.from_zero_one(kept),
        masks.from_zero_one(kept[1:]),
    ]
    before = [mask.to_dense(2, 3) for mask in made]
    for numbers in (lengths, offset, ids, kept):
        numbers.zero_()
    at = [AttentionShape(mask.num_leading_dims, 2, 3, torch.device("cpu")) for mask in made]
    after = [mask.to_dense_rows(a, slice(0, 2)).expand_as(b) for mask, a, b in zip(made, at, before, strict=True)]
    assert [x.tolist() for x in after] == [x.tolist() for x in before]


def test_a_mask_first_used_in_inference_can_be_trained_with() -> None:
    mask = masks.causal() & masks.padding([4, 6])
    query, key, value = (x.requires_grad_() for x in inputs())
    with torch.inference_mode():
        attend(query, key, value, mask=mask)
    attend(query, key, value, mask=mask).sum().backward()
    assert key.grad.any()


def test_a_mask_serves_many_sizes() -> None:
    mask = masks.causal() & masks.window(2, 0)
    for size in range(1, 2 * MASK_CACHE_SIZE):  # more than it keeps
        out = attend(torch.ones(size, D), torch.ones(size, D), torch.eye(size), mask=mask)
        assert torch.equal((out > 0).sum(-1), torch.arange(1, size + 1).clamp(max=3))


@pytest.mark.parametrize("name", PICTURES)
def test_a_mask_says_what_it_is_in_one_line(name: str) -> None:
    text = repr(PICTURES[name][0])
    assert "object at" not in text
    assert "\n" not in text


# ---------------------------------------------------------------------------------- errors


def used(mask: masks.Mask, keys: int = K) -> Callable[[], Tensor]:
    q, k = torch.zeros(B, H, Q, D), torch.zeros(B, H, keys, D)
    return lambda: attend(q, k, k, mask=mask)


BAD: dict[str, tuple[Callable[[], object], list[str]]] = {
    "float tensor": (
        lambda: masks.tensor(torch.zeros(Q, K)),
        ["float32", "True = may attend", "from_additive"],
    ),
    "0/1 tensor": (lambda: masks.tensor(torch.ones(B, K).long()), ["int64", "from_zero_one"]),
    "list as tensor": (lambda: masks.tensor([[True]]), ["list", "boolean tensor"]),
    "float drop": (
        lambda: masks.from_blocked(torch.zeros(Q, K)),
        ["float32", "boolean", "True means", "from_additive"],
    ),
    "bool additive": (
        lambda: masks.from_additive(torch.ones(Q, K).bool()),
        ["bool", "0 and -inf", "masks.tensor"],
    ),
    "additive bias": (lambda: masks.from_additive(torch.randn(Q, K)), ["other than 0 and -inf", "bias="]),
    "not 0/1": (lambda: masks.from_zero_one(torch.tensor([[0, 2]])), ["2", "0 and 1", "masks.documents"]),
    "list as 0/1": (lambda: masks.from_zero_one([[0, 1]]), ["list", "tensor of 0 and 1", "(batch, keys)"]),
    "negative length": (lambda: masks.padding([3, -2]), ["padding(lengths)", "-2", "0 or more"]),
    "float length": (
        lambda: masks.padding(torch.tensor([3.0, 2.0])),
        ["padding(lengths)", "integers", "float32"],
    ),
    "bool lengths": (lambda: masks.padding(torch.ones(B, K).bool()), ["integers", "bool", "from_zero_one"]),
    "words": (lambda: masks.padding(["a"]), ["padding(lengths)", "expected integers", "list"]),
    "float offset": (lambda: masks.causal(1.5), ["causal(offset)", "integers", "float"]),
    "window size": (lambda: masks.window(-1, 0), ["window(left=-1)", "integer", "None"]),
    "window float": (lambda: masks.window(0, 1.5), ["window(right=1.5)", "integer", "None"]),
    "one query": (
        lambda: masks.documents([3], query_ids=2),
        ["documents(ids, query_ids)", "one id for every query", "(N,)"],
    ),
    "queries of another batch": (
        lambda: masks.documents([[3]], query_ids=[2]),
        ["documents(ids, query_ids)", "(1, 1)", "(1,)", "must be equal"],
    ),
    "few queries": (used(masks.documents([0] * 7, query_ids=[0] * 4)), ["4 queries", "there are 5"]),
    "one document": (lambda: masks.documents(3), ["documents(ids)", "one id for every key", "(N,)"]),
    "& tensor": (lambda: masks.causal() & torch.ones(Q, K).bool(), ["Tensor", "masks.tensor(t)"]),
    "tensor &": (lambda: torch.ones(Q, K).bool() & masks.causal(), ["Tensor", "masks.tensor(t)"]),
    "| None": (lambda: masks.causal() | None, ["NoneType", "masks.tensor(t)"]),
    "too long": (used(masks.padding([3, 8])), ["length of 8", "7 keys", "real keys"]),
    "lengths for 3": (
        used(masks.padding([3, 4, 5])),
        ["lengths", "(3,)", "(2, 3)", "from the left", "(batch,)"],
    ),
    "lengths (B, Q)": (used(masks.padding([[1] * Q] * B)), ["lengths", "(2, 5)", "(2, 3)", "(batch,)"]),
    "offsets for 3": (used(masks.causal([0, 1, 2])), ["offset", "(3,)", "(2, 3)", "(batch,)"]),
    "falling edges": (
        lambda: masks.packed(torch.tensor([0, 5, 3])),
        ["packed(cu_seqlens)", "never decrease", "5, 3"],
    ),
    "numbers for edges": (lambda: masks.packed(torch.ones(3)), ["packed(cu_seqlens)", "(sequences + 1,)"]),
    "too short": (lambda: masks.packed(torch.tensor([0, 5]), max_seqlen=4), ["5 tokens", "max_seqlen=4"]),
    "more that ask": (
        lambda: masks.packed(torch.tensor([0, 5]), cu_seqlens_q=torch.tensor([0, 2, 4])),
        ["1 sequences of keys", "2 of queries"],
    ),
    "few packed": (used(masks.packed(torch.tensor([0, 6]))), ["end at 6", "7 keys"]),
    "few ids": (used(masks.documents([0] * 6)), ["6 ids", "5 queries", "7 keys", "one id for every key"]),
    "more queries": (used(masks.documents([0] * 3), keys=3), ["3 ids", "5 queries", "3 keys"]),
    "ids for 3": (used(masks.documents([[0] * K] * 3)), ["documents(ids)", "(3,)", "(2, 3)"]),
    "short 0/1": (used(masks.from_zero_one(torch.ones(B, 5))), ["0/1 mask", "(2, 5)", "7 keys"]),
    "long 0/1": (
        used(masks.from_zero_one(torch.tensor([[1, 1] + [0] * 6] * B))),
        ["0/1 mask", "(2, 8)", "7 keys"],
    ),
    "0/1 for 3": (
        used(masks.from_zero_one(torch.ones(3, K))),
        ["0/1 mask", "(3, 7)", "(2, 3)", "(batch, keys)"],
    ),
    "4-d 0/1": (
        used(masks.from_zero_one(torch.ones(B, 1, 1, K))),
        ["0/1 mask", "(2, 1, 1, 7)", "(batch, keys)"],
    ),
    "turned tensor": (
        used(masks.tensor(torch.ones(K, Q).bool())),
        ["(7, 5)", "(2, 3, 5, 7)", "from_zero_one"],
    ),
    "batch tensor": (
        used(masks.tensor(torch.ones(B, K).bool())),
        ["(2, 7)", "(2, 3, 5, 7)", "from_zero_one"],
    ),
    "bad part": (used(masks.causal() & ~masks.padding([3, 8])), ["length of 8", "7 keys"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_what_came_what_was_expected_and_the_fix(name: str) -> None:
    call, parts = BAD[name]
    with pytest.raises(jumok.InputError) as error:
        call()
    missing = [part for part in parts if part not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


def test_and_between_masks_is_refused_since_it_would_drop_one() -> None:
    with pytest.raises(jumok.InputError, match="combine with &"):
        masks.causal() and masks.padding([2])


def test_dense_takes_the_rank_of_the_attention() -> None:
    per_head = torch.rand(3, 5, 7) > 0.5
    mask = masks.tensor(per_head) & masks.padding([4, 7])
    expected = per_head & (torch.arange(7) < torch.tensor([4, 7])[:, None, None, None])
    assert torch.equal(mask.to_dense(5, 7, num_leading_dims=2), expected)


LONG = masks.padding([5, 9])
DENSE: dict[str, tuple[masks.Mask, tuple[Any, Any], str]] = {
    "a length of more than the keys": (LONG, (3, 5), "length of 9, but there are only 5 keys"),
    "the same in a part": (masks.causal() & ~LONG, (3, 5), "length of 9, but there are only 5 keys"),
    "as many ids as keys": (masks.documents([7, 7, 8]), (3, 5), "has 3 ids"),
    "packed keys": (masks.packed([0, 2, 5]), (3, 4), "end at 5, and there are 4 keys"),
    "a tensor": (masks.tensor(torch.ones(3, 4, dtype=torch.bool)), (3, 5), r"has shape \(3, 4\)"),
    "other rows": (masks.padding([1, 2]) & masks.padding([1, 2, 3]), (3, 5), r"do not fit: \(2,\), \(3,\)"),
    "less than nothing": (
        masks.causal(),
        (-3, 5),
        r"to_dense\(num_queries=-3\): expected an integer, 0 or more",
    ),
    "half a key": (masks.causal(), (3, 5.5), r"to_dense\(num_keys=5\.5\)"),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_refuses_what_attend_refuses(name: str) -> None:
    mask, sizes, told = DENSE[name]
    with pytest.raises(jumok.InputError, match=told):
        mask.to_dense(*sizes)


@pytest.mark.parametrize("queries", [None, [0, 1, 3]])
def test_packed_takes_lists(queries: list[int] | None) -> None:
    given = None if queries is None else torch.tensor(queries)
    expected = masks.packed(torch.tensor([0, 2, 5]), cu_seqlens_q=given)
    asking = 5 if queries is None else 3
    found = masks.packed([0, 2, 5], cu_seqlens_q=queries)
    assert torch.equal(found.to_dense(asking, 5), expected.to_dense(asking, 5))


@pytest.mark.parametrize("edges", [[], [0, 2.5], "05", [[0, 2]], torch.tensor([False, True]), None])
def test_edges_that_are_none_are_refused(edges: Any) -> None:
    with pytest.raises(jumok.InputError, match=r"packed\(cu_seqlens\): expected integers"):
        masks.packed(edges)
