"""Beam search against everything that can be said, and against the rules written out in plain Python."""

from __future__ import annotations

import doctest
import importlib
import math

import pytest
import torch

from jumok.batches.tokens import EOS, UNK, Tokens
from jumok.decoding import Hypothesis, beam_search, coverage_penalty, greedy_search
from jumok.errors import InputError

A, B, C = 4, 5, 6


def test_the_examples_in_the_docstrings() -> None:
    module = importlib.import_module("jumok.decoding.beam")
    done = doctest.testmod(module, extraglobs={"torch": torch})
    assert (done.failed, done.attempted) == (0, 2)


def length_norm(length: int, penalty: float) -> float:
    return ((5 + length) / 6) ** penalty


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("every", [1, 8])
def test_a_beam_wide_enough_finds_everything_in_order(
    told, random_scores, look_every, sentences, penalty: float, every: int
) -> None:
    look_every(every)
    model = told(random_scores(7, seed=0))
    words, longest = [A, B, C], 3
    found = beam_search(
        model, sentences(20, 21, 22), beam_size=108, n_best=108, length_penalty=penalty, max_length=longest
    )
    for n, hypotheses in zip((20, 21, 22), found, strict=True):
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


def test_the_exact_best_is_found_with_unknown_words_too(told, random_scores, sentences) -> None:
    model = told(random_scores(7, seed=8))
    for n in range(20, 26):
        [[first]] = beam_search(model, sentences(n), beam_size=400, max_length=4, allow_unk=True)
        ids, logprob = max(model.sentences(n, [UNK, A, B, C], 4), key=lambda pair: pair[1])
        assert first.ids == ids
        assert first.logprob == pytest.approx(logprob, abs=1e-5)


