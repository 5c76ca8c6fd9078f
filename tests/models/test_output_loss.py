"""The loss of the output layer, beside ``F.cross_entropy`` of all logits at once."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.batches.tokens import IGNORE, Seq2SeqBatch
from jumok.models.layers import output_loss
from jumok.models.layers.output_loss import linear_cross_entropy, select_labelled

N, D, V = 11, 5, 17


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((N, D), (V, D), (V,)))
    labels = torch.randint(V, (N,))
    labels[[0, 4, 10]] = IGNORE
    return hidden, weight, bias, labels


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of)


@pytest.fixture(params=[1, 3 * V, 1 << 20], ids=["a row at a time", "three rows", "all at once"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_loss, "MAX_LOGITS_ON_CPU", request.param)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_cross_entropy_in_value_and_gradients(smoothing: float, with_bias: bool) -> None:
    hidden, weight, bias, labels = inputs()
    of = [x.requires_grad_() for x in ([hidden, weight, bias] if with_bias else [hidden, weight])]
    total, plain = linear_cross_entropy(hidden, weight, labels, smoothing, bias if with_bias else None)
    logits = F.linear(hidden, weight, bias if with_bias else None)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(plain, F.cross_entropy(logits, labels, reduction="sum").detach())
    for got, want in zip(gradients(total / 3, *of), gradients(expected / 3, *of), strict=True):
        torch.testing.assert_close(got, want)


def test_by_hand() -> None:
    # Logits 0 and log 3: the words have the probabilities 1/4 and 3/4.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    total, plain = linear_cross_entropy(hidden, weight, torch.tensor([1]), smoothing=0.5)
    assert plain.item() == pytest.approx(math.log(4 / 3))
    # Of the label, 3/4 are on its word and 1/4 on the other.
    assert total.item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))


def test_only_the_first_sum_has_a_graph() -> None:
    hidden, weight, _, labels = inputs()
    total, plain = linear_cross_entropy(hidden.requires_grad_(), weight, labels, 0.1)
    assert total.requires_grad
    assert not plain.requires_grad
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels, 0.1)[0].requires_grad


def test_two_backward_passes_accumulate() -> None:
    hidden, weight, _, labels = inputs()
    total, _ = linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    (once,) = torch.autograd.grad(total, hidden, retain_graph=True)
    (twice,) = torch.autograd.grad(2 * total, hidden)
    torch.testing.assert_close(twice, 2 * once)


def test_ignored_rows_may_be_nan() -> None:
    hidden, weight, _, labels = inputs()
    clean, _ = linear_cross_entropy(hidden, weight, labels, 0.1)
    hidden[labels == IGNORE] = float("nan")
    total, plain = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels, 0.1)
    torch.testing.assert_close(total.detach(), clean)
    assert plain.isfinite()
    by_hidden, by_weight = gradients(total, hidden, weight)
    assert not by_hidden[labels == IGNORE].any()
    assert by_weight.isfinite().all()


def test_no_labels_give_zero_loss() -> None:
    hidden, weight, _, labels = inputs()
    total, _ = linear_cross_entropy(hidden.requires_grad_(), weight, torch.full_like(labels, IGNORE), 0.1)
    assert total.item() == 0
    assert not gradients(total, hidden)[0].any()
    assert linear_cross_entropy(hidden[:0], weight, labels[:0])[0].item() == 0


def test_confident_wrong_predictions_stay_finite() -> None:
    hidden, weight = torch.tensor([[1.0]], requires_grad=True), torch.tensor([[0.0], [300.0]])
    total, _ = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    assert total.item() == 300
    assert gradients(total, hidden)[0].item() == 300


def test_autocast_sums_in_float32() -> None:
    hidden, weight, bias, labels = inputs(torch.float32)
    for x in (hidden, weight, bias):
        x.requires_grad_()
    exact, _ = linear_cross_entropy(hidden, weight, labels, 0.1, bias)
    with torch.autocast("cpu", torch.bfloat16):
        total, plain = linear_cross_entropy(hidden, weight, labels, 0.1, bias)
    assert total.dtype == plain.dtype == torch.float32
    torch.testing.assert_close(total, exact, rtol=0.01, atol=0.05)
    for got, want in zip(gradients(total, hidden, weight, bias), gradients(exact, hidden, weight, bias), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("to", [0, 7])
def test_padding_is_skipped(to: int) -> None:
    batch = Seq2SeqBatch.from_sequences([[4]] * 3, [[5, 6], [7], [8, 9, 10]], min_lengths=(0, to))
    length = batch.labels.shape[1]
    hidden = torch.arange(3 * length * 2.0).view(3, length, 2)
    kept, labels = select_labelled(hidden, batch)
    assert labels.tolist() == [5, 6, 3, 7, 3, 8, 9, 10, 3]
    assert len(labels) == batch.count
    rows = [0, 1, 2, length, length + 1, *range(2 * length, 2 * length + 4)]
    assert torch.equal(kept, hidden.flatten(0, 1)[rows])


def test_without_padding_no_copy_is_made() -> None:
    for batch in (
        Seq2SeqBatch.from_sequences([[4]] * 2, [[5, 6], [7, 8]]),
        Seq2SeqBatch.from_sequences([[4]] * 2, [[5], [7, 8]], packed=True),
    ):
        hidden = torch.zeros(*batch.labels.shape, 2)
        kept, labels = select_labelled(hidden, batch)
        assert kept.data_ptr() == hidden.data_ptr()
        assert torch.equal(labels, batch.labels.flatten())
