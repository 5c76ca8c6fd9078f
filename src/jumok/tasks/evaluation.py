"""How good a translation run is: scores with their signatures, by length, against other runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jumok.data.sources import Example
from jumok.errors import InputError
from jumok.files import written
from jumok.metrics import translation as metrics
from jumok.metrics.alignment import AlignmentScore, alignment_score
from jumok.metrics.significance import Compared, paired_bootstrap
from jumok.metrics.translation import Bin, Bleu, Chrf, Score
from jumok.run import Run
from jumok.tasks.aligning import Aligner, Asked
from jumok.tasks.corpora import Split
from jumok.tasks.translator import Search, Translation, Translator

__all__ = ["Evaluation", "bleu_of", "compare", "evaluate", "perplexity", "scored"]

TOKENS = 8192  # of the target, in a batch whose loss is computed
MAPS = 3  # drawn of a test set
LONGEST_MAP = 30  # words, to be worth drawing


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a run scores on a split."""

    translations: list[Translation]
    bleu: Score
    chrf: Score
    moses: Score | None  # BLEU of lower-cased Moses tokens, as papers on Multi30k give it
    perplexity: float
    by_length: list[Bin]
    links: AlignmentScore | None = None
    links_of: str = ""  # the split whose links these are
    links_by: str = ""  # the layer, head and step that they were read from, and why these

    @property
    def cut(self) -> int:
        """Translations that the length limit ended."""
        return sum(not one.finished for one in self.translations)

    def figures(self) -> dict[str, Any]:
        """As plain data."""
        named = {"bleu": self.bleu, "chrf": self.chrf, "bleu_moses": self.moses}
        found: dict[str, Any] = {name: _plain(one) for name, one in named.items() if one is not None}
        found |= {"perplexity": self.perplexity, "sentences": len(self.translations), "cut_off": self.cut}
        found["bleu_by_length"] = [{**_plain(one), "label": one.label} for one in self.by_length]
        if self.links is not None:
            found["alignment"] = {**_plain(self.links), "of": self.links_of, "by": self.links_by}
        return found


def scored(translator: Translator, split: Split, search: Search, metric: Bleu | None = None) -> Evaluation:
    """Translate a split and score it."""
    metric = metric or bleu_of(translator.run)
    pairs = split.examples
    translations = list(translator.predict([pair.source for pair in pairs], search))
    said, references = [one.text for one in translations], [pair.target for pair in pairs]
    lower = translator.run.recipe.data.prepare == "moses-lower"
    lengths = [len(pair.source.split()) for pair in pairs]
    return Evaluation(
        translations=translations,
        bleu=metric.score(said, references),
        chrf=Chrf(lowercase=lower).score(said, references),
        moses=_moses_bleu(translator, translations, references) if lower else None,
        perplexity=perplexity(translator, pairs),
        by_length=metrics.by_length(lengths, said, references, metric=metric),
    )


def _moses_bleu(translator: Translator, said: list[Translation], references: list[str]) -> Score:
    prepared = [translator.texts.prepared(one, "target") for one in references]
    return Bleu("none").score([" ".join(one.words) for one in said], prepared)


