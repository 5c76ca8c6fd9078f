"""Which models of transformers `jumok.watch` captures, and whether their maps are right.

A tiny model of each model type, with random weights, runs with and without ``watch``, with eager attention and
with the implementation that transformers chooses. The outputs must be equal to the bit. Each captured map is
compared with an oracle that shares no code with jumok: :class:`AttentionOracle`, and for weights in chunks, blocks or
samples ``value_derivatives``::

    python bench/watch_coverage.py                                     # every type, about five minutes
    python bench/watch_coverage.py --only bert llama                   # some types
    python bench/watch_coverage.py --jobs 2 --table docs/coverage.md   # writes the table of the documentation
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import multiprocessing
import queue
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report as r
import tiny_models
import torch
import transformers
import value_derivatives
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from jumok.errors import JumokError
from jumok.look.capture.watch import watch

NO_MAP = "it has no map of queries and keys"  # the end of the reason in ``missed_layers``
TOLERANCE = 2e-5  # largest difference between a weight and the oracle's, both in float32
# The worst comes first: a type has the first verdict that applies to one of its runs.
VERDICTS = {
    "output changed": "`watch` changes the output of the model",
    "wrong": "a captured map differs from the weights that the model uses",
    "silent": "an attention is neither captured nor named in `missed_layers`",
    "missed": "some attention is not captured; `missed_layers` names it, with the reason",
    "no map": "what is not captured has no map, as a recurrence; `missed_layers` says what it is. The rest is right",
    "channel map": "all maps are over channels, not positions; they are right",
    "right": "every attention is captured, and every map is right",
    "no attention": "the tiny model has no attention; `watch` says that it captured none",
    "no inputs": "none of the inputs that were tried fit the tiny model",
    "not built": "no tiny model could be built",
    "no result": "the process ended or exceeded the time limit",
}
# Softmaxes that multiply something, but are not attention.
OTHER_SOFTMAXES = {"convbert": "the kernels of its dynamic convolution"}
# The first two are right, the next two have attention that cannot be captured, the last one has none.
QUICK_TYPES = ("bert", "bloom", "swiftformer", "yoso", "convnext")


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", metavar="TYPE", help="model types to check; all by default")
    options.add_argument("--quick", action="store_true", help=f"check only {', '.join(QUICK_TYPES)}")
    options.add_argument("--jobs", type=int, default=1, help="number of processes")
    options.add_argument("--seconds", type=float, default=30, help="time limit for one type")
    options.add_argument("--out", type=Path, help="JSON file to write")
    options.add_argument("--table", type=Path, help="Markdown page to write")
    chosen = options.parse_args(arguments)
    report = r.Report("coverage", torch.device("cpu"), repeats=1)
    report.head["machine"]["transformers"] = transformers.__version__
    report.begin(chosen.out, quick=chosen.quick)
    types = chosen.only or (QUICK_TYPES if chosen.quick else tiny_models.list_model_types())
    for model_type, result in check_types(types, chosen.jobs, chosen.seconds):
        report.note(report.row("coverage", model_type), **result)
        report.log(f"{model_type}: {result['verdict']}  {result.get('detail', '')}"[:96].rstrip())
    show(report.rows)
    if chosen.table:
        chosen.table.write_text(format_page(report.head, report.rows), encoding="utf-8")
    report.end()


# --------------------------------------------------------------------------------------------------- oracle


@dataclass(eq=False)
class Reference:
    """Weights that the model computed."""

    weights: Tensor  # a copy, keys last
    source: Tensor  # the tensor itself: kept, so that its memory is not reused
    is_used: bool = False  # whether values were multiplied with it


class AttentionOracle(TorchFunctionMode):
    """Records everything that may be the weights of an attention, by interception of functions of PyTorch.

    These are the output of each softmax; the weights of fused functions, computed again from their arguments in
    the plainest way; and nonnegative factors of products, which are weights that were modified after their softmax.
    """

    SOFTMAXES = ("softmax", "_softmax", "special_softmax")
    PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum")

    def __init__(self) -> None:
        super().__init__()
        self.references: list[Reference] = []
        self._last_lse: Tensor | None = None
        self._output_scale: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in self.PRODUCTS:
            self._record_factors(args)  # before the product, which may overwrite them
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._add(compute_sdpa_weights(*args, **kwargs), is_used=True)
        elif func is F.multi_head_attention_forward:
            options = {**kwargs, "need_weights": True, "average_attn_weights": False}
            self._add(func(*args, **options)[1], is_used=True)
        elif name in self.SOFTMAXES and isinstance(out, Tensor) and out.dim() >= 3:
            self._record_softmax(out, kwargs["dim"] if "dim" in kwargs else args[1])
        elif name == "logsumexp":
            self._last_lse = out
        elif name == "sigmoid" and self._last_lse is not None and out.shape == self._last_lse.shape:
            self._output_scale = out
        return out

    def _record_softmax(self, out: Tensor, dim: int) -> None:
        weights = out.movedim(dim, -1)
        scale, self._output_scale = self._output_scale, None
        if scale is not None and scale.shape == weights.shape[:-1]:
            weights = weights * scale[..., None]  # a sink as a factor of the output: sigmoid(logsumexp(scores) - sink)
        self._add(weights, source=out)

    def _record_factors(self, args: Any) -> None:
        flat = itertools.chain.from_iterable(x if isinstance(x, list | tuple) else (x,) for x in args)
        factors = [x for x in flat if isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 3]
        for side, factor in enumerate(factors[-2:]):
            owners = [x for x in self.references if x.source.data_ptr() == factor.data_ptr()]
            for owner in owners:
                owner.is_used = True
            if not owners and factor.numel() and bool((factor >= 0).all()):
                self._add(factor.mT if side else factor)

    def _add(self, weights: Tensor, source: Tensor | None = None, is_used: bool = False) -> None:
        weights = weights.detach().float().clone()
        self.references.append(Reference(weights, weights if source is None else source, is_used))


def compute_sdpa_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the weights of ``F.scaled_dot_product_attention``, as its documentation defines them."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        is_boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_boolean else scores + attn_mask
    return scores.softmax(-1)


def match_call(weights: Tensor, references: list[Reference]) -> tuple[float | None, Reference | None]:
    """Return the smallest difference from any reference, and the reference if it is small enough."""
    smallest = None
    for reference in references:
        for expected in list_layouts(reference.weights, weights.shape):
            difference = compute_difference(weights, expected)
            if difference <= TOLERANCE:
                return difference, reference
            smallest = difference if smallest is None else min(smallest, difference)
    return smallest, None


def list_layouts(reference: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """List the ways to read a reference as weights ``(B, H, Q, K)``."""
    *_, num_queries, num_keys = shape
    if reference.shape[-1] == num_keys + 1:  # the last column is a sink
        reference = reference[..., :-1]
    if reference.numel() != math.prod(shape) or reference.shape[-1] != num_keys:
        return
    if reference.shape[-2] == num_queries or num_queries == 1:
        yield reference.reshape(shape)
    if reference.dim() > 4:  # windows are a part of the batch
        for order in itertools.permutations(range(reference.dim() - 2)):
            yield reference.permute(*order, -2, -1).reshape(shape)


def compute_difference(weights: Tensor, expected: Tensor) -> float:
    """Return the largest difference, without rows that have no visible key: softmaxes differ in these."""
    rows = (weights.sum(-1) > 0) & ~expected.isnan().any(-1)
    difference = float((weights - expected)[rows].abs().max()) if rows.any() else 0.0
    return math.inf if math.isnan(difference) else difference


# ---------------------------------------------------------------------------------------------- one model


def check_type(model_type: str) -> dict[str, Any]:
    """Check one model type: its verdict, and the details of each run."""
    models = tiny_models.build_models(model_type)
    errors: list[str] = []
    while True:
        try:
            model = next(models, None)
        except Exception as error:
            return {"verdict": "not built", "detail": r.short(error)}
        if model is None:
            return {"verdict": "no inputs", "detail": errors[0]}
        inputs = find_inputs(model, errors)
        if inputs is not None:
            return {"class": type(model).__name__, **check_model(model_type, model, inputs)}


def find_inputs(model: nn.Module, errors: list[str]) -> dict[str, Any] | None:
    """Return the first inputs that the model accepts, or None after the errors of all."""
    for inputs in tiny_models.InputBuilder(model).list_inputs():
        try:
            call_model(model, inputs)
            return inputs
        except Exception as error:
            errors.append(f"{', '.join(inputs)}: {r.short(error)}"[:200])
    return None


def check_model(model_type: str, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Check a model with each of its implementations of attention."""
    shapes = {name: list(x.shape) for name, x in inputs.items() if isinstance(x, Tensor)}
    default = getattr(model.config, "_attn_implementation", None) or "eager"
    eager_references: list[Reference] = []
    results = {}
    for implementation in dict.fromkeys(("eager", default)):
        try:
            model.set_attn_implementation(implementation)
            call_model(model, inputs)
        except Exception:
            if implementation != default:
                continue  # some models have only one implementation, and some have a defective one
        results[implementation] = check_implementation(model_type, model, inputs, eager_references)
    worst = min(results.values(), key=lambda result: list(VERDICTS).index(result["verdict"]))
    return {
        "inputs": shapes,
        "verdict": worst["verdict"],
        "detail": worst.get("detail", ""),
        "implementations": results,
    }


