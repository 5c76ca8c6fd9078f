"""How good are word links by attention? Every layer, plain and shifted, and eflomal on the same words.

    python bench/align.py RUN REVERSE [--gold NAME] [--section views|links|eflomal|all] [--out file.json]

RUN and REVERSE are models of the two directions, such as `jumok train transformer/hansards-en-fr` and -fr-en
make. Both align the sentences with manual alignments that --gold or the recipe of RUN (data.gold_alignments)
names, and are scored by the alignment error rate (AER). The manual alignments are used for scores only.

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

from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.data.readers.word_alignments import AlignmentLinks, GoldAlignment
from jumok.look.views.alignment_selection import (
    build_links,
    compute_agreement,
    compute_consistency,
    list_alignment_views,
)
from jumok.metrics.symmetrization import LINK_HEURISTICS, SYMMETRIZATIONS
from jumok.metrics.word_alignment import argmax_links, score_alignment, swap_links
from jumok.tasks.translate.corpus_alignment import load_aligner
from jumok.tasks.translate.word_alignment import (
    AlignmentViewFilter,
    WordAligner,
    read_attention,
    reverse_pair,
)

CHOSEN_BY = ("error_rate", "agreement", "consistency")  # and how good it is
METHODS = ("forward", "backward", *(name for name in SYMMETRIZATIONS if name != "none"))
LinksByMethod = dict[str, list[AlignmentLinks]]  # of all pairs
READINGS = {
    "plain": AlignmentViewFilter(shift=False),
    "shifted": AlignmentViewFilter(shift=True),
    "chosen": AlignmentViewFilter(),
}
READINGS |= {f"{name}, means": AlignmentViewFilter(head="mean", shift=views.shift) for name, views in READINGS.items()}


@dataclass(frozen=True)
class Work:
    """Two models, and sentences whose links people marked."""

    aligner: WordAligner
    pairs: list[TranslationExample]
    gold: list[GoldAlignment]

    def scores(self, links_by_method: LinksByMethod) -> dict[str, dict[str, Any]]:
        return {name: asdict(score_alignment(links, self.gold)) for name, links in links_by_method.items()}


def work_of(run: Path, reverse: Path, gold_name: str | None, device: str) -> Work:
    aligner = load_aligner(run, reverse, device)
    texts = aligner.forward.data
    gold = (
        replace(texts, config=replace(texts.config, gold_alignments=gold_name)) if gold_name else texts
    ).gold_split()
    if gold is None:  # the built-in sentences have links too
        gold = texts.test_split()
    if gold.gold_alignments is None:
        raise SystemExit(f"the recipe of {run} names no gold alignments (data.gold_alignments): give --gold")
    return Work(aligner, gold.examples, gold.gold_alignments)


# -------------------------------------------------------------------------------------------------- sections


def measure_views(report: Report, work: Work) -> None:
    """What every view gives, and what it would be chosen by."""
    forward, backward = work.aligner.forward, work.aligner.backward
    assert backward is not None
    reversed_pairs = [reverse_pair(pair) for pair in work.pairs]
    ours, theirs = (
        read_attention(forward, work.pairs, _get_picks),
        read_attention(backward, reversed_pairs, _get_picks),
    )
    both = compute_agreement([picks for _, picks in ours], [picks for _, picks in theirs])
    for direction, captured, pairs, agree in (
        ("forward", ours, work.pairs, both.max(1).values),
        ("backward", theirs, reversed_pairs, both.max(0).values),
    ):
        consistent = compute_consistency(
            [picks for _, picks in captured], [(pair.source.split(), pair.target.split()) for pair in pairs]
        )
        views = list_alignment_views(*captured[0][0])
        for number, view in enumerate(views):
            links = [build_links(picks[number]) for _, picks in captured]
            links = links if direction == "forward" else [swap_links(pair_links) for pair_links in links]
            row = report.row("views", str(view), direction, view=asdict(view))
            more = {"agreement": float(agree[number]), "consistency": float(consistent[number])}
            row["ways"]["attention"] = {**more, **work.scores({"links": links})["links"]}
    report.save()


def _get_picks(attention: Any) -> tuple[Any, torch.Tensor]:
    return attention.weights.shape[:2], attention.pick_source_words()


def measure_links(report: Report, work: Work) -> None:
    """Links as `jumok align` makes them, by views chosen on these very pairs."""
    for name, views in READINGS.items():
        row = report.row("links", name)
        try:
            chosen = work.aligner.select_views(work.pairs, views)
            maps = [
                (forward, backward)
                for forward, backward in work.aligner.compute_maps(work.pairs, chosen)
                if backward is not None
            ]
        except Exception as error:
            report.failed(row, "attention", r.short(error))
            continue
        links = {name: [symmetrize(*pair) for pair in maps] for name, symmetrize in SYMMETRIZATIONS.items()}
        links |= {"forward": links.pop("none"), "backward": [swap_links(argmax_links(m)) for _, m in maps]}
        row["ways"] |= work.scores(links)
        report.note(row, chosen=str(chosen))
        report.say(f"{name}: {chosen.forward}; backward: {chosen.backward}")


def measure_eflomal(report: Report, work: Work) -> None:
    """The peer, on the words that our model gets."""
    row = report.row("links", "eflomal")
    try:
        import eflomal
    except ImportError:
        report.failed(row, "eflomal", "not installed: pip install eflomal, which needs a compiler")
        return
    texts = work.aligner.forward.data
    own = {file_of(pair) for pair in work.pairs}  # if they are among the training text, they come once
    text = replace(texts, config=replace(texts.config, max_concatenated_pairs=1)).train_corpus()
    learned = [pair for pair in text if file_of(pair) not in own]
    sides = [[pair.source for pair in learned], [pair.target for pair in learned]]
    for pair in work.pairs:
        sides[0].append(same_words(pair.source, texts.preprocess(pair.source, "source")))
        sides[1].append(same_words(pair.target, texts.preprocess(pair.target, "target")))
    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder, name)) for name in ("forward", "backward")]
        began = time.perf_counter()
        try:
            eflomal.Aligner().align(*sides, links_filename_fwd=names[0], links_filename_rev=names[1])
        except Exception as error:
            report.failed(row, "eflomal", r.short(error))
            return
        took = time.perf_counter() - began
        forward, backward = (read_links(Path(name), len(work.pairs)) for name in names)
    pairs = list(zip(forward, backward, strict=True))
    combined = {name: [combine(*pair) for pair in pairs] for name, combine in LINK_HEURISTICS.items()}
    row["ways"] |= work.scores({"forward": forward, "backward": backward, **combined})
    report.note(row, seconds=took, pairs=len(sides[0]))


def file_of(pair: TranslationExample) -> str:
    return pair.location.rpartition(":")[0]


def same_words(text: str, prepared: str) -> str:
    """The prepared text, if it has as many words: gold links count those of the text."""
    return prepared if len(prepared.split()) == len(text.split()) else text


def read_links(path: Path, count: int) -> list[AlignmentLinks]:
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
    for direction in ("forward", "backward"):
        lines = [
            [row["case"], *(row["ways"]["attention"][name] for name in CHOSEN_BY)]
            for row in rows
            if row["pass"] == direction and row["view"]["head"] is None
        ]
        if lines:
            r.table(f"views, {direction}", ["view", *CHOSEN_BY], lines)


def show_links(rows: Sequence[Row]) -> None:
    lines = [
        [row["case"], *(r.get(row["ways"], name, "error_rate") for name in METHODS)]
        for row in rows
        if "forward" in row["ways"]
    ]
    if lines:
        r.table("alignment error rate", ["", *METHODS], lines)


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
    recipe = work.aligner.forward.run.recipe
    report.head |= {"runs": [chosen.run.name, chosen.reverse.name], "model": asdict(recipe.model)}
    report.head |= {"gold": chosen.gold or recipe.data.gold_alignments, "sentences": len(work.pairs)}
    report.say(f"{recipe.model.type}, {len(work.pairs)} pairs with gold links")
    for name in SECTIONS if chosen.section == "all" else [chosen.section]:
        SECTIONS[name](report, work)
    show_views([row for row in report.rows if row["section"] == "views"])
    show_links([row for row in report.rows if row["section"] == "links"])
    r.failures(report.rows)
    report.end()


if __name__ == "__main__":
    main()
