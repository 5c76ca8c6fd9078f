"""Host time: what Python, dispatch and autograd take, measured on a CPU.

A GPU that gets its kernels slower than it runs them waits for the host. On a CPU, with one thread and widths
so small that arithmetic hardly counts, the same code takes about this host time. So the ratio of two is
about the ratio that a GPU would show that waits for both of them.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import report as r
import torch
from report import Report, Row, Run
from torch.profiler import ProfilerActivity, profile


def measure_host_time(report: Report, row: Row, runs: Mapping[str, Run], *, repeats: int) -> None:
    """Measure implementations in turns, with one thread, and count what the host does in a call.

    ``ms`` is the median, and ``low`` the least, which other programs on the machine affect least.
    """
    report.note(row, load=os.getloadavg()[0])
    with _use_one_thread():
        times: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(repeats + 2):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if repeat > 1:  # the first calls warm up
                    times[name].append(1e3 * (time.perf_counter() - start))
        for name, run in runs.items():
            row["implementations"][name] = {
                "ms": statistics.median(times[name]),
                "low": min(times[name]),
                **count_host_work(run),
            }
            report.log_measurement(row, name, f"{r.number(row['implementations'][name]['ms'])} ms")
    report.save()


def show_host_time(row: Row, title: str, peer: str) -> None:
    """Print a row, and how many times as fast as the peer ours is."""
    results = row["implementations"]
    row["ratios"] = {name: r.ratio(r.get(results, peer, name), r.get(results, "ours", name)) for name in ("ms", "low")}
    head = ["implementation", "ms", "least ms", "ATen calls", "nodes", "functions", "Python calls"]
    counts = ("ms", "low", "aten", "nodes", "functions", "python")
    r.table(f"Host time, {title}", head, [[name, *map(figures.get, counts)] for name, figures in results.items()])
    print(f"  ours is {r.number(row['ratios']['ms'])} times as fast (least: {r.number(row['ratios']['low'])})")
    print("  host time: tiny widths on a CPU, so that Python and dispatch are all that is measured")


def count_host_work(run: Run) -> dict[str, int]:
    """Count the ATen operations, autograd nodes, custom autograd functions and Python functions of a call."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    names = [event.name for event in recorded.events()]
    node_prefix = "autograd::engine::evaluate_function: "
    nodes = [name.removeprefix(node_prefix) for name in names if name.startswith(node_prefix)]
    python_calls = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal python_calls
        python_calls += event == "call"

    sys.setprofile(count_call)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {
        "aten": sum(name.startswith("aten::") for name in names),
        "nodes": len(nodes),
        "functions": sum(name.endswith("Backward") for name in nodes),  # PyTorch's own end with a number
        "python": python_calls,
    }


@contextmanager
def _use_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
