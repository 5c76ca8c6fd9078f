"""A trained voice: speech of texts in a style of choice, and its scores."""

from __future__ import annotations

import functools
import itertools
import math
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.batches.speech import SpeechBatch
from jumok.batches.tokens import Tokens
from jumok.data.audio import AudioProcessor, Waveform, encode_wav
from jumok.data.caches.spectrograms import AudioSource
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.speech import SpeechExample
from jumok.data.tokenizers.sentence_splitter import split_sentences
from jumok.data.tokenizers.speech_symbols import SpeechSymbols
from jumok.errors import InputError
from jumok.files import read_json
from jumok.inference.line_io import iterate_chunks
from jumok.metrics.alignment_health import (
    average_alignment_health,
    measure_style_effect,
    measure_style_health,
)
from jumok.metrics.cepstral_distortion import mel_cepstral_distortion
from jumok.models.layers.style_tokens import StyleTokens
from jumok.models.tacotron import Tacotron, TacotronOutput
from jumok.tasks.base import DatasetSplit, Evaluation
from jumok.tasks.options import PredictOptions
from jumok.tasks.predictors import ChunkedPredictor, SupervisedPredictor, compute_mean_losses
from jumok.tasks.speak.prediction import SpeechPrediction, SpeechSegment, parse_style_weights, split_sentence
from jumok.training import ValidationReport

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData
    from jumok.tasks.speak.task import SpeechTask

SEGMENTS_PER_BATCH = 32  # segments that are synthesized together
MAX_BATCH_FRAMES = 20_000  # in a batch whose loss is computed
NUM_HEALTH_EXAMPLES = 32  # utterances whose attention is measured at a validation
MIN_LIMIT_SECONDS = 2.0  # minimum duration limit: a short word has as much silence around it as a long one
PAUSE_SIGNS = ".,!?;:"  # between sentences, and parts of them
SIGN_FALLBACKS = {"!": ".", "?": ".", ";": ",", ":": ","}  # for signs that the training texts do not have
MAX_DURATION_RATIO = 1.5  # to the slowest recording, per symbol; longer speech is cut off
ATTENTION_LAYER = "decoder.attention"
END_SYMBOL = "</s>"


@dataclass(frozen=True)
class SpeechOptions(PredictOptions):
    """Options of speech: its style."""

    unsupported_hint = "this model speaks; it supports --style-audio and --style-weights"

    style_audio: str | None = None  # recording to take the style from
    style_weights: str | None = None  # weights of style tokens, as in 3=0.4,5=0.3

    def __post_init__(self) -> None:
        if self.n_best != 1:
            raise InputError(f"--n-best {self.n_best}: {self.unsupported_hint}")
        if self.style_audio is not None and self.style_weights is not None:
            raise InputError("--style-audio and --style-weights exclude each other")


class EncodedUtterance(NamedTuple):
    """The symbols of a recording, the recording, and its style group."""

    symbol_ids: list[int]
    recording: AudioSource
    style_group: str = ""


