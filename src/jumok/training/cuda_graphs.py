"""Training steps as CUDA graphs, for models whose time is dominated by kernel launches.

A step of a small model launches a thousand small kernels, and launching them from Python takes ten times as
long as running them. A graph is launched as a whole. It is captured once and then replayed for every batch,
which is copied to the addresses of the first one. ::

    capture    static batch ──► loss ──► backward ──► gradients       all at fixed addresses
    replay     new batch ─copy─► static batch, the same kernels, the same output addresses

A capture also fixes the decisions of the host: shapes, and which kernel serves a call. So there is one graph
for each *graph key* of batches (see :class:`jumok.batches.tokens.Tokens`). The graphs share their memory and
gradients, because only one runs at a time. The update of the optimizer needs no batch and is one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from jumok.attention.caching import cuda_graph_scope
from jumok.errors import InputError
from jumok.training.config import TrainConfig
from jumok.training.prefetch import TrainingBatch, map_tensors

MAX_GRAPHS = 256  # further graph keys run without a graph
NUM_WARMUP_CALLS = 2  # calls before a capture, in which libraries allocate workspaces


def should_use_cuda_graphs(config: TrainConfig, device: torch.device, world_size: int) -> bool:
    """Whether training steps are captured as CUDA graphs, which need batches with static shapes."""
    is_possible = device.type == "cuda" and world_size == 1 and config.accumulation_steps == 1
    if config.cuda_graphs is True and not is_possible:
        raise InputError("train.cuda_graphs: true needs a GPU, one process and train.accumulation_steps: 1")
    return is_possible and config.cuda_graphs is not False


B = TypeVar("B", bound=TrainingBatch)


@dataclass(frozen=True)
class _TrainingGraph:
    inputs: list[Tensor]  # the tensors of the static batch
    output: Tensor
    replay: Callable[[], None]


class CudaGraphGradients(Generic[B]):
    """Computes the gradients of ``run(batch, scale)``, with CUDA graphs on a GPU.

    The first batch of each graph key runs without a graph, and so do all batches without a key or a GPU.

    Args:
        run: computes a result from a batch on the device and calls ``backward``, without waiting for the GPU.
            Autocast belongs inside. ``scale`` is a scalar on the device.
        parameters: the parameters whose gradients are computed. The gradients replace the previous ones. On a
            GPU they always have the same addresses.
        device: the device of the parameters.

    >>> def run(batch: Seq2SeqBatch, scale: Tensor) -> Tensor:  # doctest: +SKIP
    ...     total = model.loss(batch).total
    ...     (total * scale).backward()
    ...     return total.detach()
    >>> gradients = CudaGraphGradients(run, model.parameters(), device)  # doctest: +SKIP
    >>> total = gradients(batch, 1 / batch.count)  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP
    """

    def __init__(
        self,
        run: Callable[[B, Tensor], Tensor],
        parameters: Iterable[nn.Parameter],
        device: torch.device,
    ) -> None:
        self.capture_error: str | None = None  # why no more graphs are captured
        self._run, self.device = run, device
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._scale = torch.zeros((), device=device)
        self._seen_keys: set[Hashable] = set()
        self._graphs: dict[Hashable, _TrainingGraph] = {}
        self._gradients: list[Tensor] = []  # shared by all graphs
        self._recorder = _GraphRecorder(device)

    def __call__(self, batch: B, scale: float) -> Tensor:
        """Return the result of ``run`` for a batch, which may be on the host or the device."""
        self._scale.fill_(scale)
        graph_key = batch.graph_key if _supports_graphs(self.device) else None
        graph = self._graphs.get(graph_key)
        if graph is None and graph_key in self._seen_keys and not self.capture_error and len(self._graphs) < MAX_GRAPHS:
            graph = self._capture_graph(batch, graph_key)
        self._attach_gradients()
        if graph is None:
            if graph_key is not None:
                self._seen_keys.add(graph_key)
            torch._foreach_zero_(self._gradients)
            return self._run(batch.to(self.device), self._scale)
        for static_input, tensor in zip(graph.inputs, _list_tensors(batch), strict=True):
            static_input.copy_(tensor, non_blocking=True)
        graph.replay()
        return graph.output.clone()

    def _attach_gradients(self) -> None:
        self._gradients = self._gradients or [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _store_gradients(self) -> None:
        """Copy the new gradients to the shared ones."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None:
                gradient.zero_()
            else:
                targets.append(gradient)
                sources.append(parameter.grad)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._attach_gradients()

    def _capture_graph(self, batch: B, graph_key: Hashable) -> _TrainingGraph | None:
        static_batch = map_tensors(batch, lambda x: x.to(self.device, copy=True))
        self._attach_gradients()

        def run() -> Tensor:
            # New gradients are copied all at once. Adding each to zeros would read one more tensor, and
            # launch a kernel for every parameter.
            self._clear_gradients()
            # A new object each time, because values that masks cache must be computed within the graph.
            output = self._run(map_tensors(static_batch, lambda x: x), self._scale)
            self._store_gradients()
            return output

        try:
            replay, output = self._recorder.capture(run, NUM_WARMUP_CALLS)
        except RuntimeError as error:
            # Training continues without graphs. Another graph key would fail too.
            self.capture_error = _get_first_line(error)
            return None
        self._graphs[graph_key] = _TrainingGraph(_list_tensors(static_batch), output, replay)
        return self._graphs[graph_key]


