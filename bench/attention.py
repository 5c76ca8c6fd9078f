"""Speed of attention: ours, eager PyTorch and compiled PyTorch, compared in one process.

    python bench/attention.py [--section overhead|additive|dot|step|all] [--quick] [--out file.json]

overhead   calls so small that only the host's time matters, compared with the same calls of plain PyTorch
additive   many queries at once with Bahdanau's score: v · tanh(W s + U h) for all pairs, softmax, weighted sum
dot        scaled dot-product attention, plain and with structured masks, compared with PyTorch's own kernels
step       one query at a time over prepared keys, as in an RNN decoder

Compare the ratios; below 1, ours is faster. On CUDA everything is bfloat16. The floor is the time of one tanh for
each pair and hidden unit in the special function units, which compute 16 per clock and multiprocessor; forward and
backward together need every tanh twice. (A kernel that uses fewer special functions can be faster than the floor.)
Without a GPU the sizes are small and there is no floor.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import report as r
import torch
from report import Report, Row, Run, Settings, ratio
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import jumok

PASSES = {"forward": "fwd", "forward+backward": "f+b"}  # with their names in tables
MAX_ELEMENTS = 1 << 26  # of the largest tensor of a float64 reference


@dataclass(frozen=True)
class AttentionSettings(Settings):
    """Settings with random inputs."""

    case: str = ""  # a substring of the names of the measured cases of "step"

    def random(self, *shape: int, grad: bool = True) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype).requires_grad_(grad)

    def build_score(self, query_width: int, key_width: int, hidden: int) -> jumok.scores.Additive:
        """Return a score that prefers some keys, as after training. The initial weights are almost uniform."""
        score = jumok.scores.Additive(query_width, key_width, hidden)
        with torch.no_grad():
            score.v.mul_(4)
        return score.to(self.device, self.dtype)


def for_pass(which: str, run: Run, leaves: Sequence[Tensor], upstream: Tensor) -> Run:
    """Return ``run`` without gradients, or with the gradients of all leaves."""
    if which == "forward":
        return torch.no_grad()(run)
    return lambda: torch.autograd.grad(run(), leaves, upstream)


def explain_path(*arguments: Any, **options: Any) -> str:
    """Return the first line of jumok.explain."""
    try:
        return str(jumok.explain(*arguments, **options)).splitlines()[0]
    except Exception as error:
        return r.short(error)


# ----------------------------------------------------------------------------------------- overhead

SMALL = (2, 4, 8, 16)  # batch, heads, length, width of a head


def overhead(report: Report, settings: AttentionSettings) -> None:
    """Measure the least time of many calls, in turns with plain PyTorch."""
    batch, heads, length, width = SMALL
    query, key, value = (settings.random(*SMALL) for _ in range(3))
    mask = jumok.masks.padding([length - 3, length])
    allowed = mask.to_dense(1, length, settings.device)[:, None].contiguous()
    score = settings.build_score(width, width, width)
    states, keys, values = (settings.random(batch, n, width) for n in (1, length, length))
    prepared = score.prepare(keys)
    x = settings.random(batch, length, heads * width)
    ours = jumok.MultiHead(heads * width, heads).to(settings.device, settings.dtype)
    theirs = torch.nn.MultiheadAttention(heads * width, heads, batch_first=True).to(settings.device, settings.dtype)
    attention, step = F.scaled_dot_product_attention, functools.partial(plain_steps, [states[:, 0]])
    cases: dict[str, dict[str, Run]] = {
        "attend": {
            "ours": lambda: jumok.attend(query, key, value),
            "plain": lambda: attention(query, key, value),
        },
        "attend, padding": {
            "ours": lambda: jumok.attend(query, key, value, mask=mask),
            "plain": lambda: attention(query, key, value, attn_mask=allowed),
        },
        "additive step": {
            "ours": lambda: jumok.attend(states, prepared, values, score=score),
            "plain": lambda: step(prepared.keys, values, None, score.query.weight, score.v),
        },
        "MultiHead": {
            "ours": lambda: ours(x),
            "plain": lambda: theirs(x, x, x, need_weights=False),
        },
    }
    for grad in (True, False):
        for case, runs in cases.items():
            ours.train(grad), theirs.train(grad)  # PyTorch has a fast path for inference
            row = report.row("overhead", case, "training" if grad else "inference")
            with torch.set_grad_enabled(grad):
                for name, ms in r.least_in_turns(runs, repeats=5 if settings.quick else 40).items():
                    row["implementations"][name] = {"ms": ms}
            text = ", ".join(f"{name} {1e3 * r.get(row['implementations'], name):.1f} µs" for name in runs)
            report.log(f"overhead  {case}  {row['pass']}: {text}")
            report.save()


def overhead_tables(rows: list[Row]) -> None:
    lines = []
    for row in rows:
        ours, plain = (1e3 * r.get(row["implementations"], name) for name in ("ours", "plain"))
        row["ratios"] = {"plain": ratio(ours, plain)}
        lines.append([row["case"], row["pass"], ours, plain, ours - plain])
    title = f"Overhead, {' x '.join(map(str, SMALL))}: µs per call on the host, ours and plain PyTorch"
    r.table(title, ["case", "pass", "ours", "plain", "difference"], lines)


# ------------------------------------------------------------------------------- additive, many queries

IMPLEMENTATIONS = ("ours", "eager", "compiled")
ADDITIVE_LEAVES = ("query", "key", "value", "W", "U", "v")


def additive_sizes(settings: AttentionSettings) -> list[tuple[int, int, int, int]]:
    """(B, Q, K, D)."""
    if settings.on_gpu:
        sizes = [(32, 128, 128, 512), (8, 512, 512, 512), (4, 1024, 1024, 256), (1, 4096, 4096, 128)]
        return sizes[:1] if settings.quick else sizes
    return [(2, 7, 11, 16)] if settings.quick else [(8, 64, 64, 128), (1, 256, 256, 64)]


def plain_additive(query: Tensor, key: Tensor, value: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Direct computation, with a tensor of B×Q×K×D."""
    pairs = torch.tanh((query @ w.T)[:, :, None, :] + (key @ u.T)[:, None, :, :])
    return torch.bmm((pairs @ v).softmax(-1), value)


