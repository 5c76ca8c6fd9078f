"""How fast does a translator learn? Ours and the usual ways, side by side in one run.

    python bench/training.py [--section transformer|bahdanau|all] [--quick] [--out file.json]

transformer   Transformer base, sentences of 8 to 64 tokens, beside transformers' Marian with the same weights
bahdanau      the RNN with Bahdanau's attention, and its decoder alone, beside the usual loop over the steps

A step is what a training step is: a batch from the host to the device, loss, gradients, Adam (fused). It is
measured in rounds over several batches, and nothing waits in between. tokens/s counts labels of the target,
never padding. On CUDA everything is bfloat16 by autocast. Without a GPU it is float32 and small, and the
figures only show that the code runs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report as r
import torch
from peer_models import Loop, Step, load_marian, marian_loss
from random_text import Sides, Text
from report import Report, Row, Run, ratio
from torch import Tensor, nn

import jumok
from jumok.batches.tokens import BOS, EOS, IGNORE, Seq2SeqBatch, Tokens
from jumok.data.batching.length_batching import KERNEL_BLOCK, pack_sequences, pad_array
from jumok.export.marian import export_marian
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig, Seq2SeqState
from jumok.models.transformer import Transformer, TransformerConfig
from jumok.training.cuda_graphs import CudaGraphGradients
from jumok.training.prefetch import pin_memory

# A way is left out where fewer seconds are left than it may take on a GPU, compiled or not.
COMPILING, LAUNCHING = 60, 15
Objective = Callable[[Seq2SeqBatch], Tensor]  # from a batch on the device to the loss a label


@dataclass(frozen=True)
class Plan:
    """Where and how much to measure."""

    device: torch.device
    quick: bool
    compile: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def batches(self) -> int:
        """How many come in turn."""
        return 4 if self.on_gpu and not self.quick else 2

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu)

    def batch(self, sides: Sides, **how: Any) -> Seq2SeqBatch:
        """A batch on the host, as the threads of a training loop leave it."""
        batch = Seq2SeqBatch.from_sequences(*sides, **how)
        return pin_memory(batch) if self.on_gpu else batch


# ---------------------------------------------------------------------------------------------------- a way


@dataclass(frozen=True)
class Ready:
    """A way that can be measured. ``start()`` is a number that all ways must agree in, to about a percent."""

    run: Run
    start: Callable[[], float]


@dataclass(frozen=True)
class Way:
    """One way of a row."""

    name: str
    make: Callable[[], Ready]
    compiles: bool = False


def measure(report: Report, row: Row, way: Way) -> None:
    """Make one way and measure it."""
    needs = COMPILING if way.compiles else LAUNCHING
    if report.device.type == "cuda" and report.left < needs:
        return report.failed(row, way.name, f"skipped, it may take {needs} s and {report.left:.0f} are left")
    try:
        ready = way.make()
        start = ready.start()
    except Exception as error:
        return report.failed(row, way.name, r.short(error))
    found = report.measure(row, way.name, ready.run, hide_launches=False)
    found["start"] = start
    if "ms" in found:
        found["tokens_s"] = row["labels"] / found["ms"] * 1e3
    del ready
    torch._dynamo.reset()  # what was compiled for one way shall not make the next one dynamic
    r.tidy(report.device)
    return report.save()


def learning(
    plan: Plan, model: nn.Module, objective: Objective, batches: Sequence[Seq2SeqBatch], graph: bool = False
) -> Run:
    """A round of training steps; as a ``graph``, loss and gradients are one CUDA graph."""

    def run(batch: Seq2SeqBatch, scale: Tensor | None = None) -> Tensor:
        with plan.autocast():
            value = objective(batch)
        (value if scale is None else value * scale).backward()
        return value.detach()

    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    gradients = CudaGraphGradients(run, learned, plan.device)

    def step(batch: Seq2SeqBatch) -> Tensor:
        value = gradients(batch, 1.0) if graph else run(batch.to(plan.device))
        optimizer.step()
        optimizer.zero_grad()
        return value

    return lambda: [step(batch) for batch in batches]


def start_of(plan: Plan, model: nn.Module, objective: Objective, batch: Seq2SeqBatch) -> Callable[[], float]:
    """The loss before anything was learned, without dropout."""

    @torch.no_grad()
    def start() -> float:
        model.eval()
        with plan.autocast():
            value = float(objective(batch.to(plan.device)))
        model.train()
        return value

    return start


def weights(model: nn.Module) -> int:
    """How many are learned. Marian's parameters hold a table of positions, which gets no gradient."""
    named = model.named_parameters()
    return sum(parameter.numel() for name, parameter in named if "embed_positions" not in name)


# ---------------------------------------------------------------------------------------------- transformer


