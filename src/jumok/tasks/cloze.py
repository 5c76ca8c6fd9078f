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

from jumok.data.masking import MaskedData
from jumok.data.tokenised import prepare
from jumok.data.wordpiece import WordPieces
from jumok.errors import InputError
from jumok.files import written
from jumok.models.bert import Pretraining
from jumok.run import Run
from jumok.tasks.filler import Filler, Search
from jumok.tasks.library import Library

__all__ = ["Judged", "compare", "evaluate", "held_out", "judge"]

TOKENS = 16384  # in a batch
SEED = 0  # the same words are hidden in every judgement
CURVES = {"masked_accuracy": "hidden words", "next_accuracy": "next segment"}


@dataclass(frozen=True)
class Judged:
    """What a model makes of held-out documents."""

    loss: float  # what is trained: the two losses added up
    masked_accuracy: float
    next_accuracy: float
    perplexity: float  # of a hidden word
    words: int  # that were hidden
    pairs: int

    @property
    def figures(self) -> dict[str, float]:
        """Those that a validation tells."""
        named = ("loss", "masked_accuracy", "next_accuracy", "perplexity")
        return {name: getattr(self, name) for name in named}


def held_out(run: Run, pieces: WordPieces, name: str) -> MaskedData:
    """The validation or test documents of a run as pairs with hidden words, the same ones every time."""
    texts = Library(run.recipe.data, run.folder).held_out(name)
    store = prepare(run.folder / "data" / name, texts, pieces)
    tokens = max(TOKENS, 2 * run.recipe.masking.length)
    return MaskedData(store, pieces, run.recipe.masking, tokens=tokens, seed=SEED)


@torch.no_grad()
def judge(model: Pretraining, data: MaskedData) -> Judged:
    """Over all pairs of the first epoch."""
    device = next(model.parameters()).device
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # both losses, both numbers of right answers
    words = pairs = 0
    for index in data.batches(0):
        batch = data.collate(index).to(device)
        answers = zip(model.logits(batch), (batch.labels, batch.next), strict=True)
        for n, (said, wanted) in enumerate(answers):
            assert said is not None
            sums[n] += F.cross_entropy(said.float(), wanted, reduction="sum")
            sums[n + 2] += (said.argmax(-1) == wanted).sum()
        words, pairs = words + batch.count, pairs + len(index)
    masked, following, right, really = sums.tolist()
    return Judged(
        loss=masked / words + following / pairs,
        masked_accuracy=right / words,
        next_accuracy=really / pairs,
        perplexity=math.exp(min(masked / words, 700.0)),
        words=words,
        pairs=pairs,
    )


def evaluate(filler: Filler, name: str, search: Search, console: Console) -> Judged:
    """Judge a run on its test or validation documents, show it, and keep it in the run's folder."""
    run = filler.run
    data = held_out(run, filler.tokenizer, name)
    with console.status("reading the documents"):
        found = judge(filler.model, data)
    _write(run.folder / "eval" / f"{name}.json", {"split": name, **dataclasses.asdict(found)})
    table = Table("figure", "value", "of", title=f"{name}, {data.store.told}")
    table.add_row("accuracy, hidden words", f"{found.masked_accuracy:.4f}", f"{found.words:,}")
    table.add_row("accuracy, next segment", f"{found.next_accuracy:.4f}", f"{found.pairs:,}")
    table.add_row("perplexity", f"{found.perplexity:.3f}", "a hidden word")
    table.add_row("loss", f"{found.loss:.4f}", "")
    console.print(table)
    if data.store.skipped.total:
        console.print(f"Of the {name} data, {data.store.skipped}", markup=False, soft_wrap=True)
    if (drawn := _curves(run)) is not None:
        console.print(f"figure: {drawn}", markup=False, soft_wrap=True)
    return found


def compare(
    runs: Sequence[Run], split: str, search: Search, out: Path, device: str, console: Console
) -> None:
    """Several runs on the same documents with the same words hidden, side by side."""
    from jumok.tasks.pretrain import load

    names = [str(run.folder) for run in runs]
    if len(set(names)) < len(names):
        raise InputError(f"a run comes twice: {', '.join(names)}; compare different ones")
    found: dict[str, Judged] = {}
    first: Any = None
    for name, run in zip(names, runs, strict=True):
        filler = load(run, device)
        data = held_out(run, filler.tokenizer, split)
        texts = [one.text for one in Library(run.recipe.data, run.folder).held_out(split)]
        same = texts, run.recipe.masking, filler.tokenizer.fingerprint
        first = first or same
        for one, other, what in zip(same, first, ("data", "masking", "vocabulary"), strict=True):
            if one != other:
                raise InputError(f"{name} has another {split} {what} than {names[0]}; compare like with like")
        with console.status(f"reading with {name}"):
            found[name] = judge(filler.model, data)
    table = Table("run", "hidden words", "next segment", "perplexity", title=f"{split}, accuracy")
    for name, one in found.items():
        figures = f"{one.masked_accuracy:.4f}", f"{one.next_accuracy:.4f}", f"{one.perplexity:.3f}"
        table.add_row(Text(name), *figures)
    console.print(table)
    path = out / f"{split}.json"
    _write(path, {name: dataclasses.asdict(one) for name, one in found.items()})
    console.print(f"data: {path}", markup=False, soft_wrap=True)


def _curves(run: Run) -> Path | None:
    """Both accuracies of all validations, as a picture."""
    from jumok.look.figures import progress

    try:
        lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    told = [one for one in map(json.loads, lines) if one["event"] == "validation"]
    if not told:
        return None
    curves = {name: [(one["step"], one[key]) for one in told] for key, name in CURVES.items()}
    return progress(curves, run.folder / "figures" / "accuracy.png", title="accuracy on held-out documents")


def _write(path: Path, told: dict[str, Any]) -> None:
    with written(path) as temporary:
        temporary.write_text(json.dumps(told, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
