"""Tacotron (Wang 2017): text-to-speech with attention from the frames of speech to the symbols of a text.

::

    text  ─ pre-net ─ CBHG ─ (+ style) ─────────────────┐
                                                        │ keys, values
    last frame ─ pre-net ─ attention RNN ── query ── attention ── context ─┬─ RNNs ─┬─ r mel frames ─
    (postnet)
                                ↑                                          │        └─ r stop logits
                                └──────────── at the next step ────────────┘

    mels ─ CBHG ─ linear spectrogram                                                optional

Each step generates r frames (``reduction_factor``). Its input is the last frame of the previous step: the
true one in training, else the generated one. :mod:`jumok.models.tacotron_decoder` has the decoder and its
attention. In training a style comes from the recording itself (:mod:`jumok.models.layers.style_tokens`).

The postnets see all frames at once, in both directions::

    mels ─┬─ convolutions ─ + ─ mels                     Tacotron 2
          └─────────────────┘

    mels ─ CBHG ─ linear spectrogram                     Tacotron

*Guided attention* (Tachibana 2017) penalizes attention far from the diagonal in training::

    cost of a weight at step t of T and symbol n of N  =  1 − exp(−(n/N − t/T)² / 2g²)

                 n
                 0 ▪ ■ ■ ■
             t   ▪ 0 ▪ ■ ■
                 ■ ▪ 0 ▪ ■

Shapes: ``B`` utterances, ``L`` symbols, ``T`` frames, ``S = T / r`` steps (rounded up), ``M`` mels, ``F``
frequencies; widths: ``W`` of an RNN, ``D`` of a symbol's state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.batches.speech import SpeechBatch, frames_as_tokens
from jumok.batches.tokens import LayerAttention, Loss, Tokens
from jumok.config import Config
from jumok.models.layers.cbhg import CBHG, MaskedConvNorm
from jumok.models.layers.module_list import build_module_list
from jumok.models.layers.precision import upcast
from jumok.models.layers.style_tokens import StyleConfig, StyleTokens
from jumok.models.tacotron_decoder import (
    PreNet,
    TacotronAttention,
    TacotronDecoder,
    TacotronDecoderOutput,
    TacotronMemory,
)

ALIGNMENT_EPS = 1e-4  # added to weights, which bounds the alignment loss
STOP_CHECK_INTERVAL = 8  # steps between checks on a GPU whether all utterances have ended, which wait for it
POSTNET_KERNEL_SIZE = 5
POSTNET_CONV_BANK_SIZE = 8  # of the CBHG of linear spectrograms
POSTNET_HIGHWAYS = 4


@dataclass(frozen=True)
class TacotronConfig(Config):
    """Configuration of a :class:`Tacotron`.

    The paper has ``attention="additive"``, ``postnet_layers=0`` and ``linear_bins=1025``.
    """

    type: Literal["tacotron"] = "tacotron"
    n_mels: int = 80  # M
    linear_bins: int = 0  # F; 0: no linear spectrograms, waveforms are generated from mels
    reduction_factor: int = 2  # r, frames per step
    # Encoder:
    embedding_width: int = 256
    encoder_width: int = 128  # of each direction of the CBHG
    conv_bank_size: int = 16  # width of the widest convolution of the CBHG
    highway_layers: int = 4
    # Decoder:
    prenet_widths: tuple[int, int] = (256, 128)  # of both pre-nets
    prenet_dropout: float = 0.5  # of both pre-nets
    prenet_dropout_at_inference: bool = False  # in the decoder, as in Tacotron 2: every output is different
    decoder_width: int = 256  # of its GRUs
    decoder_layers: int = 2  # number of decoder GRUs
    postnet_layers: int = 5  # convolutions that refine mels (Tacotron 2); 0: none
    postnet_width: int = 256
    # Attention:
    attention: Literal["additive", "location-sensitive"] = "location-sensitive"
    attention_width: int = 128
    location_filters: int = 32
    location_kernel_size: int = 31
    forward_attention: bool = False
    guided_attention_loss: float = 0.0  # weight in training
    guided_attention_sigma: float = 0.2  # g
    alignment_loss: float = 0.0  # weight in training of the cross-entropy of known alignments
    # Stopping:
    stop_loss: float = 1.0  # weight
    stop_positive_weight: float = 5.0  # weight of the last frame relative to the others
    style: StyleConfig | None = None  # None: no style tokens

    def __post_init__(self) -> None:
        self.check_ranges(
            positive=(
                "n_mels",
                "reduction_factor",
                "embedding_width",
                "encoder_width",
                "conv_bank_size",
                "decoder_width",
                "attention_width",
                "postnet_width",
                "location_filters",
                "location_kernel_size",
            ),
            non_negative=(
                "linear_bins",
                "highway_layers",
                "decoder_layers",
                "postnet_layers",
                "guided_attention_loss",
                "alignment_loss",
                "stop_loss",
            ),
            above_zero=("guided_attention_sigma", "stop_positive_weight"),
            fraction=("prenet_dropout",),
        )
        if min(self.prenet_widths) < 1:
            raise ValueError(f"prenet_widths={self.prenet_widths}: two numbers of 1 or more are expected")
        if self.location_kernel_size % 2 == 0:
            raise ValueError(
                f"location_kernel_size={self.location_kernel_size}: an odd number is expected, so that the "
                "kernel has a centre"
            )


# --------------------------------------------------------------------------------------- postnets


class MelPostnet(nn.Module):
    """Refines mels ``(B, T, M)`` by convolutions with a residual connection.

    >>> MelPostnet(mels=5, width=7, num_layers=3)(torch.ones(2, 9, 5), frames).shape
    torch.Size([2, 9, 5])
    """

    def __init__(self, mels: int, width: int, num_layers: int) -> None:
        super().__init__()
        sizes = [mels, *[width] * (num_layers - 1), mels]
        self.convolutions: list[MaskedConvNorm] = build_module_list(
            MaskedConvNorm(inputs, outputs, POSTNET_KERNEL_SIZE) for inputs, outputs in itertools.pairwise(sizes)
        )
        nn.init.zeros_(self.convolutions[-1].norm.weight)  # the identity at first

    def forward(self, mels: Tensor, frames: Tokens) -> Tensor:
        """``frames`` holds the lengths (see :func:`jumok.batches.speech.frames_as_tokens`)."""
        valid_mask = frames.valid_mask
        x = mels.masked_fill(~valid_mask[..., None], 0.0).transpose(1, 2)
        *convolutions, last = self.convolutions
        for convolution in convolutions:
            x = convolution(x, valid_mask).tanh()
        residual: Tensor = last(x, valid_mask)
        return mels + residual.transpose(1, 2)


class LinearPostnet(nn.Module):
    """Computes linear spectrograms ``(B, T, F)`` from mels ``(B, T, M)``.

    >>> LinearPostnet(mels=5, linear_bins=11, width=7)(torch.ones(2, 9, 5), frames).shape
    torch.Size([2, 9, 11])
    """

    def __init__(self, mels: int, linear_bins: int, width: int) -> None:
        super().__init__()
        self.cbhg = CBHG(mels, width, POSTNET_CONV_BANK_SIZE, POSTNET_HIGHWAYS)
        self.output = nn.Linear(2 * width, linear_bins)

    def forward(self, mels: Tensor, frames: Tokens) -> Tensor:
        spectrograms: Tensor = self.output(self.cbhg(mels, frames))
        return spectrograms


# -------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, eq=False)
class TacotronOutput:
    """Generated speech, zero after the end of each utterance."""

    mels: Tensor  # (B, T, M), in float32
    mel_lengths: tuple[int, ...]  # frames of each utterance
    alignments: Tensor  # (B, S, L): attention weights
    step_lengths: tuple[int, ...]  # steps of each utterance
    linear_spectrograms: Tensor | None  # (B, T, F)
    truncated: tuple[bool, ...]  # whether an utterance was cut off before its end


@dataclass(frozen=True, eq=False)
class _TeacherForcedSpeech:
    """Result of running the decoder on given recordings."""

    memory: TacotronMemory
    output: TacotronDecoderOutput  # of S r frames
    target: Tensor  # (B, T, M): the true mels, zero at padding


class Tacotron(nn.Module):
    """Text-to-speech model.

    >>> config = TacotronConfig(n_mels=5, embedding_width=8, encoder_width=4, decoder_width=8)
    >>> model = Tacotron(config, vocab_size=11).eval()
    >>> batch = SpeechBatch.from_sequences([[7, 8, 3], [9, 3]], [torch.randn(6, 5), torch.randn(3, 5)])
    >>> model.loss(batch).count, model.compute_attention_maps(batch)[0].weights.shape
    (9, torch.Size([2, 1, 3, 3]))
    >>> speech = model.synthesize(batch.text, max_frames=7)
    >>> speech.mels.shape[2], max(speech.mel_lengths) <= 7
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
        self.encoder = CBHG(config.prenet_widths[1], config.encoder_width, config.conv_bank_size, config.highway_layers)
        self.style_tokens = None if config.style is None else StyleTokens(config.style, config.n_mels)
        if config.style is not None:
            self.style_projection = nn.Linear(config.style.width, 2 * config.encoder_width, bias=False)
            if config.style.large_init:
                with torch.no_grad():
                    self.style_projection.weight *= 2.0  # styles matter from the start
        memory_width = 2 * config.encoder_width
        location_filters = (
            (config.location_filters, config.location_kernel_size) if config.attention == "location-sensitive" else None
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
                memory_width,
                config.attention_width,
                location_filters=location_filters,
                use_forward_attention=config.forward_attention,
            ),
            width=config.decoder_width,
            memory_width=memory_width,
            num_layers=config.decoder_layers,
            output_shape=(config.reduction_factor, config.n_mels),
        )
        self.mel_postnet = (
            MelPostnet(config.n_mels, config.postnet_width, config.postnet_layers) if config.postnet_layers else None
        )
        self.linear_postnet = (
            LinearPostnet(config.n_mels, config.linear_bins, config.encoder_width) if config.linear_bins else None
        )

    # ------------------------------------------------------------------------------- training

    def loss(self, batch: SpeechBatch) -> Loss:
        """Mean absolute error of mels and linear spectrograms, plus the stop loss, summed over frames.

        The parts, with their weights: "mel"; "mel_before_postnet"; "linear"; "stop", the cross-entropy of the
        last frame; and in training "guided_attention" and, if the batch has an alignment, "alignment".
        """
        speech = self._run_teacher_forced(batch)
        frames, valid_mask = batch.mel_tokens, batch.mel_tokens.valid_mask
        num_frames = valid_mask.shape[1]

        def compute_error(prediction: Tensor, target: Tensor) -> Tensor:
            return (upcast(prediction) - target).abs().mean(-1).where(valid_mask, 0.0).sum()

        decoder_mels = speech.output.mels[:, :num_frames]
        stop_logits = speech.output.stop_logits[:, :num_frames]
        mels = self._apply_postnet(decoder_mels, frames)
        is_last = torch.arange(num_frames, device=valid_mask.device) == frames.lengths_tensor[:, None] - 1
        stop_losses = F.binary_cross_entropy_with_logits(
            stop_logits,
            is_last.to(stop_logits.dtype),
            pos_weight=stop_logits.new_full((), self.config.stop_positive_weight),
            reduction="none",
        )
        terms = {"mel": compute_error(mels, speech.target)}
        if self.mel_postnet is not None:
            terms["mel_before_postnet"] = compute_error(decoder_mels, speech.target)
        if self.linear_postnet is not None:
            spectrograms = self.linear_postnet(mels, frames)
            terms["linear"] = compute_error(spectrograms, self._get_target_spectrograms(batch))
        terms["stop"] = self.config.stop_loss * stop_losses.where(valid_mask, 0.0).sum()
        attention_terms = self._compute_attention_losses(speech, batch)
        total = torch.stack([*terms.values(), *(attention_terms.values() if self.training else ())]).sum()
        terms |= attention_terms
        return Loss(total, batch.count, {name: term.detach() for name, term in terms.items()})

    @torch.no_grad()
    def predict_teacher_forced(self, batch: SpeechBatch, *, style: Tensor | None = None) -> Tensor:
        """Mels ``(B, T, M)`` predicted from the true previous frames, zero at padding.

        ``style`` defaults to those of the recordings. See :meth:`synthesize`.
        """
        valid_mask = batch.mel_tokens.valid_mask
        mels = self._run_teacher_forced(batch, style).output.mels[:, : valid_mask.shape[1]]
        return self._apply_postnet(mels, batch.mel_tokens).where(valid_mask[..., None], 0.0)

    def _run_teacher_forced(self, batch: SpeechBatch, style: Tensor | None = None) -> _TeacherForcedSpeech:
        if batch.mels.shape[2] != self.config.n_mels:
            raise ValueError(
                f"mels have shape {tuple(batch.mels.shape)}, but the model has n_mels={self.config.n_mels}"
            )
        valid_mask = batch.mel_tokens.valid_mask
        target = batch.mels.to(self.embedding.weight.dtype).where(valid_mask[..., None], 0.0)
        if self.style_tokens is not None and style is None:
            style = self.style_tokens(target, batch.mel_tokens)
            if batch.style_reference is not None:
                style = style.index_select(0, batch.style_reference)
        memory = self._encode_text(batch.text, style)
        r = self.config.reduction_factor
        steps = -(-target.shape[1] // r)
        last_frames = target[:, r - 1 :: r][:, : steps - 1]  # of each step but the last
        output, _ = self.decoder(F.pad(last_frames, (0, 0, 1, 0)), self.decoder.initial_state(memory))
        return _TeacherForcedSpeech(memory, output, target)

    def _compute_attention_losses(self, speech: _TeacherForcedSpeech, batch: SpeechBatch) -> dict[str, Tensor]:
        config, terms = self.config, {}
        if not config.guided_attention_loss and (not config.alignment_loss or batch.alignment is None):
            return {}
        weights = self.decoder.weights(speech.output, speech.memory)  # (B, S, L)
        if config.guided_attention_loss:
            guided = self._compute_guided_attention_loss(weights, batch)
            terms["guided_attention"] = config.guided_attention_loss * guided
        if config.alignment_loss and batch.alignment is not None:
            alignment = self._compute_alignment_loss(upcast(weights), batch.alignment)
            terms["alignment"] = config.alignment_loss * alignment
        return terms

    def _compute_guided_attention_loss(self, weights: Tensor, batch: SpeechBatch) -> Tensor:
        """Guided attention loss. Each step is weighted by its number of valid frames."""
        r, lengths = self.config.reduction_factor, batch.mel_tokens.lengths_tensor
        costs = guided_attention_loss(
            weights, _count_steps(lengths, r), batch.text.lengths_tensor, self.config.guided_attention_sigma
        )
        remaining = lengths[:, None] - r * torch.arange(weights.shape[1], device=lengths.device)
        return (costs * remaining.clamp(0, r)).sum()

    def _compute_alignment_loss(self, weights: Tensor, alignment: Tensor) -> Tensor:
        """For each frame, the negative log weight of its symbol."""
        r = self.config.reduction_factor
        padding = weights.shape[1] * r - alignment.shape[1]
        symbols = F.pad(alignment, (0, padding), value=-1).unflatten(1, (-1, r))  # (B, S, r)
        symbol_weights = weights.gather(2, symbols.clamp(min=0))  # (B, S, r)
        return -(symbol_weights + ALIGNMENT_EPS).log().where(symbols >= 0, 0.0).sum()

    def _get_target_spectrograms(self, batch: SpeechBatch) -> Tensor:
        spectrograms = batch.linear_spectrograms
        if spectrograms is None or spectrograms.shape[2] != self.config.linear_bins:
            shape = "no linear spectrograms" if spectrograms is None else f"shape {tuple(spectrograms.shape)}"
            raise ValueError(
                f"the model needs linear spectrograms of {self.config.linear_bins} frequencies, but the "
                f"batch has {shape}; compute them, or build the model with linear_bins=0"
            )
        return spectrograms.where(batch.mel_tokens.valid_mask[..., None], 0.0)

    @torch.no_grad()
    def compute_attention_maps(self, batch: SpeechBatch) -> list[LayerAttention]:
        """Attention weights ``(B, 1, S, L)``, and those of the style tokens for each recording."""
        speech = self._run_teacher_forced(batch)
        weights = self.decoder.weights(speech.output, speech.memory)
        steps = torch.arange(weights.shape[1], device=weights.device)
        num_steps = _count_steps(batch.mel_tokens.lengths_tensor, self.config.reduction_factor)
        valid_mask = steps < num_steps[:, None]
        maps = [LayerAttention("decoder.attention", (weights * valid_mask[..., None])[:, None])]
        if self.style_tokens is not None:
            style_weights = self.style_tokens.weights(speech.target, batch.mel_tokens)
            maps.append(LayerAttention("style_tokens.attention", style_weights[:, :, None]))
        return maps

    # ------------------------------------------------------------------------------- synthesis

    @torch.no_grad()
    def synthesize(self, text: Tokens, *, style: Tensor | None = None, max_frames: int) -> TacotronOutput:
        """Generate speech until the model predicts the last frame, or up to ``max_frames`` frames.

        ``style`` is ``(B, W)``, or ``(1, W)`` or ``(W,)`` for all texts. It defaults to a typical style of
        the training data.
        """
        if max_frames < 1:
            raise ValueError(f"max_frames={max_frames}: 1 or more is expected")
        if self.style_tokens is not None and style is None:
            style = self.style_tokens.mix(self.style_tokens.default_weights)
        memory = self._encode_text(text, style)
        mels, is_last, weights = self._decode_until_stop(memory, max_frames)
        return self._build_output(mels, is_last[:, :max_frames], weights)

    def _decode_until_stop(self, memory: TacotronMemory, max_frames: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return mels ``(B, T, M)``, the mask of last frames ``(B, T)``, and weights ``(B, S, L)``."""
        state = self.decoder.initial_state(memory)
        frame = self.embedding.weight.new_zeros(len(memory.states), 1, self.config.n_mels)
        has_ended = torch.zeros(len(frame), dtype=torch.bool, device=frame.device)
        outputs: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(-(-max_frames // self.config.reduction_factor)):
            output, state = self.decoder(frame, state)
            is_last = output.stop_logits > 0
            outputs.append((output.mels, is_last, self.decoder.weights(output, memory)))
            frame, has_ended = output.mels[:, -1:].to(frame.dtype), has_ended | is_last.any(1)
            checks = not frame.is_cuda or step % STOP_CHECK_INTERVAL == STOP_CHECK_INTERVAL - 1
            if checks and bool(has_ended.all()):
                break
        mels, is_last, weights = (torch.cat(parts, 1) for parts in zip(*outputs, strict=True))
        return mels, is_last, weights

    def _build_output(self, mels: Tensor, is_last: Tensor, weights: Tensor) -> TacotronOutput:
        """Cut each utterance after its last frame, and apply the postnets."""
        r = self.config.reduction_factor
        has_ended = is_last.any(1)
        num_frames = torch.where(has_ended, is_last.int().argmax(1) + 1, is_last.shape[1])
        lengths: tuple[int, ...] = tuple(num_frames.tolist())
        mels, weights = mels[:, : max(lengths)], weights[:, : -(-max(lengths) // r)]
        frames = frames_as_tokens(mels, lengths)
        valid_mask = frames.valid_mask[..., None]
        mels = self._apply_postnet(mels, frames).where(valid_mask, 0.0)
        step_lengths = tuple(-(-length // r) for length in lengths)
        weights = weights.where(frames_as_tokens(weights, step_lengths).valid_mask[..., None], 0.0)
        linear = None
        if self.linear_postnet is not None:
            linear = upcast(self.linear_postnet(mels, frames)).where(valid_mask, 0.0)
        return TacotronOutput(mels, lengths, weights, step_lengths, linear, tuple((~has_ended).tolist()))

    def encode_style(self, mels: Tensor, mel_lengths: Sequence[int]) -> Tensor:
        """Styles ``(B, W)`` of recordings ``(B, T, M)`` of these lengths."""
        return self._require_style_tokens()(mels, frames_as_tokens(mels, mel_lengths))  # type: ignore[no-any-return]

    def mix_style(self, weights: Tensor) -> Tensor:
        """Styles ``(B, W)`` of weights of the style tokens, ``(B, N)``, or ``(B, H, N)`` for each head."""
        return self._require_style_tokens().mix(weights)

    def _require_style_tokens(self) -> StyleTokens:
        if self.style_tokens is None:
            raise ValueError("the model has no style tokens: train one whose config has a style")
        return self.style_tokens

    # ------------------------------------------------------------------------------- encoder, postnet

    def _encode_text(self, text: Tokens, style: Tensor | None) -> TacotronMemory:
        if text.packed or min(text.lengths, default=0) < 1:
            layout = "packed" if text.packed else f"of lengths {list(text.lengths)}"
            raise ValueError(f"texts are {layout}; expected one text per row, with at least one symbol, such as </s>")
        states = self.encoder(self.prenet(self.embedding(text.ids)), text)
        if style is not None:
            width, rows = self._require_style_tokens().config.width, len(states)
            if style.shape not in ((width,), (1, width), (rows, width)):
                raise ValueError(
                    f"style has shape {tuple(style.shape)}, and there are {rows} texts; expected "
                    f"({rows}, {width}), or ({width},) for all"
                )
            states = states + self.style_projection(style.expand(rows, width))[:, None]
        return self.decoder.attention.prepare(states, text.mask)

    def _apply_postnet(self, mels: Tensor, mel_tokens: Tokens) -> Tensor:
        return mels if self.mel_postnet is None else upcast(self.mel_postnet(mels, mel_tokens))


def guided_attention_loss(weights: Tensor, step_lengths: Tensor, symbol_lengths: Tensor, sigma: float) -> Tensor:
    """Cost ``(B, T)``, from 0 to 1, of the weights ``(B, T, N)`` of each step. ``sigma`` is g.

    ``step_lengths`` and ``symbol_lengths`` are ``(B,)``. Steps beyond the length cost nothing.

    >>> weights = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]])
    >>> guided_attention_loss(weights, torch.tensor([2]), torch.tensor([2]), 0.5)  # 1 − exp(−½), and 0
    tensor([[0.3935, 0.0000]])
    """
    weights = upcast(weights)
    step, symbol = (torch.arange(size, device=weights.device).to(weights.dtype) for size in weights.shape[1:])
    step_fraction = step / step_lengths[:, None]  # t/T, (B, T)
    symbol_fraction = symbol / symbol_lengths[:, None]  # n/N, (B, N)
    distance = step_fraction[:, :, None] - symbol_fraction[:, None]
    cost = (weights * -torch.expm1(-distance.square() / (2 * sigma**2))).sum(-1)
    return cost.where(step < step_lengths[:, None], 0.0)


def _count_steps(mel_lengths: Tensor, reduction_factor: int) -> Tensor:
    return (mel_lengths + reduction_factor - 1) // reduction_factor
