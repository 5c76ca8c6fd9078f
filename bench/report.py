"""What the benchmarks share: timing, memory, errors, a record of machine and commit, tables, JSON.

A benchmark makes one :class:`Report`, adds a row for each thing it measures, and in a row measures the
several *ways* of doing that thing, side by side in one process. The JSON is written anew after every
measurement, so a run that is cut short keeps what it had. A way that fails (out of memory, no such kernel)
says so in its place.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

MIB = 2**20
RESULTS = Path("runs/bench")  # what is to be kept is copied to bench/results
Run = Callable[[], Any]
Row = dict[str, Any]  # section, case, pass, ways, and what else belongs to it
Way = dict[str, Any]  # one measurement: ms, low, high, host_ms, mib, first_s; or error
Sections = Mapping[str, tuple[Callable[..., None], Callable[[list[Row]], None]]]  # measures, and shows


class Report:
    """The rows of one benchmark run, and the clock that it runs against."""

    def __init__(self, bench: str, device: torch.device, *, seconds: float = math.inf, repeats: int = 20) -> None:
        self.device, self.seconds, self.repeats = device, seconds, repeats
        self.out: Path | None = None  # the JSON file
        self.began = time.perf_counter()
        self.head: dict[str, Any] = {
            "bench": bench,
            "date": now(),
            "commit": commit(),
            "machine": machine(device),
        }
        self.rows: list[Row] = []

    @property
    def where(self) -> str:
        """The GPU's name or "cpu", as a part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.head["machine"].get("gpu", "cpu").lower())

    @property
    def took(self) -> float:
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """The seconds left of the time that this run was given."""
        return self.seconds - self.took

    def say(self, text: str) -> None:
        print(f"[{self.took:6.1f} s] {text}", flush=True)

    def begin(self, out: Path | None, *, quick: bool, section: str = "all") -> None:
        """Say on what machine it runs, and settle where it is written: nowhere if it is a look only."""
        part = "" if section == "all" else f"-{section}"
        self.out = out or (None if quick else RESULTS / f"{self.head['bench']}{part}-{self.where}.json")
        about = self.head["machine"]
        self.say(f"{about.get('gpu', about['cpu'])}, torch {about['torch']}, commit {self.head['commit']}")

    def run(self, sections: Sections, name: str, *given: Any, which: str = "", **more: Any) -> None:
        """Measure a section. One that breaks must not cost the others."""
        try:
            sections[name][0](self, *given, **more)
        except Exception as error:
            self.failed(self.row(name, "the rest of it", which), "all", short(error))

    def show(self, sections: Sections, name: str) -> None:
        """The tables of a section, and what could not be measured."""
        rows = [row for row in self.rows if row["section"] == name]
        if measured := [row for row in rows if "all" not in row["ways"]]:
            sections[name][1](measured)
        failures(rows)

    def end(self) -> None:
        self.save()
        self.say(f"done, written to {os.path.relpath(self.out)}" if self.out else "done")

    def row(self, section: str, case: str, which: str = "", **more: Any) -> Row:
        """A new row; ``which`` is the pass. Its ``ways`` are filled by :meth:`measure`."""
        row = {"section": section, "case": case, "pass": which, **more, "ways": {}}
        self.rows.append(row)
        return row

    def note(self, row: Row, **more: Any) -> None:
        """Add to a row."""
        row.update(more)
        self.save()

    def measure(self, row: Row, way: str, run: Run, *, hide_launches: bool = True) -> Way:
        """Measure one way of a row (see :func:`measure`), unless the time is up."""
        found: Way = {"error": "skipped, the time was up"}
        if self.left > 0:
            found = measure(run, self.device, repeats=self.repeats, hide_launches=hide_launches)
        row["ways"][way] = found
        text = found.get("error") or f"{number(found['ms'])} ms"
        if found.get("first_s", 0) > 1:
            text += f"   (first call {found['first_s']:.1f} s)"
        self.say(f"{row['section']}  {row['case']}  {row['pass']}  {way}: {text}")
        self.save()
        return found

    def measure_in_turns(self, row: Row, ways: dict[str, Run]) -> None:
        """Measure ways that are to be compared to a few percent, one after the other, again and again.

        A GPU that works hard grows warm, and slower. So each is measured as warm as the others.
        """
        found = {way: self.measure(row, way, run) for way, run in ways.items()}
        if self.device.type != "cuda" or any("error" in one for one in found.values()):
            return
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self.repeats):
            for way, run in ways.items():
                times[way].append(_timed(run, found[way]["ms"] / 1e3, hide_launches=True)[0])
        for way, ms in times.items():
            found[way].update(_spread(ms))
            told = f"{row['section']}  {row['case']}  {row['pass']}  {way}"
            self.say(f"{told}, in turns: {number(found[way]['ms'])} ms")
        self.save()

    def failed(self, row: Row, way: str, why: str) -> None:
        """Say that a way of a row could not be measured."""
        row["ways"][way] = {"error": why}
        self.say(f"{row['section']}  {row['case']}  {row['pass']}  {way}: {why}")
        self.save()

    def check(self, row: Row, names: Sequence[str], ways: dict[str, Run], right: Run) -> None:
        """The relative errors of what "ours" and "eager" give against ``right()``, which is in float64."""
        errors: dict[str, Any] = {}
        try:
            reference = right()
            for way in ("ours", "eager"):
                errors[way] = dict(zip(names, relative_errors(ways[way](), reference), strict=True))
        except Exception as error:
            errors["error"] = short(error)
        self.note(row, errors=errors)
        tidy(self.device)

    def save(self) -> None:
        if self.out is None:
            return
        found = _plain({**self.head, "seconds": self.took, "rows": self.rows})
        self.out.parent.mkdir(parents=True, exist_ok=True)
        beside = self.out.with_name(self.out.name + ".part")
        beside.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(beside, self.out)


