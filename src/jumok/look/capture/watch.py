"""See where a PyTorch model attends, while it runs its own kernels and says the same to the bit."""

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
from jumok.look.capture.adapters.call_site import GenerateResult, ObservedCall, Observer
from jumok.look.capture.adapters.compile_check import require_uncompiled
from jumok.look.capture.adapters.module_stack import (
    ModuleFrame,
    get_class_name,
    infer_kind_from_name,
    looks_like_attention,
    may_attend,
)
from jumok.look.capture.adapters.softmax_analysis import UNUSED_REASON
from jumok.look.capture.axis_tokens import TokenLookup, extract_token_ids, find_token_embeddings
from jumok.look.capture.capture_store import CaptureStore, MergedCalls, is_continuation
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.captures import CapturedLayer, Captures, CaptureSource, matches_pattern
from jumok.look.capture.generation import GenerationCapture

LayerFilter = str | Sequence[str] | Callable[[str], bool]

MAX_LOOKUPS = 8  # token ids that are remembered: those of the two sides of some models
SUPPORTED_ATTENTION = (
    "the attention of Hugging Face's models, F.scaled_dot_product_attention, nn.MultiheadAttention and "
    "nn.Transformer…, FlexAttention, jumok.attend, and a softmax whose output multiplies values"
)


@contextmanager
def watch(
    model: nn.Module,
    tokenizer: Any = None,
    layers: LayerFilter | None = None,
    device: torch.device | str | None = None,
) -> Iterator[Captures]:
    """See every attention call that ``model`` makes, whatever kernels it runs; its output stays as it is.

    Queries, keys and the model's own mask are kept by reference, O(length) beside that mask, and weights are
    computed from them when they are asked for: those before dropout.

    Args:
        model: any module: of Hugging Face, of ``torch.nn``, of yours, of jumok.
        tokenizer: to write the tokens along the axes: of Hugging Face or of jumok, or a function from a list
            of token ids to their texts.
        keep: which layers to keep: a name, in which * stands for anything, several of these, or a function
            that says of a name whether. None: all.
        device: where to, "cpu" to spare a GPU's memory. None: everything stays where it is.

    >>> model = torch.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
    >>> with watch(model) as seen:
    ...     y = model(torch.randn(1, 5, 8))
    >>> seen
    1 attention:
        0 <self_attn: self, 1 × 2 × 5 × 5>
    >>> seen["self_attn"].weights(batch=0, head=1).shape
    torch.Size([5, 5])
    """
    watcher = CaptureObserver(
        require_uncompiled(model, "watch"),
        tokenizer,
        _build_layer_filter(layers),
        None if device is None else torch.device(device),
    )
    with attach_observer(watcher):
        yield watcher.captures
    watcher.check_captures()


