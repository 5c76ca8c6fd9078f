"""Scores of a tagger: precision, recall and F1 of entities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.readers.tagging import TaggingExample, extract_entities
from jumok.metrics.tagging import EntityScore, score_tags
from jumok.tasks.base import Evaluation

NUM_SAMPLES = 3  # sample sentences per validation


def score_tagging(examples: Sequence[TaggingExample], predicted_tags: Sequence[Sequence[str]]) -> Evaluation:
    """Score the predicted tags of sentences."""
    scores = score_tags([example.tags for example in examples], predicted_tags)
    metrics: dict[str, Any] = {
        "f1": scores.overall.f1,
        "precision": scores.overall.precision,
        "recall": scores.overall.recall,
        "accuracy": scores.accuracy,
    }
    metrics["types"] = [
        {
            "type": entity_type,
            "precision": score.precision,
            "recall": score.recall,
            "f1": score.f1,
            "count": score.num_gold,
        }
        for entity_type, score in scores.by_type.items()
    ]
    pairs = list(zip(examples, predicted_tags, strict=True))
    counts = np.array([_count_entities(example.tags, tags) for example, tags in pairs])  # (N, 3)

    def statistic(indices: NDArray[np.int64]) -> float:
        return EntityScore(*counts[indices].sum(0).tolist()).f1

    return Evaluation(
        metrics,
        select_by="f1",
        statistic=statistic,
        outputs=[
            json.dumps({"words": example.words, "prediction": tags, "target": example.tags}, ensure_ascii=False)
            for example, tags in pairs
        ],
        samples=[
            line
            for example, tags in pairs[:NUM_SAMPLES]
            for line in (
                f"  prediction  {_mark_entities(example.words, tags)}",
                f"  target      {_mark_entities(example.words, example.tags)}",
            )
        ],
    )


def _count_entities(target_tags: Sequence[str], predicted_tags: Sequence[str]) -> tuple[int, int, int]:
    score = score_tags([target_tags], [predicted_tags]).overall
    return score.num_correct, score.num_predicted, score.num_gold


def _mark_entities(words: Sequence[str], tags: Sequence[str]) -> str:
    """A sentence with its entities in brackets."""
    marked = list(words)
    for entity_type, start, end in extract_entities(tags):
        marked[start] = f"[{marked[start]}"
        marked[end - 1] = f"{marked[end - 1]}]({entity_type})"
    return " ".join(marked)
