"""The stack of running modules of a model, with their names."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_hooks_with_kwargs,
    _global_forward_pre_hooks,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from jumok.look.capture.module_wrappers import WRAPPER_ATTRIBUTES, get_wrapped_module
from jumok.look.capture.weight_tracking.weight_tracker import count_other_modes

ATTENTION_PATTERN = re.compile(r"att(entio)?n|mha(?![a-z])|multi_?head", re.IGNORECASE)
CROSS_ATTENTION_PATTERN = re.compile(
    r"cross|enc_?dec|(encoder|enc|source|src|memory)_att|multihead_attn", re.IGNORECASE
)
NORM_PATTERN = re.compile(r"Norm(alization)?(\dd)?$")
Hook = Callable[..., None]

MAX_INHERITED_PRODUCTS = 8  # products of a module that its caller still sees
HEAD_COUNT_ATTRIBUTES = (
    "num_heads",
    "num_attention_heads",
    "num_attn_heads",
    "n_heads",
    "n_head",
    "nhead",
    "heads",
    "h",
)
WRAPPER_PATTERN = re.compile(rf"(^|\.)({'|'.join(WRAPPER_ATTRIBUTES)})(?=\.|$)")  # their part of a name
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    _global_forward_pre_hooks,
    _global_forward_hooks,
    _global_forward_hooks_with_kwargs,
    _global_forward_hooks_always_called,
)
SIMPLE_LAYER_PREFIXES = ("torch.nn.modules.", "transformers.activations")  # layers without children


@dataclass
class ModuleFrame:
    """One call of a module."""

    name: str
    module: nn.Module
    last_child_name: str = ""  # the last module that it called
    has_attention: bool = False  # it or a module that it called computed attention
    is_reported: bool = False  # a module like attention ran in it and was reported separately
    is_unchanged: bool = False  # it returned its input and called no other module: it was skipped
    softmaxes: list[Any] = field(default_factory=list)  # may be attention: analyzed when the module ends
    tensors: list[Any] = field(default_factory=list)  # its arguments and its result, until it ends
    final_shapes: list[tuple[int, ...]] | None = None  # theirs, if it has a softmax
    # Outputs of products of two tensors that are not parameters: their shapes and weak references to them.
    products: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)
    pending_weights: list[Any] = field(default_factory=list)  # weights that were computed and not used yet
    num_operators: int = 0  # attention operators that have run, if it is a graph
    num_dispatch_modes: int = field(default_factory=count_other_modes)  # active when it began

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors among its arguments and its result."""
        if self.final_shapes is not None:
            return self.final_shapes
        return [shape for values in self.tensors for shape in _collect_shapes(values)]


class ModuleStack:
    """The modules of a model that are running now, outermost first.

    It uses hooks for all modules at once: hooks on a single module would disable the fast path of
    ``nn.TransformerEncoderLayer``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        modules = {
            WRAPPER_PATTERN.sub("", name): module
            for name, module in model.named_modules()
            # A softmax acts as a function of the module that calls it.
            if not isinstance(module, nn.Softmax) and get_wrapped_module(module) is None
        }
        self.modules: dict[str, nn.Module] = {name or type(model).__name__: module for name, module in modules.items()}
        self.names = {id(module): name for name, module in self.modules.items()}
        self.frames: list[ModuleFrame] = []
        self.forward_index = 0  # number of outer forward calls so far
        self.is_complete = True  # whether all modules are tracked, not only a few
        self.needs_all = False  # whether an attention was named after the module that was running
        self._may_attend: dict[int, bool] = {}
        self._hooks: tuple[Hook, Hook] | None = None
        self.handles: list[RemovableHandle] = []

    @contextmanager
    def track_calls(
        self,
        is_active: Callable[[], bool],
        on_enter: Callable[[nn.Module, str, Any], None],
        on_exit: Callable[[ModuleFrame], None],
    ) -> Iterator[None]:
        """Track calls while ``is_active()``. Call ``on_enter``, with its arguments, and ``on_exit``."""

        def enter(module: nn.Module, args: Any) -> None:
            name = self.names.get(id(module))
            if name is None or torch.compiler.is_compiling() or not is_active():
                return
            self.forward_index += not self.frames
            on_enter(module, name, args)
            self.frames.append(ModuleFrame(name, module, tensors=[args]))

        def leave(module: nn.Module, args: Any, *rest: Any) -> None:
            if torch.compiler.is_compiling() or not is_active():
                return
            if not self.frames or self.frames[-1].module is not module:  # it was not entered while active
                return
            frame = self.frames.pop()
            *options, result = rest  # after an exception, PyTorch passes no keyword arguments
            named_arguments = [x for arguments in options for x in arguments.values()]
            frame.tensors += [tuple(named_arguments), result]
            frame.final_shapes = frame.shapes if frame.softmaxes else []
            frame.tensors = []
            is_input = isinstance(result, Tensor) and any(x is result for x in (*args, *named_arguments))
            frame.is_unchanged = is_input and not (frame.last_child_name or frame.products or frame.softmaxes)
            on_exit(frame)
            if self.frames:
                parent = self.frames[-1]
                parent.last_child_name = frame.name
                parent.has_attention |= frame.has_attention
                parent.products += frame.products[-MAX_INHERITED_PRODUCTS:]
                parent.is_reported |= frame.is_reported or self.may_attend(frame.module)

        self._hooks = enter, leave
        self.track_all()
        try:
            yield
        finally:
            self._remove_hooks()
            self._hooks = None

    def track_all(self) -> None:
        """Track the calls of all modules."""
        self._remove_hooks()
        if self._hooks is not None:
            enter, leave = self._hooks
            self.handles = [
                register_module_forward_pre_hook(enter),
                register_module_forward_hook(leave, with_kwargs=True, always_call=True),
            ]
        self.is_complete = True

    def track_only(self, modules: Iterable[nn.Module]) -> None:
        """Track the calls of a few modules; those of the others then cost nothing.

        Attention calls must name their module: they cannot be named after the module that is running.
        """
        self._remove_hooks()
        if self._hooks is not None:
            enter, leave = self._hooks
            for module in modules:
                self.handles.append(module.register_forward_pre_hook(enter))
                self.handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        self.is_complete = False

    def _remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
            # PyTorch leaves this entry behind and then warns about hooks at each compiled module.
            _global_forward_hooks_with_kwargs.pop(handle.id, None)
        self.handles = []

    def may_attend(self, module: nn.Module) -> bool:
        """See :func:`may_attend`, which is called once for each module."""
        if id(module) not in self._may_attend:
            self._may_attend[id(module)] = may_attend(module)
        return self._may_attend[id(module)]

    @property
    def current_frame(self) -> ModuleFrame | None:
        return self.frames[-1] if self.frames else None

    def find_name(self, module: nn.Module | None = None) -> str:
        """Return the name of ``module``, or of the module that is running.

        A module may compute in a method other than ``forward``, which has no hook. The last module that was
        called then reveals it: if block.0 runs and has called block.0.attention.project, block.0.attention is
        computing.
        """
        if module is not None and id(module) in self.names:
            return self.names[id(module)]
        frame = self.frames[-1]
        owner = frame.last_child_name.rpartition(".")[0]
        inside = frame.module is self.model or owner.startswith(f"{frame.name}.")
        return owner if owner and inside and looks_like_attention(self.get_module(owner)) else frame.name

    def get_module(self, name: str) -> nn.Module:
        """Return the module of this name."""
        return self.modules[name]


@contextmanager
def suspend_hooks(stacks: Sequence[ModuleStack]) -> Iterator[None]:
    """Run code without the hooks of these stacks, and restore them in their order."""
    handles = [handle for stack in stacks for handle in stack.handles]
    references = [ref() for handle in handles for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    hook_dicts = {id(hooks): hooks for hooks in (*GLOBAL_HOOKS, *references) if hooks is not None}.values()
    hook_ids = {handle.id for handle in handles}
    before = [dict(hooks) for hooks in hook_dicts]
    for hooks in hook_dicts:
        for hook_id in hook_ids & hooks.keys():
            del hooks[hook_id]
    try:
        yield
    finally:
        for hooks, saved in zip(hook_dicts, before, strict=True):
            remaining = hook_ids | hooks.keys()
            restored = {hook_id: hook for hook_id, hook in saved.items() if hook_id in remaining} | hooks
            hooks.clear()
            hooks.update(restored)


def _collect_shapes(values: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors among arguments or results."""
    items = values if isinstance(values, tuple | list) else (values,)
    return [tuple(x.shape) for x in items if isinstance(x, Tensor) and not x.is_nested]


