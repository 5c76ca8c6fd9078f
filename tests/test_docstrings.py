"""The examples in the docstrings of all modules."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import jumok
from jumok.attention import masks
from jumok.batches.speech import frames_as_tokens
from jumok.batches.tokens import BOS, Tokens
from jumok.models.transformer import TransformerConfig

pytestmark = pytest.mark.long


SOURCE = Path(jumok.__file__).parent
MODULES = [
    ".".join(("jumok", *path.relative_to(SOURCE).with_suffix("").parts))
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
# Names that examples use without importing them.
NAMES = {
    "torch": torch,
    "jumok": jumok,
    "masks": masks,
    "BOS": BOS,
    "Tokens": Tokens,
    "TransformerConfig": TransformerConfig,
    "frames": frames_as_tokens(torch.ones(2, 9, 5), (9, 4)),
}


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module), extraglobs=NAMES).failed == 0
