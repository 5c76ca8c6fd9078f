"""Speed of serving translations, and behaviour of the server under overload.

    python bench/serving.py [RUN] [--section speed|overload|all] [--quick] [--out file.json]

RUN is a run of a Transformer. The default is a Transformer of base size (Vaswani 2017: width 512, 6 + 6 layers,
8 heads, feed-forward width 2048) whose weights are set so that it repeats its source (echo_model.py): its outputs
are as long as translations, without training. All translate the same sentences with beam size 4 on the same
cores, which the load generator uses too.

speed     sentences per second: PyTorch, one text at a time; the server with 32 concurrent clients, with the
          engines torch and ctranslate2 (int8); CTranslate2 itself (int8) with batches of 32 tokenized sentences;
          and our engine without a server
overload  for one minute, four times as many requests per second as the server can answer: the latency of accepted
          requests, compared with the time that the length of the queue allows; the statuses of all responses;
          the memory of the server in each second
"""

from __future__ import annotations

import asyncio
import collections
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import echo_model
import load_generator
import report as r
import torch
from load_generator import Client
from report import Report, Row, ratio
from rich.console import Console

from jumok import decoding, recipe
from jumok.data.builtin import english_korean
from jumok.inference import engines
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.training import train
from jumok.tasks.translate.predictor import TranslationOptions, TranslationPredictor
from jumok.training import save_weights

BEAM_SIZE = 4
BASE_SIZES = {"width": 512, "num_heads": 8, "feed_forward_width": 2048, "encoder_layers": 6, "decoder_layers": 6}
TINY_SIZES = {"width": 16, "num_heads": 2, "feed_forward_width": 32, "encoder_layers": 1, "decoder_layers": 1}
ALONE, TORCH, CT2 = "torch, one at a time", "server, torch", "server, ctranslate2"
ENGINE, DIRECT = "ctranslate2 by jumok, no server", "ctranslate2 itself"
OVERLOAD_FACTOR = 4  # requests per second, relative to what the server can answer


@dataclass(frozen=True)
class Workload:
    """The model to serve, and the requests."""

    run: Run
    texts: list[str]
    clients: int
    seconds: float  # duration of the overload
    queue_seconds: float  # seconds of work in the queue during the overload

    @property
    def bodies(self) -> list[bytes]:
        return [load_generator.encode_body(text, BEAM_SIZE) for text in self.texts]


def build_echo_run(folder: Path, sizes: dict[str, int], vocabulary: int) -> Run:
    """Build a run of this size that repeats its source."""
    tree: dict[str, Any] = {
        "task": "translate",
        "model": {"type": "transformer", **sizes, "dropout": 0.0, "norm": "pre", "tie_embeddings": "all"},
        "data": {"builtin_size": 2 * vocabulary, "held_out_size": 20},
        "tokenizer": {"vocab_size": vocabulary},
        "train": {"max_epochs": None, "max_steps": 1, "batch_tokens": 256, "warmup_steps": 1},
    }
    tree["train"] |= {"validate_every": 1, "average_checkpoints": 0, "tensorboard": False, "device": "cpu"}
    run = Run.create_or_resume(folder, recipe.parse(tree))
    train(build_task(run), Console(quiet=True))  # to train its tokenizers
    save_weights(echo_model.set_echo_weights(load_predictor(run, "cpu").model), run.weights_path)
    return run


# ---------------------------------------------------------------------------------------------------- speed


