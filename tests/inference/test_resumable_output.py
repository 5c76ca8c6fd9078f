"""An output that goes on where it stopped: stopped by an error, by a kill, with other input, elsewhere."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jumok.errors import InputError
from jumok.inference import resumable_output
from jumok.inference.resumable_output import open_resumable_output

LINES = [f"line {n} " + "abc" * (n % 7) for n in range(997)]
ASKED = {"run": "0f", "--beam-size": 4}


def windows(lines: list[str] = LINES, size: int = 31) -> Iterator[list[str]]:
    for at in range(0, len(lines), size):
        yield lines[at : at + size]


def answer(line: str) -> list[str]:
    """One line, none or two: the number of lines out tells nothing of that of lines in."""
    return [f"{line.upper()} {part}" for part in range(len(line) % 3)]


def work(path: Path, lines: list[str] = LINES, *, stop: int | None = None, **more: object) -> list[int]:
    """Answers all that is left, up to the input with the number ``stop``; the first number of each window."""
    firsts = []
    with open_resumable_output(path, {**ASKED, **more}) as output:
        for first, some in output.iter_remaining(windows(lines)):
            firsts.append(first)
            for number, line in enumerate(some, first):
                if number == stop:
                    raise InputError("stop")
                for said in answer(line):
                    output.write(said)
    return firsts


RIGHT = "".join(f"{said}\n" for line in LINES for said in answer(line))


def test_a_whole_output_leaves_nothing_beside_it_and_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.txt"
    for _ in range(2):
        assert work(path)[0] == 0
        assert path.read_text() == RIGHT
        assert os.listdir(path.parent) == ["out.txt"]


def test_after_an_error_it_goes_on_behind_the_last_whole_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.txt"
    path.write_text("from before")
    with pytest.raises(InputError, match="stop"):
        work(path, stop=70)
    assert capsys.readouterr().err == "62 lines are done; the same command resumes after them\n"
    assert path.read_text() == "from before"
    assert RIGHT.startswith((tmp_path / "out.txt.part").read_text())
    assert work(path)[0] == 62
    assert path.read_text() == RIGHT
    assert os.listdir(tmp_path) == ["out.txt"]


def test_an_error_before_anything_is_done_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stop"):
        work(tmp_path / "out.txt", stop=30)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_at_any_moment_nothing_is_lost_twice_or_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_output, "SAVE_INTERVAL_SECONDS", 0.0)
    path, part = tmp_path / "out.txt", tmp_path / "out.txt.part"
    chance, kills, kept = random.Random(1), 0, 0
    while not path.exists():
        if (child := os.fork()) == 0:
            work(path)
            os._exit(0)
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        if part.exists() and not path.exists():
            whole = part.read_text().rpartition("\n")[0]
            assert RIGHT.startswith(whole)  # lines of the first inputs, whole ones up to the last newline
            state = tmp_path / "out.txt.part.json"
            noted = json.loads(state.read_text())["num_inputs"] if state.exists() else 0
            assert noted >= kept
            kept = noted
    assert kills > 3
    assert path.read_text() == RIGHT
    work(path)  # and whatever the last kill left behind is no hindrance
    assert sorted(os.listdir(tmp_path)) == ["out.txt"]


def test_what_changed_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with pytest.raises(InputError, match="stop"):
        work(path, stop=70)
    files = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    other = [LINES[0], "another", *LINES[2:]]
    for told, call in {
        r"--beam-size: 4 before, 5 now": lambda: work(path, **{"--beam-size": 5}),
        r"the run is another one, or was trained further": lambda: work(path, run="10"),
        r"the first 62 lines of the input have changed": lambda: work(path, other),
        r"the input now has 40 lines, but 62 are done": lambda: work(path, LINES[:40]),
    }.items():
        with pytest.raises(InputError, match=rf"out.txt.part cannot be resumed .*{told}.*--overwrite .*--out"):
            call()
        assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == files
    assert work(path, [*LINES, "more"])[0] == 62  # what was done is the same
    assert path.read_text().startswith(RIGHT)


def test_overwrite_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with pytest.raises(InputError, match="stop"):
        work(path, stop=70)
    with open_resumable_output(path, {"other": 1}, overwrite=True) as output:
        assert [first for first, _ in output.iter_remaining(windows(["a", "b"]))] == [0]
        output.write("x")
    assert path.read_text() == "x\n"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.txt.part").write_text("mine")
    with pytest.raises(InputError, match="not from `jumok run`"):
        work(tmp_path / "out.txt")
    assert (tmp_path / "out.txt.part").read_text() == "mine"


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with open_resumable_output(path, ASKED), pytest.raises(InputError, match="another process is writing"):
        work(path)
    assert path.read_text() == ""


def test_what_is_no_file_is_written_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert work(Path("/dev/null"))[:2] == [0, 31]
    with open_resumable_output(None, {}) as output:
        for _, lines in output.iter_remaining(windows(["a", "b"])):
            output.write(lines[0])
            assert capsys.readouterr().out == "a\n"
