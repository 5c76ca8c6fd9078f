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
from jumok.batches.text import DocumentBatch, TextBatch
from jumok.batches.tokens import LayerAttention, Tokens
from jumok.data.tokenizers.tokenizer import TokenizerPair
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.export import onnx
from jumok.export.onnx import encoder_graphs, graphs, translator_graphs
from jumok.export.onnx.graphs import NamedTensors
from jumok.inference import engines
from jumok.models.bert import BertPretrainingModel, BertSpanExtractor
from jumok.models.convolutional import ConvolutionalConfig
from jumok.run import Run
from jumok.tasks.answer.task import AnswerPredictor, AnswerTask
from jumok.tasks.classify.task import (
    BertClassificationPredictor,
    BertClassificationRecipe,
    BertClassificationTask,
)
from jumok.tasks.classify.word_attention import WordAttentionPredictor, WordAttentionTask
from jumok.tasks.pretrain.predictor import FillMaskPredictor
from jumok.tasks.tag.task import TaggingPredictor, TaggingTask
from jumok.tasks.translate.data import TranslationData as Corpora
from jumok.tasks.translate.predictor import TranslationPredictor

if TYPE_CHECKING:
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["load"]

CPU = torch.device("cpu")


def load(run: Run, device: str = "auto") -> Any:
    """The predictor of a run; its graphs are made when there are none of these weights yet."""
    onnx.check_supported(run)

    def make(folder: Path) -> None:
        onnx.write_graphs(tasks.get_task_module(run.recipe.task).load(run, "cpu").model, folder)

    digest = engines.compute_run_digest(run)
    folder = engines.get_engine_files(run, "onnx", make)
    opened = {path.stem: graphs.create_session(path, device) for path in sorted(folder.glob("*.onnx"))}
    if run.recipe.task == "translate":
        return OnnxTranslationPredictor(run, OnnxDecoderModel(opened["encoder"], opened["step"]), digest)
    with torch.device("meta"):  # the model's sizes, and no weights
        predictor = _build_predictor(run, opened["model"])
    predictor.asked, predictor.digest = device, digest
    return predictor


def _build_predictor(run: Run, session: Any) -> Any:
    if run.recipe.task == "pretrain":
        from jumok.tasks.pretrain import task as pretrain_task

        pieces = WordPieceTokenizer.load(run.folder)
        model = OnnxEncoderModel(pretrain_task.build_model(run, pieces), session)
        return OnnxFillMaskPredictor(run, model, pieces)  # type: ignore[arg-type]
    kinds: dict[str, tuple[Any, Any]] = {
        "classify": (BertClassificationTask, OnnxBertClassificationPredictor),
        "tag": (TaggingTask, OnnxTaggingPredictor),
        "answer": (AnswerTask, OnnxAnswerPredictor),
    }
    use, reader = kinds[run.recipe.task]
    if run.recipe.task == "classify" and not isinstance(run.recipe, BertClassificationRecipe):
        use, reader = WordAttentionTask, OnnxWordAttentionPredictor
    found = use(run)
    model, tokenizer = found.made()
    return reader(found, OnnxEncoderModel(model, session), tokenizer)


# ----------------------------------------------------------------------------------------- models that read


class OnnxEncoderModel:
    """What a predictor asks of a model that reads, answered by a session."""

    def __init__(self, meta_model: Any, session: Any) -> None:
        self.meta_model, self.session = meta_model, session  # the model without its weights, and its graph

    @property
    def bert(self) -> nn.Module:
        """For its sizes."""
        found: nn.Module = self.meta_model.bert
        return found

    def parameters(self) -> Iterator[Tensor]:
        """Something that is where batches should be."""
        yield torch.empty(0, device=CPU)

    def logits(self, batch: TextBatch) -> Any:
        """As those of the model."""
        said = self._run_session(batch)
        if isinstance(self.meta_model, BertSpanExtractor):
            return said["start_logits"], said["end_logits"]
        if isinstance(self.meta_model, BertPretrainingModel):
            return said.get("mlm_logits"), said.get("nsp_logits")
        return said["logits"]

    def maps(self, batch: TextBatch) -> list[LayerAttention]:
        """As those of a classifier of words."""
        said = self._run_session(batch)
        if isinstance(batch, DocumentBatch):
            names = {"words": "attention", "sentences": "document_attention"}
            return [LayerAttention(name, said[there][:, None, None]) for name, there in names.items()]
        return [
            LayerAttention("attention", said[name][:, :, None])
            for name in ("attention", "second_attention")
            if name in said
        ]

    def _run_session(self, batch: TextBatch) -> NamedTensors:
        with torch.inference_mode(False):
            return graphs.run_session(self.session, encoder_graphs.build_inputs(self.meta_model, batch))


