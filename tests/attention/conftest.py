"""The oracle of the attention tests."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from jumok.attention import plan_cache
from jumok.attention.caching import BoundedCache

sys.path.insert(0, str(Path(__file__).parent))  # for what some tests share in a file of their own


def _plain(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None = None, bias: Tensor | float = 0.0
) -> Tensor:
    """Scaled dot-product attention as the formula says, with exp and a division; grouped heads repeated."""
    if query.dim() == 4 == key.dim() and 1 < key.shape[1] < query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    grown = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + bias).exp()
    if allowed is not None:
        grown = grown * allowed
    total = grown.sum(-1, keepdim=True)
    return (grown / total.where(total > 0, 1)) @ value


@pytest.fixture(scope="session")
def plain() -> Callable[..., Tensor]:
    """``plain(query, key, value, allowed=None, bias=0)``, for numbers of ordinary size."""
    return _plain


@pytest.fixture(autouse=True)
def empty_plan_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may replace what the choice of a path depends on: no plan serves another test."""
    monkeypatch.setattr(plan_cache, "_unmasked_plans", BoundedCache(plan_cache.MAX_PLANS))