def get_class_name(module: nn.Module) -> str:
    """Return the name of its class; for a scripted module, of the original class."""
    return str(getattr(module, "original_name", type(module).__name__))


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether the name of a module suggests attention."""
    if isinstance(module, torch.jit.ScriptModule):
        return any(ATTENTION_PATTERN.search(get_class_name(part)) for part in module.modules())
    return ATTENTION_PATTERN.search(get_class_name(module)) is not None


def may_attend(module: nn.Module) -> bool:
    """Return whether a module is named after attention and may compute it.

    ``LxmertAttentionOutput`` and ``xLSTMMultiHeadLayerNorm`` cannot: they process each position separately.
    """
    return looks_like_attention(module) and not _cannot_attend(module)


def _cannot_attend(module: nn.Module) -> bool:
    """Return whether a module certainly computes no attention, given its parts.

    This holds for the simple layers of ``torch.nn``; for a module whose ``forward`` only calls such layers
    and adds their outputs; and for a norm or a position bias, which takes one tensor and has no weights but
    vectors, embedding tables and scales of a norm, so it cannot compute queries and keys.
    """
    if isinstance(module, torch.jit.ScriptModule):  # its class has no ``forward``
        return False
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        return False
    children = dict(module.named_children())
    if not children and _is_simple(module):
        return True
    only_calls = bool(children) and set(forward.__code__.co_names) <= children.keys()
    if only_calls and all(map(_cannot_attend, children.values())):
        return True
    weights = [(part, weight) for part in module.modules() for weight in part.parameters(recurse=False)]
    return (
        forward.__code__.co_argcount == 2  # self and the tensor
        and all(_is_simple(child) or _is_norm(child) for child in children.values())
        and bool(weights)
        and all(isinstance(part, nn.Embedding) or weight.dim() <= 1 or _is_norm(part) for part, weight in weights)
    )


def _is_simple(module: nn.Module) -> bool:
    return type(module).__module__.startswith(SIMPLE_LAYER_PREFIXES) and not any(module.children())


def _is_norm(module: nn.Module) -> bool:
    return NORM_PATTERN.search(get_class_name(module)) is not None


def infer_kind_from_name(name: str, module: nn.Module | None) -> str | None:
    """Return whether a layer attends to its own input ("self") or to another ("cross"), if a name says so."""
    names = [".".join(name.split(".")[-2:]), "" if module is None else get_class_name(module)]
    if any(CROSS_ATTENTION_PATTERN.search(candidate) for candidate in names):
        return "cross"
    return "self" if any("self" in candidate.lower() for candidate in names) else None


def get_num_heads(module: nn.Module) -> int | None:
    """Return the number of heads that the module declares."""
    for name in HEAD_COUNT_ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, Tensor | bool) and value > 0:
            return value
    return None
