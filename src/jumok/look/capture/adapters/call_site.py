"""The interface between adapters and observers: adapters report calls, whoever observes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jumok.attention.caching import is_capturing_cuda_graph, is_tracing
from jumok.errors import InputError
from jumok.look.capture.adapters.module_stack import ModuleFrame, ModuleStack
from jumok.look.capture.adapters.softmax_analysis import TrackedSoftmax, analyze_softmaxes
from jumok.look.capture.adapters.softmax_candidates import SoftmaxCandidate
from jumok.look.capture.adapters.weight_tracker import count_other_modes
from jumok.look.capture.captured_attention import CapturedAttention


class ObservedCall(NamedTuple):
    """One attention call, as captured by an adapter."""

    attention: CapturedAttention
    kind: str | None = None  # "self", "cross" or "channel", if the call determines it
    sink: Tensor | None = None  # (H,) a score in the softmax of every row that belongs to no key
    score_tensors: tuple[Tensor, ...] = ()  # read by ``attention.score_function`` beside queries and keys
    is_bhqk: bool = True  # if scores were modified: their axes are known to be (B, H, Q, K)


class GenerateResult(NamedTuple):
    """The return value of ``generate``."""

    output: Any  # the sequences, or an object that contains them
    batch_size: int  # the number of prompts
    includes_prompt: bool  # whether sequences are known to begin with the tokens of the first forward


class FusedLayerInputs(NamedTuple):
    """The inputs of a fused layer that an observer can modify."""

    blocked_mask: Tensor | None  # bool, broadcasts to (B, H, Q, K)
    output_weight: Tensor  # (width, H · D): the weight of the output projection


class Observer:
    """Base class of observers, which capture or modify the attention of a model. It does neither."""

    def __init__(self, model: nn.Module) -> None:
        self.module_stack = ModuleStack(model)
        self.is_generating = False  # whether ``generate`` is running
        # Whether that is a single search, not a method of the model that runs several.
        self.is_single_search = True

    def on_generation_start(self) -> None:
        """Called before the first forward of a generation."""

    def on_generate_return(self, result: GenerateResult) -> None:
        """Called when ``generate`` returns: the outermost call or one nested in it."""

    def on_generation_end(self, finished: bool) -> None:
        """Called when the outermost ``generate`` has returned or raised an exception."""

    def on_cache_reorder(self, beam_indices: Tensor) -> None:
        """Row ``i`` of the next forward of a generation continues row ``beam_indices[i]`` of the last one."""

    def on_module_enter(self, module: nn.Module, name: str, args: Any) -> None:
        """Called before a module runs, with its arguments."""

    def on_module_exit(self, frame: ModuleFrame) -> None:
        """Called after a module has run."""
        for name, result in analyze_softmaxes(frame, self.module_stack.current_frame):
            if isinstance(result, str):
                frame.is_reported = True
                self.on_missed_attention(name, result)
            else:
                frame.has_attention = True
                self.on_attention(name, ObservedCall(result.attention, result.kind, is_bhqk=result.is_bhqk))

    def on_attention(self, name: str, call: ObservedCall) -> None:
        """Called for each captured attention."""

    def on_missed_attention(self, name: str, reason: str) -> None:
        """Called for each attention that cannot be captured."""

    def modify_attention(self, name: str, attention: CapturedAttention) -> CapturedAttention:
        """Return the attention after this observer's modifications."""
        return attention

    def modify_output(self, name: str, attention: CapturedAttention, value: Tensor | None, out: Tensor) -> Tensor:
        """Return the modified output ``(B, H, Q, Dv)`` of values ``(B, G, K, Dv)``; None: weights only."""
        return out

    def modifies(self, name: str) -> bool:
        """Return whether this observer modifies the attention of this name."""
        return False

    def modify_scores(self, name: str, scores: Tensor) -> Tensor:
        """Return the modified scores ``(B, H, Q, K)``, the input of a softmax."""
        return scores

    def modify_weights(self, name: str, weights: Tensor) -> Tensor:
        """Return the modified weights ``(B, H, Q, K)``, the output of a softmax."""
        return weights

    def modify_fused_inputs(
        self, name: str, inputs: FusedLayerInputs, attention: CapturedAttention
    ) -> FusedLayerInputs:
        """Return the modified inputs of a fused layer."""
        return inputs


# Observers of this thread or task. Others that run the same model at the same time are not observed.
OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("jumok.look.observers", default=())
# Whether an outer adapter reports this call. True: entirely; False: the inner one makes modifications.
_SUPPRESSED: ContextVar[bool | None] = ContextVar("jumok.look.suppressed", default=None)
# Hints of an outer adapter: queries and keys before they were rearranged for grouped queries, and the kind.
_QUERY_HINT: ContextVar[Tensor | None] = ContextVar("jumok.look.query", default=None)
_KEYS_HINT: ContextVar[Tensor | None] = ContextVar("jumok.look.keys", default=None)
_KIND_HINT: ContextVar[str | None] = ContextVar("jumok.look.kind", default=None)


