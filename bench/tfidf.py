"""What is hard to beat: TF-IDF and logistic regression, tuned on held-out training data.

Of each text the n-grams of words (of characters in Korean, where words take many endings), weighted by
(1 + log tf) · idf, of length 1. C of the regression is the one that is best on a tenth of the training data
with the rest of it learned; then all of it is learned.
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
HELD_OUT = 10  # one of so many
Say = Callable[[str], None]


@dataclass(frozen=True)
class Side:
    texts: list[str]
    labels: np.ndarray  # int


@dataclass(frozen=True)
class Task:
    """Texts with labels, and how to count grams in them."""

    train: Side
    test: Side
    grams: str = "words 1–2"
    ratings: bool = False  # labels are numbers, of which near ones are less wrong

    def smaller(self, many: int) -> Task:
        """Some of it, of all labels."""

        def some(side: Side) -> Side:
            numbers = np.random.default_rng(0).permutation(len(side.texts))[:many]
            return Side([side.texts[n] for n in numbers], side.labels[numbers])

        return replace(self, train=some(self.train), test=some(self.test))


# ------------------------------------------------------------------------------------------------- data


def _lines(name: str) -> Iterator[str]:
    path = data_folder() / name
    if not path.is_file():
        raise FileNotFoundError(f"no {name} in the folder that JUMOK_DATA names")
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield line.rstrip("\r\n")


def _imdb(what: str) -> Task:
    def side(split: str) -> Side:
        read = [json.loads(line) for line in _lines(f"imdb/{split}.jsonl.gz")]
        return Side([BREAK.sub(" ", one["text"]) for one in read], np.array([int(one[what]) for one in read]))

    return Task(side("train"), side("test"), ratings=what == "rating")


def _ag_news() -> Task:
    def side(split: str) -> Side:
        rows = [row for row in csv.reader(_lines(f"ag_news/{split}.csv.gz")) if row]
        return Side([" . ".join(row[1:]) for row in rows], np.array([int(row[0]) for row in rows]))

    return Task(side("train"), side("test"))


def _nsmc() -> Task:
    def side(split: str) -> Side:
        _, *rows = (line.split("\t") for line in _lines(f"nsmc/{split}.tsv.gz"))
        return Side([row[1] for row in rows], np.array([int(row[2]) for row in rows]))

    return Task(side("train"), side("test"), grams="characters 1–4")


TASKS: dict[str, Callable[[], Task]] = {
    "imdb": lambda: _imdb("label"),
    "imdb-ratings": lambda: _imdb("rating"),
    "ag_news": _ag_news,
    "nsmc": _nsmc,
}


# --------------------------------------------------------------------------------------------- learning


def _vectorizer(grams: str) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    common = {"sublinear_tf": True, "dtype": np.float32}
    if grams.startswith("words"):
        return TfidfVectorizer(ngram_range=(1, 2), min_df=3, token_pattern=r"\w+|[^\w\s]", **common)
    return TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 4), min_df=3, **common)


def _regression(strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, max_iter=1000, tol=1e-4)


def judged(task: Task, say: Say) -> dict[str, Any]:
    """Accuracy on the test data; of ratings also the mean absolute error, as told in :func:`errors`."""
    began = time.perf_counter()
    numbers = np.random.default_rng(0).permutation(len(task.train.texts))
    held = np.zeros(len(numbers), bool)
    held[numbers[: max(1, len(numbers) // HELD_OUT)]] = True
    say(f"{len(held):,} texts to learn, {len(task.test.texts):,} to judge, grams of {task.grams}")

    vectorizer = _vectorizer(task.grams)
    texts = np.array(task.train.texts, object)
    learned, asked = vectorizer.fit_transform(texts[~held]), vectorizer.transform(texts[held])
    tried: dict[float, float] = {}
    for strength in STRENGTHS:
        model = _regression(strength).fit(learned, task.train.labels[~held])
        tried[strength] = float(np.mean(model.predict(asked) == task.train.labels[held]))
        say(f"C = {strength:g}: {tried[strength]:.4f} of those held out")
    best = max(tried, key=lambda strength: tried[strength])

    vectorizer = _vectorizer(task.grams)
    model = _regression(best).fit(vectorizer.fit_transform(task.train.texts), task.train.labels)
    shares = model.predict_proba(vectorizer.transform(task.test.texts))
    found: dict[str, Any] = {"grams": task.grams, "C": best, "held_out": tried}
    found |= {"features": len(vectorizer.vocabulary_), "test": len(task.test.texts)}
    found["accuracy"] = float(np.mean(model.classes_[shares.argmax(1)] == task.test.labels))
    if task.ratings:
        found |= errors(shares, model.classes_, task.test.labels)
    return found | {"seconds": time.perf_counter() - began}


def errors(shares: np.ndarray, ratings: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """The mean absolute error of the likeliest rating, and of the mean of all by their probability.

    >>> errors(np.array([[0.5, 0.1, 0.4]]), np.array([1, 2, 3]), np.array([2]))
    {'mean_error': 1.0, 'mean_error_of_mean': 0.1}
    """
    return {
        "mean_error": round(float(np.abs(ratings[shares.argmax(1)] - right).mean()), 10),
        "mean_error_of_mean": round(float(np.abs(shares @ ratings - right).mean()), 10),
    }


# ---------------------------------------------------------------------------------------------- our runs


def load_scores(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """What `jumok eval` found of runs on their test data, and which task they are of."""
    return [_load_run_scores(run) for run in runs]


def _load_run_scores(run: Path) -> dict[str, Any]:
    path = run / "eval" / "test.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: jumok eval {run} writes it")
    figures = json.loads(path.read_text(encoding="utf-8"))
    numbers = {name: x for name, x in figures.items() if isinstance(x, int | float)}
    return {"run": run.name, "task": _task(run), **numbers}


def _task(run: Path) -> str:
    """Of the recipe's data; else of the folder's name."""
    named = run.name
    recipe = run / "recipe.yaml"
    if recipe.is_file():
        data = (yaml.safe_load(recipe.read_text(encoding="utf-8")) or {}).get("data") or {}
        train = str(data.get("train", "")).split("/")[0]
        if train in TASKS:
            return "imdb-ratings" if train == "imdb" and "rating" in str(data.get("label_column")) else train
    return next((name for name in sorted(TASKS, key=len, reverse=True) if name in named), "unknown")
