"""Which seconds of a recording a position of an audio model is.

Both steps are measured on the model itself, so nothing depends on its name. The feature extractor turns samples into
feature frames, or leaves them as they are: :func:`measure_features` changes short parts of a noise and observes which
frames change.

Convolutions and pooling then make the sequence shorter: :class:`FrameTracer` follows their kernels, strides and padding
during a forward pass. Whisper's frames of 10 ms become 20 ms in its second convolution; the seven convolutions of
Wav2Vec2 make 20 ms of 320 samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

NUM_PROBES, FLIPS_PER_PROBE = 4, 6  # flips are too far apart to change the same frame
PROBE_SECONDS, FLIP_SECONDS, NOISE_LEVEL = 1.0, 0.004, 0.05
CHANGE_SHARE = 0.2  # of the largest change, from which on a frame counts as changed; normalization changes all a little
MAX_STEP_ERROR = 0.02  # by which a measured step may differ from a whole number of samples, relative to it

Waveform = NDArray[np.float32]


@dataclass(frozen=True)
class FrameGrid:
    """Frames at equal distances: the middle of the first one and the step, in samples of the recording."""

    centre: float
    step: float

    def convolve(self, kernel: int, stride: int, padding: int, dilation: int = 1) -> FrameGrid:
        """Return the frames of a convolution of these frames.

        >>> FrameGrid(0.0, 160.0).convolve(kernel=3, stride=2, padding=1)
        FrameGrid(centre=0.0, step=320.0)
        """
        middle = (kernel - 1) * dilation / 2 - padding
        return FrameGrid(self.centre + middle * self.step, self.step * stride)

    def count_until(self, num_samples: int, limit: int) -> int:
        """Return how many of at most ``limit`` frames begin within a recording of this length."""
        return max(1, min(limit, math.ceil((num_samples - self.centre) / self.step + 0.5)))


@dataclass(frozen=True)
class FeatureLayout:
    """The frames of the features of an extractor, and the axis that is time, after that of the batch."""

    axis: int
    grid: FrameGrid


def measure_features(extract: Callable[[Waveform], NDArray[Any]], sample_rate: int) -> FeatureLayout | None:
    """Measure where the feature frames of an extractor are; None if no axis of the features is time.

    ``extract`` returns the features of a waveform, without a batch axis. Short parts of a noise change their sign.
    This changes the frames whose windows they are in, and keeps the level that features are normalized by. The middle
    of these frames is a linear function of the middle of the part.
    """
    length, width = round(PROBE_SECONDS * sample_rate), round(FLIP_SECONDS * sample_rate) | 1
    distance = length // (FLIPS_PER_PROBE + 2)
    rng = np.random.default_rng(0)
    # No sample is near 0, so that each of those with another sign changes.
    noise = (NOISE_LEVEL * rng.choice([-1, 1], length) * rng.uniform(0.5, 1.5, length)).astype(np.float32)
    noise[: distance // 2] *= 3  # always the loudest part: some features depend on it
    base = extract(noise)
    middles: list[int] = []
    centres: list[list[float]] = [[] for _ in range(base.ndim)]
    for probe in range(NUM_PROBES):
        first = distance + probe * distance // NUM_PROBES + probe  # at all phases of a window
        places = [first + n * distance for n in range(FLIPS_PER_PROBE)]
        flipped = noise.copy()
        for place in places:
            flipped[place - width // 2 : place + width // 2 + 1] *= -1
        change = np.abs(extract(flipped) - base)
        middles += places
        for axis in range(base.ndim):
            profile = change.sum(tuple(other for other in range(base.ndim) if other != axis))
            centres[axis] += _find_centres(profile, FLIPS_PER_PROBE)
    for axis, positions in enumerate(centres):
        if len(positions) == len(middles) and (grid := _fit_grid(np.array(positions), np.array(middles))) is not None:
            return FeatureLayout(axis, grid)
    return None


def _find_centres(profile: NDArray[Any], count: int) -> list[float]:
    """Return the mean positions of ``count`` groups of changed frames; fewer if there are not as many."""
    changed = np.flatnonzero(profile > CHANGE_SHARE * profile.max())
    if len(changed) < count:
        return []
    gaps = np.sort(np.argsort(np.diff(changed))[len(changed) - count :]) + 1
    return [float((group[0] + group[-1]) / 2) for group in np.split(changed, gaps)]


def _fit_grid(positions: NDArray[Any], middles: NDArray[Any]) -> FrameGrid | None:
    """Fit ``middles = centre + step · positions``. Frames are whole numbers of samples apart."""
    if np.ptp(positions) == 0:
        return None
    fitted, _ = np.polyfit(positions, middles, 1)
    step = round(fitted)
    if step < 1 or abs(fitted - step) > max(MAX_STEP_ERROR * step, 1e-6):
        return None
    offsets = middles - step * positions
    if np.ptp(offsets) > 2 * step:  # not a line
        return None
    precision = max(1, step // 8)
    return FrameGrid(float(round(offsets.mean() / precision) * precision), float(step))


class FrameTracer:
    """Follows the frames of the features through convolutions and pooling.

    ``grids`` has the frames of each length that a sequence has in the model. ``last`` are those of the last
    convolution. ``patches`` is the grid (bands, times) of the last convolution over both axes of a spectrogram, with
    the frames along its times.
    """

    def __init__(self, num_frames: int, grid: FrameGrid) -> None:
        self.grids = {num_frames: grid}
        self.last = grid
        self.patches: tuple[int, int, FrameGrid] | None = None

    @contextmanager
    def trace(self, model: nn.Module) -> Iterator[FrameTracer]:
        """Follow the convolutions of a model during forward passes."""
        types = (nn.Conv1d, nn.Conv2d, nn.AvgPool1d, nn.MaxPool1d)
        handles = [
            module.register_forward_hook(self._record) for module in model.modules() if isinstance(module, types)
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not args or not isinstance(args[0], torch.Tensor) or not isinstance(output, torch.Tensor):
            return
        num_axes = 2 if isinstance(module, nn.Conv2d) else 1
        before, after = args[0].shape[-num_axes:], output.shape[-num_axes:]
        for axis, (length, new_length) in enumerate(zip(before, after, strict=True)):
            if length not in self.grids or new_length == length:
                continue
            kernel, stride, padding, dilation = (
                _get_size(module, name, axis) for name in ("kernel_size", "stride", "padding", "dilation")
            )
            grid = self.grids[length].convolve(kernel, stride, padding, dilation)
            if new_length not in self.grids:
                self.grids[new_length] = grid
            self.last = self.grids[new_length]
            if num_axes == 2:
                self.patches = (after[1 - axis], new_length, grid) if axis == 1 else None
            return


def _get_size(module: nn.Module, name: str, axis: int) -> int:
    default = 0 if name == "padding" else 1
    value = getattr(module, name, default)
    if isinstance(value, str):  # padding "valid" or "same"
        if value == "valid":
            return 0
        return (_get_size(module, "kernel_size", axis) - 1) * _get_size(module, "dilation", axis) // 2
    return int(value[axis] if isinstance(value, tuple) else value)
