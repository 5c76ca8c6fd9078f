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

from jumok.attention.heads import MultiHead
from jumok.attention.kv_cache import KVBuffer, KVCache, PerRowInts
from jumok.attention.mask_types import AdditiveMask, move_to_device
from jumok.batches.tokens import Tokens, round_up_size
from jumok.models.layers.source_sharing import reorder_sources
from jumok.models.transformer import Transformer

__all__ = ["CudaGraphDecoder", "CudaGraphSize", "CudaGraphState"]

# The smallest sizes. On a GPU less would not be faster, and each size has a graph of its own.
MIN_SOURCES, MIN_SOURCE_LENGTH, MIN_TARGET_LENGTH = 8, 32, 32


class CudaGraphSize(NamedTuple):
    """What a graph is recorded for."""

    num_sources: int  # G
    beam_size: int  # W
    source_length: int  # S
    target_length: int  # P


# ---------------------------------------------------------------------------------------- the memory


@dataclass(frozen=True, eq=False)
class _BeamSlotCache(KVCache):
    """A cache that never grows: what is appended is written at a place that the device knows."""

    position: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, lengths: PerRowInts | None = None) -> KVCache:
        """Write ``(G, H, W, D)``, a key and a value of each beam. The cache itself changes."""
        assert self.buffer is not None
        assert self.position is not None
        for held, new in ((self.buffer.key, key), (self.buffer.value, value)):
            held.unflatten(2, (-1, new.shape[2])).index_copy_(2, self.position, new.unsqueeze(2))
        return self


class CudaGraphBuffers:
    """All that a step reads and writes, for one size; and its graph, once it is recorded."""

    @torch.inference_mode(False)  # what is first needed in inference mode may be written outside of it
    def __init__(
        self, size: CudaGraphSize, num_layers: int, num_heads: int, head_width: int, like: Tensor
    ) -> None:
        zeros = functools.partial(torch.zeros, device=like.device)
        count, beams, words, places = self.size = size
        self.ids = zeros(count, beams, dtype=torch.long)
        self.position = zeros(1, dtype=torch.long)  # of these ids, and of all rows
        self.past_key_values = zeros(
            2, num_layers, count, num_heads, places, beams, head_width, dtype=like.dtype
        )  # keys, values
        self.beam_bias = zeros(
            count, beams, places, beams, dtype=like.dtype
        )  # the picture: ■ is 0, · is −inf
        self.source_key_values = zeros(
            2, num_layers, count, num_heads, words, head_width, dtype=like.dtype
        )  # keys, values
        self.source_bias = zeros(count, words, dtype=like.dtype)  # 0 where a source has words, −inf elsewhere
        self.own_slot_bias = zeros(beams, 1, beams, dtype=like.dtype)  # each beam sees its own slot
        self.own_slot_bias.masked_fill_(
            ~torch.eye(beams, dtype=torch.bool, device=like.device)[:, None], -torch.inf
        )
        self.clear()

        # As the layers' attention takes them.
        self._past_caches = [
            _BeamSlotCache(
                (places * beams,) * count,
                _build_kv_buffer(self.past_key_values[:, layer].flatten(3, 4)),
                position=self.position,
            )
            for layer in range(num_layers)
        ]
        self._source_caches = [
            KVCache((words,) * count, _build_kv_buffer(self.source_key_values[:, layer]))
            for layer in range(num_layers)
        ]
        self._source_mask = AdditiveMask(self.source_bias[:, None, None])  # (G, 1, 1, S)
        self._past_mask = AdditiveMask(self.beam_bias.flatten(2)[:, None])  # (G, 1, W, P · W)
        self.is_warmed_up = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_output = self.past_key_values  # what the graph gives, once there is one

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.past_key_values, self.source_key_values, self.beam_bias))

    def clear(self) -> None:
        """Nothing was said, and sources are empty."""
        for x in (self.ids, self.position, self.past_key_values, self.source_key_values):
            x.zero_()  # numbers that another sentence left there, NaN perhaps, would spread from under a mask
        for x in (self.beam_bias, self.source_bias):
            x.fill_(-torch.inf)
        self.source_bias[:, 0] = 0  # of a source without words, attention finds a zero

    def run_step(self, model: Transformer) -> Tensor:
        """Take the step of ``ids`` at ``position``: what the output layer reads, ``(N, D)``."""
        self.beam_bias.index_copy_(2, self.position, self.own_slot_bias.expand(len(self.ids), -1, -1, -1))
        to_past = (
            functools.partial(_attend_past, layer.self_attention, past, self._past_mask)
            for layer, past in zip(model.decoder, self._past_caches, strict=True)
        )
        to_source = (
            functools.partial(layer.cross_attention, source=source, mask=self._source_mask)
            for layer, source in zip(model.decoder, self._source_caches, strict=True)
        )
        given = model.decode(self.ids, self.position, to_past, to_source)
        self.position += 1
        return given.flatten(0, 1)

    def gather_past(self, rows: Tensor, source_indices: Tensor, beam_size: int, num_steps: int) -> Tensor:
        """Keys and values of what some rows said, ``(2, num_layers, num_sources, H, places, beam_size, D)``.

        ``source_indices`` are the sources of these ``num_rows``, so many ``beam_size`` of each.
        """
        path = self.beam_bias.flatten(0, 1).index_select(0, rows)[:, :num_steps]
        slots = path.argmax(-1).view(len(source_indices), beam_size, num_steps).transpose(1, 2)
        place = torch.arange(num_steps, device=rows.device)[:, None]
        found = self.past_key_values[
            :, :, source_indices[:, None, None], :, place, slots
        ]  # what is indexed comes first
        return found.permute(3, 4, 0, 5, 1, 2, 6)


