"""Shared by the benchmarks: settings, timing, memory, errors, the machine and commit, tables, JSON.

A benchmark creates one :class:`Report` and adds a row for each thing it measures. A row compares several
*implementations* of one thing in one process. The JSON file is written again after every measurement, so an interrupted
run keeps its results. An implementation that fails (out of memory, missing kernel) has an error instead of times.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

MIB = 2**20
RESULTS = Path("runs/bench")  # results worth keeping are copied to bench/results
TIME_LIMIT = "skipped, the time limit was reached"
Run = Callable[[], Any]
Row = dict[str, Any]  # section, case, pass, implementations, and further keys of the section
Measurement = dict[str, Any]  # of one implementation: ms, low, high, host_ms, mib, first_s; or error
Sections = Mapping[str, tuple[Callable[..., None], Callable[[list[Row]], None]]]  # measure, print tables


@dataclass(frozen=True)
class Settings:
    """Where and how much to measure."""

    device: torch.device
    quick: bool = False
    compile: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_batches(self) -> int:
        """Number of steps of a round."""
        return 4 if self.on_gpu and not self.quick else 2

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @classmethod
    def from_options(cls, options: argparse.Namespace, **fields: Any) -> Any:
        device = torch.device(options.device)
        on_gpu = device.type == "cuda"
        compiles = getattr(options, "compile", False)
        compiles = on_gpu if compiles is None else compiles
        return cls(device, options.quick, compiles, torch.bfloat16 if on_gpu else torch.float32, **fields)


def build_parser(
    description: str | None, sections: Sequence[str] = (), *, seconds: float | None = 540, device: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the options that the benchmarks share."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    if sections:
        parser.add_argument("--section", choices=[*sections, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repeats; writes no file")
    parser.add_argument("--out", type=Path, help="output file; default: runs/bench/…, none with --quick")
    if device:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        parser.add_argument("--seconds", type=float, default=seconds, help="time limit; the rest is skipped")
    return parser


def add_compile_option(parser: argparse.ArgumentParser) -> None:
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--compile", action=flag, help="use torch.compile; default: on a GPU only")


def list_sections(options: argparse.Namespace, sections: Sections | Mapping[str, Any]) -> list[str]:
    return list(sections) if options.section == "all" else [options.section]


def run_training_benchmark(
    name: str, description: str | None, sections: Sections, arguments: Sequence[str] | None
) -> None:
    """The main program of a benchmark of training steps."""
    parser = build_parser(description, [*sections])
    add_compile_option(parser)
    options = parser.parse_args(arguments)
    settings = Settings.from_options(options)
    report = Report(name, settings.device, seconds=options.seconds, repeats=3 if settings.quick else 10)
    report.begin(options.out, quick=options.quick, section=options.section)
    names = list_sections(options, sections)
    for section in names:
        report.run(sections, section, settings)
    for section in names:
        report.show(sections, section)
    report.end()


class Report:
    """The rows of one run of a benchmark, and its time limit."""

    def __init__(self, bench: str, device: torch.device, *, seconds: float = math.inf, repeats: int = 20) -> None:
        self.device, self.seconds, self.repeats = device, seconds, repeats
        self.out: Path | None = None  # the JSON file
        self.start = time.perf_counter()
        self.head: dict[str, Any] = {
            "bench": bench,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": get_commit(),
            "machine": describe_machine(device),
        }
        self.rows: list[Row] = []

    @property
    def device_name(self) -> str:
        """The GPU's name or "cpu", as used in file names."""
        return re.sub(r"[^a-z0-9]+", "-", self.head["machine"].get("gpu", "cpu").lower())

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def seconds_left(self) -> float:
        return self.seconds - self.elapsed

    def log(self, text: str) -> None:
        print(f"[{self.elapsed:6.1f} s] {text}", flush=True)

    def log_measurement(self, row: Row, name: str, text: str) -> None:
        self.log(f"{row['section']}  {row['case']}  {row['pass']}  {name}: {text}")

    def begin(self, out: Path | None, *, quick: bool, section: str = "all") -> None:
        """Log the machine, and choose the output file; a quick run has none by default."""
        suffix = "" if section == "all" else f"-{section}"
        self.out = out or (None if quick else RESULTS / f"{self.head['bench']}{suffix}-{self.device_name}.json")
        machine = self.head["machine"]
        self.log(f"{machine.get('gpu', machine['cpu'])}, torch {machine['torch']}, commit {self.head['commit']}")

    def run(self, sections: Sections, name: str, *arguments: Any, which: str = "", **options: Any) -> None:
        """Measure a section. If it fails, the other sections still run."""
        try:
            sections[name][0](self, *arguments, **options)
        except Exception as error:
            self.failed(self.row(name, "remaining cases", which), "all", short(error))

    def show(self, sections: Sections, name: str) -> None:
        """Print the tables of a section, and what could not be measured."""
        rows = [row for row in self.rows if row["section"] == name]
        if measured := [row for row in rows if "all" not in row["implementations"]]:
            sections[name][1](measured)
        print_failures(rows)

    def end(self) -> None:
        self.save()
        self.log(f"done, written to {os.path.relpath(self.out)}" if self.out else "done")

    def row(self, section: str, case: str, which: str = "", **values: Any) -> Row:
        """Add a row; ``which`` is the pass. :meth:`measure` fills its ``implementations``."""
        row = {"section": section, "case": case, "pass": which, **values, "implementations": {}}
        self.rows.append(row)
        return row

    def note(self, row: Row, **values: Any) -> None:
        """Add values to a row."""
        row.update(values)
        self.save()

    def measure(self, row: Row, name: str, run: Run, *, hide_launches: bool = True) -> Measurement:
        """Measure one implementation of a row (see :func:`measure`), unless the time limit was reached."""
        result: Measurement = {"error": TIME_LIMIT}
        if self.seconds_left > 0:
            result = measure(run, self.device, repeats=self.repeats, hide_launches=hide_launches)
        row["implementations"][name] = result
        text = result.get("error") or f"{number(result['ms'])} ms"
        if result.get("first_s", 0) > 1:
            text += f"   (first call {result['first_s']:.1f} s)"
        self.log_measurement(row, name, text)
        self.save()
        return result

    def measure_in_turns(self, row: Row, runs: dict[str, Run]) -> None:
        """Measure implementations that are compared to a few percent, in turns.

        A busy GPU heats up and slows down. In turns, all implementations are measured at the same temperature.
        """
        results = {name: self.measure(row, name, run) for name, run in runs.items()}
        if self.device.type != "cuda" or any("error" in result for result in results.values()):
            return
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.repeats):
            for name, run in runs.items():
                times[name].append(_time_on_gpu(run, results[name]["ms"] / 1e3, hide_launches=True)[0])
        for name, ms in times.items():
            results[name].update(summarize(ms))
            self.log_measurement(row, name, f"{number(results[name]['ms'])} ms, in turns")
        self.save()

    def failed(self, row: Row, name: str, reason: str) -> None:
        """Record why an implementation of a row could not be measured."""
        row["implementations"][name] = {"error": reason}
        self.log_measurement(row, name, reason)
        self.save()

    def check(self, row: Row, names: Sequence[str], runs: dict[str, Run], reference: Run) -> None:
        """Note the relative errors of "ours" and "eager" against ``reference()``, which is in float64."""
        errors: dict[str, Any] = {}
        try:
            expected = reference()
            for name in ("ours", "eager"):
                errors[name] = dict(zip(names, relative_errors(runs[name](), expected), strict=True))
        except Exception as error:
            errors["error"] = short(error)
        self.note(row, errors=errors)
        free_memory(self.device)

    def save(self) -> None:
        if self.out is None:
            return
        result = _to_json({**self.head, "seconds": self.elapsed, "rows": self.rows})
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_name(self.out.name + ".part")
        partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, self.out)


