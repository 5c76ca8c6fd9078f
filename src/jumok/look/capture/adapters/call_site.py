"""Where adapters and those who look meet: an adapter tells what it saw, and does not know who listens."""

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
    """One attention call, as an adapter saw it."""

    attention: CapturedAttention
    kind: str | None = None  # "self", "cross" or "channel", where the call says so
    sink: Tensor | None = None  # (H,) a score in every row's softmax that belongs to no key
    score_tensors: tuple[Tensor, ...] = ()  # what ``attention.score`` reads beside queries and keys
    is_bhqk: bool = True  # if scores were changed: their axes are indeed (B, H, Q, K)


class GenerateResult(NamedTuple):
    """What ``generate`` returned."""

    output: Any  # the sequences, or an object that has them
    batch_size: int  # the number of prompts
    includes_prompt: bool  # whether sequences are known to begin with the tokens of the first forward


class FusedLayerInputs(NamedTuple):
    """What can be changed of a layer that is one fused operation."""

    blocked_mask: Tensor | None  # bool, broadcasts to (B, H, Q, K)
    output_weight: Tensor  # (width, H · D): the weight of the output projection


class Observer:
    """Somebody who looks at a model, or changes what it attends to. This one does neither."""

    def __init__(self, model: nn.Module) -> None:
        self.module_stack = ModuleStack(model)
        self.is_generating = False  # whether the model is in ``generate``
        self.is_single_search = (
            True  # whether that is one search, not a function of the model that runs several
        )

    def on_generation_start(self) -> None:
        """The forwards that follow are steps of one generation."""

    def on_generate_return(self, result: GenerateResult) -> None:
        """A ``generate`` returned: the outermost one, or one that it called."""

    def on_generation_end(self, finished: bool) -> None:
        """The outermost ``generate`` returned, or raised an exception."""

    def on_cache_reorder(self, beam_indices: Tensor) -> None:
        """In a generation, row ``i`` of the next forward goes on from row ``beam_indices[i]`` of the last."""

    def on_module_enter(self, module: nn.Module, name: str, args: Any) -> None:
        """A module begins, with these arguments."""

    def on_module_exit(self, frame: ModuleFrame) -> None:
        """A module has ended."""
        for name, found in analyze_softmaxes(frame, self.module_stack.current_frame):
            if isinstance(found, str):
                frame.is_reported = True
                self.on_missed_attention(name, found)
            else:
                frame.has_attention = True
                self.on_attention(name, ObservedCall(found.attention, found.kind, is_bhqk=found.is_bhqk))

    def on_attention(self, name: str, call: ObservedCall) -> None:
        """There was an attention."""

    def on_missed_attention(self, name: str, reason: str) -> None:
        """There was one that cannot be seen."""

    def modify_attention(self, name: str, attention: CapturedAttention) -> CapturedAttention:
        """The attention after what this listener changes about it."""
        return attention

    def modify_output(
        self, name: str, attention: CapturedAttention, value: Tensor | None, out: Tensor
    ) -> Tensor:
        """Likewise its output ``(B, H, Q, Dv)``, of values ``(B, G, K, Dv)``; None: of weights alone."""
        return out

    def modifies(self, name: str) -> bool:
        """Whether it changes something about the attention of this name."""
        return False

    def modify_scores(self, name: str, scores: Tensor) -> Tensor:
        """Likewise scores ``(B, H, Q, K)`` on their way to a softmax."""
        return scores

    def modify_weights(self, name: str, weights: Tensor) -> Tensor:
        """Likewise the weights ``(B, H, Q, K)`` that come out of it."""
        return weights

    def modify_fused_inputs(
        self, name: str, inputs: FusedLayerInputs, attention: CapturedAttention
    ) -> FusedLayerInputs:
        """Likewise what goes into a fused layer."""
        return inputs


# Those of this thread, or task: whoever else runs the same model meanwhile is not looked at.
OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("jumok.look.listeners", default=())
# Whether an adapter further out tells of what goes on. True: of all of it; False: but changes are made here.
_SUPPRESSED: ContextVar[bool | None] = ContextVar("jumok.look.told", default=None)
# What an adapter further out knows: the keys before they were repeated for grouped queries, and the kind.
_KEYS_HINT: ContextVar[Tensor | None] = ContextVar("jumok.look.keys", default=None)
_KIND_HINT: ContextVar[str | None] = ContextVar("jumok.look.kind", default=None)


