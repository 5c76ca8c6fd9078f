"""How good the labels of a classifier are, whichever model gives them: figures, pictures, what went wrong."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.readers.classification import ClassificationExample
from jumok.errors import InputError
from jumok.look.figures.classification_figures import (
    MAX_CLASSES,
    draw_confusion_matrix,
    draw_reliability_diagram,
)
from jumok.look.viewer.error_page import MisclassifiedText
from jumok.metrics.classification import (
    CalibrationBin,
    ClassificationScore,
    calibration_error,
    compute_calibration,
    score_classification,
)
from jumok.tasks.base import Evaluation

__all__ = ["format_output_line", "format_sample", "score_classes"]

NUM_SAMPLES = 3  # sample labels a validation
MAX_SHOWN_CHARS = 200  # characters of such a text
CALIBRATION_FIELDS = ("low", "high", "count", "confidence", "accuracy")


def score_classes(
    samples: Sequence[ClassificationExample],
    target_ids: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    label_names: Sequence[str],
    *,
    select_by: str = "auto",
    positive_label: str | None = None,
) -> Evaluation:
    """From the numbers of the true classes ``(N,)`` and the probabilities of all classes ``(N, C)``.

    ``select_by`` is the figure that decides, accuracy if it is "auto"; ``positive_label`` the class whose F1 is told, of
    two the second if it is None.
    """
    label_names = tuple(label_names)
    said = probabilities.argmax(1)
    found = score_classification(target_ids, said, label_names)
    bins, error = compute_calibration(target_ids, probabilities), calibration_error(target_ids, probabilities)
    figures: dict[str, Any] = {"accuracy": found.accuracy, "macro_f1": found.macro_f1}
    if positive_label is None and len(label_names) == 2:
        positive_label = label_names[1]
    if positive_label is not None:
        figures |= {"f1": found.f1(positive_label), "positive": positive_label}
    if (distance := _compute_mean_absolute_error(target_ids, said, label_names)) is not None:
        figures["mean_absolute_error"] = distance
    figures["calibration_error"] = error
    figures["calibration"] = {key: [getattr(one, key) for one in bins] for key in CALIBRATION_FIELDS}
    figures["classes"] = [vars(one) for one in found.classes]
    figures["confusion"] = found.confusion.tolist()
    deciding = "accuracy" if select_by == "auto" else select_by
    if deciding not in figures:
        raise InputError(f"evaluation.select_by is {deciding!r}; there are {', '.join(figures)}; see evaluation.positive_label")

    def of(some: NDArray[np.int64]) -> float:
        part = score_classification(target_ids[some], said[some], label_names)
        return part.f1(str(positive_label)) if deciding == "f1" else float(getattr(part, deciding))

    told = list(
        zip(
            samples,
            (label_names[at] for at in target_ids),
            (label_names[at] for at in said),
            probabilities.max(1),
            strict=True,
        )
    )
    return Evaluation(
        figures,
        deciding,
        of,
        [format_output_line(one, label, wanted, float(share)) for one, wanted, label, share in told],
        [
            f"  {format_sample(one)}  said {label}, wanted {wanted}"
            for one, wanted, label, _ in told[:NUM_SAMPLES]
        ],
        functools.partial(_draw_confusion, found) if len(label_names) <= MAX_CLASSES else None,
        {"calibration": functools.partial(_draw_calibration, bins, error)},
        [
            MisclassifiedText(one.text, one.pair, label, wanted, float(share))
            for one, wanted, label, share in told
            if label != wanted
        ],
    )


def format_output_line(
    sample: ClassificationExample, prediction: Any, target: Any, probability: float | None = None
) -> str:
    """What was said of a sample, as a line of JSON."""
    told: dict[str, Any] = {"text": sample.text}
    if sample.pair is not None:
        told["text_pair"] = sample.pair
    told |= {"prediction": prediction, "target": target}
    if probability is not None:
        told["probability"] = round(probability, 6)
    return json.dumps(told, ensure_ascii=False)


def format_sample(sample: ClassificationExample) -> str:
    """A sample for people."""
    text = sample.text if sample.pair is None else f"{sample.text} | {sample.pair}"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def _compute_mean_absolute_error(
    target_ids: NDArray[np.int64], predicted_ids: NDArray[np.int64], label_names: Sequence[str]
) -> float | None:
    """How far off classes that are numbers are, in the mean; None where they are none."""
    try:
        numbers = np.array([float(name) for name in label_names])
    except ValueError:
        return None
    return float(np.abs(numbers[target_ids] - numbers[predicted_ids]).mean())


def _draw_confusion(scores: ClassificationScore, path: Path) -> Path:
    title = f"{path.stem}, accuracy {scores.accuracy:.3f}, macro F1 {scores.macro_f1:.3f}"
    return draw_confusion_matrix(scores.confusion, scores.names, path, title=title)


def _draw_calibration(bins: Sequence[CalibrationBin], error: float, path: Path) -> Path:
    return draw_reliability_diagram(
        bins, path, calibration_error=error, title=path.stem.removesuffix("-calibration")
    )