# ------------------------------------------------------------------------------------------------ timing


def measure(
    run: Run, device: torch.device, *, repeats: int = 20, seconds: float = 0.4, hide_launches: bool = True
) -> Measurement:
    """Return the median time of ``run()`` in ms, its spread, and the peak of additionally allocated memory.

    On CUDA, ``ms`` is the time between two events on the GPU, after the L2 cache was emptied, and ``host_ms`` is the
    time that Python needs to launch the work. With ``hide_launches`` the GPU sleeps until everything is launched, so
    that ``ms`` is the GPU's work alone. A program that keeps the GPU busy needs about the larger of the two. Without
    ``hide_launches``, ``ms`` includes waiting for launches. ``first_s`` is the time of the first call, which compiles.
    """
    try:
        if device.type == "cuda":
            return _measure_on_gpu(run, repeats, seconds, hide_launches)
        return _measure_on_cpu(run, repeats, seconds)
    except Exception as error:
        result = {"error": short(error)}
    free_memory(device)
    return result


def _measure_on_cpu(run: Run, repeats: int, seconds: float) -> Measurement:
    first, once = time_call(run), time_call(run)
    times = [time_call(run) * 1e3 for _ in range(_count_repeats(once, repeats, seconds))]
    return {**summarize(times), "first_s": first}


