"""The mask contract on every path, which path serves a call, and how much memory it takes."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import jumok
from jumok import attend, explain, masks, scores
from jumok.attention import chunking, dispatch, mask_types
from jumok.attention.mask_types import AttentionShape

B, H, Q, K, D, V = 2, 3, 5, 7, 17, 19


# ------------------------------------------------------------------- the contract, on every path


@dataclass(frozen=True)
class Way:
    """One way to compute ``attend``: what is passed along, and how close to float64 it must be."""

    attend: Callable[..., Tensor]
    device: str
    dtype: torch.dtype
    within: float

    def inputs(self, *leading: int) -> tuple[Tensor, Tensor, Tensor]:
        shapes = (Q, D), (K, D), (K, V)
        query, key, value = (torch.randn(*leading, *s, dtype=self.dtype, device=self.device) for s in shapes)
        return query, key, value

    def close(self, one: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(one.to(other), other, rtol=self.within, atol=self.within)


CPU_WAYS = ["sdpa", "sdpa in chunks", "bias", "bias in chunks", "reference", "reference in chunks"]
GPU_WAYS = ["cuda", "cuda flex", "cuda bias", "cuda reference"]


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
]  # torch warns of its own doings while it compiles


@pytest.fixture(params=[*CPU_WAYS, *(pytest.param(name, marks=ON_GPU) for name in GPU_WAYS)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """All ways that this machine has."""
    name = request.param
    by_name = {path.name: path for path in dispatch.PATHS}
    if "chunks" in name:
        monkeypatch.setattr(chunking, "MAX_CHUNK_ELEMENTS", 1)
    if "reference" in name:
        monkeypatch.setattr(dispatch, "PATHS", ())
    for only in ("sdpa", "flex"):
        if only in name:  # it, or the reference where it cannot serve
            monkeypatch.setattr(dispatch, "PATHS", (by_name[only],))
    run = functools.partial(attend, bias=torch.zeros((), device="cuda" if "cuda" in name else "cpu"))
    device, dtype, within = ("cuda", torch.float32, 3e-3) if "cuda" in name else ("cpu", torch.float64, 1e-10)
    return Way(run if "bias" in name else attend, device, dtype, within)


def with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The result and the gradient of each input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    return out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)


def whole(mask: masks.Mask) -> Tensor:
    """The mask as ``(B, H, Q, K)``."""
    at = AttentionShape(2, Q, K, torch.device("cpu"))
    return mask.to_dense_rows(at, slice(0, Q)).expand(B, H, Q, K)


def checkered() -> Tensor:
    return torch.arange(H * Q * K).reshape(H, Q, K) % 4 > 0


MASKS: dict[str, Callable[[], masks.Mask]] = {
    "padding": lambda: masks.padding([0, 4]),
    "padding of heads": lambda: masks.padding([[0, 3, 7], [2, 0, 1]]),
    "left padding": lambda: masks.from_zero_one(torch.tensor([[0] * 7, [0, 0, 0, 1, 1, 1, 1]])),
    "padding in pieces": lambda: masks.from_zero_one(torch.tensor([[0] * 7, [1, 0, 0, 1, 1, 0, 1]])),
    "causal before the keys": lambda: masks.causal(offset=[-2, 1]),
    "causal, padding": lambda: masks.causal() & masks.padding([0, 3]),
    "window, causal": lambda: masks.window(1, 1, offset=-2) & masks.causal(offset=0),
    "window beside the keys": lambda: masks.window(1, 1, offset=[-4, 6]),
    "left padding, causal": lambda: masks.from_zero_one(torch.tensor([[0] * 4 + [1] * 3] * B)) & masks.causal(),
    "padded documents": lambda: masks.documents([-1, -1, 3, -1, 4, 4, -1]),
    "documents in pieces": lambda: masks.documents([-1, 4, 3, -1, 4, 3, 5]) & ~masks.window(0, 0),
    "neither": lambda: ~masks.causal() & masks.padding([6, 4]),
    "either": lambda: masks.window(0, 0, offset=-1) | masks.window(0, 0, offset=-3),
    "tensor": lambda: masks.tensor(checkered() & (torch.arange(K) != 4) & (torch.arange(Q) != 1)[:, None]),
    "tensor, padding": lambda: masks.tensor(checkered()) & masks.padding([0, 4]),
}
every_mask = pytest.mark.parametrize("name", MASKS)


def mask_for(way: Way, name: str) -> masks.Mask:
    if way.device == "cuda" and "tensor" in name:  # a tensor is asked to be where the query is
        return masks.tensor(whole(MASKS[name]()).cuda())
    return MASKS[name]()


@every_mask
def test_a_query_with_nothing_allowed_gets_zeros_and_gives_none(
    way: Way, plain: Callable[..., Tensor], name: str
) -> None:
    inputs, allowed = way.inputs(B, H), whole(MASKS[name]())
    empty = ~allowed.any(-1)
    assert empty.any(), "this mask shows nothing"

    out, query, key, value = with_gradients(functools.partial(way.attend, mask=mask_for(way, name)), *inputs)

    assert (out[empty.to(way.device)] == 0).all()
    assert (query[empty.to(way.device)] == 0).all()
    exact = with_gradients(functools.partial(plain, allowed=allowed.to(way.device)), *(x.double() for x in inputs))
    for one, other in zip((out, query, key, value), exact, strict=True):
        way.close(one, other)


@every_mask
def test_what_nobody_may_attend_to_never_spreads(way: Way, name: str) -> None:
    query, key, value = way.inputs(B, H)
    mask = mask_for(way, name)
    unseen = ~whole(MASKS[name]()).any(-2).to(way.device)  # (B, H, K)
    assert unseen.any(), "this mask shows nothing"
    run = functools.partial(way.attend, mask=mask)

    clean = with_gradients(run, query, key, value)
    for in_key, in_value in ((torch.nan, torch.inf), (-torch.inf, torch.nan)):
        spoilt_key, spoilt_value = key.clone(), value.clone()
        spoilt_key[unseen], spoilt_value[unseen] = in_key, in_value
        spoilt = with_gradients(run, query, spoilt_key, spoilt_value)
        for one, other in zip(spoilt, clean, strict=True):
            way.close(one, other)
        assert not spoilt[2][unseen].any()
        assert not spoilt[3][unseen].any()


def test_minus_infinity_in_a_bias_is_a_mask(way: Way) -> None:
    query, key, value = way.inputs(B, H)
    allowed = checkered().to(way.device)
    allowed[:, 1], allowed[..., 3] = False, False  # a query without keys and a key without queries
    numbers = torch.randn(H, Q, K, dtype=way.dtype, device=way.device)
    key[..., 3, :], value[..., 3, :] = torch.nan, torch.nan

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attend(query, key, value, bias=bias.masked_fill(~allowed, -torch.inf))

    def masked(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attend(query, key, value, mask=masks.tensor(allowed), bias=bias)

    inputs = query, key, value, numbers
    for one, other in zip(with_gradients(run, *inputs), with_gradients(masked, *inputs), strict=True):
        assert one.isfinite().all()
        way.close(one, other)
    assert not run(*inputs)[:, :, 1].any()


def test_a_key_that_mask_and_bias_take_out_together_never_spreads(way: Way) -> None:
    query, key, value = way.inputs(B, H)
    bias = torch.zeros(Q, K, dtype=way.dtype, device=way.device)
    bias[Q - 1, K - 1] = -torch.inf  # under causal the last query alone sees the last key
    run = functools.partial(attend, mask=masks.causal(), bias=bias)
    clean = with_gradients(run, query, key, value)
    key[..., K - 1, :], value[..., K - 1, :] = torch.nan, torch.inf
    for one, other in zip(with_gradients(run, query, key, value), clean, strict=True):
        way.close(one, other)


def test_grouped_queries_with_a_mask_of_every_head(way: Way, plain: Callable[..., Tensor]) -> None:
    query, key, value = way.inputs(B, 6)[0], *way.inputs(B, 2)[1:]
    lengths = torch.tensor([[1, 2, 0, 6, 3, 4], [5, 7, 2, 1, 1, 2]])
    allowed = (torch.arange(K) < lengths[..., None, None]).to(way.device)
    unseen = torch.arange(K) >= lengths.unflatten(1, (2, 3)).amax(2)[..., None]  # by no head of a group
    key, value = (x.masked_fill(unseen[..., None].to(way.device), torch.nan) for x in (key, value))

    ours = with_gradients(functools.partial(way.attend, mask=masks.padding(lengths)), query, key, value)

    filled = (x.nan_to_num().double() for x in (query, key, value))
    for one, other in zip(ours, with_gradients(functools.partial(plain, allowed=allowed), *filled), strict=True):
        way.close(one, other)


@pytest.mark.parametrize("queries", [1, Q])
def test_a_ready_mask_is_the_same_mask(way: Way, queries: int) -> None:
    query, key, value = way.inputs(B, H)
    allowed = torch.rand(B, 1, queries, K, device=way.device) < 0.5
    allowed[..., 0] = True
    added = torch.zeros(allowed.shape, device=way.device, dtype=way.dtype).masked_fill(~allowed, -torch.inf)
    expected = way.attend(query, key, value, mask=masks.tensor(allowed))
    for mask in (mask_types.AdditiveMask(added), mask_types.AdditiveMask(added) & masks.padding(K)):
        way.close(way.attend(query, key, value, mask=mask), expected)
    assert torch.equal(mask_types.AdditiveMask(added).to_dense(queries, K, way.device), allowed)


@pytest.mark.parametrize("leading", [(), (B,), (B, H), (B, 5, H), (B, 1, 5, H)], ids=str)
def test_padding_of_the_first_dimension_serves_any_number_of_them(
    way: Way, plain: Callable[..., Tensor], leading: tuple[int, ...]
) -> None:
    lengths = torch.tensor([0, 4] if leading else 4)
    inputs = way.inputs(*leading)
    out = way.attend(*inputs, mask=masks.causal() & masks.padding(lengths))
    kept = torch.arange(K) < lengths.reshape(-1, *[1] * len(leading), 1)
    allowed = (kept if leading else kept[0]) & masks.causal().to_dense(Q, K)
    way.close(out, plain(*(x.double() for x in inputs), allowed.to(way.device)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_mask
def test_the_contract_holds_in_low_precision(name: str, dtype: torch.dtype, in_chunks: None) -> None:
    allowed = whole(MASKS[name]())
    query, key, value = (torch.randn(B, H, n, w, dtype=dtype) for n, w in ((Q, D), (K, D), (K, V)))
    unseen = ~allowed.any(-2)[..., None]
    key, value = (x.masked_fill(unseen, torch.nan) for x in (key, value))
    results = with_gradients(functools.partial(attend, mask=MASKS[name]()), query, key, value)
    assert all(x.isfinite().all() for x in results)
    assert not results[0][~allowed.any(-1)].any()
    assert results[0].dtype == dtype


PACKINGS: dict[str, Callable[[], tuple[masks.Mask, int]]] = {
    "documents": lambda: (masks.documents([0] * 3 + [4] * 70 + [2] * 18), 91),
    "causal documents": lambda: (masks.documents([0] * 3 + [4] * 70 + [2] * 18) & masks.causal(), 91),
    "other documents": lambda: (
        masks.documents([0] * 3 + [4] * 70 + [2] * 18, query_ids=[0] * 5 + [4] + [2] * 31),
        37,
    ),
    "packed on the device": lambda: (masks.packed(torch.tensor([0, 3, 3, 73, 91, 91]).cuda(), 80), 91),
    "causal, on the device": lambda: (
        masks.packed(torch.tensor([0, 3, 3, 73, 91, 91]).cuda(), 80) & masks.causal(),
        91,
    ),
    "others, on the device": lambda: (
        masks.packed(
            torch.tensor([0, 3, 3, 73, 91, 91]).cuda(),
            80,
            cu_seqlens_q=torch.tensor([0, 5, 5, 6, 37, 37]).cuda(),
            max_seqlen_q=64,
        ),
        37,
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["packed-short", "varlen"])
@pytest.mark.parametrize("name", PACKINGS)
def test_packed_documents(name: str, path: str, plain: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATHS", tuple(one for one in dispatch.PATHS if one.name == path))
    mask, queries = PACKINGS[name]()
    inputs = [torch.randn(1, H, n, 16, dtype=torch.bfloat16, device="cuda") for n in (queries, 91, 91)]
    assert explain(*inputs, mask=mask).name == path
    allowed = mask.to_dense(queries, 91, "cuda")
    ours = with_gradients(functools.partial(attend, mask=mask), *inputs)
    usual = with_gradients(functools.partial(plain, allowed=allowed), *inputs)
    exact = with_gradients(functools.partial(plain, allowed=allowed), *(x.double() for x in inputs))
    for one, other, right in zip(ours, usual, exact, strict=True):
        assert (one - right).abs().max() <= 2 * (other - right).abs().max()


EDGES, ASKING = torch.tensor([0, 3, 3, 73, 91, 91]), torch.tensor([0, 5, 5, 6, 37, 37])
ON_HOST: dict[str, Callable[[], tuple[masks.Mask, int]]] = {
    **{name: make for name, make in PACKINGS.items() if "device" not in name},
    "packed": lambda: (masks.packed(EDGES), 91),
    "causal packed": lambda: (masks.packed(EDGES) & masks.causal(), 91),
    "packed, asked by others": lambda: (masks.packed(EDGES, cu_seqlens_q=ASKING), 37),
}


@pytest.mark.parametrize("name", ON_HOST)
def test_packed_documents_one_after_the_other(name: str, plain: Callable[..., Tensor]) -> None:
    mask, queries = ON_HOST[name]()
    inputs = [torch.randn(1, H, n, w, dtype=torch.float64) for n, w in ((queries, D), (91, D), (91, V))]
    assert explain(*inputs, mask=mask).name == "sdpa-per-sequence"
    ours = with_gradients(functools.partial(attend, mask=mask), *inputs)
    exact = with_gradients(functools.partial(plain, allowed=mask.to_dense(queries, 91)), *inputs)
    for one, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, right)


NO_KEYS, NO_QUERIES = (
    torch.tensor([0, 2, 2, 5]),
    torch.tensor([0, 1, 4, 4]),
)  # the queries 1, 2, 3 find nothing


def test_nobody_looks_at_numbers_on_a_device() -> None:
    for mask in (
        masks.packed(NO_KEYS.to("meta"), 3),
        masks.packed(NO_KEYS, cu_seqlens_q=NO_QUERIES.to("meta"), max_seqlen_q=3),
    ):
        assert mask.queries_match_keys is None
        assert not mask.has_no_empty_rows(AttentionShape(2, 4, 5, torch.device("cuda")))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("path", ["sdpa", "reference"])
def test_a_sequence_without_keys_of_which_nobody_knows(
    path: str, device: str, plain: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "PATHS", tuple(one for one in dispatch.PATHS if one.name == path))
    mask = masks.packed(NO_KEYS.to(device), 3, cu_seqlens_q=NO_QUERIES.to(device), max_seqlen_q=3)
    mask = replace(mask, queries_match_keys=None)  # on the CPU, as if they were on a GPU
    inputs = [torch.randn(1, H, n, 16, device=device) for n in (4, 5, 5)]
    assert explain(*inputs, mask=mask).name == path
    allowed = mask.to_dense(4, 5, device)
    assert allowed.any(-1).tolist() == [True, False, False, False]
    ours = with_gradients(functools.partial(attend, mask=mask), *inputs)
    exact = with_gradients(functools.partial(plain, allowed=allowed), *inputs)
    for one, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4)
    assert not ours[0][:, :, 1:].any()
    assert not jumok.weights(*inputs[:2], mask=mask)[:, :, 1:].any()


def test_packed_documents_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each key's value is a vector of its own, so that the weights themselves come out.
    inputs = [torch.zeros(1, 1, 91, D), torch.zeros(1, 1, 91, D), torch.eye(91)[None, None]]
    given = {"mask": masks.packed(EDGES), "dropout": 0.25}
    assert explain(*inputs, **given).name == "sdpa-per-sequence"
    torch.manual_seed(0)
    kept = attend(*inputs, **given)[0, 0]
    assert not kept[~masks.packed(EDGES).to_dense(91, 91)].any()
    inside = kept[3:73, 3:73]
    torch.testing.assert_close(inside.unique(), torch.tensor([0, 1 / 70 / 0.75]))
    assert abs(float((inside == 0).float().mean()) - 0.25) < 0.02
    monkeypatch.setattr(chunking, "MAX_CHUNK_ELEMENTS", 70 * 70 - 1)  # a document's weights are too many at once
    assert explain(*inputs, **given).name == "reference"


# --------------------------------------------------------------------------- which path, and why


def explained(**rest: Any) -> tuple[Any, Callable[[], Tensor]]:
    """The explanation of a call and the call."""
    query, key, value = torch.randn(B, H, Q, D), torch.randn(B, H, K, D), torch.randn(B, H, K, V)
    arguments = {"query": query, "key": key, "value": value} | rest
    return explain(**arguments), lambda: attend(**arguments)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "sdpa: PyTorch's scaled_dot_product_attention\n"),
    "square causal": (
        {"query": torch.randn(B, H, K, D), "mask": masks.causal()},
        "sdpa: .*, causal by flag\n",
    ),
    "one causal query": ({"query": torch.randn(B, H, 1, D), "mask": masks.causal()}, "sdpa: .*by flag\n"),
    "padding": ({"mask": masks.padding([3, 4])}, "sdpa: .* with a mask of one row\n"),
    "causal": ({"mask": masks.causal()}, "sdpa: .*, the mask built in chunks of queries\n"),
    "bias": ({"bias": torch.zeros(K)}, "sdpa: .* with the mask as a tensor\n"),
    "softcap": ({"softcap": 2.0}, "reference: plain PyTorch.*\n.*not sdpa: it has no softcap\n"),
    "dropout": ({"dropout": 0.5}, "reference: plain PyTorch.*\n.*not sdpa: with dropout"),
    "additive": (
        {"score": scores.Additive(D, D, 3)},
        "reference: .*\n  not additive-step: .*on cpu\n  not additive: .*on cpu\n"
        "  not sdpa: the score is not a dot product\n",
    ),
    "documents": (
        {"mask": masks.documents([0, 0, 0, 1, 1, 1, 1])},
        "sdpa: .*\n  not packed-short: it runs on CUDA.*\n  not varlen: it runs on CUDA.*\n",
    ),
    "no keys": (
        {"key": torch.zeros(0, D), "value": torch.zeros(0, V)},
        "reference: .*nothing to attend to\n",
    ),
    "general": ({"score": scores.General(D, D)}, "sdpa: PyTorch's scaled_dot_product_attention\n"),
}


@pytest.mark.parametrize("name", CASES)
def test_explain_says_which_path_and_why_not_a_faster_one(name: str) -> None:
    explanation, _ = explained(**CASES[name][0])
    assert re.match(CASES[name][1], f"{explanation}\n", re.DOTALL), str(explanation)
    faster = [path.name for path in dispatch.PATHS]
    reached = faster.index(explanation.name) if explanation.name in faster else len(faster)
    rejected = [name for name, _ in explanation.rejected]
    assert rejected == [name for name in faster[:reached] if name in rejected]  # in order, and all are faster
    assert all(reason for _, reason in explanation.rejected)
    listed = [f"  not {path}: {reason}" for path, reason in explanation.rejected]
    assert str(explanation).splitlines()[1:] == listed


@pytest.mark.parametrize("name", CASES)
def test_attend_runs_the_path_that_explain_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def noting(name: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda call: (taken.append(name), run(call))[1]

    paths = tuple(replace(path, run=noting(path.name, path.run)) for path in dispatch.PATHS)
    monkeypatch.setattr(dispatch, "PATHS", paths)
    reference = replace(dispatch.REFERENCE, run=noting("reference", dispatch.REFERENCE.run))
    monkeypatch.setattr(dispatch, "REFERENCE", reference)
    explanation, run = explained(**CASES[name][0])
    run()
    assert taken == [explanation.name]


# -------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        made = [x.untyped_storage().nbytes() // x.element_size() for x in tensors]
        self.elements = max(self.elements, 0, *made)
        return out


def largest_tensor(length: int, heads: int, width: int, **rest: Any) -> int:
    """Of a forward and a backward pass."""
    inputs = [torch.randn(B, heads, length, width, requires_grad=True) for _ in range(3)]
    with Largest() as seen:
        attend(*inputs, **rest).sum().backward()
    assert all(x.grad is not None for x in inputs)
    return seen.elements


def test_a_long_masked_call_never_makes_a_tensor_of_queries_times_keys() -> None:
    length = 4096
    mask = masks.causal() & masks.padding([1000, length])
    assert largest_tensor(length, heads=8, width=8, mask=mask) <= length * length / 2


def test_the_reference_stays_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    length, bound = 512, 1 << 17
    monkeypatch.setattr(chunking, "MAX_CHUNK_ELEMENTS", bound)
    mask = masks.causal() & masks.padding([100, length])
    assert largest_tensor(length, heads=8, width=8, mask=mask, softcap=5.0) <= bound
    assert largest_tensor(length, heads=1, width=8, mask=mask, score=scores.Additive(8, 8, 11)) <= bound


def test_looking_for_empty_rows_and_keys_of_any_mask_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_types, "MAX_SCAN_ELEMENTS", 1 << 14)
    monkeypatch.setattr(chunking, "MAX_CHUNK_ELEMENTS", 1 << 17)
    mask = masks.causal() | masks.window(0, 3)
    assert largest_tensor(512, heads=8, width=8, mask=mask) <= 1 << 17
    at = AttentionShape(2, 512, 512, torch.device("cpu"))
    with Largest() as seen:
        fresh = ~masks.causal() | ~masks.window(0, 3)
        assert fresh.find_nonempty_rows(at) is not None
        assert fresh.find_visible_keys(at) is not None
    assert 512 < seen.elements <= 1 << 14
