"""After every test of capture, all functions of PyTorch must be restored."""

import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from jumok.look.capture import patching
from jumok.look.capture.observer import OBSERVERS
from jumok.look.capture.weight_tracking.weight_tracker import get_tracker

SDPA = F.scaled_dot_product_attention
FUNCTIONS = torch.softmax, torch.bmm, torch.baddbmm


@pytest.fixture(autouse=True)
def _everything_is_restored() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is SDPA
    assert (torch.softmax, torch.bmm, torch.baddbmm) == FUNCTIONS
    assert all(isinstance(function, types.BuiltinFunctionType) for function in (SDPA, *FUNCTIONS))
    assert not vars(Tensor).keys() & {"softmax", "log_softmax", "__matmul__", "matmul", "bmm"}
    assert not hasattr(torch.compile, "__jumok_original__")
    assert not hasattr(torch.einsum, "__jumok_original__")
    assert not module_hooks._has_any_global_hook()
    assert not get_tracker().is_active
    assert not get_tracker().tracked_weights
    assert _get_current_dispatch_mode() is None
    assert patching._PATCHED_SLOTS == {}
    assert OBSERVERS.get() == ()
