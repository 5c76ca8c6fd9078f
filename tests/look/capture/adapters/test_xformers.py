"""Attention of xformers, replaced by a function with the same signature and biases that compute the same."""

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_models import FunctionAttention, run_watched
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.adapters import xformers as adapter
from jumok.look.capture.watch import watch

computed_weights: list[Tensor] = []  # (B, H, Q, K), of packed tokens if they are packed
PAGE_SIZE = 2


# ------------------------------------------------------------------------------- types of ``attn_bias``


class AttentionBias:
    """Base class. ``allow`` says whether a query of one sequence may attend to a key of it."""

    def allow(self, i: int, j: int, num_queries: int, num_keys: int) -> bool:
        name, shift = type(self).__name__, num_keys - num_queries
        is_at_end = "FromBottomRight" in name or "WithOffset" in name or "PaddedKeys" in name
        position = i + (shift if is_at_end else 0)
        if hasattr(self, "window_left"):
            return bool(position - self.window_left <= j <= position + self.window_right)
        if "Causal" not in name and "LowerTriangular" not in name:
            return True
        return j <= position and j > position - getattr(self, "_window_size", 99)

    def materialize(self, shape: tuple[int, ...]) -> Tensor:
        allowed = torch.tensor([[self.allow(i, j, *shape) for j in range(shape[1])] for i in range(shape[0])])
        return torch.zeros(shape).masked_fill(~allowed, -torch.inf)


class LowerTriangularMask(AttentionBias):
    pass


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias: Tensor) -> None:
        self._subtensor = bias

    def materialize(self, shape: tuple[int, ...]) -> Tensor:
        return super().materialize(shape) + self._subtensor


class LowerTriangularFromBottomRightMask(AttentionBias):
    pass


@dataclasses.dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    _window_size: int


@dataclasses.dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    window_left: int
    window_right: int


@dataclasses.dataclass
class SeqLenInfo:
    seqstart_py: list[int]

    def intervals(self) -> Iterator[tuple[int, int]]:
        yield from zip(self.seqstart_py, self.seqstart_py[1:], strict=False)


@dataclasses.dataclass
class OldSeqLenInfo:
    cu_seqlen_py: list[int]

    def intervals(self) -> Iterator[tuple[int, int]]:
        yield from zip(self.cu_seqlen_py, self.cu_seqlen_py[1:], strict=False)


@dataclasses.dataclass
class PaddedSeqLenInfo(SeqLenInfo):
    seqlen_py: list[int]

    def intervals(self) -> Iterator[tuple[int, int]]:
        yield from ((start, start + n) for start, n in zip(self.seqstart_py, self.seqlen_py, strict=False))


@dataclasses.dataclass
class BlockBias(AttentionBias):
    q_seqinfo: Any
    k_seqinfo: Any

    def materialize(self, shape: tuple[int, ...]) -> Tensor:
        mask = torch.full(shape, -torch.inf)
        for (q0, q1), (k0, k1) in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True):
            mask[q0:q1, k0:k1] = super().materialize((q1 - q0, k1 - k0))
        return mask


def build_block_bias(name: str, q_info: Any, k_info: Any, **attributes: Any) -> Any:
    bias = type(name, (BlockBias,), {})(q_info, k_info)
    vars(bias).update(attributes)
    return bias


