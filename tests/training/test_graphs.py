"""Gradients as one CUDA graph: the same as launched, batch after batch; and without a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jumok.batch import Pairs
from jumok.errors import InputError
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jumok.training import graphs
from jumok.training.graphs import Gradients

WORDS = 23
SMALL = Seq2SeqConfig(width=7, embedding=5, dropout=0.0)


def batch(seed: int, length: int = 5, rows: int = 3) -> Pairs:
    chance = torch.Generator().manual_seed(seed)
    source, target = torch.randint(4, WORDS, (2, rows, length), generator=chance).tolist()
    return Pairs.of(source, target)


def model(device: str = "cpu") -> Seq2Seq:
    torch.manual_seed(3)
    return Seq2Seq(SMALL, WORDS, WORDS).to(device)


def objective(of: Seq2Seq) -> Callable[[Pairs], Tensor]:
    return lambda batch: of.loss(batch).total / batch.count


def plain_gradients(of: Seq2Seq, batch: Pairs) -> list[Tensor]:
    return list(torch.autograd.grad(objective(of)(batch), list(of.parameters())))


def found_gradients(of: Seq2Seq) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in of.parameters() if parameter.grad is not None]


def check(one: Seq2Seq, gradients: Gradients, batches: list[Pairs]) -> None:
    """Value and gradients of each batch, whatever was in ``grad`` before, while the weights change."""
    optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
    for number, each in enumerate(batches):
        right, value = plain_gradients(one, each), objective(one)(each).detach()
        torch.testing.assert_close(gradients(each), value)
        torch.testing.assert_close(found_gradients(one), right)
        optimizer.step()
        if number % 2:
            optimizer.zero_grad()


def test_without_a_gpu_the_gradients_are_launched() -> None:
    one = model()
    check(one, Gradients(objective(one), one.parameters(), batch(0)), [batch(seed) for seed in range(4)])


def test_a_batch_of_another_form_is_launched(pretended: list[int]) -> None:
    one = model()
    gradients = Gradients(objective(one), one.parameters(), batch(0))
    check(one, gradients, [batch(1), batch(2, length=4), batch(3, rows=2), batch(4), batch(5)])
    assert len(pretended) == 3  # replays


def test_a_value_that_was_given_stays_when_the_next_batch_comes(pretended: list[int]) -> None:
    one = model()
    gradients = Gradients(objective(one), one.parameters(), batch(0))
    first = gradients(batch(1))
    before = first.clone()
    gradients(batch(2))
    assert torch.equal(first, before)
    assert len(pretended) == 2


def test_the_example_is_left_alone(pretended: list[int]) -> None:
    one, example = model(), batch(0)
    gradients = Gradients(objective(one), one.parameters(), example)
    gradients(batch(1))
    assert torch.equal(example.source.ids, batch(0).source.ids)
    assert torch.equal(example.labels, batch(0).labels)


def test_parameters_that_do_not_learn_get_no_gradient() -> None:
    one = model()
    one.source_embedding.requires_grad_(False)
    Gradients(objective(one), one.parameters(), batch(0))(batch(1))
    assert one.source_embedding.weight.grad is None
    assert one.target_embedding.weight.grad is not None


@pytest.mark.parametrize("packed", [False, True])
def test_padding_is_refused(packed: bool) -> None:
    one = model()
    uneven = Pairs.of([[5, 6], [7]], [[8], [9]], packed=packed)
    with pytest.raises(InputError, match="neither padded nor packed"):
        Gradients(objective(one), one.parameters(), uneven)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A graph without a GPU: a replay runs all again and writes to where the first run's results are."""
    replays: list[int] = []

    def captured(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        written = run()
        parameters = run.__self__._parameters  # type: ignore[attr-defined]
        places = [parameter.grad for parameter in parameters]

        def replay() -> None:
            replays.append(1)
            written.copy_(run())
            for place, parameter in zip(places, parameters, strict=True):
                place.copy_(parameter.grad)

        return replay, written

    monkeypatch.setattr(graphs, "_captured", captured)
    monkeypatch.setattr(graphs, "_on_gpu", lambda batch: True)
    return replays


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True])
def test_a_replay_gives_what_launching_gives(low: bool) -> None:
    one = model("cuda")

    def loss(batch: Pairs) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            return one.loss(batch).total / batch.count

    gradients = Gradients(loss, one.parameters(), batch(0).to("cuda"))
    optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
    for seed in range(4):
        each = batch(seed).to("cuda")
        value = loss(each)
        right = torch.autograd.grad(value, list(one.parameters()))
        torch.testing.assert_close(gradients(each), value.detach(), rtol=1e-2 if low else 1e-5, atol=1e-5)
        for came, expected in zip(found_gradients(one), right, strict=True):
            assert (came - expected).norm() <= (2e-2 if low else 1e-4) * expected.norm() + 1e-6
        optimizer.step()
        optimizer.zero_grad()
