"""How good are word links by attention? Every layer, plain and shifted, and eflomal on the same words.

    python bench/align.py RUN REVERSE [--gold NAME] [--section views|links|eflomal|all] [--out file.json]

RUN and REVERSE are models of the two directions, such as `jumok train transformer/hansards-en-fr` and -fr-en
make. Both align the sentences with gold links that --gold or else RUN's recipe (data.gold) names, and the
alignment error rate (AER) tells how good they are. Nothing but the scores is taken from the gold links.

views    the AER of every layer, its heads averaged, plain and shifted, beside what views are chosen by:
         agreement of the directions, consistency of the links
links    plain, shifted and whichever is chosen: each direction alone, and the two made one in several ways
eflomal  the same of eflomal (pip install eflomal; it needs a compiler), which learns from RUN's training text
         and the gold sentences, spelled as RUN's model gets them
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import report as r
import torch
from report import Report, Row

from jumok.data.links import Gold, Links
from jumok.data.sources import Example
from jumok.look.align import agreement, consistency, links_of, views
from jumok.metrics.alignment import alignment_score, flipped, strongest
from jumok.metrics.symmetry import CLASSICAL, SYMMETRIES
from jumok.tasks.aligning import Aligner, Asked, look, turned
from jumok.tasks.linking import aligner_of

CHOSEN_BY = ("error_rate", "agreement", "consistency")  # and how good it is
NAMES = ("forth", "back", "together", *CLASSICAL)
Found = dict[str, list[Links]]  # by name: of all pairs
READINGS = {"plain": Asked(shift=False), "shifted": Asked(shift=True), "chosen": Asked()}
READINGS |= {f"{name}, means": Asked(head="mean", shift=asked.shift) for name, asked in READINGS.items()}


@dataclass(frozen=True)
class Work:
    """Two models, and sentences whose links people marked."""

    aligner: Aligner
    pairs: list[Example]
    gold: list[Gold]

    def scores(self, found: Found) -> dict[str, dict[str, Any]]:
        return {name: asdict(alignment_score(links, self.gold)) for name, links in found.items()}


def work_of(run: Path, reverse: Path, gold_name: str | None, device: str) -> Work:
    aligner = aligner_of(run, reverse, device)
    texts = aligner.forth.texts
    gold = (replace(texts, config=replace(texts.config, gold=gold_name)) if gold_name else texts).gold()
    if gold is None:  # the built-in sentences have links too
        gold = texts.test()
    if gold.links is None:
        raise SystemExit(f"the recipe of {run} names no gold links (data.gold): give --gold")
    return Work(aligner, gold.examples, gold.links)


# -------------------------------------------------------------------------------------------------- sections


def measure_views(report: Report, work: Work) -> None:
    """What every view gives, and what it would be chosen by."""
    forth, back = work.aligner.forth, work.aligner.back
    assert back is not None
    turned_pairs = [turned(pair) for pair in work.pairs]
    ours, theirs = look(forth, work.pairs, _seen), look(back, turned_pairs, _seen)
    both = agreement([picks for _, picks in ours], [picks for _, picks in theirs])
    for which, seen, pairs, agree in (
        ("forth", ours, work.pairs, both.max(1).values),
        ("back", theirs, turned_pairs, both.max(0).values),
    ):
        consistent = consistency(
            [picks for _, picks in seen], [(one.source.split(), one.target.split()) for one in pairs]
        )
        known = views(*seen[0][0])
        for number, view in enumerate(known):
            found = [links_of(picks[number]) for _, picks in seen]
            right = found if which == "forth" else [flipped(links) for links in found]
            row = report.row("views", str(view), which, view=asdict(view))
            more = {"agreement": float(agree[number]), "consistency": float(consistent[number])}
            row["ways"]["attention"] = {**more, **work.scores({"links": right})["links"]}
    report.save()


def _seen(looked: Any) -> tuple[Any, torch.Tensor]:
    return looked.weights.shape[:2], looked.picks()


def measure_links(report: Report, work: Work) -> None:
    """Links as `jumok align` makes them, by views chosen on these very pairs."""
    for name, asked in READINGS.items():
        row = report.row("links", name)
        try:
            chosen = work.aligner.choose(work.pairs, asked)
            maps = [(one, other) for one, other in work.aligner.maps(work.pairs, chosen) if other is not None]
        except Exception as error:
            report.failed(row, "attention", r.short(error))
            continue
        found = {name: [symmetry(*pair) for pair in maps] for name, symmetry in SYMMETRIES.items()}
        found |= {"forth": found.pop("none"), "back": [flipped(strongest(back)) for _, back in maps]}
        row["ways"] |= work.scores(found)
        report.note(row, chosen=str(chosen))
        report.say(f"{name}: {chosen.forth}; back: {chosen.back}")


def measure_eflomal(report: Report, work: Work) -> None:
    """The peer, on the words that our model gets."""
    row = report.row("links", "eflomal")
    try:
        import eflomal
    except ImportError:
        report.failed(row, "eflomal", "not installed: pip install eflomal, which needs a compiler")
        return
    texts = work.aligner.forth.texts
    own = {file_of(pair) for pair in work.pairs}  # if they are among the training text, they come once
    text = replace(texts, config=replace(texts.config, joined=1)).train()
    learned = [pair for pair in text if file_of(pair) not in own]
    sides = [[pair.source for pair in learned], [pair.target for pair in learned]]
    for pair in work.pairs:
        sides[0].append(same_words(pair.source, texts.prepared(pair.source, "source")))
        sides[1].append(same_words(pair.target, texts.prepared(pair.target, "target")))
    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder, name)) for name in ("forth", "back")]
        began = time.perf_counter()
        try:
            eflomal.Aligner().align(*sides, links_filename_fwd=names[0], links_filename_rev=names[1])
        except Exception as error:
            report.failed(row, "eflomal", r.short(error))
            return
        took = time.perf_counter() - began
        forth, back = (read(Path(name), len(work.pairs)) for name in names)
    pairs = list(zip(forth, back, strict=True))
    made = {name: [combine(*pair) for pair in pairs] for name, combine in CLASSICAL.items()}
    row["ways"] |= work.scores({"forth": forth, "back": back, **made})
    report.note(row, seconds=took, pairs=len(sides[0]))


def file_of(pair: Example) -> str:
    return pair.where.rpartition(":")[0]


def same_words(text: str, prepared: str) -> str:
    """The prepared text, if it has as many words: gold links count those of the text."""
    return prepared if len(prepared.split()) == len(text.split()) else text


def read(path: Path, count: int) -> list[Links]:
    """The last lines of a file of links."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1][-count:]
    return [frozenset(tuple(map(int, link.split("-"))) for link in line.split()) for line in lines]  # type: ignore[misc]