# ------------------------------------------------------------------------------------------------ timing


def measure(
    run: Run, device: torch.device, *, repeats: int = 20, seconds: float = 0.4, hide_launches: bool = True
) -> Way:
    """The median time of ``run()`` in ms, how it spreads, and the peak memory beyond what was there before.

    On CUDA, ``ms`` is the time between two events on the GPU, after the L2 cache was emptied, and ``host_ms``
    what Python needs to launch the work. With ``hide_launches`` the GPU is kept asleep until all is launched:
    ``ms`` is then the GPU's work alone, and a program that keeps the GPU busy pays about the larger of the
    two. Without, ``ms`` holds the waiting for launches too. ``first_s`` is the first call, which compiles.
    """
    try:
        if device.type == "cuda":
            return _on_gpu(run, repeats, seconds, hide_launches)
        return _on_cpu(run, repeats, seconds)
    except Exception as error:
        found = {"error": short(error)}
    tidy(device)
    return found


def _on_cpu(run: Run, repeats: int, seconds: float) -> Way:
    first, once = _clocked(run), _clocked(run)
    times = [_clocked(run) * 1e3 for _ in range(_affordable(once, repeats, seconds))]
    return {**_spread(times), "first_s": first}


def _on_gpu(run: Run, repeats: int, seconds: float, hide_launches: bool) -> Way:
    first = _clocked(run)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _clocked(run)
    mib = (torch.cuda.max_memory_allocated() - before) / MIB
    once = _clocked(run)
    times, host = [], []
    for _ in range(_affordable(once, repeats, seconds)):
        took, launching = _timed(run, once, hide_launches)
        times.append(took)
        host.append(launching)
    return {**_spread(times), "host_ms": statistics.median(host), "mib": mib, "first_s": first}


def _timed(run: Run, once: float, hide_launches: bool) -> tuple[float, float]:
    """Milliseconds on the GPU, and of Python launching it; ``once`` is about the seconds a call takes."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _sweep().zero_()
    if hide_launches:
        torch.cuda._sleep(int(min(2 * once + 1e-4, 3e-3) * 2e9))  # longer than a launch, in ticks
    begin.record()
    start = time.perf_counter()
    run()
    host = (time.perf_counter() - start) * 1e3
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host


def _clocked(run: Run) -> float:
    """Seconds from the call until everything is done. The result is dropped only after the clock is read."""
    start = time.perf_counter()
    kept = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    took = time.perf_counter() - start
    del kept
    return took


def least_in_turns(ways: Mapping[str, Run], *, repeats: int, calls: int = 200) -> dict[str, float]:
    """The least milliseconds that the host needs for one call of each way.

    The ways take turns, and a repeat is many calls: what else the machine does falls on all of them alike.
    """
    least = dict.fromkeys(ways, math.inf)
    for repeat in range(repeats + 1):
        for way, run in ways.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            took = time.perf_counter() - start
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:  # the first warms up
                least[way] = min(least[way], 1e3 * took / calls)
    return least


def _affordable(once: float, repeats: int, seconds: float) -> int:
    return max(min(5, repeats), min(repeats, int(seconds / max(once, 1e-9))))


def _spread(times: list[float]) -> Way:
    times = sorted(times)
    return {
        "ms": statistics.median(times),
        "low": times[len(times) // 5],
        "high": times[-1 - len(times) // 5],
        "repeats": len(times),
    }


_SWEEP: list[Tensor] = []


def _sweep() -> Tensor:
    """A buffer larger than any L2 cache; writing it leaves nothing else in there."""
    if not _SWEEP:
        _SWEEP.append(torch.empty(256 * MIB, dtype=torch.int8, device="cuda"))
    return _SWEEP[0]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` of a copy of ``function``, for the sizes that it is first called with.

    What is compiled is kept with the code object. A copy of its own keeps one size from making the next one
    dynamic, which would be slower, and from using up the number of recompilations allowed.
    """
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__,
                        function.__defaults__, function.__closure__)  # fmt: skip
    return torch.compile(copy, dynamic=False)


def captured(run: Run) -> tuple[Run, Any]:
    """``run()`` as a CUDA graph: what replays it, and the tensors that a replay writes."""
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
        torch.cuda.set_stream(main)  # a capture that fails leaves its own stream behind
    return graph.replay, written


