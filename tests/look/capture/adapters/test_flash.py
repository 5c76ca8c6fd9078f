"""Functions of FlashAttention, replaced by functions with the same signatures that compute the same."""

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_models import FunctionAttention, run_watched
from flash_functions import (
    VERSION_2,
    attend_packed,
    computed_weights,
    flash_attn_3_func,
    flash_attn_3_qkvpacked_func,
    flash_attn_3_varlen_func,
    flash_attn_3_with_kvcache,
    flash_attn_4_func,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    to_pages,
)
from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out


def later_version_of_flash_attn_func(q, k, v, bias=None, **options):
    return flash_attn_func(q, k, v)


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    packages: dict[str, dict[str, Callable[..., Any]]] = {
        "flash_attn": {function.__name__: function for function in VERSION_2},
        "flash_attn_interface": {
            "flash_attn_func": flash_attn_3_func,
            "flash_attn_qkvpacked_func": flash_attn_3_qkvpacked_func,
            "flash_attn_varlen_func": flash_attn_3_varlen_func,
            "flash_attn_with_kvcache": flash_attn_3_with_kvcache,
        },
        "flash_attn.cute": {"flash_attn_func": flash_attn_4_func},
        "aiter": {"flash_attn_func": later_version_of_flash_attn_func},
    }
    for name, functions in packages.items():
        package = types.ModuleType(name)
        vars(package).update(functions)
        monkeypatch.setitem(sys.modules, name, package)


def check(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
    """Compare the captured weights with those that the function computed; returns the captures."""
    computed_weights.clear()
    _, captures = run_watched(FunctionAttention(function, **options), *tensors)
    batch = captures[0].shape[0]
    expected = computed_weights[-batch:]
    for n, weights in enumerate(expected):
        heads, queries, keys = weights.shape
        captured = captures[0].weights(batch=n)
        torch.testing.assert_close(captured[:, :queries, :keys], weights)
        assert not captured[:, queries:].any()  # padding
        assert not captured[:, :, keys:].any()
        assert captured.shape[0] == heads
    return captures


def random_packed(lengths: list[int], heads: int, width: int = 4) -> tuple[Tensor, Tensor]:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return torch.randn(sum(lengths), heads, width), cu_seqlens


# ------------------------------------------------------------------------------------------ tests

MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"causal": True, "window_size": (2, 0), "softcap": 1.5, "softmax_scale": 0.7},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0, 0.75, 0.1])},
    {"causal": True, "alibi_slopes": torch.rand(3, 6), "softcap": 0.8},
]


@pytest.mark.parametrize("options", MASKS)
def test_rows_of_equal_length(options: dict[str, Any]) -> None:
    check(flash_attn_func, torch.randn(3, 5, 6, 4), torch.randn(3, 7, 2, 4), torch.randn(3, 7, 2, 4), **options)


@pytest.mark.parametrize("options", MASKS)
def test_packed_sequences(options: dict[str, Any]) -> None:
    query, cu_q = random_packed([5, 2, 3], 6)
    key, cu_k = random_packed([7, 4, 3], 2)
    layouts = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 7}
    captures = check(flash_attn_varlen_func, query, key, torch.randn(14, 2, 4), **layouts, **options)
    assert captures[0].shape == (3, 6, 5, 7)
    check(flash_attn_varlen_kvpacked_func, query, torch.randn(14, 2, 2, 4), **layouts, **options)
    check(flash_attn_varlen_qkvpacked_func, torch.randn(10, 3, 6, 4), cu_seqlens=cu_q, max_seqlen=5, **options)


def test_packed_sequences_of_equal_length_are_not_copied() -> None:
    query, cu_seqlens = random_packed([5, 5, 5], 3)
    options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 5, "max_seqlen_k": 5}
    captures = check(flash_attn_varlen_func, query, query, query, causal=True, **options)
    assert captures[0].attention.query.data_ptr() == query.data_ptr()
    assert captures[0].is_causal


@pytest.mark.parametrize("options", MASKS)
def test_queries_keys_and_values_in_one_tensor(options: dict[str, Any]) -> None:
    check(flash_attn_qkvpacked_func, torch.randn(3, 5, 3, 6, 4), **options)
    check(flash_attn_kvpacked_func, torch.randn(3, 5, 6, 4), torch.randn(3, 7, 2, 2, 4), **options)


