"""Scores of captions: BLEU, ROUGE-L, CIDEr-D, exact matches, and for built-in scenes the pointing game."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from jumok.data.builtin.scenes import IMAGE_SIZE
from jumok.data.readers.captions import CaptionExample
from jumok.metrics import captions
from jumok.metrics.pointing_game import score_pointing
from jumok.tasks.base import Evaluation

NUM_SAMPLES = 5  # sample captions


def score_predictions(
    examples: Sequence[CaptionExample],
    predictions: Sequence[str],
    maps: Sequence[Tensor],
    figures: Mapping[str, Callable[[Path], Path]],
) -> Evaluation:
    """Score a predicted caption of each image against all of its captions.

    ``maps`` are the attention maps ``(words, rows, columns)`` of the first caption of each image, if boxes of the
    words are known: do they point to the boxes?
    """
    tokens = [captions.tokenize_caption(text) for text in predictions]
    references = [[captions.tokenize_caption(text) for text in example.captions] for example in examples]
    scores = captions.score_captions(tokens, references)
    metrics = _build_metrics(scores)
    metrics["exact_match"] = float(
        np.mean([words in targets for words, targets in zip(tokens, references, strict=True)])
    )
    if maps:
        pointing = score_pointing(maps, [example.boxes for example in examples], (IMAGE_SIZE, IMAGE_SIZE))
        metrics |= {"pointing": pointing.accuracy, "pointing_chance": pointing.chance}
    rows = list(zip(examples, predictions, scores.cider_d_per_image, strict=True))
    return Evaluation(
        metrics,
        select_by="cider_d",
        statistic=lambda indices: float(scores.cider_d_per_image[indices].mean()),
        outputs=[
            json.dumps(
                {
                    "image": example.image.location,
                    "prediction": text,
                    "target": list(example.captions),
                    "cider_d": round(float(score), 4),
                },
                ensure_ascii=False,
            )
            for example, text, score in rows
        ],
        samples=[
            line
            for example, text, _ in rows[:NUM_SAMPLES]
            for line in (
                f"  {example.image.name}",
                f"    prediction  {text}",
                f"    target      {example.captions[0]}",
            )
        ],
        print_samples=True,
        figures=figures,
    )


def _build_metrics(scores: captions.CaptionScores) -> dict[str, Any]:
    """BLEU with the brevity penalty, and without it, as early papers report it; ROUGE-L and CIDEr-D."""
    bleu = scores.bleu
    metrics: dict[str, Any] = {f"bleu{n}": value for n, value in enumerate(bleu.value, 1)}
    metrics |= {f"bleu{n}_without_brevity": value for n, value in enumerate(bleu.unpenalized, 1)}
    metrics |= {"brevity_penalty": bleu.brevity_penalty, "rouge_l": scores.rouge_l, "cider_d": scores.cider_d}
    return metrics
