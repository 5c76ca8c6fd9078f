"""How good a voice is: does it read its texts, how far is it from recordings, what do its styles do?

Every text of a split is said in the style of its own recording, and compared with that. Looked into wholly,

- every style that the data has a name for is given to the same few texts: are pitch and rate in the order of
  the recordings?
- there is more of one style token in turn: what are pitch, energy and duration then?
- texts are said in the style of recordings of *other* texts, and judges listen (``speak_judges.py``).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import warnings
from collections.abc import Callable, Sequence
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
from jumok.metrics.cepstral_distortion import mel_cepstral_distortion
from jumok.metrics.prosody import Prosody, measure_prosody
from jumok.tasks.base import Evaluation
from jumok.tasks.speak import judges as speak_judges
from jumok.training import find_alarms

if TYPE_CHECKING:
    from jumok.tasks.speak.prediction import SpeechSegment
    from jumok.tasks.speak.predictor import SpeechPredictor

__all__ = ["compute_concordance", "score_speech"]

NUM_STYLE_TEXTS = 12  # that are said in every style, and with every token
MAX_STYLES = 24  # styles that are told apart
NUM_FIGURES = 2  # utterances that are drawn, and kept as sounds
NUM_STYLE_EXAMPLES = 64  # utterances whose styles are measured
TOKEN_FRACTION = 0.3  # of the style that is the one token
NORMAL_95 = 1.96  # standard errors: 95 % of a normal distribution


def score_speech(
    predictor: SpeechPredictor, examples: Sequence[SpeechExample], *, detailed: bool
) -> Evaluation:
    """The figures of some recordings; ``detailed``, also what styles do, which takes its time."""
    encoded = predictor.check_encoded(predictor.encode(examples), None)
    bands = predictor.audio.config.n_mels
    mels = [np.asarray(predictor.task.feature_cache[one.recording][:, :bands], np.float32) for one in encoded]
    styles = None if predictor.model.style_tokens is None else predictor.extract_style_weights(*mels)
    pieces = list(predictor.synthesize_segments([one.text for one in examples], styles))
    spans = -predictor.audio.config.min_level_db
    apart = np.array(
        [
            mel_cepstral_distortion(one.mel, mel, range_db=spans).decibels
            for one, mel in zip(pieces, mels, strict=True)
        ]
    )
    figures: dict[str, Any] = {"mcd": float(apart.mean()), "loss": predictor.compute_loss(examples)}
    alignments = [one.alignment for one in pieces]
    figures |= average_alignment_health(
        alignments, *zip(*(one.shape for one in alignments), strict=True), has_end_symbol=True
    )
    figures["alignment/cut"] = sum(one.is_truncated for one in pieces) / len(pieces)
    health = predictor.measure_health(examples[:NUM_STYLE_EXAMPLES])
    figures |= {name: value for name, value in health.items() if name.startswith("style/")}
    drawings: dict[str, Callable[[Path], Path]] = {}
    if detailed:
        if styles is not None:
            figures |= _measure_styles(predictor, examples, mels, styles)
            tokens = measure_style_tokens(predictor, _select_texts(examples))
            figures["tokens"] = tokens
            drawings["tokens"] = functools.partial(_draw_token_effects, tokens)
        if predictor.run.recipe.evaluation.num_judges:
            figures |= speak_judges.evaluate_with_judges(predictor, examples, mels, styles)
        for number, one in enumerate(pieces[:NUM_FIGURES], 1):
            save_audio(_build_audio_path(predictor, number), one.waveform, predictor.audio.config.sample_rate)
            style = None if styles is None else styles[number - 1 : number]
            drawings[str(number)] = functools.partial(
                _draw_alignment, predictor, examples[number - 1].text, style
            )
    figures["alarms"] = find_alarms([{name: x for name, x in figures.items() if isinstance(x, float)}], 1.0)
    return Evaluation(
        figures,
        "mcd",
        lambda some: float(apart[some].mean()),
        [
            json.dumps(_build_output(one, piece, len(mel), far, predictor), ensure_ascii=False)
            for one, piece, mel, far in zip(examples, pieces, mels, apart, strict=True)
        ],
        [
            *(
                f"  {one.text[:60]}  →  {piece.health}"
                for one, piece in zip(examples[:5], pieces, strict=False)
            ),
            *(f"ALARM: {alarm}" for alarm in figures["alarms"]),
        ],
        extra_figures=drawings,
    )


def _build_output(
    example: SpeechExample,
    segment: SpeechSegment,
    num_frames: int,
    distortion_db: float,
    predictor: SpeechPredictor,
) -> dict[str, Any]:
    health, frame = segment.health, predictor.audio.config.frame_seconds
    return {
        "recording": example.audio.location,
        "text": example.text,
        "speaker": example.speaker,
        "emotion": example.emotion,
        "seconds": round(len(segment.mel) * frame, 3),
        "seconds of the recording": round(num_frames * frame, 3),
        "mcd": round(float(distortion_db), 3),
        "diagonality": round(health.diagonality, 4),
        "skipped": [segment.symbols[at] for at in health.skipped],
        "repeated": [segment.symbols[at] for at in health.repeated],
        "finished": not segment.is_truncated,
    }


def _build_audio_path(predictor: SpeechPredictor, index: int) -> Path:
    return predictor.run.folder / "eval" / f"said-{index}.wav"


def _draw_alignment(predictor: SpeechPredictor, text: str, style_weights: Tensor | None, path: Path) -> Path:
    from jumok.look.viewer import view_writer

    return view_writer.save_view(predictor.build_segment_view(text, style_weights), path)


def _draw_token_effects(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    from jumok.look.figures.style_figure import draw_style_effects

    return draw_style_effects(rows, path)


def _select_texts(examples: Sequence[SpeechExample]) -> list[str]:
    """A few different ones, of all lengths."""
    different = sorted({one.text for one in examples}, key=lambda text: (len(text), text))
    chosen = np.linspace(0, len(different) - 1, min(NUM_STYLE_TEXTS, len(different))).round().astype(int)
    return [different[number] for number in chosen]


# ------------------------------------------------------------------------------------------------- styles


def _measure_styles(
    predictor: SpeechPredictor,
    examples: Sequence[SpeechExample],
    mels: Sequence[NDArray[Any]],
    style_weights: Tensor,
) -> dict[str, Any]:
    """The same texts in each style that has a name, and whether pitch and rate come out in order.

    The order that is expected is that of the recordings, or of the built-in voices as they were made.
    """
    kind = "emotion" if any(one.emotion for one in examples) else "speaker"
    names = [getattr(one, kind) for one in examples]
    different = [name for name in dict.fromkeys(names) if name]
    if not 2 <= len(different) <= MAX_STYLES:
        return {}
    texts, rows = _select_texts(examples), []
    for name in different:
        those = [number for number, one in enumerate(names) if one == name]
        said = _measure_segments(
            predictor, predictor.synthesize_segments(texts, style_weights[those].mean(0, keepdim=True))
        )
        real = _measure_recordings(predictor, [examples[number] for number in those[: 2 * NUM_STYLE_TEXTS]])
        wanted = STYLES.get(name) if isinstance(examples[0].audio, BuiltinUtterance) else None
        rows.append(
            {
                kind: name,
                "recordings": len(those),
                "pitch wanted": real["pitch"] if wanted is None else wanted.pitch,
                "pitch": said["pitch"],
                "rate wanted": real["rate"] if wanted is None else wanted.speed,
                "rate": said["rate"],
            }
        )
    rows.sort(key=lambda row: row["pitch wanted"])
    return {
        f"style/{name}_in_order": compute_concordance(
            [row[name] for row in rows], [row[f"{name} wanted"] for row in rows]
        )
        for name in ("pitch", "rate")
    } | {"styles": rows}


def compute_concordance(values: Sequence[float], references: Sequence[float]) -> float:
    """The share of pairs that are in the right order; what is no number is in no order.

    >>> compute_concordance([90.0, 130.0, 120.0], [1.0, 2.0, 3.0])
    0.6666666666666666
    """
    pairs = [
        (a - b) * (x - y) > 0
        for (a, x), (b, y) in itertools.combinations(zip(values, references, strict=True), 2)
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


def measure_style_tokens(predictor: SpeechPredictor, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Mean pitch, energy and duration of the same texts, with more of one style token each, with intervals.

    The usual style is moved towards the token, by no more than styles of recordings are: with a token alone,
    a voice would say what it never learned to. An interval holds the mean with 95 %, by how much what the
    token does differs from text to text; that the texts themselves differ, in length say, does not count.
    """
    tokens = predictor.model.style_tokens.config.num_tokens
    rows: list[dict[str, Any]] = [{"token": str(number + 1)} for number in range(tokens)]
    said: list[list[Prosody]] = []
    for number in range(tokens):
        alone = predictor.expand_style_weights(torch.eye(tokens)[number].tolist())
        weights = torch.lerp(predictor.model.style_tokens.default_weights, alone, TOKEN_FRACTION)
        said.append(
            [_measure_prosody(predictor, one) for one in predictor.synthesize_segments(texts, weights)]
        )
    for name in ("pitch", "energy", "seconds"):
        found = estimate_effects([[getattr(one, name) for one in each] for each in said])
        for row, one in zip(rows, found, strict=True):
            row[name], row[f"{name} ±"] = one
    return rows


