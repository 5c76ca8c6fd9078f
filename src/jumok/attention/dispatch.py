"""The choice of a path for an attention call, and the reasons against faster paths.

:data:`PATHS` lists the paths from fast to slow. The first that serves a call is taken; the reference path
serves every call. ``attend`` runs the path that :func:`choose_path` returns, and ``explain`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from jumok.attention.arguments import AttentionCall
from jumok.attention.paths import NOT_APPLICABLE, additive, additive_step, flex, reference, sdpa, varlen


@dataclass(frozen=True)
class AttentionPath:
    """One way to compute attention."""

    name: str
    describe: Callable[[AttentionCall], str]
    unsupported_reason: Callable[[AttentionCall], str | None]
    run: Callable[[AttentionCall], Tensor]


@dataclass(frozen=True)
class PathExplanation:
    """The path that serves a call, and why each faster path does not."""

    path: AttentionPath
    description: str
    rejected: tuple[tuple[str, str], ...]  # name of a faster path, reason

    @property
    def name(self) -> str:
        return self.path.name

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.description}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected]
        return "\n".join(lines)


PATHS = (
    AttentionPath(
        "additive-step",
        lambda call: "score, softmax and mix in our one Triton kernel",
        additive_step.additive_step_unsupported_reason,
        additive_step.run_additive_step,
    ),
    AttentionPath(
        "additive",
        lambda call: "scores by our Triton kernels, with projections, softmax and mix in one autograd function",
        additive.additive_unsupported_reason,
        additive.run_additive,
    ),
    AttentionPath(
        "packed-short",
        lambda call: "our Triton kernel, one program per packed document",
        varlen.short_unsupported_reason,
        varlen.run_short,
    ),
    AttentionPath(
        "varlen",
        lambda call: "FlashAttention over packed documents",
        varlen.varlen_unsupported_reason,
        varlen.run_varlen,
    ),
    AttentionPath(
        "sdpa-per-sequence",
        lambda call: "PyTorch's SDPA, one document at a time",
        varlen.per_sequence_unsupported_reason,
        varlen.run_per_sequence,
    ),
    AttentionPath("sdpa", sdpa.describe_sdpa, sdpa.sdpa_unsupported_reason, sdpa.run_sdpa),
    AttentionPath(
        "flex",
        lambda call: "FlexAttention, the block mask built from the mask's structure",
        flex.flex_unsupported_reason,
        flex.run_flex,
    ),
)
REFERENCE = AttentionPath("reference", reference.describe_reference, lambda call: None, reference.run_reference)


def choose_path(call: AttentionCall) -> PathExplanation:
    """Return the fastest path that serves the call."""
    rejected: list[tuple[str, str]] = []
    for path in PATHS:
        reason = path.unsupported_reason(call)
        if reason is None:
            return PathExplanation(path, path.describe(call), tuple(rejected))
        if reason != NOT_APPLICABLE:
            rejected.append((path.name, reason))
    return PathExplanation(REFERENCE, REFERENCE.describe(call), tuple(rejected))
