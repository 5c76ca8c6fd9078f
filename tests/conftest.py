"""What all tests share: the same random numbers every time, no GPU test without a GPU, and a real browser."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jumok.attention import chunking

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # the tests that need it say so; the others run without
    pass
else:  # the same examples in every run, however slow the machine
    settings.register_profile(
        "jumok",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("jumok")


sys.path.insert(0, str(Path(__file__).parent))  # for helper modules that several folders share

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a background job, and its children would be
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    # Modules and tests stay until the end; full garbage collections need not traverse them each time.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files that ``make quick`` leaves out: importing all takes half a minute."""
    if "not long" in config.option.markexpr and collection_path.name.startswith("test_"):
        return True if "pytest.mark.long" in collection_path.read_text(encoding="utf-8") else None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long files first: no process should wait for another one that runs a long file at the end.
    items.sort(key=lambda item: (item.path.name != "test_triton_interpreter.py", "long" not in item.keywords))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


# Tensors here are tiny: more threads would only wait for each other, and long on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUMOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever works some rows at a time takes one row at a time, however small it is."""
    monkeypatch.setattr(chunking, "MAX_CHUNK_ELEMENTS", 1)


HOW = "apt-get install chromium (or name one in JUMOK_CHROMIUM), and pip install playwright"
# No sandbox: tests often run as root, where there is none. The rest keeps a new profile from calling home.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run", "--disable-quic"]  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _chromium() -> str | None:
    named = os.environ.get("JUMOK_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One for all tests: there cannot be two in a process."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        pytest.skip(f"no playwright for Python: {HOW}")
    if (path := _chromium()) is None:
        pytest.skip(f"no Chromium was found: {HOW}")
    with sync_playwright() as started:
        running = started.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()
