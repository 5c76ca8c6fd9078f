"""Follow attention weights from the softmax that computes them to the product with the values.

A dispatch mode runs from a softmax until its output has been used, or until the model has ended. It labels
the dimensions of every tensor that holds the weights: views and copies move the labels, other operations give
derived weights with the same labels. A product that sums over the keys tells what multiplies the values,
which axes of the weights the values have, too (batch, heads), and which they do not (queries).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from jumok.look.adapters.axes import Axis, derived_axes, leaves, new_axes
from jumok.look.adapters.candidates import Candidate, Use, memory, version
from jumok.look.adapters.weights import Weights

aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
COPIES = {aten.clone, aten._to_copy, aten.alias, aten.detach, aten.lift_fresh, aten.copy}
RANDOM = {aten.bernoulli, aten.bernoulli_, aten.rand, aten.rand_like, aten.uniform_, aten.native_dropout}
RANDOM |= {aten._fused_dropout}
# Operations that read no more of a tensor than its shape.
SHAPES = {aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.randn_like, aten.rand_like}
SHAPES |= {aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full}
# Where the two factors of a product are among the arguments.
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.mv: 0, aten.dot: 0, aten.addmm: 1, aten.baddbmm: 1, aten.addmv: 1}
PATIENCE = 256  # operations after which weights that nothing uses are given up
TOGETHER = "its weights are summed over the keys and another axis at once"


@dataclass
class _Call:
    """One operation on weights."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    found: list[Weights]
    written: list[Tensor]
    noisy: bool = False  # some of its numbers are random
    before: dict[int, Tensor] = field(default_factory=dict)  # weights that dropout overwrites

    @property
    def owners(self) -> tuple[Candidate, ...]:
        return tuple(dict.fromkeys(owner for one in self.found for owner in one.owners))


