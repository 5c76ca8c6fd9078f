"""Recurrent encoder-decoders: with a fixed context, with Bahdanau's attention, with Luong's.

An encoder reads the source x_1 … x_S into annotations h̄_1 … h̄_S, one for each word. A decoder writes the
target y_1 … y_T, a word a step. The three families differ in what a step gets to see of the source::

    fixed context           s_0 = the encoder's last state
    (Sutskever, Cho 2014)   s_t = cell(y_(t−1), s_(t−1))
                            p(y_t) = softmax(W s_t)

    Bahdanau (2014)         c_t = attend(s_(t−1), h̄)                 asks with the previous state;
                            s_t = cell([y_(t−1); c_t], s_(t−1))      what it finds goes into the cell
                            t_t = maxout(s_t, c_t, y_(t−1))
                            p(y_t) = softmax(W t_t)

    Luong (2015)            h_t = cell([y_(t−1); h̃_(t−1)], h_(t−1))
                            c_t = attend(h_t, h̄)                     asks with the current state;
                            h̃_t = tanh(W_c [h_t; c_t])               what it finds goes past the cell,
                            p(y_t) = softmax(W h̃_t)                  and is fed to the next step's

When it asks (``attention_query``), how it compares (``attention_score``), where it may look (``attention``) and whether what it
finds goes into the cell (``input_feeding``) are independent choices here.

If nothing of that goes into the cell, all steps run at once. If it does, there is a loop over the target, and
only what must be there is in it: an attention step, the recurrent products, the gates. Embeddings and their
products come before it; readout, generator and all gradients of weights after it.

Shapes: ``B`` sentences (``N`` rows while decoding), ``S`` source and ``T`` target words, ``V`` words in all;
widths: ``E`` of an embedding, ``W`` of a state, ``M`` of an annotation (W, or 2 W if bidirectional), ``R`` of
what the generator reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from jumok.attention.mask_types import move_to_device
from jumok.batches.tokens import LayerAttention, Loss, Seq2SeqBatch, Tokens
from jumok.models.layers.decoder_attention import AttentionScope, DecoderAttention, ScoreName, Seq2SeqMemory
from jumok.models.layers.deferred_linear import DeferredLinear
from jumok.models.layers.output_loss import linear_cross_entropy, select_labelled
from jumok.models.layers.recurrent import (
    HiddenState,
    RecurrentStepper,
    build_rnn,
    reverse_sequences,
    run_rnn,
    run_rnn_on_tokens,
)
from jumok.models.layers.source_sharing import reorder_sources

__all__ = ["Seq2Seq", "Seq2SeqConfig", "Seq2SeqState"]


@dataclass(frozen=True)
class Seq2SeqConfig:
    """The sizes and choices of a :class:`Seq2Seq`. As it stands it is Bahdanau's; the others are::

        Sutskever  cell="lstm", layers=4, bidirectional=False, reverse=True,
                   attention=None, input_feeding=False, readout="plain"
        Cho        bidirectional=False, attention=None
        Luong      cell="lstm", layers=4, bidirectional=False, reverse=True,
                   score="general", query="current", readout="tanh"

    ``input_feeding``: what is known of the source goes into the cell at every step. Without attention that is
    the encoder's last state (Cho); with query="previous" the context c_t (Bahdanau); with query="current" the
    readout h̃ of the step before (Luong).

    ``readout``: what the generator reads. "plain" is the state itself; "tanh" Luong's tanh(W_c [h_t; c_t]);
    "maxout" Cho's and Bahdanau's: of each pair of numbers in U s_t + C c_t + V y_(t−1) + b the larger one.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    type: Literal["seq2seq"] = "seq2seq"
    cell: Literal["gru", "lstm"] = "gru"
    width: int = 256  # of a state; each direction of the encoder has as much
    embedding_width: int = 256
    num_layers: int = 1  # of the encoder, and of the decoder
    bidirectional: bool = True  # the encoder
    reverse_source: bool = False  # the encoder reads from the last word to the first
    attention: AttentionScope | None = "global"
    attention_score: ScoreName = "additive"
    attention_query: Literal["previous", "current"] = "previous"
    attention_window: int = 10  # words to either side that local attention sees
    input_feeding: bool = True
    readout: Literal["plain", "tanh", "maxout"] = "maxout"
    tie_embeddings: bool = False  # one weight for target embedding and generator
    dropout: float = 0.2  # of embeddings, between layers, and before the generator
    label_smoothing: float = 0.0  # of the labels, in training

    def __post_init__(self) -> None:
        for name in ("width", "embedding", "layers", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")
        if self.reverse_source and self.bidirectional:
            raise ValueError(
                "reverse: a bidirectional encoder reads both ways already; leave one of the two out"
            )
        if self.attention and self.attention_score == "dot" and self.bidirectional:
            raise ValueError(
                "score='dot' compares a state with annotations of its own width, and those of a "
                "bidirectional encoder are twice as wide: use score='general', or bidirectional=false"
            )
        into_state = self.input_feeding and self.attention_query == "previous"
        if self.attention and self.readout == "plain" and not into_state:
            raise ValueError(
                "readout='plain' shows the generator the state alone, and attention does not get there: use "
                "readout='tanh', or query='previous' with input_feeding=true"
            )
        if self.tie_embeddings and self.readout == "plain" and self.width != self.embedding_width:
            raise ValueError(
                f"tied with readout='plain' needs states as wide as embeddings, and width={self.width}, "
                f"embedding={self.embedding_width}: make them equal, or use another readout"
            )

    @property
    def annotation_width(self) -> int:
        """The width of what the encoder says of a word."""
        return 2 * self.width if self.bidirectional else self.width


# ---------------------------------------------------------------------------------------- the decoder


@dataclass(frozen=True, eq=False)
class Seq2SeqState:
    """How far decoding has come, for N rows that are all at the same step."""

    hidden: HiddenState  # of the cells; each (layers, N, W)
    memory: Seq2SeqMemory | None = None  # what attention looks at; None without attention
    input_feed: Tensor | None = None  # (N, ·) what the next step's cell is fed, where that is known before it
    num_steps: int = 0  # steps so far
    rows_per_source: int = (
        1  # so many neighbouring rows continue the same sentence, and look at equal sources
    )

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> Seq2SeqState:
        """The rows ``index``, in that order; a row may come twice or never.

        ``sources``: the sentences that go on, equally many rows of each, side by side. If these are all of
        them, with as many rows as before, what rows look at stays as it is.
        """
        stays, shared = False, 1
        if sources is not None:
            kept, shared = reorder_sources(index, sources, self.rows_per_source)
            stays = shared == self.rows_per_source and kept == list(range(self.hidden[0].shape[1] // shared))
        if stays and shared == 1:
            return self  # each row stays where it is
        index = move_to_device(index, self.hidden[0].device)
        return Seq2SeqState(
            tuple(part.index_select(1, index) for part in self.hidden),
            self.memory if stays or self.memory is None else self.memory.reorder(index),
            None if self.input_feed is None else self.input_feed.index_select(0, index),
            self.num_steps,
            shared,
        )


class Seq2SeqReadout(nn.Module):
    """What the generator reads at a step; ``readout`` in :class:`Seq2SeqConfig` tells of the kinds."""

    def __init__(self, config: Seq2SeqConfig, context_width: int) -> None:
        super().__init__()
        self.readout_type = config.readout
        natural = max(1, config.width // 2) if self.readout_type == "maxout" else config.width
        self.width = config.embedding_width if config.tie_embeddings else natural
        if self.readout_type != "plain":
            rows = 2 * self.width if self.readout_type == "maxout" else self.width
            self.state_projection = nn.Linear(
                config.width + context_width, rows, bias=False
            )  # W_c; or U and C
            self.word_projection = (
                nn.Linear(config.embedding_width, rows) if self.readout_type == "maxout" else None
            )  # V and b

    def project_words(self, embeddings: Tensor) -> Tensor | None:
        """The part that depends on the words alone, ``(N, T, E)``: known before a loop over the steps."""
        return (
            self.word_projection(embeddings)
            if self.readout_type == "maxout" and self.word_projection is not None
            else None
        )

    def forward(
        self,
        state: Tensor,
        context: Tensor | None,
        word_term: Tensor | None,
        state_linear: DeferredLinear | None = None,
    ) -> Tensor:
        """``(…, R)``. ``state_linear`` is that with ``self.state_projection.weight``, where the steps of a loop share one."""
        if self.readout_type == "plain":
            return state
        state_linear = state_linear or DeferredLinear(self.state_projection.weight)
        blend = state_linear(state if context is None else torch.cat([state, context], -1), addend=word_term)
        return blend.tanh() if self.readout_type == "tanh" else torch.maximum(*blend.chunk(2, -1))


class Seq2SeqDecoder(nn.Module):
    """From the words said before to what the generator reads, any number of steps at a time."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        sees_source = config.attention is not None or config.input_feeding
        self.readout = Seq2SeqReadout(config, context_width=config.annotation_width if sees_source else 0)
        self.attention: DecoderAttention | None = None
        fed = config.annotation_width
        if config.attention is not None:
            self.attention = DecoderAttention(
                config.attention,
                config.attention_score,
                config.width,
                config.annotation_width,
                config.attention_window,
            )
            fed = self.readout.width if config.attention_query == "current" else fed
        inputs = config.embedding_width + (fed if config.input_feeding else 0)
        self.rnn = build_rnn(config.cell, inputs, config.width, config.num_layers, dropout=config.dropout)

    def forward(self, embeddings: Tensor, state: Seq2SeqState) -> tuple[Tensor, Tensor, Seq2SeqState]:
        """Embedded words ``(N, T, E)`` to states ``(N, T, W)``, readouts ``(N, T, R)`` and the state then."""
        if self.attention is not None and self.config.input_feeding:
            return self._decode_stepwise(self.attention, embeddings, state)
        return self._decode_parallel(embeddings, state)

    def _decode_parallel(
        self, embeddings: Tensor, state: Seq2SeqState
    ) -> tuple[Tensor, Tensor, Seq2SeqState]:
        """No step is fed what attention found at another: first all recurrent steps, then all attention."""
        steps = embeddings.shape[1]
        context = (
            None if state.input_feed is None else state.input_feed[:, None].expand(-1, steps, -1)
        )  # Cho's
        inputs = embeddings if context is None else torch.cat([embeddings, context], -1)
        states, hidden = run_rnn(self.rnn, inputs, state.hidden)
        if self.attention is not None:
            context = self.attention(self.compute_queries(states, state), state.memory, state.num_steps)
        readouts = self.readout(states, context, self.readout.project_words(embeddings))
        return states, readouts, replace(state, hidden=hidden, num_steps=state.num_steps + steps)

    def _decode_stepwise(
        self, attention: DecoderAttention, embeddings: Tensor, state: Seq2SeqState
    ) -> tuple[Tensor, Tensor, Seq2SeqState]:
        """What attention finds goes into the cell: at the same step (Bahdanau), or at the next (Luong)."""
        asks_first = self.config.attention_query == "previous"
        cells = RecurrentStepper(self.rnn, known_width=self.config.embedding_width)
        product = None if asks_first else DeferredLinear(self.readout.state_projection.weight)
        of_words = self.readout.project_words(embeddings)
        of_each = [None] * embeddings.shape[1] if of_words is None else of_words.unbind(1)
        hidden = list(zip(*(part.unbind(0) for part in state.hidden), strict=True))  # layer by layer
        fed = cast(Tensor, state.input_feed)  # None if it asks first: then the loop begins by looking
        states: list[Tensor] = []
        feds: list[Tensor] = []
        for step, (gates, word) in enumerate(zip(cells.prepare(embeddings).unbind(1), of_each, strict=True)):
            if asks_first:
                # c_t = attend(s_(t−1), h̄)
                fed = attention(hidden[-1][0][:, None], state.memory, state.num_steps + step).squeeze(1)
            hidden = cells(gates, fed, hidden)  # s_t = cell([y_(t−1); c_t], s_(t−1))
            top = hidden[-1][0]
            if not asks_first:
                # h̃_t = tanh(W_c [h_t; c_t]), c_t = attend(h_t, h̄)
                context = attention(top[:, None], state.memory, state.num_steps + step).squeeze(1)
                fed = self.readout(top, context, word, product)
            states.append(top)
            feds.append(fed)
        all_states, found = torch.stack(states, 1), torch.stack(feds, 1)
        readouts = self.readout(all_states, found, of_words) if asks_first else found
        after = replace(
            state,
            hidden=tuple(torch.stack(part) for part in zip(*hidden, strict=True)),
            input_feed=None if asks_first else fed,
            num_steps=state.num_steps + len(states),
        )
        return all_states, readouts, after

    def compute_queries(self, states: Tensor, initial_state: Seq2SeqState) -> Tensor:
        """What attention was asked with, ``(N, T, W)``, at the steps from ``initial_state`` to ``states``."""
        if self.config.attention_query == "current":
            return states
        return torch.cat([initial_state.hidden[0][-1][:, None].to(states.dtype), states[:, :-1]], dim=1)


# ------------------------------------------------------------------------------------------ the model


class Seq2Seq(nn.Module):
    """Translates with a recurrent encoder and decoder. Batches are padded.

    >>> model = Seq2Seq(Seq2SeqConfig(width=8, embedding=8), 11, 13).eval()
    >>> batch = Pairs.of([[5, 6], [7]], [[8], [9, 10, 11]])
    >>> model.loss(batch).count
    6
    >>> state = model.start(batch.source)
    >>> logits, state = model.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    supports_compile = False  # torch.compile would unroll the loop over the target

    def __init__(self, config: Seq2SeqConfig, source_vocab_size: int, target_vocab_size: int) -> None:
        super().__init__()
        self.config = config
        width, layers, both = config.width, config.num_layers, config.bidirectional
        self.source_embedding = nn.Embedding(source_vocab_size, config.embedding_width)
        self.target_embedding = nn.Embedding(target_vocab_size, config.embedding_width)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = build_rnn(
            config.cell, config.embedding_width, width, layers, bidirectional=both, dropout=config.dropout
        )
        # An encoder of one direction hands its state over as it is. That of two is twice as wide.
        parts = 2 if config.cell == "lstm" else 1
        self.bridge = nn.Linear(2 * width, parts * layers * width) if both else None
        self.decoder = Seq2SeqDecoder(config)
        self.generator = nn.Linear(self.decoder.readout.width, target_vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                # Small: with a variance of 1, cells remember words by themselves and learn less to look. (On
                # the built-in sentences, BLEU was 89, not 96, and the error rate of links 0.15, not 0.08.)
                nn.init.normal_(module.weight, std=config.embedding_width**-0.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if config.tie_embeddings:
            self.generator.weight = self.target_embedding.weight

    def loss(self, batch: Seq2SeqBatch) -> Loss:
        """Cross-entropy summed over the labels that count, smoothed in training; "nll" is the plain one."""
        _, _, readouts = self._run_teacher_forced(batch)
        hidden, labels = select_labelled(self.dropout(readouts), batch)
        smoothing = self.config.label_smoothing if self.training else 0.0
        total, plain = linear_cross_entropy(
            hidden, self.generator.weight, labels, smoothing, self.generator.bias
        )
        return Loss(total, batch.count, {"nll": plain})

    def start(self, source: Tokens) -> Seq2SeqState:
        """Read the source ``(B, S)``, and prepare what all steps of the decoder share."""
        _check_padded("source", source)
        lengths = None if source.mask is None else source.lengths_tensor
        words = self.dropout(self.source_embedding(source.ids))
        if self.config.reverse_source:
            words = reverse_sequences(words, lengths)
        annotations, hidden = run_rnn_on_tokens(self.encoder, words, source)  # (B, S, M)
        last = hidden[0][-1]
        if self.bridge is not None:  # s_0 = tanh(W_s [→h_S; ←h_1])
            last = torch.cat([hidden[0][-2], last], -1)
            first = self.bridge(last).tanh().unflatten(-1, (-1, self.config.num_layers, self.config.width))
            hidden = tuple(first.permute(1, 2, 0, 3).contiguous())
        attention = self.decoder.attention
        if attention is None:
            return Seq2SeqState(hidden, input_feed=last if self.config.input_feeding else None)
        if self.config.reverse_source:  # each annotation back to its word
            annotations = reverse_sequences(annotations, lengths)
        fed = None
        if self.config.input_feeding and self.config.attention_query == "current":
            fed = last.new_zeros(last.shape[0], self.decoder.readout.width)
        return Seq2SeqState(hidden, attention.prepare(annotations, source.mask, lengths), fed)

    def step(self, state: Seq2SeqState, ids: Tensor) -> tuple[Tensor, Seq2SeqState]:
        """The logits ``(N, V)`` of the next words after ``ids`` ``(N,)``, those said last: BOS at first."""
        words = self.dropout(self.target_embedding(ids[:, None]))
        _, readouts, state = self.decoder(words, state)
        return self.generator(self.dropout(readouts.squeeze(1))), state

    @torch.no_grad()
    def compute_attention_maps(self, batch: Seq2SeqBatch) -> list[LayerAttention]:
        """Where the decoder looked in the source, ``(B, 1, T, S)``; none without attention."""
        attention = self.decoder.attention
        if attention is None:
            return []
        before, states, _ = self._run_teacher_forced(batch)
        queries = self.decoder.compute_queries(states, before)
        weights = attention.weights(queries, cast(Seq2SeqMemory, before.memory), before.num_steps)
        return [LayerAttention("decoder.attention", (weights * batch.target.valid_mask[..., None])[:, None])]

    def _run_teacher_forced(self, batch: Seq2SeqBatch) -> tuple[Seq2SeqState, Tensor, Tensor]:
        """The state before the first word, and states and readouts of a decoder that is told the target."""
        _check_padded("target", batch.target)
        before = self.start(batch.source)
        words = self.dropout(self.target_embedding(batch.target.ids))
        states, readouts, _ = self.decoder(words, before)
        return before, states, readouts


def _check_padded(side: str, tokens: Tokens) -> None:
    if tokens.packed:
        raise ValueError(
            f"the {side} is packed, several sentences in one row; recurrent layers read a sentence a row: "
            "make the batch with packed=False"
        )
    if min(tokens.lengths, default=0) < 1:
        raise ValueError(
            f"the {side} has lengths {list(tokens.lengths)}; at least one sentence is expected, and in each "
            "at least one token, such as </s>"
        )
