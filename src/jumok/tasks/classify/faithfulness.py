"""Faithfulness of word weights: how the prediction changes when attended words are removed.

``jumok eval --faithfulness`` removes words from some of the texts, and compares with random words (see
:mod:`jumok.metrics.faithfulness`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from jumok.errors import InputError
from jumok.files import read_json, write_json
from jumok.inference.line_io import iterate_chunks
from jumok.metrics.faithfulness import AttendedContrast, Faithfulness, PredictionDrop, measure_faithfulness

if TYPE_CHECKING:
    from jumok.look.viewer.attended_document import AttendedDocument

MAX_FAITHFULNESS_TEXTS = 500  # texts that words are removed from
SAMPLE_SEED = 1  # of the choice of texts, and of random words
TEXTS_PER_BATCH = 256  # texts that are highlighted together


@runtime_checkable
class AttentionHighlighter(Protocol):
    """A classifier with word weights."""

    @property
    def labels(self) -> Sequence[str]:
        """The names of the classes."""

    def highlight_texts(self, texts: Sequence[str]) -> list[AttendedDocument]:
        """The prediction and the word weights of each text; a tab separates the two texts of a pair.

        A text without words may raise an InputError.
        """

    def predict_probabilities(self, documents: Sequence[Sequence[Sequence[str]]]) -> NDArray[np.float64]:
        """Probabilities ``(N, C)`` of texts that are given as sentences of words."""


def check_can_highlight(predictor: object) -> None:
    """Raise if a model has no word weights, or no classes."""
    if isinstance(predictor, AttentionHighlighter) and len(predictor.labels):
        return
    if isinstance(predictor, AttentionHighlighter):
        raise InputError("--faithfulness needs probabilities of classes; this model predicts numbers")
    raise InputError(
        "--faithfulness: this model has no word weights; the self-attentive and the hierarchical classifier "
        "have, as in: jumok train self_attentive, jumok train hierarchical"
    )


def evaluate_faithfulness(
    predictor: Any, split_name: str, console: Console, *, max_texts: int = MAX_FAITHFULNESS_TEXTS
) -> Faithfulness:
    """Measure the faithfulness of a run's word weights, print it, and add it to ``eval/SPLIT.json``."""
    check_can_highlight(predictor)
    examples = predictor.load_split(split_name).examples
    if any(getattr(example, "pair", None) is not None for example in examples):
        raise InputError("--faithfulness removes words from single texts; this model reads text pairs")
    texts = [example.text for example in examples]
    result, sample_info = compute_faithfulness(predictor, texts, console, max_texts=max_texts)
    path = predictor.run.folder / "eval" / f"{split_name}.json"
    content = read_json(path, dict) if path.is_file() else {"split": split_name}
    faithfulness = {**sample_info, **dataclasses.asdict(result), "verdict": result.verdict}
    write_json(path, content | {"faithfulness": faithfulness})
    _print_faithfulness(result, sample_info, console)
    return result


def compute_faithfulness(
    predictor: AttentionHighlighter,
    texts: Sequence[str],
    console: Console,
    *,
    max_texts: int = MAX_FAITHFULNESS_TEXTS,
    seed: int = SAMPLE_SEED,
) -> tuple[Faithfulness, dict[str, Any]]:
    """Measure faithfulness on a sample of the texts. Also returns plain data about the sample.

    The data is ``num_sampled`` of ``num_texts`` texts, the ``seed``, and ``agreement``, the fraction of texts whose
    words, joined again, get the same class as the text itself.
    """
    if not texts:
        raise InputError("no texts given: there is nothing to remove words from")
    if max_texts < 1:
        raise InputError(f"max_texts={max_texts}: at least one text is needed")
    count = min(max_texts, len(texts))
    indices = sorted(np.random.default_rng(seed).choice(len(texts), count, replace=False).tolist())
    with console.status("computing word weights") as status:
        highlighted = list(highlight_in_batches(predictor, [texts[index] for index in indices]))
        documents = [document for document in highlighted if document is not None]
        words = [_split_sentences(document) for document in documents]
        if not words:
            raise InputError(f"of {count:,} texts, none has words to remove")
        predicted_ids = predictor.predict_probabilities(words).argmax(1)
        agrees = [
            document.class_probabilities[0][0] == predictor.labels[index]
            for document, index in zip(documents, predicted_ids, strict=True)
        ]
        result = measure_faithfulness(
            words,
            [document.weights for document in documents],
            predictor.predict_probabilities,
            seed=seed,
            on_progress=lambda done: status.update(f"removing words: {done:,} of {count:,} texts"),
        )
    result = dataclasses.replace(result, num_skipped=count - result.num_texts)
    return result, {"num_sampled": count, "num_texts": len(texts), "seed": seed, "agreement": float(np.mean(agrees))}


def highlight_in_batches(predictor: AttentionHighlighter, texts: Sequence[str]) -> Iterator[AttendedDocument | None]:
    """The word weights of many texts; None for a text without words."""
    for chunk in iterate_chunks(texts, TEXTS_PER_BATCH):
        try:
            yield from predictor.highlight_texts(chunk)
        except InputError:  # caused by one of them
            for text in chunk:
                try:
                    yield from predictor.highlight_texts([text])
                except InputError:
                    yield None


def _split_sentences(document: AttendedDocument) -> list[list[str]]:
    sentences = [list(document.words[a:b]) for a, b in itertools.pairwise(document.sentence_offsets)]
    return [sentence for sentence in sentences if sentence]


def _print_faithfulness(result: Faithfulness, sample_info: dict[str, Any], console: Console) -> None:
    lines = [
        f"Faithfulness, on {sample_info['num_sampled']:,} of {sample_info['num_texts']:,} texts (seed "
        f"{sample_info['seed']}), compared with the mean of {result.num_draws} draws of random words."
    ]
    if result.num_skipped:
        lines.append(f"Texts with fewer than two words, left out: {result.num_skipped:,}.")
    if sample_info["agreement"] < 0.99:
        lines.append(
            f"{100 * (1 - sample_info['agreement']):.1f} % of the texts get another class when their words are "
            "joined again; the metrics are about the joined words."
        )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    for name, meaning in (
        ("comprehensiveness", "drop when words are removed (attended: more is better)"),
        ("sufficiency", "drop when only these words are kept (attended: less is better)"),
    ):
        table = Table(title=f"{name}: {meaning}", title_justify="left", min_width=76)
        table.add_column("words")
        for column in ("attended", "random", "difference", "95 %", "log-odds"):
            table.add_column(column, justify="right", no_wrap=True)
        for share in result.shares:
            table.add_row(f"{100 * share.share:g} % ({share.mean_words:.1f})", *_format_contrast(getattr(share, name)))
        table.add_section()
        table.add_row("mean (AOPC)", *_format_contrast(getattr(result, name)))
        console.print(table)
    console.print(result.verdict, markup=False, soft_wrap=not console.is_terminal)


def _format_contrast(drop: PredictionDrop) -> Iterator[str]:
    contrast: AttendedContrast = drop.probability
    yield from (f"{contrast.attended:.3f}", f"{contrast.random:.3f}", f"{contrast.difference:+.3f}")
    yield f"{contrast.low:.3f}, {contrast.high:.3f}"
    yield f"{drop.log_odds.attended:.1f}, {drop.log_odds.random:.1f}"
