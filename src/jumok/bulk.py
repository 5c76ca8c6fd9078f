"""What ``jumok run`` does: predictions for a text, a file of any size or standard input, a line each.

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

from jumok import lines as usual
from jumok import tasks
from jumok.data import formats
from jumok.errors import InputError
from jumok.files import check_output
from jumok.lines import answered
from jumok.resumed import PART, Resumed, opened
from jumok.run import Run
from jumok.tasks import engines, objects
from jumok.tasks.served import SURROGATE

if TYPE_CHECKING:
    from jumok.on_ray import Cluster

__all__ = ["ENGINES", "Job", "Said", "Worker", "run"]

ENGINES = (*engines.NAMES, "ray")
JSONL = ".jsonl"


@dataclass(frozen=True)
class Job:
    """What is asked of a run, and how the answers are written. Workers elsewhere are given it."""

    run: Run
    search: Any  # of the task
    engine: str = "torch"
    device: str = "auto"
    alignments: bool = False  # written behind each line
    as_json: bool = False
    align: bool = False  # whether to find out where the model looked, which takes its time
    maps: bool = False  # whether that is drawn
    skip: bool = False  # what cannot be read
    objects: Path | None = None  # the JSONL file that lines are of

    @property
    def task(self) -> Any:
        return tasks.of(self.run.recipe.task)

    @property
    def n_best(self) -> int:
        found: int = self.search.n_best
        return found

    def asked(self) -> dict[str, Any]:
        """What the answers depend on, but for the inputs."""
        digest = hashlib.sha256()
        for path in (self.run.folder / "recipe.yaml", self.run.weights):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        options = {f"--{name.replace('_', '-')}": value for name, value in asdict(self.search).items()}
        return {
            "run": digest.hexdigest(),
            **options,
            "--alignments": self.alignments,
            "--json": self.align,
            "written as": "JSON" if self.as_json else "lines",
            "--on-error": "skip" if self.skip else "stop",
            "--engine": "torch" if self.engine == "ray" else self.engine,  # Ray's workers compute the same
        }


class Said(NamedTuple):
    """What became of a line."""

    lines: list[str]  # to write
    told: list[str]  # to whoever looks on
    prediction: Any = None


class Worker:
    """A predictor that does a job; ``kept`` writes the file of a prediction, where these are files."""

    def __init__(self, job: Job, kept: Callable[[Any], Any] | None = None) -> None:
        self.job, self.kept = job, kept
        self.predictor = engines.load(job.run, job.engine, job.device)
        if job.alignments or job.maps:
            self.predictor.check_maps()
        self._ids: dict[int, Any] = {}  # of objects, until they are answered
        if job.objects is not None:
            self._line = getattr(job.task, "objects_of", objects.of_texts)(job.objects)

    def answers(self, lines: list[str], first: int) -> Iterator[Said]:
        """What is said of lines, numbered from ``first``. One that is bad ends it, or is told and skipped."""
        job = self.job
        for found in answered(self._predictions, lines, first, skip=job.skip):
            if isinstance(found, InputError):  # elsewhere lines are numbered, and none stands for it
                yield Said([""] if job.n_best == 1 and not job.as_json else [], [str(found)])
                continue
            found = found if self.kept is None else self.kept(found)
            some = found.lines(n_best=job.n_best > 1, alignments=job.alignments, as_json=job.as_json)
            wrong = ["cut off at the length limit"] if not found.finished else []
            wrong += [told] if (told := getattr(found, "unread", None)) else []  # of a voice
            remarks = [f"line {found.number + 1}: {one}" for one in wrong]
            yield Said([self._whole(line, found.number) for line in some], remarks, found)
            self._ids.pop(found.number, None)

    def _predictions(self, lines: list[str], first: int) -> Iterable[Any]:
        job = self.job
        align = job.align or job.alignments or job.maps
        for number, line in enumerate(lines, first):
            if job.skip and SURROGATE.search(line):
                raise InputError(f"line {number + 1}: this is not UTF-8")
        if job.objects is not None:
            lines = [self._of_object(line, number) for number, line in enumerate(lines, first)]
        try:
            yield from self.predictor.predict(lines, job.search, align=align, first=first)
        except InputError as error:
            if job.objects is not None and str(error).startswith(f"{lines[0]}: "):  # the name of a picture
                raise InputError(f"line {first + 1}: {error}") from None
            raise

    def _of_object(self, line: str, number: int) -> str:
        try:
            told = objects.read(line)
            if "id" in told:
                self._ids[number] = told["id"]
            made: str = self._line(told)
        except InputError as error:
            raise InputError(f"line {number + 1}: {error}") from None
        return made

    def _whole(self, line: str, number: int) -> str:
        """A line of output: one line, whatever the text has, and with the id of its object."""
        if self.job.as_json and number in self._ids:
            return f'{{"id": {json.dumps(self._ids[number])}, {line[1:]}'
        return line.replace("\n", " ")


def run(
    job: Job, text: str | None, out: Path | None, *, picture: Path | None = None, again: bool = False
) -> None:
    """Do a job for a text, a file, or None: standard input; draw the map of its first line with words."""
    from jumok.pace import Pace

    file = Path(text) if text is not None and usual.is_file(Path(text)) else None
    _check_outputs(job, text, out, picture)
    job = _settled(job, file, out)
    kept = job.task.Kept(out, again=again) if hasattr(job.task, "Kept") else None  # what is made are files
    out = None if kept else out
    size = 0 if file is None or file.suffix == ".gz" else file.stat().st_size
    inputs = usual if job.objects is not None else getattr(job.task, "inputs", usual)
    with (
        opened(out, job.asked() if out is not None else {}, again=again) as output,
        inputs.windows(text, skip=job.skip) as some,
        _worker(job, file, output.begun, picture, kept) as worker,
        Pace(shown=isinstance(output, Resumed)) as pace,
    ):
        for first, lines in output.left(some):
            pace.at(output.done, output.read / size if size else None)
            for said in worker.answers(lines, first):
                for line in said.lines:
                    output.write(line)
                for told in said.told:
                    pace.tell(told)
        pace.end(output.done)
    if worker.picture is not None:
        print(f"no map: there were no words for {picture}", file=sys.stderr)


def _check_outputs(job: Job, text: str | None, out: Path | None, picture: Path | None) -> None:
    """Refuse to replace what is read: the input, or a file of the run."""
    inputs: list[str | Path | int] = [*job.run.files]
    if text is not None:
        inputs.append(text)
    else:
        with contextlib.suppress(OSError, ValueError):  # not a file at all
            inputs.append(sys.stdin.fileno())
    if style := getattr(job.search, "style_from", None):
        inputs.append(style)
    written = [path for path in (out, picture) if path is not None]
    for path in [*written, *(path.with_name(path.name + PART) for path in written)]:
        check_output(path, inputs)


def _settled(job: Job, file: Path | None, out: Path | None) -> Job:
    """A job with what the names of files say: JSONL in is objects, JSONL out is JSON."""
    if job.engine not in ENGINES:
        raise InputError(f"--engine {job.engine}: it is one of {', '.join(ENGINES)}")
    given = file if file is not None and formats.ending(file) == JSONL else None
    written = given is not None if out is None else formats.ending(out) == JSONL
    return replace(job, objects=given, as_json=job.as_json or written)


@contextlib.contextmanager
def _worker(
    job: Job, file: Path | None, begun: int, picture: Path | None, kept: Callable[[Any], Any] | None
) -> Iterator[Here | Cluster]:
    if job.engine == "ray":
        from jumok import on_ray

        with on_ray.started(job, file, begun) as cluster:
            yield cluster
    else:
        yield Here(job, kept, None if begun else picture)


class Here(Worker):
    """A worker in this process, which can draw, too."""

    def __init__(self, job: Job, kept: Callable[[Any], Any] | None, picture: Path | None) -> None:
        super().__init__(job, kept)
        self.picture = picture  # to be drawn

    def answers(self, lines: list[str], first: int) -> Iterator[Said]:
        for said in super().answers(lines, first):
            if self.picture is not None and said.prediction is not None and said.prediction.has_words:
                told = f"map: {self.predictor.draw(said.prediction, self.picture)}"
                said, self.picture = said._replace(told=[*said.told, told]), None
            yield said
