"""Tacotron (Wang 2017): from symbols to the frames of a voice, with where in the text each frame comes from.

::

    text  ─ pre-net ─ CBHG ─ (+ style) ─────────────┐
                                                    │ keys, values
    frame r before ─ pre-net ─ GRU ── query ─── attention ── found ─┬─ GRUs ─┬─ r mel frames ─ (refined)
                                ↑                                   │        └─ r times: was that the last?
                                └──────── at the next step ─────────┘

    mels ─ CBHG ─ linear spectra                                                if they are wanted

A step says r frames (the *reduction*) and is given the last frame of the step before: in training the true
one, else its own (:mod:`jumok.models.frame_decoder`).

Attention is additive or location-sensitive (:mod:`jumok.models.aligner`), and may be taught to go through the
text from left to right (:mod:`jumok.models.monotone`), or be told where it is, if that is known. A style, if
there is one, comes in training from the sound itself (:mod:`jumok.models.style`). What is made of mels
afterwards: :mod:`jumok.models.postnet`.

Shapes: ``B`` utterances, ``L`` symbols, ``T`` frames, ``S = T / r`` steps (rounded up), ``M`` mels, ``F``
frequencies; widths: ``W`` of a GRU, ``D`` of a symbol's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.batch import Loss, Map, Tokens
from jumok.models.aligner import Aligner, Text
from jumok.models.cbhg import CBHG
from jumok.models.frame_decoder import FrameDecoder, PreNet, Spoken
from jumok.models.labels import exact
from jumok.models.monotone import guided_cost
from jumok.models.postnet import Refiner, Spectra
from jumok.models.style import StyleConfig, StyleTokens
from jumok.speech import Speech, frames_of

__all__ = ["Said", "Tacotron", "TacotronConfig"]

UNLIKELY = 1e-4  # what is added to weights, so that looking elsewhere does not cost beyond all measure
ASKED_EVERY = 8  # steps: on a GPU, whether all utterances are over is asked only then, for it has to wait


@dataclass(frozen=True)
class TacotronConfig:
    """The sizes of a :class:`Tacotron` and how it learns.

    That of the paper: ``attention="additive", refine=0, linear=1025``.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["tacotron"] = "tacotron"
    mels: int = 80  # M
    linear: int = 0  # F; 0: no linear spectra, waveforms are made of mels
    reduction: int = 2  # r, frames a step
    # The encoder:
    embedding: int = 256
    encoder: int = 128  # width of its CBHG, which reads both ways
    banks: int = 16  # the widest convolution there
    highways: int = 4
    # The decoder:
    prenet: tuple[int, int] = (256, 128)  # of both pre-nets
    dropout: float = 0.5  # in both pre-nets
    drops_at_rest: bool = False  # in the decoder's also when it speaks, as in Tacotron 2: never twice alike
    width: int = 256  # of its GRUs
    layers: int = 2  # of GRUs behind attention
    refine: int = 5  # convolutions that refine mels (Tacotron 2); 0: none do
    refine_width: int = 256
    # Attention:
    attention: Literal["additive", "location-sensitive"] = "location-sensitive"
    attention_width: int = 128
    filters: int = 32  # of what has been looked at so far
    kernel: int = 31
    forward_attention: bool = False
    guided: float = 0.0  # what looking far from the diagonal costs in training
    guided_width: float = 0.2  # g: how far is far
    placed: float = 0.0  # what looking elsewhere than at the symbol that is spoken costs in training
    # Stopping:
    stop: float = 1.0  # how much it counts
    stop_weight: float = 5.0  # how much more the one last frame counts than another
    style: StyleConfig | None = None  # None: one voice, one style

    def __post_init__(self) -> None:
        sizes = "mels reduction embedding encoder banks width attention_width refine_width filters kernel"
        for name in sizes.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        for name in ("linear", "highways", "layers", "refine", "guided", "placed", "stop"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: 0 or more is expected")
        for name in ("guided_width", "stop_weight"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: more than 0 is expected")
        if min(self.prenet) < 1:
            raise ValueError(f"prenet={self.prenet}: two numbers of 1 or more are expected")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: a share from 0 to below 1 is expected")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel}: an odd number is expected, so that there is a middle")


@dataclass(frozen=True, eq=False)
class Said:
    """What a model said. Behind the end of an utterance are zeros."""

    mels: Tensor  # (B, T, M), in at least float32
    frames: tuple[int, ...]  # how many are real
    alignments: Tensor  # (B, S, L): where each step looked in the text
    steps: tuple[int, ...]  # how many of them are real
    linear: Tensor | None  # (B, T, F)
    cut: tuple[bool, ...]  # of each, whether it had not come to its end


@dataclass(frozen=True, eq=False)
class _Told:
    """A model's way through sounds that it is told."""

    text: Text
    spoken: Spoken  # all of its frames, S r of them
    target: Tensor  # (B, T, M): the true mels, zero at padding


class Tacotron(nn.Module):
    """Says texts.

    >>> model = Tacotron(TacotronConfig(mels=5, embedding=8, encoder=4, width=8), symbols=11).eval()
    >>> batch = Speech.of([[7, 8, 3], [9, 3]], [torch.randn(6, 5), torch.randn(3, 5)])
    >>> model.loss(batch).count, model.maps(batch)[0].weights.shape
    (9, torch.Size([2, 1, 3, 3]))
    >>> said = model.say(batch.text, longest=7)
    >>> said.mels.shape[2], max(said.frames) <= 7
    (5, True)
    """

    compiles = False  # torch.compile would unroll the loop over the steps

    def __init__(self, config: TacotronConfig, symbols: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(symbols, config.embedding)
        self.prenet = PreNet(config.embedding, config.prenet, config.dropout, drops_at_rest=False)
        self.encoder = CBHG(config.prenet[1], config.encoder, config.banks, config.highways)
        self.style = None if config.style is None else StyleTokens(config.style, config.mels)
        if config.style is not None:
            self.of_style = nn.Linear(config.style.width, 2 * config.encoder, bias=False)
            if config.style.eager:
                with torch.no_grad():
                    self.of_style.weight *= 2.0  # heard from the start, as its tokens are told apart
        states = 2 * config.encoder
        location = (config.filters, config.kernel) if config.attention == "location-sensitive" else None
        self.decoder = FrameDecoder(
            PreNet(config.mels, config.prenet, config.dropout, drops_at_rest=config.drops_at_rest),
            Aligner(
                config.width,
                states,
                config.attention_width,
                location=location,
                moves_on=config.forward_attention,
            ),
            width=config.width,
            states=states,
            layers=config.layers,
            frames=(config.reduction, config.mels),
        )
        self.refiner = Refiner(config.mels, config.refine_width, config.refine) if config.refine else None
        self.spectra = Spectra(config.mels, config.linear, config.encoder) if config.linear else None

    # ------------------------------------------------------------------------------------- training

    def loss(self, batch: Speech) -> Loss:
        """Summed over real frames: the mean absolute error of mels and of linear spectra, and stopping.

        The parts, as they stand in the total: "mel"; "coarse", the mels before they are refined; "linear";
        "stop", the cross-entropy of which frame is the last; and in training "guided" and, where the batch
        tells which symbols are spoken, "placed".
        """
        told = self._told(batch)
        sound, real = batch.sound, batch.sound.real
        longest = real.shape[1]

        def error(said: Tensor, true: Tensor) -> Tensor:
            return (exact(said) - true).abs().mean(-1).where(real, 0.0).sum()

        coarse, stops = told.spoken.mels[:, :longest], told.spoken.stops[:, :longest]
        mels = self._refined(coarse, sound)
        is_last = torch.arange(longest, device=real.device) == sound.sizes[:, None] - 1
        surprise = F.binary_cross_entropy_with_logits(
            stops,
            is_last.to(stops.dtype),
            pos_weight=stops.new_full((), self.config.stop_weight),
            reduction="none",
        )
        costs = {"mel": error(mels, told.target)}
        if self.refiner is not None:
            costs["coarse"] = error(coarse, told.target)
        if self.spectra is not None:
            costs["linear"] = error(self.spectra(mels, sound), self._true_spectra(batch))
        costs["stop"] = self.config.stop * surprise.where(real, 0.0).sum()
        teaching = self._teaching(told, batch)
        total = torch.stack([*costs.values(), *(teaching.values() if self.training else ())]).sum()
        costs |= teaching
        return Loss(total, batch.count, {name: cost.detach() for name, cost in costs.items()})

    @torch.no_grad()
    def told(self, batch: Speech, *, style: Tensor | None = None) -> Tensor:
        """The mels ``(B, T, M)`` of a model that is told the sound before each step, zero at padding.

        ``style`` is that of the sounds themselves, or as in :meth:`say`.
        """
        real = batch.sound.real
        coarse = self._told(batch, style).spoken.mels[:, : real.shape[1]]
        return self._refined(coarse, batch.sound).where(real[..., None], 0.0)

    def _told(self, batch: Speech, style: Tensor | None = None) -> _Told:
        if batch.mels.shape[2] != self.config.mels:
            raise ValueError(
                f"mels of shape {tuple(batch.mels.shape)} came; the model has {self.config.mels} mels"
            )
        real = batch.sound.real
        target = batch.mels.to(self.embedding.weight.dtype).where(real[..., None], 0.0)
        if self.style is not None and style is None:
            style = self.style(target, batch.sound)
            if batch.reference is not None:
                style = style.index_select(0, batch.reference)
        text = self._read(batch.text, style)
        r = self.config.reduction
        steps = -(-target.shape[1] // r)
        before = target[:, r - 1 :: r][:, : steps - 1]  # the last frame of each step but the last
        spoken, _ = self.decoder(F.pad(before, (0, 0, 1, 0)), self.decoder.start(text))
        return _Told(text, spoken, target)

    def _teaching(self, told: _Told, batch: Speech) -> dict[str, Tensor]:
        """What it costs to look where it should not."""
        config, costs = self.config, {}
        if not config.guided and (not config.placed or batch.places is None):
            return {}
        weights = self.decoder.weights(told.spoken, told.text)  # (B, S, L)
        if config.guided:
            costs["guided"] = config.guided * self._guided(weights, batch)
        if config.placed and batch.places is not None:
            costs["placed"] = config.placed * self._placed(exact(weights), batch.places)
        return costs

    def _guided(self, weights: Tensor, batch: Speech) -> Tensor:
        """Each step costs as often as it has real frames."""
        r, sizes = self.config.reduction, batch.sound.sizes
        cost = guided_cost(weights, _steps(sizes, r), batch.text.sizes, self.config.guided_width)
        said = sizes[:, None] - r * torch.arange(weights.shape[1], device=sizes.device)  # from there on
        return (cost * said.clamp(0, r)).sum()

    def _placed(self, weights: Tensor, places: Tensor) -> Tensor:
        """For each frame, the surprise that its step looks at its symbol."""
        r = self.config.reduction
        by_step = F.pad(places, (0, weights.shape[1] * r - places.shape[1]), value=-1).unflatten(1, (-1, r))
        there = weights.gather(2, by_step.clamp(min=0))  # (B, S, r)
        return -(there + UNLIKELY).log().where(by_step >= 0, 0.0).sum()

    def _true_spectra(self, batch: Speech) -> Tensor:
        if batch.linear is None or batch.linear.shape[2] != self.config.linear:
            came = "none" if batch.linear is None else f"shape {tuple(batch.linear.shape)}"
            raise ValueError(
                f"the model makes linear spectra of {self.config.linear} frequencies, and the batch has "
                f"{came}; give it some, or the model linear=0"
            )
        return batch.linear.where(batch.sound.real[..., None], 0.0)

    @torch.no_grad()
    def maps(self, batch: Speech) -> list[Map]:
        """Where each step looked in the text, ``(B, 1, S, L)``, and which style tokens are in each sound."""
        told = self._told(batch)
        weights = self.decoder.weights(told.spoken, told.text)
        steps = torch.arange(weights.shape[1], device=weights.device)
        real = steps < _steps(batch.sound.sizes, self.config.reduction)[:, None]
        found = [Map("decoder.attention", (weights * real[..., None])[:, None])]
        if self.style is not None:
            found.append(Map("style.attention", self.style.weights(told.target, batch.sound)[:, :, None]))
        return found

    # ------------------------------------------------------------------------------------- speaking

    @torch.no_grad()
    def say(self, text: Tokens, *, style: Tensor | None = None, longest: int) -> Said:
        """Each text until the model says that this was the last frame, or ``longest`` frames are said.

        ``style`` is ``(B, W)``, or ``(1, W)`` or ``(W,)`` for all; None: the usual one of its training.
        """
        if longest < 1:
            raise ValueError(f"longest={longest}: 1 frame or more is expected")
        if self.style is not None and style is None:
            style = self.style.mix(self.style.usual)
        state = self.decoder.start(self._read(text, style))
        r = self.config.reduction
        frame = self.embedding.weight.new_zeros(len(text.lengths), 1, self.config.mels)
        said: list[tuple[Tensor, Tensor, Tensor]] = []
        over = torch.zeros(len(frame), dtype=torch.bool, device=frame.device)
        for step in range(-(-longest // r)):
            spoken, state = self.decoder(frame, state)
            ends = spoken.stops > 0
            said.append((spoken.mels, ends, self.decoder.weights(spoken, state.text)))
            frame, over = spoken.mels[:, -1:].to(frame.dtype), over | ends.any(1)
            asks = not frame.is_cuda or step % ASKED_EVERY == ASKED_EVERY - 1
            if asks and bool(over.all()):
                break
        mels, ends, weights = (torch.cat(each, 1) for each in zip(*said, strict=True))
        ends = ends[:, :longest]
        stopped = ends.any(1)
        sizes = torch.where(stopped, ends.int().argmax(1) + 1, ends.shape[1])
        frames: tuple[int, ...] = tuple(sizes.tolist())
        mels, weights = mels[:, : max(frames)], weights[:, : -(-max(frames) // r)]
        sound = frames_of(mels, frames)
        real = sound.real[..., None]
        mels = self._refined(mels, sound).where(real, 0.0)
        steps = tuple(-(-number // r) for number in frames)
        weights = weights.where(frames_of(weights, steps).real[..., None], 0.0)
        linear = None if self.spectra is None else exact(self.spectra(mels, sound)).where(real, 0.0)
        cut = tuple((~stopped).tolist())
        return Said(mels, frames, weights, steps, linear, cut)

    def style_of(self, mels: Tensor, frames: Sequence[int]) -> Tensor:
        """The styles ``(B, W)`` of sounds ``(B, T, M)`` with so many real frames."""
        return self._tokens()(mels, frames_of(mels, frames))  # type: ignore[no-any-return]

    def style_from(self, weights: Tensor) -> Tensor:
        """The styles ``(B, W)`` of weights of tokens, ``(B, N)``, or ``(B, H, N)`` by head."""
        return self._tokens().mix(weights)

    def _tokens(self) -> StyleTokens:
        if self.style is None:
            raise ValueError("the model has no style tokens: train one whose config has a style")
        return self.style

    # ------------------------------------------------------------------------------- what both share

    def _read(self, text: Tokens, style: Tensor | None) -> Text:
        if text.packed or min(text.lengths, default=0) < 1:
            raise ValueError(
                f"texts came {'packed' if text.packed else f'with lengths {list(text.lengths)}'}; each is "
                "expected in a row of its own, with one symbol or more, such as </s>"
            )
        states = self.encoder(self.prenet(self.embedding(text.ids)), text)
        if style is not None:
            width, rows = self._tokens().config.width, len(states)
            if style.shape not in ((width,), (1, width), (rows, width)):
                raise ValueError(
                    f"a style of shape {tuple(style.shape)} came for {rows} texts; expected "
                    f"({rows}, {width}), or ({width},) for all"
                )
            states = states + self.of_style(style.expand(rows, width))[:, None]
        return self.decoder.attention.prepare(states, text.mask)

    def _refined(self, mels: Tensor, sound: Tokens) -> Tensor:
        return mels if self.refiner is None else exact(self.refiner(mels, sound))


def _steps(frames: Tensor, reduction: int) -> Tensor:
    return (frames + reduction - 1) // reduction
