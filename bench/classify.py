"""How fast does a hierarchical attention network read and learn documents, and how well does TF-IDF?

    python bench/classify.py [--section training|inference|baselines|all] [--quick] [--out file.json] [RUN …]

training     reviews of IMDB, beside a network written as one writes it first: padded to the longest sentence
             and document of a batch (padded.py), in batches of 64 as in the paper
inference    the same, of IMDB's test data in the order of the file, and sorted; some batches from everywhere
baselines    TF-IDF and logistic regression (tfidf.py) on IMDB, its ratings, AG News and NSMC; runs of
             `jumok train` that are given stand beside it, with what `jumok eval` found

Before anything is measured, both networks get the same weights, and must say the same to 1e-5 in float32.
Both are measured in documents a second over the same documents. A step of training is what a training step
is: a batch from the host to the device, loss, gradients, clipping, AdamW (fused), by autocast in bfloat16 on
CUDA. Ours is the step and the batches of `jumok train`. The padded one is measured with its GRUs over padding
and with packed ones, and compared with is the faster. Where IMDB is not found, documents of like lengths are
drawn. Without a GPU, training is small, and its figures only show that the code runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report as r
import tfidf
import torch
from padded_network import Block, PaddedNetwork
from report import Report, Row, Run, ratio
from reviews import Reviews, reviews
from torch import Tensor, nn
from training import Plan

from jumok.data.batching.documents import DocumentBatcher
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig
from jumok.training.config import TrainConfig
from jumok.training.distributed import DistributedRanks
from jumok.training.learner import Learner
from jumok.training.prefetch import StepBatches, pin_memory

EQUAL = 1e-5  # the most that outputs in float32 may differ by
PAPER = 64  # documents of a batch
LEAST_LEFT = 20  # seconds, on a GPU: with fewer left a way is left out
TURNS = 5
RATE, DECAY, CLIP = 1e-3, 1e-2, 1.0
Numbers = list[int]


def network(vocabulary: int, plan: Plan) -> HierarchicalAttentionNetwork:
    torch.manual_seed(0)
    config = HierarchicalConfig()
    if plan.quick:
        config = HierarchicalConfig(embedding_width=8, width=4, attention_width=8)
    return HierarchicalAttentionNetwork(config, vocabulary, 2)


def fixed(documents: int, order: Sequence[int], size: int) -> list[Numbers]:
    """Batches of so many documents, in that order."""
    return [list(order[at : at + size]) for at in range(0, documents, size)]


@dataclass(frozen=True)
class Chosen:
    """Which documents are read together."""

    batches: list[Numbers]

    def costs(self, texts: Reviews, layout: str) -> dict[str, Any]:
        """How many batches there are, their steps one after the other, the share of real words."""
        lengths = [[[len(s) for s in texts.documents[n]] for n in batch] for batch in self.batches]
        longest = [max(max(document) for document in batch) for batch in lengths]
        most = [max(map(len, batch)) for batch in lengths]
        told: dict[str, Any] = {"batches": len(lengths), "steps": sum(longest) + sum(most)}
        if layout == "padded":
            places = sum(len(b) * s * w for b, s, w in zip(lengths, most, longest, strict=True))
            told["real"] = sum(texts.words) / places
        return told


# --------------------------------------------------------------------------------------- is it the same?


def check(plan: Plan, ours: HierarchicalAttentionNetwork, texts: Reviews) -> dict[str, float]:
    """How far both are apart in float32, where they may not be; an error if it is too far.

    With the weights that both begin with; and, of the packed one, with any.
    """
    numbers = list(range(min(len(texts.documents), PAPER)))
    some = texts.some(numbers)
    batch = DocumentBatcher(some.documents, some.labels, max_tokens=1, seed=1).collate(numbers).to(plan.device)
    block = Block.of(some.documents, some.labels).to(plan.device)
    moved = HierarchicalAttentionNetwork(ours.config, texts.vocabulary, 2).to(plan.device).eval()
    moved.load_state_dict(ours.state_dict())
    told: dict[str, float] = {}
    exactly = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        for name, packed in (("padded", False), ("packed", True), ("packed, other weights", True)):
            if "other" in name:
                with torch.no_grad():
                    for parameter in moved.parameters():
                        parameter += 0.1 * torch.randn_like(parameter)
            theirs = PaddedNetwork.like(moved, packed).to(plan.device)
            with torch.inference_mode():
                told[name] = float((moved.logits(batch) - theirs(block)).abs().max())
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = exactly
    if not max(told.values(), key=r.nan_last) <= EQUAL:
        raise RuntimeError(f"the networks do not say the same: they differ by {told}")
    return told


# ---------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Way:
    name: str
    chosen: Chosen
    make: Callable[[], Run]  # a round over all batches, which gives the losses
    layout: str


def training(report: Report, plan: Plan) -> None:
    texts = reviews("train", 12 if plan.quick else None)
    many = 4096 if plan.on_gpu else 12 if plan.quick else 64
    chance = np.random.default_rng(0)
    texts = texts.some(chance.permutation(len(texts.documents))[:many].tolist())
    size = 3 if plan.quick else PAPER if plan.on_gpu else 8
    words = np.array(texts.words)
    ours = network(texts.vocabulary, plan)
    row = report.row("training", f"{many} documents, {texts.origin}", dtype=str(plan.dtype))
    row |= {"documents": many, "words": int(words.sum()), "size": size, "vocabulary": texts.vocabulary}
    row["config"] = dataclasses.asdict(ours.config)
    report.note(row, differs=check(plan, ours, texts))

    budget = int(size * words.mean())
    row["budget"] = budget
    by_size, by_steps = (
        {
            times: DocumentBatcher(
                texts.documents, texts.labels, max_tokens=times * budget, seed=1, group_by_steps=steps
            )
            for times in (1, 4)
        }
        for steps in (False, True)
    )
    random = Chosen(fixed(many, range(many), size))
    alike = Chosen(fixed(many, np.argsort(words, kind="stable").tolist(), size))
    shuffled = Chosen([alike.batches[n] for n in chance.permutation(len(alike.batches))])

    def our(name: str, data: DocumentBatcher) -> Way:
        chosen = Chosen([index.tolist() for index in data.batches(0)])
        return Way(name, chosen, lambda: learning(plan, ours, data, chosen), "packed")

    def their(name: str, chosen: Chosen, packed: bool) -> Way:
        name = f"{name}, packed GRU" if packed else name
        return Way(name, chosen, lambda: learning_padded(plan, ours, texts, chosen, packed), "padded")

    ways = [our("ours", by_steps[1]), their("padded", random, False)]
    ways += [their("padded, like lengths", shuffled, False), their("padded", random, True)]
    ways += [our("ours, 4 × the words", by_steps[4]), our("ours, by size", by_size[1])]
    ways += [their("padded, by steps", ways[0].chosen, packed) for packed in (False, True)]
    ways += [their("padded, like lengths", shuffled, True)]
    for way in ways:
        measure(report, row, way, texts)


def learning(plan: Plan, start: HierarchicalAttentionNetwork, data: DocumentBatcher, chosen: Chosen) -> Run:
    """Ours: a round of the steps of `jumok train`."""
    model = HierarchicalAttentionNetwork(start.config, start.embedding.num_embeddings, start.output.out_features)
    model.load_state_dict(start.state_dict())
    settings = TrainConfig(
        optimizer="adamw",
        learning_rate=RATE,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        schedule="constant",
        warmup_steps=0,
    )
    learner = Learner(model, settings, DistributedRanks(device=plan.device), None)
    made = [data.collate(numbers) for numbers in chosen.batches]
    works = [StepBatches(0, at, (0, at + 1), [(held(plan, batch), 1)]) for at, batch in enumerate(made)]
    step = 0

    def run() -> list[Tensor]:
        nonlocal step
        losses = []
        for work in works:
            step += 1
            told = learner.step(work, step)
            losses.append(told[0] / told[1])
        return losses

    return run


def learning_padded(
    plan: Plan, start: HierarchicalAttentionNetwork, texts: Reviews, chosen: Chosen, packed: bool
) -> Run:
    model = PaddedNetwork.like(start, packed).to(plan.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=DECAY, fused=True)
    blocks = []
    for numbers in chosen.batches:
        some = texts.some(numbers)
        blocks.append(held(plan, Block.of(some.documents, some.labels)))

    def step(block: Block) -> Tensor:
        with plan.autocast():
            loss = model.loss(block.to(plan.device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return lambda: [step(block) for block in blocks]


def held(plan: Plan, batch: Any) -> Any:
    """A batch on the host, as the threads of a training loop leave it."""
    return pin_memory(batch) if plan.on_gpu else batch


def measure(report: Report, row: Row, way: Way, texts: Reviews) -> None:
    """Make one way and measure it, and leave nothing of it behind."""
    if report.left < (LEAST_LEFT if report.device.type == "cuda" else 0):
        return report.failed(row, way.name, f"skipped, {report.left:.0f} s are left")
    losses: list[list[float]] = []
    try:
        made = way.make()

        def run() -> None:
            found = made()
            if not losses:  # the first round
                losses.append([float(x) for x in found])

        found = report.measure(row, way.name, run, hide_launches=False)
    except Exception as error:
        report.failed(row, way.name, r.short(error))
    else:
        found |= {"layout": way.layout, **way.chosen.costs(texts, way.layout)}
        if losses:
            found |= {"start": losses[0][0], "end": statistics.fmean(losses[0][-4:])}
        if "ms" in found:
            found["documents_s"] = row["documents"] / found["ms"] * 1e3
    r.tidy(report.device)
    return report.save()


def faster(ways: dict[str, Any], name: str) -> str | None:
    """Of the padded ones with and without packed GRUs, the faster."""
    return r.fastest(ways, [name, f"{name}, packed GRU"])[0]


def training_tables(rows: list[Row]) -> None:
    for row in rows:
        ways = row["ways"]
        bases = {name: faster(ways, name) for name in ("padded", "padded, like lengths")}
        row["ratios"] = {
            f"{name} / {base}": ratio(r.get(ways, name), r.get(ways, base))
            for name in ways
            for base in bases.values()
            if name.startswith("ours") and base
        }
        lines = []
        for name, way in ways.items():
            speed = [way.get(what) for what in ("documents_s", "ms")]
            sizes = [f"{way[what]:,}" if what in way else "–" for what in ("batches", "steps")]
            share = f"{way['real']:.1%}" if "real" in way else "all"
            times = [ratio(r.get(ways, base), way.get("ms")) for base in bases.values()]
            lines.append([name, *speed, *sizes, share, way.get("mib"), way.get("end"), *times])
        head = ["way", "documents/s", "ms", "batches", "steps", "real", "MiB", "loss", "× a", "× b"]
        r.table(f"Training, {row['case']}, a round", head, lines)
        for mark, (name, base) in zip("ab", bases.items(), strict=True):
            print(f"  times as fast as {mark}: {base or name + ' (not measured)'}")
        told_differs(row)
        print(f"  batches of ours have {row['budget']:,} words, as {row['size']} documents have on average")


def told_differs(row: Row) -> None:
    """Print what :func:`check` found."""
    if "differs" in row:
        told = ", ".join(f"{name} {x:.0e}" for name, x in row["differs"].items())
        print(f"  with equal weights outputs differ by: {told}")


# --------------------------------------------------------------------------------------------- inference


def inference(report: Report, plan: Plan) -> None:
    texts = reviews("test", 12 if plan.quick else None)
    size, many = (3, 2) if plan.quick else (PAPER, 8)
    ours = network(texts.vocabulary, plan).eval()
    differs = check(plan, ours, texts)
    ours = ours.to(plan.device)
    orders = {
        "in the order of the file": list(range(len(texts.documents))),
        "sorted by their words": np.argsort(texts.words, kind="stable").tolist(),
    }
    for name, order in orders.items():
        every = fixed(len(order) // size * size, order, size)
        # Some of them, from everywhere.
        chosen = Chosen([every[int((at + 0.5) * len(every) / many)] for at in range(many)])
        some = texts.some([n for batch in chosen.batches for n in batch])
        batches = Chosen(fixed(many * size, range(many * size), size))
        row = report.row("inference", name, "float32", origin=texts.origin, differs=differs)
        row |= {"documents": many * size, "words": sum(some.words), "size": size}
        row |= {"load": os.getloadavg()[0], **batches.costs(some, "padded")}
        read_in_turn(report, row, plan, ours, some, batches)


def read_in_turn(
    report: Report, row: Row, plan: Plan, ours: HierarchicalAttentionNetwork, texts: Reviews, chosen: Chosen
) -> None:
    """The padded one both ways, once each; then ours and the faster of them in turns."""
    data = DocumentBatcher(texts.documents, texts.labels, max_tokens=1, seed=1)
    batches = [data.collate(numbers).to(plan.device) for numbers in chosen.batches]
    somes = [texts.some(numbers) for numbers in chosen.batches]
    blocks = [Block.of(some.documents, some.labels).to(plan.device) for some in somes]

    def their(packed: bool) -> list[Run]:
        model = PaddedNetwork.like(ours, packed).to(plan.device)
        return [functools.partial(model, block) for block in blocks]

    calls = {"padded, packed GRU": their(True), "padded": their(False)}
    with torch.inference_mode():
        for name, each in calls.items():
            if report.left <= 0:
                report.failed(row, name, "skipped, the time was up")
                continue
            took(report, row, name, [sum(r._clocked(call) for call in each) * 1e3])
        best, _ = r.fastest(row["ways"], list(calls))
        if best is not None:
            both = {"ours": [functools.partial(ours.logits, batch) for batch in batches], best: calls[best]}
            in_turn(report, row, both, 3 if plan.quick else TURNS)


def in_turn(report: Report, row: Row, calls: dict[str, list[Run]], turns: int) -> None:
    """Measure ours and another way: a turn is one batch after the other, each read by both.

    On a CPU others may work at any time; so they slow down both alike. The median of the ratios within a turn
    is noted as ``in_turn``, the least and the most of them as ``spread``, the ratio of the shortest times as
    ``best``.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        if report.left <= 0 and turn > 1:
            break
        taken = dict.fromkeys(calls, 0.0)
        for batch in zip(*calls.values(), strict=True):
            for name, call in zip(calls, batch, strict=True):
                taken[name] += r._clocked(call) * 1e3
        for name in calls if turn else ():  # the first one makes things ready
            times[name].append(taken[name])
    for name, found in times.items():
        took(report, row, name, found)
    one, other = times.values()
    ratios = [y / x for x, y in zip(one, other, strict=True)]
    row |= {"in_turn": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}
    row |= {"best": min(other) / min(one), "against": list(times)[1]}
    report.save()


