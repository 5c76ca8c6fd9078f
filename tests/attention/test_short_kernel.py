"""The kernel for short packed sequences against float64: at most twice the error of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

import triton
from short_checks import (
    DTYPES,
    HALF,
    kernel_everywhere,  # noqa: F401
    offsets,
    random,
    with_gradients,
)
from triton_testing import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    assert_as_accurate,
    compile_for_hopper,
    compiles_kernels,
    count_stack_bytes,
    record_cuda_graph,
    runs_kernels,
)

from jumok import attend, explain, masks, mix, weights
from jumok.attention import dispatch
from jumok.attention.heads import MultiHead
from jumok.attention.kernels import short_sequences
from jumok.attention.kernels.common import launch_options
from jumok.attention.kernels.short_sequences import (
    ShortKernelBlockSizes,
    ShortSequenceLayout,
    attend_short_sequences,
)

pytestmark = pytest.mark.long


CAT = torch.cat


def reference(mask: masks.Mask) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: mix(weights(q, k, mask=mask), v)


def check(mask: masks.Mask, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Our result and gradients, which must be as accurate as those of plain PyTorch."""
    assert explain(*inputs, mask=mask).name == "packed-short"
    ours = with_gradients(lambda *x: attend(*x, mask=mask), inputs, dtype)
    plain = with_gradients(reference(mask), inputs, dtype)
    exact = with_gradients(reference(mask), inputs, torch.float64)
    assert_as_accurate(ours, exact, plain, dtype=dtype)
    return ours


# ------------------------------------------------------------------------------------ what it computes

WIDTHS = [8, 40, 128] if INTERPRETED else [24, 40, 72]  # each is one more to compile
LENGTHS: dict[str, tuple[int, ...]] = {
    "tiny": (1, 0, 5, 16, 3),
    "up to 32": (17, 0, 0, 32, 1),
    "up to 64": (5, 64, 31, 33),
    "up to 128": (65, 1, 0, 100, 128, 31),
    "one sequence": (7,),
    "empty": (0, 0),
}


@runs_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_self_attention(name: str, causal: bool) -> None:
    lengths, dtype = LENGTHS[name], DTYPES[causal]  # other combinations: test_real_sizes
    mask = masks.packed(offsets(*lengths), max(lengths))
    check(mask & masks.causal() if causal else mask, random(2, 16, *[sum(lengths)] * 3, dtype=dtype), dtype)


