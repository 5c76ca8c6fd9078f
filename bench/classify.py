"""Speed of a hierarchical attention network, and baselines of document classification.

    python bench/classify.py [--section training|inference|baselines|all] [--quick] [--out file.json] [RUN …]

training     training on IMDB reviews, compared with a straightforward implementation that pads to the longest
             sentence and document of a batch (padded_network.py), in batches of 64 as in the paper
inference    inference on test reviews of IMDB, in file order and sorted; batches from the whole split
baselines    TF-IDF and logistic regression (tfidf.py) on IMDB, its ratings, AG News and NSMC, compared with
             the `jumok eval` scores of the given runs of `jumok train`

Before measuring, both networks get the same weights, and their outputs must be equal to 1e-5 in float32. Both
are measured in documents per second on the same documents. A training step copies a batch from the host to the
device and computes loss, gradients, clipping and AdamW (fused), by autocast in bfloat16 on CUDA. Our steps and
batches are those of `jumok train`. The padded network is measured with GRUs on padded and on packed sequences;
ratios are to the faster one. Without IMDB, random documents of similar lengths are used. Without a GPU, training
is small, and only shows that the code runs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report as r
import tfidf
import torch
from padded_network import Block, PaddedNetwork
from report import Report, Row, Run, Settings, ratio
from reviews import Reviews, load_reviews
from torch import Tensor, nn
from training_runs import Implementation, TrainingRun, build_learner_round, measure_implementation, pin_batch

from jumok.data.batching.documents import DocumentBatcher
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig
from jumok.training.config import TrainConfig

MAX_DIFFERENCE = 1e-5  # of outputs in float32
PAPER_BATCH_SIZE = 64  # documents
NUM_TURNS = 5
LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-3, 1e-2, 1.0
Indices = list[int]


def build_network(vocab_size: int, settings: Settings) -> HierarchicalAttentionNetwork:
    torch.manual_seed(0)
    config = HierarchicalConfig()
    if settings.quick:
        config = HierarchicalConfig(embedding_width=8, width=4, attention_width=8)
    return HierarchicalAttentionNetwork(config, vocab_size, 2)


def split_into_batches(order: Sequence[int], size: int) -> list[Indices]:
    """Split documents into batches of equal size."""
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def describe_batches(batches: Sequence[Indices], texts: Reviews, layout: str) -> dict[str, Any]:
    """Return the number of batches, the number of sequential GRU steps, and the share of real words."""
    lengths = [[[len(sentence) for sentence in texts.documents[n]] for n in batch] for batch in batches]
    max_words = [max(max(document) for document in batch) for batch in lengths]
    max_sentences = [max(map(len, batch)) for batch in lengths]
    result: dict[str, Any] = {"batches": len(lengths), "steps": sum(max_words) + sum(max_sentences)}
    if layout == "padded":
        padded = sum(len(b) * s * w for b, s, w in zip(lengths, max_sentences, max_words, strict=True))
        result["real"] = sum(texts.num_words) / padded
    return result


# ------------------------------------------------------------------------------------- equality of outputs


def check(settings: Settings, ours: HierarchicalAttentionNetwork, texts: Reviews) -> dict[str, float]:
    """Return how far the outputs of both networks differ in float32; raise an error if it is too far.

    The padded GRU is checked with the initial weights, and the packed one with other weights too.
    """
    indices = list(range(min(len(texts.documents), PAPER_BATCH_SIZE)))
    subset = texts.select(indices)
    batch = DocumentBatcher(subset.documents, subset.labels, max_tokens=1, seed=1).collate(indices)
    batch = batch.to(settings.device)
    block = Block.from_documents(subset.documents, subset.labels).to(settings.device)
    model = HierarchicalAttentionNetwork(ours.config, texts.vocab_size, 2).to(settings.device).eval()
    model.load_state_dict(ours.state_dict())
    differences: dict[str, float] = {}
    with r.without_tf32():
        for name, packed in (("padded", False), ("packed", True), ("packed, other weights", True)):
            if "other" in name:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += 0.1 * torch.randn_like(parameter)
            theirs = PaddedNetwork.copy_of(model, packed).to(settings.device)
            with torch.inference_mode():
                differences[name] = float((model.logits(batch) - theirs(block)).abs().max())
    if not max(differences.values(), key=r.nan_last) <= MAX_DIFFERENCE:
        raise RuntimeError(f"the outputs of the networks must be equal, but differ by {differences}")
    return differences


# ---------------------------------------------------------------------------------------------- training


def training(report: Report, settings: Settings) -> None:
    texts = load_reviews("train", 12 if settings.quick else None)
    count = 4096 if settings.on_gpu else 12 if settings.quick else 64
    rng = np.random.default_rng(0)
    texts = texts.select(rng.permutation(len(texts.documents))[:count].tolist())
    size = 3 if settings.quick else PAPER_BATCH_SIZE if settings.on_gpu else 8
    words = np.array(texts.num_words)
    ours = build_network(texts.vocab_size, settings)
    row = report.row("training", f"{count} documents, {texts.origin}", dtype=str(settings.dtype))
    row |= {"documents": count, "words": int(words.sum()), "size": size, "vocabulary": texts.vocab_size}
    row["config"] = dataclasses.asdict(ours.config)
    report.note(row, differs=check(settings, ours, texts))

    budget = int(size * words.mean())
    row["budget"] = budget
    by_size, by_steps = (
        {
            factor: DocumentBatcher(
                texts.documents, texts.labels, max_tokens=factor * budget, seed=1, group_by_steps=steps
            )
            for factor in (1, 4)
        }
        for steps in (False, True)
    )
    random = split_into_batches(range(count), size)
    sorted_batches = split_into_batches(np.argsort(words, kind="stable").tolist(), size)
    similar = [sorted_batches[n] for n in rng.permutation(len(sorted_batches))]
    packed_batches = [index.tolist() for index in by_steps[1].batches(0)]

    def measure(implementation: Implementation, batches: Sequence[Indices], layout: str) -> None:
        result, rounds = measure_implementation(report, row, implementation, "documents", "documents_s")
        if "ms" in result:
            result |= {"layout": layout, **describe_batches(batches, texts, layout)}
            result["end"] = statistics.fmean(float(loss) for loss in rounds[0][-4:])
            report.save()

    def measure_ours(name: str, data: DocumentBatcher) -> None:
        batches = [index.tolist() for index in data.batches(0)]
        measure(Implementation(name, lambda: build_our_round(settings, ours, data, batches)), batches, "packed")

    def measure_padded(name: str, batches: list[Indices], packed: bool) -> None:
        name = f"{name}, packed GRU" if packed else name
        measure(
            Implementation(name, lambda: build_padded_round(settings, ours, texts, batches, packed)), batches, "padded"
        )

    measure_ours("ours", by_steps[1])
    measure_padded("padded", random, False)
    measure_padded("padded, like lengths", similar, False)
    measure_padded("padded", random, True)
    measure_ours("ours, 4 × the words", by_steps[4])
    measure_ours("ours, by size", by_size[1])
    measure_padded("padded, by steps", packed_batches, False)
    measure_padded("padded, by steps", packed_batches, True)
    measure_padded("padded, like lengths", similar, True)


def build_our_round(
    settings: Settings, initial: HierarchicalAttentionNetwork, data: DocumentBatcher, batches: list[Indices]
) -> TrainingRun:
    model = HierarchicalAttentionNetwork(initial.config, initial.embedding.num_embeddings, initial.output.out_features)
    model.load_state_dict(initial.state_dict())
    config = TrainConfig(
        optimizer="adamw",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        schedule="constant",
        warmup_steps=0,
    )
    return build_learner_round(settings, model, config, [data.collate(indices) for indices in batches])


def build_padded_round(
    settings: Settings, initial: HierarchicalAttentionNetwork, texts: Reviews, batches: list[Indices], packed: bool
) -> TrainingRun:
    model = PaddedNetwork.copy_of(initial, packed).to(settings.device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )
    subsets = [texts.select(indices) for indices in batches]
    blocks = [pin_batch(settings, Block.from_documents(subset.documents, subset.labels)) for subset in subsets]

    def step(block: Block) -> Tensor:
        with settings.autocast():
            loss = model.loss(block.to(settings.device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return TrainingRun(lambda: [step(block) for block in blocks])


def choose_faster(results: dict[str, Any], name: str) -> str | None:
    """Return the faster one of a padded implementation with and without packed GRUs."""
    return r.fastest(results, [name, f"{name}, packed GRU"])[0]


def training_tables(rows: list[Row]) -> None:
    for row in rows:
        results = row["implementations"]
        bases = {name: choose_faster(results, name) for name in ("padded", "padded, like lengths")}
        row["ratios"] = r.ratios_to_peers(results, [base for base in bases.values() if base])
        lines = []
        for name, result in results.items():
            speed = [result.get(key) for key in ("documents_s", "ms")]
            counts = [f"{result[key]:,}" if key in result else "–" for key in ("batches", "steps")]
            share = f"{result['real']:.1%}" if "real" in result else "all"
            faster = [ratio(r.get(results, base), result.get("ms")) for base in bases.values()]
            lines.append([name, *speed, *counts, share, result.get("mib"), result.get("end"), *faster])
        head = ["implementation", "documents/s", "ms", "batches", "steps", "real", "MiB", "loss", "× a", "× b"]
        r.table(f"Training, {row['case']}, one round", head, lines)
        r.print_peers([base or f"{name} (not measured)" for name, base in bases.items()])
        print_differences(row)
        print(f"  our batches have {row['budget']:,} words, the mean of {row['size']} documents")


def print_differences(row: Row) -> None:
    if "differs" in row:
        print(f"  with equal weights, outputs differ by: {r.format_values(row['differs'], '.0e')}")


# --------------------------------------------------------------------------------------------- inference


def inference(report: Report, settings: Settings) -> None:
    texts = load_reviews("test", 12 if settings.quick else None)
    size, count = (3, 2) if settings.quick else (PAPER_BATCH_SIZE, 8)
    ours = build_network(texts.vocab_size, settings).eval()
    differs = check(settings, ours, texts)
    ours = ours.to(settings.device)
    orders = {
        "in the order of the file": list(range(len(texts.documents))),
        "sorted by their words": np.argsort(texts.num_words, kind="stable").tolist(),
    }
    for name, order in orders.items():
        batches = split_into_batches(order[: len(order) // size * size], size)
        spread = [batches[int((n + 0.5) * len(batches) / count)] for n in range(count)]
        subset = texts.select([n for batch in spread for n in batch])
        batches = split_into_batches(range(count * size), size)
        row = report.row("inference", name, "float32", origin=texts.origin, differs=differs)
        row |= {"documents": count * size, "words": sum(subset.num_words), "size": size}
        row |= {"load": os.getloadavg()[0], **describe_batches(batches, subset, "padded")}
        compare(report, row, settings, ours, subset, batches)


def compare(
    report: Report,
    row: Row,
    settings: Settings,
    ours: HierarchicalAttentionNetwork,
    texts: Reviews,
    index_batches: list[Indices],
) -> None:
    """Measure the padded network with both kinds of GRU once; then ours and the faster of these in turns."""
    data = DocumentBatcher(texts.documents, texts.labels, max_tokens=1, seed=1)
    batches = [data.collate(indices).to(settings.device) for indices in index_batches]
    subsets = [texts.select(indices) for indices in index_batches]
    blocks = [Block.from_documents(subset.documents, subset.labels).to(settings.device) for subset in subsets]

    def build_calls(packed: bool) -> list[Run]:
        model = PaddedNetwork.copy_of(ours, packed).to(settings.device)
        return [functools.partial(model, block) for block in blocks]

    calls = {"padded, packed GRU": build_calls(True), "padded": build_calls(False)}
    with torch.inference_mode():
        for name, batch_calls in calls.items():
            if report.seconds_left <= 0:
                report.failed(row, name, r.TIME_LIMIT)
                continue
            record(report, row, name, [sum(r.time_call(call) for call in batch_calls) * 1e3])
        best, _ = r.fastest(row["implementations"], list(calls))
        if best is not None:
            both = {"ours": [functools.partial(ours.logits, batch) for batch in batches], best: calls[best]}
            measure_in_turns(report, row, both, 3 if settings.quick else NUM_TURNS)


def measure_in_turns(report: Report, row: Row, calls: dict[str, list[Run]], turns: int) -> None:
    """Measure ours and another implementation. In each turn, both process one batch after the other.

    Other processes may run at any time; in turns they slow down both alike. ``in_turn`` is the median of the ratios
    within a turn, ``spread`` the least and the largest of them, ``best`` the ratio of the shortest times.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        if report.seconds_left <= 0 and turn > 1:
            break
        totals = dict.fromkeys(calls, 0.0)
        for batch in zip(*calls.values(), strict=True):
            for name, call in zip(calls, batch, strict=True):
                totals[name] += r.time_call(call) * 1e3
        for name in calls if turn else ():  # the first one warms up
            times[name].append(totals[name])
    for name, values in times.items():
        record(report, row, name, values)
    ours, theirs = times.values()
    ratios = [y / x for x, y in zip(ours, theirs, strict=True)]
    row |= {"in_turn": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}
    row |= {"best": min(theirs) / min(ours), "against": list(times)[1]}
    report.save()


