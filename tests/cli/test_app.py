"""The commands as users type them, with valid and invalid arguments."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from jumok import cli

pytestmark = pytest.mark.long


SMALL = [
    "model.width=8",
    "model.embedding_width=8",
    "tokenizer.vocab_size=400",
    "data.builtin_size=60",
    "data.held_out_size=11",
]
SMALL += [
    "train.batch_tokens=256",
    "train.max_steps=3",
    "train.device=cpu",
    "train.average_checkpoints=0",
    "train.tensorboard=false",
]


class CommandResult(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def run_command(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CommandResult]:
    """Run a command in this process, in its own folder."""
    monkeypatch.chdir(home)

    def run(*words: str, stdin: str | bytes = "") -> CommandResult:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["jumok", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return CommandResult(int(exit_info.value.code or 0), *capsys.readouterr())

    return run


def test_train_run_and_eval(run_command: Callable[..., CommandResult], home: Path) -> None:
    result = run_command("train", "bahdanau", *SMALL)
    assert result.status == 0, result.err
    assert "jumok run runs/bahdanau" in result.out
    assert "jumok eval runs/bahdanau" in result.out

    result = run_command("run", "runs/bahdanau", "we walk to the market")
    assert result.status == 0
    assert len(result.out.splitlines()) == 1

    piped = run_command("run", "runs/bahdanau", "--alignments", stdin="we walk to the market\n\ni run\r\n")
    lines = piped.out.split("\n")
    assert len(lines) == 4
    assert lines[0].startswith(result.out.rstrip("\n") + " ||| ")
    assert lines[1] == " ||| "

    (home / "in.txt").write_bytes("we walk to the market\n\nword\u0085word\n".encode())
    file = run_command("run", "runs/bahdanau", "in.txt", "--out", "out.txt")
    assert file.out == ""
    assert (home / "out.txt").read_text(encoding="utf-8").split("\n")[0] == result.out.rstrip("\n")
    assert (home / "out.txt").read_bytes().count(b"\n") == 3

    evaluation = run_command("eval", "runs/bahdanau")
    assert evaluation.status == 0
    assert "alignment error rate" in evaluation.out
    assert json.loads((home / "runs/bahdanau/eval/test.json").read_text(encoding="utf-8"))["num_examples"] == 11

    again = run_command("train", "bahdanau", *SMALL)
    assert again.status == 0
    assert "already finished" in again.out


def test_attention_map_and_json(run_command: Callable[..., CommandResult], home: Path) -> None:
    run_command("train", "bahdanau", *SMALL)
    result = run_command("run", "runs/bahdanau", "we walk", "--json", "--attention-map", "map.png")
    assert json.loads(result.out)["source_words"] == ["we", "walk"]
    assert "map.png" in result.err
    assert (home / "map.png").read_bytes().startswith(b"\x89PNG")


def test_the_attention_map_shows_the_first_line_with_words(
    run_command: Callable[..., CommandResult], home: Path
) -> None:
    run_command("train", "bahdanau", *SMALL)
    result = run_command("run", "runs/bahdanau", "--attention-map", "map.svg", stdin="\nwe walk\nyou\n")
    assert result.status == 0
    assert len(result.out.splitlines()) == 3
    assert "<svg" in (home / "map.svg").read_text(encoding="utf-8")
    result = run_command("run", "runs/bahdanau", "--attention-map", "none.png", stdin="\n")
    assert (result.status, "none.png is not written: the input has no words" in result.err) == (0, True)
    result = run_command("run", "runs/bahdanau", "we walk", "--attention-map", "map.xyz")
    assert (result.status, result.out) == (1, "")
    assert "map.xyz: the name of an image ends in .png, .svg, .pdf" in result.err


def test_align(run_command: Callable[..., CommandResult], home: Path) -> None:
    run_command("train", "bahdanau", *SMALL)
    lines = ["we walk to the market\t우리는 시장에 간다", "i run\t나는 달린다", "go\t가라"]
    (home / "pairs.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (home / "gold").write_text("0-0 4-1 1-2\n0-0 1-1\n0-0\n", encoding="utf-8")
    result = run_command("align", "runs/bahdanau", "pairs.tsv", "--gold-alignments", "gold")
    assert result.status == 0, result.err
    alignments = result.out.splitlines()
    assert [sorted(int(link.partition("-")[2]) for link in line.split()) for line in alignments] == [
        [0, 1, 2],
        [0, 1],
        [0],
    ]
    assert "alignment view layer 0, mean of heads, " in result.err
    assert "links: alignment error rate 0." in result.err
    to_file = run_command(
        "align", "runs/bahdanau", "pairs.tsv", "--out", "links.txt", "--no-alignment-shift", "--alignment-head", "0"
    )
    assert to_file.out == ""
    expected = (home / "links.txt").read_text(encoding="utf-8").splitlines()
    from_stdin = run_command(
        "align", "runs/bahdanau", "-", "--no-alignment-shift", "--alignment-head", "mean", stdin="\n".join(lines)
    )
    assert from_stdin.out.splitlines() == expected

    (home / "bad.tsv").write_text("we walk\t\n" + lines[1] + "\n", encoding="utf-8")
    stopped = run_command("align", "runs/bahdanau", "bad.tsv", "--out", "bad.txt")
    assert (stopped.status, "bad.tsv:1: an empty target" in stopped.err) == (1, True)
    assert not (home / "bad.txt").exists()
    skipped = run_command("align", "runs/bahdanau", "bad.tsv", "--on-error", "skip", "--no-alignment-shift")
    assert skipped.out.splitlines() == ["", expected[1]]


def test_recipes(run_command: Callable[..., CommandResult], home: Path) -> None:
    recipe_list = run_command("recipes").out
    assert "transformer/multi30k-en-de" in recipe_list
    recipe_text = run_command("recipes", "bahdanau").out
    assert "type: seq2seq" in recipe_text
    assert run_command("recipes", "bahdanau", "--copy-to", "mine.yaml").status == 0
    assert (home / "mine.yaml").read_text(encoding="utf-8") == recipe_text
    second = run_command("recipes", "bahdanau", "--copy-to", "mine.yaml")
    assert second.status == 1
    assert "already" in second.err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["eval", "runs/bahdanau", "--split", "tset"], ["'tset' is not one of", "test", "valid"]),
        (["run", "runs/bahdanau", "--on-error", "go"], ["'go' is not one of", "stop", "skip"]),
        (["export", "runs/bahdanau", "there", "--format", "tf"], ["'tf' is not one of", "ctranslate2"]),
        (["run", "runs/bahdanau", "--beam", "3"], ["No such option: --beam", "--beam-size"]),
    ],
)
def test_an_invalid_option_names_the_valid_ones(
    words: list[str], parts: list[str], run_command: Callable[..., CommandResult]
) -> None:
    result = run_command(*words)
    assert result.status == 2
    for part in parts:
        assert part in result.err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "bahdnau"], ["no recipe 'bahdnau'", "did you mean bahdanau"]),
        (["train", "bahdanau", "model.widht=8"], ["model.widht", "did you mean model.width?"]),
        (["train", "bahdanau", "data.train=nothing.tsv", "--out", "runs/x"], ["nothing.tsv"]),
        (["run", "runs/nothing", "text"], ["no run runs/nothing"]),
        (["run", "runs/bahdanau", "missing.txt"], ["no file missing.txt"]),
        (["run", "runs/bahdanau", "text", "--sample", "--beam-size", "3"], ["--sample", "--beam-size"]),
        (["eval", "runs/bahdanau", "--faithfulness"], ["--faithfulness", "self-attentive", "hierarchical"]),
        (["compare", "runs/bahdanau"], ["two or more"]),
        (["export", "runs/bahdanau", "there", "--format", "hf"], ["Transformer"]),
        (["data", "get", "multi30"], ["multi30k"]),
        (["align", "runs/bahdanau", "missing.tsv"], ["missing.tsv"]),
        (["align", "runs/bahdanau", "-", "--alignment-layer", "top"], ["--alignment-layer top", "auto"]),
        (["align", "runs/bahdanau", "-", "--symmetrization", "union"], ["--reverse-run"]),
        (["align", "runs/bahdanau", "-"], ["no pairs"]),
    ],
)
def test_errors_have_no_traceback(
    words: list[str], parts: list[str], run_command: Callable[..., CommandResult]
) -> None:
    run_command("train", "bahdanau", *SMALL)
    result = run_command(*words)
    assert result.status == 1
    assert result.err.startswith("jumok: ")
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err


@pytest.mark.filterwarnings("default")  # as outside of tests
def test_a_warning_is_one_line(run_command: Callable[..., CommandResult], home: Path) -> None:
    lines = [f"we walk {n}, we run {n}" for n in range(70)]
    (home / "own.csv").write_text("\n".join(["en,ko", *lines]) + "\n", encoding="utf-8")
    words = [word for word in SMALL if not word.startswith("data.pairs")]
    result = run_command("train", "bahdanau", "data.train=own.csv", *words, "--out", "own")
    assert result.status == 0, result.err
    assert result.err.startswith("jumok: own.csv")
    assert "data.source=en data.target=ko" in result.err
    assert "Warning" not in result.err


def test_invalid_utf_8_is_reported_with_its_line(run_command: Callable[..., CommandResult], home: Path) -> None:
    run_command("train", "bahdanau", *SMALL)
    (home / "latin.txt").write_bytes("gut\nschön\n".encode("latin-1"))
    result = run_command("run", "runs/bahdanau", "latin.txt", "--out", "latin.out")
    assert "latin.txt:2" in result.err
    assert not (home / "latin.out").exists()


def test_lines_before_an_invalid_line_are_predicted(run_command: Callable[..., CommandResult], home: Path) -> None:
    run_command("train", "bahdanau", *SMALL)
    expected = run_command("run", "runs/bahdanau", stdin="we walk\nyou dance\n").out
    bad = b"we walk\nyou dance\n\xff\nwe\n"
    (home / "bad.txt").write_bytes(bad)
    for result in (run_command("run", "runs/bahdanau", stdin=bad), run_command("run", "runs/bahdanau", "bad.txt")):
        assert (result.status, result.out) == (1, expected)
        assert ":3: this is not UTF-8" in result.err


def test_a_rejected_training_changes_no_file(run_command: Callable[..., CommandResult], home: Path) -> None:
    from jumok.run import lock_run_folder

    run_command("train", "bahdanau", *SMALL, "--out", "busy")
    for path in (home / "busy/state").glob("*/state.json"):
        path.unlink()  # as if training had just started
    files = [home / "busy/recipe.yaml", *(home / "busy").glob("tokenizer*.json")]
    contents = [path.read_bytes() for path in files]
    with lock_run_folder(home / "busy"):
        result = run_command("train", "bahdanau", *SMALL, "train.seed=7", "tokenizer.lowercase=true", "--out", "busy")
    assert (result.status, "another process is training in busy" in result.err) == (1, True)
    assert [path.read_bytes() for path in files] == contents
    (home / "foreign").mkdir()
    (home / "foreign/mine.txt").touch()
    assert "is not a run" in run_command("train", "bahdanau", *SMALL, "--out", "foreign").err
    assert [path.name for path in (home / "foreign").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("signal_number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_signal_before_the_first_step(
    run_command: Callable[..., CommandResult], monkeypatch: pytest.MonkeyPatch, signal_number: int, status: int
) -> None:

    contents = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("jumok.tasks.training.train", lambda *_: (signal.raise_signal(signal_number), time.sleep(5)))
    result = run_command("train", "bahdanau", *SMALL, "--out", "stopped")
    assert (result.status, result.err) == (status, "jumok: stopped; run the same command again to resume\n")
    assert signal.getsignal(signal.SIGTERM) == contents


def test_ctrl_c_while_waiting_for_input(run_command: Callable[..., CommandResult], home: Path) -> None:
    run_command("train", "bahdanau", *SMALL)
    words = [sys.executable, "-m", "jumok", "run", "runs/bahdanau"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, cwd=home, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"we walk\n")
        process.stdin.flush()
        process.stdout.readline()  # it predicts the line and waits for more
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        assert process.stderr is not None
        assert b"Fatal" not in process.stderr.read()
    assert process.returncode == 130


def test_a_terminated_training_can_be_resumed(run_command: Callable[..., CommandResult], home: Path) -> None:
    """A separate process receives a signal. Then the same command resumes the training."""
    words = ["train", "bahdanau", *SMALL, "train.log_every=1", "train.max_epochs=null", "--out", "terminated"]
    long_command = [sys.executable, "-m", "jumok", *words, "train.max_steps=100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(long_command, cwd=home, env=environment, stdout=subprocess.PIPE, text=True) as process:
        metrics = home / "terminated/metrics.jsonl"
        for _ in range(600):
            if metrics.is_file() and metrics.stat().st_size:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    steps = len(metrics.read_text().splitlines())
    assert steps
    result = run_command(*words, f"train.max_steps={steps + 5}")
    assert result.status == 0, result.err
    assert "Resuming after step" in result.out


def test_torchrun_trains_with_two_processes(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "jumok", "train"]
    process = subprocess.run(
        [sys.executable, *words, "bahdanau", *SMALL, "model.dropout=0", "--out", "two"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("jumok eval two") == 1  # only one process prints
    lines = (tmp_path / "two" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert [event for event in events if event != "alarm"][-1] == "validation"  # an alarm may follow
