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

When it asks (``query``), how it compares (``score``), where it may look (``attention``) and whether what it
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

from jumok.attention.kinds import moved
from jumok.batch import Loss, Map, Pairs, Tokens
from jumok.models.deferred import Deferred
from jumok.models.lookup import Lookup, Reach, ScoreName, Source
from jumok.models.output import counted, smoothed_loss
from jumok.models.recurrent import Hidden, Steps, read, recurrent, reversed_within, run
from jumok.models.sharing import sources_after

__all__ = ["Seq2Seq", "Seq2SeqConfig", "State"]


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

    kind: Literal["seq2seq"] = "seq2seq"
    cell: Literal["gru", "lstm"] = "gru"
    width: int = 256  # of a state; each direction of the encoder has as much
    embedding: int = 256
    layers: int = 1  # of the encoder, and of the decoder
    bidirectional: bool = True  # the encoder
    reverse: bool = False  # the encoder reads from the last word to the first
    attention: Reach | None = "global"
    score: ScoreName = "additive"
    query: Literal["previous", "current"] = "previous"
    window: int = 10  # words to either side that local attention sees
    input_feeding: bool = True
    readout: Literal["plain", "tanh", "maxout"] = "maxout"
    tied: bool = False  # one weight for target embedding and generator
    dropout: float = 0.2  # of embeddings, between layers, and before the generator
    smoothing: float = 0.0  # of the labels, in training

    def __post_init__(self) -> None:
        for name in ("width", "embedding", "layers", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")
        if self.reverse and self.bidirectional:
            raise ValueError(
                "reverse: a bidirectional encoder reads both ways already; leave one of the two out"
            )
        if self.attention and self.score == "dot" and self.bidirectional:
            raise ValueError(
                "score='dot' compares a state with annotations of its own width, and those of a "
                "bidirectional encoder are twice as wide: use score='general', or bidirectional=false"
            )
        into_state = self.input_feeding and self.query == "previous"
        if self.attention and self.readout == "plain" and not into_state:
            raise ValueError(
                "readout='plain' shows the generator the state alone, and attention does not get there: use "
                "readout='tanh', or query='previous' with input_feeding=true"
            )
        if self.tied and self.readout == "plain" and self.width != self.embedding:
            raise ValueError(
                f"tied with readout='plain' needs states as wide as embeddings, and width={self.width}, "
                f"embedding={self.embedding}: make them equal, or use another readout"
            )

    @property
    def annotation(self) -> int:
        """The width of what the encoder says of a word."""
        return 2 * self.width if self.bidirectional else self.width


# ---------------------------------------------------------------------------------------- the decoder


@dataclass(frozen=True, eq=False)
class State:
    """How far decoding has come, for N rows that are all at the same step."""

    hidden: Hidden  # of the cells; each (layers, N, W)
    source: Source | None = None  # what attention looks at; None without attention
    fed: Tensor | None = None  # (N, ·) what the next step's cell is fed, where that is known before it
    said: int = 0  # steps so far
    shared: int = 1  # so many neighbouring rows continue the same sentence, and look at equal sources

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> State:
        """The rows ``index``, in that order; a row may come twice or never.

        ``sources``: the sentences that go on, equally many rows of each, side by side. If these are all of
        them, with as many rows as before, what rows look at stays as it is.
        """
        stays, shared = False, 1
        if sources is not None:
            kept, shared = sources_after(index, sources, self.shared)
            stays = shared == self.shared and kept == list(range(self.hidden[0].shape[1] // shared))
        if stays and shared == 1:
            return self  # each row stays where it is
        index = moved(index, self.hidden[0].device)
        return State(
            tuple(part.index_select(1, index) for part in self.hidden),
            self.source if stays or self.source is None else self.source.reorder(index),
            None if self.fed is None else self.fed.index_select(0, index),
            self.said,
            shared,
        )


class Readout(nn.Module):
    """What the generator reads at a step; ``readout`` in :class:`Seq2SeqConfig` tells of the kinds."""

    def __init__(self, config: Seq2SeqConfig, context: int) -> None:
        super().__init__()
        self.kind = config.readout
        natural = max(1, config.width // 2) if self.kind == "maxout" else config.width
        self.width = config.embedding if config.tied else natural
        if self.kind != "plain":
            rows = 2 * self.width if self.kind == "maxout" else self.width
            self.state = nn.Linear(config.width + context, rows, bias=False)  # W_c; or U and C
            self.word = nn.Linear(config.embedding, rows) if self.kind == "maxout" else None  # V and b

    def of_words(self, words: Tensor) -> Tensor | None:
        """The part that depends on the words alone, ``(N, T, E)``: known before a loop over the steps."""
        return self.word(words) if self.kind == "maxout" and self.word is not None else None

    def forward(
        self, state: Tensor, context: Tensor | None, of_words: Tensor | None, product: Deferred | None = None
    ) -> Tensor:
        """``(…, R)``. ``product`` is that with ``self.state.weight``, where the steps of a loop share one."""
        if self.kind == "plain":
            return state
        product = product or Deferred(self.state.weight)
        blend = product(state if context is None else torch.cat([state, context], -1), plus=of_words)
        return blend.tanh() if self.kind == "tanh" else torch.maximum(*blend.chunk(2, -1))


class Decoder(nn.Module):
    """From the words said before to what the generator reads, any number of steps at a time."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        sees_source = config.attention is not None or config.input_feeding
        self.readout = Readout(config, context=config.annotation if sees_source else 0)
        self.attention: Lookup | None = None
        fed = config.annotation
        if config.attention is not None:
            self.attention = Lookup(
                config.attention, config.score, config.width, config.annotation, config.window
            )
            fed = self.readout.width if config.query == "current" else fed
        inputs = config.embedding + (fed if config.input_feeding else 0)
        self.cells = recurrent(config.cell, inputs, config.width, config.layers, dropout=config.dropout)

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Embedded words ``(N, T, E)`` to states ``(N, T, W)``, readouts ``(N, T, R)`` and the state then."""
        if self.attention is not None and self.config.input_feeding:
            return self._one_by_one(self.attention, words, state)
        return self._all_at_once(words, state)

    def _all_at_once(self, words: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """No step is fed what attention found at another: first all recurrent steps, then all attention."""
        steps = words.shape[1]
        context = None if state.fed is None else state.fed[:, None].expand(-1, steps, -1)  # Cho's
        inputs = words if context is None else torch.cat([words, context], -1)
        states, hidden = run(self.cells, inputs, state.hidden)
        if self.attention is not None:
            context = self.attention(self.queries(states, state), state.source, state.said)
        readouts = self.readout(states, context, self.readout.of_words(words))
        return states, readouts, replace(state, hidden=hidden, said=state.said + steps)

    def _one_by_one(self, attention: Lookup, words: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """What attention finds goes into the cell: at the same step (Bahdanau), or at the next (Luong)."""
        asks_first = self.config.query == "previous"
        cells = Steps(self.cells, known=self.config.embedding)
        product = None if asks_first else Deferred(self.readout.state.weight)
        of_words = self.readout.of_words(words)
        of_each = [None] * words.shape[1] if of_words is None else of_words.unbind(1)
        hidden = list(zip(*(part.unbind(0) for part in state.hidden), strict=True))  # layer by layer
        fed = cast(Tensor, state.fed)  # None if it asks first: then the loop begins by looking
        states: list[Tensor] = []
        feds: list[Tensor] = []
        for step, (gates, word) in enumerate(zip(cells.prepare(words).unbind(1), of_each, strict=True)):
            if asks_first:
                # c_t = attend(s_(t−1), h̄)
                fed = attention(hidden[-1][0][:, None], state.source, state.said + step).squeeze(1)
            hidden = cells(gates, fed, hidden)  # s_t = cell([y_(t−1); c_t], s_(t−1))
            top = hidden[-1][0]
            if not asks_first:
                # h̃_t = tanh(W_c [h_t; c_t]), c_t = attend(h_t, h̄)
                context = attention(top[:, None], state.source, state.said + step).squeeze(1)
                fed = self.readout(top, context, word, product)
            states.append(top)
            feds.append(fed)
        all_states, found = torch.stack(states, 1), torch.stack(feds, 1)
        readouts = self.readout(all_states, found, of_words) if asks_first else found
        after = replace(
            state,
            hidden=tuple(torch.stack(part) for part in zip(*hidden, strict=True)),
            fed=None if asks_first else fed,
            said=state.said + len(states),
        )
        return all_states, readouts, after

    def queries(self, states: Tensor, before: State) -> Tensor:
        """What attention was asked with, ``(N, T, W)``, at the steps from ``before`` to ``states``."""
        if self.config.query == "current":
            return states
        return torch.cat([before.hidden[0][-1][:, None].to(states.dtype), states[:, :-1]], dim=1)


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

    compiles = False  # torch.compile would unroll the loop over the target

    def __init__(self, config: Seq2SeqConfig, source_vocabulary: int, target_vocabulary: int) -> None:
        super().__init__()
        self.config = config
        width, layers, both = config.width, config.layers, config.bidirectional
        self.source_embedding = nn.Embedding(source_vocabulary, config.embedding)
        self.target_embedding = nn.Embedding(target_vocabulary, config.embedding)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = recurrent(
            config.cell, config.embedding, width, layers, bidirectional=both, dropout=config.dropout
        )
        # An encoder of one direction hands its state over as it is. That of two is twice as wide.
        parts = 2 if config.cell == "lstm" else 1
        self.bridge = nn.Linear(2 * width, parts * layers * width) if both else None
        self.decoder = Decoder(config)
        self.generator = nn.Linear(self.decoder.readout.width, target_vocabulary)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                # Small: with a variance of 1, cells remember words by themselves and learn less to look. (On
                # the built-in sentences, BLEU was 89, not 96, and the error rate of links 0.15, not 0.08.)
                nn.init.normal_(module.weight, std=config.embedding**-0.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if config.tied:
            self.generator.weight = self.target_embedding.weight

    def loss(self, batch: Pairs) -> Loss:
        """Cross-entropy summed over the labels that count, smoothed in training; "nll" is the plain one."""
        _, _, readouts = self._told(batch)
        hidden, labels = counted(self.dropout(readouts), batch)
        smoothing = self.config.smoothing if self.training else 0.0
        total, plain = smoothed_loss(hidden, self.generator.weight, labels, smoothing, self.generator.bias)
        return Loss(total, batch.count, {"nll": plain})

    def start(self, source: Tokens) -> State:
        """Read the source ``(B, S)``, and prepare what all steps of the decoder share."""
        _check("source", source)
        lengths = None if source.mask is None else source.sizes
        words = self.dropout(self.source_embedding(source.ids))
        if self.config.reverse:
            words = reversed_within(words, lengths)
        annotations, hidden = read(self.encoder, words, source)  # (B, S, M)
        last = hidden[0][-1]
        if self.bridge is not None:  # s_0 = tanh(W_s [→h_S; ←h_1])
            last = torch.cat([hidden[0][-2], last], -1)
            first = self.bridge(last).tanh().unflatten(-1, (-1, self.config.layers, self.config.width))
            hidden = tuple(first.permute(1, 2, 0, 3).contiguous())
        attention = self.decoder.attention
        if attention is None:
            return State(hidden, fed=last if self.config.input_feeding else None)
        if self.config.reverse:  # each annotation back to its word
            annotations = reversed_within(annotations, lengths)
        fed = None
        if self.config.input_feeding and self.config.query == "current":
            fed = last.new_zeros(last.shape[0], self.decoder.readout.width)
        return State(hidden, attention.prepare(annotations, source.mask, lengths), fed)

    def step(self, state: State, ids: Tensor) -> tuple[Tensor, State]:
        """The logits ``(N, V)`` of the next words after ``ids`` ``(N,)``, those said last: BOS at first."""
        words = self.dropout(self.target_embedding(ids[:, None]))
        _, readouts, state = self.decoder(words, state)
        return self.generator(self.dropout(readouts.squeeze(1))), state

    @torch.no_grad()
    def maps(self, batch: Pairs) -> list[Map]:
        """Where the decoder looked in the source, ``(B, 1, T, S)``; none without attention."""
        attention = self.decoder.attention
        if attention is None:
            return []
        before, states, _ = self._told(batch)
        queries = self.decoder.queries(states, before)
        weights = attention.weights(queries, cast(Source, before.source), before.said)
        return [Map("decoder.attention", (weights * batch.target.real[..., None])[:, None])]

    def _told(self, batch: Pairs) -> tuple[State, Tensor, Tensor]:
        """The state before the first word, and states and readouts of a decoder that is told the target."""
        _check("target", batch.target)
        before = self.start(batch.source)
        words = self.dropout(self.target_embedding(batch.target.ids))
        states, readouts, _ = self.decoder(words, before)
        return before, states, readouts


def _check(name: str, tokens: Tokens) -> None:
    if tokens.packed:
        raise ValueError(
            f"the {name} is packed, several sentences in one row; recurrent layers read a sentence a row: "
            "make the batch with packed=False"
        )
    if min(tokens.lengths, default=0) < 1:
        raise ValueError(
            f"the {name} has lengths {list(tokens.lengths)}; at least one sentence is expected, and in each "
            "at least one token, such as </s>"
        )
