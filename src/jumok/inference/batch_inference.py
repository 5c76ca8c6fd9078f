"""Batch inference of ``jumok run``: predictions for a text, a file of any size or standard input.

::

    chunks of lines  ►  predictions, by a local predictor or by many on a Ray cluster  ►  lines, in order

Memory holds one chunk at a time. Output to a file can be interrupted at any moment, and the same command
resumes it (see ``resumable_output.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jumok.data.readers.text_files import file_suffix
from jumok.errors import InputError
from jumok.files import check_not_input
from jumok.inference import engines, line_io
from jumok.inference.line_io import predict_isolating_errors
from jumok.inference.resumable_output import PART_SUFFIX, ResumableOutput, open_resumable_output
from jumok.run import Run
from jumok.tasks import build_task, jsonl_input
from jumok.text_checks import SURROGATE_PATTERN

if TYPE_CHECKING:
    from jumok.inference.ray_engine import RayCluster
    from jumok.tasks.base import PredictionWriter, Task
    from jumok.tasks.options import PredictOptions

ENGINES = (*engines.ENGINE_NAMES, "ray")
JSONL_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class InferenceJob:
    """The run, the options of prediction and the format of the output. Remote workers receive it."""

    run: Run
    options: PredictOptions  # of the task
    engine: str = "torch"
    device: str = "auto"
    write_alignments: bool = False  # append word alignments to each line
    as_json: bool = False
    compute_alignments: bool = False  # compute attention, which takes time
    draw_maps: bool = False  # draw an attention map
    skip_invalid: bool = False  # skip lines that cannot be read
    jsonl_path: Path | None = None  # the JSONL file that contains the lines

    @property
    def task(self) -> Task[Any]:
        """The task of the run."""
        return build_task(self.run)

    def resume_settings(self) -> dict[str, Any]:
        """Return everything that the output depends on, except for the inputs."""
        digest = hashlib.sha256()
        for path in (self.run.folder / "recipe.yaml", self.run.weights_path):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        options = {f"--{name.replace('_', '-')}": value for name, value in asdict(self.options).items()}
        return {
            "run": digest.hexdigest(),
            **options,
            "--alignments": self.write_alignments,
            "--json": self.compute_alignments,
            "output format": "JSON" if self.as_json else "lines",
            "--on-error": "skip" if self.skip_invalid else "stop",
            "--engine": "torch" if self.engine == "ray" else self.engine,  # Ray workers use torch
        }


class LineResult(NamedTuple):
    """The output of one input line."""

    lines: list[str]  # to write to the output
    messages: list[str]  # for the user
    prediction: Any = None


class InferenceWorker:
    """A predictor with the settings of a job. ``save_prediction`` writes predictions that are files."""

    def __init__(self, job: InferenceJob, save_prediction: PredictionWriter | None = None) -> None:
        self.job, self.save_prediction = job, save_prediction
        self.predictor = engines.load_predictor(job.run, job.engine, job.device)
        if job.write_alignments or job.draw_maps:
            self.predictor.check_has_attention()
        self._object_ids: dict[int, Any] = {}  # of JSON objects without a prediction yet
        if job.jsonl_path is not None:
            self._object_to_line = job.task.make_jsonl_reader(job.jsonl_path)

    def predict_lines(self, lines: list[str], first_number: int) -> Iterator[LineResult]:
        """Yield the results of lines, numbered from ``first_number``. Invalid lines raise, or are skipped."""
        job, n_best = self.job, self.job.options.n_best
        for prediction in predict_isolating_errors(self._predict, lines, first_number, skip_invalid=job.skip_invalid):
            if isinstance(prediction, InputError):
                # A skipped line keeps its place by an empty line. JSON and n-best lists have line numbers.
                yield LineResult([""] if n_best == 1 and not job.as_json else [], [str(prediction)])
                continue
            if self.save_prediction is not None:
                prediction = self.save_prediction(prediction)
            output_lines = prediction.to_lines(n_best=n_best > 1, alignments=job.write_alignments, as_json=job.as_json)
            index = prediction.index
            messages = [f"line {index + 1}: {warning}" for warning in prediction.warnings]
            yield LineResult([self._format_line(line, index) for line in output_lines], messages, prediction)
            self._object_ids.pop(index, None)

    def _predict(self, lines: list[str], first_number: int) -> Iterable[Any]:
        job = self.job
        with_attention = job.compute_alignments or job.write_alignments or job.draw_maps
        for number, line in enumerate(lines, first_number):
            if job.skip_invalid and SURROGATE_PATTERN.search(line):
                raise InputError(f"line {number + 1}: this is not UTF-8")
        if job.jsonl_path is not None:
            lines = [self._parse_object(line, number) for number, line in enumerate(lines, first_number)]
        try:
            yield from self.predictor.predict(
                lines, job.options, with_attention=with_attention, first_index=first_number
            )
        except InputError as error:
            if job.jsonl_path is not None and str(error).startswith(f"{lines[0]}: "):  # name of an image
                raise InputError(f"line {first_number + 1}: {error}") from None
            raise

    def _parse_object(self, line: str, number: int) -> str:
        try:
            json_object = jsonl_input.parse_object(line)
            if "id" in json_object:
                self._object_ids[number] = json_object["id"]
            return self._object_to_line(json_object)
        except InputError as error:
            raise InputError(f"line {number + 1}: {error}") from None

    def _format_line(self, line: str, number: int) -> str:
        """Return an output line without line breaks, with the ``id`` of its JSON object."""
        if self.job.as_json and number in self._object_ids:
            return f'{{"id": {json.dumps(self._object_ids[number])}, {line[1:]}'
        return line.replace("\n", " ")


def run_inference(
    job: InferenceJob,
    text: str | None,
    output_path: Path | None,
    *,
    map_path: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Run a job for a text, a file, or standard input (None).

    ``map_path`` is the file for the attention map of the first line with words.
    """
    from jumok.progress import ProgressMeter

    input_path = Path(text) if text is not None and line_io.is_file(Path(text)) else None
    _check_outputs(job, text, output_path, map_path)
    job = _resolve_formats(job, input_path, output_path)
    task = job.task
    save_prediction = task.open_writer(output_path, overwrite=overwrite) if task.writes_files else None
    lines_path = None if task.writes_files else output_path
    size = 0 if input_path is None or input_path.suffix == ".gz" else input_path.stat().st_size
    read_chunks = line_io.read_chunks if job.jsonl_path is not None else task.read_chunks
    settings = job.resume_settings() if lines_path is not None else {}
    with (
        open_resumable_output(lines_path, settings, overwrite=overwrite) as output,
        read_chunks(text, skip_invalid=job.skip_invalid) as chunks,
        _open_worker(job, input_path, output.num_resumed, map_path, save_prediction) as worker,
        ProgressMeter(is_visible=isinstance(output, ResumableOutput)) as progress,
    ):
        for first_number, lines in output.iter_remaining(chunks):
            progress.update(output.num_done, output.num_bytes_read / size if size else None)
            for result in worker.predict_lines(lines, first_number):
                for line in result.lines:
                    output.write(line)
                for message in result.messages:
                    progress.print_line(message)
        progress.finish(output.num_done)
    if worker.map_path is not None:
        print(f"{map_path} is not written: the input has no words", file=sys.stderr)