def took(report: Report, row: Row, name: str, times: list[float]) -> None:
    way = row["ways"][name] = r._spread(times)
    way["documents_s"] = row["documents"] / way["ms"] * 1e3
    report.say(f"inference  {row['case']}  {name}: {r.number(way['ms'])} ms")
    report.save()


def inference_tables(rows: list[Row]) -> None:
    lines = []
    names = ("ours", "padded, packed GRU", "padded")
    for row in rows:
        ways = row["ways"]
        row["ratios"] = {f"ours / {name}": ratio(r.get(ways, "ours"), r.get(ways, name)) for name in names[1:]}
        rates = [r.get(ways, name, "documents_s") for name in names]
        spread = "–".join(r.number(x) for x in row.get("spread", [])) or "–"
        lines.append([row["case"], f"{row['real']:.1%}", *rates, row.get("in_turn"), spread, row.get("best")])
    if not rows:
        return
    head = ["documents", "real", *names, "times", "spread", "best"]
    first = rows[0]
    title = f"Inference, {first['documents']} documents of {first['origin']}, batches of {first['size']}"
    r.table(f"{title}: documents a second", head, lines)
    print(f"  times as fast as the faster of both padded ones, in turns: {first.get('against', 'none')}")
    # The padded one may sort what it reads; ours need not.
    rates = [r.get(rows[-1]["ways"], faster(rows[-1]["ways"], "padded"), "documents_s"),
             r.get(first["ways"], "ours", "documents_s")]  # fmt: skip
    across = ratio(rates[1], rates[0])
    if len(rows) == 2 and across:
        first["ratios"]["ours as they come / padded, sorted"] = 1 / across
        print(f"  ours as they come, beside the padded one over sorted documents: {r.number(across)} times")
    told_differs(first)
    loads = [row["load"] for row in rows]
    print(f"  processes at work before each, ours among them: {min(loads):.1f} to {max(loads):.1f}")


