"""Show, attend and tell (Xu 2015): a caption for a picture, with where the model looked for every word.

A picture comes as places a_1 … a_P, one vector each (see :mod:`jumok.models.places`). An LSTM says the
caption y_1 … y_T, a word a step, and looks before every word::

    h_0 = f_h(mean a)      c_0 = f_c(mean a)                     how it begins: two small networks
    α_t = softmax(v · tanh(W h_(t−1) + U a_i))                   where it looks, Σ_i α_ti = 1
    z_t = β_t · look(α_t, a)      β_t = σ(w · h_(t−1) + b)       what it finds, and how much that counts
    h_t, c_t = LSTM([E y_(t−1); z_t], h_(t−1), c_(t−1))
    p(y_t) = softmax(L_o (E y_(t−1) + L_h h_t + L_z z_t))

    soft       look = Σ_i α_ti a_i
    hard       look = a_s, s drawn with the probabilities α_t: learned by REINFORCE (:mod:`jumok.models.hard`)

Left alone, soft attention may look at few places only. So it is paid for looking at every place about once in
a caption: the rows of α sum to one anyway, and columns should too ("doubly stochastic")::

    penalty · Σ_i (1 − Σ_t α_ti)²                                of each picture

Shapes: ``B`` pictures (``N`` rows while decoding), ``P`` places, ``T`` steps, ``V`` words in all; widths:
``F`` of a place, ``W`` of a state, ``E`` of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from jumok.attention import core
from jumok.attention.capability import why_no_kernel
from jumok.attention.kinds import moved
from jumok.attention.prepared import Prepared
from jumok.attention.scores import Additive
from jumok.batch import IGNORE, Loss, Map, Tokens
from jumok.models.deferred import Deferred
from jumok.models.hard import Draws, Kept, entropy, most_probable, surrogate
from jumok.models.labels import exact
from jumok.models.output import counted, smoothed_loss
from jumok.models.recurrent import Hidden, Steps, recurrent
from jumok.models.sharing import sources_after
from jumok.pictures import Captions

__all__ = ["Captioner", "CaptionerConfig", "State"]

Pick = Callable[[Tensor], Tensor]  # from weights (N, Q, P) those to look with


@dataclass(frozen=True)
class CaptionerConfig:
    """The sizes of a :class:`Captioner` and how it learns where to look."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["captioner"] = "captioner"
    attention: Literal["soft", "hard"] = "soft"
    width: int = 256  # of the LSTM
    embedding: int = 256
    attention_width: int = 256  # of what queries and keys are compared by
    gate: bool = True  # β; without, what is found always counts in full
    penalty: float = 1.0  # what it costs not to look at every place about once
    dropout: float = 0.3  # of embeddings, and before the generator
    place_dropout: float = 0.0  # of what the places are like, the same for all words of a caption
    tie: bool = False  # words are said with the vectors that they are read with
    smoothing: float = 0.0  # of the labels, in training
    # Of hard attention:
    reinforce: float = 1.0  # how much what came of looking somewhere counts
    entropy: float = 0.01  # the prize for being undecided where to look, so that it goes on trying
    baseline_decay: float = 0.9  # how much of the moving average of log p of a word stays at each batch
    expected: float = 0.5  # the share of pictures in training that are looked at as soft attention does
    at_rest: Literal["place", "expectation"] = "place"  # else: the most probable place, or as soft attention

    def __post_init__(self) -> None:
        for name in ("width", "embedding", "attention_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        for name in ("dropout", "place_dropout", "smoothing", "baseline_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")
        for name in ("penalty", "reinforce", "entropy"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: 0 or more is expected")
        if not 0 <= self.expected <= 1:
            raise ValueError(f"expected={self.expected}: a share from 0 to 1 is expected")


# -------------------------------------------------------------------------------------------- looking


@dataclass(frozen=True, eq=False)
class Seen:
    """What all steps of a decoder look at."""

    places: Tensor  # (B, P, F)
    keys: Prepared  # made of them, as the score wants them

    def reorder(self, index: Tensor) -> Seen:
        """The pictures ``index``, in that order; one may come twice or never."""
        return Seen(self.places.index_select(0, index), self.keys.reorder(index))


class Look(nn.Module):
    """What is found, ``(B, Q, F)``, at the places that fit queries ``(B, Q, W)``.

    >>> look = Look(width=3, features=5, hidden=7)
    >>> seen = look.prepare(torch.ones(2, 6, 5))
    >>> look(torch.ones(2, 1, 3), seen).shape, look.weights(torch.ones(2, 4, 3), seen).shape
    (torch.Size([2, 1, 5]), torch.Size([2, 4, 6]))
    """

    def __init__(self, width: int, features: int, hidden: int) -> None:
        super().__init__()
        self.score = Additive(width, features, hidden)

    def prepare(self, places: Tensor) -> Seen:
        """What all steps share, of places ``(B, P, F)``."""
        keys = self.score.prepare(places)
        # Under autocast the keys have its type. The places get it here rather than at every step.
        return Seen(places.to(keys.keys.dtype), keys)

    def forward(self, query: Tensor, seen: Seen, pick: Pick | None = None) -> Tensor:
        """``pick`` says what to look with, given the weights. None: with the weights themselves."""
        if pick is None:
            return core.attend(query, seen.keys, seen.places, score=self.score)
        weights = core.weights(query, seen.keys, score=self.score)
        return core.mix(pick(weights), seen.places)

    def weights(self, query: Tensor, seen: Seen) -> Tensor:
        """How much each query looks at each place, ``(B, Q, P)``."""
        return core.weights(query, seen.keys, score=self.score)


# ------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, eq=False)
class State:
    """How far decoding has come, for N rows.

    Neighbouring rows that describe the same picture share it: ``seen`` has N / ``shared`` pictures (see
    :mod:`jumok.models.sharing`).
    """

    hidden: Hidden  # of the LSTM; both (N, W)
    seen: Seen
    shared: int = 1

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> State:
        """The rows ``index``, in that order; a row may come twice or never.

        ``sources``: the pictures that go on, equally many rows of each, side by side. Then these are copied
        only if they change, and no GPU is waited for. Without, each row gets its own.
        """
        kept, shared = sources_after(index, sources, self.shared)
        seen = self.seen
        if kept != list(range(len(seen.places))):
            seen = seen.reorder(moved(torch.tensor(kept, dtype=torch.long), seen.places.device))
        elif shared == self.shared == 1:
            return self  # each row stays where it is
        index = moved(index, self.hidden[0].device)
        return State(tuple(part.index_select(0, index) for part in self.hidden), seen, shared)


@dataclass(frozen=True, eq=False)
class _Told:
    """A decoder's way through captions that it is told."""

    seen: Seen
    queries: Tensor  # (B, T, W): h_(t−1)
    readouts: Tensor  # (B, T, E): what the generator reads


class Captioner(nn.Module):
    """Says what is in a picture, given its places.

    >>> model = Captioner(CaptionerConfig(width=8, embedding=8, attention_width=8), 13, features=5).eval()
    >>> batch = Captions.of(torch.randn(2, 6, 5), (2, 3), [[8], [9, 10, 11]])
    >>> model.loss(batch).count, model.maps(batch)[0].weights.shape
    (6, torch.Size([2, 1, 4, 6]))
    >>> state = model.start(batch.places)
    >>> logits, state = model.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    compiles = False  # torch.compile would unroll the loop over the words
    baseline: Tensor

    def __init__(self, config: CaptionerConfig, vocabulary: int, features: int) -> None:
        super().__init__()
        self.config = config
        width, embedding = config.width, config.embedding
        self.embedding = nn.Embedding(vocabulary, embedding)  # E
        self.first_state, self.first_memory = (  # f_h and f_c
            nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
            for _ in range(2)
        )
        self.attention = Look(width, features, config.attention_width)
        self.gate = nn.Linear(width, 1) if config.gate else None
        self.cell = recurrent("lstm", embedding + features, width)
        self.of_state = nn.Linear(width, embedding)  # L_h
        self.of_found = nn.Linear(features, embedding, bias=False)  # L_z
        self.generator = nn.Linear(embedding, vocabulary)  # L_o
        self.dropout, self.place_dropout = nn.Dropout(config.dropout), nn.Dropout(config.place_dropout)
        # log p of a word as a rule, for hard attention; at first all words are equally probable
        self.register_buffer("baseline", torch.tensor(-math.log(vocabulary)))
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=embedding**-0.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if config.tie:
            self.generator.weight = self.embedding.weight

    # ------------------------------------------------------------------------------------- training

    def loss(self, batch: Captions) -> Loss:
        """Summed over the labels that count: in training with all that it costs, else the plain NLL.

        The parts are "nll", the plain one, and where they are wanted "doubly_stochastic", "reinforce" and
        "entropy", as they stand in the total. ("reinforce" is zero, and has a gradient.)
        """
        kept = self._kept(batch) if self.training else None
        told = self._told(batch, kept or self._at_rest)
        hidden, labels = counted(told.readouts, batch.pairs)
        smoothing = self.config.smoothing if self.training else 0.0
        weight, bias = self.generator.weight, self.generator.bias
        total, nll = smoothed_loss(hidden, weight, labels, smoothing, bias)
        costs: dict[str, Tensor] = {}
        counts = batch.labels != IGNORE
        if self.config.penalty:
            weights = self.attention.weights(told.queries, told.seen) if kept is None else kept.weights
            costs["doubly_stochastic"] = self.config.penalty * _uneven(weights, counts)
        if isinstance(kept, Draws):
            costs |= self._of_drawing(kept, told.readouts, batch.labels, counts)
        if self.training:
            total = total + sum(costs.values())
        parts = {name: cost.detach() for name, cost in costs.items()}
        return Loss(total, batch.count, {"nll": nll, **parts})

    def _kept(self, batch: Captions) -> Kept | None:
        """How to look in training, where weights of single steps have to be kept."""
        if self.config.attention == "hard":
            rows = torch.rand(len(batch.places), device=batch.places.device)
            return Draws(rows >= self.config.expected)
        # A kernel that attends in one go has no weights to show: where there is one, the weights of all steps
        # are computed once more, together, which costs less than to go without it.
        return Kept() if self.config.penalty and why_no_kernel(batch.places) is not None else None

    def _of_drawing(
        self, draws: Draws, readouts: Tensor, labels: Tensor, counts: Tensor
    ) -> dict[str, Tensor]:
        """What hard attention learns where to look by; the baseline moves on."""
        with torch.no_grad():
            log_p = exact(self.generator(readouts)).log_softmax(-1)
            log_words = log_p.take_along_dim(labels.clamp(min=0)[..., None], -1).squeeze(-1)
        drawn = counts & draws.sampled[:, None]
        costs = {
            "reinforce": self.config.reinforce * surrogate(draws.log_chosen, log_words, drawn, self.baseline),
            "entropy": -self.config.entropy * torch.where(counts, entropy(draws.weights), 0.0).sum(),
        }
        decay, number = self.config.baseline_decay, drawn.sum()
        mean = torch.where(drawn, log_words, 0.0).sum() / number.clamp(min=1)
        moved_on = torch.lerp(mean.to(self.baseline.dtype), self.baseline, decay)
        self.baseline.copy_(torch.where(number > 0, moved_on, self.baseline))
        return costs

    # ------------------------------------------------------------------------------------- decoding

    def start(self, source: Tensor | Tokens) -> State:
        """Before the first word, of places ``(B, P, F)``, or these as a search has them (``source_of``)."""
        places = source.ids if isinstance(source, Tokens) else source
        if places.dim() != 3 or places.shape[-1] != self.of_found.in_features or 0 in places.shape:
            raise ValueError(
                f"places of shape {tuple(places.shape)} came; expected (pictures, places, "
                f"{self.of_found.in_features}), at least one of each"
            )
        places = self.place_dropout(places.to(self.generator.weight.dtype))
        mean = places.mean(1)
        return State((self.first_state(mean), self.first_memory(mean)), self.attention.prepare(places))

    def step(self, state: State, ids: Tensor) -> tuple[Tensor, State]:
        """The logits ``(N, V)`` of the next words after ``ids`` ``(N,)``, those said last: BOS at first."""
        _, readouts, state = self._run(ids[:, None], state, self._at_rest)
        return self.generator(readouts.squeeze(1)), state

    @torch.no_grad()
    def maps(self, batch: Captions) -> list[Map]:
        """Where the decoder looked for each word, ``(B, 1, T, P)``; of hard attention, before it decided."""
        told = self._told(batch, self._at_rest)
        weights = self.attention.weights(told.queries, told.seen)
        return [Map("attention", (weights * batch.told.real[..., None])[:, None])]

    @property
    def _at_rest(self) -> Pick | None:
        hard = self.config.attention == "hard" and self.config.at_rest == "place"
        return most_probable if hard else None

    def _told(self, batch: Captions, pick: Pick | None) -> _Told:
        if batch.told.packed or min(batch.told.lengths, default=0) < 1:
            raise ValueError(
                "captions came packed, or with nothing to begin from; each is expected in a row of its own "
                "that begins with <s>: see Captions.of"
            )
        state = self.start(batch.places)
        queries, readouts, _ = self._run(batch.told.ids, state, pick)
        return _Told(state.seen, queries, readouts)

    def _run(self, ids: Tensor, state: State, pick: Pick | None) -> tuple[Tensor, Tensor, State]:
        """Say ``ids`` ``(N, T)``: the queries ``(N, T, W)``, what the generator reads, and the state then."""
        words = self.dropout(self.embedding(ids))
        cell = Steps(self.cell, known=self.config.embedding)
        gate = None if self.gate is None else Deferred(self.gate.weight, self.gate.bias)
        hidden = state.hidden
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        for gates in cell.prepare(words).unbind(1):
            query = hidden[0]
            # Rows that share a picture are so many queries to it.
            found = self.attention(query.unflatten(0, (-1, state.shared)), state.seen, pick).flatten(0, 1)
            if gate is not None:
                found = found * torch.sigmoid(gate(query))
            (hidden,) = cell(gates, found, [hidden])
            steps.append((query, hidden[0], found))
        queries, states, all_found = (torch.stack(each, 1) for each in zip(*steps, strict=True))
        readouts = self.dropout(words + self.of_state(states) + self.of_found(all_found))
        return queries, readouts, replace(state, hidden=hidden)


def _uneven(weights: Tensor, counts: Tensor) -> Tensor:
    """``Σ_i (1 − Σ_t α_ti)²`` summed over the pictures that have steps that count, in at least float32."""
    looked = (exact(weights) * counts[..., None]).sum(1)  # (B, P)
    return ((1 - looked).square().sum(1) * counts.any(1)).sum()
