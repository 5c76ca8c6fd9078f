"""Dropout in the kernel for short packed sequences: which weights go, by whose chance, and what follows.

Which ones stay can be read out: with equal scores and a value of its own for each key, weights come out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from short_checks import (
    DEVICE,
    HALF,
    INTERPRETED,
    as_near,
    edges,
    interpret,
    kernel_everywhere,  # noqa: F401
    needs_gpu,
    random,
    runs_kernels,
    with_gradients,
)

from jumok import attend, explain, masks, mix, weights
from jumok.attention.kernels import short_sequences
from jumok.attention.kernels.short_sequences import (
    ShortKernelBlockSizes,
    ShortKernelDropout,
    ShortSequenceLayout,
    attend_short_sequences,
)

WIDE = 128


def packing(asking: Sequence[int], asked: Sequence[int]) -> ShortSequenceLayout:
    return ShortSequenceLayout(edges(*asking), edges(*asked), max(asking), max(asked), causal=False)


def kept(asking: Sequence[int], asked: Sequence[int], heads: int, share: float) -> Tensor:
    """Which weights stay for the generator's next seed, (queries, heads, 128): by the key's number."""
    key = torch.cat([torch.arange(n) for n in asked])
    value = torch.nn.functional.one_hot(key, WIDE).to(DEVICE, HALF)[:, None].expand(-1, heads, -1)
    query = torch.zeros(sum(asking), heads, WIDE, device=DEVICE, dtype=HALF)
    out = attend_short_sequences(query, torch.zeros_like(value), value, packing(asking, asked), 1.0, share)
    counts = torch.tensor(asked).repeat_interleave(torch.tensor(asking)).to(DEVICE)
    boosted = out.float() * counts[:, None, None]
    torch.testing.assert_close(boosted[out != 0].mean().item(), 1 / (1 - share), rtol=5e-3, atol=0)
    return out != 0


def there(asking: Sequence[int], asked: Sequence[int]) -> Tensor:
    """The keys that a query has, (queries, 1, 128)."""
    counts = torch.tensor(asked).repeat_interleave(torch.tensor(asking))
    return (torch.arange(WIDE) < counts[:, None])[:, None].to(DEVICE)


def factors(asking: Sequence[int], asked: Sequence[int], heads: int, share: float) -> Tensor:
    """By what to multiply the weights (1, H, Q, K) for the generator's next seed."""
    stay = kept(asking, asked, heads, share).transpose(0, 1).double() / (1 - share)
    whole = torch.zeros(heads, sum(asking), sum(asked), dtype=torch.float64, device=DEVICE)
    row = column = 0
    for queries, keys in zip(asking, asked, strict=True):
        rows = slice(row, row + queries)
        whole[:, rows, column : column + keys] = stay[:, rows, :keys]
        row, column = row + queries, column + keys
    return whole[None]


# ------------------------------------------------------------------------------------ which weights go


@runs_kernels
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_as_many_stay_as_should_everywhere(share: float) -> None:
    torch.manual_seed(11)
    lengths, heads = (128, 128, 100, 64, 33, 7), 2
    stay, has = kept(lengths, lengths, heads, share), there(lengths, lengths).expand(-1, heads, -1)
    assert not stay[~has].any()
    for over in ((0, 1, 2), (1, 2), (0, 1), (0, 2)):  # all; of each query, key and head
        count = has.sum(over)
        apart = (stay.sum(over) - count * (1 - share)) / (count * share * (1 - share)).sqrt()
        assert apart[count > 0].abs().max() < 5
    # That one stays says nothing of its neighbours: of the same thread, other threads, rows and heads.
    centred = (stay.double() - (1 - share)) * has / math.sqrt(share * (1 - share))
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


def test_the_authors_numbers() -> None:
    assert philox(0, 0, 0) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)


