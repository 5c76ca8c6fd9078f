"""Kills a training with SIGKILL, resumes it, and prints where it differs from an uninterrupted one.

    python training_kills.py FOLDER TIMED POINTS

TIMED kills come at random moments, two in one run. POINTS kills come at calls to the file system, spread over
all calls of a run: just before or just after a file is synced, renamed or removed. Each run is a fork of this
process, which is much faster than a new process; so this process itself must never train.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # the optimiser imports it: once here, not in every fork
from training_toy import PointData, Toy, quick, read_metrics, read_state, tensors_equal, validate_toy

from jumok.training import train

SETTINGS = quick(
    max_steps=17,
    schedule="cosine",
    validate_every=4,
    save_every=3,
    average_checkpoints=3,
    log_every=2,
    accumulation_steps=2,
)
CALLS = ("fsync", "replace", "unlink", "rmdir")  # calls that change the disk


def forked(work: Callable[[], object]) -> int:
    """Start a process that does this work; returns its id."""
    process = os.fork()
    if process == 0:
        torch.set_num_threads(1)
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return process


def run(folder: Path) -> None:
    train(Toy(dropout=0.3), PointData(), SETTINGS, folder, validate=validate_toy)


def counting(folder: Path, until: int, after: bool, calls: list[str]) -> None:
    """Run, and kill the process at the call of this number."""

    def deadly(real: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **options: object) -> object:
            calls.append(real.__name__)
            if len(calls) == until and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **options)
            if len(calls) == until:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    run(folder)


def finished(folder: Path) -> bool:
    """Run to the end in a process; returns whether it succeeded."""
    return os.waitpid(forked(lambda: run(folder)), 0)[1] == 0


def main(folder: Path, timed: int, points: int) -> dict[str, object]:
    chance = random.Random(7)
    whole, broken = folder / "whole", folder / "broken"
    assert finished(whole)

    def count_calls() -> None:
        calls: list[str] = []
        counting(folder / "counted", -1, False, calls)
        (folder / "calls").write_text(str(len(calls)))

    began = time.monotonic()
    os.waitpid(forked(count_calls), 0)
    lasts, number = time.monotonic() - began, int((folder / "calls").read_text())
    moments = [chance.uniform(0, lasts) for _ in range(timed)]
    kills: list[tuple[str, list[float]]] = [("moments", moments[i : i + 2]) for i in range(0, timed, 2)]
    kills += [("call", [1 + i * number // points]) for i in range(points)]
    killed, differ = 0, []
    for kind, times in kills:
        for when in times:
            if kind == "call":
                after = chance.random() < 0.5
                process = forked(lambda at=int(when), after=after: counting(broken, at, after, []))
            else:
                process = forked(lambda: run(broken))
                time.sleep(when)
                os.kill(process, signal.SIGKILL)
            killed += os.WIFSIGNALED(os.waitpid(process, 0)[1])
        if (
            not finished(broken)
            or read_metrics(broken) != read_metrics(whole)
            or not tensors_equal(read_state(broken), read_state(whole))
        ):
            differ.append(f"{kind} {times}")
            shutil.copytree(broken, folder / f"differs at {kind} {times}")
        shutil.rmtree(broken)
    return {"killed": killed, "calls": number, "differ": differ, "steps": len(read_metrics(whole, "train"))}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