def measure_speed(report: Report, workload: Workload) -> None:
    row = report.row("speed", f"beam {BEAM_SIZE}, {workload.clients} clients", sentences=len(workload.texts))
    options = TranslationOptions(beam_size=BEAM_SIZE)
    predictor = load_predictor(workload.run, "cpu")
    _describe(report, row, predictor, workload)
    texts = workload.texts[: max(8, len(workload.texts) // 8)]
    _measure(report, row, ALONE, len(texts), lambda: [list(predictor.predict([text], options)) for text in texts])
    for name, engine in ((TORCH, "torch"), (CT2, "ctranslate2")):
        try:
            with load_generator.run_server(workload.run.folder, engine) as server:
                _record(report, row, name, **asyncio.run(_measure_server(server, workload)))
        except Exception as error:
            report.failed(row, name, r.short(error))
    try:
        engine = engines.load_predictor(workload.run, "ctranslate2", "cpu")
    except Exception as error:
        report.failed(row, ENGINE, r.short(error))
        return
    count = len(workload.texts)
    batches = [workload.texts[n : n + workload.clients] for n in range(0, count, workload.clients)]
    _measure(report, row, ENGINE, count, lambda: [list(engine.predict(batch, options)) for batch in batches])
    tokenized = [_tokenize(engine, batch) for batch in batches]
    _measure(report, row, DIRECT, count, lambda: [_translate_directly(engine.engine, batch) for batch in tokenized])
    speeds = {name: r.get(row["implementations"], name, "sentences_s") for name in row["implementations"]}
    pairs = ((TORCH, ALONE), (CT2, ALONE), (CT2, DIRECT), (CT2, ENGINE), (ENGINE, DIRECT))
    report.note(row, ratios={f"{x} / {y}": ratio(speeds[x], speeds[y]) for x, y in pairs})


def _describe(report: Report, row: Row, predictor: TranslationPredictor, workload: Workload) -> None:
    """Note the lengths of sources and translations, which determine the speed."""
    options = TranslationOptions(beam_size=BEAM_SIZE)
    predictions = list(predictor.predict(workload.texts[: workload.clients], options))
    sources = [predictor.count_tokens(text) - 1 for text in workload.texts]
    targets = predictor.tokenizers.target.encode([prediction.translation for prediction in predictions])
    report.note(
        row,
        source_pieces=statistics.mean(sources),
        target_pieces=statistics.mean(map(len, targets)),
        finished=statistics.mean(prediction.finished for prediction in predictions),
        weights=sum(parameter.numel() for parameter in predictor.model.parameters()),
        vocabulary=predictor.tokenizers.target.vocab_size,
    )


def _tokenize(predictor: Any, texts: Sequence[str]) -> list[list[str]]:
    source = predictor.tokenizers.source
    prepared = [predictor.data.preprocess(text, "source") for text in texts]
    return [source.ids_to_tokens(ids) for ids in source.encode(prepared)]


def _translate_directly(engine: Any, tokens: list[list[str]]) -> Any:
    """Call CTranslate2 with our length limit."""
    limit = max(decoding.default_max_length(len(sentence) + 1) for sentence in tokens)
    return engine.translate_batch(tokens, beam_size=BEAM_SIZE, max_decoding_length=limit + 1)


def _measure(report: Report, row: Row, name: str, count: int, translate: Callable[[], Any]) -> None:
    start = time.perf_counter()
    translate()
    seconds = time.perf_counter() - start
    _record(report, row, name, sentences_s=count / seconds, seconds=seconds)


async def _measure_server(server: load_generator.Server, workload: Workload) -> dict[str, float]:
    client = Client(server.port)
    await load_generator.closed_loop(client, workload.bodies[: 2 * workload.clients], workload.clients)  # warm up
    before = await client.metrics()
    responses, seconds = await load_generator.closed_loop(client, workload.bodies, workload.clients)
    after = await client.metrics()
    client.close()
    errors = collections.Counter(response.status for response in responses if response.status != 200)
    if errors:
        raise RuntimeError(f"the server responded with errors (status: count): {dict(errors)}")
    times = [response.seconds for response in responses]
    return {
        "sentences_s": len(responses) / seconds,
        "tokens_s": _increase(before, after, "jumok_processed_tokens_total") / seconds,
        "seconds": seconds,
        "mean_batch_size": len(responses) / _increase(before, after, "jumok_batch_size_count"),
        "busy": _increase(before, after, "jumok_batch_duration_seconds_sum") / seconds,
        "p50_s": statistics.median(times),
        "p99_s": compute_quantile(times, 0.99),
        "mib": server.mib,
    }


def _increase(before: dict[str, float], after: dict[str, float], name: str) -> float:
    """Return how much the metrics whose names start with ``name`` increased."""
    return sum(value - before.get(key, 0.0) for key, value in after.items() if key.startswith(name))


def _record(report: Report, row: Row, name: str, **values: Any) -> None:
    row["implementations"][name] = values
    report.log(f"{row['section']}  {row['case']}  {name}: {r.number(values['sentences_s'])} sentences per second")
    report.save()


# ------------------------------------------------------------------------------------------------- overload


def measure_overload(report: Report, workload: Workload) -> None:
    row = report.row("overload", f"{OVERLOAD_FACTOR} times the possible load, for {workload.seconds:g} s")
    has_ctranslate2 = importlib.util.find_spec("ctranslate2") is not None
    name, engine = (CT2, "ctranslate2") if has_ctranslate2 else (TORCH, "torch")
    speed = next((row["implementations"].get(name, {}) for row in report.rows if row["section"] == "speed"), {})
    if "tokens_s" not in speed:
        with load_generator.run_server(workload.run.folder, engine) as server:
            speed = asyncio.run(_measure_server(server, workload))
    queue = max(workload.clients * BEAM_SIZE * 16, int(speed["tokens_s"] * workload.queue_seconds))
    batch = min(4096, queue)
    options = ("--max-queue-tokens", str(queue), "--max-batch-tokens", str(batch), "--timeout", "600")
    with load_generator.run_server(workload.run.folder, engine, *options) as server:
        result = asyncio.run(_overload(server, workload, speed["sentences_s"] * OVERLOAD_FACTOR))
    # A request waits for at most a full queue, and for a batch that has just started.
    expected = (queue + batch) / result["tokens_s"]
    row["implementations"][name] = result | {"queue_tokens": queue, "expected_max_s": expected}
    report.log(f"overload  {name}: {result['statuses']}, p99 {result['p99_s']:.3g} s of at most {expected:.3g} s")
    report.save()


async def _overload(server: load_generator.Server, workload: Workload, requests_s: float) -> dict[str, Any]:
    client = Client(server.port)
    await load_generator.closed_loop(client, workload.bodies[: 2 * workload.clients], workload.clients)
    before, start = await client.metrics(), time.perf_counter()
    responses, mib = await load_generator.open_loop(client, server, workload.bodies, requests_s, workload.seconds)
    after, seconds = await client.metrics(), time.perf_counter() - start
    last = await client.post(workload.bodies[0])
    client.close()
    times = [response.seconds for response in responses if response.status == 200]
    refused = [response for response in responses if response.status == 503]
    delays = [int(response.retry_after) for response in refused if response.retry_after is not None]
    quarter = max(1, len(mib) // 4)
    return {
        "requests_per_s": requests_s,
        "sentences_s": len(times) / seconds,
        "tokens_s": _increase(before, after, "jumok_processed_tokens_total") / seconds,
        "statuses": dict(sorted(collections.Counter(response.status for response in responses).items())),
        "p50_s": statistics.median(times),
        "p99_s": compute_quantile(times, 0.99),
        "longest_s": max(times),
        "refused_p99_s": compute_quantile([response.seconds for response in refused], 0.99) if refused else None,
        "retry_after": [min(delays), max(delays)] if delays else [],
        "without_retry_after": len(refused) - len(delays),
        "mib": mib,
        # Once the queue is full, memory should not grow: the last quarter compared with the second.
        "mib_growth": statistics.mean(mib[-quarter:]) - statistics.mean(mib[quarter : 2 * quarter]),
        "answers_after": last.status == 200,
    }


def compute_quantile(times: Sequence[float], share: float) -> float:
    """Return the time that this share of the times did not exceed.

    >>> compute_quantile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


# ------------------------------------------------------------------------------------------------- printing

SECTIONS: dict[str, Callable[[Report, Workload], None]] = {"speed": measure_speed, "overload": measure_overload}


def print_tables(rows: Sequence[Row]) -> None:
    for row in rows:
        names = ["sentences_s", "mean_batch_size", "busy", "p50_s", "p99_s", "mib"]
        if row["section"] == "overload":
            names = ["requests_per_s", "sentences_s", "p50_s", "p99_s", "expected_max_s", "refused_p99_s", "mib_growth"]
        results = {name: result for name, result in row["implementations"].items() if "error" not in result}
        lines = [[name, *map(result.get, names)] for name, result in results.items()]
        r.table(f"{row['section']}: {row['case']}", ["", *names], lines)
        if "ratios" in row:
            r.table("ratios of sentences per second", ["", "ratio"], [list(pair) for pair in row["ratios"].items()])
        if row["section"] == "overload":
            for name, result in results.items():
                statuses = r.format_values({f"{status}:": n for status, n in result["statuses"].items()}, ",")
                missing = result["without_retry_after"]
                print(f"{name}: {statuses}; Retry-After {result['retry_after']} s, missing {missing} times")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = r.build_parser(__doc__, [*SECTIONS], device=False)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run; default: a model that repeats its source")
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60, help="duration of the overload")
    parser.add_argument("--hold", type=float, default=5, help="seconds of work in the queue during the overload")
    options = parser.parse_args(arguments)

    report = Report("serving", torch.device("cpu"))
    report.begin(options.out, quick=options.quick)
    if options.run is not None:
        run = Run.open(options.run)
    elif options.quick:
        run = build_echo_run(r.RESULTS / "serving-tiny", TINY_SIZES, 400)
    else:
        run = build_echo_run(r.RESULTS / "serving-base", BASE_SIZES, 8000)
    count, clients, seconds = options.sentences, options.clients, options.seconds
    if options.quick:
        count, clients, seconds = 24, 4, min(seconds, 2.0)
    texts = [pair.english for pair in english_korean.read_pairs("test", count)]
    workload = Workload(run, texts, clients, seconds, min(options.hold, seconds))
    report.head |= {"model": asdict(run.recipe.model), "beam_size": BEAM_SIZE}
    for name in r.list_sections(options, SECTIONS):
        SECTIONS[name](report, workload)
    print_tables(report.rows)
    r.print_failures(report.rows)
    report.end()


if __name__ == "__main__":
    main()
