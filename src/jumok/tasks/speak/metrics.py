"""Scores of a voice: intelligibility, distance to recordings, and the effect of styles.

Every text of a split is synthesized in the style of its own recording and compared with it. A detailed evaluation
also

- synthesizes a few texts in every named style: are pitch and rate in the same order as in the recordings?
- increases the weight of each style token: how do pitch, energy and duration change?
- synthesizes texts in the styles of recordings of *other* texts, for judges to classify (:mod:`.judges`).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.data.audio import save_audio
from jumok.data.builtin.spoken_numbers import STYLES
from jumok.data.readers.speech import BuiltinUtterance, SpeechExample
from jumok.metrics.alignment_health import average_alignment_health
from jumok.metrics.prosody import Prosody, measure_prosody
from jumok.tasks.base import Evaluation
from jumok.training import find_alarms

if TYPE_CHECKING:
    from jumok.tasks.speak.prediction import SpeechSegment
    from jumok.tasks.speak.predictor import SpeechPredictor

NUM_STYLE_TEXTS = 12  # texts that are synthesized in every style, and with every token
MAX_STYLES = 24
NUM_FIGURES = 2  # utterances that are drawn, and written as audio
NUM_STYLE_EXAMPLES = 64  # utterances whose styles are measured
NUM_SAMPLES = 5
TOKEN_FRACTION = 0.3  # weight of the single token in a style
NORMAL_95 = 1.96  # standard errors that contain 95 % of a normal distribution


def score_speech(predictor: SpeechPredictor, examples: Sequence[SpeechExample], *, detailed: bool) -> Evaluation:
    """Score the speech of texts against their recordings; ``detailed`` adds the effect of styles."""
    mels = predictor.load_mels(examples)
    has_styles = predictor.model.style_tokens is not None
    style_weights = predictor.extract_style_weights(*mels) if has_styles else None
    segments = list(predictor.synthesize_segments([example.text for example in examples], style_weights))
    distortions = np.array(
        [predictor.compute_distortion(segment.mel, mel) for segment, mel in zip(segments, mels, strict=True)]
    )
    metrics: dict[str, Any] = {"mcd": float(distortions.mean()), "loss": predictor.compute_loss(examples)}
    alignments = [segment.alignment for segment in segments]
    metrics |= average_alignment_health(
        alignments, *zip(*(alignment.shape for alignment in alignments), strict=True), has_end_symbol=True
    )
    metrics["alignment/truncated"] = sum(segment.is_truncated for segment in segments) / len(segments)
    health = predictor.measure_health(examples[:NUM_STYLE_EXAMPLES])
    metrics |= {name: value for name, value in health.items() if name.startswith("style/")}
    figures: dict[str, Callable[[Path], Path]] = {}
    if detailed:
        if style_weights is not None:
            metrics |= _measure_styles(predictor, examples, style_weights)
            rows = measure_style_tokens(predictor, _select_texts(examples))
            metrics["style_tokens"] = rows
            figures["tokens"] = functools.partial(_draw_token_effects, rows)
        if predictor.task.recipe.evaluation.num_judges:
            from jumok.tasks.speak.judges import evaluate_with_judges

            metrics |= evaluate_with_judges(predictor, examples, mels, style_weights)
        figures |= _write_samples(predictor, examples, segments, style_weights)
    metrics["alarms"] = find_alarms([{name: x for name, x in metrics.items() if isinstance(x, float)}], 1.0)
    rows_of_outputs = zip(examples, segments, mels, distortions, strict=True)
    return Evaluation(
        metrics,
        select_by="mcd",
        statistic=lambda indices: float(distortions[indices].mean()),
        outputs=[
            json.dumps(_build_output(example, segment, len(mel), x, predictor), ensure_ascii=False)
            for example, segment, mel, x in rows_of_outputs
        ],
        samples=[
            *(
                f"  {example.text[:60]}  →  {segment.health}"
                for example, segment in zip(examples[:NUM_SAMPLES], segments, strict=False)
            ),
            *(f"ALARM: {alarm}" for alarm in metrics["alarms"]),
        ],
        print_samples=True,
        figures=figures,
    )


def _build_output(
    example: SpeechExample,
    segment: SpeechSegment,
    num_frames: int,
    distortion_db: float,
    predictor: SpeechPredictor,
) -> dict[str, Any]:
    health, frame_seconds = segment.health, predictor.audio.config.frame_seconds
    return {
        "recording": example.audio.location,
        "text": example.text,
        "speaker": example.speaker,
        "emotion": example.emotion,
        "duration_seconds": round(len(segment.mel) * frame_seconds, 3),
        "recording_seconds": round(num_frames * frame_seconds, 3),
        "mcd": round(float(distortion_db), 3),
        "diagonality": round(health.diagonality, 4),
        "skipped_symbols": [segment.symbols[index] for index in health.skipped],
        "repeated_symbols": [segment.symbols[index] for index in health.repeated],
        "finished": not segment.is_truncated,
    }


def _write_samples(
    predictor: SpeechPredictor,
    examples: Sequence[SpeechExample],
    segments: Sequence[SpeechSegment],
    style_weights: Tensor | None,
) -> dict[str, Callable[[Path], Path]]:
    """Write a few utterances as audio. Returns functions that draw their alignments."""
    figures: dict[str, Callable[[Path], Path]] = {}
    for index, segment in enumerate(segments[:NUM_FIGURES]):
        path = predictor.run.folder / "eval" / f"sample-{index + 1}.wav"
        save_audio(path, segment.waveform, predictor.audio.config.sample_rate)
        style = None if style_weights is None else style_weights[index : index + 1]
        text = examples[index].text
        figures[str(index + 1)] = functools.partial(_draw_alignment, predictor, text, style)
    return figures


def _draw_alignment(predictor: SpeechPredictor, text: str, style_weights: Tensor | None, path: Path) -> Path:
    from jumok.look.viewer import view_writer

    return view_writer.save_view(predictor.build_segment_view(text, style_weights), path)


def _draw_token_effects(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    from jumok.look.figures.style_figure import draw_style_effects

    return draw_style_effects(rows, path)


def _select_texts(examples: Sequence[SpeechExample]) -> list[str]:
    """A few different texts of all lengths."""
    texts = sorted({example.text for example in examples}, key=lambda text: (len(text), text))
    indices = np.linspace(0, len(texts) - 1, min(NUM_STYLE_TEXTS, len(texts))).round().astype(int)
    return [texts[index] for index in indices]


# ------------------------------------------------------------------------------------------------------ styles


def _measure_styles(
    predictor: SpeechPredictor, examples: Sequence[SpeechExample], style_weights: Tensor
) -> dict[str, Any]:
    """Synthesize the same texts in each named style: are pitch and rate in the expected order?

    The expected order is that of the recordings, or of the parameters of the built-in voices.
    """
    field = "emotion" if any(example.emotion for example in examples) else "speaker"
    names = [getattr(example, field) for example in examples]
    styles = [name for name in dict.fromkeys(names) if name]
    if not 2 <= len(styles) <= MAX_STYLES:
        return {}
    is_builtin = isinstance(examples[0].audio, BuiltinUtterance)
    texts, rows = _select_texts(examples), []
    for style in styles:
        indices = [index for index, name in enumerate(names) if name == style]
        mean_weights = style_weights[indices].mean(0, keepdim=True)
        speech = _measure_segments(predictor, predictor.synthesize_segments(texts, mean_weights))
        recordings = _measure_recordings(predictor, [examples[index] for index in indices[: 2 * NUM_STYLE_TEXTS]])
        parameters = STYLES.get(style) if is_builtin else None
        rows.append(
            {
                field: style,
                "recordings": len(indices),
                "target pitch": recordings["pitch"] if parameters is None else parameters.pitch,
                "pitch": speech["pitch"],
                "target rate": recordings["rate"] if parameters is None else parameters.speed,
                "rate": speech["rate"],
            }
        )
    rows.sort(key=lambda row: row["target pitch"])
    concordances = {
        f"style/{name}_concordance": compute_concordance(
            [row[name] for row in rows], [row[f"target {name}"] for row in rows]
        )
        for name in ("pitch", "rate")
    }
    return concordances | {"styles": rows}


def compute_concordance(values: Sequence[float], references: Sequence[float]) -> float:
    """The fraction of pairs that are in the same order. A pair with a NaN is not.

    >>> compute_concordance([90.0, 130.0, 120.0], [1.0, 2.0, 3.0])
    0.6666666666666666
    """
    pairs = [
        (a - b) * (x - y) > 0 for (a, x), (b, y) in itertools.combinations(zip(values, references, strict=True), 2)
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


def measure_style_tokens(predictor: SpeechPredictor, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Mean pitch, energy and duration of the same texts, with more of one style token each, with intervals.

    The default style is moved towards the token, but no further than styles of recordings are: a token alone is a
    style that the voice was never trained with. An interval contains the mean with 95 %, given how much the effect
    of the token varies between texts. Differences between the texts themselves do not count.
    """
    style_tokens = predictor.require_style_tokens()
    num_tokens = style_tokens.config.num_tokens
    rows: list[dict[str, Any]] = [{"token": str(number + 1)} for number in range(num_tokens)]
    prosodies: list[list[Prosody]] = []
    for number in range(num_tokens):
        token_weights = predictor.expand_style_weights(torch.eye(num_tokens)[number].tolist())
        weights = torch.lerp(style_tokens.default_weights, token_weights, TOKEN_FRACTION)
        segments = predictor.synthesize_segments(texts, weights)
        prosodies.append([_measure_prosody(predictor, segment) for segment in segments])
    for name in ("pitch", "energy", "seconds"):
        effects = estimate_effects([[getattr(prosody, name) for prosody in row] for row in prosodies])
        for row, (mean, margin) in zip(rows, effects, strict=True):
            row[name], row[f"{name} ±"] = mean, margin
    return rows


