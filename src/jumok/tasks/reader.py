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

from jumok.annotated import Texts
from jumok.data.examples import Examples, Row
from jumok.data.formats import Flaw
from jumok.data.wordpiece import WordPieces
from jumok.errors import InputError
from jumok.run import Run
from jumok.tasks import verdicts
from jumok.tasks.supervised import Search
from jumok.tasks.verdicts import Judgement
from jumok.training import Report

if TYPE_CHECKING:
    from jumok.look.scene import Scene
    from jumok.look.without import Out

__all__ = ["BertReader", "Prediction", "Reader", "texts_of"]

TOKENS = 8192  # in a batch


@dataclass(frozen=True)
class Prediction:
    """One line and what is said of it."""

    number: int  # of the line, from 0
    text: str  # the line

    @property
    def finished(self) -> bool:
        """It always is: nothing is cut off here."""
        return True

    @property
    def has_words(self) -> bool:
        """Whether there is something to draw a map of."""
        return bool(self.text.strip())

    def lines(self, *, n_best: bool, alignments: bool, as_json: bool) -> Iterator[str]:
        """As ``jumok run`` writes it."""
        if alignments:
            raise InputError("--alignments are the word links of a translation; here there is none")
        return self.written(n_best=n_best, as_json=as_json)

    def written(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        """The same, for each use."""
        raise NotImplementedError


def texts_of(line: str) -> list[str]:
    """The texts of a line that has two, with a tab or ||| between them.

    >>> texts_of("He is old. ||| He is young.")
    ['He is old.', 'He is young.']
    """
    return [text.strip() for text in line.split("\t" if "\t" in line else "|||")]


class Reader:
    """A model with its tokenizer. A use adds ``predict`` and ``judge``; a kind of model, the rest."""

    def __init__(self, use: Any, model: Any, tokenizer: Any) -> None:
        self.use, self.model, self.tokenizer = use, model, tokenizer
        self.run: Run = use.run

    @property
    def device(self) -> torch.device:
        weight: Tensor = next(iter(self.model.parameters()))
        return weight.device

    @property
    def labels(self) -> Sequence[str]:
        """The names of the classes, if there are any."""
        return ()

    def split(self, name: str) -> Any:
        """The validation or test data."""
        return self.use.readable(name, self.encode)

    def predict(
        self, lines: Iterable[str], search: Any, *, align: bool = False, first: int = 0
    ) -> Iterator[Prediction]:
        """What is said of every line, in their order; ``first`` is the number of the first."""
        raise NotImplementedError

    def judge(self, examples: Sequence[Any]) -> Judgement:
        """How good the model is on some examples."""
        raise NotImplementedError

    def report(self, examples: Sequence[Any]) -> Report:
        """The same, for the training loop."""
        return verdicts.report(self.judge(examples), self.loss(examples))

    def encoded(self, found: Iterable[Any], first: int | None = 0) -> list[Any]:
        """What was made of lines, numbered from ``first``, or of data; what cannot be read is an error."""
        made = list(found)
        for number, one in enumerate(made, 1):
            if isinstance(one, Flaw):  # one of data names its place itself
                raise InputError(str(one if first is None else replace(one, where=f"line {first + number}")))
        return made

    def check_maps(self) -> None:
        """There is always attention to show."""

    def encode(self, examples: Sequence[Any]) -> Iterator[Any]:
        """What the model reads of each example, or a flaw where it cannot."""
        raise NotImplementedError

    def loss(self, examples: Sequence[Any]) -> float:
        """What training lowers, a label each; NaN where nothing is labelled."""
        raise NotImplementedError

    def draw(self, prediction: Prediction, path: Path, title: str = "") -> Path:
        """A picture of where the model looked in a line."""
        raise NotImplementedError

    def look(self, text: str, target: str | None = None, *, without: Out | None = None) -> list[Scene]:
        """All attention of the model while it reads a line, and what it says of it, for the viewer.

        ``without`` some of it, the same again: does it still say so?
        """
        from jumok.look.without import before_and_after

        if target is not None:
            raise InputError("this model reads, and says no text of its own: --target is for translations")
        return before_and_after(self.model, without, self.looking(text))

    def looking(self, text: str) -> Callable[[], Scene]:
        """What looks at a line, each time that it is asked to; what cannot be read is an error at once."""
        raise NotImplementedError

    def export(self, to: str, folder: Path) -> None:
        """Write the model in another format."""
        raise InputError(f"--to {to}: a {self.use.recipe.model.kind} model has no other format")


def mean_loss(model: Any, data: Any, device: torch.device) -> float:
    """A label each; NaN where there is none."""
    return mean_losses(model, data, device)["loss"]


def mean_losses(model: Any, data: Any, device: torch.device) -> dict[str, float]:
    """The loss and its parts, a label each."""
    sums, count = Counter({"loss": 0.0}), 0
    for index in data.batches(0):
        found = model.loss(data.collate(index).to(device))
        sums.update({"loss": float(found.total)} | {name: float(part) for name, part in found.parts.items()})
        count += found.count
    return {name: total / count if count else math.nan for name, total in sums.items()}


class BertReader(Reader):
    """A fine-tuned BERT at work."""

    def __init__(self, use: Any, model: Any, tokenizer: WordPieces) -> None:
        super().__init__(use, model, tokenizer)
        self.longest: int = use.longest(model.bert.config)

    def encode(self, examples: Sequence[Any]) -> Iterator[list[Row] | Flaw]:
        found: Iterator[list[Row] | Flaw] = self.use.rows(examples, self.tokenizer, self.longest)
        return found

    @torch.inference_mode()
    def loss(self, examples: Sequence[Any]) -> float:
        rows = [row for some in self.encoded(self.encode(examples), None) for row in some]
        data = Examples(self.use.batch, rows, tokens=TOKENS, seed=0)
        return mean_loss(self.model, data, self.device)

    @torch.inference_mode()
    def outputs(
        self, rows: Sequence[Row], say: Callable[[Texts], Sequence[Tensor]]
    ) -> list[tuple[Tensor, ...]]:
        """What the model says of each row, on the host; ``say`` gives tensors with a row for each text."""
        plain = [Row(row.ids, row.segments) for row in rows]
        data = Examples(Texts, plain, tokens=TOKENS, seed=0)
        found: dict[int, tuple[Tensor, ...]] = {}
        for index in data.batches(0):
            batch = data.collate(index)
            said = [x.float().cpu() for x in say(batch.to(self.device))]
            found |= {number: tuple(x[at] for x in said) for at, number in enumerate(batch.index)}
        return [found[number] for number in range(len(rows))]

    # --------------------------------------------------------------------------------------------- looking

    def windows(self, text: str) -> list[Row]:
        """What the model reads of a line: one row, or of a long one several."""
        raise NotImplementedError

    def _first_window(self, text: str) -> tuple[Row, str]:
        """What is shown of a line, and a few words about it if that is not all."""
        row, *others = self.windows(text)
        if not others:
            return row, ""
        told = f"window 1 of {1 + len(others)}"
        words = " ".join(self.tokenizer.tokens(row.ids[-4:-1]))
        warnings.warn(
            f"a text of {1 + len(others)} windows: shown is the first, to … {words}; give a part of the text "
            "to see that",
            stacklevel=2,
        )
        return row, told

    def looking(self, text: str) -> Callable[[], Scene]:
        from jumok.look.scene import Scene

        row, part = self._first_window(text)

        def look() -> Scene:
            [prediction] = self.predict([text], Search())
            said = " ".join(prediction.written(n_best=False, as_json=False)).replace("\t", " ")
            title = f"{text}  →  {said}"
            return Scene.of(self._seen(row), title=f"{part}: {title}" if part else title, label=said)

        return look

    def draw(self, prediction: Prediction, path: Path, title: str = "") -> Path:
        """The last layer's attention as a picture, the mean of its heads: rows look at columns."""
        from jumok.look.figures import heat_map

        row, part = self._first_window(prediction.text)
        weights = self._seen(row)[-1].weights(batch=0).float().mean(0)
        tokens = self.tokenizer.tokens(row.ids)
        return heat_map(weights, tokens, tokens, path, title=", ".join(filter(None, (title, part))))

    @torch.inference_mode()
    def _seen(self, row: Row) -> Any:
        from jumok.look.watch import watch

        batch = Texts.of([row.ids], [row.segments]).to(self.device)
        with watch(self.model, self.tokenizer) as seen:
            self.model.logits(batch)
        return seen

    def export(self, to: str, folder: Path) -> None:
        """Write the model in another format: ``hf``, a Hugging Face folder."""
        if to != "hf":
            raise InputError(f"--to {to}: hf is what a BERT can be exported to")
        from jumok.exchange.bert import export_bert

        export_bert(self.model, self.tokenizer, folder, labels=self.labels)
