"""Output that is resumed after an error, a kill, or with other inputs and settings."""

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jumok.errors import InputError
from jumok.inference import resumable_output
from jumok.inference.resumable_output import open_resumable_output

pytestmark = pytest.mark.long


LINES = [f"line {n} " + "abc" * (n % 7) for n in range(997)]
SETTINGS = {"run": "0f", "--beam-size": 4}


def iter_chunks(lines: list[str] = LINES, size: int = 31) -> Iterator[list[str]]:
    for start in range(0, len(lines), size):
        yield lines[start : start + size]


def predict_lines(line: str) -> list[str]:
    """Return zero, one or two lines, so that the output does not have as many lines as the input."""
    return [f"{line.upper()} {part}" for part in range(len(line) % 3)]


def write_output(path: Path, lines: list[str] = LINES, *, stop: int | None = None, **settings: object) -> list[int]:
    """Write the remaining output, up to the input ``stop``. Returns the first number of each chunk."""
    first_numbers = []
    with open_resumable_output(path, {**SETTINGS, **settings}) as output:
        for first, chunk in output.iter_remaining(iter_chunks(lines)):
            first_numbers.append(first)
            for number, line in enumerate(chunk, first):
                if number == stop:
                    raise InputError("stop")
                for output_line in predict_lines(line):
                    output.write(output_line)
    return first_numbers


EXPECTED = "".join(f"{output_line}\n" for line in LINES for output_line in predict_lines(line))


def test_a_complete_output_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.txt"
    for _ in range(2):
        assert write_output(path)[0] == 0
        assert path.read_text() == EXPECTED
        assert os.listdir(path.parent) == ["out.txt"]


def test_an_error_is_resumed_after_the_last_complete_chunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.txt"
    path.write_text("from before")
    with pytest.raises(InputError, match="stop"):
        write_output(path, stop=70)
    assert capsys.readouterr().err == "62 lines are done; the same command resumes after them\n"
    assert path.read_text() == "from before"
    assert EXPECTED.startswith((tmp_path / "out.txt.part").read_text())
    assert write_output(path)[0] == 62
    assert path.read_text() == EXPECTED
    assert os.listdir(tmp_path) == ["out.txt"]


def test_an_error_in_the_first_chunk_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stop"):
        write_output(tmp_path / "out.txt", stop=30)
    assert os.listdir(tmp_path) == []


def kill_after_calls(number: int) -> None:
    """Kill this process at its next call or return of this number."""
    remaining = iter(range(number))

    def count(*_: object) -> None:
        if next(remaining, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_kill_at_any_moment_is_resumed_with_identical_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_output, "SAVE_INTERVAL_SECONDS", 0.0)
    path, part = tmp_path / "out.txt", tmp_path / "out.txt.part"
    rng, num_kills, num_saved = random.Random(1), 0, 0
    while not path.exists():
        num_calls = rng.randrange(10_000)  # a whole run has about 28,000
        if (child := os.fork()) == 0:
            kill_after_calls(num_calls)
            write_output(path)
            os._exit(0)
        num_kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        if part.exists() and not path.exists():
            complete_lines = part.read_text().rpartition("\n")[0]
            assert EXPECTED.startswith(complete_lines)  # complete lines up to the last newline
            state = tmp_path / "out.txt.part.json"
            num_done = json.loads(state.read_text())["num_inputs"] if state.exists() else 0
            assert num_done >= num_saved
            num_saved = num_done
    assert num_kills > 3
    assert path.read_text() == EXPECTED
    write_output(path)  # files left behind by the last kill do no harm
    assert sorted(os.listdir(tmp_path)) == ["out.txt"]


def test_changed_settings_or_inputs_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with pytest.raises(InputError, match="stop"):
        write_output(path, stop=70)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    other = [LINES[0], "another", *LINES[2:]]
    for message, call in {
        r"--beam-size: 4 before, 5 now": lambda: write_output(path, **{"--beam-size": 5}),
        r"the run is another one, or was trained further": lambda: write_output(path, run="10"),
        r"the first 62 lines of the input have changed": lambda: write_output(path, other),
        r"the input now has 40 lines, but 62 are done": lambda: write_output(path, LINES[:40]),
    }.items():
        with pytest.raises(InputError, match=rf"out.txt.part cannot be resumed .*{message}.*--overwrite .*--out"):
            call()
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files
    assert write_output(path, [*LINES, "more"])[0] == 62  # the first 62 lines are equal
    assert path.read_text().startswith(EXPECTED)


def test_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with pytest.raises(InputError, match="stop"):
        write_output(path, stop=70)
    with open_resumable_output(path, {"other": 1}, overwrite=True) as output:
        assert [first for first, _ in output.iter_remaining(iter_chunks(["a", "b"]))] == [0]
        output.write("x")
    assert path.read_text() == "x\n"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_a_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.txt.part").write_text("foreign")
    with pytest.raises(InputError, match="not from `jumok run`"):
        write_output(tmp_path / "out.txt")
    assert (tmp_path / "out.txt.part").read_text() == "foreign"


def test_two_processes_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with open_resumable_output(path, SETTINGS), pytest.raises(InputError, match="another process is writing"):
        write_output(path)
    assert path.read_text() == ""


def test_special_files_are_written_immediately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_output(Path("/dev/null"))[:2] == [0, 31]
    with open_resumable_output(None, {}) as output:
        for _, lines in output.iter_remaining(iter_chunks(["a", "b"])):
            output.write(lines[0])
            assert capsys.readouterr().out == "a\n"
