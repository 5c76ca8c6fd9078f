"""Capture the attention of a PyTorch model while it runs its own kernels, with bitwise identical output."""

from __future__ import annotations

import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.capture.adapters import attach_observer
from jumok.look.capture.axis_tokens import TokenLookup, extract_token_ids, find_token_embeddings
from jumok.look.capture.call_site import are_reports_suppressed
from jumok.look.capture.capture_store import CaptureStore, MergedCalls, is_continuation
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.captures import CapturedLayer, Captures, CaptureSource, matches_pattern
from jumok.look.capture.generation import GenerationCapture
from jumok.look.capture.module_stack import (
    ModuleFrame,
    get_class_name,
    infer_kind_from_name,
    looks_like_attention,
)
from jumok.look.capture.module_wrappers import require_module
from jumok.look.capture.observer import GenerateResult, ObservedCall, Observer
from jumok.look.capture.token_mixers import NO_MAP, describe_token_mixer
from jumok.look.capture.weight_tracking.softmax_analysis import UNUSED_REASON

LayerFilter = str | Sequence[str] | Callable[[str], bool]

MAX_LOOKUPS = 8  # token lookups that are remembered: some models have two sides
SUPPORTED_ATTENTION = (
    "the attention of Hugging Face models, F.scaled_dot_product_attention, nn.MultiheadAttention and "
    "nn.Transformer…, FlexAttention, FlashAttention, xformers, SageAttention, jumok.attend, and a softmax whose "
    "output multiplies values"
)


@contextmanager
def watch(
    model: nn.Module,
    tokenizer: Any = None,
    layers: LayerFilter | None = None,
    device: torch.device | str | None = None,
) -> Iterator[Captures]:
    """Capture every attention call of ``model``, whatever kernels it runs. Its output does not change.

    Queries, keys and the model's own mask are stored by reference, O(length) beside that mask. Weights, as
    they are before dropout, are computed from them on request.

    Args:
        model: Any module: of Hugging Face, ``torch.nn``, jumok or your own. A module that ``torch.compile`` has
            compiled runs twice, as its original and as compiled; see docs/look.md.
        tokenizer: Decodes the tokens along the axes: a tokenizer of Hugging Face or of jumok, or a function
            from a list of token ids to their texts.
        layers: The layers to capture: a name, in which * matches anything, a list of names, or a predicate
            on names. None: all.
        device: The device to store tensors on; "cpu" saves GPU memory. None: tensors stay where they are.

    >>> model = torch.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
    >>> with watch(model) as captures:
    ...     y = model(torch.randn(1, 5, 8))
    >>> captures
    1 attention:
        0 <self_attn: self, 1 × 2 × 5 × 5>
    >>> captures["self_attn"].weights(batch=0, head=1).shape
    torch.Size([5, 5])
    """
    observer = CaptureObserver(
        require_module(model, "watch"),
        tokenizer,
        build_layer_filter(layers),
        None if device is None else torch.device(device),
    )
    with attach_observer(observer):
        yield observer.captures
    observer.check_captures()


