"""How good a translation run is: scores with their signatures, by length, against other runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from jumok.data.sources import Example
from jumok.errors import InputError
from jumok.files import written
from jumok.metrics import translation as metrics
from jumok.metrics.alignment import AlignmentScore, alignment_score
from jumok.metrics.significance import paired_bootstrap
from jumok.metrics.translation import Bin, Bleu, Chrf, Score
from jumok.run import Run
from jumok.tasks.corpora import DataConfig, Split
from jumok.tasks.translator import Search, Translation, Translator

__all__ = ["Evaluation", "compare", "evaluate", "scored"]

TOKENS = 8192  # of the target, in a batch whose loss is computed
MAPS = 3  # drawn of a test set
LONGEST_MAP = 30  # words, to be worth drawing


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a run scores on a split."""

    translations: list[Translation]
    bleu: Score
    chrf: Score
    perplexity: float
    moses: Score | None  # BLEU of lower-cased Moses tokens, as papers on Multi30k give it
    by_length: list[Bin]
    cut: int  # translations that the length limit ended
    links: AlignmentScore | None = None

    def figures(self) -> dict[str, Any]:
        """As plain data."""
        named = {"bleu": self.bleu, "chrf": self.chrf, "bleu_moses": self.moses}
        found: dict[str, Any] = {name: _plain(one) for name, one in named.items() if one is not None}
        found |= {"perplexity": self.perplexity, "sentences": len(self.translations), "cut_off": self.cut}
        found["bleu_by_length"] = [{**_plain(one), "label": one.label} for one in self.by_length]
        if self.links is not None:
            found["alignment"] = _plain(self.links)
        return found


def scored(translator: Translator, split: Split, search: Search) -> Evaluation:
    """Translate a split and score it."""
    pairs = split.examples
    translations = list(translator.predict([pair.source for pair in pairs], search))
    said = [one.text for one in translations]
    config: DataConfig = translator.run.recipe.data
    lower = config.prepare == "moses-lower"
    bleu = _bleu(translator.run)
    references = [pair.target for pair in pairs]
    moses = None
    if lower:
        prepared = [translator.texts.prepared(one, "target") for one in references]
        moses = Bleu("none").score([" ".join(one.words) for one in translations], prepared)
    return Evaluation(
        translations=translations,
        bleu=bleu.score(said, references),
        chrf=Chrf(lowercase=lower).score(said, references),
        perplexity=_perplexity(translator, pairs),
        moses=moses,
        by_length=metrics.by_length([len(p.source.split()) for p in pairs], said, references, metric=bleu),
        cut=sum(not one.finished for one in translations),
    )


