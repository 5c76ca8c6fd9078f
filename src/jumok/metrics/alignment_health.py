"""Did a voice read its text? Figures of an alignment (steps × symbols) that tell, and two alarms.

Speech goes through its text once, from the first symbol to the last. What can go wrong shows::

    ■ · · · ·     · · ■ · ·     ■ · · · ·     ■ · · · ·
    · ■ · · ·     · · ■ · ·     · ■ · · ·     · ■ · · ·
    · · ■ · ·     · · ■ · ·     · · · · ■     · · ■ · ·
    · · · ■ ·     · · ■ · ·     · · · · ■     ■ · · · ·
    · · · · ■     · · ■ · ·     · · · · ■     · ■ · · ·

    as it is      it stays      it leaves     it says
    meant         where it is   symbols out   some twice

=============  ====================================================================================
diagonality    how much of the weight is near the diagonal: 1 all of it, 0 no more than by chance
coverage       how much of the text is looked at: the mean over symbols of the sum they get, at most 1
entropy        how widely a step looks: 0 at one symbol only, 1 at all alike
skipped        the symbols that hardly anything looked at
repeated       the symbols that were come back to, after others further on
=============  ====================================================================================

Styles have figures too: of weights of style tokens (utterances × heads × tokens), whether the utterances
differ in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jumok.errors import InputError

__all__ = [
    "AlignmentHealth",
    "average_alignment_health",
    "diagnose_attention",
    "diagnose_style",
    "measure_alignment_health",
    "measure_style_effect",
    "measure_style_health",
]

DIAGONAL_WIDTH = 0.2  # of the whole way: so far from the diagonal is near it
MIN_SYMBOL_WEIGHT = 0.1  # of a step's weight: less in all steps together, and a symbol was skipped
MAX_BACKWARD_STEP = 1  # so many symbols back is wavering, not a return
MIN_DIAGONALITY = 0.5  # attention is diagonal from here on
MIN_PROGRESS = 0.3  # of the training, before it counts as never
MIN_STYLE_SPREAD = 0.02  # styles of all utterances are this much alike: they are the same


@dataclass(frozen=True)
class AlignmentHealth:
    """The figures of one alignment."""

    diagonality: float
    coverage: float
    entropy: float
    skipped: tuple[int, ...]  # which symbols, from 0 on
    repeated: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the text was read, nothing left out and nothing said twice."""
        # What looks everywhere alike leaves nothing out either, but it does not read.
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
    """The figures of one utterance, whose steps looked at its symbols with the weights ``(T, L)``.

    A weight at step t and symbol n is near the diagonal if it is at most ``diagonal_width`` of the whole way from where
    that symbol would be, if all took equally long: symbol n from n/L to (n + 1)/L, step t at (t + ½)/T. Of a
    short text much is near the diagonal, wherever one looks. So what looking everywhere alike would have
    there is taken off: ``(weight − chance) / (1 − chance)``, or 0 if that is below.

    ``has_end_symbol`` says that the last symbol stands for the end of the text: it has no sound, and who stops without
    having looked there has skipped nothing.

    >>> print(measure_alignment_health(torch.eye(4)))
    diagonality 1.00, coverage 1.00, entropy 0.00, 0 skipped, 0 repeated
    >>> stuck = torch.tensor([[1.0, 0.0, 0.0]] * 3)
    >>> measure_alignment_health(stuck).skipped, measure_alignment_health(stuck, has_end_symbol=True).skipped
    ((1, 2), (1,))
    """
    if alignment.dim() != 2 or 0 in alignment.shape:
        raise InputError(
            f"alignment_health: an alignment of shape {tuple(alignment.shape)} came; expected (steps, "
            "symbols) of one utterance, at least one of each, without padding"
        )
    w = alignment.detach().double().cpu()
    steps, symbols = w.shape
    time = (torch.arange(steps) + 0.5) / steps
    middle = (torch.arange(symbols) + 0.5) / symbols
    beside = (time[:, None] - middle).abs() - 0.5 / symbols  # how far from the stretch of the symbol
    is_near = beside <= diagonal_width + 1e-9
    chance = is_near.double().mean().item()
    weight = w.where(is_near, 0.0).sum().item() / max(w.sum().item(), 1e-9)
    received = w.sum(0)[: symbols - 1 if has_end_symbol and symbols > 1 else symbols]
    widest = math.log(symbols) if symbols > 1 else 1.0  # one symbol alone leaves no choice
    return AlignmentHealth(
        diagonality=max(0.0, (weight - chance) / (1 - chance)) if chance < 1 else weight,
        coverage=received.clamp(max=1.0).mean().item(),
        entropy=torch.special.entr(w).sum(1).mean().item() / widest,
        skipped=tuple(torch.nonzero(received < MIN_SYMBOL_WEIGHT).flatten().tolist()),
        repeated=_find_repeated(w.argmax(1).tolist()),
    )


