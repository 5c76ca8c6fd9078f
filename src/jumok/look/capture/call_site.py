"""Call sites: where a model calls attention, and where adapters report the call to its observers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from jumok.attention.caching import is_capturing_cuda_graph, is_tracing
from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.observer import OBSERVERS, FusedLayerInputs, ObservedCall, Observer
from jumok.look.capture.patching import Function
from jumok.look.capture.weight_tracking.softmax_analysis import TrackedSoftmax
from jumok.look.capture.weight_tracking.softmax_candidates import SoftmaxCandidate
from jumok.look.capture.weight_tracking.weight_tracker import count_other_modes

T = TypeVar("T")


class UnsupportedCallError(Exception):
    """An adapter cannot capture a call; the message is the reason that users see."""


class CallHints(NamedTuple):
    """What an outer adapter knows about the kernels that it calls."""

    query: Tensor | None = None  # (B, H, Q, D) as the model passed it
    key: Tensor | None = None  # (B, G, K, D) before it was repeated for all heads
    kind: str | None = None
    module: nn.Module | None = None  # the attention


_NO_HINTS = CallHints()
_HINTS: ContextVar[CallHints] = ContextVar("jumok.look.hints", default=_NO_HINTS)
# Whether an outer adapter reports this call. True: entirely; False: the inner one makes modifications.
_SUPPRESSED: ContextVar[bool | None] = ContextVar("jumok.look.suppressed", default=None)


class CallSite:
    """A place in an observed model that calls attention now."""

    def __init__(self, observers: list[Observer], module: nn.Module | None) -> None:
        self.observers = [(observer, observer.module_stack.find_name(module)) for observer in observers]
        self.frames = [observer.module_stack.frames[-1] for observer in observers]

    @property
    def module(self) -> nn.Module:
        """The module that is running."""
        return self.frames[0].module

    @property
    def owner(self) -> nn.Module:
        """The module that the call is named after, usually the one that is running."""
        observer, name = self.observers[0]
        return observer.module_stack.get_module(name)

    @property
    def is_modified(self) -> bool:
        """Whether any observer modifies this call."""
        return any(observer.modifies(name) for observer, name in self.observers)

    @property
    def is_in_dispatch_mode(self) -> bool:
        """Whether the model itself has entered a dispatch mode."""
        return any(
            count_other_modes() > observer.module_stack.frames[0].num_dispatch_modes for observer, _ in self.observers
        )

    # ---------------------------------------------------------------------------------- reports

    def read_call(self, read: Callable[[], ObservedCall]) -> ObservedCall | None:
        """Return the call that ``read`` returns. If it has an unsupported form, report that and return None."""
        try:
            return _apply_hints(read(), _HINTS.get())
        except UnsupportedCallError as error:
            self.report_missed(str(error))
        except (InputError, RuntimeError, IndexError, TypeError) as error:
            self.report_missed(f"it is called in an unusual form ({error})")
        return None

    def report(self, call: ObservedCall) -> None:
        """Report an attention."""
        if _SUPPRESSED.get() is None:
            call = call._replace(attention=self.modify_attention(call.attention), kind=call.kind or _HINTS.get().kind)
            for frame, (observer, name) in zip(self.frames, self.observers, strict=True):
                frame.has_attention = True
                observer.on_attention(name, call)

    def report_weights(self, call: ObservedCall, weights: Tensor) -> None:
        """Report computed weights. They are an attention if they are used unchanged."""
        if _SUPPRESSED.get() is None:
            call = call._replace(attention=self.modify_attention(call.attention))
            for frame, (_, name) in zip(self.frames, self.observers, strict=True):
                frame.has_attention = True
                frame.pending_weights.append((name, call, weights))

    def report_mix(self, weights: Tensor) -> bool:
        """Report a product with weights. Returns whether they are the last computed ones, unchanged."""
        is_same = False
        for frame, (observer, _) in zip(self.frames, self.observers, strict=True):
            if frame.pending_weights:
                name, call, computed = frame.pending_weights.pop()
                is_same = computed.data_ptr() == weights.data_ptr() and computed.numel() == weights.numel()
                if is_same:  # in another shape, perhaps
                    observer.on_attention(name, call)
        return is_same

    def report_missed(self, reason: str) -> None:
        """Report an attention that cannot be captured."""
        if _SUPPRESSED.get() is None:
            for frame, (observer, name) in zip(self.frames, self.observers, strict=True):
                frame.is_reported = True
                observer.on_missed_attention(name, reason)

    def report_excluded(self) -> bool:
        """Report that the call was not read, if no observer wants it. Returns whether that is so."""
        if any(observer.includes(name) for observer, name in self.observers):
            return False
        for frame, (observer, name) in zip(self.frames, self.observers, strict=True):
            frame.has_attention = True
            observer.on_excluded_attention(name)
        return True

    def report_softmax(self, candidate: SoftmaxCandidate, is_product: bool) -> None:
        """Report a softmax that may be an attention, which depends on the use of its weights."""
        for frame, (_, name) in zip(self.frames, self.observers, strict=True):
            frame.softmaxes.append(TrackedSoftmax(candidate, name, is_product, self.modify_attention, [frame]))

    # ---------------------------------------------------------------------------- modifications

    def modify_result(self, call: ObservedCall, result: Any) -> Any:
        """Return the result of a kernel after all modifications: its output, or a tuple that begins with it."""
        out, *others = result if isinstance(result, tuple) else (result,)
        if out.is_nested:
            return result
        out_4d = call.read_output(out)
        modified = out_4d
        for observer, name in self.observers:
            modified = observer.modify_output(name, call.attention, call.value, modified)
        if modified is out_4d:
            return result
        out = call.write_output(modified, out)
        return (out, *others) if isinstance(result, tuple) else out

    def modify_attention(self, attention: CapturedAttention) -> CapturedAttention:
        """Return the attention after all modifications."""
        for observer, name in self.observers:
            attention = observer.modify_attention(name, attention)
        return attention

    def run_softmax(self, softmax: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
        """Return the weights of scores ``(B, H, Q, K)`` after all modifications."""
        for observer, name in self.observers:
            softmax = functools.partial(observer.run_softmax, name, softmax)
        return softmax(scores)

    def modify_fused_inputs(self, inputs: FusedLayerInputs, attention: CapturedAttention) -> FusedLayerInputs:
        """Return the inputs of a fused layer after all modifications."""
        for observer, name in self.observers:
            inputs = observer.modify_fused_inputs(name, inputs, attention)
        return inputs


def get_call_site(module: nn.Module | None = None) -> CallSite | None:
    """Return the site of the current call; None if nothing observes it. ``module``: the caller, if known."""
    if not is_observing():  # first, so that dynamo reads no further
        return None
    observers = [observer for observer in OBSERVERS.get() if observer.module_stack.frames]
    is_recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint, in the backward pass
    if not observers or _SUPPRESSED.get() or is_recomputed or is_tracing():
        return None
    module = _HINTS.get().module if module is None else module
    if module is None and _is_unnamed(observers):
        return None
    site = CallSite(observers, module)
    if is_capturing_cuda_graph():
        site.report_missed("it was captured into a CUDA graph, which runs without Python: run it without the graph")
        return None
    if torch._C._are_functorch_transforms_active():
        site.report_missed("it ran inside a transform of torch.func (vmap, grad, …): run the model by itself")
        return None
    return site


def _is_unnamed(observers: list[Observer]) -> bool:
    """Return whether an observer does not track the module that is running, after which the call is named."""
    is_unnamed = False
    for observer in observers:
        stack = observer.module_stack
        stack.needs_all = True
        if not stack.is_complete:
            is_unnamed = True
            observer.on_missed_attention(
                stack.frames[-1].name, "a later step of the generation attends in another way than the first"
            )
    return is_unnamed


def is_observing() -> bool:
    """Return whether this thread has observers, and is not compiling."""
    return not torch.compiler.is_compiling() and bool(OBSERVERS.get())


def wrap_kernel(
    kernel: Function,
    read_call: Callable[..., ObservedCall],
    run_within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Function:
    """Return a function that runs an attention kernel and reports the call.

    Args:
        kernel: Returns the output of the attention, or a tuple that begins with it.
        read_call: Gets the result of the kernel, then the kernel's arguments. It may raise
            :class:`UnsupportedCallError`.
        run_within: Returns a context in which observed calls run.
    """

    def watched_kernel(*args: Any, **options: Any) -> Any:
        site = get_call_site()
        if site is None:
            return kernel(*args, **options)
        with run_within(), suppress_reports(entirely=True):
            result = kernel(*args, **options)
        call = site.read_call(lambda: read_call(result, *args, **options))
        if call is None:
            return result
        result = site.modify_result(call, result)
        site.report(call)
        return result

    return watched_kernel


def are_reports_suppressed() -> bool:
    """Return whether an outer adapter reports the current call."""
    return _SUPPRESSED.get() is not None


def suppress_reports(entirely: bool) -> AbstractContextManager[None]:
    """Do not report inner calls: ``entirely``, or except for the modifications to be made to them."""
    return set_variable(_SUPPRESSED, entirely)


def provide_hints(hints: CallHints) -> AbstractContextManager[None]:
    """Provide inner calls with what is known about them."""
    return set_variable(_HINTS, hints)


@contextmanager
def set_variable(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside the with block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _apply_hints(call: ObservedCall, hints: CallHints) -> ObservedCall:
    """Return the call with the heads and keys that the model passed to the outer adapter."""
    attention = call.attention
    batch, heads, queries, num_keys = attention.shape
    if hints.query is not None and queries > 1 and hints.query.shape[1:3] == (heads * queries, 1):
        # Transformers computes a single query of the heads that share a key head as queries of one head.
        query, mask, lse, num_heads = attention.query, attention.mask, attention.lse, heads * queries
        if query.data_ptr() != hints.query.data_ptr() and query.dtype == hints.query.dtype:  # autocast copies it
            raise UnsupportedCallError("its heads were rearranged before the kernel")
        query = query.reshape(batch, num_heads, 1, query.shape[3])
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask.reshape(len(mask), num_heads, 1, mask.shape[3])
        lse = None if lse is None else lse.reshape(batch, num_heads, 1)
        attention = replace(attention, query=query, mask=mask, lse=lse)
    if hints.key is not None and hints.key.shape[1] < attention.key.shape[1]:
        attention = replace(attention, key=hints.key[:, :, :num_keys])
    return call._replace(attention=attention)