class CaptureObserver(Observer):
    """Keeps what the adapters tell of."""

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
        self._missed_by_name: set[str] = set()  # missed because of their names alone
        self._forward_index = 0
        self._open_calls: dict[
            str, tuple[MergedCalls, CapturedAttention]
        ] = {}  # each layer's last in this turn, and as it was found

    def on_generation_start(self) -> None:
        self.generation = GenerationCapture(self)

    def on_generate_return(self, result: GenerateResult) -> None:
        if self.generation is not None:
            self.generation.set_result(result)

    def on_generation_end(self, finished: bool) -> None:
        generation, self.generation = self.generation, None
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
        for name, found, _ in frame.pending_weights:
            self.on_attention(name, found)
        super().on_module_exit(frame)
        if may_attend(frame.module) and not frame.has_attention and not frame.is_reported:
            scripted = isinstance(frame.module, torch.jit.ScriptModule)
            how = "is scripted, and runs without Python" if scripted else "attends in a way that is not seen"
            self._missed_by_name.add(frame.name)
            self.on_missed_attention(frame.name, f"{get_class_name(frame.module)} {how}")

    def on_attention(self, name: str, call: ObservedCall) -> None:
        if not self.includes_layer(name):
            self.excluded_calls[name] += 1
            return
        kind = call.kind or self._infer_kind(name, call.attention)
        if self.generation is not None:
            self.generation.add_call(name, kind, call)
            return
        if self._forward_index != self.module_stack.forward_index:
            self._forward_index, self._open_calls = self.module_stack.forward_index, {}
        pieces, before = self._open_calls.get(name, (None, call.attention))
        if pieces is not None and is_continuation(before, call.attention):
            kept = replace(self.store.detach_attention(call.attention), key=pieces.first_call.key)
            pieces.append(MergedCalls(kept, call))
            self._open_calls[name] = pieces, call.attention
        else:
            kept = self.store.detach_attention(call.attention)
            pieces = MergedCalls(kept, call)
            if self.store.device is not None:  # then what was found is not to be held longer than needed
                self._open_calls = {}
            self._open_calls[name] = pieces, call.attention
            self.captures.layers.append(self.build_layer(name, kind, pieces))
        self.captures.calls.append(self.build_layer(name, kind, MergedCalls(kept, call)))

    def on_missed_attention(self, name: str, reason: str) -> None:
        self.captures.missed_layers[name] = reason

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
        frame = self.module_stack.current_frame
        told = infer_kind_from_name(name, None if frame is None else frame.module)
        if told is not None:
            return told
        _, _, queries, keys = attention.shape
        cached = self.is_generating or attention.diagonal is not None
        return "self" if queries == keys or cached else "cross"

    def check_captures(self) -> None:
        """Say what was not seen. If nothing was, that is an error: an empty answer would look like one."""
        known = {*self.captures.names, *self.excluded_calls}
        unseen = self.captures.missed_layers
        for name, reason in list(unseen.items()):
            sure = (
                name in known and reason != UNUSED_REASON and name not in self._missed_by_name
            )  # another of its calls
            if not self.includes_layer(name) or (self._is_inside_captured(name, known) and not sure):
                del unseen[name]
        listed = "; ".join(f"{name}: {why}" for name, why in list(unseen.items())[:8])
        if self.captures.layers:
            if unseen:
                warnings.warn(f"watch could not see all attention. {listed}", stacklevel=4)
            return
        if unseen and self.captures.calls:
            calls = f"seen.calls has all {len(self.captures.calls)} calls, but no layer has an entry in seen"
            raise InputError(f"{calls}. {listed}")
        if unseen:
            raise InputError(f"watch saw no attention. {listed}. What can be seen: {SUPPORTED_ATTENTION}")
        if self.excluded_calls:
            ran = ", ".join(list(self.excluded_calls)[:12])
            raise InputError(f"keep= chose none of the layers that ran: {ran}")
        if not self.module_calls:
            raise InputError(
                "watch saw nothing: the model was not called inside the with block, or in another thread, or "
                "only as compiled by torch.compile, which runs without Python; call the model itself there, "
                'in the thread that watches, or with torch.compiler.set_stance("force_eager")'
            )
        raise InputError(
            f"watch saw no attention in the {len(self.module_calls)} modules that ran, such as "
            f"{', '.join(list(self.module_calls)[-3:])}. What can be seen: {SUPPORTED_ATTENTION}"
        )

    def _is_inside_captured(self, name: str, captured_names: set[str]) -> bool:
        """Whether a module is one of these, or part of one that attends: then it is seen with it."""
        above = (name[: dot.start()] for dot in re.finditer(r"\.", name))
        return name in captured_names or any(
            one in captured_names and looks_like_attention(self.module_stack.get_module(one)) for one in above
        )


def _build_layer_filter(layers: LayerFilter | None) -> Callable[[str], bool]:
    if layers is None:
        return lambda name: True
    if callable(layers):
        return layers
    patterns = [layers] if isinstance(layers, str) else list(layers)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"keep={layers!r} came; names of layers, or a function of a name, are expected")
    return lambda name: any(matches_pattern(name, pattern) for pattern in patterns)
