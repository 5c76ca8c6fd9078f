"""Debugging by attention: the errors a model was surest of, with the words it looked at; are these to trust?

``jumok eval`` writes all errors to ``eval/errors.jsonl``, the most confident first, shows a few, and makes a
page of the worst, ``figures/errors.html``. ``--faithfulness`` asks of some of the texts what becomes of the
label when the words that were looked at are taken away (see :mod:`jumok.metrics.faithfulness`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from jumok.errors import InputError
from jumok.files import atomic_write, read_json, remove_atomically
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.error_page import (
    MisclassifiedText,
    compute_word_weights,
    format_for_terminal,
    render_error_page,
)
from jumok.metrics.faithfulness import AttendedContrast, Faithfulness, PredictionDrop, measure_faithfulness

__all__ = [
    "AttentionHighlighter",
    "check_can_highlight",
    "compute_faithfulness",
    "evaluate_faithfulness",
    "report_errors",
]

MAX_FAITHFULNESS_TEXTS = 500  # texts that words are taken away from
SAMPLE_SEED = 1  # of which ones, and of the random words
NUM_ERRORS_SHOWN, NUM_ERRORS_ON_PAGE = 5, 20  # errors
TEXTS_PER_BATCH = 256  # texts that are looked at together


@runtime_checkable
class AttentionHighlighter(Protocol):
    """A classifier at work that can say where it looked."""

    @property
    def labels(self) -> Sequence[str]:
        """The names of the classes."""

    def highlight_texts(self, texts: Sequence[str]) -> list[AttendedDocument]:
        """What it says of each text, and where it looked; of a pair, given as a line with a tab in it.

        A text without words may be refused with an InputError.
        """

    def predict_probabilities(self, documents: Sequence[Sequence[Sequence[str]]]) -> NDArray[np.float64]:
        """``(N, C)`` of texts that are given as sentences of words (as in ``AttendedDocument.words``)."""


def check_can_highlight(predictor: object) -> None:
    """Refuse a model that does not say where it looked, or that says no classes."""
    if isinstance(predictor, AttentionHighlighter) and len(predictor.labels):
        return
    if isinstance(predictor, AttentionHighlighter):
        raise InputError("--faithfulness is about the probabilities of classes; this model says numbers")
    raise InputError(
        "--faithfulness: this model does not highlight the words that decided; the self-attentive and the "
        "hierarchical classifier do, as in: jumok train self_attentive, jumok train hierarchical"
    )


# ---------------------------------------------------------------------------------------- the picture, tested


def evaluate_faithfulness(
    predictor: Any, split_name: str, console: Console, *, max_texts: int = MAX_FAITHFULNESS_TEXTS
) -> Faithfulness:
    """Put a run's highlights to the test; the result is shown, and added to ``eval/<split_name>.json``."""
    check_can_highlight(predictor)
    examples = predictor.load_split(split_name).examples
    if any(getattr(one, "pair", None) is not None for one in examples):
        raise InputError("--faithfulness: words are taken away from single texts; this model reads pairs")
    found, about = compute_faithfulness(
        predictor, [one.text for one in examples], console, max_texts=max_texts
    )
    path = predictor.run.folder / "eval" / f"{split_name}.json"
    before = read_json(path, dict) if path.is_file() else {"split": split_name}
    told = {**about, **dataclasses.asdict(found), "verdict": found.verdict}
    _write_text(path, json.dumps(before | {"faithfulness": told}, ensure_ascii=False, indent=1) + "\n")
    _print_faithfulness(found, about, console)
    return found


def compute_faithfulness(
    predictor: AttentionHighlighter,
    texts: Sequence[str],
    console: Console,
    *,
    max_texts: int = MAX_FAITHFULNESS_TEXTS,
    seed: int = SAMPLE_SEED,
) -> tuple[Faithfulness, dict[str, Any]]:
    """What taking words away from some of the texts comes to, and which texts these were.

    The second is plain data: ``sample`` of ``of`` texts, drawn with ``seed``, and ``agreement``, the share of
    them whose words, put together again, are given the label of the text itself.
    """
    if not texts:
        raise InputError("no texts came: there is nothing to take words away from")
    if max_texts < 1:
        raise InputError(f"most={max_texts}: at least one text is needed")
    number = min(max_texts, len(texts))
    chosen = sorted(np.random.default_rng(seed).choice(len(texts), number, replace=False).tolist())
    with console.status("looking") as status:
        looked = list(_highlight_in_batches(predictor, [texts[at] for at in chosen]))
        documents = [one for one in looked if one is not None]
        words = [_split_sentences(one) for one in documents]
        if not words:
            raise InputError(f"of {number:,} texts, none has words to take away")
        again = predictor.predict_probabilities(words).argmax(1)
        same = [
            one.class_probabilities[0][0] == predictor.labels[said]
            for one, said in zip(documents, again, strict=True)
        ]
        found = measure_faithfulness(
            words,
            [one.weights for one in documents],
            predictor.predict_probabilities,
            seed=seed,
            on_progress=lambda done: status.update(f"taking words away: {done:,} of {number:,} texts"),
        )
    found = dataclasses.replace(found, num_skipped=number - found.num_texts)
    return found, {"sample": number, "of": len(texts), "seed": seed, "agreement": float(np.mean(same))}


def _split_sentences(document: AttendedDocument) -> list[list[str]]:
    edges = document.sentence_offsets
    cut = [list(document.words[a:b]) for a, b in itertools.pairwise(edges)]
    return [one for one in cut if one]


