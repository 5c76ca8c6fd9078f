"""Attention that computes its weights in another layout than queries × keys: chunks, blocks, buckets, samples.

Such modules have no softmax over the keys that multiplies the values once. Their output is still linear in the
values, so the weights are read off it: the part of the module that depends on the values is recorded
(:mod:`..value_trace`), and computed again with probes in place of the values. In a probe, each feature of a head is 1
at one position and 0 elsewhere, so one run gives the weights on as many keys as a head has features.

This holds only if no head, feature or sequence of the batch affects another one. Therefore the weights are applied
to the model's own values, and the result is compared with the model's output. If it differs, the attention is
missed, with this reason.

``PROBED_MODULES`` says of each class which of its parts gives the values.
"""

from __future__ import annotations

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
            yield AttributePatch(cls, "forward", lambda forward, flow=flow: _wrap_forward(forward, flow))


def _find_flow(module: nn.Module) -> ValueFlow | None:
    """Return the flow of the values in a module; None if it is not probed."""
    name = get_class_name(module)
    flow = next((flow for pattern, flow in PROBED_MODULES if re.fullmatch(pattern, name)), None)
    if flow is None or isinstance(module, torch.jit.ScriptModule):
        return None
    names = {*dict(module.named_children()), *inspect.signature(type(module).forward).parameters}
    return flow if {*flow.values, *flow.outputs} <= names else None


def _wrap_forward(forward: Function, flow: ValueFlow) -> Function:
    signature = inspect.signature(forward)

    def probed_forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        site = get_call_site(self)
        if site is None or site.module is not self:
            return forward(self, *args, **options)
        if site.is_modified:
            raise InputError(
                f"knock_out: {site.observers[0][1]} computes its weights in parts ({get_class_name(self)}), "
                "which cannot be modified"
            )
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
        raise UnsupportedCallError(f"{get_class_name(module)} did not compute its output from its values")
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

    def build_attention(self) -> CapturedAttention:
        """Measure the weights ``(B, H, Q, K)`` and check them."""
        zeros = [self.new_values(source) for source in range(len(self.trace.values))]
        baseline = self.select_outputs(self.trace.replay(zeros))
        actual = self.select_outputs(self.trace.outputs)
        weighted_values = baseline.clone()
        batch, num_queries, heads, _ = actual.shape
        entries: list[tuple[Tensor, Tensor, Tensor]] = []  # row in (B · H · Q), key, weight
        num_keys = 0
        for source in self.sources:
            for first_key, weights in self.iterate_weights(source, baseline):
                values = self.get_values(source)[:, first_key : first_key + weights.shape[3]]
                weighted_values += torch.einsum("bhqk,bkhd->bqhd", weights, values)
                rows, keys = weights.flatten(0, 2).nonzero().unbind(1)
                offset = first_key if self.flow.has_shared_positions else num_keys + first_key
                entries.append((rows, keys + offset, weights.flatten(0, 2)[rows, keys]))
            size = self.get_values(source).shape[1]
            num_keys = max(num_keys, size) if self.flow.has_shared_positions else num_keys + size
        self.check(weighted_values, baseline, actual)
        rows, keys, weights = (torch.cat(parts) for parts in zip(*entries, strict=True))
        if bool((weights < 0).any()):
            raise UnsupportedCallError("some of its weights are negative: they do not form a distribution")
        return _build_attention(rows, keys, weights, (batch, heads, num_queries, num_keys))

    def check(self, weighted_values: Tensor, baseline: Tensor, actual: Tensor) -> None:
        """Check that the output is the sum of the weighted values, and nothing else."""
        tolerance = TOLERANCES[self.trace.values[0].dtype] * max(float(actual.abs().max()), 1e-12)
        if not float(baseline.abs().max()) <= tolerance:
            raise UnsupportedCallError("its output does not come from its values alone")
        if not float((weighted_values - actual).abs().max()) <= tolerance:
            raise UnsupportedCallError("its output is not a sum of its values with one weight for each head and key")

    def iterate_weights(self, source: int, baseline: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Iterate over the keys of a source: the first key, and the weights ``(B, H, Q, some keys)``."""
        size, head_width = self.get_values(source).shape[1], self.width // self.num_heads
        if size > MAX_PROBES * head_width:
            raise UnsupportedCallError(f"{size:,} keys are too many: its weights are computed in parts")
        probes = [self.new_values(index) for index in range(len(self.trace.values))]
        for first_key in range(0, size, head_width):
            count = min(head_width, size - first_key)
            probe = self.split_heads(probes[source].zero_(), self.flow.position_dim)
            for feature in range(count):
                probe[:, first_key + feature, :, feature] = 1
            outputs = self.select_outputs(self.trace.replay(probes)) - baseline
            yield first_key, outputs[..., :count].permute(0, 2, 1, 3)

    def new_values(self, source: int) -> Tensor:
        """Return zeros in place of the values of a source."""
        return torch.zeros_like(self.trace.values[source], dtype=self.dtype, memory_format=torch.contiguous_format)

    def get_values(self, source: int) -> Tensor:
        """Return the model's own values ``(B, K, H, D)``."""
        return self.split_heads(self.trace.values[source], self.flow.position_dim).to(self.dtype)

    def select_outputs(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs ``(B, Q, H, D)``: their queries follow each other."""
        return torch.cat([self.split_heads(outputs[index].to(self.dtype)) for index in self.outputs], dim=1)

    def split_heads(self, x: Tensor, position_dim: int = 1) -> Tensor:
        """Return ``(B, length, H, D)`` for ``(B, …, C)`` or ``(length, B, C)``; a view if it is one of these."""
        x = x.flatten(-2) if x.shape[-1] != self.width else x
        x = x.transpose(0, 1) if position_dim == 0 else x
        return x.flatten(1, -2).unflatten(-1, (self.num_heads, -1))


def _build_attention(
    rows: Tensor, keys: Tensor, weights: Tensor, shape: tuple[int, int, int, int]
) -> CapturedAttention:
    """Build the attention from its nonzero weights."""
    batch, heads, num_queries, num_keys = shape
    num_rows = batch * heads * num_queries
    counts = torch.bincount(rows, minlength=num_rows)
    max_count = int(counts.max())
    if 2 * max_count >= num_keys:
        # The weights of two sources at the same position are a sum.
        whole = weights.new_zeros(num_rows * num_keys).index_add_(0, rows * num_keys + keys, weights)
        return CapturedAttention.from_weights(whole.view(shape))
    order = rows.argsort(stable=True)
    rows, keys, weights = rows[order], keys[order], weights[order]
    slots = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    sparse_weights, positions = (weights.new_zeros(num_rows, max_count) for _ in range(2))
    sparse_weights[rows, slots], positions[rows, slots] = weights, keys.to(weights.dtype)
    size = (batch, heads, num_queries, max_count)
    return CapturedAttention.from_sparse_weights(sparse_weights.view(size), positions.view(size), num_keys)