def _measure_on_gpu(run: Run, repeats: int, seconds: float, hide_launches: bool) -> Measurement:
    first = time_call(run)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    time_call(run)
    mib = (torch.cuda.max_memory_allocated() - before) / MIB
    once = time_call(run)
    pairs = [_time_on_gpu(run, once, hide_launches) for _ in range(_count_repeats(once, repeats, seconds))]
    times, host = map(list, zip(*pairs, strict=True))
    return {**summarize(times), "host_ms": statistics.median(host), "mib": mib, "first_s": first}


def _time_on_gpu(run: Run, once: float, hide_launches: bool) -> tuple[float, float]:
    """Milliseconds on the GPU, and of Python launching the work; a call takes about ``once`` seconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _get_flush_buffer().zero_()
    if hide_launches:
        torch.cuda._sleep(int(min(2 * once + 1e-4, 3e-3) * 2e9))  # longer than a launch, in ticks
    start.record()
    host_start = time.perf_counter()
    run()
    host = (time.perf_counter() - host_start) * 1e3
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), host


def time_call(run: Run) -> float:
    """Seconds until the work of a call is done. The result is freed after the clock is read."""
    start = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    del result
    return seconds


def least_in_turns(runs: Mapping[str, Run], *, repeats: int, calls: int = 200) -> dict[str, float]:
    """Return the least milliseconds that the host needs for one call of each implementation.

    They take turns, and a repeat has many calls, so that other load on the machine affects all alike.
    """
    least = dict.fromkeys(runs, math.inf)
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            seconds = time.perf_counter() - start
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:  # the first one warms up
                least[name] = min(least[name], 1e3 * seconds / calls)
    return least


def _count_repeats(once: float, repeats: int, seconds: float) -> int:
    return max(min(5, repeats), min(repeats, int(seconds / max(once, 1e-9))))


def summarize(times: list[float]) -> Measurement:
    times = sorted(times)
    return {
        "ms": statistics.median(times),
        "low": times[len(times) // 5],
        "high": times[-1 - len(times) // 5],
        "repeats": len(times),
    }


_FLUSH_BUFFER: list[Tensor] = []


def _get_flush_buffer() -> Tensor:
    """A buffer larger than any L2 cache; writing to it evicts everything else."""
    if not _FLUSH_BUFFER:
        _FLUSH_BUFFER.append(torch.empty(256 * MIB, dtype=torch.int8, device="cuda"))
    return _FLUSH_BUFFER[0]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` of a copy of ``function``, for the sizes of the first call.

    PyTorch caches compiled code by code object. With a copy for each size, a second size neither makes the shapes
    dynamic, which would be slower, nor counts towards the limit of recompilations.
    """
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__,
                        function.__defaults__, function.__closure__)  # fmt: skip
    return torch.compile(copy, dynamic=False)