class Follower(TorchDispatchMode):
    """Follows the weights of all candidates of one thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.candidates: list[Candidate] = []
        self.held: dict[int, Weights] = {}
        self.noise: dict[int, Tensor] = {}
        self.patience = 0
        self.autocast: tuple[str, torch.dtype] | None = None
        self.pushed = False
        self.running = 0  # operations that are being dispatched

    # --------------------------------------------------------------------------------------- life

    def follow(self, candidate: Candidate, weights: Tensor, dim: int, unchanged: bool) -> None:
        """Follow the output of a softmax over ``dim`` from now on."""
        candidate.keys = weights.shape[dim]
        candidate.overwritten = memory(weights) == memory(candidate.scores)
        if (before := self.held.get(id(weights))) is not None:  # the scores were weights of another softmax
            _join(before.owners)
        axes, labels = new_axes(weights.shape, dim % weights.dim())
        self.candidates.append(candidate)
        self._hold(Weights(weights, labels, axes, (candidate,), unchanged))
        self.patience = PATIENCE
        self.note_autocast(weights.device.type)
        if not self.pushed:
            self.pushed = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def note_autocast(self, kind: str) -> None:
        """Remember whether autocast is on: in ``__torch_dispatch__`` it is always off."""
        on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        self.autocast = (kind, torch.get_autocast_dtype(kind)) if on else None

    def rest(self) -> None:
        """Leave the stack of modes if there is nothing to follow."""
        self.candidates = [one for one in self.candidates if one.live]
        if not self.candidates:
            self.held.clear()
            self.noise.clear()
            if self.pushed and not self.running and _get_current_dispatch_mode() is self:
                self.pushed = False
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop following, also after an interrupt, which skips the hooks of modules."""
        for candidate in self.candidates:
            candidate.stop()
        self.rest()

    def explain(self, out: Tensor, *factors: Tensor) -> None:
        """Record the last product as the model sees it: its factors before they were copied."""
        for candidate in self.candidates:
            if candidate.uses and len(candidate.outputs) < len(candidate.uses) and len(factors) == 2:
                use = candidate.uses[-1]
                candidate.outputs.append(weakref.ref(out))
                value, at = factors[1 - use.side], -2 if use.side == 0 else -1
                if value.dim() > 1:
                    candidate.uses[-1] = replace(use, key_stride=value.stride(at))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run something that no dispatch mode may see, such as compiled FlexAttention."""
        if not (self.pushed and _get_current_dispatch_mode() is self):
            yield
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    # ----------------------------------------------------------------------------------- dispatch

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.running += 1
        try:
            return self._dispatch(op, args, kwargs or {})
        finally:
            self.running -= 1

    def _dispatch(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self.candidates:
            return op(*args, **kwargs)
        if torch.is_inference_mode_enabled() and op.has_kernel_for_dispatch_key(COMPOSITE):
            # Without inference mode, such an operation is taken apart before it comes here.
            with self._as_called(op), self:
                return op._op_dk(COMPOSITE, *args, **kwargs)  # not by a decomposition in Python
        call = self._call(op, args, kwargs)
        out = op(*args, **kwargs)
        try:
            with torch.no_grad():
                self._after(call, out)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
            for one in self.candidates:
                one.stop(f"its weights are used in an unusual form ({error})")
        return out

    def _as_called(self, op: Any) -> Any:
        """Autocast as it was for the caller, for operations that autocast lets through."""
        key = None if self.autocast is None else AUTOCAST.get(self.autocast[0])
        if self.autocast is None or key is None or op.has_kernel_for_dispatch_key(key):
            return nullcontext()
        return torch.autocast(*self.autocast)

    def _call(self, op: Any, args: Any, kwargs: Any) -> _Call:
        tensors = _tensors([*args, *kwargs.values()])
        found = [one for x in tensors if (one := self.held.get(id(x))) is not None and one.live]
        call = _Call(op, args, kwargs, tensors, found, _written(op, args, kwargs))
        call.noisy = op.overloadpacket in RANDOM or any(id(x) in self.noise for x in tensors)
        if call.noisy and found:
            call.before = {id(x): x.detach().clone() for x in call.written if id(x) in self.held}
        return call

    def _after(self, call: _Call, out: Any) -> None:
        packet = call.op.overloadpacket
        for x in call.written:
            self._overwritten(x)
        if not call.found or packet in SHAPES:
            self.patience -= 1
            if self.patience < 0:
                for candidate in self.candidates:
                    candidate.stop()
            elif isinstance(out, Tensor) and (
                packet in RANDOM or (call.tensors and all(id(x) in self.noise for x in call.tensors))
            ):
                self.noise[id(out)] = out
            return
        if packet in PRODUCTS:
            self._product(call, out)
        elif packet is aten.sum and call.found[0].values is not None:
            self._sum(call)
        else:
            self._made(call, out)

    def _overwritten(self, x: Tensor) -> None:
        """All that shares memory with a tensor that was written to has changed."""
        where = memory(x)
        for candidate in self.candidates:
            candidate.overwritten |= memory(candidate.scores) == where
        for key, one in list(self.held.items()):
            if one.unchanged and memory(one.tensor) == where:
                self.held[key] = replace(one, unchanged=False)

    def _hold(self, weights: Weights) -> None:
        self.held[id(weights.tensor)] = weights

    def _made(self, call: _Call, out: Any) -> None:
        """Note which outputs of an operation hold weights."""
        outs = _tensors([out])
        clean: Sequence[Tensor | None] = self._before_dropout(call) or [None] * len(outs)
        for at, (one, undropped) in enumerate(zip(outs, clean, strict=True)):
            if call.noisy and at:  # a mask of dropout
                self.noise[id(one)] = one
                continue
            made = self._weights(call, one)
            if made is not None:
                self._hold(made if undropped is None else replace(made, clean=undropped))

    def _before_dropout(self, call: _Call) -> list[Tensor] | None:
        """What the operation gives for the weights before dropout, if there was dropout."""
        if call.noisy or all(one.clean is None for one in call.found):
            return None

        def undropped(x: Any) -> Any:
            one = self.held.get(id(x)) if isinstance(x, Tensor) else None
            if one is None or one.clean is None:
                return x
            return one.clean.clone() if call.written else one.clean

        args, kwargs = pytree.tree_map(undropped, (call.args, call.kwargs))
        return _tensors([call.op(*args, **kwargs)])

    def _weights(self, call: _Call, out: Tensor) -> Weights | None:
        """The weights that one output of an operation holds; None: it holds none."""
        packet, one = call.op.overloadpacket, call.found[0]
        if one.lost is not None:
            is_whole = out.numel() >= one.tensor.numel()  # more: it is repeated
            return replace(one, tensor=out, owners=call.owners) if is_whole else None
        if not call.written and memory(out) == memory(one.tensor):
            return one.view(out)
        if out.shape == one.tensor.shape:
            if packet in COPIES or (packet is aten.copy_ and call.tensors[0] is not one.tensor):
                return replace(one, tensor=out)
            if call.noisy:
                before = call.before.get(id(one.tensor), one.tensor)
                return replace(one, tensor=out, clean=before if one.clean is None else one.clean)
            made = derived_axes(one.labels, out.shape)
            if made is not None and one.values is None:
                return Weights(out, made[1], made[0], call.owners, unchanged=False)
        elif packet is aten.mul and one.values is None and len(call.found) == 1:
            other = next(x for x in call.tensors if x is not one.tensor)
            labels = ((),) * (out.dim() - one.tensor.dim()) + one.labels
            products = replace(one, tensor=out, labels=labels, values=other.expand(out.shape), factor=one)
            if not one.keys:  # of one key there is no sum
                self._summed(products, set())
            return products
        if out.numel() < one.tensor.numel() and packet not in (aten.mean, aten.slice, aten.index):
            return None
        return replace(
            one, tensor=out, lost=f"its weights go through {packet.__name__}, and are not followed"
        )

    # ----------------------------------------------------------------------------------- products

    def _product(self, call: _Call, out: Tensor) -> None:
        start = PRODUCTS[call.op.overloadpacket]
        factors = call.args[start : start + 2]
        both = [(side, one) for side, x in enumerate(factors) if (one := self.held.get(id(x))) and one.live]
        if not both or both[0][1].values is not None:
            return
        side, one = both[0]
        if len(both) > 1:
            lost = "its weights are multiplied with weights"
            self._hold(replace(one, tensor=out, owners=call.owners, lost=lost))
            return
        if one.lost is not None:
            _stop(one, one.lost)
            return
        *batch, last = [leaves(label) for label in one.labels]
        row = batch.pop() if batch else []
        inner, rows = (last, row) if side == 0 or len(one.labels) == 1 else (row, last)
        if inner == one.keys:
            other = factors[1 - side]
            columns = 1 if other.dim() == 1 else other.shape[-1 if side == 0 else -2]
            self._used(one, set(leaves(batch[0]) if batch else []), set(rows), other, columns, side)
        elif any(axis.is_key for axis in inner):
            _stop(one, TOGETHER)
        elif out.dim() == len(one.labels):  # heads are mixed
            mixed = (Axis(out.shape[-1 if side == 0 else -2]),)
            pair = (tuple(rows), mixed) if side == 0 else (mixed, tuple(rows))
            made = derived_axes((*(tuple(some) for some in batch), *pair), out.shape)
            assert made is not None
            clean = self._before_dropout(call)
            self._hold(
                Weights(out, made[1], made[0], one.owners, unchanged=False, clean=clean[0] if clean else None)
            )

    def _sum(self, call: _Call) -> None:
        """A sum of weights · values."""
        one = call.found[0]
        count = one.tensor.dim()
        dims = call.args[1] if len(call.args) > 1 and call.args[1] is not None else range(count)
        dims = {dim % count for dim in dims}
        inner = [leaf for dim in sorted(dims) for leaf in leaves(one.labels[dim])]
        if inner != one.keys or not inner:
            if any(axis.is_key for axis in inner):
                _stop(one, TOGETHER)
            return
        self._summed(one, dims)

    def _summed(self, one: Weights, dims: set[int]) -> None:
        """Weights · values were summed over the keys, which are at ``dims``."""
        assert one.values is not None
        assert one.factor is not None
        rows: set[Axis] = set()
        batch: set[Axis] = set()
        columns = 1
        for dim in set(range(one.tensor.dim())) - dims:
            label = leaves(one.labels[dim])
            (rows if one.values.stride(dim) == 0 else batch).update(label)
            columns *= 1 if label else one.tensor.shape[dim]
        self._used(one.factor, batch, rows, one.values, columns)

    def _used(
        self, one: Weights, batch: set[Axis], rows: set[Axis], value: Tensor, columns: int, side: int = 0
    ) -> None:
        weights, axes = one.arranged()
        source = one.tensor if one.clean is None else one.clean
        use = Use(
            weights.detach(),
            axes,
            tuple(weights.shape),
            leaves(one.axes),
            batch,
            rows,
            value.detach(),
            columns,
            one.unchanged,
            one.part,
            source,
            version(source),
            side,
        )
        owner, *others = one.owners
        _join(others)
        if source.is_inference():  # no counter tells if these are overwritten
            if one.unchanged and owner.has_scores:
                owner.scores = owner.scores.detach().clone()
            else:
                use = replace(use, weights=use.weights.clone())
        owner.uses.append(use)
        if not one.part:
            owner.stop()


def _tensors(some: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results, which may be in lists."""
    each = (x for one in some for x in (one if isinstance(one, list | tuple) else (one,)))
    return [x for x in each if isinstance(x, Tensor)]


def _written(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    if not op._schema.is_mutable:
        return []
    given = {one.name: x for one, x in zip(op._schema.arguments, args, strict=False)} | kwargs
    written = [
        given.get(one.name) for one in op._schema.arguments if one.alias_info and one.alias_info.is_write
    ]
    return [x for x in written if isinstance(x, Tensor)]


def _join(owners: Iterable[Candidate]) -> None:
    for owner in owners:
        owner.joined = True
        owner.stop()


def _stop(one: Weights, reason: str) -> None:
    for owner in one.owners:
        owner.stop(reason)


class _Threads(threading.local):
    """Each thread has its own follower, because it has its own stack of modes."""

    def __init__(self) -> None:
        self.follower = Follower()


_THREADS = _Threads()


def follower() -> Follower:
    """The follower of this thread."""
    return _THREADS.follower


def other_modes() -> int:
    """The number of dispatch modes of others that are active in this thread."""
    return int(torch._C._len_torch_dispatch_stack()) - follower().pushed
