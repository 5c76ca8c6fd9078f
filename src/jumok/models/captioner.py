"""Show, attend and tell (Xu 2015): a caption for a picture, with where the model looked for every word.

A picture comes as places a_1 … a_P, one vector each (see :mod:`jumok.models.features`). An LSTM says the
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
from jumok.attention.gpu_support import triton_unsupported_reason
from jumok.attention.mask_types import move_to_device
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import Additive
from jumok.batches.images import CaptionBatch
from jumok.batches.tokens import IGNORE, LayerAttention, Loss, Tokens
from jumok.models.layers.deferred_linear import DeferredLinear
from jumok.models.layers.hard_attention import (
    HardAttentionSampler,
    WeightRecorder,
    entropy,
    one_hot_argmax,
    reinforce_loss,
)
from jumok.models.layers.precision import upcast
from jumok.models.layers.output_loss import linear_cross_entropy, select_labelled
from jumok.models.layers.recurrent import HiddenState, RecurrentStepper, build_rnn
from jumok.models.layers.source_sharing import reorder_sources

__all__ = ["Captioner", "CaptionerConfig", "CaptionerState"]

WeightSelector = Callable[[Tensor], Tensor]  # from weights (N, Q, P) those to look with


@dataclass(frozen=True)
class CaptionerConfig:
    """The sizes of a :class:`Captioner` and how it learns where to look."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    type: Literal["captioner"] = "captioner"
    attention: Literal["soft", "hard"] = "soft"
    width: int = 256  # of the LSTM
    embedding_width: int = 256
    attention_width: int = 256  # of what queries and keys are compared by
    context_gate: bool = True  # β; without, what is found always counts in full
    doubly_stochastic_penalty: float = 1.0  # what it costs not to look at every place about once
    dropout: float = 0.3  # of embeddings, and before the generator
    feature_dropout: float = 0.0  # of what the places are like, the same for all words of a caption
    tie_embeddings: bool = False  # words are said with the vectors that they are read with
    label_smoothing: float = 0.0  # of the labels, in training
    # Of hard attention:
    reinforce_loss: float = 1.0  # how much what came of looking somewhere counts
    entropy_bonus: float = 0.01  # the prize for being undecided where to look, so that it goes on trying
    baseline_decay: float = 0.9  # how much of the moving average of log p of a word stays at each batch
    soft_probability: float = (
        0.5  # the share of pictures in training that are looked at as soft attention does
    )
    inference_attention: Literal["place", "expectation"] = (
        "place"  # else: the most probable place, or as soft attention
    )

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
        if not 0 <= self.soft_probability <= 1:
            raise ValueError(f"expected={self.soft_probability}: a share from 0 to 1 is expected")


# -------------------------------------------------------------------------------------------- looking


@dataclass(frozen=True, eq=False)
class CaptionerMemory:
    """What all steps of a decoder look at."""

    features: Tensor  # (B, P, F)
    keys: PreparedKeys  # made of them, as the score wants them

    def reorder(self, index: Tensor) -> CaptionerMemory:
        """The pictures ``index``, in that order; one may come twice or never."""
        return CaptionerMemory(self.features.index_select(0, index), self.keys.reorder(index))


class CaptionerAttention(nn.Module):
    """What is found, ``(B, Q, F)``, at the places that fit queries ``(B, Q, W)``.

    >>> look = Look(width=3, features=5, hidden=7)
    >>> seen = look.prepare(torch.ones(2, 6, 5))
    >>> look(torch.ones(2, 1, 3), seen).shape, look.weights(torch.ones(2, 4, 3), seen).shape
    (torch.Size([2, 1, 5]), torch.Size([2, 4, 6]))
    """

    def __init__(self, query_width: int, feature_width: int, hidden_width: int) -> None:
        super().__init__()
        self.score = Additive(query_width, feature_width, hidden_width)

    def prepare(self, features: Tensor) -> CaptionerMemory:
        """What all steps share, of places ``(B, P, F)``."""
        keys = self.score.prepare(features)
        # Under autocast the keys have its type. The places get it here rather than at every step.
        return CaptionerMemory(features.to(keys.keys.dtype), keys)

    def forward(
        self, query: Tensor, memory: CaptionerMemory, select_weights: WeightSelector | None = None
    ) -> Tensor:
        """``select_weights`` says what to look with, given the weights. None: with the weights themselves."""
        if select_weights is None:
            return core.attend(query, memory.keys, memory.features, score=self.score)
        weights = core.weights(query, memory.keys, score=self.score)
        return core.mix(select_weights(weights), memory.features)

    def weights(self, query: Tensor, memory: CaptionerMemory) -> Tensor:
        """How much each query looks at each place, ``(B, Q, P)``."""
        return core.weights(query, memory.keys, score=self.score)


