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
there is one, comes in training from the sound itself (:mod:`jumok.models.style_tokens`). What is made of mels
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

from jumok.batches.speech import SpeechBatch, frames_as_tokens
from jumok.batches.tokens import LayerAttention, Loss, Tokens
from jumok.models.layers.cbhg import CBHG
from jumok.models.layers.precision import upcast
from jumok.models.layers.monotonic_attention import guided_attention_loss
from jumok.models.layers.postnet import LinearPostnet, MelPostnet
from jumok.models.layers.style_tokens import StyleConfig, StyleTokens
from jumok.models.layers.tacotron_attention import TacotronAttention, TacotronMemory
from jumok.models.tacotron_decoder import PreNet, TacotronDecoder, TacotronDecoderOutput

__all__ = ["Tacotron", "TacotronConfig", "TacotronOutput"]

ALIGNMENT_EPS = 1e-4  # what is added to weights, so that looking elsewhere does not cost beyond all measure
STOP_CHECK_INTERVAL = (
    8  # steps: on a GPU, whether all utterances are over is asked only then, for it has to wait
)


@dataclass(frozen=True)
class TacotronConfig:
    """The sizes of a :class:`Tacotron` and how it learns.

    That of the paper: ``attention="additive", postnet_layers=0, linear=1025``.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    type: Literal["tacotron"] = "tacotron"
    n_mels: int = 80  # M
    linear_bins: int = 0  # F; 0: no linear spectra, waveforms are made of mels
    reduction_factor: int = 2  # r, frames a step
    # The encoder:
    embedding_width: int = 256
    encoder_width: int = 128  # width of its CBHG, which reads both ways
    conv_bank_size: int = 16  # the widest convolution there
    highway_layers: int = 4
    # The decoder:
    prenet_widths: tuple[int, int] = (256, 128)  # of both pre-nets
    prenet_dropout: float = 0.5  # in both pre-nets
    prenet_dropout_at_inference: bool = (
        False  # in the decoder's also when it speaks, as in Tacotron 2: never twice alike
    )
    decoder_width: int = 256  # of its GRUs
    decoder_layers: int = 2  # of GRUs behind attention
    postnet_layers: int = 5  # convolutions that refine mels (Tacotron 2); 0: none do
    postnet_width: int = 256
    # Attention:
    attention: Literal["additive", "location-sensitive"] = "location-sensitive"
    attention_width: int = 128
    location_filters: int = 32  # of what has been looked at so far
    location_kernel_size: int = 31
    forward_attention: bool = False
    guided_attention_loss: float = 0.0  # what looking far from the diagonal costs in training
    guided_attention_sigma: float = 0.2  # g: how far is far
    alignment_loss: float = 0.0  # what looking elsewhere than at the symbol that is spoken costs in training
    # Stopping:
    stop_loss: float = 1.0  # how much it counts
    stop_positive_weight: float = 5.0  # how much more the one last frame counts than another
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
        if min(self.prenet_widths) < 1:
            raise ValueError(f"prenet={self.prenet_widths}: two numbers of 1 or more are expected")
        if not 0 <= self.prenet_dropout < 1:
            raise ValueError(f"dropout={self.prenet_dropout}: a share from 0 to below 1 is expected")
        if self.location_kernel_size % 2 == 0:
            raise ValueError(
                f"kernel={self.location_kernel_size}: an odd number is expected, so that there is a middle"
            )


@dataclass(frozen=True, eq=False)
class TacotronOutput:
    """What a model said. Behind the end of an utterance are zeros."""

    mels: Tensor  # (B, T, M), in at least float32
    mel_lengths: tuple[int, ...]  # how many are real
    alignments: Tensor  # (B, S, L): where each step looked in the text
    step_lengths: tuple[int, ...]  # how many of them are real
    linear_spectrograms: Tensor | None  # (B, T, F)
    truncated: tuple[bool, ...]  # of each, whether it had not come to its end


@dataclass(frozen=True, eq=False)
class _TeacherForcedSpeech:
    """A model's way through sounds that it is told."""

    memory: TacotronMemory
    output: TacotronDecoderOutput  # all of its frames, S r of them
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

    supports_compile = False  # torch.compile would unroll the loop over the steps

    def __init__(self, config: TacotronConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.embedding_width)
        self.prenet = PreNet(
            config.embedding_width, config.prenet_widths, config.prenet_dropout, dropout_at_inference=False
        )
        self.encoder = CBHG(
            config.prenet_widths[1], config.encoder_width, config.conv_bank_size, config.highway_layers
        )
        self.style_tokens = None if config.style is None else StyleTokens(config.style, config.n_mels)
        if config.style is not None:
            self.style_projection = nn.Linear(config.style.width, 2 * config.encoder_width, bias=False)
            if config.style.large_init:
                with torch.no_grad():
                    self.style_projection.weight *= 2.0  # heard from the start, as its tokens are told apart
        states = 2 * config.encoder_width
        location = (
            (config.location_filters, config.location_kernel_size)
            if config.attention == "location-sensitive"
            else None
        )
        self.decoder = TacotronDecoder(
            PreNet(
                config.n_mels,
                config.prenet_widths,
                config.prenet_dropout,
                dropout_at_inference=config.prenet_dropout_at_inference,
            ),
            TacotronAttention(
                config.decoder_width,
                states,
                config.attention_width,
                location_filters=location,
                use_forward_attention=config.forward_attention,
            ),
            width=config.decoder_width,
            memory_width=states,
            num_layers=config.decoder_layers,
            output_shape=(config.reduction_factor, config.n_mels),
        )
        self.mel_postnet = (
            MelPostnet(config.n_mels, config.postnet_width, config.postnet_layers)
            if config.postnet_layers
            else None
        )
        self.linear_postnet = (
            LinearPostnet(config.n_mels, config.linear_bins, config.encoder_width)
            if config.linear_bins
            else None
        )

    # ------------------------------------------------------------------------------------- training

    def loss(self, batch: SpeechBatch) -> Loss:
        """Summed over real frames: the mean absolute error of mels and of linear spectra, and stopping.

        The parts, as they stand in the total: "mel"; "coarse", the mels before they are refined; "linear";
        "stop", the cross-entropy of which frame is the last; and in training "guided" and, where the batch
        tells which symbols are spoken, "placed".
        """
        told = self._run_teacher_forced(batch)
        sound, real = batch.mel_tokens, batch.mel_tokens.valid_mask
        longest = real.shape[1]

        def error(said: Tensor, true: Tensor) -> Tensor:
            return (upcast(said) - true).abs().mean(-1).where(real, 0.0).sum()

        coarse, stops = told.output.mels[:, :longest], told.output.stop_logits[:, :longest]
        mels = self._apply_postnet(coarse, sound)
        is_last = torch.arange(longest, device=real.device) == sound.lengths_tensor[:, None] - 1
        surprise = F.binary_cross_entropy_with_logits(
            stops,
            is_last.to(stops.dtype),
            pos_weight=stops.new_full((), self.config.stop_positive_weight),
            reduction="none",
        )
        costs = {"mel": error(mels, told.target)}
        if self.mel_postnet is not None:
            costs["coarse"] = error(coarse, told.target)
        if self.linear_postnet is not None:
            costs["linear"] = error(self.linear_postnet(mels, sound), self._get_target_spectrograms(batch))
        costs["stop"] = self.config.stop_loss * surprise.where(real, 0.0).sum()
        teaching = self._compute_attention_losses(told, batch)
        total = torch.stack([*costs.values(), *(teaching.values() if self.training else ())]).sum()
        costs |= teaching
        return Loss(total, batch.count, {name: cost.detach() for name, cost in costs.items()})

    @torch.no_grad()
    def predict_teacher_forced(self, batch: SpeechBatch, *, style: Tensor | None = None) -> Tensor:
        """The mels ``(B, T, M)`` of a model that is told the sound before each step, zero at padding.

        ``style_tokens`` is that of the sounds themselves, or as in :meth:`synthesize`.
        """
        real = batch.mel_tokens.valid_mask
        coarse = self._run_teacher_forced(batch, style).output.mels[:, : real.shape[1]]
        return self._apply_postnet(coarse, batch.mel_tokens).where(real[..., None], 0.0)

    def _run_teacher_forced(self, batch: SpeechBatch, style: Tensor | None = None) -> _TeacherForcedSpeech:
        if batch.mels.shape[2] != self.config.n_mels:
            raise ValueError(
                f"mels of shape {tuple(batch.mels.shape)} came; the model has {self.config.n_mels} mels"
            )
        real = batch.mel_tokens.valid_mask
        target = batch.mels.to(self.embedding.weight.dtype).where(real[..., None], 0.0)
        if self.style_tokens is not None and style is None:
            style = self.style_tokens(target, batch.mel_tokens)
            if batch.style_reference is not None:
                style = style.index_select(0, batch.style_reference)
        text = self._encode_text(batch.text, style)
        r = self.config.reduction_factor
        steps = -(-target.shape[1] // r)
        before = target[:, r - 1 :: r][:, : steps - 1]  # the last frame of each step but the last
        spoken, _ = self.decoder(F.pad(before, (0, 0, 1, 0)), self.decoder.initial_state(text))
        return _TeacherForcedSpeech(text, spoken, target)

    def _compute_attention_losses(
        self, outputs: _TeacherForcedSpeech, batch: SpeechBatch
    ) -> dict[str, Tensor]:
        """What it costs to look where it should not."""
        config, costs = self.config, {}
        if not config.guided_attention_loss and (not config.alignment_loss or batch.alignment is None):
            return {}
        weights = self.decoder.weights(outputs.output, outputs.memory)  # (B, S, L)
        if config.guided_attention_loss:
            costs["guided"] = config.guided_attention_loss * self._compute_guided_attention_loss(
                weights, batch
            )
        if config.alignment_loss and batch.alignment is not None:
            costs["placed"] = config.alignment_loss * self._compute_alignment_loss(
                upcast(weights), batch.alignment
            )
        return costs

    def _compute_guided_attention_loss(self, weights: Tensor, batch: SpeechBatch) -> Tensor:
        """Each step costs as often as it has real frames."""
        r, sizes = self.config.reduction_factor, batch.mel_tokens.lengths_tensor
        cost = guided_attention_loss(
            weights, _count_steps(sizes, r), batch.text.lengths_tensor, self.config.guided_attention_sigma
        )
        said = sizes[:, None] - r * torch.arange(weights.shape[1], device=sizes.device)  # from there on
        return (cost * said.clamp(0, r)).sum()

    def _compute_alignment_loss(self, weights: Tensor, alignment: Tensor) -> Tensor:
        """For each frame, the surprise that its step looks at its symbol."""
        r = self.config.reduction_factor
        by_step = F.pad(alignment, (0, weights.shape[1] * r - alignment.shape[1]), value=-1).unflatten(
            1, (-1, r)
        )
        there = weights.gather(2, by_step.clamp(min=0))  # (B, S, r)
        return -(there + ALIGNMENT_EPS).log().where(by_step >= 0, 0.0).sum()

    def _get_target_spectrograms(self, batch: SpeechBatch) -> Tensor:
        if batch.linear_spectrograms is None or batch.linear_spectrograms.shape[2] != self.config.linear_bins:
            came = (
                "none"
                if batch.linear_spectrograms is None
                else f"shape {tuple(batch.linear_spectrograms.shape)}"
            )
            raise ValueError(
                f"the model makes linear spectra of {self.config.linear_bins} frequencies, and the batch has "
                f"{came}; give it some, or the model linear=0"
            )
        return batch.linear_spectrograms.where(batch.mel_tokens.valid_mask[..., None], 0.0)

    @torch.no_grad()
    def compute_attention_maps(self, batch: SpeechBatch) -> list[LayerAttention]:
        """Where each step looked in the text, ``(B, 1, S, L)``, and which style tokens are in each sound."""
        told = self._run_teacher_forced(batch)
        weights = self.decoder.weights(told.output, told.memory)
        steps = torch.arange(weights.shape[1], device=weights.device)
        real = steps < _count_steps(batch.mel_tokens.lengths_tensor, self.config.reduction_factor)[:, None]
        found = [LayerAttention("decoder.attention", (weights * real[..., None])[:, None])]
        if self.style_tokens is not None:
            found.append(
                LayerAttention(
                    "style.attention", self.style_tokens.weights(told.target, batch.mel_tokens)[:, :, None]
                )
            )
        return found

    # ------------------------------------------------------------------------------------- speaking

    @torch.no_grad()
    def synthesize(self, text: Tokens, *, style: Tensor | None = None, max_frames: int) -> TacotronOutput:
        """Each text until the model says that this was the last frame, or ``max_frames`` frames are said.

        ``style_tokens`` is ``(B, W)``, or ``(1, W)`` or ``(W,)`` for all; None: the usual one of its training.
        """
        if max_frames < 1:
            raise ValueError(f"longest={max_frames}: 1 frame or more is expected")
        if self.style_tokens is not None and style is None:
            style = self.style_tokens.mix(self.style_tokens.default_weights)
        state = self.decoder.initial_state(self._encode_text(text, style))
        r = self.config.reduction_factor
        frame = self.embedding.weight.new_zeros(len(text.lengths), 1, self.config.n_mels)
        said: list[tuple[Tensor, Tensor, Tensor]] = []
        over = torch.zeros(len(frame), dtype=torch.bool, device=frame.device)
        for step in range(-(-max_frames // r)):
            spoken, state = self.decoder(frame, state)
            ends = spoken.stops > 0
            said.append((spoken.mels, ends, self.decoder.weights(spoken, state.text)))
            frame, over = spoken.mels[:, -1:].to(frame.dtype), over | ends.any(1)
            asks = not frame.is_cuda or step % STOP_CHECK_INTERVAL == STOP_CHECK_INTERVAL - 1
            if asks and bool(over.all()):
                break
        mels, ends, weights = (torch.cat(each, 1) for each in zip(*said, strict=True))
        ends = ends[:, :max_frames]
        stopped = ends.any(1)
        sizes = torch.where(stopped, ends.int().argmax(1) + 1, ends.shape[1])
        frames: tuple[int, ...] = tuple(sizes.tolist())
        mels, weights = mels[:, : max(frames)], weights[:, : -(-max(frames) // r)]
        sound = frames_as_tokens(mels, frames)
        real = sound.valid_mask[..., None]
        mels = self._apply_postnet(mels, sound).where(real, 0.0)
        steps = tuple(-(-number // r) for number in frames)
        weights = weights.where(frames_as_tokens(weights, steps).valid_mask[..., None], 0.0)
        linear = (
            None if self.linear_postnet is None else upcast(self.linear_postnet(mels, sound)).where(real, 0.0)
        )
        cut = tuple((~stopped).tolist())
        return TacotronOutput(mels, frames, weights, steps, linear, cut)

    def encode_style(self, mels: Tensor, mel_lengths: Sequence[int]) -> Tensor:
        """The styles ``(B, W)`` of sounds ``(B, T, M)`` with so many real frames."""
        return self._require_style_tokens()(mels, frames_as_tokens(mels, mel_lengths))  # type: ignore[no-any-return]

    def mix_style(self, weights: Tensor) -> Tensor:
        """The styles ``(B, W)`` of weights of tokens, ``(B, N)``, or ``(B, H, N)`` by head."""
        return self._require_style_tokens().mix(weights)

    def _require_style_tokens(self) -> StyleTokens:
        if self.style_tokens is None:
            raise ValueError("the model has no style tokens: train one whose config has a style")
        return self.style_tokens

    # ------------------------------------------------------------------------------- what both share

    def _encode_text(self, text: Tokens, style: Tensor | None) -> TacotronMemory:
        if text.packed or min(text.lengths, default=0) < 1:
            raise ValueError(
                f"texts came {'packed' if text.packed else f'with lengths {list(text.lengths)}'}; each is "
                "expected in a row of its own, with one symbol or more, such as </s>"
            )
        states = self.encoder(self.prenet(self.embedding(text.ids)), text)
        if style is not None:
            width, rows = self._require_style_tokens().config.width, len(states)
            if style.shape not in ((width,), (1, width), (rows, width)):
                raise ValueError(
                    f"a style of shape {tuple(style.shape)} came for {rows} texts; expected "
                    f"({rows}, {width}), or ({width},) for all"
                )
            states = states + self.style_projection(style.expand(rows, width))[:, None]
        return self.decoder.attention.prepare(states, text.mask)

    def _apply_postnet(self, mels: Tensor, mel_tokens: Tokens) -> Tensor:
        return mels if self.mel_postnet is None else upcast(self.mel_postnet(mels, mel_tokens))


def _count_steps(mel_lengths: Tensor, reduction_factor: int) -> Tensor:
    return (mel_lengths + reduction_factor - 1) // reduction_factor