def estimate_effects(values: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The mean of each row of values and its margin of error. A column is a text, which has its own level.

    >>> [(round(mean, 2), round(margin, 2)) for mean, margin in estimate_effects([[1, 5, 9], [3, 7, 10.9]])]
    [(5.0, 0.03), (6.97, 0.03)]
    """
    table = np.array(values, float)
    table[~np.isfinite(table)] = np.nan
    with warnings.catch_warnings():  # of rows and texts without any number
        warnings.simplefilter("ignore", RuntimeWarning)
        centered = table - np.nanmean(table, 0) + np.nanmean(table)
        counts = np.isfinite(centered).sum(1)
        means, deviations = np.nanmean(centered, 1), np.nanstd(centered, 1, ddof=1)
    margins = np.where(counts > 1, NORMAL_95 * deviations / np.sqrt(np.maximum(counts, 1)), np.nan)
    return list(zip(means.tolist(), margins.tolist(), strict=True))


def _measure_prosody(predictor: SpeechPredictor, segment: SpeechSegment) -> Prosody:
    return measure_prosody(segment.waveform, predictor.audio.config.sample_rate)


def _measure_segments(predictor: SpeechPredictor, segments: Iterable[SpeechSegment]) -> dict[str, float]:
    return _average_prosody([(_measure_prosody(predictor, segment), len(segment.symbols) - 1) for segment in segments])


def _measure_recordings(predictor: SpeechPredictor, examples: Sequence[SpeechExample]) -> dict[str, float]:
    measurements = []
    for example in examples:
        waveform = example.audio.decode(predictor.audio)
        assert isinstance(waveform, np.ndarray)  # its spectrogram was read before
        prosody = measure_prosody(waveform, predictor.audio.config.sample_rate)
        measurements.append((prosody, len(predictor.tokenizer.spell(example.text))))
    return _average_prosody(measurements)


def _average_prosody(measurements: Sequence[tuple[Prosody, int]]) -> dict[str, float]:
    """The median pitch, which ignores octave errors, and the mean rate in symbols per second."""
    pitches: NDArray[np.float64] = np.array([prosody.pitch for prosody, _ in measurements])
    rates = [num_symbols / prosody.seconds for prosody, num_symbols in measurements if prosody.seconds > 0]
    voiced = pitches[np.isfinite(pitches)]
    return {
        "pitch": float(np.median(voiced)) if len(voiced) else math.nan,
        "rate": float(np.mean(rates)) if rates else math.nan,
    }
