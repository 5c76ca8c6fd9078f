"""The kernel for short packed sequences against float64: at most twice the error of plain PyTorch.

As with the other kernels, the tests run on a GPU where there is one, and everywhere in Triton's interpreter,
in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from short_checks import (
    DEVICE,
    DTYPES,
    HALF,
    INTERPRETED,
    ON_GPU,
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
from jumok.attention import dispatch
from jumok.attention.heads import MultiHead
from jumok.attention.kernels import short_sequences
from jumok.attention.kernels.common import launch_options
from jumok.attention.kernels.short_sequences import (
    ShortKernelBlockSizes,
    ShortSequenceLayout,
    attend_short_sequences,
)

CAT = torch.cat


def reference(mask: masks.Mask) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: mix(weights(q, k, mask=mask), v)


def agree(mask: masks.Mask, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Ours, which are as near to float64 as plain PyTorch is."""
    assert explain(*inputs, mask=mask).name == "packed-short"
    ours = with_gradients(lambda *x: attend(*x, mask=mask), inputs, dtype)
    plain = with_gradients(reference(mask), inputs, dtype)
    exact = with_gradients(reference(mask), inputs, torch.float64)
    as_near(ours, plain, exact, dtype)
    return ours


# ------------------------------------------------------------------------------------ what it computes

# What the interpreter is given all of, a GPU has in other tests too; every width is one more to compile.
WIDTHS = [8, 24, 40, 72, 128] if INTERPRETED else [24, 40, 72]
LENGTHS: dict[str, tuple[int, ...]] = {
    "tiny": (1, 0, 5, 16, 3),
    "up to 32": (17, 0, 0, 32, 1),
    "up to 64": (5, 64, 31, 33),
    "up to 128": (65, 1, 0, 100, 128, 31),
    "one": (7,),
    "empty": (0, 0),
}


@runs_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_attention_among_themselves(name: str, causal: bool) -> None:
    lengths, dtype = LENGTHS[name], HALF if causal else DTYPES[0]  # the other pairs: test_real_sizes
    mask = masks.packed(edges(*lengths), max(lengths))
    agree(mask & masks.causal() if causal else mask, random(2, 16, *[sum(lengths)] * 3, dtype=dtype), dtype)


@runs_kernels
@pytest.mark.parametrize(
    ("asking", "asked"),
    [
        ((3, 16, 1, 0), (5, 2, 11, 0)),
        ((3, 64, 1, 19), (40, 7, 63, 2)),
        ((2, 30, 7), (101, 128, 3)),  # few queries, many keys
        ((113, 128, 5), (9, 1, 30)),
        ((0, 5, 7, 0), (3, 0, 64, 0)),  # nobody asks the first; the second finds nothing
    ],
    ids=str,
)
def test_attention_from_one_packing_to_another(asking: tuple[int, ...], asked: tuple[int, ...]) -> None:
    mask = masks.packed(edges(*asked), max(asked), cu_seqlens_q=edges(*asking), max_seqlen_q=max(asking))
    inputs = random(3, 8, sum(asking), sum(asked), sum(asked))
    agree(mask, inputs, HALF)


@runs_kernels
@pytest.mark.parametrize("width", WIDTHS)
def test_any_multiple_of_eight_is_a_width(width: int) -> None:
    lengths = 13, 40, 2
    mask = masks.packed(edges(*lengths), 40)
    agree(mask & masks.causal(), random(2, width, *[sum(lengths)] * 3), HALF)


@runs_kernels
def test_bfloat16_is_near() -> None:
    mask = masks.packed(edges(9, 31), 31)
    inputs = random(2, 16, 40, 40, 40, dtype=torch.bfloat16)
    ours = with_gradients(lambda *x: attend(*x, mask=mask), inputs, torch.bfloat16)
    exact = with_gradients(reference(mask), inputs, torch.float64)
    for one, truth in zip(ours, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - truth).norm() <= 0.02 * truth.norm()


