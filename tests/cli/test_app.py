"""The commands as users type them, typos included."""

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


class Said(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def jumok(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs a command in this process, in a folder of its own."""
    monkeypatch.chdir(home)

    def run(*words: str, stdin: str | bytes = "") -> Said:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["jumok", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Said(int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_train_run_eval_and_the_next_commands(jumok: Callable[..., Said], home: Path) -> None:
    said = jumok("train", "bahdanau", *SMALL)
    assert said.status == 0, said.err
    assert "jumok run runs/bahdanau" in said.out
    assert "jumok eval runs/bahdanau" in said.out

    text = jumok("run", "runs/bahdanau", "we walk to the market")
    assert text.status == 0
    assert len(text.out.splitlines()) == 1

    piped = jumok("run", "runs/bahdanau", "--alignments", stdin="we walk to the market\n\ni run\r\n")
    lines = piped.out.split("\n")
    assert len(lines) == 4
    assert lines[0].startswith(text.out.rstrip("\n") + " ||| ")
    assert lines[1] == " ||| "

    (home / "in.txt").write_bytes("we walk to the market\n\nword\u0085word\n".encode())
    file = jumok("run", "runs/bahdanau", "in.txt", "--out", "out.txt")
    assert file.out == ""
    assert (home / "out.txt").read_text(encoding="utf-8").split("\n")[0] == text.out.rstrip("\n")
    assert (home / "out.txt").read_bytes().count(b"\n") == 3

    scored = jumok("eval", "runs/bahdanau")
    assert scored.status == 0
    assert "alignment error rate" in scored.out
    assert json.loads((home / "runs/bahdanau/eval/test.json").read_text(encoding="utf-8"))["num_examples"] == 11

    again = jumok("train", "bahdanau", *SMALL)
    assert again.status == 0
    assert "already finished" in again.out


def test_a_map_as_a_picture_and_everything_as_json(jumok: Callable[..., Said], home: Path) -> None:
    jumok("train", "bahdanau", *SMALL)
    said = jumok("run", "runs/bahdanau", "we walk", "--json", "--attention-map", "map.png")
    assert json.loads(said.out)["source_words"] == ["we", "walk"]
    assert "map.png" in said.err
    assert (home / "map.png").read_bytes().startswith(b"\x89PNG")


def test_the_map_is_of_the_first_line_with_words(jumok: Callable[..., Said], home: Path) -> None:
    jumok("train", "bahdanau", *SMALL)
    said = jumok("run", "runs/bahdanau", "--attention-map", "map.svg", stdin="\nwe walk\nyou\n")
    assert said.status == 0
    assert len(said.out.splitlines()) == 3
    assert "<svg" in (home / "map.svg").read_text(encoding="utf-8")
    said = jumok("run", "runs/bahdanau", "--attention-map", "none.png", stdin="\n")
    assert (said.status, "none.png is not written: the input has no words" in said.err) == (0, True)
    said = jumok("run", "runs/bahdanau", "we walk", "--attention-map", "map.xyz")
    assert (said.status, said.out) == (1, "")
    assert "map.xyz: the name of an image ends in .png, .svg, .pdf" in said.err


def test_links_of_given_pairs_in_and_out_of_files(jumok: Callable[..., Said], home: Path) -> None:
    jumok("train", "bahdanau", *SMALL)
    lines = ["we walk to the market\t우리는 시장에 간다", "i run\t나는 달린다", "go\t가라"]
    (home / "pairs.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (home / "gold").write_text("0-0 4-1 1-2\n0-0 1-1\n0-0\n", encoding="utf-8")
    said = jumok("align", "runs/bahdanau", "pairs.tsv", "--gold-alignments", "gold")
    assert said.status == 0, said.err
    found = said.out.splitlines()
    assert [sorted(int(link.partition("-")[2]) for link in line.split()) for line in found] == [[0, 1, 2], [0, 1], [0]]
    assert "alignment view layer 0, mean of heads, " in said.err
    assert "links: alignment error rate 0." in said.err
    written = jumok(
        "align", "runs/bahdanau", "pairs.tsv", "--out", "links.txt", "--no-alignment-shift", "--alignment-head", "0"
    )
    assert written.out == ""
    plain = (home / "links.txt").read_text(encoding="utf-8").splitlines()
    typed = jumok(
        "align", "runs/bahdanau", "-", "--no-alignment-shift", "--alignment-head", "mean", stdin="\n".join(lines)
    )
    assert typed.out.splitlines() == plain

    (home / "bad.tsv").write_text("we walk\t\n" + lines[1] + "\n", encoding="utf-8")
    stopped = jumok("align", "runs/bahdanau", "bad.tsv", "--out", "bad.txt")
    assert (stopped.status, "bad.tsv:1: an empty target" in stopped.err) == (1, True)
    assert not (home / "bad.txt").exists()
    skipped = jumok("align", "runs/bahdanau", "bad.tsv", "--on-error", "skip", "--no-alignment-shift")
    assert skipped.out.splitlines() == ["", plain[1]]


def test_recipes_are_listed_shown_and_copied(jumok: Callable[..., Said], home: Path) -> None:
    listed = jumok("recipes").out
    assert "transformer/multi30k-en-de" in listed
    shown = jumok("recipes", "bahdanau").out
    assert "type: seq2seq" in shown
    assert jumok("recipes", "bahdanau", "--copy-to", "mine.yaml").status == 0
    assert (home / "mine.yaml").read_text(encoding="utf-8") == shown
    twice = jumok("recipes", "bahdanau", "--copy-to", "mine.yaml")
    assert twice.status == 1
    assert "already" in twice.err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["eval", "runs/bahdanau", "--split", "tset"], ["'tset' is not one of", "test", "valid"]),
        (["run", "runs/bahdanau", "--on-error", "go"], ["'go' is not one of", "stop", "skip"]),
        (["export", "runs/bahdanau", "there", "--format", "tf"], ["'tf' is not one of", "ctranslate2"]),
        (["run", "runs/bahdanau", "--beam", "3"], ["No such option: --beam", "--beam-size"]),
    ],
)
def test_an_invalid_option_names_the_valid_ones(words: list[str], parts: list[str], jumok: Callable[..., Said]) -> None:
    said = jumok(*words)
    assert said.status == 2
    for part in parts:
        assert part in said.err


@pytest.mark.parametrize(
    ("words", "told"),
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
def test_what_went_wrong_is_told_without_a_traceback(
    words: list[str], told: list[str], jumok: Callable[..., Said]
) -> None:
    jumok("train", "bahdanau", *SMALL)
    said = jumok(*words)
    assert said.status == 1
    assert said.err.startswith("jumok: ")
    assert "Traceback" not in said.err
    for part in told:
        assert part in said.err


@pytest.mark.filterwarnings("default")  # as for people
def test_a_header_that_is_taken_as_a_pair_is_told_in_a_line(jumok: Callable[..., Said], home: Path) -> None:
    lines = [f"we walk {n}, we run {n}" for n in range(70)]
    (home / "own.csv").write_text("\n".join(["en,ko", *lines]) + "\n", encoding="utf-8")
    words = [word for word in SMALL if not word.startswith("data.pairs")]
    said = jumok("train", "bahdanau", "data.train=own.csv", *words, "--out", "own")
    assert said.status == 0, said.err
    assert said.err.startswith("jumok: own.csv")
    assert "data.source=en data.target=ko" in said.err
    assert "Warning" not in said.err


def test_text_that_is_not_utf_8_is_told_by_its_line(jumok: Callable[..., Said], home: Path) -> None:
    jumok("train", "bahdanau", *SMALL)
    (home / "latin.txt").write_bytes("gut\nschön\n".encode("latin-1"))
    said = jumok("run", "runs/bahdanau", "latin.txt", "--out", "latin.out")
    assert "latin.txt:2" in said.err
    assert not (home / "latin.out").exists()


def test_lines_before_one_that_cannot_be_read_are_not_lost(jumok: Callable[..., Said], home: Path) -> None:
    jumok("train", "bahdanau", *SMALL)
    right = jumok("run", "runs/bahdanau", stdin="we walk\nyou dance\n").out
    bad = b"we walk\nyou dance\n\xff\nwe\n"
    (home / "bad.txt").write_bytes(bad)
    for said in (jumok("run", "runs/bahdanau", stdin=bad), jumok("run", "runs/bahdanau", "bad.txt")):
        assert (said.status, said.out) == (1, right)
        assert ":3: this is not UTF-8" in said.err


def test_a_training_that_is_refused_touches_nothing(jumok: Callable[..., Said], home: Path) -> None:
    from jumok.run import lock_run_folder

    jumok("train", "bahdanau", *SMALL, "--out", "busy")
    for path in (home / "busy/state").glob("*/state.json"):
        path.unlink()  # as if it had only begun
    files = [home / "busy/recipe.yaml", *(home / "busy").glob("tokenizer*.json")]
    before = [path.read_bytes() for path in files]
    with lock_run_folder(home / "busy"):
        said = jumok("train", "bahdanau", *SMALL, "train.seed=7", "tokenizer.lowercase=true", "--out", "busy")
    assert (said.status, "another process is training in busy" in said.err) == (1, True)
    assert [path.read_bytes() for path in files] == before
    (home / "foreign").mkdir()
    (home / "foreign/mine.txt").touch()
    assert "is not a run" in jumok("train", "bahdanau", *SMALL, "--out", "foreign").err
    assert [path.name for path in (home / "foreign").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_before_the_first_step_it_says_how_to_go_on(
    jumok: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("jumok.tasks.training.train", lambda *_: (signal.raise_signal(number), time.sleep(5)))
    said = jumok("train", "bahdanau", *SMALL, "--out", "stopped")
    assert (said.status, said.err) == (status, "jumok: stopped; run the same command again to resume\n")
    assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_while_it_waits_for_a_line_ends_it_quietly(jumok: Callable[..., Said], home: Path) -> None:
    jumok("train", "bahdanau", *SMALL)
    words = [sys.executable, "-m", "jumok", "run", "runs/bahdanau"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, cwd=home, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"we walk\n")
        process.stdin.flush()
        process.stdout.readline()  # it answers, and waits for more
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        assert process.stderr is not None
        assert b"Fatal" not in process.stderr.read()
    assert process.returncode == 130


def test_a_terminated_training_saves_and_goes_on(tmp_path: Path) -> None:
    """The real thing: a process, a signal, its status, and the same command again."""
    words = [sys.executable, "-m", "jumok", "train", "bahdanau", *SMALL, "train.log_every=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    long = [*words, "train.max_steps=100000", "train.max_epochs=null"]
    with subprocess.Popen(long, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        metrics = tmp_path / "runs/bahdanau/metrics.jsonl"
        for _ in range(600):
            if metrics.is_file() and metrics.stat().st_size:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    steps = len(metrics.read_text().splitlines())
    assert steps
    more = [*words, f"train.max_steps={steps + 5}", "train.max_epochs=null"]
    done = subprocess.run(more, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Resuming after step" in done.stdout


def test_torchrun_trains_with_two_processes(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "jumok", "train"]
    done = subprocess.run(
        [sys.executable, *words, "bahdanau", *SMALL, "model.dropout=0", "--out", "two"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("jumok eval two") == 1  # one process talks
    lines = (tmp_path / "two" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert [event for event in events if event != "alarm"][-1] == "validation"  # it learned next to nothing
