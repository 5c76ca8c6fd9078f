"""Every answer equals what the whole weights in float64 give; and memory is bounded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.views import rollout, row_chunks, statistics

hypothesis = pytest.importorskip("hypothesis", reason="the property tests need Hypothesis")
given, st = hypothesis.given, hypothesis.strategies
few = hypothesis.settings(max_examples=40)


@st.composite
def attentions(draw: st.DrawFn, square: bool = False) -> tuple[CapturedAttention, Tensor]:
    """Some attention, and all its weights (B, H, Q, K) as the formula says."""
    batch, group, grouped, width = (draw(st.integers(1, n)) for n in (2, 3, 2, 5))
    rows, cols = draw(st.integers(1, 23)), draw(st.integers(1, 29))
    cols = rows if square else cols
    heads, scale = group * grouped, draw(st.sampled_from([0.1, 1.0, 5.0]))
    torch.manual_seed(draw(st.integers(0, 99)))
    query = torch.randn(batch, heads, rows, width, dtype=torch.float64)
    key = torch.randn(batch, grouped, cols, width, dtype=torch.float64)
    scores = scale * query @ key.repeat_interleave(group, 1).mT
    more: dict[str, object] = {}
    if draw(st.booleans()):
        more["softcap"] = 3.0
        scores = 3 * torch.tanh(scores / 3)
    i, j = torch.arange(rows)[:, None], torch.arange(cols)
    if draw(st.booleans()):
        more["diagonal"] = diagonal = draw(st.integers(-rows, cols))
        scores = scores.masked_fill(j > i + diagonal, -torch.inf)
        if draw(st.booleans()):
            more["window"] = window = draw(st.integers(1, cols + 3))
            scores = scores.masked_fill(j <= i + diagonal - window, -torch.inf)
    kind = draw(st.sampled_from(["none", "bool", "numbers", "change"]))
    shape = [draw(st.sampled_from([1, n])) for n in (batch, heads, rows, cols)]
    if kind == "bool":
        more["mask"] = mask = torch.rand(shape) < 0.7
        scores = scores.masked_fill(~mask, -torch.inf)
    if kind == "numbers":
        more["mask"] = mask = torch.randn(shape).double().masked_fill(torch.rand(shape) < 0.2, -torch.inf)
        scores = scores + mask
    if kind == "change":
        more["score_mod"] = lambda s, b, h, q, k: torch.where((q + k) % 3 > 0, s + 0.1 * h * k, -torch.inf)
        h = torch.arange(heads)[:, None, None]
        scores = torch.where((i + j) % 3 > 0, scores + 0.1 * h * j, -torch.inf)
    if draw(st.booleans()):
        more["lse"] = scores.logsumexp(-1)
    return CapturedAttention(query, key, scale=scale, **more), scores.softmax(-1).nan_to_num(0)


@pytest.fixture(params=[1 << 22, 64], ids=["whole", "strips"], scope="module")
def at_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything in one strip, and in many, of a row or a few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_chunks, "MAX_CHUNK_ELEMENTS", request.param)
        yield


in_strips = pytest.mark.usefixtures("at_once")


def pooled(weights: Tensor, size: tuple[int, int]) -> Tensor:
    """Cell by cell, as the docstring says it: (R, C) to the cells."""
    (rows, cols), out = weights.shape, []
    down, across = min(size[0], rows), min(size[1], cols)
    for i in range(down):
        some = weights[i * rows // down : (i + 1) * rows // down]
        for j in range(across):
            out.append(some[:, j * cols // across : (j + 1) * cols // across].sum(-1).mean())
    return torch.stack(out).reshape(down, across)


# --- by hand ------------------------------------------------------------------------------------------------


def by_hand() -> CapturedAttention:
    """Three words that see themselves and those before them, all alike: [1, 0, 0], [½, ½, 0], [⅓, ⅓, ⅓]."""
    return CapturedAttention(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), diagonal=0)


@in_strips
def test_three_words_by_hand() -> None:
    kept = by_hand()
    close = {"rtol": 0, "atol": 1e-6}
    rows = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(statistics.compute_weights(kept, batch=0, head=0), rows, **close)
    torch.testing.assert_close(statistics.compute_pooled_map(kept), rows, **close)
    # Cells begin at 0 and 1, and the second has two places.
    halves = torch.tensor([[1, 0], [(1 / 2 + 1 / 3) / 2, (1 / 2 + 2 / 3) / 2]])
    torch.testing.assert_close(statistics.compute_pooled_map(kept, size=2), halves, **close)
    torch.testing.assert_close(
        statistics.compute_received_weight(kept, head=0), torch.tensor([11 / 6, 5 / 6, 1 / 3]), **close
    )
    torch.testing.assert_close(statistics.compute_entropy(kept, head=0), torch.tensor([0, 0.693147, 1.098612]), **close)
    torch.testing.assert_close(
        statistics.compute_distance_profile(kept, head=0), torch.tensor([11 / 18, 5 / 18, 1 / 9]), **close
    )
    weights, places = statistics.find_top_keys(kept, 2)
    torch.testing.assert_close(weights[0], torch.tensor([[1, 0], [1 / 2, 1 / 2], [1 / 3, 1 / 3]]), **close)
    assert places[0, 0].tolist() == [0, -1]
    mixed = (rows + torch.eye(3)) / 2
    torch.testing.assert_close(rollout.compute_rollout([kept, kept]), mixed @ mixed, **close)
    torch.testing.assert_close(rollout.compute_rollout([kept], residual=0), rows, **close)


# --- properties ---------------------------------------------------------------------------------------------


@in_strips
@few
@given(attentions())
def test_weights_and_what_is_summed_over_them(made: tuple[CapturedAttention, Tensor]) -> None:
    kept, exact = made
    torch.testing.assert_close(statistics.compute_weights(kept), exact)
    torch.testing.assert_close(statistics.compute_received_weight(kept, batch=None), exact.sum(-2))
    torch.testing.assert_close(statistics.compute_entropy(kept, batch=None), torch.special.entr(exact).sum(-1))
    assert ((statistics.compute_weights(kept).sum(-1) - 1).abs() < 1e-9).logical_or(exact.sum(-1) == 0).all()


@in_strips
@few
@given(attentions(), st.data())
def test_any_part_of_the_weights(made: tuple[CapturedAttention, Tensor], data: st.DataObject) -> None:
    kept, exact = made
    index, choice = [], []
    for size in kept.shape:
        one = st.integers(-size, size - 1)
        ends = st.none() | st.integers(-size - 2, size + 2)
        some = st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, 3]))
        choice.append(data.draw(one | st.lists(one, max_size=3) | some))
        index.append(choice[-1] if isinstance(choice[-1], slice) else torch.tensor(choice[-1], dtype=torch.long))
    for axis in reversed(range(4)):
        exact = exact[(slice(None),) * axis + (index[axis],)]
    b, h, q, k = choice
    torch.testing.assert_close(statistics.compute_weights(kept, batch=b, head=h, rows=q, cols=k), exact)


@in_strips
@few
@given(attentions(), st.data())
def test_maps_are_the_pooled_weights(made: tuple[CapturedAttention, Tensor], data: st.DataObject) -> None:
    kept, exact = made
    size = (data.draw(st.integers(1, 31)), data.draw(st.integers(1, 31)))
    spans = []
    for n in kept.shape[2:]:
        first = data.draw(st.integers(0, n - 1))
        spans.append((first, data.draw(st.integers(first + 1, n))))
    rows, cols = spans
    batch, head = data.draw(st.integers(0, kept.shape[0] - 1)), data.draw(st.integers(0, kept.shape[1] - 1))
    part = exact[batch, head, slice(*rows), slice(*cols)]
    for _ in range(2):  # the second time from what is remembered
        ours = statistics.compute_pooled_map(kept, batch=batch, head=head, rows=rows, cols=slice(*cols), size=size)
        torch.testing.assert_close(ours, pooled(part, size))
    every = statistics.compute_pooled_map(kept, batch=None, head=None, size=size)
    torch.testing.assert_close(every[batch, head], pooled(exact[batch, head], size))


@in_strips
@few
@given(attentions(), st.integers(1, 9))
def test_the_largest_weights_and_their_places(made: tuple[CapturedAttention, Tensor], k: int) -> None:
    kept, exact = made
    most = min(k, kept.shape[3])
    weights, places = statistics.find_top_keys(kept, k, batch=None)
    torch.testing.assert_close(weights, exact.topk(most).values)
    there = places >= 0
    torch.testing.assert_close(exact.gather(-1, places.clamp(min=0)).where(there, 0.0), weights)
    assert (there == (weights > 0)).all()
    assert all(len(set(row[row >= 0].tolist())) == int((row >= 0).sum()) for row in places.flatten(0, -2))


@in_strips
@few
@given(attentions())
def test_how_far_attention_goes(made: tuple[CapturedAttention, Tensor]) -> None:
    kept, exact = made
    rows, cols = kept.shape[2:]
    apart = (torch.arange(rows)[:, None] + (kept.diagonal or 0) - torch.arange(cols)).abs()
    profile = statistics.compute_distance_profile(kept, batch=None)
    assert profile.shape[-1] == apart.max() + 1
    expected = [exact.masked_fill(apart != d, 0).sum((-1, -2)) / rows for d in range(profile.shape[-1])]
    torch.testing.assert_close(profile, torch.stack(expected, -1))


@in_strips
@few
@given(st.lists(attentions(square=True), min_size=1, max_size=3), st.sampled_from([0.0, 0.5, 1.0]), st.data())
def test_rollout_is_the_product_of_the_layers(
    made: list[tuple[CapturedAttention, Tensor]], share: float, data: st.DataObject
) -> None:
    shape = made[0][0].shape
    made = [(kept, exact) for kept, exact in made if (kept.shape[0], *kept.shape[2:]) == (shape[0], *shape[2:])]
    entry, n = data.draw(st.integers(0, shape[0] - 1)), shape[2]
    product = torch.eye(n, dtype=torch.float64)
    for _, exact in made:
        mean = exact[entry].mean(0)
        product = ((1 - share) * mean + (1 - (1 - share) * mean.sum(-1)).diag()) @ product
    layers = [kept for kept, _ in made]
    first = data.draw(st.integers(0, n - 1))
    rows, size = (first, data.draw(st.integers(first + 1, n))), data.draw(st.integers(1, 9))
    common = {"batch": entry, "residual": share}
    torch.testing.assert_close(rollout.compute_rollout(layers, **common), product)
    torch.testing.assert_close(product.sum(-1), torch.ones(n, dtype=torch.float64))
    torch.testing.assert_close(rollout.compute_rollout(layers, rows=rows, **common), product[slice(*rows)])
    torch.testing.assert_close(
        rollout.compute_rollout(layers, rows=rows, size=size, **common),
        pooled(product[slice(*rows)], (size, size)),
    )


# --- choices and mistakes -----------------------------------------------------------------------------------


def some() -> CapturedAttention:
    return CapturedAttention(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4))


def test_a_number_drops_its_axis_and_a_list_keeps_it() -> None:
    kept = some()
    assert statistics.compute_pooled_map(kept).shape == (5, 7)
    assert statistics.compute_pooled_map(kept, head=[2]).shape == (1, 5, 7)
    assert statistics.compute_pooled_map(kept, batch=None, head=None, size=(2, 3)).shape == (2, 3, 2, 3)
    assert statistics.compute_received_weight(kept).shape == (3, 7)
    assert statistics.compute_received_weight(kept, batch=None, head=-1).shape == (2, 7)
    assert statistics.compute_entropy(kept, batch=1, head=torch.tensor([0, 2])).shape == (2, 5)
    assert statistics.compute_entropy(kept, head=torch.tensor(1)).shape == (5,)
    assert [x.shape for x in statistics.find_top_keys(kept, 2, batch=None, head=0)] == [(2, 5, 2)] * 2
    assert [x.shape for x in statistics.find_top_keys(kept, 99)] == [(3, 5, 7)] * 2
    assert statistics.compute_distance_profile(kept).shape == (3, 7)
    assert statistics.compute_pooled_map(kept, rows=2, cols=(3, 99)).shape == (1, 4)


def test_nothing_to_look_at() -> None:
    kept = CapturedAttention(torch.randn(1, 2, 0, 4), torch.randn(1, 2, 7, 4))
    assert statistics.compute_weights(kept).shape == (1, 2, 0, 7)
    assert statistics.compute_pooled_map(kept).shape == (0, 7)
    assert not statistics.compute_received_weight(kept).any()
    kept = CapturedAttention(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 0, 4))
    assert statistics.compute_weights(kept).shape == (1, 2, 5, 0)
    assert statistics.compute_pooled_map(kept).shape == (5, 0)
    assert not statistics.compute_entropy(kept).any()
    assert statistics.find_top_keys(kept, 3)[0].shape == (2, 5, 0)
    assert not statistics.compute_distance_profile(kept).any()


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda kept: statistics.compute_pooled_map(kept, head=3), "0 to 2"),
        (lambda kept: statistics.compute_pooled_map(kept, batch=-3), "0 to 1"),
        (lambda kept: statistics.compute_pooled_map(kept, head="first"), "integers"),
        (lambda kept: statistics.compute_pooled_map(kept, head=1.5), "integer"),
        (lambda kept: statistics.compute_pooled_map(kept, size=0), "number of cells"),
        (lambda kept: statistics.compute_pooled_map(kept, size=(3, 4, 5)), "number of cells"),
        (lambda kept: statistics.compute_pooled_map(kept, rows=slice(0, 5, 2)), "no gaps"),
        (lambda kept: statistics.compute_pooled_map(kept, rows=(1, 2, 3)), "one after the last"),
        (lambda kept: statistics.compute_weights(kept, rows=[0, 5]), "0 to 4"),
        (lambda kept: statistics.find_top_keys(kept, 0), "at least one"),
        (lambda kept: rollout.compute_rollout([kept]), "5 queries and 7 keys"),
        (lambda kept: rollout.compute_rollout([]), "at least one"),
        (lambda kept: rollout.compute_rollout([by_hand()], residual=2), "from 0 to 1"),
        (
            lambda kept: rollout.compute_rollout([by_hand(), CapturedAttention(kept.query, kept.query)]),
            "over 5 positions",
        ),
        (lambda kept: statistics.compute_weights(kept, head=[True, False]), "head=True came; integers"),
        (
            lambda kept: statistics.compute_pooled_map(kept, rows=(5, 2)),
            r"rows=\(5, 2\) came, which is empty",
        ),
        (
            lambda kept: statistics.compute_pooled_map(kept, cols=(3, 3)),
            r"cols=\(3, 3\) came, which is empty",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_would_be_right(ask, says: str) -> None:
    with pytest.raises(InputError, match=says):
        ask(some())


# --- memory -------------------------------------------------------------------------------------------------

MEASURE = """
import sys, torch
from jumok.look.views import statistics as views
from jumok.look.capture.captured_attention import CapturedAttention
torch.set_num_threads(1)
made = torch.randn(2, 1, 8, 8192, 64)
kept = CapturedAttention(made[0], made[1], scale=0.125, diagonal=int(sys.argv[2]) if sys.argv[2:] else None)
views.compute_pooled_map(kept, rows=(0, 8), cols=(0, 8))  # what is loaded once

def memory(of):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(of)) / 1024

with open("/proc/self/clear_refs", "w") as forget:
    forget.write("5")  # the peak so far
before = memory("VmRSS")
getattr(views, sys.argv[1])(kept, **{"compute_pooled_map": {"head": None}}.get(sys.argv[1], {}))
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measured as Linux counts")
@pytest.mark.parametrize("arguments", [["compute_pooled_map", "0"], ["compute_distance_profile"]], ids=" ".join)
def test_8192_tokens_and_8_heads_take_less_than_200_mib(arguments: list[str]) -> None:
    """The weights would be 2 GiB. Measured is the peak of a process beyond what it held before."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 10 < float(done.stdout) < 200