@runs_kernels
def test_documents_are_packed_too() -> None:
    ids = [4] * 7 + [2] * 19 + [3] * 2
    agree(masks.documents(ids), random(2, 16, 28, 28, 28), HALF)
    asking = [4] * 3 + [2] + [3] * 5
    agree(masks.documents(ids, query_ids=asking), random(2, 16, 9, 28, 28), HALF)


@runs_kernels
def test_some_thousand_random_lengths() -> None:
    torch.manual_seed(5)
    for longest in (16, 37, 64, 128) if ON_GPU else (16, 37):
        lengths = torch.randint(0, longest + 1, (300 if ON_GPU else 9,)).tolist()
        mask = masks.packed(edges(*lengths), longest) & masks.causal()
        agree(mask, random(2, 16, *[sum(lengths)] * 3), HALF)


# ----------------------------------------------------------------------------------- how it is called


@runs_kernels
@pytest.mark.parametrize(
    "blocks",
    [ShortKernelBlockSizes(16, 128, 4, 128), ShortKernelBlockSizes(64, 128, 4, 255, min_tile_side=128)],
)
def test_the_blocks_do_not_matter(blocks: ShortKernelBlockSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_sequences, "choose_forward_blocks", lambda *_: blocks)
    largest = max(blocks.queries, blocks.keys)
    monkeypatch.setattr(
        short_sequences,
        "choose_backward_blocks",
        lambda *_: [blocks._replace(queries=largest, num_warps=8, max_registers=255)],
    )
    lengths = 33, 1, 0, 100, 16
    mask = masks.packed(edges(*lengths), 100)
    agree(mask & masks.causal(), random(2, 16, *[sum(lengths)] * 3), HALF)


@pytest.mark.parametrize("asked", [16, 33, 128])
@pytest.mark.parametrize("asking", [1, 64, 65, 128])
def test_each_sequence_is_in_one_launch_of_backward(asking: int, asked: int) -> None:
    launches = short_sequences.choose_backward_blocks(asking, asked, 64)
    for longer in range(1, max(asking, asked) + 1):
        has = [each for each in launches if each.longer_than < longer <= max(each.queries, each.keys)]
        assert len(has) == 1
        assert has[0].queries >= min(asking, longer)
        assert has[0].keys >= min(asked, longer)
    assert len(launches) == (1 if max(asking, asked) <= 64 else 2)