@runs_kernels
@pytest.mark.parametrize(
    ("query_lengths", "key_lengths"),
    [
        ((3, 16, 1, 0), (5, 2, 11, 0)),
        ((3, 64, 1, 19), (40, 7, 63, 2)),
        ((2, 30, 7), (101, 128, 3)),  # few queries, many keys
        ((113, 128, 5), (9, 1, 30)),
        ((0, 5, 7, 0), (3, 0, 64, 0)),  # keys without queries; queries without keys
    ],
    ids=str,
)
def test_cross_attention(query_lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> None:
    mask = masks.packed(
        offsets(*key_lengths), max(key_lengths), cu_seqlens_q=offsets(*query_lengths), max_seqlen_q=max(query_lengths)
    )
    inputs = random(3, 8, sum(query_lengths), sum(key_lengths), sum(key_lengths))
    check(mask, inputs, HALF)


@runs_kernels
@pytest.mark.parametrize("width", WIDTHS)
def test_widths_that_are_multiples_of_eight(width: int) -> None:
    lengths = 13, 40, 2
    mask = masks.packed(offsets(*lengths), 40)
    check(mask & masks.causal(), random(2, width, *[sum(lengths)] * 3), HALF)


@runs_kernels
def test_document_masks() -> None:
    ids = [4] * 7 + [2] * 19 + [3] * 2
    check(masks.documents(ids), random(2, 16, 28, 28, 28), HALF)
    query_lengths = [4] * 3 + [2] + [3] * 5
    check(masks.documents(ids, query_ids=query_lengths), random(2, 16, 9, 28, 28), HALF)


@runs_kernels
def test_many_random_lengths() -> None:
    torch.manual_seed(5)
    for longest in (16, 37, 64, 128) if ON_GPU else (16, 37):
        lengths = torch.randint(0, longest + 1, (300 if ON_GPU else 9,)).tolist()
        mask = masks.packed(offsets(*lengths), longest) & masks.causal()
        check(mask, random(2, 16, *[sum(lengths)] * 3), HALF)


# ----------------------------------------------------------------------------------- how it is called


@runs_kernels
@pytest.mark.parametrize(
    "blocks",
    [ShortKernelBlockSizes(16, 128, 4, 128), ShortKernelBlockSizes(64, 128, 4, 255, min_tile_side=128)],
)
def test_results_do_not_depend_on_block_sizes(blocks: ShortKernelBlockSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_sequences, "choose_forward_blocks", lambda *_: blocks)
    largest = max(blocks.queries, blocks.keys)
    monkeypatch.setattr(
        short_sequences,
        "choose_backward_blocks",
        lambda *_: [blocks._replace(queries=largest, num_warps=8, max_registers=255)],
    )
    lengths = 33, 1, 0, 100, 16
    mask = masks.packed(offsets(*lengths), 100)
    check(mask & masks.causal(), random(2, 16, *[sum(lengths)] * 3), HALF)


@pytest.mark.parametrize("key_lengths", [16, 33, 128])
@pytest.mark.parametrize("query_lengths", [1, 64, 65, 128])
def test_each_sequence_is_in_one_backward_launch(query_lengths: int, key_lengths: int) -> None:
    launches = short_sequences.choose_backward_blocks(query_lengths, key_lengths, 64)
    for longer in range(1, max(query_lengths, key_lengths) + 1):
        matches = [blocks for blocks in launches if blocks.longer_than < longer <= max(blocks.queries, blocks.keys)]
        assert len(matches) == 1
        assert matches[0].queries >= min(query_lengths, longer)
        assert matches[0].keys >= min(key_lengths, longer)
    assert len(launches) == (1 if max(query_lengths, key_lengths) <= 64 else 2)


def split_projection(length: int, heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """One projection, and its views as queries, keys and values."""
    whole = torch.randn(1, length, 3 * heads * width, device=DEVICE).to(dtype).requires_grad_()
    parts = whole.unflatten(2, (3, heads, width)).unbind(2)
    return whole, [part.transpose(1, 2) for part in parts]


@runs_kernels
def test_views_of_one_projection_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = 9, 31, 2
    whole, parts = split_projection(sum(lengths), 2, 16, HALF)
    mask = masks.packed(offsets(*lengths), 31)
    launch_tensors = []
    launch = short_sequences._launch
    monkeypatch.setattr(
        short_sequences, "_launch", lambda kernel, x, *rest: (launch_tensors.append(x), launch(kernel, x, *rest))
    )
    out = attend(*parts, mask=mask)
    (ours,) = torch.autograd.grad(out.sin().sum(), whole)
    for tensors in launch_tensors:
        pointers = [x.untyped_storage().data_ptr() for x in tensors[:3]]
        assert pointers == [whole.untyped_storage().data_ptr()] * 3
    gradients = launch_tensors[1][4:]
    assert len({x.untyped_storage().data_ptr() for x in gradients}) == 1
    dense = [x.detach().contiguous().requires_grad_() for x in parts]
    separate = torch.autograd.grad(attend(*dense, mask=mask).sin().sum(), dense)
    expected = torch.stack([x.transpose(1, 2) for x in separate], 2).flatten(2)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@runs_kernels
def test_multi_head_attention_copies_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the projections is where the kernel wrote it: nothing is concatenated."""
    monkeypatch.setattr(torch, "cat", None)
    lengths = 9, 31, 2
    mask = masks.packed(offsets(*lengths), 31)
    mha = MultiHead(width=32, num_heads=2).to(DEVICE, HALF)
    cross = MultiHead(width=32, num_heads=2, key_width=32).to(DEVICE, HALF)
    x = torch.randn(1, sum(lengths), 32, device=DEVICE).to(HALF)
    for module, run in ((mha, lambda: mha(x, mask=mask)), (cross, lambda: cross(x, x, mask=mask))):
        ours = torch.autograd.grad(run().sin().sum(), list(module.parameters()))
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "PATHS", ())
            patched.setattr(torch, "cat", CAT)
            plain = torch.autograd.grad(run().sin().sum(), list(module.parameters()))
        for gradient, expected in zip(ours, plain, strict=True):
            assert (gradient - expected).norm() <= 0.02 * expected.norm() + 1e-2


@runs_kernels
def test_strided_inputs() -> None:
    lengths = 9, 21
    mask = masks.packed(offsets(*lengths), 21)
    q = torch.randn(16, 1, 30, 2, device=DEVICE).to(HALF).permute(1, 3, 2, 0)  # the width has the largest stride
    k = torch.randn(1, 1, 30, 16, device=DEVICE).to(HALF).expand(1, 2, 30, 16)  # shared by the heads
    v = torch.randn(1, 30, 2, 19, device=DEVICE).to(HALF).transpose(1, 2)[..., 2:18]
    out = attend(q, k, v, mask=mask)
    torch.testing.assert_close(out, attend(*(x.contiguous() for x in (q, k, v)), mask=mask), rtol=0, atol=0)


@runs_kernels
def test_only_requested_gradients_and_no_second_derivatives() -> None:
    mask = masks.packed(offsets(5, 19), 19)
    inputs = random(2, 16, 24, 24, 24)
    leaves = [x.clone().requires_grad_() for x in inputs]
    whole = torch.autograd.grad(attend(*leaves, mask=mask).sin().sum(), leaves)
    for index in range(3):
        leaf = inputs[index].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            attend(*inputs[:index], leaf, *inputs[index + 1 :], mask=mask).sin().sum(), leaf
        )
        torch.testing.assert_close(gradient, whole[index], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(attend(*leaves, mask=mask).sum(), leaves, create_graph=True)


@runs_kernels
def test_positions_outside_all_sequences_are_zero_and_may_be_nan() -> None:
    lengths = offsets(5, 0, 30, 2)  # 37 of the 61 positions
    inputs = random(2, 16, 61, 61, 61)
    packing = ShortSequenceLayout(lengths, lengths, 30, 30, causal=True)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_short_sequences(q, k, v, packing, 0.3)

    clean = with_gradients(run, inputs, HALF)
    for x in inputs:
        x[:, :, 37:] = torch.nan
    dirty = with_gradients(run, inputs, HALF)
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
    assert not dirty[0][:, :, 37:].any()
    assert dirty[0][:, :, :37].any(-1).all()
    assert not any(x[:, :, 37:].any() for x in dirty[1:])


@runs_kernels
def test_nan_stays_in_its_sequence() -> None:
    lengths = 11, 29, 4
    mask = masks.packed(offsets(*lengths), 29)
    inputs = random(2, 16, 44, 44, 44)
    clean = with_gradients(lambda *x: attend(*x, mask=mask), inputs, HALF)
    for x in inputs[1:]:
        x[:, :, 20] = torch.nan
    dirty = with_gradients(lambda *x: attend(*x, mask=mask), inputs, HALF)
    assert dirty[0][:, :, 11:40].isnan().all()
    for x, expected in zip(dirty, clean, strict=True):
        for part in (slice(0, 11), slice(40, 44)):
            torch.testing.assert_close(x[:, :, part], expected[:, :, part], rtol=0, atol=0)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_both_integer_types(dtype: torch.dtype) -> None:
    inputs = random(2, 16, 22, 22, 22)
    out = attend(*inputs, mask=masks.packed(offsets(3, 19).to(dtype), 19))
    torch.testing.assert_close(out, attend(*inputs, mask=masks.packed(offsets(3, 19).to(dtype), 50)))


# ----------------------------------------------------------------------------------- unsupported calls


@runs_kernels
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mask": lambda: masks.packed(offsets(30, 129), 129)}, "at most 128 tokens, and these have up to 129"),
        ({"softcap": 5.0}, "no softcap and no bias"),
        ({"bias": torch.zeros(1, device=DEVICE)}, "no softcap and no bias"),
        (
            {"mask": lambda: masks.packed(offsets(59, 100), 100) & masks.window(3, 3)},
            "supports only a causal mask",
        ),
    ],
)
def test_reasons_for_unsupported_options(change: dict[str, Any], reason: str) -> None:
    change = {"mask": lambda: masks.packed(offsets(59, 100), 100)} | change
    explanation = explain(*random(2, 16, 159, 159, 159), **change | {"mask": change["mask"]()})
    assert explanation.name != "packed-short"
    assert reason in dict(explanation.rejected)["packed-short"]


@runs_kernels
def test_reasons_for_unsupported_inputs() -> None:
    mask = masks.packed(offsets(3, 9), 9)
    for inputs, reason in (
        (random(2, 136, 12, 12, 12), "at most 128 and a multiple of 8"),
        (random(2, 12, 12, 12, 12), "at most 128 and a multiple of 8"),
        (random(2, 16, 12, 12, 12, dtype=torch.float32), "not torch.float32"),
        ([*random(4, 16, 12), *random(2, 16, 12, 12)], "no grouped queries"),
    ):
        assert reason in dict(explain(*inputs, mask=mask).rejected)["packed-short"]


# -------------------------------------------------------------------------------------- on a GPU only


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("longest", "width", "dtype", "cross"),  # any two values in every combination
    [
        (16, 64, torch.bfloat16, True),
        (16, 128, torch.float16, False),
        (32, 64, torch.float16, True),
        (32, 128, torch.bfloat16, False),
        (64, 64, torch.bfloat16, False),
        (64, 128, torch.float16, True),
        (128, 64, torch.float16, False),
        (128, 128, torch.bfloat16, True),
    ],
)
def test_real_sizes(longest: int, width: int, dtype: torch.dtype, cross: bool) -> None:
    lengths = torch.randint(longest // 4, longest + 1, (50,)).tolist()
    if cross:
        query_lengths = torch.randint(1, longest + 1, (50,)).tolist()
        mask = masks.packed(offsets(*lengths), longest, cu_seqlens_q=offsets(*query_lengths), max_seqlen_q=longest)
        check(mask, random(4, width, sum(query_lengths), sum(lengths), sum(lengths), dtype=dtype), dtype)
    else:
        mask = masks.packed(offsets(*lengths), longest) & masks.causal()
        check(mask, random(4, width, *[sum(lengths)] * 3, dtype=dtype), dtype)


@pytest.mark.gpu
def test_results_are_deterministic() -> None:
    lengths = torch.randint(8, 65, (200,)).tolist()
    mask = masks.packed(offsets(*lengths), 64) & masks.causal()
    inputs = random(4, 64, *[sum(lengths)] * 3)
    first = with_gradients(lambda *x: attend(*x, mask=mask), inputs, HALF)
    for _ in range(5):
        again = with_gradients(lambda *x: attend(*x, mask=mask), inputs, HALF)
        torch.testing.assert_close(again, first, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_other_lengths() -> None:
    cu_seqlens = offsets(20, 30, 14, 0)
    leaves = [x.requires_grad_() for x in random(4, 64, 64, 64, 64)]

    def run() -> tuple[Tensor, ...]:
        out = attend(*leaves, mask=masks.packed(cu_seqlens, 64) & masks.causal())
        # Detached, so that the recording does not keep autograd nodes of the leaves on its stream.
        return out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)

    graph, captured = record_cuda_graph(run)
    for lengths in ((20, 30, 14, 0), (1, 2, 3, 58), (64, 0, 0, 0), (5, 5, 5, 5)):
        cu_seqlens.copy_(offsets(*lengths))
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        torch.testing.assert_close(captured, run(), rtol=0, atol=0)


@pytest.mark.gpu
def test_under_autocast() -> None:
    mha = MultiHead(width=256, num_heads=4).cuda()
    lengths = 9, 31, 24
    x = torch.randn(1, 64, 256, device="cuda")
    mask = masks.packed(offsets(*lengths), 64) & masks.causal()
    with torch.autocast("cuda", torch.bfloat16):
        out = mha(x, mask=mask)
    out.float().square().sum().backward()
    torch.testing.assert_close(out.float(), mha(x, mask=mask), rtol=0.05, atol=0.02)
    assert mha.project.weight.grad is not None
    assert mha.project.weight.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_inside_a_compiled_function() -> None:
    inputs = random(2, 16, 40, 40, 40)
    mask = masks.packed(offsets(9, 31), 31)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 2, k, v, mask=mask) + 1

    torch.testing.assert_close(torch.compile(function)(*inputs), function(*inputs), rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_a_transformer_has_the_loss_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from jumok.batches.tokens import Seq2SeqBatch
    from jumok.models.transformer import Transformer, TransformerConfig

    sizes = {
        "width": 128,
        "num_heads": 2,
        "feed_forward_width": 256,
        "encoder_layers": 2,
        "decoder_layers": 2,
    }
    model = Transformer(TransformerConfig(**sizes, dropout=0.0), 50, 50).cuda()
    sides = ([torch.randint(4, 50, (int(n),)).tolist() for n in torch.randint(3, 60, (40,))] for _ in range(2))
    batch = Seq2SeqBatch.from_sequences(*sides, packed=True).to("cuda")

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(batch).total
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    kernels, launch = [], short_sequences._launch
    monkeypatch.setattr(short_sequences, "_launch", lambda *x: (kernels.append(x[0]), launch(*x)))
    ours = run()
    assert len(kernels) == 2 * 6  # 2 encoder and 2 decoder layers, forward and backward
    monkeypatch.setattr(dispatch, "PATHS", tuple(x for x in dispatch.PATHS if x.name != "packed-short"))
    flash = run()
    torch.testing.assert_close(ours[0], flash[0], rtol=1e-3, atol=0)
    for gradient, expected in zip(ours[1:], flash[1:], strict=True):
        assert (gradient - expected).norm() <= 0.03 * expected.norm() + 1e-3


# --- without a GPU ------------------------------------------------------------------------------------------


@compiles_kernels
@pytest.mark.parametrize("kernel", ["_forward_kernel", "_backward_kernel"])
@pytest.mark.parametrize(
    ("longest", "dropout"),
    [(64, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(64, False), (128, False), (128, True)])],
)
def test_the_kernels_compile_for_hopper_and_hardly_spill(
    kernel: str, longest: int, dropout: bool, tmp_path: Path
) -> None:
    function = getattr(short_sequences, kernel)
    choose_blocks = getattr(short_sequences, "choose" + kernel.replace("_kernel", "_blocks"))
    blocks = choose_blocks(longest, longest, 64)
    blocks = blocks if isinstance(blocks, ShortKernelBlockSizes) else blocks[-1]  # those of the longest
    constants = {"H": 8, "UNIT": 8, "D": 64, "BD": 64, "BQ": blocks.queries, "BK": blocks.keys, "CAUSAL": True}
    constants |= {"MIN_TILE": blocks.min_tile_side, "NUM_TIERS": blocks.num_tiers, "LONGER_THAN": blocks.longer_than}
    constants |= {} if dropout else {"seed_ptr": None}
    assert blocks.min_tile_side << (blocks.num_tiers - 1) == longest
    types = {name: "*i32" if "cu_seqlens" in name else "*bf16" for name in function.arg_names if "_ptr" in name}
    types |= dict.fromkeys(("factor", "scale", "keep_scale"), "fp32") | {"seed_ptr": "*i64"}
    options = launch_options(blocks.num_warps, 1, blocks.max_registers)
    compiled = compile_for_hopper(function, constants, types, options)
    assert "wgmma" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 << 10
    # Triton 3.6 spills nothing, other versions a few bytes.
    assert count_stack_bytes(compiled, tmp_path) <= (0 if triton.__version__.startswith("3.6.") else 64)
    # A thread makes the random numbers of eight weights at once: under half as many products as without that.
    products = compiled.asm["ptx"].count(", -766435501;")
    weights_per_thread = blocks.queries * blocks.keys // (32 * blocks.num_warps)
    assert bool(products) == dropout
    assert products < 7 * weights_per_thread / 2
