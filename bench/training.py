"""Training speed of translators, compared with the usual implementations in one process.

    python bench/training.py [--section transformer|bahdanau|host|host-bahdanau|all] [--quick] [--out file.json]

transformer   Transformer base, sentences of 8 to 64 tokens, and transformers' Marian with the same weights
bahdanau      the RNN with Bahdanau's attention, and its decoder alone, and the usual loop over the steps
host          host time: tiny widths on a CPU, so that Python and dispatch are all that is measured. 6+6 layers
              of the Transformer and of Marian, in float32 and under autocast, in turns, on one thread
host-bahdanau host time of the RNN and of its decoder alone, with counts of host operations

A step copies a batch from the host to the device and computes loss, gradients and Adam (fused). A round of
several steps is measured, without waiting in between. tokens/s counts target labels, never padding. On CUDA
everything is bfloat16 by autocast. Without a GPU it is float32 and small, and the first two sections only show
that the code runs.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report as r
import torch
from host_time import measure_host_time, show_host_time
from peer_models import Loop, Step, load_marian, marian_loss
from random_text import Sides, Text
from report import Report, Row, Run, Settings, ratio
from torch import Tensor, nn
from training_runs import (
    Implementation,
    TrainingRun,
    build_round,
    build_start,
    count_weights,
    measure_implementation,
    pin_batch,
)

import jumok
from jumok.batches.tokens import BOS, EOS, IGNORE, Seq2SeqBatch, Tokens
from jumok.data.batching.length_batching import KERNEL_BLOCK, pack_sequences, pad_array
from jumok.export.marian import export_marian
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig, Seq2SeqState
from jumok.models.transformer import Transformer, TransformerConfig


def build_batch(settings: Settings, sides: Sides, **options: Any) -> Seq2SeqBatch:
    return pin_batch(settings, Seq2SeqBatch.from_sequences(*sides, **options))  # type: ignore[no-any-return]


def measure(report: Report, row: Row, implementation: Implementation) -> None:
    measure_implementation(report, row, implementation, "labels", "tokens_s")


# ---------------------------------------------------------------------------------------------- transformer


def transformer_size(settings: Settings) -> tuple[TransformerConfig, Text]:
    def config(width: int, heads: int, layers: int) -> TransformerConfig:
        layers_of = {"encoder_layers": layers, "decoder_layers": layers}
        return TransformerConfig(
            width=width, num_heads=heads, feed_forward_width=4 * width, tie_embeddings="all", **layers_of
        )

    if settings.on_gpu:
        return config(512, 8, 6), Text(400, 8, 64, 32000)
    return (config(16, 2, 1), Text(5, 3, 9, 67)) if settings.quick else (config(64, 4, 2), Text(32, 8, 64, 2000))


def transformer(report: Report, settings: Settings) -> None:
    config, text = transformer_size(settings)
    pairs = text.draw(settings.num_batches)
    packed = pack_with_equal_shapes(settings, pairs)
    padded = [build_batch(settings, sides) for sides in pairs]
    fixed = [build_batch(settings, sides, min_lengths=(text.longest, text.longest)) for sides in pairs]
    torch.manual_seed(0)
    ours = Transformer(config, text.vocab_size, text.vocab_size)

    case = f"{config.encoder_layers}+{config.decoder_layers} layers of {config.width}, {text.pairs} pairs"
    row = report.row("transformer", case, "training", dtype=str(settings.dtype), steps=settings.num_batches)
    real = sum(len(sentence) + 1 for sides in pairs for side in sides for sentence in side)
    shares = {"packed": real / count_tokens(packed), "padded": real / count_tokens(padded)}
    row |= {
        "labels": sum(batch.count for batch in padded),
        "real": shares,
        "weights": {"ours": count_weights(ours)},
    }
    report.note(row, path=describe_paths(settings, config, packed[0]))

    our = functools.partial(build_our_run, settings, ours)
    marian = functools.partial(build_marian_run, settings, config.label_smoothing)

    implementations = [
        Implementation("ours", lambda: our(packed, settings.compile, settings.on_gpu), settings.compile),
        Implementation("marian", lambda: marian(load_marian(exported), padded)),
        Implementation("marian, compiled", lambda: marian(load_marian(exported), padded, torch.compile), True),
        Implementation("ours, launched", lambda: our(packed, settings.compile), settings.compile),
        Implementation("ours, padded", lambda: our(padded, settings.compile), settings.compile),
        Implementation("ours, eager", lambda: our(packed, False)),
        Implementation("marian, compiled, fixed", lambda: marian(load_marian(exported), fixed, r.compiled), True),
    ]
    with tempfile.TemporaryDirectory() as folder:
        exported = export_marian(ours, Path(folder, "marian"))
        row["weights"]["marian"] = count_weights(load_marian(exported))
        for implementation in implementations:
            if settings.compile or implementation.name in ("ours", "ours, padded", "marian"):
                measure(report, row, implementation)


def build_our_run(
    settings: Settings, ours: Transformer, batches: list[Seq2SeqBatch], compiled: bool, graph: bool = False
) -> TrainingRun:
    model = copy.deepcopy(ours).to(settings.device).train()
    if compiled:
        model.compile()

    def objective(batch: Seq2SeqBatch) -> Tensor:
        return model.loss(batch).total / batch.count

    start = build_start(settings, model, objective, batches[0])
    return build_round(settings, model, objective, batches, start=start, graph=graph)


def build_marian_run(
    settings: Settings,
    smoothing: float,
    marian: Any,
    batches: list[Seq2SeqBatch],
    compiler: Callable[..., Any] | None = None,
) -> TrainingRun:
    model = marian.to(settings.device).train()

    def objective(loss: Callable[..., Tensor], batch: Seq2SeqBatch) -> Tensor:
        source = batch.source.ids, batch.source.valid_mask.long()
        return loss(*source, batch.target.ids, batch.labels) / batch.count

    smoothed = marian_loss(model, smoothing)
    trained = functools.partial(objective, compiler(smoothed) if compiler else smoothed)
    plain = functools.partial(objective, marian_loss(model, 0.0))
    start = build_start(settings, model, plain, batches[0])
    return build_round(settings, model, trained, batches, start=start)


def pack_with_equal_shapes(settings: Settings, pairs: Sequence[Sides]) -> list[Seq2SeqBatch]:
    """Pack as `jumok train` does, with equal lengths of both sides of all batches, so that it compiles once."""
    totals = [sum(len(sentence) + 1 for sentence in side) for sides in pairs for side in sides]
    fillers = (max(totals) - min(totals)) // KERNEL_BLOCK + 2  # so that none is longer than LEAST
    length = -(-(max(totals) + fillers) // KERNEL_BLOCK) * KERNEL_BLOCK

    def join(sentences: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        return np.concatenate(sentences), np.array([len(sentence) for sentence in sentences])

    def batch(sources: list[list[int]], targets: list[list[int]]) -> Seq2SeqBatch:
        source, target, labels = (
            join(side)
            for side in (
                [[*words, EOS] for words in sources],
                [[BOS, *words] for words in targets],
                [[*words, EOS] for words in targets],
            )
        )
        padded_labels = torch.from_numpy(pad_array(labels[0], length, IGNORE))[None]
        sides = (pack_sequences(*side, length, fillers) for side in (source, target))
        packed = Seq2SeqBatch(*sides, padded_labels, len(labels[0]))
        return pin_batch(settings, packed)  # type: ignore[no-any-return]

    return [batch(*sides) for sides in pairs]


def count_tokens(batches: Sequence[Seq2SeqBatch]) -> int:
    """Number of tokens, including padding."""
    return sum(side.ids.numel() for batch in batches for side in (batch.source, batch.target))


def describe_paths(settings: Settings, config: TransformerConfig, batch: Seq2SeqBatch) -> str:
    """Return how attention of a packed batch is computed: of source, target, and from target to source."""

    def heads(tokens: Tokens) -> Tensor:
        size = 1, config.num_heads, tokens.ids.shape[1], config.width // config.num_heads
        return torch.zeros(size, dtype=settings.dtype, device=settings.device)

    source, target = heads(batch.source), heads(batch.target)
    calls = [
        (source, source, batch.source.mask),
        (target, target, batch.target.causal_mask),
        (target, source, batch.source.cross_attention_mask(batch.target)),
    ]
    text = (str(jumok.explain(query, key, key, mask=mask)).splitlines()[0] for query, key, mask in calls)
    return "; ".join(dict.fromkeys(text))


def transformer_tables(rows: list[Row]) -> None:
    for row in rows:
        peers = ["marian", "marian, compiled", "marian, compiled, fixed"]
        table(row, f"Transformer, {row['case']}", peers)
        print(f"  share of real tokens: {r.format_values(row['real'], '.0%')}")
        print(f"  attention, packed: {row['path']}")


# ------------------------------------------------------------------------------------------------- bahdanau


def bahdanau_size(settings: Settings) -> tuple[Seq2SeqConfig, Text]:
    """As in the paper; without dropout, so that outputs can be compared."""

    def config(width: int, embedding: int) -> Seq2SeqConfig:
        return Seq2SeqConfig(width=width, embedding_width=embedding, dropout=0.0)

    if settings.on_gpu:
        return config(1000, 620), Text(80, 50, 50, 30000)
    return (config(12, 10), Text(3, 5, 5, 31)) if settings.quick else (config(64, 40), Text(16, 20, 20, 1000))


def bahdanau(report: Report, settings: Settings) -> None:
    config, text = bahdanau_size(settings)
    torch.manual_seed(0)
    ours = Seq2Seq(config, text.vocab_size, text.vocab_size)
    batches = [build_batch(settings, sides) for sides in text.draw(settings.num_batches)]
    case = f"width {config.width}, {text.pairs} pairs of {text.longest}, {text.vocab_size} words"
    counts = {"ours": count_weights(ours), "loop": count_weights(Loop(ours))}
    row = report.row("bahdanau", case, "training", dtype=str(settings.dtype), steps=len(batches), weights=counts)
    report.note(row, labels=sum(batch.count for batch in batches))
    for implementation in bahdanau_implementations(settings, *build_training(settings, ours, batches)):
        measure(report, row, implementation)
    row = report.row("bahdanau", case, "decoder", dtype=str(settings.dtype), steps=1, labels=batches[0].count)
    our, loop = build_decoding(settings, ours, batches[0])
    for implementation in bahdanau_implementations(settings, our, loop):
        measure(report, row, implementation)
    compare_outputs(report, row, our(False).run, loop(Loop.step, False).run)


def bahdanau_implementations(
    settings: Settings, our: Callable[[bool], TrainingRun], loop: Callable[[Step, bool], TrainingRun]
) -> list[Implementation]:
    """Return the variants of ``our(graph)`` and ``loop(step, graph)`` that this machine can run."""
    implementations = [
        Implementation("ours", lambda: our(False)),
        Implementation("loop", lambda: loop(Loop.step, False)),
    ]
    if settings.on_gpu:
        implementations += [
            Implementation("ours, graph", lambda: our(True)),
            Implementation("loop, graph", lambda: loop(Loop.step, True)),
        ]
    if settings.compile:
        implementations.append(Implementation("loop, compiled", lambda: loop(r.compiled(Loop.step), False), True))
    if settings.compile and settings.on_gpu:
        implementations.append(Implementation("loop, compiled, graph", lambda: loop(r.compiled(Loop.step), True), True))
    return implementations


# The arguments ``our`` and ``loop`` of ``bahdanau_implementations``.
RunBuilders = tuple[Callable[[bool], TrainingRun], Callable[[Step, bool], TrainingRun]]


def build_training(settings: Settings, ours: Seq2Seq, batches: list[Seq2SeqBatch]) -> RunBuilders:
    """Encoder, decoder, generator and optimizer."""

    def our(graph: bool) -> TrainingRun:
        model = copy.deepcopy(ours).to(settings.device)

        def objective(batch: Seq2SeqBatch) -> Tensor:
            return model.loss(batch).total / batch.count

        start = build_start(settings, model, objective, batches[0])
        return build_round(settings, model, objective, batches, start=start, graph=graph)

    def loop(step: Step, graph: bool) -> TrainingRun:
        model = Loop(ours).to(settings.device)

        def objective(step: Step, batch: Seq2SeqBatch) -> Tensor:
            return model.loss(batch, step) / batch.count

        start = build_start(settings, model, functools.partial(objective, Loop.step), batches[0])
        run = functools.partial(objective, step)
        return build_round(settings, model, run, batches, start=start, graph=graph)

    return our, loop


def build_decoding(settings: Settings, ours: Seq2Seq, batch: Seq2SeqBatch) -> RunBuilders:
    """Forward and backward pass of the decoder: from annotations and embedded words to its readouts."""
    config, plain = ours.config, Loop(ours).to(settings.device)
    ours = copy.deepcopy(ours).to(settings.device)
    rows, length = batch.target.ids.shape

    def random(*size: int, dtype: torch.dtype = settings.dtype) -> Tensor:
        return (torch.randn(*size, device=settings.device) / 2).to(dtype).requires_grad_()

    words = random(rows, length, config.embedding_width, dtype=torch.float32)
    annotations, first = random(rows, length, config.annotation_width), random(rows, config.width)
    upstream = random(rows, length, ours.decoder.readout.width).detach()
    attention: Any = ours.decoder.attention

    def with_gradients(decode: Callable[[], Tensor], parts: Sequence[nn.Module], graph: bool) -> TrainingRun:
        leaves = [words, annotations, first, *(p for part in parts for p in part.parameters())]

        def run() -> list[Tensor]:
            with settings.autocast():
                out = decode()
            return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

        replay, outputs = r.captured(run) if graph else (run, None)

        def start() -> float:
            results = replay()
            return float((results if outputs is None else outputs)[0].double().norm())

        return TrainingRun(replay, start)

    def our(graph: bool) -> TrainingRun:
        def decode() -> Tensor:
            state = Seq2SeqState((first[None],), attention.prepare(annotations))
            return ours.decoder(words, state)[1]

        return with_gradients(decode, [ours.decoder], graph)

    def loop(step: Step, graph: bool) -> TrainingRun:
        parts = [plain.query, plain.key, plain.v, plain.cell, plain.readout]
        return with_gradients(lambda: plain.decode(words, annotations, first, step), parts, graph)

    return our, loop


def compare_outputs(report: Report, row: Row, ours: Run, loop: Run) -> None:
    """Note how much the decoders' output and the gradients of the inputs differ."""
    try:
        names = ("out", "words", "annotations", "first state")  # and their gradients, but for out
        errors = r.relative_errors(ours()[:4], loop()[:4])
        report.note(row, differs=dict(zip(names, errors, strict=True)))
    except Exception as error:
        report.note(row, errors={"error": r.short(error)})


