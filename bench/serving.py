"""How fast are translations served, and what happens when too many are asked for?

    python bench/serving.py [RUN] [--section speed|overload|all] [--quick] [--out file.json]

RUN is any run of a Transformer. Without one, it is a Transformer of base size (Vaswani 2017: width 512, 6 + 6
layers, 8 heads, 2048 inside) whose weights are set by hand so that it repeats its source (echo_model.py). Its
outputs are as long as translations, and nothing has to be trained. All ways translate the same sentences
with a beam of 4 on the same cores, which the load generator uses too.

speed     sentences a second: PyTorch, one text at a time; the server, asked by 32 clients at once, with the
          engines torch and ctranslate2 (int8); CTranslate2 itself (int8), given batches of as many sentences
          as there are clients, as tokens; and in between our engine, without a server
overload  four times the requests a second that the server answers, for a minute: how long those took that
          were taken, beside what the queue promises (what it holds is done at the speed it has); which
          statuses came; how much memory the server holds, second by second
"""

from __future__ import annotations

import argparse
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
from load_generator import Answer, Client
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

BEAM = 4
BASE = {"width": 512, "num_heads": 8, "feed_forward_width": 2048, "encoder_layers": 6, "decoder_layers": 6}
TINY = {"width": 16, "num_heads": 2, "feed_forward_width": 32, "encoder_layers": 1, "decoder_layers": 1}
ALONE, TORCH, CT2 = "torch, one at a time", "server, torch", "server, ctranslate2"
ENGINE, DIRECT = "ctranslate2 by jumok, no server", "ctranslate2 itself"
TIMES = 4  # as much as can be done: an overload


@dataclass(frozen=True)
class Plan:
    """What is served, and how much is asked for."""

    run: Run
    texts: list[str]
    clients: int
    seconds: float  # of the overload
    hold: float  # seconds of work that the queue holds then

    @property
    def bodies(self) -> list[bytes]:
        return [load_generator.encode_body(text, BEAM) for text in self.texts]


def build_echo_run(folder: Path, sizes: dict[str, int], vocabulary: int) -> Run:
    """A run of this size that repeats its source."""
    tree: dict[str, Any] = {
        "task": "translate",
        "model": {"type": "transformer", **sizes, "dropout": 0.0, "norm": "pre", "tie_embeddings": "all"},
        "data": {"builtin_size": 2 * vocabulary, "held_out_size": 20},
        "tokenizer": {"vocab_size": vocabulary},
        "train": {"max_epochs": None, "max_steps": 1, "batch_tokens": 256, "warmup_steps": 1},
    }
    tree["train"] |= {"validate_every": 1, "average_checkpoints": 0, "tensorboard": False, "device": "cpu"}
    run = Run.create_or_resume(folder, recipe.parse(tree))
    train(build_task(run), Console(quiet=True))  # for its tokenizers
    save_weights(echo_model.set_echo_weights(load_predictor(run, "cpu").model), run.weights_path)
    return run


# ---------------------------------------------------------------------------------------------------- speed


