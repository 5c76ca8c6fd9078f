"""Runs as ONNX files, which ONNX Runtime and others run without PyTorch: the same numbers, at any length.

::

    a BERT that classifies, tags, answers or says hidden words     model.onnx
    a selfattentive or hierarchical classifier                     model.onnx, with where it looked
    a recurrent or convolutional translator                        encoder.onnx and step.onnx

What goes in and out of them :mod:`.reading` and :mod:`.writing` say, and the README beside them. When they
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
from jumok.batch import BOS, Tokens
from jumok.errors import InputError, JumokError
from jumok.exchange.folders import check_replaceable, exported
from jumok.exchange.onnx import graphs, reading, readme, writing
from jumok.exchange.onnx.graphs import Named
from jumok.run import Run

__all__ = ["check", "export", "write"]

CLOSE = 1e-4  # how far numbers may be apart, or by how much of themselves
PROBES = ((7, 1, 4), (2, 2), (1, 13))  # the lengths of the texts that are asked about
STEPS = 5  # words that are said of each


def check(run: Run) -> None:
    """Raise if the model of this run has no graph."""
    task, kind = run.recipe.task, getattr(run.recipe.model, "kind", "model")
    if task in ("classify", "tag", "answer", "pretrain") or kind in ("seq2seq", "convolutional"):
        return
    others = "--to ctranslate2 or --to hf" if kind == "transformer" else "--engine torch, as all others"
    raise InputError(
        f"ONNX: {run.folder} holds a {kind} model of the task {task}; there are graphs of BERT (classify, "
        f"tag, answer, pretrain), of selfattentive and hierarchical classifiers, and of seq2seq and "
        f"convolutional translators. This one goes by {others}"
    )


def export(run: Run, out: str | Path) -> str:
    """Write a folder with the graphs of a run, its tokenizers and labels, and a README that shows their use.

    It appears whole or not at all, and takes the place of an earlier export only.

    Returns:
        How it compares with the model, in words.
    """
    check(run)
    out = Path(out)
    check_replaceable(out)
    graphs.needed("onnx", "onnxscript", "onnxruntime")
    predictor = tasks.of(run.recipe.task).load(run, "cpu")
    with exported(out) as new:
        apart = write(predictor.model, new)
        for path in sorted(run.folder.glob("tokenizer*.json")):
            shutil.copy(path, new)
        labels = list(getattr(predictor, "labels", ()))
        if labels:
            told = json.dumps(labels, ensure_ascii=False) + "\n"
            (new / "labels.json").write_text(told, encoding="utf-8")
        told = f"Asked about a few texts, it says what PyTorch says, to within {apart:.0e}."
        (new / "README.md").write_text(readme.of(run, predictor.model, told), encoding="utf-8")
    return told


def write(model: nn.Module, folder: Path) -> float:
    """Write the graphs of a model, on the CPU, into a folder that is there; how far apart the two are."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(f"{name} holds NaN or infinity: the training has diverged; use earlier weights")
    if isinstance(model, writing.Writes):
        made = writing.graphs(writing.plain(model))
        for name, graph in made.items():
            graphs.write(graph, folder / f"{name}.onnx")
        return max(_apart_in_steps(model, folder, lengths) for lengths in PROBES)
    if isinstance(model, reading.Reads):
        graphs.write(reading.graph(model), folder / "model.onnx")
        return max(_apart(model, folder, lengths) for lengths in PROBES)
    raise InputError(f"there is no ONNX graph of a {type(model).__name__}")


# ------------------------------------------------------------------------------------------- is it the same?


def _apart(model: Any, folder: Path, lengths: tuple[int, ...]) -> float:
    longest = model.bert.config.positions if hasattr(model, "bert") else max(lengths)
    batch = reading.probe(model, [min(length, longest) for length in lengths])
    said = graphs.run(graphs.session(folder / "model.onnx"), reading.given(model, batch))
    wanted = reading.wanted(model, batch)
    of_tokens = {name for name, x in wanted.items() if x.shape[:2] == batch.segments.shape and x.dim() > 1}
    real = batch.tokens.real
    if hasattr(model, "bert"):  # which says something of padding too, of no meaning
        said, wanted = (
            {name: x[real] if name in of_tokens else x for name, x in some.items()} for some in (said, wanted)
        )
    return _compared(said, wanted)


@torch.no_grad()
def _apart_in_steps(model: Any, folder: Path, lengths: tuple[int, ...]) -> float:
    words, longest = model.source_embedding.num_embeddings, getattr(model, "longest", None) or max(lengths)
    lengths = tuple(min(length, longest) for length in lengths)
    source = Tokens.padded([[(5 * n + 3 * at + 3) % words for at in range(m)] for n, m in enumerate(lengths)])
    encoder, step = (graphs.session(folder / f"{name}.onnx") for name in ("encoder", "step"))
    given = {"source": source.ids, "source_lengths": torch.tensor(source.lengths)}
    state, wanted = graphs.run(encoder, given), model.start(source)
    ids, apart = torch.full((len(lengths),), BOS), 0.0
    for _ in range(STEPS):
        logits, wanted = model.step(wanted, ids)
        said = graphs.run(step, {"words": ids, **state})
        apart = max(apart, _compared({"logits": said["logits"]}, {"logits": logits}))
        state |= writing.after(said)
        ids = logits.argmax(-1)
    return apart


def _compared(said: Named, wanted: Named) -> float:
    """The largest difference; a JumokError where it is too large."""
    apart = 0.0
    for name, right in wanted.items():
        found: Tensor = said[name]
        if found.shape != right.shape or not torch.allclose(found, right, rtol=CLOSE, atol=CLOSE):
            raise JumokError(
                f"the graph says other {name} than the model, which must not be: nothing was written. Please "
                "report it, with the recipe"
            )
        apart = max(apart, float((found - right).abs().max()) if right.numel() else 0.0)
    return apart