def three_of_one(length: int, heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """What one projection gave, and queries, keys and values that are parts of it."""
    whole = torch.randn(1, length, 3 * heads * width, device=DEVICE).to(dtype).requires_grad_()
    parts = whole.unflatten(2, (3, heads, width)).unbind(2)
    return whole, [part.transpose(1, 2) for part in parts]


@runs_kernels
def test_parts_of_one_projection_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = 9, 31, 2
    whole, parts = three_of_one(sum(lengths), 2, 16, HALF)
    mask = masks.packed(edges(*lengths), 31)
    given = []
    launch = short_sequences._launch
    monkeypatch.setattr(
        short_sequences, "_launch", lambda kernel, x, *rest: (given.append(x), launch(kernel, x, *rest))
    )
    out = attend(*parts, mask=mask)
    (ours,) = torch.autograd.grad(out.sin().sum(), whole)
    for tensors in given:
        places = [x.untyped_storage().data_ptr() for x in tensors[:3]]
        assert places == [whole.untyped_storage().data_ptr()] * 3
    gradients = given[1][4:]
    assert len({x.untyped_storage().data_ptr() for x in gradients}) == 1
    dense = [x.detach().contiguous().requires_grad_() for x in parts]
    again = torch.autograd.grad(attend(*dense, mask=mask).sin().sum(), dense)
    expected = torch.stack([x.transpose(1, 2) for x in again], 2).flatten(2)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@runs_kernels
def test_multi_head_attention_copies_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the projections is where the kernel wrote it: nothing is put together."""
    monkeypatch.setattr(torch, "cat", None)
    lengths = 9, 31, 2
    mask = masks.packed(edges(*lengths), 31)
    mha = MultiHead(width=32, num_heads=2).to(DEVICE, HALF)
    cross = MultiHead(width=32, num_heads=2, key_width=32).to(DEVICE, HALF)
    x = torch.randn(1, sum(lengths), 32, device=DEVICE).to(HALF)
    for module, run in ((mha, lambda: mha(x, mask=mask)), (cross, lambda: cross(x, x, mask=mask))):
        ours = torch.autograd.grad(run().sin().sum(), list(module.parameters()))
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "PATHS", ())
            patched.setattr(torch, "cat", CAT)
            plain = torch.autograd.grad(run().sin().sum(), list(module.parameters()))
        for one, other in zip(ours, plain, strict=True):
            assert (one - other).norm() <= 0.02 * other.norm() + 1e-2


@runs_kernels
def test_odd_strides() -> None:
    lengths = 9, 21
    mask = masks.packed(edges(*lengths), 21)
    q = torch.randn(16, 1, 30, 2, device=DEVICE).to(HALF).permute(1, 3, 2, 0)  # width last in memory
    k = torch.randn(1, 1, 30, 16, device=DEVICE).to(HALF).expand(1, 2, 30, 16)  # one for all heads
    v = torch.randn(1, 30, 2, 19, device=DEVICE).to(HALF).transpose(1, 2)[..., 2:18]
    out = attend(q, k, v, mask=mask)
    torch.testing.assert_close(out, attend(*(x.contiguous() for x in (q, k, v)), mask=mask), rtol=0, atol=0)


@runs_kernels
def test_only_the_gradients_that_are_asked_for_and_only_once() -> None:
    mask = masks.packed(edges(5, 19), 19)
    inputs = random(2, 16, 24, 24, 24)
    leaves = [x.clone().requires_grad_() for x in inputs]
    whole = torch.autograd.grad(attend(*leaves, mask=mask).sin().sum(), leaves)
    for at in range(3):
        some = [x.clone().requires_grad_(i == at) for i, x in enumerate(inputs)]
        (one,) = torch.autograd.grad(attend(*some, mask=mask).sin().sum(), some[at])
        torch.testing.assert_close(one, whole[at], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(attend(*leaves, mask=mask).sum(), leaves, create_graph=True)


@runs_kernels
def test_places_in_no_sequence_are_zero_and_may_hold_anything() -> None:
    lengths = edges(5, 0, 30, 2)  # 37 of the 61 places
    inputs = random(2, 16, 61, 61, 61)
    packing = ShortSequenceLayout(lengths, lengths, 30, 30, causal=True)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_short_sequences(*(x[0].transpose(0, 1) for x in (q, k, v)), packing, 0.3)

    clean = with_gradients(run, inputs, HALF)
    for x in inputs:
        x[:, :, 37:] = torch.nan
    spoilt = with_gradients(run, inputs, HALF)
    torch.testing.assert_close(spoilt, clean, rtol=0, atol=0)
    assert not spoilt[0][37:].any()
    assert spoilt[0][:37].any(-1).all()
    assert not any(x[:, :, 37:].any() for x in spoilt[1:])


@runs_kernels
def test_a_sequence_that_is_spoilt_spoils_no_other() -> None:
    lengths = 11, 29, 4
    mask = masks.packed(edges(*lengths), 29)
    inputs = random(2, 16, 44, 44, 44)
    clean = with_gradients(lambda *x: attend(*x, mask=mask), inputs, HALF)
    for x in inputs[1:]:
        x[:, :, 20] = torch.nan
    spoilt = with_gradients(lambda *x: attend(*x, mask=mask), inputs, HALF)
    assert spoilt[0][:, :, 11:40].isnan().all()
    for one, other in zip(spoilt, clean, strict=True):
        for part in (slice(0, 11), slice(40, 44)):
            torch.testing.assert_close(one[:, :, part], other[:, :, part], rtol=0, atol=0)


@runs_kernels
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_edges_of_any_whole_numbers(kind: torch.dtype) -> None:
    inputs = random(2, 16, 22, 22, 22)
    out = attend(*inputs, mask=masks.packed(edges(3, 19).to(kind), 19))
    torch.testing.assert_close(out, attend(*inputs, mask=masks.packed(edges(3, 19).to(kind), 50)))


# ----------------------------------------------------------------------------------- what it refuses


@runs_kernels
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mask": lambda: masks.packed(edges(30, 129), 129)}, "at most 128 tokens, and these have up to 129"),
        ({"softcap": 5.0}, "no softcap and no bias"),
        ({"bias": torch.zeros(1, device=DEVICE)}, "no softcap and no bias"),
        (
            {"mask": lambda: masks.packed(edges(59, 100), 100) & masks.window(3, 3)},
            "supports only a causal mask",
        ),
    ],
)
def test_what_it_refuses_it_says(change: dict[str, Any], reason: str) -> None:
    change = {"mask": lambda: masks.packed(edges(59, 100), 100)} | change
    explanation = explain(*random(2, 16, 159, 159, 159), **change | {"mask": change["mask"]()})
    assert explanation.name != "packed-short"
    assert reason in dict(explanation.rejected)["packed-short"]


@runs_kernels
def test_what_else_it_refuses() -> None:
    mask = masks.packed(edges(3, 9), 9)
    for inputs, reason in (
        (random(2, 136, 12, 12, 12), "at most 128 and a multiple of 8"),
        (random(2, 12, 12, 12, 12), "at most 128 and a multiple of 8"),
        (random(2, 16, 12, 12, 12, dtype=torch.float32), "not torch.float32"),
        ([*random(4, 16, 12), *random(2, 16, 12, 12)], "no grouped queries"),
    ):
        assert reason in dict(explain(*inputs, mask=mask).rejected)["packed-short"]


# -------------------------------------------------------------------------------------- on a GPU only


@needs_gpu
@pytest.mark.parametrize(
    ("longest", "width", "dtype", "cross"),  # any two of them in every combination
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
        asking = torch.randint(1, longest + 1, (50,)).tolist()
        mask = masks.packed(edges(*lengths), longest, cu_seqlens_q=edges(*asking), max_seqlen_q=longest)
        agree(mask, random(4, width, sum(asking), sum(lengths), sum(lengths), dtype=dtype), dtype)
    else:
        mask = masks.packed(edges(*lengths), longest) & masks.causal()
        agree(mask, random(4, width, *[sum(lengths)] * 3, dtype=dtype), dtype)


@needs_gpu
def test_the_same_bits_every_time() -> None:
    lengths = torch.randint(8, 65, (200,)).tolist()
    mask = masks.packed(edges(*lengths), 64) & masks.causal()
    inputs = random(4, 64, *[sum(lengths)] * 3)
    first = with_gradients(lambda *x: attend(*x, mask=mask), inputs, HALF)
    for _ in range(5):
        again = with_gradients(lambda *x: attend(*x, mask=mask), inputs, HALF)
        torch.testing.assert_close(again, first, rtol=0, atol=0)


@needs_gpu
def test_a_graph_that_was_captured_with_one_packing_serves_another() -> None:
    ends = edges(20, 30, 14, 0)
    leaves = [x.requires_grad_() for x in random(4, 64, 64, 64, 64)]

    def run() -> tuple[Tensor, ...]:
        out = attend(*leaves, mask=masks.packed(ends, 64) & masks.causal())
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
    for lengths in ((20, 30, 14, 0), (1, 2, 3, 58), (64, 0, 0, 0), (5, 5, 5, 5)):
        ends.copy_(edges(*lengths))
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        torch.testing.assert_close(captured, run(), rtol=0, atol=0)


@needs_gpu
def test_under_autocast() -> None:
    mha = MultiHead(width=256, num_heads=4).cuda()
    lengths = 9, 31, 24
    x = torch.randn(1, 64, 256, device="cuda")
    mask = masks.packed(edges(*lengths), 64) & masks.causal()
    with torch.autocast("cuda", torch.bfloat16):
        out = mha(x, mask=mask)
    out.float().square().sum().backward()
    torch.testing.assert_close(out.float(), mha(x, mask=mask), rtol=0.05, atol=0.02)
    assert mha.project.weight.grad is not None
    assert mha.project.weight.grad.isfinite().all()


@needs_gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_with_a_compiled_function_around() -> None:
    inputs = random(2, 16, 40, 40, 40)
    mask = masks.packed(edges(9, 31), 31)

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 2, k, v, mask=mask) + 1

    torch.testing.assert_close(torch.compile(around)(*inputs), around(*inputs), rtol=0.02, atol=0.02)


@needs_gpu
def test_a_transformers_loss_is_that_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
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

    taken, launch = [], short_sequences._launch
    monkeypatch.setattr(short_sequences, "_launch", lambda *x: (taken.append(x[0]), launch(*x)))
    ours = run()
    assert len(taken) == 2 * 6  # of 2 encoder and 2 decoder layers, forward and backward
    monkeypatch.setattr(dispatch, "PATHS", tuple(x for x in dispatch.PATHS if x.name != "packed-short"))
    flash = run()
    torch.testing.assert_close(ours[0], flash[0], rtol=1e-3, atol=0)
    for one, other in zip(ours[1:], flash[1:], strict=True):
        assert (one - other).norm() <= 0.03 * other.norm() + 1e-3


# --- without a GPU ------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("kernel", ["_forward_kernel", "_backward_kernel"])
@pytest.mark.parametrize("longest", [64, 128])
@pytest.mark.parametrize("dropout", [False, True])
def test_the_kernels_compile_for_hopper_and_hardly_spill(
    kernel: str, longest: int, dropout: bool, tmp_path: Path
) -> None:
    """The interpreter lets pass what the compiler does not, and the compiler needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    function = getattr(short_sequences, kernel)
    choose_blocks = getattr(short_sequences, "choose" + kernel.replace("_kernel", "_blocks"))
    blocks = choose_blocks(longest, longest, 64)
    blocks = blocks if isinstance(blocks, ShortKernelBlockSizes) else blocks[-1]  # those of the longest
    constants = {"H": 8, "UNIT": 8, "D": 64, "BD": 64, "BQ": blocks.queries, "BK": blocks.keys}
    constants |= {
        "MIN_TILE": blocks.min_tile_side,
        "NUM_TIERS": blocks.num_tiers,
        "LONGER_THAN": blocks.longer_than,
        "CAUSAL": True,
    }
    constants |= {} if dropout else {"seed_ptr": None}
    assert blocks.min_tile_side << (blocks.num_tiers - 1) == longest
    types = {name: "*i32" if "cu_seqlens" in name else "*bf16" for name in function.arg_names if "_ptr" in name}
    types |= dict.fromkeys(("factor", "scale", "keep_scale"), "fp32") | {"seed_ptr": "*i64"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    pointers = [at for at, name in enumerate(function.arg_names) if "*" in signature[name]]
    aligned = {(at,): [["tt.divisibility", 16]] for at in pointers}
    source = triton.compiler.ASTSource(function, signature, constexprs=constants, attrs=aligned)
    options = launch_options(blocks.num_warps, 1, blocks.max_registers)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 << 10
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    used = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    # Bytes: not a number with Triton 3.6, and few with others.
    assert int(re.findall(r"STACK:(\d+)", used)[0]) <= (0 if triton.__version__.startswith("3.6.") else 64), used
    # A thread makes eight weights' random numbers at once: fewer than half as many products as without that.
    products = compiled.asm["ptx"].count(", -766435501;")
    weights_a_thread = blocks.queries * blocks.keys // (32 * blocks.num_warps)
    assert bool(products) == dropout
    assert products < 7 * weights_a_thread / 2


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    interpret(__file__)
