"""Prediction with ONNX Runtime: for BERT models, word attention classifiers, and recurrent translation models.

Each predictor is the task's own predictor with a model that runs ONNX graphs. What needs the PyTorch model (the
viewer, ablations, the loss) loads it when it is first needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jumok.batches.text import DocumentBatch, TextBatch
from jumok.batches.tokens import LayerAttention, Tokens
from jumok.data.tokenizers.tokenizer import TokenizerPair
from jumok.export import onnx
from jumok.export.onnx import encoder_graphs, graphs, translator_graphs
from jumok.export.onnx.graphs import NamedTensors
from jumok.inference import engines
from jumok.models.bert import BertPretrainingModel, BertSpanExtractor
from jumok.models.convolutional import ConvolutionalConfig
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.base import Predictor
from jumok.tasks.translate.data import TranslationData
from jumok.tasks.translate.predictor import TranslationPredictor

CPU = torch.device("cpu")


def load(run: Run, device: str = "auto") -> Predictor[Any, Any]:
    """Load the predictor of a run. Its graphs are built if there are none for these weights."""
    onnx.check_supported(run)

    def build_files(folder: Path) -> None:
        onnx.write_graphs(load_predictor(run, "cpu").model, folder)

    folder = engines.get_engine_files(run, "onnx", build_files)
    sessions = {path.stem: graphs.create_session(path, device) for path in sorted(folder.glob("*.onnx"))}
    if run.recipe.task == "translate":
        decoder = OnnxDecoderModel(sessions["encoder"], sessions["step"])
        return OnnxTranslationPredictor(run, decoder, folder.name)
    task = build_task(run)
    with torch.device("meta"):  # the sizes of the model, without weights
        model, tokenizer = task.build_model()
        predictor: Predictor[Any, Any] = task.build_predictor(OnnxEncoderModel(model, sessions["model"]), tokenizer)
    _delegate_to_torch(predictor, folder.name, device)
    return predictor


# ------------------------------------------------------------------------------------------------------ encoders


class OnnxEncoderModel:
    """The methods of an encoder that predictors use, run by an ONNX session."""

    def __init__(self, meta_model: Any, session: Any) -> None:
        self.meta_model, self.session = meta_model, session  # the model without weights, and its graph

    @property
    def bert(self) -> nn.Module:
        """The BERT without weights, for its sizes."""
        bert: nn.Module = self.meta_model.bert
        return bert

    def parameters(self) -> Iterator[Tensor]:
        """A tensor on the device of the batches."""
        yield torch.empty(0, device=CPU)

    def logits(self, batch: TextBatch) -> Any:
        """The logits of the model."""
        outputs = self._run_session(batch)
        if isinstance(self.meta_model, BertSpanExtractor):
            return outputs["start_logits"], outputs["end_logits"]
        if isinstance(self.meta_model, BertPretrainingModel):
            return outputs.get("mlm_logits"), outputs.get("nsp_logits")
        return outputs["logits"]

    def compute_attention_maps(self, batch: TextBatch) -> list[LayerAttention]:
        """The attention maps of a word attention classifier."""
        outputs = self._run_session(batch)
        if isinstance(batch, DocumentBatch):
            names = {"word_level": "attention", "sentence_level": "document_attention"}
            return [LayerAttention(name, outputs[key][:, None, None]) for name, key in names.items()]
        return [
            LayerAttention("attention", outputs[key][:, :, None])
            for key in ("attention", "second_attention")
            if key in outputs
        ]

    def _run_session(self, batch: TextBatch) -> NamedTensors:
        with torch.inference_mode(False):
            return graphs.run_session(self.session, encoder_graphs.build_inputs(self.meta_model, batch))


def _delegate_to_torch(predictor: Predictor[Any, Any], digest: str, device: str) -> None:
    """Let the methods of a predictor that need the PyTorch model call the PyTorch predictor of the same run."""
    names = ["build_viewer_data", "compute_loss"]
    if not hasattr(predictor, "highlight_texts"):  # the graph of a word attention classifier has its weights
        names.append("draw_attention")

    @functools.cache
    def load_torch_predictor() -> Predictor[Any, Any]:
        return engines.load_torch_predictor(predictor.run, digest, device)

    def make_method(name: str) -> Callable[..., Any]:
        return lambda *args, **options: getattr(load_torch_predictor(), name)(*args, **options)

    for name in names:
        setattr(predictor, name, make_method(name))


# ------------------------------------------------------------------------------------------------- translation


@dataclass(frozen=True, eq=False)
class OnnxDecoderState:
    """The tensors that the graphs pass from step to step, by name."""

    tensors: NamedTensors

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> OnnxDecoderState:
        """Select rows; a row may be selected several times."""
        return OnnxDecoderState({name: x[index] if x.dim() else x for name, x in self.tensors.items()})


@dataclass(frozen=True, eq=False)
class OnnxDecoderModel:
    """The methods of a translation model that a search uses, run by two ONNX sessions."""

    encoder_session: Any
    step_session: Any

    def start(self, source: Tokens) -> OnnxDecoderState:
        """The state before the first token."""
        lengths = torch.tensor(source.lengths)
        return OnnxDecoderState(
            graphs.run_session(self.encoder_session, {"source_ids": source.ids, "source_lengths": lengths})
        )

    def step(self, state: OnnxDecoderState, ids: Tensor) -> tuple[Tensor, OnnxDecoderState]:
        """The logits of the next tokens, and the next state."""
        outputs = graphs.run_session(self.step_session, {"input_ids": ids, **state.tensors})
        next_state = OnnxDecoderState({**state.tensors, **translator_graphs.get_next_state(outputs)})
        return outputs["logits"], next_state


class OnnxTranslationPredictor(TranslationPredictor):
    """A translation model that ONNX Runtime runs."""

    def __init__(self, run: Run, decoder: OnnxDecoderModel, run_digest: str) -> None:
        super().__init__(
            run,
            TokenizerPair.load(run.folder),
            TranslationData(run.recipe.data, run.folder),
            lambda: engines.load_torch_predictor(run, run_digest, "cpu").model,
            decoder,
        )

    @property
    def max_source_tokens(self) -> int | None:
        config = self.run.recipe.model
        is_learned = isinstance(config, ConvolutionalConfig) and config.position_encoding == "learned"
        return config.max_positions if is_learned else None

    @property
    def device(self) -> torch.device:
        return CPU