def transformer_size(plan: Plan) -> tuple[TransformerConfig, Text]:
    def config(width: int, heads: int, layers: int) -> TransformerConfig:
        layers_of = {"encoder_layers": layers, "decoder_layers": layers}
        return TransformerConfig(
            width=width, num_heads=heads, feed_forward_width=4 * width, tie_embeddings="all", **layers_of
        )

    if plan.on_gpu:
        return config(512, 8, 6), Text(400, 8, 64, 32000)
    return (config(16, 2, 1), Text(5, 3, 9, 67)) if plan.quick else (config(64, 4, 2), Text(32, 8, 64, 2000))


def transformer(report: Report, plan: Plan) -> None:
    config, text = transformer_size(plan)
    drawn = text.draw(plan.batches)
    packed = pack_with_equal_shapes(plan, drawn)
    padded = [plan.batch(sides) for sides in drawn]
    fixed = [plan.batch(sides, min_lengths=(text.longest, text.longest)) for sides in drawn]
    torch.manual_seed(0)
    ours = Transformer(config, text.vocabulary, text.vocabulary)

    case = f"{config.encoder_layers}+{config.decoder_layers} layers of {config.width}, {text.pairs} pairs"
    row = report.row("transformer", case, "training", dtype=str(plan.dtype), steps=plan.batches)
    real = sum(len(sentence) + 1 for sides in drawn for side in sides for sentence in side)
    shares = {"packed": real / places(packed), "padded": real / places(padded)}
    row |= {
        "labels": sum(batch.count for batch in padded),
        "real": shares,
        "weights": {"ours": weights(ours)},
    }
    report.note(row, path=path(plan, config, packed[0]))

    def our(batches: list[Seq2SeqBatch], compiled: bool, graph: bool = False) -> Ready:
        model = copy.deepcopy(ours).to(plan.device).train()
        if compiled:
            model.compile()

        def objective(batch: Seq2SeqBatch) -> Tensor:
            return model.loss(batch).total / batch.count

        start = start_of(plan, model, objective, batches[0])
        return Ready(learning(plan, model, objective, batches, graph), start)

    def marian(batches: list[Seq2SeqBatch], compiler: Callable[..., Any] | None = None) -> Ready:
        model = load_marian(exported).to(plan.device).train()
        row["weights"]["marian"] = weights(model)

        def objective(loss: Callable[..., Tensor], batch: Seq2SeqBatch) -> Tensor:
            source = batch.source.ids, batch.source.valid_mask.long()
            return loss(*source, batch.target.ids, batch.labels) / batch.count

        smoothed = marian_loss(model, config.label_smoothing)
        learned = functools.partial(objective, compiler(smoothed) if compiler else smoothed)
        plain = functools.partial(objective, marian_loss(model, 0.0))
        start = start_of(plan, model, plain, batches[0])
        return Ready(learning(plan, model, learned, batches), start)

    ways = [
        Way("ours", lambda: our(packed, plan.compile, plan.on_gpu), plan.compile),
        Way("marian", lambda: marian(padded)),
        Way("marian, compiled", lambda: marian(padded, torch.compile), True),
        Way("ours, launched", lambda: our(packed, plan.compile), plan.compile),
        Way("ours, padded", lambda: our(padded, plan.compile), plan.compile),
        Way("ours, eager", lambda: our(packed, False)),
        Way("marian, compiled, fixed", lambda: marian(fixed, r.compiled), True),
    ]
    with tempfile.TemporaryDirectory() as folder:
        exported = export_marian(ours, Path(folder, "marian"))
        for way in ways:
            if plan.compile or way.name in ("ours", "ours, padded", "marian"):
                measure(report, row, way)


