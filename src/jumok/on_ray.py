"""The work of ``jumok run`` on a Ray cluster: many workers, the same predictions, in the same order.

::

    numbers of windows of the file  ►  Ray Data: workers that read their window, and the model  ►  answers

Ray decides where the workers are and starts them anew where a machine fails. All machines must see the run
and the file by the same path. Which cluster it is, the environment says (``RAY_ADDRESS``); without one, this
machine is one, with a worker for each core.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jumok import lines
from jumok.bulk import Job, Said, Worker
from jumok.data.files import needed
from jumok.errors import InputError, JumokError
from jumok.run import Run

__all__ = ["Cluster", "started"]

MOST_TASKS = 100_000  # that Ray is given; of a longer file each has several windows


@contextlib.contextmanager
def started(job: Job, file: Path | None, begun: int) -> Iterator[Cluster]:
    """Workers on the cluster, for what is left of a file behind the ``begun`` first lines."""
    if job.maps or hasattr(job.task, "Kept"):
        raise InputError("--engine ray is for many lines of text; files and maps are made by --engine torch")
    if file is None or file.suffix == ".gz" or (hasattr(job.task, "inputs") and job.objects is None):
        raise InputError(
            "--engine ray reads a file of lines, .txt, .tsv or .jsonl, not gzipped, that all machines see; "
            "pictures are named in a .jsonl file"
        )
    ray = needed("ray", "ray")
    data = needed("ray.data", "ray")
    own = not ray.is_initialized()
    if own:  # what Ray tells of its own work is in its logs
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield Cluster(ray, data, job, file.resolve(), begun)
    finally:
        if own:
            ray.shutdown()


class Cluster:
    """Many workers that look from here like one, which is asked for one window after the other."""

    def __init__(self, ray: Any, data: Any, job: Job, file: Path, begun: int) -> None:
        self._ray, self._data, self._file = ray, data, file
        # A relative path means nothing elsewhere.
        self._job = replace(job, engine="torch", run=Run(job.run.folder.resolve(), job.run.recipe))
        self._begun = begun // lines.AT_ONCE
        self._found: Iterator[dict[str, Any]] | None = None
        self.picture: Path | None = None

    def answers(self, some: list[str], first: int) -> Iterator[Said]:
        """What is said of the next window, which is this one."""
        if self._found is None:
            self._found = self._all()
        found = next(self._found)
        if (found["first"], found["count"]) != (first, len(some)):
            raise InputError(f"{self._file} changes while it is read")
        yield Said(found["lines"], found["told"])
        if found["error"] is not None:
            raise InputError(found["error"])

    def _all(self) -> Iterator[dict[str, Any]]:
        edges = _edges(self._file)
        left = len(edges) - 1 - self._begun
        context = self._data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        have = self._ray.cluster_resources()
        on_gpu = self._job.device != "cpu" and int(have.get("GPU", 0))
        most = int(on_gpu or have.get("CPU", 1)) or 1
        answers = self._data.range(left, override_num_blocks=min(left, MOST_TASKS)).map_batches(
            Mapped,
            batch_size=1,
            fn_constructor_args=(self._job, self._file, edges, self._begun, lines.AT_ONCE),
            compute=self._data.ActorPoolStrategy(min_size=1, max_size=most),
            **({"num_gpus": 1} if on_gpu else {"num_cpus": 1}),
        )
        try:
            for row in answers.iter_rows():
                yield json.loads(row["said"])
        except self._ray.exceptions.RayError as error:
            told = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise JumokError(f"a worker of the Ray cluster failed: {told[-1].strip()}") from error


class Mapped:
    """A worker as Ray Data calls it: the number of a window in, all that is said of it out."""

    def __init__(self, job: Job, file: Path, edges: array[int], begun: int, size: int) -> None:
        self._worker, self._file, self._edges = Worker(job), file, edges
        self._begun, self._size = begun, size  # windows that are done; lines of one

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        return {"said": [json.dumps(self._said(self._begun + int(number))) for number in batch["id"]]}

    def _said(self, window: int) -> dict[str, Any]:
        first, (begin, end) = window * self._size, self._edges[window : window + 2]
        with self._file.open("rb") as file:
            file.seek(begin)
            inside = io.BytesIO(file.read(end - begin))
        some: list[str] = []
        said: list[Said] = []
        error = None
        try:
            try:
                some.extend(lines.decoded(inside, str(self._file), first, skip=self._worker.job.skip))
            finally:  # those before one that cannot be read are not lost for it
                said.extend(self._worker.answers(some, first))
        except InputError as raised:
            error = str(raised)
        written = list(itertools.chain.from_iterable(one.lines for one in said))
        told = list(itertools.chain.from_iterable(one.told for one in said))
        return {"first": first, "count": len(some), "lines": written, "told": told, "error": error}


def _edges(path: Path) -> array[int]:
    """Where in a file each window begins, and the last one ends."""
    edges, at, number = array("q", [0]), 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            at += len(line)
            if number % lines.AT_ONCE == 0:
                edges.append(at)
    if number % lines.AT_ONCE:
        edges.append(at)
    return edges
