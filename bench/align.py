"""Quality of word alignments from attention: every layer, plain and shifted, and eflomal on the same words.

    python bench/align.py RUN REVERSE [--gold NAME] [--section views|links|eflomal|all] [--out file.json]

RUN and REVERSE are translators of the two directions, such as `jumok train transformer/hansards-en-fr` and
`-fr-en`. Both align the sentences with manual alignments (named by --gold or by data.gold_alignments in the recipe
of RUN), and are scored by the alignment error rate (AER). The manual alignments are used for scores only.

views    the AER of every layer and head and of the mean of heads, plain and shifted, with the criteria that choose
         views: agreement of the directions, consistency of the links
links    plain, shifted and chosen views: each direction alone, and several symmetrizations
eflomal  the same with eflomal (pip install eflomal; it needs a compiler), trained on the training text of RUN and
         the gold sentences, with the words that the model of RUN gets
"""

from __future__ import annotations

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

VIEW_SCORES = ("error_rate", "agreement", "consistency")
METHODS = ("forward", "backward", *(name for name in SYMMETRIZATIONS if name != "none"))
LinksByMethod = dict[str, list[AlignmentLinks]]  # for each pair
VIEW_FILTERS = {
    "plain": AlignmentViewFilter(shift=False),
    "shifted": AlignmentViewFilter(shift=True),
    "chosen": AlignmentViewFilter(),
}
VIEW_FILTERS |= {
    f"{name}, means": AlignmentViewFilter(head="mean", shift=views.shift) for name, views in VIEW_FILTERS.items()
}


@dataclass(frozen=True)
class AlignmentTask:
    """Two models, and sentences with manual alignments."""

    aligner: WordAligner
    pairs: list[TranslationExample]
    gold: list[GoldAlignment]

    def score(self, links_by_method: LinksByMethod) -> dict[str, dict[str, Any]]:
        return {name: asdict(score_alignment(links, self.gold)) for name, links in links_by_method.items()}


def load_task(run: Path, reverse: Path, gold_name: str | None, device: str) -> AlignmentTask:
    aligner = load_aligner(run, reverse, device)
    data = aligner.forward.data
    if gold_name:
        data = replace(data, config=replace(data.config, gold_alignments=gold_name))
    gold = data.gold_split() or data.test_split()  # the built-in test sentences have links
    if gold.gold_alignments is None:
        raise SystemExit(f"the recipe of {run} has no gold alignments (data.gold_alignments); use --gold")
    return AlignmentTask(aligner, gold.examples, gold.gold_alignments)


# -------------------------------------------------------------------------------------------------- sections


def measure_views(report: Report, task: AlignmentTask) -> None:
    """Measure the scores of every view, and the criteria that choose views."""
    forward, backward = task.aligner.forward, task.aligner.backward
    assert backward is not None
    reversed_pairs = [reverse_pair(pair) for pair in task.pairs]
    forward_picks, backward_picks = (
        read_attention(forward, task.pairs, _get_picks),
        read_attention(backward, reversed_pairs, _get_picks),
    )
    agreement = compute_agreement([picks for _, picks in forward_picks], [picks for _, picks in backward_picks])
    for direction, captured, pairs, agreements in (
        ("forward", forward_picks, task.pairs, agreement.max(1).values),
        ("backward", backward_picks, reversed_pairs, agreement.max(0).values),
    ):
        consistencies = compute_consistency(
            [picks for _, picks in captured], [(pair.source.split(), pair.target.split()) for pair in pairs]
        )
        views = list_alignment_views(*captured[0][0])
        for number, view in enumerate(views):
            links = [build_links(picks[number]) for _, picks in captured]
            links = links if direction == "forward" else [swap_links(pair_links) for pair_links in links]
            row = report.row("views", str(view), direction, view=asdict(view))
            criteria = {"agreement": float(agreements[number]), "consistency": float(consistencies[number])}
            row["implementations"]["attention"] = {**criteria, **task.score({"links": links})["links"]}
    report.save()


def _get_picks(attention: Any) -> tuple[Any, torch.Tensor]:
    return attention.weights.shape[:2], attention.pick_source_words()


def measure_links(report: Report, task: AlignmentTask) -> None:
    """Measure the links of `jumok align`, with views chosen on the same pairs."""
    for name, views in VIEW_FILTERS.items():
        row = report.row("links", name)
        try:
            chosen = task.aligner.select_views(task.pairs, views)
            maps = [
                (forward, backward)
                for forward, backward in task.aligner.compute_maps(task.pairs, chosen)
                if backward is not None
            ]
        except Exception as error:
            report.failed(row, "attention", r.short(error))
            continue
        links = {name: [symmetrize(*pair) for pair in maps] for name, symmetrize in SYMMETRIZATIONS.items()}
        links |= {"forward": links.pop("none"), "backward": [swap_links(argmax_links(m)) for _, m in maps]}
        row["implementations"] |= task.score(links)
        report.note(row, chosen=str(chosen))
        report.log(f"{name}: {chosen.forward}; backward: {chosen.backward}")


