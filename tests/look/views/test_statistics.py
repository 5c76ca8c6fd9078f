"""Statistics are equal to those computed from all weights in float64, and memory is bounded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.views import rollout, row_chunks, statistics

pytestmark = pytest.mark.long


hypothesis = pytest.importorskip("hypothesis", reason="the property tests need Hypothesis")
given, st = hypothesis.given, hypothesis.strategies
few_examples = hypothesis.settings(max_examples=40)


@st.composite
def attentions(draw: st.DrawFn, square: bool = False) -> tuple[CapturedAttention, Tensor]:
    """An attention, and its weights (B, H, Q, K) by the formula."""
    batch, group, grouped, width = (draw(st.integers(1, n)) for n in (2, 3, 2, 5))
    rows, cols = draw(st.integers(1, 23)), draw(st.integers(1, 29))
    cols = rows if square else cols
    heads, scale = group * grouped, draw(st.sampled_from([0.1, 1.0, 5.0]))
    torch.manual_seed(draw(st.integers(0, 99)))
    query = torch.randn(batch, heads, rows, width, dtype=torch.float64)
    key = torch.randn(batch, grouped, cols, width, dtype=torch.float64)
    scores = scale * query @ key.repeat_interleave(group, 1).mT
    options: dict[str, object] = {}
    if draw(st.booleans()):
        options["softcap"] = 3.0
        scores = 3 * torch.tanh(scores / 3)
    i, j = torch.arange(rows)[:, None], torch.arange(cols)
    if draw(st.booleans()):
        options["diagonal"] = diagonal = draw(st.integers(-rows, cols))
        scores = scores.masked_fill(j > i + diagonal, -torch.inf)
        if draw(st.booleans()):
            options["window"] = window = draw(st.integers(1, cols + 3))
            scores = scores.masked_fill(j <= i + diagonal - window, -torch.inf)
    kind = draw(st.sampled_from(["none", "bool", "numbers", "change"]))
    shape = [draw(st.sampled_from([1, n])) for n in (batch, heads, rows, cols)]
    if kind == "bool":
        options["mask"] = mask = torch.rand(shape) < 0.7
        scores = scores.masked_fill(~mask, -torch.inf)
    if kind == "numbers":
        options["mask"] = mask = torch.randn(shape).double().masked_fill(torch.rand(shape) < 0.2, -torch.inf)
        scores = scores + mask
    if kind == "change":
        options["score_mod"] = lambda s, b, h, q, k: torch.where((q + k) % 3 > 0, s + 0.1 * h * k, -torch.inf)
        h = torch.arange(heads)[:, None, None]
        scores = torch.where((i + j) % 3 > 0, scores + 0.1 * h * j, -torch.inf)
    if draw(st.booleans()):
        options["lse"] = scores.logsumexp(-1)
    return CapturedAttention(query, key, scale=scale, **options), scores.softmax(-1).nan_to_num(0)


@pytest.fixture(params=[1 << 22, 64], ids=["whole", "chunks"], scope="module")
def chunk_size(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute in one chunk, and in many chunks of few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_chunks, "MAX_CHUNK_ELEMENTS", request.param)
        patch.setattr(row_chunks, "CACHED_CHUNK_ELEMENTS", request.param)
        patch.setattr(row_chunks, "MIN_CACHED_ROWS", 1)
        yield


in_chunks = pytest.mark.usefixtures("chunk_size")


def pool(weights: Tensor, size: tuple[int, int]) -> Tensor:
    """Pool ``(R, C)`` cell by cell."""
    (rows, cols), out = weights.shape, []
    num_rows, num_cols = min(size[0], rows), min(size[1], cols)
    for i in range(num_rows):
        cell_rows = weights[i * rows // num_rows : (i + 1) * rows // num_rows]
        for j in range(num_cols):
            out.append(cell_rows[:, j * cols // num_cols : (j + 1) * cols // num_cols].sum(-1).mean())
    return torch.stack(out).reshape(num_rows, num_cols)


# --- by hand ------------------------------------------------------------------------------------------------


def build_equal_attention() -> CapturedAttention:
    """Causal attention of three words with equal scores: [1, 0, 0], [½, ½, 0], [⅓, ⅓, ⅓]."""
    return CapturedAttention(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), diagonal=0)


@in_chunks
def test_three_words_by_hand() -> None:
    attention = build_equal_attention()
    close = {"rtol": 0, "atol": 1e-6}
    rows = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(statistics.compute_weights(attention, batch=0, head=0), rows, **close)
    torch.testing.assert_close(statistics.compute_pooled_map(attention), rows, **close)
    # Cells begin at 0 and 1; the second has two positions.
    halves = torch.tensor([[1, 0], [(1 / 2 + 1 / 3) / 2, (1 / 2 + 2 / 3) / 2]])
    torch.testing.assert_close(statistics.compute_pooled_map(attention, size=2), halves, **close)
    torch.testing.assert_close(
        statistics.compute_received_weight(attention, head=0), torch.tensor([11 / 6, 5 / 6, 1 / 3]), **close
    )
    torch.testing.assert_close(
        statistics.compute_entropy(attention, head=0), torch.tensor([0, 0.693147, 1.098612]), **close
    )
    torch.testing.assert_close(
        statistics.compute_distance_profile(attention, head=0), torch.tensor([11 / 18, 5 / 18, 1 / 9]), **close
    )
    weights, positions = statistics.find_top_keys(attention, 2)
    torch.testing.assert_close(weights[0], torch.tensor([[1, 0], [1 / 2, 1 / 2], [1 / 3, 1 / 3]]), **close)
    assert positions[0, 0].tolist() == [0, -1]
    mixed = (rows + torch.eye(3)) / 2
    torch.testing.assert_close(rollout.compute_rollout([attention, attention]), mixed @ mixed, **close)
    torch.testing.assert_close(rollout.compute_rollout([attention], residual=0), rows, **close)


# --- properties ---------------------------------------------------------------------------------------------


@in_chunks
@few_examples
@given(attentions())
def test_weights_and_sums(example: tuple[CapturedAttention, Tensor]) -> None:
    attention, exact = example
    torch.testing.assert_close(statistics.compute_weights(attention), exact)
    torch.testing.assert_close(statistics.compute_received_weight(attention, batch=None), exact.sum(-2))
    torch.testing.assert_close(statistics.compute_entropy(attention, batch=None), torch.special.entr(exact).sum(-1))
    torch.testing.assert_close(statistics.compute_sink_share(attention, batch=None), exact[..., 0])
    assert ((statistics.compute_weights(attention).sum(-1) - 1).abs() < 1e-9).logical_or(exact.sum(-1) == 0).all()


@in_chunks
@few_examples
@given(attentions(), st.data())
def test_any_part_of_the_weights(example: tuple[CapturedAttention, Tensor], data: st.DataObject) -> None:
    attention, exact = example
    index, choice = [], []
    for size in attention.shape:
        position = st.integers(-size, size - 1)
        ends = st.none() | st.integers(-size - 2, size + 2)
        slices = st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, 3]))
        choice.append(data.draw(position | st.lists(position, max_size=3) | slices))
        index.append(choice[-1] if isinstance(choice[-1], slice) else torch.tensor(choice[-1], dtype=torch.long))
    for axis in reversed(range(4)):
        exact = exact[(slice(None),) * axis + (index[axis],)]
    b, h, q, k = choice
    torch.testing.assert_close(statistics.compute_weights(attention, batch=b, head=h, rows=q, cols=k), exact)


@in_chunks
@few_examples
@given(attentions(), st.data())
def test_pooled_maps(example: tuple[CapturedAttention, Tensor], data: st.DataObject) -> None:
    attention, exact = example
    size = (data.draw(st.integers(1, 31)), data.draw(st.integers(1, 31)))
    spans = []
    for n in attention.shape[2:]:
        first = data.draw(st.integers(0, n - 1))
        spans.append((first, data.draw(st.integers(first + 1, n))))
    rows, cols = spans
    batch, head = data.draw(st.integers(0, attention.shape[0] - 1)), data.draw(st.integers(0, attention.shape[1] - 1))
    part = exact[batch, head, slice(*rows), slice(*cols)]
    for _ in range(2):  # the second time from cached row sums
        pooled_map = statistics.compute_pooled_map(
            attention, batch=batch, head=head, rows=rows, cols=slice(*cols), size=size
        )
        torch.testing.assert_close(pooled_map, pool(part, size))
    all_maps = statistics.compute_pooled_map(attention, batch=None, head=None, size=size)
    torch.testing.assert_close(all_maps[batch, head], pool(exact[batch, head], size))


@in_chunks
@few_examples
@given(attentions(), st.integers(1, 9))
def test_top_keys(example: tuple[CapturedAttention, Tensor], k: int) -> None:
    attention, exact = example
    num_keys = min(k, attention.shape[3])
    weights, positions = statistics.find_top_keys(attention, k, batch=None)
    torch.testing.assert_close(weights, exact.topk(num_keys).values)
    is_key = positions >= 0
    torch.testing.assert_close(exact.gather(-1, positions.clamp(min=0)).where(is_key, 0.0), weights)
    assert (is_key == (weights > 0)).all()
    assert all(len(set(row[row >= 0].tolist())) == int((row >= 0).sum()) for row in positions.flatten(0, -2))


@in_chunks
@few_examples
@given(attentions())
def test_distance_profile(example: tuple[CapturedAttention, Tensor]) -> None:
    attention, exact = example
    rows, cols = attention.shape[2:]
    distances = (torch.arange(rows)[:, None] + (attention.diagonal or 0) - torch.arange(cols)).abs()
    profile = statistics.compute_distance_profile(attention, batch=None)
    assert profile.shape[-1] == distances.max() + 1
    expected = [exact.masked_fill(distances != d, 0).sum((-1, -2)) / rows for d in range(profile.shape[-1])]
    torch.testing.assert_close(profile, torch.stack(expected, -1))


@in_chunks
@few_examples
@given(attentions())
def test_all_statistics_in_one_pass_are_those_of_each_alone(example: tuple[CapturedAttention, Tensor]) -> None:
    attention, _ = example
    together = statistics.compute_statistics(attention, num_top=3, batch=0, head=-1)
    alone = [
        statistics.compute_received_weight(attention, head=-1),
        statistics.compute_entropy(attention, head=-1),
        statistics.compute_distance_profile(attention, head=-1),
        statistics.compute_sink_share(attention, head=-1),
        *statistics.find_top_keys(attention, 3, head=-1),
    ]
    assert all(torch.equal(x, y) for x, y in zip(together, alone, strict=True))


@in_chunks
@few_examples
@given(st.lists(attentions(square=True), min_size=1, max_size=3), st.sampled_from([0.0, 0.5, 1.0]), st.data())
def test_rollout_is_the_product_of_the_layers(
    example: list[tuple[CapturedAttention, Tensor]], residual: float, data: st.DataObject
) -> None:
    shape = example[0][0].shape
    example = [
        (attention, exact)
        for attention, exact in example
        if (attention.shape[0], *attention.shape[2:]) == (shape[0], *shape[2:])
    ]
    batch, n = data.draw(st.integers(0, shape[0] - 1)), shape[2]
    product = torch.eye(n, dtype=torch.float64)
    for _, exact in example:
        mean = exact[batch].mean(0)
        product = ((1 - residual) * mean + (1 - (1 - residual) * mean.sum(-1)).diag()) @ product
    layers = [attention for attention, _ in example]
    first = data.draw(st.integers(0, n - 1))
    rows, size = (first, data.draw(st.integers(first + 1, n))), data.draw(st.integers(1, 9))
    common = {"batch": batch, "residual": residual}
    torch.testing.assert_close(rollout.compute_rollout(layers, **common), product)
    torch.testing.assert_close(product.sum(-1), torch.ones(n, dtype=torch.float64))
    torch.testing.assert_close(rollout.compute_rollout(layers, rows=rows, **common), product[slice(*rows)])
    torch.testing.assert_close(
        rollout.compute_rollout(layers, rows=rows, size=size, **common),
        pool(product[slice(*rows)], (size, size)),
    )


# --- indices and errors -------------------------------------------------------------------------------------


def build_attention() -> CapturedAttention:
    return CapturedAttention(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4))


def test_single_indices_drop_their_axis() -> None:
    attention = build_attention()
    assert statistics.compute_pooled_map(attention).shape == (5, 7)
    assert statistics.compute_pooled_map(attention, head=[2]).shape == (1, 5, 7)
    assert statistics.compute_pooled_map(attention, batch=None, head=None, size=(2, 3)).shape == (2, 3, 2, 3)
    assert statistics.compute_received_weight(attention).shape == (3, 7)
    assert statistics.compute_received_weight(attention, batch=None, head=-1).shape == (2, 7)
    assert statistics.compute_entropy(attention, batch=1, head=torch.tensor([0, 2])).shape == (2, 5)
    assert statistics.compute_entropy(attention, head=torch.tensor(1)).shape == (5,)
    assert [x.shape for x in statistics.find_top_keys(attention, 2, batch=None, head=0)] == [(2, 5, 2)] * 2
    assert [x.shape for x in statistics.find_top_keys(attention, 99)] == [(3, 5, 7)] * 2
    assert statistics.compute_distance_profile(attention).shape == (3, 7)
    assert statistics.compute_pooled_map(attention, rows=2, cols=(3, 99)).shape == (1, 4)


def test_empty_attention() -> None:
    attention = CapturedAttention(torch.randn(1, 2, 0, 4), torch.randn(1, 2, 7, 4))
    assert statistics.compute_weights(attention).shape == (1, 2, 0, 7)
    assert statistics.compute_pooled_map(attention).shape == (0, 7)
    assert not statistics.compute_received_weight(attention).any()
    attention = CapturedAttention(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 0, 4))
    assert statistics.compute_weights(attention).shape == (1, 2, 5, 0)
    assert statistics.compute_pooled_map(attention).shape == (5, 0)
    assert not statistics.compute_entropy(attention).any()
    assert statistics.find_top_keys(attention, 3)[0].shape == (2, 5, 0)
    assert not statistics.compute_distance_profile(attention).any()


@pytest.mark.parametrize(
    ("compute", "options", "message"),
    [
        (statistics.compute_pooled_map, {"head": 3}, "0 to 2"),
        (statistics.compute_pooled_map, {"batch": -3}, "0 to 1"),
        (statistics.compute_pooled_map, {"head": "first"}, "integers"),
        (statistics.compute_pooled_map, {"head": 1.5}, "integer"),
        (statistics.compute_pooled_map, {"size": 0}, "number of cells"),
        (statistics.compute_pooled_map, {"size": (3, 4, 5)}, "number of cells"),
        (statistics.compute_pooled_map, {"rows": slice(0, 5, 2)}, "no gaps"),
        (statistics.compute_pooled_map, {"rows": (1, 2, 3)}, "one after the last"),
        (statistics.compute_pooled_map, {"rows": (5, 2)}, r"rows=\(5, 2\) is empty"),
        (statistics.compute_pooled_map, {"cols": (3, 3)}, r"cols=\(3, 3\) is empty"),
        (statistics.compute_weights, {"rows": [0, 5]}, "0 to 4"),
        (statistics.compute_weights, {"head": [True, False]}, "head=True is invalid; integers"),
        (statistics.find_top_keys, {"k": 0}, "at least one"),
    ],
)
def test_invalid_arguments(compute: Callable[..., object], options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compute(build_attention(), **options)


def test_invalid_arguments_of_rollout() -> None:
    equal, attention = build_equal_attention(), build_attention()
    square = CapturedAttention(attention.query, attention.query)
    for layers, options, message in (
        ([attention], {}, "5 queries and 7 keys"),
        ([], {}, "at least one"),
        ([equal], {"residual": 2}, "from 0 to 1"),
        ([equal, square], {}, "over 5 positions"),
    ):
        with pytest.raises(InputError, match=message):
            rollout.compute_rollout(layers, **options)


# --- memory -------------------------------------------------------------------------------------------------

MEASURE = """
import sys, torch
from jumok.look.views import statistics as views
from jumok.look.capture.captured_attention import CapturedAttention
torch.set_num_threads(1)
query, key = torch.randn(2, 1, 8, 8192, 64)
attention = CapturedAttention(query, key, scale=0.125, diagonal=int(sys.argv[2]) if sys.argv[2:] else None)
views.compute_pooled_map(attention, rows=(0, 8), cols=(0, 8))  # load everything once

def read_memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) / 1024

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # reset the peak
before = read_memory("VmRSS")
getattr(views, sys.argv[1])(attention, **{"compute_pooled_map": {"head": None}}.get(sys.argv[1], {}))
print(read_memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("arguments", [["compute_pooled_map", "0"], ["compute_distance_profile"]], ids=" ".join)
def test_8192_tokens_and_8_heads_take_less_than_200_mib(arguments: list[str]) -> None:
    """All weights are 2 GiB. The test measures the peak of a process."""
    process = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert 4 < float(process.stdout) < 200