def check_implementation(
    model_type: str, model: nn.Module, inputs: Mapping[str, Any], eager_references: list[Reference]
) -> dict[str, Any]:
    """Compare one implementation of attention with its own references and those of eager attention."""
    with AttentionOracle() as oracle:
        call_model(model, inputs)
    own_references = oracle.references
    before = call_model(model, inputs)
    detail = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with watch(model) as captures:
                after = call_model(model, inputs)
        except JumokError as error:  # nothing was captured
            detail = str(error)
    missed = captures.missed_layers
    result: dict[str, Any] = {"calls": len(captures.calls), "missed": len(missed)}
    if not is_equal(before, after):
        return {**result, "verdict": "output changed"}
    uncovered = list(own_references)
    differences: list[float] = []
    for call in captures.calls:
        weights = call.weights().float()
        difference, reference = match_call(weights, [*uncovered, *own_references, *eager_references])
        if reference is None:
            derivative_difference, inner_references = match_derivative(model, inputs, call.name, weights)
            if derivative_difference > TOLERANCE:
                return {**result, "verdict": "wrong", "difference": difference, "detail": f"{call.name} {call.shape}"}
            difference = derivative_difference
            uncovered = [x for x in uncovered if not any(is_copy(x, inner) for inner in inner_references)]
        uncovered = [x for x in uncovered if x is not reference]
        differences.append(difference or 0.0)
    if not eager_references:
        eager_references += own_references
    result["difference"] = max(differences, default=None)
    unseen = (
        [x for x in uncovered if x.is_used and x.weights.shape[-1] > 1] if model_type not in OTHER_SOFTMAXES else []
    )
    others = {name: reason for name, reason in missed.items() if not reason.endswith(NO_MAP)}
    if others:
        name, reason = next(iter(others.items()))
        return {**result, "verdict": "missed", "detail": f"{name}: {reason}"}
    if unseen:
        shapes = sorted({tuple(x.weights.shape) for x in unseen})
        return {**result, "verdict": "silent", "detail": f"weights of shape {', '.join(map(str, shapes))}"}
    if missed:
        name, reason = next(iter(missed.items()))
        return {**result, "verdict": "no map", "detail": f"{name}: {reason}"}
    if not captures.calls:
        return {**result, "verdict": "no attention", "detail": detail}
    is_channel_map = all(call.kind == "channel" for call in captures.calls)
    return {**result, "verdict": "channel map" if is_channel_map else "right"}


