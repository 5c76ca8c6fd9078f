"""How good the labels of a classifier are, whichever model gives them: figures, pictures, what went wrong."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.labelled import Sample
from jumok.errors import InputError
from jumok.look.classes import MOST_CLASSES, confusion_matrix, reliability
from jumok.look.mistakes import Mistake
from jumok.metrics.classification import Bin, Classification, calibration, calibration_error, classification
from jumok.tasks.verdicts import Judgement

__all__ = ["judge", "line", "shown"]

SHOWN = 3  # sample labels a validation
LONGEST_SHOWN = 200  # characters of such a text
BINS = ("low", "high", "count", "confidence", "accuracy")


def judge(
    samples: Sequence[Sample],
    truth: NDArray[np.int64],
    shares: NDArray[np.float64],
    names: Sequence[str],
    *,
    best: str = "auto",
    positive: str | None = None,
) -> Judgement:
    """From the numbers of the true classes ``(N,)`` and the probabilities of all classes ``(N, C)``.

    ``best`` is the figure that decides, accuracy if it is "auto"; ``positive`` the class whose F1 is told, of
    two the second if it is None.
    """
    names = tuple(names)
    said = shares.argmax(1)
    found = classification(truth, said, names)
    bins, error = calibration(truth, shares), calibration_error(truth, shares)
    figures: dict[str, Any] = {"accuracy": found.accuracy, "macro_f1": found.macro_f1}
    if positive is None and len(names) == 2:
        positive = names[1]
    if positive is not None:
        figures |= {"f1": found.f1(positive), "positive": positive}
    if (distance := _distance(truth, said, names)) is not None:
        figures["mean_absolute_error"] = distance
    figures["calibration_error"] = error
    figures["calibration"] = {key: [getattr(one, key) for one in bins] for key in BINS}
    figures["classes"] = [vars(one) for one in found.classes]
    figures["confusion"] = found.confusion.tolist()
    deciding = "accuracy" if best == "auto" else best
    if deciding not in figures:
        raise InputError(f"score.best is {deciding!r}; there are {', '.join(figures)}; see score.positive")

    def of(some: NDArray[np.int64]) -> float:
        part = classification(truth[some], said[some], names)
        return part.f1(str(positive)) if deciding == "f1" else float(getattr(part, deciding))

    told = list(
        zip(samples, (names[at] for at in truth), (names[at] for at in said), shares.max(1), strict=True)
    )
    return Judgement(
        figures,
        deciding,
        of,
        [line(one, label, wanted, float(share)) for one, wanted, label, share in told],
        [f"  {shown(one)}  said {label}, wanted {wanted}" for one, wanted, label, _ in told[:SHOWN]],
        functools.partial(_draw_confusion, found) if len(names) <= MOST_CLASSES else None,
        {"calibration": functools.partial(_draw_calibration, bins, error)},
        [
            Mistake(one.text, one.pair, label, wanted, float(share))
            for one, wanted, label, share in told
            if label != wanted
        ],
    )


def line(sample: Sample, said: Any, wanted: Any, probability: float | None = None) -> str:
    """What was said of a sample, as a line of JSON."""
    told: dict[str, Any] = {"text": sample.text}
    if sample.pair is not None:
        told["pair"] = sample.pair
    told |= {"said": said, "wanted": wanted}
    if probability is not None:
        told["probability"] = round(probability, 6)
    return json.dumps(told, ensure_ascii=False)


def shown(sample: Sample) -> str:
    """A sample for people."""
    text = sample.text if sample.pair is None else f"{sample.text} | {sample.pair}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _distance(truth: NDArray[np.int64], said: NDArray[np.int64], names: Sequence[str]) -> float | None:
    """How far off classes that are numbers are, in the mean; None where they are none."""
    try:
        numbers = np.array([float(name) for name in names])
    except ValueError:
        return None
    return float(np.abs(numbers[truth] - numbers[said]).mean())


def _draw_confusion(found: Classification, path: Path) -> Path:
    title = f"{path.stem}, accuracy {found.accuracy:.3f}, macro F1 {found.macro_f1:.3f}"
    return confusion_matrix(found.confusion, found.names, path, title=title)


def _draw_calibration(bins: Sequence[Bin], error: float, path: Path) -> Path:
    return reliability(bins, path, error=error, title=path.stem.removesuffix("-calibration"))
