"""Uses that once went wrong, or easily would: each of these held something too long, or too little."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import jumok
from jumok import attend, masks, mix, scores, weights
from jumok.attention import chunking
from jumok.attention.mask_types import AttentionShape
from jumok.attention.paths import flex

B, K, D, V = 2, 7, 8, 5
LENGTHS = [4, 7]


def inputs(queries: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, queries, D), torch.randn(B, K, D), torch.randn(B, K, V)


# ------------------------------------------------------------------------ steps over prepared keys


def test_a_step_can_be_checkpointed() -> None:
    score, mask = scores.Additive(V, V, 3), masks.padding(LENGTHS)
    state, _, source = torch.randn(B, 1, V), None, torch.randn(B, K, V, requires_grad=True)

    def run(again: bool) -> Tensor:
        keys, h = score.prepare(source * 1), state
        for _ in range(2):
            step = lambda h: h + attend(h, keys, source, score=score, mask=mask)  # noqa: E731
            h = checkpoint(step, h, use_reentrant=False) if again else step(h)
        return torch.autograd.grad(h.sum(), source)[0]

    torch.testing.assert_close(run(True), run(False))


def test_each_step_may_have_a_backward_of_its_own() -> None:
    query, key, value = inputs()
    value.requires_grad_()
    keys, mask = scores.Dot().prepare(key), masks.padding(LENGTHS)
    for _ in range(2):
        attend(query, keys, value, score=scores.Dot(), mask=mask).sum().backward()
    assert value.grad is not None


def test_a_value_that_needs_a_gradient_from_now_on_gets_one() -> None:
    query, key, value = inputs()
    keys, mask = scores.Dot().prepare(key), masks.padding(LENGTHS)
    attend(query, keys, value, score=scores.Dot(), mask=mask)
    value.requires_grad_()
    assert attend(query, keys, value, score=scores.Dot(), mask=mask).requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_between_steps_is_seen(mode: type) -> None:
    with mode():
        query, key, value = inputs()
        keys, mask = scores.Dot().prepare(key), masks.padding(LENGTHS)
        attend(query, keys, value, score=scores.Dot(), mask=mask)
        value.zero_()
        assert not attend(query, keys, value, score=scores.Dot(), mask=mask).any()


def test_prepared_keys_hold_on_to_little() -> None:
    query, key, value = inputs()
    keys = scores.Dot().prepare(key)
    with torch.no_grad():
        for _ in range(50):
            attend(query, keys, value.clone(), score=scores.Dot(), mask=masks.padding(LENGTHS))
    assert len(keys._cache._entries) <= 4
    assert not copy.deepcopy(keys)._cache._entries


class Doubled(scores.Dot):
    """A score of a user's own."""

    def forward(self, query: Tensor, key: scores.PreparedKeys | Tensor) -> Tensor:
        return 2 * super().forward(query, key)


def test_a_score_of_ones_own_is_computed_as_it_says() -> None:
    query, key, value = inputs(3)
    ours = attend(query, key, value, score=Doubled())
    torch.testing.assert_close(ours, attend(query, key, value, score=scores.Dot(), scale=2.0))


class Own(scores.Score):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, D)

    def project_keys(self, keys: Tensor) -> Tensor:
        return self.project(keys)

    def forward(self, query: Tensor, key: scores.PreparedKeys | Tensor) -> Tensor:
        return query @ self.resolve_keys(key).mT


def test_keys_prepared_by_another_score_of_ones_own_are_refused() -> None:
    query, key, value = inputs()
    with pytest.raises(jumok.InputError, match="another Own"):
        attend(query, Own().prepare(key), value, score=Own())


# ------------------------------------------------------------------------------------ range of numbers


@pytest.mark.parametrize("reach", [2**32 - 1, sys.maxsize])
def test_a_window_of_any_reach(reach: int) -> None:
    assert masks.window(None, reach).to_dense(3, 3).all()
    assert masks.window(reach, reach).to_dense(3, 3).all()
    at = AttentionShape(0, 3, 3, torch.device("cpu"))
    places = [torch.tensor(i) for i in (0, 0, 2, 1)]
    assert flex.build_mask_mod(masks.window(reach, 0), at)(*places)