def estimate_effects(values: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The mean of each row of values, and how far it may be off; a column is one text, and has its own level.

    >>> [(round(mean, 2), round(off, 2)) for mean, off in estimate_effects([[1, 5, 9], [3, 7, 10.9]])]
    [(5.0, 0.03), (6.97, 0.03)]
    """
    table = np.array(values, float)
    table[~np.isfinite(table)] = np.nan
    with warnings.catch_warnings():  # of rows and texts that have no number at all
        warnings.simplefilter("ignore", RuntimeWarning)
        own = table - np.nanmean(table, 0) + np.nanmean(table)
        counts = np.isfinite(own).sum(1)
        means, spreads = np.nanmean(own, 1), np.nanstd(own, 1, ddof=1)
    within = np.where(counts > 1, NORMAL_95 * spreads / np.sqrt(np.maximum(counts, 1)), np.nan)
    return list(zip(means.tolist(), within.tolist(), strict=True))


def _measure_prosody(predictor: SpeechPredictor, segment: SpeechSegment) -> Prosody:
    return measure_prosody(segment.waveform, predictor.audio.config.sample_rate)


def _measure_segments(predictor: SpeechPredictor, segments: Any) -> dict[str, float]:
    found = [(_measure_prosody(predictor, one), len(one.symbols) - 1) for one in segments]
    return _average_prosody(found)


def _measure_recordings(predictor: SpeechPredictor, examples: Sequence[SpeechExample]) -> dict[str, float]:
    found = []
    for one in examples:
        wave = one.audio.decode(predictor.audio)
        assert isinstance(wave, np.ndarray)  # it was judged
        found.append(
            (
                measure_prosody(wave, predictor.audio.config.sample_rate),
                len(predictor.tokenizer.spell(one.text)),
            )
        )
    return _average_prosody(found)


def _average_prosody(measurements: Sequence[tuple[Prosody, int]]) -> dict[str, float]:
    """Pitch, in the middle, for an octave off is an error; and the rate, symbols a second."""
    pitches = np.array([one.pitch for one, _ in measurements])
    rates = [symbols / one.seconds for one, symbols in measurements if one.seconds > 0]
    heard = pitches[np.isfinite(pitches)]
    return {
        "pitch": float(np.median(heard)) if len(heard) else math.nan,
        "rate": float(np.mean(rates)) if rates else math.nan,
    }
