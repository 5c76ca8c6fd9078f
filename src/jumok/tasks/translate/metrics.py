"""How good a translation run is: scores with their signatures, by length, against other runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.errors import InputError
from jumok.files import atomic_write
from jumok.metrics import translation as metrics
from jumok.metrics.translation import Bleu, Chrf, LengthBin, TranslationScore
from jumok.metrics.translation_bootstrap import SystemComparison, bootstrap_translations
from jumok.metrics.word_alignment import AlignmentScore, score_alignment
from jumok.run import Run
from jumok.tasks.translate.data import TranslationSplit
from jumok.tasks.translate.predictor import TranslationOptions, TranslationPrediction, TranslationPredictor
from jumok.tasks.translate.word_alignment import AlignmentViewFilter, WordAligner

__all__ = ["TranslationEvaluation", "build_bleu", "compare", "compute_perplexity", "evaluate", "score_split"]

MAX_BATCH_TOKENS = 8192  # of the target, in a batch whose loss is computed
NUM_FIGURES = 3  # drawn of a test set
MAX_FIGURE_WORDS = 30  # words, to be worth drawing


@dataclass(frozen=True, eq=False)
class TranslationEvaluation:
    """What a run scores on a split."""

    predictions: list[TranslationPrediction]
    bleu: TranslationScore
    chrf: TranslationScore
    bleu_moses: TranslationScore | None  # BLEU of lower-cased Moses tokens, as papers on Multi30k give it
    perplexity: float
    bleu_by_length: list[LengthBin]
    alignment_score: AlignmentScore | None = None
    alignment_split: str = ""  # the split whose links these are
    alignment_view: str = ""  # the layer, head and step that they were read from, and why these

    @property
    def num_truncated(self) -> int:
        """Translations that the length limit ended."""
        return sum(not one.finished for one in self.predictions)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        named = {"bleu": self.bleu, "chrf": self.chrf, "bleu_moses": self.bleu_moses}
        found: dict[str, Any] = {name: _to_dict(one) for name, one in named.items() if one is not None}
        found |= {
            "perplexity": self.perplexity,
            "num_examples": len(self.predictions),
            "num_truncated": self.num_truncated,
        }
        found["bleu_by_length"] = [{**_to_dict(one), "label": one.label} for one in self.bleu_by_length]
        if self.alignment_score is not None:
            found["alignment"] = {
                **_to_dict(self.alignment_score),
                "split": self.alignment_split,
                "view": self.alignment_view,
            }
        return found


def score_split(
    predictor: TranslationPredictor,
    split: TranslationSplit,
    options: TranslationOptions,
    metric: Bleu | None = None,
) -> TranslationEvaluation:
    """Translate a split and score it."""
    metric = metric or build_bleu(predictor.run)
    pairs = split.examples
    translations = list(predictor.predict([pair.source for pair in pairs], options))
    said, references = [one.translation for one in translations], [pair.target for pair in pairs]
    lower = predictor.run.recipe.data.preprocessing == "moses-lower"
    lengths = [len(pair.source.split()) for pair in pairs]
    return TranslationEvaluation(
        predictions=translations,
        bleu=metric.score(said, references),
        chrf=Chrf(lowercase=lower).score(said, references),
        bleu_moses=_compute_moses_bleu(predictor, translations, references) if lower else None,
        perplexity=compute_perplexity(predictor, pairs),
        bleu_by_length=metrics.score_by_length(lengths, said, references, metric=metric),
    )


def _compute_moses_bleu(
    predictor: TranslationPredictor, predictions: list[TranslationPrediction], references: list[str]
) -> TranslationScore:
    prepared = [predictor.data.preprocess(one, "target") for one in references]
    return Bleu("none").score([" ".join(one.target_words) for one in predictions], prepared)


def evaluate(
    predictor: TranslationPredictor, split_name: str, options: TranslationOptions, console: Console
) -> TranslationEvaluation:
    """Score a run on its test or validation data, show it, and keep it in the run's folder."""
    split = _load_split(predictor, split_name)
    with console.status(f"translating {len(split.examples):,} sentences"):
        found = score_split(predictor, split, options)
        found = dataclasses.replace(found, **_score_alignment(predictor, split))
    folder = predictor.run.folder
    _write_text(
        folder / "eval" / f"{split_name}.txt", "".join(f"{one.translation}\n" for one in found.predictions)
    )
    asked = {**dataclasses.asdict(options), "beam_size": options.beam_size or predictor.decode_config.beam_size}
    told = {
        "split": split_name,
        "options": asked,
        "decode": _to_dict(predictor.decode_config),
        **found.to_dict(),
    }
    _write_text(folder / "eval" / f"{split_name}.json", json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    drawn = _draw_figures(predictor, split, found, folder / "figures", split_name)
    _print_evaluation(found, split, console)
    for path in drawn:
        console.print(f"figure: {path}", markup=False, soft_wrap=True)
    return found


def compare(
    runs: Sequence[Run],
    split_name: str,
    options: TranslationOptions,
    output_folder: Path,
    device: str,
    console: Console,
) -> None:
    """Several runs on the same data: scores with intervals, significance, and their curves by length."""
    from jumok.look.figures.plots import draw_scores_by_length
    from jumok.tasks.translate.task import load

    names = [str(run.folder) for run in runs]
    if len(set(names)) < len(names):
        raise InputError(f"a run comes twice: {', '.join(names)}; compare different ones")
    metric = build_bleu(runs[0])  # the same for all
    found: dict[str, TranslationEvaluation] = {}
    first: list[tuple[str, str]] = []
    for name, run in zip(names, runs, strict=True):
        translator = load(run, device)
        theirs = _load_split(translator, split_name)
        pairs = [(pair.source, pair.target) for pair in theirs.examples]
        first = first or pairs
        if pairs != first:
            raise InputError(
                f"{name} has other {split_name} data than {names[0]}; compare on the same sentences"
            )
        with console.status(f"translating with {name}"):
            found[name] = score_split(translator, theirs, options, metric)
    outputs = {name: [one.translation for one in each.predictions] for name, each in found.items()}
    compared = bootstrap_translations(outputs, [target for _, target in first], metric=metric)
    console.print(_build_comparison_table(compared, found, f"{split_name}, {len(first):,} sentences"))
    console.print(compared[0].score.signature, style="dim", soft_wrap=True)
    figure = draw_scores_by_length(
        {name: each.bleu_by_length for name, each in found.items()},
        output_folder / f"{split_name}-by-length.png",
    )
    told = [{**_to_dict(one), **found[one.name].to_dict()} for one in compared]
    _write_text(output_folder / f"{split_name}.json", json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    console.print(
        f"figure: {figure}\ndata: {output_folder / f'{split_name}.json'}", markup=False, soft_wrap=True
    )


def _build_comparison_table(
    compared: Sequence[SystemComparison], evaluations: dict[str, TranslationEvaluation], title: str
) -> Table:
    table = Table("run", "BLEU", "95 %", "p", "chrF", "perplexity", title=title)
    for one in compared:
        each = evaluations[one.name]
        table.add_row(
            Text(one.name),
            f"{one.score.value:.2f}",
            f"{one.low:.1f}–{one.high:.1f}",
            "" if one.p_value is None else f"{one.p_value:.3f}",
            f"{each.chrf.value:.1f}",
            f"{each.perplexity:.2f}",
        )
    return table


def build_bleu(run: Run) -> Bleu:
    """As the recipe says, or else as the language wants it."""
    asked, data = run.recipe.evaluation.bleu_tokenizer, run.recipe.data
    tokens = metrics.choose_bleu_tokenization(str(data.target)) if asked == "auto" else asked
    return Bleu(tokens, lowercase=data.preprocessing != "none")


def _load_split(predictor: TranslationPredictor, split_name: str) -> TranslationSplit:
    if split_name not in ("valid", "test"):
        raise InputError(f"--split {split_name}: it is test or valid")
    found: TranslationSplit = getattr(predictor.data, f"{split_name}_split")()
    return found


@torch.inference_mode()
def compute_perplexity(predictor: TranslationPredictor, pairs: Sequence[TranslationExample]) -> float:
    """Of the references, a token each."""
    nll, count = 0.0, 0
    order = sorted(pairs, key=lambda pair: len(pair.target))
    while order:
        rows = max(1, MAX_BATCH_TOKENS // max(1, len(order[-1].target)))
        batch = predictor.build_batch(order[-rows:])
        order = order[:-rows]
        loss = predictor.model.loss(batch)
        nll, count = nll + float(loss.parts["nll"]), count + loss.count
    return metrics.perplexity(nll, count)


def _score_alignment(predictor: TranslationPredictor, split: TranslationSplit) -> dict[str, Any]:
    """The score of the model's word links: on this split if its links are known, else on the gold pairs.

    Layer, head and step are those of the recipe. What it leaves open is chosen as ``jumok align`` does on the
    same pairs: by their sentences, not by their gold links. A pair that is too long has no links.
    """
    gold = split if split.gold_alignments is not None else predictor.data.gold_split()
    if gold is None or gold.gold_alignments is None or not predictor.has_attention:
        return {}
    aligner = WordAligner(predictor)
    fits = [aligner.find_length_problem(pair) is None for pair in gold.examples]
    pairs = list(itertools.compress(gold.examples, fits))
    if not pairs:
        return {}
    asked = AlignmentViewFilter.from_recipe(
        predictor.decode_config, num_layers=len(predictor.compute_attention_maps(pairs[:1])[0])
    )
    chosen = aligner.select_views(pairs, asked)
    aligned = aligner.align(pairs, chosen)
    found = [next(aligned).links if fit else frozenset() for fit in fits]
    return {
        "alignment_score": score_alignment(found, gold.gold_alignments),
        "alignment_split": gold.name,
        "alignment_view": str(chosen),
    }


def _draw_figures(
    predictor: TranslationPredictor,
    split: TranslationSplit,
    evaluation: TranslationEvaluation,
    folder: Path,
    split_name: str,
) -> list[Path]:
    """The curve by length, and some maps."""
    from jumok.look.figures.plots import draw_scores_by_length

    drawn = [
        draw_scores_by_length(
            {str(predictor.run.folder): evaluation.bleu_by_length}, folder / f"{split_name}-by-length.png"
        )
    ]
    if predictor.has_attention:
        fit = [
            n
            for n, one in enumerate(evaluation.predictions)
            if 5 <= len(one.source_words) <= MAX_FIGURE_WORDS
        ]
        for n in fit[:NUM_FIGURES]:
            one = predictor.translate(split.examples[n].source)
            if one.target_words:  # a model that has learned little may say nothing
                drawn.append(predictor.draw_attention(one, folder / f"{split_name}-map-{n + 1}.png"))
    return drawn


def _print_evaluation(evaluation: TranslationEvaluation, split: TranslationSplit, console: Console) -> None:
    table = Table("figure", "value", "", title=f"{split.name}, {len(split.examples):,} sentences")
    named = (
        ("BLEU", evaluation.bleu),
        ("chrF", evaluation.chrf),
        ("BLEU, Moses tokens", evaluation.bleu_moses),
    )
    scores = [(name, one) for name, one in named if one is not None]
    for name, one in scores:
        table.add_row(name, f"{one.value:.2f}")
    table.add_row("perplexity", f"{evaluation.perplexity:.3f}", "of a token")
    links = evaluation.alignment_score
    if links is not None:
        table.add_row(
            f"alignment error rate, {evaluation.alignment_split}",
            f"{links.error_rate:.3f}",
            f"precision {links.precision:.3f}, recall {links.recall:.3f}",
        )
    if evaluation.num_truncated:
        table.add_row("cut off", f"{evaluation.num_truncated}", "translations that reached the length limit")
    console.print(table)
    if evaluation.alignment_view:
        console.print(f"links by {evaluation.alignment_view}", style="dim", markup=False, soft_wrap=True)
    for name, one in scores:  # whole, to be copied
        console.print(f"{name}: {one.signature}", style="dim", markup=False, highlight=False, soft_wrap=True)
    if split.skipped.total:
        console.print(f"Of the {split.name} data, {split.skipped}", markup=False, soft_wrap=True)


def _to_dict(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)


def _write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