def _find_repeated(path: Sequence[int]) -> tuple[int, ...]:
    """The symbols of a path, a symbol a step, that come again once it has gone back."""
    again: set[int] = set()
    furthest, is_back = -1, False
    for symbol in path:
        if symbol > furthest:
            furthest, is_back = symbol, False
        is_back = is_back or symbol < furthest - MAX_BACKWARD_STEP
        if is_back:
            again.add(symbol)
    return tuple(sorted(again))


def average_alignment_health(
    alignments: Sequence[Tensor] | Tensor,
    step_counts: Sequence[int],
    symbol_counts: Sequence[int],
    *,
    has_end_symbol: bool = False,
) -> dict[str, float]:
    """The means over utterances, of alignments ``(T, L)`` of which so many steps and symbols are real.

    "whole" is the share of utterances that were read, with nothing skipped or repeated; "skipped" and
    "repeated" are shares of all symbols. ``has_end_symbol`` is as in :func:`measure_alignment_health`.

    >>> figures = average_alignment_health(torch.eye(3)[None], step_counts=[3], symbol_counts=[3])
    >>> figures["alignment/diagonality"], figures["alignment/whole"]
    (1.0, 1.0)
    """
    if not len(alignments) == len(step_counts) == len(symbol_counts):
        raise InputError(
            f"alignments_health: {len(alignments)} alignments came with {len(step_counts)} numbers of steps and "
            f"{len(symbol_counts)} of symbols; one of each is expected for every utterance"
        )
    if not len(alignments):
        return {}
    each = [
        measure_alignment_health(alignment[:height, :width], has_end_symbol=has_end_symbol)
        for alignment, height, width in zip(alignments, step_counts, symbol_counts, strict=True)
    ]
    number, text = len(each), sum(symbol_counts)
    return {
        "alignment/diagonality": sum(one.diagonality for one in each) / number,
        "alignment/coverage": sum(one.coverage for one in each) / number,
        "alignment/entropy": sum(one.entropy for one in each) / number,
        "alignment/skipped": sum(len(one.skipped) for one in each) / text,
        "alignment/repeated": sum(len(one.repeated) for one in each) / text,
        "alignment/whole": sum(one.is_complete for one in each) / number,
    }


@torch.no_grad()
def measure_style_health(weights: Tensor) -> dict[str, float]:
    """Figures of the weights ``(B, H, N)`` that H heads give N style tokens, in B utterances.

    ==============  ===========================================================================
    style/entropy   how widely a head looks: 0 at one token only, 1 at all alike
    style/spread    how much utterances differ: the mean share of a head's weight that is elsewhere than it is
                    on average; 0 all have the same style
    style/tokens    how many tokens are in use, at most N: exp of the entropy of the mean weights
    ==============  ===========================================================================

    >>> measure_style_health(torch.eye(2)[:, None])  # two utterances, each with a token of its own
    {'style/entropy': 0.0, 'style/spread': 0.5, 'style/tokens': 2.0}
    """
    if weights.dim() != 3 or 0 in weights.shape:
        raise InputError(
            f"style_health: weights of shape {tuple(weights.shape)} came; expected (utterances, heads, "
            "tokens)"
        )
    w = weights.detach().double().cpu()
    mean = w.mean(0)  # (H, N)
    widest = math.log(w.shape[2]) if w.shape[2] > 1 else 1.0
    return {
        "style/entropy": torch.special.entr(w).sum(-1).mean().item() / widest,
        "style/spread": (w - mean).abs().sum(-1).mean().item() / 2,
        "style/tokens": torch.special.entr(mean).sum(-1).exp().mean().item(),
    }


