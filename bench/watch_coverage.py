"""Which models of transformers, timm, diffusers and x-transformers `jumok.watch` captures; whether maps are right.

A tiny model of each model type, with random weights, runs with and without ``watch``, with eager attention and
with the implementation that its library chooses. The outputs must be equal to the bit. Each captured map is
compared with an oracle that shares no code with jumok: :mod:`attention_oracle`, and for weights in chunks, blocks or
samples :mod:`value_derivatives`::

    python bench/watch_coverage.py                                     # every model of the installed libraries
    python bench/watch_coverage.py --library timm                      # one library
    python bench/watch_coverage.py --only bert llama                   # some models
    python bench/watch_coverage.py --jobs 2 --table docs/coverage.md   # writes the table of the documentation

Libraries may be in a folder of their own: ``pip install --no-deps --target FOLDER timm torchvision diffusers
x-transformers einx einops torch-einops-utils frozendict loguru``, and ``PYTHONPATH=FOLDER``. Some models of
transformers need timm.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import itertools
import json
import logging
import math
import multiprocessing
import queue
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import report as r
import torch
import transformers
import value_derivatives
from attention_oracle import TOLERANCE, AttentionOracle, Reference, match_call
from coverage_libraries import LIBRARIES, call_model, list_installed
from torch import Tensor, nn

from jumok.errors import JumokError
from jumok.look.capture.watch import watch

NO_MAP = "it has no map of queries and keys"  # the end of the reason in ``missed_layers``
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


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--library", nargs="+", choices=LIBRARIES, help="libraries; all that are installed by default")
    options.add_argument("--only", nargs="+", metavar="CASE", help="models to check, by their names in the table")
    options.add_argument("--quick", action="store_true", help="check only a few models of each library")
    options.add_argument("--jobs", type=int, default=1, help="number of processes")
    options.add_argument("--seconds", type=float, default=60, help="time limit for one model")
    options.add_argument("--out", type=Path, help="JSON file to write")
    options.add_argument("--update", type=Path, help="JSON file of an earlier run; its other models are kept")
    options.add_argument("--table", type=Path, help="Markdown page to write")
    chosen = options.parse_args(arguments)
    report = r.Report("coverage", torch.device("cpu"), repeats=1)
    libraries = chosen.library or list_installed()
    report.head["libraries"] = {name: importlib.metadata.version(name) for name in libraries}
    report.begin(chosen.out, quick=chosen.quick)
    cases = list_cases(libraries, chosen.only, chosen.quick)
    if chosen.update:
        keep_results(report, chosen.update, cases)
    for (library, case), result in check_cases(cases, chosen.jobs, chosen.seconds):
        report.note(report.row(library, case), **result)
        report.log(f"{case}: {result['verdict']}  {result.get('detail', '')}"[:96].rstrip())
    report.rows.sort(key=lambda row: list(LIBRARIES).index(row["section"]))
    show(report.rows)
    if chosen.table:
        chosen.table.write_text(format_page(report.head, report.rows), encoding="utf-8")
    report.end()


def keep_results(report: r.Report, path: Path, cases: Sequence[Case]) -> None:
    """Add the results of an earlier run to a report, except those of the models that are checked again."""
    earlier = json.loads(path.read_text(encoding="utf-8"))
    report.head["libraries"] = {**earlier["libraries"], **report.head["libraries"]}
    checked = set(cases)
    report.rows += [
        {"commit": earlier["commit"], **row} for row in earlier["rows"] if (row["section"], row["case"]) not in checked
    ]


def list_cases(libraries: Sequence[str], only: Sequence[str] | None, quick: bool) -> list[Case]:
    """List the models to check. ``only`` may have names that no library lists."""
    listed = [
        (name, case)
        for name in libraries
        for case in (LIBRARIES[name].quick_cases if quick and not only else LIBRARIES[name].list_cases())
    ]
    if only is None:
        return listed
    known = [x for x in listed if x[1] in only]
    unknown = set(only) - {case for _, case in known}
    if unknown:
        raise SystemExit(f"no model of {', '.join(libraries)} is named {', '.join(sorted(unknown))}")
    return known


# ---------------------------------------------------------------------------------------------- one model


def check_case(library: str, case: str) -> dict[str, Any]:
    """Check one model: its verdict, and the details of each run."""
    errors: list[str] = []
    try:
        found = LIBRARIES[library].find_model(case, errors)
    except (RuntimeError, ImportError) as error:
        return {"verdict": "not built", "detail": str(error)[:200]}
    if found is None:
        return {"verdict": "no inputs", "detail": errors[0] if errors else ""}
    return {"class": found.title, **check_model(library, case, found.model, found.inputs)}


def check_model(library: str, case: str, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Check a model with each of its implementations of attention."""
    shapes = {name: list(x.shape) for name, x in inputs.items() if isinstance(x, Tensor)}
    eager_references: list[Reference] = []
    results = {}
    implementations = LIBRARIES[library].list_implementations(model)
    for name, select in implementations:
        try:
            select()
            call_model(model, inputs)
        except Exception:
            if name != implementations[-1][0]:
                continue  # some models have only one implementation, and some have a defective one
        results[name] = check_implementation(case, model, inputs, eager_references)
    worst = min(results.values(), key=lambda result: list(VERDICTS).index(result["verdict"]))
    return {
        "inputs": shapes,
        "verdict": worst["verdict"],
        "detail": worst.get("detail", ""),
        "implementations": results,
    }