def test_float16_scores_beyond_its_range() -> None:
    query, key = torch.full((1, 3, 64), 60.0).half(), (60 + torch.rand(1, 5, 64)).half()
    value = torch.randn(1, 5, 2).half()
    expected = weights(query.double(), key.double())
    assert weights(query, key).isfinite().all()
    torch.testing.assert_close(weights(query, key).double(), expected, rtol=0.01, atol=0.01)
    capped = attend(query, key, value, softcap=1e5)
    torch.testing.assert_close(capped.double(), expected @ value.double(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("number", [-1e9, 1e5])
def test_a_bias_beyond_the_range_of_the_query(number: float) -> None:
    query, key, value = (x.half() for x in inputs(3))
    bias = torch.zeros(3, K)
    bias[1] = number
    expected = attend(query.double(), key.double(), value.double(), bias=bias.double())
    torch.testing.assert_close(attend(query, key, value, bias=bias).double(), expected, rtol=0.01, atol=0.01)


# -------------------------------------------------------------------------------------- masks as values


def test_a_mask_pickles_and_copies_without_what_it_worked_out() -> None:
    mask = masks.causal() & masks.padding(LENGTHS)
    small = len(pickle.dumps(mask))
    query, key, value = inputs(500)
    attend(query, key, value, mask=mask)
    assert len(pickle.dumps(mask)) < 2 * small
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert torch.equal(other.to_dense(5, K), mask.to_dense(5, K))


def test_a_mask_made_in_inference_serves_training() -> None:
    with torch.inference_mode():
        made = [masks.padding(LENGTHS), masks.from_zero_one(torch.tensor([[1, 0, 1, 1, 0, 1, 1]] * B))]
    query, key, value = inputs(3)
    for mask in made:
        attend(query.requires_grad_(), key, value, mask=mask).sum().backward()


def test_a_mask_used_with_fake_tensors_serves_real_ones_after() -> None:
    mask = masks.causal() & masks.padding(LENGTHS)
    with FakeTensorMode(allow_non_fake_inputs=True):
        attend(torch.randn(B, 3, D), torch.randn(B, K, D), torch.randn(B, K, V), mask=mask)
    assert type(attend(*inputs(3), mask=mask)) is Tensor


def test_one_mask_for_many_threads() -> None:
    mask = masks.causal() & masks.padding(LENGTHS)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    gate = threading.Barrier(4)

    def work(_: int) -> None:
        gate.wait()
        for queries in range(1, 40):
            mask.find_visible_keys(AttentionShape(1, queries, K, torch.device("cpu")))

    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(interval)


# ------------------------------------------------------------------------------------------- in chunks


def test_what_is_changed_before_the_backward_is_an_error(in_chunks: None) -> None:
    query, key, value = inputs(3)
    source = key.clone()
    out = attend(query.requires_grad_(), source, value, softcap=5.0)
    source.zero_()
    with pytest.raises(jumok.InputError, match="modified in place"):
        out.sum().backward()


def test_function_transforms_work_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs(3)

    def total(q: Tensor) -> Tensor:
        return attend(q, key, value, softcap=5.0).sin().sum()

    whole = torch.func.grad(total)(query)
    monkeypatch.setattr(chunking, "MAX_CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(torch.func.grad(total)(query), whole)


# --------------------------------------------------------------------------------------------- the rest


def test_meta_tensors_give_the_shape() -> None:
    query, key, value = (x.to("meta") for x in inputs(3))
    assert attend(query, key, value).shape == (B, 3, V)


SIZES = {
    scores.General: {"query_width": 3, "key_width": 5},
    scores.Additive: {"query_width": 3, "key_width": 5, "hidden": 7},
    scores.Concat: {"query_width": 3, "key_width": 5, "hidden": 7},
    scores.LocationSensitive: {
        "query_width": 3, "key_width": 5, "hidden": 7, "num_filters": 2, "kernel_size": 3, "num_channels": 1
    },
}  # fmt: skip


@pytest.mark.parametrize("wrong", [0, -1, 8.5, True, "8", None])
@pytest.mark.parametrize(("score", "name"), [(score, name) for score in SIZES for name in SIZES[score]])
def test_sizes_that_are_none_are_refused_when_a_score_is_made(score: Any, name: str, wrong: Any) -> None:
    score(**SIZES[score])
    told = rf"{score.__name__}\({name}={wrong!r}\): expected an integer, 1 or more"
    with pytest.raises(jumok.InputError, match=told):
        score(**SIZES[score] | {name: wrong})


def test_complex_numbers_are_refused_and_no_conversion_that_would_lose_a_half_is_advised() -> None:
    query, key, value = (x.to(torch.complex64) for x in inputs())
    with pytest.raises(jumok.InputError, match=r"query is torch\.complex64; complex numbers are not supported$"):
        attend(query, key, value)
    with pytest.raises(jumok.InputError, match=r"query is torch\.int64; .*convert with \.float"):
        attend(inputs()[0].long(), inputs()[1], inputs()[2])


@pytest.mark.slow
def test_masks_of_growing_size_compile_few_times() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counted = CompileCounter()
    window = masks.window(1, 1)
    compiled = torch.compile(lambda q: mix(weights(q, q, mask=window), q), backend=counted, fullgraph=True)
    for length in range(3, 12):
        x = torch.randn(B, length, D)
        torch.testing.assert_close(compiled(x), attend(x, x, x, mask=window))
    assert counted.frame_count <= 3


# -------------------------------------------------------------- what fits by shape and is meant otherwise


def test_a_decoder_state_without_its_query_dimension_is_refused() -> None:
    _, key, value = inputs()
    state, keys = torch.randn(B, D), scores.Dot().prepare(key)
    for run in (
        lambda: attend(state, key, value),
        lambda: weights(state, keys, score=scores.Dot()),
        lambda: mix(torch.rand(B, K), value),
    ):
        with pytest.raises(jumok.InputError, match=r"\[:, None\]"):
            run()


def test_prepared_keys_follow_a_beam() -> None:
    query, key, value = inputs()
    score, rows = scores.Additive(D, D, 3), torch.tensor([1, 1, 0])
    ours = attend(query[rows], score.prepare(key).reorder(rows), value[rows], score=score)
    torch.testing.assert_close(ours, attend(query, key, value, score=score)[rows])


def test_a_ragged_cache_keeps_what_is_behind_a_row_out_of_any_mask() -> None:
    mha, x, new = jumok.MultiHead(12, 3).eval(), torch.randn(2, 7, 12), torch.randn(2, 1, 12)
    _, cache = mha.step(x, jumok.KVCache(), lengths=[7, 4])
    with pytest.raises(jumok.InputError, match=r"offset=cache\.offset"):
        mha.step(new, cache, mask=masks.window(2, 0))
    out, _ = mha.step(new, cache, mask=masks.window(2, 0, offset=cache.offset))
    for row, length in enumerate([7, 4]):
        alone = torch.cat([x[row, :length], new[row]])[None]
        torch.testing.assert_close(out[row : row + 1], mha(alone, mask=masks.window(2, 0))[:, -1:])


def test_a_mask_beside_a_prepared_source_keeps_its_padding() -> None:
    mha, x, source = jumok.MultiHead(12, 3, key_width=5).eval(), torch.randn(2, 4, 12), torch.randn(2, 7, 5)
    both = masks.window(3, 3) & masks.padding(LENGTHS)
    ours = mha(x, mha.prepare(source, lengths=LENGTHS), mask=masks.window(3, 3))
    torch.testing.assert_close(ours, mha(x, source, mask=both))


def test_multi_head_shows_its_weights() -> None:
    mha, x, bias = jumok.MultiHead(12, 3, softcap=2.0).eval(), torch.randn(2, 5, 12), torch.randn(3, 5, 5)
    shown = mha.weights(x, mask=masks.causal(), bias=bias)
    assert shown.shape == (2, 3, 5, 5)
    value = mha._project_qkv(x)[2]
    mixed = mha.merge((shown @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixed, mha(x, mask=masks.causal(), bias=bias))


@pytest.mark.parametrize("channels", [1, 2])
def test_location_weights_that_do_not_fit_are_refused(channels: int) -> None:
    query, key, value = inputs()
    score = scores.LocationSensitive(D, D, 3, num_channels=channels)
    for wrong in (torch.zeros(B + 1, K), torch.zeros(B, 3, K), (torch.zeros(B, K),) * 2):
        with pytest.raises(jumok.InputError, match="LocationSensitive"):
            attend(query, key, value, score=score.with_previous(wrong))  # type: ignore[arg-type]
    shape = (B, K) if channels == 1 else (B, channels, K)
    assert attend(query, key, value, score=score.with_previous(torch.zeros(shape))).shape == (B, 1, V)


def test_padding_that_holds_huge_numbers_never_spreads() -> None:
    query, key, value = (x[:, None] for x in inputs(3))
    expected = attend(query, key, value, mask=masks.padding([4, 4]))
    key[..., 4:, :], value[..., 4:, :] = 1e30, 3e38
    query = query.requires_grad_()
    ours = attend(query, key, value, mask=masks.padding([4, 4]))
    torch.testing.assert_close(ours, expected)
    assert torch.autograd.grad(ours.sum(), query)[0].isfinite().all()
