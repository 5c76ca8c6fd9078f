"""Section ``model`` of look.py: a whole language model of the shape of Llama, with random weights.

prefill     the forward pass of the prompt
watched     the same while it is watched; the output must be equal to the bit
maps        pooled maps of all heads of all layers
statistics  received weight, entropy, distances, sink share and the top 8 keys, of all heads of all layers
generate    32 new tokens after a prompt of 32,768 tokens, plain, watched and monitored

A prefill at these lengths takes seconds, so each thing is measured a few times and the least time is kept.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import report as r
import torch
from report import Report, Run

import jumok
from jumok.look.capture.captures import Captures

# Number of layers, width, width of the feed-forward layers, width of a head.
SHAPES = {"Llama 1B": (16, 2048, 8192, 64), "Llama 8B": (32, 4096, 14336, 128), "Llama tiny": (2, 64, 128, 16)}
NUM_KEY_VALUE_HEADS, VOCABULARY = 8, 128_256
LENGTHS, GENERATE_LENGTH, NUM_NEW_TOKENS = (32_768, 131_072), 32_768, 32
MAP_SIZE = 512
REPEATS = 2


def build_model(shape: str, device: torch.device) -> Any:
    """Return a model with random weights."""
    import transformers

    layers, width, feed_forward_width, head_width = SHAPES[shape]
    is_tiny = shape == "Llama tiny"
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=feed_forward_width,
        num_attention_heads=width // head_width,
        num_key_value_heads=2 if is_tiny else NUM_KEY_VALUE_HEADS,
        head_dim=head_width,
        vocab_size=499 if is_tiny else VOCABULARY,
        max_position_embeddings=max(LENGTHS) + NUM_NEW_TOKENS,
    )
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
        try:
            return transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def measure_models(report: Report, options: argparse.Namespace) -> None:
    on_gpu = report.device.type == "cuda" and not options.quick
    for shape in options.shapes or (("Llama 1B", "Llama 8B") if on_gpu else ("Llama tiny",)):
        model = build_model(shape, report.device)
        for length in options.lengths or (LENGTHS if on_gpu else (256,)):
            measure_prefill(report, model, shape, length)
        measure_generation(report, model, shape, GENERATE_LENGTH if on_gpu else 64, 32 if on_gpu else 5)
        del model
        r.free_memory(report.device)


def _measure_least(report: Report, row: r.Row, name: str, run: Run, repeats: int = REPEATS) -> None:
    """Keep the least time of a few calls, and the peak of additional memory."""
    if report.seconds_left <= 0:
        report.failed(row, name, r.TIME_LIMIT)
        return
    on_gpu = report.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        least = min(r.time_call(run) for _ in range(repeats))
    except Exception as error:
        report.failed(row, name, r.short(error))
        return
    mib = (torch.cuda.max_memory_allocated() - before) / r.MIB if on_gpu else None
    row["implementations"][name] = {"ms": least * 1e3, "repeats": repeats, "mib": mib}
    report.log_measurement(row, name, f"{least:.3f} s")
    report.save()


def measure_prefill(report: Report, model: Any, shape: str, length: int) -> None:
    ids = torch.randint(3, model.config.vocab_size, (1, length), device=report.device)
    row = report.row("model", f"{shape}, {length:,} tokens", "prefill")

    def prefill() -> torch.Tensor:
        logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=1).logits
        return logits

    def watch_prefill() -> tuple[torch.Tensor, Captures]:
        with jumok.watch(model) as captures:
            return prefill(), captures

    _measure_least(report, row, "prefill", prefill)
    _measure_least(report, row, "watched", watch_prefill)
    logits, captures = watch_prefill()
    report.note(row, equal=float(torch.equal(logits, prefill())), heads=sum(x.shape[1] for x in captures))
    row = report.row("model", f"{shape}, {length:,} tokens", "all heads")
    # The first time, the row sums are computed, if the model's kernel did not return them.
    _measure_least(report, row, "maps, first", functools.partial(_pool_all, captures), repeats=1)
    _measure_least(report, row, "maps", functools.partial(_pool_all, captures))
    _measure_least(report, row, "statistics", functools.partial(_compute_all, captures))


def _pool_all(captures: Captures) -> None:
    for layer in captures:
        layer.pooled_map(head=None, size=MAP_SIZE)


def _compute_all(captures: Captures) -> None:
    for layer in captures:
        layer.statistics()


def measure_generation(report: Report, model: Any, shape: str, length: int, num_tokens: int) -> None:
    ids = torch.randint(3, model.config.vocab_size, (1, length), device=report.device)
    row = report.row("model", f"{shape}, {length:,} + {num_tokens} tokens", "generate")
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}

    def generate() -> torch.Tensor:
        output_ids: torch.Tensor = model.generate(ids, **options)
        return output_ids

    def watch_generate() -> tuple[torch.Tensor, Captures]:
        with jumok.watch(model) as captures:
            return generate(), captures

    def monitor_generate() -> torch.Tensor:
        with jumok.monitor(model):
            return generate()

    _measure_least(report, row, "prefill", lambda: model(ids, use_cache=True, logits_to_keep=1))
    _measure_least(report, row, "generate", generate, repeats=3)
    _measure_least(report, row, "watched", watch_generate, repeats=3)
    _measure_least(report, row, "monitored", monitor_generate, repeats=3)
    report.note(row, equal=float(torch.equal(generate(), watch_generate()[0])))


def print_tables(rows: list[r.Row]) -> None:
    lines = []
    for row in rows:
        results = row["implementations"]
        base = next(iter(results))
        row["ratios"] = {name: r.ratio(r.get(results, name), r.get(results, base)) for name in results}
        for name in results:
            values = [r.get(results, name), row["ratios"][name], r.get(results, name, "mib"), row.get("equal")]
            lines.append([row["case"], row["pass"], name, *values])
    head = ["model", "pass", "implementation", "ms", "/first", "MiB", "equal"]
    r.table("A whole language model: least ms, ratio to the first, extra MiB, equal to the bit", head, lines)
