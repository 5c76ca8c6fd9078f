"""A trained voice at work: texts in, sounds out, in a style of one's choice; and how good it is."""

from __future__ import annotations

import functools
import itertools
import math
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.batches.speech import SpeechBatch
from jumok.batches.tokens import Tokens
from jumok.data.audio import AudioProcessor, Waveform, encode_wav
from jumok.data.caches.spectrograms import AudioSource
from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.speech import SpeechExample
from jumok.data.tokenizers.sentence_splitter import split_sentences
from jumok.data.tokenizers.speech_symbols import SpeechSymbols
from jumok.errors import InputError
from jumok.files import read_json
from jumok.metrics.alignment_health import (
    average_alignment_health,
    measure_style_effect,
    measure_style_health,
)
from jumok.metrics.cepstral_distortion import mel_cepstral_distortion
from jumok.models.tacotron import TacotronOutput
from jumok.tasks.base import Evaluation
from jumok.tasks.common import PredictOptions
from jumok.tasks.predictors import Prediction, SupervisedPredictor, compute_mean_losses
from jumok.tasks.speak.prediction import SpeechPrediction, SpeechSegment, parse_style_weights, split_sentence
from jumok.training import ValidationReport

if TYPE_CHECKING:
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["EncodedUtterance", "SpeechOptions", "SpeechPrediction", "SpeechPredictor", "SpeechSegment"]

SEGMENTS_PER_BATCH = 32  # pieces of text that are said together
MAX_BATCH_FRAMES = 20_000  # in a batch whose loss is computed
NUM_HEALTH_EXAMPLES = 32  # utterances whose attention is measured at a validation
MIN_LIMIT_SECONDS = (
    2.0  # seconds that any text may take: silence before and after a short word is as long as ever
)
PAUSE_SIGNS = ".,!?;:"  # signs between sentences, and parts of them
SIGN_FALLBACKS = {
    "!": ".",
    "?": ".",
    ";": ",",
    ":": ",",
}  # signs that are read as others, if a voice never saw them
MAX_DURATION_RATIO = 1.5  # times what the slowest recording took for as many symbols: it is not going to stop
ATTENTION_LAYER = "decoder.attention"
END_SYMBOL = "</s>"


@dataclass(frozen=True)
class SpeechOptions(PredictOptions):
    """What one asks of a voice: a style. There is nothing to search here."""

    accepts_style: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.beam_size, self.n_best, self.sample) != (None, 1, False):
            raise InputError(
                "--beam-size, --n-best and --sample are for models that write text; this one speaks, and "
                "--style-audio or --style-weights say how"
            )
        if self.style_audio is not None and self.style_weights is not None:
            raise InputError("--style-audio and --style-weights came: a style is taken from one of them")


class EncodedUtterance(NamedTuple):
    """The symbols of a recording, the recording, and what is known of how it is spoken."""

    symbol_ids: list[int]
    recording: AudioSource
    style_group: str = ""


