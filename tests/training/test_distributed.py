"""Two processes with gloo on a CPU, started by torchrun: the same numbers as one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_ranks import CASES, DATA
from training_toy import PointData, Toy, quick, read_metrics, read_state, tensors_equal, validate_toy

from jumok.training import TrainConfig, init_distributed, train

pytestmark = pytest.mark.long


SCRIPT = Path(__file__).with_name("training_ranks.py")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases. The last of them fails on purpose, in one process."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode != 0
    assert "an example of the second process is not well" in done.stderr, done.stderr
    assert (folder / "broken").exists(), done.stderr  # all cases before it are through
    return folder


def alone(folder: Path, settings: TrainConfig) -> None:
    train(
        Toy().double(),
        PointData(**DATA),
        settings,
        folder,
        validate=lambda model: validate_toy(model, PointData(**DATA)),
    )


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_two_processes_match_one_with_the_same_batch(two: Path, tmp_path: Path, case: str) -> None:
    alone(tmp_path, CASES[case])
    close(read_state(two / case), read_state(tmp_path))
    for ours, theirs in zip(read_metrics(two / case), read_metrics(tmp_path), strict=True):
        assert ours.pop("event") == theirs.pop("event")
        assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_resume_with_identical_results(two: Path, kind: str) -> None:
    a, b = read_state(two / kind), read_state(two / f"{kind} again")
    assert tensors_equal(*({n: x for n, x in s.items() if not n.startswith("best")} for s in (a, b)))


def test_one_process_resumes_a_run_of_two(two: Path, tmp_path: Path) -> None:
    alone(two / "half", quick())
    alone(tmp_path, quick())
    close(*({n: x for n, x in read_state(f).items() if not n.startswith("best")} for f in (two / "half", tmp_path)))


def test_a_signal_to_one_process_stops_both_at_the_same_step(two: Path) -> None:
    texts = {(two / f"interrupted {rank}").read_text() for rank in (0, 1)}
    (text,) = texts
    status, step = text.split()
    assert status == "143"
    assert int(step) % 4 == 0  # where they ask each other
    assert (two / "signal" / "state" / f"{int(step):08}").exists()


def test_both_processes_detect_divergence_in_one(two: Path) -> None:
    batch = sorted(PointData(**DATA).batches(0)[2].tolist())
    for rank in (0, 1):
        assert (two / f"diverged {rank}").read_text() == f"3 {batch}"


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with init_distributed("cpu") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
        assert ranks.all_reduce_max(3, -4) == [3, -4]
        assert not torch.distributed.is_initialized()
