"""Scores of a classifier: accuracy, F1, calibration, and figures."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.readers.classification import ClassificationExample
from jumok.errors import InputError
from jumok.metrics.classification import (
    CalibrationBin,
    ClassificationScore,
    calibration_error,
    compute_calibration,
    score_classification,
)
from jumok.tasks.base import Evaluation

NUM_SAMPLES = 3  # sample predictions per validation
MAX_SHOWN_CHARS = 200  # of the text of a sample
CALIBRATION_FIELDS = ("low", "high", "count", "confidence", "accuracy")


def score_classes(
    samples: Sequence[ClassificationExample],
    target_ids: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    label_names: Sequence[str],
    *,
    select_by: str = "auto",
    positive_label: str | None = None,
    detailed: bool = False,
) -> Evaluation:
    """Score the probabilities ``(N, C)`` of all classes against the indices of the true classes ``(N,)``.

    ``select_by`` is the main metric; "auto" means accuracy. ``positive_label`` is the class whose F1 is reported;
    None means the second of two classes. ``detailed`` adds figures.
    """
    label_names = tuple(label_names)
    predicted_ids = probabilities.argmax(1)
    scores = score_classification(target_ids, predicted_ids, label_names)
    bins, error = compute_calibration(target_ids, probabilities), calibration_error(target_ids, probabilities)
    metrics: dict[str, Any] = {"accuracy": scores.accuracy, "macro_f1": scores.macro_f1}
    if positive_label is None and len(label_names) == 2:
        positive_label = label_names[1]
    if positive_label is not None:
        metrics |= {"f1": scores.f1(positive_label), "positive_label": positive_label}
    distance = _compute_mean_absolute_error(target_ids, predicted_ids, label_names)
    if distance is not None:
        metrics["mean_absolute_error"] = distance
    metrics["calibration_error"] = error
    metrics["calibration"] = {key: [getattr(bin, key) for bin in bins] for key in CALIBRATION_FIELDS}
    metrics["classes"] = [vars(score) for score in scores.classes]
    metrics["confusion"] = scores.confusion.tolist()
    main_metric = "accuracy" if select_by == "auto" else select_by
    if main_metric not in metrics:
        raise InputError(
            f"evaluation.select_by is {main_metric!r}; there are {', '.join(metrics)}; see evaluation.positive_label"
        )

    def statistic(indices: NDArray[np.int64]) -> float:
        part = score_classification(target_ids[indices], predicted_ids[indices], label_names)
        return part.f1(str(positive_label)) if main_metric == "f1" else float(getattr(part, main_metric))

    rows = list(
        zip(
            samples,
            (label_names[index] for index in target_ids),
            (label_names[index] for index in predicted_ids),
            probabilities.max(1),
            strict=True,
        )
    )
    return Evaluation(
        metrics,
        main_metric,
        statistic=statistic,
        outputs=[
            format_output_line(sample, prediction, target, float(probability))
            for sample, target, prediction, probability in rows
        ],
        samples=[
            f"  {format_sample(sample)}  prediction {prediction}, target {target}"
            for sample, target, prediction, _ in rows[:NUM_SAMPLES]
        ],
        figures=_build_figures(scores, bins, error) if detailed else {},
    )


def format_output_line(
    sample: ClassificationExample, prediction: Any, target: Any, probability: float | None = None
) -> str:
    """A prediction as a line of JSON."""
    content: dict[str, Any] = {"text": sample.text}
    if sample.pair is not None:
        content["text_pair"] = sample.pair
    content |= {"prediction": prediction, "target": target}
    if probability is not None:
        content["probability"] = round(probability, 6)
    return json.dumps(content, ensure_ascii=False)


def format_sample(sample: ClassificationExample) -> str:
    """The text or texts of an example, shortened."""
    text = sample.text if sample.pair is None else f"{sample.text} | {sample.pair}"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def _compute_mean_absolute_error(
    target_ids: NDArray[np.int64], predicted_ids: NDArray[np.int64], label_names: Sequence[str]
) -> float | None:
    """The mean absolute error, if the class names are numbers."""
    try:
        values = np.array([float(name) for name in label_names])
    except ValueError:
        return None
    return float(np.abs(values[target_ids] - values[predicted_ids]).mean())


def _build_figures(
    scores: ClassificationScore, bins: Sequence[CalibrationBin], error: float
) -> dict[str, Callable[[Path], Path]]:
    """The confusion matrix, unless there are too many classes, and the reliability diagram."""
    from jumok.look.figures.classification_figures import MAX_CLASSES

    figures: dict[str, Callable[[Path], Path]] = {}
    if len(scores.names) <= MAX_CLASSES:
        figures[""] = functools.partial(_draw_confusion, scores)
    figures["calibration"] = functools.partial(_draw_calibration, bins, error)
    return figures


def _draw_confusion(scores: ClassificationScore, path: Path) -> Path:
    from jumok.look.figures.classification_figures import draw_confusion_matrix

    title = f"{path.stem}, accuracy {scores.accuracy:.3f}, macro F1 {scores.macro_f1:.3f}"
    return draw_confusion_matrix(scores.confusion, scores.names, path, title=title)


def _draw_calibration(bins: Sequence[CalibrationBin], error: float, path: Path) -> Path:
    from jumok.look.figures.classification_figures import draw_reliability_diagram

    return draw_reliability_diagram(bins, path, calibration_error=error, title=path.stem.removesuffix("-calibration"))
