"""Scores of a translation run: BLEU, chrF, perplexity, scores by length, and word alignment error rate."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.metrics import translation
from jumok.metrics.translation import Bleu, Chrf, LengthBin, TranslationScore
from jumok.metrics.word_alignment import AlignmentScore, score_alignment
from jumok.run import Run
from jumok.tasks.base import Evaluation
from jumok.tasks.translate.data import TranslationSplit

if TYPE_CHECKING:
    from jumok.tasks.translate.predictor import TranslationOptions, TranslationPrediction, TranslationPredictor

MAX_BATCH_TOKENS = 8192  # target tokens in a batch whose loss is computed
NUM_FIGURES = 3  # attention maps that are drawn
MIN_FIGURE_WORDS, MAX_FIGURE_WORDS = 5, 30  # length of the source sentences of these


@dataclass(frozen=True, eq=False)
class TranslationScores:
    """The translations of a split, and their scores."""

    predictions: list[TranslationPrediction]
    bleu: TranslationScore
    chrf: TranslationScore
    bleu_moses: TranslationScore | None  # BLEU of lowercase Moses tokens, as in papers on Multi30k
    perplexity: float
    bleu_by_length: list[LengthBin]

    @property
    def num_truncated(self) -> int:
        """The number of translations that reached the length limit."""
        return sum(not prediction.finished for prediction in self.predictions)

    @property
    def named_scores(self) -> dict[str, TranslationScore]:
        scores = {"BLEU": self.bleu, "chrF": self.chrf, "BLEU, Moses tokens": self.bleu_moses}
        return {name: score for name, score in scores.items() if score is not None}

    def to_metrics(self) -> dict[str, Any]:
        """The scores as plain data."""
        moses = {} if self.bleu_moses is None else {"bleu_moses": asdict(self.bleu_moses)}
        return {
            "bleu": asdict(self.bleu),
            "chrf": asdict(self.chrf),
            **moses,
            "perplexity": self.perplexity,
            "num_truncated": self.num_truncated,
            "bleu_by_length": [{**asdict(bin), "label": bin.label} for bin in self.bleu_by_length],
        }


@dataclass(frozen=True)
class SplitAlignmentScore:
    """The score of a model's word alignments."""

    score: AlignmentScore
    split_name: str  # the split with the gold alignments
    view: str  # the layer, head and step that the alignments were read from, and why these

    def to_metrics(self) -> dict[str, Any]:
        return {"alignment": {**asdict(self.score), "split": self.split_name, "view": self.view}}


def evaluate_translations(
    predictor: TranslationPredictor,
    split: TranslationSplit,
    options: TranslationOptions,
    *,
    detailed: bool = False,
    metric: Bleu | None = None,
) -> Evaluation:
    """Translate a split and score it; ``detailed`` adds word alignments and figures."""
    metric = metric or build_bleu(predictor.run)
    scores = score_translations(predictor, split, options, metric)
    translations = [prediction.translation for prediction in scores.predictions]
    alignment = score_word_alignment(predictor, split) if detailed else None
    config = predictor.decode_config
    return Evaluation(
        {
            "decode": {**asdict(config), "beam_size": options.beam_size or config.beam_size},
            **scores.to_metrics(),
            **({} if alignment is None else alignment.to_metrics()),
        },
        select_by="bleu",
        statistic=metric.make_subset_score(translations, [pair.target for pair in split.examples]),
        outputs=translations,
        outputs_suffix=".txt",
        rows=_build_rows(scores, alignment),
        notes=[
            *([] if alignment is None else [f"word alignments from {alignment.view}"]),
            *(f"{name}: {score.signature}" for name, score in scores.named_scores.items()),
        ],
        figures=_build_figures(predictor, split, scores) if detailed else {},
        comparison_columns={"chrF": f"{scores.chrf.value:.1f}", "perplexity": f"{scores.perplexity:.2f}"},
        num_digits=2,
        scoring=metric,
    )


def score_translations(
    predictor: TranslationPredictor, split: TranslationSplit, options: TranslationOptions, metric: Bleu
) -> TranslationScores:
    """Translate a split and score the translations."""
    pairs = split.examples
    sources, references = [pair.source for pair in pairs], [pair.target for pair in pairs]
    predictions = list(predictor.predict(sources, options))
    translations = [prediction.translation for prediction in predictions]
    is_lowercase = predictor.data.config.preprocessing == "moses-lowercase"
    lengths = [len(source.split()) for source in sources]
    return TranslationScores(
        predictions=predictions,
        bleu=metric.score(translations, references),
        chrf=Chrf(lowercase=is_lowercase).score(translations, references),
        bleu_moses=_score_moses_bleu(predictor, predictions, references) if is_lowercase else None,
        perplexity=compute_perplexity(predictor, pairs),
        bleu_by_length=translation.score_by_length(lengths, translations, references, metric=metric),
    )