def record(report: Report, row: Row, name: str, times: list[float]) -> None:
    result = row["implementations"][name] = r.summarize(times)
    result["documents_s"] = row["documents"] / result["ms"] * 1e3
    report.log(f"inference  {row['case']}  {name}: {r.number(result['ms'])} ms")
    report.save()


def inference_tables(rows: list[Row]) -> None:
    lines = []
    names = ("ours", "padded, packed GRU", "padded")
    for row in rows:
        results = row["implementations"]
        row["ratios"] = {f"ours / {name}": ratio(r.get(results, "ours"), r.get(results, name)) for name in names[1:]}
        rates = [r.get(results, name, "documents_s") for name in names]
        spread = "–".join(r.number(x) for x in row.get("spread", [])) or "–"
        lines.append([row["case"], f"{row['real']:.1%}", *rates, row.get("in_turn"), spread, row.get("best")])
    if not rows:
        return
    head = ["documents", "real", *names, "× median", "spread", "× best"]
    first = rows[0]
    title = f"Inference, {first['documents']} documents of {first['origin']}, batches of {first['size']}"
    r.table(f"{title}: documents per second", head, lines)
    print(f"  times as fast, in turns with the faster padded network: {first.get('against', 'none')}")
    # A padded network needs sorted documents to be fast; ours does not.
    rates = [r.get(rows[-1]["implementations"], choose_faster(rows[-1]["implementations"], "padded"), "documents_s"),
             r.get(first["implementations"], "ours", "documents_s")]  # fmt: skip
    speedup = ratio(rates[1], rates[0])
    if len(rows) == 2 and speedup:
        first["ratios"]["ours, unsorted / padded, sorted"] = 1 / speedup
        print(f"  ours in file order is {r.number(speedup)} times as fast as the padded network on sorted documents")
    print_differences(first)
    r.print_loads(rows)