def bahdanau_tables(rows: list[Row]) -> None:
    for row in rows:
        peers = ["loop", "loop, graph", "loop, compiled", "loop, compiled, graph"]
        table(row, f"Bahdanau, {row['pass']}, {row['case']}", peers)
        if "differs" in row:
            print(f"  ours and the loop differ by: {r.format_values(row['differs'], '.1e')}")


# ---------------------------------------------------------------------------------------------------- host


def host(report: Report, settings: Settings) -> None:
    """Measure the least milliseconds of a training step on one CPU thread, with tiny widths."""
    layers = 1 if settings.quick else 6
    config = TransformerConfig(
        width=16, num_heads=2, feed_forward_width=32, encoder_layers=layers, decoder_layers=layers, tie_embeddings="all"
    )
    text = Text(4, 4, 8, 97)
    torch.manual_seed(0)
    ours = Transformer(config, text.vocab_size, text.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        marian = load_marian(export_marian(ours, Path(folder, "marian")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        on_cpu = Settings(torch.device("cpu"), settings.quick, settings.compile, dtype)
        # Equal shapes, for which the compiler makes its fastest code.
        lengths = text.longest, text.longest
        batches = [build_batch(on_cpu, sides, min_lengths=lengths) for sides in text.draw(on_cpu.num_batches)]
        build_marian = functools.partial(build_marian_run, on_cpu, config.label_smoothing)
        training_runs = {
            "ours, eager": build_our_run(on_cpu, ours, batches, compiled=False),
            "marian": build_marian(copy.deepcopy(marian), batches),
        }
        if on_cpu.compile:
            training_runs["ours, compiled"] = build_our_run(on_cpu, ours, batches, compiled=True)
            training_runs["marian, compiled"] = build_marian(copy.deepcopy(marian), batches, r.compiled)
        case = f"{layers}+{layers} layers of {config.width}, {text.pairs} pairs"
        row = report.row("host", case, str(dtype), steps=len(batches), load=os.getloadavg()[0])
        starts = {name: training_run.start() for name, training_run in training_runs.items()}
        training_rounds = {name: training_run.run for name, training_run in training_runs.items()}
        least = r.least_in_turns(training_rounds, repeats=2 if settings.quick else 30, calls=1)
        row["implementations"] = {
            name: {"ms": ms, "step_ms": ms / len(batches), "start": starts[name]} for name, ms in least.items()
        }
        own, peers = ([name for name in least if name.startswith(side)] for side in ("ours", "marian"))
        ratios = {f"{name} / {peer}": ratio(least[name], least[peer]) for name in own for peer in peers}
        report.note(row, ratios=ratios)
    torch.set_num_threads(threads)


def host_tables(rows: list[Row]) -> None:
    for row in rows:
        lines = [[name, result["step_ms"], result["start"]] for name, result in row["implementations"].items()]
        title = f"Host time, {row['case']}, {row['pass']}: ms per step on one CPU thread"
        r.table(title, ["implementation", "ms", "loss"], lines)
        print("  time of ours / peer: " + ", ".join(f"{name}: {x:.2f}" for name, x in row["ratios"].items()))


def host_bahdanau(report: Report, settings: Settings) -> None:
    """Host time of Bahdanau's model. Sources are short: on a GPU, cuDNN runs the encoder in one call."""
    source_length, steps, vocab_size = 3, 50, 31
    on_cpu = Settings(torch.device("cpu"), settings.quick, False, torch.float32)
    torch.manual_seed(0)
    ours = Seq2Seq(Seq2SeqConfig(width=16, embedding_width=16, dropout=0.0), vocab_size, vocab_size)
    words = torch.randint(EOS + 1, vocab_size, (2, 2, steps - 1)).tolist()
    batch = build_batch(on_cpu, ([sentence[: source_length - 1] for sentence in words[0]], words[1]))
    builders = {
        "training": build_training(on_cpu, ours, [batch]),
        "decoder": build_decoding(on_cpu, ours, batch),
    }
    for name, (our, loop) in builders.items():
        row = report.row("host-bahdanau", f"width 16, 2 pairs of {source_length} and {steps}", name, steps=1)
        runs = {"ours": our(False).run, "loop": loop(Loop.step, False).run}
        measure_host_time(report, row, runs, repeats=3 if settings.quick else 40)


def host_bahdanau_tables(rows: list[Row]) -> None:
    for row in rows:
        show_host_time(row, f"Bahdanau, {row['pass']}, {row['case']}", "loop")


# ----------------------------------------------------------------------------------------------------- main


def table(row: Row, title: str, peers: Sequence[str]) -> None:
    """Print the time of every implementation, and how many times as fast as each peer it is."""
    results, start = row["implementations"], "|out|" if row["pass"] == "decoder" else "loss"
    peers = [peer for peer in peers if peer in results]
    row["ratios"] = r.ratios_to_peers(results, peers)
    lines = []
    for name, result in results.items():
        per_step = [ratio(result.get(key), row["steps"]) for key in ("ms", "host_ms")]
        others = [result.get(key) for key in ("tokens_s", "mib", "first_s", "start")]
        lines.append([name, *per_step, *others, *r.speedups(results, name, peers)])
    head = ["", "ms", "launch", "tokens/s", "MiB", "first s", start, *(f"× {mark}" for mark in "abcd"[: len(peers)])]
    r.table(f"{title}: ms per step, labels per second, times as fast", head, lines)
    r.print_peers(peers)
    if "weights" in row:
        print(f"  weights: {r.format_values(row['weights'], ',')}")
    r.print_start_differences(results, start)


SECTIONS = {
    "transformer": (transformer, transformer_tables),
    "bahdanau": (bahdanau, bahdanau_tables),
    "host": (host, host_tables),
    "host-bahdanau": (host_bahdanau, host_bahdanau_tables),
}


def main(arguments: Sequence[str] | None = None) -> None:
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    r.run_training_benchmark("training", __doc__, SECTIONS, arguments)


if __name__ == "__main__":
    main()