def measure_speed(report: Report, plan: Plan) -> None:
    row = report.row("speed", f"beam {BEAM}, {plan.clients} clients", sentences=len(plan.texts))
    search = TranslationOptions(beam_size=BEAM)
    alone = load_predictor(plan.run, "cpu")
    _describe(report, row, alone, plan)
    some = plan.texts[: max(8, len(plan.texts) // 8)]
    _timed(report, row, ALONE, len(some), lambda: [list(alone.predict([one], search)) for one in some])
    for way, name in ((TORCH, "torch"), (CT2, "ctranslate2")):
        try:
            with load_generator.serving(plan.run.folder, name) as server:
                _note(report, row, way, **asyncio.run(_served(server, plan)))
        except Exception as error:
            report.failed(row, way, r.short(error))
    try:
        engine = engines.load_predictor(plan.run, "ctranslate2", "cpu")
    except Exception as error:
        report.failed(row, ENGINE, r.short(error))
        return
    count = len(plan.texts)
    groups = [plan.texts[n : n + plan.clients] for n in range(0, count, plan.clients)]
    _timed(report, row, ENGINE, count, lambda: [list(engine.predict(some, search)) for some in groups])
    given = [_tokens(engine, some) for some in groups]
    _timed(report, row, DIRECT, count, lambda: [_directly(engine.engine, some) for some in given])
    speeds = {way: r.get(row["ways"], way, "sentences_s") for way in row["ways"]}
    compared = ((TORCH, ALONE), (CT2, ALONE), (CT2, DIRECT), (CT2, ENGINE), (ENGINE, DIRECT))
    report.note(row, ratios={f"{x} / {y}": ratio(speeds[x], speeds[y]) for x, y in compared})


def _describe(report: Report, row: Row, translator: TranslationPredictor, plan: Plan) -> None:
    """How long sources and translations are: that decides how fast it goes."""
    found = list(translator.predict(plan.texts[: plan.clients], TranslationOptions(beam_size=BEAM)))
    sources = [translator.count_tokens(one) - 1 for one in plan.texts]
    said = translator.tokenizers.target.encode([one.translation for one in found])
    weights = sum(one.numel() for one in translator.model.parameters())
    report.note(
        row,
        source_pieces=statistics.mean(sources),
        target_pieces=statistics.mean(map(len, said)),
        finished=statistics.mean(one.finished for one in found),
        weights=weights,
        vocabulary=translator.tokenizers.target.vocab_size,
    )


def _tokens(translator: Any, texts: Sequence[str]) -> list[list[str]]:
    source = translator.tokenizers.source
    prepared = [translator.data.preprocess(text, "source") for text in texts]
    return [source.ids_to_tokens(ids) for ids in source.encode(prepared)]


def _directly(engine: Any, tokens: list[list[str]]) -> Any:
    """As CTranslate2 is called, with the length limit that ours has."""
    limit = max(decoding.default_max_length(len(one) + 1) for one in tokens)
    return engine.translate_batch(tokens, beam_size=BEAM, max_decoding_length=limit + 1)


def _timed(report: Report, row: Row, way: str, count: int, work: Callable[[], Any]) -> None:
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    _note(report, row, way, sentences_s=count / seconds, seconds=seconds)


async def _served(server: load_generator.Server, plan: Plan) -> dict[str, float]:
    client = Client(server.port)
    await load_generator.closed_loop(client, plan.bodies[: 2 * plan.clients], plan.clients)  # to warm up
    before = await client.metrics()
    found, seconds = await load_generator.closed_loop(client, plan.bodies, plan.clients)
    after = await client.metrics()
    client.close()
    wrong = collections.Counter(one.status for one in found if one.status != 200)
    if wrong:
        raise RuntimeError(f"the server answered {dict(wrong)}")
    batches = _grown(before, after, "jumok_batch_size_count")
    times = [one.seconds for one in found]
    return {
        "sentences_s": len(found) / seconds,
        "tokens_s": _grown(before, after, "jumok_processed_tokens_total") / seconds,
        "seconds": seconds,
        "in_a_batch": len(found) / batches,
        "busy": _grown(before, after, "jumok_batch_duration_seconds_sum") / seconds,  # the share that the model works
        "p50_s": statistics.median(times),
        "p99_s": quantile(times, 0.99),
        "mib": server.mib,
    }


def _grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return sum(value - before.get(key, 0.0) for key, value in after.items() if key.startswith(name))


def _note(report: Report, row: Row, way: str, **found: Any) -> None:
    row["ways"][way] = found
    report.say(f"{row['section']}  {row['case']}  {way}: {r.number(found['sentences_s'])} sentences a second")
    report.save()


# ------------------------------------------------------------------------------------------------- overload


def measure_overload(report: Report, plan: Plan) -> None:
    row = report.row("overload", f"{TIMES} times as much as it does, for {plan.seconds:g} s")
    way, engine = (CT2, "ctranslate2") if _has_ctranslate2() else (TORCH, "torch")
    known = next((one["ways"].get(way, {}) for one in report.rows if one["section"] == "speed"), {})
    if "tokens_s" not in known:
        with load_generator.serving(plan.run.folder, engine) as server:
            known = asyncio.run(_served(server, plan))
    queue = max(plan.clients * BEAM * 16, int(known["tokens_s"] * plan.hold))
    batch = min(4096, queue)
    options = ("--max-queue-tokens", str(queue), "--max-batch-tokens", str(batch), "--timeout", "600")
    with load_generator.serving(plan.run.folder, engine, *options) as server:
        found = asyncio.run(_overloaded(server, plan, known["sentences_s"] * TIMES))
    # What the queue holds is done at the speed it has; and a request may just have missed a batch.
    promise = (queue + batch) / found["tokens_s"]
    row["ways"][way] = found | {"queue_tokens": queue, "promise_s": promise}
    report.say(f"overload  {way}: {found['statuses']}, p99 {found['p99_s']:.3g} s of {promise:.3g} s")
    report.save()


def _has_ctranslate2() -> bool:
    return importlib.util.find_spec("ctranslate2") is not None


async def _overloaded(server: load_generator.Server, plan: Plan, each_second: float) -> dict[str, Any]:
    client = Client(server.port)
    await load_generator.closed_loop(client, plan.bodies[: 2 * plan.clients], plan.clients)
    before, began = await client.metrics(), time.perf_counter()
    found, mib = await load_generator.open_loop(client, server, plan.bodies, each_second, plan.seconds)
    after, took = await client.metrics(), time.perf_counter() - began
    good = await client.ask(plan.bodies[0])
    client.close()
    taken = [one.seconds for one in found if one.status == 200]
    refused = [one for one in found if one.status == 503]
    quarter = max(1, len(mib) // 4)
    return {
        "asked_s": each_second,
        "sentences_s": len(taken) / took,
        "tokens_s": _grown(before, after, "jumok_processed_tokens_total") / took,
        "statuses": dict(sorted(collections.Counter(one.status for one in found).items())),
        "p50_s": statistics.median(taken),
        "p99_s": quantile(taken, 0.99),
        "longest_s": max(taken),
        "refused_p99_s": quantile([one.seconds for one in refused], 0.99) if refused else None,
        "retry_after": _retries(refused),
        "without_retry_after": sum(one.retry is None for one in refused),
        "mib": mib,
        # Once the queue is full, nothing more should be held: the second quarter beside the last.
        "mib_grown": statistics.mean(mib[-quarter:]) - statistics.mean(mib[quarter : 2 * quarter]),
        "answers_after": good.status == 200,
    }


def _retries(refused: Sequence[Answer]) -> list[int]:
    """The shortest and the longest that clients were told to stay away, in seconds."""
    told = [int(one.retry) for one in refused if one.retry is not None]
    return [min(told), max(told)] if told else []


def quantile(times: Sequence[float], share: float) -> float:
    """The time that this share of them did not exceed.

    >>> quantile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


# ------------------------------------------------------------------------------------------------- printing

SECTIONS: dict[str, Callable[[Report, Plan], None]] = {"speed": measure_speed, "overload": measure_overload}


def show(rows: Sequence[Row]) -> None:
    for row in rows:
        if row["section"] == "speed":
            names = ("sentences_s", "in_a_batch", "busy", "p50_s", "p99_s", "mib")
            lines = [
                [way, *(found.get(name) for name in names)]
                for way, found in row["ways"].items()
                if "error" not in found
            ]
            r.table(f"speed: {row['case']}", ["", *names], lines)
            lines = [[name, value] for name, value in row.get("ratios", {}).items()]
            if lines:
                r.table("ratios", ["", "times"], lines)
        else:
            names = ("asked_s", "sentences_s", "p50_s", "p99_s", "promise_s", "refused_p99_s", "mib_grown")
            lines = [[way, *(found.get(name) for name in names)] for way, found in row["ways"].items()]
            r.table(f"overload: {row['case']}", ["", *names], lines)
            for way, found in row["ways"].items():
                told = ", ".join(f"{status}: {count:,}" for status, count in found["statuses"].items())
                without = found["without_retry_after"]
                print(f"{way}: {told}; Retry-After {found['retry_after']} s, missing {without} times")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="a run's folder; otherwise one is made")
    parser.add_argument("--section", choices=[*SECTIONS, "all"], default="all")
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60, help="of the overload")
    parser.add_argument("--hold", type=float, default=5, help="seconds of work that the queue holds then")
    parser.add_argument("--quick", action="store_true", help="tiny, and no file unless --out names one")
    parser.add_argument("--out", type=Path, help="the JSON file; runs/bench/… unless --quick")
    chosen = parser.parse_args(arguments)

    report = Report("serving", torch.device("cpu"))
    report.begin(chosen.out, quick=chosen.quick)
    if chosen.run is not None:
        run = Run.open(chosen.run)
    elif chosen.quick:
        run = build_echo_run(r.RESULTS / "serving-tiny", TINY, 400)
    else:
        run = build_echo_run(r.RESULTS / "serving-base", BASE, 8000)
    count, clients, seconds = chosen.sentences, chosen.clients, chosen.seconds
    if chosen.quick:
        count, clients, seconds = 24, 4, min(seconds, 2.0)
    texts = [pair.english for pair in english_korean.read_pairs("test", count)]
    plan = Plan(run, texts, clients, seconds, min(chosen.hold, seconds))
    report.head |= {"model": asdict(run.recipe.model), "beam_size": BEAM}
    for name in SECTIONS if chosen.section == "all" else [chosen.section]:
        SECTIONS[name](report, plan)
    show(report.rows)
    r.failures([row for row in report.rows if row["section"] == "speed"])
    report.end()


if __name__ == "__main__":
    main()
