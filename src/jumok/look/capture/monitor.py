"""Statistics of the attention of generated tokens, without their queries and keys: for long-running services.

The queries of a few steps are collected, and then the statistics of all of them are computed in one pass over
the keys in the model's own cache. So a step costs no pass over the cache, and nothing is copied but queries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.errors import InputError
from jumok.look.capture.adapters import attach_observer
from jumok.look.capture.capture_store import add_sink
from jumok.look.capture.merge import AttentionPart, merge_parts
from jumok.look.capture.module_wrappers import require_uncompiled
from jumok.look.capture.observer import GenerateResult, ObservedCall
from jumok.look.capture.watch import CaptureObserver, LayerFilter, build_layer_filter
from jumok.look.views.statistics import compute_statistics

STEPS_PER_PASS = 64  # steps whose queries are collected before one pass over the keys


@dataclass(eq=False)
class LayerStatistics:
    """Statistics of one layer over the generated tokens, of which there are ``T``. The last one has no query.

    Positions of keys are those in the whole sequence, prompt included.
    """

    kind: str  # "self" or "cross"
    received_weight: Tensor  # (B, H, K): the total weight that each key received from the generated tokens
    top_weights: Tensor  # (B, H, T, k): the largest weights of each generated token, largest first …
    top_keys: Tensor  # (B, H, T, k): … and the positions of their keys; -1 with weight 0 if there are fewer


@dataclass(eq=False)
class GenerationStatistics:
    """Statistics of one call of ``generate``."""

    layers: dict[str, LayerStatistics] = field(default_factory=dict)  # by name
    missed_layers: dict[str, str] = field(default_factory=dict)  # names and reasons
    sequences: Tensor | None = None  # the token ids that ``generate`` returned (B, L)


class Monitor:
    """The statistics of finished generations, until they are taken."""

    def __init__(self, max_generations: int) -> None:
        self.num_dropped = 0  # generations that were not taken in time
        self._finished: deque[GenerationStatistics] = deque()
        self._max_generations = max_generations

    def take(self) -> list[GenerationStatistics]:
        """Return the generations that have finished since the last call, oldest first, and release them."""
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def add(self, generation: GenerationStatistics) -> None:
        """Add a finished generation. The oldest one is dropped if there are too many."""
        self._finished.append(generation)
        while len(self._finished) > self._max_generations:
            self._finished.popleft()
            self.num_dropped += 1


@contextmanager
def monitor(
    model: nn.Module, *, num_top: int = 8, layers: LayerFilter | None = None, max_generations: int = 16
) -> Iterator[Monitor]:
    """Record, for each token that ``model.generate`` generates, only what it attended to most.

    Unlike :func:`.watch`, it keeps no queries and keys, so memory is bounded however long it runs: the ``num_top``
    strongest keys of each token and the total weight that each key received, on the CPU. The output of the model
    does not change. The attention of the prompt to itself is not recorded.

    Beam search and assisted decoding, which move or drop tokens, are listed in ``missed_layers``.

    Args:
        model: Has a ``generate`` method, as models of Hugging Face transformers do.
        num_top: The number of keys that are kept for each token.
        layers: The layers to record: a name, in which * matches anything, a list of names, or a predicate
            on names. None: all.
        max_generations: The number of finished generations that are kept until :meth:`Monitor.take` is called.

    >>> with monitor(model) as attention:  # doctest: +SKIP
    ...     model.generate(**inputs)
    ...     (generation,) = attention.take()
    >>> generation.layers["model.layers.0.self_attn"].top_keys.shape  # doctest: +SKIP
    torch.Size([1, 32, 19, 8])
    """
    if num_top < 1 or max_generations < 1:
        raise InputError(
            f"num_top={num_top}, max_generations={max_generations} are invalid; expected 1 or more of each"
        )
    observer = MonitorObserver(require_uncompiled(model, "monitor"), layers, num_top, Monitor(max_generations))
    with attach_observer(observer):
        yield observer.monitor


class MonitorObserver(CaptureObserver):
    """Computes statistics of the calls that adapters report during a generation."""

    def __init__(self, model: nn.Module, layers: LayerFilter | None, num_top: int, monitor: Monitor) -> None:
        super().__init__(model, None, build_layer_filter(layers), None)
        self.num_top, self.monitor = num_top, monitor
        self._layers: dict[str, _CollectedSteps] = {}
        self._statistics = GenerationStatistics()

    def on_generation_start(self, model: nn.Module) -> None:
        super().on_generation_start(model)
        self.generation = None
        self._layers, self._statistics = {}, GenerationStatistics()

    def on_generate_return(self, result: GenerateResult) -> None:
        sequences = getattr(result.output, "sequences", result.output)
        if isinstance(sequences, Tensor):
            self._statistics.sequences = sequences.cpu()

    def on_generation_end(self, finished: bool) -> None:
        super().on_generation_end(finished)
        if finished and self._layers:
            for name, layer in self._layers.items():
                if name not in self._statistics.missed_layers and (statistics := layer.finish()) is not None:
                    self._statistics.layers[name] = statistics
            self.monitor.add(self._statistics)
        self._layers = {}

    def on_cache_reorder(self, beam_indices: Tensor) -> None:
        for name in self._layers:
            self._statistics.missed_layers[name] = "beam search moves the rows of the cache"

    def on_missed_attention(self, name: str, reason: str) -> None:
        self._statistics.missed_layers[name] = reason

    def store_call(self, name: str, kind: str, call: ObservedCall) -> None:
        if not self.is_generating or name in self._statistics.missed_layers:
            return
        if name not in self._layers:
            self._layers[name] = _CollectedSteps(kind, self.num_top)
        reason = self._layers[name].add(call)
        if reason is not None:
            self._statistics.missed_layers[name] = reason


class _CollectedSteps:
    """The steps of one layer whose statistics are not computed yet, and the statistics of those before."""

    def __init__(self, kind: str, num_top: int) -> None:
        self.kind, self.num_top = kind, num_top
        self._num_tokens = 0  # that the layer has processed
        self._first_key = 0  # the position of the first key of the last step
        self._parts: list[AttentionPart] = []
        self._last_call: ObservedCall | None = None
        self._sinks: list[Tensor] = []
        self._received: Tensor | None = None  # (B, H, K)
        self._top: list[tuple[Tensor, Tensor]] = []

    def add(self, call: ObservedCall) -> str | None:
        """Add the call of a step. Returns the reason if it cannot be recorded."""
        attention = call.attention
        _, _, num_queries, num_keys = attention.shape
        self._num_tokens += num_queries
        if self._num_tokens == num_queries:  # the prompt
            return None
        if num_queries > 1:
            return "a step has several tokens, as in assisted decoding or in a prompt that is read in chunks"
        is_complete = self.kind == "cross" or num_keys >= self._num_tokens  # no sliding window has dropped keys
        if self._last_call is not None:
            # The keys of the last step are the first ones of this step if the cache grows, or if it has a fixed size.
            num_new = num_keys - self._last_call.attention.shape[3]
            if not (num_new == 1 or (num_new == 0 and is_complete)):
                self._compute()
        self._first_key = 0 if is_complete else self._num_tokens - num_keys
        self._parts.append(AttentionPart.from_attention(attention))
        self._last_call = call
        if call.sink is not None and call.sink.dim() == 3:
            self._sinks.append(call.sink)
        if len(self._parts) == STEPS_PER_PASS:
            self._compute()
        return None

    def finish(self) -> LayerStatistics | None:
        """Return the statistics of all steps; None if there were none."""
        if self._last_call is not None:
            self._compute()
        if self._received is None:
            return None
        weights, keys = zip(*self._top, strict=True)
        width = max(x.shape[-1] for x in weights)  # early steps may have had fewer keys
        return LayerStatistics(
            self.kind,
            self._received,
            torch.cat([F.pad(x, (0, width - x.shape[-1])) for x in weights], dim=2),
            torch.cat([F.pad(x, (0, width - x.shape[-1]), value=-1) for x in keys], dim=2),
        )

    def _compute(self) -> None:
        """Add the statistics of the collected steps."""
        assert self._last_call is not None
        last = self._last_call.attention
        attention = merge_parts(self._parts, last.key, last.scale, last.softcap)
        sink = torch.cat(self._sinks, dim=2) if self._sinks else self._last_call.sink
        if sink is not None:
            attention = add_sink(attention, sink)
        statistics = compute_statistics(attention, num_top=self.num_top, batch=None)
        received = F.pad(statistics.received_weight, (self._first_key, 0)).cpu()
        if self._received is not None:
            size = max(received.shape[-1], self._received.shape[-1])
            received, before = (F.pad(x, (0, size - x.shape[-1])) for x in (received, self._received))
            received += before
        self._received = received
        keys = statistics.top_keys
        self._top.append((statistics.top_weights.cpu(), torch.where(keys >= 0, keys + self._first_key, keys).cpu()))
        self._parts, self._sinks, self._last_call = [], [], None
