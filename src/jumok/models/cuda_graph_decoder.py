"""Decoding steps of the Transformer in buffers of fixed size, replayed as CUDA graphs.

A decoding step consists of about a hundred small kernels. Launching them one by one from Python takes ten
times as long as running them. A CUDA graph launches all of them at once, but only for the sizes and addresses
it was captured with. Therefore nothing grows from step to step: keys and values are in buffers of rounded
size, and the current position is a number on the device. The computation is that of the model.

The **beams** of a source share one buffer. At every step each beam writes the key and the value of its token
into its own slot. A table says which slots belong to the history of a beam, and serves as the attention mask.
Reordering the beams of a source reorders the rows of the table; keys and values are not moved::

    position     0       1       2
    slot       a b c   a b c   a b c

    beam a     ■ · ·   · ■ ·   ■ · ·         continues the second token of b, which continued a
    beam b     ■ · ·   · ■ ·   · ■ ·
    beam c     · · ■   · · ■   · · ■

Shapes: ``G`` sources with ``W`` beams each, ``N`` = G · W rows, ``S`` source positions, ``P`` target
positions; ``H`` heads of width ``D``. G, S and P are rounded up. Padding is computed too, but never read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jumok.attention.kv_cache import KVBuffer, KVCache, PerRowInts
from jumok.attention.mask_types import AdditiveMask, move_to_device
from jumok.batches.tokens import Tokens, round_up_size
from jumok.models.layers.source_sharing import reorder_sources
from jumok.models.transformer import Transformer

# The smallest sizes. On a GPU smaller ones would not be faster, and each size has its own graph.
MIN_SOURCES, MIN_SOURCE_LENGTH, MIN_TARGET_LENGTH = 8, 32, 32


class CudaGraphSize(NamedTuple):
    """The sizes that a graph is captured for."""

    num_sources: int  # G
    beam_size: int  # W
    source_length: int  # S
    target_length: int  # P


# --------------------------------------------------------------------------------------- the buffers


@dataclass(frozen=True, eq=False)
class _BeamSlotCache(KVCache):
    """A cache of fixed size: new keys and values are written at a position that is stored on the device."""

    position: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, lengths: PerRowInts | None = None) -> KVCache:
        """Write keys and values ``(G, H, W, D)``, one for each beam, in place."""
        assert self.buffer is not None
        assert self.position is not None
        for stored, new in ((self.buffer.key, key), (self.buffer.value, value)):
            stored.unflatten(2, (-1, new.shape[2])).index_copy_(2, self.position, new.unsqueeze(2))
        return self


class CudaGraphBuffers:
    """The buffers that a step of one size reads and writes, and its graph once it is captured."""

    @torch.inference_mode(False)  # buffers created in inference mode could not be written outside of it
    def __init__(self, size: CudaGraphSize, num_layers: int, num_heads: int, head_width: int, like: Tensor) -> None:
        zeros = functools.partial(torch.zeros, device=like.device)
        sources, beams, source_length, target_length = self.size = size
        self.ids = zeros(sources, beams, dtype=torch.long)
        self.position = zeros(1, dtype=torch.long)  # of these ids, the same for all rows
        # Keys and values:
        self.past_key_values = zeros(
            2, num_layers, sources, num_heads, target_length, beams, head_width, dtype=like.dtype
        )
        self.source_key_values = zeros(2, num_layers, sources, num_heads, source_length, head_width, dtype=like.dtype)
        # The table above: 0 at ■, −inf at ·
        self.beam_bias = zeros(sources, beams, target_length, beams, dtype=like.dtype)
        self.source_bias = zeros(sources, source_length, dtype=like.dtype)  # 0 at tokens, −inf at padding
        self.own_slot_bias = zeros(beams, 1, beams, dtype=like.dtype)  # each beam sees only its own slot
        self.own_slot_bias.masked_fill_(~torch.eye(beams, dtype=torch.bool, device=like.device)[:, None], -torch.inf)
        self.clear()

        # The same memory, in the form that attention takes:
        self._past_caches = [
            _BeamSlotCache(
                (target_length * beams,) * sources,
                _build_kv_buffer(self.past_key_values[:, layer].flatten(3, 4)),
                position=self.position,
            )
            for layer in range(num_layers)
        ]
        self._source_caches = [
            KVCache((source_length,) * sources, _build_kv_buffer(self.source_key_values[:, layer]))
            for layer in range(num_layers)
        ]
        self._source_mask = AdditiveMask(self.source_bias[:, None, None])  # (G, 1, 1, S)
        self._past_mask = AdditiveMask(self.beam_bias.flatten(2)[:, None])  # (G, 1, W, P · W)
        self.is_warmed_up = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_output = self.past_key_values  # the graph's output, once there is a graph

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.past_key_values, self.source_key_values, self.beam_bias))

    def clear(self) -> None:
        """Reset to empty sources and targets."""
        for x in (self.ids, self.position, self.past_key_values, self.source_key_values):
            x.zero_()  # a NaN from an earlier sentence would spread even if it is masked
        for x in (self.beam_bias, self.source_bias):
            x.fill_(-torch.inf)
        self.source_bias[:, 0] = 0  # so that attention to an empty source is zero, not NaN

    def run_step(self, model: Transformer) -> Tensor:
        """Run the step of ``ids`` at ``position``. Return the input of the output layer, ``(N, D)``."""
        self.beam_bias.index_copy_(2, self.position, self.own_slot_bias.expand(len(self.ids), -1, -1, -1))
        hidden, _ = model.decode(
            self.ids,
            self.position,
            self._source_caches,
            mask=self._past_mask,
            memory_mask=self._source_mask,
            caches=self._past_caches,
        )
        self.position += 1
        return hidden.flatten(0, 1)

    def gather_past(self, rows: Tensor, source_indices: Tensor, beam_size: int, num_steps: int) -> Tensor:
        """Keys and values of the tokens of some rows, ``(2, layers, sources, H, num_steps, beam_size, D)``.

        ``source_indices`` are the sources of these rows, with ``beam_size`` rows each.
        """
        history = self.beam_bias.flatten(0, 1).index_select(0, rows)[:, :num_steps]
        slots = history.argmax(-1).view(len(source_indices), beam_size, num_steps).transpose(1, 2)
        positions = torch.arange(num_steps, device=rows.device)[:, None]
        # The indexed dimensions come first in the result.
        gathered = self.past_key_values[:, :, source_indices[:, None, None], :, positions, slots]
        return gathered.permute(3, 4, 0, 5, 1, 2, 6)


def _build_kv_buffer(key_values: Tensor) -> KVBuffer:
    """Build a buffer of keys and values ``(2, G, H, ·, D)``."""
    return KVBuffer(key_values[0], key_values[1], used_lengths=None)


# ----------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, eq=False)
class CudaGraphState:
    """Decoding state of a search. The next step or reordering invalidates it."""

    decoder: CudaGraphDecoder
    buffers: CudaGraphBuffers
    num_sources: int  # without padding
    num_steps: int  # tokens of each row
    version: int

    @property
    def num_rows(self) -> int:
        return self.num_sources * self.buffers.size.beam_size

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> CudaGraphState:
        """Return the state of the rows ``index``, in that order. Rows may be repeated or left out.

        ``sources``: the sources that remain, with equally many neighbouring rows each. If all of them remain
        with as many rows as before, this costs next to nothing. Without ``sources``, each row gets its own
        source. It never waits for the GPU.
        """
        return self.decoder.reorder(self, index, sources)


class CudaGraphDecoder:
    """Runs each decoding step of a Transformer in eval mode as one CUDA graph.

    It offers the decoding interface of the model (``start``, ``step``, ``reorder``) with one difference: **a
    state can be used only once**. The state that the last start, step or reordering returned owns the
    buffers, and older ones are refused. Logits are copies.

    The first step of a size runs eagerly, the second is captured, and later ones are replayed. Graphs are
    kept for the ``max_graphs`` most recently used sizes while their buffers need at most ``max_bytes`` bytes.
    Weights may change in place between searches. Under autocast every step converts the weights again, so a
    model with bfloat16 weights is faster.

    On a CPU, or with ``use_graphs=False``, the same steps run eagerly.

    >>> config = TransformerConfig(width=8, num_heads=2, feed_forward_width=16)
    >>> decoder = CudaGraphDecoder(Transformer(config, 11, 13).eval())
    >>> state = decoder.start(Tokens.pad([[5, 6, 3], [7, 3]]))
    >>> logits, state = decoder.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    def __init__(
        self, model: Transformer, *, use_graphs: bool = True, max_graphs: int = 24, max_bytes: int = 4 << 30
    ) -> None:
        self.model = model
        self.use_graphs, self.max_graphs, self.max_bytes = use_graphs, max_graphs, max_bytes
        self._buffers_by_key: dict[Any, CudaGraphBuffers] = {}  # in the order of their last use
        self._version = 0  # version of the only state that may be used
        self._weight_addresses: tuple[int, ...] = ()
        self._stream_and_pool: tuple[torch.cuda.Stream, Any] | None = None  # for capturing

    @torch.no_grad()
    def start(self, source: Tokens) -> CudaGraphState:
        """Encode the padded source, and write its keys and values into the buffers."""
        if self.model.training:
            raise ValueError(
                "CudaGraphDecoder needs a model in eval mode, but it is in training mode: call model.eval()"
            )
        source_caches = self.model.start(source).source.caches
        self._version += 1
        self._drop_stale_graphs()
        sources, length = source.ids.shape
        size = CudaGraphSize(
            round_up_size(sources, MIN_SOURCES),
            1,
            round_up_size(length, MIN_SOURCE_LENGTH),
            round_up_size(length, MIN_TARGET_LENGTH),
        )
        buffers = self._get_buffers(size, source_caches[0].key)
        buffers.clear()
        for layer, cache in enumerate(source_caches):  # zero at padding
            for stored, new in zip(buffers.source_key_values[:, layer], (cache.key, cache.value), strict=True):
                stored[:sources, :, : new.shape[2]] = new
        buffers.source_bias[:sources, 1:length].masked_fill_(source.valid_mask[:, 1:], 0)
        return CudaGraphState(self, buffers, sources, 0, self._version)

    @torch.no_grad()
    def step(self, state: CudaGraphState, ids: Tensor) -> tuple[Tensor, CudaGraphState]:
        """Return the logits ``(N, V)`` of the next words after ``ids`` ``(N,)``, which are BOS at first."""
        if ids.shape != (state.num_rows,):
            raise ValueError(
                f"step: ids have shape {tuple(ids.shape)}; expected one id for each of the {state.num_rows} "
                "rows of the state"
            )
        self._claim_state(state)
        if state.num_steps == state.buffers.size.target_length:
            state = self._grow_buffers(state)
        buffers = state.buffers
        buffers.ids.view(-1)[: state.num_rows] = ids
        hidden = self._run_step(buffers)
        logits = self.model.output.logits(hidden[: state.num_rows])
        return logits, CudaGraphState(self, buffers, state.num_sources, state.num_steps + 1, self._version)

    @torch.no_grad()
    def reorder(self, state: CudaGraphState, index: Tensor, sources: Sequence[int] | None = None) -> CudaGraphState:
        """Implement :meth:`CudaGraphState.reorder`."""
        size, device = state.buffers.size, state.buffers.ids.device
        rows = move_to_device(index, device)
        if sources is None:
            source_indices, beams = rows // size.beam_size, 1
        else:
            source_rows, beams = reorder_sources(index, sources, size.beam_size)
            if beams == size.beam_size and source_rows == list(range(state.num_sources)):
                return self._reorder_beams(state, rows)
            source_indices = move_to_device(torch.tensor(source_rows, dtype=torch.long), device)
        self._claim_state(state)
        # Far fewer sources are worth the move to smaller buffers.
        fits = size.num_sources // 4 < len(source_indices) <= size.num_sources
        num_sources = size.num_sources if fits else round_up_size(len(source_indices), MIN_SOURCES)
        new_size = size._replace(num_sources=num_sources, beam_size=beams)
        return self._move_to_buffers(state, rows, source_indices, new_size)

    # ------------------------------------------------------------------------- ownership of the buffers

    def _claim_state(self, state: CudaGraphState) -> None:
        """Raise if the state is no longer valid. Otherwise invalidate it."""
        if state.decoder is not self or state.version != self._version:
            raise ValueError(
                "this state of a CudaGraphDecoder is no longer valid: its buffers belong to the newest "
                "state. Continue from the state that the last start, step or reorder returned. To follow "
                "several paths at the same time, use the model itself or one CudaGraphDecoder for each"
            )
        self._version += 1

    def _drop_stale_graphs(self) -> None:
        """Drop all graphs if the weights have moved to other addresses."""
        weights = tuple(weight.data_ptr() for weight in self.model.parameters())
        if weights != self._weight_addresses:
            self._buffers_by_key.clear()
            self._stream_and_pool, self._weight_addresses = None, weights

    def _get_buffers(self, size: CudaGraphSize, like: Tensor) -> CudaGraphBuffers:
        """Return the buffers of a size, new ones if there are none, with the dtype and device of ``like``."""
        device_type = like.device.type
        autocast_dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        key = (size, like.dtype, like.device, autocast_dtype)
        buffers = self._buffers_by_key.pop(key, None)
        if buffers is None:
            attention = self.model.decoder[0].self_attention
            heads, width = attention.num_key_heads, attention.head_width
            buffers = CudaGraphBuffers(size, len(self.model.decoder), heads, width, like)
        self._buffers_by_key[key] = buffers
        while len(self._buffers_by_key) > 1 and (
            len(self._buffers_by_key) > self.max_graphs
            or sum(stored.num_bytes for stored in self._buffers_by_key.values()) > self.max_bytes
        ):
            del self._buffers_by_key[next(iter(self._buffers_by_key))]
        return buffers

    # ---------------------------------------------------------------------------------------- reordering

    def _reorder_beams(self, state: CudaGraphState, rows: Tensor) -> CudaGraphState:
        """Reorder rows within their sources, with as many rows of each source as before."""
        self._claim_state(state)
        if state.buffers.size.beam_size > 1:
            table = state.buffers.beam_bias.flatten(0, 1)
            table[: len(rows)] = table.index_select(0, rows)
        return CudaGraphState(self, state.buffers, state.num_sources, state.num_steps, self._version)

    def _grow_buffers(self, state: CudaGraphState) -> CudaGraphState:
        """Move the state to buffers with twice as many target positions."""
        device, size = state.buffers.ids.device, state.buffers.size
        rows, sources = (torch.arange(n, device=device) for n in (state.num_rows, state.num_sources))
        new_size = size._replace(target_length=2 * size.target_length)
        return self._move_to_buffers(state, rows, sources, new_size)

    def _move_to_buffers(
        self, state: CudaGraphState, rows: Tensor, source_indices: Tensor, size: CudaGraphSize
    ) -> CudaGraphState:
        """Move rows of the state, ``size.beam_size`` of each of these sources, to the buffers of a size."""
        old, steps, sources = state.buffers, state.num_steps, len(source_indices)
        # Everything is read before anything is written, because old and new buffers may be the same.
        past = old.gather_past(rows, source_indices, size.beam_size, steps)
        source_key_values = old.source_key_values.index_select(2, source_indices)
        source_bias = old.source_bias.index_select(0, source_indices)
        new = self._get_buffers(size, old.past_key_values)
        new.clear()
        new.past_key_values[:, :, :sources, :, :steps] = past
        new.beam_bias[:sources, :, :steps] = new.own_slot_bias
        new.source_key_values[:, :, :sources] = source_key_values
        new.source_bias[:sources] = source_bias
        new.position.fill_(steps)
        return CudaGraphState(self, new, sources, steps, self._version)

    # --------------------------------------------------------------------------------- running one step

    def _run_step(self, buffers: CudaGraphBuffers) -> Tensor:
        if not (self.use_graphs and buffers.ids.is_cuda):
            return buffers.run_step(self.model)
        if not buffers.is_warmed_up:  # kernels do work at their first run that cannot be captured
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
        autocast = torch.autocast(
            "cuda",
            dtype=torch.get_autocast_dtype("cuda"),
            enabled=torch.is_autocast_enabled("cuda"),
            cache_enabled=False,  # cached conversions would no longer exist when the graph is replayed
        )
        with self._side_stream(buffers.ids.device) as pool, autocast:
            # torch.cuda.graph is not used because it empties the memory cache each time.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                buffers.graph_output = buffers.run_step(self.model)
            finally:
                graph.capture_end()
        buffers.graph = graph

    @contextlib.contextmanager
    def _side_stream(self, device: torch.device) -> Iterator[Any]:
        """Run on a separate stream, synchronized with the current one. Yield the graphs' memory pool."""
        with torch.cuda.device(device):
            if self._stream_and_pool is None:
                self._stream_and_pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            stream, pool = self._stream_and_pool
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                yield pool
            current.wait_stream(stream)
