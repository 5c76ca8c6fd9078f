"""Loss and gradients of a training step as one CUDA graph, for models whose time goes into launches.

A recurrent decoder is a loop of some thousand small kernels, and Python takes several times as long to launch
them as the GPU to run them. A graph is launched as a whole: recorded once, then replayed for every batch,
which is copied to where the first one lay. ::

    recorded    held batch ──► objective ──► backward ──► gradients       all at fixed addresses
    replayed    new batch ─copy─► held batch, the same kernels again, the same places written

What the host decides is recorded too: shapes, lengths, which kernel serves a call. So a graph is of use for
batches of one *form*, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from jumok.batch import Pairs
from jumok.errors import InputError

__all__ = ["Gradients"]

WARM_UPS = 3  # before a capture: libraries make their plans and workspaces at the first calls


class Gradients:
    """The gradients of ``objective(batch)``, as one CUDA graph for batches of the form of an example.

    A batch of another form, or any batch without a GPU, is launched kernel by kernel, with the same result.

    Args:
        objective: from a batch to the number to make smaller, without ever waiting for the GPU. Autocast, if
            it is wanted, goes inside.
        parameters: whose gradients are wanted.
        example: a batch as they will come, on the device of the parameters, without padding.

    >>> def objective(batch: Pairs) -> Tensor:  # doctest: +SKIP
    ...     with torch.autocast("cuda", torch.bfloat16):
    ...         return model.loss(batch).total / batch.count
    >>> gradients = Gradients(objective, model.parameters(), batch)  # doctest: +SKIP
    >>> value = gradients(batch)  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP
    """

    def __init__(
        self, objective: Callable[[Pairs], Tensor], parameters: Iterable[nn.Parameter], example: Pairs
    ) -> None:
        if example.source.mask is not None or example.target.mask is not None:
            raise InputError(
                "a CUDA graph keeps the lengths of the batch it was recorded with, and those of the example "
                "differ from row to row: give one that is neither padded nor packed"
            )
        self._objective = objective
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._form = _form(example)
        self._replay: Callable[[], None] | None = None
        if _on_gpu(example):
            self._record(example)

    def __call__(self, batch: Pairs) -> Tensor:
        """The value of the objective. The gradients take the place of those that were there before."""
        if self._replay is None or _form(batch) != self._form:
            return self._launched(batch)
        for held, new in zip(_tensors(self._held), _tensors(batch), strict=True):
            held.copy_(new, non_blocking=True)
        self._replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient  # again: whoever cleared it let go of the graph's own
        return self._value.clone()

    def _launched(self, batch: Pairs) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        value = self._objective(batch)
        value.backward()
        return value.detach()

    def _again(self) -> Tensor:
        return self._launched(self._held)

    def _record(self, example: Pairs) -> None:
        self._held = _copy(example)
        self._replay, self._value = _captured(self._again)
        self._gradients = [parameter.grad for parameter in self._parameters]


def _captured(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """What replays ``run()``, and the tensor that every replay writes."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    main.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # Threads that make the next batches ready may go on meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            written = run()
    finally:
        torch.cuda.set_stream(main)  # a capture that fails leaves its own stream behind
    return graph.replay, written


def _on_gpu(batch: Pairs) -> bool:
    return batch.labels.is_cuda


def _form(batch: Pairs) -> tuple[object, ...]:
    """All that the host knows of a batch."""
    sides = (batch.source, batch.target)
    return batch.count, *((side.ids.shape, side.lengths, side.packed, side.ids.device) for side in sides)


def _tensors(batch: Pairs) -> tuple[Tensor, ...]:
    return batch.source.ids, batch.target.ids, batch.labels


def _copy(batch: Pairs) -> Pairs:
    source, target = (replace(side, ids=side.ids.clone()) for side in (batch.source, batch.target))
    return replace(batch, source=source, target=target, labels=batch.labels.clone())
