"""Base classes of predictors: in chunks of lines, with labelled data, with a fine-tuned BERT."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from jumok.batches.text import TextBatch
from jumok.data.batching.texts import EncodedText, TextBatcher
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.decoding import StreamListener
from jumok.errors import InputError
from jumok.inference.line_io import iterate_chunks
from jumok.tasks.base import DatasetSplit, Evaluation, O_contra, P_co, Predictor, SplitName
from jumok.tasks.fine_tuning import BertTask
from jumok.tasks.options import NBestOptions
from jumok.tasks.supervised import SupervisedTask
from jumok.training import ValidationReport

if TYPE_CHECKING:
    from jumok.look.capture.captures import Captures
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData

MAX_BATCH_TOKENS = 8192


class ChunkedPredictor(Predictor[P_co, O_contra]):
    """A predictor that predicts lines in chunks. A subclass adds ``predict_chunk``."""

    chunk_size: ClassVar[int] = 1024  # so many lines that similar lengths share a batch

    def predict(
        self,
        lines: Iterable[str],
        options: O_contra,
        *,
        with_attention: bool = False,
        first_index: int = 0,
        listener: StreamListener | None = None,
    ) -> Iterator[P_co]:
        """Predict for lines, in their order. ``first_index`` is the index of the first line."""
        for chunk in iterate_chunks(lines, self.chunk_size):
            yield from self.predict_chunk(chunk, options, first_index)
            first_index += len(chunk)

    @abstractmethod
    def predict_chunk(self, lines: Sequence[str], options: O_contra, first_index: int) -> Iterable[P_co]:
        """Predict for lines that are encoded together."""


class SupervisedPredictor(Predictor[P_co, O_contra]):
    """A predictor of a task with labelled data. A subclass adds ``predict``, ``encode`` and ``score_examples``."""

    task: SupervisedTask[Any, Any]

    def __init__(self, task: Any, model: Any, tokenizer: Any) -> None:
        self.task, self.model, self.tokenizer = task, model, tokenizer
        self.run = task.run

    # Data and scores.

    @abstractmethod
    def encode(self, examples: Sequence[Any]) -> Iterator[Any]:
        """Encode examples for the model; an ``InvalidExample`` stands for one that cannot be encoded."""

    def check_encoded(self, encoded: Iterable[Any], first_index: int | None = 0) -> list[Any]:
        """Collect encoded examples; raise for an invalid one.

        ``first_index`` is the index of the first line; None: the examples are data, and know their location.
        """
        examples = list(encoded)
        for number, example in enumerate(examples, 1):
            if isinstance(example, InvalidExample):
                location = example.location if first_index is None else f"line {first_index + number}"
                raise InputError(str(replace(example, location=location)))
        return examples

    @abstractmethod
    def compute_loss(self, examples: Sequence[Any]) -> float:
        """The training loss per label; NaN if there are no labels."""

    @abstractmethod
    def score_examples(
        self, examples: Sequence[Any], options: O_contra | None = None, *, detailed: bool = False
    ) -> Evaluation:
        """Score the model on examples. ``detailed`` adds figures and metrics that take long."""

    def load_split(self, name: SplitName) -> DatasetSplit[Any]:
        return self.task.load_readable_split(name, self.encode)

    def score_split(
        self,
        split: DatasetSplit[Any],
        options: O_contra,
        *,
        detailed: bool = False,
        scored_like: Evaluation | None = None,
    ) -> Evaluation:
        return self.score_examples(split.examples, options, detailed=detailed)

    def validate(self, split: DatasetSplit[Any]) -> ValidationReport:
        return self.score_examples(split.examples).to_validation_report(self.compute_loss(split.examples))

    # Attention.

    def build_viewer_data(
        self,
        text: str,
        target: str | None = None,
        *,
        options: O_contra | None = None,
        ablations: Ablations | None = None,
    ) -> list[ViewerData]:
        from jumok.look.viewer.comparison import compare_with_ablation

        factory = self.make_viewer_factory(text, target, options)
        return compare_with_ablation(self.model, ablations, factory)

    @abstractmethod
    def make_viewer_factory(
        self, text: str, target: str | None = None, options: O_contra | None = None
    ) -> Callable[[], ViewerData]:
        """Return a function that captures the attention for a line. Raise at once if the line is invalid."""


def group_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Group sequences of similar lengths, as many as fit into a batch, longest first. Yields their indices.

    >>> list(group_by_length([3, 9, 4, 1], 12))
    [[1], [2, 0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        num_rows = max(1, max_tokens // lengths[order[0]])
        yield order[:num_rows]
        order = order[num_rows:]


def compute_mean_loss(model: Any, dataset: Any, device: torch.device) -> float:
    """The loss per label; NaN if there are no labels."""
    return compute_mean_losses(model, dataset, device)["loss"]


def compute_mean_losses(model: Any, dataset: Any, device: torch.device) -> dict[str, float]:
    """The loss and its parts per label; NaN if there are no labels."""
    sums, count = Counter({"loss": 0.0}), 0
    for index in dataset.batches(0):
        loss = model.loss(dataset.collate(index).to(device))
        sums.update({"loss": float(loss.total)} | {name: float(part) for name, part in loss.parts.items()})
        count += loss.count
    return {name: total / count if count else math.nan for name, total in sums.items()}


class BertPredictor(ChunkedPredictor[P_co, O_contra]):
    """A predictor with a BERT: it captures and draws its attention, and exports it."""

    @torch.inference_mode()
    def capture_attention(self, ids: Sequence[int], segments: Sequence[int]) -> Captures:
        """Capture all attention for one text, or for two."""
        from jumok.look.capture.watch import watch

        batch = TextBatch.from_sequences([ids], [segments]).to(self.device)
        with watch(self.model, self.tokenizer) as captures:
            self.model.bert.encode(batch.tokens, batch.segments)
        return captures

    def draw_row(self, ids: Sequence[int], segments: Sequence[int], path: Path, title: str = "") -> Path:
        """Draw the attention of the last layer, averaged over its heads. Rows are queries, columns are keys."""
        from jumok.look.figures.plots import draw_heat_map

        weights = self.capture_attention(ids, segments)[-1].weights(batch=0).float().mean(0)
        tokens = self.tokenizer.ids_to_tokens(ids)
        return draw_heat_map(weights.cpu(), tokens, tokens, path, title=title)

    def export(self, format_name: str, folder: Path) -> None:
        """Write the model as a Hugging Face folder (``hf``)."""
        if format_name != "hf":
            raise InputError(f"--format {format_name}: a BERT can be exported to hf")
        from jumok.export.bert import export_bert

        export_bert(self.model, self.tokenizer, folder, labels=self.labels)


class FineTunedPredictor(SupervisedPredictor[P_co, NBestOptions], BertPredictor[P_co, NBestOptions]):
    """A predictor with a fine-tuned BERT.

    A subclass adds ``parse_line``, ``predict_chunk``, ``encode`` and ``score_examples``.
    """

    task: BertTask[Any, Any]
    tokenizer: WordPieceTokenizer

    def __init__(self, task: Any, model: Any, tokenizer: WordPieceTokenizer) -> None:
        super().__init__(task, model, tokenizer)
        self.max_tokens: int = task.resolve_max_tokens(model.bert.config)

    @abstractmethod
    def parse_line(self, line: str, index: int = 0) -> Any:
        """Parse a line as an example without a label. ``index`` is the index of the line."""

    @abstractmethod
    def encode(self, examples: Sequence[Any]) -> Iterator[list[EncodedText] | InvalidExample]:
        """Encode each example as one row, or as several windows of a long text."""

    def encode_windows(self, example: Any) -> list[EncodedText]:
        """Encode one example. Raise if it is invalid."""
        windows: list[EncodedText]
        [windows] = self.check_encoded(self.encode([example]))
        return windows

    @torch.inference_mode()
    def compute_loss(self, examples: Sequence[Any]) -> float:
        rows = [row for windows in self.check_encoded(self.encode(examples), None) for row in windows]
        dataset = TextBatcher(self.task.batch_type, rows, max_tokens=MAX_BATCH_TOKENS, seed=0)
        return compute_mean_loss(self.model, dataset, self.device)

    @torch.inference_mode()
    def compute_outputs(
        self, rows: Sequence[EncodedText], compute: Callable[[TextBatch], Sequence[Tensor]]
    ) -> list[tuple[Tensor, ...]]:
        """The outputs of the model for each row, on the CPU. ``compute`` returns tensors ``(B, …)``."""
        unlabelled = [EncodedText(row.ids, row.segments) for row in rows]
        dataset = TextBatcher(TextBatch, unlabelled, max_tokens=MAX_BATCH_TOKENS, seed=0)
        by_row: dict[int, tuple[Tensor, ...]] = {}
        for index in dataset.batches(0):
            batch = dataset.collate(index)
            outputs = [x.float().cpu() for x in compute(batch.to(self.device))]
            by_row |= {row: tuple(x[i] for x in outputs) for i, row in enumerate(batch.example_indices)}
        return [by_row[row] for row in range(len(rows))]

    # ------------------------------------------------------------------------------------------- attention

    def _encode_first_window(self, text: str) -> tuple[EncodedText, str]:
        """The row that is shown, and a note if it is not the whole text."""
        row, *others = self.encode_windows(self.parse_line(text))
        if not others:
            return row, ""
        last_tokens = " ".join(self.tokenizer.ids_to_tokens(row.ids[-4:-1]))
        warnings.warn(
            f"the text has {1 + len(others)} windows; the first one, up to … {last_tokens}, is shown. To see "
            "another part, give that part of the text",
            stacklevel=2,
        )
        return row, f"window 1 of {1 + len(others)}"

    def make_viewer_factory(
        self, text: str, target: str | None = None, options: NBestOptions | None = None
    ) -> Callable[[], ViewerData]:
        from jumok.look.viewer.viewer_data import ViewerData

        if target is not None:
            raise InputError("--target: this model does not generate text")
        row, window_note = self._encode_first_window(text)

        def capture() -> ViewerData:
            [prediction] = self.predict([text], NBestOptions())
            label = " ".join(prediction.format_lines(n_best=False)).replace("\t", " ")
            title = f"{text}  →  {label}"
            return ViewerData.from_captures(
                self.capture_attention(row.ids, row.segments),
                title=f"{window_note}: {title}" if window_note else title,
                label=label,
            )

        return capture

    def draw_attention(self, prediction: Any, path: Path, title: str = "") -> Path:
        row, window_note = self._encode_first_window(prediction.input)
        title = ", ".join(filter(None, (title, window_note)))
        return self.draw_row(row.ids, row.segments, path, title)
