"""The attention of Hugging Face models, which look up their implementation by name.

``sdpa`` and ``flex_attention`` are captured by the adapters of the functions that they call. For ``eager``
and ``flash_attention_…`` the arguments are sufficient. Other implementations are captured if they call one of
the former.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jumok.look.capture.adapters import flash, flex, handwritten, paged_attention
from jumok.look.capture.call_site import (
    CallHints,
    CallSite,
    get_call_site,
    is_observing,
    provide_hints,
    suppress_reports,
)
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.observer import ObservedCall
from jumok.look.capture.patching import AttributePatch, Function, FunctionPatch

LEADING_ARGUMENTS = ("module", "query", "key", "value", "attention_mask")  # of every implementation
WEIGHT_TOLERANCE = 0.02  # weights computed twice in bfloat16 differ by less


def list_patches(model: nn.Module) -> Iterator[FunctionPatch | AttributePatch]:
    """List the patches of the lookup and of the function that calls the compiled FlexAttention."""
    if (module := sys.modules.get("transformers.modeling_utils")) is not None:
        yield AttributePatch(module.AttentionInterface, "get_interface", _wrap_get_interface)
    if (module := sys.modules.get("transformers.integrations.flex_attention")) is not None:
        yield FunctionPatch(module.compile_friendly_flex_attention, _wrap_compiled_flex)


def _wrap_compiled_flex(attention: Function) -> Function:
    def compile_friendly_flex_attention(
        query: Tensor, key: Tensor, value: Tensor, training: bool = False, **options: Any
    ) -> Any:
        def compiled(*args: Any, **others: Any) -> Any:
            return attention(*args, training=training, **others)

        return flex.wrap_flex_attention(compiled)(query, key, value, **options)

    return compile_friendly_flex_attention


def _wrap_get_interface(get_interface: Function) -> Function:
    def get(self: Any, attn_implementation: Any, default: Any) -> Any:
        attention = get_interface(self, attn_implementation, default)
        return _wrap_implementation(attention, str(attn_implementation)) if is_observing() else attention

    return get


class _ImplementationCall(NamedTuple):
    """A call of an implementation."""

    module: nn.Module
    query: Tensor  # (B, H, Q, D)
    key: Tensor  # (B, G, K, D)
    value: Tensor
    mask: Any
    options: dict[str, Any]

    @property
    def scale(self) -> float:
        scaling: float | None = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else scaling


def _wrap_implementation(attention: Function, implementation: str) -> Function:
    def attend(*args: Any, **options: Any) -> Any:
        arguments = dict(zip(LEADING_ARGUMENTS, args, strict=False)) | options
        site = get_call_site(arguments["module"])
        if site is None:
            return attention(*args, **options)
        leading = (arguments["module"], arguments["query"], arguments["key"], arguments["value"])
        call = _ImplementationCall(*leading, mask=arguments.get("attention_mask"), options=options)

        def run() -> Any:
            return attention(*args, **options)

        is_packed = paged_attention.is_packed(call.query, call.mask, options)
        if _calls_flash(attention, implementation):
            # A kernel for packed sequences gets what shows where each of them is.
            return _run_other(site, call, implementation, run) if is_packed else _run_flash(site, call, run)
        if is_packed and options.get("cache") is not None:
            return paged_attention.run_paged(site, call.query, call.mask, call.scale, options, run)
        if implementation in ("eager", "None"):
            return _run_eager(site, call, run)
        return _run_other(site, call, implementation, run)

    return attend


def _calls_flash(attention: Function, implementation: str) -> bool:
    """Return whether this is FlashAttention, whatever the name of its kernel on the hub."""
    module = sys.modules.get("transformers.integrations.flash_attention")
    return "flash" in implementation or attention is getattr(module, "flash_attention_forward", None)


def _run_eager(site: CallSite, call: _ImplementationCall, run: Function) -> Any:
    """Run ``softmax(q kᵀ + bias + mask) v``, as written out by each model."""
    with suppress_reports(entirely=False), handwritten.catch_scores() as scores:
        out = run()

    def read_call() -> ObservedCall:
        mask = call.mask[..., : call.key.shape[2]] if isinstance(call.mask, Tensor) else None
        bias = call.options.get("position_bias")
        if bias is not None:
            mask = bias if mask is None else bias + mask
        attention = CapturedAttention(call.query, call.key, call.scale, call.options.get("softcap"), mask)
        sink, num_keys = getattr(call.module, "sinks", None), call.key.shape[2]
        if len(scores) == 1 and scores[0].dim() == 4 and not _scores_match(attention, scores[0], sink):
            # This model modifies its scores, or has a sink for each query.
            if scores[0].shape[3] == num_keys + 1:
                sink = scores[0][..., -1]
                return ObservedCall(CapturedAttention.from_scores(scores[0][..., :-1]), sink=sink)
            return ObservedCall(CapturedAttention.from_scores(scores[0]))
        return ObservedCall(attention, sink=sink)

    observed = site.read_call(read_call)
    if observed is not None:
        site.report(observed)
    return out


def _scores_match(attention: CapturedAttention, scores: Tensor, sink: Tensor | None) -> bool:
    """Return whether these are the scores of the softmax that ran, by comparing some rows.

    The scores of a sink may follow those of the keys.
    """
    batch, heads, queries, keys = attention.shape
    has_sink = scores.shape[3] == keys + 1
    if scores.shape[:3] != attention.shape[:3] or scores.shape[3] != keys + has_sink:
        return False
    if has_sink and (not isinstance(sink, Tensor) or sink.shape != (heads,)):
        return False
    rows = torch.tensor([0, queries // 2, queries - 1], device=scores.device)
    for batch_index in {0, batch - 1}:
        expected = attention.compute_weights(batch_index, slice(heads - 1, heads), rows, slice(0, keys))[0]
        has_keys = expected.any(-1)  # rows without a visible key are not compared
        lse = attention.get_lse(batch_index, slice(heads - 1, heads), rows)
        if has_sink and sink is not None and lse is not None:
            expected = expected * (lse[0] - sink.detach()[-1].to(lse)).sigmoid()[:, None]
        actual = scores[batch_index, -1, rows].detach().to(expected.dtype).softmax(-1)[:, :keys]
        if not bool(((actual - expected).abs().amax(-1) < WEIGHT_TOLERANCE)[has_keys].all()):
            return False
    return True


def _run_flash(site: CallSite, call: _ImplementationCall, run: Function) -> Any:
    """Run FlashAttention: the mask is 0/1 ``(B, K)``, causal is aligned at the bottom right."""
    with suppress_reports(entirely=True):
        result = run()

    def read_call() -> ObservedCall:
        options = call.options
        window, causal = options.get("sliding_window"), options.get("is_causal")
        causal = getattr(call.module, "is_causal", True) if causal is None else causal
        left = None if window is None else window - 1  # number of keys before a query, and after it
        mask = None if call.mask is None else call.mask[:, None, None, -call.key.shape[2] :].bool()
        attention = flash.capture_windowed_attention(
            call.query, call.key, call.scale, options.get("softcap"), mask, left, 0 if causal else left
        )
        return ObservedCall(attention, call.value, sink=options.get("s_aux"), is_bqhd=True)

    observed = site.read_call(read_call)
    if observed is None:
        return result
    result = site.modify_result(observed, result)
    site.report(observed)
    return result


def _run_other(site: CallSite, call: _ImplementationCall, implementation: str, run: Function) -> Any:
    states_before = [(frame.has_attention, frame.is_reported) for frame in site.frames]
    for frame in site.frames:
        frame.has_attention = frame.is_reported = False
    with provide_hints(CallHints(call.query, call.key, module=call.module)):
        out = run()
    if not any(frame.has_attention or frame.is_reported for frame in site.frames):
        site.report_missed(
            f"transformers' implementation {implementation!r} calls a kernel that cannot be captured; "
            "load the model with attn_implementation='sdpa'"
        )
    for frame, (had_attention, was_reported) in zip(site.frames, states_before, strict=True):
        frame.has_attention |= had_attention
        frame.is_reported |= was_reported
    return out
