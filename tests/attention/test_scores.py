"""Every score: by hand, its gradients, keys prepared once, and nothing kept between calls."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jumok
from jumok import attend, masks, scores, weights

LN2 = math.log(2)
DOUBLE = torch.float64
B, Q, K, WIDTH, HIDDEN, V = 2, 3, 5, 7, 11, 13
SEVENTHS = [pytest.approx([1 / 7, 2 / 7, 4 / 7])]  # of the scores 0, ln 2 and ln 4


def set_to(parameter: nn.Parameter, numbers: list[Any]) -> None:
    with torch.no_grad():
        parameter.copy_(torch.tensor(numbers))


# ----------------------------------------------------------------------------------- by hand


def test_dot() -> None:
    query, key = torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 0.0], [0.0, LN2], [LN2, 0.0]])
    assert weights(query, key, score=scores.Dot()).tolist() == SEVENTHS


def test_scaled_dot() -> None:
    query, key = torch.tensor([[2.0, 0.0, 0.0, 0.0]]), torch.zeros(3, 4)
    key[:, 0] = torch.tensor([0.0, LN2, 2 * LN2])
    assert weights(query, key, score=scores.ScaledDot()).tolist() == SEVENTHS


def test_general() -> None:
    score = scores.General(query_width=1, key_width=2)
    set_to(score.key.weight, [[1.0, 2.0]])
    key = torch.tensor([[2.0, -1.0], [LN2, 0.0], [0.0, LN2]])
    assert weights(torch.ones(1, 1), key, score=score).tolist() == SEVENTHS


def keys_for(query: float) -> Tensor:
    """Keys of which tanh(query + key) is 0, ¼ and ½."""
    return torch.atanh(torch.tensor([[0.0], [0.25], [0.5]])) - query


def test_additive() -> None:
    score = scores.Additive(query_width=1, key_width=1, hidden=1)
    set_to(score.query.weight, [[2.0]])
    set_to(score.key.weight, [[1.0]])
    set_to(score.v, [4 * LN2])
    assert weights(torch.tensor([[3.0]]), keys_for(2 * 3.0), score=score)[0].tolist() == pytest.approx(
        [1 / 7, 2 / 7, 4 / 7], abs=1e-4
    )


def test_concat() -> None:
    score = scores.Concat(query_width=1, key_width=1, hidden=1)
    set_to(score.both.weight, [[-1.0, 2.0]])
    set_to(score.v, [4 * LN2])
    assert weights(torch.tensor([[0.5]]), keys_for(-0.5) / 2, score=score).tolist() == SEVENTHS


def location_score(kernel: list[float]) -> scores.LocationSensitive:
    """It looks at nothing but where the weights were: ``score = 2 ln 2 · tanh(f + b)`` with tanh(b) = ½."""
    score = scores.LocationSensitive(query_width=1, key_width=1, hidden=1, num_filters=1, kernel_size=3)
    for weight in (score.query.weight, score.key.weight):
        set_to(weight, [[0.0]])
    set_to(score.key.bias, [math.atanh(0.5)])
    set_to(score.convolution.weight, [[kernel]])
    set_to(score.location.weight, [[-math.atanh(0.5)]])
    set_to(score.v, [2 * LN2])
    return score


def test_location_sensitive_moves_on_from_where_it_was() -> None:
    score = location_score([1.0, 0.0, 0.0])  # f[k] = previous[k − 1]
    query, key, previous = torch.ones(1, 1), torch.ones(4, 1), torch.tensor([0.0, 1.0, 0.0, 0.0])
    # Key 2 follows the one that was attended: tanh(b − b) = 0, and ln 2 everywhere else.
    assert weights(query, key, score=score.with_previous(previous)).tolist() == [
        pytest.approx([2 / 7, 2 / 7, 1 / 7, 2 / 7])
    ]


def test_location_sensitive_looks_at_several_kinds_of_weights() -> None:
    score = scores.LocationSensitive(1, 1, 1, num_filters=1, kernel_size=1, num_channels=2)
    for weight in (score.query.weight, score.key.weight, score.location.weight):
        set_to(weight, [[1.0]])
    set_to(score.key.bias, [0.0])
    set_to(score.convolution.weight, [[[1.0], [2.0]]])
    set_to(score.v, [1.0])
    last, total = [0.1, 0.2], [0.3, 0.4]
    out = score.with_previous(torch.tensor([last, total]))(torch.tensor([[0.5]]), torch.tensor([[0.25], [0.125]]))
    assert out.tolist() == [
        pytest.approx([math.tanh(0.5 + 0.25 + 0.1 + 2 * 0.3), math.tanh(0.5 + 0.125 + 0.2 + 2 * 0.4)])
    ]


def test_location_sensitive_weights_of_a_single_head_are_no_channel() -> None:
    score = scores.LocationSensitive(WIDTH, 2, HIDDEN, num_filters=3, kernel_size=3)
    query, key, previous = torch.randn(B, Q, WIDTH), torch.randn(B, K, 2), torch.rand(B, K)
    with_a_head = score.with_previous(previous[:, None])(query[:, None], key[:, None])
    assert torch.equal(with_a_head, score.with_previous(previous)(query, key)[:, None])
    assert torch.equal(score.with_previous(previous[:, None])(query, key), score.with_previous(previous)(query, key))


# --------------------------------------------------------------------------- all of them

# Queries and keys of different widths, where the score can take them.
MAKE: dict[str, tuple[Callable[[], scores.Score], int]] = {
    "Dot": (scores.Dot, WIDTH),
    "ScaledDot": (scores.ScaledDot, WIDTH),
    "General": (lambda: scores.General(WIDTH, 2), 2),
    "Additive": (lambda: scores.Additive(WIDTH, 2, HIDDEN), 2),
    "Concat": (lambda: scores.Concat(WIDTH, 2, HIDDEN), 2),
    "LocationSensitive": (
        lambda: scores.LocationSensitive(WIDTH, 2, HIDDEN, num_filters=3, kernel_size=3),
        2,
    ),
}
every_score = pytest.mark.parametrize("name", MAKE)


def made(name: str) -> tuple[scores.Score, Tensor, Tensor, Tensor]:
    """A score with a query, keys and values for it."""
    make, width = MAKE[name]
    query, key, value = (torch.randn(B, *s, dtype=DOUBLE) for s in ((Q, WIDTH), (K, width), (K, V)))
    return make().double(), query, key, value


def at_a_step(score: scores.Score, previous: Tensor | None = None) -> scores.Score:
    """What is passed as ``score=``; for a location-sensitive one, after these weights."""
    if not isinstance(score, scores.LocationSensitive):
        return score
    return score.with_previous(torch.full((B, K), 1 / K, dtype=DOUBLE) if previous is None else previous)


@every_score
def test_prepared_keys_give_what_keys_give(name: str) -> None:
    score, query, key, value = made(name)
    now, prepared = at_a_step(score), score.prepare(key)
    mask = masks.padding([2, 5])

    assert torch.equal(now(query, prepared), now(query, key))
    direct = weights(query, key, score=now, mask=mask)
    assert torch.equal(weights(query, prepared, score=now, mask=mask), direct)
    torch.testing.assert_close(
        attend(query, prepared, value, score=now, mask=mask),
        jumok.mix(now(query, key).masked_fill(~mask.to_dense(Q, K), -torch.inf).softmax(-1), value),
    )


@every_score
def test_the_scale_is_a_factor_on_the_scores(name: str) -> None:
    score, query, key, _ = made(name)
    now = at_a_step(score)
    bare = now(query, key) * (WIDTH**0.5 if name == "ScaledDot" else 1)
    torch.testing.assert_close(weights(query, key, score=now, scale=0.3), (0.3 * bare).softmax(-1))
    torch.testing.assert_close(weights(query, key, score=now), now(query, key).softmax(-1))


@every_score
def test_gradients(name: str) -> None:
    score, query, key, value = made(name)
    inputs = [x.requires_grad_() for x in (query, key, value)]

    def run(query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor) -> Tensor:
        return attend(query, key, value, score=at_a_step(score), mask=masks.causal() & masks.padding([0, 4]))

    assert torch.autograd.gradcheck(run, (*inputs, *score.parameters()), fast_mode=True)


@every_score
@pytest.mark.usefixtures("in_chunks")
def test_gradients_of_a_loop_over_keys_prepared_once(name: str) -> None:
    score, query, key, value = made(name)
    inputs = [x.requires_grad_() for x in (query, key, value)]

    def run(query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor) -> Tensor:
        keys, mask = score.prepare(key), masks.padding([2, 5])
        previous, out = torch.full((B, K), 1 / K, dtype=DOUBLE), []
        for i in range(Q):
            now, step = at_a_step(score, previous), query[:, i : i + 1]
            out.append(attend(step, keys, value, score=now, mask=mask))
            previous = weights(step, keys, score=now, mask=mask)[:, 0]
        return torch.cat(out, dim=1)

    assert torch.autograd.gradcheck(run, (*inputs, *score.parameters()), fast_mode=True)


@every_score
def test_nothing_is_kept_on_the_module(name: str) -> None:
    def held(score: scores.Score) -> dict[str, Any]:
        """Every attribute of every part as text, and every number of the state."""
        attributes = {where: str(part.__dict__) for where, part in score.named_modules()}
        return attributes | {where: x.tolist() for where, x in score.state_dict().items()}

    score, query, key, value = made(name)
    before = held(score)
    now = at_a_step(score)
    attend(query, score.prepare(key), value, score=now, mask=masks.padding([2, 5])).sum().detach()
    weights(query, key, score=now)
    assert held(score) == before


@every_score
def test_padding_may_hold_anything_and_parameters_get_finite_gradients(name: str) -> None:
    score, query, key, value = made(name)

    def run(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attend(*inputs, score=at_a_step(score), mask=masks.padding([2, 5]))
        return out, *torch.autograd.grad(out.sin().sum(), [*inputs, *score.parameters()])

    clean = run(key, value)
    key[0, 2:], value[0, 2:] = torch.nan, torch.inf
    for one, other in zip(run(key, value), clean, strict=True):
        torch.testing.assert_close(one, other)


@every_score
def test_prepared_padding_never_reaches_the_output(name: str) -> None:
    score, query, key, value = made(name)
    mask, now = masks.padding([2, 5]), at_a_step(score)
    expected = attend(query, score.prepare(key), value, score=now, mask=mask)
    key[0, 2:] = torch.nan
    assert torch.equal(attend(query, score.prepare(key), value, score=now, mask=mask), expected)


@every_score
@pytest.mark.usefixtures("in_chunks")
def test_some_queries_at_a_time_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    score, query, key, value = made(name)
    inputs = [x.requires_grad_() for x in (query, key, value)]

    def run() -> list[Tensor]:
        out = attend(query, key, value, score=at_a_step(score), mask=masks.causal())
        wanted = [*inputs, *score.parameters()]
        return [out, *torch.autograd.grad(out.sin().sum(), wanted)]

    chunked = run()
    monkeypatch.undo()
    for one, other in zip(chunked, run(), strict=True):
        torch.testing.assert_close(one, other)


# ---------------------------------------------------------------------------------- errors


@every_score
def test_keys_prepared_by_another_kind_of_score_are_refused(name: str) -> None:
    score, query, _, value = made(name)
    foreign = scores.General(WIDTH, 2) if name == "Additive" else scores.Additive(WIDTH, 2, HIDDEN)
    keys = foreign.double().prepare(torch.randn(B, K, 2, dtype=DOUBLE))
    refused = rf"prepared by {foreign.name}.*is {score.name}.*own prepare"
    with pytest.raises(jumok.InputError, match=refused):
        attend(query, keys, value, score=at_a_step(score))
    with pytest.raises(jumok.InputError, match=refused):
        at_a_step(score)(query, keys)


@pytest.mark.parametrize("name", ["General", "Additive", "Concat", "LocationSensitive"])
def test_keys_prepared_with_other_parameters_are_refused(name: str) -> None:
    score, query, key, value = made(name)
    keys = made(name)[0].prepare(key)
    with pytest.raises(jumok.InputError, match=f"another {name}.*own prepare"):
        attend(query, keys, value, score=at_a_step(score))


def test_keys_prepared_by_a_score_without_parameters_serve_its_likes() -> None:
    _, query, key, value = made("Dot")
    assert torch.equal(
        attend(query, scores.Dot().prepare(key), value, score=scores.Dot()),
        attend(query, key, value, score=scores.Dot()),
    )


def test_a_location_sensitive_score_asks_for_the_weights_before() -> None:
    score, query, key, value = made("LocationSensitive")
    with pytest.raises(jumok.InputError, match=r"score=score\.with_previous\(weights\), with zeros of shape"):
        attend(query, key, value, score=score)
    with pytest.raises(jumok.InputError, match=r"\b4\); expected \(2, 5\) for 5 keys"):
        attend(query, key, value, score=score.with_previous(torch.zeros(B, 4, dtype=DOUBLE)))
    with pytest.raises(jumok.InputError, match=r"kernel_size=4.*odd"):
        scores.LocationSensitive(1, 1, 1, kernel_size=4)


@pytest.mark.parametrize("name", ["Dot", "General", "Additive", "Concat"])
def test_a_direct_call_names_the_wrong_width(name: str) -> None:
    score, query, key, _ = made(name)
    with pytest.raises(jumok.InputError, match=r"width 6"):
        score(query[..., :6], key)
    with pytest.raises(jumok.InputError, match=r"(width|key) 1\b"):
        score(query, key[..., :1])


def test_general_begins_with_scores_of_variance_one() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(500, 320), torch.randn(500, 640)
    spread = scores.General(320, 640)(query, key).std().item()
    assert spread == pytest.approx(1.0, rel=0.05)
