"""Show, attend and tell (Xu 2015): captions of images, with soft or hard attention.

An image is given as feature vectors a_1 … a_P of grid positions (see
:mod:`jumok.models.layers.image_encoder`). An LSTM generates the caption y_1 … y_T and attends to the image
before every word::

    h_0 = f_h(mean a)      c_0 = f_c(mean a)                     initial state: two small networks
    α_t = softmax(v · tanh(W h_(t−1) + U a_i))                   attention weights, Σ_i α_ti = 1
    z_t = β_t · context(α_t, a)      β_t = σ(w · h_(t−1) + b)    gated context
    h_t, c_t = LSTM([E y_(t−1); z_t], h_(t−1), c_(t−1))
    p(y_t) = softmax(L_o (E y_(t−1) + L_h h_t + L_z z_t))        deep output

    soft       context = Σ_i α_ti a_i
    hard       context = a_s, where position s is sampled with the probabilities α_t

Soft attention may attend to few positions only. A penalty encourages weights that sum to about one for every
position over a caption, as they do for every word ("doubly stochastic")::

    doubly_stochastic_penalty · Σ_i (1 − Σ_t α_ti)²              for each image

Hard attention maximizes the expectation, over all sequences s = s_1 … s_T of positions, of the caption's log
probability (Xu 2015, section 4.1)::

    L = Σ_s p(s) log p(y | s)

    ∂L = E_s [ ∂ log p(y | s)  +  Σ_t (R_t − b_t) ∂ log p(s_t) ]         REINFORCE
    R_t = Σ_(u ≥ t) log p(y_u | s)                                       the reward

Words before step t do not depend on s_t, so R_t leaves them out. (In the paper the reward includes all words:
the same on average, with more variance.) The baseline b_t reduces the variance further. It is a moving
average of the log probability of a word, times the number of words left.

Shapes: ``B`` images (``N`` rows while decoding), ``P`` grid positions, ``T`` steps, ``V`` words of the
vocabulary; widths: ``F`` of a feature vector, ``W`` of a state, ``E`` of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention import core
from jumok.attention.gpu_support import triton_unsupported_reason
from jumok.attention.mask_types import move_to_device
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import Additive
from jumok.batches.images import CaptionBatch
from jumok.batches.tokens import IGNORE, LayerAttention, Loss, Tokens
from jumok.config import Config
from jumok.models.layers.deferred_linear import DeferredLinear
from jumok.models.layers.image_encoder import ImageEncoder
from jumok.models.layers.output_loss import linear_cross_entropy, select_labelled
from jumok.models.layers.precision import upcast
from jumok.models.layers.recurrent import HiddenState, RecurrentStepper, build_rnn
from jumok.models.layers.source_sharing import reorder_sources

WeightSelector = Callable[[Tensor], Tensor]  # maps attention weights (N, Q, P) to those of the context


@dataclass(frozen=True)
class CaptionerConfig(Config):
    """Configuration of a :class:`Captioner`."""

    type: Literal["captioner"] = "captioner"
    attention: Literal["soft", "hard"] = "soft"
    width: int = 256  # of the LSTM
    embedding_width: int = 256
    attention_width: int = 256  # of the hidden layer of the additive score
    context_gate: bool = True  # whether there is a gate β; without it the context is not scaled
    doubly_stochastic_penalty: float = 1.0
    dropout: float = 0.3  # of embeddings, and before the generator
    feature_dropout: float = 0.0  # of feature vectors; the same mask for all words of a caption
    tie_embeddings: Literal["none", "target"] = "none"  # "target": one weight for embedding and generator
    label_smoothing: float = 0.0  # in training only
    # Hard attention only:
    reinforce_loss: float = 1.0  # weight of the REINFORCE term
    entropy_bonus: float = 0.01  # weight of the entropy of the attention weights, which keeps it exploring
    baseline_decay: float = 0.9  # of the moving average of the log probability of a word, per batch
    soft_probability: float = 0.5  # fraction of images in training that use soft attention instead
    inference_attention: Literal["hard", "soft"] = "hard"  # most probable position, or soft attention

    def __post_init__(self) -> None:
        self.check_ranges(
            positive=("width", "embedding_width", "attention_width"),
            fraction=("dropout", "feature_dropout", "label_smoothing", "baseline_decay"),
            non_negative=("doubly_stochastic_penalty", "reinforce_loss", "entropy_bonus"),
        )
        if not 0 <= self.soft_probability <= 1:
            raise ValueError(f"soft_probability={self.soft_probability}: a number from 0 to 1 is expected")


# -------------------------------------------------------------------------------------- attention


@dataclass(frozen=True, eq=False)
class CaptionerMemory:
    """Image features, as all decoder steps attend to them."""

    features: Tensor  # (B, P, F)
    keys: PreparedKeys  # of the features

    def reorder(self, index: Tensor) -> CaptionerMemory:
        """Return the images ``index``, in that order. Images may be repeated or left out."""
        return CaptionerMemory(self.features.index_select(0, index), self.keys.reorder(index))


class CaptionerAttention(nn.Module):
    """Additive attention from queries ``(B, Q, W)`` to image features: contexts ``(B, Q, F)``.

    >>> attention = CaptionerAttention(query_width=3, feature_width=5, hidden_width=7)
    >>> memory = attention.prepare(torch.ones(2, 6, 5))
    >>> attention(torch.ones(2, 1, 3), memory).shape, attention.weights(torch.ones(2, 4, 3), memory).shape
    (torch.Size([2, 1, 5]), torch.Size([2, 4, 6]))
    """

    def __init__(self, query_width: int, feature_width: int, hidden_width: int) -> None:
        super().__init__()
        self.score = Additive(query_width, feature_width, hidden_width)

    def prepare(self, features: Tensor) -> CaptionerMemory:
        """Compute once what all steps share, from features ``(B, P, F)``."""
        keys = self.score.prepare(features)
        # Under autocast the keys have its dtype. The features are converted here, not at every step.
        return CaptionerMemory(features.to(keys.keys.dtype), keys)

    def forward(self, query: Tensor, memory: CaptionerMemory, select_weights: WeightSelector | None = None) -> Tensor:
        """Contexts ``(B, Q, F)``. ``select_weights`` may replace the weights, as hard attention does."""
        if select_weights is None:
            return core.attend(query, memory.keys, memory.features, score=self.score)
        weights = core.weights(query, memory.keys, score=self.score)
        return core.mix(select_weights(weights), memory.features)

    def weights(self, query: Tensor, memory: CaptionerMemory) -> Tensor:
        """Attention weights ``(B, Q, P)``."""
        return core.weights(query, memory.keys, score=self.score)


class WeightRecorder:
    """Soft attention that records the weights of all steps for the penalty."""

    def __init__(self) -> None:
        self._step_weights: list[Tensor] = []

    def __call__(self, weights: Tensor) -> Tensor:
        """Record weights ``(B, 1, P)`` and return them."""
        self._step_weights.append(weights)
        return weights

    @property
    def weights(self) -> Tensor:
        """Weights of all steps, ``(B, T, P)``."""
        return torch.cat(self._step_weights, 1)


class HardAttentionSampler(WeightRecorder):
    """Hard attention in the rows ``sampled_rows`` ``(B,)``: samples one position, and records it.

    The other rows use soft attention, which has a gradient without noise.
    """

    def __init__(self, sampled_rows: Tensor) -> None:
        super().__init__()
        self.sampled_rows = sampled_rows
        self._positions: list[Tensor] = []

    def __call__(self, weights: Tensor) -> Tensor:
        positions = sample_positions(weights)
        self._positions.append(positions)
        return torch.where(self.sampled_rows[:, None, None], _one_hot(positions, weights), super().__call__(weights))

    @property
    def position_log_probs(self) -> Tensor:
        """log p(s_t) of the sampled positions, ``(B, T)``, with a gradient."""
        positions = torch.cat(self._positions, 1)
        return _safe_log(self.weights).take_along_dim(positions[..., None], -1).squeeze(-1)


def sample_positions(weights: Tensor) -> Tensor:
    """Sample a position ``(…)`` for each row of weights ``(…, P)``, with these probabilities.

    It is the minimum of P exponential variables with these rates. (``torch.multinomial`` waits for a GPU.)
    """
    rates = upcast(weights.detach())
    return (rates / torch.empty_like(rates).exponential_()).argmax(-1)


def one_hot_argmax(weights: Tensor) -> Tensor:
    """Give all weight to the most probable position, ``(…, P)``.

    >>> one_hot_argmax(torch.tensor([[0.2, 0.5, 0.3]]))
    tensor([[0., 1., 0.]])
    """
    return _one_hot(weights.argmax(-1), weights)


def _one_hot(positions: Tensor, weights: Tensor) -> Tensor:
    return F.one_hot(positions, weights.shape[-1]).to(weights.dtype)


def _safe_log(weights: Tensor) -> Tensor:
    weights = upcast(weights)
    return weights.clamp(min=torch.finfo(weights.dtype).tiny).log()


# ----------------------------------------------------------------------------------------- losses


def reinforce_loss(position_log_probs: Tensor, word_log_probs: Tensor, valid_mask: Tensor, baseline: Tensor) -> Tensor:
    """A loss with value zero and the gradient of REINFORCE.

    Its value would have no meaning, and would obscure the total loss.

    Args:
        position_log_probs: ``(B, T)``, log p(s_t).
        word_log_probs: ``(B, T)``, log p(y_t | s). As a reward, it gets no gradient.
        valid_mask: ``(B, T)``, False at steps that do not count.
        baseline: Average log probability of a word.

    >>> word_log_probs = torch.tensor([[-1.0, -2.0]])
    >>> position_log_probs = torch.zeros(1, 2, requires_grad=True)
    >>> valid_mask, baseline = torch.ones(1, 2, dtype=torch.bool), torch.tensor(-1.0)
    >>> reinforce_loss(position_log_probs, word_log_probs, valid_mask, baseline).backward()
    >>> position_log_probs.grad  # 1 + 2 − 2 · 1, and 2 − 1
    tensor([[1., 1.]])
    """
    rewards = torch.where(valid_mask, word_log_probs.detach() - baseline, 0.0)
    advantage = rewards.flip(1).cumsum(1).flip(1)  # R_t − b_t
    objective = torch.where(valid_mask, advantage * position_log_probs, 0.0).sum()
    return objective.detach() - objective


def entropy(weights: Tensor) -> Tensor:
    """Entropy of each row of weights ``(…, P)``, from 0 to log P."""
    return -(upcast(weights) * _safe_log(weights)).sum(-1)


def _doubly_stochastic_penalty(weights: Tensor, valid_mask: Tensor) -> Tensor:
    """``Σ_i (1 − Σ_t α_ti)²``, summed over the images with labels that count, in float32."""
    position_sums = (upcast(weights) * valid_mask[..., None]).sum(1)  # (B, P)
    return ((1 - position_sums).square().sum(1) * valid_mask.any(1)).sum()


# -------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, eq=False)
class CaptionerState:
    """Decoding state of N rows.

    Neighbouring rows that describe the same image share it: ``memory`` has N / ``rows_per_source`` images
    (see :mod:`jumok.models.layers.source_sharing`).
    """

    hidden: HiddenState  # of the LSTM; both (N, W)
    memory: CaptionerMemory
    rows_per_source: int = 1

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> CaptionerState:
        """See :class:`~jumok.decoding.protocol.DecoderState`. The memory is copied only if the images change."""
        source_rows, rows_per_source = reorder_sources(index, sources, self.rows_per_source)
        memory = self.memory
        if source_rows != list(range(len(memory.features))):
            source_index = torch.tensor(source_rows, dtype=torch.long)
            memory = memory.reorder(move_to_device(source_index, memory.features.device))
        elif rows_per_source == self.rows_per_source == 1:
            return self  # no row moves
        index = move_to_device(index, self.hidden[0].device)
        hidden = tuple(part.index_select(0, index) for part in self.hidden)
        return CaptionerState(hidden, memory, rows_per_source)


@dataclass(frozen=True, eq=False)
class _TeacherForcedCaption:
    """Result of running the decoder on given captions."""

    memory: CaptionerMemory
    queries: Tensor  # (B, T, W): h_(t−1)
    readouts: Tensor  # (B, T, E): input of the generator


class Captioner(nn.Module):
    """Generates captions from image features.

    >>> config = CaptionerConfig(width=8, embedding_width=8, attention_width=8)
    >>> model = Captioner(config, vocab_size=13, feature_width=5).eval()
    >>> batch = CaptionBatch.from_sequences(torch.randn(2, 6, 5), (2, 3), [[8], [9, 10, 11]])
    >>> model.loss(batch).count, model.compute_attention_maps(batch)[0].weights.shape
    (6, torch.Size([2, 1, 4, 6]))
    >>> state = model.start(batch.features)
    >>> logits, state = model.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    supports_compile = False  # torch.compile would unroll the loop over the words
    baseline: Tensor

    def __init__(self, config: CaptionerConfig, vocab_size: int, feature_width: int) -> None:
        super().__init__()
        self.config = config
        width, embedding_width = config.width, config.embedding_width
        self.embedding = nn.Embedding(vocab_size, embedding_width)  # E
        self.init_hidden, self.init_cell = (  # f_h and f_c
            nn.Sequential(nn.Linear(feature_width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
            for _ in range(2)
        )
        self.attention = CaptionerAttention(width, feature_width, config.attention_width)
        self.gate = nn.Linear(width, 1) if config.context_gate else None  # β
        self.cell = build_rnn("lstm", embedding_width + feature_width, width)
        self.hidden_projection = nn.Linear(width, embedding_width)  # L_h
        self.context_projection = nn.Linear(feature_width, embedding_width, bias=False)  # L_z
        self.generator = nn.Linear(embedding_width, vocab_size)  # L_o
        self.dropout, self.feature_dropout = nn.Dropout(config.dropout), nn.Dropout(config.feature_dropout)
        # Average log probability of a word, for hard attention. Initially all words are equally probable.
        self.register_buffer("baseline", torch.tensor(-math.log(vocab_size)))
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=embedding_width**-0.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if config.tie_embeddings == "target":
            self.generator.weight = self.embedding.weight

    # ------------------------------------------------------------------------------- training

    def loss(self, batch: CaptionBatch) -> Loss:
        """Summed over the labels: in training the negative log-likelihood with all other terms, else without.

        The parts are "nll", without label smoothing, and if they are used "doubly_stochastic", "reinforce"
        and "entropy", with their weights. ("reinforce" is zero, but has a gradient.)
        """
        recorder = self._build_recorder(batch) if self.training else None
        caption = self._run_teacher_forced(batch, recorder or self._inference_selector)
        hidden, labels = select_labelled(caption.readouts, batch.seq2seq_batch)
        smoothing = self.config.label_smoothing if self.training else 0.0
        weight, bias = self.generator.weight, self.generator.bias
        total, nll = linear_cross_entropy(hidden, weight, labels, smoothing, bias)
        terms: dict[str, Tensor] = {}
        valid_mask = batch.labels != IGNORE
        if self.config.doubly_stochastic_penalty:
            weights = self.attention.weights(caption.queries, caption.memory) if recorder is None else recorder.weights
            penalty = _doubly_stochastic_penalty(weights, valid_mask)
            terms["doubly_stochastic"] = self.config.doubly_stochastic_penalty * penalty
        if isinstance(recorder, HardAttentionSampler):
            terms |= self._compute_hard_attention_losses(recorder, caption.readouts, batch.labels, valid_mask)
        if self.training:
            total = total + sum(terms.values())
        parts = {name: term.detach() for name, term in terms.items()}
        return Loss(total, batch.count, {"nll": nll, **parts})

    def _build_recorder(self, batch: CaptionBatch) -> WeightRecorder | None:
        """The attention of training, if the weights of single steps must be recorded."""
        if self.config.attention == "hard":
            rows = torch.rand(len(batch.features), device=batch.features.device)
            return HardAttentionSampler(rows >= self.config.soft_probability)
        # A fused attention kernel returns no weights. If there is one, the weights of all steps are computed
        # again in one call, which is cheaper than not using the kernel.
        return (
            WeightRecorder()
            if self.config.doubly_stochastic_penalty and triton_unsupported_reason(batch.features) is not None
            else None
        )

    def _compute_hard_attention_losses(
        self, sampler: HardAttentionSampler, readouts: Tensor, labels: Tensor, valid_mask: Tensor
    ) -> dict[str, Tensor]:
        """The terms of the loss that train hard attention. It also updates the baseline."""
        with torch.no_grad():
            log_probs = upcast(self.generator(readouts)).log_softmax(-1)
            word_log_probs = log_probs.take_along_dim(labels.clamp(min=0)[..., None], -1).squeeze(-1)
        sampled_mask = valid_mask & sampler.sampled_rows[:, None]
        terms = {
            "reinforce": self.config.reinforce_loss
            * reinforce_loss(sampler.position_log_probs, word_log_probs, sampled_mask, self.baseline),
            "entropy": -self.config.entropy_bonus * torch.where(valid_mask, entropy(sampler.weights), 0.0).sum(),
        }
        decay, count = self.config.baseline_decay, sampled_mask.sum()
        mean = torch.where(sampled_mask, word_log_probs, 0.0).sum() / count.clamp(min=1)
        updated = torch.lerp(mean.to(self.baseline.dtype), self.baseline, decay)
        self.baseline.copy_(torch.where(count > 0, updated, self.baseline))
        return terms

    # ------------------------------------------------------------------------------- decoding

    def start(self, source: Tensor | Tokens) -> CaptionerState:
        """Return the initial state for features ``(B, P, F)``, or for these as tokens."""
        features = source.ids if isinstance(source, Tokens) else source
        feature_width = self.context_projection.in_features
        if features.dim() != 3 or features.shape[-1] != feature_width or 0 in features.shape:
            raise ValueError(
                f"features have shape {tuple(features.shape)}; expected (images, positions, "
                f"{feature_width}), at least one of each"
            )
        features = self.feature_dropout(features.to(self.generator.weight.dtype))
        mean = features.mean(1)
        hidden = self.init_hidden(mean), self.init_cell(mean)
        return CaptionerState(hidden, self.attention.prepare(features))

    def step(self, state: CaptionerState, ids: Tensor) -> tuple[Tensor, CaptionerState]:
        """Return the logits ``(N, V)`` of the next words after ``ids`` ``(N,)``, which are BOS at first."""
        _, readouts, state = self._run_steps(ids[:, None], state, self._inference_selector)
        return self.generator(readouts.squeeze(1)), state

    @torch.no_grad()
    def compute_attention_maps(self, batch: CaptionBatch) -> list[LayerAttention]:
        """Attention weights ``(B, 1, T, P)``. In hard attention they are probabilities of positions."""
        caption = self._run_teacher_forced(batch, self._inference_selector)
        weights = self.attention.weights(caption.queries, caption.memory)
        return [LayerAttention("attention", (weights * batch.target.valid_mask[..., None])[:, None])]

    @property
    def _inference_selector(self) -> WeightSelector | None:
        is_hard = self.config.attention == "hard" and self.config.inference_attention == "hard"
        return one_hot_argmax if is_hard else None

    def _run_teacher_forced(self, batch: CaptionBatch, select_weights: WeightSelector | None) -> _TeacherForcedCaption:
        if batch.target.packed or min(batch.target.lengths, default=0) < 1:
            raise ValueError(
                "captions are packed, or empty; expected one caption per row that begins with <s>: see "
                "CaptionBatch.from_sequences"
            )
        state = self.start(batch.features)
        queries, readouts, _ = self._run_steps(batch.target.ids, state, select_weights)
        return _TeacherForcedCaption(state.memory, queries, readouts)

    def _run_steps(
        self, ids: Tensor, state: CaptionerState, select_weights: WeightSelector | None
    ) -> tuple[Tensor, Tensor, CaptionerState]:
        """Return queries ``(N, T, W)``, readouts ``(N, T, E)`` and the final state for words ``(N, T)``."""
        embeddings = self.dropout(self.embedding(ids))
        cell = RecurrentStepper(self.cell, known_width=self.config.embedding_width)
        gate = None if self.gate is None else DeferredLinear(self.gate.weight, self.gate.bias)
        hidden = state.hidden
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        for gates in cell.prepare(embeddings).unbind(1):
            query = hidden[0]  # h_(t−1)
            # Rows that share an image are several queries to it.
            queries = query.unflatten(0, (-1, state.rows_per_source))
            context = self.attention(queries, state.memory, select_weights).flatten(0, 1)
            if gate is not None:
                context = context * torch.sigmoid(gate(query))  # z_t = β_t · context
            (hidden,) = cell(gates, context, [hidden])
            steps.append((query, hidden[0], context))
        queries, states, contexts = (torch.stack(parts, 1) for parts in zip(*steps, strict=True))
        outputs = embeddings + self.hidden_projection(states) + self.context_projection(contexts)
        return queries, self.dropout(outputs), replace(state, hidden=hidden)


# -------------------------------------------------------------------------------------- pixels


class ImageCaptioner(nn.Module):
    """An image encoder and a captioner: a captioner of pixels, which may fine-tune its encoder.

    The features of a batch are pixels, or features that the encoder computed before, or indices into a
    feature table (see :class:`~jumok.batches.images.CaptionBatch`).
    """

    supports_compile = False

    def __init__(self, encoder: ImageEncoder, captioner: Any) -> None:
        super().__init__()
        self.encoder, self.captioner = encoder, captioner  # a Captioner, or a CaptionTransformer

    def loss(self, batch: CaptionBatch) -> Loss:
        """The loss of the captioner."""
        return self.captioner.loss(self.encode_images(batch))  # type: ignore[no-any-return]

    def start(self, source: Tensor | Tokens) -> Any:
        """Return the initial state for pixels or features, or these as tokens (``features_as_tokens``)."""
        inputs = source.ids if isinstance(source, Tokens) else source
        return self.captioner.start(self.encoder(inputs)[0] if inputs.dim() == 4 else inputs)

    def step(self, state: Any, ids: Tensor) -> tuple[Tensor, Any]:
        """A step of the captioner."""
        return self.captioner.step(state, ids)  # type: ignore[no-any-return]

    @torch.no_grad()
    def compute_attention_maps(self, batch: CaptionBatch) -> list[LayerAttention]:
        """The attention maps of the captioner."""
        maps: list[LayerAttention] = self.captioner.compute_attention_maps(self.encode_images(batch))
        return [LayerAttention(f"captioner.{layer.name}", layer.weights) for layer in maps]

    def encode_images(self, batch: CaptionBatch) -> CaptionBatch:
        """Replace pixels or indices in a batch by features."""
        if batch.feature_table is not None:
            return replace(batch, features=batch.feature_table.select(batch.features), feature_table=None)
        if not batch.has_pixels:
            return batch
        features, grid = self.encoder(batch.features)
        return replace(batch, features=features, grid=grid)
