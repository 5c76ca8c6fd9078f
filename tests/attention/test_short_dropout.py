"""Dropout in the kernel for short packed sequences: which weights are dropped, and the results.

With equal scores and a one-hot value for each key, the output shows which weights were kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from short_checks import (
    HALF,
    kernel_everywhere,  # noqa: F401
    offsets,
    random,
    with_gradients,
)
from triton_testing import DEVICE, assert_as_accurate, record_cuda_graph, runs_kernels

from jumok import attend, explain, masks, mix, weights
from jumok.attention.kernels import short_sequences
from jumok.attention.kernels.short_sequences import (
    ShortKernelBlockSizes,
    ShortKernelDropout,
    ShortSequenceLayout,
    attend_short_sequences,
)

pytestmark = pytest.mark.long


VALUE_WIDTH = 128


def build_layout(query_lengths: Sequence[int], key_lengths: Sequence[int]) -> ShortSequenceLayout:
    return ShortSequenceLayout(
        offsets(*query_lengths), offsets(*key_lengths), max(query_lengths), max(key_lengths), causal=False
    )


def find_kept(query_lengths: Sequence[int], key_lengths: Sequence[int], heads: int, probability: float) -> Tensor:
    """Which weights the generator's next seed keeps, (queries, heads, 128), by index of the key."""
    key = torch.cat([torch.arange(n) for n in key_lengths])
    value = torch.nn.functional.one_hot(key, VALUE_WIDTH).to(DEVICE, HALF)[:, None].expand(-1, heads, -1)
    query = torch.zeros(sum(query_lengths), heads, VALUE_WIDTH, device=DEVICE, dtype=HALF)
    query, value = (x.transpose(0, 1)[None] for x in (query, value))  # (1, heads, length, 128)
    out = attend_short_sequences(
        query, torch.zeros_like(value), value, build_layout(query_lengths, key_lengths), 1.0, probability
    )
    out = out[0].transpose(0, 1)
    counts = torch.tensor(key_lengths).repeat_interleave(torch.tensor(query_lengths)).to(DEVICE)
    boosted = out.float() * counts[:, None, None]
    torch.testing.assert_close(boosted[out != 0].mean().item(), 1 / (1 - probability), rtol=5e-3, atol=0)
    return out != 0


def find_existing(query_lengths: Sequence[int], key_lengths: Sequence[int]) -> Tensor:
    """The keys that each query has, (queries, 1, 128)."""
    counts = torch.tensor(key_lengths).repeat_interleave(torch.tensor(query_lengths))
    return (torch.arange(VALUE_WIDTH) < counts[:, None])[:, None].to(DEVICE)


def dropout_factors(query_lengths: Sequence[int], key_lengths: Sequence[int], heads: int, probability: float) -> Tensor:
    """The factors of the weights (1, H, Q, K) for the generator's next seed."""
    kept = find_kept(query_lengths, key_lengths, heads, probability).transpose(0, 1).double() / (1 - probability)
    whole = torch.zeros(heads, sum(query_lengths), sum(key_lengths), dtype=torch.float64, device=DEVICE)
    row = column = 0
    for queries, keys in zip(query_lengths, key_lengths, strict=True):
        rows = slice(row, row + queries)
        whole[:, rows, column : column + keys] = kept[:, rows, :keys]
        row, column = row + queries, column + keys
    return whole[None]


# ------------------------------------------------------------------------------------ which weights are dropped


@runs_kernels
@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_kept_weights_are_random_and_independent(probability: float) -> None:
    torch.manual_seed(11)
    lengths, heads = (128, 128, 100, 64, 33, 7), 2
    kept = find_kept(lengths, lengths, heads, probability)
    exists = find_existing(lengths, lengths).expand(-1, heads, -1)
    assert not kept[~exists].any()
    for dims in ((0, 1, 2), (1, 2), (0, 1), (0, 2)):  # all; of each query, key and head
        count = exists.sum(dims)
        deviation = (kept.sum(dims) - count * (1 - probability)) / (count * probability * (1 - probability)).sqrt()
        assert deviation[count > 0].abs().max() < 5
    # No correlation with neighbours: of the same thread, other threads, rows and heads.
    centred = (kept.double() - (1 - probability)) * exists / math.sqrt(probability * (1 - probability))
    for dim, distance in ((2, 1), (2, 2), (2, 8), (2, 16), (2, 32), (0, 1), (0, 8), (0, 128), (1, 1)):
        pairs = (
            centred.narrow(dim, 0, centred.shape[dim] - distance),
            centred.narrow(dim, distance, centred.shape[dim] - distance),
        )
        product = pairs[0] * pairs[1]
        assert abs(product.sum() / product.count_nonzero().sqrt()) < 5, (dim, distance)