def test_tokens_of_packed_sequences() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 4)

        def forward(self, ids: Tensor, cu_seqlens: Tensor) -> Any:
            x = self.embedding(ids)[0, :, None]
            return flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, 3, 3)

    ids, cu_seqlens = torch.tensor([[7, 8, 9, 3, 4]]), torch.tensor([0, 3, 5])
    model = Packed()
    with watch(model, tokenizer=lambda ids: [f"<{i}>" for i in ids]) as captures:
        model(ids, cu_seqlens)
    assert captures[0].query_tokens == [["<7>", "<8>", "<9>"], ["<3>", "<4>", ""]]
    assert captures[0].key_tokens == captures[0].query_tokens
    assert captures[0].kind == "self"


def test_edges_of_packed_sequences_are_knocked_out() -> None:
    query, cu_seqlens = random_packed([4, 2], 2)
    model = FunctionAttention(
        flash_attn_varlen_func, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=4, max_seqlen_k=4
    )
    value = torch.eye(6)[:, None].expand(-1, 2, -1)[..., :4].contiguous()  # the output is the weights
    with knock_out(model, {"FunctionAttention": [0, (1, 1, 0)]}):
        out = model(query, query, value)
    plain = model(query, query, value)
    assert not out[:, 0].any()
    assert out[1, 1, 0] == 0 != plain[1, 1, 0]
    torch.testing.assert_close(out[1, 1, 1:].sum(), torch.tensor(1.0))
    torch.testing.assert_close(out[[0, 2, 3], 1], plain[[0, 2, 3], 1])


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "cache_leftpad": torch.tensor([0, 2])},
        {"causal": True, "new": 2, "rotary": 3},
        {"new": 2, "rotary": 2, "rotary_interleaved": False},
        {"new": 1, "window_size": (3, 0), "softcap": 2.0, "alibi_slopes": torch.rand(6)},
    ],
)
def test_caches(is_paged: bool, options: dict[str, Any]) -> None:
    options = dict(options)
    lengths, caches = torch.tensor([4, 6], dtype=torch.int32), [torch.randn(2, 9, 2, 8) for _ in range(2)]
    if is_paged:
        table = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32)
        caches, options["block_table"] = [to_pages(cache, table) for cache in caches], table
    num_new, rotary = options.pop("new", 0), options.pop("rotary", 0)
    if num_new:
        options |= {"k": torch.randn(2, num_new, 2, 8), "v": torch.randn(2, num_new, 2, 8)}
    if rotary:
        angles = torch.rand(11, rotary)
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    captures = check(
        flash_attn_with_kvcache, torch.randn(2, max(num_new, 2), 6, 8), *caches, cache_seqlens=lengths, **options
    )
    expected = captures[0].weights()
    for cache in caches:
        cache.zero_()  # the next step overwrites the cache
    lengths.zero_()
    torch.testing.assert_close(captures[0].weights(), expected)


def test_cache_of_other_rows_and_of_one_length() -> None:
    caches = [torch.randn(5, 9, 2, 8) for _ in range(2)]
    options = {"cache_seqlens": 7, "cache_batch_idx": torch.tensor([4, 1])}
    captures = check(flash_attn_with_kvcache, torch.randn(2, 1, 6, 8), *caches, **options)
    assert captures[0].shape == (2, 6, 1, 7)
    check(flash_attn_with_kvcache, torch.randn(5, 3, 6, 8), *caches, causal=True)


def test_packed_queries_of_keys_in_pages() -> None:
    query, cu_q = random_packed([2, 1], 6)
    table = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
    pages = [to_pages(torch.randn(2, 6, 2, 4), table.clamp(0)) for _ in range(2)]
    cu_k = torch.tensor([0, 5, 8], dtype=torch.int32)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 2, "max_seqlen_k": 5, "causal": True}
    captures = check(flash_attn_varlen_func, query, *pages, block_table=table, **options)
    assert captures[0].shape == (2, 6, 2, 5)


@pytest.mark.parametrize("options", [{}, {"causal": True, "attention_chunk": 3}, {"qv": torch.randn(2, 5, 6, 3)}])
def test_version_3(options: dict[str, Any]) -> None:
    value = torch.randn(2, 7, 2, 3)
    check(flash_attn_3_func, torch.randn(2, 5, 6, 4), torch.randn(2, 7, 2, 4), value, **options)


