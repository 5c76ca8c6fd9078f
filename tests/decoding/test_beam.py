"""Beam search against exhaustive search, and against a plain Python implementation."""

from __future__ import annotations

import math

import pytest
import torch

from jumok.batches.tokens import EOS, UNK, Tokens
from jumok.decoding import Hypothesis, beam_search, coverage_penalty, greedy_search
from jumok.errors import InputError

A, B, C = 4, 5, 6


def length_norm(length: int, penalty: float) -> float:
    return ((5 + length) / 6) ** penalty


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("interval", [1, 8])
def test_a_wide_beam_finds_all_sentences_in_order(
    table_model, random_scores, sync_every, sentences, penalty: float, interval: int
) -> None:
    sync_every(interval)
    model = table_model(random_scores(7, seed=0))
    words, longest = [A, B, C], 3
    results = beam_search(
        model, sentences(20, 21, 22), beam_size=108, n_best=108, length_penalty=penalty, max_length=longest
    )
    for n, hypotheses in zip((20, 21, 22), results, strict=True):
        scored = [
            (logprob / length_norm(len(ids) + 1, penalty), ids, logprob)
            for ids, logprob in model.sentences(n, words, longest)
        ]
        scored.sort(reverse=True)
        assert len(scored) == 1 + 3 + 9 + 27
        assert [h.ids for h in hypotheses] == [ids for _, ids, _ in scored]
        assert [h.score for h in hypotheses] == pytest.approx([score for score, _, _ in scored], abs=1e-5)
        assert [h.logprob for h in hypotheses] == pytest.approx([lp for _, _, lp in scored], abs=1e-5)
        assert all(h.finished for h in hypotheses)


def test_exact_search_with_unknown_words(table_model, random_scores, sentences) -> None:
    model = table_model(random_scores(7, seed=8))
    for n in range(20, 26):
        [[first]] = beam_search(model, sentences(n), beam_size=400, max_length=4, allow_unk=True)
        ids, logprob = max(model.sentences(n, [UNK, A, B, C], 4), key=lambda pair: pair[1])
        assert first.ids == ids
        assert first.logprob == pytest.approx(logprob, abs=1e-5)


