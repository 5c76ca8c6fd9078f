"""ONNX graphs of translators: one that encodes the source, and one that decodes a single step.

::

    encoder    source_ids  (B, S), source_lengths  (B,)  →  the state before the first token
    step       input_ids  (B,), and the state            →  logits  (B, V), attention  (B, layers, S), and
                                                            the changed parts of the state, as next_…

The user of the graphs writes the loop: it starts with the state of the encoder and the token <s>, and passes
the changed state to the next step. All parts of a state have a row per sentence, except for ``step``, the
number of
tokens so far. The parts depend on the model::

    hidden, cell        (B, layers, W)                 recurrent state; cell is that of an LSTM
    context             (B, ·)                         source context for the cell of the next step
    keys, values        (B, S, ·)                      attention memory
    lengths             (B,)                           its lengths
    conv_state          (B, layers, kernel − 1, D)     last inputs of the convolutions

There is no output ``attention`` for a model without attention, and for local-p attention, which reweights
after the softmax.
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

TranslatorModel = Seq2Seq | ConvolutionalSeq2Seq
DYNAMIC_AXES: dict[str, tuple[str | None, ...]] = {
    "source_ids": ("batch", "length"),
    "source_lengths": ("batch",),
    "lengths": ("batch",),
    "input_ids": ("batch",),
    "hidden": ("batch", None, None),
    "cell": ("batch", None, None),
    "context": ("batch", None),
    "keys": ("batch", "length", None),
    "values": ("batch", "length", None),
    "conv_state": ("batch", None, None, None),
    "step": (),
}


def build_graphs(model: TranslatorModel) -> dict[str, OnnxGraph]:
    """Build the two graphs by file name, for a model without weight norm (:func:`remove_weight_norm`)."""
    ids = torch.tensor([[4, 3, 0], [5, 6, 3]]).clamp(max=model.source_embedding.num_embeddings - 1)
    source = {"source_ids": ids, "source_lengths": torch.tensor([2, 3])}
    with torch.no_grad():
        state = _run_encoder(model, source)
    return {
        "encoder": OnnxGraph(model, lambda inputs: _run_encoder(model, inputs), source, DYNAMIC_AXES),
        "step": OnnxGraph(
            model, lambda inputs: _run_step(model, inputs), {"input_ids": torch.tensor([2, 2]), **state}, DYNAMIC_AXES
        ),
    }


def remove_weight_norm(model: TranslatorModel) -> TranslatorModel:
    """Return a copy of the model in which the weights of weight norm are plain parameters."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module):
            linear = nn.Linear(module.in_features, module.out_features)
            linear.weight, linear.bias = nn.Parameter(module.weight.detach()), module.bias
            model.set_submodule(name, linear)
    return model


def _run_encoder(model: TranslatorModel, inputs: NamedTensors) -> NamedTensors:
    source = Tokens(inputs["source_ids"], (1,), device_lengths=inputs["source_lengths"])
    lengths = inputs["source_lengths"].clone()
    step = torch.zeros((), dtype=torch.long)
    if isinstance(model, ConvolutionalSeq2Seq):
        memory, config = model.encode(source), model.config
        conv_state = memory.keys.new_zeros(
            memory.keys.shape[0], config.decoder_layers, config.kernel_size - 1, config.width
        )
        return {
            "keys": memory.keys,
            "values": memory.values,
            "lengths": lengths,
            "conv_state": conv_state,
            "step": step,
        }
    state = model.start(source)
    outputs = _get_recurrent_state(state)
    if state.memory is not None:
        outputs |= {"keys": state.memory.keys.keys, "values": state.memory.annotations, "lengths": lengths}
    return {**outputs, "step": step} if model.config.attention == "local-m" else outputs


def _run_step(model: TranslatorModel, inputs: NamedTensors) -> NamedTensors:
    run_step = _run_convolutional_step if isinstance(model, ConvolutionalSeq2Seq) else _run_recurrent_step
    logits, changed_state = run_step(model, inputs)  # type: ignore[arg-type]
    outputs = {"logits": logits}
    weights = take_recorded_weights()
    if weights and getattr(model.config, "attention", "global") != "local-p":
        outputs["attention"] = torch.cat(weights, 1)
    return {**outputs, **{f"next_{name}": x for name, x in changed_state.items()}}


def _run_convolutional_step(model: ConvolutionalSeq2Seq, inputs: NamedTensors) -> tuple[Tensor, NamedTensors]:
    keys, step = inputs["keys"], inputs["step"]
    tokens = Tokens(keys[..., 0], (1,), device_lengths=inputs["lengths"])  # only its lengths are used
    memory = convolutional.ConvolutionalMemory(keys, inputs["values"], tokens)
    maps = tuple(layer.prepare_maps() for layer in model.decoder)
    past_inputs = inputs["conv_state"].unbind(1)
    state = convolutional.ConvolutionalState(memory, maps, past_inputs, step)  # type: ignore[arg-type]
    logits, next_state = model.step(state, inputs["input_ids"])
    return logits, {"conv_state": torch.stack(next_state.past_inputs, 1), "step": step + 1}


def _run_recurrent_step(model: Seq2Seq, inputs: NamedTensors) -> tuple[Tensor, NamedTensors]:
    hidden = tuple(inputs[name].transpose(0, 1) for name in ("hidden", "cell") if name in inputs)
    attention, memory = model.decoder.attention, None
    if attention is not None:
        lengths = inputs["lengths"]
        mask = masks.padding(lengths, bounds=(1, inputs["keys"].shape[1]))
        keys = PreparedKeys(inputs["keys"], attention.score.name, attention.score.key_owner)
        memory = Seq2SeqMemory(inputs["values"], keys, mask, lengths)
    step: int = inputs.get("step", 0)  # type: ignore[assignment]  # only local-m attention uses it
    state = seq2seq.Seq2SeqState(hidden, memory, inputs.get("context"), step)
    logits, next_state = model.step(state, inputs["input_ids"])
    changed = _get_recurrent_state(next_state)
    if "step" in inputs:
        changed["step"] = inputs["step"] + 1
    return logits, changed


def _get_recurrent_state(state: seq2seq.Seq2SeqState) -> NamedTensors:
    """Return the recurrent state by name, with one row per sentence."""
    tensors = {name: x.transpose(0, 1) for name, x in zip(("hidden", "cell"), state.hidden, strict=False)}
    return tensors if state.input_feed is None else {**tensors, "context": state.input_feed}


def get_next_state(outputs: NamedTensors) -> NamedTensors:
    """Return the changed parts of the state in the outputs of a step, by their names in the state."""
    return {name.removeprefix("next_"): x for name, x in outputs.items() if name.startswith("next_")}