class CallSite:
    """An attention call of an observed model."""

    def __init__(self, observers: list[Observer], module: nn.Module | None) -> None:
        self.observers = [(observer, observer.module_stack.find_name(module)) for observer in observers]
        self.frames = [observer.module_stack.frames[-1] for observer in observers]

    @property
    def module(self) -> nn.Module:
        """The module that is running."""
        return self.frames[0].module

    @property
    def is_modified(self) -> bool:
        """Whether any observer modifies this call."""
        return any(observer.modifies(name) for observer, name in self.observers)

    @property
    def owner(self) -> nn.Module:
        """The module that the call is named after, usually the one that is running."""
        observer, name = self.observers[0]
        return observer.module_stack.get_module(name)

    @property
    def is_in_dispatch_mode(self) -> bool:
        """Whether the model itself has entered a dispatch mode."""
        return any(
            count_other_modes() > observer.module_stack.frames[0].num_dispatch_modes for observer, _ in self.observers
        )

    def try_capture(self, build: Callable[[], CapturedAttention]) -> CapturedAttention | None:
        """Return the captured attention, or None, with a report, if the call has an unsupported form."""
        try:
            return build()
        except (InputError, RuntimeError, IndexError) as error:
            self.report_missed(f"it is called in an unusual form ({error})")
            return None

    def report(
        self,
        attention: CapturedAttention,
        kind: str | None = None,
        sink: Tensor | None = None,
        score_tensors: tuple[Tensor, ...] = (),
    ) -> None:
        """Report an attention."""
        if _SUPPRESSED.get() is not None:
            return
        keys = _KEYS_HINT.get()
        if keys is not None and keys.shape[1] < attention.key.shape[1]:
            attention = replace(attention, key=keys[:, :, : attention.key.shape[2]])
        call = ObservedCall(self.modify_attention(attention), kind or _KIND_HINT.get(), sink, score_tensors)
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

    def modify_attention(self, attention: CapturedAttention) -> CapturedAttention:
        """Return the attention after all modifications."""
        for observer, name in self.observers:
            attention = observer.modify_attention(name, attention)
        return attention

    def report_missed(self, reason: str) -> None:
        """Report an attention that cannot be captured."""
        if _SUPPRESSED.get() is None:
            for frame, (observer, name) in zip(self.frames, self.observers, strict=True):
                frame.is_reported = True
                observer.on_missed_attention(name, reason)

    def report_softmax(self, candidate: SoftmaxCandidate, is_product: bool) -> None:
        """Report a softmax that may be an attention, which depends on the use of its weights."""
        for frame, (_, name) in zip(self.frames, self.observers, strict=True):
            frame.softmaxes.append(TrackedSoftmax(candidate, name, is_product, self.modify_attention, [frame]))

    def modify_output(self, attention: CapturedAttention, value: Tensor | None, out: Tensor) -> Tensor:
        for observer, name in self.observers:
            out = observer.modify_output(name, attention, value, out)
        return out

    def modify_scores(self, scores: Tensor) -> Tensor:
        for observer, name in self.observers:
            scores = observer.modify_scores(name, scores)
        return scores

    def modify_weights(self, weights: Tensor) -> Tensor:
        for observer, name in self.observers:
            weights = observer.modify_weights(name, weights)
        return weights

    def modify_fused_inputs(self, inputs: FusedLayerInputs, attention: CapturedAttention) -> FusedLayerInputs:
        for observer, name in self.observers:
            inputs = observer.modify_fused_inputs(name, inputs, attention)
        return inputs


def get_call_site(module: nn.Module | None = None) -> CallSite | None:
    """Return the site of the current call; None if nothing observes it. ``module``: the caller, if known."""
    if torch.compiler.is_compiling():  # first, so that dynamo reads no further
        return None
    observers = [observer for observer in OBSERVERS.get() if observer.module_stack.frames]
    is_recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint, in the backward pass
    if not observers or _SUPPRESSED.get() or is_recomputed or is_tracing():
        return None
    site = CallSite(observers, module)
    if is_capturing_cuda_graph():
        site.report_missed("it was captured into a CUDA graph, which runs without Python: run it without the graph")
        return None
    if torch._C._are_functorch_transforms_active():
        site.report_missed("it ran inside a transform of torch.func (vmap, grad, …): run the model by itself")
        return None
    return site


def are_reports_suppressed() -> bool:
    """Return whether an outer adapter reports the current call."""
    return _SUPPRESSED.get() is not None


@contextmanager
def suppress_reports(entirely: bool) -> Iterator[None]:
    """Do not report inner calls: ``entirely``, or except for the modifications to be made to them."""
    token = _SUPPRESSED.set(entirely)
    try:
        yield
    finally:
        _SUPPRESSED.reset(token)


def get_query_hint() -> Tensor | None:
    """Return the queries ``(B, H, Q, D)`` of the current call, as an outer adapter knows them."""
    return _QUERY_HINT.get()


@contextmanager
def provide_call_hints(
    query: Tensor | None = None, keys: Tensor | None = None, kind: str | None = None
) -> Iterator[None]:
    """Provide inner calls with queries and keys before they are rearranged for grouped queries, and the kind."""
    tokens = _QUERY_HINT.set(query), _KEYS_HINT.set(keys), _KIND_HINT.set(kind)
    try:
        yield
    finally:
        _QUERY_HINT.reset(tokens[0])
        _KEYS_HINT.reset(tokens[1])
        _KIND_HINT.reset(tokens[2])
