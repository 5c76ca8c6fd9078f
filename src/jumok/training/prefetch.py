"""The batches of a run in order, prepared in a background thread while the previous step runs."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.training.distributed import DistributedRanks

ExampleIndices = npt.NDArray[np.integer[Any]]  # indices of examples in their data set
T = TypeVar("T")


class TrainingBatch(Protocol):
    """Input of a model's ``loss``."""

    @property
    def count(self) -> int:
        """Number of labels that the loss is a sum over."""

    @property
    def graph_key(self) -> Hashable | None:
        """Batches with equal keys launch the same kernels. None: no CUDA graph. See :mod:`.cuda_graphs`."""

    def to(self, device: torch.device, /) -> Self:
        """Copy the batch to a device."""


class TrainingDataset(Protocol):
    """Provides batches. All three methods are pure functions, called in a background thread."""

    def batches(self, epoch: int) -> Sequence[ExampleIndices]:
        """Return the batches of an epoch in order. All processes and calls get the same."""

    def divide(self, index: ExampleIndices, num_parts: int) -> Sequence[ExampleIndices]:
        """Split a batch into parts of similar size. Some are empty if there are too few examples."""

    def collate(self, index: ExampleIndices) -> TrainingBatch:
        """Build the batch of these examples."""


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches of one process in one step.

    Each has a weight of 1, or 0 if there is nothing to do. All processes must run the same number of
    micro-batches, because they communicate in each. A process without examples takes any one with weight 0.
    """

    epoch: int
    epoch_step: int  # index of the batch in the epoch
    next_position: tuple[int, int]  # epoch and epoch_step of the next step
    micro_batches: list[tuple[TrainingBatch, int]]


def iter_step_batches(
    data: TrainingDataset,
    ranks: DistributedRanks,
    accumulation_steps: int,
    epoch: int = 0,
    epoch_step: int = 0,
) -> Iterator[StepBatches]:
    """Yield the batches of all steps from this position on, without end."""
    on_gpu = ranks.device.type == "cuda"

    def collate(index: ExampleIndices) -> TrainingBatch:
        batch = data.collate(index)
        return pin_memory(batch) if on_gpu else batch

    while True:
        batches = data.batches(epoch)
        if not len(batches):
            raise InputError(f"there is nothing to train on: epoch {epoch + 1} has no batches")
        for position in range(epoch_step, len(batches)):
            index = batches[position]
            parts = data.divide(index, ranks.world_size * accumulation_steps)[ranks.rank :: ranks.world_size]
            micro_batches = [(collate(part), 1) if len(part) else (collate(index[:1]), 0) for part in parts]
            next_position = (epoch, position + 1) if position + 1 < len(batches) else (epoch + 1, 0)
            yield StepBatches(epoch, position, next_position, micro_batches)
        epoch, epoch_step = epoch + 1, 0


def prefetch_items(items: Iterator[T], depth: int) -> Generator[T]:
    """Yield the same items, up to ``depth`` of them computed in advance by a thread. Errors keep their order.

    >>> list(prefetch_items(iter("abc"), depth=2))
    ['a', 'b', 'c']
    """
    if depth == 0:
        yield from items
        return
    results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
    is_closed = threading.Event()

    def put(item: T | None, error: BaseException | None = None) -> None:
        while not is_closed.is_set():
            with contextlib.suppress(queue.Full):
                results.put((item, error), timeout=0.1)
                return

    def produce() -> None:
        try:
            for item in items:
                put(item)
                if is_closed.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # the consumer raises it
            put(None, error)

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = results.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # an item is None only with an error
    finally:
        is_closed.set()
        thread.join(timeout=5)  # it ends after the current item; do not wait for a slow one


def pin_memory(batch: Any) -> Any:
    """Copy a batch to pinned memory, from which a GPU copies while it computes."""
    return map_tensors(batch, Tensor.pin_memory)


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to all tensors of a batch, nested in dataclasses, tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        return function(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
        return replace(batch, **{name: map_tensors(value, function) for name, value in values.items()})
    if isinstance(batch, list | tuple) and any(isinstance(item, Tensor) or is_dataclass(item) for item in batch):
        return tuple(map_tensors(item, function) for item in batch)
    if isinstance(batch, dict):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    return batch