class _TorchFallback:
    """What the model itself is needed for."""

    run: Run
    torch_device = "auto"  # where the model should be then
    run_digest = ""  # of the weights that the graph was made of

    @functools.cached_property
    def torch_predictor(self) -> Any:
        """The same predictor by PyTorch."""
        return engines.load_torch_predictor(self.run, self.run_digest, self.torch_device)

    def build_viewer_data(
        self, text: str, target: str | None = None, *, ablations: Ablations | None = None
    ) -> list[ViewerData]:
        """All attention of the model while it reads a line, for the viewer."""
        found: list[ViewerData] = self.torch_predictor.look(text, target, without=ablations)
        return found

    def compute_loss(self, examples: Sequence[Any]) -> float:
        """What training lowers, a label each."""
        found: float = self.torch_predictor.loss(examples)
        return found


class _TorchDrawing(_TorchFallback):
    """And to draw, where it is not among what the graph tells."""

    def draw_attention(self, prediction: Any, path: Path, title: str = "") -> Path:
        """A picture of where the model looked in a line."""
        found: Path = self.torch_predictor.draw(prediction, path, title)
        return found


class OnnxBertClassificationPredictor(_TorchDrawing, BertClassificationPredictor):
    """Labels of texts."""


class OnnxWordAttentionPredictor(_TorchFallback, WordAttentionPredictor):
    """Labels of texts, and the words that decided."""


class OnnxTaggingPredictor(_TorchDrawing, TaggingPredictor):
    """Entities."""


class OnnxAnswerPredictor(_TorchDrawing, AnswerPredictor):
    """Answers."""


class OnnxFillMaskPredictor(_TorchDrawing, FillMaskPredictor):
    """Hidden words."""


# ---------------------------------------------------------------------------------------- models that write


@dataclass(frozen=True, eq=False)
class OnnxDecoderState:
    """What the graphs keep between steps, by name."""

    tensors: NamedTensors

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> OnnxDecoderState:
        """The rows ``index``, in that order; a row may come twice or never."""
        return OnnxDecoderState({name: x[index] if x.dim() else x for name, x in self.tensors.items()})


@dataclass(frozen=True, eq=False)
class OnnxDecoderModel:
    """What a search asks of a model that writes, answered by two sessions."""

    encoder_session: Any
    step_session: Any

    def start(self, source: Tokens) -> OnnxDecoderState:
        """The state before the first word."""
        lengths = torch.tensor(source.lengths)
        return OnnxDecoderState(
            graphs.run_session(self.encoder_session, {"source_ids": source.ids, "source_lengths": lengths})
        )

    def step(self, state: OnnxDecoderState, ids: Tensor) -> tuple[Tensor, OnnxDecoderState]:
        """The logits of the next words, and the state behind these."""
        said = graphs.run_session(self.step_session, {"input_ids": ids, **state.tensors})
        return said["logits"], OnnxDecoderState({**state.tensors, **translator_graphs.get_next_state(said)})


class OnnxTranslationPredictor(TranslationPredictor):
    """Translations."""

    def __init__(self, run: Run, decoder: OnnxDecoderModel, run_digest: str) -> None:
        self.run, self.tokenizers, self.run_digest = run, TokenizerPair.load(run.folder), run_digest
        self.data, self.decode_config = Corpora(run.recipe.data, run.folder), run.recipe.decode
        self._decoder = decoder

    @functools.cached_property
    def model(self) -> Any:
        """The same in PyTorch, for maps and links."""
        return engines.load_torch_predictor(self.run, self.run_digest, "cpu").model

    @property
    def max_source_tokens(self) -> int | None:
        """How many tokens a text may have, EOS included; None: any number."""
        config = self.run.recipe.model
        learned = isinstance(config, ConvolutionalConfig) and config.position_encoding == "learned"
        return config.longest if learned else None

    @property
    def device(self) -> torch.device:
        """Where batches should be."""
        return CPU
