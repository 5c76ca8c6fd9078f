"""A pretrained BERT at work: it says hidden words, and whether one text follows another.

::

    the capital of France is [MASK] .          →   paris 0.41, lyon 0.08, …
    he opened the door ||| she went in         →   next 0.93
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
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
from jumok.tasks.common import PredictOptions

if TYPE_CHECKING:
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["FillMaskOptions", "FillMaskPrediction", "FillMaskPredictor", "compute_attention_maps"]

LINES_PER_CHUNK = 1024  # lines that are read before any is answered, so that those of like length go together
MAX_BATCH_TOKENS = 8192  # in a batch
DEFAULT_CANDIDATES = 5  # words that are told of each mask, unless more are asked for
# What may stand between the first text and the second: ||| with white space around it, or white space that
# has a tab in it. All white space is consumed, so that a long run of it takes linear time.
PAIR_SEPARATOR = re.compile(r"\s*+\|\|\|\s*+|\s++")


@dataclass(frozen=True)
class FillMaskOptions(PredictOptions):
    """What one asks of a prediction: how many words for each mask. The rest is for translation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beam_size is not None or self.sample:
            raise InputError(
                "--beam and --sample are for translation; of each [MASK] --n-best words are told"
            )


@dataclass(frozen=True, eq=False)
class FillMaskPrediction:
    """One line, and what the model says of it."""

    index: int  # of the line, from 0
    input: str
    mask_predictions: list[list[tuple[str, float]]]  # the likeliest for each mask, with their probabilities
    filled_text: str  # the text with the likeliest words
    next_sentence_probability: float | None = (
        None  # the probability that the second text follows the first, if there are two
    )
    finished: bool = True

    @property
    def is_drawable(self) -> bool:
        """Whether there is something to draw a map of."""
        return bool(self.input.strip())

    def to_lines(self, *, n_best: bool, alignments: bool, as_json: bool) -> Iterator[str]:
        """As ``jumok run`` writes it: fields with tabs between them, or JSON."""
        if alignments:
            raise InputError("--alignments: a model of one text makes no links between two")
        if as_json:
            words = [[{"word": word, "probability": p} for word, p in some] for some in self.mask_predictions]
            known = {"line": self.index, "text": self.input, "filled_text": self.filled_text, "mask_predictions": words}
            yield json.dumps({**known, "next_sentence_probability": self.next_sentence_probability}, ensure_ascii=False)
            return
        fields = [", ".join(f"{word} {p:.3f}" for word, p in some) for some in self.mask_predictions]
        if self.next_sentence_probability is not None:
            fields.insert(
                0,
                f"next {self.next_sentence_probability:.3f}"
                if self.next_sentence_probability >= 0.5
                else f"not next {1 - self.next_sentence_probability:.3f}",
            )
        yield "\t".join(fields)


