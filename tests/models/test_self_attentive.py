"""The structured self-attentive embedding: by hand, beside loops written from the paper, against itself."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

import jumok
from jumok.attention import masks
from jumok.batches.text import ClassificationBatch, TextBatch, TextPairBatch
from jumok.batches.tokens import IGNORE, PAD, Tokens
from jumok.models import self_attentive
from jumok.models.layers.recurrent import run_rnn_on_tokens
from jumok.models.self_attentive import PrunedHiddenLayer, SelfAttentiveClassifier, SelfAttentiveConfig
from jumok.training.prefetch import map_tensors

pytestmark = pytest.mark.long


WORDS, CLASSES = 23, 5
SMALL = SelfAttentiveConfig(
    embedding_width=7,
    width=3,
    attention_width=11,
    num_hops=4,
    mlp_width=13,
    pair_width=5,
    redundancy_penalty=0.3,
    dropout=0.0,
)
FIRST = [[4, 9, 5], [7], [10, 6, 8, 8, 21, 4, 5]]
SECOND = [[20, 5], [4, 7, 9, 11], [13]]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def small(classes: int = CLASSES, **changes: Any) -> SelfAttentiveClassifier:
    torch.manual_seed(0)
    model = SelfAttentiveClassifier(dataclasses.replace(SMALL, **changes), WORDS, classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)  # biases too, that begin at 0
    return model.double().eval()


def texts(labels: Any = (2, 0, 4), **more: Any) -> ClassificationBatch:
    return ClassificationBatch.from_sequences(FIRST, labels=labels, **more)


def pairs(labels: Any = (2, 0, 4), **more: Any) -> TextPairBatch:
    return TextPairBatch.from_sequences(FIRST, second_tokens=SECOND, labels=labels, **more)


def gradients(model: nn.Module, batch: ClassificationBatch) -> dict[str, Tensor]:
    model.zero_grad()
    model.loss(batch).total.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


# ---------------------------------------------------------------------------------- from the paper


def hops_of(model: SelfAttentiveClassifier, ids: list[int]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """A and M of one text as numbers in lists: a row a hop."""
    words = model.embedding(torch.tensor([ids]))
    h = model.encoder(words)[0][0].unbind()
    attention_weights, seen = [], []
    for query in model.attention.queries:
        scores = []
        for state in h:
            key = [
                torch.tanh(row @ state + b)
                for row, b in zip(model.attention.key.weight, model.attention.key.bias, strict=True)
            ]
            scores.append(sum(q * k for q, k in zip(query, key, strict=True)).exp())
        a = [score / sum(scores) for score in scores]
        attention_weights.append(a)
        mixed = sum(weight * state for weight, state in zip(a, h, strict=True))
        seen.append(list(mixed))
    return attention_weights, seen


def overlap_of(attention_weights: list[list[Tensor]]) -> Any:
    total: Any = 0.0
    for i, one in enumerate(attention_weights):
        for j, other in enumerate(attention_weights):
            product = sum(x * y for x, y in zip(one, other, strict=True))
            total = total + (product - (1.0 if i == j else 0.0)) ** 2
    return total


def hidden_of(model: SelfAttentiveClassifier, matrix: list[list[Tensor]]) -> list[Tensor]:
    """The hidden units of one matrix, unit by unit."""
    hidden = model.hidden
    if not isinstance(hidden, PrunedHiddenLayer):
        linear: Any = hidden[1]
        flat = [x for row in matrix for x in row]
        sums = [
            sum(w * x for w, x in zip(weights, flat, strict=True)) + b
            for weights, b in zip(linear.weight, linear.bias, strict=True)
        ]
        return [x.clamp(min=0) for x in sums]
    sums = []
    for i, row in enumerate(matrix):  # the units of each row
        for unit in range(hidden.row_weight.shape[2]):
            sums.append(sum(x * hidden.row_weight[i, j, unit] for j, x in enumerate(row)))
    for j, column in enumerate(zip(*matrix, strict=True)):
        for unit in range(hidden.column_weight.shape[2]):
            sums.append(sum(x * hidden.column_weight[j, i, unit] for i, x in enumerate(column)))
    return [(x + b).clamp(min=0) for x, b in zip(sums, hidden.bias, strict=True)]


def naive(model: SelfAttentiveClassifier, batch: ClassificationBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, summed error, and summed penalty: text by text, number by number."""
    logits, overlaps = [], []
    for n, first in enumerate(FIRST):
        attention_weights, matrix = hops_of(model, first)
        overlap = overlap_of(attention_weights)
        if model.factors is not None:
            other_looked, other = hops_of(model, SECOND[n])
            overlap = overlap + overlap_of(other_looked)
            u, v = model.factors.first_weight, model.factors.second_weight
            matrix = [
                [
                    sum(matrix[i][d] * u[i, d, g] for d in range(u.shape[1]))
                    * sum(other[i][d] * v[i, d, g] for d in range(v.shape[1]))
                    for g in range(u.shape[2])
                ]
                for i in range(len(matrix))
            ]
        hidden = torch.stack(hidden_of(model, matrix))
        logits.append(model.output.weight @ hidden + model.output.bias)
        overlaps.append(overlap)
    error: Any = 0.0
    penalty: Any = 0.0
    for one, label, overlap in zip(logits, batch.labels.tolist(), overlaps, strict=True):
        if label == IGNORE or math.isnan(label):
            continue
        error = error + ((one[0] - label) ** 2 if len(one) == 1 else -one.log_softmax(0)[label])
        penalty = penalty + SMALL.redundancy_penalty * overlap
    return torch.stack(logits), error, penalty


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("pruned", [{}, {"row_units": 3, "column_units": 2}], ids=str)
@pytest.mark.parametrize("paired", [False, True], ids=["texts", "pairs"])
def test_equals_a_naive_implementation_of_the_paper(cell: str, pruned: dict[str, int], paired: bool) -> None:
    model = small(cell=cell, text_pairs=paired, **pruned)
    batch = (pairs if paired else texts)((2, IGNORE, 4))
    loss = model.loss(batch)
    logits, error, penalty = naive(model, batch)
    torch.testing.assert_close(model.logits(batch), logits, **EXACT)
    torch.testing.assert_close(loss.total, error + penalty, **EXACT)
    torch.testing.assert_close(loss.parts["nll"], error.detach(), **EXACT)
    torch.testing.assert_close(loss.parts["redundancy"], penalty.detach(), **EXACT)
    assert loss.count == batch.count == 2
    ours = gradients(model, batch)
    model.zero_grad()
    (error + penalty).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, **EXACT)


