"""A pretrained BERT: it predicts masked words, and whether one text follows another.

::

    the capital of France is [MASK] .          →   paris 0.41, lyon 0.08, …
    he opened the door ||| she went in         →   next 0.93
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jumok.batches.text import PretrainingBatch
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError
from jumok.models.bert import Bert, BertPretrainingModel
from jumok.run import Run
from jumok.tasks.base import Evaluation, Prediction, SplitName
from jumok.tasks.jsonl_input import split_pair
from jumok.tasks.options import PredictOptions
from jumok.tasks.predictors import BertPredictor, group_by_length
from jumok.tasks.pretrain import metrics as pretrain_metrics
from jumok.tasks.pretrain.data import PretrainingSplit, load_pretraining_split
from jumok.training import ValidationReport, compute_attention_health

if TYPE_CHECKING:
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData

MAX_BATCH_TOKENS = 8192
DEFAULT_CANDIDATES = 5  # words per mask, unless --n-best asks for more
NUM_HEALTH_EXAMPLES = 32  # sequences whose attention is measured at a validation


@dataclass(frozen=True)
class FillMaskOptions(PredictOptions):
    """Options of mask filling: the number of words per mask."""

    unsupported_hint = "this model fills masks; --n-best is the number of words for each [MASK]"


@dataclass(frozen=True, eq=False)
class FillMaskPrediction(Prediction):
    """The predictions for the masks of a line."""

    mask_predictions: list[list[tuple[str, float]]]  # for each mask, the likeliest words and probabilities
    filled_text: str  # the text with the likeliest words
    # The probability that the second text follows the first, if there are two.
    next_sentence_probability: float | None = None

    def to_dict(self, *, n_best: bool = False) -> dict[str, Any]:
        return {
            "filled_text": self.filled_text,
            "mask_predictions": [
                [{"word": word, "probability": probability} for word, probability in candidates]
                for candidates in self.mask_predictions
            ],
            "next_sentence_probability": self.next_sentence_probability,
        }

    def format_lines(self, *, n_best: bool) -> Iterator[str]:
        """The words for each mask, separated by tabs."""
        fields = [", ".join(f"{word} {p:.3f}" for word, p in words) for words in self.mask_predictions]
        probability = self.next_sentence_probability
        if probability is not None:
            is_next = probability >= 0.5
            fields.insert(0, f"next {probability:.3f}" if is_next else f"not next {1 - probability:.3f}")
        yield "\t".join(fields)


class FillMaskPredictor(BertPredictor[FillMaskPrediction, FillMaskOptions]):
    """A pretrained model with its tokenizer.

    >>> bert = jumok.load("runs/bert-wiki")  # doctest: +SKIP
    >>> bert.fill("the capital of france is [MASK] .").mask_predictions[0][0]  # doctest: +SKIP
    ('paris', 0.41)
    """

    model: BertPretrainingModel
    tokenizer: WordPieceTokenizer

    def __init__(self, run: Run, model: BertPretrainingModel, tokenizer: WordPieceTokenizer) -> None:
        self.run, self.model, self.tokenizer = run, model, tokenizer

    def fill(self, text: str, n_best: int = DEFAULT_CANDIDATES) -> FillMaskPrediction:
        """Fill the masks of one text. For many texts use :meth:`predict`."""
        return next(self.predict([text], FillMaskOptions(n_best=n_best)))

    def predict_chunk(
        self, lines: Sequence[str], options: FillMaskOptions, first_index: int
    ) -> Iterator[FillMaskPrediction]:
        num_candidates = options.n_best if options.n_best > 1 else DEFAULT_CANDIDATES
        rows = [self._encode_masked_line(index, line) for index, line in enumerate(lines, first_index)]
        predictions: dict[int, FillMaskPrediction] = {}
        for batch in group_by_length([len(ids) for ids, _ in rows], MAX_BATCH_TOKENS):
            outputs = self._predict_rows([rows[i] for i in batch], num_candidates)
            for i, (candidates, probability) in zip(batch, outputs, strict=True):
                predictions[i] = self._build_prediction(first_index + i, lines[i], rows[i], candidates, probability)
        return (predictions[i] for i in range(len(lines)))

    def count_tokens(self, line: str) -> int:
        """The number of tokens of a line. Raise if the line is invalid."""
        return len(self._encode_masked_line(0, line)[0])

    def _encode_masked_line(self, index: int, line: str) -> tuple[list[int], list[int]]:
        """The ids and segments of a line, which must have a mask or two texts."""
        mask = self.tokenizer.special_tokens["mask"]
        if mask not in line and len(split_pair(line)) == 1:
            raise InputError(
                f"line {index + 1} has no mask: write {mask} for a masked word, or two texts with ||| between "
                "them, to predict whether the second follows the first"
            )
        return self._encode_line(index, line)

    def _encode_line(self, index: int, line: str) -> tuple[list[int], list[int]]:
        """The ids and segments of one text, or of two that ||| or a tab separates."""
        texts = split_pair(line)
        if len(texts) > 2:
            raise InputError(f"line {index + 1} has {len(texts)} texts, separated by ||| or tabs; expected one or two")
        row = self.tokenizer.join_segments(*self.tokenizer.encode(texts, allow_special=True))
        max_tokens = self.model.bert.config.max_positions
        if len(row[0]) > max_tokens:
            raise InputError(
                f"line {index + 1} has {len(row[0])} tokens, and this model takes {max_tokens} at most; split it"
            )
        return row

    def _build_batch(self, rows: Sequence[tuple[list[int], list[int]]]) -> PretrainingBatch:
        width = max(len(ids) for ids, _ in rows)
        positions = [
            row * width + column
            for row, (ids, _) in enumerate(rows)
            for column, token_id in enumerate(ids)
            if token_id == self.tokenizer.mask_id
        ]
        batch = PretrainingBatch.from_sequences(
            [ids for ids, _ in rows],
            [segments for _, segments in rows],
            masked_indices=torch.tensor(positions, dtype=torch.long),
            labels=torch.zeros(len(positions), dtype=torch.long),
            next_sentence_labels=torch.zeros(len(rows), dtype=torch.long),
            count=len(positions),
        )
        return batch.to(self.device)

    @torch.inference_mode()
    def _predict_rows(
        self, rows: Sequence[tuple[list[int], list[int]]], num_candidates: int
    ) -> Iterator[tuple[list[list[tuple[int, float]]], float]]:
        """For each row the likeliest ids of its masks, and the probability that its second text is next."""
        mlm_logits, nsp_logits = self.model.logits(self._build_batch(rows))
        assert mlm_logits is not None
        mlm_logits = mlm_logits[:, : self.tokenizer.vocab_size].float()  # an embedding may have more rows
        mlm_logits[:, self.tokenizer.special_ids] = -torch.inf  # special tokens are not words
        best = mlm_logits.softmax(-1).topk(min(num_candidates, mlm_logits.shape[1]), dim=-1)
        candidates = map(zip, best.indices.tolist(), best.values.tolist())
        probabilities = [1.0] * len(rows) if nsp_logits is None else nsp_logits.float().softmax(-1)[:, 0].tolist()
        for (ids, _), probability in zip(rows, probabilities, strict=True):
            num_masks = ids.count(self.tokenizer.mask_id)
            yield [list(pairs) for pairs in itertools.islice(candidates, num_masks)], probability

    def _build_prediction(
        self,
        index: int,
        line: str,
        row: tuple[list[int], list[int]],
        candidates: list[list[tuple[int, float]]],
        next_sentence_probability: float,
    ) -> FillMaskPrediction:
        ids, segments = row
        best = iter(candidates)
        filled = [next(best)[0][0] if i == self.tokenizer.mask_id else i for i in ids]
        is_pair = any(segments)
        middle = segments.index(1) if is_pair else len(ids)
        texts = [self.tokenizer.decode(part) for part in (filled[:middle], filled[middle:]) if part]
        words = [
            [(self.tokenizer.ids_to_tokens([i])[0], probability) for i, probability in pairs] for pairs in candidates
        ]
        return FillMaskPrediction(
            index, line, words, " ||| ".join(texts), next_sentence_probability if is_pair else None
        )

    # ------------------------------------------------------------------------------------------------- attention

    def draw_attention(self, prediction: FillMaskPrediction, path: Path, title: str = "") -> Path:
        return self.draw_row(*self._encode_masked_line(prediction.index, prediction.input), path, title)

    def build_viewer_data(
        self,
        text: str,
        target: str | None = None,
        *,
        options: FillMaskOptions | None = None,
        ablations: Ablations | None = None,
    ) -> list[ViewerData]:
        """Capture all attention for one text, or for two; with ``ablations``, a second time with those."""
        from jumok.look.viewer.comparison import compare_with_ablation
        from jumok.look.viewer.viewer_data import ViewerData

        line = text if target is None else f"{text} ||| {target}"
        row = self._encode_line(0, line)

        def capture() -> ViewerData:
            return ViewerData.from_captures(self.capture_attention(*row), title=" ||| ".join(split_pair(line)))

        return compare_with_ablation(self.model, ablations, capture)

    # ---------------------------------------------------------------------------------------------------- scores

    def load_split(self, name: SplitName) -> PretrainingSplit:
        return load_pretraining_split(self.run, self.tokenizer, name)

    def score_split(
        self,
        split: PretrainingSplit,
        options: FillMaskOptions,
        *,
        detailed: bool = False,
        scored_like: Evaluation | None = None,
    ) -> Evaluation:
        scores = pretrain_metrics.score_model(self.model, split.batcher)
        return pretrain_metrics.build_evaluation(self.run, scores, detailed=detailed)

    def validate(self, split: PretrainingSplit) -> ValidationReport:
        """Both accuracies, perplexity, and the health of the attention."""
        metrics = pretrain_metrics.score_model(self.model, split.batcher).validation_metrics
        indices = split.batcher.batches(0)[0][:NUM_HEALTH_EXAMPLES]
        batch = split.batcher.collate(indices).to(self.device)
        maps = compute_attention_maps(self.model.bert, batch)
        metrics |= compute_attention_health(maps, batch.tokens.lengths)
        samples = pretrain_metrics.format_samples(self.model, self.tokenizer, batch)
        return ValidationReport(metrics, select_by="loss", higher_is_better=False, samples=samples)


def compute_attention_maps(bert: Bert, batch: Any) -> list[Tensor]:
    """The attention weights of each layer ``(B, H, L, L)`` for a padded batch."""
    maps: list[Tensor] = []

    def record(attention: Any, inputs: tuple[Tensor, ...]) -> None:
        maps.append(attention.weights(inputs[0], mask=batch.tokens.mask))

    hooks = [layer.attention.register_forward_pre_hook(record) for layer in bert.layers]
    try:
        bert.encode(batch.tokens, batch.segments)
    finally:
        for hook in hooks:
            hook.remove()
    return maps
