"""Training steps as CUDA graphs, for models whose time goes into launches.

A step of a small model is a thousand small kernels, and Python takes ten times as long to launch them as the
GPU to run them. A graph is launched as a whole: recorded once, then replayed for every batch, which is copied
to where the first one lay. ::

    recorded    held batch ──► loss ──► backward ──► gradients       all at fixed addresses
    replayed    new batch ─copy─► held batch, the same kernels again, the same places written

What the host decides is recorded too: shapes, which kernel serves a call. So there is one graph for each
*form* of batch (see :class:`jumok.batch.Tokens`). They share memory and gradients, for one runs at a time.
What the optimiser does with the gradients needs no batch, and is one graph for all.
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

__all__ = ["CudaGraphCallable", "CudaGraphGradients", "should_use_cuda_graphs"]

MAX_GRAPHS = 256  # graphs; a form that comes after so many others is launched kernel by kernel
NUM_WARMUP_CALLS = 2  # calls before a recording: libraries make their plans and workspaces at the first ones


def should_use_cuda_graphs(config: TrainConfig, device: torch.device, world_size: int) -> bool:
    """Whether training is to be recorded, for which batches must be alike."""
    can = device.type == "cuda" and world_size == 1 and config.accumulation_steps == 1
    if config.cuda_graphs is True and not can:
        raise InputError(
            "train.graphs: true, but steps are recorded on a GPU only, in one process and without accumulate"
        )
    return can and config.cuda_graphs is not False


B = TypeVar("B", bound=TrainingBatch)


@dataclass(frozen=True)
class _TrainingGraph:
    inputs: list[Tensor]  # the tensors of a batch
    output: Tensor
    replay: Callable[[], None]


class CudaGraphGradients(Generic[B]):
    """What ``run(batch, scale)`` gives, and the gradients it leaves in the parameters; by graphs on a GPU.

    The first batch of a form is launched kernel by kernel, and so are all without a form, or without a GPU.

    Args:
        run: computes something of a batch on the device and calls ``backward``, without ever waiting for the
            GPU. Autocast, if it is wanted, goes inside. ``scale`` is a number on the device.
        parameters: whose gradients are wanted. They replace those that were there before, and on a GPU they
            always lie at the same addresses.
        device: of the parameters.

    >>> def run(batch: Pairs, scale: Tensor) -> Tensor:  # doctest: +SKIP
    ...     total = model.loss(batch).total
    ...     (total * scale).backward()
    ...     return total.detach()
    >>> gradients = Gradients(run, model.parameters(), device)  # doctest: +SKIP
    >>> total = gradients(batch, 1 / batch.count)  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP
    """

    def __init__(
        self,
        run: Callable[[B, Tensor], Tensor],
        parameters: Iterable[nn.Parameter],
        device: torch.device,
    ) -> None:
        self.capture_error: str | None = None  # why nothing is recorded any more
        self._run, self.device = run, device
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._scale = torch.zeros((), device=device)
        self._seen_keys: set[Hashable] = set()
        self._graphs: dict[Hashable, _TrainingGraph] = {}
        self._gradients: list[Tensor] = []  # the gradients of all graphs
        self._recorder = _GraphRecorder(device)

    def __call__(self, batch: B, scale: float) -> Tensor:
        """What ``run`` gives for the batch, on the host or the device; it is the caller's to keep."""
        self._scale.fill_(scale)
        form = batch.graph_key if _supports_graphs(self.device) else None
        graph = self._graphs.get(form)
        if (
            graph is None
            and form in self._seen_keys
            and not self.capture_error
            and len(self._graphs) < MAX_GRAPHS
        ):
            graph = self._capture_graph(batch, form)
        self._attach_gradients()
        if graph is None:
            if form is not None:
                self._seen_keys.add(form)
            torch._foreach_zero_(self._gradients)
            return self._run(batch.to(self.device), self._scale)
        for held, new in zip(graph.inputs, _list_tensors(batch), strict=True):
            held.copy_(new, non_blocking=True)
        graph.replay()
        return graph.output.clone()

    def _attach_gradients(self) -> None:
        self._gradients = self._gradients or [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, own in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = own

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _store_gradients(self) -> None:
        """The gradients that are there now, in the place of those before."""
        made: list[tuple[Tensor, Tensor]] = []  # where to, and what
        for parameter, own in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None:
                own.zero_()
            else:
                made.append((own, parameter.grad))
        if made:
            to, what = map(list, zip(*made, strict=True))
            torch._foreach_copy_(to, what)
        self._attach_gradients()

    def _capture_graph(self, batch: B, graph_key: Hashable) -> _TrainingGraph | None:
        held = map_tensors(batch, lambda x: x.to(self.device, copy=True))
        self._attach_gradients()

        def run() -> Tensor:
            # Gradients that are made anew are copied all at once. To add each to zeros would read one more
            # tensor, and launch a kernel for every parameter.
            self._clear_gradients()
            # A new object each time: what masks remember must be worked out within the graph.
            value = self._run(map_tensors(held, lambda x: x), self._scale)
            self._store_gradients()
            return value

        try:
            replay, written = self._recorder.capture(run, NUM_WARMUP_CALLS)
        except RuntimeError as error:
            # The work goes on, only slower; and the next form would fare no better.
            self.capture_error = _get_first_line(error)
            return None
        self._graphs[graph_key] = _TrainingGraph(_list_tensors(held), written, replay)
        return self._graphs[graph_key]


class CudaGraphCallable:
    """``run()``, from its third call on by a graph.

    Args:
        run: changes tensors in place that are at the same addresses every time, without ever waiting for the
            GPU, and gives another tensor.
        device: where they are.

    >>> weight, rate = torch.ones(2), torch.tensor(0.5)
    >>> def run() -> Tensor:
    ...     return weight.mul_(rate).sum()
    >>> repeated = Repeated(run, weight.device)
    >>> repeated(), repeated()
    (tensor(1.), tensor(0.5000))
    """

    def __init__(self, run: Callable[[], Tensor], device: torch.device) -> None:
        self.capture_error: str | None = None
        self._run, self.device = run, device
        self._num_calls = 0
        self._recorder = _GraphRecorder(device)
        self._graph: tuple[Callable[[], None], Tensor] | None = None

    def __call__(self) -> Tensor:
        """What ``run`` gives; it is the caller's to keep."""
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
        replay, written = self._graph
        replay()
        return written.clone()


class _GraphRecorder:
    """The stream of recordings on a device, and the memory that they share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream_and_pool: tuple[Any, Any] | None = None

    def capture(
        self, run: Callable[[], Tensor], num_warmup_calls: int = 0
    ) -> tuple[Callable[[], None], Tensor]:
        """What replays ``run()``, and the tensor that each replay writes. To record runs nothing."""
        with torch.cuda.device(self.device):
            if self._stream_and_pool is None:
                self._stream_and_pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            stream, pool = self._stream_and_pool
            here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                for _ in range(num_warmup_calls):
                    run()
                torch.cuda.synchronize()
                # Threads that make the next batches ready may go on meanwhile.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    with cuda_graph_scope():
                        written = run()
                finally:
                    graph.capture_end()
            here.wait_stream(stream)
        return graph.replay, written


def _supports_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def _get_first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _list_tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def add(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(batch, add)
    return found
