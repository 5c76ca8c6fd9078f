"""How good a pretrained BERT is: hidden words and next segments of documents that it has not seen."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.nn import functional as F

from jumok.data.batching.pretraining import PretrainingBatcher
from jumok.data.caches.document_store import prepare_document_store
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError
from jumok.files import atomic_write
from jumok.models.bert import BertPretrainingModel
from jumok.run import Run
from jumok.tasks.pretrain.data import PretrainingData
from jumok.tasks.pretrain.predictor import FillMaskOptions, FillMaskPredictor

__all__ = ["PretrainingEvaluation", "build_held_out_dataset", "compare", "evaluate", "score_model"]

MAX_BATCH_TOKENS = 16384  # in a batch
MASKING_SEED = 0  # the same words are hidden in every judgement
ACCURACY_CURVES = {"mlm_accuracy": "hidden words", "nsp_accuracy": "next segment"}


@dataclass(frozen=True)
class PretrainingEvaluation:
    """What a model makes of held-out documents."""

    loss: float  # what is trained: the two losses added up
    mlm_accuracy: float
    nsp_accuracy: float
    perplexity: float  # of a hidden word
    num_masked_words: int  # that were hidden
    num_pairs: int

    @property
    def metrics(self) -> dict[str, float]:
        """Those that a validation tells."""
        named = ("loss", "mlm_accuracy", "nsp_accuracy", "perplexity")
        return {name: getattr(self, name) for name in named}


def build_held_out_dataset(run: Run, tokenizer: WordPieceTokenizer, split_name: str) -> PretrainingBatcher:
    """The validation or test documents of a run as pairs with hidden words, the same ones every time."""
    texts = PretrainingData(run.recipe.data, run.folder).held_out_documents(split_name)
    store = prepare_document_store(run.folder / "data" / split_name, texts, tokenizer)
    tokens = max(MAX_BATCH_TOKENS, 2 * run.recipe.masking.sequence_length)
    return PretrainingBatcher(store, tokenizer, run.recipe.masking, max_tokens=tokens, seed=MASKING_SEED)


@torch.no_grad()
def score_model(model: BertPretrainingModel, dataset: PretrainingBatcher) -> PretrainingEvaluation:
    """Over all pairs of the first epoch."""
    device = next(model.parameters()).device
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # both losses, both numbers of right answers
    words = pairs = 0
    for index in dataset.batches(0):
        batch = dataset.collate(index).to(device)
        answers = zip(model.logits(batch), (batch.labels, batch.next_sentence_labels), strict=True)
        for n, (said, wanted) in enumerate(answers):
            assert said is not None
            sums[n] += F.cross_entropy(said.float(), wanted, reduction="sum")
            sums[n + 2] += (said.argmax(-1) == wanted).sum()
        words, pairs = words + batch.count, pairs + len(index)
    masked, following, right, really = sums.tolist()
    return PretrainingEvaluation(
        loss=masked / words + following / pairs,
        mlm_accuracy=right / words,
        nsp_accuracy=really / pairs,
        perplexity=math.exp(min(masked / words, 700.0)),
        num_masked_words=words,
        num_pairs=pairs,
    )


def evaluate(
    predictor: FillMaskPredictor, split_name: str, options: FillMaskOptions, console: Console
) -> PretrainingEvaluation:
    """Judge a run on its test or validation documents, show it, and keep it in the run's folder."""
    run = predictor.run
    data = build_held_out_dataset(run, predictor.tokenizer, split_name)
    with console.status("reading the documents"):
        found = score_model(predictor.model, data)
    _write_json(
        run.folder / "eval" / f"{split_name}.json", {"split": split_name, **dataclasses.asdict(found)}
    )
    table = Table("figure", "value", "of", title=f"{split_name}, {data.store.summary}")
    table.add_row("accuracy, hidden words", f"{found.mlm_accuracy:.4f}", f"{found.num_masked_words:,}")
    table.add_row("accuracy, next segment", f"{found.nsp_accuracy:.4f}", f"{found.num_pairs:,}")
    table.add_row("perplexity", f"{found.perplexity:.3f}", "a hidden word")
    table.add_row("loss", f"{found.loss:.4f}", "")
    console.print(table)
    if data.store.skipped.total:
        console.print(f"Of the {split_name} data, {data.store.skipped}", markup=False, soft_wrap=True)
    if (drawn := _draw_accuracy_curves(run)) is not None:
        console.print(f"figure: {drawn}", markup=False, soft_wrap=True)
    return found


def compare(
    runs: Sequence[Run],
    split_name: str,
    options: FillMaskOptions,
    output_folder: Path,
    device: str,
    console: Console,
) -> None:
    """Several runs on the same documents with the same words hidden, side by side."""
    from jumok.tasks.pretrain.task import load

    names = [str(run.folder) for run in runs]
    if len(set(names)) < len(names):
        raise InputError(f"a run comes twice: {', '.join(names)}; compare different ones")
    found: dict[str, PretrainingEvaluation] = {}
    first: Any = None
    for name, run in zip(names, runs, strict=True):
        filler = load(run, device)
        data = build_held_out_dataset(run, filler.tokenizer, split_name)
        texts = [
            one.text for one in PretrainingData(run.recipe.data, run.folder).held_out_documents(split_name)
        ]
        same = texts, run.recipe.masking, filler.tokenizer.fingerprint
        first = first or same
        for one, other, what in zip(same, first, ("data", "masking", "vocabulary"), strict=True):
            if one != other:
                raise InputError(
                    f"{name} has another {split_name} {what} than {names[0]}; compare like with like"
                )
        with console.status(f"reading with {name}"):
            found[name] = score_model(filler.model, data)
    table = Table("run", "hidden words", "next segment", "perplexity", title=f"{split_name}, accuracy")
    for name, one in found.items():
        figures = f"{one.mlm_accuracy:.4f}", f"{one.nsp_accuracy:.4f}", f"{one.perplexity:.3f}"
        table.add_row(Text(name), *figures)
    console.print(table)
    path = output_folder / f"{split_name}.json"
    _write_json(path, {name: dataclasses.asdict(one) for name, one in found.items()})
    console.print(f"data: {path}", markup=False, soft_wrap=True)


def _draw_accuracy_curves(run: Run) -> Path | None:
    """Both accuracies of all validations, as a picture."""
    from jumok.look.figures.plots import draw_training_curves

    try:
        lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    told = [one for one in map(json.loads, lines) if one["event"] == "validation"]
    if not told:
        return None
    curves = {name: [(one["step"], one[key]) for one in told] for key, name in ACCURACY_CURVES.items()}
    return draw_training_curves(
        curves, run.folder / "figures" / "accuracy.png", title="accuracy on held-out documents"
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
