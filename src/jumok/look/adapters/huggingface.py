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

from jumok.look.adapters import flash, flex, softmax
from jumok.look.adapters.patches import Function, Make, attribute
from jumok.look.adapters.site import Site, here, known, told
from jumok.look.kept import Kept

FIRST = ("module", "query", "key", "value", "attention_mask")  # every implementation begins with these
CLOSE = 0.02  # weights computed twice in bfloat16 differ by less
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")  # arguments for several sequences in one row


def stand_ins() -> dict[Function, Make]:
    """For the function that calls a compiled FlexAttention, which it keeps to itself."""
    module = sys.modules.get("transformers.integrations.flex_attention")
    return {} if module is None else {module.compile_friendly_flex_attention: _flex}


@contextmanager
def watched() -> Iterator[None]:
    """While it lasts, implementations that models look up are told of."""
    module = sys.modules.get("transformers.modeling_utils")
    if module is None:  # then the model is none of theirs
        yield
        return
    with attribute(module.AttentionInterface, "get_interface", _interface):
        yield


def _flex(attention: Function) -> Function:
    def compile_friendly_flex_attention(
        query: Tensor, key: Tensor, value: Tensor, training: bool = False, **options: Any
    ) -> Any:
        def compiled(*args: Any, **others: Any) -> Any:
            return attention(*args, training=training, **others)

        return flex.watching(compiled)(query, key, value, **options)

    return compile_friendly_flex_attention


def _interface(get_interface: Function) -> Function:
    def get(self: Any, attn_implementation: Any, default: Any) -> Any:
        attention = get_interface(self, attn_implementation, default)
        if torch.compiler.is_compiling() or here() is None:
            return attention
        return _watching(attention, str(attn_implementation))

    return get


class _Given(NamedTuple):
    """A call of an implementation."""

    module: nn.Module
    query: Tensor  # (B, H, Q, D)
    key: Tensor  # (B, G, K, D)
    value: Tensor
    mask: Any
    more: dict[str, Any]

    @property
    def scale(self) -> float:
        told: float | None = self.more.get("scaling")
        return self.query.shape[-1] ** -0.5 if told is None else told


def _watching(attention: Function, implementation: str) -> Function:
    def attend(*args: Any, **options: Any) -> Any:
        def run() -> Any:
            return attention(*args, **options)

        named = dict(zip(FIRST, args, strict=False)) | options
        site = here(named["module"])
        if site is None:
            return run()
        first = (named["module"], named["query"], named["key"], named["value"])
        given = _Given(*first, mask=named.get("attention_mask"), more=options)
        if implementation in ("eager", "None"):
            return _eager(site, given, run)
        if "flash" in implementation:
            return _flash(site, given, run)
        return _other(site, given, implementation, run)

    return attend


def _eager(site: Site, given: _Given, run: Function) -> Any:
    """``softmax(q kᵀ + bias + mask) v``, written out by each model."""
    with told(entirely=False), softmax.caught() as scores:
        out = run()

    def make() -> Kept:
        mask = given.mask[..., : given.key.shape[2]] if isinstance(given.mask, Tensor) else None
        bias = given.more.get("position_bias")
        if bias is not None:
            mask = bias if mask is None else bias + mask
        return Kept(given.query, given.key, given.scale, given.more.get("softcap"), mask)

    kept, sink = site.made(make), getattr(given.module, "sinks", None)
    if kept is not None and len(scores) == 1 and scores[0].dim() == 4 and not _agree(kept, scores[0]):
        kept, sink = softmax.kept_scores(scores[0]), None  # this model does something of its own there
    if kept is not None:
        site.saw(kept, sink=sink)
    return out


def _agree(kept: Kept, scores: Tensor) -> bool:
    """Whether the softmax that ran was that of these scores: some rows tell. A sink may stand behind."""
    batch, heads, queries, keys = kept.shape
    if scores.shape[:3] != kept.shape[:3] or scores.shape[3] - keys not in (0, 1):
        return False
    rows = torch.tensor([0, queries // 2, queries - 1], device=scores.device)
    for entry in {0, batch - 1}:
        expected = kept.weights(entry, slice(heads - 1, heads), rows, slice(0, keys))[0]
        found = scores[entry, -1, rows, :keys].detach().to(expected.dtype).softmax(-1)
        alive = expected.any(-1)  # a row without an allowed key says nothing
        if not bool(((found - expected).abs().amax(-1) < CLOSE)[alive].all()):
            return False
    return True


def _flash(site: Site, given: _Given, run: Function) -> Any:
    """FlashAttention: the mask is 0/1 ``(B, K)``, causal is aligned at the bottom right."""
    with told(entirely=True):
        result = run()
    if any(given.more.get(name) is not None for name in PACKED):
        site.cannot("FlashAttention over packed sequences; give it one sequence a row")
        return result

    def make() -> Kept:
        keys, window, causal = (
            given.key.shape[2],
            given.more.get("sliding_window"),
            given.more.get("is_causal"),
        )
        causal = getattr(given.module, "is_causal", True) if causal is None else causal
        left = None if window is None else window - 1  # so many keys before a query, and as many after it
        mask = None if given.mask is None else given.mask[:, None, None, -keys:].bool()
        return flash.kept(
            given.query, given.key, given.scale, given.more.get("softcap"), mask, left, 0 if causal else left
        )

    kept = site.made(make)
    if kept is None:
        return result
    out = result[0].transpose(1, 2)  # (B, H, Q, D)
    changed = site.output(kept, given.value, out)
    site.saw(kept, sink=given.more.get("s_aux"))
    return result if changed is out else (changed.transpose(1, 2), *result[1:])


def _other(site: Site, given: _Given, implementation: str, run: Function) -> Any:
    before = [frame.saw for frame in site.frames]
    for frame in site.frames:
        frame.saw = False
    with known(keys=given.key):
        out = run()
    if not any(frame.saw for frame in site.frames):
        site.cannot(
            f"transformers' implementation {implementation!r} calls a kernel that tells nothing of itself; "
            "load the model with attn_implementation='sdpa'"
        )
    for frame, saw in zip(site.frames, before, strict=True):
        frame.saw |= saw
    return out