def test_one_class_is_regression() -> None:
    model = small(classes=1)
    batch = texts([0.5, float("nan"), -3.0])
    loss = model.loss(batch)
    logits, error, penalty = naive(model, batch)
    torch.testing.assert_close(model.logits(batch), logits, **EXACT)
    torch.testing.assert_close(loss.total, error + penalty, **EXACT)
    assert (loss.count, sorted(loss.parts)) == (2, ["error", "redundancy"])
    assert all(x.isfinite().all() for x in gradients(model, batch).values())


# ----------------------------------------------------------------------------------------- by hand


def test_penalty_by_hand() -> None:
    apart = torch.eye(3)[None]  # three hops at three words: A Aᵀ = I
    same = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])  # six cells off the diagonal
    everywhere = torch.full((1, 2, 4), 0.25)  # every cell ¼: 2 · (¾)² + 2 · (¼)²
    assert self_attentive._compute_overlap(apart).tolist() == [0.0]
    assert self_attentive._compute_overlap(same).tolist() == [6.0]
    assert self_attentive._compute_overlap(everywhere).tolist() == [1.25]


def test_hops_attend_to_their_queries() -> None:
    hops = self_attentive.MultiHopAttention(2, input_width=2, width=2)
    with torch.no_grad():
        hops.key.weight.copy_(torch.eye(2) * 100)  # keys are the states' signs
        hops.queries.copy_(torch.tensor([[math.log(3), 0.0], [0.0, 0.0]]))
    states = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]])
    seen, attention_weights = hops(states, masks.padding([2]))
    torch.testing.assert_close(attention_weights, torch.tensor([[[0.75, 0.25, 0.0], [0.5, 0.5, 0.0]]]))
    torch.testing.assert_close(seen, torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]))


