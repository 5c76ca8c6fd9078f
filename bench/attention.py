"""How fast is attention? Ours, eager PyTorch and compiled PyTorch, side by side in one run.

    python bench/attention.py [--section overhead|additive|dot|step|all] [--quick] [--out file.json]

overhead   calls so small that the host's time is what counts, beside the same calls of plain PyTorch
additive   many queries at once with Bahdanau's score: v · tanh(W s + U h) for all pairs, softmax, mix
dot        scaled dot-product attention, plain and with structured masks, beside PyTorch's own kernels
step       one query at a time over prepared keys, as in an RNN decoder

Read the ratios; below 1, ours is the faster. On CUDA everything is bfloat16. The floor is what the special
function units need for one tanh a pair and hidden unit, at 16 a clock a multiprocessor; twice that for
forward and backward, where every tanh is needed again. (A kernel that makes do with fewer special functions
can go below it.) Without a GPU the sizes are small and there is no floor.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report as r
import torch
from report import Report, Row, Run, ratio
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import jumok

PASSES = {"forward": "fwd", "forward+backward": "f+b"}  # and what the tables call them
AT_ONCE = 1 << 26  # elements of the largest tensor of a float64 reference


@dataclass(frozen=True)
class Plan:
    """Where and how much to measure."""

    device: torch.device
    quick: bool
    compile: bool
    case: str = ""  # a part of the names of the cases of "step" that are measured

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    def random(self, *shape: int, grad: bool = True) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype).requires_grad_(grad)

    def additive(self, query_width: int, key_width: int, hidden: int) -> jumok.scores.Additive:
        """A score that prefers some keys to others, as a trained one does: a fresh one hardly does."""
        score = jumok.scores.Additive(query_width, key_width, hidden)
        with torch.no_grad():
            score.v.mul_(4)
        return score.to(self.device, self.dtype)


def for_pass(which: str, run: Run, leaves: Sequence[Tensor], upstream: Tensor) -> Run:
    """``run`` without gradients, or together with the gradients of all leaves."""
    if which == "forward":
        return torch.no_grad()(run)
    return lambda: torch.autograd.grad(run(), leaves, upstream)


def path(*arguments: Any, **more: Any) -> str:
    """The first line of what explain says."""
    try:
        return str(jumok.explain(*arguments, **more)).splitlines()[0]
    except Exception as error:
        return r.short(error)


# ----------------------------------------------------------------------------------------- overhead

SMALL = (2, 4, 8, 16)  # batch, heads, length, width of a head


def overhead(report: Report, plan: Plan) -> None:
    """Each call is repeated many times in turns with its peer; the time is the least of all repeats."""
    batch, heads, length, width = SMALL
    query, key, value = (plan.random(*SMALL) for _ in range(3))
    mask = jumok.masks.padding([length - 3, length])
    allowed = mask.to_dense(1, length, plan.device)[:, None].contiguous()
    score = plan.additive(width, width, width)
    states, keys, values = (plan.random(batch, n, width) for n in (1, length, length))
    prepared = score.prepare(keys)
    x = plan.random(batch, length, heads * width)
    ours = jumok.MultiHead(heads * width, heads).to(plan.device, plan.dtype)
    theirs = torch.nn.MultiheadAttention(heads * width, heads, batch_first=True).to(plan.device, plan.dtype)
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
        for case, ways in cases.items():
            ours.train(grad), theirs.train(grad)  # PyTorch has a faster way for inference
            row = report.row("overhead", case, "training" if grad else "inference")
            with torch.set_grad_enabled(grad):
                for way, ms in r.least_in_turns(ways, repeats=5 if plan.quick else 40).items():
                    row["ways"][way] = {"ms": ms}
            told = ", ".join(f"{way} {1e3 * r.get(row['ways'], way):.1f} µs" for way in ways)
            report.say(f"overhead  {case}  {row['pass']}: {told}")
            report.save()


def overhead_tables(rows: list[Row]) -> None:
    lines = []
    for row in rows:
        ours, plain = (1e3 * r.get(row["ways"], way) for way in ("ours", "plain"))
        row["ratios"] = {"plain": ratio(ours, plain)}
        lines.append([row["case"], row["pass"], ours, plain, ours - plain])
    title = f"Overhead, {' x '.join(map(str, SMALL))}: µs of one call on the host, ours and plain PyTorch"
    r.table(title, ["case", "pass", "ours", "plain", "difference"], lines)


# ------------------------------------------------------------------------------- additive, many queries

WAYS = ("ours", "eager", "compiled")
ADDITIVE_LEAVES = ("query", "key", "value", "W", "U", "v")


def additive_sizes(plan: Plan) -> list[tuple[int, int, int, int]]:
    """(B, Q, K, D)."""
    if plan.on_gpu:
        sizes = [(32, 128, 128, 512), (8, 512, 512, 512), (4, 1024, 1024, 256), (1, 4096, 4096, 128)]
        return sizes[:1] if plan.quick else sizes
    return [(2, 7, 11, 16)] if plan.quick else [(8, 64, 64, 128), (1, 256, 256, 64)]


def plain_additive(query: Tensor, key: Tensor, value: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The obvious code, with a tensor of B×Q×K×D."""
    pairs = torch.tanh((query @ w.T)[:, :, None, :] + (key @ u.T)[:, None, :, :])
    return torch.bmm((pairs @ v).softmax(-1), value)