class FillMaskPredictor:
    """A pretrained model with its tokenizer.

    >>> bert = jumok.load("runs/bert-wiki")  # doctest: +SKIP
    >>> bert.fill("the capital of france is [MASK] .").mask_predictions[0][0]  # doctest: +SKIP
    ('paris', 0.41)
    """

    def __init__(self, run: Run, model: BertPretrainingModel, tokenizer: WordPieceTokenizer) -> None:
        self.run, self.model, self.tokenizer = run, model, tokenizer

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    def fill(self, text: str, n_best: int = DEFAULT_CANDIDATES) -> FillMaskPrediction:
        """One text; many of them by :meth:`predict`."""
        return next(self.predict([text], FillMaskOptions(n_best=n_best)))

    def predict(
        self,
        lines: Iterable[str],
        options: FillMaskOptions,
        *,
        with_attention: bool = False,
        first_index: int = 0,
    ) -> Iterator[FillMaskPrediction]:
        """What is hidden in every line, in their order; ``first_index`` is the number of the first line."""
        many = options.n_best if options.n_best > 1 else DEFAULT_CANDIDATES
        numbered = enumerate(lines, first_index)
        while window := list(itertools.islice(numbered, LINES_PER_CHUNK)):
            rows = [self._encode_masked_line(number, line) for number, line in window]
            found: dict[int, FillMaskPrediction] = {}
            order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
            while order:
                some = order[: max(1, MAX_BATCH_TOKENS // len(rows[order[0]][0]))]
                order = order[len(some) :]
                said = self._predict_rows([rows[i] for i in some], many)
                for i, (words, follows) in zip(some, said, strict=True):
                    found[i] = self._build_prediction(*window[i], rows[i], words, follows)
            yield from (found[i] for i in range(len(window)))

    def count_tokens(self, line: str) -> int:
        """How many tokens the model reads of a line; one that it cannot answer is an error."""
        return len(self._encode_masked_line(0, line)[0])

    def _encode_masked_line(self, index: int, line: str) -> tuple[list[int], list[int]]:
        """The ids and segments of a line, which must have something to be said of it."""
        mask = self.tokenizer.special_tokens["mask"]
        if mask not in line and len(_split_texts(line)) == 1:
            raise InputError(
                f"line {index + 1} hides no word: write {mask} for one, or two texts with ||| between them, "
                "to be told whether the second follows the first"
            )
        return self._encode_line(index, line)

    def _encode_line(self, index: int, line: str) -> tuple[list[int], list[int]]:
        """The ids and segments of a text, or of two with ||| or a tab between them."""
        texts = _split_texts(line)
        if len(texts) > 2:
            raise InputError(
                f"line {index + 1} has {len(texts)} texts with ||| or tabs between; one or two can be"
            )
        row = self.tokenizer.join_segments(*self.tokenizer.encode(texts, allow_special=True))
        most = self.model.bert.config.max_positions
        if len(row[0]) > most:
            raise InputError(
                f"line {index + 1} has {len(row[0])} tokens, and this model takes {most} at most; divide it"
            )
        return row

    def _build_batch(self, rows: Sequence[tuple[list[int], list[int]]]) -> PretrainingBatch:
        width = max(len(ids) for ids, _ in rows)
        places = [
            n * width + at
            for n, (ids, _) in enumerate(rows)
            for at, i in enumerate(ids)
            if i == self.tokenizer.mask_id
        ]
        batch = PretrainingBatch.from_sequences(
            [ids for ids, _ in rows],
            [segments for _, segments in rows],
            masked_indices=torch.tensor(places, dtype=torch.long),
            labels=torch.zeros(len(places), dtype=torch.long),
            next_sentence_labels=torch.zeros(len(rows), dtype=torch.long),
            count=len(places),
        )
        return batch.to(self.device)

    @torch.inference_mode()
    def _predict_rows(
        self, rows: Sequence[tuple[list[int], list[int]]], num_candidates: int
    ) -> Iterator[tuple[list[list[tuple[int, float]]], float]]:
        """For each row the likeliest words of its masks, and the probability that its second text is next."""
        words, follows = self.model.logits(self._build_batch(rows))
        assert words is not None
        words = words[:, : self.tokenizer.vocab_size].float()  # an embedding may have more rows than that
        words[:, self.tokenizer.special_ids] = -torch.inf  # none of them is a word
        best = words.softmax(-1).topk(min(num_candidates, words.shape[1]), dim=-1)
        told = map(zip, best.indices.tolist(), best.values.tolist())
        shares = [1.0] * len(rows) if follows is None else follows.float().softmax(-1)[:, 0].tolist()
        for (ids, _), share in zip(rows, shares, strict=True):
            yield [list(some) for some in itertools.islice(told, ids.count(self.tokenizer.mask_id))], share

    def _build_prediction(
        self,
        index: int,
        line: str,
        row: tuple[list[int], list[int]],
        mask_predictions: list[list[tuple[int, float]]],
        next_sentence_probability: float,
    ) -> FillMaskPrediction:
        ids, segments = row
        best = iter(mask_predictions)
        said = [next(best)[0][0] if i == self.tokenizer.mask_id else i for i in ids]
        is_pair = any(segments)
        middle = segments.index(1) if is_pair else len(ids)
        parts = [self.tokenizer.decode(part) for part in (said[:middle], said[middle:]) if part]
        told = [
            [(self.tokenizer.ids_to_tokens([i])[0], share) for i, share in some] for some in mask_predictions
        ]
        return FillMaskPrediction(
            index, line, told, " ||| ".join(parts), next_sentence_probability if is_pair else None
        )

    # ------------------------------------------------------------------------------------------- looking

    def check_has_attention(self) -> None:
        """There always are some."""

    def draw_attention(self, prediction: FillMaskPrediction, path: Path, title: str = "") -> Path:
        """The attention of the last layer, its heads averaged, as a picture."""
        from jumok.look.figures.plots import draw_heat_map

        row = self._encode_masked_line(prediction.index, prediction.input)
        batch = self._build_batch([row])
        with torch.inference_mode():
            weights = compute_attention_maps(self.model.bert, batch)[-1][0].float().mean(0)
        names = self.tokenizer.ids_to_tokens(row[0])
        return draw_heat_map(weights.cpu(), names, names, path, title=title)

    def build_viewer_data(
        self, text: str, target: str | None = None, *, ablations: Ablations | None = None
    ) -> list[ViewerData]:
        """All attention of the model while it reads one text, or two; and again ``ablations`` some of it."""
        from jumok.look.capture.watch import watch
        from jumok.look.viewer.comparison import compare_with_ablation
        from jumok.look.viewer.viewer_data import ViewerData

        line = text if target is None else f"{text} ||| {target}"
        batch = self._build_batch([self._encode_line(0, line)])

        def look() -> ViewerData:
            with torch.inference_mode(), watch(self.model, self.tokenizer) as seen:
                self.model.bert.encode(batch.tokens, batch.segments)
            return ViewerData.from_captures(seen, title=line)

        return compare_with_ablation(self.model, ablations, look)

    def export(self, format_name: str, folder: Path) -> None:
        """Write the model in another format: ``hf``, a folder with BERT's architecture."""
        if format_name != "hf":
            raise InputError(f"--format {format_name}: hf is what a pretraining run can be exported to")
        from jumok.export.bert import export_bert

        export_bert(self.model, self.tokenizer, folder)


def _split_texts(line: str) -> list[str]:
    """The texts of a line, with ||| or a tab between them.

    >>> _split_texts(" he opened the door ||| she left ")
    ['he opened the door', 'she left']
    """
    line = line.strip()
    texts, begin = [], 0
    for gap in PAIR_SEPARATOR.finditer(line):
        if "|" in gap[0] or "\t" in gap[0]:
            texts.append(line[begin : gap.start()])
            begin = gap.end()
    return [*texts, line[begin:]]


def compute_attention_maps(bert: Bert, batch: Any) -> list[Tensor]:
    """Where the heads of each layer look, ``(B, H, L, L)`` each; the batch is padded."""
    seen: list[Tensor] = []

    def look(attention: Any, given: tuple[Tensor, ...]) -> None:
        seen.append(attention.weights(given[0], mask=batch.tokens.mask))

    hooks = [layer.attention.register_forward_pre_hook(look) for layer in bert.layers]
    try:
        bert.encode(batch.tokens, batch.segments)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
