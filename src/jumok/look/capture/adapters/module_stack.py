"""Which module of a model is running, by its name in the model."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from jumok.look.capture.adapters.weight_tracker import count_other_modes

ATTENTION_PATTERN = re.compile(r"att(entio)?n|mha(?![a-z])|multi_?head", re.IGNORECASE)
CROSS_ATTENTION_PATTERN = re.compile(
    r"cross|enc_?dec|(encoder|enc|source|src|memory)_att|multihead_attn", re.IGNORECASE
)
MAX_INHERITED_PRODUCTS = 8  # of a module that the one above still knows
HEAD_COUNT_ATTRIBUTES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "h")
SIMPLE_LAYER_PREFIXES = ("torch.nn.modules.", "transformers.activations")  # layers without children


@dataclass
class ModuleFrame:
    """One call of a module."""

    name: str
    module: nn.Module
    last_child_name: str = ""  # the last module that it called
    has_attention: bool = False  # an attention call, in it or in what it called
    is_reported: bool = False  # a module like attention ran in it, and was judged by itself
    softmaxes: list[Any] = field(default_factory=list)  # softmaxes that may be attention: judged when it ends
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of its arguments and of its result
    # Outputs of products of two tensors that are no parameters: their shapes and weak references to them.
    products: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)
    pending_weights: list[Any] = field(default_factory=list)  # weights that were computed and not used yet
    num_dispatch_modes: int = field(
        default_factory=count_other_modes
    )  # dispatch modes that were active when it began


class ModuleStack:
    """The modules of a model that are running now, outermost first.

    Found out by hooks for all modules at once: hooks on a module itself would switch off the fast path of
    ``nn.TransformerEncoderLayer``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {
            id(module): name or type(model).__name__
            for name, module in model.named_modules()
            if not isinstance(module, nn.Softmax)  # a function, really, of the module that calls it
        }
        self.frames: list[ModuleFrame] = []
        self.forward_index = 0  # how many calls from outside there have been

    @contextmanager
    def track_calls(
        self,
        is_active: Callable[[], bool],
        on_enter: Callable[[nn.Module, str, Any], None],
        on_exit: Callable[[ModuleFrame], None],
    ) -> Iterator[None]:
        """Follow calls for which ``is_active()``; say when a module begins, with its arguments, and has ended."""

        def begins(module: nn.Module, args: Any) -> None:
            name = self.names.get(id(module))
            if name is None or torch.compiler.is_compiling() or not is_active():
                return
            self.forward_index += not self.frames
            on_enter(module, name, args)
            self.frames.append(ModuleFrame(name, module, shapes=_collect_shapes(args)))

        def ends(module: nn.Module, args: Any, *rest: Any) -> None:
            if torch.compiler.is_compiling() or not is_active():
                return
            if not self.frames or self.frames[-1].module is not module:  # its beginning was not told of
                return
            frame = self.frames.pop()
            *options, result = rest  # after a failure, PyTorch gives no keyword arguments
            frame.shapes += _collect_shapes([x for some in options for x in some.values()]) + _collect_shapes(
                result
            )
            on_exit(frame)
            if self.frames:
                above = self.frames[-1]
                above.last_child_name = frame.name
                above.has_attention |= frame.has_attention
                above.products += frame.products[-MAX_INHERITED_PRODUCTS:]
                above.is_reported |= frame.is_reported or may_attend(frame.module)

        handles = [
            register_module_forward_pre_hook(begins),
            register_module_forward_hook(ends, with_kwargs=True, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
                # PyTorch leaves this entry behind, and then warns of hooks at each compiled module.
                _global_forward_hooks_with_kwargs.pop(handle.id, None)

    @property
    def current_frame(self) -> ModuleFrame | None:
        return self.frames[-1] if self.frames else None

    def find_name(self, module: nn.Module | None = None) -> str:
        """The name of ``module``, or of the one that is running.

        A module may work by a method other than ``forward``, which no hook tells of. Then it shows by what it
        has called last: if block.0 runs and block.0.attention.project has, then block.0.attention is at work.
        """
        if module is not None and id(module) in self.names:
            return self.names[id(module)]
        frame = self.frames[-1]
        owner = frame.last_child_name.rpartition(".")[0]
        inside = frame.module is self.model or owner.startswith(f"{frame.name}.")
        return owner if owner and inside and looks_like_attention(self.get_module(owner)) else frame.name

    def get_module(self, name: str) -> nn.Module:
        """The module of this name."""
        return self.model if name == self.names[id(self.model)] else self.model.get_submodule(name)


def _collect_shapes(values: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors among arguments or results."""
    some = values if isinstance(values, tuple | list) else (values,)
    return [tuple(x.shape) for x in some if isinstance(x, Tensor) and not x.is_nested]


def get_class_name(module: nn.Module) -> str:
    """The name of its class; of a scripted module, of the class that it was made from."""
    return str(getattr(module, "original_name", type(module).__name__))


def looks_like_attention(module: nn.Module) -> bool:
    """Whether one would expect a module of this name to attend."""
    if isinstance(module, torch.jit.ScriptModule):
        return any(ATTENTION_PATTERN.search(get_class_name(part)) for part in module.modules())
    return ATTENTION_PATTERN.search(get_class_name(module)) is not None


def may_attend(module: nn.Module) -> bool:
    """Whether a module is named after attention, and may compute one.

    ``LxmertAttentionOutput`` and ``xLSTMMultiHeadLayerNorm`` may not: positions do not meet in them.
    """
    return looks_like_attention(module) and not _cannot_attend(module)


def _cannot_attend(module: nn.Module) -> bool:
    """Whether a module surely computes no attention, by what it is made of.

    That is so for the simple layers of ``torch.nn``; for a module whose ``forward`` only calls such layers
    and adds up their outputs; and for a norm or a position bias, which takes one tensor and has no weights
    but vectors and embedding tables: it has nothing to make queries and keys with.
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
        and all(map(_is_simple, children.values()))
        and bool(weights)
        and all(isinstance(part, nn.Embedding) or weight.dim() <= 1 for part, weight in weights)
    )


def _is_simple(module: nn.Module) -> bool:
    return type(module).__module__.startswith(SIMPLE_LAYER_PREFIXES) and not any(module.children())


def infer_kind_from_name(name: str, module: nn.Module | None) -> str | None:
    """Whether a layer attends to its own input ("self") or to another ("cross"), if its names say so."""
    names = [".".join(name.split(".")[-2:]), "" if module is None else get_class_name(module)]
    if any(CROSS_ATTENTION_PATTERN.search(one) for one in names):
        return "cross"
    return "self" if any("self" in one.lower() for one in names) else None


def get_num_heads(module: nn.Module) -> int | None:
    """How many heads the module says it has."""
    for name in HEAD_COUNT_ATTRIBUTES:
        found = getattr(module, name, None)
        if isinstance(found, int) and not isinstance(found, Tensor | bool) and found > 0:
            return found
    return None
