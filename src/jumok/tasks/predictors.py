"""A trained model at work: what all uses of labelled data have in common then, and what BERT's have."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jumok.batches.text import TextBatch
from jumok.data.batching.texts import EncodedText, TextBatcher
from jumok.data.readers.formats import InvalidExample
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError
from jumok.run import Run
from jumok.tasks import base as tasks_base
from jumok.tasks.base import Evaluation
from jumok.tasks.supervised import NBestOptions
from jumok.training import ValidationReport

if TYPE_CHECKING:
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["BertPredictor", "Prediction", "SupervisedPredictor", "split_pair"]

MAX_BATCH_TOKENS = 8192  # in a batch


@dataclass(frozen=True)
class Prediction:
    """One line and what is said of it."""

    index: int  # of the line, from 0
    input: str  # the line

    @property
    def finished(self) -> bool:
        """It always is: nothing is cut off here."""
        return True

    @property
    def is_drawable(self) -> bool:
        """Whether there is something to draw a map of."""
        return bool(self.input.strip())

    def to_lines(self, *, n_best: bool, alignments: bool, as_json: bool) -> Iterator[str]:
        """As ``jumok run`` writes it."""
        if alignments:
            raise InputError("--alignments are the word links of a translation; here there is none")
        return self.format_lines(n_best=n_best, as_json=as_json)

    def format_lines(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        """The same, for each use."""
        raise NotImplementedError


def split_pair(line: str) -> list[str]:
    """The texts of a line that has two, with a tab or ||| between them.

    >>> split_pair("He is old. ||| He is young.")
    ['He is old.', 'He is young.']
    """
    return [text.strip() for text in line.split("\t" if "\t" in line else "|||")]


class SupervisedPredictor:
    """A model with its tokenizer. A use adds ``predict`` and ``score_examples``; a kind of model, the rest."""

    def __init__(self, task: Any, model: Any, tokenizer: Any) -> None:
        self.task, self.model, self.tokenizer = task, model, tokenizer
        self.run: Run = task.run

    @property
    def device(self) -> torch.device:
        weight: Tensor = next(iter(self.model.parameters()))
        return weight.device

    @property
    def labels(self) -> Sequence[str]:
        """The names of the classes, if there are any."""
        return ()

    def load_split(self, split_name: str) -> Any:
        """The validation or test data."""
        return self.task.load_readable_split(split_name, self.encode)

    def predict(
        self, lines: Iterable[str], options: Any, *, with_attention: bool = False, first_index: int = 0
    ) -> Iterator[Prediction]:
        """What is said of every line, in their order; ``first_index`` is the number of the first."""
        raise NotImplementedError

    def score_examples(self, examples: Sequence[Any]) -> Evaluation:
        """How good the model is on some examples."""
        raise NotImplementedError

    def validate(self, examples: Sequence[Any]) -> ValidationReport:
        """The same, for the training loop."""
        return tasks_base.build_validation_report(self.score_examples(examples), self.compute_loss(examples))

    def check_encoded(self, encoded: Iterable[Any], first_index: int | None = 0) -> list[Any]:
        """What was made of lines, numbered from ``first_index``, or of data; what cannot be read is an error."""
        made = list(encoded)
        for number, one in enumerate(made, 1):
            if isinstance(one, InvalidExample):  # one of data names its place itself
                raise InputError(
                    str(one if first_index is None else replace(one, location=f"line {first_index + number}"))
                )
        return made

    def check_has_attention(self) -> None:
        """There is always attention to show."""

    def encode(self, examples: Sequence[Any]) -> Iterator[Any]:
        """What the model reads of each example, or a flaw where it cannot."""
        raise NotImplementedError

    def compute_loss(self, examples: Sequence[Any]) -> float:
        """What training lowers, a label each; NaN where nothing is labelled."""
        raise NotImplementedError

    def draw_attention(self, prediction: Prediction, path: Path, title: str = "") -> Path:
        """A picture of where the model looked in a line."""
        raise NotImplementedError

    def build_viewer_data(
        self, text: str, target: str | None = None, *, ablations: Ablations | None = None
    ) -> list[ViewerData]:
        """All attention of the model while it reads a line, and what it says of it, for the viewer.

        ``ablations`` some of it, the same again: does it still say so?
        """
        from jumok.look.viewer.comparison import compare_with_ablation

        if target is not None:
            raise InputError("this model reads, and says no text of its own: --target is for translations")
        return compare_with_ablation(self.model, ablations, self.make_viewer_factory(text))

    def make_viewer_factory(self, text: str) -> Callable[[], ViewerData]:
        """What looks at a line, each time that it is asked to; what cannot be read is an error at once."""
        raise NotImplementedError

    def export(self, format_name: str, folder: Path) -> None:
        """Write the model in another format."""
        raise InputError(f"--format {format_name}: a {self.task.recipe.model.type} model has no other format")


def compute_mean_loss(model: Any, dataset: Any, device: torch.device) -> float:
    """A label each; NaN where there is none."""
    return compute_mean_losses(model, dataset, device)["loss"]


def compute_mean_losses(model: Any, dataset: Any, device: torch.device) -> dict[str, float]:
    """The loss and its parts, a label each."""
    sums, count = Counter({"loss": 0.0}), 0
    for index in dataset.batches(0):
        found = model.loss(dataset.collate(index).to(device))
        sums.update({"loss": float(found.total)} | {name: float(part) for name, part in found.parts.items()})
        count += found.count
    return {name: total / count if count else math.nan for name, total in sums.items()}


class BertPredictor(SupervisedPredictor):
    """A fine-tuned BERT at work."""

    def __init__(self, task: Any, model: Any, tokenizer: WordPieceTokenizer) -> None:
        super().__init__(task, model, tokenizer)
        self.max_tokens: int = task.resolve_max_tokens(model.bert.config)

    def encode(self, examples: Sequence[Any]) -> Iterator[list[EncodedText] | InvalidExample]:
        found: Iterator[list[EncodedText] | InvalidExample] = self.task.encode_rows(
            examples, self.tokenizer, self.max_tokens
        )
        return found

    @torch.inference_mode()
    def compute_loss(self, examples: Sequence[Any]) -> float:
        rows = [row for some in self.check_encoded(self.encode(examples), None) for row in some]
        data = TextBatcher(self.task.batch_type, rows, max_tokens=MAX_BATCH_TOKENS, seed=0)
        return compute_mean_loss(self.model, data, self.device)

    @torch.inference_mode()
    def compute_outputs(
        self, rows: Sequence[EncodedText], compute: Callable[[TextBatch], Sequence[Tensor]]
    ) -> list[tuple[Tensor, ...]]:
        """What the model says of each row, on the host; ``compute`` gives tensors with a row for each text."""
        plain = [EncodedText(row.ids, row.segments) for row in rows]
        data = TextBatcher(TextBatch, plain, max_tokens=MAX_BATCH_TOKENS, seed=0)
        found: dict[int, tuple[Tensor, ...]] = {}
        for index in data.batches(0):
            batch = data.collate(index)
            said = [x.float().cpu() for x in compute(batch.to(self.device))]
            found |= {number: tuple(x[at] for x in said) for at, number in enumerate(batch.example_indices)}
        return [found[number] for number in range(len(rows))]

    # --------------------------------------------------------------------------------------------- looking

    def encode_windows(self, text: str) -> list[EncodedText]:
        """What the model reads of a line: one row, or of a long one several."""
        raise NotImplementedError

    def _first_window(self, text: str) -> tuple[EncodedText, str]:
        """What is shown of a line, and a few words about it if that is not all."""
        row, *others = self.encode_windows(text)
        if not others:
            return row, ""
        told = f"window 1 of {1 + len(others)}"
        words = " ".join(self.tokenizer.ids_to_tokens(row.ids[-4:-1]))
        warnings.warn(
            f"a text of {1 + len(others)} windows: shown is the first, to … {words}; give a part of the text "
            "to see that",
            stacklevel=2,
        )
        return row, told

    def make_viewer_factory(self, text: str) -> Callable[[], ViewerData]:
        from jumok.look.viewer.viewer_data import ViewerData

        row, part = self._first_window(text)

        def look() -> ViewerData:
            [prediction] = self.predict([text], NBestOptions())
            said = " ".join(prediction.format_lines(n_best=False, as_json=False)).replace("\t", " ")
            title = f"{text}  →  {said}"
            return ViewerData.from_captures(
                self._capture_attention(row), title=f"{part}: {title}" if part else title, label=said
            )

        return look

    def draw_attention(self, prediction: Prediction, path: Path, title: str = "") -> Path:
        """The last layer's attention as a picture, the mean of its heads: rows look at columns."""
        from jumok.look.figures.plots import draw_heat_map

        row, part = self._first_window(prediction.input)
        weights = self._capture_attention(row)[-1].weights(batch=0).float().mean(0)
        tokens = self.tokenizer.ids_to_tokens(row.ids)
        return draw_heat_map(weights, tokens, tokens, path, title=", ".join(filter(None, (title, part))))

    @torch.inference_mode()
    def _capture_attention(self, row: EncodedText) -> Any:
        from jumok.look.capture.watch import watch

        batch = TextBatch.from_sequences([row.ids], [row.segments]).to(self.device)
        with watch(self.model, self.tokenizer) as seen:
            self.model.logits(batch)
        return seen

    def export(self, format_name: str, folder: Path) -> None:
        """Write the model in another format: ``hf``, a Hugging Face folder."""
        if format_name != "hf":
            raise InputError(f"--format {format_name}: hf is what a BERT can be exported to")
        from jumok.export.bert import export_bert

        export_bert(self.model, self.tokenizer, folder, labels=self.labels)
