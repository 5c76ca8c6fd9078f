"""Observers: what adapters report attention calls to. ``watch`` records them, ``knock_out`` modifies them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.layouts import to_4d
from jumok.look.capture.module_stack import ModuleFrame, ModuleStack
from jumok.look.capture.packing import PackedSequences
from jumok.look.capture.weight_tracking.softmax_analysis import analyze_softmaxes


class ObservedCall(NamedTuple):
    """One attention call, as an adapter read it."""

    attention: CapturedAttention
    value: Tensor | None = None  # (B, G, K, Dv)
    kind: str | None = None  # "self", "cross" or "channel", if the call determines it
    sink: Tensor | None = None  # (H,) or (B, H, Q): a score in the softmax of every row that belongs to no key
    score_tensors: tuple[Tensor, ...] = ()  # read by the attention's score function or score mod
    is_bhqk: bool = True  # if scores were modified: their axes are known to be (B, H, Q, K)
    is_bqhd: bool = False  # the kernel's output is (B, Q, H, Dv), not (…, H, Q, Dv)
    packing: PackedSequences | None = None  # the kernel's output is (…, tokens, H, Dv), with the queries packed

    def read_output(self, out: Tensor) -> Tensor:
        """Return the kernel's output as ``(B, H, Q, Dv)``."""
        batch, num_heads, num_queries, _ = self.attention.shape
        if self.packing is not None:
            return self.packing.unpack(out.reshape(-1, num_heads, out.shape[-1])).transpose(1, 2)
        if self.is_bqhd:
            return out.reshape(batch, num_queries, num_heads, out.shape[-1]).transpose(1, 2)
        return to_4d(out).reshape(batch, num_heads, num_queries, out.shape[-1])

    def write_output(self, modified: Tensor, out: Tensor) -> Tensor:
        """Return ``modified`` ``(B, H, Q, Dv)`` in the layout of the kernel's output ``out``."""
        if self.packing is not None:
            packed = out.reshape(-1, modified.shape[1], modified.shape[3])
            return self.packing.pack(modified.transpose(1, 2), packed).reshape(out.shape)
        return (modified.transpose(1, 2) if self.is_bqhd else modified).reshape(out.shape)


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

    def on_generation_start(self, model: nn.Module) -> None:
        """Called before the first forward of a generation, with the model whose ``generate`` was called."""

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
                self.on_attention(name, ObservedCall(result.attention, kind=result.kind, is_bhqk=result.is_bhqk))

    def on_attention(self, name: str, call: ObservedCall) -> None:
        """Called for each captured attention."""

    def includes(self, name: str) -> bool:
        """Return whether the attention of this name is wanted. If not, an adapter may save the work."""
        return True

    def on_excluded_attention(self, name: str) -> None:
        """Called in place of ``on_attention`` for each attention that is not wanted and was not read."""

    def on_missed_attention(self, name: str, reason: str) -> None:
        """Called for each attention that cannot be captured."""

    def on_compiled_call(self, name: str) -> None:
        """Called before a compiled module runs: first its original, which is observed, then the compiled code."""
        raise InputError(
            f"{name} was called as compiled by torch.compile, and compiled code runs without Python; run it "
            'uncompiled for once, with torch.compiler.set_stance("force_eager")'
        )

    def modify_attention(self, name: str, attention: CapturedAttention) -> CapturedAttention:
        """Return the attention after this observer's modifications."""
        return attention

    def modify_output(self, name: str, attention: CapturedAttention, value: Tensor | None, out: Tensor) -> Tensor:
        """Return the modified output ``(B, H, Q, Dv)`` of values ``(B, G, K, Dv)``; None: weights only."""
        return out

    def modifies(self, name: str) -> bool:
        """Return whether this observer modifies the attention of this name."""
        return False

    def run_softmax(self, name: str, softmax: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
        """Return the weights of scores ``(B, H, Q, K)`` after this observer's modifications."""
        return softmax(scores)

    def modify_fused_inputs(
        self, name: str, inputs: FusedLayerInputs, attention: CapturedAttention
    ) -> FusedLayerInputs:
        """Return the modified inputs of a fused layer."""
        return inputs


# Observers of this thread or task. Others that run the same model at the same time are not observed.
OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("jumok.look.observers", default=())
