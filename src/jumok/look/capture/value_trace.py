"""Recording of what a module computes from its values, to compute it again with other values.

The output of an attention is linear in its values: it is their sum, weighted. If only one value is 1 and the others
are 0, the output is the weights on it, in whatever chunks, buckets or samples the module computes them::

    with ValueTrace() as trace:
        values = module.value(x)             # (B, K, C)
        trace.add_source(values)
        out = module.attend(values)          # (B, Q, C)
        trace.add_output(out)
    trace.replay([probe])                    # the output of these values, with the same weights

Tensors are identified by their memory, as views of it: a module may write values into a part of a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from jumok.look.capture.weight_tracking.softmax_candidates import get_storage_id
from jumok.look.capture.weight_tracking.weight_tracker import (
    RANDOM_OPS,
    SHAPE_ONLY_OPS,
    collect_tensors,
    find_mutated,
    get_autocast,
    restore_autocast,
)


@dataclass(eq=False)
class _Memory:
    """The memory of a tensor that does not depend on the values, and its content when it was used."""

    content: Tensor  # (number of elements,)


class _View(NamedTuple):
    """A tensor, as a view of memory: of one that depends on the values, by its number, or of a constant one."""

    memory: int | _Memory
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def select(self, content: Tensor) -> Tensor:
        return content.as_strided(self.size, self.stride, self.offset)


class _Source(NamedTuple):
    """The values are known."""

    view: _View
    num_elements: int


class _Snapshot(NamedTuple):
    """Something computed from values is about to be written into this memory."""

    number: int
    content: Tensor


class _Operation(NamedTuple):
    """An operation on tensors that depend on the values."""

    op: Any
    args: Any  # with a _View for each tensor
    kwargs: Any
    outputs: list[_View | None]  # None: it is a view of an input
    reads: set[int]  # numbers of memory
    writes: set[int]


class _Output(NamedTuple):
    """An output is known."""

    view: _View


class ValueTrace(TorchDispatchMode):
    """Records the operations between values and outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[Tensor] = []  # of each source
        self.outputs: list[Tensor] = []
        self.output_sources: list[frozenset[int]] = []  # the sources that each output depends on
        self.is_random = False  # whether dropout was active
        self._steps: list[_Source | _Snapshot | _Operation | _Output] = []
        self._numbers: dict[int, int] = {}  # of the memory that depends on values, by its id
        self._sources: list[frozenset[int]] = []  # by number
        self._constants: dict[int, _Memory] = {}  # other memory that was used, by its id
        self._references: list[Tensor] = []  # so that no memory is freed and its id used again
        self._dtypes: list[torch.dtype] = []  # by number
        self._required_steps: list[_Source | _Snapshot | _Operation | _Output] | None = None
        self._converted: dict[int, Tensor] = {}
        self._autocast = next((x for device in ("cuda", "cpu") if (x := get_autocast(device))), None)
        self._is_paused = False

    # ------------------------------------------------------------------------------------ recording

    def add_source(self, values: Tensor) -> None:
        """Record that these are values."""
        with self._pause():
            self.values.append(values.detach().clone())
            view = self._add_memory(values, frozenset({len(self.values) - 1}))
            self._steps.append(_Source(view, len(_flatten(values))))

    def add_output(self, out: Tensor) -> None:
        """Record that this is an output. It is ignored if it does not depend on values."""
        with self._pause():
            number = self._numbers.get(get_storage_id(out))
            if number is not None:
                self._steps.append(_Output(_make_view(out, number)))
                self.output_sources.append(self._sources[number])
                self.outputs.append(out.detach().clone())

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return op(*args, **kwargs)
        tensors = collect_tensors([*args, *kwargs.values()])
        numbers = [number for x in tensors if (number := self._numbers.get(get_storage_id(x))) is not None]
        mutated = find_mutated(op, args, kwargs)
        step = None
        with torch.no_grad():
            for x in mutated:
                self._prepare_writing(x, is_dependent=bool(numbers))
            if numbers and op.overloadpacket not in SHAPE_ONLY_OPS:
                sources = frozenset().union(*(self._sources[number] for number in numbers))
                view_args, view_kwargs = pytree.tree_map_only(Tensor, self._refer_to, (args, kwargs))
                written = {self._numbers[get_storage_id(x)] for x in mutated}
                step = _Operation(op, view_args, view_kwargs, [], reads={*numbers, *written}, writes=written)
                for number in written:
                    self._sources[number] |= sources
        self.is_random |= op.overloadpacket in RANDOM_OPS
        with restore_autocast(op, self._autocast if torch.is_inference_mode_enabled() else None):
            out = op(*args, **kwargs)
        if step is not None:
            self._add_outputs(step, collect_tensors([out]), sources)
        return out

    def _prepare_writing(self, x: Tensor, is_dependent: bool) -> None:
        """Keep the content of memory that is about to be overwritten, if it is needed."""
        storage_id = get_storage_id(x)
        memory = self._constants.pop(storage_id, None)
        if memory is not None:
            memory.content = memory.content.clone()
        if is_dependent and storage_id not in self._numbers:
            content = _flatten(x).clone()
            view = self._add_memory(x, frozenset())
            assert isinstance(view.memory, int)
            self._steps.append(_Snapshot(view.memory, content))

    def _refer_to(self, x: Tensor) -> _View:
        number = self._numbers.get(get_storage_id(x))
        if number is not None:
            if x.dtype != self._dtypes[number]:
                raise TypeError("its values are read as numbers of another type")
            return _make_view(x, number)
        storage_id = get_storage_id(x)
        if storage_id not in self._constants:
            self._constants[storage_id] = _Memory(_flatten(x))
            self._references.append(x)
        return _make_view(x, self._constants[storage_id])

    def _add_outputs(self, step: _Operation, outputs: list[Tensor], sources: frozenset[int]) -> None:
        for out in outputs:
            is_new = get_storage_id(out) not in self._numbers
            step.outputs.append(self._add_memory(out, sources) if is_new else None)
        step.writes.update(_get_number(view) for view in step.outputs if view is not None)
        if step.writes:  # otherwise its outputs are views
            self._steps.append(step)

    def _add_memory(self, x: Tensor, sources: frozenset[int]) -> _View:
        number = self._numbers[get_storage_id(x)] = len(self._sources)
        self._sources.append(sources)
        self._dtypes.append(x.dtype)
        self._references.append(x)
        return _make_view(x, number)

    # --------------------------------------------------------------------------------------- replay

    def replay(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for other values, one tensor for each source, in the type of these."""
        dtype = values[0].dtype
        contents: dict[int, Tensor] = {}
        outputs, remaining_values = [], list(reversed(values))

        def convert(x: Any) -> Any:
            if isinstance(x, torch.dtype):
                return dtype if x.is_floating_point else x
            if not isinstance(x, _View):
                return x
            if isinstance(x.memory, int):
                return x.select(contents[x.memory])
            return x.select(self._convert_constant(x.memory, dtype))

        if self._required_steps is None:
            self._required_steps = self._list_required_steps()
        with torch.no_grad():
            for step in self._required_steps:
                if isinstance(step, _Source):
                    source = remaining_values.pop()
                    content = source.new_zeros(step.num_elements)
                    step.view.select(content).copy_(source)
                    contents[_get_number(step.view)] = content
                elif isinstance(step, _Snapshot):
                    contents[step.number] = _to_dtype(step.content, dtype).clone()
                elif isinstance(step, _Output):
                    outputs.append(step.view.select(contents[_get_number(step.view)]).clone())
                else:
                    args, kwargs = pytree.tree_map(
                        convert, (step.args, step.kwargs), is_leaf=lambda x: isinstance(x, _View)
                    )
                    results = collect_tensors([step.op(*args, **kwargs)])
                    for result, view in zip(results, step.outputs, strict=True):
                        if view is not None:
                            contents[_get_number(view)] = _copy_like(result, view)
        return outputs

    def _list_required_steps(self) -> list[_Source | _Snapshot | _Operation | _Output]:
        """Return the steps that outputs depend on."""
        required: set[int] = set()
        steps: list[_Source | _Snapshot | _Operation | _Output] = []
        for step in reversed(self._steps):
            if isinstance(step, _Output):
                required.add(_get_number(step.view))
            elif isinstance(step, _Operation):
                if not step.writes & required:
                    continue
                required |= step.reads
            steps.append(step)
        return steps[::-1]

    def _convert_constant(self, memory: _Memory, dtype: torch.dtype) -> Tensor:
        if id(memory) not in self._converted:
            self._converted[id(memory)] = _to_dtype(memory.content, dtype)
        return self._converted[id(memory)]


def _make_view(x: Tensor, memory: int | _Memory) -> _View:
    return _View(memory, tuple(x.shape), x.stride(), int(x.storage_offset()))


def _get_number(view: _View) -> int:
    assert isinstance(view.memory, int)
    return view.memory


def _flatten(x: Tensor) -> Tensor:
    """Return the whole memory of a tensor ``(number of elements,)``."""
    return x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def _to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _copy_like(x: Tensor, view: _View) -> Tensor:
    """Return memory that holds ``x`` as the view does."""
    if x.stride() == view.stride and x.storage_offset() == view.offset:
        return _flatten(x)
    span = 1 + sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    content = x.new_zeros(view.offset + max(span, 0))
    view.select(content).copy_(x)
    return content