def additive(report: Report, plan: Plan) -> None:
    for size in additive_sizes(plan):
        batch, queries, keys, width = size
        score = plan.additive(width, width, width)
        inputs = [plan.random(batch, n, width) for n in (queries, keys, keys)]
        leaves = [*inputs, score.query.weight, score.key.weight, score.v]
        upstream = plan.random(batch, queries, width, grad=False)
        ways: dict[str, Run] = {
            "ours": functools.partial(jumok.attend, *inputs, score=score),
            "eager": functools.partial(plain_additive, *leaves),
        }
        if plan.compile:
            ways["compiled"] = functools.partial(r.compiled(plain_additive), *leaves)
        for which in PASSES:
            row = report.row("additive", str(size).replace(" ", ""), which, dtype=str(plan.dtype))
            row["path"] = path(*inputs, score=score)
            row["floor_ms"] = tanh_floor(report, math.prod(size), times=1 if which == "forward" else 2)
            for name, run in ways.items():
                report.measure(row, name, for_pass(which, run, leaves, upstream))
        both = {name: functools.partial(and_gradients, run, leaves, upstream) for name, run in ways.items()}
        right = functools.partial(additive_in_float64, leaves, upstream)
        report.check(row, ("out", *ADDITIVE_LEAVES), both, right)


def tanh_floor(report: Report, count: int, times: int) -> float | None:
    """Milliseconds for ``count`` tanh, ``times`` over; None off the GPU."""
    about = report.head["machine"]
    if not about.get("sm_mhz"):
        return None
    return times * count / (16 * about["multiprocessors"] * about["sm_mhz"] * 1e3)