def pack_with_equal_shapes(plan: Plan, drawn: Sequence[Sides]) -> list[Seq2SeqBatch]:
    """Packed as `jumok train` does it, and both sides of all batches of one length: compiled once."""
    totals = [sum(len(sentence) + 1 for sentence in side) for sides in drawn for side in sides]
    fillers = (max(totals) - min(totals)) // KERNEL_BLOCK + 2  # so that none is longer than LEAST
    to = -(-(max(totals) + fillers) // KERNEL_BLOCK) * KERNEL_BLOCK

    def joined(sentences: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        return np.concatenate(sentences), np.array([len(sentence) for sentence in sentences])

    def batch(sources: list[list[int]], targets: list[list[int]]) -> Seq2SeqBatch:
        given, told, said = (
            joined(side)
            for side in (
                [[*words, EOS] for words in sources],
                [[BOS, *words] for words in targets],
                [[*words, EOS] for words in targets],
            )
        )
        labels = torch.from_numpy(pad_array(said[0], to, IGNORE))[None]
        source, target = (pack_sequences(*side, to, fillers) for side in (given, told))
        made = Seq2SeqBatch(source, target, labels, len(said[0]))
        return pin_memory(made) if plan.on_gpu else made

    return [batch(*sides) for sides in drawn]


def places(batches: Sequence[Seq2SeqBatch]) -> int:
    """Of tokens, those of padding among them."""
    return sum(side.ids.numel() for batch in batches for side in (batch.source, batch.target))


def path(plan: Plan, config: TransformerConfig, batch: Seq2SeqBatch) -> str:
    """How the attention of a packed batch is computed: of source, target, and from target to source."""

    def heads(tokens: Tokens) -> Tensor:
        size = 1, config.num_heads, tokens.ids.shape[1], config.width // config.num_heads
        return torch.zeros(size, dtype=plan.dtype, device=plan.device)

    source, target = heads(batch.source), heads(batch.target)
    calls = [
        (source, source, batch.source.mask),
        (target, target, batch.target.causal_mask),
        (target, source, batch.source.cross_attention_mask(batch.target)),
    ]
    told = (str(jumok.explain(query, key, key, mask=mask)).splitlines()[0] for query, key, mask in calls)
    return "; ".join(dict.fromkeys(told))


def transformer_tables(rows: list[Row]) -> None:
    for row in rows:
        peers = ["marian", "marian, compiled", "marian, compiled, fixed"]
        table(row, f"Transformer, {row['case']}", peers)
        told = ", ".join(f"{name} {share:.0%}" for name, share in row["real"].items())
        print(f"  real tokens of all that are computed: {told}")
        print(f"  attention, packed: {row['path']}")


# ------------------------------------------------------------------------------------------------- bahdanau


def bahdanau_size(plan: Plan) -> tuple[Seq2SeqConfig, Text]:
    """As in the paper; without dropout, so that outputs can be compared."""

    def config(width: int, embedding: int) -> Seq2SeqConfig:
        return Seq2SeqConfig(width=width, embedding_width=embedding, dropout=0.0)

    if plan.on_gpu:
        return config(1000, 620), Text(80, 50, 50, 30000)
    return (config(12, 10), Text(3, 5, 5, 31)) if plan.quick else (config(64, 40), Text(16, 20, 20, 1000))


def bahdanau(report: Report, plan: Plan) -> None:
    config, text = bahdanau_size(plan)
    torch.manual_seed(0)
    ours = Seq2Seq(config, text.vocabulary, text.vocabulary)
    batches = [plan.batch(sides) for sides in text.draw(plan.batches)]
    case = f"width {config.width}, {text.pairs} pairs of {text.longest}, {text.vocabulary} words"
    counts = {"ours": weights(ours), "loop": weights(Loop(ours))}
    row = report.row("bahdanau", case, "training", dtype=str(plan.dtype), steps=len(batches), weights=counts)
    report.note(row, labels=sum(batch.count for batch in batches))
    whole(report, plan, row, ours, batches)
    row = report.row("bahdanau", case, "decoder", dtype=str(plan.dtype), steps=1, labels=batches[0].count)
    decoder(report, plan, row, ours, batches[0])


def bahdanau_ways(plan: Plan, our: Callable[[bool], Ready], loop: Callable[[Step, bool], Ready]) -> list[Way]:
    """``our(graph)`` and ``loop(step, graph)``, as often as it makes sense here."""
    ways = [Way("ours", lambda: our(False)), Way("loop", lambda: loop(Loop.step, False))]
    if plan.on_gpu:
        ways += [Way("ours, graph", lambda: our(True)), Way("loop, graph", lambda: loop(Loop.step, True))]
    if plan.compile:
        ways.append(Way("loop, compiled", lambda: loop(r.compiled(Loop.step), False), True))
    if plan.compile and plan.on_gpu:
        ways.append(Way("loop, compiled, graph", lambda: loop(r.compiled(Loop.step), True), True))
    return ways


def whole(report: Report, plan: Plan, row: Row, ours: Seq2Seq, batches: list[Seq2SeqBatch]) -> None:
    """Encoder, decoder, generator and optimiser."""

    def our(graph: bool) -> Ready:
        model = copy.deepcopy(ours).to(plan.device)

        def objective(batch: Seq2SeqBatch) -> Tensor:
            return model.loss(batch).total / batch.count

        start = start_of(plan, model, objective, batches[0])
        return Ready(learning(plan, model, objective, batches, graph), start)

    def loop(step: Step, graph: bool) -> Ready:
        model = Loop(ours).to(plan.device)

        def objective(step: Step, batch: Seq2SeqBatch) -> Tensor:
            return model.loss(batch, step) / batch.count

        start = start_of(plan, model, functools.partial(objective, Loop.step), batches[0])
        return Ready(learning(plan, model, functools.partial(objective, step), batches, graph), start)

    for way in bahdanau_ways(plan, our, loop):
        measure(report, row, way)


def decoder(report: Report, plan: Plan, row: Row, ours: Seq2Seq, batch: Seq2SeqBatch) -> None:
    """From annotations and embedded words to what the generator reads, and all gradients back."""
    config, plain = ours.config, Loop(ours).to(plan.device)
    ours = copy.deepcopy(ours).to(plan.device)
    rows, length = batch.target.ids.shape

    def random(*size: int, dtype: torch.dtype = plan.dtype) -> Tensor:
        return (torch.randn(*size, device=plan.device) / 2).to(dtype).requires_grad_()

    words = random(rows, length, config.embedding_width, dtype=torch.float32)
    annotations, first = random(rows, length, config.annotation_width), random(rows, config.width)
    upstream = random(rows, length, ours.decoder.readout.width).detach()
    attention: Any = ours.decoder.attention

    def with_gradients(decode: Callable[[], Tensor], parts: Sequence[nn.Module], graph: bool) -> Ready:
        leaves = [words, annotations, first, *(p for part in parts for p in part.parameters())]

        def run() -> list[Tensor]:
            with plan.autocast():
                out = decode()
            return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

        replay, written = r.captured(run) if graph else (run, None)

        def start() -> float:
            came = replay()
            return float((came if written is None else written)[0].double().norm())

        return Ready(replay, start)

    def our(graph: bool = False) -> Ready:
        def decode() -> Tensor:
            state = Seq2SeqState((first[None],), attention.prepare(annotations))
            return ours.decoder(words, state)[1]

        return with_gradients(decode, [ours.decoder], graph)

    def loop(step: Step = Loop.step, graph: bool = False) -> Ready:
        parts = [plain.query, plain.key, plain.v, plain.cell, plain.readout]
        return with_gradients(lambda: plain.decode(words, annotations, first, step), parts, graph)

    for way in bahdanau_ways(plan, our, loop):
        measure(report, row, way)
    try:
        names = ("out", "words", "annotations", "first state")  # and their gradients, but for out
        errors = r.relative_errors(our().run()[:4], loop().run()[:4])
        report.note(row, differs=dict(zip(names, errors, strict=True)))
    except Exception as error:
        report.note(row, errors={"error": r.short(error)})


def bahdanau_tables(rows: list[Row]) -> None:
    for row in rows:
        peers = ["loop", "loop, graph", "loop, compiled", "loop, compiled, graph"]
        table(row, f"Bahdanau, {row['pass']}, {row['case']}", peers)
        if "differs" in row:
            told = ", ".join(f"{name} {error:.1e}" for name, error in row["differs"].items())
            print(f"  what ours and the loop give differs by: {told}")


# ----------------------------------------------------------------------------------------------------- main


def table(row: Row, title: str, peers: Sequence[str]) -> None:
    """Every way: its time, and how many times as fast as each peer it is."""
    ways, start = row["ways"], "|out|" if row["pass"] == "decoder" else "loss"
    peers = [peer for peer in peers if peer in ways]
    row["ratios"] = {
        f"{name} / {peer}": ratio(r.get(ways, name), r.get(ways, peer))
        for name in ways
        for peer in peers
        if name.startswith("ours")
    }
    lines = []
    for name, way in ways.items():
        a_step = [ratio(way.get(what), row["steps"]) for what in ("ms", "host_ms")]
        more = [way.get(what) for what in ("tokens_s", "mib", "first_s", "start")]
        lines.append([name, *a_step, *more, *(ratio(r.get(ways, peer), way.get("ms")) for peer in peers)])
    marks = "abcd"[: len(peers)]
    head = ["way", "ms", "launch", "tokens/s", "MiB", "first s", start, *(f"× {mark}" for mark in marks)]
    r.table(f"{title}: ms a step, labels a second, times as fast", head, lines)
    print("  times as fast as " + ", ".join(f"{m}: {peer}" for m, peer in zip(marks, peers, strict=True)))
    if "weights" in row:
        print("  weights: " + ", ".join(f"{name} {count:,}" for name, count in row["weights"].items()))
    starts = [way["start"] for way in ways.values() if "start" in way]
    if starts and not max(starts) - min(starts) <= 0.01 * abs(max(starts)):
        print(f"  DIFFERENT: {start} at the start is {', '.join(f'{x:.4g}' for x in starts)}")


SECTIONS = {"transformer": (transformer, transformer_tables), "bahdanau": (bahdanau, bahdanau_tables)}


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
    report = Report("training", device, seconds=chosen.seconds, repeats=3 if plan.quick else 10)
    report.begin(chosen.out, quick=chosen.quick, section=chosen.section)
    if plan.on_gpu:
        torch.set_float32_matmul_precision("high")

    names = list(SECTIONS) if chosen.section == "all" else [chosen.section]
    for name in names:
        report.run(SECTIONS, name, plan)
    for name in names:
        report.show(SECTIONS, name)
    report.end()


if __name__ == "__main__":
    main()