def tidy(device: torch.device) -> None:
    """Give back what the last measurement left on the GPU."""
    if device.type == "cuda":
        gc.collect()
        with contextlib.suppress(RuntimeError):  # what broke the GPU's context was reported where it happened
            torch.cuda.empty_cache()


def relative_errors(came: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    """‖came − right‖ / ‖right‖ of each pair, in float64."""
    pairs = ((x.detach().double(), y.detach().double()) for x, y in zip(came, right, strict=True))
    return [float((x - y).norm() / y.norm()) for x, y in pairs]


def nan_last(x: float) -> float:
    """To sort by: NaN is larger than any number."""
    return math.inf if math.isnan(x) else x


# ---------------------------------------------------------------------------------- machine and commit


def machine(device: torch.device) -> dict[str, Any]:
    found = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["gpu"] = about.name
        found["gpu_gib"] = round(about.total_memory / 2**30, 1)
        found["multiprocessors"] = about.multi_processor_count
        found["sm_mhz"], found["sm_mhz_from"] = _sm_clock(about)
        found["driver"] = _nvidia_smi("driver_version")
        found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    return found


def _sm_clock(about: Any) -> tuple[float | None, str]:
    """The highest clock of the multiprocessors in MHz, and who says so."""
    told = _nvidia_smi("clocks.max.sm")
    if told and told.split()[0].isdigit():
        return float(told.split()[0]), "nvidia-smi"
    if getattr(about, "clock_rate", None):
        return about.clock_rate / 1e3, "torch"
    return None, "unknown"


def _nvidia_smi(what: str) -> str | None:
    """One answer about the GPU in use; about the first one where it cannot be told which that is."""
    chosen = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    asked = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    told = _output([*asked, f"--id=GPU-{chosen}"]) or _output(asked)
    return told.splitlines()[0].strip() if told else None


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


def commit() -> str:
    """The commit measured, "+changes" where files differ from it; JUMOK_COMMIT tells it where git cannot."""
    told = os.environ.get("JUMOK_COMMIT")
    if told:
        return told
    here = ["git", "-C", str(Path(__file__).parent)]
    found = _output([*here, "rev-parse", "--short", "HEAD"])
    if found is None:
        return "unknown"
    return found + ("+changes" if _output([*here, "status", "--porcelain"]) else "")


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


# --------------------------------------------------------------------------------------------- printing


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under their headings; numbers to the right, None as a dash."""
    cells = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
    widths = [max(len(x) for x in column) for column in zip(head, *cells, strict=True)]
    words = [all(isinstance(row[n], str) for row in rows) for n in range(len(head))]
    print(f"\n{title}")
    for line in [head, ["─" * width for width in widths], *cells]:
        aligned = (x.ljust(w) if left else x.rjust(w) for x, w, left in zip(line, widths, words, strict=True))
        print("  ".join(aligned).rstrip())


def number(x: float | None) -> str:
    """Three digits that matter."""
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


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def get(ways: dict[str, Way], way: str | None, what: str = "ms") -> float | None:
    """What was measured of a way, None where it was not."""
    return ways.get(way or "", {}).get(what)


def fastest(ways: dict[str, Way], names: Sequence[str]) -> tuple[str | None, float | None]:
    """The fastest of those of the ways that were measured, and its ms."""
    times = {name: ways[name]["ms"] for name in names if "ms" in ways.get(name, {})}
    best = min(times, key=lambda name: times[name], default=None)
    return best, None if best is None else times[best]


def error_table(title: str, rows: Sequence[Row], names: Sequence[str]) -> None:
    """How far ours is from float64, and as a multiple of how far eager PyTorch in the same dtype is."""
    lines = []
    for row in rows:
        ours, eager = (row.get("errors", {}).get(way) for way in ("ours", "eager"))
        if ours and eager:
            worst = max(ours.values(), key=nan_last)
            lines.append([row["case"], ours["out"], worst, *(ratio(ours[name], eager[name]) for name in names)])
    if lines:
        head = ["case", "error: out", "worst", f"/eager: {names[0]}", *(f"d{name}" for name in names[1:])]
        table(f"{title}: relative error against float64, and as a multiple of eager PyTorch's", head, lines)


def paths(rows: Sequence[Row]) -> None:
    """Print which path each case takes."""
    if not rows:
        return
    print("\nThe path that attend takes:")
    for case, path in {row["case"]: row["path"] for row in rows}.items():
        print(f"  {case}: {path}" if len(case) + len(path) < 106 else f"  {case}:\n      {path}")


def failures(rows: Sequence[Row]) -> None:
    """Print what could not be measured or checked, and why."""
    for row in rows:
        for name, way in row["ways"].items():
            if "error" in way:
                print(f"  not measured: {row['case']}, {row['pass']}, {name}: {way['error']}")
        if "error" in row.get("errors", {}):
            print(f"  not checked: {row['case']}: {row['errors']['error']}")


def short(error: BaseException) -> str:
    """The kind of an error and the first line of its message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _plain(x: Any) -> Any:
    """``x`` with what JSON knows: five digits are enough, and it has no NaN."""
    if isinstance(x, dict):
        return {str(key): _plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else str(x)
    return x