# --------------------------------------------------------------------------------------------- baselines


def baselines(report: Report, plan: Plan, runs: Sequence[Path] = (), only: Sequence[str] = tuple(tfidf.TASKS)) -> None:
    """TF-IDF on each of the data sets that are found; and what runs of ours came to."""
    beside = tfidf.load_scores(runs)
    for name, make in tfidf.TASKS.items():
        if name not in only:
            continue
        row = report.row("baselines", name, runs=[told for told in beside if told["task"] == name])
        if report.left <= 0:
            report.failed(row, "TF-IDF", "skipped, the time was up")
            continue
        try:
            task = make()
            if plan.quick:
                task = task.smaller(200)
            found = tfidf.judged(task, lambda text, name=name: report.say(f"baselines  {name}  {text}"))
        except Exception as error:
            report.failed(row, "TF-IDF", r.short(error))
        else:
            row["ways"]["TF-IDF"] = found
            report.say(f"baselines  {name}  accuracy {found['accuracy']:.4f}")
            report.save()
    unknown = [told for told in beside if told["task"] not in only]
    if unknown:
        report.row("baselines", "other data", runs=unknown)


def baseline_tables(rows: list[Row]) -> None:
    lines: list[list[Any]] = []

    def line(task: str, name: str, way: dict[str, Any], ahead: float | None) -> None:
        figures = [way.get(what) for what in ("accuracy", "mean_error", "mean_error_of_mean")]
        told = ["–" if x is None else f"{x:.4f}" for x in figures]
        lines.append([task, name, *told, "–" if ahead is None else f"{ahead:+.4f}"])

    for row in rows:
        base = row["ways"].get("TF-IDF", {})
        if "accuracy" in base:
            line(row["case"], f"TF-IDF {base['grams']}, C = {base['C']:g}", base, None)
        for run in row["runs"]:
            known = "accuracy" in base and run.get("accuracy") is not None
            line(row["case"], run["run"], run, run["accuracy"] - base["accuracy"] if known else None)
    if lines:
        head = ["data", "what", "accuracy", "mean |error|", "of the mean", "ahead"]
        r.table("On test data", head, lines)