class CallSite:
    """An attention call of a model that is looked at."""

    def __init__(self, observers: list[Observer], module: nn.Module | None) -> None:
        self.observers = [(one, one.module_stack.find_name(module)) for one in observers]
        self.frames = [one.module_stack.frames[-1] for one in observers]

    @property
    def module(self) -> nn.Module:
        """The module that is running."""
        return self.frames[0].module

    @property
    def is_modified(self) -> bool:
        """Whether anybody changes something about it."""
        return any(one.modifies(name) for one, name in self.observers)

    @property
    def owner(self) -> nn.Module:
        """The module that the call is named after; mostly the same."""
        one, name = self.observers[0]
        return one.module_stack.get_module(name)

    @property
    def is_in_dispatch_mode(self) -> bool:
        """Whether the model itself has entered a dispatch mode."""
        return any(
            count_other_modes() > one.module_stack.frames[0].num_dispatch_modes for one, _ in self.observers
        )

    def try_capture(self, build: Callable[[], CapturedAttention]) -> CapturedAttention | None:
        """What is made, or None: of a call in a form that was not thought of, nothing worse shall come."""
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
        """Tell of an attention."""
        if _SUPPRESSED.get() is not None:
            return
        keys = _KEYS_HINT.get()
        if keys is not None and keys.shape[1] < attention.key.shape[1]:
            attention = replace(attention, key=keys[:, :, : attention.key.shape[2]])
        found = ObservedCall(self.modify_attention(attention), kind or _KIND_HINT.get(), sink, score_tensors)
        for frame, (one, name) in zip(self.frames, self.observers, strict=True):
            frame.has_attention = True
            one.on_attention(name, found)

    def report_weights(self, call: ObservedCall, weights: Tensor) -> None:
        """Tell of weights that were computed: the attention, if they are used as they are."""
        if _SUPPRESSED.get() is None:
            call = call._replace(attention=self.modify_attention(call.attention))
            for frame, (_, name) in zip(self.frames, self.observers, strict=True):
                frame.has_attention = True
                frame.pending_weights.append((name, call, weights))

    def report_mix(self, weights: Tensor) -> bool:
        """Something is mixed by these weights: whether they are the last that were computed, as they were."""
        same = False
        for frame, (one, _) in zip(self.frames, self.observers, strict=True):
            if frame.pending_weights:
                name, found, computed = frame.pending_weights.pop()
                same = computed.data_ptr() == weights.data_ptr() and computed.numel() == weights.numel()
                if same:  # in another shape, perhaps
                    one.on_attention(name, found)
        return same

    def modify_attention(self, attention: CapturedAttention) -> CapturedAttention:
        """The attention after all changes to it."""
        for one, name in self.observers:
            attention = one.modify_attention(name, attention)
        return attention

    def report_missed(self, reason: str) -> None:
        """Tell of one that cannot be seen."""
        if _SUPPRESSED.get() is None:
            for frame, (one, name) in zip(self.frames, self.observers, strict=True):
                frame.is_reported = True
                one.on_missed_attention(name, reason)

    def report_softmax(self, candidate: SoftmaxCandidate, is_product: bool) -> None:
        """Tell of a softmax that may be one: that shows when its weights are used."""
        for frame, (_, name) in zip(self.frames, self.observers, strict=True):
            frame.softmaxes.append(
                TrackedSoftmax(candidate, name, is_product, self.modify_attention, [frame])
            )

    def modify_output(self, attention: CapturedAttention, value: Tensor | None, out: Tensor) -> Tensor:
        for one, name in self.observers:
            out = one.modify_output(name, attention, value, out)
        return out

    def modify_scores(self, scores: Tensor) -> Tensor:
        for one, name in self.observers:
            scores = one.modify_scores(name, scores)
        return scores

    def modify_weights(self, weights: Tensor) -> Tensor:
        for one, name in self.observers:
            weights = one.modify_weights(name, weights)
        return weights

    def modify_fused_inputs(self, inputs: FusedLayerInputs, attention: CapturedAttention) -> FusedLayerInputs:
        for one, name in self.observers:
            inputs = one.modify_fused_inputs(name, inputs, attention)
        return inputs


def get_call_site(module: nn.Module | None = None) -> CallSite | None:
    """The site of a call that happens now; None: nobody looks. ``module`` is the one that calls, if known."""
    if torch.compiler.is_compiling():  # first, so that dynamo reads no further
        return None
    listeners = [one for one in OBSERVERS.get() if one.module_stack.frames]
    recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint, in the backward pass
    if not listeners or _SUPPRESSED.get() or recomputed or is_tracing():
        return None
    site = CallSite(listeners, module)
    if is_capturing_cuda_graph():
        site.report_missed(
            "it was captured into a CUDA graph, which runs without Python: run it without the graph"
        )
        return None
    if torch._C._are_functorch_transforms_active():
        site.report_missed("it ran inside a transform of torch.func (vmap, grad, …): run the model by itself")
        return None
    return site


def are_reports_suppressed() -> bool:
    """Whether an adapter further out tells of what goes on."""
    return _SUPPRESSED.get() is not None


@contextmanager
def suppress_reports(entirely: bool) -> Iterator[None]:
    """What is called here is told of already: entirely, or but for changes that are to be made to it."""
    token = _SUPPRESSED.set(entirely)
    try:
        yield
    finally:
        _SUPPRESSED.reset(token)


@contextmanager
def provide_call_hints(keys: Tensor | None = None, kind: str | None = None) -> Iterator[None]:
    """Of what is called here it is known: the keys before they are repeated for all heads, and the kind."""
    tokens = _KEYS_HINT.set(keys), _KIND_HINT.set(kind)
    try:
        yield
    finally:
        _KEYS_HINT.reset(tokens[0])
        _KIND_HINT.reset(tokens[1])