def philox(seed: int, counter: int, stream: int) -> tuple[int, int, int, int]:
    """Philox4x32 with seven rounds, from the paper (Salmon et al. 2011, Parallel random numbers)."""
    a, b, c, d = counter, stream, 0, 0
    low, high, mask = seed & 0xFFFFFFFF, seed >> 32, 0xFFFFFFFF
    for _ in range(7):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = y >> 32 ^ b ^ low, y & mask, x >> 32 ^ d ^ high, x & mask
        low, high = low + 0x9E3779B9 & mask, high + 0xBB67AE85 & mask
    return a, b, c, d


def test_philox_has_the_published_values() -> None:
    assert philox(0, 0, 0) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)


@runs_kernels
def test_dropout_uses_philox() -> None:
    query_lengths, key_lengths, heads = (3, 0, 40, 70), (5, 9, 33, 128), 2
    torch.manual_seed(5)
    kept = find_kept(query_lengths, key_lengths, heads, 0.25).cpu()
    torch.manual_seed(5)
    dropout = ShortKernelDropout.from_probability(0.25, torch.device(DEVICE))
    assert dropout is not None
    assert dropout.num_dropped == 1 << 14
    seed = int(dropout.seed)
    for sequence, query, head, key in (
        (0, 2, 1, 4), (2, 0, 0, 0), (2, 39, 1, 32), (3, 1, 0, 1), *((3, 69, 1, key) for key in range(128))
    ):  # fmt: skip
        words = philox(seed, query * 32 + key // 32 * 4 + key % 8 // 2, sequence * heads + head)
        bits = words[key // 8 % 4] >> 16 if key % 2 else words[key // 8 % 4] & 0xFFFF
        assert kept[sum(query_lengths[:sequence]) + query, head, key] == (bits >= 1 << 14)


@runs_kernels
def test_dropout_does_not_depend_on_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = 33, 1, 0, 66, 16
    results = []
    for blocks in (
        None,
        ShortKernelBlockSizes(16, 128, 4, 128),
        ShortKernelBlockSizes(64, 128, 4, 255, min_tile_side=128),
    ):
        if blocks is not None:
            monkeypatch.setattr(short_sequences, "choose_forward_blocks", lambda *_, blocks=blocks: blocks)
        torch.manual_seed(7)
        results.append(find_kept(lengths, lengths, 2, 0.3))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# ------------------------------------------------------------------------------------ results


@runs_kernels
@pytest.mark.parametrize(
    ("query_lengths", "key_lengths", "probability"),
    [
        ((1, 0, 5, 16, 3), (1, 0, 5, 16, 3), 0.1),
        ((5, 64, 31, 33), (5, 64, 31, 33), 0.5),
        ((3, 64, 0, 19, 4), (40, 7, 63, 2, 0), 0.1),
        ((65, 1, 128, 5), (9, 128, 100, 30), 0.5),
    ],
    ids=str,
)
def test_result_and_gradients(query_lengths: tuple[int, ...], key_lengths: tuple[int, ...], probability: float) -> None:
    heads = 2
    inputs = random(heads, 16, sum(query_lengths), sum(key_lengths), sum(key_lengths))
    mask = masks.packed(offsets(*key_lengths), max(key_lengths))
    if query_lengths == key_lengths:
        mask = mask & masks.causal()
    else:
        mask = masks.packed(
            offsets(*key_lengths),
            max(key_lengths),
            cu_seqlens_q=offsets(*query_lengths),
            max_seqlen_q=max(query_lengths),
        )
    assert explain(*inputs, mask=mask, dropout=probability).name == "packed-short"
    torch.manual_seed(3)
    ours = with_gradients(lambda *x: attend(*x, mask=mask, dropout=probability), inputs, HALF)
    torch.manual_seed(3)
    factors = dropout_factors(query_lengths, key_lengths, heads, probability)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mix((weights(q, k, mask=mask) * factors).to(q.dtype), v)

    plain = with_gradients(reference, inputs, HALF)
    exact = with_gradients(reference, inputs, torch.float64)
    assert_as_accurate(ours, exact, plain, dtype=HALF)
    without_keys = (find_existing(query_lengths, key_lengths).sum(-1) == 0).flatten()
    assert not ours[0][:, :, without_keys].any()


@runs_kernels
def test_the_mean_over_many_seeds_is_the_result_without_dropout() -> None:
    torch.manual_seed(1)
    num_seeds = 400 if DEVICE == "cuda" else 30
    inputs = random(2, 16, 19, 19, 19)
    mask = masks.packed(offsets(19), 19)
    results = torch.stack([attend(*inputs, mask=mask, dropout=0.3).double() for _ in range(num_seeds)])
    deviation = (results.mean(0) - attend(*inputs, mask=mask).double()) / (results.std(0) / math.sqrt(num_seeds) + 1e-3)
    assert deviation.abs().max() < 5
    assert deviation.square().mean() < 2


@runs_kernels
def test_dropout_follows_the_generator() -> None:
    inputs = random(2, 16, 40, 40, 40)
    mask = masks.packed(offsets(9, 31), 31)
    results = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        for _ in range(2):
            results.append(with_gradients(lambda *x: attend(*x, mask=mask, dropout=0.2), inputs, HALF))
    torch.testing.assert_close(results[0], results[4], rtol=0, atol=0)
    torch.testing.assert_close(results[1], results[5], rtol=0, atol=0)
    different = {out.double().sum().item() for out, *_ in results}
    assert len(different) == 4


@runs_kernels
def test_probability_near_zero_drops_nothing() -> None:
    inputs = random(2, 16, 40, 40, 40)
    mask = masks.packed(offsets(9, 31), 31)
    whole = attend(*inputs, mask=mask)
    state = torch.cuda.get_rng_state if DEVICE == "cuda" else torch.get_rng_state
    before = state()
    for probability in (0, 0.0, 1e-7):
        torch.testing.assert_close(attend(*inputs, mask=mask, dropout=probability), whole, rtol=0, atol=0)
    assert torch.equal(state(), before)


@runs_kernels
def test_probability_near_one_is_finite() -> None:
    inputs = random(2, 16, 100, 100, 100)
    mask = masks.packed(offsets(100), 100)
    for probability in (0.99, 0.9999999):
        results = with_gradients(
            lambda *x, probability=probability: attend(*x, mask=mask, dropout=probability), inputs, HALF
        )
        assert all(x.isfinite().all() for x in results)


@runs_kernels
def test_nan_stays_in_its_sequence() -> None:
    mask = masks.packed(offsets(11, 29), 29)
    inputs = random(2, 16, 40, 40, 40)
    inputs[1][:, :, 3] = torch.nan
    results = with_gradients(lambda *x: attend(*x, mask=mask, dropout=0.5), inputs, HALF)
    assert results[0][:, :, :11].isnan().all()
    for x in results:
        assert x[:, :, :11].isnan().any()
        assert x[:, :, 11:].isfinite().all()


@runs_kernels
def test_checkpointing_drops_the_same_weights() -> None:
    """A checkpoint restores the generator."""
    from torch.utils.checkpoint import checkpoint

    inputs = random(2, 16, 40, 40, 40)
    mask = masks.packed(offsets(9, 31), 31)

    def run(*x: Tensor) -> Tensor:
        return attend(*x, mask=mask, dropout=0.2).sin()

    results = []
    for call in (run, lambda *x: checkpoint(run, *x, use_reentrant=False)):
        torch.manual_seed(3)
        results.append(with_gradients(call, inputs, HALF))
    torch.testing.assert_close(*results, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_cuda_graph_replays_differ_and_follow_the_seed() -> None:
    leaves = [x.requires_grad_() for x in random(2, 16, 64, 64, 64)]
    mask = masks.packed(offsets(20, 30, 14), 64)

    def run() -> tuple[Tensor, ...]:
        out = attend(*leaves, mask=mask, dropout=0.2)
        # Detached, so that the recording does not keep autograd nodes of the leaves on its stream.
        return out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)

    graph, captured = record_cuda_graph(run)
    results = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            results.append([x.clone() for x in captured])
    torch.testing.assert_close(results[0], results[4], rtol=0, atol=0)
    torch.testing.assert_close(results[1], results[5], rtol=0, atol=0)
    assert len({out.double().sum().item() for out, *_ in results}) == 4
    torch.manual_seed(1)
    torch.testing.assert_close(results[0], list(run()), rtol=0, atol=0)


@pytest.mark.gpu
def test_a_transformer_trains_with_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from jumok.batches.tokens import Seq2SeqBatch
    from jumok.models.transformer import Transformer, TransformerConfig

    sizes = {
        "width": 128,
        "num_heads": 2,
        "feed_forward_width": 256,
        "encoder_layers": 2,
        "decoder_layers": 2,
    }
    model = Transformer(
        TransformerConfig(**sizes, dropout=0.0, attention_dropout=0.1, label_smoothing=0.0), 50, 50
    ).cuda()
    sides = ([torch.randint(4, 50, (int(n),)).tolist() for n in torch.randint(3, 120, (40,))] for _ in range(2))
    batch = Seq2SeqBatch.from_sequences(*sides, packed=True).to("cuda")
    launches, launch = [], short_sequences._launch
    monkeypatch.setattr(short_sequences, "_launch", lambda *x: (launches.append((x[0], x[4])), launch(*x)))
    losses = []
    for seed in (1, 2, 1):
        model.zero_grad()
        torch.manual_seed(seed)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(batch).total
        loss.backward()
        losses.append(loss.item())
    kernels = [kernel for kernel, _ in launches]
    assert kernels.count(short_sequences._forward_kernel) == 3 * 6  # 2 encoder and 2 decoder layers
    assert kernels.count(short_sequences._backward_kernel) == 3 * 6 * 2  # two launches: one for the longest
    assert all(dropout is not None for _, dropout in launches)
    assert losses[0] == losses[2] != losses[1]
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    monkeypatch.setattr(short_sequences, "_launch", launch)
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert math.isclose(model.loss(batch).total.item(), losses[0], rel_tol=0.05)