class CaptureObserver(Observer):
    """Stores the attention calls that adapters report."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        includes_layer: Callable[[str], bool],
        device: torch.device | None,
    ) -> None:
        super().__init__(model)
        self.captures = Captures()
        self.generation: GenerationCapture | None = None
        self.tokenizer, self.includes_layer, self.store = tokenizer, includes_layer, CaptureStore(device)
        self.lookups: deque[TokenLookup] = deque(maxlen=MAX_LOOKUPS)
        self.excluded_calls: Counter[str] = Counter()
        self.module_calls: Counter[str] = Counter()
        self._embedding_ids = find_token_embeddings(model)
        self._missed_by_name: set[str] = set()  # reported as missed only because of their names
        self._kinds: dict[str, str | None] = {}  # as names of layers say
        self._compiled_names: set[str] = set()  # of which the user has been told
        self._forward_index = 0
        self._generating_model: nn.Module | None = None
        self._step_calls: Counter[str] = Counter()  # captured in this forward, by layer
        self._expected_calls: Counter[str] = Counter()  # in each step, if only a few modules are tracked
        # The last call of each layer in this forward, as stored and as observed.
        self._open_calls: dict[str, tuple[MergedCalls, CapturedAttention]] = {}

    def on_generation_start(self, model: nn.Module) -> None:
        self.generation = GenerationCapture(self)
        self._generating_model, self._step_calls, self.module_stack.needs_all = model, Counter(), False

    def on_generate_return(self, result: GenerateResult) -> None:
        if self.generation is not None:
            self.generation.set_result(result)

    def on_generation_end(self, finished: bool) -> None:
        generation, self.generation = self.generation, None
        self.module_stack.track_all()
        if generation is not None:
            if finished:
                generation.build_captures()
            generation.clear()

    def on_cache_reorder(self, beam_indices: Tensor) -> None:
        if self.generation is not None:
            self.generation.next_row_order = beam_indices

    def on_module_enter(self, module: nn.Module, name: str, args: Any) -> None:
        self.module_calls[name] += 1
        if id(module) in self._embedding_ids and (ids := extract_token_ids(args)) is not None:
            frame = self.module_stack.current_frame
            self.lookups.append(TokenLookup(name, frame.name if frame else "", ids))

    def on_module_exit(self, frame: ModuleFrame) -> None:
        for name, call, _ in frame.pending_weights:
            self.on_attention(name, call)
        super().on_module_exit(frame)
        is_known = frame.has_attention or frame.is_reported or frame.is_unchanged or are_reports_suppressed()
        if not is_known:
            self._report_unseen_module(frame)
        if self.is_generating and not self.module_stack.frames:
            self._choose_tracking(frame.module)

    def _report_unseen_module(self, frame: ModuleFrame) -> None:
        """Report a module in which no attention was seen, if its class suggests that it has some."""
        if (description := describe_token_mixer(frame.module)) is not None:
            frame.is_reported = True
            self.on_missed_attention(frame.name, description)
        elif self.module_stack.may_attend(frame.module):
            is_scripted = isinstance(frame.module, torch.jit.ScriptModule)
            problem = "is scripted and runs without Python" if is_scripted else "attends in an unsupported way"
            self._missed_by_name.add(frame.name)
            self.on_missed_attention(frame.name, f"{get_class_name(frame.module)} {problem}")

    def _choose_tracking(self, module: nn.Module) -> None:
        """After a forward of a generation, choose which modules are tracked in the next one.

        A step calls hundreds of modules, and their hooks take longer than its attention. If every attention of
        a step of the search named its module, hooks of the others are not needed for the same calls again.
        """
        calls, self._step_calls = self._step_calls, Counter()
        stack = self.module_stack
        if stack.is_complete:
            if module is self._generating_model and self.is_single_search and calls and not stack.needs_all:
                self._expected_calls = calls
                stack.track_only([module, *(part for part in module.modules() if id(part) in self._embedding_ids)])
        elif stack.needs_all or calls != self._expected_calls:
            stack.needs_all = True
            stack.track_all()

    def on_attention(self, name: str, call: ObservedCall) -> None:
        if not self.includes(name):
            self.on_excluded_attention(name)
            return
        self._step_calls[name] += 1
        self.store_call(name, call.kind or self._infer_kind(name, call.attention), call)

    def store_call(self, name: str, kind: str, call: ObservedCall) -> None:
        """Store a call of a selected layer."""
        if self.generation is not None:
            self.generation.add_call(name, kind, call)
            return
        if self._forward_index != self.module_stack.forward_index:
            self._forward_index, self._open_calls = self.module_stack.forward_index, {}
        open_call, previous = self._open_calls.get(name, (None, call.attention))
        if open_call is not None and is_continuation(previous, call.attention):
            attention = replace(self.store.detach_attention(call.attention), key=open_call.first_call.key)
            open_call.append(MergedCalls(attention, call))
            self._open_calls[name] = open_call, call.attention
        else:
            attention = self.store.detach_attention(call.attention)
            open_call = MergedCalls(attention, call, self._find_packed_ids(call))
            if self.store.device is not None:  # do not keep the original tensors longer than needed
                self._open_calls = {}
            self._open_calls[name] = open_call, call.attention
            self.captures.layers.append(self.build_layer(name, kind, open_call))
        self.captures.calls.append(self.build_layer(name, kind, MergedCalls(attention, call, open_call.query_ids)))

    def _find_packed_ids(self, call: ObservedCall) -> Tensor | None:
        """Return the tokens of packed queries ``(B, Q)``, -1 for padding, if the model looked them up as packed."""
        if call.packing is None:
            return None
        num_tokens = call.packing.num_tokens
        ids = next((lookup.ids for lookup in reversed(self.lookups) if lookup.ids.numel() == num_tokens), None)
        return None if ids is None else call.packing.unpack(ids.flatten() + 1) - 1

    def includes(self, name: str) -> bool:
        return self.includes_layer(name)

    def on_excluded_attention(self, name: str) -> None:
        self._step_calls[name] += 1
        self.excluded_calls[name] += 1

    def on_missed_attention(self, name: str, reason: str) -> None:
        description = describe_token_mixer(self.module_stack.get_module(name))
        self.captures.missed_layers[name] = description or reason

    def on_compiled_call(self, name: str) -> None:
        if name not in self._compiled_names:
            self._compiled_names.add(name)
            warnings.warn(
                f"{name} is compiled by torch.compile, and compiled code runs without Python. Its output comes from "
                "the compiled code, its attention from another run of the original on a copy of the inputs",
                stacklevel=4,
            )

    def build_layer(
        self, name: str, kind: str, source: CaptureSource, lookups: Sequence[TokenLookup] | None = None
    ) -> CapturedLayer:
        lookups = tuple(self.lookups) if lookups is None else lookups
        return CapturedLayer(
            name,
            kind,
            source,
            lookups,
            self.tokenizer,
            self.module_stack.forward_index,
            self.module_calls[name],
        )

    def _infer_kind(self, name: str, attention: CapturedAttention) -> str:
        if name not in self._kinds:
            frame = self.module_stack.current_frame
            self._kinds[name] = infer_kind_from_name(name, None if frame is None else frame.module)
        kind = self._kinds[name]
        if kind is not None:
            return kind
        _, _, num_queries, num_keys = attention.shape
        has_cache = self.is_generating or attention.diagonal is not None
        return "self" if num_queries == num_keys or has_cache else "cross"

    def check_captures(self) -> None:
        """Report what was not captured. It is an error if nothing was: empty captures would be misleading."""
        captured_names = {*self.captures.names, *self.excluded_calls}
        missed = self.captures.missed_layers
        for name, reason in list(missed.items()):
            # Another call of the same layer.
            is_other_call = name in captured_names and reason != UNUSED_REASON and name not in self._missed_by_name
            if not self.includes_layer(name) or (self._is_inside_captured(name, captured_names) and not is_other_call):
                del missed[name]
        listed = "; ".join(f"{name}: {detail}" for name, detail in list(missed.items())[:8])
        if self.captures.layers:
            if not all(reason.endswith(NO_MAP) for reason in missed.values()):
                warnings.warn(f"watch did not capture all attention. {listed}", stacklevel=4)
            return
        if missed and self.captures.calls:
            calls = f"captures.calls has all {len(self.captures.calls)} calls, but no layer could be merged"
            raise InputError(f"{calls}. {listed}")
        if missed:
            raise InputError(f"watch captured no attention. {listed}. Supported: {SUPPORTED_ATTENTION}")
        if self.excluded_calls:
            ran = ", ".join(list(self.excluded_calls)[:12])
            raise InputError(f"layers= (of jumok look: --layers) matches none of the layers that ran: {ran}")
        if not self.module_calls:
            raise InputError(
                "watch captured nothing: the model was not called inside the with block, or in another "
                "thread, or only inside a function that is compiled by torch.compile, which runs without Python; call "
                'the model itself, in the same thread, or with torch.compiler.set_stance("force_eager")'
            )
        raise InputError(
            f"watch captured no attention in the {len(self.module_calls)} modules that ran, such as "
            f"{', '.join(list(self.module_calls)[-3:])}. Supported: {SUPPORTED_ATTENTION}"
        )

    def _is_inside_captured(self, name: str, captured_names: set[str]) -> bool:
        """Return whether a module is captured, or part of an attention that is."""
        parents = (name[: dot.start()] for dot in re.finditer(r"\.", name))
        return name in captured_names or any(
            parent in captured_names and looks_like_attention(self.module_stack.get_module(parent))
            for parent in parents
        )


def build_layer_filter(layers: LayerFilter | None) -> Callable[[str], bool]:
    """Return whether a layer of a name is selected."""
    if layers is None:
        return lambda name: True
    if callable(layers):
        return layers
    patterns = [layers] if isinstance(layers, str) else list(layers)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"layers={layers!r}: expected names of layers or a function of a name")
    return lambda name: any(matches_pattern(name, pattern) for pattern in patterns)
