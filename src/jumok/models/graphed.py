"""The Transformer's steps over memory of a fixed size, so that a GPU can replay them.

A step of decoding is a hundred small kernels, and to launch them one by one from Python takes ten times as
long as to run them. A CUDA graph launches all at once, but it is bound to the sizes and addresses it was
recorded with. So here nothing grows from step to step: keys and values lie in memory of a rounded size, and
how far decoding has come is a number on the device. The mathematics is the model's own.

**Beams** of a sentence write into one memory: at every step each adds the key and value of its word, in a
slot of its own. Which of them a beam goes on from, a table says, and attention takes it for its mask. To
reorder the beams of a sentence is to reorder rows of that table; no key and no value is moved::

    place        0       1       2
    slot       a b c   a b c   a b c

    beam a     ■ · ·   · ■ ·   ■ · ·         went on from what b said second, which went on from a
    beam b     ■ · ·   · ■ ·   · ■ ·
    beam c     · · ■   · · ■   · · ■

Shapes: ``G`` sources and ``W`` beams of each, ``N`` = G · W rows, ``S`` words of a source, ``P`` places for
what is said; ``H`` heads of width ``D``. G, S and P are rounded up; padding runs along, and nobody reads it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jumok.attention.cache import Cache, Numbers, Room
from jumok.attention.heads import MultiHead
from jumok.attention.kinds import Ready, moved
from jumok.batch import Tokens, rounded
from jumok.models.sharing import sources_after
from jumok.models.transformer import Transformer

__all__ = ["Graphed", "Size", "State"]

# The smallest sizes. On a GPU less would not be faster, and each size has a graph of its own.
SOURCES, WORDS, PLACES = 8, 32, 32


class Size(NamedTuple):
    """What a graph is recorded for."""

    sources: int  # G
    beams: int  # W
    words: int  # S
    places: int  # P


# ---------------------------------------------------------------------------------------- the memory


@dataclass(frozen=True, eq=False)
class _Slots(Cache):
    """A cache that never grows: what is appended is written at a place that the device knows."""

    place: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, lengths: Numbers | None = None) -> Cache:
        """Write ``(G, H, W, D)``, a key and a value of each beam. The cache itself changes."""
        assert self.room is not None
        assert self.place is not None
        for held, new in ((self.room.key, key), (self.room.value, value)):
            held.unflatten(2, (-1, new.shape[2])).index_copy_(2, self.place, new.unsqueeze(2))
        return self


class Buffers:
    """All that a step reads and writes, for one size; and its graph, once it is recorded."""

    @torch.inference_mode(False)  # what is first needed in inference mode may be written outside of it
    def __init__(self, size: Size, layers: int, heads: int, width: int, like: Tensor) -> None:
        zeros = functools.partial(torch.zeros, device=like.device)
        count, beams, words, places = self.size = size
        self.ids = zeros(count, beams, dtype=torch.long)
        self.place = zeros(1, dtype=torch.long)  # of these ids, and of all rows
        self.past = zeros(2, layers, count, heads, places, beams, width, dtype=like.dtype)  # keys, values
        self.seen = zeros(count, beams, places, beams, dtype=like.dtype)  # the picture: ■ is 0, · is −inf
        self.source = zeros(2, layers, count, heads, words, width, dtype=like.dtype)  # keys, values
        self.real = zeros(count, words, dtype=like.dtype)  # 0 where a source has words, −inf elsewhere
        self.own = zeros(beams, 1, beams, dtype=like.dtype)  # each beam sees its own slot
        self.own.masked_fill_(~torch.eye(beams, dtype=torch.bool, device=like.device)[:, None], -torch.inf)
        self.clear()

        # As the layers' attention takes them.
        self._past = [
            _Slots((places * beams,) * count, _room(self.past[:, layer].flatten(3, 4)), place=self.place)
            for layer in range(layers)
        ]
        self._source = [Cache((words,) * count, _room(self.source[:, layer])) for layer in range(layers)]
        self._to_source = Ready(self.real[:, None, None])  # (G, 1, 1, S)
        self._to_past = Ready(self.seen.flatten(2)[:, None])  # (G, 1, W, P · W)
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.given = self.past  # what the graph gives, once there is one

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in (self.past, self.source, self.seen))

    def clear(self) -> None:
        """Nothing was said, and sources are empty."""
        for x in (self.ids, self.place, self.past, self.source):
            x.zero_()  # numbers that another sentence left there, NaN perhaps, would spread from under a mask
        for x in (self.seen, self.real):
            x.fill_(-torch.inf)
        self.real[:, 0] = 0  # of a source without words, attention finds a zero

    def advance(self, model: Transformer) -> Tensor:
        """Take the step of ``ids`` at ``place``: what the output layer reads, ``(N, D)``."""
        self.seen.index_copy_(2, self.place, self.own.expand(len(self.ids), -1, -1, -1))
        to_past = (
            functools.partial(_step, layer.attention, past, self._to_past)
            for layer, past in zip(model.decoder, self._past, strict=True)
        )
        to_source = (
            functools.partial(layer.source_attention, source=source, mask=self._to_source)
            for layer, source in zip(model.decoder, self._source, strict=True)
        )
        given = model.decode(self.ids, self.place, to_past, to_source)
        self.place += 1
        return given.flatten(0, 1)

    def said(self, rows: Tensor, owners: Tensor, beams: int, places: int) -> Tensor:
        """Keys and values of what some rows said, ``(2, layers, sources, H, places, beams, D)``.

        ``owners`` are the sources of these ``rows``, so many ``beams`` of each.
        """
        path = self.seen.flatten(0, 1).index_select(0, rows)[:, :places]
        slots = path.argmax(-1).view(len(owners), beams, places).transpose(1, 2)
        place = torch.arange(places, device=rows.device)[:, None]
        found = self.past[:, :, owners[:, None, None], :, place, slots]  # what is indexed comes first
        return found.permute(3, 4, 0, 5, 1, 2, 6)


def _room(both: Tensor) -> Room:
    """Of keys and values ``(2, G, H, ·, D)``."""
    return Room(both[0], both[1], taken=None)


def _step(attention: MultiHead, past: Cache, mask: Ready, x: Tensor) -> Tensor:
    return attention.step(x, past, mask=mask)[0]


# ----------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, eq=False)
class State:
    """How far a search has come. It is spent by the step or the reordering that takes it."""

    graphed: Graphed
    buffers: Buffers
    sources: int  # that are real
    said: int  # words of each row
    turn: int

    @property
    def rows(self) -> int:
        return self.sources * self.buffers.size.beams

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> State:
        """The rows ``index``, in that order; a row may come twice or never.

        ``sources``: the sources that go on, equally many rows of each, side by side; if these are all of
        them, with as many rows as before, it is next to nothing. Without, each row gets its own. No GPU is
        waited for.
        """
        return self.graphed.reorder(self, index, sources)


class Graphed:
    """A Transformer in eval mode that takes its steps as one launch of a CUDA graph each.

    To a search it is the model itself: ``start``, ``step``, ``reorder``, with one difference. **A state is
    used once, in order**: the newest one, whichever start, step or reordering gave it, owns the memory, and
    an older one is refused. Logits are the caller's own.

    The first step of a size runs as it is, the second is recorded, and from then on it is replayed. Graphs
    are kept for the ``most`` sizes used last, as long as their memory is within ``memory`` bytes. Weights may
    change in place between searches. They have whatever type they have; under autocast each step would
    convert them anew, so that a model whose weights are bfloat16 is faster.

    On a CPU, or with ``record=False``, the same steps run one by one.

    >>> model = Transformer(TransformerConfig(width=8, heads=2, feed_forward=16), 11, 13).eval()
    >>> fast = Graphed(model)
    >>> state = fast.start(Tokens.padded([[5, 6, 3], [7, 3]]))
    >>> logits, state = fast.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    def __init__(
        self, model: Transformer, *, record: bool = True, most: int = 24, memory: int = 4 << 30
    ) -> None:
        self.model = model
        self.record, self.most, self.memory = record, most, memory
        self._held: dict[Any, Buffers] = {}  # the one used last stands last
        self._turn = 0  # the number of the only state that may be used
        self._weights: tuple[int, ...] = ()  # where they are
        self._aside: tuple[torch.cuda.Stream, Any] | None = None  # a stream to record on, and a memory pool

    @torch.no_grad()
    def start(self, source: Tokens) -> State:
        """Encode the source, padded, and write its keys and values where all steps find them."""
        if self.model.training:
            raise ValueError("Graphed decodes, and this model is in training mode: call model.eval() first")
        prepared = self.model.start(source).source
        self._turn += 1
        self._check_weights()
        count, words = source.ids.shape
        size = Size(rounded(count, SOURCES), 1, rounded(words, WORDS), rounded(words, PLACES))
        buffers = self._buffers(size, prepared[0].key)
        buffers.clear()
        for layer, cache in enumerate(prepared):  # with zeros where there are no words
            for kept, new in zip(buffers.source[:, layer], (cache.key, cache.value), strict=True):
                kept[:count, :, : new.shape[2]] = new
        buffers.real[:count, 1:words].masked_fill_(source.real[:, 1:], 0)
        return State(self, buffers, count, 0, self._turn)

    @torch.no_grad()
    def step(self, state: State, ids: Tensor) -> tuple[Tensor, State]:
        """The logits ``(N, V)`` of the next words; ``ids`` ``(N,)`` are those said last, BOS at first."""
        if ids.shape != (state.rows,):
            raise ValueError(f"step: ids of shape {tuple(ids.shape)} came; expected one for each of the "
                             f"{state.rows} rows of the state")  # fmt: skip
        self._take(state)
        if state.said == state.buffers.size.places:
            state = self._grown(state)
        buffers = state.buffers
        buffers.ids.view(-1)[: state.rows] = ids
        given = self._run(buffers)
        logits = self.model.output.logits(given[: state.rows])
        return logits, State(self, buffers, state.sources, state.said + 1, self._turn)

    @torch.no_grad()
    def reorder(self, state: State, index: Tensor, sources: Sequence[int] | None = None) -> State:
        """What ``state.reorder(index, sources)`` does."""
        size, device = state.buffers.size, state.buffers.ids.device
        rows = moved(index, device)
        if sources is None:
            owners, beams = rows // size.beams, 1
        else:
            known, beams = sources_after(index, sources, size.beams)
            if beams == size.beams and known == list(range(state.sources)):
                return self._swapped(state, rows)
            owners = moved(torch.tensor(known, dtype=torch.long), device)
        self._take(state)
        fits = size.sources // 4 < len(owners) <= size.sources  # if not, another size is worth the move
        count = size.sources if fits else rounded(len(owners), SOURCES)
        return self._moved(state, rows, owners, size._replace(sources=count, beams=beams))

    # ------------------------------------------------------------------------------ who owns the memory

    def _take(self, state: State) -> None:
        """Raise if the state is spent; now it is."""
        if state.graphed is not self or state.turn != self._turn:
            raise ValueError(
                "this state of a Graphed model is spent: its memory belongs to the newest state. Go on from "
                "what the last start, step or reorder gave; to follow several paths at a time, use the model "
                "itself, or a Graphed for each"
            )
        self._turn += 1

    def _check_weights(self) -> None:
        """Drop graphs that would read where the weights no longer are."""
        weights = tuple(weight.data_ptr() for weight in self.model.parameters())
        if weights != self._weights:
            self._held.clear()
            self._aside, self._weights = None, weights

    def _buffers(self, size: Size, like: Tensor) -> Buffers:
        """Those kept for the size, or new ones; ``like`` has the type of keys, and their heads and width."""
        kind = like.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (size, like.dtype, like.device, cast)
        buffers = self._held.pop(key, None)
        if buffers is None:
            attention = self.model.decoder[0].attention
            heads, width = attention.key_heads, attention.head_width
            buffers = Buffers(size, len(self.model.decoder), heads, width, like)
        self._held[key] = buffers
        while len(self._held) > 1 and (
            len(self._held) > self.most or sum(held.bytes for held in self._held.values()) > self.memory
        ):
            del self._held[next(iter(self._held))]
        return buffers

    # ----------------------------------------------------------------------------------- from row to row

    def _swapped(self, state: State, rows: Tensor) -> State:
        """As many rows of each source as before, each from one of the same source."""
        self._take(state)
        if state.buffers.size.beams > 1:
            table = state.buffers.seen.flatten(0, 1)
            table[: len(rows)] = table.index_select(0, rows)
        return State(self, state.buffers, state.sources, state.said, self._turn)

    def _grown(self, state: State) -> State:
        """The same state with twice as many places."""
        device, size = state.buffers.ids.device, state.buffers.size
        rows, owners = (torch.arange(n, device=device) for n in (state.rows, state.sources))
        return self._moved(state, rows, owners, size._replace(places=2 * size.places))

    def _moved(self, state: State, rows: Tensor, owners: Tensor, size: Size) -> State:
        """These rows of the state, ``size.beams`` of each source in ``owners``, in buffers of that size."""
        old, said, count = state.buffers, state.said, len(owners)
        # All is read before anything is written: the new buffers may be the old ones.
        past = old.said(rows, owners, size.beams, said)
        source, real = old.source.index_select(2, owners), old.real.index_select(0, owners)
        new = self._buffers(size, old.past)
        new.clear()
        new.past[:, :, :count, :, :said] = past
        new.seen[:count, :, :said] = new.own
        new.source[:, :, :count] = source
        new.real[:count] = real
        new.place.fill_(said)
        return State(self, new, count, said, self._turn)

    # ------------------------------------------------------------------------------- one step, one launch

    def _run(self, buffers: Buffers) -> Tensor:
        if not (self.record and buffers.ids.is_cuda):
            return buffers.advance(self.model)
        if not buffers.warm:  # the first run of each kernel sets up what must not be set up in a recording
            with self._side_stream(buffers.ids.device):
                buffers.warm = True
                return buffers.advance(self.model)
        if buffers.graph is None:
            self._record(buffers)
        assert buffers.graph is not None
        buffers.graph.replay()
        return buffers.given

    def _record(self, buffers: Buffers) -> None:
        graph = torch.cuda.CUDAGraph()
        cast = torch.autocast(
            "cuda",
            dtype=torch.get_autocast_dtype("cuda"),
            enabled=torch.is_autocast_enabled("cuda"),
            cache_enabled=False,  # what it would keep is gone when the graph is replayed
        )
        with self._side_stream(buffers.ids.device) as pool, cast:
            # Not by torch.cuda.graph, which empties the memory cache each time.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                buffers.given = buffers.advance(self.model)
            finally:
                graph.capture_end()
        buffers.graph = graph

    @contextlib.contextmanager
    def _side_stream(self, device: torch.device) -> Iterator[Any]:
        """On a stream of its own, in step with the current one; gives the memory pool that graphs share."""
        with torch.cuda.device(device):
            if self._aside is None:
                self._aside = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            stream, pool = self._aside
            here = torch.cuda.current_stream()
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                yield pool
            here.wait_stream(stream)
