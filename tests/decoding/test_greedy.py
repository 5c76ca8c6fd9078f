"""Greedy search, and the rules that all searches share."""

from __future__ import annotations

import math

import pytest
import torch

from jumok.batches.tokens import BOS, EOS, PAD, UNK, Tokens
from jumok.decoding import Hypothesis, beam_search, default_max_length, greedy_search, sample
from jumok.errors import InputError

A, B = 4, 5
LOW = -30.0


def only(**logits: float) -> list[float]:
    """Six words: the named ones have these scores, the others next to no chance."""
    names = {"PAD": PAD, "UNK": UNK, "BOS": BOS, "EOS": EOS, "A": A, "B": B}
    values = [LOW] * len(names)
    for name, value in logits.items():
        values[names[name]] = value
    return values


def test_by_hand(table_model) -> None:
    # Sentence 7 is translated to A B, sentence 8 to nothing.
    plan = {
        (7, ()): only(A=0.0, B=-1.0),
        (7, (A,)): only(B=0.0, A=-2.0),
        (7, (A, B)): only(EOS=0.0, A=0.0),  # a tie: EOS has the lower id
        (8, ()): only(EOS=2.0, A=0.0),
    }
    results = greedy_search(
        table_model(lambda n, prefix: plan.get((n, prefix), only(A=0.0))), Tokens.pad([[7, EOS], [8, 9, EOS]])
    )
    assert [h.ids for h in results] == [(A, B), ()]
    assert all(h.finished and h.score == h.logprob for h in results)
    expected = -math.log1p(math.exp(-1)) - math.log1p(math.exp(-2)) - math.log(2)
    assert results[0].logprob == pytest.approx(expected, abs=1e-6)
    assert results[1].logprob == pytest.approx(-math.log1p(math.exp(-2)), abs=1e-6)


def test_pad_and_bos_are_never_generated_and_unk_only_on_request(table_model) -> None:
    def scores(_: int, prefix: tuple[int, ...]) -> list[float]:
        return only(PAD=9.0, BOS=8.0, UNK=7.0, A=6.0, B=5.0) if len(prefix) < 2 else only(EOS=0.0)

    source = Tokens.pad([[7, EOS]])
    assert greedy_search(table_model(scores), source)[0].ids == (A, A)
    assert greedy_search(table_model(scores), source, allow_unk=True)[0].ids == (UNK, UNK)
    # Excluded words keep their probability: the log-probability is that of the model.
    total = math.log(sum(map(math.exp, [9.0, 8.0, 7.0, 6.0, 5.0])))
    assert greedy_search(table_model(scores), source)[0].logprob == pytest.approx(2 * (6 - total), abs=1e-5)
    for generator in (torch.Generator().manual_seed(n) for n in range(20)):
        assert set(sample(table_model(scores), source, generator=generator, temperature=9.0)[0].ids) <= {A, B, EOS}


@pytest.mark.parametrize("interval", [1, 3, 8])
def test_the_length_limit(table_model, sync_every, interval: int) -> None:
    sync_every(interval)
    calls = []

    def at_most(length: int) -> int:
        calls.append(length)
        return 3 * length - 4

    def scores(n: int, prefix: tuple[int, ...]) -> list[float]:
        return only(EOS=0.0) if len(prefix) == n else only(A=0.0)  # sentence n ends after n words

    source = Tokens.pad([[5, 1, EOS], [6, 1, EOS], [7, EOS], [2, EOS], [9, 1, 1, EOS]])
    results = greedy_search(table_model(scores), source, max_length=at_most)
    assert calls == [3, 3, 2, 2, 4]
    assert [(len(h.ids), h.finished) for h in results] == [
        (5, True),
        (5, False),
        (2, False),
        (2, True),
        (8, False),
    ]
    assert results == [h for [h] in beam_search(table_model(scores), source, beam_size=1, max_length=at_most)]
    assert [len(h.ids) for h in greedy_search(table_model(scores), source, max_length=1)] == [1] * 5
    # The log-probability of an unfinished hypothesis is that of its words.
    assert results[1].logprob == pytest.approx(5 * -math.log1p(5 * math.exp(LOW)), abs=1e-6)


def test_default_max_length() -> None:
    assert default_max_length(11) == 42


