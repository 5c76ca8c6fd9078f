"""A strong baseline: TF-IDF and logistic regression, tuned on held-out training data.

Features are n-grams of words (of characters for Korean, where words have many endings), weighted by
(1 + log tf) · idf and normalized to length 1. C of the regression is chosen on a tenth of the training data,
after training on the rest. The final model is trained on all of it.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jumok.data.readers.text_files import data_folder

BREAK = re.compile(r"<br\s*/?>")
STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)  # C
HELD_OUT_FRACTION = 10  # one text in ten is held out
Log = Callable[[str], None]


@dataclass(frozen=True)
class Split:
    texts: list[str]
    labels: np.ndarray  # int


@dataclass(frozen=True)
class Task:
    """Texts with labels, and the n-grams to count."""

    train: Split
    test: Split
    grams: str = "words 1–2"
    ratings: bool = False  # labels are numbers; close ones are smaller errors

    def subset(self, count: int) -> Task:
        """Return a random subset of each split."""

        def select(split: Split) -> Split:
            indices = np.random.default_rng(0).permutation(len(split.texts))[:count]
            return Split([split.texts[n] for n in indices], split.labels[indices])

        return replace(self, train=select(self.train), test=select(self.test))


# ------------------------------------------------------------------------------------------------- data


def _read_lines(name: str) -> Iterator[str]:
    path = data_folder() / name
    if not path.is_file():
        raise FileNotFoundError(f"{name} is not in the data folder; JUMOK_DATA names the folder")
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield line.rstrip("\r\n")


def _load_imdb(label: str) -> Task:
    def load(split: str) -> Split:
        reviews = [json.loads(line) for line in _read_lines(f"imdb/{split}.jsonl.gz")]
        return Split(
            [BREAK.sub(" ", review["text"]) for review in reviews], np.array([int(review[label]) for review in reviews])
        )

    return Task(load("train"), load("test"), ratings=label == "rating")


def _load_ag_news() -> Task:
    def load(split: str) -> Split:
        rows = [row for row in csv.reader(_read_lines(f"ag_news/{split}.csv.gz")) if row]
        return Split([" . ".join(row[1:]) for row in rows], np.array([int(row[0]) for row in rows]))

    return Task(load("train"), load("test"))


def _load_nsmc() -> Task:
    def load(split: str) -> Split:
        _, *rows = (line.split("\t") for line in _read_lines(f"nsmc/{split}.tsv.gz"))
        return Split([row[1] for row in rows], np.array([int(row[2]) for row in rows]))

    return Task(load("train"), load("test"), grams="characters 1–4")


TASKS: dict[str, Callable[[], Task]] = {
    "imdb": lambda: _load_imdb("label"),
    "imdb-ratings": lambda: _load_imdb("rating"),
    "ag_news": _load_ag_news,
    "nsmc": _load_nsmc,
}


# --------------------------------------------------------------------------------------------- training


def _build_vectorizer(grams: str) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    common = {"sublinear_tf": True, "dtype": np.float32}
    if grams.startswith("words"):
        return TfidfVectorizer(ngram_range=(1, 2), min_df=3, token_pattern=r"\w+|[^\w\s]", **common)
    return TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 4), min_df=3, **common)


def _build_regression(strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, max_iter=1000, tol=1e-4)


def evaluate(task: Task, log: Log) -> dict[str, Any]:
    """Return the accuracy on test data, and for ratings the mean absolute errors of :func:`errors`."""
    start = time.perf_counter()
    order = np.random.default_rng(0).permutation(len(task.train.texts))
    held_out = np.zeros(len(order), bool)
    held_out[order[: max(1, len(order) // HELD_OUT_FRACTION)]] = True
    log(f"{len(held_out):,} training texts, {len(task.test.texts):,} test texts, n-grams of {task.grams}")

    vectorizer = _build_vectorizer(task.grams)
    texts = np.array(task.train.texts, object)
    train, valid = vectorizer.fit_transform(texts[~held_out]), vectorizer.transform(texts[held_out])
    accuracies: dict[float, float] = {}
    for strength in STRENGTHS:
        model = _build_regression(strength).fit(train, task.train.labels[~held_out])
        accuracies[strength] = float(np.mean(model.predict(valid) == task.train.labels[held_out]))
        log(f"C = {strength:g}: accuracy {accuracies[strength]:.4f} on held-out texts")
    best = max(accuracies, key=lambda strength: accuracies[strength])

    vectorizer = _build_vectorizer(task.grams)
    model = _build_regression(best).fit(vectorizer.fit_transform(task.train.texts), task.train.labels)
    probabilities = model.predict_proba(vectorizer.transform(task.test.texts))
    result: dict[str, Any] = {"grams": task.grams, "C": best, "held_out": accuracies}
    result |= {"features": len(vectorizer.vocabulary_), "test": len(task.test.texts)}
    result["accuracy"] = float(np.mean(model.classes_[probabilities.argmax(1)] == task.test.labels))
    if task.ratings:
        result |= errors(probabilities, model.classes_, task.test.labels)
    return result | {"seconds": time.perf_counter() - start}


def errors(probabilities: np.ndarray, ratings: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the mean absolute error of the most probable rating, and of the expected rating.

    >>> errors(np.array([[0.5, 0.1, 0.4]]), np.array([1, 2, 3]), np.array([2]))
    {'mean_error': 1.0, 'mean_error_of_mean': 0.1}
    """
    return {
        "mean_error": round(float(np.abs(ratings[probabilities.argmax(1)] - labels).mean()), 10),
        "mean_error_of_mean": round(float(np.abs(probabilities @ ratings - labels).mean()), 10),
    }


# ---------------------------------------------------------------------------------------------- our runs


def load_scores(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Load the test scores of runs, which `jumok eval` wrote, with the name of their task."""
    return [_load_run_scores(run) for run in runs]


def _load_run_scores(run: Path) -> dict[str, Any]:
    path = run / "eval" / "test.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; jumok eval {run} writes it")
    scores = json.loads(path.read_text(encoding="utf-8"))
    numbers = {name: x for name, x in scores.items() if isinstance(x, int | float)}
    return {"run": run.name, "task": _get_task(run), **numbers}


def _get_task(run: Path) -> str:
    """Return the task that the recipe's data or the folder's name shows."""
    recipe = run / "recipe.yaml"
    if recipe.is_file():
        data = (yaml.safe_load(recipe.read_text(encoding="utf-8")) or {}).get("data") or {}
        train = str(data.get("train", "")).split("/")[0]
        if train in TASKS:
            return "imdb-ratings" if train == "imdb" and "rating" in str(data.get("label_column")) else train
    return next((name for name in sorted(TASKS, key=len, reverse=True) if name in run.name), "unknown")
