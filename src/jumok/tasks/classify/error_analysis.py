"""Error analysis of a classifier: the most confident errors, with the words that the model attended to.

``jumok eval`` writes all errors to ``eval/errors.jsonl``, the most confident first, prints a few, and writes a page
with the worst ones, ``figures/errors.html``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.padding import Padding

from jumok.data.readers.classification import ClassificationExample, LabelSet
from jumok.files import atomic_write, remove_atomically, write_text
from jumok.look.viewer.error_page import MisclassifiedText, format_for_terminal, render_error_page
from jumok.tasks.classify.faithfulness import AttentionHighlighter, highlight_in_batches

NUM_ERRORS_SHOWN, NUM_ERRORS_ON_PAGE = 5, 20


def find_errors(
    examples: Sequence[ClassificationExample], probabilities: NDArray[np.float64], label_set: LabelSet
) -> list[MisclassifiedText]:
    """The examples whose likeliest class ``(N, C)`` is wrong."""
    errors = []
    for example, row in zip(examples, probabilities, strict=True):
        target, predicted = label_set.index(example.label), int(row.argmax())
        if predicted != target:
            names = label_set.names
            errors.append(
                MisclassifiedText(example.text, example.pair, names[predicted], names[target], float(row.max()))
            )
    return errors


def report_errors(
    predictor: object,
    errors: Sequence[MisclassifiedText],
    num_texts: int,
    folder: Path,
    split_name: str,
    console: Console,
) -> None:
    """Write all errors among ``num_texts`` texts to the folder of a run, print some, and write a page of the worst.

    If the model has word weights, they are written, too.
    """
    name = "errors" if split_name == "test" else f"{split_name}-errors"
    lines_path, page_path = folder / "eval" / f"{name}.jsonl", folder / "figures" / f"{name}.html"
    ordered = sorted(errors, key=lambda error: -error.probability)  # stable: ties keep their order
    worst: list[MisclassifiedText] = []
    with atomic_write(lines_path) as part, part.open("w", encoding="utf-8") as file:
        for error in _add_highlights(predictor, ordered):
            file.write(_format_error_line(error) + "\n")
            if len(worst) < NUM_ERRORS_ON_PAGE:
                worst.append(error)
    if not worst:
        remove_atomically(page_path)  # of an earlier evaluation
        console.print("errors: none", markup=False)
        return
    summary = f"{len(errors):,} of {num_texts:,} {split_name} texts were classified wrongly"
    shown = "all of them" if len(worst) == len(errors) else f"the {len(worst)} most confident errors"
    write_text(
        page_path,
        render_error_page(worst, title="Errors, most confident first", subtitle=f"{summary}; shown: {shown}."),
    )
    console.print(f"{summary}. The most confident errors:", markup=False, soft_wrap=True)
    use_colours = console.is_terminal and console.color_system is not None
    for error in worst[:NUM_ERRORS_SHOWN]:
        console.print()
        text = format_for_terminal(error, use_colours=use_colours)
        console.print(Padding(text, (0, 0, 0, 2)) if console.is_terminal else text, soft_wrap=not console.is_terminal)
    console.print(f"\nerrors: {lines_path}, {page_path}", markup=False, soft_wrap=True)


def _add_highlights(predictor: object, errors: Sequence[MisclassifiedText]) -> Iterator[MisclassifiedText]:
    """The errors with their word weights, if the model has any."""
    if not isinstance(predictor, AttentionHighlighter):
        yield from errors
        return
    lines = [error.text if error.text_pair is None else f"{error.text}\t{error.text_pair}" for error in errors]
    for error, document in zip(errors, highlight_in_batches(predictor, lines), strict=True):
        yield dataclasses.replace(error, document=document)


def _format_error_line(error: MisclassifiedText) -> str:
    content: dict[str, Any] = {"text": error.text}
    if error.text_pair is not None:
        content["text_pair"] = error.text_pair
    content |= {"prediction": error.prediction, "target": error.label, "probability": round(error.probability, 6)}
    if error.document is not None:
        weights = error.document.get_word_weights()
        content["words"] = [
            [word, float(f"{weight:.4g}")] for word, weight in zip(error.document.words, weights, strict=True)
        ]
    return json.dumps(content, ensure_ascii=False)
