"""Block masks and rules for FlexAttention, beside its own ``create_block_mask`` and its uncompiled self."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from jumok import attend, masks
from jumok.attention.mask_types import AttentionShape
from jumok.attention.packed_masks import DocumentMask
from jumok.attention.paths import flex

pytestmark = pytest.mark.long


CPU = torch.device("cpu")
B, H, Q, K, D = 2, 3, 293, 401, 5  # three blocks of queries and four of keys; the last of each sticks out
AT = AttentionShape(2, Q, K, CPU)


def ids() -> Tensor:
    """Documents of many lengths, some longer than a block, and padding behind the last."""
    lengths = torch.tensor([3, 140, 1, 200, 31, 26])
    return torch.arange(6).repeat_interleave(lengths).masked_fill(torch.arange(K) >= 375, -1)


BANDS: dict[str, masks.Mask] = {
    "padding": masks.padding([300, 17]),
    "padding to the edge of a block": masks.padding([256, K]),
    "nothing": masks.padding([0, 128]),
    "padding of heads": masks.padding([[1, 128, 129], [256, 400, 401]]),
    "left padding": masks.from_zero_one((torch.arange(K) >= torch.tensor([[150], [10]])).long()),
    "causal": masks.causal(),
    "causal, ragged": masks.causal([0, 108]),
    "window": masks.window(37, 11),
    "wide window": masks.window(260, 0),
    "window past the end": masks.window(None, 300),
    "causal past the end": masks.causal(offset=[350, 0]),
    "window beside the keys": masks.window(20, 0, offset=[-280, 390]),
    "documents": masks.documents(ids()),
    "other documents": masks.documents(ids(), query_ids=ids()[..., :Q].flip(-1)),
    "packed": masks.packed(torch.tensor([0, 3, 143, 143, 344, K])),
    "packed, asked by others": masks.packed(
        torch.tensor([0, 3, 143, 344, K]), cu_seqlens_q=torch.tensor([0, 9, 200, 201, Q])
    ),
    "causal documents": masks.causal() & masks.documents(ids()),
    "causal, padding": masks.causal() & masks.padding([300, 17]),
    "window, padding": masks.window(90, 90) & masks.padding([300, 200]),
}
STRUCTURED = BANDS | {
    "prefix": masks.causal() | masks.padding([130, 40]),
    "not causal": ~masks.causal(),
    "not padding": ~masks.padding([300, 128]),
    "two windows": masks.window(10, 10) | masks.window(0, 0, offset=-200),
    "causal, not near": masks.causal() & ~masks.window(150, 0) & masks.padding([400, 300]),
    "not both": ~(masks.causal() & masks.documents(ids())) | masks.padding(3),
}


def whole(mask: masks.Mask, at: AttentionShape = AT) -> Tensor:
    """The mask as ``(B, H, Q, K)``."""
    return mask.to_dense_rows(at, slice(0, at.num_queries)).expand(B, H, at.num_queries, at.num_keys)


def tiled(mask: masks.Mask, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which blocks have some allowed pair and which are full and whole, in truth; and what ``tiles`` says."""
    padded = torch.nn.functional.pad(whole(mask), (0, -K % size, 0, -Q % size))
    cut = padded.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).transpose(-2, -3)  # (…, Qb, Kb, size, size)
    said = flex.compute_block_coverage(mask, AT, size)
    shape = cut.shape[:-2]
    return (
        cut.any(-1).any(-1),
        cut.all(-1).all(-1),
        said.any_allowed.expand(shape),
        said.all_allowed.expand(shape),
    )


@pytest.mark.parametrize("size", [128, 16])
@pytest.mark.parametrize("name", BANDS)
def test_the_blocks_of_a_band_are_exact(name: str, size: int) -> None:
    some, full, said_some, said_full = tiled(BANDS[name], size)
    assert torch.equal(said_some, some)
    assert torch.equal(said_full, full)