SECTIONS: dict[str, Callable[[Report, Work], None]] = {
    "views": measure_views,
    "links": measure_links,
    "eflomal": measure_eflomal,
}


# -------------------------------------------------------------------------------------------------- printing


def show_views(rows: Sequence[Row]) -> None:
    """Layer by layer; heads one by one are in the JSON."""
    for which in ("forth", "back"):
        lines = [
            [row["case"], *(row["ways"]["attention"][name] for name in CHOSEN_BY)]
            for row in rows
            if row["pass"] == which and row["view"]["head"] is None
        ]
        if lines:
            r.table(f"views, {which}", ["view", *CHOSEN_BY], lines)


def show_links(rows: Sequence[Row]) -> None:
    lines = [
        [row["case"], *(r.get(row["ways"], name, "error_rate") for name in NAMES)]
        for row in rows
        if "forth" in row["ways"]
    ]
    if lines:
        r.table("alignment error rate", ["", *NAMES], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("reverse", type=Path, help="that of the other direction")
    parser.add_argument("--gold", help="sentences with links, such as hansards/gold")
    parser.add_argument("--section", choices=[*SECTIONS, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="write no file, unless --out names one")
    parser.add_argument("--out", type=Path, help="the JSON file; runs/bench/… unless --quick")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args(arguments)

    report = Report("align", torch.device(chosen.device))
    report.begin(chosen.out, quick=chosen.quick)
    work = work_of(chosen.run, chosen.reverse, chosen.gold, chosen.device)
    recipe = work.aligner.forth.run.recipe
    report.head |= {"runs": [chosen.run.name, chosen.reverse.name], "model": asdict(recipe.model)}
    report.head |= {"gold": chosen.gold or recipe.data.gold, "sentences": len(work.pairs)}
    report.say(f"{recipe.model.kind}, {len(work.pairs)} pairs with gold links")
    for name in SECTIONS if chosen.section == "all" else [chosen.section]:
        SECTIONS[name](report, work)
    show_views([row for row in report.rows if row["section"] == "views"])
    show_links([row for row in report.rows if row["section"] == "links"])
    r.failures(report.rows)
    report.end()


if __name__ == "__main__":
    main()