@runs_kernels
def test_they_go_by_philox() -> None:
    asking, asked, heads = (3, 0, 40, 70), (5, 9, 33, 128), 2
    torch.manual_seed(5)
    stay = kept(asking, asked, heads, 0.25).cpu()
    torch.manual_seed(5)
    drawn = ShortKernelDropout.from_probability(0.25, torch.device(DEVICE))
    assert drawn is not None
    assert drawn.num_dropped == 1 << 14
    seed = int(drawn.seed)
    for sequence, query, head, key in (
        (0, 2, 1, 4), (2, 0, 0, 0), (2, 39, 1, 32), (3, 1, 0, 1), *((3, 69, 1, key) for key in range(128))
    ):  # fmt: skip
        words = philox(seed, query * 32 + key // 32 * 4 + key % 8 // 2, sequence * heads + head)
        bits = words[key // 8 % 4] >> 16 if key % 2 else words[key // 8 % 4] & 0xFFFF
        assert stay[sum(asking[:sequence]) + query, head, key] == (bits >= 1 << 14)


@runs_kernels
def test_the_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = 33, 1, 0, 100, 16
    found = []
    for blocks in (
        None,
        ShortKernelBlockSizes(16, 128, 4, 128),
        ShortKernelBlockSizes(64, 128, 4, 255, min_tile_side=128),
    ):
        if blocks is not None:
            monkeypatch.setattr(short_sequences, "choose_forward_blocks", lambda *_, blocks=blocks: blocks)
        torch.manual_seed(7)
        found.append(kept(lengths, lengths, 2, 0.3))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# ------------------------------------------------------------------------------------ what it computes


@runs_kernels
@pytest.mark.parametrize(
    ("asking", "asked"),
    [
        ((1, 0, 5, 16, 3), (1, 0, 5, 16, 3)),
        ((5, 64, 31, 33), (5, 64, 31, 33)),
        ((3, 64, 0, 19, 4), (40, 7, 63, 2, 0)),
        ((65, 1, 128, 5), (9, 128, 100, 30)),
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_result_and_gradients(asking: tuple[int, ...], asked: tuple[int, ...], share: float) -> None:
    heads = 2
    inputs = random(heads, 16, sum(asking), sum(asked), sum(asked))
    mask = masks.packed(edges(*asked), max(asked))
    if asking == asked:
        mask = mask & masks.causal()
    else:
        mask = masks.packed(edges(*asked), max(asked), cu_seqlens_q=edges(*asking), max_seqlen_q=max(asking))
    assert explain(*inputs, mask=mask, dropout=share).name == "packed-short"
    torch.manual_seed(3)
    ours = with_gradients(lambda *x: attend(*x, mask=mask, dropout=share), inputs, HALF)
    torch.manual_seed(3)
    times = factors(asking, asked, heads, share)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mix((weights(q, k, mask=mask) * times).to(q.dtype), v)

    plain = with_gradients(reference, inputs, HALF)
    as_near(ours, plain, with_gradients(reference, inputs, torch.float64), HALF)
    found_nothing = (there(asking, asked).sum(-1) == 0).flatten()
    assert not ours[0][:, :, found_nothing].any()


@runs_kernels
def test_the_mean_over_many_seeds_is_that_without_dropout() -> None:
    torch.manual_seed(1)
    times = 400 if DEVICE == "cuda" else 30
    inputs = random(2, 16, 19, 19, 19)
    mask = masks.packed(edges(19), 19)
    found = torch.stack([attend(*inputs, mask=mask, dropout=0.3).double() for _ in range(times)])
    apart = (found.mean(0) - attend(*inputs, mask=mask).double()) / (found.std(0) / math.sqrt(times) + 1e-3)
    assert apart.abs().max() < 5
    assert apart.square().mean() < 2


@runs_kernels
def test_the_generator_decides() -> None:
    inputs = random(2, 16, 40, 40, 40)
    mask = masks.packed(edges(9, 31), 31)
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        for _ in range(2):
            found.append(with_gradients(lambda *x: attend(*x, mask=mask, dropout=0.2), inputs, HALF))
    torch.testing.assert_close(found[0], found[4], rtol=0, atol=0)
    torch.testing.assert_close(found[1], found[5], rtol=0, atol=0)
    different = {out.double().sum().item() for out, *_ in found}
    assert len(different) == 4


@runs_kernels
def test_none_or_nearly_none_is_that_without() -> None:
    inputs = random(2, 16, 40, 40, 40)
    mask = masks.packed(edges(9, 31), 31)
    whole = attend(*inputs, mask=mask)
    state = torch.cuda.get_rng_state if DEVICE == "cuda" else torch.get_rng_state
    before = state()
    for share in (0, 0.0, 1e-7):
        torch.testing.assert_close(attend(*inputs, mask=mask, dropout=share), whole, rtol=0, atol=0)
    assert torch.equal(state(), before)


@runs_kernels
def test_nearly_all_is_finite() -> None:
    inputs = random(2, 16, 100, 100, 100)
    mask = masks.packed(edges(100), 100)
    for share in (0.99, 0.9999999):
        found = with_gradients(lambda *x, share=share: attend(*x, mask=mask, dropout=share), inputs, HALF)
        assert all(x.isfinite().all() for x in found)


@runs_kernels
def test_a_sequence_that_is_spoilt_stays_so() -> None:
    mask = masks.packed(edges(11, 29), 29)
    inputs = random(2, 16, 40, 40, 40)
    inputs[1][:, :, 3] = torch.nan
    found = with_gradients(lambda *x: attend(*x, mask=mask, dropout=0.5), inputs, HALF)
    assert found[0][:, :, :11].isnan().all()
    for x in found:
        assert x[:, :, :11].isnan().any()
        assert x[:, :, 11:].isfinite().all()


@runs_kernels
def test_what_is_computed_again_is_the_same() -> None:
    """By a checkpoint, which sets the generator back."""
    from torch.utils.checkpoint import checkpoint

    inputs = random(2, 16, 40, 40, 40)
    mask = masks.packed(edges(9, 31), 31)

    def run(*x: Tensor) -> Tensor:
        return attend(*x, mask=mask, dropout=0.2).sin()

    found = []
    for call in (run, lambda *x: checkpoint(run, *x, use_reentrant=False)):
        torch.manual_seed(3)
        found.append(with_gradients(call, inputs, HALF))
    torch.testing.assert_close(*found, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------ on a GPU only


@needs_gpu
def test_replays_of_a_captured_graph_differ_and_follow_the_seed() -> None:
    leaves = [x.requires_grad_() for x in random(2, 16, 64, 64, 64)]
    mask = masks.packed(edges(20, 30, 14), 64)

    def run() -> tuple[Tensor, ...]:
        out = attend(*leaves, mask=mask, dropout=0.2)
        # Detached: what a graph was recorded with must not keep the leaves' nodes on the stream of recording.
        return out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            found.append([x.clone() for x in captured])
    torch.testing.assert_close(found[0], found[4], rtol=0, atol=0)
    torch.testing.assert_close(found[1], found[5], rtol=0, atol=0)
    assert len({out.double().sum().item() for out, *_ in found}) == 4
    torch.manual_seed(1)
    torch.testing.assert_close(found[0], list(run()), rtol=0, atol=0)


@needs_gpu
def test_a_whole_model_trains_with_it_on_this_path(monkeypatch: pytest.MonkeyPatch) -> None:
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
    taken, launch = [], short_sequences._launch
    monkeypatch.setattr(short_sequences, "_launch", lambda *x: (taken.append((x[0], x[4])), launch(*x)))
    losses = []
    for seed in (1, 2, 1):
        model.zero_grad()
        torch.manual_seed(seed)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(batch).total
        loss.backward()
        losses.append(loss.item())
    kernels = [kernel for kernel, _ in taken]
    assert kernels.count(short_sequences._forward_kernel) == 3 * 6  # of 2 encoder and 2 decoder layers
    assert kernels.count(short_sequences._backward_kernel) == 3 * 6 * 2  # the longest have a launch of their own
    assert all(dropout is not None for _, dropout in taken)
    assert losses[0] == losses[2] != losses[1]
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    monkeypatch.setattr(short_sequences, "_launch", launch)
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert math.isclose(model.loss(batch).total.item(), losses[0], rel_tol=0.05)


# --- without a GPU ------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    interpret(__file__)