def additive(report: Report, settings: AttentionSettings) -> None:
    for size in additive_sizes(settings):
        batch, queries, keys, width = size
        score = settings.build_score(width, width, width)
        inputs = [settings.random(batch, n, width) for n in (queries, keys, keys)]
        leaves = [*inputs, score.query.weight, score.key.weight, score.v]
        upstream = settings.random(batch, queries, width, grad=False)
        runs: dict[str, Run] = {
            "ours": functools.partial(jumok.attend, *inputs, score=score),
            "eager": functools.partial(plain_additive, *leaves),
        }
        if settings.compile:
            runs["compiled"] = functools.partial(r.compiled(plain_additive), *leaves)
        for which in PASSES:
            row = report.row("additive", str(size).replace(" ", ""), which, dtype=str(settings.dtype))
            row["path"] = explain_path(*inputs, score=score)
            row["floor_ms"] = tanh_floor(report, math.prod(size), times=1 if which == "forward" else 2)
            for name, run in runs.items():
                report.measure(row, name, for_pass(which, run, leaves, upstream))
        checked = {name: functools.partial(with_gradients, run, leaves, upstream) for name, run in runs.items()}
        reference = functools.partial(additive_in_float64, leaves, upstream)
        report.check(row, ("out", *ADDITIVE_LEAVES), checked, reference)


def tanh_floor(report: Report, count: int, times: int) -> float | None:
    """Return the milliseconds of ``count`` tanh, computed ``times`` times; None without a GPU."""
    machine = report.head["machine"]
    if not machine.get("sm_mhz"):
        return None
    return times * count / (16 * machine["multiprocessors"] * machine["sm_mhz"] * 1e3)


