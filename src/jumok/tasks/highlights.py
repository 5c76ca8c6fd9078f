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
from jumok.files import read_json, remove, written
from jumok.look.document import Document
from jumok.look.mistakes import Mistake, in_terminal, page, weights
from jumok.metrics.faithfulness import Contrast, Drop, Faithfulness, faithfulness

__all__ = ["Highlighter", "check", "evaluate", "faithful", "tell_mistakes"]

MOST = 500  # texts that words are taken away from
SEED = 1  # of which ones, and of the random words
SHOWN, ON_PAGE = 5, 20  # errors
AT_ONCE = 256  # texts that are looked at together


@runtime_checkable
class Highlighter(Protocol):
    """A classifier at work that can say where it looked."""

    @property
    def labels(self) -> Sequence[str]:
        """The names of the classes."""

    def documents(self, texts: Sequence[str]) -> list[Document]:
        """What it says of each text, and where it looked; of a pair, given as a line with a tab in it.

        A text without words may be refused with an InputError.
        """

    def probabilities(self, documents: Sequence[Sequence[Sequence[str]]]) -> NDArray[np.float64]:
        """``(N, C)`` of texts that are given as sentences of words (as in ``Document.words``)."""


def check(predictor: object) -> None:
    """Refuse a model that does not say where it looked, or that says no classes."""
    if isinstance(predictor, Highlighter) and len(predictor.labels):
        return
    if isinstance(predictor, Highlighter):
        raise InputError("--faithfulness is about the probabilities of classes; this model says numbers")
    raise InputError(
        "--faithfulness: this model does not highlight the words that decided; the self-attentive and the "
        "hierarchical classifier do, as in: jumok train selfattentive, jumok train hierarchical"
    )


# ---------------------------------------------------------------------------------------- the picture, tested


def evaluate(predictor: Any, split: str, console: Console, *, most: int = MOST) -> Faithfulness:
    """Put a run's highlights to the test; the result is shown, and added to ``eval/<split>.json``."""
    check(predictor)
    examples = predictor.split(split).examples
    if any(getattr(one, "pair", None) is not None for one in examples):
        raise InputError("--faithfulness: words are taken away from single texts; this model reads pairs")
    found, about = faithful(predictor, [one.text for one in examples], console, most=most)
    path = predictor.run.folder / "eval" / f"{split}.json"
    before = read_json(path, dict) if path.is_file() else {"split": split}
    told = {**about, **dataclasses.asdict(found), "verdict": found.verdict}
    _write(path, json.dumps(before | {"faithfulness": told}, ensure_ascii=False, indent=1) + "\n")
    _show(found, about, console)
    return found


def faithful(
    predictor: Highlighter, texts: Sequence[str], console: Console, *, most: int = MOST, seed: int = SEED
) -> tuple[Faithfulness, dict[str, Any]]:
    """What taking words away from some of the texts comes to, and which texts these were.

    The second is plain data: ``sample`` of ``of`` texts, drawn with ``seed``, and ``agreement``, the share of
    them whose words, put together again, are given the label of the text itself.
    """
    if not texts:
        raise InputError("no texts came: there is nothing to take words away from")
    if most < 1:
        raise InputError(f"most={most}: at least one text is needed")
    number = min(most, len(texts))
    chosen = sorted(np.random.default_rng(seed).choice(len(texts), number, replace=False).tolist())
    with console.status("looking") as status:
        looked = list(_looked_at(predictor, [texts[at] for at in chosen]))
        documents = [one for one in looked if one is not None]
        words = [_sentences(one) for one in documents]
        if not words:
            raise InputError(f"of {number:,} texts, none has words to take away")
        again = predictor.probabilities(words).argmax(1)
        same = [one.said[0][0] == predictor.labels[said] for one, said in zip(documents, again, strict=True)]
        found = faithfulness(
            words,
            [one.weights for one in documents],
            predictor.probabilities,
            seed=seed,
            done=lambda done: status.update(f"taking words away: {done:,} of {number:,} texts"),
        )
    found = dataclasses.replace(found, left_out=number - found.texts)
    return found, {"sample": number, "of": len(texts), "seed": seed, "agreement": float(np.mean(same))}


def _sentences(document: Document) -> list[list[str]]:
    edges = document.sentences
    cut = [list(document.words[a:b]) for a, b in itertools.pairwise(edges)]
    return [one for one in cut if one]


