"""Ctrl-C and SIGTERM: saved, told, and gone on from."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from training_toy import PointData, Points, Toy, quick, read_metrics, read_state, tensors_equal, validate_toy

from jumok.training import TrainingInterrupted, ValidationReport, train
from jumok.training.signals import SignalHandler

pytestmark = pytest.mark.long


HANDLERS = (signal.SIGINT, signal.SIGTERM)


class Stopping(PointData):
    """Gets a signal while the batch of step ``at`` is made."""

    def __init__(self, at: int, number: int = signal.SIGTERM, times: int = 1) -> None:
        super().__init__()
        self.at, self.number, self.times, self.made = at, number, times, 0

    def collate(self, index: np.ndarray) -> Points:
        self.made += 1
        if self.made == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
        return super().collate(index)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_resumes_with_identical_results(tmp_path: Path, number: int, status: int) -> None:
    settings = quick(prefetch_batches=0, save_every=100, log_every=3)
    before = [signal.getsignal(handler) for handler in HANDLERS]
    with pytest.raises(TrainingInterrupted, match="after step 5; a checkpoint is saved") as stop:
        train(Toy(0.3), Stopping(5, number), settings, tmp_path / "broken")
    assert (stop.value.exit_status, stop.value.signal_number, stop.value.step) == (status, number, 5)
    assert [signal.getsignal(handler) for handler in HANDLERS] == before
    assert (tmp_path / "broken" / "state" / "00000005").exists()
    train(Toy(0.3, seed=4), PointData(), settings, tmp_path / "broken")
    train(Toy(0.3), PointData(), settings, tmp_path / "whole")
    assert read_metrics(tmp_path / "broken") == read_metrics(tmp_path / "whole")
    assert tensors_equal(read_state(tmp_path / "broken"), read_state(tmp_path / "whole"))


def test_an_interrupted_validation_is_repeated(tmp_path: Path) -> None:
    settings = quick(max_steps=6, validate_every=3, average_checkpoints=2)
    ended = []

    def slow(model: nn.Module) -> ValidationReport:
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append(True)
        return validate_toy(model)

    with pytest.raises(TrainingInterrupted, match="after step 3"):
        train(Toy(0.3), PointData(), settings, tmp_path / "broken", validate=slow)
    assert not ended
    assert not read_metrics(tmp_path / "broken", "validation")
    for folder in ("broken", "whole"):
        train(Toy(0.3), PointData(), settings, tmp_path / folder, validate=validate_toy)
    assert read_metrics(tmp_path / "broken") == read_metrics(tmp_path / "whole")
    assert tensors_equal(read_state(tmp_path / "broken"), read_state(tmp_path / "whole"))


def test_a_signal_during_validation_of_the_average(tmp_path: Path) -> None:
    settings = quick(max_steps=6, validate_every=3, average_checkpoints=2)
    calls = []

    def last_is_slow(model: nn.Module) -> ValidationReport:
        calls.append(True)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return validate_toy(model)

    with pytest.raises(TrainingInterrupted, match="after step 6"):
        train(Toy(0.3), PointData(), settings, tmp_path / "broken", validate=last_is_slow)
    for folder in ("broken", "whole"):
        train(Toy(0.3), PointData(), settings, tmp_path / folder, validate=validate_toy)
    assert read_metrics(tmp_path / "broken") == read_metrics(tmp_path / "whole")
    assert tensors_equal(read_state(tmp_path / "broken"), read_state(tmp_path / "whole"))


def test_a_second_ctrl_c_stops_immediately(tmp_path: Path) -> None:
    before = [signal.getsignal(handler) for handler in HANDLERS]
    with pytest.raises(KeyboardInterrupt):
        train(Toy(), Stopping(5, signal.SIGINT, times=2), quick(prefetch_batches=0, save_every=100), tmp_path)
    assert not (tmp_path / "state" / "00000005").exists()
    assert [signal.getsignal(handler) for handler in HANDLERS] == before


def test_handlers_are_restored_after_an_error_too() -> None:
    def mine(number: int, frame: object) -> None: ...

    old = signal.signal(signal.SIGTERM, mine)
    try:
        with SignalHandler():
            assert signal.getsignal(signal.SIGTERM) is not mine
        with pytest.raises(ZeroDivisionError), SignalHandler():
            _ = 1 // 0
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, old)


def test_another_thread_trains_without_handlers(tmp_path: Path) -> None:
    summaries = []
    thread = threading.Thread(target=lambda: summaries.append(train(Toy(), PointData(), quick(max_steps=3), tmp_path)))
    thread.start()
    thread.join()
    assert summaries[0].num_steps == 3
