"""The attention of Hugging Face's models, which look up how to attend by the name of an implementation.

Under ``sdpa`` and ``flex_attention``, what is called in the end is seen there. Under ``eager`` and
``flash_attention_…`` the arguments tell all. Another one is seen if it comes down to one of the former.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jumok.look.capture.adapters import flash, flex, softmax
from jumok.look.capture.adapters.call_site import (
    CallSite,
    get_call_site,
    provide_call_hints,
    suppress_reports,
)
from jumok.look.capture.adapters.patching import Function, WrapperFactory, patch_attribute
from jumok.look.capture.captured_attention import CapturedAttention

LEADING_ARGUMENTS = (
    "module",
    "query",
    "key",
    "value",
    "attention_mask",
)  # every implementation begins with these
WEIGHT_TOLERANCE = 0.02  # weights computed twice in bfloat16 differ by less
PACKED_ARGUMENTS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "cu_seqlens",
)  # arguments for several sequences in one row


def get_wrappers() -> dict[Function, WrapperFactory]:
    """For the function that calls a compiled FlexAttention, which it keeps to itself."""
    module = sys.modules.get("transformers.integrations.flex_attention")
    return {} if module is None else {module.compile_friendly_flex_attention: _wrap_compiled_flex}


@contextmanager
def install_patches() -> Iterator[None]:
    """While it lasts, implementations that models look up are told of."""
    module = sys.modules.get("transformers.modeling_utils")
    if module is None:  # then the model is none of theirs
        yield
        return
    with patch_attribute(module.AttentionInterface, "get_interface", _wrap_get_interface):
        yield


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
        if torch.compiler.is_compiling() or get_call_site() is None:
            return attention
        return _wrap_implementation(attention, str(attn_implementation))

    return get


class _HuggingFaceCall(NamedTuple):
    """A call of an implementation."""

    module: nn.Module
    query: Tensor  # (B, H, Q, D)
    key: Tensor  # (B, G, K, D)
    value: Tensor
    mask: Any
    options: dict[str, Any]

    @property
    def scale(self) -> float:
        told: float | None = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if told is None else told


def _wrap_implementation(attention: Function, implementation: str) -> Function:
    def attend(*args: Any, **options: Any) -> Any:
        def run() -> Any:
            return attention(*args, **options)

        named = dict(zip(LEADING_ARGUMENTS, args, strict=False)) | options
        site = get_call_site(named["module"])
        if site is None:
            return run()
        first = (named["module"], named["query"], named["key"], named["value"])
        given = _HuggingFaceCall(*first, mask=named.get("attention_mask"), options=options)
        if implementation in ("eager", "None"):
            return _run_eager(site, given, run)
        if "flash" in implementation:
            return _run_flash(site, given, run)
        return _run_other(site, given, implementation, run)

    return attend


def _run_eager(site: CallSite, call: _HuggingFaceCall, run: Function) -> Any:
    """``softmax(q kᵀ + bias + mask) v``, written out by each model."""
    with suppress_reports(entirely=False), softmax.catch_scores() as scores:
        out = run()

    def make() -> CapturedAttention:
        mask = call.mask[..., : call.key.shape[2]] if isinstance(call.mask, Tensor) else None
        bias = call.options.get("position_bias")
        if bias is not None:
            mask = bias if mask is None else bias + mask
        return CapturedAttention(call.query, call.key, call.scale, call.options.get("softcap"), mask)

    kept, sink = site.try_capture(make), getattr(call.module, "sinks", None)
    if kept is not None and len(scores) == 1 and scores[0].dim() == 4 and not _scores_match(kept, scores[0]):
        kept, sink = softmax.capture_scores(scores[0]), None  # this model does something of its own there
    if kept is not None:
        site.report(kept, sink=sink)
    return out


def _scores_match(attention: CapturedAttention, scores: Tensor) -> bool:
    """Whether the softmax that ran was that of these scores: some rows tell. A sink may stand behind."""
    batch, heads, queries, keys = attention.shape
    if scores.shape[:3] != attention.shape[:3] or scores.shape[3] - keys not in (0, 1):
        return False
    rows = torch.tensor([0, queries // 2, queries - 1], device=scores.device)
    for entry in {0, batch - 1}:
        expected = attention.compute_weights(entry, slice(heads - 1, heads), rows, slice(0, keys))[0]
        found = scores[entry, -1, rows, :keys].detach().to(expected.dtype).softmax(-1)
        alive = expected.any(-1)  # a row without an allowed key says nothing
        if not bool(((found - expected).abs().amax(-1) < WEIGHT_TOLERANCE)[alive].all()):
            return False
    return True


def _run_flash(site: CallSite, call: _HuggingFaceCall, run: Function) -> Any:
    """FlashAttention: the mask is 0/1 ``(B, K)``, causal is aligned at the bottom right."""
    with suppress_reports(entirely=True):
        result = run()
    if any(call.options.get(name) is not None for name in PACKED_ARGUMENTS):
        site.report_missed("FlashAttention over packed sequences; give it one sequence a row")
        return result

    def make() -> CapturedAttention:
        keys, window, causal = (
            call.key.shape[2],
            call.options.get("sliding_window"),
            call.options.get("is_causal"),
        )
        causal = getattr(call.module, "is_causal", True) if causal is None else causal
        left = None if window is None else window - 1  # so many keys before a query, and as many after it
        mask = None if call.mask is None else call.mask[:, None, None, -keys:].bool()
        return flash.capture_windowed_attention(
            call.query, call.key, call.scale, call.options.get("softcap"), mask, left, 0 if causal else left
        )

    kept = site.try_capture(make)
    if kept is None:
        return result
    out = result[0].transpose(1, 2)  # (B, H, Q, D)
    changed = site.modify_output(kept, call.value, out)
    site.report(kept, sink=call.options.get("s_aux"))
    return result if changed is out else (changed.transpose(1, 2), *result[1:])


def _run_other(site: CallSite, call: _HuggingFaceCall, implementation: str, run: Function) -> Any:
    before = [frame.has_attention for frame in site.frames]
    for frame in site.frames:
        frame.has_attention = False
    with provide_call_hints(keys=call.key):
        out = run()
    if not any(frame.has_attention for frame in site.frames):
        site.report_missed(
            f"transformers' implementation {implementation!r} calls a kernel that tells nothing of itself; "
            "load the model with attn_implementation='sdpa'"
        )
    for frame, saw in zip(site.frames, before, strict=True):
        frame.has_attention |= saw
    return out