@torch.no_grad()
def measure_style_effect(own_style: Tensor, other_style: Tensor, frame_counts: Sequence[int]) -> float:
    """How much sounds change with the style, as a share of how much frames differ at all.

    ``own_style`` and ``other_style`` ``(B, T, M)`` are mels of the same utterances, each with its own style and with that
    of another; ``frame_counts`` says how many are real.

    >>> own = torch.tensor([[[1.0], [3.0]]])  # 1 away from their mean
    >>> measure_style_effect(own, own + 0.25, frame_counts=[2])
    0.25
    """
    if own_style.shape != other_style.shape or own_style.dim() != 3 or len(own_style) != len(frame_counts):
        raise InputError(
            f"style_effect: mels {tuple(own_style.shape)} and {tuple(other_style.shape)} came with {len(frame_counts)} numbers "
            "of frames; expected twice the same (utterances, frames, mels), and a number for each utterance"
        )
    real = torch.arange(own_style.shape[1]) < torch.tensor(frame_counts)[:, None]
    mine, theirs = (x.detach().double().cpu()[real] for x in (own_style, other_style))  # (frames, M)
    differ = (mine - mine.mean(0)).abs().mean()
    return float((mine - theirs).abs().mean() / differ) if differ > 0 else 0.0


# --------------------------------------------------------------------------------------------- alarms


def diagnose_attention(diagonality: Sequence[float], progress: float) -> str | None:
    """What to say if attention never became diagonal, though so much of the training (0 to 1) is done.

    ``diagonality`` are the figures so far, one an evaluation. None: there is nothing to say, or not yet.

    >>> diagnose_attention([0.38, 0.41], progress=0.2)
    >>> diagnose_attention([0.38, 0.41, 0.40], progress=0.5)[:31]
    'attention never became diagonal'
    """
    figures = [figure for figure in diagonality if not math.isnan(figure)]
    if progress < MIN_PROGRESS or not figures or max(figures) >= MIN_DIAGONALITY:
        return None
    return (
        f"attention never became diagonal: its diagonality was at most {max(figures):.2f}, with {progress:.0%} "
        f"of the training done ({MIN_DIAGONALITY} or more is expected by then). It does not read, "
        "and what it says will be babble. What may help: more steps (the learning rate "
        "rises for train.warmup of them), model.alignment_loss=0.1 for sentences or model.guided_attention_loss=1 for single words, "
        "silence cut off at both ends of the recordings (sound.trim), a larger model.reduction"
    )


def diagnose_style(figures: dict[str, float], progress: float) -> str | None:
    """What to say if style tokens do nothing, though so much of the training is done.

    ``figures`` are those of :func:`measure_style_health`; "style/effect", if it is there, is :func:`measure_style_effect`.

    >>> diagnose_style({"style/spread": 0.3, "style/tokens": 4.0}, progress=0.5)
    >>> diagnose_style({"style/spread": 0.001, "style/tokens": 9.9}, progress=0.5)[:23]
    'style tokens do nothing'
    """
    spread, effect = figures.get("style/spread", math.nan), figures.get("style/effect", math.nan)
    if progress < MIN_PROGRESS or not (spread < MIN_STYLE_SPREAD or effect < MIN_STYLE_SPREAD):
        return None
    why = (
        f"all utterances get the same mix of tokens (spread {spread:.3f})"
        if spread < MIN_STYLE_SPREAD
        else f"whatever the style is, the sound stays the same (effect {effect:.3f})"
    )
    return (
        f"style tokens do nothing: {why}, with {progress:.0%} of the training done. What may help: recordings "
        "whose styles differ, fewer model.style.tokens, a larger model.style.width, more model.dropout"
    )
