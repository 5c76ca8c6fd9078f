"""Health of the attention of a speech model: metrics of its alignments (steps × symbols), and diagnoses.

Speech goes through its text once, from the first symbol to the last. An alignment shows what goes wrong::

    ■ · · · ·     · · ■ · ·     ■ · · · ·     ■ · · · ·
    · ■ · · ·     · · ■ · ·     · ■ · · ·     · ■ · · ·
    · · ■ · ·     · · ■ · ·     · · · · ■     · · ■ · ·
    · · · ■ ·     · · ■ · ·     · · · · ■     ■ · · · ·
    · · · · ■     · · ■ · ·     · · · · ■     · ■ · · ·

    correct       stuck         skips         repeats
                                symbols       symbols

=============  ====================================================================================
diagonality    share of the weight near the diagonal: 1 for all of it, 0 for no more than by chance
coverage       attention that a symbol receives, summed over steps and at most 1: the mean over symbols
entropy        entropy of a step, normalized: 0 for a single symbol, 1 for uniform attention
skipped        symbols that receive almost no attention
repeated       symbols to which attention returns after later ones
=============  ====================================================================================

There are also metrics of the weights of style tokens (utterances × heads × tokens): they tell whether the
styles of utterances differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jumok.errors import InputError

DIAGONAL_WIDTH = 0.2  # distance from the diagonal, as a fraction of the text, that counts as near
MIN_SYMBOL_WEIGHT = 0.1  # a symbol with less weight, summed over all steps, is skipped
MAX_BACKWARD_STEP = 1  # moving back by this many symbols is no repetition
MIN_DIAGONALITY = 0.5  # attention with at least this diagonality is diagonal
MIN_PROGRESS = 0.3  # fraction of the training before a diagnosis is made
MIN_STYLE_SPREAD = 0.02  # below this spread, all utterances have the same style


@dataclass(frozen=True)
class AlignmentHealth:
    """Metrics of one alignment."""

    diagonality: float
    coverage: float
    entropy: float
    skipped: tuple[int, ...]  # indices of symbols
    repeated: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the text was read without skipping or repeating a symbol."""
        # Uniform attention skips nothing either, but it is not diagonal.
        return self.diagonality >= MIN_DIAGONALITY and not self.skipped and not self.repeated

    def __str__(self) -> str:
        return (
            f"diagonality {self.diagonality:.2f}, coverage {self.coverage:.2f}, entropy {self.entropy:.2f}, "
            f"{len(self.skipped)} skipped, {len(self.repeated)} repeated"
        )


@torch.no_grad()
def measure_alignment_health(
    alignment: Tensor, *, diagonal_width: float = DIAGONAL_WIDTH, has_end_symbol: bool = False
) -> AlignmentHealth:
    """Metrics of one utterance, from its attention weights ``(T, L)``: T steps by L symbols.

    If all symbols took equally long, symbol n would last from n/L to (n + 1)/L, and step t is at (t + ½)/T. A
    weight is near the diagonal if these are at most ``diagonal_width`` apart. In a short text, much is near
    the diagonal in any case. The diagonality therefore subtracts the share that uniform attention has there:
    ``(weight − chance) / (1 − chance)``, at least 0.

    ``has_end_symbol``: the last symbol marks the end of the text. It has no sound and cannot be skipped.

    >>> print(measure_alignment_health(torch.eye(4)))
    diagonality 1.00, coverage 1.00, entropy 0.00, 0 skipped, 0 repeated
    >>> stuck = torch.tensor([[1.0, 0.0, 0.0]] * 3)
    >>> measure_alignment_health(stuck).skipped, measure_alignment_health(stuck, has_end_symbol=True).skipped
    ((1, 2), (1,))
    """
    if alignment.dim() != 2 or 0 in alignment.shape:
        raise InputError(
            f"the alignment has shape {tuple(alignment.shape)}; expected (steps, symbols) of one utterance, "
            "at least one of each, without padding"
        )
    w = alignment.detach().double().cpu()
    steps, symbols = w.shape
    time = (torch.arange(steps) + 0.5) / steps
    middle = (torch.arange(symbols) + 0.5) / symbols
    distance = (time[:, None] - middle).abs() - 0.5 / symbols  # from the interval of the symbol
    is_near = distance <= diagonal_width + 1e-9
    chance = is_near.double().mean().item()
    weight = w.where(is_near, 0.0).sum().item() / max(w.sum().item(), 1e-9)
    received = w.sum(0)[: symbols - 1 if has_end_symbol and symbols > 1 else symbols]
    max_entropy = math.log(symbols) if symbols > 1 else 1.0  # avoids 0 / 0 for a single symbol
    return AlignmentHealth(
        diagonality=max(0.0, (weight - chance) / (1 - chance)) if chance < 1 else weight,
        coverage=received.clamp(max=1.0).mean().item(),
        entropy=torch.special.entr(w).sum(1).mean().item() / max_entropy,
        skipped=tuple(torch.nonzero(received < MIN_SYMBOL_WEIGHT).flatten().tolist()),
        repeated=_find_repeated(w.argmax(1).tolist()),
    )


