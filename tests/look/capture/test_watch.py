"""watch: selection of layers, several observers, errors, and what is stored."""

import contextlib
import copy
import pickle
import sys
import threading
import types
from typing import Any

import pytest
import torch
from attention_models import (
    FunctionAttention,
    SelfAttention,
    causal_mask,
    normalize_by_hand,
    random_qkv,
    reference_weights,
    run_watched,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_sdpa

from jumok.errors import InputError
from jumok.look.capture.watch import watch

pytestmark = pytest.mark.long


def build_encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(6, 2, 11, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def build_sdpa(**options: Any) -> FunctionAttention:
    return FunctionAttention(F.scaled_dot_product_attention, **options)


X = torch.randn(2, 5, 6)


# ------------------------------------------------------------------------------------- what is missed


def test_unsupported_attention_is_an_error() -> None:
    model = nn.Sequential(SelfAttention(normalize_by_hand))
    with pytest.raises(InputError, match=r"0: .*SelfAttention attends in an unsupported way"), watch(model):
        model(X)


def test_unsupported_attention_beside_another_is_a_warning() -> None:
    model = nn.Sequential(SelfAttention(), SelfAttention(normalize_by_hand))
    with pytest.warns(UserWarning, match="1: SelfAttention attends"), watch(model) as captures:
        model(X)
    assert captures.names == ["0"]
    with pytest.raises(InputError, match="'1' was not captured: SelfAttention"):
        captures["1"]


def test_calls_in_another_thread_are_an_error() -> None:
    model = SelfAttention()
    thread = threading.Thread(target=lambda: model(X))

    def run_in_thread() -> None:
        thread.start()
        thread.join()

    with pytest.raises(InputError, match="not called inside the with block, or in another"), watch(model):
        run_in_thread()


def test_model_that_was_not_called() -> None:
    with pytest.raises(InputError, match="not called"), watch(nn.Linear(2, 3)):
        pass


def test_model_without_attention() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    error = pytest.raises(InputError, match=r"no attention in the 3 modules that ran, such as .*Supported")
    with error, watch(model):
        model(torch.randn(1, 2))


class RootMeanSquareNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5


class MultiheadRMSNorm(nn.Module):  # as in x-transformers
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.norm = RootMeanSquareNorm()
        self.gamma = nn.Parameter(torch.zeros(heads, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * (self.gamma + 1)


def test_norm_named_after_heads_is_not_missed() -> None:
    model = nn.Sequential(MultiheadRMSNorm(3, 4), SdpaAttention())
    with watch(model) as captures:
        model(torch.randn(2, 3, 5, 4))
    assert captures.names == ["1"]
    assert not captures.missed_layers


def test_model_that_is_no_module() -> None:
    with pytest.raises(InputError, match=r"got SimpleNamespace; give its .model"):  # noqa: SIM117
        with watch(types.SimpleNamespace(model=nn.Linear(2, 3))):  # type: ignore[arg-type]
            pass


class SdpaAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_module_is_reported() -> None:
    model = nn.Sequential(torch.jit.script(SdpaAttention()))
    with pytest.raises(InputError, match="0: SdpaAttention is scripted"), watch(model):
        model(torch.randn(2, 3, 5, 4))


# ----------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("layers", ["layers.1.*", ["layers.1.self_attn"], lambda name: "1" in name])
def test_selection_of_layers(layers: Any) -> None:
    model = build_encoder()
    with watch(model, layers=layers) as captures:
        model(X)
    assert captures.names == ["layers.1.self_attn"]


def test_selection_of_no_layers() -> None:
    model = build_encoder()
    with pytest.raises(InputError, match=r"matches none.*layers.0.self_attn"), watch(model, layers="layer.1.*"):
        model(X)
    with pytest.raises(InputError, match="layers=\\[\\]: expected"), watch(model, layers=[]):
        pass


def test_each_forward_has_its_own_item() -> None:
    model = SelfAttention()
    with watch(model) as captures:
        model(X)
        model(X[:1])
    assert [layer.shape[0] for layer in captures] == [2, 1]
    assert len(captures.calls) == 2
    with pytest.raises(InputError, match=r"captured 2 times, at \[0, 1\]"):
        captures["SelfAttention"]
    assert captures.find_layers("SelfAttention") == list(captures)
    with pytest.raises(InputError, match="did you mean 'SelfAttention'"):
        captures["SelfAttentoin"]


def test_chunks_of_queries_are_one_item() -> None:
    allowed = causal_mask(5, 7, 2)

    def attend_in_chunks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        chunks = zip(query.split(2, dim=-2), allowed.split(2), strict=True)
        return torch.cat([imported_sdpa(chunk, key, value, attn_mask=mask) for chunk, mask in chunks], dim=-2)

    query, key, value = random_qkv(2, 3)
    _, captures = run_watched(FunctionAttention(attend_in_chunks), query, key, value)
    assert (len(captures), len(captures.calls)) == (1, 3)
    torch.testing.assert_close(captures[0].weights(), reference_weights(query, key, allowed))


@pytest.mark.parametrize("has_equal_queries", [False, True])
def test_two_attentions_to_the_same_keys_are_two_items(has_equal_queries: bool) -> None:
    def attend_twice(query: Tensor, other: Tensor, key: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(query, key, key)
        return first - F.scaled_dot_product_attention(other, key, 2 * key)

    query, key, other = random_qkv(2, 3, queries=7)
    other = query if has_equal_queries else other
    _, captures = run_watched(FunctionAttention(attend_twice), query, other, key)
    assert [layer.shape for layer in captures] == [(2, 3, 7, 7)] * 2
    torch.testing.assert_close(captures[0].weights(), reference_weights(query, key))
    torch.testing.assert_close(captures[1].weights(), reference_weights(other, key))


# -------------------------------------------------------------------------- observers and threads


def test_other_models_are_not_captured() -> None:
    model, other = SelfAttention(), SelfAttention()
    with watch(model) as captures:
        other(X)
        model(X)
        imported_sdpa(*random_qkv(2, 3))
    assert len(captures) == 1


def test_two_observers_may_detach_in_any_order() -> None:
    model = build_encoder()
    outer, inner = watch(model), watch(model.layers[1])
    with contextlib.ExitStack() as stack:
        outer_captures = stack.enter_context(outer)
        inner_captures = inner.__enter__()
        model(X)
        stack.pop_all().close()  # the first detaches first
        model(X)
        inner.__exit__(None, None, None)
    assert outer_captures.names == ["layers.0.self_attn", "layers.1.self_attn"]
    assert inner_captures.names == ["self_attn"]
    assert (len(outer_captures), len(inner_captures)) == (2, 2)


def test_threads_capture_only_their_own_calls() -> None:
    model, barrier = SelfAttention(), threading.Barrier(2)
    batch_sizes: dict[int, list[int]] = {}

    def run(batch_size: int) -> None:
        with watch(model) as captures:
            barrier.wait()
            model(torch.randn(batch_size, 5, 6))
            barrier.wait()
        batch_sizes[batch_size] = [layer.shape[0] for layer in captures]

    threads = [threading.Thread(target=run, args=(batch_size,)) for batch_size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert batch_sizes == {2: [2], 3: [3]}


def test_functions_bound_after_an_earlier_watch_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are scanned again only if a new name may refer to a function."""
    module = types.ModuleType("library")
    module.attend = lambda *args: args[2]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "library", module)
    model, qkv, other = FunctionAttention(lambda *args: module.attend(*args)), random_qkv(2, 3), SelfAttention()
    for _ in range(2):
        run_watched(other, X)
    monkeypatch.setattr(module, "attend", F.scaled_dot_product_attention)
    _, captures = run_watched(model, *qkv)
    torch.testing.assert_close(captures[0].weights(), reference_weights(*qkv[:2]))


# ------------------------------------------------------------------------------------- exceptions


def test_captures_of_a_model_that_raises() -> None:
    class FailingModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = SelfAttention()

        def forward(self, x: Tensor) -> Tensor:
            self.attention(x)
            raise RuntimeError("on purpose")

    model = FailingModel()
    with pytest.raises(RuntimeError, match="on purpose"), watch(model) as captures:
        model(X)
    assert len(captures) == 1


def test_names_after_an_exception_that_the_model_catches() -> None:
    class CatchingModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing, self.attention = nn.Linear(5, 7), SelfAttention()

        def forward(self, x: Tensor) -> Any:
            with contextlib.suppress(RuntimeError):
                self.failing(x)
            return self.attention(x)

    _, captures = run_watched(CatchingModel(), X)
    assert captures.names == ["attention"]


def test_copied_models_and_pickled_functions_are_not_patched() -> None:
    model = SelfAttention()
    model.generate = lambda: None  # type: ignore[assignment]
    with watch(model):
        model(X)
        copied = copy.deepcopy(model)
    assert torch.equal(copied.eval()(X), model.eval()(X))
    assert vars(copied).keys() == vars(model).keys()
    assert pickle.loads(pickle.dumps(F.softmax)) is F.softmax


# ------------------------------------------------------------------------------- stored tensors


def test_tensors_are_moved_to_the_device() -> None:
    mask = torch.rand(5, 7) < 0.9
    model = build_sdpa(attn_mask=mask)
    with watch(model, device="meta") as captures:  # another device that always exists
        model(*random_qkv(2, 3))
    attention = captures[0].attention
    tensors = (attention.query, attention.key, attention.mask)
    assert [x.device.type for x in tensors if x is not None] == ["meta"] * 3


def test_overwritten_tensors_are_an_error() -> None:
    query, key, value = random_qkv(2, 3)
    model = build_sdpa()
    with watch(model) as captures:
        model(query, key, value)
    captures[0].weights()
    key.mul_(2)
    with pytest.raises(InputError, match="overwritten"):
        captures[0].weights()


@pytest.mark.parametrize("length", [5, 3001])  # the latter has more elements than are compared
@pytest.mark.parametrize("overwritten", ["query", "key"])
def test_tensors_overwritten_in_inference_mode_are_an_error(overwritten: str, length: int) -> None:
    model = build_sdpa()
    with torch.inference_mode():
        query, key, value = random_qkv(2, 3, queries=length, keys=length)
        key[0, 0, 0, 0] = torch.nan
        with watch(model) as captures:
            model(query, key, value)
        assert captures[0].weights(batch=1, head=1, rows=0).sum() == pytest.approx(1)
        (query if overwritten == "query" else key)[:, 1:] *= 2
    with pytest.raises(InputError, match="overwritten"):
        captures[0].weights(batch=1, head=0, rows=0)


def test_static_caches_are_copied() -> None:
    cache, steps = torch.zeros(1, 2, 4, 3), torch.randn(4, 1, 2, 1, 3)
    model = build_sdpa()
    with watch(model) as captures:
        for position, step in enumerate(steps):
            cache[:, :, position : position + 1] = step
            model(step, cache, cache)
    for position, layer in enumerate(captures):
        keys = torch.cat([*steps[: position + 1], torch.zeros(1, 2, 3 - position, 3)], dim=2)
        torch.testing.assert_close(layer.weights(), reference_weights(steps[position], keys))


def test_inference_mode() -> None:
    with torch.inference_mode():
        _, captures = run_watched(build_encoder(), X)
    torch.testing.assert_close(captures[0].weights().sum(-1), torch.ones(2, 2, 5))
    assert captures.rollout().shape == (5, 5)


# --------------------------------------------------------------------------------------- results


def test_results_are_those_of_the_views() -> None:
    query, key, value = random_qkv(2, 3, queries=7)
    _, captures = run_watched(build_sdpa(), query, key, value)
    layer, weights = captures[0], reference_weights(query, key)
    part = layer.weights(batch=1, head=2, rows=slice(1, 4), cols=[0, 5])
    torch.testing.assert_close(part, weights[1, 2, 1:4, [0, 5]])
    torch.testing.assert_close(layer.pooled_map(batch=1, head=2, size=7), weights[1, 2])
    torch.testing.assert_close(layer.received_weight(batch=1), weights[1].sum(1))
    torch.testing.assert_close(layer.entropy(batch=1), -(weights[1] * weights[1].log()).sum(-1))
    torch.testing.assert_close(layer.top_keys(2, batch=1)[0], weights[1].topk(2).values)
    assert layer.distance_profile().shape[0] == 3
    torch.testing.assert_close(captures.rollout(batch=1).sum(-1), torch.ones(7))


def test_rollout_uses_a_shared_layer_as_often_as_it_ran() -> None:
    class SharedLayerModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = SelfAttention().eval()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + self.attention(x)
            return x

    model = SharedLayerModel()
    with torch.no_grad(), watch(model) as captures:
        model(X)
    expected = torch.eye(5)
    for layer in captures:
        expected = (layer.weights(batch=0).mean(0) + torch.eye(5)) / 2 @ expected
    torch.testing.assert_close(captures.rollout(), expected)
    with torch.no_grad(), watch(model) as captures:
        model(X)
        model(X)
    with pytest.raises(InputError, match="run the model once inside"):
        captures.rollout()


def test_rollout_needs_the_layers_of_one_stack() -> None:
    model = nn.Transformer(6, 2, 2, 1, 11, batch_first=True).eval()
    with torch.no_grad(), watch(model) as captures:
        model(X, torch.randn(2, 3, 6))
    with pytest.raises(InputError, match=r"one stack.*encoder\.layers\.0"):
        captures.rollout()
    assert captures.rollout(layers="encoder.*").shape == (5, 5)
    with pytest.raises(InputError, match="no self-attention"):
        captures.rollout(layers="nowhere")
