"""Attention that computes its weights in another layout than queries × keys: chunks, blocks, buckets, samples.

Such modules have no softmax over the keys that multiplies the values once. Their output is still linear in the
values, so the weights are read off it: the part of the module that depends on the values is recorded
(:mod:`..value_trace`), and computed again with probes in place of the values. In a probe, each feature of a head is 1
at one position and 0 elsewhere, so one run gives the weights on as many keys as a head has features.

This holds only if no head, feature or sequence of the batch affects another one. Therefore the weights are applied
to random values, and the result is compared with the output for these. The recording is checked too: repeated with
the model's own values, it must give the model's output. If one differs, the attention is missed, with the reason.

``PROBED_MODULES`` says of each class which of its parts gives the values.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.capture.call_site import CallSite, UnsupportedCallError, get_call_site, suppress_reports
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.module_stack import get_class_name, get_num_heads
from jumok.look.capture.observer import ObservedCall
from jumok.look.capture.patching import AttributePatch, Function
from jumok.look.capture.value_trace import ValueTrace

# Largest difference between the output and the weighted values, relative to the largest output.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
MAX_PROBES = 1024  # for one source of values: 65,536 keys if heads have 64 features


class ValueFlow(NamedTuple):
    """Where the values of a module come from, and where they go."""

    values: tuple[str, ...]  # children, or arguments of ``forward``: (B, K, C)
    outputs: tuple[str, ...] = ()  # children that take the output (B, Q, C); none: ``forward`` returns it
    position_dim: int = 1  # 0: the values are (K, B, C)
    has_shared_positions: bool = False  # several children give values of the same positions
    has_reversed_outputs: bool = False  # its outputs are computed in the opposite order of its values


_LONGFORMER = ValueFlow(("value", "value_global"), position_dim=0, has_shared_positions=True)

PROBED_MODULES: tuple[tuple[str, ValueFlow], ...] = (
    (r"LongformerSelfAttention|LEDEncoderSelfAttention", _LONGFORMER),
    (r"BigBird(Pegasus)?BlockSparseAttention", ValueFlow(("value",))),
    (r"LongT5(Local|TransientGlobal)Attention", ValueFlow(("v",), ("o",))),
    (r"PegasusXGlobalLocalAttention", ValueFlow(("v_proj",), ("out_proj",), has_reversed_outputs=True)),
    (r"ProphetNetNgramSelfAttention", ValueFlow(("value_proj",), ("out_proj",))),
    (r"(LSH|Local)SelfAttention", ValueFlow(("value",))),  # of Reformer
    (r"GroupViTAssignAttention", ValueFlow(("v_proj",), ("proj",))),
    (
        r"(MM)?GroundingDinoBiMultiHeadAttention",
        ValueFlow(("values_vision_proj", "values_text_proj"), ("out_vision_proj", "out_text_proj")),
    ),
    (r"Gemma3nAudioAttention", ValueFlow(("v_proj",))),
    (r"Gemma4AudioAttention", ValueFlow(("v_proj",), ("post",))),
    (r"(DFine|Deimv2)MultiscaleDeformableAttention", ValueFlow(("encoder_hidden_states",))),
    (r"\w*MultiscaleDeformableAttention|MSDeformAttn", ValueFlow(("value_proj",), ("output_proj",))),
)


def list_patches(model: nn.Module) -> Iterator[AttributePatch]:
    """List the patches of the classes of the model that are probed."""
    classes = {type(module): module for module in model.modules()}
    for cls, module in classes.items():
        flow = _find_flow(module)
        if flow is not None:
            yield AttributePatch(cls, "forward", functools.partial(_wrap_forward, flow))


def _find_flow(module: nn.Module) -> ValueFlow | None:
    """Return the flow of the values in a module; None if it is not probed."""
    name = get_class_name(module)
    flow = next((flow for pattern, flow in PROBED_MODULES if re.fullmatch(pattern, name)), None)
    if flow is None or isinstance(module, torch.jit.ScriptModule):
        return None
    names = {*dict(module.named_children()), *inspect.signature(type(module).forward).parameters}
    return flow if {*flow.values, *flow.outputs} <= names else None


def _wrap_forward(flow: ValueFlow, forward: Function) -> Function:
    signature = inspect.signature(forward)

    def probed_forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        site = get_call_site(self)
        if site is None or site.owner is not self:
            return forward(self, *args, **options)
        if site.is_modified:
            raise InputError(
                f"knock_out: {site.observers[0][1]} computes its weights in parts ({get_class_name(self)}), "
                "which cannot be modified"
            )
        if site.report_excluded():
            with suppress_reports(entirely=True):
                return forward(self, *args, **options)
        trace = ValueTrace()
        with suppress_reports(entirely=True), ExitStack() as stack:
            for name in flow.values:
                child = getattr(self, name, None)
                if isinstance(child, nn.Module):
                    handle = child.register_forward_hook(lambda module, inputs, out: trace.add_source(out))
                    stack.callback(handle.remove)
            for name in flow.outputs:
                handle = self.get_submodule(name).register_forward_pre_hook(
                    lambda module, inputs: trace.add_output(inputs[0])
                )
                stack.callback(handle.remove)
            stack.enter_context(trace)
            arguments = signature.bind(self, *args, **options).arguments
            for name in flow.values:
                if isinstance(arguments.get(name), Tensor):
                    trace.add_source(arguments[name])
            result = forward(self, *args, **options)
            if not flow.outputs:
                trace.add_output(result if isinstance(result, Tensor) else result[0])
        _report_maps(site, self, trace, flow)
        return result

    return probed_forward


def _report_maps(site: CallSite, module: nn.Module, trace: ValueTrace, flow: ValueFlow) -> None:
    """Report the maps of the outputs. Outputs of the same values are one map: its queries follow each other."""
    calls: list[ObservedCall] = []

    def read_call() -> ObservedCall:
        calls.extend(_probe(module, trace, flow))
        return calls[0]

    if site.read_call(read_call) is not None:
        for call in calls:
            site.report(call)


def _probe(module: nn.Module, trace: ValueTrace, flow: ValueFlow) -> list[ObservedCall]:
    """Return the attention of each group of outputs that depend on the same values."""
    if not trace.values or not trace.outputs:
        names = ", ".join(flow.values)
        raise UnsupportedCallError(f"its output does not come from its part {names} in this call; it may use a cache")
    if trace.is_random:
        raise UnsupportedCallError("its dropout is active, and its weights are computed in parts; call model.eval()")
    num_heads = get_num_heads(module) or 1
    groups: dict[frozenset[int], list[int]] = {}
    indexed_sources = list(enumerate(trace.output_sources))
    for index, sources in reversed(indexed_sources) if flow.has_reversed_outputs else indexed_sources:
        groups.setdefault(sources, []).append(index)
    return [
        ObservedCall(_ValueProbing(trace, flow, num_heads, sorted(sources), outputs).build_attention())
        for sources, outputs in groups.items()
    ]


class _ValueProbing:
    """Measures the weights of some outputs on some sources of values."""

    def __init__(
        self, trace: ValueTrace, flow: ValueFlow, num_heads: int, sources: list[int], outputs: list[int]
    ) -> None:
        self.trace, self.flow, self.num_heads, self.sources, self.outputs = trace, flow, num_heads, sources, outputs
        self.dtype = torch.promote_types(trace.values[0].dtype, torch.float32)
        self.width = trace.values[sources[0]].shape[-1]
        if self.width % num_heads or any(trace.values[source].shape[-1] != self.width for source in sources):
            raise UnsupportedCallError(f"its values of width {self.width} are not those of {num_heads} heads")
        self.output_scale = max(float(trace.outputs[index].abs().max()) for index in outputs) or 1.0

    def build_attention(self) -> CapturedAttention:
        """Measure the weights ``(B, H, Q, K)`` and check them."""
        own_values = [x.to(self.dtype) for x in self.trace.values]
        actual = self.select_outputs(self.trace.outputs)
        self.check_equal(self.replay(own_values), actual, "it computes something that cannot be repeated")
        zeros = [torch.zeros_like(x) for x in own_values]
        baseline = self.replay(zeros)
        self.check_equal(baseline, torch.zeros_like(actual), "its output has other parts than the values of this call")
        generator = torch.Generator(device=actual.device).manual_seed(0)
        sample = [torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator) for x in zeros]
        if self.flow.has_shared_positions:
            sample = [sample[0]] * len(sample)
        weighted_sample = baseline.clone()
        entries: list[tuple[Tensor, Tensor, Tensor]] = []  # row in (B · H · Q), key, weight
        num_keys = 0
        for sources in self.group_sources():
            num_source_keys = self.split_values(sample[sources[0]]).shape[1]
            for first_key, weights in self.iterate_weights(sources, zeros, baseline, num_source_keys):
                values = self.split_values(sample[sources[0]])[:, first_key : first_key + weights.shape[3]]
                weighted_sample += torch.einsum("bhqk,bkhd->bqhd", weights, values)
                rows, keys = weights.flatten(0, 2).nonzero().unbind(1)
                entries.append((rows, keys + (num_keys + first_key), weights.flatten(0, 2)[rows, keys]))
            num_keys += num_source_keys
        reason = "its output is not a sum of its values with one weight for each head and key"
        self.check_equal(weighted_sample, self.replay(sample), reason)
        rows, keys, weights = (torch.cat(parts) for parts in zip(*entries, strict=True))
        if bool((weights < 0).any()):
            raise UnsupportedCallError("some of its weights are negative: they do not form a distribution")
        batch, num_queries, heads, _ = actual.shape
        shape = batch, heads, num_queries, num_keys
        if 2 * len(weights) < batch * heads * num_queries * num_keys:
            return CapturedAttention.from_sparse_weights(rows, keys, weights, shape)
        whole = weights.new_zeros(shape)
        whole.view(-1, num_keys)[rows, keys] = weights
        return CapturedAttention.from_weights(whole)

    def group_sources(self) -> list[list[int]]:
        """Return the sources that have the same positions, in order."""
        return [self.sources] if self.flow.has_shared_positions else [[source] for source in self.sources]

    def check_equal(self, outputs: Tensor, expected: Tensor, reason: str) -> None:
        tolerance = TOLERANCES[self.trace.values[0].dtype] * max(float(expected.abs().max()), self.output_scale)
        if not float((outputs - expected).abs().max()) <= tolerance:
            raise UnsupportedCallError(reason)

    def iterate_weights(
        self, sources: list[int], probes: list[Tensor], baseline: Tensor, num_keys: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Iterate over the keys of sources: the first key, and the weights ``(B, H, Q, some keys)``.

        ``probes`` are zeros, and zeros again afterwards.
        """
        width = self.width // self.num_heads
        if num_keys > MAX_PROBES * width:
            raise UnsupportedCallError(f"its weights on {num_keys:,} keys would take too long to measure")
        for first_key in range(0, num_keys, width):
            count = min(width, num_keys - first_key)
            diagonals = [
                self.split_values(probes[source])[:, first_key : first_key + count].diagonal(dim1=1, dim2=3)
                for source in sources
            ]  # views (B, H, count)
            for diagonal in diagonals:
                diagonal.fill_(1)
            outputs = self.replay(probes) - baseline
            for diagonal in diagonals:
                diagonal.fill_(0)
            yield first_key, outputs[..., :count].permute(0, 2, 1, 3)

    def replay(self, values: list[Tensor]) -> Tensor:
        """Return the outputs ``(B, Q, H, D)`` for these values."""
        return self.select_outputs(self.trace.replay(values))

    def select_outputs(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs ``(B, Q, H, D)``: their queries follow each other."""
        parts = [self.split_heads(outputs[index].to(self.dtype)) for index in self.outputs]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def split_values(self, values: Tensor) -> Tensor:
        """Return values ``(B, K, H, D)``, as a view."""
        return self.split_heads(values.transpose(0, 1) if self.flow.position_dim == 0 else values)

    def split_heads(self, x: Tensor) -> Tensor:
        """Return ``(B, length, H, D)`` for ``(B, …, C)`` or ``(B, …, H, D)``; a view for ``(B, length, C)``."""
        x = x.flatten(-2) if x.shape[-1] != self.width else x
        x = x.flatten(1, -2) if x.dim() > 3 else x
        return x.view(*x.shape[:2], self.num_heads, -1)