def _highlight_in_batches(
    predictor: AttentionHighlighter, texts: Sequence[str]
) -> Iterator[AttendedDocument | None]:
    """Some at a time, for there may be many; None for a text without anything to look at."""
    for begin in range(0, len(texts), TEXTS_PER_BATCH):
        some = texts[begin : begin + TEXTS_PER_BATCH]
        try:
            yield from predictor.highlight_texts(some)
        except InputError:  # one of them
            for text in some:
                try:
                    yield from predictor.highlight_texts([text])
                except InputError:
                    yield None


def _print_faithfulness(
    faithfulness_result: Faithfulness, sample_info: dict[str, Any], console: Console
) -> None:
    lines = [
        f"Faithfulness, on {sample_info['sample']:,} of {sample_info['of']:,} texts (drawn with seed {sample_info['seed']}), "
        f"beside the mean of {faithfulness_result.num_draws} draws of random words."
    ]
    if faithfulness_result.num_skipped:
        lines.append(f"Left out, as they have less than two words: {faithfulness_result.num_skipped:,}.")
    if sample_info["agreement"] < 0.99:
        lines.append(
            f"Of {100 * (1 - sample_info['agreement']):.1f} % of the texts, the words put together again are given "
            "another label than the text itself: the figures are about the former."
        )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    for name, meaning in (
        ("comprehensiveness", "what removing words costs (attended: more is better)"),
        ("sufficiency", "what keeping only these costs (attended: less is better)"),
    ):
        table = Table(title=f"{name}: {meaning}", title_justify="left", min_width=76)
        table.add_column("words")
        for column in ("attended", "random", "difference", "95 %", "log-odds"):
            table.add_column(column, justify="right", no_wrap=True)
        for one in faithfulness_result.shares:
            table.add_row(
                f"{100 * one.share:g} % ({one.mean_words:.1f})", *_format_contrast(getattr(one, name))
            )
        table.add_section()
        table.add_row("mean (AOPC)", *_format_contrast(getattr(faithfulness_result, name)))
        console.print(table)
    console.print(faithfulness_result.verdict, markup=False, soft_wrap=not console.is_terminal)


def _format_contrast(drop: PredictionDrop) -> Iterator[str]:
    one: AttendedContrast = drop.probability
    yield from (f"{one.attended:.3f}", f"{one.random:.3f}", f"{one.difference:+.3f}")
    yield f"{one.low:.3f}, {one.high:.3f}"
    yield f"{drop.log_odds.attended:.1f}, {drop.log_odds.random:.1f}"


# ----------------------------------------------------------------------------------------------------- errors


def report_errors(
    predictor: object,
    errors: Sequence[MisclassifiedText],
    num_texts: int,
    folder: Path,
    split_name: str,
    console: Console,
) -> None:
    """Write all wrong labels of ``num_texts`` texts to a run's folder, show some, and make a page of the worst.

    Where the model can say where it looked, its words come with their weights.
    """
    name = "errors" if split_name == "test" else f"{split_name}-errors"
    lines, html = folder / "eval" / f"{name}.jsonl", folder / "figures" / f"{name}.html"
    ordered = sorted(errors, key=lambda one: -one.probability)  # stable: equally sure ones as they came
    worst: list[MisclassifiedText] = []
    with atomic_write(lines) as part, part.open("w", encoding="utf-8") as file:
        for one in _add_highlights(predictor, ordered):
            file.write(_format_error_line(one) + "\n")
            if len(worst) < NUM_ERRORS_ON_PAGE:
                worst.append(one)
    if not worst:
        remove_atomically(html)  # of an earlier evaluation
        console.print("errors: none", markup=False)
        return
    how_many = f"{len(errors):,} of {num_texts:,} {split_name} texts were given a wrong label"
    shown = "all of them" if len(worst) == len(errors) else f"the {len(worst)} that the model was surest of"
    _write_text(
        html,
        render_error_page(
            worst, title="Errors, the most confident first", subtitle=f"{how_many}; here {shown}."
        ),
    )
    console.print(f"{how_many}. The most confident errors:", markup=False, soft_wrap=True)
    colours = console.is_terminal and console.color_system is not None
    for one in worst[:NUM_ERRORS_SHOWN]:
        console.print()
        text = format_for_terminal(one, use_colours=colours)
        console.print(
            Padding(text, (0, 0, 0, 2)) if console.is_terminal else text, soft_wrap=not console.is_terminal
        )
    console.print(f"\nerrors: {lines}, {html}", markup=False, soft_wrap=True)


def _add_highlights(predictor: object, errors: Sequence[MisclassifiedText]) -> Iterator[MisclassifiedText]:
    """The same with what was looked at, where the model can tell."""
    if not isinstance(predictor, AttentionHighlighter):
        yield from errors
        return
    lines = [one.text if one.text_pair is None else f"{one.text}\t{one.text_pair}" for one in errors]
    for one, document in zip(errors, _highlight_in_batches(predictor, lines), strict=True):
        yield dataclasses.replace(one, document=document)


def _format_error_line(error: MisclassifiedText) -> str:
    told: dict[str, Any] = {"text": error.text}
    if error.text_pair is not None:
        told["text_pair"] = error.text_pair
    told |= {"prediction": error.prediction, "target": error.label, "probability": round(error.probability, 6)}
    if error.document is not None:
        each = compute_word_weights(error.document)
        told["words"] = [
            [word, float(f"{w:.4g}")] for word, w in zip(error.document.words, each, strict=True)
        ]
    return json.dumps(told, ensure_ascii=False)


def _write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
