"""Runs as ONNX files, which ONNX Runtime and others run without PyTorch: the same numbers, at any length.

::

    a BERT that classifies, tags, answers or says hidden words     model.onnx
    a self_attentive or hierarchical classifier                     model.onnx, with where it looked
    a recurrent or convolutional translator                        encoder.onnx and step.onnx

What goes in and out of them :mod:`.encoder_graphs` and :mod:`.translator_graphs` say, and the README beside them. When they
are written, they are asked about a few texts; if they say other than the model, there is no folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jumok import tasks
from jumok.batches.tokens import BOS, Tokens
from jumok.errors import InputError, JumokError
from jumok.export.export_folder import check_replaceable, create_export_folder
from jumok.export.onnx import encoder_graphs, graphs, readme, translator_graphs
from jumok.export.onnx.graphs import NamedTensors
from jumok.run import Run

__all__ = ["check_supported", "export_onnx", "write_graphs"]

TOLERANCE = 1e-4  # how far numbers may be apart, or by how much of themselves
PROBE_LENGTHS = ((7, 1, 4), (2, 2), (1, 13))  # the lengths of the texts that are asked about
NUM_PROBE_STEPS = 5  # words that are said of each


def check_supported(run: Run) -> None:
    """Raise if the model of this run has no graph."""
    task, kind = run.recipe.task, getattr(run.recipe.model, "kind", "model")
    if task in ("classify", "tag", "answer", "pretrain") or kind in ("seq2seq", "convolutional"):
        return
    others = "--to ctranslate2 or --to hf" if kind == "transformer" else "--engine torch, as all others"
    raise InputError(
        f"ONNX: {run.folder} holds a {kind} model of the task {task}; there are graphs of BERT (classify, "
        f"tag, answer, pretrain), of self_attentive and hierarchical classifiers, and of seq2seq and "
        f"convolutional translators. This one goes by {others}"
    )


def export_onnx(run: Run, output_folder: str | Path) -> str:
    """Write a folder with the graphs of a run, its tokenizers and labels, and a README that shows their use.

    It appears whole or not at all, and takes the place of an earlier export only.

    Returns:
        How it compares with the model, in words.
    """
    check_supported(run)
    output_folder = Path(output_folder)
    check_replaceable(output_folder)
    graphs.require_packages("onnx", "onnxscript", "onnxruntime")
    predictor = tasks.get_task_module(run.recipe.task).load(run, "cpu")
    with create_export_folder(output_folder) as new:
        apart = write_graphs(predictor.model, new)
        for path in sorted(run.folder.glob("tokenizer*.json")):
            shutil.copy(path, new)
        labels = list(getattr(predictor, "labels", ()))
        if labels:
            told = json.dumps(labels, ensure_ascii=False) + "\n"
            (new / "labels.json").write_text(told, encoding="utf-8")
        told = f"Asked about a few texts, it says what PyTorch says, to within {apart:.0e}."
        (new / "README.md").write_text(readme.format_readme(run, predictor.model, told), encoding="utf-8")
    return told


def write_graphs(model: nn.Module, folder: Path) -> float:
    """Write the graphs of a model, on the CPU, into a folder that is there; how far apart the two are."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(f"{name} holds NaN or infinity: the training has diverged; use earlier weights")
    if isinstance(model, translator_graphs.TranslatorModel):
        made = translator_graphs.build_graphs(translator_graphs.remove_weight_norm(model))
        for name, graph in made.items():
            graphs.write_graph(graph, folder / f"{name}.onnx")
        return max(_compare_steps(model, folder, lengths) for lengths in PROBE_LENGTHS)
    if isinstance(model, encoder_graphs.EncoderModel):
        graphs.write_graph(encoder_graphs.build_graph(model), folder / "model.onnx")
        return max(_compare_outputs(model, folder, lengths) for lengths in PROBE_LENGTHS)
    raise InputError(f"there is no ONNX graph of a {type(model).__name__}")


# ------------------------------------------------------------------------------------------- is it the same?


def _compare_outputs(model: Any, folder: Path, lengths: tuple[int, ...]) -> float:
    longest = model.bert.config.positions if hasattr(model, "bert") else max(lengths)
    batch = encoder_graphs.build_probe_batch(model, [min(length, longest) for length in lengths])
    said = graphs.run_session(
        graphs.create_session(folder / "model.onnx"), encoder_graphs.build_inputs(model, batch)
    )
    wanted = encoder_graphs.compute_expected_outputs(model, batch)
    of_tokens = {name for name, x in wanted.items() if x.shape[:2] == batch.segments.shape and x.dim() > 1}
    real = batch.tokens.real
    if hasattr(model, "bert"):  # which says something of padding too, of no meaning
        said, wanted = (
            {name: x[real] if name in of_tokens else x for name, x in some.items()} for some in (said, wanted)
        )
    return _compute_max_difference(said, wanted)


@torch.no_grad()
def _compare_steps(model: Any, folder: Path, lengths: tuple[int, ...]) -> float:
    words, longest = model.source_embedding.num_embeddings, getattr(model, "longest", None) or max(lengths)
    lengths = tuple(min(length, longest) for length in lengths)
    source = Tokens.pad([[(5 * n + 3 * at + 3) % words for at in range(m)] for n, m in enumerate(lengths)])
    encoder, step = (graphs.create_session(folder / f"{name}.onnx") for name in ("encoder", "step"))
    given = {"source": source.ids, "source_lengths": torch.tensor(source.lengths)}
    state, wanted = graphs.run_session(encoder, given), model.start(source)
    ids, apart = torch.full((len(lengths),), BOS), 0.0
    for _ in range(NUM_PROBE_STEPS):
        logits, wanted = model.step(wanted, ids)
        said = graphs.run_session(step, {"words": ids, **state})
        apart = max(apart, _compute_max_difference({"logits": said["logits"]}, {"logits": logits}))
        state |= translator_graphs.get_next_state(said)
        ids = logits.argmax(-1)
    return apart


def _compute_max_difference(outputs: NamedTensors, expected: NamedTensors) -> float:
    """The largest difference; a JumokError where it is too large."""
    apart = 0.0
    for name, right in expected.items():
        found: Tensor = outputs[name]
        if found.shape != right.shape or not torch.allclose(found, right, rtol=TOLERANCE, atol=TOLERANCE):
            raise JumokError(
                f"the graph says other {name} than the model, which must not be: nothing was written. Please "
                "report it, with the recipe"
            )
        apart = max(apart, float((found - right).abs().max()) if right.numel() else 0.0)
    return apart