def plain_beam(model, sentence: int, *, size: int, n_best: int, penalty: float, longest: int) -> list[Hypothesis]:
    """One sentence and one hypothesis at a time, without early stopping."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Hypothesis] = []
    cut: list[Hypothesis] = []
    for step in range(longest + 1):
        candidates = [
            (total + logp, rank, word, prefix)
            for rank, (total, prefix) in enumerate(live)
            for word, logp in enumerate(model.logp(sentence, prefix))
            if word >= EOS
        ]
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        for total, _, word, prefix in candidates[:size]:
            if word == EOS:
                score = total / length_norm(step + 1, penalty)
                finished.append(Hypothesis(prefix, score, total, finished=True))
        if step == longest:
            ended = {h.ids for h in finished}
            cut = [
                Hypothesis(prefix, total / length_norm(longest, penalty), total, finished=False)
                for total, prefix in live
                if prefix not in ended
            ]
        if len(finished) >= size:
            break
        live = [(total, (*prefix, word)) for total, _, word, prefix in candidates if word != EOS][:size]
    finished.sort(key=lambda h: -h.score)
    return (finished + cut)[:n_best]


@pytest.mark.parametrize("interval", [1, 3, 8])
@pytest.mark.parametrize("steps", [None, 1.0], ids=["all different", "many equal"])
@pytest.mark.parametrize("penalty", [0.0, 1.3])
def test_equals_a_plain_python_implementation(
    table_model, random_scores, sync_every, sentences, interval: int, steps: float | None, penalty: float
) -> None:
    sync_every(interval)
    model = table_model(random_scores(11, seed=5, steps=steps))
    numbers = list(range(20, 33))
    seen = set()
    for size, n_best, longest in [
        (1, 1, 5),
        (2, 1, 5),
        (2, 2, 5),
        (5, 1, 7),
        (5, 5, 7),
        (5, 3, 2),
        (13, 7, 1),
    ]:
        results = beam_search(
            model,
            sentences(*numbers),
            beam_size=size,
            n_best=n_best,
            length_penalty=penalty,
            max_length=longest,
        )
        for n, hypotheses in zip(numbers, results, strict=True):
            expected = plain_beam(model, n, size=size, n_best=n_best, penalty=penalty, longest=longest)
            assert [(h.ids, h.finished) for h in hypotheses] == [(h.ids, h.finished) for h in expected]
            assert [h.score for h in hypotheses] == pytest.approx([h.score for h in expected], abs=1e-9)
            assert [h.logprob for h in hypotheses] == pytest.approx([h.logprob for h in expected], abs=1e-9)
            seen |= {h.finished for h in hypotheses}
    assert seen == {True, False}


def test_equals_plain_python_for_a_large_vocabulary(table_model, random_scores, sentences) -> None:
    model = table_model(random_scores(1009, seed=6, steps=0.25))
    results = beam_search(model, sentences(20, 21), beam_size=3, n_best=3, max_length=4)
    for n, hypotheses in zip((20, 21), results, strict=True):
        expected = plain_beam(model, n, size=3, n_best=3, penalty=0.0, longest=4)
        assert [h.ids for h in hypotheses] == [h.ids for h in expected]


@pytest.mark.parametrize("interval", [1, 2, 8])
def test_batches_equal_single_sentences(table_model, random_scores, sync_every, sentences, interval: int) -> None:
    scores = random_scores(11, seed=1)
    options = {"beam_size": 4, "n_best": 3, "max_length": 13}
    alone = [beam_search(table_model(scores), sentences(n), **options)[0] for n in range(20, 37)]
    sync_every(interval)
    assert beam_search(table_model(scores), sentences(*range(20, 37)), **options) == alone


def table(plan: dict[tuple[int, ...], dict[int, float]]):
    """Seven words with the probabilities of the plan. Prefixes that are not in the plan end."""

    def scores(_: int, prefix: tuple[int, ...]) -> list[float]:
        shares = plan.get(prefix, {EOS: 1.0})
        return [math.log(shares[word]) if word in shares else -math.inf for word in range(7)]

    return scores


ONE = Tokens.pad([[9, EOS]])


def test_a_beam_finds_better_sentences_than_greedy(table_model) -> None:
    # A is likelier than B, but what follows it is not: 0.6 · 0.3 < 0.4 · 0.9.
    plan = {(): {A: 0.6, B: 0.4}, (A,): {EOS: 0.3, A: 0.25, B: 0.25, C: 0.2}, (B,): {EOS: 0.9, C: 0.1}}
    [[first, second]] = beam_search(table_model(table(plan)), ONE, beam_size=2, n_best=2)
    assert (first.ids, first.logprob) == ((B,), pytest.approx(math.log(0.36), abs=1e-6))
    assert (second.ids, second.logprob) == ((A,), pytest.approx(math.log(0.18), abs=1e-6))
    assert greedy_search(table_model(table(plan)), ONE)[0].ids == (A,)


def test_the_search_stops_at_beam_size_finished_hypotheses(table_model) -> None:
    # () and (A,) finish first; (A, B, C) has 0.3, which a length penalty puts above both.
    plan = {
        (): {EOS: 0.34, A: 0.66},
        (A,): {EOS: 0.5, B: 0.5},
        (A, B): {C: 1.0},
        (A, B, C): {EOS: 1.0},
    }
    exact = beam_search(table_model(table(plan)), ONE, beam_size=9, length_penalty=3.0)
    usual = beam_search(table_model(table(plan)), ONE, beam_size=2, length_penalty=3.0)
    assert exact[0][0].ids == (A, B, C)
    assert usual[0][0].ids == (A,)
    assert exact[0][0].score == pytest.approx(math.log(0.33) / (9 / 6) ** 3, abs=1e-6)
    assert usual[0][0].score == pytest.approx(math.log(0.33) / (7 / 6) ** 3, abs=1e-6)


def test_an_eos_outside_the_beam_finishes_no_hypothesis(table_model) -> None:
    plan = {(): {A: 0.4, B: 0.35, EOS: 0.25}, (A,): {EOS: 0.5, A: 0.3, B: 0.2}, (B,): {EOS: 0.5, A: 0.5}}
    [hypotheses] = beam_search(table_model(table(plan)), ONE, beam_size=2, n_best=2)
    assert [h.ids for h in hypotheses] == [(A,), (B,)]  # 0.2 and 0.175; () had 0.25
    assert beam_search(table_model(table(plan)), ONE, beam_size=3)[0][0].ids == ()


def test_early_stopping(table_model, sync_every) -> None:
    # The first EOS has 0.9, all other hypotheses have at most 0.1.
    plan = {(): {EOS: 0.9, A: 0.1}} | {(A,) * n: {A: 1.0} for n in range(1, 60)}
    model = table_model(table(plan))
    assert beam_search(model, ONE, beam_size=4)[0][0].ids == ()
    assert model.rows == [1]
    model.rows.clear()
    sync_every(8)
    assert beam_search(model, ONE, beam_size=4)[0][0].ids == ()
    assert model.rows == [1] + [4] * 7
    model.rows.clear()
    # With a length penalty of 4, 0.1 may score higher than 0.9 at length 12: (17 / 6) ** 4. With 0.1 it cannot.
    sync_every(1)
    assert beam_search(model, ONE, beam_size=4, length_penalty=4.0, max_length=11)[0][0].ids == ()
    assert len(model.rows) == 12
    model.rows.clear()
    assert beam_search(model, ONE, beam_size=4, length_penalty=0.1, max_length=11)[0][0].ids == ()
    assert len(model.rows) == 1


def test_finished_sentences_leave_the_batch(table_model) -> None:
    def scores(n: int, prefix: tuple[int, ...]) -> list[float]:
        done = len(prefix) >= n - 10
        return [-math.inf] * 3 + ([0.0, -math.inf] if done else [-math.inf, 0.0])

    model = table_model(scores)
    results = beam_search(model, Tokens.pad([[10, EOS], [11, EOS], [14, EOS]]), beam_size=3)
    assert [h.ids for [h] in results] == [(), (A,), (A,) * 4]
    assert model.rows == [3, 6, 3, 3, 3]


def test_fewer_than_n_best_possible_sentences(table_model) -> None:
    plan = {(): {A: 0.7, B: 0.3}}
    [hypotheses] = beam_search(table_model(table(plan)), ONE, beam_size=5, n_best=5)
    assert [h.ids for h in hypotheses] == [(A,), (B,)]


def test_unfinished_hypotheses_come_last(table_model) -> None:
    plan = {(): {A: 0.6, B: 0.4}, (A,): {A: 0.99, EOS: 0.01}, (B,): {A: 0.5, B: 0.5}}
    [hypotheses] = beam_search(table_model(table(plan)), ONE, beam_size=3, n_best=3, max_length=1, length_penalty=1.0)
    # The EOS of A is the fourth candidate.
    assert [(h.ids, h.finished) for h in hypotheses] == [((A,), False), ((B,), False)]
    [hypotheses] = beam_search(table_model(table(plan)), ONE, beam_size=4, n_best=3, max_length=1, length_penalty=1.0)
    assert [(h.ids, h.finished) for h in hypotheses] == [((A,), True), ((B,), False)]
    first, second = hypotheses
    assert first.score == pytest.approx(math.log(0.006) / (7 / 6), abs=1e-6)  # A and EOS: length 2
    assert second.score == pytest.approx(math.log(0.4), abs=1e-6)  # B alone: length 1


def test_coverage_reranks_finished_hypotheses(table_model) -> None:
    plan = {(): {A: 0.5, B: 0.3, C: 0.2}}
    calls = []

    def coverage(rows, ids):
        calls.append((list(rows), list(ids)))
        return torch.tensor([-2.0 if prefix == (A,) else -0.1 for prefix in ids])

    source = Tokens.pad([[EOS], [9, EOS], [8, EOS]])
    results = beam_search(table_model(table(plan)), source, beam_size=3, n_best=3, coverage=coverage)
    assert calls == [([1, 1, 1, 2, 2, 2], [(A,), (B,), (C,)] * 2)]
    assert results[0] == [Hypothesis((), 0.0, 0.0, True)]
    for hypotheses in results[1:]:
        assert [h.ids for h in hypotheses] == [(B,), (C,), (A,)]
        assert [h.score for h in hypotheses] == pytest.approx([math.log(0.3) - 0.1, math.log(0.2) - 0.1,
                                                              math.log(0.5) - 2], abs=1e-6)  # fmt: skip
        assert hypotheses[2].logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_coverage_disables_early_stopping(table_model) -> None:
    # Without coverage the search ends after one step. With it, the second hypothesis may become the best.
    plan = {(): {EOS: 0.9, A: 0.1}, (A,): {EOS: 0.6, B: 0.4}}

    def coverage(rows, ids):
        return torch.tensor([-9.0 if not prefix else 0.0 for prefix in ids])

    assert beam_search(table_model(table(plan)), ONE, beam_size=2)[0][0].ids == ()
    assert beam_search(table_model(table(plan)), ONE, beam_size=2, coverage=coverage)[0][0].ids == (A,)


def test_coverage_is_not_called_without_finished_hypotheses(table_model) -> None:
    def coverage(rows, ids):
        raise AssertionError

    [[h]] = beam_search(table_model(table({(): {A: 1.0}, (A,): {A: 1.0}})), ONE, max_length=1, coverage=coverage)
    assert (h.ids, h.finished) == ((A,), False)


@pytest.mark.parametrize("arguments", [[0.0, 0.0], [[0.0]], [math.nan], 1.0])
def test_invalid_coverage_raises(table_model, arguments: object) -> None:
    with pytest.raises(InputError, match=r"coverage returned .* each of the 1 finished"):
        beam_search(table_model(table({(): {A: 1.0}})), ONE, coverage=lambda rows, ids: torch.tensor(arguments))


def test_coverage_penalty_by_hand() -> None:
    weights = torch.tensor(
        [
            [[0.5, 0.5, 0.0], [0.2, 0.7, 0.1], [0.0, 1.0, 0.0]],
            [[0.25, 0.75, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],  # one word, then padding; two source words
        ]
    )
    expected = [0.2 * (math.log(0.7) + 0 + math.log(0.1)), 0.2 * (math.log(0.25) + math.log(0.75))]
    assert coverage_penalty(weights, [3, 2], 0.2).tolist() == pytest.approx(expected, abs=1e-6)
    nothing = coverage_penalty(torch.zeros(1, 1, 2), [2], 1.0)
    assert nothing.tolist() == pytest.approx([2 * math.log(1e-6)])  # low, but finite


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_size": 0}, "beam_size: 0 is invalid"),
        ({"beam_size": 2.0}, "beam_size: 2.0 is invalid"),
        ({"beam_size": 3, "n_best": 4}, "n_best: 4 given with beam_size 3"),
        ({"n_best": 0}, "n_best: 0 given with"),
        ({"length_penalty": -0.1}, "length_penalty: -0.1 is invalid"),
        ({"length_penalty": math.nan}, "length_penalty"),
    ],
)
def test_invalid_arguments_raise(table_model, arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        beam_search(table_model(table({})), ONE, **arguments)


def test_beam_size_larger_than_the_vocabulary(table_model, random_scores, sentences) -> None:
    model = table_model(random_scores(5, seed=9))  # one word besides EOS
    results = beam_search(model, sentences(20, 21), beam_size=50, n_best=50, max_length=6)
    for n, hypotheses in zip((20, 21), results, strict=True):
        assert sorted(h.ids for h in hypotheses) == [(A,) * k for k in range(7)]
        expected = max(model.sentences(n, [A], 6), key=lambda pair: pair[1])
        assert hypotheses[0].ids == expected[0]
