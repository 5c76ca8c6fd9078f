"""Small trained runs, made by the helpers of the task tests."""

import sys
from pathlib import Path

import pytest

from jumok.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))

from translation_runs import train_run


@pytest.fixture(scope="session")
def bahdanau(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("runs") / "bahdanau", "bahdanau")


@pytest.fixture(scope="session")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("runs") / "transformer", "transformer")
