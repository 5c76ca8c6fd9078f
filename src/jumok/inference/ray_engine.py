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

from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError, JumokError
from jumok.inference import line_io
from jumok.inference.batch_inference import InferenceJob, InferenceWorker, LineResult
from jumok.run import Run

__all__ = ["RayCluster", "start_cluster"]

MAX_RAY_TASKS = 100_000  # that Ray is given; of a longer file each has several windows


@contextlib.contextmanager
def start_cluster(job: InferenceJob, path: Path | None, num_resumed: int) -> Iterator[RayCluster]:
    """Workers on the cluster, for what is left of a file behind the ``begun`` first lines."""
    if job.draw_maps or hasattr(job.task, "Kept"):
        raise InputError("--engine ray is for many lines of text; files and maps are made by --engine torch")
    if path is None or path.suffix == ".gz" or (hasattr(job.task, "inputs") and job.jsonl_path is None):
        raise InputError(
            "--engine ray reads a file of lines, .txt, .tsv or .jsonl, not gzipped, that all machines see; "
            "pictures are named in a .jsonl file"
        )
    ray = import_optional("ray", "ray")
    data = import_optional("ray.data", "ray")
    own = not ray.is_initialized()
    if own:  # what Ray tells of its own work is in its logs
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield RayCluster(ray, data, job, path.resolve(), num_resumed)
    finally:
        if own:
            ray.shutdown()


class RayCluster:
    """Many workers that look from here like one, which is asked for one window after the other."""

    def __init__(self, ray: Any, ray_data: Any, job: InferenceJob, path: Path, num_resumed: int) -> None:
        self._ray, self._ray_data, self._path = ray, ray_data, path
        # A relative path means nothing elsewhere.
        self._job = replace(job, engine="torch", run=Run(job.run.folder.resolve(), job.run.recipe))
        self._num_chunks_done = num_resumed // line_io.LINES_PER_CHUNK
        self._results: Iterator[dict[str, Any]] | None = None
        self.map_path: Path | None = None

    def predict_lines(self, chunk: list[str], first_number: int) -> Iterator[LineResult]:
        """What is said of the next window, which is this one."""
        if self._results is None:
            self._results = self._iter_results()
        found = next(self._results)
        if (found["first"], found["count"]) != (first_number, len(chunk)):
            raise InputError(f"{self._path} changes while it is read")
        yield LineResult(found["lines"], found["told"])
        if found["error"] is not None:
            raise InputError(found["error"])

    def _iter_results(self) -> Iterator[dict[str, Any]]:
        edges = _find_chunk_offsets(self._path)
        left = len(edges) - 1 - self._num_chunks_done
        context = self._ray_data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        have = self._ray.cluster_resources()
        on_gpu = self._job.device != "cpu" and int(have.get("GPU", 0))
        most = int(on_gpu or have.get("CPU", 1)) or 1
        answers = self._ray_data.range(left, override_num_blocks=min(left, MAX_RAY_TASKS)).map_batches(
            RayWorker,
            batch_size=1,
            fn_constructor_args=(
                self._job,
                self._path,
                edges,
                self._num_chunks_done,
                line_io.LINES_PER_CHUNK,
            ),
            compute=self._ray_data.ActorPoolStrategy(min_size=1, max_size=most),
            **({"num_gpus": 1} if on_gpu else {"num_cpus": 1}),
        )
        try:
            for row in answers.iter_rows():
                yield json.loads(row["said"])
        except self._ray.exceptions.RayError as error:
            told = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise JumokError(f"a worker of the Ray cluster failed: {told[-1].strip()}") from error


class RayWorker:
    """A worker as Ray Data calls it: the number of a window in, all that is said of it out."""

    def __init__(
        self,
        job: InferenceJob,
        path: Path,
        chunk_offsets: array[int],
        num_chunks_done: int,
        lines_per_chunk: int,
    ) -> None:
        self._worker, self._path, self._chunk_offsets = InferenceWorker(job), path, chunk_offsets
        self._num_chunks_done, self._lines_per_chunk = (
            num_chunks_done,
            lines_per_chunk,
        )  # windows that are done; lines of one

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        return {
            "said": [
                json.dumps(self._predict_chunk(self._num_chunks_done + int(number))) for number in batch["id"]
            ]
        }

    def _predict_chunk(self, chunk: int) -> dict[str, Any]:
        first, (begin, end) = chunk * self._lines_per_chunk, self._chunk_offsets[chunk : chunk + 2]
        with self._path.open("rb") as file:
            file.seek(begin)
            inside = io.BytesIO(file.read(end - begin))
        some: list[str] = []
        said: list[LineResult] = []
        error = None
        try:
            try:
                some.extend(
                    line_io.decode_lines(
                        inside, str(self._path), first, skip_invalid=self._worker.job.skip_invalid
                    )
                )
            finally:  # those before one that cannot be read are not lost for it
                said.extend(self._worker.predict_lines(some, first))
        except InputError as raised:
            error = str(raised)
        written = list(itertools.chain.from_iterable(one.lines for one in said))
        told = list(itertools.chain.from_iterable(one.messages for one in said))
        return {"first": first, "count": len(some), "lines": written, "told": told, "error": error}


def _find_chunk_offsets(path: Path) -> array[int]:
    """Where in a file each window begins, and the last one ends."""
    edges, at, number = array("q", [0]), 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            at += len(line)
            if number % line_io.LINES_PER_CHUNK == 0:
                edges.append(at)
    if number % line_io.LINES_PER_CHUNK:
        edges.append(at)
    return edges
