"""Models without a network, with known probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from jumok.batches.tokens import BOS, EOS, Tokens
from jumok.decoding import constraints

Prefix = tuple[int, ...]
Scores = Callable[[int, Prefix], list[float]]  # of a sentence (its first id) and a prefix: V logits


@dataclass(frozen=True)
class PrefixState:
    """The sentence and the prefix of every row, so that a wrong reorder is detected."""

    sentences: list[int]
    prefixes: list[Prefix]
    shared: int = 1  # rows of each source

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> PrefixState:
        rows = index.tolist()
        assert index.dim() == 1
        assert all(0 <= row < len(self.prefixes) for row in rows)
        assert sources is not None  # searches must pass the sources, to avoid a synchronization
        shared, rest = divmod(len(rows), len(sources))
        assert not rest
        assert [row // self.shared for row in rows] == [n for n in sources for _ in range(shared)]
        return PrefixState([self.sentences[row] for row in rows], [self.prefixes[row] for row in rows], shared)


@dataclass
class TableModel:
    """A model that looks up the scores of the next word by sentence and prefix."""

    scores: Scores
    rows: list[int] = field(default_factory=list)  # number of rows of each step

    def start(self, source: Tokens) -> PrefixState:
        assert len(source.ids) == len(source.lengths) > 0
        return PrefixState(source.ids[:, 0].tolist(), [()] * len(source.lengths))

    def step(self, state: PrefixState, ids: Tensor) -> tuple[Tensor, PrefixState]:
        assert ids.shape == (len(state.prefixes),)
        assert ids.dtype == torch.long
        self.rows.append(len(ids))
        prefixes = [(*past, word) for past, word in zip(state.prefixes, ids.tolist(), strict=True)]
        assert all(prefix[0] == BOS for prefix in prefixes)
        logits = [self.scores(n, prefix[1:]) for n, prefix in zip(state.sentences, prefixes, strict=True)]
        return torch.tensor(logits), replace(state, prefixes=prefixes)

    def logp(self, sentence: int, prefix: Prefix) -> list[float]:
        """Log-probabilities in float32, as in the searches."""
        return torch.tensor(self.scores(sentence, prefix)).log_softmax(-1).tolist()

    def logprob(self, sentence: int, ids: Prefix) -> float:
        return math.fsum(self.logp(sentence, ids[:n])[word] for n, word in enumerate(ids))

    def sentences(self, sentence: int, words: list[int], longest: int) -> Iterator[tuple[Prefix, float]]:
        """All possible sentences, with their log-probabilities."""
        for length in range(longest + 1):
            for ids in itertools.product(words, repeat=length):
                yield ids, self.logprob(sentence, (*ids, EOS))


def _random_scores(words: int, seed: int, steps: float | None = None) -> Scores:
    def scores(sentence: int, prefix: Prefix) -> list[float]:
        values = np.random.default_rng([seed, sentence, *prefix]).normal(size=words) * 1.5
        # With steps, many values are equal.
        return (np.round(values / steps) * steps if steps else values).astype(np.float32).tolist()

    return scores


@pytest.fixture(scope="session")
def table_model() -> Callable[[Scores], TableModel]:
    """``table_model(scores)``: a model of these scores."""
    return TableModel


@pytest.fixture(scope="session")
def random_scores() -> Callable[..., Scores]:
    """``random_scores(words, seed, steps=None)``: different for every sentence and prefix."""
    return _random_scores


@pytest.fixture
def sync_every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``sync_every(n)``: the host synchronizes every n steps, as on a GPU."""
    return lambda n: monkeypatch.setattr(constraints, "get_sync_interval", lambda _: n)


@pytest.fixture(scope="session")
def sentences() -> Callable[..., Tokens]:
    """``sentences(11, 12)``: sources whose first ids are these, of different lengths."""
    return lambda *firsts: Tokens.pad([[n, *[7] * (k % 3), EOS] for k, n in enumerate(firsts)])
