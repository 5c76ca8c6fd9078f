"""The plan cache: few frames to the kernel, and never another result or error than the full path gives."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import jumok
from jumok import attend, masks, scores
from jumok.attention import core, plan_cache
from jumok.attention.caching import BoundedCache
from jumok.errors import InputError

B, H, L, D = 2, 4, 8, 16
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def full_path(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """``attend`` without any plan."""

    def run(*arguments: Any, **more: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(plan_cache, "make_plan_key", lambda *_: None)
            return attend(*arguments, **more)

    return run


def inputs(*leading: int, queries: int = L, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(*leading, n, D, dtype=dtype, requires_grad=True) for n in (queries, L, L)]


def planned(*arguments: Any, **more: Any) -> Tensor:
    """``attend`` by a plan: the third call of its kind, without a check of its arguments."""
    for _ in range(2):
        attend(*arguments, **more)
    kind = plan_cache.make_plan_key(
        *arguments, *(more.get(name) for name in ("score", "mask", "bias", "scale", "softcap")), 0.0
    )
    assert plan_cache.find_plan(kind, more.get("mask")) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "build_attention_call", None)
        return attend(*arguments, **more)


# ------------------------------------------------------------------------------------------ frames


def frames_of(run: Callable[[], Any], kernel: str) -> int:
    """How many Python frames ``run`` enters until it calls the C function ``kernel`` for the last time."""
    entered, until = 0, None

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered, until
        if event == "call":
            entered += 1
        elif event == "c_call" and argument.__name__ == kernel:
            until = entered

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert until is not None
    return until


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["no mask", "padding", "additive step", "3 dimensions"])
def test_fewer_than_15_frames_from_attend_to_the_kernel(name: str, grad: bool) -> None:
    arguments, more, kernel = inputs(B, H), {}, "scaled_dot_product_attention"
    if name == "padding":
        more = {"mask": masks.padding([5, 8])}
    elif name == "3 dimensions":
        arguments = inputs(B)
    elif name == "additive step":
        score = scores.Additive(D, D, D)
        query, key, value = inputs(B, queries=1)
        arguments, more, kernel = [query, score.prepare(key), value], {"score": score}, "bmm"
    with torch.set_grad_enabled(grad):
        planned(*arguments, **more)
        assert frames_of(lambda: attend(*arguments, **more), kernel) < 15


# ----------------------------------------------------------------------------------- equal results


def additive(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(1)
    score = scores.Additive(D, D, 3).to(query.dtype)
    return [query, score.prepare(key), value], {"score": score, **more}


KINDS: dict[str, Callable[[torch.dtype], tuple[list[Any], dict[str, Any]]]] = {
    "no mask": lambda t: (inputs(B, H, dtype=t), {}),
    "Dot": lambda t: (inputs(B, H, dtype=t), {"score": scores.Dot()}),
    "scale": lambda t: (inputs(B, H, dtype=t), {"scale": 2}),
    "3 dimensions": lambda t: (inputs(B, dtype=t), {}),
    "2 dimensions": lambda t: (inputs(dtype=t), {}),
    "5 dimensions": lambda t: (inputs(2, B, H, dtype=t), {"mask": masks.padding([5, 8])}),
    "grouped": lambda t: ([inputs(B, H, dtype=t)[0], *inputs(B, 2, dtype=t)[1:]], {}),
    "grouped, padding": lambda t: (
        [inputs(B, H, dtype=t)[0], *inputs(B, 2, dtype=t)[1:]],
        {"mask": masks.padding([5, 8])},
    ),
    "broadcast": lambda t: ([inputs(B, H, dtype=t)[0], *inputs(1, 1, dtype=t)[1:]], {}),
    "padding": lambda t: (inputs(B, H, dtype=t), {"mask": masks.padding([5, 8])}),
    "no key in a row": lambda t: (inputs(B, H, dtype=t), {"mask": masks.padding([0, 8])}),
    "padding, 3 dimensions": lambda t: (inputs(B, dtype=t), {"mask": masks.padding([0, 8])}),
    "causal": lambda t: (inputs(B, H, dtype=t), {"mask": masks.causal()}),
    "causal, fewer queries": lambda t: (inputs(B, H, queries=3, dtype=t), {"mask": masks.causal()}),
    "window": lambda t: (inputs(B, H, queries=3, dtype=t), {"mask": masks.window(1, 0)}),
    "causal & padding": lambda t: (
        inputs(B, H, dtype=t),
        {"mask": masks.causal() & masks.padding([3, 8])},
    ),
    "from the left": lambda t: (
        inputs(B, H, dtype=t),
        {"mask": masks.from_zero_one(torch.tensor([[0, 1] * 4, [1] * 8]))},
    ),
    "documents": lambda t: (inputs(1, H, dtype=t), {"mask": masks.documents([[0] * 5 + [1] * 3])}),
    "either": lambda t: (inputs(B, H, dtype=t), {"mask": masks.causal() | ~masks.padding([3, 8])}),
    "General": lambda t: (inputs(B, H, dtype=t), {"score": scores.General(D, D).to(t)}),
    "Concat": lambda t: (inputs(B, dtype=t), {"score": scores.Concat(D, D, 3).to(t)}),
    "Additive": lambda t: (inputs(B, H, dtype=t), {"score": scores.Additive(D, D, 3).to(t)}),
    "additive step": lambda t: additive(*inputs(B, queries=1, dtype=t)),
    "additive step, padding": lambda t: additive(*inputs(B, queries=1, dtype=t), mask=masks.padding([5, 8])),
    "additive step, no key in a row": lambda t: additive(*inputs(B, queries=1, dtype=t), mask=masks.padding([0, 8])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_plan_gives_the_same_numbers_and_gradients(
    name: str, dtype: torch.dtype, full_path: Callable[..., Tensor]
) -> None:
    arguments, more = KINDS[name](dtype)
    tensors = [x.keys if isinstance(x, scores.PreparedKeys) else x for x in arguments]
    tensors += list(more["score"].parameters()) if "score" in more else []
    want = full_path(*arguments, **more)
    out = planned(*arguments, **more)
    assert torch.equal(out, want)
    upstream = torch.randn_like(out)
    wanted, found = (
        torch.autograd.grad(x, tensors, upstream, allow_unused=True, retain_graph=True) for x in (want, out)
    )
    for a, b in zip(wanted, found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(planned(*arguments, **more), want)
    with torch.inference_mode():
        assert torch.equal(planned(*arguments, **more), want)


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_under_autocast_gives_the_same_numbers(name: str, full_path: Callable[..., Tensor]) -> None:
    arguments, more = KINDS[name](torch.bfloat16)
    attend(*arguments, **more)  # a plan of calls without autocast does not serve those with it
    with torch.autocast("cpu", torch.bfloat16):
        want = full_path(*arguments, **more)
        out = planned(*arguments, **more)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)


def test_inputs_that_autocast_converts_take_the_full_path() -> None:
    for dtype in (torch.float32, torch.float64):
        query, key, value = inputs(B, H, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            kind = plan_cache.make_plan_key(query, key, value, None, None, None, None, None, 0.0)
        assert (kind is None) == (dtype == torch.float32)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e38])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("name", ["padding", "causal & padding", "window", "additive step, padding"])
def test_what_nobody_may_attend_to_never_spreads_from_a_plan(
    name: str, where: str, bad: float, full_path: Callable[..., Tensor]
) -> None:
    (query, key, value), more = KINDS[name](torch.float32)
    dead = (slice(None), slice(None), slice(0, 4)) if name == "window" else (0, ..., slice(5, 8), slice(None))
    with torch.no_grad():
        planned(query, key, value, **more)
        keys = key.keys if isinstance(key, scores.PreparedKeys) else key
        (keys if where == "key" else value)[dead] = bad
        out = attend(query, key, value, **more)
        assert out.isfinite().all()
        assert torch.equal(out, full_path(query, key, value, **more))
    leaves = [query, value]
    out, want = attend(query, key, value, **more), full_path(query, key, value, **more)
    assert torch.equal(out, want)
    gradients = [torch.autograd.grad(x.sum(), leaves, retain_graph=True) for x in (out, want)]
    for a, b in zip(*gradients, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


def test_numbers_that_are_attended_to_spread_as_they_do_without_a_plan() -> None:
    query, key, value = (x.detach() for x in inputs(B, H))
    mask = masks.padding([5, 8])
    planned(query, key, value, mask=mask)
    value[0, 0, 2, 3] = NAN
    out = attend(query, key, value, mask=mask)
    assert out[0, 0, :, 3].isnan().all()
    assert out[1].isfinite().all()


# ------------------------------------------------------------------------------------- equal errors


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"key": torch.randn(B, H, L, D, dtype=torch.float64)}, "key is torch.float64"),
    "whole numbers": ({"value": torch.ones(B, H, L, D, dtype=torch.long)}, "expected floating-point"),
    "device": ({"value": torch.empty(B, H, L, D, device="meta")}, "value is on meta"),
    "length": ({"value": torch.randn(B, H, L - 1, D)}, "8 keys but 7 values"),
    "width": ({"key": torch.randn(B, H, L, D + 1)}, "width 16, the key 17"),
    "leading": ({"key": torch.randn(B + 1, H, L, D)}, "leading dimensions do not fit"),
    "no tensor": ({"key": [1.0]}, "key must be a tensor"),
    "no value": ({"value": None}, "value is None"),
    "dropout": ({"dropout": 1.0}, "probability"),
    "dropout=False": ({"dropout": False}, "probability"),
    "dropout=None": ({"dropout": None}, "probability"),
    "scale": ({"scale": True}, "scale=True"),
    "softcap": ({"softcap": 0.0}, "softcap=0.0"),
    "bias": ({"bias": torch.ones(3)}, "bias has shape"),
    "mask": ({"mask": torch.ones(L, L, dtype=torch.bool)}, "mask must be one of jumok.masks"),
    "a class": ({"mask": masks.padding}, "call it: padding"),
    "another mask": ({"mask": masks.padding([9, 1])}, "length of 9"),
    "mask of another batch": ({"mask": masks.padding([1, 2, 3])}, "does not fit the leading dimensions"),
    "score": ({"score": "dot"}, "score must be one of"),
    "a class of scores": ({"score": scores.Dot}, "score must be one of"),
}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_a_plan_hides_no_error(name: str, masked: bool) -> None:
    arguments = dict(zip(("query", "key", "value"), inputs(B, H), strict=True))
    right: dict[str, Any] = {"mask": masks.padding([5, 8])} if masked else {}
    for scale in (None, 1, 1.0):
        planned(*arguments.values(), **right, scale=scale)
    wrong, told = WRONG[name]
    with pytest.raises(InputError, match=told):
        attend(**(arguments | right | wrong))


def test_prepared_keys_are_checked_by_a_plan() -> None:
    (query, key, value), more = KINDS["additive step"](torch.float32)
    planned(query, key, value, **more)
    with pytest.raises(InputError, match="prepared by another Additive"):
        attend(query, key, value, score=scores.Additive(D, D, 3))
    with pytest.raises(InputError, match="prepared by Additive"):
        attend(query, key, value)
    with pytest.raises(InputError, match="prepared by Additive, but the score is Concat"):
        attend(query, key, value, score=scores.Concat(D, D, 3))
    with pytest.raises(InputError, match=r"Additive is torch.float64"):
        attend(query, key, value, score=more["score"].double())
    more["score"].float()
    with torch.no_grad():
        more["score"].key.weight.mul_(2)
    with pytest.raises(InputError, match="have changed since these keys were prepared"):
        attend(query, key, value, **more)
    dot = scores.Dot()
    planned(query, dot.prepare(key.keys.new_ones(B, L, D)), value, score=dot)
    with pytest.raises(InputError, match="prepared by Dot, but the score is ScaledDot"):
        attend(query, dot.prepare(key.keys.new_ones(B, L, D)), value, score=scores.ScaledDot())


@pytest.mark.parametrize("name", ["additive step", "General", "Additive"])
def test_parameters_written_between_calls_are_seen(name: str, full_path: Callable[..., Tensor]) -> None:
    (query, key, value), more = KINDS[name](torch.float32)
    before = planned(query, key, value, **more)
    with torch.no_grad():
        for parameter in more["score"].parameters():
            if not (name == "additive step" and parameter is more["score"].key.weight):
                parameter.mul_(2)
    after = attend(query, key, value, **more)
    assert not torch.equal(before, after)
    assert torch.equal(after, full_path(query, key, value, **more))


def test_hooks_of_a_score_run() -> None:
    (query, key, value), more = KINDS["additive step"](torch.float32)
    planned(query, key, value, **more)
    seen = []
    with more["score"].register_forward_hook(lambda *_: seen.append(1)):
        attend(query, key, value, **more)
    assert seen == [1]
    more["score"].forward = lambda query, key: torch.zeros(B, 1, L)
    assert torch.allclose(attend(query, key, value, **more), value.mean(1, keepdim=True), atol=1e-6)


# --------------------------------------------------------------------------- modes that skip the cache


def test_watch_sees_calls_that_have_a_plan() -> None:
    model, x = jumok.MultiHead(D, 2), torch.randn(1, L, D)
    for _ in range(3):
        model(x)
    with jumok.watch(model) as seen:
        model(x)
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_autocast_vmap_compile_and_checkpoint_after_a_plan(full_path: Callable[..., Tensor]) -> None:
    query, key, value = inputs(B, H)
    mask = masks.padding([5, 8])
    want = planned(query, key, value, mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(query, key, value, mask=mask).dtype == torch.bfloat16
    each = torch.func.vmap(lambda q, k, v: attend(q, k, v, mask=masks.padding(8)))(query, key, value)
    assert torch.allclose(each[1], want[1], atol=1e-6)
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, mask=mask), backend="eager", fullgraph=True)
    assert torch.allclose(compiled(query, key, value), want, atol=1e-6)
    fresh = masks.padding([5, 8])  # no plan in the forward pass, and one when it is computed again
    out = checkpoint(lambda q: attend(q, key, value, mask=fresh), query, use_reentrant=False)
    for _ in range(3):
        attend(query, key, value, mask=fresh)
    (gradient,) = torch.autograd.grad(out.sum(), query)
    assert torch.allclose(gradient, torch.autograd.grad(want.sum(), query)[0], atol=1e-6)


def test_gradients_of_gradients() -> None:
    (query, key, value), more = KINDS["additive step, padding"](torch.float64)
    planned(query, key, value, **more)
    assert torch.autograd.gradgradcheck(
        lambda q, v: attend(q, scores.PreparedKeys(key.keys, "Additive", key.owner, key.owner_version), v, **more),
        (query, value),
    )


class Noting(torch.Tensor):
    """A tensor that notes what is done with it."""

    noted: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.noted.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_takes_the_full_path() -> None:
    query, key, value = (x.detach() for x in inputs(B, H))
    want = planned(query, key, value)
    kind = plan_cache.make_plan_key(query.as_subclass(Noting), key, value, None, None, None, None, None, 0.0)
    assert kind is None
    out = attend(query.as_subclass(Noting), key, value)
    assert type(out) is Noting
    assert torch.equal(out.as_subclass(Tensor), want)
    assert "scaled_dot_product_attention" in Noting.noted


# ------------------------------------------------------------------------------------ what is kept


def test_the_cache_is_bounded_and_holds_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_unmasked_plans", BoundedCache(4))
    mask = masks.padding([5, 8])
    held: list[weakref.ref[Any]] = []
    for width in range(1, 12):
        arguments = [torch.randn(B, H, L, width) for _ in range(3)]
        for _ in range(3):
            attend(*arguments)
            attend(*arguments, mask=mask)
        held += map(weakref.ref, arguments)
    del arguments
    assert len(plan_cache._unmasked_plans._entries) == 4
    assert len(mask.__dict__["_plans"]._entries) == plan_cache.MAX_PLANS_PER_MASK
    assert not any(reference() is not None for reference in held)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", ["padding", "causal", "5 dimensions", "additive step, padding"])
def test_plans_die_with_their_mask(name: str, no_collector: None) -> None:
    arguments, more = KINDS[name](torch.float32)
    planned(*arguments, **more)
    mask = weakref.ref(more.pop("mask"))
    arguments.clear()
    more.clear()
    assert mask() is None


def test_a_mask_copies_without_its_plans() -> None:
    mask = masks.padding([5, 8])
    planned(*inputs(B, H), mask=mask)
    assert not copy.deepcopy(mask).__dict__["_plans"]._entries


def test_a_large_mask_is_not_kept_as_a_tensor() -> None:
    long = 512
    arguments = [torch.randn(1, 1, long, D) for _ in range(3)]
    mask = masks.window(3, 0)
    out = planned(*arguments, mask=mask)
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.shape[-2:] == (long, long)]
    assert not tensors
    assert torch.allclose(
        out,
        torch.nn.functional.scaled_dot_product_attention(*arguments, mask.to_dense(long, long)),
        atol=1e-6,
    )


def test_many_threads_share_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_unmasked_plans", BoundedCache(2))
    mask = masks.padding([2, 8])
    wrong: list[object] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for n in range(60):
            arguments = [torch.randn(B, H, L, 1 + n % 5, generator=generator) for _ in range(3)]
            for more in ({}, {"mask": mask}):
                out = attend(*arguments, **more)
                allowed = mask.to_dense(L, L)[:, None] if more else None
                want = torch.nn.functional.scaled_dot_product_attention(*arguments, allowed)
                if not torch.allclose(out, want, atol=1e-6):
                    wrong.append((seed, n))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