def _find_repeated(path: Sequence[int]) -> tuple[int, ...]:
    """The symbols that a path visits after it has moved back. A path has one symbol per step."""
    repeated: set[int] = set()
    furthest, is_back = -1, False
    for symbol in path:
        if symbol > furthest:
            furthest, is_back = symbol, False
        is_back = is_back or symbol < furthest - MAX_BACKWARD_STEP
        if is_back:
            repeated.add(symbol)
    return tuple(sorted(repeated))


def average_alignment_health(
    alignments: Sequence[Tensor] | Tensor,
    step_counts: Sequence[int],
    symbol_counts: Sequence[int],
    *,
    has_end_symbol: bool = False,
) -> dict[str, float]:
    """Means over utterances, from padded alignments ``(T, L)`` and their numbers of valid steps and symbols.

    "complete" is the share of utterances that were read without skipping or repeating a symbol. "skipped" and
    "repeated" are shares of all symbols. For ``has_end_symbol`` see :func:`measure_alignment_health`.

    >>> metrics = average_alignment_health(torch.eye(3)[None], step_counts=[3], symbol_counts=[3])
    >>> metrics["alignment/diagonality"], metrics["alignment/complete"]
    (1.0, 1.0)
    """
    if not len(alignments) == len(step_counts) == len(symbol_counts):
        raise InputError(
            f"there are {len(alignments)} alignments, {len(step_counts)} step_counts and "
            f"{len(symbol_counts)} symbol_counts; expected one of each for every utterance"
        )
    if not len(alignments):
        return {}
    healths = [
        measure_alignment_health(alignment[:num_steps, :num_symbols], has_end_symbol=has_end_symbol)
        for alignment, num_steps, num_symbols in zip(alignments, step_counts, symbol_counts, strict=True)
    ]
    num_utterances, total_symbols = len(healths), sum(symbol_counts)
    return {
        "alignment/diagonality": sum(health.diagonality for health in healths) / num_utterances,
        "alignment/coverage": sum(health.coverage for health in healths) / num_utterances,
        "alignment/entropy": sum(health.entropy for health in healths) / num_utterances,
        "alignment/skipped": sum(len(health.skipped) for health in healths) / total_symbols,
        "alignment/repeated": sum(len(health.repeated) for health in healths) / total_symbols,
        "alignment/complete": sum(health.is_complete for health in healths) / num_utterances,
    }


@torch.no_grad()
def measure_style_health(weights: Tensor) -> dict[str, float]:
    """Metrics of the weights ``(B, H, N)`` of N style tokens, for B utterances and H heads.

    ==============  ===========================================================================
    style/entropy   entropy of a head, normalized: 0 for a single token, 1 for uniform weights
    style/spread    how much utterances differ: mean total variation distance between the weights of an
                    utterance and the mean weights; 0 if all have the same style
    style/tokens    number of tokens in use, at most N: exp of the entropy of the mean weights
    ==============  ===========================================================================

    >>> measure_style_health(torch.eye(2)[:, None])  # two utterances with one token each
    {'style/entropy': 0.0, 'style/spread': 0.5, 'style/tokens': 2.0}
    """
    if weights.dim() != 3 or 0 in weights.shape:
        raise InputError(f"the style weights have shape {tuple(weights.shape)}; expected (utterances, heads, tokens)")
    w = weights.detach().double().cpu()
    mean = w.mean(0)  # (H, N)
    max_entropy = math.log(w.shape[2]) if w.shape[2] > 1 else 1.0
    return {
        "style/entropy": torch.special.entr(w).sum(-1).mean().item() / max_entropy,
        "style/spread": (w - mean).abs().sum(-1).mean().item() / 2,
        "style/tokens": torch.special.entr(mean).sum(-1).exp().mean().item(),
    }