def _score_moses_bleu(
    predictor: TranslationPredictor, predictions: list[TranslationPrediction], references: list[str]
) -> TranslationScore:
    tokenized = [predictor.data.preprocess(reference, "target") for reference in references]
    return Bleu("none").score([" ".join(prediction.target_words) for prediction in predictions], tokenized)


def build_bleu(run: Run) -> Bleu:
    """BLEU with the tokenizer of the recipe, or with that of the target language."""
    tokenizer, data = run.recipe.evaluation.bleu_tokenizer, run.recipe.data
    if tokenizer == "auto":
        tokenizer = translation.choose_bleu_tokenization(str(data.target))
    return Bleu(tokenizer, lowercase=data.preprocessing != "none")


@torch.inference_mode()
def compute_perplexity(predictor: TranslationPredictor, pairs: Sequence[TranslationExample]) -> float:
    """The perplexity of the references, per token."""
    nll, count = 0.0, 0
    remaining = sorted(pairs, key=lambda pair: len(pair.target))
    while remaining:
        num_rows = max(1, MAX_BATCH_TOKENS // max(1, len(remaining[-1].target)))
        batch = predictor.build_batch(remaining[-num_rows:])
        remaining = remaining[:-num_rows]
        loss = predictor.model.loss(batch)
        nll, count = nll + float(loss.parts["nll"]), count + loss.count
    return translation.perplexity(nll, count)


def score_word_alignment(predictor: TranslationPredictor, split: TranslationSplit) -> SplitAlignmentScore | None:
    """Score the model's word alignments on this split, if it has gold alignments, else on the gold pairs.

    Layer, head and step are those of the recipe. What the recipe leaves open is selected as ``jumok align``
    selects it on the same pairs: by the sentences, not by the gold alignments. A pair that is too long for the
    model counts as not aligned.
    """
    gold = split if split.gold_alignments is not None else predictor.data.gold_split()
    if gold is None or gold.gold_alignments is None or not predictor.has_attention:
        return None
    from jumok.tasks.translate.word_alignment import AlignmentViewFilter, WordAligner

    aligner = WordAligner(predictor)
    fits = [aligner.find_length_problem(pair) is None for pair in gold.examples]
    pairs = list(itertools.compress(gold.examples, fits))
    if not pairs:
        return None
    view_filter = AlignmentViewFilter.from_recipe(
        predictor.decode_config, num_layers=len(predictor.compute_attention_maps(pairs[:1])[0])
    )
    views = aligner.select_views(pairs, view_filter)
    alignments = aligner.align(pairs, views)
    links = [next(alignments).links if fit else frozenset() for fit in fits]
    return SplitAlignmentScore(score_alignment(links, gold.gold_alignments), gold.name, str(views))


def _build_rows(scores: TranslationScores, alignment: SplitAlignmentScore | None) -> list[tuple[str, str, str]]:
    rows = [(name, f"{score.value:.2f}", "") for name, score in scores.named_scores.items()]
    rows.append(("perplexity", f"{scores.perplexity:.3f}", "per token"))
    if alignment is not None:
        score = alignment.score
        comment = f"precision {score.precision:.3f}, recall {score.recall:.3f}"
        rows.append((f"alignment error rate, {alignment.split_name}", f"{score.error_rate:.3f}", comment))
    if scores.num_truncated:
        rows.append(("truncated", f"{scores.num_truncated}", "translations that reached the length limit"))
    return rows


def _build_figures(
    predictor: TranslationPredictor, split: TranslationSplit, scores: TranslationScores
) -> dict[str, Callable[[Path], Path]]:
    """Scores by length, and attention maps of a few sentences."""
    name = str(predictor.run.folder)
    figures: dict[str, Callable[[Path], Path]] = {
        "by-length": functools.partial(_draw_by_length, {name: scores.bleu_by_length})
    }
    if predictor.has_attention:
        indices = (
            index
            for index, prediction in enumerate(scores.predictions)
            if MIN_FIGURE_WORDS <= len(prediction.source_words) <= MAX_FIGURE_WORDS
        )
        for index in itertools.islice(indices, NUM_FIGURES):
            prediction = predictor.translate(split.examples[index].source)
            if prediction.target_words:  # an untrained model may predict nothing
                figures[f"map-{index + 1}"] = functools.partial(predictor.draw_attention, prediction)
    return figures


def _draw_by_length(bins: dict[str, list[LengthBin]], path: Path) -> Path:
    from jumok.look.figures.plots import draw_scores_by_length

    return draw_scores_by_length(bins, path)