# ---------------------------------------------------------------------------------------------------- main

SECTIONS: dict[str, tuple[Callable[..., None], Callable[[list[Row]], None]]] = {
    "inference": (inference, inference_tables),
    "training": (training, training_tables),
    "baselines": (baselines, baseline_tables),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="of ours, to stand beside TF-IDF")
    parser.add_argument("--section", choices=[*SECTIONS, "all"], default="all")
    parser.add_argument("--data", action="append", choices=tfidf.TASKS, help="of baselines; else all")
    parser.add_argument("--quick", action="store_true", help="a look only: smaller, less often")
    parser.add_argument("--out", type=Path, help="the JSON file; runs/bench/… unless --quick")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="what does not fit into them is left out")
    chosen = parser.parse_args(arguments)

    device = torch.device(chosen.device)
    plan = Plan(device, chosen.quick, compile=False)
    names = list(SECTIONS) if chosen.section == "all" else [chosen.section]
    seconds = chosen.seconds or (3600 if "baselines" in names else 540)
    report = Report("classify", device, seconds=seconds, repeats=3 if plan.quick else 10)
    report.begin(chosen.out, quick=chosen.quick, section=chosen.section)

    for name in names:
        more = {"runs": chosen.runs, "only": chosen.data or [*tfidf.TASKS]} if name == "baselines" else {}
        report.run(SECTIONS, name, plan, **more)
    for name in names:
        report.show(SECTIONS, name)
    report.end()


if __name__ == "__main__":
    main()
