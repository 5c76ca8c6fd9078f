"""Export of runs to ONNX, for ONNX Runtime and other engines without PyTorch, at any batch size and length.

::

    BERT for classification, tagging, answering or masked words     model.onnx
    self-attentive or hierarchical classifier                       model.onnx, with attention weights
    recurrent or convolutional translator                           encoder.onnx and step.onnx

:mod:`.encoder_graphs` and :mod:`.translator_graphs` describe the inputs and outputs, and so does the README
of each folder. After writing, the graphs are compared with the model on a few inputs. If they differ, the
export fails.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jumok.batches.tokens import BOS, Tokens
from jumok.errors import InputError, JumokError
from jumok.export.export_folder import check_finite, check_replaceable, create_export_folder
from jumok.export.onnx import encoder_graphs, graphs, readme, translator_graphs
from jumok.export.onnx.graphs import NamedTensors
from jumok.files import write_json, write_text
from jumok.run import Run

__all__ = ["check_supported", "export_onnx", "write_graphs"]

TOLERANCE = 1e-4  # absolute and relative
PROBE_LENGTHS = ((7, 1, 4), (2, 2), (1, 13))  # lengths of the texts of the comparison
NUM_PROBE_STEPS = 5  # decoding steps of the comparison


def check_supported(run: Run) -> None:
    """Raise an error if the model of this run cannot be exported to ONNX."""
    task, model_type = run.recipe.task, getattr(run.recipe.model, "type", "model")
    if task in ("classify", "tag", "answer", "pretrain") or model_type in ("seq2seq", "convolutional"):
        return
    advice = "--format ctranslate2 or --format hf" if model_type == "transformer" else "--engine torch"
    raise InputError(
        f"ONNX: {run.folder} has a {model_type} model for the task {task}; supported are BERT (classify, "
        "tag, answer, pretrain), self-attentive and hierarchical classifiers, and seq2seq and convolutional "
        f"translators. For this model, use {advice}"
    )


def export_onnx(run: Run, output_folder: str | Path) -> str:
    """Write a folder with the graphs of a run, its tokenizers and labels, and a README with example code.

    The folder is written atomically. It replaces an earlier export, but no other folder.

    Returns:
        The result of the comparison with the model, as text.
    """
    from jumok.tasks import load_predictor

    check_supported(run)
    output_folder = Path(output_folder)
    check_replaceable(output_folder)
    graphs.require_packages("onnx", "onnxscript", "onnxruntime")
    predictor = load_predictor(run, "cpu")
    with create_export_folder(output_folder) as new:
        max_difference = write_graphs(predictor.model, new)
        for path in sorted(run.folder.glob("tokenizer*.json")):
            shutil.copy(path, new)
        if predictor.labels:
            write_json(new / "labels.json", list(predictor.labels))
        comparison = f"On a few test inputs, its outputs differ from PyTorch by at most {max_difference:.0e}."
        write_text(new / "README.md", readme.format_readme(run, predictor.model, comparison))
    return comparison


def write_graphs(model: nn.Module, folder: Path) -> float:
    """Write the graphs of a model on the CPU to an existing folder. Returns their largest difference."""
    check_finite(model)
    if isinstance(model, translator_graphs.TranslatorModel):
        translator = translator_graphs.remove_weight_norm(model)
        for name, graph in translator_graphs.build_graphs(translator).items():
            graphs.write_graph(graph, folder / f"{name}.onnx")
        return max(_compare_steps(model, folder, lengths) for lengths in PROBE_LENGTHS)
    if isinstance(model, encoder_graphs.EncoderModel):
        graphs.write_graph(encoder_graphs.build_graph(model), folder / "model.onnx")
        return max(_compare_outputs(model, folder, lengths) for lengths in PROBE_LENGTHS)
    raise InputError(f"a {type(model).__name__} cannot be exported to ONNX")


# ------------------------------------------------------------------------------- comparison with the model


def _compare_outputs(model: Any, folder: Path, lengths: tuple[int, ...]) -> float:
    is_bert = hasattr(model, "bert")
    max_length = model.bert.config.max_positions if is_bert else max(lengths)
    batch = encoder_graphs.build_probe_batch(model, [min(length, max_length) for length in lengths])
    session = graphs.create_session(folder / "model.onnx")
    outputs = graphs.run_session(session, encoder_graphs.build_inputs(model, batch))
    expected = encoder_graphs.compute_expected_outputs(model, batch)
    if is_bert:  # the outputs at padding are undefined
        is_valid = batch.tokens.valid_mask
        token_outputs = {name for name, x in expected.items() if x.dim() > 1 and x.shape[:2] == batch.segments.shape}
        outputs, expected = (
            {name: x[is_valid] if name in token_outputs else x for name, x in tensors.items()}
            for tensors in (outputs, expected)
        )
    return _compute_max_difference(outputs, expected)


@torch.no_grad()
def _compare_steps(model: Any, folder: Path, lengths: tuple[int, ...]) -> float:
    vocab_size = model.source_embedding.num_embeddings
    max_length = getattr(model, "max_length", None) or max(lengths)
    lengths = tuple(min(length, max_length) for length in lengths)
    source = Tokens.pad([[(5 * n + 3 * i + 3) % vocab_size for i in range(length)] for n, length in enumerate(lengths)])
    encoder, step = (graphs.create_session(folder / f"{name}.onnx") for name in ("encoder", "step"))
    state = graphs.run_session(encoder, {"source_ids": source.ids, "source_lengths": torch.tensor(source.lengths)})
    expected_state = model.start(source)
    ids, max_difference = torch.full((len(lengths),), BOS), 0.0
    for _ in range(NUM_PROBE_STEPS):
        logits, expected_state = model.step(expected_state, ids)
        outputs = graphs.run_session(step, {"input_ids": ids, **state})
        difference = _compute_max_difference({"logits": outputs["logits"]}, {"logits": logits})
        max_difference = max(max_difference, difference)
        state |= translator_graphs.get_next_state(outputs)
        ids = logits.argmax(-1)
    return max_difference


def _compute_max_difference(outputs: NamedTensors, expected: NamedTensors) -> float:
    """Return the largest difference. Raises an error if it is too large."""
    max_difference = 0.0
    for name, right in expected.items():
        output: Tensor = outputs[name]
        if output.shape != right.shape or not torch.allclose(output, right, rtol=TOLERANCE, atol=TOLERANCE):
            raise JumokError(
                f"the output {name} of the graph differs from that of the model, so nothing was written; "
                "please report this, with the recipe"
            )
        max_difference = max(max_difference, float((output - right).abs().max()) if right.numel() else 0.0)
    return max_difference