# --------------------------------------------------------------------------------------------- baselines


def baselines(
    report: Report, settings: Settings, runs: Sequence[Path] = (), names: Sequence[str] = tuple(tfidf.TASKS)
) -> None:
    """Evaluate TF-IDF on each data set that is found, and note the scores of our runs."""
    run_scores = tfidf.load_scores(runs)
    for name in names:
        row = report.row("baselines", name, runs=[scores for scores in run_scores if scores["task"] == name])
        if report.seconds_left <= 0:
            report.failed(row, "TF-IDF", r.TIME_LIMIT)
            continue
        try:
            task = tfidf.TASKS[name]()
            if settings.quick:
                task = task.subset(200)
            result = tfidf.evaluate(task, lambda text, name=name: report.log(f"baselines  {name}  {text}"))
        except Exception as error:
            report.failed(row, "TF-IDF", r.short(error))
        else:
            row["implementations"]["TF-IDF"] = result
            report.log(f"baselines  {name}  accuracy {result['accuracy']:.4f}")
            report.save()
    others = [scores for scores in run_scores if scores["task"] not in names]
    if others:
        report.row("baselines", "other data", runs=others)


def baseline_tables(rows: list[Row]) -> None:
    lines: list[list[Any]] = []

    def add_line(task: str, name: str, scores: dict[str, Any], gain: float | None) -> None:
        values = [scores.get(key) for key in ("accuracy", "mean_error", "mean_error_of_mean")]
        cells = ["–" if x is None else f"{x:.4f}" for x in values]
        lines.append([task, name, *cells, "–" if gain is None else f"{gain:+.4f}"])

    for row in rows:
        base = row["implementations"].get("TF-IDF", {})
        if "accuracy" in base:
            add_line(row["case"], f"TF-IDF {base['grams']}, C = {base['C']:g}", base, None)
        for run in row["runs"]:
            comparable = "accuracy" in base and run.get("accuracy") is not None
            add_line(row["case"], run["run"], run, run["accuracy"] - base["accuracy"] if comparable else None)
    if lines:
        head = ["data", "model", "accuracy", "mean |error|", "of the mean", "gain"]
        r.table("On test data", head, lines)


# ---------------------------------------------------------------------------------------------------- main

SECTIONS: dict[str, tuple[Callable[..., None], Callable[[list[Row]], None]]] = {
    "inference": (inference, inference_tables),
    "training": (training, training_tables),
    "baselines": (baselines, baseline_tables),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = r.build_parser(__doc__, [*SECTIONS], seconds=None)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="evaluated runs to compare with TF-IDF")
    parser.add_argument("--data", action="append", choices=tfidf.TASKS, help="data set of a baseline; default: all")
    options = parser.parse_args(arguments)

    settings = Settings.from_options(options)
    names = r.list_sections(options, SECTIONS)
    seconds = options.seconds or (3600 if "baselines" in names else 540)
    report = Report("classify", settings.device, seconds=seconds, repeats=3 if settings.quick else 10)
    report.begin(options.out, quick=options.quick, section=options.section)
    for name in names:
        data = [task for task in tfidf.TASKS if task in (options.data or tfidf.TASKS)]
        report.run(SECTIONS, name, settings, **({"runs": options.runs, "names": data} if name == "baselines" else {}))
    for name in names:
        report.show(SECTIONS, name)
    report.end()


if __name__ == "__main__":
    main()