def match_derivative(
    model: nn.Module, inputs: Mapping[str, Any], name: str, weights: Tensor
) -> tuple[float, list[Reference]]:
    """Compare a map with the derivatives of its module.

    Returns the smallest difference, and the softmaxes that the module computed.
    """
    smallest, references = math.inf, []
    for call in value_derivatives.record_calls(model, [name], lambda: call_model(model, inputs)):
        with AttentionOracle() as oracle, torch.no_grad():
            torch.manual_seed(3)
            call.module(*call.args, **call.kwargs)
        references += oracle.references
        smallest = min(smallest, value_derivatives.compute_difference(call, weights))
    return smallest, references


def is_copy(reference: Reference, other: Reference) -> bool:
    """Return whether two references are equal."""
    return reference.weights.shape == other.weights.shape and torch.equal(reference.weights, other.weights)


def call_model(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run the model on a copy of the inputs, with the same random numbers each time."""
    torch.manual_seed(3)
    copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    with torch.no_grad():
        return model(**copies)


def is_equal(output: Any, other: Any) -> bool:
    """Return whether two outputs have the same tensors, to the bit."""
    pairs = itertools.zip_longest(list_tensors(output), list_tensors(other))
    return all(
        x is not None and y is not None and x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in pairs
    )


def list_tensors(output: Any) -> Iterator[Tensor]:
    """List the tensors in an output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from list_tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from list_tensors(value)


# -------------------------------------------------------------------------------------------- processes


def check_types(types: Sequence[str], jobs: int, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Check model types in several processes. Results come in the order of the types."""
    idle_workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    workers = [Worker() for _ in range(min(jobs, len(types)))]
    for worker in workers:
        idle_workers.put(worker)

    def check(model_type: str) -> dict[str, Any]:
        worker = idle_workers.get()
        try:
            return worker.check(model_type, seconds)
        finally:
            idle_workers.put(worker)

    with ThreadPoolExecutor(len(workers)) as threads:
        yield from zip(types, threads.map(check, types), strict=True)
    for worker in workers:
        worker.stop()


class Worker:
    """A process that checks types one after the other. It is replaced if it crashes or hangs."""

    START_SECONDS = 300  # for the imports

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=serve, args=(remote,), daemon=True)
        self.process.start()
        remote.close()
        self.is_started = False

    def check(self, model_type: str, seconds: float) -> dict[str, Any]:
        try:
            if not self.is_started and self.connection.poll(self.START_SECONDS):
                self.is_started = self.connection.recv()
            self.connection.send(model_type)
            if self.connection.poll(seconds):
                result: dict[str, Any] = self.connection.recv()
                return result
            detail = f"exceeded {seconds:g} seconds"
        except (EOFError, OSError):
            self.process.join()
            detail = f"the process ended with exit code {self.process.exitcode}"
        self.stop()
        self.__init__()  # type: ignore[misc]
        return {"verdict": "no result", "detail": detail}

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def serve(connection: Any) -> None:
    """Check the types that come in, in a process of its own."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    connection.send(True)
    while True:
        try:
            model_type = connection.recv()
        except EOFError:
            return
        try:
            result = check_type(model_type)
        except Exception as error:
            result = {"verdict": "no result", "detail": r.short(error)}
        connection.send(result)


# ---------------------------------------------------------------------------------------------- results


def show(rows: list[r.Row]) -> None:
    """Print the number of types of each verdict, and what needs attention."""
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    r.table("Model types by verdict", ["verdict", "types"], [[x, str(n)] for x, n in counts.items() if n])
    for row in rows:
        if row["verdict"] in ("output changed", "wrong", "silent", "no result"):
            print(f"  {row['case']}: {row['verdict']}  {row.get('detail', '')}"[:110].rstrip())


def format_page(head: Mapping[str, Any], rows: list[r.Row]) -> str:
    """Return the page of the documentation."""
    machine = head["machine"]
    lines = [
        "# Coverage of transformers",
        "",
        f"Which models of transformers {machine['transformers']} `jumok.watch` captures, with torch {machine['torch']}",
        f"and jumok at commit {head['commit']}. A tiny model of each type, with random weights, runs with eager",
        "attention and with the implementation that transformers chooses. The outputs with and without `watch` must be",
        "equal to the bit. Each map is compared with the weights that the model computed, or with a plain softmax of",
        "the arguments of a fused kernel.",
        "`python bench/watch_coverage.py --jobs 2 --table docs/coverage.md` writes this page.",
        "",
        "| verdict | types | meaning |",
        "| --- | --- | --- |",
    ]
    by_verdict = {verdict: [row for row in rows if row["verdict"] == verdict] for verdict in VERDICTS}
    lines += [f"| {verdict} | {len(by_verdict[verdict])} | {meaning} |" for verdict, meaning in VERDICTS.items()]
    for verdict, members in by_verdict.items():
        if not members:
            continue
        lines += ["", f"## {verdict.capitalize()}", ""]
        if verdict in ("output changed", "wrong", "silent", "missed", "no map"):
            lines += ["| type | detail |", "| --- | --- |"]
            lines += [f"| {row['case']} | {row['detail']} |".replace("×", "x") for row in members]
        else:
            lines += [", ".join(row["case"] for row in members)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