@pytest.mark.parametrize("name", STRUCTURED)
def test_the_rule_says_what_the_mask_says(name: str) -> None:
    rule = flex.build_mask_mod(STRUCTURED[name], AT)
    places = torch.meshgrid(*(torch.arange(n) for n in (B, H, Q, K)), indexing="ij")
    assert torch.equal(rule(*places), whole(STRUCTURED[name]))


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """The blocks of a list, ``(B, H, Qb, Kb)``, as a boolean map."""
    taken = torch.arange(indices.shape[-1]) < counts[..., None]
    empty = torch.zeros(indices.shape, dtype=torch.int)
    return empty.scatter_add(-1, indices.long(), taken.int()).expand(B, H, -1, -1).bool()


@pytest.mark.parametrize("name", BANDS)
def test_the_block_mask_is_create_block_masks(name: str) -> None:
    mask = BANDS[name]
    theirs = create_block_mask(flex.build_mask_mod(mask, AT), B, H, Q, K, device="cpu")
    ours = flex.build_block_mask(mask, AT)

    assert ours.shape[-2:] == theirs.shape[-2:]
    their_full = listed(theirs.full_kv_num_blocks, theirs.full_kv_indices)
    our_full = listed(ours.full_kv_num_blocks, ours.full_kv_indices)
    their_some = their_full | listed(theirs.kv_num_blocks, theirs.kv_indices)
    our_some = our_full | listed(ours.kv_num_blocks, ours.kv_indices)
    assert torch.equal(our_some, their_some)
    assert torch.equal(our_full, their_full & flex._find_complete_blocks(AT, flex.BLOCK_SIZE))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", STRUCTURED)
def test_flex_attention_with_our_block_mask_gives_what_attend_gives(name: str) -> None:
    mask = STRUCTURED[name]
    query, key, value = (torch.randn(B, H, n, D, dtype=torch.float64) for n in (Q, K, K))
    theirs = flex_attention(query, key, value, block_mask=flex.build_block_mask(mask, AT))
    torch.testing.assert_close(attend(query, key, value, mask=mask), theirs)


@pytest.mark.parametrize(
    ("lengths", "leading", "shape"),
    [(3, 0, (1, 1, 5, 7)), ([3, 5, 7], 1, (1, 3, 5, 7)), ([3, 5], 2, (2, 1, 5, 7))],
)
def test_a_single_leading_dimension_stands_for_heads(
    lengths: int | list[int], leading: int, shape: tuple[int, ...]
) -> None:
    mask = masks.causal() & masks.padding(lengths)
    assert flex.build_block_mask(mask, AttentionShape(leading, 5, 7, CPU)).shape == shape


NOT_STRUCTURED: dict[str, Callable[[], masks.Mask]] = {
    "tensor": lambda: masks.tensor(torch.ones(Q, K, dtype=torch.bool)),
    "in pieces": lambda: masks.from_zero_one(torch.tensor([[1, 0, 1]])),
    "documents in pieces": lambda: masks.documents([0, 1, 0]),
    "part of it": lambda: masks.causal() & ~masks.tensor(torch.ones(Q, K, dtype=torch.bool)),
}


def test_what_is_made_of_bands_is_structured() -> None:
    assert all(flex.is_structured(mask) for mask in STRUCTURED.values())
    assert not any(flex.is_structured(make()) for make in NOT_STRUCTURED.values())


def test_document_edges_are_cumulative_lengths() -> None:
    ids = torch.tensor([5, 5, 5, 2, 9, 9])
    alone = cast(DocumentMask, masks.documents(ids)).to_packed(CPU)
    assert alone.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert alone.cu_seqlens.dtype == torch.int32
    assert alone.max_seqlen == 3
    assert alone.cu_seqlens_q is None
    mask = cast(DocumentMask, masks.documents(ids, query_ids=torch.tensor([5, 2, 2, 9])))
    asked = mask.to_packed(CPU)
    assert asked.cu_seqlens_q is not None
    assert asked.cu_seqlens_q.tolist() == [0, 1, 3, 4]
    assert asked.max_seqlen_q == 2
