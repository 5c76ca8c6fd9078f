"""What ``jumok run_inference`` does: predictions for a text, a file of any size or standard input, a line each.

::

    windows of lines  ►  answers, by a predictor here or by many on a Ray cluster  ►  lines, in their order

Never more than a window is held. What goes to a file can be stopped at any moment: the same command goes on
(see ``resumed.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jumok import tasks
from jumok.data.readers import formats as readers_formats
from jumok.errors import InputError
from jumok.files import check_not_input
from jumok.inference import engines
from jumok.inference import line_io as usual
from jumok.inference.line_io import predict_isolating_errors
from jumok.inference.resumable_output import PART_SUFFIX, ResumableOutput, open_resumable_output
from jumok.run import Run
from jumok.tasks import jsonl_input
from jumok.tasks.api import SURROGATE_PATTERN

if TYPE_CHECKING:
    from jumok.inference.ray_engine import RayCluster

__all__ = ["ENGINES", "InferenceJob", "InferenceWorker", "LineResult", "run_inference"]

ENGINES = (*engines.ENGINE_NAMES, "ray")
JSONL_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class InferenceJob:
    """What is asked of a run, and how the answers are written. Workers elsewhere are given it."""

    run: Run
    search: Any  # of the task
    engine: str = "torch"
    device: str = "auto"
    write_alignments: bool = False  # written behind each line
    as_json: bool = False
    compute_alignments: bool = False  # whether to find out where the model looked, which takes its time
    draw_maps: bool = False  # whether that is drawn
    skip_invalid: bool = False  # what cannot be read
    jsonl_path: Path | None = None  # the JSONL file that lines are of

    @property
    def task(self) -> Any:
        return tasks.get_task_module(self.run.recipe.task)

    @property
    def n_best(self) -> int:
        found: int = self.search.n_best
        return found

    def resume_settings(self) -> dict[str, Any]:
        """What the answers depend on, but for the inputs."""
        digest = hashlib.sha256()
        for path in (self.run.folder / "recipe.yaml", self.run.weights_path):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        options = {f"--{name.replace('_', '-')}": value for name, value in asdict(self.search).items()}
        return {
            "run": digest.hexdigest(),
            **options,
            "--alignments": self.write_alignments,
            "--json": self.compute_alignments,
            "written as": "JSON" if self.as_json else "lines",
            "--on-error": "skip" if self.skip_invalid else "stop",
            "--engine": "torch" if self.engine == "ray" else self.engine,  # Ray's workers compute the same
        }


class LineResult(NamedTuple):
    """What became of a line."""

    lines: list[str]  # to write
    messages: list[str]  # to whoever looks on
    prediction: Any = None


class InferenceWorker:
    """A predictor that does a job; ``save_prediction`` writes the file of a prediction, where these are files."""

    def __init__(self, job: InferenceJob, save_prediction: Callable[[Any], Any] | None = None) -> None:
        self.job, self.save_prediction = job, save_prediction
        self.predictor = engines.load_predictor(job.run, job.engine, job.device)
        if job.write_alignments or job.draw_maps:
            self.predictor.check_maps()
        self._object_ids: dict[int, Any] = {}  # of objects, until they are answered
        if job.jsonl_path is not None:
            self._object_to_line = getattr(job.task, "objects_of", jsonl_input.make_text_reader)(
                job.jsonl_path
            )

    def predict_lines(self, lines: list[str], first_number: int) -> Iterator[LineResult]:
        """What is said of lines, numbered from ``first_number``. One that is bad ends it, or is told and skipped."""
        job = self.job
        for found in predict_isolating_errors(
            self._predict, lines, first_number, skip_invalid=job.skip_invalid
        ):
            if isinstance(found, InputError):  # elsewhere lines are numbered, and none stands for it
                yield LineResult([""] if job.n_best == 1 and not job.as_json else [], [str(found)])
                continue
            found = found if self.save_prediction is None else self.save_prediction(found)
            some = found.lines(n_best=job.n_best > 1, alignments=job.write_alignments, as_json=job.as_json)
            wrong = ["cut off at the length limit"] if not found.finished else []
            wrong += [told] if (told := getattr(found, "unread", None)) else []  # of a voice
            remarks = [f"line {found.number + 1}: {one}" for one in wrong]
            yield LineResult([self._format_line(line, found.number) for line in some], remarks, found)
            self._object_ids.pop(found.number, None)

    def _predict(self, lines: list[str], first_number: int) -> Iterable[Any]:
        job = self.job
        align = job.compute_alignments or job.write_alignments or job.draw_maps
        for number, line in enumerate(lines, first_number):
            if job.skip_invalid and SURROGATE_PATTERN.search(line):
                raise InputError(f"line {number + 1}: this is not UTF-8")
        if job.jsonl_path is not None:
            lines = [self._parse_object(line, number) for number, line in enumerate(lines, first_number)]
        try:
            yield from self.predictor.predict(lines, job.search, align=align, first=first_number)
        except InputError as error:
            if job.jsonl_path is not None and str(error).startswith(f"{lines[0]}: "):  # the name of a picture
                raise InputError(f"line {first_number + 1}: {error}") from None
            raise

    def _parse_object(self, line: str, number: int) -> str:
        try:
            told = jsonl_input.parse_object(line)
            if "id" in told:
                self._object_ids[number] = told["id"]
            made: str = self._object_to_line(told)
        except InputError as error:
            raise InputError(f"line {number + 1}: {error}") from None
        return made

    def _format_line(self, line: str, number: int) -> str:
        """A line of output: one line, whatever the text has, and with the id of its object."""
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
    """Do a job for a text, a file, or None: standard input; draw the map of its first line with words."""
    from jumok.progress import ProgressMeter

    file = Path(text) if text is not None and usual.is_file(Path(text)) else None
    _check_outputs(job, text, output_path, map_path)
    job = _resolve_formats(job, file, output_path)
    kept = (
        job.task.Kept(output_path, again=overwrite) if hasattr(job.task, "Kept") else None
    )  # what is made are files
    output_path = None if kept else output_path
    size = 0 if file is None or file.suffix == ".gz" else file.stat().st_size
    inputs = usual if job.jsonl_path is not None else getattr(job.task, "inputs", usual)
    with (
        open_resumable_output(
            output_path, job.resume_settings() if output_path is not None else {}, overwrite=overwrite
        ) as output,
        inputs.windows(text, skip=job.skip_invalid) as some,
        _open_worker(job, file, output.num_resumed, map_path, kept) as worker,
        ProgressMeter(is_visible=isinstance(output, ResumableOutput)) as pace,
    ):
        for first, lines in output.iter_remaining(some):
            pace.update(output.num_done, output.num_bytes_read / size if size else None)
            for said in worker.predict_lines(lines, first):
                for line in said.lines:
                    output.write(line)
                for told in said.messages:
                    pace.print_line(told)
        pace.finish(output.num_done)
    if worker.map_path is not None:
        print(f"no map: there were no words for {map_path}", file=sys.stderr)


def _check_outputs(
    job: InferenceJob, text: str | None, output_path: Path | None, map_path: Path | None
) -> None:
    """Refuse to replace what is read: the input, or a file of the run."""
    inputs: list[str | Path | int] = [*job.run.model_files]
    if text is not None:
        inputs.append(text)
    else:
        with contextlib.suppress(OSError, ValueError):  # not a file at all
            inputs.append(sys.stdin.fileno())
    if style := getattr(job.search, "style_from", None):
        inputs.append(style)
    written = [path for path in (output_path, map_path) if path is not None]
    for path in [*written, *(path.with_name(path.name + PART_SUFFIX) for path in written)]:
        check_not_input(path, inputs)


def _resolve_formats(job: InferenceJob, input_path: Path | None, output_path: Path | None) -> InferenceJob:
    """A job with what the names of files say: JSONL in is objects, JSONL out is JSON."""
    if job.engine not in ENGINES:
        raise InputError(f"--engine {job.engine}: it is one of {', '.join(ENGINES)}")
    given = (
        input_path
        if input_path is not None and readers_formats.file_suffix(input_path) == JSONL_SUFFIX
        else None
    )
    written = (
        given is not None if output_path is None else readers_formats.file_suffix(output_path) == JSONL_SUFFIX
    )
    return replace(job, jsonl_path=given, as_json=job.as_json or written)


@contextlib.contextmanager
def _open_worker(
    job: InferenceJob,
    input_path: Path | None,
    num_resumed: int,
    map_path: Path | None,
    save_prediction: Callable[[Any], Any] | None,
) -> Iterator[LocalWorker | RayCluster]:
    if job.engine == "ray":
        from jumok.inference import ray_engine

        with ray_engine.start_cluster(job, input_path, num_resumed) as cluster:
            yield cluster
    else:
        yield LocalWorker(job, save_prediction, None if num_resumed else map_path)


class LocalWorker(InferenceWorker):
    """A worker in this process, which can draw, too."""

    def __init__(
        self, job: InferenceJob, save_prediction: Callable[[Any], Any] | None, map_path: Path | None
    ) -> None:
        super().__init__(job, save_prediction)
        self.map_path = map_path  # to be drawn

    def predict_lines(self, lines: list[str], first_number: int) -> Iterator[LineResult]:
        for said in super().predict_lines(lines, first_number):
            if self.map_path is not None and said.prediction is not None and said.prediction.has_words:
                told = f"map: {self.predictor.draw(said.prediction, self.map_path)}"
                said, self.map_path = said._replace(messages=[*said.messages, told]), None
            yield said
