"""The toy model and data are in a file of their own: the processes that tests start use them too."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _nobody_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is there for this machine anyway; only the power could take it."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
