"""A search that is followed says what it would say anyway; what is given up ends, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from jumok.batches.tokens import EOS, Tokens
from jumok.decoding import StreamingDecoder, beam_search, greedy_search

LONG = 9


class Listener:
    """Hears some sentences, and gives some up after so many steps."""

    def __init__(self, hears: Sequence[int] = (), gives_up: dict[int, int] | None = None) -> None:
        self.wanted, self.left = set(hears), dict(gives_up or {})
        self.table_model: dict[int, list[list[int]]] = {n: [] for n in hears}
        self.calls: dict[int, int] = {}

    def is_cancelled(self, sentence: int) -> bool:
        self.calls[sentence] = self.calls.get(sentence, 0) + 1
        return self.calls[sentence] > self.left.get(sentence, 10**9)

    def is_streaming(self, sentence: int) -> bool:
        return sentence in self.wanted

    def on_tokens(self, sentence: int, ids: Sequence[int]) -> None:
        self.table_model[sentence].append(list(ids))


def wordy(random_scores, words: int = 11):
    """Scores by which no sentence ends before its time."""
    inner = random_scores(words, seed=3)

    def scores(sentence, prefix):
        results = inner(sentence, prefix)
        results[EOS] = 9.0 if len(prefix) >= LONG - sentence % 3 else -9.0
        return results

    return scores


@pytest.mark.parametrize("interval", [1, 8])
@pytest.mark.parametrize("size", [1, 3])
def test_streamed_words_are_prefixes_of_the_result(
    table_model, random_scores, sync_every, sentences, interval: int, size: int
) -> None:
    sync_every(interval)
    source = sentences(20, 21, 22)

    def search(model):
        if size == 1:
            return greedy_search(model, source)
        return [one for [one] in beam_search(model, source, beam_size=size)]

    plain = search(table_model(wordy(random_scores)))
    listener = Listener(hears=[101, 102])
    assert search(StreamingDecoder(table_model(wordy(random_scores)), listener, [100, 101, 102])) == plain
    for n, sentence in ((1, 101), (2, 102)):
        so_far = listener.table_model[sentence]
        assert [len(ids) for ids in so_far[: len(plain[n].ids)]] == list(range(1, len(plain[n].ids) + 1))
        if size == 1:
            assert so_far == [list(plain[n].ids[:end]) for end in range(1, len(plain[n].ids) + 1)]


@pytest.mark.parametrize("size", [1, 3])
def test_a_cancelled_sentence_does_not_change_others(table_model, random_scores, sentences, size: int) -> None:
    source, model = sentences(20, 21, 22), table_model(wordy(random_scores))

    def search(model):
        return (
            [[one] for one in greedy_search(model, source)] if size == 1 else beam_search(model, source, beam_size=size)
        )

    plain = search(table_model(wordy(random_scores)))
    listener = Listener(gives_up={1: 2})
    results = search(StreamingDecoder(model, listener, [0, 1, 2]))
    assert results[0] == plain[0]
    assert results[2] == plain[2]
    assert len(results[1][0].ids) == 2
    assert model.rows[:4] == [3, 3 * size, 3 * size, 2 * size]  # the third step was its last


def test_no_steps_after_all_sentences_are_cancelled(table_model, random_scores, sentences) -> None:
    model = table_model(wordy(random_scores))
    beam_search(StreamingDecoder(model, Listener(gives_up={0: 1, 1: 1}), [0, 1]), sentences(20, 21), beam_size=2)
    assert len(model.rows) == 2


def test_empty_sentences_are_skipped(table_model, random_scores) -> None:
    source = Tokens.pad([[EOS], [21, EOS], [EOS], [22, 7, EOS]])
    listener = Listener(hears=[5, 8])
    results = greedy_search(StreamingDecoder(table_model(wordy(random_scores)), listener, [5, 8]), source)
    assert [len(one.ids) for one in results][::2] == [0, 0]
    assert [listener.table_model[n][-1] for n in (5, 8)] == [list(results[1].ids), list(results[3].ids)]


def test_rows_without_sources(table_model, random_scores) -> None:
    model = StreamingDecoder(table_model(wordy(random_scores)), Listener(), [4, 6])
    state = model.start(Tokens.pad([[20, EOS], [21, EOS]]))

    class Any_(type(state.inner)):
        def reorder(self, index, sources=None):
            return self

    state = type(state)(Any_([20, 21], [(), ()]), state.sentences, 2, None)
    assert state.reorder(torch.tensor([1, 1, 0])).sentences == (6, 6, 4)