# ---------------------------------------------------------------------------------------- the function


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> Tensor:
    """``(B, L, D)``, ``(B, L, H, D)`` or ``(B, L, G, H, D)``."""
    shape = query.shape
    if query.dim() == 5:
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
    if query.dim() == 3:
        query, key, value = (x[:, :, None] for x in (query, key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if isinstance(attn_bias, Tensor):
        bias = attn_bias.flatten(1, 2) if attn_bias.dim() == 5 else attn_bias
        scores = scores + (bias[:, None] if bias.dim() == 3 else bias)
    elif attn_bias is not None:
        scores = scores + attn_bias.materialize((scores.shape[2], scores.shape[3]))
    computed_weights[:] = [scores.softmax(-1)]
    return torch.einsum("bhqk,bkhd->bqhd", computed_weights[0], value).reshape(*shape[:-1], value.shape[-1])


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None
) -> Tensor:
    """The same with keys in pages: written out for each sequence."""
    out, weights = torch.zeros_like(query), []
    starts, ends = attn_bias.q_seqinfo.seqstart_py, attn_bias.q_seqinfo.seqstart_py[1:]
    for n, (start, end) in enumerate(zip(starts, ends, strict=False)):
        slots = [
            int(attn_bias.block_tables[n, j // PAGE_SIZE]) * PAGE_SIZE + j % PAGE_SIZE
            for j in range(attn_bias.k_seqinfo.seqlen_py[n])
        ]
        first = attn_bias.k_seqinfo.seqstart_py[n] if "Gappy" in type(attn_bias).__name__ else 0
        scores = torch.einsum("qhd,khd->hqk", query[0, start:end], key[0, slots]) * query.shape[-1] ** -0.5
        for i in range(end - start):
            for j in range(len(slots)):
                is_late = "Causal" in type(attn_bias).__name__ and j > i + len(slots) - (end - start)
                if j < first or is_late:
                    scores[:, i, j] = -torch.inf
        weights.append(scores.softmax(-1))
        out[0, start:end] = torch.einsum("hqk,khd->qhd", weights[-1], value[0, slots])
    computed_weights[:] = weights
    return out


def memory_efficient_attention_partial(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None
) -> Any:
    return memory_efficient_attention(query, key, value), None


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("xformers.ops")
    vars(package)["memory_efficient_attention"] = memory_efficient_attention
    vars(package)["memory_efficient_attention_forward"] = paged_attention
    vars(package)["memory_efficient_attention_partial"] = memory_efficient_attention_partial
    monkeypatch.setitem(sys.modules, "xformers.ops", package)


@pytest.mark.parametrize(
    "bias",
    [
        None,
        LowerTriangularMask(),
        LowerTriangularMaskWithTensorBias(torch.randn(2, 3, 5, 7)),
        LowerTriangularFromBottomRightMask(),
        LowerTriangularFromBottomRightLocalAttentionMask(3),
        LocalAttentionFromBottomRightMask(2, 1),
        torch.randn(2, 3, 5, 7),
        torch.randn(1, 1, 5, 7).expand(2, 3, 5, 7),
    ],
    ids=lambda bias: type(bias).__name__,
)
def test_rows_of_equal_length(bias: Any) -> None:
    qkv = torch.randn(2, 5, 3, 4), torch.randn(2, 7, 3, 4), torch.randn(2, 7, 3, 6)
    _, captures = run_watched(FunctionAttention(memory_efficient_attention, attn_bias=bias, scale=0.6), *qkv)
    torch.testing.assert_close(captures[0].weights(), computed_weights[0])


def test_other_numbers_of_axes() -> None:
    model = FunctionAttention(memory_efficient_attention, attn_bias=torch.randn(2, 5, 7))
    _, captures = run_watched(model, torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.randn(2, 7, 4))
    torch.testing.assert_close(captures[0].weights(), computed_weights[0])
    key, value = (torch.randn(2, 7, 2, 1, 4).expand(-1, -1, -1, 3, -1) for _ in range(2))  # groups share keys
    model = FunctionAttention(memory_efficient_attention, attn_bias=torch.randn(2, 2, 3, 5, 7))
    _, captures = run_watched(model, torch.randn(2, 5, 2, 3, 4), key, value)
    torch.testing.assert_close(captures[0].weights(), computed_weights[0])


Q_INFO, K_INFO = SeqLenInfo([0, 5, 7, 10]), SeqLenInfo([0, 7, 11, 14])
PADDED, GAPPY = PaddedSeqLenInfo([0, 8, 16, 24], [7, 4, 3]), PaddedSeqLenInfo([0, 9, 15, 20], [7, 4, 3])
PACKED_BIASES = [
    build_block_bias("BlockDiagonalMask", Q_INFO, K_INFO),
    build_block_bias("BlockDiagonalCausalMask", OldSeqLenInfo([0, 5, 7, 10]), OldSeqLenInfo([0, 7, 11, 14])),
    build_block_bias("BlockDiagonalCausalFromBottomRightMask", Q_INFO, K_INFO),
    build_block_bias("BlockDiagonalCausalLocalAttentionMask", Q_INFO, K_INFO, _window_size=2),
    build_block_bias("BlockDiagonalCausalLocalAttentionFromBottomRightMask", Q_INFO, K_INFO, _window_size=2),
    build_block_bias("BlockDiagonalPaddedKeysMask", Q_INFO, PADDED),
    build_block_bias("BlockDiagonalCausalWithOffsetPaddedKeysMask", Q_INFO, PADDED),
    build_block_bias("BlockDiagonalLocalAttentionPaddedKeysMask", Q_INFO, PADDED, window_left=2, window_right=1),
    build_block_bias("BlockDiagonalCausalLocalAttentionPaddedKeysMask", Q_INFO, PADDED, _window_size=2),
    build_block_bias("BlockDiagonalGappyKeysMask", Q_INFO, GAPPY),
    build_block_bias("BlockDiagonalCausalWithOffsetGappyKeysMask", Q_INFO, GAPPY),
]


@pytest.mark.parametrize("bias", PACKED_BIASES, ids=lambda bias: type(bias).__name__)
def test_packed_sequences(bias: Any) -> None:
    starts = getattr(bias.k_seqinfo, "seqstart_py", None) or bias.k_seqinfo.cu_seqlen_py
    qkv = torch.randn(1, 10, 3, 4), torch.randn(1, starts[-1], 3, 4), torch.randn(1, starts[-1], 3, 4)
    _, captures = run_watched(FunctionAttention(memory_efficient_attention, attn_bias=bias), *qkv)
    assert captures[0].shape == (3, 3, 5, 7)
    intervals = zip(bias.q_seqinfo.intervals(), bias.k_seqinfo.intervals(), strict=True)
    for n, ((q0, q1), (k0, k1)) in enumerate(intervals):
        weights = captures[0].weights(batch=n)
        torch.testing.assert_close(weights[:, : q1 - q0, : k1 - k0], computed_weights[0][0, :, q0:q1, k0:k1])
        assert not weights[:, q1 - q0 :].any()
        assert not weights[:, :, k1 - k0 :].any()


@pytest.mark.parametrize(
    "name",
    [
        "PagedBlockDiagonalPaddedKeysMask",
        "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
        "PagedBlockDiagonalGappyKeysMask",
        "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
    ],
)
def test_keys_in_pages(name: str) -> None:
    starts = [1, 0, 2, -1] if "Gappy" in name else [0, 6, 12, 18]
    tables = torch.tensor([[3, 0, 6], [1, 5, -1], [4, 2, -1]], dtype=torch.int32)
    info = PaddedSeqLenInfo(starts, [6, 3, 4])
    bias = build_block_bias(name, SeqLenInfo([0, 2, 3, 5]), info, block_tables=tables, page_size=PAGE_SIZE)
    qkv = torch.randn(1, 5, 3, 4), torch.randn(1, 14, 3, 4), torch.randn(1, 14, 3, 4)
    _, captures = run_watched(FunctionAttention(paged_attention, attn_bias=bias), *qkv)
    for n, expected in enumerate(computed_weights):
        captured = captures[0].weights(batch=n)
        torch.testing.assert_close(captured[:, : expected.shape[1], : expected.shape[2]], expected)


def test_every_type_of_bias_is_tested() -> None:
    tested = {type(bias).__name__ for bias in PACKED_BIASES} | {
        name for name in adapter.PACKED_RULES if "Paged" in name
    }
    assert tested == adapter.PACKED_RULES.keys()


@pytest.mark.parametrize(
    ("function", "bias", "reason"),
    [
        (memory_efficient_attention, type("AttnBiasOfTheFuture", (AttentionBias,), {})(), "with a AttnBiasOfTheFuture"),
        (memory_efficient_attention_partial, None, "attends to a part of the keys"),
    ],
)
def test_unsupported_calls_are_reported(function: Any, bias: Any, reason: str) -> None:
    class Block(FunctionAttention):  # a name that does not suggest attention
        pass

    model, qkv = Block(function, attn_bias=bias), [torch.randn(2, 5, 3, 4)] * 3
    with pytest.raises(InputError, match=rf"Block: xformers.ops.memory_efficient_attention\S* {reason}"), watch(model):
        model(*qkv)
