"""`jumok run` on files: JSON objects, order, resuming after a kill, progress, and engines."""

import gzip
import io
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labelled_runs import make_pair, make_question, write_squad, write_table
from labelled_runs import train_run as trained_bert
from translation_runs import sentences

from jumok import progress
from jumok.errors import InputError, MissingExtra
from jumok.inference import batch_inference, line_io, resumable_output
from jumok.inference.batch_inference import InferenceJob
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.translate.predictor import TranslationOptions

pytestmark = pytest.mark.long


TEXTS = [pair.english for pair in sentences(41, 5)]


@pytest.fixture
def run_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Write inputs (objects or lines) to a file, run a job on it, and return the output lines."""

    def run(
        run: Run, inputs: list[Any], out: str | None = "out.jsonl", name: str = "in.jsonl", **options: Any
    ) -> list[str]:
        path = tmp_path / name
        lines = (item if isinstance(item, str) else json.dumps(item) for item in inputs)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        job = InferenceJob(run, build_task(run).options_type(n_best=options.pop("n_best", 1)), device="cpu", **options)
        capsys.readouterr()
        batch_inference.run_inference(job, str(path), None if out is None else tmp_path / out)
        text = capsys.readouterr().out if out is None else (tmp_path / out).read_text(encoding="utf-8")
        return text.split("\n")[:-1]

    return run


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(3)
    data = write_table(folder / "train.tsv", "one\tother\tlabel", [make_pair(rng) for _ in range(60)])
    config = {"train": data, "text_column": "one", "pair_column": "other", "held_out_size": 5}
    return trained_bert(folder / "run", "classify", config, train={"max_epochs": 1})


def test_objects_keep_their_order_and_ids(bahdanau: Run, run_job: Callable[..., list[str]]) -> None:
    inputs = [{"id": f"n{n}", "text": text, "label": "not read"} for n, text in enumerate(TEXTS)]
    del inputs[7]["id"]
    outputs = [json.loads(line) for line in run_job(bahdanau, inputs)]
    assert [output.get("id") for output in outputs] == [output.get("id") for output in inputs]
    assert [(output["line"], output["source"]) for output in outputs] == list(enumerate(TEXTS))
    meter = run_job(bahdanau, TEXTS, "out.txt", "in.txt")
    assert [output["translation"] for output in outputs] == meter
    assert run_job(bahdanau, inputs, "out.txt") == meter
    assert [json.loads(line) for line in run_job(bahdanau, inputs, None)] == outputs
    assert [json.loads(line)["translation"] for line in run_job(bahdanau, TEXTS, "a.jsonl", "in.txt")] == meter
    two = [json.loads(line) for line in run_job(bahdanau, inputs[:3], n_best=2)]
    assert [output["id"] for output in two] == ["n0", "n0", "n1", "n1", "n2", "n2"]


def test_objects_have_the_fields_of_requests(pairs: Run, tmp_path: Path, run_job: Callable[..., list[str]]) -> None:
    [line] = run_job(pairs, [{"text": "the film was\nsad", "text_pair": "nice"}])
    expected = load_predictor(pairs, "cpu").classify("the film was sad", "nice")
    assert json.loads(line)["label"] == expected.label
    assert json.loads(line)["probability"] == pytest.approx(expected.classes[0][1])
    with pytest.raises(InputError, match="line 1 has 1 text; this model reads two"):
        run_job(pairs, [{"text": "alone"}])

    data = write_squad(tmp_path / "squad.json", [[make_question(random.Random(n))] for n in range(30)])
    run = trained_bert(tmp_path / "run", "answer", {"train": data, "held_out_size": 5}, train={"max_epochs": 1})
    context = "a\tlong  story:\nAnna lives in Seoul"
    [line] = run_job(run, [{"id": 5, "question": "where?", "context": context}])
    expected = load_predictor(run, "cpu").answer("where?", context).answer
    assert (json.loads(line)["id"], json.loads(line)["start"]) == (5, expected.start)
    assert json.loads(line)["answer"] == context[expected.start : expected.end]


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ("{", "line 3: this is not JSON"),
        ("", "line 3: this is not JSON"),
        ("[" * 100_000, "line 3: this is not JSON"),
        ("[]", r"line 3: expected an object, .* but got '\[\]'"),
        ({"txet": "a"}, """line 3: there is no "text"; the object has: 'txet'"""),
        ({"text": 5}, 'line 3: "text" must be a text, but got int'),
        ({"text": None}, 'line 3: "text" must be a text, but got NoneType'),
        ({"text": "a\ud800"}, 'line 3: "text" has half of a surrogate pair at position 1'),
        ({"text": "a", "beam_size": 3}, 'line 3: "beam_size"'),
    ],
)
def test_an_invalid_object_is_reported_with_its_line_or_skipped(
    invalid: Any, message: str, bahdanau: Run, run_job: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = [{"text": text} for text in TEXTS[:5]]
    inputs[2] = invalid
    with pytest.raises(InputError, match=message):
        run_job(bahdanau, inputs)
    assert [json.loads(line)["line"] for line in run_job(bahdanau, inputs, skip_invalid=True)] == [0, 1, 3, 4]
    assert run_job(bahdanau, inputs, "out.txt", skip_invalid=True)[2] == ""


def test_a_compressed_file_is_streamed(
    bahdanau: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_job: Callable[..., list[str]]
) -> None:
    """At most one chunk is read ahead of the output."""
    monkeypatch.setattr(line_io, "LINES_PER_CHUNK", 8)
    path, num_read, num_read_ahead = tmp_path / "in.jsonl.gz", [0], []
    path.write_bytes(gzip.compress("".join(f'{{"text": "{t}"}}\n' for t in TEXTS).encode()))
    original = line_io.decode_lines

    def count_lines(*inputs: Any, **options: Any) -> Any:
        for line in original(*inputs, **options):
            num_read[0] += 1
            yield line

    class CountingOutput(resumable_output.ResumableOutput):
        count = 0

        def write(self, line: str) -> None:
            self.count += 1
            num_read_ahead.append(num_read[0] - self.count)
            super().write(line)

    monkeypatch.setattr(line_io, "decode_lines", count_lines)
    monkeypatch.setattr(resumable_output, "ResumableOutput", CountingOutput)
    batch_inference.run_inference(
        InferenceJob(bahdanau, TranslationOptions(beam_size=1), device="cpu"), str(path), tmp_path / "out.jsonl"
    )
    assert (len(num_read_ahead), max(num_read_ahead)) == (41, 7)


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.ProgressMeter() as meter:
        meter.update(1000, 0.1)
        for second in range(1, 71):
            now[0] = float(second)
            meter.update(1000 + 100 * second, 0.1 + 0.01 * second)
        meter.finish(8000)
    assert capsys.readouterr().err.splitlines() == [
        "resuming after 1,000 lines",
        "2,000 lines · 100 a second · 20% · 1:20 left",
        "5,000 lines · 100 a second · 50% · 0:50 left",
        "8,000 lines · 100 a second · 80% · 0:20 left",
        "8,000 lines, 7,000 of them in 1:10",
    ]
    with progress.ProgressMeter() as meter:
        meter.update(0, None)
        meter.finish(10)
    assert capsys.readouterr().err == ""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress.ProgressMeter() as meter:
        meter.update(0, 0.0)
        now[0] += 2
        meter.update(3, 0.25)
        meter.print_line("line 3: cut off at the length limit")
        meter.finish(12)
    assert "3 lines · 1.5 a second · 25% · 0:06 left" in screen.getvalue()
    assert "line 3: cut off" in screen.getvalue()


# Kills the process as soon as its output can be resumed, however fast the machine is.
KILLED_COMMAND = """
import os, signal
from jumok import cli
from jumok.inference import resumable_output

