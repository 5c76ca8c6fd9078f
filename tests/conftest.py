"""What all tests share: the same random numbers every time, and no GPU test without a GPU."""

import pytest
import torch

from jumok.attention import chunks

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever works some rows at a time takes one row at a time, however small it is."""
    monkeypatch.setattr(chunks, "AT_ONCE", 1)
