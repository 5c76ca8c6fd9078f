"""Predictors whose models are run by ONNX Runtime: BERT's, the classifiers', those of recurrent translators.

Each is the task's own predictor, which is given something that says what the model says. What needs the model
itself (the viewer, what it would say without a head) comes from PyTorch, where it is loaded when that is
first asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jumok import tasks
from jumok.annotated import LabelledDocuments, Texts
from jumok.batch import Map, Tokens
from jumok.data.text import Tokenizers
from jumok.data.wordpiece import WordPieces
from jumok.exchange import onnx
from jumok.exchange.onnx import graphs, reading, writing
from jumok.exchange.onnx.graphs import Named
from jumok.models.bert import Pretraining, Spans
from jumok.models.convolutional import ConvolutionalConfig
from jumok.run import Run
from jumok.tasks import engines
from jumok.tasks.answer import AnswerReader, AnswerUse
from jumok.tasks.attentive import Attentive, AttentiveReader
from jumok.tasks.classify import BertClassReader, BertRecipe, Classify
from jumok.tasks.corpora import Texts as Corpora
from jumok.tasks.filler import Filler
from jumok.tasks.tag import Tag, TagReader
from jumok.tasks.translator import Translator

if TYPE_CHECKING:
    from jumok.look.scene import Scene
    from jumok.look.without import Out

__all__ = ["load"]

CPU = torch.device("cpu")


def load(run: Run, device: str = "auto") -> Any:
    """The predictor of a run; its graphs are made when there are none of these weights yet."""
    onnx.check(run)

    def make(folder: Path) -> None:
        onnx.write(tasks.of(run.recipe.task).load(run, "cpu").model, folder)

    digest = engines.run_digest(run)
    folder = engines.kept(run, "onnx", make)
    opened = {path.stem: graphs.session(path, device) for path in sorted(folder.glob("*.onnx"))}
    if run.recipe.task == "translate":
        return ByOnnxTranslator(run, Steps(opened["encoder"], opened["step"]), digest)
    with torch.device("meta"):  # the model's sizes, and no weights
        predictor = _reader(run, opened["model"])
    predictor.asked, predictor.digest = device, digest
    return predictor


def _reader(run: Run, session: Any) -> Any:
    if run.recipe.task == "pretrain":
        from jumok.tasks import pretrain

        pieces = WordPieces.load(run.folder)
        return ByOnnxFiller(run, Says(pretrain.make_model(run, pieces), session), pieces)  # type: ignore[arg-type]
    kinds: dict[str, tuple[Any, Any]] = {
        "classify": (Classify, ByOnnxBertClassReader),
        "tag": (Tag, ByOnnxTagReader),
        "answer": (AnswerUse, ByOnnxAnswerReader),
    }
    use, reader = kinds[run.recipe.task]
    if run.recipe.task == "classify" and not isinstance(run.recipe, BertRecipe):
        use, reader = Attentive, ByOnnxAttentiveReader
    found = use(run)
    model, tokenizer = found.made()
    return reader(found, Says(model, session), tokenizer)


# ----------------------------------------------------------------------------------------- models that read


class Says:
    """What a predictor asks of a model that reads, answered by a session."""

    def __init__(self, shape: Any, session: Any) -> None:
        self.shape, self.session = shape, session  # the model without its weights, and its graph

    @property
    def bert(self) -> nn.Module:
        """For its sizes."""
        found: nn.Module = self.shape.bert
        return found

    def parameters(self) -> Iterator[Tensor]:
        """Something that is where batches should be."""
        yield torch.empty(0, device=CPU)

    def logits(self, batch: Texts) -> Any:
        """As those of the model."""
        said = self._said(batch)
        if isinstance(self.shape, Spans):
            return said["starts"], said["ends"]
        if isinstance(self.shape, Pretraining):
            return said.get("words"), said.get("next")
        return said["logits"]

    def maps(self, batch: Texts) -> list[Map]:
        """As those of a classifier of words."""
        said = self._said(batch)
        if isinstance(batch, LabelledDocuments):
            names = {"words": "attention", "sentences": "document_attention"}
            return [Map(name, said[there][:, None, None]) for name, there in names.items()]
        return [
            Map("attention", said[name][:, :, None])
            for name in ("attention", "second_attention")
            if name in said
        ]

    def _said(self, batch: Texts) -> Named:
        with torch.inference_mode(False):
            return graphs.run(self.session, reading.given(self.shape, batch))


class _Looks:
    """What the model itself is needed for."""

    run: Run
    asked = "auto"  # where the model should be then
    digest = ""  # of the weights that the graph was made of

    @functools.cached_property
    def usual(self) -> Any:
        """The same predictor by PyTorch."""
        return engines.load_torch(self.run, self.digest, self.asked)

    def look(self, text: str, target: str | None = None, *, without: Out | None = None) -> list[Scene]:
        """All attention of the model while it reads a line, for the viewer."""
        found: list[Scene] = self.usual.look(text, target, without=without)
        return found

    def loss(self, examples: Sequence[Any]) -> float:
        """What training lowers, a label each."""
        found: float = self.usual.loss(examples)
        return found


class _Draws(_Looks):
    """And to draw, where it is not among what the graph tells."""

    def draw(self, prediction: Any, path: Path, title: str = "") -> Path:
        """A picture of where the model looked in a line."""
        found: Path = self.usual.draw(prediction, path, title)
        return found


class ByOnnxBertClassReader(_Draws, BertClassReader):
    """Labels of texts."""


class ByOnnxAttentiveReader(_Looks, AttentiveReader):
    """Labels of texts, and the words that decided."""


class ByOnnxTagReader(_Draws, TagReader):
    """Entities."""


class ByOnnxAnswerReader(_Draws, AnswerReader):
    """Answers."""


class ByOnnxFiller(_Draws, Filler):
    """Hidden words."""


# ---------------------------------------------------------------------------------------- models that write


@dataclass(frozen=True, eq=False)
class State:
    """What the graphs keep between steps, by name."""

    parts: Named

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> State:
        """The rows ``index``, in that order; a row may come twice or never."""
        return State({name: x[index] if x.dim() else x for name, x in self.parts.items()})


@dataclass(frozen=True, eq=False)
class Steps:
    """What a search asks of a model that writes, answered by two sessions."""

    encoder: Any
    step_: Any

    def start(self, source: Tokens) -> State:
        """The state before the first word."""
        lengths = torch.tensor(source.lengths)
        return State(graphs.run(self.encoder, {"source": source.ids, "source_lengths": lengths}))

    def step(self, state: State, ids: Tensor) -> tuple[Tensor, State]:
        """The logits of the next words, and the state behind these."""
        said = graphs.run(self.step_, {"words": ids, **state.parts})
        return said["logits"], State({**state.parts, **writing.after(said)})


class ByOnnxTranslator(Translator):
    """Translations."""

    def __init__(self, run: Run, steps: Steps, digest: str) -> None:
        self.run, self.tokenizers, self.digest = run, Tokenizers.load(run.folder), digest
        self.texts, self.decode = Corpora(run.recipe.data, run.folder), run.recipe.decode
        self._searched = steps

    @functools.cached_property
    def model(self) -> Any:
        """The same in PyTorch, for maps and links."""
        return engines.load_torch(self.run, self.digest, "cpu").model

    @property
    def longest(self) -> int | None:
        """How many tokens a text may have, EOS included; None: any number."""
        config = self.run.recipe.model
        learned = isinstance(config, ConvolutionalConfig) and config.positions == "learned"
        return config.longest if learned else None

    @property
    def device(self) -> torch.device:
        """Where batches should be."""
        return CPU