# ------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, eq=False)
class CaptionerState:
    """How far decoding has come, for N rows.

    Neighbouring rows that describe the same picture share it: ``memory`` has N / ``rows_per_source`` pictures (see
    :mod:`jumok.models.sharing`).
    """

    hidden: HiddenState  # of the LSTM; both (N, W)
    memory: CaptionerMemory
    rows_per_source: int = 1

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> CaptionerState:
        """The rows ``index``, in that order; a row may come twice or never.

        ``sources``: the pictures that go on, equally many rows of each, side by side. Then these are copied
        only if they change, and no GPU is waited for. Without, each row gets its own.
        """
        kept, shared = reorder_sources(index, sources, self.rows_per_source)
        seen = self.memory
        if kept != list(range(len(seen.features))):
            seen = seen.reorder(move_to_device(torch.tensor(kept, dtype=torch.long), seen.features.device))
        elif shared == self.rows_per_source == 1:
            return self  # each row stays where it is
        index = move_to_device(index, self.hidden[0].device)
        return CaptionerState(tuple(part.index_select(0, index) for part in self.hidden), seen, shared)


@dataclass(frozen=True, eq=False)
class _TeacherForcedCaption:
    """A decoder's way through captions that it is told."""

    memory: CaptionerMemory
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

    supports_compile = False  # torch.compile would unroll the loop over the words
    baseline: Tensor

    def __init__(self, config: CaptionerConfig, vocab_size: int, feature_width: int) -> None:
        super().__init__()
        self.config = config
        width, embedding = config.width, config.embedding_width
        self.embedding = nn.Embedding(vocab_size, embedding)  # E
        self.init_hidden, self.init_cell = (  # f_h and f_c
            nn.Sequential(nn.Linear(feature_width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
            for _ in range(2)
        )
        self.attention = CaptionerAttention(width, feature_width, config.attention_width)
        self.gate = nn.Linear(width, 1) if config.context_gate else None
        self.cell = build_rnn("lstm", embedding + feature_width, width)
        self.hidden_projection = nn.Linear(width, embedding)  # L_h
        self.context_projection = nn.Linear(feature_width, embedding, bias=False)  # L_z
        self.generator = nn.Linear(embedding, vocab_size)  # L_o
        self.dropout, self.feature_dropout = nn.Dropout(config.dropout), nn.Dropout(config.feature_dropout)
        # log p of a word as a rule, for hard attention; at first all words are equally probable
        self.register_buffer("baseline", torch.tensor(-math.log(vocab_size)))
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=embedding**-0.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if config.tie_embeddings:
            self.generator.weight = self.embedding.weight

    # ------------------------------------------------------------------------------------- training

    def loss(self, batch: CaptionBatch) -> Loss:
        """Summed over the labels that count: in training with all that it costs, else the plain NLL.

        The parts are "nll", the plain one, and where they are wanted "doubly_stochastic", "reinforce" and
        "entropy", as they stand in the total. ("reinforce" is zero, and has a gradient.)
        """
        kept = self._build_recorder(batch) if self.training else None
        told = self._run_teacher_forced(batch, kept or self._inference_selector)
        hidden, labels = select_labelled(told.readouts, batch.seq2seq_batch)
        smoothing = self.config.label_smoothing if self.training else 0.0
        weight, bias = self.generator.weight, self.generator.bias
        total, nll = linear_cross_entropy(hidden, weight, labels, smoothing, bias)
        costs: dict[str, Tensor] = {}
        counts = batch.labels != IGNORE
        if self.config.doubly_stochastic_penalty:
            weights = self.attention.weights(told.queries, told.memory) if kept is None else kept.weights
            costs["doubly_stochastic"] = self.config.doubly_stochastic_penalty * _doubly_stochastic_penalty(
                weights, counts
            )
        if isinstance(kept, HardAttentionSampler):
            costs |= self._compute_hard_attention_losses(kept, told.readouts, batch.labels, counts)
        if self.training:
            total = total + sum(costs.values())
        parts = {name: cost.detach() for name, cost in costs.items()}
        return Loss(total, batch.count, {"nll": nll, **parts})

    def _build_recorder(self, batch: CaptionBatch) -> WeightRecorder | None:
        """How to look in training, where weights of single steps have to be kept."""
        if self.config.attention == "hard":
            rows = torch.rand(len(batch.features), device=batch.features.device)
            return HardAttentionSampler(rows >= self.config.soft_probability)
        # A kernel that attends in one go has no weights to show: where there is one, the weights of all steps
        # are computed once more, together, which costs less than to go without it.
        return (
            WeightRecorder()
            if self.config.doubly_stochastic_penalty and triton_unsupported_reason(batch.features) is not None
            else None
        )

    def _compute_hard_attention_losses(
        self, sampler: HardAttentionSampler, readouts: Tensor, labels: Tensor, valid_mask: Tensor
    ) -> dict[str, Tensor]:
        """What hard attention learns where to look by; the baseline moves on."""
        with torch.no_grad():
            log_p = upcast(self.generator(readouts)).log_softmax(-1)
            log_words = log_p.take_along_dim(labels.clamp(min=0)[..., None], -1).squeeze(-1)
        drawn = valid_mask & sampler.sampled_rows[:, None]
        costs = {
            "reinforce": self.config.reinforce_loss
            * reinforce_loss(sampler.position_log_probs, log_words, drawn, self.baseline),
            "entropy": -self.config.entropy_bonus
            * torch.where(valid_mask, entropy(sampler.weights), 0.0).sum(),
        }
        decay, number = self.config.baseline_decay, drawn.sum()
        mean = torch.where(drawn, log_words, 0.0).sum() / number.clamp(min=1)
        moved_on = torch.lerp(mean.to(self.baseline.dtype), self.baseline, decay)
        self.baseline.copy_(torch.where(number > 0, moved_on, self.baseline))
        return costs

    # ------------------------------------------------------------------------------------- decoding

    def start(self, source: Tensor | Tokens) -> CaptionerState:
        """Before the first word, of places ``(B, P, F)``, or these as a search has them (``source_of``)."""
        places = source.ids if isinstance(source, Tokens) else source
        if places.dim() != 3 or places.shape[-1] != self.context_projection.in_features or 0 in places.shape:
            raise ValueError(
                f"places of shape {tuple(places.shape)} came; expected (pictures, places, "
                f"{self.context_projection.in_features}), at least one of each"
            )
        places = self.feature_dropout(places.to(self.generator.weight.dtype))
        mean = places.mean(1)
        return CaptionerState((self.init_hidden(mean), self.init_cell(mean)), self.attention.prepare(places))

    def step(self, state: CaptionerState, ids: Tensor) -> tuple[Tensor, CaptionerState]:
        """The logits ``(N, V)`` of the next words after ``ids`` ``(N,)``, those said last: BOS at first."""
        _, readouts, state = self._run_steps(ids[:, None], state, self._inference_selector)
        return self.generator(readouts.squeeze(1)), state

    @torch.no_grad()
    def compute_attention_maps(self, batch: CaptionBatch) -> list[LayerAttention]:
        """Where the decoder looked for each word, ``(B, 1, T, P)``; of hard attention, before it decided."""
        told = self._run_teacher_forced(batch, self._inference_selector)
        weights = self.attention.weights(told.queries, told.memory)
        return [LayerAttention("attention", (weights * batch.target.valid_mask[..., None])[:, None])]

    @property
    def _inference_selector(self) -> WeightSelector | None:
        hard = self.config.attention == "hard" and self.config.inference_attention == "place"
        return one_hot_argmax if hard else None

    def _run_teacher_forced(
        self, batch: CaptionBatch, select_weights: WeightSelector | None
    ) -> _TeacherForcedCaption:
        if batch.target.packed or min(batch.target.lengths, default=0) < 1:
            raise ValueError(
                "captions came packed, or with nothing to begin from; each is expected in a row of its own "
                "that begins with <s>: see Captions.of"
            )
        state = self.start(batch.features)
        queries, readouts, _ = self._run_steps(batch.target.ids, state, select_weights)
        return _TeacherForcedCaption(state.memory, queries, readouts)

    def _run_steps(
        self, ids: Tensor, state: CaptionerState, select_weights: WeightSelector | None
    ) -> tuple[Tensor, Tensor, CaptionerState]:
        """Say ``ids`` ``(N, T)``: the queries ``(N, T, W)``, what the generator reads, and the state then."""
        words = self.dropout(self.embedding(ids))
        cell = RecurrentStepper(self.cell, known_width=self.config.embedding_width)
        gate = None if self.gate is None else DeferredLinear(self.gate.weight, self.gate.bias)
        hidden = state.hidden
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        for gates in cell.prepare(words).unbind(1):
            query = hidden[0]
            # Rows that share a picture are so many queries to it.
            found = self.attention(
                query.unflatten(0, (-1, state.rows_per_source)), state.memory, select_weights
            ).flatten(0, 1)
            if gate is not None:
                found = found * torch.sigmoid(gate(query))
            (hidden,) = cell(gates, found, [hidden])
            steps.append((query, hidden[0], found))
        queries, states, all_found = (torch.stack(each, 1) for each in zip(*steps, strict=True))
        readouts = self.dropout(words + self.hidden_projection(states) + self.context_projection(all_found))
        return queries, readouts, replace(state, hidden=hidden)


def _doubly_stochastic_penalty(weights: Tensor, valid_mask: Tensor) -> Tensor:
    """``Σ_i (1 − Σ_t α_ti)²`` summed over the pictures that have steps that count, in at least float32."""
    looked = (upcast(weights) * valid_mask[..., None]).sum(1)  # (B, P)
    return ((1 - looked).square().sum(1) * valid_mask.any(1)).sum()