class SpeechPredictor(SupervisedPredictor):
    """A model that says texts.

    >>> voice = jumok.load("runs/tacotron")  # doctest: +SKIP
    >>> said = voice.speak("forty two", style_weights="3=0.4")  # doctest: +SKIP
    >>> said.waveform.shape, said.sample_rate, said.segments[0].alignment.shape  # doctest: +SKIP
    ((14400,), 16000, torch.Size([18, 10]))
    """

    def __init__(
        self,
        task: Any,
        model: Any,
        tokenizer: SpeechSymbols,
        options: SpeechOptions | None = None,
        *,
        detailed: bool = False,
    ) -> None:
        super().__init__(task, model, tokenizer)
        self.options = SpeechOptions() if options is None else options  # that evaluations speak with
        self.audio: AudioProcessor = task.audio
        self._detailed = detailed

    def with_options(self, options: SpeechOptions) -> SpeechPredictor:
        """The same voice; evaluations ask it for this."""
        return SpeechPredictor(self.task, self.model, self.tokenizer, options, detailed=self._detailed)

    def with_detailed_evaluation(self) -> SpeechPredictor:
        """The same voice; evaluations take their time, and look at styles too."""
        return SpeechPredictor(self.task, self.model, self.tokenizer, self.options, detailed=True)

    # ------------------------------------------------------------------------------------------- from texts

    def speak(
        self,
        text: str,
        *,
        style_audio: str | Path | None = None,
        style_weights: str | Mapping[int, float] | None = None,
    ) -> SpeechPrediction:
        """One text of any length, in the usual style, that of a recording, or a mix of tokens: "3=0.4,5=0.3",
        or ``{3: 0.4, 5: 0.3}``.

        Sentences are said one after the other.
        """
        if isinstance(style_weights, Mapping):
            style_weights = ",".join(f"{number}={weight}" for number, weight in style_weights.items())
        search = SpeechOptions(
            style_audio=None if style_audio is None else str(style_audio), style_weights=style_weights
        )
        return next(self.predict([text], search))

    def predict(
        self,
        lines: Iterable[str],
        options: SpeechOptions,
        *,
        with_attention: bool = False,
        first_index: int = 0,
    ) -> Iterator[SpeechPrediction]:
        """The sound of every line, in their order."""
        weights = self.get_style_weights(options)
        texts = iter(lines)
        while some := list(itertools.islice(texts, SEGMENTS_PER_BATCH)):
            cut = [
                self.split_segments(text, f"line {number}")
                for number, text in enumerate(some, first_index + 1)
            ]
            said = iter(self.synthesize_segments([piece for pieces in cut for piece in pieces], weights))
            for number, (text, pieces) in enumerate(zip(some, cut, strict=True), first_index):
                yield self.join_segments(number, text, list(itertools.islice(said, len(pieces))), weights)
            first_index += len(some)

    def join_segments(
        self, index: int, text: str, segments: Sequence[SpeechSegment], style_weights: Tensor | None
    ) -> SpeechPrediction:
        """What was said in several goes, with pauses between them."""
        rate, decode = self.audio.config.sample_rate, self.run.recipe.decode
        pause = np.zeros(round(decode.pause_seconds * rate), np.float32)
        waves = [part for one in segments for part in (pause, one.waveform)][1:]
        signs = tuple(self.find_unknown_signs(text))
        return SpeechPrediction(
            index, text, tuple(segments), np.concatenate(waves), rate, style_weights, unknown_characters=signs
        )

    def split_segments(self, text: str, location: str) -> list[str]:
        """A text in parts that are said in one go: sentences, and of what is too long, parts of sentences."""
        symbols: SpeechSymbols = self.tokenizer
        text = self._replace_unknown_signs(text)
        unknown = self._find_unknown_characters(text)
        signs = [one for one in unknown if _is_sign(one)]
        if len(unknown) > len(signs):
            strange = " ".join(one for one in unknown if one not in signs)
            raise InputError(
                f"{location}: the voice does not know {strange}, for no text that it learned from has it; it "
                f"knows {' '.join(symbols.characters).strip()}"
            )
        if signs:
            warnings.warn(f"the voice does not know {' '.join(signs)}, and leaves it out", stacklevel=2)
        # An apostrophe stands inside a word, all else between words.
        plain = str.maketrans({one: "" if one == "'" else " " for one in signs})
        whole = [symbols.normalize(symbols.normalize(one).translate(plain)) for one in split_sentences(text)]
        most = self.run.recipe.decode.max_symbols or self._size_limits["max_symbols"]

        def fits(part: str) -> bool:
            return len(symbols.encode(part)) <= most and not symbols.unknown_characters(part)

        found = [part for one in whole for part in split_sentence(one, fits)]
        if not any(any(map(str.isalnum, part)) for part in found):
            raise InputError(f"{location} has nothing to say; a text is expected, it is {text[:60]!r}")
        return found

    def find_unknown_signs(self, text: str) -> list[str]:
        """The signs of a text that the voice does not know, and does without, but for those of pauses."""
        return [
            one
            for one in self._find_unknown_characters(self._replace_unknown_signs(text))
            if _is_sign(one) and one not in PAUSE_SIGNS
        ]

    def _replace_unknown_signs(self, text: str) -> str:
        known = set(self.tokenizer.characters)
        return text.translate(
            {ord(one): other for one, other in SIGN_FALLBACKS.items() if one not in known >= {other}}
        )

    def _find_unknown_characters(self, text: str) -> list[str]:
        return [one for one in self.tokenizer.unknown_characters(text) if one != " "]  # without it, word by word is said

    def synthesize_segments(
        self, texts: Sequence[str], style_weights: Tensor | None
    ) -> Iterator[SpeechSegment]:
        """Texts that are short enough, each in one go.

        ``style_weights`` of style tokens are ``(1, H, N)`` for all, or ``(B, H, N)``, a style for each.
        """
        for begin in range(0, len(texts), SEGMENTS_PER_BATCH):
            some = slice(begin, begin + SEGMENTS_PER_BATCH)
            each = style_weights if style_weights is None or len(style_weights) == 1 else style_weights[some]
            yield from self._synthesize_batch(texts[some], each)

    @torch.inference_mode()
    def _synthesize_batch(self, texts: Sequence[str], style_weights: Tensor | None) -> list[SpeechSegment]:
        style = None if style_weights is None else self.model.mix_style(style_weights)
        ids = [self.tokenizer.encode(text) for text in texts]
        longest = self.get_max_frames(max(map(len, ids)))
        said = self.model.synthesize(Tokens.pad(ids).to(self.device), style=style, max_frames=longest)
        spectra = said.mels if said.linear_spectrograms is None else said.linear_spectrograms
        found = []
        for number, text in enumerate(texts):
            limit = self.get_max_frames(len(ids[number]))  # its own, whatever it is said with
            frames = min(said.mel_lengths[number], limit)
            steps = -(-frames // self.run.recipe.model.reduction_factor)
            found.append(
                SpeechSegment(
                    (*self.tokenizer.spell(text), END_SYMBOL),
                    _to_numpy(said.mels[number, :frames]),
                    said.alignments[number, :steps, : len(ids[number])].float().cpu(),
                    said.truncated[number] or said.mel_lengths[number] > limit,
                    functools.partial(self.invert_spectra, _to_numpy(spectra[number, :frames])),
                )
            )
        return found

    def invert_spectra(self, spectra: NDArray[np.float32]) -> Waveform:
        """The waveform of spectra ``(T, M)``."""
        decode = self.run.recipe.decode
        return self.audio.reconstruct_waveform(
            spectra, num_iterations=decode.griffin_lim_iterations, magnitude_power=decode.magnitude_power
        )

    def get_max_frames(self, num_symbols: int) -> int:
        """The frames after which a text of so many symbols is cut off."""
        frames = math.ceil(MAX_DURATION_RATIO * float(self._size_limits["max_frames_per_symbol"]) * num_symbols)
        return max(frames, round(MIN_LIMIT_SECONDS / self.audio.config.frame_seconds))

    @functools.cached_property
    def _size_limits(self) -> dict[str, Any]:
        path = self.run.folder / "sizes.json"
        found: dict[str, Any] = read_json(path, dict)
        if not all(isinstance(found.get(name), int | float) for name in ("max_frames_per_symbol", "max_symbols")):
            raise InputError(f"{path} is damaged: expected numbers as max_frames_per_symbol and max_symbols")
        return found

    # ----------------------------------------------------------------------------------------------- styles

    def get_style_weights(self, options: SpeechOptions) -> Tensor | None:
        """The weights of style tokens ``(1, H, N)`` that are asked for; None: the voice has no styles."""
        tokens = self.model.style_tokens
        if tokens is None:
            if options.style_audio is not None or options.style_weights is not None:
                raise InputError("this voice has no style tokens: train one whose recipe has model.style")
            return None
        if options.style_audio is not None:
            return self.extract_style_weights(
                self.audio.mel_spectrogram(self._read_reference(Path(options.style_audio)))
            )
        if options.style_weights is not None:
            return self.expand_style_weights(parse_style_weights(options.style_weights, tokens.config.num_tokens))
        usual: Tensor = tokens.default_weights
        return usual

    def _read_reference(self, path: Path) -> Waveform:
        if not path.is_file():
            raise InputError(f"--style-audio {path}: there is no such file; a recording is expected")
        return self.audio.read_waveform(path)

    @torch.no_grad()
    def extract_style_weights(self, *mels: NDArray[Any]) -> Tensor:
        """How much of each token is in these sounds ``(T, M)``, by head: ``(B, H, N)``."""
        found = []
        for begin in range(0, len(mels), SEGMENTS_PER_BATCH):
            some = [
                torch.from_numpy(np.asarray(x, np.float32)) for x in mels[begin : begin + SEGMENTS_PER_BATCH]
            ]
            batch = SpeechBatch.from_sequences([[0]] * len(some), some).to(self.device)
            found.append(self.model.style_tokens.weights(batch.mels, batch.mel_tokens))
        return torch.cat(found)

    def expand_style_weights(self, weights: Sequence[float]) -> Tensor:
        """The same weights for all heads, ``(1, H, N)``."""
        row = torch.tensor(weights, dtype=torch.float32, device=self.device)
        return row.expand(1, self.model.style_tokens.config.num_heads, -1)

    # -------------------------------------------------------------------------------------------- attention

    def make_viewer_factory(self, text: str) -> Callable[[], ViewerData]:
        return self._make_styled_viewer_factory(text, self.get_style_weights(self.options))

    def build_viewer_data(
        self, text: str, target: str | None = None, *, ablations: Ablations | None = None
    ) -> list[ViewerData]:
        """What is said, where in the text each step of it looked, and its style, for the viewer.

        ``ablations`` some of it, the same again.
        """
        from jumok.look.viewer.comparison import compare_with_ablation

        if target is not None:
            raise InputError("--target is for models that write text; this one speaks")
        return compare_with_ablation(self.model, ablations, self.make_viewer_factory(text))

    def _make_styled_viewer_factory(
        self, text: str, style_weights: Tensor | None
    ) -> Callable[[], ViewerData]:
        first, *others = self.split_segments(text, "the text")
        if others:
            warnings.warn(
                f"a text that is said in {1 + len(others)} parts: shown is the first, {first!r}; give another"
                " one to see that",
                stacklevel=2,
            )
        return lambda: self.build_segment_view(first, style_weights)

    def build_segment_view(self, text: str, style_weights: Tensor | None) -> ViewerData:
        """What is said of a text in one go, with weights of style tokens ``(1, H, N)``."""
        [piece] = self.synthesize_segments([text], style_weights)
        return self._build_segment_view(piece, text, style_weights)

    def _build_segment_view(
        self, segment: SpeechSegment, text: str, style_weights: Tensor | None
    ) -> ViewerData:
        from jumok.look.viewer.viewer_data import StyleTokenWeights, ViewerData
        from jumok.look.viewer.viewer_data import SynthesizedSpeech as Heard

        style = None
        if style_weights is not None:
            names = [f"token {n}" for n in range(1, style_weights.shape[2] + 1)]
            style = StyleTokenWeights(tuple(names), style_weights[0].float().cpu().numpy())
        return ViewerData.from_weights(
            {ATTENTION_LAYER: segment.alignment},
            col_labels=["␣" if one == " " else one for one in segment.symbols],
            title=text,
            label=str(segment.health),
            speech=Heard(
                segment.mel,
                frame_seconds=self.audio.config.frame_seconds,
                wav_bytes=encode_wav(segment.waveform, self.audio.config.sample_rate),
                frames_per_step=self.run.recipe.model.reduction_factor,
            ),
            style=style,
            resynthesize=None
            if style is None
            else lambda wish: self.build_segment_view(text, self.expand_style_weights(wish)),
        )

    def draw_attention(self, prediction: Prediction, path: Path, title: str = "") -> Path:
        """The spectrogram of the first part that is said, with the alignment, and the style tokens."""
        from jumok.look.viewer import view_writer

        assert isinstance(prediction, SpeechPrediction)
        piece = prediction.segments[0]
        scene = self._build_segment_view(piece, piece.text, prediction.head_style_weights)
        return view_writer.save_view(replace(scene, title=title or scene.title), path)

    # ------------------------------------------------------------------------------------------------- data

    def encode(self, examples: Iterable[SpeechExample]) -> Iterator[EncodedUtterance | InvalidExample]:
        """What is learned of recordings, once their spectra are on the disk."""
        found: Iterator[EncodedUtterance | InvalidExample] = self.task.log_skipped(
            self._encode_recordings(examples)
        )
        return found

    def _encode_recordings(
        self, examples: Iterable[SpeechExample]
    ) -> Iterator[EncodedUtterance | InvalidExample]:
        cache, longest = self.task.feature_cache, self.run.recipe.data.max_seconds
        for one in cache.fill(examples):
            if isinstance(one, InvalidExample):
                yield one
                continue
            seconds = cache.num_frames(one.audio) * self.audio.config.frame_seconds
            if seconds > longest:
                told = f"{seconds:.1f} seconds, and data.max_seconds is {longest:g}"
                yield InvalidExample(f"{one.location} {one.audio.name}", "too long a recording", told)
            else:
                yield EncodedUtterance(self.tokenizer.encode(one.text), one.audio, self.task.get_style_group(one))

    def build_batch(self, encoded: Sequence[EncodedUtterance]) -> SpeechBatch:
        """All of these at once, on the device."""
        data = self.task.build_utterances(encoded, MAX_BATCH_FRAMES, 0, static_shapes=False)
        found: SpeechBatch = data.collate(range(len(encoded))).to(self.device)
        return found

    # ----------------------------------------------------------------------------------------------- judging

    def compute_loss(self, examples: Sequence[SpeechExample]) -> float:
        return self._compute_losses(examples)["loss"]

    @torch.inference_mode()
    def _compute_losses(self, examples: Sequence[SpeechExample]) -> dict[str, float]:
        encoded = self.check_encoded(self.encode(examples), None)
        return compute_mean_losses(
            self.model, self.task.build_utterances(encoded, MAX_BATCH_FRAMES, 0, static_shapes=False), self.device
        )

    def validate(self, examples: Sequence[SpeechExample]) -> ValidationReport:
        """For the training loop: does it read, and do styles make a difference?"""
        losses = self._compute_losses(examples)
        told = {name: losses[name] for name in ("loss", "mel", "stop")}
        figures = told | self.measure_health(examples[:NUM_HEALTH_EXAMPLES])
        best = self.run.recipe.evaluation.select_by
        if best in figures:
            return ValidationReport(figures, select_by=best, higher_is_better=False)
        return ValidationReport(figures, select_by=f"alignment/{best}", tie_breaker="loss")

    @torch.inference_mode()
    def measure_health(self, examples: Sequence[SpeechExample]) -> dict[str, float]:
        """Of texts that the voice says by itself, each in the style of its recording."""
        batch = self.build_batch(self.check_encoded(self.encode(examples), None))
        style, figures = None, {}
        if self.model.style_tokens is not None:
            weights = self.model.style_tokens.weights(batch.mels, batch.mel_tokens)
            style = self.model.mix_style(weights)
            figures = measure_style_health(weights)
            if len(examples) > 1:
                own, other = (self.model.predict_teacher_forced(batch, style=one) for one in (style, style.roll(1, 0)))
                figures["style/effect"] = measure_style_effect(own, other, batch.mel_lengths)
        longest = self.get_max_frames(max(batch.text.lengths))
        said = self.model.synthesize(batch.text, style=style, max_frames=longest)
        found = average_alignment_health(
            said.alignments.float(), said.step_lengths, batch.text.lengths, has_end_symbol=True
        )
        found["alignment/cut"] = sum(said.truncated) / len(said.truncated)
        return {"mcd": self._compute_distortion(said, batch), **found, **figures}

    def _compute_distortion(self, outputs: TacotronOutput, batch: SpeechBatch) -> float:
        """How far what was said is from the recordings, in dB, on average."""
        pairs = zip(outputs.mels, outputs.mel_lengths, batch.mels, batch.mel_lengths, strict=True)
        each = [
            mel_cepstral_distortion(
                _to_numpy(own[:size]), _to_numpy(real[:frames]), range_db=-self.audio.config.min_level_db
            ).decibels
            for own, size, real, frames in pairs
        ]
        return float(np.mean(each))

    def score_examples(self, examples: Sequence[SpeechExample]) -> Evaluation:
        """Does it read its texts, how far is it from the recordings, and what do styles do?"""
        from jumok.tasks.speak import metrics as speak_metrics

        return speak_metrics.score_speech(self, examples, detailed=self._detailed)


def _is_sign(character: str) -> bool:
    return unicodedata.category(character)[0] in "PSZC"


def _to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.float().cpu().numpy()
    return found