def save_and_die(output):
    save_progress(output)
    if output.num_done:
        os.kill(os.getpid(), signal.SIGKILL)

save_progress = resumable_output.ResumableOutput.save_progress
resumable_output.ResumableOutput.save_progress = save_and_die
resumable_output.SAVE_INTERVAL_SECONDS = 0
cli.main()
"""


def test_a_killed_command_resumes_with_identical_output(bahdanau: Run, tmp_path: Path) -> None:
    texts = [TEXTS[n % 41] for n in range(2500)]
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    command = ["run", str(bahdanau.folder), "in.txt", "--beam-size", "1", "--out", "out.txt"]
    killed = subprocess.run([sys.executable, "-c", KILLED_COMMAND, *command], cwd=tmp_path, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    state = tmp_path / "out.txt.part.json"
    assert not (tmp_path / "out.txt").exists()
    num_resumed = json.loads(state.read_text())["num_inputs"]
    job = InferenceJob(bahdanau, TranslationOptions(beam_size=1), device="cpu")
    other = InferenceJob(bahdanau, TranslationOptions(beam_size=2), device="cpu")
    with pytest.raises(InputError, match=r"--beam-size: 1 before, 2 now.*--overwrite"):
        batch_inference.run_inference(other, str(tmp_path / "in.txt"), tmp_path / "out.txt")
    first_numbers: list[int] = []
    original = batch_inference.InferenceWorker.predict_lines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            batch_inference.InferenceWorker,
            "predict_lines",
            lambda *args: (first_numbers.append(args[2]), original(*args))[1],
        )
        batch_inference.run_inference(job, str(tmp_path / "in.txt"), tmp_path / "out.txt")
    assert num_resumed % 1024 == 0
    assert first_numbers == list(range(num_resumed, 2500, 1024))
    batch_inference.run_inference(job, str(tmp_path / "in.txt"), tmp_path / "whole.txt")
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()
    assert (tmp_path / "out.txt").read_bytes().count(b"\n") == 2500


def test_an_unknown_engine_is_rejected(bahdanau: Run, run_job: Callable[..., list[str]]) -> None:
    with pytest.raises(InputError, match="--engine jax: it is one of torch, ctranslate2, onnx, ray"):
        run_job(bahdanau, [], engine="jax")


def test_ctranslate2_output_has_its_own_settings(
    transformer: Run, tmp_path: Path, run_job: Callable[..., list[str]]
) -> None:
    pytest.importorskip("ctranslate2")
    inputs = [{"id": n, "text": text} for n, text in enumerate(TEXTS[:5])]
    outputs = [json.loads(line) for line in run_job(transformer, inputs, engine="ctranslate2")]
    assert [(output["id"], output["source"]) for output in outputs] == list(enumerate(TEXTS[:5]))
    with pytest.raises(InputError, match="line 4: this is not JSON"):
        run_job(transformer, [*inputs[:3], "{", "{"], "b.txt", "in.jsonl", engine="ctranslate2")
    search = TranslationOptions()
    jobs = [
        InferenceJob(transformer, search, engine=name).resume_settings() for name in ("torch", "ray", "ctranslate2")
    ]
    assert jobs[0] == jobs[1] != jobs[2]


def test_ray_needs_uncompressed_files(bahdanau: Run, tmp_path: Path) -> None:
    job = InferenceJob(bahdanau, TranslationOptions(), engine="ray", device="cpu")
    for inputs in ("a text", None, str(tmp_path / "in.txt.gz")):
        (tmp_path / "in.txt.gz").write_bytes(gzip.compress(b"a\n"))
        with pytest.raises(InputError, match="--engine ray needs an uncompressed file"):
            batch_inference.run_inference(job, inputs, tmp_path / "out.txt")
    assert not list(tmp_path.glob("out*"))


def test_a_missing_package_is_named(bahdanau: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "in.txt").write_text("a\n")
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[ray\]"'):
        batch_inference.run_inference(
            InferenceJob(bahdanau, TranslationOptions(), engine="ray"), str(tmp_path / "in.txt"), None
        )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    r"ignore:`use_\w+` is deprecated:DeprecationWarning",  # of Ray
    "ignore::ResourceWarning",  # Ray does not close its log files
)
def test_ray_writes_the_same_lines_in_the_same_order(
    bahdanau: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_job: Callable[..., list[str]]
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(line_io, "LINES_PER_CHUNK", 32)
    inputs: list[Any] = [{"id": n, "text": TEXTS[n % 41]} for n in range(3 * 32 + 5)]
    inputs[70] = "{"
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        outputs = run_job(bahdanau, inputs, "ray.jsonl", engine="ray", skip_invalid=True)
        with pytest.raises(InputError, match="line 71: this is not JSON"):
            run_job(bahdanau, inputs, "goes_on.jsonl", engine="ray")
        assert json.loads((tmp_path / "goes_on.jsonl.part.json").read_text())["num_inputs"] == 64
        inputs[70] = {"text": "mended"}
        repaired = run_job(bahdanau, inputs, "goes_on.jsonl", engine="ray")
    finally:
        ray.shutdown()
    assert [json.loads(line)["id"] for line in outputs] == [n for n in range(3 * 32 + 5) if n != 70]
    assert repaired == run_job(bahdanau, inputs, "torch.jsonl")
    del repaired[70]
    translations = [[json.loads(line)["translation"] for line in lines] for lines in (outputs, repaired)]
    assert translations[0] == translations[1]  # scores may differ slightly: a chunk with an invalid line is divided