@torch.no_grad()
def measure_style_effect(own_style: Tensor, other_style: Tensor, frame_counts: Sequence[int]) -> float:
    """How much the style changes the mels, relative to the variation of frames.

    ``own_style`` and ``other_style`` ``(B, T, M)`` are mels of the same utterances, with their own style and
    with the style of another utterance. ``frame_counts`` are the numbers of valid frames.

    >>> own = torch.tensor([[[1.0], [3.0]]])  # at distance 1 from their mean
    >>> measure_style_effect(own, own + 0.25, frame_counts=[2])
    0.25
    """
    if own_style.shape != other_style.shape or own_style.dim() != 3 or len(own_style) != len(frame_counts):
        raise InputError(
            f"the mels have shapes {tuple(own_style.shape)} and {tuple(other_style.shape)}, and there are "
            f"{len(frame_counts)} frame_counts; expected the same (utterances, frames, mels) twice, and one "
            "count for each utterance"
        )
    is_valid = torch.arange(own_style.shape[1]) < torch.tensor(frame_counts)[:, None]
    own, other = (x.detach().double().cpu()[is_valid] for x in (own_style, other_style))  # (frames, M)
    variation = (own - own.mean(0)).abs().mean()
    return float((own - other).abs().mean() / variation) if variation > 0 else 0.0


# ------------------------------------------------------------------------------------------ diagnoses


def diagnose_attention(diagonality: Sequence[float], progress: float) -> str | None:
    """A warning if attention has not become diagonal; None if it has, or if it is too early to tell.

    ``diagonality``: the values so far, one per validation. ``progress``: the fraction of the training, 0 to
    1.

    >>> diagnose_attention([0.38, 0.41], progress=0.2)
    >>> diagnose_attention([0.38, 0.41, 0.40], progress=0.5)[:31]
    'attention never became diagonal'
    """
    values = [value for value in diagonality if not math.isnan(value)]
    if progress < MIN_PROGRESS or not values or max(values) >= MIN_DIAGONALITY:
        return None
    return (
        f"attention never became diagonal: its diagonality was at most {max(values):.2f} after "
        f"{progress:.0%} of the training (expected: {MIN_DIAGONALITY} or more). The model does not read its "
        "text, and its speech will be unintelligible. What may help: more steps (the learning rate rises "
        "for train.warmup_steps steps), model.alignment_loss=0.1 for sentences or "
        "model.guided_attention_loss=1 for single words, trimming the silence of recordings "
        "(audio.trim_db), a larger model.reduction_factor"
    )


def diagnose_style(figures: dict[str, float], progress: float) -> str | None:
    """A warning if style tokens have no effect; None if they have, or if it is too early to tell.

    ``figures``: the metrics of :func:`measure_style_health`, and optionally "style/effect" of
    :func:`measure_style_effect`. ``progress``: the fraction of the training, 0 to 1.

    >>> diagnose_style({"style/spread": 0.3, "style/tokens": 4.0}, progress=0.5)
    >>> diagnose_style({"style/spread": 0.001, "style/tokens": 9.9}, progress=0.5)[:23]
    'style tokens have no ef'
    """
    spread, effect = figures.get("style/spread", math.nan), figures.get("style/effect", math.nan)
    if progress < MIN_PROGRESS or not (spread < MIN_STYLE_SPREAD or effect < MIN_STYLE_SPREAD):
        return None
    reason = (
        f"all utterances have the same weights (spread {spread:.3f})"
        if spread < MIN_STYLE_SPREAD
        else f"the mels do not depend on the style (effect {effect:.3f})"
    )
    return (
        f"style tokens have no effect: {reason} after {progress:.0%} of the training. What may help: "
        "recordings with different styles, fewer model.style.num_tokens, a larger model.style.width, more "
        "model.dropout"
    )
