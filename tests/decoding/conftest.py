"""Models without a network, whose every probability is known."""

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
Scores = Callable[[int, Prefix], list[float]]  # of a sentence (its first id) and what was said: V logits


@dataclass(frozen=True)
class Said:
    """Remembers of every row its sentence and all that was said, so that a wrong reorder shows."""

    sentences: list[int]
    said: list[Prefix]
    shared: int = 1  # rows of each source

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> Said:
        rows = index.tolist()
        assert index.dim() == 1
        assert all(0 <= row < len(self.said) for row in rows)
        assert sources is not None  # what a search knows, it says: else a GPU would be waited for
        shared, rest = divmod(len(rows), len(sources))
        assert not rest
        assert [row // self.shared for row in rows] == [n for n in sources for _ in range(shared)]
        return Said([self.sentences[row] for row in rows], [self.said[row] for row in rows], shared)


@dataclass
class Told:
    """A model that looks the scores of the next word up, by its sentence and the whole of what was said."""

    scores: Scores
    rows: list[int] = field(default_factory=list)  # how many there were at each step

    def start(self, source: Tokens) -> Said:
        assert len(source.ids) == len(source.lengths) > 0
        return Said(source.ids[:, 0].tolist(), [()] * len(source.lengths))

    def step(self, state: Said, ids: Tensor) -> tuple[Tensor, Said]:
        assert ids.shape == (len(state.said),)
        assert ids.dtype == torch.long
        self.rows.append(len(ids))
        said = [(*past, word) for past, word in zip(state.said, ids.tolist(), strict=True)]
        assert all(prefix[0] == BOS for prefix in said)
        logits = [self.scores(n, prefix[1:]) for n, prefix in zip(state.sentences, said, strict=True)]
        return torch.tensor(logits), replace(state, said=said)

    def logp(self, sentence: int, prefix: Prefix) -> list[float]:
        """As the searches see them, in float32."""
        return torch.tensor(self.scores(sentence, prefix)).log_softmax(-1).tolist()

    def logprob(self, sentence: int, ids: Prefix) -> float:
        return math.fsum(self.logp(sentence, ids[:n])[word] for n, word in enumerate(ids))

    def sentences(self, sentence: int, words: list[int], longest: int) -> Iterator[tuple[Prefix, float]]:
        """Everything that can be said, with its log-probability."""
        for length in range(longest + 1):
            for ids in itertools.product(words, repeat=length):
                yield ids, self.logprob(sentence, (*ids, EOS))


def _random_scores(words: int, seed: int, steps: float | None = None) -> Scores:
    def scores(sentence: int, prefix: Prefix) -> list[float]:
        values = np.random.default_rng([seed, sentence, *prefix]).normal(size=words) * 1.5
        # In steps, so that many are equal.
        return (np.round(values / steps) * steps if steps else values).astype(np.float32).tolist()

    return scores


@pytest.fixture(scope="session")
def told() -> Callable[[Scores], Told]:
    """``told(scores)``: a model of these scores."""
    return Told


@pytest.fixture(scope="session")
def random_scores() -> Callable[..., Scores]:
    """``random_scores(words, seed, steps=None)``: others for every sentence and everything said."""
    return _random_scores


@pytest.fixture
def look_every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``look_every(n)``: the host looks every n steps, as it does on a GPU."""
    return lambda n: monkeypatch.setattr(constraints, "get_sync_interval", lambda _: n)


@pytest.fixture(scope="session")
def sentences() -> Callable[..., Tokens]:
    """``sentences(11, 12)``: sources whose first ids are these, of different lengths."""
    return lambda *firsts: Tokens.pad([[n, *[7] * (k % 3), EOS] for k, n in enumerate(firsts)])
