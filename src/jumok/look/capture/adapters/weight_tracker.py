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

from jumok.look.capture.adapters.axes import WeightAxis, create_axes, derive_axes, list_leaf_axes
from jumok.look.capture.adapters.softmax_candidates import (
    SoftmaxCandidate,
    ValueProduct,
    get_storage_id,
    get_version,
)
from jumok.look.capture.adapters.tracked_weights import TrackedWeights

aten = torch.ops.aten
COMPOSITE_KEY = torch._C.DispatchKey.CompositeImplicitAutograd
AUTOCAST_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
COPY_OPS = {aten.clone, aten._to_copy, aten.alias, aten.detach, aten.lift_fresh, aten.copy}
RANDOM_OPS = {aten.bernoulli, aten.bernoulli_, aten.rand, aten.rand_like, aten.uniform_, aten.native_dropout}
RANDOM_OPS |= {aten._fused_dropout}
# Operations that read no more of a tensor than its shape.
SHAPE_ONLY_OPS = {
    aten.empty_like,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.randn_like,
    aten.rand_like,
}
SHAPE_ONLY_OPS |= {aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full}
# Where the two factors of a product are among the arguments.
PRODUCT_OPS = {
    aten.mm: 0,
    aten.bmm: 0,
    aten.mv: 0,
    aten.dot: 0,
    aten.addmm: 1,
    aten.baddbmm: 1,
    aten.addmv: 1,
}
MAX_IDLE_OPS = 256  # operations after which weights that nothing uses are given up
JOINT_SUM_REASON = "its weights are summed over the keys and another axis at once"