def _build_kv_buffer(key_values: Tensor) -> KVBuffer:
    """Of keys and values ``(2, G, H, ·, D)``."""
    return KVBuffer(key_values[0], key_values[1], used_lengths=None)


def _attend_past(attention: MultiHead, past: KVCache, mask: AdditiveMask, x: Tensor) -> Tensor:
    return attention.step(x, past, mask=mask)[0]


# ----------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, eq=False)
class CudaGraphState:
    """How far a search has come. It is spent by the step or the reordering that takes it."""

    decoder: CudaGraphDecoder
    buffers: CudaGraphBuffers
    num_sources: int  # that are real
    num_steps: int  # words of each row
    version: int

    @property
    def num_rows(self) -> int:
        return self.num_sources * self.buffers.size.beam_size

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> CudaGraphState:
        """The rows ``index``, in that order; a row may come twice or never.

        ``num_sources``: the sources that go on, equally many rows of each, side by side; if these are all of
        them, with as many rows as before, it is next to nothing. Without, each row gets its own. No GPU is
        waited for.
        """
        return self.decoder.reorder(self, index, sources)


class CudaGraphDecoder:
    """A Transformer in eval mode that takes its steps as one launch of a CUDA graph each.

    To a search it is the model itself: ``start``, ``step``, ``reorder``, with one difference. **A state is
    used once, in order**: the newest one, whichever start, step or reordering gave it, owns the memory, and
    an older one is refused. Logits are the caller's own.

    The first step of a size runs as it is, the second is recorded, and from then on it is replayed. Graphs
    are kept for the ``max_graphs`` sizes used last, as long as their memory is within ``max_bytes`` bytes. Weights may
    change in place between searches. They have whatever type they have; under autocast each step would
    convert them anew, so that a model whose weights are bfloat16 is faster.

    On a CPU, or with ``use_graphs=False``, the same steps run one by one.

    >>> model = Transformer(TransformerConfig(width=8, heads=2, feed_forward=16), 11, 13).eval()
    >>> fast = Graphed(model)
    >>> state = fast.start(Tokens.padded([[5, 6, 3], [7, 3]]))
    >>> logits, state = fast.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    def __init__(
        self, model: Transformer, *, use_graphs: bool = True, max_graphs: int = 24, max_bytes: int = 4 << 30
    ) -> None:
        self.model = model
        self.use_graphs, self.max_graphs, self.max_bytes = use_graphs, max_graphs, max_bytes
        self._buffers_by_key: dict[Any, CudaGraphBuffers] = {}  # the one used last stands last
        self._version = 0  # the number of the only state that may be used
        self._weight_addresses: tuple[int, ...] = ()  # where they are
        self._stream_and_pool: tuple[torch.cuda.Stream, Any] | None = (
            None  # a stream to record on, and a memory pool
        )

    @torch.no_grad()
    def start(self, source: Tokens) -> CudaGraphState:
        """Encode the source, padded, and write its keys and values where all steps find them."""
        if self.model.training:
            raise ValueError("Graphed decodes, and this model is in training mode: call model.eval() first")
        prepared = self.model.start(source).source_caches
        self._version += 1
        self._drop_stale_graphs()
        count, words = source.ids.shape
        size = CudaGraphSize(
            round_up_size(count, MIN_SOURCES),
            1,
            round_up_size(words, MIN_SOURCE_LENGTH),
            round_up_size(words, MIN_TARGET_LENGTH),
        )
        buffers = self._get_buffers(size, prepared[0].key)
        buffers.clear()
        for layer, cache in enumerate(prepared):  # with zeros where there are no words
            for kept, new in zip(buffers.source_key_values[:, layer], (cache.key, cache.value), strict=True):
                kept[:count, :, : new.shape[2]] = new
        buffers.source_bias[:count, 1:words].masked_fill_(source.valid_mask[:, 1:], 0)
        return CudaGraphState(self, buffers, count, 0, self._version)

    @torch.no_grad()
    def step(self, state: CudaGraphState, ids: Tensor) -> tuple[Tensor, CudaGraphState]:
        """The logits ``(N, V)`` of the next words; ``ids`` ``(N,)`` are those said last, BOS at first."""
        if ids.shape != (state.num_rows,):
            raise ValueError(f"step: ids of shape {tuple(ids.shape)} came; expected one for each of the "
                             f"{state.num_rows} rows of the state")  # fmt: skip
        self._claim_state(state)
        if state.num_steps == state.buffers.size.target_length:
            state = self._grow_buffers(state)
        buffers = state.buffers
        buffers.ids.view(-1)[: state.num_rows] = ids
        given = self._run_step(buffers)
        logits = self.model.output.logits(given[: state.num_rows])
        return logits, CudaGraphState(self, buffers, state.num_sources, state.num_steps + 1, self._version)

    @torch.no_grad()
    def reorder(
        self, state: CudaGraphState, index: Tensor, sources: Sequence[int] | None = None
    ) -> CudaGraphState:
        """What ``state.reorder(index, num_sources)`` does."""
        size, device = state.buffers.size, state.buffers.ids.device
        rows = move_to_device(index, device)
        if sources is None:
            owners, beams = rows // size.beam_size, 1
        else:
            known, beams = reorder_sources(index, sources, size.beam_size)
            if beams == size.beam_size and known == list(range(state.num_sources)):
                return self._reorder_beams(state, rows)
            owners = move_to_device(torch.tensor(known, dtype=torch.long), device)
        self._claim_state(state)
        fits = (
            size.num_sources // 4 < len(owners) <= size.num_sources
        )  # if not, another size is worth the move
        count = size.num_sources if fits else round_up_size(len(owners), MIN_SOURCES)
        return self._move_to_buffers(state, rows, owners, size._replace(num_sources=count, beam_size=beams))

    # ------------------------------------------------------------------------------ who owns the memory

    def _claim_state(self, state: CudaGraphState) -> None:
        """Raise if the state is spent; now it is."""
        if state.decoder is not self or state.version != self._version:
            raise ValueError(
                "this state of a Graphed model is spent: its memory belongs to the newest state. Go on from "
                "what the last start, step or reorder gave; to follow several paths at a time, use the model "
                "itself, or a Graphed for each"
            )
        self._version += 1

    def _drop_stale_graphs(self) -> None:
        """Drop graphs that would read where the weights no longer are."""
        weights = tuple(weight.data_ptr() for weight in self.model.parameters())
        if weights != self._weight_addresses:
            self._buffers_by_key.clear()
            self._stream_and_pool, self._weight_addresses = None, weights

    def _get_buffers(self, size: CudaGraphSize, like: Tensor) -> CudaGraphBuffers:
        """Those kept for the size, or new ones; ``like`` has the type of keys, and their heads and width."""
        kind = like.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (size, like.dtype, like.device, cast)
        buffers = self._buffers_by_key.pop(key, None)
        if buffers is None:
            attention = self.model.decoder[0].self_attention
            heads, width = attention.num_key_heads, attention.head_width
            buffers = CudaGraphBuffers(size, len(self.model.decoder), heads, width, like)
        self._buffers_by_key[key] = buffers
        while len(self._buffers_by_key) > 1 and (
            len(self._buffers_by_key) > self.max_graphs
            or sum(held.num_bytes for held in self._buffers_by_key.values()) > self.max_bytes
        ):
            del self._buffers_by_key[next(iter(self._buffers_by_key))]
        return buffers

    # ----------------------------------------------------------------------------------- from row to row

    def _reorder_beams(self, state: CudaGraphState, rows: Tensor) -> CudaGraphState:
        """As many rows of each source as before, each from one of the same source."""
        self._claim_state(state)
        if state.buffers.size.beam_size > 1:
            table = state.buffers.beam_bias.flatten(0, 1)
            table[: len(rows)] = table.index_select(0, rows)
        return CudaGraphState(self, state.buffers, state.num_sources, state.num_steps, self._version)

    def _grow_buffers(self, state: CudaGraphState) -> CudaGraphState:
        """The same state with twice as many places."""
        device, size = state.buffers.ids.device, state.buffers.size
        rows, owners = (torch.arange(n, device=device) for n in (state.num_rows, state.num_sources))
        return self._move_to_buffers(state, rows, owners, size._replace(target_length=2 * size.target_length))

    def _move_to_buffers(
        self, state: CudaGraphState, rows: Tensor, source_indices: Tensor, size: CudaGraphSize
    ) -> CudaGraphState:
        """These rows of the state, ``size.beam_size`` of each source in ``source_indices``, in buffers of that size."""
        old, said, count = state.buffers, state.num_steps, len(source_indices)
        # All is read before anything is written: the new buffers may be the old ones.
        past = old.gather_past(rows, source_indices, size.beam_size, said)
        source, real = (
            old.source_key_values.index_select(2, source_indices),
            old.source_bias.index_select(0, source_indices),
        )
        new = self._get_buffers(size, old.past_key_values)
        new.clear()
        new.past_key_values[:, :, :count, :, :said] = past
        new.beam_bias[:count, :, :said] = new.own_slot_bias
        new.source_key_values[:, :, :count] = source
        new.source_bias[:count] = real
        new.position.fill_(said)
        return CudaGraphState(self, new, count, said, self._version)

    # ------------------------------------------------------------------------------- one step, one launch

    def _run_step(self, buffers: CudaGraphBuffers) -> Tensor:
        if not (self.use_graphs and buffers.ids.is_cuda):
            return buffers.run_step(self.model)
        if (
            not buffers.is_warmed_up
        ):  # the first run of each kernel sets up what must not be set up in a recording
            with self._side_stream(buffers.ids.device):
                buffers.is_warmed_up = True
                return buffers.run_step(self.model)
        if buffers.graph is None:
            self._capture_graph(buffers)
        assert buffers.graph is not None
        buffers.graph.replay()
        return buffers.graph_output

    def _capture_graph(self, buffers: CudaGraphBuffers) -> None:
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
                buffers.graph_output = buffers.run_step(self.model)
            finally:
                graph.capture_end()
        buffers.graph = graph

    @contextlib.contextmanager
    def _side_stream(self, device: torch.device) -> Iterator[Any]:
        """On a stream of its own, in step with the current one; gives the memory pool that graphs share."""
        with torch.cuda.device(device):
            if self._stream_and_pool is None:
                self._stream_and_pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            stream, pool = self._stream_and_pool
            here = torch.cuda.current_stream()
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                yield pool
            here.wait_stream(stream)