def measure_eflomal(report: Report, task: AlignmentTask) -> None:
    """Measure eflomal on the words that our model gets."""
    row = report.row("links", "eflomal")
    try:
        import eflomal
    except ImportError:
        report.failed(row, "eflomal", "not installed: pip install eflomal, which needs a compiler")
        return
    texts = task.aligner.forward.data
    gold_files = {get_file(pair) for pair in task.pairs}  # not used twice if they are part of the training text
    corpus = replace(texts, config=replace(texts.config, max_concatenated_pairs=1)).train_corpus()
    train = [pair for pair in corpus if get_file(pair) not in gold_files]
    sides = [[pair.source for pair in train], [pair.target for pair in train]]
    for pair in task.pairs:
        sides[0].append(match_words(pair.source, texts.preprocess(pair.source, "source")))
        sides[1].append(match_words(pair.target, texts.preprocess(pair.target, "target")))
    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder, name)) for name in ("forward", "backward")]
        start = time.perf_counter()
        try:
            eflomal.Aligner().align(*sides, links_filename_fwd=names[0], links_filename_rev=names[1])
        except Exception as error:
            report.failed(row, "eflomal", r.short(error))
            return
        seconds = time.perf_counter() - start
        forward, backward = (read_links(Path(name), len(task.pairs)) for name in names)
    pairs = list(zip(forward, backward, strict=True))
    combined = {name: [combine(*pair) for pair in pairs] for name, combine in LINK_HEURISTICS.items()}
    row["implementations"] |= task.score({"forward": forward, "backward": backward, **combined})
    report.note(row, seconds=seconds, pairs=len(sides[0]))


def get_file(pair: TranslationExample) -> str:
    return pair.location.rpartition(":")[0]


def match_words(text: str, prepared: str) -> str:
    """Return the prepared text if it has as many words as the text, whose words gold links count."""
    return prepared if len(prepared.split()) == len(text.split()) else text


def read_links(path: Path, count: int) -> list[AlignmentLinks]:
    """Read the last ``count`` lines of a file of links."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1][-count:]
    return [frozenset(tuple(map(int, link.split("-"))) for link in line.split()) for line in lines]  # type: ignore[misc]


SECTIONS: dict[str, Callable[[Report, AlignmentTask], None]] = {
    "views": measure_views,
    "links": measure_links,
    "eflomal": measure_eflomal,
}


# -------------------------------------------------------------------------------------------------- printing


def print_views(rows: Sequence[Row]) -> None:
    """Print the means of heads. Single heads are in the JSON file."""
    for direction in ("forward", "backward"):
        lines = [
            [row["case"], *(row["implementations"]["attention"][name] for name in VIEW_SCORES)]
            for row in rows
            if row["pass"] == direction and row["view"]["head"] is None
        ]
        if lines:
            r.table(f"views, {direction}", ["view", *VIEW_SCORES], lines)


def print_links(rows: Sequence[Row]) -> None:
    lines = [
        [row["case"], *(r.get(row["implementations"], name, "error_rate") for name in METHODS)]
        for row in rows
        if "forward" in row["implementations"]
    ]
    if lines:
        r.table("alignment error rate", ["", *METHODS], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = r.build_parser(__doc__, [*SECTIONS])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("reverse", type=Path, help="folder of a run of the other direction")
    parser.add_argument("--gold", help="sentences with links, such as hansards/gold")
    options = parser.parse_args(arguments)

    report = Report("align", torch.device(options.device))
    report.begin(options.out, quick=options.quick)
    task = load_task(options.run, options.reverse, options.gold, options.device)
    recipe = task.aligner.forward.run.recipe
    report.head |= {"runs": [options.run.name, options.reverse.name], "model": asdict(recipe.model)}
    report.head |= {"gold": options.gold or recipe.data.gold_alignments, "sentences": len(task.pairs)}
    report.log(f"{recipe.model.type}, {len(task.pairs)} pairs with gold links")
    for name in r.list_sections(options, SECTIONS):
        SECTIONS[name](report, task)
    print_views([row for row in report.rows if row["section"] == "views"])
    print_links([row for row in report.rows if row["section"] == "links"])
    r.print_failures(report.rows)
    report.end()


if __name__ == "__main__":
    main()