def test_version_3_packed() -> None:
    query, cu_q = random_packed([5, 4], 6)
    key, cu_k = random_packed([7, 5], 2)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 7, "causal": True}
    used = {"seqused_q": torch.tensor([3, 4]), "seqused_k": torch.tensor([4, 5])}
    captures = check(flash_attn_3_varlen_func, query, key, torch.randn(12, 2, 4), **options, **used)
    assert captures[0].shape == (2, 6, 4, 5)
    check(flash_attn_3_qkvpacked_func, torch.randn(2, 5, 10, 4), num_heads_q=6, causal=True)
    table = torch.tensor([[2, 0, 4], [1, 3, 5]], dtype=torch.int32)
    pages = [to_pages(torch.randn(2, 9, 2, 4), table) for _ in range(2)]
    options = {"page_table": table, "cu_seqlens_q": cu_q, "cache_seqlens": torch.tensor([8, 6]), "max_seqlen_q": 5}
    captures = check(flash_attn_3_with_kvcache, query, *pages, causal=True, **options)
    assert captures[0].shape == (2, 6, 5, 8)


def test_version_4_with_a_sink() -> None:
    qkv = torch.randn(2, 5, 6, 4), torch.randn(2, 7, 2, 4), torch.randn(2, 7, 2, 4)
    check(flash_attn_4_func, *qkv, learnable_sink=torch.randn(6), window_size=(3, None), causal=True)


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (flash_attn_3_func, {"q_descale": torch.ones(2, 2)}, "flash_attn_interface.flash_attn_func with q_descale"),
        (flash_attn_4_func, {"mask_mod": max}, "flash_attn.cute.flash_attn_func with mask_mod is not supported"),
        (later_version_of_flash_attn_func, {"bias": torch.ones(7)}, "aiter.flash_attn_func with bias is not"),
    ],
)
def test_unsupported_arguments_are_named(function: Any, options: dict[str, Any], reason: str) -> None:
    class Block(FunctionAttention):  # a name that does not suggest attention
        pass

    qkv = torch.randn(2, 5, 6, 4), torch.randn(2, 7, 2, 4), torch.randn(2, 7, 2, 4)
    model = Block(function, **options)
    with pytest.raises(InputError, match=f"Block: {reason}"), watch(model):
        model(*qkv)


# ------------------------------------------------------------------------- varlen_attn of PyTorch


@pytest.fixture
def varlen_on_cpu() -> Iterator[None]:
    """PyTorch's own function, whose kernel runs on GPUs only: here, a kernel for CPUs."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def compute(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        is_causal: bool = False,
        scale: float | None = None,
        window_size: list[int] | None = None,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = {"softmax_scale": scale, "causal": is_causal, "window_size": window_size or (-1, -1), "softcap": 0}
        out = attend_packed(query, key, value, cu_seq_q, cu_seq_k, **options)
        return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)

    varlen._varlen_attn.register_kernel("cpu")(compute)
    yield
    varlen._varlen_attn._backend_fns.pop("cpu")


@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize("options", [{}, {"window_size": (-1, 0)}, {"window_size": (2, 1), "scale": 0.6}])
def test_varlen_attn_of_pytorch(options: dict[str, Any]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    if not options.keys() <= inspect.signature(varlen_attn).parameters.keys():
        pytest.skip("this version of PyTorch has no such options")
    query, cu_q = random_packed([5, 2, 3], 6)
    key, cu_k = random_packed([7, 4, 3], 6)
    positions = {"cu_seq_q": cu_q, "cu_seq_k": cu_k, "max_q": 5, "max_k": 7}
    captures = check(varlen_attn, query, key, torch.randn(14, 6, 4), **positions, **options)
    assert captures[0].shape == (3, 6, 5, 7)


@pytest.mark.gpu
def test_varlen_attn_on_a_gpu() -> None:
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32, device="cuda")
    qkv = [torch.randn(12, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    positions = {"cu_seq_q": cu_seqlens, "cu_seq_k": cu_seqlens, "max_q": 7, "max_k": 7, "window_size": (-1, 0)}
    out, captures = run_watched(FunctionAttention(varlen_attn, **positions), *qkv)
    values = torch.nn.utils.rnn.pad_sequence([qkv[2][:5], qkv[2][5:]], batch_first=True).transpose(1, 2).float()
    expected = (captures[0].weights() @ values).transpose(1, 2)
    torch.testing.assert_close(out[:5].float(), expected[0, :5], atol=0.02, rtol=0.02)
    torch.testing.assert_close(out[5:].float(), expected[1], atol=0.02, rtol=0.02)