def test_an_empty_source_has_an_empty_translation(table_model) -> None:
    model = table_model(lambda n, prefix: only(A=0.0) if not prefix else only(EOS=0.0))
    empty = Hypothesis((), 0.0, 0.0, True)
    source = Tokens.pad([[EOS], [7, EOS], [], [8], [EOS]])
    assert [h.ids for h in greedy_search(model, source)] == [
        (),
        (A,),
        (),
        (A,),
        (),
    ]  # [8] is a word, though a short one
    assert greedy_search(model, source)[0] == empty
    assert beam_search(model, source)[2] == [empty]
    model.rows.clear()
    assert greedy_search(model, Tokens.pad([[EOS], [EOS]])) == [empty, empty]
    assert sample(model, Tokens.pad([[]])) == [empty]
    assert beam_search(model, Tokens.pad([[EOS]]), beam_size=3, n_best=3) == [[empty]]
    nobody = Tokens(torch.zeros(0, 5, dtype=torch.long), ())
    assert (greedy_search(model, nobody), sample(model, nobody), beam_search(model, nobody)) == ([], [], [])
    assert model.rows == []  # nobody asked the model


@pytest.mark.parametrize("interval", [1, 2, 8])
def test_batches_equal_single_sentences(table_model, random_scores, sync_every, sentences, interval: int) -> None:
    scores = random_scores(11, seed=1)
    alone = [greedy_search(table_model(scores), sentences(n), max_length=13)[0] for n in range(20, 37)]
    assert len({len(h.ids) for h in alone}) > 4
    assert {h.finished for h in alone} == {True, False}
    sync_every(interval)
    assert greedy_search(table_model(scores), sentences(*range(20, 37)), max_length=13) == alone


def test_finished_sentences_leave_the_batch(table_model, sync_every) -> None:
    def scores(n: int, prefix: tuple[int, ...]) -> list[float]:
        return only(EOS=0.0) if len(prefix) >= n - 10 else only(A=0.0)

    model = table_model(scores)
    greedy_search(model, Tokens.pad([[10, EOS], [11, EOS], [12, EOS], [16, EOS]]))
    assert model.rows == [4, 3, 2, 1, 1, 1, 1]
    sync_every(3)
    model.rows.clear()
    greedy_search(model, Tokens.pad([[10, EOS], [11, EOS], [12, EOS], [16, EOS]]))
    assert model.rows == [4, 4, 4, 1, 1, 1, 1, 1, 1]
    model.rows.clear()
    greedy_search(model, Tokens.pad([[99, EOS]]), max_length=4)
    assert model.rows == [1] * 5  # no step behind the limit


def test_few_finished_rows_are_not_removed(table_model) -> None:
    model = table_model(lambda n, prefix: only(EOS=0.0) if len(prefix) >= n - 10 else only(A=0.0))
    greedy_search(model, Tokens.pad([[10, EOS]] + [[12, EOS]] * 16))
    assert model.rows == [17] * 3


@pytest.mark.parametrize("search", [greedy_search, sample, beam_search])
@pytest.mark.parametrize("interval", [1, 8])
def test_nan_scores_raise(table_model, sync_every, search, interval: int) -> None:
    sync_every(interval)
    nan = table_model(lambda n, prefix: [math.nan] * 6 if len(prefix) == 2 else only(A=0.0))
    with pytest.raises(InputError, match=r"at step 3 .* diverged"):
        search(nan, Tokens.pad([[7, EOS]]))
    barred = table_model(lambda n, prefix: [0.0, 0.0, 0.0, -math.inf, -math.inf, -math.inf])
    with pytest.raises(InputError, match="at step 1 "):
        search(barred, Tokens.pad([[7, EOS]]))
    # After the end of a sentence nobody cares.
    late = table_model(lambda n, prefix: only(EOS=0.0) if len(prefix) == 0 else [math.nan] * 6)
    if search is not beam_search:  # its other hypotheses go on
        assert search(late, Tokens.pad([[7, EOS]]))[0].ids == ()
    else:
        assert beam_search(late, Tokens.pad([[7, EOS]]), beam_size=1)[0][0].ids == ()


@pytest.mark.parametrize("search", [greedy_search, sample, beam_search])
def test_invalid_arguments_raise(table_model, search) -> None:
    model, source = table_model(lambda n, prefix: only(A=0.0)), Tokens.pad([[7, EOS]])
    with pytest.raises(InputError, match=r"got packed sentences.*Tokens\.pad"):
        search(model, Tokens.pack([[7, EOS]]))
    for longest in (0, -3, 2.5, True, lambda n: 0, lambda n: n / 2):
        with pytest.raises(InputError, match=r"max_length: .* is invalid"):
            search(model, source, max_length=longest)
    with pytest.raises(InputError, match="at least 4 words"):
        search(table_model(lambda n, prefix: [0.0, 0.0, 0.0]), source)


def test_low_precision_scores_are_normalised_in_float32(table_model) -> None:
    class Half:
        def start(self, source: Tokens):
            return table_model(None).start(source)

        def step(self, state, ids):
            return torch.zeros(len(ids), 5003, dtype=torch.bfloat16), state

    assert greedy_search(Half(), Tokens.pad([[7, EOS]]))[0].logprob == pytest.approx(-math.log(5003), abs=1e-6)