def _check_outputs(job: InferenceJob, text: str | None, output_path: Path | None, map_path: Path | None) -> None:
    """Raise an error if an output would overwrite the input or a file of the run."""
    inputs: list[str | Path | int] = [*job.run.model_files]
    if text is not None:
        inputs.append(text)
    else:
        with contextlib.suppress(OSError, ValueError):  # standard input is not a file
            inputs.append(sys.stdin.fileno())
    if style_audio := getattr(job.options, "style_audio", None):
        inputs.append(style_audio)
    outputs = [path for path in (output_path, map_path) if path is not None]
    for path in [*outputs, *(path.with_name(path.name + PART_SUFFIX) for path in outputs)]:
        check_not_input(path, inputs)


def _resolve_formats(job: InferenceJob, input_path: Path | None, output_path: Path | None) -> InferenceJob:
    """Return the job with the formats by the file names: JSONL input has objects, JSONL output is JSON."""
    if job.engine not in ENGINES:
        raise InputError(f"--engine {job.engine}: it is one of {', '.join(ENGINES)}")
    has_objects = input_path is not None and file_suffix(input_path) == JSONL_SUFFIX
    writes_json = has_objects if output_path is None else file_suffix(output_path) == JSONL_SUFFIX
    return replace(job, jsonl_path=input_path if has_objects else None, as_json=job.as_json or writes_json)


def _open_worker(
    job: InferenceJob,
    input_path: Path | None,
    num_resumed: int,
    map_path: Path | None,
    save_prediction: PredictionWriter | None,
) -> AbstractContextManager[LocalWorker | RayCluster]:
    if job.engine == "ray":
        from jumok.inference import ray_engine

        return ray_engine.start_cluster(job, input_path, num_resumed)
    return contextlib.nullcontext(LocalWorker(job, save_prediction, None if num_resumed else map_path))


class LocalWorker(InferenceWorker):
    """A worker in this process. It also draws the attention map."""

    def __init__(self, job: InferenceJob, save_prediction: PredictionWriter | None, map_path: Path | None) -> None:
        super().__init__(job, save_prediction)
        self.map_path = map_path  # None: there is no map, or it is drawn

    def predict_lines(self, lines: list[str], first_number: int) -> Iterator[LineResult]:
        """Yield the results of lines, and draw the attention map of the first one with words."""
        for result in super().predict_lines(lines, first_number):
            prediction = result.prediction
            if self.map_path is not None and prediction is not None and prediction.is_drawable:
                message = f"map: {self.predictor.draw_attention(prediction, self.map_path)}"
                result, self.map_path = result._replace(messages=[*result.messages, message]), None
            yield result