def and_gradients(run: Run, leaves: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    out = run()
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def additive_in_float64(leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """The output and all gradients, some rows of one sequence at a time."""
    query, key, value, *parameters = exact = [x.detach().double() for x in leaves]
    out = torch.empty_like(upstream, dtype=torch.float64)
    grads = [torch.zeros_like(x) for x in exact]
    rows = max(1, AT_ONCE // (key.shape[1] * len(parameters[-1])))
    for b in range(len(query)):
        for start in range(0, query.shape[1], rows):
            one, some = slice(b, b + 1), (slice(b, b + 1), slice(start, start + rows))
            part = [query[some], key[one], value[one], *parameters]
            part = [x.clone().requires_grad_() for x in part]
            run = functools.partial(plain_additive, *part)
            out[some], *found = and_gradients(run, part, upstream[some].double())
            for total, x in zip([grads[0][some], grads[1][one], grads[2][one], *grads[3:]], found, strict=True):
                total += x
    return [out, *grads]


def additive_tables(rows: list[Row]) -> None:
    lines = []
    for row in rows:
        ours, *others = times = [r.get(row["ways"], way) for way in WAYS]
        row["ratios"] = {"floor": ratio(ours, row["floor_ms"])}
        row["ratios"] |= {way: ratio(ours, ms) for way, ms in zip(WAYS[1:], others, strict=True)}
        launch, *mib = (
            r.get(row["ways"], "ours", "host_ms"),
            *(r.get(row["ways"], way, "mib") for way in WAYS),
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
    """What a decoding loop works on. The queries are there beforehand: the loop is attention alone."""

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

    def path(self) -> str:
        prepared = self.score.prepare(self.key)
        return path(self.query[0, :, None], prepared, self.value, score=self.score, mask=self.mask)

    def in_float64(self) -> Decoder:
        query, key, value = (x.detach().double().requires_grad_() for x in (self.query, self.key, self.value))
        return Decoder(self.steps, copy.deepcopy(self.score).double(), query, key, value, self.lengths)


def step_sizes(plan: Plan) -> list[tuple[int, int, int, int, int]]:
    """(B, K, hidden, query width, key and value width)."""
    if plan.on_gpu:
        sizes = [(80, 50, 1000, 1000, 2000), (32, 400, 256, 256, 256)]
        return sizes[:1] if plan.quick else sizes
    return [(3, 5, 8, 8, 16)] if plan.quick else [(16, 20, 64, 64, 128)]


def make_decoder(plan: Plan, size: tuple[int, int, int, int, int], masked: bool) -> Decoder:
    batch, keys, hidden, query_width, value_width = size
    steps = 50 if plan.on_gpu else 10
    return Decoder(
        steps=steps,
        score=plan.additive(query_width, value_width, hidden),
        query=plan.random(steps, batch, query_width),
        key=plan.random(batch, keys, value_width),
        value=plan.random(batch, keys, value_width),
        lengths=torch.randint(keys // 2, keys + 1, (batch,)) if masked else None,
    )


def ours_loop(d: Decoder) -> Run:
    mask = d.mask

    def run() -> list[Tensor]:
        prepared, contexts = d.score.prepare(d.key), []
        for query in d.query.unbind():
            context = jumok.attend(query[:, None], prepared, d.value, score=d.score, mask=mask)
            contexts.append(context.squeeze(1))  # a view both ways, where [:, 0] would be copied in the backward
        return contexts_and_gradients(contexts, d.leaves)

    return run


def plain_loop(d: Decoder, steps: Callable[..., Any], at_once: int) -> Run:
    """The same in plain PyTorch, where ``steps`` makes ``at_once`` steps in one call."""
    query, key, value, w, u, v = d.leaves
    allowed = None
    if d.lengths is not None:
        allowed = torch.arange(key.shape[1], device=key.device) < d.lengths.to(key.device)[:, None]

    def run() -> list[Tensor]:
        prepared, queries, contexts = key @ u.T, query.unbind(), []
        for start in range(0, d.steps, at_once):
            contexts += steps(queries[start : start + at_once], prepared, value, allowed, w, v)
        return contexts_and_gradients(contexts, d.leaves)

    return run


def plain_steps(
    queries: Sequence[Tensor], keys: Tensor, value: Tensor, allowed: Tensor | None, w: Tensor, v: Tensor
) -> list[Tensor]:
    """The contexts of some steps over prepared keys."""
    contexts = []
    for query in queries:
        scores = torch.tanh((query @ w.T)[:, None, :] + keys) @ v  # (B, K)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        contexts.append(torch.bmm(scores.softmax(-1)[:, None, :], value).squeeze(1))
    return contexts


def contexts_and_gradients(contexts: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """All contexts, and the gradients of half the sum of their squares."""
    out = torch.stack(contexts)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]


def step(report: Report, plan: Plan) -> None:
    """First all that Python launches, then graphs, then what takes long to compile, if the time suffices."""
    done: list[tuple[Row, Decoder, dict[str, Run]]] = []
    for size in step_sizes(plan):
        for masked in (True, False):
            case = f"B{size[0]} K{size[1]} hidden {size[2]}, {'padding' if masked else 'no mask'}"
            if plan.case not in case:
                continue
            decoder = make_decoder(plan, size, masked)
            row = report.row("step", case, "forward+backward", dtype=str(plan.dtype), size=size)
            report.note(row, steps=decoder.steps, path=decoder.path())
            ways = {"ours": ours_loop(decoder), "eager": plain_loop(decoder, plain_steps, 1)}
            if plan.compile:
                ways["compiled, 1 step"] = plain_loop(decoder, r.compiled(plain_steps), 1)
            for name, run in ways.items():
                report.measure(row, name, run, hide_launches=False)
            report.check(row, ("out", *STEP_LEAVES), ways, plain_loop(decoder.in_float64(), plain_steps, 1))
            done.append((row, decoder, ways))
    if not plan.on_gpu:
        return
    for row, _, ways in done:
        for name, run in reversed(ways.items()):  # ours last: a capture that fails may spoil the next ones
            as_graph(report, row, name, run)
    for at_once in () if plan.quick or not plan.compile else (10, 50):
        for row, decoder, _ in done:
            if decoder.lengths is not None:
                unrolled(report, row, decoder, at_once)


def as_graph(report: Report, row: Row, name: str, run: Run) -> None:
    """The same as a CUDA graph. What a replay writes over NaN must be what the launched one gives."""
    way = f"{name}, graph"
    if "error" in row["ways"][name] or report.left < 0:
        return report.failed(row, way, "skipped")
    try:
        replay, written = r.captured(run)
        for x in written:
            x.fill_(math.nan)
        replay()
        differs = max(r.relative_errors(written, run()), key=r.nan_last)
    except Exception as error:
        return report.failed(row, way, f"capture: {r.short(error)}")
    report.measure(row, way, replay)["differs"] = differs
    return report.save()


def unrolled(report: Report, row: Row, decoder: Decoder, at_once: int) -> None:
    """Several steps compiled as one."""
    name, known = f"compiled, {at_once} steps", row["ways"].get("compiled, 10 steps", {}).get("first_s", 15)
    guess = 1.2 * known * at_once / 10
    if guess + 15 > report.left:
        return report.failed(row, name, f"skipped, compiling would take about {guess:.0f} s")
    run = plain_loop(decoder, r.compiled(plain_steps), at_once)
    report.measure(row, name, run, hide_launches=False)
    return as_graph(report, row, name, run)


def step_tables(rows: list[Row]) -> None:
    lines: list[list[Any]] = []
    for row in rows:
        ways, row["ratios"] = row["ways"], {}
        pairs = []  # ours and the fastest compiled one: launched, and as graphs
        for how, end in (("launched", ""), ("graph", ", graph")):
            names = [name for name in ways if re.fullmatch(rf"compiled, \d+ steps?{end}", name)]
            if how == "graph" and not names:
                continue
            fast, fast_ms = r.fastest(ways, names)
            ours, eager = (r.get(ways, name + end) for name in ("ours", "eager"))
            at_once = "–" if fast is None else re.findall(r"\d+", fast)[0]
            mib = [None if end else r.get(ways, name, "mib") for name in ("ours", fast)]
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
        for name, way in row["ways"].items():
            if name.startswith("compiled") and way.get("first_s", 0) > 1:
                print(f"  compiling: {row['case']}, {name}: {way['first_s']:.1f} s")
            if not way.get("differs", 0) < 0.02:
                print(f"  DIFFERS from what is launched by {way['differs']:.1e}: {row['case']}, {name}")


# ------------------------------------------------------------------------------------------- dot product

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem-eff": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Dot:
    """One case: the size (B, H, N, d), and what makes the mask."""

    name: str
    size: tuple[int, int, int, int]
    make: Callable[[], jumok.masks.Mask] | None = None

    @property
    def by_flag(self) -> bool:
        """Whether SDPA can be told without a tensor."""
        return self.name in ("no mask", "causal")


def dot_sizes(plan: Plan) -> list[tuple[int, int, int, int]]:
    """One long sequence, a batch, and many short ones as in training a translator."""
    if plan.on_gpu:
        many = (128, 8, 64, 64)
        return [(1, 12, 2048, 64), (4, 12, 1024, 64), many] if plan.quick else [
            (1, 12, 16384, 64), (4, 12, 4096, 64), many]  # fmt: skip
    return [(1, 2, 64, 16), (2, 2, 32, 16), (4, 2, 16, 16)] if plan.quick else [
        (1, 4, 1024, 32), (2, 4, 512, 32), (32, 4, 64, 32)]  # fmt: skip


def dot_cases(plan: Plan) -> list[Dot]:
    masks = jumok.masks
    one, batch, many = dot_sizes(plan)
    length = one[2]
    some = torch.randint(batch[2] // 4, batch[2] + 1, (batch[0],))
    few = torch.randint(8, many[2] + 1, (many[0],))
    reach, documents = length // 32, length // 512 if plan.on_gpu else 8
    mean = length // documents  # a document ends within a sixth of that of where it would if all were equal
    edges = torch.arange(1, documents) * mean + torch.randint(-mean // 6, mean // 6 + 1, (documents - 1,))
    ids = torch.bucketize(torch.arange(length), edges, right=True)
    return [
        Dot("no mask", one),
        Dot("causal", one, masks.causal),
        Dot("padding", batch, lambda: masks.padding(some)),
        Dot("causal & padding", batch, lambda: masks.causal() & masks.padding(some)),
        Dot(f"{documents} documents & causal", one, lambda: masks.documents(ids) & masks.causal()),
        Dot(f"window({reach}, 0)", one, lambda: masks.window(reach, 0)),
        Dot("short, padding", many, lambda: masks.padding(few)),
        Dot("short, causal & padding", many, lambda: masks.causal() & masks.padding(few)),
    ]


def dot(report: Report, plan: Plan) -> None:
    for case in dot_cases(plan):
        try:
            dot_case(report, plan, case)
        except Exception as error:
            report.failed(report.row("dot", case.name), "all", r.short(error))


def dot_case(report: Report, plan: Plan, case: Dot) -> None:
    leaves = [plan.random(*case.size) for _ in range(3)]
    upstream = plan.random(*case.size, grad=False)
    mask = None if case.make is None else case.make()
    dense = dense_mask(mask, case.size[2], plan.device)
    ways: dict[str, Run] = {"ours": lambda: jumok.attend(*leaves, mask=mask)}
    if case.name.startswith("short"):  # where making the mask, once a batch, may take longer than attending
        ways["ours, new mask"] = lambda: jumok.attend(*leaves, mask=case.make and case.make())
    told: dict[str, Any] = {"is_causal": mask is not None} if case.by_flag else {"attn_mask": dense}
    ways["sdpa"] = functools.partial(F.scaled_dot_product_attention, *leaves, **told)

    for which in PASSES:
        row = report.row("dot", case.name, which, dtype=str(plan.dtype), size=case.size)
        row["path"] = path(*leaves, mask=mask)
        row["mask_mib"] = 0 if case.by_flag or dense is None else dense.untyped_storage().nbytes() / r.MIB
        for name, run in ways.items():
            report.measure(row, name, for_pass(which, run, leaves, upstream))
        for name, backend in BACKENDS.items():
            if plan.on_gpu and (case.by_flag or name != "flash"):  # flash takes no mask
                with sdpa_kernel(backend):
                    report.measure(row, name, for_pass(which, ways["sdpa"], leaves, upstream))
    checked = {"ours": lambda: [some_rows(ways["ours"]())], "eager": lambda: [some_rows(ways["sdpa"]())]}
    with torch.no_grad():
        report.check(row, ("out",), checked, lambda: [some_rows_in_float64(leaves, dense)])


def dense_mask(mask: jumok.masks.Mask | None, length: int, device: torch.device) -> Tensor | None:
    """The mask as one hands it to SDPA: ``(B or 1, 1, N, N)``."""
    if mask is None:
        return None
    dense = mask.to_dense(length, length, device)
    return dense[:, None] if dense.dim() == 3 else dense[None, None]


def some_rows(x: Tensor) -> Tensor:
    """64 of all queries, the first and the last among them."""
    return x[:, :, torch.linspace(0, x.shape[2] - 1, 64, device=x.device).long()]


def some_rows_in_float64(leaves: list[Tensor], dense: Tensor | None) -> Tensor:
    query, key, value = (x.double() for x in leaves)
    scores = some_rows(query) @ key.mT * query.shape[-1] ** -0.5
    if dense is not None:
        scores = scores.masked_fill(~some_rows(dense), -torch.inf)
    return scores.softmax(-1) @ value


def dot_tables(rows: list[Row]) -> None:
    lines = []
    for row in rows:
        ways = row["ways"]
        best, best_ms = r.fastest(ways, ["sdpa", *BACKENDS])
        row["ratios"] = {"best": ratio(r.get(ways, "ours"), best_ms)}
        times = [r.get(ways, name) for name in ("ours", "sdpa", *BACKENDS)]
        more = [
            best or "–",
            row["ratios"]["best"],
            r.get(ways, "ours", "host_ms"),
            r.get(ways, "ours", "mib"),
        ]
        mib = r.get(ways, best, "mib")
        more.append(None if mib is None else mib + row["mask_mib"])
        lines.append([row["case"], PASSES[row["pass"]], *times, *more])
    title = "Dot product: ms, ratio of ours to the best SDPA, ms to launch ours, peak extra MiB (and mask)"
    head = ["case", "pass", "ours", "sdpa", *BACKENDS, "best", "/best", "launch", "MiB", "best's"]
    r.table(title, head, lines)
    for row in rows:
        anew = row["ways"].get("ours, new mask", {})
        if "ms" in anew:
            launch = f", {r.number(anew['host_ms'])} ms to launch" if "host_ms" in anew else ""
            print(f"  {row['case']}, {row['pass']}, the mask made anew: {r.number(anew['ms'])} ms{launch}")
    r.error_table("Dot product, 64 rows", rows, ("out",))


# -------------------------------------------------------------------------------------------------- main

# In this order: what compiles longest comes last, and leaves out what does not fit into the time.
SECTIONS = {
    "overhead": (overhead, overhead_tables),
    "additive": (additive, additive_tables),
    "dot": (dot, dot_tables),
    "step": (step, step_tables),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--section", choices=[*SECTIONS, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="a look only: fewer, smaller, less often")
    parser.add_argument("--out", type=Path, help="the JSON file; runs/bench/… unless --quick")
    parser.add_argument("--case", default="", help="of step: only the cases whose name has this in it")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="no compiled PyTorch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=280, help="what does not fit into them is left out")
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    plan = Plan(torch.device(chosen.device), chosen.quick, chosen.compile, chosen.case)
    report = Report("attention", plan.device, seconds=chosen.seconds, repeats=3 if plan.quick else 20)
    report.begin(chosen.out, quick=chosen.quick, section=chosen.section)
    if plan.on_gpu:
        about = report.head["machine"]
        clock = f"{about['sm_mhz']} MHz by {about['sm_mhz_from']}"
        report.say(f"floor: 16 tanh a clock, {about['multiprocessors']} multiprocessors, {clock}")

    names = list(SECTIONS) if chosen.section == "all" else [chosen.section]
    for name in names:
        report.run(SECTIONS, name, plan)
    for name in names:
        report.show(SECTIONS, name)
        r.paths([row for row in report.rows if row["section"] == name and "path" in row])
    report.end()


if __name__ == "__main__":
    main()
