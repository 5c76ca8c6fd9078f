"""`jumok run` on files: objects in and out, order, going on after a kill, what is told meanwhile."""

import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labelled_runs import pair, question, squad, table
from labelled_runs import train_run as trained_bert
from translation_runs import sentences

from jumok import progress
from jumok.errors import InputError, MissingExtra
from jumok.inference import batch_inference, line_io, resumable_output
from jumok.inference.batch_inference import InferenceJob
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.translate.predictor import TranslationOptions

TEXTS = [one.english for one in sentences(41, 5)]


@pytest.fixture
def done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Does a job and gives the lines it wrote; ``objects`` or texts go into a file first."""

    def do(run: Run, given: list[Any], out: str | None = "out.jsonl", name: str = "in.jsonl", **more: Any) -> list[str]:
        path = tmp_path / name
        told = (one if isinstance(one, str) else json.dumps(one) for one in given)
        path.write_text("".join(f"{line}\n" for line in told), encoding="utf-8")
        job = InferenceJob(run, build_task(run).options_type(n_best=more.pop("n_best", 1)), device="cpu", **more)
        capsys.readouterr()
        batch_inference.run_inference(job, str(path), None if out is None else tmp_path / out)
        text = capsys.readouterr().out if out is None else (tmp_path / out).read_text(encoding="utf-8")
        return text.split("\n")[:-1]

    return do


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, chance = tmp_path_factory.mktemp("pairs"), random.Random(3)
    data = table(folder / "train.tsv", "one\tother\tlabel", [pair(chance) for _ in range(60)])
    named = {"train": data, "text_column": "one", "pair_column": "other", "held_out_size": 5}
    return trained_bert(folder / "run", "classify", named, train={"max_epochs": 1})


def test_objects_in_and_out_in_their_order_with_their_ids(bahdanau: Run, done: Callable[..., list[str]]) -> None:
    given = [{"id": f"n{n}", "text": text, "label": "not read"} for n, text in enumerate(TEXTS)]
    del given[7]["id"]
    found = [json.loads(line) for line in done(bahdanau, given)]
    assert [one.get("id") for one in found] == [one.get("id") for one in given]
    assert [(one["line"], one["source"]) for one in found] == list(enumerate(TEXTS))
    plain = done(bahdanau, TEXTS, "out.txt", "in.txt")
    assert [one["translation"] for one in found] == plain
    assert done(bahdanau, given, "out.txt") == plain
    assert [json.loads(line) for line in done(bahdanau, given, None)] == found
    assert [json.loads(line)["translation"] for line in done(bahdanau, TEXTS, "a.jsonl", "in.txt")] == plain
    two = [json.loads(line) for line in done(bahdanau, given[:3], n_best=2)]
    assert [one["id"] for one in two] == ["n0", "n0", "n1", "n1", "n2", "n2"]


def test_pairs_and_questions_are_what_the_server_takes(
    pairs: Run, tmp_path: Path, done: Callable[..., list[str]]
) -> None:
    [said] = done(pairs, [{"text": "the film was\nsad", "text_pair": "nice"}])
    right = load_predictor(pairs, "cpu").classify("the film was sad", "nice")
    assert json.loads(said)["label"] == right.label
    assert json.loads(said)["probability"] == pytest.approx(right.classes[0][1])
    with pytest.raises(InputError, match="line 1 has 1 text; this model reads two"):
        done(pairs, [{"text": "alone"}])

    data = squad(tmp_path / "squad.json", [[question(random.Random(n))] for n in range(30)])
    run = trained_bert(tmp_path / "run", "answer", {"train": data, "held_out_size": 5}, train={"max_epochs": 1})
    context = "a\tlong  story:\nAnna lives in Seoul"
    [said] = done(run, [{"id": 5, "question": "where?", "context": context}])
    right = load_predictor(run, "cpu").answer("where?", context).answer
    assert (json.loads(said)["id"], json.loads(said)["start"]) == (5, right.start)
    assert json.loads(said)["answer"] == context[right.start : right.end]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("{", "line 3: this is not JSON"),
        ("", "line 3: this is not JSON"),
        ("[" * 100_000, "line 3: this is not JSON"),
        ("[]", r"line 3: expected an object, .* but '\[\]' came"),
        ({"txet": "a"}, """line 3: there is no "text"; the object has: 'txet'"""),
        ({"text": 5}, 'line 3: "text" must be a text, but int came'),
        ({"text": None}, 'line 3: "text" must be a text, but NoneType came'),
        ({"text": "a\ud800"}, 'line 3: "text" has half of a surrogate pair at position 1'),
        ({"text": "a", "beam_size": 3}, 'line 3: "beam_size"'),
    ],
)
def test_a_bad_object_is_told_by_its_line_or_skipped(
    bad: Any, told: str, bahdanau: Run, done: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [{"text": text} for text in TEXTS[:5]]
    given[2] = bad
    with pytest.raises(InputError, match=told):
        done(bahdanau, given)
    assert [json.loads(line)["line"] for line in done(bahdanau, given, skip_invalid=True)] == [0, 1, 3, 4]
    assert done(bahdanau, given, "out.txt", skip_invalid=True)[2] == ""


def test_gzipped_and_large_it_streams(
    bahdanau: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: Callable[..., list[str]]
) -> None:
    """Never more than a window is read ahead of what is written."""
    monkeypatch.setattr(line_io, "LINES_PER_CHUNK", 8)
    path, read, ahead = tmp_path / "in.jsonl.gz", [0], []
    path.write_bytes(gzip.compress("".join(f'{{"text": "{t}"}}\n' for t in TEXTS).encode()))
    inside = line_io.decode_lines

    def counted(*given: Any, **options: Any) -> Any:
        for line in inside(*given, **options):
            read[0] += 1
            yield line

    class Counted(resumable_output.ResumableOutput):
        count = 0

        def write(self, line: str) -> None:
            self.count += 1
            ahead.append(read[0] - self.count)
            super().write(line)

    monkeypatch.setattr(line_io, "decode_lines", counted)
    monkeypatch.setattr(resumable_output, "ResumableOutput", Counted)
    batch_inference.run_inference(
        InferenceJob(bahdanau, TranslationOptions(beam_size=1), device="cpu"), str(path), tmp_path / "out.jsonl"
    )
    assert (len(ahead), max(ahead)) == (41, 7)


def test_what_is_told_while_it_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.ProgressMeter() as plain:
        plain.update(1000, 0.1)
        for second in range(1, 71):
            now[0] = float(second)
            plain.update(1000 + 100 * second, 0.1 + 0.01 * second)
        plain.finish(8000)
    assert capsys.readouterr().err.splitlines() == [
        "resuming after 1,000 lines",
        "2,000 lines · 100 a second · 20% · 1:20 left",
        "5,000 lines · 100 a second · 50% · 0:50 left",
        "8,000 lines · 100 a second · 80% · 0:20 left",
        "8,000 lines, 7,000 of them in 1:10",
    ]
    with progress.ProgressMeter() as short:
        short.update(0, None)
        short.finish(10)
    assert capsys.readouterr().err == ""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress.ProgressMeter() as bar:
        bar.update(0, 0.0)
        now[0] += 2
        bar.update(3, 0.25)
        bar.print_line("line 3: cut off at the length limit")
        bar.finish(12)
    assert "3 lines · 1.5 a second · 25% · 0:06 left" in screen.getvalue()
    assert "line 3: cut off" in screen.getvalue()


def test_a_command_that_is_killed_goes_on_to_the_same_lines(bahdanau: Run, tmp_path: Path) -> None:
    texts = [TEXTS[n % 41] for n in range(5000)]
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    command = [sys.executable, "-m", "jumok", "run", str(bahdanau.folder), "in.txt", "--beam-size", "1"]
    options = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    state = tmp_path / "out.txt.part.json"
    with subprocess.Popen([*command, "--out", "out.txt"], **options) as process:
        for _ in range(3000):
            if state.is_file() and json.loads(state.read_text())["num_inputs"]:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out.txt").exists()
    noted = json.loads(state.read_text())["num_inputs"]
    job = InferenceJob(bahdanau, TranslationOptions(beam_size=1), device="cpu")
    other = InferenceJob(bahdanau, TranslationOptions(beam_size=2), device="cpu")
    with pytest.raises(InputError, match=r"--beam-size: 1 before, 2 now.*--overwrite"):
        batch_inference.run_inference(other, str(tmp_path / "in.txt"), tmp_path / "out.txt")
    asked: list[int] = []
    inside = batch_inference.InferenceWorker.predict_lines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            batch_inference.InferenceWorker, "predict_lines", lambda *given: (asked.append(given[2]), inside(*given))[1]
        )
        batch_inference.run_inference(job, str(tmp_path / "in.txt"), tmp_path / "out.txt")
    assert noted % 1024 == 0
    assert asked == list(range(noted, 5000, 1024))
    batch_inference.run_inference(job, str(tmp_path / "in.txt"), tmp_path / "whole.txt")
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()
    assert (tmp_path / "out.txt").read_bytes().count(b"\n") == 5000


def test_an_engine_that_is_not_there_is_told(bahdanau: Run, done: Callable[..., list[str]]) -> None:
    with pytest.raises(InputError, match="--engine jax: it is one of torch, ctranslate2, onnx, ray"):
        done(bahdanau, [], engine="jax")


def test_another_engine_says_the_same_and_is_another_job(
    transformer: Run, tmp_path: Path, done: Callable[..., list[str]]
) -> None:
    pytest.importorskip("ctranslate2")
    given = [{"id": n, "text": text} for n, text in enumerate(TEXTS[:5])]
    found = [json.loads(line) for line in done(transformer, given, engine="ctranslate2")]
    assert [(one["id"], one["source"]) for one in found] == list(enumerate(TEXTS[:5]))
    with pytest.raises(InputError, match="line 4: this is not JSON"):
        done(transformer, [*given[:3], "{", "{"], "b.txt", "in.jsonl", engine="ctranslate2")
    search = TranslationOptions()
    jobs = [
        InferenceJob(transformer, search, engine=name).resume_settings() for name in ("torch", "ray", "ctranslate2")
    ]
    assert jobs[0] == jobs[1] != jobs[2]


def test_ray_takes_files_that_machines_can_read_in_parts(bahdanau: Run, tmp_path: Path) -> None:
    job = InferenceJob(bahdanau, TranslationOptions(), engine="ray", device="cpu")
    for given in ("a text", None, str(tmp_path / "in.txt.gz")):
        (tmp_path / "in.txt.gz").write_bytes(gzip.compress(b"a\n"))
        with pytest.raises(InputError, match="--engine ray needs an uncompressed file"):
            batch_inference.run_inference(job, given, tmp_path / "out.txt")
    assert not list(tmp_path.glob("out*"))


def test_without_ray_the_command_that_installs_it_is_told(
    bahdanau: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "in.txt").write_text("a\n")
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[ray\]"'):
        batch_inference.run_inference(
            InferenceJob(bahdanau, TranslationOptions(), engine="ray"), str(tmp_path / "in.txt"), None
        )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    r"ignore:`use_\w+` is deprecated:DeprecationWarning",  # Ray's own, of its own settings
    "ignore::ResourceWarning",  # its log files, which it leaves to the end of the process
)
def test_on_ray_the_same_lines_in_the_same_order(
    bahdanau: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: Callable[..., list[str]]
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(line_io, "LINES_PER_CHUNK", 32)
    given: list[Any] = [{"id": n, "text": TEXTS[n % 41]} for n in range(3 * 32 + 5)]
    given[70] = "{"
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        found = done(bahdanau, given, "ray.jsonl", engine="ray", skip_invalid=True)
        with pytest.raises(InputError, match="line 71: this is not JSON"):
            done(bahdanau, given, "goes_on.jsonl", engine="ray")
        assert json.loads((tmp_path / "goes_on.jsonl.part.json").read_text())["num_inputs"] == 64
        given[70] = {"text": "mended"}
        mended = done(bahdanau, given, "goes_on.jsonl", engine="ray")
    finally:
        ray.shutdown()
    assert [json.loads(line)["id"] for line in found] == [n for n in range(3 * 32 + 5) if n != 70]
    assert mended == done(bahdanau, given, "torch.jsonl")
    del mended[70]
    words = [[json.loads(line)["translation"] for line in some] for some in (found, mended)]
    assert words[0] == words[1]  # the last digits may differ: a window with a bad line is divided
