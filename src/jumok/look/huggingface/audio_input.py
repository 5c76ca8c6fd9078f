"""The recording that an audio model hears: decoded, resampled, and prepared by the folder's own feature extractor."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jumok.data.audio import AudioConfig, AudioProcessor, Waveform
from jumok.errors import InputError
from jumok.look.huggingface.audio_frames import FeatureLayout, FrameGrid, FrameTracer, measure_features
from jumok.look.huggingface.folder import has_feature_extractor
from jumok.look.huggingface.loading import (
    accepts_argument,
    describe_inputs,
    list_modalities,
    load_from_folder,
    shorten_message,
)
from jumok.look.viewer.attended_audio import AudioFrames

CUT_SECONDS = 0.05  # that a feature extractor may leave out at the end: less than a window


@dataclass(frozen=True, eq=False)
class Recording:
    """The samples ``(n,)`` of a recording at the rate of a model, and where the frames of their features are."""

    waveform: Waveform
    sample_rate: int
    layout: FeatureLayout

    @property
    def duration(self) -> float:
        """The duration in seconds."""
        return len(self.waveform) / self.sample_rate

    def check_is_complete(self, features: torch.Tensor, folder: Path) -> None:
        """Check that the features ``(1, …)`` cover the whole recording: some extractors silently cut the end off."""
        num_frames, grid = features.shape[1 + self.layout.axis], self.layout.grid
        seconds = (grid.centre + (num_frames - 0.5) * grid.step) / self.sample_rate
        if len(features) > 1:  # windows, each of the longest input
            seconds = num_frames * grid.step / self.sample_rate
        if len(features) > 1 or seconds + CUT_SECONDS + 2 * grid.step / self.sample_rate < self.duration:
            raise InputError(
                f"the recording takes {self.duration:.1f} s, and the model in {folder} hears {seconds:.1f} s at most: "
                f"cut it, for example with `ffmpeg -i IN -ss 0 -t {round(seconds, 1):g} OUT.wav`"
            )

    def build_tracer(self, features: torch.Tensor) -> FrameTracer:
        """Return a tracer that starts with the frames of these features ``(1, …)``."""
        return FrameTracer(features.shape[1 + self.layout.axis], self.layout.grid)

    def place_frames(self, tracer: FrameTracer, length: int) -> AudioFrames | None:
        """Return the frames of a sequence of this length within the recording; None if its positions are no frames."""
        grid = tracer.grids.get(length)
        return None if grid is None else self.convert_grid(grid, length)

    def convert_grid(self, grid: FrameGrid, length: int) -> AudioFrames:
        """Return those of ``length`` frames that begin within the recording."""
        return AudioFrames(
            grid.count_until(len(self.waveform), length),
            (grid.centre - grid.step / 2) / self.sample_rate,
            grid.step / self.sample_rate,
        )


def select_audio_class(folder: Path, config: Any) -> Any:
    """Return the class of a model that hears audio: one that writes text if there is one, else one without a head."""
    import transformers

    saved_class = getattr(transformers, next(iter(getattr(config, "architectures", None) or ()), ""), None)
    candidates = [
        transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING.get(type(config), None),
        saved_class if saved_class is not None and accepts_argument(saved_class, "input_ids") else None,
        transformers.MODEL_MAPPING.get(type(config), None),
        saved_class,
    ]
    classes = [entry[0] if isinstance(entry, tuple) else entry for entry in candidates if entry is not None]
    hearing = [model_class for model_class in classes if "audio" in list_modalities(model_class)]
    if not hearing:
        reads = list_modalities(classes[0]) if classes else []
        raise InputError(
            f"{folder} holds a model ({config.model_type}) that hears no audio"
            + (f"; it reads {' and '.join('images' if name == 'image' else name for name in reads)}" if reads else "")
            + ". Leave --audio out, or give a speech model"
        )
    return hearing[0]


def load_recording(folder: Path, path: Path, extractor: Any) -> Recording:
    """Read a WAV, FLAC or OGG file and resample it to the rate of the feature extractor."""
    sample_rate = getattr(extractor, "sampling_rate", None)
    if not isinstance(sample_rate, int):
        raise InputError(
            f"the feature extractor in {folder} ({type(extractor).__name__}) names no sampling_rate; expected one for "
            "audio"
        )
    config = replace(AudioConfig.for_sample_rate(sample_rate), target_level_db=None)
    waveform = AudioProcessor(config).read_waveform(path)

    def extract(samples: Waveform) -> NDArray[Any]:
        features = extract_features(folder, extractor, samples)
        return np.asarray(features[extractor.model_input_names[0]][0].float())

    layout = measure_features(extract, sample_rate)
    if layout is None:
        raise InputError(
            f"the features of {type(extractor).__name__} in {folder} are not frames at equal distances in time, which "
            "--audio needs; use jumok.watch in Python"
        )
    return Recording(waveform, sample_rate, layout)


def load_feature_extractor(folder: Path) -> Any:
    """Return the feature extractor of a folder."""
    if not has_feature_extractor(folder):
        raise InputError(
            f"{folder} has no feature extractor (preprocessor_config.json), and without it the model cannot hear a "
            "recording: save it there with feature_extractor.save_pretrained(folder)"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "At least one mel filter")  # of the model as it was trained
        return load_from_folder(folder, "AutoFeatureExtractor")


def extract_features(folder: Path, extractor: Any, waveform: Waveform) -> Any:
    """Return the features of a waveform, by the names of the model's arguments; each begins with an axis of size 1."""
    try:
        return extractor(waveform, sampling_rate=extractor.sampling_rate, return_tensors="pt")
    except Exception as error:
        raise InputError(
            f"the feature extractor in {folder} ({type(extractor).__name__}) cannot read the recording: "
            f"{shorten_message(error)}"
        ) from error


def select_model_inputs(model: Any, features: Any) -> dict[str, Any]:
    """Return the features that a model takes, on its device and with its floating-point type."""
    tensors = {name: value for name, value in features.items() if isinstance(value, torch.Tensor)}
    inputs = {name: value.to(model.device) for name, value in tensors.items() if accepts_argument(type(model), name)}
    if not any(name.startswith("input_") and name != "input_ids" for name in inputs):
        raise InputError(
            f"the features {', '.join(features)} are none that {type(model).__name__} takes. "
            f"{describe_inputs(type(model))}"
        )
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
