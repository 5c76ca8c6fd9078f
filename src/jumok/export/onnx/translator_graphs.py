"""The graphs of models that write: one that reads the source, and one that says a word more.

::

    encoder    source  (B, S), source_lengths  (B,)    →  the state before the first word
    step       words  (B,), and the state              →  logits  (B, V), attention  (B, layers, S), and
                                                       what is new of the state, as next_…

The loop is left to whoever uses them: it begins with the state of the encoder and the words <s>, and gives
each step what the one before it made. All of a state has a row for each sentence, but ``outputs``, the number of
the words so far. Which parts there are is the model's own::

    hidden, memory      (B, layers, W)    of the recurrent cells; memory is an LSTM's
    fed                 (B, ·)            what the next step's cell is given of the source
    keys, values        (B, S, ·)         what attention looks at, and
    lengths             (B,)              how much of it there is
    past                (B, layers, kernel − 1, D)    what convolutions saw last

Attention tells where the step looked; a model without it, and one whose look is shaped afterwards (local-p),
says nothing of that.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from jumok.attention import masks
from jumok.attention.prepared_keys import PreparedKeys
from jumok.batches.tokens import Tokens
from jumok.export.onnx.graphs import NamedTensors, OnnxGraph, take_recorded_weights
from jumok.models import convolutional, seq2seq
from jumok.models.convolutional import ConvolutionalSeq2Seq
from jumok.models.seq2seq import Seq2Seq, Seq2SeqMemory

__all__ = ["TranslatorModel", "build_graphs", "get_next_state", "remove_weight_norm"]

TranslatorModel = Seq2Seq | ConvolutionalSeq2Seq
DYNAMIC_AXES: dict[str, tuple[str | None, ...]] = {
    "source": ("batch", "length"),
    "source_lengths": ("batch",),
    "lengths": ("batch",),
    "words": ("batch",),
    "hidden": ("batch", None, None),
    "memory": ("batch", None, None),
    "fed": ("batch", None),
    "keys": ("batch", "length", None),
    "values": ("batch", "length", None),
    "past": ("batch", None, None, None),
    "said": (),
}


def build_graphs(model: TranslatorModel) -> dict[str, OnnxGraph]:
    """The two graphs, by the names of their files; of a :func:`remove_weight_norm` model."""
    ids = torch.tensor([[4, 3, 0], [5, 6, 3]]).clamp(max=model.source_embedding.num_embeddings - 1)
    source = {"source": ids, "source_lengths": torch.tensor([2, 3])}
    with torch.no_grad():
        state = _run_encoder(model, source)
    return {
        "encoder": OnnxGraph(model, lambda inputs: _run_encoder(model, inputs), source, DYNAMIC_AXES),
        "step": OnnxGraph(
            model,
            lambda inputs: _run_step(model, inputs),
            {"words": torch.tensor([2, 2]), **state},
            DYNAMIC_AXES,
        ),
    }


def remove_weight_norm(model: TranslatorModel) -> TranslatorModel:
    """The same model with its weights worked out, of which some are a direction and a length."""
    model = copy.deepcopy(model)
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and parametrize.is_parametrized(part):
            made = nn.Linear(part.in_features, part.out_features)
            made.weight, made.bias = nn.Parameter(part.weight.detach()), part.bias
            model.set_submodule(name, made)
    return model


def _run_encoder(model: TranslatorModel, inputs: NamedTensors) -> NamedTensors:
    source = Tokens(inputs["source"], (1,), device_lengths=inputs["source_lengths"])
    lengths = inputs["source_lengths"].clone()
    said = {"said": torch.zeros((), dtype=torch.long)}
    if isinstance(model, ConvolutionalSeq2Seq):
        found, config = model.encode(source), model.config
        past = found.keys.new_zeros(
            found.keys.shape[0], config.decoder_layers, config.kernel_size - 1, config.width
        )
        kept = {"keys": found.keys, "values": found.values, "lengths": lengths}
        return {**kept, "past": past, **said}
    state = model.start(source)
    kept = _get_recurrent_state(state)
    if state.memory is not None:
        kept |= {"keys": state.memory.keys.keys, "values": state.memory.annotations}
        kept |= {"lengths": lengths}
    return {**kept, **said} if model.config.attention == "local-m" else kept


def _run_step(model: TranslatorModel, inputs: NamedTensors) -> NamedTensors:
    step = _run_convolutional_step if isinstance(model, ConvolutionalSeq2Seq) else _run_recurrent_step
    logits, changed = step(model, inputs)  # type: ignore[arg-type]
    found = {"logits": logits}
    seen = take_recorded_weights()
    if seen and getattr(model.config, "attention", "global") != "local-p":
        found["attention"] = torch.cat(seen, 1)
    return {**found, **{f"next_{name}": x for name, x in changed.items()}}


def _run_convolutional_step(model: ConvolutionalSeq2Seq, inputs: NamedTensors) -> tuple[Tensor, NamedTensors]:
    keys, said = inputs["keys"], inputs["said"]
    lengths = Tokens(keys[..., 0], (1,), device_lengths=inputs["lengths"])  # of which nothing else matters
    source = convolutional.ConvolutionalMemory(keys, inputs["values"], lengths)
    maps = tuple(layer.prepare_maps() for layer in model.decoder)
    before = convolutional.ConvolutionalState(source, maps, inputs["past"].unbind(1), said)  # type: ignore[arg-type]
    logits, after = model.step(before, inputs["words"])
    return logits, {"past": torch.stack(after.past_inputs, 1), "said": said + 1}


def _run_recurrent_step(model: Seq2Seq, inputs: NamedTensors) -> tuple[Tensor, NamedTensors]:
    hidden = tuple(inputs[name].transpose(0, 1) for name in ("hidden", "memory") if name in inputs)
    attention, source = model.decoder.attention, None
    if attention is not None:
        lengths = inputs["lengths"]
        mask = masks.padding(lengths, bounds=(1, inputs["keys"].shape[1]))
        keys = PreparedKeys(inputs["keys"], attention.score.name, attention.score.key_owner)
        source = Seq2SeqMemory(inputs["values"], keys, mask, lengths)
    said: int = inputs.get("said", 0)  # type: ignore[assignment]  # any number will do
    before = seq2seq.Seq2SeqState(hidden, source, inputs.get("fed"), said)
    logits, after = model.step(before, inputs["words"])
    changed = _get_recurrent_state(after)
    if "said" in inputs:
        changed["said"] = inputs["said"] + 1
    return logits, changed


def _get_recurrent_state(state: seq2seq.Seq2SeqState) -> NamedTensors:
    """What the cells keep, a row for each sentence."""
    kept = {name: x.transpose(0, 1) for name, x in zip(("hidden", "memory"), state.hidden, strict=False)}
    return kept if state.input_feed is None else {**kept, "fed": state.input_feed}


def get_next_state(outputs: NamedTensors) -> NamedTensors:
    """What of a state is new, by its name there, in the outputs of a step."""
    return {name.removeprefix("next_"): x for name, x in outputs.items() if name.startswith("next_")}