def captured(run: Run) -> tuple[Run, Any]:
    """Capture ``run()`` as a CUDA graph; return the function that replays it, and the tensors that a replay writes."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    main.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            written = run()
    finally:
        torch.cuda.set_stream(main)  # a failed capture leaves its own stream current
    return graph.replay, written


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 products exactly."""
    flags = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = flags


def free_memory(device: torch.device) -> None:
    """Free the GPU memory of the last measurement."""
    if device.type == "cuda":
        gc.collect()
        with contextlib.suppress(RuntimeError):  # an error of the GPU's context was already reported
            torch.cuda.empty_cache()


def relative_errors(results: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """‖result − expected‖ / ‖expected‖ of each pair, in float64."""
    pairs = ((x.detach().double(), y.detach().double()) for x, y in zip(results, expected, strict=True))
    return [float((x - y).norm() / y.norm()) for x, y in pairs]


def nan_last(x: float) -> float:
    """Sort key for which NaN is larger than any number."""
    return math.inf if math.isnan(x) else x


# ---------------------------------------------------------------------------------- machine and commit


def describe_machine(device: torch.device) -> dict[str, Any]:
    machine = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["gpu"] = properties.name
        machine["gpu_gib"] = round(properties.total_memory / 2**30, 1)
        machine["multiprocessors"] = properties.multi_processor_count
        machine["sm_mhz"], machine["sm_mhz_from"] = _sm_clock(properties)
        machine["driver"] = _query_nvidia_smi("driver_version")
        machine["cuda"], machine["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    return machine


def _sm_clock(properties: Any) -> tuple[float | None, str]:
    """The highest clock of the multiprocessors in MHz, and its source."""
    clock = _query_nvidia_smi("clocks.max.sm")
    if clock and clock.split()[0].isdigit():
        return float(clock.split()[0]), "nvidia-smi"
    if getattr(properties, "clock_rate", None):
        return properties.clock_rate / 1e3, "torch"
    return None, "unknown"


def _query_nvidia_smi(field: str) -> str | None:
    """A property of the current GPU, or of the first one if the current one cannot be identified."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    output = _get_output([*command, f"--id=GPU-{uuid}"]) or _get_output(command)
    return output.splitlines()[0].strip() if output else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return str(triton.__version__)


def get_commit() -> str:
    """The commit, with "+changes" if files differ from it. JUMOK_COMMIT overrides it, for machines without git."""
    if commit := os.environ.get("JUMOK_COMMIT"):
        return commit
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = _get_output([*git, "rev-parse", "--short", "HEAD"])
    if commit is None:
        return "unknown"
    return commit + ("+changes" if _get_output([*git, "status", "--porcelain"]) else "")


def _get_output(command: list[str]) -> str | None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() or None


# --------------------------------------------------------------------------------------------- printing


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table. Numbers are aligned to the right, None is a dash."""
    cells = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
    widths = [max(len(x) for x in column) for column in zip(head, *cells, strict=True)]
    is_text = [all(isinstance(row[n], str) for row in rows) for n in range(len(head))]
    print(f"\n{title}")
    for line in [head, ["─" * width for width in widths], *cells]:
        aligned = (x.ljust(w) if left else x.rjust(w) for x, w, left in zip(line, widths, is_text, strict=True))
        print("  ".join(aligned).rstrip())


def number(x: float | None) -> str:
    """Format a number with three significant digits."""
    if x is None:
        return "–"
    if not math.isfinite(x):
        return str(x)
    if abs(x) >= 99.95 or x == 0:
        return f"{x:,.0f}"
    if abs(x) < 1e-3:
        return f"{x:.1e}"
    x = float(f"{x:.3g}")
    return f"{x:.{max(0, 2 - math.floor(math.log10(abs(x))))}f}"


def ratio(x: float | None, y: float | None) -> float | None:
    return None if x is None or not y else x / y


def format_values(values: Mapping[str, Any], spec: str) -> str:
    """Format named numbers, such as "ours 3, loop 4"."""
    return ", ".join(f"{name} {value:{spec}}" for name, value in values.items())


def ratios_to_peers(results: dict[str, Measurement], peers: Sequence[str]) -> dict[str, float | None]:
    """Time of each implementation of ours to that of each peer, named "ours / peer"."""
    own = [name for name in results if name.startswith("ours")]
    return {f"{name} / {peer}": ratio(get(results, name), get(results, peer)) for name in own for peer in peers}


def print_peers(peers: Sequence[str]) -> None:
    """Print what the columns "× a", "× b", … are compared with."""
    print("  times as fast as " + ", ".join(f"{mark}: {peer}" for mark, peer in zip("abcd", peers, strict=False)))


def speedups(results: dict[str, Measurement], name: str, peers: Sequence[str]) -> list[float | None]:
    return [ratio(get(results, peer), get(results, name)) for peer in peers]


def print_start_differences(results: dict[str, Measurement], label: str) -> None:
    """Print a warning if the implementations do not start with the same number, to about a percent."""
    starts = [result["start"] for result in results.values() if "start" in result]
    if starts and not max(starts) - min(starts) <= 0.01 * abs(max(starts)):
        print(f"  DIFFERENT: {label} at the start is {', '.join(f'{x:.4g}' for x in starts)}")


def print_loads(rows: Sequence[Row]) -> None:
    loads = [row["load"] for row in rows]
    print(f"  load average before each case, this process included: {min(loads):.1f} to {max(loads):.1f}")


def get(results: dict[str, Measurement], name: str | None, key: str = "ms") -> float | None:
    """A number of an implementation, or None if it was not measured."""
    return results.get(name or "", {}).get(key)


def fastest(results: dict[str, Measurement], names: Sequence[str]) -> tuple[str | None, float | None]:
    """The fastest of the named implementations that were measured, and its ms."""
    times = {name: results[name]["ms"] for name in names if "ms" in results.get(name, {})}
    best = min(times, key=lambda name: times[name], default=None)
    return best, None if best is None else times[best]


def error_table(title: str, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Print our relative error against float64, and its ratio to that of eager PyTorch in the same dtype."""
    lines = []
    for row in rows:
        ours, eager = (row.get("errors", {}).get(result) for result in ("ours", "eager"))
        if ours and eager:
            worst = max(ours.values(), key=nan_last)
            lines.append([row["case"], ours["out"], worst, *(ratio(ours[name], eager[name]) for name in names)])
    if lines:
        head = ["case", "error: out", "worst", f"/eager: {names[0]}", *(f"d{name}" for name in names[1:])]
        table(f"{title}: relative error against float64, and its ratio to eager PyTorch's", head, lines)


def print_paths(rows: Sequence[Row]) -> None:
    """Print how attend computes each case."""
    if not rows:
        return
    print("\nPath of attend:")
    for case, path in {row["case"]: row["path"] for row in rows}.items():
        print(f"  {case}: {path}" if len(case) + len(path) < 106 else f"  {case}:\n      {path}")


def print_failures(rows: Sequence[Row]) -> None:
    """Print what could not be measured or checked, and the reasons."""
    for row in rows:
        for name, result in row["implementations"].items():
            if "error" in result:
                print(f"  not measured: {row['case']}, {row['pass']}, {name}: {result['error']}")
        if "error" in row.get("errors", {}):
            print(f"  not checked: {row['case']}: {row['errors']['error']}")


def short(error: BaseException) -> str:
    """The type of an error and the first nonempty line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _to_json(x: Any) -> Any:
    """Convert ``x`` to JSON values: five digits are enough, and NaN becomes a string."""
    if isinstance(x, dict):
        return {str(key): _to_json(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_to_json(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else str(x)
    return x