def check_implementation(
    case: str, model: nn.Module, inputs: Mapping[str, Any], eager_references: list[Reference]
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
        except Exception as error:
            return {"verdict": "output changed", "detail": f"watch raises {r.short(error)}"}
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
    unseen = [x for x in uncovered if x.is_used and x.weights.shape[-1] > 1] if case not in OTHER_SOFTMAXES else []
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


Case = tuple[str, str]  # a library, and what of it


def check_cases(cases: Sequence[Case], jobs: int, seconds: float) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Check models in several processes. Results come in the order of the cases."""
    idle_workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    workers = [Worker() for _ in range(min(jobs, len(cases)))]
    for worker in workers:
        idle_workers.put(worker)

    def check(case: Case) -> dict[str, Any]:
        worker = idle_workers.get()
        try:
            return worker.check(case, seconds)
        finally:
            idle_workers.put(worker)

    with ThreadPoolExecutor(len(workers)) as threads:
        yield from zip(cases, threads.map(check, cases), strict=True)
    for worker in workers:
        worker.stop()


class Worker:
    """A process that checks models one after the other. It is replaced if it crashes or hangs."""

    START_SECONDS = 300  # for the imports

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=serve, args=(remote,), daemon=True)
        self.process.start()
        remote.close()
        self.is_started = False

    def check(self, case: Case, seconds: float) -> dict[str, Any]:
        try:
            if not self.is_started and self.connection.poll(self.START_SECONDS):
                self.is_started = self.connection.recv()
            self.connection.send(case)
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
    """Check the cases that come in, in a process of its own."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    connection.send(True)
    while True:
        try:
            library, case = connection.recv()
        except EOFError:
            return
        try:
            result = check_case(library, case)
        except Exception as error:
            result = {"verdict": "no result", "detail": r.short(error)}
        connection.send(result)


# ---------------------------------------------------------------------------------------------- results


def show(rows: list[r.Row]) -> None:
    """Print the number of models of each verdict, and what needs attention."""
    libraries = list(dict.fromkeys(row["section"] for row in rows))
    lines = [[verdict, *(str(n) for n in count(rows, libraries, verdict))] for verdict in VERDICTS]
    r.table("Models by verdict", ["verdict", *libraries], [x for x in lines if set(x[1:]) != {"0"}])
    for row in rows:
        if row["verdict"] in ("output changed", "wrong", "silent", "no result"):
            print(f"  {row['case']}: {row['verdict']}  {row.get('detail', '')}"[:110].rstrip())


def count(rows: list[r.Row], libraries: Sequence[str], verdict: str) -> list[int]:
    """Return the number of models of each library with a verdict."""
    return [sum(row["section"] == x and row["verdict"] == verdict for row in rows) for x in libraries]


def format_page(head: Mapping[str, Any], rows: list[r.Row]) -> str:
    """Return the page of the documentation."""
    libraries = list(dict.fromkeys(row["section"] for row in rows))
    versions = [f"{name} {head['libraries'][name]}" for name in libraries]
    listed = " and ".join([", ".join(versions[:-1]), versions[-1]] if len(versions) > 1 else versions)
    lines = [
        "# Coverage of model libraries",
        "",
        f"Which models of {listed} `jumok.watch` captures,",
        f"with torch {head['machine']['torch']} and jumok at commit {head['commit']}. A tiny model of each, with",
        "random weights, runs with eager attention and with the implementation that its library chooses. The outputs",
        "with and without `watch` must be equal to the bit. Each map is compared with the weights that the model",
        "computed, or with a plain softmax of the arguments of a fused kernel.",
        "`python bench/watch_coverage.py --jobs 2 --table docs/coverage.md` writes this page.",
        "",
        f"| verdict | {' | '.join(libraries)} | meaning |",
        f"| --- |{' ---: |' * len(libraries)} --- |",
    ]
    lines += [
        f"| {verdict} | {' | '.join(map(str, count(rows, libraries, verdict)))} | {meaning} |"
        for verdict, meaning in VERDICTS.items()
    ]
    earlier = collections.Counter(row["commit"] for row in rows if "commit" in row)
    units = [f"{count_all(rows, name)} {LIBRARIES[name].plural} of {name}" for name in libraries]
    lines += ["", f"Checked: {', '.join(units)}."]
    for commit, num_models in earlier.items():
        lines += ["", f"{num_models} results are those of an earlier run, at commit {commit}."]
    for library in libraries:
        lines += ["", f"## {library}"]
        for verdict in VERDICTS:
            members = [row for row in rows if (row["section"], row["verdict"]) == (library, verdict)]
            if members:
                lines += ["", f"### {verdict.capitalize()}: {len(members)}", "", *format_members(verdict, members)]
    return "\n".join(lines) + "\n"


def count_all(rows: list[r.Row], library: str) -> int:
    return sum(row["section"] == library for row in rows)


def format_members(verdict: str, members: list[r.Row]) -> list[str]:
    """Return the models of a verdict: a table with the reasons, or a list of names."""
    if verdict in ("right", "channel map", "no attention"):
        return ["; ".join(row["case"] for row in members)]
    details = [" ".join(row["detail"].split()).replace("|", "/").replace("×", "x")[:180] for row in members]
    rows = [f"| {row['case']} | {detail} |" for row, detail in zip(members, details, strict=True)]
    return ["| model | detail |", "| --- | --- |", *rows]


if __name__ == "__main__":
    main()
