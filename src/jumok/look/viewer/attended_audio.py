"""The recording that a model listens to: its sound, its spectrogram, and the seconds of the keys of a layer.

>>> frames = AudioFrames(num_frames=50, start=-0.01, step=0.02)
>>> frames.end, round(frames.find_centre(3), 2)
(0.99, 0.06)

The keys of a layer are frames of the recording. Its queries are words, or frames too (self-attention)::

    audio = AttendedAudio.from_waveform(waveform, 16000, key_frames={"decoder.0": AudioFrames(50, 0.0, 0.02)})
    ViewerData.from_weights({"decoder.0": weights}, row_labels=["the", "cat"], audio=audio)   # (2, 50)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.audio import AudioConfig, AudioProcessor, encode_wav
from jumok.errors import InputError
from jumok.look.viewer.medium import Medium
from jumok.look.viewer.synthesized_speech import encode_spectrogram
from jumok.look.viewer.tiles import to_float32_array

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerLayer

MAX_SPECTROGRAM_FRAMES = 4000  # shown; longer recordings are averaged over time
PLAYBACK_RATES = (16000, 8000, 4000)  # Hz; the first one whose file is small enough
MAX_WAV_BYTES = 5 << 20


@dataclass(frozen=True)
class AudioFrames:
    """Positions of a sequence that are consecutive frames of a recording, all of the same duration."""

    num_frames: int
    start: float  # seconds; below 0 if the first frame is centred at 0
    step: float  # seconds

    def __post_init__(self) -> None:
        if self.num_frames < 1 or not math.isfinite(self.start) or not 0 < self.step < math.inf:
            raise InputError(
                f"{self} is invalid; expected at least one frame, a start in seconds and a positive step in seconds"
            )

    @property
    def end(self) -> float:
        """The time when the last frame ends, in seconds."""
        return self.start + self.num_frames * self.step

    def find_centre(self, frame: int) -> float:
        """Return the middle of a frame in seconds."""
        return self.start + (frame + 0.5) * self.step

    def format_times(self) -> list[str]:
        """Return the middle of each frame as a label, as in "0.06 s"."""
        digits = max(2, math.ceil(-math.log10(self.step)))
        return [f"{max(0.0, self.find_centre(n)):.{digits}f} s" for n in range(self.num_frames)]


@dataclass(frozen=True, eq=False)
class AttendedAudio(Medium):
    """A recording, and the frames that are the keys, or the keys and the queries, of each layer by name."""

    mel: NDArray[np.float32]  # (T, M): frames, and bands from low to high
    frame_seconds: float  # time from one frame of the spectrogram to the next; the first is centred at 0
    duration: float  # seconds
    key_frames: Mapping[str, AudioFrames]
    query_frames: Mapping[str, AudioFrames] = field(default_factory=dict)
    wav_bytes: bytes | None = None  # a WAV file; without it nothing can be played

    def __post_init__(self) -> None:
        mel = to_float32_array(self.mel)
        object.__setattr__(self, "mel", mel)
        if mel.ndim != 2 or not mel.size or not np.isfinite(mel).all():
            raise InputError(f"mel of shape {mel.shape} is invalid; expected finite values (frames, bands)")
        if not 0 < self.duration < math.inf or not 0 < self.frame_seconds < math.inf:
            raise InputError(
                f"duration={self.duration}, frame_seconds={self.frame_seconds} is invalid; expected positive seconds"
            )
        if not self.key_frames:
            raise InputError("no key_frames were given; expected the frames of at least one layer, by its name")
        for name, frames in {**self.key_frames, **self.query_frames}.items():
            # The last frame may reach beyond the end, and the model may ignore an incomplete one.
            if frames.start + (frames.num_frames - 1) * frames.step > self.duration or frames.end <= 0:
                raise InputError(
                    f"the {frames.num_frames} frames of {name} end at {frames.end:.2f} s, and the recording has "
                    f"{self.duration:.2f} s; expected frames of this recording, without padding"
                )

    @classmethod
    def from_waveform(
        cls,
        waveform: NDArray[Any],
        sample_rate: int,
        key_frames: Mapping[str, AudioFrames],
        query_frames: Mapping[str, AudioFrames] | None = None,
    ) -> AttendedAudio:
        """Build it from samples ``(n,)``: the spectrogram and the sound are computed from them."""
        waveform = np.asarray(waveform, np.float32)
        if waveform.ndim != 1 or not len(waveform):
            raise InputError(f"the waveform has shape {waveform.shape}; expected one or more samples, (samples,)")
        duration = len(waveform) / sample_rate
        fitting = [rate for rate in PLAYBACK_RATES if 2 * duration * rate <= MAX_WAV_BYTES]
        playback_rate = min(sample_rate, fitting[0] if fitting else PLAYBACK_RATES[-1])
        processor = AudioProcessor(replace(AudioConfig.for_sample_rate(sample_rate), target_level_db=None))
        mel = processor.mel_spectrogram(waveform)
        size = -(-len(mel) // MAX_SPECTROGRAM_FRAMES)
        if size > 1:
            starts = np.arange(0, len(mel), size)
            sizes = np.diff(starts, append=len(mel))
            mel = np.asarray(np.add.reduceat(mel, starts) / sizes[:, None], np.float32)
        sound = AudioProcessor(replace(AudioConfig.for_sample_rate(playback_rate), target_level_db=None))
        samples = waveform if playback_rate == sample_rate else sound.preprocess(waveform, sample_rate)
        return cls(
            mel,
            size * processor.config.frame_seconds,
            duration,
            key_frames,
            query_frames or {},
            encode_wav(samples, playback_rate),
        )

    @property
    def end(self) -> float:
        """The end of the spectrogram in seconds: its frames are centred at multiples of ``frame_seconds``."""
        return (len(self.mel) - 0.5) * self.frame_seconds

    def matches(self, layer: ViewerLayer) -> bool:
        """Return whether the keys of a layer are the frames given for it."""
        keys, queries = self.key_frames.get(layer.name), self.query_frames.get(layer.name)
        return (
            keys is not None
            and layer.shape[1] == keys.num_frames
            and (queries is None or layer.shape[0] == queries.num_frames)
        )

    def describe_mismatch(self, layers: Sequence[ViewerLayer]) -> str:
        """Return why the keys of none of these layers are the frames."""
        expected = ", ".join(f"{name} {frames.num_frames}" for name, frames in list(self.key_frames.items())[:8])
        sizes = ", ".join(f"{layer.name} {layer.shape[1]}" for layer in layers[:8])
        return (
            f"a recording was given with these frames: {expected}; and the layers have these keys: {sizes}. Expected "
            "a layer of the same name with as many keys as frames"
        )

    def get_positions(self, layer: ViewerLayer) -> Hashable:
        """Return the frames of a layer."""
        return self.key_frames.get(layer.name), self.query_frames.get(layer.name)

    def add_layers(self, models: Mapping[str, str]) -> AttendedAudio:
        """Return the recording with further layers, each with the frames of another layer."""

        def extend(frames: Mapping[str, AudioFrames]) -> dict[str, AudioFrames]:
            return {**frames, **{name: frames[model] for name, model in models.items() if model in frames}}

        return replace(self, key_frames=extend(self.key_frames), query_frames=extend(self.query_frames))

    def compute_file_size(self) -> int:
        """Return how many bytes the sound and the spectrogram take in a file."""
        return (len(self.wav_bytes or b"") + self.mel.size) * 4 // 3

    def to_json(self) -> dict[str, Any]:
        """Return the recording as JSON for the viewer; the bands of the spectrogram in order, the lowest first."""
        return {
            "mel": encode_spectrogram(self.mel),
            "shape": list(self.mel.T.shape),
            "frame_seconds": self.frame_seconds,
            "duration": self.duration,
            "key_frames": {name: asdict(frames) for name, frames in self.key_frames.items()},
            "query_frames": {name: asdict(frames) for name, frames in self.query_frames.items()},
            "wav": None if self.wav_bytes is None else base64.b64encode(self.wav_bytes).decode(),
        }
