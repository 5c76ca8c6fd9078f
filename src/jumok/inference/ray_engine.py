"""Batch inference of ``jumok run`` on a Ray cluster: many workers, the same predictions, in the same order.

::

    chunk numbers  ►  Ray Data: workers that read their chunk of the file and predict  ►  output lines

Ray places the workers and restarts them if a machine fails. All machines must see the run and the file at the
same path. The environment variable ``RAY_ADDRESS`` selects the cluster. Without it, Ray starts on this
machine, with one worker per core.
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

MAX_RAY_TASKS = 100_000  # in a longer file, each task has several chunks


@contextlib.contextmanager
def start_cluster(job: InferenceJob, path: Path | None, num_resumed: int) -> Iterator[RayCluster]:
    """Start workers on the cluster for the lines of a file after the first ``num_resumed``."""
    task = job.task
    if job.draw_maps or task.writes_files:
        raise InputError("--engine ray predicts lines of text; use --engine torch for files and maps")
    if path is None or path.suffix == ".gz" or (not task.reads_lines and job.jsonl_path is None):
        raise InputError(
            "--engine ray needs an uncompressed file of lines (.txt, .tsv, .jsonl) that all machines see; "
            "list images in a .jsonl file"
        )
    ray = import_optional("ray", "ray")
    data = import_optional("ray.data", "ray")
    owns_ray = not ray.is_initialized()
    if owns_ray:  # its messages are in its log files
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield RayCluster(ray, data, job, path.resolve(), num_resumed)
    finally:
        if owns_ray:
            ray.shutdown()


class RayCluster:
    """Workers on a cluster, with the interface of a single worker that predicts one chunk after the other."""

    def __init__(self, ray: Any, ray_data: Any, job: InferenceJob, path: Path, num_resumed: int) -> None:
        self._ray, self._ray_data, self._path = ray, ray_data, path
        # Relative paths are not valid on other machines.
        self._job = replace(job, engine="torch", run=Run(job.run.folder.resolve(), job.run.recipe))
        self._num_chunks_done = num_resumed // line_io.LINES_PER_CHUNK
        self._results: Iterator[dict[str, Any]] | None = None
        self.map_path: Path | None = None

    def predict_lines(self, chunk: list[str], first_number: int) -> Iterator[LineResult]:
        """Yield the results of the next chunk, which must be this one."""
        if self._results is None:
            self._results = self._iter_results()
        result = next(self._results)
        if (result["first"], result["count"]) != (first_number, len(chunk)):
            raise InputError(f"{self._path} was changed while it was read")
        yield LineResult(result["lines"], result["messages"])
        if result["error"] is not None:
            raise InputError(result["error"])

    def _iter_results(self) -> Iterator[dict[str, Any]]:
        offsets = _find_chunk_offsets(self._path)
        num_chunks = len(offsets) - 1 - self._num_chunks_done
        context = self._ray_data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        resources = self._ray.cluster_resources()
        num_gpus = 0 if self._job.device == "cpu" else int(resources.get("GPU", 0))
        max_workers = int(num_gpus or resources.get("CPU", 1)) or 1
        num_blocks = min(num_chunks, MAX_RAY_TASKS)
        rows = self._ray_data.range(num_chunks, override_num_blocks=num_blocks).map_batches(
            RayWorker,
            batch_size=1,
            fn_constructor_args=(self._job, self._path, offsets, self._num_chunks_done, line_io.LINES_PER_CHUNK),
            compute=self._ray_data.ActorPoolStrategy(min_size=1, max_size=max_workers),
            **({"num_gpus": 1} if num_gpus else {"num_cpus": 1}),
        )
        try:
            for row in rows.iter_rows():
                yield json.loads(row["result"])
        except self._ray.exceptions.RayError as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise JumokError(f"a worker of the Ray cluster failed: {lines[-1].strip()}") from error


class RayWorker:
    """A worker with the interface of Ray Data: chunk numbers in, results as JSON out."""

    def __init__(
        self, job: InferenceJob, path: Path, chunk_offsets: array[int], num_chunks_done: int, lines_per_chunk: int
    ) -> None:
        self._worker, self._path, self._chunk_offsets = InferenceWorker(job), path, chunk_offsets
        self._num_chunks_done, self._lines_per_chunk = num_chunks_done, lines_per_chunk

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Predict the chunks with these numbers, counted from the first one that is not done."""
        chunks = [self._num_chunks_done + int(number) for number in batch["id"]]
        return {"result": [json.dumps(self._predict_chunk(chunk)) for chunk in chunks]}

    def _predict_chunk(self, chunk: int) -> dict[str, Any]:
        first_number, (start, end) = chunk * self._lines_per_chunk, self._chunk_offsets[chunk : chunk + 2]
        with self._path.open("rb") as file:
            file.seek(start)
            content = io.BytesIO(file.read(end - start))
        skip_invalid = self._worker.job.skip_invalid
        lines: list[str] = []
        results: list[LineResult] = []
        error = None
        try:
            try:
                lines.extend(line_io.decode_lines(content, str(self._path), first_number, skip_invalid=skip_invalid))
            finally:  # also predict the lines before an invalid one
                results.extend(self._worker.predict_lines(lines, first_number))
        except InputError as raised:
            error = str(raised)
        return {
            "first": first_number,
            "count": len(lines),
            "lines": list(itertools.chain.from_iterable(result.lines for result in results)),
            "messages": list(itertools.chain.from_iterable(result.messages for result in results)),
            "error": error,
        }


def _find_chunk_offsets(path: Path) -> array[int]:
    """Return the byte offsets of all chunks of a file, and its end."""
    offsets, offset, num_lines = array("q", [0]), 0, 0
    with path.open("rb") as file:
        for num_lines, line in enumerate(file, 1):
            offset += len(line)
            if num_lines % line_io.LINES_PER_CHUNK == 0:
                offsets.append(offset)
    if num_lines % line_io.LINES_PER_CHUNK:
        offsets.append(offset)
    return offsets