def plain_beam(model, sentence: int, *, size: int, n_best: int, penalty: float, longest: int) -> list[Hypothesis]:
    """The rules, one sentence and one hypothesis at a time, without the shortcut of an early stop."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Hypothesis] = []
    cut: list[Hypothesis] = []
    for step in range(longest + 1):
        candidates = [
            (total + logp, rank, word, said)
            for rank, (total, said) in enumerate(live)
            for word, logp in enumerate(model.logp(sentence, said))
            if word >= EOS
        ]
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        for total, _, word, said in candidates[:size]:
            if word == EOS:
                score = total / length_norm(step + 1, penalty)
                finished.append(Hypothesis(said, score, total, finished=True))
        if step == longest:
            ended = {h.ids for h in finished}
            cut = [
                Hypothesis(said, total / length_norm(longest, penalty), total, finished=False)
                for total, said in live
                if said not in ended
            ]
        if len(finished) >= size:
            break
        live = [(total, (*said, word)) for total, _, word, said in candidates if word != EOS][:size]
    finished.sort(key=lambda h: -h.score)
    return (finished + cut)[:n_best]


@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.parametrize("steps", [None, 1.0], ids=["all different", "many equal"])
@pytest.mark.parametrize("penalty", [0.0, 1.3])
def test_the_rules_in_plain_python(
    told, random_scores, look_every, sentences, every: int, steps: float | None, penalty: float
) -> None:
    look_every(every)
    model = told(random_scores(11, seed=5, steps=steps))
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
        found = beam_search(
            model,
            sentences(*numbers),
            beam_size=size,
            n_best=n_best,
            length_penalty=penalty,
            max_length=longest,
        )
        for n, hypotheses in zip(numbers, found, strict=True):
            expected = plain_beam(model, n, size=size, n_best=n_best, penalty=penalty, longest=longest)
            assert [(h.ids, h.finished) for h in hypotheses] == [(h.ids, h.finished) for h in expected]
            assert [h.score for h in hypotheses] == pytest.approx([h.score for h in expected], abs=1e-9)
            assert [h.logprob for h in hypotheses] == pytest.approx([h.logprob for h in expected], abs=1e-9)
            seen |= {h.finished for h in hypotheses}
    assert seen == {True, False}


def test_a_large_vocabulary_keeps_to_the_rules_too(told, random_scores, sentences) -> None:
    model = told(random_scores(1009, seed=6, steps=0.25))
    found = beam_search(model, sentences(20, 21), beam_size=3, n_best=3, max_length=4)
    for n, hypotheses in zip((20, 21), found, strict=True):
        expected = plain_beam(model, n, size=3, n_best=3, penalty=0.0, longest=4)
        assert [h.ids for h in hypotheses] == [h.ids for h in expected]


@pytest.mark.parametrize("steps", [None, 1.0], ids=["all different", "many equal"])
@pytest.mark.parametrize("words", [5, 11, 601])
def test_size_one_is_greedy(told, random_scores, sentences, words: int, steps: float | None) -> None:
    scores, source = random_scores(words, seed=7, steps=steps), sentences(*range(20, 41))
    expected = greedy_search(told(scores), source, max_length=9)
    assert [h for [h] in beam_search(told(scores), source, beam_size=1, max_length=9)] == expected
    penalised = beam_search(told(scores), source, beam_size=1, max_length=9, length_penalty=2.0)
    assert [h.ids for [h] in penalised] == [h.ids for h in expected]


@pytest.mark.parametrize("every", [1, 2, 8])
def test_a_batch_gives_what_each_sentence_gives_alone(told, random_scores, look_every, sentences, every: int) -> None:
    scores = random_scores(11, seed=1)
    alone = [beam_search(told(scores), sentences(n), beam_size=4, n_best=3, max_length=13)[0] for n in range(20, 37)]
    look_every(every)
    assert beam_search(told(scores), sentences(*range(20, 37)), beam_size=4, n_best=3, max_length=13) == alone


def table(plan: dict[tuple[int, ...], dict[int, float]]):
    """Seven words with the probabilities of the plan; what it does not tell ends at once."""

    def scores(_: int, said: tuple[int, ...]) -> list[float]:
        shares = plan.get(said, {EOS: 1.0})
        return [math.log(shares[word]) if word in shares else -math.inf for word in range(7)]

    return scores


ONE = Tokens.pad([[9, EOS]])


def test_a_beam_sees_what_greedy_misses(told) -> None:
    # A is likelier than B, but what follows it is not: 0.6 · 0.3 < 0.4 · 0.9.
    plan = {(): {A: 0.6, B: 0.4}, (A,): {EOS: 0.3, A: 0.25, B: 0.25, C: 0.2}, (B,): {EOS: 0.9, C: 0.1}}
    [[first, second]] = beam_search(told(table(plan)), ONE, beam_size=2, n_best=2)
    assert (first.ids, first.logprob) == ((B,), pytest.approx(math.log(0.36), abs=1e-6))
    assert (second.ids, second.logprob) == ((A,), pytest.approx(math.log(0.18), abs=1e-6))
    assert greedy_search(told(table(plan)), ONE)[0].ids == (A,)


def test_the_search_stops_at_so_many_finished_ones_though_a_longer_one_would_be_better(told) -> None:
    # () and (A,) finish first; (A, B, C) has 0.3, which a length penalty puts above both.
    plan = {
        (): {EOS: 0.34, A: 0.66},
        (A,): {EOS: 0.5, B: 0.5},
        (A, B): {C: 1.0},
        (A, B, C): {EOS: 1.0},
    }
    exact = beam_search(told(table(plan)), ONE, beam_size=9, length_penalty=3.0)
    usual = beam_search(told(table(plan)), ONE, beam_size=2, length_penalty=3.0)
    assert exact[0][0].ids == (A, B, C)
    assert usual[0][0].ids == (A,)
    assert exact[0][0].score == pytest.approx(math.log(0.33) / (9 / 6) ** 3, abs=1e-6)
    assert usual[0][0].score == pytest.approx(math.log(0.33) / (7 / 6) ** 3, abs=1e-6)


def test_an_eos_outside_the_first_ones_finishes_nothing(told) -> None:
    plan = {(): {A: 0.4, B: 0.35, EOS: 0.25}, (A,): {EOS: 0.5, A: 0.3, B: 0.2}, (B,): {EOS: 0.5, A: 0.5}}
    [hypotheses] = beam_search(told(table(plan)), ONE, beam_size=2, n_best=2)
    assert [h.ids for h in hypotheses] == [(A,), (B,)]  # 0.2 and 0.175; () had 0.25
    assert beam_search(told(table(plan)), ONE, beam_size=3)[0][0].ids == ()


def test_nothing_is_searched_once_nothing_can_change(told, look_every) -> None:
    # The first word ends it: 0.9. All that lives on has 0.1 at most.
    plan = {(): {EOS: 0.9, A: 0.1}} | {(A,) * n: {A: 1.0} for n in range(1, 60)}
    model = told(table(plan))
    assert beam_search(model, ONE, beam_size=4)[0][0].ids == ()
    assert model.rows == [1]
    model.rows.clear()
    look_every(8)
    assert beam_search(model, ONE, beam_size=4)[0][0].ids == ()
    assert model.rows == [1] + [4] * 7
    model.rows.clear()
    # With a penalty, 0.1 may come to be more than 0.9: by (17 / 6) ** 4 at length 12, not by the sixth root.
    look_every(1)
    assert beam_search(model, ONE, beam_size=4, length_penalty=4.0, max_length=11)[0][0].ids == ()
    assert len(model.rows) == 12
    model.rows.clear()
    assert beam_search(model, ONE, beam_size=4, length_penalty=0.1, max_length=11)[0][0].ids == ()
    assert len(model.rows) == 1


def test_finished_sentences_cost_nothing(told) -> None:
    def scores(n: int, said: tuple[int, ...]) -> list[float]:
        done = len(said) >= n - 10
        return [-math.inf] * 3 + ([0.0, -math.inf] if done else [-math.inf, 0.0])

    model = told(scores)
    found = beam_search(model, Tokens.pad([[10, EOS], [11, EOS], [14, EOS]]), beam_size=3)
    assert [h.ids for [h] in found] == [(), (A,), (A,) * 4]
    assert model.rows == [3, 6, 3, 3, 3]


def test_fewer_than_asked_for_if_no_more_are_possible(told) -> None:
    plan = {(): {A: 0.7, B: 0.3}}
    [hypotheses] = beam_search(told(table(plan)), ONE, beam_size=5, n_best=5)
    assert [h.ids for h in hypotheses] == [(A,), (B,)]


def test_unfinished_ones_stand_behind_and_are_told(told) -> None:
    plan = {(): {A: 0.6, B: 0.4}, (A,): {A: 0.99, EOS: 0.01}, (B,): {A: 0.5, B: 0.5}}
    [hypotheses] = beam_search(told(table(plan)), ONE, beam_size=3, n_best=3, max_length=1, length_penalty=1.0)
    # The EOS of A is the fourth candidate.
    assert [(h.ids, h.finished) for h in hypotheses] == [((A,), False), ((B,), False)]
    [hypotheses] = beam_search(told(table(plan)), ONE, beam_size=4, n_best=3, max_length=1, length_penalty=1.0)
    assert [(h.ids, h.finished) for h in hypotheses] == [((A,), True), ((B,), False)]
    first, second = hypotheses
    assert first.score == pytest.approx(math.log(0.006) / (7 / 6), abs=1e-6)  # A and EOS: length 2
    assert second.score == pytest.approx(math.log(0.4), abs=1e-6)  # B alone: length 1


def test_coverage_ranks_the_finished_ones(told) -> None:
    plan = {(): {A: 0.5, B: 0.3, C: 0.2}}
    calls = []

    def coverage(rows, ids):
        calls.append((list(rows), list(ids)))
        return torch.tensor([-2.0 if said == (A,) else -0.1 for said in ids])

    source = Tokens.pad([[EOS], [9, EOS], [8, EOS]])
    found = beam_search(told(table(plan)), source, beam_size=3, n_best=3, coverage=coverage)
    assert calls == [([1, 1, 1, 2, 2, 2], [(A,), (B,), (C,)] * 2)]
    assert found[0] == [Hypothesis((), 0.0, 0.0, True)]
    for hypotheses in found[1:]:
        assert [h.ids for h in hypotheses] == [(B,), (C,), (A,)]
        assert [h.score for h in hypotheses] == pytest.approx([math.log(0.3) - 0.1, math.log(0.2) - 0.1,
                                                              math.log(0.5) - 2], abs=1e-6)  # fmt: skip
        assert hypotheses[2].logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_coverage_waits_for_so_many_finished_ones(told) -> None:
    # Without coverage the search is over at once; with it, the second may still come out first.
    plan = {(): {EOS: 0.9, A: 0.1}, (A,): {EOS: 0.6, B: 0.4}}

    def coverage(rows, ids):
        return torch.tensor([-9.0 if not said else 0.0 for said in ids])

    assert beam_search(told(table(plan)), ONE, beam_size=2)[0][0].ids == ()
    assert beam_search(told(table(plan)), ONE, beam_size=2, coverage=coverage)[0][0].ids == (A,)


def test_coverage_is_not_asked_where_nothing_is_finished(told) -> None:
    def coverage(rows, ids):
        raise AssertionError

    [[h]] = beam_search(told(table({(): {A: 1.0}, (A,): {A: 1.0}})), ONE, max_length=1, coverage=coverage)
    assert (h.ids, h.finished) == ((A,), False)


@pytest.mark.parametrize("wrong", [[0.0, 0.0], [[0.0]], [math.nan], 1.0])
def test_a_coverage_that_does_not_fit(told, wrong: object) -> None:
    with pytest.raises(InputError, match=r"coverage returned .* each of the 1 finished"):
        beam_search(told(table({(): {A: 1.0}})), ONE, coverage=lambda rows, ids: torch.tensor(wrong))


def test_the_coverage_term_by_hand() -> None:
    weights = torch.tensor(
        [
            [[0.5, 0.5, 0.0], [0.2, 0.7, 0.1], [0.0, 1.0, 0.0]],
            [[0.25, 0.75, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],  # one word, then padding; two source words
        ]
    )
    expected = [0.2 * (math.log(0.7) + 0 + math.log(0.1)), 0.2 * (math.log(0.25) + math.log(0.75))]
    assert coverage_penalty(weights, [3, 2], 0.2).tolist() == pytest.approx(expected, abs=1e-6)
    nothing = coverage_penalty(torch.zeros(1, 1, 2), [2], 1.0)
    assert nothing.tolist() == pytest.approx([2 * math.log(1e-6)])  # low, and a number


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beam_size": 0}, "beam_size: 0 came"),
        ({"beam_size": 2.0}, "beam_size: 2.0 came"),
        ({"beam_size": 3, "n_best": 4}, "n_best: 4 came with beam_size 3"),
        ({"n_best": 0}, "n_best: 0 came"),
        ({"length_penalty": -0.1}, "length_penalty: -0.1 came"),
        ({"length_penalty": math.nan}, "length_penalty"),
    ],
)
def test_bad_input(told, wrong: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        beam_search(told(table({})), ONE, **wrong)


def test_a_size_beyond_the_vocabulary(told, random_scores, sentences) -> None:
    model = told(random_scores(5, seed=9))  # one word that may be said, and EOS
    found = beam_search(model, sentences(20, 21), beam_size=50, n_best=50, max_length=6)
    for n, hypotheses in zip((20, 21), found, strict=True):
        assert sorted(h.ids for h in hypotheses) == [(A,) * k for k in range(7)]
        by_hand = max(model.sentences(n, [A], 6), key=lambda pair: pair[1])
        assert hypotheses[0].ids == by_hand[0]