def evaluate(translator: Translator, name: str, search: Search, console: Console) -> Evaluation:
    """Score a run on its test or validation data, show it, and keep it in the run's folder."""
    split = _split(translator, name)
    with console.status(f"translating {len(split.examples):,} sentences"):
        found = scored(translator, split, search)
        found = dataclasses.replace(found, **_links(translator, split))
    folder = translator.run.folder
    _write(folder / "eval" / f"{name}.txt", "".join(f"{one.text}\n" for one in found.translations))
    asked = {**dataclasses.asdict(search), "beam": search.beam or translator.decode.beam}
    told = {"split": name, "search": asked, "decode": _plain(translator.decode), **found.figures()}
    _write(folder / "eval" / f"{name}.json", json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    drawn = _draw(translator, split, found, folder / "figures", name)
    _show(found, split, console)
    for path in drawn:
        console.print(f"figure: {path}", markup=False, soft_wrap=True)
    return found


def compare(
    runs: Sequence[Run], split: str, search: Search, out: Path, device: str, console: Console
) -> None:
    """Several runs on the same data: scores with intervals, significance, and their curves by length."""
    from jumok.look.figures import scores_by_length
    from jumok.tasks.translate import load

    names = [str(run.folder) for run in runs]
    if len(set(names)) < len(names):
        raise InputError(f"a run comes twice: {', '.join(names)}; compare different ones")
    metric = bleu_of(runs[0])  # the same for all
    found: dict[str, Evaluation] = {}
    first: list[tuple[str, str]] = []
    for name, run in zip(names, runs, strict=True):
        translator = load(run, device)
        theirs = _split(translator, split)
        pairs = [(pair.source, pair.target) for pair in theirs.examples]
        first = first or pairs
        if pairs != first:
            raise InputError(f"{name} has other {split} data than {names[0]}; compare on the same sentences")
        with console.status(f"translating with {name}"):
            found[name] = scored(translator, theirs, search, metric)
    outputs = {name: [one.text for one in each.translations] for name, each in found.items()}
    compared = paired_bootstrap(outputs, [target for _, target in first], metric=metric)
    console.print(_side_by_side(compared, found, f"{split}, {len(first):,} sentences"))
    console.print(compared[0].score.signature, style="dim", soft_wrap=True)
    figure = scores_by_length(
        {name: each.by_length for name, each in found.items()}, out / f"{split}-by-length.png"
    )
    told = [{**_plain(one), **found[one.name].figures()} for one in compared]
    _write(out / f"{split}.json", json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    console.print(f"figure: {figure}\ndata: {out / f'{split}.json'}", markup=False, soft_wrap=True)


def _side_by_side(compared: Sequence[Compared], found: dict[str, Evaluation], title: str) -> Table:
    table = Table("run", "BLEU", "95 %", "p", "chrF", "perplexity", title=title)
    for one in compared:
        each = found[one.name]
        table.add_row(
            Text(one.name),
            f"{one.score.value:.2f}",
            f"{one.low:.1f}–{one.high:.1f}",
            "" if one.p is None else f"{one.p:.3f}",
            f"{each.chrf.value:.1f}",
            f"{each.perplexity:.2f}",
        )
    return table


def bleu_of(run: Run) -> Bleu:
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
def perplexity(translator: Translator, pairs: Sequence[Example]) -> float:
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


def _links(translator: Translator, split: Split) -> dict[str, Any]:
    """The score of the model's word links: on this split if its links are known, else on the gold pairs.

    Layer, head and step are those of the recipe. What it leaves open is chosen as ``jumok align`` does on the
    same pairs: by their sentences, not by their gold links. A pair that is too long has no links.
    """
    gold = split if split.links is not None else translator.texts.gold()
    if gold is None or gold.links is None or not translator.has_maps:
        return {}
    aligner = Aligner(translator)
    fits = [aligner.unfit(pair) is None for pair in gold.examples]
    pairs = list(itertools.compress(gold.examples, fits))
    if not pairs:
        return {}
    asked = Asked.of_recipe(translator.decode, layers=len(translator.maps(pairs[:1])[0]))
    chosen = aligner.choose(pairs, asked)
    aligned = aligner.align(pairs, chosen)
    found = [next(aligned).links if fit else frozenset() for fit in fits]
    return {
        "links": alignment_score(found, gold.links),
        "links_of": gold.name,
        "links_by": str(chosen),
    }


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
            if one.words:  # a model that has learned little may say nothing
                drawn.append(translator.draw(one, folder / f"{name}-map-{n + 1}.png"))
    return drawn


def _show(found: Evaluation, split: Split, console: Console) -> None:
    table = Table("figure", "value", "", title=f"{split.name}, {len(split.examples):,} sentences")
    named = (("BLEU", found.bleu), ("chrF", found.chrf), ("BLEU, Moses tokens", found.moses))
    scores = [(name, one) for name, one in named if one is not None]
    for name, one in scores:
        table.add_row(name, f"{one.value:.2f}")
    table.add_row("perplexity", f"{found.perplexity:.3f}", "of a token")
    links = found.links
    if links is not None:
        table.add_row(
            f"alignment error rate, {found.links_of}",
            f"{links.error_rate:.3f}",
            f"precision {links.precision:.3f}, recall {links.recall:.3f}",
        )
    if found.cut:
        table.add_row("cut off", f"{found.cut}", "translations that reached the length limit")
    console.print(table)
    if found.links_by:
        console.print(f"links by {found.links_by}", style="dim", markup=False, soft_wrap=True)
    for name, one in scores:  # whole, to be copied
        console.print(f"{name}: {one.signature}", style="dim", markup=False, highlight=False, soft_wrap=True)
    if split.skipped.total:
        console.print(f"Of the {split.name} data, {split.skipped}", markup=False, soft_wrap=True)


def _plain(one: Any) -> dict[str, Any]:
    return dataclasses.asdict(one)


def _write(path: Path, text: str) -> None:
    with written(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