class CudaGraphCallable:
    """Calls ``run()``, with a CUDA graph from the third call on.

    Args:
        run: changes tensors in place and returns a tensor. The addresses must be the same each time, and it
            must not wait for the GPU.
        device: the device of the tensors.

    >>> weight, rate = torch.ones(2), torch.tensor(0.5)
    >>> def run() -> Tensor:
    ...     return weight.mul_(rate).sum()
    >>> graphed = CudaGraphCallable(run, weight.device)
    >>> graphed(), graphed()
    (tensor(1.), tensor(0.5000))
    """

    def __init__(self, run: Callable[[], Tensor], device: torch.device) -> None:
        self.capture_error: str | None = None
        self._run, self.device = run, device
        self._num_calls = 0
        self._recorder = _GraphRecorder(device)
        self._graph: tuple[Callable[[], None], Tensor] | None = None

    def __call__(self) -> Tensor:
        """Return the result of ``run``."""
        self._num_calls += 1
        if (
            self._graph is None
            and self._num_calls > NUM_WARMUP_CALLS
            and _supports_graphs(self.device)
            and not self.capture_error
        ):
            try:
                self._graph = self._recorder.capture(self._run)
            except RuntimeError as error:
                self.capture_error = _get_first_line(error)
        if self._graph is None:
            return self._run()
        replay, output = self._graph
        replay()
        return output.clone()


class _GraphRecorder:
    """Captures graphs on a stream of a device, with a shared memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream_and_pool: tuple[Any, Any] | None = None

    def capture(self, run: Callable[[], Tensor], num_warmup_calls: int = 0) -> tuple[Callable[[], None], Tensor]:
        """Capture ``run()``. Returns a function that replays it, and the tensor that each replay writes."""
        with torch.cuda.device(self.device):
            if self._stream_and_pool is None:
                self._stream_and_pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            stream, pool = self._stream_and_pool
            current_stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(current_stream)
            with torch.cuda.stream(stream):
                for _ in range(num_warmup_calls):
                    run()
                torch.cuda.synchronize()
                # The threads that prepare the next batches continue meanwhile.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    with cuda_graph_scope():
                        output = run()
                finally:
                    graph.capture_end()
            current_stream.wait_stream(stream)
        return graph.replay, output


def _supports_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def _get_first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _list_tensors(batch: Any) -> list[Tensor]:
    tensors: list[Tensor] = []

    def add(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    map_tensors(batch, add)
    return tensors