def with_gradients(run: Run, leaves: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    out = run()
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def additive_in_float64(leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Compute the output and all gradients, some rows of one sequence at a time."""
    query, key, value, *parameters = exact = [x.detach().double() for x in leaves]
    out = torch.empty_like(upstream, dtype=torch.float64)
    gradients = [torch.zeros_like(x) for x in exact]
    num_rows = max(1, MAX_ELEMENTS // (key.shape[1] * len(parameters[-1])))
    for n in range(len(query)):
        for start in range(0, query.shape[1], num_rows):
            sequence, rows = slice(n, n + 1), (slice(n, n + 1), slice(start, start + num_rows))
            inputs = [query[rows], key[sequence], value[sequence], *parameters]
            inputs = [x.clone().requires_grad_() for x in inputs]
            run = functools.partial(plain_additive, *inputs)
            out[rows], *parts = with_gradients(run, inputs, upstream[rows].double())
            totals = [gradients[0][rows], gradients[1][sequence], gradients[2][sequence], *gradients[3:]]
            for total, part in zip(totals, parts, strict=True):
                total += part
    return [out, *gradients]


def additive_tables(rows: list[Row]) -> None:
    lines = []
    for row in rows:
        ours, *others = times = [r.get(row["implementations"], name) for name in IMPLEMENTATIONS]
        row["ratios"] = {"floor": ratio(ours, row["floor_ms"])}
        row["ratios"] |= {name: ratio(ours, ms) for name, ms in zip(IMPLEMENTATIONS[1:], others, strict=True)}
        launch, *mib = (
            r.get(row["implementations"], "ours", "host_ms"),
            *(r.get(row["implementations"], name, "mib") for name in IMPLEMENTATIONS),
        )
        first = [row["case"], PASSES[row["pass"]], row["floor_ms"]]
        lines.append([*first, *times, *row["ratios"].values(), launch, *mib])
    head = ["B,Q,K,D", "pass", "floor", "ours", "eager", "comp.", "/floor", "/eager", "/comp.", "launch"]
    title = "Additive, many queries: ms, ratios of ours, ms to launch ours, peak extra MiB"
    r.table(title, [*head, "MiB", "eager", "comp."], lines)
    r.error_table("Additive, many queries", rows, ("out", *ADDITIVE_LEAVES))


# -------------------------------------------------------------------------------- additive, step by step

STEP_LEAVES = ("query", "key", "value", "W", "U", "v")


@dataclass(frozen=True, eq=False)
class Decoder:
    """Inputs of a decoding loop. All queries are known beforehand, so that the loop contains only attention."""

    steps: int
    score: jumok.scores.Additive
    query: Tensor  # (steps, B, Dq)
    key: Tensor  # (B, K, Dv)
    value: Tensor
    lengths: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        return [
            self.query,
            self.key,
            self.value,
            self.score.query.weight,
            self.score.key.weight,
            self.score.v,
        ]

    @property
    def mask(self) -> jumok.masks.Mask | None:
        return None if self.lengths is None else jumok.masks.padding(self.lengths)

    def explain_path(self) -> str:
        prepared = self.score.prepare(self.key)
        return explain_path(self.query[0, :, None], prepared, self.value, score=self.score, mask=self.mask)

    def in_float64(self) -> Decoder:
        query, key, value = (x.detach().double().requires_grad_() for x in (self.query, self.key, self.value))
        return Decoder(self.steps, copy.deepcopy(self.score).double(), query, key, value, self.lengths)


def step_sizes(settings: AttentionSettings) -> list[tuple[int, int, int, int, int]]:
    """(B, K, hidden, query width, key and value width)."""
    if settings.on_gpu:
        sizes = [(80, 50, 1000, 1000, 2000), (32, 400, 256, 256, 256)]
        return sizes[:1] if settings.quick else sizes
    return [(3, 5, 8, 8, 16)] if settings.quick else [(16, 20, 64, 64, 128)]


def build_decoder(settings: AttentionSettings, size: tuple[int, int, int, int, int], masked: bool) -> Decoder:
    batch, keys, hidden, query_width, value_width = size
    steps = 50 if settings.on_gpu else 10
    return Decoder(
        steps=steps,
        score=settings.build_score(query_width, value_width, hidden),
        query=settings.random(steps, batch, query_width),
        key=settings.random(batch, keys, value_width),
        value=settings.random(batch, keys, value_width),
        lengths=torch.randint(keys // 2, keys + 1, (batch,)) if masked else None,
    )


def ours_loop(d: Decoder) -> Run:
    mask = d.mask

    def run() -> list[Tensor]:
        prepared, contexts = d.score.prepare(d.key), []
        for query in d.query.unbind():
            context = jumok.attend(query[:, None], prepared, d.value, score=d.score, mask=mask)
            contexts.append(context.squeeze(1))  # squeeze is a view; the backward of [:, 0] would copy
        return contexts_with_gradients(contexts, d.leaves)

    return run


def plain_loop(d: Decoder, steps: Callable[..., Any], at_once: int) -> Run:
    """The same in plain PyTorch; ``steps`` computes ``at_once`` steps in one call."""
    query, key, value, w, u, v = d.leaves
    allowed = None
    if d.lengths is not None:
        allowed = torch.arange(key.shape[1], device=key.device) < d.lengths.to(key.device)[:, None]

    def run() -> list[Tensor]:
        prepared, queries, contexts = key @ u.T, query.unbind(), []
        for start in range(0, d.steps, at_once):
            contexts += steps(queries[start : start + at_once], prepared, value, allowed, w, v)
        return contexts_with_gradients(contexts, d.leaves)

    return run


def plain_steps(
    queries: Sequence[Tensor], keys: Tensor, value: Tensor, allowed: Tensor | None, w: Tensor, v: Tensor
) -> list[Tensor]:
    """Compute the contexts of some steps over prepared keys."""
    contexts = []
    for query in queries:
        scores = torch.tanh((query @ w.T)[:, None, :] + keys) @ v  # (B, K)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        contexts.append(torch.bmm(scores.softmax(-1)[:, None, :], value).squeeze(1))
    return contexts


def contexts_with_gradients(contexts: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Return all contexts, and the gradients of half the sum of their squares."""
    out = torch.stack(contexts)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]


def step(report: Report, settings: AttentionSettings) -> None:
    """Measure launched loops first, then CUDA graphs, then what takes long to compile, if there is time."""
    cases: list[tuple[Row, Decoder, dict[str, Run]]] = []
    for size in step_sizes(settings):
        for masked in (True, False):
            case = f"B{size[0]} K{size[1]} hidden {size[2]}, {'padding' if masked else 'no mask'}"
            if settings.case not in case:
                continue
            decoder = build_decoder(settings, size, masked)
            row = report.row("step", case, "forward+backward", dtype=str(settings.dtype), size=size)
            report.note(row, steps=decoder.steps, path=decoder.explain_path())
            runs = {"ours": ours_loop(decoder), "eager": plain_loop(decoder, plain_steps, 1)}
            if settings.compile:
                runs["compiled, 1 step"] = plain_loop(decoder, r.compiled(plain_steps), 1)
            for name, run in runs.items():
                report.measure(row, name, run, hide_launches=False)
            report.check(row, ("out", *STEP_LEAVES), runs, plain_loop(decoder.in_float64(), plain_steps, 1))
            cases.append((row, decoder, runs))
    if not settings.on_gpu:
        return
    for row, _, runs in cases:
        for name, run in reversed(runs.items()):  # ours last: a failed capture may break later ones
            measure_graph(report, row, name, run)
    for at_once in () if settings.quick or not settings.compile else (10, 50):
        for row, decoder, _ in cases:
            if decoder.lengths is not None:
                measure_unrolled(report, row, decoder, at_once)


def measure_graph(report: Report, row: Row, name: str, run: Run) -> None:
    """Measure a CUDA graph, and compare the outputs of a replay with those of the launched loop."""
    graph_name = f"{name}, graph"
    if "error" in row["implementations"][name] or report.seconds_left < 0:
        return report.failed(row, graph_name, "skipped")
    try:
        replay, outputs = r.captured(run)
        for x in outputs:
            x.fill_(math.nan)
        replay()
        differs = max(r.relative_errors(outputs, run()), key=r.nan_last)
    except Exception as error:
        return report.failed(row, graph_name, f"capture: {r.short(error)}")
    report.measure(row, graph_name, replay)["differs"] = differs
    return report.save()


def measure_unrolled(report: Report, row: Row, decoder: Decoder, at_once: int) -> None:
    """Measure several steps compiled together."""
    name = f"compiled, {at_once} steps"
    seconds = 1.2 * row["implementations"].get("compiled, 10 steps", {}).get("first_s", 15) * at_once / 10
    if seconds + 15 > report.seconds_left:
        return report.failed(row, name, f"skipped, compiling would take about {seconds:.0f} s")
    run = plain_loop(decoder, r.compiled(plain_steps), at_once)
    report.measure(row, name, run, hide_launches=False)
    return measure_graph(report, row, name, run)


def step_tables(rows: list[Row]) -> None:
    lines: list[list[Any]] = []
    for row in rows:
        results, row["ratios"] = row["implementations"], {}
        pairs = []  # times of ours and of the fastest compiled implementation: launched, and as graphs
        for how, end in (("launched", ""), ("graph", ", graph")):
            names = [name for name in results if re.fullmatch(rf"compiled, \d+ steps?{end}", name)]
            if how == "graph" and not names:
                continue
            fast, fast_ms = r.fastest(results, names)
            ours, eager = (r.get(results, name + end) for name in ("ours", "eager"))
            at_once = "–" if fast is None else re.findall(r"\d+", fast)[0]
            mib = [None if end else r.get(results, name, "mib") for name in ("ours", fast)]
            row["ratios"][how] = ratio(ours, fast_ms)
            lines.append(
                [
                    row["case"],
                    how,
                    ours,
                    eager,
                    fast_ms,
                    at_once,
                    ratio(ours, eager),
                    ratio(ours, fast_ms),
                    *mib,
                ]
            )
            pairs.append((ours, fast_ms))
        ours, fast_ms = (min((ms for ms in side if ms), default=None) for side in zip(*pairs, strict=True))
        row["ratios"]["best"] = ratio(ours, fast_ms)
        if len(pairs) > 1:
            lines.append([row["case"], "best", ours, None, fast_ms, "", None, row["ratios"]["best"], None, None])
    head = ["case", "how", "ours", "eager", "compiled", "at once", "/eager", "/compiled", "MiB", "comp."]
    title = f"Additive, {rows[0]['steps']} steps, forward and backward: ms of the whole loop, ratios of ours"
    r.table(title, head, lines)
    r.error_table("Additive, step by step", rows, ("out", *STEP_LEAVES))
    for row in rows:
        for name, result in row["implementations"].items():
            if name.startswith("compiled") and result.get("first_s", 0) > 1:
                print(f"  compiling: {row['case']}, {name}: {result['first_s']:.1f} s")
            if not result.get("differs", 0) < 0.02:
                print(f"  DIFFERS from the launched loop by {result['differs']:.1e}: {row['case']}, {name}")


# ------------------------------------------------------------------------------------------- dot product

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem-eff": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Dot:
    """A case: the size (B, H, N, d), and a function that builds the mask."""

    name: str
    size: tuple[int, int, int, int]
    build_mask: Callable[[], jumok.masks.Mask] | None = None

    @property
    def needs_no_tensor(self) -> bool:
        """Whether SDPA expresses the mask without a tensor."""
        return self.name in ("no mask", "causal")


def dot_sizes(settings: AttentionSettings) -> list[tuple[int, int, int, int]]:
    """Sizes of one long sequence, a batch, and many short sequences as in training a translator."""
    if settings.on_gpu:
        many = (128, 8, 64, 64)
        return [(1, 12, 2048, 64), (4, 12, 1024, 64), many] if settings.quick else [
            (1, 12, 16384, 64), (4, 12, 4096, 64), many]  # fmt: skip
    return [(1, 2, 64, 16), (2, 2, 32, 16), (4, 2, 16, 16)] if settings.quick else [
        (1, 4, 1024, 32), (2, 4, 512, 32), (32, 4, 64, 32)]  # fmt: skip


def dot_cases(settings: AttentionSettings) -> list[Dot]:
    masks = jumok.masks
    long, batch, short = dot_sizes(settings)
    length = long[2]
    lengths = torch.randint(batch[2] // 4, batch[2] + 1, (batch[0],))
    short_lengths = torch.randint(8, short[2] + 1, (short[0],))
    reach, documents = length // 32, length // 512 if settings.on_gpu else 8
    mean = length // documents  # document boundaries are shifted by up to a sixth of this
    edges = torch.arange(1, documents) * mean + torch.randint(-mean // 6, mean // 6 + 1, (documents - 1,))
    ids = torch.bucketize(torch.arange(length), edges, right=True)
    return [
        Dot("no mask", long),
        Dot("causal", long, masks.causal),
        Dot("padding", batch, lambda: masks.padding(lengths)),
        Dot("causal & padding", batch, lambda: masks.causal() & masks.padding(lengths)),
        Dot(f"{documents} documents & causal", long, lambda: masks.documents(ids) & masks.causal()),
        Dot(f"window({reach}, 0)", long, lambda: masks.window(reach, 0)),
        Dot("short, padding", short, lambda: masks.padding(short_lengths)),
        Dot("short, causal & padding", short, lambda: masks.causal() & masks.padding(short_lengths)),
    ]


def dot(report: Report, settings: AttentionSettings) -> None:
    for case in dot_cases(settings):
        try:
            measure_dot_case(report, settings, case)
        except Exception as error:
            report.failed(report.row("dot", case.name), "all", r.short(error))


def measure_dot_case(report: Report, settings: AttentionSettings, case: Dot) -> None:
    leaves = [settings.random(*case.size) for _ in range(3)]
    upstream = settings.random(*case.size, grad=False)
    mask = None if case.build_mask is None else case.build_mask()
    dense = dense_mask(mask, case.size[2], settings.device)
    runs: dict[str, Run] = {"ours": lambda: jumok.attend(*leaves, mask=mask)}
    if case.name.startswith("short"):  # building the mask for each batch may take longer than attention
        runs["ours, new mask"] = lambda: jumok.attend(*leaves, mask=case.build_mask and case.build_mask())
    options: dict[str, Any] = {"is_causal": mask is not None} if case.needs_no_tensor else {"attn_mask": dense}
    runs["sdpa"] = functools.partial(F.scaled_dot_product_attention, *leaves, **options)

    for which in PASSES:
        row = report.row("dot", case.name, which, dtype=str(settings.dtype), size=case.size)
        row["path"] = explain_path(*leaves, mask=mask)
        row["mask_mib"] = 0 if case.needs_no_tensor or dense is None else dense.untyped_storage().nbytes() / r.MIB
        for name, run in runs.items():
            report.measure(row, name, for_pass(which, run, leaves, upstream))
        for name, backend in BACKENDS.items():
            if settings.on_gpu and (case.needs_no_tensor or name != "flash"):  # flash supports no mask
                with sdpa_kernel(backend):
                    report.measure(row, name, for_pass(which, runs["sdpa"], leaves, upstream))
    checked = {"ours": lambda: [sample_rows(runs["ours"]())], "eager": lambda: [sample_rows(runs["sdpa"]())]}
    with torch.no_grad():
        report.check(row, ("out",), checked, lambda: [sample_rows_in_float64(leaves, dense)])


def dense_mask(mask: jumok.masks.Mask | None, length: int, device: torch.device) -> Tensor | None:
    """The mask as a tensor for SDPA: ``(B or 1, 1, N, N)``."""
    if mask is None:
        return None
    dense = mask.to_dense(length, length, device)
    return dense[:, None] if dense.dim() == 3 else dense[None, None]


def sample_rows(x: Tensor) -> Tensor:
    """Select 64 queries, including the first and the last."""
    return x[:, :, torch.linspace(0, x.shape[2] - 1, 64, device=x.device).long()]


def sample_rows_in_float64(leaves: list[Tensor], dense: Tensor | None) -> Tensor:
    query, key, value = (x.double() for x in leaves)
    scores = sample_rows(query) @ key.mT * query.shape[-1] ** -0.5
    if dense is not None:
        scores = scores.masked_fill(~sample_rows(dense), -torch.inf)
    return scores.softmax(-1) @ value


def dot_tables(rows: list[Row]) -> None:
    lines = []
    for row in rows:
        results = row["implementations"]
        best, best_ms = r.fastest(results, ["sdpa", *BACKENDS])
        row["ratios"] = {"best": ratio(r.get(results, "ours"), best_ms)}
        times = [r.get(results, name) for name in ("ours", "sdpa", *BACKENDS)]
        others = [
            best or "–",
            row["ratios"]["best"],
            r.get(results, "ours", "host_ms"),
            r.get(results, "ours", "mib"),
        ]
        mib = r.get(results, best, "mib")
        others.append(None if mib is None else mib + row["mask_mib"])
        lines.append([row["case"], PASSES[row["pass"]], *times, *others])
    title = "Dot product: ms, ratio of ours to the best SDPA, ms to launch ours, peak extra MiB (and mask)"
    head = ["case", "pass", "ours", "sdpa", *BACKENDS, "best", "/best", "launch", "MiB", "of best"]
    r.table(title, head, lines)
    for row in rows:
        result = row["implementations"].get("ours, new mask", {})
        if "ms" in result:
            launch = f", {r.number(result['host_ms'])} ms to launch" if "host_ms" in result else ""
            print(f"  {row['case']}, {row['pass']}, with a new mask: {r.number(result['ms'])} ms{launch}")
    r.error_table("Dot product, 64 rows", rows, ("out",))


# -------------------------------------------------------------------------------------------------- main

# "step" compiles longest, so it comes last and skips what exceeds the time limit.
SECTIONS = {
    "overhead": (overhead, overhead_tables),
    "additive": (additive, additive_tables),
    "dot": (dot, dot_tables),
    "step": (step, step_tables),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = r.build_parser(__doc__, [*SECTIONS], seconds=280)
    parser.add_argument("--case", default="", help="with --section step: only cases whose name contains this")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="no compiled PyTorch")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    settings = AttentionSettings.from_options(options, case=options.case)
    report = Report("attention", settings.device, seconds=options.seconds, repeats=3 if settings.quick else 20)
    report.begin(options.out, quick=options.quick, section=options.section)
    if settings.on_gpu:
        machine = report.head["machine"]
        clock = f"{machine['sm_mhz']} MHz by {machine['sm_mhz_from']}"
        report.log(f"floor: 16 tanh per clock, {machine['multiprocessors']} multiprocessors, {clock}")

    names = r.list_sections(options, SECTIONS)
    for name in names:
        report.run(SECTIONS, name, settings)
    for name in names:
        report.show(SECTIONS, name)
        r.print_paths([row for row in report.rows if row["section"] == name and "path" in row])
    report.end()


if __name__ == "__main__":
    main()