def _looked_at(predictor: Highlighter, texts: Sequence[str]) -> Iterator[Document | None]:
    """Some at a time, for there may be many; None for a text without anything to look at."""
    for begin in range(0, len(texts), AT_ONCE):
        some = texts[begin : begin + AT_ONCE]
        try:
            yield from predictor.documents(some)
        except InputError:  # one of them
            for text in some:
                try:
                    yield from predictor.documents([text])
                except InputError:
                    yield None


def _show(found: Faithfulness, about: dict[str, Any], console: Console) -> None:
    lines = [
        f"Faithfulness, on {about['sample']:,} of {about['of']:,} texts (drawn with seed {about['seed']}), "
        f"beside the mean of {found.draws} draws of random words."
    ]
    if found.left_out:
        lines.append(f"Left out, as they have less than two words: {found.left_out:,}.")
    if about["agreement"] < 0.99:
        lines.append(
            f"Of {100 * (1 - about['agreement']):.1f} % of the texts, the words put together again are given "
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
        for one in found.shares:
            table.add_row(f"{100 * one.share:g} % ({one.words:.1f})", *_cells(getattr(one, name)))
        table.add_section()
        table.add_row("mean (AOPC)", *_cells(getattr(found, name)))
        console.print(table)
    console.print(found.verdict, markup=False, soft_wrap=not console.is_terminal)


def _cells(drop: Drop) -> Iterator[str]:
    one: Contrast = drop.probability
    yield from (f"{one.attended:.3f}", f"{one.random:.3f}", f"{one.difference:+.3f}")
    yield f"{one.low:.3f}, {one.high:.3f}"
    yield f"{drop.log_odds.attended:.1f}, {drop.log_odds.random:.1f}"


# ----------------------------------------------------------------------------------------------------- errors


def tell_mistakes(
    predictor: object, mistakes: Sequence[Mistake], texts: int, folder: Path, split: str, console: Console
) -> None:
    """Write all wrong labels of ``texts`` texts to a run's folder, show some, and make a page of the worst.

    Where the model can say where it looked, its words come with their weights.
    """
    name = "errors" if split == "test" else f"{split}-errors"
    lines, html = folder / "eval" / f"{name}.jsonl", folder / "figures" / f"{name}.html"
    ordered = sorted(mistakes, key=lambda one: -one.probability)  # stable: equally sure ones as they came
    worst: list[Mistake] = []
    with written(lines) as part, part.open("w", encoding="utf-8") as file:
        for one in _highlighted(predictor, ordered):
            file.write(_line(one) + "\n")
            if len(worst) < ON_PAGE:
                worst.append(one)
    if not worst:
        remove(html)  # of an earlier evaluation
        console.print("errors: none", markup=False)
        return
    how_many = f"{len(mistakes):,} of {texts:,} {split} texts were given a wrong label"
    shown = "all of them" if len(worst) == len(mistakes) else f"the {len(worst)} that the model was surest of"
    _write(html, page(worst, title="Errors, the most confident first", about=f"{how_many}; here {shown}."))
    console.print(f"{how_many}. The most confident errors:", markup=False, soft_wrap=True)
    colours = console.is_terminal and console.color_system is not None
    for one in worst[:SHOWN]:
        console.print()
        text = in_terminal(one, colours=colours)
        console.print(
            Padding(text, (0, 0, 0, 2)) if console.is_terminal else text, soft_wrap=not console.is_terminal
        )
    console.print(f"\nerrors: {lines}, {html}", markup=False, soft_wrap=True)


def _highlighted(predictor: object, mistakes: Sequence[Mistake]) -> Iterator[Mistake]:
    """The same with what was looked at, where the model can tell."""
    if not isinstance(predictor, Highlighter):
        yield from mistakes
        return
    lines = [one.text if one.pair is None else f"{one.text}\t{one.pair}" for one in mistakes]
    for one, document in zip(mistakes, _looked_at(predictor, lines), strict=True):
        yield dataclasses.replace(one, document=document)


def _line(mistake: Mistake) -> str:
    told: dict[str, Any] = {"text": mistake.text}
    if mistake.pair is not None:
        told["pair"] = mistake.pair
    told |= {"said": mistake.said, "wanted": mistake.wanted, "probability": round(mistake.probability, 6)}
    if mistake.document is not None:
        each = weights(mistake.document)
        told["words"] = [
            [word, float(f"{w:.4g}")] for word, w in zip(mistake.document.words, each, strict=True)
        ]
    return json.dumps(told, ensure_ascii=False)


def _write(path: Path, text: str) -> None:
    with written(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