@dataclass
class _OperatorCall:
    """One operation on weights."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    weights: list[TrackedWeights]
    mutated_tensors: list[Tensor]
    is_random: bool = False  # some of its numbers are random
    saved_weights: dict[int, Tensor] = field(default_factory=dict)  # weights that dropout overwrites

    @property
    def owners(self) -> tuple[SoftmaxCandidate, ...]:
        return tuple(dict.fromkeys(owner for one in self.weights for owner in one.owners))


class WeightTracker(TorchDispatchMode):
    """Follows the weights of all candidates of one thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.candidates: list[SoftmaxCandidate] = []
        self.tracked_weights: dict[int, TrackedWeights] = {}
        self.random_tensors: dict[int, Tensor] = {}
        self.remaining_idle_ops = 0
        self.autocast: tuple[str, torch.dtype] | None = None
        self.is_active = False
        self.num_running_ops = 0  # operations that are being dispatched

    # --------------------------------------------------------------------------------------- life

    def track(self, candidate: SoftmaxCandidate, weights: Tensor, dim: int, is_unchanged: bool) -> None:
        """Follow the output of a softmax over ``dim`` from now on."""
        candidate.num_keys = weights.shape[dim]
        candidate.is_overwritten = get_storage_id(weights) == get_storage_id(candidate.scores)
        if (
            before := self.tracked_weights.get(id(weights))
        ) is not None:  # the scores were weights of another softmax
            _merge_candidates(before.owners)
        axes, labels = create_axes(weights.shape, dim % weights.dim())
        self.candidates.append(candidate)
        self._add_weights(TrackedWeights(weights, labels, axes, (candidate,), is_unchanged))
        self.remaining_idle_ops = MAX_IDLE_OPS
        self.record_autocast(weights.device.type)
        if not self.is_active:
            self.is_active = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def record_autocast(self, device_type: str) -> None:
        """Remember whether autocast is on: in ``__torch_dispatch__`` it is always off."""
        on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
        self.autocast = (device_type, torch.get_autocast_dtype(device_type)) if on else None

    def exit_if_idle(self) -> None:
        """Leave the stack of modes if there is nothing to follow."""
        self.candidates = [one for one in self.candidates if one.is_live]
        if not self.candidates:
            self.tracked_weights.clear()
            self.random_tensors.clear()
            if self.is_active and not self.num_running_ops and _get_current_dispatch_mode() is self:
                self.is_active = False
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop following, also after an interrupt, which skips the hooks of modules."""
        for candidate in self.candidates:
            candidate.stop()
        self.exit_if_idle()

    def record_factors(self, out: Tensor, *factors: Tensor) -> None:
        """Record the last product as the model sees it: its factors before they were copied."""
        for candidate in self.candidates:
            if (
                candidate.value_products
                and len(candidate.product_outputs) < len(candidate.value_products)
                and len(factors) == 2
            ):
                use = candidate.value_products[-1]
                candidate.product_outputs.append(weakref.ref(out))
                value, at = factors[1 - use.weights_side], -2 if use.weights_side == 0 else -1
                if value.dim() > 1:
                    candidate.value_products[-1] = replace(use, key_stride=value.stride(at))

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Run something that no dispatch mode may see, such as compiled FlexAttention."""
        if not (self.is_active and _get_current_dispatch_mode() is self):
            yield
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    # ----------------------------------------------------------------------------------- dispatch

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_running_ops += 1
        try:
            return self._dispatch(op, args, kwargs or {})
        finally:
            self.num_running_ops -= 1

    def _dispatch(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self.candidates:
            return op(*args, **kwargs)
        if torch.is_inference_mode_enabled() and op.has_kernel_for_dispatch_key(COMPOSITE_KEY):
            # Without inference mode, such an operation is taken apart before it comes here.
            with self._restore_autocast(op), self:
                return op._op_dk(COMPOSITE_KEY, *args, **kwargs)  # not by a decomposition in Python
        call = self._inspect_call(op, args, kwargs)
        out = op(*args, **kwargs)
        try:
            with torch.no_grad():
                self._process_call(call, out)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
            for one in self.candidates:
                one.stop(f"its weights are used in an unusual form ({error})")
        return out

    def _restore_autocast(self, op: Any) -> Any:
        """Autocast as it was for the caller, for operations that autocast lets through."""
        key = None if self.autocast is None else AUTOCAST_KEYS.get(self.autocast[0])
        if self.autocast is None or key is None or op.has_kernel_for_dispatch_key(key):
            return nullcontext()
        return torch.autocast(*self.autocast)

    def _inspect_call(self, op: Any, args: Any, kwargs: Any) -> _OperatorCall:
        tensors = _collect_tensors([*args, *kwargs.values()])
        found = [one for x in tensors if (one := self.tracked_weights.get(id(x))) is not None and one.is_live]
        call = _OperatorCall(op, args, kwargs, tensors, found, _find_mutated(op, args, kwargs))
        call.is_random = op.overloadpacket in RANDOM_OPS or any(id(x) in self.random_tensors for x in tensors)
        if call.is_random and found:
            call.saved_weights = {
                id(x): x.detach().clone() for x in call.mutated_tensors if id(x) in self.tracked_weights
            }
        return call

    def _process_call(self, call: _OperatorCall, out: Any) -> None:
        packet = call.op.overloadpacket
        for x in call.mutated_tensors:
            self._mark_overwritten(x)
        if not call.weights or packet in SHAPE_ONLY_OPS:
            self.remaining_idle_ops -= 1
            if self.remaining_idle_ops < 0:
                for candidate in self.candidates:
                    candidate.stop()
            elif isinstance(out, Tensor) and (
                packet in RANDOM_OPS
                or (call.tensors and all(id(x) in self.random_tensors for x in call.tensors))
            ):
                self.random_tensors[id(out)] = out
            return
        if packet in PRODUCT_OPS:
            self._process_product(call, out)
        elif packet is aten.sum and call.weights[0].values is not None:
            self._process_sum(call)
        else:
            self._track_outputs(call, out)

    def _mark_overwritten(self, x: Tensor) -> None:
        """All that shares memory with a tensor that was written to has changed."""
        where = get_storage_id(x)
        for candidate in self.candidates:
            candidate.is_overwritten |= get_storage_id(candidate.scores) == where
        for key, one in list(self.tracked_weights.items()):
            if one.is_unchanged and get_storage_id(one.tensor) == where:
                self.tracked_weights[key] = replace(one, is_unchanged=False)

    def _add_weights(self, weights: TrackedWeights) -> None:
        self.tracked_weights[id(weights.tensor)] = weights

    def _track_outputs(self, call: _OperatorCall, out: Any) -> None:
        """Note which outputs of an operation hold weights."""
        outs = _collect_tensors([out])
        clean: Sequence[Tensor | None] = self._recompute_without_dropout(call) or [None] * len(outs)
        for at, (one, undropped) in enumerate(zip(outs, clean, strict=True)):
            if call.is_random and at:  # a mask of dropout
                self.random_tensors[id(one)] = one
                continue
            made = self._derive_weights(call, one)
            if made is not None:
                self._add_weights(made if undropped is None else replace(made, before_dropout=undropped))

    def _recompute_without_dropout(self, call: _OperatorCall) -> list[Tensor] | None:
        """What the operation gives for the weights before dropout, if there was dropout."""
        if call.is_random or all(one.before_dropout is None for one in call.weights):
            return None

        def undropped(x: Any) -> Any:
            one = self.tracked_weights.get(id(x)) if isinstance(x, Tensor) else None
            if one is None or one.before_dropout is None:
                return x
            return one.before_dropout.clone() if call.mutated_tensors else one.before_dropout

        args, kwargs = pytree.tree_map(undropped, (call.args, call.kwargs))
        return _collect_tensors([call.op(*args, **kwargs)])

    def _derive_weights(self, call: _OperatorCall, out: Tensor) -> TrackedWeights | None:
        """The weights that one output of an operation holds; None: it holds none."""
        packet, one = call.op.overloadpacket, call.weights[0]
        if one.lost_reason is not None:
            is_whole = out.numel() >= one.tensor.numel()  # more: it is repeated
            return replace(one, tensor=out, owners=call.owners) if is_whole else None
        if not call.mutated_tensors and get_storage_id(out) == get_storage_id(one.tensor):
            return one.track_view(out)
        if out.shape == one.tensor.shape:
            if packet in COPY_OPS or (packet is aten.copy_ and call.tensors[0] is not one.tensor):
                return replace(one, tensor=out)
            if call.is_random:
                before = call.saved_weights.get(id(one.tensor), one.tensor)
                return replace(
                    one,
                    tensor=out,
                    before_dropout=before if one.before_dropout is None else one.before_dropout,
                )
            made = derive_axes(one.labels, out.shape)
            if made is not None and one.values is None:
                return TrackedWeights(out, made[1], made[0], call.owners, is_unchanged=False)
        elif packet is aten.mul and one.values is None and len(call.weights) == 1:
            other = next(x for x in call.tensors if x is not one.tensor)
            labels = ((),) * (out.dim() - one.tensor.dim()) + one.labels
            products = replace(one, tensor=out, labels=labels, values=other.expand(out.shape), factor=one)
            if not one.key_axes:  # of one key there is no sum
                self._record_sum(products, set())
            return products
        if out.numel() < one.tensor.numel() and packet not in (aten.mean, aten.slice, aten.index):
            return None
        return replace(
            one, tensor=out, lost_reason=f"its weights go through {packet.__name__}, and are not followed"
        )

    # ----------------------------------------------------------------------------------- products

    def _process_product(self, call: _OperatorCall, out: Tensor) -> None:
        start = PRODUCT_OPS[call.op.overloadpacket]
        factors = call.args[start : start + 2]
        both = [
            (side, one)
            for side, x in enumerate(factors)
            if (one := self.tracked_weights.get(id(x))) and one.is_live
        ]
        if not both or both[0][1].values is not None:
            return
        side, one = both[0]
        if len(both) > 1:
            lost = "its weights are multiplied with weights"
            self._add_weights(replace(one, tensor=out, owners=call.owners, lost_reason=lost))
            return
        if one.lost_reason is not None:
            _stop_owners(one, one.lost_reason)
            return
        *batch, last = [list_leaf_axes(label) for label in one.labels]
        row = batch.pop() if batch else []
        inner, rows = (last, row) if side == 0 or len(one.labels) == 1 else (row, last)
        if inner == one.key_axes:
            other = factors[1 - side]
            columns = 1 if other.dim() == 1 else other.shape[-1 if side == 0 else -2]
            self._record_value_product(
                one, set(list_leaf_axes(batch[0]) if batch else []), set(rows), other, columns, side
            )
        elif any(axis.is_key for axis in inner):
            _stop_owners(one, JOINT_SUM_REASON)
        elif out.dim() == len(one.labels):  # heads are mixed
            mixed = (WeightAxis(out.shape[-1 if side == 0 else -2]),)
            pair = (tuple(rows), mixed) if side == 0 else (mixed, tuple(rows))
            made = derive_axes((*(tuple(some) for some in batch), *pair), out.shape)
            assert made is not None
            clean = self._recompute_without_dropout(call)
            self._add_weights(
                TrackedWeights(
                    out,
                    made[1],
                    made[0],
                    one.owners,
                    is_unchanged=False,
                    before_dropout=clean[0] if clean else None,
                )
            )

    def _process_sum(self, call: _OperatorCall) -> None:
        """A sum of weights · values."""
        one = call.weights[0]
        count = one.tensor.dim()
        dims = call.args[1] if len(call.args) > 1 and call.args[1] is not None else range(count)
        dims = {dim % count for dim in dims}
        inner = [leaf for dim in sorted(dims) for leaf in list_leaf_axes(one.labels[dim])]
        if inner != one.key_axes or not inner:
            if any(axis.is_key for axis in inner):
                _stop_owners(one, JOINT_SUM_REASON)
            return
        self._record_sum(one, dims)

    def _record_sum(self, weights: TrackedWeights, key_dims: set[int]) -> None:
        """Weights · values were summed over the keys, which are at ``key_dims``."""
        assert weights.values is not None
        assert weights.factor is not None
        rows: set[WeightAxis] = set()
        batch: set[WeightAxis] = set()
        columns = 1
        for dim in set(range(weights.tensor.dim())) - key_dims:
            label = list_leaf_axes(weights.labels[dim])
            (rows if weights.values.stride(dim) == 0 else batch).update(label)
            columns *= 1 if label else weights.tensor.shape[dim]
        self._record_value_product(weights.factor, batch, rows, weights.values, columns)

    def _record_value_product(
        self,
        tracked: TrackedWeights,
        batch_axes: set[WeightAxis],
        query_axes: set[WeightAxis],
        value: Tensor,
        value_width: int,
        weights_side: int = 0,
    ) -> None:
        weights, axes = tracked.arrange_axes()
        source = tracked.tensor if tracked.before_dropout is None else tracked.before_dropout
        use = ValueProduct(
            weights.detach(),
            axes,
            tuple(weights.shape),
            list_leaf_axes(tracked.axes),
            batch_axes,
            query_axes,
            value.detach(),
            value_width,
            tracked.is_unchanged,
            tracked.is_partial,
            source,
            get_version(source),
            weights_side,
        )
        owner, *others = tracked.owners
        _merge_candidates(others)
        if source.is_inference():  # no counter tells if these are overwritten
            if tracked.is_unchanged and owner.has_scores:
                owner.scores = owner.scores.detach().clone()
            else:
                use = replace(use, weights=use.weights.clone())
        owner.value_products.append(use)
        if not tracked.is_partial:
            owner.stop()


def _collect_tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results, which may be in lists."""
    each = (x for one in values for x in (one if isinstance(one, list | tuple) else (one,)))
    return [x for x in each if isinstance(x, Tensor)]


def _find_mutated(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    if not op._schema.is_mutable:
        return []
    given = {one.name: x for one, x in zip(op._schema.arguments, args, strict=False)} | kwargs
    written = [
        given.get(one.name) for one in op._schema.arguments if one.alias_info and one.alias_info.is_write
    ]
    return [x for x in written if isinstance(x, Tensor)]


def _merge_candidates(owners: Iterable[SoftmaxCandidate]) -> None:
    for owner in owners:
        owner.is_merged = True
        owner.stop()


def _stop_owners(weights: TrackedWeights, reason: str) -> None:
    for owner in weights.owners:
        owner.stop(reason)


class _ThreadTracker(threading.local):
    """Each thread has its own follower, because it has its own stack of modes."""

    def __init__(self) -> None:
        self.tracker = WeightTracker()


_THREAD_TRACKER = _ThreadTracker()


def get_tracker() -> WeightTracker:
    """The follower of this thread."""
    return _THREAD_TRACKER.tracker


def count_other_modes() -> int:
    """The number of dispatch modes of others that are active in this thread."""
    return int(torch._C._len_torch_dispatch_stack()) - get_tracker().is_active
