"""The dispatch mode that tracks attention weights from a softmax to the product with the values.

It is active from a softmax until its output has been used or the model has ended. The package describes the
algorithm.
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

from jumok.look.capture.weight_tracking.axes import (
    WeightAxis,
    create_axes,
    derive_axes,
    derive_view_labels,
    list_leaf_axes,
)
from jumok.look.capture.weight_tracking.softmax_candidates import (
    SoftmaxCandidate,
    TrackedOutput,
    ValueProduct,
    get_storage_id,
    get_version,
)
from jumok.look.capture.weight_tracking.tracked_weights import TrackedWeights

aten = torch.ops.aten
COMPOSITE_KEY = torch._C.DispatchKey.CompositeImplicitAutograd
AUTOCAST_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
COPY_OPS = {aten.clone, aten._to_copy, aten.alias, aten.detach, aten.lift_fresh, aten.copy}
RANDOM_OPS = {aten.bernoulli, aten.bernoulli_, aten.rand, aten.rand_like, aten.uniform_, aten.native_dropout}
RANDOM_OPS |= {aten._fused_dropout}
# Operations that read only the shape of a tensor.
SHAPE_ONLY_OPS = {aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.randn_like, aten.rand_like}
SHAPE_ONLY_OPS |= {aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full}
# Index of the first of the two factors among the arguments of a product.
PRODUCT_OPS = {aten.mm: 0, aten.bmm: 0, aten.mv: 0, aten.dot: 0, aten.addmm: 1, aten.baddbmm: 1, aten.addmv: 1}
MAX_IDLE_OPS = 256  # number of operations after which unused weights are dropped
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
    is_random: bool = False  # some of its inputs or outputs are random
    saved_weights: dict[int, Tensor] = field(default_factory=dict)  # weights before dropout overwrites them

    @property
    def owners(self) -> tuple[SoftmaxCandidate, ...]:
        return tuple(dict.fromkeys(owner for tracked in self.weights for owner in tracked.owners))


class WeightTracker(TorchDispatchMode):
    """Tracks the weights of all candidates of one thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.candidates: list[SoftmaxCandidate] = []
        self.tracked_weights: dict[int, TrackedWeights] = {}
        self.tracked_outputs: dict[int, TrackedOutput] = {}
        self.random_tensors: dict[int, Tensor] = {}
        self.remaining_idle_ops = 0
        self.autocast: tuple[str, torch.dtype] | None = None
        self.is_active = False
        self.num_running_ops = 0  # operations being dispatched

    # ---------------------------------------------------------------------------------- lifecycle

    def track(self, candidate: SoftmaxCandidate, weights: Tensor, dim: int, is_unchanged: bool) -> None:
        """Track the output of a softmax over ``dim`` from now on."""
        candidate.num_keys = weights.shape[dim]
        candidate.is_overwritten = get_storage_id(weights) == get_storage_id(candidate.scores)
        before = self.tracked_weights.get(id(weights))
        if before is not None:  # the scores were weights of another softmax
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
        """Record whether autocast is enabled: within ``__torch_dispatch__`` it is always off."""
        self.autocast = get_autocast(device_type)

    def exit_if_idle(self) -> None:
        """Leave the stack of modes if there is nothing to track."""
        self.candidates = [
            candidate for candidate in self.candidates if candidate.is_live or candidate.is_output_tracked
        ]
        if not self.candidates:
            self.tracked_weights.clear()
            self.tracked_outputs.clear()
            self.random_tensors.clear()
            if self.is_active and not self.num_running_ops and _get_current_dispatch_mode() is self:
                self.is_active = False
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop tracking, also after an interrupt, which skips the hooks of modules."""
        for candidate in self.candidates:
            candidate.stop()
        self.exit_if_idle()

    def record_factors(self, out: Tensor, *factors: Tensor) -> None:
        """Record the factors of the last product as the model sees them, before they were copied."""
        for candidate in self.candidates:
            if (
                candidate.value_products
                and len(candidate.product_outputs) < len(candidate.value_products)
                and len(factors) == 2
            ):
                product = candidate.value_products[-1]
                candidate.product_outputs.append(weakref.ref(out))
                value, dim = factors[1 - product.weights_side], -2 if product.weights_side == 0 else -1
                if value.dim() > 1:
                    candidate.value_products[-1] = replace(product, key_stride=value.stride(dim))

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Run code that no dispatch mode may see, such as compiled FlexAttention."""
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
            # Without inference mode, such an operation is decomposed before it is dispatched here.
            with restore_autocast(op, self.autocast), self:
                return op._op_dk(COMPOSITE_KEY, *args, **kwargs)  # not the decomposition in Python
        call = self._inspect_call(op, args, kwargs)
        out = op(*args, **kwargs)
        try:
            with torch.no_grad():
                self._process_call(call, out)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
            for candidate in self.candidates:
                candidate.stop(f"its weights are used in an unusual form ({error})")
        return out

    def _inspect_call(self, op: Any, args: Any, kwargs: Any) -> _OperatorCall:
        tensors = collect_tensors([*args, *kwargs.values()])
        weights = [
            tracked for x in tensors if (tracked := self.tracked_weights.get(id(x))) is not None and tracked.is_live
        ]
        call = _OperatorCall(op, args, kwargs, tensors, weights, find_mutated(op, args, kwargs))
        call.is_random = op.overloadpacket in RANDOM_OPS or any(id(x) in self.random_tensors for x in tensors)
        if call.is_random and weights:
            call.saved_weights = {
                id(x): x.detach().clone() for x in call.mutated_tensors if id(x) in self.tracked_weights
            }
        return call

    def _process_call(self, call: _OperatorCall, out: Any) -> None:
        packet = call.op.overloadpacket
        for x in call.mutated_tensors:
            self._mark_overwritten(x)
        if self.tracked_outputs:
            self._follow_outputs(call, out)
        if not call.weights or packet in SHAPE_ONLY_OPS:
            self.remaining_idle_ops -= 1
            if self.remaining_idle_ops < 0:
                for candidate in self.candidates:
                    candidate.stop()
            elif isinstance(out, Tensor) and (
                packet in RANDOM_OPS or (call.tensors and all(id(x) in self.random_tensors for x in call.tensors))
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
        """Mark all tensors that share memory with a mutated one as changed."""
        storage_id = get_storage_id(x)
        for candidate in self.candidates:
            candidate.is_overwritten |= get_storage_id(candidate.scores) == storage_id
        for key, tracked in list(self.tracked_weights.items()):
            if tracked.is_unchanged and get_storage_id(tracked.tensor) == storage_id:
                self.tracked_weights[key] = replace(tracked, is_unchanged=False)

    def _add_weights(self, weights: TrackedWeights) -> None:
        self.tracked_weights[id(weights.tensor)] = weights

    def _track_outputs(self, call: _OperatorCall, out: Any) -> None:
        """Record which outputs of an operation hold weights."""
        outputs = collect_tensors([out])
        without_dropout: Sequence[Tensor | None] = self._recompute_without_dropout(call) or [None] * len(outputs)
        for index, (output, before_dropout) in enumerate(zip(outputs, without_dropout, strict=True)):
            if call.is_random and index:  # the mask of a dropout
                self.random_tensors[id(output)] = output
                continue
            weights = self._derive_weights(call, output)
            if weights is not None:
                self._add_weights(
                    weights if before_dropout is None else replace(weights, before_dropout=before_dropout)
                )

    def _recompute_without_dropout(self, call: _OperatorCall) -> list[Tensor] | None:
        """Return the outputs for the weights before dropout, or None if there was no dropout."""
        if call.is_random or all(tracked.before_dropout is None for tracked in call.weights):
            return None

        def replace_dropped(x: Any) -> Any:
            tracked = self.tracked_weights.get(id(x)) if isinstance(x, Tensor) else None
            if tracked is None or tracked.before_dropout is None:
                return x
            return tracked.before_dropout.clone() if call.mutated_tensors else tracked.before_dropout

        args, kwargs = pytree.tree_map(replace_dropped, (call.args, call.kwargs))
        return collect_tensors([call.op(*args, **kwargs)])

    def _derive_weights(self, call: _OperatorCall, out: Tensor) -> TrackedWeights | None:
        """Return the weights that one output of an operation holds, or None."""
        packet, weights = call.op.overloadpacket, call.weights[0]
        if weights.lost_reason is not None:
            is_whole = out.numel() >= weights.tensor.numel()  # larger: it is repeated
            return replace(weights, tensor=out, owners=call.owners) if is_whole else None
        if not call.mutated_tensors and get_storage_id(out) == get_storage_id(weights.tensor):
            return weights.track_view(out)
        if out.shape == weights.tensor.shape:
            if packet in COPY_OPS or (packet is aten.copy_ and call.tensors[0] is not weights.tensor):
                return replace(weights, tensor=out)
            if call.is_random:
                saved = call.saved_weights.get(id(weights.tensor), weights.tensor)
                return replace(
                    weights,
                    tensor=out,
                    before_dropout=saved if weights.before_dropout is None else weights.before_dropout,
                )
            derived = derive_axes(weights.labels, out.shape)
            if derived is not None and weights.values is None:
                return TrackedWeights(out, derived[1], derived[0], call.owners, is_unchanged=False)
        elif packet is aten.mul and weights.values is None and len(call.weights) == 1:
            other = next(x for x in call.tensors if x is not weights.tensor)
            labels = ((),) * (out.dim() - weights.tensor.dim()) + weights.labels
            products = replace(weights, tensor=out, labels=labels, values=other.expand(out.shape), factor=weights)
            if not weights.key_axes:  # a single key is not summed
                self._record_sum(products, set())
            return products
        if out.numel() < weights.tensor.numel() and packet not in (aten.mean, aten.slice, aten.index):
            return None
        return replace(
            weights, tensor=out, lost_reason=f"its weights go through {packet.__name__}, which is not tracked"
        )

    # ----------------------------------------------------------------------------------- products

    def _process_product(self, call: _OperatorCall, out: Tensor) -> None:
        start = PRODUCT_OPS[call.op.overloadpacket]
        factors = call.args[start : start + 2]
        tracked_factors = [
            (side, weights)
            for side, x in enumerate(factors)
            if (weights := self.tracked_weights.get(id(x))) and weights.is_live
        ]
        if not tracked_factors or tracked_factors[0][1].values is not None:
            return
        side, weights = tracked_factors[0]
        if len(tracked_factors) > 1:
            reason = "its weights are multiplied with weights"
            self._add_weights(replace(weights, tensor=out, owners=call.owners, lost_reason=reason))
            return
        if weights.lost_reason is not None:
            _stop_owners(weights, weights.lost_reason)
            return
        *batch, last = [list_leaf_axes(label) for label in weights.labels]
        second_last = batch.pop() if batch else []
        inner_axes, outer_axes = (last, second_last) if side == 0 or len(weights.labels) == 1 else (second_last, last)
        if inner_axes == weights.key_axes:
            other = factors[1 - side]
            value_width = 1 if other.dim() == 1 else other.shape[-1 if side == 0 else -2]
            self._record_value_product(
                weights,
                set(list_leaf_axes(batch[0]) if batch else []),
                set(outer_axes),
                other,
                value_width,
                side,
            )
            if len(batch) == 1 and len(batch[0]) == 1 and not weights.is_partial:
                self._track_output(weights.owners[0], out, -1 if side == 0 else -2)
        elif any(axis.is_key for axis in inner_axes):
            _stop_owners(weights, JOINT_SUM_REASON)
        elif out.dim() == len(weights.labels):  # heads are mixed
            mixed_axes = (WeightAxis(out.shape[-1 if side == 0 else -2]),)
            pair = (tuple(outer_axes), mixed_axes) if side == 0 else (mixed_axes, tuple(outer_axes))
            derived = derive_axes((*(tuple(label) for label in batch), *pair), out.shape)
            assert derived is not None
            without_dropout = self._recompute_without_dropout(call)
            self._add_weights(
                TrackedWeights(
                    out,
                    derived[1],
                    derived[0],
                    weights.owners,
                    is_unchanged=False,
                    before_dropout=without_dropout[0] if without_dropout else None,
                )
            )

    def _track_output(self, candidate: SoftmaxCandidate, out: Tensor, value_dim: int) -> None:
        """Track the output of a product of matrices in a batch, whose width of values is ``value_dim``."""
        axes = [WeightAxis(size) for size in out.shape]
        candidate.flat_axis, candidate.is_output_tracked = axes[0], True
        labels = tuple((axis,) if axis.size > 1 else () for axis in axes)
        self.tracked_outputs[id(out)] = TrackedOutput(out, labels, axes[value_dim], candidate)

    def _follow_outputs(self, call: _OperatorCall, out: Any) -> None:
        """Track what an operation makes of outputs, until it is known how their first axis is divided."""
        for x in call.tensors:
            source = self.tracked_outputs.get(id(x))
            if source is None or not source.candidate.is_output_tracked:
                continue
            for result in collect_tensors([out]):
                if get_storage_id(result) == get_storage_id(x):
                    labels = derive_view_labels(source.labels, x, result)
                else:
                    labels = source.labels if result.shape == x.shape else None
                if labels is not None:
                    self.tracked_outputs[id(result)] = output = replace(source, tensor=result, labels=labels)
                    _find_division(output)

    def _process_sum(self, call: _OperatorCall) -> None:
        """Process a sum of weights · values."""
        weights = call.weights[0]
        num_dims = weights.tensor.dim()
        dims = call.args[1] if len(call.args) > 1 and call.args[1] is not None else range(num_dims)
        dims = {dim % num_dims for dim in dims}
        inner_axes = [leaf for dim in sorted(dims) for leaf in list_leaf_axes(weights.labels[dim])]
        if inner_axes != weights.key_axes or not inner_axes:
            if any(axis.is_key for axis in inner_axes):
                _stop_owners(weights, JOINT_SUM_REASON)
            return
        self._record_sum(weights, dims)

    def _record_sum(self, weights: TrackedWeights, key_dims: set[int]) -> None:
        """Record a sum of weights · values over the keys, whose dimensions are ``key_dims``."""
        assert weights.values is not None
        assert weights.factor is not None
        query_axes: set[WeightAxis] = set()
        batch_axes: set[WeightAxis] = set()
        value_width = 1
        for dim in set(range(weights.tensor.dim())) - key_dims:
            label = list_leaf_axes(weights.labels[dim])
            (query_axes if weights.values.stride(dim) == 0 else batch_axes).update(label)
            value_width *= 1 if label else weights.tensor.shape[dim]
        self._record_value_product(weights.factor, batch_axes, query_axes, weights.values, value_width)

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
        product = ValueProduct(
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
        if source.is_inference():  # no version counter shows whether it is overwritten
            if tracked.is_unchanged and owner.has_scores:
                owner.scores = owner.scores.detach().clone()
            else:
                product = replace(product, weights=product.weights.clone())
        owner.value_products.append(product)
        if not tracked.is_partial:
            owner.stop()


def get_autocast(device_type: str) -> tuple[str, torch.dtype] | None:
    """Return the device type and the type of the autocast that is enabled, or None."""
    is_enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return (device_type, torch.get_autocast_dtype(device_type)) if is_enabled else None


def restore_autocast(op: Any, autocast: tuple[str, torch.dtype] | None) -> Any:
    """Return the autocast context of the caller, for operations that autocast does not handle."""
    key = None if autocast is None else AUTOCAST_KEYS.get(autocast[0])
    if autocast is None or key is None or op.has_kernel_for_dispatch_key(key):
        return nullcontext()
    return torch.autocast(*autocast)


def _find_division(output: TrackedOutput) -> None:
    """Record how the axis of batch and heads is divided, if this output shows it."""
    candidate, flat_axis = output.candidate, output.candidate.flat_axis
    assert flat_axis is not None
    for label, size in zip(output.labels, output.tensor.shape, strict=True):
        if label == (flat_axis,) and 1 < size < flat_axis.size and flat_axis.size % size == 0:  # a piece for each head
            candidate.head_axis, _ = flat_axis.split(size)
            candidate.is_output_tracked = False
            return
    leaves, head_axis = flat_axis.list_leaves(), output.find_head_axis()
    if head_axis in leaves:
        candidate.head_axis = head_axis
    if len(leaves) > 1 and (head_axis in leaves or len({axis.size for axis in leaves}) > 1):
        candidate.is_output_tracked = False


def collect_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments or results, also those in lists."""
    flattened = (x for value in values for x in (value if isinstance(value, list | tuple) else (value,)))
    return [x for x in flattened if isinstance(x, Tensor)]


def find_mutated(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    if not op._schema.is_mutable:
        return []
    declared = op._schema.arguments
    values = dict(zip((argument.name for argument in declared), args, strict=False)) | kwargs
    mutated = (
        values.get(argument.name) for argument in declared if argument.alias_info and argument.alias_info.is_write
    )
    return [x for x in mutated if isinstance(x, Tensor)]


def _merge_candidates(owners: Iterable[SoftmaxCandidate]) -> None:
    for owner in owners:
        owner.is_merged = True
        owner.stop()


def _stop_owners(weights: TrackedWeights, reason: str) -> None:
    for owner in weights.owners:
        owner.stop(reason)


class _ThreadTracker(threading.local):
    """The tracker of each thread, which has its own stack of modes."""

    def __init__(self) -> None:
        self.tracker = WeightTracker()


_THREAD_TRACKER = _ThreadTracker()


def get_tracker() -> WeightTracker:
    """Return the tracker of this thread."""
    return _THREAD_TRACKER.tracker


def count_other_modes() -> int:
    """Return the number of other dispatch modes that are active in this thread."""
    return int(torch._C._len_torch_dispatch_stack()) - get_tracker().is_active