def evaluate(translator: Translator, name: str, search: Search, console: Console) -> Evaluation:
    """Score a run on its test or validation data, show it, and keep it in the run's folder."""
    split = _split(translator, name)
    with console.status(f"translating {len(split.examples):,} sentences"):
        found = scored(translator, split, search)
        found = dataclasses.replace(found, links=_links_score(translator))
    folder = translator.run.folder
    _write(folder / "eval" / f"{name}.txt", "".join(f"{one.text}\n" for one in found.translations))
    told = {"split": name, "search": dataclasses.asdict(search), **found.figures()}
    _write(folder / "eval" / f"{name}.json", json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    drawn = _draw(translator, split, found, folder / "figures", name)
    _show(found, split, console)
    for path in drawn:
        console.print(f"figure: {path}")
    return found


def compare(runs: Sequence[Run], split: str, out: Path, device: str, console: Console) -> None:
    """Several runs on the same data: scores with intervals, significance, and their curves by length."""
    from jumok.look.figures import scores_by_length
    from jumok.tasks.translate import load

    found: dict[str, Evaluation] = {}
    first: Split | None = None
    metric = Bleu()
    for run in runs:
        name = str(run.folder)
        translator = load(run, device)
        theirs = _split(translator, split)
        if first is None:
            first = theirs
            metric = _bleu(run)
        elif [(p.source, p.target) for p in theirs.examples] != [
            (p.source, p.target) for p in first.examples
        ]:
            raise InputError(
                f"{name} has other {split} data than {runs[0].folder}; compare on the same sentences"
            )
        with console.status(f"translating with {name}"):
            found[name] = scored(translator, theirs, Search())
    assert first is not None
    references = [pair.target for pair in first.examples]
    outputs = {name: [one.text for one in each.translations] for name, each in found.items()}
    compared = paired_bootstrap(outputs, references, metric=metric)
    table = Table(
        "run", "BLEU", "95 %", "p", "chrF", "perplexity", title=f"{split}, {len(references):,} sentences"
    )
    for one in compared:
        each = found[one.name]
        p = "" if one.p is None else f"{one.p:.3f}"
        interval = f"{one.low:.1f}–{one.high:.1f}"
        table.add_row(
            one.name,
            f"{one.score.value:.2f}",
            interval,
            p,
            f"{each.chrf.value:.1f}",
            f"{each.perplexity:.2f}",
        )
    console.print(table)
    console.print(compared[0].score.signature, style="dim")
    curves = {name: each.by_length for name, each in found.items()}
    figure = scores_by_length(curves, out / f"{split}-by-length.png")
    told = [{**_plain(one), **found[one.name].figures()} for one in compared]
    _write(out / f"{split}.json", json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    console.print(f"figure: {figure}\ndata: {out / f'{split}.json'}")


def _bleu(run: Run) -> Bleu:
    """As the recipe says, or else as the language wants it."""
    asked, data = run.recipe.score.bleu, run.recipe.data
    tokens = metrics.tokenization_of(str(data.target)) if asked == "auto" else asked
    return Bleu(tokens, lowercase=data.prepare != "none")


def _split(translator: Translator, name: str) -> Split:
    if name not in ("valid", "test"):
        raise InputError(f"--split {name}: it is test or valid")
    found: Split = getattr(translator.texts, name)()
    return found


@torch.inference_mode()
def _perplexity(translator: Translator, pairs: Sequence[Example]) -> float:
    """Of the references, a token each."""
    nll, count = 0.0, 0
    order = sorted(pairs, key=lambda pair: len(pair.target))
    while order:
        rows = max(1, TOKENS // max(1, len(order[-1].target)))
        batch = translator.batch(order[-rows:])
        order = order[:-rows]
        loss = translator.model.loss(batch)
        nll, count = nll + float(loss.parts["nll"]), count + loss.count
    return metrics.perplexity(nll, count)


def _links_score(translator: Translator) -> AlignmentScore | None:
    gold = translator.texts.gold()
    if gold is None or gold.links is None or not translator.has_maps:
        return None
    links = translator.align(gold.examples)
    return alignment_score(links, gold.links)


def _draw(translator: Translator, split: Split, found: Evaluation, folder: Path, name: str) -> list[Path]:
    """The curve by length, and some maps."""
    from jumok.look.figures import scores_by_length

    drawn = [
        scores_by_length({str(translator.run.folder): found.by_length}, folder / f"{name}-by-length.png")
    ]
    if translator.has_maps:
        fit = [n for n, one in enumerate(found.translations) if 5 <= len(one.source_words) <= LONGEST_MAP]
        for n in fit[:MAPS]:
            one = translator.translate(split.examples[n].source)
            drawn.append(translator.draw(one, folder / f"{name}-map-{n + 1}.png"))
    return drawn


def _show(found: Evaluation, split: Split, console: Console) -> None:
    table = Table("figure", "value", title=f"{split.name}, {len(split.examples):,} sentences")
    table.add_column(overflow="fold")
    for name, one in (("BLEU", found.bleu), ("chrF", found.chrf), ("BLEU, Moses tokens", found.moses)):
        if one is not None:
            table.add_row(name, f"{one.value:.2f}", one.signature)
    table.add_row("perplexity", f"{found.perplexity:.3f}", "of a token")
    links = found.links
    if links is not None:
        table.add_row(
            "alignment error rate",
            f"{links.error_rate:.3f}",
            f"precision {links.precision:.3f}, recall {links.recall:.3f}",
        )
    if found.cut:
        table.add_row("cut off", f"{found.cut}", "translations that reached the length limit")
    console.print(table)


def _plain(one: Any) -> dict[str, Any]:
    return dataclasses.asdict(one)


def _write(path: Path, text: str) -> None:
    with written(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