def test_pruned_units_read_a_row_or_a_column() -> None:
    model = small(row_units=3, column_units=2)
    assert isinstance(model.hidden, PrunedHiddenLayer)
    matrix = torch.randn(4, 6, dtype=torch.double)

    def reach(x: Tensor) -> Tensor:
        hidden = model.hidden
        assert isinstance(hidden, PrunedHiddenLayer)
        hidden.bias.data.fill_(100.0)  # no unit is at rest
        return hidden(x[None])[0]

    slopes = torch.autograd.functional.jacobian(reach, matrix)  # (units, 4, 6)
    connected = slopes != 0
    expected = torch.zeros_like(connected)
    for unit in range(4 * 3):
        expected[unit, unit // 3, :] = True
    for unit in range(6 * 2):
        expected[4 * 3 + unit, :, unit // 2] = True
    assert torch.equal(connected, expected)
    weights = model.hidden.row_weight.numel() + model.hidden.column_weight.numel()
    assert weights == int(connected.sum()) == 4 * 6 * (3 + 2)
    assert model.output.in_features == 4 * 3 + 6 * 2


def test_parameter_counts_of_the_published_sizes() -> None:
    published = SelfAttentiveConfig(embedding_width=100, width=300, attention_width=350, num_hops=30, mlp_width=3000)
    with torch.device("meta"):
        full = SelfAttentiveClassifier(published, 10, 5)
        pruned = SelfAttentiveClassifier(dataclasses.replace(published, row_units=25, column_units=2), 10, 5)
    first: Any = full.hidden[1]  # type: ignore[index]
    assert first.weight.numel() == 54_000_000
    assert isinstance(pruned.hidden, PrunedHiddenLayer)
    assert pruned.hidden.num_units == 30 * 25 + 600 * 2
    assert pruned.hidden.row_weight.numel() + pruned.hidden.column_weight.numel() == 30 * 600 * 27


# ------------------------------------------------------------------------------- padding and layouts


@pytest.mark.parametrize("alike", [False, True], ids=["host", "alike"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@settings(deadline=None, max_examples=6)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    wider=st.integers(0, 3),
)
def test_padding_changes_nothing(cell: str, alike: bool, lengths: list[tuple[int, int]], wider: int) -> None:
    model = small(cell=cell, text_pairs=True, num_layers=2)
    with torch.no_grad():
        model.embedding.weight[PAD] = torch.nan  # no text has it
    rows = [[[int(x) for x in torch.randint(1, WORDS, (n,))] for n in side] for side in zip(*lengths, strict=True)]
    labels = [n % CLASSES for n in range(len(lengths))]
    one_by_one = [
        TextPairBatch.from_sequences([a], second_tokens=[b], labels=[c]) for a, b, c in zip(*rows, labels, strict=True)
    ]
    batch = TextPairBatch.from_sequences(rows[0], second_tokens=rows[1], labels=labels)
    wide = [Tokens.pad(side, min_length=max(map(len, side)) + wider) for side in rows]
    batch = dataclasses.replace(batch, tokens=wide[0], second_tokens=wide[1])
    batch = batch.with_static_shapes() if alike else batch
    torch.testing.assert_close(model.logits(batch), torch.cat([model.logits(x) for x in one_by_one]), **EXACT)
    total = sum(model.loss(x).total for x in one_by_one)
    torch.testing.assert_close(model.loss(batch).total, total, **EXACT)
    for slope in gradients(model, batch).values():
        assert slope.isfinite().all()
    for side, shown in zip(rows, model.compute_attention_maps(batch), strict=True):
        for text, weights in zip(side, shown.weights, strict=True):
            assert (weights[..., len(text) :] == 0).all()


def test_padding_texts_do_not_count() -> None:
    model = small()
    filled = Tokens.pad([*FIRST, [PAD], [PAD]])
    segments = torch.zeros_like(filled.ids)
    labels = torch.tensor([2, 0, 4, IGNORE, IGNORE])
    batch = ClassificationBatch(tokens=filled, segments=segments, labels=labels, count=3)
    for one in (batch, batch.with_static_shapes(), dataclasses.replace(batch, labels=labels[:3])):
        torch.testing.assert_close(model.loss(one).total, model.loss(texts()).total, **EXACT)
        assert model.logits(one).shape == (5, CLASSES)


@pytest.mark.parametrize("alike", [False, True], ids=["host", "alike"])
def test_empty_texts_equal_padding(alike: bool) -> None:
    model = small()
    empty, padding = (ClassificationBatch.from_sequences([[4, 9], no_words], labels=[1, 2]) for no_words in ([], [PAD]))
    empty = empty.with_static_shapes() if alike else empty
    torch.testing.assert_close(model.logits(empty), model.logits(padding), **EXACT)
    assert all(slope.isfinite().all() for slope in gradients(model, empty).values())
    nothing = ClassificationBatch.from_sequences([[], []], labels=[1, 2])
    assert model.logits(nothing.with_static_shapes() if alike else nothing).isfinite().all()
    assert model.compute_attention_maps(nothing)[0].weights.shape == (2, 4, 1, 1)


def test_static_batches_do_not_synchronize() -> None:
    """What a graph replays: the tensors of another batch, with the lengths of the one that it was made of."""
    model = small(text_pairs=True)
    mine = pairs().with_static_shapes()
    others = TextPairBatch.from_sequences(
        FIRST[::-1], second_tokens=SECOND[::-1], labels=[1, IGNORE, 3]
    ).with_static_shapes()
    assert mine.graph_key == others.graph_key
    new: list[Tensor] = []
    map_tensors(others, lambda x: new.append(x) or x)  # type: ignore[func-returns-value]
    copied = iter(new)
    replayed = map_tensors(mine, lambda _: next(copied))
    assert replayed.tokens.lengths == mine.tokens.lengths != others.tokens.lengths
    torch.testing.assert_close(model.loss(replayed).total, model.loss(others).total, **EXACT)


@pytest.mark.parametrize("pruned", [{}, {"row_units": 3, "column_units": 2}], ids=str)
def test_no_synchronization_with_the_host(pruned: dict[str, int]) -> None:
    """On a device that has none, to ask for one is an error."""
    model = small(text_pairs=True, **pruned).train().to("meta")
    loss = model.loss(pairs().with_static_shapes().to("meta"))
    loss.total.backward()
    assert loss.total.is_meta
    with pytest.raises(RuntimeError, match="meta"):
        loss.total.item()


# ------------------------------------------------------------------------------------- to be seen


def test_maps_are_the_weights_of_the_forward_pass() -> None:
    model = small()
    batch = texts()
    (shown,) = model.compute_attention_maps(batch)
    assert shown.name in dict(model.named_modules())
    assert shown.weights.shape == (3, 4, 1, 7)
    matrix, attention_weights = model.embed(batch.tokens)
    torch.testing.assert_close(shown.weights[:, :, 0], attention_weights, **EXACT)
    states, _ = run_rnn_on_tokens(model.encoder, model.embedding(batch.tokens.ids), batch.tokens)
    torch.testing.assert_close(shown.weights[:, :, 0] @ states, matrix, **EXACT)
    assert not shown.weights.requires_grad


def test_watch_captures_the_hops() -> None:
    model = small()
    batch = texts()
    expected = model.logits(batch)
    with jumok.watch(model) as seen:
        assert torch.equal(model.logits(batch), expected)
    assert len(seen) == 1
    assert seen[0].name == "attention"
    torch.testing.assert_close(
        seen[0].weights().squeeze(1), model.compute_attention_maps(batch)[0].weights[:, :, 0], **EXACT
    )


# ------------------------------------------------------------------------------------ in training


@pytest.mark.parametrize("paired", [False, True], ids=["texts", "pairs"])
def test_autocast_changes_predictions_little(paired: bool) -> None:
    model = small(text_pairs=paired, row_units=2, column_units=1).float()
    batch = (pairs if paired else texts)()
    exact = model.loss(batch)
    slopes = gradients(model, batch)
    for one in (batch, batch.with_static_shapes()):
        with torch.autocast("cpu", torch.bfloat16):
            rough = model.loss(one)
            assert model.logits(one).dtype == torch.bfloat16
        assert rough.total.dtype == torch.float32
        assert rough.total.item() == pytest.approx(exact.total.item(), rel=0.02)
        model.zero_grad()
        rough.total.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            error = (parameter.grad - slopes[name]).norm() / (slopes[name].norm() + 1e-3)
            assert error < 0.1, name


def test_learns_to_attend_to_the_deciding_word() -> None:
    """Words 4 to 8 are the classes; one of them stands among others."""
    torch.manual_seed(0)
    model = SelfAttentiveClassifier(
        SelfAttentiveConfig(embedding_width=16, width=8, attention_width=16, num_hops=2, mlp_width=32),
        WORDS,
        CLASSES,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def drawn(count: int) -> tuple[ClassificationBatch, Tensor]:
        labels, lengths = torch.randint(CLASSES, (count,)), torch.randint(3, 12, (count,))
        places = [int(torch.randint(int(n), ())) for n in lengths]
        rows = [torch.randint(9, WORDS, (int(n),)).tolist() for n in lengths]
        for row, place, label in zip(rows, places, labels.tolist(), strict=True):
            row[place] = 4 + label
        return ClassificationBatch.from_sequences(rows, labels=labels), torch.tensor(places)

    for _ in range(120):
        batch, _ = drawn(32)
        optimizer.zero_grad()
        loss = model.loss(batch)
        (loss.total / loss.count).backward()
        optimizer.step()
    model.eval()
    batch, places = drawn(200)
    assert (model.logits(batch).argmax(-1) == batch.labels).float().mean() > 0.97
    best_hop = model.compute_attention_maps(batch)[0].weights[:, :, 0].argmax(-1) == places[:, None]
    assert best_hop.any(-1).float().mean() > 0.9


def test_dropout_is_for_training_only() -> None:
    model = small(dropout=0.5)
    batch = texts()
    assert torch.equal(model.logits(batch), model.logits(batch))
    model.train()
    dropped: list[torch.Size] = []
    model.dropout.register_forward_hook(lambda _, given, out: dropped.append(out.shape))
    assert not torch.equal(model.logits(batch), model.logits(batch))
    assert dropped[:3] == [(3, 7, 7), (3, 4, 6), (3, 13)]  # embeddings, matrices, hidden units


# ------------------------------------------------------------------------------------- what is wrong


def test_invalid_batches_raise() -> None:
    with pytest.raises(ValueError, match="packed=False"):
        small().logits(texts(packed=True))
    with pytest.raises(ValueError, match="has pairs of texts, but the model has text_pairs=False"):
        small().loss(pairs())
    with pytest.raises(ValueError, match="has single texts, but the model has text_pairs=True"):
        small(text_pairs=True).loss(texts())
    with pytest.raises(ValueError, match="batch is empty"):
        small().logits(TextBatch.from_sequences([]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hops": 0}, "num_hops=0: 1 or more"),
        ({"redundancy_penalty": -1.0}, "redundancy_penalty=-1.0: 0 or more"),
        ({"redundancy_penalty": float("nan")}, "redundancy_penalty=nan: 0 or more"),
        ({"row_units": -1}, "row_units=-1: 0 or more"),
        ({"dropout": 1.0}, "dropout=1.0: a number from 0"),
        ({"row_units": 3}, "row_units=3 with column_units=0"),
    ],
)
def test_invalid_sizes_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_the_config_is_validated_by_pydantic() -> None:
    adapter = TypeAdapter(SelfAttentiveConfig)
    assert adapter.validate_python({"type": "self_attentive", "num_hops": 3}) == SelfAttentiveConfig(num_hops=3)
    with pytest.raises(ValidationError, match="hop"):
        adapter.validate_python({"hop": 3})