class SpeechPredictor(
    SupervisedPredictor[SpeechPrediction, SpeechOptions], ChunkedPredictor[SpeechPrediction, SpeechOptions]
):
    """A model that speaks texts.

    >>> voice = jumok.load("runs/tacotron")  # doctest: +SKIP
    >>> speech = voice.speak("forty two", style_weights="3=0.4")  # doctest: +SKIP
    >>> speech.waveform.shape, speech.sample_rate, speech.segments[0].alignment.shape  # doctest: +SKIP
    ((14400,), 16000, torch.Size([18, 10]))
    """

    chunk_size = SEGMENTS_PER_BATCH
    task: SpeechTask
    model: Tacotron
    tokenizer: SpeechSymbols

    def __init__(self, task: SpeechTask, model: Any, tokenizer: SpeechSymbols) -> None:
        super().__init__(task, model, tokenizer)
        self.audio: AudioProcessor = task.audio

    # ------------------------------------------------------------------------------------------------- synthesis

    def speak(
        self,
        text: str,
        *,
        style_audio: str | Path | None = None,
        style_weights: str | Mapping[int, float] | None = None,
    ) -> SpeechPrediction:
        """Speak a text of any length, sentence by sentence.

        The style is that of a recording, or a mix of style tokens: "3=0.4,5=0.3", or ``{3: 0.4, 5: 0.3}``. It
        defaults to the style of the training recording nearest to the mean of all.
        """
        if isinstance(style_weights, Mapping):
            style_weights = ",".join(f"{number}={weight}" for number, weight in style_weights.items())
        options = SpeechOptions(
            style_audio=None if style_audio is None else str(style_audio), style_weights=style_weights
        )
        return next(self.predict([text], options))

    def predict_chunk(
        self, lines: Sequence[str], options: SpeechOptions, first_index: int
    ) -> Iterator[SpeechPrediction]:
        style_weights = self.get_style_weights(options)
        texts = [self.split_segments(line, f"line {number}") for number, line in enumerate(lines, first_index + 1)]
        segments = self.synthesize_segments(list(itertools.chain.from_iterable(texts)), style_weights)
        for index, (line, parts) in enumerate(zip(lines, texts, strict=True), first_index):
            yield self.join_segments(index, line, list(itertools.islice(segments, len(parts))), style_weights)

    def join_segments(
        self, index: int, text: str, segments: Sequence[SpeechSegment], style_weights: Tensor | None
    ) -> SpeechPrediction:
        """Join the segments of a text, with pauses between them."""
        sample_rate = self.audio.config.sample_rate
        pause = np.zeros(round(self.task.recipe.decode.pause_seconds * sample_rate), np.float32)
        waveforms = [part for segment in segments for part in (pause, segment.waveform)][1:]
        return SpeechPrediction(
            index,
            text,
            tuple(segments),
            np.concatenate(waveforms),
            sample_rate,
            style_weights,
            unknown_characters=tuple(self.find_unknown_signs(text)),
            finished=not any(segment.is_truncated for segment in segments),
        )

    def split_segments(self, text: str, location: str) -> list[str]:
        """Split a text into segments that are synthesized at once: sentences, or parts of long sentences."""
        symbols = self.tokenizer
        text = self._replace_unknown_signs(text)
        unknown = self._find_unknown_characters(text)
        signs = [character for character in unknown if _is_sign(character)]
        if len(unknown) > len(signs):
            letters = " ".join(character for character in unknown if character not in signs)
            raise InputError(
                f"{location}: the voice does not know {letters}, because no training text has it; it knows "
                f"{' '.join(symbols.characters).strip()}"
            )
        if signs:
            warnings.warn(f"the voice does not know {' '.join(signs)}, and leaves it out", stacklevel=2)
        # An apostrophe is inside a word, other signs are between words.
        replacements = str.maketrans({sign: "" if sign == "'" else " " for sign in signs})
        sentences = [
            symbols.normalize(symbols.normalize(sentence).translate(replacements)) for sentence in split_sentences(text)
        ]
        max_symbols = self.task.recipe.decode.max_symbols or self._size_limits["max_symbols"]

        def fits(part: str) -> bool:
            return len(symbols.encode(part)) <= max_symbols and not symbols.unknown_characters(part)

        parts = [part for sentence in sentences for part in split_sentence(sentence, fits)]
        if not any(any(map(str.isalnum, part)) for part in parts):
            raise InputError(f"{location} has nothing to speak; a text is expected, but it is {text[:60]!r}")
        return parts

    def find_unknown_signs(self, text: str) -> list[str]:
        """The signs of a text that the voice leaves out, without those of pauses."""
        return [
            character
            for character in self._find_unknown_characters(self._replace_unknown_signs(text))
            if _is_sign(character) and character not in PAUSE_SIGNS
        ]

    def _replace_unknown_signs(self, text: str) -> str:
        known = set(self.tokenizer.characters)
        return text.translate(
            {ord(sign): other for sign, other in SIGN_FALLBACKS.items() if sign not in known >= {other}}
        )

    def _find_unknown_characters(self, text: str) -> list[str]:
        unknown = self.tokenizer.unknown_characters(text)
        return [character for character in unknown if character != " "]  # then words are spoken one by one

    def synthesize_segments(self, texts: Sequence[str], style_weights: Tensor | None) -> Iterator[SpeechSegment]:
        """Synthesize texts that are short enough.

        ``style_weights`` are ``(1, H, N)`` for all texts, or ``(B, H, N)``, one style for each.
        """
        for start in range(0, len(texts), SEGMENTS_PER_BATCH):
            batch = slice(start, start + SEGMENTS_PER_BATCH)
            is_shared = style_weights is None or len(style_weights) == 1
            yield from self._synthesize_batch(
                texts[batch],
                style_weights if style_weights is None or is_shared else style_weights[batch],
            )

    @torch.inference_mode()
    def _synthesize_batch(self, texts: Sequence[str], style_weights: Tensor | None) -> list[SpeechSegment]:
        style = None if style_weights is None else self.model.mix_style(style_weights)
        ids = [self.tokenizer.encode(text) for text in texts]
        max_frames = self.get_max_frames(max(map(len, ids)))
        output: TacotronOutput = self.model.synthesize(
            Tokens.pad(ids).to(self.device), style=style, max_frames=max_frames
        )
        linear = output.linear_spectrograms
        spectrograms = output.mels if linear is None else linear
        segments = []
        for row, text in enumerate(texts):
            limit = self.get_max_frames(len(ids[row]))  # of this text, not of its batch
            num_frames = min(output.mel_lengths[row], limit)
            num_steps = -(-num_frames // self.task.recipe.model.reduction_factor)
            segments.append(
                SpeechSegment(
                    (*self.tokenizer.spell(text), END_SYMBOL),
                    _to_numpy(output.mels[row, :num_frames]),
                    output.alignments[row, :num_steps, : len(ids[row])].float().cpu(),
                    output.truncated[row] or output.mel_lengths[row] > limit,
                    functools.partial(self.invert_spectrogram, _to_numpy(spectrograms[row, :num_frames])),
                )
            )
        return segments

    def invert_spectrogram(self, spectrogram: NDArray[np.float32]) -> Waveform:
        """The waveform of a spectrogram ``(T, M)``."""
        config = self.task.recipe.decode
        return self.audio.reconstruct_waveform(
            spectrogram,
            num_iterations=config.griffin_lim_iterations,
            magnitude_power=config.magnitude_power,
        )

    def get_max_frames(self, num_symbols: int) -> int:
        """The number of frames after which a text of ``num_symbols`` is cut off."""
        frames_per_symbol = float(self._size_limits["max_frames_per_symbol"])
        num_frames = math.ceil(MAX_DURATION_RATIO * frames_per_symbol * num_symbols)
        return max(num_frames, round(MIN_LIMIT_SECONDS / self.audio.config.frame_seconds))

    @functools.cached_property
    def _size_limits(self) -> dict[str, Any]:
        path = self.run.folder / "sizes.json"
        limits: dict[str, Any] = read_json(path, dict)
        names = ("max_frames_per_symbol", "max_symbols")
        if not all(isinstance(limits.get(name), int | float) for name in names):
            raise InputError(f"{path} is damaged: expected numbers as {' and '.join(names)}")
        return limits

    # ---------------------------------------------------------------------------------------------------- styles

    def require_style_tokens(self) -> StyleTokens:
        """The style tokens of the model. Raise if it has none."""
        if self.model.style_tokens is None:
            raise InputError("this voice has no style tokens: train one whose recipe has model.style")
        return self.model.style_tokens

    def get_style_weights(self, options: SpeechOptions) -> Tensor | None:
        """The weights of the style tokens ``(1, H, N)``; None: the voice has no style tokens."""
        if self.model.style_tokens is None and options.style_audio is None and options.style_weights is None:
            return None
        style_tokens = self.require_style_tokens()
        if options.style_audio is not None:
            waveform = self._read_reference(Path(options.style_audio))
            return self.extract_style_weights(self.audio.mel_spectrogram(waveform))
        if options.style_weights is not None:
            num_tokens = style_tokens.config.num_tokens
            return self.expand_style_weights(parse_style_weights(options.style_weights, num_tokens))
        default_weights: Tensor = style_tokens.default_weights
        return default_weights

    def _read_reference(self, path: Path) -> Waveform:
        if not path.is_file():
            raise InputError(f"--style-audio {path}: there is no such file; a recording is expected")
        return self.audio.read_waveform(path)

    @torch.no_grad()
    def extract_style_weights(self, *mels: NDArray[Any]) -> Tensor:
        """The weights of the style tokens of recordings ``(T, M)``, by head: ``(B, H, N)``."""
        weights = []
        for chunk in iterate_chunks(mels, SEGMENTS_PER_BATCH):
            tensors = [torch.from_numpy(np.asarray(mel, np.float32)) for mel in chunk]
            batch = SpeechBatch.from_sequences([[0]] * len(tensors), tensors).to(self.device)
            weights.append(self.require_style_tokens().weights(batch.mels, batch.mel_tokens))
        return torch.cat(weights)

    def expand_style_weights(self, weights: Sequence[float]) -> Tensor:
        """The same weights for all heads, ``(1, H, N)``."""
        row = torch.tensor(weights, dtype=torch.float32, device=self.device)
        return row.expand(1, self.require_style_tokens().config.num_heads, -1)

    # ------------------------------------------------------------------------------------------------- attention

    def make_viewer_factory(
        self, text: str, target: str | None = None, options: SpeechOptions | None = None
    ) -> Callable[[], ViewerData]:
        """The speech, its alignment with the text, and its style."""
        if target is not None:
            raise InputError("--target is for models that generate text; this model speaks")
        style_weights = self.get_style_weights(options or SpeechOptions())
        first, *others = self.split_segments(text, "the text")
        if others:
            warnings.warn(
                f"the text has {1 + len(others)} segments; the first one, {first!r}, is shown. To see another "
                "one, give that part of the text",
                stacklevel=2,
            )
        return lambda: self.build_segment_view(first, style_weights)

    def build_segment_view(self, text: str, style_weights: Tensor | None) -> ViewerData:
        """Synthesize one segment for the viewer, with weights of style tokens ``(1, H, N)``."""
        [segment] = self.synthesize_segments([text], style_weights)
        return self._build_segment_view(segment, text, style_weights)

    def _build_segment_view(self, segment: SpeechSegment, text: str, style_weights: Tensor | None) -> ViewerData:
        from jumok.look.viewer.synthesized_speech import StyleTokenWeights, SynthesizedSpeech
        from jumok.look.viewer.viewer_data import ViewerData

        style = None
        if style_weights is not None:
            names = [f"token {n}" for n in range(1, style_weights.shape[2] + 1)]
            style = StyleTokenWeights(tuple(names), style_weights[0].float().cpu().numpy())
        return ViewerData.from_weights(
            {ATTENTION_LAYER: segment.alignment},
            col_labels=["␣" if symbol == " " else symbol for symbol in segment.symbols],
            title=text,
            label=str(segment.health),
            speech=SynthesizedSpeech(
                segment.mel,
                frame_seconds=self.audio.config.frame_seconds,
                wav_bytes=encode_wav(segment.waveform, self.audio.config.sample_rate),
                frames_per_step=self.task.recipe.model.reduction_factor,
            ),
            style=style,
            resynthesize=None
            if style is None
            else lambda weights: self.build_segment_view(text, self.expand_style_weights(weights)),
        )

    def draw_attention(self, prediction: SpeechPrediction, path: Path, title: str = "") -> Path:
        """Draw the spectrogram of the first segment, with its alignment and style tokens."""
        from jumok.look.viewer import view_writer

        segment = prediction.segments[0]
        data = self._build_segment_view(segment, segment.text, prediction.head_style_weights)
        return view_writer.save_view(replace(data, title=title or data.title), path)

    # ------------------------------------------------------------------------------------------------------ data

    def encode(self, examples: Iterable[SpeechExample]) -> Iterator[EncodedUtterance | InvalidExample]:
        """Encode recordings, after their spectrograms are in the cache."""
        return self.task.log_skipped(self._encode_recordings(examples))

    def _encode_recordings(self, examples: Iterable[SpeechExample]) -> Iterator[EncodedUtterance | InvalidExample]:
        cache, max_seconds = self.task.feature_cache, self.task.recipe.data.max_seconds
        for example in cache.fill(examples):
            if isinstance(example, InvalidExample):
                yield example
                continue
            seconds = cache.num_frames(example.audio) * self.audio.config.frame_seconds
            if seconds > max_seconds:
                message = f"{seconds:.1f} seconds, and data.max_seconds is {max_seconds:g}"
                location = f"{example.location} {example.audio.name}"
                yield InvalidExample(location, "a recording that is too long", message)
            else:
                ids = self.tokenizer.encode(example.text)
                yield EncodedUtterance(ids, example.audio, self.task.get_style_group(example))

    def load_mels(self, examples: Sequence[SpeechExample]) -> list[NDArray[np.float32]]:
        """The mel spectrograms ``(T, M)`` of recordings."""
        n_mels, cache = self.audio.config.n_mels, self.task.feature_cache
        encoded = self.check_encoded(self.encode(examples), None)
        return [np.asarray(cache[utterance.recording][:, :n_mels], np.float32) for utterance in encoded]

    def build_batch(self, encoded: Sequence[EncodedUtterance]) -> SpeechBatch:
        """All of these utterances as one batch, on the device."""
        dataset = self.task.build_utterances(encoded, MAX_BATCH_FRAMES, 0)
        return dataset.collate(range(len(encoded))).to(self.device)

    # ---------------------------------------------------------------------------------------------------- scores

    def compute_loss(self, examples: Sequence[SpeechExample]) -> float:
        return self._compute_losses(examples)["loss"]

    @torch.inference_mode()
    def _compute_losses(self, examples: Sequence[SpeechExample]) -> dict[str, float]:
        encoded = self.check_encoded(self.encode(examples), None)
        dataset = self.task.build_utterances(encoded, MAX_BATCH_FRAMES, 0)
        return compute_mean_losses(self.model, dataset, self.device)

    def validate(self, split: DatasetSplit[SpeechExample]) -> ValidationReport:
        """The losses, the health of the attention in free synthesis, and the effect of styles."""
        losses = self._compute_losses(split.examples)
        metrics = {name: losses[name] for name in ("loss", "mel", "stop")}
        metrics |= self.measure_health(split.examples[:NUM_HEALTH_EXAMPLES])
        select_by = self.task.recipe.evaluation.select_by
        if select_by in metrics:
            return ValidationReport(metrics, select_by=select_by, higher_is_better=False)
        return ValidationReport(metrics, select_by=f"alignment/{select_by}", tie_breaker="loss")

    @torch.inference_mode()
    def measure_health(self, examples: Sequence[SpeechExample]) -> dict[str, float]:
        """Metrics of free synthesis of texts, each in the style of its recording."""
        batch = self.build_batch(self.check_encoded(self.encode(examples), None))
        style, style_metrics = None, {}
        if self.model.style_tokens is not None:
            weights = self.model.style_tokens.weights(batch.mels, batch.mel_tokens)
            style = self.model.mix_style(weights)
            style_metrics = measure_style_health(weights)
            if len(examples) > 1:
                own, other = (self.model.predict_teacher_forced(batch, style=x) for x in (style, style.roll(1, 0)))
                style_metrics["style/effect"] = measure_style_effect(own, other, batch.mel_lengths)
        max_frames = self.get_max_frames(max(batch.text.lengths))
        output: TacotronOutput = self.model.synthesize(batch.text, style=style, max_frames=max_frames)
        health = average_alignment_health(
            output.alignments.float(), output.step_lengths, batch.text.lengths, has_end_symbol=True
        )
        health["alignment/truncated"] = sum(output.truncated) / len(output.truncated)
        rows = zip(output.mels, output.mel_lengths, batch.mels, batch.mel_lengths, strict=True)
        distortions = [
            self.compute_distortion(_to_numpy(mel[:length]), _to_numpy(target[:target_length]))
            for mel, length, target, target_length in rows
        ]
        return {"mcd": float(np.mean(distortions)), **health, **style_metrics}

    def compute_distortion(self, mel: NDArray[np.float32], target: NDArray[np.float32]) -> float:
        """The distortion between synthesized speech and a recording, in dB."""
        return mel_cepstral_distortion(mel, target, range_db=-self.audio.config.min_level_db).decibels

    def score_examples(
        self,
        examples: Sequence[SpeechExample],
        options: SpeechOptions | None = None,
        *,
        detailed: bool = False,
    ) -> Evaluation:
        """Intelligibility, the distance to the recordings, and if ``detailed`` the effect of styles."""
        from jumok.tasks.speak.metrics import score_speech

        return score_speech(self, examples, detailed=detailed)


def _is_sign(character: str) -> bool:
    return unicodedata.category(character)[0] in "PSZC"


def _to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.float().cpu().numpy()
    return array
