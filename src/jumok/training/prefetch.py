"""The batches of a run, in order, made ready in a thread of their own while the step before them runs."""

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

__all__ = [
    "ExampleIndices",
    "StepBatches",
    "TrainingBatch",
    "TrainingDataset",
    "iter_step_batches",
    "prefetch_items",
]

ExampleIndices = npt.NDArray[np.integer[Any]]  # the numbers of examples in their data set
T = TypeVar("T")


class TrainingBatch(Protocol):
    """What a model's ``loss`` takes."""

    @property
    def count(self) -> int:
        """How many places the loss is a sum over."""

    @property
    def graph_key(self) -> Hashable | None:
        """Batches of the same form launch the same kernels; None: like no other. See :mod:`.graphs`."""

    def to(self, device: torch.device, /) -> Self: ...


class TrainingDataset(Protocol):
    """Where batches come from. All three are pure functions, called in a thread of their own."""

    def batches(self, epoch: int) -> Sequence[ExampleIndices]:
        """The batches of an epoch, in order: the same in every process and every time it is asked."""

    def divide(self, index: ExampleIndices, num_parts: int) -> Sequence[ExampleIndices]:
        """One batch in so many parts of about the same work; some are empty if there are fewer examples."""

    def collate(self, index: ExampleIndices) -> TrainingBatch:
        """The examples themselves."""


@dataclass(frozen=True)
class StepBatches:
    """What one process does in one step: its parts of the batch.

    A part has a weight: 1, or 0 if there is nothing to do. All processes must take equally many turns, since
    they talk to each other in each; so one without work takes any example, and it does not count.
    """

    epoch: int
    epoch_step: int  # in the epoch, from 0 on
    next_position: tuple[int, int]  # epoch and position of the work to follow
    micro_batches: list[tuple[TrainingBatch, int]]


def iter_step_batches(
    data: TrainingDataset,
    ranks: DistributedRanks,
    accumulation_steps: int,
    epoch: int = 0,
    epoch_step: int = 0,
) -> Iterator[StepBatches]:
    """The work of all steps from there on, without end."""
    on_gpu = ranks.device.type == "cuda"

    def collated(index: ExampleIndices) -> TrainingBatch:
        batch = data.collate(index)
        return pin_memory(batch) if on_gpu else batch

    while True:
        batches = data.batches(epoch)
        if not len(batches):
            raise InputError(f"there is nothing to train on: epoch {epoch + 1} has no batches")
        for at in range(epoch_step, len(batches)):
            index = batches[at]
            own = data.divide(index, ranks.world_size * accumulation_steps)[ranks.rank :: ranks.world_size]
            parts = [(collated(part), 1) if len(part) else (collated(index[:1]), 0) for part in own]
            following = (epoch, at + 1) if at + 1 < len(batches) else (epoch + 1, 0)
            yield StepBatches(epoch, at, following, parts)
        epoch, epoch_step = epoch + 1, 0


def prefetch_items(items: Iterator[T], depth: int) -> Generator[T]:
    """The same items, up to ``depth`` of them made in advance by a thread; an error comes in its turn.

    >>> list(ahead(iter("abc"), depth=2))
    ['a', 'b', 'c']
    """
    if depth == 0:
        yield from items
        return
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
    done = threading.Event()

    def put(item: T | None, error: BaseException | None = None) -> None:
        while not done.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((item, error), timeout=0.1)
                return

    def make() -> None:
        try:
            for item in items:
                put(item)
                if done.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # whatever it is, the loop is who should know
            put(None, error)

    thread = threading.Thread(target=make, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # None only comes with an error
    finally:
        done.set()
        thread.join(timeout=5)  # it ends after the item at hand; a very slow one is not waited for


def pin_memory(batch: Any) -> Any:
    """A batch in pinned memory, from which a GPU copies while it computes."""
    return map_tensors(batch, Tensor.pin_memory)


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A batch with its tensors changed, however deep they are in dataclasses, tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        return function(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
        return replace(batch, **{name: map_tensors(value, function) for name, value in values.items()})
    if isinstance(batch, list | tuple) and any(
        isinstance(item, Tensor) or is_dataclass(item) for item in batch
    ):
        return tuple(map_tensors(item, function) for item in batch)
    if isinstance(batch, dict):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    return batch
